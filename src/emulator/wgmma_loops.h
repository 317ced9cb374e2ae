/* Sums of one row of A with many columns of B at once, the bits of dw__wgmma_sum (wgmma_sum.h). Products are made of
 * integers: a factor is a magnitude of at most 11 bits, the exponent of its leading place, and a sign.
 */
#ifndef DW_EMULATOR_WGMMA_LOOPS_H
#define DW_EMULATOR_WGMMA_LOOPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* How a code is a number: sign, exponent, fraction, from the code's upper end. */
typedef struct dw__wgmma_format {
    int exponent_bits, fraction_bits;
    int unused;      /* bits below the fraction, which do not count (TF32: 13) */
    bool finite_top; /* the greatest exponent has numbers too, all but its last fraction (E4M3) */
} dw__wgmma_format;

/* Arrays of factors; zeros have DW__NO_EXPONENT, signs are 0 or -1. */
typedef struct dw__wgmma_factors {
    int32_t *magnitude, *exponent, *sign;
} dw__wgmma_factors;

enum { DW__WGMMA_COLUMNS = 16 };
typedef struct dw__wgmma_loops {
    /* `count`: a multiple of DW__WGMMA_COLUMNS. False: some are infinite or no numbers, which `sums` cannot add. */
    bool (*decode)(const uint32_t *codes, size_t count, const dw__wgmma_format *format,
                   const dw__wgmma_factors *factors);
    /* d[i] + the `depth` products of the row, factors k, and column i, factors k * stride + i, for DW__WGMMA_COLUMNS
     * columns. `left`: the kept bits (25, 13) less the fraction bits of both formats. Bit i of the result: column i is left
     * as it was, and for dw__wgmma_sum; D was infinite or no number, or the sum is below the normal numbers. */
    uint32_t (*sums)(int depth, const dw__wgmma_factors *row, const dw__wgmma_factors *columns,
                     size_t stride, int left, bool narrow, float *d);
} dw__wgmma_loops;

#endif
