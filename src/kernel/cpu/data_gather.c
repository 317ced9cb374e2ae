/* Rows selected by an index, and the transpose: take and embedding, scatter_add and embedding_backward.
 *
 * Every index is checked before anything is written. The transpose adds in the order of the indices. The
 * result is divided into ranges of rows (or blocks of columns); each task owns one range and searches all
 * indices for its rows. No two tasks add to one element, and the bits equal those of a serial loop. */
#include "base/pool.h"
#include "kernel/cpu/cpu.h"
#include "kernel/cpu/data.h"
#include "kernel/cpu/rows.h"
#include "kernel/reference/index.h"
#include <inttypes.h>
#include <string.h>

DW_ISA_TABLE(dw__data_loops)

enum {
    TASK_BYTES = 64 * 1024,
    RANGES = 64,  /* ranges of rows of a scattered result */
    COLUMNS = 256 /* block of columns, for results with too few rows */
};

/* [before, .., after] around an axis, and the index operand flattened. */
typedef struct gather_run {
    const dw__call *call;
    const dw__tensor *indices;
    int64_t before, after, count, bound, padding;
    int64_t row_bytes, axis_bytes, task_rows; /* take */
    int64_t ranges, blocks, width;            /* for scatter */
    bool indices_contiguous;
    bool accumulates; /* scatter: the result already holds a sum */
} gather_run;

static int64_t index_at(const gather_run *run, int64_t position) {
    const dw__tensor *t = run->indices;
    int64_t offset = position;
    if (!run->indices_contiguous) {
        offset = 0;
        for (int axis = t->rank - 1; axis >= 0; axis--) {
            offset += position % t->shape[axis] * t->stride[axis];
            position /= t->shape[axis];
        }
    }
    return t->dtype == DW_I64 ? ((const int64_t *)t->data)[offset]
                              : ((const int32_t *)t->data)[offset];
}

static dw_status check_indices(const gather_run *run) {
    for (int64_t i = 0; i < run->count; i++) {
        int64_t index = index_at(run, i);
        if (index < 0 || index >= run->bound)
            return dw__fail(DW_INDEX,
                            "%s: index %" PRId64 " at position %" PRId64 " is outside [0, %" PRId64
                            "); check the values fed as indices against that size",
                            dw_op_name(run->call->op), index, i, run->bound);
    }
    return DW_OK;
}

static bool is_index(const dw__tensor *t) { return t->dtype == DW_I64 || t->dtype == DW_I32; }

static int64_t product(const int64_t *shape, int from, int to) {
    int64_t count = 1;
    for (int axis = from; axis < to; axis++) count *= shape[axis];
    return count;
}

/* ---- take, embedding ------------------------------------------------------------------------- */

static int take_axis(const dw__call *call) {
    return call->op == DW_OP_EMBEDDING ? 0 : (int)dw__call_int(call, DW_ATTR_KEY_AXIS, 0);
}

static dw_status take_supports(const dw__kernel *kernel, const void *given,
                               const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    dw__tensor x = call->inputs[0];
    int axis = take_axis(call);
    if (!is_index(&call->inputs[1]) || !dw__tensor_is_contiguous(&call->outputs[0]))
        return dw__kernel_refuse(kernel);
    if (product(x.shape, 0, axis) > 1)
        return dw__tensor_is_contiguous(&x) ? DW_OK : dw__kernel_refuse(kernel);
    for (int i = 0; i <= axis; i++) x.shape[i] = 1; /* the axis itself may have any stride */
    return dw__tensor_is_contiguous(&x) ? DW_OK : dw__kernel_refuse(kernel);
}

static void take_task(void *context, int64_t task, int worker) {
    (void)worker;
    const gather_run *run = context;
    const uint8_t *x = run->call->inputs[0].data;
    uint8_t *out = run->call->outputs[0].data;
    int64_t limit = (task + 1) * run->task_rows;
    if (limit > run->before * run->count) limit = run->before * run->count;
    for (int64_t row = task * run->task_rows; row < limit; row++) {
        int64_t outer = row / run->count, index = index_at(run, row % run->count);
        memcpy(out + row * run->row_bytes,
               x + outer * run->bound * run->row_bytes + index * run->axis_bytes,
               (size_t)run->row_bytes);
    }
}

static dw_status take(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *x = &call->inputs[0], *out = &call->outputs[0];
    if (!out->data || dw__tensor_count(out) == 0) return DW_OK;
    int axis = take_axis(call);
    int64_t size = (int64_t)dw_dtype_bytes(x->dtype);
    gather_run run = {.call = call,
                      .indices = &call->inputs[1],
                      .before = product(x->shape, 0, axis),
                      .after = product(x->shape, axis + 1, x->rank),
                      .count = dw__tensor_count(&call->inputs[1]),
                      .bound = x->shape[axis],
                      .axis_bytes = x->stride[axis] * size,
                      .indices_contiguous = dw__tensor_is_contiguous(&call->inputs[1])};
    DW_RETURN_IF_FAILED(check_indices(&run));
    run.row_bytes = run.after * size;
    run.task_rows = run.row_bytes < TASK_BYTES ? TASK_BYTES / run.row_bytes : 1;
    dw__pool_run(dw__ceil_div(run.before * run.count, run.task_rows), take_task, &run);
    return DW_OK;
}

