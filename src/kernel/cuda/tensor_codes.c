/* quantize_tensor and multiply_codes of the graph, by cuda/common/tensor_codes.cu, whose product runs on FMA units: it is
 * for the shapes that cuBLASLt does not take. With scales of fp8-block the product has another kernel before that,
 * fp8_block_gemm.cu, on tensor cores for 16 bits. */
#include "common/scale_layout.h"
#include "common/tensor_codes_params.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/quantization.h"
#include <stdio.h>

/* ---- codes ----------------------------------------------------------------------------------------------- */

enum { AMAX, CODES, COMBINE, ENTRIES }; /* entry points */
static const char *const entries[] = {"quantize_tensor_amax", "quantize_tensor_codes",
                                      "quantize_tensor_combine"};
enum { VECTOR = 8, ALIGNMENT = 16, MAGNITUDE_BYTES = DW_TENSOR_CODES_PARTS * 4 };

/* True if the kernel that made the matrix has found its largest magnitude. */
static bool is_told(const dw__call *c) { return c->input_count > 1; }

/* A plan's operands have addresses of that alignment before they have memory. */
static bool is_whole(const dw__tensor *x) {
    return (x->stride[1] == 1 || x->shape[1] == 1) && x->shape[0] % VECTOR == 0 &&
           x->shape[1] % VECTOR == 0 && x->stride[0] % VECTOR == 0 &&
           (uintptr_t)x->data % ALIGNMENT == 0;
}

static bool is_e5m2(const dw__tensor *codes) { return codes->dtype == DW_E5M2; }

static int64_t tiles_of(const dw__tensor *x) {
    return (x->shape[0] + DW_TENSOR_CODES_TILE - 1) / DW_TENSOR_CODES_TILE *
           ((x->shape[1] + DW_TENSOR_CODES_TILE - 1) / DW_TENSOR_CODES_TILE);
}

static dw_status codes_supports(const dw__kernel *kernel, const void *call,
                                const dw__gpu_target *gpu) {
    const dw__tensor *x = &((const dw__operation_call *)call)->call.inputs[0];
    const int64_t most = INT32_MAX - 1024; /* tensor_codes_params.h */
    if (x->shape[0] > most || x->shape[1] > most || tiles_of(x) > most)
        return dw__fail(DW_UNSUPPORTED,
                        "%s: %lld x %lld elements; expected fewer than 2^31 - 1024 rows, columns "
                        "and tiles of 128 x 128",
                        kernel->name, (long long)x->shape[0], (long long)x->shape[1]);
    return dw__gpu_kernel_has(kernel, gpu);
}

static dw_status codes_workspace(const dw__kernel *kernel, const void *call,
                                 const dw__context *context, size_t *bytes) {
    (void)kernel, (void)call, (void)context;
    *bytes = MAGNITUDE_BYTES;
    return DW_OK;
}

/* The matrix is read twice, unless its largest magnitude is known. */
static void codes_seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                          dw__kernel_seconds *result) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    dw__gpu_seconds_of_bytes(kernel, call, gpu, result);
    if (is_told(c)) return;
    result->seconds += 4e-6 + (double)dw__tensor_bytes(&c->inputs[0]) / gpu->bytes;
}

static dw_status codes_prepare(const dw__kernel *kernel, const void *call,
                               const dw__context *context, const dw__variant **variant) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    const uint64_t type = (uint64_t)dw__gpu_element(c->inputs[0].dtype);
    return dw__variant_of(context, kernel,
                          type | (uint64_t)is_e5m2(&c->outputs[0]) << 4 |
                              (uint64_t)is_whole(&c->inputs[0]) << 5,
                          variant);
}

static dw_status launch(const dw__operation_call *c, const dw__context *context,
                        const dw__variant *variant, int entry, int64_t blocks,
                        dw_tensor_codes_params *p) {
    return dw__gpu_launch(c, context, entries[entry], variant->functions[entry], blocks,
                          DW_TENSOR_CODES_THREADS, p);
}

