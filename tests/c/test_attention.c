/* Tiled attention, forward and backward, against the definition in double precision: awkward sizes,
 * masks of every kind, grouped heads, dropout, strided operands; the same bits on any number of
 * threads; nothing written outside. Bounds follow from the standard model of rounding (Higham,
 * Accuracy and Stability, ch. 3), propagated through the softmax. */
#include "../ops/kernel_call.h"
#include "base/pool.h"
#include "guarded_floats.h"
#include "kernel/kernel.h"
#include "number/half.h"
#include "number/philox.h"
#include "random_numbers.h"
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- problems ----------------------------------------------------------------------------------- */

typedef enum mask_kind {
    NO_MASK,
    BOOL_FULL,
    BOOL_PADDING,
    FLOAT_FULL,
    FLOAT_HEADS,
    /* Contains F32's least number: for one key in four, and for all keys of one query in three. */
    FLOAT_LOW
} mask_kind;

typedef struct problem {
    int64_t batches, heads, key_heads, queries, keys, head_size, value_size;
    int64_t causal, window;
    mask_kind mask;
    double p;
    bool rows_first; /* memory order [B, S, H, D] instead of [B, H, S, D], and rows padded */
    float magnitude; /* of q and k */
    double softcap;  /* 0: none */
} problem;

enum { Q, K, V, O, DO, DQ, DK, DV, LSE, ROWS };

typedef struct data {
    float *block[ROWS]; /* guarded */
    int64_t count[ROWS];
    dw__tensor tensor[ROWS], mask, seed;
    uint8_t *mask_bytes;
    float *mask_floats;
    int64_t seeds[2];
    dw_attr attrs[6];
    dw__call forward, backward;
} data;

static void place(data *d, int which, int64_t batches, int64_t heads, int64_t rows, int64_t size,
                  bool rows_first) {
    int64_t padded = rows_first ? size + 3 : size;
    dw__tensor t = {NULL, DW_F32, 4, {batches, heads, rows, size}, {0, 0, 0, 1}};
    t.stride[0] = heads * rows * padded;
    t.stride[1] = rows_first ? padded : rows * padded;
    t.stride[2] = rows_first ? heads * padded : padded;
    d->count[which] = batches * t.stride[0];
    d->block[which] = t.data = guarded(d->count[which]);
    d->tensor[which] = t;
}

static float *at(const data *d, int which, int64_t b, int64_t h, int64_t s, int64_t e) {
    const dw__tensor *t = &d->tensor[which];
    return (float *)t->data + b * t->stride[0] + h * t->stride[1] + s * t->stride[2] + e;
}

static void fill(data *d, int which, float magnitude) {
    const dw__tensor *t = &d->tensor[which];
    for (int64_t b = 0; b < t->shape[0]; b++)
        for (int64_t h = 0; h < t->shape[1]; h++)
            for (int64_t s = 0; s < t->shape[2]; s++)
                for (int64_t e = 0; e < t->shape[3]; e++)
                    *at(d, which, b, h, s, e) = magnitude * random_float();
}

static void make_mask(data *d, const problem *p) {
    d->mask = (dw__tensor){NULL, DW_BOOL, -1, {0}, {0}};
    d->mask_bytes = NULL;
    d->mask_floats = NULL;
    if (p->mask == NO_MASK) return;
    int64_t b = p->mask == FLOAT_HEADS ? 1 : p->batches;
    int64_t h = p->mask == FLOAT_HEADS ? p->heads : 1;
    int64_t q = p->mask == BOOL_PADDING ? 1 : p->queries;
    d->mask = (dw__tensor){NULL, DW_BOOL, 4, {b, h, q, p->keys}, {0}};
    dw__tensor_set_contiguous(&d->mask);
    int64_t count = b * h * q * p->keys;
    if (p->mask == BOOL_FULL || p->mask == BOOL_PADDING) {
        d->mask.data = d->mask_bytes = dw__malloc((size_t)count);
        for (int64_t i = 0; i < count; i++) d->mask_bytes[i] = random_float() > -0.4f;
    } else {
        d->mask.dtype = DW_F32;
        d->mask.data = d->mask_floats = dw__malloc((size_t)count * sizeof(float));
        for (int64_t i = 0; i < count; i++) {
            d->mask_floats[i] = random_float() > 0.9f ? -INFINITY : random_float();
            if (p->mask != FLOAT_LOW) continue;
            bool low = i / p->keys % 3 == 0 || random_float() > 0.5f;
            d->mask_floats[i] = low ? -FLT_MAX : 0.0f;
        }
    }
}

