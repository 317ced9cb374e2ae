/* Arithmetic on constants. A double holds each constant: it represents floating-point values of every dtype
 * exactly, and integers up to 2^53. Results beyond that are left to run time. Sums, products, quotients and
 * square roots computed in double and rounded to a type of half the width are correctly rounded (53 >= 2*24 +
 * 2). Transcendental functions differ between libraries and are never folded. */
#include "graph/pass_fold.h"
#include <math.h>

#define LARGEST_EXACT 9007199254740992.0 /* 2^53 */

static bool fits(dw_dtype dtype, double number) {
    if (dtype == DW_I32) return number >= -2147483648.0 && number <= 2147483647.0;
    return fabs(number) < LARGEST_EXACT;
}

static bool evaluate_float(dw_op op, double a, double b, double *result) {
    switch (op) {
    case DW_OP_NEG: *result = -a; return true;
    case DW_OP_ABS: *result = fabs(a); return true;
    case DW_OP_SQRT: *result = sqrt(a); return true;
    case DW_OP_RECIPROCAL: *result = 1.0 / a; return true;
    case DW_OP_FLOOR: *result = floor(a); return true;
    case DW_OP_CEIL: *result = ceil(a); return true;
    case DW_OP_ADD: *result = a + b; return true;
    case DW_OP_SUB: *result = a - b; return true;
    case DW_OP_MUL: *result = a * b; return true;
    case DW_OP_DIV: *result = a / b; return true;
    case DW_OP_MAX: *result = a > b ? a : b; return a != b; /* 0 or -0: either is allowed */
    case DW_OP_MIN: *result = a < b ? a : b; return a != b;
    default: return false;
    }
}

static bool evaluate_integer(dw_op op, double a, double b, double *result) {
    switch (op) {
    case DW_OP_NEG: *result = -a; return true;
    case DW_OP_ABS: *result = fabs(a); return true;
    case DW_OP_ADD: *result = a + b; return true;
    case DW_OP_SUB: *result = a - b; return true;
    case DW_OP_MUL: *result = a * b; return true;
    case DW_OP_MAX: *result = a > b ? a : b; return true;
    case DW_OP_MIN: *result = a < b ? a : b; return true;
    default: return false;
    }
}

static bool evaluate_truth(dw_op op, double a, double b, double *result) {
    switch (op) {
    case DW_OP_LOGICAL_NOT: *result = a == 0.0; return true;
    case DW_OP_AND: *result = a != 0.0 && b != 0.0; return true;
    case DW_OP_OR: *result = a != 0.0 || b != 0.0; return true;
    case DW_OP_IS_FINITE: *result = isfinite(a); return true;
    case DW_OP_EQ: *result = a == b; return true;
    case DW_OP_NE: *result = a != b; return true;
    case DW_OP_LT: *result = a < b; return true;
    case DW_OP_LE: *result = a <= b; return true;
    case DW_OP_GT: *result = a > b; return true;
    case DW_OP_GE: *result = a >= b; return true;
    default: return false;
    }
}

static bool evaluate_cast(dw_dtype to, double a, double *result) {
    if (to == DW_BOOL) {
        *result = a != 0.0;
        return true;
    }
    if (dw__dtype_is_float(to)) {
        *result = dw__round_to(to, a);
        return true;
    }
    *result = trunc(a) + 0.0; /* integers have no negative zero */
    return isfinite(a) && fits(to, *result);
}

bool dw__fold_evaluate(dw_op op, dw_dtype dtype, dw_dtype operand_dtype, uint32_t count,
                       const double *operands, double *result) {
    double a = operands[0], b = count > 1 ? operands[1] : 0.0;
    for (uint32_t i = 0; i < count; i++)
        if (isnan(operands[i]) ||
            (!dw__dtype_is_float(operand_dtype) && !fits(DW_I64, operands[i])))
            return false;
    if (op == DW_OP_CAST) return evaluate_cast(dtype, a, result);
    if (dtype == DW_BOOL) return evaluate_truth(op, a, b, result);
    if (!dw__dtype_is_float(dtype)) {
        if (!evaluate_integer(op, a, b, result) || !fits(dtype, *result)) return false;
        *result += 0.0;
        return true;
    }
    if (!evaluate_float(op, a, b, result) || isnan(*result)) return false;
    *result = dw__round_to(dtype, *result);
    return true;
}
