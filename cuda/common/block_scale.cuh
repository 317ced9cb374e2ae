// Scales and codes of the block formats, bit-identical to dw_block_quantize (deepwell/number.h), which defines the
// rules. A scheme is a number of quantize_params.h.
#ifndef DW_BLOCK_SCALE_CUH
#define DW_BLOCK_SCALE_CUH

#include "quantize_params.h"
#include "sm90.cuh"

#define INFINITE_BITS 0x7f800000u
#define NAN_F __int_as_float(0x7fc00000)

DEVICE constexpr bool is_nvfp4(int scheme) { return scheme == DW_CODES_NVFP4; }
DEVICE constexpr bool is_fp4(int scheme) { return scheme == DW_CODES_NVFP4 || scheme == DW_CODES_MXFP4; }
DEVICE constexpr int block_of(int scheme) { return is_nvfp4(scheme) ? 16 : 32; }

// Returns the largest number of the elements' format, as the bits of an F32: 6, 448 or 57344.
DEVICE constexpr uint32 largest_bits(int scheme) {
    return is_fp4(scheme) ? 0x40c00000u : scheme == DW_CODES_MXFP8 ? 0x43e00000u : 0x47600000u;
}

// ---- scales -----------------------------------------------------------------------------------------------

// A block's scale and the factor of its elements; the factor is NaN if all codes must be NaN.
typedef struct block_scale {
    uint32 code;
    float factor;
} block_scale;

// E8M0 scale from the bits of the block's largest magnitude. Any NaN is greater than infinity.
template <int S, int R> DEVICE block_scale e8m0_scale(uint32 most) {
    constexpr uint32 fraction = 0x7fffffu, largest = largest_bits(S);
    constexpr int exponent = (int)(largest >> 23) - 127;
    constexpr uint32 carry =
        R == DW_RULE_FLOOR ? 0 : R == DW_RULE_CEIL ? fraction : fraction - (largest & fraction);
    int code = max((int)((most + carry) >> 23) - exponent, 0);
    float factor = __uint_as_float((uint32)(254 - code) << 23);
    if (most >= INFINITE_BITS) {
        code = most > INFINITE_BITS ? 0xff : R == DW_RULE_RCEIL ? 254 : 255 - exponent;
        factor = most > INFINITE_BITS           ? NAN_F
                 : R == DW_RULE_RCEIL ? __uint_as_float(0x00400000u) // 2^-127
                                             : __uint_as_float((uint32)(exponent - 1) << 23);
    }
    return {(uint32)code, factor};
}

// Returns the E4M3 codes of two numbers, `low` in the lower byte.
DEVICE uint32 e4m3_pair(float low, float high) {
    uint16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

// Converts an E4M3 code to a number.
DEVICE float e4m3_value(uint32 code) {
    uint32 halves;
    float value;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((uint16)code));
    asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %1;\n\tcvt.f32.f16 %0, low;\n\t}" : "=f"(value) : "r"(halves));
    return value;
}

// E4M3 scale from the block's largest magnitude, the tensor's scale and its inverse.
DEVICE block_scale nvfp4_scale(uint32 most, float tensor_scale, float inverse) {
    uint32 code = e4m3_pair(__uint_as_float(most) / 6.f / tensor_scale, 0.f) & 0xff;
    float factor = fminf(inverse / e4m3_value(code), 3.402823466e38f);
    if (code == 0) factor = 0.f;
    if (most >= INFINITE_BITS) return {0x7f, NAN_F};
    return {code, factor};
}

// Computes dw_nvfp4_tensor_scale.
DEVICE float nvfp4_tensor_scale(float amax) {
    if (!(amax > 0.f) || amax >= INFINITY_F) return 1.f;
    return fmaxf(amax / (448.f * 6.f), 1.175494351e-38f);
}

// ---- codes ------------------------------------------------------------------------------------------------

// Returns the number of words that the codes of eight elements take.
DEVICE constexpr int code_words(int scheme) { return is_fp4(scheme) ? 1 : 2; }

// Converts to E2M1, for which Hopper has no instruction. Adds the power of two whose unit in the last place is the
// distance of neighbouring codes, so that the sum is rounded to a code and its low bits hold the code's number.
DEVICE uint32 e2m1_code(float x) {
    uint32 bits = __float_as_uint(x), magnitude = min(bits & 0x7fffffffu, 0x40c00000u);
    uint32 binade = max(magnitude & INFINITE_BITS, 0x3f800000u); // below 1 the codes are as far apart as above
    uint32 sum = __float_as_uint(__uint_as_float(magnitude) + __uint_as_float(binade + (22u << 23)));
    uint32 code = (sum + ((binade - 0x3f800000u) >> 22)) & 7;
    return x == x ? code | (bits >> 28 & 8) : 7;
}

// Converts eight numbers to their nearest codes, saturated; the first is in the lowest bits.
template <int S> DEVICE void encode_eight(const float *x, uint32 *words) {
    if constexpr (S == DW_CODES_MXFP8) {
        words[0] = e4m3_pair(x[0], x[1]) | e4m3_pair(x[2], x[3]) << 16;
        words[1] = e4m3_pair(x[4], x[5]) | e4m3_pair(x[6], x[7]) << 16;
    } else if constexpr (S == DW_CODES_MXFP8_E5M2) {
#pragma unroll
        for (int i = 0; i < 2; i++)
            asm("{\n\t.reg .b16 low, high;\n\tcvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n\t"
                "cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n\tmov.b32 %0, {low, high};\n\t}"
                : "=r"(words[i])
                : "f"(x[4 * i]), "f"(x[4 * i + 1]), "f"(x[4 * i + 2]), "f"(x[4 * i + 3]));
    } else {
#if __CUDA_ARCH__ >= 1000
        asm("{\n\t.reg .b8 b<4>;\n\tcvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n\tcvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n\t"
            "cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n\tcvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n\t"
            "mov.b32 %0, {b0, b1, b2, b3};\n\t}"
            : "=r"(words[0])
            : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
#else
        words[0] = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) words[0] |= e2m1_code(x[i]) << 4 * i;
#endif
    }
}

#endif
