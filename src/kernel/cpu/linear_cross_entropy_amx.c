/* Gradients of cross_entropy(linear(x, w, b)) on AMX (amx.h), with only a block of dlogits in memory.
 *
 *               vocabulary ->          A block of dlogits is computed from the logits and their log-sum-exp in
 *     tokens  +----+----+----+         cache, split into BF16 parts once for each use, and multiplied into dw
 *       |     |    |####|    |  ####   (summed over tokens, in place) and into dx (summed over the vocabulary,
 *       v     +----+----+----+         in a partial sum).
 *
 * Tasks are groups of neighbouring vocabulary chunks. Their number does not depend on the number of threads.
 * Each has its own partial dx, and these are summed in order. So w is packed once per round of tokens, x is
 * packed once, every logit is read once, and results do not depend on threads. */
#include "base/pool.h"
#include "kernel/cpu/amx.h"
#include "kernel/cpu/cpu_matmul.h"
#include "kernel/cpu/head.h"
#include "kernel/cpu/logit_gradient.h"
#include <string.h>

#if DW_HAVE_AMX

DW_ISA_TABLE(dw__gemm_loops)
DW_ISA_TABLE(dw__logit_gradient_loops)

enum {
    BLOCK = 384,        /* of tokens and vocabulary: dlogits and both packings stay near L2 */
    GROUPS = 16,        /* tasks, each with a partial dx */
    SUM_FLOATS = 16384, /* of dx per task of the final sum */
    SIZE_MIN = 64,
    TOKENS_MIN = 64,
    VOCABULARY_MIN = 4096,
};
static const int64_t PARTIAL_FLOATS = 1 << 20; /* most of dx per group: 64 MB in all groups */

/* ---- division into tasks --------------------------------------------------------------------------- */

typedef struct head_cuts {
    int64_t round;  /* tokens of one round, whose partial dx is held */
    int64_t chunks; /* chunks of the vocabulary */
    size_t partial; /* floats of one group's dx */
    /* sizes in bytes */
    size_t panel, x_shared, w_panels, dlogits, packed, worker, total;
} head_cuts;

static int64_t panels_of(int64_t extent) { return dw__divide_up(extent, DW_AMX_PANEL); }

static head_cuts cut(const dw__head *g) {
    head_cuts out = {.panel = dw__amx_panel_bytes(BLOCK)};
    int64_t rows = PARTIAL_FLOATS / g->size / BLOCK * BLOCK;
    out.round = dw__min64(rows > BLOCK ? rows : BLOCK, g->tokens);
    out.chunks = dw__divide_up(g->vocabulary, BLOCK);
    out.partial = (size_t)dw__round_up(out.round * g->size, 16);
    int64_t blocks = dw__divide_up(out.round, BLOCK);
    out.x_shared = (size_t)(blocks * panels_of(g->size)) * out.panel;
    out.w_panels = (size_t)panels_of(g->size) * out.panel;
    out.dlogits = sizeof(float) * BLOCK * BLOCK;
    out.packed = (size_t)panels_of(BLOCK) * out.panel;
    out.worker =
        out.w_panels + out.dlogits + 2 * out.packed + sizeof(float) * DW_AMX_PANEL * DW_AMX_PANEL;
    out.total = sizeof(float) * GROUPS * out.partial + out.x_shared +
                (size_t)dw__round_up(blocks * (int64_t)sizeof(_Atomic int), 64) +
                (size_t)dw__pool_threads() * out.worker;
    return out;
}

/* Packing requires that one of the two strides is 1. */
static bool packs(const dw__tensor *t) { return t->stride[0] == 1 || t->stride[1] == 1; }

static dw_status supports(const dw__kernel *kernel, const void *given, const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    dw__head g;
    return dw__amx_available() && dw__head_read(call, &g) && g.logits && packs(g.x) && packs(g.w) &&
                   g.size >= SIZE_MIN && g.tokens >= TOKENS_MIN && g.vocabulary >= VOCABULARY_MIN
               ? DW_OK
               : dw__kernel_refuse(kernel);
}

static dw_status workspace_bytes(const dw__kernel *kernel, const void *given,
                                 const dw__context *context, size_t *bytes) {
    const dw__call *call = given;
    (void)kernel, (void)context;
    dw__head g;
    if (!dw__head_read(call, &g)) return DW_OK;
    *bytes = cut(&g).total;
    return DW_OK;
}

/* ---- running ----------------------------------------------------------------------------------------- */

typedef struct head_job {
    const dw__head *g;
    head_cuts cut;
    float *partials;      /* [GROUPS][round, K] */
    char *x_shared;       /* [blocks of tokens][panels of K] over the block's tokens */
    _Atomic int *unsplit; /* one per block of tokens: x could not be split */
    char *workers;
    int64_t first, rows; /* tokens of this round */
} head_job;

typedef struct head_worker {
    char *w_panels, *for_dx, *for_dw;
    float *dlogits, *tile;
} head_worker;

