/* sort and top_k, by cuda/common/sort.cu. A variant is compiled for a type and the number of entries that are sorted
 * together in shared memory, or that a warp holds in registers: few results of short rows, as routers of mixtures want
 * them, need no sort. */
#include "common/sort_params.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/iteration.h"

enum { TILES, MERGE }; /* entry points */
/* In a variant's parameters, beside the type and the size: top_k_rows is its only entry point. */
enum { SELECT = 1 << 20 };

static int64_t length_of(const dw__call *c) {
    return c->inputs[0].shape[dw__call_int(c, DW_ATTR_KEY_AXIS, 0)];
}

/* Few sizes, so that there are few variants. */
static int size_for(int64_t length) {
    return length <= 32 ? 32 : length <= 128 ? 128 : length <= 512 ? 512 : DW_SORT_TILE;
}

static bool selects(const dw__call *c) {
    return c->op == DW_OP_TOP_K && length_of(c) <= DW_TOP_K_LENGTH &&
           c->outputs[0].shape[dw__call_int(c, DW_ATTR_KEY_AXIS, 0)] <= DW_TOP_K_KEPT;
}

static int64_t size_in(uint64_t params) { return (int64_t)((params & (SELECT - 1)) >> 4); }

static int64_t entry_bytes(dw_dtype dtype) { return dw_dtype_bytes(dtype) == 8 ? 16 : 8; }

/* Bytes of one buffer for the entries of all rows; 0 if each row fits in a tile. */
static int64_t buffer_bytes(const dw__call *c) {
    if (length_of(c) <= DW_SORT_TILE) return 0;
    const int64_t bytes = dw__tensor_count(&c->inputs[0]) * entry_bytes(c->inputs[0].dtype);
    return (bytes + 255) / 256 * 256;
}

static bool computes(dw_op op) { return op == DW_OP_SORT || op == DW_OP_TOP_K; }

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    if (length_of(c) >= UINT32_MAX)
        return dw__fail(DW_UNSUPPORTED, "%s: rows of %lld elements; expected fewer than 2^32 - 1",
                        kernel->name, (long long)length_of(c));
    return dw__gpu_kernel_computes(kernel, c, gpu);
}

static dw_status workspace_bytes(const dw__kernel *kernel, const void *call,
                                 const dw__context *context, size_t *bytes) {
    (void)kernel;
    (void)context;
    *bytes = 2 * (size_t)buffer_bytes(&((const dw__operation_call *)call)->call);
    return DW_OK;
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    const uint64_t type = (uint64_t)dw__gpu_element(c->inputs[0].dtype),
                   size = (uint64_t)size_for(length_of(c));
    return dw__variant_of(context, kernel, type | size << 4 | (selects(c) ? SELECT : 0), variant);
}

static dw_sort_params params_of(const dw__call *c) {
    const dw__tensor *x = &c->inputs[0], *values = &c->outputs[0], *places = &c->outputs[1];
    const int axis = (int)dw__call_int(c, DW_ATTR_KEY_AXIS, 0);
    dw__tensor one = *x; /* of each row */
    dw__iteration rows;
    one.shape[axis] = 1;
    dw__iteration_begin(&rows, one.rank, one.shape);
    dw__iteration_add(&rows, one.stride);
    dw__iteration_add(&rows, values->stride);
    dw__iteration_add(&rows, places->stride);
    dw__iteration_merge(&rows);
    dw_sort_params p = {.x = x->data,
                        .values = values->data,
                        .places = places->data,
                        .count = rows.count,
                        .length = x->shape[axis],
                        .kept = values->shape[axis],
                        .x_step = x->stride[axis],
                        .values_step = values->stride[axis],
                        .places_step = places->stride[axis],
                        .rank = rows.rank,
                        .descending = c->op == DW_OP_TOP_K ||
                                      dw__call_int(c, DW_ATTR_KEY_DESCENDING, 0) != 0};
    for (int i = 0; i < rows.rank; i++) {
        p.shape[i] = rows.shape[i];
        p.x_stride[i] = rows.stride[0][i];
        p.values_stride[i] = rows.stride[1][i];
        p.places_stride[i] = rows.stride[2][i];
    }
    return p;
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__operation_call *c = call;
    const int64_t size = size_in(variant->params), tile = size < 1024 ? 1024 : size,
                  bytes = buffer_bytes(&c->call);
    char *buffers[2] = {c->workspace, (char *)c->workspace + bytes};
    dw_sort_params p = params_of(&c->call);
    if (p.count == 0 || p.length == 0) return DW_OK;
    if (variant->params & SELECT)
        return dw__gpu_launch(c, context, "top_k_rows", variant->functions[0],
                              (p.count * 32 + DW_SORT_THREADS - 1) / DW_SORT_THREADS,
                              DW_SORT_THREADS, &p);
    const int64_t groups = p.count * ((p.length + size - 1) / size);
    int next = 0;
    p.to = bytes ? buffers[next] : NULL;
    DW_RETURN_IF_FAILED(dw__gpu_launch(c, context, "sort_tiles", variant->functions[TILES],
                                       (groups + tile / size - 1) / (tile / size), DW_SORT_THREADS,
                                       &p));
    for (p.run = size; p.run < p.length; p.run *= 2) {
        p.from = buffers[next];
        next = !next;
        p.to = 2 * p.run < p.length ? buffers[next] : NULL;
        DW_RETURN_IF_FAILED(dw__gpu_launch_each(c, context, "sort_merge", variant->functions[MERGE],
                                                p.count * p.length, &p));
    }
    return DW_OK;
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    static const char *const names[] = {[TILES] = "sort_tiles", [MERGE] = "sort_merge"};
    const bool is_selection = params & SELECT;
    (void)kernel;
    for (int i = 0; i < (is_selection ? 1 : (int)DW_COUNT(names)); i++) {
        points[i].code = (dw__jit_variant){.source = "common/sort.cu",
                                           .entry = is_selection ? "top_k_rows" : names[i],
                                           .arch = dw__gpu_arch(capability)};
        dw__jit_add_define(&points[i].code, "TYPE", (int)(params & 15));
        dw__jit_add_define(&points[i].code, "SIZE", (int)size_in(params));
    }
    return DW_OK;
}

