/* Operations on single elements of any dtype (see scalar.h). */
#include "kernel/reference/scalar.h"
#include "number/half.h"
#include <inttypes.h>
#include <math.h>

dw__scalar dw__scalar_load(const void *data, dw_dtype dtype, int64_t offset) {
    dw__scalar value = {.integer = 0};
    switch (dtype) {
    case DW_BOOL: value.integer = ((const uint8_t *)data)[offset] != 0; break;
    case DW_I32: value.integer = ((const int32_t *)data)[offset]; break;
    case DW_I64: value.integer = ((const int64_t *)data)[offset]; break;
    case DW_BF16: value.number = dw__bf16_to_f32(((const uint16_t *)data)[offset]); break;
    case DW_F16: value.number = dw__f16_to_f32(((const uint16_t *)data)[offset]); break;
    case DW_F32: value.number = ((const float *)data)[offset]; break;
    case DW_F64: value.number = ((const double *)data)[offset]; break;
    default: /* the code */
        value.integer = dtype == DW_E2M1
                            ? ((const uint8_t *)data)[offset / 2] >> offset % 2 * 4 & 0xF
                            : ((const uint8_t *)data)[offset];
        break;
    }
    return value;
}

/* Converts double to F32 and handles overflow to infinity, because C leaves that conversion undefined. */
static float to_f32(double number) {
    const double first_infinite = 0x1.ffffffp127; /* halfway from FLT_MAX to 2^128 */
    if (number >= first_infinite) return INFINITY;
    if (number <= -first_infinite) return -INFINITY;
    return (float)number;
}

void dw__scalar_store(void *data, dw_dtype dtype, int64_t offset, dw__scalar value) {
    switch (dtype) {
    case DW_BOOL: ((uint8_t *)data)[offset] = value.integer != 0; break;
    case DW_I32: ((int32_t *)data)[offset] = (int32_t)(uint32_t)value.integer; break;
    case DW_I64: ((int64_t *)data)[offset] = value.integer; break;
    case DW_BF16: ((uint16_t *)data)[offset] = dw__f32_to_bf16(to_f32(value.number)); break;
    case DW_F16: ((uint16_t *)data)[offset] = dw__f32_to_f16(to_f32(value.number)); break;
    case DW_F32: ((float *)data)[offset] = to_f32(value.number); break;
    case DW_F64: ((double *)data)[offset] = value.number; break;
    default:
        if (dtype == DW_E2M1) {
            uint8_t *pair = (uint8_t *)data + offset / 2;
            const int shift = offset % 2 * 4;
            *pair = (uint8_t)((*pair & ~(0xF << shift)) | (value.integer & 0xF) << shift);
        } else {
            ((uint8_t *)data)[offset] = (uint8_t)value.integer;
        }
    }
}

dw__scalar dw__scalar_round(dw__scalar value, dw_dtype dtype) {
    int64_t stored = 0;
    dw__scalar_store(&stored, dtype, 0, value);
    return dw__scalar_load(&stored, dtype, 0);
}

static int64_t double_to_integer(double number, dw_dtype dtype) {
    if (dtype == DW_I32) {
        bool inside = number > -0x1p31 - 1.0 && number < 0x1p31;
        return inside ? (int64_t)number : INT32_MIN;
    }
    bool inside = number >= -0x1p63 && number < 0x1p63;
    return inside ? (int64_t)number : INT64_MIN;
}

dw__scalar dw__scalar_of(double number, dw_dtype dtype) {
    dw__scalar value;
    if (dw__dtype_is_float(dtype))
        value.number = number;
    else if (dtype == DW_BOOL)
        value.integer = number != 0.0;
    else
        value.integer = double_to_integer(number, dtype);
    return value;
}

dw__scalar dw__scalar_cast(dw__scalar value, dw_dtype from, dw_dtype to) {
    if (dw__dtype_is_float(from)) return dw__scalar_of(value.number, to);
    if (dw__dtype_is_float(to)) return (dw__scalar){.number = (double)value.integer};
    if (to == DW_BOOL) return (dw__scalar){.integer = value.integer != 0};
    return value;
}

/* ---- floating point -------------------------------------------------------------------------- */

static double sigmoid(double x) {
    /* The argument of exp is never positive, so it cannot overflow. */
    double e = exp(-fabs(x));
    return x >= 0.0 ? 1.0 / (1.0 + e) : e / (1.0 + e);
}

