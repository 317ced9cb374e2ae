/* Attention of dw_attention on a device, both passes, against the definition in FP64: each result within the bound of
 * the roundings that a kernel makes. */
#ifndef DW_ATTENTION_DEFINITION_H
#define DW_ATTENTION_DEFINITION_H

#include "deepwell/attention.h"
#include "deepwell/device.h"
#include "deepwell/jit.h"
#include "number/half.h"
#include "number/philox.h"
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const dw_device *device;

/* Besides normal numbers a bias may hold one of these. In a bias of bytes a number below 0 hides its pair. */
typedef enum content {
    NUMBERS,
    HIDDEN,   /* every fifth pair is hidden by -infinity, and all pairs of every third query */
    ABSORBED, /* the least number for every fifth pair, and for all pairs of every third query */
    LOW,      /* -3000 for all pairs of every third query: F32 keeps few digits of such scores */
} content;

typedef struct problem {
    int head_dim, batch, heads_q, heads_kv, rows_q, rows_k;
    bool f16, bytes, gradient;
    /* of the bias: batch, heads, queries, keys: 'x' has its own, '1' repeats; NULL: there is no bias */
    const char *axes;
    content content;
    int padding; /* elements between rows */
    bool causal, bottom_right, deterministic;
    float dropout;
    float softcap;    /* 0: none; forward alone */
    int window;       /* queries see so many keys before the diagonal; 0: all; with `causal` */
    bool rows_first;  /* [batch, rows, heads, head_dim] */
    bool inputs_only; /* forward alone */
} problem;

/* ---- data ------------------------------------------------------------------------------------------ */

typedef struct array {
    size_t count, size; /* elements, and their bytes */
    void *host, *device;
} array;

enum { Q, K, V, O, D_O, DQ, DK, DV, ROWS_OF_HEADS };

typedef struct run {
    const problem *p;
    int number; /* of the problem, for messages */
    array of[ROWS_OF_HEADS], lse, bias, d_bias, workspace;
    dw_attention_bias layout; /* without `data` */
    dw_attention call;
    uint64_t state;
} run;

static inline uint32_t draw(run *r) {
    r->state = r->state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(r->state >> 33);
}
/* About normal: a sum of uniform numbers. */
static inline float normal(run *r) {
    float sum = 0;
    for (int i = 0; i < 4; i++) sum += (float)draw(r) / 2147483648.0f - 0.5f;
    return sum * 1.7f;
}

static inline uint16_t to_half(const run *r, float x) {
    return r->p->f16 ? dw__f32_to_f16(x) : dw__f32_to_bf16(x);
}
static inline double number(const run *r, const array *a, int64_t at) {
    const uint16_t bits = ((const uint16_t *)a->host)[at];
    return (double)(r->p->f16 ? dw__f16_to_f32(bits) : dw__bf16_to_f32(bits));
}

static inline void make(array *a, size_t count, size_t size) {
    *a = (array){.count = count, .size = size, .host = malloc(count * size + 1)};
    assert_non_null(a->host);
    memset(a->host, 0xFF, count * size);
    assert_int_equal(dw_device_allocate(device, count * size + 1, &a->device), DW_OK);
}
static inline void send(const array *a) {
    assert_int_equal(dw_device_copy_in(device, a->device, a->host, a->count * a->size), DW_OK);
}
static inline void fetch(const array *a) {
    assert_int_equal(dw_device_copy_out(device, a->host, a->device, a->count * a->size), DW_OK);
}
static inline void drop(const array *a) {
    dw_device_release(device, a->device, a->count * a->size + 1);
    free(a->host);
}

static inline bool of_keys(int which) {
    return which == K || which == V || which == DK || which == DV;
}

static inline int64_t place(const run *r, int which, int b, int h, int i) {
    const problem *p = r->p;
    const int heads = of_keys(which) ? p->heads_kv : p->heads_q,
              rows = of_keys(which) ? p->rows_k : p->rows_q;
    if (p->rows_first) return (((int64_t)b * rows + i) * heads + h) * p->head_dim;
    return (((int64_t)b * heads + h) * rows + i) * p->head_dim;
}
static inline int64_t place_bias(const run *r, int b, int h, int i, int j) {
    return b * r->layout.batch + h * r->layout.head + i * r->layout.row + j * r->layout.key;
}

static inline float bias_number(run *r, int64_t query, int64_t index) {
    const bool row = query % 3 == 2, pair = index % 5 == 1;
    const float least = r->p->f16 ? -65504.0f : dw__bf16_to_f32(0xFF7F);
    switch (r->p->content) {
    case HIDDEN: return row || pair ? -INFINITY : normal(r);
    case ABSORBED: return row || pair ? least : normal(r);
    case LOW: return row ? -3000.0f : normal(r);
    default: return normal(r);
    }
}

