/* The first-use guard: before a kernel's first result is used on a GPU, it is compared with attention by
 * definition (cuda/common/attention_reference.cu) on small random tensors. What the CPU's tests cannot show, a
 * compiler, driver or GPU that makes something else of a kernel than we meant, shows here, and nobody trains
 * with it.
 *
 * Everything happens on a stream of its own and in memory of its own, so that it may happen inside of a
 * caller's graph capture. Inputs come from a counter-based generator: no state of the caller is touched.
 */
#include "kernel/cuda/attention.h"
#include "kernel/cuda/guard.h"
#include "number/half.h"
#include "number/philox.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* Neither a multiple of any tile; packed: sequences of 61 and 150 queries on 201 and 89 keys, so that some rows
 * of the second see no key under a causal mask. */
enum {
    BATCH = 2,
    HEADS_Q = 4,
    HEADS_KV = 2,
    ROWS_Q = 150,
    ROWS_K = 201,
    TOTAL_Q = 211,
    TOTAL_K = 290,
    MANY_ROWS = 270, /* CUTLASS's tiles have 256 */
    FEW = 3,         /* processors */
    TRIALS = 2
};
static const int32_t offsets[2][BATCH + 1] = {{0, 61, TOTAL_Q}, {0, ROWS_K, TOTAL_K}};

typedef enum buffer {
    Q,
    K,
    V,
    D_O, /* inputs */
    O,
    LSE,
    DQ,
    DK,
    DV, /* outputs of the kernel under test */
    REF_O,
    REF_LSE,
    REF_DQ,
    REF_DK,
    REF_DV,
    OFFSETS_Q,
    OFFSETS_K,
    WORKSPACE,
    BUFFERS
} buffer;

/* One comparison. */
typedef struct trial {
    int rows_q, rows_k, head_dim, sm_count;
    int layout; /* 0: [batch, heads, rows, head_dim]; 1: [batch, rows, heads, head_dim] */
} trial;

typedef struct guard {
    dw__context context; /* with as many processors as the trial pretends */
    const trial *trial;
    const dw__attention_shape *shape;
    dw__attention_pass pass;
    dw__attention_kernels *kernels;
    dw_attention call;     /* of the kernel under test */
    size_t begin[BUFFERS]; /* in device memory, and in `host` up to OFFSETS_Q */
    size_t count[BUFFERS]; /* bytes */
    size_t bytes;
    char *device, *host;
    dw__guard frame;
} guard;

/* ---- the case ------------------------------------------------------------------------------------- */

static void place(guard *g, buffer which, size_t bytes) {
    g->begin[which] = g->bytes;
    g->count[which] = bytes;
    g->bytes += (bytes + 255) / 256 * 256;
}

static bool of_keys(buffer which) {
    return which == K || which == V || which == DK || which == DV || which == REF_DK ||
           which == REF_DV;
}

static dw_attention_tensor tensor_of(const guard *g, buffer which) {
    const int layout = g->trial->layout;
    int64_t d = g->call.head_dim, heads = of_keys(which) ? HEADS_KV : HEADS_Q;
    int64_t rows = of_keys(which) ? g->call.rows_k : g->call.rows_q;
    if (g->shape->packed) rows = of_keys(which) ? TOTAL_K : TOTAL_Q;
    dw_attention_tensor t = {.data = g->device ? g->device + g->begin[which] : NULL,
                             .batch = heads * rows * d};
    t.head = layout == 0 ? rows * d : d;
    t.row = layout == 0 ? d : heads * d;
    return t;
}

static dw_attention call_of(const dw__attention_shape *shape, const trial *t) {
    return (dw_attention){
        .size = sizeof(dw_attention),
        .dtype = shape->f16 ? DW_F16 : DW_BF16,
        .batch = BATCH,
        .heads_q = HEADS_Q,
        .heads_kv = HEADS_KV,
        .rows_q = t->rows_q,
        .rows_k = t->rows_k,
        .head_dim = t->head_dim,
        .total_q = shape->packed ? TOTAL_Q : 0,
        .total_k = shape->packed ? TOTAL_K : 0,
        .scale = (float)(1.0 / sqrt((double)t->head_dim)),
        .softcap = shape->softcap ? 2.0f : 0.0f,
        .window_left = shape->window && !shape->cutlass ? 70 : -1,
        .window_right = shape->window ? 0 : -1,
        .bottom_right = true,
        .dropout = shape->dropout ? 0.2f : 0.0f,
        .seed = 11,
        .seed_offset = 5,
        .deterministic = shape->deterministic,
    };
}

