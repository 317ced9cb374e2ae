/* Reverse-mode gradients.
 *
 * A tape walks nodes from last to first and keeps, for each value, the gradient accumulated so far. Rules
 * append backward nodes after all nodes that the tape walks, so the walk never reaches its own nodes. A
 * composite without a rule is expanded at the graph's end, and a second tape walks the expansion; the pass
 * `common` later merges what forward and backward both compute. */
#include "graph/emit.h"

typedef struct tape {
    dw_graph *graph;
    /* Both arrays are indexed by value and have `count` entries: the gradient so far (DW_NONE: none), and
     * whether the value depends on a differentiated input. They do not cover values made during the walk. */
    dw_value *grads;
    bool *reached;
    size_t count;
} tape;

static dw_status tape_open(tape *t, dw_graph *graph) {
    t->graph = graph;
    t->count = graph->values.count;
    t->grads = dw__malloc(t->count * sizeof *t->grads);
    t->reached = dw__calloc(t->count, sizeof *t->reached);
    if (!t->grads || !t->reached)
        return dw__fail_memory("the gradient's tape", t->count * sizeof *t->grads);
    for (size_t i = 0; i < t->count; i++) t->grads[i] = DW_NONE;
    return DW_OK;
}

static void tape_close(tape *t) {
    dw__free(t->grads);
    dw__free(t->reached);
}

/* Adds `grad` to the gradient of `value`. */
static dw_status tape_add(tape *t, dw_value value, dw_value grad) {
    if (t->grads[value] == DW_NONE) {
        t->grads[value] = grad;
        return DW_OK;
    }
    return dw_graph_apply(t->graph, DW_OP_ADD, 2, (dw_value[]){t->grads[value], grad}, 0, NULL,
                          &t->grads[value]);
}

/* Marks the results of nodes [first, limit) that depend differentiably on a marked value. */
static void tape_reach(tape *t, dw_node first, dw_node limit) {
    const dw_graph *graph = t->graph;
    for (dw_node n = first; n < limit; n++) {
        const dw__node_record *node = &graph->nodes.items[n];
        if (dw__op_table[node->op].stops_gradient) continue;
        bool reached = false;
        for (uint32_t i = 0; i < node->input_count && !reached; i++)
            reached = node->inputs[i] != DW_NONE && t->reached[node->inputs[i]];
        for (uint32_t i = 0; i < node->output_count && reached; i++) {
            dw_value value = node->outputs[i];
            if (dw__dtype_is_float(graph->values.items[value].dtype)) t->reached[value] = true;
        }
    }
}

static dw_status call_rule(tape *t, dw_node n, const dw_value *output_grads, const bool *needed,
                           dw_value *input_grads) {
    dw_graph *graph = t->graph;
    const dw__op_row *row = &dw__op_table[dw_node_op(graph, n)];
    if (row->gradient) return row->gradient(graph, n, output_grads, needed, input_grads);
    if (row->expand) return dw__gradient_by_expansion(graph, n, output_grads, needed, input_grads);
    return dw__fail(DW_UNSUPPORTED,
                    "node %u (%s, module '%s') has no gradient; stop the gradient before it "
                    "(stop_gradient), or differentiate before the pass that made it",
                    n, row->name, dw_node_module(graph, n));
}

/* Propagates the gradients of one node's results to its operands. */
static dw_status tape_step(tape *t, dw_node n) {
    /* a copy, because the graph's records move while the rule appends */
    dw__node_record node = t->graph->nodes.items[n];
    dw_value output_grads[DW_MAX_OUTPUTS] = {0}, input_grads[DW_MAX_INPUTS] = {0};
    bool needed[DW_MAX_INPUTS] = {false}, any_needed = false, any_grad = false;
    if (dw__op_table[node.op].stops_gradient) return DW_OK;
    for (uint32_t i = 0; i < node.output_count; i++) {
        output_grads[i] = t->grads[node.outputs[i]];
        any_grad = any_grad || output_grads[i] != DW_NONE;
    }
    for (uint32_t i = 0; i < node.input_count; i++) {
        dw_value x = node.inputs[i];
        needed[i] = x != DW_NONE && t->reached[x];
        any_needed = any_needed || needed[i];
        input_grads[i] = DW_NONE;
    }
    if (!any_grad || !any_needed) return DW_OK;
    DW_RETURN_IF_FAILED(call_rule(t, n, output_grads, needed, input_grads));
    for (uint32_t i = 0; i < node.input_count; i++)
        if (needed[i] && input_grads[i] != DW_NONE)
            DW_RETURN_IF_FAILED(tape_add(t, node.inputs[i], input_grads[i]));
    return DW_OK;
}

