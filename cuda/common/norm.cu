// Layer norm and RMS norm along rows, forward and backward.
//
// All are bound by memory. LANES threads share a row: a warp has a short row (a block then has several), a block has a
// long one. They hold it in registers, in its own type, between its statistics and its result, and load the next row
// meanwhile, so that memory always has loads in flight. VECTORS is 0 for rows that are too long, which are read again,
// from L2, in each pass. The variance is the mean of (x - mean)^2, so nothing cancels.
//
// Gradients of w and b are sums over rows. Each block adds its part of the rows in registers (in the workspace where
// VECTORS is 0) and writes the sums to the workspace; norm_sums adds the parts. An SM has one large block, so that there
// are few parts. Which rows a part has depends on sizes and the number of SMs alone, and nothing is added atomically, so
// results have the same bits in every run. A thread adds at most 64 rows in sequence, then up to 16 rows of a block are
// added pairwise. norm_sums compensates its sums and adds 32 of them pairwise. So the error of a gradient is at most
// (64 + 4 + 5 + 3) 2^-24 times the sum of the magnitudes of its terms, plus the rounding of each term, in F32, for any
// number of rows.
//
// Statistics and sums are F32 (F64 in F64), each result is rounded once.
//
// Defines: TYPE, LANES, VECTORS, ALIGNED, FULL (row_vectors.cuh), CENTRED: 1 for layer norm, 0 for RMS norm; ADDS: 1 if an
// addend of y's or dx's shape is added to it before it is rounded.
//
// Bytes: forward one read of x and one write of y; backward one read of x and dy, and one write of dx; in
// both one read of the addend.

#include "norm_params.h"
#include "row_vectors.cuh"

#define ROWS_PER_BLOCK (DW_NORM_BLOCK(LANES) / LANES)
#define BACKWARD_BLOCK DW_NORM_BACKWARD_BLOCK(LANES, CENTRED)
#define BACKWARD_ROWS (BACKWARD_BLOCK / LANES)

// Blocks of forward on an SM, which bound the registers of a thread: 64.
#define IS_SMALL (sizeof(value) == 4 && ALIGNED && LANES <= 256)
#define FORWARD_BLOCKS (!IS_SMALL || HELD > 3 ? 1 : DW_NORM_FORWARD_BLOCKS(LANES))

// Whether a thread of backward holds its vectors of w, which are otherwise read from L1 for each row: registers are for rows
// in flight, xhat and sums.
#define HOLDS_W (VECTORS > 0 && VECTORS <= (CENTRED && ADDS ? 1 : 2) && sizeof(stored) == 2)

DEVICE value root(value x) {
    if constexpr (sizeof(value) == 8) return sqrt(x);
    else
        return sqrtf(x);
}

DEVICE const stored *row_of(const void *base, long long stride, long long row) {
    return (const stored *)base + row * stride;
}

DEVICE words load_words(const void *row, int column, int columns) {
    words v = {};
    if constexpr (ALIGNED) {
        if (has_vector(column, columns)) v = *(const words *)((const stored *)row + column);
    } else {
        v = words_of(load_piece(row, column, columns));
    }
    return v;
}

// A vector of w. Without w all numbers are 1, so that no product needs a branch.
DEVICE words load_weights(const void *w, int column, int columns) {
    constexpr unsigned one = TYPE == DW_ELEMENT_BF16   ? 0x3f803f80u
                             : TYPE == DW_ELEMENT_F16 ? 0x3c003c00u
                             : TYPE == DW_ELEMENT_F32 ? 0x3f800000u
                                                      : 0x3ff00000u;
    words v = {{TYPE == DW_ELEMENT_F64 ? 0 : one, one, TYPE == DW_ELEMENT_F64 ? 0 : one, one}};
    if (w) v = load_words(w, column, columns);
    return v;
}

// This thread's vectors of a row; none where VECTORS is 0.
DEVICE void load_held(const void *from, int columns, words *held) {
    each_vector(columns, [&](int column, int at) {
        if (VECTORS > 0) held[at] = load_words(from, column, columns);
    });
}

