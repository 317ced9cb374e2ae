/* GEMM with our own loops.
 *
 * The output is divided into tiles, which are the pool's tasks. All threads pack B into panels once and share
 * it. Each task packs its rows of A, multiplies block by block of K, and runs the epilogue on its tile while
 * that is in cache. If packed B would grow too large, the GEMM runs in rounds over batches, columns or K. The
 * blocks of K depend on shapes alone, and the inner loops give each element the same bits at any position
 * (gemm_loops.h), so results do not depend on threads, although the size of tiles does. */
#include "base/pool.h"
#include "kernel/cpu/cpu_matmul.h"
#include "kernel/cpu/gemm_loops.h"

DW_ISA_TABLE(dw__gemm_blocks)

enum {
    TILE_ROWS_MIN = 24, /* a multiple of every register tile's rows */
    NARROW_COLUMNS =
        768, /* of a tile that an epilogue reads again, and steps of a round's columns */
    TASKS_PER_THREAD = 5, /* at least, so that threads finish at the same time */
    CACHE_LINE = 64,
};
/* multiply-adds; below this, the pool costs more than it gains */
static const int64_t TASK_WORK_MIN = 1 << 20;
static const int64_t PACKED_FLOATS_MAX = 4 << 20; /* of B at a time: 16 MB */

/* ---- division into tasks --------------------------------------------------------------------- */

typedef struct cuts {
    int64_t tile_m, tile_n;                   /* tile of C of one task */
    int64_t depth;                            /* one block of K */
    int64_t round_batches, round_n, round_k;  /* the range whose B is packed at a time */
    size_t packed_b, packed_a, tile, workers; /* floats: shared; per worker; per worker */
} cuts;

static int64_t widest_tile(const dw__matmul *p, const dw__gemm_blocks *blocks, bool epilogue) {
    int64_t most = epilogue ? NARROW_COLUMNS : blocks->task_columns;
    return dw__min64(dw__round_up(p->n, blocks->columns), most / blocks->columns * blocks->columns);
}

/* Rows of a tile, at most tile_m, such that every thread has the same number of tiles: with 11 tiles of 192
 * rows one of two threads is busy a tenth longer than with 12 tiles of 174. */
static int64_t even_rows(int64_t m, int64_t tile_m, int64_t grain) {
    int64_t tiles = dw__round_up(dw__divide_up(m, tile_m), dw__pool_threads());
    return dw__min64(tile_m, dw__round_up(dw__divide_up(m, tiles), grain));
}

static void choose_tiles(const dw__matmul *p, const dw__gemm_blocks *blocks, bool epilogue,
                         cuts *out) {
    out->tile_m = blocks->task_rows;
    out->tile_n = widest_tile(p, blocks, epilogue);
    for (;;) {
        int64_t tasks =
            p->batches * dw__divide_up(p->m, out->tile_m) * dw__divide_up(p->n, out->tile_n);
        int64_t work = dw__min64(p->m, out->tile_m) * out->tile_n * p->k;
        if (tasks >= TASKS_PER_THREAD * dw__pool_threads() || work < 2 * TASK_WORK_MIN) return;
        /* Reduces rows first: with fewer columns the same rows of A would be packed more often. */
        if (out->tile_m > TILE_ROWS_MIN && p->m > out->tile_m / 2) {
            out->tile_m /= 2;
        } else if (out->tile_n > 2 * blocks->columns) {
            out->tile_n = dw__round_up(dw__divide_up(out->tile_n, 2), blocks->columns);
        } else {
            return;
        }
    }
}

/* `passing`: tiles do not outlive their task, so K cannot be processed in rounds. `epilogue`: true if there
 * is one, which changes the tiles. It changes scratch only with `passing`, which always has one. */
