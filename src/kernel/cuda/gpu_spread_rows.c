/* spread_rows, combine_rows and combine_rows_backward, by cuda/common/spread_rows.cu. A variant is compiled for the
 * types of rows, weights and results, and for 16-byte accesses or single elements. */
#include "common/spread_rows_params.h"
#include "kernel/cuda/gpu_kernels.h"

enum { X, PLACE, WEIGHT, DY }; /* operands */
enum { SPREAD, COMBINE, BACKWARD };
static const char *const entries[] = {"spread_rows", "combine_rows", "combine_rows_backward"};

static int entry_of(dw_op op) {
    return op == DW_OP_SPREAD_ROWS ? SPREAD : op == DW_OP_COMBINE_ROWS ? COMBINE : BACKWARD;
}

static bool computes(dw_op op) {
    return op == DW_OP_SPREAD_ROWS || op == DW_OP_COMBINE_ROWS || op == DW_OP_COMBINE_ROWS_BACKWARD;
}

/* Returns the weights, dy, or NULL. */
static const dw__tensor *optional(const dw__call *c, uint32_t i) {
    return c->input_count > i && c->inputs[i].rank >= 0 ? &c->inputs[i] : NULL;
}

/* ---- variants ------------------------------------------------------------------------------------------ */

typedef struct rows_variant {
    int type, weight, other; /* elements; weight 0: none */
    int vector, entry;
} rows_variant;

static uint64_t pack(rows_variant v) {
    return (uint64_t)(v.type | v.weight << 4 | v.other << 8 | v.vector << 12 | v.entry << 20);
}

static rows_variant unpack(uint64_t params) {
    const int p = (int)params;
    return (rows_variant){p & 15, p >> 4 & 15, p >> 8 & 15, p >> 12 & 255, p >> 20};
}

/* Elements of 16 bytes where all rows consist of such pieces of x and begin at multiples of 16 bytes, else 1. */
static int vector_of(const dw__call *c) {
    const int64_t most = 16 / (int64_t)dw_dtype_bytes(c->inputs[X].dtype);
    const dw__tensor *rows[] = {&c->inputs[X], optional(c, DY)};
    bool fits = c->inputs[X].shape[1] % most == 0 && ((uintptr_t)c->outputs[0].data & 15) == 0;
    for (size_t i = 0; i < DW_COUNT(rows) && rows[i]; i++)
        fits = fits && rows[i]->stride[1] == 1 && rows[i]->stride[0] % most == 0 &&
               ((uintptr_t)rows[i]->data & 15) == 0;
    return fits ? (int)most : 1;
}

static rows_variant variant_of(const dw__call *c) {
    const dw__tensor *weight = optional(c, WEIGHT), *dy = optional(c, DY);
    return (rows_variant){
        .type = dw__gpu_element(c->inputs[X].dtype),
        .weight = weight ? dw__gpu_element(weight->dtype) : 0,
        .other = dw__gpu_element(dy ? dy->dtype : c->outputs[0].dtype),
        .vector = vector_of(c),
        .entry = entry_of(c->op),
    };
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    const rows_variant v = unpack(params);
    (void)kernel;
    points->code = (dw__jit_variant){.source = "common/spread_rows.cu",
                                     .entry = entries[v.entry],
                                     .arch = dw__gpu_arch(capability)};
    dw__jit_add_define(&points->code, "TYPE", v.type);
    dw__jit_add_define(&points->code, "WEIGHT", v.weight);
    dw__jit_add_define(&points->code, "OTHER", v.other);
    dw__jit_add_define(&points->code, "VECTOR", v.vector);
    return DW_OK;
}