static inline void make_bias(run *r) {
    const problem *p = r->p;
    const int64_t whole[4] = {p->batch, p->heads_q, p->rows_q, p->rows_k};
    int64_t length[4], stride[4], count = 1;
    for (int axis = 3; axis >= 0; axis--) {
        length[axis] = p->axes[axis] == '1' ? 1 : whole[axis];
        stride[axis] = p->axes[axis] == '1' ? 0 : count;
        count *= length[axis] + (axis == 3 ? p->padding : 0);
    }
    r->layout = (dw_attention_bias){NULL, stride[0], stride[1], stride[2], stride[3]};
    make(&r->bias, (size_t)count, p->bytes ? 1 : 2);
    make(&r->d_bias, (size_t)count, 2);
    for (int64_t b = 0, index = 0; b < length[0]; b++)
        for (int64_t h = 0; h < length[1]; h++)
            for (int64_t i = 0; i < length[2]; i++)
                for (int64_t j = 0; j < length[3]; j++, index++) {
                    const float x = bias_number(r, length[2] > 1 ? i : 0, index);
                    const int64_t at = place_bias(r, (int)b, (int)h, (int)i, (int)j);
                    if (p->bytes)
                        ((uint8_t *)r->bias.host)[at] = x >= 0;
                    else
                        ((uint16_t *)r->bias.host)[at] = to_half(r, x);
                }
    send(&r->bias);
    send(&r->d_bias);
    r->call.bias_kind = p->bytes ? DW_ATTENTION_VISIBLE : DW_ATTENTION_ADDED;
    r->call.bias = r->call.d_bias = r->layout;
    r->call.bias.data = r->bias.device;
    if (p->gradient) r->call.d_bias.data = r->d_bias.device;
}

static inline void open_run(run *r, const problem *p, int number) {
    size_t bytes;
    *r = (run){.p = p, .number = number, .state = 77 + (uint64_t)number};
    r->call = (dw_attention){.struct_size = sizeof r->call,
                             .device = device,
                             .dtype = p->f16 ? DW_F16 : DW_BF16,
                             .batch = p->batch,
                             .heads_q = p->heads_q,
                             .heads_kv = p->heads_kv,
                             .seq_len_q = p->rows_q,
                             .seq_len_kv = p->rows_k,
                             .head_dim = p->head_dim,
                             .scale = 0.2f,
                             .softcap = p->softcap,
                             .window_left = p->window ? p->window : -1,
                             .window_right = p->causal ? 0 : -1,
                             .bottom_right = p->bottom_right,
                             .deterministic = p->deterministic,
                             .dropout = p->dropout,
                             .seed = 5,
                             .seed_offset = 9};
    dw_attention_tensor *tensors[] = {&r->call.q,   &r->call.k,  &r->call.v,  &r->call.o,
                                      &r->call.d_o, &r->call.dq, &r->call.dk, &r->call.dv};
    for (int which = 0; which < ROWS_OF_HEADS; which++) {
        const int heads = of_keys(which) ? p->heads_kv : p->heads_q,
                  rows = of_keys(which) ? p->rows_k : p->rows_q;
        make(&r->of[which], (size_t)(p->batch * heads * rows * p->head_dim), 2);
        for (size_t i = 0; i < r->of[which].count; i++)
            if (which <= V || which == D_O)
                ((uint16_t *)r->of[which].host)[i] = to_half(r, normal(r));
        send(&r->of[which]);
        *tensors[which] = (dw_attention_tensor){r->of[which].device, place(r, which, 1, 0, 0),
                                                place(r, which, 0, 1, 0), place(r, which, 0, 0, 1)};
    }
    make(&r->lse, (size_t)(p->batch * p->heads_q * p->rows_q), sizeof(float));
    r->call.lse = r->lse.device;
    if (p->axes) make_bias(r);
    if (dw_attention_backward_workspace(&r->call, &bytes) != DW_OK) fail_msg("%s", dw_last_error());
    make(&r->workspace, bytes, 1);
    send(&r->workspace);
    r->call.workspace = r->workspace.device;
    r->call.workspace_bytes = bytes;
}

static inline void close_run(run *r) {
    for (int which = 0; which < ROWS_OF_HEADS; which++) drop(&r->of[which]);
    array *more[] = {&r->lse, &r->bias, &r->d_bias, &r->workspace};
    for (size_t i = 0; i < 4; i++)
        if (more[i]->host) drop(more[i]);
}

