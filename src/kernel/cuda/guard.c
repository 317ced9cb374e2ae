#include "kernel/cuda/guard.h"

dw_status dw__guard_begin(dw__guard *guard, const dw__context *context) {
    *guard = (dw__guard){.device = context->device};
    DW_RETURN_IF_FAILED(guard->device->capture_relax(&guard->before));
    guard->relaxed = true;
    return guard->device->stream_create(&guard->stream);
}

dw_status dw__guard_end(dw__guard *guard, dw_status status, const char *with) {
    if (guard->stream) guard->device->stream_destroy(guard->stream);
    if (guard->relaxed) guard->device->capture_restore(guard->before);
    return status == DW_OK ? DW_OK : dw__fail_prefix(status, "comparing the kernel with %s", with);
}

dw_status dw__guard_fetch(const dw__guard *guard, dw_status launched, void *host,
                          const void *results, size_t bytes, bool *failed) {
    dw_status status = launched;
    if (status == DW_OK) status = guard->device->copy_out(host, results, bytes, guard->stream);
    if (status == DW_OK) status = guard->device->stream_synchronize(guard->stream);
    *failed = status != DW_OK;
    return status == DW_OUT_OF_MEMORY ? status : DW_OK;
}
