// Layer norm and RMS norm along rows, forward and backward.
//
// All are bound by memory. LANES threads share a row: a warp has a short row (a block then has several), a block has a
// long one. They hold it in registers between its statistics and its result; VECTORS is 0 for rows that are too long,
// which are read again, from L2, in each pass. The variance is the mean of (x - mean)^2, so nothing cancels.
//
// Gradients of w and b are sums over rows. Each block adds its part of the rows in registers (in the workspace where
// VECTORS is 0) and writes the sums to the workspace; norm_sums adds the parts. Which rows a part has depends on sizes
// and the number of SMs alone, and nothing is added atomically, so results have the same bits in every run. A thread
// adds at most 64 rows in sequence, then warps of a block are added pairwise. norm_sums compensates its sums and adds
// 32 of them pairwise. So the error of a gradient is at most (64 + 3 + 5 + 3) 2^-24 times the sum of the magnitudes of
// its terms, plus the rounding of each term, in F32, for any number of rows.
//
// Statistics and sums are F32 (F64 in F64), each result is rounded once.
//
// Defines: TYPE, LANES, VECTORS, ALIGNED (row_vectors.cuh), CENTRED: 1 for layer norm, 0 for RMS norm.
//
// Bytes: forward one read of x and one write of y; backward one read of x and dy, and one write of dx.

#include "norm_params.h"
#include "row_vectors.cuh"

#define ROWS_PER_BLOCK (DW_NORM_BLOCK(LANES) / LANES)

DEVICE value root(value x) {
    if constexpr (sizeof(value) == 8) return sqrt(x);
    else
        return sqrtf(x);
}

DEVICE const stored *row_of(const void *base, long long stride, long long row) {
    return (const stored *)base + row * stride;
}

// This thread's pieces of w or b.
DEVICE void load_held(const void *vector, int columns, piece *held) {
    each_vector(columns, [&](int column, int at) {
        if (vector && VECTORS > 0) held[at] = load_piece(vector, column, columns);
    });
}

// ---- forward ---------------------------------------------------------------------------------------------

DEVICE void forward_row(const dw_norm_params &p, long long row, piece *w, piece *b) {
    const stored *from = row_of(p.x, p.x_stride, row);
    const int columns = p.columns;
    value x[VALUES], mean[1] = {0}, square[1] = {0};
    if constexpr (CENTRED) {
        each_vector(columns, [&](int column, int at) {
            value *v = x + at * PER_VECTOR;
            load_vector(from, column, columns, v);
#pragma unroll
            for (int j = 0; j < PER_VECTOR; j++) mean[0] += v[j];
        });
        sum_over_row(mean);
        mean[0] /= (value)columns;
    }
    each_vector(columns, [&](int column, int at) {
        value *v = x + at * PER_VECTOR;
        if (VECTORS == 0 || !CENTRED) load_vector(from, column, columns, v);
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) {
            v[j] -= mean[0];
            if (column + j < columns) square[0] += v[j] * v[j];
        }
    });
    sum_over_row(square);
    // If the square of the mean overflows, rstd becomes NaN, as the operation's definition says.
    const value nothing = mean[0] * mean[0] * (value)0;
    const value rstd = 1 / root(square[0] / (value)columns + (value)p.eps) + nothing;
    if (threadIdx.x % LANES == 0) {
        if (CENTRED && p.mean) element::store(p.mean, row, mean[0]);
        if (p.rstd) element::store(p.rstd, row, rstd);
    }
    if (!p.result) return;
    stored *to = (stored *)row_of(p.result, p.result_stride, row);
    each_vector(columns, [&](int column, int at) {
        value *v = x + at * PER_VECTOR;
        if constexpr (VECTORS == 0) {
            load_vector(from, column, columns, v);
            if (p.w) w[0] = load_piece(p.w, column, columns);
            if (p.b) b[0] = load_piece(p.b, column, columns);
        }
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) {
            v[j] = (VECTORS == 0 ? v[j] - mean[0] : v[j]) * rstd;
            if (p.w) v[j] *= element::load(w[at].x, j);
            if (p.b) v[j] += element::load(b[at].x, j);
        }
        store_vector(to, column, columns, v);
    });
}

