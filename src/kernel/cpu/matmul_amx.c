/* GEMM on AMX: how it is divided, and which task packs which operand (amx.h explains how AMX computes F32 GEMMs).
 *
 * The operand with the smaller outer extent is packed once and shared. Each task packs its chunk of the other
 * operand, some panels and one block of K at a time, so that the chunk stays in L2 while the shared panels
 * stream past it. If the shared operand would grow too large, K is processed in rounds. Every element of C
 * sums blocks of K in order, each with its own tile GEMM, at any position in C: results depend neither on
 * threads nor on the division into chunks.
 *
 * A block whose numbers cannot be split into BF16 parts (NaN, infinities, from 2^127 up) uses the F32 loops.
 * The shared operand keeps this flag per block, and each task computes it for its chunk. BF16 operands need
 * no splitting. */
#include "base/pool.h"
#include "kernel/cpu/amx.h"
#include "kernel/cpu/cpu_matmul.h"
#include <assert.h>
#include <string.h>

#if DW_HAVE_AMX

DW_ISA_TABLE(dw__gemm_loops)

enum {
    BLOCK_K = 1024,      /* of K: a packed chunk of 128 takes 768 KB of a 2 MB L2 */
    CHUNK_MAX = 128,     /* rows or columns that a task packs for itself */
    SHARED_PANELS = 4,   /* panels of the shared operand packed by one task */
    EPILOGUE_PANELS = 4, /* panels of the shared operand between two runs of the epilogue */
    K_MIN = 32,          /* below this K the corrections cost more than they gain */
    OUTER_MIN = 16,      /* rows and columns: below, a panel is mostly zeros */
};
static const int64_t WORK_MIN = 1 << 20; /* multiply-adds */
/* with fewer, the operands are copied to F32 instead */
static const int64_t BF16_WORK_MIN = 1 << 15;
static const size_t SHARED_MAX = (size_t)48 << 20; /* packed bytes of one round */

/* ---- division into tasks --------------------------------------------------------------------------- */

typedef struct amx_cuts {
    bool share_a;            /* A is the shared operand, B is packed in chunks */
    int64_t shared, chunked; /* outer extents */
    int64_t block_k;         /* a multiple of DW_AMX_STEP */
    int64_t round_blocks;    /* blocks of K per round */
    int64_t chunk;           /* rows or columns, a multiple of DW_AMX_PANEL */
    size_t shared_bytes, worker_bytes;
} amx_cuts;

/* The width that finishes first when every thread takes an equal number of whole chunks; the widest one if
 * several tie. */
static int64_t choose_chunk(int64_t extent) {
    int64_t threads = dw__pool_threads(), best = CHUNK_MAX, best_cost = INT64_MAX;
    for (int64_t width = CHUNK_MAX; width >= DW_AMX_PANEL; width -= DW_AMX_PANEL) {
        int64_t tasks = dw__divide_up(extent, width);
        int64_t cost = dw__divide_up(tasks, threads) * (width + 4); /* 4: overhead of a task */
        if (cost < best_cost) {
            best = width;
            best_cost = cost;
        }
    }
    return best;
}

static size_t panel_bytes_of(const dw__matmul *p, int64_t k) {
    return p->bf16 ? dw__amx_panel_bytes_bf16(k) : dw__amx_panel_bytes(k);
}

/* `passing`: tiles do not outlive their task, so K cannot be processed in rounds. shared_bytes 0: not supported. */
static amx_cuts cut(const dw__matmul *p, bool passing) {
    amx_cuts out = {.share_a = p->m <= p->n};
    out.shared = out.share_a ? p->m : p->n;
    out.chunked = out.share_a ? p->n : p->m;
    int64_t blocks = dw__divide_up(p->k, BLOCK_K);
    out.block_k = dw__round_up(dw__divide_up(p->k, blocks), DW_AMX_STEP);
    blocks = dw__divide_up(p->k, out.block_k);
    size_t panel_bytes = panel_bytes_of(p, out.block_k);
    size_t block_bytes = (size_t)dw__divide_up(out.shared, DW_AMX_PANEL) * panel_bytes;
    out.round_blocks = dw__min64(blocks, (int64_t)(SHARED_MAX / block_bytes));
    if (out.round_blocks == 0) out.round_blocks = 1;
    if (passing && out.round_blocks < blocks) return (amx_cuts){0};
    out.chunk = choose_chunk(out.chunked);
    out.shared_bytes = (size_t)out.round_blocks * block_bytes;
    /* Computed for the widest chunk, whatever width is chosen: scratch that was sized for one number of
     * threads then suffices for any smaller number, which may choose wider chunks. */
    out.worker_bytes =
        CHUNK_MAX / DW_AMX_PANEL * panel_bytes + sizeof(float) * DW_AMX_PANEL * DW_AMX_PANEL;
    if (passing) out.worker_bytes += sizeof(float) * (size_t)(out.shared * CHUNK_MAX);
    out.worker_bytes = (size_t)dw__round_up((int64_t)out.worker_bytes, 64);
    return out;
}

