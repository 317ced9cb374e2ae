// Functions of F32 for activations whose results are rounded to BF16 or F16: few instructions, and relative errors far below
// the 2^-12 of a rounding to F16. Elementwise programs and the epilogues of GEMMs share them.
#ifndef DW_ACTIVATION_CUH
#define DW_ACTIVATION_CUH

#ifndef DEVICE
#define DEVICE static __device__ __forceinline__
#endif

DEVICE float exp2_flushed(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float reciprocal_flushed(float x) { // 0 above 2^126
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#define LOG2_E 1.4426950408889634f
DEVICE float logistic(float exponent) { return reciprocal_flushed(1 + exp2_flushed(exponent)); }
// (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)), here for y = gelu_tanh_argument(x).
#define GELU_TANH_FACTOR (-2 * LOG2_E * 0.79788456080286535588f)
DEVICE float gelu_tanh_share(float x) {
    return logistic(x * (GELU_TANH_FACTOR + GELU_TANH_FACTOR * 0.044715f * (x * x)));
}
// The normal distribution, with a relative error of 2^-17 down to x = -13: exp(-x^2 / 2) times a polynomial in
// t = 1 / (1 + 0.31 |x|), the form of Abramowitz and Stegun 7.1.26, fitted to the least largest relative error. `density`
// is exp(-x^2 / 2).
DEVICE float normal_cdf(float x, float *density) {
    const float t = reciprocal_flushed(1 + 0.31f * fabs(x));
    const float high = 0.1334255040f + t * (0.0157516357f + t * (0.1804449558f - t * 0.0739275143f));
    const float polynomial = t * (0.1238605604f + t * (0.1204425469f + t * high));
    *density = exp2_flushed(-0.5f * LOG2_E * (x * x));
    const float tail = polynomial * *density;
    return x >= 0 ? 1 - tail : tail;
}

#endif
