// quantize of the graph, where rows of the matrix and of the values are contiguous: each number rounded to its code's
// value, by blocks with scales of one byte. Bits are those of graph_quantize.cu.
//
// A warp has a tile of 64 columns, two for each lane, and BAND rows, all of which it loads before it computes. A block's
// largest magnitude is a lane's own along the rows, and one of BLOCK / 2 lanes along the columns.
//
// Defines: TYPE, of the matrix (element_types.h); BLOCK, 16 or 32; ALONG_COLUMNS 1: blocks lie in a row; SQUARE 1: a
// block has BLOCK rows and columns; ROTATE 1: runs of 16 are rotated first; PAIRED 1: rows begin at even elements and have
// an even number of them, so that two are one access.
//
// Bytes per element: 2 written and the matrix's read, once more for a tensor scale.

#include "graph_quantize.cuh"

typedef element_of<TYPE> element;

#define LANES 32
#define BAND (ALONG_COLUMNS && !SQUARE ? 16 : BLOCK)
#define WARPS (DW_GRAPH_QUANTIZE_THREADS / LANES)

struct pair {
    float first, second;
};

struct __align__(2 * sizeof(element::stored)) stored_pair {
    element::stored first, second;
};

DEVICE float number(element::stored x) { return (float)element::load(&x, 0); }

// The tile's numbers in this lane's two columns, 0 outside of the matrix.
struct tile {
    long long top;
    long long column; // of the lane's first number
    pair x[BAND];
};

DEVICE long long tiles_across(const dw_graph_quantize_params &p) { return (p.columns + 2 * LANES - 1) / (2 * LANES); }
DEVICE long long tile_count(const dw_graph_quantize_params &p) { return (p.rows + BAND - 1) / BAND * tiles_across(p); }

DEVICE void rotate_pairs(pair *x, int stride) {
#pragma unroll
    for (int i = 0; i < DW_ROTATED_RUN; i++)
        if (!(i & stride)) {
            const pair a = x[i], b = x[i + stride];
            x[i] = {a.first + b.first, a.second + b.second};
            x[i + stride] = {a.first - b.first, a.second - b.second};
        }
}

// Rotates the runs of the tile as dw_hadamard does; a shorter last run stays.
DEVICE void rotate(const dw_graph_quantize_params &p, tile &t) {
    const unsigned signs = random_word(0, 0, 0, 0);
    if constexpr (ALONG_COLUMNS) {
        const int at = 2 * threadIdx.x % DW_ROTATED_RUN; // of the lane's first number in its run
        const bool whole = t.column - at + DW_ROTATED_RUN <= p.columns;
#pragma unroll
        for (int i = 0; i < BAND; i++) {
            pair x = t.x[i];
            if (signs >> at & 1) x.first = -x.first;
            if (signs >> (at + 1) & 1) x.second = -x.second;
            x = {x.first + x.second, x.first - x.second};
#pragma unroll
            for (int lanes = 1; lanes < DW_ROTATED_RUN / 2; lanes *= 2) {
                const pair other = {__shfl_xor_sync(0xffffffffu, x.first, lanes),
                                    __shfl_xor_sync(0xffffffffu, x.second, lanes)};
                x = threadIdx.x & lanes ? pair{other.first - x.first, other.second - x.second}
                                        : pair{x.first + other.first, x.second + other.second};
            }
            if (whole) t.x[i] = {x.first * 0.25f, x.second * 0.25f};
        }
    } else {
#pragma unroll
        for (int run = 0; run < BAND; run += DW_ROTATED_RUN) {
            if (t.top + run + DW_ROTATED_RUN > p.rows) continue;
            pair *x = t.x + run;
#pragma unroll
            for (int i = 0; i < DW_ROTATED_RUN; i++)
                if (signs >> i & 1) x[i] = {-x[i].first, -x[i].second};
            rotate_pairs(x, 1);
            rotate_pairs(x, 2);
            rotate_pairs(x, 4);
            rotate_pairs(x, 8);
#pragma unroll
            for (int i = 0; i < DW_ROTATED_RUN; i++) x[i] = {x[i].first * 0.25f, x[i].second * 0.25f};
        }
    }
}

DEVICE void load_tile(const dw_graph_quantize_params &p, long long index, tile &t) {
    const long long across = tiles_across(p);
    t.top = index / across * BAND;
    t.column = index % across * (2 * LANES) + 2 * (threadIdx.x % LANES);
    const element::stored *from = (const element::stored *)p.x + t.top * p.row_stride + t.column;
#pragma unroll
    for (int i = 0; i < BAND; i++) {
        t.x[i] = {0.f, 0.f};
        if (t.top + i >= p.rows || t.column >= p.columns) continue;
        if constexpr (PAIRED) {
            const stored_pair both = *(const stored_pair *)(from + i * p.row_stride);
            t.x[i] = {number(both.first), number(both.second)};
        } else {
            t.x[i].first = number(from[i * p.row_stride]);
            if (t.column + 1 < p.columns) t.x[i].second = number(from[i * p.row_stride + 1]);
        }
    }
    if constexpr (ROTATE) rotate(p, t);
}

