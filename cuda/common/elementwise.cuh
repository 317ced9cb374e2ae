// The types and functions that generated elementwise programs (src/kernel/cuda/elementwise_source.c) use.
//
// A thread computes TURNS vectors of VECTOR neighbouring elements, which the source defines before inclusion, as well
// as INDEX, the integer type of elements' offsets. Programs compute in C types: float for BF16, F16 and F32, double, int,
// long long, and bool. Each step of BF16 or F16 rounds its result, so that a fused chain gives the bits of its operations
// one by one. Integer arithmetic wraps.
#ifndef DW_ELEMENTWISE_CUH
#define DW_ELEMENTWISE_CUH

#include "activation.cuh"
#include "data_error.h"
#include "magnitude.cuh"
#include "random_word.cuh"
#include "tensor_types.cuh"

enum { THREADS = 256, LANES = VECTOR > 1 ? 2 : 1, LANE_GROUPS = VECTOR / LANES };
#define EACH(i, count) _Pragma("unroll") for (int i = 0; i < (count); i++)

// ---- elements in registers ----------------------------------------------------------------------------------

// LANES neighbouring elements, as they lie in memory. Two of BF16 or F16 share a register.
template <class E> struct lanes {
    typedef typename E::stored stored;
    typedef typename E::value value;
    stored x[LANES];
    __device__ __forceinline__ value get(int j) const { return E::load(x, j); }
    __device__ __forceinline__ void set(const value *values) { EACH(j, LANES) E::store(x, j, values[j]); }
    static __device__ __forceinline__ lanes same(stored bits) {
        lanes made;
        EACH(j, LANES) made.x[j] = bits;
        return made;
    }
};

#if VECTOR > 1
typedef unsigned half_bits;
#define HALF_REGISTER "r"
#define HALF_TYPE(type) type "x2"
#else
typedef unsigned short half_bits;
#define HALF_REGISTER "h"
#define HALF_TYPE(type) type
#endif
enum { HALF_SIGNS = VECTOR > 1 ? 0x80008000 : 0x8000 };

template <class E> struct half_lanes {
    typedef unsigned short stored;
    typedef float value;
    half_bits bits;
    static __device__ __forceinline__ half_lanes same(unsigned short x) {
        return {(half_bits)(LANES > 1 ? x * 0x10001u : x)};
    }
};
template <> struct lanes<bf16_element> : half_lanes<bf16_element> {
    __device__ __forceinline__ lanes() {}
    __device__ __forceinline__ lanes(half_lanes<bf16_element> x) { bits = x.bits; }
    __device__ __forceinline__ float get(int j) const {
        return __uint_as_float(j == 0 ? (unsigned)bits << 16 : (unsigned)bits & 0xffff0000u);
    }
    __device__ __forceinline__ void set(const float *values) {
#if VECTOR > 1
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(values[1]), "f"(values[0]));
#else
        bits = float_to_bf16(values[0]);
#endif
    }
};
template <> struct lanes<f16_element> : half_lanes<f16_element> {
    __device__ __forceinline__ lanes() {}
    __device__ __forceinline__ lanes(half_lanes<f16_element> x) { bits = x.bits; }
    __device__ __forceinline__ float get(int j) const { return f16_to_float((unsigned short)(bits >> 16 * j)); }
    __device__ __forceinline__ void set(const float *values) {
#if VECTOR > 1
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(values[1]), "f"(values[0]));
#else
        bits = float_to_f16(values[0]);
#endif
    }
};

