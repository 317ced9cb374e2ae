// Exact attention, forward: one pass over the keys with an online softmax; the matrix of scores is never stored.
//
// A thread block has one producer warpgroup, of which one thread issues TMA, and CONSUMERS warpgroups of 64 query
// rows each. Blocks are persistent and process tile after tile (TILE_M rows of one head): while one tile ends, the
// producer already loads keys of the next. Within a consumer, the GEMM for the next scores overlaps the exponentials
// of the current ones, so tensor cores and other units work at the same time. Consumers take turns to issue GEMMs, so
// that the exponentials of one overlap the GEMMs of another. After Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao:
// "FlashAttention-3" (2024).
//
// Defines: HEAD_DIM (64, 96, 128, 192, 256), TILE_M, TILE_N, STAGES, CONSUMERS (attention_tiles.h), ELEMENT, WINDOW
// (1: some row may not see some key), SOFTCAP, DROPOUT, PACKED, BIAS (attention_bias.cuh), ROTATE (attention_rotate.cuh).

#include "attention_forward_rows.cuh"
#if ROTATE
#include "attention_rotate.cuh"
#else
#define ROTATORS 0
#endif

#define THREADS (128 * (1 + CONSUMERS))

// Registers of a thread. With two consumers there are some to spare for rotating queries.
#define PRODUCER_REGISTERS (CONSUMERS == 3 ? 32 : ROTATE ? 56 : 24)
#define CONSUMER_REGISTERS (CONSUMERS == 3 ? 160 : ROTATE ? 224 : 240)

// When the output is scaled for a new maximum. Up to head dimension 128 it is early: while the next scores are
// multiplied. Above, it is late, and only if a row of the warp has a new maximum, which few blocks after the first ones
// bring. Each is faster by 1 to 6 % where it is used. With LOOPS_BY_MASK it is late and unconditional.
#define EARLY_RESCALE (HEAD_DIM <= 128 && !LOOPS_BY_MASK)
#define SKIP_RESCALE (HEAD_DIM > 128)

// 1: blocks that all rows see completely have a loop of their own, without a mask. For head dimension 64 this and the
// late scaling are faster by 1 to 2 %; for 128 by nothing. Copies of dropout's, a soft cap's or a bias's code would spill.
#define LOOPS_BY_MASK (WINDOW && HEAD_DIM == 64 && !DROPOUT && !SOFTCAP && !BIAS)

static_assert(TILE_M == 64 * CONSUMERS, "a consumer has 64 rows");
static_assert(TILE_N % 16 == 0, "probabilities are multiplied 16 keys at a time");

// ---- consumer -----------------------------------------------------------------------------------------------

// Issues S = Q K^T for this warpgroup's 64 rows; does not wait.
DEVICE void multiply_scores(float *scores, uint32 q, uint32 k) {
    uint32 base_q = descriptor_base(q, 0), base_k = descriptor_base(k, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++) {
        uint32 block = step / 4, column = step % 4 * 32;
        wgmma_ss<TILE_N, 0, 0>(scores, descriptor(base_q, block * TILE_M * 128 + column),
                               descriptor(base_k, block * TILE_N * 128 + column), step > 0);
    }
    wgmma_commit();
}

// Issues O += P V; does not wait.
DEVICE void multiply_values(float *output, const uint32 *probabilities, uint32 v, int accumulate) {
    uint32 base_v = descriptor_base(v, TILE_N * 128);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < TILE_N / 16; step++)
        wgmma_rs<HEAD_DIM, 1>(output, probabilities + 4 * step, descriptor(base_v, step * 2048),
                              accumulate || step > 0);
    wgmma_commit();
}

// In a packed batch, rows past the end belong to another sequence and may contain infinities, which must not be
// multiplied by our zero probabilities. Every consumer writes the same zeros.
DEVICE void clear_rows(uint32 v, int from) {
#if PACKED
    for (int i = threadIdx.x & 127; i < (TILE_N - from) * BLOCKS * 8; i += 128) {
        int row = from + i / (BLOCKS * 8);
        shared_store16(tile_chunk(v, TILE_N, row, i % (BLOCKS * 8)), make_uint4(0, 0, 0, 0));
    }
    fence_async_shared();
    named_sync(1 + CONSUMERS + threadIdx.x / 128, 128);
#endif
}

// Consumers take turns in a ring to issue their GEMMs: barrier 1 + i signals consumer i's turn.
DEVICE void take_turn(int consumer) {
    if (CONSUMERS > 1) named_sync(1 + consumer, 256);
}

DEVICE void pass_turn(int consumer) {
    if (CONSUMERS > 1) named_arrive(1 + (consumer + 1) % CONSUMERS, 256);
}

