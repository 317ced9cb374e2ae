/* Conversions of values and of address spaces: PTX ISA, "cvt", "cvt.pack", "cvta", "isspacep". */
#include "emulator/lanes.h"
#include "number/format.h"
#include "number/half.h"
#include <assert.h>
#include <fenv.h>
#include <math.h>
#include <string.h>

typedef struct conversion {
    dw__emu_type to, from;
    int from_bytes, to_bytes; /* of a lane's place */
    /* Size of the declared result; a signed result is extended to it. */
    int register_bytes;
    enum { NO_ROUNDING, NEAREST, ZERO, DOWN, UP, AWAY, BY_CHANCE } rounding;
    bool to_whole; /* rni and the like: rounds to a whole number, also between floats */
    bool flush, saturate, relu, finite;
} conversion;

/* ---- scalars ------------------------------------------------------------------------------- */

static double flushed(double x, dw__emu_type type, bool flush) {
    return flush && type == DW__T_F32 && x != 0 && fabs(x) < 0x1p-126 ? copysign(0, x) : x;
}

static double load_real(const unsigned char *place, dw__emu_type type) {
    uint32_t word;
    double wide;
    memcpy(&word, place, sizeof word);
    switch (type) {
    case DW__T_F16: return (double)dw__f16_to_f32((uint16_t)word);
    case DW__T_BF16: return (double)dw__bf16_to_f32((uint16_t)word);
    case DW__T_F64: memcpy(&wide, place, sizeof wide); return wide;
    default: return (double)dw__f32_from_bits(word);
    }
}

static int64_t load_whole(const unsigned char *place, dw__emu_type type) {
    uint64_t value = 0;
    memcpy(&value, place, (size_t)dw__emu_type_bytes(type));
    int spare = 64 - 8 * dw__emu_type_bytes(type);
    return dw__emu_type_signed(type) ? (int64_t)(value << spare) >> spare : (int64_t)value;
}

static double rounded(double x, int rounding) {
    switch (rounding) {
    case NEAREST: return nearbyint(x); /* the host rounds to nearest, ties to even */
    case ZERO: return trunc(x);
    case DOWN: return floor(x);
    case UP: return ceil(x);
    case AWAY: return round(x);
    default: return x;
    }
}

/* Converts to an integer type. Values out of range become the end of the range, a NaN becomes 0 (for 64 bits, the top
 * bit). */
static uint64_t to_whole(double x, dw__emu_type type) {
    const int bits = 8 * dw__emu_type_bytes(type);
    if (isnan(x)) return bits == 64 ? (uint64_t)1 << 63 : 0;
    if (dw__emu_type_signed(type)) {
        const double limit = ldexp(1, bits - 1);
        if (x >= limit) return ((uint64_t)1 << (bits - 1)) - 1;
        if (x < -limit) return (uint64_t)1 << (bits - 1);
        return (uint64_t)(int64_t)x;
    }
    if (x <= 0) return 0;
    return x >= ldexp(1, bits) ? (bits == 64 ? UINT64_MAX : ((uint64_t)1 << bits) - 1)
                               : (uint64_t)x;
}

/* Clamps an integer to the range of another type. */
static uint64_t clamped(int64_t x, bool x_signed, dw__emu_type type) {
    const int bits = 8 * dw__emu_type_bytes(type);
    if (dw__emu_type_signed(type)) {
        int64_t most = (int64_t)(((uint64_t)1 << (bits - 1)) - 1), least = -most - 1;
        if (!x_signed && (uint64_t)x > (uint64_t)most) return (uint64_t)most;
        return (uint64_t)(x > most ? most : x < least ? least : x);
    }
    uint64_t most = bits == 64 ? UINT64_MAX : ((uint64_t)1 << bits) - 1;
    if (x_signed && x < 0) return 0;
    return (uint64_t)x > most ? most : (uint64_t)x;
}

