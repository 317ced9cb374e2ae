/* Groups attention calls into classes, chooses and explains the kernel for a call, and measures Deepwell's kernels. */
#include "deepwell/explain.h"
#include "kernel/cuda/gpu_attention.h"
#include "kernel/cuda/gpu_kernels.h"
#include <stdio.h>
#include <string.h>

/* ---- classes -------------------------------------------------------------------------------------------- */

/* Returns 1 plus the exponent of the power of 2 that is nearest by ratio; 0 for 0. */
static unsigned rounded_log2(uint64_t x) {
    if (x == 0) return 0;
    unsigned floor = 63 - (unsigned)__builtin_clzll(x);
    uint64_t mantissa = floor > 31 ? x >> (floor - 31) : x << (31 - floor);
    return 1 + floor + (mantissa * mantissa >> 63 != 0); /* nearer to the next power */
}

static long long power_of_2(uint64_t x) { return x == 0 ? 0 : 1ll << (rounded_log2(x) - 1); }

enum { MASK_NONE, MASK_CAUSAL, MASK_CAUSAL_TOP_LEFT, MASK_WINDOW };

static unsigned mask_of(const dw_attention *c) {
    if (c->window_left >= 0 || c->window_right > 0) return MASK_WINDOW;
    if (c->window_right < 0) return MASK_NONE;
    return c->bottom_right || c->seq_len_q == c->seq_len_kv ? MASK_CAUSAL : MASK_CAUSAL_TOP_LEFT;
}

uint64_t dw_attention_class_number(const dw_attention *c, bool backward) {
    if (c->batch < 0 || c->heads_q < 1 || c->heads_kv < 1 || c->seq_len_q < 0 || c->seq_len_kv < 0)
        return 0;
    uint64_t group = (uint64_t)(c->heads_q / c->heads_kv);
    if (c->head_dim < 1 || c->head_dim > 4095 || group < 1 || group > 4095) return 0;
    const struct {
        uint64_t value;
        unsigned bits;
    } parts[] = {
        {(uint64_t)c->bias_kind, 2},
        {(uint64_t)c->head_dim, 12},
        {group, 12},
        {rounded_log2((uint64_t)c->seq_len_q), 6},
        {rounded_log2((uint64_t)c->seq_len_kv), 6},
        {rounded_log2((uint64_t)c->batch * (uint64_t)c->heads_q), 7},
        {mask_of(c), 2},
        {c->dtype == DW_F16, 1},
        {c->offsets_q != NULL, 1},
        {c->softcap > 0.0f, 1},
        {c->dropout > 0.0f, 1},
        {backward, 1},
        {backward && c->deterministic, 1},
    };
    uint64_t number = 0;
    for (size_t i = 0; i < DW_COUNT(parts); i++) number = number << parts[i].bits | parts[i].value;
    return number;
}

/* Another backend may support calls that our kernels do not. The kernel that a call names does not matter here. */
static dw_status read_call(const dw_attention *given, bool backward, dw_attention *call) {
    DW_RETURN_IF_FAILED(dw__attention_read(given, call));
    call->kernel = NULL;
    dw_status status =
        dw__attention_check(call, backward ? DW__ATTENTION_BACKWARD : DW__ATTENTION_FORWARD, false);
    return status == DW_UNSUPPORTED ? DW_OK : status;
}

static void name_class(const dw_attention *call, bool backward, char *text, size_t bytes) {
    static const char *const masks[] = {"", " causal", " causal-top-left", " window"};
    snprintf(text, bytes, "attention %s %s d%d group%d q%lld k%lld heads%lld%s%s%s%s%s%s",
             backward ? "backward" : "forward", call->dtype == DW_F16 ? "f16" : "bf16",
             (int)call->head_dim, (int)(call->heads_q / call->heads_kv),
             power_of_2((uint64_t)call->seq_len_q), power_of_2((uint64_t)call->seq_len_kv),
             power_of_2((uint64_t)call->batch * (uint64_t)call->heads_q), masks[mask_of(call)],
             call->offsets_q ? " packed" : "", call->softcap > 0.0f ? " softcap" : "",
             call->dropout > 0.0f ? " dropout" : "", call->bias_kind ? " bias" : "",
             backward && call->deterministic ? " deterministic" : "");
}

dw_status dw_attention_class(const dw_attention *given, bool backward, char *text, size_t bytes) {
    dw_attention call;
    DW_RETURN_IF_FAILED(read_call(given, backward, &call));
    name_class(&call, backward, text, bytes);
    return DW_OK;
}

/* ---- choice and explanation -------------------------------------------------------------------------------- */

/* Texts that a query points to. */
typedef struct classes {
    char text[DW__GPU_PASSES][256];
} classes;

static dw__gpu_query query_of(const dw_attention *call, bool gradients,
                              const dw__gpu_target *target, const char *gpu, classes *names) {
    dw__gpu_query q = {
        .call = call,
        .passes = gradients ? 2 : 1,
        .kind = {gradients ? DW__CALL_ATTENTION_BACKWARD : DW__CALL_ATTENTION_FORWARD,
                 DW__CALL_ATTENTION_FORWARD},
        .target = target,
        .gpu = gpu,
        .unmeasured = dw__attention_why_unmeasured(call)};
    for (int pass = 0; pass < DW__GPU_PASSES; pass++) {
        name_class(call, gradients && pass == 0, names->text[pass], sizeof names->text[pass]);
        q.shape_class[pass] = names->text[pass];
    }
    return q;
}

