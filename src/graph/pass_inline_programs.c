/* Lets programs of backward compute values of forward themselves.
 *
 * The gradient of a product reads both factors. If one of them is the result of a program of forward (an activation
 * function), it is saved, or written by a repeated program and read again:
 *
 *     forward   h = silu(g) * u;  a = h * w                backward   dw = da * h;  dg = ..(g, u, da)
 *
 * A program of backward that reads all that the value is computed from anyway (here g and u) computes it in registers,
 * and reads one tensor less. Each instruction rounds as before, so results keep their bits. Then results of programs
 * that nothing reads any more are left out. */
#include "graph/body.h"
#include "graph/passes.h"

typedef struct inliner {
    dw__body reader, maker, part, made;
    uint16_t part_inputs[DW_MAX_INPUTS];
} inliner;

static dw_status parse(const dw_graph *graph, dw_node node, dw__body *body) {
    const dw__node_record *record = &graph->nodes.items[node];
    dw_dtype dtypes[DW_MAX_INPUTS];
    for (uint32_t i = 0; i < record->input_count; i++)
        dtypes[i] = dw_value_dtype(graph, record->inputs[i]);
    return dw__body_parse(dw_node_attr(graph, node, DW_ATTR_KEY_BODY)->string, record->input_count,
                          dtypes, body);
}

static uint32_t position_of(const dw_value *values, uint32_t count, dw_value value) {
    uint32_t i = 0;
    while (i < count && values[i] != value) i++;
    return i;
}

/* True if one of the values has the shape of `like`, so that a program of them has it too. */
static bool spans(const dw_graph *graph, const dw_value *values, uint32_t count, dw_value like) {
    const dw__type want = dw__type_of(graph, like);
    for (uint32_t i = 0; i < count; i++) {
        const dw__type have = dw__type_of(graph, values[i]);
        if (dw__shape_equal(&have, &want)) return true;
    }
    return false;
}

static dw_status append(dw_graph *graph, const dw__body *body, const dw_value *inputs,
                        dw_node *made) {
    dw__emitter e = {graph, DW_OK};
    dw__text text = {0};
    dw_status status = dw__body_print(body, &text);
    if (status == DW_OK) {
        const dw_attr attr = dw_attr_string(DW_ATTR_KEY_BODY, text.text);
        *made = dw__emit_node(&e, DW_OP_FUSED, body->input_count, inputs, 1, &attr);
        status = e.status;
    }
    dw__text_free(&text);
    return status;
}

/* Fills in->part with the program that makes input `i` of the node alone, if it is a program of forward of the same
 * shape whose inputs the node reads too; part_inputs are their positions. Otherwise sets *found to false. */
static dw_status find_maker(inliner *in, const dw_graph *graph, dw_node node, uint32_t i,
                            bool *found) {
    const dw__node_record *record = &graph->nodes.items[node];
    const dw_value value = record->inputs[i];
    const dw_node from = dw_value_node(graph, value);
    bool wanted[DW_MAX_OUTPUTS] = {false};
    *found = false;
    if (from == DW_NONE) return DW_OK;
    const dw__node_record *maker = &graph->nodes.items[from];
    if (maker->op != DW_OP_FUSED || maker->backward || !spans(graph, &value, 1, record->outputs[0]))
        return DW_OK;
    DW_RETURN_IF_FAILED(parse(graph, from, &in->maker));
    wanted[graph->values.items[value].index] = true;
    dw__body_select(&in->maker, wanted, &in->part, in->part_inputs);
    for (uint16_t k = 0; k < in->part.input_count; k++) {
        const dw_value operand = maker->inputs[in->part_inputs[k]];
        in->part_inputs[k] = (uint16_t)position_of(record->inputs, record->input_count, operand);
        if (in->part_inputs[k] == record->input_count) return DW_OK;
    }
    *found = true;
    return DW_OK;
}

/* Replaces a program of backward by one that computes an input, if there is one; then the next one. */
static dw_status inline_inputs(dw__rewrite *rewrite, dw_node node, dw_value *replacements) {
    inliner *in = rewrite->context;
    dw_graph *graph = rewrite->graph;
    for (uint32_t i = 0; i < graph->nodes.items[node].input_count;) {
        const dw__node_record *record = &graph->nodes.items[node];
        if (record->op != DW_OP_FUSED || !record->backward) return DW_OK;
        dw_value inputs[DW_MAX_INPUTS];
        uint32_t count = 0;
        bool found;
        for (uint32_t k = 0; k < record->input_count; k++)
            if (k != i) inputs[count++] = record->inputs[k];
        DW_RETURN_IF_FAILED(find_maker(in, graph, node, i, &found));
        if (found) found = spans(graph, inputs, count, record->outputs[0]);
        if (found) {
            DW_RETURN_IF_FAILED(parse(graph, node, &in->reader));
            found =
                dw__body_inline(&in->reader, (uint16_t)i, &in->part, in->part_inputs, &in->made);
        }
        if (!found) {
            i++;
            continue;
        }
        DW_RETURN_IF_FAILED(append(graph, &in->made, inputs, &node));
        for (uint32_t o = 0; o < graph->nodes.items[node].output_count; o++)
            replacements[o] = dw_node_output(graph, node, o);
    }
    return DW_OK;
}

/* Replaces a program some of whose results nothing reads by one of the others. */
static dw_status drop_unread(dw__rewrite *rewrite, dw_node node, dw_value *replacements) {
    inliner *in = rewrite->context;
    dw_graph *graph = rewrite->graph;
    const dw__node_record *record = &graph->nodes.items[node];
    bool read[DW_MAX_OUTPUTS];
    uint32_t count = 0;
    if (record->op != DW_OP_FUSED) return DW_OK;
    for (uint32_t o = 0; o < record->output_count; o++) {
        read[o] = rewrite->uses.items[record->outputs[o]] > 0;
        count += read[o];
    }
    if (count == 0 || count == record->output_count) return DW_OK;
    DW_RETURN_IF_FAILED(parse(graph, node, &in->maker));
    dw__body_select(&in->maker, read, &in->part, in->part_inputs);
    dw_value inputs[DW_MAX_INPUTS];
    for (uint16_t k = 0; k < in->part.input_count; k++)
        inputs[k] = record->inputs[in->part_inputs[k]];
    if (!spans(graph, inputs, in->part.input_count, record->outputs[0])) return DW_OK;
    const uint32_t outputs = record->output_count;
    dw_node made;
    DW_RETURN_IF_FAILED(append(graph, &in->part, inputs, &made));
    for (uint32_t o = 0, at = 0; o < outputs; o++)
        if (read[o]) replacements[o] = dw_node_output(graph, made, at++);
    return DW_OK;
}

dw_status dw__inline_programs(dw_graph **graph) {
    inliner *in = dw__malloc(sizeof *in);
    if (!in) return dw__fail_memory("the bodies of programs", sizeof *in);
    dw_status status = dw__rewrite_each(graph, inline_inputs, in);
    if (status == DW_OK) status = dw__rewrite_each(graph, drop_unread, in);
    dw__free(in);
    return status;
}