static void make(data *d, const problem *p) {
    place(d, Q, p->batches, p->heads, p->queries, p->head_size, p->rows_first);
    place(d, K, p->batches, p->key_heads, p->keys, p->head_size, p->rows_first);
    place(d, V, p->batches, p->key_heads, p->keys, p->value_size, p->rows_first);
    place(d, O, p->batches, p->heads, p->queries, p->value_size, p->rows_first);
    place(d, DO, p->batches, p->heads, p->queries, p->value_size, p->rows_first);
    place(d, DQ, p->batches, p->heads, p->queries, p->head_size, p->rows_first);
    place(d, DK, p->batches, p->key_heads, p->keys, p->head_size, p->rows_first);
    place(d, DV, p->batches, p->key_heads, p->keys, p->value_size, p->rows_first);
    place(d, LSE, p->batches, p->heads, 1, p->queries, false);
    fill(d, Q, p->magnitude);
    fill(d, K, p->magnitude);
    fill(d, V, 1.0f);
    fill(d, DO, 1.0f);
    make_mask(d, p);
    d->seeds[0] = 0x123456789abcdef;
    d->seeds[1] = 77;
    d->seed = (dw__tensor){d->seeds, DW_I64, p->p > 0 ? 1 : -1, {2}, {1}};

    d->attrs[0] = dw_attr_float(DW_ATTR_KEY_SCALE, 1.0 / sqrt((double)p->head_size));
    d->attrs[1] = dw_attr_float(DW_ATTR_KEY_P, p->p);
    d->attrs[2] = dw_attr_int(DW_ATTR_KEY_STREAM, 5);
    d->attrs[3] = dw_attr_int(DW_ATTR_KEY_CAUSAL, p->causal);
    d->attrs[4] = dw_attr_int(DW_ATTR_KEY_WINDOW, p->window);
    d->attrs[5] = dw_attr_float(DW_ATTR_KEY_SOFTCAP, p->softcap);
    dw__tensor lse = {d->block[LSE], DW_F32, 3, {p->batches, p->heads, p->queries}, {0}};
    dw__tensor_set_contiguous(&lse);
    d->forward = (dw__call){.op = DW_OP_ATTENTION,
                            .attr_count = 6,
                            .attrs = d->attrs,
                            .input_count = 5,
                            .output_count = 2};
    dw__tensor inputs[8] = {d->tensor[Q], d->tensor[K], d->tensor[V], d->mask,
                            d->seed,      d->tensor[O], lse,          d->tensor[DO]};
    memcpy(d->forward.inputs, inputs, 5 * sizeof *inputs);
    d->forward.outputs[0] = d->tensor[O];
    d->forward.outputs[1] = lse;
    d->backward = d->forward;
    d->backward.op = DW_OP_ATTENTION_BACKWARD;
    d->backward.input_count = 8;
    d->backward.output_count = 3;
    memcpy(d->backward.inputs, inputs, sizeof inputs);
    for (int i = 0; i < 3; i++) d->backward.outputs[i] = d->tensor[DQ + i];
}

static void destroy(data *d) {
    for (int i = 0; i < ROWS; i++) release(d->block[i], d->count[i]);
    dw__free(d->mask_bytes);
    dw__free(d->mask_floats);
}

/* ---- the definition ------------------------------------------------------------------------------ */

