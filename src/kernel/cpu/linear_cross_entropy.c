/* Gradients of cross_entropy(linear(x, w, b)) with only a chunk of dlogits rows in memory. A chunk is
 * computed from the logits and their log-sum-exp, multiplied into dx, and added to dw and db while it is in
 * cache. Chunks depend only on the shape and run one after the other, so results do not depend on threads.
 * Used with AVX-512 and if w is [K, V]; otherwise linear_cross_entropy_blocks.c is faster. */
#include "base/pool.h"
#include "kernel/cpu/cpu_matmul.h"
#include "kernel/cpu/head.h"
#include "kernel/cpu/logit_gradient.h"
#include <string.h>

DW_ISA_TABLE(dw__logit_gradient_loops)

enum {
    CHUNK_GRAIN = 48, /* rows that suit the GEMMs */
    /* with fewer rows, the GEMMs do too little work for each read of w and dw */
    CHUNK_ROWS_MIN = 96,
    SUM_COLUMNS = 1024, /* columns of db per task */
};
static const int64_t CHUNK_FLOATS = 12 << 20; /* 48 MB of dlogits */

static int64_t chunk_rows(const dw__head *g) {
    int64_t vocabulary = g->vocabulary > 0 ? g->vocabulary : 1;
    int64_t rows = CHUNK_FLOATS / vocabulary / CHUNK_GRAIN * CHUNK_GRAIN;
    if (rows < CHUNK_ROWS_MIN) rows = CHUNK_ROWS_MIN;
    return dw__min64(rows, g->tokens);
}

/* ---- the GEMMs of one chunk ---------------------------------------------------------------------- */

/* dx[first..] = dlogits * w */
static dw__matmul dx_gemm(const dw__head *g, const float *dlogits, int64_t first, int64_t rows) {
    const dw__tensor *w = g->w;
    return (dw__matmul){
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
static dw__matmul dw_gemm(const dw__head *g, const float *dlogits, int64_t first, int64_t rows) {
    const dw__tensor *x = g->x;
    const float *rows_of_x = x->data ? (const float *)x->data + first * x->stride[0] : NULL;
    dw__matmul p = {.k = rows, .batches = 1, .c = g->dw, .accumulate = first > 0};
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
    const dw__head *g;
    const dw__logit_gradient_loops *loops;
    int64_t chunk, first, rows;
    float *dlogits;
} chunk_job;

static void dlogits_task(void *context, int64_t index, int worker) {
    (void)worker;
    const chunk_job *j = context;
    int64_t vocabulary = j->g->vocabulary;
    int64_t token = j->first + index;
    const float *logits = (const float *)j->g->logits->data + token * j->g->logits->stride[0];
    dw__head_gradient_row(j->g, token, 0, vocabulary, logits, j->dlogits + index * vocabulary);
}

static void db_task(void *context, int64_t index, int worker) {
    (void)worker;
    const chunk_job *j = context;
    int64_t column = index * SUM_COLUMNS, vocabulary = j->g->vocabulary;
    j->loops->column_sums(j->rows, dw__min64(SUM_COLUMNS, vocabulary - column), j->dlogits + column,
                          vocabulary, j->first > 0, j->g->db + column);
}

/* ---- kernel ------------------------------------------------------------------------------------- */

static dw_status supports(const dw__kernel *kernel, const void *given, const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    dw__head g;
    return dw__head_read(call, &g) && g.logits ? DW_OK : dw__kernel_refuse(kernel);
}

/* Floats of dlogits, rounded up to a cache line. */
static size_t dlogits_floats(const dw__head *g) {
    return (size_t)dw__round_up(chunk_rows(g) * g->vocabulary, 16);
}

/* The last chunk has fewer rows, and its GEMMs may be divided differently. `of` returns their scratch or what
 * a library allocates. */
static size_t gemm_bytes(const dw__head *g, size_t (*of)(const dw__matmul *p, bool passing)) {
    int64_t chunk = chunk_rows(g), sizes[] = {chunk, chunk > 0 ? g->tokens % chunk : 0};
    size_t most = 0;
    for (size_t i = 0; i < DW_COUNT(sizes); i++) {
        dw__matmul dx = dx_gemm(g, NULL, 0, sizes[i]), dw = dw_gemm(g, NULL, 0, sizes[i]);
        size_t bytes = of(&dx, false);
        if (bytes > most) most = bytes;
        bytes = of(&dw, false);
        if (bytes > most) most = bytes;
    }
    return most;
}

static dw_status workspace_bytes(const dw__kernel *kernel, const void *given,
                                 const dw__context *context, size_t *bytes) {
    const dw__call *call = given;
    (void)kernel, (void)context;
    dw__head g;
    if (!dw__head_read(call, &g)) return DW_OK;
    *bytes = dlogits_floats(&g) * sizeof(float) + gemm_bytes(&g, dw__matmul_scratch);
    return DW_OK;
}

static size_t library_bytes(const dw__call *call) {
    dw__head g;
    return dw__head_read(call, &g) ? gemm_bytes(&g, dw__matmul_library) : 0;
}

static dw_status run_chunk(chunk_job *j, void *gemm_scratch) {
    const dw__head *g = j->g;
    dw__pool_run(j->rows, dlogits_task, j);
    if (g->dx) {
        dw__matmul p = dx_gemm(g, j->dlogits, j->first, j->rows);
        DW_RETURN_IF_FAILED(dw__matmul_run(&p, NULL, gemm_scratch));
    }
    if (g->dw) {
        dw__matmul p = dw_gemm(g, j->dlogits, j->first, j->rows);
        DW_RETURN_IF_FAILED(dw__matmul_run(&p, NULL, gemm_scratch));
    }
    if (g->db) dw__pool_run(dw__divide_up(g->vocabulary, SUM_COLUMNS), db_task, j);
    return DW_OK;
}

static dw_status run(const dw__call *call, void *scratch) {
    dw__head g;
    if (!dw__head_read(call, &g)) {
        return dw__fail(DW_INTERNAL,
                        "cpu.linear_cross_entropy_backward.chunked does not support this call");
    }
    DW_RETURN_IF_FAILED(dw__head_begin(&g));
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
    .source = "ours, over the GEMMs that linear uses",
    .needs = "rows of F32, and the logits of forward",
    .supports = supports,
    .workspace_bytes = workspace_bytes,
    .library_bytes = library_bytes,
    .run = run,
    .tolerance_factor = 8.0,
};
