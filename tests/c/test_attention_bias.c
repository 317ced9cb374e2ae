/* Masks and biases of dw_attention on an emulated Hopper GPU, its checker on, against the definition in FP64: each axis
 * repeated, numbers and bytes, rows that a mask hides or absorbs, the gradient of the bias. DEEPWELL_TEST_DEVICE=cuda runs
 * the same on a GPU. */
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
    const char *axes; /* of batch, heads, queries, keys: 'x' has its own, '1' repeats */
    content content;
    int padding; /* elements between rows */
    bool causal, bottom_right, deterministic;
    float dropout;
} problem;

static const problem problems[] = {
    /* T5: a learned bias that repeats along the batch; 8 keys at a time, and one at a time */
    {64, 3, 2, 2, 136, 200, .axes = "1xxx", .gradient = true, .deterministic = true},
    {64, 2, 2, 2, 70, 75, .axes = "1xxx", .gradient = true, .causal = true, .deterministic = true},
    {64, 2, 4, 2, 130, 264, .axes = "xxxx", .gradient = true, .causal = true, .bottom_right = true,
     .deterministic = true, .content = HIDDEN},
    /* absorbed rows have equal probabilities, hidden ones none */
    {64, 2, 2, 1, 66, 136, .axes = "x1xx", .gradient = true, .content = ABSORBED,
     .deterministic = true},
    {64, 2, 2, 2, 66, 136, .axes = "11xx", .gradient = true, .content = LOW},
    {64, 2, 2, 2, 66, 72, .axes = "x1xx", .content = ABSORBED, .causal = true},
    /* padding, ALiBi, one number for a query */
    {64, 2, 2, 2, 129, 77, .axes = "x11x", .content = HIDDEN},
    {64, 2, 2, 2, 64, 130, .axes = "1x1x", .padding = 3},
    {64, 1, 2, 2, 64, 72, .axes = "x1x1"},
    /* bytes */
    {64, 2, 2, 2, 70, 136, .axes = "x11x", .bytes = true, .content = HIDDEN},
    {64, 2, 2, 2, 70, 75, .axes = "x1xx", .bytes = true, .content = HIDDEN, .causal = true},
    /* other kernels: queries are rows above a head dimension of 128; F16; dropout; narrow heads */
    {128, 2, 2, 1, 70, 136, .axes = "1xxx", .gradient = true, .padding = 8, .deterministic = true},
    {192, 2, 2, 2, 70, 104, .axes = "1xxx", .gradient = true, .content = ABSORBED},
    {256, 1, 2, 1, 70, 90, .axes = "1xxx", .gradient = true, .causal = true},
    {72, 2, 2, 2, 66, 72, .axes = "1xxx", .gradient = true, .f16 = true, .content = HIDDEN},
    {64, 2, 2, 2, 130, 136, .axes = "1xxx", .gradient = true, .dropout = 0.2f,
     .deterministic = true},
};

/* ---- data ------------------------------------------------------------------------------------------ */

typedef struct array {
    size_t count, size; /* elements, and their bytes */
    void *host, *device;
} array;

enum { Q, K, V, O, D_O, DQ, DK, DV, ROWS_OF_HEADS };

typedef struct run {
    const problem *p;
    array of[ROWS_OF_HEADS], lse, bias, d_bias, workspace;
    dw_attention_bias layout; /* without `data` */
    dw_attention call;
    uint64_t state;
} run;

static uint32_t draw(run *r) {
    r->state = r->state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(r->state >> 33);
}
/* About normal: a sum of uniform numbers. */
static float normal(run *r) {
    float sum = 0;
    for (int i = 0; i < 4; i++) sum += (float)draw(r) / 2147483648.0f - 0.5f;
    return sum * 1.7f;
}

static uint16_t to_half(const run *r, float x) {
    return r->p->f16 ? dw__f32_to_f16(x) : dw__f32_to_bf16(x);
}
static double number(const run *r, const array *a, int64_t at) {
    const uint16_t bits = ((const uint16_t *)a->host)[at];
    return (double)(r->p->f16 ? dw__f16_to_f32(bits) : dw__bf16_to_f32(bits));
}

static void make(array *a, size_t count, size_t size) {
    *a = (array){.count = count, .size = size, .host = malloc(count * size + 1)};
    assert_non_null(a->host);
    memset(a->host, 0xFF, count * size);
    assert_int_equal(dw_device_allocate(device, count * size + 1, &a->device), DW_OK);
}
static void send(const array *a) {
    assert_int_equal(dw_device_copy_in(device, a->device, a->host, a->count * a->size), DW_OK);
}
static void fetch(const array *a) {
    assert_int_equal(dw_device_copy_out(device, a->host, a->device, a->count * a->size), DW_OK);
}
static void drop(const array *a) {
    dw_device_release(device, a->device, a->count * a->size + 1);
    free(a->host);
}

