// The common part of attention kernels that keep a tile's scores in registers (sm_120's, and forward of sm_90): the
// ring of keys and values in shared memory with its producer, masks, the online softmax, and the stores of O and LSE.
//
// A thread holds two rows, 8 apart, of 16 rows of a warp: scores[4 i] and scores[4 i + 1] are columns 8 i + 2 (lane % 4) and
// the next of the first row, scores[4 i + 2] and scores[4 i + 3] those of the second. Accumulators of wgmma and of
// mma.sync are both laid out like this.
//
// Defines: HEAD_DIM, TILE_M, TILE_N, STAGES, ELEMENT, WINDOW (1: some row may not see some key), SOFTCAP, DROPOUT, PACKED,
// BIAS (attention_bias.cuh).
#ifndef DW_ATTENTION_FORWARD_ROWS_CUH
#define DW_ATTENTION_FORWARD_ROWS_CUH

#include "attention_bias.cuh"
#include "attention_params.h"
#include "attention_schedule.cuh"
#include "philox.cuh"
#include "sm90.cuh"

// ROTATE: queries are rotated after they have been loaded (sm90/attention_rotate.cuh).
#ifndef ROTATE
#define ROTATE 0
#endif
#define QUERY_BUFFERS (ROTATE ? DW_ROTATE_QUERY_BUFFERS : 1)
#define TABLE_ROWS (ROTATE ? DW_ROTATE_TABLE_ROWS(TILE_M) : 0)

#define BLOCKS ((HEAD_DIM + 63) / 64) // blocks of 64 columns: the width of a row in shared memory
#define CHUNKS (HEAD_DIM / 8)         // 16 bytes each
#define Q_BYTES (TILE_M * BLOCKS * 128)
#define KV_BYTES (TILE_N * BLOCKS * 128)

static_assert(!BIAS || (TILE_N % 32 == 0 && !SOFTCAP && !PACKED), "a mask is read 32 keys at a time");

// ---- shared memory ------------------------------------------------------------------------------------------

typedef struct shared_layout {
    uint32 q, k, v;                                         // tiles; QUERY_BUFFERS of q, STAGES of k and of v
    uint32 tables;                                          // ROTATE: cosines and sines of TABLE_ROWS rows
    // Barriers, 8 bytes apart, one for each tile. The last two: ROTATE.
    uint32 q_full, q_empty, k_full, k_empty, v_full, v_empty, q_arrived, tables_full;
} shared_layout;

DEVICE shared_layout layout_shared(uint32 base) {
    shared_layout s;
    base = (base + 1023) & ~1023u;
    s.q = base;
    s.k = s.q + QUERY_BUFFERS * Q_BYTES;
    s.v = s.k + STAGES * KV_BYTES;
    s.tables = s.v + STAGES * KV_BYTES;
    s.q_full = s.tables + 2 * TABLE_ROWS * BLOCKS * 128;
    s.q_empty = s.q_full + 8 * QUERY_BUFFERS;
    s.k_full = s.q_empty + 8 * QUERY_BUFFERS;
    s.k_empty = s.k_full + 8 * STAGES;
    s.v_full = s.k_empty + 8 * STAGES;
    s.v_empty = s.v_full + 8 * STAGES;
    s.q_arrived = s.v_empty + 8 * STAGES;
    s.tables_full = s.q_arrived + 8 * QUERY_BUFFERS;
    return s;
}

// ---- producer -----------------------------------------------------------------------------------------------

DEVICE void load_tile(uint32 to, int rows, const tensor_map *map, uint32 barrier, int row, int head, int batch) {
    barrier_expect(barrier, rows * BLOCKS * 128);
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
        tma_load(to + block * rows * 128, map, barrier, block * 64, row, head, batch);
}

DEVICE void produce(const dw_attention_params &p, const shared_layout &s, const tensor_map *map_q,
                    const tensor_map *map_k, const tensor_map *map_v) {
    ring k = {0, 0}, v = {0, 0};
    uint32 q_phase = 0;
    for (int round = 0; !is_over(p, round); round++) {
        tile t;
        if (!next_tile(p, round, t) || t.begin >= t.end) continue;
        int batch = PACKED ? 0 : t.batch;
        int head_kv = t.head / p.group;
        barrier_wait(s.q_empty, q_phase ^ 1);
        load_tile(s.q, TILE_M, map_q, s.q_full, t.start_q + t.first_row, t.head, batch);
        q_phase ^= 1;
        // In the order in which consumers need them: the next keys precede these values.
        for (int n = t.end - 1; n >= t.begin - 1; n--) {
            if (n >= t.begin) {
                barrier_wait(s.k_empty + 8 * k.stage, k.phase ^ 1);
                load_tile(s.k + k.stage * KV_BYTES, TILE_N, map_k, s.k_full + 8 * k.stage, t.start_k + n * TILE_N,
                          head_kv, batch);
                advance(k, STAGES);
            }
            if (n + 1 < t.end) {
                barrier_wait(s.v_empty + 8 * v.stage, v.phase ^ 1);
                load_tile(s.v + v.stage * KV_BYTES, TILE_N, map_v, s.v_full + 8 * v.stage,
                          t.start_k + (n + 1) * TILE_N, head_kv, batch);
                advance(v, STAGES);
            }
        }
    }
}

