/* Lowering: the largest magnitude of a tensor, found by the kernel that makes the tensor.
 *
 * An operation that quantizes a whole tensor with one scale needs the tensor's largest magnitude before the first code,
 * which is a pass over the tensor. A kernel that makes the tensor has each element in a register. Where a node
 * quantizes its result, directly or behind reshapes, it also writes a vector of magnitudes, one for each of its blocks,
 * and the node reads that vector instead of the tensor.
 */
#include "engine/lowering.h"
#include <string.h>

static bool reads_magnitudes(const dw__lowering *l, dw_node node) {
    return dw__kernel_reads_magnitudes(record_of(l, node)->op, l->plan->target.context != NULL);
}

/* True if a node quantizes the value, or a reshape of it. */
static bool is_quantized(const dw__lowering *l, dw_value value, int depth) {
    for (uint32_t u = l->engine->use_start[value]; u < l->engine->use_start[value + 1]; u++) {
        const dw_node reader = l->engine->use_nodes[u];
        if (reads_magnitudes(l, reader)) return true;
        if (row_of(l, reader)->view == DW__VIEW_RESHAPE && depth < DW__LOWER_MOST_VIEWS &&
            is_quantized(l, record_of(l, reader)->outputs[0], depth + 1))
            return true;
    }
    return false;
}

/* The length of the vector for result `o`, or 0. */
static int64_t parts_of(const dw__lowering *l, const dw__step *step, const dw__call *call,
                        uint32_t o) {
    if (step->outputs[o].storage == DW_NONE ||
        !is_quantized(l, record_of(l, step->node)->outputs[o], 0))
        return 0;
    return step->kernel->magnitude_parts(call, o);
}

bool dw__lower_may_find_magnitudes(const dw__lowering *l, const dw__step *step) {
    const dw__node_record *record = record_of(l, step->node);
    bool any = false;
    for (uint32_t o = 0; o < record->output_count && !any; o++)
        any = is_quantized(l, record->outputs[o], 0);
    return any && step->kernel && step->kernel->magnitude_parts;
}

dw_status dw__lower_find_magnitudes(dw__lowering *l, dw__step *step) {
    const dw__node_record *record = record_of(l, step->node);
    int64_t parts[DW_MAX_OUTPUTS];
    uint32_t found = 0;
    if (!step->kernel || !step->kernel->magnitude_parts ||
        step->output_count != record->output_count)
        return DW_OK;
    dw__lower_call(l, step, NULL);
    for (uint32_t o = 0; o < record->output_count; o++) {
        parts[o] = record->output_count + found < DW_MAX_OUTPUTS
                       ? parts_of(l, step, &l->first.call, o)
                       : 0;
        found += parts[o] > 0;
    }
    if (found == 0) return DW_OK;
    dw__operand *outputs = allocate(l, (record->output_count + found) * sizeof *outputs);
    if (!outputs) return dw__fail_memory("operands", found * sizeof *outputs);
    memcpy(outputs, step->outputs, record->output_count * sizeof *outputs);
    step->outputs = outputs;
    for (uint32_t o = 0; o < record->output_count; o++) {
        if (parts[o] <= 0) continue;
        dw__operand *vector = &outputs[step->output_count++];
        *vector = (dw__operand){.view = {.dtype = DW_F32, .rank = 1, .shape = {parts[o]}}};
        dw__tensor_set_contiguous(&vector->view);
        DW_RETURN_IF_FAILED(dw__lower_add_storage(
            l, DW_HOME_ARENA, 0, dw__tensor_bytes(&vector->view), &vector->storage));
        step->magnitudes |= (uint64_t)1 << o;
        l->magnitudes[record->outputs[o]] = *vector;
    }
    return DW_OK;
}

dw_status dw__lower_use_magnitudes(dw__lowering *l, dw__step *step) {
    if (!reads_magnitudes(l, step->node)) return DW_OK;
    const dw_value source = dw__lower_source(l, record_of(l, step->node)->inputs[0]);
    if (l->magnitudes[source].storage == DW_NONE) return DW_OK;
    dw__operand *inputs = allocate(l, (step->input_count + 1) * sizeof *inputs);
    if (!inputs) return dw__fail_memory("operands", (step->input_count + 1) * sizeof *inputs);
    memcpy(inputs, step->inputs, step->input_count * sizeof *inputs);
    inputs[step->input_count++] = l->magnitudes[source];
    step->inputs = inputs;
    return DW_OK;
}
