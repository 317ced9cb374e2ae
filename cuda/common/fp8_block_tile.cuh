// Codes of fp8-block of a tile of 128 x 128 whose elements a block of threads has in registers, in both orientations. Used by
// fp8_block_codes.cu, which loads them, and program_codes.cuh, which computes them.
//
// A tile holds whole blocks of either kind. Each thread has vectors of 8 elements of a few rows in registers. The largest
// magnitude of a row is found by the 16 lanes that share it, that of a column by the warps in shared memory. Then the codes
// along rows are stored as they are computed, and those along columns are put into shared memory, from where they are stored
// transposed (code_tiles.cuh) while the next tile is being loaded.
//
// fp8_block_quotient.cuh says how the codes are computed.
//
// Defines: TYPE, WHOLE (code_tiles.cuh); SQUARE: 1 for blocks of 128 x 128.
#ifndef DW_FP8_BLOCK_TILE_CUH
#define DW_FP8_BLOCK_TILE_CUH

#include "fp8_block_codes_params.h"
#include "scale_layout.h"

#define THREADS DW_FP8_BLOCK_THREADS
#include "code_tiles.cuh"
#include "fp8_block_quotient.cuh"
#if DW_FP8_BLOCK_SIDE != TILE
#error "a tile holds blocks of another size"
#endif

#define WARPS (THREADS / 32)

// ---- codes of vectors ----------------------------------------------------------------------------------------

template <bool SPECIAL> DEVICE eight_codes encode_row(const elements &x, const factors &by) {
    unsigned pair[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        pair[i] = encode(quotient<SPECIAL>(number(x, 2 * i), by), quotient<SPECIAL>(number(x, 2 * i + 1), by));
    return {pair[0] | pair[1] << 16, pair[2] | pair[3] << 16};
}

// The first `count` codes, then zeros: beyond the matrix a NaN's block, too, has zeros.
DEVICE eight_codes first_codes(const eight_codes &made, int count) {
    if (count >= VECTOR) return made;
    if (count <= 0) return {0, 0};
    const unsigned long long mask = (1ull << 8 * count) - 1;
    return {made.low & (unsigned)mask, made.high & (unsigned)(mask >> 32)};
}

// `inside`: the tile is, so that no place needs to be tested. `to`: the place of the codes.
DEVICE void store_row(const dw_fp8_block_codes_params &p, bool inside, int row, int column, unsigned char *to,
                      const eight_codes &made) {
    if (inside) *(eight_codes *)to = made;
    else if (row < p.rows && column < p.row_bytes)
        *(eight_codes *)to = first_codes(made, p.columns - column);
}

DEVICE void store_turned(const dw_fp8_block_codes_params &p, bool inside, const unsigned *tile, const tile_place &at) {
    turned_place own = turned_place_of();
    const int first = at.row + 8 * own.group;
    if (first >= p.turned_row_bytes) return;
    unsigned char *to = p.turned + ((at.column + 4 * own.word) * p.turned_row_bytes + first);
#pragma unroll
    for (int part = 0; part < TILE / 4; part += THREADS / (TILE / 8), own.word += THREADS / (TILE / 8)) {
        unsigned low[4], high[4];
        load_turned(tile, own, low, high);
        unsigned char *column_codes = to;
#pragma unroll
        for (int j = 0; j < 4; j++, column_codes += p.turned_row_bytes) {
            const eight_codes made = {low[j], high[j]};
            if (inside) *(eight_codes *)column_codes = made;
            else if (at.column + 4 * own.word + j < p.columns)
                *(eight_codes *)column_codes = first_codes(made, p.rows - first);
        }
        to += THREADS / (TILE / 8) * 4 * p.turned_row_bytes;
    }
}

// ---- a tile -------------------------------------------------------------------------------------------------

struct shared_room {
    unsigned tile[TILE * TILE / 4];
    unsigned most[WARPS][ACROSS * WORDS]; // magnitudes of columns in each warp's rows; of square blocks [0][warp]
    unsigned row_most[TILE];
    factors columns[TILE], rows[TILE];
};

// The first row of the tile that this thread has, and the first column.
DEVICE int own_row() { return (int)threadIdx.x / ACROSS; }
DEVICE int own_column() { return (int)threadIdx.x % ACROSS * VECTOR; }
#define ROW_STEP (THREADS / ACROSS)

// Stores the codes of this thread's rows, encode(i) of row i, and puts them into shared memory if they are KEPT.
template <bool KEPT, typename ENCODE>
DEVICE void store_rows(const dw_fp8_block_codes_params &p, const tile_place &at, shared_room &room, ENCODE encode) {
    const bool inside = is_inside(p, at);
    const int row = at.row + own_row(), column = at.column + own_column();
    unsigned char *to = p.codes + (row * p.row_bytes + column);
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++, to += ROW_STEP * p.row_bytes) {
        const eight_codes made = encode(i);
        if (p.codes) store_row(p, inside, row + i * ROW_STEP, column, to, made);
        if (KEPT) *(eight_codes *)&room.tile[word_at(own_row() + i * ROW_STEP, own_column() / 4)] = made;
    }
}

