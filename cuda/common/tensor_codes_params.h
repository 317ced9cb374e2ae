/* FP8 codes of a matrix with one scale, and products of codes: the parameters of their kernels (tensor_codes.cu). Plain
 * C, read by the host and by device code alike. */
#ifndef DW_TENSOR_CODES_PARAMS_H
#define DW_TENSOR_CODES_PARAMS_H

#define DW_TENSOR_CODES_THREADS 512
/* The most blocks that look for the largest magnitude: each stores one number. More numbers than that, of the kernel
 * that made the matrix, are combined to fewer first, by so many blocks. */
#define DW_TENSOR_CODES_PARTS 1024
#define DW_TENSOR_CODES_COMBINING 32
/* A tile of quantize_tensor_codes has so many rows and columns. */
#define DW_TENSOR_CODES_TILE 128
/* Blocks of either kernel for each SM: enough loads are in flight, and there are registers for them. */
#define DW_TENSOR_CODES_RESIDENT 3

typedef struct dw_tensor_codes_params {
    const void *x;     /* [rows, columns], strides in elements */
    int rows, columns; /* below 2^31 - 2^10, so that the edges of tiles fit, too */
    long long row_stride, column_stride;
    /* Largest magnitudes as magnitude.cuh has them: [found_parts] of the kernel that made the matrix, [parts] */
    const unsigned *found;
    unsigned *magnitudes;
    int found_parts;
    int parts, tiles, tiles_across; /* tiles: 0 for an empty matrix */
    /* results, contiguous; NULL: not wanted */
    unsigned char *codes;  /* [rows, columns] */
    unsigned char *turned; /* [columns, rows] */
    float *scale;
} dw_tensor_codes_params;

#define DW_MULTIPLY_CODES_TILE 64
#define DW_MULTIPLY_CODES_DEPTH 32
#define DW_MULTIPLY_CODES_THREADS 256

/* Tiles of fp8_block_gemm.cu. */
#define DW_FP8_BLOCK_GEMM_TILE 128
#define DW_FP8_BLOCK_GEMM_DEPTH 64
#define DW_FP8_BLOCK_GEMM_THREADS 512

/* Y = A B^T scale_a scale_b + bias: A [m, k], B [n, k], Y [m, n], bias [n] of Y's type or NULL; all contiguous. With scales
 * of blocks, the sum of each 128 products is multiplied by the scales of the two blocks, then added. */
typedef struct dw_multiply_codes_params {
    const unsigned char *a, *b;
    const float *scale_a, *scale_b;
    int scale_step; /* from the scale of a row to that of the next; 0: one for all */
    /* Scales of blocks of fp8-block (scale_layout.h) instead. wide: scales of a row of square blocks; 0: blocks of 1 x
     * 128. */
    const float *blocks_a, *blocks_b;
    long long wide_a, wide_b;
    const void *bias;
    void *y;
    long long m, n, k;
} dw_multiply_codes_params;

#endif
