/* GEMMs of FP8 codes on Hopper, by sm90_gemm: multiply_codes with a scale of each tensor, of each row or those of
 * fp8-block, and segment_multiply_codes, whose rows are in groups with a matrix of B each. wgmma reads codes along the contraction
 * alone, so both operands have contiguous rows along it; matrices of B may lie one below the other or side by side, as
 * quantize_tensor writes the two orientations of all of them. */
#include "kernel/cuda/gpu_gemm.h"
#include "kernel/cuda/gpu_kernels.h"
#include <stdio.h>

static bool computes(dw_op op) {
    return op == DW_OP_MULTIPLY_CODES || op == DW_OP_SEGMENT_MULTIPLY_CODES;
}

static bool computes_first(dw_op op) { return op == DW_OP_MULTIPLY_CODES; }

static bool is_segments(const dw__call *c) { return c->op == DW_OP_SEGMENT_MULTIPLY_CODES; }

/* ---- calls ----------------------------------------------------------------------------------------- */

/* Scales of blocks are square if they have three axes. */
static void set_blocks(const dw__call *c, dw__gemm_groups_call *s) {
    enum { BLOCKS_A = 4, BLOCKS_B };
    const dw__tensor *a = &c->inputs[BLOCKS_A], *b = &c->inputs[BLOCKS_B];
    s->codes.blocks = true;
    s->codes.scale_a = a->data;
    s->codes.scale_b = b->data;
    s->codes.square_a = a->rank == 3;
    s->codes.square_b = b->rank == 3;
    s->codes.wide_a = a->rank == 3 ? (int)(a->shape[1] * a->shape[2]) : 0;
    s->codes.wide_b = b->rank == 3 ? (int)(b->shape[1] * b->shape[2]) : 0;
}

static dw__gemm_groups_call call_of(const dw__operation_call *given) {
    enum { A, B, SCALE_A, SCALE_B, OFFSETS = 2, SEGMENT_SCALE_A, SEGMENT_SCALE_B };
    const dw__call *c = &given->call;
    const dw__tensor *a = &c->inputs[A], *b = &c->inputs[B], *y = &c->outputs[0],
                     *bias = dw__call_bias(c);
    const bool segments = is_segments(c);
    const dw__tensor *scale_a = &c->inputs[segments ? SEGMENT_SCALE_A : SCALE_A],
                     *scale_b = &c->inputs[segments ? SEGMENT_SCALE_B : SCALE_B];
    dw__gemm_groups_call s = {
        .gemm = {.struct_size = sizeof s.gemm,
                 .dtype = y->dtype == DW_F16 ? DW_F16 : DW_BF16,
                 .output = y->dtype,
                 .m = y->shape[0],
                 .n = y->shape[1],
                 .k = a->shape[1],
                 .alpha = 1.0f,
                 .a = {a->data, a->shape[1]},
                 .b = {b->data, b->shape[1]},
                 .d = {y->data, y->stride[0]},
                 .bias = bias ? bias->data : NULL,
                 .stream = given->stream},
        .groups = {.count = 1},
        .codes = {.a = a->dtype,
                  .b = b->dtype,
                  .fast = dw__call_int(c, DW_ATTR_KEY_FAST_ACCUMULATION, 0) != 0,
                  .row_scales = dw__call_has_row_scales(c),
                  .scale_a = scale_a->data,
                  .scale_b = scale_b->data}};
    if (!segments && dw__call_has_tiles(c)) set_blocks(c, &s);
    if (!segments) return s;
    s.groups.kind = DW_GROUPS_ROWS;
    s.groups.count = c->inputs[OFFSETS].shape[0] - 1;
    s.groups.offsets = c->inputs[OFFSETS].data;
    s.groups.error = given->error;
    s.codes.scale_b_each = scale_b->rank == 1;
    s.codes.side_by_side = a->shape[1] != b->shape[1];
    return s;
}

static bool is_aligned(const void *data) { return (uintptr_t)data % 16 == 0; }

