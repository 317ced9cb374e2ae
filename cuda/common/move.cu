// Copies, fills and index ramps of strided tensors.
//
// Each thread moves one element at a time, in the row-major order of the iteration; neighbours in a warp touch
// neighbours in memory where the last axis is contiguous.
//
// Define: WIDTH, the bytes of an element (1, 2, 4 or 8).
//
// Bytes per element: a copy reads and writes WIDTH, a fill writes it.

#include "move_params.h"
#include "strided.cuh"

template <int width> struct word_of;
template <> struct word_of<1> {
    typedef unsigned char type;
};
template <> struct word_of<2> {
    typedef unsigned short type;
};
template <> struct word_of<4> {
    typedef unsigned int type;
};
template <> struct word_of<8> {
    typedef unsigned long long type;
};
typedef word_of<WIDTH>::type word;

extern "C" __global__ void __launch_bounds__(256) move_copy(const __grid_constant__ dw_move_params p) {
    EACH_ELEMENT(e, p.count)
    ((word *)p.to)[offset_of(p.rank, p.shape, p.to_stride, e)] = ((const word *)p.from)[offset_of(p.rank, p.shape, p.from_stride, e)];
}

extern "C" __global__ void __launch_bounds__(256) move_fill(const __grid_constant__ dw_move_params p) {
    EACH_ELEMENT(e, p.count)
    ((word *)p.to)[offset_of(p.rank, p.shape, p.to_stride, e)] = (word)p.value;
}

// The index along an axis is what from_stride makes of the element's place: 1 on that axis, 0 on the others.
extern "C" __global__ void __launch_bounds__(256) move_iota(const __grid_constant__ dw_move_params p) {
    EACH_ELEMENT(e, p.count) {
        const long long index = offset_of(p.rank, p.shape, p.from_stride, e), to = offset_of(p.rank, p.shape, p.to_stride, e);
        switch (p.type) {
        case DW_ELEMENT_I32: i32_element::store(p.to, to, (int)index); break;
        case DW_ELEMENT_I64: i64_element::store(p.to, to, index); break;
        case DW_ELEMENT_BF16: bf16_element::store(p.to, to, (float)index); break;
        case DW_ELEMENT_F16: f16_element::store(p.to, to, (float)index); break;
        case DW_ELEMENT_F32: f32_element::store(p.to, to, (float)index); break;
        case DW_ELEMENT_F64: f64_element::store(p.to, to, (double)index); break;
        }
    }
}
