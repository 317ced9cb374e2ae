/* A checked call of attention in the kernels' terms: variant, tiles, parameters, tensor maps. */
#include "common/attention_backward_layout.h"
#include "kernel/cuda/attention.h"
#include "sm100/attention_forward_tiles.h"
#include "sm90/attention_tiles.h"
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { NO_LIMIT = 1 << 30 };
static const double log2_e = 1.4426950408889634;

/* Whether some row may not see some key on that side. Of packed sequences only the longest is known here. */
static bool limits_right(const dw_attention *c) {
    if (c->window_right < 0) return false;
    int64_t shift = c->bottom_right ? (int64_t)c->rows_k - c->rows_q : 0;
    return c->offsets_q || shift + c->window_right < c->rows_k - 1;
}

static bool limits_left(const dw_attention *c) {
    if (c->window_left < 0) return false;
    int64_t shift = c->bottom_right ? (int64_t)c->rows_k - c->rows_q : 0;
    return c->offsets_q || c->rows_q - 1 + shift - c->window_left > 0;
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

/* With scale 0 every score is 0, capped or not. */
static bool caps(const dw_attention *c) { return c->softcap > 0.0f && c->scale > 0.0f; }

/* DEEPWELL_SERIAL=0 or 1: never or always, to measure which is faster. -1: not set. */
static _Atomic int serial_setting = -2;
static int forced_serial(void) {
    int setting = atomic_load_explicit(&serial_setting, memory_order_relaxed);
    if (setting != -2) return setting;
    const char *text = getenv("DEEPWELL_SERIAL");
    setting = text && (strcmp(text, "0") == 0 || strcmp(text, "1") == 0) ? *text - '0' : -1;
    atomic_store_explicit(&serial_setting, setting, memory_order_relaxed);
    return setting;
}

/* A block of threads that takes all keys of a head keeps the sums of dQ to itself: nothing is zeroed, added atomically
 * or copied at the end. That pays where heads fill the GPU and have few rows, so that its cache holds the sums. */
static bool is_serial(const dw_attention *c, const dw__attention_shape *shape, int sm_count) {
    const double least_filled = 0.8;
    int64_t heads = (int64_t)c->batch * c->heads_kv;
    if (sm_count < 1 || heads < 1) return false;
    if (forced_serial() >= 0) return forced_serial() == 1;
    int64_t rounds = (heads + sm_count - 1) / sm_count;
    const dw__attention_tile *tile = dw__attention_tile_of(shape, DW__ATTENTION_BACKWARD);
    return tile && (double)heads >= least_filled * (double)(rounds * sm_count) &&
           (int64_t)c->rows_q * (c->heads_q / c->heads_kv) <= tile->serial_rows;
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
        .deterministic = pass == DW__ATTENTION_BACKWARD && call->deterministic,
    };
    for (size_t i = DW_COUNT(head_dims); i > 0; i--)
        if (call->head_dim <= head_dims[i - 1]) shape.head_dim = head_dims[i - 1];
    for (size_t i = 0; i < DW_COUNT(forward_tiles) && pass == DW__ATTENTION_FORWARD; i++)
        if (forward_tiles[i].head_dim == shape.head_dim && forward_tiles[i].keys > 0 &&
            forward_tiles[i].window == shape.window)
            shape.many_keys = call->rows_k >= forward_tiles[i].keys;
    if (pass == DW__ATTENTION_BACKWARD && is_serial(call, &shape, sm_count)) {
        shape.serial = true;
        shape.deterministic = false; /* it is, by itself */
    }
    return shape;
}

dw__attention_shape dw__attention_shape_on(const dw_attention *call, dw__attention_pass pass,
                                           const dw__context *context) {
    dw__attention_shape shape = dw__attention_shape_of(call, pass, context->sm_count);
    shape.blackwell = context->capability == 100 || context->capability == 103;
    return shape;
}

