/* Matrix products in F32: matmul, linear, and either with a fused elementwise epilogue.
 *
 * The output is cut into tiles, which are the pool's tasks. B is packed into panels once, by all
 * threads, and shared; each task packs its rows of A for itself, multiplies block by block of K,
 * and runs the epilogue on its tile while that is in cache. When packed B would grow too large the
 * product goes in rounds over batches, columns or K. Cuts depend on shapes alone, and the inner
 * loops give each element the same bits wherever it lies (gemm.h), so results do not depend on
 * threads.
 */
#include "base/pool.h"
#include "kernel/cpu/gemm.h"
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

DW_ISA_TABLE(dw__gemm_blocks)

enum {
    TILE_ROWS = 96,     /* a multiple of every register tile's rows */
    TILE_ROWS_MIN = 24, /* likewise */
    TILE_COLUMNS = 768, /* a tile of C stays in a 1 MB L2 while K is walked */
    TASKS_WANTED = 32,  /* so that threads finish together */
    CACHE_LINE = 64,
};
static const int64_t TASK_WORK_MIN = 1 << 20; /* multiply-adds; below, handing out costs too much */
static const int64_t PACKED_FLOATS_MAX = 4 << 20; /* of B at a time: 16 MB */

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

/* ---- what is to be multiplied ------------------------------------------------------------------
 */

/* C[batch][m,n] = A[batch][m,k] * B[batch][k,n] + bias[n]; C is contiguous. */
typedef struct product {
    int64_t m, n, k, batches;
    const float *a, *b, *bias;
    float *c;
    int64_t a_row, a_k, b_k, b_column; /* strides in elements */
    int batch_rank;
    int64_t batch_shape[DW_MAX_RANK], a_batch[DW_MAX_RANK], b_batch[DW_MAX_RANK];
} product;

/* All axes but the last as one axis: its extent and stride. False when no one stride covers them.
 */
static bool collapse_rows(const dw__tensor *tensor, int64_t *rows, int64_t *stride) {
    *rows = 1;
    *stride = 0;
    for (int axis = tensor->rank - 2; axis >= 0; axis--) {
        int64_t extent = tensor->shape[axis];
        if (extent == 1) continue;
        if (*rows == 1) {
            *stride = tensor->stride[axis];
        } else if (tensor->stride[axis] != *rows * *stride) {
            return false;
        }
        *rows *= extent;
    }
    return true;
}

