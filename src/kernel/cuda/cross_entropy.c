/* Cross-entropy of rows of logits, forward and backward (cuda/common/cross_entropy.cu). */
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/gpu_loss.h"
#include <string.h>

/* ---- variants ------------------------------------------------------------------------------------- */

uint64_t dw__loss_pack(dw__loss_variant v) {
    return (uint64_t)(dw__gpu_element(v.type) | dw__gpu_element(v.statistics) << 4 | v.lanes << 8 |
                      v.backward << 19 | v.tiles << 20 | v.bias << 21 | v.turned << 22 |
                      v.given << 23);
}

dw__loss_variant dw__loss_unpack(uint64_t params) {
    const int p = (int)params;
    return (dw__loss_variant){.type = (dw_dtype)(p & 15),
                              .statistics = (dw_dtype)(p >> 4 & 15),
                              .lanes = p >> 8 & 0x7FF,
                              .backward = p >> 19 & 1,
                              .tiles = p >> 20 & 1,
                              .bias = p >> 21 & 1,
                              .turned = p >> 22 & 1,
                              .given = p >> 23 & 1};
}

/* A warp processes a short row, a block of 256 or 512 threads a longer one. */
int dw__loss_lanes(int64_t columns) { return columns <= 1024 ? 32 : columns <= 16384 ? 256 : 512; }

static const char *const entries[2][3] = {
    {"cross_entropy_forward", "cross_entropy_total"},
    {"cross_entropy_backward", "cross_entropy_share", "cross_entropy_round"}};
static const char *const tile_entries[2][DW__ENTRY_POINTS] = {
    {"sm90_gemm", "cross_entropy_total", "cross_entropy_combine"},
    {"sm90_gemm", "cross_entropy_share", "cross_entropy_round", "cross_entropy_weights"}};

static const char *entry_of(dw__loss_variant v, int i) {
    if (v.tiles) return tile_entries[v.backward][i];
    return i < 3 ? entries[v.backward][i] : NULL;
}

dw_status dw__loss_entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                                dw__entry_point *points) {
    const dw__loss_variant v = dw__loss_unpack(params);
    (void)kernel;
    if (v.tiles) dw__sm90_loss_point(v, &points[DW__LOSS_GEMM]);
    for (int i = v.tiles; i < DW__ENTRY_POINTS && entry_of(v, i); i++) {
        points[i].code = (dw__jit_variant){.source = "common/cross_entropy.cu",
                                           .entry = entry_of(v, i),
                                           .arch = dw__gpu_arch(capability)};
        dw__jit_add_define(&points[i].code, "TYPE", dw__gpu_element(v.type));
        dw__jit_add_define(&points[i].code, "STATISTICS", dw__gpu_element(v.statistics));
        dw__jit_add_define(&points[i].code, "LANES", v.lanes);
    }
    return DW_OK;
}

/* ---- launches ------------------------------------------------------------------------------------- */

/* Every group of rows has a block of its own, so that blocks on all SMs end at about the same time. */
dw_status dw__loss_rows(const dw__operation_call *call, const dw__context *context,
                        const dw__variant *variant, dw_cross_entropy_params *params) {
    const dw__loss_variant v = dw__loss_unpack(variant->params);
    const unsigned threads = DW_LOSS_BLOCK(v.lanes);
    const int64_t each = threads / (unsigned)v.lanes, blocks = (params->rows + each - 1) / each;
    void *arguments[] = {params};
    if (blocks == 0) return DW_OK;
    return context->device->launch(&(dw__launch){
        .name = entries[v.backward][DW__LOSS_ROWS],
        .function = variant->functions[DW__LOSS_ROWS],
        .grid = {(unsigned)(blocks < INT32_MAX ? blocks : INT32_MAX), 1, 1},
        .block = {threads, 1, 1},
        .stream = call->stream,
        .arguments = arguments,
    });
}

