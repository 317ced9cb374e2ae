/* The entries of CUTLASS's kernels (docs/cutlass.md) for GEMM, grouped GEMM and attention. The optional library loads
 * its own kernels; a variant here only stands for a first-use check. gpu_kernels.c makes a copy of the family's entry
 * for each kernel of the library. */
#include "kernel/cuda/gpu_attention.h"
#include "kernel/cuda/gpu_gemm.h"
#include <stdio.h>

/* ---- GEMM: supported calls --------------------------------------------------------------------------- */

enum { COLUMNS = 8 }; /* n is a multiple of it */

static dw_status check_size(const dw_cutlass_kernel *kernel, const char *name, int64_t size,
                            int multiple) {
    if (size > 0 && size % multiple == 0) return DW_OK;
    return dw__fail(DW_UNSUPPORTED, "%s is %lld; %s expects a multiple of %d", name,
                    (long long)size, kernel->name, multiple);
}

static dw_status check_sizes(const dw_cutlass_kernel *kernel, int64_t n, int64_t k) {
    const int row_bits = 16 * 8; /* rows of A and B are multiples of 16 bytes */
    DW_RETURN_IF_FAILED(check_size(kernel, "n", n, COLUMNS));
    return check_size(kernel, "k", k,
                      row_bits / dw_dtype_bits(dw_scheme_describe(kernel->scheme)->element));
}

static dw_status check_gemm(const dw_gemm *c, const dw_cutlass_kernel *kernel) {
    const bool operands = dw__gemm_scheme_a(c) == kernel->scheme &&
                          dw__gemm_scheme_b(c) == kernel->scheme &&
                          (c->quantized || c->dtype == DW_BF16);
    if (!operands || c->output != DW_BF16 || c->quantized_d)
        return dw__fail(DW_UNSUPPORTED, "%s makes bf16 of %s", kernel->name,
                        dw_scheme_name(kernel->scheme));
    if (c->bias || c->activation != DW_ACTIVATION_NONE)
        return dw__fail(DW_UNSUPPORTED,
                        "%s adds a residual, and has no bias and no activation; Deepwell's own has",
                        kernel->name);
    DW_RETURN_IF_FAILED(dw__gemm_refuse_sm90(c));
    return check_sizes(kernel, c->n, c->k);
}

static dw_status supports_gemm(const dw__kernel *entry, const void *call,
                               const dw__gpu_target *gpu) {
    const dw_cutlass_kernel *kernel = entry->provided;
    DW_RETURN_IF_FAILED(dw__cutlass_is_for(kernel, gpu));
    const dw_status status = check_gemm(call, kernel);
    return dw__gemm_scheme_a(call) == kernel->scheme ? status : DW_TYPE;
}

static dw_status supports_groups(const dw__kernel *entry, const void *call,
                                 const dw__gpu_target *gpu) {
    const dw_cutlass_kernel *kernel = entry->provided;
    const dw_grouped_gemm *c = call;
    DW_RETURN_IF_FAILED(dw__cutlass_is_for(kernel, gpu));
    if (c->dtype != DW_BF16) return dw__fail(DW_UNSUPPORTED, "%s makes bf16 of bf16", kernel->name);
    return check_sizes(kernel, c->n, c->k);
}

/* ---- attention: supported calls ---------------------------------------------------------------------- */

/* Returns whether some row may be unable to see some key. These kernels then require a causal mask. */
static bool is_causal(const dw_attention *c) {
    return dw__attention_shape_of(c, DW__ATTENTION_FORWARD, 0).window;
}

static dw_status check_features(const dw_attention *c, const dw_cutlass_kernel *kernel) {
    const bool window = c->window_left >= 0 || c->window_right != 0;
    const char *lacks = c->dtype != DW_BF16      ? "elements other than bf16"
                        : c->offsets_q           ? "packed sequences"
                        : c->softcap > 0.0f      ? "a soft cap"
                        : c->bias_kind           ? "a bias"
                        : c->dropout > 0.0f      ? "dropout"
                        : is_causal(c) && window ? "a window other than the causal one"
                                                 : NULL;
    if (!lacks) return DW_OK;
    return dw__fail(DW_UNSUPPORTED, "%s does not support %s; expected another kernel, or NULL",
                    kernel->name, lacks);
}

static dw_status check_strides(const dw_attention *c, const dw_cutlass_kernel *kernel) {
    for (int which = DW__ATTENTION_Q; which <= DW__ATTENTION_O; which++) {
        const int64_t stride = dw__attention_tensor(c, which)->head;
        if (dw__attention_extent_of(c, which).heads > 1 && stride != c->head_dim)
            return dw__fail(DW_UNSUPPORTED,
                            "%s: the head stride of %s is %lld elements; expected %d: the heads of "
                            "a row lie side by side",
                            kernel->name, dw__attention_operands[which].name, (long long)stride,
                            (int)c->head_dim);
    }
    const struct {
        const char *axis;
        bool many;
        int64_t k, v;
    } same[] = {{"row", c->seq_len_kv > 1, c->k.row, c->v.row},
                {"batch", c->batch > 1, c->k.batch, c->v.batch}};
    for (size_t i = 0; i < DW_COUNT(same); i++)
        if (same[i].many && same[i].k != same[i].v)
            return dw__fail(DW_UNSUPPORTED,
                            "%s: the %s stride of k is %lld elements and that of v %lld; expected "
                            "one for both",
                            kernel->name, same[i].axis, (long long)same[i].k, (long long)same[i].v);
    return DW_OK;
}

