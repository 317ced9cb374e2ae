/* One loop per instruction of an elementwise program (see kernel/cpu/fused.h). F32 loops, which take most of
 * the time, use vectors; the other kinds are plain loops for the compiler. */
#include "kernel/cpu/cpu.h"
#include "kernel/cpu/fused.h"
#include "kernel/cpu/isa/vector_math.h"
#include "number/half.h"
#include "number/philox.h"

/* ---- F32 ------------------------------------------------------------------------------------- */

#define UNARY(name, expression)                                                                    \
    static void name(const dw__lane_args *args) {                                                  \
        const float *a = args->in[0];                                                              \
        float *out = args->out;                                                                    \
        int64_t i = 0, n = args->count, step_a = args->step[0];                                    \
        for (; i + DW_LANES <= n; i += DW_LANES) {                                                 \
            vf x = v_load(a + i * step_a);                                                         \
            v_store(out + i, expression);                                                          \
        }                                                                                          \
        if (i < n) {                                                                               \
            vf x = v_load_part(a + i * step_a, n - i);                                             \
            v_store_part(out + i, expression, n - i);                                              \
        }                                                                                          \
    }
#define BINARY(name, expression)                                                                   \
    static void name(const dw__lane_args *args) {                                                  \
        const float *a = args->in[0], *b = args->in[1];                                            \
        float *out = args->out;                                                                    \
        int64_t i = 0, n = args->count, step_a = args->step[0], step_b = args->step[1];            \
        for (; i + DW_LANES <= n; i += DW_LANES) {                                                 \
            vf x = v_load(a + i * step_a), y = v_load(b + i * step_b);                             \
            v_store(out + i, expression);                                                          \
        }                                                                                          \
        if (i < n) {                                                                               \
            vf x = v_load_part(a + i * step_a, n - i), y = v_load_part(b + i * step_b, n - i);     \
            v_store_part(out + i, expression, n - i);                                              \
        }                                                                                          \
    }

/* `expression` has type vm. */
#define COMPARE(name, expression)                                                                  \
    static void name(const dw__lane_args *args) {                                                  \
        const float *a = args->in[0], *b = args->in[1];                                            \
        uint8_t *out = args->out;                                                                  \
        int64_t i = 0, n = args->count, step_a = args->step[0], step_b = args->step[1];            \
        for (; i + DW_LANES <= n; i += DW_LANES) {                                                 \
            vf x = v_load(a + i * step_a), y = v_load(b + i * step_b);                             \
            v_store_mask(out + i, expression);                                                     \
        }                                                                                          \
        if (i < n) {                                                                               \
            uint8_t rest[DW_LANES];                                                                \
            vf x = v_load_part(a + i * step_a, n - i), y = v_load_part(b + i * step_b, n - i);     \
            v_store_mask(rest, expression);                                                        \
            memcpy(out + i, rest, (size_t)(n - i));                                                \
        }                                                                                          \
    }

/* C's remainder, adjusted to the divisor's sign as in Python. */
static vf floored_remainder(vf x, vf y) {
    for (int i = 0; i < DW_LANES; i++) {
        float r = fmodf(x[i], y[i]);
        x[i] = r != 0.0f && (r < 0.0f) != (y[i] < 0.0f) ? r + y[i] : r;
    }
    return x;
}

static inline vf sign_of(vf x) {
    vf one = v_set(1.0f), zero = v_set(0.0f);
    return v_select(v_gt(x, zero), one, zero) - v_select(v_lt(x, zero), one, zero);
}