static dw_status check_layout(const dw__kernel *kernel, const dw__call *c,
                              const dw__gemm_groups_call *s) {
    const int64_t row = s->gemm.n * (int64_t)dw_dtype_bytes(s->gemm.output);
    if (s->gemm.k % 16 != 0 || !is_aligned(s->gemm.a.data) || !is_aligned(s->gemm.b.data))
        return dw__fail(
            DW_UNSUPPORTED,
            "%s: rows of %lld codes; expected multiples of 16, at multiples of 16 bytes",
            kernel->name, (long long)s->gemm.k);
    if (row % 16 != 0 || !dw__tensor_is_contiguous(&c->outputs[0]) || !is_aligned(s->gemm.d.data))
        return dw__fail(DW_UNSUPPORTED,
                        "%s: rows of %lld bytes of the result; expected contiguous ones of a "
                        "multiple of 16 bytes",
                        kernel->name, (long long)row);
    for (int i = 2; i < 4; i++)
        if (dw__call_has_row_scales(c) && !dw__tensor_is_contiguous(&c->inputs[i]))
            return dw__fail(DW_UNSUPPORTED, "%s: expected contiguous scales of rows", kernel->name);
    const dw__tensor *bias = dw__call_bias(c);
    if (bias && (!dw__dtype_is_half(bias->dtype) || !dw__tensor_is_contiguous(bias)))
        return dw__fail(DW_UNSUPPORTED, "%s: expected a contiguous bias in 16 bits", kernel->name);
    const int64_t most = INT32_MAX - 1024; /* so that the edges of tiles fit, too */
    if (s->gemm.m > most || s->gemm.n > most || s->gemm.k > most || s->groups.count > most)
        return dw__fail(DW_UNSUPPORTED, "%s: expected sizes below 2^31 - 1024", kernel->name);
    return DW_OK;
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    if (gpu && gpu->capability != 90)
        return dw__fail(DW_TYPE, "%s is for sm_90a (H100, H200), not for %s", kernel->name,
                        gpu->name);
    if (dw__call_has_tiles(c) && !dw__call_has_f32_scales(c))
        return dw__fail(DW_TYPE, "%s multiplies codes with scales in F32", kernel->name);
    const dw__gemm_groups_call s = call_of(call);
    if (is_segments(c) && !dw__tensor_is_contiguous(&c->inputs[2]))
        return dw__fail(DW_UNSUPPORTED, "%s: expected contiguous offsets", kernel->name);
    return check_layout(kernel, c, &s);
}

/* Calls of the entry that comes before cuBLASLt: those that were measured faster. Where D has fewer tiles than the GPU has
 * SMs cuBLASLt splits the contraction. */
static dw_status supports_first(const dw__kernel *kernel, const void *call,
                                const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    if (dw__call_has_tiles(c) || dw__call_bias(c) ||
        !dw__call_int(c, DW_ATTR_KEY_FAST_ACCUMULATION, 0) ||
        !dw__dtype_is_half(c->outputs[0].dtype))
        return dw__fail(DW_TYPE,
                        "%s is for fast accumulation with scales of tensors or rows, a result in "
                        "16 bits and no bias",
                        kernel->name);
    DW_RETURN_IF_FAILED(supports(kernel, call, gpu));
    if (!gpu || dw__call_has_row_scales(c)) return DW_OK;
    const dw__gemm_groups_call s = call_of(call);
    const dw__sm90_shape shape = dw__sm90_shape_of(&s, gpu->sm_count);
    const int64_t tiles = dw__sm90_cost_of(&s, &shape, gpu->sm_count).tiles;
    if (tiles < gpu->sm_count)
        return dw__fail(DW_UNSUPPORTED, "%s: %lld tiles; expected at least %d, one for each SM",
                        kernel->name, (long long)tiles, gpu->sm_count);
    return DW_OK;
}

static void seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                    dw__kernel_seconds *result) {
    const dw__gemm_groups_call s = call_of(call);
    dw__kernel_seconds moved = {0};
    snprintf(result->from, sizeof result->from, "the least by counted work");
    if (dw__gemm_is_empty(&s.gemm) || s.gemm.k == 0 || s.groups.count == 0) return;
    const dw__sm90_shape shape = dw__sm90_shape_of(&s, gpu->sm_count);
    const dw__gemm_cost cost = dw__sm90_cost_of(&s, &shape, gpu->sm_count);
    const double clock = gpu->flops / (DW__SM90_FLOPS_PER_CLOCK * (double)gpu->sm_count);
    dw__gpu_seconds_of_bytes(kernel, call, gpu, &moved);
    result->seconds = cost.clocks / clock;
    if (result->seconds < moved.seconds) result->seconds = moved.seconds;
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__gemm_groups_call s = call_of(call);
    return dw__variant_of(context, kernel, dw__sm90_shape_of(&s, context->sm_count).params,
                          variant);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__gemm_groups_call s = call_of(call);
    if (dw__gemm_is_empty(&s.gemm) || s.groups.count == 0) return DW_OK;
    return dw__sm90_enqueue(&s, context, variant);
}

