/* Scheduling: forward nodes first, then backward in an order that needs little memory.
 *
 * saved_values.c chooses what backward computes again, repeated_nodes.c what of it runs together with a program of
 * backward, backward_order.c the order. They compare sizes, which are not
 * known yet: every symbol counts as NOMINAL_SIZE.
 */
#include "engine/training_schedule.h"
#include "graph/body.h"
#include <string.h>

enum { NOMINAL_SIZE = 128 };

static dw_status allocate(dw__scheduling *s) {
    size_t nodes = s->node_count + 1, values = s->value_count + 1;
    size_t symbols = dw_graph_symbol_count(s->graph) + 1;
    s->sizes = dw__malloc(symbols * sizeof *s->sizes);
    s->bytes = dw__calloc(values, sizeof *s->bytes);
    s->root = dw__calloc(values, sizeof *s->root);
    s->kept = dw__calloc(nodes, sizeof *s->kept);
    s->in_forward = dw__calloc(nodes, sizeof *s->in_forward);
    s->free_root = dw__calloc(values, sizeof *s->free_root);
    s->recomputed = dw__calloc(values, sizeof *s->recomputed);
    /* A forward node may run twice: in forward, and again in backward. */
    s->runs_in = dw__malloc(nodes * sizeof *s->runs_in);
    s->repeats = dw__malloc(nodes * sizeof *s->repeats);
    s->order = dw__calloc(2 * nodes, sizeof *s->order);
    s->emitted = dw__calloc(nodes, sizeof *s->emitted);
    s->real = dw__calloc(nodes, sizeof *s->real);
    s->reads = dw__calloc(values, sizeof *s->reads);
    s->live = dw__calloc(values, sizeof *s->live);
    s->ready = dw__calloc(nodes, sizeof *s->ready);
    s->stack = dw__calloc(nodes, sizeof *s->stack);
    s->first_view = dw__calloc(nodes, sizeof *s->first_view);
    s->next_view = dw__calloc(s->graph->outputs.count + 1, sizeof *s->next_view);
    if (!s->sizes || !s->bytes || !s->root || !s->kept || !s->in_forward || !s->free_root ||
        !s->recomputed || !s->order || !s->emitted || !s->real || !s->reads || !s->live ||
        !s->ready || !s->stack || !s->first_view || !s->next_view || !s->runs_in || !s->repeats) {
        return dw__fail_memory("the schedule", values * sizeof *s->bytes);
    }
    for (size_t i = 0; i < symbols; i++) s->sizes[i] = NOMINAL_SIZE;
    for (size_t i = 0; i < nodes; i++) s->runs_in[i] = s->repeats[i] = DW_NONE;
    return dw__index_readers(s->graph, &s->reader_start, &s->readers);
}

static void release(dw__scheduling *s) {
    dw__free(s->sizes);
    dw__free(s->bytes);
    dw__free(s->root);
    dw__free(s->kept);
    dw__free(s->in_forward);
    dw__free(s->free_root);
    dw__free(s->recomputed);
    dw__free(s->reader_start);
    dw__free(s->readers);
    dw__free(s->runs_in);
    dw__free(s->repeats);
    dw__free(s->order);
    dw__free(s->emitted);
    dw__free(s->real);
    dw__free(s->reads);
    dw__free(s->live);
    dw__free(s->ready);
    dw__free(s->stack);
    dw__free(s->first_view);
    dw__free(s->next_view);
}

/* Returns the bytes at nominal sizes. A dim that has no value there ("S - 1000") counts as one element. */
static int64_t nominal_bytes(const dw__scheduling *s, dw_value value) {
    const dw__value_record *record = &s->graph->values.items[value];
    double count = dw_dtype_bits(record->dtype) / 8.0;
    for (int axis = 0; axis < record->rank; axis++) {
        int64_t dim = 1;
        if (dw_dim_eval(s->graph, record->shape[axis], s->sizes, &dim) != DW_OK) dim = 1;
        count *= (double)dim;
    }
    const double most = (double)((int64_t)1 << 50);
    return (int64_t)(count < most ? count : most);
}

