// The tile schedule of the GEMMs on sm_100. Defines: CTAS, TILE_N, ACTIVATION, SCHEDULE (gemm_params.h), GROUPS
// (gemm_groups.h; without it a single GEMM). In a static schedule, a block's tiles follow from its index. With cluster
// launch control, one warp requests the tiles of blocks that are not launched yet and puts the responses into a ring,
// which all roles read.
#ifndef DW_SM100_GEMM_SCHEDULE_CUH
#define DW_SM100_GEMM_SCHEDULE_CUH

#include "gemm_block.cuh"
#include "gemm_params.h"
#include "sm100.cuh"

#define SWIGLU (ACTIVATION == DW_GEMM_SWIGLU)
#define TILE_M (CTAS * DW_GEMM_ROWS)
#define TILE_COLUMNS (SWIGLU ? TILE_N / 2 : TILE_N) // columns of D
#define BAND 8
#ifndef GROUPS
#define GROUPS DW_GROUPS_BATCH
#endif

#include "group_tiles.cuh"

static_assert(TILE_N % 64 == 0 && TILE_N <= 256, "the width of one MMA");
static_assert(GROUPS == DW_GROUPS_BATCH || (CTAS == 1 && SCHEDULE == DW_GEMM_STATIC), "groups are for single blocks");

// A thread's position in its block's sequence of tiles; must start zeroed.
typedef struct walk {
    int round, index;
    ring answers;
    group_walk groups;
} walk;

// Returns the number of the tile in the response at `answer`; -1: none.
DEVICE int answered_tile(uint32 answer) {
    uint32 canceled, block;
    launch_control_read(answer, canceled, block);
    return canceled ? (int)block / CTAS : -1;
}

template <bool WARP> DEVICE int take_answer(const shared_layout &s, ring &r) {
    barrier_wait_cluster(s.answered + 8 * r.stage, r.phase);
    int index = answered_tile(s.answers + 16 * r.stage);
    fence_async_shared();
    if constexpr (WARP) __syncwarp();
    if (!WARP || lane_index() == 0) {
        if constexpr (CTAS == 1) barrier_arrive(s.answers_taken + 8 * r.stage);
        else barrier_arrive_cluster(cluster_address(s.answers_taken + 8 * r.stage, 0));
    }
    advance(r, DW_GEMM_ANSWERS);
    return index;
}

// Computes the block's next tile, whose row is the block's first; returns false if there is none. Called by a whole
// warp, or by one thread of it.
template <bool WARP> DEVICE bool next_tile(const dw_gemm_params &p, const shared_layout &s, walk &w, tile &t) {
    if (w.round++ == 0) w.index = blockIdx.x / CTAS;
    else if constexpr (SCHEDULE == DW_GEMM_LAUNCH_CONTROL) w.index = take_answer<WARP>(s, w.answers);
    else w.index += gridDim.x / CTAS;
    if (w.index < 0 || !find_tile(p, w.index, w.groups, t)) return false;
    // Wrong offsets are reported (check_offsets), but must not lead beyond the tensors.
    if constexpr (GROUPS == DW_GROUPS_ROWS) t.end = min(t.end, p.m);
    if constexpr (GROUPS == DW_GROUPS_CONTRACTION) t.k = min(t.k, p.k);
    if constexpr (CTAS == 2) t.row += (int)cluster_rank() * DW_GEMM_ROWS;
    return true;
}

// Requests tiles until there are none left. Called by one thread of the pair's first block.
DEVICE void ask_for_tiles(const shared_layout &s) {
    ring r = {0, 0};
    for (;;) {
        uint32 answer = s.answers + 16 * r.stage, answered = s.answered + 8 * r.stage;
        barrier_wait_cluster(s.answers_taken + 8 * r.stage, r.phase ^ 1);
        if constexpr (CTAS == 1) {
            barrier_expect(answered, 16);
        } else {
            barrier_expect_cluster(cluster_address(answered, 0), 16);
            barrier_expect_cluster(cluster_address(answered, 1), 16);
        }
        launch_control_ask<CTAS>(answer, answered);
        barrier_wait_cluster(answered, r.phase);
        int index = answered_tile(answer);
        fence_async_shared();
        if (index < 0) return; // no further request is allowed
        advance(r, DW_GEMM_ANSWERS);
    }
}

#endif
