/* Replaces composites, all or those of one operation, by their expansions. */
#include "graph/passes.h"

static dw_status expand_node(dw__rewriter *rewriter, dw_node n, dw_op only) {
    const dw__node_record *node = &rewriter->from->nodes.items[n];
    const dw__op_row *row = &dw__op_table[node->op];
    if (!row->expand || (only != DW_OP_COUNT && node->op != only))
        return dw__rewriter_copy(rewriter, n);
    dw_value inputs[DW_MAX_INPUTS], outputs[DW_MAX_OUTPUTS];
    for (uint32_t i = 0; i < node->input_count; i++)
        inputs[i] = node->inputs[i] == DW_NONE ? DW_NONE : rewriter->map[node->inputs[i]];
    DW_RETURN_IF_FAILED(dw__copy_origin(rewriter->to, rewriter->from, n));
    dw_status status = row->expand(rewriter->to, rewriter->from, n, inputs, outputs);
    if (status != DW_OK) return dw__fail_prefix(status, "node %u (%s)", n, row->name);
    for (uint32_t i = 0; i < node->output_count; i++) rewriter->map[node->outputs[i]] = outputs[i];
    return DW_OK;
}

dw_status dw__expand_op(dw_graph **graph, dw_op op) {
    dw_status status = DW_OK;
    const dw_graph *from = *graph;
    dw__rewriter rewriter;
    DW_RETURN_IF_FAILED(dw__rewriter_begin(&rewriter, from));
    for (dw_node n = 0; n < dw_graph_node_count(from); n++) DW_TRY(expand_node(&rewriter, n, op));
    DW_TRY(dw__rewriter_end(&rewriter, graph));
cleanup:
    dw__rewriter_abort(&rewriter);
    return status;
}

dw_status dw__pass_expand(dw_graph **graph) { return dw__expand_op(graph, DW_OP_COUNT); }
