/* Quantization in blocks on a GPU: the public calls. As of products (product.c): between a call and its launch
 * there is arithmetic only. */
#include "kernel/cuda/quantize.h"

/* The kernel for a checked call that is not empty, on its device. */
static dw_status find_kernel(const dw_quantize *call, const dw__context **context,
                             const dw__quantize_kernel **kernel) {
    const dw_device *device = call->device ? call->device : &dw__device_cuda;
    const dw__quantize_shape shape = dw__quantize_shape_of(call);
    if (!device->context)
        return dw__fail(DW_UNSUPPORTED,
                        "device \"%s\" runs no kernels; expected \"cuda\", \"emulator:sm_90a\", "
                        "\"emulator:sm_100a\" or \"emulator:sm_103a\"; on a CPU: dw_block_quantize",
                        dw_device_name(device));
    DW_RETURN_IF_FAILED(device->context(context));
    if (!dw__quantize_runs_on((*context)->capability))
        return dw__fail(
            DW_UNSUPPORTED,
            "GPU %d is a %s (compute capability %d.%d); these kernels are for 9.0, 10.0 "
            "and 10.3 (H100, H200, B200, B300)",
            (*context)->ordinal, (*context)->name, (*context)->capability / 10,
            (*context)->capability % 10);
    DW_RETURN_IF_FAILED(dw__quantize_kernel_of(*context, &shape, kernel));
    return (*kernel)->disabled ? dw__fail(DW_UNSUPPORTED, "%s", (*kernel)->reason) : DW_OK;
}

static dw_status run(const dw_quantize *call, bool launching) {
    const dw__context *context;
    const dw__quantize_kernel *kernel;
    DW_RETURN_IF_FAILED(find_kernel(call, &context, &kernel));
    return launching ? dw__quantize_launch(call, context, kernel) : DW_OK;
}

static dw_status check_and_run(const dw_quantize *call, bool launching) {
    char text[128];
    DW_RETURN_IF_FAILED(dw__quantize_check(call, launching));
    if (dw__quantize_is_empty(call)) return DW_OK;
    const dw_status status = run(call, launching);
    return status == DW_OK ? DW_OK
                           : dw__fail_prefix(status, "quantize (%s)",
                                             dw__quantize_describe(call, text, sizeof text));
}

dw_status dw_quantize_run(const dw_quantize *call) { return check_and_run(call, true); }
dw_status dw_quantize_supported(const dw_quantize *call) { return check_and_run(call, false); }
