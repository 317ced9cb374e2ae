/* F32 GEMMs on AMX against double: shapes around every edge, every layout, numbers that cannot be split into
 * BF16 parts, and the same bits on any number of threads. Skipped if the CPU or the build has no AMX. */
#include "../ops/kernel_call.h"
#include "base/base.h"
#include "base/pool.h"
#include "kernel/cpu/amx.h"
#include "kernel/cpu/cpu_matmul.h"
#include "kernel/cpu/head.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint64_t random_state = 12345;

/* Sum of four uniforms: bell-shaped, in (-2, 2). */
static float random_float(void) {
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        random_state = random_state * 6364136223846793005u + 1442695040888963407u;
        sum += (float)(random_state >> 40) * 0x1p-24f - 0.5f;
    }
    return sum;
}

static float *random_matrix(int64_t count) {
    float *x = dw__malloc_aligned((size_t)count * sizeof *x);
    assert_non_null(x);
    for (int64_t i = 0; i < count; i++) x[i] = random_float();
    return x;
}

enum { SENTINELS = 64 };

static void *guarded_scratch(size_t bytes) {
    unsigned char *memory = dw__malloc_aligned(bytes + SENTINELS);
    assert_non_null(memory);
    memset(memory, 0xab, bytes + SENTINELS);
    return memory;
}
static void check_guard(const void *memory, size_t bytes) {
    const unsigned char *end = (const unsigned char *)memory + bytes;
    for (int i = 0; i < SENTINELS; i++) assert_int_equal(end[i], 0xab);
}

/* |error| <= bound: each product has an error of at most 2^-23 |a||b| (dropped parts and roundings inside a
 * step). Summing k of them in blocks adds at most about sqrt(6 k) roundings of the running sum, which is at
 * most the sum of |a||b|. */
static void check_gemm(const dw__matmul *p, const float *c, bool with_bias, const float *before) {
    for (int64_t i = 0; i < p->m; i++) {
        for (int64_t j = 0; j < p->n; j++) {
            double sum = with_bias ? p->bias[j] : 0.0, magnitude = fabs(sum);
            if (before) sum += before[i * p->n + j], magnitude += fabs(before[i * p->n + j]);
            for (int64_t k = 0; k < p->k; k++) {
                double term =
                    (double)p->a[i * p->a_row + k * p->a_k] * p->b[k * p->b_k + j * p->b_column];
                sum += term;
                magnitude += fabs(term);
            }
            double bound = magnitude * (0x1p-23 + sqrt(6.0 * (double)p->k) * 0x1p-24);
            float got = c[i * p->n + j];
            if (isnan(sum))
                assert_true(isnan(got));
            else if (isinf((float)sum))
                assert_true(got == (float)sum);
            else if (!(fabs(got - sum) <= bound))
                fail_msg("%lld x %lld x %lld, element (%lld, %lld): %.9g, expected %.9g +- %.3g",
                         (long long)p->m, (long long)p->n, (long long)p->k, (long long)i,
                         (long long)j, got, sum, bound);
        }
    }
}

static dw__matmul make_gemm(int64_t m, int64_t n, int64_t k, int layout, float *a, float *b) {
    bool a_columns = layout & 1, b_columns = layout & 2;
    return (dw__matmul){
        .m = m,
        .n = n,
        .k = k,
        .batches = 1,
        .a = a,
        .b = b,
        .a_row = a_columns ? 1 : k,
        .a_k = a_columns ? m : 1,
        .b_k = b_columns ? 1 : n,
        .b_column = b_columns ? k : 1,
    };
}

static void run_amx(const dw__matmul *p) {
    size_t bytes = dw__matmul_amx_scratch(p, false);
    void *scratch = guarded_scratch(bytes);
    dw__epilogue none = {0};
    dw__matmul_amx_run(p, &none, scratch);
    check_guard(scratch, bytes);
    dw__free_aligned(scratch);
}

static const int64_t shapes[][3] = {
    {33, 47, 129},  {32, 32, 32},   {31, 65, 33},    {100, 37, 1500},    {17, 300, 333},
    {257, 129, 65}, {16, 16, 2100}, {129, 16, 1025}, {40, 1000, 31 + 1},
};

