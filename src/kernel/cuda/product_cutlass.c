/* Matrix products by CUTLASS's kernels (docs/cutlass.md): which calls they take, how they are told, and what
 * was found at their first use. */
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/product.h"
#include <pthread.h>
#include <stdio.h>

/* ---- calls they take ------------------------------------------------------------------------------- */

/* Of what a type of kernel multiplies. */
static const struct needs {
    dw__product_kind kind;
    dw_scheme scheme;
    const char *operands;
    int k; /* a multiple of it: rows of 16 bytes */
} needs[] = {
    [DW_CUTLASS_BF16] = {.kind = DW__PRODUCT_DENSE, .operands = "BF16", .k = 8},
    [DW_CUTLASS_MXFP8] = {DW__PRODUCT_MXFP8, DW_SCHEME_MXFP8_E4M3, "MXFP8 (E4M3)", 16},
    [DW_CUTLASS_NVFP4] = {DW__PRODUCT_NVFP4, DW_SCHEME_NVFP4, "NVFP4", 32},
};
enum { COLUMNS = 8 }; /* n is a multiple of it */

static dw_status check_size(const dw_cutlass_kernel *kernel, const char *name, int64_t size,
                            int multiple) {
    if (size > 0 && size % multiple == 0) return DW_OK;
    return dw__fail(DW_UNSUPPORTED, "%s is %lld; %s expects a multiple of %d", name,
                    (long long)size, kernel->name, multiple);
}

dw_status dw__product_cutlass_takes(const dw_product *c, const dw_cutlass_kernel *kernel) {
    const struct needs *need = &needs[kernel->type];
    const bool operands =
        dw__product_kind_of(c) == need->kind &&
        (!c->quantized ? c->dtype == DW_BF16
                       : c->scheme_a == need->scheme && c->scheme_b == need->scheme);
    if (!operands || c->output != DW_BF16 || c->quantized_d)
        return dw__fail(DW_UNSUPPORTED, "%s makes BF16 of %s", kernel->name, need->operands);
    if (c->bias || c->activation != DW_ACTIVATION_NONE)
        return dw__fail(DW_UNSUPPORTED,
                        "%s adds a residual, and has no bias and no activation; Deepwell's own has",
                        kernel->name);
    DW_RETURN_IF_FAILED(check_size(kernel, "n", c->n, COLUMNS));
    return check_size(kernel, "k", c->k, need->k);
}

dw_status dw__grouped_cutlass_takes(const dw_grouped_product *c, const dw_cutlass_kernel *kernel) {
    if (c->dtype != DW_BF16) return dw__fail(DW_UNSUPPORTED, "%s makes BF16 of BF16", kernel->name);
    DW_RETURN_IF_FAILED(check_size(kernel, "n", c->n, COLUMNS));
    return check_size(kernel, "k", c->k, needs[DW_CUTLASS_BF16].k);
}

/* ---- calls as they are told ------------------------------------------------------------------------ */

/* The caller's is not read where there is one row. */
static int64_t stride_of(const dw_matrix *x, int64_t rows, int64_t columns) {
    return rows > 1 ? x->stride : columns;
}

static dw_cutlass_product told(const dw_product *c, const dw_cutlass_kernel *kernel,
                               int processors) {
    const int64_t each =
                      kernel->type == DW_CUTLASS_NVFP4 ? 2 : 1, /* elements in a unit of stride */
        units = dw__product_row_units(c);
    return (dw_cutlass_product){
        .size_of = sizeof(dw_cutlass_product),
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
        .processors = processors,
        .a_factor = c->quantized ? c->factor_a : NULL,
        .b_factor = c->quantized ? c->factor_b : NULL,
    };
}

static dw_cutlass_grouped told_groups(const dw_grouped_product *c, int processors) {
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
        .processors = processors,
    };
}

static dw_status ask_bytes(const void *call, const dw__cutlass *library,
                           const dw_cutlass_kernel *kernel, size_t *bytes) {
    *bytes = 0;
    return dw__cutlass_status(library, kernel, kernel->workspace_bytes(call, bytes));
}
dw_status dw__product_cutlass_bytes(const dw_product *call, const dw__cutlass *library,
                                    const dw_cutlass_kernel *kernel, size_t *bytes) {
    const dw_cutlass_product product = told(call, kernel, 0);
    return ask_bytes(&product, library, kernel, bytes);
}
dw_status dw__grouped_cutlass_bytes(const dw_grouped_product *call, const dw__cutlass *library,
                                    const dw_cutlass_kernel *kernel, size_t *bytes) {
    const dw_cutlass_grouped groups = told_groups(call, 0);
    return ask_bytes(&groups, library, kernel, bytes);
}

dw_status dw__product_cutlass_launch(const dw_product *call, const dw__cutlass *library,
                                     const dw_cutlass_kernel *kernel) {
    const dw_cutlass_product product = told(call, kernel, 0);
    return dw__cutlass_status(library, kernel,
                              kernel->launch(&product, call->workspace, call->stream));
}
dw_status dw__grouped_cutlass_launch(const dw_grouped_product *call, const dw__cutlass *library,
                                     const dw_cutlass_kernel *kernel) {
    const dw_cutlass_grouped groups = told_groups(call, 0);
    return dw__cutlass_status(library, kernel,
                              kernel->launch(&groups, call->workspace, call->stream));
}

/* ---- first uses ------------------------------------------------------------------------------------- */

/* Tiles are of up to 256 x 256. Rows, columns and the contraction end within one, and blocks that stay are few
 * enough to take several. */
