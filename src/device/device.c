/* The list of devices, and the public calls through their tables. */
#include "device/device_table.h"
#include <stdatomic.h>
#include <string.h>

static const dw_device *const devices[] = {
    &dw__device_cpu,
    &dw__device_cuda,
    &dw__device_emulator_sm_90a,
    &dw__device_emulator_sm_100a,
    &dw__device_emulator_sm_103a,
    &dw__device_emulator_sm_120a,
    &dw__device_plan_sm_90a,
};

dw_status dw_device_find(const char *name, const dw_device **device) {
    for (size_t i = 0; i < DW_COUNT(devices); i++) {
        if (strcmp(name, devices[i]->name) != 0) continue;
        if (devices[i]->open) DW_RETURN_IF_FAILED(devices[i]->open());
        *device = devices[i];
        return DW_OK;
    }
    return dw__fail(
        DW_NOT_FOUND,
        "there is no device \"%s\": use \"cpu\", \"cuda\", \"plan:sm_90a\", or \"emulator:\" "
        "and one of sm_90a, sm_100a, sm_103a, sm_120a",
        name);
}

const char *dw_device_name(const dw_device *device) { return device->name; }

/* ---- memory -------------------------------------------------------------------------------------- */

static struct { _Atomic size_t now, most; } counted[DW_COUNT(devices)];

static size_t index_of(const dw_device *device) {
    size_t index = 0;
    while (index + 1 < DW_COUNT(devices) && devices[index] != device) index++;
    return index;
}

dw_status dw_device_allocate(const dw_device *device, size_t bytes, void **memory) {
    DW_RETURN_IF_FAILED(device->allocate(bytes, memory));
    size_t index = index_of(device);
    size_t now = atomic_fetch_add(&counted[index].now, bytes) + bytes;
    size_t most = atomic_load(&counted[index].most);
    while (now > most && !atomic_compare_exchange_weak(&counted[index].most, &most, now)) {
    }
    return DW_OK;
}

void dw_device_release(const dw_device *device, void *memory, size_t bytes) {
    if (!memory) return;
    device->release(memory, bytes);
    atomic_fetch_sub(&counted[index_of(device)].now, bytes);
}

void dw_device_memory(const dw_device *device, size_t *now, size_t *most) {
    size_t index = index_of(device);
    if (now) *now = atomic_load(&counted[index].now);
    if (most) *most = atomic_load(&counted[index].most);
}

void dw_device_memory_restart(const dw_device *device) {
    size_t index = index_of(device);
    atomic_store(&counted[index].most, atomic_load(&counted[index].now));
}

/* ---- copies -------------------------------------------------------------------------------------- */

dw_status dw_device_copy(const dw_device *device, void *to, const void *from, size_t bytes) {
    return bytes > 0 ? device->copy(to, from, bytes) : DW_OK;
}

/* The CPU's memory is host memory. */
dw_status dw_device_copy_in(const dw_device *device, void *to, const void *host, size_t bytes) {
    if (!device->copy_in || bytes == 0) return dw_device_copy(device, to, host, bytes);
    DW_RETURN_IF_FAILED(device->copy_in(to, host, bytes, NULL));
    return device->stream_synchronize(NULL);
}

dw_status dw_device_copy_out(const dw_device *device, void *host, const void *from, size_t bytes) {
    if (!device->copy_out || bytes == 0) return dw_device_copy(device, host, from, bytes);
    DW_RETURN_IF_FAILED(device->copy_out(host, from, bytes, NULL));
    return device->stream_synchronize(NULL);
}

dw_status dw_device_fill(const dw_device *device, void *memory, int byte, size_t bytes) {
    return bytes > 0 ? device->fill(memory, byte, bytes) : DW_OK;
}