/* ---- calls in the library's form ---------------------------------------------------------------------- */

/* Returns the stride to pass. With a single row the caller's stride is not used. */
static int64_t stride_of(const dw_matrix *x, int64_t rows, int64_t columns) {
    return rows > 1 ? x->stride : columns;
}

static dw_cutlass_gemm translate_gemm(const dw_gemm *c, const dw_cutlass_kernel *kernel,
                                      int sm_count) {
    const int64_t each =
                      kernel->scheme == DW_SCHEME_NVFP4 ? 2 : 1, /* elements in a unit of stride */
        units = dw__gemm_row_units(c);
    return (dw_cutlass_gemm){
        .size_of = sizeof(dw_cutlass_gemm),
        .m = c->m,
        .n = c->n,
        .k = c->k,
        .a = c->a.data,
        .b = c->b.data,
        .c = c->residual.data,
        .d = c->d.data,
        .a_stride = each * stride_of(&c->a, c->m, units),
        .b_stride = each * stride_of(&c->b, c->n, units),
        .c_stride = stride_of(&c->residual, c->m, c->n),
        .d_stride = stride_of(&c->d, c->m, c->n),
        .a_scales = c->quantized ? c->scales_a : NULL,
        .b_scales = c->quantized ? c->scales_b : NULL,
        .alpha = c->alpha,
        .beta = c->residual.data ? 1.0f : 0.0f,
        .processors = sm_count,
        .a_factor = c->quantized ? c->factor_a : NULL,
        .b_factor = c->quantized ? c->factor_b : NULL,
    };
}

static dw_cutlass_grouped translate_groups(const dw_grouped_gemm *c, int sm_count) {
    return (dw_cutlass_grouped){
        .size_of = sizeof(dw_cutlass_grouped),
        .groups = c->groups,
        .n = c->n,
        .k = c->k,
        .m = c->m,
        .a = (const void *const *)c->a,
        .b = (const void *const *)c->b,
        .d = c->d,
        .a_stride = c->stride_a,
        .b_stride = c->stride_b,
        .d_stride = c->stride_d,
        .alpha = c->alpha,
        .processors = sm_count,
    };
}

/* The caller's tensor may have any stride on an axis of length 1; the kernel gets one that it supports. */
static dw_cutlass_attention translate_attention(const dw_attention *c, int sm_count) {
    const bool many = c->batch > 1;
    dw_cutlass_attention to = {
        .size_of = sizeof to,
        .batch = c->batch,
        .heads = c->heads_q,
        .heads_kv = c->heads_kv,
        .queries = c->seq_len_q,
        .keys = c->seq_len_kv,
        .head_dim = c->head_dim,
        .causal = is_causal(c),
        .q = c->q.data,
        .k = c->k.data,
        .v = c->v.data,
        .o = c->o.data,
        .lse = c->lse,
        .q_stride = c->seq_len_q > 1 ? c->q.row : (int64_t)c->heads_q * c->head_dim,
        .kv_stride = c->seq_len_kv > 1 ? c->k.row : (int64_t)c->heads_kv * c->head_dim,
        .o_stride = c->seq_len_q > 1 ? c->o.row : (int64_t)c->heads_q * c->head_dim,
        .scale = c->scale,
        .processors = sm_count,
    };
    to.q_batch_stride = many ? c->q.batch : to.q_stride;
    to.kv_batch_stride = many ? c->k.batch : to.kv_stride;
    to.o_batch_stride = many ? c->o.batch : to.o_stride;
    return to;
}

/* A call of the kernel's kind in the library's form. */
typedef struct translated {
    union {
        dw_cutlass_gemm gemm;
        dw_cutlass_grouped groups;
        dw_cutlass_attention attention;
    } call;
    void *workspace, *stream;
} translated;

static translated translate(const dw_cutlass_kernel *kernel, const void *call, int sm_count) {
    const dw_gemm *gemm = call;
    const dw_grouped_gemm *groups = call;
    const dw_attention *attention = call;
    switch (kernel->kind) {
    case DW_CUTLASS_GROUPED:
        return (translated){
            {.groups = translate_groups(groups, sm_count)}, groups->workspace, groups->stream};
    case DW_CUTLASS_ATTENTION:
        return (translated){{.attention = translate_attention(attention, sm_count)},
                            attention->workspace,
                            attention->stream};
    default:
        return (translated){
            {.gemm = translate_gemm(gemm, kernel, sm_count)}, gemm->workspace, gemm->stream};
    }
}

