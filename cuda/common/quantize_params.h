/* Quantization in blocks that share a scale: what its kernels (quantize.cu) are launched with. Plain C, read by the
 * host and by device code alike. */
#ifndef DW_QUANTIZE_PARAMS_H
#define DW_QUANTIZE_PARAMS_H

/* Numbered as dw_scheme and dw_scale_rule are (deepwell/number.h). */
#define DW_QUANTIZE_MXFP8_E4M3 0
#define DW_QUANTIZE_MXFP8_E5M2 1
#define DW_QUANTIZE_MXFP4 4
#define DW_QUANTIZE_NVFP4 5
#define DW_QUANTIZE_RCEIL 1
#define DW_QUANTIZE_FLOOR 2
#define DW_QUANTIZE_CEIL 3

/* What is quantized. */
#define DW_QUANTIZE_BF16 0
#define DW_QUANTIZE_F16 1
#define DW_QUANTIZE_F32 2

/* One direction of the result, [outer, inner]: along the rows it is [rows, columns], along the columns
 * [columns, rows], as a product that sums over the columns, or over the rows, reads it. */
typedef struct dw_quantized {
    void *codes;      /* 16-byte aligned; MXFP4, NVFP4: two in a byte, the first in the low half */
    long long stride; /* bytes from one row of codes to the next: a multiple of 16 */
    void *scales;     /* 16-byte aligned; in the order of dw_scales_swizzle, whole tiles */
} dw_quantized;

typedef struct dw_quantize_params {
    const void *source;
    long long row_stride; /* elements; 16-byte loads where rows begin at multiples of 16 bytes */
    int rows, columns;
    dw_quantized along_rows, along_columns;
    /* NVFP4: the tensor's scale is dw_nvfp4_tensor_scale(*amax), which is then stored in *tensor_scale as well; amax
     * NULL: *tensor_scale is read. */
    const float *amax;
    float *tensor_scale;
} dw_quantize_params;

/* A block of threads has a tile of 128 x 128 elements; the grid has one axis. */
#define DW_QUANTIZE_TILE 128
#define DW_QUANTIZE_THREADS 256
#define DW_QUANTIZE_TILES(count) (((count) + (DW_QUANTIZE_TILE - 1)) / DW_QUANTIZE_TILE)

#endif
