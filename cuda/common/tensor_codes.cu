// FP8 codes of a matrix with one scale for all of it, in both orientations, and a product of such codes without tensor
// cores. kernel/quantization.h has the definition of the codes (dw__quantize_whole_codes), which are the same bit for bit.
//
// quantize_tensor_amax finds the largest finite magnitude, in parts; quantize_tensor_codes reads the matrix again and
// writes its codes, and the codes of its transpose. Bytes per element of BF16: 2 read, then 2 read, 1 written for each
// orientation.
//
// A block writes a tile of 128 x 128. The codes of a row leave as they are computed, 8 of a thread in one store, and are
// kept in shared memory, from which each thread takes 4 columns of 16 rows, transposes them in registers, and stores 16
// bytes of each column. Words of a row are permuted by the row's group of 16, so that neither access has a bank conflict.
//
// Defines: TYPE, of the matrix (element_types.h); E5M2: 1, else E4M3; WHOLE: 1 if the matrix has contiguous rows of whole vectors of
// 8 elements, which begin at multiples of 16 bytes. For the product: RESULT, CODES_A, CODES_B (0: E4M3,
// 1: E5M2).

#include "tensor_codes_params.h"
#include "tensor_types.cuh"

typedef unsigned short uint16;

#define INFINITE 0x7f800000u
#define NAN_CODE 0x7fu

#ifdef TYPE
typedef element_of<TYPE> element;
typedef element::stored stored;

#define THREADS DW_TENSOR_CODES_THREADS
#define TILE DW_TENSOR_CODES_TILE
#define VECTOR 8 // elements of a thread at a time

struct alignas(16) piece {
    stored x[VECTOR];
};

// Conversions of F16 give one NaN for all; its sign is restored.
DEVICE float load_element(const void *data, long long at) {
    const float x = (float)element::load(data, at);
    if constexpr (TYPE == DW_ELEMENT_F16)
        if (x != x) return __uint_as_float(0x7fc00000u | ((unsigned)((const unsigned short *)data)[at] & 0x8000u) << 16);
    return x;
}

DEVICE void load_row(const dw_tensor_codes_params &p, long long row, long long column, float (&x)[VECTOR]) {
    if constexpr (WHOLE) {
        if (row < p.rows && column < p.columns) {
            const piece v = *(const piece *)((const stored *)p.x + row * p.row_stride + column);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) x[i] = load_element(v.x, i);
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        const bool inside = !WHOLE && row < p.rows && column + i < p.columns;
        x[i] = inside ? load_element(p.x, row * p.row_stride + (column + i) * p.column_stride) : 0.f;
    }
}

DEVICE unsigned most_of_block(unsigned x) {
    __shared__ unsigned warps[THREADS / 32];
    x = __reduce_max_sync(0xffffffffu, x);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    for (int i = 0; i < THREADS / 32; i++) x = max(x, warps[i]);
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_tensor_amax(const __grid_constant__ dw_tensor_codes_params p) {
    const long long vectors = (p.columns + VECTOR - 1) / VECTOR, count = p.rows * vectors;
    unsigned most = 0;
    for (long long e = (long long)blockIdx.x * THREADS + threadIdx.x; e < count; e += (long long)gridDim.x * THREADS) {
        float x[VECTOR];
        load_row(p, e / vectors, e % vectors * VECTOR, x);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            const unsigned magnitude = __float_as_uint(x[i]) & 0x7fffffffu;
            if (magnitude < INFINITE) most = max(most, magnitude);
        }
    }
    most = most_of_block(most);
    if (threadIdx.x == 0) p.magnitudes[blockIdx.x] = most;
}

// The code of an infinity or a NaN in the place of what the conversion made of it: infinities become NaN where the format
// has none, and NaNs keep their sign.
DEVICE unsigned special_code(float x, unsigned code) {
    const unsigned bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
    if (magnitude < INFINITE) return code;
    return (bits >> 24 & 0x80u) | (E5M2 && magnitude == INFINITE ? 0x7cu : NAN_CODE);
}

// The codes of two numbers over the scale, the first in the low byte. The quotient of a finite number is at most the
// format's largest one, up to rounding.
DEVICE unsigned encode(float low, float high, float scale) {
    uint16 pair;
    if constexpr (E5M2)
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high / scale), "f"(low / scale));
    else
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high / scale), "f"(low / scale));
    return special_code(low, pair & 0xffu) | special_code(high, pair >> 8) << 8;
}

struct alignas(8) eight_codes {
    unsigned low, high;
};
struct alignas(16) sixteen_codes {
    unsigned x[4];
};

DEVICE int word_at(int row, int word) { return row * (TILE / 4) + (word ^ ((row >> 4 & 7) << 2)); }

// Transposes 4 x 4 bytes.
DEVICE void transpose(unsigned (&x)[4]) {
    const unsigned a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[2], x[3], 0x5140),
                   c = __byte_perm(x[0], x[1], 0x7362), d = __byte_perm(x[2], x[3], 0x7362);
    x[0] = __byte_perm(a, b, 0x5410);
    x[1] = __byte_perm(a, b, 0x7632);
    x[2] = __byte_perm(c, d, 0x5410);
    x[3] = __byte_perm(c, d, 0x7632);
}

