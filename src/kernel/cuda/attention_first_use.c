/* The first-use check of gpu_attention: compares a kernel with the reference (cuda/common/attention_reference.cu) on
 * the same GPU. */
#include "kernel/cuda/gpu_attention.h"
#include <math.h>
#include <stdio.h>

/* These sizes are multiples of no tile. Packed: sequences of 61 and 150 queries with 201 and 89 keys, so that some rows
 * of the second sequence see no key under a causal mask. */
enum {
    BATCH = 2,
    HEADS_Q = 4,
    HEADS_KV = 2,
    ROWS_Q = 150,
    ROWS_K = 201,
    TOTAL_Q = 211,
    TOTAL_K = 290,
    MANY_ROWS = 270, /* CUTLASS's tiles have 256 rows */
    FEW = 3,         /* SMs */
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
    BUFFERS
} buffer;

typedef struct state {
    dw__attention_shape shape;
    dw__attention_pass pass;
    int layout;        /* 0: [batch, heads, rows, head_dim]; 1: [batch, rows, heads, head_dim] */
    dw_attention call; /* the call of the kernel under test */
    size_t begin[BUFFERS]; /* offsets in device memory and in `host` */
    size_t count[BUFFERS]; /* bytes */
    char *device;          /* device memory of the trial */
} state;

/* ---- the call ------------------------------------------------------------------------------------- */

static bool of_keys(buffer which) {
    return which == K || which == V || which == DK || which == DV || which == REF_DK ||
           which == REF_DV;
}

static dw_attention_tensor tensor_of(const state *s, buffer which) {
    const int layout = s->layout;
    int64_t d = s->call.head_dim, heads = of_keys(which) ? HEADS_KV : HEADS_Q;
    int64_t rows = of_keys(which) ? s->call.seq_len_kv : s->call.seq_len_q;
    if (s->shape.packed) rows = of_keys(which) ? TOTAL_K : TOTAL_Q;
    dw_attention_tensor t = {.data = s->device ? s->device + s->begin[which] : NULL,
                             .batch = heads * rows * d};
    t.head = layout == 0 ? rows * d : d;
    t.row = layout == 0 ? d : heads * d;
    return t;
}

/* The first trial has heads as wide as the kernel. The second has narrower heads and pretends to have so few SMs that
 * thread blocks process several tiles each. CUTLASS's kernels get full-width heads next to each other, as many queries
 * as keys if they are causal, and more rows than a tile has. */
static dw_attention make_call(dw__trial *t) {
    state *s = t->state;
    const dw__attention_shape *shape = &s->shape;
    const bool provided = t->variant->kernel->provided != NULL, second = t->index == 1;
    int seq_len_q = ROWS_Q, seq_len_kv = ROWS_K, head_dim = shape->head_dim;
    if (provided) {
        seq_len_q = second ? MANY_ROWS : ROWS_Q;
        seq_len_kv = shape->window ? seq_len_q : second ? ROWS_Q : ROWS_K;
    } else if (second) {
        head_dim -= 8;
    }
    if (second) t->context.sm_count = FEW;
    s->layout = provided || second;
    return (dw_attention){
        .struct_size = sizeof(dw_attention),
        .dtype = shape->f16 ? DW_F16 : DW_BF16,
        .batch = BATCH,
        .heads_q = HEADS_Q,
        .heads_kv = HEADS_KV,
        .seq_len_q = seq_len_q,
        .seq_len_kv = seq_len_kv,
        .head_dim = head_dim,
        .total_q = shape->packed ? TOTAL_Q : 0,
        .total_k = shape->packed ? TOTAL_K : 0,
        .scale = (float)(1.0 / sqrt((double)head_dim)),
        .softcap = shape->softcap ? 2.0f : 0.0f,
        .window_left = shape->window && !provided ? 70 : -1,
        .window_right = shape->window ? 0 : -1,
        .bottom_right = true,
        .dropout = shape->dropout ? 0.2f : 0.0f,
        .seed = 11,
        .seed_offset = 5,
        .deterministic = shape->deterministic,
    };
}

