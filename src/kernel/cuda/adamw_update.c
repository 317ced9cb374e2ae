/* AdamW on a GPU: the public calls, the variants and their launches. A call does only arithmetic before its launches:
 * it allocates nothing, takes no lock and does not synchronize. */
#include "common/adamw_params.h"
#include "kernel/cuda/gpu_adamw.h"
#include "kernel/cuda/gpu_kernels.h"
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

enum { UPDATE, BEGIN, NORM }; /* entry points */

static const int64_t most_elements = (int64_t)1 << 40;
/* The driver that accepts 32 KB of launch parameters. */
static const int many_driver = 12010;

/* ---- checks of a call ------------------------------------------------------------------------------ */

static bool is_float(dw_dtype type) { return type == DW_BF16 || type == DW_F16 || type == DW_F32; }

static dw_dtype grad_dtype(const dw_adamw_gpu_group *g) {
    return g->grad_dtype ? g->grad_dtype : g->param_dtype;
}

static dw_status check_options(const dw_adamw_gpu_group *g, uint32_t index) {
    if (!is_float(g->param_dtype) ||
        (g->state_dtype != 0 && !is_float(g->state_dtype) && g->state_dtype != DW_E4M3))
        return dw__fail(DW_TYPE,
                        "adamw: group %u has parameters of %s and averages of %s; expected bf16, "
                        "f16 or f32, and for averages also e4m3 or 0",
                        index, dw_dtype_name(g->param_dtype), dw_dtype_name(g->state_dtype));
    if (!is_float(grad_dtype(g)) || (g->copy_dtype && !is_float(g->copy_dtype)))
        return dw__fail(DW_TYPE,
                        "adamw: group %u has gradients of %s and copies of %s; expected 0, bf16, "
                        "f16 or f32",
                        index, dw_dtype_name(g->grad_dtype), dw_dtype_name(g->copy_dtype));
    if (!(g->beta1 >= 0.0 && g->beta1 < 1.0 && g->beta2 >= 0.0 && g->beta2 < 1.0))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "adamw: the betas of group %u are %g and %g; each must be in [0, 1)", index,
                        g->beta1, g->beta2);
    if (g->state_dtype == 0 && !(g->beta1 == 0.0 && g->beta2 == 0.0))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "adamw: group %u has no averages, but betas of %g and %g; expected 0 and 0",
                        index, g->beta1, g->beta2);
    if (!(g->lr >= 0.0 && g->eps >= 0.0 && g->weight_decay >= 0.0))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "adamw: lr %g, eps %g and weight_decay %g of group %u must not be negative "
                        "or NaN",
                        g->lr, g->eps, g->weight_decay, index);
    const dw__address lr = {"lr_at", g->lr_at, sizeof(float), false};
    return dw__check_addresses("adamw", &lr, 1);
}

static dw_status check_tensor(const dw_adamw_gpu_group *g, const dw_adamw_gpu_tensor *t) {
    const dw__size_range count = {"count", t->count, 0, most_elements};
    const size_t param = dw_dtype_bytes(g->param_dtype), state = dw_dtype_bytes(g->state_dtype);
    const bool needed = t->count > 0, copies = g->copy_dtype != 0, averages = g->state_dtype != 0;
    const dw__address addresses[] = {
        {"param", t->param, param, needed},
        {"grad", t->grad, dw_dtype_bytes(grad_dtype(g)), needed},
        {"copy", t->copy, copies ? dw_dtype_bytes(g->copy_dtype) : 1, needed && copies},
        {"exp_avg", t->exp_avg, state, needed && averages},
        {"exp_avg_sq", t->exp_avg_sq, state, needed && averages},
        {"scales", t->scales, sizeof(float), needed && g->state_dtype == DW_E4M3},
        {"step", t->step, sizeof(float), true}};
    DW_RETURN_IF_FAILED(dw__check_sizes("adamw", &count, 1));
    if (t->stream >= 1u << 20)
        return dw__fail(DW_INVALID_ARGUMENT, "adamw: stream is %u; expected a number below 2^20",
                        t->stream);
    return dw__check_addresses("adamw", addresses, DW_COUNT(addresses));
}

