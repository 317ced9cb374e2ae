// Gathers and scatters along one axis by a tensor of indexes.
//
// gather: each thread reads an index and copies one element, or VECTOR neighbours that have the same index. scatter:
// each thread has one element of the result, walks all indexes that may select it and adds in their order. scatter_lines: a
// warp has a line of the result along its last axis, as that of a token's experts, and up to 32 indexes of it: each lane
// reads one, and all lanes get them from one another, in their order. No atomic addition, so that results have the same
// bits in every run. BF16 and F16 accumulate in F32 and round once. An index
// outside of its axis is reported (data_error.h): a gather then gives zero, a scatter leaves the addend out.
//
// Defines: TYPE (element_types.h), WIDE: indexes are i64, else i32; VECTOR: elements of a thread, 16 bytes of them or 1
// (1 in a scatter).
//
// Reads of an index: one in a gather and in scatter_lines; in scatter as many as its line has places.

#include "gather_params.h"
#include "strided.cuh"

typedef element_of<TYPE> element;
typedef element::value value;

#define TOGETHER 2 // results of a thread at a time

DEVICE long long index_at(const void *index, long long at) {
    return WIDE ? ((const long long *)index)[at] : (long long)((const int *)index)[at];
}

struct alignas(VECTOR == 1 ? sizeof(element::stored) : 16) piece {
    element::stored x[VECTOR];
};

struct place {
    long long x, index, result, coordinate; // offsets, and the coordinate on the selected axis
    bool inside;
};

// The place of an element of the first `axes` axes: of the result, or of its lines along the last axis.
template <typename NUMBER> DEVICE place place_of(const dw_gather_params &p, NUMBER element, int axes) {
    place at = {0, 0, 0, 0, true};
    for (int axis = axes - 1; axis >= 0; axis--) {
        const NUMBER rest = axis > 0 ? element / (NUMBER)p.shape[axis] : 0;
        const long long c = (long long)(element - rest * (NUMBER)p.shape[axis]);
        element = rest;
        at.x += c * p.x_stride[axis];
        at.index += c * p.index_stride[axis];
        at.result += c * p.result_stride[axis];
        if (axis == p.axis)
            at.coordinate = c;
        else
            at.inside &= c < p.index_shape[axis];
    }
    return at;
}

// A thread reads TOGETHER indexes, then their elements, then writes these, so that it waits twice for all of them. Results
// are counted in NUMBER, whose divisions have as many bits. A place beyond the last result stands for the first one, whose
// element is not read again.
template <typename NUMBER> DEVICE void gather_elements(const dw_gather_params &p) {
    const NUMBER step = (NUMBER)gridDim.x * 256, count = (NUMBER)p.count;
    for (NUMBER e = (NUMBER)blockIdx.x * 256 + threadIdx.x; e < count;) {
        long long from[TOGETHER], to[TOGETHER], index[TOGETHER];
        bool inside[TOGETHER];
        piece x[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            inside[i] = e < count;
            const place at = place_of(p, inside[i] ? e : 0, p.rank);
            from[i] = at.x;
            to[i] = at.result;
            index[i] = index_at(p.index, at.index);
            if (inside[i]) e = count - e > step ? e + step : count;
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            const bool valid = index[i] >= 0 && index[i] < p.axis_size;
            if (!valid) report(p.error, DW_DATA_INDEX);
            x[i] = {};
            if (valid && inside[i]) x[i] = ((const piece *)p.x)[from[i] + index[i] * p.x_step];
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            if (inside[i]) ((piece *)p.result)[to[i]] = x[i];
    }
}

extern "C" __global__ void __launch_bounds__(256, DW_GATHER_RESIDENT) gather(const __grid_constant__ dw_gather_params p) {
    if (p.count >> 32) gather_elements<unsigned long long>(p);
    else
        gather_elements<unsigned>(p);
}

extern "C" __global__ void __launch_bounds__(256) scatter(const __grid_constant__ dw_gather_params p) {
    EACH_ELEMENT(e, p.count) {
        const place at = place_of(p, (unsigned long long)e, p.rank);
        value sum = (value)0;
        for (long long i = 0; at.inside && i < p.indexes; i++) {
            const long long index = index_at(p.index, at.index + i * p.index_step);
            if (index < 0 || index >= p.axis_size) report(p.error, DW_DATA_INDEX);
            if (index == at.coordinate) sum = (value)(sum + element::load(p.x, at.x + i * p.x_step));
        }
        element::store(p.result, at.result, sum);
    }
}

extern "C" __global__ void __launch_bounds__(256) scatter_lines(const __grid_constant__ dw_gather_params p) {
    const int lane = (int)threadIdx.x % 32, warps = (int)blockDim.x / 32;
    const long long lines = p.count / p.axis_size;
    for (long long line = blockIdx.x * (long long)warps + threadIdx.x / 32; line < lines; line += gridDim.x * (long long)warps) {
        const place at = place_of(p, (unsigned long long)line, p.rank - 1);
        int mine = -1;
        value addend = (value)0;
        if (lane < p.indexes) {
            const long long index = index_at(p.index, at.index + lane * p.index_step);
            if (index >= 0 && index < p.axis_size) {
                mine = (int)index;
                addend = element::load(p.x, at.x + lane * p.x_step);
            } else {
                report(p.error, DW_DATA_INDEX);
            }
        }
        for (int first = 0; first < (int)p.axis_size; first += 32) {
            value sum = (value)0;
            for (int i = 0; i < (int)p.indexes; i++) {
                const int index = __shfl_sync(0xffffffffu, mine, i);
                const value more = __shfl_sync(0xffffffffu, addend, i);
                if (index == first + lane) sum = (value)(sum + more);
            }
            if (first + lane < (int)p.axis_size)
                element::store(p.result, at.result + (first + lane) * p.result_stride[p.rank - 1], sum);
        }
    }
}
