/* grouped_linear and the gradient of its matrices in F32. Rows are sorted by the matrix that they select, and
 * each matrix has one GEMM over its rows. Matrices are never copied per row.
 *
 * The rows of one matrix are gathered into scratch, multiplied, and written back to their positions. Many
 * rows are processed in parts of ROWS, so that scratch does not grow with them. The rows of one matrix keep
 * their order in x, so the bits do not depend on the number of threads. */
#include "base/pool.h"
#include "kernel/cpu/cpu.h"
#include "kernel/cpu/cpu_matmul.h"
#include "kernel/kernel.h"
#include <assert.h>
#include <inttypes.h>
#include <string.h>

enum {
    ROWS = 1024,           /* gathered at once */
    COPY_BYTES = 64 * 1024 /* bytes of rows per task */
};

typedef struct grouped {
    const dw__tensor *index;
    int64_t rows, experts;
    int64_t *first; /* [experts + 1]: start of each expert's rows in `order` */
    int64_t *order; /* [rows] */
    float *left, *right;
    void *gemm_scratch;
} grouped;

/* ---- scratch ------------------------------------------------------------------------------------- */

static size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* Places the parts of scratch. If `base` is NULL, only computes their total size. */
static size_t lay_out(grouped *g, char *base, int64_t left, int64_t right, size_t gemm) {
    int64_t part = dw__min64(g->rows, ROWS);
    size_t at = 0;
    g->first = base ? (void *)(base + at) : NULL;
    at += aligned((size_t)(g->experts + 1) * sizeof(int64_t));
    g->order = base ? (void *)(base + at) : NULL;
    at += aligned((size_t)g->rows * sizeof(int64_t));
    g->left = base ? (void *)(base + at) : NULL;
    at += aligned((size_t)(part * left) * sizeof(float));
    g->right = base ? (void *)(base + at) : NULL;
    at += aligned((size_t)(part * right) * sizeof(float));
    g->gemm_scratch = base ? base + at : NULL;
    return at + gemm;
}

/* ---- rows ---------------------------------------------------------------------------------------- */

static int64_t expert_of(const grouped *g, int64_t row) {
    int64_t at = row * g->index->stride[0];
    return g->index->dtype == DW_I64 ? ((const int64_t *)g->index->data)[at]
                                     : ((const int32_t *)g->index->data)[at];
}

/* A stable counting sort. */
static dw_status sort_rows(grouped *g, dw_op op) {
    assert(g->first);
    memset(g->first, 0, (size_t)(g->experts + 1) * sizeof *g->first);
    for (int64_t row = 0; row < g->rows; row++) {
        int64_t expert = expert_of(g, row);
        if (expert < 0 || expert >= g->experts)
            return dw__fail(DW_INDEX,
                            "%s: index %" PRId64 " of row %" PRId64 " is outside [0, %" PRId64
                            "); check the values fed as indices against the number of matrices",
                            dw_op_name(op), expert, row, g->experts);
        g->first[expert]++;
    }
    int64_t sum = 0;
    for (int64_t expert = 0; expert <= g->experts; expert++) {
        int64_t count = g->first[expert];
        g->first[expert] = sum;
        sum += count;
    }
    for (int64_t row = 0; row < g->rows; row++) g->order[g->first[expert_of(g, row)]++] = row;
    memmove(g->first + 1, g->first, (size_t)g->experts * sizeof *g->first);
    g->first[0] = 0;
    return DW_OK;
}

typedef struct row_copy {
    const int64_t *order;
    int64_t count, width, task_rows, stride;
    float *packed; /* contiguous rows [count, width] */
    float *spread; /* rows `stride` apart, in the order of `order` */
    bool gather;
} row_copy;

static void copy_task(void *context, int64_t task, int worker) {
    (void)worker;
    const row_copy *c = context;
    int64_t limit = dw__min64((task + 1) * c->task_rows, c->count);
    for (int64_t row = task * c->task_rows; row < limit; row++) {
        float *packed = c->packed + row * c->width, *spread = c->spread + c->order[row] * c->stride;
        memcpy(c->gather ? packed : spread, c->gather ? spread : packed,
               (size_t)c->width * sizeof(float));
    }
}

