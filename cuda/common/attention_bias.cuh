// Reads the mask of all pairs that attention adds to its scaled scores. Defines: BIAS (0: there is none, 1: numbers of
// the elements' type, 2: bytes, of which 0 hides the pair), ELEMENT.
//
// Two adjacent keys of a query are a word of two elements; bytes are read as the elements 0 and -infinity. Words are
// read ahead of the GEMM that computes the scores and added when it is complete.
#ifndef DW_ATTENTION_BIAS_CUH
#define DW_ATTENTION_BIAS_CUH

#include "attention_params.h"
#include "sm90.cuh"

#ifndef BIAS
#define BIAS 0
#endif
#if BIAS

#define LOG2_E 1.4426950408889634f
#define ELEMENT_HIDES (ELEMENT ? 0xfc00u : 0xff80u) // -infinity

// The magnitude from which on F32's rounding of an LSE would show in the probabilities: masks have made such scores.
#define LARGE_LSE 0x1p11f

// The offset of a query's row.
DEVICE long long bias_line(const dw_attention_params &p, int batch, int head, int row) {
    return batch * p.bias.batch + head * p.bias.head + row * p.bias.row;
}

DEVICE uint32 bias_element(const dw_attention_params &p, long long at) {
#if BIAS == 1
    return ((const uint16 *)p.bias.data)[at];
#else
    return ((const uint8 *)p.bias.data)[at] ? 0u : ELEMENT_HIDES;
#endif
}

// Converts two adjacent bytes to elements.
DEVICE uint32 hidden_pair(uint32 bytes) {
    return (bytes & 0xff ? 0u : ELEMENT_HIDES) | (bytes & 0xff00 ? 0u : ELEMENT_HIDES << 16);
}

// Keys `key` (even) and `key` + 1 of a row; zeros past the last key.
DEVICE uint32 bias_pair(const dw_attention_params &p, long long line, int key, int rows_k) {
    if (p.bias_wide) {
        if (key >= rows_k) return 0;
#if BIAS == 1
        return *(const uint32 *)((const uint16 *)p.bias.data + line + key);
#else
        return hidden_pair(*(const uint16 *)((const uint8 *)p.bias.data + line + key));
#endif
    }
    uint32 word = 0;
    if (key < rows_k) word = bias_element(p, line + key * p.bias_key);
    if (key + 1 < rows_k) word |= bias_element(p, line + (key + 1) * p.bias_key) << 16;
    return word;
}

// Reads 32 keys from `key` on, four words for each lane of a quad. arrange_bias makes word i keys 8 i + 2 (lane % 4) and
// the next, as wgmma has its columns.
DEVICE void read_bias(const dw_attention_params &p, long long line, int key, int rows_k, uint32 *words) {
    int lane = lane_index() & 3;
    if (!p.bias_wide) {
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = bias_pair(p, line, key + 8 * i + 2 * lane, rows_k);
        return;
    }
    uint4 chunk = make_uint4(0, 0, 0, 0);
    int first = key + 8 * lane;
    if (first < rows_k) {
#if BIAS == 1
        chunk = *(const uint4 *)((const uint16 *)p.bias.data + line + first);
#else
        uint2 bytes = *(const uint2 *)((const uint8 *)p.bias.data + line + first);
        chunk = make_uint4(hidden_pair(bytes.x), hidden_pair(bytes.x >> 16), hidden_pair(bytes.y),
                           hidden_pair(bytes.y >> 16));
#endif
    }
    words[0] = chunk.x;
    words[1] = chunk.y;
    words[2] = chunk.z;
    words[3] = chunk.w;
}

// Transposes 8 x 8 elements: lane 4 r + c has columns 2 c and 2 c + 1 of row r, before and after.
DEVICE uint32 transpose_elements(uint32 word) {
    uint32 result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
    return result;
}

DEVICE void arrange_bias(const dw_attention_params &p, uint32 *words) {
    if (p.bias_wide) transpose_quad(words);
}

#endif
#endif
