// Exact attention, backward, in three kernels. P = exp(S - LSE) is recomputed from Q and K; delta is the row sums of
// dO * O:
//
//       dV = P^T dO     dP = dO V^T     dS = P * (dP - delta)     dK = scale dS^T Q     dQ = scale dS K
//
//   prepare   Computes delta and LSE in powers of two; zeros the dQ accumulators (not with DETERMINISTIC).
//   main      A thread block owns TILE_N keys of one head. It iterates over the queries that see them, TILE_M at a
//             time, and over all query heads that share the keys. dK and dV stay in registers; dQ is added to
//             F32 accumulators in memory that thread blocks share. One warp issues TMA, CONSUMERS warpgroups compute.
//   finish    Converts the dQ accumulators to elements.
//
// Up to HEAD_DIM 128 a consumer has 64 keys. It computes S and dP transposed (keys are rows), so that P^T and dS^T go
// directly from the accumulators into the GEMMs for dV and dK; only dS passes through shared memory, for dQ. Above
// 128 the accumulators of 64 keys do not fit in a thread's registers. Consumers then share the columns of the head
// (dK and dV transposed: columns are rows), and P and dS both pass through shared memory. After Shah, Bikshandi,
// Zhang, Thakkar, Ramani, Dao: "FlashAttention-3" (2024).
//
// P and dS are rounded to elements before a GEMM. In F16 a dS beyond 65504 becomes infinite, and the gradients with
// it, so that loss scaling detects it.
//
// SERIAL 1: a thread block processes all key blocks of a head in order, so it is the only one that adds to the head's
// dQ. Each thread keeps its accumulators in its own memory (dq_sum has a slot per thread block), starts them without
// zeroing, and writes dQ itself with the last keys. There is no finish kernel, and every run gives the same bits.
// This suits many heads with few rows, whose accumulators stay in the cache; otherwise the traffic of the
// accumulators and the other kernels would take a third of the time.
//
// DETERMINISTIC 1: thread blocks add to a tile of dQ in a fixed order, from its last keys to its first, and each waits
// for its turn. The order follows the diagonal of a causal mask: a block with keys n begins at the tile where the
// order reaches n, one tile after the block with keys n + 1, so that blocks that advance at the same rate never wait.
// Without a mask each block follows one tile behind the one before it, which costs as many steps as a head has
// blocks, once per launch. The keys of a head are assigned from the last to the first, so that a block waits only for
// blocks with a smaller index; these have started before it, so the grid cannot deadlock. A warp per consumer polls
// and releases the turns, so that consumers only wait at a barrier of their thread block. The first block stores
// instead of adding, so that the accumulators need no zeros.
//
// Defines: HEAD_DIM (64, 96, 128, 192, 256), TILE_M, TILE_N, STAGES_Q, STAGES_DO, CONSUMERS
// (attention_backward_layout.h, with the dynamic shared memory that they take), ELEMENT, WINDOW (1: some row may not
// see some key), SOFTCAP, DROPOUT, PACKED, DETERMINISTIC, SERIAL, BIAS (attention_bias.cuh).

#include "attention_backward_layout.h"
#include "attention_bias.cuh"
#include "attention_params.h"
#include "sm90.cuh"
#include "philox.cuh"

#ifndef SERIAL
#define SERIAL 0
#endif
// Each key block starts this many query tiles after the previous one; 0: all start at the first tile.
#ifndef ROTATED
#define ROTATED 0
#endif
static_assert(!ROTATED || !DETERMINISTIC, "blocks of keys take turns from the first tile on");
#define TURNS (DETERMINISTIC && !SERIAL)
static_assert(!BIAS || (!SOFTCAP && !PACKED), "a mask has the layout of the scores");
#if BIAS
#define SCORE_SCALE(p) LOG2_E // of the exponents: the scores are scaled already
#else
#define SCORE_SCALE(p) ((p).scale_log2)
#endif

#define KEYS_AS_ROWS (HEAD_DIM <= 128)
#define BLOCKS ((HEAD_DIM + 63) / 64) // blocks of 64 columns: the width of a row in shared memory
#define COLUMNS (64 * BLOCKS)
#define Q_BYTES (TILE_M * BLOCKS * 128)
#define KV_BYTES (TILE_N * BLOCKS * 128)
#define STATS_BYTES (DW_BACKWARD_STATISTICS(TILE_M) * 4)
#define CONSUMER_THREADS (128 * CONSUMERS)
#define THREADS (128 + CONSUMER_THREADS)

// A consumer's share: scores of KEYS keys and all queries; each thread has SUMS accumulators of dK and as many of dV.
#if KEYS_AS_ROWS
#define KEYS 64
#define SCORES (TILE_M / 2)
#define SUMS (HEAD_DIM / 2)
#define SCORE_BYTES (TILE_M * TILE_N * 2) // dS: queries are rows
static_assert(TILE_N == 64 * CONSUMERS, "a consumer has 64 keys");
#else
#define KEYS (TILE_N / CONSUMERS)
#define SCORES (KEYS / 2)
#define HEAD_BLOCKS (BLOCKS / CONSUMERS)
#define SUMS (HEAD_BLOCKS * TILE_N / 2)
#define SCORE_BYTES (TILE_N * 128) // P, dS: keys are rows
static_assert(TILE_M == 64 && BLOCKS % CONSUMERS == 0 && KEYS % 8 == 0 && TILE_N % 16 == 0, "shares are whole");
#endif
// If P is final before dS and registers suffice, the GEMM for dV runs while dS is computed. With dQ one tile late and a
// mask, head dimension 128 is faster by up to 5 % if dV's GEMM follows dS: exponentials and dS are then one sequence of
// instructions.
#define EARLY_DV                                                                                                       \
    (KEYS_AS_ROWS && TILE_M == 64 && !DROPOUT && !SOFTCAP && !(LATE_DQ && WINDOW && HEAD_DIM == 128))

// 1: the GEMM for dQ is one tile late, so that consumers hardly wait for each other's dS. There are then three buffers
// for dS: one that is written, one that this consumer reads, and one that the other may still read.
#define LATE_DQ (KEYS_AS_ROWS && CONSUMERS == 2 && !SERIAL && !BIAS)
#define SCORE_BUFFERS (KEYS_AS_ROWS ? 3 : 2)

// 1: the GEMM for dK precedes that for dQ and runs while the dQ accumulators are read. 0: it follows and runs while
// those of dQ are added.
#define DK_FIRST SERIAL

#define SCORE_TILES (KEYS_AS_ROWS ? 1 : 2)

// dQ: each consumer computes DQ_SLICES GEMMs of 64 queries and 64 columns in turn. The accumulators of a tile lie in
// memory in register order: by consumer, slice, four registers, thread.
#define DQ_SUMS 32
#define DQ_SLICES (TILE_M * COLUMNS / CONSUMERS / 128 / DQ_SUMS)
static_assert(DQ_SLICES * DQ_SUMS * CONSUMERS * 128 == TILE_M * COLUMNS, "shares are whole");
static_assert(TILE_M == 64 || (TILE_M == 64 * CONSUMERS && BLOCKS == 1), "rows or columns are shared");

// ---- layout of the data ------------------------------------------------------------------------------------

typedef struct sequence {
    int batch;
    int rows_q, rows_k; // of this sequence
    int start_q, start_k; // packed: first row of the sequence
    int tile;           // first tile of the first query head in delta and dq_sum
    int tile_stride;    // from one query head's tiles to the next
} sequence;

// Factor of the batch stride.
#define STRIDED_BATCH(s) (PACKED ? 0 : (s).batch)

DEVICE int queries_to_tiles(int rows) { return (rows + TILE_M - 1) / TILE_M; }

// Packed sequences start at a tile boundary: sequence b with first row s starts at tile s / TILE_M + b.
DEVICE sequence find_sequence(const dw_attention_params &p, int batch) {
    sequence s = {batch, p.rows_q, p.rows_k, 0, 0, 0, queries_to_tiles(p.rows_q)};
    s.tile = batch * p.heads_q * s.tile_stride;
#if PACKED
    s.start_q = p.offsets_q[batch];
    s.start_k = p.offsets_k[batch];
    s.rows_q = p.offsets_q[batch + 1] - s.start_q;
    s.rows_k = p.offsets_k[batch + 1] - s.start_k;
    s.tile = s.start_q / TILE_M + batch;
    s.tile_stride = (int)(p.total_q / TILE_M) + p.batch;
#endif
    return s;
}

// The keys that at least one query of tile m sees: first to last; none if first > last.
DEVICE int first_key_of(const dw_attention_params &p, const sequence &s, int m) {
    int diagonal = p.bottom_right ? s.rows_k - s.rows_q : 0;
    return WINDOW ? max(0, m * TILE_M + diagonal - p.window_left) : 0;
}

DEVICE int last_key_of(const dw_attention_params &p, const sequence &s, int m) {
    int diagonal = p.bottom_right ? s.rows_k - s.rows_q : 0, last_row = min((m + 1) * TILE_M, s.rows_q) - 1;
    return WINDOW ? min(s.rows_k - 1, last_row + diagonal + p.window_right) : s.rows_k - 1;
}

