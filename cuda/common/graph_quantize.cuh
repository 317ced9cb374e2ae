// Codes, scales and sources of block quantization in the graph, for graph_quantize.cu and round_blocks.cu. Formats are
// parameters, not constants.
#ifndef DW_GRAPH_QUANTIZE_CUH
#define DW_GRAPH_QUANTIZE_CUH

#include "graph_quantize_params.h"
#include "random_word.cuh"
#include "strided.cuh"

#define INFINITE 0x7f800000u
#define NOT_A_NUMBER 0x7fc00000u

// ---- formats -----------------------------------------------------------------------------------------------------

// The largest number, and the least normal one, as bits of an F32.
DEVICE unsigned largest_bits(const dw_code_format &f) {
    return (f.largest << (23 - f.fraction)) + ((unsigned)(127 - f.bias) << 23);
}
DEVICE unsigned least_normal(const dw_code_format &f) { return (unsigned)(127 - f.bias + 1) << 23; }

// The nearest code of a magnitude that is not above the largest number. The power of two that is added has the distance
// of neighbouring codes as its last place, so that the sum is rounded to a code and its low bits count codes.
DEVICE unsigned nearest_code(const dw_code_format &f, unsigned magnitude) {
    const int shift = 23 - f.fraction;
    const unsigned binade = max(magnitude & INFINITE, least_normal(f)), anchor = binade + ((unsigned)shift << 23);
    const unsigned sum = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), __uint_as_float(anchor)));
    return (sum + (binade >> shift) - (least_normal(f) >> shift)) & 0xff;
}

// The same by stochastic rounding: what is dropped, in units of 2^-32 of the distance of codes, plus a random word
// carries into the code.
DEVICE unsigned stochastic_code(const dw_code_format &f, unsigned magnitude, unsigned word) {
    const unsigned least = (unsigned)(127 - f.bias + 1), field = magnitude >> 23;
    const unsigned long long significand = (magnitude & 0x7fffffu) | (field ? 0x800000u : 0u);
    const unsigned from = max(field, 1u), normal = max(from, least), shift = normal - from + 23u - (unsigned)f.fraction;
    const unsigned long long kept = shift < 64 ? significand >> shift : 0,
                             dropped = shift < 64 ? significand - (kept << shift) : significand;
    const unsigned long long share = shift <= 32   ? dropped << (32 - shift)
                                     : shift < 96 ? dropped >> (shift - 32)
                                                  : 0;
    return (((normal - least) << f.fraction) + (unsigned)kept + (unsigned)((share + word) >> 32)) & 0xff;
}

DEVICE float code_value(const dw_code_format &f, unsigned code) {
    const unsigned magnitude = code & (f.sign - 1);
    const float quantum = __uint_as_float((unsigned)(128 - f.bias - f.fraction) << 23);
    unsigned bits = (magnitude << (23 - f.fraction)) + ((unsigned)(127 - f.bias) << 23);
    if (magnitude >> f.fraction == 0) bits = __float_as_uint((float)magnitude * quantum);
    if (magnitude > f.largest) bits = f.infinity && magnitude == f.infinity ? INFINITE : NOT_A_NUMBER;
    return __uint_as_float(code & f.sign ? bits | 0x80000000u : bits);
}

DEVICE dw_code_format e4m3() { return {3, 7, 0x80u, 0x7eu, 0x7fu, 0u}; }

// ---- scales ------------------------------------------------------------------------------------------------------

// A block's scale: its code, the number that it means, and the factor of elements, or of fp8-block what they are divided
// by. The factor of a block whose codes must be NaN is not read.
struct block_scale {
    unsigned code;
    float value, factor;
    bool is_nan;
};

DEVICE float scale_value(bool e8m0, unsigned code) {
    if (!e8m0) return code_value(e4m3(), code & 0x7f);
    return __uint_as_float(code == 0xff ? NOT_A_NUMBER : code ? code << 23 : 0x00400000u);
}

// `most`: bits of the block's largest magnitude; a NaN's are above infinity's. `rule`: of dw_graph_quantize_params.
DEVICE block_scale e8m0_scale(const dw_code_format &f, int rule, unsigned most) {
    const unsigned fraction = 0x7fffffu, largest = largest_bits(f);
    const unsigned carry = rule == 0 ? fraction - (largest & fraction) : rule == 1 ? 0 : fraction;
    const int exponent = (int)(largest >> 23) - 127;
    int code = (int)((most + carry) >> 23) - exponent;
    code = most > INFINITE ? 0xff : most == INFINITE ? (rule == 0 ? 254 : 255 - exponent) : max(code, 0);
    const unsigned factor = code < 254 ? (unsigned)(254 - code) << 23 : 0x00400000u;
    return {(unsigned)code, scale_value(true, code), __uint_as_float(factor), most > INFINITE};
}

DEVICE block_scale e4m3_scale(unsigned most, float tensor_scale) {
    const dw_code_format f = e4m3();
    const float wanted = __uint_as_float(most) / 6.f / tensor_scale, greatest = 3.402823466e38f;
    unsigned code = nearest_code(f, min(__float_as_uint(wanted) & 0x7fffffffu, largest_bits(f)));
    float factor = 1.f / tensor_scale / code_value(f, code);
    factor = code == 0 ? 0.f : factor < greatest ? factor : greatest;
    if (most >= INFINITE) code = 0x7f;
    return {code, scale_value(false, code), factor, most >= INFINITE};
}

// Of fp8-block. A scale of 0 gives zeros.
DEVICE block_scale f32_scale(unsigned most) {
    const float scale = most == INFINITE ? 1.329227996e36f : __uint_as_float(most) / 448.f; // 2^120
    return {0u, most > INFINITE ? __uint_as_float(NOT_A_NUMBER) : scale, scale > 0.f ? scale : __uint_as_float(INFINITE),
            most > INFINITE};
}

// The largest of all threads' numbers, in every thread of the block.
DEVICE unsigned most_of_block(unsigned x) {
    __shared__ unsigned warps[DW_GRAPH_QUANTIZE_THREADS / 32];
    x = __reduce_max_sync(0xffffffffu, x);
    __syncthreads(); // the numbers of the call before have been read
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    for (int i = 0; i < DW_GRAPH_QUANTIZE_THREADS / 32; i++) x = max(x, warps[i]);
    return x;
}

// dw_nvfp4_tensor_scale, and dw__quantize_whole_scale (kernel/quantization.h)
DEVICE float tensor_scale_of(const dw_graph_quantize_params &p) {
    const float amax = p.amax ? __uint_as_float(most_of_block(p.amax[threadIdx.x])) : 0.f;
    const float largest = p.whole ? __uint_as_float(largest_bits(p.format)) : 448.f * 6.f;
    return amax > 0.f ? fmaxf(amax / largest, 1.175494351e-38f) : 1.f;
}

#endif
