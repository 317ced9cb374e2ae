/* Lowering: the sums of the rows of a program's results, by the kernel that computes the program behind a product.
 *
 * The gradient of a bias is the sum over the rows of the gradient of its layer's result. Where a program behind a
 * product makes that gradient, as behind an activation, the kernel has each element in a register, and the pass over
 * memory that a step for the sum takes is saved. The sum is then lowered with the program, in front of it.
 */
#include "engine/lowering.h"
#include <string.h>

/* The first node that sums the rows of `value` or of a reshape of it, in the program's part of the graph; DW_NONE:
 * there is none that is not lowered. */
static dw_node sum_among(const dw__lowering *l, dw_node program, dw_value value, int depth) {
    const dw_node forward = l->engine->kept_nodes;
    dw_node first = DW_NONE;
    for (uint32_t u = l->engine->use_start[value]; u < l->engine->use_start[value + 1]; u++) {
        dw_node reader = l->engine->use_nodes[u];
        const dw__node_record *record = record_of(l, reader);
        if (row_of(l, reader)->view == DW__VIEW_RESHAPE && depth < DW__LOWER_MOST_VIEWS)
            reader = sum_among(l, program, record->outputs[0], depth + 1);
        else if (!dw__lower_sums_rows(l, reader) ||
                 record->backward != record_of(l, program)->backward ||
                 (program < forward) != (reader < forward) ||
                 l->values[record->outputs[0]].storage != DW_NONE)
            continue;
        if (reader < first) first = reader;
    }
    return first;
}

/* The node that sums the rows of the program's result `o` as the result has them, or DW_NONE. */
static dw_node sum_of(const dw__lowering *l, const dw__step *program, uint32_t o) {
    const dw__tensor *y = &program->outputs[o].view;
    const dw_node node = sum_among(l, program->node, record_of(l, program->node)->outputs[o], 0);
    dw__tensor x;
    if (node == DW_NONE || y->rank < 1 ||
        dw__lower_type(l, record_of(l, node)->inputs[0], &x) != DW_OK ||
        x.shape[x.rank - 1] != y->shape[y->rank - 1] || dw__tensor_count(&x) == 0)
        return DW_NONE;
    return node;
}

dw_status dw__lower_want_sums(dw__lowering *l, dw__step *program) {
    const uint32_t own = program->output_count;
    /* In a step of GPT-2 on an H200 the launches with sums took 254 us, where those without took 217 and the sums 29: the
     * user asks for them. */
    if (!l->plan->target.context || own == 0 || dw__epilogues_wanted() != DW__EPILOGUES_ALL)
        return DW_OK;
    dw__operand *outputs = allocate(l, 2 * own * sizeof *outputs);
    if (!outputs) return dw__fail_memory("operands", 2 * own * sizeof *outputs);
    memcpy(outputs, program->outputs, own * sizeof *outputs);
    program->outputs = outputs;
    for (uint32_t o = 0; o < own && program->output_count < DW_MAX_OUTPUTS; o++) {
        const dw__tensor *y = &outputs[o].view;
        if (sum_of(l, program, o) == DW_NONE) continue;
        program->summed |= (uint64_t)1 << o;
        dw__operand *sums = &outputs[program->output_count++];
        *sums =
            (dw__operand){.storage = DW_NONE,
                          .view = {.dtype = y->dtype, .rank = 1, .shape = {y->shape[y->rank - 1]}}};
        dw__tensor_set_contiguous(&sums->view);
    }
    return DW_OK;
}

void dw__lower_forget_sums(dw__step *program) {
    for (; program->summed; program->summed &= program->summed - 1) program->output_count--;
}

dw_status dw__lower_place_sums(dw__lowering *l, dw__step *program) {
    uint32_t next = record_of(l, program->node)->output_count;
    for (uint32_t o = 0; program->summed >> o; o++) {
        if (!(program->summed >> o & 1)) continue;
        const dw_value y = record_of(l, sum_of(l, program, o))->outputs[0];
        dw__operand place;
        dw__tensor type;
        DW_RETURN_IF_FAILED(dw__lower_type(l, y, &type));
        DW_RETURN_IF_FAILED(dw__lower_place_value(l, y, &type, &place));
        program->outputs[next++].storage = place.storage;
    }
    return DW_OK;
}

dw_status dw__lower_finish_sums(dw__lowering *l, const dw__step *program) {
    uint32_t next = record_of(l, program->node)->output_count;
    for (uint32_t o = 0; program->summed >> o; o++) {
        if (!(program->summed >> o & 1)) continue;
        const dw_node node = sum_of(l, program, o);
        const dw__node_record *record = record_of(l, node);
        dw__operand sums = {.storage = program->outputs[next++].storage};
        DW_RETURN_IF_FAILED(dw__lower_type(l, record->outputs[0], &sums.view));
        DW_RETURN_IF_FAILED(dw__lower_reshapes(l, record->inputs[0]));
        dw__lower_read_once(l, record->inputs[0]);
        dw__lower_define(l, record->outputs[0], &sums);
    }
    return DW_OK;
}
