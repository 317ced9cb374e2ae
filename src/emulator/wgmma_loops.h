/* Sums of some rows of A with many columns of B at once, the bits of dw__wgmma_sum (wgmma_sum.h). Products of two
 * factors are exact in F32; scaled by a power of two they are integers after what hardware cuts off has been.
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

/* The exponent of zeros: any two such, and one with any other, are less than all others. */
#define DW__WGMMA_NONE (-8000)

enum {
    DW__WGMMA_ROWS = 4,
    DW__WGMMA_COLUMNS = 32,
    DW__WGMMA_STEP = 16, /* columns are multiples of that */
    /* Exponents of the greatest term within which the loops add. */
    DW__WGMMA_LEAST = -100,
    DW__WGMMA_GREATEST = 125,
};

typedef struct dw__wgmma_loops {
    /* `count`: a multiple of DW__WGMMA_STEP. Values, and exponents of their leading places (of subnormal
     * numbers, of the least normal one). False: some are infinite or no numbers, which `sums` cannot add. */
    bool (*decode)(const uint32_t *codes, size_t count, const dw__wgmma_format *format,
                   float *values, int16_t *exponents);
    /* d[r][i] + the `depth` (8, 16, 32) products of row r, factors r * depth + k, and column i, factors k *
     * stride + i, for DW__WGMMA_ROWS rows and DW__WGMMA_STEP or DW__WGMMA_COLUMNS columns. Exponents of rows
     * come twice, in both halves of a word; those of columns are read for DW__WGMMA_COLUMNS. Bit i of
     * others[r]: column i is left as it was, and for dw__wgmma_sum: D was infinite or no number, the greatest
     * exponent is beyond what the loops add, or the sum is next to 2^31 of its last places. */
    void (*sums)(int depth, const float *rows, const uint32_t *row_exponents, const float *columns,
                 const int16_t *exponents, size_t stride, size_t count, bool narrow,
                 float (*d)[DW__WGMMA_COLUMNS], uint32_t *others);
} dw__wgmma_loops;

#endif
