// E4M3 codes of a matrix in both orientations, with an F32 scale for each block of 128 elements along the rows of the
// codes, or for each square of 128 x 128: fp8-block of deepwell/number.h, rule AMAX, bit for bit.
//
// The matrix is read once. Bytes per element of BF16: 2 read, 1 written for each orientation, and 4 / 128 for each
// orientation's scales: 4.06 in all, where quantize_tensor needs 6. Blocks lie along the rows of the codes, so each
// orientation has its own scales and therefore its own codes; square blocks have the same codes in both.
//
// A block of threads writes tiles of 128 x 128, which hold whole blocks of either kind. Each thread has vectors of 8 elements
// of a few rows in registers. The largest magnitude of a row is found by the 16 lanes that share it, that of a column by
// the warps in shared memory. Then the codes along rows are stored as they are computed, and those along columns are put
// into shared memory, from where they are stored transposed (code_tiles.cuh) while the next tile is being loaded.
//
// An element is x / s, rounded to F32, then to E4M3. The quotient takes the scale's inverse and two corrections: the first
// leaves an error below one unit in the last place, from which the second gives the rounded quotient (Markstein, "IA-64 and
// Elementary Functions", 2000, 8.3). This needs a remainder that is a normal number, and finite x. Tiles with an
// infinity, a NaN or a scale below 2^-60 divide instead.
//
// Defines: TYPE, WHOLE (code_tiles.cuh); SQUARE: 1 for blocks of 128 x 128.

#include "fp8_block_codes_params.h"
#include "scale_layout.h"

#define THREADS DW_FP8_BLOCK_THREADS
#include "code_tiles.cuh"
#if DW_FP8_BLOCK_SIDE != TILE
#error "a tile holds blocks of another size"
#endif

#define WARPS (THREADS / 32)
#define INFINITE 0x7f800000u

// ---- magnitudes ---------------------------------------------------------------------------------------------
//
// Those of the elements of a word: one of 32 bits, or two of 16. As integers they have the order of the numbers, with
// infinity above all numbers and NaN above infinity.

DEVICE unsigned magnitudes(unsigned word) { return word & (IS_F32 ? 0x7fffffffu : 0x7fff7fffu); }

