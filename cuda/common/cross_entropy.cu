// Cross-entropy of rows of logits with one target each, forward and backward.
//
// Both are bound by memory. LANES threads share a row: a warp has a short row (a block then has several), a block has a
// long one. Forward reads the logits once: each thread keeps the largest of its logits and the sum of exponentials
// relative to it, and scales the sum when it meets a larger one. Backward reads them once and computes probabilities
// again from the log-sum-exp. One block adds the losses of rows in an order that depends on their number alone, with
// compensation, so that results have the same bits in every run.
//
// A target outside of the classes is reported (data_error.h), and its row is treated as an ignored one. Statistics and
// sums are F32 (F64 in F64), each result is rounded once.
//
// Defines: TYPE, LANES, ALIGNED (row_vectors.cuh).
//
// Bytes: forward one read of the logits; backward one read of the logits and one write of their gradient.

#include "cross_entropy_params.h"
#define VECTORS 0
#include "row_vectors.cuh"

#define ROWS_PER_BLOCK (DW_LOSS_BLOCK(LANES) / LANES)

DEVICE value infinity() { return (value)__int_as_float(0x7f800000); }

// e^x. In 16-bit types the approximation's error and that of scaling x stay below their rounding.
DEVICE double exponential(double x) { return exp(x); }
DEVICE float exponential(float x) {
    if constexpr (TYPE == DW_ELEMENT_F32) return expf(x);
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
    return y;
}

DEVICE double logarithm(double x) { return log(x); }
DEVICE float logarithm(float x) { return logf(x); }

DEVICE bool is_counted(const dw_cross_entropy_params &p, long long target) {
    return target != p.ignored && target >= 0 && target < p.columns;
}

// The target of a row, or -1 if the row is ignored. The row's first thread reports a target outside of the classes.
DEVICE long long target_of(const dw_cross_entropy_params &p, long long row) {
    const long long target = p.target[row];
    if (is_counted(p, target)) return target;
    if (target != p.ignored && threadIdx.x % LANES == 0) report(p.error, DW_DATA_INDEX);
    return -1;
}

#define EACH_ROW(row)                                                                                                \
    for (long long row = (long long)blockIdx.x * ROWS_PER_BLOCK + threadIdx.x / LANES; row < p.rows;                 \
         row += (long long)gridDim.x * ROWS_PER_BLOCK)

// ---- forward ---------------------------------------------------------------------------------------------

DEVICE void forward_row(const dw_cross_entropy_params &p, long long row) {
    const stored *from = (const stored *)p.x + row * p.x_stride;
    value largest = -infinity(), sums[2] = {0, 0}; // of exponentials relative to `largest`, and of logits
    each_vector(p.columns, [&](int column, int) {
        value x[PER_VECTOR], most = -infinity();
        load_vector(from, column, p.columns, x);
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) {
            if (column + j >= p.columns) x[j] = -infinity(); // adds nothing
            else
                sums[1] += x[j];
            if (x[j] > most) most = x[j];
        }
        if (most > largest) {
            sums[0] *= exponential(largest - most);
            largest = most;
        }
        const value shift = largest == -infinity() ? (value)0 : largest; // -inf - -inf would be NaN
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) sums[0] += exponential(x[j] - shift);
    });
    value most = max_over_row(largest);
    if (most == -infinity()) most = 0;
    if (largest != most) sums[0] *= exponential(largest - most);
    sum_over_row(sums);
    if (threadIdx.x % LANES != 0) return;
    const long long target = target_of(p, row);
    const value log_sum = logarithm(sums[0]);
    value loss = 0;
    if (target >= 0) loss = (most - element::load(from, target)) + log_sum;
    if (target >= 0 && p.smoothing != 0) {
        const value even = (most - sums[1] / (value)p.columns) + log_sum;
        loss = (value)(1 - p.smoothing) * loss + (value)p.smoothing * even;
    }
    if (p.lse) element::store(p.lse, row, most + log_sum);
    if (p.reduction != DW_LOSS_NONE) ((value *)p.partials)[row] = loss;
    else if (p.loss)
        element::store(p.loss, row, loss);
}

