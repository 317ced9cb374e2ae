/* Matrices in shared memory as tensor cores read them: canonical layouts of 8 x 16-byte core matrices, plain or
 * swizzled, K-major or MN-major. PTX ISA 9.7.15.5.1 (wgmma) and 9.7.16.4, 9.7.16.5 (tcgen05), which differ in
 * where the descriptor keeps the mode.
 */
#ifndef DW_EMULATOR_MATRIX_OPERAND_H
#define DW_EMULATOR_MATRIX_OPERAND_H

#include "emulator/machine.h"
#include "emulator/tensor_map.h"

typedef struct dw__matrix_operand {
    uint32_t start;           /* address in the block's shared memory */
    uint32_t leading, stride; /* byte offsets */
    int swizzle;              /* dw__swizzle */
    bool mn_major;
    int bits; /* of an element */
} dw__matrix_operand;

/* The byte, from the start of the block's shared memory, that holds element (mn, k); `bits` below 8 share one. */
static inline uint32_t dw__matrix_address(const dw__matrix_operand *o, uint32_t mn, uint32_t k) {
    const uint32_t span = dw__swizzle_span(o->swizzle);
    uint32_t at;
    if (!o->mn_major) {
        const uint32_t byte = k * (uint32_t)o->bits / 8;
        at = mn / 8 * o->stride + mn % 8 * span +
             (o->swizzle == DW__SWIZZLE_NONE ? byte / 16 * o->leading + byte % 16 : byte);
    } else {
        const uint32_t byte = mn * (uint32_t)o->bits / 8, block = byte / span, within = byte % span;
        /* Atoms of 32 bytes repeat after four rows, those of 16 after eight. */
        const uint32_t rows = o->swizzle == DW__SWIZZLE_128_ATOM_32 ? 4 : 8;
        at = k % rows * span + within +
             (o->swizzle == DW__SWIZZLE_NONE ? block * o->stride + k / rows * o->leading
                                             : block * o->leading + k / rows * o->stride);
    }
    return dw__swizzled(o->start + at, o->swizzle);
}

#endif
