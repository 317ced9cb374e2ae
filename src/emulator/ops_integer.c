/* Integer operations beyond the common ones: PTX ISA, "Extended-Precision Integer Arithmetic Instructions"; dp4a,
 * dp2a, mul24, mad24, bmsk, szext and saturation of "Integer Arithmetic Instructions"; pairs of 16 bits.
 */
#include "emulator/lanes.h"
#include <string.h>

/* ---- extended precision -------------------------------------------------------------------- */

typedef struct carry_op {
    enum { ADD, SUBTRACT, MULTIPLY_LOW, MULTIPLY_HIGH } what;
    bool wide, is_signed, reads, writes;
    uint32_t carry; /* the condition code: a predicate */
    uint32_t c;
} carry_op;

static unsigned __int128 product(uint64_t x, uint64_t y, const carry_op *k) {
    if (!k->is_signed) return (unsigned __int128)x * y;
    const int64_t sx = k->wide ? (int64_t)x : (int32_t)x, sy = k->wide ? (int64_t)y : (int32_t)y;
    return (unsigned __int128)((__int128)sx * sy);
}

/* Computes x + y + carry, or x - y - borrow; the condition code holds the borrow. */
static uint64_t carried(const carry_op *k, uint64_t x, uint64_t y, uint64_t z, bool *carry) {
    const int bits = k->wide ? 64 : 32;
    const uint64_t most = k->wide ? UINT64_MAX : UINT32_MAX;
    if (k->what == SUBTRACT) {
        const unsigned __int128 taken = (unsigned __int128)y + *carry;
        const uint64_t r = (x - (uint64_t)taken) & most;
        *carry = taken > x;
        return r;
    }
    if (k->what != ADD) {
        const unsigned __int128 whole = product(x, y, k);
        x = (uint64_t)(k->what == MULTIPLY_LOW ? whole : whole >> bits) & most, y = z;
    }
    const unsigned __int128 sum = (unsigned __int128)x + y + *carry;
    *carry = (sum >> bits) & 1;
    return (uint64_t)sum & most;
}

static dw__emu_next carry_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const carry_op *k = op->detail;
    uint32_t *flags = DW__REGISTER(w, uint32_t, k->carry), after = *flags;
    DW__EACH_LANE(lane, mask) {
        bool carry = k->reads && (*flags >> lane & 1);
        if (k->wide) {
            const uint64_t *c = DW__REGISTER(w, uint64_t, op->c);
            DW__REGISTER(w, uint64_t, op->d)
            [lane] = carried(k, DW__REGISTER(w, uint64_t, op->a)[lane],
                             DW__REGISTER(w, uint64_t, op->b)[lane], c[lane], &carry);
        } else {
            const uint32_t *c = DW__REGISTER(w, uint32_t, op->c);
            DW__REGISTER(w, uint32_t, op->d)
            [lane] = (uint32_t)carried(k, DW__REGISTER(w, uint32_t, op->a)[lane],
                                       DW__REGISTER(w, uint32_t, op->b)[lane], c[lane], &carry);
        }
        after = (after & ~((uint32_t)1 << lane)) | (uint32_t)carry << lane;
    }
    if (k->writes) *flags = after;
    return DW__NEXT;
}

/* Emits "add.cc", "addc", "addc.cc" and the like; `wanted` holds the modifiers taken so far. */
static dw_status emit_carry(dw__emu_translator *t, carry_op wanted) {
    dw__emu_type type;
    carry_op *k = dw__emu_detail(t, sizeof *k);
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    *k = wanted;
    k->writes = dw__emu_take(t, "cc");
    if (!k->reads && !k->writes) return t->cursor = 0, dw__emu_unsupported(t);
    if (!dw__emu_take_type(t, &type) ||
        (type != DW__T_U32 && type != DW__T_S32 && type != DW__T_U64 && type != DW__T_S64))
        return dw__emu_unsupported(t);
    k->wide = dw__emu_type_bytes(type) == 8;
    k->is_signed = dw__emu_type_signed(type);
    if (t->carry == UINT32_MAX) DW_RETURN_IF_FAILED(dw__emu_take_scratch(t, 0, &t->carry));
    k->carry = t->carry;
    const int count = k->what >= MULTIPLY_LOW ? 3 : 2;
    DW_RETURN_IF_FAILED(dw__emu_emit_same(t, type, count, carry_run));
    if (count == 2) t->op->c = t->op->a;
    t->op->detail = k;
    return DW_OK;
}