static dw_status check(const dw_adamw_gpu *c) {
    static const dw__struct known = {"dw_adamw_gpu", sizeof *c, {0}};
    DW_RETURN_IF_FAILED(dw__struct_read(&known, c, NULL));
    if (!(c->max_norm >= 0.0))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "adamw: max_norm is %g; expected a positive number, or 0 for no clipping",
                        c->max_norm);
    if (!c->groups && c->group_count > 0)
        return dw__fail(DW_INVALID_ARGUMENT, "adamw: groups is NULL but group_count is %u",
                        c->group_count);
    const dw__address scalars[] = {{"grad_scale", c->grad_scale, sizeof(float), false},
                                   {"found_inf", c->found_inf, sizeof(float), false},
                                   {"norm", c->norm, sizeof(float), false},
                                   {"outcome", c->outcome, sizeof(double), false}};
    DW_RETURN_IF_FAILED(dw__check_addresses("adamw", scalars, DW_COUNT(scalars)));
    for (uint32_t i = 0; i < c->group_count; i++) {
        const dw_adamw_gpu_group *g = &c->groups[i];
        if (!g->tensors && g->count > 0)
            return dw__fail(DW_INVALID_ARGUMENT,
                            "adamw: the tensors of group %u are NULL but its count is %u", i,
                            g->count);
        DW_RETURN_IF_FAILED(check_options(g, i));
        for (uint32_t j = 0; j < g->count; j++) {
            const dw_status status = check_tensor(g, &g->tensors[j]);
            if (status != DW_OK) return dw__fail_prefix(status, "tensor %u of group %u", j, i);
        }
    }
    return DW_OK;
}

/* ---- workspace --------------------------------------------------------------------------------------- */

/* The common numbers, then the scalars of all tensors, then the partial sums of all chunks. */
typedef struct layout {
    int64_t tensors, chunks;
    size_t scalars_at, partials_at, bytes;
} layout;

static int64_t chunks_of(int64_t count) { return (count + DW_ADAMW_CHUNK - 1) / DW_ADAMW_CHUNK; }

static layout layout_of(const dw_adamw_gpu *c) {
    layout l = {.scalars_at = sizeof(dw_adamw_common)};
    for (uint32_t i = 0; i < c->group_count; i++) {
        l.tensors += c->groups[i].count;
        for (uint32_t j = 0; c->max_norm > 0.0 && j < c->groups[i].count; j++)
            l.chunks += chunks_of(c->groups[i].tensors[j].count);
    }
    l.partials_at = l.scalars_at + (size_t)l.tensors * sizeof(dw_adamw_scalars);
    l.bytes = l.partials_at + (size_t)l.chunks * sizeof(double);
    return l;
}
_Static_assert(DW_ADAMW_BLOCK == DW_ADAMW_BLOCK_ELEMENTS, "the same blocks in device code");
_Static_assert(sizeof(dw_adamw_told) == sizeof(dw_adamw_gpu_outcome) &&
                   offsetof(dw_adamw_told, applied) == offsetof(dw_adamw_gpu_outcome, applied),
               "the same struct for device code");
_Static_assert(sizeof(dw_adamw_common) % sizeof(double) == 0 &&
                   sizeof(dw_adamw_scalars) % sizeof(double) == 0,
               "partial sums are aligned");

/* ---- launches ---------------------------------------------------------------------------------------- */

static dw_status launch(const dw_adamw_gpu *c, const dw__context *context, const char *name,
                        void *function, int64_t blocks, unsigned threads, void *params) {
    void *arguments[] = {params};
    return context->device->launch(&(dw__launch){
        .name = name,
        .function = function,
        .grid = {(unsigned)blocks, 1, 1},
        .block = {threads, 1, 1},
        .stream = c->stream,
        .arguments = arguments,
    });
}

