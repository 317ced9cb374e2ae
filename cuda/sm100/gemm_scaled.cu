// GEMM D = f(alpha A B^T) of block-scaled operands: A (m x k) and B (n x k) of E4M3 or E5M2 with an E8M0 scale for 32
// elements (MXFP8), or of E2M1, two to a byte, with an E4M3 for 16 (NVFP4) or an E8M0 for 32 (MXFP4); accumulators in
// F32. Proven on the emulator, not run on hardware.
//
// Schedule, barriers and epilogue are those of gemm.cu. A stage is 128 bytes of each row and their scales, which
// arrive as tiles (scale_layout.h) and are copied from shared to tensor memory before their MMAs: one thread issues
// both, and they execute in that order. The scales need columns of tensor memory, so two accumulators of 256 columns
// overlap by that many. The shared columns are stored first, after which the next tile's MMAs may start.
//
// Defines: SCHEME_A, SCHEME_B (common/scheme_params.h), CTAS, TILE_N, STAGES (gemm_tiles.h), ELEMENT (of D,
// bias and residual), OUTPUT, ACTIVATION, BIAS, RESIDUAL, SCHEDULE as in gemm.cu. SwiGLU: TILE_N is 256; B has the
// rows of the gate, then those of the other factor, and so do its scales, each part padded to 128 rows separately.

#include "gemm_scaled_params.h"

#define STEP DW_SCALED_STEP(SCHEME_A)
#define STAGE_BYTES DW_SCALED_STAGE_BYTES(SCHEME_A, CTAS, TILE_N)
#define TENSOR_COLUMNS DW_SCALED_COLUMNS
#define OVERLAP DW_SCALED_OVERLAP(TILE_N)

#include "gemm_roles.cuh"

#define STEP_TILES DW_SCALED_STEP_TILES(SCHEME_A)
#define RANGES DW_SCALED_RANGES(TILE_N)
#define OPERAND_BYTES DW_SCALED_OPERAND_BYTES(CTAS, TILE_N)
#define SCALE_BYTES DW_SCALED_SCALE_BYTES(SCHEME_A, TILE_N)
#define MMAS 4                                                           // MMAs per step, 32 bytes of each row
#define MMA_SCALES (STEP / MMAS / DW_SCALED_BLOCK(SCHEME_A))             // scales of a row per MMA
#define SCALE_COLUMN (DW_SCALED_COLUMNS - DW_SCALED_SCALE_COLUMNS)       // A's, then B's
#define SCALE_WORDS (DW_SCALE_TILE_BYTES / 8)                            // TMA's elements

static_assert(DW_CODES_ARE_MXFP8(SCHEME_A) || SCHEME_A == DW_CODES_NVFP4 || SCHEME_A == DW_CODES_MXFP4, "a scheme");
static_assert(DW_CODES_ARE_MXFP8(SCHEME_A) ? DW_CODES_ARE_MXFP8(SCHEME_B) : SCHEME_A == SCHEME_B, "one kind of MMA");
static_assert(!SWIGLU || TILE_N == 256, "each half has whole tiles of scales");
static_assert(DW_SCALED_SCALE_COLUMNS_USED(SCHEME_A, TILE_N) <= DW_SCALED_SCALE_COLUMNS, "too many scales");
static_assert(DW_SCALED_SHARED_BYTES(SCHEME_A, CTAS, TILE_N, STAGES) <= DW_GEMM_MOST_SHARED, "too many stages");

// The operands of all stages come first, then their scales: A's, then B's, by ranges of rows.
DEVICE uint32 operands_of(const shared_layout &s, int stage) { return s.stages + stage * OPERAND_BYTES; }
DEVICE uint32 scales_of(const shared_layout &s, int stage) {
    return s.stages + STAGES * OPERAND_BYTES + stage * SCALE_BYTES;
}

// ---- loads --------------------------------------------------------------------------------------------------

// Loads scales; tiles of scales that do not exist arrive as zeros.
DEVICE void load_scales(const dw_gemm_params &p, const tensor_map *map_a, const tensor_map *map_b, uint32 to,
                        uint32 full, int step, const tile &t) {
    int word = step * STEP_TILES * SCALE_WORDS;
    tma_load_matrix<CTAS>(to, map_a, full, word, t.row / DW_SCALE_TILE_ROWS);
#pragma unroll
    for (int i = 0; i < RANGES; i++)
        tma_load_matrix<CTAS>(to + (1 + i) * STEP_TILES * DW_SCALE_TILE_BYTES, map_b, full, word,
                              t.column / DW_SCALE_TILE_ROWS + i * (SWIGLU ? DW_SCALE_TILES_HIGH(p.n) : 1));
}

// ---- MMAs ---------------------------------------------------------------------------------------------------

// Copies the scales of a step into tensor memory: four columns for 128 rows of A; then 4 RANGES columns for each four
// scales of a row, those of one MMA adjacent.
DEVICE void copy_scales(uint32 columns, uint32 scales) {
#pragma unroll
    for (int i = 0; i < STEP_TILES; i++) {
        tensor_memory_copy_scales<CTAS>(columns + 4 * i, scales_descriptor(scales + i * DW_SCALE_TILE_BYTES));
#pragma unroll
        for (int range = 0; range < RANGES; range++)
            tensor_memory_copy_scales<CTAS>(
                columns + 4 * STEP_TILES + (i * RANGES + range) * 4,
                scales_descriptor(scales + ((1 + range) * STEP_TILES + i) * DW_SCALE_TILE_BYTES));
    }
}

