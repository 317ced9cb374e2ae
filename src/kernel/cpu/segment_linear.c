/* Rows sorted by group, and each group's GEMM, in F32: group_rows, segment_linear and the gradient of its matrices.
 *
 * Each group has one GEMM over its rows, which lie together, so no row and no matrix is copied. Many rows are processed
 * in parts of ROWS, so that the scratch of a GEMM does not depend on the number of rows beyond that. */
#include "base/pool.h"
#include "kernel/cpu/cpu.h"
#include "kernel/cpu/cpu_matmul.h"
#include "kernel/kernel.h"
#include <inttypes.h>
#include <string.h>

enum { ROWS = 1024 }; /* of one GEMM */

/* ---- group_rows ---------------------------------------------------------------------------------- */

static int64_t integer_at(const dw__tensor *t, int64_t at) {
    return t->dtype == DW_I64 ? ((const int64_t *)t->data)[at * t->stride[0]]
                              : ((const int32_t *)t->data)[at * t->stride[0]];
}

static dw_status sort_supports(const dw__kernel *kernel, const void *given,
                               const dw__gpu_target *gpu) {
    (void)kernel, (void)given, (void)gpu;
    return DW_OK;
}

/* The next place of each group. */
static dw_status sort_scratch(const dw__kernel *kernel, const void *given,
                              const dw__context *context, size_t *bytes) {
    const dw__call *call = given;
    (void)kernel, (void)context;
    *bytes = (size_t)call->outputs[2].shape[0] * sizeof(int32_t);
    return DW_OK;
}

/* A stable counting sort. A result that nobody reads has no data. */
static dw_status sort_rows(const dw__call *call, void *scratch) {
    const dw__tensor *index = &call->inputs[0];
    int32_t *order = call->outputs[0].data, *place = call->outputs[1].data;
    int32_t *offsets = call->outputs[2].data, *next = scratch;
    const int64_t rows = index->shape[0], groups = call->outputs[2].shape[0] - 1;
    memset(next, 0, (size_t)(groups + 1) * sizeof *next);
    for (int64_t row = 0; row < rows; row++) {
        const int64_t group = integer_at(index, row);
        if (group < 0 || group >= groups)
            return dw__fail(DW_INDEX,
                            "%s: group %" PRId64 " of row %" PRId64 " is outside [0, %" PRId64
                            "); check the values fed as indices against the number of groups",
                            dw_op_name(call->op), group, row, groups);
        next[group + 1]++;
    }
    for (int64_t group = 0; group < groups; group++) next[group + 1] += next[group];
    if (offsets) memcpy(offsets, next, (size_t)(groups + 1) * sizeof *next);
    for (int64_t row = 0; row < rows; row++) {
        const int32_t at = next[integer_at(index, row)]++;
        if (order) order[at] = (int32_t)row;
        if (place) place[row] = at;
    }
    return DW_OK;
}

/* ---- offsets --------------------------------------------------------------------------------------- */

static int64_t offset_at(const dw__tensor *offsets, int64_t group) {
    return ((const int32_t *)offsets->data)[group * offsets->stride[0]];
}

static dw_status check_offsets(const dw__call *call, const dw__tensor *offsets, int64_t rows) {
    const int64_t groups = offsets->shape[0] - 1;
    for (int64_t group = 0; group <= groups; group++) {
        const int64_t at = offset_at(offsets, group),
                      before = group ? offset_at(offsets, group - 1) : 0;
        if (at >= before && at <= rows && (group > 0 || at == 0)) continue;
        return dw__fail(DW_INDEX,
                        "%s: offset %" PRId64 " is %" PRId64
                        "; expected offsets that ascend from 0 to "
                        "at most the number of rows, %" PRId64 ", as group_rows makes them",
                        dw_op_name(call->op), group, at, rows);
    }
    return DW_OK;
}

/* ---- segment_linear ---------------------------------------------------------------------------------- */

static bool rows_fit(const dw__tensor *t) {
    return t->dtype == DW_F32 && (t->shape[1] <= 1 || t->stride[1] == 1);
}

