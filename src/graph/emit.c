#include "graph/emit.h"
#include <math.h>
#include <string.h>

dw__type dw__type_of(const dw_graph *graph, dw_value value) {
    dw__type type = {dw_value_dtype(graph, value), dw_value_rank(graph, value), {0}};
    if (type.rank > 0)
        memcpy(type.shape, dw_value_shape(graph, value), (size_t)type.rank * sizeof(dw_dim));
    return type;
}

bool dw__shape_equal(const dw__type *a, const dw__type *b) {
    return a->rank == b->rank &&
           (a->rank == 0 || memcmp(a->shape, b->shape, (size_t)a->rank * sizeof(dw_dim)) == 0);
}

dw_dtype dw__compute_dtype(dw_dtype dtype) { return dtype == DW_F64 ? DW_F64 : DW_F32; }

dw_dtype dw__output_dtype(const dw_graph *graph, dw_node node, uint32_t index) {
    return dw_value_dtype(graph, dw_node_output(graph, node, index));
}

dw_node dw__emit_node(dw__emitter *e, dw_op op, uint32_t input_count, const dw_value *inputs,
                      uint32_t attr_count, const dw_attr *attrs) {
    dw_node node = DW_NONE;
    if (e->status != DW_OK) return DW_NONE;
    e->status = dw_graph_append(e->graph, op, input_count, inputs, attr_count, attrs, &node);
    return e->status == DW_OK ? node : DW_NONE;
}

dw_value dw__emit(dw__emitter *e, dw_op op, uint32_t input_count, const dw_value *inputs,
                  uint32_t attr_count, const dw_attr *attrs) {
    dw_node node = dw__emit_node(e, op, input_count, inputs, attr_count, attrs);
    return node == DW_NONE ? DW_NONE : dw_node_output(e->graph, node, 0);
}

dw_value dw__emit_unary(dw__emitter *e, dw_op op, dw_value x) {
    return dw__emit(e, op, 1, &x, 0, NULL);
}

dw_value dw__emit_binary(dw__emitter *e, dw_op op, dw_value x, dw_value y) {
    return dw__emit(e, op, 2, (dw_value[]){x, y}, 0, NULL);
}

dw_value dw__emit_with_number(dw__emitter *e, dw_op op, dw_value x, double number) {
    return dw__emit_binary(e, op, x, dw__emit_like(e, x, number));
}

dw_value dw__emit_select(dw__emitter *e, dw_value condition, dw_value x, dw_value y) {
    return dw__emit(e, DW_OP_SELECT, 3, (dw_value[]){condition, x, y}, 0, NULL);
}

dw_value dw__emit_cast(dw__emitter *e, dw_value x, dw_dtype dtype) {
    if (e->status != DW_OK || dw_value_dtype(e->graph, x) == dtype) return x;
    dw_attr attr = dw_attr_int(DW_ATTR_KEY_DTYPE, dtype);
    return dw__emit(e, DW_OP_CAST, 1, &x, 1, &attr);
}

dw_value dw__emit_widen(dw__emitter *e, dw_value x) {
    if (e->status != DW_OK) return DW_NONE;
    return dw__emit_cast(e, x, dw__compute_dtype(dw_value_dtype(e->graph, x)));
}

dw_value dw__emit_constant(dw__emitter *e, dw_dtype dtype, int rank, const dw_dim *shape,
                           double value) {
    dw_attr attrs[] = {dw_attr_list(DW_ATTR_KEY_SHAPE, (uint32_t)rank, shape),
                       dw_attr_int(DW_ATTR_KEY_DTYPE, dtype),
                       dw_attr_float(DW_ATTR_KEY_VALUE, value)};
    return dw__emit(e, DW_OP_CONSTANT, 0, NULL, DW_COUNT(attrs), attrs);
}

dw_value dw__emit_like(dw__emitter *e, dw_value x, double value) {
    if (e->status != DW_OK) return DW_NONE;
    dw__type type = dw__type_of(e->graph, x);
    return dw__emit_constant(e, type.dtype, type.rank, type.shape, value);
}

