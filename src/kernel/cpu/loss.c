/* Cross-entropy of rows of logits, forward and backward, in F32. Forward reads the logits once. The
 * probabilities are never stored: backward recomputes them from the logits and lse. */
#include "kernel/cpu/loss.h"
#include "base/pool.h"
#include "kernel/cpu/cpu.h"
#include "kernel/cpu/rows.h"
#include <inttypes.h>
#include <math.h>
#include <string.h>

DW_ISA_TABLE(dw__loss_loops)

enum { TASK_ELEMENTS = 16 * 1024 };

typedef enum reduction { REDUCTION_MEAN, REDUCTION_SUM, REDUCTION_NONE } reduction;

typedef struct loss_run {
    const dw__call *call;
    dw__rows x;
    reduction reduction;
    int64_t ignored, task_rows;
    double smoothing;
    double counted; /* targets that are not ignored */
    double *losses; /* scratch, one entry per row */
} loss_run;

static loss_run make_run(const dw__call *call) {
    const dw_attr *attr = dw__call_attr(call, DW_ATTR_KEY_REDUCTION);
    loss_run run = {.call = call,
                    .x = dw__rows_of(&call->inputs[0]),
                    .reduction = REDUCTION_MEAN,
                    .ignored = dw__call_int(call, DW_ATTR_KEY_IGNORE_INDEX, -100),
                    .smoothing = dw__call_float(call, DW_ATTR_KEY_LABEL_SMOOTHING, 0.0)};
    if (attr && strcmp(attr->string, "sum") == 0) run.reduction = REDUCTION_SUM;
    if (attr && strcmp(attr->string, "none") == 0) run.reduction = REDUCTION_NONE;
    run.task_rows = run.x.length < TASK_ELEMENTS ? TASK_ELEMENTS / run.x.length : 1;
    return run;
}

static int64_t target_of(const loss_run *run, int64_t row) {
    const dw__tensor *target = &run->call->inputs[1];
    return ((const int64_t *)target->data)[row * target->stride[0]];
}

/* Counts the targets that are not ignored. A target outside of the classes is an error. */
static dw_status count_targets(loss_run *run) {
    int64_t counted = 0;
    for (int64_t row = 0; row < run->x.count; row++) {
        int64_t target = target_of(run, row);
        if (target == run->ignored) continue;
        if (target < 0 || target >= run->x.length)
            return dw__fail(DW_INDEX,
                            "%s: the target of row %" PRId64 " is %" PRId64 ", outside [0, %" PRId64
                            ") and not ignore_index %" PRId64
                            "; check the labels against the number of classes",
                            dw_op_name(run->call->op), row, target, run->x.length, run->ignored);
        counted++;
    }
    run->counted = (double)counted;
    return DW_OK;
}

static int64_t last_row(const loss_run *run, int64_t task) {
    int64_t limit = (task + 1) * run->task_rows;
    return limit < run->x.count ? limit : run->x.count;
}

static bool logits_fit(const dw__call *call) {
    const dw__tensor *x = &call->inputs[0];
    return x->rank == 2 && x->dtype == DW_F32 && dw__rows_fit(x) && x->shape[1] > 0 &&
           call->inputs[1].dtype == DW_I64;
}

/* ---- forward --------------------------------------------------------------------------------- */

static dw_status forward_supports(const dw__kernel *kernel, const void *given,
                                  const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    if (!logits_fit(call)) return dw__kernel_refuse(kernel);
    for (uint32_t i = 0; i < call->output_count; i++)
        if (call->outputs[i].dtype != DW_F32 || !dw__tensor_is_contiguous(&call->outputs[i]))
            return dw__kernel_refuse(kernel);
    return DW_OK;
}

static dw_status forward_scratch(const dw__kernel *kernel, const void *given,
                                 const dw__context *context, size_t *bytes) {
    const dw__call *call = given;
    (void)kernel, (void)context;
    *bytes = (size_t)call->inputs[0].shape[0] * sizeof(double);
    return DW_OK;
}

static void forward_task(void *context, int64_t task, int worker) {
    (void)worker;
    const loss_run *run = context;
    const dw__loss_loops *loops = dw__loss_loops_now();
    float *lse = run->call->outputs[1].data;
    for (int64_t row = task * run->task_rows; row < last_row(run, task); row++) {
        const float *x = dw__rows_at(&run->call->inputs[0], &run->x, row);
        int64_t target = target_of(run, row);
        dw__row_sums sums = loops->row_sums(run->x.length, x);
        double log_sum = log(sums.exponents);
        if (lse) lse[row] = (float)(sums.max + log_sum);
        run->losses[row] = 0.0;
        if (target == run->ignored) continue;
        double loss = (sums.max - (double)x[target]) + log_sum;
        if (run->smoothing != 0.0) {
            double even = (sums.max - sums.plain / (double)run->x.length) + log_sum;
            loss = (1.0 - run->smoothing) * loss + run->smoothing * even;
        }
        run->losses[row] = loss;
    }
}

