/* Compares CPU GEMMs with double loops: every kernel on awkward shapes, strides, transpositions and batches. The bits
 * are the same on any number of threads, and nothing is written outside of the result. */
#include "../ops/kernel_call.h"
#include "base/pool.h"
#include "guarded_floats.h"
#include "kernel/cpu/cpu_matmul.h"
#include "random_numbers.h"
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- data ---------------------------------------------------------------------------------------
 */

static float *guarded_random(int64_t count) {
    float *data = guarded(count);
    for (int64_t i = 0; i < count; i++) data[i] = random_float();
    return data;
}

/* ---- calls -------------------------------------------------------------------------------------- */

typedef struct problem {
    int64_t batch, m, n, k;
    bool transpose_a, transpose_b;
    int64_t a_padding, b_padding; /* elements between rows in memory */
} problem;

static dw__tensor matrix(void *data, int64_t batch, int64_t rows, int64_t columns,
                         int64_t padding) {
    dw__tensor t = {data, DW_F32, 3, {batch, rows, columns}, {0}};
    t.stride[2] = 1;
    t.stride[1] = columns + padding;
    t.stride[0] = rows * t.stride[1];
    return t;
}

static int64_t extent(const dw__tensor *t) { return t->shape[0] * t->stride[0]; }

static dw__call matmul_call(const problem *p, float *a, float *b, float *y, dw_attr *attrs) {
    dw__call call = {
        .op = DW_OP_MATMUL, .attr_count = 2, .attrs = attrs, .input_count = 2, .output_count = 1};
    attrs[0] = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_A, p->transpose_a);
    attrs[1] = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_B, p->transpose_b);
    call.inputs[0] = p->transpose_a ? matrix(a, p->batch, p->k, p->m, p->a_padding)
                                    : matrix(a, p->batch, p->m, p->k, p->a_padding);
    call.inputs[1] = p->transpose_b ? matrix(b, p->batch, p->n, p->k, p->b_padding)
                                    : matrix(b, p->batch, p->k, p->n, p->b_padding);
    call.outputs[0] = matrix(y, p->batch, p->m, p->n, 0);
    return call;
}

static double element(const dw__tensor *t, int64_t batch, int64_t row, int64_t column,
                      bool transposed) {
    const float *data = t->data;
    int64_t i = transposed ? column : row, j = transposed ? row : column;
    return data[batch * t->stride[0] + i * t->stride[1] + j * t->stride[2]];
}

/* Scratch is sized for the present number of threads; the call then uses `threads`, at most as many. */
static void run_on(const dw__kernel *kernel, const dw__call *call, int threads) {
    assert_true(kernel_supports(kernel, call));
    int64_t floats = (int64_t)kernel_workspace(kernel, call) / 4;
    float *scratch = guarded(floats);
    int planned = dw__pool_threads();
    assert_int_equal(dw__pool_set_threads(threads), DW_OK);
    assert_int_equal(kernel->run(call, scratch), DW_OK);
    assert_int_equal(dw__pool_set_threads(planned), DW_OK);
    release(scratch, floats);
}

/* |error| <= (k + 2) * 2^-24 * sum of |a*b| (+ |bias|): Higham, Accuracy and Stability, 3.1. */
static void assert_close(double got, double want, double magnitude, int64_t k) {
    double bound = (double)(k + 2) * 0x1p-24 * magnitude;
    if (!(fabs(got - want) <= bound)) {
        fail_msg("got %.9g, want %.9g, bound %.3g, k %lld", got, want, bound, (long long)k);
    }
}

static void check_gemm(const problem *p, const dw__call *call, const float *bias) {
    const float *y = call->outputs[0].data;
    for (int64_t batch = 0; batch < p->batch; batch++) {
        for (int64_t i = 0; i < p->m; i++) {
            for (int64_t j = 0; j < p->n; j++) {
                double sum = bias ? bias[j] : 0.0, magnitude = fabs(sum);
                for (int64_t k = 0; k < p->k; k++) {
                    double term = element(&call->inputs[0], batch, i, k, p->transpose_a) *
                                  element(&call->inputs[1], batch, k, j, p->transpose_b);
                    sum += term;
                    magnitude += fabs(term);
                }
                assert_close(y[(batch * p->m + i) * p->n + j], sum, magnitude, p->k);
            }
        }
    }
}

