#include "engine/target.h"
#include "base/pool.h"
#include "engine/executor.h"

void dw__target_cpu(dw__target *target) {
    *target = (dw__target){.device = &dw__device_cpu,
                           .executor = &dw__executor_cpu,
                           .alignment = DW__CPU_ALIGNMENT,
                           .binding_alignment = 1,
                           .threads = dw__pool_threads()};
}

dw_status dw__target_of(const dw_device *device, bool graphs, dw__target *target) {
    if (!device || device == &dw__device_cpu) {
        dw__target_cpu(target);
        return DW_OK;
    }
    if (!device->launch)
        return dw__fail(
            DW_UNSUPPORTED,
            "device \"%s\" runs no kernels; expected \"cpu\", \"cuda\" or an emulated GPU",
            device->name);
    *target = (dw__target){.device = device,
                           .executor = graphs ? &dw__executor_graph : &dw__executor_stream,
                           .alignment = DW__GPU_ALIGNMENT,
                           .binding_alignment = 16,
                           .threads = 1};
    DW_RETURN_IF_FAILED(device->context(&target->context));
    target->gpu = dw__gpu_target_of(target->context, target->gpu_name);
    return DW_OK;
}

void dw__target_copy(dw__target *to, const dw__target *from) {
    *to = *from;
    if (to->context) to->gpu.name = to->gpu_name;
}

bool dw__target_serves(const dw__target *target, const dw__target *wanted) {
    return target->device == wanted->device && target->executor == wanted->executor &&
           target->context == wanted->context && target->tf32 == wanted->tf32 &&
           target->alignment == wanted->alignment && target->threads >= wanted->threads;
}
