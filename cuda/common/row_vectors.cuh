// Rows of contiguous elements in vectors of 16 bytes, which a warp or a block shares.
//
// Defines, before inclusion: TYPE (element_types.h), LANES: threads of a row, a warp or more whole warps; VECTORS: 16-byte
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

// A vector in four registers. The compiler would give each element of a piece a register.
struct alignas(16) words {
    unsigned x[4];
};

// A number of a vector. The compiler would take an element of 16 bits out of its word before it converts it.
DEVICE value element_in(const words &v, int j) {
    if constexpr (TYPE == DW_ELEMENT_F64)
        return __hiloint2double((int)v.x[j * 2 + 1 & 3], (int)v.x[j * 2 & 3]);
    else if constexpr (TYPE == DW_ELEMENT_F32)
        return __uint_as_float(v.x[j & 3]);
    else if constexpr (TYPE == DW_ELEMENT_BF16)
        return __uint_as_float(j % 2 ? v.x[j / 2] & 0xffff0000u : v.x[j / 2] << 16);
    else
        return f16_to_float((unsigned short)(v.x[j / 2] >> j % 2 * 16));
}

DEVICE words words_of(const piece &v) {
    union {
        piece elements;
        words v;
    } same = {v};
    return same.v;
}

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

// Two numbers of 16 bits, rounded to nearest even by one instruction.
DEVICE unsigned rounded_pair(float low, float high) {
    unsigned pair;
    if constexpr (TYPE == DW_ELEMENT_BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

DEVICE void store_vector(void *row, int column, int columns, const value *values) {
    if constexpr (ALIGNED && sizeof(stored) == 2) {
        words pairs;
#pragma unroll
        for (int j = 0; j < 4; j++) pairs.x[j] = rounded_pair((float)values[2 * j], (float)values[2 * j + 1]);
        if (has_vector(column, columns)) *(words *)((stored *)row + column) = pairs;
        return;
    }
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

// Waits for the row's threads, of blocks of THREADS. Rows of a block do not wait for one another.
template <int THREADS> DEVICE void row_barrier() {
    if constexpr (THREADS == LANES) __syncthreads();
    else
        asm volatile("bar.sync %0, %1;" ::"r"((int)threadIdx.x / LANES + 1), "n"(LANES) : "memory");
}

// Replaces each number by its sum or maximum over the row's threads, in all of them. A block has THREADS.
template <bool MAXIMUM, int THREADS, int COUNT> DEVICE void reduce_over_row(value (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            x[i] = combine<MAXIMUM>(x[i], __shfl_xor_sync(0xffffffffu, x[i], distance));
    if constexpr (LANES > 32) {
        __shared__ value shares[THREADS / LANES][COUNT][LANES / 32];
        value(&of_row)[COUNT][LANES / 32] = shares[threadIdx.x / LANES];
        row_barrier<THREADS>(); // the numbers before have been read
        if (threadIdx.x % 32 == 0)
            for (int i = 0; i < COUNT; i++) of_row[i][threadIdx.x % LANES / 32] = x[i];
        row_barrier<THREADS>();
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            x[i] = of_row[i][0];
            for (int warp = 1; warp < LANES / 32; warp++) x[i] = combine<MAXIMUM>(x[i], of_row[i][warp]);
        }
    }
}

template <int THREADS = LANES, int COUNT> DEVICE void sum_over_row(value (&x)[COUNT]) {
    reduce_over_row<false, THREADS>(x);
}
DEVICE value max_over_row(value x) { // of numbers that are not NaN
    value each[1] = {x};
    reduce_over_row<true, LANES>(each);
    return each[0];
}

#endif
