/* Replaces composites by their expansions: all, those of one operation, or those that a rule names. */
#include "graph/passes.h"

static bool is_composite(const dw_graph *graph, dw_node n) {
    return dw__op_table[graph->nodes.items[n].op].expand != NULL;
}

static dw_status expand_node(dw__rewriter *rewriter, dw_node n) {
    const dw__node_record *node = &rewriter->from->nodes.items[n];
    const dw__op_row *row = &dw__op_table[node->op];
    dw_value inputs[DW_MAX_INPUTS], outputs[DW_MAX_OUTPUTS];
    for (uint32_t i = 0; i < node->input_count; i++)
        inputs[i] = node->inputs[i] == DW_NONE ? DW_NONE : rewriter->map[node->inputs[i]];
    DW_RETURN_IF_FAILED(dw__copy_origin(rewriter->to, rewriter->from, n));
    dw_status status = row->expand(rewriter->to, rewriter->from, n, inputs, outputs);
    if (status != DW_OK) return dw__fail_prefix(status, "node %u (%s)", n, row->name);
    for (uint32_t i = 0; i < node->output_count; i++) rewriter->map[node->outputs[i]] = outputs[i];
    return DW_OK;
}

/* One round. `changed` says whether a node was expanded. */
static dw_status expand_round(dw_graph **graph, dw__expand_rule wanted, void *context,
                              bool *changed) {
    dw_status status = DW_OK;
    const dw_graph *from = *graph;
    dw__rewriter rewriter;
    *changed = false;
    DW_RETURN_IF_FAILED(dw__rewriter_begin(&rewriter, from));
    for (dw_node n = 0; n < dw_graph_node_count(from); n++) {
        const bool expands = is_composite(from, n) && wanted(from, n, context);
        DW_TRY(expands ? expand_node(&rewriter, n) : dw__rewriter_copy(&rewriter, n));
        *changed |= expands;
    }
    DW_TRY(dw__rewriter_end(&rewriter, graph));
cleanup:
    dw__rewriter_abort(&rewriter);
    return status;
}

static bool is_operation(const dw_graph *graph, dw_node node, void *context) {
    return graph->nodes.items[node].op == *(const dw_op *)context;
}

static bool is_any(const dw_graph *graph, dw_node node, void *context) {
    (void)graph, (void)node, (void)context;
    return true;
}

dw_status dw__expand_op(dw_graph **graph, dw_op op) {
    bool changed;
    return expand_round(graph, is_operation, &op, &changed);
}

dw_status dw__expand_where(dw_graph **graph, dw__expand_rule wanted, void *context) {
    dw_status status = DW_OK;
    bool changed = true;
    dw_graph *expanded = NULL; /* a copy, because a later round may fail */
    DW_TRY(dw_graph_clone(*graph, &expanded));
    while (changed) DW_TRY(expand_round(&expanded, wanted, context, &changed));
    dw_graph_destroy(*graph);
    *graph = expanded;
    expanded = NULL;
cleanup:
    dw_graph_destroy(expanded);
    return status;
}

dw_status dw__pass_expand(dw_graph **graph) { return dw__expand_where(graph, is_any, NULL); }

typedef struct products {
    dw__expand_rule wanted;
    void *context;
} products;

static dw_status widen_result(dw__rewrite *rewrite, dw_node node, dw_value *replacements) {
    const products *p = rewrite->context;
    dw_graph *graph = rewrite->graph;
    dw__emitter e = {graph, DW_OK};
    const dw_dtype dtype = dw_value_dtype(graph, replacements[0]);
    if (!dw__dtype_is_half(dtype) || dw_node_op(graph, node) != DW_OP_MATMUL ||
        !p->wanted(graph, node, p->context))
        return DW_OK;
    const dw_value wide =
        dw__emit_wide_matmul(&e, dw_node_input(graph, node, 0), dw_node_input(graph, node, 1),
                             dw_node_int(graph, node, DW_ATTR_KEY_TRANSPOSE_A, 0) != 0,
                             dw_node_int(graph, node, DW_ATTR_KEY_TRANSPOSE_B, 0) != 0);
    replacements[0] = dw__emit_cast(&e, wide, dtype);
    return e.status;
}

static dw_status widen_operands(dw__rewrite *rewrite, dw_node node, dw_value *replacements) {
    const products *p = rewrite->context;
    dw_graph *graph = rewrite->graph;
    dw__emitter e = {graph, DW_OK};
    if (dw_node_op(graph, node) != DW_OP_MATMUL || !p->wanted(graph, node, p->context))
        return DW_OK;
    replacements[0] = dw__emit_matmul(&e, dw__emit_widen(&e, dw_node_input(graph, node, 0)),
                                      dw__emit_widen(&e, dw_node_input(graph, node, 1)),
                                      dw_node_int(graph, node, DW_ATTR_KEY_TRANSPOSE_A, 0) != 0,
                                      dw_node_int(graph, node, DW_ATTR_KEY_TRANSPOSE_B, 0) != 0);
    return e.status;
}

dw_status dw__widen_products(dw_graph **graph, dw__expand_rule wanted, void *context) {
    products p = {wanted, context};
    DW_RETURN_IF_FAILED(dw__rewrite_each(graph, widen_result, &p));
    return dw__rewrite_each(graph, widen_operands, &p);
}