static void set_tensors(state *s) {
    dw_attention *c = &s->call;
    c->q = tensor_of(s, Q);
    c->k = tensor_of(s, K);
    c->v = tensor_of(s, V);
    c->o = tensor_of(s, O);
    c->d_o = tensor_of(s, D_O);
    c->dq = tensor_of(s, DQ);
    c->dk = tensor_of(s, DK);
    c->dv = tensor_of(s, DV);
}

static void place_buffers(dw__trial *t) {
    state *s = t->state;
    size_t d = (size_t)s->call.head_dim, batch = s->shape.packed ? 1 : BATCH;
    size_t seq_len_q = s->shape.packed ? TOTAL_Q : (size_t)s->call.seq_len_q,
           seq_len_kv = s->shape.packed ? TOTAL_K : (size_t)s->call.seq_len_kv;
    size_t q = 2 * batch * HEADS_Q * seq_len_q * d, k = 2 * batch * HEADS_KV * seq_len_kv * d;
    size_t lse = sizeof(float) * batch * HEADS_Q * seq_len_q;
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
    for (buffer which = Q; which < BUFFERS; which++) {
        s->begin[which] = dw__trial_place(t, sizes[which]);
        s->count[which] = sizes[which];
    }
    t->host_bytes = t->bytes;
}

static dw_status place(dw__trial *t) {
    const dw__kernel *kernel = t->variant->kernel;
    dw__attention_workspace workspace = {0};
    state *s = t->state;
    s->shape = dw__attention_unpack(t->variant->params);
    s->pass = kernel->kind == DW__CALL_ATTENTION_BACKWARD ? DW__ATTENTION_BACKWARD
                                                          : DW__ATTENTION_FORWARD;
    s->call = make_call(t);
    place_buffers(t);
    if (s->shape.packed) s->call.offsets_q = offsets[0]; /* a non-NULL address; never read */
    set_tensors(s);
    /* Sets up the variant's own shape, which may differ from the shape that this call would select. */
    if (s->pass == DW__ATTENTION_BACKWARD)
        DW_RETURN_IF_FAILED(
            dw__attention_workspace_of(&s->call, &s->shape, t->context.sm_count, &workspace));
    else if (kernel->workspace_bytes)
        DW_RETURN_IF_FAILED(
            kernel->workspace_bytes(kernel, &s->call, &t->context, &workspace.bytes));
    s->call.workspace_bytes = workspace.bytes;
    (void)dw__trial_place(t, workspace.bytes);
    if (kernel->provided)
        snprintf(t->detail, sizeof t->detail, ", head_dim %d%s", (int)s->shape.head_dim,
                 s->shape.window ? ", causal," : "");
    return DW_OK;
}

static dw_status fill(dw__trial *t) {
    const state *s = t->state;
    for (buffer which = Q; which <= D_O; which++)
        for (size_t i = 0; i < s->count[which] / 2; i++)
            dw__trial_set(t->host + s->begin[which], s->call.dtype, i,
                          dw__trial_normal(2024, which, i));
    memcpy(t->host + s->begin[OFFSETS_Q], offsets[0], sizeof offsets[0]);
    memcpy(t->host + s->begin[OFFSETS_K], offsets[1], sizeof offsets[1]);
    return DW_OK;
}

/* Backward reads O and LSE of the reference's forward, so that only backward is tested. */
static void bind(dw__trial *t) {
    state *s = t->state;
    dw_attention *c = &s->call;
    const bool backward = s->pass == DW__ATTENTION_BACKWARD;
    s->device = t->device;
    set_tensors(s);
    if (backward) c->o = tensor_of(s, REF_O);
    c->lse = (float *)(s->device + s->begin[backward ? REF_LSE : LSE]);
    c->offsets_q = s->shape.packed ? (const int32_t *)(s->device + s->begin[OFFSETS_Q]) : NULL;
    c->offsets_k = s->shape.packed ? (const int32_t *)(s->device + s->begin[OFFSETS_K]) : NULL;
    c->workspace = t->device + t->host_bytes;
    c->stream = t->stream;
    t->call = c;
}

