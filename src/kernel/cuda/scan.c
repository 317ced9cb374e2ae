/* Running sums along an axis (cumsum), by cuda/common/scan.cu. A variant is compiled for a type and the number of
 * threads that share a row. */
#include "common/scan_params.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/iteration.h"

/* The rows: the axes but the one of the sums, with the strides of operand and result. */
static void rows_of(const dw__call *c, dw__iteration *rows) {
    const int axis = (int)dw__call_int(c, DW_ATTR_KEY_AXIS, 0);
    dw__tensor x = c->inputs[0];
    x.shape[axis] = 1;
    dw__iteration_begin(rows, x.rank, x.shape);
    dw__iteration_add(rows, x.stride);
    dw__iteration_add(rows, c->outputs[0].stride);
    dw__iteration_merge(rows);
}

/* As in a reduction: a warp or a block for a row, or a thread where neighbouring rows are neighbours in memory. */
static int choose_lanes(const dw__call *c, const dw__iteration *rows) {
    const int axis = (int)dw__call_int(c, DW_ATTR_KEY_AXIS, 0), last = rows->rank - 1;
    const int64_t length = c->inputs[0].shape[axis];
    const bool is_column = rows->stride[0][last] == 1 && c->inputs[0].stride[axis] != 1;
    if (is_column && rows->shape[last] >= 32) return 1;
    return length < 16 ? 1 : length <= 1024 ? 32 : DW_SCAN_THREADS;
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    return dw__gpu_kernel_computes(kernel, c, gpu);
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    dw__iteration rows;
    rows_of(c, &rows);
    const uint64_t type = (uint64_t)dw__gpu_element(c->inputs[0].dtype),
                   lanes = (uint64_t)choose_lanes(c, &rows);
    return dw__variant_of(context, kernel, type | lanes << 4, variant);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__operation_call *c = call;
    const dw__tensor *x = &c->call.inputs[0], *y = &c->call.outputs[0];
    const int axis = (int)dw__call_int(&c->call, DW_ATTR_KEY_AXIS, 0);
    const int64_t per_block = DW_SCAN_THREADS / (int64_t)(variant->params >> 4);
    dw__iteration rows;
    rows_of(&c->call, &rows);
    dw_scan_params params = {.x = x->data,
                             .result = y->data,
                             .count = rows.count,
                             .length = x->shape[axis],
                             .x_step = x->stride[axis],
                             .result_step = y->stride[axis],
                             .rank = rows.rank,
                             .reverse = dw__call_int(&c->call, DW_ATTR_KEY_REVERSE, 0) != 0};
    for (int i = 0; i < rows.rank; i++) {
        params.shape[i] = rows.shape[i];
        params.x_stride[i] = rows.stride[0][i];
        params.result_stride[i] = rows.stride[1][i];
    }
    return dw__gpu_launch(c, context, "scan", variant->functions[0],
                          (rows.count + per_block - 1) / per_block, DW_SCAN_THREADS, &params);
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    (void)kernel;
    points->code = (dw__jit_variant){
        .source = "common/scan.cu", .entry = "scan", .arch = dw__gpu_arch(capability)};
    dw__jit_add_define(&points->code, "TYPE", (int)(params & 15));
    dw__jit_add_define(&points->code, "LANES", (int)(params >> 4));
    return DW_OK;
}

/* Several turns for every lane: forward along contiguous rows, then backward along columns. */
static void example(uint64_t params, int index, dw__call *c) {
    static const dw_attr forward[] = {{.key = DW_ATTR_KEY_AXIS, .integer = 1}},
                         backward[] = {{.key = DW_ATTR_KEY_AXIS, .integer = 1},
                                       {.key = DW_ATTR_KEY_REVERSE, .integer = 1}};
    const int64_t length = 3 * (int64_t)(params >> 4) + 5;
    const dw_dtype dtype = (dw_dtype)(params & 15);
    *c = (dw__call){.op = DW_OP_CUMSUM,
                    .attr_count = index ? 2 : 1,
                    .attrs = index ? backward : forward,
                    .input_count = 1,
                    .output_count = 1,
                    .inputs = {{.dtype = dtype, .rank = 3, .shape = {3, length, index ? 7 : 1}}},
                    .outputs = {{.dtype = dtype, .rank = 3, .shape = {3, length, index ? 7 : 1}}}};
    dw__tensor_set_contiguous(&c->inputs[0]);
    dw__tensor_set_contiguous(&c->outputs[0]);
}

const dw__kernel dw__gpu_scan = {
    .name = "scan",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .op = DW_OP_CUMSUM,
    .proof = DW__PROVEN_ON_EMULATOR,
    .operation = "cumsum",
    .source = "cuda/common/scan.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "every element type but BOOL",
    .needs = "any strides",
    .supports = supports,
    .seconds = dw__gpu_seconds_of_bytes,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    .first_use = &dw__operation_first_use,
    .tolerance = "accumulates in F32 (F64 in F64) and rounds each sum once; integers exactly",
    .example = example,
    .tolerance_factor = 8.0,
};