static void copy_rows(const dw__tensor *tensor, const int64_t *order, int64_t count, bool gather,
                      float *packed) {
    int64_t width = tensor->shape[1];
    if (width == 0) return;
    row_copy c = {.order = order,
                  .count = count,
                  .width = width,
                  .stride = tensor->stride[0],
                  .packed = packed,
                  .spread = tensor->data,
                  .gather = gather};
    c.task_rows = dw__divide_up(COPY_BYTES, width * (int64_t)sizeof(float));
    dw__pool_run(dw__divide_up(count, c.task_rows), copy_task, &c);
}

/* ---- grouped_linear -------------------------------------------------------------------------------- */

static bool rows_fit(const dw__tensor *t) {
    return t->dtype == DW_F32 && (t->shape[1] <= 1 || t->stride[1] == 1);
}

static bool index_supports(const dw__tensor *t) { return t->dtype == DW_I64 || t->dtype == DW_I32; }

static dw_status linear_supports(const dw__kernel *kernel, const void *given,
                                 const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    const dw__tensor *w = &call->inputs[1], *b = &call->inputs[3];
    if (call->input_count > 3 && b->rank >= 0 && !rows_fit(b)) return dw__kernel_refuse(kernel);
    return rows_fit(&call->inputs[0]) && w->dtype == DW_F32 && index_supports(&call->inputs[2]) &&
                   dw__tensor_is_contiguous(&call->outputs[0])
               ? DW_OK
               : dw__kernel_refuse(kernel);
}

static grouped linear_groups(const dw__call *call) {
    return (grouped){.index = &call->inputs[2],
                     .rows = call->inputs[0].shape[0],
                     .experts = call->inputs[1].shape[0]};
}

static dw__matmul linear_gemm(const dw__call *call) {
    const dw__tensor *x = &call->inputs[0], *w = &call->inputs[1];
    bool transposed = dw__call_int(call, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0;
    return (dw__matmul){
        .n = call->outputs[0].shape[1],
        .k = x->shape[1],
        .batches = 1,
        .a_row = x->shape[1],
        .a_k = 1,
        .b_column = w->stride[transposed ? 1 : 2],
        .b_k = w->stride[transposed ? 2 : 1],
    };
}

/* Memory of GEMMs: their scratch, or what a library allocates. */
typedef size_t (*gemm_memory)(const dw__matmul *p, bool passing);

static size_t linear_gemm_bytes(const dw__call *call, gemm_memory of) {
    dw__matmul p = linear_gemm(call);
    size_t most = 0;
    for (p.m = 1; p.m <= dw__min64(call->inputs[0].shape[0], ROWS); p.m++) {
        size_t bytes = of(&p, false);
        if (bytes > most) most = bytes;
    }
    return most;
}

static dw_status linear_scratch(const dw__kernel *kernel, const void *given,
                                const dw__context *context, size_t *bytes) {
    const dw__call *call = given;
    (void)kernel, (void)context;
    grouped g = linear_groups(call);
    *bytes = lay_out(&g, NULL, call->inputs[0].shape[1], call->outputs[0].shape[1],
                     linear_gemm_bytes(call, dw__matmul_scratch));
    return DW_OK;
}

static size_t linear_library(const dw__call *call) {
    return linear_gemm_bytes(call, dw__matmul_library);
}

static dw_status linear_run(const dw__call *call, void *scratch) {
    const dw__tensor *x = &call->inputs[0], *w = &call->inputs[1], *b = &call->inputs[3];
    const dw__tensor *y = &call->outputs[0];
    bool biased = call->input_count > 3 && b->rank >= 0;
    grouped g = linear_groups(call);
    lay_out(&g, scratch, x->shape[1], y->shape[1], 0);
    DW_RETURN_IF_FAILED(sort_rows(&g, call->op));
    if (!y->data || y->shape[1] == 0) return DW_OK;
    for (int64_t expert = 0; expert < g.experts; expert++) {
        dw__matmul p = linear_gemm(call);
        p.b = (const float *)w->data + expert * w->stride[0];
        p.bias = biased ? (const float *)b->data + expert * b->stride[0] : NULL;
        p.a = g.left;
        p.c = g.right;
        for (int64_t row = g.first[expert]; row < g.first[expert + 1]; row += ROWS) {
            p.m = dw__min64(g.first[expert + 1] - row, ROWS);
            copy_rows(x, g.order + row, p.m, true, g.left);
            DW_RETURN_IF_FAILED(dw__matmul_run(&p, NULL, g.gemm_scratch));
            copy_rows(y, g.order + row, p.m, false, g.right);
        }
    }
    return DW_OK;
}

/* ---- grouped_linear_backward_weight ---------------------------------------------------------------- */

static dw_status weight_supports(const dw__kernel *kernel, const void *given,
                                 const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    return rows_fit(&call->inputs[0]) && rows_fit(&call->inputs[1]) &&
                   index_supports(&call->inputs[2]) && dw__tensor_is_contiguous(&call->outputs[0])
               ? DW_OK
               : dw__kernel_refuse(kernel);
}

static grouped weight_groups(const dw__call *call) {
    return (grouped){.index = &call->inputs[2],
                     .rows = call->inputs[0].shape[0],
                     .experts = call->outputs[0].shape[0]};
}

static dw__matmul weight_gemm(const dw__call *call) {
    int64_t m = call->inputs[0].shape[1], n = call->inputs[1].shape[1];
    return (dw__matmul){
        .m = m, .n = n, .batches = 1, .a_row = 1, .a_k = m, .b_k = n, .b_column = 1};
}

static size_t weight_gemm_bytes(const dw__call *call, gemm_memory of) {
    dw__matmul p = weight_gemm(call);
    size_t most = 0;
    for (p.k = 1; p.k <= dw__min64(call->inputs[0].shape[0], ROWS); p.k++) {
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            p.accumulate = accumulate != 0;
            size_t bytes = of(&p, false);
            if (bytes > most) most = bytes;
        }
    }
    return most;
}