// ---- prepare and finish: one thread block per tile of queries ---------------------------------------------------

#define SIDE_THREADS 256

typedef struct query_tile {
    sequence s;
    int head, m, first_row;
    long long tile;
} query_tile;

// Returns false if there is no tile.
DEVICE bool find_query_tile(const dw_attention_params &p, query_tile &t) {
    int tiles = queries_to_tiles(p.rows_q), index = blockIdx.x;
    t.m = index % tiles;
    t.head = index / tiles % p.heads_q;
    int batch = index / tiles / p.heads_q;
    t.s = find_sequence(p, batch);
    t.first_row = t.m * TILE_M;
    t.tile = t.s.tile + (long long)t.head * t.s.tile_stride + t.m;
    return t.first_row < t.s.rows_q;
}

DEVICE long long place_row(const dw_strided &t, const sequence &s, int head, int row) {
    return STRIDED_BATCH(s) * t.batch + head * t.head + (long long)(s.start_q + row) * t.row;
}

DEVICE float multiply_pair(uint32 a, uint32 b, float sum) {
    return fmaf(element_low(a), element_low(b), fmaf(element_high(a), element_high(b), sum));
}

// Returns whether the rounding of the LSE and of the scores is so large that exponents could overflow. The exponents
// of such a query come from flatten_scores, and its LSE is 0 in the statistics.
//
// With BIAS a mask makes such queries: all of their scores may have been absorbed by the least number of its type, and
// then the LSE has lost the logarithm of their number. prepare sums their exponentials relative to the LSE again.
#if BIAS
DEVICE bool is_large(float lse) { return fabsf(lse) >= LARGE_LSE && fabsf(lse) != INFINITY_F; }
#else
DEVICE bool is_large(float lse) { return !SOFTCAP && fabsf(lse) >= 0x1p24f && lse != INFINITY_F; }
#endif

DEVICE float stored_lse(const dw_attention_params &p, const sequence &s, int head, int row) {
    long long place = PACKED ? (long long)head * p.total_q + s.start_q + row
                             : ((long long)s.batch * p.heads_q + head) * p.rows_q + row;
    return p.lse[place];
}

DEVICE float scaled_lse(const dw_attention_params &p, const sequence &s, int head, int row) {
    return stored_lse(p, s, head, row) * 1.4426950408889634f;
}

#if BIAS
// The sum of a query's exponentials relative to its LSE, in all threads of the block. `parts` has one number per warp.
DEVICE float sum_exponentials(const dw_attention_params &p, const query_tile &t, int row, float *parts) {
    float sum = 0.f;
    float lse = stored_lse(p, t.s, t.head, row);
    long long line = bias_line(p, t.s.batch, t.head, row);
    const uint16 *q = (const uint16 *)p.q.data + place_row(p.q, t.s, t.head, row);
    int first = 0, last = t.s.rows_k - 1;
#if WINDOW
    int center = row + (p.bottom_right ? t.s.rows_k - t.s.rows_q : 0);
    first = max(first, center - p.window_left);
    last = min(last, center + p.window_right);
#endif
    for (int key = first + threadIdx.x; key <= last; key += SIDE_THREADS) {
        const uint16 *k = (const uint16 *)p.k.data + place_row(p.k, t.s, t.head / p.group, key);
        float dot = 0.f;
        for (int i = 0; i < p.head_dim; i += 8) {
            uint4 a = *(const uint4 *)(q + i), b = *(const uint4 *)(k + i);
            dot = multiply_pair(a.x, b.x, multiply_pair(a.y, b.y, multiply_pair(a.z, b.z, multiply_pair(a.w, b.w, dot))));
        }
        float score = fmaf(dot, p.scale, element_low(bias_element(p, line + key * p.bias_key)));
        sum += exp2_approx(fminf(score - lse, 0.f) * LOG2_E);
    }
#pragma unroll
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, step);
    if (lane_index() == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.f;
#pragma unroll
    for (int i = 0; i < SIDE_THREADS / 32; i++) sum += parts[i];
    __syncthreads();
    return sum;
}
#endif

extern "C" __global__ void __launch_bounds__(SIDE_THREADS)
    sm90_attention_backward_prepare(const __grid_constant__ dw_attention_params p) {
    query_tile t;
    if (!find_query_tile(p, t)) return;
    float *lse_out = p.delta + t.tile * DW_BACKWARD_STATISTICS(TILE_M), *delta_out = lse_out + TILE_M;
#if SERIAL
    // Queries that see no key: no thread block of main writes their dQ.
    if (first_key_of(p, t.s, t.m) > last_key_of(p, t.s, t.m))
        for (int i = threadIdx.x; i < TILE_M * p.head_dim / 8; i += SIDE_THREADS) {
            int row = t.first_row + i / (p.head_dim / 8), column = i % (p.head_dim / 8) * 8;
            if (row < t.s.rows_q)
                *(uint4 *)((uint16 *)p.dq.data + place_row(p.dq, t.s, t.head, row) + column) = make_uint4(0, 0, 0, 0);
        }
#else
    float4 *sums = (float4 *)(p.dq_sum + t.tile * TILE_M * COLUMNS);
    // With TURNS the first thread block of main that sees the tile stores its sums.
    if (!TURNS || first_key_of(p, t.s, t.m) > last_key_of(p, t.s, t.m))
        for (int i = threadIdx.x; i < TILE_M * COLUMNS / 4; i += SIDE_THREADS)
            sums[i] = make_float4(0.f, 0.f, 0.f, 0.f);
#endif
#if TURNS
    if (threadIdx.x < CONSUMERS) p.turn[t.tile * CONSUMERS + threadIdx.x] = 0;
#endif
    // Lanes that share a row, with 8 columns each.
    const int lanes = COLUMNS == 64 ? 8 : COLUMNS == 128 ? 16 : 32;
    int column = threadIdx.x % lanes * 8;
    static_assert(TILE_M % (SIDE_THREADS / 8) == 0 || TILE_M % 16 == 0, "warps stay whole");
    bool large = false;
#pragma unroll 4
    for (int row = threadIdx.x / lanes; row < TILE_M; row += SIDE_THREADS / lanes) {
        int i = t.first_row + row;
        float delta = 0.f;
        if (i < t.s.rows_q && column < p.head_dim) {
            uint4 o = *(const uint4 *)((const uint16 *)p.o.data + place_row(p.o, t.s, t.head, i) + column);
            uint4 d_o = *(const uint4 *)((const uint16 *)p.d_o.data + place_row(p.d_o, t.s, t.head, i) + column);
            delta = multiply_pair(o.x, d_o.x, multiply_pair(o.y, d_o.y, multiply_pair(o.z, d_o.z,
                                                                                  multiply_pair(o.w, d_o.w, 0.f))));
        }
#pragma unroll
        for (int step = lanes / 2; step; step >>= 1) delta += __shfl_xor_sync(0xffffffff, delta, step);
        if (column == 0) {
            // Rows past the end and rows that see no key: exp2(s - infinity) is 0, and so are P and dS.
            float lse = INFINITY_F;
            if (i < t.s.rows_q) {
#if BIAS
                if (is_large(stored_lse(p, t.s, t.head, i))) large = true;
                lse = scaled_lse(p, t.s, t.head, i);
                if (lse == -INFINITY_F) lse = INFINITY_F;
#else
                lse = scaled_lse(p, t.s, t.head, i);
                if (lse == -INFINITY_F) lse = INFINITY_F;
                if (is_large(lse)) lse = 0.f, large = true;
#endif
            }
            lse_out[row] = lse;
            delta_out[row] = delta;
        }
    }
    large = __syncthreads_or(large);
#if BIAS
    __shared__ float parts[SIDE_THREADS / 32];
    for (int row = 0; large && row < TILE_M && t.first_row + row < t.s.rows_q; row++) {
        if (!is_large(stored_lse(p, t.s, t.head, t.first_row + row))) continue;
        float sum = sum_exponentials(p, t, t.first_row + row, parts);
        if (threadIdx.x == 0) lse_out[row] = log2_approx(sum);
    }
#endif
    // The flag and its padding, which the copies of main read with it.
    if (threadIdx.x < 4) lse_out[2 * TILE_M + threadIdx.x] = large ? 1.f : 0.f;
}

// Converts chunks of 8 columns of two rows to elements.
DEVICE void write_dq(const dw_attention_params &p, const query_tile &t, int row, int column, const float *values) {
    int i = t.first_row + row;
    if (i >= t.s.rows_q || column >= p.head_dim) return;
    uint4 packed;
    packed.x = pack_elements(values[0] * p.scale, values[1] * p.scale);
    packed.y = pack_elements(values[2] * p.scale, values[3] * p.scale);
    packed.z = pack_elements(values[4] * p.scale, values[5] * p.scale);
    packed.w = pack_elements(values[6] * p.scale, values[7] * p.scale);
    *(uint4 *)((uint16 *)p.dq.data + place_row(p.dq, t.s, t.head, i) + column) = packed;
}

