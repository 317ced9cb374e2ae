/* Launch parameters of the quantization kernels (quantize.cu). Plain C, read by the host and by device code. */
#ifndef DW_QUANTIZE_PARAMS_H
#define DW_QUANTIZE_PARAMS_H

#include "scheme_params.h" /* SCHEME and RULE */

/* Type of the source. */
#define DW_QUANTIZE_BF16 0
#define DW_QUANTIZE_F16 1
#define DW_QUANTIZE_F32 2

/* One direction of the result, [outer, inner]: [rows, columns] along the rows, [columns, rows] along the columns.
 * This is the layout for a GEMM that contracts over the columns, or over the rows. */
typedef struct dw_quantized {
    /* 16-byte aligned; MXFP4, NVFP4: two in a byte, the first in the lower half. */
    void *codes;
    long long stride; /* bytes from one row of codes to the next; must be a multiple of 16 */
    void *scales;     /* 16-byte aligned; whole tiles in the order of dw_scales_swizzle */
} dw_quantized;

typedef struct dw_quantize_params {
    const void *source;
    /* In elements; rows that start at multiples of 16 bytes are loaded 16 bytes at a time. */
    long long row_stride;
    int rows, columns;
    dw_quantized along_rows, along_columns;
    /* NVFP4: if amax is not NULL, the tensor scale is dw_nvfp4_tensor_scale(*amax) and is also stored in
     * *tensor_scale; else *tensor_scale is read. */
    const float *amax;
    float *tensor_scale;
} dw_quantize_params;

/* A thread block processes a tile of 128 x 128 elements; the grid has one axis. */
#define DW_QUANTIZE_TILE 128
#define DW_QUANTIZE_THREADS 256
#define DW_QUANTIZE_TILES(count) (((count) + (DW_QUANTIZE_TILE - 1)) / DW_QUANTIZE_TILE)

#endif
