/* quantize_tiles and multiply_codes of fp8-block: the GEMM that Hopper's tensor cores compute with scales of blocks.
 *
 * The sum of the products of 128 codes is computed in F32, multiplied by the product of the two scales, and added in F32,
 * block after block: as a GPU does it, and unlike a GEMM of values, which would round code * scale first. A task computes
 * a tile of the result. It decodes a block of K of its rows of both operands, multiplies them with the loops of small
 * GEMMs, and adds the scaled sums to its tile. Each element's order of additions depends on K alone, so results do not
 * depend on the number of threads. */
#include "base/pool.h"
#include "common/scale_layout.h"
#include "kernel/cpu/cpu_matmul.h"
#include "kernel/quantization.h"
#include "number/half.h"
#include <stdatomic.h>
#include <string.h>

DW_ISA_TABLE(dw__gemm_loops)

enum { TILE = 128, BLOCK = DW_FP8_BLOCK_SIDE };

/* ---- codes ----------------------------------------------------------------------------------------- */

enum { WIDEN_TASK = 1 << 14 }; /* elements */

typedef struct widening {
    const dw__tensor *x;
    float *to;
    int64_t rows_each;
} widening;

static bool is_rows(const dw__tensor *x) {
    return (x->stride[1] == 1 || x->shape[1] == 1) &&
           (x->stride[0] >= x->shape[1] || x->shape[0] == 1);
}

static dw_status quantize_supports(const dw__kernel *kernel, const void *given,
                                   const dw__gpu_target *gpu) {
    const dw__call *call = given;
    const dw__tensor *x = &call->inputs[0];
    (void)gpu;
    return call->outputs[1].dtype == DW_F32 && !dw__call_attr(call, DW_ATTR_KEY_AXIS) &&
                   (x->dtype == DW_F32 || x->dtype == DW_BF16 || x->dtype == DW_F16) && is_rows(x)
               ? DW_OK
               : dw__kernel_refuse(kernel);
}

static size_t widened_bytes(const dw__tensor *x) {
    const int64_t count = x->dtype == DW_F32 ? 0 : dw__tensor_count(x);
    return (size_t)dw__round_up(count * (int64_t)sizeof(float), 64);
}

/* Scales as dw_block_quantize lays them out; the largest of both orientations. */
static size_t plain_bytes(const dw__tensor *x) {
    const int64_t rows = x->shape[0], cols = x->shape[1], along = rows * dw__divide_up(cols, BLOCK),
                  across = cols * dw__divide_up(rows, BLOCK);
    return (size_t)dw__round_up((along > across ? along : across) * (int64_t)sizeof(float), 64);
}

/* And codes that nobody reads. */
static dw_status quantize_scratch(const dw__kernel *kernel, const void *given,
                                  const dw__context *context, size_t *bytes) {
    const dw__call *call = given;
    (void)kernel, (void)context;
    *bytes = widened_bytes(&call->inputs[0]) + plain_bytes(&call->inputs[0]) +
             dw__tensor_bytes(&call->outputs[0]) + dw__tensor_bytes(&call->outputs[2]);
    return DW_OK;
}

static void widen_task(void *context, int64_t index, int worker) {
    (void)worker;
    const widening *w = context;
    const int64_t cols = w->x->shape[1], first = index * w->rows_each;
    for (int64_t row = first; row < first + w->rows_each && row < w->x->shape[0]; row++) {
        const uint16_t *from = (const uint16_t *)w->x->data + row * w->x->stride[0];
        float *to = w->to + row * cols;
        for (int64_t i = 0; i < cols; i++)
            to[i] = w->x->dtype == DW_BF16 ? dw__bf16_to_f32(from[i]) : dw__f16_to_f32(from[i]);
    }
}

/* Arranges scales [rows, columns] as multiply_codes reads them. */
static void arrange(const dw_block_layout *l, bool square, const float *scales, float *out) {
    const int64_t padded = dw__round_up(l->scale_cols, DW_SQUARE_SCALES);
    if (square) memset(out, 0, (size_t)(l->scale_rows * padded) * sizeof *out);
    for (int64_t row = 0; row < l->scale_rows; row++)
        for (int64_t column = 0; column < l->scale_cols; column++)
            out[square ? row * padded + column : column * l->scale_rows + row] =
                scales[row * l->scale_cols + column];
}

