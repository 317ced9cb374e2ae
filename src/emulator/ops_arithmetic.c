/* Integers, bits, predicates, moves and comparisons: PTX ISA, "Integer Arithmetic Instructions", "Comparison and
 * Selection Instructions", "Logic and Shift Instructions", "mov".
 */
#include "emulator/lanes.h"
#include "number/half.h"
#include <math.h>
#include <string.h>

/* The six variants of an operation: unsigned and signed, of 16, 32 and 64 bits. */
enum { U16, S16, U32, S32, U64, S64, FORMS };

static int form_of(dw__emu_type type) {
    switch (type) {
    case DW__T_B16:
    case DW__T_U16: return U16;
    case DW__T_S16: return S16;
    case DW__T_B32:
    case DW__T_U32: return U32;
    case DW__T_S32: return S32;
    case DW__T_B64:
    case DW__T_U64: return U64;
    case DW__T_S64: return S64;
    default: return -1;
    }
}

#define SIX(M, name, RESULT)                                                                       \
    M(name##_u16, uint16_t, uint32_t, (uint16_t)(RESULT))                                          \
    M(name##_s16, int16_t, uint32_t, (uint16_t)(RESULT))                                           \
    M(name##_u32, uint32_t, uint32_t, RESULT)                                                      \
    M(name##_s32, int32_t, uint32_t, RESULT)                                                       \
    M(name##_u64, uint64_t, uint64_t, RESULT)                                                      \
    M(name##_s64, int64_t, uint64_t, RESULT)                                                       \
    static const dw__emu_run name[FORMS] = {name##_u16, name##_s16, name##_u32,                    \
                                            name##_s32, name##_u64, name##_s64};
/* Operations whose result does not depend on the sign. */
#define THREE(M, name, RESULT)                                                                     \
    M(name##_16, uint32_t, uint32_t, (uint16_t)(RESULT))                                           \
    M(name##_32, uint32_t, uint32_t, RESULT)                                                       \
    M(name##_64, uint64_t, uint64_t, RESULT)                                                       \
    static const dw__emu_run name[FORMS] = {name##_16, name##_16, name##_32,                       \
                                            name##_32, name##_64, name##_64};

static inline bool is_negative(int64_t x, bool is_signed) { return is_signed && x < 0; }
#define NEGATIVE(x) is_negative((int64_t)(x), (__typeof__(x))-1 < (__typeof__(x))1)

THREE(DW__BINARY, add, x + y)
THREE(DW__BINARY, sub, x - y)
THREE(DW__BINARY, mul_low, x *y)
THREE(DW__TERNARY, mad_low, x *y + z)
THREE(DW__UNARY, negate, 0 - x)
THREE(DW__UNARY, complement, ~x)
THREE(DW__BINARY, both, x &y)
THREE(DW__BINARY, either, x | y)
THREE(DW__BINARY, differ, x ^ y)
SIX(DW__BINARY, least, x < y ? x : y)
SIX(DW__BINARY, greatest, x > y ? x : y)
/* Division by zero and of the least number by -1 is undefined. These results are those of NVIDIA's compilers: all
 * ones, and the number itself. */
#define OVERFLOWS(x, y) (NEGATIVE(x) && (y) == (__typeof__(x))-1)
SIX(DW__BINARY, quotient,
    y == 0            ? ~(uint64_t)0
    : OVERFLOWS(x, y) ? 0 - (uint64_t)x
                      : (uint64_t)(x / y))
SIX(DW__BINARY, remainder_of, y == 0 ? (uint64_t)x : OVERFLOWS(x, y) ? 0 : (uint64_t)(x % y))
SIX(DW__UNARY, magnitude, NEGATIVE(x) ? 0 - (uint64_t)x : (uint64_t)x)

DW__BINARY(high_u16, uint16_t, uint32_t, (uint16_t)((uint32_t)x *y >> 16))
DW__BINARY(high_s16, int16_t, uint32_t, (uint16_t)((int32_t)x *y >> 16))
DW__BINARY(high_u32, uint32_t, uint32_t, (uint64_t)x *y >> 32)
DW__BINARY(high_s32, int32_t, uint32_t, (int64_t)x *y >> 32)
DW__BINARY(high_u64, uint64_t, uint64_t, (unsigned __int128)x *y >> 64)
DW__BINARY(high_s64, int64_t, uint64_t, (__int128)x *y >> 64)
static const dw__emu_run mul_high[FORMS] = {high_u16, high_s16, high_u32,
                                            high_s32, high_u64, high_s64};
DW__TERNARY(mad_high_u32, uint32_t, uint32_t, ((uint64_t)x * y >> 32) + z)
DW__TERNARY(mad_high_s32, int32_t, uint32_t, (uint32_t)((int64_t)x *y >> 32) + (uint32_t)z)
DW__TERNARY(mad_high_u64, uint64_t, uint64_t, (uint64_t)((unsigned __int128)x *y >> 64) + z)
DW__TERNARY(mad_high_s64, int64_t, uint64_t, (uint64_t)((__int128)x *y >> 64) + (uint64_t)z)
static const dw__emu_run mad_high[FORMS] = {NULL,         NULL,         mad_high_u32,
                                            mad_high_s32, mad_high_u64, mad_high_s64};

/* Multiplication with a result twice as wide. */
#define EXTEND_S16(v) (int32_t)(int16_t)(v)
static dw__emu_next mul_wide_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const uint32_t *a = DW__REGISTER(w, const uint32_t, op->a),
                   *b = DW__REGISTER(w, const uint32_t, op->b);
    const bool add_third = op->detail != NULL;
    switch (op->immediate) {
    case U16:
        DW__LANEWISE(mask, DW__REGISTER(w, uint32_t, op->d)[i] =
                               a[i] * b[i] + (add_third ? DW__REGISTER(w, uint32_t, op->c)[i] : 0));
        break;
    case S16:
        DW__LANEWISE(mask, DW__REGISTER(w, uint32_t, op->d)[i] =
                               (uint32_t)(EXTEND_S16(a[i]) * EXTEND_S16(b[i])) +
                               (add_third ? DW__REGISTER(w, uint32_t, op->c)[i] : 0));
        break;
    case U32:
        DW__LANEWISE(mask, DW__REGISTER(w, uint64_t, op->d)[i] =
                               (uint64_t)a[i] * b[i] +
                               (add_third ? DW__REGISTER(w, uint64_t, op->c)[i] : 0));
        break;
    default:
        DW__LANEWISE(mask, DW__REGISTER(w, uint64_t, op->d)[i] =
                               (uint64_t)((int64_t)(int32_t)a[i] * (int32_t)b[i]) +
                               (add_third ? DW__REGISTER(w, uint64_t, op->c)[i] : 0));
        break;
    }
    return DW__NEXT;
}

/* ---- translators of arithmetic ------------------------------------------------------------- */

/* Integer variants of opcodes that floating point shares. A type that is no integer leaves the instruction to the
 * other table. */
static dw_status integer_type(dw__emu_translator *t, int *form, dw__emu_type *type) {
    if (dw__emu_take_type(t, type) && (*form = form_of(*type)) >= 0) return DW_OK;
    t->cursor = 0;
    return dw__emu_unsupported(t);
}

#define TRANSLATE_SAME(opcode, runs, count)                                                        \
    static dw_status translate_##opcode(dw__emu_translator *t) {                                   \
        int form;                                                                                  \
        dw__emu_type type;                                                                         \
        DW_RETURN_IF_FAILED(integer_type(t, &form, &type));                                        \
        return dw__emu_emit_same(t, type, count, runs[form]);                                      \
    }
TRANSLATE_SAME(add, add, 2)
TRANSLATE_SAME(sub, sub, 2)
TRANSLATE_SAME(div, quotient, 2)
TRANSLATE_SAME(rem, remainder_of, 2)
TRANSLATE_SAME(min, least, 2)
TRANSLATE_SAME(max, greatest, 2)
TRANSLATE_SAME(neg, negate, 1)
TRANSLATE_SAME(abs, magnitude, 1)

static dw_status emit_wide(dw__emu_translator *t, dw__emu_type type, bool add_third) {
    static const char add_mark = 1;
    int form = form_of(type);
    if (form < 0 || form >= U64 || t->in->operand_count != 3 + add_third)
        return dw__emu_unsupported(t);
    dw__emu_type wide = form < U32 ? DW__T_B32 : DW__T_B64;
    uint32_t a, b, c = 0, d;
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[1], type, &a));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[2], type, &b));
    if (add_third) DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[3], wide, &c));
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, &t->in->operands[0], wide, &d));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, mul_wide_run));
    t->op->a = a, t->op->b = b, t->op->c = c, t->op->d = d;
    t->op->immediate = form;
    t->op->detail = add_third ? &add_mark : NULL;
    return DW_OK;
}

