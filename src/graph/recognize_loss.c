/* Recognises cross-entropy after a linear layer, forward (dw__recognize_head, for GPUs) and backward.
 *
 * Forward: if nothing else reads the logits, linear_cross_entropy computes the loss without ever storing them whole,
 * and its gradient recomputes them.
 *
 * Backward: if only the layer's own gradients use dlogits [T, V], linear_cross_entropy_backward computes them without
 * ever storing dlogits whole. For GPUs there may be casts between the layer in 16 bits and a loss in F32. The match
 * looks forward, at the readers of dlogits, so it works on the whole graph rather than at a root. */
#include "graph/recognize.h"

#define MAX_READERS 8

/* One cross_entropy_backward and the nodes that take part. */
typedef struct loss {
    dw_node entropy, linear; /* cross_entropy_backward; the forward linear layer of the logits */
    dw_node readers[MAX_READERS];  /* readers of dlogits, in order */
    dw_node reshapes[MAX_READERS]; /* reshapes and casts of dlogits between it and its readers */
    uint32_t reader_count, reshape_count;
    bool casts; /* looks through casts */
} loss;

typedef enum reader_role { READS_DX, READS_DW, READS_DB, READS_OTHERWISE } reader_role;

static dw_value operand(const dw_graph *graph, dw_node node, uint32_t index) {
    return dw_node_input(graph, node, index);
}

/* True for a node whose result is its operand in another shape or, with `casts`, another type. */
static bool passes_on(const dw_graph *graph, dw_node node, bool casts) {
    const dw_op op = dw_node_op(graph, node);
    return op == DW_OP_RESHAPE || (casts && op == DW_OP_CAST);
}

/* Looks through reshapes and, with `casts`, casts. */
static dw_value passed_on(const dw_graph *graph, dw_value value, bool casts) {
    for (;;) {
        dw_node node = dw_value_node(graph, value);
        if (node == DW_NONE || !passes_on(graph, node, casts)) return value;
        value = operand(graph, node, 0);
    }
}

static dw_value unreshaped(const dw_graph *graph, dw_value value) {
    return passed_on(graph, value, false);
}

static bool is_flat(const dw_graph *graph, dw_value value) {
    return dw_value_rank(graph, value) == 2;
}

