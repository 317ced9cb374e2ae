/* Attention on a GPU: variants, launch, kernels and the public calls.
 *
 * Between a call and its launches there is arithmetic only: no allocation, no lock, no synchronisation.
 */
#include "common/attention_backward_layout.h"
#include "kernel/cuda/gpu_attention.h"
#include "kernel/cuda/gpu_kernels.h"
#include "sm100/attention_forward_tiles.h"
#include "sm120/sm120_attention_tiles.h"
#include "sm90/attention_tiles.h"
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NO_LIMIT = 1 << 30 };
static const double log2_e = 1.4426950408889634;

/* Returns whether some row may be unable to see some key on that side. For packed sequences only the longest length is
 * known here. */
static bool limits_right(const dw_attention *c) {
    if (c->window_right < 0) return false;
    int64_t shift = c->bottom_right ? (int64_t)c->seq_len_kv - c->seq_len_q : 0;
    return c->offsets_q || shift + c->window_right < c->seq_len_kv - 1;
}

static bool limits_left(const dw_attention *c) {
    if (c->window_left < 0) return false;
    int64_t shift = c->bottom_right ? (int64_t)c->seq_len_kv - c->seq_len_q : 0;
    return c->offsets_q || c->seq_len_q - 1 + shift - c->window_left > 0;
}

/* ---- tensors ----------------------------------------------------------------------------------- */

const dw__attention_operand_kind dw__attention_operands[] = {
#define OPERAND(member) .name = #member, .offset = offsetof(dw_attention, member)
    [DW__ATTENTION_Q] = {OPERAND(q)},
    [DW__ATTENTION_K] = {OPERAND(k), .of_keys = true},
    [DW__ATTENTION_V] = {OPERAND(v), .of_keys = true},
    [DW__ATTENTION_O] = {OPERAND(o), .written = true},
    [DW__ATTENTION_D_O] = {OPERAND(d_o), .backward = true},
    [DW__ATTENTION_DQ] = {OPERAND(dq), .backward = true, .written = true},
    [DW__ATTENTION_DK] = {OPERAND(dk), .backward = true, .written = true, .of_keys = true},
    [DW__ATTENTION_DV] = {OPERAND(dv), .backward = true, .written = true, .of_keys = true},
#undef OPERAND
};

dw__attention_extent dw__attention_extent_of(const dw_attention *c, dw__attention_operand which) {
    const bool of_keys = dw__attention_operands[which].of_keys, packed = c->offsets_q != NULL;
    return (dw__attention_extent){
        .batch = packed ? 1 : c->batch,
        .heads = of_keys ? c->heads_kv : c->heads_q,
        .rows = packed    ? (of_keys ? c->total_k : c->total_q)
                : of_keys ? c->seq_len_kv
                          : c->seq_len_q,
    };
}

size_t dw__attention_lay_out(dw_attention *c, dw__attention_operand which, bool rows_first) {
    const dw__attention_extent x = dw__attention_extent_of(c, which);
    dw_attention_tensor *t = dw__attention_tensor(c, which);
    t->row = rows_first ? x.heads * c->head_dim : c->head_dim;
    t->head = rows_first ? c->head_dim : x.rows * c->head_dim;
    t->batch = x.heads * x.rows * c->head_dim;
    return (size_t)(x.batch * t->batch) * dw_dtype_bytes(c->dtype);
}

/* ---- tiles ------------------------------------------------------------------------------------- */

#define WIDE(head_dim) (((head_dim) + 63) / 64 * 64) /* columns of a row in shared memory */
#define ALIGNED(bytes) (((bytes) + 127) / 128 * 128)
#define FORWARD_SHARED(d, m, n, stages) (2 * WIDE(d) * ((m) + 2 * (stages) * (n)) + 1024 + 256)

#define FORWARD_TILE(bytes, d, windowed, least_keys, tile_m, tile_n, kv_stages, groups)            \
    {.head_dim = d,                                                                                \
     .window = windowed,                                                                           \
     .keys = least_keys,                                                                           \
     .m = tile_m,                                                                                  \
     .n = tile_n,                                                                                  \
     .stages = kv_stages,                                                                          \
     .consumers = groups,                                                                          \
     .shared_bytes = bytes(d, tile_m, tile_n, kv_stages)},
static const dw__attention_tile forward_tiles[] = {
#define ROW(...) FORWARD_TILE(FORWARD_SHARED, __VA_ARGS__)
    DW_SM90_FORWARD_TILES(ROW)
#undef ROW
};
static const dw__attention_tile blackwell_tiles[] = {
#define ROW(...) FORWARD_TILE(DW_SM100_FORWARD_SHARED_BYTES, __VA_ARGS__)
    DW_SM100_FORWARD_TILES(ROW)
#undef ROW
};

static const dw__attention_tile rtx_tiles[] = {
#define ROW(...) FORWARD_TILE(DW_SM120_FORWARD_SHARED_BYTES, __VA_ARGS__)
    DW_SM120_FORWARD_TILES(ROW)
#undef ROW
};
static const dw__attention_tile rtx_backward_tiles[] = {
#define ROW(...) FORWARD_TILE(DW_SM120_BACKWARD_SHARED_BYTES, __VA_ARGS__)
    DW_SM120_BACKWARD_TILES(ROW)
#undef ROW
};

static const dw__attention_tile backward_tiles[] = {
#define ROW(d, windowed, tile_m, tile_n, q_stages, do_stages, groups, most_rows)                   \
    {.head_dim = d,                                                                                \
     .window = windowed,                                                                           \
     .m = tile_m,                                                                                  \
     .n = tile_n,                                                                                  \
     .stages = q_stages,                                                                           \
     .stages_do = do_stages,                                                                       \
     .consumers = groups,                                                                          \
     .serial_rows = most_rows,                                                                     \
     .shared_bytes = DW_BACKWARD_SHARED(d, tile_m, tile_n, q_stages, do_stages)},
    DW_SM90_BACKWARD_TILES(ROW)
#undef ROW
};

