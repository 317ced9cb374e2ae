/* AdamW of many tensors by one call, with gradient clipping by the norm of all gradients.
 *
 *     dw_adamw_gpu_group group = {.param_dtype = DW_BF16, .state_dtype = DW_BF16, .tensors = tensors, .count = 148,
 *                                 .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01};
 *     dw_adamw_gpu call = {.struct_size = sizeof call, .groups = &group, .group_count = 1, .max_norm = 1.0,
 *                          .workspace = workspace, .workspace_bytes = bytes, .stream = stream};
 *     if (dw_adamw_gpu_run(&call) != DW_OK) fprintf(stderr, "%s\n", dw_last_error());
 *
 * The formula and its roundings are those of torch.optim.AdamW(fused=True): FP32 arithmetic, each stored value rounded
 * once. Bits repeat. On a GPU it needs compute capability 9.0, 10.0, 10.3 or 12.0, or a device
 * "emulator:sm_90a", "emulator:sm_100a" or "emulator:sm_120a". The first use of each kernel on a GPU is checked. A
 * device "cpu" runs the same call on all cores in host memory; dw_adamw_step (deepwell/engine.h) is faster there if
 * everything is F32.
 *
 * States in fewer bits, and stochastic rounding. A number that is stored in BF16 may be rounded stochastically: up or
 * down with probabilities that make its expectation exact, so that changes below its precision add up. The random bits
 * are a function of the seed, the tensor's stream, its step and the element's position in memory: word
 * `element % 4` of Philox4x32-10 with the key `seed` and the counter {element / 4, stream, step, 0}. The low 16 bits w0
 * of the word round the parameter, the high 16 bits w1 round exp_avg_sq, and w0 ^ w1 rounds exp_avg; any two of the
 * three are independent. State_dtype DW_E4M3 stores blocks of DW_ADAMW_BLOCK elements, each with an F32 scale:
 *
 *     exp_avg     = code * scale            code: E4M3 (OFP8); scale: the block's largest magnitude / 448
 *     exp_avg_sq  = (code * scale)^2        code: 4 exponent and 4 fraction bits without a sign, exponent bias 7,
 *                                           largest 480, 0xFF is NaN; scale: the root of the block's largest number / 480
 *
 * The fraction bits come last, and exponent field 0 is subnormal. A positive exp_avg_sq never becomes 0. Stochastic
 * rounding of exp_avg_sq makes the expectation of the square exact. A number that is not finite becomes NaN. Calls with
 * stochastic rounding, DW_E4M3 or 0 compute without fused multiply-adds, so that every device gives the same bits for
 * the same factor of clipping.
 *
 * State_dtype 0 has no averages: param moves by -lr * grad, after weight decay, for optimizers that compute a direction
 * themselves. The betas must be 0, and eps is not read.
 *
 * Calls on a GPU are asynchronous on the caller's stream. They run in the calling thread's current context; if there is
 * none, in the first device's primary context. They allocate no device memory, do not synchronise except at a kernel's
 * first use, and may be captured in a CUDA graph, which keeps the addresses of the tensors. Up to 640 tensors of a
 * group share a launch, or 448 with copies or DW_E4M3 (80 and 56 with a driver older than CUDA 12.1). One launch per
 * 256 tensors precedes the updates, and one more per launch if gradients are clipped.
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

#define DW_ADAMW_BLOCK 128
/* Numbers in the member `scales` of a tensor of `count` elements. */
#define DW_ADAMW_SCALES(count) (2 * (((count) + DW_ADAMW_BLOCK - 1) / DW_ADAMW_BLOCK))

/* Device memory, contiguous. Addresses are aligned to an element, and updates are fastest if they are aligned to 16
 * bytes. */
typedef struct dw_adamw_gpu_tensor {
    void *param;                /* param_dtype; updated in place, like the two averages */
    void *grad;                 /* grad_dtype; written only if the call has a grad_scale */
    void *exp_avg, *exp_avg_sq; /* state_dtype; not read if that is 0 */
    float *step;                /* one number: updates so far. It is incremented. */
    int64_t count;              /* elements; at most 2^40 */
    void *copy; /* copy_dtype; receives the updated param, rounded to nearest even */
    /* state_dtype DW_E4M3: DW_ADAMW_SCALES(count) numbers, those of exp_avg before those of exp_avg_sq. */
    float *scales;
    uint32_t stream; /* numbers the tensor's random bits, below 2^20 */
} dw_adamw_gpu_tensor;

/* Tensors of the same types with the same options. */
typedef struct dw_adamw_gpu_group {
    /* DW_BF16, DW_F16 or DW_F32. A model that computes in BF16 with FP32 parameters behind it has param_dtype and
     * state_dtype DW_F32, grad_dtype and copy_dtype DW_BF16. */
    dw_dtype param_dtype, state_dtype; /* state_dtype may also be DW_E4M3, or 0 */
    dw_dtype grad_dtype;               /* 0: param_dtype */
    dw_dtype copy_dtype;               /* 0: tensors have no copy */
    const dw_adamw_gpu_tensor *tensors;
    uint32_t count;
    double lr, beta1, beta2, eps, weight_decay;
    const float *lr_at; /* device memory, read instead of lr; NULL: lr */
    int maximize;       /* 1: ascends the gradient */
    /* 1: parameters and averages that are stored in BF16, and codes of averages, are rounded stochastically. */
    int stochastic;
    uint64_t seed; /* of all random bits */
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

/* Runs a step. On the CPU it has returned when the step is done. DW_INVALID_ARGUMENT, DW_TYPE: the call is
 * inconsistent. DW_UNSUPPORTED: there is no kernel for this GPU, or the kernel failed its first-use check. */
DW_API dw_status dw_adamw_gpu_run(const dw_adamw_gpu *call);
/* Returns the bytes of workspace, which depend on the counts of elements; 0 on the CPU. */
DW_API dw_status dw_adamw_gpu_workspace(const dw_adamw_gpu *call, size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