static const int host_roundings[] = {FE_TONEAREST, FE_TONEAREST, FE_TOWARDZERO,
                                     FE_DOWNWARD,  FE_UPWARD,    FE_TONEAREST};

/* Converts an integer to double. TO_ODD sets the last bit if bits were truncated, so that a later rounding to fewer
 * bits rounds only once (Boldo and Melquiond 2008). */
#define TO_ODD (-1)
static double whole_as_double(int64_t x, bool is_signed, int rounding) {
    const bool negative = is_signed && x < 0;
    uint64_t magnitude = negative ? 0 - (uint64_t)x : (uint64_t)x;
    if (rounding == TO_ODD) {
        const int spare = magnitude >> 53 ? 11 - __builtin_clzll(magnitude) : 0;
        if (spare) {
            const bool lost = magnitude & (((uint64_t)1 << spare) - 1);
            magnitude = (magnitude >> spare | lost) << spare;
        }
        return negative ? -(double)magnitude : (double)magnitude;
    }
    fesetround(host_roundings[rounding]);
    volatile int64_t held = x;
    const double r = is_signed ? (double)held : (double)(uint64_t)held;
    fesetround(FE_TONEAREST);
    return r;
}

/* Rounds a double to float. AWAY concerns ties (tf32's rna). */
static float to_single(double x, int rounding) {
    if (host_roundings[rounding] == FE_TONEAREST) return (float)x;
    fesetround(host_roundings[rounding]);
    volatile double held = x;
    float r = (float)held;
    fesetround(FE_TONEAREST);
    return r;
}

/* Rounds to a half type in directions other than to nearest, by truncation of its lower bits. */
static uint16_t to_half(double x, dw__emu_type type, int rounding) {
    const bool brain = type == DW__T_BF16;
    if (isnan(x)) return 0x7FFF;
    /* Rounds to odd at 24 bits, so that the second rounding sees what the first truncated. */
    float f = (float)x;
    if ((double)f != x) {
        f = to_single(x, ZERO);
        if (isfinite(f)) f = dw__f32_from_bits(dw__f32_bits(f) | 1);
    }
    if (rounding == NEAREST || rounding == NO_ROUNDING)
        return brain ? dw__f32_to_bf16(f) : dw__f32_to_f16(f);
    /* Toward zero: the nearest value, or its predecessor if that value is further from zero. */
    uint16_t half = brain ? dw__f32_to_bf16(f) : dw__f32_to_f16(f);
    float back = brain ? dw__bf16_to_f32(half) : dw__f16_to_f32(half);
    if (fabsf(back) > fabsf(f)) half--;
    back = brain ? dw__bf16_to_f32(half) : dw__f16_to_f32(half);
    bool outwards = (rounding == UP && x > 0) || (rounding == DOWN && x < 0);
    if (outwards && (double)back != x) half++;
    return half;
}

static uint32_t to_tf32(uint32_t bits, int rounding) {
    if ((bits & 0x7F800000) == 0x7F800000)
        return bits & ~(uint32_t)0x1FFF; /* NaNs included (tests/probes) */
    if (rounding == AWAY)
        bits += 0x1000;
    else if (rounding == NEAREST)
        bits += 0xFFF + (bits >> 13 & 1);
    return bits & ~(uint32_t)0x1FFF;
}

static void store(unsigned char *place, int bytes, uint64_t value) {
    if (bytes == 4) {
        uint32_t word = (uint32_t)value;
        memcpy(place, &word, sizeof word);
    } else {
        memcpy(place, &value, sizeof value);
    }
}

