/* Gradients of primitives that move data, reduce or multiply matrices. */
#include "graph/op_gradient.h"
#include <string.h>

static const dw_attr *attr_of(const dw_graph *graph, dw_node node, dw_attr_key key) {
    return dw_node_attr(graph, node, key);
}

/* ---- data movement -------------------------------------------------------------------------- */

DW__GRADIENT(dw__gradient_reshape) {
    (void)needed;
    dw__emitter e = {graph, DW_OK};
    dw__type x = dw__type_of(graph, dw_node_input(graph, node, 0));
    input_grads[0] = dw__emit_reshape(&e, output_grads[0], x.rank, x.shape);
    return e.status;
}

DW__GRADIENT(dw__gradient_permute) {
    (void)needed;
    dw__emitter e = {graph, DW_OK};
    const dw_attr *perm = attr_of(graph, node, DW_ATTR_KEY_PERM);
    int64_t inverse[DW_MAX_RANK];
    for (uint32_t i = 0; i < perm->count; i++) inverse[perm->list[i]] = i;
    input_grads[0] = dw__emit_permute(&e, output_grads[0], (int)perm->count, inverse);
    return e.status;
}

/* Sums over the axes that x lacks or that have size 1 in x. */
DW__GRADIENT(dw__gradient_broadcast) {
    (void)needed;
    dw__emitter e = {graph, DW_OK};
    dw__type x = dw__type_of(graph, dw_node_input(graph, node, 0));
    dw__type y = dw__type_of(graph, output_grads[0]);
    int64_t axes[DW_MAX_RANK];
    uint32_t count = 0;
    int lead = y.rank - x.rank;
    for (int i = 0; i < y.rank; i++)
        if (i < lead || x.shape[i - lead] != y.shape[i]) axes[count++] = i;
    dw_value sum = dw__emit_reduce_axes(&e, DW_OP_REDUCE_SUM, output_grads[0], count, axes, false);
    input_grads[0] = dw__emit_reshape(&e, sum, x.rank, x.shape);
    return e.status;
}

/* The same where a slice takes one of every `step` elements, as of two interleaved halves: zeros are padded around each
 * element on an axis of its own. */
static dw_value spread_interleaved(dw__emitter *e, dw_value u, int axis, dw_dim start,
                                   int64_t step) {
    dw__type type = dw__type_of(e->graph, u), one = type;
    dw_dim low[DW_MAX_RANK] = {0}, high[DW_MAX_RANK] = {0};
    one.rank = type.rank + 1;
    for (int i = one.rank - 1; i > axis + 1; i--) one.shape[i] = type.shape[i - 1];
    one.shape[axis + 1] = 1;
    low[axis + 1] = start;
    high[axis + 1] = step - 1 - start;
    dw_attr attrs[] = {dw_attr_list(DW_ATTR_KEY_LOW, (uint32_t)one.rank, low),
                       dw_attr_list(DW_ATTR_KEY_HIGH, (uint32_t)one.rank, high)};
    dw_value each = dw__emit_reshape(e, u, one.rank, one.shape);
    each = dw__emit(e, DW_OP_PAD, 1, &each, DW_COUNT(attrs), attrs);
    type.shape[axis] = dw__emit_dim_mul(e, type.shape[axis], step);
    return dw__emit_reshape(e, each, type.rank, type.shape);
}

/* Adds u at start, start + step, ... of zeros. The axis has length `size`. */
static dw_value spread_strided(dw__emitter *e, dw_value u, int axis, dw_dim start, int64_t step,
                               dw_dim size) {
    if (e->status != DW_OK) return DW_NONE;
    dw__type type = dw__type_of(e->graph, u);
    if (type.rank < DW_MAX_RANK && start >= 0 && start < step &&
        dw__emit_dim_mul(e, type.shape[axis], step) == size)
        return spread_interleaved(e, u, axis, start, step);
    dw_value index = dw__emit_iota(e, DW_I64, 1, &type.shape[axis], 0);
    index = dw__emit_with_number(e, DW_OP_MUL, index, (double)step);
    index = dw__emit_binary(e, DW_OP_ADD, index,
                            dw__emit_broadcast_like(e, dw__emit_size(e, DW_I64, start), index));
    dw_attr attrs[] = {dw_attr_int(DW_ATTR_KEY_AXIS, axis),
                       dw_attr_list(DW_ATTR_KEY_SIZE, 1, &size)};
    return dw__emit(e, DW_OP_SCATTER_ADD, 2, (dw_value[]){index, u}, DW_COUNT(attrs), attrs);
}

