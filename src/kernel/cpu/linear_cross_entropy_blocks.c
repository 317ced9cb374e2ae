/* cross_entropy(linear(x, w, b)) and its gradients without storing the logits, unless they are asked for: a GEMM
 * computes a block of them, the block is used, and the next one overwrites it. If the logits exist already, backward
 * reads its blocks from them, and the block holds only dlogits.
 *
 *               vocabulary ->          Blocks follow each other along the vocabulary, so that each part of w is
 *     tokens  +----+----+----+         read once per round of tokens. Forward keeps three running numbers per
 *       |     |    |####|    |         token: maximum, sum of exponentials (Milakov and Gimelshein 2018,
 *       v     +----+----+----+         "Online normalizer calculation for softmax"), sum of logits. Backward
 *                                      recomputes the block, turns it into dlogits in place, and adds its
 *                                      GEMMs' results to dx and dw.
 *
 * Blocks depend only on the shape and run one after the other, so results do not depend on threads. */
#include "base/pool.h"
#include "kernel/cpu/cpu_matmul.h"
#include "kernel/cpu/head.h"
#include "kernel/cpu/logit_gradient.h"
#include "kernel/cpu/loss.h"
#include <math.h>
#include <string.h>

DW_ISA_TABLE(dw__loss_loops)
DW_ISA_TABLE(dw__logit_gradient_loops)

enum {
    ROUND_ROWS = 8192,      /* tokens at a time */
    GRAIN = 384,            /* of a block's width, which suits the GEMMs */
    BLOCK_FLOATS = 4 << 20, /* most floats of a block: 16 MB */
    SUM_COLUMNS = 1024,     /* columns of db per task */
};

/* ---- division into blocks ---------------------------------------------------------------------- */

/* Running numbers of one token. */
typedef struct token_sums {
    dw__row_sums row;
    double picked; /* logit of the target */
} token_sums;

typedef struct cuts {
    int64_t rows, width; /* of the largest block */
    /* sizes in bytes */
    size_t block, tokens, gemm;
    size_t library; /* most that a library allocates during the call */
} cuts;

static dw__matmul logits_gemm(const dw__head *h, int64_t first, int64_t rows, int64_t column,
                              int64_t width, float *block) {
    const dw__tensor *x = h->x, *w = h->w;
    return (dw__matmul){
        .m = rows,
        .n = width,
        .k = h->size,
        .batches = 1,
        .a = x->data ? (const float *)x->data + first * x->stride[0] : NULL,
        .b = w->data ? (const float *)w->data + column * w->stride[0] : NULL,
        .bias = h->b && h->b->data ? (const float *)h->b->data + column : NULL,
        .c = block,
        .a_row = x->stride[0],
        .a_k = x->stride[1],
        .b_k = w->stride[1],
        .b_column = w->stride[0],
    };
}

/* dx[first..] (+)= dlogits * w */
static dw__matmul dx_gemm(const dw__head *h, int64_t first, int64_t rows, int64_t column,
                          int64_t width, const float *block) {
    const dw__tensor *w = h->w;
    return (dw__matmul){
        .m = rows,
        .n = h->size,
        .k = width,
        .batches = 1,
        .a = block,
        .b = w->data ? (const float *)w->data + column * w->stride[0] : NULL,
        .c = h->dx ? h->dx + first * h->size : NULL,
        .accumulate = column > 0,
        .a_row = width,
        .a_k = 1,
        .b_k = w->stride[0],
        .b_column = w->stride[1],
    };
}

/* dw[column..] (+)= dlogits^T * x */
static dw__matmul dw_gemm(const dw__head *h, int64_t first, int64_t rows, int64_t column,
                          int64_t width, const float *block) {
    const dw__tensor *x = h->x;
    return (dw__matmul){
        .m = width,
        .n = h->size,
        .k = rows,
        .batches = 1,
        .a = block,
        .b = x->data ? (const float *)x->data + first * x->stride[0] : NULL,
        .c = h->dw ? h->dw + column * h->size : NULL,
        .accumulate = first > 0,
        .a_row = 1,
        .a_k = width,
        .b_k = x->stride[0],
        .b_column = x->stride[1],
    };
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

/* Memory of all GEMMs of a block; `of` returns their scratch or what a library allocates. GEMMs that add to C
 * may be divided differently from those that replace it. */
static size_t gemm_bytes(const dw__head *h, int64_t rows, int64_t width, bool backward,
                         size_t (*of)(const dw__matmul *p, bool passing)) {
    size_t most = 0;
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        dw__matmul gemms[] = {logits_gemm(h, 0, rows, 0, width, NULL),
                              dx_gemm(h, 0, rows, 0, width, NULL),
                              dw_gemm(h, 0, rows, 0, width, NULL)};
        for (size_t i = 0; i < (backward ? DW_COUNT(gemms) : 1); i++) {
            gemms[i].accumulate = i > 0 && accumulate;
            most = larger(most, of(&gemms[i], false));
        }
    }
    return most;
}

