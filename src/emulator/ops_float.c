/* Floating point (PTX ISA, "Floating Point Instructions", "Half Precision Floating Point Instructions", "Mixed
 * Precision Floating Point Instructions"). Results are those of IEEE 754 with NVIDIA's canonical NaN (all ones except
 * for the sign). The bargain: approximate functions are computed in double and rounded, so they are more accurate
 * than hardware and not bit-identical to it.
 */
#include "emulator/lanes.h"
#include "number/half.h"
#include <fenv.h>
#include <math.h>
#include <string.h>

typedef struct real_op real_op;
struct real_op {
    dw__emu_type type;
    int rounding; /* of fesetround */
    bool flush, saturate, relu, keep_nan;
    int count; /* number of sources */
    float (*narrow)(const real_op *, float, float, float);
    double (*wide)(const real_op *, double, double, double);
    uint32_t places[4];
};

/* ---- the functions ------------------------------------------------------------------------- */

#define BOTH(name, RESULT)                                                                         \
    static float name##_narrow(const real_op *op, float x, float y, float z) {                     \
        (void)op, (void)y, (void)z;                                                                \
        return RESULT(float, f);                                                                   \
    }                                                                                              \
    static double name##_wide(const real_op *op, double x, double y, double z) {                   \
        (void)op, (void)y, (void)z;                                                                \
        return RESULT(double, );                                                                   \
    }
#define ADD(T, s) x + y
#define SUB(T, s) x - y
#define MUL(T, s) x *y
#define DIV(T, s) x / y
#define FMA(T, s) fma##s(x, y, z)
#define SQRT(T, s) sqrt##s(x)
#define RCP(T, s) (T)1 / x
#define RSQRT(T, s) (T)(1 / sqrt((double)x))
#define EX2(T, s) (T) exp2((double)x)
#define LG2(T, s) (T) log2((double)x)
#define SIN(T, s) (T) sin((double)x)
#define COS(T, s) (T) cos((double)x)
#define TANH(T, s) (T) tanh((double)x)
BOTH(add, ADD)
BOTH(sub, SUB)
BOTH(mul, MUL)
BOTH(div, DIV)
BOTH(fma, FMA)
BOTH(sqrt, SQRT)
BOTH(rcp, RCP)
BOTH(rsqrt, RSQRT)
BOTH(ex2, EX2)
BOTH(lg2, LG2)
BOTH(sin, SIN)
BOTH(cos, COS)
BOTH(tanh, TANH)
/* -0 is less than +0. The smaller or larger of a NaN and a number is the number, unless NaNs are kept. */
#define SMALLER(T, s)                                                                              \
    isnan(x)   ? (op->keep_nan ? x : y)                                                            \
    : isnan(y) ? (op->keep_nan ? y : x)                                                            \
    : x == y   ? (signbit(x) ? x : y)                                                              \
    : x < y    ? x                                                                                 \
               : y
#define LARGER(T, s)                                                                               \
    isnan(x)   ? (op->keep_nan ? x : y)                                                            \
    : isnan(y) ? (op->keep_nan ? y : x)                                                            \
    : x == y   ? (signbit(x) ? y : x)                                                              \
    : x > y    ? x                                                                                 \
               : y
BOTH(least, SMALLER)
BOTH(greatest, LARGER)
static float least_of_three(const real_op *op, float x, float y, float z) {
    return least_narrow(op, least_narrow(op, x, y, 0), z, 0);
}
static float greatest_of_three(const real_op *op, float x, float y, float z) {
    return greatest_narrow(op, greatest_narrow(op, x, y, 0), z, 0);
}

/* Computes x * y + z of half types, rounded to odd, so that a later rounding to 11 or 8 bits rounds only once (Boldo
 * and Melquiond 2008). The product is exact in double. */
