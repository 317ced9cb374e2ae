/* The operations of quantization, and the product of codes, with the codecs' own functions, on contiguous copies. */
#include "common/scale_layout.h"
#include "deepwell/number.h"
#include "kernel/quantization.h"
#include "kernel/reference/primitives.h"
#include "kernel/reference/scalar.h"
#include "number/half.h"
#include <inttypes.h>
#include <string.h>

static void load(const dw__tensor *x, float *out) {
    for (int64_t i = 0; i < x->shape[0]; i++)
        for (int64_t j = 0; j < x->shape[1]; j++)
            out[i * x->shape[1] + j] =
                (float)dw__scalar_load(x->data, x->dtype, i * x->stride[0] + j * x->stride[1])
                    .number;
}

static void store(const float *values, const dw__tensor *out) {
    for (int64_t i = 0; i < dw__tensor_count(out); i++)
        dw__scalar_store(out->data, out->dtype, i, (dw__scalar){.number = (double)values[i]});
}

/* Rounds to BF16, even if the interpreter holds the result as F64. */
static void round_to_bf16(float *values, int64_t count) {
    for (int64_t i = 0; i < count; i++) values[i] = dw__bf16_to_f32(dw__f32_to_bf16(values[i]));
}

dw_status dw__reference_quantize(const dw__call *call, void *unused) {
    (void)unused;
    dw_status status = DW_OK;
    dw__quantization q;
    float scale = 1.0f;
    DW_RETURN_IF_FAILED(dw__quantization_of(call, &q));
    int64_t count = q.rows * q.cols;
    size_t bytes = (size_t)count * sizeof(float), scratch_bytes = dw__quantize_scratch(&q);
    float *values = dw__malloc_aligned(bytes + 1);
    void *scratch = dw__malloc_aligned(scratch_bytes + 1);
    if (!values || !scratch) DW_TRY(dw__fail_memory("a matrix to quantize", bytes + scratch_bytes));
    load(&call->inputs[0], values);
    if (q.whole) {
        DW_TRY(dw__quantize_whole_scale(&q, values, q.cols, &scale));
        DW_TRY(dw__quantize_whole(&q, count, values, scale, values));
    } else if (!q.bf16) {
        const dw__coded coded = dw__quantize_in_scratch(&q, scratch);
        DW_TRY(dw__quantize_encode(&q, values, q.cols, coded, scratch, &scale));
        DW_TRY(dw__quantize_decode(&q, coded, 0, q.options.axis == 1 ? q.rows : q.cols, values));
    }
    round_to_bf16(values, count);
    if (call->outputs[0].data) store(values, &call->outputs[0]);
    if (call->outputs[1].data) store(&scale, &call->outputs[1]);
cleanup:
    dw__free_aligned(values);
    dw__free_aligned(scratch);
    return status;
}

dw_status dw__reference_quantization_error(const dw__call *call, void *unused) {
    (void)unused;
    dw_status status = DW_OK;
    dw__quantization q;
    dw__coded coded = {0};
    float scale = 1.0f;
    dw__rounding_sums sums = {0};
    DW_RETURN_IF_FAILED(dw__quantization_of(call, &q));
    const int64_t count = q.rows * q.cols;
    const size_t bytes = (size_t)count * sizeof(float), scratch_bytes = dw__quantize_scratch(&q);
    float *x = dw__malloc_aligned(bytes + 1), *values = dw__malloc_aligned(bytes + 1);
    void *scratch = dw__malloc_aligned(scratch_bytes + 1);
    if (!x || !values || !scratch)
        DW_TRY(dw__fail_memory("a matrix to quantize", 2 * bytes + scratch_bytes));
    load(&call->inputs[0], x);
    if (q.whole) {
        DW_TRY(dw__quantize_whole_scale(&q, x, q.cols, &scale));
        DW_TRY(dw__quantize_whole(&q, count, x, scale, values));
    } else {
        coded = dw__quantize_in_scratch(&q, scratch);
        DW_TRY(dw__quantize_encode(&q, x, q.cols, coded, scratch, &scale));
        DW_TRY(dw__quantize_decode(&q, coded, 0, q.options.axis == 1 ? q.rows : q.cols, values));
    }
    const float *rounded = q.hadamard ? dw__quantize_rotated(&q, scratch) : x;
    for (int64_t i = 0; i < count; i++) {
        const double block = dw__quantize_block_scale(&q, coded, i / q.cols, i % q.cols);
        dw__rounding_add(&sums, rounded[i], (double)values[i] * scale,
                         dw__quantize_limit(&q) * block * scale);
    }
    const double numbers[] = {sums.signal, sums.noise, sums.nonzero, sums.underflow,
                              sums.saturated};
    for (int i = 0; call->outputs[0].data && i < (int)DW_COUNT(numbers); i++)
        dw__scalar_store(call->outputs[0].data, call->outputs[0].dtype, i,
                         (dw__scalar){.number = numbers[i]});
cleanup:
    dw__free_aligned(x);
    dw__free_aligned(values);
    dw__free_aligned(scratch);
    return status;
}

