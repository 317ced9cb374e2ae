// FP8 codes of a matrix with one scale for all of it, in both orientations, and a product of such codes without tensor
// cores. kernel/quantization.h has the definition of the codes (dw__quantize_whole_codes), which are the same bit for bit.
//
// quantize_tensor_amax finds the largest finite magnitude, in parts; quantize_tensor_codes reads the matrix again and
// writes its codes, and the codes of its transpose. Bytes per element of BF16: 2 read, then 2 read, 1 written for each
// orientation. The first kernel reads from the matrix's end to its beginning: the kernel that made the matrix mostly wrote
// the end last, so that it may still be in the L2 cache. The second one reads what the first one has read last, the
// beginning, and marks it as the first to evict, so that the codes replace that and not what is still to be read. The first
// kernel does not run where the kernel that made the matrix has found the magnitude, in parts; many parts are combined to
// few by quantize_tensor_combine.
//
// A block of quantize_tensor_codes writes tiles of 128 x 128. It loads the next tile into registers before it stores the
// transpose of this one (code_tiles.cuh), so that loads and stores overlap. The codes of a row leave as they are computed,
// 8 of a thread in one store, and are kept in shared memory for the transpose.
//
// Infinities and NaNs need instructions that finite numbers don't. The first kernel reports whether there are any, and the
// second one has a loop for either case.
//
// Defines: TYPE, of the matrix (element_types.h); E5M2: 1, else E4M3; WHOLE: 1 if the matrix has contiguous rows of whole
// vectors of 8 elements, which begin at multiples of 16 bytes, and a multiple of 8 rows. For the product: RESULT, CODES_A,
// CODES_B (0: E4M3, 1: E5M2), BLOCKS: 1 with scales of blocks.

#include "magnitude.cuh"
#include "tensor_codes_params.h"

typedef unsigned short uint16;

#define NAN_CODE 0x7fu

#ifdef TYPE
#define THREADS DW_TENSOR_CODES_THREADS
#include "code_tiles.cuh"
#if DW_TENSOR_CODES_TILE != TILE
#error "the host counts tiles of another size"
#endif

#define LOADS (IS_F32 ? 2 : 4) // vectors in flight in each thread of quantize_tensor_amax
// Blocks for which an SM's registers suffice; each has a tile of loads in flight.
#define RESIDENT (IS_F32 || !WHOLE ? 2 : DW_TENSOR_CODES_RESIDENT)
#define INFINITE (IS_F32 ? 0x7f800000u : TYPE == DW_ELEMENT_F16 ? 0x7c00u : 0x7f80u)

// ---- the largest magnitude ----------------------------------------------------------------------------------

