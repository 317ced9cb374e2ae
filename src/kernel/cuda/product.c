/* Matrix products on Blackwell: the public calls.
 *
 * Between a call and its launch there is arithmetic only: no allocation, no lock, no synchronisation. A kernel is
 * compiled, loaded and compared with the reference by the first call that needs it.
 */
#include "kernel/cuda/product.h"

static dw_status find_context(const dw_product *call, const dw__context **context) {
    const dw_device *device = call->device ? call->device : &dw__device_cuda;
    if (!device->context)
        return dw__fail(DW_UNSUPPORTED,
                        "product: device \"%s\" runs no kernels; expected \"cuda\", "
                        "\"emulator:sm_100a\" or \"emulator:sm_103a\"",
                        dw_device_name(device));
    DW_RETURN_IF_FAILED(device->context(context));
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

static dw_status run_reference(const dw_product *call, const dw__context *context) {
    void *function;
    DW_RETURN_IF_FAILED(dw__product_reference_of(context, call->dtype == DW_F16,
                                                 call->output == DW_F32, &function));
    return dw__product_launch_reference(call, context, function);
}

static dw_status run(const dw_product *call, const dw__context *context) {
    const dw__product_kernel *kernel;
    dw__product_shape shape = dw__product_shape_of(call, context->sm_count);
    DW_RETURN_IF_FAILED(dw__product_kernel_of(context, &shape, &kernel));
    if (kernel->disabled && dw__product_has_reference(&shape)) return run_reference(call, context);
    if (kernel->disabled) return dw__fail(DW_UNSUPPORTED, "%s", kernel->reason);
    return dw__product_launch(call, context, context->sm_count, kernel);
}

dw_status dw_product_run(const dw_product *given) {
    const dw__context *context;
    dw_product call;
    DW_RETURN_IF_FAILED(dw__product_read(given, &call));
    DW_RETURN_IF_FAILED(dw__product_check(&call, true));
    DW_RETURN_IF_FAILED(find_context(&call, &context));
    if (dw__product_is_empty(&call)) return DW_OK;
    return name_call(run(&call, context), &call);
}

dw_status dw_product_supported(const dw_product *given) {
    const dw__context *context;
    const dw__product_kernel *kernel;
    dw_product call;
    DW_RETURN_IF_FAILED(dw__product_read(given, &call));
    DW_RETURN_IF_FAILED(dw__product_check(&call, false));
    DW_RETURN_IF_FAILED(find_context(&call, &context));
    if (dw__product_is_empty(&call)) return DW_OK;
    dw__product_shape shape = dw__product_shape_of(&call, context->sm_count);
    DW_RETURN_IF_FAILED(name_call(dw__product_kernel_of(context, &shape, &kernel), &call));
    return kernel->disabled ? dw__fail(DW_UNSUPPORTED, "%s", kernel->reason) : DW_OK;
}