/* Bytes of codes and of scales are results as they are. */
static void put_bytes(const dw__tensor *out, const void *bytes) {
    if (out->data) memcpy(out->data, bytes, dw__tensor_bytes(out));
}

dw_status dw__reference_quantize_blocks(const dw__call *call, void *unused) {
    (void)unused;
    dw_status status = DW_OK;
    dw__quantization q;
    float scale = 1.0f;
    DW_RETURN_IF_FAILED(dw__quantization_of(call, &q));
    size_t bytes = (size_t)(q.rows * q.cols) * sizeof(float),
           scratch_bytes = dw__quantize_scratch(&q);
    float *values = dw__malloc_aligned(bytes + 1);
    void *scratch = dw__malloc_aligned(scratch_bytes + 1);
    if (!values || !scratch) DW_TRY(dw__fail_memory("a matrix to quantize", bytes + scratch_bytes));
    load(&call->inputs[0], values);
    const dw__coded coded = dw__quantize_in_scratch(&q, scratch);
    DW_TRY(dw__quantize_encode(&q, values, q.cols, coded, scratch, &scale));
    put_bytes(&call->outputs[0], coded.codes);
    put_bytes(&call->outputs[1], coded.scales);
    if (call->outputs[2].data) store(&scale, &call->outputs[2]);
cleanup:
    dw__free_aligned(values);
    dw__free_aligned(scratch);
    return status;
}

dw_status dw__reference_dequantize_blocks(const dw__call *call, void *unused) {
    (void)unused;
    dw_status status = DW_OK;
    dw__quantization q;
    DW_RETURN_IF_FAILED(dw__quantization_of(call, &q));
    int64_t count = q.rows * q.cols;
    size_t bytes = (size_t)count * sizeof(float);
    float *values = dw__malloc_aligned(bytes + 1);
    if (!values) return dw__fail_memory("a dequantized matrix", bytes);
    const dw__coded coded = {call->inputs[0].data, call->inputs[1].data};
    DW_TRY(dw__quantize_decode(&q, coded, 0, q.options.axis == 1 ? q.rows : q.cols, values));
    round_to_bf16(values, count);
    if (call->outputs[0].data) store(values, &call->outputs[0]);
cleanup:
    dw__free_aligned(values);
    return status;
}

dw_status dw__reference_quantize_tensor(const dw__call *call, void *unused) {
    (void)unused;
    enum { CODES, TURNED, SCALE };
    dw_status status = DW_OK;
    dw__quantization q;
    float scale = 1.0f;
    DW_RETURN_IF_FAILED(dw__quantization_of(call, &q));
    const int64_t count = q.rows * q.cols;
    float *values = dw__malloc_aligned((size_t)count * sizeof(float) + 1);
    uint8_t *codes = dw__malloc_aligned((size_t)count + 1), *turned = call->outputs[TURNED].data;
    if (!values || !codes)
        DW_TRY(dw__fail_memory("a matrix to quantize", (size_t)count * (1 + sizeof(float))));
    load(&call->inputs[0], values);
    DW_TRY(dw__quantize_whole_scale(&q, values, q.cols, &scale));
    DW_TRY(dw__quantize_whole_codes(&q, count, values, scale, codes));
    put_bytes(&call->outputs[CODES], codes);
    for (int64_t i = 0; turned && i < q.rows; i++)
        for (int64_t j = 0; j < q.cols; j++) turned[j * q.rows + i] = codes[i * q.cols + j];
    if (call->outputs[SCALE].data) store(&scale, &call->outputs[SCALE]);
cleanup:
    dw__free_aligned(values);
    dw__free_aligned(codes);
    return status;
}

/* Arranges the scales of fp8-block, [rows, columns] as dw_block_quantize has them, as the graph has them. */
static void store_f32_scales(const dw__quantization *q, const float *scales,
                             const dw__tensor *out) {
    const dw_block_layout *l = &q->layout;
    const int64_t padded =
        (l->scale_cols + DW_SQUARE_SCALES - 1) / DW_SQUARE_SCALES * DW_SQUARE_SCALES;
    for (int64_t i = 0; i < dw__tensor_count(out); i++) {
        const int64_t row = q->options.square ? i / padded : i % l->scale_rows,
                      column = q->options.square ? i % padded : i / l->scale_rows;
        const float scale = column < l->scale_cols ? scales[row * l->scale_cols + column] : 0.0f;
        dw__scalar_store(out->data, out->dtype, i, (dw__scalar){.number = (double)scale});
    }
}

