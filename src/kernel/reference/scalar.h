/* One element at a time: loading, storing and computing with any element type.
 *
 * Floating-point elements are held as double, bool and integers as int64. An operation on BF16,
 * F16 or F32 elements is therefore computed in double and rounded once, when it is stored. The
 * same functions serve the elementwise primitives, bodies of `fused` nodes and the F64
 * interpreter. */
#ifndef DW_REFERENCE_SCALAR_H
#define DW_REFERENCE_SCALAR_H

#include "kernel/kernel.h"

typedef union dw__scalar {
    double number;   /* floating-point types */
    int64_t integer; /* bool (0 or 1), i32, i64 */
} dw__scalar;

static inline bool dw__dtype_is_float(dw_dtype dtype) { return dtype >= DW_BF16; }

/* `offset` in elements from `data`. */
dw__scalar dw__scalar_load(const void *data, dw_dtype dtype, int64_t offset);
/* Rounds to `dtype` (half types by way of F32); integers wrap. */
void dw__scalar_store(void *data, dw_dtype dtype, int64_t offset, dw__scalar value);
/* What a store followed by a load would give. */
dw__scalar dw__scalar_round(dw__scalar value, dw_dtype dtype);
/* A literal of the given type: truncated for integers. */
dw__scalar dw__scalar_of(double number, dw_dtype dtype);
/* The cast operation, before rounding to `to`. A float outside of the integer type's range, or NaN,
 * gives that type's least value, as x86 instructions do. */
dw__scalar dw__scalar_cast(dw__scalar value, dw_dtype from, dw_dtype to);

/* An elementwise operation of one, two or three operands whose first has type `dtype` (select: the
 * type of its second): every elementwise row but cast and dropout. The result is not yet rounded.
 * DW_INVALID_ARGUMENT for an integer division by zero or a negative integer exponent. */
dw_status dw__scalar_apply(dw_op op, bool tanh_approximation, dw_dtype dtype,
                           const dw__scalar *operands, dw__scalar *result);

/* Order of max, sort and top_k: NaN above everything, and equal to itself. Returns <0, 0, >0. */
int dw__scalar_compare(dw__scalar a, dw__scalar b, bool is_float);

#endif
