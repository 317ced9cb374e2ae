/* Layer norm, RMS norm, softmax and log-softmax along the last axis, forward and backward, in F32.
 *
 * Rows are independent except for the gradients of w and b, which sum over rows. For these the rows are
 * divided into at most PARTS parts by their number alone; each part sums into its own row of scratch, and the
 * parts are added in order. So the bits do not depend on the number of threads. */
#include "kernel/cpu/norm.h"
#include "base/pool.h"
#include "kernel/cpu/cpu.h"
#include "kernel/cpu/rows.h"
#include <string.h>

DW_ISA_TABLE(dw__norm_loops)

enum {
    TASK_ELEMENTS = 16 * 1024,
    PARTS = 64,
    LEAST_PART_ROWS = 8, /* with fewer rows, adding the parts costs more than threads gain */
    SUM_COLUMNS = 512
};

/* ---- predicates ------------------------------------------------------------------------------ */

static bool absent(const dw__tensor *t) { return t->rank < 0; }

static bool outputs_fit(const dw__call *call) {
    for (uint32_t i = 0; i < call->output_count; i++)
        if (call->outputs[i].dtype != DW_F32 || !dw__tensor_is_contiguous(&call->outputs[i]))
            return false;
    return true;
}

static bool rows_fit(const dw__tensor *t) {
    return t->dtype == DW_F32 && dw__rows_fit(t) && t->shape[t->rank - 1] > 0;
}

static bool vector_supports(const dw__tensor *t) {
    return absent(t) || (t->dtype == DW_F32 && dw__tensor_is_contiguous(t));
}

static dw_status forward_supports(const dw__kernel *kernel, const void *given,
                                  const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    if (!rows_fit(&call->inputs[0]) || !outputs_fit(call)) return dw__kernel_refuse(kernel);
    for (uint32_t i = 1; i < call->input_count; i++)
        if (!vector_supports(&call->inputs[i])) return dw__kernel_refuse(kernel);
    return DW_OK;
}

static dw_status backward_supports(const dw__kernel *kernel, const void *given,
                                   const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    if (!rows_fit(&call->inputs[0]) || !rows_fit(&call->inputs[1]) || !outputs_fit(call))
        return dw__kernel_refuse(kernel);
    for (uint32_t i = 2; i < call->input_count; i++)
        if (!vector_supports(&call->inputs[i])) return dw__kernel_refuse(kernel);
    return DW_OK;
}

static dw_status softmax_supports(const dw__kernel *kernel, const void *given,
                                  const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    for (uint32_t i = 0; i < call->input_count; i++)
        if (!rows_fit(&call->inputs[i])) return dw__kernel_refuse(kernel);
    return outputs_fit(call) && dw__call_int(call, DW_ATTR_KEY_AXIS, -1) == call->inputs[0].rank - 1
               ? DW_OK
               : dw__kernel_refuse(kernel);
}

/* ---- forward --------------------------------------------------------------------------------- */

typedef struct row_run {
    const dw__call *call;
    const dw__norm_loops *loops;
    dw__rows first, second; /* rows of inputs 0 and 1 */
    int64_t task_rows;
    double eps;
    bool centred;
    int64_t parts, part_stride; /* backward: scratch is [2][parts][part_stride] */
    float *scratch;
} row_run;

static int64_t rows_per_task(const dw__rows *rows) {
    return rows->length >= TASK_ELEMENTS ? 1 : TASK_ELEMENTS / rows->length;
}

/* Calls `task` for groups of task_rows rows. */
static void run_rows(row_run *run, dw__task task) {
    dw__pool_run(dw__ceil_div(run->first.count, run->task_rows), task, run);
}

static int64_t last_row(const row_run *run, int64_t index) {
    int64_t limit = (index + 1) * run->task_rows;
    return limit < run->first.count ? limit : run->first.count;
}

static float *element(const dw__tensor *t, int64_t index) {
    return t->data ? (float *)t->data + index : NULL;
}

static void forward_task(void *context, int64_t index, int worker) {
    (void)worker;
    const row_run *run = context;
    const dw__call *call = run->call;
    const float *w = absent(&call->inputs[1]) ? NULL : call->inputs[1].data;
    const float *b = !run->centred || absent(&call->inputs[2]) ? NULL : call->inputs[2].data;
    int64_t n = run->first.length;
    for (int64_t row = index * run->task_rows; row < last_row(run, index); row++)
        run->loops->forward(run->centred, n, dw__rows_at(&call->inputs[0], &run->first, row), w, b,
                            run->eps, element(&call->outputs[0], row * n),
                            run->centred ? element(&call->outputs[1], row) : NULL,
                            element(&call->outputs[run->centred ? 2 : 1], row));
}

