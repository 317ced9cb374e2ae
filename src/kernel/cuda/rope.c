/* Rotary position embedding and its gradient, by cuda/common/rope.cu. A variant is compiled for a type, for loads of 16
 * bytes or of one element, and for one way of pairing elements. */
#include "kernel/cuda/rope.h"
#include "kernel/cuda/gpu_kernels.h"

typedef struct rope_variant {
    int type, vector, interleaved;
} rope_variant;

static uint64_t pack(rope_variant v) {
    return (uint64_t)(v.type | v.interleaved << 4 | v.vector << 5);
}
static rope_variant unpack(uint64_t params) {
    const int p = (int)params;
    return (rope_variant){.type = p & 15, .interleaved = p >> 4 & 1, .vector = p >> 5};
}

static const dw__tensor *tensor_of(const dw__call *c, int tensor) {
    return tensor == DW_ROPE_Y ? &c->outputs[0] : &c->inputs[tensor];
}

void dw__rope_axes(const dw__call *c, dw__iteration *it) {
    const dw__tensor *y = &c->outputs[0];
    dw__iteration_begin(it, y->rank - 1, y->shape);
    for (int t = 0; t < DW_ROPE_TENSORS; t++) {
        const dw__tensor *tensor = tensor_of(c, t);
        int64_t stride[DW_MAX_RANK];
        for (int axis = 0; axis < y->rank - 1; axis++)
            stride[axis] = tensor->shape[axis] == 1 ? 0 : tensor->stride[axis];
        dw__iteration_add(it, stride);
    }
    dw__iteration_merge(it);
}

/* The last axis along which all rows have the same cosines and sines, or -1. */
static int axis_of_heads(const dw__iteration *it) {
    int found = -1;
    for (int axis = 0; axis < it->rank; axis++)
        if (it->stride[DW_ROPE_COS][axis] == 0 && it->stride[DW_ROPE_SIN][axis] == 0 &&
            it->shape[axis] > 1)
            found = axis;
    return found;
}

static dw_rope_params params_of(const dw__call *c) {
    const int last = c->outputs[0].rank - 1;
    dw__iteration it;
    dw__rope_axes(c, &it);
    const int heads = axis_of_heads(&it);
    dw_rope_params p = {.rows = (unsigned)it.count,
                        .heads = 1,
                        .columns = (int)c->outputs[0].shape[last],
                        .turned = (int)c->inputs[DW_ROPE_COS].shape[last],
                        .transposed = dw__call_int(c, DW_ATTR_KEY_TRANSPOSED, 0) != 0};
    for (int t = 0; t < DW_ROPE_TENSORS; t++) {
        p.data[t] = tensor_of(c, t)->data;
        p.step[t] = tensor_of(c, t)->stride[last];
    }
    for (int axis = 0; axis < it.rank; axis++) {
        const bool is_heads = axis == heads && it.count > 0;
        if (is_heads)
            p.rows /= p.heads = (unsigned)it.shape[axis];
        else
            p.shape[p.rank] = (unsigned)it.shape[axis];
        for (int t = 0; t < DW_ROPE_TENSORS; t++)
            *(is_heads ? &p.head_stride[t] : &p.stride[t][p.rank]) = it.stride[t][axis];
        p.rank += !is_heads;
    }
    return p;
}

_Static_assert(DW_ROPE_RANK == DW_MAX_RANK - 1, "an axis of rows, and all others");

/* The elements of 16 bytes if all rows and all pairs are whole vectors, else 1. */
static int vector_of(const dw_rope_params *p, dw_dtype dtype) {
    const int64_t bytes = (int64_t)dw_dtype_bytes(dtype), vector = 16 / bytes;
    int64_t together = p->turned / 2 | (p->columns - p->turned);
    for (int t = 0; t < DW_ROPE_TENSORS; t++) {
        if (p->step[t] != 1 || (uintptr_t)p->data[t] % 16 != 0) return 1;
        for (int axis = 0; axis < p->rank; axis++) together |= p->stride[t][axis];
        together |= p->head_stride[t];
    }
    return together % vector == 0 ? (int)vector : 1;
}

