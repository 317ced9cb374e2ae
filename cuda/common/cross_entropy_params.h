/* Launch parameters of the kernels of cross-entropy (cross_entropy.cu). Plain C, read by the host and by device
 * code. */
#ifndef DW_CROSS_ENTROPY_PARAMS_H
#define DW_CROSS_ENTROPY_PARAMS_H

#include "data_error.h"
#include "sm90/sm90_loss_params.h"

#define DW_LOSS_MEAN 0
#define DW_LOSS_SUM 1
#define DW_LOSS_NONE 2

/* Rows of `columns` contiguous logits, `x_stride` elements from row to row. Backward may be given a part of the
 * classes: those from `first` on. All else is contiguous. */
typedef struct dw_cross_entropy_params {
    const void *x;    /* backward: dx may be the same memory */
    const void *bias; /* added to the logits of each row, of their type; NULL: none */
    const long long *target;
    void *lse;         /* one for each row. Forward: a result, NULL if unwanted */
    void *loss;        /* forward: one for each row, or their sum or mean; NULL if unwanted */
    const void *dloss; /* backward: of each row, or of their sum or mean */
    /* Backward: the gradient of x. Forward: x, if the sums of logits and bias are to be stored there; else NULL. */
    void *dx;
    /* Workspace, of the type that sums are computed in. Forward: the losses of rows, unless the reduction is none.
     * Backward: dloss divided by the number of targets that count, if the reduction is mean. */
    void *partials;
    long long x_stride, dx_stride, rows, ignored;
    double smoothing;
    int columns, classes, first, reduction;
    dw_data_error error;
} dw_cross_entropy_params;

/* The tiles of logits of a GEMM. */
typedef struct dw_cross_entropy_tile_params {
    dw_cross_entropy_params row;
    dw_sm90_loss loss; /* forward: the statistics of `tiles` tiles of columns */
    int tiles;
    dw_sm90_loss_row *weights; /* backward: a result */
} dw_cross_entropy_tile_params;

/* Sums to round to the logits' type. */
typedef struct dw_cross_entropy_round_params {
    const void *sums; /* of the type that sums are computed in */
    void *result;
    long long count;
} dw_cross_entropy_round_params;

/* Threads of a block: 256, or LANES if that is larger. */
#define DW_LOSS_BLOCK(lanes) ((lanes) > 256 ? (lanes) : 256)
#define DW_LOSS_COMBINE_THREADS 256
/* Threads of the one block that adds over rows. */
#define DW_LOSS_SUM_THREADS 1024

#endif
