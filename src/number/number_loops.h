/* Inner loops of number formats, once per instruction set (isa/number_loops.c). Elements are contiguous; codes
 * are one byte each unless said otherwise. Round to nearest even; the floating-point mode is the default one. */
#ifndef DW_NUMBER_LOOPS_H
#define DW_NUMBER_LOOPS_H

#include "base/isa.h"
#include "number/format.h"
#include "number/philox.h"

/* How an MX scale follows from the bits of amax: see dw__mx_scale. */
typedef struct dw__mx_rule {
    uint32_t add;     /* carries into the exponent where the rule rounds up */
    int exponent;     /* m: of the element format's largest number */
    uint32_t for_inf; /* code where amax is infinite */
} dw__mx_rule;

/* The E8M0 code for amax, given as bits: the exponent field, plus one where the fraction exceeds what the rule
 * lets pass, less m. Below code 0 lies nothing; no rule gets past 254. */
static inline uint32_t dw__mx_scale(const dw__mx_rule *rule, uint32_t amax) {
    if (amax >= 0x7F800000u) return amax > 0x7F800000u ? 0xFF : rule->for_inf;
    int code = (int)((amax + rule->add) >> 23) - rule->exponent;
    return code > 0 ? (uint32_t)code : 0;
}
/* 2^(127 - code): what elements are multiplied by. Code 254 needs a subnormal number. */
static inline float dw__mx_factor(uint32_t code) {
    return dw__f32_from_bits(code < 254 ? (254 - code) << 23 : 0x00400000u);
}

typedef struct dw__number_loops {
    /* Bits of the largest magnitude: any NaN beats infinity beats finite numbers. 0 for no elements. */
    uint32_t (*amax)(const float *x, int64_t count);
    /* The same over finite elements alone. */
    uint32_t (*finite_amax)(const float *x, int64_t count);
    /* dw_encode of byte formats but E8M0 (UE4M3: x is not negative). words NULL: nearest. */
    void (*encode[DW_FORMAT_COUNT])(const float *x, int64_t count, dw_overflow overflow,
                                    const uint32_t *words, uint8_t *codes);
    /* (number * scale) * outer */
    void (*decode[DW_FORMAT_COUNT])(const uint8_t *codes, int64_t count, float scale, float outer,
                                    float *x);
    /* Codes of x * factor, saturating; no element is NaN. */
    void (*scale[DW_FORMAT_COUNT])(const float *x, float factor, int64_t count,
                                   const uint32_t *words, uint8_t *codes);
    /* Codes of x / divisor. E4M3. */
    void (*divide)(const float *x, float divisor, int64_t count, const uint32_t *words,
                   uint8_t *codes);
    /* Whole blocks of 32: scales and codes, nearest. */
    void (*mx[DW_FORMAT_COUNT])(const float *x, int64_t blocks, const dw__mx_rule *rule,
                                uint8_t *codes, uint8_t *scales);
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