/* Rows that end within a tile, along the last axis and along the first; rows of two tiles where there may be several.
 * Both trials of a selection are top_k. */
static void example(uint64_t params, int index, dw__call *c) {
    static const int64_t kept = 17, chosen = 8;
    static const dw_attr sort = {.key = DW_ATTR_KEY_AXIS, .integer = 1},
                         top_k[] = {{.key = DW_ATTR_KEY_AXIS, .integer = 0},
                                    {.key = DW_ATTR_KEY_SIZE, .count = 1, .list = &kept}},
                         few[] = {{.key = DW_ATTR_KEY_AXIS, .integer = 1},
                                  {.key = DW_ATTR_KEY_SIZE, .count = 1, .list = &chosen}};
    const int64_t size = size_in(params), length = size < DW_SORT_TILE ? size - 3 : size + 77;
    const dw_dtype dtype = (dw_dtype)(params & 15);
    *c = (dw__call){.op = index ? DW_OP_TOP_K : DW_OP_SORT,
                    .attr_count = index ? 2 : 1,
                    .attrs = index ? top_k : &sort,
                    .input_count = 1,
                    .output_count = 2,
                    .inputs = {{.dtype = dtype, .rank = 2, .shape = {5, length}}},
                    .outputs = {{.dtype = dtype, .rank = 2, .shape = {5, length}},
                                {.dtype = DW_I64, .rank = 2, .shape = {5, length}}}};
    if (params & SELECT) {
        c->op = DW_OP_TOP_K;
        c->attr_count = 2;
        c->attrs = few;
        for (int i = 0; i < 2; i++) c->outputs[i].shape[1] = chosen;
    }
    if (index) {
        c->attrs = top_k;
        c->inputs[0].shape[0] = length;
        for (int i = 0; i < 2; i++) c->outputs[i].shape[0] = kept;
        c->inputs[0].shape[1] = c->outputs[0].shape[1] = c->outputs[1].shape[1] = 3;
    }
    dw__tensor_set_contiguous(&c->inputs[0]);
    for (int i = 0; i < 2; i++) dw__tensor_set_contiguous(&c->outputs[i]);
}

const dw__kernel dw__gpu_sort = {
    .name = "sort",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .computes = computes,
    .proof = DW__PROVEN_ON_EMULATOR,
    .operation = "sort, top_k",
    .source = "cuda/common/sort.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "every element type but BOOL",
    .needs = "any strides; rows of fewer than 2^32 - 1 elements",
    .supports = supports,
    .seconds = dw__gpu_seconds_of_bytes,
    .workspace_bytes = workspace_bytes,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    .first_use = &dw__operation_first_use,
    .tolerance = "exact; equal elements in the order of their places",
    .example = example,
    .tolerance_factor = 0.0,
};
