// Matrix product D = f(alpha A B^T), A (m x k) and B (n x k) of BF16 or F16, rows contiguous, sums in F32. Proven on
// the emulator, not run on hardware.
//
// A block, or a pair of blocks that share their halves of B (CTAS 2), stays and takes tile after tile of D, 128 rows
// for each block. One thread loads stages of 64 columns of A and B, one multiplies them into tensor memory, four warps
// bring the sums out, 32 rows each. There are two accumulators: while one is brought out the other is filled.
//
// Each of these waits for the others through barriers alone:
//   full, empty         a stage has arrived; its products are done
//   sums, sums_taken    an accumulator is complete; it has been read
//
// Defines: CTAS, TILE_N, STAGES (gemm_tiles.h), ELEMENT, OUTPUT, ACTIVATION, BIAS, RESIDUAL (gemm_epilogue.cuh),
// SCHEDULE (gemm_schedule.cuh). SwiGLU: B has the rows of the gate, then those of the other factor, and a tile takes
// half of its columns from each.

#include "gemm_params.h"

#define STAGE_BYTES DW_GEMM_STAGE_BYTES(CTAS, TILE_N)
#define TENSOR_COLUMNS DW_GEMM_COLUMNS(TILE_N)
#define PRODUCT_STEP 16

#include "gemm_epilogue.cuh"

static_assert(DW_GEMM_SHARED_BYTES(CTAS, TILE_N, STAGES) <= DW_GEMM_MOST_SHARED, "too many stages");

DEVICE int steps_of(const dw_gemm_params &p) { return (p.k + DW_GEMM_STEP - 1) / DW_GEMM_STEP; }

// ---- loads --------------------------------------------------------------------------------------------------

// This block's rows of B: with SwiGLU half of the tile's are the gate's, which the pair's first block holds.
DEVICE void load_b(const dw_gemm_params &p, const tensor_map *map, uint32 to, uint32 full, int k, const tile &t) {
    if constexpr (CTAS == 2) {
        int rank = cluster_rank();
        tma_load_matrix<2>(to, map, full, k, SWIGLU ? rank * p.n + t.column : t.column + rank * (TILE_N / 2));
    } else {
        tma_load_matrix<1>(to, map, full, k, t.column);
        if constexpr (SWIGLU) tma_load_matrix<1>(to + DW_GEMM_B_BYTES(1, TILE_N / 2), map, full, k, p.n + t.column);
    }
}

// What both blocks of a pair load is counted by the barriers of the first, where the products are issued.
DEVICE void load_stages(const dw_gemm_params &p, const shared_layout &s, const tensor_map *map_a,
                        const tensor_map *map_b) {
    bool first = CTAS == 1 || cluster_rank() == 0;
    uint32 full = CTAS == 1 ? s.full : cluster_address(s.full, 0);
    ring r = {0, 0};
    walk w = {};
    tile t;
    while (next_tile<false>(p, s, w, t)) {
        for (int step = 0; step < steps_of(p); step++) {
            uint32 a = s.stages + r.stage * STAGE_BYTES;
            barrier_wait(s.empty + 8 * r.stage, r.phase ^ 1);
            if (first) barrier_expect(s.full + 8 * r.stage, CTAS * STAGE_BYTES);
            tma_load_matrix<CTAS>(a, map_a, full + 8 * r.stage, step * DW_GEMM_STEP, t.row);
            load_b(p, map_b, a + DW_GEMM_A_BYTES, full + 8 * r.stage, step * DW_GEMM_STEP, t);
            advance(r, STAGES);
        }
    }
    // The block stays until every product has said that it is done: that would arrive in nobody's memory.
    for (int i = 0; i < STAGES; i++) {
        barrier_wait(s.empty + 8 * r.stage, r.phase ^ 1);
        advance(r, STAGES);
    }
}

// ---- products -----------------------------------------------------------------------------------------------

DEVICE void multiply_stages(const dw_gemm_params &p, const shared_layout &s, uint32 tensor_memory) {
    constexpr uint32 shape = product_descriptor(TILE_M, TILE_N);
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
            for (int i = 0; i < DW_GEMM_STEP / PRODUCT_STEP; i++)
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
    int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        prefetch_map(&map_a);
        prefetch_map(&map_b);
        prefetch_map(&map_d);
        if constexpr (RESIDUAL) prefetch_map(&map_r);
    }
    uint32 tensor_memory = begin_block(s);

    if (warp < 4) {
        bring_out(p, s, tensor_memory, &map_d, &map_r);
    } else if (warp == 4) {
        if (elect_one()) load_stages(p, s, &map_a, &map_b);
    } else if (CTAS == 1 || cluster_rank() == 0) {
        if (warp == 5) {
            if (elect_one()) multiply_stages(p, s, tensor_memory);
        } else if (elect_one()) {
            ask_for_tiles(s);
        }
    }
    end_block(tensor_memory);
}
