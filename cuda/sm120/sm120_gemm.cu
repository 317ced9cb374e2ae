// GEMM D = f(alpha A B^T), A (m x k) and B (n x k) of BF16 or F16, accumulators in F32, on consumer and workstation
// Blackwell GPUs. Proven on the emulator, not run on hardware.
//
// The schedule and the epilogue are in sm120_gemm_block.cuh. A warp loads fragments by ldmatrix and multiplies by
// mma.sync. An operand whose contiguous axis is not the contraction (TURNED_A: A is stored as k x m, TURNED_B: B
// as k x n) is loaded in boxes of 64 of its columns, and ldmatrix transposes it.
//
// Defines: those of sm120_gemm_block.cuh except STEP and STAGE_BYTES; TURNED_A, TURNED_B.

#include "sm120_gemm_params.h"

#define STEP DW_SM120_ELEMENT_STEP
#define A_BYTES (TILE_M * DW_SM120_ROW_BYTES)
#define STAGE_BYTES DW_SM120_OPERAND_BYTES(TILE_M, TILE_N)

#include "sm120_gemm_block.cuh"

static_assert(DW_SM120_GEMM_SHARED_BYTES(TILE_M, TILE_N, STAGES) <= DW_SM120_MOST_SHARED, "too many stages");
static_assert(!(SWIGLU && TURNED_B), "the rows of B have two parts");

// Loads the rows of an operand of a tile: `row` is the first, `rows` are their number.
template <bool TRANSPOSED>
DEVICE void load_operand(uint32 to, const tensor_map *map, uint32 full, int step, int row, int rows) {
    if constexpr (TRANSPOSED) {
        for (int i = 0; i < rows / 64; i++) tma_load_box(to + i * STEP * 128, map, full, row + 64 * i, step * STEP);
    } else {
        tma_load_box(to, map, full, step * STEP, row);
    }
}

extern "C" __global__ void __launch_bounds__(DW_SM120_GEMM_THREADS(WARPS), 1)
    sm120_gemm(const __grid_constant__ tensor_map map_a, const __grid_constant__ tensor_map map_b,
               const __grid_constant__ dw_sm120_gemm_params p) {
    extern __shared__ __align__(1024) uint8 memory[];
    shared_layout s = begin_block(memory);
    if (threadIdx.x / 32 == WARPS) {
        if (!elect_one()) return;
        load_stages(p, s, [&](uint32 stage, uint32 full, int step, const tile &t) {
            uint32 b = stage + A_BYTES;
            load_operand<TURNED_A>(stage, &map_a, full, step, t.row, TILE_M);
            load_operand<TURNED_B>(b, &map_b, full, step, t.column, TILE_N);
            if constexpr (SWIGLU) tma_load_box(b + TILE_COLUMNS * 128, &map_b, full, step * STEP, p.n + t.column);
        });
        return;
    }
    compute_tiles(p, s, [&](uint32 stage, const tile &, float (*sums)[PARTS_N][4]) {
#pragma unroll
        for (int step = 0; step < MMAS; step++) {
            uint32 a[PARTS_M][4], b[PARTS_N / 2][4];
#pragma unroll
            for (int i = 0; i < PARTS_M; i++) {
                if constexpr (TURNED_A) load_a_transposed(a[i], stage, STEP, warp_row() + 16 * i, 16 * step);
                else load_a(a[i], stage, TILE_M, warp_row() + 16 * i, 2 * step);
            }
#pragma unroll
            for (int j = 0; j < PARTS_N / 2; j++) {
                if constexpr (TURNED_B) load_b_pair_transposed(b[j], stage + A_BYTES, STEP, row_of_b(j), 16 * step);
                else load_b_pair(b[j], stage + A_BYTES, TILE_N, row_of_b(j), 2 * step);
            }
#pragma unroll
            for (int i = 0; i < PARTS_M; i++)
#pragma unroll
                for (int j = 0; j < PARTS_N; j++) multiply_add(sums[i][j], a[i], b[j / 2] + j % 2 * 2);
        }
    });
}