static dw_status linear_supports(const dw__kernel *kernel, const void *given,
                                 const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    const dw__tensor *w = &call->inputs[1], *b = dw__call_optional(call, 3);
    if (dw__call_gathers(call) || (b && !rows_fit(b))) return dw__kernel_refuse(kernel);
    return rows_fit(&call->inputs[0]) && w->dtype == DW_F32 &&
                   dw__tensor_is_contiguous(&call->outputs[0])
               ? DW_OK
               : dw__kernel_refuse(kernel);
}

static dw__matmul linear_gemm(const dw__call *call) {
    const dw__tensor *x = &call->inputs[0], *w = &call->inputs[1];
    bool transposed = dw__call_int(call, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0;
    return (dw__matmul){
        .n = call->outputs[0].shape[1],
        .k = x->shape[1],
        .batches = 1,
        .a_row = x->stride[0],
        .a_k = 1,
        .b_column = w->stride[transposed ? 1 : 2],
        .b_k = w->stride[transposed ? 2 : 1],
    };
}

/* Memory of GEMMs: their scratch, or what a library allocates. */
typedef size_t (*gemm_memory)(const dw__matmul *p, bool passing);

static size_t linear_gemm_bytes(const dw__call *call, gemm_memory of) {
    dw__matmul p = linear_gemm(call);
    size_t most = 0;
    for (p.m = 1; p.m <= dw__min64(call->inputs[0].shape[0], ROWS); p.m++) {
        size_t bytes = of(&p, false);
        if (bytes > most) most = bytes;
    }
    return most;
}

static dw_status linear_scratch(const dw__kernel *kernel, const void *given,
                                const dw__context *context, size_t *bytes) {
    (void)kernel, (void)context;
    *bytes = linear_gemm_bytes(given, dw__matmul_scratch);
    return DW_OK;
}

static size_t linear_library(const dw__call *call) {
    return linear_gemm_bytes(call, dw__matmul_library);
}

static dw_status linear_run(const dw__call *call, void *scratch) {
    const dw__tensor *x = &call->inputs[0], *w = &call->inputs[1], *offsets = &call->inputs[2];
    const dw__tensor *b = &call->inputs[3], *y = &call->outputs[0];
    bool biased = call->input_count > 3 && b->rank >= 0;
    DW_RETURN_IF_FAILED(check_offsets(call, offsets, x->shape[0]));
    if (!y->data || y->shape[1] == 0) return DW_OK;
    for (int64_t group = 0; group < w->shape[0]; group++) {
        const int64_t end = offset_at(offsets, group + 1);
        dw__matmul p = linear_gemm(call);
        p.b = (const float *)w->data + group * w->stride[0];
        p.bias = biased ? (const float *)b->data + group * b->stride[0] : NULL;
        for (int64_t row = offset_at(offsets, group); row < end; row += ROWS) {
            p.m = dw__min64(end - row, ROWS);
            p.a = (const float *)x->data + row * x->stride[0];
            p.c = (float *)y->data + row * y->shape[1];
            DW_RETURN_IF_FAILED(dw__matmul_run(&p, NULL, scratch));
        }
    }
    const int64_t grouped = offset_at(offsets, w->shape[0]);
    memset((float *)y->data + grouped * y->shape[1], 0,
           (size_t)((x->shape[0] - grouped) * y->shape[1]) * sizeof(float));
    return DW_OK;
}

/* ---- segment_linear_backward_weight -------------------------------------------------------------------- */

static dw_status weight_supports(const dw__kernel *kernel, const void *given,
                                 const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    return !dw__call_gathers(call) && rows_fit(&call->inputs[0]) && rows_fit(&call->inputs[1]) &&
                   dw__tensor_is_contiguous(&call->outputs[0])
               ? DW_OK
               : dw__kernel_refuse(kernel);
}

static dw__matmul weight_gemm(const dw__call *call) {
    const dw__tensor *x = &call->inputs[0], *y = &call->inputs[1];
    return (dw__matmul){.m = x->shape[1],
                        .n = y->shape[1],
                        .batches = 1,
                        .a_row = 1,
                        .a_k = x->stride[0],
                        .b_k = y->stride[0],
                        .b_column = 1};
}

static size_t weight_gemm_bytes(const dw__call *call, gemm_memory of) {
    dw__matmul p = weight_gemm(call);
    size_t most = 0;
    for (p.k = 1; p.k <= dw__min64(call->inputs[0].shape[0], ROWS); p.k++) {
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            p.accumulate = accumulate != 0;
            size_t bytes = of(&p, false);
            if (bytes > most) most = bytes;
        }
    }
    return most;
}

