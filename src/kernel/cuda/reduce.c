/* Reductions over axes and the places of extremes, by cuda/common/reduce.cu. A variant is compiled for a type, a
 * reduction and the number of threads that share a result. */
#include "common/reduce_params.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/iteration.h"
#include <stdlib.h>

/* The compile-time parameters of a variant: the defines of reduce.cu. */
typedef struct reduce_variant {
    int type, reduction, lanes;
    bool columns, vector, spread, split;
} reduce_variant;

static uint64_t pack(reduce_variant v) {
    return (uint64_t)(v.type | v.reduction << 4 | v.columns << 8 | v.vector << 9 | v.spread << 10 |
                      v.split << 11 | v.lanes << 12);
}
static reduce_variant unpack(uint64_t params) {
    const int p = (int)params;
    return (reduce_variant){p & 15,     p >> 4 & 15, p >> 12,    p >> 8 & 1,
                            p >> 9 & 1, p >> 10 & 1, p >> 11 & 1};
}

static int reduction_of(dw_op op) {
    switch (op) {
    case DW_OP_REDUCE_SUM: return DW_REDUCE_SUM;
    case DW_OP_REDUCE_MAX: return DW_REDUCE_MAX;
    case DW_OP_REDUCE_MIN: return DW_REDUCE_MIN;
    case DW_OP_REDUCE_PROD: return DW_REDUCE_PROD;
    case DW_OP_ARG_MAX: return DW_REDUCE_ARG_MAX;
    case DW_OP_ARG_MIN: return DW_REDUCE_ARG_MIN;
    default: return -1;
    }
}

static bool finds_place(dw_op op) { return op == DW_OP_ARG_MAX || op == DW_OP_ARG_MIN; }

/* ---- how a call is computed -------------------------------------------------------------------- */

/* Axes that an operation visits in any order: their sizes, and the strides of the operand and the result. */
typedef struct axes {
    int rank;
    int64_t shape[DW_MAX_RANK], x[DW_MAX_RANK], y[DW_MAX_RANK];
} axes;

/* Adds an axis in the order of the operand's strides, the largest first. An axis of stride 0 precedes all others. */
static void add_axis(axes *a, int64_t size, int64_t x, int64_t y) {
    int at = a->rank++;
    for (; at > 0 && a->x[at - 1] != 0 && (x == 0 || llabs(a->x[at - 1]) < llabs(x)); at--) {
        a->shape[at] = a->shape[at - 1];
        a->x[at] = a->x[at - 1];
        a->y[at] = a->y[at - 1];
    }
    a->shape[at] = size;
    a->x[at] = x;
    a->y[at] = y;
}

