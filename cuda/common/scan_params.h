/* Running sums along an axis of a strided tensor: the parameters of their kernel (scan.cu). Plain C, read by the host
 * and by device code alike. */
#ifndef DW_SCAN_PARAMS_H
#define DW_SCAN_PARAMS_H

#define DW_SCAN_AXES 8

/* Threads of a block. */
#define DW_SCAN_THREADS 256

/* The axes of rows, with each tensor's strides in elements; the rank is at least 1. */
typedef struct dw_scan_params {
    const void *x;
    void *result;
    long long count;  /* of rows */
    long long length; /* elements of a row */
    long long shape[DW_SCAN_AXES], x_stride[DW_SCAN_AXES], result_stride[DW_SCAN_AXES];
    long long x_step, result_step; /* from one element of a row to the next */
    int rank;
    int reverse; /* 1: sums from the end of the row */
} dw_scan_params;

#endif
