/* The graph's operations of block quantization: the parameters of their kernels (graph_quantize.cu). Plain C, read by
 * the host and by device code alike. */
#ifndef DW_GRAPH_QUANTIZE_PARAMS_H
#define DW_GRAPH_QUANTIZE_PARAMS_H

/* Elements of a run that is rotated. */
#define DW_ROTATED_RUN 16
#define DW_GRAPH_QUANTIZE_THREADS 256
/* Parts of a matrix whose largest magnitudes are found by themselves: one for each thread that combines them. */
#define DW_MAGNITUDES 256

/* Numbers of quantization_error, and the most blocks of threads that compute them. The number of blocks depends on the
 * matrix alone, so that sums have the same bits on every GPU. */
#define DW_ROUNDING_SUMS 5
#define DW_ROUNDING_PARTS 1024

/* A code of up to 8 bits: sign, exponent, fraction. */
typedef struct dw_code_format {
    int fraction, bias; /* bits of the fraction, bias of the exponent */
    unsigned sign;      /* the sign's bit */
    unsigned
        largest; /* the code of the largest number; above it are infinity, if there is one, and NaN */
    unsigned nan;      /* the code of NaN, else of the largest number */
    unsigned infinity; /* 0: the format has none */
} dw_code_format;

typedef struct dw_graph_quantize_params {
    /* A matrix [rows, columns], strides in elements. quantize_encode reads `rotated` instead if it is not NULL: F32,
     * contiguous. */
    const void *x;
    float *rotated; /* written by quantize_rotate */
    long long rows, columns, row_stride, column_stride;
    int axis;   /* of the blocks; results are [outer, inner], inner along this axis */
    int block;  /* 16 or 32; 128 to measure */
    int square; /* 1: one scale for block x block elements */
    int rounds; /* 0: the values are those of BF16, without codes */
    dw_code_format format;
    int e8m0; /* 1: E8M0 scales; 0: UE4M3 scales below a tensor scale */
    int f32;  /* 1: F32 scales of fp8-block instead, to measure */
    int whole; /* 1: one scale for the tensor, amax / largest number of the format; no other scales */
    int rule; /* of E8M0 scales: 0 RCEIL, 1 FLOOR, 2 CEIL */
    int stochastic;
    const long long *seed; /* two words, seed_stride apart: seed and offset */
    long long seed_stride, stream;
    /* Bits of the largest finite magnitudes of DW_MAGNITUDES equal parts of the matrix; NULL: the tensor scale is 1. */
    unsigned *amax;
    /* results; NULL: not wanted */
    void *values; /* BF16 [rows, columns] */
    long long value_row_stride, value_column_stride;
    unsigned char *codes, *scales; /* contiguous; read by dequantize */
    long long code_row_bytes, scale_columns;
    int paired; /* two codes in a byte, the first in the lower half */
    float *tensor_scale;
    /* quantization_error: the sums of each block of threads, `parts` in all, and the result. */
    double *sums, *statistics, limit;
    int parts;
} dw_graph_quantize_params;

#endif