/* Additive mask of one pair: -INFINITY if the query may not attend to the key. */
static double bias_of(const data *d, const problem *p, int64_t b, int64_t h, int64_t i, int64_t j) {
    int64_t shift = p->causal == 2 ? p->keys - p->queries : 0;
    if (p->causal && j > i + shift) return -INFINITY;
    if (p->window >= 0 && j <= i + shift - p->window) return -INFINITY;
    if (d->mask.rank < 0) return 0.0;
    const int64_t *n = d->mask.shape;
    int64_t mb = n[0] == 1 ? 0 : b, mh = n[1] == 1 ? 0 : h, mi = n[2] == 1 ? 0 : i;
    int64_t index = ((mb * n[1] + mh) * n[2] + mi) * n[3] + j;
    if (d->mask_bytes) return d->mask_bytes[index] ? 0.0 : -INFINITY;
    return d->mask_floats[index];
}

/* Values of one query: probabilities, their dropout factors, the soft cap's slope, log-sum-exp, and a bound
 * on the relative error of any probability in F32. */
typedef struct row {
    double *p, *keep, *slope, lse, error;
} row;

static const double UNIT = 0x1p-24;

static void softmax_row(const data *d, const problem *p, int64_t b, int64_t h, int64_t i,
                        row *out) {
    double scale = 1.0 / sqrt((double)p->head_size), highest = -INFINITY, spread = 0.0, sum = 0.0;
    int64_t kh = h / (p->heads / p->key_heads);
    for (int64_t j = 0; j < p->keys; j++) {
        double score = 0.0, magnitude = 0.0;
        for (int64_t e = 0; e < p->head_size; e++) {
            double term = (double)*at(d, Q, b, h, i, e) * *at(d, K, b, kh, j, e) * scale;
            score += term;
            magnitude += fabs(term);
        }
        double bent = p->softcap > 0 ? tanh(score / p->softcap) : 0.0;
        if (p->softcap > 0) score = p->softcap * bent;
        out->slope[j] = 1.0 - bent * bent;
        out->p[j] = score + bias_of(d, p, b, h, i, j);
        if (out->p[j] > highest) highest = out->p[j];
        if (magnitude > spread) spread = magnitude;
        int64_t index = ((b * p->heads + h) * p->queries + i) * p->keys + j;
        float uniform = dw__philox_uniform(d->seeds[0], d->seeds[1], 5, (uint64_t)index);
        out->keep[j] = uniform >= (float)p->p ? 1.0 / (1.0 - p->p) : 0.0;
    }
    for (int64_t j = 0; j < p->keys; j++) {
        out->p[j] = highest == -INFINITY ? 0.0 : exp(out->p[j] - highest);
        sum += out->p[j];
    }
    for (int64_t j = 0; j < p->keys && sum > 0.0; j++) out->p[j] /= sum;
    out->lse = sum > 0.0 ? highest + log(sum) : -INFINITY;
    /* Scores have an error of (D + 4) units of their terms, twice (numerator and normaliser). The sum over
     * keys, exponentials and corrections add some units. */
    out->error =
        UNIT * (2.0 * (double)(p->head_size + 6) * (spread + 2.0) + (double)p->keys + 20.0);
}

/* Terms below F32's range are lost completely, so their relative bound does not apply. */
static const double UNDERFLOW_LOSS = 1024.0 * FLT_MIN;

static void assert_close(double got, double want, double bound, const char *what) {
    bound += UNDERFLOW_LOSS;
    if (!(fabs(got - want) <= bound)) {
        fail_msg("%s: got %.9g, want %.9g, bound %.3g", what, got, want, bound);
    }
}

static void check_forward(const data *d, const problem *p, row *r) {
    for (int64_t b = 0; b < p->batches; b++) {
        for (int64_t h = 0; h < p->heads; h++) {
            for (int64_t i = 0; i < p->queries; i++) {
                softmax_row(d, p, b, h, i, r);
                double lse = d->block[LSE][(b * p->heads + h) * p->queries + i];
                if (r->lse == -INFINITY) {
                    assert_true(lse == -INFINITY);
                } else {
                    assert_close(lse, r->lse, r->error + fabs(r->lse) * 4 * UNIT, "lse");
                }
                for (int64_t e = 0; e < p->value_size; e++) {
                    double o = 0.0, magnitude = 0.0;
                    for (int64_t j = 0; j < p->keys; j++) {
                        double v = *at(d, V, b, h / (p->heads / p->key_heads), j, e);
                        o += r->p[j] * r->keep[j] * v;
                        magnitude += r->p[j] * r->keep[j] * fabs(v);
                    }
                    assert_close(*at(d, O, b, h, i, e), o,
                                 2.0 * (r->error + UNIT * (double)p->keys) * magnitude, "o");
                }
            }
        }
    }
}

