/* Iterates over strided tensors, one index at a time. */
#ifndef DW_REFERENCE_INDEX_H
#define DW_REFERENCE_INDEX_H

#include "kernel/kernel.h"

/* Advances `index` in row-major order. After the last index returns false and sets all entries to zero. */
static inline bool dw__index_next(int rank, const int64_t *shape, int64_t *index) {
    for (int axis = rank - 1; axis >= 0; axis--) {
        if (++index[axis] < shape[axis]) return true;
        index[axis] = 0;
    }
    return false;
}

/* Offset in elements of `index` under `stride`. */
static inline int64_t dw__index_offset(int rank, const int64_t *stride, const int64_t *index) {
    int64_t offset = 0;
    for (int axis = 0; axis < rank; axis++) offset += index[axis] * stride[axis];
    return offset;
}

/* Address of element `offset`. */
static inline void *dw__element(const dw__tensor *tensor, int64_t offset) {
    return (char *)tensor->data + offset * dw_dtype_bits(tensor->dtype) / 8;
}

/* Views `tensor` as broadcast to `shape` (ranks aligned at the right): new and stretched axes get stride 0.
 * The shapes must be compatible. */
dw__tensor dw__tensor_broadcast(const dw__tensor *tensor, int rank, const int64_t *shape);
/* Copies elements in row-major order. The tensors have the same type and the same number of elements. */
void dw__tensor_copy(dw__tensor *to, const dw__tensor *from);

#endif
