/* Attention of a graph, forward and backward, by the attention kernels (attention.c): their call is made from the
 * operation's.
 *
 * The kernels write the graph's results in place. A result that nothing reads has room in the workspace, in front of
 * the kernel's own; the statistics need none. Gradients have the same bits in every run, as the engine promises.
 */
#include "kernel/cuda/gpu_attention.h"
#include "kernel/cuda/gpu_kernels.h"

/* Operands and results of the operations (deepwell/ops.h). */
enum { Q, K, V, MASK, SEED, GIVEN_O, GIVEN_LSE, D_O };
enum { O, LSE };
enum { DQ, DK, DV, DMASK };

/* ---- the kernels' call ------------------------------------------------------------------------------- */

static dw_attention_tensor tensor_of(const dw__tensor *t) {
    return (dw_attention_tensor){t->data, t->stride[0], t->stride[1], t->stride[2]};
}

/* The operation's window counts the query's own key, the kernels' window_left does not. A window that is longer than
 * any sequence has no limit. */
static void set_mask(const dw__call *c, dw_attention *a) {
    const int64_t causal = dw__call_int(c, DW_ATTR_KEY_CAUSAL, 0),
                  window = dw__call_int(c, DW_ATTR_KEY_WINDOW, -1);
    a->window_left = window < 0 || window > INT32_MAX ? -1 : (int32_t)(window - 1);
    a->window_right = causal ? 0 : -1;
    a->bottom_right = causal == 2;
}

/* A mask's tensor: its axes of length 1 repeat. */
static dw_attention_bias bias_of(const dw__tensor *t) {
    int64_t stride[4];
    for (int axis = 0; axis < 4; axis++) stride[axis] = t->shape[axis] == 1 ? 0 : t->stride[axis];
    return (dw_attention_bias){t->data, stride[0], stride[1], stride[2], stride[3]};
}

static bool sums_mask(const dw__call *c) { return c->output_count > DMASK; }

static void set_bias(const dw__call *c, dw_attention *a) {
    const dw__tensor *mask = &c->inputs[MASK];
    if (mask->rank < 0) return;
    a->bias_kind = mask->dtype == DW_BOOL ? DW_ATTENTION_VISIBLE : DW_ATTENTION_ADDED;
    a->bias = bias_of(mask);
    if (sums_mask(c)) a->d_bias = bias_of(&c->outputs[DMASK]);
}

/* The tensor of a result. If nothing reads it, its room starts at `*used` bytes of the workspace. */
static dw_attention_tensor result_of(const dw__tensor *t, void *workspace, size_t *used) {
    dw_attention_tensor result = tensor_of(t);
    if (t->data) return result;
    if (workspace) result.data = (char *)workspace + *used;
    *used += (dw__tensor_bytes(t) + 255) / 256 * 256;
    return result;
}

static bool is_backward(const dw__call *c) { return c->op == DW_OP_ATTENTION_BACKWARD; }

dw_attention dw__graph_attention_call(const dw__operation_call *given, size_t *used) {
    const dw__call *c = &given->call;
    const dw__tensor *q = &c->inputs[Q], *k = &c->inputs[K];
    dw_attention a = {
        .struct_size = sizeof a,
        .dtype = q->dtype,
        .batch = (int32_t)q->shape[0],
        .heads_q = (int32_t)q->shape[1],
        .heads_kv = (int32_t)k->shape[1],
        .seq_len_q = (int32_t)q->shape[2],
        .seq_len_kv = (int32_t)k->shape[2],
        .head_dim = (int32_t)q->shape[3],
        .scale = (float)dw__call_float(c, DW_ATTR_KEY_SCALE, 1.0),
        .softcap = (float)dw__call_float(c, DW_ATTR_KEY_SOFTCAP, 0.0),
        .dropout = (float)dw__call_float(c, DW_ATTR_KEY_P, 0.0),
        .q = tensor_of(q),
        .k = tensor_of(k),
        .v = tensor_of(&c->inputs[V]),
        .deterministic = true,
        .stream = given->stream,
    };
    *used = 0;
    if (is_backward(c)) {
        a.o = tensor_of(&c->inputs[GIVEN_O]);
        a.lse = c->inputs[GIVEN_LSE].data;
        a.d_o = tensor_of(&c->inputs[D_O]);
        a.dq = result_of(&c->outputs[DQ], given->workspace, used);
        a.dk = result_of(&c->outputs[DK], given->workspace, used);
        a.dv = result_of(&c->outputs[DV], given->workspace, used);
        if (given->workspace) a.workspace = (char *)given->workspace + *used;
    } else {
        a.o = result_of(&c->outputs[O], given->workspace, used);
        a.lse = c->outputs[LSE].data;
    }
    if (a.dropout > 0.0f) {
        a.seed_memory = c->inputs[SEED].data;
        a.dropout_stream = dw__call_int(c, DW_ATTR_KEY_STREAM, 0);
    }
    set_mask(c, &a);
    set_bias(c, &a);
    return a;
}

