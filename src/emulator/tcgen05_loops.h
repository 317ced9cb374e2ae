/* Inner loops of tcgen05.mma in double, with the same bits on every instruction set. Products of the operands'
 * formats are exact in double, so fusing the multiplication with the addition does not change the result. Each
 * accumulator adds its products in order, starting from D.
 */
#ifndef DW_EMULATOR_TCGEN05_LOOPS_H
#define DW_EMULATOR_TCGEN05_LOOPS_H

#include <stddef.h>
#include <stdint.h>

enum { DW__TENSOR_STEP = 8 }; /* the number of columns must be a multiple of this */

typedef struct dw__tensor_loops {
    /* sums[r][i] += a[r][k] b[k][i]. Rows are contiguous; rows of b and of sums are `wide` apart. */
    void (*add)(const double *a, size_t rows, size_t depth, const double *b, size_t columns,
                size_t wide, double *sums);
    /* F32 accumulators cells[r][i]: `scale` times the old value (0: the old value is ignored) plus the products,
     * rounded once, to nearest. NaN results are 0x7FFFFFFF. */
    void (*add_f32)(const double *a, size_t rows, size_t depth, const double *b, size_t columns,
                    size_t wide, double scale, uint32_t *const *cells);
} dw__tensor_loops;

#endif
