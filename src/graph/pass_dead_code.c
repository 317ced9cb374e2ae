/* Drops nodes that no output needs. Leaves stay: they are the graph's signature. */
#include "graph/passes.h"

static bool is_live(const dw__node_record *node, const bool *needed) {
    for (uint32_t i = 0; i < node->output_count; i++)
        if (needed[node->outputs[i]]) return true;
    return false;
}

static void mark_needed(const dw_graph *graph, bool *needed) {
    for (size_t i = 0; i < graph->outputs.count; i++) needed[graph->outputs.items[i]] = true;
    for (size_t n = graph->nodes.count; n-- > 0;) {
        const dw__node_record *node = &graph->nodes.items[n];
        if (!is_live(node, needed)) continue;
        for (uint32_t i = 0; i < node->input_count; i++)
            if (node->inputs[i] != DW_NONE) needed[node->inputs[i]] = true;
    }
}

dw_status dw__pass_dead_code(dw_graph **graph) {
    dw_status status = DW_OK;
    const dw_graph *from = *graph;
    dw__rewriter rewriter;
    bool *needed = dw__calloc(from->values.count, sizeof *needed);
    if (!needed) return dw__fail_memory("liveness", from->values.count);
    status = dw__rewriter_begin(&rewriter, from);
    if (status != DW_OK) {
        dw__free(needed);
        return status;
    }
    mark_needed(from, needed);
    for (dw_node n = 0; n < dw_graph_node_count(from); n++)
        if (is_live(&from->nodes.items[n], needed)) DW_TRY(dw__rewriter_copy(&rewriter, n));
    DW_TRY(dw__rewriter_end(&rewriter, graph));
cleanup:
    dw__free(needed);
    dw__rewriter_abort(&rewriter);
    return status;
}
