// Sums in two levels, for sm90_gemm.cu with PROMOTE: the tensor cores' sums of codes are added in F32 registers after
// each stage, because they have 14 bits (sm90_codes.cuh).
//
// 64 x 256 sums of a warpgroup and as many products would not fit its registers, so it multiplies panels of 128 columns of
// a stage, one after the other, and adds 64 products in each thread. While one warpgroup adds, the other's products occupy
// the tensor cores, for which the second warpgroup begins each tile a part of a panel later.
//
// With BLOCKS a warp of the loading warpgroup loads the scales of a stage's blocks beside it.
//
// Included by sm90_gemm.cu, whose functions it uses.
#ifndef DW_SM90_TWO_LEVELS_CUH
#define DW_SM90_TWO_LEVELS_CUH

#if PROMOTE

#define PANEL DW_SM90_PANEL_COLUMNS

// ---- scales of blocks -----------------------------------------------------------------------------------------

// Loads the scales of ROWS rows of an operand from `row` on, as the lane stores them: those of rows that do not exist are
// 0. `scales`: of the step's first row, or of the first square block.
template <int ROWS, bool SQUARE>
DEVICE void load_scales_of(const float *scales, int row, int rows, int wide, float *to) {
#pragma unroll
    for (int i = 0; i < ROWS / 32; i++) {
        const int first = row + 32 * i;
        if constexpr (SQUARE) {
            if (i % 4 != 0) to[i] = to[i - 1];
            else to[i] = first < rows ? scales[(long long)(first / DW_SM90_BLOCK) * wide] : 0.f;
        } else {
            to[i] = first + (int)lane_index() < rows ? scales[first + lane_index()] : 0.f;
        }
    }
}

// Loads the scales of each stage's rows of A, then of B. Executed by a whole warp.
DEVICE void load_scales(const dw_sm90_gemm_params &p, const shared_layout &s) {
    ring r = {0, 0};
    walk w = {};
    tile t;
    while (next_tile(p, w, t))
        for (int step = 0; step < steps_of(t); step++) {
            const uint32 to = s.scales + r.stage * SCALES_BYTES + lane_index() * 4;
            float a[TILE_M / 32], b[TILE_N / 32];
            load_scales_of<TILE_M, SQUARE_A>(p.scale_a + (SQUARE_A ? step : (long long)step * p.m), t.row, p.m, p.wide_a, a);
            load_scales_of<TILE_N, SQUARE_B>(p.scale_b + (SQUARE_B ? step : (long long)step * p.n), t.column, p.n, p.wide_b,
                                             b);
            barrier_wait(s.empty + 8 * r.stage, r.phase ^ 1);
#pragma unroll
            for (int i = 0; i < TILE_M / 32; i++) shared_store_f32(to + 128 * i, a[i]);
#pragma unroll
            for (int i = 0; i < TILE_N / 32; i++) shared_store_f32(to + TILE_M * 4 + 128 * i, b[i]);
            __syncwarp();
            if (lane_index() == 0) barrier_arrive(s.full + 8 * r.stage);
            advance(r, STAGES);
        }
}

// Adds the products of a panel times the scales of their blocks. `a`: those of the thread's two rows; `b`: address of
// those of the panel's rows of B.
DEVICE void add_scaled(const float *a, uint32 b, const float *products, float *sums) {
    if constexpr (SQUARE_B) { // a panel has the columns of one block
        const float of_b = shared_load_f32(b), factors[2] = {a[0] * of_b, a[1] * of_b};
#pragma unroll
        for (int i = 0; i < PANEL / 2; i++) sums[i] += products[i] * factors[i / 2 % 2];
    } else {
#pragma unroll
        for (int i = 0; i < PANEL / 8; i++) {
            const float2 of_b = shared_load_f32_pair(b + (8 * i + 2 * (lane_index() & 3)) * 4);
#pragma unroll
            for (int j = 0; j < 4; j++) sums[4 * i + j] += products[4 * i + j] * (a[j / 2] * (j % 2 ? of_b.y : of_b.x));
        }
    }
}

// ---- products -------------------------------------------------------------------------------------------------

// The warpgroup's share of a tile, and the descriptors of its rows of both operands in the first stage. Others differ in
// the address, which counts units of 16 bytes.
typedef struct share {
    int half, rows, columns; // which warpgroup's; where it begins in the tile
    uint64 a, b;
} share;

