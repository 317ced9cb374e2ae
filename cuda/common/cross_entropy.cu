// Cross-entropy of rows of logits with one target each, forward and backward.
//
// Both are bound by memory. LANES threads share a row: a warp has a short row (a block then has several), a block has a
// long one. Each thread reads vectors of 16 bytes, TOGETHER of them before it uses the first. Rows begin anywhere: the
// elements before the first multiple of 16 bytes and behind the last one are read one by one.
//
// Forward reads the logits once: each thread keeps the largest of its logits and the sum of exponentials relative to it,
// and scales the sum when it meets a larger one. It also stores the sums of logits and bias if it is asked to. Backward
// reads the logits once and computes probabilities again from the log-sum-exp. One block adds the losses of rows in an
// order that depends on their number alone, with compensation, so that results have the same bits in every run.
//
// A target outside of the classes is reported (data_error.h), and its row is treated as an ignored one. Statistics and
// sums are F32 (F64 in F64), each result is rounded once.
//
// If a GEMM finds the statistics of its tiles of logits, or makes their gradients (sm90/sm90_loss.cuh), no pass over logits
// runs: cross_entropy_combine combines the tiles of each row, and cross_entropy_weights computes the factors that a row's
// gradients share.
//
// Defines: TYPE of the logits, STATISTICS: type of lse, losses and their gradients, LANES (row_vectors.cuh).
//
// Bytes: forward one read of the logits; backward one read of the logits and one write of their gradient.

#include "cross_entropy_params.h"
#define VECTORS 0
#define ALIGNED 0
#include "row_vectors.cuh"

#define ROWS_PER_BLOCK (DW_LOSS_BLOCK(LANES) / LANES)
#define TOGETHER 4
// Blocks of an SM: 64 registers of a thread, so that enough loads are in flight.
#define RESIDENT (sizeof(value) == 4 ? 1024 / DW_LOSS_BLOCK(LANES) : 1)

typedef element_of<STATISTICS> statistic;

DEVICE void store_statistic(void *data, long long at, value x) {
    statistic::store(data, at, (statistic::value)x);
}

DEVICE value infinity() { return (value)__int_as_float(0x7f800000); }

// ---- vectors of a row that begins anywhere ---------------------------------------------------------------

// The elements from the last multiple of 16 bytes to the row's beginning.
DEVICE int shift_of(const void *row) { return (int)((unsigned long long)row % 16 / sizeof(stored)); }

DEVICE bool is_inside(int column, int columns) { return (unsigned)column < (unsigned)columns; }
DEVICE bool is_whole(int column, int columns) { return column >= 0 && column + PER_VECTOR <= columns; }

// A vector of which some elements may lie outside of the row: these are -infinity.
DEVICE piece load_some(const stored *row, int column, int columns) {
    piece v;
    if (is_whole(column, columns)) return *(const piece *)(row + column);
#pragma unroll
    for (int j = 0; j < PER_VECTOR; j++) {
        element::store(v.x, j, -infinity());
        if (is_inside(column + j, columns)) v.x[j] = row[column + j];
    }
    return v;
}

// Calls visit(vector, column of its first element) for each of this thread's vectors of a row. The first column may be
// negative.
template <typename VISIT> DEVICE void each_piece(const stored *row, int columns, VISIT visit) {
    const int step = LANES * PER_VECTOR;
    for (int column = (int)threadIdx.x % LANES * PER_VECTOR - shift_of(row); column < columns;
         column += TOGETHER * step) {
        if (column >= 0 && is_whole(column + (TOGETHER - 1) * step, columns)) {
            piece v[TOGETHER];
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) v[i] = *(const piece *)(row + column + i * step);
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) visit(v[i], column + i * step);
        } else {
#pragma unroll 1
            for (int i = 0; i < TOGETHER && column + i * step < columns; i++)
                visit(load_some(row, column + i * step, columns), column + i * step);
        }
    }
}

// Stores the elements of a vector that lie inside of the row. `aligned`: the row has the shift of the vectors.
DEVICE void store_some(stored *row, int column, int columns, bool aligned, const piece &v) {
    if (aligned && is_whole(column, columns)) store_at_once((piece *)(row + column), v);
    else {
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++)
            if (is_inside(column + j, columns)) row[column + j] = v.x[j];
    }
}

