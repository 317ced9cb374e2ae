/* Inner loops of number formats, once per instruction set (isa/number_loops.c). Elements are contiguous; codes
 * are one byte each unless said otherwise. Round to nearest even; the floating-point mode is the default one. */
#ifndef DW_NUMBER_LOOPS_H
#define DW_NUMBER_LOOPS_H

#include "base/isa.h"
#include "number/format.h"
#include "number/philox.h"

/* How an MX scale follows from the bits of amax: the exponent field, plus one where the fraction exceeds what the
 * rule lets pass, less m; at least 0. No rule gets past 254. */
typedef struct dw__mx_rule {
    uint32_t add;     /* carries into the exponent where the rule rounds up */
    int exponent;     /* m: of the element format's largest number */
    uint32_t for_inf; /* code where amax is infinite */
} dw__mx_rule;

/* Blocks follow each other; `count` elements, of which the last block may have fewer than `block`, a multiple of
 * 16. One value a block: amax as bits, scale codes, factors. */
typedef struct dw__number_loops {
    /* Bits of the largest magnitude: any NaN beats infinity beats finite numbers. */
    void (*amax)(const float *x, int64_t count, int64_t block, uint32_t *amax);
    /* The same over finite elements alone, of all. 0 for no elements. */
    uint32_t (*finite_amax)(const float *x, int64_t count);

    /* Scale codes, and what elements are multiplied by (mx, nvfp4) or divided by (f32: the scales themselves, and
     * infinity where they are 0). Where the scale is NaN the factor is anything. */
    void (*mx_scales)(const dw__mx_rule *rule, const uint32_t *amax, int64_t blocks, uint8_t *codes,
                      float *factors);
    void (*nvfp4_scales)(float tensor_scale, const uint32_t *amax, int64_t blocks, uint8_t *codes,
                         float *factors);
    void (*f32_scales)(const uint32_t *amax, int64_t blocks, float *scales, float *divisors);
    /* What the codes stand for; E8M0 and UE4M3. */
    void (*scale_values[DW_FORMAT_COUNT])(const uint8_t *codes, int64_t blocks, float *values);

    /* dw_encode of byte formats but E8M0 (UE4M3: x is not negative). words NULL: nearest. */
    void (*encode[DW_FORMAT_COUNT])(const float *x, int64_t count, dw_overflow overflow,
                                    const uint32_t *words, uint8_t *codes);
    /* Codes of x * factor, or of x / divisor (E4M3), saturating. What a NaN becomes is not defined. */
    void (*scale[DW_FORMAT_COUNT])(const float *x, int64_t count, int64_t block,
                                   const float *factors, const uint32_t *words, uint8_t *codes);
    void (*divide)(const float *x, int64_t count, int64_t block, const float *divisors,
                   const uint32_t *words, uint8_t *codes);
    /* (number * factor) * outer */
    void (*decode[DW_FORMAT_COUNT])(const uint8_t *codes, int64_t count, int64_t block,
                                    const float *factors, float outer, float *x);

    void (*pack_pairs)(const uint8_t *codes, int64_t pairs, uint8_t *packed);
    void (*unpack_pairs)(const uint8_t *packed, int64_t pairs, uint8_t *codes);
    /* Words of elements first .. first+count-1. */
    void (*words)(const dw_random *random, uint64_t first, int64_t count, uint32_t *words);
    /* to[j * to_stride + i] = from[i * from_stride + j] for i < rows, j < cols */
    void (*transpose)(const float *from, int64_t from_stride, int64_t rows, int64_t cols, float *to,
                      int64_t to_stride);
    /* Hadamard transforms of `count` runs of `size` side by side: x * before, butterflies, * scale * after. */
    void (*hadamard)(const float *x, const float *before, const float *after, int size, float scale,
                     int64_t count, float *result);
} dw__number_loops;

#endif
