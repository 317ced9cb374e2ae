/* Cross-entropy behind the GEMM of sm_90a (sm90_loss.cuh): launch parameters. Plain C, read by the host and by device
 * code. */
#ifndef DW_SM90_LOSS_PARAMS_H
#define DW_SM90_LOSS_PARAMS_H

/* LOSS. Statistics: D's elements are logits, whose largest and sum of exponentials are found for each row and tile of
 * columns. Gradient: D is the gradient of the logits. */
#define DW_SM90_LOSS_STATISTICS 1
#define DW_SM90_LOSS_GRADIENT 2

/* A row's share of its gradient, weight * (e^(x - lse) - even - hit at the target), 16 bytes. */
typedef struct dw_sm90_loss_row {
    float lse;    /* times log2 e */
    float weight; /* the gradient of the row's loss */
    float even;   /* times weight */
    int target;   /* the class, or DW_SM90_LOSS_IGNORED: the gradient is 0 */
} dw_sm90_loss_row;
#define DW_SM90_LOSS_IGNORED (-(1 << 30) - 1) /* less a class, still a 32-bit integer */

/* A warp has so many strips of 16 rows and 32 columns of D on their way to memory. */
#define DW_SM90_LOSS_STRIPS 2
#define DW_SM90_LOSS_STRIP_COLUMNS 32
#define DW_SM90_LOSS_STRIP_ROWS 16
#define DW_SM90_LOSS_STRIP_BYTES (DW_SM90_LOSS_STRIP_ROWS * DW_SM90_LOSS_STRIP_COLUMNS * 2)
#define DW_SM90_LOSS_SHARED_BYTES (8 * DW_SM90_LOSS_STRIPS * DW_SM90_LOSS_STRIP_BYTES)

/* Slots of pieces of rows beside a GEMM. */
#define DW_SM90_BESIDE_WARPS 3
#define DW_SM90_BESIDE_SLOTS 5
#define DW_SM90_BESIDE_BYTES 2048
#define DW_SM90_BESIDE_SHARED_BYTES                                                                \
    (DW_SM90_BESIDE_WARPS * DW_SM90_BESIDE_SLOTS * (DW_SM90_BESIDE_BYTES + 8) + 16)

typedef struct dw_sm90_loss {
    /* Statistics: [tile of columns][row] the largest logit, the sum of exponentials relative to it and, if not NULL, the
     * sum of logits; [row] the target's logit, written if the target is a class. */
    const long long *target;
    float *largest, *sums, *logit_sums, *at_target;
    /* Gradient */
    const dw_sm90_loss_row *rows;
    float hit;
    int first; /* the class of D's first column, or of the first logit beside */
    /* Beside a GEMM (sm90_beside.cuh): gradients of `count` rows of logits, or none. They may take the logits' place. Rows
     * of both begin at multiples of 16 bytes. */
    const void *logits;
    void *gradients;
    long long logits_stride, gradients_stride;
    int count, columns;
} dw_sm90_loss;

#endif