static void test_shapes_and_layouts(void **state) {
    (void)state;
    if (!dw__amx_available()) skip();
    for (size_t s = 0; s < DW_COUNT(shapes); s++) {
        int64_t m = shapes[s][0], n = shapes[s][1], k = shapes[s][2];
        for (int layout = 0; layout < 4; layout++) {
            float *a = random_matrix(m * k), *b = random_matrix(k * n), *bias = random_matrix(n);
            float *c = random_matrix(m * n + SENTINELS), *before = dw__malloc((size_t)(m * n) * 4);
            memcpy(before, c, (size_t)(m * n) * 4);
            float sentinels[SENTINELS];
            memcpy(sentinels, c + m * n, sizeof sentinels);
            dw__matmul p = make_gemm(m, n, k, layout, a, b);
            p.c = c;
            p.accumulate = true;
            run_amx(&p);
            check_gemm(&p, c, false, before);
            p.accumulate = false;
            p.bias = bias;
            run_amx(&p);
            check_gemm(&p, c, true, NULL);
            p.bias = NULL;
            run_amx(&p);
            check_gemm(&p, c, false, NULL);
            assert_memory_equal(c + m * n, sentinels, sizeof sentinels);
            dw__free_aligned(a), dw__free_aligned(b), dw__free_aligned(c), dw__free_aligned(bias);
            dw__free(before);
        }
    }
}

static void test_numbers_that_cannot_be_split(void **state) {
    (void)state;
    if (!dw__amx_available()) skip();
    const float odd[] = {INFINITY, -INFINITY, NAN, 0x1.8p127f, 3.4e38f};
    int64_t m = 70, n = 90, k = 1100;
    for (size_t i = 0; i < DW_COUNT(odd); i++) {
        for (int in_a = 0; in_a < 2; in_a++) {
            float *a = random_matrix(m * k), *b = random_matrix(k * n), *c = random_matrix(m * n);
            /* A neighbour whose lower parts are 0: infinity times them would be NaN. */
            if (in_a)
                a[37 * k + 1050] = odd[i], b[1050 * n + 3] = 0.25f;
            else
                b[1050 * n + 3] = odd[i], a[37 * k + 1050] = 0.25f;
            dw__matmul p = make_gemm(m, n, k, 0, a, b);
            p.c = c;
            run_amx(&p);
            check_gemm(&p, c, false, NULL);
            dw__free_aligned(a), dw__free_aligned(b), dw__free_aligned(c);
        }
    }
}

static void test_all_magnitudes(void **state) {
    (void)state;
    if (!dw__amx_available()) skip();
    int64_t m = 64, n = 48, k = 352;
    for (int exponent = -60; exponent <= 60; exponent += 20) {
        float *a = random_matrix(m * k), *b = random_matrix(k * n), *c = random_matrix(m * n);
        for (int64_t i = 0; i < m * k; i++) a[i] = ldexpf(a[i], exponent + (int)(i % 13) - 6);
        for (int64_t i = 0; i < k * n; i++) b[i] = ldexpf(b[i], (int)(i % 7) - 3);
        dw__matmul p = make_gemm(m, n, k, 0, a, b);
        p.c = c;
        run_amx(&p);
        check_gemm(&p, c, false, NULL);
        dw__free_aligned(a), dw__free_aligned(b), dw__free_aligned(c);
    }
}

static void test_same_bits_on_any_number_of_threads(void **state) {
    (void)state;
    if (!dw__amx_available()) skip();
    int64_t m = 200, n = 333, k = 1200;
    float *a = random_matrix(m * k), *b = random_matrix(k * n), *c = random_matrix(m * n);
    float *first = random_matrix(m * n);
    int threads = dw__pool_threads();
    for (int count = 1; count <= 3; count++) {
        assert_int_equal(dw__pool_set_threads(count), DW_OK);
        dw__matmul p = make_gemm(m, n, k, 0, a, b);
        p.c = count == 1 ? first : c;
        run_amx(&p);
        if (count > 1) assert_memory_equal(c, first, (size_t)(m * n) * sizeof *c);
    }
    assert_int_equal(dw__pool_set_threads(threads), DW_OK);
    dw__free_aligned(a), dw__free_aligned(b), dw__free_aligned(c), dw__free_aligned(first);
}

