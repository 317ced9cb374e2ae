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
    long long rows;
    long long part_rows,
        parts; /* one block of backward processes one part: the next part_rows rows */
    double eps;
    /* at most as many as LANES * VECTORS vectors of 16 bytes hold; any number if VECTORS is 0 */
    int columns;
} dw_norm_params;

/* Threads of a block: 128 in forward, or LANES if that is larger. In backward as many as the registers of an SM suffice
 * for, since each block has sums of its own. */
#define DW_NORM_BLOCK(lanes) ((lanes) > 128 ? (lanes) : 128)
#define DW_NORM_BACKWARD_BLOCK(lanes, is_centred) ((lanes) == 32 && (is_centred) ? 384 : 512)

/* Rows that a thread of backward processes at most, one after the other. */
#define DW_NORM_MOST_ROWS 64

/* Rows that a thread of backward copies to shared memory ahead: up to 3, as far as 84 KiB hold them, which every GPU has
 * beside the kernel's variables. Then the dynamic shared memory of a block, which is used for the sums of its rows, too. */
#define DW_NORM_ROW_BYTES(vectors, block) (2 * 16 * (vectors) * (block))
#define DW_NORM_ROWS_AHEAD(vectors, block)                                                         \
    (3 * DW_NORM_ROW_BYTES(vectors, block) <= 84 << 10   ? 3                                       \
     : 2 * DW_NORM_ROW_BYTES(vectors, block) <= 84 << 10 ? 2                                       \
                                                         : 1)
#define DW_NORM_SUM_BYTES(lanes, vectors, block, value_bytes)                                      \
    ((block) / (lanes) / 2 * (lanes) * (vectors) * ((value_bytes) == 8 ? 16 : 32))
#define DW_NORM_BACKWARD_SHARED(lanes, vectors, block, aligned, value_bytes)                       \
    ((aligned) && (lanes) > 32 &&                                                                  \
             DW_NORM_ROWS_AHEAD(vectors, block) * DW_NORM_ROW_BYTES(vectors, block) >              \
                 DW_NORM_SUM_BYTES(lanes, vectors, block, value_bytes)                             \
         ? DW_NORM_ROWS_AHEAD(vectors, block) * DW_NORM_ROW_BYTES(vectors, block)                  \
         : DW_NORM_SUM_BYTES(lanes, vectors, block, value_bytes))

/* Blocks of forward that an SM holds at once, where a row has few registers. */
#define DW_NORM_FORWARD_BLOCKS(lanes) (1024 / DW_NORM_BLOCK(lanes))

/* Columns and threads of a block that adds the parts. */
#define DW_NORM_SUM_COLUMNS 32
#define DW_NORM_SUM_THREADS 1024

#endif
