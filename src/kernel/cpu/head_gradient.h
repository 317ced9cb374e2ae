/* The gradient of cross_entropy(linear(x, w, b)): what its kernels share. */
#ifndef DW_HEAD_GRADIENT_H
#define DW_HEAD_GRADIENT_H

#include "kernel/cpu/cpu.h"

typedef struct dw__head_gradient {
    int64_t tokens, size, vocabulary; /* T, K, V */
    const dw__tensor *x, *w, *logits, *target, *lse, *dloss;
    float *dx, *dw, *db; /* NULL: not wanted */
    bool transpose_w;    /* w is [V, K], else [K, V] */
    bool is_mean, is_none;
    int64_t ignore_index;
    float label_smoothing;
    double normalizer; /* of the loss: 1, or targets that count; set by dw__head_gradient_begin */
} dw__head_gradient;

/* False when the call is not one of F32 with rows of logits that can be walked with a pointer. */
bool dw__head_gradient_read(const dw__call *call, dw__head_gradient *out);
/* Checks every target and counts those that are not ignored. */
dw_status dw__head_gradient_begin(dw__head_gradient *g);
/* Columns [column, column+columns) of dlogits of one token: p - ((1 - s) onehot + s / V), times the loss's
 * own gradient; 0 for a token that is ignored. */
void dw__head_gradient_row(const dw__head_gradient *g, int64_t token, int64_t column,
                           int64_t columns, float *out);

#endif