static dw_status codes_enqueue(const void *call, const dw__context *context,
                               const dw__variant *variant) {
    const dw__operation_call *c = call;
    const dw__tensor *x = &c->call.inputs[0];
    const int64_t vectors = x->shape[0] * ((x->shape[1] + VECTOR - 1) / VECTOR),
                  wanted = (vectors + DW_TENSOR_CODES_THREADS - 1) / DW_TENSOR_CODES_THREADS,
                  resident = (int64_t)context->sm_count * DW_TENSOR_CODES_RESIDENT,
                  parts = resident < DW_TENSOR_CODES_PARTS ? resident : DW_TENSOR_CODES_PARTS,
                  across = (x->shape[1] + DW_TENSOR_CODES_TILE - 1) / DW_TENSOR_CODES_TILE,
                  tiles = tiles_of(x), blocks = tiles < resident ? tiles : resident;
    dw_tensor_codes_params p = {.x = x->data,
                                .rows = (int)x->shape[0],
                                .columns = (int)x->shape[1],
                                .row_stride = x->stride[0],
                                .column_stride = x->stride[1],
                                .magnitudes = c->workspace,
                                .parts = (int)(wanted < parts ? wanted : parts),
                                .tiles = (int)tiles,
                                .tiles_across = (int)across,
                                .codes = c->call.outputs[0].data,
                                .turned = c->call.outputs[1].data,
                                .scale = c->call.outputs[2].data};
    if (!is_told(&c->call)) {
        if (p.parts) DW_RETURN_IF_FAILED(launch(c, context, variant, AMAX, p.parts, &p));
        return launch(c, context, variant, CODES, blocks ? blocks : 1, &p);
    }
    const dw__tensor *found = &c->call.inputs[1];
    p.found = found->data;
    p.found_parts = (int)found->shape[0];
    if (p.found_parts > DW_TENSOR_CODES_PARTS) {
        p.parts = DW_TENSOR_CODES_COMBINING;
        DW_RETURN_IF_FAILED(launch(c, context, variant, COMBINE, p.parts, &p));
    } else {
        p.parts = p.found_parts;
        p.magnitudes = found->data;
    }
    return launch(c, context, variant, CODES, blocks ? blocks : 1, &p);
}

static dw_status codes_entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                                    dw__entry_point *points) {
    (void)kernel;
    for (int i = 0; i < ENTRIES; i++) {
        points[i].code = (dw__jit_variant){.source = "common/tensor_codes.cu",
                                           .entry = entries[i],
                                           .arch = dw__gpu_arch(capability)};
        dw__jit_add_define(&points[i].code, "TYPE", (int)(params & 15));
        dw__jit_add_define(&points[i].code, "E5M2", (int)(params >> 4 & 1));
        dw__jit_add_define(&points[i].code, "WHOLE", (int)(params >> 5 & 1));
    }
    return DW_OK;
}

/* Several tiles each way with edges within them; the first has edges within a vector, if the variant allows it. */
static void codes_example(uint64_t params, int index, dw__call *c) {
    static const dw_attr schemes[] = {{.key = DW_ATTR_KEY_SCHEME, .string = "fp8-tensor"},
                                      {.key = DW_ATTR_KEY_SCHEME, .string = "fp8-tensor-e5m2"}};
    const bool e5m2 = params >> 4 & 1, whole = params >> 5 & 1;
    const int64_t rows = index ? 144 : whole ? 136 : 133, columns = index || whole ? 272 : 259;
    const dw_dtype code = e5m2 ? DW_E5M2 : DW_E4M3;
    *c = (dw__call){
        .op = DW_OP_QUANTIZE_TENSOR,
        .attr_count = 1,
        .attrs = &schemes[e5m2],
        .input_count = 1,
        .output_count = 3,
        .inputs = {{.dtype = (dw_dtype)(params & 15), .rank = 2, .shape = {rows, columns}}},
        .outputs = {{.dtype = code, .rank = 2, .shape = {rows, columns}},
                    {.dtype = code, .rank = 2, .shape = {columns, rows}},
                    {.dtype = DW_F32}}};
    dw__tensor_set_contiguous(&c->inputs[0]);
    for (int i = 0; i < 3; i++) dw__tensor_set_contiguous(&c->outputs[i]);
}

const dw__kernel dw__gpu_quantize_tensor = {
    .name = "quantize_tensor",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .op = DW_OP_QUANTIZE_TENSOR,
    .proof = DW__RUN_ON_HOPPER,
    .operation = "quantize_tensor",
    .source = "cuda/common/tensor_codes.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "BF16, F16, F32; codes of FP8",
    .needs = "any strides",
    .reads_magnitudes = true,
    .supports = codes_supports,
    .seconds = codes_seconds,
    .workspace_bytes = codes_workspace,
    .prepare = codes_prepare,
    .enqueue = codes_enqueue,
    .entry_points = codes_entry_points,
    .first_use = &dw__operation_first_use,
    .tolerance = "every byte is the definition's",
    .example = codes_example,
    .tolerance_factor = 0.0,
};

/* ---- products -------------------------------------------------------------------------------------------- */