static cuts cut(const dw__head *h, bool backward) {
    cuts out = {.rows = dw__min64(h->tokens, ROUND_ROWS)};
    int64_t wide = out.rows > 0 ? BLOCK_FLOATS / out.rows / GRAIN * GRAIN : GRAIN;
    out.width = dw__min64(wide > GRAIN ? wide : GRAIN, h->vocabulary);
    out.block = (size_t)dw__round_up(out.rows * out.width, 16) * sizeof(float);
    if (!backward) out.tokens = (size_t)dw__round_up(h->tokens * (int64_t)sizeof(token_sums), 64);
    /* The last round and the last block are smaller, and their GEMMs may be divided differently. */
    int64_t rows[] = {out.rows, out.rows > 0 ? h->tokens % out.rows : 0};
    int64_t widths[] = {out.width, h->vocabulary % out.width};
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++)
            if (rows[i] > 0 && widths[j] > 0) {
                out.gemm = larger(out.gemm,
                                  gemm_bytes(h, rows[i], widths[j], backward, dw__matmul_scratch));
                out.library = larger(
                    out.library, gemm_bytes(h, rows[i], widths[j], backward, dw__matmul_library));
            }
    return out;
}

/* Requires w as in torch.nn.Linear, so that a block of dw is contiguous. If backward receives the logits,
 * AVX-512 has its own kernels. */
static bool reads(const dw__call *call, dw__head *out) {
    return dw__head_read(call, out) && (!out->logits || dw__cpu_isa() != DW_ISA_AVX512) &&
           out->transpose_w && out->size > 0 && out->vocabulary > 0 &&
           (!out->b || out->b->stride[0] == 1 || out->vocabulary == 1);
}

static dw_status supports(const dw__kernel *kernel, const void *given, const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    dw__head head;
    return reads(call, &head) ? DW_OK : dw__kernel_refuse(kernel);
}

static dw_status workspace_bytes(const dw__kernel *kernel, const void *given,
                                 const dw__context *context, size_t *bytes) {
    const dw__call *call = given;
    (void)kernel, (void)context;
    dw__head head;
    if (!reads(call, &head)) return DW_OK;
    cuts c = cut(&head, call->op == DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD);
    *bytes = c.block + c.tokens + c.gemm;
    return DW_OK;
}

static size_t library_bytes(const dw__call *call) {
    dw__head head;
    if (!reads(call, &head)) return 0;
    return cut(&head, call->op == DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD).library;
}

/* ---- running ------------------------------------------------------------------------------------ */

typedef struct block_job {
    const dw__head *head;
    float *block;
    token_sums *tokens;
    void *gemm;
    int64_t first, rows, column, width;
} block_job;

static block_job job_of(const dw__head *head, const cuts *c, void *scratch) {
    char *at = scratch;
    return (block_job){.head = head,
                       .block = scratch,
                       .tokens = (token_sums *)(at + c->block),
                       .gemm = at + c->block + c->tokens};
}

typedef dw_status use_block(block_job *job);

/* Computes every block of logits in turn, unless they are given, and calls `use`. */
static dw_status each_block(block_job *j, const cuts *c, use_block *use) {
    const dw__head *h = j->head;
    for (j->first = 0; j->first < h->tokens; j->first += c->rows) {
        j->rows = dw__min64(c->rows, h->tokens - j->first);
        for (j->column = 0; j->column < h->vocabulary; j->column += c->width) {
            j->width = dw__min64(c->width, h->vocabulary - j->column);
            if (!h->logits) {
                dw__matmul p = logits_gemm(h, j->first, j->rows, j->column, j->width, j->block);
                DW_RETURN_IF_FAILED(dw__matmul_run(&p, NULL, j->gemm));
            }
            DW_RETURN_IF_FAILED(use(j));
        }
    }
    return DW_OK;
}

static dw_status misfit(const dw__call *call) {
    return dw__fail(DW_INTERNAL, "cpu.%s.blocks does not support this call", dw_op_name(call->op));
}

/* ---- forward ------------------------------------------------------------------------------------ */

static void add_row_task(void *context, int64_t index, int worker) {
    (void)worker;
    const block_job *j = context;
    token_sums *sums = &j->tokens[j->first + index];
    const float *logits = j->block + index * j->width;
    dw__row_sums more = dw__loss_loops_now()->row_sums(j->width, logits);
    if (j->head->made)
        memcpy(j->head->made + (j->first + index) * j->head->vocabulary + j->column, logits,
               (size_t)j->width * sizeof *logits);
    if (j->column == 0) {
        *sums = (token_sums){.row = more};
    } else {
        dw__row_sums *sum = &sums->row;
        double max = more.max > sum->max ? more.max : sum->max;
        sum->exponents =
            sum->exponents * exp(sum->max - max) + more.exponents * exp(more.max - max);
        sum->plain += more.plain;
        sum->max = max;
    }
    int64_t target = dw__head_target(j->head, j->first + index) - j->column;
    if (target >= 0 && target < j->width) sums->picked = logits[target];
}