DEVICE unsigned larger(unsigned a, unsigned b) {
    if constexpr (IS_F32) return max(a, b);
    asm("max.s16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}

// The larger one of a word's, in its own bits.
DEVICE unsigned largest_of(unsigned word) { return IS_F32 ? word : max(word & 0xffffu, word >> 16); }

// An F32's bits of such a magnitude.
DEVICE unsigned widened(unsigned bits) {
    if constexpr (IS_F32) return bits;
    return TYPE == DW_ELEMENT_F16 ? __float_as_uint(f16_to_float((uint16)bits)) : bits << 16;
}

// ---- scales -------------------------------------------------------------------------------------------------

// A block's scale, what its elements are divided by, and the inverse of that.
struct block_scale {
    float scale, divisor, inverse;
};

// `most`: bits of the block's largest magnitude; a NaN's are above infinity's. A scale of 0 gives zeros.
DEVICE block_scale scale_of(unsigned most) {
    const float scale = most > INFINITE    ? __uint_as_float(0x7fc00000u)
                        : most == INFINITE ? 1.329227996e36f // 2^120
                                           : __uint_as_float(most) / 448.f,
                divisor = most == 0 ? 1.f : scale == 0.f ? __uint_as_float(INFINITE) : scale;
    return {scale, divisor, 1.f / divisor};
}

// Quotients need division.
DEVICE bool is_special(unsigned most) {
    return most != 0 && (most >= INFINITE || __uint_as_float(most) < 448.f * 8.6736174e-19f); // 2^-60
}

// ---- codes --------------------------------------------------------------------------------------------------

template <bool SPECIAL> DEVICE float quotient(float x, float divisor, float inverse) {
    if constexpr (SPECIAL) return x / divisor;
    float q = __fmul_rn(x, inverse);
    q = __fmaf_rn(__fmaf_rn(-q, divisor, x), inverse, q);
    q = __fmaf_rn(__fmaf_rn(-q, divisor, x), inverse, q);
    return copysignf(q, x); // the corrections lose the sign of 0
}

// Two codes, the first in the low byte. Infinities saturate; a NaN's code is 0x7f.
DEVICE unsigned encode(float low, float high) {
    uint16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

template <bool SPECIAL>
DEVICE eight_codes encode_row(const vector &x, float divisor, float inverse) {
    unsigned pair[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        pair[i] = encode(quotient<SPECIAL>(number(x, 2 * i), divisor, inverse),
                         quotient<SPECIAL>(number(x, 2 * i + 1), divisor, inverse));
    return {pair[0] | pair[1] << 16, pair[2] | pair[3] << 16};
}

// The first `count` codes, then zeros: beyond the matrix a NaN's block, too, has zeros.
DEVICE eight_codes first_codes(const eight_codes &made, int count) {
    if (count >= VECTOR) return made;
    if (count <= 0) return {0, 0};
    const unsigned long long mask = (1ull << 8 * count) - 1;
    return {made.low & (unsigned)mask, made.high & (unsigned)(mask >> 32)};
}

DEVICE void store_row(const dw_fp8_block_codes_params &p, int row, int column, const eight_codes &made) {
    if (p.codes && row < p.rows && column < p.row_bytes)
        *(eight_codes *)(p.codes + (row * p.row_bytes + column)) = first_codes(made, p.columns - column);
}

DEVICE void store_turned(const dw_fp8_block_codes_params &p, const unsigned *tile, const tile_place &at) {
    const turned_place own = turned_place_of();
    unsigned low[4], high[4];
    load_turned(tile, own, low, high);
    const int first = at.row + 8 * own.group;
    if (first >= p.turned_row_bytes) return;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int c = at.column + 4 * own.word + j;
        if (c >= p.columns) return;
        *(eight_codes *)(p.turned + (c * p.turned_row_bytes + first)) =
            first_codes(eight_codes{low[j], high[j]}, p.rows - first);
    }
}

// ---- a tile -------------------------------------------------------------------------------------------------

struct shared_room {
    unsigned tile[TILE * TILE / 4];
    unsigned most[WARPS][ACROSS * WORDS]; // magnitudes of each warp's rows; of square blocks [0][warp]
    float2 columns[TILE];       // divisors and their inverses
};

#if SQUARE
// Stores the scale of the block in both orientations, and the zeros that complete a row of scales.
DEVICE void store_scale(float *scales, float scale, int row, int column, int across) {
    const int padded = (across + DW_SQUARE_SCALES - 1) / DW_SQUARE_SCALES * DW_SQUARE_SCALES;
    float *to = scales + (long long)row * padded;
    to[column] = scale;
    if (column == across - 1)
        for (int i = across; i < padded; i++) to[i] = 0.f;
}

template <bool SPECIAL>
DEVICE void store_codes(const dw_fp8_block_codes_params &p, const tile_place &at, const vector (&x)[EACH],
                        const block_scale &by, shared_room &room) {
    const int v = (int)threadIdx.x % ACROSS;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int r = (int)threadIdx.x / ACROSS + i * (THREADS / ACROSS);
        const eight_codes made = encode_row<SPECIAL>(x[i], by.divisor, by.inverse);
        store_row(p, at.row + r, at.column + v * VECTOR, made);
        if (p.turned) *(eight_codes *)&room.tile[word_at(r, 2 * v)] = made;
    }
}

DEVICE void store_tile(const dw_fp8_block_codes_params &p, const tile_place &at, const vector (&x)[EACH],
                       shared_room &room) {
    const int down = (p.rows + TILE - 1) / TILE, row = at.row / TILE, column = at.column / TILE;
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < WORDS; j++) most = larger(most, magnitudes(x[i].word[j]));
    most = __reduce_max_sync(0xffffffffu, widened(largest_of(most)));
    if (threadIdx.x % 32 == 0) room.most[0][threadIdx.x / 32] = most;
    __syncthreads();
    for (int i = 0; i < WARPS; i++) most = max(most, room.most[0][i]);
    const block_scale by = scale_of(most);
    if (threadIdx.x == 0) {
        if (p.scales) store_scale(p.scales, by.scale, row, column, p.tiles_across);
        if (p.turned_scales) store_scale(p.turned_scales, by.scale, column, row, down);
    }
    if (is_special(most)) store_codes<true>(p, at, x, by, room);
    else store_codes<false>(p, at, x, by, room);
}
#else
template <bool SPECIAL>
DEVICE void store_codes(const dw_fp8_block_codes_params &p, const tile_place &at, const vector (&x)[EACH],
                        const float (&divisor)[EACH], const float (&inverse)[EACH], shared_room &room) {
    const int v = (int)threadIdx.x % ACROSS, first = (int)threadIdx.x / ACROSS;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        store_row(p, at.row + first + i * (THREADS / ACROSS), at.column + v * VECTOR,
                  encode_row<SPECIAL>(x[i], divisor[i], inverse[i]));
    if (!p.turned) return;
    // Column by column, so that the scales of two are in registers at a time.
    eight_codes made[EACH] = {};
#pragma unroll
    for (int j = 0; j < VECTOR; j += 2) {
        const float2 low = room.columns[v * VECTOR + j], high = room.columns[v * VECTOR + j + 1];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const unsigned pair = encode(quotient<SPECIAL>(number(x[i], j), low.x, low.y),
                                         quotient<SPECIAL>(number(x[i], j + 1), high.x, high.y));
            (j < 4 ? made[i].low : made[i].high) |= pair << j % 4 * 8;
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
        *(eight_codes *)&room.tile[word_at(first + i * (THREADS / ACROSS), 2 * v)] = made[i];
}

// The largest magnitudes of this thread's rows, in all 16 lanes of a row, and of its columns in its warp's rows.
DEVICE void find_largest(const vector (&x)[EACH], unsigned (&across)[EACH], unsigned (&down)[WORDS]) {
#pragma unroll
    for (int j = 0; j < WORDS; j++) down[j] = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        unsigned most = 0;
#pragma unroll
        for (int j = 0; j < WORDS; j++) {
            const unsigned found = magnitudes(x[i].word[j]);
            most = larger(most, found);
            down[j] = larger(down[j], found);
        }
        across[i] = largest_of(most);
#pragma unroll
        for (int distance = ACROSS / 2; distance > 0; distance /= 2)
            across[i] = max(across[i], __shfl_xor_sync(0xffffffffu, across[i], distance));
        across[i] = widened(across[i]);
    }
#pragma unroll
    for (int j = 0; j < WORDS; j++) down[j] = larger(down[j], __shfl_xor_sync(0xffffffffu, down[j], ACROSS));
}

// The largest magnitude of a column, of all warps.
DEVICE unsigned largest_in_column(const shared_room &room, int column) {
    constexpr int IN_WORD = VECTOR / WORDS;
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) most = larger(most, room.most[i][column / IN_WORD]);
    return widened(IS_F32 ? most : column % 2 ? most >> 16 : most & 0xffffu);
}

