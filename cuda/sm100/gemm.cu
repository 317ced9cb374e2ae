// GEMM D = f(alpha A B^T), A (m x k) and B (n x k) of BF16 or F16, rows contiguous, accumulators in F32. Proven on
// the emulator, not run on hardware.
//
// A thread block, or a pair of blocks that share their halves of B (CTAS 2), is persistent and processes tile after
// tile of D, 128 rows per block. One thread loads stages of 64 columns of A and B, one issues MMAs into tensor
// memory, four warps store the accumulators, 32 rows each. There are two accumulators: while one is stored, the other
// is filled.
//
// An operand whose contiguous axis is not the contraction (TURNED_A: A is stored as k x m, TURNED_B: B as k x n) is
// loaded in boxes of 64 of its columns, which the tensor cores read as they are.
//
// Several GEMMs may share a launch (GROUPS, gemm_groups.h): rows of A in groups with a matrix of B each, or groups of
// the contraction. A tile at the end of a group of rows computes rows of the next group too, which the epilogue does
// not store. In the contraction, MMAs end with the 16 rows in which the group ends, of which the next group's are
// overwritten by zeros in shared memory.
//
// The roles synchronize only through barriers:
//   full, empty         a stage has arrived; its MMAs are complete
//   sums, sums_taken    an accumulator is complete; it has been read
//
// Defines: CTAS, TILE_N, STAGES (gemm_tiles.h), ELEMENT, OUTPUT, ACTIVATION, BIAS, RESIDUAL (gemm_epilogue.cuh),
// SCHEDULE, GROUPS (gemm_schedule.cuh), TURNED_A, TURNED_B (without them 0). SwiGLU: B has the rows of the gate, then
// those of the other factor, and a tile has half of its columns from each.

#include "gemm_params.h"

#define STEP DW_GEMM_STEP
#define STAGE_BYTES DW_GEMM_STAGE_BYTES(CTAS, TILE_N)
#define TENSOR_COLUMNS DW_GEMM_COLUMNS(TILE_N)
#define MMA_STEP 16

#ifndef TURNED_A
#define TURNED_A 0
#endif
#ifndef TURNED_B
#define TURNED_B 0
#endif

#include "gemm_roles.cuh"
#include "group_offsets.cuh"

// Boxes of a turned operand have 64 columns.
static_assert(!TURNED_B || B_ROWS % 64 == 0, "whole boxes");
static_assert(GROUPS != DW_GROUPS_CONTRACTION || (TURNED_A && TURNED_B), "groups are rows of both operands");
static_assert(GROUPS != DW_GROUPS_ROWS || !TURNED_A, "groups are rows of A");
static_assert(DW_GEMM_SHARED_BYTES(CTAS, TILE_N, STAGES) <= DW_GEMM_MOST_SHARED, "too many stages");

// ---- loads --------------------------------------------------------------------------------------------------

// Loads ROWS rows of an operand from `row` on, elements `at` to `at` + 63 of the contraction.
template <int ROWS, bool TURNED>
DEVICE void load_operand(uint32 to, const tensor_map *map, uint32 full, int at, int row, int group) {
#pragma unroll
    for (int i = 0; i < ROWS; i += TURNED ? 64 : ROWS) {
        int column = TURNED ? row + i : at, line = TURNED ? at : row;
        if constexpr (GROUPS == DW_GROUPS_BATCH) tma_load_matrix<CTAS>(to + i * 128, map, full, column, line);
        else tma_load(to + i * 128, map, full, column, line, group, 0);
    }
}

// ---- MMAs ---------------------------------------------------------------------------------------------------

// Descriptor of elements 16 i to 16 i + 15 of the contraction of an operand at `address`.
template <bool TURNED> DEVICE uint64 operand(uint32 address, int i) {
    if constexpr (TURNED) return operand_descriptor_transposed(address, STEP * 128) + 128 * i;
    return operand_descriptor(address) + 2 * i;
}

// Overwrites by zeros the elements `count` to `end` - 1 of the contraction in both operands of a stage: the next
// group's, which may be infinite. Called by a warp.
DEVICE void clear_rows(uint32 stage, int count, int end) {
    constexpr int boxes = (TILE_M + TILE_N) / 64;
    int chunks = (end - count) * 8;
    for (int i = lane_index(); i < chunks * boxes; i += 32)
        shared_store16(stage + i / chunks * STEP * 128 + count * 128 + i % chunks * 16, make_uint4(0, 0, 0, 0));
    fence_async_shared();
    __syncwarp();
}

