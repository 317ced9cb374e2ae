// Rotary position embedding (Su et al. 2021, "RoFormer") of rows, in any layout: x cos + rotate(x) sin, and its transpose.
//
// A thread rotates VECTOR pairs: it loads two vectors of x, writes two of y, and computes in F32 (F64 in F64). Pairs are
// elements i and i + turned / 2, or neighbours if INTERLEAVED. Elements from `turned` on are copied.
//
// Defines: TYPE (element_types.h), VECTOR: elements of a load, 16 bytes or 1; INTERLEAVED: 0 or 1.
//
// Bytes: one read of x, one write of y; the tables are small and stay in the caches.

#include "rope_params.h"
#include "tensor_types.cuh"

typedef element_of<TYPE> element;
typedef element::stored stored;
typedef element::value value;

struct alignas(VECTOR * sizeof(stored)) piece {
    stored x[VECTOR];
};

// VECTOR elements from element `at` of a row that begins at `row`.
DEVICE void load(const dw_rope_params &p, int tensor, long long row, int at, value *values) {
    const stored *from = (const stored *)p.data[tensor] + row + at * p.step[tensor];
    const piece v = *(const piece *)from;
#pragma unroll
    for (int j = 0; j < VECTOR; j++) values[j] = element::load(v.x, j);
}

DEVICE void store(const dw_rope_params &p, long long row, int at, const value *values) {
    piece v;
#pragma unroll
    for (int j = 0; j < VECTOR; j++) element::store(v.x, j, values[j]);
    *(piece *)((stored *)p.data[DW_ROPE_Y] + row + at * p.step[DW_ROPE_Y]) = v;
}

DEVICE void rotate(const dw_rope_params &p, const long long *row, int first, int second) {
    value x[2 * VECTOR], cosine[2 * VECTOR], sine[2 * VECTOR], y[2 * VECTOR];
    load(p, DW_ROPE_X, row[DW_ROPE_X], first, x);
    load(p, DW_ROPE_X, row[DW_ROPE_X], second, x + VECTOR);
    load(p, DW_ROPE_COS, row[DW_ROPE_COS], first, cosine);
    load(p, DW_ROPE_COS, row[DW_ROPE_COS], second, cosine + VECTOR);
    load(p, DW_ROPE_SIN, row[DW_ROPE_SIN], first, sine);
    load(p, DW_ROPE_SIN, row[DW_ROPE_SIN], second, sine + VECTOR);
#pragma unroll
    for (int j = 0; j < VECTOR; j++) {
        const int a = INTERLEAVED ? 2 * j : j, b = INTERLEAVED ? 2 * j + 1 : j + VECTOR;
        const value across_a = p.transposed ? -sine[b] : sine[a], across_b = p.transposed ? -sine[a] : sine[b];
        y[a] = x[a] * cosine[a] - x[b] * across_a;
        y[b] = x[b] * cosine[b] + x[a] * across_b;
    }
    store(p, row[DW_ROPE_Y], first, y);
    store(p, row[DW_ROPE_Y], second, y + VECTOR);
}

extern "C" __global__ void __launch_bounds__(256) rope(const __grid_constant__ dw_rope_params p) {
    const unsigned half = (unsigned)p.turned / 2, pairs = half / VECTOR,
                   per_row = pairs + (unsigned)(p.columns - p.turned) / VECTOR;
    const unsigned long long count = (unsigned long long)p.rows * per_row;
    for (unsigned long long e = blockIdx.x * 256ULL + threadIdx.x; e < count; e += gridDim.x * 256ULL) {
        unsigned rest = (unsigned)e / per_row; // the host checks that `count` has 32 bits
        const unsigned part = (unsigned)e - rest * per_row;
        long long row[DW_ROPE_TENSORS] = {0, 0, 0, 0};
        for (int axis = p.rank - 1; axis >= 0; axis--) {
            const unsigned next = axis ? rest / p.shape[axis] : 0, index = rest - next * p.shape[axis];
#pragma unroll
            for (int t = 0; t < DW_ROPE_TENSORS; t++) row[t] += index * p.stride[t][axis];
            rest = next;
        }
        if (part < pairs) {
            const int first = (int)part * VECTOR * (INTERLEAVED ? 2 : 1);
            rotate(p, row, first, first + (INTERLEAVED ? VECTOR : (int)half));
        } else {
            value kept[VECTOR];
            const int at = p.turned + (int)(part - pairs) * VECTOR;
            load(p, DW_ROPE_X, row[DW_ROPE_X], at, kept);
            store(p, row[DW_ROPE_Y], at, kept);
        }
    }
}