// ---- numbers ---------------------------------------------------------------------------------------------

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
    return target != p.ignored && target >= 0 && target < p.classes;
}

// The target of a row, or -1 if the row is ignored. Reports a target outside of the classes.
DEVICE long long target_of(const dw_cross_entropy_params &p, long long row) {
    const long long target = p.target[row];
    if (is_counted(p, target)) return target;
    if (target != p.ignored) report(p.error, DW_DATA_INDEX);
    return -1;
}

#define EACH_ROW(row)                                                                                                \
    for (long long row = (long long)blockIdx.x * ROWS_PER_BLOCK + threadIdx.x / LANES; row < p.rows;                 \
         row += (long long)gridDim.x * ROWS_PER_BLOCK)

// ---- forward ---------------------------------------------------------------------------------------------

// The logit of one column, for the few that are read by themselves. Where sums with the bias have been stored (p.dx),
// they are read.
DEVICE value logit_at(const dw_cross_entropy_params &p, const stored *row, long long column) {
    const value x = element::load(row, column);
    return p.bias && !p.dx ? x + element::load(p.bias, column) : x;
}

DEVICE void load_logits(const dw_cross_entropy_params &p, const piece &v, int column, value *x) {
    const words w = words_of(v);
#pragma unroll
    for (int j = 0; j < PER_VECTOR; j++) x[j] = element_in(w, j);
    if (!p.bias) return;
#pragma unroll
    for (int j = 0; j < PER_VECTOR; j++)
        if (is_inside(column + j, p.columns)) x[j] += element::load(p.bias, column + j);
}

// Stores a row's results. `most`: the largest logit; sums: of exponentials relative to it, and of logits. logit(target) is
// called unless the row is ignored.
template <typename LOGIT>
DEVICE void finish_row(const dw_cross_entropy_params &p, long long row, value most, const value *sums, LOGIT logit) {
    const long long target = target_of(p, row);
    const value log_sum = logarithm(sums[0]);
    value loss = 0;
    if (target >= 0) loss = (most - logit(target)) + log_sum;
    if (target >= 0 && p.smoothing != 0) {
        const value even = (most - sums[1] / (value)p.columns) + log_sum;
        loss = (value)(1 - p.smoothing) * loss + (value)p.smoothing * even;
    }
    if (p.lse) store_statistic(p.lse, row, most + log_sum);
    if (p.reduction != DW_LOSS_NONE) ((value *)p.partials)[row] = loss;
    else if (p.loss)
        store_statistic(p.loss, row, loss);
}

// The largest of the logits of a thread so far, the sum of exponentials relative to it, and the sum of the logits.
struct row_statistics {
    value largest, sum, plain_sum;
};

DEVICE float larger(float a, float b) { return fmaxf(a, b); } // b where a is NaN
DEVICE double larger(double a, double b) { return fmax(a, b); }

DEVICE void observe(row_statistics &of, const value *x) {
    value most = -infinity(), part[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < PER_VECTOR; j++) most = larger(x[j], most);
    if (most > of.largest) {
        of.sum *= exponential(of.largest - most);
        of.largest = most;
    }
    const value shift = of.largest == -infinity() ? (value)0 : of.largest; // -inf - -inf would be NaN
#pragma unroll
    for (int j = 0; j < PER_VECTOR; j++) part[j & 1] += exponential(x[j] - shift);
    of.sum += part[0] + part[1];
}

// The statistics of logits that are neither changed nor added up. The next vectors are loaded before those here are used.
DEVICE void observe_row(row_statistics &of, const stored *row, int columns) {
    const int step = LANES * PER_VECTOR, last = (TOGETHER - 1) * step;
    int column = (int)threadIdx.x % LANES * PER_VECTOR - shift_of(row);
    words next[TOGETHER];
    bool together = false; // `next` has the vectors at `column`
    const auto load = [&]() {
        together = column >= 0 && is_whole(column + last, columns);
        if (!together) return;
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) next[i] = *(const words *)(row + column + i * step);
    };
    const auto observe_words = [&](const words &w) {
        value x[PER_VECTOR];
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) x[j] = element_in(w, j);
        observe(of, x);
    };
    for (load(); column < columns;) {
        if (together) {
            words v[TOGETHER];
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) v[i] = next[i];
            column += TOGETHER * step;
            load();
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) observe_words(v[i]);
        } else {
            observe_words(words_of(load_some(row, column, columns)));
            column += step;
            load();
        }
    }
}

