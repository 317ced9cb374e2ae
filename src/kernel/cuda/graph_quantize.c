/* quantize, quantize_blocks, dequantize_blocks and quantization_error of the graph, by cuda/common/graph_quantize.cu,
 * and by round_blocks.cu where that computes the call. A variant is compiled for the type of the matrix, and for
 * quantizing, dequantizing or measuring; in round_blocks.cu also for the shape of blocks. The scheme is a parameter. */
#include "common/graph_quantize_params.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/quantization.h"
#include "number/format.h"

enum { ROTATE, AMAX, ENCODE, SUM }; /* entry points that quantize; SUM: of quantization_error */
static const char *const encoders[] = {"quantize_rotate", "quantize_amax", "quantize_encode"};
static const char *const meters[] = {"quantize_rotate", "quantize_amax", "quantize_encode",
                                     "quantization_error_sum"};
static const char *const rounders[] = {"round_blocks_amax", "round_blocks"};
enum { MOST_LANES = 32 };                     /* of a group, which computes a block */
enum { MAGNITUDE_BYTES = DW_MAGNITUDES * 4 }; /* at the start of the workspace */
enum { SUMS_BYTES = DW_ROUNDING_PARTS * DW_ROUNDING_SUMS * 8 }; /* behind them, to measure */
_Static_assert(DW_ROUNDING_SUMS == DW_OPERAND_STATISTICS, "the kernel writes what the graph has");

static bool measures(const dw__call *c) { return c->op == DW_OP_QUANTIZATION_ERROR; }
static bool decodes(const dw__call *c) { return c->op == DW_OP_DEQUANTIZE_BLOCKS; }
/* The matrix that is not coded. */
static const dw__tensor *matrix_of(const dw__call *c) {
    return decodes(c) ? &c->outputs[0] : &c->inputs[0];
}

/* The call's options without its seed, which is on the device. */
static dw_status options_of(const dw__call *c, dw__quantization *q) {
    dw__call shape = *c;
    if (shape.input_count > 1) shape.inputs[1].data = NULL;
    return dw__quantization_of(&shape, q);
}

static bool computes(dw_op op) {
    return op == DW_OP_QUANTIZE || op == DW_OP_QUANTIZE_BLOCKS || op == DW_OP_DEQUANTIZE_BLOCKS;
}

/* ---- round_blocks.cu ------------------------------------------------------------------------------ */

/* Whether round_blocks.cu computes the call, which depends on types, options and strides. */
static bool rounds_blocks(const dw__call *c, const dw__quantization *q) {
    const dw__tensor *x = &c->inputs[0], *values = &c->outputs[0];
    const bool is_float = x->dtype == DW_BF16 || x->dtype == DW_F16 || x->dtype == DW_F32;
    return c->op == DW_OP_QUANTIZE && is_float && !q->bf16 && !q->whole &&
           (x->stride[1] == 1 || q->cols == 1) && (values->stride[1] == 1 || q->cols == 1);
}

/* Bits of a variant behind the type. Those after ROUNDS are of round_blocks.cu. */
enum {
    DECODES = 1 << 4,
    ROUNDS = 1 << 5,
    ALONG_COLUMNS = 1 << 6,
    BLOCKS_OF_32 = 1 << 7,
    SQUARE = 1 << 8
};
enum { ROTATES = 1 << 9, PAIRED = 1 << 10 };
enum { MEASURES = 1 << 11 }; /* of graph_quantize.cu */

static uint64_t round_variant(const dw__call *c, const dw__quantization *q) {
    const dw__tensor *x = &c->inputs[0], *values = &c->outputs[0];
    const size_t pair = 2 * dw_dtype_bytes(x->dtype);
    const bool paired = q->cols % 2 == 0 && x->stride[0] % 2 == 0 && values->stride[0] % 2 == 0 &&
                        (uintptr_t)x->data % pair == 0 && (uintptr_t)values->data % 4 == 0;
    return ROUNDS | (q->options.axis ? ALONG_COLUMNS : 0) |
           (q->layout.block == 32 ? BLOCKS_OF_32 : 0) | (q->options.square ? SQUARE : 0) |
           (q->hadamard ? ROTATES : 0) | (paired ? PAIRED : 0);
}

static int64_t round_tiles(const dw_graph_quantize_params *p) {
    const int64_t band = p->axis && !p->square ? 16 : p->block;
    return (p->rows + band - 1) / band * ((p->columns + 63) / 64);
}

