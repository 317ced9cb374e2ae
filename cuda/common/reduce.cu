// Sums, extremes, products and places of extremes over axes of a strided tensor.
//
// LANES threads share a result: each takes every LANES-th element, then a warp exchanges its values by shuffles and the
// warps of a block through shared memory. One lane per result suits columns, where neighbouring threads read neighbouring
// elements; a warp or a block suits rows. BF16 and F16 accumulate in F32 and round once. The order of additions depends
// on sizes alone, so that results have the same bits in every run.
//
// Defines: TYPE, REDUCTION (element_types.h, reduce_params.h), LANES (1, 32 or 256).
//
// Bytes: one read of the operand, one write of the result.

#include "reduce_params.h"
#include "strided.cuh"

typedef element_of<TYPE> element;
typedef element::value value;

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

DEVICE value exchange(value x, int distance) {
    if constexpr (TYPE == DW_ELEMENT_BOOL)
        return __shfl_xor_sync(0xffffffffu, (int)x, distance) != 0;
    else
        return __shfl_xor_sync(0xffffffffu, x, distance);
}

// ---- what a thread keeps ---------------------------------------------------------------------------------------

#if FINDS_PLACE
// An element and its index; -1: none yet.
struct kept {
    value x;
    long long index;
};
DEVICE kept neutral() { return {(value)0, -1}; }
DEVICE kept element_at(const void *x, long long offset, long long index) { return {element::load(x, offset), index}; }
// A NaN is beyond all numbers; the first of equal elements stays.
DEVICE bool precedes(const kept &a, const kept &b) {
    const bool a_nan = a.x != a.x, b_nan = b.x != b.x;
    if (a.index < 0 || b.index < 0) return b.index < 0;
    if (a_nan != b_nan) return a_nan;
    if (!a_nan && a.x != b.x) return REDUCTION == DW_REDUCE_ARG_MAX ? a.x > b.x : a.x < b.x;
    return a.index < b.index;
}
DEVICE kept combine(const kept &a, const kept &b) { return precedes(a, b) ? a : b; }
DEVICE kept exchange(const kept &a, int distance) {
    return {exchange(a.x, distance), __shfl_xor_sync(0xffffffffu, a.index, distance)};
}
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

// The combination of all lanes' values, in every lane.
DEVICE kept across_lanes(kept x) {
    if constexpr (LANES > 1) {
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) x = combine(x, exchange(x, distance));
    }
    if constexpr (LANES > 32) {
        __shared__ kept warps[DW_REDUCE_THREADS / 32];
        __syncthreads(); // the values of the result before have been read
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
        __syncthreads();
        x = warps[0];
        for (int warp = 1; warp < DW_REDUCE_THREADS / 32; warp++) x = combine(x, warps[warp]);
    }
    return x;
}

extern "C" __global__ void __launch_bounds__(DW_REDUCE_THREADS) reduce(const __grid_constant__ dw_reduce_params p) {
    const int lane = (int)threadIdx.x % LANES, per_block = DW_REDUCE_THREADS / LANES;
    const long long stride = gridDim.x * (long long)per_block;
    for (long long first = blockIdx.x * (long long)per_block; first < p.count; first += stride) {
        const long long result = first + threadIdx.x / LANES;
        kept sum = neutral();
        if (result < p.count) {
            const long long base = offset_of(p.rank, p.shape, p.x_stride, result);
            for (long long i = lane; i < p.reduced; i += LANES)
                sum = combine(sum, element_at(p.x, base + offset_of(p.reduced_rank, p.reduced_shape, p.reduced_stride, i), i));
        }
        sum = across_lanes(sum);
        if (result < p.count && lane == 0) store(p.result, offset_of(p.rank, p.shape, p.result_stride, result), sum);
    }
}
