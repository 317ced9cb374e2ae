/* Tests the emulator's instructions one by one against separate arithmetic, on random and awkward words. */
#include "deepwell/emulator.h"
#include "ptx_file.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define BLOCK 128
static dw_emulator *emulator;

static uint64_t random_state = 88172645463325252u;
static uint64_t random_word(void) { /* xorshift64: Marsaglia 2003 */
    random_state ^= random_state << 13, random_state ^= random_state >> 7;
    return random_state ^= random_state << 17;
}
/* Every fourth word has only a few bits set, at its ends. */
static uint64_t awkward_word(int bits) {
    static const uint64_t ends[] = {
        0,         1,      2,          3,          0x7F,       0x80,      0xFF,
        0x7FFF,    0x8000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, INT64_MAX, (uint64_t)1 << 63,
        UINT64_MAX};
    uint64_t word = random_word();
    if (word % 4 == 0) word = ends[word / 4 % (sizeof ends / sizeof *ends)];
    return bits == 64 ? word : word & (((uint64_t)1 << bits) - 1);
}

static dw_emulator_module *load_text(const char *text) {
    dw_emulator_module *module;
    if (dw_emulator_load(emulator, text, strlen(text), "test.ptx", &module) != DW_OK)
        fail_msg("%s", dw_last_error());
    return module;
}

static void no_findings(const char *body) {
    dw_finding finding;
    char text[1024];
    if (dw_emulator_finding(emulator, 0, &finding) != DW_OK) return;
    dw_finding_text(&finding, text, sizeof text);
    fail_msg("%s\n%s", body, text);
}

static const char *target = "sm_100a"; /* index in `emulator` */

/* Runs `body` on `count` threads in blocks of `block`. Each thread reads `words` words of `in` (%rd1 is their
 * address) and stores `results` words at %rd2. %r1 is the thread. */
static void run_threads(const char *body, uint32_t count, uint32_t block, const uint64_t *in,
                        int words, uint64_t *out, int results) {
    const size_t in_bytes = 8 * (size_t)words * count, out_bytes = 8 * (size_t)results * count;
    char size[16];
    char *text = replace_in_ptx(read_ptx("threads_frame.ptx"), "@TARGET@", target);
    snprintf(size, sizeof size, "%d", 8 * words);
    text = replace_in_ptx(text, "@IN_BYTES@", size);
    snprintf(size, sizeof size, "%d", 8 * results);
    text = replace_in_ptx(text, "@OUT_BYTES@", size);
    text = replace_in_ptx(text, "@BODY@", body);
    void *from, *to;
    dw_emulator_clear_findings(emulator);
    dw_emulator_module *module = load_text(text);
    dw_emulator_launch_options options = DW_EMULATOR_LAUNCH_DEFAULT;
    options.grid[0] = count / block, options.block[0] = block;
    assert_int_equal(dw_emulator_allocate(emulator, in_bytes, &from), DW_OK);
    assert_int_equal(dw_emulator_allocate(emulator, out_bytes, &to), DW_OK);
    assert_int_equal(dw_emulator_copy_in(emulator, from, in, in_bytes), DW_OK);
    assert_int_equal(dw_emulator_fill(emulator, to, 0xEE, out_bytes), DW_OK);
    if (dw_emulator_launch(module, "f", &options, (void *[]){&from, &to}, NULL) != DW_OK) {
        char message[512];
        snprintf(message, sizeof message, "%s", dw_last_error());
        no_findings(body);
        fail_msg("%s: %s", body, message);
    }
    no_findings(body);
    assert_int_equal(dw_emulator_copy_out(emulator, out, to, out_bytes), DW_OK);
    assert_int_equal(dw_emulator_release(emulator, from), DW_OK);
    assert_int_equal(dw_emulator_release(emulator, to), DW_OK);
    dw_emulator_unload(module);
    free(text);
}

/* ---- integers ------------------------------------------------------------------------------ */

/* a, b, c are %rd10 to %rd12, their low words %r10 to %r12; the result is %rd20, or %r20. */
#define IN3                                                                                        \
    "ld.global.u64 %rd10, [%rd1]; ld.global.u64 %rd11, [%rd1+8]; ld.global.u64 %rd12, [%rd1+16];"  \
    "cvt.u32.u64 %r10, %rd10; cvt.u32.u64 %r11, %rd11; cvt.u32.u64 %r12, %rd12;"                   \
    "cvt.u16.u64 %h10, %rd10; cvt.u16.u64 %h11, %rd11; cvt.u16.u64 %h12, %rd12;"                   \
    "mov.b32 %f10, %r10; mov.b32 %f11, %r11; mov.b32 %f12, %r12;\n"
#define OUT "\nst.global.u64 [%rd2], %rd20;"
#define OUT32 "\ncvt.u64.u32 %rd20, %r20;" OUT
/* These opcodes have the same form with other types. */
#define OUT_FORMAT "\nst.global.u64 [%%rd2], %%rd20;"
#define OUT32_FORMAT "\ncvt.u64.u32 %%rd20, %%r20;" OUT_FORMAT
typedef unsigned __int128 u128;
typedef __int128 s128;
#define REFERENCE(name, RESULT)                                                                    \
    static uint64_t name(uint64_t a, uint64_t b, uint64_t c) {                                     \
        (void)a, (void)b, (void)c;                                                                 \
        return (uint64_t)(RESULT);                                                                 \
    }
static int64_t clamp(int64_t x, int64_t low, int64_t high) {
    return x < low ? low : x > high ? high : x;
}
static float as_float(uint64_t bits) {
    uint32_t word = (uint32_t)bits;
    float f;
    memcpy(&f, &word, 4);
    return f;
}
REFERENCE(sum_high, (((u128)c << 64 | a) + ((u128)a << 64 | b)) >> 64)
REFERENCE(difference_high, (((u128)c << 64 | a) - ((u128)a << 64 | b)) >> 64)
REFERENCE(sum_high_32,
          (uint32_t)((((c & 0xFFFFFFFF) << 32 | (uint32_t)a) + (a << 32 | (uint32_t)b)) >> 32))
REFERENCE(product_high, (u128)a *b >> 64)
REFERENCE(multiply_add, (uint32_t)((((s128)(int32_t)a * (int32_t)b) >> 32) + (int32_t)c +
                                   ((u128)(uint32_t)a + (uint32_t)b > UINT32_MAX)))
static uint64_t dot(uint64_t a, uint64_t b, uint64_t c, int a_size, bool a_signed, bool b_signed,
                    int b_first) {
    uint32_t sum = (uint32_t)c;
    for (int i = 0; i < 4 / a_size; i++) {
        const uint32_t x = a_size == 1 ? (uint8_t)(a >> 8 * i) : (uint16_t)(a >> 16 * i),
                       y = (uint8_t)(b >> 8 * (i + b_first));
        const int sx = a_signed ? (a_size == 1 ? (int8_t)x : (int16_t)x) : (int)x,
                  sy = b_signed ? (int8_t)y : (int)y;
        sum += (uint32_t)(sx * sy);
    }
    return sum;
}
REFERENCE(dot_uu, dot(a, b, c, 1, false, false, 0))
REFERENCE(dot_su, dot(a, b, c, 1, true, false, 0))
REFERENCE(dot_us, dot(a, b, c, 1, false, true, 0))
REFERENCE(dot_ss, dot(a, b, c, 1, true, true, 0))
REFERENCE(dot2_low, dot(a, b, c, 2, true, true, 0))
REFERENCE(dot2_high, dot(a, b, c, 2, false, true, 2))
static int64_t low24(uint64_t x) { return (int64_t)(x << 40) >> 40; }
REFERENCE(mul24_low, (uint32_t)(low24(a) * low24(b)))
REFERENCE(mul24_high, (uint32_t)((a & 0xFFFFFF) * (b & 0xFFFFFF) >> 16))
REFERENCE(mad24_low, (uint32_t)((a & 0xFFFFFF) * (b & 0xFFFFFF) + c))
REFERENCE(distance, (uint32_t)(llabs((int64_t)(int32_t)a - (int32_t)b) + (int64_t)c))
REFERENCE(saturated_sum, (uint32_t)clamp((int64_t)(int32_t)a + (int32_t)b, INT32_MIN, INT32_MAX))
REFERENCE(saturated_difference,
          (uint32_t)clamp((int64_t)(int32_t)a - (int32_t)b, INT32_MIN, INT32_MAX))
REFERENCE(extend_wrap,
          (b & 31) == 0 ? 0
                        : (uint32_t)((int32_t)((uint32_t)a << (32 - (b & 31))) >> (32 - (b & 31))))
REFERENCE(extend_clamp, (uint32_t)b >= 32  ? (uint32_t)a
                        : (uint32_t)b == 0 ? 0
                                           : (uint32_t)a << (32 - b) >> (32 - b))
static uint64_t mask_bits(uint64_t a, uint64_t b, bool clamped) {
    uint32_t r = 0;
    const uint32_t first = clamped ? (uint32_t)a : a & 31, count = clamped ? (uint32_t)b : b & 31;
    for (uint32_t bit = 0; bit < 32; bit++)
        r |= (uint32_t)(bit >= first && bit - first < count) << bit;
    return r;
}
REFERENCE(mask_clamp, mask_bits(a, b, true))
REFERENCE(mask_wrap, mask_bits(a, b, false))
static uint64_t shift_to_top(uint32_t x) {
    if (x == 0) return 0xFFFFFFFF;
    uint32_t n = 0;
    while (!(x >> 31)) x <<= 1, n++;
    return n;
}
REFERENCE(find_shift, shift_to_top((uint32_t)a))
REFERENCE(find_shift_signed, shift_to_top((int32_t)a < 0 ? ~(uint32_t)a : (uint32_t)a))
#define S16(x, i) (int16_t)((x) >> 16 * (i))
#define TWO(low, high) (uint16_t)(low) | (uint32_t)(uint16_t)(high) << 16
static int lesser(int x, int y) { return x < y ? x : y; }
static int larger(int x, int y) { return x > y ? x : y; }
REFERENCE(least_pair, TWO(lesser(S16(a, 0), S16(b, 0)), lesser(S16(a, 1), S16(b, 1))))
REFERENCE(greatest_pair_relu,
          TWO(larger(0, larger(S16(a, 0), S16(b, 0))), larger(0, larger(S16(a, 1), S16(b, 1)))))
REFERENCE(sum_pair, TWO(S16(a, 0) + S16(b, 0), S16(a, 1) + S16(b, 1)))
REFERENCE(least_relu, (uint32_t)larger(0, lesser((int)a, (int)b)))
REFERENCE(pack_16, TWO(clamp((int32_t)b, 0, 65535), clamp((int32_t)a, 0, 65535)))
REFERENCE(pack_8, (uint32_t)(c << 16) | (uint32_t)(uint8_t)clamp((int32_t)a, -128, 127) << 8 |
                      (uint8_t)clamp((int32_t)b, -128, 127))