/* Marks the nodes that an output of forward depends on. They may not depend on a gradient. */
static dw_status find_forward(dw__scheduling *s) {
    const dw_graph *graph = s->graph;
    for (uint32_t i = 0; i < s->forward_outputs; i++) {
        dw_node node = producer(s, graph->outputs.items[i]);
        if (node != DW_NONE) s->in_forward[node] = true;
    }
    for (dw_node node = s->node_count; node-- > 0;) {
        if (!s->in_forward[node]) continue;
        const dw__node_record *record = record_of(s, node);
        for (uint32_t i = 0; i < record->input_count; i++) {
            dw_value input = record->inputs[i];
            if (input == DW_NONE) continue;
            if (graph->values.items[input].role == DW_ROLE_GRADIENT) {
                return dw__fail(DW_INTERNAL,
                                "node %u (%s) computes an output of forward from the gradient %s",
                                node, dw_op_name(record->op), graph->values.items[input].name);
            }
            if (producer(s, input) != DW_NONE) s->in_forward[producer(s, input)] = true;
        }
    }
    return DW_OK;
}

static void find_roots(dw__scheduling *s) {
    for (dw_value value = 0; value < s->value_count; value++) {
        s->root[value] = value;
        s->bytes[value] = nominal_bytes(s, value);
        if (producer(s, value) == DW_NONE) s->free_root[value] = true;
    }
    for (dw_node node = 0; node < s->node_count; node++) {
        const dw__node_record *record = record_of(s, node);
        if (dw__op_is_view(record->op)) s->root[record->outputs[0]] = s->root[record->inputs[0]];
    }
    for (size_t i = 0; i < s->graph->outputs.count; i++) {
        /* A buffer of an output that is only reshaped holds the root itself. */
        dw_value value = s->graph->outputs.items[i];
        dw_node node = producer(s, value);
        while (node != DW_NONE && dw__op_keeps_order(record_of(s, node)->op)) {
            value = record_of(s, node)->inputs[0];
            node = producer(s, value);
        }
        if (s->root[value] == value) s->free_root[value] = true;
    }
}

/* Parses the body of a program. */
static dw_status parse_body(const dw__scheduling *s, dw_node node, dw__body *body) {
    const dw__node_record *record = record_of(s, node);
    dw_dtype dtypes[DW_MAX_INPUTS];
    for (uint32_t i = 0; i < record->input_count; i++)
        dtypes[i] = s->graph->values.items[record->inputs[i]].dtype;
    return dw__body_parse(dw_node_attr(s->graph, node, DW_ATTR_KEY_BODY)->string,
                          record->input_count, dtypes, body);
}

/* Adds the operands of the node that the program `node` repeats to its own, and writes the joint body. */
static dw_status join_bodies(const dw__scheduling *s, dw_node node, dw_value *inputs,
                             uint32_t *input_count, dw__text *text) {
    const dw__node_record *repeated = record_of(s, s->repeats[node]);
    uint16_t numbers[DW_MAX_INPUTS];
    dw_status status = DW_OK;
    dw__body *bodies = dw__malloc(3 * sizeof *bodies);
    if (!bodies) return dw__fail_memory("the bodies of two programs", 3 * sizeof *bodies);
    for (uint32_t i = 0; i < repeated->input_count; i++) {
        const dw_value input = s->rewriter.map[repeated->inputs[i]];
        uint32_t at = 0;
        while (at < *input_count && inputs[at] != input) at++;
        if (at == *input_count) inputs[(*input_count)++] = input;
        numbers[i] = (uint16_t)at;
    }
    DW_TRY(parse_body(s, node, &bodies[0]));
    DW_TRY(parse_body(s, s->repeats[node], &bodies[1]));
    if (!dw__body_join(&bodies[0], &bodies[1], numbers, (uint16_t)*input_count, &bodies[2]))
        DW_TRY(dw__fail(DW_INTERNAL, "nodes %u and %u are too long for one program", node,
                        s->repeats[node]));
    DW_TRY(dw__body_print(&bodies[2], text));
cleanup:
    dw__free(bodies);
    return status;
}