static bool of_keys(int which) { return which == K || which == V || which == DK || which == DV; }

static int64_t place(const run *r, int which, int b, int h, int i) {
    const problem *p = r->p;
    const int heads = of_keys(which) ? p->heads_kv : p->heads_q,
              rows = of_keys(which) ? p->rows_k : p->rows_q;
    return (((int64_t)b * heads + h) * rows + i) * p->head_dim;
}
static int64_t place_bias(const run *r, int b, int h, int i, int j) {
    return b * r->layout.batch + h * r->layout.head + i * r->layout.row + j * r->layout.key;
}

static float bias_number(run *r, int64_t query, int64_t index) {
    const bool row = query % 3 == 2, pair = index % 5 == 1;
    const float least = r->p->f16 ? -65504.0f : dw__bf16_to_f32(0xFF7F);
    switch (r->p->content) {
    case HIDDEN: return row || pair ? -INFINITY : normal(r);
    case ABSORBED: return row || pair ? least : normal(r);
    case LOW: return row ? -3000.0f : normal(r);
    default: return normal(r);
    }
}

static void make_bias(run *r) {
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

static void open_run(run *r, const problem *p) {
    size_t bytes;
    *r = (run){.p = p, .state = 77 + (uint64_t)(p - problems)};
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
                             .window_left = -1,
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
                                                place(r, which, 0, 1, 0), p->head_dim};
    }
    make(&r->lse, (size_t)(p->batch * p->heads_q * p->rows_q), sizeof(float));
    r->call.lse = r->lse.device;
    make_bias(r);
    if (dw_attention_backward_workspace(&r->call, &bytes) != DW_OK) fail_msg("%s", dw_last_error());
    make(&r->workspace, bytes, 1);
    send(&r->workspace);
    r->call.workspace = r->workspace.device;
    r->call.workspace_bytes = bytes;
}

static void close_run(run *r) {
    for (int which = 0; which < ROWS_OF_HEADS; which++) drop(&r->of[which]);
    array *more[] = {&r->lse, &r->bias, &r->d_bias, &r->workspace};
    for (size_t i = 0; i < 4; i++) drop(more[i]);
}

/* ---- the definition ---------------------------------------------------------------------------------- */

/* Sums in FP64, and of the magnitudes of their terms that a kernel rounds. */
typedef struct sums {
    double *value, *rounded;
} sums;

static sums make_sums(size_t count) {
    const sums s = {calloc(count, sizeof(double)), calloc(count, sizeof(double))};
    assert_non_null(s.value);
    assert_non_null(s.rounded);
    return s;
}
static void drop_sums(sums s) { free(s.value), free(s.rounded); }

static double dot(const run *r, int a, int64_t at, int b, int64_t with) {
    double sum = 0;
    for (int d = 0; d < r->p->head_dim; d++)
        sum += number(r, &r->of[a], at + d) * number(r, &r->of[b], with + d);
    return sum;
}

