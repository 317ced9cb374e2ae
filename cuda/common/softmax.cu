// Softmax and log-softmax along rows, forward and backward.
//
// Both are bound by memory. A row of up to LANES * VECTORS vectors is read once, stays in registers while its maximum
// and its sum are computed, and is written once. LANES threads share a row: a warp has a short row (a block then has
// several), a block has a long one. VECTORS is 0 for rows that no variant can hold in registers. These rows are read
// again, from L2, in each of the two later passes. Sums are F32 in an order that depends on the variant alone, so that
// results have the same bits in every run.
//
// The softmax of a row of -infinity alone is zeros, as the operation's definition says.
//
// Defines: TYPE (softmax_params.h), LOGARITHM, LANES (32, 256 or 1024), VECTORS: 16-byte vectors of a row that one
// thread holds, ALIGNED: every row of every tensor begins at a multiple of 16 bytes and is whole vectors.
//
// Bytes per element: forward one read and one write; backward two reads and one write.

#include "softmax_params.h"
#define ELEMENT (TYPE == DW_SOFTMAX_F16)
#include "sm90.cuh"

#define PER_VECTOR (TYPE == DW_SOFTMAX_F32 ? 4 : 8) // elements in 16 bytes
#define VALUES ((VECTORS ? VECTORS : 1) * PER_VECTOR) // in one thread's registers
#define ELEMENT_BYTES (TYPE == DW_SOFTMAX_F32 ? 4 : 2)
#define ROWS_PER_BLOCK (DW_SOFTMAX_BLOCK(LANES) / LANES)

static const float log2_e = 1.4426950408889634f;

// ---- rows ------------------------------------------------------------------------------------------------

DEVICE void unpack(uint4 words, float *values) {
    const uint32 w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (TYPE == DW_SOFTMAX_F32) {
            values[i] = __uint_as_float(w[i]);
        } else {
            values[2 * i] = element_low(w[i]);
            values[2 * i + 1] = element_high(w[i]);
        }
    }
}

DEVICE uint4 pack(const float *values) {
    uint32 w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (TYPE == DW_SOFTMAX_F32) w[i] = __float_as_uint(values[i]);
        else
            w[i] = pack_elements(values[2 * i], values[2 * i + 1]);
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

DEVICE float load_one(const uint8 *row, int column) {
    if constexpr (TYPE == DW_SOFTMAX_F32) return __ldg((const float *)row + column);
    else
        return element_low(__ldg((const uint16 *)row + column));
}

DEVICE void store_one(uint8 *row, int column, float value) {
    if constexpr (TYPE == DW_SOFTMAX_F32) ((float *)row)[column] = value;
    else
        ((uint16 *)row)[column] = (uint16)pack_elements(value, 0.0f);
}

DEVICE const uint8 *row_of(const void *base, long long stride, long long row) {
    return (const uint8 *)base + row * stride * ELEMENT_BYTES;
}

// The column at which this thread's vector `i` begins: neighbouring threads hold neighbouring vectors.
DEVICE int column_of(int i) { return (i * LANES + (int)threadIdx.x % LANES) * PER_VECTOR; }

// One vector of a row; columns past the end of the row get the value `beyond`.
DEVICE void load_vector(const uint8 *row, int column, int columns, float beyond, float *values) {
    if (ALIGNED && column < columns) {
        unpack(__ldg((const uint4 *)(row + (long long)column * ELEMENT_BYTES)), values);
    } else {
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++)
            values[j] = !ALIGNED && column + j < columns ? load_one(row, column + j) : beyond;
    }
}

DEVICE void store_vector(uint8 *row, int column, int columns, const float *values) {
    if (ALIGNED) {
        if (column < columns) *(uint4 *)(row + (long long)column * ELEMENT_BYTES) = pack(values);
    } else {
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++)
            if (column + j < columns) store_one(row, column + j, values[j]);
    }
}

// ---- reductions over a row's threads ---------------------------------------------------------------------

template <bool MAXIMUM> DEVICE float combine(float a, float b) { return MAXIMUM ? fmaxf(a, b) : a + b; }

// Returns the sum or maximum over the row's threads in each of them. A maximum ignores NaN; the sum after it does not.
template <bool MAXIMUM> DEVICE float reduce(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        value = combine<MAXIMUM>(value, __shfl_xor_sync(0xffffffff, value, distance));
    if constexpr (LANES > 32) {
        __shared__ float shares[LANES / 32];
        __syncthreads(); // the previous reduction has been read
        if (threadIdx.x % 32 == 0) shares[threadIdx.x / 32] = value;
        __syncthreads();
        value = shares[0];
#pragma unroll
        for (int warp = 1; warp < LANES / 32; warp++) value = combine<MAXIMUM>(value, shares[warp]);
    }
    return value;
}

