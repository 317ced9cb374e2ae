/* Calls of the library's GEMM on emulated GPUs, compared with sums in double. */
#ifndef DW_LIBRARY_GEMM_H
#define DW_LIBRARY_GEMM_H

#include "emulated_call.h"
#include "kernel/cuda/gpu_gemm.h"
#include "run_time_compiler.h"
#include <math.h>

/* ---- one call ------------------------------------------------------------------------------------ */

typedef struct problem {
    int m, n, k;
    bool f16, f32_output, bias, residual, integers;
    dw_activation activation;
    uint64_t seed;
    bool turned_a, turned_b; /* A is stored as k x m, B as k x n */
    bool row_scale, row_squares;
} problem;

typedef struct run {
    const problem *problem;
    const dw_device *device;
    matrix a, b, bias, residual, d, row_scale, row_squares;
    dw_gemm call;
} run;

static inline void open_run(const problem *p, const dw_device *device, run *r) {
    uint64_t state = p->seed;
    const matrix_type type = p->f16 ? MATRIX_F16 : MATRIX_BF16,
                      type_d = p->f32_output ? MATRIX_F32 : type;
    const int rows_b = p->activation == DW_ACTIVATION_SWIGLU ? 2 * p->n : p->n;
    *r = (run){.problem = p, .device = device};
    place_random(&r->a, device, p->turned_a ? p->k : p->m, p->turned_a ? p->m : p->k, type, &state,
                 p->integers);
    place_random(&r->b, device, p->turned_b ? p->k : rows_b, p->turned_b ? rows_b : p->k, type,
                 &state, p->integers);
    place_random(&r->bias, device, 1, rows_b, type, &state, p->integers);
    place_random(&r->residual, device, p->m, p->n, type_d, &state, p->integers);
    place(&r->d, device, p->m, p->n, type_d);
    send(&r->d, device);
    place_random(&r->row_scale, device, 1, p->m, MATRIX_F32, &state, p->integers);
    place(&r->row_squares, device, 1, p->m, MATRIX_F32);
    send(&r->row_squares, device);
    r->call = (dw_gemm){.struct_size = sizeof r->call,
                        .device = device,
                        .dtype = p->f16 ? DW_F16 : DW_BF16,
                        .output = p->f32_output ? DW_F32
                                  : p->f16      ? DW_F16
                                                : DW_BF16,
                        .m = p->m,
                        .n = p->n,
                        .k = p->k,
                        .alpha = p->integers ? 0.5f : 0.37f,
                        .activation = p->activation,
                        .a = matrix_of(&r->a),
                        .b = matrix_of(&r->b),
                        .d = matrix_of(&r->d)};
    if (p->bias) r->call.bias = r->bias.device;
    if (p->residual) r->call.residual = matrix_of(&r->residual);
    if (p->row_scale) r->call.row_scale = r->row_scale.device;
    if (p->row_squares) r->call.row_squares = r->row_squares.device;
}
static inline void close_run(run *r) {
    matrix *all[] = {&r->a, &r->b, &r->bias, &r->residual, &r->d, &r->row_scale, &r->row_squares};
    for (size_t i = 0; i < DW_COUNT(all); i++) take_away(all[i], r->device);
}

/* ---- expected results ------------------------------------------------------------------------------- */

typedef struct expected {
    double value, error;
} expected;

/* Returns alpha sum + bias, the sum times the row's factor, and the bound of its F32 error: 2^-23 of the magnitudes for
 * each of k + 3 operations, even if the accumulator is truncated. */
static inline expected linear(const run *r, int row, int row_b) {
    double sum = 0, size = 0, bias = r->call.bias ? get(&r->bias, 0, row_b) : 0;
    const problem *p = r->problem;
    for (int k = 0; k < p->k; k++) {
        double x = (double)(p->turned_a ? get(&r->a, k, row) : get(&r->a, row, k)) *
                   (p->turned_b ? get(&r->b, k, row_b) : get(&r->b, row_b, k));
        sum += x, size += fabs(x);
    }
    const double factor = r->call.alpha * (p->row_scale ? get(&r->row_scale, 0, row) : 1.0);
    return (expected){factor * sum + bias,
                      (p->k + 3) * 0x1p-23 * (fabs(factor) * size + fabs(bias))};
}