static dw_status translate_multiply_carry(dw__emu_translator *t, bool reads) {
    const bool high = dw__emu_take(t, "hi");
    if (!high && !dw__emu_take(t, "lo")) return t->cursor = 0, dw__emu_unsupported(t);
    return emit_carry(t, (carry_op){.what = high ? MULTIPLY_HIGH : MULTIPLY_LOW, .reads = reads});
}
static dw_status translate_addc(dw__emu_translator *t) {
    return emit_carry(t, (carry_op){.what = ADD, .reads = true});
}
static dw_status translate_subc(dw__emu_translator *t) {
    return emit_carry(t, (carry_op){.what = SUBTRACT, .reads = true});
}
static dw_status translate_madc(dw__emu_translator *t) { return translate_multiply_carry(t, true); }

/* ---- saturation, pairs --------------------------------------------------------------------- */

static uint32_t clamped_to(int64_t x, int64_t least, int64_t most) {
    return (uint32_t)(x < least ? least : x > most ? most : x);
}
DW__BINARY(add_saturated, int32_t, uint32_t, clamped_to((int64_t)x + y, INT32_MIN, INT32_MAX))
DW__BINARY(sub_saturated, int32_t, uint32_t, clamped_to((int64_t)x - y, INT32_MIN, INT32_MAX))
DW__TERNARY(mad_saturated, int32_t, uint32_t,
            clamped_to(((int64_t)x * y >> 32) + z, INT32_MIN, INT32_MAX))

