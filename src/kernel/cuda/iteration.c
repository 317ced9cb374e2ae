#include "kernel/cuda/iteration.h"
#include <string.h>

void dw__iteration_begin(dw__iteration *it, int rank, const int64_t *shape) {
    it->count = 1;
    it->rank = rank;
    it->tensors = 0;
    for (int axis = 0; axis < rank; axis++) {
        it->shape[axis] = shape[axis];
        it->count *= shape[axis];
    }
}

void dw__iteration_add(dw__iteration *it, const int64_t *stride) {
    memcpy(it->stride[it->tensors++], stride, (size_t)it->rank * sizeof *stride);
}

/* True if axis `inner` continues axis `outer` in every tensor. */
static bool axes_merge(const dw__iteration *it, int outer, int inner) {
    for (uint32_t t = 0; t < it->tensors; t++)
        if (it->stride[t][outer] != it->stride[t][inner] * it->shape[inner]) return false;
    return true;
}

void dw__iteration_merge(dw__iteration *it) {
    int merged = 0;
    for (int axis = 0; axis < it->rank; axis++) {
        if (it->shape[axis] == 1) continue;
        int64_t size = it->shape[axis];
        if (merged > 0 && axes_merge(it, merged - 1, axis)) size *= it->shape[--merged];
        it->shape[merged] = size;
        for (uint32_t t = 0; t < it->tensors; t++) it->stride[t][merged] = it->stride[t][axis];
        merged++;
    }
    if (merged == 0) { /* one element */
        it->shape[merged++] = 1;
        for (uint32_t t = 0; t < it->tensors; t++) it->stride[t][0] = 0;
    }
    it->rank = merged;
}
