/* Writes a unit of elementwise nodes as one `fused` node. */
#include "graph/body.h"
#include "graph/pass_fuse.h"
#include <string.h>

/* How much the fused node absorbs of the broadcasts and constants among its operands. It absorbs less if the
 * operands alone would no longer span the iteration shape. */
typedef enum absorption {
    ABSORB_ALL, /* reads operands before their broadcast; constants are part of the body */
    ABSORB_CONSTANTS,
    ABSORB_NOTHING,
    ABSORPTION_COUNT
} absorption;

typedef struct writer {
    const dw__units *units;
    const dw_graph *graph;
    uint32_t unit;
    absorption absorb;
    dw__body body;
    dw_node members[DW__FUSE_MAX_MEMBERS]; /* indexed by instruction */
    dw_value inputs[DW_MAX_INPUTS];        /* values of the old graph */
    bool is_seed[DW_MAX_INPUTS];
    dw_value results[DW_MAX_OUTPUTS];
} writer;

/* ---- operands ------------------------------------------------------------------------------- */

/* Looks through broadcasts, because a fused node broadcasts its operands by itself. */
static dw_value peel(const dw_graph *graph, dw_value value) {
    bool spread = false;
    for (;;) {
        dw_node node = dw__made_by(graph, value, DW_OP_BROADCAST);
        spread = spread || node != DW_NONE;
        if (node == DW_NONE && spread) {
            node = dw__made_by(graph, value, DW_OP_RESHAPE);
            if (node != DW_NONE && !dw__prepends_ones(graph, node)) node = DW_NONE;
        }
        if (node == DW_NONE) return value;
        value = dw_node_input(graph, node, 0);
    }
}

static dw_status add_input(writer *w, dw_value value, bool seed, dw__body_operand *operand) {
    uint16_t i = 0;
    while (i < w->body.input_count && !(w->inputs[i] == value && w->is_seed[i] == seed)) i++;
    if (i == w->body.input_count) {
        if (i == DW_MAX_INPUTS)
            return dw__fail(DW_INTERNAL,
                            "a unit of fusion has over %d operands: please report "
                            "this with the graph",
                            DW_MAX_INPUTS);
        w->inputs[i] = value;
        w->is_seed[i] = seed;
        w->body.input_count++;
    }
    *operand = (dw__body_operand){.source = DW_BODY_INPUT, .index = i};
    return DW_OK;
}

/* Returns the instruction that makes `value`, or -1. */
static int instruction_of(const writer *w, dw_value value) {
    dw_node node = w->graph->values.items[value].node;
    for (int i = 0; i < w->body.code_count; i++)
        if (w->members[i] == node) return i;
    return -1;
}

static bool is_constant(const writer *w, dw_value value, double *number) {
    return w->absorb != ABSORB_NOTHING && instruction_of(w, value) < 0 &&
           dw__is_splat(w->graph, value, number);
}

/* A constant takes its dtype from a partner operand, so that partner must not be a constant. */
static bool may_be_constant(const writer *w, const dw__node_record *node, uint32_t index) {
    double number;
    if (node->op == DW_OP_SELECT)
        return index > 0 && !is_constant(w, node->inputs[3 - index], &number);
    if (node->op == DW_OP_DROPOUT || node->input_count != 2) return false;
    return !is_constant(w, node->inputs[1 - index], &number);
}

static dw_status write_operand(writer *w, const dw__node_record *node, uint32_t index,
                               dw__body_operand *operand) {
    dw_value value = node->inputs[index];
    double number;
    int instruction = instruction_of(w, value);
    if (instruction >= 0) {
        *operand = (dw__body_operand){.source = DW_BODY_RESULT, .index = (uint16_t)instruction};
        return DW_OK;
    }
    if (may_be_constant(w, node, index) && is_constant(w, value, &number)) {
        *operand = (dw__body_operand){.source = DW_BODY_CONSTANT, .constant = number};
        return DW_OK;
    }
    if (node->op == DW_OP_DROPOUT && index == 1) return add_input(w, value, true, operand);
    return add_input(w, w->absorb == ABSORB_ALL ? peel(w->graph, value) : value, false, operand);
}

/* ---- instructions --------------------------------------------------------------------------- */

