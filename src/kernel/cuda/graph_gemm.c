/* Linear layers and matrix multiplications of a graph, by the GEMM kernels (gemm.c, sm90_gemm.c, sm120_gemm.c): their
 * call is made from the operation's. They compute linear(x, w [N,K], b) and matmul(a, b [N,K]; transpose_b=1), and read
 * operands whose rows run across k, which the gradients of a linear layer have. Other layouts and batches are left to
 * gpu_matmul.c.
 * There are several entries. On Hopper cuBLASLt comes before ours and leaves it the products that ours was measured to
 * compute faster (lt_algorithm.h). On sm_100f it comes before our GEMMs of operands across k alone.
 * Codes with scales of blocks always lie along k.
 */
#include "kernel/cuda/gpu_gemm.h"
#include "kernel/cuda/gpu_kernels.h"

typedef struct graph_call {
    dw_gemm gemm;
    dw__gemm_turned turned;
} graph_call;

/* The rows of a tensor along its last axis, as a matrix. False if they do not lie at one distance. */
static bool matrix_of(const dw__tensor *t, dw_matrix *m) {
    m->data = t->data;
    return t->rank > 0 && dw__tensor_row_stride(t, &m->stride);
}

/* An operand of rank 2 whose rows or columns are contiguous. `k_axis`: the axis of the contraction. */
static bool operand_of(const dw__tensor *t, int k_axis, dw_matrix *m, bool *turned) {
    const int row_axis = 1 - k_axis;
    m->data = t->data;
    *turned = t->shape[k_axis] > 1 && t->stride[k_axis] != 1;
    m->stride = t->stride[*turned ? k_axis : row_axis];
    return !*turned || t->shape[row_axis] == 1 || t->stride[row_axis] == 1;
}

static bool is_linear(const dw__call *c) { return c->op == DW_OP_LINEAR; }

/* The operands of `linear`: x of any rank, and w. */
static bool linear_operands(const dw__call *c, graph_call *g) {
    const dw__tensor *w = &c->inputs[1], *bias = &c->inputs[2];
    const int k_axis = dw__call_int(c, DW_ATTR_KEY_TRANSPOSE_W, 1) == 1 ? 1 : 0;
    if (!matrix_of(&c->inputs[0], &g->gemm.a)) return false;
    if (!operand_of(w, k_axis, &g->gemm.b, &g->turned.b)) return false;
    g->gemm.k = w->shape[k_axis];
    g->gemm.n = w->shape[1 - k_axis];
    if (bias->rank < 0) return true;
    g->gemm.bias = bias->data;
    return dw__tensor_is_contiguous(bias);
}

static bool matmul_operands(const dw__call *c, graph_call *g) {
    const dw__tensor *a = &c->inputs[0], *b = &c->inputs[1];
    const int a_axis = dw__call_int(c, DW_ATTR_KEY_TRANSPOSE_A, 0) == 0 ? 1 : 0,
              b_axis = dw__call_int(c, DW_ATTR_KEY_TRANSPOSE_B, 0) == 0 ? 0 : 1;
    g->gemm.k = b->shape[b_axis];
    g->gemm.n = b->shape[1 - b_axis];
    return a->rank == 2 && operand_of(a, a_axis, &g->gemm.a, &g->turned.a) &&
           operand_of(b, b_axis, &g->gemm.b, &g->turned.b);
}

/* False: the operation is laid out in a way that no GEMM kernel reads. */
static bool call_of(const dw__operation_call *given, graph_call *g) {
    const dw__call *c = &given->call;
    const dw__tensor *a = &c->inputs[0], *b = &c->inputs[1], *y = &c->outputs[0],
                     *addend = dw__call_addend(c);
    *g = (graph_call){.gemm = {.struct_size = sizeof g->gemm,
                               .dtype = a->dtype,
                               .output = y->dtype,
                               .alpha = 1.0f,
                               .workspace = given->workspace,
                               .stream = given->stream}};
    if (b->rank != 2 || !(is_linear(c) ? linear_operands(c, g) : matmul_operands(c, g)))
        return false;
    if (!matrix_of(y, &g->gemm.d)) return false;
    if (addend && !matrix_of(addend, &g->gemm.residual)) return false;
    g->gemm.m = g->gemm.n ? dw__tensor_count(y) / g->gemm.n : 0;
    return g->gemm.m > 0 && g->gemm.n > 0 && g->gemm.k > 0;
}