// Called by one thread; for groups of the contraction by a warp, whose first lane issues the MMAs.
#define WARP_MULTIPLIES (GROUPS == DW_GROUPS_CONTRACTION)
DEVICE void multiply_stages(const dw_gemm_params &p, const shared_layout &s, uint32 tensor_memory) {
    constexpr uint32 shape =
        mma_descriptor(TILE_M, TILE_N) | (TURNED_A ? TRANSPOSED_A : 0) | (TURNED_B ? TRANSPOSED_B : 0);
    const bool issues = !WARP_MULTIPLIES || lane_index() == 0;
    ring r = {0, 0}, sums = {0, 0};
    walk w = {};
    tile t;
    while (next_tile<false>(p, s, w, t)) {
        if constexpr (CTAS == 1) barrier_wait(s.sums_taken + 8 * sums.stage, sums.phase ^ 1);
        else barrier_wait_cluster(s.sums_taken + 8 * sums.stage, sums.phase ^ 1);
        tensor_fence_after();
        for (int step = 0; step < steps_of(t); step++) {
            uint32 a = s.stages + r.stage * STAGE_BYTES, b = a + DW_GEMM_A_BYTES;
            int count = STEP; // elements of the contraction to multiply
            barrier_wait(s.full + 8 * r.stage, r.phase);
            tensor_fence_after();
            if constexpr (GROUPS == DW_GROUPS_CONTRACTION) {
                int left = t.k - step * STEP;
                count = min(STEP, (left + MMA_STEP - 1) / MMA_STEP * MMA_STEP);
                if (left < count) clear_rows(a, left, count);
            }
            if (issues) {
#pragma unroll
                for (int i = 0; i < STEP / MMA_STEP; i++)
                    if (i * MMA_STEP < count)
                        multiply<CTAS>(tensor_memory + sums.stage * TILE_N, operand<TURNED_A>(a, i),
                                       operand<TURNED_B>(b, i), shape, step > 0 || i > 0);
                multiply_commit<CTAS>(s.empty + 8 * r.stage);
            }
            advance(r, STAGES);
        }
        if (issues) multiply_commit<CTAS>(s.sums + 8 * sums.stage);
        advance(sums, 2);
    }
}

// ---- kernel -------------------------------------------------------------------------------------------------

extern "C" __global__ void CLUSTER __launch_bounds__(DW_GEMM_THREADS_OF(SCHEDULE), 1)
    sm100_gemm(const __grid_constant__ tensor_map map_a, const __grid_constant__ tensor_map map_b,
               const __grid_constant__ tensor_map map_d, const __grid_constant__ tensor_map map_r,
               const __grid_constant__ dw_gemm_params p) {
    extern __shared__ uint8 memory[];
    shared_layout s = layout_shared(shared_address(memory));
    if (threadIdx.x == 0) {
        prefetch_map(&map_a);
        prefetch_map(&map_b);
        prefetch_map(&map_d);
        if constexpr (RESIDUAL) prefetch_map(&map_r);
    }
    uint32 tensor_memory = begin_block(s);
    if constexpr (GROUPS != DW_GROUPS_BATCH)
        check_offsets(p.offsets, 1, p.groups, GROUPS == DW_GROUPS_ROWS ? p.m : p.k, p.error);

    auto load = [&](int stage, uint32 full, int step, const tile &t) {
        uint32 a = s.stages + stage * STAGE_BYTES;
        int at = t.first + step * STEP;
        load_operand<DW_GEMM_ROWS, TURNED_A>(a, &map_a, full, at, t.row, 0);
        load_b(p, a + DW_GEMM_A_BYTES, t, [&](uint32 to, int row) {
            load_operand<B_ROWS, TURNED_B>(to, &map_b, full, at, row, GROUPS == DW_GROUPS_ROWS ? t.group : 0);
        });
    };
    auto multiply = [&] {
        if (WARP_MULTIPLIES || elect_one()) multiply_stages(p, s, tensor_memory);
    };
    share_out(p, s, tensor_memory, &map_d, &map_r, load, multiply);
    end_block(tensor_memory);
}
