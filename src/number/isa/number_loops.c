/* Inner loops of number formats. They use only integer arithmetic, exact floating-point operations and single
 * IEEE operations, so every instruction set gives the same bits (this folder is compiled without
 * contraction).
 *
 * Codes are computed in groups of sixteen: as many vectors as a group needs, then one store of bytes. */
#include "number/number_loops.h"
#include "base/transpose.h"
#include "base/vector.h"
#include "number/isa/philox_lanes.h"
#include <float.h>
#include <math.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

enum { F32_FRACTION = 23, F32_BIAS = 127, GROUP = 16, VECTORS = GROUP / DW_LANES };
#define SIGN 0x80000000u
#define INFINITE 0x7F800000u
#define NOT_A_NUMBER 0x7FC00000u

/* The fields of a byte format. Callers pass constants. */
typedef struct fields {
    uint32_t sign;
    int fraction, bias;
    uint32_t largest, overflow, nan;
    bool signed_nan;
} fields;
static const fields fields_E4M3 = {0x80, 3, 7, 0x7E, 0x7F, 0x7F, true};
static const fields fields_E5M2 = {0x80, 2, 15, 0x7B, 0x7C, 0x7F, true};
static const fields fields_E3M2 = {0x20, 2, 3, 0x1F, 0x1F, 0x1F, false};
static const fields fields_E2M3 = {0x20, 3, 1, 0x1F, 0x1F, 0x1F, false};
static const fields fields_E2M1 = {0x8, 1, 1, 0x7, 0x7, 0x7, false};
#define BYTE_FORMATS(X) X(E4M3) X(E5M2) X(E3M2) X(E2M3) X(E2M1)

DW_INLINE uint32_t least_normal(fields f) {
    return (uint32_t)(F32_BIAS - f.bias + 1) << F32_FRACTION;
}
/* The format's largest number as F32 bits. */
DW_INLINE uint32_t largest_bits(fields f) {
    return (f.largest << (F32_FRACTION - f.fraction)) +
           ((uint32_t)(F32_BIAS - f.bias) << F32_FRACTION);
}

/* ---- vectors --------------------------------------------------------------------------------- */

/* Minimum of numbers below 2^31. */
DW_INLINE vu min_u(vu a, vu b) {
#if DW_VECTOR_AVX512
    return (vu)_mm512_min_epu32((__m512i)a, (__m512i)b);
#elif DW_VECTOR_AVX2
    return (vu)_mm256_min_epu32((__m256i)a, (__m256i)b);
#else
    vu less = (vu)((vi)a < (vi)b);
    return (a & less) | (b & ~less);
#endif
}
DW_INLINE vu max_u(vu a, vu b) {
#if DW_VECTOR_AVX512
    return (vu)_mm512_max_epu32((__m512i)a, (__m512i)b);
#elif DW_VECTOR_AVX2
    return (vu)_mm256_max_epu32((__m256i)a, (__m256i)b);
#else
    vu less = (vu)((vi)a < (vi)b);
    return (b & less) | (a & ~less);
#endif
}
/* `yes` in lanes where the mask is all ones, `no` where it is 0. */
DW_INLINE vu select_u(vu mask, vu yes, vu no) { return (yes & mask) | (no & ~mask); }
DW_INLINE vu above(vu a, uint32_t b) { return (vu)((vi)a > (vi)v_set_uint(b)); } /* below 2^31 */

DW_INLINE vu load_u(const void *p) {
    vu x;
    memcpy(&x, p, sizeof x);
    return x;
}

typedef struct group {
    vu v[VECTORS];
} group;

/* Stores the low byte of each lane and ignores the other bits. */
DW_INLINE void store_bytes(group g, uint8_t *to) {
#if DW_VECTOR_AVX512
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)g.v[0]));
#elif DW_VECTOR_AVX2
    __m256i mask = _mm256_set1_epi32(0xFF);
    __m256i halves = _mm256_packus_epi32(_mm256_and_si256((__m256i)g.v[0], mask),
                                         _mm256_and_si256((__m256i)g.v[1], mask));
    halves = _mm256_permute4x64_epi64(halves, 0xD8); /* packing works within 128 bits */
    __m128i bytes =
        _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    _mm_storeu_si128((__m128i *)to, bytes);
