/* The GEMM of sm_90a: launch parameters, and the resources of a variant. Plain C, read by the host and by device code.
 */
#ifndef DW_SM90_GEMM_PARAMS_H
#define DW_SM90_GEMM_PARAMS_H

typedef struct dw_sm90_gemm_params {
    /* m: rows of D, of all groups together with DW_SM90_ROWS; n: columns of D, with SwiGLU B has 2 n rows; k: length of
     * the contraction, of all groups together with DW_SM90_CONTRACTION. k may be 0: the accumulators are 0. */
    int m, n, k;
    int groups;           /* 1 or more */
    int tiles_m, tiles_n; /* of a matrix of D; tiles_m is not used with DW_SM90_ROWS */
    float alpha;          /* factor of the accumulators, applied first */
    const void *bias;     /* n elements, with SwiGLU 2 n, for each matrix of B; NULL without BIAS */
    const void *residual;
    void *d;
    long long stride_d, stride_residual; /* elements from row to row */
    long long group_d,
        group_residual; /* elements from group to group; not used with DW_SM90_ROWS */
    const int *offsets; /* groups + 1 rows, ascending; NULL with DW_SM90_BATCH */
} dw_sm90_gemm_params;

/* GROUPS, how several products share a launch.
 * Batch: A, B and D are tensors of `groups` matrices.
 * Rows: the rows offsets[g] to offsets[g + 1] of A, times matrix g of B, give the same rows of D. Rows behind the last
 * offset are not multiplied: D is 0 there, or the residual.
 * Contraction: D's matrix g is the sum over the same rows of A (stored as k x m) and B (k x n). */
#define DW_SM90_BATCH 0
#define DW_SM90_ROWS 1
#define DW_SM90_CONTRACTION 2

/* Tiles: X(tile_m, tile_n, stages, together). Two warpgroups compute a tile together, or each every other tile.
 * 64 x 256 is for groups of few rows, of which tiles of 128 would be half empty. */
#define DW_SM90_GEMM_TILES(X)                                                                      \
    X(128, 128, 7, 0)                                                                              \
    X(64, 256, 5, 0)                                                                               \
    X(128, 256, 4, 1)                                                                              \
    X(128, 192, 5, 1)

#define DW_SM90_GEMM_STEP 64 /* elements of the contraction in a stage: 128 bytes, a swizzled row */
#define DW_SM90_MULTIPLIERS 2 /* warpgroups that multiply */
#define DW_SM90_GEMM_THREADS (128 * (DW_SM90_MULTIPLIERS + 1)) /* one warpgroup loads */
#define DW_SM90_STAGE_BYTES(tile_m, tile_n) (((tile_m) + (tile_n)) * 128)
#define DW_SM90_GEMM_SHARED_BYTES(tile_m, tile_n, stages)                                          \
    ((stages)*DW_SM90_STAGE_BYTES(tile_m, tile_n) + 2 * 8 * (stages))
#define DW_SM90_MOST_SHARED 232448 /* 227 KiB: the limit of a block */

#endif