static bool transposes_w(const dw_graph *graph, dw_node linear) {
    return dw_node_int(graph, linear, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0;
}

/* Matches a matmul of x and dlogits, both [T, ..], whose result has w's shape. */
static bool is_weight_gradient(const dw_graph *graph, const loss *l, dw_node node) {
    uint32_t from_dlogits = transposes_w(graph, l->linear) ? 0 : 1;
    dw_value x = operand(graph, node, 1 - from_dlogits);
    dw_value dlogits = operand(graph, node, from_dlogits);
    return is_flat(graph, x) && is_flat(graph, dlogits) &&
           unreshaped(graph, x) == unreshaped(graph, operand(graph, l->linear, 0)) &&
           passed_on(graph, dlogits, l->casts) == dw_node_output(graph, l->entropy, 0) &&
           dw_value_shape(graph, x)[1] ==
               dw_value_shape(graph,
                              operand(graph, l->linear,
                                      0))[dw_value_rank(graph, operand(graph, l->linear, 0)) - 1] &&
           dw_node_int(graph, node, DW_ATTR_KEY_TRANSPOSE_A, 0) != 0 &&
           dw_node_int(graph, node, DW_ATTR_KEY_TRANSPOSE_B, 0) == 0;
}

static bool sums_all_rows(const dw_graph *graph, dw_node node) {
    const dw_attr *axes = dw_node_attr(graph, node, DW_ATTR_KEY_AXES);
    int rank = dw_value_rank(graph, operand(graph, node, 0));
    return (int)axes->count == rank - 1 && axes->list[axes->count - 1] == rank - 2 &&
           dw_node_int(graph, node, DW_ATTR_KEY_KEEP, 0) == 0;
}

/* True if the last dim of `value`, a reshape of dlogits, is V. */
static bool keeps_classes(const dw_graph *graph, const loss *l, dw_value value) {
    dw__type type = dw__type_of(graph, value);
    dw__type flat = dw__type_of(graph, dw_node_output(graph, l->entropy, 0));
    return type.rank > 1 && type.shape[type.rank - 1] == flat.shape[1];
}

static reader_role role_of(const dw_graph *graph, const loss *l, dw_node node) {
    dw_value first = operand(graph, node, 0);
    const dw_dtype type = dw_value_dtype(graph, operand(graph, l->linear, 0));
    if (dw_value_dtype(graph, dw_node_output(graph, node, 0)) != type) return READS_OTHERWISE;
    switch (dw_node_op(graph, node)) {
    case DW_OP_LINEAR: {
        bool back = operand(graph, node, 1) == operand(graph, l->linear, 1) &&
                    operand(graph, node, 2) == DW_NONE &&
                    transposes_w(graph, node) != transposes_w(graph, l->linear);
        return back && keeps_classes(graph, l, first) ? READS_DX : READS_OTHERWISE;
    }
    case DW_OP_MATMUL: return is_weight_gradient(graph, l, node) ? READS_DW : READS_OTHERWISE;
    case DW_OP_REDUCE_SUM:
        return keeps_classes(graph, l, first) && sums_all_rows(graph, node) ? READS_DB
                                                                            : READS_OTHERWISE;
    default: return READS_OTHERWISE;
    }
}

static bool is_one_of(const dw_node *nodes, uint32_t count, dw_node node) {
    for (uint32_t i = 0; i < count; i++)
        if (nodes[i] == node) return true;
    return false;
}

static bool is_graph_output(const dw_graph *graph, dw_value value) {
    for (size_t i = 0; i < graph->outputs.count; i++)
        if (graph->outputs.items[i] == value) return true;
    return false;
}

/* True if `node` reads dlogits or a reshape of it that was found before. */
static bool reads_dlogits(const dw_graph *graph, const loss *l, dw_node node) {
    for (uint32_t i = 0; i < dw_node_input_count(graph, node); i++) {
        dw_value x = operand(graph, node, i);
        if (x == DW_NONE) continue;
        dw_node maker = dw_value_node(graph, x);
        if (maker != DW_NONE &&
            (maker == l->entropy || is_one_of(l->reshapes, l->reshape_count, maker)))
            return true;
    }
    return false;
}

/* Returns the linear layer of the logits of `entropy` if it can take part, else DW_NONE. */
static dw_node logits_linear(const dw_graph *graph, dw_node entropy, bool casts) {
    dw_value logits = operand(graph, entropy, 0);
    dw_node linear = dw__made_by(graph, passed_on(graph, logits, casts), DW_OP_LINEAR);
    if (linear == DW_NONE || dw_node_is_backward(graph, linear)) return DW_NONE;
    dw__type y = dw__type_of(graph, dw_node_output(graph, linear, 0));
    dw__type flat = dw__type_of(graph, logits);
    if (y.dtype != flat.dtype && dw__compute_dtype(y.dtype) != flat.dtype) return DW_NONE;
    return y.rank > 1 && y.shape[y.rank - 1] == flat.shape[1] ? linear : DW_NONE;
}

/* Fills `l` for the node and checks all readers of its result. */
static bool match_loss(const dw_graph *graph, dw_node entropy, bool casts, loss *l) {
    *l = (loss){.entropy = entropy, .linear = logits_linear(graph, entropy, casts), .casts = casts};
    if (l->linear == DW_NONE) return false;
    if (is_graph_output(graph, dw_node_output(graph, entropy, 0))) return false;
    bool has_weight = false;
    for (dw_node n = entropy + 1; n < graph->nodes.count; n++) {
        if (!reads_dlogits(graph, l, n)) continue;
        if (passes_on(graph, n, casts)) {
            if (l->reshape_count == MAX_READERS ||
                is_graph_output(graph, dw_node_output(graph, n, 0)))
                return false;
            l->reshapes[l->reshape_count++] = n;
            continue;
        }
        reader_role role = role_of(graph, l, n);
        if (role == READS_OTHERWISE || l->reader_count == MAX_READERS) return false;
        has_weight = has_weight || role == READS_DW;
        l->readers[l->reader_count++] = n;
    }
    return has_weight; /* the gradient of a frozen weight would be computed in vain */
}

/* ---- rewriting ------------------------------------------------------------------------------ */

/* Appends linear_cross_entropy_backward and maps the readers' results to its results. */
static dw_status emit_loss(dw__rewriter *rewriter, const loss *l) {
    const dw_graph *from = rewriter->from;
    dw__emitter e = {rewriter->to, DW_OK};
    const dw_value *map = rewriter->map;
    dw_attr attrs[DW_ATTR_KEY_COUNT];
    const dw_attr *own;
    uint32_t count = from->nodes.items[l->entropy].attr_count;
    DW_RETURN_IF_FAILED(dw__copy_origin(rewriter->to, from, l->entropy));
    DW_RETURN_IF_FAILED(dw__import_attrs(rewriter->to, from, l->entropy, &own));
    for (uint32_t i = 0; i < count; i++) attrs[i] = own[i];
    attrs[count++] = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W, transposes_w(from, l->linear));
    dw_value x = map[operand(from, l->linear, 0)], b = operand(from, l->linear, 2);
    dw__type type = dw__type_of(rewriter->to, x);
    dw_dim rows = dw__emit_dim_product(&e, type.rank - 1, type.shape);
    dw_dim classes;
    DW_RETURN_IF_FAILED(dw__import_dim(
        rewriter->to, from, dw_value_shape(from, operand(from, l->entropy, 0))[1], &classes));
    dw_value operands[7] = {
        dw__emit_reshape(&e, x, 2, (dw_dim[]){rows, type.shape[type.rank - 1]}),
        map[operand(from, l->linear, 1)],
        b == DW_NONE ? DW_NONE : map[b],
        dw__emit_reshape(&e, map[dw_node_output(from, l->linear, 0)], 2, (dw_dim[]){rows, classes}),
        map[operand(from, l->entropy, 1)],
        dw__emit_widen(&e, map[operand(from, l->entropy, 2)]),
        dw__emit_widen(&e, map[operand(from, l->entropy, 3)])};
    dw_node made =
        dw__emit_node(&e, DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD, 7, operands, count, attrs);
    for (uint32_t i = 0; i < l->reader_count && e.status == DW_OK; i++) {
        reader_role role = role_of(from, l, l->readers[i]);
        dw_value old = dw_node_output(from, l->readers[i], 0);
        dw_value result = dw_node_output(rewriter->to, made, role);
        dw_dim shape[DW_MAX_RANK];
        for (int d = 0; d < dw_value_rank(from, old); d++)
            DW_RETURN_IF_FAILED(
                dw__import_dim(rewriter->to, from, dw_value_shape(from, old)[d], &shape[d]));
        rewriter->map[old] = dw__emit_reshape(&e, result, dw_value_rank(from, old), shape);
    }
    return e.status;
}

