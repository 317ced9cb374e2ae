/* Recognises grouped_linear written as a gather of matrices and a batched matmul: each row is multiplied by a
 * matrix of its own. Mixtures of experts have this form when it must not depend on data. */
#include "graph/recognize.h"

/* Matches take(w [E, .., ..], i [T]) along the first axis. */
static dw_node taken_matrices(const dw__matcher *m, dw_value value, int rank) {
    const dw_graph *graph = m->e.graph;
    dw_node take = dw__made_by(graph, value, DW_OP_TAKE);
    if (take == DW_NONE || dw_node_int(graph, take, DW_ATTR_KEY_AXIS, 0) != 0) return DW_NONE;
    if (dw_value_rank(graph, dw__operand(m, take, 0)) != rank) return DW_NONE;
    return dw_value_rank(graph, dw__operand(m, take, 1)) == 1 ? take : DW_NONE;
}

/* Matches matmul(take(w, i), x as columns) or matmul(x as rows, take(w, i)): [T, N, 1] or [T, 1, N]. */
dw_value dw__recognize_grouped_matmul(dw__matcher *m) {
    const dw_graph *graph = m->e.graph;
    dw_value a = dw__operand(m, m->root, 0), b = dw__operand(m, m->root, 1);
    bool transpose_a = dw_node_int(graph, m->root, DW_ATTR_KEY_TRANSPOSE_A, 0) != 0;
    bool transpose_b = dw_node_int(graph, m->root, DW_ATTR_KEY_TRANSPOSE_B, 0) != 0;
    dw__type result = dw__type_of(graph, dw_node_output(graph, m->root, 0));
    dw_dim one = 1;
    if (result.rank != 3) return DW_NONE;

    bool first = taken_matrices(m, a, 3) != DW_NONE && result.shape[2] == one;
    if (!first && (taken_matrices(m, b, 3) == DW_NONE || result.shape[1] != one)) return DW_NONE;
    dw_node take = taken_matrices(m, first ? a : b, 3);
    dw_value rows = first ? b : a;
    dw__type type = dw__type_of(graph, rows);
    bool row_last = first ? transpose_b : !transpose_a; /* [T, 1, K], else [T, K, 1] */
    dw_dim flat[2] = {type.shape[0], type.shape[row_last ? 2 : 1]};
    dw_value operands[] = {dw__emit_reshape(&m->e, rows, 2, flat), dw__operand(m, take, 0),
                           dw__operand(m, take, 1)};
    /* transpose_w is false when the matrices' last axis is K: an untransposed left or a transposed right factor. */
    dw_attr attr = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W, first ? !transpose_a : transpose_b);
    dw_value y = dw__emit(&m->e, DW_OP_GROUPED_LINEAR, 3, operands, 1, &attr);
    return dw__emit_reshape(&m->e, y, 3, result.shape);
}

/* Matches grouped_linear(x, w, i) + take(b [E, N], i). */
dw_value dw__recognize_grouped_bias(dw__matcher *m) {
    const dw_graph *graph = m->e.graph;
    for (uint32_t side = 0; side < 2; side++) {
        dw_node take = taken_matrices(m, dw__operand(m, m->root, 1 - side), 2);
        if (take == DW_NONE) continue;
        dw_value sum = dw__operand(m, m->root, side);
        /* Reshapes, possibly several, have removed the matmul's axis of 1. */
        dw_node reshape = dw__made_by(graph, sum, DW_OP_RESHAPE);
        while (reshape != DW_NONE && dw__single(m, sum)) {
            sum = dw__operand(m, reshape, 0);
            reshape = dw__made_by(graph, sum, DW_OP_RESHAPE);
        }
        dw_node linear = dw__swallow(m, sum, DW_OP_GROUPED_LINEAR);
        if (linear == DW_NONE || dw__operand(m, linear, 3) != DW_NONE ||
            dw__operand(m, linear, 2) != dw__operand(m, take, 1))
            continue;
        dw__type product = dw__type_of(graph, sum);
        dw__type root = dw__type_of(graph, dw_node_output(graph, m->root, 0));
        if (!dw__shape_equal(&product, &root)) continue;
        dw_attr attr = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W,
                                   dw_node_int(graph, linear, DW_ATTR_KEY_TRANSPOSE_W, 1));
        dw_value operands[] = {dw__operand(m, linear, 0), dw__operand(m, linear, 1),
                               dw__operand(m, linear, 2), dw__operand(m, take, 0)};
        return dw__emit(&m->e, DW_OP_GROUPED_LINEAR, 4, operands, 1, &attr);
    }
    return DW_NONE;
}
