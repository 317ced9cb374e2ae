/* The matrix products of sm_100: what they are launched with, and what a variant takes of a multiprocessor. Plain C,
 * read by the host and by device code alike. */
#ifndef DW_SM100_GEMM_PARAMS_H
#define DW_SM100_GEMM_PARAMS_H

typedef struct dw_gemm_params {
    int m, n, k; /* of D: n; with SwiGLU B has 2 n rows. k may be 0: sums of nothing */
    int tiles_m, tiles_n;
    float alpha;                      /* of the sums, before anything else */
    const void *bias;                 /* elements: n, with SwiGLU 2 n; NULL without BIAS */
    const float *factor_a, *factor_b; /* on the device: alpha's further factors; NULL: 1 */
    void *
        scales_d; /* MXFP8: of m rows, n / 32 each, in the order of dw_scales_swizzle; 16-byte aligned */
} dw_gemm_params;

/* Which tile a block takes next: by its number, or by what launch control says, for which there is a warp more and
 * the grid has a block, or a pair, for each tile. */
#define DW_GEMM_STATIC 0
#define DW_GEMM_LAUNCH_CONTROL 1

/* What D is: as A and B, F32, or MXFP8 (codes of E4M3, a scale for 32 of a row by the rule RCEIL). */
#define DW_GEMM_OUTPUT_ELEMENT 0
#define DW_GEMM_OUTPUT_F32 1
#define DW_GEMM_OUTPUT_MXFP8 2

/* What the epilogue makes of the sums. */
#define DW_GEMM_LINEAR 0
#define DW_GEMM_GELU 1
#define DW_GEMM_GELU_TANH 2
#define DW_GEMM_SWIGLU 3

/* ctas: blocks of a tile (1, or 2 in a cluster); tile_n: columns of its accumulator. */
#define DW_GEMM_ROWS 128    /* of a block: lanes of tensor memory */
#define DW_GEMM_STEP 64     /* of the contraction: 128 bytes, what a swizzled row holds */
#define DW_GEMM_THREADS 192 /* four warps of epilogue, one that loads, one that multiplies */
#define DW_GEMM_THREADS_OF(schedule) (DW_GEMM_THREADS + 32 * (schedule))
#define DW_GEMM_ROW_BYTES 128
#define DW_GEMM_A_BYTES (DW_GEMM_ROWS * DW_GEMM_ROW_BYTES)
#define DW_GEMM_B_BYTES(ctas, tile_n) ((tile_n) / (ctas)*DW_GEMM_ROW_BYTES)
#define DW_GEMM_STAGE_BYTES(ctas, tile_n) (DW_GEMM_A_BYTES + DW_GEMM_B_BYTES(ctas, tile_n))
/* D on its way out: two boxes of 32 rows of 128 bytes for each warp. */
#define DW_GEMM_BOX_BYTES (32 * DW_GEMM_ROW_BYTES)
#define DW_GEMM_OUT_BYTES (4 * 2 * DW_GEMM_BOX_BYTES)
/* Bias of a box's columns, as F32: up to 64, of two parts with SwiGLU, for each warp. */
#define DW_GEMM_BIAS_BYTES (4 * 2 * 64 * 4)
/* Launch control's answers, of 16 bytes, that wait to be taken. */
#define DW_GEMM_ANSWERS 3
/* Barriers: two for each stage, each answer, each accumulator; one for each box of the residual; where tensor memory
 * is. */
#define DW_GEMM_BARRIER_BYTES(stages) (8 * (2 * (stages) + 2 * DW_GEMM_ANSWERS + 4 + 8 + 1))
/* All that is not a stage. */
#define DW_GEMM_REST_BYTES(stages)                                                                 \
    (DW_GEMM_OUT_BYTES + DW_GEMM_BIAS_BYTES + 16 * DW_GEMM_ANSWERS + DW_GEMM_BARRIER_BYTES(stages))
#define DW_GEMM_SHARED_BYTES(ctas, tile_n, stages)                                                 \
    ((stages)*DW_GEMM_STAGE_BYTES(ctas, tile_n) + DW_GEMM_REST_BYTES(stages))
#define DW_GEMM_MOST_SHARED 232448 /* 227 KiB: of a block on sm_100 and sm_103 */
/* Two accumulators: an allocation is a power of 2. */
#define DW_GEMM_COLUMNS(tile_n)                                                                    \
    (2 * (tile_n) > 256 ? 512 : 2 * (tile_n) > 128 ? 256 : 2 * (tile_n) > 64 ? 128 : 64)

#endif
