/* Products of rows that are sorted by group, of any strides and without tensor cores, by cuda/common/segment_linear.cu:
 * the kernel that supports every call of segment_linear and of its gradient. A variant is compiled for the type of the
 * operands. */
#include "common/matmul_params.h"
#include "common/segment_linear_params.h"
#include "kernel/cuda/gpu_kernels.h"
#include <stdio.h>

enum { LINEAR, WEIGHT };
static const char *const entries[] = {"segment_linear", "segment_linear_backward_weight"};

static bool computes(dw_op op) {
    return op == DW_OP_SEGMENT_LINEAR || op == DW_OP_SEGMENT_LINEAR_BACKWARD_WEIGHT;
}

/* ---- calls ----------------------------------------------------------------------------------------------- */

static dw_segment_linear_params params_of(const dw__operation_call *given) {
    enum { X, W, OFFSETS, B };
    const dw__call *c = &given->call;
    const dw__tensor *x = &c->inputs[X], *w = &c->inputs[W], *y = &c->outputs[0];
    const dw__tensor *offsets = &c->inputs[OFFSETS], *addend = dw__call_addend(c);
    const bool is_linear = c->op == DW_OP_SEGMENT_LINEAR;
    const bool turned = dw__call_int(c, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0;
    const int last = y->rank - 1;
    dw_segment_linear_params p = {.a = x->data,
                                  .b = w->data,
                                  .offsets = offsets->data,
                                  .addend = addend ? addend->data : NULL,
                                  .y = y->data,
                                  .rows = x->shape[0],
                                  .m = x->shape[1],
                                  .n = y->shape[last],
                                  .k = x->shape[1],
                                  .groups = offsets->shape[0] - 1,
                                  .offsets_step = offsets->stride[0],
                                  .a_row = x->stride[0],
                                  .a_column = x->stride[1],
                                  .b_row = w->stride[0],
                                  .b_column = w->stride[1],
                                  .y_group = is_linear ? 0 : y->stride[0],
                                  .y_row = y->stride[last - 1],
                                  .y_column = y->stride[last],
                                  .error = given->error};
    if (is_linear) {
        p.b_group = w->stride[0];
        p.b_row = w->stride[turned ? 2 : 1];
        p.b_column = w->stride[turned ? 1 : 2];
    }
    if (is_linear && c->input_count > B && c->inputs[B].rank >= 0) {
        p.bias = c->inputs[B].data;
        p.bias_group = c->inputs[B].stride[0];
        p.bias_column = c->inputs[B].stride[1];
    }
    if (addend) {
        p.addend_group = is_linear ? 0 : addend->stride[0];
        p.addend_row = addend->stride[last - 1];
        p.addend_column = addend->stride[last];
    }
    return p;
}

static int64_t tiles_of(int64_t size) { return (size + DW_MATMUL_TILE - 1) / DW_MATMUL_TILE; }

static int64_t blocks_of(const dw__call *c, const dw_segment_linear_params *p) {
    return c->op == DW_OP_SEGMENT_LINEAR ? tiles_of(p->rows) * tiles_of(p->n)
                                         : p->groups * tiles_of(p->m) * tiles_of(p->n);
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    DW_RETURN_IF_FAILED(dw__gpu_kernel_computes(kernel, c, gpu));
    if (dw__call_gathers(c))
        return dw__fail(DW_UNSUPPORTED, "%s: expected no rows by an index", kernel->name);
    if (c->outputs[0].dtype != c->inputs[0].dtype)
        return dw__fail(DW_TYPE, "%s: the result is %s; expected %s, the type of the operands",
                        kernel->name, dw_dtype_name(c->outputs[0].dtype),
                        dw_dtype_name(c->inputs[0].dtype));
    const dw_segment_linear_params p = params_of(call);
    if (blocks_of(c, &p) > INT32_MAX)
        return dw__fail(DW_UNSUPPORTED, "%s: %lld tiles of %d x %d; expected fewer than 2^31",
                        kernel->name, (long long)blocks_of(c, &p), DW_MATMUL_TILE, DW_MATMUL_TILE);
    return DW_OK;
}

/* Two FLOPs for each product, at the rate of FMA units: a sixteenth of the tensor cores' dense BF16. */
static void seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                    dw__kernel_seconds *result) {
    const dw_segment_linear_params p = params_of(call);
    (void)kernel;
    result->seconds = 4e-6 + 2.0 * (double)p.rows * (double)p.m * (double)p.n / (gpu->flops / 16.0);
    snprintf(result->from, sizeof result->from, "estimate: FLOPs at the rate of FMA units");
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    const uint64_t type = (uint64_t)dw__gpu_element(c->inputs[0].dtype),
                   entry = c->op == DW_OP_SEGMENT_LINEAR ? LINEAR : WEIGHT;
    return dw__variant_of(context, kernel, type | entry << 4, variant);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__operation_call *c = call;
    dw_segment_linear_params params = params_of(c);
    const int64_t blocks = blocks_of(&c->call, &params);
    void *arguments[] = {&params};
    if (blocks == 0) return DW_OK;
    return context->device->launch(&(dw__launch){
        .name = entries[variant->params >> 4],
        .function = variant->functions[0],
        .grid = {(unsigned)blocks, 1, 1},
        .block = {DW_MATMUL_THREADS, 1, 1},
        .stream = c->stream,
        .arguments = arguments,
    });
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    (void)kernel;
    points->code = (dw__jit_variant){.source = "common/segment_linear.cu",
                                     .entry = entries[params >> 4],
                                     .arch = dw__gpu_arch(capability)};
    dw__jit_add_define(&points->code, "TYPE", (int)(params & 15));
    return DW_OK;
}

