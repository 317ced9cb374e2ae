// Attention, backward, on consumer and workstation Blackwell GPUs: two kernels that compute P and dS again from Q, K, V, dO
// and LSE. Proven on the emulator, not run on hardware.
//
// sm120_attention_backward_queries computes dQ of TILE_M queries of a head in each block, which goes through the keys; it
// also stores the row sums of dO * O for the other. sm120_attention_backward computes dK and dV of TILE_M keys in each
// block, which goes through the queries of all heads that share these. Each result is summed in one place and one order,
// so that it has the same bits in every run: there are no atomic additions, for which each kernel computes two GEMMs that
// one kernel for all gradients would share.
//
// A warp has 16 of the rows that stay. One thread loads; full and empty barriers lead through the ring of stages, as in
// sm120_attention_forward.cu.
//
// Defines: HEAD_DIM (64, 96, 128), TILE_M, TILE_N, STAGES, CONSUMERS (sm120_attention_tiles.h), ELEMENT, WINDOW,
// DROPOUT.

#define SOFTCAP 0
#define PACKED 0

#include "attention_forward_rows.cuh"
#include "sm120.cuh"
#include "sm120_attention_tiles.h"

#define WARPS (4 * CONSUMERS)
#define THREADS DW_SM120_ATTENTION_THREADS(CONSUMERS)
#define LOG2_E 1.4426950408889634f
#define STEPS (HEAD_DIM / 16)

static_assert(TILE_M == 16 * WARPS, "a warp has 16 rows");
static_assert(TILE_N % 16 == 0, "rows of a stage are multiplied 16 at a time");

// Tiles x and y that stay, then two in each stage; barriers, 8 bytes apart.
typedef struct memory_layout {
    uint32 x, y, stages, kept, full, empty;
} memory_layout;

DEVICE memory_layout begin_block(const void *memory) {
    memory_layout s;
    s.x = shared_address(memory);
    s.y = s.x + Q_BYTES;
    s.stages = s.y + Q_BYTES;
    s.kept = s.stages + STAGES * 2 * KV_BYTES;
    s.full = s.kept + 8;
    s.empty = s.full + 8 * STAGES;
    if (threadIdx.x == 0) {
        barrier_init(s.kept, 1);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(s.full + 8 * i, 1);
            barrier_init(s.empty + 8 * i, WARPS);
        }
        fence_barrier_init();
    }
    __syncthreads();
    return s;
}

DEVICE void load_box(uint32 to, int rows, const tensor_map *map, uint32 barrier, int row, int head, int batch) {
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
        tma_load(to + block * rows * 128, map, barrier, block * 64, row, head, batch);
}
DEVICE void load_kept(const memory_layout &s, const tensor_map *map_x, const tensor_map *map_y, int row, int head,
                      int batch) {
    barrier_expect(s.kept, 2 * Q_BYTES);
    load_box(s.x, TILE_M, map_x, s.kept, row, head, batch);
    load_box(s.y, TILE_M, map_y, s.kept, row, head, batch);
}
DEVICE void load_stage(const memory_layout &s, ring &r, const tensor_map *map_x, const tensor_map *map_y, int row,
                       int head, int batch) {
    uint32 to = s.stages + r.stage * 2 * KV_BYTES, full = s.full + 8 * r.stage;
    barrier_wait(s.empty + 8 * r.stage, r.phase ^ 1);
    barrier_expect(full, 2 * KV_BYTES);
    load_box(to, TILE_N, map_x, full, row, head, batch);
    load_box(to + KV_BYTES, TILE_N, map_y, full, row, head, batch);
    advance(r, STAGES);
}

// Every lane of the warp has finished its reads.
DEVICE void release(uint32 barrier) {
    __syncwarp();
    if (lane_index() == 0) barrier_arrive(barrier);
}

// ---- GEMMs of a warp --------------------------------------------------------------------------------------

