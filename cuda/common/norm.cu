// Layer norm and RMS norm along rows, forward and backward.
//
// All are bound by memory. LANES threads share a row: a warp has a short row (a block then has several), a block has a
// long one. They hold it in registers, in its own type, between its statistics and its result, and load the next row
// meanwhile, so that memory always has loads in flight; backward copies up to three long rows ahead to shared memory, where
// they begin at multiples of 16 bytes. VECTORS is 0 for rows that are too long, which are read again, from L2, in each pass. The
// variance is the mean of (x - mean)^2, so nothing cancels.
//
// Gradients of w and b are sums over rows. Each block adds its part of the rows in registers (in the workspace where
// VECTORS is 0) and writes the sums to the workspace; norm_sums adds the parts. An SM has one large block, so that there
// are few parts. Which rows a part has depends on sizes and the number of SMs alone, and nothing is
// added atomically, so results have the same bits in every run. A thread adds at most 64 rows in sequence, then up to 16
// rows of a block are added pairwise. norm_sums compensates its sums and adds 32 of them pairwise. So the error of a
// gradient is at most (64 + 4 + 5 + 3) 2^-24 times the sum of the magnitudes of its terms, plus the rounding of each term,
// in F32, for any number of rows.
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
#define MOST_ROWS (DW_NORM_MOST_ROWS * BACKWARD_ROWS) // of a block of backward

// Rows of x and dy that backward copies to shared memory ahead; 0: one row is loaded into registers ahead.
#define ROWS_AHEAD (ALIGNED && VECTORS > 0 && LANES > 32 ? DW_NORM_ROWS_AHEAD(VECTORS, BACKWARD_BLOCK) : 0)

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
#define WARPS (LANES / 32)     // of a row

extern __shared__ words dynamic[]; // rows ahead, then sums of rows

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

// Replaces each number by its sum over the row's threads. Half a warp adds each of two numbers. Rows take turns at two
// places in shared memory, so that one barrier suffices.
DEVICE void sum_terms(value (&x)[SUMS], int turn) {
    constexpr unsigned all = 0xffffffffu;
    const int lane = (int)threadIdx.x % 32;
    __shared__ value shares[2][BACKWARD_ROWS][SUMS * WARPS];
    value *of_row = shares[turn][threadIdx.x / LANES];
    const bool upper = SUMS == 2 && lane >= 16;
    value own = upper ? x[SUMS - 1] : x[0];
    if constexpr (SUMS == 2) own += __shfl_xor_sync(all, upper ? x[0] : x[SUMS - 1], 16);
#pragma unroll
    for (int distance = SUMS == 2 ? 8 : 16; distance > 0; distance /= 2) own += __shfl_xor_sync(all, own, distance);
    if constexpr (WARPS == 1) {
        x[0] = own;
        if constexpr (SUMS == 2) {
            const value other = __shfl_xor_sync(all, own, 16);
            x[0] = upper ? other : own;
            x[SUMS - 1] = upper ? own : other;
        }
    } else {
        if (lane % (32 / SUMS) == 0) of_row[upper * WARPS + threadIdx.x % LANES / 32] = own;
        row_barrier<BACKWARD_BLOCK>();
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            x[i] = of_row[i * WARPS];
#pragma unroll
            for (int warp = 1; warp < WARPS; warp++) x[i] += of_row[i * WARPS + warp];
        }
    }
}

// The rows of a thread's operands and result.
struct row_places {
    const stored *x, *dy, *addend;
    stored *result;
    DEVICE_MEMBER row_places of(const dw_norm_params &p, long long row) {
        return {row_of(p.x, p.x_stride, row), row_of(p.dy, p.dy_stride, row), row_of(p.addend, p.addend_stride, row),
                (stored *)row_of(p.result, p.result_stride, row)};
    }
    __device__ __forceinline__ void advance(const dw_norm_params &p, long long rows) {
        x += rows * p.x_stride;
        dy += rows * p.dy_stride;
        addend += rows * p.addend_stride;
        result += rows * p.result_stride;
    }
};

struct row_state {
    value mean, rstd;
    bool first; // of the thread
    int turn;   // 0 and 1 alternate
};

// With xhat the normalised x and g = dy w: dx = rstd (g - mean(g) - xhat mean(g xhat)), without mean(g) for RMS norm.
// Beyond the row dy is 0, so that nothing is added to the sums there.
DEVICE void backward_row(const dw_norm_params &p, const row_places &at_row, const row_state &row, value inverse,
                         const words *x, words *dy, words *held_w, value (*sums)[VALUES]) {
    const int columns = p.columns;
    const value mean = row.mean, rstd = row.rstd;
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
    sum_terms(means, row.turn);
    convert_again(dy);
    if constexpr (HOLDS_W) convert_again(held_w);
    // rstd mean(g xhat) and rstd mean(g)
    const value along = rstd * (means[0] * inverse), middle = rstd * (means[SUMS - 1] * inverse);
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
        add_terms(p, 0, row.first, column, given, xhat, sums[0] + at * PER_VECTOR);
        if constexpr (CENTRED) {
            value ones[PER_VECTOR];
#pragma unroll
            for (int j = 0; j < PER_VECTOR; j++) ones[j] = 1;
            add_terms(p, 1, row.first, column, given, ones, sums[SUMS - 1] + at * PER_VECTOR);
        }
    });
}