static bool linear_product(const dw__call *call, product *out) {
    const dw__tensor *x = &call->inputs[0], *w = &call->inputs[1], *bias = &call->inputs[2];
    bool transposed = dw__call_int(call, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0;
    *out = (product){.batches = 1, .a = x->data, .b = w->data, .c = call->outputs[0].data};
    if (!collapse_rows(x, &out->m, &out->a_row)) return false;
    out->k = x->shape[x->rank - 1];
    out->a_k = x->stride[x->rank - 1];
    out->n = w->shape[transposed ? 0 : 1];
    out->b_column = w->stride[transposed ? 0 : 1];
    out->b_k = w->stride[transposed ? 1 : 0];
    if (call->input_count > 2 && bias->rank >= 0) {
        if (bias->dtype != DW_F32 || (bias->shape[0] > 1 && bias->stride[0] != 1)) return false;
        out->bias = bias->data;
    }
    return true;
}

static bool matmul_product(const dw__call *call, product *out) {
    const dw__tensor *a = &call->inputs[0], *b = &call->inputs[1];
    int a_row = a->rank - 2, a_k = a->rank - 1, b_k = b->rank - 2, b_column = b->rank - 1;
    if (dw__call_int(call, DW_ATTR_KEY_TRANSPOSE_A, 0)) a_row = a->rank - 1, a_k = a->rank - 2;
    if (dw__call_int(call, DW_ATTR_KEY_TRANSPOSE_B, 0)) b_k = b->rank - 1, b_column = b->rank - 2;
    *out = (product){
        .m = a->shape[a_row],
        .n = b->shape[b_column],
        .k = a->shape[a_k],
        .batches = 1,
        .a = a->data,
        .b = b->data,
        .c = call->outputs[0].data,
        .a_row = a->stride[a_row],
        .a_k = a->stride[a_k],
        .b_k = b->stride[b_k],
        .b_column = b->stride[b_column],
        .batch_rank = a->rank - 2,
    };
    for (int axis = 0; axis < out->batch_rank; axis++) {
        out->batch_shape[axis] = a->shape[axis];
        out->a_batch[axis] = a->stride[axis];
        out->b_batch[axis] = b->stride[axis];
        out->batches *= a->shape[axis];
    }
    return true;
}

static bool describe(const dw__call *call, product *out) {
    if (call->inputs[0].dtype != DW_F32 || call->inputs[1].dtype != DW_F32) return false;
    return call->op == DW_OP_LINEAR ? linear_product(call, out) : matmul_product(call, out);
}

static int64_t batch_offset(const product *p, const int64_t *strides, int64_t batch) {
    int64_t offset = 0;
    for (int axis = p->batch_rank - 1; axis >= 0; axis--) {
        offset += batch % p->batch_shape[axis] * strides[axis];
        batch /= p->batch_shape[axis];
    }
    return offset;
}

/* ---- how it is cut -----------------------------------------------------------------------------
 */

typedef struct cuts {
    int64_t tile_m, tile_n;                   /* of C, one task */
    int64_t depth;                            /* of K, one block */
    int64_t round_batches, round_n, round_k;  /* whose B is packed at a time */
    size_t packed_b, packed_a, tile, workers; /* floats: shared; of one worker; of one worker */
} cuts;

static void cut_tiles(const product *p, const dw__gemm_blocks *blocks, cuts *out) {
    out->tile_m = TILE_ROWS;
    out->tile_n =
        min64(round_up(p->n, blocks->columns), TILE_COLUMNS / blocks->columns * blocks->columns);
    for (;;) {
        int64_t tasks = p->batches * divide_up(p->m, out->tile_m) * divide_up(p->n, out->tile_n);
        int64_t work = min64(p->m, out->tile_m) * out->tile_n * p->k;
        if (tasks >= TASKS_WANTED || work < 2 * TASK_WORK_MIN) return;
        /* Rows first: fewer columns would pack the same rows of A more often. */
        if (out->tile_m > TILE_ROWS_MIN && p->m > out->tile_m / 2) {
            out->tile_m /= 2;
        } else if (out->tile_n > 2 * blocks->columns) {
            out->tile_n = round_up(divide_up(out->tile_n, 2), blocks->columns);
        } else {
            return;
        }
    }
}

/* `whole_k`: tiles do not outlive their task, so K cannot go in rounds. */
static cuts cut(const product *p, bool whole_k, bool keeps_tile) {
    const dw__gemm_blocks *blocks = dw__gemm_blocks_now();
    cuts out = {0};
    if (p->n == 0) return out;
    cut_tiles(p, blocks, &out);
    int64_t padded = round_up(p->n, blocks->columns);
    int64_t k = p->k > 0 ? p->k : 1;
    out.depth = divide_up(k, divide_up(k, blocks->depth));
    out.round_k = k;
    out.round_n = padded;
    if (padded > PACKED_FLOATS_MAX / k) {
        int64_t fitting = PACKED_FLOATS_MAX / k / out.tile_n * out.tile_n;
        if (fitting > 0) {
            out.round_n = fitting;
        } else {
            out.round_n = whole_k ? blocks->columns : out.tile_n;
            if (!whole_k) {
                int64_t depths = PACKED_FLOATS_MAX / out.round_n / out.depth;
                out.round_k = min64(k, (depths > 0 ? depths : 1) * out.depth);
            }
        }
    }
    out.round_batches = 1;
    if (out.round_n == padded && out.round_k == k) {
        int64_t fitting = PACKED_FLOATS_MAX / (padded * k);
        out.round_batches = min64(p->batches, fitting > 0 ? fitting : 1);
    }
    out.tile_n = min64(out.tile_n, out.round_n);
    out.packed_b = (size_t)(out.round_batches * out.round_n * out.round_k);
    out.packed_a = (size_t)round_up(out.tile_m * out.depth, CACHE_LINE / 4);
    out.tile = keeps_tile ? (size_t)round_up(out.tile_m * out.tile_n, CACHE_LINE / 4) : 0;
    out.workers = (size_t)dw__pool_threads();
    return out;
}

static size_t scratch_of(const cuts *c) {
    return (c->packed_b + c->workers * (c->packed_a + c->tile)) * sizeof(float);
}

/* ---- running ------------------------------------------------------------------------------------
 */

typedef struct epilogue {
    const dw__call *call; /* NULL: none */
    int replaced;
} epilogue;

typedef struct job {
    product p;
    cuts cut;
    epilogue then;
    const dw__gemm_blocks *blocks;
    float *packed_b, *worker_scratch;
    /* this round */
    int64_t batch, batch_count, column, column_count, k, k_count;
    /* first failure of an epilogue */
    _Atomic int failed;
    dw_status status;
    char message[512];
} job;

static float *packed_b_of(const job *j, int64_t batch) {
    return j->packed_b + batch * round_up(j->column_count, j->blocks->columns) * j->k_count;
}

enum { PACK_PANELS = 2 }; /* panels of B per task */

static void pack_task(void *context, int64_t index, int worker) {
    (void)worker;
    job *j = context;
    const product *p = &j->p;
    int64_t width = PACK_PANELS * j->blocks->columns;
    int64_t chunks = divide_up(j->column_count, width);
    int64_t k_blocks = divide_up(j->k_count, j->cut.depth);
    int64_t column = index % chunks * width;
    int64_t k = index / chunks % k_blocks * j->cut.depth;
    int64_t batch = index / chunks / k_blocks;
    int64_t count = min64(width, j->column_count - column);
    int64_t depth = min64(j->cut.depth, j->k_count - k);
    const float *b = p->b + batch_offset(p, p->b_batch, j->batch + batch) +
                     (j->column + column) * p->b_column + (j->k + k) * p->b_k;
    float *panels =
        packed_b_of(j, batch) + k * round_up(j->column_count, j->blocks->columns) + column * depth;
    j->blocks->pack_b(count, depth, b, p->b_column, p->b_k, panels);
}

static void record_failure(job *j, dw_status status) {
    int expected = 0;
    if (!atomic_compare_exchange_strong(&j->failed, &expected, 1)) return;
    j->status = status;
    snprintf(j->message, sizeof j->message, "%s", dw_last_error());
}

static void multiply_task(void *context, int64_t index, int worker) {
    job *j = context;
    const product *p = &j->p;
    const cuts *cut = &j->cut;
    int64_t row_tiles = divide_up(p->m, cut->tile_m);
    int64_t column_tiles = divide_up(j->column_count, cut->tile_n);
    int64_t row = index % row_tiles * cut->tile_m; /* fastest: neighbours share panels of B */
    int64_t column = index / row_tiles % column_tiles * cut->tile_n;
    int64_t batch = index / row_tiles / column_tiles;
    int64_t rows = min64(cut->tile_m, p->m - row);
    int64_t columns = min64(cut->tile_n, j->column_count - column);
    int64_t first_row = (j->batch + batch) * p->m + row; /* of C as one matrix */

    float *a_panels = j->worker_scratch + (size_t)worker * (cut->packed_a + cut->tile);
    float *tile = a_panels + cut->packed_a;
    int64_t tile_stride = cut->tile_n;
    if (p->c) {
        tile = p->c + first_row * p->n + j->column + column;
        tile_stride = p->n;
    }
    const float *a = p->a + batch_offset(p, p->a_batch, j->batch + batch) + row * p->a_row;
    int64_t padded = round_up(j->column_count, j->blocks->columns);
    int64_t start = 0;
    do { /* once when K is 0: the bias alone */
        int64_t depth = min64(cut->depth, j->k_count - start);
        const float *b_panels = packed_b_of(j, batch) + start * padded + column * depth;
        j->blocks->pack_a(rows, depth, a + (j->k + start) * p->a_k, p->a_row, p->a_k, a_panels);
        j->blocks->multiply(rows, columns, depth, a_panels, b_panels, tile, tile_stride,
                            j->k + start > 0, p->bias ? p->bias + j->column + column : NULL);
        start += depth;
    } while (start < j->k_count);
    if (!j->then.call || j->k + j->k_count < p->k) return;
    dw_status status = dw__fused_run_tile(j->then.call, first_row, rows, j->column + column,
                                          columns, j->then.replaced, tile, tile_stride);
    if (status != DW_OK) record_failure(j, status);
}

static void run_round(job *j) {
    int64_t chunks = divide_up(j->column_count, PACK_PANELS * j->blocks->columns);
    int64_t k_blocks = divide_up(j->k_count, j->cut.depth);
    dw__pool_run(j->batch_count * k_blocks * chunks, pack_task, j);
    int64_t tiles = divide_up(j->p.m, j->cut.tile_m) * divide_up(j->column_count, j->cut.tile_n);
    dw__pool_run(j->batch_count * tiles, multiply_task, j);
}

static dw_status run_product(const product *p, epilogue then, void *scratch) {
    if (p->m == 0 || p->n == 0 || p->batches == 0) return DW_OK;
    job j = {.p = *p, .then = then, .blocks = dw__gemm_blocks_now()};
    j.cut = cut(p, then.call && !p->c, then.call && !p->c);
    j.packed_b = scratch;
    j.worker_scratch = j.packed_b + j.cut.packed_b;
    for (j.batch = 0; j.batch < p->batches; j.batch += j.cut.round_batches) {
        j.batch_count = min64(j.cut.round_batches, p->batches - j.batch);
        for (j.column = 0; j.column < p->n; j.column += j.cut.round_n) {
            j.column_count = min64(j.cut.round_n, p->n - j.column);
            j.k = 0;
            do { /* once when K is 0 */
                j.k_count = min64(j.cut.round_k, p->k - j.k);
                run_round(&j);
                j.k += j.k_count;
            } while (j.k < p->k);
        }
    }
    return atomic_load(&j.failed) ? dw__fail(j.status, "%s", j.message) : DW_OK;
}

/* ---- kernels ------------------------------------------------------------------------------------
 */

static bool packed_fits(const dw__call *call) {
    product p;
    return describe(call, &p);
}

static size_t packed_scratch(const dw__call *call) {
    product p;
    if (!describe(call, &p)) return 0;
    cuts c = cut(&p, false, false);
    return scratch_of(&c);
}

static dw_status packed_run(const dw__call *call, void *scratch) {
    product p;
    if (!describe(call, &p)) {
        return dw__fail(DW_INTERNAL, "cpu packed product was given a call that it does not fit");
    }
    return run_product(&p, (epilogue){0}, scratch);
}

bool dw__matmul_fits_epilogue(const dw__call *call, const dw__call *then, int replaced) {
    product p;
    if (!describe(call, &p) || then->output_count == 0) return false;
    const dw__tensor *y = &call->outputs[0], *shape = &then->outputs[0];
    if (y->rank != shape->rank) return false;
    for (int axis = 0; axis < y->rank; axis++) {
        if (y->shape[axis] != shape->shape[axis]) return false;
    }
    return dw__fused_fits_tile(then, replaced);
}

/* Whether the product is kept is known only when data is placed: room for either way. */
size_t dw__matmul_epilogue_scratch(const dw__call *call, const dw__call *then, int replaced) {
    (void)then, (void)replaced;
    product p;
    if (!describe(call, &p)) return 0;
    cuts kept = cut(&p, false, false), passing = cut(&p, true, true);
    size_t a = scratch_of(&kept), b = scratch_of(&passing);
    return a > b ? a : b;
}

dw_status dw__matmul_run_epilogue(const dw__call *call, const dw__call *then, int replaced,
                                  void *scratch) {
    product p;
    if (!describe(call, &p)) {
        return dw__fail(DW_INTERNAL, "cpu packed product was given a call that it does not fit");
    }
    return run_product(&p, (epilogue){then, replaced}, scratch);
}

/* Rounding of a sum of n products: at most n * 2^-24 of the sum of magnitudes, about its root for
 * random data; blocks of K and lanes only shorten the chains. */
static const dw__kernel matmul_packed = {
    .name = "cpu.matmul.packed",
    .op = DW_OP_MATMUL,
    .source = "ours, C with vector extensions",
    .fits = packed_fits,
    .scratch_bytes = packed_scratch,
    .run = packed_run,
    .tolerance_factor = 4.0,
};
static const dw__kernel linear_packed = {
    .name = "cpu.linear.packed",
    .op = DW_OP_LINEAR,
    .source = "ours, C with vector extensions",
    .fits = packed_fits,
    .scratch_bytes = packed_scratch,
    .run = packed_run,
    .tolerance_factor = 4.0,
};

const dw__kernel *const dw__kernels_cpu_matmul[] = {&matmul_packed, &linear_packed, NULL};
