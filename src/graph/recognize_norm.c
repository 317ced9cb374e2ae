/* Recognises norms and softmax written as primitives. A norm is recognised without its weight first; the
 * multiplication by a row and the addition of a row are then absorbed into it. */
#include "graph/recognize.h"

/* ---- pieces --------------------------------------------------------------------------------- */

static bool reduces_last(const dw_graph *graph, dw_node node) {
    const dw_attr *axes = dw_node_attr(graph, node, DW_ATTR_KEY_AXES);
    int rank = dw_value_rank(graph, dw_node_input(graph, node, 0));
    return axes->count == 1 && axes->list[0] == rank - 1;
}

/* If `column` [.., 1] is a reduction over the last axis (kept, or reshaped back), returns its operand. */
static dw_value reduced_operand(const dw__matcher *m, dw_value column, dw_op op) {
    const dw_graph *graph = m->e.graph;
    dw_node node = dw__made_by(graph, column, op);
    if (node == DW_NONE) {
        dw_node reshape = dw__swallow(m, column, DW_OP_RESHAPE);
        if (reshape != DW_NONE) node = dw__swallow(m, dw__operand(m, reshape, 0), op);
    }
    if (node == DW_NONE || !reduces_last(graph, node)) return DW_NONE;
    dw_value x = dw__operand(m, node, 0);
    dw__type want = dw__type_of(graph, x), have = dw__type_of(graph, column);
    want.shape[want.rank - 1] = 1;
    return dw__shape_equal(&want, &have) ? x : DW_NONE;
}

/* If `column` is the mean of x over the last axis (a mean, or a sum divided by the count), returns x. */
static dw_value mean_operand(const dw__matcher *m, dw_value column) {
    dw_value x = reduced_operand(m, column, DW_OP_MEAN), sum;
    double count;
    if (x != DW_NONE) return x;
    if (!dw__with_number(m, column, DW_OP_DIV, &sum, &count) || !dw__single(m, sum)) return DW_NONE;
    x = reduced_operand(m, sum, DW_OP_REDUCE_SUM);
    if (x == DW_NONE) return DW_NONE;
    dw__type type = dw__type_of(m->e.graph, x);
    return (double)type.shape[type.rank - 1] == count ? x : DW_NONE;
}

/* Matches value = x*x or x^2. Returns x. */
static dw_value square_operand(const dw__matcher *m, dw_value value) {
    dw_value x;
    double exponent;
    dw_node mul = dw__swallow(m, value, DW_OP_MUL);
    if (mul != DW_NONE)
        return dw__operand(m, mul, 0) == dw__operand(m, mul, 1) ? dw__operand(m, mul, 0) : DW_NONE;
    if (dw__swallow(m, value, DW_OP_POW) == DW_NONE ||
        !dw__with_number(m, value, DW_OP_POW, &x, &exponent) || exponent != 2.0)
        return DW_NONE;
    return x;
}

/* If `value` [.., N] is f(mean(z^2) + eps), broadcast, with f rsqrt or sqrt, returns z. */
static dw_value scale_operand(const dw__matcher *m, dw_value value, dw_op f, double *eps) {
    dw_value column = dw__spread_column(m, value), mean;
    if (column == DW_NONE) return DW_NONE;
    dw_node root = dw__swallow(m, column, f);
    if (root == DW_NONE) return DW_NONE;
    dw_value shifted = dw__operand(m, root, 0);
    if (!dw__single(m, shifted) || !dw__with_number(m, shifted, DW_OP_ADD, &mean, eps) ||
        !dw__single(m, mean) || !(*eps >= 0.0))
        return DW_NONE;
    dw_value squares = mean_operand(m, mean);
    return squares == DW_NONE ? DW_NONE : square_operand(m, squares);
}

/* Matches value = x - mean(x) along the last axis. Returns x. */
static dw_value centred_operand(const dw__matcher *m, dw_value value) {
    dw_node sub = dw__made_by(m->e.graph, value, DW_OP_SUB);
    if (sub == DW_NONE) return DW_NONE;
    dw_node spread = dw__made_by(m->e.graph, dw__operand(m, sub, 1), DW_OP_BROADCAST);
    if (spread == DW_NONE) return DW_NONE;
    dw_value x = mean_operand(m, dw__operand(m, spread, 0));
    return x == dw__operand(m, sub, 0) ? x : DW_NONE;
}

