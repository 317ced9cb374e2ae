/* Lowering: copies, and operands that are copied so that a faster kernel supports the step.
 *
 * Kernels are selected with the operands as they lie. If only the reference supports them, or on a GPU none, operands
 * are copied to be contiguous and aligned, provided that this finds another kernel.
 */
#include "engine/lowering.h"

/* Codes have no views, so that they lie in one piece. A copy moves their bytes: elements may share one. */
static void view_bytes(dw__operand *operand) {
    const int64_t bytes = (int64_t)dw__tensor_bytes(&operand->view);
    if (!dw__dtype_is_code(operand->view.dtype)) return;
    operand->view = (dw__tensor){.dtype = DW_BOOL, .rank = 1, .shape = {bytes}, .stride = {1}};
}

dw_status dw__lower_add_copy(dw__lowering *l, dw_node node, const dw__operand *from,
                             const dw__operand *to) {
    dw__step step = {.node = node, .attr_count = 1};
    step.input_count = step.output_count = 1;
    dw_attr *attr = allocate(l, sizeof *attr);
    step.inputs = allocate(l, 2 * sizeof *step.inputs);
    if (!attr || !step.inputs) return dw__fail_memory("a copy", sizeof *attr);
    step.outputs = step.inputs + 1;
    step.attrs = attr;
    step.inputs[0] = *from;
    step.outputs[0] = *to;
    view_bytes(&step.inputs[0]);
    view_bytes(&step.outputs[0]);
    step.op = dw__kernel_copy_op(step.inputs[0].view.rank, attr);
    dw__lower_select(l, &step, NULL);
    return dw__lower_add_step(l, &step);
}

static dw_status copy_to_arena(dw__lowering *l, dw_node node, const dw__operand *from,
                               dw__operand *to) {
    *to = *from;
    to->offset = 0;
    dw__tensor_set_contiguous(&to->view);
    DW_RETURN_IF_FAILED(
        dw__lower_add_storage(l, DW_HOME_ARENA, 0, dw__tensor_bytes(&to->view), &to->storage));
    return dw__lower_add_copy(l, node, from, to);
}

/* On a GPU, data is the operand's alignment (dw__lower_call); elsewhere it is NULL. */
static bool is_in_place(const dw__tensor *operand) {
    return (uintptr_t)operand->data % DW__GPU_ALIGNMENT == 0 && dw__tensor_is_contiguous(operand);
}

static void put_in_arena(dw__tensor *operand) {
    if (operand->data) operand->data = (char *)0 + DW__GPU_ALIGNMENT;
    dw__tensor_set_contiguous(operand);
}

/* Returns the operands to copy so that a kernel other than the reference supports the step, as a bit mask by input: one
 * operand if that is enough, else all that a copy would change, and 0 if that does not help either. */
static uint64_t operands_to_copy(dw__lowering *l, dw__step *step) {
    dw__tensor *inputs = l->first.call.inputs;
    uint64_t changed = 0;
    dw__lower_call(l, step, NULL);
    for (uint32_t i = 0; i < step->input_count; i++) {
        if (inputs[i].rank >= 0 && !is_in_place(&inputs[i])) changed |= (uint64_t)1 << i;
    }
    if (!changed) return 0;
    for (uint32_t i = 0; i < step->input_count; i++) {
        if (!(changed >> i & 1)) continue;
        dw__tensor as_it_is = inputs[i];
        put_in_arena(&inputs[i]);
        if (dw__lower_has_kernel(l)) return (uint64_t)1 << i;
        inputs[i] = as_it_is;
    }
    for (uint32_t i = 0; i < step->input_count; i++) {
        if (changed >> i & 1) put_in_arena(&inputs[i]);
    }
    return dw__lower_has_kernel(l) ? changed : 0;
}

dw_status dw__lower_choose_kernel(dw__lowering *l, dw__step *step) {
    dw__lower_select(l, step, NULL);
    if (dw__step_is_fast(step)) return DW_OK;
    uint64_t copies = operands_to_copy(l, step);
    if (!copies) return DW_OK; /* on a GPU, dw__lower_prepare says what is not supported */
    for (uint32_t i = 0; i < step->input_count; i++) {
        if (!(copies >> i & 1)) continue;
        dw__operand from = step->inputs[i];
        DW_RETURN_IF_FAILED(copy_to_arena(l, step->node, &from, &step->inputs[i]));
    }
    dw__lower_select(l, step, NULL);
    return DW_OK;
}
