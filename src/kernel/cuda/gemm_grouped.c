/* Grouped GEMM, as in a mixture of experts: the public calls. Deepwell's kernel runs one GEMM per group; CUTLASS's
 * kernel runs all groups in one launch. */
#include "kernel/cuda/gpu_gemm.h"
#include "kernel/cuda/gpu_kernels.h"
#include <string.h>

typedef struct job {
    dw_grouped_gemm call;
    bool empty;
    const dw__kernel *kernel; /* dw__sm100_gemm, or one of CUTLASS's kernels for groups */
    const dw__context *context;
} job;

static void *pointer_of(void *const *all, int32_t group) { return all ? all[group] : NULL; }

/* Describes one group as a GEMM for Deepwell's kernel. */
static dw_gemm gemm_of(const dw_grouped_gemm *c, int32_t group) {
    return (dw_gemm){
        .struct_size = sizeof(dw_gemm),
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
static dw_status name_call(dw_status status, const dw_grouped_gemm *c) {
    if (status == DW_OK) return DW_OK;
    return dw__fail_prefix(status, "grouped GEMM (groups %d, n %lld, k %lld, %s)", (int)c->groups,
                           (long long)c->n, (long long)c->k, dw_dtype_name(c->dtype));
}

/* ---- checks ---------------------------------------------------------------------------------------- */

static dw_status check(job *j, bool launching) {
    const dw_grouped_gemm *c = &j->call;
    j->empty = true;
    if (c->groups < 0)
        return dw__fail(DW_SHAPE, "grouped GEMM: groups is %d; expected 0 or more", (int)c->groups);
    if (c->groups == 0) return DW_OK;
    if (!c->m || (launching && (!c->a || !c->b || !c->d)))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "grouped GEMM: %s is NULL; expected an array of %d in the host's memory",
                        !c->m   ? "m"
                        : !c->a ? "a"
                        : !c->b ? "b"
                                : "d",
                        (int)c->groups);
    for (int32_t g = 0; g < c->groups; g++) {
        const dw_gemm one = gemm_of(c, g);
        DW_RETURN_IF_FAILED(name_group(dw__gemm_check(&one, launching), g));
        if (!dw__gemm_is_empty(&one)) j->empty = false;
    }
    return DW_OK;
}

static dw_status find_kernel(job *j) {
    const char *name = j->call.kernel;
    j->kernel = &dw__sm100_gemm;
    if (!name || strcmp(name, j->kernel->name) == 0) return DW_OK;
    DW_RETURN_IF_FAILED(
        dw__gpu_kernel_provided(DW__CALL_GROUPED_GEMM, name, j->kernel->name, &j->kernel));
    return j->empty ? DW_OK : j->kernel->supports(j->kernel, &j->call, NULL);
}

static dw_status make_job(const dw_grouped_gemm *given, bool launching, job *j) {
    static const dw__struct known = {"dw_grouped_gemm", sizeof *given, {0}};
    *j = (job){0};
    DW_RETURN_IF_FAILED(dw__struct_read(&known, given, &j->call));
    DW_RETURN_IF_FAILED(name_call(check(j, launching), given));
    DW_RETURN_IF_FAILED(name_call(find_kernel(j), given));
    return dw__gemm_context(given->device, j->kernel, &j->context);
}

/* ---- running ---------------------------------------------------------------------------------------- */

/* Calls `each` for every group that has rows. */
static dw_status for_each(const job *j, dw_status (*each)(const job *j, const dw_gemm *one)) {
    for (int32_t g = 0; g < j->call.groups; g++) {
        const dw_gemm one = gemm_of(&j->call, g);
        if (!dw__gemm_is_empty(&one)) DW_RETURN_IF_FAILED(name_group(each(j, &one), g));
    }
    return DW_OK;
}
static dw_status run_own(const job *j, const dw_gemm *one) {
    (void)j;
    return dw_gemm_run(one);
}
static dw_status run_reference(const job *j, const dw_gemm *one) {
    return dw__gpu_run(&dw__reference_gemm, NULL, one, j->context);
}

static dw_status run(const job *j) {
    const dw_grouped_gemm *c = &j->call;
    const dw__kernel *kernel = j->kernel;
    const dw__variant *variant;
    size_t needed;
    if (!kernel->provided) return for_each(j, run_own);
    DW_RETURN_IF_FAILED(kernel->workspace_bytes(kernel, c, j->context, &needed));
    DW_RETURN_IF_FAILED(
        dw__cutlass_workspace(kernel->provided, c->workspace, c->workspace_bytes, needed));
    DW_RETURN_IF_FAILED(kernel->prepare(kernel, c, j->context, &variant));
    if (variant->disabled) return for_each(j, run_reference);
    return kernel->enqueue(c, j->context, variant);
}

dw_status dw_grouped_gemm_run(const dw_grouped_gemm *given) {
    job j;
    DW_RETURN_IF_FAILED(make_job(given, true, &j));
    return j.empty ? DW_OK : name_call(run(&j), given);
}

/* ---- queries ---------------------------------------------------------------------------------------- */

static dw_status ask_own(const job *j, const dw_gemm *one) {
    (void)j;
    return dw_gemm_supported(one);
}

static dw_status ask(const job *j) {
    size_t bytes;
    if (!j->kernel->provided) return for_each(j, ask_own);
    DW_RETURN_IF_FAILED(j->kernel->workspace_bytes(j->kernel, &j->call, j->context, &bytes));
    return dw__gpu_kernel_runs(j->kernel, &j->call, j->context);
}

dw_status dw_grouped_gemm_supported(const dw_grouped_gemm *given) {
    job j;
    DW_RETURN_IF_FAILED(make_job(given, false, &j));
    return j.empty ? DW_OK : name_call(ask(&j), given);
}

dw_status dw_grouped_gemm_workspace(const dw_grouped_gemm *given, size_t *bytes) {
    job j;
    if (!bytes) return dw__fail(DW_INVALID_ARGUMENT, "grouped GEMM: bytes is NULL");
    *bytes = 0;
    DW_RETURN_IF_FAILED(make_job(given, false, &j));
    if (j.empty || !j.kernel->workspace_bytes) return DW_OK;
    return name_call(j.kernel->workspace_bytes(j.kernel, &j.call, j.context, bytes), given);
}
