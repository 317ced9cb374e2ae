/* The tile of a GEMM on Hopper: the cost model proposes a few, and a measurement decides.
 *
 * The cost model (plan/tile_cost.h) counts the tensor cores' clocks and fits what surrounds them. It knows least what it
 * costs that several blocks compute a tile together, and what follows the products. On an H200 no tile that it counted as
 * slower was faster by 2 % for 40 products of GPT-2's and Llama's steps, but for the three where it had proposed a cluster
 * or a tree and another kind was up to a quarter slower by its count; with an activation, tiles within 5 % were. These are
 * measured under load (kernel_loads.h), and no others, because each candidate is a kernel that has to be compiled.
 *
 * The times are kept on disk (kernel/tune.h), so that all processes and later runs choose the same: products of tiles that
 * several blocks compute differ from others in their last bits. The model's tile stays unless another is faster by 2 %.
 * Where blocks share tiles, the call needs a workspace; without it, the fastest of the others runs.
 */
#include "kernel/cuda/gpu_gemm.h"
#include "kernel/cuda/kernel_loads.h"
#include "kernel/tune.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 3, BUCKETS = 1 << 10, TEXT_BYTES = 160 };
static const double close_with_activation = 1.05, close_to_shared = 1.25, least_gain = 0.02;
static const char entry[] = "sm90_gemm"; /* of the class in the file */

/* ---- candidates ----------------------------------------------------------------------------------------------- */

/* Variants that may compute a product, if its workspace has room for any sums. */
typedef struct candidates {
    dw__sm90_shape shapes[MOST];
    double seconds[MOST];
    int count;
} candidates;

/* Small products have the cost model's tile: the first-use check of a measured kernel multiplies such. */
static bool can_be_measured(const dw__gemm_groups_call *c) {
    const dw_gemm *g = &c->gemm;
    const double flops = 2.0 * (double)g->m * (double)dw__gemm_rows_b(g) * (double)g->k;
    return dw__loads_are_worth_it(flops) && c->groups.kind == DW_GROUPS_BATCH &&
           c->groups.count == 1 && !c->halves && !c->codes.a && !c->rows.gather &&
           !c->rows.scatter && !c->rows.weighted && !g->quantized && !g->quantized_d &&
           !g->row_squares;
}

/* Returns by what a tile is computed: 0 a block, 1 a cluster, 2 any number of blocks. */
static int kind_of(const dw__sm90_shape *s) {
    return s->split ? 2 : dw__sm90_tiles[s->tile].cluster > 1;
}

/* Returns how many clocks another tile may have, for each clock of the cost model's tile, to be a candidate. */
static double most_of(const dw__sm90_shape *model, const dw__sm90_shape *other) {
    if (kind_of(model) > 0 && kind_of(other) != kind_of(model)) return close_to_shared;
    return model->activation == DW_ACTIVATION_NONE ? 1.0 : close_with_activation;
}

/* Returns the cost model's tile, followed by the others in ascending order of clocks. */
static candidates candidates_of(const dw__gemm_groups_call *given, int sm_count) {
    dw__gemm_groups_call c = *given;
    dw__sm90_proposal all[DW__SM90_MOST_PROPOSALS];
    candidates made = {.count = 0};
    int best;
    if (!can_be_measured(given)) return made;
    c.gemm.workspace_bytes = SIZE_MAX;
    const int count = dw__sm90_proposals(&c, sm_count, all, &best);
    const dw__sm90_proposal model = all[best];
    made.shapes[made.count++] = model.shape;
    bool taken[DW__SM90_MOST_PROPOSALS] = {false};
    for (int i = 0; i < count; i++)
        taken[i] = i == best || all[i].clocks > most_of(&model.shape, &all[i].shape) * model.clocks;
    while (made.count < MOST) {
        int next = -1;
        for (int i = 0; i < count; i++)
            if (!taken[i] && (next < 0 || all[i].clocks < all[next].clocks)) next = i;
        if (next < 0) break;
        made.shapes[made.count++] = all[next].shape;
        taken[next] = true;
    }
    return made;
}

