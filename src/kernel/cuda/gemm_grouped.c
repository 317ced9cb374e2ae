/* Grouped GEMM, as in a mixture of experts: the public calls. Deepwell's kernel runs one GEMM per group; CUTLASS's
 * kernel runs all groups in one launch. */
#include "kernel/cuda/gpu_gemm.h"
#include <stdio.h>

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
static const char *describe(const void *call, char *text, size_t bytes) {
    const dw_grouped_gemm *c = call;
    snprintf(text, bytes, "groups %d, n %lld, k %lld, %s", (int)c->groups, (long long)c->n,
             (long long)c->k, dw_dtype_name(c->dtype));
    return text;
}

/* ---- checks ---------------------------------------------------------------------------------------- */

static dw_status check(const dw_grouped_gemm *c, bool launching, bool *empty) {
    *empty = true;
    if (c->groups < 0)
        return dw__fail(DW_SHAPE, "groups is %d; expected 0 or more", (int)c->groups);
    if (c->groups == 0) return DW_OK;
    if (!c->m || (launching && (!c->a || !c->b || !c->d)))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "%s is NULL; expected an array of %d in the host's memory",
                        !c->m   ? "m"
                        : !c->a ? "a"
                        : !c->b ? "b"
                                : "d",
                        (int)c->groups);
    for (int32_t g = 0; g < c->groups; g++) {
        const dw_gemm one = gemm_of(c, g);
        DW_RETURN_IF_FAILED(name_group(dw__gemm_check(&one, launching), g));
        if (!dw__gemm_is_empty(&one)) *empty = false;
    }
    return DW_OK;
}

/* ---- group after group ----------------------------------------------------------------------------- */

/* Prepares `kernel`, which is of one GEMM, for every group that has rows. */
static dw_status prepare_each(const dw__kernel *kernel, const dw_grouped_gemm *c,
                              const dw__context *context, const dw__variant **variant) {
    for (int32_t g = 0; g < c->groups; g++) {
        const dw_gemm one = gemm_of(c, g);
        if (dw__gemm_is_empty(&one)) continue;
        DW_RETURN_IF_FAILED(name_group(kernel->prepare(kernel, &one, context, variant), g));
        if ((*variant)->disabled) return DW_OK;
    }
    return DW_OK;
}

static dw_status enqueue_each(const void *call, const dw__context *context,
                              const dw__variant *variant) {
    const dw_grouped_gemm *c = call;
    for (int32_t g = 0; g < c->groups; g++) {
        const dw_gemm one = gemm_of(c, g);
        if (dw__gemm_is_empty(&one)) continue;
        DW_RETURN_IF_FAILED(name_group(dw__gpu_run(variant->kernel, NULL, &one, context), g));
    }
    return DW_OK;
}

static dw_status prepare_own(const dw__kernel *kernel, const void *call, const dw__context *context,
                             const dw__variant **variant) {
    (void)kernel;
    return prepare_each(&dw__sm100_gemm, call, context, variant);
}

static dw_status prepare_reference(const dw__kernel *kernel, const void *call,
                                   const dw__context *context, const dw__variant **variant) {
    (void)kernel;
    return prepare_each(&dw__reference_gemm, call, context, variant);
}

static const dw__kernel own = {
    .name = "sm100_gemm", .prepare = prepare_own, .enqueue = enqueue_each};
static const dw__kernel reference = {
    .name = "reference_gemm", .prepare = prepare_reference, .enqueue = enqueue_each};

/* ---- the public calls ------------------------------------------------------------------------------ */

static dw_status choose(const void *call, int capability, const dw__kernel **kernel) {
    static const dw_gemm plain;
    (void)call;
    DW_RETURN_IF_FAILED(dw__gemm_choose(&plain, capability, kernel));
    *kernel = &own;
    return DW_OK;
}

static const dw__gpu_family family = {
    .title = "grouped GEMM",
    .kind = DW__CALL_GROUPED_GEMM,
    .own = {&own},
    .choose = choose,
    .describe = describe,
    .workspace_query = "dw_grouped_gemm_workspace",
};

static dw_status make_job(const dw_grouped_gemm *given, bool launching, dw_grouped_gemm *call,
                          dw__gpu_job *j) {
    static const dw__struct known = {"dw_grouped_gemm", sizeof *given, {0}};
    DW_RETURN_IF_FAILED(dw__struct_read(&known, given, call));
    *j = (dw__gpu_job){.call = call,
                       .device = call->device,
                       .named = call->kernel,
                       .workspace = call->workspace,
                       .workspace_bytes = call->workspace_bytes,
                       .reference = &reference};
    DW_RETURN_IF_FAILED(dw__job_name(&family, j, check(call, launching, &j->empty)));
    return dw__job_find(&family, j);
}

dw_status dw_grouped_gemm_run(const dw_grouped_gemm *given) {
    dw_grouped_gemm call;
    dw__gpu_job j;
    DW_RETURN_IF_FAILED(make_job(given, true, &call, &j));
    return j.empty ? DW_OK : dw__job_run(&family, &j);
}

dw_status dw_grouped_gemm_supported(const dw_grouped_gemm *given) {
    dw_grouped_gemm call;
    dw__gpu_job j;
    DW_RETURN_IF_FAILED(make_job(given, false, &call, &j));
    return dw__job_would_run(&family, &j);
}

dw_status dw_grouped_gemm_workspace(const dw_grouped_gemm *given, size_t *bytes) {
    dw_grouped_gemm call;
    dw__gpu_job j;
    if (!bytes) return dw__fail(DW_INVALID_ARGUMENT, "grouped GEMM: bytes is NULL");
    *bytes = 0;
    DW_RETURN_IF_FAILED(make_job(given, false, &call, &j));
    return dw__job_workspace(&family, &j, bytes);
}