static dw_status forward(const dw__call *call, void *scratch) {
    loss_run run = make_run(call);
    run.losses = scratch;
    DW_RETURN_IF_FAILED(count_targets(&run));
    dw__pool_run(dw__ceil_div(run.x.count, run.task_rows), forward_task, &run);
    float *out = call->outputs[0].data;
    if (!out) return DW_OK;
    double sum = 0.0;
    for (int64_t row = 0; row < run.x.count; row++) {
        if (run.reduction == REDUCTION_NONE)
            out[row] = (float)run.losses[row];
        else
            sum += run.losses[row];
    }
    if (run.reduction == REDUCTION_SUM) out[0] = (float)sum;
    if (run.reduction == REDUCTION_MEAN) /* a mean without targets is NaN */
        out[0] = run.counted > 0.0 ? (float)(sum / run.counted) : NAN;
    return DW_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

static dw_status backward_supports(const dw__kernel *kernel, const void *given,
                                   const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    const dw__tensor *lse = &call->inputs[2], *dloss = &call->inputs[3];
    return logits_fit(call) && lse->dtype == DW_F32 && dw__tensor_is_contiguous(lse) &&
                   dloss->dtype == DW_F32 && dloss->rank <= 1 && call->outputs[0].dtype == DW_F32 &&
                   dw__tensor_is_contiguous(&call->outputs[0])
               ? DW_OK
               : dw__kernel_refuse(kernel);
}

static void backward_task(void *context, int64_t task, int worker) {
    (void)worker;
    const loss_run *run = context;
    const dw__loss_loops *loops = dw__loss_loops_now();
    const dw__tensor *dloss = &run->call->inputs[3];
    const float *lse = run->call->inputs[2].data, *weights = dloss->data;
    int64_t n = run->x.length;
    for (int64_t row = task * run->task_rows; row < last_row(run, task); row++) {
        const float *x = dw__rows_at(&run->call->inputs[0], &run->x, row);
        float *dx = (float *)run->call->outputs[0].data + row * n;
        int64_t target = target_of(run, row);
        if (target == run->ignored) {
            memset(dx, 0, (size_t)n * sizeof *dx);
            continue;
        }
        double weight =
            run->reduction == REDUCTION_NONE ? weights[row * dloss->stride[0]] : weights[0];
        if (run->reduction == REDUCTION_MEAN) weight /= run->counted;
        double even = run->smoothing / (double)n;
        double probability =
            exp((double)x[target] - (double)lse[row]); /* before x is overwritten */
        loops->backward_row(n, x, lse[row], (float)even, (float)weight, dx);
        dx[target] = (float)((probability - even - (1.0 - run->smoothing)) * weight);
    }
}

static dw_status backward(const dw__call *call, void *scratch) {
    (void)scratch;
    loss_run run = make_run(call);
    DW_RETURN_IF_FAILED(count_targets(&run));
    if (!call->outputs[0].data) return DW_OK;
    dw__pool_run(dw__ceil_div(run.x.count, run.task_rows), backward_task, &run);
    return DW_OK;
}

/* ---- list ------------------------------------------------------------------------------------ */

static const dw__kernel cross_entropy = {
    .name = "cpu.cross_entropy.online",
    .op = DW_OP_CROSS_ENTROPY,
    .source = "ours, one pass over the logits",
    .needs = "rows of F32 logits, I64 targets and contiguous F32 results",
    .supports = forward_supports,
    .workspace_bytes = forward_scratch,
    .run = forward,
    .tolerance_factor = 4.0};
static const dw__kernel cross_entropy_backward = {
    .name = "cpu.cross_entropy_backward.rows",
    .op = DW_OP_CROSS_ENTROPY_BACKWARD,
    .source = "ours, vector rows",
    .needs = "rows of F32 logits, I64 targets, and the others contiguous F32",
    .supports = backward_supports,
    .run = backward,
    .tolerance_factor = 8.0};

const dw__kernel *const dw__kernels_cpu_loss[] = {&cross_entropy, &cross_entropy_backward,
                                                  &dw__cpu_adamw, NULL};
