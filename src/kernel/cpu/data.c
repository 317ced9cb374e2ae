/* Data movement on the CPU: every operation that only copies is a view of its operand and a view of its
 * result, copied by one engine. Also constants and rotary embedding.
 *
 * The engine merges axes as far as both views allow. It then has three forms: runs (both sides contiguous
 * along the last axis: memcpy), transposes (the source is contiguous along another axis: tiles), and rows of
 * strided elements. Elements are bytes of a given size, so any dtype is supported. */
#include "kernel/cpu/data.h"
#include "base/pool.h"
#include "kernel/cpu/cpu.h"
#include "kernel/cpu/rows.h"
#include "kernel/reference/index.h"
#include "kernel/reference/scalar.h"
#include "number/philox.h"
#include <assert.h>
#include <string.h>

DW_ISA_TABLE(dw__data_loops)

enum {
    TASK_ELEMENTS = 16 * 1024,
    STRIP = 64 /* width of a strip of transposed tiles: four cache lines of F32 */
};

/* ---- the copying engine ---------------------------------------------------------------------- */

typedef struct copy_plan {
    int size; /* bytes per element */
    uint8_t *to;
    const uint8_t *from;
    int rank; /* number of axes before the last, merged */
    int64_t shape[DW_MAX_RANK], to_stride[DW_MAX_RANK], from_stride[DW_MAX_RANK];
    /* The last axis, divided into pieces of `piece` elements. */
    int64_t length, to_step, from_step, piece, pieces;
    /* In a transpose, axis `across` (removed from the others) is the source's contiguous axis. */
    bool transposes;
    int64_t across, across_to, strips;
    int64_t units, task_units; /* a unit is one piece of one row, or of one strip */
} copy_plan;

static void merge_views(copy_plan *plan, const dw__tensor *to, const dw__tensor *from) {
    int rank = 0;
    for (int axis = 0; axis < to->rank; axis++) {
        int64_t size = to->shape[axis];
        if (size == 1) continue;
        bool joins = rank > 0 && plan->to_stride[rank - 1] == to->stride[axis] * size &&
                     plan->from_stride[rank - 1] == from->stride[axis] * size;
        if (joins)
            plan->shape[--rank] *= size;
        else
            plan->shape[rank] = size;
        plan->to_stride[rank] = to->stride[axis];
        plan->from_stride[rank] = from->stride[axis];
        rank++;
    }
    if (rank == 0) {
        plan->shape[0] = plan->to_stride[0] = plan->from_stride[0] = 1;
        rank = 1;
    }
    plan->rank = rank - 1;
    plan->length = plan->shape[rank - 1];
    plan->to_step = plan->to_stride[rank - 1];
    plan->from_step = plan->from_stride[rank - 1];
}

/* Removes the source's contiguous axis from the leading ones if tiles pay off. */
static void find_transpose(copy_plan *plan) {
    enum { LEAST = 8 };
    if (plan->from_step == 0 || plan->from_step == 1 || plan->to_step != 1 || plan->length < LEAST)
        return;
    for (int axis = 0; axis < plan->rank; axis++) {
        if (plan->from_stride[axis] != 1 || plan->shape[axis] < LEAST) continue;
        plan->transposes = true;
        plan->across = plan->shape[axis];
        plan->across_to = plan->to_stride[axis];
        plan->strips = dw__ceil_div(plan->across, STRIP);
        plan->rank--;
        for (int i = axis; i < plan->rank; i++) {
            plan->shape[i] = plan->shape[i + 1];
            plan->to_stride[i] = plan->to_stride[i + 1];
            plan->from_stride[i] = plan->from_stride[i + 1];
        }
        return;
    }
}