REFERENCE(select_whole, (int32_t)c >= 0 ? a : b)
REFERENCE(select_real, as_float(c) >= 0 ? (uint32_t)a : (uint32_t)b)
static float no_subnormal(float x) { return fpclassify(x) == FP_SUBNORMAL ? copysignf(0, x) : x; }
REFERENCE(set_less, no_subnormal(as_float(a)) < no_subnormal(as_float(b)) ? 0xFFFFFFFF : 0)
REFERENCE(set_whole, (int32_t)a > (int32_t)b ? 0x3F800000 : 0)
REFERENCE(set_and, !(as_float(a) >= as_float(b)) && (c & 1) ? 0xFFFFFFFF : 0)
REFERENCE(equal_flushed, no_subnormal(as_float(a)) == no_subnormal(as_float(b)))

static void integer_instructions(void **state) {
    enum { COUNT = 16 * BLOCK };
    static const struct {
        const char *body;
        uint64_t (*reference)(uint64_t, uint64_t, uint64_t);
    } cases[] = {
        {"add.cc.u64 %rd19, %rd10, %rd11; addc.u64 %rd20, %rd12, %rd10;" OUT, sum_high},
        {"sub.cc.u64 %rd19, %rd10, %rd11; subc.u64 %rd20, %rd12, %rd10;" OUT, difference_high},
        {"add.cc.s32 %r19, %r10, %r11; addc.cc.u32 %r20, %r12, %r10;" OUT32, sum_high_32},
        /* Multiplies 64 by 64 bits word by word, as compilers do. */
        {"mov.b64 {%r30, %r31}, %rd10; mov.b64 {%r32, %r33}, %rd11; mul.lo.u32 %r34, %r30, %r32;"
         "mul.hi.u32 %r35, %r30, %r32; mad.lo.cc.u32 %r35, %r30, %r33, %r35; madc.hi.u32 %r36, "
         "%r30, %r33, 0;"
         "mad.lo.cc.u32 %r35, %r31, %r32, %r35; madc.hi.cc.u32 %r36, %r31, %r32, %r36; addc.u32 "
         "%r37, 0, 0;"
         "mad.lo.cc.u32 %r36, %r31, %r33, %r36; madc.hi.u32 %r37, %r31, %r33, %r37; mov.b64 %rd20, "
         "{%r36, %r37};" OUT,
         product_high},
        {"add.cc.u32 %r19, %r10, %r11; madc.hi.s32 %r20, %r10, %r11, %r12;" OUT32, multiply_add},
        {"dp4a.u32.u32 %r20, %r10, %r11, %r12;" OUT32, dot_uu},
        {"dp4a.s32.u32 %r20, %r10, %r11, %r12;" OUT32, dot_su},
        {"dp4a.u32.s32 %r20, %r10, %r11, %r12;" OUT32, dot_us},
        {"dp4a.s32.s32 %r20, %r10, %r11, %r12;" OUT32, dot_ss},
        {"dp2a.lo.s32.s32 %r20, %r10, %r11, %r12;" OUT32, dot2_low},
        {"dp2a.hi.u32.s32 %r20, %r10, %r11, %r12;" OUT32, dot2_high},
        {"mul24.lo.s32 %r20, %r10, %r11;" OUT32, mul24_low},
        {"mul24.hi.u32 %r20, %r10, %r11;" OUT32, mul24_high},
        {"mad24.lo.u32 %r20, %r10, %r11, %r12;" OUT32, mad24_low},
        {"sad.s32 %r20, %r10, %r11, %r12;" OUT32, distance},
        {"add.sat.s32 %r20, %r10, %r11;" OUT32, saturated_sum},
        {"sub.sat.s32 %r20, %r10, %r11;" OUT32, saturated_difference},
        {"szext.wrap.s32 %r20, %r10, %r11;" OUT32, extend_wrap},
        {"szext.clamp.u32 %r20, %r10, %r11;" OUT32, extend_clamp},
        {"bmsk.clamp.b32 %r20, %r10, %r11;" OUT32, mask_clamp},
        {"bmsk.wrap.b32 %r20, %r10, %r11;" OUT32, mask_wrap},
        {"and.b32 %r10, %r10, 63; and.b32 %r11, %r11, 63; bmsk.clamp.b32 %r20, %r10, %r11;"
         "xor.b32 %r20, %r20, 0;" OUT32,
         NULL},
        {"bfind.shiftamt.u32 %r20, %r10;" OUT32, find_shift},
        {"bfind.shiftamt.s32 %r20, %r10;" OUT32, find_shift_signed},
        {"min.s16x2 %r20, %r10, %r11;" OUT32, least_pair},
        {"max.relu.s16x2 %r20, %r10, %r11;" OUT32, greatest_pair_relu},
        {"add.s16x2 %r20, %r10, %r11;" OUT32, sum_pair},
        {"min.relu.s32 %r20, %r10, %r11;" OUT32, least_relu},
        {"cvt.pack.sat.u16.s32 %r20, %r10, %r11;" OUT32, pack_16},
        {"cvt.pack.sat.s8.s32.b32 %r20, %r10, %r11, %r12;" OUT32, pack_8},
        {"slct.u64.s32 %rd20, %rd10, %rd11, %r12;" OUT, select_whole},
        {"slct.u32.f32 %r20, %r10, %r11, %f12;" OUT32, select_real},
        {"set.lt.ftz.u32.f32 %r20, %f10, %f11;" OUT32, set_less},
        {"set.gt.f32.s32 %f20, %r10, %r11; mov.b32 %r20, %f20;" OUT32, set_whole},
        {"and.b32 %r13, %r12, 1; setp.ne.u32 %p1, %r13, 0; set.ltu.and.u32.f32 %r20, %f10, %f11, "
         "%p1;" OUT32,
         set_and},
        {"setp.eq.ftz.f32 %p1, %f10, %f11; selp.b32 %r20, 1, 0, %p1;" OUT32, equal_flushed},
    };
    static uint64_t in[3 * COUNT], out[COUNT];
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char body[2048];
        const bool small = cases[i].reference == NULL;
        snprintf(body, sizeof body, "%s%s", IN3, cases[i].body);
        for (int k = 0; k < 3 * COUNT; k++) in[k] = awkward_word(64);
        for (int k = 0; k < COUNT; k += 7)
            in[3 * k + 1] = in[3 * k] & 0x807FFFFF; /* subnormal numbers */
        run_threads(body, COUNT, BLOCK, in, 3, out, 1);
        for (int k = 0; k < COUNT; k++) {
            const uint64_t a = in[3 * k], b = in[3 * k + 1], c = in[3 * k + 2];
            const uint64_t expected =
                small ? mask_bits(a & 63, b & 63, true) : cases[i].reference(a, b, c);
            if (out[k] != expected)
                fail_msg("%s: of %llx, %llx, %llx %llx, expected %llx", cases[i].body,
                         (unsigned long long)a, (unsigned long long)b, (unsigned long long)c,
                         (unsigned long long)out[k], (unsigned long long)expected);
        }
    }
}

/* ---- conversions --------------------------------------------------------------------------- */

typedef struct format {
    const char *name;
    int exponent_bits, fraction_bits, bias;
    uint32_t most; /* code of the largest number */
    bool infinite;
} format;
static const format f16 = {"f16", 5, 10, 15, 0x7BFF, true},
                    bf16 = {"bf16", 8, 7, 127, 0x7F7F, true},
                    f32 = {"f32", 8, 23, 127, 0x7F7FFFFF, true},
                    e4m3 = {"e4m3", 4, 3, 7, 0x7E, false}, e5m2 = {"e5m2", 5, 2, 15, 0x7B, true},
                    e2m3 = {"e2m3", 2, 3, 1, 0x1F, false}, e3m2 = {"e3m2", 3, 2, 3, 0x1F, false},
                    e2m1 = {"e2m1", 2, 1, 1, 0x7, false};

/* Returns the value by definition: (-1)^s 2^(e - bias) 1.f, or 2^(1 - bias) 0.f. The code after the largest continues
 * the sequence. */
static double magnitude_of(const format *f, uint32_t code) {
    const uint32_t fraction = code & ((1u << f->fraction_bits) - 1),
                   exponent = code >> f->fraction_bits;
    return exponent ? ldexp(1 + ldexp(fraction, -f->fraction_bits), (int)exponent - f->bias)
                    : ldexp(fraction, 1 - f->bias - f->fraction_bits);
}
/* Returns the neighbour that the rounding selects, found by search and not by arithmetic on bits. */
static uint32_t nearest_code(const format *f, double x, char mode, bool finite) {
    const double m = fabs(x);
    const uint32_t sign = signbit(x) ? 1u << (f->exponent_bits + f->fraction_bits) : 0;
    if (isinf(x)) return sign | (finite || !f->infinite ? f->most : f->most + 1);
    uint32_t low = 0, high = f->most;
    while (low < high) {
        const uint32_t middle = low + (high - low + 1) / 2;
        if (magnitude_of(f, middle) <= m)
            low = middle;
        else
            high = middle - 1;
    }
    const double below = magnitude_of(f, low), above = magnitude_of(f, low + 1);
    bool up = false;
    if (m != below) {
        if (mode == 'n') up = m - below > above - m || (m - below == above - m && (low & 1));
        if (mode == 'p') up = x > 0;
        if (mode == 'm') up = x < 0;
    }
    if (up) low++;
    if (low > f->most && finite) low = f->most;
    return sign | low;
}

static const char *const rounding_names[] = {"rn", "rz", "rm", "rp"};

/* Chooses words near the format's values: its numbers, the midpoints between them, and their neighbours. */
static float value_near(const format *f) {
    const uint64_t word = random_word();
    if (word % 3 == 0) return as_float(random_word());
    const uint32_t code = (uint32_t)(random_word() % (f->most + 1));
    double x = word % 3 == 1 ? magnitude_of(f, code)
                             : (magnitude_of(f, code) + magnitude_of(f, code + 1)) / 2;
    float y = (float)x;
    if (word >> 8 & 1) y = nextafterf(y, word >> 9 & 1 ? INFINITY : -INFINITY);
    return word >> 10 & 1 ? -y : y;
}

