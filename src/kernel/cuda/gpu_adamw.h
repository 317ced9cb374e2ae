/* AdamW on a GPU: declarations shared by the family's files and their tests. */
#ifndef DW_GPU_ADAMW_H
#define DW_GPU_ADAMW_H

#include "deepwell/adamw.h"
#include "kernel/gpu_kernel.h"

/* The compile-time parameters of a variant. */
typedef union dw__adamw_shape {
    struct {
        uint64_t param : 8, state : 8; /* dw_dtype */
        uint64_t tensors : 16;         /* length of a launch's table */
        uint64_t grad : 8, copy : 8;   /* dw_dtype; copy 0: none */
        uint64_t stochastic : 8;
        uint64_t unused : 8;
    };
    uint64_t params; /* of dw__variant */
} dw__adamw_shape;
_Static_assert(sizeof(dw__adamw_shape) == sizeof(uint64_t), "packed, and no bit is padding");

extern const dw__kernel dw__gpu_adamw_update;
extern const dw__first_use dw__adamw_first_use; /* adamw_first_use.c */

/* Returns whether calls of a variant give the same bits on every device. */
static inline bool dw__adamw_exact(dw__adamw_shape shape) {
    return shape.stochastic || shape.state == DW_E4M3 || shape.state == 0;
}

/* A checked call on the CPU (cpu/adamw_call.c). */
dw_status dw__adamw_cpu_run(const dw_adamw_gpu *call);

/* Makes the kernels of a group's types ready in the current context, so that later calls load nothing. */
dw_status dw__adamw_prepare(const dw_device *device, const dw_adamw_gpu_group *group);

/* The definition in FP64 of one element's step, for checks. */
typedef struct dw__adamw_element {
    double p, g, m, v;
    /* after a step: magnitudes of the terms whose sum is p or m, which bound rounding errors */
    double p_size, m_size;
} dw__adamw_element;
/* `clip` is the factor of clipping, `scale` that of GradScaler, `step` the count after this step. */
void dw__adamw_define(const dw_adamw_gpu_group *group, double step, double scale, double clip,
                      dw__adamw_element *e);
/* Returns the bound for the difference between a stored number and its definition: the rounding to `type` of `value`,
 * and 16 roundings in FP32 of terms of magnitude `size`. */
double dw__adamw_bound(dw_dtype type, double value, double size);

#endif
