/* The index space of a kernel that visits each element of a shape: its axes, merged as far as every tensor allows, and
 * the strides of each tensor along them. An index in row-major order is the same before and after merging. */
#ifndef DW_ITERATION_H
#define DW_ITERATION_H

#include "kernel/kernel.h"

enum { DW__ITERATED = DW_MAX_INPUTS + DW_MAX_OUTPUTS };

typedef struct dw__iteration {
    int64_t count; /* elements */
    int rank;      /* at least 1 */
    int64_t shape[DW_MAX_RANK];
    uint32_t tensors;
    int64_t stride[DW__ITERATED][DW_MAX_RANK]; /* in elements */
} dw__iteration;

/* Begins with the axes of a shape and no tensor. */
void dw__iteration_begin(dw__iteration *it, int rank, const int64_t *shape);
/* Adds a tensor: one stride for each axis that dw__iteration_begin was given. */
void dw__iteration_add(dw__iteration *it, const int64_t *stride);
/* Drops axes of one element and merges neighbours. Call it once, after the last tensor. */
void dw__iteration_merge(dw__iteration *it);

#endif
