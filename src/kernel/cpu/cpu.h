/* CPU kernels: what they share, and the table of inner loops that exists once per instruction set.
 *
 * Files in kernel/cpu/ hold strategy: predicates, partition into tasks for the pool, scratch. Files in
 * kernel/cpu/isa/ hold inner loops, written with GCC vector extensions or plain C, and are compiled
 * once per instruction set (base/isa.h).
 */
#ifndef DW_CPU_H
#define DW_CPU_H

#include "base/isa.h"
#include "kernel/kernel.h"

/* ---- elementwise bodies on tiles: also the epilogue of a matrix product ------------------------- */

/* Runs a prepared fused call on rows [row, row+rows) and columns [column, column+columns) of its
 * iteration shape seen as 2-D: the last axis is the column, all others together the row. Input
 * `replaced` (or -1) is read from `tile` (F32, row stride tile_stride elements, its element (0,0) being
 * (row, column)) instead of from its tensor: the product's tile, still in cache. Serial: called from a
 * pool task. */
dw_status dw__fused_run_tile(const dw__call *fused, int64_t row, int64_t rows, int64_t column,
                             int64_t columns, int replaced, const float *tile, int64_t tile_stride);
/* True when dw__fused_run_tile can do it: all dtypes F32 (or supported), inputs whose rows are linear in
 * the 2-D view. */
bool dw__fused_fits_tile(const dw__call *fused, int replaced);

/* ---- small matrix products inside a task: attention's tiles ------------------------------------ */

/* C[m,n] (+)= alpha * A[m,k] * B[k,n], row strides lda, ldb, ldc, or with A stored [k,m] / B stored
 * [n,k] by flags. Single-threaded, for operands in L1/L2. Part of the per-ISA table dw__gemm_loops
 * (isa/gemm_loops.c). */
typedef struct dw__gemm_loops {
    void (*small)(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k,
                  float alpha, const float *a, int64_t lda, const float *b, int64_t ldb, float beta,
                  float *c, int64_t ldc);
} dw__gemm_loops;

#endif
