/* AdamW on a GPU: updates many tensors in one launch, with gradient clipping by the norm of all gradients.
 *
 *     dw_adamw_gpu_group group = {.param_dtype = DW_BF16, .state_dtype = DW_BF16, .tensors = tensors, .count = 148,
 *                                 .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01};
 *     dw_adamw_gpu call = {.struct_size = sizeof call, .groups = &group, .group_count = 1, .max_norm = 1.0,
 *                          .workspace = workspace, .workspace_bytes = bytes, .stream = stream};
 *     if (dw_adamw_gpu_run(&call) != DW_OK) fprintf(stderr, "%s\n", dw_last_error());
 *
 * The formula and its roundings are those of torch.optim.AdamW(fused=True): FP32 arithmetic, each stored value rounded
 * once. Bits repeat. It needs compute capability 9.0, 10.0 or 10.3, or a device "emulator:sm_90a" or
 * "emulator:sm_100a". It has been tested on the emulator but not on hardware. The first use of each kernel on a GPU
 * compares it with the formula in FP64. dw_adamw_step (deepwell/engine.h) is the update on a CPU.
 *
 * Calls are asynchronous on the caller's stream. They run in the calling thread's current context; if there is none, in
 * the first device's primary context. They allocate no device memory, do not synchronise except at a kernel's first
 * use, and may be captured in a CUDA graph, which keeps the addresses of the tensors. Up to 640 tensors of a group share
 * a launch (80 with a driver older than CUDA 12.1; 8 with copies). One launch per 256 tensors precedes the updates, and one more per
 * launch if gradients are clipped.
 */
#ifndef DEEPWELL_ADAMW_H
#define DEEPWELL_ADAMW_H

#include "deepwell/device.h"
#include "deepwell/dtype.h"
#include "deepwell/status.h"
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Device memory, contiguous. Addresses are aligned to an element, and updates are fastest if they are aligned to 16
 * bytes. */
typedef struct dw_adamw_gpu_tensor {
    void *param;                /* param_dtype; updated in place, like the two averages */
    void *grad;                 /* grad_dtype; written only if the call has a grad_scale */
    void *exp_avg, *exp_avg_sq; /* state_dtype */
    float *step;                /* one number: updates so far. It is incremented. */
    int64_t count;              /* elements; at most 2^40 */
    void *copy; /* copy_dtype; receives the updated param, rounded to nearest even */
} dw_adamw_gpu_tensor;

/* Tensors of the same types with the same options. */
typedef struct dw_adamw_gpu_group {
    /* DW_BF16, DW_F16 or DW_F32. A model that computes in BF16 with FP32 parameters behind it has param_dtype and
     * state_dtype DW_F32, grad_dtype and copy_dtype DW_BF16. */
    dw_dtype param_dtype, state_dtype;
    dw_dtype grad_dtype; /* 0: param_dtype */
    dw_dtype copy_dtype; /* 0: tensors have no copy */
    const dw_adamw_gpu_tensor *tensors;
    uint32_t count;
    double lr, beta1, beta2, eps, weight_decay;
    const float *lr_at; /* device memory, read instead of lr; NULL: lr */
    int maximize;       /* 1: ascends the gradient */
} dw_adamw_gpu_group;

/* The result of a step. It lies in device memory. */
typedef struct dw_adamw_gpu_outcome {
    double norm; /* before clipping; 0 without clipping */
    int applied; /* 0: tensors and steps are unchanged */
} dw_adamw_gpu_outcome;

/* One step. Fill it with zeros first. */
typedef struct dw_adamw_gpu {
    size_t struct_size;      /* sizeof(dw_adamw_gpu) */
    const dw_device *device; /* NULL: "cuda" */
    const dw_adamw_gpu_group *groups;
    uint32_t group_count;
    /* Gradients of all groups are multiplied by min(1, max_norm / (norm + 1e-6)), where norm is the root of the sum of
     * their squares, as torch.nn.utils.clip_grad_norm_ does; the gradients in memory keep their values. 0: no
     * clipping. Infinity: the norm is computed, and nothing is clipped. */
    double max_norm;
    /* Device memory, as of torch.amp.GradScaler; NULL: none. Gradients are divided by *grad_scale first, also in
     * memory. If *found_inf is 1, neither tensors nor steps change. */
    const float *grad_scale, *found_inf;
    float *
        norm; /* device memory; receives the norm before clipping, 0 without clipping. NULL: unwanted */
    int finite_only; /* 1: if the norm is computed and not finite, neither tensors nor steps change */
    dw_adamw_gpu_outcome *outcome; /* device memory; NULL: unwanted */
    void *workspace; /* device memory of dw_adamw_gpu_workspace bytes, at a multiple of 16 */
    size_t workspace_bytes;
    void *stream; /* CUstream; NULL is the legacy default stream */
} dw_adamw_gpu;

/* Runs a step. DW_INVALID_ARGUMENT, DW_TYPE: the call is inconsistent. DW_UNSUPPORTED: there is no kernel for this GPU,
 * or the kernel failed its first-use check. */
DW_API dw_status dw_adamw_gpu_run(const dw_adamw_gpu *call);
/* Returns the bytes of workspace, which depend on the counts of elements. */
DW_API dw_status dw_adamw_gpu_workspace(const dw_adamw_gpu *call, size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