/* The probabilities of a query, and whether it sees a key. */
static bool find_probabilities(const run *r, int b, int h, int i, double *p, double *lse) {
    const problem *x = r->p;
    const int kv = h / (x->heads_q / x->heads_kv),
              last = x->causal ? i + (x->bottom_right ? x->rows_k - x->rows_q : 0) : x->rows_k - 1;
    double top = -INFINITY, sum = 0;
    for (int j = 0; j < x->rows_k; j++) {
        const int64_t at = place_bias(r, b, h, i, j);
        double add = x->bytes ? (((const uint8_t *)r->bias.host)[at] ? 0 : -INFINITY)
                              : number(r, &r->bias, at);
        p[j] = j > last
                   ? -INFINITY
                   : (double)0.2f * dot(r, Q, place(r, Q, b, h, i), K, place(r, K, b, kv, j)) + add;
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

static double kept(const run *r, int b, int h, int i, int j) {
    const problem *x = r->p;
    const int64_t index = (((int64_t)b * x->heads_q + h) * x->rows_q + i) * x->rows_k + j;
    if (x->dropout == 0.0f) return 1;
    return dw__philox_uniform(5, 9, 0, (uint64_t)index) >= x->dropout ? 1 / (1 - (double)x->dropout)
                                                                      : 0;
}

/* The bound of a result: P and dS are rounded to the type before they are multiplied, by at most its unit roundoff; the
 * exponent has F32's errors of the score and its bias, 3000 * 2^-23 of a large one and as much of the LSE; the result is
 * rounded. */
static double bound(const run *r, double value, double rounded) {
    const double unit = r->p->f16 ? 0x1p-11 : 0x1p-8;
    const double exponent = r->p->content == LOW ? 3000 * 0x1p-22 : 0x1p-16;
    return (unit + exponent) * rounded + unit * fabs(value) + (r->p->f16 ? 0x1p-22 : 1e-30);
}

static void compare(const run *r, const char *what, double got, double value, double rounded,
                    int64_t at) {
    const double most = bound(r, value, rounded);
    if (!(fabs(got - value) <= most))
        fail_msg("problem %d: %s[%lld] is %.9g; expected %.9g within %.3g", (int)(r->p - problems),
                 what, (long long)at, got, value, most);
}

static void check_row(const run *r, int b, int h, int i, double *p) {
    const problem *x = r->p;
    const int kv = h / (x->heads_q / x->heads_kv);
    double lse = -INFINITY;
    const bool sees = find_probabilities(r, b, h, i, p, &lse);
    const float got = ((const float *)r->lse.host)[(b * x->heads_q + h) * x->rows_q + i];
    if (sees ? !(fabs((double)got - lse) <= 1e-4 + fabs(lse) * 0x1p-22) : got != -INFINITY)
        fail_msg("problem %d: lse of %d, %d, %d is %g; expected %g", (int)(x - problems), b, h, i,
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

static void add(sums s, int64_t at, double value, double rounded) {
    s.value[at] += value;
    s.rounded[at] += fabs(rounded);
}

/* Adds what a query contributes. delta is of O as forward stored it. */
static void differentiate_row(const run *r, int b, int h, int i, double *p, gradients *g) {
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

static void check_gradients(const run *r, double *p) {
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

/* ---- tests --------------------------------------------------------------------------------------------- */

static int find_device(void **state) {
    (void)state;
    const char *name = getenv("DEEPWELL_TEST_DEVICE");
#ifdef TEST_NVRTC
    if (!name) setenv("DEEPWELL_NVRTC", TEST_NVRTC, 0);
#endif
    setenv("DEEPWELL_FIRST_USE_CHECK", "off", 0); /* this test compares by itself */
    if (dw_device_find(name ? name : "emulator:sm_90a", &device) != DW_OK)
        fail_msg("%s", dw_last_error());
    return 0;
}

static void needs_compiler(void) {
    const char *compiler;
    if (dw_jit_compiler(&compiler) != DW_OK) skip();
}

static void solve(const problem *p) {
    run r;
    open_run(&r, p);
    double *row = malloc((size_t)p->rows_k * sizeof *row);
    assert_non_null(row);
    if (dw_attention_forward(&r.call) != DW_OK) fail_msg("%s", dw_last_error());
    if (dw_attention_backward(&r.call) != DW_OK) fail_msg("%s", dw_last_error());
    for (int which = 0; which < ROWS_OF_HEADS; which++) fetch(&r.of[which]);
    fetch(&r.lse);
    fetch(&r.d_bias);
    for (int b = 0; b < p->batch; b++)
        for (int h = 0; h < p->heads_q; h++)
            for (int i = 0; i < p->rows_q; i++) check_row(&r, b, h, i, row);
    check_gradients(&r, row);
    free(row);
    close_run(&r);
}

static void masks_and_biases_agree_with_the_definition(void **state) {
    (void)state;
    needs_compiler();
    for (size_t i = 0; i < sizeof problems / sizeof *problems; i++) solve(&problems[i]);
}

static void refused(dw_attention call, bool backward, dw_status status, const char *words) {
    const dw_status got = backward ? dw_attention_backward(&call) : dw_attention_forward(&call);
    assert_int_equal(got, status);
    if (!strstr(dw_last_error(), words)) fail_msg("%s", dw_last_error());
}

static void what_no_kernel_supports_is_refused(void **state) {
    (void)state;
    run r;
    open_run(&r, &problems[0]);
    dw_attention call = r.call;
    call.softcap = 2;
    refused(call, false, DW_UNSUPPORTED, "a bias with a soft cap");
    call = r.call;
    call.bias_kind = (dw_attention_bias_kind)7;
    refused(call, false, DW_INVALID_ARGUMENT, "bias_kind is 7");
    call = r.call;
    call.bias.row = -8;
    refused(call, false, DW_INVALID_ARGUMENT, "the strides of bias are");
    call = r.call;
    call.bias.data = NULL;
    refused(call, false, DW_INVALID_ARGUMENT, "bias is NULL");
    call = r.call;
    call.bias.row = 0;
    refused(call, true, DW_UNSUPPORTED, "a bias that repeats along queries or keys");
    call = r.call;
    call.bias_kind = DW_ATTENTION_VISIBLE;
    refused(call, true, DW_UNSUPPORTED, "d_bias is given for a bias of bytes");
    close_run(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(masks_and_biases_agree_with_the_definition),
        cmocka_unit_test(what_no_kernel_supports_is_refused),
    };
    return cmocka_run_group_tests(tests, find_device, NULL);
}