/* A node with `skipped[node]` has no copy in the new graph: its results are mapped already or unread. */
static dw_status rewrite_node(dw__rewriter *rewriter, dw_node n, bool casts, bool *skipped) {
    loss l;
    if (skipped[n]) return DW_OK;
    if (dw_node_op(rewriter->from, n) != DW_OP_CROSS_ENTROPY_BACKWARD ||
        !match_loss(rewriter->from, n, casts, &l))
        return dw__rewriter_copy(rewriter, n);
    for (uint32_t i = 0; i < l.reader_count; i++) skipped[l.readers[i]] = true;
    for (uint32_t i = 0; i < l.reshape_count; i++) skipped[l.reshapes[i]] = true;
    return emit_loss(rewriter, &l);
}

dw_status dw__recognize_loss(dw_graph **graph, bool casts) {
    dw_status status = DW_OK;
    const dw_graph *from = *graph;
    dw__rewriter rewriter;
    bool *skipped = dw__calloc(from->nodes.count, sizeof *skipped);
    if (!skipped) return dw__fail_memory("recognition", from->nodes.count);
    status = dw__rewriter_begin(&rewriter, from);
    if (status != DW_OK) {
        dw__free(skipped);
        return status;
    }
    for (dw_node n = 0; n < dw_graph_node_count(from); n++)
        DW_TRY(rewrite_node(&rewriter, n, casts, skipped));
    DW_TRY(dw__rewriter_end(&rewriter, graph));
cleanup:
    dw__free(skipped);
    dw__rewriter_abort(&rewriter);
    return status;
}