UNARY(f32_neg, -x)
UNARY(f32_abs, v_abs(x))
UNARY(f32_sign, sign_of(x))
UNARY(f32_exp, v_exp(x))
UNARY(f32_log, v_log(x))
UNARY(f32_log1p, v_log1p(x))
UNARY(f32_sqrt, v_sqrt(x))
UNARY(f32_rsqrt, v_rsqrt(x))
UNARY(f32_reciprocal, v_reciprocal(x))
UNARY(f32_sin, v_sin(x))
UNARY(f32_cos, v_cos(x))
UNARY(f32_tanh, v_tanh(x))
UNARY(f32_erf, v_erf(x))
UNARY(f32_sigmoid, v_sigmoid(x))
UNARY(f32_floor, v_floor(x))
UNARY(f32_ceil, v_ceil(x))
UNARY(f32_copy, x)
UNARY(f32_square, x *x)
UNARY(f32_cube, x *x *x)
UNARY(f32_relu, v_max_nan(x, v_set(0.0f)))
UNARY(f32_silu, v_silu(x))
UNARY(f32_gelu, v_gelu(x))
UNARY(f32_gelu_tanh, v_gelu_tanh(x))
BINARY(f32_add, x + y)
BINARY(f32_sub, x - y)
BINARY(f32_mul, x *y)
BINARY(f32_div, x / y)
BINARY(f32_pow, v_pow(x, y))
BINARY(f32_max, v_max_nan(x, y))
BINARY(f32_min, v_min_nan(x, y))
BINARY(f32_rem, floored_remainder(x, y))
BINARY(f32_swiglu, v_silu(x) * y)
BINARY(f32_gelu_backward, y *v_gelu_slope(x))
BINARY(f32_gelu_tanh_backward, y *v_gelu_tanh_slope(x))
BINARY(f32_silu_backward, y *v_silu_slope(x))
COMPARE(f32_eq, v_eq(x, y))
COMPARE(f32_ne, v_ne(x, y))
COMPARE(f32_lt, v_lt(x, y))
COMPARE(f32_le, v_le(x, y))
COMPARE(f32_gt, v_gt(x, y))
COMPARE(f32_ge, v_ge(x, y))

static void f32_is_finite(const dw__lane_args *args) {
    const float *a = args->in[0];
    uint8_t *out = args->out;
    int64_t step = args->step[0];
    for (int64_t i = 0; i < args->count; i++)
        out[i] = (dw__f32_bits(a[i * step]) & 0x7f800000u) != 0x7f800000u;
}

static void f32_select(const dw__lane_args *args) {
    const uint8_t *c = args->in[0];
    const float *a = args->in[1], *b = args->in[2];
    float *out = args->out;
    int64_t i = 0, n = args->count, step_a = args->step[1], step_b = args->step[2];
    int64_t step_c = args->step[0];
    for (; i + DW_LANES <= n; i += DW_LANES)
        v_store(out + i, v_select(v_load_mask(c + i * step_c), v_load(a + i * step_a),
                                  v_load(b + i * step_b)));
    for (; i < n; i++) out[i] = c[step_c ? i : 0] ? a[step_a ? i : 0] : b[step_b ? i : 0];
}

/* ---- the other kinds ------------------------------------------------------------------------- */

/* Both steps are constants inside each loop, so that the compiler can vectorise it. */
#define EACH_STEP(body)                                                                            \
    if (args->step[0] && args->step[1]) {                                                          \
        body(i, i)                                                                                 \
    } else if (args->step[0]) {                                                                    \
        body(i, 0)                                                                                 \
    } else {                                                                                       \
        body(0, i *step_b)                                                                         \
    }
