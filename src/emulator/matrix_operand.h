/* Matrix operands in shared memory as tensor cores read them: canonical layouts of 8 x 16-byte core matrices, with or
 * without swizzle, K-major or MN-major (PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout" for
 * wgmma, "Shared memory descriptor" and "Canonical layouts" for tcgen05). The two families differ only in where the
 * descriptor keeps the swizzle mode.
 */
#ifndef DW_EMULATOR_MATRIX_OPERAND_H
#define DW_EMULATOR_MATRIX_OPERAND_H

#include "emulator/race.h"
#include "emulator/tensor_map.h"
#include "emulator/written.h"

typedef struct dw__matrix_operand {
    uint32_t start;           /* address in the block's shared memory */
    uint32_t leading, stride; /* byte offsets */
    int swizzle;              /* dw__swizzle */
    bool mn_major;
    int bits; /* of an element */
} dw__matrix_operand;

/* Returns the offset, from the start of the block's shared memory, of the byte that holds element (mn, k). Elements
 * narrower than 8 bits share a byte. */
static inline uint32_t dw__matrix_address(const dw__matrix_operand *o, uint32_t mn, uint32_t k) {
    const uint32_t span = dw__swizzle_span(o->swizzle);
    uint32_t at;
    if (!o->mn_major) {
        const uint32_t byte = k * (uint32_t)o->bits / 8;
        at = mn / 8 * o->stride + mn % 8 * span +
             (o->swizzle == DW__SWIZZLE_NONE ? byte / 16 * o->leading + byte % 16 : byte);
    } else {
        const uint32_t byte = mn * (uint32_t)o->bits / 8, block = byte / span, within = byte % span;
        /* Atoms of 32 bytes repeat after four rows, those of 16 bytes after eight. */
        const uint32_t rows = o->swizzle == DW__SWIZZLE_128_ATOM_32 ? 4 : 8;
        at = k % rows * span + within +
             (o->swizzle == DW__SWIZZLE_NONE ? block * o->stride + k / rows * o->leading
                                             : block * o->leading + k / rows * o->stride);
    }
    return dw__swizzled(o->start + at, o->swizzle);
}

/* Collects the shared-memory bytes that an MMA reads and reports contiguous ranges to the checker in one call. */
typedef struct dw__operand_reads {
    dw__emu_async *work;
    uint32_t warp; /* has the meaning of `warp` in dw__emu_race_work */
    dw__emu_side side;
    dw__emu_cta *cta;
    uint32_t first, end;
    bool undefined; /* some of the bytes were never written */
} dw__operand_reads;

static inline void dw__operand_reads_end(dw__operand_reads *r) {
    if (r->first == r->end) return;
    r->undefined =
        r->undefined || dw__count_unwritten(r->cta->defined, r->first, r->end - r->first) > 0;
    dw__emu_race_work(r->work, r->warp, r->side, r->cta, r->first, r->end - r->first, false);
    r->first = r->end = 0;
}
static inline void dw__operand_reads_add(dw__operand_reads *r, uint32_t at, uint32_t bytes) {
    if (at + bytes == r->first) {
        r->first = at;
        return;
    }
    if (at != r->end) {
        dw__operand_reads_end(r);
        r->first = at;
    }
    r->end = at + bytes;
}

#endif
