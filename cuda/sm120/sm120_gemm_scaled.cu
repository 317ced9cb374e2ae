// GEMM D = f(alpha A B^T) of block-scaled operands on consumer and workstation Blackwell GPUs: A (m x k) and B (n x k) of
// E4M3 or E5M2 with an E8M0 scale for 32 elements (MXFP8), or of E2M1, two to a byte, with an E4M3 for 16 (NVFP4) or an
// E8M0 for 32 (MXFP4); accumulators in F32. Proven on the emulator, not run on hardware.
//
// The schedule and the epilogue are those of sm120_gemm.cu. A stage is 128 bytes of each row and their scales, which
// arrive as tiles of 128 rows (scale_layout.h). The four scales of a row are one word there: lane 4 g + j loads the word
// of row g + 8 j of 32 rows, which is where mma.sync expects the scales of two fragments of A, or of four of B.
//
// Defines: SCHEME_A, SCHEME_B (scheme_params.h), and those of sm120_gemm_block.cuh except STEP and STAGE_BYTES. SwiGLU: B
// has the rows of the gate, then those of the other factor, and so do its scales, each part padded to 128 rows.

#include "sm120_gemm_params.h"

#define STEP DW_SM120_STEP(SCHEME_A)
#define STEP_TILES DW_SM120_STEP_TILES(SCHEME_A)
#define RANGE_BYTES (STEP_TILES * DW_SCALE_TILE_BYTES) // scales of 128 rows in a stage
#define A_BYTES (TILE_M * DW_SM120_ROW_BYTES)
#define OPERAND_BYTES DW_SM120_OPERAND_BYTES(TILE_M, TILE_N)
#define STAGE_BYTES (OPERAND_BYTES + DW_SM120_SCALE_BYTES(SCHEME_A, ACTIVATION == 3))

#include "sm120_gemm_block.cuh"

#define SCALE_WORDS (DW_SCALE_TILE_BYTES / 8)          // TMA's elements
#define MMA_SCALES (STEP / MMAS / DW_SM120_BLOCK(SCHEME_A)) // scales of a row per MMA
#define WORDS_A ((WARP_ROWS + 31) / 32)                // words of scales of A: one for 32 rows
#define WORDS_B (PARTS_N / 4)

static_assert(STAGES * STAGE_BYTES + DW_SM120_BARRIER_BYTES(STAGES) <= DW_SM120_MOST_SHARED, "too many stages");
static_assert(DW_CODES_ARE_MXFP8(SCHEME_A) || SCHEME_A == DW_CODES_NVFP4 || SCHEME_A == DW_CODES_MXFP4, "a scheme");
static_assert(DW_CODES_ARE_MXFP8(SCHEME_A) ? DW_CODES_ARE_MXFP8(SCHEME_B) : SCHEME_A == SCHEME_B, "one kind of MMA");

// The word of the lane's row among 32 rows from `row` on.
DEVICE uint32 scale_word(uint32 tile, int row) {
    row += (int)lane_index() / 4 + 8 * (int)(lane_index() & 3);
    return shared_load_u32(tile + DW_SCALE_OFFSET_IN_TILE(row, 0));
}

DEVICE void multiply_codes(float *d, const uint32 *a, const uint32 *b, uint32 scales_a, int byte, int thread_a,
                           uint32 scales_b, int thread_b) {
#define CODES(name) name(d, a, b, scales_a, (uint16)byte, (uint16)thread_a, scales_b, (uint16)thread_b)
    constexpr bool wide_a = SCHEME_A == DW_CODES_MXFP8_E5M2, wide_b = SCHEME_B == DW_CODES_MXFP8_E5M2;
    if constexpr (SCHEME_A == DW_CODES_NVFP4) CODES(multiply_nvfp4);
    else if constexpr (SCHEME_A == DW_CODES_MXFP4) CODES(multiply_mxfp4);
    else if constexpr (wide_a && wide_b) CODES(multiply_mxfp8_5252);
    else if constexpr (wide_a) CODES(multiply_mxfp8_5243);
    else if constexpr (wide_b) CODES(multiply_mxfp8_4352);
    else CODES(multiply_mxfp8_4343);
#undef CODES
}