// Waits until the accumulator has been read; if it shares columns with the previous one, until those have been.
DEVICE void wait_for_sums(const shared_layout &s, const ring &sums, const ring &before, bool is_first) {
    uint32 barrier = s.sums_taken + 8 * (OVERLAP ? before.stage : sums.stage);
    uint32 phase = OVERLAP ? before.phase : sums.phase ^ 1;
    if (OVERLAP && is_first) return;
    if constexpr (CTAS == 1) barrier_wait(barrier, phase);
    else barrier_wait_cluster(barrier, phase);
}

DEVICE void multiply_stages(const dw_gemm_params &p, const shared_layout &s, uint32 tensor_memory) {
    constexpr bool narrow = !DW_CODES_ARE_MXFP8(SCHEME_A);
    constexpr int kind = !narrow                      ? DW_SCALED_F8_E8M0_32
                         : SCHEME_A == DW_CODES_NVFP4 ? DW_SCALED_F4_E4M3_16
                                                      : DW_SCALED_F4_E8M0_32;
    constexpr uint32 shape =
        scaled_mma_descriptor<kind>(TILE_M, TILE_N, narrow || SCHEME_A == DW_CODES_MXFP8_E5M2,
                                    narrow || SCHEME_B == DW_CODES_MXFP8_E5M2);
    ring r = {0, 0}, sums = {0, 0}, before = {0, 0};
    walk w = {};
    tile t;
    while (next_tile<false>(p, s, w, t)) {
        uint32 d = tensor_memory + sums.stage * (TILE_N - OVERLAP), columns = tensor_memory + SCALE_COLUMN;
        // A column of scales has 32 rows.
        uint32 columns_b = columns + 4 * STEP_TILES + t.column % DW_SCALE_TILE_ROWS / 32;
        wait_for_sums(s, sums, before, w.round == 1);
        tensor_fence_after();
        for (int step = 0; step < steps_of(t); step++) {
            uint32 a = operands_of(s, r.stage);
            uint64 descriptor_a = operand_descriptor(a), descriptor_b = operand_descriptor(a + DW_GEMM_A_BYTES);
            barrier_wait(s.full + 8 * r.stage, r.phase);
            tensor_fence_after();
            copy_scales(columns, scales_of(s, r.stage));
#pragma unroll
            for (int i = 0; i < MMAS; i++) {
                int first = i * MMA_SCALES, group = first / DW_SCALE_TILE_COLUMNS;
                multiply_scaled<CTAS, kind>(d, descriptor_a + 2 * i, descriptor_b + 2 * i,
                                            shape | scaled_mma_scale(first % DW_SCALE_TILE_COLUMNS), columns + 4 * group,
                                            columns_b + 4 * RANGES * group, step > 0 || i > 0);
            }
            multiply_commit<CTAS>(s.empty + 8 * r.stage);
            advance(r, STAGES);
        }
        multiply_commit<CTAS>(s.sums + 8 * sums.stage);
        before = sums;
        advance(sums, 2);
    }
}

// ---- kernel -------------------------------------------------------------------------------------------------

extern "C" __global__ void CLUSTER __launch_bounds__(DW_GEMM_THREADS_OF(SCHEDULE), 1)
    sm100_gemm_scaled(const __grid_constant__ tensor_map map_a, const __grid_constant__ tensor_map map_b,
                      const __grid_constant__ tensor_map map_scales_a, const __grid_constant__ tensor_map map_scales_b,
                      const __grid_constant__ tensor_map map_d, const __grid_constant__ tensor_map map_r,
                      const __grid_constant__ dw_gemm_params p) {
    extern __shared__ uint8 memory[];
    shared_layout s = layout_shared(shared_address(memory));
    if (threadIdx.x == 0) {
        prefetch_map(&map_a);
        prefetch_map(&map_b);
        prefetch_map(&map_scales_a);
        prefetch_map(&map_scales_b);
        prefetch_map(&map_d);
        if constexpr (RESIDUAL) prefetch_map(&map_r);
    }
    uint32 tensor_memory = begin_block(s);

    auto load = [&](int stage, uint32 full, int step, const tile &t) {
        uint32 a = operands_of(s, stage);
        tma_load_matrix<CTAS>(a, &map_a, full, step * DW_GEMM_ROW_BYTES, t.row);
        load_b(p, a + DW_GEMM_A_BYTES, t, [&](uint32 to, int row) {
            tma_load_matrix<CTAS>(to, &map_b, full, step * DW_GEMM_ROW_BYTES, row);
        });
        load_scales(p, &map_scales_a, &map_scales_b, scales_of(s, stage), full, step, t);
    };
    auto multiply = [&] {
        if (elect_one()) multiply_stages(p, s, tensor_memory);
    };
    share_out(p, s, tensor_memory, &map_d, &map_r, load, multiply);
    end_block(tensor_memory);
}