static dw_status run_reference(dw__trial *t) {
    const state *s = t->state;
    dw_attention call = s->call;
    call.o = tensor_of(s, REF_O);
    call.lse = (float *)(s->device + s->begin[REF_LSE]);
    call.dq = tensor_of(s, REF_DQ);
    call.dk = tensor_of(s, REF_DK);
    call.dv = tensor_of(s, REF_DV);
    DW_RETURN_IF_FAILED(dw__attention_run_reference(&call, &t->context, DW__ATTENTION_FORWARD));
    if (s->pass == DW__ATTENTION_FORWARD) return DW_OK;
    return dw__attention_run_reference(&call, &t->context, DW__ATTENTION_BACKWARD);
}

/* ---- comparison --------------------------------------------------------------------------------------- */

static double value_at(const dw__trial *t, buffer which, size_t i) {
    const state *s = t->state;
    const bool lse = which == LSE || which == REF_LSE;
    return (double)dw__trial_get(t->host + s->begin[which], lse ? DW_F32 : s->call.dtype, i);
}

/* Tolerances. With u the unit roundoff of the type (2^-8, 2^-11), P, dS and results are rounded to it. O is a weighted
 * mean of values: rounding P changes it by at most u times the largest value, and rounding O changes it by as much
 * again. The bound is doubled for the reference's rounding and dropout's factor. A gradient is a sum of at most 201
 * products of random sign. Rounding each product changes the sum by about u times the root of the sum of their squares,
 * which is of the order of the gradients themselves. Eight times the largest gradient leaves room for the worst of 10^5
 * elements. A wrong tile, mask or scale causes errors as large as the values. LSE is not rounded: it
 * is F32, computed with an approximate exponential. */
static double tolerance_of(const state *s, buffer which, double largest) {
    double u = s->shape.f16 ? 0x1p-11 : 0x1p-8;
    if (which == LSE) return 0x1p-10;
    return (which == O ? 4.0 : 8.0) * u * largest;
}

static bool is_close(const dw__trial *t, buffer tested, buffer reference, const char *name,
                     char *text, size_t bytes) {
    const state *s = t->state;
    size_t count = s->count[tested] / (tested == LSE ? sizeof(float) : 2), worst = 0;
    buffer scale_of = tested == O ? V : reference;
    double largest = 0.0, most = 0.0;
    for (size_t i = 0; i < s->count[scale_of] / (scale_of == REF_LSE ? sizeof(float) : 2); i++) {
        double x = fabs(value_at(t, scale_of, i));
        if (isfinite(x) && x > largest) largest = x;
    }
    for (size_t i = 0; i < count; i++) {
        double x = value_at(t, tested, i), y = value_at(t, reference, i);
        double off = x == y ? 0.0 : fabs(x - y); /* equal infinities do not differ */
        if (!(off <= most)) {                    /* a NaN counts as the largest difference */
            most = isnan(off) ? INFINITY : off;
            worst = i;
        }
    }
    const double tolerance = tolerance_of(s, tested, largest);
    if (most <= tolerance) return true;
    snprintf(text, bytes, "element %zu of %s is %g, expected %g within %.2g", worst, name,
             value_at(t, tested, worst), value_at(t, reference, worst), tolerance);
    return false;
}

static bool agrees(const dw__trial *t, char *text, size_t bytes) {
    if (((const state *)t->state)->pass == DW__ATTENTION_FORWARD)
        return is_close(t, O, REF_O, "o", text, bytes) &&
               is_close(t, LSE, REF_LSE, "lse", text, bytes);
    return is_close(t, DQ, REF_DQ, "dq", text, bytes) &&
           is_close(t, DK, REF_DK, "dk", text, bytes) && is_close(t, DV, REF_DV, "dv", text, bytes);
}

const dw__first_use dw__attention_first_use = {
    .against = "the reference",
    .count = TRIALS,
    .state_bytes = sizeof(state),
    .place = place,
    .fill = fill,
    .bind = bind,
    .reference = run_reference,
    .agrees = agrees,
};
