/* The target of a plan: the properties of the device that planning needs.
 *
 * A plan is made for one target and runs on no other: this process's CPU, or a GPU (NVIDIA's, or an emulated one).
 */
#ifndef DW_TARGET_H
#define DW_TARGET_H

#include "device/device_table.h"
#include "kernel/gpu_kernel.h"

enum {
    DW__CPU_ALIGNMENT = 64, /* a cache line, and the widest vector register */
    DW__GPU_ALIGNMENT = 256 /* what tensor maps, vector loads and workspaces need */
};

struct dw__executor;

typedef struct dw__target {
    const dw_device *device;             /* has the arena, leaves, outputs and gradients */
    const struct dw__executor *executor; /* runs the instructions (executor.h) */
    size_t alignment;         /* in bytes, a power of two: of the arena and of each buffer in it */
    size_t binding_alignment; /* of the caller's tensors; 1: any */
    int threads; /* most host threads that run a kernel: kernels ask for scratch per thread */
    /* On a GPU: */
    const dw__context *context; /* NULL: a CPU */
    dw__gpu_target gpu;         /* for kernels' supports(); its name points to gpu_name */
    bool tf32;                  /* as in dw__call */
    char gpu_name[DW__TARGET_NAME];
} dw__target;

/* This CPU, with as many threads as dw_get_threads returns now. */
void dw__target_cpu(dw__target *target);
/* The device of the calling thread's current context. `graphs`: runs are replayed as CUDA graphs. DW_UNSUPPORTED: no
 * kernels run on the device. */
dw_status dw__target_of(const dw_device *device, bool graphs, dw__target *target);
/* Copies a target, whose parts point to one another. */
void dw__target_copy(dw__target *to, const dw__target *from);
/* True if a plan for `target` can run where one for `wanted` can. */
bool dw__target_serves(const dw__target *target, const dw__target *wanted);

#endif
