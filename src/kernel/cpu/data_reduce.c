/* Sums, maxima, minima and means over any set of axes, and cumulative sums.
 *
 * Axes are merged if strides and their role (kept or reduced) allow it. The last axis decides the form:
 *   reduced: each result folds rows; sums of pieces of a row are added in double
 *   kept:    each block of columns folds the block's rows (a bias gradient)
 * If there are few results, the folded range is divided into parts by shape alone. Each part has its place in
 * scratch, and the parts are folded in order, so the bits do not depend on the number of threads. */
#include "base/pool.h"
#include "kernel/cpu/cpu.h"
#include "kernel/cpu/data.h"
#include "kernel/cpu/rows.h"
#include <math.h>
#include <string.h>

DW_ISA_TABLE(dw__data_loops)

enum {
    TASK_ELEMENTS = 16 * 1024,
    PIECE = 4096,    /* of a row, summed in F32 vectors */
    COLUMNS = 512,   /* block of columns */
    BLOCK_ROWS = 32, /* rows summed in F32 before they are added to the block's total */
    FEW = 32,        /* enough tasks to keep our machines busy */
    PARTS = 64,
    LEAST_PART_ROWS = 16
};

typedef struct axis_list {
    int rank;
    int64_t shape[DW_MAX_RANK], stride[DW_MAX_RANK], count;
} axis_list;

typedef struct reduction {
    const float *x;
    dw__fold fold;
    axis_list kept, reduced; /* without the last axis */
    bool last_reduced;
    int64_t last, last_stride;
    int64_t rows; /* rows folded into one result or block of columns, times pieces */
    int64_t pieces, blocks, parts, part_rows;
    int64_t task_results;
    double scale;
    float *out;
    void *scratch; /* rows: double[kept][parts]; columns: float[kept][parts][last] */
} reduction;

static void push_axis(axis_list *list, int64_t size, int64_t stride) {
    list->shape[list->rank] = size;
    list->stride[list->rank++] = stride;
    list->count *= size;
}

static int64_t list_offset(const axis_list *list, int64_t index) {
    int64_t offset = 0;
    for (int axis = list->rank - 1; axis >= 0; axis--) {
        offset += index % list->shape[axis] * list->stride[axis];
        index /= list->shape[axis];
    }
    return offset;
}

/* Merges the axes of x in order, with their roles. Returns their number. */
static int merged_axes(const dw__call *call, int64_t *shape, int64_t *stride, bool *reduced) {
    const dw__tensor *x = &call->inputs[0];
    const dw_attr *axes = dw__call_attr(call, DW_ATTR_KEY_AXES);
    bool role[DW_MAX_RANK] = {false};
    int rank = 0;
    for (uint32_t i = 0; i < axes->count; i++) role[axes->list[i]] = true;
    for (int axis = 0; axis < x->rank; axis++) {
        if (x->shape[axis] == 1) continue;
        bool joins = rank > 0 && reduced[rank - 1] == role[axis] &&
                     stride[rank - 1] == x->stride[axis] * x->shape[axis];
        if (joins)
            shape[--rank] *= x->shape[axis];
        else
            shape[rank] = x->shape[axis];
        stride[rank] = x->stride[axis];
        reduced[rank++] = role[axis];
    }
    return rank;
}

static dw__fold fold_of(dw_op op) {
    return op == DW_OP_REDUCE_MAX   ? DW_FOLD_MAX
           : op == DW_OP_REDUCE_MIN ? DW_FOLD_MIN
                                    : DW_FOLD_SUM;
}

