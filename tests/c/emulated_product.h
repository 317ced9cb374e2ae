/* What tests of matrix products on the emulator share: D = activation(alpha A B^T + bias) + residual, in double. */
#ifndef DW_EMULATED_PRODUCT_H
#define DW_EMULATED_PRODUCT_H

#include "emulated_kernel.h"
#include "sm100/gemm_params.h"
#include <math.h>

typedef struct expected {
    double value, error;
} expected;

typedef struct expected_product {
    int m, n, activation;
    bool integers;                 /* every sum is exact in F32, and so is D before its rounding */
    const matrix *bias, *residual; /* NULL: none */
    /* alpha times a sum: of `column` from n on, SwiGLU's other factor. */
    expected (*sum)(const void *context, int row, int column);
    const void *context;
    const char *name;
} expected_product;

/* The bias is added, and the sum rounded. */
static inline expected biased(const expected_product *p, int row, int column) {
    expected x = p->sum(p->context, row, column);
    const double bias = p->bias ? get(p->bias, 0, column) : 0;
    x.value += bias;
    x.error += 0x1p-23 * fabs(bias);
    return x;
}

static inline double gelu(double x) { return x * 0.5 * erfc(-x * 0.70710678118654752); }
static inline double gelu_tanh(double x) {
    return 0.5 * x * (1 + tanh(0.79788456080286536 * (x + 0.044715 * x * x * x)));
}

/* Activations: slopes are at most 1.13 (GELU, both) and 1.1 (SiLU); erff, the exponential and the reciprocal
 * err by some 2^-21, which the operations around them leave below 2^-19 of |x|. */
static inline expected activated(const expected_product *p, int row, int column) {
    expected x = biased(p, row, column);
    switch (p->activation) {
    case DW_GEMM_GELU: return (expected){gelu(x.value), 1.13 * x.error + 0x1p-19 * fabs(x.value)};
    case DW_GEMM_GELU_TANH:
        return (expected){gelu_tanh(x.value), 1.13 * x.error + 0x1p-19 * fabs(x.value)};
    case DW_GEMM_SWIGLU: {
        expected y = biased(p, row, p->n + column);
        double silu = x.value / (1 + exp(-x.value));
        return (expected){silu * y.value,
                          (1.1 * x.error + 0x1p-19 * fabs(x.value)) * (fabs(y.value) + y.error) +
                              fabs(silu) * y.error};
    }
    default: return x;
    }
}

/* Every element of D, and what is behind its rows. */
static inline void check_product(const expected_product *p, const matrix *d) {
    /* Half a unit in the last place, of the number itself: BF16, F16, F32. */
    static const double rounding[] = {0x1p-8, 0x1p-11, 0x1p-24};
    for (int i = 0; i < p->m; i++) {
        for (int j = 0; j < p->n; j++) {
            expected x = activated(p, i, j);
            if (p->residual) x.value += get(p->residual, i, j);
            float value = get(d, i, j);
            if (p->integers) {
                matrix one = {.type = d->type, .host = &(float){0}};
                set(&one, 0, 0, (float)x.value);
                x = (expected){get(&one, 0, 0), 0};
            } else { /* the sum with the residual is rounded, and then D */
                x.error += (0x1p-23 + rounding[d->type]) * (fabs(x.value) + x.error);
                if (d->type == MATRIX_F16) x.error += 0x1p-25; /* subnormal */
            }
            if (!(fabs(value - x.value) <= x.error))
                fail_msg("D[%d][%d] of %d x %d is %.9g, not %.9g within %.3g (%s)", i, j, p->m,
                         p->n, value, x.value, x.error, p->name);
        }
        expect_untouched(d, i);
    }
}

#endif