dw_status dw__loss_total(const dw__operation_call *call, const dw__context *context,
                         const dw__variant *variant, dw_cross_entropy_params *params) {
    const bool backward = dw__loss_unpack(variant->params).backward;
    return dw__gpu_launch(call, context, entries[backward][DW__LOSS_TOTAL],
                          variant->functions[DW__LOSS_TOTAL], !backward || params->rows > 0,
                          DW_LOSS_SUM_THREADS, params);
}

dw_status dw__loss_tiles(const dw__operation_call *call, const dw__context *context,
                         const dw__variant *variant, dw_cross_entropy_tile_params *params) {
    const dw__loss_variant v = dw__loss_unpack(variant->params);
    const int point = v.backward ? DW__LOSS_WEIGHTS : DW__LOSS_COMBINE;
    const int64_t each = v.backward ? DW_LOSS_COMBINE_THREADS : 32; /* rows of a block */
    return dw__gpu_launch(call, context, entry_of(v, point), variant->functions[point],
                          (params->row.rows + each - 1) / each, DW_LOSS_COMBINE_THREADS, params);
}

dw_status dw__loss_round(const dw__operation_call *call, const dw__context *context,
                         const dw__variant *variant, dw_cross_entropy_round_params *params) {
    return dw__gpu_launch(call, context, entries[1][DW__LOSS_ROUND],
                          variant->functions[DW__LOSS_ROUND],
                          (params->count + DW_LOSS_SUM_THREADS - 1) / DW_LOSS_SUM_THREADS,
                          DW_LOSS_SUM_THREADS, params);
}

/* ---- calls ---------------------------------------------------------------------------------------- */

static bool is_backward(dw_op op) { return op == DW_OP_CROSS_ENTROPY_BACKWARD; }
static bool computes(dw_op op) { return op == DW_OP_CROSS_ENTROPY || is_backward(op); }

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    int64_t stride;
    bool fits = dw__tensor_row_stride(&c->inputs[0], &stride);
    DW_RETURN_IF_FAILED(dw__gpu_kernel_computes(kernel, c, gpu));
    for (uint32_t i = 1; i < c->input_count; i++) fits &= dw__tensor_is_contiguous(&c->inputs[i]);
    return fits && c->inputs[0].shape[1] <= INT32_MAX / 2 ? DW_OK : dw__kernel_refuse(kernel);
}

int dw__loss_reduction(const dw__call *c) {
    const dw_attr *attr = dw__call_attr(c, DW_ATTR_KEY_REDUCTION);
    if (!attr || strcmp(attr->string, "mean") == 0) return DW_LOSS_MEAN;
    return strcmp(attr->string, "sum") == 0 ? DW_LOSS_SUM : DW_LOSS_NONE;
}

static dw_cross_entropy_params params_of(const dw__call *c) {
    const bool backward = is_backward(c->op);
    const dw__tensor *x = &c->inputs[0];
    int64_t x_stride;
    (void)dw__tensor_row_stride(x, &x_stride);
    return (dw_cross_entropy_params){.x = x->data,
                                     .target = c->inputs[1].data,
                                     .lse = backward ? c->inputs[2].data : c->outputs[1].data,
                                     .loss = backward ? NULL : c->outputs[0].data,
                                     .dloss = backward ? c->inputs[3].data : NULL,
                                     .dx = backward ? c->outputs[0].data : NULL,
                                     .x_stride = x_stride,
                                     .dx_stride = x->shape[1],
                                     .rows = x->shape[0],
                                     .ignored = dw__call_int(c, DW_ATTR_KEY_IGNORE_INDEX, -100),
                                     .smoothing =
                                         dw__call_float(c, DW_ATTR_KEY_LABEL_SMOOTHING, 0.0),
                                     .columns = (int)x->shape[1],
                                     .classes = (int)x->shape[1],
                                     .reduction = dw__loss_reduction(c)};
}

