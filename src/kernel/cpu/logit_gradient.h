/* The gradient of cross-entropy with respect to its logits, some rows at a time: inner loops that are
 * compiled once per instruction set (isa/logit_gradient_loops.c). */
#ifndef DW_LOGIT_GRADIENT_H
#define DW_LOGIT_GRADIENT_H

#include "kernel/cpu/cpu.h"

typedef struct dw__logit_gradient_loops {
    /* out[j] = factor * (exp(logits[j] - lse) - smooth) */
    void (*row)(int64_t count, const float *logits, float lse, float factor, float smooth,
                float *out);
    /* sums[j] (+)= x[0][j] + x[1][j] + ...; adds to sums if `accumulate`, else replaces it */
    void (*column_sums)(int64_t rows, int64_t columns, const float *x, int64_t stride,
                        bool accumulate, float *sums);
} dw__logit_gradient_loops;

#endif
