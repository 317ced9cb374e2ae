/* Lowering: a node becomes a step, a step with its kernel an instruction.
 *
 * What a kernel prepares (a parsed body, say) depends on attributes and element types alone. It belongs to the
 * engine and is shared by all layers and plans that agree in those.
 */
#include "engine/lowering.h"
#include <string.h>

void dw__step_shape(const dw__step *step, dw__call *call) {
    call->op = step->op;
    call->attr_count = step->attr_count;
    call->attrs = step->attrs;
    call->input_count = step->input_count;
    call->output_count = step->output_count;
    call->prepared = step->prepared;
    for (uint32_t i = 0; i < step->input_count; i++) {
        call->inputs[i] = step->inputs[i].view;
        call->inputs[i].data = NULL;
    }
    for (uint32_t o = 0; o < step->output_count; o++) {
        call->outputs[o] = step->outputs[o].view;
        call->outputs[o].data = NULL;
    }
}

dw_status dw__lower_make_step(dw__lowering *l, dw_node node, dw__step *step) {
    const dw__node_record *record = record_of(l, node);
    memset(step, 0, sizeof *step);
    step->node = node;
    step->op = record->op;
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
        if (step->outputs[o].storage != DW_NONE) continue;
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

/* Steps with the same key share what their kernel prepares: kernel, element types and attributes. */
static dw_status prepared_key(const dw__step *step, dw__text *key) {
    DW_RETURN_IF_FAILED(dw__text_printf(key, "%s %d:", step->kernel->name, (int)step->op));
    for (uint32_t i = 0; i < step->input_count; i++) {
        DW_RETURN_IF_FAILED(dw__text_printf(key, " %d", (int)step->inputs[i].view.dtype));
    }
    DW_RETURN_IF_FAILED(dw__text_printf(key, " ->"));
    for (uint32_t o = 0; o < step->output_count; o++) {
        DW_RETURN_IF_FAILED(dw__text_printf(key, " %d", (int)step->outputs[o].view.dtype));
    }
    for (uint32_t a = 0; a < step->attr_count; a++) {
        const dw_attr *attr = &step->attrs[a];
        DW_RETURN_IF_FAILED(dw__text_printf(key, " %d=%lld %.17g \"%s\"", (int)attr->key,
                                            (long long)attr->integer, attr->number,
                                            attr->string ? attr->string : ""));
        for (uint32_t i = 0; i < attr->count; i++) {
            DW_RETURN_IF_FAILED(dw__text_printf(key, ",%lld", (long long)attr->list[i]));
        }
    }
    return DW_OK;
}

static dw_status prepare_new(dw__lowering *l, const dw__step *step, const char *key,
                             uint32_t *index) {
    dw_engine *engine = l->plan->engine;
    void *prepared = NULL;
    dw__step_shape(step, &l->first.call);
    DW_RETURN_IF_FAILED(step->kernel->prepare(&l->first.call, &prepared));
    *index = (uint32_t)engine->prepared.count;
    dw_status status = DW_PUSH(&engine->prepared, prepared);
    if (status != DW_OK) {
        dw__free(prepared);
        return status;
    }
    return dw__map_set(engine->prepared_index, key, *index);
}

/* The variant that the kernel's launches use; compiled, loaded and checked if it is the first of its kind. */
static dw_status prepare_variant(dw__lowering *l, dw__step *step) {
    dw__lower_call(l, step, &l->first.call);
    DW_RETURN_IF_FAILED(step->gpu_kernel->prepare(step->gpu_kernel, &l->first,
                                                  l->plan->target.context, &step->variant));
    return dw__variant_status(step->variant);
}

dw_status dw__lower_prepare(dw__lowering *l, dw__step *step) {
    if (step->gpu_kernel) return prepare_variant(l, step);
    if (!step->kernel->prepare) return DW_OK;
    dw_status status = DW_OK;
    dw__text key = {0};
    uint32_t index = 0;
    DW_TRY(prepared_key(step, &key));
    if (!dw__map_get(l->engine->prepared_index, key.text, &index)) {
        DW_TRY(prepare_new(l, step, key.text, &index));
    }
    step->prepared = l->engine->prepared.items[index];
cleanup:
    dw__text_free(&key);
    return status;
}

dw_status dw__lower_add_instruction(dw__lowering *l, const dw__step *step, const dw__step *epilogue,
                                    int replaced, size_t workspace_bytes, size_t library) {
    dw__instruction fresh = {
        .step = *step, .replaced = replaced, .scratch = DW_NONE, .library = library};
    if (epilogue) fresh.with_epilogue = dw__kernel_with_epilogue(step->op);
    if (workspace_bytes) {
        DW_RETURN_IF_FAILED(
            dw__lower_add_storage(l, DW_HOME_ARENA, 0, workspace_bytes, &fresh.scratch));
    }
    if (epilogue) {
        fresh.epilogue = allocate(l, sizeof *epilogue);
        if (!fresh.epilogue) return dw__fail_memory("an epilogue", sizeof *epilogue);
        *fresh.epilogue = *epilogue;
    }
    return DW_PUSH(&l->plan->code, fresh);
}

static dw_status add_gpu_step(dw__lowering *l, const dw__step *step) {
    const dw__gpu_kernel *kernel = step->gpu_kernel;
    size_t workspace = 0;
    dw__lower_call(l, step, &l->first.call);
    if (kernel->workspace_bytes)
        DW_RETURN_IF_FAILED(
            kernel->workspace_bytes(kernel, &l->first, l->plan->target.context, &workspace));
    return dw__lower_add_instruction(l, step, NULL, -1, workspace, 0);
}

dw_status dw__lower_add_step(dw__lowering *l, dw__step *step) {
    bool empty = true;
    for (uint32_t o = 0; o < step->output_count; o++) {
        empty &= dw__tensor_count(&step->outputs[o].view) == 0;
    }
    if (empty) return DW_OK; /* no element to compute */
    if (!step->kernel && !step->gpu_kernel) {
        dw__lower_call(l, step, &l->first.call);
        DW_RETURN_IF_FAILED(dw__gpu_kernel_for(&l->first, &l->plan->target.gpu, &step->gpu_kernel));
    }
    DW_RETURN_IF_FAILED(dw__lower_prepare(l, step));
    if (step->gpu_kernel) return add_gpu_step(l, step);
    dw__step_shape(step, &l->first.call);
    size_t scratch =
        step->kernel->workspace_bytes ? step->kernel->workspace_bytes(&l->first.call) : 0;
    size_t library = step->kernel->library_bytes ? step->kernel->library_bytes(&l->first.call) : 0;
    return dw__lower_add_instruction(l, step, NULL, -1, scratch, library);
}
