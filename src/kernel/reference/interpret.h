/* The interpreter evaluates a graph node by node with the reference primitives, and every composite by its
 * expansion. It is slow and has a single strategy, so it defines what a graph means. With `high_precision` it
 * is the oracle for tests of kernels. */
#ifndef DW_REFERENCE_INTERPRET_H
#define DW_REFERENCE_INTERPRET_H

#include "kernel/kernel.h"

typedef struct dw__interpret_options {
    /* Holds every BF16, F16 and F32 value as F64 without rounding in between; casts between floating-point
     * types do nothing. Bool and integer values are unchanged. */
    bool high_precision;
} dw__interpret_options;

/* `sizes` has one entry per symbol of the graph (NULL if it has none). `leaves` has one tensor per leaf in
 * order, with any strides and the leaf's dtype, or F64 for a floating-point leaf in high precision. The data
 * of an unused leaf may be NULL. On success `outputs` has one contiguous tensor per output of the graph, each
 * in its own block; release data with dw__free_aligned. On failure nothing stays allocated and every data is
 * NULL. options NULL means default precision. DW_SHAPE, DW_TYPE: a leaf's tensor does not match the graph.
 * DW_INVALID_ARGUMENT: an index is outside its axis. */
dw_status dw__interpret(const dw_graph *graph, const int64_t *sizes, const dw__tensor *leaves,
                        dw__tensor *outputs, const dw__interpret_options *options);

#endif
