/* Gathers and scatters along an axis, by cuda/common/gather.cu: take, take_along and its transpose put_along_add. (The
 * transpose of take is in scatter.c, and so are large calls of put_along_add.) A variant is compiled for the type of the
 * elements and of the indexes, a gather for 16-byte accesses or single elements, and a scatter for threads or warps. */
#include "common/gather_params.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/iteration.h"
#include <string.h>

enum { GATHER, SCATTER, SCATTER_LINES };
static const char *const entries[] = {"gather", "scatter", "scatter_lines"};
enum { WARP = 32 };

static bool scatters(dw_op op) { return op == DW_OP_PUT_ALONG_ADD; }

static const dw__tensor *index_of(const dw__call *c) { return &c->inputs[scatters(c->op) ? 0 : 1]; }
static const dw__tensor *elements_of(const dw__call *c) {
    return &c->inputs[scatters(c->op) ? 1 : 0];
}

/* ---- operations ---------------------------------------------------------------------------------------- */

/* take: the result has x's axes, the indexes' axes in the place of the selected one. */
static void layout_take(const dw__call *c, int axis, dw_gather_params *p) {
    const dw__tensor *x = &c->inputs[0], *index = &c->inputs[1];
    for (int i = 0; i < p->rank; i++) {
        const int own = i < axis ? i : i - index->rank + 1;
        const bool is_index = i >= axis && i < axis + index->rank;
        p->x_stride[i] = is_index ? 0 : x->stride[own];
        p->index_stride[i] = is_index ? index->stride[i - axis] : 0;
    }
    p->axis_size = x->shape[axis];
    p->x_step = x->stride[axis];
}

static void layout_take_along(const dw__call *c, int axis, dw_gather_params *p) {
    const dw__tensor *x = &c->inputs[0], *index = &c->inputs[1];
    for (int i = 0; i < p->rank; i++) {
        p->x_stride[i] = i == axis ? 0 : x->stride[i];
        p->index_stride[i] = index->stride[i];
    }
    p->axis_size = x->shape[axis];
    p->x_step = x->stride[axis];
}

static void layout_put_along_add(const dw__call *c, int axis, dw_gather_params *p) {
    const dw__tensor *index = &c->inputs[0], *u = &c->inputs[1];
    for (int i = 0; i < p->rank; i++) {
        p->x_stride[i] = i == axis ? 0 : u->stride[i];
        p->index_stride[i] = i == axis ? 0 : index->stride[i];
        p->index_shape[i] = index->shape[i];
    }
    p->indexes = index->shape[axis];
    p->index_step = index->stride[axis];
    p->x_step = u->stride[axis];
}

/* A gather's axes, merged as far as x, the indexes and the result allow. */
static void merge_axes(dw_gather_params *p) {
    long long *strides[] = {p->x_stride, p->index_stride, p->result_stride};
    dw__iteration it;
    int64_t taken[DW_MAX_RANK];
    for (int axis = 0; axis < p->rank; axis++) taken[axis] = p->shape[axis];
    dw__iteration_begin(&it, p->rank, taken);
    for (int i = 0; i < 3; i++) {
        for (int axis = 0; axis < p->rank; axis++) taken[axis] = strides[i][axis];
        dw__iteration_add(&it, taken);
    }
    dw__iteration_merge(&it);
    p->rank = it.rank;
    for (int axis = 0; axis < it.rank; axis++) {
        p->shape[axis] = it.shape[axis];
        for (int i = 0; i < 3; i++) strides[i][axis] = it.stride[i][axis];
    }
}

/* The elements of 16 bytes where neighbours of the last axis share an index and every such group is aligned, else 1. */
static int vector_of(const dw_gather_params *p, dw_dtype dtype) {
    const int most = (int)(16 / dw_dtype_bytes(dtype)), last = p->rank - 1;
    bool fits = (((uintptr_t)p->x | (uintptr_t)p->result) & 15) == 0 && p->x_step % most == 0 &&
                p->shape[last] % most == 0 && p->x_stride[last] == 1 &&
                p->result_stride[last] == 1 && p->index_stride[last] == 0;
    for (int axis = 0; axis < last; axis++)
        fits &= p->x_stride[axis] % most == 0 && p->result_stride[axis] % most == 0;
    return fits ? most : 1;
}

