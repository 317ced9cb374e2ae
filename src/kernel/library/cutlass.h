/* libdeepwell_cutlass.so, where `make cutlass` has built it (docs/cutlass.md): kernels that CUTLASS's templates make.
 * Looked for once: DEEPWELL_CUTLASS names the file; else it lies beside libdeepwell.so, or where the loader looks. */
#ifndef DW_LIBRARY_CUTLASS_H
#define DW_LIBRARY_CUTLASS_H

#include "base/base.h"
#include "cutlass/provider.h"
#include "device/device.h"
#include "kernel/cuda/gpu_target.h"

enum { DW__CUTLASS_KERNELS = 64 }; /* at most */

typedef struct dw__cutlass {
    const dw_cutlass_kernel *kernels;
    size_t count;
    const char *version;        /* CUTLASS's: "4.2.0" */
    const char *(*error)(void); /* of the calling thread's last call that did not succeed */
} dw__cutlass;

/* DW_UNSUPPORTED: it is not there, and why. */
dw_status dw__cutlass_load(const dw__cutlass **library);

/* ---- calls ----------------------------------------------------------------------------------------- */

/* DW_TYPE: the kernel is for another GPU. NULL: any GPU. */
dw_status dw__cutlass_is_for(const dw_cutlass_kernel *kernel, const dw__gpu_target *gpu);

/* Whether the kernel runs on the context's GPU, and through the CUDA runtime at all. */
dw_status dw__cutlass_runs_in(const dw_cutlass_kernel *kernel, const dw__context *context);

/* Of a caller's workspace: `needed` bytes, at a multiple of 256. */
dw_status dw__cutlass_workspace(const dw_cutlass_kernel *kernel, const void *workspace,
                                size_t bytes, size_t needed);

/* What a function of the kernel returned, with the library's words: DW_UNSUPPORTED where it does not take the call. */
dw_status dw__cutlass_status(const dw_cutlass_kernel *kernel, dw_cutlass_result result);

#endif
