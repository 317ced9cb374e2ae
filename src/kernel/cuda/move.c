/* Copies, fills and index ramps: the operations that move data, by cuda/common/move.cu.
 *
 * permute, broadcast, slice and reshape are one strided copy; concat is one copy for each operand; pad is a fill and a
 * copy. A variant is compiled for the width of an element.
 */
#include "common/move_params.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/iteration.h"
#include "kernel/elementwise_body.h"
#include "kernel/reference/scalar.h"
#include <string.h>

enum { COPY, FILL, IOTA }; /* entry points of a variant */
static const char *const entries[] = {"move_copy", "move_fill", "move_iota"};

/* ---- launches --------------------------------------------------------------------------------------- */

typedef struct mover {
    const dw__operation_call *call;
    const dw__context *context;
    const dw__variant *variant;
} mover;

static void set_axes(dw_move_params *p, const dw__iteration *it, bool has_from) {
    p->count = it->count;
    p->rank = it->rank;
    for (int axis = 0; axis < it->rank; axis++) {
        p->shape[axis] = it->shape[axis];
        p->to_stride[axis] = it->stride[0][axis];
        p->from_stride[axis] = has_from ? it->stride[1][axis] : 0;
    }
}

static dw_status launch(const mover *m, int entry, dw_move_params *params) {
    return dw__gpu_launch_each(m->call, m->context, entries[entry], m->variant->functions[entry],
                               params->count, params);
}

/* Copies `shape` from one layout to another; strides in elements. */
static dw_status copy(const mover *m, int rank, const int64_t *shape, const void *from,
                      const int64_t *from_stride, void *to, const int64_t *to_stride) {
    dw__iteration it;
    dw_move_params params = {.from = from, .to = to};
    dw__iteration_begin(&it, rank, shape);
    dw__iteration_add(&it, to_stride);
    dw__iteration_add(&it, from_stride);
    dw__iteration_merge(&it);
    set_axes(&params, &it, true);
    return launch(m, COPY, &params);
}

static dw_status fill(const mover *m, const dw__tensor *to, double number) {
    dw__iteration it;
    dw_move_params params = {.to = to->data};
    dw__scalar_store(&params.value, to->dtype, 0, dw__scalar_of(number, to->dtype));
    dw__iteration_begin(&it, to->rank, to->shape);
    dw__iteration_add(&it, to->stride);
    dw__iteration_merge(&it);
    set_axes(&params, &it, false);
    return launch(m, FILL, &params);
}

static void *element_at(const dw__tensor *t, int64_t offset) {
    return (char *)t->data + offset * (int64_t)dw_dtype_bytes(t->dtype);
}

/* ---- operations -------------------------------------------------------------------------------------- */

/* The copy's shape, and the strides of x and y along it. False if strides cannot express it. */
static bool copy_layout(const dw__call *c, int *rank, int64_t *shape, int64_t *from, int64_t *to,
                        int64_t *offset) {
    const dw__tensor *x = &c->inputs[0], *y = &c->outputs[0];
    dw__tensor flat;
    *offset = 0;
    *rank = y->rank;
    memcpy(shape, y->shape, sizeof y->shape);
    memcpy(to, y->stride, sizeof y->stride);
    switch (c->op) {
    case DW_OP_PERMUTE: {
        const int64_t *perm = dw__call_attr(c, DW_ATTR_KEY_PERM)->list;
        for (int axis = 0; axis < y->rank; axis++) from[axis] = x->stride[perm[axis]];
        return true;
    }
    case DW_OP_BROADCAST: dw__broadcast_strides(x, y, from); return true;
    case DW_OP_SLICE: {
        const dw_attr *start = dw__call_attr(c, DW_ATTR_KEY_START),
                      *step = dw__call_attr(c, DW_ATTR_KEY_STEP);
        for (int axis = 0; axis < y->rank; axis++) {
            from[axis] = x->stride[axis] * (step ? step->list[axis] : 1);
            *offset += x->stride[axis] * start->list[axis];
        }
        return true;
    }
    default: break;
    }
    /* reshape: elements keep their order, so the contiguous side takes any shape */
    flat = dw__tensor_is_contiguous(y) ? *x : *y;
    dw__tensor_set_contiguous(&flat);
    if (dw__tensor_is_contiguous(y)) {
        *rank = x->rank;
        memcpy(shape, x->shape, sizeof x->shape);
        memcpy(from, x->stride, sizeof x->stride);
        memcpy(to, flat.stride, sizeof flat.stride);
        return true;
    }
    memcpy(from, flat.stride, sizeof flat.stride);
    return dw__tensor_is_contiguous(x);
}

static dw_status move_one(const mover *m) {
    const dw__call *c = &m->call->call;
    int64_t shape[DW_MAX_RANK], from[DW_MAX_RANK], to[DW_MAX_RANK], offset;
    int rank;
    (void)copy_layout(c, &rank, shape, from, to, &offset);
    return copy(m, rank, shape, element_at(&c->inputs[0], offset), from, c->outputs[0].data, to);
}

static dw_status concat(const mover *m) {
    const dw__call *c = &m->call->call;
    const dw__tensor *y = &c->outputs[0];
    const int axis = (int)dw__call_int(c, DW_ATTR_KEY_AXIS, 0);
    int64_t at = 0;
    for (uint32_t i = 0; i < c->input_count; i++) {
        const dw__tensor *x = &c->inputs[i];
        DW_RETURN_IF_FAILED(copy(m, x->rank, x->shape, x->data, x->stride,
                                 element_at(y, at * y->stride[axis]), y->stride));
        at += x->shape[axis];
    }
    return DW_OK;
}

