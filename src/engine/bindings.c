/* Addresses of storages in one run, from what the caller has bound. */
#include "engine/executor.h"

void *dw__storage_address(const dw_plan *plan, const dw__bindings *b, uint32_t index) {
    const dw__storage *storage = &plan->storages.items[index];
    switch (storage->home) {
    case DW_HOME_ARENA:
    case DW_HOME_KEPT:
        return (char *)b->segments[storage->segment] +
               (storage->offset - plan->segments[storage->segment].offset);
    case DW_HOME_OUTPUT: return b->outputs[storage->index].data;
    case DW_HOME_GRAD: return b->grads[storage->index].data;
    case DW_HOME_LEAF: break;
    }
    uint32_t given = plan->engine->leaf_count;
    if (storage->index < given) return b->leaves[storage->index].data;
    void *grad = b->output_grads[storage->index - given].data;
    return grad ? grad : b->zeros;
}

static void *address(const dw_plan *plan, const dw__bindings *b, const dw__operand *operand) {
    if (operand->storage == DW_NONE) return NULL;
    char *base = dw__storage_address(plan, b, operand->storage);
    return base ? base + operand->offset * dw_dtype_bits(operand->view.dtype) / 8 : NULL;
}

void dw__bind_step(const dw_plan *plan, const dw__bindings *b, const dw__step *step,
                   dw__call *call) {
    dw__step_shape(step, call);
    for (uint32_t i = 0; i < step->input_count; i++)
        call->inputs[i].data = address(plan, b, &step->inputs[i]);
    for (uint32_t o = 0; o < step->output_count; o++)
        call->outputs[o].data = address(plan, b, &step->outputs[o]);
    if (step->accumulates == DW__ADDS_TO_ADDEND)
        call->addend.data = address(plan, b, &step->addend);
}

bool dw__wants_result(const dw__call *call) {
    for (uint32_t o = 0; o < call->output_count; o++)
        if (call->outputs[o].data) return true;
    return false;
}
