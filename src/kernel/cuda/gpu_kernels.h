/* The registry of GPU kernels: ours, which explanations, the command line and the documentation's tests read. */
#ifndef DW_GPU_KERNELS_H
#define DW_GPU_KERNELS_H

#include "kernel/gpu_kernel.h"

extern const dw__gpu_kernel *const dw__gpu_kernels[];
extern const unsigned dw__gpu_kernel_count;

/* Of kernels whose hardware was never at hand. */
extern const char dw__gpu_proof_emulator[];

#endif
