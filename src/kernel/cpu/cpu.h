/* CPU kernels: what they share, and the table of inner loops that exists once per instruction set.
 *
 * Files in kernel/cpu/ hold strategy: predicates, partition into tasks for the pool, scratch. Files in
 * kernel/cpu/isa/ hold inner loops, written with GCC vector extensions or plain C, and are compiled
 * once per instruction set (DW_ISA = avx512, avx2, baseline). Each such file defines one table, named
 * with DW_ISA_NAME(x), e.g. `const dw__norm_loops DW_ISA_NAME(dw__norm_loops) = {...}`; the strategy
 * file picks one at run time with dw__cpu_isa().
 */
#ifndef DW_CPU_H
#define DW_CPU_H

#include "kernel/kernel.h"

typedef enum dw__isa { DW_ISA_BASELINE, DW_ISA_AVX2, DW_ISA_AVX512, DW_ISA_COUNT } dw__isa;
/* Best one this CPU has; DEEPWELL_ISA=baseline|avx2|avx512 lowers it (for tests). */
dw__isa dw__cpu_isa(void);
const char *dw__isa_name(dw__isa isa);

#define DW_ISA_CONCAT_(name, isa) name##_##isa
#define DW_ISA_CONCAT(name, isa) DW_ISA_CONCAT_(name, isa)
#ifdef DW_ISA
#define DW_ISA_NAME(name) DW_ISA_CONCAT(name, DW_ISA)
#endif
/* In a strategy file: DW_ISA_TABLE(dw__norm_loops) declares the three and defines
 * `static const dw__norm_loops *dw__norm_loops_now(void)`. */
#if defined(__x86_64__)
#define DW_ISA_TABLE(type)                                                                         \
    extern const type type##_avx512, type##_avx2, type##_baseline;                                 \
    static const type *type##_now(void) {                                                          \
        switch (dw__cpu_isa()) {                                                                   \
        case DW_ISA_AVX512: return &type##_avx512;                                                 \
        case DW_ISA_AVX2: return &type##_avx2;                                                     \
        default: return &type##_baseline;                                                          \
        }                                                                                          \
    }
#else
#define DW_ISA_TABLE(type)                                                                         \
    extern const type type##_baseline;                                                             \
    static const type *type##_now(void) { return &type##_baseline; }
#endif

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

/* A matmul or linear call whose result goes, tile by tile, through `epilogue` (a fused call with the
 * product as input `replaced`). If call->outputs[0].data is NULL the product itself is not kept: tiles
 * live in scratch. */
bool dw__matmul_fits_epilogue(const dw__call *call, const dw__call *epilogue, int replaced);
size_t dw__matmul_epilogue_scratch(const dw__call *call, const dw__call *epilogue, int replaced);
dw_status dw__matmul_run_epilogue(const dw__call *call, const dw__call *epilogue, int replaced,
                                  void *scratch);

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