// d (16 x TILE_N) = A B^T, the contraction along the columns. A: the warp's rows, from `row` on, of a tile that stays.
DEVICE void multiply_rows(float *d, uint32 a_tile, int row, uint32 b_tile) {
#pragma unroll
    for (int i = 0; i < TILE_N / 2; i++) d[i] = 0.f;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        uint32 a[4];
        load_a(a, a_tile, TILE_M, row, 2 * step);
#pragma unroll
        for (int n = 0; n < TILE_N; n += 16) {
            uint32 b[4];
            load_b_pair(b, b_tile, TILE_N, n, 2 * step);
            multiply_add(d + n / 2, a, b);
            multiply_add(d + n / 2 + 4, a, b + 2);
        }
    }
}

// d (16 x HEAD_DIM) += A B, A (16 x TILE_N) of numbers that are rounded to elements, B the rows of a stage.
DEVICE void add_product(float *d, const float *numbers, uint32 b_tile) {
#pragma unroll
    for (int n = 0; n < TILE_N; n += 16) {
        uint32 a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = pack_elements(numbers[n / 2 + 2 * i], numbers[n / 2 + 2 * i + 1]);
#pragma unroll
        for (int column = 0; column < HEAD_DIM; column += 16) {
            uint32 b[4];
            load_b_pair_transposed(b, b_tile, TILE_N, column, n);
            multiply_add(d + column / 2, a, b);
            multiply_add(d + column / 2 + 4, a, b + 2);
        }
    }
}

// What makes probabilities of a query's scores. `shift` is added to the exponent, which is then at most `most`.
typedef struct normalizer {
    float shift, most;
} normalizer;

// Rows that do not exist, or that see no key, have probabilities of 0. If an LSE is so large that its rounding and that of
// the scores could make exponents overflow, the exponent is 0 for the largest scores and far below for the others: which
// scores are the largest is all that is known about them (as in sm90/attention_backward.cu).
DEVICE normalizer normalizer_of(const dw_attention_params &p, const float *lse, int row) {
    float x = row < p.rows_q ? lse[row] * LOG2_E : INFINITY_F;
    if (x == -INFINITY_F) x = INFINITY_F;
    bool large = fabsf(x) >= 0x1p24f && x != INFINITY_F;
    return {large ? fabsf(x) * 0x1p-21f - x : -x, large ? 0.f : INFINITY_F};
}

DEVICE float probability_of(float score, float scale_log2, const normalizer &n) {
    return exp2_approx(fminf(fmaf(score, scale_log2, n.shift), n.most));
}

// Writes the lane's two rows of a gradient, as those of O.
DEVICE void write_gradient(const dw_attention_params &p, const dw_strided &gradient, const tile &t, int row,
                           const float *sums, float scale) {
    const float factor[2] = {scale, scale};
    dw_attention_params to = p; // of which only two members are read
    to.o = gradient;
    write_output(to, t, row, sums, factor);
}

// ---- dQ ---------------------------------------------------------------------------------------------------

// The sum of dO * O of the warp's rows `row` and `row` + 8.
DEVICE void sum_rows(const dw_attention_params &p, const tile &t, uint32 d_o, int first, int row, float *delta) {
    delta[0] = delta[1] = 0.f;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        uint32 a[4];
        load_a(a, d_o, TILE_M, first, 2 * step);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int of = row + 8 * (i % 2), column = 16 * step + 8 * (i / 2) + 2 * (lane_index() & 3);
            if (of >= t.rows_q || column >= p.head_dim) continue;
            const uint16 *o = (const uint16 *)p.o.data + t.batch * p.o.batch + t.head * p.o.head + of * p.o.row;
            uint32 word = *(const uint32 *)(o + column);
            delta[i % 2] += element_low(a[i]) * element_low(word) + element_high(a[i]) * element_high(word);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        delta[i] += __shfl_xor_sync(0xffffffff, delta[i], 1);
        delta[i] += __shfl_xor_sync(0xffffffff, delta[i], 2);
    }
}

