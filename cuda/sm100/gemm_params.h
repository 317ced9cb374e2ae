/* The GEMMs of sm_100: launch parameters, and the resources of a variant. Plain C, read by the host and by device
 * code.
 */
#ifndef DW_SM100_GEMM_PARAMS_H
#define DW_SM100_GEMM_PARAMS_H

#include "common/data_error.h"
#include "common/gemm_groups.h"

typedef struct dw_gemm_params {
    /* m: rows of D, of all groups together with DW_GROUPS_ROWS. n: columns of D; with SwiGLU, B has 2 n rows. k: length
     * of the contraction, of all groups together with DW_GROUPS_CONTRACTION; it may be 0: the accumulators are 0. */
    int m, n, k;
    int groups;           /* 1 or more; 1 with DW_GROUPS_BATCH */
    int tiles_m, tiles_n; /* of a matrix of D; tiles_m is not used with DW_GROUPS_ROWS */
    float alpha;          /* factor of the accumulators, applied first */
    const void *bias; /* n elements, with SwiGLU 2 n, for each group of rows; NULL without BIAS */
    const float *factor_a, *factor_b; /* further factors of alpha, in device memory; NULL: 1 */
    /* MXFP8: n / 32 scales for each of m rows, in the order of dw_scales_swizzle; 16-byte aligned. */
    void *scales_d;
    const int *offsets;  /* groups + 1 rows, ascending; NULL with DW_GROUPS_BATCH */
    void *d;             /* DW_GROUPS_ROWS: for rows of D that are stored without a tensor map */
    long long stride_d;  /* elements from row to row */
    dw_data_error error; /* of offsets that do not ascend from 0 to the rows of all groups */
} dw_gemm_params;

/* How a block gets its next tile: from its index, or from cluster launch control, which needs one more warp and a
 * grid with a block, or a pair, for each tile. */
#define DW_GEMM_STATIC 0
#define DW_GEMM_LAUNCH_CONTROL 1

/* Type of D: that of A and B, F32, or MXFP8 (codes of E4M3, a scale for each 32 elements of a row, rule RCEIL). */
#define DW_GEMM_OUTPUT_ELEMENT 0
#define DW_GEMM_OUTPUT_F32 1
#define DW_GEMM_OUTPUT_MXFP8 2

/* Activation. */
#define DW_GEMM_LINEAR 0
#define DW_GEMM_GELU 1
#define DW_GEMM_GELU_TANH 2
#define DW_GEMM_SWIGLU 3

/* ctas: blocks per tile (1, or 2 in a cluster); tile_n: columns of its accumulator. */
#define DW_GEMM_ROWS 128 /* rows of a block: lanes of tensor memory */
/* Elements of the contraction: 128 bytes, the width of a swizzled row. */
#define DW_GEMM_STEP 64
#define DW_GEMM_THREADS 192 /* four epilogue warps, one that loads, one that multiplies */
#define DW_GEMM_THREADS_OF(schedule) (DW_GEMM_THREADS + 32 * (schedule))
#define DW_GEMM_ROW_BYTES 128
#define DW_GEMM_A_BYTES (DW_GEMM_ROWS * DW_GEMM_ROW_BYTES)
#define DW_GEMM_B_BYTES(ctas, tile_n) ((tile_n) / (ctas)*DW_GEMM_ROW_BYTES)
#define DW_GEMM_STAGE_BYTES(ctas, tile_n) (DW_GEMM_A_BYTES + DW_GEMM_B_BYTES(ctas, tile_n))
/* Staging of D: two boxes of 32 rows of 128 bytes for each warp. */
#define DW_GEMM_BOX_BYTES (32 * DW_GEMM_ROW_BYTES)
#define DW_GEMM_OUT_BYTES (4 * 2 * DW_GEMM_BOX_BYTES)
/* Bias of a box's columns, as F32: up to 64, in two parts with SwiGLU, for each warp. */
#define DW_GEMM_BIAS_BYTES (4 * 2 * 64 * 4)
/* Responses of cluster launch control, 16 bytes each, that are not consumed yet. */
#define DW_GEMM_ANSWERS 3
/* Barriers: two for each stage, each response and each accumulator; one for each box of the residual; the address of
 * tensor memory. */
#define DW_GEMM_BARRIER_BYTES(stages) (8 * (2 * (stages) + 2 * DW_GEMM_ANSWERS + 4 + 8 + 1))
/* All shared memory except for the stages. */
#define DW_GEMM_REST_BYTES(stages)                                                                 \
    (DW_GEMM_OUT_BYTES + DW_GEMM_BIAS_BYTES + 16 * DW_GEMM_ANSWERS + DW_GEMM_BARRIER_BYTES(stages))
#define DW_GEMM_SHARED_BYTES(ctas, tile_n, stages)                                                 \
    ((stages)*DW_GEMM_STAGE_BYTES(ctas, tile_n) + DW_GEMM_REST_BYTES(stages))
#define DW_GEMM_MOST_SHARED 232448 /* 227 KiB: the limit of a block on sm_100 and sm_103 */
/* Two accumulators; an allocation is a power of 2. */
#define DW_GEMM_COLUMNS(tile_n)                                                                    \
    (2 * (tile_n) > 256 ? 512 : 2 * (tile_n) > 128 ? 256 : 2 * (tile_n) > 64 ? 128 : 64)

#endif
