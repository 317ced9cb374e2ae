// sort and top_k: rows in the order of their elements, equal ones in the order of their places. A NaN is above all
// numbers and equal to any other; -0 equals 0.
//
// A block sorts a tile: several short rows, or a part of a long one, whose parts sort_merge then merges in pairs. An
// element becomes an unsigned key of the same order, so that every type sorts by one code; results are the elements
// themselves, read again by their places.
//
// top_k_rows finds a few largest elements of rows that a warp holds in registers: in each turn the lanes agree on the
// next one by shuffles, and the lane that holds it looks for the next of its own.
//
// Defines: TYPE (element_types.h), SIZE: entries that are sorted together in shared memory, a power of 2 up to
// DW_SORT_TILE; rows that are longer need SIZE == DW_SORT_TILE. Of top_k_rows: entries that a warp holds, 32 or more.
//
// Bytes of a row of one tile: two reads of the operand, one write of the results; and for each merge one read and one
// write of the entries (8 or 16 bytes).

#include "sort.cuh"
#include "strided.cuh"

typedef element_of<TYPE> element;

template <int bytes> struct key_of {
    typedef unsigned type;
};
template <> struct key_of<8> {
    typedef unsigned long long type;
};
typedef key_of<sizeof(element::value)>::type key_type;
typedef entry<key_type> item;

DEVICE key_type ordered(int x) { return (unsigned)x ^ 0x80000000u; }
DEVICE key_type ordered(long long x) { return (key_type)((unsigned long long)x ^ 0x8000000000000000ull); }
// Negative numbers are complemented, others get the sign bit. NaN: above infinity.
DEVICE key_type ordered(float x) {
    const unsigned bits = x != x ? 0x7fffffffu : x == 0 ? 0u : __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DEVICE key_type ordered(double x) {
    const unsigned long long sign = 0x8000000000000000ull,
                             bits = x != x ? ~sign : x == 0 ? 0ull : (unsigned long long)__double_as_longlong(x);
    return (key_type)(bits & sign ? ~bits : bits | sign);
}

DEVICE void store_result(const dw_sort_params &p, long long row, long long rank, place from) {
    if (rank >= p.kept) return;
    const long long x = offset_of(p.rank, p.shape, p.x_stride, row) + from * p.x_step;
    if (p.values)
        ((element::stored *)p.values)[offset_of(p.rank, p.shape, p.values_stride, row) + rank * p.values_step] =
            ((const element::stored *)p.x)[x];
    if (p.places)
        ((long long *)p.places)[offset_of(p.rank, p.shape, p.places_stride, row) + rank * p.places_step] = from;
}

// A group is SIZE consecutive entries of one row; the last one of a row may be shorter.
extern "C" __global__ void __launch_bounds__(DW_SORT_THREADS) sort_tiles(const __grid_constant__ dw_sort_params p) {
    constexpr int COUNT = SIZE < 1024 ? 1024 : SIZE;
    __shared__ item tile[COUNT];
    const long long groups_of_row = (p.length + SIZE - 1) / SIZE, groups = p.count * groups_of_row;
    for (long long first = blockIdx.x * (long long)(COUNT / SIZE); first < groups;
         first += gridDim.x * (long long)(COUNT / SIZE)) {
        __syncthreads(); // the entries of the tile before have been read
        for (int i = threadIdx.x; i < COUNT; i += blockDim.x) {
            const long long group = first + i / SIZE, row = group / groups_of_row,
                            at = group % groups_of_row * SIZE + i % SIZE;
            item e = last_entry<key_type>();
            if (group < groups && at < p.length) {
                const key_type key =
                    ordered(element::load(p.x, offset_of(p.rank, p.shape, p.x_stride, row) + at * p.x_step));
                e = {p.descending ? (key_type)~key : key, (place)at};
            }
            tile[i] = e;
        }
        sort_tile<key_type, COUNT, SIZE>(tile);
        for (int i = threadIdx.x; i < COUNT; i += blockDim.x) {
            const long long group = first + i / SIZE, row = group / groups_of_row,
                            at = group % groups_of_row * SIZE + i % SIZE;
            if (group >= groups || at >= p.length) continue;
            if (p.to) ((item *)p.to)[row * p.length + at] = tile[i];
            else
                store_result(p, row, at, tile[i].at);
        }
    }
}

extern "C" __global__ void __launch_bounds__(DW_SORT_THREADS) sort_merge(const __grid_constant__ dw_sort_params p) {
    EACH_ELEMENT(e, p.count * p.length) {
        const long long row = e / p.length;
        const item *entries = (const item *)p.from + row * p.length;
        const long long at = merged_place(entries, p.length, p.run, e % p.length);
        if (p.to) ((item *)p.to)[row * p.length + at] = entries[e % p.length];
        else
            store_result(p, row, at, entries[e % p.length].at);
    }
}

// The entries of a lane are those of every 32nd place. The first one of `own`, or the last entry of all.
template <int COUNT> DEVICE item first_of(const item (&own)[COUNT]) {
    item first = own[0];
#pragma unroll
    for (int i = 1; i < COUNT; i++)
        if (is_before(own[i], first)) first = own[i];
    return first;
}

extern "C" __global__ void __launch_bounds__(DW_SORT_THREADS) top_k_rows(const __grid_constant__ dw_sort_params p) {
    constexpr int COUNT = SIZE < 32 ? 1 : SIZE / 32;
    const int lane = (int)threadIdx.x % 32, warps = DW_SORT_THREADS / 32;
    for (long long row = blockIdx.x * (long long)warps + threadIdx.x / 32; row < p.count;
         row += gridDim.x * (long long)warps) {
        const long long x = offset_of(p.rank, p.shape, p.x_stride, row);
        item own[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int at = lane + 32 * i;
            own[i] = at < p.length ? item{(key_type)~ordered(element::load(p.x, x + at * p.x_step)), (place)at}
                                   : last_entry<key_type>();
        }
        item best = first_of(own);
        place kept = 0; // the place of rank `lane`
        for (int rank = 0; rank < p.kept; rank++) {
            item next = best;
#pragma unroll
            for (int distance = 16; distance > 0; distance /= 2) {
                const item other = {__shfl_xor_sync(0xffffffffu, next.key, distance),
                                    __shfl_xor_sync(0xffffffffu, next.at, distance)};
                if (is_before(other, next)) next = other;
            }
            if (rank == lane) kept = next.at;
            if (best.at == next.at) {
#pragma unroll
                for (int i = 0; i < COUNT; i++)
                    if (own[i].at == next.at) own[i] = last_entry<key_type>();
                best = first_of(own);
            }
        }
        store_result(p, row, lane, kept);
    }
}
