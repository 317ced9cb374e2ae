/* Launch parameters of the softmax kernels (softmax.cu). Plain C, read by the host and by device code. */
#ifndef DW_SOFTMAX_PARAMS_H
#define DW_SOFTMAX_PARAMS_H

/* TYPE: the element type of every tensor. */
#define DW_SOFTMAX_BF16 0
#define DW_SOFTMAX_F16 1
#define DW_SOFTMAX_F32 2

/* Rows of `columns` contiguous elements; `*_stride` is the distance from row to row in elements. */
typedef struct dw_softmax_params {
    const void *x;  /* forward: the logits. Backward: the output of forward */
    const void *dy; /* backward: the gradient of forward's output */
    void *result;   /* forward: y. Backward: the gradient of the logits */
    long long x_stride, dy_stride, result_stride;
    long long rows;
    /* at most as many as LANES * VECTORS vectors of 16 bytes hold; any number if VECTORS is 0 */
    int columns;
} dw_softmax_params;

/* Threads of a block: 256, or LANES if that is larger. */
#define DW_SOFTMAX_BLOCK(lanes) ((lanes) > 256 ? (lanes) : 256)

#endif
