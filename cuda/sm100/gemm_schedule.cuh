// Which tile of D comes next: shared by the matrix products of sm_100. Defines: CTAS, TILE_N, ACTIVATION.
#ifndef DW_SM100_GEMM_SCHEDULE_CUH
#define DW_SM100_GEMM_SCHEDULE_CUH

#include "gemm_params.h"
#include "sm100.cuh"

#define SWIGLU (ACTIVATION == DW_GEMM_SWIGLU)
#define TILE_M (CTAS * DW_GEMM_ROWS)
#define TILE_COLUMNS (SWIGLU ? TILE_N / 2 : TILE_N) // of D
#define BAND 8 // tiles one below the other that are worked on together, for what they share of B in the level-2 cache

static_assert(CTAS == 1 || CTAS == 2, "a block or a pair");
static_assert(TILE_N % 64 == 0 && TILE_N <= 256, "what one product takes");

typedef struct tile {
    int row, column; // of D: the block's first row, the tile's first column
} tile;

// The tile of this block's round `round`: false where there are no more.
DEVICE bool next_tile(const dw_gemm_params &p, int round, tile &t) {
    int index = blockIdx.x / CTAS + round * (gridDim.x / CTAS);
    if (index >= p.tiles_m * p.tiles_n) return false;
    int band = index / (BAND * p.tiles_n), within = index % (BAND * p.tiles_n);
    int height = min(BAND, p.tiles_m - band * BAND);
    t.row = (band * BAND + within % height) * TILE_M + (CTAS == 2 ? (int)cluster_rank() * DW_GEMM_ROWS : 0);
    t.column = within / height * TILE_COLUMNS;
    return true;
}

#endif
