/* Cross-entropy of rows of logits, forward and backward (cuda/common/cross_entropy.cu). */
#include "common/cross_entropy_params.h"
#include "kernel/cuda/gpu_kernels.h"
#include <string.h>

/* ---- variants ------------------------------------------------------------------------------------- */

/* The compile-time parameters of a variant: the defines of cross_entropy.cu, and its entry points. */
typedef struct loss_variant {
    int type, lanes;
    bool aligned, backward;
} loss_variant;

static uint64_t pack(loss_variant v) {
    return (uint64_t)(v.type | v.lanes << 4 | v.aligned << 15 | v.backward << 16);
}

static loss_variant unpack(uint64_t params) {
    const int p = (int)params;
    return (loss_variant){p & 15, p >> 4 & 0x7FF, p >> 15 & 1, p >> 16 & 1};
}

enum { ROWS, SUMS }; /* entry points */
static const char *const entries[2][2] = {{"cross_entropy_forward", "cross_entropy_total"},
                                          {"cross_entropy_backward", "cross_entropy_share"}};

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    const loss_variant v = unpack(params);
    (void)kernel;
    for (int i = 0; i < 2; i++) {
        points[i].code = (dw__jit_variant){.source = "common/cross_entropy.cu",
                                           .entry = entries[v.backward][i],
                                           .arch = dw__gpu_arch(capability)};
        dw__jit_add_define(&points[i].code, "TYPE", v.type);
        dw__jit_add_define(&points[i].code, "LANES", v.lanes);
        dw__jit_add_define(&points[i].code, "ALIGNED", v.aligned);
    }
    return DW_OK;
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

static int reduction_of(const dw__call *c) {
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
                                     .rows = x->shape[0],
                                     .ignored = dw__call_int(c, DW_ATTR_KEY_IGNORE_INDEX, -100),
                                     .smoothing =
                                         dw__call_float(c, DW_ATTR_KEY_LABEL_SMOOTHING, 0.0),
                                     .columns = (int)x->shape[1],
                                     .reduction = reduction_of(c)};
}

static dw_status workspace_bytes(const dw__kernel *kernel, const void *call,
                                 const dw__context *context, size_t *bytes) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    const int64_t rows = is_backward(c->op) ? 1 : c->inputs[0].shape[0];
    (void)kernel;
    (void)context;
    *bytes = reduction_of(c) == DW_LOSS_NONE ? 0 : (size_t)rows * sizeof(double);
    return DW_OK;
}

/* A warp processes a short row, a block of 256 or 1024 threads a longer one. */
static int lanes_for(int64_t columns) {
    return columns <= 1024 ? 32 : columns <= 16384 ? 256 : 1024;
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    const dw_cross_entropy_params p = params_of(c);
    const uint64_t together =
        ((uint64_t)p.x_stride | (uint64_t)p.columns) * dw_dtype_bytes(c->inputs[0].dtype);
    const loss_variant v = {.type = dw__gpu_element(c->inputs[0].dtype),
                            .lanes = lanes_for(p.columns),
                            .aligned = ((together | (uintptr_t)p.x | (uintptr_t)p.dx) & 15) == 0,
                            .backward = is_backward(c->op)};
    return dw__variant_of(context, kernel, pack(v), variant);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__operation_call *c = call;
    const loss_variant v = unpack(variant->params);
    const unsigned threads = DW_LOSS_BLOCK(v.lanes);
    const int64_t together = threads / (unsigned)v.lanes;
    dw_cross_entropy_params p = params_of(&c->call);
    p.partials = c->workspace;
    p.error = c->error;
    if (v.backward && p.reduction == DW_LOSS_MEAN)
        DW_RETURN_IF_FAILED(dw__gpu_launch(c, context, entries[1][SUMS], variant->functions[SUMS],
                                           p.rows > 0, DW_LOSS_SUM_THREADS, &p));
    DW_RETURN_IF_FAILED(dw__gpu_launch(c, context, entries[v.backward][ROWS],
                                       variant->functions[ROWS], (p.rows + together - 1) / together,
                                       threads, &p));
    if (v.backward || !p.loss || p.reduction == DW_LOSS_NONE) return DW_OK;
    return dw__gpu_launch(c, context, entries[0][SUMS], variant->functions[SUMS], 1,
                          DW_LOSS_SUM_THREADS, &p);
}

/* ---- the first-use check's calls ------------------------------------------------------------------ */

/* Targets are from 0 to 2 (operation_first_use.c); in the second trial those of 1 are ignored, and there is padding
 * between rows. */
static void example(uint64_t params, int index, dw__call *c) {
    static const dw_attr attrs[] = {{.key = DW_ATTR_KEY_REDUCTION, .string = "mean"},
                                    {.key = DW_ATTR_KEY_IGNORE_INDEX, .integer = 1},
                                    {.key = DW_ATTR_KEY_LABEL_SMOOTHING, .number = 0.1}},
                         none = {.key = DW_ATTR_KEY_REDUCTION, .string = "none"};
    const loss_variant v = unpack(params);
    const int per = 16 / (int)dw_dtype_bytes((dw_dtype)v.type);
    const int64_t columns = (v.lanes == 32    ? 536
                             : v.lanes == 256 ? 2600
                                              : 17408) -
                            !v.aligned,
                  rows = index ? 11 : 3;
    const dw__tensor whole = {.dtype = (dw_dtype)v.type,
                              .rank = 2,
                              .shape = {rows, columns},
                              .stride = {columns, 1}},
                     each = {.dtype = (dw_dtype)v.type, .rank = 1, .shape = {rows}, .stride = {1}},
                     target = {.dtype = DW_I64, .rank = 1, .shape = {rows}, .stride = {1}};
    dw__tensor spaced = whole, loss = each;
    if (index) spaced.stride[0] += per;
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
    .proof = DW__PROVEN_ON_EMULATOR,
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
    .entry_points = entry_points,
    .first_use = &dw__operation_first_use,
    .tolerance = "sums in F32 (F64 in F64), those over rows compensated; one rounding",
    .example = example,
    .tolerance_factor = 8.0,
};