static dw_status translate_mul(dw__emu_translator *t) {
    static const char *const parts[] = {"lo", "hi", "wide", NULL};
    dw__emu_type type;
    int part = dw__emu_take_one_of(t, parts), form;
    if (part < 0) return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(integer_type(t, &form, &type));
    if (part == 2) return emit_wide(t, type, false);
    return dw__emu_emit_same(t, type, 2, part == 0 ? mul_low[form] : mul_high[form]);
}

static dw_status translate_mad(dw__emu_translator *t) {
    static const char *const parts[] = {"lo", "hi", "wide", NULL};
    dw__emu_type type;
    int part = dw__emu_take_one_of(t, parts), form;
    if (part < 0) return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(integer_type(t, &form, &type));
    if (part == 2) return emit_wide(t, type, true);
    if (part == 1 && !mad_high[form]) return dw__emu_unsupported(t);
    return dw__emu_emit_same(t, type, 3, part == 0 ? mad_low[form] : mad_high[form]);
}

/* ---- bits ---------------------------------------------------------------------------------- */

#define PREDICATE_BINARY(name, RESULT)                                                             \
    static dw__emu_next name(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {               \
        const uint32_t x = *DW__REGISTER(w, uint32_t, op->a),                                      \
                       y = *DW__REGISTER(w, uint32_t, op->b);                                      \
        uint32_t *d = DW__REGISTER(w, uint32_t, op->d);                                            \
        (void)y;                                                                                   \
        *d = (*d & ~mask) | ((RESULT)&mask);                                                       \
        return DW__NEXT;                                                                           \
    }
PREDICATE_BINARY(and_predicate, x &y)
PREDICATE_BINARY(or_predicate, x | y)
PREDICATE_BINARY(xor_predicate, x ^ y)
PREDICATE_BINARY(not_predicate, ~x)
PREDICATE_BINARY(mov_predicate, x)

static dw_status translate_bits(dw__emu_translator *t, int count, dw__emu_run predicate,
                                const dw__emu_run *runs) {
    dw__emu_type type;
    if (!dw__emu_take_type(t, &type)) return dw__emu_unsupported(t);
    if (type == DW__T_PRED) return dw__emu_emit_same(t, type, count, predicate);
    int form = form_of(type);
    return form < 0 ? dw__emu_unsupported(t) : dw__emu_emit_same(t, type, count, runs[form]);
}
static dw_status translate_and(dw__emu_translator *t) {
    return translate_bits(t, 2, and_predicate, both);
}
static dw_status translate_or(dw__emu_translator *t) {
    return translate_bits(t, 2, or_predicate, either);
}
static dw_status translate_xor(dw__emu_translator *t) {
    return translate_bits(t, 2, xor_predicate, differ);
}
static dw_status translate_not(dw__emu_translator *t) {
    return translate_bits(t, 1, not_predicate, complement);
}

/* Shifts: the distance has 32 bits; distances of at least the width shift out everything. */
#define SHIFT(name, T, SLOT, RESULT)                                                               \
    static dw__emu_next name(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {               \
        const SLOT *a = DW__REGISTER(w, const SLOT, op->a);                                        \
        const uint32_t *b = DW__REGISTER(w, const uint32_t, op->b);                                \
        SLOT *d = DW__REGISTER(w, SLOT, op->d);                                                    \
        enum { BITS = 8 * sizeof(T) };                                                             \
        DW__LANEWISE(mask, const T x = (T)a[i]; const uint32_t n = b[i]; d[i] = (SLOT)(RESULT));   \
        return DW__NEXT;                                                                           \
    }
SHIFT(left_16, uint16_t, uint32_t, (uint16_t)(n < BITS ? (uint32_t)x << n : 0))
SHIFT(left_32, uint32_t, uint32_t, n < BITS ? x << n : 0)
SHIFT(left_64, uint64_t, uint64_t, n < BITS ? x << n : 0)
SHIFT(right_u16, uint16_t, uint32_t, n < BITS ? x >> n : 0)
SHIFT(right_s16, int16_t, uint32_t, (uint16_t)(x >> (n < BITS ? n : BITS - 1)))
SHIFT(right_u32, uint32_t, uint32_t, n < BITS ? x >> n : 0)
SHIFT(right_s32, int32_t, uint32_t, x >> (n < BITS ? n : BITS - 1))
SHIFT(right_u64, uint64_t, uint64_t, n < BITS ? x >> n : 0)
SHIFT(right_s64, int64_t, uint64_t, x >> (n < BITS ? n : BITS - 1))
static const dw__emu_run shift_left[FORMS] = {left_16, left_16, left_32, left_32, left_64, left_64};
static const dw__emu_run shift_right[FORMS] = {right_u16, right_s16, right_u32,
                                               right_s32, right_u64, right_s64};

/* Emits an operation with d and a of one type and `narrow` further sources of 32 bits. */
static dw_status emit_narrow(dw__emu_translator *t, dw__emu_type result, dw__emu_type type,
                             int narrow, dw__emu_run run) {
    uint32_t places[4] = {0};
    if (t->in->operand_count != narrow + 2) return dw__emu_malformed(t, "wrong number of operands");
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[1], type, &places[1]));
    for (int i = 0; i < narrow; i++)
        DW_RETURN_IF_FAILED(
            dw__emu_take_source(t, &t->in->operands[2 + i], DW__T_U32, &places[2 + i]));
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, &t->in->operands[0], result, &places[0]));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, run));
    t->op->d = places[0], t->op->a = places[1], t->op->b = places[2], t->op->c = places[3];
    return DW_OK;
}

