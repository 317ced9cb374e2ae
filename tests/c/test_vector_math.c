/* The vector functions of the elementwise loops, on every instruction set that this CPU supports, swept over
 * the floats against the C library in double. src/kernel/cpu/isa/vector_math.h states the bounds, in units in
 * the last place of the result. */
#include "kernel/cpu/cpu.h"
#include "kernel/cpu/fused.h"
#include "number/half.h"
#include "number/philox.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

extern const dw__fused_loops dw__fused_loops_baseline;
#if defined(__x86_64__)
extern const dw__fused_loops dw__fused_loops_avx2, dw__fused_loops_avx512;
#endif

static const dw__fused_loops *loops_of(dw__isa isa) {
#if defined(__x86_64__)
    if (isa == DW_ISA_AVX512) return &dw__fused_loops_avx512;
    if (isa == DW_ISA_AVX2) return &dw__fused_loops_avx2;
#endif
    return &dw__fused_loops_baseline;
}

static double reciprocal(double x) { return 1.0 / x; }
static double rsqrt(double x) { return 1.0 / sqrt(x); }
static double sigmoid(double x) {
    return x >= 0.0 ? 1.0 / (1.0 + exp(-x)) : exp(x) / (1.0 + exp(x));
}

typedef struct function {
    const char *name;
    dw_op op;
    double (*reference)(double);
    double bound;
} function;

static const function functions[] = {
    {"exp", DW_OP_EXP, exp, 1.1},
    {"log", DW_OP_LOG, log, 1.1},
    {"log1p", DW_OP_LOG1P, log1p, 2.0},
    {"tanh", DW_OP_TANH, tanh, 1.6},
    {"erf", DW_OP_ERF, erf, 1.5},
    {"sigmoid", DW_OP_SIGMOID, sigmoid, 2.0},
    {"sin", DW_OP_SIN, sin, 0.6},
    {"cos", DW_OP_COS, cos, 0.6},
    {"sqrt", DW_OP_SQRT, sqrt, 0.51},
    {"rsqrt", DW_OP_RSQRT, rsqrt, 1.5},
    {"reciprocal", DW_OP_RECIPROCAL, reciprocal, 0.51},
    {"floor", DW_OP_FLOOR, floor, 0.0},
    {"ceil", DW_OP_CEIL, ceil, 0.0},
};

static double ulp(double reference) {
    int exponent;
    frexp(reference, &exponent);
    return ldexp(1.0, (exponent < -125 ? -125 : exponent) - 24);
}

/* Returns 0 if both have the same kind (NaN and NaN, equal infinities), infinity if the kinds differ. */
static double error_in_ulp(float got, double reference) {
    if (isnan(reference)) return isnan(got) ? 0.0 : INFINITY;
    if (isnan(got)) return INFINITY;
    if (fabs(reference) >= 0x1.ffffffp127) { /* rounds to infinity */
        return isinf(got) && !signbit(got) == !signbit(reference) ? 0.0 : INFINITY;
    }
    if (isinf(got)) return fabs(reference) > 0x1.fffffdp127 ? 1.0 : INFINITY;
    if (reference == 0.0 && got == 0.0)
        return !signbit(reference) == !signbit(got) ? 0.0 : INFINITY;
    return fabs((double)got - reference) / ulp(reference);
}

enum { BLOCK = 1000 }; /* not a multiple of any vector: tails count too */

static double worst_error(const function *f, const dw__fused_loops *loops, float *where) {
    static float x[BLOCK], y[BLOCK];
    double worst = 0.0;
    uint32_t step = 3989; /* prime: about a million floats, every exponent */
    uint64_t bits = 0;
    bool edges = true;
    while (bits < UINT64_C(1) << 32) {
        int n = 0;
        if (edges) {
            static const float edge[] = {0.0f,      -0.0f,     INFINITY,   -INFINITY,  NAN,
                                         1.0f,      -1.0f,     0x1p-149f,  -0x1p-149f, 0x1p-126f,
                                         88.72283f, 88.72284f, -87.33654f, -103.972f,  -104.0f,
                                         0x1p22f,   -0x1p30f,  0.625f,     0.92f,      3.95f,
                                         0.5f,      -0.5f,     1.5f,       2.5f,       -2.5f,
                                         3.4e38f,   -3.4e38f,  8388607.5f, 1.5707964f, 3.1415927f};
            memcpy(x, edge, sizeof edge);
            n = (int)(sizeof edge / sizeof *edge);
            edges = false;
        } else {
            for (; n < BLOCK && bits < UINT64_C(1) << 32; bits += step)
                x[n++] = dw__f32_from_bits((uint32_t)bits);
        }
        dw__lane_args args = {.count = n, .out = y, .in = {x}, .step = {1}};
        loops->apply[DW_LANE_F32][f->op](&args);
        for (int i = 0; i < n; i++) {
            double error = error_in_ulp(y[i], f->reference((double)x[i]));
            if (!(error <= worst)) {
                worst = error;
                *where = x[i];
            }
        }
    }
    return worst;
}

static void test_functions(void **state) {
    (void)state;
    for (int isa = 0; isa <= (int)dw__cpu_isa(); isa++) {
        for (size_t i = 0; i < DW_COUNT(functions); i++) {
            float where = 0.0f;
            double worst = worst_error(&functions[i], loops_of((dw__isa)isa), &where);
            print_message("%-8s %-10s %.3f ulp at %.9g\n", dw__isa_name((dw__isa)isa),
                          functions[i].name, worst, (double)where);
            if (!(worst <= functions[i].bound))
                fail_msg("%s: %g ulp at %.9g, bound %g", functions[i].name, worst, (double)where,
                         functions[i].bound);
        }
    }
}