// Finds the same statistics if there is a bias, or if the logits are stored or added up.
DEVICE void observe_changed_row(const dw_cross_entropy_params &p, row_statistics &of, const stored *from) {
    each_piece(from, p.columns, [&](const piece &v, int column) {
        value x[PER_VECTOR];
        load_logits(p, v, column, x);
        if (p.dx) {
            piece made;
#pragma unroll
            for (int j = 0; j < PER_VECTOR; j++) {
                element::store(made.x, j, x[j]);
                x[j] = element::load(made.x, j);
            }
            store_some((stored *)from, column, p.columns, true, made);
        }
        if (p.smoothing != 0) {
#pragma unroll
            for (int j = 0; j < PER_VECTOR; j++)
                if (is_inside(column + j, p.columns)) of.plain_sum += x[j];
        }
        observe(of, x);
    });
}

DEVICE void forward_row(const dw_cross_entropy_params &p, long long row) {
    const stored *from = (const stored *)p.x + row * p.x_stride;
    row_statistics of = {-infinity(), 0, 0};
    if (p.bias || p.dx || p.smoothing != 0) observe_changed_row(p, of, from);
    else observe_row(of, from, p.columns);
    const value largest = of.largest;
    value sums[2] = {of.sum, of.plain_sum};
    value most = max_over_row(largest);
    if (most == -infinity()) most = 0;
    if (largest != most) sums[0] *= exponential(largest - most);
    sum_over_row(sums);
    if (LANES == 32) __syncwarp(); // stored logits are visible to the row's first thread
    if (threadIdx.x % LANES != 0) return;
    finish_row(p, row, most, sums, [&](long long target) { return logit_at(p, from, target); });
}

extern "C" __global__ void __launch_bounds__(DW_LOSS_BLOCK(LANES), RESIDENT)
    cross_entropy_forward(const __grid_constant__ dw_cross_entropy_params p) {
    EACH_ROW(row) forward_row(p, row);
}

// ---- forward, from the statistics of tiles -------------------------------------------------------------------

#if TYPE == DW_ELEMENT_BF16 || TYPE == DW_ELEMENT_F16

struct tile_sums {
    float largest, sums[2]; // as forward_row's
};

DEVICE void add_tiles(tile_sums &a, float largest, float sum, float logits) {
    if (largest > a.largest) {
        a.sums[0] *= exponential(a.largest - largest);
        a.largest = largest;
    }
    // The sum of a tile whose logits are all -infinity is 0, or NaN.
    a.sums[0] += largest == -infinity() ? sum : sum * exponential(largest - a.largest);
    a.sums[1] += logits;
}

// A block has 32 rows, one for each lane; its warps divide the tiles among them.
extern "C" __global__ void __launch_bounds__(DW_LOSS_COMBINE_THREADS)
    cross_entropy_combine(const __grid_constant__ dw_cross_entropy_tile_params q) {
    const int warps = DW_LOSS_COMBINE_THREADS / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const dw_cross_entropy_params &p = q.row;
    __shared__ tile_sums shares[warps][32];
    for (long long first = (long long)blockIdx.x * 32; first < p.rows; first += (long long)gridDim.x * 32) {
        const long long row = first + lane;
        tile_sums own = {-infinity(), {0, 0}};
        if (row < p.rows)
#pragma unroll 4
            for (int tile = warp; tile < q.tiles; tile += warps) {
                const long long at = tile * p.rows + row;
                add_tiles(own, q.loss.largest[at], q.loss.sums[at], q.loss.logit_sums ? q.loss.logit_sums[at] : 0.f);
            }
        shares[warp][lane] = own;
        __syncthreads();
        if (warp == 0 && row < p.rows) {
            for (int i = 1; i < warps; i++) add_tiles(own, shares[i][lane].largest, shares[i][lane].sums[0], shares[i][lane].sums[1]);
            finish_row(p, row, own.largest == -infinity() ? 0.f : own.largest, own.sums,
                       [&](long long) { return q.loss.at_target[row]; });
        }
        __syncthreads(); // the shares have been read
    }
}

