// Tiles of 128 x 128 elements of which a block of threads writes FP8 codes in both orientations: vectors of 8 elements,
// loads of a tile, and the transposition of its codes in shared memory. Used by tensor_codes.cu and fp8_block_codes.cu.
//
// A thread loads vectors of a few rows. The codes of a tile lie in shared memory, from which each thread takes 4 columns of
// 8 rows, transposes them in registers, and stores 8 bytes of each column. Words of a row are permuted by the row's group
// of 8, so that neither access has a bank conflict.
//
// Defines: TYPE, of the matrix; THREADS, of a block; WHOLE: 1 if the matrix has contiguous rows of whole vectors, which begin
// at multiples of 16 bytes. Parameters of a kernel have the members x, rows, columns, row_stride, column_stride and
// tiles_across.
#ifndef DW_CODE_TILES_CUH
#define DW_CODE_TILES_CUH

#include "tensor_types.cuh"

typedef unsigned short uint16;
typedef element_of<TYPE>::stored stored;

#define TILE 128
#define VECTOR 8 // elements of a thread at a time
#define IS_F32 (TYPE == DW_ELEMENT_F32)
#define WORDS (IS_F32 ? 8 : 4)         // of a vector: 16-bit elements lie in pairs
#define ACROSS (TILE / VECTOR)         // threads along a row of a tile
#define OWN_ROWS (TILE * ACROSS / THREADS) // rows of a tile that one thread loads

struct elements {
    unsigned word[WORDS];
};

DEVICE unsigned raw(const elements &x, int i) {
    return IS_F32 ? x.word[i % WORDS] : i & 1 ? x.word[i / 2] >> 16 : x.word[i / 2] & 0xffffu;
}
DEVICE float number(const elements &x, int i) {
    if constexpr (IS_F32) return __uint_as_float(x.word[i % WORDS]);
    if constexpr (TYPE == DW_ELEMENT_F16) return f16_to_float((uint16)raw(x, i));
    return __uint_as_float(i & 1 ? x.word[i / 2] & 0xffff0000u : x.word[i / 2] << 16);
}

// LAST: nothing reads the numbers again soon.
template <bool LAST> DEVICE void load_words(const void *from, unsigned *word) {
    if constexpr (LAST)
        asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                     : "l"(from));
    else
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                     : "l"(from));
}

// Beyond the edges there are zeros.
template <bool LAST, typename PARAMS> DEVICE elements load_vector(const PARAMS &p, int row, int column) {
    elements x = {};
    if constexpr (WHOLE) {
        if ((unsigned)row >= (unsigned)p.rows || column >= p.columns) return x;
        const stored *from = (const stored *)p.x + (row * p.row_stride + column);
        load_words<LAST>(from, x.word);
        if constexpr (IS_F32) load_words<LAST>(from + 4, x.word + 4);
        return x;
    }
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        if ((unsigned)row >= (unsigned)p.rows || column >= p.columns - i) continue;
        const long long at = row * p.row_stride + (column + i) * p.column_stride;
        if constexpr (IS_F32) x.word[i] = ((const unsigned *)p.x)[at];
        else
            x.word[i / 2] |= (unsigned)((const uint16 *)p.x)[at] << i % 2 * 16;
    }
    return x;
}

struct alignas(8) eight_codes {
    unsigned low, high;
};

struct tile_place {
    int row, column;
};

template <typename PARAMS> DEVICE tile_place place_of(const PARAMS &p, int tile) {
    const unsigned across = (unsigned)p.tiles_across;
    return {(int)((unsigned)tile / across * TILE), (int)((unsigned)tile % across * TILE)};
}

DEVICE int word_at(int row, int word) { return row * (TILE / 4) + (word ^ ((row >> 3 & 15) << 1)); }

// Transposes 4 x 4 bytes.
DEVICE void transpose(unsigned (&x)[4]) {
    const unsigned a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[2], x[3], 0x5140),
                   c = __byte_perm(x[0], x[1], 0x7362), d = __byte_perm(x[2], x[3], 0x7362);
    x[0] = __byte_perm(a, b, 0x5410);
    x[1] = __byte_perm(a, b, 0x7632);
    x[2] = __byte_perm(c, d, 0x5410);
    x[3] = __byte_perm(c, d, 0x7632);
}

// Reads 8 rows of 4 columns of a tile of codes and transposes them. Of each column, `low` has the codes of the first four
// rows of the thread's group, `high` those of the others. A thread's group of rows and word of columns are its place.
struct turned_place {
    int group, word;
};
DEVICE turned_place turned_place_of() { return {(int)threadIdx.x % (TILE / 8), (int)threadIdx.x / (TILE / 8)}; }
DEVICE void load_turned(const unsigned *tile, const turned_place &at, unsigned (&low)[4], unsigned (&high)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        low[j] = tile[word_at(8 * at.group + j, at.word)];
        high[j] = tile[word_at(8 * at.group + 4 + j, at.word)];
    }
    transpose(low);
    transpose(high);
}

template <typename PARAMS> DEVICE bool is_inside(const PARAMS &p, const tile_place &at) {
    return at.row + TILE <= p.rows && at.column + TILE <= p.columns;
}

template <typename PARAMS> DEVICE void load_tile(const PARAMS &p, const tile_place &at, elements (&x)[OWN_ROWS]) {
    const int row = at.row + (int)threadIdx.x / ACROSS, column = at.column + (int)threadIdx.x % ACROSS * VECTOR;
    if (WHOLE && is_inside(p, at)) {
        const stored *from = (const stored *)p.x + (row * p.row_stride + column);
#pragma unroll
        for (int i = 0; i < OWN_ROWS; i++, from += THREADS / ACROSS * p.row_stride) {
            load_words<true>(from, x[i].word);
            if constexpr (IS_F32) load_words<true>(from + 4, x[i].word + 4);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++) x[i] = load_vector<true>(p, row + i * (THREADS / ACROSS), column);
}

// The tiles of a block, one after the other: every so many of the grid.
struct tile_walk {
    int down, across, down_step, across_step;
    DEVICE_MEMBER tile_walk of(int tiles_across) {
        const unsigned each = (unsigned)tiles_across;
        return {(int)(blockIdx.x / each), (int)(blockIdx.x % each), (int)(gridDim.x / each), (int)(gridDim.x % each)};
    }
    __device__ __forceinline__ tile_place place() const { return {down * TILE, across * TILE}; }
    __device__ __forceinline__ void advance(int tiles_across) {
        down += down_step, across += across_step;
        if (across >= tiles_across) across -= tiles_across, down++;
    }
};

#endif
