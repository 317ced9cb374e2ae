#include "engine/target.h"
#include "base/pool.h"
#include "engine/executor.h"

dw__target dw__target_cpu(void) {
    return (dw__target){.device = &dw__device_cpu,
                        .executor = &dw__executor_cpu,
                        .alignment = DW__CPU_ALIGNMENT,
                        .threads = dw__pool_threads()};
}

bool dw__target_serves(const dw__target *target, const dw__target *wanted) {
    return target->device == wanted->device && target->executor == wanted->executor &&
           target->alignment == wanted->alignment && target->sm_count == wanted->sm_count &&
           target->threads >= wanted->threads;
}
