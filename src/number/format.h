/* The fields of each format, and operations on one number. The inner loops in isa/ must agree with them bit
 * for bit. */
#ifndef DW_FORMAT_H
#define DW_FORMAT_H

#include "deepwell/number.h"
#include "number/dtype_kinds.h"
#include "number/half.h"
#include <stdbool.h>

typedef struct dw__format_info {
    int bits, exponent_bits, fraction_bits, bias;
    uint32_t largest; /* code of the largest number */
} dw__format_info;
extern const dw__format_info dw__formats[DW_DTYPE_COUNT]; /* of these types; zeros for the others */

/* True for the floating-point types of 16 bits and fewer. */
static inline bool dw__dtype_is_format(dw_dtype dtype) {
    return (unsigned)dtype < DW_DTYPE_COUNT && dw__formats[dtype].bits > 0;
}

/* True for codes that take one byte (E2M1 unpacked). */
static inline bool dw__format_is_byte(dw_dtype format) {
    return format != DW_BF16 && format != DW_F16;
}
/* The positive code of NaN, or of the largest number if the format has no NaN. */
static inline uint32_t dw__format_nan(dw_dtype format) {
    switch (format) {
    case DW_BF16: return 0x7FC0;
    case DW_F16: return 0x7E00;
    case DW_E4M3:
    case DW_UE4M3:
    case DW_E5M2: return 0x7F;
    case DW_E8M0: return 0xFF;
    default: return dw__formats[format].largest;
    }
}

/* Encodes one number; this function is the definition. Only stochastic rounding reads `word`. */
uint32_t dw__encode_one(dw_dtype format, float value, dw_overflow overflow, dw_rounding rounding,
                        uint32_t word);
float dw__decode_one(dw_dtype format, uint32_t code);

#endif
