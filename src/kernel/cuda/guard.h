/* What first-use guards share: a stream of their own, so that they may run inside of a caller's graph capture, and
 * what a kernel has made, brought to the host. */
#ifndef DW_CUDA_GUARD_H
#define DW_CUDA_GUARD_H

#include "device/device.h"

typedef struct dw__guard {
    const dw_device *device;
    void *stream;
    int before; /* the thread's mode of capturing */
    bool relaxed;
} dw__guard;

dw_status dw__guard_begin(dw__guard *guard, const dw__context *context);
/* Also after a failing beginning, and of one of zeros. `status` is what the comparison came to, `with` what a kernel is
 * compared with: "the reference". */
dw_status dw__guard_end(dw__guard *guard, dw_status status, const char *with);

/* Copies `bytes` of results to the host, behind a launch that came to `launched`. A kernel that fails is refused as one
 * that differs is: on the emulator so does whatever its checker finds. `*failed`: so, and dw_last_error() says how.
 * DW_OUT_OF_MEMORY: nothing was learnt. */
dw_status dw__guard_fetch(const dw__guard *guard, dw_status launched, void *host,
                          const void *results, size_t bytes, bool *failed);

#endif
