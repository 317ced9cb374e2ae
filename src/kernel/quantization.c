#include "kernel/quantization.h"
#include "graph/layer_precision.h"
#include "number/format.h"
#include <math.h>
#include <string.h>

enum { RUN = 16 }; /* length of a rotation */

dw_status dw__quantization_of(const dw__call *call, dw__quantization *q) {
    const bool decodes = call->op == DW_OP_DEQUANTIZE_BLOCKS;
    const dw__tensor *x = decodes ? &call->outputs[0] : &call->inputs[0], *seed = &call->inputs[1];
    *q = (dw__quantization){.rows = x->shape[0], .cols = x->shape[1]};
    dw_block_options options = DW_BLOCK_OPTIONS_DEFAULT;
    q->options = options;
    DW_RETURN_IF_FAILED(
        dw_scheme_find(dw__call_attr(call, DW_ATTR_KEY_SCHEME)->string, &q->options.scheme));
    q->bf16 = q->options.scheme == DW_SCHEME_BF16;
    if (q->bf16) return DW_OK;
    const dw_scheme_info *scheme = dw_scheme_describe(q->options.scheme);
    q->whole = scheme->block == DW_BLOCK_TENSOR;
    q->element = scheme->element;
    q->tensor_scale = scheme->tensor_scale || q->whole;
    if (q->whole) return DW_OK;
    q->hadamard = dw__call_int(call, DW_ATTR_KEY_HADAMARD, 0) != 0;
    q->options.square = dw__call_int(call, DW_ATTR_KEY_SQUARE, 0) != 0;
    q->options.axis = (int)dw__call_int(call, DW_ATTR_KEY_AXIS, 1);
    const dw_attr *rule = dw__call_attr(call, DW_ATTR_KEY_SCALE_RULE);
    if (rule)
        DW_RETURN_IF_FAILED(dw__rule_find("scale_rule", rule->string, &q->options.scale_rule));
    if (dw__call_int(call, DW_ATTR_KEY_STOCHASTIC, 0)) {
        q->options.rounding = DW_ROUND_STOCHASTIC;
        q->options.random.stream = dw__call_int(call, DW_ATTR_KEY_STREAM, 0);
        const int64_t *words = seed->data;
        if (words) {
            q->options.random.seed = words[0];
            q->options.random.offset = words[seed->stride[0]];
        }
    }
    return dw_block_layout_of(&q->options, q->rows, q->cols, &q->layout);
}

/* ---- scratch: codes, scales, and with rotation the rotated matrix ------------------------------ */

static size_t round_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

dw__coded dw__quantize_in_scratch(const dw__quantization *q, void *scratch) {
    return (dw__coded){scratch, (char *)scratch + round_up(q->layout.code_bytes)};
}

static float *rotated_of(const dw__quantization *q, void *scratch) {
    return (float *)((char *)scratch + round_up(q->layout.code_bytes) +
                     round_up(q->layout.scale_bytes));
}

const float *dw__quantize_rotated(const dw__quantization *q, void *scratch) {
    return q->hadamard ? rotated_of(q, scratch) : NULL;
}

double dw__quantize_limit(const dw__quantization *q) {
    const dw__format_info *f = &dw__formats[q->element];
    const double largest = dw_dtype_max(q->element);
    return largest + ldexp(0.5, ilogb(largest) - f->fraction_bits);
}

float dw__quantize_block_scale(const dw__quantization *q, dw__coded from, int64_t row,
                               int64_t column) {
    if (q->whole) return 1.0f;
    int64_t outer = q->options.axis == 1 ? row : column,
            inner = q->options.axis == 1 ? column : row;
    if (q->options.square) outer /= q->layout.block;
    const int64_t at = outer * q->layout.scale_cols + inner / q->layout.block;
    if (q->layout.scale == DW_F32) return ((const float *)from.scales)[at];
    return dw__decode_one(q->layout.scale, ((const uint8_t *)from.scales)[at]);
}

size_t dw__quantize_scratch(const dw__quantization *q) {
    if (q->bf16 || q->whole) return 0;
    size_t rotated = q->hadamard ? (size_t)(q->rows * q->cols) * sizeof(float) : 0;
    return round_up(q->layout.code_bytes) + round_up(q->layout.scale_bytes) + round_up(rotated);
}

/* ---- steps ----------------------------------------------------------------------------------------- */

