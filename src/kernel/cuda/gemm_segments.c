/* GEMMs of groups of rows whose bounds stay in device memory: the public calls. A call is one of segment_linear or of the
 * gradient of its matrices, and runs by the first kernel of the registry that supports it. */
#include "deepwell/gemm.h"
#include "kernel/cuda/gpu_kernels.h"
#include <stddef.h>
#include <stdio.h>
#include <string.h>

enum { MOST = 1 << 30 };

/* The rows of A or of B. */
static int64_t rows_of(const dw_segment_gemm *c, bool of_b) {
    return c->rows_in && (c->rows_in_of_b != 0) == of_b ? c->rows_in_count : c->rows;
}

static dw_status check(const dw_segment_gemm *c, bool launching) {
    static const char title[] = "segment GEMM";
    const dw__size_range sizes[] = {{"rows", c->rows, 0, MOST},
                                    {"groups", c->groups, 0, MOST},
                                    {"n", c->n, 0, MOST},
                                    {"k", c->k, 0, MOST},
                                    {"rows_in_count", c->rows_in_count, 0, MOST}};
    /* A matrix without elements needs no address. */
    const bool has_a = launching && rows_of(c, false) > 0 && c->rows > 0 && c->k > 0,
               has_b = launching && c->n > 0 &&
                       (c->contraction ? c->rows > 0 : c->groups > 0 && c->k > 0),
               has_d = launching && c->n > 0 &&
                       (c->contraction ? c->groups > 0 && c->k > 0 : c->rows > 0);
    const dw__address addresses[] = {{"a", c->a, dw_dtype_bytes(c->dtype), has_a},
                                     {"b", c->b, dw_dtype_bytes(c->dtype), has_b},
                                     {"d", c->d, dw_dtype_bytes(c->output), has_d},
                                     {"offsets", c->offsets, sizeof(int32_t), launching}};
    if (!dw__dtype_is_float(c->dtype))
        return dw__fail(DW_TYPE, "%s: the element type is %s; expected bf16, f16, f32 or f64",
                        title, dw_dtype_name(c->dtype));
    if (c->output != c->dtype && c->output != DW_F32)
        return dw__fail(DW_TYPE, "%s: D's element type is %s; expected %s or f32", title,
                        dw_dtype_name(c->output), dw_dtype_name(c->dtype));
    DW_RETURN_IF_FAILED(dw__check_sizes(title, sizes, DW_COUNT(sizes)));
    if (c->contraction ? c->rows_out || c->weights : c->rows_in_of_b)
        return dw__fail(
            DW_INVALID_ARGUMENT, "%s: %s is set with contraction %d; expected it %s", title,
            !c->contraction ? "rows_in_of_b"
            : c->rows_out   ? "rows_out"
                            : "weights",
            c->contraction, c->contraction ? "without contraction" : "with contraction");
    return dw__check_addresses(title, addresses, DW_COUNT(addresses));
}

static dw__tensor tensor_of(const void *data, dw_dtype dtype, int rank, const int64_t *shape) {
    dw__tensor t = {.data = (void *)data, .dtype = dtype, .rank = rank};
    memcpy(t.shape, shape, (size_t)rank * sizeof *shape);
    dw__tensor_set_contiguous(&t);
    return t;
}

/* Gives the call an operand of an element for each row; others in front of it that are not there yet are absent. */
static void add_rows(const dw_segment_gemm *c, const void *data, dw_dtype type, uint32_t at,
                     dw__call *call) {
    if (!data) return;
    for (; call->input_count <= at; call->input_count++)
        call->inputs[call->input_count] = (dw__tensor){.rank = -1};
    call->inputs[at] = tensor_of(data, type, 1, &c->rows);
}

static dw__operation_call plain_operation_of(const dw_segment_gemm *c) {
    static const dw_attr plain = {.key = DW_ATTR_KEY_TRANSPOSE_W, .integer = 0};
    const int64_t bounds = c->groups + 1;
    const dw__tensor offsets = tensor_of(c->offsets, DW_I32, 1, &bounds);
    if (c->contraction)
        return (dw__operation_call){
            .stream = c->stream,
            .call = {
                .op = DW_OP_SEGMENT_LINEAR_BACKWARD_WEIGHT,
                .input_count = 3,
                .output_count = 1,
                .inputs = {tensor_of(c->a, c->dtype, 2, (int64_t[]){rows_of(c, false), c->k}),
                           tensor_of(c->b, c->dtype, 2, (int64_t[]){rows_of(c, true), c->n}),
                           offsets},
                .outputs = {tensor_of(c->d, c->output, 3, (int64_t[]){c->groups, c->k, c->n})}}};
    return (dw__operation_call){
        .stream = c->stream,
        .call = {.op = DW_OP_SEGMENT_LINEAR,
                 .attr_count = c->plain_b ? 1 : 0,
                 .attrs = &plain,
                 .input_count = 3,
                 .output_count = 1,
                 .inputs = {tensor_of(c->a, c->dtype, 2, (int64_t[]){rows_of(c, false), c->k}),
                            tensor_of(c->b, c->dtype, 3,
                                      c->plain_b ? (int64_t[]){c->groups, c->k, c->n}
                                                 : (int64_t[]){c->groups, c->n, c->k}),
                            offsets},
                 .outputs = {tensor_of(c->d, c->output, 2, (int64_t[]){c->rows, c->n})}}};
}

