// Assigns tiles of attention forward to thread blocks and computes the keys that a tile sees. Defines: TILE_M,
// TILE_N, WINDOW, PACKED.
#ifndef DW_ATTENTION_SCHEDULE_CUH
#define DW_ATTENTION_SCHEDULE_CUH

#include "attention_params.h"
#include "sm90.cuh"

typedef struct tile {
    int batch, head, first_row;  // first row in the sequence
    int rows_q, rows_k;          // rows of the sequence
    int start_q, start_k;        // packed: first row of the sequence
    int diagonal;                // row i sees keys around i + diagonal
    int begin, end;              // blocks of TILE_N keys that at least one row of the tile sees
} tile;

// Blocks of TILE_N keys: begin <= n < end.
typedef struct key_blocks {
    int begin, end;
} key_blocks;

// Returns the blocks of which at least one row from first_row to last_row sees a key.
DEVICE key_blocks visible_blocks(const dw_attention_params &p, const tile &t, int first_row, int last_row) {
    int last_key = t.rows_k - 1, first_key = 0;
#if WINDOW
    last_key = min(last_key, last_row + t.diagonal + p.window_right);
    first_key = max(first_key, first_row + t.diagonal - p.window_left);
#endif
    int begin = first_key / TILE_N;
    return {begin, last_key < first_key ? begin : last_key / TILE_N + 1};
}

// The work of this thread block. `round` counts up; next_tile computes the tile of a round (false: there is none)
// until is_over. Tiles of one head are adjacent, so that its keys are read from the cache.
//
// With a window, tiles differ in work: the last rows of a causal head see all keys, the first ones few. If there is
// more than one tile per thread block, a block takes tiles in pairs: tile j from the end of a head and tile j from
// the start of the next head. All pairs have the same work, so all blocks have equal shares. An odd last head is
// paired with itself.
DEVICE int tile_blocks(const dw_attention_params &p) { return (p.rows_q + TILE_M - 1) / TILE_M; }

DEVICE bool is_paired(const dw_attention_params &p) { return WINDOW && p.tiles > (int)gridDim.x; }

DEVICE bool is_over(const dw_attention_params &p, int round) {
    if (!is_paired(p)) return round * (int)gridDim.x + (int)blockIdx.x >= p.tiles;
    int blocks = tile_blocks(p), heads = p.batch * p.heads_q;
    int pairs = heads / 2 * blocks + (heads & 1) * ((blocks + 1) / 2);
    return (round >> 1) * (int)gridDim.x + (int)blockIdx.x >= pairs;
}

DEVICE bool next_tile(const dw_attention_params &p, int round, tile &t) {
    int blocks = tile_blocks(p), head, m;
    if (is_paired(p)) {
        int pair = (round >> 1) * (int)gridDim.x + (int)blockIdx.x;
        bool second = round & 1;
        head = pair / blocks;
        m = pair - head * blocks;
        head *= 2;
        bool alone = head == p.batch * p.heads_q - 1;
        // The middle tile of an odd head forms a pair alone.
        if (second && alone && 2 * m == blocks - 1) return false;
        if (!second) m = blocks - 1 - m;
        else if (!alone) head++;
    } else {
        int index = round * (int)gridDim.x + (int)blockIdx.x;
        head = index / blocks;
        m = index - head * blocks;
    }
    t.batch = head / p.heads_q;
    t.head = head - t.batch * p.heads_q;
    t.first_row = m * TILE_M;
    t.rows_q = p.rows_q;
    t.rows_k = p.rows_k;
    t.start_q = t.start_k = 0;
#if PACKED
    t.start_q = p.offsets_q[t.batch];
    t.start_k = p.offsets_k[t.batch];
    t.rows_q = p.offsets_q[t.batch + 1] - t.start_q;
    t.rows_k = p.offsets_k[t.batch + 1] - t.start_k;
    if (t.first_row >= t.rows_q) return false;
#endif
    t.diagonal = p.bottom_right ? t.rows_k - t.rows_q : 0;
    key_blocks seen = visible_blocks(p, t, t.first_row, min(t.first_row + TILE_M, t.rows_q) - 1);
    t.begin = seen.begin;
    t.end = seen.end;
    return true;
}

#endif
