/* Test numbers for block quantization, as bits of an F32; used by the first-use check and by tests. */
#ifndef DW_QUANTIZE_NUMBERS_H
#define DW_QUANTIZE_NUMBERS_H

#include "number/half.h"
#include <math.h>
#include <stdbool.h>
#include <stddef.h>

enum { QUANTIZE_KINDS = 8, QUANTIZE_ORDINARY = 4, QUANTIZE_ANY_BITS = 3 };

/* Returns a number of the given kind, from a random word. */
static inline uint32_t quantize_number(uint64_t word, int kind) {
    /* The limits of formats and rules, and their neighbours; the last six are infinities and NaNs. */
    static const uint32_t chosen[] = {
        0,          0x80000000, 1,          0x80000001, 0x007FFFFF, 0x00800000, 0x3F800000,
        0xBF7FFFFF, 0x43800000, 0x437FFFFF, 0x43800001, 0x43E00000, 0xC3E00001, 0x47600000,
        0x47600001, 0x40C00000, 0x40C00001, 0x3F000000, 0x3E800000, 0x40A00000, 0x45280000,
        0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFF800001};
    enum { CHOSEN = sizeof chosen / sizeof *chosen };
    const float uniform = (float)((int64_t)word >> 40) * 0x1p-23f;
    switch (kind) {
    case 0: return dw__f32_bits(uniform);
    case 1: return 0;
    case 2: return (uint32_t)word & 0x807FFFFF;    /* subnormal */
    case QUANTIZE_ANY_BITS: return (uint32_t)word; /* one in 128 is infinite or NaN */
    case QUANTIZE_ORDINARY: return dw__f32_bits(ldexpf(uniform, (int)(word % 11) - 5));
    case 5: return word % 29 ? dw__f32_bits(uniform * 448) : chosen[(word >> 8) % CHOSEN];
    case 6: return chosen[word % (CHOSEN - 6)];
    default: return chosen[word % CHOSEN];
    }
}

/* Returns the kind of a square of 32 x 32 numbers: any kind, or with `ordinary` mostly uniform numbers of different
 * magnitudes. */
static inline int quantize_kind(uint64_t word, bool ordinary) {
    const int kind = (int)(word % QUANTIZE_KINDS);
    if (!ordinary) return kind;
    return kind < 6 ? QUANTIZE_ORDINARY : kind == 6 ? 5 : 0;
}

#endif