/* If the scale is 0, every score is 0, with or without a soft cap. */
static bool caps(const dw_attention *c) { return c->softcap > 0.0f && c->scale > 0.0f; }

/* DEEPWELL_SERIAL=0 disables the serial kernel and 1 always uses it, to measure which is faster. Returns -1 if it is
 * not set. */
static _Atomic int serial_setting = -2;
static int forced_serial(void) {
    int setting = atomic_load_explicit(&serial_setting, memory_order_relaxed);
    if (setting != -2) return setting;
    const char *text = getenv("DEEPWELL_SERIAL");
    setting = text && (strcmp(text, "0") == 0 || strcmp(text, "1") == 0) ? *text - '0' : -1;
    atomic_store_explicit(&serial_setting, setting, memory_order_relaxed);
    return setting;
}

/* A thread block that processes all keys of a head keeps its dQ accumulators to itself, so nothing is zeroed, added
 * atomically or copied at the end. This pays if heads fill the GPU and have few rows, so that the accumulators stay in
 * the cache. */
static bool is_serial(const dw_attention *c, const dw__attention_shape *shape, int sm_count) {
    const double least_filled = 0.8;
    int64_t heads = (int64_t)c->batch * c->heads_kv;
    if (sm_count < 1 || heads < 1) return false;
    if (forced_serial() >= 0) return forced_serial() == 1;
    int64_t rounds = (heads + sm_count - 1) / sm_count;
    const dw__attention_tile *tile = dw__attention_tile_of(shape, DW__ATTENTION_BACKWARD);
    return tile && (double)heads >= least_filled * (double)(rounds * sm_count) &&
           (int64_t)c->seq_len_q * (c->heads_q / c->heads_kv) <= tile->serial_rows;
}

dw__attention_shape dw__attention_shape_of(const dw_attention *call, dw__attention_pass pass,
                                           int sm_count) {
    static const int head_dims[] = {64, 96, 128, 192, 256};
    dw__attention_shape shape = {
        .f16 = call->dtype == DW_F16,
        .softcap = caps(call),
        .dropout = call->dropout > 0.0f,
        .packed = call->offsets_q != NULL,
        .window = limits_right(call) || limits_left(call),
        .bias = call->bias_kind,
        .deterministic = pass == DW__ATTENTION_BACKWARD && call->deterministic,
    };
    for (size_t i = DW_COUNT(head_dims); i > 0; i--)
        if (call->head_dim <= head_dims[i - 1]) shape.head_dim = head_dims[i - 1];
    for (size_t i = 0; i < DW_COUNT(forward_tiles) && pass == DW__ATTENTION_FORWARD; i++)
        if (forward_tiles[i].head_dim == shape.head_dim && forward_tiles[i].keys > 0 &&
            forward_tiles[i].window == shape.window && !shape.bias)
            shape.many_keys = call->seq_len_kv >= forward_tiles[i].keys;
    if (pass == DW__ATTENTION_BACKWARD && is_serial(call, &shape, sm_count)) {
        shape.serial = true;
        shape.deterministic = false; /* the kernel itself is deterministic */
    }
    return shape;
}

const dw__attention_tile *dw__attention_tile_of(const dw__attention_shape *shape,
                                                dw__attention_pass pass) {
    bool backward = pass == DW__ATTENTION_BACKWARD;
    const dw__attention_tile *tiles = backward ? backward_tiles : forward_tiles;
    size_t count = backward ? DW_COUNT(backward_tiles) : DW_COUNT(forward_tiles);
    if (shape->blackwell) { /* the GPU has no backward kernel */
        if (backward) return NULL;
        tiles = blackwell_tiles, count = DW_COUNT(blackwell_tiles);
    }
    if (shape->rtx) {
        tiles = backward ? rtx_backward_tiles : rtx_tiles;
        count = backward ? DW_COUNT(rtx_backward_tiles) : DW_COUNT(rtx_tiles);
    }
    /* A bias takes the tiles with the most registers to spare: those of a window with few keys. */
    const bool windowed = shape->window || (shape->bias && !backward);
    const bool many_keys = shape->many_keys && !shape->bias;
    for (size_t i = 0; i < count; i++)
        if (tiles[i].head_dim == shape->head_dim && tiles[i].window == windowed &&
            (tiles[i].keys == 0 || many_keys))
            return &tiles[i];
    return NULL;
}

unsigned dw__attention_forward_bytes(const dw__attention_shape *shape) {
    const dw__attention_tile *t = dw__attention_tile_of(shape, DW__ATTENTION_FORWARD);
    const int rows = (DW_ROTATE_QUERY_BUFFERS - 1) * t->m + 2 * DW_ROTATE_TABLE_ROWS(t->m);
    return t->shared_bytes + (shape->rotates ? (unsigned)(2 * WIDE(t->head_dim) * rows) : 0);
}

static dw__jit_variant rtx_backward_variant(const dw__attention_shape *shape, const char *entry) {
    const dw__attention_tile *tile = dw__attention_tile_of(shape, DW__ATTENTION_BACKWARD);
    dw__jit_variant variant = {
        .source = "sm120/sm120_attention_backward.cu", .entry = entry, .arch = "sm_120a"};
    dw__jit_add_define(&variant, "HEAD_DIM", shape->head_dim);
    dw__jit_add_define(&variant, "ELEMENT", shape->f16);
    dw__jit_add_define(&variant, "WINDOW", shape->window);
    dw__jit_add_define(&variant, "DROPOUT", shape->dropout);
    dw__jit_add_define(&variant, "TILE_M", tile->m);
    dw__jit_add_define(&variant, "TILE_N", tile->n);
    dw__jit_add_define(&variant, "CONSUMERS", tile->consumers);
    dw__jit_add_define(&variant, "STAGES", tile->stages);
    return variant;
}