/* ---- the definition ---------------------------------------------------------------------------------- */

/* Sums in FP64, and of the magnitudes of their terms that a kernel rounds. */
typedef struct sums {
    double *value, *rounded;
} sums;

static inline sums make_sums(size_t count) {
    const sums s = {calloc(count, sizeof(double)), calloc(count, sizeof(double))};
    assert_non_null(s.value);
    assert_non_null(s.rounded);
    return s;
}
static inline void drop_sums(sums s) { free(s.value), free(s.rounded); }

static inline double dot(const run *r, int a, int64_t at, int b, int64_t with) {
    double sum = 0;
    for (int d = 0; d < r->p->head_dim; d++)
        sum += number(r, &r->of[a], at + d) * number(r, &r->of[b], with + d);
    return sum;
}

static inline double bias_at(const run *r, int b, int h, int i, int j) {
    const int64_t at = place_bias(r, b, h, i, j);
    if (r->p->bytes) return ((const uint8_t *)r->bias.host)[at] ? 0 : -INFINITY;
    return number(r, &r->bias, at);
}

/* The probabilities of a query, and whether it sees a key. */
static inline bool find_probabilities(const run *r, int b, int h, int i, double *p, double *lse) {
    const problem *x = r->p;
    const int kv = h / (x->heads_q / x->heads_kv),
              last = x->causal ? i + (x->bottom_right ? x->rows_k - x->rows_q : 0) : x->rows_k - 1;
    double top = -INFINITY, sum = 0;
    for (int j = 0; j < x->rows_k; j++) {
        double score = (double)0.2f * dot(r, Q, place(r, Q, b, h, i), K, place(r, K, b, kv, j));
        if (x->softcap > 0) score = (double)x->softcap * tanh(score / (double)x->softcap);
        if (x->axes) score += bias_at(r, b, h, i, j);
        p[j] = j > last || (x->window && j < last - x->window) ? -INFINITY : score;
        top = fmax(top, p[j]);
    }
    if (top == -INFINITY) {
        for (int j = 0; j < x->rows_k; j++) p[j] = 0;
        return false;
    }
    for (int j = 0; j < x->rows_k; j++) sum += p[j] = exp(p[j] - top);
    for (int j = 0; j < x->rows_k; j++) p[j] /= sum;
    *lse = top + log(sum);
    return true;
}

static inline double kept(const run *r, int b, int h, int i, int j) {
    const problem *x = r->p;
    const int64_t index = (((int64_t)b * x->heads_q + h) * x->rows_q + i) * x->rows_k + j;
    if (x->dropout == 0.0f) return 1;
    return dw__philox_uniform(5, 9, 0, (uint64_t)index) >= x->dropout ? 1 / (1 - (double)x->dropout)
                                                                      : 0;
}

/* The bound of a result: P and dS are rounded to the type before they are multiplied, by at most its unit roundoff; the
 * exponent has F32's errors of the score and its bias, 3000 * 2^-23 of a large one and as much of the LSE; the result
 * is rounded. */
static inline double bound(const run *r, double value, double rounded) {
    const double unit = r->p->f16 ? 0x1p-11 : 0x1p-8;
    const double exponent = r->p->content == LOW ? 3000 * 0x1p-22 : 0x1p-16;
    return (unit + exponent) * rounded + unit * fabs(value) + (r->p->f16 ? 0x1p-22 : 1e-30);
}

static inline void compare(const run *r, const char *what, double got, double value, double rounded,
                           int64_t at) {
    const double most = bound(r, value, rounded);
    if (!(fabs(got - value) <= most))
        fail_msg("problem %d: %s[%lld] is %.9g; expected %.9g within %.3g", r->number, what,
                 (long long)at, got, value, most);
}

static inline void check_row(const run *r, int b, int h, int i, double *p) {
    const problem *x = r->p;
    const int kv = h / (x->heads_q / x->heads_kv);
    double lse = -INFINITY;
    const bool sees = find_probabilities(r, b, h, i, p, &lse);
    const float got = ((const float *)r->lse.host)[(b * x->heads_q + h) * x->rows_q + i];
    if (sees ? !(fabs((double)got - lse) <= 1e-4 + fabs(lse) * 0x1p-22) : got != -INFINITY)
        fail_msg("problem %d: lse of %d, %d, %d is %g; expected %g", r->number, b, h, i,
                 (double)got, lse);
    for (int d = 0; d < x->head_dim; d++) {
        double o = 0, size = 0;
        for (int j = 0; j < x->rows_k; j++) {
            const double term =
                p[j] * kept(r, b, h, i, j) * number(r, &r->of[V], place(r, V, b, kv, j) + d);
            o += term, size += fabs(term);
        }
        const int64_t at = place(r, O, b, h, i) + d;
        compare(r, "o", number(r, &r->of[O], at), o, size, at);
    }
}