/* ---- the first-use check --------------------------------------------------------------------------- */

static dw_dtype code_type(uint64_t code) { return code == 1 ? DW_E4M3 : DW_E5M2; }

/* Groups that end within a tile, one of them empty, edges in every direction, and more steps of the contraction than a
 * ring has stages. The second trial of groups has matrices side by side and a scale for each. */
static void example(uint64_t params, int index, dw__call *c) {
    enum { GROUPS = 5, K = 912 };
    static const dw_attr attrs[][2] = {
#define TYPES(type)                                                                                \
    {                                                                                              \
        {.key = DW_ATTR_KEY_DTYPE, .integer = type}, {                                             \
            .key = DW_ATTR_KEY_FAST_ACCUMULATION, .integer = 1                                     \
        }                                                                                          \
    }
        TYPES(DW_BF16), TYPES(DW_F16), TYPES(DW_F32)
#undef TYPES
    };
    const dw__sm90_shape s = {.params = params};
    const bool segments = s.groups == DW_GROUPS_ROWS;
    const int type = s.output == DW_GEMM_OUTPUT_F32 ? 2 : s.f16 ? 1 : 0;
    const dw_dtype result = (dw_dtype)attrs[type][0].integer;
    const int64_t rows = 300 + 64 * index, n = 136 + 128 * index;
    dw__multiply_codes_example(code_type(s.codes_a), code_type(s.codes_b), result, rows, n, K, c);
    if (segments) {
        c->op = DW_OP_SEGMENT_MULTIPLY_CODES;
        c->input_count = 5;
        c->inputs[1] = (dw__tensor){.dtype = code_type(s.codes_b),
                                    .rank = 2,
                                    .shape = {index ? n : GROUPS * n, index ? GROUPS * K : K}};
        c->inputs[2] = (dw__tensor){.dtype = DW_I32, .rank = 1, .shape = {GROUPS + 1}};
        c->inputs[3] = (dw__tensor){.dtype = DW_F32};
        c->inputs[4] = (dw__tensor){.dtype = DW_F32, .rank = index, .shape = {GROUPS}};
        for (int i = 1; i < 5; i++) dw__tensor_set_contiguous(&c->inputs[i]);
    }
    if (s.blocks) dw__multiply_codes_add_blocks(c, s.square_a, s.square_b);
    for (int i = 0; s.row_scales && i < 2; i++) {
        c->inputs[2 + i] =
            (dw__tensor){.dtype = DW_F32, .rank = 1, .shape = {c->inputs[i].shape[0]}};
        dw__tensor_set_contiguous(&c->inputs[2 + i]);
    }
    c->attrs = attrs[type];
    c->attr_count = s.promote ? 1 : 2;
    if (s.bias) dw__multiply_codes_add_bias(c);
}

/* ---- entry ----------------------------------------------------------------------------------------- */

#define ENTRY(computed, supported, operations)                                                     \
    .backend = "deepwell", .kind = DW__CALL_OPERATION, .computes = computed,                       \
    .proof = DW__MEASURED_ON_HARDWARE, .operation = operations,                                    \
    .source = "cuda/sm90/sm90_gemm.cu", .architectures = "sm_90a (H100, H200)",                    \
    .elements = "E4M3, E5M2; the result BF16, F16, F32",                                           \
    .needs = "rows of a multiple of 16 codes, and of 16 bytes of the result",                      \
    .supports = supported, .seconds = seconds, .prepare = prepare, .enqueue = enqueue,             \
    .entry_points = dw__sm90_entry_points, .first_use = &dw__operation_first_use,                  \
    .example = example,                                                                            \
    .tolerance = "sums of 128 products in 14 bits, added in F32, rounded once; with fast "         \
                 "accumulation all sums in 14 bits",                                               \
    .tolerance_factor = 8.0

const dw__kernel dw__sm90_codes = {
    .name = "sm90_codes", ENTRY(computes, supports, "multiply_codes, segment_multiply_codes")};
/* Comes before cuBLASLt's. */
const dw__kernel dw__sm90_codes_fast = {
    .name = "sm90_codes_fast",
    ENTRY(computes_first, supports_first, "multiply_codes with fast accumulation")};
