/* Calls of a CPU's kernel without a plan. */
#ifndef DW_KERNEL_CALL_H
#define DW_KERNEL_CALL_H

#include "kernel/kernel.h"

static inline bool kernel_supports(const dw__kernel *kernel, const dw__call *call) {
    return kernel->supports(kernel, call, NULL) == DW_OK;
}

/* The bytes of workspace that a supported call needs. */
static inline size_t kernel_workspace(const dw__kernel *kernel, const dw__call *call) {
    size_t bytes = 0;
    if (!kernel->workspace_bytes) return 0;
    return kernel->workspace_bytes(kernel, call, NULL, &bytes) == DW_OK ? bytes : SIZE_MAX;
}

#endif