static void floats_to_halves(void **state) {
    enum { COUNT = 64 * BLOCK };
    static uint64_t in[COUNT], out[COUNT];
    static const format *const formats[] = {&f16, &bf16};
    (void)state;
    for (int which = 0; which < 2; which++) {
        for (int mode = 0; mode < 4; mode++) {
            for (int wide = 0; wide < 2; wide++) {
                const format *f = formats[which];
                if (wide && which == 1 && mode > 1) continue;
                char body[400];
                for (int i = 0; i < COUNT; i++) {
                    const float x = value_near(f);
                    double y = (double)x;
                    if (wide && isfinite(x)) y = nextafter(y, i % 2 ? INFINITY : -INFINITY);
                    uint32_t word;
                    memcpy(&word, &x, 4);
                    in[i] = word;
                    if (wide) memcpy(&in[i], &y, 8);
                }
                snprintf(body, sizeof body,
                         "ld.global.u64 %%rd10, [%%rd1]; cvt.u32.u64 %%r10, %%rd10; mov.b32 %%f10, "
                         "%%r10; mov.b64 %%fd10, %%rd10; cvt.%s.%s.%s %%h1, %%f%s10; cvt.u64.u16 "
                         "%%rd20, %%h1;" OUT_FORMAT,
                         rounding_names[mode], f->name, wide ? "f64" : "f32", wide ? "d" : "");
                run_threads(body, COUNT, BLOCK, in, 1, out, 1);
                for (int i = 0; i < COUNT; i++) {
                    double x = (double)as_float(in[i]);
                    if (wide) memcpy(&x, &in[i], 8);
                    const uint32_t expected =
                        isnan(x) ? 0x7FFF : nearest_code(f, x, "nzmp"[mode], false);
                    if (out[i] != expected)
                        fail_msg("%s: of %a %llx, expected %x", body, x, (unsigned long long)out[i],
                                 expected);
                }
            }
        }
    }
}

static void floats_to_narrow(void **state) {
    enum { COUNT = 64 * BLOCK };
    static uint64_t in[COUNT], out[COUNT];
    static const format *const formats[] = {&e4m3, &e5m2, &e2m3, &e3m2, &e2m1};
    (void)state;
    for (int which = 0; which < 5; which++) {
        const format *f = formats[which];
        const int bits = which == 4 ? 4 : 8;
        char body[500];
        for (int i = 0; i < COUNT; i++) {
            const float x[2] = {value_near(f), value_near(f)};
            memcpy(&in[i], x, 8);
        }
        snprintf(body, sizeof body,
                 ".reg .b8 %%b<2>; ld.global.v2.f32 {%%f10, %%f11}, [%%rd1]; "
                 "cvt.rn.satfinite.%sx2.f32 %s, %%f11, "
                 "%%f10; %s cvt.u64.u16 %%rd20, %%h1;" OUT_FORMAT,
                 f->name, bits == 4 ? "%b1" : "%h1", bits == 4 ? "cvt.u16.u8 %h1, %b1;" : "");
        run_threads(body, COUNT, BLOCK, in, 1, out, 1);
        for (int i = 0; i < COUNT; i++) {
            for (int half = 0; half < 2; half++) {
                const float x = as_float(in[i] >> 32 * half);
                /* NaN is 0x7F if the format has one, else the largest number. */
                const uint32_t expected =
                    isnan(x) ? (which < 2 ? 0x7F : f->most) : nearest_code(f, (double)x, 'n', true);
                const uint32_t got = (uint32_t)(out[i] >> bits * half) & ((1u << bits) - 1);
                if (got != expected)
                    fail_msg("%s: of %a %x, expected %x", f->name, (double)x, got, expected);
            }
        }
    }
}

/* Converts every code to a pair of F16, and those to integers with every rounding. */
static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return isnan(x) ? 0x7FFFFFFF : bits;
}

/* Stochastic rounding selects the code toward zero, or the next one if the random bits plus the truncated part
 * carry. */
static uint32_t chance_code(const format *f, double x, uint32_t random, int random_bits,
                            bool finite) {
    const double m = fabs(x);
    const uint32_t sign = signbit(x) ? 1u << (f->exponent_bits + f->fraction_bits) : 0;
    if (m > magnitude_of(f, f->most + 1)) return sign | (finite ? f->most : f->most + 1);
    uint32_t low = nearest_code(f, m, 'z', true);
    const double below = magnitude_of(f, low), step = magnitude_of(f, low + 1) - below;
    if ((m - below) / step + random / ldexp(1, random_bits) >= 1) low++;
    return sign | (low > f->most && finite ? f->most : low);
}

static void floats_round_stochastically(void **state) {
    enum { COUNT = 32 * BLOCK };
    static uint64_t in[3 * COUNT], out[COUNT];
    static const struct {
        const char *body;
        const format *f;
        int count, bits;
        bool finite, relu;
    } cases[] = {
        {"cvt.rs.f16x2.f32 %r20, %f10, %f11, %r12;", &f16, 2, 16, false, false},
        {"cvt.rs.satfinite.bf16x2.f32 %r20, %f10, %f11, %r12;", &bf16, 2, 16, true, false},
        {"cvt.rs.relu.f16x2.f32 %r20, %f10, %f11, %r12;", &f16, 2, 16, false, true},
        {"cvt.rs.satfinite.e4m3x4.f32 %r20, {%f10, %f11, %f13, %f14}, %r12;", &e4m3, 4, 8, true,
         false},
        {"cvt.rs.relu.satfinite.e5m2x4.f32 %r20, {%f10, %f11, %f13, %f14}, %r12;", &e5m2, 4, 8,
         true, true},
        {"cvt.rs.satfinite.e2m3x4.f32 %r20, {%f10, %f11, %f13, %f14}, %r12;", &e2m3, 4, 8, true,
         false},
        {"cvt.rs.satfinite.e3m2x4.f32 %r20, {%f10, %f11, %f13, %f14}, %r12;", &e3m2, 4, 8, true,
         false},
        {"cvt.rs.satfinite.e2m1x4.f32 %h20, {%f10, %f11, %f13, %f14}, %r12; cvt.u32.u16 %r20, "
         "%h20;",
         &e2m1, 4, 4, true, false},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const format *f = cases[i].f;
        char body[1200];
        /* The upper words of the first two are e and f. */
        snprintf(body, sizeof body,
                 "%smov.b64 {%%r13, %%r14}, %%rd10; mov.b32 %%f13, %%r14; mov.b64 {%%r13, %%r14}, "
                 "%%rd11; mov.b32 %%f14, %%r14;\n%s" OUT32_FORMAT,
                 IN3, cases[i].body);
        for (int k = 0; k < COUNT; k++) {
            for (int n = 0; n < 2; n++)
                in[3 * k + n] = bits_of(value_near(f)) | (uint64_t)bits_of(value_near(f)) << 32;
            in[3 * k + 2] = awkward_word(32);
        }
        run_threads(body, COUNT, BLOCK, in, 3, out, 1);
        for (int k = 0; k < COUNT; k++) {
            const uint32_t random = (uint32_t)in[3 * k + 2], high = random >> 16,
                           low = random & 0xFFFF;
            for (int n = 0; n < cases[i].count; n++) {
                const float x = as_float(in[3 * k + (n & 1)] >> (n >= 2 ? 32 : 0));
                const uint32_t code =
                    (uint32_t)(out[k] >> cases[i].bits * (cases[i].count - 1 - n)) &
                    ((1u << cases[i].bits) - 1);
                const uint32_t sixteen =
                    cases[i].count == 2 ? (n ? low : high) & (f == &f16 ? 0x1FFF : 0xFFFF)
                    : f == &e2m1
                        ? (n < 2 ? (high >> 8) << 8 | low >> 8 : (high & 0xFF) << 8 | (low & 0xFF))
                        : (n < 2 ? high : low);
                uint32_t expected =
                    chance_code(f, (double)x, sixteen, f == &f16 ? 13 : 16, cases[i].finite);
                if (cases[i].relu && signbit(x)) expected = 0;
                if (isnan(x))
                    expected = cases[i].count == 2         ? 0x7FFF
                               : f->infinite || f == &e4m3 ? 0x7F
                                                           : f->most;
                if (code != expected)
                    fail_msg("%s: number %d, %a with %x: %x, expected %x", cases[i].body, n,
                             (double)x, random, code, expected);
            }
        }
    }
}

static void codes_to_halves(void **state) {
    enum { COUNT = 65536 };
    static uint64_t in[COUNT], out[2 * COUNT];
    static const format *const formats[] = {&e4m3, &e5m2, &e2m3, &e3m2};
    (void)state;
    for (int i = 0; i < COUNT; i++) in[i] = (uint64_t)i;
    for (int which = 0; which < 4; which++) {
        const format *f = formats[which];
        const uint32_t sign = 1u << (f->exponent_bits + f->fraction_bits);
        char body[300];
        snprintf(body, sizeof body,
                 "ld.global.u64 %%rd10, [%%rd1]; cvt.u16.u64 %%h1, %%rd10; cvt.rn.f16x2.%sx2 "
                 "%%r20, %%h1;" OUT32_FORMAT,
                 f->name);
        run_threads(body, COUNT, BLOCK, in, 1, out, 1);
        for (uint32_t i = 0; i < COUNT; i++) {
            const uint32_t code = i >> 8 & (2 * sign - 1), got = (uint32_t)out[i] >> 16;
            const bool nan =
                which == 0 ? (code & 0x7F) == 0x7F : which == 1 && (code & 0x7F) > 0x7C;
            const bool infinite = which == 1 && (code & 0x7F) == 0x7C;
            const double x = infinite ? INFINITY : magnitude_of(f, code & (sign - 1));
            const uint32_t expected =
                nan ? 0x7FFF : nearest_code(&f16, code & sign ? -x : x, 'n', false);
            if (got != expected) fail_msg("%s %x: %x, expected %x", f->name, code, got, expected);
        }
    }
    static const char *const whole_modes[] = {"rni", "rzi", "rmi", "rpi"};
    for (int mode = 0; mode < 4; mode++) {
        for (int brain = 0; brain < 2; brain++) {
            char body[400];
            snprintf(body, sizeof body,
                     "ld.global.u64 %%rd10, [%%rd1]; cvt.u16.u64 %%h1, %%rd10; cvt.%s.s32.%s "
                     "%%r20, %%h1;" OUT32_FORMAT
                     "cvt.%s.u8.%s %%h2, %%h1; cvt.u64.u16 %%rd21, %%h2; "
                     "st.global.u64 [%%rd2+8], %%rd21;",
                     whole_modes[mode], brain ? "bf16" : "f16", whole_modes[mode],
                     brain ? "bf16" : "f16");
            run_threads(body, COUNT, BLOCK, in, 1, out, 2);
            for (uint32_t i = 0; i < COUNT; i++) {
                const format *f = brain ? &bf16 : &f16;
                const uint32_t code = i & 0x7FFF;
                double x = code == f->most + 1 ? INFINITY
                           : code > f->most    ? NAN
                                               : magnitude_of(f, code);
                if (i >> 15) x = -x;
                double whole = mode == 0   ? nearbyint(x)
                               : mode == 1 ? trunc(x)
                               : mode == 2 ? floor(x)
                                           : ceil(x);
                const double bounded = whole > INT32_MAX   ? INT32_MAX
                                       : whole < INT32_MIN ? INT32_MIN
                                                           : whole;
                const uint32_t expected = isnan(x) ? 0 : (uint32_t)(int32_t)bounded;
                const uint32_t byte = isnan(x)      ? 0
                                      : whole < 0   ? 0
                                      : whole > 255 ? 255
                                                    : (uint32_t)whole;
                if (out[2 * i] != expected || out[2 * i + 1] != byte)
                    fail_msg("%s: of %a %llx, %llx, expected %x, %x", body, x,
                             (unsigned long long)out[2 * i], (unsigned long long)out[2 * i + 1],
                             expected, byte);
            }
        }
    }
}