DEVICE void release(uint32 barrier) {
    if ((threadIdx.x & 127) == 0) barrier_arrive(barrier);
}

DEVICE void rescale(float *output, const float *shrink) {
    if (SKIP_RESCALE && !__any_sync(0xffffffff, shrink[0] != 1.f || shrink[1] != 1.f)) return;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) output[i] *= shrink[(i >> 1) & 1];
}

// Lets a block of keys pass of which this consumer's rows see none.
DEVICE void pass_block(const shared_layout &s, int consumer, ring &k, ring &v) {
    barrier_wait(s.k_full + 8 * k.stage, k.phase);
    take_turn(consumer);
    pass_turn(consumer);
    release(s.k_empty + 8 * k.stage);
    advance(k, STAGES);
    barrier_wait(s.v_full + 8 * v.stage, v.phase);
    release(s.v_empty + 8 * v.stage);
    advance(v, STAGES);
}

DEVICE void consume(const dw_attention_params &p, const shared_layout &s) {
    // The shuffle tells the compiler that the value is uniform across lanes, because descriptors are computed from it.
    int consumer = __shfl_sync(0xffffffff, (int)threadIdx.x / 128, 0) - 1;
    int thread_row = consumer * 64 + (threadIdx.x & 127) / 32 * 16 + lane_index() / 4;
    float scale = SCORE_SCALE(p);
    ring k = {0, 0}, v = {0, 0};
    ring q = {0, 0};
    if (consumer == CONSUMERS - 1) pass_turn(consumer); // consumer 0 has the first turn

    for (int round = 0; !is_over(p, round); round++) {
        tile t;
        if (!next_tile(p, round, t)) continue;
        if (t.begin >= t.end) {
            write_nothing(p, t, threadIdx.x - 128, THREADS - 128);
            continue;
        }
        int row = t.first_row + thread_row;
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
        // Key blocks that every row of this warpgroup sees completely need no mask: keys all_first <= key < all_last.
        int all_first = 0, all_last = t.rows_k;
#if WINDOW
        int top = t.first_row + consumer * 64 + t.diagonal;
        all_first = top + 63 - p.window_left;
        all_last = min(t.rows_k, top + p.window_right + 1);
#endif

        float scores[TILE_N / 2], output[HEAD_DIM / 2], shrink[2];
        uint32 probabilities[TILE_N / 4];
        softmax state = {{-INFINITY_F, -INFINITY_F}, {0.f, 0.f}};
        [[maybe_unused]] uint32 bias[TILE_N / 4];

        barrier_wait(s.q_full + 8 * q.stage, q.phase);
        uint32 q_rows = s.q + q.stage * Q_BYTES + consumer * 64 * 128, q_empty = s.q_empty + 8 * q.stage;
        if (QUERY_BUFFERS > 1) q_rows = __shfl_sync(0xffffffff, q_rows, 0); // uniform, as above
        advance(q, QUERY_BUFFERS);

        // The blocks that the rows of this consumer see; the other blocks of the tile pass by.
        int n = t.end - 1, begin = t.begin, first_row = t.first_row + consumer * 64;
        if (first_row >= t.rows_q) {
            release(q_empty);
            for (; n >= begin; n--) pass_block(s, consumer, k, v);
            continue;
        }
#if WINDOW
        key_blocks seen = visible_blocks(p, t, first_row, min(first_row + 64, t.rows_q) - 1);
        int end = t.end;
        if (seen.begin < seen.end) begin = seen.begin, end = seen.end;
        for (; n >= end; n--) pass_block(s, consumer, k, v);
#endif
        barrier_wait(s.k_full + 8 * k.stage, k.phase);
        take_turn(consumer);
        multiply_scores(scores, q_rows, s.k + k.stage * KV_BYTES);
        pass_turn(consumer);
        load_bias(p, t, row, n * TILE_N, bias);
        wgmma_wait<0>();
        keep<TILE_N / 2>(scores);
        release(s.k_empty + 8 * k.stage);
        if (n == begin) release(q_empty);
        advance(k, STAGES);
        cap_scores(p, scores);
        add_bias(p, bias, scores);
        if (n * TILE_N < all_first || (n + 1) * TILE_N > all_last)
            mask_scores(scores, limit, n * TILE_N, n * TILE_N < all_first);
        take_exponentials(scores, state, shrink, scale);
        drop_probabilities(p, scores, t, row, n * TILE_N);
        pack_probabilities(probabilities, scores);
        int accumulate = 0;

        // Computes the scores of block n and the output of block n + 1; `masked`: with LOOPS_BY_MASK.
        auto process_block = [&](bool masked) __attribute__((always_inline)) {
            barrier_wait(s.k_full + 8 * k.stage, k.phase);
            take_turn(consumer);
            multiply_scores(scores, q_rows, s.k + k.stage * KV_BYTES);
            if (EARLY_RESCALE && accumulate) {
                rescale(output, shrink);
                keep<HEAD_DIM / 2>(output);
            }
            barrier_wait(s.v_full + 8 * v.stage, v.phase);
            uint32 values = s.v + v.stage * KV_BYTES;
            if (PACKED && (n + 2) * TILE_N > t.rows_k) clear_rows(values, t.rows_k - (n + 1) * TILE_N);
            multiply_values(output, probabilities, values, accumulate);
            accumulate = 1;
            pass_turn(consumer);
            load_bias(p, t, row, n * TILE_N, bias);
            wgmma_wait<1>();
            keep<TILE_N / 2>(scores);
            release(s.k_empty + 8 * k.stage);
            if (n == begin) release(q_empty);
            advance(k, STAGES);
            cap_scores(p, scores);
            add_bias(p, bias, scores);
            if (LOOPS_BY_MASK ? masked : n * TILE_N < all_first || (n + 1) * TILE_N > all_last)
                mask_scores(scores, limit, n * TILE_N, n * TILE_N < all_first);
            take_exponentials(scores, state, shrink, scale);
            drop_probabilities(p, scores, t, row, n * TILE_N);
            wgmma_wait<0>();
            keep<HEAD_DIM / 2>(output);
            release(s.v_empty + 8 * v.stage);
            advance(v, STAGES);
            if (!EARLY_RESCALE) rescale(output, shrink);
            pack_probabilities(probabilities, scores);
        };
        n--;
#if LOOPS_BY_MASK
        // On the right, some row does not see a block's last keys; on the left, not its first ones.
        int right = max(0, all_last) / TILE_N, left = max(begin, (max(0, all_first) + TILE_N - 1) / TILE_N);
#pragma unroll 1
        for (; n >= begin && n >= right; n--) process_block(true);
#pragma unroll 1
        for (; n >= left; n--) process_block(false);
#pragma unroll 1
        for (; n >= begin; n--) process_block(true);
#else
        for (; n >= begin; n--) process_block(false);
#endif

        barrier_wait(s.v_full + 8 * v.stage, v.phase);
        uint32 values = s.v + v.stage * KV_BYTES;
        if (PACKED && (begin + 1) * TILE_N > t.rows_k) clear_rows(values, t.rows_k - begin * TILE_N);
        if (EARLY_RESCALE && accumulate) rescale(output, shrink);
        multiply_values(output, probabilities, values, accumulate);

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
        wgmma_wait<0>();
        keep<HEAD_DIM / 2>(output);
        release(s.v_empty + 8 * v.stage);
        advance(v, STAGES);
        for (; n >= t.begin; n--) pass_block(s, consumer, k, v);
        write_output(p, t, row, output, factor);
    }
    if (consumer == 0) take_turn(consumer); // consumes the last signal
}

