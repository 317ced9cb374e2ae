/* Emitter: short calls that append the nodes of a formula to a graph.
 *
 * The status is sticky: after the first failure every call does nothing and returns DW_NONE. A formula
 * therefore reads without checks and is checked once, at its end. The table's rules (expansions, gradients)
 * and the passes use it. */
#ifndef DW_GRAPH_EMIT_H
#define DW_GRAPH_EMIT_H

#include "graph/internal.h"

typedef struct dw__emitter {
    dw_graph *graph;
    dw_status status;
} dw__emitter;

/* A copy of a value's type. The graph's own records move when nodes are appended. */
typedef struct dw__type {
    dw_dtype dtype;
    int rank;
    dw_dim shape[DW_MAX_RANK];
} dw__type;
dw__type dw__type_of(const dw_graph *graph, dw_value value);
bool dw__shape_equal(const dw__type *a, const dw__type *b);
/* The dtype in which a composite computes: F64 for F64, F32 for every shorter floating-point type. */
dw_dtype dw__compute_dtype(dw_dtype dtype);
dw_dtype dw__output_dtype(const dw_graph *graph, dw_node node, uint32_t index);

/* Append a node. dw__emit returns its output 0; dw__emit_node returns the node, for operations with several
 * outputs. The node is valid only while `status` is DW_OK. */
dw_value dw__emit(dw__emitter *e, dw_op op, uint32_t input_count, const dw_value *inputs,
                  uint32_t attr_count, const dw_attr *attrs);
dw_node dw__emit_node(dw__emitter *e, dw_op op, uint32_t input_count, const dw_value *inputs,
                      uint32_t attr_count, const dw_attr *attrs);

dw_value dw__emit_unary(dw__emitter *e, dw_op op, dw_value x);
dw_value dw__emit_binary(dw__emitter *e, dw_op op, dw_value x, dw_value y);
/* Appends a binary node whose second operand is a constant of x's type. */
dw_value dw__emit_with_number(dw__emitter *e, dw_op op, dw_value x, double number);
dw_value dw__emit_select(dw__emitter *e, dw_value condition, dw_value x, dw_value y);
/* Returns x itself if it has the dtype already. */
dw_value dw__emit_cast(dw__emitter *e, dw_value x, dw_dtype dtype);
/* Casts x to dw__compute_dtype. */
dw_value dw__emit_widen(dw__emitter *e, dw_value x);
dw_value dw__emit_constant(dw__emitter *e, dw_dtype dtype, int rank, const dw_dim *shape,
                           double value);
dw_value dw__emit_like(dw__emitter *e, dw_value x, double value);
/* A scalar that holds `dim`: a constant if the dim is a number, else a `size` node. */
dw_value dw__emit_size(dw__emitter *e, dw_dtype dtype, dw_dim dim);
dw_value dw__emit_iota(dw__emitter *e, dw_dtype dtype, int rank, const dw_dim *shape, int axis);

/* Returns x itself if it has the shape already. */
dw_value dw__emit_reshape(dw__emitter *e, dw_value x, int rank, const dw_dim *shape);
/* Reshapes x [.., N] to [rows, N]. */
dw_value dw__emit_flatten_rows(dw__emitter *e, dw_value x);
dw_value dw__emit_broadcast(dw__emitter *e, dw_value x, int rank, const dw_dim *shape);
dw_value dw__emit_broadcast_like(dw__emitter *e, dw_value x, dw_value like);
dw_value dw__emit_permute(dw__emitter *e, dw_value x, int rank, const int64_t *perm);
/* Slices [start, limit) along one axis and keeps the other axes whole. */
dw_value dw__emit_slice(dw__emitter *e, dw_value x, int axis, dw_dim start, dw_dim limit);
dw_value dw__emit_concat(dw__emitter *e, dw_value x, dw_value y, int axis);
dw_value dw__emit_matmul(dw__emitter *e, dw_value a, dw_value b, bool transpose_a,
                         bool transpose_b);
/* The same, with the result in dw__compute_dtype of the operands' dtype: products of BF16 and F16 are not rounded. */
dw_value dw__emit_wide_matmul(dw__emitter *e, dw_value a, dw_value b, bool transpose_a,
                              bool transpose_b);

/* Reduces over one axis (keep as given), or over all axes before the last `trailing` ones. */
dw_value dw__emit_reduce(dw__emitter *e, dw_op op, dw_value x, int axis, bool keep);
dw_value dw__emit_reduce_axes(dw__emitter *e, dw_op op, dw_value x, uint32_t count,
                              const int64_t *axes, bool keep);
dw_value dw__emit_sum_leading(dw__emitter *e, dw_value x, int trailing);
/* Reduces over `axis` and broadcasts the result back to x's shape. */
dw_value dw__emit_reduce_spread(dw__emitter *e, dw_op op, dw_value x, int axis);
/* Mean over `axis`, broadcast back to x's shape. */
dw_value dw__emit_mean_spread(dw__emitter *e, dw_value x, int axis);
/* Reshapes x [..] to [.., 1]. */
dw_value dw__emit_unsqueeze_last(dw__emitter *e, dw_value x);
/* Broadcasts x along a new last axis, as long as that of `like`; x has one axis fewer than `like`. */
dw_value dw__emit_spread_last(dw__emitter *e, dw_value x, dw_value like);
/* Divides x by a dim. The dim may be a product of dims. */
dw_value dw__emit_divide_by_dim(dw__emitter *e, dw_value x, dw_dim dim);

dw_dim dw__emit_dim_add(dw__emitter *e, dw_dim a, dw_dim b);
dw_dim dw__emit_dim_sub(dw__emitter *e, dw_dim a, dw_dim b);
dw_dim dw__emit_dim_mul(dw__emitter *e, dw_dim a, dw_dim b);
dw_dim dw__emit_dim_div(dw__emitter *e, dw_dim a, dw_dim b);
/* Product of `count` dims (1 for none). */
dw_dim dw__emit_dim_product(dw__emitter *e, int count, const dw_dim *dims);

/* In op_expand_groups.c: the group of each of `rows` rows, I32 [rows], from the offsets of the groups. */
dw_value dw__emit_group_of_rows(dw__emitter *e, dw_value offsets, dw_dim rows);
/* Emits group_rows of an index into `groups` groups. With `ignores` an index may also be `groups`: these rows come last,
 * behind the last offset. */
typedef struct dw__grouped_rows {
    dw_value order, place, offsets;
} dw__grouped_rows;
dw__grouped_rows dw__emit_grouped_rows(dw__emitter *e, dw_value index, dw_dim groups, bool ignores);

/* Softmax of x (F32 or F64) over `axis`, shared by several composites. A row that holds only -inf gives
 * zeros. `probabilities` has x's shape; `lse` lacks the axis. Either may be NULL. */
void dw__emit_softmax(dw__emitter *e, dw_value x, int axis, dw_value *probabilities, dw_value *lse);

/* In gradient.c: differentiates a composite through its expansion. Any gradient rule may fall back to it. */
dw_status dw__gradient_by_expansion(dw_graph *graph, dw_node node, const dw_value *output_grads,
                                    const bool *needed, dw_value *input_grads);

#endif
