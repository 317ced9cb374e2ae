/* Declarations shared by the CPU kernels, and the table of inner loops, which exists once per instruction
 * set.
 *
 * Files in kernel/cpu/ have the strategy: predicates, division into tasks for the pool, scratch. Files in
 * kernel/cpu/isa/ have the inner loops, written with GCC vector extensions or plain C and compiled once per
 * instruction set (base/isa.h). */
#ifndef DW_CPU_H
#define DW_CPU_H

#include "base/isa.h"
#include "kernel/kernel.h"

/* ---- elementwise bodies on tiles: also the epilogue of a GEMM ----------------------------------- */

/* Runs a prepared fused call on rows [row, row+rows) and columns [column, column+columns) of its iteration
 * shape as a matrix: the last axis is the column, all other axes together are the row. Input `replaced` (or
 * -1) is read from `tile` instead of its tensor: the GEMM's tile, still in cache (F32, row stride tile_stride
 * elements, element (0,0) at (row, column)). Runs serially, because a pool task calls it. */
dw_status dw__fused_run_tile(const dw__call *fused, int64_t row, int64_t rows, int64_t column,
                             int64_t columns, int replaced, const float *tile, int64_t tile_stride);
/* True if dw__fused_run_tile supports the call: all dtypes are F32 (or supported), and rows of the inputs are
 * linear in the matrix view. */
bool dw__fused_fits_tile(const dw__call *fused, int replaced);

/* ---- small matmuls inside a task: attention's tiles -------------------------------------------- */

/* C[m,n] (+)= alpha * A[m,k] * B[k,n] with row strides lda, ldb, ldc; flags select A stored as [k,m] or B
 * stored as [n,k]. Single-threaded, for operands in L1/L2. Part of the table dw__gemm_loops
 * (isa/gemm_loops.c). */
typedef struct dw__gemm_loops {
    void (*small)(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k,
                  float alpha, const float *a, int64_t lda, const float *b, int64_t ldb, float beta,
                  float *c, int64_t ldc);
} dw__gemm_loops;

#endif
