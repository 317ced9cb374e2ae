// Codes of fp8-block of D, made by the GEMM of sm_90a that computes it: the next GEMM's operand needs no pass of its own
// (src/kernel/cuda/sm90_gemm.c). Codes and scales have the bits that fp8_block_codes.cu makes from D, rounded to 16 bits.
// Defines: CODED, a sum of DW_SM90_CODED, ... (sm90_gemm_params.h).
//
// Both warpgroups hold the rounded elements of the last tile, 64 rows each, while they multiply the next one. In units spread
// over its steps they
// - find the largest magnitudes. Four threads share a row, whose blocks lie in the tile. A column's block lies in all eight
//   warps, which leave their maxima in shared memory;
// - encode rows. Exchanges in four threads give each 16 contiguous codes, and 64 bytes together;
// - compute the scales and factors of the columns, a thread for each;
// - encode columns. movmatrix transposes 8 x 8 pairs of codes, and exchanges in four threads give each the 16 codes that a
//   column has in the warp's rows.
//
// Other units lie between those that write shared memory and those that read it, so that a warp that waits at a barrier
// seldom finds others missing. Blocks that need division (fp8_block_quotient.cuh) are rare: a loop makes their codes, two at
// a time.
#ifndef DW_SM90_BLOCK_CODES_CUH
#define DW_SM90_BLOCK_CODES_CUH

#if CODED

#define TYPE (ELEMENT == 0 ? DW_ELEMENT_BF16 : DW_ELEMENT_F16)
#include "fp8_block_quotient.cuh"
#include "scale_layout.h"

#define CODES_TURNED ((CODED & DW_SM90_CODED_TURNED) != 0)
#define CODES_BESIDE_D ((CODED & DW_SM90_CODED_D) != 0)
#define ROW_BLOCKS (TILE_COLUMNS / DW_SM90_BLOCK) // of a row of the tile
#define ROW_UNITS (2 * ROW_BLOCKS)
#define FACTORS_UNIT (1 + ROW_UNITS)
#define FIRST_STRIP (FACTORS_UNIT + CODES_TURNED)
#define UNITS (FIRST_STRIP + (CODES_TURNED || CODES_BESIDE_D ? STRIPS : 0))

static_assert(TOGETHER && PARTS == 1 && TILE_M == DW_SM90_BLOCK && TILE_COLUMNS % DW_SM90_BLOCK == 0, "a tile has whole blocks");
static_assert(!F32_OUTPUT && !SPLIT && GROUPS == DW_GROUPS_BATCH && !SCATTER && !ROW_SQUARES && !RESIDUAL,
              "one product, whose elements of 16 bits are encoded");

// The elements of the last tile.
typedef struct held {
    int row, column; // the thread's first row; the tile's first column
    int end;         // of the rows that exist; 0: there is no last tile
    factors by;      // thread q of a quad has those of block q / 2 of the second of its rows if q is odd, else of the first
    uint32 phase;    // of the barriers
    uint32 words[STRIPS][2][4];
} held;

// Rows of codes end with zeros up to this length.
DEVICE int padded(int codes) { return (codes + DW_CODE_ROW - 1) / DW_CODE_ROW * DW_CODE_ROW; }

DEVICE int quad_lane() { return lane_index() & 3; }
// The column of the thread's first element in a strip. Word i of a row has columns 8 i and 8 i + 1 behind it.
DEVICE int first_column(const held &h, int strip) { return h.column + 32 * strip + 2 * quad_lane(); }

// Where the largest magnitudes of a warp's columns are, and the factors of all columns.
DEVICE uint32 warp_most(const shared_layout &s, int warp) { return s.most + warp * TILE_COLUMNS * 2; }
DEVICE uint32 column_factors(const shared_layout &s, int column) { return s.factors + column * 8; }

// Special blocks have their divisor and a negative number.
DEVICE factors factors_of_block(unsigned most, const block_scale &by) {
    if (is_special(most)) return {by.divisor, -1.f};
    return factors_of<false>(by.divisor);
}
DEVICE bool needs_division(const factors &by) { return by.b < 0.f; }
DEVICE float any_quotient(float x, const factors &by) {
    return needs_division(by) ? special_quotient(x, by.a) : quotient<false>(x, by);
}