DEVICE void store_tile(const dw_fp8_block_codes_params &p, const tile_place &at, const vector (&x)[EACH],
                       shared_room &room) {
    const int lane = (int)threadIdx.x % ACROSS, first_row = (int)threadIdx.x / ACROSS;
    unsigned across[EACH], down[WORDS];
    float divisor[EACH], inverse[EACH];
    bool special = false;
    find_largest(x, across, down);
    if (threadIdx.x % 32 < ACROSS)
#pragma unroll
        for (int j = 0; j < WORDS; j++) room.most[threadIdx.x / 32][lane * WORDS + j] = down[j];
    // One lane computes the scale of each row.
    unsigned own = across[0];
#pragma unroll
    for (int i = 1; i < EACH; i++) own = lane == i ? across[i] : own;
    const block_scale of_row = scale_of(own);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        special |= is_special(across[i]);
        divisor[i] = __shfl_sync(0xffffffffu, of_row.divisor, i, ACROSS);
        inverse[i] = __shfl_sync(0xffffffffu, of_row.inverse, i, ACROSS);
    }
    const int row = at.row + first_row + lane * (THREADS / ACROSS);
    if (p.scales && lane < EACH && row < p.rows)
        p.scales[(long long)(at.column / TILE) * p.rows + row] = of_row.scale;
    __syncthreads();
    if (threadIdx.x < TILE) {
        const int column = at.column + (int)threadIdx.x;
        const unsigned most = largest_in_column(room, (int)threadIdx.x);
        const block_scale by = scale_of(most);
        special |= is_special(most);
        room.columns[threadIdx.x] = float2{by.divisor, by.inverse};
        if (p.turned_scales && column < p.columns)
            p.turned_scales[(long long)(at.row / TILE) * p.columns + column] = by.scale;
    }
    if (__syncthreads_or(special)) store_codes<true>(p, at, x, divisor, inverse, room);
    else store_codes<false>(p, at, x, divisor, inverse, room);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, DW_FP8_BLOCK_RESIDENT)
    fp8_block_codes(const __grid_constant__ dw_fp8_block_codes_params p) {
    __shared__ alignas(16) shared_room room;
    vector x[EACH];
    if ((int)blockIdx.x < p.tiles) load_tile(p, place_of(p, (int)blockIdx.x), x);
    for (int t = (int)blockIdx.x; t < p.tiles; t += (int)gridDim.x) {
        const tile_place at = place_of(p, t);
        store_tile(p, at, x, room);
        if (t + (int)gridDim.x < p.tiles) load_tile(p, place_of(p, t + (int)gridDim.x), x);
        __syncthreads();
        // What the next tile writes into shared memory before its first barrier, nothing reads here.
        if (p.turned) store_turned(p, room.tile, at);
    }
}