// Arithmetic of BF16 and F16 without a detour by F32. The bits are the same: an F32 has enough digits for a second
// rounding to change nothing (Figueroa 1995), and the product of two is exact in it.
#define HALF_OPERATION(name, type, instruction)                                                                      \
    DEVICE lanes<type##_element> lanes_##name(lanes<type##_element> x, lanes<type##_element> y) {                    \
        asm(instruction "." HALF_TYPE(#type) " %0, %0, %1;" : "+" HALF_REGISTER(x.bits) : HALF_REGISTER(y.bits));    \
        return x;                                                                                                    \
    }
#define HALF_OPERATIONS(type)                                                                                        \
    HALF_OPERATION(add, type, "add.rn")                                                                              \
    HALF_OPERATION(sub, type, "sub.rn")                                                                              \
    HALF_OPERATION(mul, type, "mul.rn")                                                                              \
    DEVICE lanes<type##_element> lanes_neg(lanes<type##_element> x) { return x.bits ^= HALF_SIGNS, x; }              \
    DEVICE lanes<type##_element> lanes_abs(lanes<type##_element> x) { return x.bits &= ~HALF_SIGNS, x; }
HALF_OPERATIONS(bf16)
HALF_OPERATIONS(f16)

// The index of lane j's element, in a program's loops.
#define ELEMENT_NUMBER ((unsigned long long)v * VECTOR + group * LANES + j)

// One step of a program: `name` is the lanes whose numbers are the expression, in which `j` is the lane.
#define LANES_STEP(element, name, ...)                                                                               \
    lanes<element> name;                                                                                             \
    {                                                                                                                \
        element::value values[LANES];                                                                                \
        EACH(j, LANES) values[j] = (__VA_ARGS__);                                                                    \
        name.set(values);                                                                                            \
    }

DEVICE float round_bf16(float x) { return bf16_to_float(float_to_bf16(x)); }
DEVICE float round_f16(float x) { return f16_to_float(float_to_f16(x)); }

// ---- elements in memory -------------------------------------------------------------------------------------

// The bytes of a vector as one access of 16 bytes or fewer.
template <int BYTES> struct alignas(BYTES) access {
    unsigned words[BYTES / 4];
};
template <> struct access<2> {
    unsigned short words[1];
};
template <> struct access<1> {
    unsigned char words[1];
};
// The compiler splits a store of floats into four, so that the wide ones are instructions.
DEVICE void put(size_t at, const access<16> &x) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(x.words[0]), "r"(x.words[1]),
                 "r"(x.words[2]), "r"(x.words[3])
                 : "memory");
}
DEVICE void put(size_t at, const access<8> &x) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(at), "r"(x.words[0]), "r"(x.words[1]) : "memory");
}
template <int BYTES> DEVICE void put(size_t at, const access<BYTES> &x) {
    *(access<BYTES> *)__cvta_global_to_generic(at) = x;
}
template <class E> struct vector {
    lanes<E> at[LANE_GROUPS];
};

// `at`: offset in elements.
template <class E> DEVICE size_t address_of(long long address, INDEX at) {
    return (size_t)(address + (long long)at * (int)sizeof(typename E::stored));
}
template <class E> DEVICE const void *place(long long address, INDEX at) {
    return __cvta_global_to_generic(address_of<E>(address, at));
}
template <class E> DEVICE vector<E> load_vector(long long address, INDEX at) {
    const access<sizeof(vector<E>)> bytes = *(const access<sizeof(vector<E>)> *)place<E>(address, at);
    vector<E> x;
    memcpy(&x, &bytes, sizeof x);
    return x;
}
template <class E> DEVICE lanes<E> load_same(long long address, INDEX at) {
    return lanes<E>::same(*(const typename E::stored *)place<E>(address, at));
}
template <class E> DEVICE void store_vector(long long address, INDEX at, const vector<E> &x) {
    access<sizeof(vector<E>)> bytes;
    memcpy(&bytes, &x, sizeof x);
    put(address_of<E>(address, at), bytes);
}

// The words that the lanes of a group take.
DEVICE unsigned word_of_lane(const half_lanes<bf16_element> &x, int) { return x.bits; }
DEVICE unsigned word_of_lane(const half_lanes<f16_element> &x, int) { return x.bits; }
DEVICE unsigned word_of_lane(const lanes<f32_element> &x, int j) { return __float_as_uint(x.x[j]); }

template <int type, class E> DEVICE void observe(magnitude<type> &m, const vector<E> &x) {
    EACH(group, LANE_GROUPS) EACH(j, sizeof(lanes<E>) / 4 > 1 ? LANES : 1) m.observe(word_of_lane(x.at[group], j));
}
DEVICE void store_magnitude(long long address, unsigned found) {
    found = magnitude_of_block<THREADS>(found);
    if (threadIdx.x == 0) ((unsigned *)__cvta_global_to_generic((size_t)address))[blockIdx.x] = found;
}