dw__jit_variant dw__attention_variant(const dw__attention_shape *shape, dw__attention_pass pass,
                                      const char *entry, const char *arch) {
    bool backward = pass == DW__ATTENTION_BACKWARD;
    const dw__attention_tile *tile = dw__attention_tile_of(shape, pass);
    if (backward && shape->rtx) return rtx_backward_variant(shape, entry);
    dw__jit_variant variant = {
        .source = backward           ? "sm90/attention_backward.cu"
                  : shape->blackwell ? "sm100/sm100_attention_forward.cu"
                  : shape->rtx       ? "sm120/sm120_attention_forward.cu"
                                     : "sm90/attention_forward.cu",
        .entry = entry,
        .arch = arch,
    };
    dw__jit_add_define(&variant, "HEAD_DIM", shape->head_dim);
    dw__jit_add_define(&variant, "ELEMENT", shape->f16);
    dw__jit_add_define(&variant, "SOFTCAP", shape->softcap);
    dw__jit_add_define(&variant, "DROPOUT", shape->dropout);
    dw__jit_add_define(&variant, "PACKED", shape->packed);
    dw__jit_add_define(&variant, "WINDOW", shape->window);
    dw__jit_add_define(&variant, "TILE_M", tile->m);
    dw__jit_add_define(&variant, "TILE_N", tile->n);
    dw__jit_add_define(&variant, "CONSUMERS", tile->consumers);
    dw__jit_add_define(&variant, backward ? "STAGES_Q" : "STAGES", tile->stages);
    if (shape->bias) dw__jit_add_define(&variant, "BIAS", shape->bias);
    if (shape->rotates) dw__jit_add_define(&variant, "ROTATE", 1);
    if (!backward) return variant;
    dw__jit_add_define(&variant, "STAGES_DO", tile->stages_do);
    dw__jit_add_define(&variant, "DETERMINISTIC", shape->deterministic);
    if (shape->serial) dw__jit_add_define(&variant, "SERIAL", 1);
    return variant;
}

dw__jit_variant dw__attention_reference_variant(bool f16, dw__attention_pass pass,
                                                const char *arch) {
    dw__jit_variant variant = {
        .source = "common/attention_reference.cu",
        .entry = pass == DW__ATTENTION_FORWARD ? "reference_attention_forward"
                                               : "reference_attention_backward",
        .arch = arch,
    };
    dw__jit_add_define(&variant, "ELEMENT", f16);
    return variant;
}

/* ---- parameters --------------------------------------------------------------------------------- */

static dw_strided strided(const dw_attention_tensor *t) {
    return (dw_strided){t->data, t->batch, t->head, t->row};
}

static dw_strided strided_bias(const dw_attention_bias *t) {
    return (dw_strided){t->data, t->batch, t->head, t->row};
}

/* Whether rows can be accessed 8 keys at a time, each of `element_bytes`. */
static bool is_wide(const dw_attention *c, const dw_attention_bias *t, int64_t key,
                    size_t element_bytes) {
    return key == 1 && c->seq_len_kv % 8 == 0 && t->batch % 8 == 0 && t->head % 8 == 0 &&
           t->row % 8 == 0 && (uintptr_t)t->data % (8 * element_bytes) == 0;
}

static void set_bias(const dw_attention *c, dw_attention_params *p) {
    if (c->bias_kind == DW_ATTENTION_NO_BIAS) return;
    p->bias_kind = (int)c->bias_kind;
    p->bias = strided_bias(&c->bias);
    p->bias_key = c->bias.key;
    p->bias_batches = c->bias.batch == 0 ? 1 : c->batch;
    p->bias_heads = c->bias.head == 0 ? 1 : c->heads_q;
    p->bias_wide = is_wide(c, &c->bias, c->bias.key, c->bias_kind == DW_ATTENTION_ADDED ? 2 : 1);
    p->d_bias = strided_bias(&c->d_bias);
    p->d_bias_wide = is_wide(c, &c->d_bias, 1, 2);
}

static int reach(int32_t window, bool limited) {
    return limited && window < NO_LIMIT ? window : NO_LIMIT;
}

void dw__attention_set_params(const dw_attention *c, dw_attention_params *p) {
    /* Factors of the exponents: if the scale is 0, a masked score of -infinity must still be -infinity after the
     * multiplication. */
    double scale = c->scale > 0.0f ? (double)c->scale : (double)FLT_MIN;
    *p = (dw_attention_params){
        .batch = c->batch,
        .heads_q = c->heads_q,
        .heads_kv = c->heads_kv,
        .group = c->heads_q / c->heads_kv,
        .rows_q = c->seq_len_q,
        .rows_k = c->seq_len_kv,
        .head_dim = c->head_dim,
        .offsets_q = c->offsets_q,
        .offsets_k = c->offsets_k,
        .total_q = c->total_q,
        .scale = c->scale,
        .scale_log2 = (float)((caps(c) ? (double)c->softcap : scale) * log2_e),
        .cap_scale = caps(c) ? (float)(scale / (double)c->softcap) : 0.0f,
        .window_left = reach(c->window_left, limits_left(c)),
        .window_right = reach(c->window_right, limits_right(c)),
        .bottom_right = c->bottom_right,
        .dropout = c->dropout,
        .keep_scale = (float)(1.0 / (1.0 - (double)c->dropout)),
        .keep_threshold = (unsigned)ceil((double)c->dropout * 16777216.0),
        .dropout_stream = (unsigned)c->dropout_stream,
        .seed = c->seed,
        .seed_offset = c->seed_offset,
        .seed_memory = (const long long *)c->seed_memory,
        .q = strided(&c->q),
        .k = strided(&c->k),
        .v = strided(&c->v),
        .o = strided(&c->o),
        .d_o = strided(&c->d_o),
        .dq = strided(&c->dq),
        .dk = strided(&c->dk),
        .dv = strided(&c->dv),
        .lse = c->lse,
    };
    set_bias(c, p);
}

