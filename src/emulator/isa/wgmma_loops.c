/* Accumulation of wgmma, vectorised over columns. All of it is exact or truncated as integers are, so every
 * instruction set gives the same bits.
 */
#include "emulator/wgmma_loops.h"
#include "base/isa.h"
#include "base/vector.h"

enum { ROWS = DW__WGMMA_ROWS, COLUMNS = DW__WGMMA_COLUMNS };
#define INLINE static inline __attribute__((always_inline))

typedef int16_t vs __attribute__((vector_size(DW_VECTOR_BYTES)));
typedef int16_t vs_half __attribute__((vector_size(DW_VECTOR_BYTES / 2)));

INLINE vi load(const void *at) {
    vi x;
    memcpy(&x, at, sizeof x);
    return x;
}
INLINE vi chosen(vi where, vi x, vi y) { return (x & where) | (y & ~where); }
INLINE vi greater(vi a, vi b) { return chosen(a > b, a, b); }
INLINE vs greater_short(vs a, vs b) {
#if DW_VECTOR_AVX512
    return (vs)_mm512_max_epi16((__m512i)a, (__m512i)b);
#elif DW_VECTOR_AVX2
    return (vs)_mm256_max_epi16((__m256i)a, (__m256i)b);
#else
    const vs more = a > b;
    return (a & more) | (b & ~more);
#endif
}
INLINE vi widened(const int16_t *at) {
    vs_half x;
    memcpy(&x, at, sizeof x);
    return __builtin_convertvector(x, vi);
}
/* 2^exponent, -126 to 127. */
INLINE vf power_of_two(vi exponent) { return (vf)((vu)(exponent + 127) << 23); }
/* Returns one bit for each lane that is -1. */
INLINE uint32_t bits_of(vi where) {
#if DW_VECTOR_AVX512
    return _mm512_movepi32_mask((__m512i)where);
#elif DW_VECTOR_AVX2
    return (uint32_t)_mm256_movemask_ps((__m256)where);
#else
    uint32_t bits = 0;
    for (int i = 0; i < DW_LANES; i++) bits |= (uint32_t)(where[i] & 1) << i;
    return bits;
#endif
}

static bool decode(const uint32_t *codes, size_t count, const dw__wgmma_format *format,
                   float *values, int16_t *exponents) {
    const int fraction_bits = format->fraction_bits, top = (1 << format->exponent_bits) - 1;
    const int bias = top >> 1, sign_at = format->exponent_bits + fraction_bits;
    const int fraction_mask = (1 << fraction_bits) - 1;
    vi special = v_set_int(0);
    for (size_t i = 0; i < count; i += DW_LANES) {
        const vi code = load(codes + i) >> format->unused, fraction = code & fraction_mask;
        const vi field = code >> fraction_bits & top, subnormal = field == 0;
        const vi magnitude = fraction | (~subnormal & (1 << fraction_bits));
        const vi exponent = field - bias - subnormal;
        special |=
            (field == top) & (format->finite_top ? fraction == fraction_mask : v_set_int(-1));
        const vs_half kept = __builtin_convertvector(
            chosen(magnitude == 0, v_set_int(DW__WGMMA_NONE), exponent), vs_half);
        memcpy(exponents + i, &kept, sizeof kept);
        /* Shifted so that the exponents are at F32's position. */
        vu bits = (vu)code << (23 - fraction_bits);
        if (format->exponent_bits < 8)
            bits = (vu)(__builtin_convertvector(magnitude, vf) *
                        power_of_two(exponent - fraction_bits)) |
                   (vu)(code >> sign_at & 1) << 31;
        v_store(values + i, (vf)bits);
    }
    return bits_of(special != 0) == 0;
}

/* Computes the greatest exponent among the products of each sum. */
INLINE void find_tops(int depth, const uint32_t *rows, const int16_t *columns, size_t stride,
                      int16_t tops[ROWS][COLUMNS]) {
    for (int at = 0; at < COLUMNS; at += 2 * DW_LANES) {
        vs top[ROWS];
        for (int r = 0; r < ROWS; r++) top[r] = (vs){0} + 2 * DW__WGMMA_NONE;
        for (int k = 0; k < depth; k++) {
            const vs exponents = (vs)load(columns + (size_t)k * stride + at);
            for (int r = 0; r < ROWS; r++)
                top[r] = greater_short(top[r], exponents + (vs)v_set_uint(rows[r * depth + k]));
        }
        for (int r = 0; r < ROWS; r++) memcpy(&tops[r][at], &top[r], sizeof top[r]);
    }
}

