/* The first-use check of gpu_attention: compares a kernel with the reference (cuda/common/attention_reference.cu) on
 * the same GPU. */
#include "kernel/cuda/gpu_attention.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* These sizes are multiples of no tile. Packed: sequences of 61 and 150 queries with 201 and 89 keys, so that some rows
 * of the second sequence see no key under a causal mask. */
enum {
    BATCH = 2,
    HEADS_Q = 4,
    HEADS_KV = 2,
    ROWS_Q = 150,
    ROWS_K = 201,
    ALIGNED_ROWS_K = 208, /* 8 keys of a bias are read at once */
    TOTAL_Q = 211,
    TOTAL_K = 290,
    MANY_ROWS = 270, /* CUTLASS's tiles have 256 rows */
    FEW = 3,         /* SMs */
    TRIALS = 2
};
static const int32_t offsets[2][BATCH + 1] = {{0, 61, TOTAL_Q}, {0, ROWS_K, TOTAL_K}};

enum { LSE = DW__ATTENTION_OPERANDS, D_BIAS, PARTS };

typedef struct state {
    dw__attention_shape shape;
    dw__attention_pass pass;
    dw_attention call, reference; /* they share the inputs */
    dw__trial_part *made[PARTS], *right[PARTS];
} state;

/* ---- the call ------------------------------------------------------------------------------------- */

/* The first trial has heads as wide as the kernel. The second has narrower heads and pretends to have so few SMs that
 * thread blocks process several tiles each. CUTLASS's kernels get full-width heads next to each other, as many queries
 * as keys if they are causal, and more rows than a tile has. */
static dw_attention make_call(dw__trial *t, const dw__attention_shape *shape) {
    const bool provided = t->variant->kernel->provided != NULL, second = t->index == 1;
    int seq_len_q = ROWS_Q, seq_len_kv = ROWS_K, head_dim = shape->head_dim;
    if (provided) {
        seq_len_q = second ? MANY_ROWS : ROWS_Q;
        seq_len_kv = shape->window ? seq_len_q : second ? ROWS_Q : ROWS_K;
    } else if (second) {
        head_dim -= 8;
        if (shape->bias) seq_len_kv = ALIGNED_ROWS_K;
    }
    if (second) t->context.sm_count = FEW;
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
        .dropout_stream = 3,
        .deterministic = shape->deterministic,
        .bias_kind = (dw_attention_bias_kind)shape->bias,
        .stream = t->stream,
    };
}

static dw_status add_offsets(dw__trial *t, dw_attention *c) {
    const int32_t **members[] = {&c->offsets_q, &c->offsets_k};
    dw__trial_part *part;
    for (int side = 0; side < 2; side++) {
        DW_RETURN_IF_FAILED(dw__trial_add(t, sizeof offsets[side], &part));
        memcpy(part->host, offsets[side], sizeof offsets[side]);
        *members[side] = part->device;
    }
    return DW_OK;
}

static dw_status add_tensor(dw__trial *t, state *s, dw__attention_operand which) {
    const dw__attention_operand_kind *kind = &dw__attention_operands[which];
    const bool rows_first = t->variant->kernel->provided || t->index == 1;
    const size_t bytes = dw__attention_lay_out(&s->call, which, rows_first);
    (void)dw__attention_lay_out(&s->reference, which, rows_first);
    DW_RETURN_IF_FAILED(dw__trial_add(t, bytes, &s->made[which]));
    s->right[which] = s->made[which];
    if (kind->written)
        DW_RETURN_IF_FAILED(dw__trial_add(t, bytes, &s->right[which]));
    else
        for (size_t i = 0; i < bytes / 2; i++)
            dw__trial_set(s->made[which]->host, s->call.dtype, i, dw__trial_normal(2024, which, i));
    dw__attention_tensor(&s->call, which)->data = s->made[which]->device;
    dw__attention_tensor(&s->reference, which)->data = s->right[which]->device;
    return DW_OK;
}

/* The first trial's bias repeats along the heads, the second's along the batch. Every seventh element hides its pair,
 * and so do all of the third query. */