// The values of a vector, from the vectors held or else from memory.
DEVICE void take(const words *held, const void *row, int column, int columns, int at, value *values) {
    if constexpr (VECTORS == 0) {
        load_vector(row, column, columns, values);
    } else {
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) values[j] = element_in(held[at], j);
    }
}

// Hides that the vectors held keep their values, so that the compiler converts them again in each pass instead of
// keeping the results in twice as many registers.
DEVICE void convert_again(words *held) {
    if constexpr (VECTORS > 0 && sizeof(stored) == 2)
#pragma unroll
        for (int i = 0; i < HELD; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) asm volatile("" : "+r"(held[i].x[j]));
}

// True if element j of the vector at `column` is in the row; rows are whole vectors where ALIGNED.
DEVICE bool in_row(int column, int j, int columns) { return ALIGNED ? has_vector(column, columns) : column + j < columns; }

// x - mean; RMS norm has no mean.
DEVICE value centred(value x, value mean) { return CENTRED ? x - mean : x; }

// Adds the addend's vector to a result's. A thread reads a vector before it writes the result there.
DEVICE void add_addend(const stored *row, int columns, const words *held, int column, int at, value *result) {
    if constexpr (ADDS) {
        value more[PER_VECTOR];
        take(held, row, column, columns, at, more);
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) result[j] += more[j];
    }
}

// ---- forward ---------------------------------------------------------------------------------------------

DEVICE void forward_row(const dw_norm_params &p, long long row, words *x) {
    const stored *from = row_of(p.x, p.x_stride, row);
    const int columns = p.columns;
    value v[PER_VECTOR], mean[1] = {0}, square[1] = {0};
    words addend[HELD]; // loaded long before it is needed
    const stored *addend_row = row_of(p.addend, p.addend_stride, row);
    if constexpr (ADDS)
        if (p.result) load_held(addend_row, columns, addend);
    if constexpr (CENTRED) {
        each_vector(columns, [&](int column, int at) {
            take(x, from, column, columns, at, v);
#pragma unroll
            for (int j = 0; j < PER_VECTOR; j++) mean[0] += v[j];
        });
        sum_over_row(mean);
        mean[0] /= (value)columns;
        convert_again(x);
    }
    each_vector(columns, [&](int column, int at) {
        take(x, from, column, columns, at, v);
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++)
            if (!CENTRED || in_row(column, j, columns)) square[0] += centred(v[j], mean[0]) * centred(v[j], mean[0]);
    });
    sum_over_row(square);
    convert_again(x);
    // If the square of the mean overflows, rstd becomes NaN, as the operation's definition says.
    const value nothing = mean[0] * mean[0] * (value)0;
    const value rstd = 1 / root(square[0] / (value)columns + (value)p.eps) + nothing;
    if (threadIdx.x % LANES == 0) {
        if (CENTRED && p.mean) ((value *)p.mean)[row] = mean[0];
        if (p.rstd) ((value *)p.rstd)[row] = rstd;
    }
    if (!p.result) return;
    stored *to = (stored *)row_of(p.result, p.result_stride, row);
    each_vector(columns, [&](int column, int at) {
        take(x, from, column, columns, at, v);
        const words w = load_weights(p.w, column, columns); // from L1: registers are for rows in flight
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) v[j] = centred(v[j], mean[0]) * rstd * element_in(w, j);
        if (CENTRED && p.b) {
            const words b = load_words(p.b, column, columns);
#pragma unroll
            for (int j = 0; j < PER_VECTOR; j++) v[j] += element_in(b, j);
        }
        add_addend(addend_row, columns, addend, column, at, v);
        store_vector(to, column, columns, v);
    });
}

