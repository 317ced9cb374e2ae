// Codes of fp8-block: magnitudes, scales, and E4M3 codes of quotients. Used by fp8_block_tile.cuh, whose kernels read a matrix
// or compute one elementwise, and by sm90_block_codes.cuh, behind a GEMM. All of them make the same codes, bit for bit.
//
// An element is x / s, rounded to F32, then to E4M3. Elements of 16 bits are multiplied by two parts of 1 / s instead. Only
// quotients next to the middle m of two codes can round to the wrong one, and s is the rounded amax / 448, so that x / s is
// near m only where x / amax = m / 448 exactly: other quotients of numbers of 8 or 11 bits are at least 2^-17 of m away. There
// x / s = m / (1 + e) with s = amax / 448 (1 + e), and the definition rounds it to m or to a neighbour. It is 2^-35 of m or more
// away from where that changes, or above it by about 2^-48. The two parts together are above 1 / s by 2^-41 to 2^-39 of it,
// so that the sum of the two products rounds to the same side. The parts are not negative, so that -0 stays -0.
//
// An F32 takes the scale's inverse and two corrections: the first leaves an error below one unit in the last place, from
// which the second gives the rounded quotient (Markstein, "IA-64 and Elementary Functions", 2000, 8.3). This needs a
// remainder that is a normal number, and finite x. Tiles with an infinity, a NaN, a scale below 2^-60 or a largest magnitude
// from 2^100 on divide instead.
//
// Defines: TYPE, of the elements: DW_ELEMENT_F32, DW_ELEMENT_BF16 or DW_ELEMENT_F16.
#ifndef DW_FP8_BLOCK_QUOTIENT_CUH
#define DW_FP8_BLOCK_QUOTIENT_CUH

#include "tensor_types.cuh"

typedef unsigned short uint16;

#define IS_F32 (TYPE == DW_ELEMENT_F32)
#define INFINITE 0x7f800000u

// ---- magnitudes ---------------------------------------------------------------------------------------------
//
// Magnitudes of the elements of a word: one of 32 bits, or two of 16. As integers they have the order of the numbers, with
// infinity above all numbers and NaN above infinity.

DEVICE unsigned magnitudes(unsigned word) { return word & (IS_F32 ? 0x7fffffffu : 0x7fff7fffu); }

DEVICE unsigned larger(unsigned a, unsigned b) {
    if constexpr (IS_F32) return max(a, b);
    asm("max.s16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}

// The larger one of a word's, in its own bits.
DEVICE unsigned largest_of(unsigned word) { return IS_F32 ? word : max(word & 0xffffu, word >> 16); }

// An F32's bits of such a magnitude.
DEVICE unsigned widened(unsigned bits) {
    if constexpr (IS_F32) return bits;
    return TYPE == DW_ELEMENT_F16 ? __float_as_uint(f16_to_float((uint16)bits)) : bits << 16;
}

// ---- scales -------------------------------------------------------------------------------------------------

// A block's scale, and what its elements are divided by. `most`: bits of the block's largest magnitude; a NaN's are above
// infinity's. A scale of 0 gives zeros.
struct block_scale {
    float scale, divisor;
};
// Numbers of 8 or 11 bits are divided by a product in F64: a seventh of one is exact, or its bits have a period of three, so
// that the product's error of 2^-53 doesn't change how it rounds to F32, a subnormal one included.
DEVICE float amax_over_448(unsigned most) {
    if constexpr (IS_F32) return __uint_as_float(most) / 448.f;
    return (float)((double)__uint_as_float(most) * (1.0 / 448.0));
}
DEVICE block_scale scale_of(unsigned most) {
    const float scale = most > INFINITE    ? __uint_as_float(0x7fc00000u)
                        : most == INFINITE ? 1.329227996e36f // 2^120
                                           : amax_over_448(most);
    return {scale, most == 0 ? 1.f : scale == 0.f ? __uint_as_float(INFINITE) : scale};
}

// Quotients need division.
DEVICE bool is_special(unsigned most) {
    return most != 0 && (most >= 0x71800000u /* 2^100 */ || __uint_as_float(most) < 448.f * 8.6736174e-19f); // 2^-60
}

// Quotients are computed from these factors: two parts of the divisor's inverse, or in F32 the divisor and its inverse.
// If they are SPECIAL, the divisor alone is used.
struct factors {
    float a, b;
};
template <bool SPECIAL> DEVICE factors factors_of(float divisor) {
    if constexpr (SPECIAL) return {divisor, 0.f};
    if constexpr (IS_F32) return {divisor, 1.f / divisor};
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(divisor));
    const float high = inverse * 0.99999952316f; // 1 - 2^-21, more than the error of the inverse
    return {high, __fmaf_rn(__fmaf_rn(-high, divisor, 1.f), high, high * 9.0949470e-13f)}; // 2^-40
}

// ---- codes --------------------------------------------------------------------------------------------------

template <bool SPECIAL> DEVICE float quotient(float x, const factors &by) {
    if constexpr (SPECIAL) return x / by.a;
    if constexpr (!IS_F32) return __fmaf_rn(x, by.a, __fmul_rn(x, by.b));
    float q = __fmul_rn(x, by.b);
    q = __fmaf_rn(__fmaf_rn(-q, by.a, x), by.b, q);
    q = __fmaf_rn(__fmaf_rn(-q, by.a, x), by.b, q);
    return copysignf(q, x); // the corrections lose the sign of 0
}

// x / divisor of a special block of 16-bit elements, without a call of a function, which division makes: a warpgroup must call
// none while wgmma has its registers. Both are multiplied by a power of two that makes the divisor and each remainder that
// counts normal numbers. The inverse is rounded correctly, because no divisor's bits are all ones, and so is the quotient
// after two corrections, as that of an F32.
DEVICE float special_quotient(float x, float divisor) {
    const float factor = divisor > 1.f ? 5.4210109e-20f : 1.8446744e19f, d = divisor * factor, y = x * factor; // 2^-64, 2^64
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(d));
    inverse = __fmaf_rn(__fmaf_rn(-d, inverse, 1.f), inverse, inverse);
    const float first = __fmul_rn(y, inverse);
    if (fabsf(y) == __uint_as_float(INFINITE)) return first;
    float q = __fmaf_rn(__fmaf_rn(-first, d, y), inverse, first);
    q = __fmaf_rn(__fmaf_rn(-q, d, y), inverse, q);
    return copysignf(q, x);
}

// Two codes, the first in the low byte. Infinities saturate; a NaN's code is 0x7f.
DEVICE unsigned encode(float low, float high) {
    uint16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

#endif
