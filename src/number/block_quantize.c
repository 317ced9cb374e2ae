/* A matrix into codes and scales. Every task works on rows whose blocks lie along them: those of the source
 * (axis 1), or a transposed copy on the stack (axis 0). */
#include "number/block.h"
#include "number/run.h"
#include <float.h>

DW_ISA_TABLE(dw__number_loops)

/* ---- a block's scale ------------------------------------------------------------------------- */

typedef struct block_scale {
    bool nan;
    uint8_t code; /* of E8M0 and UE4M3 */
    float value;  /* of F32 scales, which elements are divided by */
    float factor; /* else: what elements are multiplied by */
} block_scale;

static const uint32_t infinite_bits = 0x7F800000u;

static block_scale nan_scale(const dw__block_call *call) {
    uint32_t code = call->layout.scale == DW_FORMAT_UE4M3 ? 0x7F : 0xFF;
    return (block_scale){
        .nan = true, .code = (uint8_t)code, .value = dw__f32_from_bits(0x7FC00000u)};
}

static block_scale nvfp4_scale(const dw__block_call *call, float amax) {
    float wanted = amax / 6.0f / call->options.tensor_scale;
    uint32_t code =
        dw__encode_one(DW_FORMAT_UE4M3, wanted, DW_OVERFLOW_SATURATE, DW_ROUND_NEAREST, 0);
    float scale = dw__decode_one(DW_FORMAT_UE4M3, code);
    float factor = 0.0f;
    if (scale > 0.0f) {
        factor = 1.0f / call->options.tensor_scale / scale;
        factor = factor < FLT_MAX ? factor : FLT_MAX;
    }
    return (block_scale){.code = (uint8_t)code, .factor = factor};
}

/* From the bits of amax. */
static block_scale find_scale(const dw__block_call *call, uint32_t amax) {
    if (amax > infinite_bits) return nan_scale(call);
    switch (call->layout.scale) {
    case DW_FORMAT_E8M0: {
        uint32_t code = dw__mx_scale(&call->mx, amax);
        return (block_scale){.code = (uint8_t)code, .factor = dw__mx_factor(code)};
    }
    case DW_FORMAT_UE4M3:
        return amax == infinite_bits ? nan_scale(call) : nvfp4_scale(call, dw__f32_from_bits(amax));
    default: {
        float scale = amax == infinite_bits ? 0x1p120f : dw__f32_from_bits(amax) / 448.0f;
        return (block_scale){.value = scale};
    }
    }
}

static void store_scale(const dw__block_call *call, int64_t index, const block_scale *scale) {
    if (call->layout.scale == DW_FORMAT_COUNT)
        ((float *)call->scales)[index] = scale->value;
    else
        ((uint8_t *)call->scales)[index] = scale->code;
}

/* ---- codes ----------------------------------------------------------------------------------- */

/* One byte each, of `count` elements under one scale. */
static void encode_block(const dw__block_call *call, const block_scale *scale, const float *x,
                         int64_t count, const uint32_t *words, uint8_t *codes) {
    dw_format element = call->layout.element;
    if (scale->nan)
        memset(codes, (int)dw__format_nan(element), (size_t)count);
    else if (call->layout.scale == DW_FORMAT_COUNT && scale->value > 0.0f)
        call->loops->divide(x, scale->value, count, words, codes);
    else
        call->loops->scale[element](x, scale->factor, count, words, codes);
}

/* Blocks of one row; scales found here, or given for square blocks. Passes begin at blocks' starts. */
static void encode_pass(const dw__block_call *call, const block_scale *given, int64_t outer,
                        int64_t inner, const float *x, int64_t count, const uint32_t *words,
                        uint8_t *codes) {
    enum { MX_BLOCK = 32 };
    const int64_t block = call->layout.block;
    int64_t done = 0;
    if (!given && !words && block == MX_BLOCK) {
        uint8_t *scales = (uint8_t *)call->scales + dw__block_scale_index(call, outer, inner);
        call->loops->mx[call->layout.element](x, count / MX_BLOCK, &call->mx, codes, scales);
        done = count / MX_BLOCK * MX_BLOCK;
    }
    for (; done < count; done += block) {
        int64_t length = count - done < block ? count - done : block;
        block_scale own;
        const block_scale *scale = given;
        if (!scale) {
            own = find_scale(call, call->loops->amax(x + done, length));
            store_scale(call, dw__block_scale_index(call, outer, inner + done), &own);
            scale = &own;
        } else {
            given++;
        }
        encode_block(call, scale, x + done, length, words ? words + done : NULL, codes + done);
    }
}

static void encode_row(const dw__block_call *call, const block_scale *given, int64_t outer,
                       int64_t inner, const float *x, int64_t count) {
    bool pairs = call->layout.element == DW_FORMAT_E2M1;
    uint8_t *row = call->codes + outer * call->code_stride + dw__block_bytes(call, inner);
    for (int64_t start = 0; start < count; start += DW_BLOCK_PASS) {
        int64_t length = count - start < DW_BLOCK_PASS ? count - start : DW_BLOCK_PASS;
        uint32_t buffer[DW_BLOCK_PASS];
        uint8_t unpacked[DW_BLOCK_PASS + 1];
        const uint32_t *words = NULL;
        if (call->options.rounding == DW_ROUND_STOCHASTIC) {
            uint64_t first = (uint64_t)(outer * call->layout.inner + inner + start);
            call->loops->words(&call->options.random, first, length, buffer);
            words = buffer;
        }
        encode_pass(call, given ? given + start / call->layout.block : NULL, outer, inner + start,
                    x + start, length, words, pairs ? unpacked : row + start);
        if (pairs) {
            unpacked[length] = 0; /* follows a last odd code */
            call->loops->pack_pairs(unpacked, (length + 1) / 2, row + start / 2);
        }
    }
    /* The row's last block is completed, as far as there is room. */
    int64_t whole = dw__block_bytes(call, call->layout.scale_cols * call->layout.block);
    int64_t room = whole < call->code_stride ? whole : call->code_stride;
    if (inner + count == call->layout.inner && room > call->layout.row_bytes)
        memset(call->codes + outer * call->code_stride + call->layout.row_bytes, 0,
               (size_t)(room - call->layout.row_bytes));
}

