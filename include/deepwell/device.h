/* Devices: where memory lies and work is done. One table of functions each: "cpu", "cuda"
 * for NVIDIA GPUs, and emulated GPUs.
 * Devices are found, not made: the pointers are valid until the process ends, from any thread.
 */
#ifndef DEEPWELL_DEVICE_H
#define DEEPWELL_DEVICE_H

#include "deepwell/status.h"
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dw_device dw_device;

/* "cpu"; "cuda": the GPU whose context is current on the calling thread, the first one where none is; or an
 * emulated GPU, "emulator:sm_90a", "emulator:sm_100a", "emulator:sm_103a", "emulator:sm_120a"
 * (docs/emulator.md). DW_NOT_FOUND lists the devices that exist; DW_UNSUPPORTED for "cuda" where there is no
 * driver, one that is too old, or no GPU. Nothing is loaded before "cuda" is asked for. */
DW_API dw_status dw_device_find(const char *name, const dw_device **device);
DW_API const char *dw_device_name(const dw_device *device);

/* Memory for tensors and arenas, aligned to 64 bytes at least; contents undefined. `bytes` may be 0.
 * DW_OUT_OF_MEMORY names the size. */
DW_API dw_status dw_device_allocate(const dw_device *device, size_t bytes, void **memory);
/* `bytes` as given to allocate; NULL memory is allowed. */
DW_API void dw_device_release(const dw_device *device, void *memory, size_t bytes);
/* Bytes of this device's memory that the process has now, and the most that it has had at once since it began
 * or since dw_device_memory_restart. As asked for: a block may take more (pages). Either pointer may be NULL. */
DW_API void dw_device_memory(const dw_device *device, size_t *now, size_t *most);
DW_API void dw_device_memory_restart(const dw_device *device);
/* Device to device; the ranges do not overlap. */
DW_API dw_status dw_device_copy(const dw_device *device, void *to, const void *from, size_t bytes);
/* Between the host's memory and the device's; done when it returns. */
DW_API dw_status dw_device_copy_in(const dw_device *device, void *to, const void *host,
                                   size_t bytes);
DW_API dw_status dw_device_copy_out(const dw_device *device, void *host, const void *from,
                                    size_t bytes);
DW_API dw_status dw_device_fill(const dw_device *device, void *memory, int byte, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
