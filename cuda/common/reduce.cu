// Sums, extremes, products and places of extremes over axes of a strided tensor.
//
// LANES threads share a result. Each takes every LANES-th unit of the reduced axes, which is an element or a vector of
// 16 bytes, and has BATCH loads in flight. With COLUMNS, neighbouring threads and the elements of a vector belong to
// neighbouring results, and the lanes of a result combine their values through shared memory. Otherwise the lanes of a
// result are neighbours, which combine their values by shuffles and the warps of a block through shared memory.
//
// With SPLIT, each block combines a part of the units and writes what it has to the workspace; reduce_parts combines
// the parts. BF16 and F16 accumulate in F32 and round once. The order of additions depends on sizes, strides and the
// operand's alignment alone, so that results have the same bits in every run and on every GPU.
//
// Defines: TYPE, REDUCTION (element_types.h, reduce_params.h), LANES (a power of 2, at most DW_REDUCE_THREADS),
// COLUMNS, VECTOR: units are vectors, SPREAD: the reduced axes do not merge into one, SPLIT.
//
// Bytes: one read of the operand, one write of the result.

#include "reduce_params.h"
#include "strided.cuh"

typedef element_of<TYPE> element;
typedef element::stored stored;
typedef element::value value;

#define PER_UNIT ((int)(VECTOR ? DW_REDUCE_VECTOR(sizeof(stored)) : 1))
#define BATCH DW_REDUCE_BATCH(COLUMNS, VECTOR)
#define GROUPS (DW_REDUCE_THREADS / LANES) // of LANES threads in a block

struct alignas(PER_UNIT * sizeof(stored)) unit {
    stored x[PER_UNIT];
};

#define FINDS_PLACE (REDUCTION == DW_REDUCE_ARG_MAX || REDUCTION == DW_REDUCE_ARG_MIN)

DEVICE value least() {
    if constexpr (TYPE == DW_ELEMENT_BOOL) return false;
    if constexpr (TYPE == DW_ELEMENT_I32) return (value)0x80000000;
    if constexpr (TYPE == DW_ELEMENT_I64) return (value)0x8000000000000000;
    return (value)__int_as_float((int)0xff800000);
}
DEVICE value largest() {
    if constexpr (TYPE == DW_ELEMENT_BOOL) return true;
    if constexpr (TYPE == DW_ELEMENT_I32) return (value)0x7fffffff;
    if constexpr (TYPE == DW_ELEMENT_I64) return (value)0x7fffffffffffffff;
    return (value)__int_as_float(0x7f800000);
}

// ---- what a thread keeps ---------------------------------------------------------------------------------------

#if FINDS_PLACE
// An element and its index; -1: none yet. It has no padding, so that copies of it are wholly defined.
template <int bytes> struct alignas(16) place {
    value x;
    char filler[8 - bytes];
    long long index;
};
template <> struct alignas(16) place<8> {
    value x;
    long long index;
};
typedef place<sizeof(value)> kept;
DEVICE kept kept_of(value x, long long index) {
    kept k = {};
    k.x = x;
    k.index = index;
    return k;
}
DEVICE kept neutral() { return kept_of((value)0, -1); }
DEVICE kept element_at(const void *x, long long offset, long long index) {
    return kept_of(element::load(x, offset), index);
}
// A NaN is beyond all numbers; the first of equal elements stays.
DEVICE bool precedes(const kept &a, const kept &b) {
    const bool a_nan = a.x != a.x, b_nan = b.x != b.x;
    if (a.index < 0 || b.index < 0) return b.index < 0;
    if (a_nan != b_nan) return a_nan;
    if (!a_nan && a.x != b.x) return REDUCTION == DW_REDUCE_ARG_MAX ? a.x > b.x : a.x < b.x;
    return a.index < b.index;
}
DEVICE kept combine(const kept &a, const kept &b) { return precedes(a, b) ? a : b; }
DEVICE void store(void *result, long long at, const kept &a) { i64_element::store(result, at, a.index); }
#else
typedef value kept;
DEVICE kept neutral() {
    if constexpr (REDUCTION == DW_REDUCE_MAX) return least();
    if constexpr (REDUCTION == DW_REDUCE_MIN) return largest();
    return (value)(REDUCTION == DW_REDUCE_PROD);
}
DEVICE kept element_at(const void *x, long long offset, long long) { return element::load(x, offset); }
// A NaN stays.
DEVICE kept combine(kept a, kept b) {
    if constexpr (REDUCTION == DW_REDUCE_SUM) return (value)(a + b);
    if constexpr (REDUCTION == DW_REDUCE_PROD) return (value)(a * b);
    if constexpr (REDUCTION == DW_REDUCE_MAX) return a != a || a > b ? a : b;
    return a != a || a < b ? a : b;
}
DEVICE void store(void *result, long long at, kept a) { element::store(result, at, a); }
#endif

