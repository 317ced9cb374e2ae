/* The path of a public call from its structure to the launch: checks of members, the kernel that the call names or that
 * Deepwell chooses for the GPU, the workspace, the launch. Nothing here allocates or locks; messages are made only for
 * failures. */
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/library/cutlass.h"
#include <string.h>

/* ---- members ----------------------------------------------------------------------------------------- */

dw_status dw__check_sizes(const char *title, const dw__size_range *sizes, size_t count) {
    for (const dw__size_range *s = sizes; s < sizes + count; s++)
        if (s->value < s->least || s->value > s->most)
            return dw__fail(DW_SHAPE, "%s: %s is %lld; expected %lld to %lld", title, s->name,
                            (long long)s->value, (long long)s->least, (long long)s->most);
    return DW_OK;
}

dw_status dw__check_addresses(const char *title, const dw__address *addresses, size_t count) {
    for (const dw__address *a = addresses; a < addresses + count; a++) {
        if (a->needed && !a->at)
            return dw__fail(DW_INVALID_ARGUMENT, "%s: %s is NULL; expected device memory", title,
                            a->name);
        if ((uintptr_t)a->at % a->alignment != 0)
            return dw__fail(DW_INVALID_ARGUMENT,
                            "%s: %s lies at %p; expected a multiple of %zu bytes", title, a->name,
                            a->at, a->alignment);
    }
    return DW_OK;
}

dw_status dw__check_tensor(const char *title, const char *name, const void *at, bool needed) {
    const dw__address present = {name, at, 1, needed};
    DW_RETURN_IF_FAILED(dw__check_addresses(title, &present, 1));
    if ((uintptr_t)at % 16 == 0) return DW_OK;
    return dw__fail(DW_UNSUPPORTED,
                    "%s: %s lies at %p; expected a multiple of 16 bytes; copy it to memory of its "
                    "own",
                    title, name, at);
}

dw_status dw__check_half(const char *title, dw_dtype dtype) {
    if (dtype == DW_BF16 || dtype == DW_F16) return DW_OK;
    return dw__fail(DW_TYPE, "%s: the element type is %s; expected bf16 or f16", title,
                    dw_dtype_name(dtype));
}

/* ---- jobs -------------------------------------------------------------------------------------------- */

dw_status dw__job_name(const dw__gpu_family *family, const dw__gpu_job *j, dw_status status) {
    char text[256];
    if (status == DW_OK) return DW_OK;
    return dw__fail_prefix(status, "%s (%s)", family->title,
                           family->describe(j->call, text, sizeof text));
}

static bool is_own(const dw__gpu_family *family, const char *name) {
    for (size_t i = 0; i < DW_COUNT(family->own) && family->own[i]; i++)
        if (strcmp(name, family->own[i]->name) == 0) return true;
    return false;
}

/* Finds the optional library's kernel that the call names. */
static dw_status find_provided(const dw__gpu_family *family, dw__gpu_job *j) {
    DW_RETURN_IF_FAILED(dw__gpu_kernel_provided(family->kind, j->named, family->own, &j->kernel));
    if (j->empty) return DW_OK;
    const dw_status status = j->kernel->supports(j->kernel, j->call, NULL);
    return status == DW_TYPE ? DW_UNSUPPORTED : status; /* the caller wants this kernel */
}

static dw_status use_own(const dw__gpu_family *family, dw__gpu_job *j) {
    const dw__context *c = j->context;
    const dw_status status = family->choose(j->call, c->capability, &j->kernel);
    if (status == DW_OK && (!j->named || strcmp(j->named, j->kernel->name) == 0)) return DW_OK;
    if (status == DW_OK)
        return dw__fail(DW_UNSUPPORTED,
                        "kernel is \"%s\"; expected %s, which GPU %d has: it is a %s (compute "
                        "capability %d.%d)",
                        j->named, j->kernel->name, c->ordinal, c->name, c->capability / 10,
                        c->capability % 10);
    return dw__fail_prefix(status, "GPU %d is a %s (compute capability %d.%d)", c->ordinal, c->name,
                           c->capability / 10, c->capability % 10);
}

dw_status dw__job_find(const dw__gpu_family *family, dw__gpu_job *j) {
    const bool provided = j->named && !is_own(family, j->named);
    if (provided) DW_RETURN_IF_FAILED(dw__job_name(family, j, find_provided(family, j)));
    DW_RETURN_IF_FAILED(dw__gpu_context(j->device, family->title, &j->context));
    return dw__job_name(family, j,
                        provided ? dw__cutlass_runs_in(j->kernel->provided, j->context)
                                 : use_own(family, j));
}

static dw_status workspace_of(const dw__gpu_job *j, size_t *bytes) {
    *bytes = 0;
    if (j->empty || !j->kernel->workspace_bytes) return DW_OK;
    return j->kernel->workspace_bytes(j->kernel, j->call, j->context, bytes);
}

static dw_status check_workspace(const dw__gpu_family *family, const dw__gpu_job *j) {
    const unsigned aligned = j->kernel->provided ? 256 : 16;
    size_t needed;
    DW_RETURN_IF_FAILED(workspace_of(j, &needed));
    if (needed == 0) return DW_OK;
    if ((!j->workspace || j->workspace_bytes < needed) && j->kernel->workspace_optional &&
        j->kernel->workspace_optional(j->call))
        return DW_OK;
    if (!j->workspace || j->workspace_bytes < needed)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "the workspace has %zu bytes; %s needs %zu of device memory, as %s says",
                        j->workspace ? j->workspace_bytes : 0, j->kernel->name, needed,
                        family->workspace_query);
    if ((uintptr_t)j->workspace % aligned == 0) return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT,
                    "the workspace lies at %p; %s expects a multiple of %u bytes", j->workspace,
                    j->kernel->name, aligned);
}

static dw_status call(const dw__gpu_family *family, const dw__gpu_job *j) {
    DW_RETURN_IF_FAILED(check_workspace(family, j));
    return dw__gpu_run(j->kernel, j->reference, j->call, j->context);
}

dw_status dw__job_run(const dw__gpu_family *family, const dw__gpu_job *j) {
    return dw__job_name(family, j, call(family, j));
}

dw_status dw__job_would_run(const dw__gpu_family *family, const dw__gpu_job *j) {
    size_t bytes;
    if (j->empty) return DW_OK;
    dw_status status = workspace_of(j, &bytes);
    if (status == DW_OK) status = dw__gpu_kernel_runs(j->kernel, j->call, j->context);
    return dw__job_name(family, j, status);
}

dw_status dw__job_workspace(const dw__gpu_family *family, const dw__gpu_job *j, size_t *bytes) {
    return dw__job_name(family, j, workspace_of(j, bytes));
}