#if SQUARE
// Stores the scale of the block in both orientations, and the zeros that complete a row of scales.
DEVICE void store_scale(float *scales, float scale, int row, int column, int across) {
    const int padded = (across + DW_SQUARE_SCALES - 1) / DW_SQUARE_SCALES * DW_SQUARE_SCALES;
    float *to = scales + (long long)row * padded;
    to[column] = scale;
    if (column == across - 1)
        for (int i = across; i < padded; i++) to[i] = 0.f;
}

template <typename AGAIN>
DEVICE void store_special_codes(const dw_fp8_block_codes_params &p, const tile_place &at, float divisor,
                                shared_room &room, AGAIN again) {
    const int row = at.row + own_row(), column = at.column + own_column();
#pragma unroll 1
    for (int i = 0; i < OWN_ROWS; i++) {
        const eight_codes made = encode_row<true>(again(i), factors_of<true>(divisor));
        const int r = i * ROW_STEP;
        if (p.codes) store_row(p, false, row + r, column, p.codes + ((row + r) * p.row_bytes + column), made);
        *(eight_codes *)&room.tile[word_at(own_row() + r, own_column() / 4)] = made;
    }
}

// Stores codes and scales along rows, and puts the codes along columns into shared memory. `again`: returns vector i of this
// thread's once more, for special tiles: registers that stay in use there would be missing elsewhere.
template <typename AGAIN>
DEVICE void store_tile(const dw_fp8_block_codes_params &p, const tile_place &at, elements (&x)[OWN_ROWS], shared_room &room,
                       AGAIN again) {
    const int down = (p.rows + TILE - 1) / TILE, row = at.row / TILE, column = at.column / TILE;
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++)
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
    if (is_special(most)) return store_special_codes(p, at, by.divisor, room, again);
    const factors parts = factors_of<false>(by.divisor);
    const auto encode = [&](int i) { return encode_row<false>(x[i], parts); };
    store_rows<true>(p, at, room, encode);
}
#else
// The largest magnitude of a column, of all warps.
DEVICE unsigned largest_in_column(const shared_room &room, int column) {
    constexpr int IN_WORD = VECTOR / WORDS;
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) most = larger(most, room.most[i][column / IN_WORD]);
    return widened(IS_F32 ? most : column % 2 ? most >> 16 : most & 0xffffu);
}

// The same as number(x, i) by another instruction. Otherwise the compiler keeps the numbers of the codes along rows for those
// along columns, and runs out of registers.
DEVICE float number_again(const elements &x, int i) {
    if constexpr (TYPE != DW_ELEMENT_BF16) return number(x, i);
    return __uint_as_float(__byte_perm(x.word[i / 2], 0, i & 1 ? 0x3244 : 0x1044));
}

// Column by column, so that the factors of two are in registers at a time.
DEVICE void keep_columns(const elements (&x)[OWN_ROWS], shared_room &room) {
    eight_codes made[OWN_ROWS] = {};
#pragma unroll
    for (int j = 0; j < VECTOR; j += 2) {
        const factors low = room.columns[own_column() + j], high = room.columns[own_column() + j + 1];
#pragma unroll
        for (int i = 0; i < OWN_ROWS; i++) {
            const unsigned pair = encode(quotient<false>(number_again(x[i], j), low),
                                         quotient<false>(number_again(x[i], j + 1), high));
            (j < 4 ? made[i].low : made[i].high) |= pair << j % 4 * 8;
        }
    }
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++)
        *(eight_codes *)&room.tile[word_at(own_row() + i * ROW_STEP, own_column() / 4)] = made[i];
}

// The codes of a tile by division.
template <typename AGAIN>
DEVICE void store_special_codes(const dw_fp8_block_codes_params &p, const tile_place &at, shared_room &room,
                                AGAIN again) {
    const int row = at.row + own_row(), column = at.column + own_column();
#pragma unroll 1
    for (int i = 0; i < OWN_ROWS; i++) {
        const elements x = again(i);
        const int r = i * ROW_STEP;
        const eight_codes along_row = encode_row<true>(x, room.rows[own_row() + r]);
        if (p.codes) store_row(p, false, row + r, column, p.codes + ((row + r) * p.row_bytes + column), along_row);
        eight_codes made = {};
#pragma unroll
        for (int j = 0; j < VECTOR; j += 2) {
            const unsigned pair = encode(quotient<true>(number(x, j), room.columns[own_column() + j]),
                                         quotient<true>(number(x, j + 1), room.columns[own_column() + j + 1]));
            (j < 4 ? made.low : made.high) |= pair << j % 4 * 8;
        }
        *(eight_codes *)&room.tile[word_at(own_row() + r, own_column() / 4)] = made;
    }
}