/* ---- calls --------------------------------------------------------------------------------------------- */

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    return dw__gpu_kernel_computes(kernel, &((const dw__operation_call *)call)->call, gpu);
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    return dw__variant_of(context, kernel, pack(variant_of(c)), variant);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__operation_call *given = call;
    const dw__call *c = &given->call;
    const rows_variant v = unpack(variant->params);
    const dw__tensor *x = &c->inputs[X], *place = &c->inputs[PLACE];
    const dw__tensor *weight = optional(c, WEIGHT), *dy = optional(c, DY);
    dw_spread_rows_params p = {.x = x->data,
                               .place = place->data,
                               .y = c->outputs[0].data,
                               .tokens = place->shape[0],
                               .each = place->shape[1],
                               .width = x->shape[1] / v.vector,
                               .x_row = x->stride[0],
                               .x_column = x->stride[1],
                               .place_row = place->stride[0],
                               .place_column = place->stride[1],
                               .error = given->error};
    if (weight) {
        p.weight = weight->data;
        p.weight_row = weight->stride[0];
        p.weight_column = weight->stride[1];
    }
    if (v.entry != BACKWARD)
        return dw__gpu_launch_each(given, context, entries[v.entry], variant->functions[0],
                                   p.tokens * p.width, &p);
    p.dy = dy->data;
    p.dy_row = dy->stride[0];
    p.dy_column = dy->stride[1];
    p.dweight = c->outputs[1].data;
    return dw__gpu_launch_each(given, context, entries[v.entry], variant->functions[0],
                               p.tokens * p.each * 32, &p);
}

/* ---- the entry ----------------------------------------------------------------------------------------- */

/* The second trial has as many places for a row that a thread loads them in several turns, and rows of dy with padding
 * between them. */
static void example(uint64_t params, int index, dw__call *c) {
    static const dw_op ops[] = {DW_OP_SPREAD_ROWS, DW_OP_COMBINE_ROWS, DW_OP_COMBINE_ROWS_BACKWARD};
    static const dw_attr wide = {.key = DW_ATTR_KEY_DTYPE, .integer = DW_F32};
    const rows_variant v = unpack(params);
    const dw_dtype type = (dw_dtype)v.type, other = (dw_dtype)v.other;
    const int64_t tokens = index ? 11 : 29, each = index ? 7 : 2,
                  width = v.vector == 1 ? 35 : 35 * v.vector;
    const dw__tensor absent = {.rank = -1},
                     few = {.dtype = type, .rank = 2, .shape = {tokens, width}},
                     many = {.dtype = type, .rank = 2, .shape = {tokens * each, width}},
                     place = {.dtype = DW_I32, .rank = 2, .shape = {tokens, each}};
    *c = (dw__call){.op = ops[v.entry],
                    .input_count = v.entry == BACKWARD ? 4 : 3,
                    .output_count = v.entry == BACKWARD ? 2 : 1,
                    .inputs = {v.entry == SPREAD ? few : many, place, place, few},
                    .outputs = {v.entry == COMBINE ? few : many, place}};
    c->inputs[WEIGHT].dtype = c->outputs[1].dtype = (dw_dtype)v.weight;
    if (v.weight == 0) c->inputs[WEIGHT] = absent;
    c->inputs[DY].dtype = other;
    if (v.entry == COMBINE) c->outputs[0].dtype = other;
    if (v.entry == COMBINE && other != type) {
        c->attr_count = 1;
        c->attrs = &wide;
    }
    for (uint32_t i = 0; i < c->input_count; i++)
        if (c->inputs[i].rank >= 0) dw__tensor_set_contiguous(&c->inputs[i]);
    for (uint32_t i = 0; i < c->output_count; i++) dw__tensor_set_contiguous(&c->outputs[i]);
    if (index && v.entry == BACKWARD) c->inputs[DY].stride[0] += 16;
}

const dw__kernel dw__gpu_spread_rows = {
    .name = "spread_rows",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .computes = computes,
    .proof = DW__RUN_ON_HOPPER,
    .operation = "spread_rows, combine_rows, combine_rows_backward",
    .source = "cuda/common/spread_rows.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "BF16, F16, F32, F64",
    .needs = "any strides",
    .supports = supports,
    .seconds = dw__gpu_seconds_of_bytes,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    .first_use = &dw__operation_first_use,
    .tolerance = "accumulates in F32 (F64 in F64) and rounds once",
    .example = example,
    .tolerance_factor = 8.0,
};