static int64_t blocks_of(const dw__tensor *y) {
    return (y->shape[0] + DW_MULTIPLY_CODES_TILE - 1) / DW_MULTIPLY_CODES_TILE *
           ((y->shape[1] + DW_MULTIPLY_CODES_TILE - 1) / DW_MULTIPLY_CODES_TILE);
}

static dw_status product_supports(const dw__kernel *kernel, const void *call,
                                  const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    if (dw__call_has_tiles(c) && !dw__call_has_f32_scales(c))
        return dw__fail(DW_TYPE, "%s multiplies codes without scales of blocks of one byte",
                        kernel->name);
    for (int i = 2; i < 4; i++)
        if (dw__call_has_row_scales(c) && !dw__tensor_is_contiguous(&c->inputs[i]))
            return dw__fail(DW_UNSUPPORTED, "%s: expected contiguous scales of rows", kernel->name);
    const dw__tensor *bias = dw__call_bias(c);
    if (bias && !dw__tensor_is_contiguous(bias))
        return dw__fail(DW_UNSUPPORTED, "%s: expected a contiguous bias", kernel->name);
    if (blocks_of(&c->outputs[0]) > INT32_MAX)
        return dw__fail(DW_UNSUPPORTED, "%s: %lld tiles; expected fewer than 2^31", kernel->name,
                        (long long)blocks_of(&c->outputs[0]));
    return dw__gpu_kernel_has(kernel, gpu);
}

static void product_seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                            dw__kernel_seconds *result) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    (void)kernel;
    result->seconds = 4e-6 + 2.0 * (double)dw__tensor_count(&c->outputs[0]) *
                                 (double)c->inputs[0].shape[1] / (gpu->flops / 16.0);
    snprintf(result->from, sizeof result->from, "estimate: FLOPs at the rate of FMA units");
}

static dw_status product_prepare(const dw__kernel *kernel, const void *call,
                                 const dw__context *context, const dw__variant **variant) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    return dw__variant_of(
        context, kernel,
        (uint64_t)dw__gpu_element(c->outputs[0].dtype) | (uint64_t)is_e5m2(&c->inputs[0]) << 4 |
            (uint64_t)is_e5m2(&c->inputs[1]) << 5 | (uint64_t)dw__call_has_f32_scales(c) << 6,
        variant);
}

/* Scales of a row of square blocks. */
static int64_t wide_of(const dw__tensor *scales) {
    return scales->rank == 3 ? scales->shape[1] * scales->shape[2] : 0;
}

static dw_multiply_codes_params product_params(const dw__call *c) {
    enum { BLOCKS_A = 4, BLOCKS_B };
    const dw__tensor *in = c->inputs, *y = &c->outputs[0], *bias = dw__call_bias(c);
    const bool in_blocks = dw__call_has_f32_scales(c);
    return (dw_multiply_codes_params){.a = in[0].data,
                                      .b = in[1].data,
                                      .scale_a = in_blocks ? NULL : in[2].data,
                                      .scale_b = in_blocks ? NULL : in[3].data,
                                      .scale_step = dw__call_has_row_scales(c),
                                      .blocks_a = in_blocks ? in[BLOCKS_A].data : NULL,
                                      .blocks_b = in_blocks ? in[BLOCKS_B].data : NULL,
                                      .wide_a = in_blocks ? wide_of(&in[BLOCKS_A]) : 0,
                                      .wide_b = in_blocks ? wide_of(&in[BLOCKS_B]) : 0,
                                      .bias = bias ? bias->data : NULL,
                                      .y = y->data,
                                      .m = y->shape[0],
                                      .n = y->shape[1],
                                      .k = in[0].shape[1]};
}

static dw_status launch_product(const dw__operation_call *c, const dw__context *context,
                                const dw__variant *variant, const char *name, int64_t blocks,
                                unsigned threads) {
    dw_multiply_codes_params p = product_params(&c->call);
    void *arguments[] = {&p};
    if (blocks == 0) return DW_OK;
    return context->device->launch(&(dw__launch){
        .name = name,
        .function = variant->functions[0],
        .grid = {(unsigned)blocks, 1, 1},
        .block = {threads, 1, 1},
        .stream = c->stream,
        .arguments = arguments,
    });
}

static dw_status product_enqueue(const void *call, const dw__context *context,
                                 const dw__variant *variant) {
    const dw__operation_call *c = call;
    return launch_product(c, context, variant, "multiply_codes", blocks_of(&c->call.outputs[0]),
                          DW_MULTIPLY_CODES_THREADS);
}