extern "C" __global__ void __launch_bounds__(DW_SM120_GEMM_THREADS(WARPS), 1)
    sm120_gemm_scaled(const __grid_constant__ tensor_map map_a, const __grid_constant__ tensor_map map_b,
                      const __grid_constant__ tensor_map map_scales_a, const __grid_constant__ tensor_map map_scales_b,
                      const __grid_constant__ dw_sm120_gemm_params p) {
    extern __shared__ __align__(1024) uint8 memory[];
    shared_layout s = begin_block(memory);
    // Operands of all stages come first, because swizzled memory must start at multiples of 1024; then their scales.
    auto operands = [&](uint32 stage) { return s.stages + (stage - s.stages) / STAGE_BYTES * OPERAND_BYTES; };
    auto scales = [&](uint32 stage) {
        return s.stages + STAGES * OPERAND_BYTES + (stage - s.stages) / STAGE_BYTES * (STAGE_BYTES - OPERAND_BYTES);
    };
    if (threadIdx.x / 32 == WARPS) {
        if (!elect_one()) return;
        load_stages(p, s, [&](uint32 stage, uint32 full, int step, const tile &t) {
            uint32 a = operands(stage), b = a + A_BYTES, to = scales(stage);
            int byte = step * DW_SM120_ROW_BYTES, word = step * STEP_TILES * SCALE_WORDS;
            tma_load_box(a, &map_a, full, byte, t.row);
            tma_load_box(b, &map_b, full, byte, t.column);
            if constexpr (SWIGLU) tma_load_box(b + TILE_COLUMNS * 128, &map_b, full, byte, p.n + t.column);
            tma_load_box(to, &map_scales_a, full, word, t.row / DW_SCALE_TILE_ROWS);
            tma_load_box(to + RANGE_BYTES, &map_scales_b, full, word, t.column / DW_SCALE_TILE_ROWS);
            if constexpr (SWIGLU)
                tma_load_box(to + 2 * RANGE_BYTES, &map_scales_b, full, word,
                             DW_SCALE_TILES_HIGH(p.n) + t.column / DW_SCALE_TILE_ROWS);
        });
        return;
    }
    compute_tiles(p, s, [&](uint32 stage, const tile &t, float (*sums)[PARTS_N][4]) {
        uint32 tile_a = operands(stage), tile_b = tile_a + A_BYTES, of_a = scales(stage), of_b = of_a + RANGE_BYTES;
        int row = t.row % DW_SCALE_TILE_ROWS + warp_row(), column = t.column % DW_SCALE_TILE_ROWS + warp_column();
        uint32 scales_a[WORDS_A], scales_b[WORDS_B];
#pragma unroll
        for (int step = 0; step < MMAS; step++) {
            constexpr int per_tile = DW_SCALE_TILE_COLUMNS / MMA_SCALES; // MMAs that share a tile of scales
            uint32 at = step / per_tile * DW_SCALE_TILE_BYTES;
            uint32 a[PARTS_M][4], b[PARTS_N / 2][4];
            if (step % per_tile == 0) {
#pragma unroll
                for (int i = 0; i < WORDS_A; i++) scales_a[i] = scale_word(of_a + at, row + 32 * i);
#pragma unroll
                for (int i = 0; i < WORDS_B; i++) scales_b[i] = scale_word(of_b + i * RANGE_BYTES + at, column);
            }
#pragma unroll
            for (int i = 0; i < PARTS_M; i++) load_a(a[i], tile_a, TILE_M, warp_row() + 16 * i, 2 * step);
#pragma unroll
            for (int j = 0; j < PARTS_N / 2; j++) load_b_pair(b[j], tile_b, TILE_N, row_of_b(j), 2 * step);
#pragma unroll
            for (int i = 0; i < PARTS_M; i++)
#pragma unroll
                for (int j = 0; j < PARTS_N; j++)
                    multiply_codes(sums[i][j], a[i], b[j / 2] + j % 2 * 2, scales_a[i / 2],
                                   step % per_tile * MMA_SCALES, i % 2, scales_b[j / 4], j % 4);
        }
    });
}
