/* segment_linear and the gradient of its matrices, by the grouped forms of sm90_gemm and sm100_gemm: rows of A in
 * groups, with a matrix of B each, and groups of the contraction. Offsets stay in device memory. */
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

/* The rows of an operand that are given by an index. False: it is not contiguous. */
static bool gather_rows(const dw__call *c, uint32_t index, int operand, dw__gemm_groups_call *s) {
    const dw__tensor *rows = dw__call_optional(c, index),
                     *x = &c->inputs[operand == DW_SM90_GATHER_A ? 0 : 1];
    if (!rows) return true;
    if (s->rows.gather != DW_SM90_GATHER_NONE || !dw__tensor_is_contiguous(rows)) return false;
    s->rows.gather = operand;
    s->rows.count = x->shape[0];
    s->rows.in = rows->data;
    return true;
}

static bool linear_of(const dw__call *c, dw__gemm_groups_call *s) {
    enum { X, W, OFFSETS, B, ROWS, PLACES, WEIGHTS };
    const dw__tensor *w = &c->inputs[W], *y = &c->outputs[0], *addend = dw__call_addend(c);
    const int k_axis = dw__call_int(c, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0 ? 2 : 1;
    s->groups.kind = DW_GROUPS_ROWS;
    s->gemm.m = y->shape[0];
    s->gemm.n = y->shape[1];
    s->gemm.k = w->shape[k_axis];
    if (c->input_count > B && c->inputs[B].rank >= 0) {
        if (!dw__tensor_is_contiguous(&c->inputs[B])) return false;
        s->gemm.bias = c->inputs[B].data;
    }
    const dw__tensor *places = dw__call_optional(c, PLACES),
                     *weights = dw__call_optional(c, WEIGHTS);
    if ((places && !dw__tensor_is_contiguous(places)) ||
        (weights && !dw__tensor_is_contiguous(weights)))
        return false;
    s->rows.scatter = places != NULL;
    s->rows.weighted = weights != NULL;
    if (places) s->rows.out = places->data;
    if (weights) s->rows.weights = weights->data;
    return gather_rows(c, ROWS, DW_SM90_GATHER_A, s) && matrix_of(&c->inputs[X], &s->gemm.a) &&
           matrices_of(w, k_axis, &s->gemm.b, &s->turned.b) && matrix_of(y, &s->gemm.d) &&
           (!addend || matrix_of(addend, &s->gemm.residual));
}

static bool weight_of(const dw__call *c, dw__gemm_groups_call *s) {
    enum { X, Y, OFFSETS, X_ROWS, Y_ROWS };
    const dw__tensor *x = &c->inputs[X], *y = &c->inputs[Y], *d = &c->outputs[0],
                     *addend = dw__call_addend(c), *rows = dw__call_optional(c, X_ROWS);
    bool turned, turned_addend = false;
    s->groups.kind = DW_GROUPS_CONTRACTION;
    s->turned = (dw__gemm_turned){true, true};
    s->gemm.m = d->shape[1];
    s->gemm.n = d->shape[2];
    s->gemm.k = rows ? rows->shape[0] : x->shape[0];
    return gather_rows(c, X_ROWS, DW_SM90_GATHER_A, s) &&
           gather_rows(c, Y_ROWS, DW_SM90_GATHER_B, s) && matrix_of(x, &s->gemm.a) &&
           matrix_of(y, &s->gemm.b) && matrices_of(d, 2, &s->gemm.d, &turned) && !turned &&
           (!addend ||
            (matrices_of(addend, 2, &s->gemm.residual, &turned_addend) && !turned_addend));
}

/* False: the operands lie in a way that the kernel does not read. */
bool dw__segment_gemm_call(const dw__operation_call *given, dw__gemm_groups_call *s) {
    const dw__call *c = &given->call;
    const dw__tensor *offsets = &c->inputs[2];
    *s = (dw__gemm_groups_call){.gemm = {.struct_size = sizeof s->gemm,
                                         .dtype = c->inputs[0].dtype,
                                         .output = c->outputs[0].dtype,
                                         .alpha = 1.0f,
                                         .stream = given->stream},
                                .groups = {.count = offsets->shape[0] - 1,
                                           .offsets = offsets->data,
                                           .error = given->error}};
    if (!dw__tensor_is_contiguous(offsets)) return false;
    return c->op == DW_OP_SEGMENT_LINEAR ? linear_of(c, s) : weight_of(c, s);
}

static bool is_hopper(const dw__kernel *kernel) { return kernel == &dw__sm90_segment; }

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__operation_call *given = call;
    dw__gemm_groups_call s;
    DW_RETURN_IF_FAILED(dw__gpu_kernel_computes(kernel, &given->call, gpu));
    if (!dw__segment_gemm_call(given, &s))
        return dw__fail(DW_UNSUPPORTED,
                        "%s: expected contiguous offsets, matrices one after the other, and "
                        "contiguous rows",
                        kernel->name);
    if (dw__call_gathers(&given->call) && !(is_hopper(kernel) && dw__sm90_gathers(&s)))
        return dw__fail(DW_UNSUPPORTED,
                        is_hopper(kernel) ? "%s: expected one row or more for the index, of "
                                            "16-byte multiples"
                                          : "%s: expected no rows by an index",
                        kernel->name);
    if (s.groups.count > 1 &&
        !(is_aligned(&s.gemm.b, s.gemm.dtype) && is_aligned(&s.gemm.d, s.gemm.output) &&
          is_aligned(&s.gemm.residual, s.gemm.output)))
        return dw__fail(DW_UNSUPPORTED, "%s: expected rows that are multiples of 16 bytes apart",
                        kernel->name);
    if (s.groups.count < 1 || s.groups.count > INT32_MAX)
        return dw__fail(DW_UNSUPPORTED, "%s: %lld groups; expected 1 to 2^31 - 1", kernel->name,
                        (long long)s.groups.count);
    return is_hopper(kernel) ? dw__sm90_supports(&s.gemm, s.turned, gpu)
                             : dw__sm100_supports(&s.gemm, s.turned, gpu);
}

