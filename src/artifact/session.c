/* Runs the graph of an artifact over a sequence that grows.
 *
 * One run of the graph reads S tokens and the cache of the tokens before. S is a power of two (a chunk is filled up
 * with tokens whose results are not used), and so is the cache's capacity C, so that a whole text needs few plans. The
 * graph's new keys and values are bound to their places in the cache. The run itself reads only the places before them,
 * so the cache is neither copied nor moved until it grows.
 *
 *     cache: 2 * layers regions, of C entries each; an entry is [B = 1, kv_heads, head_dim] */
#include "artifact/artifact_internal.h"
#include "deepwell/engine.h"
#include "deepwell/generate.h"
#include "device/device_table.h"
#include "model/model_internal.h"
#include "number/half.h"
#include <string.h>

enum { BATCH, LENGTH, CAPACITY, ROWS, SYMBOLS, REGION_ALIGNMENT = 256, DIRECT_ALIGNMENT = 16 };

typedef struct block {
    void *data;
    size_t bytes;
} block;

struct dw_session {
    const dw_artifact *artifact;
    const dw_device *device;
    dw_engine *engine;
    dw_dtype dtype;
    dw_model_info model;
    size_t entry_bytes; /* of the cache */
    int64_t length;     /* tokens in the cache */
    int64_t capacity;   /* of the cache, in tokens */
    uint32_t regions;   /* of the cache: 2 * layers */
    uint32_t parameters;
    block weights, cache, fresh, arena, input, logits;
    int64_t *staged;    /* the graph's integer inputs: ids, position, rows */
    float *last_logits; /* [vocabulary]: for dw_session_generate */
    dw_binding *leaves, *outputs;
};

/* ---- memory -------------------------------------------------------------------------------- */

static size_t aligned(size_t bytes) {
    return (bytes + REGION_ALIGNMENT - 1) / REGION_ALIGNMENT * REGION_ALIGNMENT;
}

static void release(const dw_session *s, block *b) {
    if (b->data) dw_device_release(s->device, b->data, b->bytes);
    *b = (block){0};
}

/* Makes a block at least this large; its contents are lost. */
static dw_status reserve(const dw_session *s, block *b, size_t bytes) {
    if (b->data && b->bytes >= bytes) return DW_OK;
    release(s, b);
    DW_RETURN_IF_FAILED(dw_device_allocate(s->device, bytes, &b->data));
    b->bytes = bytes;
    return DW_OK;
}

static char *region(const dw_session *s, const block *cache, int64_t capacity, uint32_t which) {
    return (char *)cache->data + which * aligned((size_t)capacity * s->entry_bytes);
}

/* Enlarges the cache to hold `tokens` entries. Entries that nothing has written are zero, and hence finite. */
static dw_status grow_cache(dw_session *s, int64_t tokens) {
    int64_t capacity = s->capacity ? s->capacity : s->artifact->capacity;
    block grown = {0};
    if (tokens <= s->capacity) return DW_OK;
    while (capacity < tokens) capacity *= 2;
    size_t entries = aligned((size_t)capacity * s->entry_bytes);
    if (__builtin_mul_overflow(entries, (size_t)s->regions, &grown.bytes))
        return dw__fail_memory("a cache", SIZE_MAX);
    DW_RETURN_IF_FAILED(dw_device_allocate(s->device, grown.bytes, &grown.data));
    dw_status status = dw_device_fill(s->device, grown.data, 0, grown.bytes);
    for (uint32_t i = 0; i < s->regions && s->length && status == DW_OK; i++)
        status = dw_device_copy(s->device, region(s, &grown, capacity, i),
                                region(s, &s->cache, s->capacity, i),
                                (size_t)s->length * s->entry_bytes);
    if (status != DW_OK) {
        release(s, &grown);
        return status;
    }
    release(s, &s->cache);
    s->cache = grown;
    s->capacity = capacity;
    return DW_OK;
}

/* ---- lifecycle ----------------------------------------------------------------------------- */

typedef struct target {
    const dw_device *device;
    char *to;
} target;

static dw_status copy_in(void *context, const void *elements, size_t bytes) {
    target *t = context;
    DW_RETURN_IF_FAILED(dw_device_copy_in(t->device, t->to, elements, bytes));
    t->to += bytes;
    return DW_OK;
}