static head_worker worker_of(const head_job *j, int worker) {
    char *at = j->workers + (size_t)worker * j->cut.worker;
    head_worker out = {.w_panels = at};
    out.for_dx = out.w_panels + j->cut.w_panels;
    out.for_dw = out.for_dx + j->cut.packed;
    out.dlogits = (float *)(out.for_dw + j->cut.packed);
    out.tile = (float *)((char *)out.dlogits + j->cut.dlogits);
    return out;
}

/* dw = dlogits^T x if w is [V, K], and x^T dlogits if it is [K, V]: x is on B's side or on A's. */
static void pack_x_task(void *context, int64_t index, int worker) {
    (void)worker;
    head_job *j = context;
    const dw__tensor *x = j->g->x;
    int64_t panels = panels_of(j->g->size), block = index / panels,
            column = index % panels * DW_AMX_PANEL;
    int64_t token = block * BLOCK, count = dw__min64(BLOCK, j->rows - token);
    const float *from =
        (const float *)x->data + (j->first + token) * x->stride[0] + column * x->stride[1];
    bool splits =
        dw__amx_pack(!j->g->transpose_w, dw__min64(DW_AMX_PANEL, j->g->size - column), count, from,
                     x->stride[1], x->stride[0], j->x_shared + (size_t)index * j->cut.panel);
    if (!splits) atomic_store_explicit(&j->unsplit[block], 1, memory_order_relaxed);
}

/* Multiplies whole panels: `rows` panels of A times `columns` panels of B, into C. */
static void multiply_panels(int64_t rows, int64_t columns, int64_t k, const char *a, const char *b,
                            size_t panel, float *tile, float *c, int64_t c_stride, bool add) {
    for (int64_t column = 0; column < columns; column += DW_AMX_PANEL) {
        for (int64_t row = 0; row < rows; row += DW_AMX_PANEL) {
            dw__amx_multiply(dw__amx_steps(k), a + (size_t)(row / DW_AMX_PANEL) * panel,
                             b + (size_t)(column / DW_AMX_PANEL) * panel, tile, DW_AMX_PANEL);
            dw__amx_put(tile, dw__min64(DW_AMX_PANEL, rows - row),
                        dw__min64(DW_AMX_PANEL, columns - column), c + row * c_stride + column,
                        c_stride, add, NULL);
        }
    }
}

/* dx of the group += dlogits * w over this chunk of the vocabulary. */
static void add_dx(const head_job *j, const head_worker *own, int64_t token, int64_t count,
                   int64_t vocable, int64_t width, bool w_splits, bool add, float *partial) {
    const dw__head *g = j->g;
    float *c = partial + token * g->size;
    bool splits = w_splits && dw__amx_pack_panels(true, count, width, own->dlogits, BLOCK, 1,
                                                  own->for_dx, j->cut.panel);
    if (splits) {
        multiply_panels(count, g->size, width, own->for_dx, own->w_panels, j->cut.panel, own->tile,
                        c, g->size, add);
        return;
    }
    int64_t v_stride = g->w->stride[g->transpose_w ? 0 : 1],
            k_stride = g->w->stride[g->transpose_w ? 1 : 0];
    const float *w = (const float *)g->w->data + vocable * v_stride;
    dw__gemm_loops_now()->small(false, k_stride != 1, count, g->size, width, 1.0f, own->dlogits,
                                BLOCK, w, k_stride != 1 ? k_stride : v_stride, add ? 1.0f : 0.0f, c,
                                g->size);
}

/* dw of this chunk (+)= dlogits^T * x, or its transpose, over this block of tokens. */
static void add_dw(const head_job *j, const head_worker *own, int64_t token, int64_t count,
                   int64_t vocable, int64_t width) {
    const dw__head *g = j->g;
    bool add = j->first + token > 0;
    int64_t block = token / BLOCK;
    const char *x_panels = j->x_shared + (size_t)(block * panels_of(g->size)) * j->cut.panel;
    bool splits = !atomic_load_explicit(&j->unsplit[block], memory_order_relaxed) &&
                  dw__amx_pack_panels(g->transpose_w, width, count, own->dlogits, 1, BLOCK,
                                      own->for_dw, j->cut.panel);
    const dw__tensor *x = g->x;
    const float *rows = (const float *)x->data + (j->first + token) * x->stride[0];
    bool x_rows = x->stride[1] == 1;
    if (g->transpose_w) {
        float *c = g->dw + vocable * g->size;
        if (splits) {
            multiply_panels(width, g->size, count, own->for_dw, x_panels, j->cut.panel, own->tile,
                            c, g->size, add);
        } else {
            dw__gemm_loops_now()->small(true, !x_rows, width, g->size, count, 1.0f, own->dlogits,
                                        BLOCK, rows, x->stride[x_rows ? 0 : 1], add ? 1.0f : 0.0f,
                                        c, g->size);
        }
        return;
    }
    float *c = g->dw + vocable;
    if (splits) {
        multiply_panels(g->size, width, count, x_panels, own->for_dw, j->cut.panel, own->tile, c,
                        g->vocabulary, add);
    } else {
        dw__gemm_loops_now()->small(x_rows, false, g->size, width, count, 1.0f, rows,
                                    x->stride[x_rows ? 0 : 1], own->dlogits, BLOCK,
                                    add ? 1.0f : 0.0f, c, g->vocabulary);
    }
}

