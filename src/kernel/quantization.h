/* The operation `quantize` step by step, on F32 matrices: what its definition and its kernel share.
 *
 *     encode: rotate (hadamard), find the tensor's scale, round to codes and block scales
 *     decode: any band of the codes back to numbers, without the tensor's scale
 */
#ifndef DW_KERNEL_QUANTIZATION_H
#define DW_KERNEL_QUANTIZATION_H

#include "deepwell/number.h"
#include "kernel/kernel.h"

typedef struct dw__quantization {
    int64_t rows, cols;
    bool bf16; /* nothing below applies */
    bool tensor_scale, hadamard;
    dw_block_options options;
    dw_block_layout layout;
} dw__quantization;

/* From the call's shape and attributes; the seed is read if it has been placed. */
dw_status dw__quantization_of(const dw__call *call, dw__quantization *q);
size_t dw__quantize_scratch(const dw__quantization *q);
/* Codes and block scales into `scratch`, the tensor's scale into *scale. Not for bf16. */
dw_status dw__quantize_encode(const dw__quantization *q, const float *x, int64_t row_stride,
                              void *scratch, float *scale);
/* Rows [first, first + count) with axis 1, else columns, as a matrix of those alone; `first` is a multiple of
 * DW_QUANTIZE_BAND. */
enum { DW_QUANTIZE_BAND = 32 };
dw_status dw__quantize_decode(const dw__quantization *q, const void *scratch, int64_t first,
                              int64_t count, float *result);

#endif
