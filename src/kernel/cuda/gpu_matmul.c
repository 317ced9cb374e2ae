/* Matrix multiplication of any strides without tensor cores, by cuda/common/matmul.cu: the kernel that supports every
 * call of matmul. A variant is compiled for the types of the operands and of the result. */
#include "common/matmul_params.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/reference/scalar.h"
#include <stdio.h>

/* ---- calls ----------------------------------------------------------------------------------------------- */

static dw_matmul_params params_of(const dw__call *c) {
    const dw__tensor *a = &c->inputs[0], *b = &c->inputs[1], *y = &c->outputs[0];
    const int last = y->rank - 1, batch = y->rank - 2;
    const bool a_turned = dw__call_int(c, DW_ATTR_KEY_TRANSPOSE_A, 0) != 0,
               b_turned = dw__call_int(c, DW_ATTR_KEY_TRANSPOSE_B, 0) != 0;
    dw_matmul_params p = {
        .a = a->data,
        .b = b->data,
        .y = y->data,
        .m = y->shape[last - 1],
        .n = y->shape[last],
        .k = a->shape[a_turned ? last - 1 : last],
        .a_row = a->stride[a_turned ? last : last - 1],
        .a_column = a->stride[a_turned ? last - 1 : last],
        .b_row = b->stride[b_turned ? last : last - 1],
        .b_column = b->stride[b_turned ? last - 1 : last],
        .y_row = y->stride[last - 1],
        .y_column = y->stride[last],
        .batches = 1,
        .rank = batch > 0 ? batch : 1,
        .shape = {1},
    };
    const dw__tensor *addend = dw__call_addend(c);
    if (addend) {
        p.addend = addend->data;
        p.addend_row = addend->stride[last - 1];
        p.addend_column = addend->stride[last];
    }
    for (int axis = 0; axis < batch; axis++) {
        p.shape[axis] = y->shape[axis];
        p.a_stride[axis] = a->stride[axis];
        p.b_stride[axis] = b->stride[axis];
        p.y_stride[axis] = y->stride[axis];
        if (addend) p.addend_stride[axis] = addend->stride[axis];
        p.batches *= y->shape[axis];
    }
    return p;
}

static int64_t blocks_of(const dw_matmul_params *p) {
    return (p->m + DW_MATMUL_TILE - 1) / DW_MATMUL_TILE *
           ((p->n + DW_MATMUL_TILE - 1) / DW_MATMUL_TILE) * p->batches;
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    DW_RETURN_IF_FAILED(dw__gpu_kernel_computes(kernel, c, gpu));
    if (!dw__dtype_is_float(c->inputs[0].dtype))
        return dw__fail(DW_TYPE, "%s: the element type is %s; expected bf16, f16, f32 or f64",
                        kernel->name, dw_dtype_name(c->inputs[0].dtype));
    const dw_matmul_params p = params_of(c);
    if (blocks_of(&p) > INT32_MAX)
        return dw__fail(DW_UNSUPPORTED, "%s: %lld tiles of %d x %d; expected fewer than 2^31",
                        kernel->name, (long long)blocks_of(&p), DW_MATMUL_TILE, DW_MATMUL_TILE);
    return DW_OK;
}

/* Two FLOPs for each product, at the rate of FMA units: a sixteenth of the tensor cores' dense BF16. */
static void seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                    dw__kernel_seconds *result) {
    const dw_matmul_params p = params_of(&((const dw__operation_call *)call)->call);
    (void)kernel;
    result->seconds = 4e-6 + 2.0 * (double)p.m * (double)p.n * (double)p.k * (double)p.batches /
                                 (gpu->flops / 16.0);
    snprintf(result->from, sizeof result->from, "estimate: FLOPs at the rate of FMA units");
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    const uint64_t type = (uint64_t)dw__gpu_element(c->inputs[0].dtype),
                   result = (uint64_t)dw__gpu_element(c->outputs[0].dtype);
    return dw__variant_of(context, kernel, type | result << 4, variant);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__operation_call *c = call;
    dw_matmul_params params = params_of(&c->call);
    const int64_t blocks = blocks_of(&params);
    void *arguments[] = {&params};
    if (blocks == 0) return DW_OK;
    return context->device->launch(&(dw__launch){
        .name = "matmul",
        .function = variant->functions[0],
        .grid = {(unsigned)blocks, 1, 1},
        .block = {DW_MATMUL_THREADS, 1, 1},
        .stream = c->stream,
        .arguments = arguments,
    });
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    (void)kernel;
    points->code = (dw__jit_variant){
        .source = "common/matmul.cu", .entry = "matmul", .arch = dw__gpu_arch(capability)};
    dw__jit_add_define(&points->code, "TYPE", (int)(params & 15));
    dw__jit_add_define(&points->code, "RESULT", (int)(params >> 4));
    return DW_OK;
}

/* Edges in every direction; the second has both operands transposed, and two batches. */
static void example(uint64_t params, int index, dw__call *c) {
    static const dw_attr attrs[] = {{.key = DW_ATTR_KEY_DTYPE, .integer = DW_F32},
                                    {.key = DW_ATTR_KEY_TRANSPOSE_A, .integer = 1},
                                    {.key = DW_ATTR_KEY_TRANSPOSE_B, .integer = 1}};
    const dw_dtype type = (dw_dtype)(params & 15), result = (dw_dtype)(params >> 4);
    const uint32_t first = result == type, count = (index ? 3 : 1) - first;
    *c = (dw__call){.op = DW_OP_MATMUL,
                    .attr_count = count,
                    .attrs = attrs + first,
                    .input_count = 2,
                    .output_count = 1,
                    .inputs = {{.dtype = type, .rank = 2, .shape = {70, 37}},
                               {.dtype = type, .rank = 2, .shape = {37, 129}}},
                    .outputs = {{.dtype = result, .rank = 2, .shape = {70, 129}}}};
    if (index) {
        c->inputs[0] = (dw__tensor){.dtype = type, .rank = 3, .shape = {2, 37, 70}};
        c->inputs[1] = (dw__tensor){.dtype = type, .rank = 3, .shape = {2, 129, 37}};
        c->outputs[0] = (dw__tensor){.dtype = result, .rank = 3, .shape = {2, 70, 129}};
    }
    for (int i = 0; i < 2; i++) dw__tensor_set_contiguous(&c->inputs[i]);
    dw__tensor_set_contiguous(&c->outputs[0]);
}

const dw__kernel dw__gpu_matmul = {
    .name = "matmul",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .op = DW_OP_MATMUL,
    .proof = DW__PROVEN_ON_EMULATOR,
    .operation = "matmul",
    .source = "cuda/common/matmul.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "BF16, F16, F32, F64",
    .needs = "any strides; no tensor cores",
    .supports = supports,
    .seconds = seconds,
    .results = DW__RESULTS_SCATTERED,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    .first_use = &dw__operation_first_use,
    .tolerance = "accumulates in F32 (F64 in F64) and rounds once",
    .example = example,
    .tolerance_factor = 8.0,
    .accumulates = DW__ADDS_TO_ADDEND,
};