static void round_defines(dw__jit_variant *code, uint64_t params) {
    dw__jit_add_define(code, "BLOCK", params & BLOCKS_OF_32 ? 32 : 16);
    dw__jit_add_define(code, "ALONG_COLUMNS", (params & ALONG_COLUMNS) != 0);
    dw__jit_add_define(code, "SQUARE", (params & SQUARE) != 0);
    dw__jit_add_define(code, "ROTATE", (params & ROTATES) != 0);
    dw__jit_add_define(code, "PAIRED", (params & PAIRED) != 0);
}

/* ---- the entry ------------------------------------------------------------------------------------ */

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    dw__quantization q;
    DW_RETURN_IF_FAILED(options_of(c, &q));
    if (!q.bf16 && !q.whole && q.layout.block > MOST_LANES && !measures(c))
        return dw__fail(DW_UNSUPPORTED, "%s: blocks of %lld; expected 16 or 32", kernel->name,
                        (long long)q.layout.block);
    return dw__gpu_kernel_has(kernel, gpu);
}

/* Where the rotated matrix begins. */
static size_t rotated_offset(const dw__call *c) {
    return MAGNITUDE_BYTES + (measures(c) ? SUMS_BYTES : 0);
}

/* The largest magnitudes, sums, then the rotated matrix. */
static dw_status workspace_bytes(const dw__kernel *kernel, const void *call,
                                 const dw__context *context, size_t *bytes) {
    dw__quantization q;
    (void)kernel;
    (void)context;
    DW_RETURN_IF_FAILED(options_of(&((const dw__operation_call *)call)->call, &q));
    const dw__call *c = &((const dw__operation_call *)call)->call;
    *bytes = rotated_offset(c);
    if (q.hadamard && !rounds_blocks(c, &q)) *bytes += (size_t)(q.rows * q.cols) * sizeof(float);
    return DW_OK;
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    dw__quantization q;
    uint64_t params = (uint64_t)dw__gpu_element(matrix_of(c)->dtype) | (decodes(c) ? DECODES : 0) |
                      (measures(c) ? MEASURES : 0);
    DW_RETURN_IF_FAILED(options_of(c, &q));
    if (rounds_blocks(c, &q)) params |= round_variant(c, &q);
    return dw__variant_of(context, kernel, params, variant);
}

static dw_code_format format_of(dw_dtype element) {
    const dw__format_info *f = &dw__formats[element];
    return (dw_code_format){.fraction = f->fraction_bits,
                            .bias = f->bias,
                            .sign = 1u << (f->bits - 1),
                            .largest = f->largest,
                            .nan = dw__format_nan(element),
                            .infinity = element == DW_E5M2 ? f->largest + 1 : 0};
}

static dw_graph_quantize_params params_of(const dw__call *c, const dw__quantization *q,
                                          char *workspace) {
    const dw__tensor *x = &c->inputs[0], *values = &c->outputs[0], *seed = &c->inputs[1];
    dw_graph_quantize_params p = {.rows = q->rows, .columns = q->cols, .axis = 1, .block = 32};
    if (q->whole) {
        p.rounds = p.whole = 1;
        p.format = format_of(q->element);
    } else if (!q->bf16) {
        p.rounds = 1;
        p.axis = q->options.axis;
        p.block = (int)q->layout.block;
        p.square = q->options.square != 0;
        p.format = format_of(q->layout.element);
        p.e8m0 = q->layout.scale == DW_E8M0;
        p.f32 = q->layout.scale == DW_F32;
        p.rule = q->options.scale_rule == DW_SCALE_FLOOR  ? 1
                 : q->options.scale_rule == DW_SCALE_CEIL ? 2
                                                          : 0;
        p.code_row_bytes = q->layout.row_bytes;
        p.scale_columns = q->layout.scale_cols;
        p.paired = q->layout.element == DW_E2M1;
    }
    if (c->op == DW_OP_QUANTIZE || decodes(c)) {
        p.values = values->data;
        p.value_row_stride = values->stride[0];
        p.value_column_stride = values->stride[1];
    }
    if (decodes(c)) {
        p.codes = x->data;
        p.scales = seed->data; /* the second operand */
        return p;
    }
    p.x = x->data;
    p.row_stride = x->stride[0];
    p.column_stride = x->stride[1];
    if (measures(c)) {
        p.sums = (double *)(workspace + MAGNITUDE_BYTES);
        p.statistics = c->outputs[0].data;
        p.limit = dw__quantize_limit(q);
    } else {
        p.tensor_scale = c->outputs[c->output_count - 1].data;
    }
    if (c->op == DW_OP_QUANTIZE_BLOCKS) {
        p.codes = c->outputs[0].data;
        p.scales = c->outputs[1].data;
    }
    if (q->tensor_scale) p.amax = (unsigned *)workspace;
    if (q->hadamard) p.rotated = (float *)(workspace + rotated_offset(c));
    if (!q->bf16 && !q->whole && q->options.rounding == DW_ROUND_STOCHASTIC) {
        p.stochastic = 1;
        p.seed = seed->data;
        p.seed_stride = seed->stride[0];
        p.stream = q->options.random.stream;
    }
    return p;
}