DW__GRADIENT(dw__gradient_slice) {
    (void)needed;
    dw__emitter e = {graph, DW_OK};
    dw__type x = dw__type_of(graph, dw_node_input(graph, node, 0));
    const dw_attr *start = attr_of(graph, node, DW_ATTR_KEY_START);
    const dw_attr *limit = attr_of(graph, node, DW_ATTR_KEY_LIMIT);
    const dw_attr *step = attr_of(graph, node, DW_ATTR_KEY_STEP);
    dw_dim low[DW_MAX_RANK] = {0}, high[DW_MAX_RANK] = {0};
    bool padded = false;
    dw_value dx = output_grads[0];
    for (int i = 0; i < x.rank; i++) {
        if (step && step->list[i] != 1) {
            dx = spread_strided(&e, dx, i, start->list[i], step->list[i], x.shape[i]);
            continue;
        }
        low[i] = start->list[i];
        high[i] = dw__emit_dim_sub(&e, x.shape[i], limit->list[i]);
        padded = padded || low[i] != 0 || high[i] != 0;
    }
    if (padded) {
        dw_attr attrs[] = {dw_attr_list(DW_ATTR_KEY_LOW, (uint32_t)x.rank, low),
                           dw_attr_list(DW_ATTR_KEY_HIGH, (uint32_t)x.rank, high)};
        dx = dw__emit(&e, DW_OP_PAD, 1, &dx, DW_COUNT(attrs), attrs);
    }
    input_grads[0] = dx;
    return e.status;
}

DW__GRADIENT(dw__gradient_pad) {
    (void)needed;
    dw__emitter e = {graph, DW_OK};
    dw__type x = dw__type_of(graph, dw_node_input(graph, node, 0));
    const dw_attr *low = attr_of(graph, node, DW_ATTR_KEY_LOW);
    dw_value dx = output_grads[0];
    for (int i = 0; i < x.rank; i++)
        dx =
            dw__emit_slice(&e, dx, i, low->list[i], dw__emit_dim_add(&e, low->list[i], x.shape[i]));
    input_grads[0] = dx;
    return e.status;
}

DW__GRADIENT(dw__gradient_concat) {
    dw__emitter e = {graph, DW_OK};
    int axis = (int)dw_node_int(graph, node, DW_ATTR_KEY_AXIS, 0);
    dw_dim start = 0;
    for (uint32_t i = 0; i < dw_node_input_count(graph, node); i++) {
        dw__type x = dw__type_of(graph, dw_node_input(graph, node, i));
        dw_dim limit = dw__emit_dim_add(&e, start, x.shape[axis]);
        if (needed[i]) input_grads[i] = dw__emit_slice(&e, output_grads[0], axis, start, limit);
        start = limit;
    }
    return e.status;
}

/* ---- by index ------------------------------------------------------------------------------- */

DW__GRADIENT(dw__gradient_take) {
    (void)needed; /* indices have no gradient, so it is x that needs one */
    dw__emitter e = {graph, DW_OK};
    dw__type x = dw__type_of(graph, dw_node_input(graph, node, 0));
    dw_value index = dw_node_input(graph, node, 1);
    int64_t axis = dw_node_int(graph, node, DW_ATTR_KEY_AXIS, 0);
    dw_attr attrs[] = {dw_attr_int(DW_ATTR_KEY_AXIS, axis),
                       dw_attr_list(DW_ATTR_KEY_SIZE, 1, &x.shape[axis])};
    input_grads[0] = dw__emit(&e, DW_OP_SCATTER_ADD, 2, (dw_value[]){index, output_grads[0]},
                              DW_COUNT(attrs), attrs);
    return e.status;
}

/* Adds dy at `index` along `axis` to zeros with x's shape. */
static dw_value put_along(dw__emitter *e, const dw__type *x, dw_value index, dw_value dy,
                          int64_t axis) {
    dw_attr attrs[] = {dw_attr_int(DW_ATTR_KEY_AXIS, axis),
                       dw_attr_list(DW_ATTR_KEY_SIZE, (uint32_t)x->rank, x->shape)};
    return dw__emit(e, DW_OP_PUT_ALONG_ADD, 2, (dw_value[]){index, dy}, DW_COUNT(attrs), attrs);
}