static dw_status product_entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                                      dw__entry_point *points) {
    (void)kernel;
    points->code = (dw__jit_variant){.source = "common/tensor_codes.cu",
                                     .entry = "multiply_codes",
                                     .arch = dw__gpu_arch(capability)};
    dw__jit_add_define(&points->code, "RESULT", (int)(params & 15));
    dw__jit_add_define(&points->code, "CODES_A", (int)(params >> 4 & 1));
    dw__jit_add_define(&points->code, "CODES_B", (int)(params >> 5 & 1));
    dw__jit_add_define(&points->code, "BLOCKS", (int)(params >> 6 & 1));
    return DW_OK;
}

void dw__multiply_codes_example(dw_dtype a, dw_dtype b, dw_dtype result, int64_t m, int64_t n,
                                int64_t k, dw__call *c) {
    static const dw_attr types[] = {{.key = DW_ATTR_KEY_DTYPE, .integer = DW_BF16},
                                    {.key = DW_ATTR_KEY_DTYPE, .integer = DW_F16},
                                    {.key = DW_ATTR_KEY_DTYPE, .integer = DW_F32}};
    *c = (dw__call){.op = DW_OP_MULTIPLY_CODES,
                    .attr_count = 1,
                    .attrs = &types[result == DW_BF16  ? 0
                                    : result == DW_F16 ? 1
                                                       : 2],
                    .input_count = 4,
                    .output_count = 1,
                    .inputs = {{.dtype = a, .rank = 2, .shape = {m, k}},
                               {.dtype = b, .rank = 2, .shape = {n, k}},
                               {.dtype = DW_F32},
                               {.dtype = DW_F32}},
                    .outputs = {{.dtype = result, .rank = 2, .shape = {m, n}}}};
    for (int i = 0; i < 4; i++) dw__tensor_set_contiguous(&c->inputs[i]);
    dw__tensor_set_contiguous(&c->outputs[0]);
}

void dw__multiply_codes_add_bias(dw__call *c) {
    enum { BIAS = 6 };
    const dw__tensor *y = &c->outputs[0];
    for (uint32_t i = c->input_count; i < BIAS; i++) c->inputs[i].rank = -1;
    c->inputs[BIAS] =
        (dw__tensor){.dtype = y->dtype, .rank = 1, .shape = {y->shape[1]}, .stride = {1}};
    c->input_count = BIAS + 1;
}

void dw__multiply_codes_add_blocks(dw__call *c, bool square_a, bool square_b) {
    enum { SCALE_A = 2, BLOCKS_A = 4, BLOCKS_B };
    const bool square[] = {square_a, square_b};
    const int64_t block = DW_FP8_BLOCK_SIDE;
    for (int i = 0; i < 2; i++) {
        const int64_t *codes = c->inputs[i].shape, along = (codes[1] + block - 1) / block;
        dw__tensor *scales = &c->inputs[BLOCKS_A + i];
        c->inputs[SCALE_A + i].rank = -1;
        *scales = square[i]
                      ? (dw__tensor){.dtype = DW_F32,
                                     .rank = 3,
                                     .shape = {(codes[0] + block - 1) / block,
                                               (along + DW_SQUARE_SCALES - 1) / DW_SQUARE_SCALES,
                                               DW_SQUARE_SCALES}}
                      : (dw__tensor){.dtype = DW_F32, .rank = 2, .shape = {along, codes[0]}};
        dw__tensor_set_contiguous(scales);
    }
    c->input_count = BLOCKS_B + 1;
}

static void product_example(uint64_t params, int index, dw__call *c) {
    const bool blocks = params >> 6 & 1;
    const int64_t short_k = blocks ? 165 : 37, long_k = blocks ? 256 : 96;
    dw__multiply_codes_example(params >> 4 & 1 ? DW_E5M2 : DW_E4M3,
                               params >> 5 & 1 ? DW_E5M2 : DW_E4M3, (dw_dtype)(params & 15),
                               index ? 64 : 70, index ? 128 : 129, index ? long_k : short_k, c);
    if (blocks) dw__multiply_codes_add_blocks(c, index == 0, index == 1);
    if (index) dw__multiply_codes_add_bias(c);
}

const dw__kernel dw__gpu_multiply_codes = {
    .name = "multiply_codes",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .op = DW_OP_MULTIPLY_CODES,
    .proof = DW__PROVEN_ON_EMULATOR,
    .operation = "multiply_codes",
    .source = "cuda/common/tensor_codes.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "E4M3, E5M2; the result BF16, F16, F32",
    .needs = "no tensor cores",
    .supports = product_supports,
    .seconds = product_seconds,
    .prepare = product_prepare,
    .enqueue = product_enqueue,
    .entry_points = product_entry_points,
    .first_use = &dw__operation_first_use,
    .tolerance = "accumulates in F32 and rounds once",
    .example = product_example,
    .tolerance_factor = 8.0,
};