// Makes elements outside of D zeros, which do not count.
DEVICE void clear_outside(const dw_sm90_gemm_params &p, held &h) {
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int left = p.n - first_column(h, strip) - 8 * i;
            const uint32 kept = left < 1 ? 0u : left < 2 ? 0xffffu : 0xffffffffu;
#pragma unroll
            for (int half = 0; half < 2; half++) h.words[strip][half][i] &= h.row + 8 * half < h.end ? kept : 0u;
        }
}

DEVICE void store_held(const dw_sm90_gemm_params &p, held &h, int strip) {
    const int column = h.column + 8 * quad_lane();
    chunks d;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = h.row + 8 * half;
        d.first[half] = (uint16 *)p.d + row * p.stride_d + column;
        d.count[half] = row < h.end ? p.n - column : 0;
    }
    store_strip(d, strip, h.words[strip]);
}

// ---- magnitudes and scales ----------------------------------------------------------------------------------

// The largest magnitudes of 64 columns, of which lanes have those of words in pairs. Eight lanes share a column; those 16 lanes
// apart have the maxima of two lanes of half of the words, and so on.
DEVICE void leave_columns(const shared_layout &s, int part, uint32 (&down)[8]) {
    const int lane = lane_index();
#pragma unroll
    for (int bit = 4; bit > 0; bit /= 2) {
        const bool upper = lane & 4 * bit;
#pragma unroll
        for (int i = 0; i < bit; i++) {
            const uint32 kept = upper ? down[i + bit] : down[i], given = upper ? down[i] : down[i + bit];
            down[i] = larger(kept, __shfl_xor_sync(0xffffffff, given, 4 * bit));
        }
    }
    shared_store_u32(warp_most(s, threadIdx.x / 32) + (64 * part + 8 * (lane / 4) + 2 * (lane % 4)) * 2, down[0]);
}

DEVICE void find_largest(const dw_sm90_gemm_params &p, const shared_layout &s, held &h) {
    uint32 across[ROW_BLOCKS][2] = {};
#pragma unroll
    for (int part = 0; part < STRIPS / 2; part++) {
        uint32 down[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int strip = 2 * part + i / 4;
            const uint32 upper = magnitudes(h.words[strip][0][i % 4]), lower = magnitudes(h.words[strip][1][i % 4]);
            across[strip / 4][0] = larger(across[strip / 4][0], upper);
            across[strip / 4][1] = larger(across[strip / 4][1], lower);
            down[i] = larger(upper, lower);
        }
        if constexpr (CODES_TURNED) leave_columns(s, part, down);
    }
    if constexpr (CODES_TURNED) {
        __syncwarp();
        if (lane_index() == 0) barrier_arrive(s.found);
    }
    uint32 mine = 0; // maxima of a block of the two rows
#pragma unroll
    for (int block = 0; block < ROW_BLOCKS; block++) {
        uint32 most = larger(__byte_perm(across[block][0], across[block][1], 0x5410),
                             __byte_perm(across[block][0], across[block][1], 0x7632));
        most = larger(most, __shfl_xor_sync(0xffffffff, most, 1));
        most = larger(most, __shfl_xor_sync(0xffffffff, most, 2));
        if (quad_lane() / 2 == block) mine = most;
    }
    const int half = quad_lane() % 2, row = h.row + 8 * half, column = h.column + quad_lane() / 2 * DW_SM90_BLOCK;
    const unsigned most = widened(half ? mine >> 16 : mine & 0xffffu);
    const block_scale by = scale_of(most);
    if (quad_lane() < ROW_UNITS && row < h.end && column < p.n)
        p.codes.scales[(long long)(column / DW_SM90_BLOCK) * p.m + row] = by.scale;
    h.by = factors_of_block(most, by);
}

// A thread has a column of the tile.
DEVICE void make_column_factors(const dw_sm90_gemm_params &p, const shared_layout &s, const held &h) {
    const int own = threadIdx.x, column = h.column + own;
    bool special = false;
    barrier_wait(s.found, h.phase);
    if (own < TILE_COLUMNS) {
        uint32 most = 0;
#pragma unroll
        for (int warp = 0; warp < 4 * DW_SM90_MULTIPLIERS; warp++)
            most = larger(most, shared_load_u32(warp_most(s, warp) + own / 2 * 4));
        most = widened(own % 2 ? most >> 16 : most & 0xffffu);
        const block_scale by = scale_of(most);
        const factors made = factors_of_block(most, by);
        if (column < p.n) p.codes.turned_scales[(long long)(h.row / DW_SM90_BLOCK) * p.n + column] = by.scale;
        shared_store_f32_pair(column_factors(s, own), made.a, made.b);
        special = needs_division(made);
    }
    special = __any_sync(0xffffffff, special);
    if (lane_index() == 0) {
        shared_store_u32(s.special + threadIdx.x / 32 * 4, special);
        barrier_arrive(s.computed);
    }
}