typedef struct sums {
    double *value, *bound;
} sums;

static void add_to(sums *s, int64_t index, double term, double error) {
    s->value[index] += term;
    s->bound[index] += error;
}

/* Adds the gradients of one query to dq (of this query), dk and dv. */
static void backward_row(const data *d, const problem *p, int64_t b, int64_t h, int64_t i, row *r,
                         sums *dq, sums *dk, sums *dv) {
    int64_t kh = h / (p->heads / p->key_heads), size = p->head_size, value_size = p->value_size;
    double scale = 1.0 / sqrt((double)size), delta = 0.0, delta_magnitude = 0.0;
    double terms = (double)(value_size + 2 * p->keys + size + 20 + p->queries * p->heads);
    softmax_row(d, p, b, h, i, r);
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t j = 0; j < p->keys; j++) {
            double dp = 0.0, magnitude = 0.0;
            for (int64_t e = 0; e < value_size; e++) {
                double term = (double)*at(d, DO, b, h, i, e) * *at(d, V, b, kh, j, e) * r->keep[j];
                dp += term;
                magnitude += fabs(term);
            }
            if (pass == 0) {
                delta += r->p[j] * dp;
                delta_magnitude += r->p[j] * magnitude;
                continue;
            }
            double ds = scale * r->p[j] * (dp - delta) * r->slope[j];
            double error = 2.0 * scale * r->p[j] * (magnitude + delta_magnitude) *
                           (2.0 * r->error + UNIT * terms);
            /* The slope 1 - tanh^2 changes by at most 0.77 / cap per score, and is itself rounded. */
            if (p->softcap > 0)
                error +=
                    fabs(scale * r->p[j] * (dp - delta)) * (r->error / p->softcap + 8.0 * UNIT);
            for (int64_t e = 0; e < size; e++) {
                double k = *at(d, K, b, kh, j, e), q = *at(d, Q, b, h, i, e);
                add_to(dq, e, ds * k, error * fabs(k));
                add_to(dk, j * size + e, ds * q, error * fabs(q));
            }
            for (int64_t e = 0; e < value_size; e++) {
                double term = r->p[j] * r->keep[j] * *at(d, DO, b, h, i, e);
                add_to(dv, j * value_size + e, term, 2.0 * fabs(term) * (r->error + UNIT * terms));
            }
        }
    }
}

static void clear(sums *s, int64_t count) {
    memset(s->value, 0, (size_t)count * sizeof(double));
    memset(s->bound, 0, (size_t)count * sizeof(double));
}

static sums make_sums(int64_t count) {
    sums s = {dw__calloc((size_t)count, sizeof(double)), dw__calloc((size_t)count, sizeof(double))};
    return s;
}

static void free_sums(sums *s) {
    dw__free(s->value);
    dw__free(s->bound);
}

static void check_backward(const data *d, const problem *p, row *r) {
    sums dq = make_sums(p->head_size), dk = make_sums(p->keys * p->head_size);
    sums dv = make_sums(p->keys * p->value_size);
    int64_t group = p->heads / p->key_heads;
    for (int64_t b = 0; b < p->batches; b++) {
        for (int64_t kh = 0; kh < p->key_heads; kh++) {
            clear(&dk, p->keys * p->head_size);
            clear(&dv, p->keys * p->value_size);
            for (int64_t h = kh * group; h < (kh + 1) * group; h++) {
                for (int64_t i = 0; i < p->queries; i++) {
                    clear(&dq, p->head_size);
                    backward_row(d, p, b, h, i, r, &dq, &dk, &dv);
                    for (int64_t e = 0; e < p->head_size; e++) {
                        assert_close(*at(d, DQ, b, h, i, e), dq.value[e], dq.bound[e], "dq");
                    }
                }
            }
            for (int64_t j = 0; j < p->keys; j++) {
                for (int64_t e = 0; e < p->head_size; e++) {
                    int64_t index = j * p->head_size + e;
                    assert_close(*at(d, DK, b, kh, j, e), dk.value[index], dk.bound[index], "dk");
                }
                for (int64_t e = 0; e < p->value_size; e++) {
                    int64_t index = j * p->value_size + e;
                    assert_close(*at(d, DV, b, kh, j, e), dv.value[index], dv.bound[index], "dv");
                }
            }
        }
    }
    free_sums(&dq);
    free_sums(&dk);
    free_sums(&dv);
}