static dw_status add_rows(block_job *j) {
    dw__pool_run(j->rows, add_row_task, j);
    return DW_OK;
}

static double token_loss(const dw__head *h, const token_sums *sums) {
    double log_sum = log(sums->row.exponents);
    double loss = (sums->row.max - sums->picked) + log_sum;
    if (h->label_smoothing == 0.0f) return loss;
    double even = (sums->row.max - sums->row.plain / (double)h->vocabulary) + log_sum;
    double smoothing = (double)h->label_smoothing;
    return (1.0 - smoothing) * loss + smoothing * even;
}

static dw_status forward(const dw__call *call, void *scratch) {
    dw__head h;
    if (!reads(call, &h)) return misfit(call);
    DW_RETURN_IF_FAILED(dw__head_begin(&h));
    cuts c = cut(&h, false);
    block_job job = job_of(&h, &c, scratch);
    DW_RETURN_IF_FAILED(each_block(&job, &c, add_rows));
    float *loss = call->outputs[0].data, *lse = call->outputs[1].data;
    double sum = 0.0;
    for (int64_t token = 0; token < h.tokens; token++) {
        const token_sums *sums = &job.tokens[token];
        if (lse) lse[token] = (float)(sums->row.max + log(sums->row.exponents));
        bool counts = dw__head_target(&h, token) != h.ignore_index;
        double own = counts ? token_loss(&h, sums) : 0.0;
        if (h.is_none && loss) loss[token] = (float)own;
        sum += own;
    }
    if (loss && !h.is_none) /* a mean without targets is NaN */
        loss[0] = h.normalizer > 0.0 ? (float)(sum / h.normalizer) : NAN;
    return DW_OK;
}

/* ---- backward ----------------------------------------------------------------------------------- */

static void gradient_task(void *context, int64_t index, int worker) {
    (void)worker;
    const block_job *j = context;
    const dw__tensor *given = j->head->logits;
    int64_t token = j->first + index;
    float *row = j->block + index * j->width;
    const float *logits =
        given ? (const float *)given->data + token * given->stride[0] + j->column : row;
    dw__head_gradient_row(j->head, token, j->column, j->width, logits, row);
}

static void db_task(void *context, int64_t index, int worker) {
    (void)worker;
    const block_job *j = context;
    int64_t column = index * SUM_COLUMNS;
    dw__logit_gradient_loops_now()->column_sums(j->rows, dw__min64(SUM_COLUMNS, j->width - column),
                                                j->block + column, j->width, j->first > 0,
                                                j->head->db + j->column + column);
}

static dw_status add_gradients(block_job *j) {
    const dw__head *h = j->head;
    dw__pool_run(j->rows, gradient_task, j);
    if (h->dx) {
        dw__matmul p = dx_gemm(h, j->first, j->rows, j->column, j->width, j->block);
        DW_RETURN_IF_FAILED(dw__matmul_run(&p, NULL, j->gemm));
    }
    if (h->dw) {
        dw__matmul p = dw_gemm(h, j->first, j->rows, j->column, j->width, j->block);
        DW_RETURN_IF_FAILED(dw__matmul_run(&p, NULL, j->gemm));
    }
    if (h->db) dw__pool_run(dw__divide_up(j->width, SUM_COLUMNS), db_task, j);
    return DW_OK;
}

static dw_status backward(const dw__call *call, void *scratch) {
    dw__head h;
    if (!reads(call, &h)) return misfit(call);
    DW_RETURN_IF_FAILED(dw__head_begin(&h));
    if (h.tokens == 0) {
        if (h.dw) memset(h.dw, 0, (size_t)(h.vocabulary * h.size) * sizeof(float));
        if (h.db) memset(h.db, 0, (size_t)h.vocabulary * sizeof(float));
        return DW_OK;
    }
    cuts c = cut(&h, true);
    block_job job = job_of(&h, &c, scratch);
    return each_block(&job, &c, add_gradients);
}

const dw__kernel dw__linear_cross_entropy_blocks = {
    .name = "cpu.linear_cross_entropy.blocks",
    .op = DW_OP_LINEAR_CROSS_ENTROPY,
    .source = "ours, over the GEMMs that linear uses",
    .needs = "rows of F32, transpose_w and sizes above 0",
    .supports = supports,
    .workspace_bytes = workspace_bytes,
    .library_bytes = library_bytes,
    .run = forward,
    .tolerance_factor = 8.0,
};
const dw__kernel dw__linear_cross_entropy_backward_blocks = {
    .name = "cpu.linear_cross_entropy_backward.blocks",
    .op = DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD,
    .source = "ours, over the GEMMs that linear uses",
    .needs = "rows of F32, transpose_w and sizes above 0",
    .supports = supports,
    .workspace_bytes = workspace_bytes,
    .library_bytes = library_bytes,
    .run = backward,
    .tolerance_factor = 8.0,
};
