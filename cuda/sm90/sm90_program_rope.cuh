// Rotary position embedding in place of an elementwise program behind a GEMM of sm_90a: each head of ROPE_COLUMNS columns of
// D is rotated and stored where attention reads it. The source (src/kernel/cuda/sm90_program_rope.c) defines PROGRAM_ROPE,
// ROPE_COLUMNS, ROPE_TURNED, the first columns of a head that are rotated, and ROPE_INTERLEAVED, and PROGRAM_OPERANDS 2:
// cosines and sines are loaded ahead as a program's operands are.
//
// Pairs are columns i and i + ROPE_TURNED / 2 of a head, or neighbours if ROPE_INTERLEAVED. The other elements of a unit's
// pairs are one unit of the same row, which is in shared memory, because a tile has whole heads.
#ifndef DW_SM90_PROGRAM_ROPE_CUH
#define DW_SM90_PROGRAM_ROPE_CUH

#include "rotate.cuh"

static_assert(ROPE_COLUMNS % 8 == 0 && ROPE_TURNED % (ROPE_INTERLEAVED ? 8 : 16) == 0, "a unit has one kind of elements");
static_assert(ROPE_INTERLEAVED || TILE_COLUMNS % ROPE_COLUMNS == 0, "a tile has whole heads");
static_assert(PROGRAM_OPERANDS == 2 && PROGRAM_VECTORS == 0 && PROGRAM_WHOLE && !PROGRAM_HALVES, "cosines and sines");

// The tile's column of the unit at column `at`, or (part 1) of the unit that has the other elements of its pairs.
DEVICE int column_of_part(int at, int part) {
    const int column = at % ROPE_COLUMNS, half = ROPE_TURNED / 2;
    if (part == 0 || column >= ROPE_TURNED) return at;
    return column < half ? at + half : at - half;
}

// The batch and the token of a row.
struct row_place {
    int batch, token;
};

DEVICE row_place place_of(const dw_sm90_rope &r, int row) {
    const int batch = quotient(row, r.tokens, r.inverse_tokens);
    return {batch, row - batch * r.tokens};
}
DEVICE long long offset_of(const row_place &place, const int *strides) {
    return (long long)place.batch * strides[0] + (long long)place.token * strides[1];
}

DEVICE elements load_table(const void *table, long long at) {
    const uint4 v = *(const uint4 *)((const uint16 *)table + at);
    elements e;
    memcpy(&e, &v, sizeof e);
    return e;
}

DEVICE void load_unit(const dw_sm90_gemm_params &p, const unit &u, loaded &to) {
    // Units that need no angles load others, since branches would let loads wait for each other.
    const bool turns = u.count > 0 && u.column % ROPE_COLUMNS < ROPE_TURNED;
    const int column = turns ? u.column % ROPE_COLUMNS : 0;
    const row_place place = place_of(p.rope, turns ? u.row : 0);
    to.operands[0] = load_table(p.rope.cosine, offset_of(place, p.rope.cosine_strides) + column);
    to.operands[1] = load_table(p.rope.sine, offset_of(place, p.rope.sine_strides) + column);
}

// The sines with the signs that rotated() expects. `second`: the elements are the second ones of their pairs.
DEVICE elements signed_sines(const elements &sines, bool second) {
    const uint32 signs = ROPE_INTERLEAVED ? 0x8000u : second ? 0u : 0x80008000u;
    uint32 words[4];
    elements e;
    memcpy(words, &sines, sizeof words);
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] ^= signs;
    memcpy(&e, words, sizeof e);
    return e;
}

// in[0]: the unit's elements of D, in[1], unless pairs are neighbours: the other ones of their pairs.
DEVICE void compute_unit(const dw_sm90_gemm_params &p, const unit &u, elements *in, const loaded &from, elements *out) {
    const int column = u.column % ROPE_COLUMNS;
    const elements &x = in[0], &other = in[ROPE_INTERLEAVED ? 0 : 1], &cosines = from.operands[0],
                   across = signed_sines(from.operands[1], column >= ROPE_TURNED / 2);
    EACH(group, LANE_GROUPS) {
        float values[LANES];
        EACH(j, LANES)
            values[j] = rotated(x.at[group].get(j), cosines.at[group].get(j), other.at[group].get(ROPE_INTERLEAVED ? j ^ 1 : j),
                                across.at[group].get(j));
        out[0].at[group].set(values);
        if (column >= ROPE_TURNED) out[0].at[group] = x.at[group];
    }
}

DEVICE void store_unit(const dw_sm90_gemm_params &p, const unit &u, const elements *in, const elements *out) {
    const int head = u.column / ROPE_COLUMNS, column = u.column % ROPE_COLUMNS;
    uint32 words[4];
    memcpy(words, &in[0], sizeof words);
    if (p.d) store_eight(p.d, u.row, (int)p.stride_d, u.column, u.count, words);
    const long long at = offset_of(place_of(p.rope, u.row), p.rope.y_strides) + (long long)head * p.rope.y_head_stride + column;
    memcpy(words, &out[0], sizeof words);
    if (u.count > 0 && p.rope.y) *(uint4 *)((uint16 *)p.rope.y + at) = make_uint4(words[0], words[1], words[2], words[3]);
}

#endif
