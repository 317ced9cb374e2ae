/* The target of a plan: where it runs, as far as planning has to know.
 *
 * A plan is made for one target and runs on no other. Today the only one is the CPU of this process.
 */
#ifndef DW_TARGET_H
#define DW_TARGET_H

#include "device/device.h"

enum { DW__CPU_ALIGNMENT = 64 }; /* a cache line, and the widest vector register */

struct dw__executor;

typedef struct dw__target {
    const dw_device *device;             /* has the arena, leaves, outputs and gradients */
    const struct dw__executor *executor; /* runs the instructions (executor.h) */
    size_t alignment; /* in bytes, a power of two: of the arena and of each buffer in it */
    int threads;      /* most host threads that run a kernel: kernels ask for scratch per thread */
    int sm_count;     /* of a GPU; 0 on a CPU */
} dw__target;

/* This CPU, with as many threads as dw_get_threads returns now. */
dw__target dw__target_cpu(void);
/* True if a plan for `target` can run where one for `wanted` can. */
bool dw__target_serves(const dw__target *target, const dw__target *wanted);

#endif
