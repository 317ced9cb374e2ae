/* The interpreter: evaluates a graph node by node with the reference primitives, every composite
 * by its expansion. It is slow, has no other strategy, and so defines what a graph means; with
 * `high_precision` it is the oracle that kernels are tested against. */
#ifndef DW_REFERENCE_INTERPRET_H
#define DW_REFERENCE_INTERPRET_H

#include "kernel/kernel.h"

typedef struct dw__interpret_options {
    /* Every BF16, F16 and F32 value is held as F64 and nothing is rounded in between; casts between
     * floating-point types do nothing. Bool and integers stay what they are. */
    bool high_precision;
} dw__interpret_options;

/* `sizes`: one per symbol of the graph (NULL when it has none). `leaves`: one per leaf in order,
 * any strides, of the leaf's type or, in high precision, F64 for a floating-point leaf; a leaf
 * that no node uses may have data NULL. On success `outputs`, one per output of the graph, are
 * contiguous, each in its own block: release data with dw__free_aligned. On failure nothing is
 * left allocated and every data is NULL. options NULL: as the graph says, without high precision.
 * DW_SHAPE, DW_TYPE: a leaf's tensor is not what the graph has. DW_INVALID_ARGUMENT: an index is
 * outside its axis. */
dw_status dw__interpret(const dw_graph *graph, const int64_t *sizes, const dw__tensor *leaves,
                        dw__tensor *outputs, const dw__interpret_options *options);

/* The attributes of a node with dims made numbers, in `arena`; as dw__call wants them. */
dw_status dw__node_attrs_at(dw__arena *arena, const dw_graph *graph, dw_node node,
                            const int64_t *sizes, const dw_attr **attrs);
/* A contiguous tensor of a value's type and shape at `sizes`, without data. */
dw_status dw__value_tensor_at(const dw_graph *graph, dw_value value, const int64_t *sizes,
                              dw__tensor *tensor);

#endif