static reduction plan_reduction(const dw__call *call) {
    int64_t shape[DW_MAX_RANK], stride[DW_MAX_RANK];
    bool reduced[DW_MAX_RANK];
    int rank = merged_axes(call, shape, stride, reduced);
    reduction r = {.fold = fold_of(call->op),
                   .kept = {.count = 1},
                   .reduced = {.count = 1},
                   .last = 1,
                   .last_stride = 1,
                   .scale = 1.0};
    for (int axis = 0; axis < rank - 1; axis++)
        push_axis(reduced[axis] ? &r.reduced : &r.kept, shape[axis], stride[axis]);
    if (rank > 0) {
        r.last = shape[rank - 1];
        r.last_stride = stride[rank - 1];
        r.last_reduced = reduced[rank - 1];
    }
    if (call->op == DW_OP_MEAN)
        r.scale = 1.0 / (double)(r.reduced.count * (r.last_reduced ? r.last : 1));
    r.pieces = r.last_reduced ? dw__ceil_div(r.last, PIECE) : 1;
    r.blocks = r.last_reduced ? 1 : dw__ceil_div(r.last, COLUMNS);
    r.rows = r.reduced.count * r.pieces;
    r.parts = 1;
    if (r.kept.count * r.blocks < FEW) {
        int64_t least = r.last_reduced ? 2 : LEAST_PART_ROWS;
        r.parts = r.rows / least < 1 ? 1 : r.rows / least < PARTS ? r.rows / least : PARTS;
    }
    r.part_rows = dw__ceil_div(r.rows, r.parts);
    r.parts = r.part_rows ? dw__ceil_div(r.rows, r.part_rows) : 1; /* no part is empty */
    return r;
}

static dw_status reduce_scratch(const dw__kernel *kernel, const void *given,
                                const dw__context *context, size_t *bytes) {
    const dw__call *call = given;
    (void)kernel, (void)context;
    reduction r = plan_reduction(call);
    if (r.parts == 1) return DW_OK;
    *bytes = r.last_reduced ? (size_t)(r.kept.count * r.parts) * sizeof(double)
                            : (size_t)(r.kept.count * r.parts * r.last) * sizeof(float);
    return DW_OK;
}

/* ---- the last axis is reduced ---------------------------------------------------------------- */

static double identity(dw__fold fold) {
    return fold == DW_FOLD_SUM ? 0.0 : fold == DW_FOLD_MAX ? -INFINITY : INFINITY;
}

static double combine(dw__fold fold, double a, double b) {
    if (fold == DW_FOLD_SUM) return a + b;
    bool better = fold == DW_FOLD_MAX ? b > a : b < a;
    return better || b != b ? b : a;
}

/* Copies strided elements to a row. */
static const float *packed(const float *from, int64_t count, int64_t stride, float *buffer) {
    if (stride == 1) return from;
    dw__data_loops_now()->copy(sizeof *from, count, buffer, from, stride);
    return buffer;
}

static double fold_part(const reduction *r, int64_t kept, int64_t part) {
    const dw__data_loops *loops = dw__data_loops_now();
    const float *x = r->x + list_offset(&r->kept, kept);
    int64_t limit = (part + 1) * r->part_rows < r->rows ? (part + 1) * r->part_rows : r->rows;
    double value = identity(r->fold);
    float buffer[PIECE];
    for (int64_t row = part * r->part_rows; row < limit; row++) {
        int64_t first = row % r->pieces * PIECE, count = r->last - first;
        if (count > PIECE) count = PIECE;
        const float *from = x + list_offset(&r->reduced, row / r->pieces) + first * r->last_stride;
        value = loops->fold_row(r->fold, count, packed(from, count, r->last_stride, buffer), value);
    }
    return value;
}

static void rows_task(void *context, int64_t task, int worker) {
    (void)worker;
    const reduction *r = context;
    if (r->parts > 1) {
        ((double *)r->scratch)[task] = fold_part(r, task / r->parts, task % r->parts);
        return;
    }
    int64_t limit = (task + 1) * r->task_results;
    if (limit > r->kept.count) limit = r->kept.count;
    for (int64_t i = task * r->task_results; i < limit; i++)
        r->out[i] = (float)(fold_part(r, i, 0) * r->scale);
}

static void reduce_rows(reduction *r) {
    if (r->parts == 1) {
        int64_t work = r->reduced.count * r->last;
        r->task_results = work < TASK_ELEMENTS ? TASK_ELEMENTS / work : 1;
        dw__pool_run(dw__ceil_div(r->kept.count, r->task_results), rows_task, r);
        return;
    }
    dw__pool_run(r->kept.count * r->parts, rows_task, r);
    const double *sums = r->scratch;
    for (int64_t i = 0; i < r->kept.count; i++) {
        double value = sums[i * r->parts];
        for (int64_t part = 1; part < r->parts; part++)
            value = combine(r->fold, value, sums[i * r->parts + part]);
        r->out[i] = (float)(value * r->scale);
    }
}

