/* Helpers for tests of GEMMs on the emulator, which compare D = activation(alpha A B^T + bias) + residual with sums in
 * double. */
#ifndef DW_EMULATED_GEMM_CALL_H
#define DW_EMULATED_GEMM_CALL_H

#include "deepwell/number.h"
#include "emulated_kernel.h"
#include "sm100/gemm_params.h"
#include <math.h>

typedef struct expected {
    double value, error;
} expected;

typedef struct expected_gemm {
    int m, n, activation;
    bool integers;                 /* every sum is exact in F32, and so is D before it is rounded */
    const matrix *bias, *residual; /* NULL: none */
    /* Returns alpha times a sum. If `column` is n or more, the sum is the other factor of SwiGLU. */
    expected (*sum)(const void *context, int row, int column);
    const void *context;
    const char *name;
} expected_gemm;

/* Adds the bias and rounds the sum. */
static inline expected biased(const expected_gemm *p, int row, int column) {
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

/* Activations: slopes are at most 1.13 (GELU, both forms) and 1.1 (SiLU). The errors of erff, the exponential
 * and the reciprocal are about 2^-21, of which less than 2^-19 of |x| remains. */
static inline expected activated(const expected_gemm *p, int row, int column) {
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

/* Checks every element of D, and the bytes after its rows. */
static inline void check_gemm(const expected_gemm *p, const matrix *d) {
    /* Returns half a unit in the last place of the number: BF16, F16, F32. */
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

/* ---- D of MXFP8 ------------------------------------------------------------------------------------ */

enum { BLOCK_OF_D = 32 };

/* Scales of D in the order of the tensor cores, filled with 0xFF before the run. */
typedef struct scales_of_d {
    size_t bytes;
    uint8_t *host;
    void *device;
} scales_of_d;

static inline void make_scales(scales_of_d *s, dw_emulator *emulator, int m, int n) {
    s->bytes = (size_t)dw_scales_swizzled_bytes(m, (n + BLOCK_OF_D - 1) / BLOCK_OF_D);
    s->host = malloc(s->bytes);
    assert_non_null(s->host);
    assert_int_equal(dw_emulator_allocate(emulator, s->bytes, &s->device), DW_OK);
    assert_int_equal(dw_emulator_fill(emulator, s->device, 0xFF, s->bytes), DW_OK);
}

/* Returns the code of the scale for the largest magnitude `amax`. */
static inline int scale_for(double amax) {
    dw_block_options options = DW_BLOCK_OPTIONS_DEFAULT;
    const float value = (float)amax;
    uint8_t code, scale;
    assert_int_equal(dw_block_quantize(&options, 1, 1, &value, 1, &code, 0, &scale), DW_OK);
    return scale;
}
static inline uint32_t code_for(double x, int scale) {
    return dw__encode_one(DW_E4M3, (float)ldexp(x, 127 - scale), DW_OVERFLOW_SATURATE,
                          DW_ROUND_NEAREST, 0);
}

/* Checks a block of row i. The values that the kernel quantizes are within `error` of the exact ones, and
 * scales and codes are monotonic in the values. They must therefore lie between those of both ends; each
 * element's code uses the scale that the kernel stored. Returns the number of codes whose ends differ. */
static inline int check_block(const expected_gemm *p, const matrix *d, int i, int block,
                              int scale) {
    expected x[BLOCK_OF_D];
    double least = 0, most = 0;
    int between = 0, count = p->n - block * BLOCK_OF_D;
    if (count > BLOCK_OF_D) count = BLOCK_OF_D;
    for (int j = 0; j < count; j++) {
        x[j] = activated(p, i, block * BLOCK_OF_D + j);
        /* 2^-23, because bounds are rounded to F32 as well. */
        x[j].error = p->integers ? 0 : x[j].error + 0x1p-22 * (fabs(x[j].value) + x[j].error);
        least = fmax(least, fabs(x[j].value) - x[j].error);
        most = fmax(most, fabs(x[j].value) + x[j].error);
    }
    if (scale < scale_for(least) || scale > scale_for(most))
        fail_msg("the scale of D's row %d, block %d of %d x %d is %d, not %d to %d (%s)", i, block,
                 p->m, p->n, scale, scale_for(least), scale_for(most), p->name);
    for (int j = 0; j < count; j++) {
        const int column = block * BLOCK_OF_D + j;
        const uint32_t low = code_for(x[j].value - x[j].error, scale),
                       high = code_for(x[j].value + x[j].error, scale);
        const double value = get(d, i, column);
        if (!(value >= (double)dw__decode_one(DW_E4M3, low) &&
              value <= (double)dw__decode_one(DW_E4M3, high)))
            fail_msg("D[%d][%d] of %d x %d is %g by a scale of %d, not the code of %.9g within "
                     "%.3g (%s)",
                     i, column, p->m, p->n, value, scale, x[j].value, x[j].error, p->name);
        between += low != high;
    }
    return between;
}

static inline void check_quantized(const expected_gemm *p, const matrix *d, const scales_of_d *s) {
    const int blocks = (p->n + BLOCK_OF_D - 1) / BLOCK_OF_D;
    uint8_t *scales = malloc((size_t)p->m * (size_t)blocks), *again = malloc(s->bytes);
    int between = 0;
    assert_true(scales && again);
    assert_int_equal(dw_scales_unswizzle(p->m, blocks, 1, s->host, scales), DW_OK);
    assert_int_equal(dw_scales_swizzle(p->m, blocks, 1, scales, again), DW_OK);
    assert_memory_equal(s->host, again, s->bytes); /* zeros that complete a tile */
    for (int i = 0; i < p->m; i++) {
        for (int block = 0; block < blocks; block++)
            between += check_block(p, d, i, block, scales[i * blocks + block]);
        expect_untouched(d, i);
    }
    /* Otherwise the check would be too weak: an activation maps many numbers into the range where bounds are wide. */
    assert_true(p->activation != DW_GEMM_LINEAR || p->m * p->n < 100 || between < p->m * p->n / 4);
    free(scales);
    free(again);
}

#endif
