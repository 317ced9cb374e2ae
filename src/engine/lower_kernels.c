/* Lowering: which kernels the target has for a step.
 *
 * On a CPU there is always one, the reference if no other. On a GPU there may be none. The plan then fails with a
 * message that names the node, its operation and the GPU.
 */
#include "engine/lowering.h"

static bool on_gpu(const dw__lowering *l) { return l->plan->target.context != NULL; }

/* On a GPU the caller's tensors and every storage are aligned; where in a storage an operand lies is known. */
static void *aligned_address(const dw__operand *operand) {
    const int64_t bytes = operand->offset * (int64_t)dw_dtype_bytes(operand->view.dtype);
    return operand->storage == DW_NONE ? NULL : (char *)0 + DW__GPU_ALIGNMENT + bytes;
}

void dw__lower_call(const dw__lowering *l, const dw__step *step, dw__call *call) {
    dw__step_shape(step, call);
    if (!on_gpu(l)) return;
    for (uint32_t i = 0; i < step->input_count; i++)
        call->inputs[i].data = aligned_address(&step->inputs[i]);
    for (uint32_t o = 0; o < step->output_count; o++)
        call->outputs[o].data = aligned_address(&step->outputs[o]);
}

void dw__lower_select(dw__lowering *l, dw__step *step) {
    dw__lower_call(l, step, &l->first.call);
    step->kernel = NULL;
    step->gpu_kernel = NULL;
    if (!on_gpu(l))
        step->kernel = dw__kernel_select(&l->first.call);
    else if (dw__gpu_kernel_for(&l->first, &l->plan->target.gpu, &step->gpu_kernel) != DW_OK)
        step->gpu_kernel = NULL;
}

bool dw__lower_has_kernel(const dw__lowering *l) {
    const dw__gpu_kernel *kernel;
    if (on_gpu(l)) return dw__gpu_kernel_for(&l->first, &l->plan->target.gpu, &kernel) == DW_OK;
    return !dw__kernel_is_reference(dw__kernel_select(&l->first.call));
}

bool dw__step_is_fast(const dw__step *step) {
    return step->gpu_kernel || (step->kernel && !dw__kernel_is_reference(step->kernel));
}

const char *dw__step_kernel_name(const dw__step *step) {
    return step->gpu_kernel ? step->gpu_kernel->name : step->kernel->name;
}

const dw__epilogue_kernel *dw__lower_with_epilogue(const dw__lowering *l, dw_op op) {
    return on_gpu(l) ? NULL : dw__kernel_with_epilogue(op);
}

const dw__kernel *dw__lower_accumulating(const dw__lowering *l, dw_op op) {
    return on_gpu(l) ? NULL : dw__kernel_accumulating(op);
}

bool dw__lower_lays_out(const dw__lowering *l, dw_op op) {
    if (!on_gpu(l)) return dw__kernel_lays_out_results(op);
    return op == DW_OP_ATTENTION || op == DW_OP_ATTENTION_BACKWARD; /* graph_attention.c */
}