/* ---- tensor maps ---------------------------------------------------------------------------------- */

dw_status dw__attention_map(const dw__context *context, const dw_attention *call,
                            dw__attention_operand which, int box_rows, dw__tensor_map *map) {
    const dw_attention_tensor *tensor = dw__attention_tensor(call, which);
    const dw__attention_extent x = dw__attention_extent_of(call, which);
    const int64_t lengths[] = {x.rows, x.heads, x.batch},
                  strides[] = {tensor->row, tensor->head, tensor->batch};
    dw__tensor_map_shape shape = {
        .element = call->dtype == DW_F16 ? DW__MAP_F16 : DW__MAP_BF16,
        .rank = 4,
        .address = tensor->data,
        .size = {(uint64_t)call->head_dim},
        .box = {64, (uint32_t)box_rows, 1, 1},
        .swizzle_bytes = 128,
    };
    for (int axis = 0; axis < 3; axis++) {
        shape.size[axis + 1] = (uint64_t)lengths[axis];
        /* An axis of length 1 is only read at 0. The caller's tensor may have any stride there, but the map may not. */
        shape.stride[axis] =
            2 * (uint64_t)(lengths[axis] > 1 ? strides[axis] : WIDE(call->head_dim));
    }
    return dw__gpu_map(context, &shape, dw__attention_operands[which].name, map);
}

/* ---- workspace -------------------------------------------------------------------------------------- */

dw_status dw__attention_workspace_of(const dw_attention *call, const dw__attention_shape *shape,
                                     int sm_count, dw__attention_workspace *w) {
    const dw__attention_tile *tile = dw__attention_tile_of(shape, DW__ATTENTION_BACKWARD);
    int64_t heads = call->heads_q, heads_kv = (int64_t)call->heads_kv * call->batch, m = tile->m;
    int64_t of_head = (call->seq_len_q + m - 1) / m;
    int64_t tiles =
        call->offsets_q ? heads * (call->total_q / m + call->batch) : heads * call->batch * of_head;
    if (tiles > INT32_MAX)
        return dw__fail(DW_UNSUPPORTED,
                        "attention: %lld tiles of queries, more than %d; split the batch",
                        (long long)tiles, INT32_MAX);
    size_t tile_bytes = (size_t)m * DW_BACKWARD_COLUMNS((size_t)tile->head_dim) * sizeof(float);
    size_t turns = shape->deterministic ? (size_t)tiles * (size_t)tile->consumers : 0;
    w->blocks = shape->serial ? (int)(heads_kv < sm_count ? heads_kv : sm_count) : 0;
    int64_t sums = shape->serial ? w->blocks * (heads / call->heads_kv) * of_head : tiles;
    w->dq_sum = 0;
    w->delta = ALIGNED((size_t)sums * tile_bytes);
    w->turn = w->delta + ALIGNED((size_t)tiles * DW_BACKWARD_STATISTICS(m) * sizeof(float));
    w->bytes = w->turn + ALIGNED(turns * sizeof(int));
    return DW_OK;
}

/* ---- launch ---------------------------------------------------------------------------------------- */

enum { ROW_THREADS = 256 }; /* thread block of backward's first and last kernel */

static dw_status count_tiles(int64_t rows, int tile_rows, int64_t heads, int *tiles) {
    /* the result is below 2^29 * 2^40 / 64 */
    int64_t count = (rows + tile_rows - 1) / tile_rows * heads;
    if (count > INT32_MAX)
        return dw__fail(DW_UNSUPPORTED, "%lld tiles of work, more than %d; split the batch",
                        (long long)count, INT32_MAX);
    *tiles = (int)count;
    return DW_OK;
}

/* Makes the maps of q, k and v. */
static dw_status map_inputs(const dw_attention *call, const dw__context *context, int rows,
                            int keys, dw__tensor_map maps[3]) {
    DW_RETURN_IF_FAILED(dw__attention_map(context, call, DW__ATTENTION_Q, rows, &maps[0]));
    DW_RETURN_IF_FAILED(dw__attention_map(context, call, DW__ATTENTION_K, keys, &maps[1]));
    return dw__attention_map(context, call, DW__ATTENTION_V, keys, &maps[2]);
}

/* Makes the map of a table of cosines or sines, one row for each query. */
static dw_status map_table(const dw__context *context, const dw__rotated_attention *r,
                           const dw_attention_tensor *table, const char *name, int tile_m,
                           dw__tensor_map *map) {
    const dw_attention *call = &r->call;
    const uint64_t row = 2 * (uint64_t)table->row;
    const dw__tensor_map_shape shape = {
        .element = call->dtype == DW_F16 ? DW__MAP_F16 : DW__MAP_BF16,
        .rank = 4,
        .address = table->data,
        .size = {(uint64_t)call->head_dim, (uint64_t)call->seq_len_q, 1,
                 r->rotation.batches ? (uint64_t)call->batch : 1},
        .stride = {row, row, r->rotation.batches ? 2 * (uint64_t)table->batch : row},
        .box = {64, DW_ROTATE_TABLE_ROWS((uint32_t)tile_m), 1, 1},
        .swizzle_bytes = 128,
    };
    return dw__gpu_map(context, &shape, name, map);
}

