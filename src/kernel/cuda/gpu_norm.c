/* Layer norm and RMS norm along the last axis, and their gradients (cuda/common/norm.cu). */
#include "common/norm_params.h"
#include "kernel/cuda/gpu_kernels.h"

/* ---- variants ------------------------------------------------------------------------------------- */

/* The compile-time parameters of a variant: the defines of norm.cu, and its entry point. */
typedef struct norm_variant {
    int type, lanes, vectors;
    bool centred, aligned, full, backward, adds;
} norm_variant;

static uint64_t pack(norm_variant v) {
    return (uint64_t)(v.type | v.lanes << 4 | v.vectors << 15 | v.centred << 19 | v.aligned << 20 |
                      v.full << 21 | v.backward << 22 | v.adds << 23);
}

static norm_variant unpack(uint64_t params) {
    const int p = (int)params;
    return (norm_variant){p & 15,      p >> 4 & 0x7FF, p >> 15 & 15, p >> 19 & 1,
                          p >> 20 & 1, p >> 21 & 1,    p >> 22 & 1,  p >> 23 & 1};
}

static int per_vector(int type) { return 16 / (int)dw_dtype_bytes((dw_dtype)type); }

/* A warp processes a short row, 128, 256 or 512 threads a longer one, as far as registers suffice: at most four vectors
 * of each operand, two or three where threads add gradients. Longer rows stay in memory. `aligned` is known. */
static void choose_threads(int64_t columns, norm_variant *v) {
    static const int lanes[] = {32, 128, 256, 512};
    const int per = per_vector(v->type);
    const int64_t vectors = (columns + per - 1) / per;
    for (size_t i = 0; i < DW_COUNT(lanes); i++) {
        const bool warp = lanes[i] == 32, most = lanes[i] == 512;
        const int held = !v->backward ? 4 : warp ? (per > 4 ? 3 : 4) : most && per <= 4 ? 4 : 2;
        v->lanes = lanes[i];
        for (v->vectors = 1; v->vectors <= held; v->vectors++) {
            v->full = v->aligned && vectors == (int64_t)v->lanes * v->vectors;
            if (vectors <= (int64_t)v->lanes * v->vectors) return;
        }
    }
    v->vectors = 0;
}

static unsigned block_of(const norm_variant *v) {
    return v->backward ? DW_NORM_BACKWARD_BLOCK(v->lanes, v->centred) : DW_NORM_BLOCK(v->lanes);
}

/* Bytes of shared memory that a block of the backward pass has beside its variables. */
static size_t shared_bytes(const norm_variant *v) {
    if (!v->backward || v->vectors == 0) return 0;
    return DW_NORM_BACKWARD_SHARED((size_t)v->lanes, (size_t)v->vectors, block_of(v), v->aligned,
                                   v->type == DW_F64 ? 8 : 4);
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    static const char *const entries[2][2] = {{"norm_forward", NULL},
                                              {"norm_backward", "norm_sums"}};
    const norm_variant v = unpack(params);
    (void)kernel;
    for (int i = 0; i < 2 && entries[v.backward][i]; i++) {
        points[i].code = (dw__jit_variant){.source = "common/norm.cu",
                                           .entry = entries[v.backward][i],
                                           .arch = dw__gpu_arch(capability)};
        dw__jit_add_define(&points[i].code, "TYPE", v.type);
        dw__jit_add_define(&points[i].code, "CENTRED", v.centred);
        dw__jit_add_define(&points[i].code, "LANES", v.lanes);
        dw__jit_add_define(&points[i].code, "VECTORS", v.vectors);
        dw__jit_add_define(&points[i].code, "ALIGNED", v.aligned);
        dw__jit_add_define(&points[i].code, "FULL", v.full);
        dw__jit_add_define(&points[i].code, "ADDS", v.adds);
    }
    points[0].shared_bytes = shared_bytes(&v);
    return DW_OK;
}

/* ---- calls ---------------------------------------------------------------------------------------- */

static bool is_backward(dw_op op) {
    return op == DW_OP_LAYER_NORM_BACKWARD || op == DW_OP_RMS_NORM_BACKWARD;
}
static bool is_centred(dw_op op) {
    return op == DW_OP_LAYER_NORM || op == DW_OP_LAYER_NORM_BACKWARD;
}
static bool computes(dw_op op) {
    return op == DW_OP_LAYER_NORM || op == DW_OP_RMS_NORM || is_backward(op);
}

static const dw__tensor *x_of(const dw__call *c) { return &c->inputs[is_backward(c->op)]; }
static int64_t columns_of(const dw__call *c) { return x_of(c)->shape[x_of(c)->rank - 1]; }

