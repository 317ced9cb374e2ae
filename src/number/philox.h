/* Philox4x32-10: counter-based random numbers (Salmon, Moraes, Dror, Shaw: "Parallel random
 * numbers: as easy as 1, 2, 3", SC'11). A number depends only on its key and its counter, so any
 * thread may compute any element, and backward recomputes the elements of forward.
 *
 * The operation `random_uniform`, and with it dropout and attention, uses this layout for element `index` of a tensor
 * (row-major order), a seed operand {seed0, seed1} and the attribute `stream`:
 *
 *     block   = index / 4                         one Philox call makes four elements
 *     key     = {low32(seed0), high32(seed0)}
 *     counter = {low32(block), low32(stream) ^ high32(block) << 20, low32(seed1), high32(seed1)}
 *     element = (output[index % 4] >> 8) * 2^-24  in [0, 1), exact in F32
 *
 * Streams below 2^20 over tensors of less than 2^46 elements never share a counter; neither do two
 * calls whose offsets (seed1) differ. */
#ifndef DW_PHILOX_H
#define DW_PHILOX_H

#include <stdint.h>

enum { DW_PHILOX_ROUNDS = 10 };

typedef struct dw__philox_words {
    uint32_t word[4];
} dw__philox_words;

/* The bijection, with the paper's multipliers and Weyl increments of the key. */
static inline dw__philox_words dw__philox(dw__philox_words counter, uint32_t key0, uint32_t key1) {
    dw__philox_words x = counter;
    for (int round = 0; round < DW_PHILOX_ROUNDS; round++) {
        uint64_t product0 = (uint64_t)0xD2511F53u * x.word[0];
        uint64_t product1 = (uint64_t)0xCD9E8D57u * x.word[2];
        dw__philox_words next = {{(uint32_t)(product1 >> 32) ^ x.word[1] ^ key0, (uint32_t)product1,
                                  (uint32_t)(product0 >> 32) ^ x.word[3] ^ key1,
                                  (uint32_t)product0}};
        x = next;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return x;
}

/* Counter of the block with elements 4*block .. 4*block+3. */
static inline dw__philox_words dw__philox_counter(int64_t seed1, int64_t stream, uint64_t block) {
    dw__philox_words counter = {{(uint32_t)block,
                                 (uint32_t)stream ^ ((uint32_t)(block >> 32) << 20),
                                 (uint32_t)seed1, (uint32_t)((uint64_t)seed1 >> 32)}};
    return counter;
}

/* Converts 32 random bits to a uniform F32 in [0, 1). It uses 24 bits, so that no rounding gives 1. */
static inline float dw__philox_to_uniform(uint32_t word) { return (float)(word >> 8) * 0x1p-24f; }

/* Computes elements 4*block .. 4*block+3. */
static inline void dw__philox_uniform4(int64_t seed0, int64_t seed1, int64_t stream, uint64_t block,
                                       float uniform[4]) {
    dw__philox_words bits = dw__philox(dw__philox_counter(seed1, stream, block), (uint32_t)seed0,
                                       (uint32_t)((uint64_t)seed0 >> 32));
    for (int i = 0; i < 4; i++) uniform[i] = dw__philox_to_uniform(bits.word[i]);
}

/* Computes element `index` alone. */
static inline float dw__philox_uniform(int64_t seed0, int64_t seed1, int64_t stream,
                                       uint64_t index) {
    float uniform[4];
    dw__philox_uniform4(seed0, seed1, stream, index / 4, uniform);
    return uniform[index % 4];
}

/* Computes elements first .. first+count-1. `first` need not be aligned. */
void dw__philox_fill(int64_t seed0, int64_t seed1, int64_t stream, uint64_t first, int64_t count,
                     float *out);

#endif