static dw_status enqueue_forward(const void *given, const dw__context *context,
                                 const dw__variant *variant) {
    const dw_attention *call = given;
    const dw__attention_shape shape = {.params = variant->params};
    const dw__attention_tile *tile = dw__attention_tile_of(&shape, DW__ATTENTION_FORWARD);
    const bool blackwell = shape.blackwell;
    dw_attention_params params;
    const int rows = blackwell ? DW_SM100_FORWARD_ROWS : tile->m;
    dw__tensor_map maps[4];
    dw__attention_set_params(call, &params);
    DW_RETURN_IF_FAILED(
        count_tiles(call->seq_len_q, tile->m, (int64_t)call->heads_q * call->batch, &params.tiles));
    DW_RETURN_IF_FAILED(map_inputs(call, context, rows, tile->n, maps));
    /* Blocks are persistent and process tile after tile. */
    int blocks = params.tiles < context->sm_count ? params.tiles : context->sm_count;
    void *arguments[] = {&maps[0], &maps[1], &maps[2], &params, NULL, NULL, NULL};
    dw__tensor_map tables[2];
    dw_attention_rotation rotation;
    if (shape.rotates) {
        const dw__rotated_attention *r = given;
        DW_RETURN_IF_FAILED(map_table(context, r, &r->cosines, "cos", tile->m, &tables[0]));
        DW_RETURN_IF_FAILED(map_table(context, r, &r->sines, "sin", tile->m, &tables[1]));
        rotation = r->rotation;
        arguments[4] = &tables[0], arguments[5] = &tables[1], arguments[6] = &rotation;
    }
    if (blackwell) { /* TMA stores O */
        DW_RETURN_IF_FAILED(
            dw__attention_map(context, call, DW__ATTENTION_O, DW_SM100_FORWARD_BOX_ROWS, &maps[3]));
        arguments[3] = &maps[3], arguments[4] = &params;
    }
    return context->device->launch(&(dw__launch){
        .name = variant->kernel->name,
        .function = variant->functions[DW__ATTENTION_MAIN],
        .grid = {(unsigned)blocks, 1, 1},
        .block = {blackwell ? DW_SM100_FORWARD_THREADS : 128u * (1u + (unsigned)tile->consumers), 1,
                  1},
        .shared_bytes = dw__attention_forward_bytes(&shape),
        .stream = call->stream,
        .arguments = arguments,
    });
}

/* dQ, then dK and dV, one thread block for each tile of queries or keys. */
static dw_status enqueue_rtx_backward(const void *given, const dw__context *context,
                                      const dw__variant *variant) {
    static const char *const names[] = {"sm120_attention_backward",
                                        "sm120_attention_backward_queries"};
    const dw_attention *call = given;
    const dw__attention_shape shape = {.params = variant->params};
    const dw__attention_tile *tile = dw__attention_tile_of(&shape, DW__ATTENTION_BACKWARD);
    dw_attention_params params;
    dw__attention_set_params(call, &params);
    params.delta = call->workspace;
    for (int keys = 0; keys < 2; keys++) {
        const int entry = keys ? DW__ATTENTION_MAIN : DW__ATTENTION_PREPARE,
                  of_queries = keys ? tile->n : tile->m, of_keys = keys ? tile->m : tile->n;
        dw__tensor_map maps[4];
        DW_RETURN_IF_FAILED(count_tiles(
            keys ? call->seq_len_kv : call->seq_len_q, tile->m,
            (int64_t)(keys ? call->heads_kv : call->heads_q) * call->batch, &params.tiles));
        DW_RETURN_IF_FAILED(map_inputs(call, context, of_queries, of_keys, maps));
        DW_RETURN_IF_FAILED(
            dw__attention_map(context, call, DW__ATTENTION_D_O, of_queries, &maps[3]));
        void *arguments[] = {&maps[0], &maps[1], &maps[2], &maps[3], &params};
        DW_RETURN_IF_FAILED(context->device->launch(&(dw__launch){
            .name = names[entry],
            .function = variant->functions[entry],
            .grid = {(unsigned)params.tiles, 1, 1},
            .block = {DW_SM120_ATTENTION_THREADS((unsigned)tile->consumers), 1, 1},
            .shared_bytes = tile->shared_bytes,
            .stream = call->stream,
            .arguments = arguments,
        }));
    }
    return DW_OK;
}

/* Launches backward's first or last kernel, with one block for each tile of queries. */
static dw_status launch_rows(const dw_attention *call, const dw__context *context, const char *name,
                             void *function, int tiles, dw_attention_params *params) {
    void *arguments[] = {params};
    return context->device->launch(&(dw__launch){
        .name = name,
        .function = function,
        .grid = {(unsigned)tiles, 1, 1},
        .block = {ROW_THREADS, 1, 1},
        .stream = call->stream,
        .arguments = arguments,
    });
}

/* Launches the kernel of the bias's gradient, one thread block for each of its tiles. */
static dw_status launch_bias(const dw_attention *call, const dw__context *context, void *function,
                             dw_attention_params *params) {
    static const dw__attention_operand rows[] = {DW__ATTENTION_Q, DW__ATTENTION_K, DW__ATTENTION_V,
                                                 DW__ATTENTION_D_O};
    const int tile = DW_BACKWARD_BIAS_ROWS;
    const int64_t columns = (call->seq_len_kv + (int64_t)tile - 1) / tile;
    dw__tensor_map maps[4];
    int tiles;
    DW_RETURN_IF_FAILED(count_tiles(call->seq_len_q, tile,
                                    columns * params->bias_heads * params->bias_batches, &tiles));
    for (size_t i = 0; i < DW_COUNT(rows); i++)
        DW_RETURN_IF_FAILED(dw__attention_map(context, call, rows[i], tile, &maps[i]));
    void *arguments[] = {&maps[0], &maps[1], &maps[2], &maps[3], params};
    return context->device->launch(&(dw__launch){
        .name = "sm90_attention_backward_bias",
        .function = function,
        .grid = {(unsigned)tiles, 1, 1},
        .block = {DW_BACKWARD_BIAS_THREADS, 1, 1},
        .shared_bytes = DW_BACKWARD_BIAS_SHARED,
        .stream = call->stream,
        .arguments = arguments,
    });
}