extern "C" __global__ void __launch_bounds__(SIDE_THREADS)
    sm90_attention_backward_finish(const __grid_constant__ dw_attention_params p) {
    query_tile t;
    if (!find_query_tile(p, t)) return;
    const float4 *sums = (const float4 *)(p.dq_sum + t.tile * TILE_M * COLUMNS);
    // A thread here processes what four threads accumulated: 16 numbers of two rows that are 8 apart.
    for (int i = threadIdx.x; i < TILE_M * COLUMNS / 16; i += SIDE_THREADS) {
        int group = i % 8, quad = i / 8 % 32, portion = i / 256; // 8 lanes write 128 bytes of a row
        int row = quad / 8 * 16 + quad % 8, column = 8 * group;
        if (BLOCKS == 1) row += 64 * portion;
        else column += 64 * portion;
        float above[8], below[8];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float4 v = sums[(portion * 8 + group) * 128 + 4 * quad + j];
            above[2 * j] = v.x;
            above[2 * j + 1] = v.y;
            below[2 * j] = v.z;
            below[2 * j + 1] = v.w;
        }
        write_dq(p, t, row, column, above);
        write_dq(p, t, row + 8, column, below);
    }
}

// ---- main: work items --------------------------------------------------------------------------------------------

typedef struct work {
    sequence s;
    int head_kv, first_key;
    int diagonal;   // query i sees keys around i + diagonal
    int begin, end; // tiles of queries of which at least one sees one of the keys
} work;

// Work items: the key blocks of one head are adjacent and share its queries in the cache; those that most queries see
// under a causal mask come first, or last with TURNS. With a window the heads of a section take turns, so that blocks
// that run at the same time have about the same work; a section has 2^16 queries, which the cache can hold. Returns
// false if there is no item.
#define SECTIONS (WINDOW && !TURNS && !SERIAL)
DEVICE bool find_work(const dw_attention_params &p, int index, work &w) {
    int blocks = (p.rows_k + TILE_N - 1) / TILE_N, head = index / blocks, block = index - head * blocks;
#if SECTIONS
    int most = max(1, min(8, (1 << 16) / (p.rows_q * p.group))), section = index / (blocks * most);
    int heads = min(most, p.batch * p.heads_kv - section * most);
    index -= section * most * blocks;
    block = index / heads;
    head = section * most + index - block * heads;
#endif
    w.first_key = (TURNS ? blocks - 1 - block : block) * TILE_N;
    int batch = head / p.heads_kv;
    w.head_kv = head - batch * p.heads_kv;
    w.s = find_sequence(p, batch);
    if (w.first_key >= w.s.rows_k) return false;
    w.diagonal = p.bottom_right ? w.s.rows_k - w.s.rows_q : 0;
    int first_row = 0, last_row = w.s.rows_q - 1;
#if WINDOW
    int last_key = min(w.first_key + TILE_N, w.s.rows_k) - 1;
    first_row = max(first_row, w.first_key - w.diagonal - p.window_right);
    last_row = min(last_row, last_key - w.diagonal + p.window_left);
#endif
    w.begin = first_row / TILE_M;
    w.end = last_row < first_row ? w.begin : last_row / TILE_M + 1;
    return true;
}

// Returns the tile of queries at which a thread block starts; it wraps around. If all blocks started at the first
// tile, blocks that run at the same time would add to the same accumulators at the same time. With a window they
// start apart anyway.
DEVICE int first_tile(const work &w) {
    if (!ROTATED) return w.begin;
    return w.begin + w.first_key / TILE_N * ROTATED % (w.end - w.begin);
}

DEVICE int next_tile(const work &w, int m) { return m + 1 < w.end ? m + 1 : w.begin; }

// The work items of a thread block: runs of WORK_RUN consecutive items.
#define WORK_RUN(p) (SERIAL ? ((p).rows_k + TILE_N - 1) / TILE_N : 1)

DEVICE int next_work(const dw_attention_params &p, int index) {
    // If the compiler knows that there is no second one, it has more registers; 2 % faster here, and slower elsewhere.
    if (!SERIAL && WINDOW && HEAD_DIM == 128) return 0x7fffffff;
    int run = WORK_RUN(p);
    return (index + 1) % run ? index + 1 : index + 1 + ((int)gridDim.x - 1) * run;
}

typedef struct shared_layout {
    uint32 k, v, q, d_o, scores, stats; // tiles; there are several of q, d_o, scores and stats, adjacent
    uint32 k_full, k_empty, v_full, v_empty, q_full, q_empty, do_full, do_empty; // barriers, 8 bytes apart
} shared_layout;

DEVICE shared_layout layout_shared(uint32 base) {
    shared_layout s;
    s.k = (base + 1023) & ~1023u;
    s.v = s.k + KV_BYTES;
    s.q = s.v + KV_BYTES;
    s.d_o = s.q + STAGES_Q * Q_BYTES;
    s.scores = s.d_o + STAGES_DO * Q_BYTES;
    s.stats = s.scores + SCORE_BUFFERS * SCORE_TILES * SCORE_BYTES;
    s.k_full = s.stats + STAGES_Q * STATS_BYTES;
    s.k_empty = s.k_full + 8;
    s.v_full = s.k_empty + 8;
    s.v_empty = s.v_full + 8;
    s.q_full = s.v_empty + 8;
    s.q_empty = s.q_full + 8 * STAGES_Q;
    s.do_full = s.q_empty + 8 * STAGES_Q;
    s.do_empty = s.do_full + 8 * STAGES_DO;
    return s;
}
static_assert(DW_BACKWARD_SHARED(HEAD_DIM, TILE_M, TILE_N, STAGES_Q, STAGES_DO) ==
                  1024 + 2 * KV_BYTES + (STAGES_Q + STAGES_DO) * Q_BYTES + SCORE_BUFFERS * SCORE_TILES * SCORE_BYTES +
                      STAGES_Q * STATS_BYTES + 256,
              "the host reserves what is used");

// ---- main: producer -----------------------------------------------------------------------------------------------

DEVICE void load_tile(uint32 to, int rows, const tensor_map *map, uint32 barrier, int row, int head, int batch) {
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
        tma_load(to + block * rows * 128, map, barrier, block * 64, row, head, batch);
}

DEVICE void produce(const dw_attention_params &p, const shared_layout &s, const tensor_map *map_q,
                    const tensor_map *map_k, const tensor_map *map_v, const tensor_map *map_do) {
    ring q = {0, 0}, d = {0, 0};
    uint32 kv_phase = 0;
    for (int index = blockIdx.x * WORK_RUN(p); index < p.tiles; index = next_work(p, index)) {
        work w;
        if (!find_work(p, index, w) || w.begin >= w.end) continue;
        barrier_wait(s.k_empty, kv_phase ^ 1);
        barrier_expect(s.k_full, KV_BYTES);
        load_tile(s.k, TILE_N, map_k, s.k_full, w.s.start_k + w.first_key, w.head_kv, STRIDED_BATCH(w.s));
        bool values_loaded = false;
        for (int head = w.head_kv * p.group; head < (w.head_kv + 1) * p.group; head++) {
            long long tiles = w.s.tile + (long long)head * w.s.tile_stride;
            for (int left = w.end - w.begin, m = first_tile(w); left; left--, m = next_tile(w, m)) {
                int row = w.s.start_q + m * TILE_M;
                uint32 full = s.q_full + 8 * q.stage;
                barrier_wait(s.q_empty + 8 * q.stage, q.phase ^ 1);
                barrier_expect(full, Q_BYTES + STATS_BYTES);
                load_tile(s.q + q.stage * Q_BYTES, TILE_M, map_q, full, row, head, STRIDED_BATCH(w.s));
                bulk_load(s.stats + q.stage * STATS_BYTES, p.delta + (tiles + m) * DW_BACKWARD_STATISTICS(TILE_M),
                          STATS_BYTES, full);
                advance(q, STAGES_Q);
                if (!values_loaded) {
                    barrier_wait(s.v_empty, kv_phase ^ 1);
                    barrier_expect(s.v_full, KV_BYTES);
                    load_tile(s.v, TILE_N, map_v, s.v_full, w.s.start_k + w.first_key, w.head_kv, STRIDED_BATCH(w.s));
                    values_loaded = true;
                }
                full = s.do_full + 8 * d.stage;
                barrier_wait(s.do_empty + 8 * d.stage, d.phase ^ 1);
                barrier_expect(full, Q_BYTES);
                load_tile(s.d_o + d.stage * Q_BYTES, TILE_M, map_do, full, row, head, STRIDED_BATCH(w.s));
                advance(d, STAGES_DO);
            }
        }
        kv_phase ^= 1;
    }
}

// ---- main: consumer, GEMMs: these functions issue and do not wait
// ----------------------------------------------------

typedef struct place {
    int consumer, warp, lane; // warp: within its warpgroup
} place;

