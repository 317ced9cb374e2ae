/* Attention on a GPU: the public calls.
 *
 * Between a call and its launches there is arithmetic only: no allocation, no lock, no synchronisation. A kernel is
 * compiled, loaded and compared with the reference by the first call that needs it.
 */
#include "kernel/cuda/attention.h"
#include <stdio.h>
#include <string.h>

static dw_status check_device(const dw_attention *call, dw__attention_pass pass,
                              const dw__context *context) {
    dw_status status = dw__attention_check_capability(call, pass, context->capability);
    if (status == DW_OK) return DW_OK;
    return dw__fail_prefix(status, "attention: GPU %d is a %s (compute capability %d.%d)",
                           context->ordinal, context->name, context->capability / 10,
                           context->capability % 10);
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

/* ---- whose kernel ------------------------------------------------------------------------------------ */

/* CUTLASS's kernel that the call names; NULL: it names none, or one of ours. */
static dw_status find_cutlass(const dw_attention *call, const dw_cutlass_kernel **kernel) {
    const dw__attention_shape sm90 = {0}, sm100 = {.blackwell = true};
    const char *own[] = {dw__attention_forward_entry(&sm90), dw__attention_forward_entry(&sm100)};
    const dw__cutlass *library;
    char names[128];
    *kernel = NULL;
    if (!call->kernel) return DW_OK;
    if (strcmp(call->kernel, own[0]) == 0 || strcmp(call->kernel, own[1]) == 0) return DW_OK;
    snprintf(names, sizeof names, "%s, %s", own[0], own[1]);
    dw_status status =
        dw__cutlass_named(DW_CUTLASS_ATTENTION, call->kernel, names, &library, kernel);
    return status == DW_OK ? DW_OK : dw__fail_prefix(status, "attention");
}

static dw_status check_cutlass(const dw_attention *call, const dw_cutlass_kernel *kernel,
                               bool launching, const dw__context *context) {
    size_t bytes;
    DW_RETURN_IF_FAILED(dw__cutlass_runs_in(kernel, context));
    if (dw__attention_has_no_queries(call) || dw__attention_has_no_keys(call)) return DW_OK;
    DW_RETURN_IF_FAILED(dw__attention_cutlass_check(call, kernel, &bytes));
    if (!launching) return DW_OK;
    return dw__cutlass_workspace(kernel, call->workspace, call->workspace_bytes, bytes);
}

/* One of ours that the call names is the one that its GPU has. */
static dw_status check_own(const dw_attention *call, const dw__context *context,
                           const dw__attention_shape *shape) {
    const char *entry = dw__attention_forward_entry(shape);
    if (!call->kernel || strcmp(call->kernel, entry) == 0) return DW_OK;
    return dw__fail(DW_UNSUPPORTED,
                    "attention: kernel is \"%s\"; expected %s, which GPU %d has: it "
                    "is a %s (compute capability %d.%d)",
                    call->kernel, entry, context->ordinal, context->name, context->capability / 10,
                    context->capability % 10);
}

/* What a checked call is computed by, and where. */
static dw_status find_shape(const dw_attention *call, dw__attention_pass pass, bool launching,
                            const dw__context **context, dw__attention_shape *shape) {
    const dw_cutlass_kernel *cutlass;
    DW_RETURN_IF_FAILED(find_cutlass(call, &cutlass));
    DW_RETURN_IF_FAILED(dw__device_cuda.context(context));
    if (cutlass) {
        *shape = dw__attention_cutlass_shape(call, cutlass);
        return name_call(check_cutlass(call, cutlass, launching, *context), call);
    }
    DW_RETURN_IF_FAILED(check_device(call, pass, *context));
    *shape = dw__attention_shape_on(call, pass, *context);
    return check_own(call, *context, shape);
}

/* ---- forward -------------------------------------------------------------------------------------- */

static dw_status run_forward(const dw_attention *call, const dw__context *context,
                             const dw__attention_shape *shape) {
    const dw__attention_kernels *kernels;
    if (dw__attention_has_no_keys(call)) return run_reference(call, context, DW__ATTENTION_FORWARD);
    DW_RETURN_IF_FAILED(dw__attention_kernels_of(context, shape, DW__ATTENTION_FORWARD, &kernels));
    if (kernels->disabled) return dw__fail(DW_UNSUPPORTED, "%s", kernels->reason);
    return dw__attention_launch_forward(call, context, kernels);
}

dw_status dw_attention_forward(const dw_attention *given) {
    const dw__context *context;
    dw__attention_shape shape;
    dw_attention call;
    DW_RETURN_IF_FAILED(dw__attention_read(given, &call));
    DW_RETURN_IF_FAILED(dw__attention_check(&call, DW__ATTENTION_FORWARD, true));
    DW_RETURN_IF_FAILED(find_shape(&call, DW__ATTENTION_FORWARD, true, &context, &shape));
    if (dw__attention_has_no_queries(&call)) return DW_OK;
    return name_call(run_forward(&call, context, &shape), &call);
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

dw_status dw_attention_backward_workspace(const dw_attention *given, size_t *bytes) {
    const dw__context *context = NULL;
    dw__attention_workspace workspace;
    dw_attention call;
    DW_RETURN_IF_FAILED(dw__attention_read(given, &call));
    DW_RETURN_IF_FAILED(dw__attention_check(&call, DW__ATTENTION_BACKWARD, false));
    if (dw__device_cuda.context(&context) != DW_OK) context = NULL;
    DW_RETURN_IF_FAILED(workspace_of(&call, context, &workspace));
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

static dw_status run_backward(const dw_attention *call, const dw__context *context,
                              const dw__attention_shape *shape) {
    const dw__attention_kernels *kernels;
    if (dw__attention_has_no_queries(call) || dw__attention_has_no_keys(call))
        return run_reference(call, context, DW__ATTENTION_BACKWARD);
    DW_RETURN_IF_FAILED(dw__attention_kernels_of(context, shape, DW__ATTENTION_BACKWARD, &kernels));
    /* A forward has been run by now and wants its gradients: slowly rather than not at all. */
    if (kernels->disabled) return run_reference(call, context, DW__ATTENTION_BACKWARD);
    return dw__attention_launch_backward(call, context, kernels);
}

dw_status dw_attention_backward(const dw_attention *given) {
    const dw__context *context;
    dw__attention_shape shape;
    dw_attention call;
    DW_RETURN_IF_FAILED(dw__attention_read(given, &call));
    DW_RETURN_IF_FAILED(dw__attention_check(&call, DW__ATTENTION_BACKWARD, true));
    DW_RETURN_IF_FAILED(find_shape(&call, DW__ATTENTION_BACKWARD, true, &context, &shape));
    DW_RETURN_IF_FAILED(check_workspace(&call, context));
    if (call.batch == 0) return DW_OK;
    return name_call(run_backward(&call, context, &shape), &call);
}

/* ---- whether it would run ------------------------------------------------------------------------------ */

static dw_status check_kernels(const dw__context *context, const dw__attention_shape *shape,
                               dw__attention_pass pass) {
    const dw__attention_kernels *kernels;
    DW_RETURN_IF_FAILED(dw__attention_kernels_of(context, shape, pass, &kernels));
    return kernels->disabled ? dw__fail(DW_UNSUPPORTED, "%s", kernels->reason) : DW_OK;
}

dw_status dw_attention_supported(const dw_attention *given, bool backward) {
    const dw__attention_pass last = backward ? DW__ATTENTION_BACKWARD : DW__ATTENTION_FORWARD;
    const dw__context *context;
    dw__attention_shape shape;
    dw_attention call;
    DW_RETURN_IF_FAILED(dw__attention_read(given, &call));
    DW_RETURN_IF_FAILED(dw__attention_check(&call, last, false));
    DW_RETURN_IF_FAILED(find_shape(&call, last, false, &context, &shape));
    if (dw__attention_has_no_queries(&call) || dw__attention_has_no_keys(&call)) return DW_OK;
    const dw__attention_shape forward =
        backward ? dw__attention_shape_on(&call, DW__ATTENTION_FORWARD, context) : shape;
    dw_status status = check_kernels(context, &forward, DW__ATTENTION_FORWARD);
    if (status == DW_OK && backward) status = check_kernels(context, &shape, last);
    return name_call(status, &call);
}
