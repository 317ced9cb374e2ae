// Running sums along an axis of a strided tensor.
//
// LANES threads share a row: each turn takes LANES neighbouring elements, whose running sums a warp makes by shuffles
// and the warps of a block through shared memory, on top of the sum of the turns before. One lane per row suits columns,
// where neighbouring threads read neighbouring rows. BF16 and F16 accumulate in F32 and round each result once. The
// order of additions depends on sizes alone, so that results have the same bits in every run.
//
// Defines: TYPE (element_types.h), LANES (1, 32 or 256).
//
// Bytes: one read of the operand, one write of the result.

#include "scan_params.h"
#include "strided.cuh"

typedef element_of<TYPE> element;
typedef element::value value;

// The sum of this lane's value and of those of the lanes before; `total`: of all lanes.
DEVICE value running_sum(value x, value *total) {
    const int lane = (int)threadIdx.x % 32;
    value sum = x;
    if constexpr (LANES > 1) {
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const value before = __shfl_up_sync(0xffffffffu, sum, distance);
            if (lane >= distance) sum = (value)(sum + before);
        }
        *total = __shfl_sync(0xffffffffu, sum, 31);
    } else {
        *total = sum;
    }
    if constexpr (LANES > 32) {
        __shared__ value warps[DW_SCAN_THREADS / 32];
        const int own = (int)threadIdx.x / 32;
        value before = (value)0, all = (value)0;
        __syncthreads(); // the totals of the turn before have been read
        if (lane == 31) warps[own] = sum;
        __syncthreads();
        for (int warp = 0; warp < DW_SCAN_THREADS / 32; warp++) {
            if (warp == own) before = all;
            all = (value)(all + warps[warp]);
        }
        sum = (value)(before + sum);
        *total = all;
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(DW_SCAN_THREADS) scan(const __grid_constant__ dw_scan_params p) {
    const int lane = (int)threadIdx.x % LANES, per_block = DW_SCAN_THREADS / LANES;
    const long long stride = gridDim.x * (long long)per_block;
    for (long long first = blockIdx.x * (long long)per_block; first < p.count; first += stride) {
        const long long row = first + threadIdx.x / LANES;
        const bool has_row = row < p.count;
        const long long from = has_row ? offset_of(p.rank, p.shape, p.x_stride, row) : 0,
                        to = has_row ? offset_of(p.rank, p.shape, p.result_stride, row) : 0;
        value carried = (value)0, total;
        for (long long turn = 0; turn < p.length; turn += LANES) {
            const long long i = turn + lane, at = p.reverse ? p.length - 1 - i : i;
            const bool is_inside = has_row && i < p.length;
            const value x = is_inside ? element::load(p.x, from + at * p.x_step) : (value)0;
            const value sum = (value)(carried + running_sum(x, &total));
            if (is_inside) element::store(p.result, to + at * p.result_step, sum);
            carried = (value)(carried + total);
        }
    }
}