/* ---- scatter_add, embedding_backward --------------------------------------------------------- */

static dw_status scatter_supports(const dw__kernel *kernel, const void *given,
                                  const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    return is_index(&call->inputs[0]) && call->inputs[1].dtype == DW_F32 &&
                   call->outputs[0].dtype == DW_F32 && dw__tensor_is_contiguous(&call->inputs[1]) &&
                   dw__tensor_is_contiguous(&call->outputs[0])
               ? DW_OK
               : dw__kernel_refuse(kernel);
}

/* Whole rows are one long stretch, which memset writes without reading it first. */
static void clear_rows(float *out, int64_t first, int64_t limit, int64_t width, int64_t stride) {
    if (width == stride && first < limit) {
        memset(out + first * stride, 0, (size_t)((limit - first) * stride) * sizeof *out);
        return;
    }
    for (int64_t row = first; row < limit; row++)
        memset(out + row * stride, 0, (size_t)width * sizeof *out);
}

static void scatter_task(void *context, int64_t task, int worker) {
    (void)worker;
    const gather_run *run = context;
    const dw__data_loops *loops = dw__data_loops_now();
    const float *updates = run->call->inputs[1].data;
    float *out = run->call->outputs[0].data;
    int64_t column = task % run->blocks * run->width, range = task / run->blocks % run->ranges;
    int64_t outer = task / run->blocks / run->ranges;
    int64_t width = run->after - column < run->width ? run->after - column : run->width;
    int64_t share = dw__ceil_div(run->bound, run->ranges);
    int64_t first = range * share, limit = first + share < run->bound ? first + share : run->bound;
    updates += outer * run->count * run->after + column;
    out += outer * run->bound * run->after + column;
    if (!run->accumulates) clear_rows(out, first, limit, width, run->after);
    for (int64_t i = 0; i < run->count; i++) {
        int64_t row = index_at(run, i);
        if (row >= first && row < limit && row != run->padding)
            loops->add(width, out + row * run->after, updates + i * run->after);
    }
}

static dw_status scatter(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *out = &call->outputs[0];
    if (!out->data || dw__tensor_count(out) == 0) return DW_OK;
    bool embedding = call->op == DW_OP_EMBEDDING_BACKWARD;
    int axis = embedding ? 0 : (int)dw__call_int(call, DW_ATTR_KEY_AXIS, 0);
    gather_run run = {.call = call,
                      .indices = &call->inputs[0],
                      .before = product(out->shape, 0, axis),
                      .after = product(out->shape, axis + 1, out->rank),
                      .count = dw__tensor_count(&call->inputs[0]),
                      .bound = out->shape[axis],
                      .padding = embedding ? dw__call_int(call, DW_ATTR_KEY_PADDING_INDEX, -1) : -1,
                      .indices_contiguous = dw__tensor_is_contiguous(&call->inputs[0]),
                      .accumulates = call->accumulates};
    DW_RETURN_IF_FAILED(check_indices(&run));
    run.ranges = run.bound < RANGES ? 1 : RANGES;
    run.width = run.ranges > 1 ? run.after : COLUMNS;
    run.blocks = dw__ceil_div(run.after, run.width);
    dw__pool_run(run.before * run.ranges * run.blocks, scatter_task, &run);
    return DW_OK;
}

/* ---- kernels --------------------------------------------------------------------------------- */

#define KERNEL(variable, OP, text, predicate, function, adds, wants)                               \
    const dw__kernel variable = {.name = text,                                                     \
                                 .op = OP,                                                         \
                                 .source = "ours, rows by index",                                  \
                                 .needs = wants,                                                   \
                                 .supports = predicate,                                            \
                                 .accumulates = adds,                                              \
                                 .run = function,                                                  \
                                 .tolerance_factor = 4.0}
#define TAKES "an index of integers, and contiguous tensors"
#define ADDS "an index of integers, and contiguous F32 tensors"
KERNEL(dw__cpu_take, DW_OP_TAKE, "cpu.take.rows", take_supports, take, false, TAKES);
KERNEL(dw__cpu_embedding, DW_OP_EMBEDDING, "cpu.embedding.rows", take_supports, take, false, TAKES);
KERNEL(dw__cpu_scatter_add, DW_OP_SCATTER_ADD, "cpu.scatter_add.ranges", scatter_supports, scatter,
       false, ADDS);
KERNEL(dw__cpu_embedding_backward, DW_OP_EMBEDDING_BACKWARD, "cpu.embedding_backward.ranges",
       scatter_supports, scatter, true, ADDS);
