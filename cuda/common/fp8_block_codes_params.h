/* FP8 codes with an F32 scale for each block of 128 or 128 x 128 elements: the parameters of fp8_block_codes.cu. Plain C,
 * read by the host and by device code alike. */
#ifndef DW_FP8_BLOCK_CODES_PARAMS_H
#define DW_FP8_BLOCK_CODES_PARAMS_H

#define DW_FP8_BLOCK_THREADS 256
/* Blocks for each SM: enough loads are in flight, and there are registers for them. */
#define DW_FP8_BLOCK_RESIDENT 2

typedef struct dw_fp8_block_codes_params {
    const void *x;     /* [rows, columns], strides in elements */
    int rows, columns; /* below 2^31 - 2^10, so that the edges of tiles fit, too */
    long long row_stride, column_stride;
    int tiles, tiles_across; /* of 128 x 128; tiles: 0 for an empty matrix */
    /* Results; NULL: not wanted. Rows of codes have so many bytes, multiples of 32, of which the last are zeros. Scales
     * are those of scale_layout.h. */
    unsigned char *codes;  /* [rows, row_bytes] */
    unsigned char *turned; /* [columns, turned_row_bytes] */
    long long row_bytes, turned_row_bytes;
    float *scales, *turned_scales;
} dw_fp8_block_codes_params;

#endif