/* ---- running ------------------------------------------------------------------------------------- */

static const dw__kernel *selected(const dw__call *call) {
    return dw__kernel_for(&(dw__operation_call){.call = *call}, NULL, NULL);
}

static void run(const dw__call *call) {
    const dw__kernel *kernel = selected(call);
    assert_false(dw__kernel_is_reference(kernel));
    int64_t floats = (int64_t)kernel_workspace(kernel, call) / 4;
    float *scratch = guarded(floats);
    assert_int_equal(kernel->run(call, scratch), DW_OK);
    release(scratch, floats);
}

static void check_same_bits(data *d) {
    static const int outputs[] = {O, DQ, DK, DV, LSE};
    float *kept[ROWS];
    for (size_t n = 0; n < DW_COUNT(outputs); n++) {
        size_t bytes = (size_t)d->count[outputs[n]] * sizeof(float);
        kept[n] = dw__malloc(bytes);
        memcpy(kept[n], d->block[outputs[n]], bytes);
    }
    for (int threads = 1; threads <= 3; threads++) {
        assert_int_equal(dw__pool_set_threads(threads), DW_OK);
        run(&d->forward);
        run(&d->backward);
        for (size_t n = 0; n < DW_COUNT(outputs); n++) {
            assert_memory_equal(kept[n], d->block[outputs[n]],
                                (size_t)d->count[outputs[n]] * sizeof(float));
        }
    }
    assert_int_equal(dw__pool_set_threads(2), DW_OK);
    for (size_t n = 0; n < DW_COUNT(outputs); n++) dw__free(kept[n]);
}

static void check(const problem *p) {
    data d;
    make(&d, p);
    run(&d.forward);
    run(&d.backward);
    row r = {.p = dw__calloc((size_t)p->keys + 1, sizeof(double)),
             .keep = dw__calloc((size_t)p->keys + 1, sizeof(double)),
             .slope = dw__calloc((size_t)p->keys + 1, sizeof(double))};
    check_forward(&d, p, &r);
    check_backward(&d, p, &r);
    check_same_bits(&d);
    dw__free(r.p);
    dw__free(r.keep);
    dw__free(r.slope);
    destroy(&d);
}

/* ---- BF16 and F16 -------------------------------------------------------------------------------- */

static uint16_t to_half(dw_dtype type, float x) {
    return type == DW_BF16 ? dw__f32_to_bf16(x) : dw__f32_to_f16(x);
}

/* Rounds numbers in place and returns their 16 bits. */
static uint16_t *round_to(dw_dtype type, float *x, int64_t count) {
    uint16_t *half = dw__malloc((size_t)count * sizeof *half);
    for (int64_t i = 0; i < count; i++) {
        half[i] = to_half(type, x[i]);
        x[i] = type == DW_BF16 ? dw__bf16_to_f32(half[i]) : dw__f16_to_f32(half[i]);
    }
    return half;
}

/* The same tensor of 16 bits, with the same strides, if it is one of the rows or a float mask. */
static void halve(const data *d, dw_dtype type, uint16_t *const *half, uint16_t *mask,
                  dw__tensor *t) {
    if (t->dtype != DW_F32 || t->rank != 4) return;
    for (int which = Q; which < LSE; which++)
        if (d->block[which] && t->data == d->block[which]) {
            *t = (dw__tensor){half[which], type, 4, {0}, {0}};
            memcpy(t->shape, d->tensor[which].shape, sizeof t->shape);
            memcpy(t->stride, d->tensor[which].stride, sizeof t->stride);
            return;
        }
    assert_ptr_equal(t->data, d->mask_floats);
    t->data = mask;
    t->dtype = type;
}