/* Matches a root z * rsqrt(mean(z'^2) + eps) or z / sqrt(..). Returns z and z'. */
static bool normalized_operands(const dw__matcher *m, dw_value *z, dw_value *of, double *eps) {
    bool quotient = m->e.graph->nodes.items[m->root].op == DW_OP_DIV;
    for (uint32_t i = 0; i < (quotient ? 1 : 2); i++) {
        *z = dw__operand(m, m->root, i);
        *of = scale_operand(m, dw__operand(m, m->root, 1 - i), quotient ? DW_OP_SQRT : DW_OP_RSQRT,
                            eps);
        if (*of != DW_NONE) return true;
    }
    return false;
}

/* ---- norms ---------------------------------------------------------------------------------- */

dw_value dw__recognize_layer_norm(dw__matcher *m) {
    dw_value z, of;
    double eps;
    if (!normalized_operands(m, &z, &of, &eps)) return DW_NONE;
    dw_value x = centred_operand(m, z);
    if (x == DW_NONE || (of != z && centred_operand(m, of) != x)) return DW_NONE;
    dw_attr attr = dw_attr_float(DW_ATTR_KEY_EPS, eps);
    return dw__emit(&m->e, DW_OP_LAYER_NORM, 1, &x, 1, &attr);
}

dw_value dw__recognize_rms_norm(dw__matcher *m) {
    dw_value z, of;
    double eps;
    if (!normalized_operands(m, &z, &of, &eps) || of != z) return DW_NONE;
    dw_attr attr = dw_attr_float(DW_ATTR_KEY_EPS, eps);
    return dw__emit(&m->e, DW_OP_RMS_NORM, 1, &z, 1, &attr);
}

/* Matches norm(x) * w. */
dw_value dw__recognize_norm_weight(dw__matcher *m) {
    static const dw_op norms[] = {DW_OP_RMS_NORM, DW_OP_LAYER_NORM};
    for (uint32_t i = 0; i < 4; i++) {
        dw_node norm = dw__swallow(m, dw__operand(m, m->root, i % 2), norms[i / 2]);
        if (norm == DW_NONE) continue;
        dw_value x = dw__operand(m, norm, 0);
        dw_value w = dw__spread_row(m, dw__operand(m, m->root, 1 - i % 2));
        bool has_affine = dw__operand(m, norm, 1) != DW_NONE || dw__operand(m, norm, 2) != DW_NONE;
        if (w == DW_NONE || has_affine) continue;
        dw_attr attr =
            dw_attr_float(DW_ATTR_KEY_EPS, dw_node_float(m->e.graph, norm, DW_ATTR_KEY_EPS, 0.0));
        return dw__emit(&m->e, norms[i / 2], 2, (dw_value[]){x, w}, 1, &attr);
    }
    return DW_NONE;
}

/* Matches layer_norm(x, w?) + b. */
dw_value dw__recognize_norm_bias(dw__matcher *m) {
    for (uint32_t i = 0; i < 2; i++) {
        dw_node norm = dw__swallow(m, dw__operand(m, m->root, i), DW_OP_LAYER_NORM);
        if (norm == DW_NONE || dw__operand(m, norm, 2) != DW_NONE) continue;
        dw_value b = dw__spread_row(m, dw__operand(m, m->root, 1 - i));
        if (b == DW_NONE) continue;
        dw_value operands[] = {dw__operand(m, norm, 0), dw__operand(m, norm, 1), b};
        dw_attr attr =
            dw_attr_float(DW_ATTR_KEY_EPS, dw_node_float(m->e.graph, norm, DW_ATTR_KEY_EPS, 0.0));
        return dw__emit(&m->e, DW_OP_LAYER_NORM, 3, operands, 1, &attr);
    }
    return DW_NONE;
}

/* Returns the operand of type `dtype` that a cast widened to `value`; DW_NONE if there is none. */
static dw_value narrow_operand(const dw__matcher *m, dw_value value, dw_dtype dtype) {
    dw_node cast = dw__made_by(m->e.graph, value, DW_OP_CAST);
    if (cast == DW_NONE) return DW_NONE;
    dw_value narrow = dw__operand(m, cast, 0);
    return dw_value_dtype(m->e.graph, narrow) == dtype ? narrow : DW_NONE;
}