static void group_task(void *context, int64_t group, int worker) {
    const head_job *j = context;
    const dw__head *g = j->g;
    head_worker own = worker_of(j, worker);
    float *partial = j->partials + (size_t)group * j->cut.partial;
    int64_t first = group * j->cut.chunks / GROUPS, last = (group + 1) * j->cut.chunks / GROUPS;
    if (first == last && g->dx) memset(partial, 0, sizeof(float) * (size_t)(j->rows * g->size));
    dw__amx_begin();
    for (int64_t chunk = first; chunk < last; chunk++) {
        int64_t vocable = chunk * BLOCK, width = dw__min64(BLOCK, g->vocabulary - vocable);
        bool w_splits = true;
        if (g->dx) {
            int64_t v_stride = g->w->stride[g->transpose_w ? 0 : 1];
            w_splits = dw__amx_pack_panels(
                false, g->size, width, (const float *)g->w->data + vocable * v_stride,
                g->w->stride[g->transpose_w ? 1 : 0], v_stride, own.w_panels, j->cut.panel);
        }
        for (int64_t token = 0; token < j->rows; token += BLOCK) {
            int64_t count = dw__min64(BLOCK, j->rows - token);
            for (int64_t i = 0; i < count; i++) {
                int64_t at = j->first + token + i;
                const float *logits =
                    (const float *)g->logits->data + at * g->logits->stride[0] + vocable;
                dw__head_gradient_row(g, at, vocable, width, logits, own.dlogits + i * BLOCK);
            }
            if (g->dx)
                add_dx(j, &own, token, count, vocable, width, w_splits, chunk > first, partial);
            if (g->dw) add_dw(j, &own, token, count, vocable, width);
            if (g->db) {
                dw__logit_gradient_loops_now()->column_sums(count, width, own.dlogits, BLOCK,
                                                            j->first + token > 0, g->db + vocable);
            }
        }
    }
    dw__amx_end();
}

static void sum_task(void *context, int64_t index, int worker) {
    (void)worker;
    const head_job *j = context;
    int64_t start = index * SUM_FLOATS, count = dw__min64(SUM_FLOATS, j->rows * j->g->size - start);
    float *dx = j->g->dx + j->first * j->g->size + start;
    memcpy(dx, j->partials + start, sizeof(float) * (size_t)count);
    for (int64_t group = 1; group < GROUPS; group++) {
        const float *from = j->partials + (size_t)group * j->cut.partial + start;
        for (int64_t i = 0; i < count; i++) dx[i] += from[i];
    }
}

static dw_status run(const dw__call *call, void *scratch) {
    dw__head g;
    if (!dw__head_read(call, &g)) {
        return dw__fail(DW_INTERNAL,
                        "cpu.linear_cross_entropy_backward.amx does not support this call");
    }
    DW_RETURN_IF_FAILED(dw__head_begin(&g));
    head_job j = {.g = &g, .cut = cut(&g), .partials = scratch};
    int64_t blocks = dw__divide_up(j.cut.round, BLOCK);
    j.x_shared = (char *)(j.partials + GROUPS * j.cut.partial);
    j.unsplit = (_Atomic int *)(j.x_shared + j.cut.x_shared);
    j.workers = (char *)j.unsplit + dw__round_up(blocks * (int64_t)sizeof(_Atomic int), 64);
    for (; j.first < g.tokens; j.first += j.cut.round) {
        j.rows = dw__min64(j.cut.round, g.tokens - j.first);
        for (int64_t block = 0; block < blocks; block++) atomic_init(&j.unsplit[block], 0);
        if (g.dw) dw__pool_run(dw__divide_up(j.rows, BLOCK) * panels_of(g.size), pack_x_task, &j);
        dw__pool_run(GROUPS, group_task, &j);
        if (g.dx) dw__pool_run(dw__divide_up(j.rows * g.size, SUM_FLOATS), sum_task, &j);
    }
    return DW_OK;
}

#else /* built without AMX */

static dw_status supports(const dw__kernel *kernel, const void *given, const dw__gpu_target *gpu) {
    (void)gpu, (void)given;
    return dw__kernel_refuse(kernel);
}
static dw_status workspace_bytes(const dw__kernel *kernel, const void *given,
                                 const dw__context *context, size_t *bytes) {
    (void)kernel, (void)context, (void)given;
    return DW_OK;
}
static dw_status run(const dw__call *call, void *scratch) {
    (void)call, (void)scratch;
    return dw__fail(DW_INTERNAL, "cpu.linear_cross_entropy_backward.amx is not in this build");
}

#endif

const dw__kernel dw__linear_cross_entropy_backward_amx = {
    .name = "cpu.linear_cross_entropy_backward.amx",
    .op = DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD,
    .source = "ours, F32 as six BF16 GEMMs on AMX",
    .needs = "AMX, contiguous rows of F32, a read logsumexp, and sizes that fill its tiles",
    .supports = supports,
    .workspace_bytes = workspace_bytes,
    .run = run,
    .tolerance_factor = 8.0,
};
