/* Linear layers and matrix multiplications of a graph, by the GEMM kernels (gemm.c): their call is made from the
 * operation's. The kernels read both operands along k, so they compute linear(x, w [N,K], b) and matmul(a, b [N,K];
 * transpose_b=1); other layouts are left to gpu_matmul.c. Codes with scales of blocks always lie that way.
 */
#include "kernel/cuda/gpu_gemm.h"
#include "kernel/cuda/gpu_kernels.h"

/* The rows of a tensor along its last axis, as a matrix. False if they do not lie at one distance. */
static bool matrix_of(const dw__tensor *t, dw_matrix *m) {
    m->data = t->data;
    return t->rank > 0 && dw__tensor_row_stride(t, &m->stride);
}

static bool is_linear(const dw__call *c) { return c->op == DW_OP_LINEAR; }

/* False: the operation is laid out in a way that no GEMM kernel reads. */
static bool call_of(const dw__operation_call *given, dw_gemm *g) {
    const dw__call *c = &given->call;
    const dw__tensor *a = &c->inputs[0], *b = &c->inputs[1], *y = &c->outputs[0];
    *g = (dw_gemm){.struct_size = sizeof *g,
                   .dtype = a->dtype,
                   .output = y->dtype,
                   .alpha = 1.0f,
                   .stream = given->stream};
    const bool along_k = is_linear(c) ? dw__call_int(c, DW_ATTR_KEY_TRANSPOSE_W, 1) == 1
                                      : dw__call_int(c, DW_ATTR_KEY_TRANSPOSE_A, 0) == 0 &&
                                            dw__call_int(c, DW_ATTR_KEY_TRANSPOSE_B, 0) == 1;
    if (!along_k || b->rank != 2 || (!is_linear(c) && a->rank != 2)) return false;
    if (!matrix_of(a, &g->a) || !matrix_of(b, &g->b) || !matrix_of(y, &g->d)) return false;
    g->k = b->shape[1];
    g->n = b->shape[0];
    g->m = g->n ? dw__tensor_count(y) / g->n : 0;
    const dw__tensor *bias = &c->inputs[2];
    if (is_linear(c) && bias->rank >= 0) {
        if (!dw__tensor_is_contiguous(bias)) return false;
        g->bias = bias->data;
    }
    return g->m > 0 && g->n > 0 && g->k > 0;
}

static bool computes(dw_op op) { return op == DW_OP_LINEAR || op == DW_OP_MATMUL; }

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__operation_call *given = call;
    dw_gemm g;
    DW_RETURN_IF_FAILED(dw__gpu_kernel_computes(kernel, &given->call, gpu));
    if (!call_of(given, &g))
        return dw__fail(
            DW_UNSUPPORTED,
            "%s: expected both operands with contiguous rows along k, and sizes above 0",
            kernel->name);
    return dw__sm100_gemm.supports(&dw__sm100_gemm, &g, gpu);
}

static void seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                    dw__kernel_seconds *result) {
    dw_gemm g;
    (void)kernel;
    if (call_of(call, &g)) dw__sm100_gemm.seconds(&dw__sm100_gemm, &g, gpu, result);
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    dw_gemm g;
    (void)kernel;
    (void)call_of(call, &g);
    return dw__sm100_gemm.prepare(&dw__sm100_gemm, &g, context, variant);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    dw_gemm g;
    (void)call_of(call, &g);
    return dw__sm100_gemm.enqueue(&g, context, variant);
}

const dw__kernel dw__graph_gemm = {
    .name = "gemm",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .computes = computes,
    .proof = DW__PROVEN_ON_EMULATOR,
    .operation = "linear, and matmul with transpose_b",
    .source = "src/kernel/cuda/graph_gemm.c",
    .architectures = "sm_100f (B200, B300)",
    .elements = "BF16, F16; the result also F32",
    .needs = "contiguous rows along k, of 16-byte multiples",
    .supports = supports,
    .seconds = seconds,
    .prepare = prepare,
    .enqueue = enqueue,
    /* No first-use check: the kernels that it calls have theirs. */
    .tolerance = "sums in F32, then the result's rounding, against FP64",
};

/* ---- codes with scales of blocks ------------------------------------------------------------------ */

