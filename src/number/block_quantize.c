/* Quantizes a matrix into codes and scales. Every task works on rows that contain whole blocks: rows of the
 * source (axis 1), or rows of a transposed copy on the stack (axis 0). */
#include "number/block.h"
#include "number/number_run.h"

DW_ISA_TABLE(dw__number_loops)

enum { MOST_BLOCKS = DW_BLOCK_PASS / 16 }; /* of one pass */
static const uint32_t infinite_bits = 0x7F800000u;

/* Computes the scales of consecutive blocks from the bits of amax and stores them from `index` on. */
static void find_scales(const dw__block_call *call, const uint32_t *amax, int64_t blocks,
                        int64_t index, float *factors) {
    uint8_t *codes = (uint8_t *)call->scales + index;
    switch (call->layout.scale) {
    case DW_E8M0: call->loops->mx_scales(&call->mx, amax, blocks, codes, factors); break;
    case DW_UE4M3:
        call->loops->nvfp4_scales(call->options.tensor_scale, amax, blocks, codes, factors);
        break;
    default: call->loops->f32_scales(amax, blocks, (float *)call->scales + index, factors);
    }
}

/* Codes take one byte each. */
static void encode_blocks(const dw__block_call *call, const uint32_t *amax, const float *factors,
                          const float *x, int64_t count, const uint32_t *words, uint8_t *codes) {
    const dw_dtype element = call->layout.element;
    const int64_t block = call->layout.block;
    if (call->layout.scale == DW_F32)
        call->loops->divide(x, count, block, factors, words, codes);
    else
        call->loops->scale[element](x, count, block, factors, words, codes);
    uint32_t nan = call->layout.scale == DW_UE4M3 ? infinite_bits : infinite_bits + 1;
    for (int64_t start = 0; start < count; start += block, amax++) {
        int64_t length = count - start < block ? count - start : block;
        if (*amax >= nan) memset(codes + start, (int)dw__format_nan(element), (size_t)length);
    }
}

/* amax and factors of the blocks of square tiles. For other blocks the row's own are computed here. */
typedef struct given_blocks {
    const uint32_t *amax;
    const float *factors;
} given_blocks;

static void encode_pass(const dw__block_call *call, const given_blocks *given, int64_t outer,
                        int64_t inner, const float *x, int64_t count, const uint32_t *words,
                        uint8_t *codes) {
    if (given) {
        encode_blocks(call, given->amax, given->factors, x, count, words, codes);
        return;
    }
    uint32_t amax[MOST_BLOCKS];
    float factors[MOST_BLOCKS];
    const int64_t block = call->layout.block;
    call->loops->amax(x, count, block, amax);
    find_scales(call, amax, (count + block - 1) / block, dw__block_scale_index(call, outer, inner),
                factors);
    encode_blocks(call, amax, factors, x, count, words, codes);
}

static void encode_row(const dw__block_call *call, const given_blocks *given, int64_t outer,
                       int64_t inner, const float *x, int64_t count) {
    bool pairs = call->layout.element == DW_E2M1;
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
        given_blocks here;
        if (given) {
            int64_t done = start / call->layout.block;
            here = (given_blocks){given->amax + done, given->factors + done};
        }
        encode_pass(call, given ? &here : NULL, outer, inner + start, x + start, length, words,
                    pairs ? unpacked : row + start);
        if (pairs) {
            unpacked[length] = 0; /* pairs with a last odd code */
            call->loops->pack_pairs(unpacked, (length + 1) / 2, row + start / 2);
        }
    }
    /* Completes the row's last block as far as the buffer has room. */
    int64_t whole = dw__block_bytes(call, call->layout.scale_cols * call->layout.block);
    int64_t room = whole < call->code_stride ? whole : call->code_stride;
    if (inner + count == call->layout.inner && room > call->layout.row_bytes)
        memset(call->codes + outer * call->code_stride + call->layout.row_bytes, 0,
               (size_t)(room - call->layout.row_bytes));
}

/* ---- regions ----------------------------------------------------------------------------------- */

/* Rows that share their scales: computes amax over all of them first. */
static void encode_square(const dw__block_call *call, const dw__block_region *region,
                          const float *x, int64_t stride, int64_t first, int64_t rows) {
    enum { MOST = DW_BLOCK_TASK / 16 / 16 }; /* blocks across a region */
    uint32_t amax[MOST] = {0}, own[MOST];
    float factors[MOST];
    const int64_t block = call->layout.block, blocks = (region->inners + block - 1) / block;
    for (int64_t row = first; row < first + rows; row++) {
        call->loops->amax(x + row * stride, region->inners, block, own);
        for (int64_t i = 0; i < blocks; i++) amax[i] = own[i] > amax[i] ? own[i] : amax[i];
    }
    find_scales(call, amax, blocks,
                dw__block_scale_index(call, region->outer + first, region->inner), factors);
    const given_blocks given = {amax, factors};
    for (int64_t row = first; row < first + rows; row++)
        encode_row(call, &given, region->outer + row, region->inner, x + row * stride,
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
    const int64_t stride = call->inner_step + DW_BLOCK_GAP;
    call->loops->transpose(call->source + region.inner * call->row_stride + region.outer,
                           call->row_stride, region.inners, region.outers, turned, stride);
    encode_region(call, &region, turned, stride);
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
    uint32_t most[DW_MAX_THREADS]; /* one per worker; the order of the blocks does not matter */
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
                        "of 0 or more, and a stride of at least the columns",
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