static uint32_t random_bits(uint64_t *state) {
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(*state >> 32);
}

/* Exponents from underflow to overflow of the results, and every pair of special values. */
static void test_pow(void **state) {
    (void)state;
    static const float special[] = {0.0f,   -0.0f, 1.0f,  -1.0f,    2.0f,      -2.0f,
                                    0.5f,   3.0f,  -3.0f, INFINITY, -INFINITY, NAN,
                                    1e-40f, 1e30f, 2.5f,  -0.5f,    1e-30f,    16777216.0f};
    enum { SPECIAL = (int)DW_COUNT(special) };
    for (int isa = 0; isa <= (int)dw__cpu_isa(); isa++) {
        static float x[BLOCK], y[BLOCK], z[BLOCK];
        uint64_t seed = 7;
        double worst = 0.0;
        for (int round = 0; round < 600; round++) {
            int n = BLOCK;
            for (int i = 0; i < n; i++) {
                double log_x = ((double)random_bits(&seed) * 0x1p-32 - 0.5) * (round % 3 ? 8 : 200);
                x[i] = (float)exp2(log_x);
                y[i] = (float)(((double)random_bits(&seed) * 0x1p-32 - 0.5) * (round % 2 ? 6 : 60));
            }
            if (round == 0) {
                n = SPECIAL * SPECIAL;
                for (int i = 0; i < n; i++) {
                    x[i] = special[i / SPECIAL];
                    y[i] = special[i % SPECIAL];
                }
            }
            dw__lane_args args = {.count = n, .out = z, .in = {x, y}, .step = {1, 1}};
            loops_of((dw__isa)isa)->apply[DW_LANE_F32][DW_OP_POW](&args);
            for (int i = 0; i < n; i++) {
                double error = error_in_ulp(z[i], pow((double)x[i], (double)y[i]));
                if (!(error <= 1.0))
                    fail_msg("pow(%.9g, %.9g) = %.9g: %g ulp", (double)x[i], (double)y[i],
                             (double)z[i], error);
                if (error > worst) worst = error;
            }
        }
        print_message("%-8s pow        %.3f ulp\n", dw__isa_name((dw__isa)isa), worst);
    }
}

/* x Phi(x) and related functions: the error is relative to the argument, because the factor 0.5 (1 + erf)
 * cancels on the negative side. */
static void test_activations(void **state) {
    (void)state;
    for (int isa = 0; isa <= (int)dw__cpu_isa(); isa++) {
        const dw__fused_loops *loops = loops_of((dw__isa)isa);
        for (int i = -200000; i <= 200000; i += 7) {
            float x = (float)i * 1e-4f, one = 1.0f, y[5];
            double v = (double)x, s = sigmoid(v);
            double u = sqrt(2.0 / M_PI) * (v + 0.044715 * v * v * v), t = tanh(u);
            double phi = exp(-0.5 * v * v) / sqrt(2.0 * M_PI), cdf = 0.5 * erfc(-v * M_SQRT1_2);
            double du = sqrt(2.0 / M_PI) * (1.0 + 3.0 * 0.044715 * v * v);
            double reference[5] = {v * s, v * cdf, 0.5 * v * (1.0 + t), cdf + v * phi,
                                   0.5 * (1.0 + t) + 0.5 * v * (1.0 - t * t) * du};
            static const int ops[5] = {DW_OP_SILU, DW_OP_GELU, DW_LANE_GELU_TANH,
                                       DW_OP_GELU_BACKWARD, DW_LANE_GELU_TANH_BACKWARD};
            for (int k = 0; k < 5; k++) {
                dw__lane_args args = {.count = 1, .out = &y[k], .in = {&x, &one}, .step = {1, 1}};
                loops->apply[DW_LANE_F32][ops[k]](&args);
                double scale = k < 3 ? fabs(v) : 1.0;
                double bound = 4.0 * 0x1p-24 * scale;
                if (!(fabs((double)y[k] - reference[k]) <= bound))
                    fail_msg("%s, activation %d at %.9g: %.9g, expected %.9g",
                             dw__isa_name((dw__isa)isa), k, v, (double)y[k], reference[k]);
            }
        }
    }
}

/* Dropout's random numbers around block number 2^32, at every alignment. */
static void test_dropout_numbers(void **state) {
    (void)state;
    enum { COUNT = 777 };
    static float ones[COUNT], y[COUNT];
    for (int i = 0; i < COUNT; i++) ones[i] = 1.0f;
    for (int isa = 0; isa <= (int)dw__cpu_isa(); isa++) {
        for (uint64_t shift = 0; shift < 9; shift++) {
            dw__lane_dropout dropout = {
                {INT64_C(-5), INT64_C(77) << 33}, 9, (UINT64_C(1) << 34) - 200 + shift, 0.25};
            dw__lane_args args = {.count = COUNT, .out = y, .in = {ones}, .step = {1}};
            loops_of((dw__isa)isa)->dropout(&args, &dropout);
            for (uint64_t i = 0; i < COUNT; i++) {
                float u =
                    dw__philox_uniform(dropout.seed[0], dropout.seed[1], 9, dropout.first + i);
                float expected = u >= 0.25f ? 1.0f / 0.75f : 0.0f;
                assert_true(y[i] == expected);
            }
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_functions),
        cmocka_unit_test(test_pow),
        cmocka_unit_test(test_activations),
        cmocka_unit_test(test_dropout_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
