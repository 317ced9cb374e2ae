/* Inner loops of number formats: one element after the other, without branches, for the compiler to lay side by
 * side. All of it is integer arithmetic, exact floating-point operations, or single IEEE operations, so every
 * instruction set gives the same bits (this folder is compiled without contraction). */
#include "number/number_loops.h"

#define INLINE static inline __attribute__((always_inline))
enum { F32_FRACTION = 23, F32_BIAS = 127, MX_BLOCK = 32 };
#define SIGN 0x80000000u
#define INFINITE 0x7F800000u

INLINE uint32_t bits_of(float value) { return dw__f32_bits(value); }
INLINE float float_of(uint32_t bits) { return dw__f32_from_bits(bits); }
INLINE uint32_t at_most(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* The fields of a byte format; always constants where they are used. */
typedef struct fields {
    uint32_t sign;
    int fraction, bias;
    uint32_t largest, overflow, nan;
    bool signed_nan;
} fields;

/* ---- magnitudes -------------------------------------------------------------------------------- */

static uint32_t amax(const float *x, int64_t count) {
    uint32_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t magnitude = bits_of(x[i]) & ~SIGN;
        most = magnitude > most ? magnitude : most;
    }
    return most;
}

static uint32_t finite_amax(const float *x, int64_t count) {
    uint32_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t magnitude = bits_of(x[i]) & ~SIGN;
        magnitude = magnitude < INFINITE ? magnitude : 0;
        most = magnitude > most ? magnitude : most;
    }
    return most;
}

/* ---- encoding ---------------------------------------------------------------------------------- */

INLINE uint32_t least_normal(fields f) { return (uint32_t)(F32_BIAS - f.bias + 1) << F32_FRACTION; }

/* The code of a magnitude below twice the format's range. */
INLINE uint32_t nearest(fields f, uint32_t magnitude) {
    const int shift = F32_FRACTION - f.fraction;
    uint32_t half = (1u << (shift - 1)) - 1 + (magnitude >> shift & 1);
    uint32_t rebias = (uint32_t)(F32_BIAS - f.bias) << F32_FRACTION;
    uint32_t normal = (magnitude + half - rebias) >> shift;
    /* The number whose ulp is the format's quantum below its normal numbers: adding it rounds to that. */
    uint32_t anchor = (uint32_t)(F32_BIAS + 1 - f.bias + shift) << F32_FRACTION;
    uint32_t subnormal = bits_of(float_of(magnitude) + float_of(anchor)) - anchor;
    return magnitude < least_normal(f) ? subnormal : normal;
}

INLINE uint32_t stochastic(fields f, uint32_t magnitude, uint32_t word) {
    int field = (int)(magnitude >> F32_FRACTION);
    uint32_t significand = (magnitude & 0x7FFFFFu) | (field ? 0x800000u : 0u);
    field = field ? field : 1;
    const int least = F32_BIAS - f.bias + 1;
    int below = field < least ? least - field : 0;
    int binade = field < least ? 0 : field - least;
    int shift = F32_FRACTION - f.fraction + below;
    /* What is dropped, in units of 2^-32 of the quantum: what is kept leaves at the top. */
    uint32_t left = (uint32_t)(shift < 32 ? 32 - shift : 0);
    uint32_t right = at_most((uint32_t)(shift < 32 ? 0 : shift - 32), 31);
    uint32_t share = significand << left >> right;
    uint32_t kept = significand >> at_most((uint32_t)shift, 31);
    return ((uint32_t)binade << f.fraction) + kept + (share > ~word);
}

INLINE uint32_t magnitude_code(fields f, uint32_t magnitude, const uint32_t *words, int64_t i) {
    return words ? stochastic(f, magnitude, words[i]) : nearest(f, magnitude);
}

/* The largest number as an F32. */
INLINE uint32_t largest_bits(fields f) {
    return (f.largest << (F32_FRACTION - f.fraction)) +
           ((uint32_t)(F32_BIAS - f.bias) << F32_FRACTION);
}

