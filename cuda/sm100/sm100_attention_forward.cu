// Exact attention, forward: one pass over the keys with an online softmax; the matrix of scores is never stored.
// Proven on the emulator, not run on hardware.
//
// A thread block is persistent and processes tile after tile: TILE_M rows of one head, 128 rows for each of two
// consumers. Warps are specialized and synchronize only through barriers:
//
//   load      one thread loads Q, and tiles of K and V into a ring, with TMA
//   multiply  one thread: S = Q K^T into tensor memory, then O += P V with P in the place of S
//   consume   one warpgroup per half, one thread per row: maxima, exponentials P, sums, LSE; no shuffles
//   correct   one warpgroup: rescales O in tensor memory when a maximum grows; at the end stores O / sum
//
// While the exponentials of one half are computed, the MMAs of the other half run. A maximum that has grown by less
// than 2^GROWTH is not adopted: probabilities may exceed 1, but sums and outputs are relative to the same old
// maximum, so the quotient and the LSE are as exact, and O is rarely rescaled. After Zadouri, Hoehnerbach, Shah, Liu,
// Thakkar, Dao: "FlashAttention-4" (2025).
//
// Barriers (one per half unless stated otherwise):
//   full, empty                    per stage: a tile of K or V has arrived; its MMAs are complete
//   q_full, q_empty                the same for Q
//   scores                         S is complete, and so are all MMAs issued before
//   ready                          four warps have written P and read S, and O has been rescaled or stored
//   sums                           the last MMA of the tile is complete
//   factors_full, factors_empty    per warp of a consumer: factors for the rows of O are in shared memory; they have
//                                  been read
//
// An SM holds one block, because of its tensor memory. Only a persistent block can therefore load and multiply for
// the next tile while it stores this one, which is why blocks are persistent and take tiles of unequal length in
// pairs (attention_schedule.cuh), instead of one block per tile, longest first.
//
// Defines: HEAD_DIM (64, 96, 128), TILE_M, TILE_N, STAGES, CONSUMERS (attention_forward_tiles.h), ELEMENT, WINDOW (1:
// some row may not see some key), POLYNOMIAL (the number, of each 16 pairs of exponentials, that a polynomial
// computes; the default is in attention_forward_tiles.h). SOFTCAP, DROPOUT, PACKED must be 0: there is no such
// variant.

#include "attention_forward_tiles.h"
#include "attention_params.h"
#include "attention_schedule.cuh"
#include "sm100.cuh"

#define ROWS DW_SM100_FORWARD_ROWS
#define BLOCKS DW_SM100_FORWARD_BLOCKS(HEAD_DIM)
#define HALF_BYTES DW_SM100_FORWARD_Q_BYTES(HEAD_DIM, ROWS)
#define KV_BYTES DW_SM100_FORWARD_KV_BYTES(HEAD_DIM, TILE_N)
#define BOX_BYTES DW_SM100_FORWARD_BOX_BYTES
#define GROWTH 8.f // P is at most 2^8, which F16 can represent
#define MMA_STEP 16

#ifndef POLYNOMIAL
#define POLYNOMIAL DW_SM100_FORWARD_POLYNOMIAL
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef DROPOUT
#define DROPOUT 0
#endif
static_assert(!SOFTCAP && !DROPOUT && !PACKED, "not supported on sm_100");
static_assert(CONSUMERS == 2 && TILE_M == CONSUMERS * ROWS, "a consumer has 128 rows");
static_assert(TILE_N == 128, "a thread holds a row of scores");
static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM <= 128, "O of both halves beside the scores");
static_assert(DW_SM100_FORWARD_COLUMNS_USED(HEAD_DIM, TILE_N) <= DW_SM100_FORWARD_COLUMNS, "tensor memory");
static_assert(DW_SM100_FORWARD_SHARED_BYTES(HEAD_DIM, TILE_M, TILE_N, STAGES) <= DW_SM100_FORWARD_MOST_SHARED,
              "too many stages");

// ---- shared and tensor memory -------------------------------------------------------------------------------

typedef struct shared_layout {
    uint32 q, kv, out, factors; // two halves of Q; stages; two boxes per warp; a float per row
    // Barriers, 8 bytes apart; factors_full and factors_empty have one per warp.
    uint32 q_full, q_empty, full, empty, scores, ready, sums, factors_full, factors_empty;
    uint32 tensor_memory;
} shared_layout;