/* ---- tests --------------------------------------------------------------------------------------
 */

static void check_matmul(const dw__kernel *kernel, const problem *p) {
    dw_attr attrs[2];
    dw__call call = matmul_call(p, NULL, NULL, NULL, attrs);
    if (kernel->op != DW_OP_MATMUL || !kernel_supports(kernel, &call)) return;
    int64_t a_count = extent(&call.inputs[0]), b_count = extent(&call.inputs[1]);
    int64_t y_count = p->batch * p->m * p->n;
    float *a = guarded_random(a_count), *b = guarded_random(b_count), *y = guarded(y_count);
    float *again = guarded(y_count);
    call = matmul_call(p, a, b, y, attrs);
    run_on(kernel, &call, 2);
    check_gemm(p, &call, NULL);
    for (int threads = 1; threads <= 3; threads++) {
        call.outputs[0].data = again;
        run_on(kernel, &call, threads);
        assert_memory_equal(again, y, (size_t)y_count * sizeof(float));
    }
    release(a, a_count);
    release(b, b_count);
    release(y, y_count);
    release(again, y_count);
}

static void test_shapes(void **state) {
    (void)state;
    static const int64_t sizes[][4] = {
        {1, 1, 1, 1},    {1, 1, 97, 31},  {1, 7, 1, 13},     {1, 17, 49, 385},
        {1, 97, 769, 3}, {3, 5, 47, 29},  {1, 131, 17, 800}, {1, 193, 101, 64},
        {1, 2, 5, 1031}, {5, 61, 67, 71}, {1, 48, 96, 384},  {1, 129, 257, 129},
        {40, 9, 10, 11}, {1, 33, 33, 0},  {1, 0, 3, 4},      {2, 3, 0, 4},
    };
    for (size_t s = 0; s < DW_COUNT(sizes); s++) {
        for (int flags = 0; flags < 16; flags++) {
            problem p = {sizes[s][0],      sizes[s][1],      sizes[s][2],       sizes[s][3],
                         (flags & 1) != 0, (flags & 2) != 0, flags & 4 ? 5 : 0, flags & 8 ? 3 : 0};
            for (int i = 0; dw__kernels_cpu_matmul[i]; i++) {
                check_matmul(dw__kernels_cpu_matmul[i], &p);
            }
        }
    }
}

/* Wider than the widest task of the packed loops, and one row past its rows. */
static void test_wide(void **state) {
    (void)state;
    for (int flags = 0; flags < 4; flags++) {
        problem p = {1, 193, 3089, 5, (flags & 1) != 0, (flags & 2) != 0, 0, 0};
        for (int i = 0; dw__kernels_cpu_matmul[i]; i++) check_matmul(dw__kernels_cpu_matmul[i], &p);
    }
}

/* With AVX2 the packed loops compute large GEMMs, for which no library allocates anything. */
static void test_choice(void **state) {
    (void)state;
    bool avx2 = dw__cpu_isa() == DW_ISA_AVX2;
    dw__matmul large = {.m = 2048, .n = 1024, .k = 384, .batches = 1, .a_row = 384, .a_k = 1};
    large.b_k = 1024, large.b_column = 1;
    dw__matmul small = large;
    small.m = 64;
    assert_int_equal(dw__matmul_packed_preferred(&large), avx2);
    assert_false(dw__matmul_packed_preferred(&small));
    if (avx2) {
        assert_false(dw__matmul_onednn_supports(&large));
        assert_int_equal(dw__matmul_library(&large, false), 0);
    }
}

