/* Our GPU kernels: what each takes, and what is known of it. One table, which explanations, the command line and the
 * documentation's tests read. */
#ifndef DW_GPU_KERNELS_H
#define DW_GPU_KERNELS_H

#include <stdbool.h>

typedef struct dw__gpu_kernel {
    const char *name; /* its entry point */
    const char *operation, *source;
    const char *architectures; /* what it is compiled for, and who loads that */
    const char *elements, *needs;
    const char *proof; /* where it has been shown to be right */
    const char *use;   /* when it is taken */
} dw__gpu_kernel;

extern const dw__gpu_kernel dw__gpu_kernels[];
extern const unsigned dw__gpu_kernel_count;

/* Of kernels whose hardware was never at hand. */
extern const char dw__gpu_proof_emulator[];

/* Whether kernels are compared at their first use: not with DEEPWELL_GUARD=off, for tools that watch one kernel. */
bool dw__gpu_guard_is_on(void);

#endif
