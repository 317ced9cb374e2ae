/* Attention with CUTLASS's kernels (docs/cutlass.md). */
#include "kernel/cuda/gpu_attention.h"
#include <stdio.h>

/* Returns whether some row may be unable to see some key. These kernels then require a causal mask. */
static bool is_causal(const dw_attention *c) {
    return dw__attention_shape_of(c, DW__ATTENTION_FORWARD, 0).window;
}

static dw_status check_features(const dw_attention *c, const dw_cutlass_kernel *kernel) {
    const bool window = c->window_left >= 0 || c->window_right != 0;
    const char *lacks = c->dtype != DW_BF16      ? "elements other than bf16"
                        : c->offsets_q           ? "packed sequences"
                        : c->softcap > 0.0f      ? "a soft cap"
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

/* Returns the stride of an axis. The caller's tensor may have any stride on an axis of length 1, so this returns one
 * that the kernel supports. */
static dw_cutlass_attention translate(const dw_attention *c, int sm_count) {
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

/* Does not access memory. */
static dw_status workspace_bytes(const dw__kernel *entry, const void *call,
                                 const dw__context *context, size_t *bytes) {
    const dw_cutlass_kernel *kernel = entry->provided;
    const dw_cutlass_attention made = translate(call, context ? context->sm_count : 0);
    *bytes = 0;
    DW_RETURN_IF_FAILED(check_features(call, kernel));
    DW_RETURN_IF_FAILED(check_strides(call, kernel));
    return dw__cutlass_status(kernel, kernel->workspace_bytes(&made, bytes));
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    size_t bytes;
    DW_RETURN_IF_FAILED(dw__cutlass_is_for(kernel->provided, gpu));
    DW_RETURN_IF_FAILED(dw__attention_check(call, DW__ATTENTION_FORWARD, false));
    return workspace_bytes(kernel, call, NULL, &bytes);
}

/* CUTLASS's library loads its own kernels. A variant here only stands for a first-use check: of a head dimension, with
 * or without a mask. */
static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw_attention *c = call;
    const dw__attention_shape shape = {.head_dim = (uint64_t)c->head_dim, .window = is_causal(c)};
    return dw__variant_of(context, kernel, shape.params, variant);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw_attention *c = call;
    const dw_cutlass_kernel *kernel = variant->kernel->provided;
    const dw_cutlass_attention made = translate(c, context->sm_count);
    return dw__cutlass_status(kernel, kernel->launch(&made, c->workspace, c->stream));
}

static void seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                    dw__kernel_seconds *result) {
    (void)kernel, (void)call, (void)gpu;
    snprintf(result->from, sizeof result->from, "used only by its name; not measured");
}

const dw__kernel dw__cutlass_attention = {
    .backend = "cutlass",
    .asked_for = true,
    .described = "CUTLASS, an optional library",
    .kind = DW__CALL_ATTENTION_FORWARD,
    .operation = "attention forward",
    .needs = "head dimension 64 or 128; 16-byte rows",
    .supports = supports,
    .seconds = seconds,
    .workspace_bytes = workspace_bytes,
    .prepare = prepare,
    .enqueue = enqueue,
    .first_use = &dw__attention_first_use,
    .tolerance = "twice the error of rounding P and O to the type, against FP64",
};