static uint64_t convert_one(const conversion *k, const unsigned char *from) {
    const bool from_real = dw__emu_type_float(k->from),
               to_real = dw__emu_type_float(k->to) || k->to == DW__T_TF32;
    if (!from_real && !to_real) {
        int64_t x = load_whole(from, k->from);
        if (k->saturate) return clamped(x, dw__emu_type_signed(k->from), k->to);
        return (uint64_t)x;
    }
    /* Works on the bits, because a conversion to a number would change NaNs. */
    if (k->to == DW__T_TF32 && k->from == DW__T_F32) {
        uint32_t word;
        memcpy(&word, from, sizeof word);
        if (k->relu && word >> 31 && (word & 0x7FFFFFFF) <= 0x7F800000) word = 0;
        const uint32_t bits = to_tf32(word, k->rounding);
        if (k->finite && (bits & 0x7FFFFFFF) == 0x7F800000) return (bits & 0x80000000) | 0x7F7FE000;
        return bits;
    }
    double x;
    if (from_real) {
        x = flushed(load_real(from, k->from), k->from, k->flush);
    } else {
        x = whole_as_double(load_whole(from, k->from), dw__emu_type_signed(k->from),
                            k->to == DW__T_F64 ? (int)k->rounding : TO_ODD);
    }
    if (k->to_whole) x = rounded(x, k->rounding);
    if (!to_real) return to_whole(x, k->to);
    if (k->saturate) x = isnan(x) || x < 0 ? 0 : x > 1 ? 1 : x;
    if (k->relu && (x < 0 || (x == 0 && signbit(x)))) x = 0;
    switch (k->to) {
    case DW__T_F16:
    case DW__T_BF16: {
        uint16_t half = to_half(x, k->to, k->rounding);
        uint16_t most = k->to == DW__T_F16 ? 0x7BFF : 0x7F7F;
        if (k->finite && !isnan(x) && (half & 0x7FFF) > most)
            half = (uint16_t)((half & 0x8000) | most);
        return half;
    }
    case DW__T_F64: {
        uint64_t bits;
        memcpy(&bits, &x, sizeof bits);
        return isnan(x) ? 0x7FFFFFFFFFFFFFFF : bits;
    }
    default: {
        double f =
            flushed((double)to_single(x, k->to_whole ? NEAREST : k->rounding), DW__T_F32, k->flush);
        return isnan(f) ? 0x7FFFFFFF : dw__f32_bits((float)f);
    }
    }
}

static uint64_t extended(const conversion *k, uint64_t value) {
    const int bits = 8 * dw__emu_type_bytes(k->to), wide = 8 * k->register_bytes;
    if (bits >= 64) return value;
    value &= ((uint64_t)1 << bits) - 1;
    if (!dw__emu_type_signed(k->to) || wide <= bits) return value;
    value = (uint64_t)((int64_t)(value << (64 - bits)) >> (64 - bits));
    return wide >= 64 ? value : value & (((uint64_t)1 << wide) - 1);
}

static dw__emu_next convert_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const conversion *k = op->detail;
    DW__EACH_LANE(lane, mask)
    store(w->registers + op->d + lane * (uint32_t)k->to_bytes, k->to_bytes,
          extended(k, convert_one(k, w->registers + op->a + lane * (uint32_t)k->from_bytes)));
    return DW__NEXT;
}

/* ---- packed conversions -------------------------------------------------------------------- */

/* Converts two floats (a above b) to two values of a narrow type, or back to pairs of halves. */
typedef struct packed {
    dw__emu_type to, from;
    bool relu, finite, flush;
    int rounding;
    dw_dtype format;     /* of the narrow type */
    uint32_t sources[4]; /* of a conversion BY_CHANCE; there are `count` of them */
    int count;
} packed;

static bool format_of(dw__emu_type type, dw_dtype *format) {
    switch (type) {
    case DW__T_E4M3X2: *format = DW_E4M3; return true;
    case DW__T_E5M2X2: *format = DW_E5M2; return true;
    case DW__T_E2M3X2: *format = DW_E2M3; return true;
    case DW__T_E3M2X2: *format = DW_E3M2; return true;
    case DW__T_E2M1X2: *format = DW_E2M1; return true;
    case DW__T_UE8M0X2: *format = DW_E8M0; return true;
    default: return false;
    }
}

