/* Compares gradients of cross-entropy through the output projection with double loops: reductions, smoothing, ignored
 * targets, both layouts of the weight, one chunk and several. The bits are the same on any number of threads, and
 * targets out of range are rejected. */
#include "../ops/kernel_call.h"
#include "base/pool.h"
#include "guarded_floats.h"
#include "kernel/kernel.h"
#include "random_numbers.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static float *guarded_random(int64_t count, float magnitude) {
    float *data = guarded(count);
    for (int64_t i = 0; i < count; i++) data[i] = magnitude * random_float();
    return data;
}

typedef struct problem {
    int64_t tokens, size, vocabulary;
    const char *reduction;
    double smoothing;
    bool transpose_w;
} problem;

typedef struct data {
    float *x, *w, *logits, *lse, *dloss, *dx, *dw, *db;
    int64_t *target;
    dw_attr attrs[4];
    dw__call call;
} data;

static dw__tensor tensor(void *memory, dw_dtype dtype, int rank, int64_t d0, int64_t d1) {
    dw__tensor t = {memory, dtype, rank, {d0, d1}, {0}};
    dw__tensor_set_contiguous(&t);
    return t;
}

static void make(data *d, const problem *p) {
    int64_t t = p->tokens, k = p->size, v = p->vocabulary;
    d->x = guarded_random(t * k, 1.0f);
    d->w = guarded_random(v * k, 1.0f);
    d->logits = guarded_random(t * v, 6.0f);
    d->lse = guarded(t);
    d->dloss = guarded_random(t, 1.0f);
    d->dx = guarded(t * k);
    d->dw = guarded(v * k);
    d->db = guarded(v);
    d->target = dw__malloc((size_t)t * sizeof(int64_t));
    for (int64_t i = 0; i < t; i++) {
        double sum = 0.0;
        for (int64_t j = 0; j < v; j++) sum += exp(d->logits[i * v + j]);
        d->lse[i] = (float)log(sum);
        d->target[i] = i % 5 == 3 ? -100 : (i * 7919) % v;
    }
    bool none = strcmp(p->reduction, "none") == 0;
    d->attrs[0] = dw_attr_string(DW_ATTR_KEY_REDUCTION, p->reduction);
    d->attrs[1] = dw_attr_float(DW_ATTR_KEY_LABEL_SMOOTHING, p->smoothing);
    d->attrs[2] = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W, p->transpose_w);
    d->attrs[3] = dw_attr_int(DW_ATTR_KEY_IGNORE_INDEX, -100);
    int64_t w_rows = p->transpose_w ? v : k, w_columns = p->transpose_w ? k : v;
    d->call = (dw__call){.op = DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD,
                         .attr_count = 4,
                         .attrs = d->attrs,
                         .input_count = 7,
                         .output_count = 3};
    d->call.inputs[0] = tensor(d->x, DW_F32, 2, t, k);
    d->call.inputs[1] = tensor(d->w, DW_F32, 2, w_rows, w_columns);
    d->call.inputs[2] = (dw__tensor){NULL, DW_F32, -1, {0}, {0}};
    d->call.inputs[3] = tensor(d->logits, DW_F32, 2, t, v);
    d->call.inputs[4] = tensor(d->target, DW_I64, 1, t, 0);
    d->call.inputs[5] = tensor(d->lse, DW_F32, 1, t, 0);
    d->call.inputs[6] = tensor(d->dloss, DW_F32, none ? 1 : 0, t, 0);
    d->call.outputs[0] = tensor(d->dx, DW_F32, 2, t, k);
    d->call.outputs[1] = tensor(d->dw, DW_F32, 2, w_rows, w_columns);
    d->call.outputs[2] = tensor(d->db, DW_F32, 1, v, 0);
}

static void destroy(data *d, const problem *p) {
    int64_t t = p->tokens, k = p->size, v = p->vocabulary;
    release(d->x, t * k);
    release(d->w, v * k);
    release(d->logits, t * v);
    release(d->lse, t);
    release(d->dloss, t);
    release(d->dx, t * k);
    release(d->dw, v * k);
    release(d->db, v);
    dw__free(d->target);
}

