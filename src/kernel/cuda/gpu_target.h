/* An architecture, or a GPU of one: what times are expected from. */
#ifndef DW_GPU_TARGET_H
#define DW_GPU_TARGET_H

#include "device/device.h"

enum { DW__TARGET_NAME = 32 };

typedef struct dw__gpu_target {
    const char *name; /* "sm_90a" */
    int capability, sm_count;
    double flops; /* per second: dense products of BF16 or F16 */
    double bytes; /* of memory, per second */
    const char *source;
} dw__gpu_target;

/* Whether there is a GPU or not: what its vendor says of one. DW_INVALID_ARGUMENT lists those that are known. */
dw_status dw__gpu_target_named(const char *name, dw__gpu_target *target);
/* The context's GPU; `name` is where its name goes. */
dw__gpu_target dw__gpu_target_of(const dw__context *context, char name[DW__TARGET_NAME]);

#endif