/* Compares the neighbours of an integer among floats as integers, so that nothing is rounded on the way. */
static uint32_t code_of_whole(const format *f, bool negative, uint64_t magnitude, char mode) {
    uint32_t low = 0, high = f->most;
    while (low < high) {
        const uint32_t middle = low + (high - low + 1) / 2;
        const double x = ceil(magnitude_of(f, middle));
        if (x < 0x1p64 && (u128)x <= magnitude)
            low = middle;
        else
            high = middle - 1;
    }
    const double below = magnitude_of(f, low), above = magnitude_of(f, low + 1);
    bool up = false;
    if ((double)(uint64_t)below != below || (u128)below != magnitude) {
        const u128 twice = (u128)magnitude * 2, both = (u128)below + (u128)above;
        if (mode == 'n') up = twice > both || (twice == both && (low & 1));
        if (mode == 'p') up = !negative;
        if (mode == 'm') up = negative;
    }
    return (negative ? 1u << (f->exponent_bits + f->fraction_bits) : 0) | (low + up);
}

static void integers_to_floats(void **state) {
    enum { COUNT = 16 * BLOCK };
    static uint64_t in[COUNT], out[COUNT];
    static const format *const formats[] = {&f32, &bf16, &f16};
    (void)state;
    for (int which = 0; which < 3; which++) {
        for (int mode = 0; mode < 4; mode++) {
            for (int is_signed = 0; is_signed < 2; is_signed++) {
                const format *f = formats[which];
                char body[300];
                for (int i = 0; i < COUNT; i++) {
                    /* Tests numbers near midpoints, at every magnitude. */
                    const int shift = (int)(random_word() % 64);
                    in[i] = random_word() >> shift;
                    if (i % 2) in[i] = (in[i] | 1) << (random_word() % 48);
                    if (i % 4 == 1) in[i] += random_word() % 3 - 1;
                }
                snprintf(body, sizeof body,
                         "ld.global.u64 %%rd10, [%%rd1]; cvt.%s.%s.%s64 %s, %%rd10; cvt.u64.u%d "
                         "%%rd20, %s;" OUT_FORMAT,
                         rounding_names[mode], f->name, is_signed ? "s" : "u",
                         which ? "%h1" : "%r20", which ? 16 : 32, which ? "%h1" : "%r20");
                run_threads(body, COUNT, BLOCK, in, 1, out, 1);
                for (int i = 0; i < COUNT; i++) {
                    const bool negative = is_signed && in[i] >> 63;
                    const uint64_t magnitude = negative ? 0 - in[i] : in[i];
                    const uint32_t expected = code_of_whole(f, negative, magnitude, "nzmp"[mode]);
                    if (out[i] != expected)
                        fail_msg("%s: of %llx %llx, expected %x", body, (unsigned long long)in[i],
                                 (unsigned long long)out[i], expected);
                }
            }
        }
    }
}

/* Sums and products of halves are rounded once: tests every pair of exponents, and subnormal results. */
static void half_instructions(void **state) {
    enum { COUNT = 64 * BLOCK };
    static uint64_t in[3 * COUNT], out[COUNT];
    static const struct {
        const char *body;
        const format *f;
        int what;
    } cases[] = {{"mul.bf16 %h20, %h10, %h11;", &bf16, 0},
                 {"mul.f16 %h20, %h10, %h11;", &f16, 0},
                 {"add.bf16 %h20, %h10, %h11;", &bf16, 1},
                 {"fma.rn.f16 %h20, %h10, %h11, %h12;", &f16, 2},
                 {"mul.ftz.f16 %h20, %h10, %h11;", &f16, 3}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const format *f = cases[i].f;
        char body[600];
        for (int k = 0; k < 3 * COUNT; k++) in[k] = random_word() & 0xFFFF;
        snprintf(body, sizeof body, "%s%s cvt.u64.u16 %%rd20, %%h20;" OUT_FORMAT, IN3,
                 cases[i].body);
        run_threads(body, COUNT, BLOCK, in, 3, out, 1);
        for (int k = 0; k < COUNT; k++) {
            double v[3];
            bool finite = true;
            for (int n = 0; n < 3; n++) {
                const uint32_t code = in[3 * k + n] & 0x7FFF;
                finite = finite && code <= f->most;
                v[n] = in[3 * k + n] >> 15 ? -magnitude_of(f, code) : magnitude_of(f, code);
                if (cases[i].what == 3 && code < 0x400) v[n] = copysign(0, v[n]);
            }
            if (!finite) continue;
            /* Sums of distant exponents are not exact in double, but they round to the same number, because
             * they do not cancel. */
            const double exact = cases[i].what == 1   ? v[0] + v[1]
                                 : cases[i].what == 2 ? fma(v[0], v[1], v[2])
                                                      : v[0] * v[1];
            uint32_t expected = nearest_code(f, exact, 'n', false);
            if (cases[i].what == 3 && (expected & 0x7FFF) < 0x400) expected &= 0x8000;
            if (out[k] != expected)
                fail_msg("%s: of %llx, %llx, %llx %llx, expected %x", cases[i].body,
                         (unsigned long long)in[3 * k], (unsigned long long)in[3 * k + 1],
                         (unsigned long long)in[3 * k + 2], (unsigned long long)out[k], expected);
        }
    }
}

/* ---- reductions in memory ------------------------------------------------------------------ */

/* The sum in double is rounded once: 53 bits are at least twice 24 plus two. */
static float sum_of(uint64_t a, uint64_t b) {
    return (float)((double)as_float(a) + (double)as_float(b));
}
REFERENCE(sum_kept, bits_of(sum_of(a, b)))
REFERENCE(sum_flushed, bits_of(no_subnormal((float)((double)no_subnormal(as_float(a)) +
                                                    (double)no_subnormal(as_float(b))))))
REFERENCE(sum_whole, a + b)
REFERENCE(least_signed, (int32_t)a < (int32_t)b ? a : b)
REFERENCE(greatest_unsigned, (uint32_t)a > (uint32_t)b ? a : b)
REFERENCE(least_signed_64, (int64_t)a < (int64_t)b ? a : b)
REFERENCE(greatest_unsigned_64, a > b ? a : b)
REFERENCE(incremented, (uint32_t)a >= (uint32_t)b ? 0 : a + 1)
REFERENCE(decremented, (uint32_t)a == 0 || (uint32_t)a > (uint32_t)b ? b : a - 1)
REFERENCE(both_bits, a &b)
REFERENCE(other_bits, a ^ b)
REFERENCE(second, b)
REFERENCE(compared, (uint32_t)a == (uint32_t)b ? c : a)
static uint16_t half_reduced(const format *f, char kind, uint16_t a, uint16_t b) {
    const bool a_nan = (a & 0x7FFF) > f->most + 1, b_nan = (b & 0x7FFF) > f->most + 1;
    const bool a_infinite = (a & 0x7FFF) == f->most + 1, b_infinite = (b & 0x7FFF) == f->most + 1;
    const double x = a_infinite ? INFINITY : magnitude_of(f, a & 0x7FFF),
                 y = b_infinite ? INFINITY : magnitude_of(f, b & 0x7FFF);
    if (kind == '+') {
        if (a_nan || b_nan || (a_infinite && b_infinite && a != b)) return 0x7FFF;
        if (a_infinite || b_infinite) return a_infinite ? a : b;
        return (uint16_t)nearest_code(f, (a >> 15 ? -x : x) + (b >> 15 ? -y : y), 'n', false);
    }
    if (a_nan || b_nan) return a_nan ? b_nan ? 0x7FFF : b : a;
    /* Orders codes by their numbers; -0 is below 0. */
    const int p = a >> 15 ? -1 - (a & 0x7FFF) : a, q = b >> 15 ? -1 - (b & 0x7FFF) : b;
    return (p < q) == (kind == '<') ? a : b;
}
REFERENCE(half_sum, half_reduced(&f16, '+', (uint16_t)a, (uint16_t)b))
REFERENCE(brain_sum, half_reduced(&bf16, '+', (uint16_t)a, (uint16_t)b))
REFERENCE(half_least, half_reduced(&f16, '<', (uint16_t)a, (uint16_t)b))
REFERENCE(brain_greatest, half_reduced(&bf16, '>', (uint16_t)a, (uint16_t)b))

/* a is in memory, and the operation combines it with b (and c). The test then stores the 8 bytes of memory and the old
 * value. */
#define PLACE                                                                                      \
    "mov.u32 %r5, buffer; shl.b32 %r6, %r2, 4; add.u32 %r5, %r5, %r6; mov.u64 %rd20, 0;"           \
    "mov.u32 %r20, 0; st.shared.v2.u64 [%r5], {%rd10, %rd10}; st.global.v2.u64 [%rd2], {%rd10, "   \
    "%rd10};"
#define OLD32 "cvt.u64.u32 %rd20, %r20;"
#define FROM_SHARED " ld.shared.u64 %rd21, [%r5]; st.global.v2.u64 [%rd2], {%rd21, %rd20};"
#define FROM_GLOBAL " ld.global.u64 %rd21, [%rd2]; st.global.v2.u64 [%rd2], {%rd21, %rd20};"
#define BULK(kind)                                                                                 \
    "st.shared.v2.u64 [%r5], {%rd11, %rd11}; fence.proxy.async; "                                  \
    "cp.reduce.async.bulk.global.shared::cta.bulk_group." kind                                     \
    " [%rd2], [%r5], 16; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" FROM_GLOBAL

