/* segment_linear and the gradient of its matrices on Hopper, by the grouped forms of sm90_gemm: rows of A in groups, with a
 * matrix of B each, and groups of the contraction. Offsets stay in device memory. */
#include "kernel/cuda/gpu_gemm.h"
#include "kernel/cuda/gpu_kernels.h"
#include <stdio.h>

static bool computes(dw_op op) {
    return op == DW_OP_SEGMENT_LINEAR || op == DW_OP_SEGMENT_LINEAR_BACKWARD_WEIGHT;
}

/* ---- calls ----------------------------------------------------------------------------------------- */

/* A matrix whose rows lie at one distance. */
static bool matrix_of(const dw__tensor *t, dw_matrix *m) {
    *m = (dw_matrix){t->data, t->stride[0]};
    return t->shape[1] == 1 || t->stride[1] == 1;
}

/* Matrices one after the other, of which rows or columns are contiguous. `k_axis`: the axis of the contraction. */
static bool matrices_of(const dw__tensor *t, int k_axis, dw_matrix *m, bool *turned) {
    const int row_axis = k_axis == 2 ? 1 : 2;
    *turned = t->shape[k_axis] > 1 && t->stride[k_axis] != 1;
    const int across = *turned ? k_axis : row_axis;
    /* A single row of each is as far from the next as the matrices are. */
    *m = (dw_matrix){t->data, t->stride[t->shape[across] == 1 ? 0 : across]};
    if (*turned && t->shape[row_axis] > 1 && t->stride[row_axis] != 1) return false;
    return t->shape[0] == 1 || t->stride[0] == t->shape[across] * m->stride;
}

static bool is_aligned(const dw_matrix *m, dw_dtype type) {
    return !m->data || m->stride * (int64_t)dw_dtype_bytes(type) % 16 == 0;
}

static bool linear_of(const dw__call *c, dw__sm90_call *s) {
    enum { X, W, OFFSETS, B };
    const dw__tensor *w = &c->inputs[W], *y = &c->outputs[0], *addend = dw__call_addend(c);
    const int k_axis = dw__call_int(c, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0 ? 2 : 1;
    s->groups.kind = DW_SM90_ROWS;
    s->gemm.m = y->shape[0];
    s->gemm.n = y->shape[1];
    s->gemm.k = w->shape[k_axis];
    if (c->input_count > B && c->inputs[B].rank >= 0) {
        if (!dw__tensor_is_contiguous(&c->inputs[B])) return false;
        s->gemm.bias = c->inputs[B].data;
    }
    return matrix_of(&c->inputs[X], &s->gemm.a) &&
           matrices_of(w, k_axis, &s->gemm.b, &s->turned.b) && matrix_of(y, &s->gemm.d) &&
           (!addend || matrix_of(addend, &s->gemm.residual));
}

static bool weight_of(const dw__call *c, dw__sm90_call *s) {
    const dw__tensor *x = &c->inputs[0], *y = &c->inputs[1], *d = &c->outputs[0],
                     *addend = dw__call_addend(c);
    bool turned, turned_addend = false;
    s->groups.kind = DW_SM90_CONTRACTION;
    s->turned = (dw__gemm_turned){true, true};
    s->gemm.m = d->shape[1];
    s->gemm.n = d->shape[2];
    s->gemm.k = x->shape[0];
    return matrix_of(x, &s->gemm.a) && matrix_of(y, &s->gemm.b) &&
           matrices_of(d, 2, &s->gemm.d, &turned) && !turned &&
           (!addend ||
            (matrices_of(addend, 2, &s->gemm.residual, &turned_addend) && !turned_addend));
}

/* False: the operands lie in a way that the kernel does not read. */
static bool call_of(const dw__operation_call *given, dw__sm90_call *s) {
    const dw__call *c = &given->call;
    const dw__tensor *offsets = &c->inputs[2];
    *s = (dw__sm90_call){.gemm = {.struct_size = sizeof s->gemm,
                                  .dtype = c->inputs[0].dtype,
                                  .output = c->outputs[0].dtype,
                                  .alpha = 1.0f,
                                  .stream = given->stream},
                         .groups = {.count = offsets->shape[0] - 1, .offsets = offsets->data}};
    if (!dw__tensor_is_contiguous(offsets)) return false;
    return c->op == DW_OP_SEGMENT_LINEAR ? linear_of(c, s) : weight_of(c, s);
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__operation_call *given = call;
    dw__sm90_call s;
    DW_RETURN_IF_FAILED(dw__gpu_kernel_computes(kernel, &given->call, gpu));
    if (!call_of(given, &s))
        return dw__fail(DW_UNSUPPORTED,
                        "%s: expected contiguous offsets, matrices one after the other, and "
                        "contiguous rows",
                        kernel->name);
    if (s.groups.count > 1 &&
        !(is_aligned(&s.gemm.b, s.gemm.dtype) && is_aligned(&s.gemm.d, s.gemm.output) &&
          is_aligned(&s.gemm.residual, s.gemm.output)))
        return dw__fail(DW_UNSUPPORTED, "%s: expected rows that are multiples of 16 bytes apart",
                        kernel->name);
    if (s.groups.count < 1 || s.groups.count > INT32_MAX)
        return dw__fail(DW_UNSUPPORTED, "%s: %lld groups; expected 1 to 2^31 - 1", kernel->name,
                        (long long)s.groups.count);
    return dw__sm90_supports(&s.gemm, s.turned, gpu);
}

static void seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                    dw__kernel_seconds *result) {
    dw__sm90_call s;
    (void)kernel;
    snprintf(result->from, sizeof result->from, "the least by counted work");
    if (!call_of(call, &s) || dw__gemm_is_empty(&s.gemm)) return;
    const dw__sm90_shape shape = dw__sm90_shape_of(&s, gpu->sm_count);
    const dw__gemm_cost cost = dw__sm90_cost_of(&s, &shape, gpu->sm_count);
    result->seconds = dw__gemm_least_seconds(&s.gemm, gpu, &cost, DW__SM90_FLOPS_PER_CLOCK);
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    dw__sm90_call s;
    (void)call_of(call, &s);
    return dw__variant_of(context, kernel, dw__sm90_shape_of(&s, context->sm_count).params,
                          variant);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    dw__sm90_call s;
    (void)call_of(call, &s);
    if (dw__gemm_is_empty(&s.gemm)) return DW_OK;
    return dw__sm90_enqueue(&s, context, variant);
}