extern "C" __global__ void __launch_bounds__(DW_NORM_BLOCK(LANES), FORWARD_BLOCKS)
    norm_forward(const __grid_constant__ dw_norm_params p) {
    const long long step = (long long)gridDim.x * ROWS_PER_BLOCK;
    long long row = (long long)blockIdx.x * ROWS_PER_BLOCK + threadIdx.x / LANES;
    words x[HELD] = {}, next[HELD] = {};
    if (row < p.rows) load_held(row_of(p.x, p.x_stride, row), p.columns, next);
    for (; row < p.rows; row += step) {
#pragma unroll
        for (int i = 0; i < HELD; i++) x[i] = next[i];
        if (row + step < p.rows) load_held(row_of(p.x, p.x_stride, row + step), p.columns, next);
        forward_row(p, row, x);
    }
}

// ---- backward --------------------------------------------------------------------------------------------

#define SUMS (CENTRED ? 2 : 1) // of dw, and of db

// The sums of the block's part of the rows: `which` is 0 for dw, 1 for db.
DEVICE value *partials_of(const dw_norm_params &p, int which) {
    return (value *)p.partials + (which * p.parts + blockIdx.x) * p.columns;
}

// Adds a row's terms a b to the sums that this thread keeps, in registers or, where VECTORS is 0, in the workspace.
DEVICE void add_terms(const dw_norm_params &p, int which, bool first, int column, const value *a, const value *b,
                      value *sums) {
    if constexpr (VECTORS > 0) {
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) sums[j] += a[j] * b[j];
    } else {
        if (which ? !p.db : !p.dw) return;
        value *kept = partials_of(p, which) + column;
        for (int j = 0; j < PER_VECTOR && column + j < p.columns; j++) kept[j] = (first ? 0 : kept[j]) + a[j] * b[j];
    }
}

// The rows of a thread's operands and results, and the statistics, of one row. They advance together, without products.
struct row_places {
    const stored *x, *dy, *addend;
    stored *result;
    const value *mean, *rstd;
    DEVICE_MEMBER row_places of(const dw_norm_params &p, long long row) {
        return {row_of(p.x, p.x_stride, row),
                row_of(p.dy, p.dy_stride, row),
                row_of(p.addend, p.addend_stride, row),
                (stored *)row_of(p.result, p.result_stride, row),
                (const value *)p.mean + row,
                (const value *)p.rstd + row};
    }
    __device__ __forceinline__ void advance(const dw_norm_params &p) {
        x += BACKWARD_ROWS * p.x_stride;
        dy += BACKWARD_ROWS * p.dy_stride;
        addend += BACKWARD_ROWS * p.addend_stride;
        result += BACKWARD_ROWS * p.result_stride;
        mean += BACKWARD_ROWS;
        rstd += BACKWARD_ROWS;
    }
};

// With xhat the normalised x and g = dy w: dx = rstd (g - mean(g) - xhat mean(g xhat)), without mean(g) for RMS norm.
// Beyond the row dy is 0, so that nothing is added to the sums there.
DEVICE void backward_row(const dw_norm_params &p, const row_places &at_row, bool first, value mean, value rstd,
                         const words *x, words *dy, const words *held_w, value (*sums)[VALUES]) {
    const int columns = p.columns;
    value xhats[VALUES], given[PER_VECTOR], means[SUMS] = {}; // of g xhat, and of g
    words w, addend[HELD];
    if constexpr (ADDS)
        if (p.result) load_held(at_row.addend, columns, addend);
    const auto load = [&](int column, int at) {
        take(dy, at_row.dy, column, columns, at, given);
        if constexpr (HOLDS_W) w = held_w[at];
        else
            w = load_weights(p.w, column, columns);
    };
    const auto weighted = [&](int j) { return given[j] * element_in(w, j); };
    const auto normalise = [&](int column, int at) {
        value *xhat = xhats + at * PER_VECTOR;
        take(x, at_row.x, column, columns, at, xhat);
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) xhat[j] = centred(xhat[j], mean) * rstd;
    };
    each_vector(columns, [&](int column, int at) {
        const value *xhat = xhats + at * PER_VECTOR;
        load(column, at);
        normalise(column, at);
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) {
            const value g = weighted(j);
            means[0] += g * xhat[j];
            if (CENTRED) means[SUMS - 1] += g;
        }
    });
    sum_over_row<BACKWARD_BLOCK>(means);
    convert_again(dy);
    // rstd mean(g xhat) and rstd mean(g)
    const value along = rstd * (means[0] / (value)columns), middle = rstd * (means[SUMS - 1] / (value)columns);
    each_vector(columns, [&](int column, int at) {
        const value *xhat = xhats + at * PER_VECTOR;
        load(column, at);
        if constexpr (VECTORS == 0) normalise(column, at);
        if (p.result) {
            value dx[PER_VECTOR];
#pragma unroll
            for (int j = 0; j < PER_VECTOR; j++) dx[j] = weighted(j) * rstd - centred(xhat[j] * along, -middle);
            add_addend(at_row.addend, columns, addend, column, at, dx);
            store_vector(at_row.result, column, columns, dx);
        }
        add_terms(p, 0, first, column, given, xhat, sums[0] + at * PER_VECTOR);
        if constexpr (CENTRED) {
            value ones[PER_VECTOR];
#pragma unroll
            for (int j = 0; j < PER_VECTOR; j++) ones[j] = 1;
            add_terms(p, 1, first, column, given, ones, sums[SUMS - 1] + at * PER_VECTOR);
        }
    });
}