static const double sqrt_2_over_pi = 0.79788456080286535588;
static const double sqrt_half = 0.70710678118654752440;
static const double inverse_sqrt_2pi = 0.39894228040143267794;
static const double gelu_cubic = 0.044715; /* Hendrycks and Gimpel 2016, the tanh approximation */

static double gelu(double x, bool tanh_approximation) {
    if (!tanh_approximation) return 0.5 * x * (1.0 + erf(x * sqrt_half));
    return 0.5 * x * (1.0 + tanh(sqrt_2_over_pi * (x + gelu_cubic * x * x * x)));
}

static double gelu_backward(double x, double dy, bool tanh_approximation) {
    if (!tanh_approximation) {
        double cdf = 0.5 * (1.0 + erf(x * sqrt_half));
        return dy * (cdf + x * inverse_sqrt_2pi * exp(-0.5 * x * x));
    }
    double t = tanh(sqrt_2_over_pi * (x + gelu_cubic * x * x * x));
    double slope = sqrt_2_over_pi * (1.0 + 3.0 * gelu_cubic * x * x);
    return dy * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope);
}

static double silu_backward(double x, double dy) {
    double s = sigmoid(x);
    return dy * s * (1.0 + x * (1.0 - s));
}

/* Remainder with the sign of the divisor, as in Python. */
static double float_remainder(double x, double y) {
    double r = fmod(x, y);
    return r != 0.0 && (r < 0.0) != (y < 0.0) ? r + y : r;
}

static double float_max(double x, double y) { return isnan(x) || x > y ? x : y; }
static double float_min(double x, double y) { return isnan(x) || x < y ? x : y; }

static dw_status not_elementwise(dw_op op) {
    return dw__fail(DW_INTERNAL,
                    "%s is not an elementwise operation on this type: the operation "
                    "table and the reference disagree",
                    dw_op_name(op));
}

static dw_status apply_float(dw_op op, bool tanh_approximation, const dw__scalar *operands,
                             dw__scalar *result) {
    double x = operands[0].number, y = operands[1].number, r;
    switch (op) {
    case DW_OP_NEG: r = -x; break;
    case DW_OP_ABS: r = fabs(x); break;
    case DW_OP_SIGN: r = (x > 0.0) - (x < 0.0); break;
    case DW_OP_EXP: r = exp(x); break;
    case DW_OP_LOG: r = log(x); break;
    case DW_OP_LOG1P: r = log1p(x); break;
    case DW_OP_SQRT: r = sqrt(x); break;
    case DW_OP_RSQRT: r = 1.0 / sqrt(x); break;
    case DW_OP_RECIPROCAL: r = 1.0 / x; break;
    case DW_OP_SIN: r = sin(x); break;
    case DW_OP_COS: r = cos(x); break;
    case DW_OP_TANH: r = tanh(x); break;
    case DW_OP_ERF: r = erf(x); break;
    case DW_OP_SIGMOID: r = sigmoid(x); break;
    case DW_OP_FLOOR: r = floor(x); break;
    case DW_OP_CEIL: r = ceil(x); break;
    case DW_OP_STOP_GRADIENT: r = x; break;
    case DW_OP_RELU: r = float_max(x, 0.0); break;
    case DW_OP_SILU: r = x * sigmoid(x); break;
    case DW_OP_GELU: r = gelu(x, tanh_approximation); break;
    case DW_OP_ADD: r = x + y; break;
    case DW_OP_SUB: r = x - y; break;
    case DW_OP_MUL: r = x * y; break;
    case DW_OP_DIV: r = x / y; break;
    case DW_OP_POW: r = pow(x, y); break;
    case DW_OP_MAX: r = float_max(x, y); break;
    case DW_OP_MIN: r = float_min(x, y); break;
    case DW_OP_REM: r = float_remainder(x, y); break;
    case DW_OP_SWIGLU: r = x * sigmoid(x) * y; break;
    case DW_OP_GELU_BACKWARD: r = gelu_backward(x, y, tanh_approximation); break;
    case DW_OP_SILU_BACKWARD: r = silu_backward(x, y); break;
    case DW_OP_IS_FINITE: result->integer = isfinite(x) != 0; return DW_OK;
    case DW_OP_EQ: result->integer = x == y; return DW_OK;
    case DW_OP_NE: result->integer = x != y; return DW_OK;
    case DW_OP_LT: result->integer = x < y; return DW_OK;
    case DW_OP_LE: result->integer = x <= y; return DW_OK;
    case DW_OP_GT: result->integer = x > y; return DW_OK;
    case DW_OP_GE: result->integer = x >= y; return DW_OK;
    default: return not_elementwise(op);
    }
    result->number = r;
    return DW_OK;
}