static dw_status translate_shl(dw__emu_translator *t) {
    int form;
    dw__emu_type type;
    DW_RETURN_IF_FAILED(integer_type(t, &form, &type));
    return emit_narrow(t, type, type, 1, shift_left[form]);
}
static dw_status translate_shr(dw__emu_translator *t) {
    int form;
    dw__emu_type type;
    DW_RETURN_IF_FAILED(integer_type(t, &form, &type));
    return emit_narrow(t, type, type, 1, shift_right[form]);
}

/* Bit fields: position and length are the low bytes of their operands. */
static uint64_t extract(uint64_t x, uint32_t position, uint32_t length, int width, bool is_signed) {
    position &= 0xFF, length &= 0xFF;
    uint32_t last = position + length - 1;
    if (length == 0) return 0;
    if (last > (uint32_t)width - 1) last = (uint32_t)width - 1;
    bool sign = is_signed && (x >> last & 1);
    uint64_t field = position < (uint32_t)width ? x >> position : 0;
    uint32_t kept = position < (uint32_t)width ? last - position + 1 : 0;
    uint64_t low = kept >= 64 ? ~(uint64_t)0 : ((uint64_t)1 << kept) - 1;
    field &= low;
    return sign ? field | ~low : field;
}
static uint64_t insert(uint64_t from, uint64_t into, uint32_t position, uint32_t length,
                       int width) {
    position &= 0xFF, length &= 0xFF;
    if (position >= (uint32_t)width || length == 0) return into;
    uint64_t low = length >= 64 ? ~(uint64_t)0 : ((uint64_t)1 << length) - 1;
    return (into & ~(low << position)) | (from & low) << position;
}
#define EXTRACT(name, SLOT, WIDTH, SIGNED)                                                         \
    static dw__emu_next name(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {               \
        const SLOT *a = DW__REGISTER(w, const SLOT, op->a);                                        \
        const uint32_t *b = DW__REGISTER(w, const uint32_t, op->b),                                \
                       *c = DW__REGISTER(w, const uint32_t, op->c);                                \
        SLOT *d = DW__REGISTER(w, SLOT, op->d);                                                    \
        DW__LANEWISE(mask, d[i] = (SLOT)extract(a[i], b[i], c[i], WIDTH, SIGNED));                 \
        return DW__NEXT;                                                                           \
    }
EXTRACT(extract_u32, uint32_t, 32, false)
EXTRACT(extract_s32, uint32_t, 32, true)
EXTRACT(extract_u64, uint64_t, 64, false)
EXTRACT(extract_s64, uint64_t, 64, true)
static dw_status translate_bfe(dw__emu_translator *t) {
    static const dw__emu_run runs[FORMS] = {NULL,        NULL,        extract_u32,
                                            extract_s32, extract_u64, extract_s64};
    int form;
    dw__emu_type type;
    DW_RETURN_IF_FAILED(integer_type(t, &form, &type));
    return runs[form] ? emit_narrow(t, type, type, 2, runs[form]) : dw__emu_unsupported(t);
}

static dw__emu_next insert_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const uint32_t *place = op->detail;
    const uint32_t *position = DW__REGISTER(w, uint32_t, op->c),
                   *length = DW__REGISTER(w, uint32_t, *place);
    if (op->immediate == 64)
        DW__LANEWISE(mask, DW__REGISTER(w, uint64_t, op->d)[i] = insert(
                               DW__REGISTER(w, uint64_t, op->a)[i],
                               DW__REGISTER(w, uint64_t, op->b)[i], position[i], length[i], 64));
    else
        DW__LANEWISE(mask, DW__REGISTER(w, uint32_t, op->d)[i] = (uint32_t)insert(
                               DW__REGISTER(w, uint32_t, op->a)[i],
                               DW__REGISTER(w, uint32_t, op->b)[i], position[i], length[i], 32));
    return DW__NEXT;
}
static dw_status translate_bfi(dw__emu_translator *t) {
    dw__emu_type type;
    uint32_t a, b, c, d, *length = dw__emu_detail(t, sizeof *length);
    if (!length) return dw__fail_memory("an operation", sizeof *length);
    if (!dw__emu_take_type(t, &type) || (type != DW__T_B32 && type != DW__T_B64) ||
        t->in->operand_count != 5)
        return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[1], type, &a));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[2], type, &b));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[3], DW__T_U32, &c));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[4], DW__T_U32, length));
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, &t->in->operands[0], type, &d));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, insert_run));
    t->op->a = a, t->op->b = b, t->op->c = c, t->op->d = d;
    t->op->immediate = 8 * dw__emu_type_bytes(type);
    t->op->detail = length;
    return DW_OK;
}