static dw_status write_instruction(writer *w, dw_node n) {
    const dw__node_record *node = &w->graph->nodes.items[n];
    const dw_attr *approximate = dw_node_attr(w->graph, n, DW_ATTR_KEY_APPROXIMATE);
    dw__body_code code = {.op = node->op,
                          .tanh_approximation =
                              approximate && strcmp(approximate->string, "tanh") == 0,
                          .dtype = dw_value_dtype(w->graph, node->outputs[0]),
                          .operand_dtype = dw_value_dtype(w->graph, node->inputs[0]),
                          .operand_count = (uint8_t)node->input_count};
    for (uint32_t i = 0; i < node->input_count; i++)
        DW_RETURN_IF_FAILED(write_operand(w, node, i, &code.operands[i]));
    if (node->op == DW_OP_DROPOUT) {
        double p = dw_node_float(w->graph, n, DW_ATTR_KEY_P, 0.0);
        double stream = (double)dw_node_int(w->graph, n, DW_ATTR_KEY_STREAM, 0);
        code.operands[2] = (dw__body_operand){.source = DW_BODY_CONSTANT, .constant = p};
        code.operands[3] = (dw__body_operand){.source = DW_BODY_CONSTANT, .constant = stream};
        code.operand_count = 4;
    }
    w->members[w->body.code_count] = n;
    w->body.code[w->body.code_count++] = code;
    return DW_OK;
}

static dw_status write_instructions(writer *w, absorption absorb) {
    w->absorb = absorb;
    w->body.input_count = w->body.code_count = w->body.output_count = 0;
    for (dw_node n = w->units->first[w->unit]; n != DW_NONE; n = w->units->next[n])
        DW_RETURN_IF_FAILED(write_instruction(w, n));
    return DW_OK;
}

/* True if the operands, broadcast against each other, have the iteration shape. */
static bool spans(const writer *w) {
    dw__type want = dw__type_of(w->graph, w->graph->nodes.items[w->members[0]].outputs[0]);
    for (int axis = 0; axis < want.rank; axis++) {
        bool found = false;
        for (uint16_t i = 0; i < w->body.input_count && !found; i++) {
            if (w->is_seed[i]) continue;
            dw__type have = dw__type_of(w->graph, w->inputs[i]);
            int at = axis - (want.rank - have.rank);
            found = at >= 0 && have.shape[at] == want.shape[axis];
        }
        if (!found) return false;
    }
    for (uint16_t i = 0; i < w->body.input_count; i++)
        if (!w->is_seed[i]) return true;
    return false;
}

/* ---- results -------------------------------------------------------------------------------- */

static void write_results(writer *w) {
    for (uint16_t i = 0; i < w->body.code_count; i++) {
        dw_value value = w->graph->nodes.items[w->members[i]].outputs[0];
        if (!w->units->wanted[value]) continue;
        w->results[w->body.output_count] = value;
        w->body.outputs[w->body.output_count++] =
            (dw__body_operand){.source = DW_BODY_RESULT, .index = i};
    }
}

static dw_status append_fused(dw__rewriter *rewriter, const writer *w, const char *text) {
    const dw_graph *from = rewriter->from;
    dw_value inputs[DW_MAX_INPUTS];
    const char *names[DW_MAX_OUTPUTS];
    dw_attr body = dw_attr_string(DW_ATTR_KEY_BODY, text);
    dw_node made;
    for (uint16_t i = 0; i < w->body.input_count; i++) inputs[i] = rewriter->map[w->inputs[i]];
    for (uint16_t i = 0; i < w->body.output_count; i++) {
        const char *name = dw_value_name(from, w->results[i]);
        bool kept = !dw__is_automatic_name(name) && dw_graph_find(rewriter->to, name) == DW_NONE;
        names[i] = kept ? name : NULL;
    }
    DW_RETURN_IF_FAILED(dw__copy_origin(rewriter->to, from, w->units->last[w->unit]));
    DW_RETURN_IF_FAILED(dw__append_named(rewriter->to, DW_OP_FUSED, w->body.input_count, inputs, 1,
                                         &body, w->body.output_count, names, &made));
    for (uint16_t i = 0; i < w->body.output_count; i++)
        rewriter->map[w->results[i]] = dw_node_output(rewriter->to, made, i);
    return DW_OK;
}

dw_status dw__fuse_emit(dw__rewriter *rewriter, const dw__units *units, uint32_t unit) {
    dw_status status = DW_OK;
    dw__text text = {0};
    writer *w = dw__calloc(1, sizeof *w);
    if (!w) return dw__fail_memory("a fused body", sizeof *w);
    w->units = units;
    w->graph = rewriter->from;
    w->unit = unit;
    for (absorption absorb = ABSORB_ALL; absorb < ABSORPTION_COUNT; absorb++) {
        DW_TRY(write_instructions(w, absorb));
        if (spans(w)) break;
    }
    write_results(w);
    if (w->body.output_count == 0) goto cleanup; /* no result is needed */
    DW_TRY(dw__body_print(&w->body, &text));
    DW_TRY(append_fused(rewriter, w, text.text));
cleanup:
    dw__text_free(&text);
    dw__free(w);
    return status;
}
