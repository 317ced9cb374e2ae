/* A plan as text: one line for each instruction. */
#include "engine/engine_internal.h"
#include <stdio.h>

void dw__node_label(const dw_graph *graph, dw_node node, char *buffer, size_t bytes) {
    if (node == DW_NONE) {
        snprintf(buffer, bytes, "copy of a leaf");
        return;
    }
    const dw__node_record *record = &graph->nodes.items[node];
    const char *module = record->module ? record->module : "";
    snprintf(buffer, bytes, "%s %s%s%s%s", dw_op_name(record->op),
             dw_value_name(graph, record->outputs[0]), *module ? " (" : "", module,
             *module ? ")" : "");
}

static dw_status list_operand(const dw_plan *plan, const dw__operand *operand, dw__text *out) {
    static const char *const home_names[] = {"arena", "leaf", "output", "grad"};
    DW_RETURN_IF_FAILED(dw__text_printf(out, " %s[", dw_dtype_name(operand->view.dtype)));
    for (int axis = 0; axis < operand->view.rank; axis++) {
        DW_RETURN_IF_FAILED(
            dw__text_printf(out, axis ? ",%lld" : "%lld", (long long)operand->view.shape[axis]));
    }
    if (operand->storage == DW_NONE) return dw__text_printf(out, "]@none");
    const dw__storage *storage = &plan->storages.items[operand->storage];
    size_t where = storage->home == DW_HOME_ARENA ? storage->offset : storage->index;
    DW_RETURN_IF_FAILED(
        dw__text_printf(out, "]@%s:%zu%s", home_names[storage->home], where,
                        storage->home == DW_HOME_ARENA && storage->saved ? "s" : ""));
    if (operand->offset) {
        DW_RETURN_IF_FAILED(dw__text_printf(out, "+%lld", (long long)operand->offset));
    }
    if (dw__tensor_is_contiguous(&operand->view)) return DW_OK;
    return dw__text_printf(out, "~"); /* strided */
}

static dw_status list_step(const dw_plan *plan, const dw__step *step, dw__text *out) {
    DW_RETURN_IF_FAILED(dw__text_printf(out, " %s", step->kernel->name));
    for (uint32_t i = 0; i < step->input_count; i++) {
        if (step->inputs[i].view.rank < 0) continue;
        DW_RETURN_IF_FAILED(list_operand(plan, &step->inputs[i], out));
    }
    if (step->accumulates == DW__ADDS_TO_ADDEND) {
        DW_RETURN_IF_FAILED(dw__text_printf(out, " +"));
        DW_RETURN_IF_FAILED(list_operand(plan, &step->addend, out));
    }
    DW_RETURN_IF_FAILED(
        dw__text_printf(out, step->accumulates == DW__ADDS_TO_OUTPUT ? " +->" : " ->"));
    for (uint32_t o = 0; o < step->output_count; o++) {
        DW_RETURN_IF_FAILED(list_operand(plan, &step->outputs[o], out));
    }
    return DW_OK;
}

static dw_status list_instruction(const dw_plan *plan, uint32_t index, uint64_t runs,
                                  dw__text *out) {
    const dw__instruction *instruction = &plan->code.items[index];
    char label[160];
    dw__node_label(plan->engine->graph, instruction->step.node, label, sizeof label);
    DW_RETURN_IF_FAILED(
        dw__text_printf(out, "%4u %c", index, index < plan->first_backward ? 'F' : 'B'));
    if (plan->engine->profile_clock && runs) {
        double seconds = 1e-9 * (double)atomic_load(&instruction->nanoseconds);
        DW_RETURN_IF_FAILED(dw__text_printf(out, " %9.3f ms", 1e3 * seconds / (double)runs));
    }
    DW_RETURN_IF_FAILED(dw__text_printf(out, " %s:", label));
    const dw__step *step = &instruction->step, *epilogue = instruction->epilogue;
    DW_RETURN_IF_FAILED(list_step(plan, step, out));
    if (epilogue) {
        DW_RETURN_IF_FAILED(dw__text_printf(out, " | epilogue"));
        DW_RETURN_IF_FAILED(list_step(plan, epilogue, out));
    }
    if (instruction->scratch != DW_NONE) {
        const dw__storage *scratch = &plan->storages.items[instruction->scratch];
        DW_RETURN_IF_FAILED(
            dw__text_printf(out, " scratch %zu@%zu", scratch->bytes, scratch->offset));
    }
    return dw__text_printf(out, "\n");
}

dw_status dw_plan_describe(const dw_plan *plan, char **text) {
    dw_status status = DW_OK;
    dw__text out = {0};
    const dw_graph *graph = plan->engine->graph;
    DW_TRY(dw__text_printf(&out, "plan"));
    for (uint32_t i = 0; i < dw_graph_symbol_count(graph); i++) {
        DW_TRY(dw__text_printf(&out, " %s=%lld", dw_graph_symbol_name(graph, i),
                               (long long)plan->sizes[i]));
    }
    DW_TRY(dw__text_printf(&out,
                           ": %zu instructions, %u of them forward; arena %zu bytes, "
                           "of which saved %zu; lower bound %zu",
                           plan->code.count, plan->first_backward, plan->arena_bytes,
                           plan->saved_bytes, plan->bound_bytes));
    for (uint32_t s = 0; s < plan->segment_count && plan->segment_count > 1; s++) {
        const dw_segment *segment = &plan->segments[s];
        DW_TRY(dw__text_printf(&out, "%s %zu bytes ", s ? "," : "; segments:", segment->bytes));
        if (segment->first_part)
            DW_TRY(dw__text_printf(&out, "from part %u ", segment->first_part));
        DW_TRY(dw__text_printf(&out, "to part %u", segment->part));
    }
    DW_TRY(dw__text_printf(&out, "%s", "\n"));
    uint64_t runs = atomic_load(&plan->runs);
    for (uint32_t i = 0; i < plan->code.count; i++) DW_TRY(list_instruction(plan, i, runs, &out));
    *text = out.text;
    out.text = NULL;
cleanup:
    dw__text_free(&out);
    return status;
}