bool dw__matmul_amx_supports(const dw__matmul *p, bool passing) {
    if (!dw__amx_available()) return false;
    if (p->m < OUTER_MIN || p->n < OUTER_MIN || p->k < K_MIN) return false;
    if (p->m * p->n < (p->bf16 ? BF16_WORK_MIN : WORK_MIN) / p->k) return false;
    bool a_unit = p->a_k == 1 || p->a_row == 1, b_unit = p->b_k == 1 || p->b_column == 1;
    return a_unit && b_unit && cut(p, passing).shared_bytes > 0;
}

static size_t verdict_bytes(const amx_cuts *cuts) {
    return (size_t)dw__round_up(cuts->round_blocks * (int64_t)sizeof(_Atomic int), 64);
}

size_t dw__matmul_amx_scratch(const dw__matmul *p, bool passing) {
    amx_cuts cuts = cut(p, passing);
    return cuts.shared_bytes + verdict_bytes(&cuts) +
           cuts.worker_bytes * (size_t)dw__pool_threads();
}

/* ---- running ----------------------------------------------------------------------------------------- */

/* An operand by outer index and k, on either side. */
typedef struct operand {
    const void *data; /* float, or BF16 */
    int64_t extent, stride, k_stride;
} operand;

typedef struct amx_job {
    const dw__matmul *p;
    dw__epilogue *then;
    amx_cuts cut;
    operand shared, chunked;
    size_t panel_bytes; /* bytes of a panel over one block of K */
    char *shared_panels, *worker_scratch;
    _Atomic int *unsplit; /* per block of the round: the shared operand could not be split */
    int64_t batch, first_block, block_count, blocks; /* blocks of this round, and of all rounds */
} amx_job;

static int64_t block_length(const amx_job *j, int64_t block) {
    return dw__min64(j->cut.block_k, j->p->k - block * j->cut.block_k);
}

static char *shared_panel(const amx_job *j, int64_t block, int64_t panel) {
    int64_t panels = dw__divide_up(j->cut.shared, DW_AMX_PANEL);
    return j->shared_panels + (size_t)((block - j->first_block) * panels + panel) * j->panel_bytes;
}

/* Packs [start, start+count) of an operand for k in [k_start, k_start+k) into panels. */
static bool pack(const amx_job *j, const operand *from, bool as_a, int64_t start, int64_t count,
                 int64_t k_start, int64_t k, char *panels) {
    int64_t first = start * from->stride + k_start * from->k_stride;
    if (!j->p->bf16)
        return dw__amx_pack_panels(as_a, count, k, (const float *)from->data + first, from->stride,
                                   from->k_stride, panels, j->panel_bytes);
    dw__amx_pack_bf16_panels(as_a, count, k, (const uint16_t *)from->data + first, from->stride,
                             from->k_stride, panels, j->panel_bytes);
    return true;
}

static void multiply_panels(const amx_job *j, int64_t k, const void *a, const void *b, float *tile,
                            int64_t stride) {
    if (j->p->bf16)
        dw__amx_multiply_bf16(dw__amx_steps(k), a, b, tile, stride);
    else
        dw__amx_multiply(dw__amx_steps(k), a, b, tile, stride);
}

static int64_t shared_tasks(const amx_job *j) {
    return dw__divide_up(j->cut.shared, SHARED_PANELS * DW_AMX_PANEL);
}