/* Returns the exponent of D's old value, as that of a product. */
INLINE vi exponent_of(vi bits) {
    const vi field = bits >> 23 & 255, zero = (bits & INT32_MAX) == 0;
    return chosen(zero, v_set_int(2 * DW__WGMMA_NONE), greater(field, v_set_int(1)) - 127);
}

/* Adds two halves in units of 2^quantum and truncates the sum to the bits that are kept; sets `large` if there are
 * too many bits. */
INLINE vf cut_off(vu first, vu second, vi quantum, bool narrow, vi *large) {
    const vu sum = first + second;
    const vi sign = (vi)sum >> 31, magnitude = (vi)((sum ^ (vu)sign) - (vu)sign);
    vi bits = (vi) __builtin_convertvector(magnitude, vf);
    *large =
        ((vi)((sum ^ first) & (sum ^ second)) < 0) | (magnitude < 0) | (magnitude > 0x7F000000);
    if (narrow)
        bits &= ~0x3FF; /* 14 of 24 bits */
    else
        /* The conversion rounded up. */
        bits += __builtin_convertvector((vf)bits, vi) > magnitude;
    return (vf)((vi)((vf)bits * power_of_two(quantum)) | (sign & INT32_MIN));
}

INLINE void sums_of(int depth, const float *rows, const uint32_t *row_exponents,
                    const float *columns, const int16_t *exponents, size_t stride, size_t count,
                    bool narrow, float (*d)[COLUMNS], uint32_t *others) {
    const int kept = narrow ? 13 : 25;
    int16_t tops[ROWS][COLUMNS];
    find_tops(depth, row_exponents, exponents, stride, tops);
    for (int r = 0; r < ROWS; r++) others[r] = 0;
    for (size_t at = 0; at < count; at += DW_LANES) {
        vi top[ROWS], left[ROWS];
        vu sum[ROWS], half[ROWS];
        vf scale[ROWS];
        for (int r = 0; r < ROWS; r++) {
            const vf begin = v_load(&d[r][at]);
            const vi all = greater(widened(&tops[r][at]), exponent_of((vi)begin));
            top[r] = greater(all, v_set_int(DW__WGMMA_LEAST));
            /* Below the least exponent all terms are zeros, or the column is left to dw__wgmma_sum. */
            left[r] = (((vi)begin >> 23 & 255) == 255) | (all > DW__WGMMA_GREATEST) |
                      ((all < DW__WGMMA_LEAST) & (all > DW__WGMMA_NONE / 2));
            scale[r] = power_of_two(kept - top[r]);
            sum[r] = (vu) __builtin_convertvector(begin * scale[r], vi);
            half[r] = v_set_uint(0);
        }
        for (int k = 0; k < depth; k++) {
            const vf column = v_load(columns + (size_t)k * stride + at);
            if (k == 8 && depth == 16) /* more than 8 terms of 27 bits may overflow */
                for (int r = 0; r < ROWS; r++) half[r] = sum[r], sum[r] = v_set_uint(0);
            for (int r = 0; r < ROWS; r++)
                sum[r] += (vu) __builtin_convertvector(rows[r * depth + k] * column * scale[r], vi);
        }
        for (int r = 0; r < ROWS; r++) {
            vi large;
            const vf made = cut_off(half[r], sum[r], top[r] - kept, narrow, &large);
            left[r] |= large;
            v_store(&d[r][at], (vf)chosen(left[r], (vi)v_load(&d[r][at]), (vi)made));
            others[r] |= bits_of(left[r]) << at;
        }
    }
}

/* Dispatches on the depth, so that the loops are unrolled. */
static void sums(int depth, const float *rows, const uint32_t *row_exponents, const float *columns,
                 const int16_t *exponents, size_t stride, size_t count, bool narrow,
                 float (*d)[COLUMNS], uint32_t *others) {
    switch (depth) {
    case 8:
        sums_of(8, rows, row_exponents, columns, exponents, stride, count, false, d, others);
        break;
    case 16:
        sums_of(16, rows, row_exponents, columns, exponents, stride, count, false, d, others);
        break;
    default: sums_of(32, rows, row_exponents, columns, exponents, stride, count, narrow, d, others);
    }
}

const dw__wgmma_loops DW_ISA_NAME(dw__wgmma_loops) = {.decode = decode, .sums = sums};
