/* Multiplies the router's weights into the rows before the last GEMM of the experts, not behind it.
 *
 * A token's result is a weighted sum of its k rows, each of which an expert's matrix has made. A weight is one number
 * for a row, so it may as well multiply the row that the GEMM reads:
 *
 *     sum over j of w[j] (h[j] W)  =  sum over j of (w[j] h[j]) W
 *
 * In the first form the gradient of w reads the rows that the GEMM has made, so they are saved from forward to
 * backward. In the second it reads h and the gradient of the product w h. Backward has both: h is computed again from
 * what the experts' first GEMM has made.
 *
 * The gradient of w then adds up products as wide as h, which are written and read once, instead of reading the GEMM's
 * rows. If h is at most as wide as these, as in mixtures of many small experts, what is saved is worth those bytes. In
 * mixtures of few wide experts it is not: the rows are then small beside what else the experts save. A bias of the GEMM
 * would need a weight of its own, so such a GEMM is left alone.
 *
 * The pass runs on sorted rows (pass_sort_rows.c), before the gradient is taken. */
#include "graph/passes.h"

/* True if `h` [R, inner] is at most as wide as `rows` [R, outer]; false if a width is not a number. */
static bool is_narrow(const dw_graph *graph, dw_value h, dw_value rows) {
    const dw_dim inner = dw_value_shape(graph, h)[1], outer = dw_value_shape(graph, rows)[1];
    return inner >= 0 && outer >= 0 && inner <= outer;
}

/* Returns the weights [T, k] as a column [R, 1] in the order of sorted rows. */
static dw_value sorted_column(dw__emitter *e, dw_value weight, dw_value place) {
    const dw__type type = dw__type_of(e->graph, place);
    const dw_dim shape[2] = {dw__emit_dim_product(e, 2, type.shape), 1};
    const dw_value operands[] = {dw__emit_reshape(e, weight, 2, shape),
                                 dw__emit_reshape(e, place, 2, shape), DW_NONE};
    return dw__emit(e, DW_OP_SPREAD_ROWS, 3, operands, 0, NULL);
}

/* Returns h times the column. Weights in F32 multiply rows in 16 bits before these are rounded. */
static dw_value multiplied(dw__emitter *e, dw_value h, dw_value column) {
    if (e->status != DW_OK) return DW_NONE;
    const dw_dtype own = dw_value_dtype(e->graph, h), wide = dw_value_dtype(e->graph, column);
    const dw_value x = dw__emit_cast(e, h, wide);
    const dw_value y = dw__emit_binary(e, DW_OP_MUL, x, dw__emit_broadcast_like(e, column, x));
    return dw__emit_cast(e, y, own);
}

static dw_status weigh_early(dw__rewrite *rewrite, dw_node node, dw_value *replacements) {
    enum { X, PLACE, WEIGHT };                  /* of combine_rows */
    enum { H, MATRICES, OFFSETS, B, OPERANDS }; /* of segment_linear */
    dw_graph *graph = rewrite->graph;
    if (dw_node_op(graph, node) != DW_OP_COMBINE_ROWS) return DW_OK;
    const dw_value rows = dw_node_input(graph, node, X), place = dw_node_input(graph, node, PLACE),
                   weight = dw_node_input(graph, node, WEIGHT);
    const dw_node linear = dw__made_by(graph, rows, DW_OP_SEGMENT_LINEAR);
    if (weight == DW_NONE || linear == DW_NONE || rewrite->uses.items[rows] != 1) return DW_OK;
    const dw_value h = dw_node_input(graph, linear, H);
    if (dw_node_input(graph, linear, B) != DW_NONE || !is_narrow(graph, h, rows)) return DW_OK;

    dw__emitter e = {graph, DW_OK};
    const dw_attr side = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W,
                                     dw_node_int(graph, linear, DW_ATTR_KEY_TRANSPOSE_W, 1)),
                  dtype = dw_attr_int(DW_ATTR_KEY_DTYPE,
                                      dw_value_dtype(graph, dw_node_output(graph, node, 0)));
    const bool wide = (dw_dtype)dtype.integer != dw_value_dtype(graph, rows);
    const dw_value operands[OPERANDS] = {multiplied(&e, h, sorted_column(&e, weight, place)),
                                         dw_node_input(graph, linear, MATRICES),
                                         dw_node_input(graph, linear, OFFSETS), DW_NONE};
    const dw_value sum[] = {dw__emit(&e, DW_OP_SEGMENT_LINEAR, OPERANDS, operands, 1, &side), place,
                            DW_NONE};
    replacements[0] = dw__emit(&e, DW_OP_COMBINE_ROWS, 3, sum, wide, &dtype);
    return e.status;
}

dw_status dw__weigh_rows_early(dw_graph **graph) {
    return dw__rewrite_each(graph, weigh_early, NULL);
}