// ---- the units of one result -----------------------------------------------------------------------------------

// The offset of a unit from the first; divisions have 32 bits where the indexes have.
DEVICE long long offset_of_unit(const dw_reduce_params &p, long long i) {
    if constexpr (!SPREAD) return i * p.reduced_stride[0];
    if (p.reduced >> 32) return offset_of(p.reduced_rank, p.reduced_shape, p.reduced_stride, i);
    unsigned rest = (unsigned)i;
    long long offset = 0;
    for (int axis = p.reduced_rank - 1; axis > 0; axis--) {
        const unsigned size = (unsigned)p.reduced_shape[axis];
        offset += (long long)(rest % size) * p.reduced_stride[axis];
        rest /= size;
    }
    return offset + (long long)rest * p.reduced_stride[0];
}

DEVICE void combine_unit(kept *sums, const unit &u, long long i) {
#pragma unroll
    for (int j = 0; j < PER_UNIT; j++) sums[j] = combine(sums[j], element_at(u.x, j, COLUMNS ? i : i * PER_UNIT + j));
}

// Combines every LANES-th unit from `first` to `last` - 1.
DEVICE void combine_units(const dw_reduce_params &p, const stored *x, long long first, long long last, kept *sums) {
    long long i = first;
    for (; i + (BATCH - 1) * LANES < last; i += BATCH * LANES) {
        const stored *at[BATCH];
        unit u[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++) at[b] = x + offset_of_unit(p, i + b * LANES);
#pragma unroll
        for (int b = 0; b < BATCH; b++) u[b] = *(const unit *)at[b];
#pragma unroll
        for (int b = 0; b < BATCH; b++) combine_unit(sums, u[b], i + b * LANES);
    }
    unit u[BATCH - 1];
#pragma unroll
    for (int b = 0; b < BATCH - 1; b++)
        if (i + b * LANES < last) u[b] = *(const unit *)(x + offset_of_unit(p, i + b * LANES));
#pragma unroll
    for (int b = 0; b < BATCH - 1; b++)
        if (i + b * LANES < last) combine_unit(sums, u[b], i + b * LANES);
}

DEVICE void put(const dw_reduce_params &p, long long part, long long result, const kept &sum) {
    if constexpr (SPLIT)
        ((kept *)p.partials)[part * p.count + result] = sum;
    else
        store(p.result, offset_of(p.rank, p.shape, p.result_stride, result), sum);
}

#if COLUMNS
// ---- neighbouring results ----------------------------------------------------------------------------------------

#define TILE (GROUPS * PER_UNIT) // results of a block

DEVICE void reduce_tile(const dw_reduce_params &p, long long tile, long long part, long long last) {
    __shared__ kept shares[LANES > 1 ? LANES / 2 : 1][TILE]; // an element of every thread, then the next
    const int column = (int)threadIdx.x % GROUPS, lane = (int)threadIdx.x / GROUPS;
    const long long result = (tile * GROUPS + column) * PER_UNIT;
    kept sums[PER_UNIT];
#pragma unroll
    for (int j = 0; j < PER_UNIT; j++) sums[j] = neutral();
    if (result < p.count)
        combine_units(p, (const stored *)p.x + offset_of(p.rank, p.shape, p.x_stride, result), part * p.part_units + lane,
                      last, sums);
    __syncthreads(); // the values of the tile before have been read
    for (int half = LANES / 2; half > 0; half /= 2) {
        if (lane >= half && lane < 2 * half)
#pragma unroll
            for (int j = 0; j < PER_UNIT; j++) shares[lane - half][j * GROUPS + column] = sums[j];
        __syncthreads();
        if (lane < half)
#pragma unroll
            for (int j = 0; j < PER_UNIT; j++) sums[j] = combine(sums[j], shares[lane][j * GROUPS + column]);
        __syncthreads();
    }
    if (lane == 0)
#pragma unroll
        for (int j = 0; j < PER_UNIT; j++) shares[0][j * GROUPS + column] = sums[j];
    __syncthreads();
    for (int i = (int)threadIdx.x; i < TILE && tile * TILE + i < p.count; i += DW_REDUCE_THREADS)
        put(p, part, tile * TILE + i, shares[0][i % PER_UNIT * GROUPS + i / PER_UNIT]);
}
#else
// ---- rows --------------------------------------------------------------------------------------------------------