/* Sets *format to the format that .rs converts to. Returns how many numbers it converts; 0 for other types. */
static int chance_format_of(dw__emu_type type, dw_dtype *format) {
    switch (type) {
    case DW__T_F16X2: *format = DW_F16; return 2;
    case DW__T_BF16X2: *format = DW_BF16; return 2;
    case DW__T_E4M3X4: *format = DW_E4M3; return 4;
    case DW__T_E5M2X4: *format = DW_E5M2; return 4;
    case DW__T_E2M3X4: *format = DW_E2M3; return 4;
    case DW__T_E3M2X4: *format = DW_E3M2; return 4;
    case DW__T_E2M1X4: *format = DW_E2M1; return 4;
    default: return 0;
    }
}

/* E8M0 rounds a float toward zero or up to the next power of two (PTX ISA, "cvt": .rz, .rp), within 2^-127 to 2^127. */
static uint32_t to_e8m0(float x, int rounding, bool finite) {
    if (isnan(x)) return 0xFF;
    uint32_t bits = dw__f32_bits(fabsf(x)), exponent = bits >> 23;
    if (isinf(x)) return finite ? 0xFE : 0xFF;
    if (exponent == 0) { /* below 2^-126: 2^-127 is code 0 */
        if (rounding == UP && bits > 0x400000) return 1;
        return 0;
    }
    if (rounding == UP && (bits & 0x7FFFFF)) exponent++;
    return exponent > 0xFE && finite ? 0xFE : exponent;
}

static uint32_t to_code(const packed *k, float x) {
    if (k->format == DW_E8M0) return to_e8m0(x, k->rounding, k->finite);
    if (k->relu && (x < 0 || (x == 0 && signbit(x)))) x = 0;
    if (isnan(x) && k->format != DW_E4M3 &&
        k->format != DW_E5M2) /* the format has no NaN: the greatest number */
        return k->format == DW_E2M1 ? 0x7 : 0x1F;
    return dw__encode_one(k->format, isnan(x) ? fabsf(x) : x, DW_OVERFLOW_SATURATE,
                          DW_ROUND_NEAREST, 0);
}

/* Stochastic rounding, .rs (PTX ISA, "cvt"): the random bits are added to the truncated bits, and a carry rounds up.
 * Both are aligned at their upper ends. The two numbers of a pair use the same sixteen bits (13 for F16); the first
 * pair uses the upper half of the word. For E2M1 the first pair uses the upper bytes of both halves. The ISA's text
 * says no more and its figures were not available, so the assignment of bits is certain for F16 and BF16 only. */
