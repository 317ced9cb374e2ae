/* Attention in BF16 and F16 on the CPU: copies the operands to F32, computes there by the tiled kernels, and rounds the
 * results once. */
#include "base/pool.h"
#include "kernel/cpu/cpu_attention.h"
#include "number/half.h"

enum { MASK = 3 };

/* ---- the call in F32 ------------------------------------------------------------------------------ */

static bool is_half(const dw__tensor *t) {
    return t->rank >= 0 && (t->dtype == DW_BF16 || t->dtype == DW_F16);
}

/* Makes `t` the tensor of its copy, at `*used` bytes of the scratch. Axes along which a mask repeats are not copied. */
static void widen(dw__tensor *t, bool repeats, char *scratch, size_t *used) {
    int64_t count = 1;
    for (int axis = t->rank - 1; axis >= 0; axis--) {
        if (repeats && t->stride[axis] == 0) continue;
        t->stride[axis] = count;
        count *= t->shape[axis];
    }
    t->dtype = DW_F32;
    t->data = scratch ? scratch + *used : NULL;
    *used += (size_t)((count + 15) / 16 * 16) * sizeof(float);
}

/* Makes the call of the copies. Returns the bytes that they take at the start of the scratch. Results that nothing
 * reads have room too: a call whose memory is not placed yet does not tell them apart. */
static size_t widen_call(const dw__call *call, char *scratch, dw__call *wide) {
    size_t used = 0;
    *wide = *call;
    for (uint32_t i = 0; i < call->input_count; i++)
        if (is_half(&wide->inputs[i])) widen(&wide->inputs[i], i == MASK, scratch, &used);
    for (uint32_t o = 0; o < call->output_count; o++) {
        if (!is_half(&wide->outputs[o])) continue;
        widen(&wide->outputs[o], false, scratch, &used);
        if (!call->outputs[o].data) wide->outputs[o].data = NULL;
    }
    return used;
}

/* ---- copies --------------------------------------------------------------------------------------- */

typedef struct copy {
    const dw__tensor *half, *wide;
} copy;

/* Finds the row with this index among those that a copy has: offsets of its first element. */
static void find_row(const copy *c, int64_t row, int64_t *half, int64_t *wide) {
    *half = *wide = 0;
    for (int axis = c->half->rank - 2; axis >= 0; axis--) {
        if (c->wide->stride[axis] == 0) continue;
        const int64_t at = row % c->half->shape[axis];
        row /= c->half->shape[axis];
        *half += at * c->half->stride[axis];
        *wide += at * c->wide->stride[axis];
    }
}

static int64_t row_count(const copy *c) {
    int64_t rows = 1;
    for (int axis = 0; axis < c->half->rank - 1; axis++)
        if (c->wide->stride[axis] != 0) rows *= c->half->shape[axis];
    return rows;
}

static int64_t row_length(const copy *c) {
    const int last = c->half->rank - 1;
    return c->wide->stride[last] == 0 ? 1 : c->half->shape[last];
}

static void widen_row(void *context, int64_t row, int worker) {
    const copy *c = context;
    const int64_t length = row_length(c), step = c->half->stride[c->half->rank - 1];
    int64_t half, wide;
    (void)worker;
    find_row(c, row, &half, &wide);
    const uint16_t *from = (const uint16_t *)c->half->data + half;
    float *to = (float *)c->wide->data + wide;
    if (c->half->dtype == DW_BF16)
        for (int64_t i = 0; i < length; i++) to[i] = dw__bf16_to_f32(from[i * step]);
    else
        for (int64_t i = 0; i < length; i++) to[i] = dw__f16_to_f32(from[i * step]);
}

static void round_row(void *context, int64_t row, int worker) {
    const copy *c = context;
    const int64_t length = row_length(c), step = c->half->stride[c->half->rank - 1];
    int64_t half, wide;
    (void)worker;
    find_row(c, row, &half, &wide);
    uint16_t *to = (uint16_t *)c->half->data + half;
    const float *from = (const float *)c->wide->data + wide;
    if (c->half->dtype == DW_BF16)
        for (int64_t i = 0; i < length; i++) to[i * step] = dw__f32_to_bf16(from[i]);
    else
        for (int64_t i = 0; i < length; i++) to[i * step] = dw__f32_to_f16(from[i]);
}

/* ---- kernels -------------------------------------------------------------------------------------- */

static const dw__kernel *tiled(const dw__call *call) {
    return call->op == DW_OP_ATTENTION ? &dw__attention_tiled : &dw__attention_backward_tiled;
}

static dw_status supports(const dw__kernel *kernel, const void *given, const dw__gpu_target *gpu) {
    const dw__call *call = given;
    dw__operation_call wide = {0};
    if (!is_half(&call->inputs[0])) return dw__kernel_refuse(kernel);
    (void)widen_call(call, NULL, &wide.call);
    return tiled(call)->supports(tiled(call), &wide, gpu);
}

static dw_status workspace_bytes(const dw__kernel *kernel, const void *given,
                                 const dw__context *context, size_t *bytes) {
    const dw__call *call = given;
    dw__operation_call wide = {0};
    const size_t used = widen_call(call, NULL, &wide.call);
    (void)kernel;
    DW_RETURN_IF_FAILED(tiled(call)->workspace_bytes(tiled(call), &wide, context, bytes));
    *bytes += used;
    return DW_OK;
}

static dw_status run(const dw__call *call, void *scratch) {
    dw__call wide;
    const size_t used = widen_call(call, scratch, &wide);
    for (uint32_t i = 0; i < call->input_count; i++) {
        copy c = {&call->inputs[i], &wide.inputs[i]};
        if (is_half(c.half)) dw__pool_run(row_count(&c), widen_row, &c);
    }
    DW_RETURN_IF_FAILED(tiled(call)->run(&wide, (char *)scratch + used));
    for (uint32_t o = 0; o < call->output_count; o++) {
        copy c = {&call->outputs[o], &wide.outputs[o]};
        if (is_half(c.half) && c.half->data) dw__pool_run(row_count(&c), round_row, &c);
    }
    return DW_OK;
}

const dw__kernel dw__attention_widened = {
    .name = "cpu.attention.widened",
    .op = DW_OP_ATTENTION,
    .source = "ours, in F32 by cpu.attention.tiled",
    .needs = "BF16 or F16 with contiguous rows",
    .supports = supports,
    .workspace_bytes = workspace_bytes,
    .run = run,
    .results = DW__RESULTS_STRIDED,
    .tolerance_factor = 8.0, /* of cpu.attention.tiled */
};
const dw__kernel dw__attention_backward_widened = {
    .name = "cpu.attention_backward.widened",
    .op = DW_OP_ATTENTION_BACKWARD,
    .source = "ours, in F32 by cpu.attention_backward.tiled",
    .needs = "BF16 or F16 with contiguous rows; no gradient of the mask",
    .supports = supports,
    .workspace_bytes = workspace_bytes,
    .run = run,
    .results = DW__RESULTS_STRIDED,
    .tolerance_factor = 16.0, /* of cpu.attention_backward.tiled */
};