static uint32_t reversed(uint32_t x) {
    uint32_t r = 0;
    for (int bit = 0; bit < 32; bit++) r |= (x >> bit & 1) << (31 - bit);
    return r;
}
static uint64_t reversed_64(uint64_t x) {
    return (uint64_t)reversed((uint32_t)x) << 32 | reversed((uint32_t)(x >> 32));
}
DW__UNARY(reverse_32, uint32_t, uint32_t, reversed(x))
DW__UNARY(reverse_64, uint64_t, uint64_t, reversed_64(x))
static dw_status translate_brev(dw__emu_translator *t) {
    dw__emu_type type;
    if (!dw__emu_take_type(t, &type)) return dw__emu_unsupported(t);
    return dw__emu_emit_same(t, type, 1, dw__emu_type_bytes(type) == 8 ? reverse_64 : reverse_32);
}

/* Returns the index of the highest set bit; -1 if there is none. */
static int find_top(uint64_t x) { return x ? 63 - __builtin_clzll(x) : -1; }

/* Counts have 32 bits, whatever the type of their operand. */
#define COUNT(name, SLOT, RESULT)                                                                  \
    static dw__emu_next name(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {               \
        const SLOT *a = DW__REGISTER(w, const SLOT, op->a);                                        \
        uint32_t *d = DW__REGISTER(w, uint32_t, op->d);                                            \
        DW__LANEWISE(mask, const SLOT x = a[i]; d[i] = (uint32_t)(RESULT));                        \
        return DW__NEXT;                                                                           \
    }
COUNT(ones_32, uint32_t, __builtin_popcount(x))
COUNT(ones_64, uint64_t, __builtin_popcountll(x))
COUNT(zeros_32, uint32_t, x ? __builtin_clz(x) : 32)
COUNT(zeros_64, uint64_t, x ? __builtin_clzll(x) : 64)
COUNT(find_u32, uint32_t, find_top(x))
COUNT(find_u64, uint64_t, find_top(x))
COUNT(find_s32, uint32_t, find_top((int32_t)x < 0 ? ~x : x))
COUNT(find_s64, uint64_t, find_top((int64_t)x < 0 ? ~x : x))
/* .shiftamt: the left shift that moves the bit to the top. */
#define SHIFT_AMOUNT(found, width) (found) < 0 ? -1 : (width)-1 - (found)
COUNT(shift_u32, uint32_t, SHIFT_AMOUNT(find_top(x), 32))
COUNT(shift_u64, uint64_t, SHIFT_AMOUNT(find_top(x), 64))
COUNT(shift_s32, uint32_t, SHIFT_AMOUNT(find_top((int32_t)x < 0 ? ~x : x), 32))
COUNT(shift_s64, uint64_t, SHIFT_AMOUNT(find_top((int64_t)x < 0 ? ~x : x), 64))
static dw_status translate_count(dw__emu_translator *t, dw__emu_run narrow, dw__emu_run wide) {
    dw__emu_type type;
    if (!dw__emu_take_type(t, &type) || dw__emu_type_bytes(type) < 4) return dw__emu_unsupported(t);
    return emit_narrow(t, DW__T_U32, type, 0, dw__emu_type_bytes(type) == 8 ? wide : narrow);
}
static dw_status translate_popc(dw__emu_translator *t) {
    return translate_count(t, ones_32, ones_64);
}
static dw_status translate_clz(dw__emu_translator *t) {
    return translate_count(t, zeros_32, zeros_64);
}
static dw_status translate_bfind(dw__emu_translator *t) {
    dw__emu_type type;
    const bool shift = dw__emu_take(t, "shiftamt");
    if (!dw__emu_take_type(t, &type) || dw__emu_type_bytes(type) < 4) return dw__emu_unsupported(t);
    bool wide = dw__emu_type_bytes(type) == 8, is_signed = dw__emu_type_signed(type);
    return emit_narrow(t, DW__T_U32, type, 0,
                       wide ? (is_signed ? (shift ? shift_s64 : find_s64)
                               : shift   ? shift_u64
                                         : find_u64)
                            : (is_signed ? (shift ? shift_s32 : find_s32)
                               : shift   ? shift_u32
                                         : find_u32));
}

/* Any function of three bits, given by its truth table. */
static dw__emu_next lop3_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const uint32_t *a = DW__REGISTER(w, uint32_t, op->a), *b = DW__REGISTER(w, uint32_t, op->b);
    const uint32_t *c = DW__REGISTER(w, uint32_t, op->c), table = (uint32_t)op->immediate;
    uint32_t *d = DW__REGISTER(w, uint32_t, op->d);
    DW__LANEWISE(mask, uint32_t r = 0;
                 for (uint32_t k = 0; k < 8; k++) if (table >> k & 1) r |=
                 (k & 4 ? a[i] : ~a[i]) & (k & 2 ? b[i] : ~b[i]) & (k & 1 ? c[i] : ~c[i]);
                 d[i] = r);
    return DW__NEXT;
}
static dw_status translate_lop3(dw__emu_translator *t) {
    uint32_t places[4];
    if (!dw__emu_take(t, "b32") || t->in->operand_count != 5 ||
        t->in->operands[4].kind != DW__PTX_INTEGER)
        return dw__emu_unsupported(t);
    for (int i = 1; i < 4; i++)
        DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[i], DW__T_B32, &places[i]));
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, &t->in->operands[0], DW__T_B32, &places[0]));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, lop3_run));
    t->op->d = places[0], t->op->a = places[1], t->op->b = places[2], t->op->c = places[3];
    t->op->immediate = t->in->operands[4].integer;
    return DW_OK;
}