static void copy_unit(const copy_plan *plan, int64_t unit) {
    const dw__data_loops *loops = dw__data_loops_now();
    int64_t first = unit % plan->pieces * plan->piece, to = first * plan->to_step;
    int64_t from = first * plan->from_step, count = plan->length - first, strip = 0;
    if (count > plan->piece) count = plan->piece;
    unit /= plan->pieces;
    if (plan->transposes) {
        strip = unit % plan->strips * STRIP;
        unit /= plan->strips;
    }
    for (int axis = plan->rank - 1; axis >= 0; axis--) {
        int64_t index = unit % plan->shape[axis];
        unit /= plan->shape[axis];
        to += index * plan->to_stride[axis];
        from += index * plan->from_stride[axis];
    }
    if (plan->transposes) {
        int64_t width = plan->across - strip < STRIP ? plan->across - strip : STRIP;
        loops->transpose(plan->size, width, count,
                         plan->to + (to + strip * plan->across_to) * plan->size, plan->across_to,
                         plan->from + (from + strip) * plan->size, plan->from_step);
    } else if (plan->to_step == 1) {
        loops->copy(plan->size, count, plan->to + to * plan->size, plan->from + from * plan->size,
                    plan->from_step);
    } else {
        for (int64_t i = 0; i < count; i++)
            memcpy(plan->to + (to + i * plan->to_step) * plan->size,
                   plan->from + (from + i * plan->from_step) * plan->size, (size_t)plan->size);
    }
}

static void copy_task(void *context, int64_t index, int worker) {
    (void)worker;
    const copy_plan *plan = context;
    int64_t limit = (index + 1) * plan->task_units;
    if (limit > plan->units) limit = plan->units;
    for (int64_t unit = index * plan->task_units; unit < limit; unit++) copy_unit(plan, unit);
}

/* Copies between views of one shape and one dtype. */
static void copy_view(const dw__tensor *to, const dw__tensor *from) {
    if (dw__tensor_count(to) == 0) return;
    copy_plan plan = {.size = (int)dw_dtype_bytes(to->dtype), .to = to->data, .from = from->data};
    merge_views(&plan, to, from);
    find_transpose(&plan);
    int64_t rows = 1;
    for (int axis = 0; axis < plan.rank; axis++) rows *= plan.shape[axis];
    if (plan.transposes) rows *= plan.strips;
    int64_t width = plan.transposes ? STRIP : 1;
    plan.piece = TASK_ELEMENTS / width;
    if (plan.piece > plan.length) plan.piece = plan.length;
    assert(plan.piece > 0); /* there is an element */
    plan.pieces = dw__ceil_div(plan.length, plan.piece);
    plan.units = rows * plan.pieces;
    plan.task_units = dw__ceil_div(TASK_ELEMENTS, plan.piece * width);
    dw__pool_run(dw__ceil_div(plan.units, plan.task_units), copy_task, &plan);
}

/* ---- operations that are a copy -------------------------------------------------------------- */

static dw_status always_supports(const dw__kernel *kernel, const void *given,
                                 const dw__gpu_target *gpu) {
    (void)kernel, (void)gpu, (void)given;
    return DW_OK;
}

static dw_status reshape_supports(const dw__kernel *kernel, const void *given,
                                  const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    return dw__tensor_is_contiguous(&call->outputs[0]) ? DW_OK : dw__kernel_refuse(kernel);
}

/* Views the result, which is contiguous, with the operand's shape. */
static dw_status reshape(const dw__call *call, void *scratch) {
    (void)scratch;
    dw__tensor to = call->inputs[0];
    if (!call->outputs[0].data) return DW_OK;
    dw__tensor_set_contiguous(&to);
    to.data = call->outputs[0].data;
    copy_view(&to, &call->inputs[0]);
    return DW_OK;
}

static dw_status permute(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *in = &call->inputs[0], *out = &call->outputs[0];
    const int64_t *perm = dw__call_attr(call, DW_ATTR_KEY_PERM)->list;
    dw__tensor from = *in;
    if (!out->data) return DW_OK;
    for (int axis = 0; axis < in->rank; axis++) {
        from.shape[axis] = in->shape[perm[axis]];
        from.stride[axis] = in->stride[perm[axis]];
    }
    copy_view(out, &from);
    return DW_OK;
}