static uint32_t chance_of(dw_dtype format, uint32_t random, int index) {
    switch (format) {
    case DW_F16: return (index ? random : random >> 16) << 19;
    case DW_BF16: return (index ? random : random >> 16) << 16;
    case DW_E2M1:
        if (index >= 2) random <<= 8;
        return (random & 0xFF000000) | (random & 0xFF00) << 8;
    default: return index < 2 ? random & 0xFFFF0000 : random << 16;
    }
}
static uint32_t by_chance(const packed *k, float x, uint32_t word) {
    const bool half = k->format == DW_F16 || k->format == DW_BF16;
    if (k->relu && (x < 0 || (x == 0 && signbit(x)))) x = 0;
    if (isnan(x)) return half ? 0x7FFF : dw__format_nan(k->format);
    return dw__encode_one(k->format, x,
                          half && !k->finite ? DW_OVERFLOW_NONFINITE : DW_OVERFLOW_SATURATE,
                          DW_ROUND_STOCHASTIC, word);
}
static dw__emu_next chance_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const packed *k = op->detail;
    const uint32_t *random = DW__REGISTER(w, uint32_t, op->c);
    uint32_t *d = DW__REGISTER(w, uint32_t, op->d);
    const int count = k->count, bits = k->format == DW_E2M1 ? 4 : 32 / count;
    assert(bits < 32);
    DW__EACH_LANE(lane, mask) {
        uint32_t r = 0;
        for (int i = 0; i < count; i++)
            r = r << bits | by_chance(k, DW__REGISTER(w, float, k->sources[i])[lane],
                                      chance_of(k->format, random[lane], i));
        d[lane] = r;
    }
    return DW__NEXT;
}
static dw_status emit_chance(dw__emu_translator *t, packed k) {
    packed *kept = dw__emu_detail(t, sizeof *kept);
    const int count = chance_format_of(k.to, &k.format), architecture = t->program->architecture;
    const dw__ptx_operand *o = t->in->operands, *sources = &o[1];
    uint32_t d, random;
    if (!kept) return dw__fail_memory("an operation", sizeof *kept);
    if (!count || k.from != DW__T_F32 || k.flush || (count == 4 && !k.finite) ||
        (architecture != 100 && architecture != 103))
        return dw__emu_unsupported(t);
    if (t->in->operand_count != (count == 2 ? 4 : 3) ||
        (count == 4 && (o[1].kind != DW__PTX_VECTOR || o[1].count != 4)))
        return dw__emu_malformed(
            t, "the sources must be two numbers, or four as {a, b, e, f}, and random bits");
    if (count == 4) sources = o[1].items;
    for (int i = 0; i < count; i++)
        DW_RETURN_IF_FAILED(dw__emu_take_source(t, &sources[i], DW__T_F32, &k.sources[i]));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &o[count == 2 ? 3 : 2], DW__T_B32, &random));
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, &o[0], k.to, &d));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, chance_run));
    k.count = count;
    *kept = k;
    t->op->d = d, t->op->c = random;
    t->op->detail = kept;
    return DW_OK;
}

static dw__emu_next narrow_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const packed *k = op->detail;
    const uint32_t *a = DW__REGISTER(w, uint32_t, op->a), *b = DW__REGISTER(w, uint32_t, op->b);
    uint32_t *d = DW__REGISTER(w, uint32_t, op->d);
    const int bits = k->format == DW_E2M1 ? 4 : 8;
    DW__EACH_LANE(lane, mask) {
        float high, low;
        if (k->from == DW__T_F32)
            high = dw__f32_from_bits(a[lane]), low = dw__f32_from_bits(b[lane]);
        else if (k->from == DW__T_F16X2)
            high = dw__f16_to_f32((uint16_t)(a[lane] >> 16)),
            low = dw__f16_to_f32((uint16_t)a[lane]);
        else
            high = dw__bf16_to_f32((uint16_t)(a[lane] >> 16)),
            low = dw__bf16_to_f32((uint16_t)a[lane]);
        d[lane] = to_code(k, high) << bits | to_code(k, low);
    }
    return DW__NEXT;
}

static dw__emu_next halves_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const packed *k = op->detail;
    const float *a = DW__REGISTER(w, float, op->a), *b = DW__REGISTER(w, float, op->b);
    uint32_t *d = DW__REGISTER(w, uint32_t, op->d);
    const dw__emu_type half = k->to == DW__T_F16X2 ? DW__T_F16 : DW__T_BF16;
    const uint16_t most = half == DW__T_F16 ? 0x7BFF : 0x7F7F;
    DW__EACH_LANE(lane, mask) {
        uint16_t parts[2];
        for (int i = 0; i < 2; i++) {
            float x = i ? a[lane] : b[lane];
            if (k->relu && (x < 0 || (x == 0 && signbit(x)))) x = 0;
            parts[i] = to_half((double)x, half, k->rounding);
            if (k->finite && !isnan(x) && (parts[i] & 0x7FFF) > most)
                parts[i] = (uint16_t)((parts[i] & 0x8000) | most);
        }
        d[lane] = (uint32_t)parts[1] << 16 | parts[0];
    }
    return DW__NEXT;
}

