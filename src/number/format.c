/* The number formats, and encoding and decoding of one number in each. */
#include "number/format.h"
#include "base/base.h"

const dw__format_info dw__formats[DW_DTYPE_COUNT] = {
#define ROW(key, bits, exponent, fraction, bias, largest)                                          \
    [DW_##key] = {bits, exponent, fraction, bias, largest},
    DW_FORMAT_MAP(ROW)
#undef ROW
};

float dw_dtype_max(dw_dtype dtype) {
    return dw__dtype_is_format(dtype) ? dw__decode_one(dtype, dw__formats[dtype].largest) : 0.0f;
}

/* ---- encoding ------------------------------------------------------------------------------ */

enum { F32_FRACTION = 23, F32_BIAS = 127 };

/* The code of a finite magnitude if the exponent had no upper limit. */
static uint64_t round_magnitude(const dw__format_info *format, uint32_t bits, dw_rounding rounding,
                                uint32_t word) {
    int field = (int)(bits >> F32_FRACTION);
    uint64_t significand = bits & 0x7FFFFFu;
    if (field == 0)
        field = 1; /* subnormal F32: no hidden bit */
    else
        significand |= 0x800000u;
    /* F32 exponent field of the format's smallest normal number. Below it the quantum stays the same. */
    int least = F32_BIAS - format->bias + 1;
    int binade = field > least ? field - least : 0;
    int shift = F32_FRACTION - format->fraction_bits + (field < least ? least - field : 0);
    if (shift > 63) return 0;
    uint64_t kept = significand >> shift;
    uint64_t dropped = significand & ((UINT64_C(1) << shift) - 1);
    if (rounding == DW_ROUND_STOCHASTIC) {
        uint64_t share = shift <= 32 ? dropped << (32 - shift) : dropped >> (shift - 32);
        kept += (share + word) >> 32;
    } else {
        uint64_t half = UINT64_C(1) << (shift - 1);
        kept += dropped > half || (dropped == half && (kept & 1));
    }
    /* The hidden bit of a normal number adds one to the exponent field. */
    return ((uint64_t)binade << format->fraction_bits) + kept;
}

static uint32_t encode_e8m0(float value, dw_overflow overflow) {
    uint32_t bits = dw__f32_bits(value);
    uint32_t magnitude = bits & 0x7FFFFFFFu;
    bool saturate = overflow == DW_OVERFLOW_SATURATE;
    if (magnitude > 0x7F800000u) return 0xFF;
    if (bits >> 31 && magnitude) return saturate ? 0 : 0xFF;
    if (magnitude < 0x00800000u)
        return magnitude > 0x00400000u; /* subnormal in F32: rounds up from 2^-127 */
    uint32_t code = (magnitude + 0x00400000u) >> F32_FRACTION;
    return code < 0xFF ? code : saturate ? 0xFE : 0xFF;
}

uint32_t dw__encode_one(dw_dtype dtype, float value, dw_overflow overflow, dw_rounding rounding,
                        uint32_t word) {
    if (dtype == DW_E8M0) return encode_e8m0(value, overflow);
    const dw__format_info *info = &dw__formats[dtype];
    uint32_t bits = dw__f32_bits(value);
    uint32_t magnitude = bits & 0x7FFFFFFFu;
    uint32_t sign = bits >> 31 << (info->bits - 1);
    bool saturate = overflow == DW_OVERFLOW_SATURATE;
    if (magnitude > 0x7F800000u) {
        if (dtype == DW_BF16) return dw__f32_to_bf16(value);
        if (dtype == DW_F16) return dw__f32_to_f16(value);
        bool has_signed_nan = dtype == DW_E4M3 || dtype == DW_E5M2;
        return dw__format_nan(dtype) | (has_signed_nan ? sign : 0);
    }
    if (dtype == DW_UE4M3) {
        if (sign && magnitude) return saturate ? 0 : dw__format_nan(dtype);
        sign = 0;
    }
    uint64_t code =
        magnitude == 0x7F800000u ? UINT64_MAX : round_magnitude(info, magnitude, rounding, word);
    if (code <= info->largest) return sign | (uint32_t)code;
    if (saturate) return sign | info->largest;
    switch (dtype) {
    case DW_BF16: return sign | 0x7F80;
    case DW_F16: return sign | 0x7C00;
    case DW_E5M2: return sign | 0x7C;
    case DW_E4M3: return sign | 0x7F;
    case DW_UE4M3: return 0x7F;
    default: return sign | info->largest;
    }
}

/* ---- decoding ------------------------------------------------------------------------------ */

float dw__decode_one(dw_dtype dtype, uint32_t code) {
    if (dtype == DW_BF16) {
        uint32_t bits = (code & 0xFFFFu) << 16;
        bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
        return dw__f32_from_bits(bits | (nan ? 0x00400000u : 0));
    }
    if (dtype == DW_F16) return dw__f16_to_f32((uint16_t)code);
    if (dtype == DW_E8M0) {
        code &= 0xFFu;
        if (code == 0xFF) return dw__f32_from_bits(0x7FC00000u);
        return dw__f32_from_bits(code ? code << F32_FRACTION : 0x00400000u);
    }
    const dw__format_info *info = &dw__formats[dtype];
    uint32_t magnitude = code & ((1u << (info->bits - 1)) - 1);
    uint32_t sign = dtype == DW_UE4M3 ? 0 : code >> (info->bits - 1) << 31;
    if (magnitude > info->largest) {
        bool infinite = dtype == DW_E5M2 && magnitude == 0x7C;
        return dw__f32_from_bits(sign | (infinite ? 0x7F800000u : 0x7FC00000u));
    }
    uint32_t field = magnitude >> info->fraction_bits;
    uint32_t fraction = magnitude & ((1u << info->fraction_bits) - 1);
    uint32_t significand = field ? fraction | 1u << info->fraction_bits : fraction;
    int exponent = (int)(field ? field : 1) - info->bias - info->fraction_bits;
    /* Both factors and their product are normal F32 numbers or 0, so the multiplication is exact. */
    float power = dw__f32_from_bits((uint32_t)(F32_BIAS + exponent) << F32_FRACTION);
    return dw__f32_from_bits(dw__f32_bits((float)significand * power) | sign);
}
