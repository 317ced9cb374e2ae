/* What atomic operations and reductions make of a value in memory and another: atom, red (PTX ISA 9.7.13.5, 9.7.13.6),
 * red.async (9.7.13.7), cp.reduce.async.bulk (9.7.9.25).
 */
#ifndef DW_EMULATOR_REDUCTION_H
#define DW_EMULATOR_REDUCTION_H

#include "emulator/translate.h"

typedef enum dw__emu_reduction {
    DW__REDUCE_ADD,
    DW__REDUCE_MIN,
    DW__REDUCE_MAX,
    DW__REDUCE_INC,
    DW__REDUCE_DEC,
    DW__REDUCE_AND,
    DW__REDUCE_OR,
    DW__REDUCE_XOR,
    DW__REDUCE_EXCHANGE, /* of atom alone, as the next */
    DW__REDUCE_COMPARE,
    DW__REDUCE_NONE, /* a plain copy or store */
} dw__emu_reduction;

/* The next modifier, if it is the name of one. */
bool dw__emu_take_reduction(dw__emu_translator *t, bool exchanges, dw__emu_reduction *kind);
/* Whether the ISA has this operation of elements of this type. Of integers that only differ in their sign or are
 * bits, those are taken too that it spells otherwise. */
bool dw__emu_reduces(dw__emu_reduction kind, dw__emu_type type);

/* Replaces the element at `at`, atomically, by what the operation makes of it, x, and `y` (and `z`, which comes
 * instead of x where that is y); gives back x. Sums are rounded to nearest. `in_global`: sums of F32 take and
 * make zeros for subnormal numbers. Of minima and maxima a number comes before a NaN, and -0 is less than 0, as
 * `min` and `max` have it: the ISA says nothing of reductions. NaNs are canonical, but those of F64. */
uint64_t dw__emu_reduce(dw__emu_reduction kind, dw__emu_type type, bool in_global, void *at,
                        uint64_t y, uint64_t z);

#endif