static dw__attention_pass pass_of(const dw__call *c) {
    return is_backward(c) ? DW__ATTENTION_BACKWARD : DW__ATTENTION_FORWARD;
}
static const dw__kernel *kernel_of(const dw__call *c, int capability) {
    return dw__attention_kernel_on(pass_of(c), capability);
}

/* ---- the entries ---------------------------------------------------------------------------------------- */

static bool has_rows(const dw__tensor *t) {
    for (int axis = 0; axis < t->rank; axis++)
        if (t->shape[axis] > INT32_MAX) return false;
    return t->shape[3] <= 1 || t->stride[3] == 1;
}

static bool all_have_rows(const dw__call *c) {
    const dw__tensor *lse = is_backward(c) ? &c->inputs[GIVEN_LSE] : &c->outputs[LSE];
    bool rows = has_rows(&c->inputs[Q]) && has_rows(&c->inputs[K]) && has_rows(&c->inputs[V]);
    if (is_backward(c))
        rows &= has_rows(&c->inputs[GIVEN_O]) && has_rows(&c->inputs[D_O]) &&
                has_rows(&c->outputs[DQ]) && has_rows(&c->outputs[DK]) && has_rows(&c->outputs[DV]);
    else
        rows &= has_rows(&c->outputs[O]);
    return rows && dw__tensor_is_contiguous(lse);
}

/* Whether the kernel of the mask's gradient can write it: the mask repeats along batch and heads alone. */
static bool has_pairs(const dw__call *c) {
    const dw__tensor *mask = &c->inputs[MASK], *gradient = &c->outputs[DMASK];
    return mask->shape[2] == c->inputs[Q].shape[2] && mask->shape[3] == c->inputs[K].shape[2] &&
           (gradient->shape[3] <= 1 || gradient->stride[3] == 1);
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__operation_call *given = call;
    const dw__call *c = &given->call;
    size_t used;
    DW_RETURN_IF_FAILED(dw__gpu_kernel_computes(kernel, c, gpu));
    if (c->inputs[Q].shape[2] == 0 || c->inputs[K].shape[2] == 0)
        return dw__fail(DW_UNSUPPORTED, "%s: expected at least one query and one key",
                        kernel->name);
    if (c->inputs[V].shape[3] != c->inputs[Q].shape[3])
        return dw__fail(DW_UNSUPPORTED, "%s: expected v with the head dimension of q",
                        kernel->name);
    if (c->inputs[MASK].rank >= 0 && c->inputs[MASK].shape[3] > 1 && c->inputs[MASK].stride[3] != 1)
        return dw__fail(DW_UNSUPPORTED, "%s: expected a mask with adjacent keys", kernel->name);
    if (sums_mask(c) && !has_pairs(c))
        return dw__fail(DW_UNSUPPORTED,
                        "%s: expected a mask with queries and keys of its own, whose gradient has "
                        "adjacent keys",
                        kernel->name);
    if (dw__call_int(c, DW_ATTR_KEY_WINDOW, -1) == 0)
        return dw__fail(DW_UNSUPPORTED, "%s: window is 0, which leaves no key; expected 1 or more",
                        kernel->name);
    if (dw__call_float(c, DW_ATTR_KEY_P, 0.0) > 0.0 && !dw__tensor_is_contiguous(&c->inputs[SEED]))
        return dw__fail(DW_UNSUPPORTED, "%s: expected a contiguous seed", kernel->name);
    if (!all_have_rows(c))
        return dw__fail(DW_UNSUPPORTED,
                        "%s: expected contiguous rows of q, k, v, o and their gradients, and a "
                        "contiguous lse",
                        kernel->name);
    const dw_attention a = dw__graph_attention_call(given, &used);
    const dw__kernel *by = kernel_of(c, gpu->capability);
    if (!dw__gpu_is_rtx_blackwell(gpu->capability)) return by->supports(by, &a, gpu);
    /* A program that runs the engine there has asked for kernels that have not run on hardware. Primitives compute the
     * call if the first-use check refuses them. */
    DW_RETURN_IF_FAILED(dw__attention_check(&a, pass_of(c), false));
    DW_RETURN_IF_FAILED(dw__attention_check_kernel(&a, pass_of(c), gpu->capability));
    if (!gpu->context || gpu->context->plans_only) return DW_OK;
    return dw__gpu_kernel_runs(by, &a, gpu->context);
}

