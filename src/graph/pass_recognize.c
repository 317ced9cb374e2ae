/* Replaces chains of primitives that compute a composite by that composite. */
#include "graph/recognize.h"
#include <math.h>

/* ---- queries for recognisers ---------------------------------------------------------------- */

dw_value dw__operand(const dw__matcher *m, dw_node node, uint32_t index) {
    return dw_node_input(m->e.graph, node, index);
}

bool dw__single(const dw__matcher *m, dw_value value) {
    return value < m->rewrite->uses.count && m->rewrite->uses.items[value] <= 1;
}

dw_node dw__swallow(const dw__matcher *m, dw_value value, dw_op op) {
    dw_node node = dw__made_by(m->e.graph, value, op);
    return node != DW_NONE && dw__single(m, value) ? node : DW_NONE;
}

bool dw__near(double number, double want) { return fabs(number - want) <= 1e-7 * fabs(want); }

bool dw__with_number(const dw__matcher *m, dw_value value, dw_op op, dw_value *x, double *number) {
    dw_node node = dw__made_by(m->e.graph, value, op);
    if (node == DW_NONE) return false;
    int orders = dw__op_table[op].commutative ? 2 : 1;
    for (int i = 0; i < orders; i++) {
        if (!dw__is_splat(m->e.graph, dw__operand(m, node, 1 - (uint32_t)i), number)) continue;
        *x = dw__operand(m, node, (uint32_t)i);
        return true;
    }
    return false;
}

dw_value dw__unbroadcast(const dw__matcher *m, dw_value value) {
    const dw_graph *graph = m->e.graph;
    for (;;) {
        dw_node node = dw__made_by(graph, value, DW_OP_BROADCAST);
        if (node == DW_NONE) node = dw__made_by(graph, value, DW_OP_RESHAPE);
        if (node == DW_NONE) return value;
        if (graph->nodes.items[node].op == DW_OP_RESHAPE && !dw__prepends_ones(graph, node))
            return value;
        value = dw_node_input(graph, node, 0);
    }
}

dw_value dw__spread_row(const dw__matcher *m, dw_value value) {
    dw_value row = dw__unbroadcast(m, value);
    dw__type have = dw__type_of(m->e.graph, row), whole = dw__type_of(m->e.graph, value);
    if (whole.rank == 0 || have.rank != 1 || have.shape[0] != whole.shape[whole.rank - 1])
        return DW_NONE;
    return row;
}

dw_value dw__spread_column(const dw__matcher *m, dw_value value) {
    dw_node spread = dw__swallow(m, value, DW_OP_BROADCAST);
    if (spread == DW_NONE) return DW_NONE;
    dw_value column = dw__operand(m, spread, 0);
    dw__type have = dw__type_of(m->e.graph, column), whole = dw__type_of(m->e.graph, value);
    if (have.rank != whole.rank || have.rank == 0) return DW_NONE;
    for (int i = 0; i < have.rank - 1; i++)
        if (have.shape[i] != whole.shape[i]) return DW_NONE;
    return have.shape[have.rank - 1] == 1 && dw__single(m, column) ? column : DW_NONE;
}

/* ---- the pass ------------------------------------------------------------------------------- */

/* Recognisers in order of preference for one root operation. In BF16 and F16 a composite rounds once, where the chain
 * rounded after every step: it is closer to the exact result, and so are the gradients. */
static const struct {
    dw_op root;
    dw__recognizer *recognize;
} recognizers[] = {
    {DW_OP_CAST, dw__recognize_wide_norm},
    {DW_OP_MUL, dw__recognize_gelu},
    {DW_OP_MUL, dw__recognize_silu},
    {DW_OP_MUL, dw__recognize_swiglu},
    {DW_OP_MUL, dw__recognize_layer_norm},
    {DW_OP_DIV, dw__recognize_layer_norm},
    {DW_OP_MUL, dw__recognize_rms_norm},
    {DW_OP_MUL, dw__recognize_norm_weight},
    {DW_OP_ADD, dw__recognize_norm_bias},
    {DW_OP_DIV, dw__recognize_softmax},
    {DW_OP_ADD, dw__recognize_rope},
    {DW_OP_CONCAT, dw__recognize_partial_rope},
    {DW_OP_ADD, dw__recognize_concat},
    {DW_OP_MATMUL, dw__recognize_grouped_matmul},
    {DW_OP_ADD, dw__recognize_grouped_bias},
    {DW_OP_MATMUL, dw__recognize_matmul},
    {DW_OP_MATMUL, dw__recognize_written_attention},
    {DW_OP_ADD, dw__recognize_bias},
    {DW_OP_RESHAPE, dw__recognize_flat_linear},
};

static dw_status recognize_node(dw__rewrite *rewrite, dw_node node, dw_value *replacements) {
    dw_graph *graph = rewrite->graph;
    dw__matcher m = {{graph, DW_OK}, rewrite, node};
    dw_op op = graph->nodes.items[node].op;
    if (op == DW_OP_ATTENTION) {
        dw_node made;
        if (dw__recognize_attention(&m, &made))
            for (uint32_t i = 0; i < 2; i++) replacements[i] = dw_node_output(graph, made, i);
        return m.e.status;
    }
    for (size_t i = 0; i < DW_COUNT(recognizers); i++) {
        if (recognizers[i].root != op) continue;
        dw_value made = recognizers[i].recognize(&m);
        if (m.e.status != DW_OK) return m.e.status;
        if (made == DW_NONE) continue;
        replacements[0] = made;
        return DW_OK;
    }
    return DW_OK;
}

dw_status dw__pass_recognize(dw_graph **graph) {
    dw_status status = DW_OK;
    dw_graph *work = NULL;
    DW_TRY(dw_graph_clone(*graph, &work));
    DW_TRY(dw__rewrite_each(&work, recognize_node, NULL));
    DW_TRY(dw__recognize_loss(&work, false));
    dw__replace_graph(graph, &work);
cleanup:
    dw_graph_destroy(work);
    return status;
}