DEVICE shared_layout layout_shared(uint32 base) {
    shared_layout s;
    s.q = base;
    s.kv = s.q + 2 * HALF_BYTES;
    s.out = s.kv + STAGES * KV_BYTES;
    s.factors = s.out + DW_SM100_FORWARD_OUT_BYTES;
    s.q_full = s.factors + DW_SM100_FORWARD_FACTOR_BYTES(TILE_M);
    s.q_empty = s.q_full + 16;
    s.scores = s.q_empty + 16;
    s.ready = s.scores + 16;
    s.sums = s.ready + 16;
    s.factors_full = s.sums + 16;
    s.factors_empty = s.factors_full + 64;
    s.full = s.factors_empty + 64;
    s.empty = s.full + 8 * STAGES;
    s.tensor_memory = s.empty + 8 * STAGES;
    return s;
}

// Columns of a half's scores, whose first TILE_N / 2 hold the probabilities later, and of its output.
DEVICE uint32 scores_at(uint32 tensor_memory, int half) { return tensor_memory + half * TILE_N; }
DEVICE uint32 output_at(uint32 tensor_memory, int half) { return tensor_memory + 2 * TILE_N + half * HEAD_DIM; }

// ---- halves of a tile ---------------------------------------------------------------------------------------

typedef struct work {
    tile t;
    key_blocks half[2]; // key blocks that each half sees
    int begin, end;     // key blocks that either half sees: an interval, because windows of neighbouring rows overlap
} work;

DEVICE bool next_work(const dw_attention_params &p, int round, work &w) {
    if (!next_tile(p, round, w.t)) return false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int first = w.t.first_row + half * ROWS;
        w.half[half] = {0, 0};
        if (first < w.t.rows_q) w.half[half] = visible_blocks(p, w.t, first, min(first + ROWS, w.t.rows_q) - 1);
    }
    bool none = w.half[0].begin >= w.half[0].end, only = w.half[1].begin >= w.half[1].end;
    w.begin = none ? w.half[1].begin : only ? w.half[0].begin : min(w.half[0].begin, w.half[1].begin);
    w.end = none ? w.half[1].end : only ? w.half[0].end : max(w.half[0].end, w.half[1].end);
    return true;
}

DEVICE bool sees(const work &w, int half, int n) { return n >= w.half[half].begin && n < w.half[half].end; }

// ---- loads --------------------------------------------------------------------------------------------------

DEVICE void load_tile(uint32 to, int rows, const tensor_map *map, uint32 barrier, int row, int head, int batch) {
    barrier_expect(barrier, rows * BLOCKS * 128);
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
        tma_load(to + block * rows * 128, map, barrier, block * 64, row, head, batch);
}

// Loads K and V of each key block in the order of the MMAs: the next keys precede these values.
DEVICE void load(const dw_attention_params &p, const shared_layout &s, const tensor_map *map_q, const tensor_map *map_k,
                 const tensor_map *map_v) {
    ring kv = {0, 0};
    uint32 q_phases = 0; // one bit per half
    for (int round = 0; !is_over(p, round); round++) {
        work w;
        if (!next_work(p, round, w)) continue;
        int head_kv = w.t.head / p.group;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (w.half[half].begin >= w.half[half].end) continue;
            barrier_wait(s.q_empty + 8 * half, (q_phases >> half & 1) ^ 1);
            q_phases ^= 1 << half;
            load_tile(s.q + half * HALF_BYTES, ROWS, map_q, s.q_full + 8 * half, w.t.first_row + half * ROWS, w.t.head,
                      w.t.batch);
        }
        for (int n = w.end - 1; n >= w.begin; n--) {
#pragma unroll
            for (int values = 0; values < 2; values++) {
                barrier_wait(s.empty + 8 * kv.stage, kv.phase ^ 1);
                load_tile(s.kv + kv.stage * KV_BYTES, TILE_N, values ? map_v : map_k, s.full + 8 * kv.stage, n * TILE_N,
                          head_kv, w.t.batch);
                advance(kv, STAGES);
            }
        }
    }
    // The block must not exit before every MMA has arrived on its barrier: a later arrival would hit memory of
    // another block.
    for (int i = 0; i < STAGES; i++) {
        barrier_wait(s.empty + 8 * kv.stage, kv.phase ^ 1);
        advance(kv, STAGES);
    }
}

// ---- MMAs ---------------------------------------------------------------------------------------------------