/* The most common conversions, without tests of the options. */
static uint32_t brain_of(float x) { return isnan(x) ? 0x7FFF : dw__f32_to_bf16(x); }
static uint32_t half_of(float x) { return isnan(x) ? 0x7FFF : dw__f32_to_f16(x); }
#define PLAIN_PAIR(name, HALF)                                                                     \
    static dw__emu_next name(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {               \
        const float *a = DW__REGISTER(w, const float, op->a),                                      \
                    *b = DW__REGISTER(w, const float, op->b);                                      \
        uint32_t *d = DW__REGISTER(w, uint32_t, op->d);                                            \
        DW__LANEWISE(mask, d[i] = HALF(a[i]) << 16 | HALF(b[i]));                                  \
        return DW__NEXT;                                                                           \
    }
PLAIN_PAIR(plain_brains, brain_of)
PLAIN_PAIR(plain_halves, half_of)
#undef PLAIN_PAIR

static dw__emu_next widen_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const packed *k = op->detail;
    const uint32_t *a = DW__REGISTER(w, uint32_t, op->a);
    uint32_t *d = DW__REGISTER(w, uint32_t, op->d);
    const int bits = k->format == DW_E2M1 ? 4 : 8;
    DW__EACH_LANE(lane, mask) {
        uint32_t r = 0;
        for (int i = 0; i < 2; i++) {
            uint32_t code = a[lane] >> bits * i & ((1u << bits) - 1);
            float x = dw__decode_one(k->format, code);
            if (k->relu && (x < 0 || (x == 0 && signbit(x)))) x = 0;
            uint32_t half = isnan(x)               ? 0x7FFF
                            : k->to == DW__T_F16X2 ? dw__f32_to_f16(x)
                                                   : dw__f32_to_bf16(x);
            r |= half << 16 * i;
        }
        d[lane] = r;
    }
    return DW__NEXT;
}

static dw_status emit_packed(dw__emu_translator *t, packed k) {
    packed *kept = dw__emu_detail(t, sizeof *kept);
    const int sources = k.from == DW__T_F32 ? 2 : 1;
    uint32_t places[3] = {0};
    dw__emu_run run = NULL;
    if (!kept) return dw__fail_memory("an operation", sizeof *kept);
    if (k.to == DW__T_F16X2 || k.to == DW__T_BF16X2) {
        if (k.from == DW__T_F32)
            run = halves_run;
        else if (format_of(k.from, &k.format))
            run = widen_run;
    } else if (format_of(k.to, &k.format)) {
        const bool power = k.format == DW_E8M0;
        if (power ? k.rounding == ZERO || k.rounding == UP : k.rounding == NEAREST && k.finite)
            run = narrow_run;
    }
    if (!run || t->in->operand_count != sources + 1) return dw__emu_unsupported(t);
    if (run == halves_run && k.rounding == NEAREST && !k.relu && !k.finite)
        run = k.to == DW__T_F16X2 ? plain_halves : plain_brains;
    *kept = k;
    for (int i = 1; i <= sources; i++)
        DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[i], k.from, &places[i]));
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, &t->in->operands[0], k.to, &places[0]));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, run));
    t->op->d = places[0], t->op->a = places[1], t->op->b = places[2];
    t->op->detail = kept;
    return DW_OK;
}

/* ---- cvt.pack ------------------------------------------------------------------------------ */

