// Stable sorting of rows of keys, each with its place in the row: tiles in shared memory, then merges of sorted runs.
//
// Places break ties, so that keys and places together have one order, whatever algorithm finds it. A tile is sorted by
// a bitonic network (Batcher 1968). In a merge every entry finds its own rank in the other run by bisection, so that all
// entries move at once; the order of the result depends on nothing else.
#ifndef DW_SORT_CUH
#define DW_SORT_CUH

#include "sort_params.h"
#include "tensor_types.cuh"

typedef unsigned place; // rows have fewer than 2^32 entries

template <class Key> struct entry {
    Key key;
    place at;
};
template <class Key> DEVICE bool is_before(const entry<Key> &a, const entry<Key> &b) {
    return a.key < b.key || (a.key == b.key && a.at < b.at);
}
// An entry that follows all others.
template <class Key> DEVICE entry<Key> last_entry() { return {(Key)~(Key)0, 0xffffffffu}; }

// Sorts each `group` entries of a tile of `count`; all threads of the block take part. Both are powers of 2.
template <class Key, int count, int group> DEVICE void sort_tile(entry<Key> *tile) {
    for (int span = 2; span <= group; span *= 2)
        for (int distance = span / 2; distance > 0; distance /= 2) {
            __syncthreads();
            for (int pair = threadIdx.x; pair < count / 2; pair += blockDim.x) {
                const int low = pair / distance * 2 * distance + pair % distance, high = low + distance;
                const bool ascends = span == group || !(low & span);
                const entry<Key> a = tile[low], b = tile[high];
                if (is_before(b, a) == ascends) tile[low] = b, tile[high] = a;
            }
        }
    __syncthreads();
}

// Returns how many of `count` sorted entries precede `e`.
template <class Key> DEVICE long long rank_in(const entry<Key> *run, long long count, const entry<Key> &e) {
    long long low = 0, high = count;
    while (low < high) {
        const long long middle = (low + high) / 2;
        if (is_before(run[middle], e)) low = middle + 1;
        else high = middle;
    }
    return low;
}

// The place of entry `i` of a row of `length` entries, in sorted runs of `run` entries each, after runs have been merged
// in pairs.
template <class Key> DEVICE long long merged_place(const entry<Key> *row, long long length, long long run, long long i) {
    const long long own = i / run, pair = own / 2 * 2 * run, other = (own ^ 1) * run;
    const long long count = other >= length ? 0 : length - other < run ? length - other : run;
    return pair + i % run + rank_in(row + other, count, row[i]);
}

#endif