static int64_t parts_of(const dw_rope_params *p, int vector) {
    const int64_t groups = (p->heads + DW_ROPE_HEADS - 1) / DW_ROPE_HEADS;
    return p->rows * groups * (p->turned / 2 / vector + (p->columns - p->turned) / vector);
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    const dw__tensor *y = &c->outputs[0];
    DW_RETURN_IF_FAILED(dw__gpu_kernel_computes(kernel, c, gpu));
    return dw__tensor_count(y) <= UINT32_MAX ? DW_OK : dw__kernel_refuse(kernel);
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    const dw_rope_params p = params_of(c);
    const rope_variant v = {.type = dw__gpu_element(c->inputs[0].dtype),
                            .vector = vector_of(&p, c->inputs[0].dtype),
                            .interleaved = dw__call_int(c, DW_ATTR_KEY_INTERLEAVED, 0) != 0};
    return dw__variant_of(context, kernel, pack(v), variant);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__operation_call *c = call;
    dw_rope_params params = params_of(&c->call);
    return dw__gpu_launch_each(c, context, "rope", variant->functions[0],
                               parts_of(&params, unpack(variant->params).vector), &params);
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    const rope_variant v = unpack(params);
    (void)kernel;
    points->code = (dw__jit_variant){
        .source = "common/rope.cu", .entry = "rope", .arch = dw__gpu_arch(capability)};
    dw__jit_add_define(&points->code, "TYPE", v.type);
    dw__jit_add_define(&points->code, "VECTOR", v.vector);
    dw__jit_add_define(&points->code, "INTERLEAVED", v.interleaved);
    return DW_OK;
}

/* Heads of tokens, as projections lie, become tokens of heads; the second trial rotates back a part of each row. */
static void example(uint64_t params, int index, dw__call *c) {
    static const dw_attr attrs[2][2] = {{{.key = DW_ATTR_KEY_INTERLEAVED, .integer = 0},
                                         {.key = DW_ATTR_KEY_TRANSPOSED, .integer = 0}},
                                        {{.key = DW_ATTR_KEY_INTERLEAVED, .integer = 0},
                                         {.key = DW_ATTR_KEY_TRANSPOSED, .integer = 1}}},
                         interleaved[2][2] = {{{.key = DW_ATTR_KEY_INTERLEAVED, .integer = 1},
                                               {.key = DW_ATTR_KEY_TRANSPOSED, .integer = 0}},
                                              {{.key = DW_ATTR_KEY_INTERLEAVED, .integer = 1},
                                               {.key = DW_ATTR_KEY_TRANSPOSED, .integer = 1}}};
    const rope_variant v = unpack(params);
    const int64_t turned = v.vector > 1 ? 32 : 6,
                  columns = turned + (index ? (v.vector > 1 ? 16 : 3) : 0), batch = 2, heads = 3,
                  tokens = 5;
    const dw_dtype dtype = (dw_dtype)v.type;
    const dw__tensor x = {.dtype = dtype,
                          .rank = 4,
                          .shape = {batch, heads, tokens, columns},
                          .stride = {heads * tokens * columns, columns, heads * columns, 1}};
    dw__tensor table = {.dtype = dtype, .rank = 4, .shape = {1, 1, tokens, turned}}, y = x;
    dw__tensor_set_contiguous(&table);
    dw__tensor_set_contiguous(&y);
    *c = (dw__call){.op = DW_OP_ROPE,
                    .attr_count = 2,
                    .attrs = v.interleaved ? interleaved[index] : attrs[index],
                    .input_count = 3,
                    .output_count = 1,
                    .inputs = {x, table, table},
                    .outputs = {y}};
}

const dw__kernel dw__gpu_rope = {
    .name = "rope",
    .op = DW_OP_ROPE,
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .proof = DW__RUN_ON_HOPPER,
    .operation = "rotary position embedding and its gradient",
    .source = "cuda/common/rope.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "BF16, F16, F32, F64",
    .needs = "fewer than 2^32 elements; any strides",
    .supports = supports,
    .seconds = dw__gpu_seconds_of_bytes,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    .first_use = &dw__operation_first_use,
    .results = DW__RESULTS_STRIDED,
    .tolerance = "computed in F32 (F64 in F64) and rounded once",
    .example = example,
    .tolerance_factor = 8.0,
};