static float fma_to_odd(float x, float y, float z) {
    double p = (double)x * (double)y, s = p + (double)z, t = s - p;
    double error = (p - (s - t)) + ((double)z - t);
    if (!isfinite(s)) return (float)s;
    float r = (float)s;
    double rest = (s - (double)r) + error;
    uint32_t bits = dw__f32_bits(r);
    if (rest != 0 && !(bits & 1)) bits = ((rest > 0) == (r > 0)) || r == 0 ? bits | 1 : bits - 1;
    return dw__f32_from_bits(bits);
}

/* ---- values -------------------------------------------------------------------------------- */

static float flushed(float x) { return fpclassify(x) == FP_SUBNORMAL ? copysignf(0, x) : x; }
static float finished(const real_op *op, float r) {
    if (op->flush) r = flushed(r);
    if (op->saturate) r = isnan(r) || r < 0 ? 0 : r > 1 ? 1 : r;
    if (op->relu && (r < 0 || signbit(r))) r = isnan(r) ? r : 0;
    return isnan(r) ? dw__f32_from_bits(0x7FFFFFFF) : r;
}
static float applied(const real_op *op, float x, float y, float z) {
    if (op->flush) x = flushed(x), y = flushed(y), z = flushed(z);
    return finished(op, op->narrow(op, x, y, z));
}
/* Subnormal numbers of F16 are below 2^-14. A result is flushed according to its value without .ftz. */
static float flushed_half(float x) { return fabsf(x) < 0x1p-14f ? copysignf(0, x) : x; }
static float rounded_up_to_normal(float r) {
    return flushed_half(dw__f16_to_f32(dw__f32_to_f16(r)));
}
static uint16_t applied_half(const real_op *op, uint16_t x, uint16_t y, uint16_t z) {
    const bool brain = op->type == DW__T_BF16 || op->type == DW__T_BF16X2;
    float a = brain ? dw__bf16_to_f32(x) : dw__f16_to_f32(x),
          b = brain ? dw__bf16_to_f32(y) : dw__f16_to_f32(y);
    float c = brain ? dw__bf16_to_f32(z) : dw__f16_to_f32(z);
    if (op->flush && !brain) a = flushed_half(a), b = flushed_half(b), c = flushed_half(c);
    /* A product of BF16 may be subnormal in F32. */
    float r = op->narrow == fma_narrow   ? finished(op, fma_to_odd(a, b, c))
              : op->narrow == mul_narrow ? finished(op, fma_to_odd(a, b, -0.0f))
                                         : applied(op, a, b, c);
    if (isnan(r)) return 0x7FFF;
    if (op->flush && !brain && fabsf(r) < 0x1p-14f) r = rounded_up_to_normal(r);
    return brain ? dw__f32_to_bf16(r) : dw__f32_to_f16(r);
}

