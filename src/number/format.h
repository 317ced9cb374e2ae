/* The formats' fields, and one number at a time: what the inner loops in isa/ must agree with to the bit. */
#ifndef DW_FORMAT_H
#define DW_FORMAT_H

#include "deepwell/number.h"
#include "number/half.h"
#include <stdbool.h>

typedef struct dw__format_info {
    const char *name;
    int bits, exponent_bits, fraction_bits, bias;
    uint32_t largest; /* code */
} dw__format_info;
extern const dw__format_info dw__formats[DW_FORMAT_COUNT];

/* Codes that take one byte (E2M1 unpacked). */
static inline bool dw__format_is_byte(dw_format format) {
    return format != DW_FORMAT_BF16 && format != DW_FORMAT_F16;
}
/* NaN's code, positive; where there is none, the largest number's. */
static inline uint32_t dw__format_nan(dw_format format) {
    switch (format) {
    case DW_FORMAT_BF16: return 0x7FC0;
    case DW_FORMAT_F16: return 0x7E00;
    case DW_FORMAT_E4M3:
    case DW_FORMAT_UE4M3:
    case DW_FORMAT_E5M2: return 0x7F;
    case DW_FORMAT_E8M0: return 0xFF;
    default: return dw__formats[format].largest;
    }
}

/* One number: the definition. `word` is read by STOCHASTIC only. */
uint32_t dw__encode_one(dw_format format, float value, dw_overflow overflow, dw_rounding rounding,
                        uint32_t word);
float dw__decode_one(dw_format format, uint32_t code);

#endif
