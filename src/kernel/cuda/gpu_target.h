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

/* What an explanation is for: a target by its name, or, with NULL, the GPU that is there. Its members point into each
 * other: it is not copied. */
typedef struct dw__gpu_subject {
    dw__gpu_target target;
    const char *gpu;     /* the name of the GPU that is there, where it is such a one; else NULL */
    const char *missing; /* why there is no GPU; NULL: there is one */
    char name[DW__TARGET_NAME], error[1024];
} dw__gpu_subject;
/* `device`: the call's. A failure where nothing is named and there is no GPU: it proposes `example`. */
dw_status dw__gpu_subject_find(const char *named, const dw_device *device, const char *example,
                               dw__gpu_subject *subject);

/* The context of a call's device (NULL: "cuda"). DW_UNSUPPORTED: it runs no kernels; the message starts with
 * `operation`. */
dw_status dw__gpu_context(const dw_device *device, const char *operation,
                          const dw__context **context);

#endif