// ---- softmax ------------------------------------------------------------------------------------------------

// State of the online softmax for the two rows of a thread. Maxima are of unscaled scores; with BIAS, of scaled scores
// and their bias.
typedef struct softmax {
    float maximum[2], sum[2];
} softmax;

// Mask limits of the two rows of this thread: row i sees keys first[i] <= key < last[i].
typedef struct limits {
    int first[2], last[2];
} limits;

DEVICE void cap_scores(const dw_attention_params &p, float *scores) {
#if SOFTCAP
#pragma unroll
    for (int i = 0; i < TILE_N / 2; i++) scores[i] = tanh_exact(scores[i] * p.cap_scale);
#endif
}

#if BIAS
#define SCORE_SCALE(p) LOG2_E // of the exponents
#else
#define SCORE_SCALE(p) ((p).scale_log2)
#endif

// Reads the bias of a thread's two rows; rows past the end read that of the last row.
DEVICE void load_bias(const dw_attention_params &p, const tile &t, int row, int first_key, uint32 *bias) {
#if BIAS
#pragma unroll
    for (int half = 0; half < 2; half++) {
        long long line = bias_line(p, t.batch, t.head, min(row + 8 * half, t.rows_q - 1));
#pragma unroll
        for (int i = 0; i < TILE_N / 8; i += 4)
            read_bias(p, line, first_key + 8 * i, t.rows_k, bias + half * (TILE_N / 8) + i);
    }
#endif
}

// Scales the scores and adds their bias.
DEVICE void add_bias(const dw_attention_params &p, uint32 *bias, float *scores) {
#if BIAS
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < TILE_N / 8; i++) {
            uint32 *words = bias + half * (TILE_N / 8);
            if (i % 4 == 0) arrange_bias(p, words + i);
            float *score = scores + 4 * i + 2 * half;
            score[0] = fmaf(score[0], p.scale, element_low(words[i]));
            score[1] = fmaf(score[1], p.scale, element_high(words[i]));
        }
#endif
}

// `left`: keys may precede the first one that a row sees.
DEVICE void mask_scores(float *scores, const limits &limit, int first_key, [[maybe_unused]] bool left) {
    int column = first_key + 2 * (lane_index() & 3);
#pragma unroll
    for (int row = 0; row < 2; row++) {
        int last = limit.last[row] - column;
#pragma unroll
        for (int i = 0; i < TILE_N / 8; i++)
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (8 * i + j >= last) scores[4 * i + 2 * row + j] = -INFINITY_F;
    }
#if WINDOW
    if (!left) return;
#pragma unroll
    for (int row = 0; row < 2; row++) {
        int first = limit.first[row] - column;
#pragma unroll
        for (int i = 0; i < TILE_N / 8; i++)
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (8 * i + j < first) scores[4 * i + 2 * row + j] = -INFINITY_F;
    }
#endif
}

// Converts the scores of ROWS rows from FIRST on to probabilities relative to the new maximum; `shrink` is the factor for
// all earlier results. Two rows advance together, and each has two partial maxima and sums, so that chains of dependent
// instructions are short.
template <int FIRST, int ROWS>
DEVICE void take_exponentials_of(float *scores, softmax &state, float *shrink, float scale) {
    float maximum[ROWS], scaled[ROWS], sums[ROWS][ROWS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float most[2] = {state.maximum[FIRST + r], -INFINITY_F};
        const float *row = scores + 2 * (FIRST + r);
#pragma unroll
        for (int i = 0; i < TILE_N / 8; i++) most[i % ROWS] = fmaxf(most[i % ROWS], fmaxf(row[4 * i], row[4 * i + 1]));
        maximum[r] = ROWS == 1 ? most[0] : fmaxf(most[0], most[1]);
    }
#pragma unroll
    for (int step = 1; step <= 2; step++)
#pragma unroll
        for (int r = 0; r < ROWS; r++) maximum[r] = fmaxf(maximum[r], __shfl_xor_sync(0xffffffff, maximum[r], step));
    bool large = false;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        // A row that has seen no key yet has scores of -infinity, and their differences must stay -infinity.
        float finite = maximum[r] == -INFINITY_F ? 0.f : maximum[r];
        shrink[FIRST + r] = exp2_approx((state.maximum[FIRST + r] - finite) * scale);
        state.maximum[FIRST + r] = maximum[r];
        scaled[r] = finite * scale;
        large = large || fabsf(scaled[r]) >= 0x1p24f;
    }
#if !SOFTCAP
    // From 2^24 on the rounding of `scaled` could make exponents overflow: uses exact differences instead.
    if (large) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (!(fabsf(scaled[r]) >= 0x1p24f)) continue;
            float *row = scores + 2 * (FIRST + r);