static dw_status add_bias(dw__trial *t, state *s) {
    const bool added = s->shape.bias == DW_ATTENTION_ADDED;
    const int64_t rows = s->call.seq_len_q, keys = s->call.seq_len_kv, pairs = rows * keys,
                  planes = t->index == 0 ? BATCH : HEADS_Q;
    const dw_attention_bias layout = {NULL, t->index == 0 ? pairs : 0, t->index == 0 ? 0 : pairs,
                                      keys, 1};
    const size_t bytes = (size_t)(planes * pairs) * (added ? 2 : 1);
    dw__trial_part *part;
    DW_RETURN_IF_FAILED(dw__trial_add(t, bytes, &part));
    for (size_t i = 0; i < (size_t)(planes * pairs); i++) {
        const bool hidden = i % 7 == 3 || i / (size_t)keys % (size_t)rows == 2;
        if (added)
            dw__trial_set(part->host, s->call.dtype, i,
                          hidden ? -INFINITY : dw__trial_normal(2024, PARTS, i));
        else
            ((uint8_t *)part->host)[i] = !hidden;
    }
    s->call.bias = s->call.d_bias = layout;
    s->call.bias.data = part->device;
    s->reference.bias = s->call.bias;
    s->reference.d_bias = layout;
    if (!added || s->pass == DW__ATTENTION_FORWARD) return DW_OK;
    DW_RETURN_IF_FAILED(dw__trial_add(t, bytes, &s->made[D_BIAS]));
    DW_RETURN_IF_FAILED(dw__trial_add(t, bytes, &s->right[D_BIAS]));
    s->call.d_bias.data = s->made[D_BIAS]->device;
    s->reference.d_bias.data = s->right[D_BIAS]->device;
    return DW_OK;
}

/* Sets up the variant's own shape, which may differ from the shape that this call would select. */
static dw_status add_workspace(dw__trial *t, state *s) {
    const dw__kernel *kernel = t->variant->kernel;
    dw__attention_workspace places = {0};
    dw__trial_part *part;
    if (s->pass == DW__ATTENTION_BACKWARD && !s->shape.rtx)
        DW_RETURN_IF_FAILED(
            dw__attention_workspace_of(&s->call, &s->shape, t->context.sm_count, &places));
    else if (kernel->workspace_bytes)
        DW_RETURN_IF_FAILED(kernel->workspace_bytes(kernel, &s->call, &t->context, &places.bytes));
    DW_RETURN_IF_FAILED(dw__trial_add(t, places.bytes, &part));
    s->call.workspace = part->device;
    s->call.workspace_bytes = places.bytes;
    return DW_OK;
}

/* Backward reads O and LSE of the reference's forward, so that only backward is tested. */
static dw_status prepare(dw__trial *t) {
    const dw__kernel *kernel = t->variant->kernel;
    state *s = t->state;
    s->shape.params = t->variant->params;
    s->pass = kernel->kind == DW__CALL_ATTENTION_BACKWARD ? DW__ATTENTION_BACKWARD
                                                          : DW__ATTENTION_FORWARD;
    s->call = make_call(t, &s->shape);
    if (s->shape.packed) DW_RETURN_IF_FAILED(add_offsets(t, &s->call));
    s->reference = s->call;
    for (int which = 0; which < DW__ATTENTION_OPERANDS; which++)
        if (s->pass == DW__ATTENTION_BACKWARD || !dw__attention_operands[which].backward)
            DW_RETURN_IF_FAILED(add_tensor(t, s, which));
    const dw__attention_extent q = dw__attention_extent_of(&s->call, DW__ATTENTION_Q);
    const size_t lse_bytes = sizeof(float) * (size_t)(q.batch * q.heads * q.rows);
    DW_RETURN_IF_FAILED(dw__trial_add(t, lse_bytes, &s->made[LSE]));
    DW_RETURN_IF_FAILED(dw__trial_add(t, lse_bytes, &s->right[LSE]));
    s->call.lse = s->made[LSE]->device;
    s->reference.lse = s->right[LSE]->device;
    if (s->pass == DW__ATTENTION_BACKWARD) {
        s->call.o = s->reference.o;
        s->call.lse = s->reference.lse;
    }
    if (s->shape.bias) DW_RETURN_IF_FAILED(add_bias(t, s));
    DW_RETURN_IF_FAILED(add_workspace(t, s));
    if (kernel->provided)
        snprintf(t->detail, sizeof t->detail, ", head_dim %d%s", (int)s->shape.head_dim,
                 s->shape.window ? ", causal," : "");
    t->call = &s->call;
    return DW_OK;
}