/* "128x256x4": rows, columns and stages; "c2" for a cluster of two blocks, "s" where blocks share tiles. */
static void print_tile(const dw__sm90_shape *s, char *text, size_t bytes) {
    const dw__sm90_tile *t = &dw__sm90_tiles[s->tile];
    char cluster[16] = "";
    if (t->cluster > 0) snprintf(cluster, sizeof cluster, "c%d", t->cluster);
    snprintf(text, bytes, "%dx%dx%d%s%s", t->m, t->n, t->stages, cluster, s->split ? "s" : "");
}

/* Sorts by time, but the cost model's tile, which is the first, stays in front of those that are not faster by enough. */
static void sort(candidates *c) {
    const double model = c->seconds[0];
    for (int i = 1; i < c->count; i++)
        for (int j = i; j > 0; j--) {
            const double limit =
                j == 1 && c->seconds[0] == model ? (1.0 - least_gain) * model : c->seconds[j - 1];
            if (c->seconds[j] >= limit) break;
            const dw__sm90_shape shape = c->shapes[j];
            const double seconds = c->seconds[j];
            c->shapes[j] = c->shapes[j - 1], c->seconds[j] = c->seconds[j - 1];
            c->shapes[j - 1] = shape, c->seconds[j - 1] = seconds;
        }
}

/* ---- what is kept --------------------------------------------------------------------------------------------- */

typedef struct choice_key {
    int64_t context, m, n, k, stride_a, stride_b, stride_d, stride_residual;
    uint64_t asked; /* the variant without its tile */
} choice_key;

static choice_key key_of(const dw__gemm_groups_call *c, const dw__context *context,
                         const candidates *from) {
    const dw_gemm *g = &c->gemm;
    dw__sm90_shape asked = from->shapes[0];
    asked.tile = 0;
    asked.split = false;
    return (choice_key){.context = context->index,
                        .m = g->m,
                        .n = g->n,
                        .k = g->k,
                        .stride_a = g->a.stride,
                        .stride_b = g->b.stride,
                        .stride_d = g->d.stride,
                        .stride_residual = g->residual.data ? g->residual.stride : 0,
                        .asked = asked.params};
}

/* Equal products have equal names on all contexts. */
static void print_name(const choice_key *k, char text[2 * TEXT_BYTES]) {
    snprintf(text, 2 * TEXT_BYTES,
             "sm90_gemm m %lld n %lld k %lld, strides %lld %lld %lld %lld, variant %llx",
             (long long)k->m, (long long)k->n, (long long)k->k, (long long)k->stride_a,
             (long long)k->stride_b, (long long)k->stride_d, (long long)k->stride_residual,
             (unsigned long long)k->asked);
}

static void print_version(char text[64]) { snprintf(text, 64, "Deepwell %s", dw_version()); }

/* Reads a record: tiles and their nanoseconds, the chosen one first. A tile that is no candidate any more is left out.
 * `kept` receives no candidates if they could not be measured. Returns whether there is a record. */
static bool read_kept(const char *gpu, const char *name, const candidates *from, candidates *kept) {
    char version[64], tile[32];
    *kept = (candidates){.count = 0};
    dw__tuned found;
    print_version(version);
    if (dw__tune_read(gpu, name, entry, &found) != DW_OK || strcmp(found.with, version) != 0)
        return false;
    for (const char *at = found.detail; *at; at += strspn(at, ", ")) {
        const size_t length = strcspn(at, " ");
        for (int i = 0; i < from->count && kept->count < MOST; i++) {
            print_tile(&from->shapes[i], tile, sizeof tile);
            if (strlen(tile) != length || strncmp(at, tile, length) != 0) continue;
            kept->shapes[kept->count] = from->shapes[i];
            kept->seconds[kept->count++] = strtod(at + length, NULL) * 1e-9;
        }
        at += strcspn(at, ",");
    }
    return true;
}

/* Keeps the candidates' times, or the reason why there are none, unless another process has kept something. */
static void keep(const char *gpu, const char *name, const candidates *c, const char *failure) {
    const dw_tune_time time = {.name = entry, .seconds = c->seconds[0], .failure = failure};
    char version[64], detail[TEXT_BYTES] = "", tile[32];
    int used = 0;
    print_version(version);
    for (int i = 0; i < c->count && !failure; i++) {
        print_tile(&c->shapes[i], tile, sizeof tile);
        used += snprintf(detail + used, sizeof detail - (size_t)used, "%s%s %.0f", i ? ", " : "",
                         tile, c->seconds[i] * 1e9);
    }
    (void)dw__tune_write_detail(gpu, name, version, &time, detail);
}