/* A shorter last run is not rotated. This holds for both operands of a matmul, so its result stays the same. */
static dw_status rotate(const dw__quantization *q, const float *x, int64_t row_stride, float *out) {
    dw_hadamard_options options = DW_HADAMARD_OPTIONS_DEFAULT;
    options.size = RUN;
    options.axis = q->options.axis;
    int64_t rows = q->rows, cols = q->cols;
    if (options.axis == 0) {
        rows -= rows % RUN;
        for (int64_t row = rows; row < q->rows; row++)
            memcpy(out + row * q->cols, x + row * row_stride, (size_t)q->cols * sizeof *out);
    } else {
        cols -= cols % RUN;
        size_t left = (size_t)(q->cols - cols) * sizeof *out;
        for (int64_t row = 0; left && row < rows; row++)
            memcpy(out + row * q->cols + cols, x + row * row_stride + cols, left);
    }
    return dw_hadamard(&options, rows, cols, x, row_stride, out, q->cols);
}

dw_status dw__quantize_encode(const dw__quantization *q, const float *x, int64_t row_stride,
                              dw__coded to, void *scratch, float *scale) {
    dw_block_options options = q->options;
    *scale = 1.0f;
    if (q->hadamard) {
        float *rotated = rotated_of(q, scratch);
        DW_RETURN_IF_FAILED(rotate(q, x, row_stride, rotated));
        x = rotated;
        row_stride = q->cols;
    }
    if (q->tensor_scale) {
        float amax = 0.0f;
        DW_RETURN_IF_FAILED(dw_amax(q->rows, q->cols, x, row_stride, &amax));
        *scale = options.tensor_scale = dw_nvfp4_tensor_scale(amax);
    }
    return dw_block_quantize(&options, q->rows, q->cols, x, row_stride, to.codes, 0, to.scales);
}

dw_status dw__quantize_whole_scale(const dw__quantization *q, const float *x, int64_t row_stride,
                                   float *scale) {
    float amax = 0.0f;
    DW_RETURN_IF_FAILED(dw_amax(q->rows, q->cols, x, row_stride, &amax));
    const float least = 0x1p-126f, found = amax / dw_dtype_max(q->element);
    *scale = amax == 0.0f ? 1.0f : found < least ? least : found;
    return DW_OK;
}

dw_status dw__quantize_whole_codes(const dw__quantization *q, int64_t count, const float *x,
                                   float scale, uint8_t *codes) {
    enum { CHUNK = 1024 };
    float multiples[CHUNK];
    dw_encode_options options = DW_ENCODE_OPTIONS_DEFAULT;
    options.overflow = DW_OVERFLOW_NONFINITE; /* no multiple of a finite number overflows */
    const float inverse = 1.0f / scale;
    for (int64_t start = 0; start < count; start += CHUNK) {
        const int64_t length = count - start < CHUNK ? count - start : CHUNK;
        for (int64_t i = 0; i < length; i++) multiples[i] = x[start + i] * inverse;
        DW_RETURN_IF_FAILED(dw_encode(q->element, length, multiples, &options, codes + start));
    }
    return DW_OK;
}

dw_status dw__quantize_whole(const dw__quantization *q, int64_t count, const float *x, float scale,
                             float *result) {
    enum { CHUNK = 1024 };
    uint8_t codes[CHUNK];
    for (int64_t start = 0; start < count; start += CHUNK) {
        const int64_t length = count - start < CHUNK ? count - start : CHUNK;
        DW_RETURN_IF_FAILED(dw__quantize_whole_codes(q, length, x + start, scale, codes));
        DW_RETURN_IF_FAILED(dw_decode(q->element, length, codes, result + start));
    }
    return DW_OK;
}

dw_status dw__quantize_decode(const dw__quantization *q, dw__coded from, int64_t first,
                              int64_t count, float *result) {
    dw_block_options options = q->options;
    options.tensor_scale = 1.0f; /* multiplies the matmul's result instead */
    int64_t scale_row = options.square ? first / q->layout.block : first;
    const char *codes = (const char *)from.codes + first * q->layout.row_bytes;
    const uint8_t *scales =
        (const uint8_t *)from.scales +
        scale_row * q->layout.scale_cols * (int64_t)dw_dtype_bytes(q->layout.scale);
    bool rows = options.axis == 1;
    return dw_block_dequantize(&options, rows ? count : q->rows, rows ? q->cols : count, codes, 0,
                               scales, result, rows ? q->cols : count);
}
