/* Rows copied to places and back, in F32: spread_rows, combine_rows and its backward. A task has a range of the T
 * rows and all k places of each, so that no two tasks write the same row; sums are in the order of the places. Every
 * place is checked before anything is written. */
#include "base/pool.h"
#include "kernel/cpu/cpu.h"
#include "kernel/cpu/data.h"
#include "kernel/cpu/rows.h"
#include <inttypes.h>
#include <string.h>

DW_ISA_TABLE(dw__data_loops)

enum { TASK_BYTES = 64 * 1024 };
enum { X, PLACE, WEIGHT, DY }; /* operands */

typedef struct rows_run {
    const dw__call *call;
    const dw__tensor *place, *weight; /* weight NULL: none */
    int64_t count, each, width, task_rows;
} rows_run;

static int64_t place_of(const rows_run *run, int64_t row, int64_t j) {
    return (
        (const int32_t *)run->place->data)[row * run->place->stride[0] + j * run->place->stride[1]];
}

static float weight_of(const rows_run *run, int64_t row, int64_t j) {
    const dw__tensor *w = run->weight;
    return w ? ((const float *)w->data)[row * w->stride[0] + j * w->stride[1]] : 1.0f;
}

static dw_status check_places(const rows_run *run) {
    const int64_t bound = run->count * run->each;
    for (int64_t row = 0; row < run->count; row++)
        for (int64_t j = 0; j < run->each; j++) {
            const int64_t place = place_of(run, row, j);
            if (place < 0 || place >= bound)
                return dw__fail(DW_INDEX,
                                "%s: place %" PRId64 " of row %" PRId64 " is outside [0, %" PRId64
                                "); expected the places of group_rows",
                                dw_op_name(run->call->op), place, row, bound);
        }
    return DW_OK;
}

static const float *row_of(const dw__tensor *t, int64_t row) {
    return (const float *)t->data + row * t->stride[0];
}

static void spread(const rows_run *run, const dw__data_loops *loops, const dw__tensor *from,
                   float *out, int64_t row) {
    for (int64_t j = 0; j < run->each; j++) {
        float *to = out + place_of(run, row, j) * run->width;
        if (run->weight)
            loops->scaled(false, run->width, to, row_of(from, row), weight_of(run, row, j));
        else
            memcpy(to, row_of(from, row), (size_t)run->width * sizeof(float));
    }
}

static void combine(const rows_run *run, const dw__data_loops *loops, int64_t row) {
    const dw__tensor *x = &run->call->inputs[X];
    float *to = (float *)run->call->outputs[0].data + row * run->width;
    if (run->each == 0) memset(to, 0, (size_t)run->width * sizeof(float));
    for (int64_t j = 0; j < run->each; j++)
        loops->scaled(j > 0, run->width, to, row_of(x, place_of(run, row, j)),
                      weight_of(run, row, j));
}

static void backward(const rows_run *run, const dw__data_loops *loops, int64_t row) {
    const dw__tensor *x = &run->call->inputs[X], *dy = &run->call->inputs[DY];
    float *dx = run->call->outputs[0].data, *dw = run->call->outputs[1].data;
    for (int64_t j = 0; dw && j < run->each; j++)
        dw[row * run->each + j] =
            (float)loops->dot(run->width, row_of(dy, row), row_of(x, place_of(run, row, j)));
    if (dx) spread(run, loops, dy, dx, row);
}

static void rows_task(void *context, int64_t task, int worker) {
    (void)worker;
    const rows_run *run = context;
    const dw__data_loops *loops = dw__data_loops_now();
    int64_t limit = (task + 1) * run->task_rows;
    if (limit > run->count) limit = run->count;
    for (int64_t row = task * run->task_rows; row < limit; row++) {
        if (run->call->op == DW_OP_SPREAD_ROWS)
            spread(run, loops, &run->call->inputs[X], run->call->outputs[0].data, row);
        else if (run->call->op == DW_OP_COMBINE_ROWS)
            combine(run, loops, row);
        else
            backward(run, loops, row);
    }
}

static bool rows_fit(const dw__tensor *t) { return t->dtype == DW_F32 && dw__rows_fit(t); }

static dw_status supports(const dw__kernel *kernel, const void *given, const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    bool fits = rows_fit(&call->inputs[X]) && call->outputs[0].dtype == DW_F32;
    if (call->input_count > WEIGHT && call->inputs[WEIGHT].rank >= 0)
        fits = fits && call->inputs[WEIGHT].dtype == DW_F32;
    if (call->input_count > DY) fits = fits && rows_fit(&call->inputs[DY]);
    for (uint32_t i = 0; i < call->output_count; i++)
        fits = fits && dw__tensor_is_contiguous(&call->outputs[i]);
    return fits ? DW_OK : dw__kernel_refuse(kernel);
}

static dw_status run_rows(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *weight = &call->inputs[WEIGHT];
    rows_run run = {.call = call,
                    .place = &call->inputs[PLACE],
                    .weight = call->input_count > WEIGHT && weight->rank >= 0 ? weight : NULL,
                    .count = call->inputs[PLACE].shape[0],
                    .each = call->inputs[PLACE].shape[1],
                    .width = call->inputs[X].shape[1]};
    DW_RETURN_IF_FAILED(check_places(&run));
    const bool is_read = call->outputs[0].data || (call->output_count > 1 && call->outputs[1].data);
    if (!is_read || run.count == 0) return DW_OK;
    const int64_t bytes = (run.each + 1) * run.width * (int64_t)sizeof(float);
    run.task_rows = bytes < TASK_BYTES ? TASK_BYTES / (bytes + 1) + 1 : 1;
    dw__pool_run(dw__ceil_div(run.count, run.task_rows), rows_task, &run);
    return DW_OK;
}

#define KERNEL(variable, id, text)                                                                 \
    const dw__kernel variable = {.name = text,                                                     \
                                 .op = id,                                                         \
                                 .source = "ours, rows by place",                                  \
                                 .needs = "rows of F32 and weights of F32",                        \
                                 .supports = supports,                                             \
                                 .run = run_rows,                                                  \
                                 .tolerance_factor = 4.0}
KERNEL(dw__cpu_spread_rows, DW_OP_SPREAD_ROWS, "cpu.spread_rows.rows");
KERNEL(dw__cpu_combine_rows, DW_OP_COMBINE_ROWS, "cpu.combine_rows.rows");
KERNEL(dw__cpu_combine_rows_backward, DW_OP_COMBINE_ROWS_BACKWARD,
       "cpu.combine_rows_backward.rows");