/* Clamps two integers to a narrow type and packs them, the first above. A third word moves up to make room for them. */
static dw__emu_next pack_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const uint32_t *a = DW__REGISTER(w, uint32_t, op->a), *b = DW__REGISTER(w, uint32_t, op->b);
    const uint32_t *c = DW__REGISTER(w, uint32_t, op->c);
    uint32_t *d = DW__REGISTER(w, uint32_t, op->d);
    const int bits = op->immediate & 31;
    const bool is_signed = op->immediate & 32, has_third = op->immediate & 64;
    const int64_t most = (1 << (bits - is_signed)) - 1, least = is_signed ? -most - 1 : 0;
    DW__EACH_LANE(lane, mask) {
        const int64_t x = (int32_t)a[lane], y = (int32_t)b[lane];
        const uint32_t low = (1u << bits) - 1;
        uint32_t r = ((uint32_t)(x < least  ? least
                                 : x > most ? most
                                            : x) &
                      low)
                         << bits |
                     ((uint32_t)(y < least  ? least
                                 : y > most ? most
                                            : y) &
                      low);
        if (has_third) r |= c[lane] << 2 * bits;
        d[lane] = r;
    }
    return DW__NEXT;
}
static dw_status translate_pack(dw__emu_translator *t) {
    static const char *const names[] = {"u2", "s2", "u4", "s4", "u8", "s8", "u16", "s16", NULL};
    if (!dw__emu_take(t, "sat")) return dw__emu_unsupported(t);
    const int type = dw__emu_take_one_of(t, names), bits = 2 << type / 2;
    if (type < 0 || !dw__emu_take(t, "s32")) return dw__emu_unsupported(t);
    const bool has_third = dw__emu_take(t, "b32");
    if (has_third == (bits == 16)) return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(dw__emu_emit_same(t, DW__T_B32, 2 + has_third, pack_run));
    if (!has_third) t->op->c = t->op->a;
    t->op->immediate = bits + 32 * (type & 1) + 64 * has_third;
    return DW_OK;
}

/* ---- cvt ----------------------------------------------------------------------------------- */

static bool is_packed(dw__emu_type type) {
    return type == DW__T_F16X2 || type == DW__T_BF16X2 || type >= DW__T_E4M3X2;
}

static dw_status translate_cvt(dw__emu_translator *t) {
    static const char *const roundings[] = {"rn",  "rz",  "rm",  "rp", "rna", "rni",
                                            "rzi", "rmi", "rpi", "rs", NULL};
    static const int meanings[] = {NEAREST, ZERO, DOWN, UP, AWAY,
                                   NEAREST, ZERO, DOWN, UP, BY_CHANCE};
    conversion *k = dw__emu_detail(t, sizeof *k);
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    if (dw__emu_take(t, "pack")) return translate_pack(t);
    for (bool more = true; more;) { /* the order of the modifiers differs between forms */
        more = false;
        int rounding = dw__emu_take_one_of(t, roundings);
        if (rounding >= 0)
            k->rounding = meanings[rounding], k->to_whole = rounding >= 5 && rounding < 9,
            more = true;
        if (dw__emu_take(t, "ftz")) k->flush = more = true;
        if (dw__emu_take(t, "sat")) k->saturate = more = true;
        if (dw__emu_take(t, "relu")) k->relu = more = true;
        if (dw__emu_take(t, "satfinite")) k->finite = more = true;
    }
    if (!dw__emu_take_type(t, &k->to) || !dw__emu_take_type(t, &k->from))
        return dw__emu_unsupported(t);
    if (k->to == DW__T_TF32 && k->from != DW__T_F32) return dw__emu_unsupported(t);
    const packed p = {.to = k->to,
                      .from = k->from,
                      .relu = k->relu,
                      .finite = k->finite,
                      .flush = k->flush,
                      .rounding = k->rounding};
    if (k->rounding == BY_CHANCE) return emit_chance(t, p);
    if (is_packed(k->to) || is_packed(k->from)) return emit_packed(t, p);
    if (t->in->operand_count != 2) return dw__emu_malformed(t, "it has two operands");
    /* Registers may be wider than the types. */
    const dw__ptx_operand *to = &t->in->operands[0], *from = &t->in->operands[1];
    static const dw__emu_type by_bytes[] = {
        [1] = DW__T_B32, [2] = DW__T_B32, [4] = DW__T_B32, [8] = DW__T_B64};
    int to_bytes = dw__emu_operand_bytes(t, to), from_bytes = dw__emu_operand_bytes(t, from);
    if (to_bytes < dw__emu_type_bytes(k->to) || to_bytes > 8 ||
        (from_bytes >= 0 && (from_bytes < dw__emu_type_bytes(k->from) || from_bytes > 8)))
        return dw__emu_malformed(t, "a register is narrower than its type");
    assert(to_bytes > 0);
    uint32_t a = 0, d = 0;
    DW_RETURN_IF_FAILED(from_bytes > 0 ? dw__emu_take_source(t, from, by_bytes[from_bytes], &a)
                                       : dw__emu_take_source(t, from, k->from, &a));
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, to, by_bytes[to_bytes], &d));
    k->register_bytes = to_bytes;
    k->to_bytes = dw__emu_place_bytes(to_bytes);
    k->from_bytes = dw__emu_place_bytes(from_bytes > 0 ? from_bytes : dw__emu_type_bytes(k->from));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, convert_run));
    t->op->a = a, t->op->d = d;
    t->op->detail = k;
    return DW_OK;
}