/* ---- variants -------------------------------------------------------------------------------------- */

static uint64_t params_of(const dw__kernel *kernel, const dw__gemm_groups_call *s, int sm_count) {
    return is_hopper(kernel) ? dw__sm90_shape_of(s, sm_count).params
                             : dw__gemm_groups_shape_of(s, sm_count).params;
}

static void seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                    dw__kernel_seconds *result) {
    const bool hopper = is_hopper(kernel);
    dw__gemm_groups_call s;
    snprintf(result->from, sizeof result->from, "the least by counted work%s",
             hopper ? "" : ", nothing measured");
    if (!dw__segment_gemm_call(call, &s) || dw__gemm_is_empty(&s.gemm)) return;
    const uint64_t params = params_of(kernel, &s, gpu->sm_count);
    const dw__sm90_shape on_hopper = {.params = params};
    const dw__gemm_shape shape = {.params = params};
    const dw__gemm_cost cost = hopper ? dw__sm90_cost_of(&s, &on_hopper, gpu->sm_count)
                                      : dw__gemm_groups_cost_of(&s, &shape, gpu->sm_count);
    result->seconds = dw__gemm_least_seconds(
        &s.gemm, gpu, &cost, hopper ? DW__SM90_FLOPS_PER_CLOCK : DW__SM100_FLOPS_PER_CLOCK);
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    dw__gemm_groups_call s;
    (void)dw__segment_gemm_call(call, &s);
    return dw__variant_of(context, kernel, params_of(kernel, &s, context->sm_count), variant);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    dw__gemm_groups_call s;
    (void)dw__segment_gemm_call(call, &s);
    if (dw__gemm_is_empty(&s.gemm)) return DW_OK;
    return is_hopper(variant->kernel) ? dw__sm90_enqueue(&s, context, variant)
                                      : dw__sm100_enqueue(&s, context, variant);
}

/* ---- the first-use check --------------------------------------------------------------------------- */

/* The properties of a variant that its example depends on. */
typedef struct form {
    bool f16, f32_result, is_weight, turned_b, bias, residual;
    int gather; /* GATHER of sm90_gather_params.h */
    bool scatter, weighted;
} form;

/* Adds an operand of an element for each row; others in front of it that are not there yet are absent. */
static void add_operand(dw__call *c, uint32_t at, dw_dtype type, int64_t rows) {
    for (; c->input_count <= at; c->input_count++)
        c->inputs[c->input_count] = (dw__tensor){.rank = -1};
    c->inputs[at] = (dw__tensor){.dtype = type, .rank = 1, .shape = {rows}};
}

/* Lets rows of an operand be given by an index. There are fewer of them than the index has, so some repeat. */
static void example_rows(int gather, dw__call *c) {
    const bool is_weight = c->op == DW_OP_SEGMENT_LINEAR_BACKWARD_WEIGHT;
    const uint32_t at = !is_weight ? 4 : gather == DW_SM90_GATHER_A ? 3 : 4;
    int64_t *rows = &c->inputs[gather == DW_SM90_GATHER_A ? 0 : 1].shape[0];
    add_operand(c, at, DW_I32, *rows);
    *rows = *rows / 3;
}

/* Groups that end within a tile, one of them empty, edges in every direction, more steps of the contraction than a ring
 * has stages, and several tiles for a block. */
