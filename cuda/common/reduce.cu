// Sums, extremes and products over axes of a strided tensor.
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
#include "tensor_types.cuh"

typedef element_of<TYPE> element;
typedef element::value value;

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
DEVICE value neutral() {
    if constexpr (REDUCTION == DW_REDUCE_MAX) return least();
    if constexpr (REDUCTION == DW_REDUCE_MIN) return largest();
    return (value)(REDUCTION == DW_REDUCE_PROD);
}

// A NaN stays.
DEVICE value combine(value a, value b) {
    if constexpr (REDUCTION == DW_REDUCE_SUM) return (value)(a + b);
    if constexpr (REDUCTION == DW_REDUCE_PROD) return (value)(a * b);
    if constexpr (REDUCTION == DW_REDUCE_MAX) return a != a || a > b ? a : b;
    return a != a || a < b ? a : b;
}

DEVICE long long offset_of(int rank, const long long *shape, const long long *stride, long long element) {
    unsigned long long rest = (unsigned long long)element;
    long long offset = 0;
    for (int axis = rank - 1; axis > 0; axis--) {
        const unsigned long long size = (unsigned long long)shape[axis];
        offset += (long long)(rest % size) * stride[axis];
        rest /= size;
    }
    return offset + (long long)rest * stride[0];
}

DEVICE value exchange(value x, int distance) {
    if constexpr (TYPE == DW_ELEMENT_BOOL)
        return __shfl_xor_sync(0xffffffffu, (int)x, distance) != 0;
    else
        return __shfl_xor_sync(0xffffffffu, x, distance);
}

// The combination of all lanes' values, in every lane.
DEVICE value across_lanes(value x) {
    if constexpr (LANES > 1) {
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) x = combine(x, exchange(x, distance));
    }
    if constexpr (LANES > 32) {
        __shared__ value warps[DW_REDUCE_THREADS / 32];
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
        value sum = neutral();
        if (result < p.count) {
            const long long base = offset_of(p.rank, p.shape, p.x_stride, result);
            for (long long i = lane; i < p.reduced; i += LANES)
                sum = combine(sum, element::load(p.x, base + offset_of(p.reduced_rank, p.reduced_shape,
                                                                       p.reduced_stride, i)));
        }
        sum = across_lanes(sum);
        if (result < p.count && lane == 0)
            element::store(p.result, offset_of(p.rank, p.shape, p.result_stride, result), sum);
    }
}
