// Exact attention, forward, on consumer and workstation Blackwell GPUs: one pass over the keys with an online softmax; the
// matrix of scores is never stored. Proven on the emulator, not run on hardware.
//
// A thread block has CONSUMERS groups of four warps, 16 query rows each, and a group of which one thread issues TMA and
// which leaves its registers to the others.
// Blocks are persistent and process tile after tile (TILE_M rows of one head): while one tile ends, the next one's rows
// and keys are loaded. A warp keeps the fragments of its rows of Q in registers, and multiplies by mma.sync. Warps
// synchronize only with the loads, so that the exponentials of one overlap the MMAs of another. After Dao:
// "FlashAttention-2" (2023).
//
// Defines: HEAD_DIM (64, 96, 128), TILE_M, TILE_N, STAGES, CONSUMERS (sm120_attention_tiles.h), ELEMENT, WINDOW, SOFTCAP,
// DROPOUT, PACKED, BIAS (attention_forward_rows.cuh).

#include "attention_forward_rows.cuh"
#include "sm120.cuh"
#include "sm120_attention_tiles.h"

#define WARPS (4 * CONSUMERS)
#define THREADS DW_SM120_ATTENTION_THREADS(CONSUMERS)

static_assert(TILE_M == 16 * WARPS, "a warp has 16 rows");
static_assert(TILE_N % 16 == 0, "probabilities are multiplied 16 keys at a time");

// S = Q K^T for this warp's 16 rows.
DEVICE void multiply_scores(float *scores, const uint32 (*q)[4], uint32 k) {
#pragma unroll
    for (int i = 0; i < TILE_N / 2; i++) scores[i] = 0.f;
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++)
#pragma unroll
        for (int key = 0; key < TILE_N; key += 16) {
            uint32 b[4];
            load_b_pair(b, k, TILE_N, key, 2 * step);
            multiply_add(scores + key / 2, q[step], b);
            multiply_add(scores + key / 2 + 4, q[step], b + 2);
        }
}

// Zeros the elements of rows `from` on in the fragments of 16 rows of V. In a packed batch, such rows belong to another
// sequence and may contain infinities, which must not be multiplied by our zero probabilities.
DEVICE void clear_rows(uint32 *b, int first_row, int from) {
    int row = first_row + 2 * (lane_index() & 3);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int low = row + 8 * (i % 2);
        if (low >= from) b[i] = 0;
        else if (low + 1 >= from) b[i] &= 0xffff;
    }
}

// O += P V. `rows`: rows of V that exist.
DEVICE void multiply_values(float *output, const uint32 *probabilities, uint32 v, int rows) {
#pragma unroll
    for (int key = 0; key < TILE_N; key += 16)
#pragma unroll
        for (int column = 0; column < HEAD_DIM; column += 16) {
            uint32 b[4];
            load_b_pair_transposed(b, v, TILE_N, column, key);
            if (PACKED && rows < TILE_N) clear_rows(b, key, rows);
            multiply_add(output + column / 2, probabilities + key / 4, b);
            multiply_add(output + column / 2 + 4, probabilities + key / 4, b + 2);
        }
}

// Every lane of the warp has finished its reads.
DEVICE void release(uint32 barrier) {
    __syncwarp();
    if (lane_index() == 0) barrier_arrive(barrier);
}