static dw__operation_call operation_of(const dw_segment_gemm *c) {
    enum { X_ROWS = 3, Y_ROWS, ROWS = 4, PLACES, WEIGHTS };
    dw__operation_call made = plain_operation_of(c);
    add_rows(c, c->rows_in, DW_I32,
             !c->contraction   ? ROWS
             : c->rows_in_of_b ? Y_ROWS
                               : X_ROWS,
             &made.call);
    add_rows(c, c->rows_out, DW_I32, PLACES, &made.call);
    add_rows(c, c->weights, c->dtype, WEIGHTS, &made.call);
    return made;
}

/* A kernel that the first-use check refused leaves the call to the next one. */
static dw_status find(const dw_segment_gemm *c, const dw__operation_call *call,
                      const dw__context *context, const dw__variant **variant) {
    char name[DW__TARGET_NAME], reason[1024] = "";
    const dw__gpu_target gpu = dw__gpu_target_of(context, name);
    const dw__kernel *kernel = NULL;
    while ((kernel = dw__kernel_for(call, &gpu, kernel)) != NULL) {
        if (c->kernel && strcmp(c->kernel, kernel->name) != 0) continue;
        dw_status status = kernel->prepare(kernel, call, context, variant);
        if (status == DW_OK) status = dw__variant_status(*variant);
        if (status != DW_UNSUPPORTED) return status;
        if (!reason[0]) snprintf(reason, sizeof reason, "%s", dw_last_error());
    }
    if (reason[0]) return dw__fail(DW_UNSUPPORTED, "%s", reason);
    if (!c->kernel) return dw__kernel_fail_none(call, &gpu);
    return dw__fail(DW_UNSUPPORTED,
                    "kernel is \"%s\", which does not support this call on %s; expected NULL, or "
                    "another kernel of segment_linear (deepwell explain kernels)",
                    c->kernel, gpu.name);
}

static dw_status prepare(const dw_segment_gemm *given, bool launching, dw_segment_gemm *c,
                         dw__operation_call *call, const dw__context **context,
                         const dw__variant **variant) {
    static const dw__struct known = {
        "dw_segment_gemm", sizeof *given, {offsetof(dw_segment_gemm, rows_in)}};
    DW_RETURN_IF_FAILED(dw__struct_read(&known, given, c));
    DW_RETURN_IF_FAILED(check(c, launching));
    DW_RETURN_IF_FAILED(dw__gpu_context(c->device, "segment GEMM", context));
    *call = operation_of(c);
    dw_status status = find(c, call, *context, variant);
    if (status == DW_OK) return DW_OK;
    return dw__fail_prefix(status, "segment GEMM (rows %lld, groups %lld, n %lld, k %lld, %s)",
                           (long long)c->rows, (long long)c->groups, (long long)c->n,
                           (long long)c->k, dw_dtype_name(c->dtype));
}

dw_status dw_segment_gemm_run(const dw_segment_gemm *given) {
    dw_segment_gemm c;
    dw__operation_call call;
    const dw__context *context;
    const dw__variant *variant;
    DW_RETURN_IF_FAILED(prepare(given, true, &c, &call, &context, &variant));
    return variant->kernel->enqueue(&call, context, variant);
}

dw_status dw_segment_gemm_kernel(const dw_segment_gemm *given, const char **name) {
    dw_segment_gemm c;
    dw__operation_call call;
    const dw__context *context;
    const dw__variant *variant;
    if (!name) return dw__fail(DW_INVALID_ARGUMENT, "segment GEMM: name is NULL");
    *name = NULL;
    DW_RETURN_IF_FAILED(prepare(given, false, &c, &call, &context, &variant));
    *name = variant->kernel->name;
    return DW_OK;
}