DEVICE void store_turned(const dw_tensor_codes_params &p, const unsigned *tile, long long row, long long column) {
    const int group = (int)threadIdx.x % 8, word = (int)threadIdx.x / 8;
    sixteen_codes columns[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        unsigned x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = tile[word_at(16 * group + 4 * i + j, word)];
        transpose(x);
#pragma unroll
        for (int j = 0; j < 4; j++) columns[j].x[i] = x[j];
    }
    const long long first = row + 16 * group;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const long long c = column + 4 * word + j;
        if (c >= p.columns || first >= p.rows) continue;
        unsigned char *to = p.turned + c * p.rows + first;
        if (WHOLE && p.rows % 16 == 0) {
            *(sixteen_codes *)to = columns[j];
            continue;
        }
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (first + i < p.rows) to[i] = (unsigned char)(columns[j].x[i / 4] >> i % 4 * 8);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_tensor_codes(const __grid_constant__ dw_tensor_codes_params p) {
    __shared__ alignas(16) unsigned tile[TILE * TILE / 4];
    unsigned most = 0;
    for (int i = (int)threadIdx.x; i < p.parts; i += THREADS) most = max(most, p.magnitudes[i]);
    const float amax = __uint_as_float(most_of_block(most)), largest = E5M2 ? 57344.f : 448.f;
    const float scale = amax > 0.f ? fmaxf(amax / largest, 1.175494351e-38f) : 1.f;
    if (p.scale && blockIdx.x == 0 && threadIdx.x == 0) *p.scale = scale;
    const long long across = (p.columns + TILE - 1) / TILE, tiles = across * ((p.rows + TILE - 1) / TILE);
    for (long long t = blockIdx.x; t < tiles; t += gridDim.x) {
        const long long row = t / across * TILE, column = t % across * TILE;
        const int vector = (int)threadIdx.x % (TILE / VECTOR);
#pragma unroll 4
        for (int r = (int)threadIdx.x / (TILE / VECTOR); r < TILE; r += THREADS / (TILE / VECTOR)) {
            float x[VECTOR];
            const long long c = column + vector * VECTOR;
            load_row(p, row + r, c, x);
            const eight_codes made = {encode(x[0], x[1], scale) | encode(x[2], x[3], scale) << 16,
                                      encode(x[4], x[5], scale) | encode(x[6], x[7], scale) << 16};
            if (p.turned) *(eight_codes *)&tile[word_at(r, 2 * vector)] = made;
            if (!p.codes || row + r >= p.rows) continue;
            unsigned char *to = p.codes + (row + r) * p.columns + c;
            if (WHOLE) {
                if (c < p.columns) *(eight_codes *)to = made;
                continue;
            }
#pragma unroll
            for (int i = 0; i < VECTOR; i++)
                if (c + i < p.columns) to[i] = (unsigned char)((i < 4 ? made.low : made.high) >> i % 4 * 8);
        }
        if (!p.turned) continue;
        __syncthreads();
        store_turned(p, tile, row, column);
        __syncthreads(); // before the next tile is written
    }
}
#endif

#ifdef RESULT
typedef element_of<RESULT> result_element;

#define SIDE DW_MULTIPLY_CODES_TILE
#define DEPTH DW_MULTIPLY_CODES_DEPTH
#define EACH 4 // rows and columns of one thread

template <int IS_E5M2> DEVICE float decode(unsigned char code) {
    unsigned halves;
    if constexpr (IS_E5M2) return f16_to_float((uint16)((unsigned)code << 8));
    else
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((uint16)code));
    return f16_to_float((uint16)halves);
}

template <int IS_E5M2>
DEVICE void copy_tile(float (*to)[DEPTH + 1], const unsigned char *codes, long long row, long long rows, long long k,
                      long long depth) {
    for (int i = (int)threadIdx.x; i < SIDE * DEPTH; i += DW_MULTIPLY_CODES_THREADS) {
        const int r = i / DEPTH, d = i % DEPTH;
        const bool inside = row + r < rows && k + d < depth;
        to[r][d] = inside ? decode<IS_E5M2>(codes[(row + r) * depth + k + d]) : 0.f;
    }
}

// A block computes a tile of 64 x 64. Products are summed in order of k in F32.
extern "C" __global__ void __launch_bounds__(DW_MULTIPLY_CODES_THREADS)
    multiply_codes(const __grid_constant__ dw_multiply_codes_params p) {
    __shared__ float a_tile[SIDE][DEPTH + 1], b_tile[SIDE][DEPTH + 1];
    const long long across = (p.n + SIDE - 1) / SIDE;
    const long long row = blockIdx.x / across * SIDE, column = blockIdx.x % across * SIDE;
    const int my_row = (int)threadIdx.x / (SIDE / EACH), my_column = (int)threadIdx.x % (SIDE / EACH);
    float sums[EACH][EACH] = {};
    for (long long k = 0; k < p.k; k += DEPTH) {
        __syncthreads(); // the tiles before have been read
        copy_tile<CODES_A>(a_tile, p.a, row, p.m, k, p.k);
        copy_tile<CODES_B>(b_tile, p.b, column, p.n, k, p.k);
        __syncthreads();
#pragma unroll 8
        for (int d = 0; d < DEPTH; d++) {
#pragma unroll
            for (int i = 0; i < EACH; i++)
#pragma unroll
                for (int j = 0; j < EACH; j++)
                    sums[i][j] += a_tile[my_row + i * (SIDE / EACH)][d] * b_tile[my_column + j * (SIDE / EACH)][d];
        }
    }
    const float scale = *p.scale_a * *p.scale_b;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const long long r = row + my_row + i * (SIDE / EACH), c = column + my_column + j * (SIDE / EACH);
            if (r < p.m && c < p.n)
                result_element::store(p.y, r * p.n + c, (result_element::value)(sums[i][j] * scale));
        }
    }
}
#endif