dw_status dw_attention_decide(const dw_attention *given, bool gradients, const char *with,
                              bool prepare, dw_attention_decision *decision) {
    static const dw__struct known = {"dw_attention_decision", sizeof *decision, {0}};
    const dw__context *context = NULL;
    char target_name[DW__TARGET_NAME];
    dw_attention call;
    dw__gpu_choice made;
    classes names;
    DW_RETURN_IF_FAILED(dw__struct_read(&known, decision, NULL));
    *decision = (dw_attention_decision){sizeof *decision, DW_ATTENTION_OTHERS, NULL, "", ""};
    DW_RETURN_IF_FAILED(read_call(given, gradients, &call));
    dw_status status = dw__gpu_context(call.device, "attention", &context);
    if (status == DW_OK && prepare) status = dw_attention_supported(&call, gradients);
    if (status == DW_OUT_OF_MEMORY) return status;
    if (status != DW_OK)
        snprintf(decision->refusal, sizeof decision->refusal, "%s", dw_last_error());
    if (!context) {
        snprintf(decision->because, sizeof decision->because, "there is no GPU");
        return DW_OK;
    }
    const dw__gpu_target target = dw__gpu_target_of(context, target_name);
    dw__gpu_query q = query_of(&call, gradients, &target, context->name, &names);
    q.with = with;
    q.refused = status == DW_OK ? NULL : decision->refusal;
    dw__gpu_choose(&q, &made);
    snprintf(decision->because, sizeof decision->because, "%s", made.because);
    snprintf(decision->refusal, sizeof decision->refusal, "%s", made.refusal);
    if (!made.kernel) return DW_OK;
    decision->name = made.kernel->backend;
    if (!made.measured)
        decision->verdict = made.refusal[0] ? DW_ATTENTION_OTHERS : DW_ATTENTION_UNMEASURED;
    else if (strcmp(made.kernel->backend, dw__sm90_attention_forward.backend) == 0)
        decision->verdict = DW_ATTENTION_OURS;
    return DW_OK;
}

dw_status dw_attention_explain(const dw_attention *given, bool backward, const char *target,
                               char **json) {
    char shape[256];
    dw__gpu_subject at;
    dw_attention call;
    classes names;
    DW_RETURN_IF_FAILED(read_call(given, backward, &call));
    DW_RETURN_IF_FAILED(dw__gpu_subject_find(target, call.device, "sm_90a", &at));
    const dw__gpu_query q = query_of(&call, backward, &at.target, at.gpu, &names);
    const dw__attention_work work = dw__attention_work_of(&call, backward);
    return dw__gpu_explain(
        &q,
        &(dw__gpu_explanation){.operation = backward ? "attention backward" : "attention forward",
                               .shape = dw__attention_describe(&call, shape, sizeof shape),
                               .flops = work.flops,
                               .bytes = work.bytes,
                               .provided =
                                   at.target.capability == 100 ? &dw__cutlass_attention : NULL,
                               .operands = "attention"},
        &at, json);
}

/* ---- measurement ------------------------------------------------------------------------------------------- */

static dw_status add_parts(dw_attention *c, bool backward, dw__timing *timing) {
    if (c->offsets_q)
        return dw__fail(DW_UNSUPPORTED,
                        "packed sequences are not measured: their lengths decide; measure one of a "
                        "typical length");
    if (dw__attention_has_no_queries(c) || dw__attention_has_no_keys(c))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "there is nothing to measure: the call has no elements");
    for (int which = 0; which < DW__ATTENTION_OPERANDS; which++) {
        const dw__attention_operand_kind *kind = &dw__attention_operands[which];
        dw_attention_tensor *t = dw__attention_tensor(c, which);
        *t = (dw_attention_tensor){0}; /* only the shape counts */
        if (kind->backward && !backward) continue;
        dw__timing_add(timing, &t->data, dw__attention_lay_out(c, which, false), !kind->written);
    }
    const size_t rows = (size_t)c->batch * (size_t)c->heads_q * (size_t)c->seq_len_q;
    c->lse = NULL;
    dw__timing_add(timing, &c->lse, sizeof(float) * rows, false);
    if (!backward) return DW_OK;
    DW_RETURN_IF_FAILED(dw_attention_backward_workspace(c, &c->workspace_bytes));
    dw__timing_add(timing, &c->workspace, c->workspace_bytes, false);
    return DW_OK;
}

static dw_status forward(const void *call) { return dw_attention_forward(call); }
static dw_status backward_pass(const void *call) { return dw_attention_backward(call); }

dw_status dw_attention_measure(const dw_attention *given, bool backward, double *seconds) {
    dw_attention call;
    char shape_class[256];
    dw__timing timing = {.device = &dw__device_cuda,
                         .call = &call,
                         .stream = &call.stream,
                         .before = backward ? forward : NULL,
                         .run = backward ? backward_pass : forward};
    DW_RETURN_IF_FAILED(dw__attention_read(given, &call));
    if (call.device && call.device != &dw__device_cuda)
        return dw__fail(DW_UNSUPPORTED,
                        "attention: the call's device is \"%s\", whose times say nothing about a "
                        "GPU; expected \"cuda\"",
                        dw_device_name(call.device));
    call.kernel = NULL;
    call.seed_memory = NULL;
    timing.dtype = call.dtype;
    DW_RETURN_IF_FAILED(add_parts(&call, backward, &timing));
    DW_RETURN_IF_FAILED(dw_attention_class(&call, backward, shape_class, sizeof shape_class));
    DW_RETURN_IF_FAILED(dw__gpu_measure(&timing, seconds));
    return dw_tune_record(shape_class, "deepwell", *seconds);
}