DW__GRADIENT(dw__gradient_take_along) {
    (void)needed;
    dw__emitter e = {graph, DW_OK};
    dw__type x = dw__type_of(graph, dw_node_input(graph, node, 0));
    input_grads[0] = put_along(&e, &x, dw_node_input(graph, node, 1), output_grads[0],
                               dw_node_int(graph, node, DW_ATTR_KEY_AXIS, 0));
    return e.status;
}

static dw_status gradient_of_scatter(dw_graph *graph, dw_node node, dw_op take,
                                     const dw_value *output_grads, dw_value *input_grads) {
    dw__emitter e = {graph, DW_OK};
    dw_attr axis = dw_attr_int(DW_ATTR_KEY_AXIS, dw_node_int(graph, node, DW_ATTR_KEY_AXIS, 0));
    dw_value index = dw_node_input(graph, node, 0);
    input_grads[1] = dw__emit(&e, take, 2, (dw_value[]){output_grads[0], index}, 1, &axis);
    return e.status;
}

DW__GRADIENT(dw__gradient_scatter_add) {
    (void)needed;
    return gradient_of_scatter(graph, node, DW_OP_TAKE, output_grads, input_grads);
}

DW__GRADIENT(dw__gradient_put_along_add) {
    (void)needed;
    return gradient_of_scatter(graph, node, DW_OP_TAKE_ALONG, output_grads, input_grads);
}

/* The outputs of sort and top_k are values and their indices in x. */
static dw_status gradient_of_order(dw_graph *graph, dw_node node, const dw_value *output_grads,
                                   dw_value *input_grads) {
    dw__emitter e = {graph, DW_OK};
    dw__type x = dw__type_of(graph, dw_node_input(graph, node, 0));
    if (output_grads[0] == DW_NONE) return DW_OK;
    input_grads[0] = put_along(&e, &x, dw_node_output(graph, node, 1), output_grads[0],
                               dw_node_int(graph, node, DW_ATTR_KEY_AXIS, 0));
    return e.status;
}

DW__GRADIENT(dw__gradient_sort) {
    (void)needed;
    return gradient_of_order(graph, node, output_grads, input_grads);
}

DW__GRADIENT(dw__gradient_top_k) {
    (void)needed;
    return gradient_of_order(graph, node, output_grads, input_grads);
}

/* ---- reducing ------------------------------------------------------------------------------- */

/* Broadcasts a reduction's result, or its gradient, back to the operand's shape. */
static dw_value spread(dw__emitter *e, dw_node node, dw_value reduced) {
    if (e->status != DW_OK) return DW_NONE;
    dw__type x = dw__type_of(e->graph, dw_node_input(e->graph, node, 0)), kept = x;
    const dw_attr *axes = attr_of(e->graph, node, DW_ATTR_KEY_AXES);
    for (uint32_t i = 0; i < axes->count; i++) kept.shape[axes->list[i]] = 1;
    return dw__emit_broadcast(e, dw__emit_reshape(e, reduced, kept.rank, kept.shape), x.rank,
                              x.shape);
}

DW__GRADIENT(dw__gradient_reduce_sum) {
    (void)needed;
    dw__emitter e = {graph, DW_OK};
    input_grads[0] = spread(&e, node, output_grads[0]);
    return e.status;
}

/* Elements that are equal to the extremum share its gradient evenly. */
static dw_status gradient_of_extremum(dw_graph *graph, dw_node node, const dw_value *output_grads,
                                      dw_value *input_grads) {
    dw__emitter e = {graph, DW_OK};
    dw_value x = dw_node_input(graph, node, 0), dy = output_grads[0];
    const dw_attr *axes = attr_of(graph, node, DW_ATTR_KEY_AXES);
    bool keep = dw_node_int(graph, node, DW_ATTR_KEY_KEEP, 0) != 0;
    dw_value top = spread(&e, node, dw_node_output(graph, node, 0));
    dw_value hit = dw__emit_binary(&e, DW_OP_EQ, x, top);
    dw_value wide = dw__emit_widen(&e, dy); /* counts are exact in this dtype */
    if (e.status != DW_OK) return e.status;
    dw_value mark = dw__emit_cast(&e, hit, dw_value_dtype(graph, wide));
    dw_value count =
        dw__emit_reduce_axes(&e, DW_OP_REDUCE_SUM, mark, axes->count, axes->list, keep);
    dw_value quotient = dw__emit_binary(&e, DW_OP_DIV, wide, count);
    dw_value share = spread(&e, node, dw__emit_cast(&e, quotient, dw_value_dtype(graph, x)));
    input_grads[0] = dw__emit_select(&e, hit, share, dw__emit_like(&e, share, 0.0));
    return e.status;
}

