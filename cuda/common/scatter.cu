// scatter_add and embedding_backward: sums of the rows that select the same index; and put_along_add, whose elements each
// have an index of their own.
//
// The indexes are sorted with their places, so that the addends of one row of the result are neighbours in the order:
// scatter_tiles sorts runs in shared memory, scatter_merge makes one run of up to 32. scatter_rows divides the
// sorted entries into tiles of DW_SCATTER_TILE: `lanes` threads walk the entries of a tile, each for VECTOR elements of
// every row, and store a row of the result whose addends all lie in the tile. A row whose addends lie in several tiles is
// added up by scatter_finish from the sums of its tiles. Rows that no index selects are zeros. Few blocks sort, so the
// others write zeros meanwhile, for a few rows, whether these have addends or not; scatter_rows writes the remaining zeros
// beside the sums. A call that accumulates adds to what the result held.
//
// No atomic addition: the order of additions depends on the indexes alone, so that results have the same bits in every
// run. BF16 and F16 accumulate in F32 and round once. An index outside of its axis is reported (data_error.h) and its
// addends are left out.
//
// Defines: TYPE (element_types.h), WIDE: indexes are i64, else i32; VECTOR: elements of a thread, 16 bytes of them or 1.
//
// Bytes: one read of the addends and one write of the result, another of the few rows that are zeros first; 16 for each
// index and merge.

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

// This launch's part of the zeros.
DEVICE void fill(const dw_scatter_params &p) {
    const piece zeros = {};
    EACH_ELEMENT(e, p.zeros_to - p.zeros_from) store_at_once((piece *)p.result + (p.zeros_from + e), zeros);
}

struct alignas(16) four_keys {
    unsigned x[4];
};

// A thread counts the entries of its run that precede its own: those before it whose keys are not above its key, and those
// behind it whose keys are below. A network of exchanges would take a barrier for each of its 45 steps.
extern "C" __global__ void __launch_bounds__(DW_SCATTER_RUN) scatter_tiles(const __grid_constant__ dw_scatter_params p) {
    __shared__ four_keys keys[DW_SCATTER_RUN / 4];
    const int own = (int)threadIdx.x, warp = own / 32 * 32;
    if (p.selected) EACH_ELEMENT(e, (p.rows + 31) / 32) p.selected[e] = 0;
    for (long long first = blockIdx.x * (long long)DW_SCATTER_RUN; first < p.count;
         first += gridDim.x * (long long)DW_SCATTER_RUN) {
        const unsigned key = first + own < p.count ? key_at(p, first + own) : LAST;
        int rank = 0;
        __syncthreads(); // the keys of the run before have been read
        keys[own / 4].x[own % 4] = key;
        __syncthreads();
#pragma unroll 4
        for (int i = 0; i < warp / 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) rank += keys[i].x[j] <= key;
#pragma unroll 4
        for (int i = warp / 4 + 8; i < DW_SCATTER_RUN / 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) rank += keys[i].x[j] < key;
        for (int i = warp; i < warp + 32; i += 4) {
            const four_keys others = keys[i / 4];
#pragma unroll
            for (int j = 0; j < 4; j++) rank += others.x[j] < key || (others.x[j] == key && i + j < own);
        }
        if (first + own < p.count) ((item *)p.to)[first + rank] = {key, (place)(first + own)};
    }
    fill(p);
}

// Makes one run of each `ways`. A block finds the places of 32 neighbouring entries: each warp counts the entries before them
// in some of the runs. Neighbours search the same run together, so that they mostly read the same lines.
extern "C" __global__ void __launch_bounds__(DW_SCATTER_THREADS) scatter_merge(const __grid_constant__ dw_scatter_params p) {
    constexpr int warps = DW_SCATTER_THREADS / 32;
    __shared__ unsigned shares[warps][32];
    const item *entries = (const item *)p.from;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    for (long long group = blockIdx.x; group * 32 < p.count; group += gridDim.x) {
        const long long e = group * 32 + lane, of_own = group * 32 / p.run, first = of_own / p.ways * p.ways;
        const item own = e < p.count ? entries[e] : last_entry<unsigned>();
        long long rank = 0;
#pragma unroll 4
        for (int way = warp; way < p.ways; way += warps) {
            const long long other = (first + way) * p.run;
            if (first + way == of_own) rank += e - other;
            else if (other < p.count) rank += rank_in(entries + other, min(p.run, p.count - other), own);
        }
        __syncthreads(); // the shares of the group before have been read
        shares[warp][lane] = (unsigned)rank;
        __syncthreads();
        if (warp > 0 || e >= p.count) continue;
        for (int i = 1; i < warps; i++) rank += shares[i][lane];
        ((item *)p.to)[first * p.run + rank] = own;
        if (p.is_last_merge && p.selected && own.key != LAST) atomicOr(p.selected + own.key / 32, 1u << own.key % 32);
    }
    fill(p);
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
    for (long long group = (blockIdx.x * (long long)DW_SCATTER_THREADS + threadIdx.x) / p.lanes;; group += step) {
        const work w = work_of(p, group);
        if (w.tile * DW_SCATTER_TILE >= p.count) break;
        if (w.inner < p.inners) visit(w);
    }
}