static void test_scratch_serves_fewer_threads(void **state) {
    (void)state;
    if (!dw__amx_available()) skip();
    int threads = dw__pool_threads();
    for (size_t s = 0; s < DW_COUNT(shapes); s++) {
        int64_t m = shapes[s][0], n = shapes[s][1], k = shapes[s][2];
        float *a = random_matrix(m * k), *b = random_matrix(k * n), *c = random_matrix(m * n);
        dw__matmul p = make_gemm(m, n, k, 0, a, b);
        p.c = c;
        for (int asked = 5; asked > 1; asked--) {
            assert_int_equal(dw__pool_set_threads(asked), DW_OK);
            size_t bytes = dw__matmul_amx_scratch(&p, false);
            for (int count = asked; count >= 1; count--) {
                assert_int_equal(dw__pool_set_threads(count), DW_OK);
                assert_true(dw__matmul_amx_scratch(&p, false) <= bytes);
            }
            void *scratch = guarded_scratch(bytes);
            dw__epilogue none = {0};
            dw__matmul_amx_run(&p, &none, scratch);
            check_guard(scratch, bytes);
            dw__free_aligned(scratch);
        }
        check_gemm(&p, c, false, NULL);
        dw__free_aligned(a), dw__free_aligned(b), dw__free_aligned(c);
    }
    assert_int_equal(dw__pool_set_threads(threads), DW_OK);
}

/* ---- the head's gradient ------------------------------------------------------------------------- */

typedef struct head {
    int64_t tokens, size, vocabulary;
    bool transpose_w;
    float *x, *w, *logits, *lse, *dloss, *dx, *dw, *db;
    int64_t *target;
    dw__call call;
    dw_attr attrs[4];
} head;

static dw__tensor tensor_of(void *data, dw_dtype dtype, int rank, int64_t rows, int64_t columns) {
    dw__tensor t = {.data = data, .dtype = dtype, .rank = rank, .shape = {rows, columns}};
    dw__tensor_set_contiguous(&t);
    return t;
}

static void make_head(head *h, const char *reduction, float smoothing) {
    int64_t t = h->tokens, k = h->size, v = h->vocabulary;
    h->x = random_matrix(t * k);
    h->w = random_matrix(v * k);
    h->logits = random_matrix(t * v);
    h->lse = random_matrix(t);
    h->dloss = random_matrix(t);
    h->dx = random_matrix(t * k);
    h->dw = random_matrix(v * k);
    h->db = random_matrix(v);
    h->target = dw__malloc((size_t)t * sizeof *h->target);
    for (int64_t i = 0; i < t; i++) {
        double sum = 0;
        for (int64_t j = 0; j < v; j++) sum += exp(h->logits[i * v + j]);
        h->lse[i] = (float)log(sum);
        h->target[i] = i % 5 == 3 ? -100 : (i * 7919) % v;
    }
    bool none = strcmp(reduction, "none") == 0;
    h->attrs[0] = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W, h->transpose_w);
    h->attrs[1] = dw_attr_string(DW_ATTR_KEY_REDUCTION, reduction);
    h->attrs[2] = dw_attr_int(DW_ATTR_KEY_IGNORE_INDEX, -100);
    h->attrs[3] = dw_attr_float(DW_ATTR_KEY_LABEL_SMOOTHING, smoothing);
    h->call = (dw__call){.op = DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD,
                         .attr_count = 4,
                         .attrs = h->attrs,
                         .input_count = 7,
                         .output_count = 3};
    dw__tensor *in = h->call.inputs, *out = h->call.outputs;
    in[0] = tensor_of(h->x, DW_F32, 2, t, k);
    in[1] = tensor_of(h->w, DW_F32, 2, h->transpose_w ? v : k, h->transpose_w ? k : v);
    in[2].rank = -1;
    in[3] = tensor_of(h->logits, DW_F32, 2, t, v);
    in[4] = tensor_of(h->target, DW_I64, 1, t, 1);
    in[5] = tensor_of(h->lse, DW_F32, 1, t, 1);
    in[6] = tensor_of(h->dloss, DW_F32, none ? 1 : 0, t, 1);
    out[0] = tensor_of(h->dx, DW_F32, 2, t, k);
    out[1] = tensor_of(h->dw, DW_F32, 2, in[1].shape[0], in[1].shape[1]);
    out[2] = tensor_of(h->db, DW_F32, 1, v, 1);
}

