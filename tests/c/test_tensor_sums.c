/* Compares the loops of tcgen05.mma, for every instruction set, with products added one after the other in double: the
 * bits must be the same for every number of rows and columns of a tile, with awkward numbers. */
#include "base/isa.h"
#include "emulator/tcgen05_loops.h"
#include "number/half.h"
#include "random_numbers.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MOST_ROWS = 8, MOST_DEPTH = 64, WIDE = 96 };

/* Numbers of BF16: the product of any two is exact. */
static double factor(bool awkward) {
    if (awkward && next_random() % 300 == 0) return next_random() % 2 ? INFINITY : NAN;
    const int exponent = (int)(next_random() % (awkward ? 250 : 12)) - (awkward ? 125 : 6);
    return ldexp((double)(next_random() % 256) - 128, exponent);
}

static void loops_equal_the_serial_sum(void **unused) {
    extern const dw__tensor_loops dw__tensor_loops_baseline;
    const dw__tensor_loops *all[DW_ISA_COUNT] = {&dw__tensor_loops_baseline};
#if defined(__x86_64__)
    extern const dw__tensor_loops dw__tensor_loops_avx2, dw__tensor_loops_avx512;
    if (dw__cpu_isa() >= DW_ISA_AVX2) all[DW_ISA_AVX2] = &dw__tensor_loops_avx2;
    if (dw__cpu_isa() >= DW_ISA_AVX512) all[DW_ISA_AVX512] = &dw__tensor_loops_avx512;
#endif
    static const double scales[] = {0, 1, 0x1p-15};
    static double a[MOST_ROWS * MOST_DEPTH], b[MOST_DEPTH * WIDE], sums[MOST_ROWS * WIDE];
    static uint32_t begun[MOST_ROWS][WIDE], cells[MOST_ROWS][WIDE];
    (void)unused;
    for (uint32_t i = 0; i < 1200; i++) {
        const size_t rows = i % (MOST_ROWS + 1), depth = i % 4 ? 16 : 64,
                     columns = DW__TENSOR_STEP * (1 + i % 10);
        const double scale = scales[i % 3];
        const dw__tensor_loops *loops = all[i / 3 % DW_ISA_COUNT];
        uint32_t *places[MOST_ROWS];
        if (!loops) continue;
        for (size_t k = 0; k < rows * depth; k++) a[k] = factor(i % 2);
        for (size_t k = 0; k < MOST_DEPTH * WIDE; k++) b[k] = factor(i % 2);
        for (size_t k = 0; k < MOST_ROWS * WIDE; k++) {
            begun[k / WIDE][k % WIDE] = i % 5 ? dw__f32_bits((float)factor(false)) : next_random();
            sums[k] = factor(i % 2);
        }
        memcpy(cells, begun, sizeof cells);
        for (size_t row = 0; row < rows; row++) places[row] = cells[row];
        static double added[MOST_ROWS * WIDE];
        memcpy(added, sums, sizeof added);
        loops->add_f32(a, rows, depth, b, columns, WIDE, scale, places);
        loops->add(a, rows, depth, b, columns, WIDE, added);
        for (size_t k = 0; k < MOST_ROWS * WIDE; k++) {
            const size_t row = k / WIDE, column = k % WIDE;
            if (row >= rows || column >= columns) { /* past the tile */
                assert_int_equal(cells[row][column], begun[row][column]);
                assert_memory_equal(&added[k], &sums[k], sizeof *sums);
                continue;
            }
            double plain = sums[k],
                   sum = scale == 0 ? 0 : scale * (double)dw__f32_from_bits(begun[row][column]);
            for (size_t j = 0; j < depth; j++) {
                const double product = a[row * depth + j] * b[j * WIDE + column];
                plain += product, sum += product;
            }
            assert_true(isnan(plain) ? isnan(added[k]) : plain == added[k]);
            assert_int_equal(cells[row][column],
                             isnan(sum) ? 0x7FFFFFFF : dw__f32_bits((float)sum));
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(loops_equal_the_serial_sum)};
    random_state = 3;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
