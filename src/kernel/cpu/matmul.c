/* matmul and linear in F32, and matmul of BF16 with F32 results: describes the call as one GEMM, and
 * registers the kernels. */
#include "kernel/cpu/cpu_matmul.h"
#include "kernel/cpu/head.h"
#include "kernel/library/onednn.h"
#include <stdio.h>

/* ---- calls as GEMMs -------------------------------------------------------------------------- */

/* Merges all axes but the last into one axis with an extent and a stride. Returns false if no single stride
 * covers them. */
static bool collapse_rows(const dw__tensor *tensor, int64_t *rows, int64_t *stride) {
    *rows = 1;
    *stride = 0;
    for (int axis = tensor->rank - 2; axis >= 0; axis--) {
        int64_t extent = tensor->shape[axis];
        if (extent == 1) continue;
        if (*rows == 1) {
            *stride = tensor->stride[axis];
        } else if (tensor->stride[axis] != *rows * *stride) {
            return false;
        }
        *rows *= extent;
    }
    return true;
}

static bool linear_product(const dw__call *call, dw__matmul *out) {
    const dw__tensor *x = &call->inputs[0], *w = &call->inputs[1], *bias = &call->inputs[2];
    bool transposed = dw__call_int(call, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0;
    *out = (dw__matmul){.batches = 1, .a = x->data, .b = w->data, .c = call->outputs[0].data};
    if (!collapse_rows(x, &out->m, &out->a_row)) return false;
    out->k = x->shape[x->rank - 1];
    out->a_k = x->stride[x->rank - 1];
    out->n = w->shape[transposed ? 0 : 1];
    out->b_column = w->stride[transposed ? 0 : 1];
    out->b_k = w->stride[transposed ? 1 : 0];
    if (call->input_count > 2 && bias->rank >= 0) {
        if (bias->dtype != DW_F32 || (bias->shape[0] > 1 && bias->stride[0] != 1)) return false;
        out->bias = bias->data;
    }
    return true;
}

static bool matmul_product(const dw__call *call, dw__matmul *out) {
    const dw__tensor *a = &call->inputs[0], *b = &call->inputs[1];
    int a_row = a->rank - 2, a_k = a->rank - 1, b_k = b->rank - 2, b_column = b->rank - 1;
    if (dw__call_int(call, DW_ATTR_KEY_TRANSPOSE_A, 0)) a_row = a->rank - 1, a_k = a->rank - 2;
    if (dw__call_int(call, DW_ATTR_KEY_TRANSPOSE_B, 0)) b_k = b->rank - 1, b_column = b->rank - 2;
    *out = (dw__matmul){
        .m = a->shape[a_row],
        .n = b->shape[b_column],
        .k = a->shape[a_k],
        .batches = 1,
        .bf16 = a->dtype == DW_BF16,
        .c = call->outputs[0].data,
        .a_row = a->stride[a_row],
        .a_k = a->stride[a_k],
        .b_k = b->stride[b_k],
        .b_column = b->stride[b_column],
        .batch_rank = a->rank - 2,
    };
    if (out->bf16)
        out->a_bf16 = a->data, out->b_bf16 = b->data;
    else
        out->a = a->data, out->b = b->data;
    for (int axis = 0; axis < out->batch_rank; axis++) {
        out->batch_shape[axis] = a->shape[axis];
        out->a_batch[axis] = a->stride[axis];
        out->b_batch[axis] = b->stride[axis];
        out->batches *= a->shape[axis];
    }
    return true;
}

static bool describe(const dw__call *call, dw__matmul *out) {
    dw_dtype dtype = call->inputs[0].dtype;
    bool narrow = call->op == DW_OP_MATMUL && dtype == DW_BF16;
    if (dtype != call->inputs[1].dtype || (dtype != DW_F32 && !narrow)) return false;
    if (call->outputs[0].dtype != DW_F32) return false;
    return call->op == DW_OP_LINEAR ? linear_product(call, out) : matmul_product(call, out);
}

/* ---- the best implementation ----------------------------------------------------------------- */

int64_t dw__matmul_batch_offset(const dw__matmul *p, const int64_t *strides, int64_t batch) {
    int64_t offset = 0;
    for (int axis = p->batch_rank - 1; axis >= 0; axis--) {
        offset += batch % p->batch_shape[axis] * strides[axis];
        batch /= p->batch_shape[axis];
    }
    return offset;
}

void dw__epilogue_fail(dw__epilogue *then, dw_status status) {
    int expected = 0;
    if (!atomic_compare_exchange_strong(&then->failed, &expected, 1)) return;
    then->status = status;
    snprintf(then->message, sizeof then->message, "%s", dw_last_error());
}

void dw__epilogue_run(dw__epilogue *then, int64_t row, int64_t rows, int64_t column,
                      int64_t columns, const float *tile, int64_t tile_stride) {
    if (!then->call) return;
    dw_status status = dw__fused_run_tile(then->call, row, rows, column, columns, then->replaced,
                                          tile, tile_stride);
    if (status != DW_OK) dw__epilogue_fail(then, status);
}

dw_status dw__epilogue_status(const dw__epilogue *then) {
    return atomic_load(&then->failed) ? dw__fail(then->status, "%s", then->message) : DW_OK;
}

size_t dw__matmul_scratch(const dw__matmul *p, bool passing) {
    if (dw__matmul_amx_supports(p, passing)) return dw__matmul_amx_scratch(p, passing);
    if (p->bf16) return dw__matmul_widened_scratch(p, passing);
    return dw__matmul_onednn_supports(p) ? dw__matmul_onednn_scratch(p, passing)
                                         : dw__matmul_packed_scratch(p, passing);
}

size_t dw__matmul_library(const dw__matmul *p, bool passing) {
    if (dw__matmul_amx_supports(p, passing)) return 0;
    if (p->bf16) return dw__matmul_widened_library(p, passing);
    return dw__matmul_onednn_supports(p) ? dw__matmul_onednn_library(p, passing) : 0;
}

dw_status dw__matmul_run(const dw__matmul *p, dw__epilogue *then, void *scratch) {
    dw__epilogue none = {0};
    if (!then) then = &none;
    if (dw__matmul_amx_supports(p, !p->c)) {
        dw__matmul_amx_run(p, then, scratch);
    } else if (p->bf16) {
        return dw__matmul_widened_run(p, then, scratch);
    } else if (dw__matmul_onednn_supports(p)) {
        dw__matmul_onednn_run(p, then, scratch);
    } else {
        dw__matmul_packed_run(p, then, scratch);
    }
    return dw__epilogue_status(then);
}

/* ---- kernels --------------------------------------------------------------------------------- */

static dw_status misfit(const dw__call *call) {
    return dw__fail(DW_INTERNAL, "a CPU GEMM kernel does not support this call of %s",
                    dw_op_name(call->op));
}

static dw_status packed_supports(const dw__kernel *kernel, const void *given,
                                 const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    dw__matmul p;
    return describe(call, &p) && !p.bf16 ? DW_OK : dw__kernel_refuse(kernel);
}

static dw_status packed_scratch(const dw__kernel *kernel, const void *given,
                                const dw__context *context, size_t *bytes) {
    const dw__call *call = given;
    (void)kernel, (void)context;
    dw__matmul p;
    *bytes = describe(call, &p) ? dw__matmul_packed_scratch(&p, false) : 0;
    return DW_OK;
}

static dw_status packed_run(const dw__call *call, void *scratch) {
    dw__matmul p;
    dw__epilogue none = {0};
    if (!describe(call, &p)) return misfit(call);
    dw__matmul_packed_run(&p, &none, scratch);
    return dw__epilogue_status(&none);
}

static dw_status widened_supports(const dw__kernel *kernel, const void *given,
                                  const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    dw__matmul p;
    return describe(call, &p) && p.bf16 ? DW_OK : dw__kernel_refuse(kernel);
}

static dw_status widened_scratch(const dw__kernel *kernel, const void *given,
                                 const dw__context *context, size_t *bytes) {
    const dw__call *call = given;
    (void)kernel, (void)context;
    dw__matmul p;
    *bytes = describe(call, &p) ? dw__matmul_widened_scratch(&p, false) : 0;
    return DW_OK;
}

static size_t widened_library(const dw__call *call) {
    dw__matmul p;
    return describe(call, &p) ? dw__matmul_widened_library(&p, false) : 0;
}

static dw_status widened_run(const dw__call *call, void *scratch) {
    dw__matmul p;
    dw__epilogue none = {0};
    if (!describe(call, &p)) return misfit(call);
    return dw__matmul_widened_run(&p, &none, scratch);
}

static dw_status amx_supports(const dw__kernel *kernel, const void *given,
                              const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    dw__matmul p;
    return describe(call, &p) && !p.bf16 && dw__matmul_amx_supports(&p, false)
               ? DW_OK
               : dw__kernel_refuse(kernel);
}

static dw_status amx_bf16_supports(const dw__kernel *kernel, const void *given,
                                   const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    dw__matmul p;
    return describe(call, &p) && p.bf16 && dw__matmul_amx_supports(&p, false)
               ? DW_OK
               : dw__kernel_refuse(kernel);
}

static dw_status amx_scratch(const dw__kernel *kernel, const void *given,
                             const dw__context *context, size_t *bytes) {
    const dw__call *call = given;
    (void)kernel, (void)context;
    dw__matmul p;
    *bytes = describe(call, &p) ? dw__matmul_amx_scratch(&p, false) : 0;
    return DW_OK;
}

static dw_status amx_run(const dw__call *call, void *scratch) {
    dw__matmul p;
    dw__epilogue none = {0};
    if (!describe(call, &p)) return misfit(call);
    dw__matmul_amx_run(&p, &none, scratch);
    return dw__epilogue_status(&none);
}

static dw_status onednn_supports(const dw__kernel *kernel, const void *given,
                                 const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    dw__matmul p;
    return describe(call, &p) && !p.bf16 && dw__matmul_onednn_supports(&p)
               ? DW_OK
               : dw__kernel_refuse(kernel);
}

static size_t onednn_library(const dw__call *call) {
    dw__matmul p;
    return describe(call, &p) ? dw__matmul_onednn_library(&p, false) : 0;
}

static dw_status onednn_run(const dw__call *call, void *scratch) {
    dw__matmul p;
    dw__epilogue none = {0};
    if (!describe(call, &p)) return misfit(call);
    dw__matmul_onednn_run(&p, &none, scratch);
    return dw__epilogue_status(&none);
}

/* A tile is the same rows and columns of both tensors, however their rows are split into axes. */
static bool epilogue_fits(const dw__call *call) {
    const dw__call *then = call->epilogue;
    if (then->output_count == 0) return false;
    const dw__tensor *y = &call->outputs[0], *shape = &then->outputs[0];
    if (y->rank < 1 || shape->rank < 1 || dw__tensor_count(y) != dw__tensor_count(shape) ||
        y->shape[y->rank - 1] != shape->shape[shape->rank - 1])
        return false;
    return dw__fused_fits_tile(then, call->replaced);
}

static dw_status epilogue_supports(const dw__kernel *kernel, const void *given,
                                   const dw__gpu_target *gpu) {
    const dw__call *call = given;
    dw__matmul p;
    (void)gpu;
    return call->epilogue && describe(call, &p) && epilogue_fits(call) ? DW_OK
                                                                       : dw__kernel_refuse(kernel);
}

/* Whether the GEMM's result is stored is known only when data is placed, so this reserves scratch for either case. */
static dw_status epilogue_scratch(const dw__kernel *kernel, const void *given,
                                  const dw__context *context, size_t *bytes) {
    dw__matmul p;
    (void)kernel, (void)context;
    if (!describe(given, &p)) return DW_OK;
    size_t kept = dw__matmul_scratch(&p, false), passing = dw__matmul_scratch(&p, true);
    *bytes = kept > passing ? kept : passing;
    return DW_OK;
}

static size_t epilogue_library(const dw__call *call) {
    dw__matmul p;
    if (!describe(call, &p)) return 0;
    size_t kept = dw__matmul_library(&p, false), passing = dw__matmul_library(&p, true);
    return kept > passing ? kept : passing;
}

static dw_status epilogue_run(const dw__call *call, void *scratch) {
    dw__matmul p;
    dw__epilogue epilogue = {.call = call->epilogue, .replaced = call->replaced};
    if (!describe(call, &p)) return misfit(call);
    return dw__matmul_run(&p, &epilogue, scratch);
}

/* The error of an F32 sum of n products grows about with the root of n for random data. Blocks of K and lanes only
 * shorten the chains. */
#define DW_GEMM_TOLERANCE 4.0

static const dw__kernel matmul_amx = {
    .name = "cpu.matmul.amx",
    .op = DW_OP_MATMUL,
    .source = "ours, F32 as six BF16 GEMMs on AMX",
    .needs = "AMX, F32, and sizes that fill its tiles",
    .supports = amx_supports,
    .workspace_bytes = amx_scratch,
    .run = amx_run,
    .tolerance_factor = DW_GEMM_TOLERANCE,
};
static const dw__kernel matmul_amx_bf16 = {
    .name = "cpu.matmul.amx_bf16",
    .op = DW_OP_MATMUL,
    .source = "ours, BF16 on AMX",
    .needs = "AMX, BF16 to F32, and sizes that fill its tiles",
    .supports = amx_bf16_supports,
    .workspace_bytes = amx_scratch,
    .run = amx_run,
    .tolerance_factor = DW_GEMM_TOLERANCE,
};
static const dw__kernel matmul_widened = {
    .name = "cpu.matmul.widened",
    .op = DW_OP_MATMUL,
    .source = "ours, BF16 copied to F32",
    .needs = "BF16 to F32",
    .supports = widened_supports,
    .workspace_bytes = widened_scratch,
    .library_bytes = widened_library,
    .run = widened_run,
    .tolerance_factor = DW_GEMM_TOLERANCE,
};
static const dw__kernel linear_amx = {
    .name = "cpu.linear.amx",
    .op = DW_OP_LINEAR,
    .source = "ours, F32 as six BF16 GEMMs on AMX",
    .needs = "AMX, F32, and sizes that fill its tiles",
    .supports = amx_supports,
    .workspace_bytes = amx_scratch,
    .run = amx_run,
    .tolerance_factor = DW_GEMM_TOLERANCE,
};
static const dw__kernel matmul_onednn = {
    .name = "cpu.matmul.onednn",
    .op = DW_OP_MATMUL,
    .source = "oneDNN sgemm on tiles",
    .needs = "oneDNN, F32, and a layout and size that it is fast at",
    .supports = onednn_supports,
    .library_bytes = onednn_library,
    .run = onednn_run,
    .tolerance_factor = DW_GEMM_TOLERANCE,
};
static const dw__kernel linear_onednn = {
    .name = "cpu.linear.onednn",
    .op = DW_OP_LINEAR,
    .source = "oneDNN sgemm on tiles",
    .needs = "oneDNN, F32, and a layout and size that it is fast at",
    .supports = onednn_supports,
    .library_bytes = onednn_library,
    .run = onednn_run,
    .tolerance_factor = DW_GEMM_TOLERANCE,
};
static const dw__kernel matmul_packed = {
    .name = "cpu.matmul.packed",
    .op = DW_OP_MATMUL,
    .source = "ours, C with vector extensions",
    .needs = "F32, and rows at one distance",
    .supports = packed_supports,
    .workspace_bytes = packed_scratch,
    .run = packed_run,
    .tolerance_factor = DW_GEMM_TOLERANCE,
};
static const dw__kernel linear_packed = {
    .name = "cpu.linear.packed",
    .op = DW_OP_LINEAR,
    .source = "ours, C with vector extensions",
    .needs = "F32, and rows at one distance",
    .supports = packed_supports,
    .workspace_bytes = packed_scratch,
    .run = packed_run,
    .tolerance_factor = DW_GEMM_TOLERANCE,
};

static const dw__kernel matmul_epilogue = {
    .name = "cpu.gemm",
    .op = DW_OP_MATMUL,
    .source = "the GEMM above that suits the call",
    .needs = "F32, rows at one distance, and a program over the result's rows and columns",
    .supports = epilogue_supports,
    .workspace_bytes = epilogue_scratch,
    .library_bytes = epilogue_library,
    .run = epilogue_run,
    .with_epilogue = true,
    .tolerance_factor = DW_GEMM_TOLERANCE,
};
static const dw__kernel linear_epilogue = {
    .name = "cpu.gemm",
    .op = DW_OP_LINEAR,
    .source = "the GEMM above that suits the call",
    .needs = "F32, rows at one distance, and a program over the result's rows and columns",
    .supports = epilogue_supports,
    .workspace_bytes = epilogue_scratch,
    .library_bytes = epilogue_library,
    .run = epilogue_run,
    .with_epilogue = true,
    .tolerance_factor = DW_GEMM_TOLERANCE,
};

const dw__kernel *const dw__kernels_cpu_matmul[] = {&matmul_amx,
                                                    &matmul_amx_bf16,
                                                    &linear_amx,
                                                    &matmul_onednn,
                                                    &linear_onednn,
                                                    &matmul_packed,
                                                    &linear_packed,
                                                    &matmul_widened,
                                                    &matmul_epilogue,
                                                    &linear_epilogue,
                                                    &dw__linear_cross_entropy_blocks,
                                                    &dw__linear_cross_entropy_backward_blocks,
                                                    &dw__linear_cross_entropy_backward_amx,
                                                    &dw__linear_cross_entropy_backward_chunked,
                                                    NULL};