/* ---- measurement ---------------------------------------------------------------------------------------------- */

typedef struct bench {
    dw__gemm_groups_call call;
    const dw__context *context;
    const dw__variant *variants[MOST]; /* of the candidates that run */
    dw__loads loads;
} bench;

static dw_status run(const void *state, int which, void *stream) {
    const bench *m = state;
    dw__gemm_groups_call call = m->call;
    call.gemm.stream = stream;
    return dw__sm90_enqueue(&call, m->context, m->variants[which]);
}

static size_t bytes_of(const dw_matrix *x, dw_dtype type, int64_t lines, int64_t line) {
    return (size_t)((lines - 1) * x->stride + line) * dw_dtype_bytes(type);
}

static dw_status open_bench(bench *m) {
    dw_gemm *g = &m->call.gemm;
    const dw__gemm_turned turned = m->call.turned;
    const int64_t rows_b = dw__gemm_rows_b(g);
    const dw__load_part parts[] = {
        {(void **)&g->a.data,
         bytes_of(&g->a, g->dtype, turned.a ? g->k : g->m, turned.a ? g->m : g->k), true, g->dtype},
        {(void **)&g->b.data,
         bytes_of(&g->b, g->dtype, turned.b ? g->k : rows_b, turned.b ? rows_b : g->k), true,
         g->dtype},
        {&g->d.data, bytes_of(&g->d, g->output, g->m, g->n), false, g->output},
        {&g->workspace, g->workspace_bytes, false, DW_F32},
        {(void **)&g->residual.data,
         g->residual.data ? bytes_of(&g->residual, g->output, g->m, g->n) : 0, true, g->output},
        {(void **)&g->bias, g->bias ? (size_t)rows_b * dw_dtype_bytes(g->dtype) : 0, true,
         g->dtype},
        {(void **)&g->row_scale, g->row_scale ? (size_t)g->m * sizeof(float) : 0, true, DW_F32},
    };
    return dw__loads_open(&m->loads, m->context, parts, DW_COUNT(parts));
}

/* Leaves out candidates that do not run; the first one, which is the cost model's, must. `about`: seconds of a run. */
static dw_status find_variants(bench *m, candidates *c, double *about) {
    int count = 0;
    for (int i = 0; i < c->count; i++) {
        double first;
        dw_status status =
            dw__variant_of(m->context, &dw__sm90_gemm, c->shapes[i].params, &m->variants[count]);
        if (status == DW_OK) status = dw__variant_status(m->variants[count]);
        if (status == DW_OK) status = dw__loads_time(&m->loads, run, m, count, 1, &first);
        if (status == DW_OK) status = dw__loads_time(&m->loads, run, m, count, 1, about);
        if (i == 0) DW_RETURN_IF_FAILED(status);
        if (status == DW_OK) c->shapes[count++] = c->shapes[i];
    }
    c->count = count;
    return DW_OK;
}

static size_t workspace_of(const dw__gemm_groups_call *c, const dw__sm90_shape *shape,
                           int sm_count) {
    return shape->split ? dw__sm90_split_of(c, shape, sm_count).bytes : 0;
}

/* Measures the candidates of a product and sorts them. */
static dw_status measure(const dw__gemm_groups_call *given, const dw__context *context,
                         candidates *c) {
    bench m = {.call = *given, .context = context};
    double about = 0.0;
    m.call.gemm.workspace_bytes = 0;
    for (int i = 0; i < c->count; i++) {
        const size_t bytes = workspace_of(given, &c->shapes[i], context->sm_count);
        if (bytes > m.call.gemm.workspace_bytes) m.call.gemm.workspace_bytes = bytes;
    }
    dw_status status = open_bench(&m);
    if (status == DW_OK) status = find_variants(&m, c, &about);
    if (status == DW_OK) status = dw__loads_compare(&m.loads, run, &m, c->count, about, c->seconds);
    dw__loads_close(&m.loads);
    if (status == DW_OK) sort(c);
    return status;
}

/* Reads what is kept, or measures, outside a graph that the thread may record. Returns no candidates if nothing was
 * measured. */
