// Elements of strided tensors, in the row-major order of their axes.
#ifndef DW_STRIDED_CUH
#define DW_STRIDED_CUH

#include "tensor_types.cuh"

// Each element from 0 to count - 1 once, over all threads of the grid.
#define EACH_ELEMENT(e, count)                                                                                       \
    for (long long e = blockIdx.x * (long long)blockDim.x + threadIdx.x; e < (count); e += gridDim.x * (long long)blockDim.x)

// Returns the offset of an element; the rank is at least 1.
DEVICE long long offset_of(int rank, const long long *shape, const long long *stride, long long element) {
    unsigned long long rest = (unsigned long long)element;
    long long offset = 0;
    for (int axis = rank - 1; axis > 0; axis--) {
        const unsigned long long size = (unsigned long long)shape[axis];
        offset += (long long)(rest % size) * stride[axis];
        rest /= size;
    }
    return offset + (long long)rest * stride[0];
}

#endif