/* ---- address spaces ------------------------------------------------------------------------ */

static uint64_t window_of(int space) {
    static const uint64_t windows[] = {DW__SHARED_WINDOW, DW__LOCAL_WINDOW, DW__PARAM_WINDOW, 0, 0};
    return windows[space];
}
static const char *const spaces[] = {"shared", "local", "param", "global", "const", NULL};

DW__UNARY(mov_64, uint64_t, uint64_t, x)
static dw__emu_next to_generic_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const uint64_t *a = DW__REGISTER(w, uint64_t, op->a);
    uint64_t *d = DW__REGISTER(w, uint64_t, op->d);
    DW__LANEWISE(mask, d[i] = a[i] | (uint64_t)op->immediate);
    return DW__NEXT;
}
static dw__emu_next from_generic_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const uint64_t *a = DW__REGISTER(w, uint64_t, op->a);
    uint64_t *d = DW__REGISTER(w, uint64_t, op->d);
    DW__LANEWISE(mask, d[i] = a[i] & ~DW__WINDOW_MASK);
    return DW__NEXT;
}

static int take_space(dw__emu_translator *t) {
    if (dw__emu_take(t, "shared::cta") || dw__emu_take(t, "shared::cluster")) return 0;
    if (dw__emu_take(t, "param::entry")) return 2;
    return dw__emu_take_one_of(t, spaces);
}

static dw_status translate_cvta(dw__emu_translator *t) {
    bool from_generic = dw__emu_take(t, "to");
    int space = take_space(t);
    if (space < 0 || !dw__emu_take(t, "u64")) return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(dw__emu_emit_same(t, DW__T_B64, 1,
                                          window_of(space) == 0 ? mov_64
                                          : from_generic        ? from_generic_run
                                                                : to_generic_run));
    t->op->immediate = (int64_t)window_of(space);
    return DW_OK;
}

static dw__emu_next isspacep_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const uint64_t *a = DW__REGISTER(w, uint64_t, op->a);
    uint32_t r = 0, *d = DW__REGISTER(w, uint32_t, op->d);
    for (int i = 0; i < DW__LANES; i++)
        r |= (uint32_t)((a[i] & DW__WINDOW_MASK) == (uint64_t)op->immediate) << i;
    *d = (*d & ~mask) | (r & mask);
    return DW__NEXT;
}
static dw_status translate_isspacep(dw__emu_translator *t) {
    int space = take_space(t);
    uint32_t a, d;
    if (space < 0 || t->in->operand_count != 2) return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[1], DW__T_B64, &a));
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, &t->in->operands[0], DW__T_PRED, &d));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, isspacep_run));
    t->op->a = a, t->op->d = d;
    t->op->immediate = (int64_t)window_of(space);
    return DW_OK;
}

const dw__emu_opcode dw__emu_opcodes_convert[] = {
    {"cvt", translate_cvt},
    {"cvta", translate_cvta},
    {"isspacep", translate_isspacep},
    {NULL, NULL},
};