/* Selects four bytes of two words. The top bit of a selector replicates the byte's sign eight times. */
static uint32_t permuted(uint32_t x, uint32_t y, uint32_t selectors) {
    const uint64_t both_words = (uint64_t)y << 32 | x;
    uint32_t r = 0;
    for (int k = 0; k < 4; k++) {
        uint32_t selector = selectors >> 4 * k & 0xF,
                 byte = (uint32_t)(both_words >> 8 * (selector & 7)) & 0xFF;
        if (selector & 8) byte = byte & 0x80 ? 0xFF : 0;
        r |= byte << 8 * k;
    }
    return r;
}
DW__TERNARY(permute_run, uint32_t, uint32_t, permuted(x, y, z))
static dw_status translate_prmt(dw__emu_translator *t) {
    return dw__emu_take(t, "b32") ? dw__emu_emit_same(t, DW__T_B32, 3, permute_run)
                                  : dw__emu_unsupported(t);
}

/* Funnel shifts of b:a. */
static uint32_t funnel(uint32_t low, uint32_t high, uint32_t n, bool left, bool clamp) {
    n = clamp ? (n > 32 ? 32 : n) : n & 31;
    uint64_t both_words = (uint64_t)high << 32 | low;
    return left ? (uint32_t)(both_words << n >> 32) : n == 32 ? high : (uint32_t)(both_words >> n);
}
DW__TERNARY(funnel_left_clamp, uint32_t, uint32_t, z >= 32 ? x : funnel(x, y, z, true, true))
DW__TERNARY(funnel_left_wrap, uint32_t, uint32_t, funnel(x, y, z, true, false))
DW__TERNARY(funnel_right_clamp, uint32_t, uint32_t, funnel(x, y, z, false, true))
DW__TERNARY(funnel_right_wrap, uint32_t, uint32_t, funnel(x, y, z, false, false))
static dw_status translate_shf(dw__emu_translator *t) {
    bool left = dw__emu_take(t, "l"), right = !left && dw__emu_take(t, "r");
    bool clamp = dw__emu_take(t, "clamp"), wrap = !clamp && dw__emu_take(t, "wrap");
    if (!(left || right) || !(clamp || wrap) || !dw__emu_take(t, "b32"))
        return dw__emu_unsupported(t);
    return dw__emu_emit_same(t, DW__T_B32, 3,
                             left ? (clamp ? funnel_left_clamp : funnel_left_wrap)
                                  : (clamp ? funnel_right_clamp : funnel_right_wrap));
}

/* ---- moves and selections ------------------------------------------------------------------ */

DW__UNARY(mov_32, uint32_t, uint32_t, x)
DW__UNARY(mov_64, uint64_t, uint64_t, x)

