/* Matrix products on GPUs: the public calls.
 *
 * Between a call and its launch there is arithmetic only: no allocation, no lock, no synchronisation. A kernel is
 * compiled, loaded and compared with the reference by the first call that needs it.
 */
#include "kernel/cuda/product.h"
#include <string.h>

/* A call that makes sense, and who computes it on which GPU. */
typedef struct job {
    dw_product call;
    const dw__cutlass *library;
    const dw_cutlass_kernel *kernel; /* of the library's; NULL: Deepwell's own */
    const dw__context *context;
} job;

dw_status dw__product_context(const dw_device *device, const dw_cutlass_kernel *kernel,
                              const dw__context **context) {
    if (!device) device = &dw__device_cuda;
    if (!device->context)
        return dw__fail(DW_UNSUPPORTED,
                        "product: device \"%s\" runs no kernels; expected \"cuda\", "
                        "\"emulator:sm_100a\" or \"emulator:sm_103a\"",
                        dw_device_name(device));
    DW_RETURN_IF_FAILED(device->context(context));
    if (kernel) return dw__cutlass_runs_in(kernel, *context);
    if (dw__product_runs_on((*context)->capability)) return DW_OK;
    return dw__fail(
        DW_UNSUPPORTED,
        "product: GPU %d is a %s (compute capability %d.%d); these kernels are for 10.0 and "
        "10.3 (B200, B300); use PyTorch's own products on this GPU",
        (*context)->ordinal, (*context)->name, (*context)->capability / 10,
        (*context)->capability % 10);
}

/* What went wrong, for which call. */
static dw_status name_call(dw_status status, const dw_product *call) {
    char text[256];
    if (status == DW_OK) return DW_OK;
    return dw__fail_prefix(status, "product (%s)", dw__product_describe(call, text, sizeof text));
}

static dw_status find_kernel(job *j) {
    const char *name = j->call.kernel,
               *own = j->call.quantized ? "sm100_gemm_scaled" : "sm100_gemm";
    if (!name || strcmp(name, own) == 0) return DW_OK;
    DW_RETURN_IF_FAILED(dw__cutlass_named(DW_CUTLASS_PRODUCT, name, own, &j->library, &j->kernel));
    return dw__product_is_empty(&j->call) ? DW_OK : dw__product_cutlass_takes(&j->call, j->kernel);
}

static dw_status prepare(const dw_product *given, bool launching, job *j) {
    *j = (job){0};
    DW_RETURN_IF_FAILED(dw__product_read(given, &j->call));
    DW_RETURN_IF_FAILED(dw__product_check(&j->call, launching));
    DW_RETURN_IF_FAILED(name_call(find_kernel(j), &j->call));
    return dw__product_context(j->call.device, j->kernel, &j->context);
}

/* ---- running ---------------------------------------------------------------------------------------- */

dw_status dw__product_run_reference(const dw_product *call, const dw__context *context) {
    void *function;
    DW_RETURN_IF_FAILED(dw__product_reference_of(context, call->dtype == DW_F16,
                                                 call->output == DW_F32, &function));
    return dw__product_launch_reference(call, context, function);
}

static dw_status run_own(const dw_product *call, const dw__context *context) {
    const dw__product_kernel *kernel;
    dw__product_shape shape = dw__product_shape_of(call, context->sm_count);
    DW_RETURN_IF_FAILED(dw__product_kernel_of(context, &shape, &kernel));
    if (kernel->disabled && dw__product_has_reference(&shape))
        return dw__product_run_reference(call, context);
    if (kernel->disabled) return dw__fail(DW_UNSUPPORTED, "%s", kernel->reason);
    return dw__product_launch(call, context, context->sm_count, kernel);
}

static dw_status run_cutlass(const job *j) {
    const dw_product *call = &j->call;
    const char *reason;
    size_t needed;
    DW_RETURN_IF_FAILED(dw__product_cutlass_bytes(call, j->library, j->kernel, &needed));
    DW_RETURN_IF_FAILED(
        dw__cutlass_workspace(j->kernel, call->workspace, call->workspace_bytes, needed));
    DW_RETURN_IF_FAILED(dw__product_cutlass_first_use(j->context, j->library, j->kernel,
                                                      call->residual.data != NULL, &reason));
    if (reason && !call->quantized) return dw__product_run_reference(call, j->context);
    if (reason) return dw__fail(DW_UNSUPPORTED, "%s", reason);
    return dw__product_cutlass_launch(call, j->library, j->kernel);
}

dw_status dw_product_run(const dw_product *given) {
    job j;
    DW_RETURN_IF_FAILED(prepare(given, true, &j));
    if (dw__product_is_empty(&j.call)) return DW_OK;
    return name_call(j.kernel ? run_cutlass(&j) : run_own(&j.call, j.context), &j.call);
}

/* ---- asking ----------------------------------------------------------------------------------------- */

/* Why the kernel is not used, or NULL. */
static dw_status find_reason(const job *j, const char **reason) {
    const dw__product_kernel *kernel;
    size_t bytes;
    if (j->kernel) {
        DW_RETURN_IF_FAILED(dw__product_cutlass_bytes(&j->call, j->library, j->kernel, &bytes));
        return dw__product_cutlass_first_use(j->context, j->library, j->kernel,
                                             j->call.residual.data != NULL, reason);
    }
    const dw__product_shape shape = dw__product_shape_of(&j->call, j->context->sm_count);
    DW_RETURN_IF_FAILED(dw__product_kernel_of(j->context, &shape, &kernel));
    *reason = kernel->disabled ? kernel->reason : NULL;
    return DW_OK;
}

dw_status dw_product_supported(const dw_product *given) {
    const char *reason;
    job j;
    DW_RETURN_IF_FAILED(prepare(given, false, &j));
    if (dw__product_is_empty(&j.call)) return DW_OK;
    DW_RETURN_IF_FAILED(name_call(find_reason(&j, &reason), &j.call));
    return reason ? dw__fail(DW_UNSUPPORTED, "%s", reason) : DW_OK;
}

dw_status dw_product_workspace(const dw_product *given, size_t *bytes) {
    job j;
    if (!bytes) return dw__fail(DW_INVALID_ARGUMENT, "product: bytes is NULL");
    *bytes = 0;
    DW_RETURN_IF_FAILED(prepare(given, false, &j));
    if (dw__product_is_empty(&j.call) || !j.kernel) return DW_OK;
    return name_call(dw__product_cutlass_bytes(&j.call, j.library, j.kernel, bytes), &j.call);
}