/* ---- regions ----------------------------------------------------------------------------------- */

/* Rows that share their scales: amax over all of them first. */
static void encode_square(const dw__block_call *call, const dw__block_region *region,
                          const float *x, int64_t stride, int64_t first, int64_t rows) {
    enum { MOST = DW_BLOCK_TASK / 16 / 16 }; /* blocks across a region */
    block_scale scales[MOST];
    const int64_t block = call->layout.block;
    for (int64_t start = 0; start < region->inners; start += block) {
        int64_t length = region->inners - start < block ? region->inners - start : block;
        uint32_t amax = 0;
        for (int64_t row = first; row < first + rows; row++) {
            uint32_t own = call->loops->amax(x + row * stride + start, length);
            amax = own > amax ? own : amax;
        }
        block_scale *scale = &scales[start / block];
        *scale = find_scale(call, amax);
        store_scale(call, dw__block_scale_index(call, region->outer + first, region->inner + start),
                    scale);
    }
    for (int64_t row = first; row < first + rows; row++)
        encode_row(call, scales, region->outer + row, region->inner, x + row * stride,
                   region->inners);
}

static void encode_region(const dw__block_call *call, const dw__block_region *region,
                          const float *x, int64_t stride) {
    if (!call->options.square) {
        for (int64_t row = 0; row < region->outers; row++)
            encode_row(call, NULL, region->outer + row, region->inner, x + row * stride,
                       region->inners);
        return;
    }
    for (int64_t row = 0; row < region->outers; row += call->layout.block) {
        int64_t left = region->outers - row;
        encode_square(call, region, x, stride, row,
                      left < call->layout.block ? left : call->layout.block);
    }
}

static void quantize_task(void *context, int64_t index, int worker) {
    (void)worker;
    const dw__block_call *call = context;
    dw__block_region region = dw__block_region_at(call, index);
    if (call->options.axis == 1) {
        encode_region(call, &region, call->source + region.outer * call->row_stride + region.inner,
                      call->row_stride);
        return;
    }
    float turned[DW_BLOCK_SCRATCH];
    call->loops->transpose(call->source + region.inner * call->row_stride + region.outer,
                           call->row_stride, region.inners, region.outers, turned,
                           call->inner_step);
    encode_region(call, &region, turned, call->inner_step);
}

dw_status dw_block_quantize(const dw_block_options *options, int64_t rows, int64_t cols,
                            const float *source, int64_t row_stride, void *codes,
                            int64_t code_stride, void *scales) {
    dw__block_call call;
    DW_RETURN_IF_FAILED(dw__block_prepare("dw_block_quantize", options, rows, cols, row_stride,
                                          code_stride, &call));
    call.loops = dw__number_loops_now();
    call.source = source;
    call.codes = codes;
    call.scales = scales;
    dw__number_run(dw__block_tasks(&call), quantize_task, &call);
    return DW_OK;
}

/* ---- amax ---------------------------------------------------------------------------------------- */

typedef struct amax_call {
    const dw__number_loops *loops;
    int64_t rows, cols, row_stride, task_rows;
    const float *source;
    uint32_t most
        [DW_MAX_THREADS]; /* of each worker: the order in which they are taken does not matter */
} amax_call;

static void amax_task(void *context, int64_t index, int worker) {
    amax_call *call = context;
    int64_t end = (index + 1) * call->task_rows;
    for (int64_t row = index * call->task_rows; row < end && row < call->rows; row++) {
        uint32_t own = call->loops->finite_amax(call->source + row * call->row_stride, call->cols);
        if (own > call->most[worker]) call->most[worker] = own;
    }
}

dw_status dw_amax(int64_t rows, int64_t cols, const float *source, int64_t row_stride,
                  float *amax) {
    if (rows < 0 || cols < 0 || row_stride < cols)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "dw_amax: the matrix is [%lld, %lld] with row_stride %lld: expected sizes "
                        "from 0 on, and a stride that is no less than the columns",
                        (long long)rows, (long long)cols, (long long)row_stride);
    amax_call call = {.loops = dw__number_loops_now(),
                      .rows = rows,
                      .cols = cols,
                      .row_stride = row_stride,
                      .task_rows = cols < DW_BLOCK_TASK ? DW_BLOCK_TASK / (cols + 1) + 1 : 1,
                      .source = source};
    dw__number_run(rows / call.task_rows + (rows % call.task_rows != 0), amax_task, &call);
    uint32_t most = 0;
    for (int worker = 0; worker < DW_MAX_THREADS; worker++)
        most = call.most[worker] > most ? call.most[worker] : most;
    *amax = dw__f32_from_bits(most);
    return DW_OK;
}