static dw_status weight_scratch(const dw__kernel *kernel, const void *given,
                                const dw__context *context, size_t *bytes) {
    const dw__call *call = given;
    (void)kernel, (void)context;
    grouped g = weight_groups(call);
    *bytes = lay_out(&g, NULL, call->inputs[0].shape[1], call->inputs[1].shape[1],
                     weight_gemm_bytes(call, dw__matmul_scratch));
    return DW_OK;
}

static size_t weight_library(const dw__call *call) {
    return weight_gemm_bytes(call, dw__matmul_library);
}

static dw_status weight_run(const dw__call *call, void *scratch) {
    const dw__tensor *x = &call->inputs[0], *y = &call->inputs[1];
    grouped g = weight_groups(call);
    lay_out(&g, scratch, x->shape[1], y->shape[1], 0);
    DW_RETURN_IF_FAILED(sort_rows(&g, call->op));
    if (!call->outputs[0].data) return DW_OK;
    int64_t size = x->shape[1] * y->shape[1];
    for (int64_t expert = 0; expert < g.experts && size > 0; expert++) {
        dw__matmul p = weight_gemm(call);
        p.a = g.left;
        p.b = g.right;
        p.c = (float *)call->outputs[0].data + expert * size;
        if (g.first[expert] == g.first[expert + 1]) memset(p.c, 0, (size_t)size * sizeof(float));
        for (int64_t row = g.first[expert]; row < g.first[expert + 1]; row += ROWS) {
            p.k = dw__min64(g.first[expert + 1] - row, ROWS);
            p.accumulate = row > g.first[expert];
            copy_rows(x, g.order + row, p.k, true, g.left);
            copy_rows(y, g.order + row, p.k, true, g.right);
            DW_RETURN_IF_FAILED(dw__matmul_run(&p, NULL, g.gemm_scratch));
        }
    }
    return DW_OK;
}

/* ---- kernels ------------------------------------------------------------------------------------- */

/* The tolerance of the GEMMs (matmul.c). */
#define TOLERANCE 4.0

static const dw__kernel grouped_linear = {
    .name = "cpu.grouped_linear.sorted",
    .op = DW_OP_GROUPED_LINEAR,
    .source = "ours, one GEMM per matrix",
    .needs = "rows of F32, and an index of integers",
    .supports = linear_supports,
    .workspace_bytes = linear_scratch,
    .library_bytes = linear_library,
    .run = linear_run,
    .tolerance_factor = TOLERANCE,
};
static const dw__kernel grouped_linear_backward_weight = {
    .name = "cpu.grouped_linear_backward_weight.sorted",
    .op = DW_OP_GROUPED_LINEAR_BACKWARD_WEIGHT,
    .source = "ours, one GEMM per matrix",
    .needs = "rows of F32, and an index of integers",
    .supports = weight_supports,
    .workspace_bytes = weight_scratch,
    .library_bytes = weight_library,
    .run = weight_run,
    .tolerance_factor = TOLERANCE,
};

const dw__kernel *const dw__kernels_cpu_grouped[] = {&grouped_linear,
                                                     &grouped_linear_backward_weight, NULL};