static dw__emu_next real_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const real_op *r = op->detail;
    if (r->rounding != FE_TONEAREST) fesetround(r->rounding);
    switch (r->type) {
    case DW__T_F32: {
        const uint32_t *a = DW__REGISTER(w, uint32_t, op->a), *b = DW__REGISTER(w, uint32_t, op->b);
        const uint32_t *c = DW__REGISTER(w, uint32_t, op->c);
        uint32_t *d = DW__REGISTER(w, uint32_t, op->d);
        DW__EACH_LANE(i, mask)
        d[i] = dw__f32_bits(
            applied(r, dw__f32_from_bits(a[i]), dw__f32_from_bits(b[i]), dw__f32_from_bits(c[i])));
        break;
    }
    case DW__T_F32X2: {
        const uint32_t *a = DW__REGISTER(w, uint32_t, op->a), *b = DW__REGISTER(w, uint32_t, op->b);
        const uint32_t *c = DW__REGISTER(w, uint32_t, op->c);
        uint32_t *d = DW__REGISTER(w, uint32_t, op->d);
        DW__EACH_LANE(lane, mask)
        for (uint32_t i = 2 * lane; i < 2 * lane + 2; i++)
            d[i] = dw__f32_bits(applied(r, dw__f32_from_bits(a[i]), dw__f32_from_bits(b[i]),
                                        dw__f32_from_bits(c[i])));
        break;
    }
    case DW__T_F64: {
        const double *a = DW__REGISTER(w, double, op->a), *b = DW__REGISTER(w, double, op->b);
        const double *c = DW__REGISTER(w, double, op->c);
        double *d = DW__REGISTER(w, double, op->d);
        DW__EACH_LANE(i, mask) {
            double value = r->wide(r, a[i], b[i], c[i]);
            if (r->saturate) value = isnan(value) || value < 0 ? 0 : value > 1 ? 1 : value;
            d[i] = value;
        }
        break;
    }
    default: {
        const bool pairs = r->type == DW__T_F16X2 || r->type == DW__T_BF16X2;
        const uint32_t *a = DW__REGISTER(w, uint32_t, op->a), *b = DW__REGISTER(w, uint32_t, op->b);
        const uint32_t *c = DW__REGISTER(w, uint32_t, op->c);
        uint32_t *d = DW__REGISTER(w, uint32_t, op->d);
        DW__EACH_LANE(i, mask) {
            uint32_t value = applied_half(r, (uint16_t)a[i], (uint16_t)b[i], (uint16_t)c[i]);
            if (pairs)
                value |= (uint32_t)applied_half(r, (uint16_t)(a[i] >> 16), (uint16_t)(b[i] >> 16),
                                                (uint16_t)(c[i] >> 16))
                         << 16;
            d[i] = value;
        }
        break;
    }
    }
    if (r->rounding != FE_TONEAREST) fesetround(FE_TONEAREST);
    return DW__NEXT;
}

