// The operations of generated elementwise programs (src/kernel/cuda/elementwise_source.c), one function each.
//
// Programs compute in C types: float for BF16, F16 and F32, double, int, long long, and bool. Each step of BF16 or F16
// rounds its result, so that a fused chain gives the bits of its operations one by one. Integer arithmetic wraps.
#ifndef DW_ELEMENTWISE_CUH
#define DW_ELEMENTWISE_CUH

#include "data_error.h"
#include "random_word.cuh"
#include "tensor_types.cuh"

// ---- rounding ---------------------------------------------------------------------------------------------

DEVICE float round_bf16(float x) { return bf16_to_float(float_to_bf16(x)); }
DEVICE float round_f16(float x) { return f16_to_float(float_to_f16(x)); }

// ---- floating point ---------------------------------------------------------------------------------------

template <class F> DEVICE F op_neg(F x) { return -x; }
template <class F> DEVICE F op_abs(F x) { return fabs(x); }
template <class F> DEVICE F op_sign(F x) { return (F)((x > 0) - (x < 0)); }
template <class F> DEVICE F op_exp(F x) { return exp(x); }
template <class F> DEVICE F op_log(F x) { return log(x); }
template <class F> DEVICE F op_log1p(F x) { return log1p(x); }
template <class F> DEVICE F op_sqrt(F x) { return sqrt(x); }
template <class F> DEVICE F op_rsqrt(F x) { return 1 / sqrt(x); }
template <class F> DEVICE F op_reciprocal(F x) { return 1 / x; }
template <class F> DEVICE F op_sin(F x) { return sin(x); }
template <class F> DEVICE F op_cos(F x) { return cos(x); }
template <class F> DEVICE F op_tanh(F x) { return tanh(x); }
template <class F> DEVICE F op_erf(F x) { return erf(x); }
template <class F> DEVICE F op_floor(F x) { return floor(x); }
template <class F> DEVICE F op_ceil(F x) { return ceil(x); }
template <class F> DEVICE bool op_is_finite(F x) { return x - x == 0; }

// The argument of exp is never positive, so it cannot overflow.
template <class F> DEVICE F op_sigmoid(F x) {
    const F e = exp(-fabs(x));
    return x >= 0 ? 1 / (1 + e) : e / (1 + e);
}

template <class F> DEVICE F op_add(F x, F y) { return x + y; }
template <class F> DEVICE F op_sub(F x, F y) { return x - y; }
template <class F> DEVICE F op_mul(F x, F y) { return x * y; }
template <class F> DEVICE F op_div(F x, F y) { return x / y; }
template <class F> DEVICE F op_pow(F x, F y) { return pow(x, y); }
template <class F> DEVICE F op_max(F x, F y) { return x != x || x > y ? x : y; } // NaN if either is
template <class F> DEVICE F op_min(F x, F y) { return x != x || x < y ? x : y; }
// The remainder has the sign of the divisor, as in Python.
template <class F> DEVICE F op_rem(F x, F y) {
    const F r = fmod(x, y);
    return r != 0 && (r < 0) != (y < 0) ? r + y : r;
}

template <class F> DEVICE F op_relu(F x) { return op_max(x, (F)0); }
template <class F> DEVICE F op_silu(F x) { return x * op_sigmoid(x); }
template <class F> DEVICE F op_swiglu(F x, F y) { return op_silu(x) * y; }
template <class F> DEVICE F op_silu_backward(F x, F dy) {
    const F s = op_sigmoid(x);
    return dy * s * (1 + x * (1 - s));
}
template <class F> DEVICE F op_gelu(F x) { return (F)0.5 * x * (1 + erf(x * (F)0.70710678118654752440)); }
template <class F> DEVICE F op_gelu_backward(F x, F dy) {
    const F cdf = (F)0.5 * (1 + erf(x * (F)0.70710678118654752440));
    return dy * (cdf + x * (F)0.39894228040143267794 * exp((F)-0.5 * x * x));
}
// Hendrycks and Gimpel 2016, the tanh approximation.
template <class F> DEVICE F gelu_tanh_argument(F x) {
    return (F)0.79788456080286535588 * (x + (F)0.044715 * x * x * x);
}
template <class F> DEVICE F op_gelu_tanh(F x) { return (F)0.5 * x * (1 + tanh(gelu_tanh_argument(x))); }
template <class F> DEVICE F op_gelu_tanh_backward(F x, F dy) {
    const F t = tanh(gelu_tanh_argument(x)), slope = (F)0.79788456080286535588 * (1 + (F)0.134145 * x * x);
    return dy * ((F)0.5 * (1 + t) + (F)0.5 * x * (1 - t * t) * slope);
}

