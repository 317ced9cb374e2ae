/* Reductions over axes of a strided tensor: the parameters of their kernel (reduce.cu). Plain C, read by the host and
 * by device code alike. */
#ifndef DW_REDUCE_PARAMS_H
#define DW_REDUCE_PARAMS_H

#define DW_REDUCE_AXES 8

/* REDUCTION */
#define DW_REDUCE_SUM 0
#define DW_REDUCE_MAX 1
#define DW_REDUCE_MIN 2
#define DW_REDUCE_PROD 3
#define DW_REDUCE_ARG_MAX 4 /* the index along the reduced axis, as I64 */
#define DW_REDUCE_ARG_MIN 5

/* Threads of a block. */
#define DW_REDUCE_THREADS 256

/* Axes that stay and axes that are reduced, with the operand's strides in elements; each rank is at least 1. */
typedef struct dw_reduce_params {
    const void *x;
    void *result;
    long long count;   /* of results */
    long long reduced; /* elements that make one result; may be 0 */
    long long shape[DW_REDUCE_AXES], x_stride[DW_REDUCE_AXES], result_stride[DW_REDUCE_AXES];
    long long reduced_shape[DW_REDUCE_AXES], reduced_stride[DW_REDUCE_AXES];
    int rank, reduced_rank;
} dw_reduce_params;

#endif