static void set_tensors(guard *g) {
    dw_attention *c = &g->call;
    c->q = tensor_of(g, Q);
    c->k = tensor_of(g, K);
    c->v = tensor_of(g, V);
    c->o = tensor_of(g, O);
    c->d_o = tensor_of(g, D_O);
    c->dq = tensor_of(g, DQ);
    c->dk = tensor_of(g, DK);
    c->dv = tensor_of(g, DV);
}

static dw_status place_buffers(guard *g) {
    size_t d = (size_t)g->call.head_dim, batch = g->shape->packed ? 1 : BATCH;
    size_t rows_q = g->shape->packed ? TOTAL_Q : (size_t)g->call.rows_q,
           rows_k = g->shape->packed ? TOTAL_K : (size_t)g->call.rows_k;
    size_t q = 2 * batch * HEADS_Q * rows_q * d, k = 2 * batch * HEADS_KV * rows_k * d;
    size_t lse = sizeof(float) * batch * HEADS_Q * rows_q;
    const size_t sizes[] = {[Q] = q,
                            [K] = k,
                            [V] = k,
                            [D_O] = q,
                            [O] = q,
                            [LSE] = lse,
                            [DQ] = q,
                            [DK] = k,
                            [DV] = k,
                            [REF_O] = q,
                            [REF_LSE] = lse,
                            [REF_DQ] = q,
                            [REF_DK] = k,
                            [REF_DV] = k,
                            [OFFSETS_Q] = sizeof offsets[0],
                            [OFFSETS_K] = sizeof offsets[1]};
    dw__attention_workspace workspace = {0};
    g->bytes = 0;
    for (buffer which = Q; which <= OFFSETS_K; which++) place(g, which, sizes[which]);
    if (g->shape->packed) g->call.offsets_q = offsets[0]; /* only that it is set */
    if (g->pass == DW__ATTENTION_BACKWARD)
        DW_RETURN_IF_FAILED(
            dw__attention_workspace_of(&g->call, g->shape, g->context.sm_count, &workspace));
    set_tensors(g);
    if (g->shape->cutlass)
        DW_RETURN_IF_FAILED(
            dw__attention_cutlass_check(&g->call, g->shape->cutlass, &workspace.bytes));
    place(g, WORKSPACE, workspace.bytes);
    return DW_OK;
}

/* Sums of four uniform numbers, nearly normal, of variance 1. */
static void fill_inputs(guard *g) {
    for (buffer which = Q; which <= D_O; which++) {
        uint16_t *to = (uint16_t *)(g->host + g->begin[which]);
        for (size_t i = 0; i < g->count[which] / 2; i++) {
            float u[4];
            dw__philox_uniform4(2024, which, 0, i, u);
            float x = (u[0] + u[1] + u[2] + u[3] - 2.0f) * 1.7320508f;
            to[i] = g->shape->f16 ? dw__f32_to_f16(x) : dw__f32_to_bf16(x);
        }
    }
    /* What is not written stays a NaN. */
    memset(g->host + g->begin[O], 0xff, g->begin[OFFSETS_Q] - g->begin[O]);
    memcpy(g->host + g->begin[OFFSETS_Q], offsets[0], sizeof offsets[0]);
    memcpy(g->host + g->begin[OFFSETS_K], offsets[1], sizeof offsets[1]);
}

static void set_pointers(guard *g) {
    dw_attention *c = &g->call;
    set_tensors(g);
    c->lse = (float *)(g->device + g->begin[LSE]);
    c->offsets_q = g->shape->packed ? (const int32_t *)(g->device + g->begin[OFFSETS_Q]) : NULL;
    c->offsets_k = g->shape->packed ? (const int32_t *)(g->device + g->begin[OFFSETS_K]) : NULL;
    c->workspace = g->device + g->begin[WORKSPACE];
    c->workspace_bytes = g->count[WORKSPACE];
    c->stream = g->frame.stream;
}