static void free_head(head *h) {
    float *all[] = {h->x, h->w, h->logits, h->lse, h->dloss, h->dx, h->dw, h->db};
    for (size_t i = 0; i < DW_COUNT(all); i++) dw__free_aligned(all[i]);
    dw__free(h->target);
}

static void run_head(head *h, const dw__kernel *kernel) {
    assert_true(kernel_supports(kernel, &h->call));
    size_t bytes = kernel_workspace(kernel, &h->call);
    void *scratch = guarded_scratch(bytes);
    assert_int_equal(kernel->run(&h->call, scratch), DW_OK);
    check_guard(scratch, bytes);
    dw__free_aligned(scratch);
}

static double dlogit(const head *h, int64_t token, int64_t vocable, const char *reduction, double s,
                     double counted) {
    int64_t target = h->target[token];
    if (target == -100) return 0.0;
    double factor = strcmp(reduction, "none") == 0  ? h->dloss[token]
                    : strcmp(reduction, "sum") == 0 ? h->dloss[0]
                                                    : h->dloss[0] / counted;
    double p = exp((double)h->logits[token * h->vocabulary + vocable] - h->lse[token]);
    return factor * (p - (vocable == target ? 1.0 - s : 0.0) - s / (double)h->vocabulary);
}

static void check_head(const head *h, const char *reduction, double smoothing) {
    int64_t t = h->tokens, k = h->size, v = h->vocabulary;
    double counted = 0;
    for (int64_t i = 0; i < t; i++) counted += h->target[i] != -100;
    double *d = dw__malloc((size_t)(t * v) * sizeof *d);
    for (int64_t i = 0; i < t; i++)
        for (int64_t j = 0; j < v; j++)
            d[i * v + j] = dlogit(h, i, j, reduction, smoothing, counted);
    /* exp in F32 has an error of about 2^-22; sums as for GEMMs. Checks a sample of elements that includes
     * all corners. */
    for (int64_t i = 0; i < t; i += i + 11 < t ? 11 : 1) {
        for (int64_t c = 0; c < k; c += c + 7 < k ? 7 : 1) {
            double sum = 0, magnitude = 0;
            for (int64_t j = 0; j < v; j++) {
                double term = d[i * v + j] * h->w[h->transpose_w ? j * k + c : c * v + j];
                sum += term, magnitude += fabs(term);
            }
            double bound = magnitude * (0x1p-20 + sqrt(6.0 * (double)v) * 0x1p-24) + 1e-30;
            assert_true(fabs(h->dx[i * k + c] - sum) <= bound);
        }
    }
    for (int64_t j = 0; j < v; j += j + 97 < v ? 97 : 1) {
        double total = 0, absolute = 0;
        for (int64_t i = 0; i < t; i++) total += d[i * v + j], absolute += fabs(d[i * v + j]);
        assert_true(fabs(h->db[j] - total) <=
                    absolute * (0x1p-20 + sqrt((double)t) * 0x1p-24) + 1e-30);
        for (int64_t c = 0; c < k; c += c + 13 < k ? 13 : 1) {
            double sum = 0, magnitude = 0;
            for (int64_t i = 0; i < t; i++) {
                double term = d[i * v + j] * h->x[i * k + c];
                sum += term, magnitude += fabs(term);
            }
            double bound = magnitude * (0x1p-20 + sqrt(6.0 * (double)t) * 0x1p-24) + 1e-30;
            float got = h->dw[h->transpose_w ? j * k + c : c * v + j];
            assert_true(fabs(got - sum) <= bound);
        }
    }
    dw__free(d);
}