/* The most common operations, without tests of the options. */
static inline uint32_t settled(float r) { return isnan(r) ? 0x7FFFFFFF : dw__f32_bits(r); }
#define PLAIN(name, RESULT)                                                                        \
    static dw__emu_next name(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {               \
        const float *a = DW__REGISTER(w, const float, op->a),                                      \
                    *b = DW__REGISTER(w, const float, op->b);                                      \
        const float *c = DW__REGISTER(w, const float, op->c);                                      \
        uint32_t *d = DW__REGISTER(w, uint32_t, op->d);                                            \
        (void)c;                                                                                   \
        DW__LANEWISE(mask, const float x = a[i]; const float y = b[i]; d[i] = settled(RESULT));    \
        return DW__NEXT;                                                                           \
    }
PLAIN(plain_add, x + y)
PLAIN(plain_sub, x - y)
PLAIN(plain_mul, x *y)
PLAIN(plain_fma, fmaf(x, y, c[i]))
/* Like SMALLER and LARGER: of two equal numbers, which may be -0 and +0, the sign decides. */
static inline float smaller(float x, float y) {
    const float equal = dw__f32_from_bits(dw__f32_bits(x) | dw__f32_bits(y));
    return isnan(x) ? y : isnan(y) ? x : x == y ? equal : x < y ? x : y;
}
static inline float larger(float x, float y) {
    const float equal = dw__f32_from_bits(dw__f32_bits(x) & dw__f32_bits(y));
    return isnan(x) ? y : isnan(y) ? x : x == y ? equal : x > y ? x : y;
}
PLAIN(plain_least, smaller(x, y))
PLAIN(plain_greatest, larger(x, y))

/* ---- translators --------------------------------------------------------------------------- */

static const char *const roundings[] = {"rn", "rz", "rm", "rp", NULL};
static const int host_roundings[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};

static dw_status emit_real(dw__emu_translator *t, real_op r, dw__emu_run plain) {
    bool exact =
        r.type == DW__T_F32 && r.rounding == FE_TONEAREST && !r.flush && !r.saturate && !r.relu;
    real_op *kept = dw__emu_detail(t, sizeof *kept);
    if (!kept) return dw__fail_memory("an operation", sizeof *kept);
    *kept = r;
    DW_RETURN_IF_FAILED(dw__emu_emit_same(t, r.type, r.count, exact && plain ? plain : real_run));
    /* Missing operands are read but not used. */
    if (r.count < 2) t->op->b = t->op->a;
    if (r.count < 3) t->op->c = t->op->a;
    t->op->detail = kept;
    return DW_OK;
}

/* Takes .rnd .ftz .sat .relu .type if this table supports them; leaves the instruction to other tables otherwise. */
static dw_status take_real(dw__emu_translator *t, real_op *r) {
    int rounding = dw__emu_take_one_of(t, roundings);
    r->rounding = rounding < 0 ? FE_TONEAREST : host_roundings[rounding];
    r->flush = dw__emu_take(t, "ftz");
    r->keep_nan = dw__emu_take(t, "NaN");
    r->saturate = dw__emu_take(t, "sat");
    r->relu = dw__emu_take(t, "relu");
    if (dw__emu_take_type(t, &r->type) && (dw__emu_type_float(r->type) || r->type == DW__T_F16X2 ||
                                           r->type == DW__T_BF16X2 || r->type == DW__T_F32X2)) {
        bool half =
            dw__emu_type_bytes(r->type) == 2 || r->type == DW__T_F16X2 || r->type == DW__T_BF16X2;
        if (!(half && r->rounding != FE_TONEAREST)) return DW_OK;
    }
    t->cursor = 0;
    return dw__emu_unsupported(t);
}

/* add.f32.bf16 and the like: all sources except for the last have a half type. */
static dw__emu_next widen_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const uint32_t *a = DW__REGISTER(w, uint32_t, op->a);
    uint32_t *d = DW__REGISTER(w, uint32_t, op->d);
    DW__EACH_LANE(i, mask)
    d[i] = dw__f32_bits(op->immediate ? dw__bf16_to_f32((uint16_t)a[i])
                                      : dw__f16_to_f32((uint16_t)a[i]));
    return DW__NEXT;
}
static dw_status emit_mixed(dw__emu_translator *t, real_op r, dw__emu_type narrow) {
    uint32_t places[4] = {0};
    real_op *kept = dw__emu_detail(t, sizeof *kept);
    if (!kept) return dw__fail_memory("an operation", sizeof *kept);
    if (r.flush || t->in->operand_count != r.count + 1) return dw__emu_unsupported(t);
    *kept = r;
    for (int i = 1; i <= r.count; i++) {
        DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[i],
                                                i < r.count ? narrow : DW__T_F32, &places[i]));
        if (i == r.count) break;
        uint32_t wide;
        DW_RETURN_IF_FAILED(dw__emu_take_scratch(t, 4, &wide));
        DW_RETURN_IF_FAILED(dw__emu_emit(t, widen_run));
        t->op->a = places[i], t->op->d = wide;
        t->op->immediate = narrow == DW__T_BF16;
        places[i] = wide;
    }
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, &t->in->operands[0], DW__T_F32, &places[0]));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, real_run));
    t->op->d = places[0], t->op->a = places[1], t->op->b = places[2];
    t->op->c = r.count == 3 ? places[3] : places[1];
    t->op->detail = kept;
    return DW_OK;
}

static dw_status translate_sum(dw__emu_translator *t, real_op r, dw__emu_run plain) {
    DW_RETURN_IF_FAILED(take_real(t, &r));
    if (r.type == DW__T_F32 && r.narrow != mul_narrow) {
        if (dw__emu_take(t, "f16")) return emit_mixed(t, r, DW__T_F16);
        if (dw__emu_take(t, "bf16")) return emit_mixed(t, r, DW__T_BF16);
    }
    return emit_real(t, r, plain);
}
#define TRANSLATE(opcode, function, sources, plain)                                                \
    static dw_status translate_##opcode(dw__emu_translator *t) {                                   \
        return translate_sum(                                                                      \
            t, (real_op){.count = sources, .narrow = function##_narrow, .wide = function##_wide},  \
            plain);                                                                                \
    }