static dw_adamw_params params_of(const dw_adamw_gpu *c, const dw_adamw_gpu_group *g) {
    return (dw_adamw_params){
        .common = c->workspace,
        .lr_at = g->lr_at,
        .lr = (float)g->lr,
        .beta1 = (float)g->beta1,
        .beta2 = (float)g->beta2,
        .weight_decay = (float)g->weight_decay,
        .eps = (float)g->eps,
        .maximize = g->maximize != 0,
        .store_gradients = c->grad_scale != NULL,
        .seed = g->seed,
    };
}

/* Fills a table of `most` entries with tensors from `first` on, and returns the chunks of the launch. The extra
 * addresses lie behind the table, in memory of the host's longer one. */
static int64_t fill_table(const dw_adamw_gpu_group *g, uint32_t first, int most,
                          dw_adamw_params *p) {
    const bool copies = g->copy_dtype != 0, scales = g->state_dtype == DW_E4M3;
    char *extra = (char *)&p->tensor[most];
    int64_t chunks = 0;
    p->tensors = 0;
    for (uint32_t i = first; i < g->count && p->tensors < most; i++) {
        const dw_adamw_gpu_tensor *t = &g->tensors[i];
        if (chunks + chunks_of(t->count) > INT_MAX) break;
        if (copies) memcpy(extra, &t->copy, sizeof t->copy), extra += sizeof t->copy;
        if (scales) memcpy(extra, &t->scales, sizeof t->scales), extra += sizeof t->scales;
        p->tensor[p->tensors++] = (dw_adamw_entry){t->param, t->grad,     t->exp_avg, t->exp_avg_sq,
                                                   t->count, (int)chunks, t->stream};
        chunks += chunks_of(t->count);
    }
    return chunks;
}
_Static_assert(DW_ADAMW_MANY_EXTRA *(sizeof(dw_adamw_entry) + 2 * sizeof(void *)) <=
                   DW_ADAMW_MANY * sizeof(dw_adamw_entry),
               "extra addresses lie in the host's table");

/* Launches the norm or the update of a group; `tensors` and `chunks` count those of the groups before. */
static dw_status pass(const dw_adamw_gpu *c, const dw__context *context, const dw__variant *variant,
                      int which, const dw_adamw_gpu_group *g, int64_t tensors, int64_t chunks) {
    const dw__adamw_shape shape = {.params = variant->params};
    const layout l = layout_of(c);
    dw_adamw_params p = params_of(c, g);
    for (uint32_t first = 0; first < g->count; first += (uint32_t)p.tensors) {
        const int64_t blocks = fill_table(g, first, (int)shape.tensors, &p);
        p.scalars = (dw_adamw_scalars *)((char *)c->workspace + l.scalars_at) + tensors + first;
        p.partials = (double *)((char *)c->workspace + l.partials_at) + chunks;
        chunks += blocks;
        if (blocks == 0) continue;
        DW_RETURN_IF_FAILED(launch(c, context, which == NORM ? "adamw_norm" : "adamw_update",
                                   variant->functions[which], blocks, DW_ADAMW_THREADS, &p));
    }
    return DW_OK;
}