static void expect_rounded(const data *d, dw_dtype type, int which, const uint16_t *half) {
    const dw__tensor *t = &d->tensor[which];
    for (int64_t b = 0; b < t->shape[0]; b++)
        for (int64_t h = 0; h < t->shape[1]; h++)
            for (int64_t i = 0; i < t->shape[2]; i++)
                for (int64_t e = 0; e < t->shape[3]; e++) {
                    const float *x = at(d, which, b, h, i, e);
                    assert_int_equal(half[x - d->block[which]], to_half(type, *x));
                }
}

/* Results in 16 bits are those of F32 on the same operands, rounded once; lse is not rounded. */
static void check_halves(const problem *p, dw_dtype type) {
    data d;
    uint16_t *half[ROWS] = {NULL}, *mask = NULL;
    make(&d, p);
    for (int which = Q; which < LSE; which++)
        half[which] = round_to(type, d.block[which], d.count[which]);
    if (d.mask_floats) mask = round_to(type, d.mask_floats, dw__tensor_count(&d.mask));
    dw__call forward = d.forward, backward = d.backward;
    for (int i = 0; i < 8; i++) halve(&d, type, half, mask, &backward.inputs[i]);
    for (int i = 0; i < 3; i++) halve(&d, type, half, mask, &backward.outputs[i]);
    memcpy(forward.inputs, backward.inputs, 5 * sizeof *forward.inputs);
    halve(&d, type, half, mask, &forward.outputs[0]);
    assert_true(strstr(selected(&forward)->name, "widened"));
    run(&forward);
    const size_t lse_bytes = (size_t)d.count[LSE] * sizeof(float);
    float *lse = dw__malloc(lse_bytes);
    memcpy(lse, d.block[LSE], lse_bytes);
    run(&d.forward);
    assert_memory_equal(lse, d.block[LSE], lse_bytes);
    expect_rounded(&d, type, O, half[O]);
    dw__free(round_to(type, d.block[O], d.count[O])); /* backward reads the rounded o */
    run(&backward);
    run(&d.backward);
    for (int which = DQ; which <= DV; which++) expect_rounded(&d, type, which, half[which]);
    for (int which = Q; which < LSE; which++) dw__free(half[which]);
    dw__free(mask);
    dw__free(lse);
    destroy(&d);
}

static void check_all(const problem *problems, size_t count) {
    for (size_t i = 0; i < count; i++) check(&problems[i]);
}

/* ---- tests --------------------------------------------------------------------------------------- */

static void test_shapes(void **state) {
    (void)state;
    static const problem problems[] = {
        {1, 1, 1, 1, 1, 1, 1, 0, -1, NO_MASK, 0, false, 1, 0},
        {2, 3, 3, 65, 67, 17, 13, 0, -1, NO_MASK, 0, false, 1, 0},
        {1, 2, 2, 64, 64, 64, 64, 0, -1, NO_MASK, 0, false, 1, 0},
        {1, 1, 1, 3, 129, 1, 256, 0, -1, NO_MASK, 0, false, 1, 0},
        {1, 1, 1, 131, 2, 255, 1, 0, -1, NO_MASK, 0, true, 1, 0},
        {3, 4, 2, 31, 33, 8, 24, 0, -1, NO_MASK, 0, true, 1, 0},
        {1, 1, 1, 5, 0, 8, 8, 0, -1, NO_MASK, 0, false, 1, 0},
    };
    check_all(problems, DW_COUNT(problems));
}

static void test_positions(void **state) {
    (void)state;
    static const problem problems[] = {
        {2, 2, 1, 130, 130, 16, 16, 1, -1, NO_MASK, 0, true, 1, 0},
        {1, 2, 2, 70, 150, 8, 8, 2, -1, NO_MASK, 0, false, 1, 0},
        {1, 2, 2, 150, 70, 8, 8, 2, -1, NO_MASK, 0, false, 1, 0}, /* some queries see nothing */
        {1, 2, 2, 70, 150, 8, 8, 1, -1, NO_MASK, 0, false, 1, 0},
        {1, 1, 1, 200, 200, 8, 8, 1, 3, NO_MASK, 0, false, 1, 0},
        {1, 1, 1, 200, 200, 8, 8, 1, 65, NO_MASK, 0, false, 1, 0},
        {1, 1, 1, 100, 200, 8, 8, 2, 17, NO_MASK, 0, false, 1, 0},
        {1, 1, 1, 200, 50, 8, 8, 0, 20, NO_MASK, 0, false, 1, 0}, /* queries see past the keys */
        {1, 1, 1, 20, 20, 8, 8, 1, 0, NO_MASK, 0, false, 1, 0},
    };
    check_all(problems, DW_COUNT(problems));
}