/* ---- products with scales of fp8-block ------------------------------------------------------------------- */

static int64_t gemm_blocks_of(const dw__tensor *y) {
    const int64_t side = DW_FP8_BLOCK_GEMM_TILE;
    return (y->shape[0] + side - 1) / side * ((y->shape[1] + side - 1) / side);
}

static dw_status gemm_supports(const dw__kernel *kernel, const void *call,
                               const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    const dw__tensor *a = &c->inputs[0], *b = &c->inputs[1], *bias = dw__call_bias(c);
    const int64_t most = INT32_MAX - 1024; /* so that the edges of tiles fit, too */
    if (!dw__call_has_f32_scales(c))
        return dw__fail(DW_TYPE, "%s multiplies codes of fp8-block", kernel->name);
    if (bias && !dw__tensor_is_contiguous(bias))
        return dw__fail(DW_UNSUPPORTED, "%s: expected a contiguous bias", kernel->name);
    if (a->shape[1] % ALIGNMENT != 0 || (uintptr_t)a->data % ALIGNMENT != 0 ||
        (uintptr_t)b->data % ALIGNMENT != 0)
        return dw__fail(DW_UNSUPPORTED,
                        "%s: expected rows of a multiple of 16 codes, at multiples of 16 bytes",
                        kernel->name);
    if (a->shape[0] > most || b->shape[0] > most || a->shape[1] > most ||
        gemm_blocks_of(&c->outputs[0]) > INT32_MAX)
        return dw__fail(DW_UNSUPPORTED, "%s: expected sizes and tiles below 2^31 - 1024",
                        kernel->name);
    return dw__gpu_kernel_has(kernel, gpu);
}

static void gemm_seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                         dw__kernel_seconds *result) {
    const double share = 0.25; /* of the rate of 16 bits: mma.sync, and conversions before it */
    const dw__call *c = &((const dw__operation_call *)call)->call;
    (void)kernel;
    result->seconds = 4e-6 + 2.0 * (double)dw__tensor_count(&c->outputs[0]) *
                                 (double)c->inputs[0].shape[1] / (share * gpu->flops);
    snprintf(result->from, sizeof result->from, "estimate: FLOPs at a quarter of the rate of BF16");
}

static dw_status gemm_prepare(const dw__kernel *kernel, const void *call,
                              const dw__context *context, const dw__variant **variant) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    return dw__variant_of(context, kernel, (uint64_t)dw__gpu_element(c->outputs[0].dtype), variant);
}

static dw_status gemm_enqueue(const void *call, const dw__context *context,
                              const dw__variant *variant) {
    const dw__operation_call *c = call;
    return launch_product(c, context, variant, "fp8_block_gemm",
                          gemm_blocks_of(&c->call.outputs[0]), DW_FP8_BLOCK_GEMM_THREADS);
}

static dw_status gemm_entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                                   dw__entry_point *points) {
    (void)kernel;
    points->code = (dw__jit_variant){.source = "common/fp8_block_gemm.cu",
                                     .entry = "fp8_block_gemm",
                                     .arch = dw__gpu_arch(capability)};
    dw__jit_add_define(&points->code, "RESULT", (int)params);
    return DW_OK;
}

/* Several tiles each way, and parts of K that end within a block and within a part. */
static void gemm_example(uint64_t params, int index, dw__call *c) {
    dw__multiply_codes_example(DW_E4M3, DW_E4M3, (dw_dtype)params, index ? 64 : 133,
                               index ? 272 : 129, index ? 288 : 176, c);
    dw__multiply_codes_add_blocks(c, index == 0, index == 1);
    if (index) dw__multiply_codes_add_bias(c);
}

const dw__kernel dw__gpu_fp8_block_gemm = {
    .name = "fp8_block_gemm",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .op = DW_OP_MULTIPLY_CODES,
    .proof = DW__PROVEN_ON_EMULATOR,
    .operation = "multiply_codes with scales of fp8-block",
    .source = "cuda/common/fp8_block_gemm.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "E4M3, multiplied in F16; the result BF16, F16, F32",
    .needs = "rows of a multiple of 16 codes",
    .supports = gemm_supports,
    .seconds = gemm_seconds,
    .prepare = gemm_prepare,
    .enqueue = gemm_enqueue,
    .entry_points = gemm_entry_points,
    .first_use = &dw__operation_first_use,
    .tolerance = "accumulates in F32 and rounds once",
    .example = gemm_example,
    .tolerance_factor = 8.0,
};