// Waits for all columns' factors. Returns whether one of them is special.
DEVICE bool wait_for_factors(const shared_layout &s, const held &h) {
    barrier_wait(s.computed, h.phase);
    const uint4 a = shared_load16(s.special), b = shared_load16(s.special + 16);
    return (a.x | a.y | a.z | a.w | b.x | b.y | b.z | b.w) != 0;
}

// ---- codes --------------------------------------------------------------------------------------------------

// The 16-bit halves of four words that lanes of a quad had at the same place: the lower ones, then the upper ones.
DEVICE uint4 halves_of(const uint32 (&words)[4]) {
    return make_uint4(__byte_perm(words[0], words[1], 0x5410), __byte_perm(words[2], words[3], 0x5410),
                      __byte_perm(words[0], words[1], 0x7632), __byte_perm(words[2], words[3], 0x7632));
}

DEVICE unsigned encode_word(uint32 word, const factors &low, const factors &high) {
    return encode(quotient<false>(element_low(word), low), quotient<false>(element_high(word), high));
}

// The factors of the quad's row `half` of a block.
DEVICE factors row_factors(const held &h, int block, int half) {
    const int from = (int)(lane_index() & ~3u) + 2 * block + half;
    return {__shfl_sync(0xffffffff, h.by.a, from), __shfl_sync(0xffffffff, h.by.b, from)};
}

// Encodes 128 columns of the thread's row `half`.
DEVICE void encode_row(const dw_sm90_gemm_params &p, const held &h, int block, int half) {
    const factors by = row_factors(h, block, half);
    const int row = h.row + 8 * half, column = h.column + DW_SM90_BLOCK * block + 16 * quad_lane();
    unsigned char *const to = p.codes.codes + (row * p.codes.row_bytes + column);
#pragma unroll
    for (int part = 0; part < 2; part++) {
        uint32 codes[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32 *const words = &h.words[4 * block + 2 * part + i / 2][half][i % 2 * 2];
            codes[i] = encode_word(words[0], by, by) | encode_word(words[1], by, by) << 16;
        }
        transpose_quad(codes);
        if (row < h.end && column + 64 * part < padded(p.n)) *(uint4 *)(to + 64 * part) = halves_of(codes);
    }
}

DEVICE uint32 transpose_pairs(uint32 word) {
    uint32 result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
    return result;
}

// Encodes a strip along its columns. movmatrix takes pairs of columns for elements of 16 bits: a thread has two rows of two
// columns, of rows 8 below in the other word.
DEVICE void encode_columns(const dw_sm90_gemm_params &p, const shared_layout &s, const held &h, int strip) {
    const int lane = lane_index();
    const uint32 from = column_factors(s, 32 * strip + 2 * (lane % 4));
    uint32 codes[4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32 made[2] = {};
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float4 v = shared_load_f32x4(from + (2 * i + j) * 64);
            const factors low = {v.x, v.y}, high = {v.z, v.w};
#pragma unroll
            for (int half = 0; half < 2; half++)
                made[half] |= encode_word(h.words[strip][half][2 * i + j], low, high) << 16 * j;
        }
        const uint32 upper = transpose_pairs(made[0]), lower = transpose_pairs(made[1]);
        codes[2 * i] = __byte_perm(upper, lower, 0x6420);
        codes[2 * i + 1] = __byte_perm(upper, lower, 0x7531);
    }
    transpose_quad(codes);
    const int pair = lane / 4, column = h.column + 32 * strip + lane % 4 / 2 * 16 + pair % 2 * 8 + pair / 2 * 2 + lane % 2,
              row = h.row - lane / 4;
    if (column < p.n && row < padded(p.m))
        *(uint4 *)(p.codes.turned + (column * p.codes.turned_row_bytes + row)) = halves_of(codes);
}