static void count_vectors(dw_gather_params *p, int vector) {
    const int last = p->rank - 1;
    if (vector == 1) return;
    p->count /= vector;
    p->x_step /= vector;
    p->shape[last] /= vector;
    for (int axis = 0; axis < last; axis++) {
        p->x_stride[axis] /= vector;
        p->result_stride[axis] /= vector;
    }
}

static dw_gather_params params_of(const dw__operation_call *call) {
    const dw__call *c = &call->call;
    const dw__tensor *y = &c->outputs[0];
    const int axis = (int)dw__call_int(c, DW_ATTR_KEY_AXIS, 0);
    dw_gather_params p = {.x = elements_of(c)->data,
                          .index = index_of(c)->data,
                          .result = y->data,
                          .count = dw__tensor_count(y),
                          .rank = y->rank,
                          .axis = axis,
                          .axis_size = y->rank ? y->shape[axis] : 1,
                          .error = call->error};
    memcpy(p.shape, y->shape, sizeof y->shape);
    memcpy(p.result_stride, y->stride, sizeof y->stride);
    if (c->op == DW_OP_TAKE) layout_take(c, axis, &p);
    if (c->op == DW_OP_TAKE_ALONG) layout_take_along(c, axis, &p);
    if (c->op == DW_OP_PUT_ALONG_ADD) layout_put_along_add(c, axis, &p);
    if (!scatters(c->op)) merge_axes(&p);
    return p;
}

/* True if a warp can have a line of the result: it lies along the last axis, is no shorter than half a warp, has indexes
 * for each lane at most, and no line is without. */
static bool has_short_lines(const dw__call *c, const dw_gather_params *p) {
    bool fits = p->rank > 0 && p->axis == p->rank - 1 && p->indexes <= WARP &&
                p->axis_size >= WARP / 2 && p->axis_size < INT32_MAX &&
                elements_of(c)->dtype != DW_BOOL;
    for (int axis = 0; axis < p->rank - 1; axis++) fits &= p->index_shape[axis] == p->shape[axis];
    return fits;
}

/* ---- the entry ----------------------------------------------------------------------------------------- */

static int entry_in(uint64_t params) { return (int)(params >> 5 & 3); }
static int vector_in(uint64_t params) { return (int)(params >> 7); }

static bool computes(dw_op op) {
    return op == DW_OP_TAKE || op == DW_OP_TAKE_ALONG || scatters(op);
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    return dw__gpu_kernel_computes(kernel, c, gpu);
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    const dw_gather_params p = params_of(call);
    const dw_dtype dtype = elements_of(c)->dtype;
    const uint64_t type = (uint64_t)dw__gpu_element(dtype), wide = index_of(c)->dtype == DW_I64,
                   entry = !scatters(c->op)         ? GATHER
                           : has_short_lines(c, &p) ? SCATTER_LINES
                                                    : SCATTER,
                   vector = entry == GATHER ? (uint64_t)vector_of(&p, dtype) : 1;
    return dw__variant_of(context, kernel, type | wide << 4 | entry << 5 | vector << 7, variant);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__operation_call *c = call;
    dw_gather_params params = params_of(c);
    count_vectors(&params, vector_in(variant->params));
    const int entry = entry_in(variant->params);
    int64_t threads = params.count;
    if (entry == GATHER) {
        const int64_t resident = (int64_t)DW_GATHER_RESIDENT * context->sm_count,
                      blocks = (threads + DW__GPU_THREADS - 1) / DW__GPU_THREADS;
        return dw__gpu_launch(c, context, entries[entry], variant->functions[0],
                              blocks < resident ? blocks : resident, DW__GPU_THREADS, &params);
    }
    if (entry == SCATTER_LINES) threads = params.count / params.axis_size * WARP;
    return dw__gpu_launch_each(c, context, entries[entry], variant->functions[0], threads, &params);
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    (void)kernel;
    points->code = (dw__jit_variant){.source = "common/gather.cu",
                                     .entry = entries[entry_in(params)],
                                     .arch = dw__gpu_arch(capability)};
    dw__jit_add_define(&points->code, "TYPE", (int)(params & 15));
    dw__jit_add_define(&points->code, "WIDE", (int)(params >> 4 & 1));
    dw__jit_add_define(&points->code, "VECTOR", vector_in(params));
    return DW_OK;
}

