/* Softmax and log-softmax along the last axis, and their gradients (cuda/common/softmax.cu). */
#include "common/softmax_params.h"
#include "kernel/cuda/gpu_kernels.h"

/* ---- variants ------------------------------------------------------------------------------------- */

/* The compile-time parameters of a variant: the defines of softmax.cu, and its entry point. */
typedef struct rows_variant {
    int type, lanes, vectors;
    bool logarithm, aligned, backward;
} rows_variant;

static uint64_t pack(rows_variant v) {
    return (uint64_t)(v.type | v.lanes << 2 | v.vectors << 14 | v.logarithm << 17 |
                      v.aligned << 18 | v.backward << 19);
}

static rows_variant unpack(uint64_t params) {
    const int p = (int)params;
    return (rows_variant){p & 3,       p >> 2 & 0xFFF, p >> 14 & 7,
                          p >> 17 & 1, p >> 18 & 1,    p >> 19 & 1};
}

static const dw_dtype dtypes[] = {DW_BF16, DW_F16, DW_F32}; /* bytes of an element, by TYPE */
static int per_vector(int type) { return 16 / (int)dw_dtype_bytes(dtypes[type]); }

/* A warp processes a short row, a block of 256 or 1024 threads a longer one. Each of 1024 threads has registers for two
 * vectors, each of fewer threads for four. Longer rows stay in memory. */
static void choose_threads(int64_t columns, rows_variant *v) {
    static const int sizes[][2] = {{32, 4}, {256, 4}, {1024, 2}};
    const int64_t vectors = (columns + per_vector(v->type) - 1) / per_vector(v->type);
    for (size_t i = 0; i < DW_COUNT(sizes); i++)
        for (v->lanes = sizes[i][0], v->vectors = 1; v->vectors <= sizes[i][1]; v->vectors *= 2)
            if (vectors <= (int64_t)v->lanes * v->vectors) return;
    v->vectors = 0;
}

static bool is_backward(dw_op op) {
    return op == DW_OP_SOFTMAX_BACKWARD || op == DW_OP_LOG_SOFTMAX_BACKWARD;
}
static bool is_logarithm(dw_op op) {
    return op == DW_OP_LOG_SOFTMAX || op == DW_OP_LOG_SOFTMAX_BACKWARD;
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    const rows_variant v = unpack(params);
    (void)kernel;
    points->code = (dw__jit_variant){.source = "common/softmax.cu",
                                     .entry = v.backward ? "softmax_backward" : "softmax_forward",
                                     .arch = dw__gpu_arch(capability)};
    dw__jit_add_define(&points->code, "TYPE", v.type);
    dw__jit_add_define(&points->code, "LOGARITHM", v.logarithm);
    dw__jit_add_define(&points->code, "LANES", v.lanes);
    dw__jit_add_define(&points->code, "VECTORS", v.vectors);
    dw__jit_add_define(&points->code, "ALIGNED", v.aligned);
    return DW_OK;
}

/* ---- calls ---------------------------------------------------------------------------------------- */

static int64_t columns_of(const dw__call *c) { return c->inputs[0].shape[c->inputs[0].rank - 1]; }

static bool computes(dw_op op) {
    return op == DW_OP_SOFTMAX || op == DW_OP_LOG_SOFTMAX || is_backward(op);
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    const dw_dtype dtype = c->inputs[0].dtype;
    int64_t stride;
    DW_RETURN_IF_FAILED(dw__gpu_kernel_computes(kernel, c, gpu));
    if (dtype != DW_BF16 && dtype != DW_F16 && dtype != DW_F32)
        return dw__fail(DW_TYPE, "%s: the element type is %s; expected bf16, f16 or f32",
                        kernel->name, dw_dtype_name(dtype));
    if (dw__call_int(c, DW_ATTR_KEY_AXIS, -1) != c->inputs[0].rank - 1 ||
        columns_of(c) > INT32_MAX / 2)
        return dw__fail(DW_UNSUPPORTED, "%s: expected the last axis, of fewer than 2^30 elements",
                        kernel->name);
    for (uint32_t i = 0; i <= c->input_count; i++)
        if (!dw__tensor_row_stride(i < c->input_count ? &c->inputs[i] : &c->outputs[0], &stride))
            return dw__fail(DW_UNSUPPORTED, "%s: expected contiguous rows that lie at one distance",
                            kernel->name);
    return DW_OK;
}

