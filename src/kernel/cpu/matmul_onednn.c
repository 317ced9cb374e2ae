/* GEMM with oneDNN: one single-threaded oneDNN call per task. The division into tiles depends on the shape
 * alone, because the tile decides which of its loops oneDNN uses, and thereby the order of its sums. */
#include "base/pool.h"
#include "kernel/cpu/cpu_matmul.h"
#include "kernel/library/onednn.h"
#include <string.h>

enum {
    TILE_ROWS = 512,
    TILE_ROWS_MIN = 96,
    TILE_COLUMNS = 768,
    TILE_COLUMNS_MIN = 192,
    GRAIN = 48,       /* of tile sizes: oneDNN's register tiles are 48 x 8 or 16 x 12 */
    TASKS_WANTED = 8, /* more and smaller tasks pack more often; fewer tasks balance worse */
};
static const int64_t TASK_WORK_MIN = 1 << 17; /* multiply-adds: some microseconds */
/* Larger tiles of a result that is not stored would leave the cache before the epilogue runs. */
static const int64_t PASSING_ROWS = 256;

typedef struct tiling {
    int64_t m, n;
} tiling;

static int64_t even_tile(int64_t extent, int64_t most) {
    int64_t tile = dw__round_up(dw__divide_up(extent, dw__divide_up(extent, most)), GRAIN);
    return dw__min64(tile, extent);
}

static tiling cut(const dw__matmul *p, bool epilogue) {
    int64_t most_m = epilogue ? PASSING_ROWS : TILE_ROWS, most_n = TILE_COLUMNS;
    for (;;) {
        tiling t = {even_tile(p->m, most_m), even_tile(p->n, most_n)};
        int64_t tasks = p->batches * dw__divide_up(p->m, t.m) * dw__divide_up(p->n, t.n);
        if (tasks >= TASKS_WANTED || t.m * t.n * p->k < 2 * TASK_WORK_MIN) return t;
        if (t.m > TILE_ROWS_MIN && t.m >= t.n / 2) {
            most_m = t.m / 2 > TILE_ROWS_MIN ? t.m / 2 : TILE_ROWS_MIN;
        } else if (t.n > TILE_COLUMNS_MIN) {
            most_n = t.n / 2 > TILE_COLUMNS_MIN ? t.n / 2 : TILE_COLUMNS_MIN;
        } else {
            return t;
        }
    }
}

/* A row-major matrix [rows, columns] that oneDNN supports: one stride is 1, the other at least the extent of
 * that axis. */
typedef struct layout {
    bool transposed;
    int64_t leading;
} layout;

static bool find_layout(int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride,
                        layout *out) {
    if (column_stride == 1 || columns == 1) {
        *out = (layout){false, rows == 1 ? columns : row_stride};
        if (out->leading >= columns) return true;
    }
    if (row_stride == 1 || rows == 1) {
        *out = (layout){true, columns == 1 ? rows : column_stride};
        return out->leading >= rows;
    }
    return false;
}

bool dw__matmul_onednn_supports(const dw__matmul *p) {
    layout a, b;
    if (!dw__onednn_version() || p->m == 0 || p->n == 0 || p->k == 0 || p->batches == 0)
        return false;
    if (dw__matmul_packed_preferred(p)) return false;
    return find_layout(p->m, p->k, p->a_row, p->a_k, &a) &&
           find_layout(p->k, p->n, p->b_k, p->b_column, &b);
}

typedef struct job {
    const dw__matmul *p;
    dw__epilogue *then;
    tiling tile;
    layout a, b;
    float *worker_tiles; /* for results that are not stored */
} job;

static void preset_bias(const float *bias, int64_t rows, int64_t columns, float *tile,
                        int64_t stride) {
    for (int64_t i = 0; i < rows; i++) {
        memcpy(tile + i * stride, bias, (size_t)columns * sizeof(float));
    }
}

static void multiply_task(void *context, int64_t index, int worker) {
    const job *j = context;
    const dw__matmul *p = j->p;
    int64_t row_tiles = dw__divide_up(p->m, j->tile.m),
            column_tiles = dw__divide_up(p->n, j->tile.n);
    int64_t row = index % row_tiles * j->tile.m;
    int64_t column = index / row_tiles % column_tiles * j->tile.n;
    int64_t batch = index / row_tiles / column_tiles;
    int64_t rows = dw__min64(j->tile.m, p->m - row);
    int64_t columns = dw__min64(j->tile.n, p->n - column);
    int64_t first_row = batch * p->m + row; /* row of C as one matrix */

    float *tile =
        p->c ? p->c + first_row * p->n + column : j->worker_tiles + worker * j->tile.m * j->tile.n;
    int64_t stride = p->c ? p->n : j->tile.n;
    const float *a = p->a + dw__matmul_batch_offset(p, p->a_batch, batch) + row * p->a_row;
    const float *b = p->b + dw__matmul_batch_offset(p, p->b_batch, batch) + column * p->b_column;
    if (p->bias && !p->accumulate) preset_bias(p->bias + column, rows, columns, tile, stride);
    float beta = p->accumulate || p->bias ? 1.0f : 0.0f;
    dw_status status = dw__onednn_sgemm(j->a.transposed, j->b.transposed, rows, columns, p->k, a,
                                        j->a.leading, b, j->b.leading, beta, tile, stride);
    if (status != DW_OK) {
        dw__epilogue_fail(j->then, status);
        return;
    }
    dw__epilogue_run(j->then, first_row, rows, column, columns, tile, stride);
}

size_t dw__matmul_onednn_scratch(const dw__matmul *p, bool passing) {
    if (!passing) return 0;
    tiling tile = cut(p, true);
    return (size_t)(dw__pool_threads() * tile.m * tile.n) * sizeof(float);
}

/* Each thread runs one task at a time. Tasks of the last row and column are smaller and may use other oneDNN
 * loops. */
size_t dw__matmul_onednn_library(const dw__matmul *p, bool passing) {
    tiling t = cut(p, passing);
    layout a, b;
    if (!find_layout(p->m, p->k, p->a_row, p->a_k, &a) ||
        !find_layout(p->k, p->n, p->b_k, p->b_column, &b))
        return 0;
    int64_t rows[] = {t.m, p->m % t.m}, columns[] = {t.n, p->n % t.n};
    size_t largest = 0;
    for (int i = 0; i < 4; i++) {
        if (rows[i / 2] == 0 || columns[i % 2] == 0) continue;
        size_t bytes =
            dw__onednn_sgemm_bytes(a.transposed, b.transposed, rows[i / 2], columns[i % 2], p->k,
                                   a.leading, b.leading, passing ? t.n : p->n);
        if (bytes > largest) largest = bytes;
    }
    int64_t tasks = p->batches * dw__divide_up(p->m, t.m) * dw__divide_up(p->n, t.n);
    return (size_t)dw__min64(tasks, dw__pool_threads()) * largest;
}

void dw__matmul_onednn_run(const dw__matmul *p, dw__epilogue *then, void *scratch) {
    job j = {.p = p, .then = then, .tile = cut(p, then->call != NULL), .worker_tiles = scratch};
    if (!find_layout(p->m, p->k, p->a_row, p->a_k, &j.a) ||
        !find_layout(p->k, p->n, p->b_k, p->b_column, &j.b)) {
        dw__epilogue_fail(then, dw__fail(DW_INTERNAL, "operands of a GEMM have no unit stride"));
        return;
    }
    int64_t tiles = dw__divide_up(p->m, j.tile.m) * dw__divide_up(p->n, j.tile.n);
    dw__pool_run(p->batches * tiles, multiply_task, &j);
}
