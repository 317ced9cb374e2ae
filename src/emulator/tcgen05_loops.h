/* Sums of tcgen05.mma in double, the same bits on every instruction set: products of what the operands' formats have
 * are exact in double, so that it does not matter whether they are fused with the sum, and every sum adds its
 * products one after the other, the first to D.
 */
#ifndef DW_EMULATOR_TCGEN05_LOOPS_H
#define DW_EMULATOR_TCGEN05_LOOPS_H

#include <stddef.h>
#include <stdint.h>

enum { DW__TENSOR_STEP = 8 }; /* columns are multiples of that */

typedef struct dw__tensor_loops {
    /* sums[r][i] += a[r][k] b[k][i], rows contiguous, `wide` apart those of b and of sums. */
    void (*add)(const double *a, size_t rows, size_t depth, const double *b, size_t columns,
                size_t wide, double *sums);
    /* F32 sums, cells[r][i]: scale times what is there (0: nothing is there) and the products, rounded once, to
     * nearest; NaNs are 0x7FFFFFFF. */
    void (*add_f32)(const double *a, size_t rows, size_t depth, const double *b, size_t columns,
                    size_t wide, double scale, uint32_t *const *cells);
} dw__tensor_loops;

#endif
