// scatter_add and embedding_backward: sums of the rows that select the same index; and put_along_add, whose elements each
// have an index of their own.
//
// The indexes are sorted with their places (sort.cuh), so that the addends of one row of the result are neighbours in
// the order. scatter_rows divides the sorted entries into tiles of DW_SCATTER_TILE: `lanes` threads walk the entries of a
// tile, each for VECTOR elements of every row, and store a row of the result whose addends all lie in the tile. A row
// whose addends lie in several tiles is added up by scatter_finish from the sums of its tiles. scatter_tiles has filled
// the result with zeros, which rows that no index selects keep; a call that accumulates adds to what the result held.
// No atomic addition: the order of additions depends on the indexes alone, so that results have the same bits in every
// run. BF16 and F16 accumulate in F32 and round once. An index outside of its axis is reported (data_error.h) and its
// addends are left out.
//
// Defines: TYPE (element_types.h), WIDE: indexes are i64, else i32; VECTOR: elements of a thread, 16 bytes of them or 1.
//
// Bytes: one read of the addends, one write of the result and another of the rows that have addends; 8 for each index
// and merge.

#include "scatter_params.h"
#include "sort.cuh"
#include "strided.cuh"

typedef element_of<TYPE> element;
typedef element::value value;
typedef entry<unsigned> item;

#define LAST 0xffffffffu // the key of indexes that are left out

DEVICE unsigned key_at(const dw_scatter_params &p, long long at) {
    const long long index = WIDE ? ((const long long *)p.index)[at] : (long long)((const int *)p.index)[at];
    const bool valid = index >= 0 && index < (p.along ? p.along : p.rows);
    if (!valid) report(p.error, DW_DATA_INDEX);
    if (valid && p.along) { // the place of the result, whose line is that of the element
        const long long line = at / (p.along_count * p.along_inners), inner = at % p.along_inners;
        return (unsigned)((line * p.along + index) * p.along_inners + inner);
    }
    return valid && index != p.padding ? (unsigned)index : LAST;
}

struct alignas(VECTOR * sizeof(element::stored)) piece {
    element::stored x[VECTOR];
};

extern "C" __global__ void __launch_bounds__(DW_SCATTER_THREADS) scatter_tiles(const __grid_constant__ dw_scatter_params p) {
    __shared__ item tile[DW_SORT_TILE];
    const piece zeros = {};
    const long long pieces = p.accumulates ? 0 : p.outers * p.rows * p.inners / VECTOR;
    for (long long first = blockIdx.x * (long long)DW_SORT_TILE; first < p.count;
         first += gridDim.x * (long long)DW_SORT_TILE) {
        __syncthreads(); // the entries of the tile before have been read
        for (int i = threadIdx.x; i < DW_SORT_TILE; i += blockDim.x)
            tile[i] = first + i < p.count ? item{key_at(p, first + i), (place)(first + i)} : last_entry<unsigned>();
        sort_tile<unsigned, DW_SORT_TILE, DW_SORT_TILE>(tile);
        for (int i = threadIdx.x; i < DW_SORT_TILE && first + i < p.count; i += blockDim.x)
            ((item *)p.to)[first + i] = tile[i];
    }
    // The zeros come after the sorting: few blocks sort, and take as long as the others do for zeros.
    EACH_ELEMENT(e, pieces) ((piece *)p.result)[e] = zeros;
}

extern "C" __global__ void __launch_bounds__(DW_SCATTER_THREADS) scatter_merge(const __grid_constant__ dw_scatter_params p) {
    const item *entries = (const item *)p.from;
    EACH_ELEMENT(e, p.count)
        ((item *)p.to)[merged_place(entries, p.count, p.run, e)] = entries[e];
}

struct alignas(VECTOR > 1 ? 16 : sizeof(value)) row_sum {
    value x[VECTOR];
};

DEVICE void add_piece(row_sum &sum, const piece &own) {
#pragma unroll
    for (int i = 0; i < VECTOR; i++) sum.x[i] = (value)(sum.x[i] + element::load(own.x, i));
}

DEVICE piece *result_of(const dw_scatter_params &p, long long outer, unsigned row, long long inner) {
    return (piece *)((element::stored *)p.result + ((outer * p.rows + row) * p.inners + inner));
}

DEVICE void store_sum(piece *to, const row_sum &sum) {
    piece made;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) element::store(made.x, i, sum.x[i]);
    store_at_once(to, made);
}

// The sum of a tile's share of a row: the row that began in an earlier tile, or the one that a later tile continues.
DEVICE row_sum *share_of(const dw_scatter_params &p, long long tile, long long outer, int later, long long inner) {
    return (row_sum *)((value *)p.shares + ((tile * p.outers + outer) * 2 + later) * p.inners + inner);
}

// The work of `lanes` threads is a tile at one of the outer indexes. `inner` is the first of this thread's elements.
struct work {
    long long tile, outer, inner;
};