/* ---- forward -------------------------------------------------------------------------------- */

/* Returns the linear layer whose result is the logits of `entropy`, behind reshapes and a cast to the compute dtype, if
 * nothing else reads the logits or the log-sum-exp; else DW_NONE. */
static dw_node lone_linear(const dw_graph *graph, dw_node entropy, const uint32_t *uses) {
    dw_value value = operand(graph, entropy, 0);
    const dw__type flat = dw__type_of(graph, value);
    if (uses[dw_node_output(graph, entropy, 1)] > 0) return DW_NONE;
    for (;;) {
        const dw_node maker = dw_value_node(graph, value);
        if (maker == DW_NONE || uses[value] != 1) return DW_NONE;
        switch (dw_node_op(graph, maker)) {
        case DW_OP_LINEAR: {
            const dw__type y = dw__type_of(graph, value);
            const bool fits = y.rank > 1 && y.shape[y.rank - 1] == flat.shape[1] &&
                              (y.dtype == flat.dtype || dw__compute_dtype(y.dtype) == flat.dtype);
            return fits && !dw_node_is_backward(graph, maker) ? maker : DW_NONE;
        }
        case DW_OP_RESHAPE: break;
        case DW_OP_CAST:
            if (dw_value_dtype(graph, value) !=
                dw__compute_dtype(dw_value_dtype(graph, operand(graph, maker, 0))))
                return DW_NONE;
            break;
        default: return DW_NONE;
        }
        value = operand(graph, maker, 0);
    }
}

static dw_status emit_head(dw__rewriter *rewriter, dw_node entropy, dw_node linear) {
    const dw_graph *from = rewriter->from;
    dw__emitter e = {rewriter->to, DW_OK};
    const dw_value *map = rewriter->map;
    dw_attr attrs[DW_ATTR_KEY_COUNT];
    const dw_attr *own;
    uint32_t count = from->nodes.items[entropy].attr_count;
    DW_RETURN_IF_FAILED(dw__copy_origin(rewriter->to, from, entropy));
    DW_RETURN_IF_FAILED(dw__import_attrs(rewriter->to, from, entropy, &own));
    for (uint32_t i = 0; i < count; i++) attrs[i] = own[i];
    attrs[count++] = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W, transposes_w(from, linear));
    const dw_value x = map[operand(from, linear, 0)], b = operand(from, linear, 2);
    const dw__type type = dw__type_of(rewriter->to, x);
    const dw_dim rows = dw__emit_dim_product(&e, type.rank - 1, type.shape);
    const dw_value operands[] = {
        dw__emit_reshape(&e, x, 2, (dw_dim[]){rows, type.shape[type.rank - 1]}),
        map[operand(from, linear, 1)], b == DW_NONE ? DW_NONE : map[b],
        map[operand(from, entropy, 1)]};
    const dw_node made = dw__emit_node(&e, DW_OP_LINEAR_CROSS_ENTROPY, 4, operands, count, attrs);
    for (uint32_t i = 0; i < 2 && e.status == DW_OK; i++) {
        const dw_value old = dw_node_output(from, entropy, i);
        rewriter->map[old] =
            dw__emit_cast(&e, dw_node_output(rewriter->to, made, i), dw_value_dtype(from, old));
    }
    return e.status;
}

dw_status dw__recognize_head(dw_graph **graph) {
    dw_status status = DW_OK;
    const dw_graph *from = *graph;
    dw__rewriter rewriter;
    uint32_t *uses = NULL;
    DW_RETURN_IF_FAILED(dw__count_uses(from, &uses));
    status = dw__rewriter_begin(&rewriter, from);
    if (status != DW_OK) {
        dw__free(uses);
        return status;
    }
    for (dw_node n = 0; n < dw_graph_node_count(from); n++) {
        dw_node linear = DW_NONE;
        if (dw_node_op(from, n) == DW_OP_CROSS_ENTROPY) linear = lone_linear(from, n, uses);
        DW_TRY(linear != DW_NONE ? emit_head(&rewriter, n, linear)
                                 : dw__rewriter_copy(&rewriter, n));
    }
    DW_TRY(dw__rewriter_end(&rewriter, graph));
cleanup:
    dw__free(uses);
    dw__rewriter_abort(&rewriter);
    return status;
}