/* Packs a wide register from its parts, or unpacks it; low parts come first. */
typedef struct parts {
    int count, bytes;
    uint32_t places[8];
} parts;
static dw__emu_next pack_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const parts *p = op->detail;
    const int whole = dw__emu_place_bytes(p->count * p->bytes);
    unsigned char value[16] = {0};
    DW__EACH_LANE(lane, mask) {
        for (int k = 0; k < p->count; k++)
            memcpy(value + k * p->bytes,
                   w->registers + p->places[k] + lane * (uint32_t)dw__emu_place_bytes(p->bytes),
                   (size_t)p->bytes);
        memcpy(w->registers + op->d + lane * (uint32_t)whole, value, (size_t)whole);
    }
    return DW__NEXT;
}
static dw__emu_next unpack_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const parts *p = op->detail;
    const int whole = dw__emu_place_bytes(p->count * p->bytes),
              part = dw__emu_place_bytes(p->bytes);
    DW__EACH_LANE(lane, mask) {
        unsigned char value[16];
        memcpy(value, w->registers + op->a + lane * (uint32_t)whole, (size_t)whole);
        for (int k = 0; k < p->count; k++) {
            unsigned char *to = w->registers + p->places[k] + lane * (uint32_t)part;
            memset(to, 0, (size_t)part);
            memcpy(to, value + k * p->bytes, (size_t)p->bytes);
        }
    }
    return DW__NEXT;
}
static dw_status translate_mov_parts(dw__emu_translator *t, dw__emu_type type, bool pack) {
    static const dw__emu_type part_types[] = {
        [1] = DW__T_B8, [2] = DW__T_B16, [4] = DW__T_B32, [8] = DW__T_B64};
    const dw__ptx_operand *list = &t->in->operands[pack ? 1 : 0],
                          *whole = &t->in->operands[pack ? 0 : 1];
    parts *p = dw__emu_detail(t, sizeof *p);
    uint32_t place;
    if (!p) return dw__fail_memory("an operation", sizeof *p);
    int bytes = dw__emu_type_bytes(type);
    if ((list->count != 2 && list->count != 4 && list->count != 8) || bytes < list->count)
        return dw__emu_malformed(t, "the parts do not add up to the whole register");
    p->count = list->count;
    p->bytes = bytes / list->count;
    for (int k = 0; k < p->count; k++) {
        const int has = dw__emu_operand_bytes(t, &list->items[k]);
        if (has > 0 && has != p->bytes)
            return dw__emu_malformed(t, "the parts do not add up to the whole register");
        DW_RETURN_IF_FAILED(
            pack ? dw__emu_take_source(t, &list->items[k], part_types[p->bytes], &p->places[k])
                 : dw__emu_take_result(t, &list->items[k], part_types[p->bytes], &p->places[k]));
    }
    DW_RETURN_IF_FAILED(pack ? dw__emu_take_result(t, whole, type, &place)
                             : dw__emu_take_source(t, whole, type, &place));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, pack ? pack_run : unpack_run));
    *(pack ? &t->op->d : &t->op->a) = place;
    t->op->detail = p;
    return DW_OK;
}

static dw_status translate_mov(dw__emu_translator *t) {
    dw__emu_type type;
    if (!dw__emu_take_type(t, &type) || t->in->operand_count != 2) return dw__emu_unsupported(t);
    if (t->in->operands[0].kind == DW__PTX_VECTOR) return translate_mov_parts(t, type, false);
    if (t->in->operands[1].kind == DW__PTX_VECTOR) return translate_mov_parts(t, type, true);
    if (type == DW__T_PRED) return dw__emu_emit_same(t, type, 1, mov_predicate);
    if (dw__emu_type_bytes(type) > 8) return dw__emu_unsupported(t);
    return dw__emu_emit_same(t, type, 1, dw__emu_type_bytes(type) == 8 ? mov_64 : mov_32);
}

#define SELECT(name, SLOT)                                                                         \
    static dw__emu_next name(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {               \
        const SLOT *a = DW__REGISTER(w, const SLOT, op->a),                                        \
                   *b = DW__REGISTER(w, const SLOT, op->b);                                        \
        const uint32_t p = *DW__REGISTER(w, uint32_t, op->c);                                      \
        SLOT *d = DW__REGISTER(w, SLOT, op->d);                                                    \
        DW__LANEWISE(mask, d[i] = p >> i & 1 ? a[i] : b[i]);                                       \
        return DW__NEXT;                                                                           \
    }
SELECT(select_32, uint32_t)
SELECT(select_64, uint64_t)
static dw_status translate_selp(dw__emu_translator *t) {
    dw__emu_type type;
    uint32_t a, b, c, d;
    if (!dw__emu_take_type(t, &type) || t->in->operand_count != 4) return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[1], type, &a));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[2], type, &b));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[3], DW__T_PRED, &c));
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, &t->in->operands[0], type, &d));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, dw__emu_type_bytes(type) == 8 ? select_64 : select_32));
    t->op->a = a, t->op->b = b, t->op->c = c, t->op->d = d;
    return DW_OK;
}

/* ---- comparisons --------------------------------------------------------------------------- */

/* p = compared OP c, q = !compared OP c; without c, both are the comparison itself. */
typedef struct comparison {
    enum { ALONE, WITH_AND, WITH_OR, WITH_XOR } with;
    uint32_t other, inverse;
    bool has_inverse;
} comparison;