// Q K^T or dO V^T for this consumer's keys.
DEVICE void multiply_scores(float *scores, uint32 keys, uint32 queries, int consumer) {
    wgmma_fence();
    uint32 base_k = descriptor_base(keys + consumer * KEYS * 128, 0), base_q = descriptor_base(queries, 0);
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++) {
        uint64 k = descriptor(base_k, step / 4 * (TILE_N * 128) + step % 4 * 32);
        uint64 q = descriptor(base_q, step / 4 * (TILE_M * 128) + step % 4 * 32);
#if KEYS_AS_ROWS
        wgmma_ss<TILE_M, 0, 0>(scores, k, q, step > 0);
#else
        wgmma_ss<KEYS, 0, 0>(scores, q, k, step > 0);
#endif
    }
    wgmma_commit();
}

// dV += P^T dO or dK += dS^T Q. The left operand is `packed` in registers, or `tile` in shared memory.
DEVICE void multiply_sums(float *sums, const uint32 *packed, uint32 tile, uint32 queries, int consumer) {
    wgmma_fence();
#if KEYS_AS_ROWS
    uint32 base_q = descriptor_base(queries, TILE_M * 128);
#pragma unroll
    for (int step = 0; step < TILE_M / 16; step++)
        wgmma_rs<HEAD_DIM, 1>(sums, packed + 4 * step, descriptor(base_q, step * 2048), 1);
#else
    uint32 base_q = descriptor_base(queries + consumer * HEAD_BLOCKS * (TILE_M * 128), 0);
    uint32 base_tile = descriptor_base(tile, 0);
#pragma unroll
    for (int block = 0; block < HEAD_BLOCKS; block++)
#pragma unroll
        for (int step = 0; step < TILE_M / 16; step++)
            wgmma_ss<TILE_N, 1, 0>(sums + block * (TILE_N / 2),
                                   descriptor(base_q, block * (TILE_M * 128) + step * 2048),
                                   descriptor(base_tile, step * 32), 1);
#endif
    wgmma_commit();
}

// This consumer's slice of dS K; with SERIAL, added to the accumulators.
DEVICE void multiply_dq(float *dq, uint32 ds, uint32 k, int consumer, int slice) {
    wgmma_fence();
    uint32 base_k = descriptor_base(k + (BLOCKS == 1 ? 0 : consumer * DQ_SLICES + slice) * (TILE_N * 128), 0);
    uint32 base_ds = descriptor_base(ds + (KEYS_AS_ROWS && BLOCKS == 1 ? consumer * 64 * 128 : 0), 0);
#pragma unroll
    for (int step = 0; step < TILE_N / 16; step++) {
        uint64 keys = descriptor(base_k, step * 2048);
#if KEYS_AS_ROWS
        uint64 rows = descriptor(base_ds, step / 4 * (TILE_M * 128) + step % 4 * 32);
        wgmma_ss<64, 0, 1>(dq, rows, keys, SERIAL || step > 0);
#else
        wgmma_ss<64, 1, 1>(dq, descriptor(base_ds, step * 2048), keys, SERIAL || step > 0);
#endif
    }
    wgmma_commit();
}

// ---- main: consumer, scores -----------------------------------------------------------------------------------------
//
// Score 4 c + 2 h + b of a thread is in row line + 8 h and column 8 c + 2 (lane % 4) + b of the consumer's GEMM, whose
// rows are its keys and whose columns are the tile's queries, or the other way round.

#if KEYS_AS_ROWS
#define QUERY(c, h, b) (8 * (c) + 2 * (at.lane & 3) + (b))
#define KEY(c, h, b) (at.consumer * KEYS + at.warp * 16 + at.lane / 4 + 8 * (h))
#else
#define QUERY(c, h, b) (at.warp * 16 + at.lane / 4 + 8 * (h))
#define KEY(c, h, b) (at.consumer * KEYS + 8 * (c) + 2 * (at.lane & 3) + (b))
#endif

// The statistics of score (c, h, b); `stats` has tile_m numbers.
typedef struct statistics {
    float2 value;
} statistics;

DEVICE statistics rows_statistics(uint32 stats, const place &at) {
    statistics s = {make_float2(0.f, 0.f)};
#if !KEYS_AS_ROWS
    s.value.x = shared_load_f32(stats + 4 * QUERY(0, 0, 0));
    s.value.y = shared_load_f32(stats + 4 * QUERY(0, 1, 0));
#endif
    return s;
}

DEVICE void next_statistics(statistics &s, uint32 stats, const place &at, int c) {
#if KEYS_AS_ROWS
    s.value = shared_load_f32_pair(stats + 4 * QUERY(c, 0, 0));
#endif
}

DEVICE float statistic(const statistics &s, int h, int b) { return (KEYS_AS_ROWS ? b : h) ? s.value.y : s.value.x; }

// Reads the bias of a thread's scores: word 2 c + h has the two of (c, h), before the transposition. Queries past the end read
// that of the last query.
#define BIAS_WORDS (SCORES / 2)
[[maybe_unused]] DEVICE void load_bias(const dw_attention_params &p, const work &w, const place &at, int head, int first_query, uint32 *words) {
#if BIAS
    int first_key = w.first_key + at.consumer * KEYS;
    long long plane = bias_line(p, w.s.batch, head, 0);
#pragma unroll
    for (int c = 0; c < SCORES / 4; c++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
#if KEYS_AS_ROWS // of 8 queries and 8 keys, to be transposed
            int query = first_query + 8 * c + at.lane / 4, key = first_key + at.warp * 16 + 8 * h + 2 * (at.lane & 3);
#else
            int query = first_query + at.warp * 16 + at.lane / 4 + 8 * h, key = first_key + 8 * c + 2 * (at.lane & 3);
#endif
            long long line = plane + min(query, w.s.rows_q - 1) * p.bias.row;
            words[2 * c + h] = bias_pair(p, line, key, w.s.rows_k);
        }
#endif
}

// Scales the scores and adds their bias.
DEVICE void add_bias(const dw_attention_params &p, const uint32 *words, float *scores) {
#if BIAS
#pragma unroll
    for (int i = 0; i < BIAS_WORDS; i++) {
        uint32 word = KEYS_AS_ROWS ? transpose_elements(words[i]) : words[i];
        scores[2 * i] = fmaf(scores[2 * i], p.scale, element_low(word));
        scores[2 * i + 1] = fmaf(scores[2 * i + 1], p.scale, element_high(word));
    }
#endif
}

// Sets scores of pairs that do not see each other to -infinity.
DEVICE void mask_scores(const dw_attention_params &p, const work &w, const place &at, int first_query, float *scores) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        // Keys with low <= 8 c + b < high are visible.
        [[maybe_unused]] int query = first_query + QUERY(0, h, 0);
        int key = w.first_key + KEY(0, h, 0), low = 0, high = 1 << 30;
#if KEYS_AS_ROWS
#if WINDOW
        low = key - w.diagonal - p.window_right - query;
        high = key - w.diagonal + p.window_left + 1 - query;
#endif
        if (key >= w.s.rows_k) high = -1;
#else
        high = w.s.rows_k - key;
#if WINDOW
        low = query + w.diagonal - p.window_left - key;
        high = min(high, query + w.diagonal + p.window_right + 1 - key);
#endif
#endif
        asm volatile("" : "+r"(high)); // keeps a single branch around all of this
#pragma unroll
        for (int c = 0; c < SCORES / 4; c++)
#pragma unroll
            for (int b = 0; b < 2; b++) {
                if (8 * c + b >= high || (WINDOW && 8 * c + b < low)) scores[4 * c + 2 * h + b] = -INFINITY_F;
            }
    }
}

// Returns whether all pairs of this consumer's keys and the tile's queries see each other.
DEVICE bool all_seen(const dw_attention_params &p, const work &w, const place &at, int first_query) {
    int first_key = w.first_key + at.consumer * KEYS, last_key = first_key + KEYS - 1;
    bool seen = last_key < w.s.rows_k;
#if WINDOW
    seen = seen && last_key <= first_query + w.diagonal + p.window_right &&
           first_key >= first_query + TILE_M - 1 + w.diagonal - p.window_left;
#endif
    return seen;
}

// For a query with large scores: sets the scores so that exponents are 0 for the largest scores and far below for the
// others. Which scores are the largest is all that is known about them.
DEVICE void flatten_scores(const dw_attention_params &p, const work &w, const place &at, int head, int first_query,
                           float *scores) {
    asm volatile("" : "+r"(first_query)); // keeps the compiler from hoisting this code
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        int row = first_query + QUERY(i / 4, i / 2 % 2, i % 2);
#if BIAS
        float stored = row < w.s.rows_q ? stored_lse(p, w.s, head, row) : 0.f;
        if (is_large(stored)) scores[i] = fminf(scores[i] - stored, 0.f);
        continue;
#endif
        float lse = row < w.s.rows_q ? scaled_lse(p, w.s, head, row) : 0.f;
        float above = fmaf(scores[i], p.scale_log2, fabsf(lse) * 0x1p-21f - lse);
        if (is_large(lse)) scores[i] = fminf(above, 0.f) / p.scale_log2;
    }
}