/* The kernel under test: each kernel that supports the problem, in turn. */
static const dw__kernel *kernel;

/* Calls `body` with every kernel that supports the problem. */
static void with_each_kernel(const problem *p, void (*body)(const problem *)) {
    data d;
    int fitting = 0;
    make(&d, p);
    for (int i = 0; dw__kernels_cpu_matmul[i]; i++) {
        kernel = dw__kernels_cpu_matmul[i];
        if (kernel->op != DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD || !kernel_supports(kernel, &d.call))
            continue;
        body(p);
        fitting++;
    }
    assert_true(fitting > 0);
    destroy(&d, p);
}

static dw_status run(const dw__call *call) {
    assert_true(kernel_supports(kernel, call));
    int64_t floats = (int64_t)kernel_workspace(kernel, call) / 4;
    float *scratch = guarded(floats);
    dw_status status = kernel->run(call, scratch);
    release(scratch, floats);
    return status;
}

/* ---- the definition ------------------------------------------------------------------------------ */

static const double UNIT = 0x1p-24;

/* dlogits[token][j] and, in *error, a bound on its F32 error. */
static double dlogit(const data *d, const problem *p, int64_t token, int64_t j, double counted,
                     double *error) {
    *error = 0.0;
    if (d->target[token] == -100) return 0.0;
    double grad = strcmp(p->reduction, "none") == 0 ? d->dloss[token] : d->dloss[0];
    if (strcmp(p->reduction, "mean") == 0) grad /= counted;
    double logit = d->logits[token * p->vocabulary + j], lse = d->lse[token];
    double prob = exp(logit - lse), even = p->smoothing / (double)p->vocabulary;
    double hit = d->target[token] == j ? 1.0 - p->smoothing : 0.0;
    *error = fabs(grad) * UNIT * (prob * (fabs(logit) + fabs(lse) + 8.0) + 8.0 * (even + hit));
    return grad * (prob - hit - even);
}

static void assert_close(double got, double want, double bound, const char *what) {
    if (!(fabs(got - want) <= bound)) {
        fail_msg("%s: got %.9g, want %.9g, bound %.3g", what, got, want, bound);
    }
}

static void check_results(const data *d, const problem *p) {
    int64_t t = p->tokens, k = p->size, v = p->vocabulary;
    double counted = 0.0, *dw = dw__calloc((size_t)(v * k), 8), *dx = dw__calloc((size_t)k, 8);
    double *dw_bound = dw__calloc((size_t)(v * k), 8), *dx_bound = dw__calloc((size_t)k, 8);
    double *db = dw__calloc((size_t)v, 8), *db_bound = dw__calloc((size_t)v, 8);
    for (int64_t i = 0; i < t; i++) counted += d->target[i] != -100;
    for (int64_t i = 0; i < t; i++) {
        memset(dx, 0, (size_t)k * 8);
        memset(dx_bound, 0, (size_t)k * 8);
        for (int64_t j = 0; j < v; j++) {
            double error, g = dlogit(d, p, i, j, counted, &error);
            double sum_error = error + UNIT * (double)(t + 4) * fabs(g);
            db[j] += g;
            db_bound[j] += sum_error;
            for (int64_t e = 0; e < k; e++) {
                double w = d->w[p->transpose_w ? j * k + e : e * v + j], x = d->x[i * k + e];
                dx[e] += g * w;
                dx_bound[e] += (error + UNIT * (double)(v + 4) * fabs(g)) * fabs(w);
                dw[j * k + e] += g * x;
                dw_bound[j * k + e] += sum_error * fabs(x);
            }
        }
        for (int64_t e = 0; e < k; e++) {
            assert_close(d->dx[i * k + e], dx[e], dx_bound[e], "dx");
        }
    }
    for (int64_t j = 0; j < v; j++) {
        assert_close(d->db[j], db[j], db_bound[j], "db");
        for (int64_t e = 0; e < k; e++) {
            float got = d->dw[p->transpose_w ? j * k + e : e * v + j];
            assert_close(got, dw[j * k + e], dw_bound[j * k + e], "dw");
        }
    }
    dw__free(dw), dw__free(dx), dw__free(dw_bound), dw__free(dx_bound), dw__free(db);
    dw__free(db_bound);
}