/* Slopes are at most 1.13 and 1.1; the approximations of the functions have errors below 2^-19 of |x|. */
static inline expected activated(const run *r, int row, int column) {
    expected x = linear(r, row, column);
    double v = x.value, error = 1.13 * x.error + 0x1p-19 * fabs(v);
    switch (r->call.activation) {
    case DW_ACTIVATION_GELU: return (expected){v * 0.5 * (1 + erf(v / sqrt(2))), error};
    case DW_ACTIVATION_GELU_TANH:
        return (expected){v / (1 + exp(-2 * sqrt(2 / acos(-1)) * (v + 0.044715 * v * v * v))),
                          error};
    case DW_ACTIVATION_SWIGLU: {
        expected y = linear(r, row, r->d.columns + column);
        double silu = v / (1 + exp(-v));
        return (expected){silu * y.value, error * (fabs(y.value) + y.error) + fabs(silu) * y.error};
    }
    default: return x;
    }
}

static inline void check(const problem *p, run *r) {
    static const double rounding[] = {0x1p-8, 0x1p-11, 0x1p-24};
    fetch(&r->d, r->device);
    for (int i = 0; i < p->m; i++) {
        for (int j = 0; j < p->n; j++) {
            expected x = activated(r, i, j);
            double value = get(&r->d, i, j);
            if (p->residual) x.value += get(&r->residual, i, j);
            x.error += (0x1p-23 + rounding[r->d.type]) * (fabs(x.value) + x.error);
            if (r->d.type == MATRIX_F16) x.error += 0x1p-25; /* subnormal */
            if (p->integers && p->activation == DW_ACTIVATION_NONE) {
                matrix one = {.pitch = 4, .type = r->d.type, .host = &(float){0}};
                set(&one, 0, 0, (float)x.value);
                x = (expected){get(&one, 0, 0), 0};
            }
            if (!(fabs(value - x.value) <= x.error))
                fail_msg("D[%d][%d] of %d x %d x %d is %.9g, not %.9g within %.3g", i, j, p->m,
                         p->n, p->k, value, x.value, x.error);
        }
        expect_untouched(&r->d, i);
    }
}

static inline void expect_right(const problem *p, const char *device) {
    run r;
    open_run(p, device_named(device), &r);
    if (dw_gemm_run(&r.call) != DW_OK) fail_msg("%s", dw_last_error());
    check(p, &r);
    close_run(&r);
}

/* ---- tests of kernels that are compiled when they are first used ---------------------------------------- */

/* One element, primes, one past a tile, K of no multiple of a step, K of 0, empty results. */
static inline void expect_small_calls_right(const char *gpu) {
    static const int shapes[][3] = {{1, 1, 1},      {128, 64, 64}, {129, 65, 65},
                                    {67, 131, 257}, {3, 300, 129}, {257, 7, 13},
                                    {5, 9, 0},      {0, 9, 5},     {7, 0, 5}};
    need_compiler();
    for (size_t i = 0; i < DW_COUNT(shapes); i++) {
        problem p = {.m = shapes[i][0], .n = shapes[i][1], .k = shapes[i][2], .seed = i};
        p.bias = i % 2, p.integers = i % 3 == 0;
        expect_right(&p, gpu);
        p.activation = DW_ACTIVATION_GELU, p.bias = p.residual = true;
        expect_right(&p, gpu);
    }
}

/* D overwrites its own residual. */
static inline void expect_residual_may_be_d(const char *gpu) {
    problem p = {.m = 131,
                 .n = 70,
                 .k = 33,
                 .bias = true,
                 .residual = true,
                 .activation = DW_ACTIVATION_GELU,
                 .seed = 6};
    run r;
    need_compiler();
    open_run(&p, device_named(gpu), &r);
    assert_int_equal(r.device->copy(r.d.device, r.residual.device, r.d.bytes), DW_OK);
    r.call.residual = r.call.d;
    if (dw_gemm_run(&r.call) != DW_OK) fail_msg("%s", dw_last_error());
    check(&p, &r);
    close_run(&r);
}

#endif
