/* Launch parameters of the kernels of layer norm and RMS norm (norm.cu). Plain C, read by the host and by device
 * code. */
#ifndef DW_NORM_PARAMS_H
#define DW_NORM_PARAMS_H

/* Rows of `columns` contiguous elements; `*_stride` is the distance from row to row in elements. Statistics are
 * contiguous, one for each row, F32 (F64 in F64); w, b and their gradients have `columns` contiguous elements. */
typedef struct dw_norm_params {
    const void *x, *dy; /* dy: backward */
    const void *w, *b;  /* NULL: absent */
    const void *addend; /* added to the result, which may be the same; NULL: none */
    void *result;       /* y or dx; backward: NULL if unwanted */
    void *mean,
        *rstd; /* results of forward, NULL if unwanted; operands of backward. RMS norm has no mean */
    void *dw, *db; /* NULL: unwanted */
    void *
        partials; /* backward: [2][parts][columns] of the type that sums are computed in, first those of dw */
    long long x_stride, dy_stride, addend_stride, result_stride;
    long long rows, part_rows, parts; /* one block processes one part: the next part_rows rows */
    double eps;
    /* at most as many as LANES * VECTORS vectors of 16 bytes hold; any number if VECTORS is 0 */
    int columns;
} dw_norm_params;

/* Threads of a block: 128 in forward, or LANES if that is larger. In backward as many as the registers of an SM suffice
 * for, since each block has sums of its own. */
#define DW_NORM_BLOCK(lanes) ((lanes) > 128 ? (lanes) : 128)
#define DW_NORM_BACKWARD_BLOCK(lanes, is_centred) ((lanes) == 32 && (is_centred) ? 384 : 512)

/* Blocks of forward that an SM holds at once, where a row has few registers. */
#define DW_NORM_FORWARD_BLOCKS(lanes) (1024 / DW_NORM_BLOCK(lanes))

/* Columns and threads of a block that adds the parts. */
#define DW_NORM_SUM_COLUMNS 32
#define DW_NORM_SUM_THREADS 1024

#endif