INLINE uint32_t sign_code(fields f, uint32_t bits) { return bits & SIGN ? f.sign : 0; }

INLINE void encode_all(fields f, const float *x, int64_t count, dw_overflow overflow,
                       const uint32_t *words, uint8_t *codes) {
    const uint32_t beyond = overflow == DW_OVERFLOW_SATURATE ? f.largest : f.overflow;
    /* Twice the largest is beyond it however it is rounded. */
    const uint32_t enough = largest_bits(f) + (1u << F32_FRACTION);
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = bits_of(x[i]);
        uint32_t magnitude = bits & ~SIGN, sign = sign_code(f, bits);
        uint32_t code = magnitude_code(f, at_most(magnitude, enough), words, i);
        code = sign | (code > f.largest ? beyond : code);
        code = magnitude > INFINITE ? f.nan | (f.signed_nan ? sign : 0) : code;
        codes[i] = (uint8_t)code;
    }
}

INLINE uint8_t saturated(fields f, float x, const uint32_t *words, int64_t i) {
    uint32_t bits = bits_of(x);
    uint32_t magnitude = at_most(bits & ~SIGN, largest_bits(f));
    return (uint8_t)(sign_code(f, bits) | magnitude_code(f, magnitude, words, i));
}

INLINE void scale_all(fields f, const float *x, float factor, int64_t count, const uint32_t *words,
                      uint8_t *codes) {
    for (int64_t i = 0; i < count; i++) codes[i] = saturated(f, x[i] * factor, words, i);
}

/* ---- decoding ---------------------------------------------------------------------------------- */

INLINE float decoded(fields f, uint32_t code) {
    uint32_t magnitude = code & (f.sign - 1);
    uint32_t normal = (magnitude << (F32_FRACTION - f.fraction)) +
                      ((uint32_t)(F32_BIAS - f.bias) << F32_FRACTION);
    const float quantum = float_of((uint32_t)(F32_BIAS + 1 - f.bias - f.fraction) << F32_FRACTION);
    uint32_t subnormal = bits_of((float)(int32_t)magnitude * quantum);
    uint32_t value = magnitude >> f.fraction ? normal : subnormal;
    if (f.nan > f.largest) {
        uint32_t special = f.overflow != f.nan && magnitude == f.overflow ? INFINITE : 0x7FC00000u;
        value = magnitude > f.largest ? special : value;
    }
    return float_of(value | (code & f.sign && f.sign < 0x100 ? SIGN : 0));
}

INLINE void decode_all(fields f, const uint8_t *codes, int64_t count, float scale, float outer,
                       float *x) {
    for (int64_t i = 0; i < count; i++) x[i] = decoded(f, codes[i]) * scale * outer;
}

/* ---- blocks ------------------------------------------------------------------------------------ */

INLINE void mx_all(fields f, const float *x, int64_t blocks, const dw__mx_rule *rule,
                   uint8_t *codes, uint8_t *scales) {
    for (int64_t block = 0; block < blocks; block++, x += MX_BLOCK, codes += MX_BLOCK) {
        uint32_t code = dw__mx_scale(rule, amax(x, MX_BLOCK));
        scales[block] = (uint8_t)code;
        if (code == 0xFF) {
            for (int i = 0; i < MX_BLOCK; i++) codes[i] = (uint8_t)f.nan;
        } else {
            scale_all(f, x, dw__mx_factor(code), MX_BLOCK, NULL, codes);
        }
    }
}

/* ---- the formats ------------------------------------------------------------------------------- */

static const fields fields_E4M3 = {0x80, 3, 7, 0x7E, 0x7F, 0x7F, true};
static const fields fields_E5M2 = {0x80, 2, 15, 0x7B, 0x7C, 0x7F, true};
static const fields fields_E3M2 = {0x20, 2, 3, 0x1F, 0x1F, 0x1F, false};
static const fields fields_E2M3 = {0x20, 3, 1, 0x1F, 0x1F, 0x1F, false};
static const fields fields_E2M1 = {0x8, 1, 1, 0x7, 0x7, 0x7, false};
#define BYTE_FORMATS(X) X(E4M3) X(E5M2) X(E3M2) X(E2M3) X(E2M1)

