/* Rope of queries and the attention behind it as one launch on Hopper (sm90/attention_rotate.cuh): a call of rope whose
 * epilogue is attention, of which the rotated rows are q.
 *
 * Results have the bits of two launches. What it saves is the pass over the queries, or, where backward needs the rotated
 * rows, reading them twice.
 */
#include "kernel/cuda/gpu_attention.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/rope.h"
#include <string.h>

/* Operands of attention. */
enum { Q, K, V };

enum {
    VECTOR = 8 /* elements of 16 bytes */,
    LEAST_QUERIES = 1024 /* the fewest that were measured */
};

/* ---- the call --------------------------------------------------------------------------------------- */

static bool each_batch(const dw__tensor *table) { return table->shape[0] > 1; }

/* True if TMA can read a table that has a row for each query of x. */
static bool is_table(const dw__tensor *t, const dw__tensor *x) {
    return t->rank == 4 && (t->shape[0] == 1 || t->shape[0] == x->shape[0]) && t->shape[1] == 1 &&
           t->shape[2] == x->shape[2] && t->shape[3] == x->shape[3] && t->stride[3] == 1 &&
           t->stride[2] > 0 && t->stride[2] % VECTOR == 0 &&
           (!each_batch(t) || (t->stride[0] > 0 && t->stride[0] % VECTOR == 0)) &&
           (uintptr_t)t->data % 16 == 0;
}

static dw_attention_tensor rows_of(const dw__tensor *t) {
    return (dw_attention_tensor){t->data, t->stride[0], t->stride[1], t->stride[2]};
}

/* True if rotated rows may be stored there, 16 bytes at a time. */
static bool is_stored(const dw__tensor *y) {
    return y->stride[3] == 1 && (y->stride[0] | y->stride[1] | y->stride[2]) % VECTOR == 0 &&
           y->stride[2] >= 0 && y->stride[2] <= INT32_MAX / 256 && (uintptr_t)y->data % 16 == 0;
}

/* The attention with the unrotated rows as its q. The first-use check has none: the rows are queries, keys and values, and
 * the workspace receives the result. */
static dw__rotated_attention call_of(const dw__operation_call *given, size_t *used) {
    const dw__call *rope = &given->call;
    const dw__tensor *x = &rope->inputs[DW_ROPE_X], *cosines = &rope->inputs[DW_ROPE_COS],
                     *y = &rope->outputs[0];
    dw__operation_call attention = *given;
    if (rope->epilogue)
        attention.call = *rope->epilogue;
    else
        attention.call = (dw__call){.op = DW_OP_ATTENTION,
                                    .input_count = 5,
                                    .output_count = 2,
                                    .inputs = {*x, *x, *x, {.rank = -1}, {.rank = -1}},
                                    .outputs = {*y, {.rank = 3}}};
    attention.call.inputs[Q] = *x;
    if (!rope->epilogue) attention.call.outputs[0].data = NULL;
    return (dw__rotated_attention){
        .call = dw__graph_attention_call(&attention, used),
        .rotation = {.rotated = {y->data, y->stride[0], y->stride[1], y->stride[2]},
                     .batches = each_batch(cosines)},
        .cosines = rows_of(cosines),
        .sines = rows_of(&rope->inputs[DW_ROPE_SIN])};
}

static dw__attention_shape shape_of(const dw__rotated_attention *r, int sm_count) {
    dw__attention_shape shape = dw__attention_shape_of(&r->call, DW__ATTENTION_FORWARD, sm_count);
    shape.rotates = true;
    return shape;
}

/* ---- the entry -------------------------------------------------------------------------------------- */

bool dw__may_rotate_queries(const dw__tensor *q, const dw__gpu_target *gpu) {
    return gpu->capability == 90 && q->rank == 4 && dw__dtype_is_half(q->dtype) &&
           (q->shape[3] == 64 || q->shape[3] == 128) && q->shape[2] >= LEAST_QUERIES &&
           dw__epilogues_wanted() == DW__EPILOGUES_ALL;
}