DEVICE unsigned magnitude_of(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// The largest of BLOCK / 2 neighbouring lanes.
DEVICE unsigned most_of_lanes(unsigned most) {
#pragma unroll
    for (int lanes = BLOCK / 4; lanes > 0; lanes /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, lanes));
    return most;
}

DEVICE float rounded(const dw_graph_quantize_params &p, const block_scale &scale, float x, long long row, long long column) {
    const unsigned scaled = __float_as_uint(x * scale.factor);
    const unsigned magnitude = min(scaled & 0x7fffffffu, largest_bits(p.format));
    float value;
    if (p.stochastic) {
        const long long inner = ALONG_COLUMNS ? column : row, outer = ALONG_COLUMNS ? row : column;
        const long long inners = ALONG_COLUMNS ? p.columns : p.rows;
        const unsigned word = random_word((unsigned long long)p.seed[0], (unsigned long long)p.seed[p.seed_stride], p.stream,
                                          (unsigned long long)(outer * inners + inner));
        value = code_value(p.format, stochastic_code(p.format, magnitude, word));
    } else {
        // The power of two whose unit in the last place is the distance of neighbouring codes.
        const unsigned binade = max(magnitude & INFINITE, least_normal(p.format));
        const float anchor = __uint_as_float(binade + ((unsigned)(23 - p.format.fraction) << 23));
        value = __fsub_rn(__fadd_rn(__uint_as_float(magnitude), anchor), anchor);
    }
    if (scale.is_nan) return __uint_as_float(NOT_A_NUMBER);
    return __uint_as_float(__float_as_uint(value) | (scaled & 0x80000000u)) * scale.value;
}

DEVICE void store_pair(const dw_graph_quantize_params &p, long long row, long long column, pair x) {
    if (row >= p.rows || column >= p.columns) return;
    unsigned short *to = (unsigned short *)p.values + row * p.value_row_stride + column;
    const unsigned first = float_to_bf16(x.first), second = float_to_bf16(x.second);
    if constexpr (PAIRED) {
        *(unsigned *)to = first | second << 16;
    } else {
        to[0] = (unsigned short)first;
        if (column + 1 < p.columns) to[1] = (unsigned short)second;
    }
}

extern "C" __global__ void __launch_bounds__(DW_GRAPH_QUANTIZE_THREADS)
    round_blocks_amax(const __grid_constant__ dw_graph_quantize_params p) {
    const long long count = tile_count(p);
    unsigned most = 0;
    for (long long index = blockIdx.x * WARPS + threadIdx.x / LANES; index < count; index += DW_MAGNITUDES * WARPS) {
        tile t;
        load_tile(p, index, t);
#pragma unroll
        for (int i = 0; i < BAND; i++) {
            const unsigned first = magnitude_of(t.x[i].first), second = magnitude_of(t.x[i].second);
            most = max(most, max(first < INFINITE ? first : 0, second < INFINITE ? second : 0));
        }
    }
    most = most_of_block(most);
    if (threadIdx.x == 0) p.amax[blockIdx.x] = most;
}

extern "C" __global__ void __launch_bounds__(DW_GRAPH_QUANTIZE_THREADS)
    round_blocks(const __grid_constant__ dw_graph_quantize_params p) {
    const long long count = tile_count(p);
    const float tensor_scale = tensor_scale_of(p);
    if (p.tensor_scale && blockIdx.x == 0 && threadIdx.x == 0) *p.tensor_scale = tensor_scale;
    if (!p.values) return; // backward may compute the scale alone again
    for (long long index = blockIdx.x * WARPS + threadIdx.x / LANES; index < count; index += (long long)gridDim.x * WARPS) {
        tile t;
        load_tile(p, index, t);
        unsigned first = 0, second = 0;
        block_scale scales[2];
        if constexpr (SQUARE || !ALONG_COLUMNS) {
#pragma unroll
            for (int i = 0; i < BAND; i++) {
                first = max(first, magnitude_of(t.x[i].first));
                second = max(second, magnitude_of(t.x[i].second));
            }
            if constexpr (SQUARE) first = second = most_of_lanes(max(first, second));
            scales[0] = p.e8m0 ? e8m0_scale(p.format, p.rule, first) : e4m3_scale(first, tensor_scale);
            scales[1] = SQUARE   ? scales[0]
                        : p.e8m0 ? e8m0_scale(p.format, p.rule, second)
                                 : e4m3_scale(second, tensor_scale);
        }
#pragma unroll
        for (int i = 0; i < BAND; i++) {
            const long long row = t.top + i;
            if constexpr (ALONG_COLUMNS && !SQUARE) {
                first = most_of_lanes(max(magnitude_of(t.x[i].first), magnitude_of(t.x[i].second)));
                scales[0] = scales[1] = p.e8m0 ? e8m0_scale(p.format, p.rule, first) : e4m3_scale(first, tensor_scale);
            }
            store_pair(p, row, t.column,
                       {rounded(p, scales[0], t.x[i].first, row, t.column),
                        rounded(p, scales[1], t.x[i].second, row, t.column + 1)});
        }
    }
}