static dw_status enqueue_backward(const void *given, const dw__context *context,
                                  const dw__variant *variant) {
    const dw_attention *call = given;
    const dw__attention_shape shape = {.params = variant->params};
    const dw__attention_tile *tile = dw__attention_tile_of(&shape, DW__ATTENTION_BACKWARD);
    dw__attention_workspace places;
    dw_attention_params params;
    dw__tensor_map maps[4];
    int row_tiles;
    char *workspace = call->workspace;
    DW_RETURN_IF_FAILED(dw__attention_workspace_of(call, &shape, context->sm_count, &places));
    dw__attention_set_params(call, &params);
    params.dq_sum = (float *)(workspace + places.dq_sum);
    params.delta = (float *)(workspace + places.delta);
    params.turn = shape.deterministic ? (int *)(workspace + places.turn) : NULL;
    DW_RETURN_IF_FAILED(
        count_tiles(call->seq_len_q, tile->m, (int64_t)call->heads_q * call->batch, &row_tiles));
    DW_RETURN_IF_FAILED(count_tiles(call->seq_len_kv, tile->n,
                                    (int64_t)call->heads_kv * call->batch, &params.tiles));
    DW_RETURN_IF_FAILED(map_inputs(call, context, tile->m, tile->n, maps));
    DW_RETURN_IF_FAILED(dw__attention_map(context, call, DW__ATTENTION_D_O, tile->m, &maps[3]));
    void *arguments[] = {&maps[0], &maps[1], &maps[2], &maps[3], &params};
    DW_RETURN_IF_FAILED(launch_rows(call, context, "sm90_attention_backward_prepare",
                                    variant->functions[DW__ATTENTION_PREPARE], row_tiles, &params));
    if (shape.bias == DW_ATTENTION_ADDED && call->d_bias.data)
        DW_RETURN_IF_FAILED(
            launch_bias(call, context, variant->functions[DW__ATTENTION_BIAS], &params));
    DW_RETURN_IF_FAILED(context->device->launch(&(dw__launch){
        .name = "sm90_attention_backward",
        .function = variant->functions[DW__ATTENTION_MAIN],
        .grid = {(unsigned)(shape.serial ? places.blocks : params.tiles), 1, 1},
        .block = {128u * (1u + (unsigned)tile->consumers), 1, 1},
        .shared_bytes = tile->shared_bytes,
        .stream = call->stream,
        .arguments = arguments,
    }));
    if (shape.serial) return DW_OK; /* dQ is already written */
    return launch_rows(call, context, "sm90_attention_backward_finish",
                       variant->functions[DW__ATTENTION_FINISH], row_tiles, &params);
}

/* ---- kernels --------------------------------------------------------------------------------------- */

static dw__attention_pass pass_of(const dw__kernel *kernel) {
    return kernel->kind == DW__CALL_ATTENTION_BACKWARD ? DW__ATTENTION_BACKWARD
                                                       : DW__ATTENTION_FORWARD;
}

/* The variant for a checked call on a GPU. */
static dw__attention_shape shape_on(const dw_attention *call, dw__attention_pass pass,
                                    const dw__context *context) {
    dw__attention_shape shape = dw__attention_shape_of(call, pass, context->sm_count);
    shape.blackwell = dw__gpu_is_blackwell(context->capability);
    shape.rtx = dw__gpu_is_rtx_blackwell(context->capability);
    if (shape.rtx) /* one kernel for any number of keys, whose sums have one order */
        shape.many_keys = shape.serial = shape.deterministic = false;
    return shape;
}

const dw__kernel *dw__attention_kernel_on(dw__attention_pass pass, int capability) {
    const bool rtx = dw__gpu_is_rtx_blackwell(capability);
    if (pass == DW__ATTENTION_BACKWARD)
        return rtx ? &dw__sm120_attention_backward : &dw__sm90_attention_backward;
    if (rtx) return &dw__sm120_attention_forward;
    return dw__gpu_is_blackwell(capability) ? &dw__sm100_attention_forward
                                            : &dw__sm90_attention_forward;
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__attention_pass pass = pass_of(kernel);
    DW_RETURN_IF_FAILED(dw__attention_check(call, pass, false));
    const dw_status status = dw__attention_check_capability(call, pass, gpu->capability);
    if (status != DW_OK &&
        (dw__gpu_is_blackwell(gpu->capability) || dw__gpu_is_rtx_blackwell(gpu->capability)))
        return status;
    if (status == DW_OK && dw__attention_kernel_on(pass, gpu->capability) == kernel) return DW_OK;
    return dw__fail(DW_TYPE, "its kernels are for %s, not for %s",
                    dw__sm90_attention_forward.architectures, gpu->name);
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__attention_shape shape = shape_on(call, pass_of(kernel), context);
    return dw__variant_of(context, kernel, shape.params, variant);
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point points[DW__ENTRY_POINTS]) {
    static const char *const more[] = {[DW__ATTENTION_PREPARE] = "sm90_attention_backward_prepare",
                                       [DW__ATTENTION_FINISH] = "sm90_attention_backward_finish"};
    const dw__attention_shape shape = {.params = params};
    const dw__attention_pass pass = pass_of(kernel);
    const dw__attention_tile *tile = dw__attention_tile_of(&shape, pass);
    const char *arch = dw__gpu_arch(capability);
    if (!tile)
        return dw__fail(DW_UNSUPPORTED,
                        "there is no kernel for head_dim %d; use another implementation",
                        (int)shape.head_dim);
    points[DW__ATTENTION_MAIN].code = dw__attention_variant(&shape, pass, kernel->name, arch);
    points[DW__ATTENTION_MAIN].shared_bytes = tile->shared_bytes;
    if (shape.rtx && pass == DW__ATTENTION_BACKWARD) {
        points[DW__ATTENTION_PREPARE] = points[DW__ATTENTION_MAIN];
        points[DW__ATTENTION_PREPARE].code.entry = "sm120_attention_backward_queries";
        return DW_OK;
    }
    for (int i = DW__ATTENTION_PREPARE; i <= DW__ATTENTION_FINISH; i++)
        if (pass == DW__ATTENTION_BACKWARD)
            points[i].code = dw__attention_variant(&shape, pass, more[i], arch);
    if (pass == DW__ATTENTION_BACKWARD && shape.bias == DW_ATTENTION_ADDED) {
        points[DW__ATTENTION_BIAS].code =
            dw__attention_variant(&shape, pass, "sm90_attention_backward_bias", arch);
        points[DW__ATTENTION_BIAS].shared_bytes = DW_BACKWARD_BIAS_SHARED;
    }
    return DW_OK;
}