// Stores the largest magnitudes of the tile's rows, and of its columns in each warp's rows. Those of 16 bits lie in pairs,
// rows as columns. The 16 lanes of a row divide its words among them: those 8 lanes apart have the maxima of two lanes of
// half of the words, and so on.
#define ROW_WORDS (IS_F32 ? OWN_ROWS : OWN_ROWS / 2)
DEVICE void find_largest(const elements (&x)[OWN_ROWS], shared_room &room) {
    const int lane = (int)threadIdx.x % ACROSS;
    unsigned most[OWN_ROWS], across[ROW_WORDS], down[WORDS];
#pragma unroll
    for (int j = 0; j < WORDS; j++) down[j] = 0;
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++) {
        most[i] = 0;
#pragma unroll
        for (int j = 0; j < WORDS; j++) {
            const unsigned found = magnitudes(x[i].word[j]);
            most[i] = larger(most[i], found);
            down[j] = larger(down[j], found);
        }
    }
#pragma unroll
    for (int j = 0; j < WORDS; j++) down[j] = larger(down[j], __shfl_xor_sync(0xffffffffu, down[j], ACROSS));
    if (threadIdx.x % 32 < ACROSS)
#pragma unroll
        for (int j = 0; j < WORDS; j++) room.most[threadIdx.x / 32][lane * WORDS + j] = down[j];
#pragma unroll
    for (int i = 0; i < ROW_WORDS; i++) {
        if constexpr (IS_F32) across[i] = most[i];
        else
            across[i] = larger(__byte_perm(most[2 * i], most[2 * i + 1], 0x5410),
                               __byte_perm(most[2 * i], most[2 * i + 1], 0x7632));
    }
    int count = ROW_WORDS;
#pragma unroll
    for (int distance = ACROSS / 2; distance > 0; distance /= 2) {
        const bool upper = count > 1 && (lane & distance), halves = count > 1;
        count = halves ? count / 2 : 1;
#pragma unroll
        for (int i = 0; i < count; i++) {
            const unsigned kept = upper ? across[i + count] : across[i],
                           given = halves && !upper ? across[i + count] : across[i];
            across[i] = larger(kept, __shfl_xor_sync(0xffffffffu, given, distance));
        }
    }
    constexpr int SHARING = ACROSS / ROW_WORDS, IN_WORD = OWN_ROWS / ROW_WORDS;
    const int part = lane % SHARING;
    if (part < IN_WORD)
        room.row_most[own_row() + (lane / SHARING * IN_WORD + part) * ROW_STEP] =
            widened(IS_F32 ? across[0] : part ? across[0] >> 16 : across[0] & 0xffffu);
}

// A thread computes one scale: of a column, or of a row.
#if THREADS != 2 * TILE
#error "a tile has another number of scales"
#endif
// Stores codes and scales along rows, and puts the codes along columns into shared memory. `again`: returns vector i of this
// thread's once more, for special tiles: registers that stay in use there would be missing elsewhere.
template <typename AGAIN>
DEVICE void store_tile(const dw_fp8_block_codes_params &p, const tile_place &at, elements (&x)[OWN_ROWS], shared_room &room,
                       AGAIN again) {
    const int line = (int)threadIdx.x % TILE;
    const bool is_column = threadIdx.x < TILE;
    find_largest(x, room);
    __syncthreads();
    const unsigned most = is_column ? largest_in_column(room, line) : room.row_most[line];
    const block_scale by = scale_of(most);
    float *scales = is_column ? p.turned_scales : p.scales;
    const int first = is_column ? at.column : at.row, lines = is_column ? p.columns : p.rows,
              block = (is_column ? at.row : at.column) / TILE;
    if (scales && first + line < lines) scales[(long long)block * lines + (first + line)] = by.scale;
    const bool special = __syncthreads_or(is_special(most)) != 0;
    factors *own = is_column ? &room.columns[line] : &room.rows[line];
    *own = special ? factors_of<true>(by.divisor) : factors_of<false>(by.divisor);
    __syncthreads();
    if (special) return store_special_codes(p, at, room, again);
    const auto encode = [&](int i) { return encode_row<false>(x[i], room.rows[own_row() + i * ROW_STEP]); };
    store_rows<false>(p, at, room, encode);
    if (p.turned) keep_columns(x, room);
}
#endif

#endif
