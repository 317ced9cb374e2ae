/* Attention in F32 without the S x S matrix: operands, division into tasks for the pool, kernels. */
#include "kernel/cpu/cpu_attention.h"
#include "base/pool.h"

DW_ISA_TABLE(dw__attention_loops)

enum { TILE = DW_ATTENTION_QUERIES * DW_ATTENTION_KEYS };

size_t dw__attention_forward_floats(const dw__attention *a) {
    return (size_t)((a->head_size + a->value_size) * DW_ATTENTION_QUERIES + 2 * TILE);
}

size_t dw__attention_backward_floats(const dw__attention *a) {
    int tiles = a->softcap > 0.0f ? 5 : 4;
    return (size_t)((a->head_size + a->value_size) * DW_ATTENTION_QUERIES + tiles * TILE);
}

/* ---- operands ---------------------------------------------------------------------------------- */

static bool has_rows(const dw__tensor *t) {
    return t->dtype == DW_F32 && t->rank == 4 && t->shape[3] <= DW_ATTENTION_HEAD_MAX &&
           (t->shape[3] <= 1 || t->stride[3] == 1);
}

static dw__attention_rows rows_of(const dw__tensor *t) {
    return (dw__attention_rows){t->data, t->stride[0], t->stride[1], t->stride[2]};
}

static bool read_mask(const dw__tensor *mask, dw__attention *out) {
    if (mask->rank < 0) return true;
    if (mask->rank != 4 || (mask->dtype != DW_F32 && mask->dtype != DW_BOOL)) return false;
    out->mask = mask->data;
    out->mask_is_bool = mask->dtype == DW_BOOL;
    for (int axis = 0; axis < 4; axis++) {
        out->mask_stride[axis] = mask->shape[axis] == 1 ? 0 : mask->stride[axis];
    }
    return true;
}

static bool read_dropout(const dw__call *call, dw__attention *out) {
    const dw__tensor *seed = &call->inputs[4];
    out->p = (float)dw__call_float(call, DW_ATTR_KEY_P, 0.0);
    if (out->p == 0.0f) return true;
    if (seed->rank != 1 || seed->dtype != DW_I64 || out->p >= 1.0f) return false;
    out->stream = dw__call_int(call, DW_ATTR_KEY_STREAM, 0);
    if (seed->data) {
        const int64_t *data = seed->data;
        out->seed[0] = data[0];
        out->seed[1] = data[seed->stride[0]];
    }
    return true;
}

/* Reads what forward and backward share: inputs 0 to 4 and the attributes. */
static bool read_common(const dw__call *call, dw__attention *out) {
    const dw__tensor *q = &call->inputs[0], *k = &call->inputs[1], *v = &call->inputs[2];
    *out = (dw__attention){0};
    if (!has_rows(q) || !has_rows(k) || !has_rows(v)) return false;
    out->batches = q->shape[0];
    out->heads = q->shape[1];
    out->queries = q->shape[2];
    out->head_size = q->shape[3];
    out->key_heads = k->shape[1];
    out->keys = k->shape[2];
    out->value_size = v->shape[3];
    out->q = rows_of(q);
    out->k = rows_of(k);
    out->v = rows_of(v);
    out->scale = (float)dw__call_float(call, DW_ATTR_KEY_SCALE, 1.0);
    out->softcap = (float)dw__call_float(call, DW_ATTR_KEY_SOFTCAP, 0.0);
    int64_t causal = dw__call_int(call, DW_ATTR_KEY_CAUSAL, 0);
    out->causal = causal != 0;
    out->shift = causal == 2 ? out->keys - out->queries : 0;
    out->window = dw__call_int(call, DW_ATTR_KEY_WINDOW, -1);
    return read_mask(&call->inputs[3], out) && read_dropout(call, out);
}

static bool read_lse(const dw__tensor *lse, dw__attention *out) {
    if (lse->dtype != DW_F32 || lse->rank != 3) return false;
    out->lse = (dw__attention_rows){lse->data, lse->stride[0], lse->stride[1], lse->stride[2]};
    return true;
}

static bool read_forward(const dw__call *call, dw__attention *out) {
    if (!read_common(call, out) || !has_rows(&call->outputs[0])) return false;
    out->o = rows_of(&call->outputs[0]);
    return read_lse(&call->outputs[1], out);
}