// ---- kernel -------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sm90_attention_forward(const __grid_constant__ tensor_map map_q, const __grid_constant__ tensor_map map_k,
                           const __grid_constant__ tensor_map map_v, const __grid_constant__ dw_attention_params p
#if ROTATE
                           ,
                           const __grid_constant__ tensor_map map_cosines, const __grid_constant__ tensor_map map_sines,
                           const __grid_constant__ dw_attention_rotation rotation
#endif
    ) {
    extern __shared__ uint8 memory[];
    shared_layout s = layout_shared(shared_address(memory));
    if (threadIdx.x == 0) {
        prefetch_map(&map_q);
        prefetch_map(&map_k);
        prefetch_map(&map_v);
        for (int i = 0; i < QUERY_BUFFERS; i++) {
            barrier_init(s.q_full + 8 * i, ROTATE ? ROTATORS : 1);
            barrier_init(s.q_empty + 8 * i, CONSUMERS);
            if (ROTATE) barrier_init(s.q_arrived + 8 * i, 1);
        }
        if (ROTATE) barrier_init(s.tables_full, 1);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(s.k_full + 8 * i, 1);
            barrier_init(s.k_empty + 8 * i, CONSUMERS);
            barrier_init(s.v_full + 8 * i, 1);
            barrier_init(s.v_empty + 8 * i, CONSUMERS);
        }
        fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<PRODUCER_REGISTERS>();
#if ROTATE
        if (threadIdx.x == 0) produce_ahead(p, s, &map_q, &map_k, &map_v);
        if (threadIdx.x >= 32) rotate_queries(p, s, &map_cosines, &map_sines, rotation);
#else
        if (threadIdx.x == 0) produce(p, s, &map_q, &map_k, &map_v);
#endif
    } else {
        registers_up<CONSUMER_REGISTERS>();
        consume(p, s);
    }
}