/* One orientation of quantize_tiles. `codes` and `scales` have room for those of q. */
static dw_status make_tiles(const dw__quantization *q, const float *values, void *scratch,
                            float *scale, const dw__tensor *codes, const dw__tensor *tiles) {
    const dw_block_layout *l = &q->layout;
    const dw__coded coded = dw__quantize_in_scratch(q, scratch);
    DW_RETURN_IF_FAILED(dw__quantize_encode(q, values, q->cols, coded, scratch, scale));
    if (codes->data) {
        const int64_t padded = dw_tensor_bytes(codes->dtype, 1, &codes->shape[1]);
        memset(codes->data, 0, dw__tensor_bytes(codes));
        for (int64_t row = 0; row < l->outer; row++)
            memcpy((char *)codes->data + row * padded,
                   (const char *)coded.codes + row * l->row_bytes, (size_t)l->row_bytes);
    }
    if (!tiles->data) return DW_OK;
    if (l->scale == DW_F32) {
        store_f32_scales(q, coded.scales, tiles);
        return DW_OK;
    }
    return dw_scales_swizzle(l->outer, l->scale_cols, q->options.square ? l->block : 1,
                             coded.scales, tiles->data);
}

dw_status dw__reference_quantize_tiles(const dw__call *call, void *unused) {
    (void)unused;
    dw_status status = DW_OK;
    const bool both = !dw__call_attr(call, DW_ATTR_KEY_AXIS);
    const dw__tensor *out = call->outputs;
    void *scratch = NULL;
    dw__quantization q;
    float scale = 1.0f;
    DW_RETURN_IF_FAILED(dw__quantization_of(call, &q));
    const size_t bytes = (size_t)(q.rows * q.cols) * sizeof(float);
    float *values = dw__malloc_aligned(bytes + 1);
    if (!values) DW_TRY(dw__fail_memory("a matrix to quantize", bytes));
    load(&call->inputs[0], values);
    for (int i = 0; i < (both ? 2 : 1); i++) {
        if (both) q.options.axis = 1 - i;
        DW_TRY(dw_block_layout_of(&q.options, q.rows, q.cols, &q.layout));
        dw__free_aligned(scratch);
        scratch = dw__malloc_aligned(dw__quantize_scratch(&q) + 1);
        if (!scratch) DW_TRY(dw__fail_memory("codes", dw__quantize_scratch(&q)));
        DW_TRY(make_tiles(&q, values, scratch, &scale, &out[2 * i], &out[2 * i + 1]));
    }
    if (q.tensor_scale && out[call->output_count - 1].data)
        store(&scale, &out[call->output_count - 1]);
cleanup:
    dw__free_aligned(values);
    dw__free_aligned(scratch);
    return status;
}

static dw_status decode(const dw__tensor *codes, float **values) {
    const int64_t count = dw__tensor_count(codes);
    *values = dw__malloc_aligned((size_t)count * sizeof(float) + 1);
    if (!*values) return dw__fail_memory("decoded numbers", (size_t)count * sizeof(float));
    return dw_decode(codes->dtype, count, codes->data, *values);
}

/* The scale of fp8-block of codes [row, 128 block...]. Three axes: blocks are square. */
static double f32_scale(const dw__tensor *scales, int64_t row, int64_t block) {
    const int64_t at = scales->rank == 3 ? row / DW_FP8_BLOCK_SIDE * scales->stride[0] + block
                                         : block * scales->stride[0] + row;
    return dw__scalar_load(scales->data, scales->dtype, at).number;
}

/* a b^T of rows of k values. Each block's sum is multiplied by its two scales if there are `scales`. */
static double dot(const float *a, const float *b, int64_t k, const dw__tensor *scales, int64_t i,
                  int64_t j) {
    double sum = 0.0;
    for (int64_t start = 0; start < k; start += DW_FP8_BLOCK_SIDE) {
        const int64_t block = start / DW_FP8_BLOCK_SIDE,
                      end = start + DW_FP8_BLOCK_SIDE < k ? start + DW_FP8_BLOCK_SIDE : k;
        double part = 0.0;
        for (int64_t l = start; l < end; l++) part += (double)a[l] * (double)b[l];
        if (scales) part *= f32_scale(&scales[0], i, block) * f32_scale(&scales[1], j, block);
        sum += part;
    }
    return sum;
}

/* Multiplies each value by its block's scale, both exact. */
static dw_status scale_blocks(const dw__tensor *codes, const dw__tensor *tiles, float *values) {
    const int64_t block = tiles->dtype == DW_UE4M3 ? 16 : 32, rows = codes->shape[0],
                  columns = codes->shape[1], wide = (columns + block - 1) / block;
    const size_t count = (size_t)(rows * wide);
    dw_status status = DW_OK;
    uint8_t *scales = dw__malloc_aligned(count + 1);
    float *factors = dw__malloc_aligned(count * sizeof(float) + 1);
    if (!scales || !factors) DW_TRY(dw__fail_memory("scales of blocks", count * 5));
    DW_TRY(dw_scales_unswizzle(rows, wide, 1, tiles->data, scales));
    DW_TRY(dw_decode(tiles->dtype, (int64_t)count, scales, factors));
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++)
            values[i * columns + j] *= factors[i * wide + j / block];
