/* libdeepwell_cutlass.so, which `make cutlass` builds (docs/cutlass.md): kernels made from CUTLASS's templates. It is
 * looked for once: in the file that DEEPWELL_CUTLASS names, beside libdeepwell.so, and in the loader's folders. */
#ifndef DW_LIBRARY_CUTLASS_H
#define DW_LIBRARY_CUTLASS_H

#include "base/base.h"
#include "cutlass/provider.h"
#include "device/device_table.h"
#include "kernel/cuda/gpu_target.h"

enum { DW__CUTLASS_KERNELS = 64 }; /* most kernels of the library */

typedef struct dw__cutlass {
    const dw_cutlass_kernel *kernels;
    size_t count;
    const char *version;        /* CUTLASS's version: "4.2.0" */
    const char *(*error)(void); /* message of the calling thread's last failed call */
} dw__cutlass;

/* DW_UNSUPPORTED says why the library is not available. */
dw_status dw__cutlass_load(const dw__cutlass **library);

/* ---- calls ----------------------------------------------------------------------------------------- */

/* DW_TYPE: the kernel is for another GPU. `gpu` NULL means any GPU. */
dw_status dw__cutlass_is_for(const dw_cutlass_kernel *kernel, const dw__gpu_target *gpu);

/* Checks whether the kernel runs on the context's GPU, and whether the CUDA runtime works. */
dw_status dw__cutlass_runs_in(const dw_cutlass_kernel *kernel, const dw__context *context);

/* Converts the result of one of the library's functions, with the library's message. DW_UNSUPPORTED: the kernel does
 * not support the call. */
dw_status dw__cutlass_status(const dw_cutlass_kernel *kernel, dw_cutlass_result result);

#endif
