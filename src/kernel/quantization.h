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
    /* FP8 with one scale: of the fields below, only tensor_scale and `element` apply. dw__quantize_whole computes
     * it. */
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
/* For `whole`: computes the tensor scale amax / M, M the largest number of the element; rounded to F32, at least
 * 2^-126, and 1 if amax is 0. Numbers that are not finite do not count. */
dw_status dw__quantize_whole_scale(const dw__quantization *q, const float *x, int64_t row_stride,
                                   float *scale);
/* For `whole`: writes the codes of x * (1 / scale), or the values of these codes. The inverse and the product are
 * rounded to F32 before. An infinity remains one, or becomes NaN where the element has none. `result` may be `x`. */
dw_status dw__quantize_whole_codes(const dw__quantization *q, int64_t count, const float *x,
                                   float scale, uint8_t *codes);
dw_status dw__quantize_whole(const dw__quantization *q, int64_t count, const float *x, float scale,
                             float *result);
/* The matrix that dw__quantize_encode rotated, contiguous; NULL without hadamard. `scratch`: as it was given. */
const float *dw__quantize_rotated(const dw__quantization *q, void *scratch);

/* The sums of `quantization_error`. */
typedef struct dw__rounding_sums {
    double signal, noise, nonzero, underflow, saturated;
} dw__rounding_sums;
/* Returns the magnitude from which rounding alone goes beyond the largest number of the element: that number and half
 * of the step below it. */
double dw__quantize_limit(const dw__quantization *q);
/* The scale of the block of element [row, column] without the tensor's; 1 for `whole`. */
float dw__quantize_block_scale(const dw__quantization *q, dw__coded from, int64_t row,
                               int64_t column);
/* Adds the element x, whose rounded value is `value` and whose block saturates from the magnitude `limit` on. */
static inline void dw__rounding_add(dw__rounding_sums *sums, double x, double value, double limit) {
    if (!(x - x == 0.0) || !(value - value == 0.0)) return;
    sums->signal += x * x;
    sums->noise += (x - value) * (x - value);
    sums->nonzero += x != 0.0;
    sums->underflow += x != 0.0 && value == 0.0;
    sums->saturated += value != 0.0 && (x < 0.0 ? -x : x) > limit;
}

/* Decodes rows [first, first + count) for axis 1, else columns, to a matrix of their own. `first` must be a
 * multiple of DW_QUANTIZE_BAND. */
enum { DW_QUANTIZE_BAND = 32 };
dw_status dw__quantize_decode(const dw__quantization *q, dw__coded from, int64_t first,
                              int64_t count, float *result);

#endif