// Returns x / divisor for 0 <= x < 2^31: floor((floor(x * m / 2^32) + x) / 2^s), where s = ceil(log2(divisor)) and m is
// floor(2^32 * (2^s - divisor) / divisor) + 1 (Granlund and Montgomery 1994); `inverse` holds s above m.
DEVICE int quotient(int x, long long divisor, long long inverse) {
    (void)divisor;
    return (int)((__umulhi((unsigned)x, (unsigned)inverse) + (unsigned)x) >> (int)(inverse >> 32));
}
DEVICE long long quotient(long long x, long long divisor, long long inverse) {
    (void)inverse;
    return (long long)((unsigned long long)x / (unsigned long long)divisor);
}

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
    return (x >= 0 ? 1 : e) / (1 + e);
}

// One step of Newton's method makes the approximate reciprocal nearly exact; 1 + e is in [1, 2]. The result is within 3
// units in the last place.
DEVICE float op_sigmoid(float x) {
    const float e = exp(-fabs(x)), d = 1 + e;
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
    r = fmaf(r, fmaf(-d, r, 1.0f), r);
    return (x >= 0 ? 1 : e) * r;
}

template <class F> DEVICE F op_add(F x, F y) { return x + y; }
template <class F> DEVICE F op_sub(F x, F y) { return x - y; }
template <class F> DEVICE F op_mul(F x, F y) { return x * y; }
template <class F> DEVICE F op_div(F x, F y) { return x / y; }
template <class F> DEVICE F op_pow(F x, F y) { return pow(x, y); }
template <class F> DEVICE F op_square(F x) { return x * x; }
template <class F> DEVICE F op_cube(F x) { return x * x * x; }
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

// ---- functions of F32 for results that are rounded to BF16 or F16 ------------------------------------------------

// Few instructions, and relative errors far below the 2^-12 of a rounding to F16. A sigmoid below 2^-126 is 0, which
// loses results of silu below 2^-119. No such number is an F16.
// The argument of ex2 is rounded: the error is 2^-17 next to overflow, and 2^-20 within the range of F16.
DEVICE float half_exp(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x * LOG2_E));
    return y;
}
DEVICE float half_sqrt(float x) {
    float y;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float half_rsqrt(float x) {
    float y;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float half_reciprocal(float x) {
    float y;
    asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float half_div(float x, float y) {
    float z;
    asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
DEVICE float half_sigmoid(float x) { return logistic(-LOG2_E * x); }
// 1 - 2 / (1 + exp(2 x)) has an absolute error of 2^-22: relative to tanh 2^-19 at 1/8. The odd polynomial leaves out
// 17/315 x^7, which is 2^-22 of x there.
DEVICE float half_tanh(float x) {
    const float square = x * x;
    const float small = x + x * square * (-1.0f / 3 + 2.0f / 15 * square), large = 1 - 2 * logistic(2 * LOG2_E * x);
    return fabs(x) < 0.125f ? small : large;
}
DEVICE float half_silu(float x) { return x * half_sigmoid(x); }
DEVICE float half_swiglu(float x, float y) { return half_silu(x) * y; }
DEVICE float half_silu_backward(float x, float dy) {
    const float s = half_sigmoid(x);
    return dy * s * (1 + x * (1 - s));
}
DEVICE float half_gelu_tanh(float x) { return x * gelu_tanh_share(x); }
DEVICE float half_gelu_tanh_backward(float x, float dy) {
    const float s = gelu_tanh_share(x);
    const float slope = x * (2 * 0.79788456080286535588f + 2 * 0.79788456080286535588f * 0.134145f * (x * x));
    return dy * (s + s * (1 - s) * slope);
}
DEVICE float half_gelu(float x) {
    float density;
    return x * normal_cdf(x, &density);
}
DEVICE float half_gelu_backward(float x, float dy) {
    float density;
    const float cdf = normal_cdf(x, &density);
    return dy * (cdf + x * 0.39894228040143267794f * density);
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

struct random_key {
    unsigned long long seed, offset;
};
DEVICE random_key load_key(long long address, long long stride) {
    const unsigned long long *const words = (const unsigned long long *)place<i64_element>(address, 0);
    return {words[0], words[stride]};
}
// 24 random bits, a function of key, stream and element.
DEVICE unsigned random_bits(random_key key, long long stream, unsigned long long element) {
    return random_word(key.seed, key.offset, stream, element) >> 8;
}

#endif
