/* Attention on a GPU: the public calls.
 *
 * Between a call and its launches there is arithmetic only: no allocation, no lock, no synchronisation. A kernel is
 * compiled, loaded and compared with the reference by the first call that needs it.
 */
#include "kernel/cuda/attention.h"

static dw_status check_device(const dw_attention *call, dw__attention_pass pass,
                              const dw__context **context) {
    DW_RETURN_IF_FAILED(dw__device_cuda.context(context));
    dw_status status = dw__attention_check_capability(call, pass, (*context)->capability);
    if (status == DW_OK) return DW_OK;
    return dw__fail_prefix(status, "attention: GPU %d is a %s (compute capability %d.%d)",
                           (*context)->ordinal, (*context)->name, (*context)->capability / 10,
                           (*context)->capability % 10);
}

/* What went wrong, for which call. */
static dw_status name_call(dw_status status, const dw_attention *call) {
    char text[256];
    if (status == DW_OK) return DW_OK;
    return dw__fail_prefix(status, "attention (%s)",
                           dw__attention_describe(call, text, sizeof text));
}

/* Outputs of a call that multiplies nothing are zeros (and -infinity); the reference writes those, too. */
static dw_status run_reference(const dw_attention *call, const dw__context *context,
                               dw__attention_pass pass) {
    const dw__attention_kernels *kernels;
    DW_RETURN_IF_FAILED(dw__attention_reference_of(context, call->dtype == DW_F16, pass, &kernels));
    return dw__attention_launch_reference(call, context, pass, kernels);
}

static dw_status run_forward(const dw_attention *call, const dw__context *context) {
    const dw__attention_kernels *kernels;
    if (dw__attention_has_no_keys(call)) return run_reference(call, context, DW__ATTENTION_FORWARD);
    dw__attention_shape shape = dw__attention_shape_on(call, DW__ATTENTION_FORWARD, context);
    DW_RETURN_IF_FAILED(dw__attention_kernels_of(context, &shape, DW__ATTENTION_FORWARD, &kernels));
    if (kernels->disabled) return dw__fail(DW_UNSUPPORTED, "%s", kernels->reason);
    return dw__attention_launch_forward(call, context, kernels);
}

dw_status dw_attention_forward(const dw_attention *call) {
    const dw__context *context;
    DW_RETURN_IF_FAILED(dw__attention_check(call, DW__ATTENTION_FORWARD, true));
    DW_RETURN_IF_FAILED(check_device(call, DW__ATTENTION_FORWARD, &context));
    if (dw__attention_has_no_queries(call)) return DW_OK;
    return name_call(run_forward(call, context), call);
}

/* ---- backward -------------------------------------------------------------------------------------- */

/* `context` NULL: no GPU; what is said then is what a GPU of any number of processors can do with. */
static dw_status workspace_of(const dw_attention *call, const dw__context *context,
                              dw__attention_workspace *workspace) {
    int sm_count = context ? context->sm_count : 0;
    dw__attention_shape shape = dw__attention_shape_of(call, DW__ATTENTION_BACKWARD, sm_count);
    *workspace = (dw__attention_workspace){0};
    if (dw__attention_has_no_queries(call) || dw__attention_has_no_keys(call)) return DW_OK;
    return dw__attention_workspace_of(call, &shape, sm_count, workspace);
}

dw_status dw_attention_backward_workspace(const dw_attention *call, size_t *bytes) {
    const dw__context *context = NULL;
    dw__attention_workspace workspace;
    DW_RETURN_IF_FAILED(dw__attention_check(call, DW__ATTENTION_BACKWARD, false));
    if (dw__device_cuda.context(&context) != DW_OK) context = NULL;
    DW_RETURN_IF_FAILED(workspace_of(call, context, &workspace));
    *bytes = workspace.bytes;
    return DW_OK;
}

static dw_status check_workspace(const dw_attention *call, const dw__context *context) {
    dw__attention_workspace needed;
    DW_RETURN_IF_FAILED(workspace_of(call, context, &needed));
    if (needed.bytes == 0) return DW_OK;
    if (!call->workspace || call->workspace_bytes < needed.bytes)
        return dw__fail(
            DW_INVALID_ARGUMENT,
            "attention: workspace is %s of %zu bytes; expected %zu of device memory, as "
            "dw_attention_backward_workspace says",
            call->workspace ? "memory" : "NULL", call->workspace_bytes, needed.bytes);
    if ((uintptr_t)call->workspace % 16 != 0)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "attention: workspace lies at %p; expected a multiple of 16 bytes",
                        call->workspace);
    return DW_OK;
}

static dw_status run_backward(const dw_attention *call, const dw__context *context) {
    const dw__attention_kernels *kernels;
    if (dw__attention_has_no_queries(call) || dw__attention_has_no_keys(call))
        return run_reference(call, context, DW__ATTENTION_BACKWARD);
    dw__attention_shape shape = dw__attention_shape_on(call, DW__ATTENTION_BACKWARD, context);
    DW_RETURN_IF_FAILED(
        dw__attention_kernels_of(context, &shape, DW__ATTENTION_BACKWARD, &kernels));
    /* A forward has been run by now and wants its gradients: slowly rather than not at all. */
    if (kernels->disabled) return run_reference(call, context, DW__ATTENTION_BACKWARD);
    return dw__attention_launch_backward(call, context, kernels);
}

dw_status dw_attention_backward(const dw_attention *call) {
    const dw__context *context;
    DW_RETURN_IF_FAILED(dw__attention_check(call, DW__ATTENTION_BACKWARD, true));
    DW_RETURN_IF_FAILED(check_device(call, DW__ATTENTION_BACKWARD, &context));
    DW_RETURN_IF_FAILED(check_workspace(call, context));
    if (call->batch == 0) return DW_OK;
    return name_call(run_backward(call, context), call);
}

/* ---- whether it would run ------------------------------------------------------------------------------ */

static dw_status check_kernels(const dw_attention *call, const dw__context *context,
                               dw__attention_pass pass) {
    const dw__attention_kernels *kernels;
    dw__attention_shape shape = dw__attention_shape_on(call, pass, context);
    DW_RETURN_IF_FAILED(dw__attention_kernels_of(context, &shape, pass, &kernels));
    return kernels->disabled ? dw__fail(DW_UNSUPPORTED, "%s", kernels->reason) : DW_OK;
}

dw_status dw_attention_supported(const dw_attention *call, bool backward) {
    const dw__context *context;
    DW_RETURN_IF_FAILED(dw__attention_check(
        call, backward ? DW__ATTENTION_BACKWARD : DW__ATTENTION_FORWARD, false));
    DW_RETURN_IF_FAILED(
        check_device(call, backward ? DW__ATTENTION_BACKWARD : DW__ATTENTION_FORWARD, &context));
    if (dw__attention_has_no_queries(call) || dw__attention_has_no_keys(call)) return DW_OK;
    dw_status status = check_kernels(call, context, DW__ATTENTION_FORWARD);
    if (status == DW_OK && backward) status = check_kernels(call, context, DW__ATTENTION_BACKWARD);
    return name_call(status, call);
}
