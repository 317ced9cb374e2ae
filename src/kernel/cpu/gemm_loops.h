/* Packed, blocked GEMM (Goto and van de Geijn 2008; Van Zee and van de Geijn 2015): the inner loops, compiled
 * once per instruction set (isa/gemm_loops.c), for the strategy in matmul_packed.c.
 *
 * Both operands are copied into panels, so that the innermost loop reads memory in one direction only:
 *
 *     A, `rows` wide:     | a(0,0) a(1,0) .. a(rows-1,0) | a(0,1) .. a(rows-1,1) | ...   next panel
 *     B, `columns` wide:  | b(0,0) b(0,1) .. b(0,cols-1) | b(1,0) .. b(1,cols-1) | ...   next panel
 *
 * The last panel is padded with zeros. Every element of C sums over k in ascending order, in blocks of
 * `depth`, at any position in a tile: dividing C differently gives the same bits. */
#ifndef DW_GEMM_LOOPS_H
#define DW_GEMM_LOOPS_H

#include "kernel/cpu/cpu.h"

typedef struct dw__gemm_blocks {
    int rows, columns; /* of the innermost loop's tile */
    int depth;         /* most values of k in a panel, so that a panel of B stays in L1 */
    /* The largest tile of C in one task. Panels of that many rows of A stay in L2 and are packed once per
     * task_columns; the rows are a multiple of 96. */
    int task_rows, task_columns;
    /* Element (i, k) of A is a[i*row_stride + k*k_stride]. One of the strides is 1, or its extent is 1.
     * Writes ceil(m/rows) panels of rows*k floats. */
    void (*pack_a)(int64_t m, int64_t k, const float *a, int64_t row_stride, int64_t k_stride,
                   float *panels);
    /* Element (k, j) of B is b[k*k_stride + j*column_stride]. Writes panels of k*columns floats. */
    void (*pack_b)(int64_t n, int64_t k, const float *b, int64_t column_stride, int64_t k_stride,
                   float *panels);
    /* C[m,n] = packed A * packed B, plus the old C if `accumulate`, else plus `bias` [n] unless it is NULL. */
    void (*multiply)(int64_t m, int64_t n, int64_t k, const float *a_panels, const float *b_panels,
                     float *c, int64_t row_stride, bool accumulate, const float *bias);
} dw__gemm_blocks;

#endif
