/* The registry of GPU kernels, which explanations, the command line and the documentation's tests read. */
#ifndef DW_GPU_KERNELS_H
#define DW_GPU_KERNELS_H

#include "kernel/gpu_kernel.h"

extern const dw__gpu_kernel *const dw__gpu_kernels[];
extern const unsigned dw__gpu_kernel_count;
extern const dw__gpu_kernel dw__softmax; /* softmax.c */

/* The kernels that may compute a call on a target: of ours the one that supports it, or the first; then PyTorch's. */
void dw__gpu_candidates_of(dw__gpu_op op, const void *call, const dw__gpu_target *target,
                           dw__gpu_candidates *candidates);

/* The first kernel of the registry that supports a call of one of the graph's operations on `gpu`. DW_UNSUPPORTED: none
 * does. */
dw_status dw__gpu_kernel_for(const dw__operation_call *call, const dw__gpu_target *gpu,
                             const dw__gpu_kernel **kernel);

/* The kernels of the optional library, looked for once. DW_UNSUPPORTED: it is not there, and why. */
dw_status dw__gpu_kernels_provided(const dw__gpu_kernel **kernels, size_t *count);
/* The library's kernel that a call names. A name that is not known fails with a list of those that are: `own`,
 * Deepwell's, and the library's; or with the reason why the library is not there. */
dw_status dw__gpu_kernel_provided(dw__gpu_op op, const char *name, const char *own,
                                  const dw__gpu_kernel **kernel);

/* Where the kernel has been shown to be right; NULL: a library's that does not say. */
const char *dw__gpu_kernel_proof(const dw__gpu_kernel *kernel);
/* Of kernels whose hardware was never at hand. */
extern const char dw__gpu_proof_emulator[];

#endif