static void seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                    dw__kernel_seconds *result) {
    const dw__operation_call *given = call;
    const dw__kernel *by = kernel_of(&given->call, gpu->capability);
    size_t used;
    const dw_attention a = dw__graph_attention_call(given, &used);
    (void)kernel;
    by->seconds(by, &a, gpu, result);
}

static dw_status workspace_bytes(const dw__kernel *kernel, const void *call,
                                 const dw__context *context, size_t *bytes) {
    const dw__operation_call *given = call;
    const dw__kernel *by = kernel_of(&given->call, context->capability);
    size_t used, own = 0;
    const dw_attention a = dw__graph_attention_call(given, &used);
    (void)kernel;
    if (by->workspace_bytes) DW_RETURN_IF_FAILED(by->workspace_bytes(by, &a, context, &own));
    *bytes = used + own;
    return DW_OK;
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__operation_call *given = call;
    const dw__kernel *by = kernel_of(&given->call, context->capability);
    size_t used;
    const dw_attention a = dw__graph_attention_call(given, &used);
    (void)kernel;
    return by->prepare(by, &a, context, variant);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    size_t used;
    const dw_attention a = dw__graph_attention_call(call, &used);
    return variant->kernel->enqueue(&a, context, variant);
}

/* No first-use check: the kernels that they call have theirs. */
#define GRAPH_ATTENTION                                                                            \
    .backend = "deepwell", .kind = DW__CALL_OPERATION, .proof = DW__RUN_ON_HOPPER,                 \
    .source = "src/kernel/cuda/graph_attention.c", .elements = "BF16, F16",                        \
    .needs =                                                                                       \
        "what the attention kernels of the GPU need; the gradient of a mask with all queries "     \
        "and keys",                                                                                \
    .supports = supports, .seconds = seconds, .workspace_bytes = workspace_bytes,                  \
    .prepare = prepare, .enqueue = enqueue, .results = DW__RESULTS_STRIDED,                        \
    .tolerance = DW__ATTENTION_TOLERANCE

const dw__kernel dw__graph_attention = {
    GRAPH_ATTENTION,
    .name = "attention",
    .op = DW_OP_ATTENTION,
    .operation = "attention forward",
    .architectures = DW__GPU_ARCHITECTURES,
};
const dw__kernel dw__graph_attention_backward = {
    GRAPH_ATTENTION,
    .name = "attention_backward",
    .op = DW_OP_ATTENTION_BACKWARD,
    .operation = "attention backward",
    .architectures = "sm_90a (H100, H200), sm_120a (RTX 50, RTX PRO)",
};