/* Without a GPU (NULL), the size suffices for any number of SMs. */
static dw_status backward_bytes(const dw__kernel *kernel, const void *given,
                                const dw__context *context, size_t *bytes) {
    const dw_attention *call = given;
    const int sm_count = context ? context->sm_count : 0;
    const dw__attention_shape shape =
        dw__attention_shape_of(call, DW__ATTENTION_BACKWARD, sm_count);
    dw__attention_workspace workspace = {0};
    (void)kernel;
    if (!dw__attention_has_no_queries(call) && !dw__attention_has_no_keys(call))
        DW_RETURN_IF_FAILED(dw__attention_workspace_of(call, &shape, sm_count, &workspace));
    *bytes = workspace.bytes;
    return DW_OK;
}

/* The sums of dO * O of every query. */
static dw_status rtx_backward_bytes(const dw__kernel *kernel, const void *given,
                                    const dw__context *context, size_t *bytes) {
    const dw_attention *call = given;
    (void)kernel, (void)context;
    *bytes = dw__attention_has_no_queries(call) || dw__attention_has_no_keys(call)
                 ? 0
                 : ALIGNED(sizeof(float) * (size_t)call->batch * (size_t)call->heads_q *
                           (size_t)call->seq_len_q);
    return DW_OK;
}

#define ATTENTION                                                                                  \
    .backend = "deepwell", .label = "Deepwell", .competes = true, .elements = "BF16, F16",         \
    .supports = supports, .seconds = dw__attention_seconds, .prepare = prepare,                    \
    .entry_points = entry_points, .first_use = &dw__attention_first_use,                           \
    .tolerance = DW__ATTENTION_TOLERANCE
#define SM90_ATTENTION                                                                             \
    ATTENTION, .described = "ours, CUDA C for sm_90a", .proof = DW__MEASURED_ON_HARDWARE,          \
               .architectures = "sm_90a (H100, H200)",                                             \
               .needs = "head dimension up to 256, a multiple of 8; 16-byte rows"

const dw__kernel dw__sm90_attention_forward = {
    SM90_ATTENTION,
    .name = "sm90_attention_forward",
    .kind = DW__CALL_ATTENTION_FORWARD,
    .operation = "attention forward",
    .source = "cuda/sm90/attention_forward.cu",
    .enqueue = enqueue_forward,
};
const dw__kernel dw__sm90_attention_backward = {
    SM90_ATTENTION,
    .name = "sm90_attention_backward",
    .kind = DW__CALL_ATTENTION_BACKWARD,
    .operation = "attention backward",
    .source = "cuda/sm90/attention_backward.cu",
    .workspace_bytes = backward_bytes,
    .enqueue = enqueue_backward,
};
const dw__kernel dw__sm100_attention_forward = {
    ATTENTION,
    .name = "sm100_attention_forward",
    .described = "ours, CUDA C for sm_100f",
    .kind = DW__CALL_ATTENTION_FORWARD,
    .proof = DW__PROVEN_ON_EMULATOR,
    .asked_for = true,
    .operation = "attention forward",
    .source = "cuda/sm100/sm100_attention_forward.cu",
    .architectures = "sm_100f (B200, B300)",
    .needs = "head dimension up to 128, a multiple of 8; no soft cap, dropout or packed sequences",
    .enqueue = enqueue_forward,
};

#define SM120_ATTENTION                                                                            \
    ATTENTION, .described = "ours, CUDA C for sm_120a", .proof = DW__PROVEN_ON_EMULATOR,           \
               .asked_for = true, .architectures = "sm_120a (RTX 50, RTX PRO)"
const dw__kernel dw__sm120_attention_forward = {
    SM120_ATTENTION,
    .name = "sm120_attention_forward",
    .kind = DW__CALL_ATTENTION_FORWARD,
    .operation = "attention forward",
    .source = "cuda/sm120/sm120_attention_forward.cu",
    .needs = "head dimension up to 128, a multiple of 8; 16-byte rows",
    .enqueue = enqueue_forward,
};
const dw__kernel dw__sm120_attention_backward = {
    SM120_ATTENTION,
    .name = "sm120_attention_backward",
    .kind = DW__CALL_ATTENTION_BACKWARD,
    .operation = "attention backward",
    .source = "cuda/sm120/sm120_attention_backward.cu",
    .needs = "head dimension up to 128, a multiple of 8; no soft cap, packed sequences or bias",
    .workspace_bytes = rtx_backward_bytes,
    .enqueue = enqueue_rtx_backward,
};

/* ---- attention by its definition --------------------------------------------------------------- */

static dw_status reference_points(const dw__kernel *kernel, int capability, uint64_t params,
                                  dw__entry_point points[DW__ENTRY_POINTS]) {
    points[0].code =
        dw__attention_reference_variant(params != 0, pass_of(kernel), dw__gpu_arch(capability));
    return DW_OK;
}