static void reduction_instructions(void **state) {
    enum { COUNT = 16 * BLOCK };
    static const struct {
        const char *body;
        uint64_t (*reference)(uint64_t, uint64_t, uint64_t);
        int bits, elements;
        bool has_old;
    } cases[] = {
        {"atom.shared.add.f32 %f20, [%r5], %f11; mov.b32 %r20, %f20;" OLD32 FROM_SHARED, sum_kept,
         32, 1, true},
        {"atom.global.add.f32 %f20, [%rd2], %f11; mov.b32 %r20, %f20;" OLD32 FROM_GLOBAL,
         sum_flushed, 32, 1, true},
        {"cvt.u64.u32 %rd22, %r5; cvta.shared.u64 %rd22, %rd22; red.add.f32 [%rd22], "
         "%f11;" FROM_SHARED,
         sum_kept, 32, 1, false},
        {"red.add.f32 [%rd2], %f11;" FROM_GLOBAL, sum_flushed, 32, 1, false},
        {BULK("add.f32"), sum_flushed, 32, 2, false},
        {BULK("add.noftz.f16"), half_sum, 16, 4, false},
        {BULK("add.noftz.bf16"), brain_sum, 16, 4, false},
        {BULK("min.f16"), half_least, 16, 4, false},
        {BULK("max.bf16"), brain_greatest, 16, 4, false},
        {BULK("min.s64"), least_signed_64, 64, 1, false},
        {BULK("inc.u32"), incremented, 32, 2, false},
        {"mov.b64 {%h20, %h21, %h22, %h23}, %rd11; red.global.v4.f16.min.noftz [%rd2], {%h20, "
         "%h21, %h22, %h23};" FROM_GLOBAL,
         half_least, 16, 4, false},
        {"mov.b64 {%r20, %r21}, %rd11; red.global.max.noftz.v2.bf16x2 [%rd2], {%r20, "
         "%r21};" FROM_GLOBAL,
         brain_greatest, 16, 4, false},
        {"atom.shared.add.noftz.f16x2 %r20, [%r5], %r11;" OLD32 FROM_SHARED, half_sum, 16, 2, true},
        {"atom.global.add.noftz.bf16 %h20, [%rd2], %h11; cvt.u64.u16 %rd20, %h20;" FROM_GLOBAL,
         brain_sum, 16, 1, true},
        {"atom.shared.add.u64 %rd20, [%r5], %rd11;" FROM_SHARED, sum_whole, 64, 1, true},
        {"atom.global.min.s32 %r20, [%rd2], %r11;" OLD32 FROM_GLOBAL, least_signed, 32, 1, true},
        {"atom.shared.max.u32 %r20, [%r5], %r11;" OLD32 FROM_SHARED, greatest_unsigned, 32, 1,
         true},
        {"atom.global.max.u64 %rd20, [%rd2], %rd11;" FROM_GLOBAL, greatest_unsigned_64, 64, 1,
         true},
        {"atom.global.dec.u32 %r20, [%rd2], %r11;" OLD32 FROM_GLOBAL, decremented, 32, 1, true},
        {"atom.shared.and.b64 %rd20, [%r5], %rd11;" FROM_SHARED, both_bits, 64, 1, true},
        {"red.shared.xor.b32 [%r5], %r11;" FROM_SHARED, other_bits, 32, 1, false},
        {"atom.global.exch.b32 %r20, [%rd2], %r11;" OLD32 FROM_GLOBAL, second, 32, 1, true},
        {"atom.shared.cas.b32 %r20, [%r5], %r11, %r12;" OLD32 FROM_SHARED, compared, 32, 1, true},
    };
    static uint64_t in[3 * COUNT], out[2 * COUNT];
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char body[2048];
        const uint64_t low = UINT64_MAX >> (64 - cases[i].bits);
        snprintf(body, sizeof body, "%s%s%s", IN3, PLACE, cases[i].body);
        for (int k = 0; k < 3 * COUNT; k++) in[k] = awkward_word(64);
        for (int k = 0; k < COUNT; k++) {
            uint64_t *a = &in[3 * k], *b = &in[3 * k + 1];
            if (k % 5 == 0) *b = *a ^ (random_word() & 0x8000800080008000u); /* zeros, equals */
            if (k % 7 == 0) /* subnormal numbers, in every format */
                *a &= 0x807F003F807F003Fu, *b &= 0x803F007F803F007Fu;
            if (k % 11 == 0) *(k % 2 ? a : b) |= 0x7FC07FC07FC07FC0u; /* NaNs */
        }
        run_threads(body, COUNT, BLOCK, in, 3, out, 2);
        for (int k = 0; k < COUNT; k++) {
            const uint64_t a = in[3 * k], b = in[3 * k + 1], c = in[3 * k + 2];
            for (int n = 0; n < cases[i].elements; n++) {
                const int at = n * cases[i].bits;
                const uint64_t expected = cases[i].reference(a >> at, b >> at, c >> at) & low,
                               got = out[2 * k] >> at & low;
                if (got != expected)
                    fail_msg("%s: of %llx, %llx, %llx %llx, expected %llx", cases[i].body,
                             (unsigned long long)(a >> at & low),
                             (unsigned long long)(b >> at & low), (unsigned long long)c,
                             (unsigned long long)got, (unsigned long long)expected);
            }
            const int width = cases[i].bits * cases[i].elements;
            if (width < 64) assert_true(out[2 * k] >> width == a >> width);
            if (cases[i].has_old)
                assert_true(out[2 * k + 1] ==
                            (a & (cases[i].elements > 1 ? UINT64_MAX >> (64 - width) : low)));
        }
    }
}

/* Instructions that the ISA lacks are rejected by name. */
static void invalid_reductions_are_rejected(void **state) {
    static const char *const bodies[] = {
        "atom.global.min.f32 %f1, [%rd1], %f2;",
        "red.global.max.f64 [%rd1], %fd1;",
        "atom.global.inc.u64 %rd2, [%rd1], %rd3;",
        "red.global.exch.b32 [%rd1], %r1;",
        "atom.global.and.f16 %h1, [%rd1], %h2;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.max.f32 [%rd1], [%r1], 16;"};
    (void)state;
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) {
        char *text = one_instruction_ptx("sm_100a", bodies[i]);
        dw_emulator_launch_options options = DW_EMULATOR_LAUNCH_DEFAULT;
        dw_emulator_module *module = load_text(text);
        free(text);
        assert_int_equal(dw_emulator_launch(module, "f", &options, NULL, NULL), DW_UNSUPPORTED);
        char name[100];
        snprintf(name, sizeof name, "%.*s", (int)strcspn(bodies[i], " "), bodies[i]);
        if (!strstr(dw_last_error(), name)) fail_msg("%s: %s", name, dw_last_error());
        dw_emulator_unload(module);
    }
}

/* ---- MMAs of a warp ------------------------------------------------------------------------ */

/* Returns the position of element i of a lane's A, B and C, as PTX ISA 9.7.14.5 defines it for elements of 16, 8, 4 and
 * 32 bits. */
typedef struct layout {
    const char *name;
    int k, bits, a_words, b_words;
} layout;
static int a_row(const layout *l, int lane, int i) {
    const int word = i / (32 / l->bits);
    return lane / 4 + (word == 1 || word == 3 ? 8 : 0);
}
static int a_column(const layout *l, int lane, int i) {
    const int per = 32 / l->bits;
    return lane % 4 * per + i % per + (i / per >= 2 ? 4 * per : 0);
}
static int b_row(const layout *l, int lane, int i) {
    const int per = 32 / l->bits;
    return lane % 4 * per + i % per + (i / per) * 4 * per;
}

enum {
    F16_KIND,
    BF16_KIND,
    TF32_KIND,
    E4M3_KIND,
    E5M2_KIND,
    E3M2_KIND,
    E2M1_KIND,
    E2M1_PACKED_KIND,
    S8_KIND,
    U8_KIND
};
static double decoded(const format *f, uint32_t code) {
    const uint32_t sign = 1u << (f->exponent_bits + f->fraction_bits);
    return code & sign ? -magnitude_of(f, code & (sign - 1)) : magnitude_of(f, code & (sign - 1));
}
static double element_of(int kind, uint32_t code) {
    switch (kind) {
    case F16_KIND: return decoded(&f16, code);
    case BF16_KIND: return decoded(&bf16, code);
    case TF32_KIND: return (double)as_float(code & 0xFFFFE000);
    case E4M3_KIND: return decoded(&e4m3, code);
    case E5M2_KIND: return decoded(&e5m2, code);
    case E3M2_KIND: return decoded(&e3m2, code & 63);
    case E2M1_KIND: return decoded(&e2m1, code >> 2 & 15);
    case E2M1_PACKED_KIND: return decoded(&e2m1, code & 15);
    case S8_KIND: return (int8_t)code;
    default: return code;
    }
}
/* Random codes of medium magnitude: their sums are nearly exact, and none is infinite. */
static uint32_t random_code(int kind) {
    const uint32_t word = (uint32_t)random_word();
    switch (kind) {
    case F16_KIND: return (word & 0x83FF) | (0x3000 + (word >> 16 & 7) * 0x400);
    case BF16_KIND: return (word & 0x807F) | (0x3E00 + (word >> 16 & 7) * 0x80);
    case TF32_KIND: return (word & 0x807FFFFF) | (0x3E000000 + (word >> 24 & 7) * 0x800000);
    case E4M3_KIND: return (word & 0x7F) == 0x7F ? 0 : word & 0xFF;
    case E5M2_KIND: return (word & 0x83) | (0x30 + (word >> 8 & 7) * 4);
    default: return word & 0xFF;
    }
}

