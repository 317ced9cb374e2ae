/* Whether a kernel's D is what sums in double, made by the CPU, and the epilogue make of the same operands,
 * within what rounding explains. */
#include "kernel/cuda/product_guard.h"
#include "number/format.h"
#include <math.h>
#include <stdio.h>

/* ---- what it should be -------------------------------------------------------------------------- */

typedef struct expected {
    double value, error;
} expected;

/* alpha sum + bias. Products of two elements, with their scales, are exact in F32; each of the k additions, and
 * those of alpha, its factors and the bias, errs by at most 2^-23 of the sum of magnitudes, were the sum
 * truncated. */
static expected scaled_sum(const dw__product_trial *t, int row, int row_b) {
    const int k = (int)t->call.k;
    const double *a = t->values[DW__GUARD_A] + (size_t)row * (size_t)k,
                 *b = t->values[DW__GUARD_B] + (size_t)row_b * (size_t)k,
                 *factors = t->values[DW__GUARD_FACTORS];
    const double bias = t->call.bias ? t->values[DW__GUARD_BIAS][row_b] : 0.0,
                 scale =
                     (double)t->call.alpha * (t->call.quantized ? factors[0] * factors[1] : 1.0);
    double sum = 0.0, magnitude = 0.0;
    for (int i = 0; i < k; i++) {
        double product = a[i] * b[i];
        sum += product;
        magnitude += fabs(product);
    }
    const int operations = k + (t->call.quantized ? 4 : 2);
    return (expected){scale * sum + bias,
                      operations * 0x1p-23 * (fabs(scale) * magnitude + fabs(bias))};
}

/* Of the B that a row of A is multiplied with, the first row. */
static int first_row_b(const dw__product_trial *t, int row) {
    int64_t end = t->subject->rows[0];
    int group = 0;
    while (group + 1 < t->subject->groups && row >= end) end += t->subject->rows[++group];
    return group * (int)dw__product_rows_b(&t->call);
}

/* Slopes are at most 1.13 (GELU, both) and 1.1 (SiLU); erff, the exponential and the reciprocal err by some 2^-21,
 * which the operations around them leave below 2^-19 of |x|. */
static expected activated(const dw__product_trial *t, int row, int column) {
    const int row_b = first_row_b(t, row) + column;
    expected x = scaled_sum(t, row, row_b);
    const double slope_error = 1.13 * x.error + 0x1p-19 * fabs(x.value);
    switch (t->call.activation) {
    case DW_ACTIVATION_GELU:
        return (expected){0.5 * x.value * erfc(-x.value * 0.70710678118654752), slope_error};
    case DW_ACTIVATION_GELU_TANH: {
        double inner = 0.79788456080286536 * (x.value + 0.044715 * x.value * x.value * x.value);
        return (expected){0.5 * x.value * (1.0 + tanh(inner)), slope_error};
    }
    case DW_ACTIVATION_SWIGLU: {
        expected y = scaled_sum(t, row, t->parts[DW__GUARD_D].columns + row_b);
        double silu = x.value / (1.0 + exp(-x.value));
        return (expected){silu * y.value,
                          slope_error * (fabs(y.value) + y.error) + fabs(silu) * y.error};
    }
    default: return x;
    }
}

/* With the sum with the residual rounded, and D. */
static expected expected_at(const dw__product_trial *t, int row, int column) {
    const dw__product_part *d = &t->parts[DW__GUARD_D];
    const double rounding = d->type == DW__GUARD_F32   ? 0x1p-24
                            : d->type == DW__GUARD_F16 ? 0x1p-11
                                                       : 0x1p-8;
    expected x = activated(t, row, column);
    if (t->subject->residual)
        x.value += t->values[DW__GUARD_RESIDUAL][(size_t)row * (size_t)d->columns + (size_t)column];
    x.error += (0x1p-23 + rounding) * (fabs(x.value) + x.error);
    if (d->type == DW__GUARD_F16) x.error += 0x1p-25; /* subnormal */
    return x;
}

/* ---- numbers ---------------------------------------------------------------------------------------- */

static bool is_untouched(const dw__product_trial *t, int row, char *text, size_t bytes) {
    const dw__product_part *d = &t->parts[DW__GUARD_D];
    for (int j = d->columns; j < d->pitch; j++) {
        float value =
            dw__product_trial_get(t, DW__GUARD_D, (size_t)row * (size_t)d->pitch + (size_t)j);
        if (isnan(value)) continue;
        snprintf(text, bytes, "%g was written behind row %d of D", (double)value, row);
        return false;
    }
    return true;
}