/* ---- the last axis is kept ------------------------------------------------------------------- */

/* Folds rows [first, limit) of a block of columns into `to`, in blocks of rows. A long sum then does not
 * round against the whole previous sum at every row. */
static void fold_block(const reduction *r, const float *x, int64_t first, int64_t limit,
                       int64_t width, float *to) {
    const dw__data_loops *loops = dw__data_loops_now();
    float sum[COLUMNS], buffer[COLUMNS];
    for (int64_t row = first; row < limit;) {
        bool is_first = row == first;
        float *target = is_first ? to : sum;
        memcpy(target, packed(x + list_offset(&r->reduced, row), width, r->last_stride, buffer),
               (size_t)width * sizeof *to);
        int64_t stop = row + BLOCK_ROWS < limit ? row + BLOCK_ROWS : limit;
        for (row++; row < stop; row++)
            loops->fold_rows(
                r->fold, width, target,
                packed(x + list_offset(&r->reduced, row), width, r->last_stride, buffer));
        if (!is_first) loops->fold_rows(r->fold, width, to, sum);
    }
}

static void scale_block(const reduction *r, int64_t width, float *to) {
    if (r->scale == 1.0) return;
    for (int64_t i = 0; i < width; i++) to[i] = (float)((double)to[i] * r->scale);
}

/* Task order: block of columns (fastest), part, kept. */
static void columns_task(void *context, int64_t task, int worker) {
    (void)worker;
    const reduction *r = context;
    int64_t column = task % r->blocks * COLUMNS, part = task / r->blocks % r->parts;
    int64_t kept = task / r->blocks / r->parts;
    int64_t width = r->last - column < COLUMNS ? r->last - column : COLUMNS;
    int64_t first = part * r->part_rows;
    int64_t limit = first + r->part_rows < r->rows ? first + r->part_rows : r->rows;
    const float *x = r->x + list_offset(&r->kept, kept) + column * r->last_stride;
    float *to = r->parts > 1 ? (float *)r->scratch + (kept * r->parts + part) * r->last + column
                             : r->out + kept * r->last + column;
    fold_block(r, x, first, limit, width, to);
    if (r->parts == 1) scale_block(r, width, to);
}

static void parts_task(void *context, int64_t task, int worker) {
    (void)worker;
    const reduction *r = context;
    int64_t column = task % r->blocks * COLUMNS, kept = task / r->blocks;
    int64_t width = r->last - column < COLUMNS ? r->last - column : COLUMNS;
    const float *parts = (const float *)r->scratch + kept * r->parts * r->last + column;
    float *to = r->out + kept * r->last + column;
    memcpy(to, parts, (size_t)width * sizeof *to);
    for (int64_t part = 1; part < r->parts; part++)
        dw__data_loops_now()->fold_rows(r->fold, width, to, parts + part * r->last);
    scale_block(r, width, to);
}

static void reduce_columns(reduction *r) {
    dw__pool_run(r->kept.count * r->parts * r->blocks, columns_task, r);
    if (r->parts > 1) dw__pool_run(r->kept.count * r->blocks, parts_task, r);
}

/* ---- entry ----------------------------------------------------------------------------------- */

static dw_status reduce_supports(const dw__kernel *kernel, const void *given,
                                 const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    return call->inputs[0].dtype == DW_F32 && dw__tensor_is_contiguous(&call->outputs[0])
               ? DW_OK
               : dw__kernel_refuse(kernel);
}

static dw_status reduce(const dw__call *call, void *scratch) {
    const dw__tensor *out = &call->outputs[0];
    if (!out->data || dw__tensor_count(out) == 0) return DW_OK;
    reduction r = plan_reduction(call);
    r.x = call->inputs[0].data;
    r.out = out->data;
    r.scratch = scratch;
    if (r.reduced.count * r.last == 0) { /* nothing to reduce */
        for (int64_t i = 0; i < dw__tensor_count(out); i++)
            r.out[i] = (float)(identity(r.fold) * r.scale);
    } else if (r.last_reduced) {
        reduce_rows(&r);
    } else {
        reduce_columns(&r);
    }
    return DW_OK;
}

/* ---- cumulative sums ------------------------------------------------------------------------- */

