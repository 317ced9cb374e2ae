/* Converts matrix elements to numbers. */
#ifndef DW_EMULATOR_MATRIX_ELEMENT_H
#define DW_EMULATOR_MATRIX_ELEMENT_H

#include "emulator/translate.h"
#include "number/format.h"
#include "number/half.h"

/* Converts a code as it lies in shared memory or a register. The unused upper bits of narrower types must be 0. */
static inline double dw__matrix_element(dw__emu_type type, uint32_t code) {
    switch (type) {
    case DW__T_F16: return (double)dw__f16_to_f32((uint16_t)code);
    case DW__T_BF16: return (double)dw__bf16_to_f32((uint16_t)code);
    case DW__T_TF32:
        return (double)dw__f32_from_bits(code & ~(uint32_t)0x1FFF); /* the rest does not count */
    case DW__T_F32: return (double)dw__f32_from_bits(code);
    case DW__T_E4M3: return (double)dw__decode_one(DW_E4M3, (uint8_t)code);
    case DW__T_E5M2: return (double)dw__decode_one(DW_E5M2, (uint8_t)code);
    case DW__T_S8: return (int8_t)code;
    case DW__T_S32: return (int32_t)code;
    default: return (uint8_t)code;
    }
}

#endif