// Converts scores to probabilities.
DEVICE void take_exponentials(float *scores, uint32 stats, const place &at, float scale) {
    statistics lse = rows_statistics(stats, at);
#pragma unroll
    for (int c = 0; c < SCORES / 4; c++) {
        next_statistics(lse, stats, at, c);
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int b = 0; b < 2; b++) {
                float &score = scores[4 * c + 2 * h + b];
                score = exp2_approx(fmaf(score, scale, -statistic(lse, h, b)));
            }
    }
}

// Converts dP to dS (without the scale), in place. With dropout, dropped probabilities become 0, as dV needs them;
// with a soft cap, `scores` are passed as scores.
DEVICE void take_derivatives(const dw_attention_params &p, const work &w, const place &at, int head, int first_query,
                             uint32 stats, float *scores, float *dp) {
    statistics delta = rows_statistics(stats + TILE_M * 4, at);
#if SOFTCAP
    statistics lse = rows_statistics(stats, at);
#endif
#if DROPOUT
    philox_key key = philox_key_of(p);
    uint64 line = ((uint64)w.s.batch * p.heads_q + head) * p.rows_q;
#endif
#pragma unroll
    for (int c = 0; c < SCORES / 4; c++) {
        next_statistics(delta, stats + TILE_M * 4, at, c);
#if SOFTCAP
        next_statistics(lse, stats, at, c);
#endif
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int b = 0; b < 2; b++) {
                float &probability = scores[4 * c + 2 * h + b], &d = dp[4 * c + 2 * h + b];
                float slope = 1.f;
#if SOFTCAP
                float t = tanh_exact(probability * p.cap_scale);
                slope = fmaf(-t, t, 1.f);
                t = exp2_approx(fminf(fmaf(t, p.scale_log2, -statistic(lse, h, b)), 0.f));
                probability = probability == -INFINITY_F ? 0.f : t;
#endif
                float undropped = probability;
#if DROPOUT
                uint64 element = (line + first_query + QUERY(c, h, b)) * p.rows_k + w.first_key + KEY(c, h, b);
                bool kept = philox_word(philox(key, element >> 2), (int)(element & 3)) >> 8 >= p.keep_threshold;
                d = kept ? d * p.keep_scale : 0.f;
                if (!kept) probability = 0.f;
#endif
                d = undropped * (d - statistic(delta, h, b));
                if (SOFTCAP) d *= slope;
            }
    }
}

DEVICE void pack_scores(uint32 *packed, const float *scores) {
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) packed[i] = pack_elements(scores[2 * i], scores[2 * i + 1]);
}

// Stores scores to shared memory, transposed: columns of the GEMM become rows of the tile.
DEVICE void store_scores(uint32 tile, const uint32 *packed, const place &at) {
    int row = at.lane / 16 * 8 + at.lane % 8, chunk = at.warp * 2 + at.lane / 8 % 2;
#if KEYS_AS_ROWS
    int rows = TILE_M;
    chunk += at.consumer * 8;
#else
    int rows = TILE_N;
    row += at.consumer * KEYS;
#endif
#pragma unroll
    for (int c = 0; c + 1 < SCORES / 4; c += 2)
        store_matrices_transposed(tile_chunk(tile, rows, row + 8 * c, chunk), packed[2 * c], packed[2 * c + 1],
                                  packed[2 * c + 2], packed[2 * c + 3]);
    if (SCORES / 4 % 2)
        store_two_matrices_transposed(tile_chunk(tile, rows, row - at.lane / 16 * 8 + 2 * SCORES - 8, chunk),
                                      packed[SCORES / 2 - 2], packed[SCORES / 2 - 1]);
}

// ---- main: consumer, dQ ---------------------------------------------------------------------------------------------

[[maybe_unused]] DEVICE void sync_consumer(int consumer) { named_sync(2 + consumer, 128); }

// TURNS: the number of key blocks that add to a tile's accumulators before this one.
DEVICE int turn_of(const dw_attention_params &p, const work &w, int m) {
    return last_key_of(p, w.s, m) / TILE_N - w.first_key / TILE_N;
}

// The barriers between a consumer and the warp that keeps its turns.
#define TURN_HAS_COME(consumer) (5 + (consumer))
#define SUMS_ARE_ADDED(consumer) (8 + (consumer))
#define TURN_THREADS (128 + 32)

// A warp waits for each turn of a consumer and passes it on. The release covers the consumer's additions, which
// precede it at a barrier.
[[maybe_unused]] DEVICE void keep_turns(const dw_attention_params &p, int consumer) {
#pragma unroll 1
    for (int index = blockIdx.x; index < p.tiles; index = next_work(p, index)) {
        work w;
        if (!find_work(p, index, w)) continue;
#pragma unroll 1
        for (int head = 0; head < p.group; head++) {
            long long tile = w.s.tile + (long long)(w.head_kv * p.group + head) * w.s.tile_stride + w.begin;
            int *turn = p.turn + tile * CONSUMERS + consumer;
#pragma unroll 1
            for (int m = w.begin; m < w.end; m++, turn += CONSUMERS) {
                int own = turn_of(p, w, m);
                if (lane_index() == 0 && own > 0)
                    while (global_load_acquire(turn) != own) __nanosleep(32);
                __syncwarp();
                named_arrive(TURN_HAS_COME(consumer), TURN_THREADS);
                named_sync(SUMS_ARE_ADDED(consumer), TURN_THREADS);
                if (lane_index() == 0) global_store_release(turn, own + 1);
            }
        }
    }
}

// Adds to a tile's accumulators; the first with TURNS stores.
DEVICE void add_dq(const dw_attention_params &p, const float *dq, long long tile, int consumer, int slice, bool first) {
    int portion = consumer * DQ_SLICES + slice;
    float *to = p.dq_sum + tile * TILE_M * COLUMNS + portion * (128 * DQ_SUMS) + (threadIdx.x & 127) * 4;
    if (TURNS && first) {
#pragma unroll
        for (int i = 0; i < DQ_SUMS / 4; i++)
            *(float4 *)(to + i * 512) = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
        return;
    }
#pragma unroll
    for (int i = 0; i < DQ_SUMS / 4; i++) global_add_f32x4(to + i * 512, dq + 4 * i);
}

#if LATE_DQ
// Barriers by which a consumer learns that the other one has stored its dS. The two parities take turns: a consumer may
// be one tile ahead.
#define DS_IS_STORED(consumer, parity) (11 + 2 * (consumer) + (parity))

// A tile whose dQ is still to be computed.
typedef struct late_tile {
    uint32 ds; // dS in shared memory
    int m;
    int index; // of its accumulators; -1: there is none
} late_tile;

DEVICE void add_late(const dw_attention_params &p, const work &w, const late_tile &late, const float *dq, int consumer) {
    bool first = TURNS && turn_of(p, w, late.m) == 0;
    if (TURNS) named_sync(TURN_HAS_COME(consumer), TURN_THREADS);
    add_dq(p, dq, late.index, consumer, 0, first);
    if (TURNS) named_arrive(SUMS_ARE_ADDED(consumer), TURN_THREADS);
}
#endif

// SERIAL: returns the address of this thread's accumulators.
DEVICE float *own_sums(const dw_attention_params &p, const work &w, int head, int m, int consumer, int slice) {
    int tile = (blockIdx.x * p.group + head - w.head_kv * p.group) * queries_to_tiles(p.rows_q) + m;
    return p.dq_sum + (long long)tile * (TILE_M * COLUMNS) + (consumer * DQ_SLICES + slice) * (128 * DQ_SUMS) +
           (threadIdx.x & 127) * 4;
}

[[maybe_unused]] DEVICE void load_own_sums(const dw_attention_params &p, const work &w, int head, int m, int consumer, int slice,
                          float *dq) {
    bool first = w.first_key / TILE_N == first_key_of(p, w.s, m) / TILE_N;
    const float *from = own_sums(p, w, head, m, consumer, slice);
#pragma unroll
    for (int i = 0; i < DQ_SUMS / 4; i++) {
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
        if (!first) v = global_load_f32x4(from + i * 512);
        dq[4 * i] = v.x;
        dq[4 * i + 1] = v.y;
        dq[4 * i + 2] = v.z;
        dq[4 * i + 3] = v.w;
    }
}