static void pack_task(void *context, int64_t index, int worker) {
    (void)worker;
    amx_job *j = context;
    int64_t tasks = shared_tasks(j), block = j->first_block + index / tasks;
    int64_t panel = index % tasks * SHARED_PANELS, start = panel * DW_AMX_PANEL;
    int64_t count = dw__min64(SHARED_PANELS * DW_AMX_PANEL, j->cut.shared - start);
    bool splits = pack(j, &j->shared, j->cut.share_a, start, count, block * j->cut.block_k,
                       block_length(j, block), shared_panel(j, block, panel));
    if (!splits) {
        atomic_store_explicit(&j->unsplit[block - j->first_block], 1, memory_order_relaxed);
    }
}

void dw__amx_put(const float *tile, int64_t rows, int64_t columns, float *c, int64_t c_stride,
                 bool add, const float *bias) {
    for (int64_t row = 0; row < rows; row++) {
        const float *from = tile + row * DW_AMX_PANEL;
        float *to = c + row * c_stride;
        if (add) {
            for (int64_t column = 0; column < columns; column++) to[column] += from[column];
        } else if (bias) {
            for (int64_t column = 0; column < columns; column++)
                to[column] = from[column] + bias[column];
        } else {
            memcpy(to, from, (size_t)columns * sizeof *to);
        }
    }
}

/* Multiplies the same block with the F32 loops, for numbers that cannot be split. */
static void multiply_plain(const amx_job *j, int64_t row, int64_t rows, int64_t column,
                           int64_t columns, int64_t k_start, int64_t k, float *c, int64_t c_stride,
                           bool add, const float *bias) {
    const dw__matmul *p = j->p;
    const float *a = (j->cut.share_a ? &j->shared : &j->chunked)->data;
    const float *b = (j->cut.share_a ? &j->chunked : &j->shared)->data;
    a += row * p->a_row + k_start * p->a_k;
    b += column * p->b_column + k_start * p->b_k;
    bool a_transposed = p->a_k != 1, b_transposed = p->b_column != 1;
    dw__gemm_loops_now()->small(
        a_transposed, b_transposed, rows, columns, k, 1.0f, a, a_transposed ? p->a_k : p->a_row, b,
        b_transposed ? p->b_column : p->b_k, add ? 1.0f : 0.0f, c, c_stride);
    if (!bias || add) return;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t n = 0; n < columns; n++) c[i * c_stride + n] += bias[n];
}

