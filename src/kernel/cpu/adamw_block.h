/* Inner loops of AdamW for parameters, gradients and averages of every type (deepwell/adamw.h), a block of
 * DW_ADAMW_BLOCK elements at a time. They use no fused multiply-adds: every instruction set and every GPU gives the
 * same bits. */
#ifndef DW_CPU_ADAMW_BLOCK_H
#define DW_CPU_ADAMW_BLOCK_H

#include "base/base.h"
#include "deepwell/adamw.h"

/* The numbers of a tensor's step, as in cuda/common/adamw.cu. */
typedef struct dw__adamw_factors {
    float unscale, clip; /* clip has the sign of maximize */
    float decay, beta1, beta2, one_minus_beta1, one_minus_beta2, step_size, inverse_root, eps;
    uint32_t step;
    bool store_gradients; /* unscaled gradients replace the gradients */
} dw__adamw_factors;

typedef struct dw__adamw_loops {
    /* Updates block number `block` of a tensor. */
    void (*update)(const dw_adamw_gpu_group *group, const dw_adamw_gpu_tensor *tensor,
                   const dw__adamw_factors *factors, int64_t block);
    /* Returns the sum of the squares of `count` gradients from `first` on. */
    double (*squares)(dw_dtype dtype, const void *grad, int64_t first, int64_t count);
} dw__adamw_loops;

#endif