// ---- integers: arithmetic wraps -----------------------------------------------------------------------------

#define INTEGER_OPERATIONS(I, U)                                                                                     \
    DEVICE I op_neg(I x) { return (I)(0 - (U)x); }                                                                   \
    DEVICE I op_abs(I x) { return x < 0 ? (I)(0 - (U)x) : x; }                                                       \
    DEVICE I op_add(I x, I y) { return (I)((U)x + (U)y); }                                                           \
    DEVICE I op_sub(I x, I y) { return (I)((U)x - (U)y); }                                                           \
    DEVICE I op_mul(I x, I y) { return (I)((U)x * (U)y); }                                                           \
    DEVICE I integer_div(I x, I y, dw_data_error error) {                                                               \
        if (y == 0) report(error, DW_DATA_DIVISION);                                                                 \
        if (y == 0 || y == -1) return y == 0 ? 0 : (I)(0 - (U)x);                                                    \
        return x / y - (x % y != 0 && (x % y < 0) != (y < 0));                                                       \
    }                                                                                                                \
    DEVICE I integer_rem(I x, I y, dw_data_error error) {                                                               \
        if (y == 0) report(error, DW_DATA_DIVISION);                                                                 \
        if (y == 0 || y == -1) return 0;                                                                             \
        return x % y + (x % y != 0 && (x % y < 0) != (y < 0) ? y : 0);                                               \
    }                                                                                                                \
    DEVICE I integer_pow(I base, I exponent, dw_data_error error) {                                                     \
        I power = 1;                                                                                                 \
        if (exponent < 0) report(error, DW_DATA_POWER);                                                              \
        for (; exponent > 0; exponent >>= 1, base = op_mul(base, base))                                              \
            if (exponent & 1) power = op_mul(power, base);                                                           \
        return power;                                                                                                \
    }
INTEGER_OPERATIONS(int, unsigned)
INTEGER_OPERATIONS(long long, unsigned long long)

// ---- comparisons, logic, casts ------------------------------------------------------------------------------

template <class T> DEVICE bool op_eq(T x, T y) { return x == y; }
template <class T> DEVICE bool op_ne(T x, T y) { return x != y; }
template <class T> DEVICE bool op_lt(T x, T y) { return x < y; }
template <class T> DEVICE bool op_le(T x, T y) { return x <= y; }
template <class T> DEVICE bool op_gt(T x, T y) { return x > y; }
template <class T> DEVICE bool op_ge(T x, T y) { return x >= y; }
DEVICE bool op_and(bool x, bool y) { return x && y; }
DEVICE bool op_or(bool x, bool y) { return x || y; }
DEVICE bool op_logical_not(bool x) { return !x; }
template <class T> DEVICE T op_select(bool condition, T x, T y) { return condition ? x : y; }
template <class T> DEVICE T op_stop_gradient(T x) { return x; }

// Out of range and NaN become the least integer.
DEVICE int to_int(double x) { return x > -2147483649.0 && x < 2147483648.0 ? (int)x : (int)0x80000000; }
DEVICE long long to_long(double x) {
    return x >= -9223372036854775808.0 && x < 9223372036854775808.0 ? (long long)x : (long long)0x8000000000000000;
}
template <class To, class From> struct cast_of {
    DEVICE_MEMBER To apply(From x) { return (To)x; }
};
template <> struct cast_of<int, float> {
    DEVICE_MEMBER int apply(float x) { return to_int(x); }
};
template <> struct cast_of<int, double> {
    DEVICE_MEMBER int apply(double x) { return to_int(x); }
};
template <> struct cast_of<long long, float> {
    DEVICE_MEMBER long long apply(float x) { return to_long(x); }
};
template <> struct cast_of<long long, double> {
    DEVICE_MEMBER long long apply(double x) { return to_long(x); }
};
template <class From> struct cast_of<bool, From> {
    DEVICE_MEMBER bool apply(From x) { return x != 0; }
};
template <class To, class From> DEVICE To op_cast(From x) { return cast_of<To, From>::apply(x); }

// ---- random numbers -------------------------------------------------------------------------------------------

// Uniform in [0, 1), a function of seed, stream and element.
DEVICE float uniform(const long long *seed, long long seed_stride, long long stream, unsigned long long element) {
    const unsigned word =
        random_word((unsigned long long)seed[0], (unsigned long long)seed[seed_stride], stream, element);
    return (float)(word >> 8) * 0x1p-24f;
}

#endif