static void multiply_task(void *context, int64_t index, int worker) {
    amx_job *j = context;
    const dw__matmul *p = j->p;
    const amx_cuts *cut = &j->cut;
    int64_t first = index * cut->chunk, count = dw__min64(cut->chunk, cut->chunked - first);
    char *chunk_panels = j->worker_scratch + (size_t)worker * cut->worker_bytes;
    float *tile = (float *)(chunk_panels + (size_t)(cut->chunk / DW_AMX_PANEL) * j->panel_bytes);
    /* C of this chunk: in place, or in the worker's memory if the result is not stored. */
    float *c = tile + DW_AMX_PANEL * DW_AMX_PANEL;
    int64_t c_stride = cut->share_a ? cut->chunk : p->n;
    if (p->c) {
        c_stride = p->n;
        c = p->c + j->batch * p->m * p->n + (cut->share_a ? first : first * p->n);
    }
    dw__amx_begin();
    for (int64_t block = j->first_block; block < j->first_block + j->block_count; block++) {
        int64_t k_start = block * cut->block_k, k = block_length(j, block);
        bool add = p->accumulate || block > 0, last = block + 1 == j->blocks;
        bool splits =
            !atomic_load_explicit(&j->unsplit[block - j->first_block], memory_order_relaxed);
        splits &= pack(j, &j->chunked, !cut->share_a, first, count, k_start, k, chunk_panels);
        int64_t pending = 0; /* first shared index whose epilogue is still to run */
        for (int64_t along = 0; along < cut->shared; along += DW_AMX_PANEL) {
            const char *shared = shared_panel(j, block, along / DW_AMX_PANEL);
            int64_t shared_count = dw__min64(DW_AMX_PANEL, cut->shared - along);
            for (int64_t at = 0; at < count; at += DW_AMX_PANEL) {
                const char *own = chunk_panels + (size_t)(at / DW_AMX_PANEL) * j->panel_bytes;
                int64_t own_count = dw__min64(DW_AMX_PANEL, count - at);
                int64_t row = cut->share_a ? along : first + at;
                int64_t column = cut->share_a ? first + at : along;
                int64_t rows = cut->share_a ? shared_count : own_count;
                int64_t columns = cut->share_a ? own_count : shared_count;
                float *to = c + (cut->share_a ? along * c_stride + at : at * c_stride + along);
                const float *bias = p->bias ? p->bias + column : NULL;
                if (!splits) {
                    multiply_plain(j, row, rows, column, columns, k_start, k, to, c_stride, add,
                                   bias);
                    continue;
                }
                bool whole = rows == DW_AMX_PANEL && columns == DW_AMX_PANEL;
                if (whole && !add && !bias) {
                    multiply_panels(j, k, cut->share_a ? shared : own, cut->share_a ? own : shared,
                                    to, c_stride);
                    continue;
                }
                multiply_panels(j, k, cut->share_a ? shared : own, cut->share_a ? own : shared,
                                tile, DW_AMX_PANEL);
                dw__amx_put(tile, rows, columns, to, c_stride, add, bias);
            }
            int64_t done = along + shared_count;
            bool due = done - pending >= EPILOGUE_PANELS * DW_AMX_PANEL || done == cut->shared;
            if (last && due && j->then) {
                int64_t row = j->batch * p->m + (cut->share_a ? pending : first);
                const float *from = c + (cut->share_a ? pending * c_stride : pending);
                dw__epilogue_run(j->then, row, cut->share_a ? done - pending : count,
                                 cut->share_a ? first : pending,
                                 cut->share_a ? count : done - pending, from, c_stride);
                pending = done;
            }
        }
    }
    dw__amx_end();
}

void dw__matmul_amx_run(const dw__matmul *p, dw__epilogue *then, void *scratch) {
    amx_job j = {.p = p, .then = then, .cut = cut(p, !p->c), .shared_panels = scratch};
    j.unsplit = (_Atomic int *)(j.shared_panels + j.cut.shared_bytes);
    j.worker_scratch = (char *)j.unsplit + verdict_bytes(&j.cut);
    assert(j.cut.block_k > 0); /* true because the call is supported */
    j.blocks = dw__divide_up(p->k, j.cut.block_k);
    j.panel_bytes = panel_bytes_of(p, j.cut.block_k);
    for (j.batch = 0; j.batch < p->batches; j.batch++) {
        int64_t a_first = dw__matmul_batch_offset(p, p->a_batch, j.batch);
        int64_t b_first = dw__matmul_batch_offset(p, p->b_batch, j.batch);
        operand a = {NULL, p->m, p->a_row, p->a_k}, b = {NULL, p->n, p->b_column, p->b_k};
        if (p->bf16)
            a.data = p->a_bf16 + a_first, b.data = p->b_bf16 + b_first;
        else
            a.data = p->a + a_first, b.data = p->b + b_first;
        j.shared = j.cut.share_a ? a : b;
        j.chunked = j.cut.share_a ? b : a;
        for (j.first_block = 0; j.first_block < j.blocks; j.first_block += j.block_count) {
            j.block_count = dw__min64(j.cut.round_blocks, j.blocks - j.first_block);
            for (int64_t block = 0; block < j.block_count; block++)
                atomic_init(&j.unsplit[block], 0);
            dw__pool_run(j.block_count * shared_tasks(&j), pack_task, &j);
            dw__pool_run(dw__divide_up(j.cut.chunked, j.cut.chunk), multiply_task, &j);
        }
    }
}

#else /* built without AMX */

bool dw__amx_available(void) { return false; }

bool dw__matmul_amx_supports(const dw__matmul *p, bool passing) {
    (void)p, (void)passing;
    return false;
}
size_t dw__matmul_amx_scratch(const dw__matmul *p, bool passing) {
    (void)p, (void)passing;
    return 0;
}
void dw__matmul_amx_run(const dw__matmul *p, dw__epilogue *then, void *scratch) {
    (void)p, (void)then, (void)scratch;
}

#endif