DEVICE work work_of(const dw_scatter_params &p, long long group) {
    const long long width = (long long)p.lanes * VECTOR, columns = (p.inners + width - 1) / width;
    work w;
    w.inner = group % columns * width + (long long)((int)threadIdx.x % p.lanes) * VECTOR;
    w.outer = group / columns % p.outers;
    w.tile = group / columns / p.outers;
    return w;
}

// Each thread's work, over all groups of the grid.
template <typename VISIT> DEVICE void each_work(const dw_scatter_params &p, VISIT visit) {
    const long long step = (long long)gridDim.x * (DW_SCATTER_THREADS / p.lanes);
    for (long long group = ((long long)blockIdx.x * DW_SCATTER_THREADS + threadIdx.x) / p.lanes;; group += step) {
        const work w = work_of(p, group);
        if (w.tile * DW_SCATTER_TILE >= p.count) break;
        if (w.inner < p.inners) visit(w);
    }
}

// True if entry `at` exists and has this key.
DEVICE bool has_key(const dw_scatter_params &p, long long at, unsigned key) {
    return at >= 0 && at < p.count && ((const item *)p.from)[at].key == key;
}

DEVICE void add_tile(const dw_scatter_params &p, const work &w) {
    const item *entries = (const item *)p.from;
    const long long first = w.tile * DW_SCATTER_TILE, from = w.outer * p.count * p.inners + w.inner;
    const int count = (int)min((long long)DW_SCATTER_TILE, p.count - first);
    bool began_before = has_key(p, first - 1, entries[first].key);
    row_sum sum = {};
    item next_items[DW_SCATTER_BATCH]; // loaded a batch ahead, since addends are found by them
    const auto load_items = [&](int batch) {
#pragma unroll
        for (int i = 0; i < DW_SCATTER_BATCH; i++)
            next_items[i] = batch + i < count ? entries[first + batch + i] : last_entry<unsigned>();
    };
    load_items(0);
    for (int batch = 0; batch < count; batch += DW_SCATTER_BATCH) {
        item item_at[DW_SCATTER_BATCH];
        piece own[DW_SCATTER_BATCH] = {}, held[DW_SCATTER_BATCH] = {};
#pragma unroll
        for (int i = 0; i < DW_SCATTER_BATCH; i++) item_at[i] = next_items[i];
        load_items(batch + DW_SCATTER_BATCH);
#pragma unroll
        for (int i = 0; i < DW_SCATTER_BATCH; i++) {
            if (item_at[i].key == LAST) continue;
            own[i] = *(const piece *)((const element::stored *)p.x + (from + item_at[i].at * p.inners));
            if (p.accumulates) held[i] = *result_of(p, w.outer, item_at[i].key, w.inner);
        }
#pragma unroll
        for (int i = 0; i < DW_SCATTER_BATCH; i++) {
            const unsigned row = item_at[i].key;
            if (row == LAST) break; // no row follows
            add_piece(sum, own[i]);
            const long long next = first + batch + i + 1;
            if (has_key(p, next, row)) {
                if (batch + i + 1 < count) continue;
                *share_of(p, w.tile, w.outer, !began_before, w.inner) = sum;
            } else if (began_before) {
                *share_of(p, w.tile, w.outer, 0, w.inner) = sum;
            } else {
                add_piece(sum, held[i]);
                store_sum(result_of(p, w.outer, row, w.inner), sum);
            }
            began_before = false;
            sum = {};
        }
    }
}

extern "C" __global__ void __launch_bounds__(DW_SCATTER_THREADS) scatter_rows(const __grid_constant__ dw_scatter_params p) {
    each_work(p, [&](const work &w) { add_tile(p, w); });
}

// Adds up the row that begins in this tile and ends in another, if there is one.
DEVICE void add_shares(const dw_scatter_params &p, const work &w) {
    const item *entries = (const item *)p.from;
    const long long first = w.tile * DW_SCATTER_TILE, next = first + DW_SCATTER_TILE;
    if (next >= p.count) return;
    const unsigned row = entries[next - 1].key;
    if (row == LAST || !has_key(p, next, row) || has_key(p, first - 1, row)) return;
    row_sum sum = *share_of(p, w.tile, w.outer, 1, w.inner);
#pragma unroll 4
    for (long long tile = w.tile + 1; has_key(p, tile * DW_SCATTER_TILE, row); tile++) {
        const row_sum more = *share_of(p, tile, w.outer, 0, w.inner);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) sum.x[i] = (value)(sum.x[i] + more.x[i]);
    }
    piece *to = result_of(p, w.outer, row, w.inner);
    if (p.accumulates) add_piece(sum, *to);
    store_sum(to, sum);
}

extern "C" __global__ void __launch_bounds__(DW_SCATTER_THREADS) scatter_finish(const __grid_constant__ dw_scatter_params p) {
    each_work(p, [&](const work &w) { add_shares(p, w); });
}