/* Tiles with rows of several groups, and edges in every direction. In the second trial w is [E, K, N], there is no
 * bias, and the result is added to another tensor. */
static void example(uint64_t params, int index, dw__call *c) {
    enum { ROWS = 150, GROUPS = 5, WIDTH = 37, RESULTS = 70 };
    static const dw_attr plain = {.key = DW_ATTR_KEY_TRANSPOSE_W, .integer = 0};
    const dw_dtype type = (dw_dtype)(params & 15);
    const dw__tensor x = {.dtype = type, .rank = 2, .shape = {ROWS, WIDTH}},
                     y = {.dtype = type, .rank = 2, .shape = {ROWS, RESULTS}},
                     offsets = {.dtype = DW_I32, .rank = 1, .shape = {GROUPS + 1}},
                     absent = {.rank = -1};
    *c = (dw__call){.op = DW_OP_SEGMENT_LINEAR_BACKWARD_WEIGHT,
                    .input_count = 3,
                    .output_count = 1,
                    .inputs = {x, y, offsets},
                    .outputs = {{.dtype = type, .rank = 3, .shape = {GROUPS, WIDTH, RESULTS}}}};
    if (params >> 4 == LINEAR) {
        c->op = DW_OP_SEGMENT_LINEAR;
        c->attr_count = index ? 1 : 0;
        c->attrs = &plain;
        c->input_count = 4;
        c->inputs[1] = (dw__tensor){.dtype = type, .rank = 3, .shape = {GROUPS, RESULTS, WIDTH}};
        if (index) c->inputs[1] = c->outputs[0];
        c->inputs[3] =
            index ? absent : (dw__tensor){.dtype = type, .rank = 2, .shape = {GROUPS, RESULTS}};
        c->outputs[0] = y;
    }
    for (uint32_t i = 0; i < c->input_count; i++)
        if (c->inputs[i].rank >= 0) dw__tensor_set_contiguous(&c->inputs[i]);
    dw__tensor_set_contiguous(&c->outputs[0]);
    if (index) {
        c->accumulates = DW__ADDS_TO_ADDEND;
        c->addend = c->outputs[0];
    }
}

const dw__kernel dw__gpu_segment_linear = {
    .name = "segment_linear",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .computes = computes,
    .proof = DW__PROVEN_ON_EMULATOR,
    .operation = "segment_linear, segment_linear_backward_weight",
    .source = "cuda/common/segment_linear.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "BF16, F16, F32, F64",
    .needs = "any strides; no tensor cores",
    .supports = supports,
    .seconds = seconds,
    .results = DW__RESULTS_SCATTERED,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    .first_use = &dw__operation_first_use,
    .tolerance = "accumulates in F32 (F64 in F64) and rounds once",
    .example = example,
    .tolerance_factor = 8.0,
    .accumulates = DW__ADDS_TO_ADDEND,
};
