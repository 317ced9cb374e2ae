/* Vectors of F32 and 32-bit integers, as wide as the instruction set that this translation unit is compiled
 * for. Files in folders called isa/ use them (base/isa.h).
 *
 *   vf  DW_LANES floats    vi  as many int32    vu  as many uint32    vm  one truth value per lane
 *
 * The baseline uses GCC's portable vector extensions. AVX2 and AVX-512 replace the few functions for which
 * one instruction is better. Arithmetic on vf is plain C. */
#ifndef DW_VECTOR_H
#define DW_VECTOR_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define DW_VECTOR_AVX512 1
#define DW_LANES 16
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__)
#define DW_VECTOR_AVX2 1
#define DW_LANES 8
#include <immintrin.h>
#else
#define DW_LANES 4
#endif
#define DW_VECTOR_BYTES (4 * DW_LANES)

typedef float vf __attribute__((vector_size(DW_VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(DW_VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(DW_VECTOR_BYTES)));
typedef double vd __attribute__((vector_size(DW_VECTOR_BYTES))); /* half as many lanes */
#if DW_VECTOR_AVX512
typedef __mmask16 vm;
#else
typedef vi vm; /* a lane is 0 or -1 */
#endif

/* ---- making, loading, storing ---------------------------------------------------------------- */

static inline vf v_set(float x) { return x - (vf){0}; }
static inline vi v_set_int(int32_t x) { return x - (vi){0}; }
static inline vu v_set_uint(uint32_t x) { return x - (vu){0}; }

static inline vf v_load(const float *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}
static inline void v_store(float *p, vf x) { memcpy(p, &x, sizeof x); }

/* Loads the first `count` < DW_LANES lanes. The other lanes are 0, and their memory is not read. */
static inline vf v_load_part(const float *p, int64_t count) {
#if DW_VECTOR_AVX512
    return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), p);
#else
    float lane[DW_LANES] = {0};
    for (int64_t i = 0; i < count; i++) lane[i] = p[i];
    return v_load(lane);
#endif
}
/* The same with `fill` in the other lanes. */
static inline vf v_load_part_or(const float *p, int64_t count, float fill) {
#if DW_VECTOR_AVX512
    return (vf)_mm512_mask_loadu_ps((__m512)v_set(fill), (__mmask16)((1u << count) - 1), p);
#else
    float lane[DW_LANES];
    for (int64_t i = 0; i < DW_LANES; i++) lane[i] = i < count ? p[i] : fill;
    return v_load(lane);
#endif
}
static inline void v_store_part(float *p, vf x, int64_t count) {
#if DW_VECTOR_AVX512
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << count) - 1), (__m512)x);
#else
    float lane[DW_LANES];
    v_store(lane, x);
    for (int64_t i = 0; i < count; i++) p[i] = lane[i];
#endif
}

/* ---- truth values ---------------------------------------------------------------------------- */

#if DW_VECTOR_AVX512
#define DW_V_COMPARE(name, operator, code)                                                         \
    static inline vm name(vf a, vf b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, code); }
#else
#define DW_V_COMPARE(name, operator, code)                                                         \
    static inline vm name(vf a, vf b) { return a operator b; }
#endif
DW_V_COMPARE(v_eq, ==, _CMP_EQ_OQ)
DW_V_COMPARE(v_ne, !=, _CMP_NEQ_UQ)
DW_V_COMPARE(v_lt, <, _CMP_LT_OQ)
DW_V_COMPARE(v_le, <=, _CMP_LE_OQ)
DW_V_COMPARE(v_gt, >, _CMP_GT_OQ)
DW_V_COMPARE(v_ge, >=, _CMP_GE_OQ)
#undef DW_V_COMPARE

/* x in lanes where m is true, else y. */
static inline vf v_select(vm m, vf x, vf y) {
#if DW_VECTOR_AVX512
    return (vf)_mm512_mask_blend_ps(m, (__m512)y, (__m512)x);
#elif DW_VECTOR_AVX2
    return (vf)_mm256_blendv_ps((__m256)y, (__m256)x, (__m256)m);
#else
    return (vf)(((vi)x & m) | ((vi)y & ~m));
#endif
}

static inline int v_any(vm m) {
#if DW_VECTOR_AVX512
    return m != 0;
#elif DW_VECTOR_AVX2
    return _mm256_movemask_ps((__m256)m) != 0;
#else
    int any = 0;
    for (int i = 0; i < DW_LANES; i++) any |= m[i];
    return any != 0;
#endif
}

/* Stores bytes of 0 and 1, one per lane. */
static inline void v_store_mask(uint8_t *p, vm m) {
#if DW_VECTOR_AVX512
    _mm_storeu_si128((__m128i *)p, _mm_maskz_set1_epi8(m, 1));
#else
    typedef int8_t bytes __attribute__((vector_size(DW_LANES)));
    bytes b = __builtin_convertvector(m, bytes) & 1;
    memcpy(p, &b, sizeof b);
#endif
}
static inline vm v_load_mask(const uint8_t *p) {
#if DW_VECTOR_AVX512
    __m128i b = _mm_loadu_si128((const __m128i *)p);
    return _mm_test_epi8_mask(b, b);
#else
    typedef int8_t bytes __attribute__((vector_size(DW_LANES)));
    bytes b;
    memcpy(&b, p, sizeof b);
    return __builtin_convertvector(b, vi) != 0;
#endif
}

/* ---- elementary ------------------------------------------------------------------------------ */

static inline vf v_abs(vf x) { return (vf)((vi)x & 0x7fffffff); }
/* y with its sign bit set in lanes where x is negative (-0 included). */
static inline vf v_with_sign(vf y, vf x) { return (vf)((vu)y | ((vu)x & 0x80000000u)); }

/* Returns b if either is NaN: the rule of the x86 instructions, which the portable form keeps. */
static inline vf v_max(vf a, vf b) {
#if DW_VECTOR_AVX512
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif DW_VECTOR_AVX2
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return v_select(v_gt(a, b), a, b);
#endif
}
static inline vf v_min(vf a, vf b) {
#if DW_VECTOR_AVX512
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif DW_VECTOR_AVX2
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return v_select(v_lt(a, b), a, b);
#endif
}
/* Returns NaN if either is NaN. */
static inline vf v_max_nan(vf a, vf b) { return v_select(v_ne(a, a), a, v_max(a, b)); }
static inline vf v_min_nan(vf a, vf b) { return v_select(v_ne(a, a), a, v_min(a, b)); }

static inline vf v_sqrt(vf x) {
#if DW_VECTOR_AVX512
    return (vf)_mm512_sqrt_ps((__m512)x);
#elif DW_VECTOR_AVX2
    return (vf)_mm256_sqrt_ps((__m256)x);
#else
    for (int i = 0; i < DW_LANES; i++) x[i] = __builtin_sqrtf(x[i]);
    return x;
#endif
}

#endif
