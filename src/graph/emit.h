/* Writing formulas: short calls that append nodes to a graph.
 *
 * The status is sticky: after the first failure every call does nothing and returns DW_NONE, so a
 * formula reads as one and is checked once, at its end. Rules of the table (expansions, gradients)
 * and passes are written with it.
 */
#ifndef DW_GRAPH_EMIT_H
#define DW_GRAPH_EMIT_H

#include "graph/internal.h"

typedef struct dw__emitter {
    dw_graph *graph;
    dw_status status;
} dw__emitter;

/* A copy of a value's type: the graph's own records move when nodes are appended. */
typedef struct dw__type {
    dw_dtype dtype;
    int rank;
    dw_dim shape[DW_MAX_RANK];
} dw__type;
dw__type dw__type_of(const dw_graph *graph, dw_value value);
bool dw__shape_equal(const dw__type *a, const dw__type *b);
/* What a composite computes in: F64 for F64, F32 for every shorter floating-point type. */
dw_dtype dw__compute_dtype(dw_dtype dtype);
dw_dtype dw__output_dtype(const dw_graph *graph, dw_node node, uint32_t index);

/* Node with output 0; and, for a node with more outputs, the node (read it when status is
 * DW_OK). */
dw_value dw__emit(dw__emitter *e, dw_op op, uint32_t input_count, const dw_value *inputs,
                  uint32_t attr_count, const dw_attr *attrs);
dw_node dw__emit_node(dw__emitter *e, dw_op op, uint32_t input_count, const dw_value *inputs,
                      uint32_t attr_count, const dw_attr *attrs);

dw_value dw__emit_unary(dw__emitter *e, dw_op op, dw_value x);
dw_value dw__emit_binary(dw__emitter *e, dw_op op, dw_value x, dw_value y);
/* Second operand: a constant like x. */
dw_value dw__emit_with_number(dw__emitter *e, dw_op op, dw_value x, double number);
dw_value dw__emit_select(dw__emitter *e, dw_value condition, dw_value x, dw_value y);
/* x when it has the dtype already. */
dw_value dw__emit_cast(dw__emitter *e, dw_value x, dw_dtype dtype);
/* x in the type that a composite computes in */
dw_value dw__emit_widen(dw__emitter *e, dw_value x);
dw_value dw__emit_constant(dw__emitter *e, dw_dtype dtype, int rank, const dw_dim *shape,
                           double value);
dw_value dw__emit_like(dw__emitter *e, dw_value x, double value);
/* Scalar holding `dim`: a constant where it is a number, else a `size` node. */
dw_value dw__emit_size(dw__emitter *e, dw_dtype dtype, dw_dim dim);
dw_value dw__emit_iota(dw__emitter *e, dw_dtype dtype, int rank, const dw_dim *shape, int axis);

/* x when it has the shape already. */
dw_value dw__emit_reshape(dw__emitter *e, dw_value x, int rank, const dw_dim *shape);
/* x [.., N] as [rows, N] */
dw_value dw__emit_flatten_rows(dw__emitter *e, dw_value x);
dw_value dw__emit_broadcast(dw__emitter *e, dw_value x, int rank, const dw_dim *shape);
dw_value dw__emit_broadcast_like(dw__emitter *e, dw_value x, dw_value like);
dw_value dw__emit_permute(dw__emitter *e, dw_value x, int rank, const int64_t *perm);
/* [start, limit) along one axis, all of the others. */
dw_value dw__emit_slice(dw__emitter *e, dw_value x, int axis, dw_dim start, dw_dim limit);
dw_value dw__emit_concat(dw__emitter *e, dw_value x, dw_value y, int axis);
dw_value dw__emit_matmul(dw__emitter *e, dw_value a, dw_value b, bool transpose_a,
                         bool transpose_b);

/* Reduction over one axis (keep as given), and over all axes before the last `trailing` ones. */
dw_value dw__emit_reduce(dw__emitter *e, dw_op op, dw_value x, int axis, bool keep);
dw_value dw__emit_reduce_axes(dw__emitter *e, dw_op op, dw_value x, uint32_t count,
                              const int64_t *axes, bool keep);
dw_value dw__emit_sum_leading(dw__emitter *e, dw_value x, int trailing);
/* Reduced over `axis`, kept, and broadcast back to x's shape. */
dw_value dw__emit_reduce_spread(dw__emitter *e, dw_op op, dw_value x, int axis);
/* Mean over `axis`, spread likewise. */
dw_value dw__emit_mean_spread(dw__emitter *e, dw_value x, int axis);
/* x [..] as [.., 1] */
dw_value dw__emit_unsqueeze_last(dw__emitter *e, dw_value x);
/* x [.., 1] spread over a last axis: x has one axis fewer than `like`. */
dw_value dw__emit_spread_last(dw__emitter *e, dw_value x, dw_value like);
/* x divided by the size of a dim, or of a product of dims */
dw_value dw__emit_divide_by_dim(dw__emitter *e, dw_value x, dw_dim dim);

dw_dim dw__emit_dim_add(dw__emitter *e, dw_dim a, dw_dim b);
dw_dim dw__emit_dim_sub(dw__emitter *e, dw_dim a, dw_dim b);
dw_dim dw__emit_dim_mul(dw__emitter *e, dw_dim a, dw_dim b);
dw_dim dw__emit_dim_div(dw__emitter *e, dw_dim a, dw_dim b);
/* Product of `count` dims (1 for none). */
dw_dim dw__emit_dim_product(dw__emitter *e, int count, const dw_dim *dims);

/* Pieces shared by composites. Softmax over the last axis of x (F32 or F64), where a row of -inf
 * alone gives zeros: `probabilities` like x, `lse` without the last axis (either may be NULL). */
void dw__emit_softmax(dw__emitter *e, dw_value x, int axis, dw_value *probabilities, dw_value *lse);

/* In gradient.c: the gradient of a composite by way of its expansion; any rule may fall back to
 * it. */
dw_status dw__gradient_by_expansion(dw_graph *graph, dw_node node, const dw_value *output_grads,
                                    const bool *needed, dw_value *input_grads);

#endif