#pragma unroll
            for (int i = 0; i < TILE_N / 8; i++) row[4 * i] -= maximum[r], row[4 * i + 1] -= maximum[r];
            scaled[r] = 0.f;
        }
    }
#endif
#pragma unroll
    for (int i = 0; i < TILE_N / 8; i++)
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float &score = scores[4 * i + 2 * (FIRST + r) + j];
                score = exp2_approx(fmaf(score, scale, -scaled[r]));
                sums[r][j % ROWS] += score;
            }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float sum = ROWS == 1 ? sums[r][0] : sums[r][0] + sums[r][ROWS - 1];
        state.sum[FIRST + r] = fmaf(state.sum[FIRST + r], shrink[FIRST + r], sum);
    }
}

// Converts the scores of both rows. On an H100 it is faster to convert two rows together for head dimensions 64 and 256
// (by 2 %), and one after the other for 128 and 192 (by 1 to 2 %).
#define ROWS_TOGETHER (HEAD_DIM <= 64 || HEAD_DIM > 192)
DEVICE void take_exponentials(float *scores, softmax &state, float *shrink, float scale) {
    if constexpr (ROWS_TOGETHER) {
        take_exponentials_of<0, 2>(scores, state, shrink, scale);
    } else {
        take_exponentials_of<0, 1>(scores, state, shrink, scale);
        take_exponentials_of<1, 1>(scores, state, shrink, scale);
    }
}

DEVICE void drop_probabilities(const dw_attention_params &p, float *scores, const tile &t, int row, int first_key) {
#if DROPOUT
    philox_key key = philox_key_of(p);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint64 line = ((uint64)((uint64)t.batch * p.heads_q + t.head) * p.rows_q + row + 8 * half) * p.rows_k;
#pragma unroll
        for (int i = 0; i < TILE_N / 8; i++) {
            uint64 element = line + first_key + 8 * i + 2 * (lane_index() & 3);
            uint32 kept = philox_keeps_pair(key, element, p.keep_threshold);
            if (!(kept & 1)) scores[4 * i + 2 * half] = 0.f;
            if (!(kept & 2)) scores[4 * i + 2 * half + 1] = 0.f;
        }
    }
#endif
}

DEVICE void pack_probabilities(uint32 *packed, const float *scores) {
#pragma unroll
    for (int i = 0; i < TILE_N / 4; i++) packed[i] = pack_elements(scores[2 * i], scores[2 * i + 1]);
}

// ---- results ------------------------------------------------------------------------------------------------

// Writes the two rows of each thread from registers. The four threads of a quad together hold 8 columns, 2 each;
// transposed, each holds 8 columns, and 4 threads write 64 contiguous bytes. Shared memory stays free for the next
// tile's Q.
DEVICE void write_output(const dw_attention_params &p, const tile &t, int row, const float *output,
                         const float *factor) {
    uint16 *to = (uint16 *)p.o.data + (PACKED ? 0 : t.batch * p.o.batch) + t.head * p.o.head;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint16 *line = to + (long long)(t.start_q + row + 8 * half) * p.o.row;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk += 4) {
            uint32 words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *o = output + 4 * (chunk + i) + 2 * half;
                words[i] = pack_elements(o[0] * factor[half], o[1] * factor[half]);
            }
            transpose_quad(words);
            int mine = chunk + (lane_index() & 3);
            if (row + 8 * half < t.rows_q && mine * 8 < p.head_dim)
                *(uint4 *)(line + mine * 8) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

DEVICE void write_lse(const dw_attention_params &p, const tile &t, int row, float value) {
    if (p.lse == 0 || (lane_index() & 3) != 0 || row >= t.rows_q) return;
    long long place = PACKED ? (long long)t.head * p.total_q + t.start_q + row
                             : ((long long)t.batch * p.heads_q + t.head) * p.rows_q + row;
    p.lse[place] = value;
}

// Writes a tile of which no row sees a key. Called by `threads` threads; `thread` is this one's number.
DEVICE void write_nothing(const dw_attention_params &p, const tile &t, int thread, int threads) {
    uint16 *to = (uint16 *)p.o.data + (PACKED ? 0 : t.batch * p.o.batch) + t.head * p.o.head;
    int chunks = p.head_dim / 8;
    for (int i = thread; i < TILE_M * chunks; i += threads) {
        int row = t.first_row + i / chunks;
        if (row < t.rows_q)
            *(uint4 *)(to + (long long)(t.start_q + row) * p.o.row + i % chunks * 8) = make_uint4(0, 0, 0, 0);
    }
    for (int i = thread; i < TILE_M; i += threads) {
        int row = t.first_row + i;
        long long place = PACKED ? (long long)t.head * p.total_q + t.start_q + row
                                 : ((long long)t.batch * p.heads_q + t.head) * p.rows_q + row;
        if (p.lse != 0 && row < t.rows_q) p.lse[place] = -INFINITY_F;
    }
}

#endif
