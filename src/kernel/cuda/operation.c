/* Functions that kernels of the graph's operations share. */
#include "common/element_types.h"
#include "kernel/cuda/gpu_kernels.h"
#include <stdio.h>

const char *dw__gpu_arch(int capability) {
    return capability == 90                       ? "sm_90a"
           : dw__gpu_is_rtx_blackwell(capability) ? "sm_120a"
                                                  : "sm_100f";
}

dw_status dw__gpu_kernel_has(const dw__kernel *kernel, const dw__gpu_target *gpu) {
    if (!gpu || dw__gpu_has_kernels(gpu->capability)) return DW_OK;
    return dw__fail(DW_TYPE, "%s is for %s, not for %s", kernel->name, kernel->architectures,
                    gpu->name);
}

static bool is_code(const dw__tensor *t) { return t->rank >= 0 && dw__dtype_is_code(t->dtype); }

dw_status dw__gpu_kernel_computes(const dw__kernel *kernel, const dw__call *call,
                                  const dw__gpu_target *gpu) {
    for (uint32_t i = 0; i < call->input_count + call->output_count; i++) {
        const dw__tensor *t =
            i < call->input_count ? &call->inputs[i] : &call->outputs[i - call->input_count];
        if (is_code(t))
            return dw__fail(DW_TYPE,
                            "%s: the element type is %s; expected a type that operations "
                            "compute in",
                            kernel->name, dw_dtype_name(t->dtype));
    }
    return dw__gpu_kernel_has(kernel, gpu);
}

static double bytes_of(const dw__tensor *t) {
    return t->rank < 0 ? 0.0 : (double)dw__tensor_bytes(t);
}

void dw__gpu_seconds_of_bytes(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                              dw__kernel_seconds *result) {
    const double launch = 4e-6;
    const dw__call *c = &((const dw__operation_call *)call)->call;
    double bytes = 0.0;
    (void)kernel;
    for (uint32_t i = 0; i < c->input_count; i++) bytes += bytes_of(&c->inputs[i]);
    for (uint32_t o = 0; o < c->output_count; o++) bytes += bytes_of(&c->outputs[o]);
    if (dw__call_addend(c)) bytes += bytes_of(dw__call_addend(c));
    result->seconds = launch + bytes / gpu->bytes;
    snprintf(result->from, sizeof result->from, "estimate: bytes at the data sheet's rate");
}

dw_status dw__gpu_launch(const dw__operation_call *call, const dw__context *context,
                         const char *name, void *function, int64_t blocks, unsigned threads,
                         void *params) {
    const int64_t resident = (int64_t)context->sm_count * (2048 / threads);
    void *arguments[] = {params};
    if (blocks == 0) return DW_OK;
    return context->device->launch(&(dw__launch){
        .name = name,
        .function = function,
        .grid = {(unsigned)(blocks < resident ? blocks : resident), 1, 1},
        .block = {threads, 1, 1},
        .stream = call->stream,
        .arguments = arguments,
    });
}

dw_status dw__gpu_launch_each(const dw__operation_call *call, const dw__context *context,
                              const char *name, void *function, int64_t count, void *params) {
    return dw__gpu_launch(call, context, name, function,
                          (count + DW__GPU_THREADS - 1) / DW__GPU_THREADS, DW__GPU_THREADS, params);
}

_Static_assert(DW_ELEMENT_BOOL == DW_BOOL && DW_ELEMENT_I32 == DW_I32 && DW_ELEMENT_I64 == DW_I64 &&
                   DW_ELEMENT_BF16 == DW_BF16 && DW_ELEMENT_F16 == DW_F16 &&
                   DW_ELEMENT_F32 == DW_F32 && DW_ELEMENT_F64 == DW_F64,
               "device code knows the element types by the same numbers");
int dw__gpu_element(dw_dtype dtype) { return (int)dtype; }
