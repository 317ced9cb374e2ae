/* The GEMMs of sm_120: launch parameters, tiles, and the resources of a variant. Plain C, read by the host and by
 * device code. Nothing here is measured: no GPU of this family was available.
 */
#ifndef DW_SM120_GEMM_PARAMS_H
#define DW_SM120_GEMM_PARAMS_H

#include "common/scale_layout.h"
#include "common/scheme_params.h"

typedef struct dw_sm120_gemm_params {
    /* n: columns of D; with SwiGLU, B has 2 n rows. k may be 0: the accumulators are 0. */
    int m, n, k;
    int tiles_m, tiles_n;
    float alpha;                         /* factor of the accumulators, applied first */
    const void *bias;                    /* n elements, with SwiGLU 2 n; NULL without BIAS */
    const float *factor_a, *factor_b;    /* further factors of alpha, in device memory; NULL: 1 */
    const void *residual;                /* of D's type; NULL without RESIDUAL */
    void *d;                             /* rows at multiples of 16 bytes */
    long long stride_d, stride_residual; /* in elements; of codes in bytes */
    /* MXFP8: n / 32 scales for each of m rows, in the order of dw_scales_swizzle; 16-byte aligned. */
    void *scales_d;
} dw_sm120_gemm_params;

/* Tiles: X(tile_m, tile_n, warps, stages, blocks): the rows of A and B of a tile, the warps that multiply, the stages
 * of the ring, and the blocks that an SM holds. Block-scaled tiles have two stages, because three of 128 x 128 and
 * their scales exceed the shared memory. The small tile is for calls that have too few large ones to fill the GPU. */
#define DW_SM120_GEMM_TILES(X)                                                                     \
    X(128, 128, 8, 3, 1)                                                                           \
    X(64, 64, 4, 3, 2)
#define DW_SM120_SCALED_TILES(X)                                                                   \
    X(128, 128, 8, 2, 1)                                                                           \
    X(64, 64, 4, 2, 2)

#define DW_SM120_ROW_BYTES 128 /* of a row of A or B in a stage: one swizzled row */
#define DW_SM120_ELEMENT_STEP 64
/* Elements of the contraction in a stage of codes; elements that share a scale; tiles of scales (scale_layout.h) in a
 * stage, for 128 rows. */
#define DW_SM120_STEP(scheme) (DW_CODES_ARE_MXFP8(scheme) ? 128 : 256)
#define DW_SM120_BLOCK(scheme) ((scheme) == DW_CODES_NVFP4 ? 16 : 32)
#define DW_SM120_STEP_TILES(scheme)                                                                \
    (DW_SM120_STEP(scheme) / DW_SM120_BLOCK(scheme) / DW_SCALE_TILE_COLUMNS)

/* Threads: the warps that multiply, and one that loads. */
#define DW_SM120_GEMM_THREADS(warps) (32 * ((warps) + 1))
#define DW_SM120_OPERAND_BYTES(tile_m, tile_n) (((tile_m) + (tile_n)) * DW_SM120_ROW_BYTES)
/* Scales of A and of B; with SwiGLU B has two ranges of rows. */
#define DW_SM120_SCALE_BYTES(scheme, swiglu)                                                       \
    (DW_SM120_STEP_TILES(scheme) * DW_SCALE_TILE_BYTES * ((swiglu) ? 3 : 2))
#define DW_SM120_BARRIER_BYTES(stages) (2 * 8 * (stages))
#define DW_SM120_GEMM_SHARED_BYTES(tile_m, tile_n, stages)                                         \
    ((stages)*DW_SM120_OPERAND_BYTES(tile_m, tile_n) + DW_SM120_BARRIER_BYTES(stages))
#define DW_SM120_SCALED_SHARED_BYTES(scheme, swiglu, tile_m, tile_n, stages)                       \
    ((stages) * (DW_SM120_OPERAND_BYTES(tile_m, tile_n) + DW_SM120_SCALE_BYTES(scheme, swiglu)) +  \
     DW_SM120_BARRIER_BYTES(stages))
#define DW_SM120_MOST_SHARED 101376 /* 99 KiB: the limit of a block; an SM has 100 KiB */

#endif