static void example(const form *s, int index, dw__call *c) {
    enum { GROUPS = 5 };
    static const dw_attr plain = {.key = DW_ATTR_KEY_TRANSPOSE_W, .integer = 0};
    const dw_dtype type = s->f16 ? DW_F16 : DW_BF16, result = s->f32_result ? DW_F32 : type;
    const int64_t rows = (s->is_weight ? 1500 : 300) + 64 * index, k = s->is_weight ? rows : 456,
                  m = 200, n = 136 + 128 * index;
    const dw__tensor absent = {.rank = -1};
    *c =
        (dw__call){.op = s->is_weight ? DW_OP_SEGMENT_LINEAR_BACKWARD_WEIGHT : DW_OP_SEGMENT_LINEAR,
                   .attr_count = !s->is_weight && s->turned_b,
                   .attrs = &plain,
                   .input_count = s->is_weight ? 3 : 4,
                   .output_count = 1,
                   .inputs = {{.dtype = type, .rank = 2, .shape = {rows, s->is_weight ? m : k}},
                              {.dtype = type, .rank = 3, .shape = {GROUPS, n, k}},
                              {.dtype = DW_I32, .rank = 1, .shape = {GROUPS + 1}},
                              absent},
                   .outputs = {{.dtype = result, .rank = 2, .shape = {rows, n}}}};
    if (s->is_weight) {
        c->inputs[1] = (dw__tensor){.dtype = type, .rank = 2, .shape = {rows, n}};
        c->outputs[0] = (dw__tensor){.dtype = result, .rank = 3, .shape = {GROUPS, m, n}};
    } else if (s->turned_b) {
        c->inputs[1] = (dw__tensor){.dtype = type, .rank = 3, .shape = {GROUPS, k, n}};
    }
    if (s->gather) example_rows(s->gather, c);
    if (s->scatter) add_operand(c, 5, DW_I32, rows);
    if (s->weighted) add_operand(c, 6, type, rows);
    if (s->bias) c->inputs[3] = (dw__tensor){.dtype = type, .rank = 2, .shape = {GROUPS, n}};
    for (uint32_t i = 0; i < c->input_count; i++)
        if (c->inputs[i].rank >= 0) dw__tensor_set_contiguous(&c->inputs[i]);
    dw__tensor_set_contiguous(&c->outputs[0]);
    if (s->residual) {
        c->accumulates = DW__ADDS_TO_ADDEND;
        c->addend = c->outputs[0];
    }
}

static void example_sm90(uint64_t params, int index, dw__call *c) {
    const dw__sm90_shape s = {.params = params};
    const form f = {.f16 = s.f16,
                    .f32_result = s.output == DW_GEMM_OUTPUT_F32,
                    .is_weight = s.groups == DW_GROUPS_CONTRACTION,
                    .turned_b = s.turned_b,
                    .bias = s.bias,
                    .residual = s.residual,
                    .gather = (int)s.gather,
                    .scatter = s.scatter,
                    .weighted = s.weighted};
    example(&f, index, c);
}

static void example_sm100(uint64_t params, int index, dw__call *c) {
    const dw__gemm_shape s = {.params = params};
    const form f = {.f16 = s.f16,
                    .f32_result = s.output == DW_GEMM_OUTPUT_F32,
                    .is_weight = s.groups == DW_GROUPS_CONTRACTION,
                    .turned_b = s.turned_b,
                    .bias = s.bias,
                    .residual = s.residual};
    example(&f, index, c);
}

/* ---- entries --------------------------------------------------------------------------------------- */

#define SEGMENT_GEMM                                                                               \
    .backend = "deepwell", .kind = DW__CALL_OPERATION, .computes = computes,                       \
    .operation = "segment_linear, segment_linear_backward_weight",                                 \
    .elements = "BF16, F16; the result also F32", .needs = "contiguous rows of 16-byte multiples", \
    .supports = supports, .seconds = seconds, .prepare = prepare, .enqueue = enqueue,              \
    .first_use = &dw__operation_first_use, .example_sms = 3,                                       \
    .tolerance = "sums in F32, then the result's rounding, against FP64", .tolerance_factor = 8.0, \
    .accumulates = DW__ADDS_TO_ADDEND, .results = DW__RESULTS_IN_ROWS
const dw__kernel dw__sm90_segment = {
    SEGMENT_GEMM,
    .name = "sm90_segment",
    .proof = DW__MEASURED_ON_HARDWARE,
    .source = "cuda/sm90/sm90_gemm.cu",
    .architectures = "sm_90a (H100, H200)",
    .entry_points = dw__sm90_entry_points,
    .example = example_sm90,
};
const dw__kernel dw__sm100_segment = {
    SEGMENT_GEMM,
    .name = "sm100_segment",
    .proof = DW__PROVEN_ON_EMULATOR,
    .source = "cuda/sm100/gemm.cu",
    .architectures = "sm_100f (B200, B300)",
    .entry_points = dw__sm100_entry_points,
    .example = example_sm100,
};
