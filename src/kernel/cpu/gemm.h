/* Packed, blocked matrix product (Goto and van de Geijn 2008; Van Zee and van de Geijn 2015): the
 * inner loops, once per instruction set (isa/gemm_loops.c), for the strategy in matmul.c.
 *
 * Both operands are copied into panels so that the innermost kernel reads memory in one direction
 * only:
 *
 *     A, `rows` wide:     | a(0,0) a(1,0) .. a(rows-1,0) | a(0,1) .. a(rows-1,1) | ...   next panel
 *     B, `columns` wide:  | b(0,0) b(0,1) .. b(0,cols-1) | b(1,0) .. b(1,cols-1) | ...   next panel
 *
 * The last panel is filled up with zeros. Every element of C is the sum over k in ascending order,
 * in blocks of `depth`, wherever it lies in a tile: cutting C differently gives the same bits.
 */
#ifndef DW_GEMM_H
#define DW_GEMM_H

#include "kernel/cpu/cpu.h"

typedef struct dw__gemm_blocks {
    int rows, columns; /* of the innermost kernel */
    int depth;         /* most k's in a panel, so that a panel of B stays in L1 */
    /* The largest part of C in one task. Panels of so many rows of A stay in L2 and are packed once for each
     * task_columns; rows are a multiple of 96. */
    int task_rows, task_columns;
    /* Element (i, k) of A is a[i*row_stride + k*k_stride]; one of the strides is 1 (or its extent
     * is). Writes ceil(m/rows) panels of rows*k floats. */
    void (*pack_a)(int64_t m, int64_t k, const float *a, int64_t row_stride, int64_t k_stride,
                   float *panels);
    /* Element (k, j) of B is b[k*k_stride + j*column_stride]. Panels of k*columns floats. */
    void (*pack_b)(int64_t n, int64_t k, const float *b, int64_t column_stride, int64_t k_stride,
                   float *panels);
    /* C[m,n] = packed A * packed B, plus what C holds when `accumulate`, else plus `bias` [n] if
     * any. */
    void (*multiply)(int64_t m, int64_t n, int64_t k, const float *a_panels, const float *b_panels,
                     float *c, int64_t row_stride, bool accumulate, const float *bias);
} dw__gemm_blocks;

#endif