/* The axes that stay, with the strides of the operand and the result; and the axes that are reduced. */
static void split_axes(const dw__call *c, dw__iteration *kept, dw__iteration *reduced) {
    const dw__tensor *x = &c->inputs[0], *y = &c->outputs[0];
    const int64_t axis_of_place = dw__call_int(c, DW_ATTR_KEY_AXIS, 0);
    const dw_attr place = {.count = 1, .list = &axis_of_place},
                  *list = finds_place(c->op) ? &place : dw__call_attr(c, DW_ATTR_KEY_AXES);
    const bool keeps = dw__call_int(c, DW_ATTR_KEY_KEEP, 0) != 0;
    axes split[2] = {{0}, {0}};
    int out = 0;
    uint32_t next = 0;
    for (int axis = 0; axis < x->rank; axis++) {
        const bool is_reduced = next < list->count && list->list[next] == axis;
        int64_t y_stride = 0;
        if (!is_reduced) y_stride = y->stride[keeps ? axis : out++];
        if (x->shape[axis] != 1)
            add_axis(&split[is_reduced], x->shape[axis], x->stride[axis], y_stride);
        next += is_reduced;
    }
    dw__iteration_begin(kept, split[0].rank, split[0].shape);
    dw__iteration_add(kept, split[0].x);
    dw__iteration_add(kept, split[0].y);
    dw__iteration_merge(kept);
    dw__iteration_begin(reduced, split[1].rank, split[1].shape);
    dw__iteration_add(reduced, split[1].x);
    dw__iteration_merge(reduced);
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* True if the axes but the last have strides of whole vectors. */
static bool strides_fit(const dw__iteration *it, int ranks, int64_t per) {
    for (int axis = 0; axis < ranks; axis++)
        if (it->stride[0][axis] % per != 0) return false;
    return true;
}

/* True if vectors of `per` elements along the last axis of `along` can be loaded, where the operand is aligned. Rows
 * may end with a part of a vector. */
static bool has_vectors(const dw__iteration *along, const dw__iteration *other, bool columns,
                        int64_t per) {
    const int last = along->rank - 1;
    const bool whole = along->shape[last] % per == 0 || (!columns && last == 0);
    return along->stride[0][last] == 1 && along->shape[last] >= per && whole &&
           strides_fit(along, last, per) && strides_fit(other, other->rank, per);
}

/* Columns: as many neighbouring results as there are, at most 32 units, unless a result has few rows. Rows: a thread, a
 * few, a warp or a block for each. */
static int choose_lanes(bool columns, int64_t kept_units, int64_t units) {
    int groups = 1;
    if (!columns) return units <= 2 ? 1 : units <= 16 ? 8 : units <= 256 ? 32 : DW_REDUCE_THREADS;
    if (units < 16) return 1;
    while (groups < 32 && groups < kept_units) groups *= 2;
    return DW_REDUCE_THREADS / groups;
}

/* How a variant computes a call. */
typedef struct reduce_plan {
    dw__iteration kept, reduced;
    /* units (common/reduce_params.h) that make a result, blocks for all results, and parts of the units */
    int64_t units, tail, tiles, parts, part_units;
} reduce_plan;

static int64_t vector_of(const dw__call *c) {
    return DW_REDUCE_VECTOR((int)dw_dtype_bytes(c->inputs[0].dtype));
}

/* Where the results have too few blocks to fill a GPU, the units are split. An H200 holds 528 blocks at once, 4 for each of
 * its 132 SMs: a few blocks more than that, which begin when the others have ended, would take as long as a part of those.
 * So there are at most as many as one to four times 528: the fewest that leave less than a twentieth of the GPU's time
 * unused, or nearly. The number is the same for every GPU, so that the same bits result. A thread has at least one batch
 * of a part. */
static int64_t parts_for(const reduce_variant *v, const reduce_plan *plan) {
    const int64_t resident = 132 * DW_REDUCE_RESIDENT,
                  least = v->lanes * (int64_t)DW_REDUCE_BATCH(v->columns, v->vector);
    int64_t best = 1;
    double most_used = -1;
    if (v->reduction == DW_REDUCE_PROD || v->lanes == 1 || plan->tiles == 0) return 1;
    for (int waves = 1; waves <= 4; waves++) {
        const int64_t parts = larger(
                          1, smaller(waves * resident / plan->tiles, ceiling(plan->units, least))),
                      blocks = parts * plan->tiles;
        const double used = (double)blocks / (double)(ceiling(blocks, resident) * resident);
        if (used < most_used + 0.05) continue;
        best = parts;
        most_used = used;
    }
    return best;
}

static void lay_out(const dw__call *c, const reduce_variant *v, reduce_plan *plan) {
    const int64_t per = v->vector ? vector_of(c) : 1;
    dw__iteration *reduced = &plan->reduced;
    split_axes(c, &plan->kept, reduced);
    plan->units = reduced->count;
    plan->tail = 0;
    if (!v->columns) {
        plan->units = reduced->count / per;
        plan->tail = reduced->count % per;
        reduced->shape[reduced->rank - 1] /= per;
        reduced->stride[0][reduced->rank - 1] *= per;
    }
    plan->tiles = ceiling(plan->kept.count, DW_REDUCE_THREADS / v->lanes * (v->columns ? per : 1));
    plan->parts = v->split ? parts_for(v, plan) : 1;
    plan->part_units = larger(1, ceiling(ceiling(plan->units, plan->parts), v->lanes)) * v->lanes;
    plan->parts = larger(1, ceiling(plan->units, plan->part_units));
}

/* `aligned`: the operand lies at a multiple of a vector's bytes. */
static reduce_variant choose_variant(const dw__call *c, bool aligned, reduce_plan *plan) {
    const int64_t vector = vector_of(c);
    dw__iteration kept, reduced;
    split_axes(c, &kept, &reduced);
    const int64_t step = llabs(kept.stride[0][kept.rank - 1]),
                  reduced_step = llabs(reduced.stride[0][reduced.rank - 1]);
    reduce_variant v = {.type = dw__gpu_element(c->inputs[0].dtype),
                        .reduction = reduction_of(c->op),
                        .columns = reduced.count == 1 || (step > 0 && step < reduced_step),
                        .spread = reduced.rank > 1,
                        .split = true};
    v.vector = aligned && (v.columns ? has_vectors(&kept, &reduced, true, vector)
                                     : has_vectors(&reduced, &kept, false, vector));
    const int64_t per = v.vector ? vector : 1;
    v.lanes = choose_lanes(v.columns, ceiling(kept.count, per),
                           v.columns ? reduced.count : reduced.count / per);
    lay_out(c, &v, plan);
    v.split = plan->parts > 1;
    return v;
}

/* The bytes of what a thread keeps for each result (`kept` in reduce.cu). */
static size_t kept_bytes(const dw__call *c) {
    const dw_dtype dtype = c->inputs[0].dtype;
    if (finds_place(c->op)) return 16;
    return dtype == DW_BF16 || dtype == DW_F16 ? sizeof(float) : dw_dtype_bytes(dtype);
}

/* Enough for every alignment of the operand, whose address may not be known yet. */
static dw_status workspace_bytes(const dw__kernel *kernel, const void *call,
                                 const dw__context *context, size_t *bytes) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    (void)kernel;
    (void)context;
    *bytes = 0;
    for (int aligned = 0; aligned < 2; aligned++) {
        reduce_plan plan;
        const reduce_variant v = choose_variant(c, aligned, &plan);
        const size_t needed = (size_t)(plan.parts * plan.kept.count) * kept_bytes(c);
        if (v.split && needed > *bytes) *bytes = needed;
    }
    return DW_OK;
}