#define HALF(x, i) (uint16_t)((x) >> 16 * (i))
#define PAIR(name, T, RESULT)                                                                      \
    static uint32_t name##_of(uint32_t a, uint32_t b) {                                            \
        uint32_t r = 0;                                                                            \
        for (int i = 0; i < 2; i++) {                                                              \
            const T x = (T)HALF(a, i), y = (T)HALF(b, i);                                          \
            r |= (uint32_t)(uint16_t)(RESULT) << 16 * i;                                           \
        }                                                                                          \
        return r;                                                                                  \
    }                                                                                              \
    DW__BINARY(name, uint32_t, uint32_t, name##_of(x, y))
PAIR(add_pair, uint16_t, x + y)
PAIR(least_u, uint16_t, x < y ? x : y)
PAIR(least_s, int16_t, x < y ? x : y)
PAIR(least_s_relu, int16_t, x < y ? (x < 0 ? 0 : x) : (y < 0 ? 0 : y))
PAIR(greatest_u, uint16_t, x > y ? x : y)
PAIR(greatest_s, int16_t, x > y ? x : y)
PAIR(greatest_s_relu, int16_t, x > y ? (x < 0 ? 0 : x) : (y < 0 ? 0 : y))
DW__BINARY(least_relu, int32_t, uint32_t, x < y ? (x < 0 ? 0 : x) : (y < 0 ? 0 : y))
DW__BINARY(greatest_relu, int32_t, uint32_t, x > y ? (x < 0 ? 0 : x) : (y < 0 ? 0 : y))

static dw_status translate_sum(dw__emu_translator *t, bool subtract) {
    if (dw__emu_take(t, "sat") && dw__emu_take(t, "s32"))
        return dw__emu_emit_same(t, DW__T_S32, 2, subtract ? sub_saturated : add_saturated);
    t->cursor = 0;
    if (!subtract && (dw__emu_take(t, "u16x2") || dw__emu_take(t, "s16x2")))
        return dw__emu_emit_same(t, DW__T_B32, 2, add_pair);
    return emit_carry(t, (carry_op){.what = subtract ? SUBTRACT : ADD});
}
static dw_status translate_add(dw__emu_translator *t) { return translate_sum(t, false); }
static dw_status translate_sub(dw__emu_translator *t) { return translate_sum(t, true); }
static dw_status translate_mad(dw__emu_translator *t) {
    if (dw__emu_take(t, "hi") && dw__emu_take(t, "sat") && dw__emu_take(t, "s32"))
        return dw__emu_emit_same(t, DW__T_S32, 3, mad_saturated);
    t->cursor = 0;
    return translate_multiply_carry(t, false);
}

static dw_status translate_extreme(dw__emu_translator *t, bool least) {
    const bool relu = dw__emu_take(t, "relu");
    if (!relu && dw__emu_take(t, "u16x2"))
        return dw__emu_emit_same(t, DW__T_B32, 2, least ? least_u : greatest_u);
    if (dw__emu_take(t, "s16x2"))
        return dw__emu_emit_same(t, DW__T_B32, 2,
                                 least ? (relu ? least_s_relu : least_s)
                                       : (relu ? greatest_s_relu : greatest_s));
    if (relu && dw__emu_take(t, "s32"))
        return dw__emu_emit_same(t, DW__T_S32, 2, least ? least_relu : greatest_relu);
    return t->cursor = 0, dw__emu_unsupported(t);
}
static dw_status translate_min(dw__emu_translator *t) { return translate_extreme(t, true); }
static dw_status translate_max(dw__emu_translator *t) { return translate_extreme(t, false); }

/* ---- dot products -------------------------------------------------------------------------- */

enum { FOUR_BYTES, TWO_LOW, TWO_HIGH };
static int64_t part(uint32_t word, int at, int bits, bool is_signed) {
    const uint32_t value = word >> at & ((1u << bits) - 1);
    return is_signed && value >> (bits - 1) ? (int64_t)value - (1 << bits) : (int64_t)value;
}
/* immediate: the kind, + 4 if a is signed, + 8 if b is signed. */
static dw__emu_next dot_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const uint32_t *a = DW__REGISTER(w, uint32_t, op->a), *b = DW__REGISTER(w, uint32_t, op->b);
    const uint32_t *c = DW__REGISTER(w, uint32_t, op->c);
    uint32_t *d = DW__REGISTER(w, uint32_t, op->d);
    const int kind = op->immediate & 3;
    const bool a_signed = op->immediate & 4, b_signed = op->immediate & 8;
    DW__EACH_LANE(lane, mask) {
        int64_t sum = c[lane];
        for (int i = 0; i < (kind == FOUR_BYTES ? 4 : 2); i++)
            sum += kind == FOUR_BYTES
                       ? part(a[lane], 8 * i, 8, a_signed) * part(b[lane], 8 * i, 8, b_signed)
                       : part(a[lane], 16 * i, 16, a_signed) *
                             part(b[lane], 8 * i + (kind == TWO_HIGH ? 16 : 0), 8, b_signed);
        d[lane] = (uint32_t)sum;
    }
    return DW__NEXT;
}
static dw_status emit_dot(dw__emu_translator *t, int kind) {
    static const char *const types[] = {"u32", "s32", NULL};
    const int a = dw__emu_take_one_of(t, types), b = dw__emu_take_one_of(t, types);
    if (a < 0 || b < 0) return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(dw__emu_emit_same(t, DW__T_B32, 3, dot_run));
    t->op->immediate = kind + 4 * a + 8 * b;
    return DW_OK;
}
static dw_status translate_dp4a(dw__emu_translator *t) { return emit_dot(t, FOUR_BYTES); }
static dw_status translate_dp2a(dw__emu_translator *t) {
    const bool high = dw__emu_take(t, "hi");
    if (!high && !dw__emu_take(t, "lo")) return dw__emu_unsupported(t);
    return emit_dot(t, high ? TWO_HIGH : TWO_LOW);
}

/* ---- 24 bits, distances, masks ------------------------------------------------------------- */

