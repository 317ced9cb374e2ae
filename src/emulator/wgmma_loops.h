/* Inner loops of wgmma: accumulate several rows of A with many columns of B at once, with exactly the bits of
 * dw__wgmma_sum (wgmma_sum.h). Products of two factors are exact in F32. Scaled by a power of two and truncated as
 * the hardware does, they are integers.
 */
#ifndef DW_EMULATOR_WGMMA_LOOPS_H
#define DW_EMULATOR_WGMMA_LOOPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The format of a code: sign, exponent and fraction, from the upper end. */
typedef struct dw__wgmma_format {
    int exponent_bits, fraction_bits;
    int unused; /* ignored bits below the fraction (13 for TF32) */
    /* The greatest exponent holds numbers as well, except for its last fraction (E4M3). */
    bool finite_top;
} dw__wgmma_format;

/* The exponent of zeros. The sum of two of these, or of one and any other exponent, is less than all others. */
#define DW__WGMMA_NONE (-8000)

enum {
    DW__WGMMA_ROWS = 4,
    DW__WGMMA_COLUMNS = 32,
    DW__WGMMA_STEP = 16, /* the number of columns must be a multiple of this */
    /* The loops handle greatest terms with exponents in this range. */
    DW__WGMMA_LEAST = -100,
    DW__WGMMA_GREATEST = 125,
};

typedef struct dw__wgmma_loops {
    /* Converts `count` codes (a multiple of DW__WGMMA_STEP) to values and to the exponents of their leading bits (for
     * subnormal numbers, the least normal exponent). Returns false if some are infinite or NaN, which `sums` cannot
     * add. */
    bool (*decode)(const uint32_t *codes, size_t count, const dw__wgmma_format *format,
                   float *values, int16_t *exponents);
    /* Computes d[r][i] + the `depth` (8, 16, 32) products of row r (factors r * depth + k) and column i (factors k *
     * stride + i) for DW__WGMMA_ROWS rows and DW__WGMMA_STEP or DW__WGMMA_COLUMNS columns. Exponents of rows are
     * stored twice, in both halves of a word; those of columns are read for DW__WGMMA_COLUMNS.
     *
     * Sets bit i of others[r] and leaves column i unchanged if dw__wgmma_sum must compute it: D is infinite or NaN,
     * the greatest exponent is outside the loops' range, or the sum is close to 2^31 units of its last place. */
    void (*sums)(int depth, const float *rows, const uint32_t *row_exponents, const float *columns,
                 const int16_t *exponents, size_t stride, size_t count, bool narrow,
                 float (*d)[DW__WGMMA_COLUMNS], uint32_t *others);
} dw__wgmma_loops;

#endif