/* ---- the first-use check --------------------------------------------------------------------------- */

/* Groups that end within a tile, one of them empty, edges in every direction, and more steps of the contraction than a
 * ring has stages. */
static void example(uint64_t params, int index, dw__call *c) {
    enum { GROUPS = 5 };
    static const dw_attr plain = {.key = DW_ATTR_KEY_TRANSPOSE_W, .integer = 0};
    const dw__sm90_shape s = {.params = params};
    const dw_dtype type = s.f16 ? DW_F16 : DW_BF16,
                   result = s.output == DW_GEMM_OUTPUT_F32 ? DW_F32 : type;
    const bool is_weight = s.groups == DW_SM90_CONTRACTION;
    const int64_t rows = (is_weight ? 1500 : 300) + 64 * index, k = is_weight ? rows : 456, m = 200,
                  n = 136 + 128 * index;
    const dw__tensor absent = {.rank = -1};
    *c = (dw__call){.op = is_weight ? DW_OP_SEGMENT_LINEAR_BACKWARD_WEIGHT : DW_OP_SEGMENT_LINEAR,
                    .attr_count = !is_weight && s.turned_b,
                    .attrs = &plain,
                    .input_count = is_weight ? 3 : 4,
                    .output_count = 1,
                    .inputs = {{.dtype = type, .rank = 2, .shape = {rows, is_weight ? m : k}},
                               {.dtype = type, .rank = 3, .shape = {GROUPS, n, k}},
                               {.dtype = DW_I32, .rank = 1, .shape = {GROUPS + 1}},
                               absent},
                    .outputs = {{.dtype = result, .rank = 2, .shape = {rows, n}}}};
    if (is_weight) {
        c->inputs[1] = (dw__tensor){.dtype = type, .rank = 2, .shape = {rows, n}};
        c->outputs[0] = (dw__tensor){.dtype = result, .rank = 3, .shape = {GROUPS, m, n}};
    } else if (s.turned_b) {
        c->inputs[1] = (dw__tensor){.dtype = type, .rank = 3, .shape = {GROUPS, k, n}};
    }
    if (s.bias) c->inputs[3] = (dw__tensor){.dtype = type, .rank = 2, .shape = {GROUPS, n}};
    for (uint32_t i = 0; i < c->input_count; i++)
        if (c->inputs[i].rank >= 0) dw__tensor_set_contiguous(&c->inputs[i]);
    dw__tensor_set_contiguous(&c->outputs[0]);
    if (s.residual) {
        c->accumulates = DW__ADDS_TO_ADDEND;
        c->addend = c->outputs[0];
    }
}

/* ---- entry ----------------------------------------------------------------------------------------- */

const dw__kernel dw__sm90_segment = {
    .name = "sm90_segment",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .computes = computes,
    .proof = DW__MEASURED_ON_HARDWARE,
    .operation = "segment_linear, segment_linear_backward_weight",
    .source = "cuda/sm90/sm90_gemm.cu",
    .architectures = "sm_90a (H100, H200)",
    .elements = "BF16, F16; the result also F32",
    .needs = "contiguous rows of 16-byte multiples",
    .supports = supports,
    .seconds = seconds,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = dw__sm90_entry_points,
    .first_use = &dw__operation_first_use,
    .example = example,
    .tolerance = "sums in F32, then the result's rounding, against FP64",
    .tolerance_factor = 8.0,
    .accumulates = DW__ADDS_TO_ADDEND,
};
