/* Atomic operations and reductions on a value in memory: PTX ISA, "atom", "red", "red.async" and
 * "cp.reduce.async.bulk".
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
    DW__REDUCE_EXCHANGE, /* only for atom, like DW__REDUCE_COMPARE */
    DW__REDUCE_COMPARE,
    DW__REDUCE_NONE, /* a plain copy or store */
} dw__emu_reduction;

/* Takes the next modifier if it names a reduction. */
bool dw__emu_take_reduction(dw__emu_translator *t, bool exchanges, dw__emu_reduction *kind);
/* Returns whether the ISA has this operation for elements of this type. Accepts integer types that the ISA spells
 * differently if only their sign, or the distinction between bits and integers, differs. */
bool dw__emu_reduces(dw__emu_reduction kind, dw__emu_type type);

/* Atomically replaces the element x at `at` by the operation's result for x and `y`, and returns x.
 * DW__REDUCE_COMPARE stores `z` if x equals `y`. Sums are rounded to nearest; if `in_global` is set, F32 sums flush
 * subnormal inputs and results to zero. Minima and maxima prefer a number to a NaN and order -0 below 0, as `min` and
 * `max` do, because the ISA does not say what reductions do. NaN results are canonical except for F64. */
uint64_t dw__emu_reduce(dw__emu_reduction kind, dw__emu_type type, bool in_global, void *at,
                        uint64_t y, uint64_t z);

#endif
