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
// With a window, tiles differ in work: the last rows of a causal head see all keys, the first ones few. Blocks first
// take tiles in pairs: tile j from the end of a head and tile j from the start of the next head. All pairs have the
// same work. But the number of pairs is rarely a multiple of that of blocks, so the last pairs are divided: their
// tiles are sorted, those with most keys first, and dealt to the blocks in turns that change direction (0, 1, 2, 2,
// 1, 0, ...). The sums of what blocks get then differ by little.
DEVICE int tile_blocks(const dw_attention_params &p) { return (p.rows_q + TILE_M - 1) / TILE_M; }

// Pairs that each block takes before the sorted tiles. Few sorted tiles keep the keys that are read at one time in the
// cache; more of them balance better if a head has many tiles. Simulated for 132 blocks and 4 to 128 tiles a head: the
// busiest block has 1 to 3 % more than the mean with these numbers, and 3 to 6 % more with pairs alone.
DEVICE int rounds_of_pairs(const dw_attention_params &p) {
    int blocks = tile_blocks(p), sorted = blocks <= 8 ? 0 : blocks < 32 ? 1 : 3;
    return WINDOW ? max(0, p.batch * p.heads_q / 2 * blocks / (int)gridDim.x - sorted) : 0;
}

// The number of a block's tile in a round after `pairs` pairs.
DEVICE int index_after_pairs(int round, int pairs) {
    round -= 2 * pairs;
    int block = WINDOW && (round & 1) ? (int)gridDim.x - 1 - (int)blockIdx.x : (int)blockIdx.x;
    return round * (int)gridDim.x + block;
}

DEVICE bool is_over(const dw_attention_params &p, int round) {
    int pairs = rounds_of_pairs(p);
    return round >= 2 * pairs && index_after_pairs(round, pairs) >= p.tiles - 2 * pairs * (int)gridDim.x;
}

// The head and the number within it of the tile with this index among those that remain after `taken` pairs, by number
// from the last one down. Of the two heads whose pairs are only begun, the first has its tiles below blocks - cut left
// and the second those from cut on; all heads after them are whole.
DEVICE void find_sorted(const dw_attention_params &p, int index, int taken, int &head, int &m) {
    int blocks = tile_blocks(p), begun = taken / blocks * 2, cut = taken % blocks;
    int whole = begun + (cut ? 2 : 0), heads = p.batch * p.heads_q - whole;
    int high = max(cut, blocks - cut), low = blocks - high;
    // Each number from `high` on has a tile in the whole heads and in the second; those below `low`, in the first; those
    // between, in both of the two or in neither.
    int top = blocks, count = heads + (cut > 0), lone = begun + 1;
    int between = cut == 0 ? heads : cut == low ? heads + 2 : heads;
    if (index >= (blocks - high) * count) {
        index -= (blocks - high) * count;
        lone = begun;
        if (index < (high - low) * between) {
            top = high;
            count = between;
        } else {
            index -= (high - low) * between;
            top = low;
        }
    }
    m = top - 1 - index / count;
    head = index % count;
    head = head < heads ? whole + head : lone + head - heads;
}

DEVICE bool next_tile(const dw_attention_params &p, int round, tile &t) {
    int blocks = tile_blocks(p), pairs = rounds_of_pairs(p), head, m;
    if (round < 2 * pairs) {
        int pair = (round >> 1) * (int)gridDim.x + (int)blockIdx.x;
        head = pair / blocks;
        m = pair - head * blocks;
        head *= 2;
        if (round & 1) head++;
        else m = blocks - 1 - m;
    } else {
        int index = index_after_pairs(round, pairs);
        if (index >= p.tiles - 2 * pairs * (int)gridDim.x) return false;
#if WINDOW
        find_sorted(p, index, pairs * (int)gridDim.x, head, m);
#else
        head = index / blocks;
        m = index - head * blocks;
#endif
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