typedef struct cumsum_run {
    const dw__call *call;
    axis_list lines_in, lines_out;
    int64_t length, step_in, step_out, task_lines;
    bool reverse;
} cumsum_run;

static dw_status cumsum_supports(const dw__kernel *kernel, const void *given,
                                 const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    dw_dtype dtype = call->inputs[0].dtype;
    return dtype == DW_F32 || dtype == DW_I32 || dtype == DW_I64 ? DW_OK
                                                                 : dw__kernel_refuse(kernel);
}

/* Sums of F32 accumulate in double; sums of integers wrap. */
#define CUMSUM_LINE(type, sum_type)                                                                \
    {                                                                                              \
        const type *x = (const type *)run->call->inputs[0].data + from;                            \
        type *y = (type *)run->call->outputs[0].data + to;                                         \
        sum_type sum = 0;                                                                          \
        for (int64_t i = 0; i < run->length; i++) {                                                \
            int64_t at = run->reverse ? run->length - 1 - i : i;                                   \
            sum += (sum_type)x[at * run->step_in];                                                 \
            y[at * run->step_out] = (type)sum;                                                     \
        }                                                                                          \
    }                                                                                              \
    break

static void cumsum_task(void *context, int64_t task, int worker) {
    (void)worker;
    const cumsum_run *run = context;
    int64_t limit = (task + 1) * run->task_lines;
    if (limit > run->lines_in.count) limit = run->lines_in.count;
    for (int64_t line = task * run->task_lines; line < limit; line++) {
        int64_t from = list_offset(&run->lines_in, line), to = list_offset(&run->lines_out, line);
        switch (run->call->inputs[0].dtype) {
        case DW_F32: CUMSUM_LINE(float, double);
        case DW_I32: CUMSUM_LINE(int32_t, uint32_t);
        default: CUMSUM_LINE(int64_t, uint64_t);
        }
    }
}

static dw_status cumsum(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *x = &call->inputs[0], *out = &call->outputs[0];
    int axis = (int)dw__call_int(call, DW_ATTR_KEY_AXIS, 0);
    if (!out->data || dw__tensor_count(out) == 0) return DW_OK;
    cumsum_run run = {.call = call,
                      .lines_in = {.count = 1},
                      .lines_out = {.count = 1},
                      .length = x->shape[axis],
                      .step_in = x->stride[axis],
                      .step_out = out->stride[axis],
                      .reverse = dw__call_int(call, DW_ATTR_KEY_REVERSE, 0) != 0};
    for (int i = 0; i < x->rank; i++) {
        if (i == axis) continue;
        push_axis(&run.lines_in, x->shape[i], x->stride[i]);
        push_axis(&run.lines_out, x->shape[i], out->stride[i]);
    }
    run.task_lines = run.length < TASK_ELEMENTS ? TASK_ELEMENTS / run.length : 1;
    dw__pool_run(dw__ceil_div(run.lines_in.count, run.task_lines), cumsum_task, &run);
    return DW_OK;
}

/* ---- kernels --------------------------------------------------------------------------------- */

#define REDUCE(variable, OP, text)                                                                 \
    const dw__kernel variable = {.name = text,                                                     \
                                 .op = OP,                                                         \
                                 .source = "ours, rows and columns",                               \
                                 .needs = "F32, and a contiguous result",                          \
                                 .supports = reduce_supports,                                      \
                                 .workspace_bytes = reduce_scratch,                                \
                                 .run = reduce,                                                    \
                                 .tolerance_factor = 4.0}
REDUCE(dw__cpu_reduce_sum, DW_OP_REDUCE_SUM, "cpu.reduce_sum.parts");
REDUCE(dw__cpu_reduce_max, DW_OP_REDUCE_MAX, "cpu.reduce_max.parts");
REDUCE(dw__cpu_reduce_min, DW_OP_REDUCE_MIN, "cpu.reduce_min.parts");
REDUCE(dw__cpu_mean, DW_OP_MEAN, "cpu.mean.parts");
const dw__kernel dw__cpu_cumsum = {.name = "cpu.cumsum.lines",
                                   .op = DW_OP_CUMSUM,
                                   .source = "ours, one line at a time",
                                   .needs = "F32, I32 or I64",
                                   .supports = cumsum_supports,
                                   .run = cumsum,
                                   .tolerance_factor = 4.0};