DEVICE void consume(const dw_attention_params &p, const shared_layout &s) {
    int first = threadIdx.x / 32 * 16; // row of the warp in the tile
    float scale = SCORE_SCALE(p);
    ring k = {0, 0}, v = {0, 0};
    uint32 q_phase = 0;

    for (int round = 0; !is_over(p, round); round++) {
        tile t;
        if (!next_tile(p, round, t)) continue;
        if (t.begin >= t.end) {
            write_nothing(p, t, threadIdx.x, 32 * WARPS);
            continue;
        }
        int row = t.first_row + first + lane_index() / 4;
        limits limit;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            limit.first[i] = 0;
            limit.last[i] = t.rows_k;
#if WINDOW
            int center = row + 8 * i + t.diagonal;
            limit.first[i] = max(0, center - p.window_left);
            limit.last[i] = min(t.rows_k, center + p.window_right + 1);
#endif
        }
        // Key blocks that every row of this warp sees completely need no mask: keys all_first <= key < all_last.
        int all_first = 0, all_last = t.rows_k;
#if WINDOW
        int top = t.first_row + first + t.diagonal;
        all_first = top + 15 - p.window_left;
        all_last = min(t.rows_k, top + p.window_right + 1);
#endif

        uint32 q[HEAD_DIM / 16][4];
        barrier_wait(s.q_full, q_phase);
        q_phase ^= 1;
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; step++) load_a(q[step], s.q, TILE_M, first, 2 * step);
        release(s.q_empty);

        float scores[TILE_N / 2], output[HEAD_DIM / 2], shrink[2];
        uint32 probabilities[TILE_N / 4];
        softmax state = {{-INFINITY_F, -INFINITY_F}, {0.f, 0.f}};
        [[maybe_unused]] uint32 bias[TILE_N / 4];
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) output[i] = 0.f;

        for (int n = t.end - 1; n >= t.begin; n--) {
            load_bias(p, t, row, n * TILE_N, bias);
            barrier_wait(s.k_full + 8 * k.stage, k.phase);
            multiply_scores(scores, q, s.k + k.stage * KV_BYTES);
            release(s.k_empty + 8 * k.stage);
            advance(k, STAGES);
            cap_scores(p, scores);
            add_bias(p, bias, scores);
            if (n * TILE_N < all_first || (n + 1) * TILE_N > all_last)
                mask_scores(scores, limit, n * TILE_N, n * TILE_N < all_first);
            take_exponentials(scores, state, shrink, scale);
            drop_probabilities(p, scores, t, row, n * TILE_N);
            pack_probabilities(probabilities, scores);
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 2; i++) output[i] *= shrink[(i >> 1) & 1];
            barrier_wait(s.v_full + 8 * v.stage, v.phase);
            multiply_values(output, probabilities, s.v + v.stage * KV_BYTES, t.rows_k - n * TILE_N);
            release(s.v_empty + 8 * v.stage);
            advance(v, STAGES);
        }

        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = state.sum[i];
            sum += __shfl_xor_sync(0xffffffff, sum, 1);
            sum += __shfl_xor_sync(0xffffffff, sum, 2);
            bool none = state.maximum[i] == -INFINITY_F;
            factor[i] = none ? 0.f : p.keep_scale / sum;
            float lse = fmaf(state.maximum[i], scale, log2_approx(sum)) * 0.6931471805599453f;
#if BIAS // the maximum may be the least number
            lse = fmaf(log2_approx(sum), 0.6931471805599453f, state.maximum[i]);
#endif
            write_lse(p, t, row + 8 * i, none ? -INFINITY_F : lse);
        }
        write_output(p, t, row, output, factor);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sm120_attention_forward(const __grid_constant__ tensor_map map_q, const __grid_constant__ tensor_map map_k,
                            const __grid_constant__ tensor_map map_v, const __grid_constant__ dw_attention_params p) {
    extern __shared__ __align__(1024) uint8 memory[];
    shared_layout s = layout_shared(shared_address(memory));
    if (threadIdx.x == 0) {
        barrier_init(s.q_full, 1);
        barrier_init(s.q_empty, WARPS);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(s.k_full + 8 * i, 1);
            barrier_init(s.k_empty + 8 * i, WARPS);
            barrier_init(s.v_full + 8 * i, 1);
            barrier_init(s.v_empty + 8 * i, WARPS);
        }
        fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x / 32 >= WARPS) {
        registers_down<DW_SM120_LOADER_REGISTERS>();
        if (threadIdx.x == 32 * WARPS) produce(p, s, &map_q, &map_k, &map_v);
    } else {
        registers_up<DW_SM120_CONSUMER_REGISTERS>();
        consume(p, s);
    }
}