// True if entry `at` exists and has this key.
DEVICE bool has_key(const dw_scatter_params &p, long long at, unsigned key) {
    return at >= 0 && at < p.count && ((const item *)p.from)[at].key == key;
}

template <bool ACCUMULATES> DEVICE void add_tile(const dw_scatter_params &p, const work &w) {
    constexpr int BATCH = DW_SCATTER_BATCH;
    const item *entries = (const item *)p.from;
    const long long first = w.tile * DW_SCATTER_TILE, from = w.outer * p.count * p.inners + w.inner;
    const int count = (int)min((long long)DW_SCATTER_TILE, p.count - first);
    bool began_before = has_key(p, first - 1, entries[first].key);
    row_sum sum = {};
    item next_items[BATCH]; // loaded a batch ahead, since addends are found by them; after the tile those of the next
    const auto load_items = [&](int batch) {
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            next_items[i] = first + batch + i < p.count ? entries[first + batch + i] : last_entry<unsigned>();
    };
    load_items(0);
    for (int batch = 0; batch < count; batch += BATCH) {
        item item_at[BATCH];
        piece own[BATCH] = {}, held[ACCUMULATES ? BATCH : 1] = {};
#pragma unroll
        for (int i = 0; i < BATCH; i++) item_at[i] = next_items[i];
        load_items(batch + BATCH);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (item_at[i].key == LAST) continue;
            own[i] = load_at_once((const piece *)((const element::stored *)p.x + (from + item_at[i].at * p.inners)));
            if constexpr (ACCUMULATES) held[i] = *result_of(p, w.outer, item_at[i].key, w.inner);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const unsigned row = item_at[i].key, after = i + 1 < BATCH ? item_at[(i + 1) % BATCH].key : next_items[0].key;
            if (row == LAST) break; // no row follows
            add_piece(sum, own[i]);
            if (after == row) {
                if (batch + i + 1 < count) continue;
                *share_of(p, w.tile, w.outer, !began_before, w.inner) = sum;
            } else if (began_before) {
                *share_of(p, w.tile, w.outer, 0, w.inner) = sum;
            } else {
                if constexpr (ACCUMULATES) add_piece(sum, held[i]);
                store_sum(result_of(p, w.outer, row, w.inner), sum);
            }
            began_before = false;
            sum = {};
        }
    }
}

// Fills the rows without addends. A warp has 32 rows, whose bits it reads at once. The last warps, which have the fewest
// tiles, begin with the first rows.
DEVICE void fill_rows(const dw_scatter_params &p) {
    const long long pieces = p.inners / VECTOR, warps = (long long)gridDim.x * (DW_SCATTER_THREADS / 32),
                    warp = (blockIdx.x * (long long)DW_SCATTER_THREADS + threadIdx.x) / 32;
    const int lane = (int)threadIdx.x % 32;
    const piece zeros = {};
    for (long long word = p.zero_row / 32 + warps - 1 - warp; word * 32 < p.rows; word += warps) {
        unsigned absent = ~p.selected[word];
        if (p.rows - word * 32 < 32) absent &= (1u << (p.rows - word * 32)) - 1;
        for (; absent; absent &= absent - 1) {
            piece *to = (piece *)p.result + (word * 32 + __ffs((int)absent) - 1) * pieces;
            for (long long i = lane; i < pieces; i += 32) store_at_once(to + i, zeros);
        }
    }
}

extern "C" __global__ void __launch_bounds__(DW_SCATTER_THREADS, DW_SCATTER_RESIDENT)
    scatter_rows(const __grid_constant__ dw_scatter_params p) {
    if (p.accumulates) each_work(p, [&](const work &w) { add_tile<true>(p, w); });
    else
        each_work(p, [&](const work &w) { add_tile<false>(p, w); });
    if (p.selected) fill_rows(p);
}

// Adds up the row that begins in this tile and ends in another, if there is one.
DEVICE void add_shares(const dw_scatter_params &p, const work &w) {
    const item *entries = (const item *)p.from;
    const long long first = w.tile * DW_SCATTER_TILE, next = first + DW_SCATTER_TILE;
    if (next >= p.count) return;
    const unsigned row = entries[next - 1].key;
    if (row == LAST || !has_key(p, next, row) || has_key(p, first - 1, row)) return;
    row_sum sum = *share_of(p, w.tile, w.outer, 1, w.inner);
#pragma unroll 8
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