static int64_t rows_of(const dw__call *c) {
    int64_t rows = 1;
    for (int axis = 0; axis < x_of(c)->rank - 1; axis++) rows *= x_of(c)->shape[axis];
    return rows;
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    int64_t stride;
    DW_RETURN_IF_FAILED(dw__gpu_kernel_computes(kernel, c, gpu));
    if (columns_of(c) > INT32_MAX / 2)
        return dw__fail(DW_UNSUPPORTED, "%s: expected rows of fewer than 2^30 elements",
                        kernel->name);
    for (uint32_t i = 0; i < c->input_count; i++) {
        const bool is_rows = i == 0 || (i == 1 && is_backward(c->op));
        if (is_rows ? !dw__tensor_row_stride(&c->inputs[i], &stride)
                    : c->inputs[i].rank >= 0 && !dw__tensor_is_contiguous(&c->inputs[i]))
            return dw__fail(DW_UNSUPPORTED,
                            "%s: expected contiguous rows that lie at one distance, and other "
                            "operands contiguous",
                            kernel->name);
    }
    if (c->accumulates == DW__ADDS_TO_ADDEND && !dw__tensor_row_stride(&c->addend, &stride))
        return dw__fail(DW_UNSUPPORTED, "%s: expected an addend of rows at one distance",
                        kernel->name);
    return DW_OK;
}

static int64_t row_stride(const dw__tensor *tensor) {
    int64_t stride;
    (void)dw__tensor_row_stride(tensor, &stride);
    return stride;
}

/* An SM has one block of the backward pass, where there are enough rows. */
static int64_t part_rows(int64_t rows, const norm_variant *v, int sm_count) {
    const int64_t together = block_of(v) / (unsigned)v->lanes,
                  share = (rows + sm_count - 1) / sm_count, most = DW_NORM_MOST_ROWS * together;
    return share < together ? together : share > most ? most : share;
}

static dw_norm_params params_of(const dw__call *c, const norm_variant *v, int sm_count) {
    const bool backward = is_backward(c->op), centred = is_centred(c->op);
    const dw__tensor *x = x_of(c), *w = &c->inputs[backward + 1], *b = &c->inputs[2],
                     *addend = dw__call_addend(c);
    dw_norm_params p = {.x = x->data,
                        .w = w->rank < 0 ? NULL : w->data,
                        .result = c->outputs[0].data,
                        .eps = dw__call_float(c, DW_ATTR_KEY_EPS, 0.0),
                        .rows = rows_of(c),
                        .x_stride = row_stride(x),
                        .result_stride = columns_of(c),
                        .columns = (int)columns_of(c)};
    if (addend) {
        p.addend = addend->data;
        p.addend_stride = row_stride(addend);
    }
    p.part_rows = part_rows(p.rows, v, sm_count);
    p.parts = (p.rows + p.part_rows - 1) / p.part_rows;
    if (backward) {
        p.dy = c->inputs[0].data;
        p.dy_stride = row_stride(&c->inputs[0]);
        p.mean = centred ? c->inputs[3].data : NULL;
        p.rstd = c->inputs[3 + centred].data;
        p.dw = c->outputs[1].data;
        p.db = centred ? c->outputs[2].data : NULL;
    } else {
        p.b = centred && b->rank >= 0 ? b->data : NULL;
        p.mean = centred ? c->outputs[1].data : NULL;
        p.rstd = c->outputs[1 + centred].data;
    }
    return p;
}

static norm_variant variant_of(const dw__call *c) {
    norm_variant v = {.type = dw__gpu_element(x_of(c)->dtype),
                      .centred = is_centred(c->op),
                      .backward = is_backward(c->op),
                      .adds = c->accumulates != DW__ADDS_NOTHING,
                      .lanes = 32};
    const dw_norm_params p = params_of(c, &v, 1); /* addresses and strides, for any variant */
    const uint64_t together = ((uint64_t)p.x_stride | (uint64_t)p.dy_stride |
                               (uint64_t)p.addend_stride | (uint64_t)p.columns) *
                              (uint64_t)dw_dtype_bytes(x_of(c)->dtype);
    v.aligned = ((together | (uintptr_t)p.x | (uintptr_t)p.dy | (uintptr_t)p.w | (uintptr_t)p.b |
                  (uintptr_t)p.addend | (uintptr_t)p.result) &
                 15) == 0;
    choose_threads(columns_of(c), &v);
    return v;
}