static dw_scheme scheme_of(const dw__tensor *codes, const dw__tensor *tiles) {
    if (tiles->dtype == DW_UE4M3) return DW_SCHEME_NVFP4;
    return codes->dtype == DW_E2M1   ? DW_SCHEME_MXFP4
           : codes->dtype == DW_E5M2 ? DW_SCHEME_MXFP8_E5M2
                                     : DW_SCHEME_MXFP8;
}

/* Rows of codes are whole: what follows the last element is zeros, which k includes. */
static dw_gemm scaled_call_of(const dw__operation_call *given) {
    enum { A, B, SCALE_A, SCALE_B, TILES_A, TILES_B };
    const dw__tensor *in = given->call.inputs, *y = &given->call.outputs[0];
    const int64_t *k = &in[A].shape[1];
    return (dw_gemm){.struct_size = sizeof(dw_gemm),
                     .dtype = y->dtype == DW_F16 ? DW_F16 : DW_BF16,
                     .output = y->dtype,
                     .m = y->shape[0],
                     .n = y->shape[1],
                     .k = *k,
                     .alpha = 1.0f,
                     .a = {in[A].data, dw_tensor_bytes(in[A].dtype, 1, k)},
                     .b = {in[B].data, dw_tensor_bytes(in[B].dtype, 1, k)},
                     .d = {y->data, y->shape[1]},
                     .quantized = 1,
                     .scheme_a = scheme_of(&in[A], &in[TILES_A]),
                     .scheme_b = scheme_of(&in[B], &in[TILES_B]),
                     .scales_a = in[TILES_A].data,
                     .scales_b = in[TILES_B].data,
                     .factor_a = in[SCALE_A].rank < 0 ? NULL : in[SCALE_A].data,
                     .factor_b = in[SCALE_B].rank < 0 ? NULL : in[SCALE_B].data,
                     .stream = given->stream};
}

static dw_status scaled_supports(const dw__kernel *kernel, const void *call,
                                 const dw__gpu_target *gpu) {
    const dw__operation_call *given = call;
    if (!dw__call_has_tiles(&given->call))
        return dw__fail(DW_TYPE, "%s multiplies codes with scales of blocks", kernel->name);
    if (gpu && !dw__gpu_is_blackwell(gpu->capability))
        return dw__fail(DW_TYPE, "%s is for %s, not for %s", kernel->name, kernel->architectures,
                        gpu->name);
    const dw_gemm g = scaled_call_of(given);
    return dw__gemm_check(&g, false);
}

static void scaled_seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                           dw__kernel_seconds *result) {
    const dw_gemm g = scaled_call_of(call);
    (void)kernel;
    dw__sm100_gemm_scaled.seconds(&dw__sm100_gemm_scaled, &g, gpu, result);
}

static dw_status scaled_prepare(const dw__kernel *kernel, const void *call,
                                const dw__context *context, const dw__variant **variant) {
    const dw_gemm g = scaled_call_of(call);
    (void)kernel;
    return dw__sm100_gemm_scaled.prepare(&dw__sm100_gemm_scaled, &g, context, variant);
}

static dw_status scaled_enqueue(const void *call, const dw__context *context,
                                const dw__variant *variant) {
    const dw_gemm g = scaled_call_of(call);
    return dw__gemm_is_empty(&g) ? DW_OK : dw__sm100_gemm_scaled.enqueue(&g, context, variant);
}

const dw__kernel dw__graph_gemm_scaled = {
    .name = "gemm_scaled",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .op = DW_OP_MULTIPLY_CODES,
    .proof = DW__PROVEN_ON_EMULATOR,
    .operation = "multiply_codes with scales of blocks",
    .source = "src/kernel/cuda/graph_gemm.c",
    .architectures = "sm_100f (B200, B300)",
    .elements = "codes of MXFP8, MXFP4, NVFP4; the result BF16, F16, F32",
    .needs = "rows of the result of 16-byte multiples",
    .supports = scaled_supports,
    .seconds = scaled_seconds,
    .prepare = scaled_prepare,
    .enqueue = scaled_enqueue,
    /* No first-use check: the kernels that it calls have theirs. */
    .tolerance = "sums in F32, then the result's rounding, against FP64",
};