static cuts cut(const dw__matmul *p, bool passing, bool epilogue) {
    const dw__gemm_blocks *blocks = dw__gemm_blocks_now();
    cuts out = {0};
    if (p->n == 0) return out;
    choose_tiles(p, blocks, epilogue, &out);
    if (p->m > out.tile_m) out.tile_m = even_rows(p->m, out.tile_m, blocks->rows);
    int64_t padded = dw__round_up(p->n, blocks->columns);
    int64_t k = p->k > 0 ? p->k : 1;
    out.depth = dw__divide_up(k, dw__divide_up(k, blocks->depth));
    out.round_k = k;
    out.round_n = padded;
    if (padded > PACKED_FLOATS_MAX / k) {
        int64_t widest = NARROW_COLUMNS / blocks->columns * blocks->columns;
        int64_t fitting = PACKED_FLOATS_MAX / k / widest * widest;
        if (fitting > 0) {
            out.round_n = fitting;
        } else {
            out.round_n = passing ? blocks->columns : dw__min64(padded, widest);
            if (!passing) {
                int64_t depths = PACKED_FLOATS_MAX / out.round_n / out.depth;
                out.round_k = dw__min64(k, (depths > 0 ? depths : 1) * out.depth);
            }
        }
    }
    out.round_batches = 1;
    if (out.round_n == padded && out.round_k == k) {
        int64_t fitting = PACKED_FLOATS_MAX / (padded * k);
        out.round_batches = dw__min64(p->batches, fitting > 0 ? fitting : 1);
    }
    out.tile_n = dw__min64(out.tile_n, out.round_n);
    out.packed_b = (size_t)(out.round_batches * out.round_n * out.round_k);
    /* Computed for the largest tiles, whatever size the number of threads gives: scratch that was planned for
     * some threads must suffice for fewer. */
    out.packed_a = (size_t)dw__round_up(blocks->task_rows * out.depth, CACHE_LINE / 4);
    if (passing) {
        int64_t widest = widest_tile(p, blocks, true);
        out.tile = (size_t)dw__round_up(blocks->task_rows * widest, CACHE_LINE / 4);
    }
    out.workers = (size_t)dw__pool_threads();
    return out;
}

static size_t scratch_of(const cuts *c) {
    return (c->packed_b + c->workers * (c->packed_a + c->tile)) * sizeof(float);
}

/* ---- running --------------------------------------------------------------------------------- */

typedef struct job {
    dw__matmul p;
    cuts cut;
    dw__epilogue *then;
    const dw__gemm_blocks *blocks;
    float *packed_b, *worker_scratch;
    /* range of this round */
    int64_t batch, batch_count, column, column_count, k, k_count;
} job;

static float *packed_b_of(const job *j, int64_t batch) {
    return j->packed_b + batch * dw__round_up(j->column_count, j->blocks->columns) * j->k_count;
}

enum { PACK_PANELS = 2 }; /* panels of B per task */

static void pack_task(void *context, int64_t index, int worker) {
    (void)worker;
    job *j = context;
    const dw__matmul *p = &j->p;
    int64_t width = PACK_PANELS * j->blocks->columns;
    int64_t chunks = dw__divide_up(j->column_count, width);
    int64_t k_blocks = dw__divide_up(j->k_count, j->cut.depth);
    int64_t column = index % chunks * width;
    int64_t k = index / chunks % k_blocks * j->cut.depth;
    int64_t batch = index / chunks / k_blocks;
    int64_t count = dw__min64(width, j->column_count - column);
    int64_t depth = dw__min64(j->cut.depth, j->k_count - k);
    const float *b = p->b + dw__matmul_batch_offset(p, p->b_batch, j->batch + batch) +
                     (j->column + column) * p->b_column + (j->k + k) * p->b_k;
    float *panels = packed_b_of(j, batch) + k * dw__round_up(j->column_count, j->blocks->columns) +
                    column * depth;
    j->blocks->pack_b(count, depth, b, p->b_column, p->b_k, panels);
}

