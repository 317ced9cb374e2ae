// Elements of tensors in memory, and the C types that kernels compute in.
//
// No toolkit header is included, because run-time compilation has none.
#ifndef DW_TENSOR_TYPES_CUH
#define DW_TENSOR_TYPES_CUH

#include "element_types.h"

#ifndef DEVICE
#define DEVICE static __device__ __forceinline__
#endif
#define DEVICE_MEMBER static __device__ __forceinline__

DEVICE float bf16_to_float(unsigned short x) { return __uint_as_float((unsigned)x << 16); }
DEVICE float f16_to_float(unsigned short x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
// To nearest even.
DEVICE unsigned short float_to_bf16(float x) {
    unsigned short y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
DEVICE unsigned short float_to_f16(float x) {
    unsigned short y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

// One element type: how it lies in memory, and `value`, the type that kernels compute in.
struct bf16_element {
    typedef unsigned short stored;
    typedef float value;
    DEVICE_MEMBER float load(const void *data, long long at) { return bf16_to_float(((const stored *)data)[at]); }
    DEVICE_MEMBER void store(void *data, long long at, float x) { ((stored *)data)[at] = float_to_bf16(x); }
};
struct f16_element {
    typedef unsigned short stored;
    typedef float value;
    DEVICE_MEMBER float load(const void *data, long long at) { return f16_to_float(((const stored *)data)[at]); }
    DEVICE_MEMBER void store(void *data, long long at, float x) { ((stored *)data)[at] = float_to_f16(x); }
};
template <class T> struct plain_element {
    typedef T stored;
    typedef T value;
    DEVICE_MEMBER T load(const void *data, long long at) { return ((const T *)data)[at]; }
    DEVICE_MEMBER void store(void *data, long long at, T x) { ((T *)data)[at] = x; }
};
typedef plain_element<float> f32_element;
typedef plain_element<double> f64_element;
typedef plain_element<int> i32_element;
typedef plain_element<long long> i64_element;
struct bool_element {
    typedef unsigned char stored;
    typedef bool value;
    DEVICE_MEMBER bool load(const void *data, long long at) { return ((const stored *)data)[at] != 0; }
    DEVICE_MEMBER void store(void *data, long long at, bool x) { ((stored *)data)[at] = x; }
};

// By number (element_types.h).
template <int type> struct element_of;
template <> struct element_of<DW_ELEMENT_BOOL> : bool_element {};
template <> struct element_of<DW_ELEMENT_I32> : i32_element {};
template <> struct element_of<DW_ELEMENT_I64> : i64_element {};
template <> struct element_of<DW_ELEMENT_BF16> : bf16_element {};
template <> struct element_of<DW_ELEMENT_F16> : f16_element {};
template <> struct element_of<DW_ELEMENT_F32> : f32_element {};
template <> struct element_of<DW_ELEMENT_F64> : f64_element {};

// Stores a struct of 16 bytes at once, or a smaller one. Where another branch stores the same elements one by one, the
// compiler divides a plain copy of the struct in the same way.
template <class Piece> DEVICE void store_at_once(Piece *to, const Piece &from) {
    if constexpr (sizeof(Piece) == 16) {
        union {
            Piece piece;
            unsigned word[4];
        } same = {from};
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                     :
                     : "l"(to), "r"(same.word[0]), "r"(same.word[1]), "r"(same.word[2]), "r"(same.word[3])
                     : "memory");
    } else {
        *to = from;
    }
}

// Loads a struct of 16 bytes at once, or a smaller one, where it stands in the source: the compiler puts plain loads off
// until their results are needed, to save registers.
template <class Piece> DEVICE Piece load_at_once(const Piece *from) {
    if constexpr (sizeof(Piece) == 16) {
        union {
            unsigned word[4];
            Piece piece;
        } same;
        asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(same.word[0]), "=r"(same.word[1]), "=r"(same.word[2]), "=r"(same.word[3])
                     : "l"(from));
        return same.piece;
    } else {
        return *from;
    }
}

#endif
