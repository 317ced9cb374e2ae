/* Attention of a graph, by the attention kernels (attention.c): their call is made from the operation's.
 *
 * The kernels' statistics are F32, the graph's have the type of q. The kernel writes them to the workspace, and they are
 * rounded from there if the graph reads them. The kernels also need room for o, so the workspace has it if the graph
 * reads the statistics alone. Gradients in BF16 and F16 are computed in F32 (op_gradient_composite.c), which no
 * attention kernel supports, so this entry is for forward.
 */
#include "kernel/cuda/gpu_attention.h"
#include "kernel/cuda/gpu_kernels.h"
#include <stdatomic.h>

/* Inputs and results of the operation (deepwell/ops.h). */
enum { Q, K, V, MASK, SEED };
enum { O, LSE };

/* The programs that round statistics to BF16 and F16; set when the first variant is prepared. */
static _Atomic uint64_t rounding_program[2];

/* ---- the kernels' call ------------------------------------------------------------------------------- */

static dw_attention_tensor tensor_of(const dw__tensor *t) {
    return (dw_attention_tensor){t->data, t->stride[0], t->stride[1], t->stride[2]};
}

/* The operation's window counts the query's own key, the kernels' window_left does not. A window that is longer than any
 * sequence has no limit. */
static void set_mask(const dw__call *c, dw_attention *a) {
    const int64_t causal = dw__call_int(c, DW_ATTR_KEY_CAUSAL, 0),
                  window = dw__call_int(c, DW_ATTR_KEY_WINDOW, -1);
    a->window_left = window < 0 || window > INT32_MAX ? -1 : (int32_t)(window - 1);
    a->window_right = causal ? 0 : -1;
    a->bottom_right = causal == 2;
}

/* The workspace: the statistics in F32, then o if the graph does not read it. */
static size_t lse_bytes(const dw__call *c) {
    const size_t bytes = (size_t)dw__tensor_count(&c->outputs[LSE]) * sizeof(float);
    return (bytes + 255) / 256 * 256;
}

static dw_attention call_of(const dw__operation_call *given) {
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
        .o = tensor_of(&c->outputs[O]),
        .lse = given->workspace,
        .stream = given->stream,
    };
    if (!a.o.data && given->workspace) a.o.data = (char *)given->workspace + lse_bytes(c);
    if (a.dropout > 0.0f) a.seed_memory = c->inputs[SEED].data;
    set_mask(c, &a);
    return a;
}

/* The call that rounds the statistics to the graph's type. */
static dw__operation_call rounding_of(const dw__operation_call *given) {
    static const dw_attr types[] = {{.key = DW_ATTR_KEY_DTYPE, .integer = DW_BF16},
                                    {.key = DW_ATTR_KEY_DTYPE, .integer = DW_F16}};
    const dw__tensor *lse = &given->call.outputs[LSE];
    const int64_t count = dw__tensor_count(lse);
    const dw__tensor from = {
        .data = given->workspace, .dtype = DW_F32, .rank = 1, .shape = {count}, .stride = {1}};
    const dw__tensor to = {
        .data = lse->data, .dtype = lse->dtype, .rank = 1, .shape = {count}, .stride = {1}};
    return (dw__operation_call){.call = {.op = DW_OP_CAST,
                                         .attr_count = 1,
                                         .attrs = &types[lse->dtype == DW_F16],
                                         .input_count = 1,
                                         .output_count = 1,
                                         .inputs = {from},
                                         .outputs = {to}},
                                .stream = given->stream};
}

static const dw__gpu_kernel *forward_kernel(int capability) {
    return capability == 90 ? &dw__sm90_attention_forward : &dw__sm100_attention_forward;
}

/* ---- the entry ----------------------------------------------------------------------------------------- */

static bool has_rows(const dw__tensor *t) {
    for (int axis = 0; axis < t->rank; axis++)
        if (t->shape[axis] > INT32_MAX) return false;
    return t->shape[3] <= 1 || t->stride[3] == 1;
}