static dw_status prepare_reference(const dw__kernel *kernel, const void *call,
                                   const dw__context *context, const dw__variant **variant) {
    return dw__variant_of(context, kernel, ((const dw_attention *)call)->dtype == DW_F16, variant);
}

/* The outputs of a call without queries or keys are zeros (and -infinity). The reference writes them. */
static dw_status enqueue_reference(const void *given, const dw__context *context,
                                   const dw__variant *variant) {
    const dw_attention *call = given;
    dw_attention_params params;
    void *arguments[] = {&params};
    dw__attention_set_params(call, &params);
    return context->device->launch(&(dw__launch){
        .name = variant->kernel->name,
        .function = variant->functions[0],
        .grid = {1024, 1, 1}, /* any number of blocks is valid: each warp processes row after row */
        .block = {128, 1, 1},
        .stream = call->stream,
        .arguments = arguments,
    });
}

#define REFERENCE                                                                                  \
    .prepare = prepare_reference, .enqueue = enqueue_reference, .entry_points = reference_points
const dw__kernel dw__reference_attention[] = {
    [DW__ATTENTION_FORWARD] = {REFERENCE, .name = "reference_attention_forward",
                               .kind = DW__CALL_ATTENTION_FORWARD},
    [DW__ATTENTION_BACKWARD] = {REFERENCE, .name = "reference_attention_backward",
                                .kind = DW__CALL_ATTENTION_BACKWARD},
};

/* ---- the public calls ------------------------------------------------------------------------------ */

static dw_status choose_forward(const void *call, int capability, const dw__kernel **kernel) {
    *kernel = dw__attention_kernel_on(DW__ATTENTION_FORWARD, capability);
    return dw__attention_check_capability(call, DW__ATTENTION_FORWARD, capability);
}

static dw_status choose_backward(const void *call, int capability, const dw__kernel **kernel) {
    *kernel = dw__attention_kernel_on(DW__ATTENTION_BACKWARD, capability);
    return dw__attention_check_capability(call, DW__ATTENTION_BACKWARD, capability);
}

static const dw__gpu_family families[] = {
    [DW__ATTENTION_FORWARD] = {.title = "attention",
                               .kind = DW__CALL_ATTENTION_FORWARD,
                               .own = {&dw__sm90_attention_forward, &dw__sm100_attention_forward,
                                       &dw__sm120_attention_forward},
                               .choose = choose_forward,
                               .describe = dw__attention_describe,
                               .workspace_query = "the library"},
    [DW__ATTENTION_BACKWARD] = {.title = "attention",
                                .kind = DW__CALL_ATTENTION_BACKWARD,
                                .own = {&dw__sm90_attention_backward,
                                        &dw__sm120_attention_backward},
                                .choose = choose_backward,
                                .describe = dw__attention_describe,
                                .workspace_query = "dw_attention_backward_workspace"},
};

/* Forward has run before a backward whose caller needs gradients, so the slow reference may compute these. */
static dw_status make_job(const dw_attention *given, dw__attention_pass pass, bool launching,
                          dw_attention *call, dw__gpu_job *j) {
    DW_RETURN_IF_FAILED(dw__attention_read(given, call));
    DW_RETURN_IF_FAILED(dw__attention_check(call, pass, launching));
    *j = (dw__gpu_job){
        .call = call,
        .device = call->device,
        .named = call->kernel,
        .empty = dw__attention_has_no_queries(call) || dw__attention_has_no_keys(call),
        .workspace = call->workspace,
        .workspace_bytes = call->workspace_bytes,
        .reference = pass == DW__ATTENTION_BACKWARD ? &dw__reference_attention[pass] : NULL};
    return dw__job_find(&families[pass], j);
}

static dw_status run(const dw_attention *given, dw__attention_pass pass) {
    dw_attention call;
    dw__gpu_job j;
    DW_RETURN_IF_FAILED(make_job(given, pass, true, &call, &j));
    const bool forward = pass == DW__ATTENTION_FORWARD;
    if (forward ? dw__attention_has_no_queries(&call) : call.batch == 0) return DW_OK;
    if (j.empty) j.kernel = &dw__reference_attention[pass];
    return dw__job_run(&families[pass], &j);
}

dw_status dw_attention_forward(const dw_attention *call) {
    return run(call, DW__ATTENTION_FORWARD);
}

dw_status dw_attention_backward(const dw_attention *call) {
    return run(call, DW__ATTENTION_BACKWARD);
}

dw_status dw_attention_backward_workspace(const dw_attention *given, size_t *bytes) {
    const dw__context *context = NULL;
    dw_attention call;
    DW_RETURN_IF_FAILED(dw__attention_read(given, &call));
    DW_RETURN_IF_FAILED(dw__attention_check(&call, DW__ATTENTION_BACKWARD, false));
    if (call.device)
        DW_RETURN_IF_FAILED(dw__gpu_context(call.device, "attention", &context));
    else if (dw__device_cuda.context(&context) != DW_OK)
        context = NULL;
    const dw__kernel *kernel =
        dw__attention_kernel_on(DW__ATTENTION_BACKWARD, context ? context->capability : 90);
    return kernel->workspace_bytes(kernel, &call, context, bytes);
}

dw_status dw_attention_supported(const dw_attention *given, bool backward) {
    dw_attention call;
    dw__gpu_job j;
    if (backward) {
        DW_RETURN_IF_FAILED(make_job(given, DW__ATTENTION_BACKWARD, false, &call, &j));
        DW_RETURN_IF_FAILED(dw__job_would_run(&families[DW__ATTENTION_BACKWARD], &j));
    }
    DW_RETURN_IF_FAILED(make_job(given, DW__ATTENTION_FORWARD, false, &call, &j));
    return dw__job_would_run(&families[DW__ATTENTION_FORWARD], &j);
}