static dw_status launch(const dw__operation_call *c, const dw__context *context,
                        const dw__variant *variant, int entry, int64_t threads,
                        dw_graph_quantize_params *p) {
    return dw__gpu_launch(c, context, encoders[entry], variant->functions[entry],
                          (threads + DW_GRAPH_QUANTIZE_THREADS - 1) / DW_GRAPH_QUANTIZE_THREADS,
                          DW_GRAPH_QUANTIZE_THREADS, p);
}

static dw_status measure(const dw__operation_call *c, const dw__context *context,
                         const dw__variant *variant, int64_t threads, dw_graph_quantize_params *p) {
    const int64_t wanted = (threads + DW_GRAPH_QUANTIZE_THREADS - 1) / DW_GRAPH_QUANTIZE_THREADS;
    if (!p->statistics) return DW_OK;
    p->parts = (int)(wanted < 1 ? 1 : wanted < DW_ROUNDING_PARTS ? wanted : DW_ROUNDING_PARTS);
    for (int entry = ENCODE; entry <= SUM; entry++)
        DW_RETURN_IF_FAILED(context->device->launch(
            &(dw__launch){.name = meters[entry],
                          .function = variant->functions[entry],
                          .grid = {entry == SUM ? 1 : (unsigned)p->parts, 1, 1},
                          .block = {DW_GRAPH_QUANTIZE_THREADS, 1, 1},
                          .stream = c->stream,
                          .arguments = (void *[]){p}}));
    return DW_OK;
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__operation_call *c = call;
    dw__quantization q;
    DW_RETURN_IF_FAILED(options_of(&c->call, &q));
    dw_graph_quantize_params p = params_of(&c->call, &q, c->workspace);
    const int64_t count = q.rows * q.cols, outers = p.axis ? q.rows : q.cols,
                  inners = p.axis ? q.cols : q.rows;
    if (variant->params & ROUNDS) {
        const int64_t warps = DW_GRAPH_QUANTIZE_THREADS / 32, tiles = round_tiles(&p);
        p.rotated = NULL;
        if (p.amax)
            DW_RETURN_IF_FAILED(context->device->launch(
                &(dw__launch){.name = rounders[0],
                              .function = variant->functions[0],
                              .grid = {DW_MAGNITUDES, 1, 1}, /* each has a part */
                              .block = {DW_GRAPH_QUANTIZE_THREADS, 1, 1},
                              .stream = c->stream,
                              .arguments = (void *[]){&p}}));
        return dw__gpu_launch(c, context, rounders[1], variant->functions[1],
                              tiles ? (tiles + warps - 1) / warps : 1, DW_GRAPH_QUANTIZE_THREADS,
                              &p);
    }
    if (decodes(&c->call))
        return dw__gpu_launch_each(c, context, "dequantize", variant->functions[0], count, &p);
    if (p.rotated)
        DW_RETURN_IF_FAILED(launch(c, context, variant, ROTATE,
                                   outers * ((inners + DW_ROTATED_RUN - 1) / DW_ROTATED_RUN), &p));
    if (p.amax)
        DW_RETURN_IF_FAILED(launch(c, context, variant, AMAX,
                                   (int64_t)DW_MAGNITUDES * DW_GRAPH_QUANTIZE_THREADS, &p));
    /* A matrix without elements has a tensor scale too. */
    const int64_t height = p.square ? p.block : 1,
                  blocks = (outers + height - 1) / height * ((inners + p.block - 1) / p.block),
                  lanes = p.block < MOST_LANES ? p.block : MOST_LANES;
    if (measures(&c->call)) return measure(c, context, variant, blocks * lanes, &p);
    return launch(c, context, variant, ENCODE, blocks ? blocks * p.block : 1, &p);
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    const bool is_decoder = params & DECODES, rounds = params & ROUNDS, meter = params & MEASURES;
    const int count = is_decoder ? 1
                      : rounds   ? (int)DW_COUNT(rounders)
                      : meter    ? (int)DW_COUNT(meters)
                                 : (int)DW_COUNT(encoders);
    (void)kernel;
    for (int i = 0; i < count; i++) {
        points[i].code = (dw__jit_variant){.source = rounds ? "common/round_blocks.cu"
                                                            : "common/graph_quantize.cu",
                                           .entry = is_decoder ? "dequantize"
                                                    : rounds   ? rounders[i]
                                                    : meter    ? meters[i]
                                                               : encoders[i],
                                           .arch = dw__gpu_arch(capability)};
        dw__jit_add_define(&points[i].code, "TYPE", (int)(params & 15));
        if (meter) dw__jit_add_define(&points[i].code, "MEASURES", 1);
        if (rounds) round_defines(&points[i].code, params);
    }
    return DW_OK;
}

