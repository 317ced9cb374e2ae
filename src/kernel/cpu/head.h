/* A linear layer and cross-entropy after it: what the kernels of linear_cross_entropy and of its backward
 * share. */
#ifndef DW_HEAD_H
#define DW_HEAD_H

#include "kernel/cpu/cpu.h"

typedef struct dw__head {
    int64_t tokens, size, vocabulary; /* T, K, V */
    const dw__tensor *x, *w, *b, *target;
    const dw__tensor *logits, *lse, *dloss; /* backward's; logits NULL: to be made again */
    float *dx, *dw, *db;                    /* backward's; NULL: not wanted */
    bool transpose_w;                       /* w is [V, K], else [K, V] */
    bool is_mean, is_none;
    int64_t ignore_index;
    float label_smoothing;
    double normalizer; /* of the loss: 1, or targets that count; set by dw__head_begin */
} dw__head;

/* Reads a call of either operation. False when it is not one of F32 with rows of logits that can be walked
 * with a pointer. */
bool dw__head_read(const dw__call *call, dw__head *out);
/* Checks every target and counts those that are not ignored. */
dw_status dw__head_begin(dw__head *head);
int64_t dw__head_target(const dw__head *head, int64_t token);
/* Columns [column, column+columns) of dlogits of one token, from the same columns of its logits (`out` may be
 * `logits`): p - ((1 - s) onehot + s / V), times the loss's own gradient; 0 for a token that is ignored. */
void dw__head_gradient_row(const dw__head *head, int64_t token, int64_t column, int64_t columns,
                           const float *logits, float *out);

/* linear_cross_entropy_blocks.c */
extern const dw__kernel dw__linear_cross_entropy_blocks;
extern const dw__kernel dw__linear_cross_entropy_backward_blocks;
/* Those that are given the logits: linear_cross_entropy_amx.c, linear_cross_entropy.c */
extern const dw__kernel dw__linear_cross_entropy_backward_amx;
extern const dw__kernel dw__linear_cross_entropy_backward_chunked;

#endif