static uint64_t product_24(uint32_t x, uint32_t y, bool is_signed) {
    if (!is_signed) return (uint64_t)(x & 0xFFFFFF) * (y & 0xFFFFFF);
    return (uint64_t)(part(x, 0, 24, true) * part(y, 0, 24, true));
}
DW__BINARY(mul_24_low_u, uint32_t, uint32_t, product_24(x, y, false))
DW__BINARY(mul_24_low_s, uint32_t, uint32_t, product_24(x, y, true))
DW__BINARY(mul_24_high_u, uint32_t, uint32_t, product_24(x, y, false) >> 16)
DW__BINARY(mul_24_high_s, uint32_t, uint32_t, product_24(x, y, true) >> 16)
DW__TERNARY(mad_24_low_u, uint32_t, uint32_t, product_24(x, y, false) + z)
DW__TERNARY(mad_24_low_s, uint32_t, uint32_t, product_24(x, y, true) + z)
DW__TERNARY(mad_24_high_u, uint32_t, uint32_t, (product_24(x, y, false) >> 16) + z)
DW__TERNARY(mad_24_high_s, uint32_t, uint32_t, (product_24(x, y, true) >> 16) + z)
static dw_status translate_24(dw__emu_translator *t, bool add) {
    static const dw__emu_run runs[2][2][2] = {
        {{mul_24_low_u, mul_24_low_s}, {mul_24_high_u, mul_24_high_s}},
        {{mad_24_low_u, mad_24_low_s}, {mad_24_high_u, mad_24_high_s}}};
    const bool high = dw__emu_take(t, "hi");
    if (!high && !dw__emu_take(t, "lo")) return dw__emu_unsupported(t);
    const bool is_signed = dw__emu_take(t, "s32");
    if (!is_signed && !dw__emu_take(t, "u32")) return dw__emu_unsupported(t);
    return dw__emu_emit_same(t, DW__T_B32, 2 + add, runs[add][high][is_signed]);
}
static dw_status translate_mul24(dw__emu_translator *t) { return translate_24(t, false); }
static dw_status translate_mad24(dw__emu_translator *t) { return translate_24(t, true); }

DW__TERNARY(distance_u16, uint16_t, uint32_t, (uint16_t)(z + (x < y ? y - x : x - y)))
DW__TERNARY(distance_s16, int16_t, uint32_t, (uint16_t)(z + (x < y ? y - x : x - y)))
DW__TERNARY(distance_u32, uint32_t, uint32_t, z + (x < y ? y - x : x - y))
DW__TERNARY(distance_s32, int32_t, uint32_t,
            (uint32_t)z + (x < y ? (uint32_t)y - (uint32_t)x : (uint32_t)x - (uint32_t)y))
DW__TERNARY(distance_u64, uint64_t, uint64_t, z + (x < y ? y - x : x - y))
DW__TERNARY(distance_s64, int64_t, uint64_t,
            (uint64_t)z + (x < y ? (uint64_t)y - (uint64_t)x : (uint64_t)x - (uint64_t)y))
static dw_status translate_sad(dw__emu_translator *t) {
    static const dw__emu_type types[] = {DW__T_U16, DW__T_S16, DW__T_U32,
                                         DW__T_S32, DW__T_U64, DW__T_S64};
    static const dw__emu_run runs[] = {distance_u16, distance_s16, distance_u32,
                                       distance_s32, distance_u64, distance_s64};
    dw__emu_type type;
    if (!dw__emu_take_type(t, &type)) return dw__emu_unsupported(t);
    for (size_t i = 0; i < DW_COUNT(types); i++)
        if (types[i] == type) return dw__emu_emit_same(t, type, 3, runs[i]);
    return dw__emu_unsupported(t);
}

