// group_rows: a stable counting sort of rows by group, in two launches.
//
// The rows are divided into tiles. group_rows_count counts the rows of each group in each tile. A block of
// group_rows_place adds up the counts of the tiles before its own, and those of all tiles for the offsets of the
// groups. Each warp then has consecutive rows of the tile: it knows from counts of its own where its rows of each
// group begin, and visits them in order, 32 at a time; lanes with the same group find their order from a mask. All
// sums are of integers, so results do not depend on the order of atomic additions.
//
// A group outside of [0, groups) is reported (data_error.h), and its row is sorted to group 0.
//
// Defines: WIDE: indexes are i64, else i32.
//
// Bytes: two reads of the index, one write of the results.

#include "group_rows_params.h"

#define DEVICE static __device__ __forceinline__
#define WARPS (DW_GROUP_ROWS_THREADS / 32)
#define PER_THREAD (DW_GROUP_ROWS_MOST / DW_GROUP_ROWS_THREADS)

DEVICE int group_of(const dw_group_rows_params &p, int row, bool reports) {
    const long long at = row * p.index_step;
    const long long group = WIDE ? ((const long long *)p.index)[at] : (long long)((const int *)p.index)[at];
    if (group >= 0 && group < p.groups) return (int)group;
    if (reports) report(p.error, DW_DATA_INDEX);
    return 0;
}

extern "C" __global__ void __launch_bounds__(DW_GROUP_ROWS_THREADS)
    group_rows_count(const __grid_constant__ dw_group_rows_params p) {
    __shared__ int counts[DW_GROUP_ROWS_MOST];
    for (int tile = (int)blockIdx.x; tile < p.tiles; tile += (int)gridDim.x) {
        for (int group = (int)threadIdx.x; group < p.groups; group += DW_GROUP_ROWS_THREADS) counts[group] = 0;
        __syncthreads();
        const int end = min(p.rows - tile * p.tile, p.tile);
        for (int i = (int)threadIdx.x; i < end; i += DW_GROUP_ROWS_THREADS)
            atomicAdd(&counts[group_of(p, tile * p.tile + i, true)], 1);
        __syncthreads();
        for (int group = (int)threadIdx.x; group < p.groups; group += DW_GROUP_ROWS_THREADS)
            p.counts[tile * p.groups + group] = counts[group];
        __syncthreads(); // the counts have been read
    }
}

// Replaces totals[group] by the sum of the totals of the groups before.
DEVICE void sum_before(int *totals, int groups) {
    __shared__ int sums[WARPS];
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, first = (int)threadIdx.x * PER_THREAD;
    int own = 0, before = 0;
    for (int i = first; i < first + PER_THREAD && i < groups; i++) own += totals[i];
    int sum = own; // of this lane and those before
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, distance);
        if (lane >= distance) sum += other;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    for (int i = 0; i < warp; i++) before += sums[i];
    before += sum - own;
    for (int i = first; i < first + PER_THREAD && i < groups; i++) {
        const int total = totals[i];
        totals[i] = before;
        before += total;
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(DW_GROUP_ROWS_THREADS)
    group_rows_place(const __grid_constant__ dw_group_rows_params p) {
    __shared__ int begin[DW_GROUP_ROWS_MOST];       // where each group's rows of this tile begin
    __shared__ int next[WARPS][DW_GROUP_ROWS_MOST]; // the next place of each warp's rows of each group
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    for (int tile = (int)blockIdx.x; tile < p.tiles; tile += (int)gridDim.x) {
        for (int group = (int)threadIdx.x; group < p.groups; group += DW_GROUP_ROWS_THREADS) {
            begin[group] = 0;
            for (int w = 0; w < WARPS; w++) next[w][group] = 0;
        }
        __syncthreads();
        // begin: rows of all tiles; next[0]: of the tiles before
        for (int i = (int)threadIdx.x; i < p.tiles * p.groups; i += DW_GROUP_ROWS_THREADS) {
            const int count = p.counts[i], group = i % p.groups;
            atomicAdd(&begin[group], count);
            if (i < tile * p.groups) atomicAdd(&next[0][group], count);
        }
        __syncthreads();
        sum_before(begin, p.groups);
        for (int group = (int)threadIdx.x; group < p.groups; group += DW_GROUP_ROWS_THREADS) {
            if (tile == 0 && p.offsets) p.offsets[group] = begin[group];
            begin[group] += next[0][group];
            next[0][group] = 0;
        }
        if (tile == 0 && p.offsets && threadIdx.x == 0) p.offsets[p.groups] = p.rows;
        __syncthreads();

        const int share = p.tile / WARPS, first = tile * p.tile + warp * share,
                  end = min(max(p.rows - first, 0), share);
        for (int i = lane; i < end; i += 32) atomicAdd(&next[warp][group_of(p, first + i, false)], 1);
        __syncthreads();
        for (int group = (int)threadIdx.x; group < p.groups; group += DW_GROUP_ROWS_THREADS) {
            int at = begin[group];
            for (int w = 0; w < WARPS; w++) {
                const int count = next[w][group];
                next[w][group] = at;
                at += count;
            }
        }
        __syncthreads();
        for (int i = lane; i - lane < end; i += 32) {
            const bool has_row = i < end;
            const int group = has_row ? group_of(p, first + i, false) : -1;
            const unsigned same = __match_any_sync(0xffffffffu, group), before = same & ((1u << lane) - 1);
            const int at = has_row ? next[warp][group] + __popc(before) : 0;
            __syncwarp(); // all lanes have read the place
            if (has_row && before == 0) next[warp][group] += __popc(same);
            __syncwarp();
            if (has_row && p.order) p.order[at] = first + i;
            if (has_row && p.place) p.place[first + i] = at;
        }
        __syncthreads(); // the places have been read
    }
}
