/* Batched matrix multiplication of any strides: the parameters of its kernel (matmul.cu). Plain C, read by the host and
 * by device code alike. */
#ifndef DW_MATMUL_PARAMS_H
#define DW_MATMUL_PARAMS_H

#define DW_MATMUL_AXES 6

/* A block of DW_MATMUL_THREADS threads computes a tile of so many rows and columns. */
#define DW_MATMUL_TILE 64
#define DW_MATMUL_DEPTH 16
#define DW_MATMUL_THREADS 256

/* Y[b] = A[b] B[b], or Y[b] + A[b] B[b] if `accumulates`, with A [m, k], B [k, n]; strides in elements. */
typedef struct dw_matmul_params {
    const void *a, *b;
    void *y;
    long long m, n, k;
    long long a_row, a_column, b_row, b_column, y_row, y_column;
    long long batches; /* at most 2^31 - 1 blocks in all */
    long long shape[DW_MATMUL_AXES], a_stride[DW_MATMUL_AXES], b_stride[DW_MATMUL_AXES],
        y_stride[DW_MATMUL_AXES];
    int rank; /* of the batch; at least 1 */
    int accumulates;
} dw_matmul_params;

#endif