#define ROUNDED(along, name, ...)                                                                  \
    {                                                                                              \
        {.key = DW_ATTR_KEY_AXIS, .integer = along}, {.key = DW_ATTR_KEY_SCHEME, .string = name},  \
            __VA_ARGS__                                                                            \
    }
#define ROUNDED_EACH_WAY(along, name)                                                              \
    {                                                                                              \
        ROUNDED(along, name, {.key = DW_ATTR_KEY_AXIS}),                                           \
            ROUNDED(along, name, {.key = DW_ATTR_KEY_SQUARE, .integer = 1}),                       \
            ROUNDED(along, name, {.key = DW_ATTR_KEY_HADAMARD, .integer = 1})                      \
    }

/* A call of `quantize` that the variant of round_blocks.cu computes; tiles and blocks end within the matrix. */
static void rounded_example(uint64_t params, int index, dw__call *c) {
    static const dw_attr attrs[2][2][3][3] = {
        {ROUNDED_EACH_WAY(0, "nvfp4"), ROUNDED_EACH_WAY(0, "mxfp8")},
        {ROUNDED_EACH_WAY(1, "nvfp4"), ROUNDED_EACH_WAY(1, "mxfp8")}};
    const int form = params & SQUARE ? 1 : params & ROTATES ? 2 : 0;
    const int64_t rows = index ? 9 : 108, columns = (index ? 198 : 70) + (params & PAIRED ? 0 : 1);
    *c = (dw__call){
        .op = DW_OP_QUANTIZE,
        .attr_count = form ? 3 : 2,
        .attrs = attrs[!!(params & ALONG_COLUMNS)][!!(params & BLOCKS_OF_32)][form],
        .input_count = 1,
        .output_count = 2,
        .inputs = {{.dtype = (dw_dtype)(params & 15), .rank = 2, .shape = {rows, columns}}},
        .outputs = {{.dtype = DW_BF16, .rank = 2, .shape = {rows, columns}}, {.dtype = DW_F32}}};
    dw__tensor_set_contiguous(&c->inputs[0]);
    dw__tensor_set_contiguous(&c->outputs[0]);
}

/* The codes of NVFP4 of a rotated matrix along its columns, and those of MXFP6 along its rows; blocks end within the
 * matrix. */
