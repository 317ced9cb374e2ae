/* Vector functions (base/vector.h) for elementwise loops. Everything is inline, so that a loop keeps its
 * constants in registers. a * b + c is contracted in these files.
 *
 * Accuracy: tests/c/test_vector_math.c sweeps the floats against double precision and limits the error of
 * each function, in units in the last place:
 *   exp 1.1  log 1.1  log1p 2.0  tanh 1.6  erf 1.5  sigmoid 2.0  sin, cos, pow 0.6  rsqrt 1.5
 * Zeros, infinities, NaN, subnormal arguments and results, and overflow behave as in C's math library.
 * Polynomials are our own minimax fits over the interval named beside each. */
#ifndef DW_VECTOR_MATH_H
#define DW_VECTOR_MATH_H

#include "base/vector.h"
#include <math.h>

static inline vf v_reciprocal(vf x) { return v_set(1.0f) / x; }
static inline vf v_rsqrt(vf x) { return v_set(1.0f) / v_sqrt(x); }

/* Rounds to the nearest integer, halves to even. */
static inline vf v_round(vf x) {
#if DW_VECTOR_AVX512
    return (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif DW_VECTOR_AVX2
    return (vf)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    for (int i = 0; i < DW_LANES; i++) x[i] = __builtin_rintf(x[i]);
    return x;
#endif
}
/* The same, only for |x| < 2^22, with two additions. */
static inline vf v_round_small(vf x) {
#if DW_VECTOR_AVX512 || DW_VECTOR_AVX2
    return v_round(x);
#else
    vf magic = v_set(0x1.8p23f);
    return (x + magic) - magic;
#endif
}
static inline vf v_floor(vf x) {
#if DW_VECTOR_AVX512
    return (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#elif DW_VECTOR_AVX2
    return (vf)_mm256_floor_ps((__m256)x);
#else
    for (int i = 0; i < DW_LANES; i++) x[i] = __builtin_floorf(x[i]);
    return x;
#endif
}
static inline vf v_ceil(vf x) { return -v_floor(-x); }

/* Widen to double: lanes 0 .. DW_LANES/2-1, and the rest. */
static inline vd v_widen_low(vf x) {
#if DW_VECTOR_AVX512
    return (vd)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x));
#elif DW_VECTOR_AVX2
    return (vd)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x));
#else
    return (vd){x[0], x[1]};
#endif
}
static inline vd v_widen_high(vf x) {
#if DW_VECTOR_AVX512
    return (vd)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)x, 1));
#elif DW_VECTOR_AVX2
    return (vd)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1));
#else
    return (vd){x[2], x[3]};
#endif
}
static inline vf v_narrow(vd low, vd high) {
#if DW_VECTOR_AVX512
    return (vf)_mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps((__m512d)low)),
                                  _mm512_cvtpd_ps((__m512d)high), 1);
#elif DW_VECTOR_AVX2
    return (vf)_mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps((__m256d)low)),
                                    _mm256_cvtpd_ps((__m256d)high), 1);
#else
    return (vf){(float)low[0], (float)low[1], (float)high[0], (float)high[1]};
#endif
}

/* ---- sums over lanes, in a fixed order ------------------------------------------------------- */

static inline double v_sum(vf x) {
    double sum = 0.0;
    for (int i = 0; i < DW_LANES; i++) sum += (double)x[i];
    return sum;
}
/* Returns NaN if any lane is NaN. */
static inline float v_max_lane(vf x) {
    float max = x[0];
    for (int i = 1; i < DW_LANES; i++) max = x[i] > max || x[i] != x[i] ? x[i] : max;
    return max;
}

/* ---- exp and its family ---------------------------------------------------------------------- */

/* p * 2^n for an integral n in [-200, 200], rounded once. */
static inline vf v_scale(vf p, vf n) {
#if DW_VECTOR_AVX512
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    vi whole = __builtin_convertvector(n, vi);
    vi half = whole >> 1;
    vf first = (vf)((vu)(half + 127) << 23);
    vf second = (vf)((vu)(whole - half + 127) << 23);
    return p * first * second;
#endif
}

