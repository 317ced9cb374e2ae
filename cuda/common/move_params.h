/* Copies, fills and index ramps of strided tensors: the parameters of their kernels (move.cu). Plain C, read by the
 * host and by device code alike. */
#ifndef DW_MOVE_PARAMS_H
#define DW_MOVE_PARAMS_H

#define DW_MOVE_AXES 8

typedef struct dw_move_params {
    const void *from; /* move_copy */
    void *to;
    unsigned long long value; /* move_fill: the element's bytes, the first one lowest */
    long long count;          /* elements */
    long long shape[DW_MOVE_AXES];
    long long from_stride[DW_MOVE_AXES], to_stride[DW_MOVE_AXES]; /* in elements */
    int rank;                                                     /* at least 1 */
    int type;                                                     /* move_iota: DW_ELEMENT_ */
} dw_move_params;

#endif
