/* Inner loops of number formats, compiled once per instruction set (isa/number_loops.c). Elements are
 * contiguous and codes take one byte each unless stated otherwise. Loops round to nearest even, in the
 * default floating-point mode. */
#ifndef DW_NUMBER_LOOPS_H
#define DW_NUMBER_LOOPS_H

#include "base/isa.h"
#include "number/format.h"
#include "number/philox.h"

/* Parameters of the rule that computes an MX scale from the bits of amax: the exponent field, plus one if the
 * fraction exceeds the rule's threshold, minus `exponent`, and at least 0. No rule yields more than 254. */
typedef struct dw__mx_rule {
    uint32_t add;     /* carries into the exponent if the rule rounds up */
    int exponent;     /* exponent of the element format's largest number */
    uint32_t for_inf; /* code for an infinite amax */
} dw__mx_rule;

/* Loops over consecutive blocks of `count` elements. `block` is a multiple of 16; the last block may be
 * shorter. amax (as bits), scale codes and factors have one value per block. */
typedef struct dw__number_loops {
    /* Bits of the largest magnitude of each block. A NaN is larger than infinity, infinity larger than finite
     * numbers. */
    void (*amax)(const float *x, int64_t count, int64_t block, uint32_t *amax);
    /* Bits of the largest finite magnitude of all elements; 0 if there are none. */
    uint32_t (*finite_amax)(const float *x, int64_t count);

    /* Scale codes and factors. Elements are multiplied by the factor (mx, nvfp4) or divided by it (f32: the
     * factor is the scale, or infinity for a scale of 0). The factor of a NaN scale is undefined. */
    void (*mx_scales)(const dw__mx_rule *rule, const uint32_t *amax, int64_t blocks, uint8_t *codes,
                      float *factors);
    void (*nvfp4_scales)(float tensor_scale, const uint32_t *amax, int64_t blocks, uint8_t *codes,
                         float *factors);
    void (*f32_scales)(const uint32_t *amax, int64_t blocks, float *scales, float *divisors);
    /* Values of scale codes, for E8M0 and UE4M3. */
    void (*scale_values[DW_DTYPE_COUNT])(const uint8_t *codes, int64_t blocks, float *values);

    /* dw_encode for byte formats except E8M0. For UE4M3 x must not be negative. `words` NULL means round to
     * nearest. */
    void (*encode[DW_DTYPE_COUNT])(const float *x, int64_t count, dw_overflow overflow,
                                   const uint32_t *words, uint8_t *codes);
    /* Codes of x * factor, or of x / divisor (E4M3), saturating. The code of a NaN is undefined. */
    void (*scale[DW_DTYPE_COUNT])(const float *x, int64_t count, int64_t block,
                                  const float *factors, const uint32_t *words, uint8_t *codes);
    void (*divide)(const float *x, int64_t count, int64_t block, const float *divisors,
                   const uint32_t *words, uint8_t *codes);
    /* Computes (number * factor) * outer. */
    void (*decode[DW_DTYPE_COUNT])(const uint8_t *codes, int64_t count, int64_t block,
                                   const float *factors, float outer, float *x);

    void (*pack_pairs)(const uint8_t *codes, int64_t pairs, uint8_t *packed);
    void (*unpack_pairs)(const uint8_t *packed, int64_t pairs, uint8_t *codes);
    /* The random words of elements first .. first+count-1. */
    void (*words)(const dw_random *random, uint64_t first, int64_t count, uint32_t *words);
    /* to[j * to_stride + i] = from[i * from_stride + j] for i < rows, j < cols */
    void (*transpose)(const float *from, int64_t from_stride, int64_t rows, int64_t cols, float *to,
                      int64_t to_stride);
    /* Hadamard transforms of `count` adjacent runs of length `size`: x * before, butterflies, then * scale *
     * after. */
    void (*hadamard)(const float *x, const float *before, const float *after, int size, float scale,
                     int64_t count, float *result);
} dw__number_loops;

#endif