static dw_status forward(const dw__call *call, void *scratch) {
    (void)scratch;
    row_run run = {.call = call,
                   .loops = dw__norm_loops_now(),
                   .first = dw__rows_of(&call->inputs[0]),
                   .eps = dw__call_float(call, DW_ATTR_KEY_EPS, 0.0),
                   .centred = call->op == DW_OP_LAYER_NORM};
    run.task_rows = rows_per_task(&run.first);
    run_rows(&run, forward_task);
    return DW_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

static int64_t part_rows(int64_t rows) {
    int64_t share = dw__ceil_div(rows, PARTS);
    return share < LEAST_PART_ROWS ? LEAST_PART_ROWS : share;
}

/* Whole cache lines, so that no two parts share one. */
static int64_t part_stride(int64_t length) { return dw__ceil_div(length, 16) * 16; }

static dw_status backward_scratch(const dw__kernel *kernel, const void *given,
                                  const dw__context *context, size_t *bytes) {
    const dw__call *call = given;
    (void)kernel, (void)context;
    dw__rows rows = dw__rows_of(&call->inputs[0]);
    int64_t parts = dw__ceil_div(rows.count, part_rows(rows.count));
    *bytes = (size_t)(2 * parts * part_stride(rows.length)) * sizeof(float);
    return DW_OK;
}

/* Returns this part's sums of dw (`which` 0) or db (`which` 1); NULL if the operation has no db. The sums are computed
 * even if nothing reads them: without them in the loop a compiler may contract other multiplications and additions, and
 * dx would depend on the set of wanted gradients. */
static float *part_sums(const row_run *run, int which, int64_t part) {
    if ((uint32_t)which + 1 >= run->call->output_count) return NULL;
    return run->scratch + (which * run->parts + part) * run->part_stride;
}

static void backward_task(void *context, int64_t index, int worker) {
    (void)worker;
    const row_run *run = context;
    const dw__call *call = run->call;
    int64_t n = run->first.length;
    const float *w = absent(&call->inputs[2]) ? NULL : call->inputs[2].data;
    const float *mean = run->centred ? call->inputs[3].data : NULL;
    const float *rstd = call->inputs[run->centred ? 4 : 3].data;
    float *dw = part_sums(run, 0, index), *db = part_sums(run, 1, index);
    memset(dw, 0, (size_t)n * sizeof *dw);
    if (db) memset(db, 0, (size_t)n * sizeof *db);
    for (int64_t row = index * run->task_rows; row < last_row(run, index); row++)
        run->loops->backward(run->centred, n, dw__rows_at(&call->inputs[0], &run->first, row),
                             dw__rows_at(&call->inputs[1], &run->second, row), w,
                             mean ? mean[row] : 0.0f, rstd[row],
                             element(&call->outputs[0], row * n), dw, db);
}

static void sum_task(void *context, int64_t index, int worker) {
    (void)worker;
    const row_run *run = context;
    int64_t blocks = dw__ceil_div(run->first.length, SUM_COLUMNS);
    int which = (int)(index / blocks);
    int64_t column = index % blocks * SUM_COLUMNS, columns = run->first.length - column;
    const float *sums = part_sums(run, which, 0);
    if (!run->call->outputs[which + 1].data) return;
    run->loops->add_rows(columns < SUM_COLUMNS ? columns : SUM_COLUMNS, run->parts, sums + column,
                         run->part_stride, element(&run->call->outputs[which + 1], column));
}

static dw_status backward(const dw__call *call, void *scratch) {
    row_run run = {.call = call,
                   .loops = dw__norm_loops_now(),
                   .first = dw__rows_of(&call->inputs[0]),
                   .second = dw__rows_of(&call->inputs[1]),
                   .centred = call->op == DW_OP_LAYER_NORM_BACKWARD,
                   .scratch = scratch};
    run.task_rows = part_rows(run.first.count);
    run.parts = dw__ceil_div(run.first.count, run.task_rows);
    run.part_stride = part_stride(run.first.length);
    if (run.parts == 0) { /* without rows the sums are empty */
        for (uint32_t i = 1; i < call->output_count; i++)
            if (call->outputs[i].data)
                memset(call->outputs[i].data, 0, (size_t)run.first.length * sizeof(float));
        return DW_OK;
    }
    run_rows(&run, backward_task);
    dw__pool_run((call->output_count - 1) * dw__ceil_div(run.first.length, SUM_COLUMNS), sum_task,
                 &run);
    return DW_OK;
}

/* ---- softmax --------------------------------------------------------------------------------- */

static void softmax_task(void *context, int64_t index, int worker) {
    (void)worker;
    const row_run *run = context;
    const dw__call *call = run->call;
    int64_t n = run->first.length;
    for (int64_t row = index * run->task_rows; row < last_row(run, index); row++) {
        const float *x = dw__rows_at(&call->inputs[0], &run->first, row);
        float *y = element(&call->outputs[0], row * n);
        if (call->op == DW_OP_SOFTMAX || call->op == DW_OP_LOG_SOFTMAX)
            run->loops->softmax(call->op == DW_OP_LOG_SOFTMAX, n, x, y);
        else
            run->loops->softmax_backward(call->op == DW_OP_LOG_SOFTMAX_BACKWARD, n, x,
                                         dw__rows_at(&call->inputs[1], &run->second, row), y);
    }
}

static dw_status softmax(const dw__call *call, void *scratch) {
    (void)scratch;
    if (!call->outputs[0].data) return DW_OK;
    row_run run = {
        .call = call, .loops = dw__norm_loops_now(), .first = dw__rows_of(&call->inputs[0])};
    if (call->input_count > 1) run.second = dw__rows_of(&call->inputs[1]);
    run.task_rows = rows_per_task(&run.first);
    run_rows(&run, softmax_task);
    return DW_OK;
}

/* ---- list ------------------------------------------------------------------------------------ */

/* Tolerance factors. The statistics of a row round like a blocked sum: some ulp at any length. The sums over
 * rows add at most PARTS + rows / PARTS terms in sequence. */
#define SOURCE "ours, vector rows"
#define NEEDS "rows of F32, and contiguous F32 results"
static const dw__kernel layer_norm = {.name = "cpu.layer_norm.rows",
                                      .op = DW_OP_LAYER_NORM,
                                      .source = SOURCE,
                                      .needs = NEEDS,
                                      .supports = forward_supports,
                                      .run = forward,
                                      .tolerance_factor = 8.0};
static const dw__kernel rms_norm = {.name = "cpu.rms_norm.rows",
                                    .op = DW_OP_RMS_NORM,
                                    .source = SOURCE,
                                    .needs = NEEDS,
                                    .supports = forward_supports,
                                    .run = forward,
                                    .tolerance_factor = 8.0};
static const dw__kernel layer_norm_backward = {.name = "cpu.layer_norm_backward.rows",
                                               .op = DW_OP_LAYER_NORM_BACKWARD,
                                               .source = SOURCE,
                                               .needs = NEEDS,
                                               .supports = backward_supports,
                                               .workspace_bytes = backward_scratch,
                                               .run = backward,
                                               .tolerance_factor = 8.0};
static const dw__kernel rms_norm_backward = {.name = "cpu.rms_norm_backward.rows",
                                             .op = DW_OP_RMS_NORM_BACKWARD,
                                             .source = SOURCE,
                                             .needs = NEEDS,
                                             .supports = backward_supports,
                                             .workspace_bytes = backward_scratch,
                                             .run = backward,
                                             .tolerance_factor = 8.0};
#define SOFTMAX_KERNEL(variable, OP, text)                                                         \
    static const dw__kernel variable = {.name = text,                                              \
                                        .op = OP,                                                  \
                                        .source = SOURCE,                                          \
                                        .needs = NEEDS ", along the last axis",                    \
                                        .supports = softmax_supports,                              \
                                        .run = softmax,                                            \
                                        .tolerance_factor = 8.0}
SOFTMAX_KERNEL(softmax_kernel, DW_OP_SOFTMAX, "cpu.softmax.rows");
SOFTMAX_KERNEL(log_softmax_kernel, DW_OP_LOG_SOFTMAX, "cpu.log_softmax.rows");
SOFTMAX_KERNEL(softmax_backward_kernel, DW_OP_SOFTMAX_BACKWARD, "cpu.softmax_backward.rows");
SOFTMAX_KERNEL(log_softmax_backward_kernel, DW_OP_LOG_SOFTMAX_BACKWARD,
               "cpu.log_softmax_backward.rows");

const dw__kernel *const dw__kernels_cpu_norm[] = {
    &layer_norm,
    &rms_norm,
    &layer_norm_backward,
    &rms_norm_backward,
    &softmax_kernel,
    &log_softmax_kernel,
    &softmax_backward_kernel,
    &log_softmax_backward_kernel,
    NULL,
};
