/* Batched matrix multiplication of any strides: the parameters of its kernel (matmul.cu). Plain C, read by the host and
 * by device code alike. */
#ifndef DW_MATMUL_PARAMS_H
#define DW_MATMUL_PARAMS_H

#define DW_MATMUL_AXES 6

/* A block of DW_MATMUL_THREADS threads computes a tile of so many rows and columns. */
#define DW_MATMUL_TILE 64
#define DW_MATMUL_DEPTH 16
#define DW_MATMUL_THREADS 256

/* Y[b] = A[b] B[b], or C[b] + A[b] B[b] with an addend C, with A [m, k], B [k, n], C and Y [m, n];
 * strides in elements. C may be Y. */
typedef struct dw_matmul_params {
    const void *a, *b;
    const void *addend; /* NULL: none */
    void *y;
    long long m, n, k;
    long long a_row, a_column, b_row, b_column, y_row, y_column, addend_row, addend_column;
    long long batches; /* at most 2^31 - 1 blocks in all */
    long long shape[DW_MATMUL_AXES], a_stride[DW_MATMUL_AXES], b_stride[DW_MATMUL_AXES],
        y_stride[DW_MATMUL_AXES], addend_stride[DW_MATMUL_AXES];
    int rank; /* of the batch; at least 1 */
} dw_matmul_params;

#endif