/* Matches a norm in F32 of operands in BF16 or F16 whose result is rounded to their type. A norm in that type computes
 * in F32 and rounds once, so its result is the same. */
dw_value dw__recognize_wide_norm(dw__matcher *m) {
    static const dw_op norms[] = {DW_OP_RMS_NORM, DW_OP_LAYER_NORM};
    const dw_graph *graph = m->e.graph;
    const dw_dtype dtype = dw_value_dtype(graph, dw_node_output(graph, m->root, 0));
    if (!dw__dtype_is_half(dtype)) return DW_NONE;
    for (size_t i = 0; i < DW_COUNT(norms); i++) {
        dw_node norm = dw__swallow(m, dw__operand(m, m->root, 0), norms[i]);
        if (norm == DW_NONE || dw_value_dtype(graph, dw_node_output(graph, norm, 0)) != DW_F32)
            continue;
        dw_value operands[3];
        const uint32_t count = dw_node_input_count(graph, norm);
        for (uint32_t k = 0; k < count; k++) {
            const dw_value wide = dw__operand(m, norm, k);
            operands[k] = wide == DW_NONE ? DW_NONE : narrow_operand(m, wide, dtype);
            if (operands[k] == DW_NONE && wide != DW_NONE) return DW_NONE;
        }
        dw_attr attr =
            dw_attr_float(DW_ATTR_KEY_EPS, dw_node_float(graph, norm, DW_ATTR_KEY_EPS, 0.0));
        return dw__emit(&m->e, norms[i], count, operands, 1, &attr);
    }
    return DW_NONE;
}

/* ---- softmax -------------------------------------------------------------------------------- */

/* If `value` is an operand reduced over one axis by `op`, kept and broadcast back, returns the operand. */
static dw_value spread_reduction(const dw__matcher *m, dw_value value, dw_op op, int64_t *axis) {
    const dw_graph *graph = m->e.graph;
    dw_node spread = dw__swallow(m, value, DW_OP_BROADCAST);
    if (spread == DW_NONE) return DW_NONE;
    dw_value reduced = dw__operand(m, spread, 0);
    dw_node stop = dw__swallow(m, reduced, DW_OP_STOP_GRADIENT);
    dw_node node = dw__swallow(m, stop == DW_NONE ? reduced : dw__operand(m, stop, 0), op);
    if (node == DW_NONE || dw_node_int(graph, node, DW_ATTR_KEY_KEEP, 0) == 0) return DW_NONE;
    const dw_attr *axes = dw_node_attr(graph, node, DW_ATTR_KEY_AXES);
    if (axes->count != 1) return DW_NONE;
    *axis = axes->list[0];
    return dw__operand(m, node, 0);
}

/* Matches exp(x - max x) / sum exp(x - max x). As softmax, a row that holds only -inf gives zeros instead of NaN. */
dw_value dw__recognize_softmax(dw__matcher *m) {
    const dw_graph *graph = m->e.graph;
    int64_t axis = -1, same = -1;
    dw_value weights = dw__operand(m, m->root, 0);
    dw_node exp = dw__made_by(graph, weights, DW_OP_EXP);
    if (exp == DW_NONE || weights >= m->rewrite->uses.count ||
        m->rewrite->uses.items[weights] != 2 ||
        spread_reduction(m, dw__operand(m, m->root, 1), DW_OP_REDUCE_SUM, &axis) != weights)
        return DW_NONE;
    dw_node sub = dw__swallow(m, dw__operand(m, exp, 0), DW_OP_SUB);
    if (sub == DW_NONE) return DW_NONE;
    dw_value x = dw__operand(m, sub, 0);
    if (spread_reduction(m, dw__operand(m, sub, 1), DW_OP_REDUCE_MAX, &same) != x || same != axis)
        return DW_NONE;
    dw_attr attr = dw_attr_int(DW_ATTR_KEY_AXIS, axis);
    return dw__emit(&m->e, DW_OP_SOFTMAX, 1, &x, 1, &attr);
}