/* Indexes are from 0 to 2 (operation_first_use.c), so every axis that they select from has three places or more. The
 * first trial gathers by a matrix of indexes for all, as both do in vectors, or scatters along the first axis. */
static void example(uint64_t params, int index, dw__call *c) {
    static const int64_t size[] = {4, 7, 5}, lines[] = {4, 7, 75};
    static const dw_attr last[] = {{.key = DW_ATTR_KEY_AXIS, .integer = 2},
                                   {.key = DW_ATTR_KEY_SIZE, .count = 3, .list = lines}};
    static const dw_attr middle[] = {{.key = DW_ATTR_KEY_AXIS, .integer = 1},
                                     {.key = DW_ATTR_KEY_SIZE, .count = 3, .list = size}},
                         first[] = {{.key = DW_ATTR_KEY_AXIS, .integer = 0},
                                    {.key = DW_ATTR_KEY_SIZE, .count = 3, .list = size}};
    const bool is_scatter = entry_in(params) != GATHER, in_vectors = vector_in(params) > 1;
    const dw_dtype dtype = (dw_dtype)(params & 15), index_dtype = params >> 4 & 1 ? DW_I64 : DW_I32;
    dw__tensor whole = {.dtype = dtype, .rank = 3, .shape = {4, 7, 5}},
               indexes = {.dtype = index_dtype, .rank = 3, .shape = {3, 6, 5}},
               part = {.dtype = dtype, .rank = 3, .shape = {3, 6, 5}};
    if (!index && is_scatter) indexes.shape[0] = part.shape[0] = 9;
    if (entry_in(params) == SCATTER_LINES) {
        whole.shape[2] = lines[2];
        indexes = (dw__tensor){.dtype = index_dtype, .rank = 3, .shape = {4, 7, index ? WARP : 5}};
        part = (dw__tensor){.dtype = dtype, .rank = 3, .shape = {4, 7, index ? WARP : 5}};
    }
    const bool takes = !is_scatter && (!index || in_vectors);
    if (takes) {
        indexes = (dw__tensor){.dtype = index_dtype, .rank = 2, .shape = {2, 3}};
        if (in_vectors) whole.shape[2] = 16 * (3 + index);
        part = (dw__tensor){.dtype = dtype, .rank = 4, .shape = {4, 2, 3, whole.shape[2]}};
    }
    dw__tensor_set_contiguous(&whole);
    dw__tensor_set_contiguous(&indexes);
    dw__tensor_set_contiguous(&part);
    *c = (dw__call){.op = is_scatter ? DW_OP_PUT_ALONG_ADD
                          : takes    ? DW_OP_TAKE
                                     : DW_OP_TAKE_ALONG,
                    .attr_count = is_scatter ? 2 : 1,
                    .attrs = entry_in(params) == SCATTER_LINES ? last
                             : is_scatter && !index            ? first
                                                               : middle,
                    .input_count = 2,
                    .output_count = 1,
                    .inputs = {is_scatter ? indexes : whole, is_scatter ? part : indexes},
                    .outputs = {is_scatter ? whole : part}};
}

const dw__kernel dw__gpu_gather = {
    .name = "gather",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .computes = computes,
    .proof = DW__RUN_ON_HOPPER,
    .operation = "take, take_along, put_along_add",
    .source = "cuda/common/gather.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "every element type; indexes I32 or I64",
    .needs = "any strides",
    .supports = supports,
    .seconds = dw__gpu_seconds_of_bytes,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    .first_use = &dw__operation_first_use,
    .tolerance = "gathers exactly; scatters accumulate in F32 and round once",
    .example = example,
    .tolerance_factor = 8.0,
};