DEVICE void compute_dq(const dw_attention_params &p, const memory_layout &s, const tile &t) {
    int first = threadIdx.x / 32 * 16, row = t.first_row + first + lane_index() / 4;
    long long line = ((long long)t.batch * p.heads_q + t.head) * p.rows_q;
    float delta[2], dq[HEAD_DIM / 2], scores[TILE_N / 2], dp[TILE_N / 2];
    normalizer normalizers[2];
    limits limit;
    ring r = {0, 0};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        normalizers[i] = normalizer_of(p, p.lse + line, row + 8 * i);
        limit.first[i] = 0;
        limit.last[i] = t.rows_k;
#if WINDOW
        int center = row + 8 * i + t.diagonal;
        limit.first[i] = max(0, center - p.window_left);
        limit.last[i] = min(t.rows_k, center + p.window_right + 1);
#endif
    }
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) dq[i] = 0.f;
    barrier_wait(s.kept, 0);
    sum_rows(p, t, s.y, first, row, delta);
#pragma unroll
    for (int i = 0; i < 2; i++)
        if ((lane_index() & 3) == 0 && row + 8 * i < t.rows_q) p.delta[line + row + 8 * i] = delta[i];

    for (int n = t.begin; n < t.end; n++) {
        uint32 k = s.stages + r.stage * 2 * KV_BYTES;
        barrier_wait(s.full + 8 * r.stage, r.phase);
        multiply_rows(scores, s.x, first, k);
        multiply_rows(dp, s.y, first, k + KV_BYTES);
        mask_scores(scores, limit, n * TILE_N, true);
        drop_probabilities(p, dp, t, row, n * TILE_N);
#pragma unroll
        for (int i = 0; i < TILE_N / 2; i++) {
            int half = (i >> 1) & 1;
            float probability = probability_of(scores[i], p.scale_log2, normalizers[half]);
            dp[i] = probability * ((DROPOUT ? dp[i] * p.keep_scale : dp[i]) - delta[half]);
        }
        add_product(dq, dp, k);
        release(s.empty + 8 * r.stage);
        advance(r, STAGES);
    }
    write_gradient(p, p.dq, t, row, dq, p.scale);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sm120_attention_backward_queries(const __grid_constant__ tensor_map map_q, const __grid_constant__ tensor_map map_k,
                                     const __grid_constant__ tensor_map map_v, const __grid_constant__ tensor_map map_d_o,
                                     const __grid_constant__ dw_attention_params p) {
    extern __shared__ __align__(1024) uint8 memory[];
    memory_layout s = begin_block(memory);
    tile t;
    if (!next_tile(p, 0, t)) return;
    if (threadIdx.x / 32 >= WARPS) {
        registers_down<DW_SM120_LOADER_REGISTERS>();
        if (threadIdx.x != 32 * WARPS) return;
        ring r = {0, 0};
        load_kept(s, &map_q, &map_d_o, t.first_row, t.head, t.batch);
        for (int n = t.begin; n < t.end; n++)
            load_stage(s, r, &map_k, &map_v, n * TILE_N, t.head / p.group, t.batch);
    } else {
        registers_up<DW_SM120_CONSUMER_REGISTERS>();
        compute_dq(p, s, t);
    }
}

// ---- dK, dV -----------------------------------------------------------------------------------------------

// The keys of a block, and the blocks of TILE_N queries of which at least one sees one of these.
typedef struct key_tile {
    int batch, head_kv, first_row, diagonal, begin, end;
} key_tile;

DEVICE key_tile key_tile_of(const dw_attention_params &p) {
    key_tile t;
    int blocks = (p.rows_k + TILE_M - 1) / TILE_M, head = blockIdx.x / blocks;
    t.batch = head / p.heads_kv;
    t.head_kv = head % p.heads_kv;
    t.first_row = (int)blockIdx.x % blocks * TILE_M;
    t.diagonal = p.bottom_right ? p.rows_k - p.rows_q : 0;
    int first = 0, last = p.rows_q - 1;
#if WINDOW
    first = max(first, t.first_row - t.diagonal - p.window_right);
    last = min(last, min(t.first_row + TILE_M, p.rows_k) - 1 - t.diagonal + p.window_left);
#endif
    t.begin = first / TILE_N;
    t.end = last < first ? t.begin : last / TILE_N + 1;
    return t;
}

