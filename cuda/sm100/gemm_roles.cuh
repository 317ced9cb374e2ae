// The roles of warps in a GEMM's thread block on sm_100, as far as they do not depend on the operands' format.
// Defines: those of gemm_epilogue.cuh, and STEP: elements of a row in a stage.
#ifndef DW_SM100_GEMM_ROLES_CUH
#define DW_SM100_GEMM_ROLES_CUH

#include "gemm_epilogue.cuh"

DEVICE int steps_of(const tile &t) { return (t.k + STEP - 1) / STEP; }

// Loads this block's rows of B by load(to, first row of B), each time B_ROWS of them. With SwiGLU half of the tile's
// rows are the gate's, which the pair's first block holds.
#define B_ROWS (CTAS == 2 || SWIGLU ? TILE_N / 2 : TILE_N)
template <class LOAD> DEVICE void load_b(const dw_gemm_params &p, uint32 to, const tile &t, LOAD load) {
    if constexpr (CTAS == 2) {
        int rank = cluster_rank();
        load(to, SWIGLU ? rank * p.n + t.column : t.column + rank * (TILE_N / 2));
    } else {
        load(to, t.column);
        if constexpr (SWIGLU) load(to + DW_GEMM_B_BYTES(1, TILE_N / 2), p.n + t.column);
    }
}

// Called by one thread. load(stage, its full barrier, step, tile) loads the rows of A and B of each step once the
// stage's previous MMAs are complete. The loads of both blocks of a pair complete on the barriers of the first block,
// which issues the MMAs.
template <class LOAD> DEVICE void load_stages(const dw_gemm_params &p, const shared_layout &s, LOAD load) {
    bool first = CTAS == 1 || cluster_rank() == 0;
    uint32 full = CTAS == 1 ? s.full : cluster_address(s.full, 0);
    ring r = {0, 0};
    walk w = {};
    tile t;
    while (next_tile<false>(p, s, w, t)) {
        for (int step = 0; step < steps_of(t); step++) {
            barrier_wait(s.empty + 8 * r.stage, r.phase ^ 1);
            if (first) barrier_expect(s.full + 8 * r.stage, CTAS * STAGE_BYTES);
            load(r.stage, full + 8 * r.stage, step, t);
            advance(r, STAGES);
        }
    }
    // The block must not exit before every MMA has arrived on its barrier: a later arrival would hit memory of
    // another block.
    for (int i = 0; i < STAGES; i++) {
        barrier_wait(s.empty + 8 * r.stage, r.phase ^ 1);
        advance(r, STAGES);
    }
}

// Four warps run the epilogue, one calls `multiply`; one thread each loads and, with cluster launch control, requests
// tiles.
template <class LOAD, class MULTIPLY>
DEVICE void share_out(const dw_gemm_params &p, const shared_layout &s, uint32 tensor_memory, const tensor_map *map_d,
                      const tensor_map *map_r, LOAD load, MULTIPLY multiply) {
    int warp = threadIdx.x / 32;
    if (warp < 4) {
        bring_out(p, s, tensor_memory, map_d, map_r);
    } else if (warp == 4) {
        if (elect_one()) load_stages(p, s, load);
    } else if (CTAS == 1 || cluster_rank() == 0) {
        if (warp == 5) {
            multiply();
        } else if (elect_one()) {
            ask_for_tiles(s);
        }
    }
}

#endif
