/* Recognises linear layers written as matmuls: of two matrices, with a bias added, and between reshapes that
 * flatten the leading axes. */
#include "graph/recognize.h"
#include <string.h>

/* Matches a matmul of two matrices of one dtype, the first one not transposed, with a result of that dtype. */
dw_value dw__recognize_matmul(dw__matcher *m) {
    const dw_graph *graph = m->e.graph;
    dw_value a = dw__operand(m, m->root, 0), b = dw__operand(m, m->root, 1);
    if (dw_value_rank(graph, a) != 2 || dw_node_attr(graph, m->root, DW_ATTR_KEY_DTYPE) ||
        dw_node_int(graph, m->root, DW_ATTR_KEY_TRANSPOSE_A, 0) != 0)
        return DW_NONE;
    dw_attr attr = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W,
                               dw_node_int(graph, m->root, DW_ATTR_KEY_TRANSPOSE_B, 0));
    return dw__emit(&m->e, DW_OP_LINEAR, 2, (dw_value[]){a, b}, 1, &attr);
}

static dw_value emit_linear(dw__matcher *m, dw_node like, dw_value x, dw_value b) {
    dw_attr attr = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W,
                               dw_node_int(m->e.graph, like, DW_ATTR_KEY_TRANSPOSE_W, 1));
    dw_value operands[] = {x, dw__operand(m, like, 1), b};
    return dw__emit(&m->e, DW_OP_LINEAR, 3, operands, 1, &attr);
}

/* Matches linear(x, w) + row. */
dw_value dw__recognize_bias(dw__matcher *m) {
    for (uint32_t i = 0; i < 2; i++) {
        dw_node linear = dw__swallow(m, dw__operand(m, m->root, i), DW_OP_LINEAR);
        if (linear == DW_NONE || dw__operand(m, linear, 2) != DW_NONE) continue;
        dw_value row = dw__spread_row(m, dw__operand(m, m->root, 1 - i));
        if (row == DW_NONE) continue;
        return emit_linear(m, linear, dw__operand(m, linear, 0), row);
    }
    return DW_NONE;
}

/* Matches reshape(linear(reshape(x [.., K] to [rows, K]), w, b) to [.., N]) = linear(x, w, b). */
dw_value dw__recognize_flat_linear(dw__matcher *m) {
    const dw_graph *graph = m->e.graph;
    dw_node linear = dw__swallow(m, dw__operand(m, m->root, 0), DW_OP_LINEAR);
    if (linear == DW_NONE) return DW_NONE;
    dw_node flatten = dw__made_by(graph, dw__operand(m, linear, 0), DW_OP_RESHAPE);
    if (flatten == DW_NONE) return DW_NONE;
    dw_value x = dw__operand(m, flatten, 0);
    dw__type in = dw__type_of(graph, x);
    dw__type flat = dw__type_of(graph, dw__operand(m, linear, 0));
    dw__type product = dw__type_of(graph, dw__operand(m, m->root, 0));
    dw__type out = dw__type_of(graph, dw_node_output(graph, m->root, 0));
    if (in.rank == 0 || in.rank != out.rank || in.shape[in.rank - 1] != flat.shape[flat.rank - 1] ||
        out.shape[out.rank - 1] != product.shape[product.rank - 1] ||
        memcmp(in.shape, out.shape, (size_t)(in.rank - 1) * sizeof(dw_dim)) != 0)
        return DW_NONE;
    return emit_linear(m, linear, x, dw__operand(m, linear, 2));
}