/* x = n ln 2 + r, |r| <= ln 2 / 2; e^r = 1 + r + r^2 P(r), P minimax there (relative 3e-9). */
static inline vf v_exp(vf x) {
    /* Beyond these limits the result is 0 or infinite. The order of operands propagates a NaN x. */
    vf t = v_min(v_set(89.0f), v_max(v_set(-104.0f), x));
    vf n = v_round_small(t * 0x1.715476p+0f);
    vf r = t - n * 0x1.62e4p-1f; /* 17 bits of ln 2: an exact product */
    r = r - n * 0x1.7f7d1cp-20f;
    vf p = v_set(1.381459848e-03f);
    p = p * r + 8.368716887e-03f;
    p = p * r + 4.166838805e-02f;
    p = p * r + 1.666652063e-01f;
    p = p * r + 4.999999345e-01f;
    p = (p * r) * r + r + 1.0f;
    return v_scale(p, n);
}

/* s = 1 / (1 + e^-x) and s (1 - s), both without a difference: e^-|x| does not overflow, and one division
 * serves both signs. */
static inline vf v_sigmoid_and_slope(vf x, vf *slope) {
    vf e = v_exp(-v_abs(x));
    vf above = 1.0f / (e + 1.0f), below = e * above;
    *slope = above * below;
    return v_select(v_lt(x, v_set(0.0f)), below, above);
}
static inline vf v_sigmoid(vf x) {
    vf e = v_exp(-v_abs(x));
    return v_select(v_lt(x, v_set(0.0f)), e, v_set(1.0f)) / (e + 1.0f);
}

/* |x| < 0.625: x + x^3 P(x^2); else 1 - 2 / (e^2|x| + 1). */
static inline vf v_tanh(vf x) {
    vf a = v_abs(x);
    vf z = x * x;
    vf p = v_set(-5.717044954e-03f);
    p = p * z + 2.065058722e-02f;
    p = p * z + -5.374349806e-02f;
    p = p * z + 1.333149129e-01f;
    p = p * z + -3.333328393e-01f;
    p = (p * z) * x + x;
    vf large = 1.0f - 2.0f / (v_exp(a + a) + 1.0f);
    return v_with_sign(v_select(v_lt(a, v_set(0.625f)), p, large), x);
}

/* |x| < 0.92: x + x P(x^2); else 1 - e^-Q(|x|), Q a fit of -log erfc on [0.9, 3.95]. */
static inline vf v_erf(vf x) {
    vf a = v_abs(x);
    vf z = x * x;
    vf p = v_set(8.345227644e-05f);
    p = p * z + -8.137438276e-04f;
    p = p * z + 5.200634375e-03f;
    p = p * z + -2.685927082e-02f;
    p = p * z + 1.128369394e-01f;
    p = p * z + -3.761263370e-01f;
    p = p * z + 1.283791666e-01f;
    p = p * x + x;
    vf t = v_min(v_set(3.95f), a); /* from here on erf rounds to 1 */
    vf q = v_set(2.090946287e-05f);
    q = q * t + -4.323019956e-04f;
    q = q * t + 4.160522395e-03f;
    q = q * t + -2.509148541e-02f;
    q = q * t + 1.082366029e-01f;
    q = q * t + 6.333866606e-01f;
    q = q * t + 1.129495153e+00f;
    q = q * t + -1.705507655e-04f;
    vf large = 1.0f - v_exp(-q);
    return v_with_sign(v_select(v_lt(a, v_set(0.92f)), p, large), x);
}

/* ---- logarithms ------------------------------------------------------------------------------ */

