// The largest finite magnitude of numbers that lie in 32-bit words, as bits: two elements of 16 bits in a word, or one F32.
//
// Magnitudes are compared as signed integers after a constant is added that makes infinities and NaNs, and only them,
// negative. The result is the bits of an F32, with the sign bit where there was an infinity or a NaN. combine() of parts
// gives the result of the whole, in any order.
#ifndef DW_MAGNITUDE_CUH
#define DW_MAGNITUDE_CUH

#include "tensor_types.cuh"

#define SPECIAL_BIT 0x80000000u

// By element type (element_types.h): the bits of signs in a word, and the constant.
template <int type> struct word_of;
template <> struct word_of<DW_ELEMENT_BF16> {
    enum : unsigned { signs = 0x80008000u, raise = 0x00800080u };
};
template <> struct word_of<DW_ELEMENT_F16> {
    enum : unsigned { signs = 0x80008000u, raise = 0x04000400u };
};
template <> struct word_of<DW_ELEMENT_F32> {
    enum : unsigned { signs = 0x80000000u, raise = 0x00800000u };
};

template <int type> struct magnitude {
    unsigned most, special; // the largest in each element of a word, raised; all of them, of which the signs count

    DEVICE_MEMBER magnitude none() { return {word_of<type>::raise, 0}; }

    __device__ __forceinline__ void observe(unsigned word) {
        const unsigned raised = (word & ~word_of<type>::signs) + word_of<type>::raise;
        if constexpr (type == DW_ELEMENT_F32) most = (unsigned)max((int)most, (int)raised);
        else asm("max.s16x2 %0, %0, %1;" : "+r"(most) : "r"(raised));
        special |= raised;
    }

    __device__ __forceinline__ unsigned found() const {
        unsigned x = most - word_of<type>::raise;
        if constexpr (type != DW_ELEMENT_F32) {
            x = max(x & 0xffffu, x >> 16);
            x = type == DW_ELEMENT_F16 ? __float_as_uint(f16_to_float((unsigned short)x)) : x << 16;
        }
        return x | (special & word_of<type>::signs ? SPECIAL_BIT : 0u);
    }
};

DEVICE unsigned combine(unsigned a, unsigned b) {
    return max(a & ~SPECIAL_BIT, b & ~SPECIAL_BIT) | ((a | b) & SPECIAL_BIT);
}

// Combines the parts of all threads of a block.
template <int threads> DEVICE unsigned magnitude_of_block(unsigned x) {
    __shared__ unsigned warps[threads / 32];
    __syncthreads(); // the parts of a call before have been read
    x = __reduce_max_sync(0xffffffffu, x & ~SPECIAL_BIT) | (__any_sync(0xffffffffu, x >> 31) ? SPECIAL_BIT : 0u);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    for (int i = 0; i < threads / 32; i++) x = combine(x, warps[i]);
    return x;
}

#endif