static void example(uint64_t params, int index, dw__call *c) {
    enum { ROWS = 44, COLUMNS = 70 };
    static const dw_attr nvfp4[] = {{.key = DW_ATTR_KEY_AXIS, .integer = 0},
                                    {.key = DW_ATTR_KEY_SCHEME, .string = "nvfp4"},
                                    {.key = DW_ATTR_KEY_HADAMARD, .integer = 1}},
                         mxfp6[] = {{.key = DW_ATTR_KEY_AXIS, .integer = 1},
                                    {.key = DW_ATTR_KEY_SCHEME, .string = "mxfp6"}};
    const bool is_decoder = params & DECODES, rotated = !is_decoder && index == 0;
    const dw__tensor x = {.dtype = (dw_dtype)(params & 15), .rank = 2, .shape = {ROWS, COLUMNS}},
                     values = {.dtype = DW_BF16, .rank = 2, .shape = {ROWS, COLUMNS}},
                     scale = {.dtype = DW_F32},
                     codes[] = {{.dtype = DW_E3M2, .rank = 2, .shape = {ROWS, COLUMNS}},
                                {.dtype = DW_E2M1, .rank = 2, .shape = {COLUMNS, ROWS}}},
                     scales[] = {
                         {.dtype = DW_E8M0, .rank = 2, .shape = {ROWS, (COLUMNS + 31) / 32}},
                         {.dtype = DW_UE4M3, .rank = 2, .shape = {COLUMNS, (ROWS + 15) / 16}}};
    if (params & ROUNDS) {
        rounded_example(params, index, c);
        return;
    }
    if (is_decoder)
        *c = (dw__call){.op = DW_OP_DEQUANTIZE_BLOCKS,
                        .input_count = 2,
                        .output_count = 1,
                        .inputs = {codes[0], scales[0]},
                        .outputs = {values}};
    else
        *c = (dw__call){.op = DW_OP_QUANTIZE_BLOCKS,
                        .input_count = 1,
                        .output_count = 3,
                        .inputs = {x},
                        .outputs = {codes[rotated], scales[rotated], scale}};
    c->attrs = rotated ? nvfp4 : mxfp6;
    c->attr_count = rotated ? DW_COUNT(nvfp4) : DW_COUNT(mxfp6);
    for (uint32_t i = 0; i < c->input_count; i++) dw__tensor_set_contiguous(&c->inputs[i]);
    for (uint32_t i = 0; i < c->output_count; i++) dw__tensor_set_contiguous(&c->outputs[i]);
}

const dw__kernel dw__graph_quantize = {
    .name = "graph_quantize",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .computes = computes,
    .proof = DW__PROVEN_ON_EMULATOR,
    .operation = "quantize, quantize_blocks, dequantize_blocks",
    .source = "cuda/common/graph_quantize.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "BF16, F16, F32; codes of FP8, MXFP8, MXFP6, MXFP4, NVFP4",
    .needs = "any strides; codes are contiguous",
    .supports = supports,
    .seconds = dw__gpu_seconds_of_bytes,
    .workspace_bytes = workspace_bytes,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    .first_use = &dw__operation_first_use,
    .tolerance = "every byte is the definition's",
    .example = example,
    .tolerance_factor = 0.0,
};

/* NVFP4 of a rotated matrix along its columns, and FP8 with one scale. */
static void error_example(uint64_t params, int index, dw__call *c) {
    static const dw_attr nvfp4[] = {{.key = DW_ATTR_KEY_AXIS, .integer = 0},
                                    {.key = DW_ATTR_KEY_SCHEME, .string = "nvfp4"},
                                    {.key = DW_ATTR_KEY_HADAMARD, .integer = 1}},
                         fp8[] = {{.key = DW_ATTR_KEY_AXIS, .integer = 1},
                                  {.key = DW_ATTR_KEY_SCHEME, .string = "fp8-tensor"}};
    *c = (dw__call){
        .op = DW_OP_QUANTIZATION_ERROR,
        .input_count = 1,
        .output_count = 1,
        .attrs = index ? fp8 : nvfp4,
        .attr_count = index ? DW_COUNT(fp8) : DW_COUNT(nvfp4),
        .inputs = {{.dtype = (dw_dtype)(params & 15), .rank = 2, .shape = {44, 70}}},
        .outputs = {{.dtype = DW_F64, .rank = 1, .shape = {DW_OPERAND_STATISTICS}}},
    };
    dw__tensor_set_contiguous(&c->inputs[0]);
    dw__tensor_set_contiguous(&c->outputs[0]);
}

const dw__kernel dw__quantization_error = {
    .name = "quantization_error",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .op = DW_OP_QUANTIZATION_ERROR,
    .proof = DW__PROVEN_ON_EMULATOR,
    .operation = "quantization_error",
    .source = "cuda/common/graph_quantize.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "BF16, F16, F32",
    .needs = "any strides",
    .supports = supports,
    .seconds = dw__gpu_seconds_of_bytes,
    .workspace_bytes = workspace_bytes,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    .first_use = &dw__operation_first_use,
    .tolerance = "sums in F64 in another order",
    .example = error_example,
    .tolerance_factor = 4.0, /* as cpu.quantization_error */
};
