#include "emulator/wgmma_sum.h"
#include "number/half.h"
#include <math.h>
#include <stdbool.h>
#include <string.h>

int32_t dw__factor_exponent(double value, int least) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value == 0) return DW__NO_EXPONENT;
    const int exponent = (int)(bits >> 52 & 0x7FF) - 1023;
    return exponent < least ? least : exponent;
}

static double power_of_two(int exponent) { /* -1022 to 1023 */
    const uint64_t bits = (uint64_t)(exponent + 1023) << 52;
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Returns sum * 2^quantum, truncated to `keep` bits. */
static float cut_off(int64_t sum, int quantum, int keep) {
    const bool negative = sum < 0;
    uint64_t magnitude = negative ? 0 - (uint64_t)sum : (uint64_t)sum;
    if (magnitude == 0) return 0;
    const int top = 63 - __builtin_clzll(magnitude),
              least = quantum + top < -126 ? -126 - (keep - 1) : quantum + top - (keep - 1);
    if (least > quantum) {
        const int drop = least - quantum;
        magnitude = drop > 63 ? 0 : magnitude >> drop << drop;
    }
    /* Exact: below 2^53. */
    const double value = (double)magnitude * power_of_two(quantum < -1000 ? -1000 : quantum);
    const float result = value > 0x1.fffffep127 ? INFINITY : (float)value;
    return negative ? -result : result;
}

float dw__wgmma_sum(const dw__factors *a, const dw__factors *b, int count, double sign, float d,
                    int narrow) {
    const int kept = narrow ? 13 : 25, keep = narrow ? 14 : 24;
    int32_t greatest = d != 0 ? dw__factor_exponent((double)d, -126) : DW__NO_EXPONENT;
    double plain = (double)d;
    for (int k = 0; k < count; k++) {
        const int32_t exponent = a->exponent[k] + b->exponent[k];
        greatest = exponent > greatest ? exponent : greatest;
        plain += sign * a->value[k] * b->value[k];
    }
    if (!isfinite(plain)) return isnan(plain) ? dw__f32_from_bits(0x7FFFFFFF) : (float)plain;
    if (greatest < -1000) return 0; /* all terms are zeros */
    /* A product is below 4 * 2^greatest, so each fits 28 bits. */
    const double scale = sign * power_of_two(kept - greatest);
    int64_t sum = (int64_t)(int32_t)((double)d * power_of_two(kept - greatest));
    for (int k = 0; k < count; k++) sum += (int32_t)(a->value[k] * b->value[k] * scale);
    return cut_off(sum, greatest - kept, keep);
}
