/* quantize_tiles of the graph with scheme fp8-block, by cuda/common/fp8_block_codes.cu. */
#include "kernel/cuda/fp8_block_codes.h"
#include "kernel/cuda/gpu_kernels.h"
#include <string.h>

enum { VECTOR = 8, ALIGNMENT = 16 };
enum { WHOLE = 1 << 4, SQUARE = 1 << 5 }; /* of a variant, behind the type */

/* A plan's operands have addresses of that alignment before they have memory. */
static bool is_whole(const dw__tensor *x) {
    return (x->stride[1] == 1 || x->shape[1] == 1) && x->shape[1] % VECTOR == 0 &&
           x->stride[0] % VECTOR == 0 && (uintptr_t)x->data % ALIGNMENT == 0;
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    const dw__tensor *x = &c->inputs[0];
    const int64_t most = INT32_MAX - 1024; /* fp8_block_codes_params.h */
    if (c->outputs[DW__FP8_SCALES].dtype != DW_F32)
        return dw__fail(DW_TYPE, "%s is for fp8-block", kernel->name);
    if (dw__call_attr(c, DW_ATTR_KEY_AXIS))
        return dw__fail(DW_UNSUPPORTED, "%s: expected no axis, for codes along both", kernel->name);
    if (x->shape[0] > most || x->shape[1] > most ||
        dw__fp8_block_tiles(x->shape[0]) * dw__fp8_block_tiles(x->shape[1]) > most)
        return dw__fail(DW_UNSUPPORTED,
                        "%s: %lld x %lld elements; expected fewer than 2^31 - 1024 rows, columns "
                        "and tiles of 128 x 128",
                        kernel->name, (long long)x->shape[0], (long long)x->shape[1]);
    return dw__gpu_kernel_has(kernel, gpu);
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    return dw__variant_of(context, kernel,
                          (uint64_t)dw__gpu_element(c->inputs[0].dtype) |
                              (is_whole(&c->inputs[0]) ? WHOLE : 0) |
                              (dw__call_int(c, DW_ATTR_KEY_SQUARE, 0) ? SQUARE : 0),
                          variant);
}

dw_fp8_block_codes_params dw__fp8_block_results(int64_t rows, int64_t columns,
                                                const dw__tensor *results) {
    const int64_t across = dw__fp8_block_tiles(columns);
    return (dw_fp8_block_codes_params){.rows = (int)rows,
                                       .columns = (int)columns,
                                       .tiles = (int)(dw__fp8_block_tiles(rows) * across),
                                       .tiles_across = (int)across,
                                       .codes = results[DW__FP8_CODES].data,
                                       .turned = results[DW__FP8_TURNED].data,
                                       .row_bytes = results[DW__FP8_CODES].shape[1],
                                       .turned_row_bytes = results[DW__FP8_TURNED].shape[1],
                                       .scales = results[DW__FP8_SCALES].data,
                                       .turned_scales = results[DW__FP8_TURNED_SCALES].data};
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__operation_call *c = call;
    const dw__tensor *x = &c->call.inputs[0];
    const int64_t resident = (int64_t)context->sm_count * DW_FP8_BLOCK_RESIDENT;
    dw_fp8_block_codes_params p = dw__fp8_block_results(x->shape[0], x->shape[1], c->call.outputs);
    p.x = x->data;
    p.row_stride = x->stride[0];
    p.column_stride = x->stride[1];
    return dw__gpu_launch(c, context, "fp8_block_codes", variant->functions[0],
                          p.tiles < resident ? p.tiles : resident, DW_FP8_BLOCK_THREADS, &p);
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    (void)kernel;
    points->code = (dw__jit_variant){.source = "common/fp8_block_codes.cu",
                                     .entry = "fp8_block_codes",
                                     .arch = dw__gpu_arch(capability)};
    dw__jit_add_define(&points->code, "TYPE", (int)(params & 15));
    dw__jit_add_define(&points->code, "WHOLE", (params & WHOLE) != 0);
    dw__jit_add_define(&points->code, "SQUARE", (params & SQUARE) != 0);
    return DW_OK;
}

/* Several tiles each way with edges within them; the first has edges within a vector, if the variant allows it. */
static void example(uint64_t params, int index, dw__call *c) {
    static const dw_attr attrs[] = {{.key = DW_ATTR_KEY_SCHEME, .string = "fp8-block"},
                                    {.key = DW_ATTR_KEY_SQUARE, .integer = 1}};
    const bool square = params & SQUARE;
    const int64_t rows = index ? 300 : 133, columns = index || params & WHOLE ? 272 : 259,
                  sizes[] = {rows, columns};
    *c = (dw__call){
        .op = DW_OP_QUANTIZE_TILES,
        .attr_count = square ? 2 : 1,
        .attrs = attrs,
        .input_count = 1,
        .output_count = 4,
        .inputs = {{.dtype = (dw_dtype)(params & 15), .rank = 2, .shape = {rows, columns}}}};
    for (int i = 0; i < 2; i++) {
        const int64_t outer = sizes[i], inner = sizes[1 - i],
                      padded = (inner + DW_CODE_ROW - 1) / DW_CODE_ROW * DW_CODE_ROW;
        c->outputs[2 * i] = (dw__tensor){.dtype = DW_E4M3, .rank = 2, .shape = {outer, padded}};
        c->outputs[2 * i + 1] =
            square ? (dw__tensor){.dtype = DW_F32,
                                  .rank = 3,
                                  .shape = {dw__fp8_block_tiles(outer),
                                            (dw__fp8_block_tiles(inner) + DW_SQUARE_SCALES - 1) /
                                                DW_SQUARE_SCALES,
                                            DW_SQUARE_SCALES}}
                   : (dw__tensor){
                         .dtype = DW_F32, .rank = 2, .shape = {dw__fp8_block_tiles(inner), outer}};
    }
    dw__tensor_set_contiguous(&c->inputs[0]);
    for (int i = 0; i < 4; i++) dw__tensor_set_contiguous(&c->outputs[i]);
}

const dw__kernel dw__gpu_fp8_block_codes = {
    .name = "fp8_block_codes",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .op = DW_OP_QUANTIZE_TILES,
    .proof = DW__RUN_ON_HOPPER,
    .operation = "quantize_tiles of fp8-block",
    .source = "cuda/common/fp8_block_codes.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "BF16, F16, F32; codes of fp8-block",
    .needs = "any strides",
    .supports = supports,
    .seconds = dw__gpu_seconds_of_bytes,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    .first_use = &dw__operation_first_use,
    .tolerance = "every byte is the definition's",
    .example = example,
    .tolerance_factor = 0.0,
};