static dw_status broadcast(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *out = &call->outputs[0];
    if (!out->data) return DW_OK;
    dw__tensor from = dw__tensor_broadcast(&call->inputs[0], out->rank, out->shape);
    copy_view(out, &from);
    return DW_OK;
}

static dw_status slice(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *out = &call->outputs[0];
    const int64_t *start = dw__call_attr(call, DW_ATTR_KEY_START)->list;
    const dw_attr *step = dw__call_attr(call, DW_ATTR_KEY_STEP);
    dw__tensor from = call->inputs[0];
    if (!out->data || dw__tensor_count(out) == 0) return DW_OK;
    from.data = dw__element(&from, dw__index_offset(from.rank, from.stride, start));
    for (int axis = 0; axis < from.rank; axis++) {
        from.shape[axis] = out->shape[axis];
        if (step) from.stride[axis] *= step->list[axis];
    }
    copy_view(out, &from);
    return DW_OK;
}

static dw_status concat(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *out = &call->outputs[0];
    int64_t axis = dw__call_int(call, DW_ATTR_KEY_AXIS, 0), position = 0;
    if (!out->data) return DW_OK;
    for (uint32_t i = 0; i < call->input_count; i++) {
        dw__tensor part = *out;
        part.shape[axis] = call->inputs[i].shape[axis];
        if (dw__tensor_count(&part) > 0) {
            part.data = dw__element(out, position * out->stride[axis]);
            copy_view(&part, &call->inputs[i]);
        }
        position += part.shape[axis];
    }
    return DW_OK;
}

/* Sets every element of `out` to `value` by copying from one broadcast element. */
static void fill(const dw__tensor *out, double value) {
    uint64_t element = 0;
    dw__scalar_store(&element, out->dtype, 0, dw__scalar_of(value, out->dtype));
    dw__tensor from = *out;
    from.data = &element;
    memset(from.stride, 0, sizeof from.stride);
    copy_view(out, &from);
}

/* Fills only the margins: for each axis a slab below and one above, within the range that earlier axes left. */
static dw_status pad(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *in = &call->inputs[0], *out = &call->outputs[0];
    const int64_t *low = dw__call_attr(call, DW_ATTR_KEY_LOW)->list;
    double value = dw__call_float(call, DW_ATTR_KEY_VALUE, 0.0);
    dw__tensor inside = *out;
    if (!out->data) return DW_OK;
    for (int axis = 0; axis < out->rank; axis++) {
        int64_t size = inside.shape[axis], after = low[axis] + in->shape[axis];
        dw__tensor slab = inside;
        slab.shape[axis] = low[axis];
        fill(&slab, value);
        slab.shape[axis] = size - after;
        slab.data = dw__element(&inside, after * out->stride[axis]);
        fill(&slab, value);
        inside.shape[axis] = in->shape[axis];
        inside.data = dw__element(&inside, low[axis] * out->stride[axis]);
    }
    copy_view(&inside, in);
    return DW_OK;
}

static dw_status constant(const dw__call *call, void *scratch) {
    (void)scratch;
    if (call->outputs[0].data)
        fill(&call->outputs[0], dw__call_float(call, DW_ATTR_KEY_VALUE, 0.0));
    return DW_OK;
}