/* Extends the low b bits of a. b of 32 and more means all bits (.clamp), or b modulo 32 (.wrap). */
static uint32_t low_bits(uint32_t a, uint32_t b, bool clamp, bool is_signed) {
    if (clamp && b >= 32) return a;
    b &= 31;
    const uint32_t kept = ((uint32_t)1 << b) - 1;
    return b && is_signed && a >> (b - 1) & 1 ? a | ~kept : a & kept;
}
/* A mask of b bits from position a on. */
static uint32_t bit_mask(uint32_t a, uint32_t b, bool clamp) {
    if (clamp ? a >= 32 : false) return 0;
    a &= 31;
    const uint64_t width = clamp && b >= 32 ? 32 : b & 31;
    return (uint32_t)((((uint64_t)1 << width) - 1) << a);
}
DW__BINARY(extend_u_clamp, uint32_t, uint32_t, low_bits(x, y, true, false))
DW__BINARY(extend_u_wrap, uint32_t, uint32_t, low_bits(x, y, false, false))
DW__BINARY(extend_s_clamp, uint32_t, uint32_t, low_bits(x, y, true, true))
DW__BINARY(extend_s_wrap, uint32_t, uint32_t, low_bits(x, y, false, true))
DW__BINARY(mask_clamp, uint32_t, uint32_t, bit_mask(x, y, true))
DW__BINARY(mask_wrap, uint32_t, uint32_t, bit_mask(x, y, false))
static dw_status translate_szext(dw__emu_translator *t) {
    const bool clamp = dw__emu_take(t, "clamp");
    if (!clamp && !dw__emu_take(t, "wrap")) return dw__emu_unsupported(t);
    const bool is_signed = dw__emu_take(t, "s32");
    if (!is_signed && !dw__emu_take(t, "u32")) return dw__emu_unsupported(t);
    return dw__emu_emit_same(t, DW__T_B32, 2,
                             is_signed ? (clamp ? extend_s_clamp : extend_s_wrap)
                                       : (clamp ? extend_u_clamp : extend_u_wrap));
}
static dw_status translate_bmsk(dw__emu_translator *t) {
    const bool clamp = dw__emu_take(t, "clamp");
    if ((!clamp && !dw__emu_take(t, "wrap")) || !dw__emu_take(t, "b32"))
        return dw__emu_unsupported(t);
    return dw__emu_emit_same(t, DW__T_B32, 2, clamp ? mask_clamp : mask_wrap);
}

/* Returns whether the result is a (c is not negative), else b. With .ftz a subnormal c counts as zero. */
static bool keeps_first(uint32_t c, bool is_real, bool flush) {
    if (!is_real) return (int32_t)c >= 0;
    const uint32_t magnitude = c & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return false;
    return magnitude == 0 || (flush && magnitude < 0x00800000) || !(c >> 31);
}
static dw__emu_next slct_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const uint32_t *c = DW__REGISTER(w, uint32_t, op->c);
    const bool is_real = op->immediate & 1, flush = op->immediate & 2, wide = op->immediate & 4;
    DW__EACH_LANE(lane, mask) {
        const uint32_t from = keeps_first(c[lane], is_real, flush) ? op->a : op->b;
        if (wide)
            DW__REGISTER(w, uint64_t, op->d)[lane] = DW__REGISTER(w, uint64_t, from)[lane];
        else
            DW__REGISTER(w, uint32_t, op->d)[lane] = DW__REGISTER(w, uint32_t, from)[lane];
    }
    return DW__NEXT;
}
static dw_status translate_slct(dw__emu_translator *t) {
    const bool flush = dw__emu_take(t, "ftz");
    dw__emu_type type, of;
    uint32_t a, b, c, d;
    if (!dw__emu_take_type(t, &type) || dw__emu_type_bytes(type) < 2 ||
        dw__emu_type_bytes(type) > 8 || !dw__emu_take_type(t, &of) ||
        (of != DW__T_S32 && of != DW__T_F32) || t->in->operand_count != 4)
        return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[1], type, &a));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[2], type, &b));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[3], of, &c));
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, &t->in->operands[0], type, &d));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, slct_run));
    t->op->a = a, t->op->b = b, t->op->c = c, t->op->d = d;
    t->op->immediate = (of == DW__T_F32) + 2 * flush + 4 * (dw__emu_type_bytes(type) == 8);
    return DW_OK;
}

const dw__emu_opcode dw__emu_opcodes_integer[] = {
    {"add", translate_add},
    {"sub", translate_sub},
    {"mad", translate_mad},
    {"addc", translate_addc},
    {"subc", translate_subc},
    {"madc", translate_madc},
    {"min", translate_min},
    {"max", translate_max},
    {"dp4a", translate_dp4a},
    {"dp2a", translate_dp2a},
    {"mul24", translate_mul24},
    {"mad24", translate_mad24},
    {"sad", translate_sad},
    {"szext", translate_szext},
    {"bmsk", translate_bmsk},
    {"slct", translate_slct},
    {NULL, NULL},
};