/* Launches adamw_begin for a group. */
static dw_status begin(const dw_adamw_gpu *c, const dw__context *context,
                       const dw__variant *variant, const dw_adamw_gpu_group *g, int64_t tensors) {
    const layout l = layout_of(c);
    dw_adamw_begin_params p = {
        .common = c->workspace,
        .partials = (const double *)((char *)c->workspace + l.partials_at),
        .grad_scale = c->grad_scale,
        .found_inf = c->found_inf,
        .norm = c->norm,
        .told = (dw_adamw_told *)c->outcome,
        .finite_only = c->finite_only != 0,
        .lr_at = g->lr_at,
        .lr = g->lr,
        /* As the update has them, so that the corrections belong to its averages. */
        .beta1 = (double)(float)g->beta1,
        .beta2 = (double)(float)g->beta2,
        .max_norm = c->max_norm > 0.0 ? c->max_norm : -1.0,
        .partial_count = l.chunks,
    };
    for (uint32_t first = 0; first < g->count; first += DW_ADAMW_STEPS) {
        p.first = tensors + first == 0;
        p.scalars = (dw_adamw_scalars *)((char *)c->workspace + l.scalars_at) + tensors + first;
        p.tensors =
            g->count - first < DW_ADAMW_STEPS ? (int)(g->count - first) : (int)DW_ADAMW_STEPS;
        for (int i = 0; i < p.tensors; i++) p.step[i] = g->tensors[first + (uint32_t)i].step;
        DW_RETURN_IF_FAILED(launch(c, context, "adamw_begin", variant->functions[BEGIN], 1,
                                   DW_ADAMW_BEGIN_THREADS, &p));
    }
    return DW_OK;
}

/* ---- variants ---------------------------------------------------------------------------------------- */

static uint64_t shape_of(const dw_adamw_gpu_group *g, const dw__context *context) {
    const bool extra = g->copy_dtype || g->state_dtype == DW_E4M3;
    const uint32_t few = extra ? DW_ADAMW_FEW_EXTRA : DW_ADAMW_FEW;
    const bool many = g->count > few && (context->device != &dw__device_cuda ||
                                         context->driver_version >= many_driver);
    return (dw__adamw_shape){.param = (uint64_t)g->param_dtype,
                             .state = (uint64_t)g->state_dtype,
                             .grad = (uint64_t)grad_dtype(g),
                             .copy = (uint64_t)g->copy_dtype,
                             .stochastic = g->stochastic != 0,
                             .tensors = !many   ? few
                                        : extra ? DW_ADAMW_MANY_EXTRA
                                                : DW_ADAMW_MANY}
        .params;
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    static const char *const names[] = {
        [UPDATE] = "adamw_update", [BEGIN] = "adamw_begin", [NORM] = "adamw_norm"};
    const dw__adamw_shape shape = {.params = params};
    (void)kernel;
    for (int i = 0; i < (int)DW_COUNT(names); i++) {
        points[i].code = (dw__jit_variant){
            .source = "common/adamw.cu", .entry = names[i], .arch = dw__gpu_arch(capability)};
        dw__jit_add_define(&points[i].code, "PARAM", dw__gpu_element((dw_dtype)shape.param));
        dw__jit_add_define(&points[i].code, "GRAD", dw__gpu_element((dw_dtype)shape.grad));
        dw__jit_add_define(&points[i].code, "STATE", (int)shape.state);
        dw__jit_add_define(&points[i].code, "COPY", (int)shape.copy);
        dw__jit_add_define(&points[i].code, "STOCHASTIC", (int)shape.stochastic);
        dw__jit_add_define(&points[i].code, "TENSORS", (int)shape.tensors);
    }
    return DW_OK;
}

/* Returns the group's variant, which is `given` if that is not NULL. */
static dw_status variant_of(const dw_adamw_gpu_group *g, const dw__context *context,
                            const dw__variant *given, const dw__variant **variant) {
    *variant = given;
    if (given) return DW_OK;
    DW_RETURN_IF_FAILED(
        dw__variant_of(context, &dw__gpu_adamw_update, shape_of(g, context), variant));
    return dw__variant_status(*variant);
}

dw_status dw__adamw_prepare(const dw_device *device, const dw_adamw_gpu_group *group) {
    const dw__context *context;
    const dw__variant *variant;
    DW_RETURN_IF_FAILED(dw__gpu_context(device, "adamw", &context));
    return variant_of(group, context, NULL, &variant);
}