static dw_status supports(const dw__gpu_kernel *kernel, const void *call,
                          const dw__gpu_target *gpu) {
    const dw__operation_call *given = call;
    const dw__call *c = &given->call;
    if (c->op != DW_OP_ATTENTION) return dw__gpu_wrong_operation(kernel, c);
    DW_RETURN_IF_FAILED(dw__gpu_kernel_computes(kernel, c, gpu));
    if (c->inputs[K].shape[2] == 0)
        return dw__fail(DW_UNSUPPORTED, "%s: expected at least one key", kernel->name);
    if (c->inputs[MASK].rank >= 0 || c->inputs[V].shape[3] != c->inputs[Q].shape[3])
        return dw__fail(DW_UNSUPPORTED, "%s: expected no mask, and v with the head dimension of q",
                        kernel->name);
    if (dw__call_int(c, DW_ATTR_KEY_WINDOW, -1) == 0)
        return dw__fail(DW_UNSUPPORTED, "%s: window is 0, which leaves no key; expected 1 or more",
                        kernel->name);
    if (dw__call_float(c, DW_ATTR_KEY_P, 0.0) > 0.0 &&
        (dw__call_int(c, DW_ATTR_KEY_STREAM, 0) != 0 ||
         !dw__tensor_is_contiguous(&c->inputs[SEED])))
        return dw__fail(DW_UNSUPPORTED, "%s: expected dropout of stream 0 and a contiguous seed",
                        kernel->name);
    if (!has_rows(&c->inputs[Q]) || !has_rows(&c->inputs[K]) || !has_rows(&c->inputs[V]) ||
        !has_rows(&c->outputs[O]) || !dw__tensor_is_contiguous(&c->outputs[LSE]))
        return dw__fail(DW_UNSUPPORTED, "%s: expected contiguous rows of q, k, v and o",
                        kernel->name);
    const dw_attention a = call_of(given);
    const dw__gpu_kernel *forward = forward_kernel(gpu->capability);
    return forward->supports(forward, &a, gpu);
}

static dw_status workspace_bytes(const dw__gpu_kernel *kernel, const void *call,
                                 const dw__context *context, size_t *bytes) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    (void)kernel, (void)context;
    *bytes = lse_bytes(c) + (c->outputs[O].data ? 0 : dw__tensor_bytes(&c->outputs[O]));
    return DW_OK;
}

static dw_status prepare(const dw__gpu_kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__gpu_kernel *forward = forward_kernel(context->capability);
    const dw_attention a = call_of(call);
    const dw__operation_call rounding = rounding_of(call);
    const dw__variant *program;
    (void)kernel;
    DW_RETURN_IF_FAILED(
        dw__gpu_elementwise.prepare(&dw__gpu_elementwise, &rounding, context, &program));
    atomic_store(&rounding_program[a.dtype == DW_F16], program->params);
    return forward->prepare(forward, &a, context, variant);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__operation_call *given = call;
    const dw_attention a = call_of(given);
    const dw__variant *program;
    DW_RETURN_IF_FAILED(forward_kernel(context->capability)->enqueue(&a, context, variant));
    if (!given->call.outputs[LSE].data) return DW_OK;
    const dw__operation_call rounding = rounding_of(given);
    const uint64_t number = atomic_load(&rounding_program[a.dtype == DW_F16]);
    DW_RETURN_IF_FAILED(dw__variant_of(context, &dw__gpu_elementwise, number, &program));
    return dw__gpu_elementwise.enqueue(&rounding, context, program);
}

const dw__gpu_kernel dw__graph_attention = {
    .name = "attention",
    .backend = "deepwell",
    .op = DW__GPU_OPERATION,
    .proof = DW__PROVEN_ON_EMULATOR,
    .operation = "attention forward",
    .source = "src/kernel/cuda/graph_attention.c",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "BF16, F16",
    .needs = "no mask but causal and windows; what the attention kernels of the GPU need",
    .supports = supports,
    .workspace_bytes = workspace_bytes,
    .prepare = prepare,
    .enqueue = enqueue,
    /* No first-use check: the kernels that it calls have theirs. */
    .tolerance = DW__ATTENTION_TOLERANCE,
};