static bool computes(dw_op op) { return reduction_of(op) >= 0; }

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    return dw__gpu_kernel_computes(kernel, c, gpu);
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    const uintptr_t bytes = (uintptr_t)vector_of(c) * dw_dtype_bytes(c->inputs[0].dtype);
    reduce_plan plan;
    const reduce_variant v = choose_variant(c, (uintptr_t)c->inputs[0].data % bytes == 0, &plan);
    return dw__variant_of(context, kernel, pack(v), variant);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__operation_call *c = call;
    const reduce_variant v = unpack(variant->params);
    reduce_plan plan;
    lay_out(&c->call, &v, &plan);
    const dw__iteration *kept = &plan.kept, *reduced = &plan.reduced;
    dw_reduce_params params = {.x = c->call.inputs[0].data,
                               .result = c->call.outputs[0].data,
                               .partials = c->workspace,
                               .count = kept->count,
                               .reduced = plan.units,
                               .tail = plan.tail,
                               .parts = plan.parts,
                               .part_units = plan.part_units,
                               .rank = kept->rank,
                               .reduced_rank = reduced->rank};
    for (int axis = 0; axis < kept->rank; axis++) {
        params.shape[axis] = kept->shape[axis];
        params.x_stride[axis] = kept->stride[0][axis];
        params.result_stride[axis] = kept->stride[1][axis];
    }
    for (int axis = 0; axis < reduced->rank; axis++) {
        params.reduced_shape[axis] = reduced->shape[axis];
        params.reduced_stride[axis] = reduced->stride[0][axis];
    }
    if (finds_place(c->call.op) && reduced->count == 0 && kept->count > 0)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "%s: the axis has no elements to choose from; give it at least one",
                        dw_op_name(c->call.op));
    DW_RETURN_IF_FAILED(dw__gpu_launch(c, context, "reduce", variant->functions[0],
                                       plan.tiles * plan.parts, DW_REDUCE_THREADS, &params));
    if (!v.split) return DW_OK;
    return dw__gpu_launch(c, context, "reduce_parts", variant->functions[1],
                          ceiling(kept->count, DW_REDUCE_PARTS_RESULTS), DW_REDUCE_PARTS_THREADS,
                          &params);
}

static dw__jit_variant code_of(const reduce_variant *v, const char *entry, int capability) {
    dw__jit_variant code = {
        .source = "common/reduce.cu", .entry = entry, .arch = dw__gpu_arch(capability)};
    dw__jit_add_define(&code, "TYPE", v->type);
    dw__jit_add_define(&code, "REDUCTION", v->reduction);
    dw__jit_add_define(&code, "LANES", v->lanes);
    dw__jit_add_define(&code, "COLUMNS", v->columns);
    dw__jit_add_define(&code, "VECTOR", v->vector);
    dw__jit_add_define(&code, "SPREAD", v->spread);
    dw__jit_add_define(&code, "SPLIT", v->split);
    return code;
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    static const char *const entries[] = {"reduce", "reduce_parts"};
    const reduce_variant v = unpack(params);
    (void)kernel;
    for (int i = 0; i <= v.split; i++) points[i].code = code_of(&v, entries[i], capability);
    return DW_OK;
}

/* ---- partial sums of other kernels ------------------------------------------------------------------ */

/* The variant for many neighbouring columns, which is likely to be compiled. */
dw__jit_variant dw__gpu_sum_parts_code(dw_dtype dtype, int capability) {
    const reduce_variant v = {.type = dw__gpu_element(dtype),
                              .reduction = DW_REDUCE_SUM,
                              .lanes = choose_lanes(true, 32, 16),
                              .columns = true,
                              .vector = true,
                              .split = true};
    return code_of(&v, "reduce_parts", capability);
}