enum { ROWS = 2 * 256 + 45, MISSING = 32, STEPS = 3, FEW = 4, GROUPS = 4 };
static const int64_t group_rows[GROUPS] = {200, 0, 3, 141};

typedef struct subject {
    dw__product_subject general;
    const dw__cutlass *library;
    const dw_cutlass_kernel *kernel;
} subject;

static dw_status launch_few(const dw__product_subject *general, const dw_product *call,
                            const dw__context *context) {
    const subject *s = general->kernel;
    const dw_cutlass_product product = told(call, s->kernel, FEW);
    (void)context;
    return dw__cutlass_status(s->library, s->kernel,
                              s->kernel->launch(&product, call->workspace, call->stream));
}

/* The case's rows are groups that follow one another. */
static dw_grouped_product groups_of(const dw_product *c) {
    return (dw_grouped_product){.alpha = c->alpha,
                                .groups = GROUPS,
                                .n = c->n,
                                .k = c->k,
                                .m = group_rows,
                                .stride_a = c->a.stride,
                                .stride_b = c->b.stride,
                                .stride_d = c->d.stride};
}

static dw_status launch_groups(const dw__product_subject *general, const dw_product *call,
                               const dw__context *context) {
    const subject *s = general->kernel;
    dw_grouped_product groups = groups_of(call);
    void *a[GROUPS], *b[GROUPS], *d[GROUPS];
    int64_t before = 0;
    for (int g = 0; g < GROUPS; before += group_rows[g++]) {
        a[g] = (uint16_t *)call->a.data + before * call->a.stride;
        b[g] = (uint16_t *)call->b.data + g * call->n * call->b.stride;
        d[g] = (uint16_t *)call->d.data + before * call->d.stride;
    }
    groups.a = a, groups.b = b, groups.d = d;
    const dw_cutlass_grouped made = told_groups(&groups, FEW);
    (void)context;
    return dw__cutlass_status(s->library, s->kernel,
                              s->kernel->launch(&made, call->workspace, call->stream));
}

static dw_status compare(const dw__context *context, const dw__cutlass *library,
                         const dw_cutlass_kernel *kernel, bool residual, char *reason) {
    const struct needs *need = &needs[kernel->type];
    const bool grouped = kernel->kind == DW_CUTLASS_GROUPED;
    subject s = {.library = library, .kernel = kernel};
    s.general = (dw__product_subject){
        .name = kernel->name,
        .has_reference = kernel->type == DW_CUTLASS_BF16,
        .call = {.dtype = DW_BF16,
                 .output = DW_BF16,
                 .m = ROWS,
                 .n = 256 + 5 * COLUMNS,
                 .k = STEPS * dw__product_step(need->kind) - MISSING,
                 .alpha = 0.75f,
                 .quantized = need->kind != DW__PRODUCT_DENSE,
                 .scheme_a = need->scheme,
                 .scheme_b = need->scheme},
        .residual = residual,
        .groups = grouped ? GROUPS : 1,
        .kernel = &s,
        .launch = grouped ? launch_groups : launch_few,
    };
    if (grouped) {
        s.general.call.m = 0;
        for (int g = 0; g < GROUPS; g++) s.general.call.m += s.general.rows[g] = group_rows[g];
        const dw_grouped_product groups = groups_of(&s.general.call);
        const dw_cutlass_grouped made = told_groups(&groups, FEW);
        DW_RETURN_IF_FAILED(ask_bytes(&made, library, kernel, &s.general.workspace_bytes));
    } else {
        const dw_cutlass_product product = told(&s.general.call, kernel, FEW);
        DW_RETURN_IF_FAILED(ask_bytes(&product, library, kernel, &s.general.workspace_bytes));
    }
    return dw__product_guard(context, &s.general, reason);
}

/* Of each, the reason why it is not used, or "". Kept for the life of the process. */
typedef char *_Atomic slot;
static slot compared[DW__CONTEXTS][DW__CUTLASS_KERNELS][2]; /* by residual */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;    /* of filling */

static dw_status fill(const dw__context *context, const dw__cutlass *library,
                      const dw_cutlass_kernel *kernel, bool residual, slot *at,
                      const char **reason) {
    *reason = atomic_load_explicit(at, memory_order_acquire); /* by another thread, meanwhile */
    if (*reason) return DW_OK;
    char *made = dw__malloc(DW__PRODUCT_REASON);
    if (!made) return dw__fail_memory("what a kernel's comparison found", DW__PRODUCT_REASON);
    dw_status status = compare(context, library, kernel, residual, made);
    if (status != DW_OK) {
        dw__free(made);
        return status;
    }
    if (made[0]) dw__log(DW_LOG_WARNING, "%s", made);
    atomic_store_explicit(at, made, memory_order_release);
    *reason = made;
    return DW_OK;
}

dw_status dw__product_cutlass_first_use(const dw__context *context, const dw__cutlass *library,
                                        const dw_cutlass_kernel *kernel, bool residual,
                                        const char **reason) {
    slot *at = &compared[context->index][kernel - library->kernels][residual];
    dw_status status = DW_OK;
    *reason = NULL;
    if (!dw__first_use_is_on()) return DW_OK;
    *reason = atomic_load_explicit(at, memory_order_acquire);
    if (!*reason) {
        pthread_mutex_lock(&lock);
        status = fill(context, library, kernel, residual, at, reason);
        pthread_mutex_unlock(&lock);
    }
    if (*reason && !**reason) *reason = NULL;
    return status;
}