static dw_status load_weights(dw_session *s) {
    size_t total = 0, width = dw_dtype_bytes(s->dtype);
    for (uint32_t i = 0; i < s->parameters; i++) {
        dw_model_parameter parameter;
        dw_model_parameter_at(s->artifact->config, i, &parameter);
        total += aligned((size_t)parameter.count * width);
    }
    DW_RETURN_IF_FAILED(reserve(s, &s->weights, total));
    char *at = s->weights.data;
    for (uint32_t i = 0; i < s->parameters; i++) {
        dw_model_parameter parameter;
        target to = {s->device, at};
        dw_model_parameter_at(s->artifact->config, i, &parameter);
        DW_RETURN_IF_FAILED(dw__artifact_read_weight(s->artifact, i, s->dtype, copy_in, &to));
        s->leaves[i] = (dw_binding){at, NULL};
        at += aligned((size_t)parameter.count * width);
    }
    return DW_OK;
}

static dw_status read_options(const dw_artifact *artifact, const dw_session_options *options,
                              dw_session *s) {
    static const dw__struct known = {"dw_session_options", sizeof *options, {0}};
    bool has_bf16 = artifact->graphs[1] != NULL;
    DW_RETURN_IF_FAILED(dw__struct_read(&known, options, NULL));
    s->device = options->device;
    if (!s->device) DW_RETURN_IF_FAILED(dw_device_find("cpu", &s->device));
    s->dtype = s->device->launch && has_bf16 ? DW_BF16 : DW_F32;
    if (!options->dtype) return DW_OK;
    s->dtype = strcmp(options->dtype, "bf16") == 0 ? DW_BF16 : DW_F32;
    if (s->dtype == DW_F32 && strcmp(options->dtype, "f32") != 0)
        return dw__fail(DW_INVALID_ARGUMENT, "dtype is \"%.32s\"; expected f32 or bf16",
                        options->dtype);
    if (s->dtype == DW_F32 || has_bf16) return DW_OK;
    return dw__fail(DW_UNSUPPORTED,
                    "dtype is bf16, and the artifact's weights are %s; export the model with "
                    "--dtype bf16",
                    dw__artifact_dtype_name(artifact->dtype));
}

static dw_status allocate(dw_session *s) {
    size_t leaves = (size_t)s->parameters + 3 + s->regions, outputs = (size_t)s->regions + 1;
    s->leaves = dw__calloc(leaves, sizeof *s->leaves);
    s->outputs = dw__calloc(outputs, sizeof *s->outputs);
    s->staged = dw__calloc(2 * (size_t)s->artifact->chunk + 1, sizeof *s->staged);
    s->last_logits = dw__malloc((size_t)s->model.sizes.vocabulary * sizeof(float));
    if (!s->leaves || !s->outputs || !s->staged || !s->last_logits)
        return dw__fail_memory("a session", (leaves + outputs) * sizeof *s->leaves);
    size_t input = 3 * aligned((size_t)s->artifact->chunk * sizeof(int64_t));
    return reserve(s, &s->input, input);
}

dw_status dw_session_create(const dw_artifact *artifact, const dw_session_options *options,
                            dw_session **session) {
    static const dw_session_options defaults = DW_SESSION_OPTIONS_DEFAULT;
    dw_status status = DW_OK;
    dw_engine_options engine = DW_ENGINE_OPTIONS_DEFAULT;
    dw_precision_policy policy;
    if (!artifact || !session) return dw__fail(DW_INVALID_ARGUMENT, "an artifact is NULL");
    dw_session *s = dw__calloc(1, sizeof *s);
    if (!s) return dw__fail_memory("a session", sizeof *s);
    s->artifact = artifact;
    dw_model_describe(artifact->config, &s->model);
    DW_TRY(read_options(artifact, options ? options : &defaults, s));
    const dw_model_sizes *sizes = &s->model.sizes;
    s->regions = 2 * (uint32_t)sizes->layers;
    s->parameters = dw_model_parameter_count(artifact->config);
    s->entry_bytes = (size_t)sizes->kv_heads * (size_t)sizes->head_dim * dw_dtype_bytes(s->dtype);
    engine.device = s->device;
    DW_TRY(dw__artifact_policy(artifact->precision, &policy));
    if (strcmp(artifact->precision, "fp32") != 0) engine.precision = &policy;
    DW_TRY(dw_engine_create(artifact->graphs[s->dtype == DW_BF16], 0, NULL, 0, NULL, &engine,
                            &s->engine));
    DW_TRY(allocate(s));
    DW_TRY(load_weights(s));
    *session = s;
    s = NULL;
cleanup:
    dw_session_destroy(s);
    return status;
}

void dw_session_destroy(dw_session *session) {
    if (!session) return;
    block *blocks[] = {&session->weights, &session->cache, &session->fresh,
                       &session->arena,   &session->input, &session->logits};
    for (size_t i = 0; i < DW_COUNT(blocks); i++) release(session, blocks[i]);
    dw_engine_destroy(session->engine);
    dw__free(session->leaves);
    dw__free(session->outputs);
    dw__free(session->staged);
    dw__free(session->last_logits);
    dw__free(session);
}