static void mma_sync(void **state) {
    static const struct {
        const char *spelling;
        int k, bits, a, b;
        int scales;
        bool ue4m3, whole;
    } cases[] = {
        {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", 16, 16, F16_KIND, F16_KIND, 0, false,
         false},
        {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", 16, 16, BF16_KIND, BF16_KIND, 0,
         false, false},
        {"mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32", 8, 16, BF16_KIND, BF16_KIND, 0,
         false, false},
        {"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", 8, 32, TF32_KIND, TF32_KIND, 0,
         false, false},
        {"mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32", 32, 8, E4M3_KIND, E5M2_KIND, 0,
         false, false},
        {"mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32", 32, 8, S8_KIND, U8_KIND, 0, false,
         true},
        {"mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32", 16, 8, U8_KIND, S8_KIND, 0, false,
         true},
        {"mma.sync.aligned.kind::f8f6f4.m16n8k32.row.col.f32.e3m2.e2m1.f32", 32, 8, E3M2_KIND,
         E2M1_KIND, 0, false, false},
        {"mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e2m1."
         "f32.ue8m0",
         32, 8, E4M3_KIND, E2M1_KIND, 1, false, false},
        {"mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32."
         "ue8m0",
         64, 4, E2M1_PACKED_KIND, E2M1_PACKED_KIND, 2, false, false},
        {"mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1."
         "f32.ue4m3",
         64, 4, E2M1_PACKED_KIND, E2M1_PACKED_KIND, 4, true, false},
        {"mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::2X.f32.e2m1.e2m1."
         "f32.ue8m0",
         64, 4, E2M1_PACKED_KIND, E2M1_PACKED_KIND, 2, false, false},
    };
    dw_emulator *const before = emulator;
    assert_int_equal(dw_emulator_create("sm_120a", NULL, &emulator), DW_OK);
    target = "sm_120a";
    (void)state;
    /* The scales are in one of several threads and, if there are fewer than four, in some of the bytes. */
    const size_t count = sizeof cases / sizeof *cases;
    for (size_t at = 0, n; at < 8 * count; at++) {
        const int pick = (int)(at / count);
        n = at % count;
        if (pick > 0 && !cases[n].scales) continue;
        const layout l = {"", cases[n].k, cases[n].bits, cases[n].k * cases[n].bits / 64,
                          cases[n].k * cases[n].bits / 128};
        const int per = 32 / l.bits, thread_a = pick % 2, thread_b = pick % 4;
        const int byte = cases[n].scales == 1   ? (pick + pick / 4) % 4
                         : cases[n].scales == 2 ? (pick + pick / 4) % 2 * 2
                                                : 0;
        static double a[16][64], b[64][8], c[16][8];
        uint64_t in[32 * 6] = {0}, out[32 * 2];
        uint32_t words[32][12] = {{0}};
        for (int lane = 0; lane < 32; lane++) {
            for (int i = 0; i < l.a_words * per; i++) {
                const uint32_t code =
                    random_code(cases[n].a) & (l.bits == 32 ? UINT32_MAX : (1u << l.bits) - 1);
                words[lane][i / per] |= code << i % per * l.bits;
                a[a_row(&l, lane, i)][a_column(&l, lane, i)] = element_of(cases[n].a, code);
            }
            for (int i = 0; i < l.b_words * per; i++) {
                const uint32_t code =
                    random_code(cases[n].b) & (l.bits == 32 ? UINT32_MAX : (1u << l.bits) - 1);
                words[lane][4 + i / per] |= code << i % per * l.bits;
                b[b_row(&l, lane, i)][lane / 4] = element_of(cases[n].b, code);
            }
            for (int i = 0; i < 4; i++) {
                const float value = cases[n].whole ? 0 : (float)(int32_t)random_word() * 0x1p-28f;
                uint32_t word = (uint32_t)random_word() >> 8;
                if (!cases[n].whole) memcpy(&word, &value, 4);
                words[lane][6 + i] = word;
                c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] =
                    cases[n].whole ? (double)word : (double)value;
            }
            for (int i = 0; i < 2; i++)
                for (int k = 0; k < 4; k++)
                    words[lane][10 + i] |= (cases[n].ue4m3 ? (uint32_t)(random_word() % 0x7F)
                                                           : 124 + (uint32_t)(random_word() % 8))
                                           << 8 * k;
            memcpy(&in[lane * 6], words[lane], sizeof words[lane]);
        }
        char body[1200], scales[100] = "";
        if (cases[n].scales)
            snprintf(scales, sizeof scales,
                     pick < 4 ? ", %%r20, {%d, %d}, %%r21, {%d, %d}"
                              : ", {%%r20}, {%d, %d}, {%%r21}, {%d, %d}",
                     byte, thread_a, byte, thread_b);
        const char *const a_list = l.a_words == 4 ? "%r10, %r11, %r12, %r13" : "%r10, %r11";
        snprintf(body, sizeof body,
                 "ld.global.v4.u32 {%%r10, %%r11, %%r12, %%r13}, [%%rd1]; ld.global.v4.u32 {%%r14, "
                 "%%r15, %%r16, %%r17}, "
                 "[%%rd1+16]; ld.global.v4.u32 {%%r18, %%r19, %%r20, %%r21}, [%%rd1+32];\n%s "
                 "{%%r30, %%r31, %%r32, %%r33}, "
                 "{%s}, {%s}, {%%r16, %%r17, %%r18, %%r19}%s;\nst.global.v4.u32 [%%rd2], {%%r30, "
                 "%%r31, %%r32, %%r33};",
                 cases[n].spelling, a_list, l.b_words == 2 ? "%r14, %r15" : "%r14", scales);
        run_threads(body, 32, 32, in, 6, out, 2);
        const int chunk = cases[n].scales ? l.k / cases[n].scales : l.k;
        for (int row = 0; row < 16; row++) {
            for (int column = 0; column < 8; column++) {
                double sum = c[row][column], size = fabs(sum);
                for (int k = 0; k < l.k; k++) {
                    double x = a[row][k] * b[k][column];
                    if (cases[n].scales) {
                        /* A's scale is in thread 0 or 1 of a pair, for the row and the one eight below; B's in
                         * one of four. */
                        const uint32_t sa = words[row % 8 * 4 + thread_a * 2 + row / 8][10] >>
                                                8 * (byte + k / chunk) &
                                            0xFF,
                                       sb = words[column * 4 + thread_b][11] >>
                                                8 * (byte + k / chunk) &
                                            0xFF;
                        x *= cases[n].ue4m3 ? magnitude_of(&e4m3, sa) * magnitude_of(&e4m3, sb)
                                            : ldexp(1, (int)sa - 127) * ldexp(1, (int)sb - 127);
                    }
                    sum += x, size += fabs(x);
                }
                uint32_t word;
                memcpy(&word,
                       (char *)&out[(row % 8 * 4 + column / 2) * 2] +
                           4 * (row / 8 * 2 + column % 2),
                       4);
                const double got = cases[n].whole ? (double)(int32_t)word : (double)as_float(word);
                const double bound = cases[n].whole ? 0 : size * 0x1p-22;
                if (!(fabs(got - sum) <= bound))
                    fail_msg("%s (%d, %d): %g, expected %g", cases[n].spelling, row, column, got,
                             sum);
            }
        }
    }
    dw_emulator_destroy(emulator);
    emulator = before, target = "sm_100a";
}

/* ---- fragments whose layout is open -------------------------------------------------------- */

typedef struct open_product {
    const char *shape, *type, *d, *c;
    bool a_row, b_row, d_row, saturate, shared;
    int m, n, k;
} open_product;

static const char *register_list(char *text, const char *name, int first, int count) {
    char *at = text;
    *at++ = '{';
    for (int i = 0; i < count; i++) at += sprintf(at, "%s%%%s%d", i ? "," : "", name, first + i);
    strcpy(at, "}");
    return text;
}

/* Whole numbers, and eighths in floating point, so that sums are exact in every type. Matrices have rows with
 * padding. */
static void wmma_fragments(void **state) {
    static const open_product products[] = {
        {"m16n16k16", "f16", "f32", "f32", true, false, true, false, false, 16, 16, 16},
        {"m16n16k16", "f16", "f16", "f32", false, false, false, false, true, 16, 16, 16},
        {"m32n8k16", "f16", "f16", "f16", true, true, true, false, false, 32, 8, 16},
        {"m8n32k16", "f16", "f32", "f16", false, true, true, false, true, 8, 32, 16},
        {"m16n16k16", "bf16", "f32", "f32", true, true, false, false, true, 16, 16, 16},
        {"m8n32k16", "bf16", "f32", "f32", true, false, true, false, false, 8, 32, 16},
        {"m16n16k8", "tf32", "f32", "f32", false, true, true, false, false, 16, 16, 8},
        {"m8n32k16", "s8", "s32", "s32", false, false, true, true, true, 8, 32, 16},
        {"m32n8k16", "u8", "s32", "s32", true, true, false, false, false, 32, 8, 16},
    };
    enum { ROW = 40 };
    (void)state;
    for (size_t i = 0; i < sizeof products / sizeof *products; i++) {
        const open_product *p = &products[i];
        const bool half = strcmp(p->type, "f16") == 0, whole = p->type[1] == '8';
        const int bytes = whole               ? 1
                          : p->type[0] == 't' ? 4
                                              : 2,
                  a_count = half ? 8 : p->m * p->k * bytes / 128,
                  b_count = half ? 8 : p->n * p->k * bytes / 128,
                  c_count = strcmp(p->c, "f16") ? 8 : 4, d_count = strcmp(p->d, "f16") ? 8 : 4,
                  c_bytes = c_count == 8 ? 4 : 2, d_bytes = d_count == 8 ? 4 : 2;
        char lists[6][200], names[200], body[3000];
        double a[32][32], b[32][32], c[32][32];
        static unsigned char in[3 * 8192], out[32 * 256];
        memset(in, 0, sizeof in);
        for (int row = 0; row < 32; row++)
            for (int column = 0; column < 32; column++) {
                double *const at[3] = {&a[row][column], &b[row][column], &c[row][column]};
                const int sizes[3] = {bytes, bytes, c_bytes};
                /* a[m][k], b[n][k], c[m][n]; each is stored in the order of its layout. */
                const bool along[3] = {p->a_row, !p->b_row, true};
                const int rows[3] = {p->m, p->n, p->m}, columns[3] = {p->k, p->k, p->n};
                for (int which = 0; which < 3; which++) {
                    if (row >= rows[which] || column >= columns[which]) continue;
                    const int value =
                        (int)(random_word() % 17) - (p->type[0] == 'u' && which < 2 ? 0 : 8);
                    const double x = whole ? value : value / 8.0;
                    const int index = along[which] ? row * ROW + column : column * ROW + row;
                    unsigned char *to = in + 8192 * which + index * sizes[which];
                    const char *type = which < 2 ? p->type : p->c;
                    float f = (float)x;
                    uint32_t bits;
                    int32_t integer = value;
                    *at[which] = x;
                    memcpy(&bits, &f, 4);
                    if (whole)
                        memcpy(to, &integer, (size_t)sizes[which]);
                    else if (type[0] == 'b')
                        memcpy(to, (unsigned char *)&bits + 2, 2);
                    else if (strcmp(type, "f16") == 0)
                        bits = nearest_code(&f16, x, 'n', true), memcpy(to, &bits, 2);
                    else
                        memcpy(to, &bits, 4);
                }
            }
        if (half)
            snprintf(names, sizeof names, "%s.%s", p->d, p->c);
        else
            snprintf(names, sizeof names, "%s.%s.%s.%s", p->d, p->type, p->type, p->c);
        /* Through shared memory: the first words of the input are copied there. */
        snprintf(
            body, sizeof body,
            "mov.u32 %%r3, buffer; mov.u64 %%rd5, %%rd1; setp.ne.u32 %%p1, %%r2, 0; mul.wide.u32 "
            "%%rd6, %%r2, 768; sub.u64 %%rd5, %%rd5, %%rd6; mul.wide.u32 %%rd6, %%r2, 256; "
            "sub.u64 %%rd7, %%rd2, %%rd6; shl.b32 %%r4, %%r2, 4; cvt.u64.u32 %%rd8, %%r4; "
            "add.u64 %%rd8, %%rd8, %%rd5; add.u32 %%r5, %%r3, %%r4; mov.u32 %%r6, 0;\n"
            "$copy: ld.global.v4.u32 {%%r70, %%r71, %%r72, %%r73}, [%%rd8]; st.shared.v4.u32 "
            "[%%r5], {%%r70, %%r71, %%r72, %%r73}; add.u64 %%rd8, %%rd8, 512; add.u32 %%r5, "
            "%%r5, 512; add.u32 %%r6, %%r6, 1; setp.lt.u32 %%p2, %%r6, 16; @%%p2 bra $copy; "
            "bar.sync 0; mov.u32 %%r7, %d; \n"
            "wmma.load.a.sync.aligned.%s.%s.%s.%s %s, [%s], %%r7;\n"
            "wmma.load.b.sync.aligned.%s.%s.global.%s %s, [%%rd5+8192], %%r7;\n"
            "wmma.load.c.sync.aligned.row.%s.%s %s, [%%rd5+16384], %%r7;\n"
            "wmma.mma.sync.aligned.%s.%s.%s.%s%s %s, %s, %s, %s;\n"
            "wmma.store.d.sync.aligned.%s.%s.global.%s [%%rd7], %s, %%r7;",
            ROW, p->a_row ? "row" : "col", p->shape, p->shared ? "shared" : "global", p->type,
            register_list(lists[0], "r", 10, a_count), p->shared ? "%r3" : "%rd5",
            p->b_row ? "row" : "col", p->shape, p->type, register_list(lists[1], "r", 20, b_count),
            p->shape, p->c, register_list(lists[2], "r", 30, c_count), p->a_row ? "row" : "col",
            p->b_row ? "row" : "col", p->shape, names, p->saturate ? ".satfinite" : "",
            register_list(lists[3], "r", 40, d_count), lists[0], lists[1], lists[2],
            p->d_row ? "row" : "col", p->shape, p->d, lists[3]);
        run_threads(body, 32, 32, (const uint64_t *)(const void *)in, 96, (uint64_t *)(void *)out,
                    32);
        for (int row = 0; row < p->m; row++)
            for (int column = 0; column < p->n; column++) {
                double sum = c[row][column];
                for (int k = 0; k < p->k; k++) sum += a[row][k] * b[column][k];
                const unsigned char *at =
                    out + (p->d_row ? row * ROW + column : column * ROW + row) * d_bytes;
                uint32_t got = 0, wanted;
                const float f = (float)sum;
                memcpy(&got, at, (size_t)d_bytes);
                if (whole)
                    wanted = (uint32_t)(int32_t)sum;
                else if (d_bytes == 2)
                    wanted = nearest_code(&f16, sum, 'n', true);
                else
                    memcpy(&wanted, &f, 4);
                if (got != wanted && !(sum == 0 && (got & 0x7FFFFFFF) == 0))
                    fail_msg("wmma %s of %s: row %d, column %d: %x, expected %x", p->shape, p->type,
                             row, column, got, wanted);
            }
    }
}