/* Packed B exceeds one round: rounds over columns, over K, and over batches. */
static void test_rounds(void **state) {
    (void)state;
    static const problem problems[] = {
        {1, 3, 50021, 131, false, true, 0, 0},
        {1, 5, 97, 60013, false, false, 0, 0},
        {7, 2, 1021, 1009, true, false, 0, 0},
    };
    for (size_t s = 0; s < DW_COUNT(problems); s++) {
        for (int i = 0; dw__kernels_cpu_matmul[i]; i++) {
            check_matmul(dw__kernels_cpu_matmul[i], &problems[s]);
        }
    }
}

static void check_linear(const dw__kernel *kernel, int64_t batch, int64_t m, int64_t n, int64_t k,
                         bool transposed, bool with_bias) {
    if (kernel->op != DW_OP_LINEAR) return;
    problem p = {1, batch * m, n, k, false, transposed, 2, 0};
    dw_attr attrs[2], transpose = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W, transposed);
    int64_t a_count = batch * m * (k + 2);
    float *a = guarded_random(a_count), *b = guarded_random(n * k), *bias = guarded_random(n);
    float *y = guarded(batch * m * n);
    /* The same matmul by another kernel, for comparison. */
    dw__call flat = matmul_call(&p, a, b, y, attrs);
    dw__call call = {.op = DW_OP_LINEAR,
                     .attr_count = 1,
                     .attrs = &transpose,
                     .input_count = 3,
                     .output_count = 1};
    call.inputs[0] = matrix(a, batch, m, k, 2);
    call.inputs[1] = (dw__tensor){b, DW_F32, 2, {transposed ? n : k, transposed ? k : n}, {0}};
    call.inputs[1].stride[0] = call.inputs[1].shape[1];
    call.inputs[1].stride[1] = 1;
    call.inputs[2] = (dw__tensor){bias, DW_F32, with_bias ? 1 : -1, {n}, {1}};
    call.outputs[0] = matrix(y, batch, m, n, 0);
    if (kernel_supports(kernel, &call)) {
        run_on(kernel, &call, 2);
        check_gemm(&p, &flat, with_bias ? bias : NULL);
    }
    release(a, a_count);
    release(b, n * k);
    release(bias, n);
    release(y, batch * m * n);
}

static void test_linear(void **state) {
    (void)state;
    for (int i = 0; dw__kernels_cpu_matmul[i]; i++) {
        for (int flags = 0; flags < 4; flags++) {
            check_linear(dw__kernels_cpu_matmul[i], 3, 37, 101, 59, flags & 1, flags & 2);
            check_linear(dw__kernels_cpu_matmul[i], 1, 1, 385, 769, flags & 1, flags & 2);
            check_linear(dw__kernels_cpu_matmul[i], 2, 5, 3, 0, flags & 1, flags & 2);
        }
    }
}

/* A kernel does not support an x whose leading axes have no common stride. */
static void test_linear_refuses_scattered_rows(void **state) {
    (void)state;
    dw__call call = {.op = DW_OP_LINEAR, .input_count = 2, .output_count = 1};
    call.inputs[0] = (dw__tensor){NULL, DW_F32, 3, {2, 3, 4}, {100, 8, 1}};
    call.inputs[1] = (dw__tensor){NULL, DW_F32, 2, {5, 4}, {4, 1}};
    call.outputs[0] = matrix(NULL, 2, 3, 5, 0);
    for (int i = 0; dw__kernels_cpu_matmul[i]; i++) {
        if (dw__kernels_cpu_matmul[i]->op == DW_OP_LINEAR) {
            assert_false(kernel_supports(dw__kernels_cpu_matmul[i], &call));
        }
    }
}

/* ---- epilogues ------------------------------------------------------------------------------------ */

static const dw__kernel *fused_kernel(const dw__call *call) {
    const dw__kernel *kernel = dw__kernel_candidates(DW_OP_FUSED, false)[0];
    assert_true(kernel_supports(kernel, call));
    return kernel;
}

