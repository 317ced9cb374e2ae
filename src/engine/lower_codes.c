/* Lowering: an elementwise program and the nodes that turn its results into codes, as one instruction.
 *
 * Where a node quantizes a result of a program by fp8-block, directly or behind reshapes, and a kernel computes both
 * (dw__call.codes), the program's instruction writes the codes and scales of that node, too. The result itself is stored
 * only if something else reads it: activations are mostly read by linear layers alone, whose GEMMs read codes. The node
 * then has no instruction.
 */
#include "deepwell/scheme.h"
#include "engine/lowering.h"
#include <string.h>

/* True if the node makes tiles of codes of fp8-block, of both orientations, in blocks of 1 x 128. */
static bool makes_codes(const dw__lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    const dw_attr *scheme = dw__find_attr(record->attr_count, record->attrs, DW_ATTR_KEY_SCHEME);
    return row_of(l, node)->tile_codes && record->attr_count == 1 &&
           record->output_count == DW__CODE_OUTPUTS && scheme &&
           strcmp(scheme->string, dw_scheme_name(DW_SCHEME_FP8_BLOCK)) == 0;
}

/* Finds the node of the program's region that makes codes of the value or a reshape of it, or leaves DW_NONE. Sets
 * `others` if something else reads the value. */
static void find_coder(const dw__lowering *l, dw_value value, bool backward, int depth,
                       dw_node *coder, bool *others) {
    if (l->engine->output_uses[value] > 0) *others = true;
    for (uint32_t u = l->engine->use_start[value]; u < l->engine->use_start[value + 1]; u++) {
        const dw_node reader = l->engine->use_nodes[u];
        if (row_of(l, reader)->view == DW__VIEW_RESHAPE && depth < DW__LOWER_MOST_VIEWS)
            find_coder(l, record_of(l, reader)->outputs[0], backward, depth + 1, coder, others);
        else if (*coder == DW_NONE && makes_codes(l, reader) &&
                 record_of(l, reader)->backward == backward)
            *coder = reader;
        else
            *others = true;
    }
}

/* Adds the results of the nodes that make codes, without memory. */
static dw_status add_codes(dw__lowering *l, dw__step *program, const dw_node *coders) {
    const uint32_t own = program->output_count;
    uint32_t count = own;
    for (uint32_t o = 0; o < own; o++) count += coders[o] == DW_NONE ? 0 : DW__CODE_OUTPUTS;
    dw__operand *outputs = allocate(l, count * sizeof *outputs);
    if (!outputs) return dw__fail_memory("operands", count * sizeof *outputs);
    memcpy(outputs, program->outputs, own * sizeof *outputs);
    program->outputs = outputs;
    for (uint32_t o = 0; o < own; o++) {
        if (coders[o] == DW_NONE) continue;
        program->codes |= (uint64_t)1 << o;
        for (uint32_t i = 0; i < DW__CODE_OUTPUTS; i++) {
            dw__operand *result = &outputs[program->output_count++];
            *result = (dw__operand){.storage = DW_NONE};
            DW_RETURN_IF_FAILED(
                dw__lower_type(l, record_of(l, coders[o])->outputs[i], &result->view));
        }
    }
    return DW_OK;
}

/* Places the codes of a node that something reads. */
static dw_status place_codes(dw__lowering *l, dw_node coder, dw__operand *results) {
    const dw__node_record *record = record_of(l, coder);
    for (uint32_t i = 0; i < DW__CODE_OUTPUTS; i++) {
        const dw_value value = record->outputs[i];
        const dw__tensor type = results[i].view;
        if (use_count(l, value) + l->engine->output_uses[value] > 0)
            DW_RETURN_IF_FAILED(dw__lower_place_value(l, value, &type, &results[i]));
    }
    return DW_OK;
}

/* The value, which nothing reads but the node that makes codes of it, and its reshapes have no memory. */
static void leave_out(dw__lowering *l, dw_value value) {
    l->values[value].view.rank = -1;
    for (uint32_t u = l->engine->use_start[value]; u < l->engine->use_start[value + 1]; u++) {
        const dw_node reader = l->engine->use_nodes[u];
        if (row_of(l, reader)->view == DW__VIEW_RESHAPE)
            leave_out(l, record_of(l, reader)->outputs[0]);
    }
}

