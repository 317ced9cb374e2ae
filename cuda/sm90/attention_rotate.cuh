// Rotary position embedding of attention's queries while they are loaded (attention_forward.cu with ROTATE).
//
// The producer's warpgroup has three warps that issue no loads. When TMA has brought a tile of queries, they rotate it in
// shared memory and store the rotated rows in memory, for backward. Consumers get the tile after that. There are two
// buffers of queries, so that the next tile is rotated while consumers compute. Keys must be rotated before: every tile of
// queries reads them, so that rotating them here would repeat the work for each (bench/NOTES.md).
//
// Pairs are elements i and i + HEAD_DIM / 2. Results have the bits of the rope kernel (rope.cu).
#ifndef DW_ATTENTION_ROTATE_CUH
#define DW_ATTENTION_ROTATE_CUH

#include "attention_forward_rows.cuh"
#include "rotate.cuh"

#define ROTATORS 3 // warps
#define ROTATE_BARRIER 8 // of named barriers; consumers have the first ones

static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "a row is one block of 64 columns, or each half is one");
static_assert(QUERY_BUFFERS == 2 && TILE_M == 2 * TABLE_ROWS && TABLE_ROWS % 8 == 0, "two halves");
static_assert(!PACKED, "rows of packed sequences have no tables");

// Finds the next tile of this thread block that has keys. `round` is that of the tile behind it.
DEVICE bool find_tile(const dw_attention_params &p, int &round, tile &t) {
    while (!is_over(p, round))
        if (next_tile(p, round++, t) && t.begin < t.end) return true;
    return false;
}

// The producer's loads. A tile of queries is loaded when consumers have ended the one whose buffer it gets.
DEVICE void produce_ahead(const dw_attention_params &p, const shared_layout &s, const tensor_map *map_q,
                          const tensor_map *map_k, const tensor_map *map_v) {
    ring q = {0, 0}, k = {0, 0}, v = {0, 0};
    int round = 0, round_q = 0;
    auto load_queries = [&]() __attribute__((always_inline)) {
        tile t;
        if (!find_tile(p, round_q, t)) return;
        barrier_wait(s.q_empty + 8 * q.stage, q.phase ^ 1);
        load_tile(s.q + q.stage * Q_BYTES, TILE_M, map_q, s.q_arrived + 8 * q.stage, t.first_row, t.head, t.batch);
        advance(q, QUERY_BUFFERS);
    };
    for (int i = 1; i < QUERY_BUFFERS; i++) load_queries();
    for (tile t; find_tile(p, round, t);) {
        int head_kv = t.head / p.group;
        for (int n = t.end - 1; n >= t.begin - 1; n--) {
            if (n >= t.begin) {
                barrier_wait(s.k_empty + 8 * k.stage, k.phase ^ 1);
                load_tile(s.k + k.stage * KV_BYTES, TILE_N, map_k, s.k_full + 8 * k.stage, n * TILE_N, head_kv, t.batch);
                advance(k, STAGES);
            }
            if (n + 1 < t.end) {
                barrier_wait(s.v_empty + 8 * v.stage, v.phase ^ 1);
                load_tile(s.v + v.stage * KV_BYTES, TILE_N, map_v, s.v_full + 8 * v.stage, (n + 1) * TILE_N, head_kv,
                          t.batch);
                advance(v, STAGES);
            }
            if (n == t.end - 1) load_queries();
        }
    }
}

// Rotates 8 elements x; `other`: the other ones of their pairs, `sign`: 0x80008000 for the first ones.
DEVICE uint4 rotate_eight(const uint4 &x, const uint4 &other, const uint4 &cosines, const uint4 &sines, uint32 sign) {
    const uint32 *a = &x.x, *b = &other.x, *c = &cosines.x, *s = &sines.x;
    uint4 y;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32 across = s[i] ^ sign;
        (&y.x)[i] = pack_elements(rotated(element_low(a[i]), element_low(c[i]), element_low(b[i]), element_low(across)),
                                  rotated(element_high(a[i]), element_high(c[i]), element_high(b[i]), element_high(across)));
    }
    return y;
}

