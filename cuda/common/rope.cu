// Rotary position embedding (Su et al. 2021, "RoFormer") of rows, in any layout: x cos + rotate(x) sin, and its transpose.
//
// A thread rotates VECTOR pairs of up to DW_ROPE_HEADS heads, which have the same cosines and sines: the tables would
// otherwise be twice as much to load from the caches as x is from memory. It loads two vectors of x for each head before it
// uses the first, writes two of y, and computes in F32 (F64 in F64). Pairs are elements i and i + turned / 2, or neighbours
// if INTERLEAVED. Elements from `turned` on are copied.
//
// Defines: TYPE (element_types.h), VECTOR: elements of a load, 16 bytes or 1; INTERLEAVED: 0 or 1.
//
// Bytes: one read of x, one write of y; the tables are small and stay in the caches.

#include "rope_params.h"
#include "rotate.cuh"

typedef element_of<TYPE> element;
typedef element::stored stored;
typedef element::value value;

struct alignas(VECTOR * sizeof(stored)) piece {
    stored x[VECTOR];
};

// The vector from element `at` of a row that begins at `row`.
DEVICE piece *vector_at(const dw_rope_params &p, int tensor, long long row, int at) {
    return (piece *)((stored *)p.data[tensor] + row + at * p.step[tensor]);
}

DEVICE void load(const dw_rope_params &p, int tensor, long long row, int at, value *values) {
    const piece v = *vector_at(p, tensor, row, at);
#pragma unroll
    for (int j = 0; j < VECTOR; j++) values[j] = element::load(v.x, j);
}

struct places {
    long long row[DW_ROPE_TENSORS]; // of the first head
    int first, second;              // elements of the two vectors of each pair
};

// The factors of a row's elements: y = x cosine + (x of the other element of the pair) across.
struct angles {
    value cosine[2 * VECTOR], across[2 * VECTOR];
};

DEVICE angles angles_of(const dw_rope_params &p, const places &at) {
    angles of;
    value sine[2 * VECTOR];
    load(p, DW_ROPE_COS, at.row[DW_ROPE_COS], at.first, of.cosine);
    load(p, DW_ROPE_COS, at.row[DW_ROPE_COS], at.second, of.cosine + VECTOR);
    load(p, DW_ROPE_SIN, at.row[DW_ROPE_SIN], at.first, sine);
    load(p, DW_ROPE_SIN, at.row[DW_ROPE_SIN], at.second, sine + VECTOR);
#pragma unroll
    for (int j = 0; j < VECTOR; j++) {
        const int a = INTERLEAVED ? 2 * j : j, b = INTERLEAVED ? 2 * j + 1 : j + VECTOR;
        of.across[a] = p.transposed ? sine[b] : -sine[a];
        of.across[b] = p.transposed ? -sine[a] : sine[b];
    }
    return of;
}

struct two_pieces {
    piece first, second;
};

DEVICE two_pieces load_pairs(const dw_rope_params &p, const places &at, int head) {
    const long long row = at.row[DW_ROPE_X] + head * p.head_stride[DW_ROPE_X];
    return {load_at_once(vector_at(p, DW_ROPE_X, row, at.first)), load_at_once(vector_at(p, DW_ROPE_X, row, at.second))};
}

DEVICE void store_pairs(const dw_rope_params &p, const places &at, int head, const two_pieces &x, const angles &of) {
    const long long row = at.row[DW_ROPE_Y] + head * p.head_stride[DW_ROPE_Y];
    value in[2 * VECTOR];
    piece made[2];
#pragma unroll
    for (int j = 0; j < 2 * VECTOR; j++) in[j] = element::load((j < VECTOR ? x.first : x.second).x, j % VECTOR);
#pragma unroll
    for (int j = 0; j < 2 * VECTOR; j++) {
        const int other = INTERLEAVED ? j ^ 1 : (j + VECTOR) % (2 * VECTOR);
        element::store(made[j / VECTOR].x, j % VECTOR, rotated(in[j], of.cosine[j], in[other], of.across[j]));
    }
    store_at_once(vector_at(p, DW_ROPE_Y, row, at.first), made[0]);
    store_at_once(vector_at(p, DW_ROPE_Y, row, at.second), made[1]);
}

// Rotates the pairs of `heads` heads. Where there are as many as a thread can have, all of x is loaded before the tables.
DEVICE void rotate(const dw_rope_params &p, const places &at, int heads) {
    if (heads == DW_ROPE_HEADS) {
        two_pieces x[DW_ROPE_HEADS];
#pragma unroll
        for (int h = 0; h < DW_ROPE_HEADS; h++) x[h] = load_pairs(p, at, h);
        const angles of = angles_of(p, at);
#pragma unroll
        for (int h = 0; h < DW_ROPE_HEADS; h++) store_pairs(p, at, h, x[h], of);
    } else {
        const angles of = angles_of(p, at);
#pragma unroll 1
        for (int h = 0; h < heads; h++) store_pairs(p, at, h, load_pairs(p, at, h), of);
    }
}

DEVICE void copy(const dw_rope_params &p, const places &at, int heads) {
    for (int h = 0; h < heads; h++)
        *vector_at(p, DW_ROPE_Y, at.row[DW_ROPE_Y] + h * p.head_stride[DW_ROPE_Y], at.first) =
            *vector_at(p, DW_ROPE_X, at.row[DW_ROPE_X] + h * p.head_stride[DW_ROPE_X], at.first);
}

extern "C" __global__ void __launch_bounds__(256, 2) rope(const __grid_constant__ dw_rope_params p) {
    const unsigned half = (unsigned)p.turned / 2, pairs = half / VECTOR,
                   per_row = pairs + (unsigned)(p.columns - p.turned) / VECTOR;
    const unsigned groups = (p.heads + DW_ROPE_HEADS - 1) / DW_ROPE_HEADS;
    const unsigned long long count = (unsigned long long)p.rows * groups * per_row;
    for (unsigned long long e = blockIdx.x * 256ULL + threadIdx.x; e < count; e += gridDim.x * 256ULL) {
        const unsigned line = (unsigned)e / per_row; // the host checks that `count` has 32 bits
        const unsigned part = (unsigned)e - line * per_row, group = line / p.rows, first = group * DW_ROPE_HEADS;
        const int heads = (int)min(p.heads - first, (unsigned)DW_ROPE_HEADS);
        unsigned rest = line - group * p.rows;
        places at = {{first * p.head_stride[DW_ROPE_X], 0, 0, first * p.head_stride[DW_ROPE_Y]}, 0, 0};
        for (int axis = p.rank - 1; axis >= 0; axis--) {
            const unsigned next = axis ? rest / p.shape[axis] : 0, index = rest - next * p.shape[axis];
#pragma unroll
            for (int t = 0; t < DW_ROPE_TENSORS; t++) at.row[t] += index * p.stride[t][axis];
            rest = next;
        }
        if (part < pairs) {
            at.first = (int)part * VECTOR * (INTERLEAVED ? 2 : 1);
            at.second = at.first + (INTERLEAVED ? VECTOR : (int)half);
            rotate(p, at, heads);
        } else {
            at.first = p.turned + (int)(part - pairs) * VECTOR;
            copy(p, at, heads);
        }
    }
}