// Converts a thread's part of a row, in the accumulators of 64 rows or of 64 columns, to elements in memory:
// `columns` of them, from `column` on. The four threads of a quad together hold 8 columns, 2 each; transposed, each
// holds 8.
DEVICE void write_row(uint16 *line, const float *sums, int columns, int column, int head_dim, bool exists,
                      float factor) {
#pragma unroll
    for (int chunk = 0; chunk < columns / 8; chunk += 4) {
        uint32 words[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[i] = pack_elements(sums[4 * (chunk + i)] * factor, sums[4 * (chunk + i) + 1] * factor);
        transpose_quad(words);
        int at = column + (chunk + (lane_index() & 3)) * 8;
        if (exists && at < head_dim) *(uint4 *)(line + at) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

[[maybe_unused]] DEVICE void store_own_sums(const dw_attention_params &p, const work &w, const place &at, int head, int m, int slice,
                           const float *dq) {
    bool last = w.first_key / TILE_N == last_key_of(p, w.s, m) / TILE_N;
    if (!last) {
        float *to = own_sums(p, w, head, m, at.consumer, slice);
#pragma unroll
        for (int i = 0; i < DQ_SUMS / 4; i++)
            *(float4 *)(to + i * 512) = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
        return;
    }
    int portion = at.consumer * DQ_SLICES + slice;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = m * TILE_M + (BLOCKS == 1 ? portion * 64 : 0) + at.warp * 16 + at.lane / 4 + 8 * h;
        uint16 *line = (uint16 *)p.dq.data + place_row(p.dq, w.s, head, row);
        write_row(line, dq + 2 * h, 64, BLOCKS == 1 ? 0 : portion * 64, p.head_dim, row < w.s.rows_q, p.scale);
    }
}

// ---- main: consumer, dK and dV --------------------------------------------------------------------------------------

// Writes accumulators to memory; `tile` is the memory of V, which is no longer read.
DEVICE void write_sums(const dw_attention_params &p, const dw_strided &out, const work &w, const place &at, uint32 tile,
                       const float *sums, float factor) {
    uint16 *to = (uint16 *)out.data + STRIDED_BATCH(w.s) * out.batch + w.head_kv * out.head;
#if KEYS_AS_ROWS
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int key = w.first_key + KEY(0, h, 0);
        uint16 *line = to + (long long)(w.s.start_k + key) * out.row;
        write_row(line, sums + 2 * h, HEAD_DIM, 0, p.head_dim, key < w.s.rows_k, factor);
    }
#else
    // Columns are rows here: goes through shared memory, where a consumer has HEAD_BLOCKS blocks of 64 columns.
    int first_chunk = at.consumer * HEAD_BLOCKS * 8;
    int row = at.lane / 16 * 8 + at.lane % 8, chunk = first_chunk + at.warp * 2 + at.lane / 8 % 2;
#pragma unroll
    for (int block = 0; block < HEAD_BLOCKS; block++)
#pragma unroll
        for (int c = 0; c < TILE_N / 8; c += 2) {
            const float *from = sums + block * (TILE_N / 2) + 4 * c;
            uint32 packed[4];
#pragma unroll
            for (int i = 0; i < 4; i++) packed[i] = pack_elements(from[2 * i] * factor, from[2 * i + 1] * factor);
            store_matrices_transposed(tile_chunk(tile, TILE_N, row + 8 * c, chunk + 8 * block), packed[0], packed[1],
                                      packed[2], packed[3]);
        }
    sync_consumer(at.consumer);
    for (int i = threadIdx.x & 127; i < TILE_N * HEAD_BLOCKS * 8; i += 128) {
        int key = i / (HEAD_BLOCKS * 8), at_chunk = first_chunk + i % (HEAD_BLOCKS * 8);
        uint4 values = shared_load16(tile_chunk(tile, TILE_N, key, at_chunk));
        if (w.first_key + key < w.s.rows_k && at_chunk * 8 < p.head_dim)
            *(uint4 *)(to + (long long)(w.s.start_k + w.first_key + key) * out.row + at_chunk * 8) = values;
    }
    sync_consumer(at.consumer);
#endif
}

// Writes zeros for keys that no query sees.
DEVICE void write_zeros(const dw_attention_params &p, const dw_strided &out, const work &w) {
    uint16 *to = (uint16 *)out.data + STRIDED_BATCH(w.s) * out.batch + w.head_kv * out.head;
    int chunks = p.head_dim / 8;
    for (int i = threadIdx.x - 128; i < TILE_N * chunks; i += CONSUMER_THREADS) {
        int key = w.first_key + i / chunks;
        if (key < w.s.rows_k)
            *(uint4 *)(to + (long long)(w.s.start_k + key) * out.row + i % chunks * 8) = make_uint4(0, 0, 0, 0);
    }
}

// In a packed batch, rows past the end belong to another sequence and may contain infinities, which must not be
// multiplied by our zeros. Every consumer writes the same zeros.
DEVICE void clear_rows(uint32 tile, int rows, int from, int consumer) {
#if PACKED
    if (from >= rows) return;
    for (int i = threadIdx.x & 127; i < (rows - from) * BLOCKS * 8; i += 128)
        shared_store16(tile_chunk(tile, rows, from + i / (BLOCKS * 8), i % (BLOCKS * 8)), make_uint4(0, 0, 0, 0));
    fence_async_shared();
    sync_consumer(consumer);
#endif
}

DEVICE void release(uint32 barrier) {
    if (lane_index() == 0) barrier_arrive(barrier);
}

DEVICE void consume(const dw_attention_params &p, const shared_layout &s) {
    // The shuffle tells the compiler that the value is uniform across lanes, because descriptors are computed from
    // it.
    int warp = __shfl_sync(0xffffffff, (int)threadIdx.x / 32, 0);
    place at = {warp / 4 - 1, warp % 4, (int)lane_index()};
    ring q = {0, 0}, d = {0, 0};
    uint32 kv_phase = 0, buffer = 0;
    [[maybe_unused]] int parity = 0;

    for (int index = blockIdx.x * WORK_RUN(p); index < p.tiles; index = next_work(p, index)) {
        work w;
        if (!find_work(p, index, w)) continue;
        if (w.begin >= w.end) {
            write_zeros(p, p.dk, w);
            write_zeros(p, p.dv, w);
            continue;
        }
        float dk[SUMS], dv[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; i++) dk[i] = dv[i] = 0.f;
        barrier_wait(s.k_full, kv_phase);
        barrier_wait(s.v_full, kv_phase);
        kv_phase ^= 1;
        clear_rows(s.k, TILE_N, w.s.rows_k - w.first_key, at.consumer);
        clear_rows(s.v, TILE_N, w.s.rows_k - w.first_key, at.consumer);

        int head = w.head_kv * p.group, last_head = head + p.group - 1, m = first_tile(w), left = w.end - w.begin;
#if LATE_DQ
        // At the first tile the GEMM for dQ multiplies keys, and nothing reads the result: a branch around it would
        // serialize all GEMMs.
        late_tile late = {s.k, 0, -1};
#endif
        for (;;) {
            uint32 queries = s.q + q.stage * Q_BYTES, derivatives = s.d_o + d.stage * Q_BYTES;
            uint32 stats = s.stats + q.stage * STATS_BYTES;
            uint32 p_tile = s.scores + buffer * (SCORE_TILES * SCORE_BYTES);
            uint32 ds_tile = p_tile + (SCORE_TILES - 1) * SCORE_BYTES;
            int first_query = m * TILE_M;
            long long tile = w.s.tile + (long long)head * w.s.tile_stride + m;
            float scores[SCORES], dp[SCORES], dq[DQ_SUMS];
            uint32 packed_p[SCORES / 2], packed_ds[SCORES / 2];

            barrier_wait(s.q_full + 8 * q.stage, q.phase);
            clear_rows(queries, TILE_M, w.s.rows_q - first_query, at.consumer);
            multiply_scores(scores, s.k, queries, at.consumer);
            barrier_wait(s.do_full + 8 * d.stage, d.phase);
            clear_rows(derivatives, TILE_M, w.s.rows_q - first_query, at.consumer);
            multiply_scores(dp, s.v, derivatives, at.consumer);

            [[maybe_unused]] uint32 bias[BIAS_WORDS];
            load_bias(p, w, at, head, first_query, bias);
            wgmma_wait<1>();
            keep<SCORES>(scores);
            add_bias(p, bias, scores);
            if (shared_load_f32(stats + 8 * TILE_M) != 0.f) flatten_scores(p, w, at, head, first_query, scores);
            if (!all_seen(p, w, at, first_query)) mask_scores(p, w, at, first_query, scores);
            if (!SOFTCAP) take_exponentials(scores, stats, at, SCORE_SCALE(p));
#if EARLY_DV
            pack_scores(packed_p, scores);
            multiply_sums(dv, packed_p, p_tile, derivatives, at.consumer);
            wgmma_wait<1>();
#else
            wgmma_wait<0>();
#endif
            keep<SCORES>(dp);
            take_derivatives(p, w, at, head, first_query, stats, scores, dp);
            if (!EARLY_DV) pack_scores(packed_p, scores);
            pack_scores(packed_ds, dp);

#if LATE_DQ
            if (!EARLY_DV) multiply_sums(dv, packed_p, p_tile, derivatives, at.consumer);
            // Waits until the other consumer has stored its dS of the tile before. It has then finished with this buffer,
            // which had the dS of three tiles before.
            if (late.index >= 0) named_sync(DS_IS_STORED(1 - at.consumer, parity ^ 1), CONSUMER_THREADS);
            store_scores(ds_tile, packed_ds, at);
            fence_async_shared();
            named_arrive(DS_IS_STORED(at.consumer, parity), CONSUMER_THREADS);
            parity ^= 1;
            multiply_dq(dq, late.ds, s.k, at.consumer, 0);
            wgmma_wait<1>();
            keep<SUMS>(dv);
            release(s.do_empty + 8 * d.stage);
            advance(d, STAGES_DO);
            multiply_sums(dk, packed_ds, ds_tile, queries, at.consumer);
            wgmma_wait<1>();
            keep<DQ_SUMS>(dq);
            if (late.index >= 0) add_late(p, w, late, dq, at.consumer);
            wgmma_wait<0>();
            keep<SUMS>(dk);
            release(s.q_empty + 8 * q.stage);
            advance(q, STAGES_Q);
            late = {ds_tile, m, (int)tile};
            buffer = buffer == SCORE_BUFFERS - 1 ? 0 : buffer + 1;
#else
            // The buffer was last read two steps ago. Each consumer has since passed the barrier of the last step,
            // which none reaches before its GEMMs of the step before it are complete.
            if (!KEYS_AS_ROWS) store_scores(p_tile, packed_p, at);
            store_scores(ds_tile, packed_ds, at);
            fence_async_shared();
#if SERIAL
            load_own_sums(p, w, head, m, at.consumer, 0, dq);
#endif
            if (KEYS_AS_ROWS && !EARLY_DV) multiply_sums(dv, packed_p, p_tile, derivatives, at.consumer);
            if (KEYS_AS_ROWS && DK_FIRST) multiply_sums(dk, packed_ds, ds_tile, queries, at.consumer);
            if (SERIAL && KEYS_AS_ROWS) load_own_sums(p, w, head, m, at.consumer, 0, dq);
            named_sync(1, CONSUMER_THREADS);
            if (!KEYS_AS_ROWS) multiply_sums(dv, packed_p, p_tile, derivatives, at.consumer);
            if (!KEYS_AS_ROWS && DK_FIRST) multiply_sums(dk, packed_ds, ds_tile, queries, at.consumer);
            if (SERIAL && !KEYS_AS_ROWS) load_own_sums(p, w, head, m, at.consumer, 0, dq);
            multiply_dq(dq, ds_tile, s.k, at.consumer, 0);
            wgmma_wait<1>();
            keep<SUMS>(dv);
            release(s.do_empty + 8 * d.stage);
            advance(d, STAGES_DO);
            if (DK_FIRST) {
                wgmma_wait<0>();
            } else {
                multiply_sums(dk, packed_ds, ds_tile, queries, at.consumer);
                wgmma_wait<1>();
            }
            keep<DQ_SUMS>(dq);
            bool first = TURNS && turn_of(p, w, m) == 0;
            if (TURNS) named_sync(TURN_HAS_COME(at.consumer), TURN_THREADS);
#pragma unroll
            for (int slice = 0; slice < DQ_SLICES; slice++) {
                if (slice > 0) {
                    if (SERIAL) load_own_sums(p, w, head, m, at.consumer, slice, dq);
                    multiply_dq(dq, ds_tile, s.k, at.consumer, slice);
                    wgmma_wait<0>();
                    keep<DQ_SUMS>(dq);
                }
                if (SERIAL) store_own_sums(p, w, at, head, m, slice, dq);
                else add_dq(p, dq, tile, at.consumer, slice, first);
            }
            if (TURNS) named_arrive(SUMS_ARE_ADDED(at.consumer), TURN_THREADS);
            wgmma_wait<0>();
            keep<SUMS>(dk);
            release(s.q_empty + 8 * q.stage);
            advance(q, STAGES_Q);
            buffer ^= 1;
#endif

            m = next_tile(w, m);
            if (--left) continue;
            if (head == last_head) break;
            left = w.end - w.begin;
            head++;
        }
#if LATE_DQ
        float dq[DQ_SUMS];
        named_sync(DS_IS_STORED(1 - at.consumer, parity ^ 1), CONSUMER_THREADS);
        multiply_dq(dq, late.ds, s.k, at.consumer, 0);
        wgmma_wait<0>();
        keep<DQ_SUMS>(dq);
        add_late(p, w, late, dq, at.consumer);
#endif
        release(s.k_empty);
        if (KEYS_AS_ROWS) release(s.v_empty);
        write_sums(p, p.dv, w, at, s.v, dv, DROPOUT ? p.keep_scale : 1.f);
        write_sums(p, p.dk, w, at, s.v, dk, p.scale);
        if (KEYS_AS_ROWS) continue;
        fence_async_shared(); // for writes to the memory in which the next V arrives
        __syncwarp();
        release(s.v_empty);
    }
}

// ---- main -------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sm90_attention_backward(const __grid_constant__ tensor_map map_q, const __grid_constant__ tensor_map map_k,
                            const __grid_constant__ tensor_map map_v, const __grid_constant__ tensor_map map_do,
                            const __grid_constant__ dw_attention_params p) {
    extern __shared__ uint8 memory[];
    shared_layout s = layout_shared(shared_address(memory));
    if (threadIdx.x == 0) {
        prefetch_map(&map_q);
        prefetch_map(&map_k);
        prefetch_map(&map_v);
        prefetch_map(&map_do);
        barrier_init(s.k_full, 1);
        barrier_init(s.k_empty, 4 * CONSUMERS);
        barrier_init(s.v_full, 1);
        barrier_init(s.v_empty, 4 * CONSUMERS);
        for (int i = 0; i < STAGES_Q; i++) {
            barrier_init(s.q_full + 8 * i, 1);
            barrier_init(s.q_empty + 8 * i, 4 * CONSUMERS);
        }
        for (int i = 0; i < STAGES_DO; i++) {
            barrier_init(s.do_full + 8 * i, 1);
            barrier_init(s.do_empty + 8 * i, 4 * CONSUMERS);
        }
        fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<CONSUMERS == 3 ? 32 : 24>();
#if TURNS
        // The shuffle tells the compiler that the branch is uniform; otherwise the producer would spill registers.
        int warp = __shfl_sync(0xffffffff, (int)threadIdx.x / 32, 0);
        if (warp > 0) {
            if (warp <= CONSUMERS) keep_turns(p, warp - 1);
            return;
        }
#endif
        if (threadIdx.x == 0) produce(p, s, &map_q, &map_k, &map_v, &map_do);
    } else {
        registers_up<CONSUMERS == 3 ? 160 : 240>();
        consume(p, s);
    }
}