/* Computes one line along the axis and copies it to the others. */
static dw_status iota(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *out = &call->outputs[0];
    int64_t axis = dw__call_int(call, DW_ATTR_KEY_AXIS, 0);
    if (!out->data || dw__tensor_count(out) == 0) return DW_OK;
    for (int64_t i = 0; i < out->shape[axis]; i++) {
        dw__scalar value = dw__scalar_cast((dw__scalar){.integer = i}, DW_I64, out->dtype);
        dw__scalar_store(out->data, out->dtype, i * out->stride[axis], value);
    }
    /* Copies slab by slab, so that no element is both read and written: each earlier axis extends what the
     * later ones filled. */
    for (int grown = out->rank - 1; grown >= 0; grown--) {
        if (grown == axis || out->shape[grown] == 1) continue;
        dw__tensor to = *out, from = *out;
        for (int i = 0; i < grown; i++)
            if (i != axis) to.shape[i] = from.shape[i] = 1;
        to.shape[grown] = from.shape[grown] = out->shape[grown] - 1;
        to.data = dw__element(out, out->stride[grown]);
        from.stride[grown] = 0;
        copy_view(&to, &from);
    }
    return DW_OK;
}

/* ---- random numbers -------------------------------------------------------------------------- */

static dw_status random_supports(const dw__kernel *kernel, const void *given,
                                 const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    return call->outputs[0].dtype == DW_F32 && dw__tensor_is_contiguous(&call->outputs[0])
               ? DW_OK
               : dw__kernel_refuse(kernel);
}

typedef struct random_run {
    int64_t seed[2], stream, count;
    float *out;
} random_run;

static void random_task(void *context, int64_t index, int worker) {
    (void)worker;
    const random_run *run = context;
    int64_t first = index * TASK_ELEMENTS, count = run->count - first;
    dw__philox_fill(run->seed[0], run->seed[1], run->stream, (uint64_t)first,
                    count < TASK_ELEMENTS ? count : TASK_ELEMENTS, run->out + first);
}

static dw_status random_uniform(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *seed = &call->inputs[0], *out = &call->outputs[0];
    if (!out->data || dw__tensor_count(out) == 0) return DW_OK;
    const int64_t *words = seed->data;
    random_run run = {.seed = {words[0], words[seed->stride[0]]},
                      .stream = dw__call_int(call, DW_ATTR_KEY_STREAM, 0),
                      .count = dw__tensor_count(out),
                      .out = out->data};
    dw__pool_run(dw__ceil_div(run.count, TASK_ELEMENTS), random_task, &run);
    return DW_OK;
}

/* ---- rotary embedding (Su et al. 2021) ------------------------------------------------------- */

typedef struct rope_run {
    const dw__call *call;
    dw__rows x, y, cosine, sine;
    int64_t task_rows, turned;
    bool interleaved, transposed;
} rope_run;

/* Views the table with x's rows: broadcast over the leading axes. */
static dw__tensor table_over(const dw__tensor *table, const dw__tensor *x) {
    dw__tensor view = *table;
    for (int axis = 0; axis < x->rank - 1; axis++) {
        if (table->shape[axis] == 1) view.stride[axis] = 0;
        view.shape[axis] = x->shape[axis];
    }
    return view;
}

static dw_status rope_supports(const dw__kernel *kernel, const void *given,
                               const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    for (int i = 0; i < 3; i++)
        if (call->inputs[i].dtype != DW_F32 || !dw__rows_fit(&call->inputs[i]))
            return dw__kernel_refuse(kernel);
    return dw__rows_fit(&call->outputs[0]) && call->inputs[0].shape[call->inputs[0].rank - 1] > 0
               ? DW_OK
               : dw__kernel_refuse(kernel);
}

static void rope_task(void *context, int64_t index, int worker) {
    (void)worker;
    const rope_run *run = context;
    const dw__call *call = run->call;
    const dw__data_loops *loops = dw__data_loops_now();
    int64_t limit = (index + 1) * run->task_rows;
    if (limit > run->x.count) limit = run->x.count;
    for (int64_t row = index * run->task_rows; row < limit; row++)
        loops->rope(run->interleaved, run->transposed, run->x.length, run->turned,
                    dw__rows_at(&call->inputs[0], &run->x, row),
                    dw__rows_at(&call->inputs[1], &run->cosine, row),
                    dw__rows_at(&call->inputs[2], &run->sine, row),
                    dw__rows_at(&call->outputs[0], &run->y, row));
}

