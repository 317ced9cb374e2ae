#include "kernel/cuda/gpu_target.h"
#include <stdio.h>
#include <string.h>

static const dw__gpu_target architectures[] = {
    {"sm_90a", 90, 132, 989.4e12, 4.8e12, "H200 SXM data sheet: 989 TFLOP/s dense, 4.8 TB/s", NULL},
    {"sm_100a", 100, 148, 2250e12, 7.7e12, "HGX B200 data sheet: 2250 TFLOP/s dense, 7.7 TB/s",
     NULL},
    {"sm_103a", 103, 148, 2250e12, 7.7e12, "HGX B300 data sheet: 2250 TFLOP/s dense, 7.7 TB/s",
     NULL},
    {"sm_120a", 120, 170, 209.5e12, 1.792e12,
     "RTX Blackwell architecture paper, RTX 5090: 209.5 TFLOP/s dense with F32 sums, 1.79 TB/s",
     NULL},
};

dw_status dw__gpu_target_named(const char *name, dw__gpu_target *target) {
    for (size_t i = 0; i < DW_COUNT(architectures); i++) {
        if (strcmp(architectures[i].name, name) != 0) continue;
        *target = architectures[i];
        return DW_OK;
    }
    return dw__fail(DW_INVALID_ARGUMENT,
                    "target \"%s\" is not known; expected sm_90a, sm_100a, sm_103a or sm_120a",
                    name);
}

/* Operations of dense 16-bit GEMMs per SM and clock: 8192 on Blackwell's data-centre GPUs, 4096 on Hopper, 512 on
 * GeForce RTX 50 with sums in F32 (workstation cards have twice that); on earlier GPUs 1024 for F16. */
dw__gpu_target dw__gpu_target_of(const dw__context *context, char name[DW__TARGET_NAME]) {
    const bool family = dw__gpu_is_blackwell(context->capability);
    const bool rtx = dw__gpu_is_rtx_blackwell(context->capability);
    const double per_clock = family                      ? 8192.0
                             : rtx                       ? 512.0
                             : context->capability >= 90 ? 4096.0
                                                         : 2048.0;
    snprintf(name, DW__TARGET_NAME, "sm_%d%s", context->capability,
             dw__gpu_has_kernels(context->capability) ? "a" : "");
    return (dw__gpu_target){
        .name = name,
        .capability = context->capability,
        .sm_count = context->sm_count,
        .flops = per_clock * context->sm_count * 1e3 * context->clock_khz,
        .bytes = 2e3 * context->memory_clock_khz * context->memory_bus_bits /
                 8.0, /* two transfers per clock */
        .source = "the driver's SMs, clocks and bus width",
        .context = context,
    };
}

dw_status dw__gpu_context(const dw_device *device, const char *operation,
                          const dw__context **context) {
    if (!device) device = &dw__device_cuda;
    if (device->context) return device->context(context);
    return dw__fail(DW_UNSUPPORTED,
                    "%s: device \"%s\" runs no kernels; expected \"cuda\", or an emulated GPU such "
                    "as \"emulator:sm_90a\" or \"emulator:sm_100a\"",
                    operation, dw_device_name(device));
}

dw_status dw__gpu_subject_find(const char *named, const dw_device *device, const char *example,
                               dw__gpu_subject *subject) {
    const dw__context *context = NULL;
    const dw_status found = dw__gpu_context(device, "explain", &context);
    *subject = (dw__gpu_subject){0};
    if (found != DW_OK) {
        snprintf(subject->error, sizeof subject->error, "%s", dw_last_error());
        subject->missing = subject->error;
    }
    if (named)
        DW_RETURN_IF_FAILED(dw__gpu_target_named(named, &subject->target));
    else if (found != DW_OK)
        return dw__fail_prefix(found, "there is no GPU to explain for (name a target: %s)",
                               example);
    else
        subject->target = dw__gpu_target_of(context, subject->name);
    if (context && context->capability == subject->target.capability) subject->gpu = context->name;
    return DW_OK;
}