// S = Q K^T for the rows of a half.
DEVICE void multiply_scores(uint32 scores, uint32 q, uint32 k) {
    constexpr uint32 shape = mma_descriptor(ROWS, TILE_N);
    // Computes the descriptors here, because descriptors computed before the loop would be spilled.
    asm volatile("" : "+r"(q), "+r"(k));
#pragma unroll
    for (int step = 0; step < HEAD_DIM / MMA_STEP; step++) {
        uint32 block = step / 4, column = step % 4 * 32;
        multiply<1>(scores, operand_descriptor(q + block * ROWS * 128 + column),
                    operand_descriptor(k + block * TILE_N * 128 + column), shape, step > 0);
    }
}

// O = or += P V.
DEVICE void multiply_values(uint32 output, uint32 probabilities, uint32 v, bool accumulate) {
    constexpr uint32 shape = mma_descriptor(ROWS, HEAD_DIM) | TRANSPOSED_B;
    uint64 values = operand_descriptor_transposed(v, TILE_N * 128);
#pragma unroll
    for (int step = 0; step < TILE_N / MMA_STEP; step++)
        multiply_tensor(output, probabilities + step * (MMA_STEP / 2), values + 128 * step, shape,
                        accumulate || step > 0);
}

// Each iteration issues, for one half after the other, outputs of block n + 1 and scores of block n. The tensor cores
// execute them in this order, so scores do not overwrite probabilities that are still in use.
DEVICE void multiply_tiles(const dw_attention_params &p, const shared_layout &s, uint32 tensor_memory) {
    ring kv = {0, 0};
    uint32 q_phases = 0, ready_phases = 0;
    for (int round = 0; !is_over(p, round); round++) {
        work w;
        if (!next_work(p, round, w)) continue;
        if (w.begin >= w.end) continue;
        for (int n = w.end - 1; n >= w.begin - 1; n--) {
            bool has_values = n + 1 < w.end, has_keys = n >= w.begin;
            ring values = kv;
            if (has_values) advance(kv, STAGES);
            ring keys = kv;
            if (has_keys) advance(kv, STAGES);
            // In the ring keys come first and then alternate with values: the keys of n - 1 follow the values of n.
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (sees(w, half, n + 1)) {
                    barrier_wait(s.full + 8 * values.stage, values.phase);
                    barrier_wait(s.ready + 8 * half, ready_phases >> half & 1);
                    ready_phases ^= 1 << half;
                    tensor_fence_after();
                    multiply_values(output_at(tensor_memory, half), scores_at(tensor_memory, half),
                                    s.kv + values.stage * KV_BYTES, n + 2 < w.half[half].end);
                    if (n + 1 == w.half[half].begin) multiply_commit<1>(s.sums + 8 * half);
                }
                if (sees(w, half, n)) {
                    barrier_wait(s.full + 8 * keys.stage, keys.phase);
                    if (n + 1 == w.half[half].end) {
                        barrier_wait(s.q_full + 8 * half, q_phases >> half & 1);
                        q_phases ^= 1 << half;
                    }
                    tensor_fence_after();
                    multiply_scores(scores_at(tensor_memory, half), s.q + half * HALF_BYTES,
                                    s.kv + keys.stage * KV_BYTES);
                    multiply_commit<1>(s.scores + 8 * half);
                    if (n == w.half[half].begin) multiply_commit<1>(s.q_empty + 8 * half);
                }
            }
            if (has_values) multiply_commit<1>(s.empty + 8 * values.stage);
            if (has_keys) multiply_commit<1>(s.empty + 8 * keys.stage);
        }
    }
}

// ---- softmax ------------------------------------------------------------------------------------------------

// Arrives once for a whole warp that has finished with tensor or shared memory.
DEVICE void arrive_warp(uint32 barrier) {
    __syncwarp();
    if (lane_index() == 0) barrier_arrive(barrier);
}

// State of the online softmax for the row of a thread. The maximum is of unscaled scores.
typedef struct softmax {
    float maximum, sum;
} softmax;

// A row sees keys first <= key < last.
typedef struct limits {
    int first, last;
} limits;

DEVICE limits limits_of(const dw_attention_params &p, const tile &t, int row) {
#if WINDOW
    int center = row + t.diagonal;
    return {max(0, center - p.window_left), min(t.rows_k, center + p.window_right + 1)};
#else
    return {0, t.rows_k};
#endif
}