// Encodes all words in either direction, one after the other: each takes the first one's place.
template <bool TURNED> DEVICE void encode_special(const dw_sm90_gemm_params &p, const shared_layout &s, held &h) {
    uint32 *const words = h.words[0][0];
#pragma unroll 1
    for (int at = 0; at < 8 * STRIPS; at++) {
        const int half = at / 4 % 2, row = h.row + 8 * half, column = first_column(h, at / 8) + 8 * (at % 4);
        factors low = row_factors(h, at / 32, half), high = low;
        if constexpr (TURNED) {
            const float4 v = shared_load_f32x4(column_factors(s, column - h.column));
            low = {v.x, v.y}, high = {v.z, v.w};
        }
        const uint32 word = words[0], made = encode(any_quotient(element_low(word), low), any_quotient(element_high(word), high));
#pragma unroll
        for (int i = 0; i + 1 < 8 * STRIPS; i++) words[i] = words[i + 1];
        words[8 * STRIPS - 1] = word;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint8 code = row < h.end && column + i < p.n ? (uint8)(made >> 8 * i) : 0; // a NaN's block, too, ends with zeros
            if constexpr (TURNED) {
                if (column + i < p.n && row < padded(p.m))
                    p.codes.turned[(column + i) * p.codes.turned_row_bytes + row] = code;
            } else if (row < h.end && column + i < padded(p.n)) p.codes.codes[row * p.codes.row_bytes + column + i] = code;
        }
    }
}

// ---- units --------------------------------------------------------------------------------------------------

// `special`: of the warp's rows, then of the tile's columns.
DEVICE void finish_unit(const dw_sm90_gemm_params &p, const shared_layout &s, held &h, int unit, bool &special) {
    if (h.end == 0) return;
    if (unit == 0) {
        find_largest(p, s, h);
        special = __any_sync(0xffffffff, needs_division(h.by));
        if (special) encode_special<false>(p, s, h);
    } else if (unit <= ROW_UNITS) {
        if (!special) encode_row(p, h, (unit - 1) / 2, (unit - 1) % 2);
    } else if (unit < FIRST_STRIP) {
        make_column_factors(p, s, h);
    } else {
        const int strip = unit - FIRST_STRIP;
        if constexpr (CODES_TURNED) {
            if (strip == 0) {
                special = wait_for_factors(s, h);
                if (special) encode_special<true>(p, s, h);
            }
            if (!special) encode_columns(p, s, h, strip);
        }
        if constexpr (CODES_BESIDE_D) store_held(p, h, strip);
    }
    if (unit == UNITS - 1) h.phase ^= 1;
}

// As many steps of the next tile are started before a unit: one may take longer than a step's products.
DEVICE int steps_before(int unit, int steps) { return ((unit + 1) * steps + UNITS - 1) / UNITS; }

// Encodes the last tile while multiplying tile t, whose elements it keeps.
DEVICE void multiply_and_encode(const dw_sm90_gemm_params &p, const shared_layout &s, ring &r, const tile &t,
                                float (*sums)[WIDTH / 2], held &h) {
    // The compiler must see that all threads of a warp have the same.
    const int rows = __shfl_sync(0xffffffff, threadIdx.x / 128 * 64, 0), steps = __shfl_sync(0xffffffff, steps_of(t), 0);
    const float factor = factor_of(p, t);
    float of_rows[2];
    load_row_factors(p, t, 0, of_rows);
    int step = 0;
    bool special = false;
    if (steps == 0) clear_sums(sums);
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++) {
        multiply_steps(s, r, t, step, steps_before(unit, steps), rows, sums);
        if (BIAS && unit == 0) load_bias(p, s, t);
        if (ROW_SCALES && unit == 0) load_row_scales(p, s, t);
        finish_unit(p, s, h, unit, special);
    }
    multiply_steps(s, r, t, step, steps, rows, sums);
    h.row = row_of(t, 0, 0), h.column = t.column, h.end = t.end;
    if constexpr (BIAS) __syncwarp();
    if constexpr (ROW_SCALES) wait_for_row_scales();
    end_steps(s, r, steps, sums);
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) round_strip(s, factor, sums[0], strip, h.words[strip], rows, of_rows);
    if (h.end - t.row < TILE_M || p.n - t.column < TILE_COLUMNS) clear_outside(p, h);
}

DEVICE void compute_and_encode(const dw_sm90_gemm_params &p, const shared_layout &s) {
    ring r = {0, 0};
    walk w = {};
    tile t;
    float sums[PARTS][WIDTH / 2];
    held h;
    h.end = h.phase = 0;
    for (bool more = true; more;) {
        more = next_tile(p, w, t);
        if (!more) t.k = t.end = 0; // a tile without rows, which encodes the last one: a second copy of the units would be long
        multiply_and_encode(p, s, r, t, sums, h);
    }
}

#endif

#endif