#endif

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
    if (threadIdx.x == 0) store_statistic(p.loss, 0, sum);
}

extern "C" __global__ void __launch_bounds__(DW_LOSS_SUM_THREADS)
    cross_entropy_share(const __grid_constant__ dw_cross_entropy_params p) {
    const value count = targets_that_count(p);
    if (threadIdx.x == 0) *(value *)p.partials = (value)statistic::load(p.dloss, 0) / count;
}

// ---- backward --------------------------------------------------------------------------------------------

DEVICE void clear_row(stored *to, int columns) {
    for (int column = (int)threadIdx.x % LANES * PER_VECTOR - shift_of(to); column < columns;
         column += LANES * PER_VECTOR)
        store_some(to, column, columns, true, piece{});
}

// The gradient of a row's loss.
DEVICE value weight_of(const dw_cross_entropy_params &p, long long row) {
    if (p.reduction == DW_LOSS_MEAN) return *(const value *)p.partials;
    return (value)statistic::load(p.dloss, p.reduction == DW_LOSS_NONE ? row : 0);
}

// dx = (exp(x - lse) - smoothing / classes - (1 - smoothing) at the target) * the loss's gradient; zeros if ignored.
DEVICE void backward_row(const dw_cross_entropy_params &p, long long row) {
    const stored *from = (const stored *)p.x + row * p.x_stride;
    stored *to = (stored *)p.dx + row * p.dx_stride;
    const long long target = target_of(p, row);
    if (target < 0) return clear_row(to, p.columns);
    const bool aligned = shift_of(to) == shift_of(from);
    const int at = (int)(target - p.first);
    const value lse = (value)statistic::load(p.lse, row), even = (value)(p.smoothing / p.classes),
                hit = (value)(1 - p.smoothing), weight = weight_of(p, row);
    each_piece(from, p.columns, [&](const piece &v, int column) {
        value x[PER_VECTOR];
        piece made;
        load_logits(p, v, column, x);
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) x[j] = exponential(x[j] - lse) - even;
        if (is_inside(at - column, PER_VECTOR))
#pragma unroll
            for (int j = 0; j < PER_VECTOR; j++)
                if (column + j == at) x[j] -= hit;
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) element::store(made.x, j, x[j] * weight);
        store_some(to, column, p.columns, aligned, made);
    });
}

extern "C" __global__ void __launch_bounds__(DW_LOSS_BLOCK(LANES), RESIDENT)
    cross_entropy_backward(const __grid_constant__ dw_cross_entropy_params p) {
    EACH_ROW(row) backward_row(p, row);
}

#if TYPE == DW_ELEMENT_BF16 || TYPE == DW_ELEMENT_F16

// Computes the factors that the gradients of a row share, for a GEMM that makes the gradients.
extern "C" __global__ void __launch_bounds__(DW_LOSS_COMBINE_THREADS)
    cross_entropy_weights(const __grid_constant__ dw_cross_entropy_tile_params q) {
    const dw_cross_entropy_params &p = q.row;
    const long long step = (long long)gridDim.x * DW_LOSS_COMBINE_THREADS;
    for (long long row = (long long)blockIdx.x * DW_LOSS_COMBINE_THREADS + threadIdx.x; row < p.rows; row += step) {
        const long long target = target_of(p, row);
        const float weight = weight_of(p, row);
        q.weights[row] = {(float)statistic::load(p.lse, row) * 1.4426950408889634f, weight,
                          (float)(p.smoothing / p.classes) * weight, target < 0 ? DW_SM90_LOSS_IGNORED : (int)target};
    }
}

#endif

// ---- sums over blocks of classes -------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(DW_LOSS_SUM_THREADS)
    cross_entropy_round(const __grid_constant__ dw_cross_entropy_round_params p) {
    const long long step = (long long)gridDim.x * DW_LOSS_SUM_THREADS;
    for (long long i = (long long)blockIdx.x * DW_LOSS_SUM_THREADS + threadIdx.x; i < p.count; i += step)
        element::store(p.result, i, ((const value *)p.sums)[i]);
}