DEVICE void mask_scores(float *scores, const limits &limit, int first_key) {
    int last = limit.last - first_key;
#if WINDOW
    int first = limit.first - first_key;
#endif
#pragma unroll
    for (int i = 0; i < TILE_N; i++) {
        bool seen = i < last;
#if WINDOW
        seen = seen && i >= first;
#endif
        if (!seen) scores[i] = -INFINITY_F;
    }
}

DEVICE float largest(const float *scores) {
    float most[4] = {scores[0], scores[1], scores[2], scores[3]};
#pragma unroll
    for (int i = 4; i < TILE_N; i += 4)
#pragma unroll
        for (int j = 0; j < 4; j++) most[j] = fmaxf(most[j], scores[i + j]);
    return fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
}

// Adopts the maximum of these scores if it is much larger or the first. Returns the factor for all earlier results.
DEVICE float raise_maximum(const float *scores, softmax &state, float scale) {
    float maximum = largest(scores), shrink = 1.f;
    // False if neither has seen a key: the difference is NaN.
    if ((maximum - state.maximum) * scale > GROWTH) {
        shrink = exp2_approx((state.maximum - maximum) * scale);
        state.maximum = maximum;
        state.sum *= shrink;
    }
    return shrink;
}

// Converts scores to probabilities relative to the maximum, stores them in tensor memory, and adds up their sum.
DEVICE void take_exponentials(float *scores, softmax &state, float scale, uint32 probabilities) {
    // A row that has seen no key yet has scores of -infinity, and their differences must stay -infinity.
    float finite = state.maximum == -INFINITY_F ? 0.f : state.maximum, scaled = finite * scale;
    // From 2^24 on the rounding of `scaled` could make exponents overflow: uses exact differences instead.
    if (fabsf(scaled) >= 0x1p24f) {
#pragma unroll
        for (int i = 0; i < TILE_N; i++) scores[i] -= finite;
        scaled = 0.f;
    }
    uint64 factor = pair_of(scale, scale), shift = pair_of(-scaled, -scaled);
    uint64 sums[2] = {pair_of(0.f, 0.f), pair_of(0.f, 0.f)};
#pragma unroll
    for (int part = 0; part < TILE_N; part += 32) {
        uint32 packed[16];
#pragma unroll
        for (int i = 0; i < 32; i += 2) {
            float low, high;
            split_pair(&low, &high, pair_fma(pair_of(scores[part + i], scores[part + i + 1]), factor, shift));
            if (i / 2 % 16 < POLYNOMIAL) {
                split_pair(&low, &high, pair_exp2(pair_of(low, high)));
            } else {
                low = exp2_approx(low);
                high = exp2_approx(high);
            }
            sums[i / 2 & 1] = pair_add(sums[i / 2 & 1], pair_of(low, high));
            packed[i / 2] = pack_elements(low, high);
        }
        tensor_memory_store(probabilities + part / 2, packed);
    }
    float low, high;
    split_pair(&low, &high, pair_add(sums[0], sums[1]));
    state.sum += low + high;
}

// Passes a factor for each row of this warp to the correction warp of the same rows.
DEVICE void send_factor(const shared_layout &s, int warp, float factor, uint32 &phase) {
    barrier_wait(s.factors_empty + 8 * warp, phase ^ 1);
    phase ^= 1;
    shared_store_f32(s.factors + 4 * (warp * 32 + lane_index()), factor);
    arrive_warp(s.factors_full + 8 * warp);
}

DEVICE void write_lse(const dw_attention_params &p, const tile &t, int row, float value) {
    if (p.lse == 0 || row >= t.rows_q) return;
    p.lse[((long long)t.batch * p.heads_q + t.head) * p.rows_q + row] = value;
}