DW__GRADIENT(dw__gradient_reduce_max) {
    (void)needed;
    return gradient_of_extremum(graph, node, output_grads, input_grads);
}

DW__GRADIENT(dw__gradient_reduce_min) {
    (void)needed;
    return gradient_of_extremum(graph, node, output_grads, input_grads);
}

/* The derivative for one element is the product of the others. Without zeros it is y/x. With exactly one zero
 * only that element has a gradient, the product of the rest. With more zeros no element has one. Zeros are
 * replaced by ones in the product p, so that nothing is divided by zero. */
DW__GRADIENT(dw__gradient_reduce_prod) {
    (void)needed;
    dw__emitter e = {graph, DW_OK};
    dw_value x = dw_node_input(graph, node, 0);
    const dw_attr *axes = attr_of(graph, node, DW_ATTR_KEY_AXES);
    bool keep = dw_node_int(graph, node, DW_ATTR_KEY_KEEP, 0) != 0;
    dw_value is_zero = dw__emit_with_number(&e, DW_OP_EQ, x, 0.0);
    dw_value mark = dw__emit_cast(&e, is_zero, dw_value_dtype(graph, x));
    dw_value zeros =
        dw__emit_reduce_axes(&e, DW_OP_REDUCE_SUM, mark, axes->count, axes->list, keep);
    dw_value safe = dw__emit_select(&e, is_zero, dw__emit_like(&e, x, 1.0), x);
    dw_value product =
        dw__emit_reduce_axes(&e, DW_OP_REDUCE_PROD, safe, axes->count, axes->list, keep);
    product = spread(&e, node, dw__emit_binary(&e, DW_OP_MUL, product, output_grads[0]));
    dw_value others = dw__emit_binary(&e, DW_OP_SUB, spread(&e, node, zeros), mark);
    dw_value alone = dw__emit_with_number(&e, DW_OP_EQ, others, 0.0);
    input_grads[0] = dw__emit_select(&e, alone, dw__emit_binary(&e, DW_OP_DIV, product, safe),
                                     dw__emit_like(&e, x, 0.0));
    return e.status;
}

DW__GRADIENT(dw__gradient_cumsum) {
    (void)needed;
    dw__emitter e = {graph, DW_OK};
    int64_t reverse = dw_node_int(graph, node, DW_ATTR_KEY_REVERSE, 0);
    dw_attr attrs[] = {dw_attr_int(DW_ATTR_KEY_AXIS, dw_node_int(graph, node, DW_ATTR_KEY_AXIS, 0)),
                       dw_attr_int(DW_ATTR_KEY_REVERSE, !reverse)};
    input_grads[0] = dw__emit(&e, DW_OP_CUMSUM, 1, output_grads, reverse ? 1 : 2, attrs);
    return e.status;
}

/* ---- matmul --------------------------------------------------------------------------------- */

/* y = A B, where A is a or its transpose and B likewise: dA = dy B^T, dB = A^T dy. A transposed operand gets
 * the transposed gradient. If the result is wider than the operands, both matmuls run in the result's dtype. */
DW__GRADIENT(dw__gradient_matmul) {
    dw__emitter e = {graph, DW_OK};
    dw_value a = dw_node_input(graph, node, 0), b = dw_node_input(graph, node, 1);
    dw_value dy = output_grads[0];
    dw_dtype narrow = dw_value_dtype(graph, a), wide = dw_value_dtype(graph, dy);
    a = dw__emit_cast(&e, a, wide), b = dw__emit_cast(&e, b, wide);
    bool ta = dw_node_int(graph, node, DW_ATTR_KEY_TRANSPOSE_A, 0) != 0;
    bool tb = dw_node_int(graph, node, DW_ATTR_KEY_TRANSPOSE_B, 0) != 0;
    if (needed[0])
        input_grads[0] =
            ta ? dw__emit_matmul(&e, b, dy, tb, true) : dw__emit_matmul(&e, dy, b, false, !tb);
    if (needed[1])
        input_grads[1] =
            tb ? dw__emit_matmul(&e, dy, a, true, ta) : dw__emit_matmul(&e, a, dy, !ta, false);
    for (uint32_t i = 0; i < 2; i++)
        if (needed[i]) input_grads[i] = dw__emit_cast(&e, input_grads[i], narrow);
    return e.status;
}
