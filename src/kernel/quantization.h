/* The operations `quantize`, `quantize_blocks` and `dequantize_blocks` in steps on F32 matrices. Definitions and
 * kernels share these steps.
 *
 *     encode: rotate (hadamard), compute the tensor scale, round to codes and block scales
 *     decode: convert a band of codes back to numbers, without the tensor scale */
#ifndef DW_KERNEL_QUANTIZATION_H
#define DW_KERNEL_QUANTIZATION_H

#include "deepwell/number.h"
#include "kernel/kernel.h"

typedef struct dw__quantization {
    int64_t rows, cols;
    bool bf16; /* BF16: the fields below do not apply */
    /* FP8 with one scale: of the fields below, only tensor_scale and `element` apply. dw__quantize_whole computes it. */
    bool whole;
    dw_dtype element;
    bool tensor_scale, hadamard;
    dw_block_options options;
    dw_block_layout layout;
} dw__quantization;

/* Codes and block scales as dw_block_quantize lays them out, contiguous. */
typedef struct dw__coded {
    void *codes, *scales;
} dw__coded;

/* Reads attributes, the shape of the matrix that is not coded, and the seed if it has data. */
dw_status dw__quantization_of(const dw__call *call, dw__quantization *q);
/* Room for codes, scales and the rotated matrix; 0 for `whole` and bf16. */
size_t dw__quantize_scratch(const dw__quantization *q);
dw__coded dw__quantize_in_scratch(const dw__quantization *q, void *scratch);
/* Computes codes and block scales, and the tensor scale into *scale. `scratch`: dw__quantize_scratch bytes, of which
 * the first may be `to`. Not for `whole` and bf16. */
dw_status dw__quantize_encode(const dw__quantization *q, const float *x, int64_t row_stride,
                              dw__coded to, void *scratch, float *scale);
/* For `whole`: computes the tensor scale amax / M, M the largest number of the element; rounded to F32, at least 2^-126,
 * and 1 if amax is 0. Numbers that are not finite do not count. */
dw_status dw__quantize_whole_scale(const dw__quantization *q, const float *x, int64_t row_stride,
                                   float *scale);
/* For `whole`: writes the codes of x / scale, or the values of these codes. Each quotient is rounded to F32 before. An
 * infinity remains one, or becomes NaN where the element has none. `result` may be `x`. */
dw_status dw__quantize_whole_codes(const dw__quantization *q, int64_t count, const float *x,
                                   float scale, uint8_t *codes);
dw_status dw__quantize_whole(const dw__quantization *q, int64_t count, const float *x, float scale,
                             float *result);
/* Decodes rows [first, first + count) for axis 1, else columns, to a matrix of their own. `first` must be a
 * multiple of DW_QUANTIZE_BAND. */
enum { DW_QUANTIZE_BAND = 32 };
dw_status dw__quantize_decode(const dw__quantization *q, dw__coded from, int64_t first,
                              int64_t count, float *result);

#endif
