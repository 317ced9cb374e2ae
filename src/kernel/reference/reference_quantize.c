/* The operations of quantization, and the product of codes, with the codecs' own functions, on contiguous copies. */
#include "deepwell/number.h"
#include "kernel/quantization.h"
#include "kernel/reference/primitives.h"
#include "kernel/reference/scalar.h"
#include "number/half.h"
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

static dw_status decode(const dw__tensor *codes, float **values) {
    const int64_t count = dw__tensor_count(codes);
    *values = dw__malloc_aligned((size_t)count * sizeof(float) + 1);
    if (!*values) return dw__fail_memory("decoded numbers", (size_t)count * sizeof(float));
    return dw_decode(codes->dtype, count, codes->data, *values);
}

dw_status dw__reference_multiply_codes(const dw__call *call, void *unused) {
    (void)unused;
    const dw__tensor *a = &call->inputs[0], *b = &call->inputs[1], *y = &call->outputs[0];
    const int64_t m = a->shape[0], n = b->shape[0], k = a->shape[1];
    const double scale_a = dw__scalar_load(call->inputs[2].data, call->inputs[2].dtype, 0).number,
                 scale_b = dw__scalar_load(call->inputs[3].data, call->inputs[3].dtype, 0).number;
    dw_status status = DW_OK;
    float *of_a = NULL, *of_b = NULL;
    if (!y->data) return DW_OK;
    DW_TRY(decode(a, &of_a));
    DW_TRY(decode(b, &of_b));
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = 0.0;
            for (int64_t l = 0; l < k; l++)
                sum += (double)of_a[i * k + l] * (double)of_b[j * k + l];
            dw__scalar_store(y->data, y->dtype, i * n + j,
                             (dw__scalar){.number = sum * scale_a * scale_b});
        }
cleanup:
    dw__free_aligned(of_a);
    dw__free_aligned(of_b);
    return status;
}
