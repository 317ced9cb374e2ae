/* Gradients of cross_entropy(linear(x, w, b)) with never more than some rows of dlogits in memory: a
 * chunk of rows is made from the logits and their log-sum-exp, multiplied into dx, and added into dw and
 * db while it is still in cache. Chunks depend on the shape alone and follow each other, so results do
 * not depend on threads. */
#include "base/pool.h"
#include "kernel/cpu/head_gradient.h"
#include "kernel/cpu/logit_gradient.h"
#include "kernel/cpu/product.h"
#include <math.h>
#include <string.h>

DW_ISA_TABLE(dw__logit_gradient_loops)

enum {
    CHUNK_GRAIN = 48,    /* rows, as the products like them */
    CHUNK_ROWS_MIN = 96, /* fewer would read w and dw once for too little work */
    SUM_COLUMNS = 1024,  /* of db, per task */
};
static const int64_t CHUNK_FLOATS = 12 << 20; /* 48 MB of dlogits */

static int64_t chunk_rows(const dw__head_gradient *g) {
    int64_t vocabulary = g->vocabulary > 0 ? g->vocabulary : 1;
    int64_t rows = CHUNK_FLOATS / vocabulary / CHUNK_GRAIN * CHUNK_GRAIN;
    if (rows < CHUNK_ROWS_MIN) rows = CHUNK_ROWS_MIN;
    return dw__min64(rows, g->tokens);
}

static bool is_f32(const dw__tensor *t, int rank) { return t->dtype == DW_F32 && t->rank == rank; }