// Rotates rows from `first` to `last` of a tile, of which `rows` exist, by tables in shared memory whose first row is that of
// `first`. `copy` begins at the tile's first row. Eight lanes access different banks: those of one row, or, with 64
// columns, of rows 4 apart.
DEVICE void rotate_rows(uint32 q, uint32 cosines, uint32 sines, int first, int last, uint16 *copy, int copy_row, int rows) {
    const int LANE_ROWS = HEAD_DIM == 128 ? 4 : 8, HALF = HEAD_DIM / 2;
    int lane = (int)lane_index(), chunk = lane & (HALF / 8 - 1),
        row = ((int)threadIdx.x / 32 - 1) * LANE_ROWS + (lane >> 3) + (HEAD_DIM == 128 ? 0 : lane & 4);
#pragma unroll 1
    for (; row < last - first; row += ROTATORS * LANE_ROWS) {
        uint32 at[2], table[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            at[i] = tile_chunk(q, TILE_M, first + row, chunk + i * (HALF / 8));
            table[i] = tile_chunk(0, TABLE_ROWS, row, chunk + i * (HALF / 8));
        }
        uint4 x = shared_load16(at[0]), y = shared_load16(at[1]);
        uint4 turned = rotate_eight(x, y, shared_load16(cosines + table[0]), shared_load16(sines + table[0]), 0x80008000u);
        y = rotate_eight(y, x, shared_load16(cosines + table[1]), shared_load16(sines + table[1]), 0);
        shared_store16(at[0], turned);
        shared_store16(at[1], y);
        if (copy && first + row < rows) {
            uint16 *to = copy + (first + row) * copy_row + chunk * 8;
            *(uint4 *)to = turned;
            *(uint4 *)(to + HALF) = y;
        }
    }
}

// The work of the rotating warps. One buffer has the cosines and sines of half a tile's rows; one thread loads the next ones
// into it when all have been read.
DEVICE void rotate_queries(const dw_attention_params &p, const shared_layout &s, const tensor_map *map_cosines,
                           const tensor_map *map_sines, const dw_attention_rotation &r) {
    ring q = {0, 0};
    uint32 phase = 0, cosines = s.tables, sines = s.tables + TABLE_ROWS * BLOCKS * 128;
    auto load_tables = [&](int row, int batch) __attribute__((always_inline)) {
        if (threadIdx.x != 32) return;
        barrier_expect(s.tables_full, 2 * TABLE_ROWS * BLOCKS * 128);
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            tma_load(cosines + block * TABLE_ROWS * 128, map_cosines, s.tables_full, block * 64, row, 0, batch);
            tma_load(sines + block * TABLE_ROWS * 128, map_sines, s.tables_full, block * 64, row, 0, batch);
        }
    };
    int round = 0;
    tile t, next;
    bool more = find_tile(p, round, t);
    if (more) load_tables(t.first_row, t.batch * r.batches);
    while (more) {
        more = find_tile(p, round, next);
        uint16 *copy = (uint16 *)r.rotated.data;
        if (copy) copy += t.batch * r.rotated.batch + t.head * r.rotated.head + t.first_row * r.rotated.row;
        barrier_wait(s.q_arrived + 8 * q.stage, q.phase);
#pragma unroll 1
        for (int first = 0; first < TILE_M; first += TABLE_ROWS) {
            barrier_wait(s.tables_full, phase);
            phase ^= 1;
            rotate_rows(s.q + q.stage * Q_BYTES, cosines, sines, first, first + TABLE_ROWS, copy, (int)r.rotated.row,
                        t.rows_q - t.first_row);
            named_sync(ROTATE_BARRIER, 32 * ROTATORS);
            if (first == 0) load_tables(t.first_row + TABLE_ROWS, t.batch * r.batches);
            else if (more) load_tables(next.first_row, next.batch * r.batches);
        }
        fence_async_shared();
        __syncwarp();
        if (lane_index() == 0) barrier_arrive(s.q_full + 8 * q.stage);
        advance(q, QUERY_BUFFERS);
        t = next;
    }
}

#endif