DEVICE void observe(magnitude<TYPE> &m, const elements &x) {
#pragma unroll
    for (int i = 0; i < WORDS; i++) m.observe(x.word[i]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_tensor_amax(const __grid_constant__ dw_tensor_codes_params p) {
    const unsigned vectors = ((unsigned)p.columns + VECTOR - 1) / VECTOR, step = gridDim.x * THREADS,
                   first = blockIdx.x * THREADS + threadIdx.x, rows_on = step / vectors, vectors_on = step % vectors;
    unsigned row = first / vectors, at = first % vectors;
    magnitude<TYPE> m = magnitude<TYPE>::none();
    while (row < (unsigned)p.rows) {
        elements x[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            x[i] = load_vector<false>(p, p.rows - 1 - (int)row, (int)((vectors - 1 - at) * VECTOR));
            row += rows_on, at += vectors_on;
            if (at >= vectors) row++, at -= vectors;
        }
#pragma unroll
        for (int i = 0; i < LOADS; i++) observe(m, x[i]);
    }
    const unsigned most = magnitude_of_block<THREADS>(m.found());
    if (threadIdx.x == 0) p.magnitudes[blockIdx.x] = most;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_tensor_combine(const __grid_constant__ dw_tensor_codes_params p) {
    unsigned most = 0;
    for (int i = (int)(blockIdx.x * THREADS + threadIdx.x); i < p.found_parts; i += (int)(gridDim.x * THREADS))
        most = combine(most, p.found[i]);
    most = magnitude_of_block<THREADS>(most);
    if (threadIdx.x == 0) p.magnitudes[blockIdx.x] = most;
}

// ---- codes --------------------------------------------------------------------------------------------------

// The code of an infinity or a NaN in the place of what the conversion made of it: infinities become NaN where the format
// has none, and NaNs keep their sign.
DEVICE unsigned special_code(unsigned bits, unsigned code) {
    const int sign = IS_F32 ? 31 : 15;
    const unsigned magnitude = bits & ~(1u << sign);
    if (magnitude < INFINITE) return code;
    return bits >> sign << 7 | (E5M2 && magnitude == INFINITE ? 0x7cu : NAN_CODE);
}

// The codes of elements i and i + 1, the first in the low byte. A finite number over the scale is at most the format's
// largest one, up to rounding.
template <bool SPECIAL> DEVICE unsigned encode(const elements &x, int i, float inverse) {
    const float low = number(x, i) * inverse, high = number(x, i + 1) * inverse;
    uint16 pair;
    if constexpr (E5M2) asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    else
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    if constexpr (!SPECIAL) return pair;
    return special_code(raw(x, i), pair & 0xffu) | special_code(raw(x, i + 1), pair >> 8) << 8;
}

DEVICE void store_turned(const dw_tensor_codes_params &p, const unsigned *tile, const tile_place &at) {
    const turned_place own = turned_place_of();
    unsigned low[4], high[4];
    load_turned(tile, own, low, high);
    const int first = at.row + 8 * own.group;
    if (first >= p.rows) return;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int c = at.column + 4 * own.word + j;
        if (c >= p.columns) return;
        unsigned char *to = p.turned + ((long long)c * p.rows + first);
        if (WHOLE) {
            *(eight_codes *)to = eight_codes{low[j], high[j]};
            continue;
        }
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (first < p.rows - i) to[i] = (unsigned char)((i < 4 ? low[j] : high[j]) >> i % 4 * 8);
    }
}

template <bool SPECIAL>
DEVICE void store_codes(const dw_tensor_codes_params &p, const tile_place &at, const elements (&x)[OWN_ROWS], float inverse,
                        unsigned *tile) {
    const int v = (int)threadIdx.x % ACROSS, column = at.column + v * VECTOR;
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++) {
        const int r = (int)threadIdx.x / ACROSS + i * (THREADS / ACROSS);
        const eight_codes made = {encode<SPECIAL>(x[i], 0, inverse) | encode<SPECIAL>(x[i], 2, inverse) << 16,
                                  encode<SPECIAL>(x[i], 4, inverse) | encode<SPECIAL>(x[i], 6, inverse) << 16};
        if (p.turned) *(eight_codes *)&tile[word_at(r, 2 * v)] = made;
        if (!p.codes || at.row + r >= p.rows) continue;
        unsigned char *to = p.codes + ((long long)(at.row + r) * p.columns + column);
        if (WHOLE) {
            if (column < p.columns) *(eight_codes *)to = made;
            continue;
        }
#pragma unroll
        for (int j = 0; j < VECTOR; j++)
            if (column < p.columns - j) to[j] = (unsigned char)((j < 4 ? made.low : made.high) >> j % 4 * 8);
    }
}

template <bool SPECIAL>
DEVICE void store_tiles(const dw_tensor_codes_params &p, elements (&x)[OWN_ROWS], float inverse, unsigned *tile) {
    for (int t = (int)blockIdx.x; t < p.tiles; t += (int)gridDim.x) {
        const tile_place at = place_of(p, t);
        store_codes<SPECIAL>(p, at, x, inverse, tile);
        if (t + (int)gridDim.x < p.tiles) load_tile(p, place_of(p, t + (int)gridDim.x), x);
        if (!p.turned) continue;
        __syncthreads();
        store_turned(p, tile, at);
        __syncthreads(); // before the next tile is written
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    quantize_tensor_codes(const __grid_constant__ dw_tensor_codes_params p) {
    __shared__ alignas(16) unsigned tile[TILE * TILE / 4];
    elements x[OWN_ROWS];
    if ((int)blockIdx.x < p.tiles) load_tile(p, place_of(p, (int)blockIdx.x), x);
    unsigned most = 0;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < p.parts; i += THREADS) most = combine(most, p.magnitudes[i]);
    most = magnitude_of_block<THREADS>(most);
    const float amax = __uint_as_float(most & ~SPECIAL_BIT), largest = E5M2 ? 57344.f : 448.f;
    const float scale = amax > 0.f ? fmaxf(amax / largest, 1.175494351e-38f) : 1.f, inverse = 1.f / scale;
    if (p.scale && blockIdx.x == 0 && threadIdx.x == 0) *p.scale = scale;
    if (most & SPECIAL_BIT) store_tiles<true>(p, x, inverse, tile);
    else store_tiles<false>(p, x, inverse, tile);
}
#endif

#ifdef RESULT
typedef element_of<RESULT> result_element;

#define SIDE DW_MULTIPLY_CODES_TILE
#define DEPTH DW_MULTIPLY_CODES_DEPTH
#define EACH 4 // rows and columns of one thread

#if BLOCKS
#include "fp8_block_scales.cuh"
#if DW_FP8_BLOCK_SIDE % DW_MULTIPLY_CODES_DEPTH
#error "a block of products is several steps"
#endif
#endif

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
#if BLOCKS
    float totals[EACH][EACH] = {};
#endif
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
#if BLOCKS
        if ((k + DEPTH) % DW_FP8_BLOCK_SIDE != 0 && k + DEPTH < p.k) continue;
        float of_b[EACH];
#pragma unroll
        for (int j = 0; j < EACH; j++)
            of_b[j] = scale_at(p.blocks_b, p.wide_b, p.n, column + my_column + j * (SIDE / EACH), k / DW_FP8_BLOCK_SIDE);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const float of_a =
                scale_at(p.blocks_a, p.wide_a, p.m, row + my_row + i * (SIDE / EACH), k / DW_FP8_BLOCK_SIDE);
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                totals[i][j] += sums[i][j] * (of_a * of_b[j]);
                sums[i][j] = 0.f;
            }
        }
#endif
    }
#if !BLOCKS
#define totals sums
#endif
#pragma unroll
    for (int i = 0; i < EACH; i++) {
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const long long r = row + my_row + i * (SIDE / EACH), c = column + my_column + j * (SIDE / EACH);
            if (r >= p.m || c >= p.n) continue;
            const float scale = BLOCKS ? 1.f : p.scale_a[r * p.scale_step] * p.scale_b[c * p.scale_step];
            const float bias = p.bias ? (float)result_element::load(p.bias, c) : 0.f;
            result_element::store(p.y, r * p.n + c, (result_element::value)(totals[i][j] * scale + bias));
        }
    }
}
#endif