bool dw__head_gradient_read(const dw__call *call, dw__head_gradient *out) {
    const dw_attr *reduction = dw__call_attr(call, DW_ATTR_KEY_REDUCTION);
    *out = (dw__head_gradient){
        .x = &call->inputs[0],
        .w = &call->inputs[1],
        .logits = &call->inputs[3],
        .target = &call->inputs[4],
        .lse = &call->inputs[5],
        .dloss = &call->inputs[6],
        .dx = call->outputs[0].data,
        .dw = call->outputs[1].data,
        .db = call->outputs[2].data,
        .transpose_w = dw__call_int(call, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0,
        .is_mean = !reduction || strcmp(reduction->string, "mean") == 0,
        .is_none = reduction && strcmp(reduction->string, "none") == 0,
        .ignore_index = dw__call_int(call, DW_ATTR_KEY_IGNORE_INDEX, -100),
        .label_smoothing = (float)dw__call_float(call, DW_ATTR_KEY_LABEL_SMOOTHING, 0.0),
    };
    if (!is_f32(out->x, 2) || !is_f32(out->w, 2) || !is_f32(out->logits, 2)) return false;
    if (!is_f32(out->lse, 1) || !is_f32(out->dloss, out->is_none ? 1 : 0)) return false;
    if (out->target->rank != 1 || out->target->dtype != DW_I64) return false;
    out->tokens = out->logits->shape[0];
    out->vocabulary = out->logits->shape[1];
    out->size = out->x->shape[1];
    return out->vocabulary <= 1 || out->logits->stride[1] == 1;
}

/* ---- the products of one chunk ------------------------------------------------------------------- */

/* dx[first..] = dlogits * w */
static dw__product dx_product(const dw__head_gradient *g, const float *dlogits, int64_t first,
                              int64_t rows) {
    const dw__tensor *w = g->w;
    return (dw__product){
        .m = rows,
        .n = g->size,
        .k = g->vocabulary,
        .batches = 1,
        .a = dlogits,
        .b = w->data,
        .c = g->dx ? g->dx + first * g->size : NULL,
        .a_row = g->vocabulary,
        .a_k = 1,
        .b_k = w->stride[g->transpose_w ? 0 : 1],
        .b_column = w->stride[g->transpose_w ? 1 : 0],
    };
}

/* dw (+)= dlogits^T * x [V, K], or its transpose */
static dw__product dw_product(const dw__head_gradient *g, const float *dlogits, int64_t first,
                              int64_t rows) {
    const dw__tensor *x = g->x;
    const float *rows_of_x = x->data ? (const float *)x->data + first * x->stride[0] : NULL;
    dw__product p = {.k = rows, .batches = 1, .c = g->dw, .accumulate = first > 0};
    if (g->transpose_w) {
        p.m = g->vocabulary, p.a = dlogits, p.a_row = 1, p.a_k = g->vocabulary;
        p.n = g->size, p.b = rows_of_x, p.b_k = x->stride[0], p.b_column = x->stride[1];
    } else {
        p.m = g->size, p.a = rows_of_x, p.a_row = x->stride[1], p.a_k = x->stride[0];
        p.n = g->vocabulary, p.b = dlogits, p.b_k = g->vocabulary, p.b_column = 1;
    }
    return p;
}

/* ---- dlogits --------------------------------------------------------------------------------------- */

typedef struct chunk_job {
    const dw__head_gradient *g;
    const dw__logit_gradient_loops *loops;
    int64_t chunk, first, rows;
    float *dlogits;
} chunk_job;

static int64_t target_of(const dw__head_gradient *g, int64_t token) {
    return ((const int64_t *)g->target->data)[token * g->target->stride[0]];
}

void dw__head_gradient_row(const dw__head_gradient *g, int64_t token, int64_t column,
                           int64_t columns, float *out) {
    int64_t target = target_of(g, token);
    if (target == g->ignore_index) {
        memset(out, 0, (size_t)columns * sizeof(float));
        return;
    }
    const float *dloss = g->dloss->data;
    float grad = g->is_none ? dloss[token * g->dloss->stride[0]] : dloss[0];
    float factor = (float)(grad / g->normalizer);
    float smooth = g->label_smoothing / (float)g->vocabulary;
    const float *logits = (const float *)g->logits->data + token * g->logits->stride[0];
    float lse = ((const float *)g->lse->data)[token * g->lse->stride[0]];
    dw__logit_gradient_loops_now()->row(columns, logits + column, lse, factor, smooth, out);
    if (target < column || target >= column + columns) return;
    float p = expf(logits[target] - lse);
    out[target - column] = factor * (p - (1.0f - g->label_smoothing) - smooth);
}

static void dlogits_task(void *context, int64_t index, int worker) {
    (void)worker;
    const chunk_job *j = context;
    int64_t vocabulary = j->g->vocabulary;
    dw__head_gradient_row(j->g, j->first + index, 0, vocabulary, j->dlogits + index * vocabulary);
}

static void db_task(void *context, int64_t index, int worker) {
    (void)worker;
    const chunk_job *j = context;
    int64_t column = index * SUM_COLUMNS, vocabulary = j->g->vocabulary;
    j->loops->column_sums(j->rows, dw__min64(SUM_COLUMNS, vocabulary - column), j->dlogits + column,
                          vocabulary, j->first > 0, j->g->db + column);
}

dw_status dw__head_gradient_begin(dw__head_gradient *g) {
    int64_t counted = 0;
    for (int64_t token = 0; token < g->tokens; token++) {
        int64_t target = target_of(g, token);
        if (target == g->ignore_index) continue;
        if (target < 0 || target >= g->vocabulary) {
            return dw__fail(DW_INVALID_ARGUMENT,
                            "cross_entropy: target %lld at row %lld is outside [0, %lld): use "
                            "ignore_index (%lld) for tokens that do not count",
                            (long long)target, (long long)token, (long long)g->vocabulary,
                            (long long)g->ignore_index);
        }
        counted++;
    }
    g->normalizer = g->is_mean ? (double)counted : 1.0;
    return DW_OK;
}

/* ---- kernel ------------------------------------------------------------------------------------- */

static bool fits(const dw__call *call) {
    dw__head_gradient g;
    return dw__head_gradient_read(call, &g);
}

/* Floats of dlogits, up to a cache line. */
static size_t dlogits_floats(const dw__head_gradient *g) {
    return (size_t)dw__round_up(chunk_rows(g) * g->vocabulary, 16);
}

/* The last chunk has fewer rows, and another cut of its products. */
static size_t product_bytes(const dw__head_gradient *g) {
    int64_t chunk = chunk_rows(g), sizes[] = {chunk, chunk > 0 ? g->tokens % chunk : 0};
    size_t most = 0;
    for (size_t i = 0; i < DW_COUNT(sizes); i++) {
        dw__product dx = dx_product(g, NULL, 0, sizes[i]), dw = dw_product(g, NULL, 0, sizes[i]);
        size_t bytes = dw__product_scratch(&dx, false);
        if (bytes > most) most = bytes;
        bytes = dw__product_scratch(&dw, false);
        if (bytes > most) most = bytes;
    }
    return most;
}

static size_t scratch_bytes(const dw__call *call) {
    dw__head_gradient g;
    if (!dw__head_gradient_read(call, &g)) return 0;
    return dlogits_floats(&g) * sizeof(float) + product_bytes(&g);
}

static dw_status run_chunk(chunk_job *j, void *product_scratch) {
    const dw__head_gradient *g = j->g;
    dw__pool_run(j->rows, dlogits_task, j);
    if (g->dx) {
        dw__product p = dx_product(g, j->dlogits, j->first, j->rows);
        DW_RETURN_IF_FAILED(dw__product_run(&p, NULL, product_scratch));
    }
    if (g->dw) {
        dw__product p = dw_product(g, j->dlogits, j->first, j->rows);
        DW_RETURN_IF_FAILED(dw__product_run(&p, NULL, product_scratch));
    }
    if (g->db) dw__pool_run(dw__divide_up(g->vocabulary, SUM_COLUMNS), db_task, j);
    return DW_OK;
}

static dw_status run(const dw__call *call, void *scratch) {
    dw__head_gradient g;
    if (!dw__head_gradient_read(call, &g)) {
        return dw__fail(DW_INTERNAL,
                        "cpu.linear_cross_entropy_backward.chunked was given a call that "
                        "it does not fit");
    }
    DW_RETURN_IF_FAILED(dw__head_gradient_begin(&g));
    if (g.tokens == 0) {
        if (g.dw) memset(g.dw, 0, (size_t)(g.vocabulary * g.size) * sizeof(float));
        if (g.db) memset(g.db, 0, (size_t)g.vocabulary * sizeof(float));
        return DW_OK;
    }
    chunk_job job = {.g = &g, .loops = dw__logit_gradient_loops_now(), .dlogits = scratch};
    job.chunk = chunk_rows(&g);
    for (; job.first < g.tokens; job.first += job.chunk) {
        job.rows = dw__min64(job.chunk, g.tokens - job.first);
        DW_RETURN_IF_FAILED(run_chunk(&job, job.dlogits + dlogits_floats(&g)));
    }
    return DW_OK;
}

const dw__kernel dw__linear_cross_entropy_backward_chunked = {
    .name = "cpu.linear_cross_entropy_backward.chunked",
    .op = DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD,
    .source = "ours, over the products that linear uses",
    .fits = fits,
    .scratch_bytes = scratch_bytes,
    .run = run,
    .tolerance_factor = 8.0,
};