// ---- bias: the gradient of a mask of numbers -----------------------------------------------------------------------
//
// A thread block owns BIAS_ROWS queries by as many keys of the gradient, and adds up dS over the batches and heads that
// share them, in a fixed order, in registers; it computes S and dP once more. 64 columns of Q and K, or of dO and V, are
// a stage of the ring. Rows are queries, 64 for each of two consumers.

#if BIAS == 1
#define BIAS_ROWS DW_BACKWARD_BIAS_ROWS
#define BIAS_STAGES DW_BACKWARD_BIAS_STAGES
#define BIAS_BYTES (BIAS_ROWS * 128)
#define BIAS_SUMS (BIAS_ROWS / 2)

typedef struct bias_tile {
    int batch, batch_end, head, head_end; // whose dS it sums
    int first_row, first_key;
    int diagonal;
    bool seen, cut; // some pair sees each other; some does not
} bias_tile;

DEVICE bias_tile find_bias_tile(const dw_attention_params &p) {
    int columns = (p.rows_k + BIAS_ROWS - 1) / BIAS_ROWS, lines = (p.rows_q + BIAS_ROWS - 1) / BIAS_ROWS;
    int index = blockIdx.x;
    bias_tile t;
    t.first_key = index % columns * BIAS_ROWS;
    index /= columns;
    t.first_row = index % lines * BIAS_ROWS;
    index /= lines;
    t.head = index % p.bias_heads;
    t.batch = index / p.bias_heads;
    t.head_end = p.bias_heads == 1 ? p.heads_q : t.head + 1;
    t.batch_end = p.bias_batches == 1 ? p.batch : t.batch + 1;
    t.diagonal = p.bottom_right ? p.rows_k - p.rows_q : 0;
    t.seen = true;
    t.cut = false;
#if WINDOW
    int last_row = min(t.first_row + BIAS_ROWS, p.rows_q) - 1, last_key = min(t.first_key + BIAS_ROWS, p.rows_k) - 1;
    t.seen = t.first_key <= last_row + t.diagonal + p.window_right &&
             last_key >= t.first_row + t.diagonal - p.window_left;
    t.cut = last_key > t.first_row + t.diagonal + p.window_right ||
            t.first_key < last_row + t.diagonal - p.window_left;
#endif
    return t;
}

typedef struct bias_shared {
    uint32 tiles, full, empty;
} bias_shared;

DEVICE bias_shared layout_bias(uint32 base) {
    bias_shared s;
    s.tiles = (base + 1023) & ~1023u;
    s.full = s.tiles + BIAS_STAGES * 2 * BIAS_BYTES;
    s.empty = s.full + 8 * BIAS_STAGES;
    return s;
}

