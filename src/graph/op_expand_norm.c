/* Expansions of layer normalisation (Ba et al. 2016) and RMS normalisation (Zhang and Sennrich
 * 2019), forward and backward. Statistics are over the last axis, N long.
 */
#include "graph/emit.h"
#include "graph/op_rules.h"

static int last_axis(dw__emitter *e, dw_value x) {
    return e->status == DW_OK ? dw_value_rank(e->graph, x) - 1 : 0;
}

/* rsqrt(mean(x^2) + eps), [..] */
static dw_value emit_rstd(dw__emitter *e, dw_value x, double eps) {
    if (e->status != DW_OK) return DW_NONE;
    int axis = last_axis(e, x);
    dw_dim count = dw_value_shape(e->graph, x)[axis];
    dw_value square = dw__emit_binary(e, DW_OP_MUL, x, x);
    dw_value sum = dw__emit_reduce(e, DW_OP_REDUCE_SUM, square, axis, false);
    dw_value mean = dw__emit_divide_by_dim(e, sum, count);
    return dw__emit_unary(e, DW_OP_RSQRT, dw__emit_with_number(e, DW_OP_ADD, mean, eps));
}

static dw_value emit_times_row(dw__emitter *e, dw_value x, dw_value row) {
    if (row == DW_NONE) return x;
    return dw__emit_binary(e, DW_OP_MUL, x, dw__emit_broadcast_like(e, dw__emit_widen(e, row), x));
}

dw_status dw__expand_rms_norm(dw_graph *graph, const dw_graph *source, dw_node node,
                              const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    double eps = dw_node_float(source, node, DW_ATTR_KEY_EPS, 0.0);
    dw_value x = dw__emit_widen(&e, inputs[0]);
    dw_value rstd = emit_rstd(&e, x, eps);
    dw_value y = dw__emit_binary(&e, DW_OP_MUL, x, dw__emit_spread_last(&e, rstd, x));
    y = emit_times_row(&e, y, inputs[1]);
    outputs[0] = dw__emit_cast(&e, y, dw__output_dtype(source, node, 0));
    outputs[1] = dw__emit_cast(&e, rstd, dw__output_dtype(source, node, 1));
    return e.status;
}

dw_status dw__expand_layer_norm(dw_graph *graph, const dw_graph *source, dw_node node,
                                const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    double eps = dw_node_float(source, node, DW_ATTR_KEY_EPS, 0.0);
    dw_value x = dw__emit_widen(&e, inputs[0]);
    if (e.status != DW_OK) return e.status;
    int axis = last_axis(&e, x);
    dw_dim count = dw_value_shape(graph, x)[axis];
    dw_value sum = dw__emit_reduce(&e, DW_OP_REDUCE_SUM, x, axis, false);
    dw_value mean = dw__emit_divide_by_dim(&e, sum, count);
    dw_value centred = dw__emit_binary(&e, DW_OP_SUB, x, dw__emit_spread_last(&e, mean, x));
    dw_value rstd = emit_rstd(&e, centred, eps);
    /* If the square of the mean overflows, rstd becomes NaN, as in PyTorch and in the kernel's rstd_of. */
    dw_value square = dw__emit_binary(&e, DW_OP_MUL, mean, mean);
    dw_value nothing = dw__emit_with_number(&e, DW_OP_MUL, square, 0.0);
    rstd = dw__emit_binary(&e, DW_OP_ADD, rstd, nothing);
    dw_value y = dw__emit_binary(&e, DW_OP_MUL, centred, dw__emit_spread_last(&e, rstd, x));
    y = emit_times_row(&e, y, inputs[1]);
    if (inputs[2] != DW_NONE)
        y = dw__emit_binary(&e, DW_OP_ADD, y,
                            dw__emit_broadcast_like(&e, dw__emit_widen(&e, inputs[2]), y));
    outputs[0] = dw__emit_cast(&e, y, dw__output_dtype(source, node, 0));
    outputs[1] = dw__emit_cast(&e, mean, dw__output_dtype(source, node, 1));
    outputs[2] = dw__emit_cast(&e, rstd, dw__output_dtype(source, node, 2));
    return e.status;
}

/* xhat is the normalised x, and g = dy*w:
 *     dx = rstd * (g - mean(g) - xhat * mean(g * xhat)); the term mean(g) is absent if x was not centred
 *     dw = sum over rows of dy * xhat */
static void emit_norm_backward(dw__emitter *e, dw_value dy, dw_value xhat, dw_value w,
                               dw_value rstd, bool centred, dw_value *dx, dw_value *dw) {
    int axis = last_axis(e, xhat);
    dw_value g = emit_times_row(e, dy, w);
    dw_value along = dw__emit_mean_spread(e, dw__emit_binary(e, DW_OP_MUL, g, xhat), axis);
    dw_value rest = dw__emit_binary(e, DW_OP_SUB, g, dw__emit_binary(e, DW_OP_MUL, xhat, along));
    if (centred) rest = dw__emit_binary(e, DW_OP_SUB, rest, dw__emit_mean_spread(e, g, axis));
    *dx = dw__emit_binary(e, DW_OP_MUL, rest, dw__emit_spread_last(e, rstd, xhat));
    *dw = dw__emit_sum_leading(e, dw__emit_binary(e, DW_OP_MUL, dy, xhat), 1);
}

dw_status dw__expand_layer_norm_backward(dw_graph *graph, const dw_graph *source, dw_node node,
                                         const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    dw_value dy = dw__emit_widen(&e, inputs[0]), x = dw__emit_widen(&e, inputs[1]);
    dw_value mean = dw__emit_widen(&e, inputs[3]), rstd = dw__emit_widen(&e, inputs[4]);
    dw_value centred = dw__emit_binary(&e, DW_OP_SUB, x, dw__emit_spread_last(&e, mean, x));
    dw_value xhat = dw__emit_binary(&e, DW_OP_MUL, centred, dw__emit_spread_last(&e, rstd, x));
    dw_value dx = DW_NONE, dw = DW_NONE;
    emit_norm_backward(&e, dy, xhat, inputs[2], rstd, true, &dx, &dw);
    outputs[0] = dw__emit_cast(&e, dx, dw__output_dtype(source, node, 0));
    outputs[1] = dw__emit_cast(&e, dw, dw__output_dtype(source, node, 1));
    outputs[2] =
        dw__emit_cast(&e, dw__emit_sum_leading(&e, dy, 1), dw__output_dtype(source, node, 2));
    return e.status;
}

dw_status dw__expand_rms_norm_backward(dw_graph *graph, const dw_graph *source, dw_node node,
                                       const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    dw_value dy = dw__emit_widen(&e, inputs[0]), x = dw__emit_widen(&e, inputs[1]),
             rstd = dw__emit_widen(&e, inputs[3]);
    dw_value xhat = dw__emit_binary(&e, DW_OP_MUL, x, dw__emit_spread_last(&e, rstd, x));
    dw_value dx = DW_NONE, dw = DW_NONE;
    emit_norm_backward(&e, dy, xhat, inputs[2], rstd, false, &dx, &dw);
    outputs[0] = dw__emit_cast(&e, dx, dw__output_dtype(source, node, 0));
    outputs[1] = dw__emit_cast(&e, dw, dw__output_dtype(source, node, 1));
    return e.status;
}