// Adds the sums of the block's rows pairwise, and writes them. Those of an odd row wait for the next turn.
DEVICE void store_partials(const dw_norm_params &p, int which, value *sums) {
    const int own = (int)threadIdx.x / LANES, lane = (int)threadIdx.x % LANES;
    if constexpr (BACKWARD_ROWS > 1) {
        __shared__ value shares[BACKWARD_ROWS > 1 ? BACKWARD_ROWS / 2 : 1][VALUES][LANES];
#pragma unroll
        for (int count = BACKWARD_ROWS; count > 1; count = (count + 1) / 2) {
            const int half = (count + 1) / 2;
            __syncthreads(); // the sums before have been read
            if (own >= half && own < count)
#pragma unroll
                for (int j = 0; j < VALUES; j++) shares[own - half][j][lane] = sums[j];
            __syncthreads();
            if (own < count - half)
#pragma unroll
                for (int j = 0; j < VALUES; j++) sums[j] += shares[own][j][lane];
        }
    }
    if (own > 0) return;
    value *to = partials_of(p, which);
    each_vector(p.columns, [&](int column, int at) {
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++)
            if (column + j < p.columns) to[column + j] = sums[at * PER_VECTOR + j];
    });
}

extern "C" __global__ void __launch_bounds__(BACKWARD_BLOCK, 1)
    norm_backward(const __grid_constant__ dw_norm_params p) {
    const long long first = blockIdx.x * p.part_rows, last = min(first + p.part_rows, p.rows);
    const int begin = (int)threadIdx.x / LANES, rows = (int)(last - first);
    value sums[SUMS][VALUES] = {};
    words x[HELD] = {}, dy[HELD] = {}, next_x[HELD] = {}, next_dy[HELD] = {};
    value next_mean = 0, next_rstd = 0;
    words w[HELD];
    if constexpr (HOLDS_W)
        each_vector(p.columns, [&](int column, int at) { w[at] = load_weights(p.w, column, p.columns); });
    row_places at = row_places::of(p, first + begin), next = at;
    const auto load_next = [&]() {
        if (CENTRED) next_mean = *next.mean;
        next_rstd = *next.rstd;
        load_held(next.x, p.columns, next_x);
        load_held(next.dy, p.columns, next_dy);
        asm volatile("" ::: "memory"); // so that the compiler does not put the loads off
    };
    if (begin < rows) load_next();
    for (int row = begin; row < rows; row += BACKWARD_ROWS, at.advance(p)) {
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            x[i] = next_x[i];
            dy[i] = next_dy[i];
        }
        const value mean = next_mean, rstd = next_rstd;
        next.advance(p);
        if (row + BACKWARD_ROWS < rows) load_next();
        backward_row(p, at, row == 0, mean, rstd, x, dy, w, sums);
    }
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