#define DEFINE(format)                                                                             \
    static void encode_##format(const float *x, int64_t count, dw_overflow overflow,               \
                                const uint32_t *words, uint8_t *codes) {                           \
        if (words)                                                                                 \
            encode_all(fields_##format, x, count, overflow, words, codes);                         \
        else                                                                                       \
            encode_all(fields_##format, x, count, overflow, NULL, codes);                          \
    }                                                                                              \
    static void decode_##format(const uint8_t *codes, int64_t count, float scale, float outer,     \
                                float *x) {                                                        \
        decode_all(fields_##format, codes, count, scale, outer, x);                                \
    }                                                                                              \
    static void scale_##format(const float *x, float factor, int64_t count, const uint32_t *words, \
                               uint8_t *codes) {                                                   \
        if (words)                                                                                 \
            scale_all(fields_##format, x, factor, count, words, codes);                            \
        else                                                                                       \
            scale_all(fields_##format, x, factor, count, NULL, codes);                             \
    }                                                                                              \
    static void mx_##format(const float *x, int64_t blocks, const dw__mx_rule *rule,               \
                            uint8_t *codes, uint8_t *scales) {                                     \
        mx_all(fields_##format, x, blocks, rule, codes, scales);                                   \
    }
BYTE_FORMATS(DEFINE)

static void divide(const float *x, float divisor, int64_t count, const uint32_t *words,
                   uint8_t *codes) {
    if (words) {
        for (int64_t i = 0; i < count; i++)
            codes[i] = saturated(fields_E4M3, x[i] / divisor, words, i);
    } else {
        for (int64_t i = 0; i < count; i++)
            codes[i] = saturated(fields_E4M3, x[i] / divisor, NULL, i);
    }
}

/* ---- packing, random words, moving ------------------------------------------------------------- */

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

static void words(const dw_random *random, uint64_t first, int64_t count, uint32_t *out) {
    uint32_t key0 = (uint32_t)random->seed, key1 = (uint32_t)((uint64_t)random->seed >> 32);
    for (int64_t done = 0; done < count;) {
        uint64_t element = first + (uint64_t)done;
        dw__philox_words four =
            dw__philox(dw__philox_counter(random->offset, random->stream, element / 4), key0, key1);
        for (uint64_t word = element % 4; word < 4 && done < count; word++)
            out[done++] = four.word[word];
    }
}

static void transpose(const float *from, int64_t from_stride, int64_t rows, int64_t cols, float *to,
                      int64_t to_stride) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++) to[j * to_stride + i] = from[i * from_stride + j];
}

static void hadamard(const float *x, const float *before, const float *after, int size, float scale,
                     int64_t count, float *result) {
    enum { MOST = 128 };
    for (int64_t run = 0; run < count; run++, x += size, result += size) {
        float values[MOST];
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
}

#define ROW(kind, format) [DW_FORMAT_##format] = kind##_##format,
#define ENCODE(format) ROW(encode, format)
#define DECODE(format) ROW(decode, format)
#define SCALE(format) ROW(scale, format)
#define MX(format) ROW(mx, format)
const dw__number_loops DW_ISA_NAME(dw__number_loops) = {
    .amax = amax,
    .finite_amax = finite_amax,
    .encode = {BYTE_FORMATS(ENCODE)},
    .decode = {BYTE_FORMATS(DECODE)},
    .scale = {BYTE_FORMATS(SCALE)},
    .divide = divide,
    .mx = {BYTE_FORMATS(MX)},
    .pack_pairs = pack_pairs,
    .unpack_pairs = unpack_pairs,
    .words = words,
    .transpose = transpose,
    .hadamard = hadamard,
};