DEVICE void produce_bias(const dw_attention_params &p, const bias_shared &s, const bias_tile &t, const tensor_map *map_q,
                         const tensor_map *map_k, const tensor_map *map_v, const tensor_map *map_do) {
    ring r = {0, 0};
    for (int batch = t.batch; batch < t.batch_end; batch++)
        for (int head = t.head; head < t.head_end; head++)
            for (int i = 0; i < 2 * BLOCKS; i++) {
                uint32 full = s.full + 8 * r.stage, to = s.tiles + r.stage * 2 * BIAS_BYTES;
                int column = i % BLOCKS * 64;
                barrier_wait(s.empty + 8 * r.stage, r.phase ^ 1);
                barrier_expect(full, 2 * BIAS_BYTES);
                tma_load(to, i < BLOCKS ? map_q : map_do, full, column, t.first_row, head, batch);
                tma_load(to + BIAS_BYTES, i < BLOCKS ? map_k : map_v, full, column, t.first_key, head / p.group, batch);
                advance(r, BIAS_STAGES);
            }
}

// Adds the product of 64 columns; does not wait.
DEVICE void multiply_stage(float *sums, uint32 tile, int consumer, int accumulate) {
    wgmma_fence();
    uint32 rows = descriptor_base(tile + consumer * 64 * 128, 0), keys = descriptor_base(tile + BIAS_BYTES, 0);
#pragma unroll
    for (int step = 0; step < 4; step++)
        wgmma_ss<BIAS_ROWS, 0, 0>(sums, descriptor(rows, step * 32), descriptor(keys, step * 32), accumulate || step > 0);
    wgmma_commit();
}

// What the scores of a thread's row, or those of a head, depend on.
typedef struct bias_row {
    float lse, delta;
    float flat; // the LSE of a large one, whose scores are relative to it; else 0
    long long line; // in the bias
    uint64 element; // of the dropout mask
} bias_row;

DEVICE bias_row find_bias_row(const dw_attention_params &p, int batch, int head, int row) {
    bias_row r = {INFINITY_F, 0.f, 0.f, bias_line(p, batch, head, min(row, p.rows_q - 1)), 0};
    if (row >= p.rows_q) return r;
    sequence s = find_sequence(p, batch);
    long long tile = s.tile + (long long)head * s.tile_stride + row / TILE_M;
    const float *stats = p.delta + tile * DW_BACKWARD_STATISTICS(TILE_M);
    r.lse = stats[row % TILE_M];
    r.delta = stats[TILE_M + row % TILE_M];
    if (stats[2 * TILE_M] != 0.f) {
        float stored = stored_lse(p, s, head, row);
        if (is_large(stored)) r.flat = stored;
    }
    r.element = (((uint64)batch * p.heads_q + head) * p.rows_q + row) * p.rows_k;
    return r;
}

// Converts scores to probabilities, in place.
DEVICE void bias_probabilities(const dw_attention_params &p, const bias_tile &t, const bias_row *rows, float *scores) {
#pragma unroll
    for (int group = 0; group < BIAS_ROWS / 32; group++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32 words[4];
            read_bias(p, rows[h].line, t.first_key + 32 * group, p.rows_k, words);
            arrange_bias(p, words);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    float &score = scores[4 * (4 * group + i) + 2 * h + b];
                    score = fmaf(score, p.scale, b ? element_high(words[i]) : element_low(words[i]));
                    if (rows[h].flat != 0.f) score = fminf(score - rows[h].flat, 0.f);
                    score = exp2_approx(fmaf(score, LOG2_E, -rows[h].lse));
                }
        }
}

// Sets probabilities of pairs that do not see each other to 0.
DEVICE void hide_bias_pairs(const dw_attention_params &p, const bias_tile &t, int row, float *scores) {
#if WINDOW
    int line = row + t.diagonal - t.first_key - 2 * (lane_index() & 3);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int low = line + 8 * h - p.window_left, high = line + 8 * h + p.window_right;
        asm volatile("" : "+r"(high)); // keeps a single branch around all of this
#pragma unroll
        for (int c = 0; c < BIAS_ROWS / 8; c++)
#pragma unroll
            for (int b = 0; b < 2; b++)
                if (8 * c + b < low || 8 * c + b > high) scores[4 * c + 2 * h + b] = 0.f;
    }
#endif
}

// Adds dS.
DEVICE void add_bias_gradients(const dw_attention_params &p, const bias_tile &t, const bias_row *rows, const float *scores,
                               const float *dp, float *sums) {
#if DROPOUT
    philox_key key = philox_key_of(p);
#endif
#pragma unroll
    for (int c = 0; c < BIAS_ROWS / 8; c++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
#if DROPOUT
            uint32 kept = philox_keeps_pair(key, rows[h].element + t.first_key + 8 * c + 2 * (lane_index() & 3),
                                            p.keep_threshold);
#endif
#pragma unroll
            for (int b = 0; b < 2; b++) {
                int i = 4 * c + 2 * h + b;
                float d = dp[i];
#if DROPOUT
                d = kept >> b & 1 ? d * p.keep_scale : 0.f;
#endif
                sums[i] = fmaf(scores[i], d - rows[h].delta, sums[i]);
            }
        }
}

DEVICE void write_bias_gradients(const dw_attention_params &p, const bias_tile &t, int row, const float *sums) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int query = row + 8 * h;
        uint16 *line = (uint16 *)p.d_bias.data + t.batch * p.d_bias.batch + t.head * p.d_bias.head + query * p.d_bias.row;
        if (p.d_bias_wide) {
            write_row(line + t.first_key, sums + 2 * h, BIAS_ROWS, 0, p.rows_k - t.first_key, query < p.rows_q, 1.f);
            continue;
        }
        if (query >= p.rows_q) continue;
#pragma unroll
        for (int c = 0; c < BIAS_ROWS / 8; c++) {
            int key = t.first_key + 8 * c + 2 * (lane_index() & 3);
            uint32 packed = pack_elements(sums[4 * c + 2 * h], sums[4 * c + 2 * h + 1]);
            if (key < p.rows_k) line[key] = (uint16)packed;
            if (key + 1 < p.rows_k) line[key + 1] = (uint16)(packed >> 16);
        }
    }
}

DEVICE void consume_bias(const dw_attention_params &p, const bias_shared &s, const bias_tile &t) {
    int warp = __shfl_sync(0xffffffff, (int)threadIdx.x / 32, 0), consumer = warp / 4 - 1;
    int row = t.first_row + consumer * 64 + warp % 4 * 16 + (int)lane_index() / 4;
    ring r = {0, 0};
    float sums[BIAS_SUMS];
#pragma unroll
    for (int i = 0; i < BIAS_SUMS; i++) sums[i] = 0.f;
    if (t.seen)
        for (int batch = t.batch; batch < t.batch_end; batch++)
            for (int head = t.head; head < t.head_end; head++) {
                bias_row rows[2];
                float scores[BIAS_SUMS], dp[BIAS_SUMS];
                uint32 last = 0;
#pragma unroll
                for (int h = 0; h < 2; h++) rows[h] = find_bias_row(p, batch, head, row + 8 * h);
#pragma unroll
                for (int i = 0; i < 2 * BLOCKS; i++) {
                    barrier_wait(s.full + 8 * r.stage, r.phase);
                    multiply_stage(i < BLOCKS ? scores : dp, s.tiles + r.stage * 2 * BIAS_BYTES, consumer, i % BLOCKS > 0);
                    if (i > 0) {
                        wgmma_wait<1>();
                        release(last);
                    }
                    last = s.empty + 8 * r.stage;
                    advance(r, BIAS_STAGES);
                }
                keep<BIAS_SUMS>(scores);
                bias_probabilities(p, t, rows, scores);
                if (t.cut) hide_bias_pairs(p, t, row, scores);
                wgmma_wait<0>();
                keep<BIAS_SUMS>(dp);
                release(last);
                add_bias_gradients(p, t, rows, scores, dp, sums);
            }
    write_bias_gradients(p, t, row, sums);
}

extern "C" __global__ void __launch_bounds__(DW_BACKWARD_BIAS_THREADS, 1)
    sm90_attention_backward_bias(const __grid_constant__ tensor_map map_q, const __grid_constant__ tensor_map map_k,
                                 const __grid_constant__ tensor_map map_v, const __grid_constant__ tensor_map map_do,
                                 const __grid_constant__ dw_attention_params p) {
    extern __shared__ uint8 memory[];
    bias_shared s = layout_bias(shared_address(memory));
    bias_tile t = find_bias_tile(p);
    if (threadIdx.x == 0) {
        prefetch_map(&map_q);
        prefetch_map(&map_k);
        prefetch_map(&map_v);
        prefetch_map(&map_do);
        for (int i = 0; i < BIAS_STAGES; i++) {
            barrier_init(s.full + 8 * i, 1);
            barrier_init(s.empty + 8 * i, 8);
        }
        fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<24>();
        if (threadIdx.x == 0 && t.seen) produce_bias(p, s, t, &map_q, &map_k, &map_v, &map_do);
    } else {
        registers_up<240>();
        consume_bias(p, s, t);
    }
}
#endif
