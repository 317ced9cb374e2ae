/* Transposes 4 x 4 floats in registers, for packing and for attention tiles. */
#ifndef DW_TRANSPOSE_H
#define DW_TRANSPOSE_H

#include <stdint.h>

#define DW_INLINE static inline __attribute__((always_inline))

typedef float quad __attribute__((vector_size(16)));
typedef float quad_in_memory __attribute__((vector_size(16), aligned(4), may_alias));
enum { DW_QUAD = 4 };

/* to[j*to_stride + i] = from[i*from_stride + j] for i, j in 0..3 */
DW_INLINE void dw__transpose_quad(const float *from, int64_t from_stride, float *to,
                                  int64_t to_stride) {
    quad r0 = *(const quad_in_memory *)from;
    quad r1 = *(const quad_in_memory *)(from + from_stride);
    quad r2 = *(const quad_in_memory *)(from + 2 * from_stride);
    quad r3 = *(const quad_in_memory *)(from + 3 * from_stride);
    quad low01 = __builtin_shufflevector(r0, r1, 0, 4, 1, 5);
    quad high01 = __builtin_shufflevector(r0, r1, 2, 6, 3, 7);
    quad low23 = __builtin_shufflevector(r2, r3, 0, 4, 1, 5);
    quad high23 = __builtin_shufflevector(r2, r3, 2, 6, 3, 7);
    *(quad_in_memory *)to = __builtin_shufflevector(low01, low23, 0, 1, 4, 5);
    *(quad_in_memory *)(to + to_stride) = __builtin_shufflevector(low01, low23, 2, 3, 6, 7);
    *(quad_in_memory *)(to + 2 * to_stride) = __builtin_shufflevector(high01, high23, 0, 1, 4, 5);
    *(quad_in_memory *)(to + 3 * to_stride) = __builtin_shufflevector(high01, high23, 2, 3, 6, 7);
}

#endif