#define PLAIN_BINARY(name, type, result, expression)                                               \
    static void name(const dw__lane_args *args) {                                                  \
        const type *a = args->in[0], *b = args->in[1];                                             \
        result *out = args->out;                                                                   \
        int64_t n = args->count, step_b = args->step[1];                                           \
        EACH_STEP(PLAIN_LOOP_##expression)                                                         \
    }
#define PLAIN_LOOP(at_a, at_b, expression)                                                         \
    for (int64_t i = 0; i < n; i++) {                                                              \
        __typeof__(*a) x = a[at_a], y = b[at_b];                                                   \
        out[i] = (__typeof__(*out))(expression);                                                   \
    }
#define PLAIN_LOOP_ADD(p, q) PLAIN_LOOP(p, q, x + y)
#define PLAIN_LOOP_SUB(p, q) PLAIN_LOOP(p, q, x - y)
#define PLAIN_LOOP_MUL(p, q) PLAIN_LOOP(p, q, x *y)
#define PLAIN_LOOP_DIV(p, q) PLAIN_LOOP(p, q, x / y)
#define PLAIN_LOOP_MAX(p, q) PLAIN_LOOP(p, q, x > y || x != x ? x : y)
#define PLAIN_LOOP_MIN(p, q) PLAIN_LOOP(p, q, x < y || x != x ? x : y)
#define PLAIN_LOOP_EQ(p, q) PLAIN_LOOP(p, q, x == y)
#define PLAIN_LOOP_NE(p, q) PLAIN_LOOP(p, q, x != y)
#define PLAIN_LOOP_LT(p, q) PLAIN_LOOP(p, q, x < y)
#define PLAIN_LOOP_LE(p, q) PLAIN_LOOP(p, q, x <= y)
#define PLAIN_LOOP_GT(p, q) PLAIN_LOOP(p, q, x > y)
#define PLAIN_LOOP_GE(p, q) PLAIN_LOOP(p, q, x >= y)
#define PLAIN_LOOP_AND(p, q) PLAIN_LOOP(p, q, x &y)
#define PLAIN_LOOP_OR(p, q) PLAIN_LOOP(p, q, x | y)

#define PLAIN_SELECT(name, type)                                                                   \
    static void name(const dw__lane_args *args) {                                                  \
        const uint8_t *c = args->in[0];                                                            \
        const type *a = args->in[1], *b = args->in[2];                                             \
        type *out = args->out;                                                                     \
        int64_t step_c = args->step[0], step_a = args->step[1], step_b = args->step[2];            \
        for (int64_t i = 0; i < args->count; i++)                                                  \
            out[i] = c[i * step_c] ? a[i * step_a] : b[i * step_b];                                \
    }
#define PLAIN_COPY(name, type)                                                                     \
    static void name(const dw__lane_args *args) {                                                  \
        const type *a = args->in[0];                                                               \
        type *out = args->out;                                                                     \
        if (args->step[0])                                                                         \
            memcpy(out, a, (size_t)args->count * sizeof(type));                                    \
        else                                                                                       \
            for (int64_t i = 0; i < args->count; i++) out[i] = a[0];                               \
    }

/* Sums, differences and products of signed integers wrap, because they are computed on unsigned words. */
#define PLAIN_KIND(kind, type, arithmetic)                                                         \
    PLAIN_BINARY(kind##_add, arithmetic, arithmetic, ADD)                                          \
    PLAIN_BINARY(kind##_sub, arithmetic, arithmetic, SUB)                                          \
    PLAIN_BINARY(kind##_mul, arithmetic, arithmetic, MUL)                                          \
    PLAIN_BINARY(kind##_max, type, type, MAX)                                                      \
    PLAIN_BINARY(kind##_min, type, type, MIN)                                                      \
    PLAIN_BINARY(kind##_eq, type, uint8_t, EQ)                                                     \
    PLAIN_BINARY(kind##_ne, type, uint8_t, NE)                                                     \
    PLAIN_BINARY(kind##_lt, type, uint8_t, LT)                                                     \
    PLAIN_BINARY(kind##_le, type, uint8_t, LE)                                                     \
    PLAIN_BINARY(kind##_gt, type, uint8_t, GT)                                                     \
    PLAIN_BINARY(kind##_ge, type, uint8_t, GE)                                                     \
    PLAIN_SELECT(kind##_select, type)                                                              \
    PLAIN_COPY(kind##_copy, type)
PLAIN_KIND(i32, int32_t, uint32_t)
PLAIN_KIND(i64, int64_t, uint64_t)
PLAIN_KIND(f64, double, double)
PLAIN_BINARY(f64_div, double, double, DIV)
PLAIN_BINARY(bool_eq, uint8_t, uint8_t, EQ)
PLAIN_BINARY(bool_ne, uint8_t, uint8_t, NE)
PLAIN_BINARY(bool_and, uint8_t, uint8_t, AND)
PLAIN_BINARY(bool_or, uint8_t, uint8_t, OR)
PLAIN_SELECT(bool_select, uint8_t)
PLAIN_COPY(bool_copy, uint8_t)

static void bool_not(const dw__lane_args *args) {
    const uint8_t *a = args->in[0];
    uint8_t *out = args->out;
    int64_t step = args->step[0];
    for (int64_t i = 0; i < args->count; i++) out[i] = a[i * step] == 0;
}

/* ---- casts ----------------------------------------------------------------------------------- */

/* Returns the smallest integer for NaN and values outside the range, as the x86 instructions do. */
static inline int32_t to_i32(double x) {
    return x > -0x1p31 - 1.0 && x < 0x1p31 ? (int32_t)x : INT32_MIN;
}
static inline int64_t to_i64(double x) {
    return x >= -0x1p63 && x < 0x1p63 ? (int64_t)x : INT64_MIN;
}
/* Beyond the largest F32 the result is infinite; C leaves that conversion undefined. */
static inline float to_f32(double x) {
    const double first_infinite = 0x1.ffffffp127;
    return x >= first_infinite ? INFINITY : x <= -first_infinite ? -INFINITY : (float)x;
}

#define CAST(name, from, to, expression)                                                           \
    static void name(const dw__lane_args *args) {                                                  \
        const from *a = args->in[0];                                                               \
        to *out = args->out;                                                                       \
        int64_t step = args->step[0];                                                              \
        for (int64_t i = 0; i < args->count; i++) {                                                \
            from x = a[i * step];                                                                  \
            out[i] = (to)(expression);                                                             \
        }                                                                                          \
    }
#define CASTS_FROM_INTEGER(kind, type)                                                             \
    CAST(kind##_to_bool, type, uint8_t, x != 0)                                                    \
    CAST(kind##_to_i32, type, int32_t, (uint32_t)x)                                                \
    CAST(kind##_to_i64, type, int64_t, x)                                                          \
    CAST(kind##_to_f32, type, float, x)                                                            \
    CAST(kind##_to_f64, type, double, x)                                                           \
    CAST(kind##_to_bf16, type, float, dw__bf16_to_f32(dw__f32_to_bf16((float)x)))                  \
    CAST(kind##_to_f16, type, float, dw__f16_to_f32(dw__f32_to_f16((float)x)))
#define CASTS_FROM_FLOAT(kind, type)                                                               \
    CAST(kind##_to_bool, type, uint8_t, x != 0)                                                    \
    CAST(kind##_to_i32, type, int32_t, to_i32((double)x))                                          \
    CAST(kind##_to_i64, type, int64_t, to_i64((double)x))                                          \
    CAST(kind##_to_f64, type, double, x)
CASTS_FROM_INTEGER(bool, uint8_t)
CASTS_FROM_INTEGER(i32, int32_t)
CASTS_FROM_INTEGER(i64, int64_t)
CASTS_FROM_FLOAT(f32, float)
CASTS_FROM_FLOAT(f64, double)
CAST(f64_to_f32, double, float, to_f32(x))
CAST(f32_to_bf16, float, float, dw__bf16_to_f32(dw__f32_to_bf16(x)))
CAST(f32_to_f16, float, float, dw__f16_to_f32(dw__f32_to_f16(x)))
CAST(f64_to_bf16, double, float, dw__bf16_to_f32(dw__f32_to_bf16(to_f32(x))))
CAST(f64_to_f16, double, float, dw__f16_to_f32(dw__f32_to_f16(to_f32(x))))

CAST(load_bf16, uint16_t, float, dw__bf16_to_f32(x))
CAST(load_f16, uint16_t, float, dw__f16_to_f32(x))
CAST(store_bf16, float, uint16_t, dw__f32_to_bf16(x))
CAST(store_f16, float, uint16_t, dw__f32_to_f16(x))

/* ---- dropout --------------------------------------------------------------------------------- */

enum { PHILOX_WORDS = 4 * DW_LANES };

/* Writes the words of DW_LANES Philox blocks in element order; each lane computes one block. */
static void philox_group(const dw__lane_dropout *d, uint64_t block, uint32_t *words) {
    uint32_t key0 = (uint32_t)d->seed[0], key1 = (uint32_t)((uint64_t)d->seed[0] >> 32);
    dw__philox_words first = dw__philox_counter(d->seed[1], d->stream, block);
    vu lane;
    for (int i = 0; i < DW_LANES; i++) lane[i] = (uint32_t)i;
    vu x0 = first.word[0] + lane, x1 = v_set_uint(first.word[1]);
    vu x2 = v_set_uint(first.word[2]), x3 = v_set_uint(first.word[3]);
    if (first.word[0] > UINT32_MAX - DW_LANES) /* the upper half of the block number changes too */
        for (int i = 0; i < DW_LANES; i++)
            x1[i] = dw__philox_counter(d->seed[1], d->stream, block + (uint64_t)i).word[1];
    for (int round = 0; round < DW_PHILOX_ROUNDS; round++) {
        vu low0, low1;
        vu high0 = v_multiply_wide(x0, 0xD2511F53u, &low0);
        vu high1 = v_multiply_wide(x2, 0xCD9E8D57u, &low1);
        x0 = high1 ^ x1 ^ key0;
        x1 = low1;
        x2 = high0 ^ x3 ^ key1;
        x3 = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    v_store_interleaved(words, x0, x1, x2, x3);
}

static void f32_dropout(const dw__lane_args *args, const dw__lane_dropout *d) {
    uint32_t words[DW_LANE_CHUNK + 2 * PHILOX_WORDS];
    uint64_t block = d->first / 4;
    int64_t skip = (int64_t)(d->first % 4), needed = skip + args->count;
    for (int64_t at = 0; at < needed; at += PHILOX_WORDS)
        philox_group(d, block + (uint64_t)(at / 4), words + at);
    /* An element is kept if word / 2^24 >= p. The integer comparison is exact. p = 1 keeps nothing. */
    uint32_t threshold = (uint32_t)ceil(d->p * 0x1p24);
    float divisor = (float)(1.0 - d->p);
    const float *a = args->in[0];
    float *out = args->out;
    int64_t step = args->step[0];
    const uint32_t *word = words + skip;
    for (int64_t i = 0; i < args->count; i++) {
        float kept = a[i * step] / divisor;
        out[i] = (word[i] >> 8) >= threshold ? kept : 0.0f;
    }
}

/* ---- table ----------------------------------------------------------------------------------- */

#define COMPARES(kind)                                                                             \
    [DW_OP_EQ] = kind##_eq, [DW_OP_NE] = kind##_ne, [DW_OP_LT] = kind##_lt,                        \
    [DW_OP_LE] = kind##_le, [DW_OP_GT] = kind##_gt, [DW_OP_GE] = kind##_ge
#define NUMERIC(kind)                                                                              \
    [DW_OP_ADD] = kind##_add, [DW_OP_SUB] = kind##_sub, [DW_OP_MUL] = kind##_mul,                  \
    [DW_OP_MAX] = kind##_max, [DW_OP_MIN] = kind##_min, [DW_OP_SELECT] = kind##_select,            \
    [DW_OP_STOP_GRADIENT] = kind##_copy, COMPARES(kind)
#define CASTS(kind)                                                                                \
    {                                                                                              \
        [DW_BOOL] = kind##_to_bool, [DW_I32] = kind##_to_i32, [DW_I64] = kind##_to_i64,            \
        [DW_BF16] = kind##_to_bf16, [DW_F16] = kind##_to_f16, [DW_F32] = kind##_to_f32,            \
        [DW_F64] = kind##_to_f64                                                                   \
    }
#define f32_to_f32 f32_copy

const dw__fused_loops DW_ISA_NAME(dw__fused_loops) = {
    .apply =
        {
            [DW_LANE_BOOL] = {[DW_OP_LOGICAL_NOT] = bool_not,
                              [DW_OP_EQ] = bool_eq,
                              [DW_OP_NE] = bool_ne,
                              [DW_OP_AND] = bool_and,
                              [DW_OP_OR] = bool_or,
                              [DW_OP_SELECT] = bool_select,
                              [DW_OP_STOP_GRADIENT] = bool_copy},
            [DW_LANE_I32] = {NUMERIC(i32)},
            [DW_LANE_I64] = {NUMERIC(i64)},
            [DW_LANE_F64] = {NUMERIC(f64), [DW_OP_DIV] = f64_div},
            [DW_LANE_F32] = {NUMERIC(f32),
                             [DW_OP_NEG] = f32_neg,
                             [DW_OP_ABS] = f32_abs,
                             [DW_OP_SIGN] = f32_sign,
                             [DW_OP_EXP] = f32_exp,
                             [DW_OP_LOG] = f32_log,
                             [DW_OP_LOG1P] = f32_log1p,
                             [DW_OP_SQRT] = f32_sqrt,
                             [DW_OP_RSQRT] = f32_rsqrt,
                             [DW_OP_RECIPROCAL] = f32_reciprocal,
                             [DW_OP_SIN] = f32_sin,
                             [DW_OP_COS] = f32_cos,
                             [DW_OP_TANH] = f32_tanh,
                             [DW_OP_ERF] = f32_erf,
                             [DW_OP_SIGMOID] = f32_sigmoid,
                             [DW_OP_FLOOR] = f32_floor,
                             [DW_OP_CEIL] = f32_ceil,
                             [DW_OP_IS_FINITE] = f32_is_finite,
                             [DW_OP_DIV] = f32_div,
                             [DW_OP_POW] = f32_pow,
                             [DW_OP_REM] = f32_rem,
                             [DW_OP_RELU] = f32_relu,
                             [DW_OP_SILU] = f32_silu,
                             [DW_OP_SILU_BACKWARD] = f32_silu_backward,
                             [DW_OP_SWIGLU] = f32_swiglu,
                             [DW_OP_GELU] = f32_gelu,
                             [DW_OP_GELU_BACKWARD] = f32_gelu_backward,
                             [DW_LANE_GELU_TANH] = f32_gelu_tanh,
                             [DW_LANE_GELU_TANH_BACKWARD] = f32_gelu_tanh_backward,
                             [DW_LANE_SQUARE] = f32_square,
                             [DW_LANE_CUBE] = f32_cube},
        },
    .cast = {[DW_LANE_BOOL] = CASTS(bool),
             [DW_LANE_I32] = CASTS(i32),
             [DW_LANE_I64] = CASTS(i64),
             [DW_LANE_F32] = CASTS(f32),
             [DW_LANE_F64] = CASTS(f64)},
    .copy = {[DW_LANE_BOOL] = bool_copy,
             [DW_LANE_I32] = i32_copy,
             [DW_LANE_I64] = i64_copy,
             [DW_LANE_F32] = f32_copy,
             [DW_LANE_F64] = f64_copy},
    .load_bf16 = load_bf16,
    .load_f16 = load_f16,
    .store_bf16 = store_bf16,
    .store_f16 = store_f16,
    .dropout = f32_dropout,
};
