// E4M3 codes of a matrix in both orientations, with an F32 scale for each block of 128 elements along the rows of the
// codes, or for each square of 128 x 128: fp8-block of deepwell/number.h, rule AMAX, bit for bit.
//
// The matrix is read once. Bytes per element of BF16: 2 read, 1 written for each orientation, and 4 / 128 for each
// orientation's scales: 4.06 in all, where quantize_tensor needs 6. Blocks lie along the rows of the codes, so each
// orientation has its own scales and therefore its own codes; square blocks have the same codes in both.
//
// A block of threads writes tiles of 128 x 128 (fp8_block_tile.cuh), and loads the next one while it stores the codes along
// columns.
//
// Defines: TYPE, WHOLE (code_tiles.cuh); SQUARE: 1 for blocks of 128 x 128.

#include "fp8_block_tile.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, DW_FP8_BLOCK_RESIDENT)
    fp8_block_codes(const __grid_constant__ dw_fp8_block_codes_params p) {
    __shared__ alignas(16) shared_room room;
    elements x[OWN_ROWS];
    tile_walk walk = tile_walk::of(p.tiles_across);
    if ((int)blockIdx.x < p.tiles) load_tile(p, walk.place(), x);
    for (int t = (int)blockIdx.x; t < p.tiles; t += (int)gridDim.x) {
        const tile_place at = walk.place();
        const bool has_next = t + (int)gridDim.x < p.tiles;
        walk.advance(p.tiles_across);
        store_tile(p, at, x, room, [&](int i) {
            return load_vector<false>(p, at.row + own_row() + i * ROW_STEP, at.column + own_column());
        });
        if (has_next) load_tile(p, walk.place(), x);
        __syncthreads();
        // What the next tile writes into shared memory before its first barrier, nothing reads here.
        if (p.turned) store_turned(p, is_inside(p, at), room.tile, at);
    }
}