/* With more queries than keys a tile might see no key. The kernel skips such a tile, and its rows would not be stored. */
static bool computes(const dw__call *rope, const dw__gpu_target *gpu) {
    const dw__call *attention = rope->epilogue;
    const dw__tensor *x = &rope->inputs[DW_ROPE_X], *cosines = &rope->inputs[DW_ROPE_COS],
                     *sines = &rope->inputs[DW_ROPE_SIN];
    if (!attention || attention->op != DW_OP_ATTENTION || rope->replaced != Q || x->rank != 4 ||
        x->dtype != attention->inputs[K].dtype || !dw__may_rotate_queries(x, gpu) ||
        x->shape[2] > attention->inputs[K].shape[2] ||
        dw__call_int(rope, DW_ATTR_KEY_INTERLEAVED, 0) != 0 ||
        dw__call_int(rope, DW_ATTR_KEY_TRANSPOSED, 0) != 0)
        return false;
    return is_table(cosines, x) && is_table(sines, x) && each_batch(cosines) == each_batch(sines) &&
           is_stored(&rope->outputs[0]);
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__operation_call *given = call;
    size_t used;
    DW_RETURN_IF_FAILED(dw__gpu_kernel_computes(kernel, &given->call, gpu));
    if (gpu->capability != 90)
        return dw__fail(DW_TYPE, "%s is for %s, not for %s", kernel->name, kernel->architectures,
                        gpu->name);
    if (dw__epilogues_wanted() != DW__EPILOGUES_ALL)
        return dw__fail(DW_UNSUPPORTED, "%s: DEEPWELL_EPILOGUES is not \"all\"", kernel->name);
    if (!computes(&given->call, gpu)) return dw__kernel_refuse(kernel);
    dw__operation_call attention = *given;
    attention.call = *given->call.epilogue;
    attention.call.inputs[Q] = given->call.inputs[DW_ROPE_X];
    DW_RETURN_IF_FAILED(dw__graph_attention.supports(&dw__graph_attention, &attention, gpu));
    const dw__rotated_attention r = call_of(given, &used);
    const dw__attention_shape shape = shape_of(&r, gpu->sm_count);
    return !shape.window || shape.softcap || shape.dropout || shape.packed || shape.bias
               ? dw__kernel_refuse(kernel)
               : DW_OK;
}

static void seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                    dw__kernel_seconds *result) {
    size_t used;
    const dw__rotated_attention r = call_of(call, &used);
    (void)kernel;
    dw__attention_seconds(&dw__sm90_attention_forward, &r.call, gpu, result);
}

static dw_status workspace_bytes(const dw__kernel *kernel, const void *call,
                                 const dw__context *context, size_t *bytes) {
    (void)kernel, (void)context;
    (void)call_of(call, bytes);
    return DW_OK;
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    size_t used;
    const dw__rotated_attention r = call_of(call, &used);
    return dw__variant_of(context, kernel, shape_of(&r, context->sm_count).params, variant);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    size_t used;
    const dw__rotated_attention r = call_of(call, &used);
    return dw__sm90_attention_forward.enqueue(&r, context, variant);
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    const dw__attention_shape shape = {.params = params};
    (void)kernel;
    points->code = dw__attention_variant(&shape, DW__ATTENTION_FORWARD,
                                         dw__sm90_attention_forward.name, dw__gpu_arch(capability));
    points->shared_bytes = dw__attention_forward_bytes(&shape);
    return DW_OK;
}

/* Rows that end within a tile, several tiles for a block, and heads of tokens as projections lie. The check compares the
 * rotated rows; attention's own kernel has a check with the same code. */
static void example(uint64_t params, int index, dw__call *c) {
    const dw__attention_shape shape = {.params = params};
    const int64_t batch = 2, heads = 3, tokens = 300 + 100 * index, columns = shape.head_dim;
    const dw_dtype dtype = shape.f16 ? DW_F16 : DW_BF16;
    const dw__tensor x = {.dtype = dtype,
                          .rank = 4,
                          .shape = {batch, heads, tokens, columns},
                          .stride = {heads * tokens * columns, columns, heads * columns, 1}};
    dw__tensor table = {.dtype = dtype, .rank = 4, .shape = {1, 1, tokens, columns}}, y = x;
    dw__tensor_set_contiguous(&table);
    dw__tensor_set_contiguous(&y);
    *c = (dw__call){.op = DW_OP_ROPE,
                    .input_count = 3,
                    .output_count = 1,
                    .inputs = {x, table, table},
                    .outputs = {y}};
}

const dw__kernel dw__gpu_rotated_attention = {
    .name = "sm90_rope_attention",
    .op = DW_OP_ROPE,
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .proof = DW__MEASURED_ON_HARDWARE,
    .operation = "rotary position embedding and the attention of its result",
    .source = "cuda/sm90/attention_forward.cu",
    .architectures = "sm_90a (H100, H200)",
    .elements = "BF16, F16",
    .needs =
        "head dimension 64 or 128, whole heads rotated, at least 1024 queries and as many keys; "
        "a causal mask or a window; no other mask, soft cap or dropout",
    .supports = supports,
    .seconds = seconds,
    .workspace_bytes = workspace_bytes,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    .first_use = &dw__operation_first_use,
    .results = DW__RESULTS_STRIDED,
    .with_epilogue = true,
    .tolerance = "rope's, and then attention's",
    .example = example,
    .example_sms = 3,
    .tolerance_factor = 8.0,
};
