/* Lowering: a node becomes a step, a step with its kernel an instruction. */
#include "engine/lowering.h"
#include <string.h>

void dw__step_shape(const dw__step *step, dw__call *call) {
    call->op = step->op;
    call->attr_count = step->attr_count;
    call->attrs = step->attrs;
    call->input_count = step->input_count;
    call->output_count = step->output_count;
    call->prepared = step->prepared;
    call->epilogue = NULL;
    call->accumulates = step->accumulates;
    call->disposable = step->disposable;
    call->addend = step->addend.view;
    call->addend.data = NULL;
    call->sums = step->sums;
    call->magnitudes = step->magnitudes;
    call->summed = step->summed;
    call->paired = step->paired;
    call->codes = step->codes;
    call->tf32 = step->tf32;
    for (uint32_t i = 0; i < step->input_count; i++) {
        call->inputs[i] = step->inputs[i].view;
        call->inputs[i].data = NULL;
    }
    for (uint32_t o = 0; o < step->output_count; o++) {
        call->outputs[o] = step->outputs[o].view;
        call->outputs[o].data = NULL;
    }
}

void dw__step_attach(const dw__step *epilogue, const dw__call *made, dw__call *call) {
    call->epilogue = made;
    call->replaced = epilogue->replaced;
    call->replaced_half = epilogue->replaced_half;
}

dw_status dw__lower_make_step(dw__lowering *l, dw_node node, dw__step *step) {
    const dw__node_record *record = record_of(l, node);
    memset(step, 0, sizeof *step);
    step->node = node;
    step->replaced = step->replaced_half = -1;
    step->op = record->op;
    step->tf32 = l->plan->target.tf32;
    step->attr_count = record->attr_count;
    step->input_count = record->input_count;
    step->output_count = record->output_count;
    DW_RETURN_IF_FAILED(dw__lower_attrs(l, node, &step->attrs));
    size_t bytes = ((size_t)record->input_count + record->output_count) * sizeof(dw__operand);
    step->inputs = allocate(l, bytes);
    if (!step->inputs) return dw__fail_memory("operands", bytes);
    step->outputs = step->inputs + record->input_count;
    for (uint32_t i = 0; i < record->input_count; i++) {
        dw_value value = record->inputs[i];
        if (value == DW_NONE) {
            step->inputs[i].storage = DW_NONE;
            step->inputs[i].view.rank = -1;
        } else {
            step->inputs[i] = l->values[value];
        }
    }
    for (uint32_t o = 0; o < record->output_count; o++) {
        step->outputs[o].storage = DW_NONE;
        DW_RETURN_IF_FAILED(dw__lower_type(l, record->outputs[o], &step->outputs[o].view));
    }
    return DW_OK;
}

dw_status dw__lower_place_outputs(dw__lowering *l, dw__step *step) {
    const dw__node_record *record = record_of(l, step->node);
    for (uint32_t o = 0; o < record->output_count; o++) {
        dw_value value = record->outputs[o];
        if (use_count(l, value) + l->engine->output_uses[value] == 0) continue;
        if (step->outputs[o].storage != DW_NONE || step->outputs[o].view.rank < 0) continue;
        dw__tensor type = step->outputs[o].view;
        DW_RETURN_IF_FAILED(dw__lower_place_value(l, value, &type, &step->outputs[o]));
    }
    return DW_OK;
}

void dw__lower_finish(dw__lowering *l, const dw__step *step) {
    const dw__node_record *record = record_of(l, step->node);
    for (uint32_t i = 0; i < record->input_count; i++) dw__lower_read_once(l, record->inputs[i]);
    for (uint32_t o = 0; o < record->output_count; o++) {
        dw__lower_define(l, record->outputs[o], &step->outputs[o]);
    }
}

dw_status dw__lower_add_instruction(dw__lowering *l, const dw__step *step,
                                    const dw__step *epilogue) {
    const dw__kernel *kernel = step->kernel;
    dw__instruction fresh = {.step = *step, .scratch = DW_NONE};
    size_t bytes = 0;
    dw__lower_call(l, step, epilogue);
    if (kernel->library_bytes) fresh.library = kernel->library_bytes(&l->first.call);
    if (kernel->workspace_bytes)
        DW_RETURN_IF_FAILED(
            kernel->workspace_bytes(kernel, &l->first, l->plan->target.context, &bytes));
    if (bytes)
        DW_RETURN_IF_FAILED(dw__lower_add_storage(l, DW_HOME_ARENA, 0, bytes, &fresh.scratch));
    if (epilogue) {
        fresh.epilogue = allocate(l, sizeof *epilogue);
        if (!fresh.epilogue) return dw__fail_memory("an epilogue", sizeof *epilogue);
        *fresh.epilogue = *epilogue;
    }
    return DW_PUSH(&l->plan->code, fresh);
}

dw_status dw__lower_add_step(dw__lowering *l, dw__step *step) {
    bool empty = true;
    for (uint32_t o = 0; o < step->output_count; o++) {
        empty &= dw__tensor_count(&step->outputs[o].view) == 0;
    }
    if (empty) return DW_OK; /* no element to compute */
    DW_RETURN_IF_FAILED(dw__lower_prepare(l, step));
    return dw__lower_add_instruction(l, step, NULL);
}