extern "C" __global__ void __launch_bounds__(DW_NORM_BLOCK(LANES))
    norm_forward(const __grid_constant__ dw_norm_params p) {
    piece w[HELD] = {}, b[HELD] = {};
    load_held(p.w, p.columns, w);
    load_held(p.b, p.columns, b);
    for (long long row = (long long)blockIdx.x * ROWS_PER_BLOCK + threadIdx.x / LANES; row < p.rows;
         row += (long long)gridDim.x * ROWS_PER_BLOCK)
        forward_row(p, row, w, b);
}

// ---- backward --------------------------------------------------------------------------------------------

#define SUMS (CENTRED ? 2 : 1) // of dw, and of db

// The sums of the block's part of the rows: `which` is 0 for dw, 1 for db.
DEVICE value *partials_of(const dw_norm_params &p, int which) {
    return (value *)p.partials + (which * p.parts + blockIdx.x) * p.columns;
}

// Adds a row's terms to the sums that this thread keeps, in registers or, where VECTORS is 0, in the workspace.
DEVICE void add_terms(const dw_norm_params &p, int which, bool first, int column, const value *terms, value *sums) {
    if constexpr (VECTORS > 0) {
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) sums[j] += terms[j];
    } else {
        if (which ? !p.db : !p.dw) return;
        value *kept = partials_of(p, which) + column;
        for (int j = 0; j < PER_VECTOR && column + j < p.columns; j++) kept[j] = (first ? 0 : kept[j]) + terms[j];
    }
}

// With xhat the normalised x and g = dy w: dx = rstd (g - mean(g) - xhat mean(g xhat)), without mean(g) for RMS norm.
DEVICE void backward_row(const dw_norm_params &p, long long row, bool first, piece *w, value (*sums)[VALUES]) {
    const stored *x_row = row_of(p.x, p.x_stride, row), *dy_row = row_of(p.dy, p.dy_stride, row);
    const value rstd = element::load(p.rstd, row), mean = CENTRED ? element::load(p.mean, row) : (value)0;
    const int columns = p.columns;
    value xhat[VALUES], dy[VALUES], means[2] = {0, 0}; // of g xhat, and of g
    const auto load = [&](int column, int at) {
        value *a = xhat + at * PER_VECTOR;
        load_vector(x_row, column, columns, a);
        load_vector(dy_row, column, columns, dy + at * PER_VECTOR);
        if (VECTORS == 0 && p.w) w[0] = load_piece(p.w, column, columns);
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) a[j] = (a[j] - mean) * rstd;
    };
    const auto weighted = [&](int at, int j) {
        const value g = dy[at * PER_VECTOR + j];
        return p.w ? g * element::load(w[at].x, j) : g;
    };
    each_vector(columns, [&](int column, int at) {
        load(column, at);
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) {
            const value g = weighted(at, j);
            if (column + j < columns) means[0] += g * xhat[at * PER_VECTOR + j];
            means[1] += g;
        }
    });
    sum_over_row(means);
    const value along = means[0] / (value)columns, middle = CENTRED ? means[1] / (value)columns : (value)0;
    each_vector(columns, [&](int column, int at) {
        value dx[PER_VECTOR], terms[PER_VECTOR];
        if (VECTORS == 0) load(column, at);
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) {
            const value normal = xhat[at * PER_VECTOR + j];
            dx[j] = (weighted(at, j) - normal * along - middle) * rstd;
            terms[j] = dy[at * PER_VECTOR + j] * normal;
        }
        if (p.result) store_vector((stored *)row_of(p.result, p.result_stride, row), column, columns, dx);
        add_terms(p, 0, first, column, terms, sums[0] + at * PER_VECTOR);
        if (CENTRED) add_terms(p, 1, first, column, dy + at * PER_VECTOR, sums[SUMS - 1] + at * PER_VECTOR);
    });
}

