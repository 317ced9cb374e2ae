/* GEMM and grouped GEMM with CUTLASS's kernels (docs/cutlass.md). */
#include "kernel/cuda/gpu_gemm.h"
#include <stdio.h>

/* ---- supported calls -------------------------------------------------------------------------------- */

/* k is a multiple of it: rows of 16 bytes. */
static int multiple_of_k(dw_scheme scheme) {
    return 16 * 8 / dw_dtype_bits(dw_scheme_describe(scheme)->element);
}
enum { COLUMNS = 8 }; /* n is a multiple of it */

static dw_status check_size(const dw_cutlass_kernel *kernel, const char *name, int64_t size,
                            int multiple) {
    if (size > 0 && size % multiple == 0) return DW_OK;
    return dw__fail(DW_UNSUPPORTED, "%s is %lld; %s expects a multiple of %d", name,
                    (long long)size, kernel->name, multiple);
}

static dw_status check_features(const dw_gemm *c, const dw_cutlass_kernel *kernel) {
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
    DW_RETURN_IF_FAILED(check_size(kernel, "n", c->n, COLUMNS));
    return check_size(kernel, "k", c->k, multiple_of_k(kernel->scheme));
}

static dw_status supports_gemm(const dw__kernel *entry, const void *call,
                               const dw__gpu_target *gpu) {
    const dw_cutlass_kernel *kernel = entry->provided;
    DW_RETURN_IF_FAILED(dw__cutlass_is_for(kernel, gpu));
    const dw_status status = check_features(call, kernel);
    return dw__gemm_scheme_a(call) == kernel->scheme ? status : DW_TYPE;
}

static dw_status supports_groups(const dw__kernel *entry, const void *call,
                                 const dw__gpu_target *gpu) {
    const dw_cutlass_kernel *kernel = entry->provided;
    const dw_grouped_gemm *c = call;
    DW_RETURN_IF_FAILED(dw__cutlass_is_for(kernel, gpu));
    if (c->dtype != DW_BF16) return dw__fail(DW_UNSUPPORTED, "%s makes bf16 of bf16", kernel->name);
    DW_RETURN_IF_FAILED(check_size(kernel, "n", c->n, COLUMNS));
    return check_size(kernel, "k", c->k, multiple_of_k(kernel->scheme));
}

/* ---- calls in the library's form -------------------------------------------------------------------- */

/* Returns the stride to pass. With a single row the caller's stride is not used. */
static int64_t stride_of(const dw_matrix *x, int64_t rows, int64_t columns) {
    return rows > 1 ? x->stride : columns;
}

static dw_cutlass_gemm translate(const dw_gemm *c, const dw_cutlass_kernel *kernel, int sm_count) {
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

/* `call` is the structure of the kernel's kind. */
static dw_status ask_bytes(const dw_cutlass_kernel *kernel, const void *call, size_t *bytes) {
    *bytes = 0;
    return dw__cutlass_status(kernel, kernel->workspace_bytes(call, bytes));
}

static dw_status gemm_bytes(const dw__kernel *kernel, const void *call, const dw__context *context,
                            size_t *bytes) {
    const dw_cutlass_gemm made = translate(call, kernel->provided, context->sm_count);
    return ask_bytes(kernel->provided, &made, bytes);
}
static dw_status groups_bytes(const dw__kernel *kernel, const void *call,
                              const dw__context *context, size_t *bytes) {
    const dw_cutlass_grouped made = translate_groups(call, context->sm_count);
    return ask_bytes(kernel->provided, &made, bytes);
}

static dw_status enqueue_gemm(const void *call, const dw__context *context,
                              const dw__variant *variant) {
    const dw_gemm *c = call;
    const dw_cutlass_kernel *kernel = variant->kernel->provided;
    const dw_cutlass_gemm made = translate(c, kernel, context->sm_count);
    return dw__cutlass_status(kernel, kernel->launch(&made, c->workspace, c->stream));
}
static dw_status enqueue_groups(const void *call, const dw__context *context,
                                const dw__variant *variant) {
    const dw_grouped_gemm *c = call;
    const dw_cutlass_kernel *kernel = variant->kernel->provided;
    const dw_cutlass_grouped made = translate_groups(c, context->sm_count);
    return dw__cutlass_status(kernel, kernel->launch(&made, c->workspace, c->stream));
}

/* ---- kernels ------------------------------------------------------------------------------------------ */

/* CUTLASS's library loads its own kernels. A variant here only stands for a first-use check, with or without a
 * residual. */
static dw_status prepare_gemm(const dw__kernel *kernel, const void *call,
                              const dw__context *context, const dw__variant **variant) {
    const dw_gemm *c = call;
    return dw__variant_of(context, kernel, c->residual.data != NULL, variant);
}
static dw_status prepare_groups(const dw__kernel *kernel, const void *call,
                                const dw__context *context, const dw__variant **variant) {
    (void)call;
    return dw__variant_of(context, kernel, 0, variant);
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
        .has_reference = kernel->scheme == DW_SCHEME_BF16,
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
    const char *how = "used only if a call names it";
    if (kernel->provided && supports_gemm(kernel, call, gpu) == DW_OK)
        snprintf(result->from, sizeof result->from, "%s: dw_gemm.kernel = \"%s\"", how,
                 kernel->name);
    else
        snprintf(result->from, sizeof result->from, "%s", how);
}

const dw__kernel dw__cutlass_gemm = {
    .backend = "cutlass",
    .asked_for = true,
    .described = "CUTLASS, an optional library",
    .seconds = seconds,
    .kind = DW__CALL_GEMM,
    .operation = "gemm",
    .needs = "16-byte rows",
    .supports = supports_gemm,
    .workspace_bytes = gemm_bytes,
    .prepare = prepare_gemm,
    .enqueue = enqueue_gemm,
    .first_use = &dw__gemm_first_use,
    .tolerance = "sums in F32, then D's rounding, against FP64",
};
const dw__kernel dw__cutlass_grouped_gemm = {
    .backend = "cutlass",
    .asked_for = true,
    .kind = DW__CALL_GROUPED_GEMM,
    .operation = "grouped GEMM",
    .needs = "16-byte rows",
    .supports = supports_groups,
    .workspace_bytes = groups_bytes,
    .prepare = prepare_groups,
    .enqueue = enqueue_groups,
    .first_use = &dw__gemm_first_use,
    .tolerance = "sums in F32, then D's rounding, against FP64",
};
