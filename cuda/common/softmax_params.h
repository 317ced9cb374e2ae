/* Softmax of rows: the parameters of its kernels (softmax.cu). Plain C, read by the host and by device code alike. */
#ifndef DW_SOFTMAX_PARAMS_H
#define DW_SOFTMAX_PARAMS_H

/* TYPE: the element type of every tensor. */
#define DW_SOFTMAX_BF16 0
#define DW_SOFTMAX_F16 1
#define DW_SOFTMAX_F32 2

/* Rows of `columns` contiguous elements; `*_stride` is the distance from row to row in elements. */
typedef struct dw_softmax_params {
    const void *x;  /* forward: the logits. Backward: what forward returned */
    const void *dy; /* backward: the gradient of what forward returned */
    void *result;   /* forward: y. Backward: the gradient of the logits */
    long long x_stride, dy_stride, result_stride;
    long long rows;
    int columns; /* at most what LANES * VECTORS vectors of 16 bytes hold; VECTORS 0: any */
} dw_softmax_params;

/* Threads of a block: 256, or LANES where a row has more. */
#define DW_SOFTMAX_BLOCK(lanes) ((lanes) > 256 ? (lanes) : 256)

#endif