/* ---- fragments of bytes -------------------------------------------------------------------- */

static void byte_fragments(void **state) {
    uint64_t in[32 * 2], out[32 * 2];
    unsigned char memory[512];
    (void)state;
    for (int i = 0; i < 64; i++) in[i] = random_word();
    memcpy(memory, in, sizeof memory);
#define TO_SHARED                                                                                  \
    "mov.u32 %r5, buffer; shl.b32 %r6, %r1, 4; add.u32 %r5, %r5, %r6; ld.global.v2.u64 {%rd10, "   \
    "%rd11}, [%rd1]; st.shared.v2.u64 [%r5], {%rd10, %rd11}; bar.sync 0;"
    run_threads(TO_SHARED
                "ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 {%r10, %r11, %r12, %r13}, [%r5];"
                "st.global.v4.u32 [%rd2], {%r10, %r11, %r12, %r13};",
                32, 32, in, 2, out, 2);
    /* The B operand of a byte MMA from a matrix whose rows run along K: a lane has a column, with four rows per
     * word. */
    for (int lane = 0; lane < 32; lane++)
        for (int byte = 0; byte < 16; byte++) {
            const int matrix = byte / 8, column = lane / 4 + byte / 4 % 2 * 8,
                      row = lane % 4 * 4 + byte % 4;
            assert_int_equal(((unsigned char *)&out[2 * lane])[byte],
                             memory[matrix * 256 + row * 16 + column]);
        }
    for (int bits = 4; bits <= 6; bits += 2) {
        run_threads(
            bits == 4 ? TO_SHARED
                "ldmatrix.sync.aligned.m8n16.x4.shared.b8x16.b4x16_p64 {%r10, %r11, %r12, %r13}, "
                "[%r5]; st.global.v4.u32 [%rd2], {%r10, %r11, %r12, %r13};"
                      : TO_SHARED
                "ldmatrix.sync.aligned.m8n16.x4.shared.b8x16.b6x16_p32 {%r10, %r11, %r12, %r13}, "
                "[%r5]; st.global.v4.u32 [%rd2], {%r10, %r11, %r12, %r13};",
            32, 32, in, 2, out, 2);
        for (int lane = 0; lane < 32; lane++)
            for (int byte = 0; byte < 16; byte++) {
                const int row = byte / 4 * 8 + lane / 4, first = (lane % 4 * 4 + byte % 4) * bits;
                unsigned expected = 0;
                for (int bit = 0; bit < bits; bit++)
                    expected |=
                        (unsigned)(memory[row * 16 + (first + bit) / 8] >> (first + bit) % 8 & 1)
                        << bit;
                assert_int_equal(((unsigned char *)&out[2 * lane])[byte], expected);
            }
    }
    /* Accumulators as bytes, 16 rows of 8, become 8 rows of 16. */
    run_threads("mov.u32 %r5, buffer; shl.b32 %r6, %r1, 4; add.u32 %r5, %r5, %r6; ld.global.v4.u32 "
                "{%r10, %r11, %r12, %r13}, "
                "[%rd1]; stmatrix.sync.aligned.m16n8.x4.trans.shared.b8 [%r5], {%r10, %r11, %r12, "
                "%r13}; bar.sync 0;"
                "ld.shared.v2.u64 {%rd10, %rd11}, [%r5]; st.global.v2.u64 [%rd2], {%rd10, %rd11};",
                32, 32, in, 2, out, 2);
    for (int lane = 0; lane < 32; lane++)
        for (int byte = 0; byte < 16; byte++) {
            const int row = lane / 4 + byte % 4 / 2 * 8, column = lane % 4 * 2 + byte % 2;
            assert_int_equal(((unsigned char *)out)[(byte / 4 * 8 + column) * 16 + row],
                             memory[lane * 16 + byte]);
        }
}

/* ---- operations that complete on mbarriers ------------------------------------------------- */

static void stores_complete_on_mbarriers(void **state) {
    uint64_t in[64] = {0}, out[64];
    (void)state;
    for (int i = 0; i < 64; i++) in[i] = random_word();
#define WAIT(name) name ": mbarrier.try_wait.parity.shared.b64 %p2, [%r5], 0; @!%p2 bra " name ";"
#define BARRIER(count)                                                                             \
    "mov.u32 %r5, buffer; setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared.b64 [%r5], " count    \
    ";"                                                                                            \
    "bar.sync 0; shl.b32 %r6, %r1, 3; add.u32 %r6, %r6, %r5;"
    run_threads(BARRIER("1") "ld.global.u64 %rd10, [%rd1]; mov.b64 {%r10, %r11}, %rd10;"
                             "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r5], 512;"
                             "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 "
                             "[%r6+64], {%r10, %r11}, [%r5];" WAIT(
                                 "$w") "xor.b32 %r7, %r6, 248; ld.shared.u64 %rd11, [%r7+64]; "
                                       "st.global.u64 [%rd2], %rd11;",
                64, 64, in, 1, out, 1);
    for (int i = 0; i < 64; i++)
        if (out[i] != in[i ^ 31]) fail_msg("%d", i);
    /* Sixty-four threads add, and each arrives on the mbarrier with four bytes. */
    run_threads(
        BARRIER("1") "ld.global.u32 %r10, [%rd1]; mov.u32 %r11, 5; @%p1 st.shared.u32 [%r5+64], "
                     "%r11; bar.sync 0;"
                     "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r5], 256;"
                     "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add."
                     "u32 [%r5+64], %r10, [%r5];" WAIT("$w") "ld.shared.u32 %r20, [%r5+64];" OUT32,
        64, 64, in, 1, out, 1);
    uint32_t sum = 5;
    for (int i = 0; i < 64; i++) sum += (uint32_t)in[i];
    for (int i = 0; i < 64; i++) assert_int_equal(out[i], sum);
    /* The mbarrier is signaled when a thread's copies have arrived, with and without counting it first. */
    for (int counted = 0; counted < 2; counted++) {
        run_threads(counted ? BARRIER("64") "cvta.to.global.u64 %rd3, %rd1; "
                                            "cp.async.ca.shared.global [%r6+64], [%rd3], 8;"
                                            "cp.async.mbarrier.arrive.shared.b64 [%r5]; "
                                            "mbarrier.arrive.shared.b64 _, [%r5];" WAIT(
                                                "$w") "xor.b32 %r7, %r6, 248; ld.shared.u64 %rd11, "
                                                      "[%r7+64]; st.global.u64 [%rd2], %rd11;"
                            : BARRIER("64") "cvta.to.global.u64 %rd3, %rd1; "
                                            "cp.async.ca.shared.global [%r6+64], [%rd3], 8;"
                                            "cp.async.mbarrier.arrive.noinc.shared.b64 [%r5];" WAIT(
                                                "$w") "xor.b32 %r7, %r6, 248; ld.shared.u64 %rd11, "
                                                      "[%r7+64]; st.global.u64 [%rd2], %rd11;",
                    64, 64, in, 1, out, 1);
        for (int i = 0; i < 64; i++)
            if (out[i] != in[i ^ 31]) fail_msg("%d", i);
    }
    run_threads(
        BARRIER(
            "1") "mov.u64 %rd10, -1; st.shared.u64 [%r6+64], %rd10; bar.sync 0; mov.u64 %rd11, 248;"
                 "@%p1 st.bulk.weak.shared::cta [%r5+72], %rd11, 0; bar.sync 0; ld.shared.u64 "
                 "%rd20, [%r6+64];" OUT,
        64, 64, in, 1, out, 1);
    for (int i = 0; i < 64; i++) assert_true(out[i] == (i >= 1 && i < 32 ? 0 : UINT64_MAX));
    run_threads(
        "mov.u64 %rd10, %clock64; mov.u64 %rd11, %globaltimer; bar.sync 0; mov.u64 %rd12, %clock64;"
        "sub.u64 %rd20, %rd12, %rd10;" OUT,
        64, 64, in, 1, out, 1);
    for (int i = 0; i < 64; i++) assert_true(out[i] > 0 && out[i] < (uint64_t)1 << 40);
}

/* ---- cluster launch control ---------------------------------------------------------------- */