dw_status dw__gradient_by_expansion(dw_graph *graph, dw_node node, const dw_value *output_grads,
                                    const bool *needed, dw_value *input_grads) {
    dw_status status = DW_OK;
    dw__node_record record = graph->nodes.items[node];
    dw_value outputs[DW_MAX_OUTPUTS];
    dw_node first = dw_graph_node_count(graph);
    tape t = {0};
    for (uint32_t i = 0; i < record.output_count; i++) outputs[i] = DW_NONE;
    DW_TRY(dw__op_table[record.op].expand(graph, graph, node, record.inputs, outputs));
    dw_node limit = dw_graph_node_count(graph);
    DW_TRY(tape_open(&t, graph));
    for (uint32_t i = 0; i < record.input_count; i++)
        if (needed[i]) t.reached[record.inputs[i]] = true;
    tape_reach(&t, first, limit);
    for (uint32_t i = 0; i < record.output_count; i++)
        if (output_grads[i] != DW_NONE && outputs[i] != DW_NONE && t.reached[outputs[i]])
            DW_TRY(tape_add(&t, outputs[i], output_grads[i]));
    for (dw_node n = limit; n-- > first;) DW_TRY(tape_step(&t, n));
    /* One value may be several operands. The tape holds the sum over all of them, so the first one receives
     * it. */
    for (uint32_t i = 0; i < record.input_count; i++) {
        input_grads[i] = DW_NONE;
        if (!needed[i]) continue;
        input_grads[i] = t.grads[record.inputs[i]];
        t.grads[record.inputs[i]] = DW_NONE;
    }
cleanup:
    tape_close(&t);
    return status;
}

static dw_status check_arguments(const dw_graph *graph, uint32_t output_count,
                                 const dw_value *outputs, const dw_value *output_grads,
                                 uint32_t wrt_count, const dw_value *wrt) {
    size_t count = graph->values.count;
    for (uint32_t i = 0; i < output_count; i++) {
        if (outputs[i] >= count || output_grads[i] >= count)
            return dw__fail(DW_INVALID_ARGUMENT,
                            "output %u (value %u, gradient %u) is not a value of the graph, "
                            "which has %zu",
                            i, outputs[i], output_grads[i], count);
        dw__type y = dw__type_of(graph, outputs[i]), dy = dw__type_of(graph, output_grads[i]);
        if (!dw__dtype_is_float(y.dtype))
            return dw__fail(DW_TYPE,
                            "output %u (%s) is %s: only floating-point values have a "
                            "gradient; leave it out",
                            i, dw_value_name(graph, outputs[i]), dw_dtype_name(y.dtype));
        if (y.dtype != dy.dtype || !dw__shape_equal(&y, &dy))
            return dw__fail(DW_SHAPE, "the gradient %s of output %s must have its shape and dtype",
                            dw_value_name(graph, output_grads[i]),
                            dw_value_name(graph, outputs[i]));
    }
    for (uint32_t i = 0; i < wrt_count; i++)
        if (wrt[i] >= count)
            return dw__fail(DW_INVALID_ARGUMENT,
                            "wrt[%u] = %u is not a value of the graph, which has %zu", i, wrt[i],
                            count);
    return DW_OK;
}

/* Walks all nodes. Each backward node gets the origin of its forward node. */
static dw_status walk(tape *t, dw_node limit) {
    for (dw_node n = limit; n-- > 0;) {
        const dw__node_record *node = &t->graph->nodes.items[n];
        t->graph->region = node->region;
        t->graph->layer = node->layer;
        t->graph->module = node->module;
        DW_RETURN_IF_FAILED(tape_step(t, n));
    }
    return DW_OK;
}

dw_status dw_graph_gradient(dw_graph *graph, uint32_t output_count, const dw_value *outputs,
                            const dw_value *output_grads, uint32_t wrt_count, const dw_value *wrt,
                            dw_value *grads) {
    dw_status status = DW_OK;
    dw_node limit = dw_graph_node_count(graph);
    dw_region region = graph->region;
    int layer = graph->layer;
    const char *module = graph->module;
    bool backward = graph->backward;
    tape t = {0};
    DW_RETURN_IF_FAILED(
        check_arguments(graph, output_count, outputs, output_grads, wrt_count, wrt));
    DW_TRY(tape_open(&t, graph));
    for (uint32_t i = 0; i < wrt_count; i++)
        if (dw__dtype_is_float(dw_value_dtype(graph, wrt[i]))) t.reached[wrt[i]] = true;
    tape_reach(&t, 0, limit);
    dw_graph_set_backward(graph, 1);
    for (uint32_t i = 0; i < output_count; i++)
        if (t.reached[outputs[i]]) DW_TRY(tape_add(&t, outputs[i], output_grads[i]));
    DW_TRY(walk(&t, limit));
    for (uint32_t i = 0; i < wrt_count; i++) grads[i] = t.grads[wrt[i]];
cleanup:
    tape_close(&t);
    graph->backward = backward;
    graph->region = region;
    graph->layer = layer;
    graph->module = module;
    return status;
}