static bool read_backward(const dw__call *call, dw__attention *out) {
    if (!read_common(call, out) || !read_lse(&call->inputs[6], out)) return false;
    if (dw__call_int(call, DW_ATTR_KEY_MASK_GRADIENT, 0)) return false;
    if (!has_rows(&call->inputs[5]) || !has_rows(&call->inputs[7])) return false;
    for (int i = 0; i < 3; i++) {
        if (!has_rows(&call->outputs[i])) return false;
    }
    out->o = rows_of(&call->inputs[5]);
    out->d_o = rows_of(&call->inputs[7]);
    out->dq = rows_of(&call->outputs[0]);
    out->dk = rows_of(&call->outputs[1]);
    out->dv = rows_of(&call->outputs[2]);
    return true;
}

static dw_status misfit(const char *kernel) {
    return dw__fail(DW_INTERNAL, "%s does not support this call", kernel);
}

static int64_t blocks_of(int64_t extent, int64_t block) { return (extent + block - 1) / block; }

/* Rounds up to whole cache lines, so that workers do not share one. */
static size_t per_worker(size_t floats) { return (floats + 15) / 16 * 16; }

typedef struct job {
    dw__attention attention;
    const dw__attention_loops *loops;
    float *scratch;
    size_t floats; /* floats of scratch per worker */
} job;

/* ---- forward ----------------------------------------------------------------------------------- */

static dw_status forward_supports(const dw__kernel *kernel, const void *given,
                                  const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    dw__attention a;
    return read_forward(call, &a) ? DW_OK : dw__kernel_refuse(kernel);
}

static dw_status forward_scratch(const dw__kernel *kernel, const void *given,
                                 const dw__context *context, size_t *bytes) {
    const dw__call *call = given;
    (void)kernel, (void)context;
    dw__attention a;
    if (!read_forward(call, &a)) return DW_OK;
    *bytes =
        (size_t)dw__pool_threads() * per_worker(dw__attention_forward_floats(&a)) * sizeof(float);
    return DW_OK;
}

static void forward_task(void *context, int64_t index, int worker) {
    const job *j = context;
    const dw__attention *a = &j->attention;
    int64_t blocks = blocks_of(a->queries, DW_ATTENTION_QUERIES);
    /* Under a causal mask the last block has the most keys, so it starts first. */
    int64_t block = blocks - 1 - index % blocks, head = index / blocks % a->heads;
    j->loops->forward(a, index / blocks / a->heads, head, block * DW_ATTENTION_QUERIES,
                      j->scratch + (size_t)worker * j->floats);
}

static dw_status forward_run(const dw__call *call, void *scratch) {
    job j = {.loops = dw__attention_loops_now(), .scratch = scratch};
    if (!read_forward(call, &j.attention)) return misfit("cpu.attention.tiled");
    const dw__attention *a = &j.attention;
    j.floats = per_worker(dw__attention_forward_floats(a));
    int64_t blocks = blocks_of(a->queries, DW_ATTENTION_QUERIES);
    dw__pool_run(a->batches * a->heads * blocks, forward_task, &j);
    return DW_OK;
}

/* ---- backward ---------------------------------------------------------------------------------- */

static dw_status backward_supports(const dw__kernel *kernel, const void *given,
                                   const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    dw__attention a;
    return read_backward(call, &a) ? DW_OK : dw__kernel_refuse(kernel);
}

static dw_status backward_scratch(const dw__kernel *kernel, const void *given,
                                  const dw__context *context, size_t *bytes) {
    const dw__call *call = given;
    (void)kernel, (void)context;
    dw__attention a;
    if (!read_backward(call, &a)) return DW_OK;
    *bytes =
        (size_t)dw__pool_threads() * per_worker(dw__attention_backward_floats(&a)) * sizeof(float);
    return DW_OK;
}

/* Computes all three gradients of one (batch, key head): five matmuls per tile. */
static void whole_head_task(void *context, int64_t index, int worker) {
    const job *j = context;
    const dw__attention *a = &j->attention;
    int64_t key_head = index % a->key_heads, group = a->heads / a->key_heads;
    dw__attention_part part = {
        .batch = index / a->key_heads,
        .key_head = key_head,
        .head = key_head * group,
        .head_end = (key_head + 1) * group,
        .query_end = a->queries,
        .key_end = a->keys,
        .wants_dq = true,
        .wants_dkv = true,
    };
    j->loops->backward(a, &part, j->scratch + (size_t)worker * j->floats);
}

