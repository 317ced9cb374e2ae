// Rows of contiguous elements in vectors of 16 bytes, which a warp or a block shares.
//
// Defines, before inclusion: TYPE (element_types.h), LANES: threads of a row, 32 or all of a block; VECTORS: 16-byte
// vectors of a row that one thread holds in registers, or 0 if it holds none and reads the row again for each pass;
// ALIGNED: every row begins at a multiple of 16 bytes and is whole vectors; FULL: rows are also as long as LANES * VECTORS
// vectors.
#ifndef DW_ROW_VECTORS_CUH
#define DW_ROW_VECTORS_CUH

#include "tensor_types.cuh"

#ifndef FULL
#define FULL 0
#endif

typedef element_of<TYPE> element;
typedef element::stored stored;
typedef element::value value;

#define PER_VECTOR ((int)(16 / sizeof(stored)))
#define HELD (VECTORS ? VECTORS : 1)
#define VALUES (HELD * PER_VECTOR) // in one thread's registers

struct alignas(16) piece {
    stored x[PER_VECTOR];
};

// Calls visit(column, index among the thread's vectors) for each of this thread's vectors of a row. Neighbouring
// threads have neighbouring vectors.
template <typename VISIT> DEVICE void each_vector(int columns, VISIT visit) {
    const int first = (int)threadIdx.x % LANES * PER_VECTOR, step = LANES * PER_VECTOR;
    if constexpr (VECTORS > 0) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) visit(first + i * step, i);
    } else {
        for (int column = first; column < columns; column += step) visit(column, 0);
    }
}

// True if the vector at `column` of an ALIGNED row is in the row.
DEVICE bool has_vector(int column, int columns) { return FULL || column < columns; }

// One vector of a row, with zeros past the end of the row.
DEVICE piece load_piece(const void *row, int column, int columns) {
    piece v = {};
    if constexpr (ALIGNED) {
        if (has_vector(column, columns)) v = *(const piece *)((const stored *)row + column);
    } else {
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++)
            if (column + j < columns) v.x[j] = ((const stored *)row)[column + j];
    }
    return v;
}

DEVICE void load_vector(const void *row, int column, int columns, value *values) {
    const piece v = load_piece(row, column, columns);
#pragma unroll
    for (int j = 0; j < PER_VECTOR; j++) values[j] = element::load(v.x, j);
}

DEVICE void store_vector(void *row, int column, int columns, const value *values) {
    piece v;
#pragma unroll
    for (int j = 0; j < PER_VECTOR; j++) element::store(v.x, j, values[j]);
    if constexpr (ALIGNED) {
        if (has_vector(column, columns)) *(piece *)((stored *)row + column) = v;
    } else {
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++)
            if (column + j < columns) ((stored *)row)[column + j] = v.x[j];
    }
}

template <bool MAXIMUM> DEVICE value combine(value a, value b) {
    if constexpr (MAXIMUM) return a > b ? a : b;
    else
        return a + b;
}

// Replaces each number by its sum or maximum over the row's threads, in all of them.
template <bool MAXIMUM, int COUNT> DEVICE void reduce_over_row(value (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            x[i] = combine<MAXIMUM>(x[i], __shfl_xor_sync(0xffffffffu, x[i], distance));
    if constexpr (LANES > 32) {
        __shared__ value shares[COUNT][LANES / 32];
        __syncthreads(); // the numbers before have been read
        if (threadIdx.x % 32 == 0)
            for (int i = 0; i < COUNT; i++) shares[i][threadIdx.x / 32] = x[i];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            x[i] = shares[i][0];
            for (int warp = 1; warp < LANES / 32; warp++) x[i] = combine<MAXIMUM>(x[i], shares[i][warp]);
        }
    }
}

template <int COUNT> DEVICE void sum_over_row(value (&x)[COUNT]) { reduce_over_row<false>(x); }
DEVICE value max_over_row(value x) { // of numbers that are not NaN
    value each[1] = {x};
    reduce_over_row<true>(each);
    return each[0];
}

#endif