typedef struct gradients {
    sums dq, dk, dv, bias;
} gradients;

static inline void add(sums s, int64_t at, double value, double rounded) {
    s.value[at] += value;
    s.rounded[at] += fabs(rounded);
}

/* Adds what a query contributes. delta is of O as forward stored it. */
static inline void differentiate_row(const run *r, int b, int h, int i, double *p, gradients *g) {
    const problem *x = r->p;
    const int kv = h / (x->heads_q / x->heads_kv);
    const int64_t q = place(r, Q, b, h, i);
    const double delta = dot(r, D_O, q, O, q), scale = (double)0.2f;
    double lse;
    (void)find_probabilities(r, b, h, i, p, &lse);
    for (int j = 0; j < x->rows_k; j++) {
        const int64_t k = place(r, K, b, kv, j);
        const double keep = kept(r, b, h, i, j), dp = dot(r, D_O, q, V, k) * keep,
                     ds = p[j] * (dp - delta), size = p[j] * (fabs(dp) + fabs(delta));
        if (p[j] == 0) continue;
        if (x->axes)
            add(g->bias, place_bias(r, b, h, i, j), ds, size * 0x1p-6); /* is not rounded before */
        for (int d = 0; d < x->head_dim; d++) {
            const double qd = number(r, &r->of[Q], q + d), kd = number(r, &r->of[K], k + d);
            const double od = number(r, &r->of[D_O], q + d);
            /* dS is small next to its terms, whose probability has an error in F32. */
            const double off = fabs(ds) + size * 0x1p-6;
            add(g->dq, q + d, scale * ds * kd, scale * off * fabs(kd));
            add(g->dk, k + d, scale * ds * qd, scale * off * fabs(qd));
            add(g->dv, k + d, p[j] * keep * od, p[j] * keep * fabs(od));
        }
    }
}

static inline void check_gradients(const run *r, double *p) {
    const problem *x = r->p;
    gradients g = {make_sums(r->of[DQ].count), make_sums(r->of[DK].count),
                   make_sums(r->of[DV].count), make_sums(r->bias.count)};
    for (int b = 0; b < x->batch; b++)
        for (int h = 0; h < x->heads_q; h++)
            for (int i = 0; i < x->rows_q; i++) differentiate_row(r, b, h, i, p, &g);
    const sums all[] = {g.dq, g.dk, g.dv};
    static const char *const names[] = {"dq", "dk", "dv"};
    for (int which = 0; which < 3; which++)
        for (size_t i = 0; i < r->of[DQ + which].count; i++)
            compare(r, names[which], number(r, &r->of[DQ + which], (int64_t)i), all[which].value[i],
                    all[which].rounded[i], (int64_t)i);
    for (int b = 0; x->gradient && b < x->batch; b++)
        for (int h = 0; h < x->heads_q; h++)
            for (int i = 0; i < x->rows_q; i++)
                for (int j = 0; j < x->rows_k; j++) {
                    const int64_t at = place_bias(r, b, h, i, j);
                    compare(r, "d_bias", number(r, &r->d_bias, at), g.bias.value[at],
                            g.bias.rounded[at], at);
                }
    for (int which = 0; which < 3; which++) drop_sums(all[which]);
    drop_sums(g.bias);
}

/* Runs both passes and compares them. */
static inline void solve(const problem *p, int problem_number) {
    run r;
    open_run(&r, p, problem_number);
    double *row = malloc((size_t)p->rows_k * sizeof *row);
    assert_non_null(row);
    if (dw_attention_forward(&r.call) != DW_OK) fail_msg("%s", dw_last_error());
    if (!p->inputs_only && dw_attention_backward(&r.call) != DW_OK) fail_msg("%s", dw_last_error());
    for (int which = 0; which < ROWS_OF_HEADS; which++) fetch(&r.of[which]);
    fetch(&r.lse);
    if (p->axes) fetch(&r.d_bias);
    for (int b = 0; b < p->batch; b++)
        for (int h = 0; h < p->heads_q; h++)
            for (int i = 0; i < p->rows_q; i++) check_row(&r, b, h, i, row);
    if (!p->inputs_only) check_gradients(&r, row);
    free(row);
    close_run(&r);
}

#endif
