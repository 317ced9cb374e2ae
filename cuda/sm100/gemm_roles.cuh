// Who does what in a block of a matrix product of sm_100, and of that what does not depend on what the operands are.
// Defines: those of gemm_epilogue.cuh, and STEP: elements of a row that a stage holds.
#ifndef DW_SM100_GEMM_ROLES_CUH
#define DW_SM100_GEMM_ROLES_CUH

#include "gemm_epilogue.cuh"

DEVICE int steps_of(const dw_gemm_params &p) { return (p.k + STEP - 1) / STEP; }

// This block's rows of B, from `column` on, in elements of the map: with SwiGLU half of the tile's are the gate's, which
// the pair's first block holds.
DEVICE void load_b(const dw_gemm_params &p, const tensor_map *map, uint32 to, uint32 full, int column, const tile &t) {
    if constexpr (CTAS == 2) {
        int rank = cluster_rank();
        tma_load_matrix<2>(to, map, full, column, SWIGLU ? rank * p.n + t.column : t.column + rank * (TILE_N / 2));
    } else {
        tma_load_matrix<1>(to, map, full, column, t.column);
        if constexpr (SWIGLU) tma_load_matrix<1>(to + DW_GEMM_B_BYTES(1, TILE_N / 2), map, full, column, p.n + t.column);
    }
}

// By one thread: load(stage, its full barrier, step, tile) brings in the rows of A and B of each step, once the stage's
// products of before are done. What both blocks of a pair load is counted by the barriers of the first, where the
// products are issued.
template <class LOAD> DEVICE void load_stages(const dw_gemm_params &p, const shared_layout &s, LOAD load) {
    bool first = CTAS == 1 || cluster_rank() == 0;
    uint32 full = CTAS == 1 ? s.full : cluster_address(s.full, 0);
    ring r = {0, 0};
    walk w = {};
    tile t;
    while (next_tile<false>(p, s, w, t)) {
        for (int step = 0; step < steps_of(p); step++) {
            barrier_wait(s.empty + 8 * r.stage, r.phase ^ 1);
            if (first) barrier_expect(s.full + 8 * r.stage, CTAS * STAGE_BYTES);
            load(r.stage, full + 8 * r.stage, step, t);
            advance(r, STAGES);
        }
    }
    // The block stays until every product has said that it is done: that would arrive in nobody's memory.
    for (int i = 0; i < STAGES; i++) {
        barrier_wait(s.empty + 8 * r.stage, r.phase ^ 1);
        advance(r, STAGES);
    }
}

// Four warps bring out; one thread each loads, multiplies and, where tiles are asked for, asks.
template <class LOAD, class MULTIPLY>
DEVICE void share_out(const dw_gemm_params &p, const shared_layout &s, uint32 tensor_memory, const tensor_map *map_d,
                      const tensor_map *map_r, LOAD load, MULTIPLY multiply_stages) {
    int warp = threadIdx.x / 32;
    if (warp < 4) {
        bring_out(p, s, tensor_memory, map_d, map_r);
    } else if (warp == 4) {
        if (elect_one()) load_stages(p, s, load);
    } else if (CTAS == 1 || cluster_rank() == 0) {
        if (warp == 5) {
            if (elect_one()) multiply_stages();
        } else if (elect_one()) {
            ask_for_tiles(s);
        }
    }
}

#endif
