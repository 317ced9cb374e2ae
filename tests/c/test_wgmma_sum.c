/* The loops that add wgmma's products side by side, of every instruction set, beside the plain sum that hardware's words
 * have shown to be right (tests/probes). */
#include "base/isa.h"
#include "emulator/wgmma_loops.h"
#include "emulator/wgmma_sum.h"
#include "number/half.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint64_t state = 5;
static uint32_t next_random(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 32);
}

static const struct {
    const char *name;
    dw__wgmma_format format;
    int depth;
} kinds[] = {{"BF16", {8, 7, 0, false}, 16},
             {"F16", {5, 10, 0, false}, 16},
             {"TF32", {8, 10, 13, false}, 8},
             {"E4M3", {4, 3, 0, true}, 32},
             {"E5M2", {5, 2, 0, false}, 32}};

/* A finite number of the format: of every exponent, or near 1; subnormal numbers and zeros among them. */
static uint32_t random_code(const dw__wgmma_format *f, bool near) {
    const uint32_t top = (1u << f->exponent_bits) - 1, bias = top >> 1;
    uint32_t exponent = near ? bias - 3 + next_random() % 7 : next_random() % top;
    uint32_t fraction = next_random() & ((1u << f->fraction_bits) - 1);
    if (next_random() % 16 == 0) exponent = 0;
    if (next_random() % 16 == 0) exponent = fraction = 0;
    const uint32_t code = (next_random() & 1) << (f->exponent_bits + f->fraction_bits) |
                          exponent << f->fraction_bits | fraction;
    return code << f->unused | (f->unused ? next_random() & ((1u << f->unused) - 1) : 0);
}

static double value_of(const dw__wgmma_format *f, uint32_t code) {
    code >>= f->unused;
    const int top = (1 << f->exponent_bits) - 1, bias = top >> 1;
    const int exponent = (int)(code >> f->fraction_bits) & top;
    const double fraction = code & ((1u << f->fraction_bits) - 1),
                 one = (double)(1 << f->fraction_bits);
    const double size =
        exponent ? ldexp(1 + fraction / one, exponent - bias) : ldexp(fraction / one, 1 - bias);
    return code >> (f->exponent_bits + f->fraction_bits) & 1 ? -size : size;
}

static float random_d(int how) {
    switch (how % 4) {
    case 0: return 0;
    case 1: return (float)(int32_t)next_random() * 0x1p-28f;
    case 2: return dw__f32_from_bits((next_random() & 0x80000000) | next_random() % 0x7F800000);
    default:
        return next_random() % 4 ? 1 : next_random() % 2 ? INFINITY : dw__f32_from_bits(0x7FC00000);
    }
}

static void expect_same(const dw__wgmma_loops *loops, const char *isa, size_t kind, bool near,
                        int how) {
    enum { COLUMNS = DW__WGMMA_COLUMNS, DEPTH = DW__SUM_MOST };
    const dw__wgmma_format *f = &kinds[kind].format;
    const int depth = kinds[kind].depth;
    const bool narrow = depth == 32;
    uint32_t a[DEPTH], b[DEPTH * COLUMNS];
    int32_t a_parts[3][DEPTH], b_parts[3][DEPTH * COLUMNS];
    const dw__wgmma_factors row = {a_parts[0], a_parts[1], a_parts[2]},
                            columns = {b_parts[0], b_parts[1], b_parts[2]};
    float d[COLUMNS], begun[COLUMNS];
    dw__factors plain_row, plain_column;
    for (int k = 0; k < DEPTH; k++) a[k] = k < depth ? random_code(f, near) : 0;
    for (int i = 0; i < depth * COLUMNS; i++) b[i] = random_code(f, near);
    for (int i = 0; i < COLUMNS; i++) d[i] = begun[i] = random_d(how);
    assert_true(loops->decode(a, DEPTH, f, &row));
    assert_true(loops->decode(b, (size_t)(depth * COLUMNS), f, &columns));
    const uint32_t others = loops->sums(depth, &row, &columns, COLUMNS,
                                        (narrow ? 13 : 25) - 2 * f->fraction_bits, narrow, d);
    const int least = 2 - (1 << (f->exponent_bits - 1));
    for (int i = 0; i < COLUMNS; i++) {
        for (int k = 0; k < depth; k++) {
            plain_row.value[k] = value_of(f, a[k]),
            plain_column.value[k] = value_of(f, b[k * COLUMNS + i]);
            plain_row.exponent[k] = dw__factor_exponent(plain_row.value[k], least);
            plain_column.exponent[k] = dw__factor_exponent(plain_column.value[k], least);
        }
        const float right = dw__wgmma_sum(&plain_row, &plain_column, depth, 1, begun[i], narrow);
        if (others >> i & 1) { /* left for the plain sum, untouched, and for a reason */
            assert_memory_equal(&d[i], &begun[i], sizeof d[i]);
            assert_true(!isfinite(begun[i]) || fabsf(right) < 0x1p-126f);
        } else if (dw__f32_bits(d[i]) != dw__f32_bits(right)) {
            fail_msg("%s, %s: %a, not %a, from %a", isa, kinds[kind].name, (double)d[i],
                     (double)right, (double)begun[i]);
        }
    }
}

static void sums_are_the_plain_ones(void **unused) {
    extern const dw__wgmma_loops dw__wgmma_loops_baseline;
    const dw__wgmma_loops *all[DW_ISA_COUNT] = {&dw__wgmma_loops_baseline};
#if defined(__x86_64__)
    extern const dw__wgmma_loops dw__wgmma_loops_avx2, dw__wgmma_loops_avx512;
    if (dw__cpu_isa() >= DW_ISA_AVX2) all[DW_ISA_AVX2] = &dw__wgmma_loops_avx2;
    if (dw__cpu_isa() >= DW_ISA_AVX512) all[DW_ISA_AVX512] = &dw__wgmma_loops_avx512;
#endif
    (void)unused;
    for (int isa = 0; isa < DW_ISA_COUNT; isa++)
        for (size_t kind = 0; all[isa] && kind < sizeof kinds / sizeof *kinds; kind++)
            for (int i = 0; i < 800; i++)
                expect_same(all[isa], dw__isa_name((dw__isa)isa), kind, i % 2, i / 2);
}

static void numbers_that_are_none_are_seen(void **unused) {
    extern const dw__wgmma_loops dw__wgmma_loops_baseline;
    static const uint32_t codes[][2] = {
        {0x7F80, 0xFFC1}, {0xFC00, 0x7E01}, {0x7F800000, 0xFFC00000}, {0x7F, 0xFF}, {0x7C, 0xFE}};
    (void)unused;
    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++)
        for (int which = 0; which < 2; which++)
            for (int at = 0; at < 32; at += 5) {
                uint32_t row[32] = {0};
                int32_t parts[3][32];
                const dw__wgmma_factors factors = {parts[0], parts[1], parts[2]};
                assert_true(
                    dw__wgmma_loops_baseline.decode(row, 32, &kinds[kind].format, &factors));
                row[at] = codes[kind][which];
                assert_false(
                    dw__wgmma_loops_baseline.decode(row, 32, &kinds[kind].format, &factors));
            }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_are_the_plain_ones),
        cmocka_unit_test(numbers_that_are_none_are_seen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