/* ---- running ---------------------------------------------------------------------------------------- */

static dw_status run_reference(guard *g) {
    const dw__attention_kernels *forward, *backward;
    dw_attention call = g->call;
    call.o = tensor_of(g, REF_O);
    call.lse = (float *)(g->device + g->begin[REF_LSE]);
    call.dq = tensor_of(g, REF_DQ);
    call.dk = tensor_of(g, REF_DK);
    call.dv = tensor_of(g, REF_DV);
    DW_RETURN_IF_FAILED(
        dw__attention_reference_of(&g->context, g->shape->f16, DW__ATTENTION_FORWARD, &forward));
    DW_RETURN_IF_FAILED(
        dw__attention_launch_reference(&call, &g->context, DW__ATTENTION_FORWARD, forward));
    if (g->pass == DW__ATTENTION_FORWARD) return DW_OK;
    DW_RETURN_IF_FAILED(
        dw__attention_reference_of(&g->context, g->shape->f16, DW__ATTENTION_BACKWARD, &backward));
    return dw__attention_launch_reference(&call, &g->context, DW__ATTENTION_BACKWARD, backward);
}

/* Backward reads what the reference's forward wrote, so that it is judged alone. */
static dw_status run_tested(guard *g) {
    if (g->pass == DW__ATTENTION_FORWARD)
        return dw__attention_launch_forward(&g->call, &g->context, g->kernels);
    g->call.o = tensor_of(g, REF_O);
    g->call.lse = (float *)(g->device + g->begin[REF_LSE]);
    return dw__attention_launch_backward(&g->call, &g->context, g->kernels);
}

/* ---- comparing --------------------------------------------------------------------------------------- */

static float value_at(const guard *g, buffer which, size_t i) {
    const char *at = g->host + g->begin[which];
    if (which == LSE || which == REF_LSE) return ((const float *)at)[i];
    uint16_t half = ((const uint16_t *)at)[i];
    return g->shape->f16 ? dw__f16_to_f32(half) : dw__bf16_to_f32(half);
}

/* Tolerances. With u the unit roundoff of the type (2^-8, 2^-11), P, dS and results are rounded to it. O is a
 * weighted mean of values: P's rounding moves it by u times the largest value at most, its own by as much
 * again, doubled for the reference's rounding and dropout's factor. A gradient is a sum of at most 201 products
 * of random sign: rounding each moves it by u times the root of the sum of their squares, which is of the order
 * of the gradients themselves; eight times the largest one leaves room for the unluckiest of 10^5 elements. A
 * wrong tile, mask or scale is off by the order of the values. LSE is not rounded: F32 with an approximate
 * exponential. */
static double tolerance_of(const guard *g, buffer which, double largest) {
    double u = g->shape->f16 ? 0x1p-11 : 0x1p-8;
    if (which == LSE) return 0x1p-10;
    return (which == O ? 4.0 : 8.0) * u * largest;
}

static void name_kernel(const guard *g, dw__text *name) {
    const dw__attention_shape *s = g->shape;
    if (s->cutlass) {
        (void)dw__text_printf(name, "%s, head_dim %d%s", s->cutlass->name, s->head_dim,
                              s->window ? ", causal," : "");
        return;
    }
    dw__jit_variant variant =
        dw__attention_variant(s, g->pass, "", dw__attention_arch(s->blackwell));
    (void)dw__jit_variant_name(&variant, name);
}