dw_value dw__emit_size(dw__emitter *e, dw_dtype dtype, dw_dim dim) {
    if (dim >= 0) return dw__emit_constant(e, dtype, 0, NULL, (double)dim);
    dw_attr attrs[] = {dw_attr_list(DW_ATTR_KEY_SIZE, 1, &dim),
                       dw_attr_int(DW_ATTR_KEY_DTYPE, dtype)};
    return dw__emit(e, DW_OP_SIZE, 0, NULL, DW_COUNT(attrs), attrs);
}

dw_value dw__emit_iota(dw__emitter *e, dw_dtype dtype, int rank, const dw_dim *shape, int axis) {
    dw_attr attrs[] = {dw_attr_int(DW_ATTR_KEY_AXIS, axis),
                       dw_attr_list(DW_ATTR_KEY_SHAPE, (uint32_t)rank, shape),
                       dw_attr_int(DW_ATTR_KEY_DTYPE, dtype)};
    return dw__emit(e, DW_OP_IOTA, 0, NULL, DW_COUNT(attrs), attrs);
}

static dw_value emit_shaped(dw__emitter *e, dw_op op, dw_value x, int rank, const dw_dim *shape) {
    if (e->status != DW_OK) return DW_NONE;
    dw__type have = dw__type_of(e->graph, x);
    dw__type want = {have.dtype, rank, {0}};
    if (rank > 0) memcpy(want.shape, shape, (size_t)rank * sizeof(dw_dim));
    if (dw__shape_equal(&have, &want)) return x;
    dw_attr attr = dw_attr_list(DW_ATTR_KEY_SHAPE, (uint32_t)rank, want.shape);
    return dw__emit(e, op, 1, &x, 1, &attr);
}

dw_value dw__emit_reshape(dw__emitter *e, dw_value x, int rank, const dw_dim *shape) {
    return emit_shaped(e, DW_OP_RESHAPE, x, rank, shape);
}

dw_value dw__emit_flatten_rows(dw__emitter *e, dw_value x) {
    if (e->status != DW_OK) return DW_NONE;
    dw__type type = dw__type_of(e->graph, x);
    dw_dim rows = dw__emit_dim_product(e, type.rank - 1, type.shape);
    return dw__emit_reshape(e, x, 2, (dw_dim[]){rows, type.shape[type.rank - 1]});
}

dw_value dw__emit_broadcast(dw__emitter *e, dw_value x, int rank, const dw_dim *shape) {
    return emit_shaped(e, DW_OP_BROADCAST, x, rank, shape);
}

dw_value dw__emit_broadcast_like(dw__emitter *e, dw_value x, dw_value like) {
    if (e->status != DW_OK) return DW_NONE;
    dw__type type = dw__type_of(e->graph, like);
    return dw__emit_broadcast(e, x, type.rank, type.shape);
}

dw_value dw__emit_permute(dw__emitter *e, dw_value x, int rank, const int64_t *perm) {
    dw_attr attr = dw_attr_list(DW_ATTR_KEY_PERM, (uint32_t)rank, perm);
    return dw__emit(e, DW_OP_PERMUTE, 1, &x, 1, &attr);
}

dw_value dw__emit_slice(dw__emitter *e, dw_value x, int axis, dw_dim start, dw_dim limit) {
    if (e->status != DW_OK) return DW_NONE;
    dw__type type = dw__type_of(e->graph, x);
    dw_dim starts[DW_MAX_RANK] = {0};
    if (start == 0 && limit == type.shape[axis]) return x;
    starts[axis] = start;
    type.shape[axis] = limit;
    dw_attr attrs[] = {dw_attr_list(DW_ATTR_KEY_START, (uint32_t)type.rank, starts),
                       dw_attr_list(DW_ATTR_KEY_LIMIT, (uint32_t)type.rank, type.shape)};
    return dw__emit(e, DW_OP_SLICE, 1, &x, DW_COUNT(attrs), attrs);
}