#elif defined(__SSE2__)
    __m128i v[VECTORS];
    for (int i = 0; i < VECTORS; i++) v[i] = _mm_and_si128((__m128i)g.v[i], _mm_set1_epi32(0xFF));
    _mm_storeu_si128((__m128i *)to,
                     _mm_packus_epi16(_mm_packs_epi32(v[0], v[1]), _mm_packs_epi32(v[2], v[3])));
#else
    for (int i = 0; i < GROUP; i++) to[i] = (uint8_t)g.v[i / DW_LANES][i % DW_LANES];
#endif
}

DW_INLINE group load_bytes(const uint8_t *from) {
    group g;
#if DW_VECTOR_AVX512
    g.v[0] = (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif DW_VECTOR_AVX2
    for (int i = 0; i < VECTORS; i++)
        g.v[i] = (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(from + i * DW_LANES)));
#else
    for (int i = 0; i < GROUP; i++) g.v[i / DW_LANES][i % DW_LANES] = from[i];
#endif
    return g;
}

/* ---- magnitudes ------------------------------------------------------------------------------ */

DW_INLINE uint32_t most_of(vu x) {
#if DW_VECTOR_AVX512
    return _mm512_reduce_max_epu32((__m512i)x);
#else
    uint32_t most = 0;
    for (int i = 0; i < DW_LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
#endif
}

DW_INLINE uint32_t block_amax(const float *x, int64_t count) {
    vu most = v_set_uint(0);
    int64_t i = 0;
    for (; i + DW_LANES <= count; i += DW_LANES) most = max_u(most, load_u(x + i) & ~SIGN);
    uint32_t result = most_of(most);
    for (; i < count; i++) {
        uint32_t magnitude = dw__f32_bits(x[i]) & ~SIGN;
        result = magnitude > result ? magnitude : result;
    }
    return result;
}

static void amax(const float *x, int64_t count, int64_t block, uint32_t *most) {
    int64_t done = 0;
    if (block == 32) {
        for (; done + 32 <= count; done += 32) *most++ = block_amax(x + done, 32);
    } else if (block == 16) {
        for (; done + 16 <= count; done += 16) *most++ = block_amax(x + done, 16);
    }
    for (; done < count; done += block)
        *most++ = block_amax(x + done, count - done < block ? count - done : block);
}

static uint32_t finite_amax(const float *x, int64_t count) {
    vu most = v_set_uint(0);
    int64_t i = 0;
    for (; i + DW_LANES <= count; i += DW_LANES) {
        vu magnitude = load_u(x + i) & ~SIGN;
        most = max_u(most, magnitude & ~above(magnitude, INFINITE - 1));
    }
    uint32_t result = most_of(most);
    for (; i < count; i++) {
        uint32_t magnitude = dw__f32_bits(x[i]) & ~SIGN;
        if (magnitude < INFINITE && magnitude > result) result = magnitude;
    }
    return result;
}

/* ---- encoding -------------------------------------------------------------------------------- */

/* The code of a magnitude below twice the format's range, in the low byte. The function adds the power of two
 * whose ulp is the quantum of the magnitude's binade (of the lowest normal binade for subnormals). The sum is
 * rounded to that quantum, and its low bits count quanta; the hidden bit of a normal number among them adds
 * one to the exponent field. The power of two itself does not affect the low byte. */
DW_INLINE vu nearest(fields f, vu magnitude) {
    const int shift = F32_FRACTION - f.fraction;
    vu binade = max_u(magnitude & INFINITE, v_set_uint(least_normal(f)));
    vu anchor = binade + ((uint32_t)shift << F32_FRACTION);
    vu sum = (vu)((vf)magnitude + (vf)anchor);
    return sum + (binade >> shift) - (least_normal(f) >> shift);
}

DW_INLINE vu shift_left(vu x, vu by) {
#if DW_VECTOR_AVX512
    return (vu)_mm512_sllv_epi32((__m512i)x, (__m512i)by);
#elif DW_VECTOR_AVX2
    return (vu)_mm256_sllv_epi32((__m256i)x, (__m256i)by);
#else
    for (int i = 0; i < DW_LANES; i++) x[i] = by[i] < 32 ? x[i] << by[i] : 0;
    return x;
#endif
}
DW_INLINE vu shift_right(vu x, vu by) {
#if DW_VECTOR_AVX512
    return (vu)_mm512_srlv_epi32((__m512i)x, (__m512i)by);
#elif DW_VECTOR_AVX2
    return (vu)_mm256_srlv_epi32((__m256i)x, (__m256i)by);
#else
    for (int i = 0; i < DW_LANES; i++) x[i] = by[i] < 32 ? x[i] >> by[i] : 0;
    return x;
#endif
}

/* As nearest(), with stochastic rounding. The dropped part, in units of 2^-32 of the quantum, plus the random
 * word carries into the code. Shifts by 32 or more give 0, and so do negative shifts, which are large as
 * unsigned numbers. */
DW_INLINE vu stochastic(fields f, vu magnitude, vu word) {
    vu field = magnitude >> F32_FRACTION;
    const uint32_t least = (uint32_t)(F32_BIAS - f.bias + 1);
    vu significand = (magnitude & 0x7FFFFFu) | (above(field, 0) & 0x800000u);
    field = max_u(field, v_set_uint(1));
    vu normal = max_u(field, v_set_uint(least));
    vu shift = normal - field + (uint32_t)(F32_FRACTION - f.fraction);
    /* The left shift drops the kept bits at the top. A shift by more than 32 becomes a right shift. */
    vu share = shift_left(significand, 32 - shift) | shift_right(significand, shift - 32);
    vu kept = shift_right(significand, shift);
    vu carry = (vu)(share > ~word) & 1; /* share + word >= 2^32 */
    return ((normal - least) << f.fraction) + kept + carry;
}

DW_INLINE vu magnitude_code(fields f, vu magnitude, const uint32_t *words) {
    return words ? stochastic(f, magnitude, load_u(words)) : nearest(f, magnitude);
}

DW_INLINE vu sign_code(fields f, vu bits) { return bits >> (31 - __builtin_ctz(f.sign)) & f.sign; }

DW_INLINE vu saturated(fields f, vf x, const uint32_t *words) {
    vu magnitude = min_u((vu)x & ~SIGN, v_set_uint(largest_bits(f)));
    return magnitude_code(f, magnitude, words) | sign_code(f, (vu)x);
}

/* One element of dw_encode. `beyond` is the code of values above the largest number. */
DW_INLINE vu encoded(fields f, vf x, uint32_t beyond, const uint32_t *words) {
    /* Twice the largest number exceeds it after any rounding. */
    const uint32_t enough = largest_bits(f) + (1u << F32_FRACTION);
    vu magnitude = (vu)x & ~SIGN, sign = sign_code(f, (vu)x);
    vu code = magnitude_code(f, min_u(magnitude, v_set_uint(enough)), words) & 0xFF;
    code = sign | select_u(above(code, f.largest), v_set_uint(beyond), code);
    vu nan = f.signed_nan ? f.nan | sign : v_set_uint(f.nan);
    return select_u(above(magnitude, INFINITE), nan, code);
}

/* Loops over `count` elements in groups. `expression` is the code of the vector x, whose random words, if
 * any, are at w. The last elements form a group padded with zeros. */
#define ENCODE_GROUPS(x_at, count, words_at, codes_at, expression)                                 \
    do {                                                                                           \
        const float *x_ = (x_at);                                                                  \
        const uint32_t *words_ = (words_at);                                                       \
        uint8_t *codes_ = (codes_at);                                                              \
        int64_t left_ = (count);                                                                   \
        for (; left_ >= GROUP; left_ -= GROUP, x_ += GROUP, codes_ += GROUP) {                     \
            group g_;                                                                              \
            for (int i_ = 0; i_ < VECTORS; i_++) {                                                 \
                vf x = v_load(x_ + i_ * DW_LANES);                                                 \
                const uint32_t *w = words_ ? words_ + i_ * DW_LANES : NULL;                        \
                g_.v[i_] = (expression);                                                           \
            }                                                                                      \
            store_bytes(g_, codes_);                                                               \
            words_ = words_ ? words_ + GROUP : NULL;                                               \
        }                                                                                          \
        if (left_ > 0) {                                                                           \
            float rest_[GROUP] = {0};                                                              \
            uint32_t rest_words_[GROUP] = {0};                                                     \
            uint8_t rest_codes_[GROUP];                                                            \
            memcpy(rest_, x_, (size_t)left_ * sizeof *x_);                                         \
            if (words_) memcpy(rest_words_, words_, (size_t)left_ * sizeof *words_);               \
            group g_;                                                                              \
            for (int i_ = 0; i_ < VECTORS; i_++) {                                                 \
                vf x = v_load(rest_ + i_ * DW_LANES);                                              \
                const uint32_t *w = words_ ? rest_words_ + i_ * DW_LANES : NULL;                   \
                g_.v[i_] = (expression);                                                           \
            }                                                                                      \
            store_bytes(g_, rest_codes_);                                                          \
            memcpy(codes_, rest_codes_, (size_t)left_);                                            \
        }                                                                                          \
    } while (0)

DW_INLINE void encode_all(fields f, const float *values, int64_t count, dw_overflow overflow,
                          const uint32_t *words, uint8_t *codes) {
    const uint32_t beyond = overflow == DW_OVERFLOW_SATURATE ? f.largest : f.overflow;
    ENCODE_GROUPS(values, count, words, codes, encoded(f, x, beyond, w));
}

DW_INLINE int64_t shorter(int64_t block, int64_t left) { return left < block ? left : block; }

DW_INLINE void scale_all(fields f, const float *values, int64_t count, int64_t block,
                         const float *factors, const uint32_t *words, uint8_t *codes) {
    for (int64_t done = 0; done < count; done += block) {
        vf factor = v_set(*factors++);
        ENCODE_GROUPS(values + done, shorter(block, count - done), words ? words + done : NULL,
                      codes + done, saturated(f, x * factor, w));
    }
}

DW_INLINE void divide_all(const float *values, int64_t count, int64_t block, const float *divisors,
                          const uint32_t *words, uint8_t *codes) {
    for (int64_t done = 0; done < count; done += block) {
        vf divisor = v_set(*divisors++);
        ENCODE_GROUPS(values + done, shorter(block, count - done), words ? words + done : NULL,
                      codes + done, saturated(fields_E4M3, x / divisor, w));
    }
}

static void divide(const float *x, int64_t count, int64_t block, const float *divisors,
                   const uint32_t *words, uint8_t *codes) {
    if (words)
        divide_all(x, count, block, divisors, words, codes);
    else
        divide_all(x, count, block, divisors, NULL, codes);
}

/* ---- scales ---------------------------------------------------------------------------------- */

static void mx_scales(const dw__mx_rule *rule, const uint32_t *most, int64_t blocks, uint8_t *codes,
                      float *factors) {
    const dw__mx_rule r = *rule;
    for (int64_t i = 0; i < blocks; i++) {
        int code = (int)((most[i] + r.add) >> F32_FRACTION) - r.exponent;
        code = code > 0 ? code : 0;
        code = most[i] == INFINITE ? (int)r.for_inf : code;
        code = most[i] > INFINITE ? 0xFF : code;
        codes[i] = (uint8_t)code;
        /* 2^(127 - code). For code 254 and for NaN the result is a subnormal number. */
        factors[i] =
            dw__f32_from_bits(code < 254 ? (uint32_t)(254 - code) << F32_FRACTION : 0x00400000u);
    }
}

/* Encodes and decodes nonnegative E4M3 numbers one at a time. */
static uint32_t encode_scale(float value) {
    const fields f = fields_E4M3;
    const int shift = F32_FRACTION - f.fraction;
    uint32_t magnitude = dw__f32_bits(value);
    magnitude = magnitude < largest_bits(f) ? magnitude : largest_bits(f);
    uint32_t binade = magnitude & INFINITE;
    binade = binade > least_normal(f) ? binade : least_normal(f);
    uint32_t anchor = binade + ((uint32_t)shift << F32_FRACTION);
    uint32_t sum = dw__f32_bits(dw__f32_from_bits(magnitude) + dw__f32_from_bits(anchor));
    return (sum + ((binade - least_normal(f)) >> shift)) & 0xFF;
}
static float decode_scale(uint32_t code) {
    code &= 0x7F;
    float subnormal = (float)(int)code * 0x1p-9f;
    uint32_t normal = (code << 20) + ((uint32_t)(F32_BIAS - 7) << F32_FRACTION);
    return code == 0x7F ? dw__f32_from_bits(NOT_A_NUMBER)
                        : (code < 8 ? subnormal : dw__f32_from_bits(normal));
}

static void nvfp4_scales(float tensor_scale, const uint32_t *most, int64_t blocks, uint8_t *codes,
                         float *factors) {
    const float inverse = 1.0f / tensor_scale;
    for (int64_t i = 0; i < blocks; i++) {
        uint32_t code = encode_scale(dw__f32_from_bits(most[i]) / 6.0f / tensor_scale);
        float factor = inverse / decode_scale(code);
        factor = factor < FLT_MAX ? factor : FLT_MAX;
        factors[i] = code == 0 ? 0.0f : factor;
        codes[i] = (uint8_t)(most[i] >= INFINITE ? 0x7F : code);
    }
}

static void f32_scales(const uint32_t *most, int64_t blocks, float *scales, float *divisors) {
    for (int64_t i = 0; i < blocks; i++) {
        float scale = most[i] == INFINITE ? 0x1p120f : dw__f32_from_bits(most[i]) / 448.0f;
        scales[i] = most[i] > INFINITE ? dw__f32_from_bits(NOT_A_NUMBER) : scale;
        divisors[i] = scale > 0.0f ? scale : INFINITY;
    }
}

static void e8m0_values(const uint8_t *codes, int64_t blocks, float *values) {
    for (int64_t i = 0; i < blocks; i++) {
        uint32_t code = codes[i];
        uint32_t bits = code ? code << F32_FRACTION : 0x00400000u;
        values[i] = dw__f32_from_bits(code == 0xFF ? NOT_A_NUMBER : bits);
    }
}
static void ue4m3_values(const uint8_t *codes, int64_t blocks, float *values) {
    for (int64_t i = 0; i < blocks; i++) values[i] = decode_scale(codes[i]);
}

/* ---- decoding -------------------------------------------------------------------------------- */

DW_INLINE vf decoded(fields f, vu code) {
    vu magnitude = code & (f.sign - 1);
    vu normal = (magnitude << (F32_FRACTION - f.fraction)) +
                ((uint32_t)(F32_BIAS - f.bias) << F32_FRACTION);
    const uint32_t quantum = (uint32_t)(F32_BIAS + 1 - f.bias - f.fraction) << F32_FRACTION;
    vu subnormal = (vu)(__builtin_convertvector((vi)magnitude, vf) * (vf)v_set_uint(quantum));
    vu value = select_u(above(magnitude, (1u << f.fraction) - 1), normal, subnormal);
    if (f.nan > f.largest) {
        value = select_u(above(magnitude, f.largest), v_set_uint(NOT_A_NUMBER), value);
        if (f.overflow != f.nan) {
            vu infinite = (vu)((vi)magnitude == (vi)v_set_uint(f.overflow));
            value = select_u(infinite, v_set_uint(INFINITE), value);
        }
    }
    return (vf)(value | (code & f.sign) << (31 - __builtin_ctz(f.sign)));
}

DW_INLINE void decode_group(fields f, const uint8_t *codes, vf factor, vf outer, float *x) {
    group g = load_bytes(codes);
    for (int i = 0; i < VECTORS; i++)
        v_store(x + i * DW_LANES, decoded(f, g.v[i]) * factor * outer);
}

DW_INLINE void decode_all(fields f, const uint8_t *codes, int64_t count, int64_t block,
                          const float *factors, float beyond, float *x) {
    vf outer = v_set(beyond);
    for (int64_t start = 0; start < count; start += block) {
        vf factor = v_set(*factors++);
        int64_t end = start + shorter(block, count - start), i = start;
        for (; i + GROUP <= end; i += GROUP) decode_group(f, codes + i, factor, outer, x + i);
        if (i == end) continue;
        uint8_t rest[GROUP] = {0};
        float values[GROUP];
        memcpy(rest, codes + i, (size_t)(end - i));
        decode_group(f, rest, factor, outer, values);
        memcpy(x + i, values, (size_t)(end - i) * sizeof *x);
    }
}

/* ---- the formats ----------------------------------------------------------------------------- */

/* Defines each loop with and without random words, and for the block lengths that are used as constants. */
#define DEFINE(format)                                                                             \
    static void encode_##format(const float *x, int64_t count, dw_overflow overflow,               \
                                const uint32_t *words, uint8_t *codes) {                           \
        if (words)                                                                                 \
            encode_all(fields_##format, x, count, overflow, words, codes);                         \
        else                                                                                       \
            encode_all(fields_##format, x, count, overflow, NULL, codes);                          \
    }                                                                                              \
    static void scale_##format(const float *x, int64_t count, int64_t block, const float *factors, \
                               const uint32_t *words, uint8_t *codes) {                            \
        if (words)                                                                                 \
            scale_all(fields_##format, x, count, block, factors, words, codes);                    \
        else if (block == 32)                                                                      \
            scale_all(fields_##format, x, count, 32, factors, NULL, codes);                        \
        else if (block == 16)                                                                      \
            scale_all(fields_##format, x, count, 16, factors, NULL, codes);                        \
        else                                                                                       \
            scale_all(fields_##format, x, count, block, factors, NULL, codes);                     \
    }                                                                                              \
    static void decode_##format(const uint8_t *codes, int64_t count, int64_t block,                \
                                const float *factors, float outer, float *x) {                     \
        decode_all(fields_##format, codes, count, block, factors, outer, x);                       \
    }
BYTE_FORMATS(DEFINE)

/* ---- packing, random words, moving ----------------------------------------------------------- */

static void pack_pairs(const uint8_t *codes, int64_t pairs, uint8_t *packed) {
    for (int64_t i = 0; i < pairs; i++)
        packed[i] = (uint8_t)((codes[2 * i] & 0xF) | codes[2 * i + 1] << 4);
}

static void unpack_pairs(const uint8_t *packed, int64_t pairs, uint8_t *codes) {
    for (int64_t i = 0; i < pairs; i++) {
        codes[2 * i] = packed[i] & 0xF;
        codes[2 * i + 1] = packed[i] >> 4;
    }
}

static void words_of_block(const dw_random *random, uint64_t block, uint32_t out[4]) {
    uint32_t key0 = (uint32_t)random->seed, key1 = (uint32_t)((uint64_t)random->seed >> 32);
    dw__philox_words four =
        dw__philox(dw__philox_counter(random->offset, random->stream, block), key0, key1);
    memcpy(out, four.word, sizeof four.word);
}

static void words(const dw_random *random, uint64_t first, int64_t count, uint32_t *out) {
    enum { BLOCK = 4, AT_ONCE = BLOCK * DW_LANES };
    const int64_t seed[2] = {random->seed, random->offset};
    uint32_t four[BLOCK];
    int64_t done = 0;
    if (first % BLOCK != 0) {
        words_of_block(random, first / BLOCK, four);
        while (done < count && (first + (uint64_t)done) % BLOCK != 0) {
            out[done] = four[(first + (uint64_t)done) % BLOCK];
            done++;
        }
    }
    for (; count - done >= AT_ONCE; done += AT_ONCE) {
        uint64_t blocks[DW_LANES];
        for (int i = 0; i < DW_LANES; i++)
            blocks[i] = (first + (uint64_t)done) / BLOCK + (uint64_t)i;
        vu made[BLOCK];
        dw__philox_lanes(seed, random->stream, blocks, made);
        for (int i = 0; i < DW_LANES; i += BLOCK) /* moves word w of block i to 4 * i + w */
            dw__transpose_quad((const float *)made + i, DW_LANES, (float *)(out + done) + BLOCK * i,
                               BLOCK);
    }
    for (; done < count; done += BLOCK) {
        words_of_block(random, (first + (uint64_t)done) / BLOCK, four);
        memcpy(out + done, four, (size_t)shorter(BLOCK, count - done) * sizeof *four);
    }
}

/* Walks along the rows of the side with the larger stride, because the other side is small and in cache. */
static void transpose(const float *from, int64_t from_stride, int64_t rows, int64_t cols, float *to,
                      int64_t to_stride) {
    int64_t whole_rows = rows / DW_QUAD * DW_QUAD, whole_cols = cols / DW_QUAD * DW_QUAD;
    if (from_stride >= to_stride) {
        for (int64_t i = 0; i < whole_rows; i += DW_QUAD)
            for (int64_t j = 0; j < whole_cols; j += DW_QUAD)
                dw__transpose_quad(from + i * from_stride + j, from_stride, to + j * to_stride + i,
                                   to_stride);
    } else {
        for (int64_t j = 0; j < whole_cols; j += DW_QUAD)
            for (int64_t i = 0; i < whole_rows; i += DW_QUAD)
                dw__transpose_quad(from + i * from_stride + j, from_stride, to + j * to_stride + i,
                                   to_stride);
    }
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = i < whole_rows ? whole_cols : 0; j < cols; j++)
            to[j * to_stride + i] = from[i * from_stride + j];
}

/* Transforms one run. Callers pass a constant `size`. */
DW_INLINE void transform(const float *x, const float *before, const float *after, int size,
                         float scale, float *result) {
    enum { MOST = 128 };
    float values[MOST] = {0};
    for (int i = 0; i < size; i++) values[i] = x[i] * before[i];
    for (int stride = 1; stride < size; stride *= 2) {
        for (int start = 0; start < size; start += 2 * stride) {
            for (int i = start; i < start + stride; i++) {
                float a = values[i], b = values[i + stride];
                values[i] = a + b;
                values[i + stride] = a - b;
            }
        }
    }
    for (int i = 0; i < size; i++) result[i] = values[i] * scale * after[i];
}

static void hadamard(const float *x, const float *before, const float *after, int size, float scale,
                     int64_t count, float *result) {
    enum { USUAL = 16 };
    if (size == USUAL) {
        for (int64_t run = 0; run < count; run++)
            transform(x + run * USUAL, before, after, USUAL, scale, result + run * USUAL);
        return;
    }
    for (int64_t run = 0; run < count; run++)
        transform(x + run * size, before, after, size, scale, result + run * size);
}

#define ENCODE(format) [DW_##format] = encode_##format,
#define DECODE(format) [DW_##format] = decode_##format,
#define SCALE(format) [DW_##format] = scale_##format,
const dw__number_loops DW_ISA_NAME(dw__number_loops) = {
    .amax = amax,
    .finite_amax = finite_amax,
    .mx_scales = mx_scales,
    .nvfp4_scales = nvfp4_scales,
    .f32_scales = f32_scales,
    .scale_values = {[DW_E8M0] = e8m0_values, [DW_UE4M3] = ue4m3_values},
    .encode = {BYTE_FORMATS(ENCODE)},
    .scale = {BYTE_FORMATS(SCALE)},
    .divide = divide,
    .decode = {BYTE_FORMATS(DECODE)},
    .pack_pairs = pack_pairs,
    .unpack_pairs = unpack_pairs,
    .words = words,
    .transpose = transpose,
    .hadamard = hadamard,
};