static dw_status quantize_run(const dw__call *call, void *scratch) {
    const dw__tensor *x = &call->inputs[0];
    const float *values = x->data;
    int64_t stride = x->shape[0] == 1 ? x->shape[1] : x->stride[0];
    dw__quantization q;
    DW_RETURN_IF_FAILED(dw__quantization_of(call, &q));
    if (q.rows == 0 || q.cols == 0) {
        for (int i = 0; i < 4; i++)
            if (call->outputs[i].data)
                memset(call->outputs[i].data, 0, dw__tensor_bytes(&call->outputs[i]));
        return DW_OK;
    }
    float *plain = (float *)((char *)scratch + widened_bytes(x));
    char *unread = (char *)plain + plain_bytes(x);
    if (x->dtype != DW_F32) {
        widening w = {x, scratch, WIDEN_TASK / q.cols + 1};
        dw__pool_run(dw__divide_up(q.rows, w.rows_each), widen_task, &w);
        values = scratch;
        stride = q.cols;
    }
    for (int i = 0; i < 2; i++) {
        const dw__tensor *codes = &call->outputs[2 * i], *scales = codes + 1;
        if (!codes->data && !scales->data) continue;
        q.options.axis = 1 - i;
        DW_RETURN_IF_FAILED(dw_block_layout_of(&q.options, q.rows, q.cols, &q.layout));
        char *to = codes->data ? codes->data : unread;
        const int64_t padded = codes->shape[1], left = padded - q.layout.row_bytes;
        DW_RETURN_IF_FAILED(
            dw_block_quantize(&q.options, q.rows, q.cols, values, stride, to, padded, plain));
        for (int64_t row = 0; left && row < q.layout.outer; row++)
            memset(to + row * padded + q.layout.row_bytes, 0, (size_t)left);
        if (scales->data) arrange(&q.layout, q.options.square != 0, plain, scales->data);
    }
    return DW_OK;
}

/* ---- products -------------------------------------------------------------------------------------- */

typedef struct product {
    const dw__call *call;
    int64_t m, n, k, across; /* across: tiles along n */
    float values[256];       /* of the codes */
    char *scratch;
} product;

/* A worker's room: a block of K of both operands, the products of that block, and their scaled sum. */
typedef struct room {
    float a[TILE * BLOCK], b[BLOCK * TILE], part[TILE * TILE], sum[TILE * TILE];
    float scale_a[TILE], scale_b[TILE];
} room;

static dw_status product_supports(const dw__kernel *kernel, const void *given,
                                  const dw__gpu_target *gpu) {
    enum { CODES_A, CODES_B, TILES_A = 4, TILES_B };
    const dw__call *call = given;
    const int operands[] = {CODES_A, CODES_B, TILES_A, TILES_B};
    (void)gpu;
    if (!dw__call_has_f32_scales(call) || call->inputs[TILES_A].dtype != DW_F32 ||
        call->outputs[0].dtype != DW_F32 || dw__call_bias(call))
        return dw__kernel_refuse(kernel);
    for (size_t i = 0; i < DW_COUNT(operands); i++)
        if (!dw__tensor_is_contiguous(&call->inputs[operands[i]])) return dw__kernel_refuse(kernel);
    return DW_OK;
}

static dw_status product_scratch(const dw__kernel *kernel, const void *given,
                                 const dw__context *context, size_t *bytes) {
    (void)kernel, (void)given, (void)context;
    *bytes = (size_t)dw__pool_threads() * sizeof(room);
    return DW_OK;
}

/* Decodes rows [first, first + rows) of a block of K, as columns of `to` if turned. */
static void decode(const product *p, const dw__tensor *codes, int64_t first, int64_t rows,
                   int64_t start, int64_t depth, bool turned, float *to) {
    for (int64_t row = 0; row < rows; row++) {
        const uint8_t *from = (const uint8_t *)codes->data + (first + row) * p->k + start;
        if (turned)
            for (int64_t i = 0; i < depth; i++) to[i * TILE + row] = p->values[from[i]];
        else
            for (int64_t i = 0; i < depth; i++) to[row * BLOCK + i] = p->values[from[i]];
    }
}