dw_value dw__emit_concat(dw__emitter *e, dw_value x, dw_value y, int axis) {
    dw_attr attr = dw_attr_int(DW_ATTR_KEY_AXIS, axis);
    return dw__emit(e, DW_OP_CONCAT, 2, (dw_value[]){x, y}, 1, &attr);
}

dw_value dw__emit_matmul(dw__emitter *e, dw_value a, dw_value b, bool transpose_a,
                         bool transpose_b) {
    dw_attr attrs[2];
    uint32_t count = 0;
    if (transpose_a) attrs[count++] = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_A, 1);
    if (transpose_b) attrs[count++] = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_B, 1);
    return dw__emit(e, DW_OP_MATMUL, 2, (dw_value[]){a, b}, count, attrs);
}

dw_value dw__emit_wide_matmul(dw__emitter *e, dw_value a, dw_value b, bool transpose_a,
                              bool transpose_b) {
    if (e->status != DW_OK) return DW_NONE;
    const dw_dtype dtype = dw_value_dtype(e->graph, a), wide = dw__compute_dtype(dtype);
    const dw_attr attrs[] = {dw_attr_int(DW_ATTR_KEY_TRANSPOSE_A, transpose_a),
                             dw_attr_int(DW_ATTR_KEY_TRANSPOSE_B, transpose_b),
                             dw_attr_int(DW_ATTR_KEY_DTYPE, wide)};
    if (wide == dtype) return dw__emit_matmul(e, a, b, transpose_a, transpose_b);
    return dw__emit(e, DW_OP_MATMUL, 2, (dw_value[]){a, b}, DW_COUNT(attrs), attrs);
}

dw_value dw__emit_reduce_axes(dw__emitter *e, dw_op op, dw_value x, uint32_t count,
                              const int64_t *axes, bool keep) {
    if (count == 0) return x;
    dw_attr attrs[] = {dw_attr_list(DW_ATTR_KEY_AXES, count, axes),
                       dw_attr_int(DW_ATTR_KEY_KEEP, keep)};
    return dw__emit(e, op, 1, &x, DW_COUNT(attrs), attrs);
}

dw_value dw__emit_reduce(dw__emitter *e, dw_op op, dw_value x, int axis, bool keep) {
    return dw__emit_reduce_axes(e, op, x, 1, (int64_t[]){axis}, keep);
}

dw_value dw__emit_sum_leading(dw__emitter *e, dw_value x, int trailing) {
    if (e->status != DW_OK) return DW_NONE;
    int64_t axes[DW_MAX_RANK];
    int count = dw_value_rank(e->graph, x) - trailing;
    for (int i = 0; i < count; i++) axes[i] = i;
    return dw__emit_reduce_axes(e, DW_OP_REDUCE_SUM, x, count > 0 ? (uint32_t)count : 0, axes,
                                false);
}

dw_value dw__emit_reduce_spread(dw__emitter *e, dw_op op, dw_value x, int axis) {
    return dw__emit_broadcast_like(e, dw__emit_reduce(e, op, x, axis, true), x);
}

dw_value dw__emit_mean_spread(dw__emitter *e, dw_value x, int axis) {
    if (e->status != DW_OK) return DW_NONE;
    dw_dim count = dw_value_shape(e->graph, x)[axis];
    dw_value sum = dw__emit_reduce(e, DW_OP_REDUCE_SUM, x, axis, true);
    return dw__emit_broadcast_like(e, dw__emit_divide_by_dim(e, sum, count), x);
}

dw_value dw__emit_unsqueeze_last(dw__emitter *e, dw_value x) {
    if (e->status != DW_OK) return DW_NONE;
    dw__type type = dw__type_of(e->graph, x);
    if (type.rank == DW_MAX_RANK) {
        e->status = dw__fail(DW_SHAPE, "value %s has rank %d; at most %d is supported here",
                             dw_value_name(e->graph, x), type.rank, DW_MAX_RANK - 1);
        return DW_NONE;
    }
    type.shape[type.rank] = 1;
    return dw__emit_reshape(e, x, type.rank + 1, type.shape);
}