#define TILE GROUPS

DEVICE value exchange(value x, int distance) {
    if constexpr (TYPE == DW_ELEMENT_BOOL)
        return __shfl_xor_sync(0xffffffffu, (int)x, distance) != 0;
    else
        return __shfl_xor_sync(0xffffffffu, x, distance);
}
#if FINDS_PLACE
DEVICE kept exchange(const kept &a, int distance) {
    return kept_of(exchange(a.x, distance), __shfl_xor_sync(0xffffffffu, a.index, distance));
}
#endif

// The combination of all lanes' values, in every lane.
DEVICE kept across_lanes(kept x) {
#pragma unroll
    for (int distance = LANES < 32 ? LANES / 2 : 16; distance > 0; distance /= 2) x = combine(x, exchange(x, distance));
    if constexpr (LANES > 32) {
        __shared__ kept warps[GROUPS][(LANES + 31) / 32];
        const int group = (int)threadIdx.x / LANES;
        __syncthreads(); // the values of the tile before have been read
        if (threadIdx.x % 32 == 0) warps[group][threadIdx.x % LANES / 32] = x;
        __syncthreads();
        x = warps[group][0];
        for (int warp = 1; warp < LANES / 32; warp++) x = combine(x, warps[group][warp]);
    }
    return x;
}

DEVICE void reduce_tile(const dw_reduce_params &p, long long tile, long long part, long long last) {
    const int lane = (int)threadIdx.x % LANES;
    const long long result = tile * GROUPS + threadIdx.x / LANES;
    kept sums[PER_UNIT];
#pragma unroll
    for (int j = 0; j < PER_UNIT; j++) sums[j] = neutral();
    if (result < p.count) {
        const stored *x = (const stored *)p.x + offset_of(p.rank, p.shape, p.x_stride, result);
        combine_units(p, x, part * p.part_units + lane, last, sums);
        for (long long i = lane; VECTOR && part == p.parts - 1 && i < p.tail; i += LANES)
            sums[0] = combine(sums[0], element_at(x, p.reduced * PER_UNIT + i, p.reduced * PER_UNIT + i));
    }
#pragma unroll
    for (int half = PER_UNIT / 2; half > 0; half /= 2)
#pragma unroll
        for (int j = 0; j < half; j++) sums[j] = combine(sums[j], sums[j + half]);
    const kept sum = across_lanes(sums[0]);
    if (result < p.count && lane == 0) put(p, part, result, sum);
}
#endif

extern "C" __global__ void __launch_bounds__(DW_REDUCE_THREADS, sizeof(kept) > 4 ? 1 : DW_REDUCE_RESIDENT)
    reduce(const __grid_constant__ dw_reduce_params p) {
    const long long tiles = (p.count + TILE - 1) / TILE;
    for (long long work = blockIdx.x; work < tiles * p.parts; work += gridDim.x) {
        const long long part = SPLIT ? work / tiles : 0, tile = SPLIT ? work % tiles : work;
        reduce_tile(p, tile, part, min((part + 1) * p.part_units, p.reduced));
    }
}

// Combines the parts: 16 threads of a result each combine every 16th part, then their values are combined pairwise.
extern "C" __global__ void __launch_bounds__(DW_REDUCE_PARTS_THREADS)
    reduce_parts(const __grid_constant__ dw_reduce_params p) {
    constexpr int ways = DW_REDUCE_PARTS_THREADS / DW_REDUCE_PARTS_RESULTS;
    __shared__ kept shares[ways][DW_REDUCE_PARTS_RESULTS];
    const int lane = (int)threadIdx.x % DW_REDUCE_PARTS_RESULTS, way = (int)threadIdx.x / DW_REDUCE_PARTS_RESULTS;
    for (long long first = blockIdx.x * (long long)DW_REDUCE_PARTS_RESULTS; first < p.count;
         first += gridDim.x * (long long)DW_REDUCE_PARTS_RESULTS) {
        const long long result = first + lane;
        kept sum = neutral();
        if (result < p.count)
#pragma unroll 4
            for (long long part = way; part < p.parts; part += ways)
                sum = combine(sum, ((const kept *)p.partials)[part * p.count + result]);
        __syncthreads(); // the values of the results before have been read
        shares[way][lane] = sum;
        __syncthreads();
        for (int half = ways / 2; half > 0; half /= 2) {
            if (way < half) shares[way][lane] = combine(shares[way][lane], shares[way + half][lane]);
            __syncthreads();
        }
        if (way == 0 && result < p.count) store(p.result, offset_of(p.rank, p.shape, p.result_stride, result), shares[0][lane]);
    }
}