/* Blocks cancel others that have not started and do their work: each of 500 is done exactly once. */
static void cluster_launch_control(void **state) {
    enum { BLOCKS = 500 };
    char *text = read_ptx("cluster_launch_control.ptx");
    static uint32_t out[2 * BLOCKS];
    void *memory;
    (void)state;
    dw_emulator_clear_findings(emulator);
    dw_emulator_module *module = load_text(text);
    free(text);
    dw_emulator_launch_options options = DW_EMULATOR_LAUNCH_DEFAULT;
    assert_int_equal(dw_emulator_allocate(emulator, sizeof out, &memory), DW_OK);
    assert_int_equal(dw_emulator_fill(emulator, memory, 0, sizeof out), DW_OK);
    options.grid[0] = BLOCKS;
    if (dw_emulator_launch(module, "f", &options, (void *[]){&memory}, NULL) != DW_OK)
        fail_msg("%s", dw_last_error());
    no_findings("launch control");
    assert_int_equal(dw_emulator_copy_out(emulator, out, memory, sizeof out), DW_OK);
    int taken = 0;
    for (uint32_t i = 0; i < BLOCKS; i++) {
        assert_int_equal(out[2 * i], 1);
        taken += out[2 * i + 1] != i;
    }
    assert_true(taken > 0);
    assert_int_equal(dw_emulator_release(emulator, memory), DW_OK);
    dw_emulator_unload(module);
}

/* ---- tensor maps --------------------------------------------------------------------------- */

/* A kernel replaces address, extent and stride of a map in shared memory and publishes it, then gathers four
 * rows with it, one of them outside. */
static void kernels_modify_tensor_maps(void **state) {
    char *text = read_ptx("modify_tensor_map.ptx");
    static float data[60][24];
    float out[4][8];
    void *memory, *place, *result;
    _Alignas(64) unsigned char map[128];
    (void)state;
    for (int i = 0; i < 60 * 24; i++) data[i / 24][i % 24] = (float)random_word();
    assert_int_equal(dw_emulator_allocate(emulator, sizeof data, &memory), DW_OK);
    assert_int_equal(dw_emulator_allocate(emulator, 128, &place), DW_OK);
    assert_int_equal(dw_emulator_allocate(emulator, sizeof out, &result), DW_OK);
    assert_int_equal(dw_emulator_copy_in(emulator, memory, data, sizeof data), DW_OK);
    dw_emulator_tensor_shape shape = {.struct_size = sizeof shape,
                                      .element = 7,
                                      .rank = 2,
                                      .address = place,
                                      .size = {24, 5},
                                      .stride = {160},
                                      .box = {8, 1},
                                      .step = {1, 1}};
    if (dw_emulator_tensor_map(&shape, map) != DW_OK) fail_msg("%s", dw_last_error());
    dw_emulator_clear_findings(emulator);
    dw_emulator_module *module = load_text(text);
    free(text);
    dw_emulator_launch_options options = DW_EMULATOR_LAUNCH_DEFAULT;
    options.block[0] = 32;
    if (dw_emulator_launch(module, "f", &options, (void *[]){map, &memory, &place, &result},
                           NULL) != DW_OK) {
        no_findings("tensor maps");
        fail_msg("%s", dw_last_error());
    }
    no_findings("tensor maps");
    assert_int_equal(dw_emulator_copy_out(emulator, out, result, sizeof out), DW_OK);
    static const int rows[4] = {7, 49, 50, 0};
    for (int row = 0; row < 4; row++)
        for (int i = 0; i < 8; i++)
            assert_true(out[row][i] == (rows[row] == 50 ? 0 : data[rows[row]][4 + i]));
    dw_emulator_unload(module);
}

/* Reads back a box of 8 rows of 128 bytes from shared memory. The swizzles follow NVIDIA's figures; for atoms of 32
 * bytes they follow the addresses that NVIDIA's programs for B200 read. */
static void copies_swizzle_boxes(void **state) {
    char *text = read_ptx("swizzled_box.ptx");
    static const int span[] = {128, 32, 64, 128, 128};
    float data[8][32], out[256];
    void *memory, *result;
    (void)state;
    for (int i = 0; i < 256; i++) data[i / 32][i % 32] = (float)i;
    assert_int_equal(dw_emulator_allocate(emulator, sizeof data, &memory), DW_OK);
    assert_int_equal(dw_emulator_allocate(emulator, sizeof out, &result), DW_OK);
    assert_int_equal(dw_emulator_copy_in(emulator, memory, data, sizeof data), DW_OK);
    dw_emulator_module *module = load_text(text);
    free(text);
    for (int swizzle = 0; swizzle <= 4; swizzle++) {
        _Alignas(64) unsigned char map[128];
        const int width = span[swizzle] / 4, rows = 256 / width;
        dw_emulator_tensor_shape shape = {.struct_size = sizeof shape,
                                          .element = 7,
                                          .rank = 2,
                                          .address = memory,
                                          .size = {(uint64_t)width, (uint64_t)rows},
                                          .stride = {(uint64_t)width * 4},
                                          .box = {width, rows},
                                          .step = {1, 1},
                                          .swizzle = swizzle};
        assert_int_equal(dw_emulator_tensor_map(&shape, map), DW_OK);
        dw_emulator_clear_findings(emulator);
        dw_emulator_launch_options options = DW_EMULATOR_LAUNCH_DEFAULT;
        options.block[0] = 256, options.shared_bytes = 4096;
        assert_int_equal(dw_emulator_launch(module, "f", &options, (void *[]){map, &result}, NULL),
                         DW_OK);
        no_findings("swizzles");
        assert_int_equal(dw_emulator_copy_out(emulator, out, result, sizeof out), DW_OK);
        for (int i = 0; i < 256; i++) {
            /* 128 bytes of shared memory are a line; the box begins at the fifth of eight. */
            const int line = i / 32 + 4, unit = i / 4 % 8;
            const int flips[] = {0, line % 2, line % 4, line % 8, line % 4 * 2};
            const int from = i / 32 * 32 + (unit ^ flips[swizzle]) * 4 + i % 4;
            if (out[i] != (float)from)
                fail_msg("swizzle %d: word %d is %g, expected %d", swizzle, i, out[i], from);
        }
    }
    dw_emulator_tensor_shape unknown = {.struct_size = sizeof unknown,
                                        .element = 7,
                                        .rank = 2,
                                        .address = memory,
                                        .size = {32, 8},
                                        .stride = {128},
                                        .box = {32, 8},
                                        .step = {1, 1},
                                        .swizzle = 5};
    _Alignas(64) unsigned char map[128];
    for (; unknown.swizzle < 8; unknown.swizzle++)
        assert_int_equal(dw_emulator_tensor_map(&unknown, map), DW_UNSUPPORTED);
    dw_emulator_unload(module);
    assert_int_equal(dw_emulator_release(emulator, memory), DW_OK);
    assert_int_equal(dw_emulator_release(emulator, result), DW_OK);
}

/* An instruction that the GPU lacks is rejected by name, with the GPUs that have it, as reported by ptxas 13.0. */
static void instructions_missing_on_an_architecture_are_rejected(void **state) {
    static const char *const names[] = {"sm_90a", "sm_100a", "sm_103a", "sm_120a"};
    static const struct {
        const char *on, *text; /* Y: the GPU has the instruction */
    } cases[] = {
        {"Y---", "wgmma.fence.sync.aligned;"},
        {"-YY-", "tcgen05.wait::ld.sync.aligned;"},
        {"YYYY", "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%r1], [%rd1, {%r2,%r3}], [%r4];"},
        {"-YY-", "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes."
                 "cta_group::2 [%r1], [%rd1, {%r2,%r3}], [%r4];"},
        {"-YYY", "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::"
                 "bytes [%r1], [%rd1, {%r2,%r3,%r5,%r6,%r7}], [%r4];"},
        {"-YY-", "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_"
                 "tx::bytes [%r1], [%rd1, {%r2,%r3,%r5,%r6,%r7}], [%r4];"},
        {"-YY-", "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%rd1, "
                 "{%r2,%r3,%r5,%r6,%r7}], [%r1];"},
        {"-YYY", "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes."
                 "b128 [%r1], [%r2];"},
        {"---Y", "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32."
                 "e2m1.e2m1.f32.ue4m3 {%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, "
                 "{%f5,%f6,%f7,%f8}, {%r7}, {0,1}, {%r8}, {0,1};"},
        {"YYYY", "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%f1,%f2,%f3,%f4}, "
                 "{%r1,%r2,%r3,%r4}, {%r5,%r6}, {%f5,%f6,%f7,%f8};"},
        {"-YYY", "cvt.rn.satfinite.e2m3x2.f32 %h1, %f1, %f2;"},
        {"-YY-", "cvt.rs.f16x2.f32 %r1, %f1, %f2, %r2;"},
        {"-YYY", "fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4;"},
        {"-YYY", "add.rn.f32.bf16 %f1, %h1, %f2;"},
        {"-YY-", "redux.sync.min.f32 %f1, %f2, %r1;"},
        {"-YYY", "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r1,%r2}, [%r3];"},
        {"-YYY", "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r1], {%r2};"},
        {"-YYY", "ld.global.v8.f32 {%f1,%f2,%f3,%f4,%f5,%f6,%f7,%f8}, [%rd1];"},
        {"-YYY", "st.bulk.shared::cta [%r1], %rd1, 0;"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
            dw_emulator *one;
            dw_emulator_module *module;
            char *text = one_instruction_ptx(names[k], cases[i].text);
            assert_int_equal(dw_emulator_create(names[k], NULL, &one), DW_OK);
            dw_status status = dw_emulator_load(one, text, strlen(text), "t.ptx", &module);
            free(text);
            if (status == DW_OK) status = dw_emulator_has_kernel(module, "f");
            const bool has = cases[i].on[k] == 'Y';
            if (status != (has ? DW_OK : DW_UNSUPPORTED))
                fail_msg("%s: %s: %s", names[k], cases[i].text, dw_last_error());
            for (size_t other = 0; other < sizeof names / sizeof *names && !has; other++)
                if (!strstr(dw_last_error(), names[other]) != (cases[i].on[other] != 'Y'))
                    fail_msg("%s: %s", names[k], dw_last_error());
            dw_emulator_destroy(one);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(integer_instructions),
        cmocka_unit_test(floats_to_halves),
        cmocka_unit_test(floats_to_narrow),
        cmocka_unit_test(floats_round_stochastically),
        cmocka_unit_test(codes_to_halves),
        cmocka_unit_test(integers_to_floats),
        cmocka_unit_test(half_instructions),
        cmocka_unit_test(reduction_instructions),
        cmocka_unit_test(invalid_reductions_are_rejected),
        cmocka_unit_test(mma_sync),
        cmocka_unit_test(byte_fragments),
        cmocka_unit_test(wmma_fragments),
        cmocka_unit_test(stores_complete_on_mbarriers),
        cmocka_unit_test(cluster_launch_control),
        cmocka_unit_test(instructions_missing_on_an_architecture_are_rejected),
        cmocka_unit_test(kernels_modify_tensor_maps),
        cmocka_unit_test(copies_swizzle_boxes),
    };
    if (dw_emulator_create("sm_100a", NULL, &emulator) != DW_OK) return 1;
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    dw_emulator_destroy(emulator);
    return failed;
}
