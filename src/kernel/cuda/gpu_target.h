/* The GPU, or GPU architecture, for which times are estimated. */
#ifndef DW_GPU_TARGET_H
#define DW_GPU_TARGET_H

#include "device/device_table.h"

enum { DW__TARGET_NAME = 32 };

typedef struct dw__gpu_target {
    const char *name; /* "sm_90a" */
    int capability, sm_count;
    double flops; /* of dense BF16 or F16 GEMMs, in FLOP/s */
    double bytes; /* of memory, in bytes/s */
    const char *source;
    const dw__context *context; /* the present GPU's; NULL: an architecture */
} dw__gpu_target;

/* B200 and B300, whose kernels are compiled for sm_100f. */
static inline bool dw__gpu_is_blackwell(int capability) {
    return capability == 100 || capability == 103;
}

/* RTX 50 and RTX PRO Blackwell, whose kernels are compiled for sm_120a. */
static inline bool dw__gpu_is_rtx_blackwell(int capability) { return capability == 120; }
/* Whether there are kernels for GPUs of this compute capability. */
static inline bool dw__gpu_has_kernels(int capability) {
    return capability == 90 || dw__gpu_is_blackwell(capability) ||
           dw__gpu_is_rtx_blackwell(capability);
}

/* Looks up an architecture by name, whether there is such a GPU or not, with its vendor's figures. DW_INVALID_ARGUMENT
 * lists the known names. */
dw_status dw__gpu_target_named(const char *name, dw__gpu_target *target);
/* Describes the context's GPU; `name` receives its name. */
dw__gpu_target dw__gpu_target_of(const dw__context *context, char name[DW__TARGET_NAME]);

/* The target of an explanation: a named architecture, or the present GPU if no name is given. Members point into each
 * other, so the structure must not be copied. */
typedef struct dw__gpu_subject {
    dw__gpu_target target;
    /* the present GPU's name if it is of the target's architecture; else NULL */
    const char *gpu;
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
