/* Inner loops of cross-entropy and of AdamW, and the kernels that adamw.c adds to loss.c's list. */
#ifndef DW_CPU_LOSS_H
#define DW_CPU_LOSS_H

#include "kernel/kernel.h"

typedef struct dw__row_sums {
    double max;       /* the shift of exp: maximum of the row, or 0 if that is -inf */
    double exponents; /* sum of e^(x - max) */
    double plain;     /* sum of x */
} dw__row_sums;

/* One AdamW update as in torch.optim.AdamW. The constants are computed in double. */
typedef struct dw__adamw_constants {
    float grad_scale; /* negative to maximize */
    float decay;      /* 1 - lr * weight_decay */
    float one_minus_beta1, beta2, one_minus_beta2;
    float inverse_sqrt_correction2; /* 1 / sqrt(1 - beta2^step) */
    float eps;
    float step_size; /* lr / (1 - beta1^step) */
} dw__adamw_constants;

typedef struct dw__loss_loops {
    /* One pass over memory; n >= 1. */
    dw__row_sums (*row_sums)(int64_t n, const float *x);
    /* dx = (e^(x - lse) - even) * weight */
    void (*backward_row)(int64_t n, const float *x, float lse, float even, float weight, float *dx);
    /* Outputs may be inputs or NULL. */
    void (*adamw)(int64_t n, const dw__adamw_constants *constants, const float *p, const float *g,
                  const float *m, const float *v, float *p_out, float *m_out, float *v_out);
} dw__loss_loops;

extern const dw__kernel dw__cpu_adamw; /* adamw.c */

#endif