static dw_status pad(const mover *m) {
    const dw__call *c = &m->call->call;
    const dw__tensor *x = &c->inputs[0], *y = &c->outputs[0];
    const int64_t *low = dw__call_attr(c, DW_ATTR_KEY_LOW)->list;
    int64_t offset = 0;
    for (int axis = 0; axis < x->rank; axis++) offset += low[axis] * y->stride[axis];
    DW_RETURN_IF_FAILED(fill(m, y, dw__call_float(c, DW_ATTR_KEY_VALUE, 0.0)));
    return copy(m, x->rank, x->shape, x->data, x->stride, element_at(y, offset), y->stride);
}

/* The index along the axis is the element's offset by strides of 1 there and 0 elsewhere. */
static dw_status iota(const mover *m) {
    const dw__call *c = &m->call->call;
    const dw__tensor *y = &c->outputs[0];
    int64_t index[DW_MAX_RANK] = {0};
    dw__iteration it;
    dw_move_params params = {.to = y->data, .type = dw__gpu_element(y->dtype)};
    index[dw__call_int(c, DW_ATTR_KEY_AXIS, 0)] = 1;
    dw__iteration_begin(&it, y->rank, y->shape);
    dw__iteration_add(&it, y->stride);
    dw__iteration_add(&it, index);
    dw__iteration_merge(&it);
    set_axes(&params, &it, true);
    return launch(m, IOTA, &params);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const mover m = {call, context, variant};
    const dw__call *c = &m.call->call;
    switch (c->op) {
    case DW_OP_CONCAT: return concat(&m);
    case DW_OP_PAD: return pad(&m);
    case DW_OP_IOTA: return iota(&m);
    case DW_OP_CONSTANT: return fill(&m, &c->outputs[0], dw__call_float(c, DW_ATTR_KEY_VALUE, 0.0));
    case DW_OP_SIZE:
        return fill(&m, &c->outputs[0], (double)dw__call_attr(c, DW_ATTR_KEY_SIZE)->list[0]);
    default: return move_one(&m);
    }
}

/* ---- the entry ---------------------------------------------------------------------------------------- */

static bool computes(dw_op op) {
    switch (op) {
    case DW_OP_PERMUTE:
    case DW_OP_BROADCAST:
    case DW_OP_SLICE:
    case DW_OP_RESHAPE:
    case DW_OP_CONCAT:
    case DW_OP_PAD:
    case DW_OP_IOTA:
    case DW_OP_CONSTANT:
    case DW_OP_SIZE: return true;
    default: return false;
    }
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    int64_t shape[DW_MAX_RANK], from[DW_MAX_RANK], to[DW_MAX_RANK], offset;
    int rank;
    if (c->op == DW_OP_RESHAPE && !copy_layout(c, &rank, shape, from, to, &offset))
        return dw__fail(DW_UNSUPPORTED,
                        "%s: expected a reshape with a contiguous operand or result", kernel->name);
    return dw__gpu_kernel_computes(kernel, c, gpu);
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    return dw__variant_of(context, kernel, dw_dtype_bytes(c->outputs[0].dtype), variant);
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    (void)kernel;
    for (int i = 0; i < (int)DW_COUNT(entries); i++) {
        points[i].code = (dw__jit_variant){
            .source = "common/move.cu", .entry = entries[i], .arch = dw__gpu_arch(capability)};
        dw__jit_add_define(&points[i].code, "WIDTH", (int)params);
    }
    return DW_OK;
}

/* A transposed copy, and a pad with room on both sides of each axis. */
static void example(uint64_t params, int index, dw__call *c) {
    static const int64_t perm_list[] = {2, 0, 1}, low[] = {2, 0, 3}, high[] = {1, 2, 0};
    static const dw_dtype dtypes[] = {[1] = DW_BOOL, [2] = DW_BF16, [4] = DW_F32, [8] = DW_F64};
    static const dw_attr attrs[2][2] = {
        {{.key = DW_ATTR_KEY_PERM, .count = 3, .list = perm_list}},
        {{.key = DW_ATTR_KEY_LOW, .count = 3, .list = low},
         {.key = DW_ATTR_KEY_HIGH, .count = 3, .list = high}},
    };
    const dw_dtype dtype = dtypes[params];
    *c = (dw__call){.op = index ? DW_OP_PAD : DW_OP_PERMUTE,
                    .attr_count = index ? 2 : 1,
                    .attrs = attrs[index],
                    .input_count = 1,
                    .output_count = 1,
                    .inputs = {{.dtype = dtype, .rank = 3, .shape = {3, 17, 29}}},
                    .outputs = {{.dtype = dtype, .rank = 3, .shape = {29, 3, 17}}}};
    if (index) c->outputs[0] = (dw__tensor){.dtype = dtype, .rank = 3, .shape = {6, 19, 32}};
    dw__tensor_set_contiguous(&c->inputs[0]);
    dw__tensor_set_contiguous(&c->outputs[0]);
}

const dw__kernel dw__gpu_move = {
    .name = "move",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .computes = computes,
    .proof = DW__RUN_ON_HOPPER,
    .operation = "permute, broadcast, slice, reshape, concat, pad, constant, size, iota",
    .source = "cuda/common/move.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "every element type",
    .needs = "any strides; a reshape needs a contiguous operand or result",
    .supports = supports,
    .seconds = dw__gpu_seconds_of_bytes,
    .results = DW__RESULTS_SCATTERED,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    .first_use = &dw__operation_first_use,
    .tolerance = "exact",
    .example = example,
    .tolerance_factor = 0.0,
};
