// GEMM D = f(alpha A B^T), A (m x k) and B (n x k) of BF16 or F16, rows contiguous, accumulators in F32. Proven on
// the emulator, not run on hardware.
//
// A thread block, or a pair of blocks that share their halves of B (CTAS 2), is persistent and processes tile after
// tile of D, 128 rows per block. One thread loads stages of 64 columns of A and B, one issues MMAs into tensor
// memory, four warps store the accumulators, 32 rows each. There are two accumulators: while one is stored, the other
// is filled.
//
// The roles synchronize only through barriers:
//   full, empty         a stage has arrived; its MMAs are complete
//   sums, sums_taken    an accumulator is complete; it has been read
//
// Defines: CTAS, TILE_N, STAGES (gemm_tiles.h), ELEMENT, OUTPUT, ACTIVATION, BIAS, RESIDUAL (gemm_epilogue.cuh),
// SCHEDULE (gemm_schedule.cuh). SwiGLU: B has the rows of the gate, then those of the other factor, and a tile has
// half of its columns from each.

#include "gemm_params.h"

#define STEP DW_GEMM_STEP
#define STAGE_BYTES DW_GEMM_STAGE_BYTES(CTAS, TILE_N)
#define TENSOR_COLUMNS DW_GEMM_COLUMNS(TILE_N)
#define MMA_STEP 16

#include "gemm_roles.cuh"

static_assert(DW_GEMM_SHARED_BYTES(CTAS, TILE_N, STAGES) <= DW_GEMM_MOST_SHARED, "too many stages");

// ---- MMAs ---------------------------------------------------------------------------------------------------

DEVICE void multiply_stages(const dw_gemm_params &p, const shared_layout &s, uint32 tensor_memory) {
    constexpr uint32 shape = mma_descriptor(TILE_M, TILE_N);
    ring r = {0, 0}, sums = {0, 0};
    walk w = {};
    tile t;
    while (next_tile<false>(p, s, w, t)) {
        if constexpr (CTAS == 1) barrier_wait(s.sums_taken + 8 * sums.stage, sums.phase ^ 1);
        else barrier_wait_cluster(s.sums_taken + 8 * sums.stage, sums.phase ^ 1);
        tensor_fence_after();
        for (int step = 0; step < steps_of(p); step++) {
            uint32 a = s.stages + r.stage * STAGE_BYTES;
            uint64 descriptor_a = operand_descriptor(a), descriptor_b = operand_descriptor(a + DW_GEMM_A_BYTES);
            barrier_wait(s.full + 8 * r.stage, r.phase);
            tensor_fence_after();
#pragma unroll
            for (int i = 0; i < STEP / MMA_STEP; i++)
                multiply<CTAS>(tensor_memory + sums.stage * TILE_N, descriptor_a + 2 * i, descriptor_b + 2 * i, shape,
                               step > 0 || i > 0);
            multiply_commit<CTAS>(s.empty + 8 * r.stage);
            advance(r, STAGES);
        }
        multiply_commit<CTAS>(s.sums + 8 * sums.stage);
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

    auto load = [&](int stage, uint32 full, int step, const tile &t) {
        uint32 a = s.stages + stage * STAGE_BYTES;
        tma_load_matrix<CTAS>(a, &map_a, full, step * STEP, t.row);
        load_b(p, &map_b, a + DW_GEMM_A_BYTES, full, step * STEP, t);
    };
    auto multiply = [&] { multiply_stages(p, s, tensor_memory); };
    share_out(p, s, tensor_memory, &map_d, &map_r, load, multiply);
    end_block(tensor_memory);
}