static dw_status workspace_bytes(const dw__kernel *kernel, const void *call,
                                 const dw__context *context, size_t *bytes) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    const int64_t rows = is_backward(c->op) ? 1 : c->inputs[0].shape[0];
    (void)kernel;
    (void)context;
    *bytes = dw__loss_reduction(c) == DW_LOSS_NONE ? 0 : (size_t)rows * sizeof(double);
    return DW_OK;
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    const dw__tensor *x = &c->inputs[0];
    const dw__loss_variant v = {.type = x->dtype,
                                .statistics = x->dtype,
                                .lanes = dw__loss_lanes(x->shape[1]),
                                .backward = is_backward(c->op)};
    return dw__variant_of(context, kernel, dw__loss_pack(v), variant);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__operation_call *c = call;
    const bool backward = is_backward(c->call.op);
    dw_cross_entropy_params p = params_of(&c->call);
    p.partials = c->workspace;
    p.error = c->error;
    if (backward && p.reduction == DW_LOSS_MEAN)
        DW_RETURN_IF_FAILED(dw__loss_total(c, context, variant, &p));
    DW_RETURN_IF_FAILED(dw__loss_rows(c, context, variant, &p));
    if (backward || !p.loss || p.reduction == DW_LOSS_NONE) return DW_OK;
    return dw__loss_total(c, context, variant, &p);
}

/* ---- the first-use check's calls ------------------------------------------------------------------ */

/* Targets are from 0 to 2 (operation_first_use.c); in the second trial those of 1 are ignored, and there is padding
 * between rows. Rows begin at every distance from a multiple of 16 bytes. */
static void example(uint64_t params, int index, dw__call *c) {
    static const dw_attr attrs[] = {{.key = DW_ATTR_KEY_REDUCTION, .string = "mean"},
                                    {.key = DW_ATTR_KEY_IGNORE_INDEX, .integer = 1},
                                    {.key = DW_ATTR_KEY_LABEL_SMOOTHING, .number = 0.1}},
                         none = {.key = DW_ATTR_KEY_REDUCTION, .string = "none"};
    const dw__loss_variant v = dw__loss_unpack(params);
    const int64_t columns = v.lanes == 32    ? 1023
                            : v.lanes == 256 ? 9001
                                             : 17407,
                  rows = index ? 11 : 3;
    const dw__tensor whole = {.dtype = v.type,
                              .rank = 2,
                              .shape = {rows, columns},
                              .stride = {columns, 1}},
                     each = {.dtype = v.type, .rank = 1, .shape = {rows}, .stride = {1}},
                     target = {.dtype = DW_I64, .rank = 1, .shape = {rows}, .stride = {1}};
    dw__tensor spaced = whole, loss = each;
    if (index) spaced.stride[0] += 9;
    if (index) loss.rank = 0; /* the mean */
    *c = (dw__call){.op = v.backward ? DW_OP_CROSS_ENTROPY_BACKWARD : DW_OP_CROSS_ENTROPY,
                    .attr_count = index ? 3 : 1,
                    .attrs = index ? attrs : &none,
                    .input_count = v.backward ? 4 : 2,
                    .output_count = v.backward ? 1 : 2,
                    .inputs = {spaced, target, each, loss},
                    .outputs = {loss, each}};
    if (v.backward) c->outputs[0] = whole;
}

/* ---- the entry ------------------------------------------------------------------------------------ */

const dw__kernel dw__gpu_cross_entropy = {
    .name = "cross_entropy",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .computes = computes,
    .proof = DW__RUN_ON_HOPPER,
    .operation = "cross_entropy and its gradient",
    .source = "cuda/common/cross_entropy.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "BF16, F16, F32, F64",
    .needs = "rows of fewer than 2^30 logits at one distance, all else contiguous",
    .supports = supports,
    .seconds = dw__gpu_seconds_of_bytes,
    .workspace_bytes = workspace_bytes,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = dw__loss_entry_points,
    .first_use = &dw__operation_first_use,
    .tolerance = "sums in F32 (F64 in F64), those over rows compensated; one rounding",
    .example = example,
    .tolerance_factor = 8.0,
};
