/* Decodes codes and scales into a matrix, with the same tasks as quantization. */
#include "number/block.h"
#include "number/number_run.h"

DW_ISA_TABLE(dw__number_loops)

enum { MOST_BLOCKS = DW_BLOCK_PASS / 16 }; /* of one pass */

/* A NaN scale is stored, not multiplied, because the compiler chooses which of two NaNs a multiplication keeps. */
static void decode_pass(const dw__block_call *call, int64_t outer, int64_t inner,
                        const uint8_t *codes, int64_t count, float *x) {
    const int64_t block = call->layout.block, blocks = (count + block - 1) / block;
    const int64_t index = dw__block_scale_index(call, outer, inner);
    float beyond = call->options.scheme == DW_SCHEME_NVFP4 ? call->options.tensor_scale : 1.0f;
    float scales[MOST_BLOCKS];
    if (call->layout.scale == DW_F32)
        memcpy(scales, (const float *)call->scales + index, (size_t)blocks * sizeof *scales);
    else
        call->loops->scale_values[call->layout.scale]((const uint8_t *)call->scales + index, blocks,
                                                      scales);
    call->loops->decode[call->layout.element](codes, count, block, scales, beyond, x);
    for (int64_t i = 0; i < blocks; i++) {
        if (scales[i] == scales[i]) continue;
        int64_t end = (i + 1) * block < count ? (i + 1) * block : count;
        for (int64_t j = i * block; j < end; j++) x[j] = dw__f32_from_bits(0x7FC00000u);
    }
}

static void decode_row(const dw__block_call *call, int64_t outer, int64_t inner, int64_t count,
                       float *x) {
    bool pairs = call->layout.element == DW_E2M1;
    const uint8_t *row = call->codes + outer * call->code_stride + dw__block_bytes(call, inner);
    for (int64_t start = 0; start < count; start += DW_BLOCK_PASS) {
        int64_t length = count - start < DW_BLOCK_PASS ? count - start : DW_BLOCK_PASS;
        uint8_t unpacked[DW_BLOCK_PASS];
        if (pairs) call->loops->unpack_pairs(row + start / 2, (length + 1) / 2, unpacked);
        decode_pass(call, outer, inner + start, pairs ? unpacked : row + start, length, x + start);
    }
}

static void dequantize_task(void *context, int64_t index, int worker) {
    (void)worker;
    const dw__block_call *call = context;
    dw__block_region region = dw__block_region_at(call, index);
    if (call->options.axis == 1) {
        float *x = call->result + region.outer * call->row_stride + region.inner;
        for (int64_t row = 0; row < region.outers; row++)
            decode_row(call, region.outer + row, region.inner, region.inners,
                       x + row * call->row_stride);
        return;
    }
    const int64_t stride = call->inner_step + DW_BLOCK_GAP;
    float turned[DW_BLOCK_SCRATCH];
    for (int64_t row = 0; row < region.outers; row++)
        decode_row(call, region.outer + row, region.inner, region.inners, turned + row * stride);
    call->loops->transpose(turned, stride, region.outers, region.inners,
                           call->result + region.inner * call->row_stride + region.outer,
                           call->row_stride);
}

dw_status dw_block_dequantize(const dw_block_options *options, int64_t rows, int64_t cols,
                              const void *codes, int64_t code_stride, const void *scales,
                              float *result, int64_t row_stride) {
    dw__block_call call;
    DW_RETURN_IF_FAILED(dw__block_prepare("dw_block_dequantize", options, rows, cols, row_stride,
                                          code_stride, &call));
    call.loops = dw__number_loops_now();
    call.codes = (uint8_t *)codes;
    call.scales = (void *)scales;
    call.result = result;
    dw__number_run(dw__block_tasks(&call), dequantize_task, &call);
    return DW_OK;
}