// Writes the block's sums; those of several warps are added first.
DEVICE void store_partials(const dw_norm_params &p, int which, const value *sums) {
    value *to = partials_of(p, which);
    if constexpr (ROWS_PER_BLOCK == 1) {
        each_vector(p.columns, [&](int column, int at) {
#pragma unroll
            for (int j = 0; j < PER_VECTOR; j++)
                if (column + j < p.columns) to[column + j] = sums[at * PER_VECTOR + j];
        });
    } else {
        __shared__ value shares[ROWS_PER_BLOCK][LANES * VALUES];
        __syncthreads(); // the sums before have been read
        each_vector(p.columns, [&](int column, int at) {
#pragma unroll
            for (int j = 0; j < PER_VECTOR; j++) shares[threadIdx.x / LANES][column + j] = sums[at * PER_VECTOR + j];
        });
        __syncthreads();
        for (int column = threadIdx.x; column < p.columns; column += DW_NORM_BLOCK(LANES)) {
            value s[ROWS_PER_BLOCK];
#pragma unroll
            for (int i = 0; i < ROWS_PER_BLOCK; i++) s[i] = shares[i][column];
#pragma unroll
            for (int half = ROWS_PER_BLOCK / 2; half > 0; half /= 2)
#pragma unroll
                for (int i = 0; i < half; i++) s[i] += s[i + half];
            to[column] = s[0];
        }
    }
}

extern "C" __global__ void __launch_bounds__(DW_NORM_BLOCK(LANES))
    norm_backward(const __grid_constant__ dw_norm_params p) {
    const long long first = blockIdx.x * p.part_rows, last = min(first + p.part_rows, p.rows);
    piece w[HELD] = {};
    value sums[SUMS][VALUES] = {};
    load_held(p.w, p.columns, w);
    for (long long row = first + threadIdx.x / LANES; row < last; row += ROWS_PER_BLOCK)
        backward_row(p, row, row == first, w, sums);
    if constexpr (VECTORS > 0) {
        if (p.dw) store_partials(p, 0, sums[0]);
        if (CENTRED && p.db) store_partials(p, 1, sums[SUMS - 1]);
    }
}

// Adds the parts: 32 threads of a column each add every 32nd part, then their sums are added pairwise.
extern "C" __global__ void __launch_bounds__(DW_NORM_SUM_THREADS)
    norm_sums(const __grid_constant__ dw_norm_params p) {
    constexpr int ways = DW_NORM_SUM_THREADS / DW_NORM_SUM_COLUMNS;
    __shared__ value shares[ways][DW_NORM_SUM_COLUMNS];
    const int lane = threadIdx.x % DW_NORM_SUM_COLUMNS, way = threadIdx.x / DW_NORM_SUM_COLUMNS;
    const long long tiles = (p.columns + DW_NORM_SUM_COLUMNS - 1) / DW_NORM_SUM_COLUMNS;
    for (long long tile = blockIdx.x; tile < tiles * SUMS; tile += gridDim.x) {
        const long long which = tile / tiles, column = tile % tiles * DW_NORM_SUM_COLUMNS + lane;
        void *result = which ? p.db : p.dw;
        if (!result) continue;
        value sum = 0, lost = 0;
        for (long long part = way; part < p.parts && column < p.columns; part += ways) {
            const value x = ((const value *)p.partials)[(which * p.parts + part) * p.columns + column], next = sum + x,
                        added = next - sum;
            lost += (sum - (next - added)) + (x - added); // exactly what the addition rounded away (Knuth)
            sum = next;
        }
        __syncthreads(); // the sums of the tile before have been read
        shares[way][lane] = lost == lost ? sum + lost : sum; // infinite sums have NaN there
        __syncthreads();
        for (int half = ways / 2; half > 0; half /= 2) {
            if (way < half) shares[way][lane] += shares[way + half][lane];
            __syncthreads();
        }
        if (way == 0 && column < p.columns) element::store(result, column, shares[0][lane]);
    }
}