DEVICE void consume(const dw_attention_params &p, const shared_layout &s, uint32 tensor_memory) {
    int warp = threadIdx.x / 32, half = warp / 4; // four warps per half
    uint32 place = scores_at(tensor_memory, half) + ((warp & 3) * 32 << 16);
    float scale = p.scale_log2;
    uint32 scores_phase = 0, factor_phase = 0;

    for (int round = 0; !is_over(p, round); round++) {
        work w;
        if (!next_work(p, round, w)) continue;
        key_blocks seen = half ? w.half[1] : w.half[0];
        int first_row = w.t.first_row + warp * 32, row = first_row + lane_index();
        // Key blocks that every row of this warp sees completely need no mask: keys all_first <= key < all_last.
        int all_first = 0, all_last = w.t.rows_k;
#if WINDOW
        int top = first_row + w.t.diagonal;
        all_first = top + 31 - p.window_left;
        all_last = min(w.t.rows_k, top + p.window_right + 1);
#endif
        softmax state = {-INFINITY_F, 0.f};
        for (int n = seen.end - 1; n >= seen.begin; n--) {
            float scores[TILE_N];
            barrier_wait(s.scores + 8 * half, scores_phase);
            scores_phase ^= 1;
            tensor_fence_after();
#pragma unroll
            for (int i = 0; i < TILE_N; i += 32) tensor_memory_load(scores + i, place + i);
            tensor_memory_wait_load();
            keep<TILE_N>(scores);
            if (n * TILE_N < all_first || (n + 1) * TILE_N > all_last)
                mask_scores(scores, limits_of(p, w.t, row), n * TILE_N);
            float shrink = raise_maximum(scores, state, scale);
            if (n + 1 < seen.end) send_factor(s, warp, shrink, factor_phase);
            take_exponentials(scores, state, scale, place);
            tensor_memory_wait_store();
            tensor_fence_before();
            arrive_warp(s.ready + 8 * half);
        }
        bool none = state.maximum == -INFINITY_F;
        if (seen.begin < seen.end) send_factor(s, warp, none ? 0.f : p.keep_scale / state.sum, factor_phase);
        float lse = fmaf(state.maximum, scale, log2_approx(state.sum)) * 0.6931471805599453f;
        write_lse(p, w.t, row, none ? -INFINITY_F : lse);
    }
}

// ---- corrections --------------------------------------------------------------------------------------------

// Receives the factor of this thread's row of a half.
DEVICE float receive_factor(const shared_layout &s, int half, uint32 &phases) {
    int warp = half * 4 + (threadIdx.x / 32 & 3);
    barrier_wait(s.factors_full + 8 * warp, phases >> half & 1);
    phases ^= 1 << half;
    float factor = shared_load_f32(s.factors + 4 * (warp * 32 + lane_index()));
    arrive_warp(s.factors_empty + 8 * warp);
    return factor;
}

// Multiplies O by the factor of each row, unless every row of the warp keeps its maximum.
DEVICE void rescale(uint32 output, float factor) {
    if (!__any_sync(0xffffffff, factor != 1.f)) return;
#pragma unroll
    for (int column = 0; column < HEAD_DIM; column += 16) {
        float o[16];
        uint32 words[16];
        tensor_memory_load<16>(o, output + column);
        tensor_memory_wait_load();
        keep<16>(o);
#pragma unroll
        for (int i = 0; i < 16; i++) words[i] = __float_as_uint(o[i] * factor);
        tensor_memory_store(output + column, words);
    }
    tensor_memory_wait_store();
}

// Stores 16 columns of O to the box, one row per lane; zeros if no row sees a key, because O then has no value.
DEVICE void finish_columns(uint32 output, uint32 box, int chunk, float factor, bool none) {
    float o[16];
    if (none) {
#pragma unroll
        for (int i = 0; i < 16; i++) o[i] = 0.f;
    } else {
        tensor_memory_load<16>(o, output);
        tensor_memory_wait_load();
        keep<16>(o);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32 words[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            words[j] = pack_elements(o[8 * i + 2 * j] * factor, o[8 * i + 2 * j + 1] * factor);
        shared_store16(tile_chunk(box, DW_SM100_FORWARD_BOX_ROWS, lane_index(), chunk + i),
                       make_uint4(words[0], words[1], words[2], words[3]));
    }
}

// Stores boxes of this warp's 32 rows of a half, alternating between its two places in shared memory. Lane 0 issues
// TMA, which skips what lies outside of O.
DEVICE void bring_out(const shared_layout &s, const tensor_map *map_o, const tile &t, int half, uint32 output,
                      float factor, bool none, int &turn) {
    int warp = threadIdx.x / 32 & 3, row = t.first_row + half * ROWS + warp * 32;
    if (row >= t.rows_q) return;
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
        uint32 box = s.out + (2 * warp + turn) * BOX_BYTES;
        turn ^= 1;
        if (lane_index() == 0) bulk_wait_read<1>(); // the previous contents of this box have been read
        __syncwarp();
#pragma unroll
        // A whole box, with zeros beyond HEAD_DIM.
        for (int column = block * 64; column < block * 64 + 64; column += 16)
            finish_columns(output + column, box, column % 64 / 8, factor, none || column >= HEAD_DIM);
        fence_async_shared();
        __syncwarp();
        if (lane_index() == 0) {
            tma_store(map_o, box, block * 64, row, t.head, t.batch);
            bulk_commit();
        }
    }
}

