/* How Hopper's tensor cores accumulate. The rule was measured on an H200 (tests/probes): it reproduces every bit of
 * 20 sets of random products of BF16, F16, TF32, E4M3 and E5M2 with F32 accumulators.
 *
 * The products along one instruction's whole K (16, 8 or 32 of them) and the old value of D are aligned to the
 * greatest exponent. A product's exponent is the sum of its factors' exponents, not normalised. Each term is
 * truncated to 25 bits below the greatest exponent (13 if the factors have 8 bits). The terms are added exactly, and
 * the sum is truncated, not rounded, to 24 bits (14).
 */
#ifndef DW_EMULATOR_WGMMA_SUM_H
#define DW_EMULATOR_WGMMA_SUM_H

#include <stdint.h>

/* A factor: its value and the exponent of its leading bit (for subnormals, that of the least normal number). Zeros
 * have DW__NO_EXPONENT. */
#define DW__NO_EXPONENT (-20000)
#define DW__SUM_MOST 32
typedef struct dw__factors {
    double value[DW__SUM_MOST];
    int32_t exponent[DW__SUM_MOST];
} dw__factors;

/* Returns d + the products of `count` factors with the hardware's truncation; `narrow`: the factors have 8 bits. */
float dw__wgmma_sum(const dw__factors *a, const dw__factors *b, int count, double sign, float d,
                    int narrow);
/* Returns the exponent of a value of a format whose least normal number is 2^least. */
int32_t dw__factor_exponent(double value, int least);

#endif