/* Three axes: blocks are square. */
static void read_scales(const dw__tensor *scales, int64_t first, int64_t rows, int64_t block,
                        float *to) {
    const float *from = scales->data;
    for (int64_t row = 0; row < rows; row++)
        to[row] = scales->rank == 3
                      ? from[(first + row) / BLOCK * scales->shape[1] * DW_SQUARE_SCALES + block]
                      : from[block * scales->shape[1] + first + row];
}

static void multiply_task(void *context, int64_t index, int worker) {
    enum { CODES_A, CODES_B, TILES_A = 4, TILES_B };
    const product *p = context;
    const dw__tensor *in = p->call->inputs;
    room *own = (room *)p->scratch + worker;
    const int64_t row = index / p->across * TILE, column = index % p->across * TILE,
                  rows = dw__min64(TILE, p->m - row), columns = dw__min64(TILE, p->n - column);
    memset(own->sum, 0, (size_t)rows * TILE * sizeof(float));
    for (int64_t start = 0; start < p->k; start += BLOCK) {
        const int64_t depth = dw__min64(BLOCK, p->k - start), block = start / BLOCK;
        decode(p, &in[CODES_A], row, rows, start, depth, false, own->a);
        decode(p, &in[CODES_B], column, columns, start, depth, true, own->b);
        read_scales(&in[TILES_A], row, rows, block, own->scale_a);
        read_scales(&in[TILES_B], column, columns, block, own->scale_b);
        dw__gemm_loops_now()->small(false, false, rows, columns, depth, 1.0f, own->a, BLOCK, own->b,
                                    TILE, 0.0f, own->part, TILE);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < columns; j++)
                own->sum[i * TILE + j] +=
                    own->part[i * TILE + j] * (own->scale_a[i] * own->scale_b[j]);
    }
    float *y = (float *)p->call->outputs[0].data + row * p->n + column;
    for (int64_t i = 0; i < rows; i++)
        memcpy(y + i * p->n, own->sum + i * TILE, (size_t)columns * sizeof(float));
}

static dw_status product_run(const dw__call *call, void *scratch) {
    product p = {.call = call,
                 .m = call->inputs[0].shape[0],
                 .n = call->inputs[1].shape[0],
                 .k = call->inputs[0].shape[1],
                 .scratch = scratch};
    uint8_t codes[256];
    if (!call->outputs[0].data) return DW_OK;
    for (int i = 0; i < 256; i++) codes[i] = (uint8_t)i;
    DW_RETURN_IF_FAILED(dw_decode(DW_E4M3, 256, codes, p.values));
    p.across = dw__divide_up(p.n, TILE);
    dw__pool_run(dw__divide_up(p.m, TILE) * p.across, multiply_task, &p);
    return DW_OK;
}

/* ---- entries --------------------------------------------------------------------------------------- */

static const dw__kernel quantize_fp8_block = {
    .name = "cpu.quantize_tiles.fp8_block",
    .op = DW_OP_QUANTIZE_TILES,
    .source = "ours, codecs in C per instruction set",
    .needs = "fp8-block of rows of F32, BF16 or F16, in both orientations",
    .supports = quantize_supports,
    .workspace_bytes = quantize_scratch,
    .run = quantize_run,
    .tolerance_factor = 1.0,
};

static const dw__kernel multiply_fp8_block = {
    .name = "cpu.multiply_codes.fp8_block",
    .op = DW_OP_MULTIPLY_CODES,
    .source = "ours, C per instruction set",
    .needs = "contiguous codes of fp8-block, an F32 result and no bias",
    .supports = product_supports,
    .workspace_bytes = product_scratch,
    .run = product_run,
    /* Sums of 128 products and of their blocks, each in F32. */
    .tolerance_factor = 4.0,
};

const dw__kernel *const dw__kernels_cpu_fp8_block[] = {&quantize_fp8_block, &multiply_fp8_block,
                                                       NULL};