static dw_status weight_scratch(const dw__kernel *kernel, const void *given,
                                const dw__context *context, size_t *bytes) {
    (void)kernel, (void)context;
    *bytes = weight_gemm_bytes(given, dw__matmul_scratch);
    return DW_OK;
}

static size_t weight_library(const dw__call *call) {
    return weight_gemm_bytes(call, dw__matmul_library);
}

static dw_status weight_run(const dw__call *call, void *scratch) {
    const dw__tensor *x = &call->inputs[0], *y = &call->inputs[1], *offsets = &call->inputs[2];
    const bool adds = call->accumulates != DW__ADDS_NOTHING;
    const int64_t size = x->shape[1] * y->shape[1];
    DW_RETURN_IF_FAILED(check_offsets(call, offsets, x->shape[0]));
    if (!call->outputs[0].data || size == 0) return DW_OK;
    for (int64_t group = 0; group < call->outputs[0].shape[0]; group++) {
        const int64_t first = offset_at(offsets, group), end = offset_at(offsets, group + 1);
        dw__matmul p = weight_gemm(call);
        p.c = (float *)call->outputs[0].data + group * size;
        if (first == end && !adds) memset(p.c, 0, (size_t)size * sizeof(float));
        for (int64_t row = first; row < end; row += ROWS) {
            p.k = dw__min64(end - row, ROWS);
            p.accumulate = adds || row > first;
            p.a = (const float *)x->data + row * x->stride[0];
            p.b = (const float *)y->data + row * y->stride[0];
            DW_RETURN_IF_FAILED(dw__matmul_run(&p, NULL, scratch));
        }
    }
    return DW_OK;
}

/* ---- kernels ------------------------------------------------------------------------------------- */

/* The tolerance of the GEMMs (matmul.c). */
#define TOLERANCE 4.0

static const dw__kernel group_rows = {
    .name = "cpu.group_rows.counting",
    .op = DW_OP_GROUP_ROWS,
    .source = "ours, a counting sort",
    .needs = "any tensors",
    .supports = sort_supports,
    .workspace_bytes = sort_scratch,
    .run = sort_rows,
    .tolerance_factor = TOLERANCE,
};
static const dw__kernel segment_linear = {
    .name = "cpu.segment_linear.gemms",
    .op = DW_OP_SEGMENT_LINEAR,
    .source = "ours, one GEMM per group",
    .needs = "rows of F32, not by an index",
    .supports = linear_supports,
    .workspace_bytes = linear_scratch,
    .library_bytes = linear_library,
    .run = linear_run,
    .tolerance_factor = TOLERANCE,
};
static const dw__kernel segment_linear_backward_weight = {
    .name = "cpu.segment_linear_backward_weight.gemms",
    .op = DW_OP_SEGMENT_LINEAR_BACKWARD_WEIGHT,
    .source = "ours, one GEMM per group",
    .needs = "rows of F32, not by an index",
    .supports = weight_supports,
    .workspace_bytes = weight_scratch,
    .library_bytes = weight_library,
    .accumulates = DW__ADDS_TO_OUTPUT,
    .run = weight_run,
    .tolerance_factor = TOLERANCE,
};

const dw__kernel *const dw__kernels_cpu_groups[] = {&group_rows, &segment_linear,
                                                    &segment_linear_backward_weight, NULL};