/* Copies the node into the new graph as a node of backward. */
static dw_status copy_backward(dw__scheduling *s, dw_node node) {
    dw_graph *to = s->rewriter.to;
    const dw__node_record record = *record_of(s, node);
    const dw_attr *attrs = NULL;
    dw_status status = DW_OK;
    dw__text text = {0};
    uint32_t input_count = record.input_count;
    dw_node copy = DW_NONE;
    dw_attr body;
    DW_RETURN_IF_FAILED(dw__import_attrs(to, s->graph, node, &attrs));
    dw_value inputs[DW_MAX_INPUTS];
    for (uint32_t i = 0; i < record.input_count; i++) {
        inputs[i] = record.inputs[i] == DW_NONE ? DW_NONE : s->rewriter.map[record.inputs[i]];
    }
    if (s->repeats[node] != DW_NONE) {
        DW_TRY(join_bodies(s, node, inputs, &input_count, &text));
        body = dw_attr_string(DW_ATTR_KEY_BODY, text.text);
        attrs = &body;
    }
    DW_TRY(dw_graph_set_origin(to, record.region, record.layer, record.module));
    dw_graph_set_backward(to, 1);
    DW_TRY(dw_graph_append(to, record.op, input_count, inputs, record.attr_count, attrs, &copy));
    for (uint32_t o = 0; o < dw__result_count(s, node); o++) {
        const dw_value value = dw__result_at(s, node, o);
        bool saved = s->in_forward[producer(s, value)] && !s->recomputed[value];
        if (!saved) s->rewriter.map[value] = to->nodes.items[copy].outputs[o];
    }
cleanup:
    dw__text_free(&text);
    return status;
}

/* Copies the nodes of forward that are kept, or that are not. */
static dw_status copy_forward(dw__scheduling *s, bool kept) {
    for (dw_node node = 0; node < s->node_count; node++) {
        if (!s->in_forward[node] || s->kept[node] != kept) continue;
        DW_RETURN_IF_FAILED(dw__rewriter_copy(&s->rewriter, node));
        dw_value output = s->rewriter.map[record_of(s, node)->outputs[0]];
        s->rewriter.to->nodes.items[s->rewriter.to->values.items[output].node].backward = false;
    }
    return DW_OK;
}

static dw_status write_graph(dw__scheduling *s, dw_graph **graph, uint32_t *kept_nodes) {
    dw_status status = DW_OK;
    dw_value *forward_map = NULL;
    DW_TRY(dw__rewriter_begin(&s->rewriter, s->graph));
    DW_TRY(copy_forward(s, true));
    *kept_nodes = dw_graph_node_count(s->rewriter.to);
    DW_TRY(copy_forward(s, false));
    size_t bytes = s->value_count * sizeof *forward_map;
    forward_map = dw__malloc(bytes);
    if (!forward_map) DW_TRY(dw__fail_memory("a map of values", bytes));
    if (bytes) memcpy(forward_map, s->rewriter.map, bytes);
    for (size_t i = 0; i < s->order_count; i++) DW_TRY(copy_backward(s, s->order[i]));
    /* Outputs of forward are the values of forward, not their copies in backward. */
    for (dw_value value = 0; value < s->value_count; value++) {
        dw_node node = producer(s, value);
        if (node != DW_NONE && s->in_forward[node]) s->rewriter.map[value] = forward_map[value];
    }
    DW_TRY(dw__rewriter_end(&s->rewriter, graph));
cleanup:
    if (status != DW_OK && s->rewriter.to) dw__rewriter_abort(&s->rewriter);
    dw__free(forward_map);
    return status;
}

dw_status dw__schedule(dw_graph **graph, uint32_t forward_outputs, bool recompute, bool keep,
                       uint32_t *kept_nodes) {
    dw_status status = DW_OK;
    dw__scheduling s = {.graph = *graph, .forward_outputs = forward_outputs};
    s.node_count = dw_graph_node_count(*graph);
    s.value_count = dw_graph_value_count(*graph);
    DW_TRY(allocate(&s));
    find_roots(&s);
    if (keep) dw__choose_kept(&s);
    DW_TRY(find_forward(&s));
    if (recompute) {
        DW_TRY(dw__choose_recomputed(&s));
        dw__join_repeated(&s);
    }
    DW_TRY(dw__order_backward(&s));
    DW_TRY(write_graph(&s, graph, kept_nodes));
cleanup:
    release(&s);
    return status;
}