static void test_masks(void **state) {
    (void)state;
    for (int mask = BOOL_FULL; mask <= FLOAT_LOW; mask++) {
        problem p = {2, 4, 2, 67, 71, 12, 20, 0, -1, (mask_kind)mask, 0, mask % 2, 1, 0};
        check(&p);
        p.causal = 1;
        check(&p);
        p = (problem){2, 2,     2, 9, 3, 4, 4, 0, -1, (mask_kind)mask,
                      0, false, 1, 0}; /* some rows are empty */
        check(&p);
    }
}

static void test_dropout(void **state) {
    (void)state;
    static const problem problems[] = {
        {2, 4, 2, 67, 71, 12, 20, 0, -1, NO_MASK, 0.1, false, 1, 0},
        {1, 2, 1, 130, 130, 16, 16, 1, -1, BOOL_PADDING, 0.5, true, 1, 0},
        /* Rows whose length is a multiple of a Philox call. */
        {2, 2, 2, 75, 132, 8, 8, 0, -1, NO_MASK, 0.3, false, 1, 0},
        {1, 2, 2, 130, 128, 8, 8, 1, -1, NO_MASK, 0.9, false, 1, 0},
    };
    check_all(problems, DW_COUNT(problems));
}

static void test_soft_cap(void **state) {
    (void)state;
    static const problem problems[] = {
        {2, 4, 2, 67, 71, 12, 20, 0, -1, NO_MASK, 0, false, 4, 2.0},
        {1, 2, 1, 130, 130, 16, 16, 1, 40, NO_MASK, 0.2, true, 4, 0.5},
        {2, 2, 2, 70, 66, 16, 16, 0, -1, FLOAT_FULL, 0, false, 4, 50.0},
        {2, 2, 1, 9, 3, 4, 4, 0, -1, BOOL_FULL, 0, false, 4, 1.0}, /* some rows are empty */
    };
    check_all(problems, DW_COUNT(problems));
}

static void test_halves(void **state) {
    (void)state;
    static const problem problems[] = {
        {2, 4, 2, 67, 71, 12, 20, 1, -1, NO_MASK, 0.1, true, 1, 0},
        {1, 2, 1, 70, 150, 16, 16, 2, 33, FLOAT_HEADS, 0, false, 2, 1.5},
        {2, 4, 2, 9, 13, 8, 8, 0, -1, FLOAT_FULL, 0, true, 1, 0},
        {2, 2, 2, 9, 3, 4, 4, 0, -1, BOOL_FULL, 0, false, 1, 0}, /* some rows are empty */
    };
    for (size_t i = 0; i < DW_COUNT(problems); i++) {
        check_halves(&problems[i], DW_BF16);
        check_halves(&problems[i], DW_F16);
    }
}

/* Scores of some thousands: exp overflows unless the maximum is subtracted first. */
static void test_large_scores(void **state) {
    (void)state;
    static const problem problems[] = {
        {1, 2, 2, 70, 140, 16, 16, 0, -1, NO_MASK, 0, false, 60, 0},
        {1, 1, 1, 70, 140, 16, 16, 1, -1, NO_MASK, 0, false, 1e-20f, 0},
    };
    check_all(problems, DW_COUNT(problems));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),       cmocka_unit_test(test_positions),
        cmocka_unit_test(test_masks),        cmocka_unit_test(test_dropout),
        cmocka_unit_test(test_large_scores), cmocka_unit_test(test_soft_cap),
        cmocka_unit_test(test_halves),
    };
    random_state = 7;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