static dw_status run_reference(dw__trial *t) {
    const state *s = t->state;
    const dw__kernel *const all = dw__reference_attention;
    DW_RETURN_IF_FAILED(dw__gpu_run(&all[DW__ATTENTION_FORWARD], NULL, &s->reference, &t->context));
    if (s->pass == DW__ATTENTION_FORWARD) return DW_OK;
    return dw__gpu_run(&all[DW__ATTENTION_BACKWARD], NULL, &s->reference, &t->context);
}

/* ---- comparison --------------------------------------------------------------------------------------- */

static double largest_of(const dw__trial_part *p, dw_dtype type) {
    double largest = 0.0;
    for (size_t i = 0; i < p->bytes / dw_dtype_bytes(type); i++) {
        const double x = fabs((double)dw__trial_get(p->host, type, i));
        if (isfinite(x) && x > largest) largest = x;
    }
    return largest;
}

/* Tolerances. With u the unit roundoff of the type (2^-8, 2^-11), P, dS and results are rounded to it. O is a weighted
 * mean of values: rounding P changes it by at most u times the largest value, and rounding O changes it by as much
 * again. The bound is doubled for the reference's rounding and dropout's factor. A gradient is a sum of at most 201
 * products of random sign. Rounding each product changes the sum by about u times the root of the sum of their squares,
 * which is of the order of the gradients themselves. Eight times the largest gradient leaves room for the worst of 10^5
 * elements. A wrong tile, mask or scale causes errors as large as the values. LSE is not rounded: it is F32,
 * computed with an approximate exponential. */
static bool is_close(const state *s, int which, char *text, size_t bytes) {
    const double u = s->shape.f16 ? 0x1p-11 : 0x1p-8;
    const bool lse = which == LSE;
    const dw_dtype type = lse ? DW_F32 : s->call.dtype;
    const dw__trial_part *made = s->made[which], *right = s->right[which],
                         *values = which == DW__ATTENTION_O ? s->right[DW__ATTENTION_V] : right;
    const double tolerance =
        lse ? 0x1p-10 : (which == DW__ATTENTION_O ? 4.0 : 8.0) * u * largest_of(values, type);
    for (size_t i = 0; i < made->bytes / dw_dtype_bytes(type); i++) {
        const double x = (double)dw__trial_get(made->host, type, i),
                     y = (double)dw__trial_get(right->host, type, i);
        if (x == y || fabs(x - y) <= tolerance) continue; /* equal infinities do not differ */
        snprintf(text, bytes, "element %zu of %s is %g, expected %g within %.2g", i,
                 lse               ? "lse"
                 : which == D_BIAS ? "d_bias"
                                   : dw__attention_operands[which].name,
                 x, y, tolerance);
        return false;
    }
    return true;
}

static bool agrees(const dw__trial *t, char *text, size_t bytes) {
    const state *s = t->state;
    if (s->pass == DW__ATTENTION_FORWARD)
        return is_close(s, DW__ATTENTION_O, text, bytes) && is_close(s, LSE, text, bytes);
    return is_close(s, DW__ATTENTION_DQ, text, bytes) &&
           is_close(s, DW__ATTENTION_DK, text, bytes) &&
           is_close(s, DW__ATTENTION_DV, text, bytes) &&
           (!s->made[D_BIAS] || is_close(s, D_BIAS, text, bytes));
}

const dw__first_use dw__attention_first_use = {
    .against = "the reference",
    .count = TRIALS,
    .state_bytes = sizeof(state),
    .prepare = prepare,
    .reference = run_reference,
    .agrees = agrees,
};