static void check_same_bits(const data *d, const problem *p) {
    float *const outputs[] = {d->dx, d->dw, d->db};
    const int64_t counts[] = {p->tokens * p->size, p->vocabulary * p->size, p->vocabulary};
    float *kept[3];
    for (int i = 0; i < 3; i++) {
        kept[i] = dw__malloc((size_t)counts[i] * sizeof(float));
        memcpy(kept[i], outputs[i], (size_t)counts[i] * sizeof(float));
    }
    for (int threads = 1; threads <= 3; threads++) {
        assert_int_equal(dw__pool_set_threads(threads), DW_OK);
        assert_int_equal(run(&d->call), DW_OK);
        for (int i = 0; i < 3; i++) {
            assert_memory_equal(kept[i], outputs[i], (size_t)counts[i] * sizeof(float));
        }
    }
    assert_int_equal(dw__pool_set_threads(2), DW_OK);
    for (int i = 0; i < 3; i++) dw__free(kept[i]);
}

static void check_with_kernel(const problem *p) {
    data d;
    make(&d, p);
    assert_int_equal(run(&d.call), DW_OK);
    check_results(&d, p);
    check_same_bits(&d, p);
    destroy(&d, p);
}

static void check(const problem *p) { with_each_kernel(p, check_with_kernel); }

/* ---- tests --------------------------------------------------------------------------------------- */

static void test_reductions(void **state) {
    (void)state;
    static const char *const reductions[] = {"mean", "sum", "none"};
    for (int i = 0; i < 3; i++) {
        for (int flags = 0; flags < 4; flags++) {
            check(&(problem){67, 13, 101, reductions[i], flags & 1 ? 0.1 : 0.0, (flags & 2) != 0});
        }
    }
    check(&(problem){1, 1, 1, "mean", 0.0, true});
    check(&(problem){205, 33, 257, "mean", 0.0, true});
}

/* A vocabulary so large that rows are divided into chunks, the last one shorter. */
static void test_chunks(void **state) {
    (void)state;
    check(&(problem){101, 3, 131101, "mean", 0.0, true});
/* Takes half a minute; its threads share rows as in the other tests. */
#if !defined(__SANITIZE_THREAD__)
    check(&(problem){197, 2, 131101, "sum", 0.05, false});
#endif
}

static void check_unwanted(const problem *p) {
    data d;
    make(&d, p);
    d.call.outputs[1].data = NULL;
    d.call.outputs[2].data = NULL;
    assert_int_equal(run(&d.call), DW_OK);
    assert_true(d.dx[0] != SENTINEL);
    assert_true(d.dw[0] == SENTINEL && d.db[0] == SENTINEL);
    destroy(&d, p);
}

static void test_unwanted_gradients_are_left_alone(void **state) {
    (void)state;
    with_each_kernel(&(problem){19, 5, 31, "mean", 0.0, true}, check_unwanted);
    with_each_kernel(&(problem){205, 33, 257, "mean", 0.0, true}, check_unwanted);
}

static void check_bad_target(const problem *p) {
    data d;
    make(&d, p);
    d.target[7] = p->vocabulary;
    assert_int_equal(run(&d.call), DW_INDEX);
    assert_non_null(strstr(dw_last_error(), "row 7"));
    destroy(&d, p);
}

static void test_target_out_of_range(void **state) {
    (void)state;
    with_each_kernel(&(problem){19, 5, 31, "mean", 0.0, true}, check_bad_target);
    with_each_kernel(&(problem){205, 33, 257, "mean", 0.0, true}, check_bad_target);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reductions),
        cmocka_unit_test(test_chunks),
        cmocka_unit_test(test_unwanted_gradients_are_left_alone),
        cmocka_unit_test(test_target_out_of_range),
    };
    random_state = 11;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