/* z = relu(x w^T + bias) * r + r, with the GEMM's result stored or only passed on. */
static void check_epilogue(int64_t m, int64_t n, int64_t k, bool keep, int threads) {
    problem p = {1, m, n, k, false, true, 0, 0};
    dw_attr attrs[2], transpose = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W, 1);
    dw_attr body =
        dw_attr_string(DW_ATTR_KEY_BODY, "t0=relu(i1);t1=mul(t0,i0);t2=add(t1,i0);out(t2)");
    float *x = guarded_random(m * k), *w = guarded_random(n * k), *bias = guarded_random(n);
    float *r = guarded_random(m * n), *y = guarded(m * n), *z = guarded(m * n);
    dw__call flat = matmul_call(&p, x, w, y, attrs);
    dw__call call = {.op = DW_OP_LINEAR,
                     .attr_count = 1,
                     .attrs = &transpose,
                     .input_count = 3,
                     .output_count = 1};
    call.inputs[0] = (dw__tensor){x, DW_F32, 2, {m, k}, {k, 1}};
    call.inputs[1] = (dw__tensor){w, DW_F32, 2, {n, k}, {k, 1}};
    call.inputs[2] = (dw__tensor){bias, DW_F32, 1, {n}, {1}};
    call.outputs[0] = (dw__tensor){NULL, DW_F32, 2, {m, n}, {n, 1}};
    dw__call then = {
        .op = DW_OP_FUSED, .attr_count = 1, .attrs = &body, .input_count = 2, .output_count = 1};
    then.inputs[0] = (dw__tensor){r, DW_F32, 2, {m, n}, {n, 1}};
    then.inputs[1] = call.outputs[0];
    then.outputs[0] = (dw__tensor){z, DW_F32, 2, {m, n}, {n, 1}};
    void *prepared = NULL;
    assert_int_equal(fused_kernel(&then)->parse(&then, &prepared), DW_OK);
    then.prepared = prepared;

    call.epilogue = &then;
    call.replaced = 1;
    const dw__operation_call whole = {.call = call};
    const dw__kernel *kernel = dw__kernel_for(&whole, NULL, NULL);
    assert_true(kernel && kernel->with_epilogue);
    int64_t floats = (int64_t)kernel_workspace(kernel, &call) / 4;
    float *scratch = guarded(floats);
    if (keep) call.outputs[0].data = y;
    int planned = dw__pool_threads();
    assert_int_equal(dw__pool_set_threads(threads), DW_OK);
    assert_int_equal(kernel->run(&call, scratch), DW_OK);
    assert_int_equal(dw__pool_set_threads(planned), DW_OK);
    if (keep) check_gemm(&p, &flat, bias);
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) {
            double sum = bias[j], magnitude = fabs(sum), factor = r[i * n + j];
            for (int64_t e = 0; e < k; e++) {
                double term = (double)x[i * k + e] * w[j * k + e];
                sum += term;
                magnitude += fabs(term);
            }
            double want = (sum > 0.0 ? sum : 0.0) * factor + factor;
            assert_close(z[i * n + j], want, (magnitude + 1.0) * fabs(factor), k + 4);
        }
    }
    dw__free(prepared);
    release(scratch, floats);
    release(x, m * k);
    release(w, n * k);
    release(bias, n);
    release(r, m * n);
    release(y, m * n);
    release(z, m * n);
}

static void test_epilogue(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {
        {1, 1, 1}, {7, 97, 0}, {131, 65, 401}, {97, 1000, 130}, {530, 49, 33}, {3, 97, 45007},
    };
    for (size_t s = 0; s < DW_COUNT(sizes); s++) {
        for (int threads = 1; threads <= 2; threads++) {
            check_epilogue(sizes[s][0], sizes[s][1], sizes[s][2], true, threads);
            check_epilogue(sizes[s][0], sizes[s][1], sizes[s][2], false, threads);
        }
    }
}

int main(void) {
    random_state = 42;
    if (dw__pool_set_threads(3) != DW_OK) return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),   cmocka_unit_test(test_rounds),
        cmocka_unit_test(test_linear),   cmocka_unit_test(test_linear_refuses_scattered_rows),
        cmocka_unit_test(test_epilogue), cmocka_unit_test(test_wide),
        cmocka_unit_test(test_choice),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