DEVICE void correct(const dw_attention_params &p, const shared_layout &s, uint32 tensor_memory,
                    const tensor_map *map_o) {
    uint32 lanes = (threadIdx.x / 32 & 3) * 32 << 16, factor_phases = 0, sums_phases = 0;
    int turn = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) arrive_warp(s.ready + 8 * half); // nothing is in O yet
    for (int round = 0; !is_over(p, round); round++) {
        work w;
        if (!next_work(p, round, w)) continue;
        for (int n = w.end - 1; n >= w.begin; n--) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (!sees(w, half, n) || n + 1 == w.half[half].end) continue; // the first MMA overwrites O
                float factor = receive_factor(s, half, factor_phases);
                // These scores are complete, and with them the MMA that produced O.
                tensor_fence_after();
                rescale(output_at(tensor_memory, half) + lanes, factor);
                tensor_fence_before();
                arrive_warp(s.ready + 8 * half);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            bool none = w.half[half].begin >= w.half[half].end;
            float factor = 0.f;
            if (!none) {
                factor = receive_factor(s, half, factor_phases);
                barrier_wait(s.sums + 8 * half, sums_phases >> half & 1);
                sums_phases ^= 1 << half;
                tensor_fence_after();
            }
            bring_out(s, map_o, w.t, half, output_at(tensor_memory, half) + lanes, factor, none, turn);
            if (none) continue;
            tensor_fence_before();
            arrive_warp(s.ready + 8 * half); // for the next tile
        }
    }
    if (lane_index() == 0) bulk_wait<0>();
    __syncwarp();
}

// ---- kernel -------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(DW_SM100_FORWARD_THREADS, 1)
    sm100_attention_forward(const __grid_constant__ tensor_map map_q, const __grid_constant__ tensor_map map_k,
                            const __grid_constant__ tensor_map map_v, const __grid_constant__ tensor_map map_o,
                            const __grid_constant__ dw_attention_params p) {
    extern __shared__ __align__(1024) uint8 memory[];
    shared_layout s = layout_shared(shared_address(memory));
    int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        prefetch_map(&map_q);
        prefetch_map(&map_k);
        prefetch_map(&map_v);
        prefetch_map(&map_o);
        for (int half = 0; half < 2; half++) {
            barrier_init(s.q_full + 8 * half, 1);
            barrier_init(s.q_empty + 8 * half, 1);
            barrier_init(s.scores + 8 * half, 1);
            barrier_init(s.ready + 8 * half, 8); // four warps of softmax, four of correction
            barrier_init(s.sums + 8 * half, 1);
        }
        for (int i = 0; i < 8; i++) {
            barrier_init(s.factors_full + 8 * i, 1);
            barrier_init(s.factors_empty + 8 * i, 1);
        }
        for (int i = 0; i < STAGES; i++) {
            barrier_init(s.full + 8 * i, 1);
            barrier_init(s.empty + 8 * i, 1);
        }
        fence_barrier_init();
    }
    __syncwarp();
    if (warp == 0) tensor_memory_allocate<1, DW_SM100_FORWARD_COLUMNS>(s.tensor_memory);
    tensor_fence_before();
    __syncthreads();
    tensor_fence_after();
    uint32 tensor_memory = shared_load_u32(s.tensor_memory);

    // The four warpgroups have 512 registers in total per thread position.
    if (warp < 8) {
        registers_up<192>();
        consume(p, s, tensor_memory);
    } else if (warp < 12) {
        registers_down<64>();
        correct(p, s, tensor_memory, &map_o);
    } else {
        registers_down<64>();
        if (warp == 12) {
            if (elect_one()) multiply_tiles(p, s, tensor_memory);
        } else if (warp == 13) {
            if (elect_one()) load(p, s, &map_q, &map_k, &map_v);
        }
        __syncwarp();
    }

    tensor_fence_before();
    __syncthreads();
    tensor_fence_after();
    if (warp == 0) tensor_memory_free<1, DW_SM100_FORWARD_COLUMNS>(tensor_memory);
}