// e^x for x <= 0. The approximation's error, and that of scaling x, stay below half a unit of the 16-bit types.
DEVICE float exponential(float x) {
    if constexpr (TYPE == DW_SOFTMAX_F32) return expf(x);
    else
        return exp2_approx(x * log2_e);
}

// ---- one row ---------------------------------------------------------------------------------------------

// Calls visit(column, vector index) for each of this thread's vectors of a row.
template <typename VISIT> DEVICE void each_vector(int columns, VISIT visit) {
    if constexpr (VECTORS > 0) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) visit(column_of(i), i);
    } else {
        for (int i = 0; column_of(i) < columns; i++) visit(column_of(i), 0);
    }
}

DEVICE void forward_row(const uint8 *from, uint8 *to, int columns) {
    float x[VALUES], largest = -INFINITY_F, sum = 0.0f;
    each_vector(columns, [&](int column, int at) {
        float *v = x + at * PER_VECTOR;
        load_vector(from, column, columns, -INFINITY_F, v);
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) largest = fmaxf(largest, v[j]);
    });
    largest = reduce<true>(largest);
    if (!LOGARITHM && largest == -INFINITY_F) largest = 0.0f;
    each_vector(columns, [&](int column, int at) {
        float *v = x + at * PER_VECTOR;
        if (VECTORS == 0) load_vector(from, column, columns, -INFINITY_F, v);
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) {
            const float e = exponential(v[j] - largest);
            // Columns past the end of the row add nothing, even if the maximum is -infinity or NaN.
            if (column + j < columns) sum += e;
            if (VECTORS > 0) v[j] = LOGARITHM ? v[j] - largest : e;
        }
    });
    sum = reduce<false>(sum);
    const float log_sum = LOGARITHM ? logf(sum) : 0.0f, scale = sum == 0.0f ? 0.0f : 1.0f / sum;
    each_vector(columns, [&](int column, int at) {
        float *v = x + at * PER_VECTOR;
        if (VECTORS == 0) load_vector(from, column, columns, -INFINITY_F, v);
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) {
            if (VECTORS == 0) v[j] = LOGARITHM ? v[j] - largest : exponential(v[j] - largest);
            v[j] = LOGARITHM ? v[j] - log_sum : v[j] * scale;
        }
        store_vector(to, column, columns, v);
    });
}

DEVICE void backward_row(const uint8 *y_row, const uint8 *dy_row, uint8 *to, int columns) {
    float y[VALUES], dy[VALUES], sum = 0.0f;
    each_vector(columns, [&](int column, int at) {
        float *a = y + at * PER_VECTOR, *b = dy + at * PER_VECTOR;
        load_vector(y_row, column, columns, 0.0f, a);
        load_vector(dy_row, column, columns, 0.0f, b);
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) sum += LOGARITHM ? b[j] : a[j] * b[j];
    });
    sum = reduce<false>(sum);
    each_vector(columns, [&](int column, int at) {
        float *a = y + at * PER_VECTOR, *b = dy + at * PER_VECTOR;
        if (VECTORS == 0) load_vector(y_row, column, columns, 0.0f, a);
        if (VECTORS == 0) load_vector(dy_row, column, columns, 0.0f, b);
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) b[j] = LOGARITHM ? b[j] - exponential(a[j]) * sum : a[j] * (b[j] - sum);
        store_vector(to, column, columns, b);
    });
}

// ---- kernels: a group of threads processes row after row, so any grid size is valid ---------------------

#define FIRST_ROW ((long long)blockIdx.x * ROWS_PER_BLOCK + threadIdx.x / LANES)
#define NEXT_ROW ((long long)gridDim.x * ROWS_PER_BLOCK)

extern "C" __global__ void __launch_bounds__(DW_SOFTMAX_BLOCK(LANES))
    softmax_forward(const __grid_constant__ dw_softmax_params p) {
    for (long long row = FIRST_ROW; row < p.rows; row += NEXT_ROW)
        forward_row(row_of(p.x, p.x_stride, row), (uint8 *)row_of(p.result, p.result_stride, row), p.columns);
}

extern "C" __global__ void __launch_bounds__(DW_SOFTMAX_BLOCK(LANES))
    softmax_backward(const __grid_constant__ dw_softmax_params p) {
    for (long long row = FIRST_ROW; row < p.rows; row += NEXT_ROW)
        backward_row(row_of(p.x, p.x_stride, row), row_of(p.dy, p.dy_stride, row),
                     (uint8 *)row_of(p.result, p.result_stride, row), p.columns);
}
