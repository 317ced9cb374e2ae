/* How Hopper's tensor cores add: measured on an H200 (tests/probes), where this gives every bit of 20 sets of
 * random products of BF16, F16, TF32, E4M3 and E5M2 into F32.
 *
 * The products of one instruction's whole K (16, 8 or 32 of them) and what D began with are aligned to the
 * greatest exponent, where a product's exponent is the sum of its factors' exponents, not normalised. Of each,
 * 25 bits below that exponent are kept (13 where the factors have 8 bits), the rest is cut off. Their sum is
 * exact, and is cut off, not rounded, to 24 bits (14).
 */
#ifndef DW_EMULATOR_WGMMA_SUM_H
#define DW_EMULATOR_WGMMA_SUM_H

#include <stdint.h>

/* A factor: its value, and the exponent of its leading place (of subnormals, of the least normal number); zeros have
 * DW__NO_EXPONENT. */
#define DW__NO_EXPONENT (-20000)
#define DW__SUM_MOST 32
typedef struct dw__factors {
    double value[DW__SUM_MOST];
    int32_t exponent[DW__SUM_MOST];
} dw__factors;

/* d + the products of `count` factors, in the form that the hardware gives them; `narrow`: factors of 8 bits. */
float dw__wgmma_sum(const dw__factors *a, const dw__factors *b, int count, double sign, float d,
                    int narrow);
/* The exponent of a value of a format whose least normal number is 2^least. */
int32_t dw__factor_exponent(double value, int least);

#endif