void dw_session_reset(dw_session *session) {
    /* The next text begins with a small cache, and with zeros: an earlier one may have left NaN. */
    release(session, &session->cache);
    session->capacity = session->length = 0;
}

/* ---- a run --------------------------------------------------------------------------------- */

typedef struct run {
    const int64_t *ids;
    int64_t count;  /* tokens */
    int64_t padded; /* count, rounded up to a power of two */
    int64_t rows;   /* tokens whose logits are computed: 1, the last, or `padded` */
} run;

static dw_status stage_inputs(dw_session *s, const run *r) {
    int64_t *ids = s->staged, *position = ids + r->padded, *rows = position + 1;
    size_t step = aligned((size_t)s->artifact->chunk * sizeof(int64_t));
    char *at = s->input.data;
    const struct {
        const int64_t *from;
        int64_t count;
    } inputs[] = {{ids, r->padded}, {position, 1}, {rows, r->rows}};
    for (int64_t i = 0; i < r->padded; i++) ids[i] = i < r->count ? r->ids[i] : 0;
    *position = s->length;
    for (int64_t i = 0; i < r->rows; i++) rows[i] = r->rows == 1 ? r->count - 1 : i;
    for (size_t i = 0; i < DW_COUNT(inputs); i++, at += step) {
        DW_RETURN_IF_FAILED(dw_device_copy_in(s->device, at, inputs[i].from,
                                              (size_t)inputs[i].count * sizeof(int64_t)));
        s->leaves[s->parameters + i].data = at;
    }
    return DW_OK;
}

/* GPUs need aligned tensors; entries of other sizes go through a block of their own. */
static bool binds_directly(const dw_session *s) {
    return !s->device->launch || s->entry_bytes % DIRECT_ALIGNMENT == 0;
}

static dw_status bind_cache(dw_session *s, const run *r) {
    size_t fresh = aligned((size_t)r->padded * s->entry_bytes);
    bool direct = binds_directly(s);
    if (!direct) DW_RETURN_IF_FAILED(reserve(s, &s->fresh, fresh * s->regions));
    for (uint32_t i = 0; i < s->regions; i++) {
        char *at = region(s, &s->cache, s->capacity, i);
        s->leaves[s->parameters + 3 + i].data = at;
        s->outputs[i].data =
            direct ? at + (size_t)s->length * s->entry_bytes : (char *)s->fresh.data + i * fresh;
    }
    return DW_OK;
}

static dw_status copy_fresh(const dw_session *s, const run *r) {
    if (binds_directly(s)) return DW_OK;
    for (uint32_t i = 0; i < s->regions; i++)
        DW_RETURN_IF_FAILED(dw_device_copy(
            s->device, region(s, &s->cache, s->capacity, i) + (size_t)s->length * s->entry_bytes,
            s->outputs[i].data, (size_t)r->padded * s->entry_bytes));
    return DW_OK;
}

static dw_status copy_logits(const dw_session *s, int64_t rows, float *logits) {
    size_t count = (size_t)rows * (size_t)s->model.sizes.vocabulary;
    if (s->dtype == DW_F32)
        return dw_device_copy_out(s->device, logits, s->logits.data, count * sizeof *logits);
    /* The second half of the memory receives the BF16 numbers, which are widened from the first one on. */
    char *halves = (char *)logits + count * sizeof(uint16_t);
    DW_RETURN_IF_FAILED(
        dw_device_copy_out(s->device, halves, s->logits.data, count * sizeof(uint16_t)));
    for (size_t i = 0; i < count; i++) {
        uint16_t half;
        memcpy(&half, halves + i * sizeof half, sizeof half);
        logits[i] = dw__bf16_to_f32(half);
    }
    return DW_OK;
}

static dw_status run_graph(dw_session *s, const run *r, float *logits) {
    dw_plan *plan = NULL;
    dw_status status = DW_OK;
    size_t width = dw_dtype_bytes(s->dtype);
    DW_RETURN_IF_FAILED(grow_cache(s, s->length + r->padded));
    const int64_t sizes[SYMBOLS] = {
        [BATCH] = 1, [LENGTH] = r->padded, [CAPACITY] = s->capacity, [ROWS] = r->rows};
    DW_RETURN_IF_FAILED(dw_engine_plan(s->engine, sizes, &plan));
    DW_TRY(reserve(s, &s->arena, dw_plan_arena_bytes(plan)));
    DW_TRY(reserve(s, &s->logits, (size_t)r->rows * (size_t)s->model.sizes.vocabulary * width));
    DW_TRY(stage_inputs(s, r));
    DW_TRY(bind_cache(s, r));
    s->outputs[s->regions].data = s->logits.data;
    DW_TRY(dw_plan_forward(plan, s->arena.data, s->leaves, s->outputs, NULL));
    DW_TRY(dw_plan_synchronize(plan, NULL));
    DW_TRY(copy_fresh(s, r));
    if (logits) DW_TRY(copy_logits(s, r->rows == 1 ? 1 : r->count, logits));
    s->length += r->count;
cleanup:
    dw_plan_release(plan);
    return status;
}

