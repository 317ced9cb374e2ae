/* From codes and scales of blocks in plain rows to those that tensor cores read: the parameters of the kernels
 * (scale_tiles.cu). Plain C, read by the host and by device code alike. */
#ifndef DW_SCALE_TILES_PARAMS_H
#define DW_SCALE_TILES_PARAMS_H

#include "scale_layout.h"

/* Arranges the scales of `rows` rows of codes: [rows / repeat, columns], rounded up, contiguous. */
typedef struct dw_scale_tiles_params {
    const unsigned char *scales;
    unsigned *tiles; /* whole tiles, as words of four scales of one row */
    long long rows, columns;
    long long repeat; /* rows of codes that share a row of scales: above 1 in square blocks */
    long long wide;   /* tiles along the scales of a row */
    long long words;  /* of all tiles */
} dw_scale_tiles_params;

/* Copies rows of `row_bytes` bytes to rows of `padded` bytes, a multiple of 16, and completes them with zeros. */
typedef struct dw_padded_rows_params {
    const unsigned char *from;
    void *to;
    long long row_bytes, padded;
    long long vectors; /* 16 bytes each, of all rows */
} dw_padded_rows_params;

/* The product of two tensors' scales, and zero: what a library reads as alpha and beta. */
typedef struct dw_scale_product_params {
    const float *a, *b;
    float *factors; /* [2] */
} dw_scale_product_params;

/* Writes zeros: `vectors` of 16 bytes. */
typedef struct dw_zeros_params {
    void *to;
    long long vectors;
} dw_zeros_params;

#endif
