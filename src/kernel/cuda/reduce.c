/* Reductions over axes and the places of extremes, by cuda/common/reduce.cu. A variant is compiled for a type, a
 * reduction and the number of threads that share a result. */
#include "common/reduce_params.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/iteration.h"

typedef struct reduce_variant {
    int type, reduction, lanes;
} reduce_variant;

static uint64_t pack(reduce_variant v) {
    return (uint64_t)(v.type | v.reduction << 4 | v.lanes << 8);
}
static reduce_variant unpack(uint64_t params) {
    const int p = (int)params;
    return (reduce_variant){p & 15, p >> 4 & 15, p >> 8};
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

/* The axes that stay, with the strides of the operand and the result; and the axes that are reduced. */
static void split_axes(const dw__call *c, dw__iteration *kept, dw__iteration *reduced) {
    const dw__tensor *x = &c->inputs[0], *y = &c->outputs[0];
    const int64_t axis_of_place = dw__call_int(c, DW_ATTR_KEY_AXIS, 0);
    const dw_attr place = {.count = 1, .list = &axis_of_place},
                  *axes = finds_place(c->op) ? &place : dw__call_attr(c, DW_ATTR_KEY_AXES);
    const bool keeps = dw__call_int(c, DW_ATTR_KEY_KEEP, 0) != 0;
    int64_t shape[2][DW_MAX_RANK], x_stride[2][DW_MAX_RANK], y_stride[DW_MAX_RANK];
    int rank[2] = {0, 0}, out = 0;
    uint32_t next = 0;
    for (int axis = 0; axis < x->rank; axis++) {
        const int is_reduced = next < axes->count && axes->list[next] == axis;
        shape[is_reduced][rank[is_reduced]] = x->shape[axis];
        x_stride[is_reduced][rank[is_reduced]] = x->stride[axis];
        if (!is_reduced) y_stride[rank[0]] = y->stride[keeps ? axis : out++];
        rank[is_reduced]++;
        next += (uint32_t)is_reduced;
    }
    dw__iteration_begin(kept, rank[0], shape[0]);
    dw__iteration_add(kept, x_stride[0]);
    dw__iteration_add(kept, y_stride);
    dw__iteration_merge(kept);
    dw__iteration_begin(reduced, rank[1], shape[1]);
    dw__iteration_add(reduced, x_stride[1]);
    dw__iteration_merge(reduced);
}

/* Rows are read by a warp or a block. Where neighbouring results read neighbouring elements, as sums of columns do,
 * each thread has a result of its own. */
static int choose_lanes(const dw__iteration *kept, const dw__iteration *reduced) {
    const bool is_column =
        kept->stride[0][kept->rank - 1] == 1 && reduced->stride[0][reduced->rank - 1] != 1;
    if (is_column && kept->shape[kept->rank - 1] >= 32) return 1;
    return reduced->count < 16 ? 1 : reduced->count <= 1024 ? 32 : DW_REDUCE_THREADS;
}

static bool computes(dw_op op) { return reduction_of(op) >= 0; }

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    return dw__gpu_kernel_computes(kernel, c, gpu);
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    dw__iteration kept, reduced;
    split_axes(c, &kept, &reduced);
    const reduce_variant v = {dw__gpu_element(c->inputs[0].dtype), reduction_of(c->op),
                              choose_lanes(&kept, &reduced)};
    return dw__variant_of(context, kernel, pack(v), variant);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__operation_call *c = call;
    const int64_t per_block = DW_REDUCE_THREADS / unpack(variant->params).lanes;
    const dw_op op = c->call.op;
    dw__iteration kept, reduced;
    split_axes(&c->call, &kept, &reduced);
    dw_reduce_params params = {.x = c->call.inputs[0].data,
                               .result = c->call.outputs[0].data,
                               .count = kept.count,
                               .reduced = reduced.count,
                               .rank = kept.rank,
                               .reduced_rank = reduced.rank};
    for (int axis = 0; axis < kept.rank; axis++) {
        params.shape[axis] = kept.shape[axis];
        params.x_stride[axis] = kept.stride[0][axis];
        params.result_stride[axis] = kept.stride[1][axis];
    }
    for (int axis = 0; axis < reduced.rank; axis++) {
        params.reduced_shape[axis] = reduced.shape[axis];
        params.reduced_stride[axis] = reduced.stride[0][axis];
    }
    if (finds_place(op) && reduced.count == 0 && kept.count > 0)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "%s: the axis has no elements to choose from; give it at least one",
                        dw_op_name(op));
    return dw__gpu_launch(c, context, "reduce", variant->functions[0],
                          (kept.count + per_block - 1) / per_block, DW_REDUCE_THREADS, &params);
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    const reduce_variant v = unpack(params);
    (void)kernel;
    points->code = (dw__jit_variant){
        .source = "common/reduce.cu", .entry = "reduce", .arch = dw__gpu_arch(capability)};
    dw__jit_add_define(&points->code, "TYPE", v.type);
    dw__jit_add_define(&points->code, "REDUCTION", v.reduction);
    dw__jit_add_define(&points->code, "LANES", v.lanes);
    return DW_OK;
}