dw_status dw__gpu_sum_parts(const dw__operation_call *call, const dw__context *context,
                            void *function, const float *partials, int64_t parts,
                            const dw__tensor *sums) {
    const int64_t count = dw__tensor_count(sums);
    dw_reduce_params params = {.result = sums->data,
                               .partials = (void *)partials,
                               .count = count,
                               .parts = parts,
                               .shape = {count},
                               .result_stride = {1},
                               .rank = 1};
    return dw__gpu_launch(call, context, "reduce_parts", function,
                          ceiling(count, DW_REDUCE_PARTS_RESULTS), DW_REDUCE_PARTS_THREADS,
                          &params);
}

/* ---- the first-use check's calls ------------------------------------------------------------------ */

/* Units of the reduced axes: a full batch of loads and a part of one, or two parts. Products have few terms, whose
 * result every type can hold. */
static int64_t example_units(const reduce_variant *v) {
    const int64_t batch = v->lanes * (int64_t)DW_REDUCE_BATCH(v->columns, v->vector);
    if (v->reduction == DW_REDUCE_PROD) return v->columns ? 3 : 1;
    return v->split ? 3 * batch / 2 + 1 : batch + v->lanes / 2 + 1;
}

/* [outer, kept, reduced, inner], reduced over axes 0 and 2, with an inner axis of columns or of one element. The outer
 * axis has one element unless the reduced axes are spread; with places, which have one reduced axis, it is left out.
 * There is padding between rows, an odd number of elements unless units are vectors. In the second trial the kept
 * results of columns lie on two axes, and rows end with a part of a vector. */
static void example(uint64_t params, int index, dw__call *c) {
    static const dw_op ops[] = {
        [DW_REDUCE_SUM] = DW_OP_REDUCE_SUM,  [DW_REDUCE_MAX] = DW_OP_REDUCE_MAX,
        [DW_REDUCE_MIN] = DW_OP_REDUCE_MIN,  [DW_REDUCE_PROD] = DW_OP_REDUCE_PROD,
        [DW_REDUCE_ARG_MAX] = DW_OP_ARG_MAX, [DW_REDUCE_ARG_MIN] = DW_OP_ARG_MIN};
    static const int64_t list[] = {0, 2};
    static const dw_attr axes = {.key = DW_ATTR_KEY_AXES, .count = 2, .list = list},
                         axis = {.key = DW_ATTR_KEY_AXIS, .integer = 1};
    const reduce_variant v = unpack(params);
    const dw_dtype dtype = (dw_dtype)v.type;
    const int64_t vector = DW_REDUCE_VECTOR((int)dw_dtype_bytes(dtype)),
                  per = v.vector ? vector : 1, units = example_units(&v),
                  groups = DW_REDUCE_THREADS / v.lanes, outer = v.spread ? 2 : 1,
                  inner_units = ceiling(units, outer);
    int64_t kept = 2, reduced = inner_units, inner = (groups + groups / 4 + 1) * per, pitch, step;
    if (v.columns) {
        if (!index || v.reduction == DW_REDUCE_PROD) kept = 1;
        pitch = inner + (v.vector ? vector : inner % 2 + 1);
        step = reduced * pitch;
    } else {
        kept = groups + groups / 4 + 2;
        reduced *= per;
        if (v.vector && index && !v.spread && v.reduction != DW_REDUCE_PROD) reduced += vector - 1;
        inner = pitch = 1;
        step = v.vector ? ceiling(reduced, vector) * vector + vector : reduced + reduced % 2 + 1;
    }
    const dw__tensor x = {.dtype = dtype,
                          .rank = 4,
                          .shape = {outer, kept, reduced, inner},
                          .stride = {(kept + 1) * step, step, pitch, 1}};
    *c = (dw__call){.op = ops[v.reduction],
                    .attr_count = 1,
                    .attrs = &axes,
                    .input_count = 1,
                    .output_count = 1,
                    .inputs = {x},
                    .outputs = {{.dtype = dtype, .rank = 2, .shape = {kept, inner}}}};
    if (finds_place(c->op)) {
        c->attrs = &axis;
        c->outputs[0].dtype = DW_I64;
        c->inputs[0].rank = 3;
        for (int i = 0; i < 3; i++) {
            c->inputs[0].shape[i] = x.shape[i + 1];
            c->inputs[0].stride[i] = x.stride[i + 1];
        }
    }
    dw__tensor_set_contiguous(&c->outputs[0]);
}

/* ---- the entry ------------------------------------------------------------------------------------ */

const dw__kernel dw__gpu_reduce = {
    .name = "reduce",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .computes = computes,
    .proof = DW__RUN_ON_HOPPER,
    .operation = "sum, max, min and product over axes, arg_max, arg_min",
    .source = "cuda/common/reduce.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "every element type",
    .needs = "any strides",
    .supports = supports,
    .seconds = dw__gpu_seconds_of_bytes,
    .workspace_bytes = workspace_bytes,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    .first_use = &dw__operation_first_use,
    .tolerance = "accumulates in F32 and rounds once; integers exactly",
    .example = example,
    .tolerance_factor = 8.0,
};
