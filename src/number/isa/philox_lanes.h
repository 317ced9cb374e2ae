/* Philox4x32-10 (number/philox.h) on DW_LANES counters at once. */
#ifndef DW_PHILOX_LANES_H
#define DW_PHILOX_LANES_H

#include "base/vector.h"
#include "number/philox.h"

/* Multiplies lanes to 64 bits and returns high and low words. x86 multiplies the even lanes of a vector; the
 * odd lanes are shifted into their place, and the halves are blended. */
static inline void dw__multiply_wide(vu x, uint32_t by, vu *high, vu *low) {
#if DW_VECTOR_AVX512
    const __mmask16 odd_lanes = 0xaaaa;
    __m512i factor = _mm512_set1_epi32((int)by);
    __m512i even = _mm512_mul_epu32((__m512i)x, factor);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)x, 32), factor);
    *high = (vu)_mm512_mask_blend_epi32(odd_lanes, _mm512_srli_epi64(even, 32), odd);
    *low = (vu)_mm512_mask_blend_epi32(odd_lanes, even, _mm512_slli_epi64(odd, 32));
#elif DW_VECTOR_AVX2
    enum { ODD_LANES = 0xaa };
    __m256i factor = _mm256_set1_epi32((int)by);
    __m256i even = _mm256_mul_epu32((__m256i)x, factor);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)x, 32), factor);
    *high = (vu)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, ODD_LANES);
    *low = (vu)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), ODD_LANES);
#else
    for (int i = 0; i < DW_LANES; i++) {
        uint64_t product = (uint64_t)by * x[i];
        (*high)[i] = (uint32_t)(product >> 32);
        (*low)[i] = (uint32_t)product;
    }
#endif
}

/* words[w] lane i is word w of block number block[i]. */
static inline void dw__philox_lanes(const int64_t seed[2], int64_t stream,
                                    const uint64_t block[DW_LANES], vu words[4]) {
    uint32_t low_word[DW_LANES], second_word[DW_LANES];
    for (int i = 0; i < DW_LANES; i++) {
        low_word[i] = (uint32_t)block[i];
        second_word[i] = (uint32_t)stream ^ ((uint32_t)(block[i] >> 32) << 20);
    }
    vu x0, x1, x2 = v_set_uint((uint32_t)seed[1]);
    vu x3 = v_set_uint((uint32_t)((uint64_t)seed[1] >> 32));
    memcpy(&x0, low_word, sizeof x0);
    memcpy(&x1, second_word, sizeof x1);
    uint32_t key0 = (uint32_t)seed[0], key1 = (uint32_t)((uint64_t)seed[0] >> 32);
    for (int round = 0; round < DW_PHILOX_ROUNDS; round++) {
        vu high0, low0, high1, low1;
        dw__multiply_wide(x0, 0xD2511F53u, &high0, &low0);
        dw__multiply_wide(x2, 0xCD9E8D57u, &high1, &low1);
        x0 = high1 ^ x1 ^ key0;
        x1 = low1;
        x2 = high0 ^ x3 ^ key1;
        x3 = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    words[0] = x0;
    words[1] = x1;
    words[2] = x2;
    words[3] = x3;
}

/* dw__philox_to_uniform on lanes. 24 bits make a signed conversion exact. */
static inline vf dw__philox_lanes_to_uniform(vu words) {
    return __builtin_convertvector((vi)(words >> 8), vf) * 0x1p-24f;
}

#endif