// Adds the sums of the block's rows pairwise, and writes them. Those of an odd row wait for the next turn.
DEVICE void store_partials(const dw_norm_params &p, int which, value *sums) {
    const int own = (int)threadIdx.x / LANES, lane = (int)threadIdx.x % LANES;
    if constexpr (BACKWARD_ROWS > 1) {
        auto *shares = (value(*)[VALUES][LANES])dynamic; // [BACKWARD_ROWS / 2]
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
        if constexpr (ALIGNED) { // by 16 bytes: a thread's numbers are apart from its neighbours'
            constexpr int each = (int)(16 / sizeof(value));
            struct alignas(16) group {
                value x[each];
            };
            if (!has_vector(column, p.columns)) return;
#pragma unroll
            for (int j = 0; j < PER_VECTOR; j += each) {
                group sum;
#pragma unroll
                for (int i = 0; i < each; i++) sum.x[i] = sums[at * PER_VECTOR + j + i];
                *(group *)(to + column + j) = sum;
            }
        } else {
#pragma unroll
            for (int j = 0; j < PER_VECTOR; j++)
                if (column + j < p.columns) to[column + j] = sums[at * PER_VECTOR + j];
        }
    });
}

DEVICE void copy_ahead(words *to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :
                 : "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
}

// Vectors of x and dy of the rows that a thread processes next. Each thread copies its own vectors to places of its own in
// shared memory, so that it waits for its own copies alone.
struct rows_ahead {
    const stored *x, *dy;
    int place;
    __device__ __forceinline__ words *slot(int operand, int at) const {
        return dynamic + ((place * 2 + operand) * HELD + at) * BACKWARD_BLOCK + threadIdx.x;
    }
    // Copies the row, if there is one, then turns to the row `rows` behind it.
    __device__ __forceinline__ void copy(const dw_norm_params &p, bool exists, long long rows) {
        each_vector(p.columns, [&](int column, int at) {
            if (!exists || !has_vector(column, p.columns)) return;
            copy_ahead(slot(0, at), x + column);
            copy_ahead(slot(1, at), dy + column);
        });
        asm volatile("cp.async.commit_group;" ::: "memory");
        x += rows * p.x_stride;
        dy += rows * p.dy_stride;
        place = place + 1 == ROWS_AHEAD ? 0 : place + 1;
    }
    __device__ __forceinline__ void take(words *of_x, words *of_dy) const {
        asm volatile("cp.async.wait_group %0;" ::"n"(ROWS_AHEAD > 0 ? ROWS_AHEAD - 1 : 0) : "memory");
#pragma unroll
        for (int at = 0; at < HELD; at++) of_x[at] = *slot(0, at), of_dy[at] = *slot(1, at);
    }
};

extern "C" __global__ void __launch_bounds__(BACKWARD_BLOCK, 1)
    norm_backward(const __grid_constant__ dw_norm_params p) {
    __shared__ value statistics[SUMS][MOST_ROWS];
    const int own = (int)threadIdx.x / LANES;
    const long long begin = blockIdx.x * p.part_rows, first = begin + own;
    const int rows = (int)min(p.part_rows, p.rows - begin);
    const value inverse = 1 / (value)p.columns;
    value sums[SUMS][VALUES] = {};
    words x[HELD] = {}, dy[HELD] = {}, next_x[HELD] = {}, next_dy[HELD] = {}, w[HELD];
    row_places at = row_places::of(p, first);
    rows_ahead ahead = {at.x, at.dy, 0};
    const auto load_next = [&](const row_places &of) {
        load_held(of.x, p.columns, next_x);
        load_held(of.dy, p.columns, next_dy);
        asm volatile("" ::: "memory"); // so that the compiler does not put the loads off
    };
    if constexpr (ROWS_AHEAD > 0) {
        for (int i = 0; i < ROWS_AHEAD; i++) {
            each_vector(p.columns, [&](int column, int j) {
                if (!has_vector(column, p.columns)) *ahead.slot(0, j) = *ahead.slot(1, j) = words{};
            });
            ahead.copy(p, own + i * BACKWARD_ROWS < rows, BACKWARD_ROWS);
        }
    } else if (own < rows) {
        load_next(at);
    }
    if constexpr (HOLDS_W)
        each_vector(p.columns, [&](int column, int i) { w[i] = load_weights(p.w, column, p.columns); });
    // All rows' statistics: a load of a row's would wait behind the copies of the rows after it.
    for (int i = (int)threadIdx.x; i < rows; i += BACKWARD_BLOCK) {
        statistics[0][i] = ((const value *)p.rstd)[begin + i];
        if constexpr (CENTRED) statistics[SUMS - 1][i] = ((const value *)p.mean)[begin + i];
    }
    __syncthreads();
    row_state state = {0, 0, true, 0};
#pragma unroll 1
    for (int row = own; row < rows; row += BACKWARD_ROWS) {
        if constexpr (CENTRED) state.mean = statistics[SUMS - 1][row];
        state.rstd = statistics[0][row];
        if constexpr (ROWS_AHEAD > 0) {
            ahead.take(x, dy);
            ahead.copy(p, row + ROWS_AHEAD * BACKWARD_ROWS < rows, BACKWARD_ROWS);
        } else {
#pragma unroll
            for (int i = 0; i < HELD; i++) x[i] = next_x[i], dy[i] = next_dy[i];
            row_places next = at;
            next.advance(p, BACKWARD_ROWS);
            if (row + BACKWARD_ROWS < rows) load_next(next);
        }
        backward_row(p, at, state, inverse, x, dy, w, sums);
        at.advance(p, BACKWARD_ROWS);
        state.first = false;
        state.turn ^= 1;
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
