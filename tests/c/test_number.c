/* Compares Philox with published vectors, and BF16 and F16 with rounding in double. */
#include "number/half.h"
#include "number/philox.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

/* ---- Philox -------------------------------------------------------------------------------- */

/* Known-answer vectors of philox4x32 with 10 rounds that accompany the paper's implementation. */
static void philox_gives_the_published_words(void **state) {
    static const struct {
        dw__philox_words counter;
        uint32_t key[2];
        dw__philox_words expected;
    } vectors[] = {
        {{{0, 0, 0, 0}}, {0, 0}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
        {{{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}},
         {0xffffffff, 0xffffffff},
         {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
        {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
         {0xa4093822, 0x299f31d0},
         {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
    };
    (void)state;
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        dw__philox_words words =
            dw__philox(vectors[i].counter, vectors[i].key[0], vectors[i].key[1]);
        assert_memory_equal(&words, &vectors[i].expected, sizeof words);
    }
}

/* Checks the layout that philox.h documents against the published words: the parts of key and counter have their
 * places. */
static void uniform_uses_the_documented_counter(void **state) {
    const int64_t seed0 = 0x299f31d0a4093822, seed1 = 0x0370734413198a2e;
    const uint64_t block = 0x243f6a88;
    (void)state;
    float fourth = dw__philox_uniform(seed0, seed1, 0x85a308d3, 4 * block + 3);
    assert_true(fourth == (float)(0x24126ea1u >> 8) / 16777216.0f);
    /* The block's high word, shifted, enters the stream's word. */
    dw__philox_words counter = dw__philox_counter(0, 5, (uint64_t)3 << 32 | 7);
    assert_int_equal(counter.word[0], 7);
    assert_int_equal(counter.word[1], 5 ^ 3 << 20);
}

static void fill_agrees_with_single_elements(void **state) {
    enum { COUNT = 37 };
    (void)state;
    for (uint64_t first = 0; first < 9; first++) {
        float run[COUNT];
        dw__philox_fill(-3, 1000, 2, first, COUNT, run);
        for (uint64_t i = 0; i < COUNT; i++)
            assert_true(run[i] == dw__philox_uniform(-3, 1000, 2, first + i));
    }
}

/* Checks mean 1/2 and variance 1/12 of a million numbers, within six standard deviations of the estimates. */
static void uniform_is_uniform(void **state) {
    enum { COUNT = 1 << 20 };
    double sum = 0.0, squares = 0.0;
    (void)state;
    for (uint64_t i = 0; i < COUNT; i++) {
        double u = dw__philox_uniform(42, 0, 1, i);
        assert_true(u >= 0.0 && u < 1.0);
        sum += u - 0.5;
        squares += (u - 0.5) * (u - 0.5);
    }
    assert_true(fabs(sum / COUNT) < 6.0 * sqrt(1.0 / 12.0 / COUNT));
    assert_true(fabs(squares / COUNT - 1.0 / 12.0) < 6.0 * sqrt(1.0 / 180.0 / COUNT));
}

/* ---- half types ------------------------------------------------------------------------------ */

typedef struct half_type {
    int precision, least_exponent; /* bits of the significand; exponent of the least normal */
    double largest;
    uint16_t infinity, sign;
    float (*to_f32)(uint16_t);
    uint16_t (*from_f32)(float);
} half_type;

static const half_type half_types[] = {
    {8, -126, 0x1.fep127, 0x7F80, 0x8000, dw__bf16_to_f32, dw__f32_to_bf16},
    {11, -14, 65504.0, 0x7C00, 0x8000, dw__f16_to_f32, dw__f32_to_f16},
};

/* Rounds `x` to the type's grid with arithmetic in double, ties to even. */
static double rounded(const half_type *type, double x) {
    int exponent;
    if (x == 0.0 || !isfinite(x)) return x;
    frexp(x, &exponent); /* x in [2^(exponent-1), 2^exponent) */
    if (exponent - 1 < type->least_exponent) exponent = type->least_exponent + 1;
    double quantum = ldexp(1.0, exponent - type->precision);
    double result = nearbyint(x / quantum) * quantum;
    return fabs(result) > type->largest ? copysign(INFINITY, x) : result;
}

static void check(const half_type *type, float x) {
    uint16_t bits = type->from_f32(x);
    float back = type->to_f32(bits);
    if (isnan(x)) {
        assert_true(isnan(back));
        assert_int_equal(signbit(back) != 0, signbit(x) != 0);
        return;
    }
    if ((double)back != rounded(type, x))
        fail_msg("%a became %a, expected %a", (double)x, (double)back, rounded(type, x));
    assert_int_equal(signbit(back) != 0, signbit(x) != 0);
}

/* Checks every pattern's value against its fields. */
static void every_half_pattern_has_its_value(void **state) {
    (void)state;
    for (size_t t = 0; t < 2; t++) {
        const half_type *type = &half_types[t];
        int fraction_bits = type->precision - 1;
        for (uint32_t bits = 0; bits < 0x10000; bits++) {
            int fraction = (int)(bits & ((1u << fraction_bits) - 1));
            int field = (int)((bits & 0x7FFFu) >> fraction_bits);
            float value = type->to_f32((uint16_t)bits);
            assert_int_equal(signbit(value) != 0, bits >> 15);
            if ((bits & 0x7FFFu) > type->infinity) {
                assert_true(isnan(value));
                continue;
            }
            if ((bits & 0x7FFFu) == type->infinity) {
                assert_true(isinf(value));
                continue;
            }
            int significand = field ? fraction + (1 << fraction_bits) : fraction;
            int scale = type->least_exponent + (field ? field - 1 : 0) - fraction_bits;
            assert_true(fabs((double)value) == ldexp(significand, scale));
            assert_int_equal(type->from_f32(value), bits); /* exact: goes back to itself */
        }
    }
}

/* Tests every number and every midpoint between neighbours, and the F32 numbers beside them. */
static void rounding_is_right_at_every_boundary(void **state) {
    (void)state;
    for (size_t t = 0; t < 2; t++) {
        const half_type *type = &half_types[t];
        for (uint16_t bits = 0; bits < type->infinity; bits++) {
            float low = type->to_f32(bits);
            double high = bits + 1 == type->infinity
                              ? rounded(type, low) * 2.0 - type->to_f32(bits - 1)
                              : type->to_f32((uint16_t)(bits + 1));
            double middle = 0.5 * ((double)low + high);
            float points[] = {low, (float)middle};
            for (size_t i = 0; i < 2; i++) {
                for (int side = -1; side <= 1; side++) {
                    float x =
                        side ? nextafterf(points[i], side > 0 ? INFINITY : -INFINITY) : points[i];
                    check(type, x);
                    check(type, -x);
                }
            }
        }
    }
}

static void rounding_is_right_on_random_bits(void **state) {
    uint64_t random = 12345;
    (void)state;
    for (int i = 0; i < 1 << 20; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        float x = dw__f32_from_bits((uint32_t)(random >> 32));
        check(&half_types[0], x);
        check(&half_types[1], x);
    }
}

static void special_values_survive(void **state) {
    (void)state;
    for (size_t t = 0; t < 2; t++) {
        const half_type *type = &half_types[t];
        assert_int_equal(type->from_f32(INFINITY), type->infinity);
        assert_int_equal(type->from_f32(-INFINITY), type->infinity | type->sign);
        assert_int_equal(type->from_f32(0.0f), 0);
        assert_int_equal(type->from_f32(-0.0f), type->sign);
        assert_int_equal(type->from_f32(3.4e38f), type->infinity);
        /* A NaN whose payload does not fit must not become infinity. */
        check(type, dw__f32_from_bits(0x7F800001u));
        check(type, dw__f32_from_bits(0xFF800001u));
        check(type, dw__f32_from_bits(0x7FFFFFFFu));
    }
    assert_int_equal(dw__f32_to_f16(65519.996f), 0x7BFF);
    assert_int_equal(dw__f32_to_f16(65520.0f), 0x7C00);
    assert_int_equal(dw__f32_to_f16(0x1p-25f), 0); /* a tie, to even */
    assert_int_equal(dw__f32_to_f16(0x1.000002p-25f), 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_gives_the_published_words),
        cmocka_unit_test(uniform_uses_the_documented_counter),
        cmocka_unit_test(fill_agrees_with_single_elements),
        cmocka_unit_test(uniform_is_uniform),
        cmocka_unit_test(every_half_pattern_has_its_value),
        cmocka_unit_test(rounding_is_right_at_every_boundary),
        cmocka_unit_test(rounding_is_right_on_random_bits),
        cmocka_unit_test(special_values_survive),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