static uint32_t combined(const comparison *k, uint32_t x, uint32_t c) {
    return k->with == WITH_AND   ? x & c
           : k->with == WITH_OR  ? x | c
           : k->with == WITH_XOR ? x ^ c
                                 : x;
}
static dw__emu_next set_predicates(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask,
                                   uint32_t compared) {
    const comparison *k = op->detail;
    uint32_t c = k->with == ALONE ? 0 : *DW__REGISTER(w, uint32_t, k->other);
    uint32_t *p = DW__REGISTER(w, uint32_t, op->d);
    *p = (*p & ~mask) | (combined(k, compared, c) & mask);
    if (k->has_inverse) {
        uint32_t *q = DW__REGISTER(w, uint32_t, k->inverse);
        *q = (*q & ~mask) | (combined(k, ~compared, c) & mask);
    }
    return DW__NEXT;
}
static inline float as_float(uint32_t bits) { return dw__f32_from_bits(bits); }
static inline double as_double(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
#define COMPARE(name, SLOT, LOAD, RESULT)                                                          \
    static dw__emu_next name(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {               \
        const SLOT *a = DW__REGISTER(w, const SLOT, op->a),                                        \
                   *b = DW__REGISTER(w, const SLOT, op->b);                                        \
        uint32_t r = 0;                                                                            \
        for (int i = 0; i < DW__LANES; i++) {                                                      \
            const __typeof__(LOAD(a[i])) x = LOAD(a[i]), y = LOAD(b[i]);                           \
            r |= (uint32_t)(RESULT) << i;                                                          \
        }                                                                                          \
        return set_predicates(w, op, mask, r);                                                     \
    }
#define SIX_COMPARES(name, SLOT, LOAD)                                                             \
    COMPARE(name##_eq, SLOT, LOAD, x == y)                                                         \
    COMPARE(name##_ne, SLOT, LOAD, x != y)                                                         \
    COMPARE(name##_lt, SLOT, LOAD, x < y)                                                          \
    COMPARE(name##_le, SLOT, LOAD, x <= y)                                                         \
    COMPARE(name##_gt, SLOT, LOAD, x > y)                                                          \
    COMPARE(name##_ge, SLOT, LOAD, x >= y)
/* Ordered comparisons of floats are false if either is a NaN, unordered ones are true. */
#define FLOAT_COMPARES(name, SLOT, LOAD)                                                           \
    COMPARE(name##_eq, SLOT, LOAD, x == y)                                                         \
    COMPARE(name##_ne, SLOT, LOAD, x<y || x> y)                                                    \
    COMPARE(name##_lt, SLOT, LOAD, x < y)                                                          \
    COMPARE(name##_le, SLOT, LOAD, x <= y)                                                         \
    COMPARE(name##_gt, SLOT, LOAD, x > y)                                                          \
    COMPARE(name##_ge, SLOT, LOAD, x >= y)                                                         \
    COMPARE(name##_equ, SLOT, LOAD, !(x < y || x > y))                                             \
    COMPARE(name##_neu, SLOT, LOAD, x != y)                                                        \
    COMPARE(name##_ltu, SLOT, LOAD, !(x >= y))                                                     \
    COMPARE(name##_leu, SLOT, LOAD, !(x > y))                                                      \
    COMPARE(name##_gtu, SLOT, LOAD, !(x <= y))                                                     \
    COMPARE(name##_geu, SLOT, LOAD, !(x < y))                                                      \
    COMPARE(name##_num, SLOT, LOAD, !isunordered(x, y))                                            \
    COMPARE(name##_nan, SLOT, LOAD, isunordered(x, y))                                             \
    static const dw__emu_run name[14] = {                                                          \
        name##_eq,  name##_ne,  name##_lt,  name##_le,  name##_gt,  name##_ge,  name##_equ,        \
        name##_neu, name##_ltu, name##_leu, name##_gtu, name##_geu, name##_num, name##_nan};
#define INTEGER_COMPARES(name, SLOT, LOAD)                                                         \
    SIX_COMPARES(name, SLOT, LOAD)                                                                 \
    static const dw__emu_run name[6] = {name##_eq, name##_ne, name##_lt,                           \
                                        name##_le, name##_gt, name##_ge};
#define TO_U16(v) (uint16_t)(v)
#define TO_S16(v) (int16_t)(v)
#define TO_U32(v) (uint32_t)(v)
#define TO_S32(v) (int32_t)(v)
#define TO_U64(v) (uint64_t)(v)
#define TO_S64(v) (int64_t)(v)
#define TO_F16(v) dw__f16_to_f32((uint16_t)(v))
#define TO_BF16(v) dw__bf16_to_f32((uint16_t)(v))
INTEGER_COMPARES(compare_u16, uint32_t, TO_U16)
INTEGER_COMPARES(compare_s16, uint32_t, TO_S16)
INTEGER_COMPARES(compare_u32, uint32_t, TO_U32)
INTEGER_COMPARES(compare_s32, uint32_t, TO_S32)
INTEGER_COMPARES(compare_u64, uint64_t, TO_U64)
INTEGER_COMPARES(compare_s64, uint64_t, TO_S64)
FLOAT_COMPARES(compare_f32, uint32_t, as_float)
FLOAT_COMPARES(compare_f64, uint64_t, as_double)
FLOAT_COMPARES(compare_f16, uint32_t, TO_F16)
FLOAT_COMPARES(compare_bf16, uint32_t, TO_BF16)
/* .ftz: subnormal numbers count as zeros. */
static inline float flushed_single(uint32_t bits) {
    return as_float(bits & 0x7F800000 ? bits : bits & 0x80000000);
}
static inline float flushed_half(uint32_t bits) {
    return TO_F16(bits & 0x7C00 ? bits : bits & 0x8000);
}
FLOAT_COMPARES(compare_f32_ftz, uint32_t, flushed_single)
FLOAT_COMPARES(compare_f16_ftz, uint32_t, flushed_half)

static const dw__emu_run *compares_of(dw__emu_type type, bool flush, bool *is_float) {
    static const dw__emu_run *const integers[FORMS] = {compare_u16, compare_s16, compare_u32,
                                                       compare_s32, compare_u64, compare_s64};
    *is_float = dw__emu_type_float(type);
    switch (type) {
    case DW__T_F16: return flush ? compare_f16_ftz : compare_f16;
    case DW__T_BF16: return flush ? NULL : compare_bf16;
    case DW__T_F32: return flush ? compare_f32_ftz : compare_f32;
    case DW__T_F64: return flush ? NULL : compare_f64;
    default: return flush || form_of(type) < 0 ? NULL : integers[form_of(type)];
    }
}

/* The common modifiers of setp and set: .CmpOp.BoolOp.ftz, and for set the type of the result. */
typedef struct comparison_form {
    int name, with;
    bool flush;
    dw__emu_type result, type;
} comparison_form;
static bool take_comparison(dw__emu_translator *t, bool set, comparison_form *f) {
    static const char *const names[] = {"eq",  "ne",  "lt",  "le",  "gt",  "ge",  "equ",
                                        "neu", "ltu", "leu", "gtu", "geu", "num", "nan",
                                        "lo",  "ls",  "hi",  "hs",  NULL};
    static const char *const withs[] = {"and", "or", "xor", NULL};
    f->name = dw__emu_take_one_of(t, names);
    f->with = dw__emu_take_one_of(t, withs);
    f->flush = dw__emu_take(t, "ftz");
    return f->name >= 0 && (!set || dw__emu_take_type(t, &f->result)) &&
           dw__emu_take_type(t, &f->type) && t->in->operand_count == 3 + (f->with >= 0);
}

/* Emits the comparison into predicate `d`, and its inverse if `k` has one. */
static dw_status emit_comparison(dw__emu_translator *t, comparison_form *f, comparison *k,
                                 uint32_t d) {
    bool is_float;
    uint32_t a, b;
    const dw__emu_run *runs = compares_of(f->type, f->flush, &is_float);
    if (f->name >= 14) { /* lo, ls, hi, hs: only for unsigned numbers */
        if (!runs || is_float || dw__emu_type_signed(f->type)) return dw__emu_unsupported(t);
        f->name -= 12;
    }
    if (!runs || (!is_float && f->name >= 6)) return dw__emu_unsupported(t);
    k->with = (__typeof__(k->with))(f->with + 1);
    if (f->with >= 0)
        DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[3], DW__T_PRED, &k->other));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[1], f->type, &a));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[2], f->type, &b));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, runs[f->name]));
    t->op->a = a, t->op->b = b, t->op->d = d;
    t->op->detail = k;
    return DW_OK;
}

static dw_status translate_setp(dw__emu_translator *t) {
    comparison_form f;
    comparison *k = dw__emu_detail(t, sizeof *k);
    uint32_t d;
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    if (!take_comparison(t, false, &f)) return dw__emu_unsupported(t);
    dw__ptx_operand first = t->in->operands[0];
    k->has_inverse = first.also != NULL;
    if (k->has_inverse)
        DW_RETURN_IF_FAILED(dw__emu_take_result(t, first.also, DW__T_PRED, &k->inverse));
    first.also = NULL;
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, &first, DW__T_PRED, &d));
    return emit_comparison(t, &f, k, d);
}

/* The result is all ones or 1.0 for true, and 0 for false. */
static dw_status translate_set(dw__emu_translator *t) {
    comparison_form f;
    comparison *k = dw__emu_detail(t, sizeof *k);
    uint32_t p, d, yes, no;
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    if (!take_comparison(t, true, &f)) return dw__emu_unsupported(t);
    uint64_t one;
    switch (f.result) {
    case DW__T_U16:
    case DW__T_S16: one = 0xFFFF; break;
    case DW__T_U32:
    case DW__T_S32: one = 0xFFFFFFFF; break;
    case DW__T_F32: one = 0x3F800000; break;
    case DW__T_F16: one = 0x3C00; break;
    case DW__T_BF16: one = 0x3F80; break;
    default: return dw__emu_unsupported(t);
    }
    DW_RETURN_IF_FAILED(dw__emu_take_scratch(t, 0, &p));
    DW_RETURN_IF_FAILED(emit_comparison(t, &f, k, p));
    DW_RETURN_IF_FAILED(dw__emu_take_constant(t, one, 4, &yes));
    DW_RETURN_IF_FAILED(dw__emu_take_constant(t, 0, 4, &no));
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, &t->in->operands[0], f.result, &d));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, select_32));
    t->op->a = yes, t->op->b = no, t->op->c = p, t->op->d = d;
    return DW_OK;
}

const dw__emu_opcode dw__emu_opcodes_arithmetic[] = {
    {"add", translate_add},     {"sub", translate_sub},   {"mul", translate_mul},
    {"mad", translate_mad},     {"div", translate_div},   {"rem", translate_rem},
    {"min", translate_min},     {"max", translate_max},   {"neg", translate_neg},
    {"abs", translate_abs},     {"and", translate_and},   {"or", translate_or},
    {"xor", translate_xor},     {"not", translate_not},   {"shl", translate_shl},
    {"shr", translate_shr},     {"bfe", translate_bfe},   {"bfi", translate_bfi},
    {"brev", translate_brev},   {"popc", translate_popc}, {"clz", translate_clz},
    {"bfind", translate_bfind}, {"lop3", translate_lop3}, {"prmt", translate_prmt},
    {"shf", translate_shf},     {"mov", translate_mov},   {"selp", translate_selp},
    {"setp", translate_setp},   {"set", translate_set},   {NULL, NULL},
};