/* Does not access memory. */
static dw_status workspace_bytes(const dw__kernel *entry, const void *call,
                                 const dw__context *context, size_t *bytes) {
    const dw_cutlass_kernel *kernel = entry->provided;
    const translated made = translate(kernel, call, context ? context->sm_count : 0);
    *bytes = 0;
    return dw__cutlass_status(kernel, kernel->workspace_bytes(&made.call, bytes));
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw_cutlass_kernel *kernel = variant->kernel->provided;
    const translated made = translate(kernel, call, context->sm_count);
    return dw__cutlass_status(kernel, kernel->launch(&made.call, made.workspace, made.stream));
}

static dw_status supports_attention(const dw__kernel *entry, const void *call,
                                    const dw__gpu_target *gpu) {
    size_t bytes;
    DW_RETURN_IF_FAILED(dw__cutlass_is_for(entry->provided, gpu));
    DW_RETURN_IF_FAILED(dw__attention_check(call, DW__ATTENTION_FORWARD, false));
    DW_RETURN_IF_FAILED(check_features(call, entry->provided));
    DW_RETURN_IF_FAILED(check_strides(call, entry->provided));
    return workspace_bytes(entry, call, NULL, &bytes);
}

/* ---- entries ------------------------------------------------------------------------------------------ */

/* The first-use check is of a GEMM with or without a residual, or of attention of a head dimension with or without a
 * mask. */
static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    uint64_t params = 0;
    if (kernel->kind == DW__CALL_GEMM) params = ((const dw_gemm *)call)->residual.data != NULL;
    if (kernel->kind == DW__CALL_ATTENTION_FORWARD) {
        const dw_attention *c = call;
        const dw__attention_shape shape = {.head_dim = (uint64_t)c->head_dim,
                                           .window = is_causal(c)};
        params = shape.params;
    }
    return dw__variant_of(context, kernel, params, variant);
}

/* Tiles have up to 256 x 256 elements. Rows, columns and the contraction all end within a tile, and there are so few
 * SMs that each processes several tiles. */
dw__gemm_case dw__gemm_cutlass_case_of(const dw__variant *variant) {
    enum { ROWS = 2 * 256 + 45, MISSING = 32, STEPS = 3, FEW = 4 };
    static const int64_t group_rows[] = {200, 0, 3, 141};
    const dw_cutlass_kernel *kernel = variant->kernel->provided;
    dw__gemm_case made = {
        .call = {.dtype = DW_BF16,
                 .output = DW_BF16,
                 .m = ROWS,
                 .n = 256 + 5 * COLUMNS,
                 .k = STEPS * dw__gemm_step(kernel->scheme) - MISSING,
                 .alpha = 0.75f,
                 .quantized = kernel->scheme != DW_SCHEME_BF16,
                 .scheme_a = kernel->scheme,
                 .scheme_b = kernel->scheme},
        .residual = variant->params != 0,
        .sm_count = FEW,
        .groups = 1,
    };
    if (kernel->kind != DW_CUTLASS_GROUPED) return made;
    made.call.m = 0;
    made.groups = DW_COUNT(group_rows);
    for (int g = 0; g < made.groups; g++) made.call.m += made.rows[g] = group_rows[g];
    return made;
}

static void seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                    dw__kernel_seconds *result) {
    const bool supported = kernel->provided && kernel->supports(kernel, call, gpu) == DW_OK;
    snprintf(result->from, sizeof result->from, "used only if a call names it%s%s%s",
             supported ? ": kernel = \"" : "", supported ? kernel->name : "",
             supported ? "\"" : "; not measured");
}

#define CUTLASS                                                                                    \
    .backend = "cutlass", .asked_for = true, .described = "CUTLASS, an optional library",          \
    .seconds = seconds, .workspace_bytes = workspace_bytes, .prepare = prepare, .enqueue = enqueue
#define CUTLASS_GEMM                                                                               \
    CUTLASS, .needs = "16-byte rows", .first_use = &dw__gemm_first_use,                            \
             .tolerance = "sums in F32, then D's rounding, against FP64"
const dw__kernel dw__cutlass_gemm = {
    CUTLASS_GEMM,
    .kind = DW__CALL_GEMM,
    .operation = "gemm",
    .supports = supports_gemm,
};
const dw__kernel dw__cutlass_grouped_gemm = {
    CUTLASS_GEMM,
    .kind = DW__CALL_GROUPED_GEMM,
    .operation = "grouped GEMM",
    .supports = supports_groups,
};
const dw__kernel dw__cutlass_attention = {
    CUTLASS,
    .kind = DW__CALL_ATTENTION_FORWARD,
    .operation = "attention forward",
    .needs = "head dimension 64 or 128; 16-byte rows",
    .supports = supports_attention,
    .first_use = &dw__attention_first_use,
    .tolerance = "twice the error of rounding P and O to the type, against FP64",
};