static bool agrees(guard *g, buffer tested, buffer reference, const char *name) {
    size_t count = g->count[tested] / (tested == LSE ? sizeof(float) : 2), worst = 0;
    buffer scale_of = tested == O ? V : reference;
    double largest = 0.0, most = 0.0;
    for (size_t i = 0; i < g->count[scale_of] / (scale_of == REF_LSE ? sizeof(float) : 2); i++) {
        double x = fabs((double)value_at(g, scale_of, i));
        if (isfinite(x) && x > largest) largest = x;
    }
    for (size_t i = 0; i < count; i++) {
        double x = (double)value_at(g, tested, i), y = (double)value_at(g, reference, i);
        double off = x == y ? 0.0 : fabs(x - y); /* -infinity is equal to itself */
        if (!(off <= most)) {                    /* a NaN counts as more than anything */
            most = isnan(off) ? INFINITY : off;
            worst = i;
        }
    }
    double tolerance = tolerance_of(g, tested, largest);
    if (most <= tolerance) return true;
    dw__text kernel = {0};
    name_kernel(g, &kernel);
    snprintf(
        g->kernels->reason, sizeof g->kernels->reason,
        "kernel %.300s disagrees with the reference on %.60s: element %zu of %s is %g, expected %g "
        "within %.2g; it is not used in this process; please report this line",
        kernel.text ? kernel.text : "of attention", g->context.name, worst, name,
        (double)value_at(g, tested, worst), (double)value_at(g, reference, worst), tolerance);
    dw__text_free(&kernel);
    g->kernels->disabled = true;
    return false;
}

static void compare(guard *g) {
    if (g->pass == DW__ATTENTION_FORWARD) {
        (void)(agrees(g, O, REF_O, "o") && agrees(g, LSE, REF_LSE, "lse"));
        return;
    }
    (void)(agrees(g, DQ, REF_DQ, "dq") && agrees(g, DK, REF_DK, "dk") &&
           agrees(g, DV, REF_DV, "dv"));
}

/* ---- all of it ------------------------------------------------------------------------------------------ */

static dw_status run_trial(guard *g, const trial *t) {
    const dw_device *cuda = g->context.device;
    dw_status status = DW_OK;
    size_t upload;
    g->trial = t;
    g->context.sm_count = t->sm_count;
    g->call = call_of(g->shape, t);
    DW_RETURN_IF_FAILED(place_buffers(g));
    upload = g->begin[WORKSPACE];
    g->host = dw__malloc(upload);
    if (!g->host) return dw__fail_memory("the comparison of a kernel", upload);
    fill_inputs(g);
    DW_TRY(cuda->allocate(g->bytes, (void **)&g->device));
    set_pointers(g);
    DW_TRY(cuda->copy_in(g->device, g->host, upload, g->frame.stream));
    if (g->count[WORKSPACE] > 0)
        DW_TRY(cuda->fill_on(g->device + g->begin[WORKSPACE], 0xff, g->count[WORKSPACE],
                             g->frame.stream));
    DW_TRY(run_reference(g));
    DW_TRY(run_tested(g));
    DW_TRY(cuda->copy_out(g->host, g->device, upload, g->frame.stream));
    DW_TRY(cuda->stream_synchronize(g->frame.stream));
    compare(g);

cleanup:
    if (status != DW_OK) (void)cuda->stream_synchronize(g->frame.stream);
    if (g->device) cuda->release(g->device, g->bytes);
    dw__free(g->host);
    g->device = g->host = NULL;
    return status;
}

dw_status dw__attention_guard(const dw__context *context, const dw__attention_shape *shape,
                              dw__attention_pass pass, dw__attention_kernels *kernels) {
    const int d = shape->head_dim, all = context->sm_count;
    /* Whole heads; then heads that end before the kernel's width does, on so few processors that blocks of threads
     * take one piece of work after another. */
    const trial own[TRIALS] = {{ROWS_Q, ROWS_K, d, all, 0}, {ROWS_Q, ROWS_K, d - 8, FEW, 1}};
    /* CUTLASS's: whole heads side by side, and as many queries as keys where it is causal. More rows than a
     * tile has. */
    const bool causal = shape->window;
    const trial cutlass[TRIALS] = {{ROWS_Q, causal ? ROWS_Q : ROWS_K, d, all, 1},
                                   {MANY_ROWS, causal ? MANY_ROWS : ROWS_Q, d, FEW, 1}};
    const trial *trials = shape->cutlass ? cutlass : own;
    guard g = {.context = *context, .shape = shape, .pass = pass, .kernels = kernels};
    dw_status status = DW_OK;
    DW_TRY(dw__guard_begin(&g.frame, context));
    for (int i = 0; i < TRIALS && !kernels->disabled; i++) DW_TRY(run_trial(&g, &trials[i]));

cleanup:
    return dw__guard_end(&g.frame, status, "the reference");
}