/* x = 2^k (1 + f), 1 + f in [sqrt(1/2), sqrt 2); log(1 + f) = f - f^2/2 + f^3 P(f). */
static inline vf v_log(vf x) {
    vm tiny = v_lt(x, v_set(0x1p-126f));
    vf scaled = v_select(tiny, x * 0x1p23f, x);
    vf bias = v_select(tiny, v_set(-23.0f), v_set(0.0f));
    /* Subtracting the bits of sqrt(1/2) makes the exponent field change exactly at sqrt(1/2). */
    vi bits = (vi)((vu)scaled - 0x3f3504f3u); /* may wrap for x < 0 */
    vf k = __builtin_convertvector(bits >> 23, vf) + bias;
    vf f = (vf)((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
    vf p = v_set(6.746640333e-02f);
    p = p * f + -1.167565177e-01f;
    p = p * f + 1.188816232e-01f;
    p = p * f + -1.240558893e-01f;
    p = p * f + 1.421955235e-01f;
    p = p * f + -1.666799585e-01f;
    p = p * f + 2.000211866e-01f;
    p = p * f + -2.500000960e-01f;
    p = p * f + 3.333331260e-01f;
    vf z = f * f;
    vf y = (p * f) * z + k * -2.12194440e-4f; /* ln 2 = 0.693359375 - 2.1219444e-4 */
    y = y - 0.5f * z;
    y = (f + y) + k * 0.693359375f;
    /* log 0 = -inf; negative or NaN: NaN; +inf: itself */
    y = v_select(v_eq(x, v_set(0.0f)), v_set(-INFINITY), y);
    y = v_select(v_ge(x, v_set(0.0f)), y, v_set(NAN));
    return v_select(v_eq(x, v_set(INFINITY)), x, y);
}

/* Corrects log(u), u = 1 + x, for the rounding of u: log(1 + x) = log(u) + (x - (u - 1)) / u. */
static inline vf v_log1p(vf x) {
    vf u = 1.0f + x;
    vf lost = x - (u - 1.0f);
    vf y = v_log(u) + lost / u;
    /* For small |x|: x - x^2/2 is exact to rounding and keeps the sign of zero. At the infinities and at -1
     * the correction is NaN, and log(u) alone is right. */
    y = v_select(v_lt(v_abs(x), v_set(0x1p-12f)), x - (0.5f * x) * x, y);
    vm edge_low = v_eq(u, v_set(0.0f)), edge_high = v_eq(u, v_set(INFINITY));
    y = v_select(edge_low, v_set(-INFINITY), y);
    return v_select(edge_high, v_set(INFINITY), y);
}

/* ---- sine, cosine and powers: computed in double for precision ------------------------------- */

#if DW_VECTOR_AVX512
#define DW_V_ROUND_DOUBLE(x)                                                                       \
    (vd) _mm512_roundscale_pd((__m512d)(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#elif DW_VECTOR_AVX2
#define DW_V_ROUND_DOUBLE(x)                                                                       \
    (vd) _mm256_round_pd((__m256d)(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#else
#define DW_V_ROUND_DOUBLE(x) (((x) + 0x1.8p52) - 0x1.8p52)
#endif
typedef int64_t vl __attribute__((vector_size(DW_VECTOR_BYTES)));
typedef uint64_t vw __attribute__((vector_size(DW_VECTOR_BYTES)));

/* Converts an integral double of magnitude below 2^51 to an integer through the bits of 1.5 * 2^52 + n. */
static inline vl v_integer_double(vd n) { return (vl)((vw)(n + 0x1.8p52) - 0x4338000000000000u); }

/* sin(x + quadrant * pi/2) for |x| <= 2^22: r = x - n pi/2 in [-pi/4, pi/4], to 1e-14. */
static inline vd v_sin_double(vd x, int64_t quadrant) {
    vd n = DW_V_ROUND_DOUBLE(x * 0x1.45f306dc9c883p-1);
    vd r = x - n * 0x1.921fb544p+0; /* 31 bits of pi/2: exact product */
    r = r - n * 0x1.0b4611a626331p-34;
    vl q = v_integer_double(n) + quadrant;
    vd z = r * r;
    vd s = -2.47616327519766985e-08 * z + 2.75553574311451322e-06;
    s = s * z + -1.98412638211909072e-04;
    s = s * z + 8.33333332526829500e-03;
    s = s * z + -1.66666666666315716e-01;
    s = (s * z) * r + r;
    vd c = -2.72101693675793281e-07 * z + 2.47995191921674699e-05;
    c = c * z + -1.38888837503617748e-03;
    c = c * z + 4.16666666227932525e-02;
    c = (c * z) * z + (1.0 - 0.5 * z);
    vl odd = -(q & 1);
    vl bits = ((vl)c & odd) | ((vl)s & ~odd);
    return (vd)((vw)bits ^ (((vw)q & 2) << 62));
}

static inline vf v_sin_quadrant(vf x, int64_t quadrant) {
    if (v_any(v_gt(v_abs(x), v_set(0x1p22f)))) {
        vf y = x;
        for (int i = 0; i < DW_LANES; i++) y[i] = quadrant ? cosf(x[i]) : sinf(x[i]);
        return y;
    }
    return v_narrow(v_sin_double(v_widen_low(x), quadrant),
                    v_sin_double(v_widen_high(x), quadrant));
}
static inline vf v_sin(vf x) {
    /* keeps -0, which the sum in the reduction would lose */
    return v_select(v_eq(x, v_set(0.0f)), x, v_sin_quadrant(x, 0));
}
static inline vf v_cos(vf x) { return v_sin_quadrant(x, 1); }

/* x^y for normal x > 0 and y with |y log2 x| < 150: log x = k ln 2 + 2 atanh(s),
 * s = (m-1)/(m+1). */
static inline vd v_pow_double(vd x, vd y) {
    vl bits = (vl)x - 0x3fe6a09e667f3bcd; /* sqrt(1/2) */
    vl exponent = bits >> 52;
    vd m = (vd)((bits & 0x000fffffffffffff) + 0x3fe6a09e667f3bcd);
    vd k = (vd)(exponent + 0x4338000000000000) - 0x1.8p52;
    vd s = (m - 1.0) / (m + 1.0), z = s * s;
    vd p = z * (1.0 / 15) + 1.0 / 13; /* the series: |s| <= 0.172, the next term is below 1e-13 */
    p = p * z + 1.0 / 11;
    p = p * z + 1.0 / 9;
    p = p * z + 1.0 / 7;
    p = p * z + 1.0 / 5;
    p = p * z + 1.0 / 3;
    vd log2x = k + (2.0 * s * (p * z + 1.0)) * 0x1.71547652b82fep+0;
    vd t = y * log2x;
    vd n = DW_V_ROUND_DOUBLE(t);
    vd r = (t - n) * 0x1.62e42fefa39efp-1;
    vd e = r * (1.0 / 3628800) + 1.0 / 362880; /* Taylor to r^10 / 10!, |r| <= 0.35 */
    e = e * r + 1.0 / 40320;
    e = e * r + 1.0 / 5040;
    e = e * r + 1.0 / 720;
    e = e * r + 1.0 / 120;
    e = e * r + 1.0 / 24;
    e = e * r + 1.0 / 6;
    e = e * r + 0.5;
    e = e * r + 1.0;
    e = e * r + 1.0;
    return (vd)((vw)e + ((vw)v_integer_double(n) << 52));
}

/* The vector path handles normal positive x and results far from overflow. Otherwise C's powf computes the result. */
static inline vf v_pow(vf x, vf y) {
    vf a = v_abs(y);
    vm plain_x = v_ge(x, v_set(0x1p-120f)), small_x = v_le(x, v_set(0x1p120f));
    vf ok = v_select(plain_x, v_select(small_x, v_set(1.0f), v_set(0.0f)), v_set(0.0f));
    /* |exponent + 0.5| + 0.5 bounds |log2 x|, so `reach` bounds |y log2 x|. */
    vi exponent = (((vi)x >> 23) & 255) - 127;
    vf reach = (__builtin_convertvector(exponent, vf) + 0.5f);
    reach = (v_abs(reach) + 0.5f) * a;
    ok = v_select(v_lt(reach, v_set(125.0f)), ok, v_set(0.0f));
    if (v_any(v_eq(ok, v_set(0.0f)))) {
        vf z = x;
        for (int i = 0; i < DW_LANES; i++) z[i] = powf(x[i], y[i]);
        return z;
    }
    return v_narrow(v_pow_double(v_widen_low(x), v_widen_low(y)),
                    v_pow_double(v_widen_high(x), v_widen_high(y)));
}

/* ---- 32-bit multiplication, for random numbers ----------------------------------------------- */

/* Returns the upper halves of the products x[i] * factor and stores the lower halves in `low`. */
static inline vu v_multiply_wide(vu x, uint32_t factor, vu *low) {
#if DW_VECTOR_AVX512
    __m512i f = _mm512_set1_epi32((int)factor), a = (__m512i)x;
    __m512i even = _mm512_mul_epu32(a, f), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), f);
    *low = (vu)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
    return (vu)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
#elif DW_VECTOR_AVX2
    __m256i f = _mm256_set1_epi32((int)factor), a = (__m256i)x;
    __m256i even = _mm256_mul_epu32(a, f), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), f);
    *low = (vu)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    return (vu)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
#else
    vu high;
    for (int i = 0; i < DW_LANES; i++) {
        uint64_t product = (uint64_t)x[i] * factor;
        (*low)[i] = (uint32_t)product;
        high[i] = (uint32_t)(product >> 32);
    }
    return high;
#endif
}

/* out[4 i + w] = x_w[i] */
static inline void v_store_interleaved(uint32_t *out, vu x0, vu x1, vu x2, vu x3) {
#if DW_VECTOR_AVX512 || DW_VECTOR_AVX2
#if DW_VECTOR_AVX512
#define DW_UNPACK(half, bits, a, b) (vu) _mm512_unpack##half##_epi##bits((__m512i)(a), (__m512i)(b))
#else
#define DW_UNPACK(half, bits, a, b) (vu) _mm256_unpack##half##_epi##bits((__m256i)(a), (__m256i)(b))
#endif
    vu low01 = DW_UNPACK(lo, 32, x0, x1), low23 = DW_UNPACK(lo, 32, x2, x3);
    vu high01 = DW_UNPACK(hi, 32, x0, x1), high23 = DW_UNPACK(hi, 32, x2, x3);
    /* 128-bit lane l of quads[k] holds the four words of i = 4 l + k. */
    vu quads[4] = {DW_UNPACK(lo, 64, low01, low23), DW_UNPACK(hi, 64, low01, low23),
                   DW_UNPACK(lo, 64, high01, high23), DW_UNPACK(hi, 64, high01, high23)};
#undef DW_UNPACK
    for (int l = 0; l < DW_LANES / 4; l++)
        for (int k = 0; k < 4; k++)
            memcpy(out + 16 * l + 4 * k, (const char *)&quads[k] + 16 * l, 16);
#else
    for (int i = 0; i < DW_LANES; i++) {
        out[4 * i] = x0[i];
        out[4 * i + 1] = x1[i];
        out[4 * i + 2] = x2[i];
        out[4 * i + 3] = x3[i];
    }
#endif
}

/* ---- activations ----------------------------------------------------------------------------- */

static inline vf v_silu(vf x) { return x * v_sigmoid(x); }
/* d/dx x s(x) = s + x s (1 - s) */
static inline vf v_silu_slope(vf x) {
    vf slope, s = v_sigmoid_and_slope(x, &slope);
    return s + x * slope;
}

/* Hendrycks and Gimpel 2016: 0.5 x (1 + tanh u) = x sigmoid(2u),
 * u = sqrt(2/pi) (x + 0.044715 x^3). */
static inline vf v_gelu_tanh(vf x) {
    vf z = x * x;
    vf u2 = x * (z * 0.07135481282f + 1.595769122f);
    return x / (v_exp(-u2) + 1.0f);
}
static inline vf v_gelu_tanh_slope(vf x) {
    vf z = x * x, slope;
    vf s = v_sigmoid_and_slope(x * (z * 0.07135481282f + 1.595769122f), &slope);
    vf inner =
        /* x * du2/dx; it must not be infinite if the slope is 0 */
        x * (z * 0.2140644385f + 1.595769122f);
    return s + v_min(v_set(1e30f), v_max(v_set(-1e30f), inner)) * slope;
}
/* x Phi(x), Phi the normal distribution's. */
static inline vf v_gelu(vf x) { return (0.5f * x) * (v_erf(x * 0.7071067812f) + 1.0f); }
static inline vf v_gelu_slope(vf x) {
    vf phi = v_exp(-0.5f * (x * x)) * 0.3989422804f;
    return 0.5f * (v_erf(x * 0.7071067812f) + 1.0f) + x * phi;
}

#endif