static dw_status rope(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *x = &call->inputs[0];
    if (!call->outputs[0].data) return DW_OK;
    dw__tensor cosine = table_over(&call->inputs[1], x), sine = table_over(&call->inputs[2], x);
    rope_run run = {.call = call,
                    .x = dw__rows_of(x),
                    .y = dw__rows_of(&call->outputs[0]),
                    .cosine = dw__rows_of(&cosine),
                    .sine = dw__rows_of(&sine),
                    .turned = cosine.shape[x->rank - 1],
                    .interleaved = dw__call_int(call, DW_ATTR_KEY_INTERLEAVED, 0) != 0,
                    .transposed = dw__call_int(call, DW_ATTR_KEY_TRANSPOSED, 0) != 0};
    run.task_rows = run.x.length < TASK_ELEMENTS ? TASK_ELEMENTS / run.x.length : 1;
    dw__pool_run(dw__ceil_div(run.x.count, run.task_rows), rope_task, &run);
    return DW_OK;
}

/* ---- list ------------------------------------------------------------------------------------ */

/* Copies are exact. The others have the tolerance factor of two multiplications and an addition. */
#define KERNEL(OP, function, predicate, text, wants, layout)                                       \
    static const dw__kernel kernel_##OP = {.name = "cpu." text,                                    \
                                           .op = DW_OP_##OP,                                       \
                                           .source = "ours, runs and tiles",                       \
                                           .needs = wants,                                         \
                                           .supports = predicate,                                  \
                                           .run = function,                                        \
                                           .results = DW__RESULTS_##layout,                        \
                                           .tolerance_factor = 4.0}
KERNEL(RESHAPE, reshape, reshape_supports, "reshape.copy", "a contiguous result", CONTIGUOUS);
KERNEL(PERMUTE, permute, always_supports, "permute.tiled", "any tensors", SCATTERED);
KERNEL(BROADCAST, broadcast, always_supports, "broadcast.copy", "any tensors", SCATTERED);
KERNEL(SLICE, slice, always_supports, "slice.copy", "any tensors", SCATTERED);
KERNEL(PAD, pad, always_supports, "pad.copy", "any tensors", SCATTERED);
KERNEL(CONCAT, concat, always_supports, "concat.copy", "any tensors", SCATTERED);
KERNEL(CONSTANT, constant, always_supports, "constant.fill", "any tensors", SCATTERED);
KERNEL(IOTA, iota, always_supports, "iota.copy", "any tensors", SCATTERED);
KERNEL(RANDOM_UNIFORM, random_uniform, random_supports, "random_uniform.philox",
       "a contiguous F32 result", CONTIGUOUS);
static const dw__kernel kernel_ROPE = {.name = "cpu.rope.rows",
                                       .op = DW_OP_ROPE,
                                       .source = "ours, runs and tiles",
                                       .needs = "rows of F32",
                                       .supports = rope_supports,
                                       .run = rope,
                                       .results = DW__RESULTS_STRIDED,
                                       .tolerance_factor = 4.0};

const dw__kernel *const dw__kernels_cpu_data[] = {
    &kernel_RESHAPE,
    &kernel_PERMUTE,
    &kernel_BROADCAST,
    &kernel_SLICE,
    &kernel_PAD,
    &kernel_CONCAT,
    &kernel_CONSTANT,
    &kernel_IOTA,
    &kernel_RANDOM_UNIFORM,
    &kernel_ROPE,
    &dw__cpu_spread_rows,
    &dw__cpu_combine_rows,
    &dw__cpu_combine_rows_backward,
    &dw__cpu_take,
    &dw__cpu_embedding,
    &dw__cpu_scatter_add,
    &dw__cpu_embedding_backward,
    &dw__cpu_reduce_sum,
    &dw__cpu_reduce_max,
    &dw__cpu_reduce_min,
    &dw__cpu_mean,
    &dw__cpu_cumsum,
    NULL,
};