static void multiply_task(void *context, int64_t index, int worker) {
    job *j = context;
    const dw__matmul *p = &j->p;
    const cuts *cut = &j->cut;
    int64_t row_tiles = dw__divide_up(p->m, cut->tile_m);
    int64_t column_tiles = dw__divide_up(j->column_count, cut->tile_n);
    int64_t row = index % row_tiles * cut->tile_m; /* fastest index: neighbours share panels of B */
    int64_t column = index / row_tiles % column_tiles * cut->tile_n;
    int64_t batch = index / row_tiles / column_tiles;
    int64_t rows = dw__min64(cut->tile_m, p->m - row);
    int64_t columns = dw__min64(cut->tile_n, j->column_count - column);
    int64_t first_row = (j->batch + batch) * p->m + row; /* row of C as one matrix */

    float *a_panels = j->worker_scratch + (size_t)worker * (cut->packed_a + cut->tile);
    float *tile = a_panels + cut->packed_a;
    int64_t tile_stride = cut->tile_n;
    if (p->c) {
        tile = p->c + first_row * p->n + j->column + column;
        tile_stride = p->n;
    }
    const float *a =
        p->a + dw__matmul_batch_offset(p, p->a_batch, j->batch + batch) + row * p->a_row;
    int64_t padded = dw__round_up(j->column_count, j->blocks->columns);
    int64_t start = 0;
    do { /* once if K is 0: only the bias */
        int64_t depth = dw__min64(cut->depth, j->k_count - start);
        const float *b_panels = packed_b_of(j, batch) + start * padded + column * depth;
        j->blocks->pack_a(rows, depth, a + (j->k + start) * p->a_k, p->a_row, p->a_k, a_panels);
        j->blocks->multiply(rows, columns, depth, a_panels, b_panels, tile, tile_stride,
                            p->accumulate || j->k + start > 0,
                            p->bias ? p->bias + j->column + column : NULL);
        start += depth;
    } while (start < j->k_count);
    if (j->k + j->k_count == p->k) {
        dw__epilogue_run(j->then, first_row, rows, j->column + column, columns, tile, tile_stride);
    }
}

static void run_round(job *j) {
    int64_t chunks = dw__divide_up(j->column_count, PACK_PANELS * j->blocks->columns);
    int64_t k_blocks = dw__divide_up(j->k_count, j->cut.depth);
    dw__pool_run(j->batch_count * k_blocks * chunks, pack_task, j);
    int64_t tiles =
        dw__divide_up(j->p.m, j->cut.tile_m) * dw__divide_up(j->column_count, j->cut.tile_n);
    dw__pool_run(j->batch_count * tiles, multiply_task, j);
}

/* True if rows are so far apart that they map to the same sets of L1. */
static bool crowds_sets(int64_t stride) { return stride > 0 && stride % 1024 == 0; }

/* With AVX2, oneDNN 2.6 multiplies tiles of our size in place, at 0.9 of the rate of copied ones, and at half
 * of it if rows are a multiple of 4 KB apart (bench/NOTES.md). Packing must pay off: packing B needs enough
 * rows, and weight gradients of 384 rows gain nothing. */
bool dw__matmul_packed_preferred(const dw__matmul *p) {
    bool crowded = crowds_sets(p->a_row) || crowds_sets(p->a_k) || crowds_sets(p->b_k) ||
                   crowds_sets(p->b_column) || crowds_sets(p->n);
    return dw__cpu_isa() == DW_ISA_AVX2 && p->n >= 128 && p->k >= 64 &&
           p->m >= (crowded ? 128 : 512);
}

size_t dw__matmul_packed_scratch(const dw__matmul *p, bool passing) {
    cuts c = cut(p, passing, passing);
    return scratch_of(&c);
}

void dw__matmul_packed_run(const dw__matmul *p, dw__epilogue *then, void *scratch) {
    if (p->m == 0 || p->n == 0 || p->batches == 0) return;
    job j = {.p = *p, .then = then, .blocks = dw__gemm_blocks_now()};
    j.cut = cut(p, !p->c, then->call != NULL);
    j.packed_b = scratch;
    j.worker_scratch = j.packed_b + j.cut.packed_b;
    for (j.batch = 0; j.batch < p->batches; j.batch += j.cut.round_batches) {
        j.batch_count = dw__min64(j.cut.round_batches, p->batches - j.batch);
        for (j.column = 0; j.column < p->n; j.column += j.cut.round_n) {
            j.column_count = dw__min64(j.cut.round_n, p->n - j.column);
            j.k = 0;
            do { /* once if K is 0 */
                j.k_count = dw__min64(j.cut.round_k, p->k - j.k);
                run_round(&j);
                j.k += j.k_count;
            } while (j.k < p->k);
        }
    }
}