TRANSLATE(add, add, 2, plain_add)
TRANSLATE(sub, sub, 2, plain_sub)
TRANSLATE(mul, mul, 2, plain_mul)
TRANSLATE(fma, fma, 3, plain_fma)

static dw_status translate_extreme(dw__emu_translator *t, real_op r, dw__emu_run plain,
                                   float (*of_three)(const real_op *, float, float, float)) {
    DW_RETURN_IF_FAILED(take_real(t, &r));
    if (t->in->operand_count == 4 && r.type == DW__T_F32) r.count = 3, r.narrow = of_three;
    return emit_real(t, r, r.count == 2 && !r.keep_nan ? plain : NULL);
}
static dw_status translate_min(dw__emu_translator *t) {
    return translate_extreme(t, (real_op){.count = 2, .narrow = least_narrow, .wide = least_wide},
                             plain_least, least_of_three);
}
static dw_status translate_max(dw__emu_translator *t) {
    return translate_extreme(
        t, (real_op){.count = 2, .narrow = greatest_narrow, .wide = greatest_wide}, plain_greatest,
        greatest_of_three);
}

/* Division and functions of one number: exact ones name their rounding, the others .approx or .full. */
static dw_status translate_function(dw__emu_translator *t, real_op r) {
    if (!dw__emu_take(t, "approx")) (void)dw__emu_take(t, "full");
    DW_RETURN_IF_FAILED(take_real(t, &r));
    return emit_real(t, r, NULL);
}
#define TRANSLATE_FUNCTION(name, sources)                                                          \
    static dw_status translate_##name(dw__emu_translator *t) {                                     \
        return translate_function(                                                                 \
            t, (real_op){.count = sources, .narrow = name##_narrow, .wide = name##_wide});         \
    }
TRANSLATE_FUNCTION(div, 2)
TRANSLATE_FUNCTION(sqrt, 1)
TRANSLATE_FUNCTION(rcp, 1)
TRANSLATE_FUNCTION(rsqrt, 1)
TRANSLATE_FUNCTION(ex2, 1)
TRANSLATE_FUNCTION(lg2, 1)
TRANSLATE_FUNCTION(sin, 1)
TRANSLATE_FUNCTION(cos, 1)
TRANSLATE_FUNCTION(tanh, 1)

/* neg and abs change the sign bit only, so NaNs keep their payload. */
DW__UNARY(negate_16, uint32_t, uint32_t, (x ^ 0x8000) & 0xFFFF)
DW__UNARY(negate_16x2, uint32_t, uint32_t, x ^ 0x80008000)
DW__UNARY(negate_32, uint32_t, uint32_t, x ^ 0x80000000)
DW__UNARY(negate_64, uint64_t, uint64_t, x ^ (uint64_t)1 << 63)
DW__UNARY(magnitude_16, uint32_t, uint32_t, x & 0x7FFF)
DW__UNARY(magnitude_16x2, uint32_t, uint32_t, x & 0x7FFF7FFF)
DW__UNARY(magnitude_32, uint32_t, uint32_t, x & 0x7FFFFFFF)
DW__UNARY(magnitude_64, uint64_t, uint64_t, x & ~((uint64_t)1 << 63))
static uint32_t flushed_bits(uint32_t x) { return dw__f32_bits(flushed(dw__f32_from_bits(x))); }
DW__UNARY(negate_flushed, uint32_t, uint32_t, flushed_bits(x) ^ 0x80000000)
DW__UNARY(magnitude_flushed, uint32_t, uint32_t, flushed_bits(x) & 0x7FFFFFFF)
DW__BINARY(copysign_32, uint32_t, uint32_t, (x & 0x80000000) | (y & 0x7FFFFFFF))
DW__BINARY(copysign_64, uint64_t, uint64_t, (x & (uint64_t)1 << 63) | (y & ~((uint64_t)1 << 63)))

static dw_status translate_sign(dw__emu_translator *t, const dw__emu_run runs[5]) {
    real_op r = {0};
    DW_RETURN_IF_FAILED(take_real(t, &r));
    bool pair = r.type == DW__T_F16X2 || r.type == DW__T_BF16X2;
    int which = r.type == DW__T_F32 ? (r.flush ? 4 : 2) : r.type == DW__T_F64 ? 3 : pair ? 1 : 0;
    return r.type == DW__T_F32X2 ? dw__emu_unsupported(t)
                                 : dw__emu_emit_same(t, r.type, 1, runs[which]);
}
static dw_status translate_neg(dw__emu_translator *t) {
    static const dw__emu_run runs[] = {negate_16, negate_16x2, negate_32, negate_64,
                                       negate_flushed};
    return translate_sign(t, runs);
}
static dw_status translate_abs(dw__emu_translator *t) {
    static const dw__emu_run runs[] = {magnitude_16, magnitude_16x2, magnitude_32, magnitude_64,
                                       magnitude_flushed};
    return translate_sign(t, runs);
}
static dw_status translate_copysign(dw__emu_translator *t) {
    bool wide = dw__emu_take(t, "f64");
    if (!wide && !dw__emu_take(t, "f32")) return dw__emu_unsupported(t);
    return dw__emu_emit_same(t, wide ? DW__T_F64 : DW__T_F32, 2, wide ? copysign_64 : copysign_32);
}

static dw__emu_next test_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    uint32_t r = 0, *d = DW__REGISTER(w, uint32_t, op->d);
    for (int i = 0; i < DW__LANES; i++) {
        const bool wide = op->immediate >= 8;
        const double x =
            wide ? DW__REGISTER(w, double, op->a)[i] : (double)DW__REGISTER(w, float, op->a)[i];
        const int kind = wide ? fpclassify(x) : fpclassify(DW__REGISTER(w, float, op->a)[i]);
        bool is = false;
        switch (op->immediate & 7) {
        case 0: is = isfinite(x); break;
        case 1: is = isinf(x); break;
        case 2: is = !isnan(x); break;
        case 3: is = isnan(x); break;
        case 4: is = kind == FP_NORMAL; break;
        case 5: is = kind == FP_SUBNORMAL; break;
        }
        r |= (uint32_t)is << i;
    }
    *d = (*d & ~mask) | (r & mask);
    return DW__NEXT;
}
static dw_status translate_testp(dw__emu_translator *t) {
    static const char *const kinds[] = {"finite", "infinite",  "number", "notanumber",
                                        "normal", "subnormal", NULL};
    int kind = dw__emu_take_one_of(t, kinds);
    dw__emu_type type;
    uint32_t a, d;
    if (kind < 0 || !dw__emu_take_type(t, &type) || (type != DW__T_F32 && type != DW__T_F64) ||
        t->in->operand_count != 2)
        return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[1], type, &a));
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, &t->in->operands[0], DW__T_PRED, &d));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, test_run));
    t->op->a = a, t->op->d = d;
    t->op->immediate = kind + (type == DW__T_F64 ? 8 : 0);
    return DW_OK;
}

const dw__emu_opcode dw__emu_opcodes_float[] = {
    {"add", translate_add},           {"sub", translate_sub},     {"mul", translate_mul},
    {"fma", translate_fma},           {"mad", translate_fma},     {"div", translate_div},
    {"min", translate_min},           {"max", translate_max},     {"neg", translate_neg},
    {"abs", translate_abs},           {"sqrt", translate_sqrt},   {"rcp", translate_rcp},
    {"rsqrt", translate_rsqrt},       {"ex2", translate_ex2},     {"lg2", translate_lg2},
    {"sin", translate_sin},           {"cos", translate_cos},     {"tanh", translate_tanh},
    {"copysign", translate_copysign}, {"testp", translate_testp}, {NULL, NULL},
};