static void test_head_gradient(void **state) {
    (void)state;
    if (!dw__amx_available()) skip();
    const int64_t sizes[][3] = {{65, 67, 4099}, {400, 64, 4096}, {131, 100, 5000}};
    const char *reductions[] = {"mean", "sum", "none"};
    for (size_t s = 0; s < DW_COUNT(sizes); s++) {
        for (int transpose_w = 0; transpose_w < 2; transpose_w++) {
            head h = {sizes[s][0], sizes[s][1], sizes[s][2], .transpose_w = transpose_w};
            const char *reduction = reductions[s];
            float smoothing = s == 1 ? 0.1f : 0.0f;
            make_head(&h, reduction, smoothing);
            run_head(&h, &dw__linear_cross_entropy_backward_amx);
            check_head(&h, reduction, smoothing);
            run_head(&h, &dw__linear_cross_entropy_backward_chunked);
            check_head(&h, reduction, smoothing);
            free_head(&h);
        }
    }
}

static void test_head_gradient_in_rounds_and_on_threads(void **state) {
    (void)state;
    if (!dw__amx_available()) skip();
    /* 2^20 / 1400 tokens round down to a round of 384: two rounds. */
    head h = {500, 1400, 4200, .transpose_w = true};
    make_head(&h, "mean", 0.0f);
    int threads = dw__pool_threads();
    float *dx = random_matrix(h.tokens * h.size), *dw = random_matrix(h.vocabulary * h.size);
    for (int count = 1; count <= 3; count++) {
        assert_int_equal(dw__pool_set_threads(count), DW_OK);
        run_head(&h, &dw__linear_cross_entropy_backward_amx);
        if (count == 1) {
            check_head(&h, "mean", 0.0);
            memcpy(dx, h.dx, (size_t)(h.tokens * h.size) * 4);
            memcpy(dw, h.dw, (size_t)(h.vocabulary * h.size) * 4);
        } else {
            assert_memory_equal(dx, h.dx, (size_t)(h.tokens * h.size) * 4);
            assert_memory_equal(dw, h.dw, (size_t)(h.vocabulary * h.size) * 4);
        }
    }
    assert_int_equal(dw__pool_set_threads(threads), DW_OK);
    dw__free_aligned(dx), dw__free_aligned(dw);
    free_head(&h);
}

static void test_head_gradient_of_numbers_that_cannot_be_split(void **state) {
    (void)state;
    if (!dw__amx_available()) skip();
    for (int transpose_w = 0; transpose_w < 2; transpose_w++) {
        head h = {100, 70, 4100, .transpose_w = transpose_w};
        make_head(&h, "mean", 0.0f);
        h.x[5] = 3e38f;  /* row of token 0 in dlogits, column 5 of dw */
        h.w[17] = 2e38f; /* too large to split, but small enough to multiply */
        run_head(&h, &dw__linear_cross_entropy_backward_amx);
        check_head(&h, "mean", 0.0);
        free_head(&h);
    }
}

static void test_head_gradient_of_a_wrong_target(void **state) {
    (void)state;
    if (!dw__amx_available()) skip();
    head h = {100, 70, 4100, .transpose_w = true};
    make_head(&h, "mean", 0.0f);
    h.target[42] = 4100;
    const dw__kernel *kernel = &dw__linear_cross_entropy_backward_amx;
    void *scratch = guarded_scratch(kernel_workspace(kernel, &h.call));
    assert_int_equal(kernel->run(&h.call, scratch), DW_INDEX);
    assert_non_null(strstr(dw_last_error(), "4100"));
    dw__free_aligned(scratch);
    free_head(&h);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes_and_layouts),
        cmocka_unit_test(test_numbers_that_cannot_be_split),
        cmocka_unit_test(test_all_magnitudes),
        cmocka_unit_test(test_same_bits_on_any_number_of_threads),
        cmocka_unit_test(test_scratch_serves_fewer_threads),
        cmocka_unit_test(test_head_gradient),
        cmocka_unit_test(test_head_gradient_in_rounds_and_on_threads),
        cmocka_unit_test(test_head_gradient_of_numbers_that_cannot_be_split),
        cmocka_unit_test(test_head_gradient_of_a_wrong_target),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