const char *dw__attention_forward_entry(const dw__attention_shape *shape) {
    return shape->blackwell ? "sm100_attention_forward" : "sm90_attention_forward";
}

const char *dw__attention_arch(bool blackwell) { return blackwell ? "sm_100f" : "sm_90a"; }

const dw__attention_tile *dw__attention_tile_of(const dw__attention_shape *shape,
                                                dw__attention_pass pass) {
    bool backward = pass == DW__ATTENTION_BACKWARD;
    const dw__attention_tile *tiles = backward ? backward_tiles : forward_tiles;
    size_t count = backward ? DW_COUNT(backward_tiles) : DW_COUNT(forward_tiles);
    if (shape->blackwell) { /* no backward there */
        if (backward) return NULL;
        tiles = blackwell_tiles, count = DW_COUNT(blackwell_tiles);
    }
    for (size_t i = 0; i < count; i++)
        if (tiles[i].head_dim == shape->head_dim && tiles[i].window == shape->window &&
            (tiles[i].keys == 0 || shape->many_keys))
            return &tiles[i];
    return NULL;
}

dw__jit_variant dw__attention_variant(const dw__attention_shape *shape, dw__attention_pass pass,
                                      const char *entry, const char *arch) {
    bool backward = pass == DW__ATTENTION_BACKWARD;
    const dw__attention_tile *tile = dw__attention_tile_of(shape, pass);
    dw__jit_variant variant = {
        .source = backward           ? "sm90/attention_backward.cu"
                  : shape->blackwell ? "sm100/attention_forward.cu"
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

static int reach(int32_t window, bool limited) {
    return limited && window < NO_LIMIT ? window : NO_LIMIT;
}

void dw__attention_set_params(const dw_attention *c, dw_attention_params *p) {
    /* Of the exponents: where the scale is 0 a masked score, -infinity, must stay it when multiplied. */
    double scale = c->scale > 0.0f ? (double)c->scale : (double)FLT_MIN;
    *p = (dw_attention_params){
        .batch = c->batch,
        .heads_q = c->heads_q,
        .heads_kv = c->heads_kv,
        .group = c->heads_q / c->heads_kv,
        .rows_q = c->rows_q,
        .rows_k = c->rows_k,
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
}

/* ---- tensor maps ---------------------------------------------------------------------------------- */

dw_status dw__attention_map(const dw__context *context, const dw_attention *call,
                            const dw_attention_tensor *tensor, const char *name, bool of_keys,
                            int box_rows, dw__tensor_map *map) {
    bool packed = call->offsets_q != NULL;
    int64_t rows = of_keys ? call->rows_k : call->rows_q;
    if (packed) rows = of_keys ? call->total_k : call->total_q;
    const int64_t lengths[] = {rows, of_keys ? call->heads_kv : call->heads_q,
                               packed ? 1 : call->batch};
    const int64_t strides[] = {tensor->row, tensor->head, tensor->batch};
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
        /* An axis of length 1 is only ever read at 0: its stride may be anything in the caller's tensor, but not in
         * the map. */
        shape.stride[axis] =
            2 * (uint64_t)(lengths[axis] > 1 ? strides[axis] : WIDE(call->head_dim));
    }
    dw_status status = context->device->tensor_map(&shape, map);
    return status == DW_OK ? DW_OK : dw__fail_prefix(status, "the tensor map of %s", name);
}

/* ---- workspace -------------------------------------------------------------------------------------- */

dw_status dw__attention_workspace_of(const dw_attention *call, const dw__attention_shape *shape,
                                     int sm_count, dw__attention_workspace *w) {
    const dw__attention_tile *tile = dw__attention_tile_of(shape, DW__ATTENTION_BACKWARD);
    int64_t heads = call->heads_q, heads_kv = (int64_t)call->heads_kv * call->batch, m = tile->m;
    int64_t of_head = (call->rows_q + m - 1) / m;
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