static dw_softmax_params params_of(const dw__call *c) {
    const dw__tensor *dy = is_backward(c->op) ? &c->inputs[1] : NULL;
    int64_t x_stride, dy_stride = 0, result_stride;
    (void)dw__tensor_row_stride(&c->inputs[0], &x_stride);
    (void)dw__tensor_row_stride(&c->outputs[0], &result_stride);
    if (dy) (void)dw__tensor_row_stride(dy, &dy_stride);
    return (dw_softmax_params){
        .x = c->inputs[0].data,
        .dy = dy ? dy->data : NULL,
        .result = c->outputs[0].data,
        .x_stride = x_stride,
        .dy_stride = dy_stride,
        .result_stride = result_stride,
        .rows = columns_of(c) ? dw__tensor_count(&c->inputs[0]) / columns_of(c) : 0,
        .columns = (int)columns_of(c)};
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    const dw_softmax_params p = params_of(c);
    const uint64_t bytes = dw_dtype_bytes(c->inputs[0].dtype),
                   together = ((uint64_t)p.x_stride | (uint64_t)p.dy_stride |
                               (uint64_t)p.result_stride | (uint64_t)p.columns) *
                              bytes;
    rows_variant v = {
        .backward = is_backward(c->op),
        .logarithm = is_logarithm(c->op),
        .aligned = ((together | (uintptr_t)p.x | (uintptr_t)p.dy | (uintptr_t)p.result) & 15) == 0};
    while (dtypes[v.type] != c->inputs[0].dtype) v.type++;
    choose_threads(p.columns, &v);
    return dw__variant_of(context, kernel, pack(v), variant);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__operation_call *c = call;
    const rows_variant v = unpack(variant->params);
    const int threads = DW_SOFTMAX_BLOCK(v.lanes), rows_per_block = threads / v.lanes;
    dw_softmax_params params = params_of(&c->call);
    const int64_t blocks = (params.rows + rows_per_block - 1) / rows_per_block,
                  resident = (int64_t)context->sm_count * (2048 / threads);
    void *arguments[] = {&params};
    if (blocks == 0) return DW_OK;
    return context->device->launch(&(dw__launch){
        .name = v.backward ? "softmax_backward" : "softmax_forward",
        .function = variant->functions[0],
        .grid = {(unsigned)(blocks < resident ? blocks : resident), 1, 1},
        .block = {(unsigned)threads, 1, 1},
        .stream = c->stream,
        .arguments = arguments,
    });
}

/* ---- the first-use check's calls ------------------------------------------------------------------ */

/* The rows end within the last vectors that the variant holds. In the second trial there is padding between rows. */
static void example(uint64_t params, int index, dw__call *c) {
    static const dw_attr axis = {.key = DW_ATTR_KEY_AXIS, .integer = 1};
    const rows_variant v = unpack(params);
    const int64_t capacity = (int64_t)v.lanes * (v.vectors ? v.vectors : 3),
                  vectors = capacity - v.lanes / 2;
    const int64_t columns = vectors * per_vector(v.type) - (v.aligned ? 0 : 3);
    const dw__tensor rows = {.dtype = dtypes[v.type],
                             .rank = 2,
                             .shape = {index ? 3 : 11, columns},
                             .stride = {columns + (index ? per_vector(v.type) : 0), 1}};
    const dw_op ops[2][2] = {{DW_OP_SOFTMAX, DW_OP_SOFTMAX_BACKWARD},
                             {DW_OP_LOG_SOFTMAX, DW_OP_LOG_SOFTMAX_BACKWARD}};
    *c = (dw__call){.op = ops[v.logarithm][v.backward],
                    .attr_count = 1,
                    .attrs = &axis,
                    .input_count = v.backward ? 2 : 1,
                    .output_count = 1,
                    .inputs = {rows, rows},
                    .outputs = {rows}};
}

/* ---- the entry ------------------------------------------------------------------------------------ */

const dw__kernel dw__softmax = {
    .name = "softmax",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .computes = computes,
    .proof = DW__RUN_ON_HOPPER,
    .operation = "softmax and log-softmax, forward and backward",
    .source = "cuda/common/softmax.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "BF16, F16, F32",
    .needs = "the last axis; rows of any length at one distance",
    .supports = supports,
    .seconds = dw__gpu_seconds_of_bytes,
    .results = DW__RESULTS_IN_ROWS,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    .first_use = &dw__operation_first_use,
    .tolerance = "sums in F32, one rounding of the result",
    .example = example,
    .tolerance_factor = 8.0,
};