dw_value dw__emit_spread_last(dw__emitter *e, dw_value x, dw_value like) {
    return dw__emit_broadcast_like(e, dw__emit_unsqueeze_last(e, x), like);
}

dw_value dw__emit_divide_by_dim(dw__emitter *e, dw_value x, dw_dim dim) {
    if (e->status != DW_OK) return DW_NONE;
    dw_value wide = dw__emit_widen(e, x); /* BF16 and F16 cannot represent every size */
    if (e->status != DW_OK) return DW_NONE;
    dw_value size = dw__emit_size(e, dw_value_dtype(e->graph, wide), dim);
    dw_value y = dw__emit_binary(e, DW_OP_DIV, wide, dw__emit_broadcast_like(e, size, wide));
    return dw__emit_cast(e, y, dw_value_dtype(e->graph, x));
}

typedef dw_status dim_function(dw_graph *graph, dw_dim a, dw_dim b, dw_dim *result);

static dw_dim emit_dim(dw__emitter *e, dim_function *function, dw_dim a, dw_dim b) {
    dw_dim result = 0;
    if (e->status == DW_OK) e->status = function(e->graph, a, b, &result);
    return result;
}

dw_dim dw__emit_dim_add(dw__emitter *e, dw_dim a, dw_dim b) {
    return emit_dim(e, dw_dim_add, a, b);
}

dw_dim dw__emit_dim_sub(dw__emitter *e, dw_dim a, dw_dim b) {
    return emit_dim(e, dw_dim_sub, a, b);
}

dw_dim dw__emit_dim_mul(dw__emitter *e, dw_dim a, dw_dim b) {
    return emit_dim(e, dw_dim_mul, a, b);
}

dw_dim dw__emit_dim_div(dw__emitter *e, dw_dim a, dw_dim b) {
    return emit_dim(e, dw_dim_div, a, b);
}

dw_dim dw__emit_dim_product(dw__emitter *e, int count, const dw_dim *dims) {
    dw_dim product = 1;
    for (int i = 0; i < count; i++) product = dw__emit_dim_mul(e, product, dims[i]);
    return product;
}

void dw__emit_softmax(dw__emitter *e, dw_value x, int axis, dw_value *probabilities,
                      dw_value *lse) {
    dw_value top = dw__emit_reduce(e, DW_OP_REDUCE_MAX, x, axis, true);
    dw_value empty = dw__emit_with_number(e, DW_OP_EQ, top, -INFINITY);
    /* exp(-inf - 0) is 0 where exp(-inf - -inf) would be NaN */
    dw_value shift = dw__emit_select(e, empty, dw__emit_like(e, top, 0.0), top);
    /* neither result depends on the shift, so its gradients would cancel */
    shift = dw__emit_unary(e, DW_OP_STOP_GRADIENT, shift);
    dw_value weights = dw__emit_unary(
        e, DW_OP_EXP, dw__emit_binary(e, DW_OP_SUB, x, dw__emit_broadcast_like(e, shift, x)));
    dw_value total = dw__emit_reduce(e, DW_OP_REDUCE_SUM, weights, axis, true);
    /* The divisor is never 0, so its quotients and its logarithm have finite gradients. */
    dw_value divisor = dw__emit_select(e, empty, dw__emit_like(e, total, 1.0), total);
    if (probabilities)
        *probabilities =
            dw__emit_binary(e, DW_OP_DIV, weights, dw__emit_broadcast_like(e, divisor, weights));
    if (!lse) return;
    dw_value kept = dw__emit_binary(e, DW_OP_ADD, shift, dw__emit_unary(e, DW_OP_LOG, divisor));
    kept = dw__emit_select(e, empty, dw__emit_like(e, kept, -INFINITY), kept);
    if (e->status != DW_OK) return;
    dw__type type = dw__type_of(e->graph, kept);
    memmove(type.shape + axis, type.shape + axis + 1,
            (size_t)(type.rank - axis - 1) * sizeof(dw_dim));
    *lse = dw__emit_reshape(e, kept, type.rank - 1, type.shape);
}
