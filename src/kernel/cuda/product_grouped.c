/* Products of groups, as of a mixture of experts: the public calls. By Deepwell's own kernels one group is a product
 * after another; CUTLASS's takes all of them. */
#include "kernel/cuda/product.h"
#include <string.h>

typedef struct job {
    dw_grouped_product call;
    bool empty;
    const dw__cutlass *library;
    const dw_cutlass_kernel *kernel; /* of the library's; NULL: Deepwell's own */
    const dw__context *context;      /* where there is one of them */
} job;

static void *pointer_of(void *const *all, int32_t group) { return all ? all[group] : NULL; }

/* One group as a product by Deepwell's own. */
static dw_product product_of(const dw_grouped_product *c, int32_t group) {
    return (dw_product){
        .size = sizeof(dw_product),
        .device = c->device,
        .dtype = c->dtype,
        .output = c->dtype,
        .m = c->m[group],
        .n = c->n,
        .k = c->k,
        .alpha = c->alpha,
        .a = {pointer_of(c->a, group), c->stride_a},
        .b = {pointer_of(c->b, group), c->stride_b},
        .d = {pointer_of(c->d, group), c->stride_d},
        .stream = c->stream,
    };
}

static dw_status name_group(dw_status status, int32_t group) {
    return status == DW_OK ? DW_OK : dw__fail_prefix(status, "group %d", (int)group);
}
static dw_status name_call(dw_status status, const dw_grouped_product *c) {
    if (status == DW_OK) return DW_OK;
    return dw__fail_prefix(status, "grouped product (groups %d, n %lld, k %lld, %s)",
                           (int)c->groups, (long long)c->n, (long long)c->k,
                           dw_dtype_name(c->dtype));
}

/* ---- checks ---------------------------------------------------------------------------------------- */

static dw_status check(job *j, bool launching) {
    const dw_grouped_product *c = &j->call;
    j->empty = true;
    if (c->groups < 0)
        return dw__fail(DW_SHAPE, "grouped product: groups is %d; expected 0 or more",
                        (int)c->groups);
    if (c->groups == 0) return DW_OK;
    if (!c->m || (launching && (!c->a || !c->b || !c->d)))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "grouped product: %s is NULL; expected an array of %d in the host's memory",
                        !c->m   ? "m"
                        : !c->a ? "a"
                        : !c->b ? "b"
                                : "d",
                        (int)c->groups);
    for (int32_t g = 0; g < c->groups; g++) {
        const dw_product one = product_of(c, g);
        DW_RETURN_IF_FAILED(name_group(dw__product_check(&one, launching), g));
        if (!dw__product_is_empty(&one)) j->empty = false;
    }
    return DW_OK;
}

static dw_status find_kernel(job *j) {
    static const char own[] = "sm100_gemm";
    const char *name = j->call.kernel;
    if (!name || strcmp(name, own) == 0) return DW_OK;
    DW_RETURN_IF_FAILED(dw__cutlass_named(DW_CUTLASS_GROUPED, name, own, &j->library, &j->kernel));
    return j->empty ? DW_OK : dw__grouped_cutlass_takes(&j->call, j->kernel);
}

static dw_status prepare(const dw_grouped_product *given, bool launching, job *j) {
    *j = (job){0};
    if (!given) return dw__fail(DW_INVALID_ARGUMENT, "grouped product: the call is NULL");
    if (given->size != sizeof *given)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "grouped product: size is %u; expected %zu: set it to "
                        "sizeof(dw_grouped_product), and build against the header of this version",
                        (unsigned)given->size, sizeof *given);
    j->call = *given;
    DW_RETURN_IF_FAILED(name_call(check(j, launching), given));
    DW_RETURN_IF_FAILED(name_call(find_kernel(j), given));
    return dw__product_context(given->device, j->kernel, &j->context);
}

/* ---- running ---------------------------------------------------------------------------------------- */

/* `each` for groups that have rows. */
static dw_status for_each(const job *j, dw_status (*each)(const job *j, const dw_product *one)) {
    for (int32_t g = 0; g < j->call.groups; g++) {
        const dw_product one = product_of(&j->call, g);
        if (!dw__product_is_empty(&one)) DW_RETURN_IF_FAILED(name_group(each(j, &one), g));
    }
    return DW_OK;
}
static dw_status run_own(const job *j, const dw_product *one) {
    (void)j;
    return dw_product_run(one);
}
static dw_status run_reference(const job *j, const dw_product *one) {
    return dw__product_run_reference(one, j->context);
}

static dw_status run(const job *j) {
    const dw_grouped_product *c = &j->call;
    const char *reason;
    size_t needed;
    if (!j->kernel) return for_each(j, run_own);
    DW_RETURN_IF_FAILED(dw__grouped_cutlass_bytes(c, j->library, j->kernel, &needed));
    DW_RETURN_IF_FAILED(dw__cutlass_workspace(j->kernel, c->workspace, c->workspace_bytes, needed));
    DW_RETURN_IF_FAILED(
        dw__product_cutlass_first_use(j->context, j->library, j->kernel, false, &reason));
    if (reason) return for_each(j, run_reference);
    return dw__grouped_cutlass_launch(c, j->library, j->kernel);
}

dw_status dw_grouped_product_run(const dw_grouped_product *given) {
    job j;
    DW_RETURN_IF_FAILED(prepare(given, true, &j));
    return j.empty ? DW_OK : name_call(run(&j), given);
}

/* ---- asking ----------------------------------------------------------------------------------------- */

static dw_status ask_own(const job *j, const dw_product *one) {
    (void)j;
    return dw_product_supported(one);
}

static dw_status ask(const job *j) {
    const char *reason;
    size_t bytes;
    if (!j->kernel) return for_each(j, ask_own);
    DW_RETURN_IF_FAILED(dw__grouped_cutlass_bytes(&j->call, j->library, j->kernel, &bytes));
    DW_RETURN_IF_FAILED(
        dw__product_cutlass_first_use(j->context, j->library, j->kernel, false, &reason));
    return reason ? dw__fail(DW_UNSUPPORTED, "%s", reason) : DW_OK;
}

dw_status dw_grouped_product_supported(const dw_grouped_product *given) {
    job j;
    DW_RETURN_IF_FAILED(prepare(given, false, &j));
    return j.empty ? DW_OK : name_call(ask(&j), given);
}

dw_status dw_grouped_product_workspace(const dw_grouped_product *given, size_t *bytes) {
    job j;
    if (!bytes) return dw__fail(DW_INVALID_ARGUMENT, "grouped product: bytes is NULL");
    *bytes = 0;
    DW_RETURN_IF_FAILED(prepare(given, false, &j));
    if (j.empty || !j.kernel) return DW_OK;
    return name_call(dw__grouped_cutlass_bytes(&j.call, j.library, j.kernel, bytes), given);
}
