/* Compares the loops that add wgmma's products in parallel, for every instruction set, with the serial sum, which
 * hardware confirms (tests/probes). */
#include "base/isa.h"
#include "emulator/wgmma_loops.h"
#include "emulator/wgmma_sum.h"
#include "number/half.h"
#include "random_numbers.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static long added; /* number of sums that the loops computed themselves */

static const struct {
    const char *name;
    dw__wgmma_format format;
    int depth;
} kinds[] = {{"BF16", {8, 7, 0, false}, 16},
             {"F16", {5, 10, 0, false}, 16},
             {"TF32", {8, 10, 13, false}, 8},
             {"E4M3", {4, 3, 0, true}, 32},
             {"E5M2", {5, 2, 0, false}, 32}};

/* Returns a finite number of the format, of any exponent or near 1, including subnormal numbers and zeros. */
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

static uint32_t largest_of(const dw__wgmma_format *f) { /* between 1 and 2 */
    const uint32_t bias = (1u << (f->exponent_bits - 1)) - 1;
    return ((bias << f->fraction_bits) | ((1u << f->fraction_bits) - 1)) << f->unused;
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

/* Returns the exponent to which all terms of a sum are aligned. */
static int greatest_exponent(const dw__factors *a, const dw__factors *b, int depth, float d) {
    int greatest = d != 0 ? dw__factor_exponent((double)d, -126) : DW__NO_EXPONENT;
    for (int k = 0; k < depth; k++)
        if (a->exponent[k] + b->exponent[k] > greatest) greatest = a->exponent[k] + b->exponent[k];
    return greatest;
}

static void expect_same(const dw__wgmma_loops *loops, const char *isa, size_t kind, bool near,
                        int how) {
    enum { ROWS = DW__WGMMA_ROWS, COLUMNS = DW__WGMMA_COLUMNS, DEPTH = DW__SUM_MOST };
    const dw__wgmma_format *f = &kinds[kind].format;
    const int depth = kinds[kind].depth, count = how % 3 ? COLUMNS : DW__WGMMA_STEP;
    const bool narrow = depth == 32;
    uint32_t a[ROWS * DEPTH], b[DEPTH * COLUMNS], twice[ROWS * DEPTH], others[ROWS];
    float rows[ROWS * DEPTH], columns[DEPTH * COLUMNS];
    int16_t row_exponents[ROWS * DEPTH], exponents[DEPTH * COLUMNS];
    float d[ROWS][COLUMNS], begun[ROWS][COLUMNS];
    dw__factors plain_row, plain_column;
    for (int i = 0; i < ROWS * depth; i++) a[i] = random_code(f, near);
    for (int i = 0; i < depth * COLUMNS; i++) b[i] = random_code(f, near);
    if (how % 7 == 0) /* the largest possible sum */
        for (int i = 0; i < depth; i++) a[i] = b[i * COLUMNS] = largest_of(f);
    for (int i = 0; i < ROWS * COLUMNS; i++) begun[i / COLUMNS][i % COLUMNS] = random_d(how);
    memcpy(d, begun, sizeof d);
    assert_true(loops->decode(a, (size_t)(ROWS * depth), f, rows, row_exponents));
    assert_true(loops->decode(b, (size_t)(depth * COLUMNS), f, columns, exponents));
    for (int i = 0; i < ROWS * depth; i++) twice[i] = (uint16_t)row_exponents[i] * 0x10001u;
    loops->sums(depth, rows, twice, columns, exponents, COLUMNS, (size_t)count, narrow, d, others);
    const int least = 2 - (1 << (f->exponent_bits - 1));
    for (int i = 0; i < ROWS * count; i++) {
        const int row = i / count, column = i % count;
        const float before = begun[row][column], *after = &d[row][column];
        for (int k = 0; k < depth; k++) {
            plain_row.value[k] = value_of(f, a[row * depth + k]),
            plain_column.value[k] = value_of(f, b[k * COLUMNS + column]);
            plain_row.exponent[k] = dw__factor_exponent(plain_row.value[k], least);
            plain_column.exponent[k] = dw__factor_exponent(plain_column.value[k], least);
        }
        const float right = dw__wgmma_sum(&plain_row, &plain_column, depth, 1, before, narrow);
        /* The loop may leave a sum unchanged to the serial one, but only for a valid reason. */
        if (others[row] >> column & 1) {
            const int greatest = greatest_exponent(&plain_row, &plain_column, depth, before);
            assert_memory_equal(after, &before, sizeof before);
            assert_true(!isfinite(before) || greatest < DW__WGMMA_LEAST ||
                        greatest > DW__WGMMA_GREATEST ||
                        fabs(ldexp((double)right, 25 - greatest)) > 0x7E000000);
        } else if (dw__f32_bits(*after) != dw__f32_bits(right)) {
            fail_msg("%s, %s: %a, not %a, from %a", isa, kinds[kind].name, (double)*after,
                     (double)right, (double)before);
        } else {
            added++;
        }
    }
    for (int row = 0; row < ROWS; row++)
        assert_memory_equal(&d[row][count], &begun[row][count],
                            (size_t)(COLUMNS - count) * sizeof **d);
}

static void loops_equal_the_serial_sum(void **unused) {
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
            for (int i = 0; i < 400; i++) {
                const long before = added;
                expect_same(all[isa], dw__isa_name((dw__isa)isa), kind, i % 2, i / 2);
                /* Numbers near 1, and D not larger: the loops compute almost all sums. */
                if (i % 2 && i / 2 % 4 < 2)
                    assert_true(added - before >= DW__WGMMA_ROWS * DW__WGMMA_STEP - 4);
            }
}

static void infinities_and_nans_are_detected(void **unused) {
    extern const dw__wgmma_loops dw__wgmma_loops_baseline;
    static const uint32_t codes[][2] = {
        {0x7F80, 0xFFC1}, {0xFC00, 0x7E01}, {0x7F800000, 0xFFC00000}, {0x7F, 0xFF}, {0x7C, 0xFE}};
    (void)unused;
    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++)
        for (int which = 0; which < 2; which++)
            for (int at = 0; at < 32; at += 5) {
                uint32_t row[32] = {0};
                float values[32];
                int16_t exponents[32];
                assert_true(dw__wgmma_loops_baseline.decode(row, 32, &kinds[kind].format, values,
                                                            exponents));
                row[at] = codes[kind][which];
                assert_false(dw__wgmma_loops_baseline.decode(row, 32, &kinds[kind].format, values,
                                                             exponents));
            }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(loops_equal_the_serial_sum),
        cmocka_unit_test(infinities_and_nans_are_detected),
    };
    random_state = 5;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