cleanup:
    dw__free_aligned(scales);
    dw__free_aligned(factors);
    return status;
}

static double scale_of(const dw__tensor *scale) {
    return scale->rank < 0 ? 1.0 : dw__scalar_load(scale->data, scale->dtype, 0).number;
}

static double scale_of_row(const dw__tensor *scale, int64_t row) {
    return scale->rank == 1
               ? dw__scalar_load(scale->data, scale->dtype, row * scale->stride[0]).number
               : scale_of(scale);
}

dw_status dw__reference_multiply_codes(const dw__call *call, void *unused) {
    (void)unused;
    enum { A, B, SCALE_A, SCALE_B, TILES_A, TILES_B };
    const dw__tensor *a = &call->inputs[A], *b = &call->inputs[B], *y = &call->outputs[0];
    const int64_t m = a->shape[0], n = b->shape[0], k = a->shape[1];
    const dw__tensor *bias = dw__call_bias(call);
    dw_status status = DW_OK;
    float *of_a = NULL, *of_b = NULL;
    if (!y->data) return DW_OK;
    DW_TRY(decode(a, &of_a));
    DW_TRY(decode(b, &of_b));
    const dw__tensor *scales = dw__call_has_f32_scales(call) ? &call->inputs[TILES_A] : NULL;
    if (dw__call_has_tiles(call) && !scales) {
        DW_TRY(scale_blocks(a, &call->inputs[TILES_A], of_a));
        DW_TRY(scale_blocks(b, &call->inputs[TILES_B], of_b));
    }
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            const double scale =
                scale_of_row(&call->inputs[SCALE_A], i) * scale_of_row(&call->inputs[SCALE_B], j);
            double sum = scale * dot(of_a + i * k, of_b + j * k, k, scales, i, j);
            if (bias) sum += dw__scalar_load(bias->data, bias->dtype, j * bias->stride[0]).number;
            dw__scalar_store(y->data, y->dtype, i * n + j, (dw__scalar){.number = sum});
        }
cleanup:
    dw__free_aligned(of_a);
    dw__free_aligned(of_b);
    return status;
}

/* Row j of matrix `group` of b is row group n + j, or the part of row j from group k on. */
dw_status dw__reference_segment_multiply_codes(const dw__call *call, void *unused) {
    (void)unused;
    enum { A, B, OFFSETS, SCALE_A, SCALE_B };
    const dw__tensor *a = &call->inputs[A], *b = &call->inputs[B], *y = &call->outputs[0],
                     *offsets = &call->inputs[OFFSETS], *scale_b = &call->inputs[SCALE_B];
    const int64_t n = y->shape[1], k = a->shape[1], wide = b->shape[1],
                  groups = offsets->shape[0] - 1;
    dw_status status = DW_OK;
    float *of_a = NULL, *of_b = NULL;
    if (!y->data) return DW_OK;
    DW_TRY(decode(a, &of_a));
    DW_TRY(decode(b, &of_b));
    int64_t row = 0;
    for (int64_t group = 0; group < groups; group++) {
        const float *matrix = of_b + (wide == k ? group * n * k : group * k);
        const double scale = scale_of(&call->inputs[SCALE_A]) *
                             dw__scalar_load(scale_b->data, scale_b->dtype,
                                             scale_b->rank ? group * scale_b->stride[0] : 0)
                                 .number;
        const int64_t end =
            dw__scalar_load(offsets->data, offsets->dtype, (group + 1) * offsets->stride[0])
                .integer;
        if (end < row || end > a->shape[0])
            DW_TRY(dw__fail(DW_INDEX,
                            "%s: group %" PRId64 " ends at row %" PRId64
                            "; expected offsets that ascend from 0 to at most %" PRId64
                            ", the number of rows",
                            dw_op_name(call->op), group, end, a->shape[0]));
        for (; row < end; row++)
            for (int64_t j = 0; j < n; j++) {
                const double sum = scale * dot(of_a + row * k, matrix + j * wide, k, NULL, 0, 0);
                dw__scalar_store(y->data, y->dtype, row * n + j, (dw__scalar){.number = sum});
            }
    }
    for (int64_t i = row * n; i < a->shape[0] * n; i++) /* rows without a group */
        dw__scalar_store(y->data, y->dtype, i, (dw__scalar){.number = 0});
cleanup:
    dw__free_aligned(of_a);
    dw__free_aligned(of_b);
    return status;
}