/* Defines the results of a node that makes codes. Those that nothing reads are left out. */
static void define_codes(dw__lowering *l, dw_node coder, const dw__operand *results) {
    for (uint32_t i = 0; i < DW__CODE_OUTPUTS; i++) {
        dw__operand place = results[i];
        if (place.storage == DW_NONE) place.view.rank = -1;
        dw__lower_define(l, record_of(l, coder)->outputs[i], &place);
    }
}

/* The node reads its operand no more, which is a result of the program behind reshapes. */
static dw_status count_read(dw__lowering *l, dw_node coder) {
    dw_node views[DW__LOWER_MOST_VIEWS + 1];
    int count = 0;
    dw_value value = record_of(l, coder)->inputs[0];
    while (l->values[value].storage == DW_NONE) {
        views[count] = value_of(l, value)->node;
        value = record_of(l, views[count++])->inputs[0];
    }
    while (count > 0) DW_RETURN_IF_FAILED(dw__lower_view(l, views[--count]));
    dw__lower_read_once(l, record_of(l, coder)->inputs[0]);
    return DW_OK;
}

dw_status dw__lower_program_codes(dw__lowering *l, dw_node node, bool *done) {
    const dw__node_record *record = record_of(l, node);
    dw_node coders[DW_MAX_OUTPUTS];
    bool stored[DW_MAX_OUTPUTS], any = false;
    dw__step program;
    *done = false;
    if (node < l->engine->kept_nodes ||
        !dw__kernel_makes_codes(record->op, l->plan->target.context != NULL))
        return DW_OK;
    for (uint32_t o = 0; o < record->output_count; o++) {
        coders[o] = DW_NONE;
        stored[o] = false;
        find_coder(l, record->outputs[o], record->backward, 0, &coders[o], &stored[o]);
        any |= coders[o] != DW_NONE;
    }
    if (!any) return DW_OK;
    for (uint32_t o = 0; o < record->output_count; o++) {
        if (!stored[o]) continue;
        DW_RETURN_IF_FAILED(dw__lower_request_by_concats(l, record->outputs[o]));
        if (l->requests[record->outputs[o]].storage != DW_NONE)
            return DW_OK; /* where it might lie over an operand, which the kernel reads twice */
    }
    DW_RETURN_IF_FAILED(dw__lower_make_step(l, node, &program));
    DW_RETURN_IF_FAILED(add_codes(l, &program, coders));
    dw__lower_select(l, &program, NULL);
    if (!program.kernel) return DW_OK;
    const dw_status status = dw__lower_prepare(l, &program);
    if (status == DW_UNSUPPORTED) return DW_OK;
    DW_RETURN_IF_FAILED(status);
    dw__operand *results = program.outputs + record->output_count;
    for (uint32_t o = 0; o < record->output_count; o++) {
        const dw__tensor type = program.outputs[o].view;
        if (stored[o])
            DW_RETURN_IF_FAILED(
                dw__lower_place_value(l, record->outputs[o], &type, &program.outputs[o]));
        if (coders[o] == DW_NONE) continue;
        DW_RETURN_IF_FAILED(place_codes(l, coders[o], results));
        results += DW__CODE_OUTPUTS;
    }
    DW_RETURN_IF_FAILED(dw__lower_add_instruction(l, &program, NULL));
    dw__lower_finish(l, &program);
    results = program.outputs + record->output_count;
    for (uint32_t o = 0; o < record->output_count; o++) {
        if (coders[o] == DW_NONE) continue;
        if (stored[o])
            DW_RETURN_IF_FAILED(count_read(l, coders[o]));
        else
            leave_out(l, record->outputs[o]);
        define_codes(l, coders[o], results);
        results += DW__CODE_OUTPUTS;
    }
    *done = true;
    return DW_OK;
}
