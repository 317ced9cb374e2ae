/* The block-scaled GEMMs of sm_100: the resources of a variant beyond those of all GEMMs (gemm_params.h,
 * whose dw_gemm_params are the launch parameters). Plain C, read by the host and by device code.
 */
#ifndef DW_SM100_GEMM_SCALED_PARAMS_H
#define DW_SM100_GEMM_SCALED_PARAMS_H

#include "common/scale_layout.h"
#include "common/scheme_params.h"
#include "gemm_params.h"

#define DW_SCALED_STEP(scheme)                                                                     \
    (DW_CODES_ARE_MXFP8(scheme) ? 128 : 256) /* elements of the contraction: 128 bytes */
#define DW_SCALED_BLOCK(scheme)                                                                    \
    ((scheme) == DW_CODES_NVFP4 ? 16 : 32) /* elements that share a scale */
/* Tiles of scales (common/scale_layout.h) of a step for 128 rows. */
#define DW_SCALED_STEP_TILES(scheme)                                                               \
    (DW_SCALED_STEP(scheme) / DW_SCALED_BLOCK(scheme) / DW_SCALE_TILE_COLUMNS)
/* Ranges of 128 rows of B that a tile of D may overlap. */
#define DW_SCALED_RANGES(tile_n) (((tile_n) + 127) / 128)

#define DW_SCALED_OPERAND_BYTES(ctas, tile_n) DW_GEMM_STAGE_BYTES(ctas, tile_n)
/* Each block has the scales of its rows of A and of all of the tile's rows of B. */
#define DW_SCALED_SCALE_BYTES(scheme, tile_n)                                                      \
    (DW_SCALED_STEP_TILES(scheme) * DW_SCALE_TILE_BYTES * (1 + DW_SCALED_RANGES(tile_n)))
#define DW_SCALED_STAGE_BYTES(scheme, ctas, tile_n)                                                \
    (DW_SCALED_OPERAND_BYTES(ctas, tile_n) + DW_SCALED_SCALE_BYTES(scheme, tile_n))
#define DW_SCALED_SHARED_BYTES(scheme, ctas, tile_n, stages)                                       \
    ((stages)*DW_SCALED_STAGE_BYTES(scheme, ctas, tile_n) + DW_GEMM_REST_BYTES(stages))

/* Tensor memory: two accumulators, then the scales of a step, 128 rows x 4 scales in 4 columns. Two accumulators of
 * 256 columns share those in the middle. */
#define DW_SCALED_COLUMNS 512
#define DW_SCALED_SCALE_COLUMNS 64
#define DW_SCALED_SCALE_COLUMNS_USED(scheme, tile_n)                                               \
    (4 * DW_SCALED_STEP_TILES(scheme) * (1 + DW_SCALED_RANGES(tile_n)))
#define DW_SCALED_OVERLAP(tile_n)                                                                  \
    (2 * (tile_n) + DW_SCALED_SCALE_COLUMNS > DW_SCALED_COLUMNS                                    \
         ? 2 * (tile_n) + DW_SCALED_SCALE_COLUMNS - DW_SCALED_COLUMNS                              \
         : 0)

#endif