static dw_status workspace_bytes(const dw__kernel *kernel, const void *call,
                                 const dw__context *context, size_t *bytes) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    const norm_variant v = variant_of(c);
    const dw_norm_params p = params_of(c, &v, context->sm_count);
    (void)kernel;
    *bytes = is_backward(c->op) ? (size_t)(2 * p.parts * p.columns) *
                                      (x_of(c)->dtype == DW_F64 ? sizeof(double) : sizeof(float))
                                : 0;
    return DW_OK;
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    return dw__variant_of(context, kernel,
                          pack(variant_of(&((const dw__operation_call *)call)->call)), variant);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__operation_call *c = call;
    const norm_variant v = unpack(variant->params);
    dw_norm_params p = params_of(&c->call, &v, context->sm_count);
    const unsigned threads = block_of(&v);
    const int64_t together = threads / (unsigned)v.lanes,
                  tiles = (p.columns + DW_NORM_SUM_COLUMNS - 1) / DW_NORM_SUM_COLUMNS;
    void *arguments[] = {&p};
    p.partials = c->workspace;
    if (!v.backward) { /* as many blocks as the GPU holds at once, each with many rows */
        const int64_t blocks = (p.rows + together - 1) / together,
                      resident = (int64_t)context->sm_count * DW_NORM_FORWARD_BLOCKS(v.lanes);
        return dw__gpu_launch(c, context, "norm_forward", variant->functions[0],
                              blocks < resident ? blocks : resident, threads, &p);
    }
    if (p.parts > 0 && p.columns > 0)
        DW_RETURN_IF_FAILED(context->device->launch(
            &(dw__launch){.name = "norm_backward",
                          .function = variant->functions[0],
                          .grid = {(unsigned)p.parts, 1, 1}, /* each has a part */
                          .block = {threads, 1, 1},
                          .shared_bytes = (unsigned)shared_bytes(&v),
                          .stream = c->stream,
                          .arguments = arguments}));
    if (!p.dw && !p.db) return DW_OK;
    return dw__gpu_launch(c, context, "norm_sums", variant->functions[1], tiles * (1 + v.centred),
                          DW_NORM_SUM_THREADS, &p);
}

/* ---- the first-use check's calls ------------------------------------------------------------------ */

/* Rows that the variant is chosen for and does not fill. In the second trial there is padding between rows. */
static void example(uint64_t params, int index, dw__call *c) {
    static const dw_attr eps = {.key = DW_ATTR_KEY_EPS, .number = 1e-5};
    static const dw_op ops[2][2] = {{DW_OP_RMS_NORM, DW_OP_RMS_NORM_BACKWARD},
                                    {DW_OP_LAYER_NORM, DW_OP_LAYER_NORM_BACKWARD}};
    const norm_variant v = unpack(params);
    const dw_dtype dtype = (dw_dtype)v.type;
    const int64_t vectors =
                      (int64_t)v.lanes * (v.vectors ? v.vectors : 9) - (v.full ? 0 : v.lanes / 4),
                  columns = vectors * per_vector(v.type) - (v.aligned ? 0 : 3),
                  rows = index ? 3 : 11;
    const dw__tensor whole = {.dtype = dtype,
                              .rank = 2,
                              .shape = {rows, columns},
                              .stride = {columns, 1}},
                     vector = {.dtype = dtype, .rank = 1, .shape = {columns}, .stride = {1}},
                     statistic = {.dtype = dtype == DW_F64 ? DW_F64 : DW_F32,
                                  .rank = 1,
                                  .shape = {rows},
                                  .stride = {1}};
    dw__tensor spaced = whole;
    if (index) spaced.stride[0] += per_vector(v.type);
    const uint32_t statistics = 1 + v.centred;
    *c = (dw__call){.op = ops[v.centred][v.backward],
                    .attr_count = v.backward ? 0 : 1,
                    .attrs = &eps,
                    .input_count = v.backward ? 3 + statistics : 1 + statistics,
                    .output_count = 1 + statistics,
                    .inputs = {spaced, vector, vector},
                    .outputs = {whole, statistic, statistic},
                    .accumulates = v.adds ? DW__ADDS_TO_ADDEND : DW__ADDS_NOTHING,
                    .addend = spaced};
    if (!v.backward) return;
    c->inputs[1] = spaced;
    c->inputs[3] = c->inputs[4] = statistic;
    c->outputs[1] = c->outputs[2] = vector;
}

/* ---- the entry ------------------------------------------------------------------------------------ */

const dw__kernel dw__gpu_norm = {
    .name = "norm",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .computes = computes,
    .proof = DW__RUN_ON_HOPPER,
    .operation = "layer norm and RMS norm, forward and backward",
    .source = "cuda/common/norm.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "BF16, F16, F32, F64",
    .needs = "contiguous rows of any length at one distance",
    .supports = supports,
    .seconds = dw__gpu_seconds_of_bytes,
    .workspace_bytes = workspace_bytes,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    .first_use = &dw__operation_first_use,
    .tolerance = "sums in F32 (F64 in F64), at most 64 terms in sequence over rows; one rounding",
    .example = example,
    .tolerance_factor = 8.0,
    .accumulates = DW__ADDS_TO_ADDEND,
};
