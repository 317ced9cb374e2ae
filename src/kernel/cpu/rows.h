/* A tensor as rows, for kernels that work along the last axis: the last axis is a row of unit stride, all
 * other axes together number the rows. */
#ifndef DW_CPU_ROWS_H
#define DW_CPU_ROWS_H

#include "kernel/kernel.h"

typedef struct dw__rows {
    int64_t count, length;
    int rank; /* leading axes after merging */
    int64_t shape[DW_MAX_RANK], stride[DW_MAX_RANK];
} dw__rows;

/* True if the last axis has unit stride. Rank 0 has no rows. */
static inline bool dw__rows_fit(const dw__tensor *t) {
    return t->rank > 0 && (t->shape[t->rank - 1] == 1 || t->stride[t->rank - 1] == 1);
}

static inline dw__rows dw__rows_of(const dw__tensor *t) {
    dw__rows rows = {.count = 1, .length = t->shape[t->rank - 1]};
    for (int axis = 0; axis < t->rank - 1; axis++) {
        int64_t size = t->shape[axis], stride = t->stride[axis];
        rows.count *= size;
        if (size == 1) continue;
        int at = rows.rank;
        if (at > 0 && rows.stride[at - 1] == stride * size)
            rows.shape[--at] *= size;
        else
            rows.shape[at] = size;
        rows.stride[at] = stride;
        rows.rank = at + 1;
    }
    return rows;
}

/* Elements from the tensor's first element to the first element of `row`. */
static inline int64_t dw__rows_offset(const dw__rows *rows, int64_t row) {
    if (rows->rank == 1) return row * rows->stride[0];
    int64_t offset = 0;
    for (int axis = rows->rank - 1; axis >= 0; axis--) {
        offset += row % rows->shape[axis] * rows->stride[axis];
        row /= rows->shape[axis];
    }
    return offset;
}

static inline float *dw__rows_at(const dw__tensor *t, const dw__rows *rows, int64_t row) {
    return t->data ? (float *)t->data + dw__rows_offset(rows, row) : NULL;
}

static inline int64_t dw__ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

#endif