// The second warpgroup begins a tile when the first one has multiplied most of its first panel.
enum { BEHIND = 5 }; // a named barrier
DEVICE void stay_behind(const share &w) {
    if (w.half == 1) named_sync(BEHIND, 256);
}
DEVICE void go_ahead(const share &w) {
    if (w.half == 0) named_arrive(BEHIND, 256);
}

// Multiplies the ring's next stage and adds its sums.
DEVICE void multiply_stage(const shared_layout &s, ring &r, const share &w, bool first, float *products, float *sums) {
    const uint32 scales = s.scales + r.stage * SCALES_BYTES;
    const int row = w.rows + threadIdx.x % 128 / 32 * 16 + lane_index() / 4;
    const uint64 from = r.stage * (STAGE_BYTES / 16);
    float of_a[2];
    barrier_wait(s.full + 8 * r.stage, r.phase);
#pragma unroll
    for (int panel = 0; panel < WIDTH / PANEL; panel++) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < SLICES; i++) {
            wgmma_codes<PANEL>(products, w.a + from + 2 * i, w.b + from + panel * (PANEL * 128 / 16) + 2 * i, i > 0);
            if (panel == 0 && i == SLICES - 2) wgmma_commit();
        }
        wgmma_commit();
        if constexpr (BLOCKS) {
            of_a[0] = shared_load_f32(scales + row * 4);
            of_a[1] = shared_load_f32(scales + (row + 8) * 4);
        }
        if (panel == 0) {
            wgmma_wait<1>();
            if (first) go_ahead(w);
        }
        wgmma_wait<0>();
        keep<PANEL / 2>(products);
        if constexpr (BLOCKS) {
            add_scaled(of_a, scales + (TILE_M + w.columns + panel * PANEL) * 4, products, sums + panel * PANEL / 2);
            __syncwarp(); // all lanes have read the scales
        }
        if (panel == WIDTH / PANEL - 1) release(s, r.stage);
        if constexpr (!BLOCKS) {
            float *sums_of = sums + panel * PANEL / 2;
#pragma unroll
            for (int i = 0; i < PANEL / 2; i++) sums_of[i] += products[i];
        }
    }
    advance(r, STAGES);
}

// Multiplies the warpgroup's share of a tile.
DEVICE void multiply_in_two_levels(const shared_layout &s, ring &r, const share &w, int steps, float *sums) {
    float products[PANEL / 2];
#pragma unroll
    for (int i = 0; i < PANEL / 2; i++) products[i] = 0.f;
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) sums[i] = 0.f;
    stay_behind(w);
    if (steps == 0) go_ahead(w);
    for (int step = 0; step < steps; step++) multiply_stage(s, r, w, step == 0, products, sums);
}

DEVICE void compute_in_two_levels(const dw_sm90_gemm_params &p, const shared_layout &s) {
    share w;
    // The compiler must see that all threads of a warp have the same.
    w.half = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    w.rows = SPLIT_N ? 0 : w.half * 64, w.columns = SPLIT_N ? w.half * WIDTH : 0;
    w.a = operand(s.stages + w.rows * 128);
    w.b = operand(s.stages + A_BYTES + w.columns * 128);
    ring r = {0, 0};
    walk at = {};
    tile t, next;
    bool more = next_tile(p, at, t);
    while (more) {
        const int steps = __shfl_sync(0xffffffff, steps_of(t), 0);
        t.row += w.rows, t.column += w.columns;
        more = next_tile(p, at, next);
        if (__shfl_sync(0xffffffff, t.row >= t.end || t.column >= p.n, 0)) { // none of its elements exists
            stay_behind(w);
            go_ahead(w);
            for (int step = 0; step < steps; step++) pass_stage(s, r);
        } else {
            float sums[PARTS][WIDTH / 2];
            const float factor = factor_of(p, t);
            if constexpr (ROW_SCALES) load_row_scales(p, s, t);
            if constexpr (BIAS) load_bias(p, s, t);
            multiply_in_two_levels(s, r, w, steps, sums[0]);
            if constexpr (ROW_SCALES) wait_for_row_scales();
            __syncwarp();
            store_tile(p, s, t, factor, sums);
        }
        t = next;
    }
}

#endif
#endif
