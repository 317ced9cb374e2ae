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

// Where a row lies: its batch and token.
typedef struct token_place {
    long long batch, token;
} token_place;

DEVICE token_place place_of(const dw_sm90_rope &r, int row) {
    const int batch = row / r.tokens;
    return {batch, row - batch * r.tokens};
}
DEVICE long long offset_of(const token_place &place, const long long *strides) {
    return place.batch * strides[0] + place.token * strides[1];
}

DEVICE elements load_table(const void *table, long long at) {
    const uint4 v = *(const uint4 *)((const uint16 *)table + at);
    elements e;
    memcpy(&e, &v, sizeof e);
    return e;
}

DEVICE void load_unit(const dw_sm90_gemm_params &p, const unit &u, loaded &to) {
    const int column = u.column % ROPE_COLUMNS;
    if (u.count <= 0 || column >= ROPE_TURNED) return;
    const token_place place = place_of(p.rope, u.row);
    to.operands[0] = load_table(p.rope.cosine, offset_of(place, p.rope.cosine_strides) + column);
    to.operands[1] = load_table(p.rope.sine, offset_of(place, p.rope.sine_strides) + column);
}

// Rotates the elements x, whose pairs have `other`. `second`: they are the second ones of their pairs.
DEVICE elements rotate_unit(const elements &x, const elements &other, const loaded &from, bool second) {
    elements y;
    EACH(group, LANE_GROUPS) {
        float values[LANES];
        EACH(j, LANES) {
            const float sine = from.operands[1].at[group].get(j);
            const bool turns_back = ROPE_INTERLEAVED ? j % 2 == 0 : !second;
            values[j] = rotated(x.at[group].get(j), from.operands[0].at[group].get(j),
                                other.at[group].get(ROPE_INTERLEAVED ? j ^ 1 : j), turns_back ? -sine : sine);
        }
        y.at[group].set(values);
    }
    return y;
}

// in[0]: the unit's elements of D, in[1], unless pairs are neighbours: the other ones of their pairs.
DEVICE void finish_unit(const dw_sm90_gemm_params &p, const unit &u, elements *in, const loaded &from) {
    const int head = u.column / ROPE_COLUMNS, column = u.column % ROPE_COLUMNS;
    uint32 words[4];
    if (p.d) {
        memcpy(words, &in[0], sizeof words);
        store_eight(p.d, u.row, (int)p.stride_d, u.column, u.count, words);
    }
    if (u.count <= 0 || !p.rope.y) return;
    const elements y = column < ROPE_TURNED ? rotate_unit(in[0], in[ROPE_INTERLEAVED ? 0 : 1], from, column >= ROPE_TURNED / 2) : in[0];
    const long long at = offset_of(place_of(p.rope, u.row), p.rope.y_strides) + head * p.rope.y_head_stride + column;
    memcpy(words, &y, sizeof words);
    *(uint4 *)((uint16 *)p.rope.y + at) = make_uint4(words[0], words[1], words[2], words[3]);
}

#endif