/* The middle axis of three, then the first and the last, or rows that are contiguous. Sums and extremes have several turns for every lane; products
 * few terms, whose result every type can hold. */
static void example(uint64_t params, int index, dw__call *c) {
    static const dw_op ops[] = {
        [DW_REDUCE_SUM] = DW_OP_REDUCE_SUM,  [DW_REDUCE_MAX] = DW_OP_REDUCE_MAX,
        [DW_REDUCE_MIN] = DW_OP_REDUCE_MIN,  [DW_REDUCE_PROD] = DW_OP_REDUCE_PROD,
        [DW_REDUCE_ARG_MAX] = DW_OP_ARG_MAX, [DW_REDUCE_ARG_MIN] = DW_OP_ARG_MIN};
    static const int64_t middle[] = {1}, ends[] = {0, 2};
    static const dw_attr axes[2] = {{.key = DW_ATTR_KEY_AXES, .count = 1, .list = middle},
                                    {.key = DW_ATTR_KEY_AXES, .count = 2, .list = ends}},
                         axis = {.key = DW_ATTR_KEY_AXIS, .integer = 1};
    const reduce_variant v = unpack(params);
    const int64_t length = v.reduction == DW_REDUCE_PROD ? 3 : 3 * (int64_t)v.lanes + 5;
    const dw_dtype dtype = (dw_dtype)v.type;
    *c = (dw__call){.op = ops[v.reduction],
                    .attr_count = 1,
                    .attrs = &axes[index],
                    .input_count = 1,
                    .output_count = 1,
                    .inputs = {{.dtype = dtype, .rank = 3, .shape = {3, length, 5}}},
                    .outputs = {{.dtype = dtype, .rank = 2, .shape = {3, 5}}}};
    if (finds_place(c->op)) {
        c->attrs = &axis;
        c->outputs[0].dtype = DW_I64;
        if (index) c->inputs[0].shape[2] = c->outputs[0].shape[1] = 1; /* contiguous rows */
    } else if (index) {
        c->inputs[0].shape[1] = 7;
        c->inputs[0].shape[2] = length;
        c->outputs[0].rank = 1;
        c->outputs[0].shape[0] = 7;
    }
    dw__tensor_set_contiguous(&c->inputs[0]);
    dw__tensor_set_contiguous(&c->outputs[0]);
}

const dw__kernel dw__gpu_reduce = {
    .name = "reduce",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .computes = computes,
    .proof = DW__PROVEN_ON_EMULATOR,
    .operation = "sum, max, min and product over axes, arg_max, arg_min",
    .source = "cuda/common/reduce.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "every element type",
    .needs = "any strides",
    .supports = supports,
    .seconds = dw__gpu_seconds_of_bytes,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    .first_use = &dw__operation_first_use,
    .tolerance = "accumulates in F32 and rounds once; integers exactly",
    .example = example,
    .tolerance_factor = 8.0,
};