/* ---- tokens -------------------------------------------------------------------------------- */

static dw_status check_ids(const dw_session *s, const int64_t *ids, size_t count) {
    if (!ids && count) return dw__fail(DW_INVALID_ARGUMENT, "ids is NULL");
    for (size_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= s->model.sizes.vocabulary)
            return dw__fail(DW_INDEX, "token %zu is %lld; expected 0 to %d", i, (long long)ids[i],
                            s->model.sizes.vocabulary - 1);
    if (!s->model.positions_are_limit ||
        (s->length <= s->model.positions && count <= (size_t)(s->model.positions - s->length)))
        return DW_OK;
    return dw__fail(DW_SHAPE,
                    "%lld tokens and %zu more are longer than the model's %lld positions; shorten "
                    "the text",
                    (long long)s->length, count, (long long)s->model.positions);
}

static int64_t power_of_two(int64_t count) {
    int64_t power = 1;
    while (power < count) power *= 2;
    return power;
}

/* Chooses how many of the tokens that are left run next, and in a run of which size. A short run costs as much as
 * reading the weights, whatever its size; a long one costs its size, so that at most a quarter of it is filled up. */
static void choose_run(int64_t left, int64_t chunk, run *r) {
    enum { SHORT = 16 };
    r->count = left < chunk ? left : chunk;
    r->padded = power_of_two(r->count);
    if (r->padded <= SHORT || r->count > r->padded - r->padded / 4) return;
    r->padded /= 2;
    r->count = r->padded;
}

dw_status dw_session_append(dw_session *session, const int64_t *ids, size_t count, int all,
                            float *logits) {
    int64_t before = session->length;
    size_t vocabulary = (size_t)session->model.sizes.vocabulary;
    DW_RETURN_IF_FAILED(check_ids(session, ids, count));
    for (size_t at = 0; at < count;) {
        run r = {.ids = ids + at, .rows = 1};
        choose_run((int64_t)(count - at), session->artifact->chunk, &r);
        if (all && logits) r.rows = r.padded;
        at += (size_t)r.count;
        bool wanted = logits && (all || at == count);
        dw_status status = run_graph(session, &r, wanted ? logits : NULL);
        if (status != DW_OK) {
            session->length = before;
            return status;
        }
        if (all && logits) logits += (size_t)r.count * vocabulary;
    }
    return DW_OK;
}

/* ---- generation ---------------------------------------------------------------------------- */

static bool is_end(const dw_artifact *a, int64_t id) {
    for (size_t i = 0; i < a->ends.count; i++)
        if (a->ends.items[i] == id) return true;
    return false;
}

static bool is_full(const dw_session *s) {
    return s->model.positions_are_limit && s->length >= s->model.positions;
}

dw_status dw_session_generate(dw_session *session, const int64_t *prompt, size_t count,
                              const dw_generate_options *options, size_t *generated) {
    static const dw__struct known = {"dw_generate_options", sizeof *options, {0}};
    static const dw_generate_options defaults = DW_GENERATE_OPTIONS_DEFAULT;
    int64_t id, vocabulary = session->model.sizes.vocabulary;
    size_t made = 0;
    dw_status status = DW_OK;
    if (!options) options = &defaults;
    if (generated) *generated = 0;
    DW_RETURN_IF_FAILED(dw__struct_read(&known, options, NULL));
    if (count == 0)
        return dw__fail(DW_INVALID_ARGUMENT, "the prompt has no tokens; give at least one");
    DW_RETURN_IF_FAILED(dw_session_append(session, prompt, count, 0, session->last_logits));
    while ((int64_t)made < options->max_tokens) {
        DW_TRY(dw_sample(session->last_logits, vocabulary, &options->sampling, made, &id));
        made++;
        if (options->on_token && options->on_token(options->context, id)) break;
        if (!options->ignore_end && is_end(session->artifact, id)) break;
        if ((int64_t)made == options->max_tokens || is_full(session)) break;
        DW_TRY(dw_session_append(session, &id, 1, 0, session->last_logits));
    }
cleanup:
    if (generated) *generated = made;
    return status;
}