/* ---- integers and bool ----------------------------------------------------------------------- */

/* Arithmetic wraps. It uses unsigned words, for which C defines wrapping. */
static int64_t wrap_mul(int64_t x, int64_t y) { return (int64_t)((uint64_t)x * (uint64_t)y); }
static int64_t wrap_neg(int64_t x) { return (int64_t)(0u - (uint64_t)x); }

static dw_status divide(dw_op op, int64_t x, int64_t y, int64_t *result) {
    if (y == 0)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "%s: integer division of %" PRId64 " by zero; guard the "
                        "divisor with select, or divide as floating point",
                        dw_op_name(op), x);
    if (y == -1) { /* the only quotient that may overflow */
        *result = op == DW_OP_DIV ? wrap_neg(x) : 0;
        return DW_OK;
    }
    int64_t quotient = x / y, remainder = x % y;
    bool below = remainder != 0 && (remainder < 0) != (y < 0);
    *result = op == DW_OP_DIV ? quotient - below : remainder + (below ? y : 0);
    return DW_OK;
}

static dw_status integer_power(int64_t base, int64_t exponent, int64_t *result) {
    if (exponent < 0)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "pow: an integer to the power %" PRId64 " is not an "
                        "integer; cast to a floating-point type first",
                        exponent);
    int64_t power = 1;
    for (; exponent; exponent >>= 1, base = wrap_mul(base, base))
        if (exponent & 1) power = wrap_mul(power, base);
    *result = power;
    return DW_OK;
}

static dw_status apply_integer(dw_op op, const dw__scalar *operands, dw__scalar *result) {
    int64_t x = operands[0].integer, y = operands[1].integer, r;
    switch (op) {
    case DW_OP_NEG: r = wrap_neg(x); break;
    case DW_OP_ABS: r = x < 0 ? wrap_neg(x) : x; break;
    case DW_OP_SIGN: r = (x > 0) - (x < 0); break;
    case DW_OP_STOP_GRADIENT: r = x; break;
    case DW_OP_RELU: r = x > 0 ? x : 0; break;
    case DW_OP_LOGICAL_NOT: r = !x; break;
    case DW_OP_ADD: r = (int64_t)((uint64_t)x + (uint64_t)y); break;
    case DW_OP_SUB: r = (int64_t)((uint64_t)x - (uint64_t)y); break;
    case DW_OP_MUL: r = wrap_mul(x, y); break;
    case DW_OP_DIV:
    case DW_OP_REM: return divide(op, x, y, &result->integer);
    case DW_OP_POW: return integer_power(x, y, &result->integer);
    case DW_OP_MAX: r = x > y ? x : y; break;
    case DW_OP_MIN: r = x < y ? x : y; break;
    case DW_OP_EQ: r = x == y; break;
    case DW_OP_NE: r = x != y; break;
    case DW_OP_LT: r = x < y; break;
    case DW_OP_LE: r = x <= y; break;
    case DW_OP_GT: r = x > y; break;
    case DW_OP_GE: r = x >= y; break;
    case DW_OP_AND: r = x && y; break;
    case DW_OP_OR: r = x || y; break;
    default: return not_elementwise(op);
    }
    result->integer = r;
    return DW_OK;
}

dw_status dw__scalar_apply(dw_op op, bool tanh_approximation, dw_dtype dtype,
                           const dw__scalar *operands, dw__scalar *result) {
    if (op == DW_OP_SELECT) {
        *result = operands[0].integer ? operands[1] : operands[2];
        return DW_OK;
    }
    if (dw__dtype_is_float(dtype)) return apply_float(op, tanh_approximation, operands, result);
    return apply_integer(op, operands, result);
}

int dw__scalar_compare(dw__scalar a, dw__scalar b, bool is_float) {
    if (!is_float) return (a.integer > b.integer) - (a.integer < b.integer);
    if (isnan(a.number) || isnan(b.number)) return isnan(a.number) - isnan(b.number);
    return (a.number > b.number) - (a.number < b.number);
}
