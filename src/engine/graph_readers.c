/* Facts about the scheduled graph that every plan looks up: the readers of each value, the values that are computed in
 * the caller's buffers, and when each leaf and output is read. */
#include "engine/engine_internal.h"

dw_status dw__index_readers(const dw_graph *graph, uint32_t **starts, dw_node **readers) {
    size_t values = graph->values.count, reads = 0;
    for (size_t n = 0; n < graph->nodes.count; n++) reads += graph->nodes.items[n].input_count;
    uint32_t *start = *starts = dw__calloc(values + 2, sizeof *start);
    *readers = dw__calloc(reads + 1, sizeof **readers);
    if (!start || !*readers)
        return dw__fail_memory("the readers of values", (values + reads) * sizeof(uint32_t));
    /* Counting sort: start[v + 2] counts, then start[v + 1] runs through v's readers. */
    for (size_t n = 0; n < graph->nodes.count; n++) {
        const dw__node_record *node = &graph->nodes.items[n];
        for (uint32_t i = 0; i < node->input_count; i++) {
            if (node->inputs[i] != DW_NONE) start[node->inputs[i] + 2]++;
        }
    }
    for (size_t v = 2; v < values + 2; v++) start[v] += start[v - 1];
    for (size_t n = 0; n < graph->nodes.count; n++) {
        const dw__node_record *node = &graph->nodes.items[n];
        for (uint32_t i = 0; i < node->input_count; i++) {
            if (node->inputs[i] != DW_NONE) (*readers)[start[node->inputs[i] + 1]++] = (dw_node)n;
        }
    }
    return DW_OK;
}

static dw_status index_uses(dw_engine *engine) {
    const dw_graph *graph = engine->graph;
    engine->output_uses = dw__calloc(graph->values.count + 1, sizeof *engine->output_uses);
    if (!engine->output_uses)
        return dw__fail_memory("the readers of values", graph->values.count * sizeof(uint32_t));
    for (size_t i = 0; i < graph->outputs.count; i++) {
        engine->output_uses[graph->outputs.items[i]]++;
    }
    return dw__index_readers(graph, &engine->use_start, &engine->use_nodes);
}

/* Follows a chain of reshapes from `value` down to the value that it begins with. DW_NONE if the chain
 * reaches a leaf, leaves the region, or meets a value that has a buffer already. */
static dw_value find_direct_root(const dw_engine *engine, dw_value value, bool backward) {
    const dw_graph *graph = engine->graph;
    for (bool first = true;; first = false) {
        dw_node node = graph->values.items[value].node;
        if (node == DW_NONE || engine->direct[value] != DW_NONE) return DW_NONE;
        const dw__node_record *record = &graph->nodes.items[node];
        if (record->backward != backward) return DW_NONE;
        if (backward) {
            /* The caller may leave the gradient out, so nothing else may read it. */
            uint32_t uses = engine->use_start[value + 1] - engine->use_start[value];
            if (uses + engine->output_uses[value] != 1 || (first && uses)) return DW_NONE;
        }
        if (!dw__op_keeps_order(record->op)) return value;
        value = record->inputs[0];
    }
}

static dw_status choose_direct(dw_engine *engine) {
    const dw_graph *graph = engine->graph;
    engine->direct = dw__malloc((graph->values.count + 1) * sizeof *engine->direct);
    if (!engine->direct) return dw__fail_memory("the places of outputs", graph->values.count);
    for (size_t v = 0; v < graph->values.count; v++) engine->direct[v] = DW_NONE;
    for (uint32_t slot = 0; slot < graph->outputs.count; slot++) {
        dw_value value = graph->outputs.items[slot];
        dw_value root = find_direct_root(engine, value, slot >= engine->output_count);
        if (root == DW_NONE) continue;
        for (;;) {
            engine->direct[value] = slot;
            if (value == root) break;
            value = graph->nodes.items[graph->values.items[value].node].inputs[0];
        }
    }
    return DW_OK;
}

/* Finds when the memory of each leaf and output is read. A view is read when its readers read it. */
static dw_status find_reads(dw_engine *engine) {
    const dw_graph *graph = engine->graph;
    dw_status status = DW_OK;
    uint8_t *reads = dw__calloc(graph->values.count + 1, 1);
    engine->leaf_reads = dw__calloc(graph->leaves.count + 1, 1);
    engine->output_reads = dw__calloc(engine->output_count + 1, 1);
    if (!reads || !engine->leaf_reads || !engine->output_reads) {
        DW_TRY(dw__fail_memory("the readers of leaves", graph->values.count));
    }
    for (uint32_t slot = 0; slot < graph->outputs.count; slot++) {
        reads[graph->outputs.items[slot]] |=
            slot < engine->output_count ? DW_READ_FORWARD : DW_READ_BACKWARD;
    }
    for (size_t n = graph->nodes.count; n-- > 0;) {
        const dw__node_record *node = &graph->nodes.items[n];
        bool view = dw__op_is_view(node->op);
        uint8_t here = node->backward           ? DW_READ_BACKWARD
                       : n < engine->kept_nodes ? DW_READ_KEPT
                                                : DW_READ_FORWARD;
        uint8_t flags = view ? reads[node->outputs[0]] : here;
        if (dw__op_table[node->op].view == DW__VIEW_RESHAPE) flags |= here; /* it may be a copy */
        for (uint32_t i = 0; i < node->input_count; i++) {
            if (node->inputs[i] != DW_NONE) reads[node->inputs[i]] |= flags;
        }
    }
    for (size_t i = 0; i < graph->leaves.count; i++) {
        engine->leaf_reads[i] = reads[graph->leaves.items[i]];
    }
    for (uint32_t slot = 0; slot < engine->output_count; slot++) {
        engine->output_reads[slot] = DW_READ_FORWARD;
    }
    for (dw_value value = 0; value < graph->values.count; value++) {
        uint32_t slot = engine->direct[value];
        if (slot < engine->output_count) {
            engine->output_reads[slot] |= reads[value] & DW_READ_BACKWARD;
        }
    }
cleanup:
    dw__free(reads);
    return status;
}

dw_status dw__engine_index_graph(dw_engine *engine) {
    const dw_graph *graph = engine->graph;
    engine->first_backward = (uint32_t)graph->nodes.count;
    while (engine->first_backward && graph->nodes.items[engine->first_backward - 1].backward) {
        engine->first_backward--;
    }
    DW_RETURN_IF_FAILED(index_uses(engine));
    DW_RETURN_IF_FAILED(choose_direct(engine));
    return find_reads(engine);
}