// Hides the pairs of the lane's keys `key` and `key` + 8 and the queries of a stage that do not see each other.
DEVICE void hide_pairs(const dw_attention_params &p, const key_tile &t, float *scores, int key, int first_query) {
#if WINDOW
#pragma unroll
    for (int i = 0; i < TILE_N / 2; i++) {
        int center = first_query + i / 4 * 8 + 2 * (lane_index() & 3) + i % 2 + t.diagonal, mine = key + (i >> 1 & 1) * 8;
        if (mine > center + p.window_right || mine < center - p.window_left) scores[i] = -INFINITY_F;
    }
#endif
}

// The factor of a probability: 0 if it is dropped. `line` counts the queries of all heads.
DEVICE float keeps(const dw_attention_params &p, long long line, int key) {
#if DROPOUT
    uint64 element = (uint64)line * p.rows_k + key;
    uint32 word = philox_word(philox(philox_key_of(p), element >> 2), (int)(element & 3));
    return word >> 8 >= p.keep_threshold ? p.keep_scale : 0.f;
#else
    return 1.f;
#endif
}

DEVICE void compute_dk_dv(const dw_attention_params &p, const memory_layout &s, const key_tile &t) {
    int first = threadIdx.x / 32 * 16, key = t.first_row + first + lane_index() / 4;
    float dk[HEAD_DIM / 2], dv[HEAD_DIM / 2], scores[TILE_N / 2], dp[TILE_N / 2];
    ring r = {0, 0};
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) dk[i] = dv[i] = 0.f;
    barrier_wait(s.kept, 0);
    for (int head = t.head_kv * p.group; head < (t.head_kv + 1) * p.group; head++) {
        long long line = ((long long)t.batch * p.heads_q + head) * p.rows_q;
        for (int n = t.begin; n < t.end; n++) {
            uint32 q = s.stages + r.stage * 2 * KV_BYTES, d_o = q + KV_BYTES;
            barrier_wait(s.full + 8 * r.stage, r.phase);
            multiply_rows(scores, s.x, first, q);
            hide_pairs(p, t, scores, key, n * TILE_N);
            multiply_rows(dp, s.y, first, d_o);
#pragma unroll
            for (int i = 0; i < TILE_N / 2; i++) {
                if (i & 2) continue; // the same query, with the key 8 below
                int query = n * TILE_N + i / 4 * 8 + 2 * (int)(lane_index() & 3) + i % 2;
                normalizer of_query = normalizer_of(p, p.lse + line, query);
                float delta = query < p.rows_q ? p.delta[line + query] : 0.f;
#pragma unroll
                for (int j = i; j < i + 4; j += 2) {
                    float kept = keeps(p, line + query, key + 4 * (j - i));
                    float probability = probability_of(scores[j], p.scale_log2, of_query);
                    dp[j] = probability * (dp[j] * kept - delta);
                    scores[j] = probability * kept;
                }
            }
            add_product(dv, scores, d_o);
            add_product(dk, dp, q);
            release(s.empty + 8 * r.stage);
            advance(r, STAGES);
        }
    }
    tile keys = {};
    keys.batch = t.batch, keys.head = t.head_kv, keys.rows_q = p.rows_k;
    write_gradient(p, p.dk, keys, key, dk, p.scale);
    write_gradient(p, p.dv, keys, key, dv, 1.f);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sm120_attention_backward(const __grid_constant__ tensor_map map_q, const __grid_constant__ tensor_map map_k,
                             const __grid_constant__ tensor_map map_v, const __grid_constant__ tensor_map map_d_o,
                             const __grid_constant__ dw_attention_params p) {
    extern __shared__ __align__(1024) uint8 memory[];
    memory_layout s = begin_block(memory);
    key_tile t = key_tile_of(p);
    if (threadIdx.x / 32 >= WARPS) {
        registers_down<DW_SM120_LOADER_REGISTERS>();
        if (threadIdx.x != 32 * WARPS) return;
        ring r = {0, 0};
        load_kept(s, &map_k, &map_v, t.first_row, t.head_kv, t.batch);
        for (int head = t.head_kv * p.group; head < (t.head_kv + 1) * p.group; head++)
            for (int n = t.begin; n < t.end; n++) load_stage(s, r, &map_q, &map_d_o, n * TILE_N, head, t.batch);
    } else {
        registers_up<DW_SM120_CONSUMER_REGISTERS>();
        compute_dk_dv(p, s, t);
    }
}
