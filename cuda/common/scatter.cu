// scatter_add and embedding_backward: sums of the rows that select the same index.
//
// The indexes are sorted with their places (sort.cuh), so that the addends of one row of the result are neighbours in
// the order; a thread block adds those of one row and stores it once. scatter_tiles has filled the result with zeros,
// which rows that no index selects keep; a call that accumulates adds to what the result held. No atomic addition: the order of additions depends on the indexes alone, so
// that results have the same bits in every run. BF16 and F16 accumulate in F32 and round once. An index outside of its
// axis is reported (data_error.h) and its addends are left out.
//
// `lanes` threads of a block lie side by side along a row, each with VECTOR elements; the others take every so many-th
// addend, and their sums are added in order at the end.
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
    const bool valid = index >= 0 && index < p.rows;
    if (!valid) report(p.error, DW_DATA_INDEX);
    return valid && index != p.padding ? (unsigned)index : LAST;
}

struct alignas(VECTOR * sizeof(element::stored)) piece {
    element::stored x[VECTOR];
};

extern "C" __global__ void __launch_bounds__(DW_SCATTER_THREADS) scatter_tiles(const __grid_constant__ dw_scatter_params p) {
    __shared__ item tile[DW_SORT_TILE];
    const piece zeros = {};
    const long long pieces = p.accumulates ? 0 : p.outers * p.rows * p.inners / VECTOR;
    EACH_ELEMENT(e, pieces) ((piece *)p.result)[e] = zeros;
    for (long long first = blockIdx.x * (long long)DW_SORT_TILE; first < p.count;
         first += gridDim.x * (long long)DW_SORT_TILE) {
        __syncthreads(); // the entries of the tile before have been read
        for (int i = threadIdx.x; i < DW_SORT_TILE; i += blockDim.x)
            tile[i] = first + i < p.count ? item{key_at(p, first + i), (place)(first + i)} : last_entry<unsigned>();
        sort_tile<unsigned, DW_SORT_TILE, DW_SORT_TILE>(tile);
        for (int i = threadIdx.x; i < DW_SORT_TILE && first + i < p.count; i += blockDim.x)
            ((item *)p.to)[first + i] = tile[i];
    }
}

extern "C" __global__ void __launch_bounds__(DW_SCATTER_THREADS) scatter_merge(const __grid_constant__ dw_scatter_params p) {
    const item *entries = (const item *)p.from;
    EACH_ELEMENT(e, p.count)
        ((item *)p.to)[merged_place(entries, p.count, p.run, e)] = entries[e];
}

DEVICE void add_piece(const void *x, long long at, value *sum) {
    const piece own = *(const piece *)((const element::stored *)x + at);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) sum[i] = (value)(sum[i] + element::load(own.x, i));
}

// Returns the end of the entries that have the same key as entry `start`.
DEVICE long long end_of(const item *entries, long long count, long long start) {
    return start + rank_in(entries + start, count - start, {entries[start].key, LAST});
}

extern "C" __global__ void __launch_bounds__(DW_SCATTER_THREADS) scatter_rows(const __grid_constant__ dw_scatter_params p) {
    __shared__ value sums[DW_SCATTER_THREADS * VECTOR];
    const item *entries = (const item *)p.from;
    const int lane = (int)threadIdx.x % p.lanes, way = (int)threadIdx.x / p.lanes, ways = DW_SCATTER_THREADS / p.lanes;
    const long long width = (long long)p.lanes * VECTOR, columns = (p.inners + width - 1) / width;
    for (long long work = blockIdx.x; work < p.count * p.outers * columns; work += gridDim.x) {
        const long long start = work / columns % p.count, outer = work / columns / p.count,
                        inner = work % columns * width + (long long)lane * VECTOR;
        const unsigned row = entries[start].key;
        if (row == LAST || (start > 0 && entries[start - 1].key == row)) continue; // the same for the whole block
        const long long end = end_of(entries, p.count, start), from = outer * p.count * p.inners + inner;
        value sum[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; i++) sum[i] = (value)0;
        if (inner < p.inners) {
#pragma unroll 4
            for (long long i = start + way; i < end; i += ways) add_piece(p.x, from + entries[i].at * p.inners, sum);
        }
        const int used = (int)min((long long)ways, end - start);
        if (used > 1) { // the same for the whole block
            __syncthreads(); // the sums of the row before have been read
#pragma unroll
            for (int i = 0; i < VECTOR; i++) sums[threadIdx.x * VECTOR + i] = sum[i];
            __syncthreads();
            for (int other = 1; way == 0 && other < used; other++)
#pragma unroll
                for (int i = 0; i < VECTOR; i++)
                    sum[i] = (value)(sum[i] + sums[(other * p.lanes + lane) * VECTOR + i]);
        }
        if (way > 0 || inner >= p.inners) continue;
        const long long to = (outer * p.rows + row) * p.inners + inner;
        piece made;
        if (p.accumulates) add_piece(p.result, to, sum);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) element::store(made.x, i, sum[i]);
        *(piece *)((element::stored *)p.result + to) = made;
    }
}
