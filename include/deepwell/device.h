/* Devices: where memory lies and work runs.
 *
 *     const dw_device *device;
 *     if (dw_device_find("cuda", &device) != DW_OK) fprintf(stderr, "%s\n", dw_last_error());
 *     dw_device_allocate(device, bytes, &memory);
 *     dw_device_copy_in(device, memory, host, bytes);
 *     dw_device_release(device, memory, bytes);
 *
 * The devices are "cpu", "cuda" for NVIDIA GPUs, and emulated GPUs. A device is found, never created: the pointer is
 * valid until the process ends and may be used from any thread.
 */
#ifndef DEEPWELL_DEVICE_H
#define DEEPWELL_DEVICE_H

#include "deepwell/status.h"
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dw_device dw_device;

/* `name` is one of
 *     "cpu"
 *     "cuda"              the GPU whose context is current on the calling thread; without one, the first GPU
 *     "emulator:sm_90a"   an emulated GPU; also sm_100a, sm_103a and sm_120a (docs/emulator.md)
 *     "plan:sm_90a"       a Hopper GPU that need not be there: engines make plans for it, and nothing runs
 * DW_NOT_FOUND: the name is unknown; the message lists the devices. DW_UNSUPPORTED: "cuda" without a GPU, without a
 * driver, or with a driver that is too old; an emulated GPU without libdeepwell_emulator.so. Neither the driver nor the
 * emulator is loaded before such a device is looked up. */
DW_API dw_status dw_device_find(const char *name, const dw_device **device);
DW_API const char *dw_device_name(const dw_device *device);

/* Memory for tensors and arenas, aligned to at least 64 bytes. Its contents are undefined. `bytes` may be 0.
 * DW_OUT_OF_MEMORY names the size. */
DW_API dw_status dw_device_allocate(const dw_device *device, size_t bytes, void **memory);
/* `bytes` must be the value given to dw_device_allocate. `memory` may be NULL. */
DW_API void dw_device_release(const dw_device *device, void *memory, size_t bytes);
/* Bytes of this device's memory that the process holds now (*now), and the peak since it began or since the last
 * dw_device_memory_restart (*most). Counts requested bytes; pages may make a block larger. Either pointer may be
 * NULL. */
DW_API void dw_device_memory(const dw_device *device, size_t *now, size_t *most);
DW_API void dw_device_memory_restart(const dw_device *device);
/* Copies within the device's memory. The ranges must not overlap. This function and the next three fail with
 * DW_INVALID_ARGUMENT if an emulated GPU does not hold the range, and as the driver does on "cuda". */
DW_API dw_status dw_device_copy(const dw_device *device, void *to, const void *from, size_t bytes);
/* Copies between the host's memory and the device's. The copy is complete on return. */
DW_API dw_status dw_device_copy_in(const dw_device *device, void *to, const void *host,
                                   size_t bytes);
DW_API dw_status dw_device_copy_out(const dw_device *device, void *host, const void *from,
                                    size_t bytes);
DW_API dw_status dw_device_fill(const dw_device *device, void *memory, int byte, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