/* Computes dk and dv of one block of keys. */
static void key_block_task(void *context, int64_t index, int worker) {
    const job *j = context;
    const dw__attention *a = &j->attention;
    int64_t blocks = blocks_of(a->keys, DW_ATTENTION_KEYS), group = a->heads / a->key_heads;
    int64_t key = index % blocks * DW_ATTENTION_KEYS; /* causal: the first has the most queries */
    int64_t key_head = index / blocks % a->key_heads;
    int64_t key_end = key + DW_ATTENTION_KEYS;
    dw__attention_part part = {
        .batch = index / blocks / a->key_heads,
        .key_head = key_head,
        .head = key_head * group,
        .head_end = (key_head + 1) * group,
        .query_end = a->queries,
        .key = key,
        .key_end = key_end < a->keys ? key_end : a->keys,
        .wants_dkv = true,
    };
    j->loops->backward(a, &part, j->scratch + (size_t)worker * j->floats);
}

/* Computes dq of one block of queries. */
static void query_block_task(void *context, int64_t index, int worker) {
    const job *j = context;
    const dw__attention *a = &j->attention;
    int64_t blocks = blocks_of(a->queries, DW_ATTENTION_QUERIES);
    int64_t query = (blocks - 1 - index % blocks) * DW_ATTENTION_QUERIES;
    int64_t head = index / blocks % a->heads;
    int64_t query_end = query + DW_ATTENTION_QUERIES;
    dw__attention_part part = {
        .batch = index / blocks / a->heads,
        .key_head = head / (a->heads / a->key_heads),
        .head = head,
        .head_end = head + 1,
        .query = query,
        .query_end = query_end < a->queries ? query_end : a->queries,
        .key_end = a->keys,
        .wants_dq = true,
    };
    j->loops->backward(a, &part, j->scratch + (size_t)worker * j->floats);
}

/* Two passes cost seven matmuls per tile instead of five. They pay if whole heads would leave threads idle
 * for longer than that. Both give the same bits. */
static bool wants_two_passes(const dw__attention *a) {
    int64_t tasks = a->batches * a->key_heads, threads = dw__pool_threads();
    return blocks_of(tasks, threads) * threads * 5 > tasks * 7;
}

static dw_status backward_run(const dw__call *call, void *scratch) {
    job j = {.loops = dw__attention_loops_now(), .scratch = scratch};
    if (!read_backward(call, &j.attention)) return misfit("cpu.attention_backward.tiled");
    const dw__attention *a = &j.attention;
    j.floats = per_worker(dw__attention_backward_floats(a));
    if (!wants_two_passes(a)) {
        dw__pool_run(a->batches * a->key_heads, whole_head_task, &j);
        return DW_OK;
    }
    if (a->dk.data || a->dv.data) {
        int64_t blocks = blocks_of(a->keys, DW_ATTENTION_KEYS);
        dw__pool_run(a->batches * a->key_heads * blocks, key_block_task, &j);
    }
    if (a->dq.data) {
        int64_t blocks = blocks_of(a->queries, DW_ATTENTION_QUERIES);
        dw__pool_run(a->batches * a->heads * blocks, query_block_task, &j);
    }
    return DW_OK;
}

/* ---- kernels ------------------------------------------------------------------------------------ */

const dw__kernel dw__attention_tiled = {
    .name = "cpu.attention.tiled",
    .op = DW_OP_ATTENTION,
    .source = "ours, C with vector extensions",
    .needs = "F32 with contiguous rows",
    .supports = forward_supports,
    .workspace_bytes = forward_scratch,
    .run = forward_run,
    .results = DW__RESULTS_STRIDED,
    .tolerance_factor = 8.0, /* two matmuls, an exponential and a correction per tile */
};
const dw__kernel dw__attention_backward_tiled = {
    .name = "cpu.attention_backward.tiled",
    .op = DW_OP_ATTENTION_BACKWARD,
    .source = "ours, C with vector extensions",
    .needs = "F32 with contiguous rows; no gradient of the mask",
    .supports = backward_supports,
    .workspace_bytes = backward_scratch,
    .run = backward_run,
    .results = DW__RESULTS_STRIDED,
    .tolerance_factor = 16.0, /* and three more matmuls of their results */
};

const dw__kernel *const dw__kernels_cpu_attention[] = {
    &dw__attention_tiled, &dw__attention_backward_tiled, &dw__attention_widened,
    &dw__attention_backward_widened, NULL};