static candidates decide(const dw__gemm_groups_call *given, const dw__context *context,
                         const choice_key *key, const candidates *from) {
    char name[2 * TEXT_BYTES];
    candidates kept = {.count = 0}, measured = *from;
    int before = 0;
    if (!dw__loads_are_wanted(context)) return kept;
    print_name(key, name);
    if (read_kept(context->name, name, from, &kept)) return kept;
    if (context->device->capture_relax(&before) != DW_OK) return kept;
    const dw_status status = measure(given, context, &measured);
    context->device->capture_restore(before);
    keep(context->name, name, &measured, status == DW_OK ? NULL : dw_last_error());
    /* Another process may have kept its times first. */
    if (read_kept(context->name, name, from, &kept) || status != DW_OK) return kept;
    return measured;
}

/* ---- choice --------------------------------------------------------------------------------------------------- */

typedef struct choice {
    struct choice *next; /* in its bucket */
    choice_key key;
    candidates measured; /* none: the cost model chooses */
} choice;

static choice *_Atomic buckets[BUCKETS];                 /* lists that only grow at their heads */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of additions and measurements */

static choice *_Atomic *bucket_of(const choice_key *key) {
    return &buckets[dw__key_hash(key, sizeof *key) % BUCKETS];
}

static const choice *find(choice *_Atomic *bucket, const choice_key *key) {
    const choice *made = atomic_load_explicit(bucket, memory_order_acquire);
    while (made && memcmp(&made->key, key, sizeof *key) != 0) made = made->next;
    return made;
}

/* Without memory for the list the next call reads what is kept. */
static void add(choice *_Atomic *bucket, const choice_key *key, const candidates *measured) {
    choice *made = dw__malloc(sizeof *made);
    if (!made) return;
    *made = (choice){atomic_load_explicit(bucket, memory_order_relaxed), *key, *measured};
    atomic_store_explicit(bucket, made, memory_order_release);
}

static candidates measured_of(const dw__gemm_groups_call *c, const dw__context *context) {
    candidates found = candidates_of(c, context->sm_count);
    if (found.count < 2) return (candidates){.count = 0};
    const choice_key key = key_of(c, context, &found);
    choice *_Atomic *bucket = bucket_of(&key);
    const choice *made = find(bucket, &key);
    if (made) return made->measured;
    pthread_mutex_lock(&lock);
    made = find(bucket, &key); /* another thread may have added it */
    if (made) {
        found = made->measured;
    } else {
        found = decide(c, context, &key, &found);
        add(bucket, &key, &found);
    }
    pthread_mutex_unlock(&lock);
    return found;
}

/* Finds the fastest candidate that the call's workspace has room for. */
static bool first_with_room(const dw__gemm_groups_call *c, const candidates *measured, int sm_count,
                            dw__sm90_shape *shape, double *seconds) {
    for (int i = 0; i < measured->count; i++) {
        *shape = measured->shapes[i];
        *seconds = measured->seconds[i];
        if (workspace_of(c, shape, sm_count) <= c->gemm.workspace_bytes) return true;
    }
    return false;
}

dw__sm90_shape dw__sm90_choose(const dw__gemm_groups_call *c, const dw__context *context) {
    const candidates measured = measured_of(c, context);
    dw__sm90_shape shape;
    double seconds;
    return first_with_room(c, &measured, context->sm_count, &shape, &seconds)
               ? shape
               : dw__sm90_shape_of(c, context->sm_count);
}

size_t dw__sm90_workspace(const dw_gemm *call, dw__gemm_turned turned, const dw__context *context) {
    dw__gemm_groups_call c = dw__gemm_single(call, turned);
    c.gemm.workspace_bytes = SIZE_MAX;
    const dw__sm90_shape shape = dw__sm90_choose(&c, context);
    return workspace_of(&c, &shape, context->sm_count);
}

bool dw__sm90_measured(const dw__gemm_groups_call *c, const dw__context *context,
                       dw__sm90_shape *shape, double *seconds) {
    const candidates from = candidates_of(c, context->sm_count);
    candidates kept;
    char name[2 * TEXT_BYTES];
    if (from.count < 2 || context->device != &dw__device_cuda) return false;
    const choice_key key = key_of(c, context, &from);
    print_name(&key, name);
    return read_kept(context->name, name, &from, &kept) &&
           first_with_room(c, &kept, context->sm_count, shape, seconds);
}
