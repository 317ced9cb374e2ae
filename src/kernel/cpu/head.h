/* Declarations shared by the kernels of linear_cross_entropy (a linear layer followed by cross-entropy) and of its
 * backward. */
#ifndef DW_HEAD_H
#define DW_HEAD_H

#include "kernel/cpu/cpu.h"

typedef struct dw__head {
    int64_t tokens, size, vocabulary; /* T, K, V */
    const dw__tensor *x, *w, *b, *target;
    const dw__tensor *logits, *lse, *dloss; /* backward only; logits NULL: recompute them */
    float *dx, *dw, *db;                    /* backward only; NULL: not needed */
    float *made;                            /* forward only: where logits are stored, or NULL */
    bool transpose_w;                       /* w is [V, K], else [K, V] */
    bool is_mean, is_none;
    int64_t ignore_index;
    float label_smoothing;
    double normalizer; /* divisor of the loss: 1, or the number of valid targets */
} dw__head;

/* Reads a call of either operation. Returns false unless it is F32 and the rows of logits have unit stride. */
bool dw__head_read(const dw__call *call, dw__head *out);
/* Checks every target and counts those that are not ignored. */
dw_status dw__head_begin(dw__head *head);
int64_t dw__head_target(const dw__head *head, int64_t token);
/* Computes columns [column, column+columns) of one token's dlogits from the same columns of its logits (`out`
 * may be `logits`): p - ((1 - s) onehot + s / V), times the gradient of the loss; 0 for an ignored token. */
void dw__head_gradient_row(const dw__head *head, int64_t token, int64_t column, int64_t columns,
                           const float *logits, float *out);

/* linear_cross_entropy_blocks.c */
extern const dw__kernel dw__linear_cross_entropy_blocks;
extern const dw__kernel dw__linear_cross_entropy_backward_blocks;
/* Kernels that receive the logits: linear_cross_entropy_amx.c, linear_cross_entropy.c */
extern const dw__kernel dw__linear_cross_entropy_backward_amx;
extern const dw__kernel dw__linear_cross_entropy_backward_chunked;

#endif