bool dw__graph_gemm_call(const dw__operation_call *given, dw__gemm_groups_call *call) {
    graph_call g;
    if (!call_of(given, &g)) return false;
    *call = dw__gemm_single(&g.gemm, g.turned);
    return true;
}

static bool computes(dw_op op) { return op == DW_OP_LINEAR || op == DW_OP_MATMUL; }

static dw_status prepare_on(const graph_call *g, const dw__context *context,
                            const dw__variant **variant) {
    if (context->capability == 90) {
        dw_gemm gemm = g->gemm;
        gemm.workspace_bytes = dw__sm90_workspace(&gemm, g->turned, context);
        return dw__sm90_prepare(&gemm, g->turned, context, variant);
    }
    if (dw__gpu_is_blackwell(context->capability))
        return dw__sm100_prepare(&g->gemm, g->turned, context, variant);
    return dw__sm120_prepare(&g->gemm, g->turned, context, variant);
}

/* DW_OK if the kernel computes the GEMM. Nothing is measured: the sizes may be those of a question. */
static dw_status runs_on(const graph_call *g, const dw__context *context) {
    const dw__gemm_groups_call c = dw__gemm_single(&g->gemm, g->turned);
    const dw__variant *variant;
    DW_RETURN_IF_FAILED(context->capability == 90
                            ? dw__variant_of(context, &dw__sm90_gemm,
                                             dw__sm90_shape_of(&c, context->sm_count).params,
                                             &variant)
                            : prepare_on(g, context, &variant));
    return dw__variant_status(variant);
}

/* Whether the entry's GEMM kernel supports the call. */
static dw_status gemm_supports(const dw__kernel *kernel, const graph_call *g,
                               const dw__gpu_target *gpu) {
    const bool turned = g->turned.a || g->turned.b;
    if (kernel == &dw__graph_gemm_hopper) return dw__sm90_supports(&g->gemm, g->turned, gpu);
    if (kernel == &dw__graph_gemm_turned) {
        if (turned) return dw__sm100_supports(&g->gemm, g->turned, gpu);
        return dw__fail(DW_UNSUPPORTED, "%s: expected an operand with contiguous rows across k",
                        kernel->name);
    }
    if (!gpu || dw__gpu_is_rtx_blackwell(gpu->capability))
        return dw__sm120_supports(&g->gemm, g->turned, gpu);
    if (turned)
        return dw__fail(DW_UNSUPPORTED, "%s: expected operands with contiguous rows along k",
                        kernel->name);
    return dw__sm100_gemm.supports(&dw__sm100_gemm, &g->gemm, gpu);
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__operation_call *given = call;
    graph_call g;
    DW_RETURN_IF_FAILED(dw__gpu_kernel_computes(kernel, &given->call, gpu));
    if (!call_of(given, &g))
        return dw__fail(DW_UNSUPPORTED,
                        "%s: expected two operands, each with contiguous rows along k or across "
                        "it, and sizes above 0",
                        kernel->name);
    DW_RETURN_IF_FAILED(gemm_supports(kernel, &g, gpu));
    /* `linear` is expanded unless this kernel, or a library's, is sure to run. */
    if (!is_linear(&given->call) || !gpu || !gpu->context || gpu->context->plans_only) return DW_OK;
    return runs_on(&g, gpu->context);
}

static void seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                    dw__kernel_seconds *result) {
    graph_call g;
    if (!call_of(call, &g)) return;
    const dw__kernel *by = dw__gemm_kernel_on(&g.gemm, gpu->capability);
    if (kernel == &dw__graph_gemm_hopper)
        g.gemm.workspace_bytes = SIZE_MAX; /* as much as the fastest tile needs */
    by->seconds(by, &g.gemm, gpu, result);
}

static dw_status hopper_workspace(const dw__kernel *kernel, const void *call,
                                  const dw__context *context, size_t *bytes) {
    graph_call g;
    (void)kernel;
    (void)call_of(call, &g);
    *bytes = dw__sm90_workspace(&g.gemm, g.turned, context);
    return DW_OK;
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    graph_call g;
    (void)kernel;
    (void)call_of(call, &g);
    return prepare_on(&g, context, variant);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    graph_call g;
    (void)call_of(call, &g);
    return variant->kernel->enqueue(&g.gemm, context, variant);
}