/* All groups run by `given`; NULL: each by its own variant. A variant that is missing or refused is found before
 * anything changes. */
static dw_status enqueue_with(const dw_adamw_gpu *c, const dw__context *context,
                              const dw__variant *given) {
    static const int order[] = {NORM, BEGIN, UPDATE};
    const dw__variant *variant;
    for (uint32_t i = 0; i < c->group_count; i++)
        DW_RETURN_IF_FAILED(variant_of(&c->groups[i], context, given, &variant));
    for (size_t which = c->max_norm > 0.0 ? 0 : 1; which < DW_COUNT(order); which++) {
        int64_t tensors = 0, chunks = 0;
        for (uint32_t i = 0; i < c->group_count; i++) {
            const dw_adamw_gpu_group *g = &c->groups[i];
            DW_RETURN_IF_FAILED(variant_of(g, context, given, &variant));
            DW_RETURN_IF_FAILED(order[which] == BEGIN
                                    ? begin(c, context, variant, g, tensors)
                                    : pass(c, context, variant, order[which], g, tensors, chunks));
            tensors += g->count;
            for (uint32_t j = 0; j < g->count; j++) chunks += chunks_of(g->tensors[j].count);
        }
    }
    return DW_OK;
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    return enqueue_with(call, context, variant);
}

/* ---- the kernel -------------------------------------------------------------------------------------- */

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    DW_RETURN_IF_FAILED(check(call));
    return dw__gpu_kernel_has(kernel, gpu);
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw_adamw_gpu *c = call;
    return dw__variant_of(context, kernel, shape_of(&c->groups[0], context), variant);
}

const dw__kernel dw__gpu_adamw_update = {
    .name = "adamw_update",
    .backend = "deepwell",
    .kind = DW__CALL_ADAMW,
    .proof = DW__RUN_ON_HOPPER,
    .asked_for = true,
    .operation = "AdamW of many tensors, with clipping",
    .source = "cuda/common/adamw.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements =
        "BF16, F16, F32; gradients, averages and copies likewise; averages also 8-bit codes",
    .needs = "contiguous tensors; fastest from multiples of 16 bytes",
    .supports = supports,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    .first_use = &dw__adamw_first_use,
    .tolerance = "rounded once to the stored type; 16 roundings in FP32",
};

/* ---- the public calls -------------------------------------------------------------------------------- */

dw_status dw_adamw_gpu_workspace(const dw_adamw_gpu *call, size_t *bytes) {
    DW_RETURN_IF_FAILED(check(call));
    *bytes = call->device == &dw__device_cpu ? 0 : layout_of(call).bytes;
    return DW_OK;
}

dw_status dw_adamw_gpu_run(const dw_adamw_gpu *call) {
    const dw__context *context;
    DW_RETURN_IF_FAILED(check(call));
    const layout l = layout_of(call);
    if (l.tensors == 0) return DW_OK;
    if (call->device == &dw__device_cpu) return dw__adamw_cpu_run(call);
    if (!call->workspace || call->workspace_bytes < l.bytes || (uintptr_t)call->workspace % 16 != 0)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "adamw: the workspace has %zu bytes at %p; expected %zu bytes of device "
                        "memory at a multiple of 16, as dw_adamw_gpu_workspace says",
                        call->workspace_bytes, call->workspace, l.bytes);
    DW_RETURN_IF_FAILED(dw__gpu_context(call->device, "adamw", &context));
    if (!dw__gpu_has_kernels(context->capability))
        return dw__fail(DW_UNSUPPORTED,
                        "adamw: GPU %d is a %s (compute capability %d.%d); this kernel is for 9.0, "
                        "10.0, 10.3 and 12.0 (H100, H200, B200, B300, RTX 50, RTX PRO)",
                        context->ordinal, context->name, context->capability / 10,
                        context->capability % 10);
    return enqueue_with(call, context, NULL);
}
