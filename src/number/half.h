/* Converts between BF16 or F16 bits and F32. Rounds to nearest, ties to even, and keeps subnormals,
 * infinities and NaNs (a NaN becomes quiet and keeps its sign and the payload bits that fit). The code is
 * portable C, so every kernel and every machine agree bit for bit; compilers vectorise the loops around it.
 *
 *   BF16: 1 sign, 8 exponent, 7 fraction bits: the upper half of an F32.
 *   F16 : 1 sign, 5 exponent, 10 fraction bits (IEEE 754-2019 binary16). */
#ifndef DW_HALF_H
#define DW_HALF_H

#include <stdint.h>
#include <string.h>

static inline uint32_t dw__f32_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float dw__f32_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float dw__bf16_to_f32(uint16_t half) {
    return dw__f32_from_bits((uint32_t)half << 16);
}

static inline uint16_t dw__f32_to_bf16(float value) {
    uint32_t bits = dw__f32_bits(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)(bits >> 16 | 0x0040u);
    /* Adds half an ulp minus one plus the lowest kept bit. This carries exactly if the value rounds up, and
     * past the largest finite number it carries into infinity. */
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

static inline float dw__f16_to_f32(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t magnitude = half & 0x7FFFu;
    if (magnitude >= 0x7C00u) { /* infinity, or a NaN, which becomes quiet */
        uint32_t quiet = magnitude > 0x7C00u ? 0x00400000u : 0u;
        return dw__f32_from_bits(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13 | quiet);
    }
    if (magnitude >= 0x0400u) /* normal: the exponent's bias goes from 15 to 127 */
        return dw__f32_from_bits(sign | ((magnitude << 13) + (112u << 23)));
    /* A subnormal or zero counts units of 2^-24, which F32 represents exactly. */
    return dw__f32_from_bits(dw__f32_bits((float)magnitude * 0x1p-24f) | sign);
}

static inline uint16_t dw__f32_to_f16(float value) {
    uint32_t bits = dw__f32_bits(value);
    uint32_t sign = bits >> 16 & 0x8000u;
    uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return (uint16_t)(sign | 0x7E00u | (magnitude >> 13 & 0x3FFu));
    /* 65520 is halfway between the largest finite F16 and 2^16. It and everything above become infinity. */
    if (magnitude >= 0x477FF000u) return (uint16_t)(sign | 0x7C00u);
    if (magnitude < 0x38800000u) { /* below 2^-14: the result is subnormal, units of 2^-24 */
        /* The ulp of 0.5 is 2^-24, so adding 0.5 makes the FPU round to those units, ties to even. */
        float rounded = dw__f32_from_bits(magnitude) + 0.5f;
        return (uint16_t)(sign | (dw__f32_bits(rounded) - 0x3F000000u));
    }
    magnitude += 0xFFFu + (magnitude >> 13 & 1u);
    return (uint16_t)(sign | ((magnitude - (112u << 23)) >> 13));
}

#endif