/* No first-use check: the kernels that these call have theirs. */
#define GRAPH_GEMM                                                                                 \
    .backend = "deepwell", .kind = DW__CALL_OPERATION, .computes = computes,                       \
    .source = "src/kernel/cuda/graph_gemm.c", .elements = "BF16, F16; the result also F32",        \
    .supports = supports, .seconds = seconds, .prepare = prepare, .enqueue = enqueue,              \
    .accumulates = DW__ADDS_TO_ADDEND, .results = DW__RESULTS_IN_ROWS,                             \
    .tolerance = "sums in F32, then the result's rounding, against FP64"
const dw__kernel dw__graph_gemm = {
    GRAPH_GEMM,
    .name = "gemm",
    .proof = DW__PROVEN_ON_EMULATOR,
    .operation = "linear, and matmul with transpose_b",
    .architectures = "sm_100f (B200, B300), sm_120a (RTX 50, RTX PRO)",
    .needs = "contiguous rows along k, on sm_120a also across it, of 16-byte multiples",
};
const dw__kernel dw__graph_gemm_turned = {
    GRAPH_GEMM,
    .name = "gemm_turned",
    .proof = DW__PROVEN_ON_EMULATOR,
    .operation = "linear and matmul with operands across k, where there is no cuBLASLt",
    .architectures = "sm_100f (B200, B300)",
    .needs = "contiguous rows along k or across it, of 16-byte multiples",
};
const dw__kernel dw__graph_gemm_hopper = {
    GRAPH_GEMM,
    .name = "sm90_linear",
    .proof = DW__MEASURED_ON_HARDWARE,
    .workspace_bytes = hopper_workspace,
    .operation = "linear and matmul, where cuBLASLt is absent or slower",
    .architectures = "sm_90a (H100, H200)",
    .needs = "contiguous rows along k or across it, of 16-byte multiples",
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
    const dw__tensor *in = given->call.inputs, *y = &given->call.outputs[0],
                     *bias = dw__call_bias(&given->call);
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
                     .bias = bias ? bias->data : NULL,
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
    if (!dw__call_has_tiles(&given->call) || dw__call_has_f32_scales(&given->call))
        return dw__fail(DW_TYPE, "%s multiplies codes with scales of blocks of one byte",
                        kernel->name);
    if (gpu && !dw__gpu_is_blackwell(gpu->capability) && !dw__gpu_is_rtx_blackwell(gpu->capability))
        return dw__fail(DW_TYPE, "%s is for %s, not for %s", kernel->name, kernel->architectures,
                        gpu->name);
    const dw_gemm g = scaled_call_of(given);
    const dw__tensor *bias = dw__call_bias(&given->call);
    if (bias && (!dw__dtype_is_half(bias->dtype) || !dw__tensor_is_contiguous(bias)))
        return dw__fail(DW_UNSUPPORTED, "%s: expected a contiguous bias in 16 bits", kernel->name);
    return dw__gemm_check(&g, false);
}

static void scaled_seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                           dw__kernel_seconds *result) {
    const dw_gemm g = scaled_call_of(call);
    const dw__kernel *by = dw__gemm_kernel_on(&g, gpu->capability);
    (void)kernel;
    by->seconds(by, &g, gpu, result);
}

static dw_status scaled_prepare(const dw__kernel *kernel, const void *call,
                                const dw__context *context, const dw__variant **variant) {
    const dw_gemm g = scaled_call_of(call);
    const dw__kernel *by = dw__gemm_kernel_on(&g, context->capability);
    (void)kernel;
    return by->prepare(by, &g, context, variant);
}

static dw_status scaled_enqueue(const void *call, const dw__context *context,
                                const dw__variant *variant) {
    const dw_gemm g = scaled_call_of(call);
    return dw__gemm_is_empty(&g) ? DW_OK : variant->kernel->enqueue(&g, context, variant);
}

const dw__kernel dw__graph_gemm_scaled = {
    .name = "gemm_scaled",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .op = DW_OP_MULTIPLY_CODES,
    .proof = DW__PROVEN_ON_EMULATOR,
    .operation = "multiply_codes with scales of blocks",
    .source = "src/kernel/cuda/graph_gemm.c",
    .architectures = "sm_100f (B200, B300), sm_120a (RTX 50, RTX PRO)",
    .elements = "codes of MXFP8, MXFP4, NVFP4; the result BF16, F16, F32",
    .needs = "rows of the result of 16-byte multiples",
    .supports = scaled_supports,
    .seconds = scaled_seconds,
    .prepare = scaled_prepare,
    .enqueue = scaled_enqueue,
    /* No first-use check: the kernels that it calls have theirs. */
    .tolerance = "sums in F32, then the result's rounding, against FP64",
};