extern "C" __global__ void __launch_bounds__(DW_LOSS_BLOCK(LANES))
    cross_entropy_forward(const __grid_constant__ dw_cross_entropy_params p) {
    EACH_ROW(row) forward_row(p, row);
}

// ---- sums over rows, by one block ------------------------------------------------------------------------

// Returns the sum over the block's threads. A kernel calls it once for a type.
template <typename T> DEVICE T sum_over_block(T x) {
    __shared__ T shares[DW_LOSS_SUM_THREADS];
    shares[threadIdx.x] = x;
    for (int half = DW_LOSS_SUM_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) shares[threadIdx.x] += shares[threadIdx.x + half];
    }
    __syncthreads();
    return shares[0];
}

DEVICE value targets_that_count(const dw_cross_entropy_params &p) {
    long long count = 0;
    for (long long row = threadIdx.x; row < p.rows; row += DW_LOSS_SUM_THREADS) count += is_counted(p, p.target[row]);
    return (value)sum_over_block(count);
}

// The sum or mean of the losses. A mean without targets is NaN.
extern "C" __global__ void __launch_bounds__(DW_LOSS_SUM_THREADS)
    cross_entropy_total(const __grid_constant__ dw_cross_entropy_params p) {
    value sum = 0, lost = 0;
    for (long long row = threadIdx.x; row < p.rows; row += DW_LOSS_SUM_THREADS) {
        const value x = ((const value *)p.partials)[row], next = sum + x, added = next - sum;
        lost += (sum - (next - added)) + (x - added); // exactly what the addition rounded away (Knuth)
        sum = next;
    }
    sum = sum_over_block(lost == lost ? sum + lost : sum); // infinite sums have NaN there
    if (p.reduction == DW_LOSS_MEAN) sum /= targets_that_count(p);
    if (threadIdx.x == 0) element::store(p.loss, 0, sum);
}

extern "C" __global__ void __launch_bounds__(DW_LOSS_SUM_THREADS)
    cross_entropy_share(const __grid_constant__ dw_cross_entropy_params p) {
    const value count = targets_that_count(p);
    if (threadIdx.x == 0) *(value *)p.partials = element::load(p.dloss, 0) / count;
}

// ---- backward --------------------------------------------------------------------------------------------

// dx = (exp(x - lse) - smoothing / columns - (1 - smoothing) at the target) * the loss's gradient; zeros if ignored.
DEVICE void backward_row(const dw_cross_entropy_params &p, long long row) {
    const stored *from = (const stored *)p.x + row * p.x_stride;
    const long long target = target_of(p, row);
    const value lse = element::load(p.lse, row), even = (value)(p.smoothing / p.columns),
                hit = (value)(1 - p.smoothing);
    const value weight = p.reduction == DW_LOSS_MEAN ? *(const value *)p.partials
                                                     : element::load(p.dloss, p.reduction == DW_LOSS_NONE ? row : 0);
    each_vector(p.columns, [&](int column, int) {
        value x[PER_VECTOR] = {};
        if (target >= 0) {
            load_vector(from, column, p.columns, x);
#pragma unroll
            for (int j = 0; j < PER_VECTOR; j++) {
                x[j] = exponential(x[j] - lse) - even;
                if (column + j == target) x[j] -= hit;
                x[j] *= weight;
            }
        }
        store_vector((stored *)p.dx + row * p.columns, column, p.columns, x);
    });
}

extern "C" __global__ void __launch_bounds__(DW_LOSS_BLOCK(LANES))
    cross_entropy_backward(const __grid_constant__ dw_cross_entropy_params p) {
    EACH_ROW(row) backward_row(p, row);
}