static bool row_is_right(const dw__product_trial *t, int row, char *text, size_t bytes) {
    const dw__product_part *d = &t->parts[DW__GUARD_D];
    for (int j = 0; j < d->columns; j++) {
        const size_t at = (size_t)row * (size_t)d->pitch + (size_t)j;
        const double value = (double)dw__product_trial_get(t, DW__GUARD_D, at);
        const expected x = expected_at(t, row, j);
        if (fabs(value - x.value) <= x.error) continue; /* a NaN is no less than anything */
        snprintf(text, bytes, "D[%d][%d] of %lld x %lld x %lld is %g, expected %g within %.2g", row,
                 j, (long long)t->call.m, (long long)t->call.n, (long long)t->call.k, value,
                 x.value, x.error);
        return false;
    }
    return true;
}

/* ---- codes and scales ------------------------------------------------------------------------------- */

enum { BLOCK = 32 };

/* By RCEIL, the code of the scale where the largest magnitude is `most`. */
static int scale_for(double most) {
    const dw_block_options options = DW_BLOCK_OPTIONS_DEFAULT;
    const float value = (float)most;
    unsigned char code, scale = 0;
    (void)dw_block_quantize(&options, 1, 1, &value, 1, &code, 0, &scale); /* allocates nothing */
    return scale;
}

static float number_for(double x, int scale) {
    return dw__decode_one(DW_FORMAT_E4M3,
                          dw__encode_one(DW_FORMAT_E4M3, (float)ldexp(x, 127 - scale),
                                         DW_OVERFLOW_SATURATE, DW_ROUND_NEAREST, 0));
}

/* What the kernel quantizes lies within `error` of the exact value, and scales and codes grow with what they are of:
 * they lie between those of the two ends, for each element by the scale that is there. */
static bool block_is_right(const dw__product_trial *t, int row, int block, int scale, char *text,
                           size_t bytes) {
    const dw__product_part *d = &t->parts[DW__GUARD_D];
    const int first = block * BLOCK,
              count = d->columns - first < BLOCK ? d->columns - first : BLOCK;
    expected x[BLOCK];
    double least = 0.0, most = 0.0;
    for (int j = 0; j < count; j++) {
        x[j] = activated(t, row, first + j);
        x[j].error += 0x1p-22 * (fabs(x[j].value) + x[j].error); /* ends are rounded to F32, too */
        least = fmax(least, fabs(x[j].value) - x[j].error);
        most = fmax(most, fabs(x[j].value) + x[j].error);
    }
    const int low = scale_for(least), high = scale_for(most);
    if (scale < low || scale > high) {
        snprintf(text, bytes, "the scale of D's row %d, block %d is %d, expected %d to %d", row,
                 block, scale, low, high);
        return false;
    }
    for (int j = 0; j < count; j++) {
        const float value = dw__product_trial_get(
            t, DW__GUARD_D, (size_t)row * (size_t)d->pitch + (size_t)(first + j));
        if (value >= number_for(x[j].value - x[j].error, scale) &&
            value <= number_for(x[j].value + x[j].error, scale))
            continue;
        snprintf(text, bytes,
                 "D[%d][%d] of %lld x %lld x %lld is %g by a scale of %d, not the code of %g "
                 "within %.2g",
                 row, first + j, (long long)t->call.m, (long long)t->call.n, (long long)t->call.k,
                 (double)value, scale, x[j].value, x[j].error);
        return false;
    }
    return true;
}

static bool quantized_is_right(const dw__product_trial *t, char *text, size_t bytes) {
    const dw__product_part *d = &t->parts[DW__GUARD_D];
    const unsigned char *scales =
        (const unsigned char *)t->host + t->parts[DW__GUARD_SCALES_D].begin;
    const int blocks = (d->columns + BLOCK - 1) / BLOCK, wide = DW_SCALE_TILES_WIDE(blocks),
              high = DW_SCALE_TILES_HIGH(d->rows);
    for (int row = 0; row < high * DW_SCALE_TILE_ROWS; row++)
        for (int block = 0; block < wide * DW_SCALE_TILE_COLUMNS; block++) {
            const int scale = scales[DW_SCALE_OFFSET(row, block, wide)];
            if (row < d->rows && block < blocks) {
                if (!block_is_right(t, row, block, scale, text, bytes)) return false;
            } else if (scale != 0) {
                snprintf(text, bytes, "behind D's scales, at row %d, block %d, is %d, expected 0",
                         row, block, scale);
                return false;
            }
        }
    const dw__product_part *p = &t->parts[DW__GUARD_SCALES_D];
    for (int i = p->columns; i < p->pitch; i++)
        if (scales[i] != 0xff) {
            snprintf(text, bytes, "%d was written behind D's scales", scales[i]);
            return false;
        }
    return true;
}

bool dw__product_trial_is_right(const dw__product_trial *t, char *text, size_t bytes) {
    if (t->call.quantized_d && !quantized_is_right(t, text, bytes)) return false;
    for (int i = 0; i < t->parts[DW__GUARD_D].rows; i++) {
        if (!t->call.quantized_d && !row_is_right(t, i, text, bytes)) return false;
        if (!is_untouched(t, i, text, bytes)) return false;
    }
    return true;
}
