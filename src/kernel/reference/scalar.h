/* Loads, stores and computes single elements of any dtype.
 *
 * A floating-point element is held as double, a bool or integer as int64. An operation on BF16, F16 or F32
 * elements is therefore computed in double and rounded once, when it is stored. The elementwise primitives,
 * the bodies of `fused` nodes and the F64 interpreter share these functions. */
#ifndef DW_REFERENCE_SCALAR_H
#define DW_REFERENCE_SCALAR_H

#include "kernel/kernel.h"

typedef union dw__scalar {
    double number;   /* floating-point types */
    int64_t integer; /* bool (0 or 1), i32, i64, codes */
} dw__scalar;

/* `offset` counts elements from `data`. */
dw__scalar dw__scalar_load(const void *data, dw_dtype dtype, int64_t offset);
/* Rounds to `dtype` (BF16 and F16 via F32). Integers wrap. */
void dw__scalar_store(void *data, dw_dtype dtype, int64_t offset, dw__scalar value);
/* Returns the result of a store followed by a load. */
dw__scalar dw__scalar_round(dw__scalar value, dw_dtype dtype);
/* A constant of the given dtype; truncated for integers. */
dw__scalar dw__scalar_of(double number, dw_dtype dtype);
/* The cast operation before rounding to `to`. A float outside of the integer type's range, and NaN, gives the
 * type's smallest value, as x86 instructions do. */
dw__scalar dw__scalar_cast(dw__scalar value, dw_dtype from, dw_dtype to);

/* An elementwise operation of one, two or three operands: every elementwise row except cast and dropout.
 * `dtype` is the type of the first operand (for select of the second). The result is not rounded yet.
 * DW_INVALID_ARGUMENT: an integer division by zero or a negative integer exponent. */
dw_status dw__scalar_apply(dw_op op, bool tanh_approximation, dw_dtype dtype,
                           const dw__scalar *operands, dw__scalar *result);

/* Order of max, sort and top_k: NaN is above all numbers and equal to itself. Returns <0, 0 or >0. */
int dw__scalar_compare(dw__scalar a, dw__scalar b, bool is_float);

#endif
