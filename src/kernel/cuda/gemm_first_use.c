/* The first-use check of GEMM: compares D of small random operands, with its epilogue, with sums in double that the CPU
 * computes. The tolerance is what rounding explains. These kernels have run on the emulator only, so this check detects
 * where hardware differs from the documentation that the emulator follows. */
#include "kernel/cuda/gpu_gemm.h"
#include "number/format.h"
#include "number/philox.h"
#include <math.h>
#include <stdio.h>

enum {
    PAD = 8,
    SEED = 2026,
    MOST_GROUPS = 4,
    BLOCK = 32, /* elements of D with one scale */
    FP8_BLOCK = DW_FP8_BLOCK_SIDE,
    NO_SCALE = 127 /* the code of a scale of 1 */
};
#define CODES DW_E4M3 /* D's codes; bytes of other codes, too */

typedef enum part {
    A,
    B,
    BIAS,
    RESIDUAL,
    FACTORS, /* factors of A and of B */
    ROW_FACTORS,
    SCALES_A,
    SCALES_B,
    D,
    SCALES_D,
    ROW_SQUARES,
    TURNED_D,
    TURNED_SCALES_D,
    PLAIN_D,
    PARTS,
    VALUES = SCALES_A /* the parts before it have numbers in `values` */
} part;

typedef struct region {
    int rows, columns;
    /* from row to row, in elements or bytes of codes; the padding of a row is NaNs, bytes of 0xFF */
    int pitch;
    dw_dtype type; /* CODES: bytes; codes of D are E4M3 */
    dw__trial_part *memory;
    double *values; /* operands as numbers, row by row without padding */
} region;

typedef struct state {
    dw__gemm_case given;
    dw_gemm call;
    dw_grouped_gemm groups;
    void *group_a[MOST_GROUPS], *group_b[MOST_GROUPS], *group_d[MOST_GROUPS];
    region parts[PARTS];
} state;

/* ---- operands ----------------------------------------------------------------------------------- */

/* `units`: the length of a row in elements or bytes of codes. */
static dw_status add_part(dw__trial *t, part which, int rows, int columns, int units,
                          dw_dtype type) {
    const int chunk = 16 / (int)dw_dtype_bytes(type),
              pitch = (units + PAD + chunk - 1) / chunk * chunk;
    region *p = &((state *)t->state)->parts[which];
    dw__trial_part *values;
    *p = (region){rows, columns, pitch, type, NULL, NULL};
    DW_RETURN_IF_FAILED(
        dw__trial_add(t, (size_t)rows * (size_t)pitch * dw_dtype_bytes(type), &p->memory));
    if (which >= VALUES) return DW_OK;
    DW_RETURN_IF_FAILED(
        dw__trial_scratch(t, (size_t)rows * (size_t)columns * sizeof(double), &values));
    p->values = values->host;
    return DW_OK;
}

static float get(const region *p, size_t at) {
    const unsigned char *codes = p->memory->host;
    return p->type == CODES ? dw__decode_one(DW_E4M3, codes[at])
                            : dw__trial_get(p->memory->host, p->type, at);
}

/* Returns a random number from -1 to 1. */
static float random_number(part which, size_t at) {
    return 2.0f * dw__philox_uniform(SEED, which, 0, at) - 1.0f;
}

/* Adds an operand of random numbers: `values` has rows x columns. If it is turned, its memory has columns x rows. */
static dw_status add_numbers(dw__trial *t, part which, int rows, int columns, dw_dtype type,
                             bool turned) {
    const region *p = &((state *)t->state)->parts[which];
    DW_RETURN_IF_FAILED(turned ? add_part(t, which, columns, rows, rows, type)
                               : add_part(t, which, rows, columns, columns, type));
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) {
            const size_t at = turned ? (size_t)j * (size_t)p->pitch + (size_t)i
                                     : (size_t)i * (size_t)p->pitch + (size_t)j;
            const float number = random_number(which, at);
            /* Factors for which the activation is not linear. */
            dw__trial_set(p->memory->host, type, at,
                          which == FACTORS || which == ROW_FACTORS ? 1.0f + 0.5f * number : number);
            p->values[(size_t)i * (size_t)columns + (size_t)j] = (double)get(p, at);
        }
    return DW_OK;
}

/* Adds an operand of codes and scales of numbers from -1 to 1. Each block has its own magnitude, so that a scale at a
 * wrong place changes the result. The rows have `parts` parts, each with whole tiles of scales. */
static dw_status add_codes(dw__trial *t, part which, int rows, int columns, dw_scheme scheme,
                           int parts) {
    enum { SIZES = 4 };
    state *s = t->state;
    region *p = &s->parts[which];
    const part scales_of = which == A ? SCALES_A : SCALES_B;
    const size_t count = (size_t)rows * (size_t)columns;
    dw_block_options options = DW_BLOCK_OPTIONS_DEFAULT;
    dw_block_layout layout = {0};
    dw__trial_part *numbers, *scales;
    options.scheme = scheme;
    DW_RETURN_IF_FAILED(dw_block_layout_of(&options, rows, columns, &layout));
    const int64_t part_rows = rows / parts, row_bytes = layout.row_bytes,
                  part_bytes = dw_scales_swizzled_bytes(part_rows, layout.scale_cols);
    DW_RETURN_IF_FAILED(add_part(t, which, rows, columns, (int)row_bytes, CODES));
    DW_RETURN_IF_FAILED(
        add_part(t, scales_of, 1, (int)part_bytes * parts, (int)part_bytes * parts, CODES));
    DW_RETURN_IF_FAILED(dw__trial_scratch(t, count * sizeof(float), &numbers));
    DW_RETURN_IF_FAILED(dw__trial_scratch(t, layout.scale_bytes, &scales));
    float *number = numbers->host;
    unsigned char *codes = p->memory->host, *ordered = s->parts[scales_of].memory->host,
                  *scale = scales->host;
    for (size_t at = 0; at < count; at++) {
        const size_t block = at / (size_t)columns * (size_t)layout.scale_cols +
                             at % (size_t)columns / (size_t)layout.block;
        const int size = (int)(SIZES * dw__philox_uniform(SEED, which, 1, block));
        number[at] = ldexpf(random_number(which, at), -size);
    }
    DW_RETURN_IF_FAILED(
        dw_block_quantize(&options, rows, columns, number, columns, codes, p->pitch, scale));
    DW_RETURN_IF_FAILED(
        dw_block_dequantize(&options, rows, columns, codes, p->pitch, scale, number, columns));
    for (size_t at = 0; at < count; at++) p->values[at] = (double)number[at];
    for (int i = 0; i < parts; i++)
        DW_RETURN_IF_FAILED(dw_scales_swizzle(part_rows, layout.scale_cols, 1,
                                              scale + i * part_rows * layout.scale_cols,
                                              ordered + i * part_bytes));
    return DW_OK;
}

static int fp8_blocks(int elements) { return (elements + FP8_BLOCK - 1) / FP8_BLOCK; }

/* Adds the results of a call whose D becomes codes of fp8-block. */
static dw_status add_blocks_d(dw__trial *t, const state *s) {
    const int m = (int)s->call.m, n = (int)s->call.n, scales = fp8_blocks(n) * m,
              turned_scales = fp8_blocks(m) * n;
    DW_RETURN_IF_FAILED(add_part(t, D, m, n, (int)dw__gemm_code_row(n), CODES));
    DW_RETURN_IF_FAILED(add_part(t, SCALES_D, 1, scales, scales, DW_F32));
    if (s->given.plain_d) DW_RETURN_IF_FAILED(add_part(t, PLAIN_D, m, n, n, s->call.dtype));
    if (!s->given.turned_d) return DW_OK;
    DW_RETURN_IF_FAILED(add_part(t, TURNED_D, n, m, (int)dw__gemm_code_row(m), CODES));
    return add_part(t, TURNED_SCALES_D, 1, turned_scales, turned_scales, DW_F32);
}

static dw_status add_operands(dw__trial *t, const state *s) {
    const dw_gemm *c = &s->call;
    const int m = (int)c->m, n = (int)c->n, k = (int)c->k, rows_b = (int)dw__gemm_rows_b(c),
              all_b = s->given.groups * rows_b;
    if (c->quantized) {
        DW_RETURN_IF_FAILED(add_codes(t, A, m, k, c->scheme_a, 1));
        DW_RETURN_IF_FAILED(add_codes(t, B, all_b, k, c->scheme_b, rows_b / n));
    } else {
        DW_RETURN_IF_FAILED(add_numbers(t, A, m, k, c->dtype, s->given.turned.a));
        DW_RETURN_IF_FAILED(add_numbers(t, B, all_b, k, c->dtype, s->given.turned.b));
    }
    DW_RETURN_IF_FAILED(add_numbers(t, BIAS, 1, rows_b, c->dtype, false));
    DW_RETURN_IF_FAILED(add_numbers(t, FACTORS, 1, 2, DW_F32, false));
    if (s->given.row_factors) DW_RETURN_IF_FAILED(add_numbers(t, ROW_FACTORS, 1, m, DW_F32, false));
    if (s->given.row_squares) DW_RETURN_IF_FAILED(add_part(t, ROW_SQUARES, 1, m, m, DW_F32));
    if (s->given.residual) DW_RETURN_IF_FAILED(add_numbers(t, RESIDUAL, m, n, c->output, false));
    if (dw__gemm_has_blocks_d(c)) return add_blocks_d(t, s);
    DW_RETURN_IF_FAILED(add_part(t, D, m, n, n, c->quantized_d ? CODES : c->output));
    if (!c->quantized_d) return DW_OK;
    const int scales = (int)dw_scales_swizzled_bytes(m, (n + BLOCK - 1) / BLOCK);
    return add_part(t, SCALES_D, 1, scales, scales, CODES);
}

/* ---- the call ----------------------------------------------------------------------------------- */

static void *device_of(const state *s, part which) {
    return s->parts[which].memory ? s->parts[which].memory->device : NULL;
}

static dw_matrix matrix_of(const state *s, part which) {
    return (dw_matrix){device_of(s, which), s->parts[which].pitch};
}

static void set_groups(state *s) {
    const dw_gemm *c = &s->call;
    int64_t before = 0;
    s->groups = (dw_grouped_gemm){.alpha = c->alpha,
                                  .groups = s->given.groups,
                                  .n = c->n,
                                  .k = c->k,
                                  .m = s->given.rows,
                                  .a = s->group_a,
                                  .b = s->group_b,
                                  .d = s->group_d,
                                  .stride_a = c->a.stride,
                                  .stride_b = c->b.stride,
                                  .stride_d = c->d.stride,
                                  .stream = c->stream};
    for (int g = 0; g < s->given.groups; before += s->given.rows[g++]) {
        s->group_a[g] = (uint16_t *)c->a.data + before * c->a.stride;
        s->group_b[g] = (uint16_t *)c->b.data + g * c->n * c->b.stride;
        s->group_d[g] = (uint16_t *)c->d.data + before * c->d.stride;
    }
}

static dw_status add_workspace(dw__trial *t, state *s) {
    const dw__kernel *kernel = t->variant->kernel;
    dw__trial_part *workspace;
    size_t bytes = 0;
    if (kernel->workspace_bytes)
        DW_RETURN_IF_FAILED(kernel->workspace_bytes(kernel, t->call, &t->context, &bytes));
    if (bytes < s->given.workspace_bytes) bytes = s->given.workspace_bytes;
    if (bytes == 0) return DW_OK;
    DW_RETURN_IF_FAILED(dw__trial_add(t, bytes, &workspace));
    s->call.workspace = s->groups.workspace = workspace->device;
    s->call.workspace_bytes = s->groups.workspace_bytes = bytes;
    return DW_OK;
}

static dw_status prepare(dw__trial *t) {
    state *s = t->state;
    dw_gemm *c = &s->call;
    const dw__kernel *kernel = t->variant->kernel;
    const bool rtx = kernel == &dw__sm120_gemm || kernel == &dw__sm120_gemm_scaled;
    s->given = kernel->provided           ? dw__gemm_cutlass_case_of(t->variant)
               : kernel == &dw__sm90_gemm ? dw__sm90_case_of(t->variant)
               : rtx                      ? dw__sm120_case_of(t->variant)
                                          : dw__gemm_case_of(t->variant);
    *c = s->given.call;
    t->context.sm_count = s->given.sm_count;
    t->consequence = c->quantized || c->quantized_d ? ", its GEMMs are refused"
                                                    : ", its GEMMs are computed by definition";
    DW_RETURN_IF_FAILED(add_operands(t, s));
    c->struct_size = sizeof *c;
    c->device = t->context.device;
    c->stream = t->stream;
    c->a = matrix_of(s, A);
    c->b = matrix_of(s, B);
    c->d = matrix_of(s, D);
    if (s->given.bias) c->bias = device_of(s, BIAS);
    if (s->given.residual) c->residual = matrix_of(s, RESIDUAL);
    c->scales_a = device_of(s, SCALES_A);
    c->scales_b = device_of(s, SCALES_B);
    c->scales_d = device_of(s, SCALES_D);
    if (s->given.plain_d) c->plain_d = matrix_of(s, PLAIN_D);
    if (s->given.turned_d) c->turned_d = matrix_of(s, TURNED_D);
    c->turned_scales_d = device_of(s, TURNED_SCALES_D);
    c->factor_a = device_of(s, FACTORS);
    c->factor_b = c->factor_a + 1;
    c->row_scale = device_of(s, ROW_FACTORS);
    c->row_squares = device_of(s, ROW_SQUARES);
    t->call = c;
    if (s->given.groups > 1) {
        set_groups(s);
        t->call = &s->groups;
    }
    return add_workspace(t, s);
}

/* ---- expected values ---------------------------------------------------------------------------- */

typedef struct expected {
    double value, error;
} expected;

/* Returns alpha sum + bias and its error bound. A product of two elements and their scales is exact in F32. Each of the
 * k additions, and those of alpha, its factors and the bias, has an error of at most 2^-23 of the sum of magnitudes,
 * even if the accumulator is truncated. */
static expected scaled_sum(const state *s, int row, int row_b) {
    const int k = (int)s->call.k;
    const double *a = s->parts[A].values + (size_t)row * (size_t)k,
                 *b = s->parts[B].values + (size_t)row_b * (size_t)k,
                 *factors = s->parts[FACTORS].values;
    const double bias = s->call.bias ? s->parts[BIAS].values[row_b] : 0.0,
                 of_row = s->given.row_factors ? s->parts[ROW_FACTORS].values[row] : 1.0,
                 scale = (double)s->call.alpha * of_row *
                         (s->call.quantized ? factors[0] * factors[1] : 1.0);
    double sum = 0.0, magnitude = 0.0;
    for (int i = 0; i < k; i++) {
        double product = a[i] * b[i];
        sum += product;
        magnitude += fabs(product);
    }
    const int operations = k + (s->call.quantized ? 4 : 2) + s->given.row_factors;
    return (expected){scale * sum + bias,
                      operations * 0x1p-23 * (fabs(scale) * magnitude + fabs(bias))};
}

/* Returns the first row of the B that a row of A is multiplied with. */
static int first_row_b(const state *s, int row) {
    int64_t end = s->given.rows[0];
    int group = 0;
    while (group + 1 < s->given.groups && row >= end) end += s->given.rows[++group];
    return group * (int)dw__gemm_rows_b(&s->call);
}

/* Bounds the activation's error. Slopes are at most 1.13 (GELU, both forms) and 1.1 (SiLU). erff, the exponential and
 * the reciprocal have errors of about 2^-21, which the surrounding operations keep below 2^-19 of |x|. The normal
 * distribution by which GELU is computed for results of 16 bits has a relative error of 2^-17. */
static expected activated(const state *s, int row, int column) {
    const int row_b = first_row_b(s, row) + column;
    expected x = scaled_sum(s, row, row_b);
    const double slope_error = 1.13 * x.error + 0x1p-19 * fabs(x.value);
    switch (s->call.activation) {
    case DW_ACTIVATION_GELU:
        return (expected){0.5 * x.value * erfc(-x.value * 0.70710678118654752),
                          slope_error + 0x1p-17 * fabs(x.value)};
    case DW_ACTIVATION_GELU_TANH: {
        double inner = 0.79788456080286536 * (x.value + 0.044715 * x.value * x.value * x.value);
        return (expected){0.5 * x.value * (1.0 + tanh(inner)), slope_error};
    }
    case DW_ACTIVATION_SWIGLU: {
        expected y = scaled_sum(s, row, s->parts[D].columns + row_b);
        double silu = x.value / (1.0 + exp(-x.value));
        return (expected){silu * y.value,
                          slope_error * (fabs(y.value) + y.error) + fabs(silu) * y.error};
    }
    default: return x;
    }
}

/* Adds the residual, and the errors of that addition and of rounding the result to F32. */
static expected expected_at(const state *s, int row, int column) {
    expected x = activated(s, row, column);
    if (s->given.residual)
        x.value += s->parts[RESIDUAL].values[(size_t)row * (size_t)s->call.n + (size_t)column];
    x.error += 0x1p-22 * (fabs(x.value) + x.error);
    return x;
}

/* ---- comparison --------------------------------------------------------------------------------- */

/* Returns the code of the scale by the rule RCEIL for a block whose largest magnitude is `most`. */
static int scale_for(double most) {
    const dw_block_options options = DW_BLOCK_OPTIONS_DEFAULT;
    const float value = (float)most;
    unsigned char code, scale = 0;
    (void)dw_block_quantize(&options, 1, 1, &value, 1, &code, 0, &scale); /* does not allocate */
    return scale;
}

/* Returns the code of D's scale for a block of columns. */
static int scale_at(const state *s, int row, int block) {
    const int wide = DW_SCALE_TILES_WIDE((s->parts[D].columns + BLOCK - 1) / BLOCK);
    const unsigned char *scales = s->parts[SCALES_D].memory->host;
    return scales[DW_SCALE_OFFSET(row, block, wide)];
}

/* Rounds as the kernel does: to D's type, or to a code by a scale. */
static double rounded(const region *d, double x, int scale) {
    float value;
    if (d->type == CODES)
        return (double)dw__decode_one(DW_E4M3,
                                      dw__encode_one(DW_E4M3, (float)ldexp(x, NO_SCALE - scale),
                                                     DW_OVERFLOW_SATURATE, DW_ROUND_NEAREST, 0));
    dw__trial_set(&value, d->type, 0, (float)x);
    return (double)dw__trial_get(&value, d->type, 0);
}

/* Checks D's elements of one row and block of columns. The kernel rounds numbers that lie within `error` of the exact
 * values. Rounded numbers, scales and codes grow with the numbers, so they must lie between those of the two ends of
 * each interval. A code is compared with the scale that the kernel stored. */
static bool block_is_right(const state *s, int row, int block, char *text, size_t bytes) {
    const region *d = &s->parts[D];
    const bool codes = d->type == CODES;
    const int first = block * BLOCK, scale = codes ? scale_at(s, row, block) : NO_SCALE,
              count = d->columns - first < BLOCK ? d->columns - first : BLOCK;
    expected x[BLOCK];
    double least = 0.0, most = 0.0;
    for (int j = 0; j < count; j++) {
        x[j] = expected_at(s, row, first + j);
        least = fmax(least, fabs(x[j].value) - x[j].error);
        most = fmax(most, fabs(x[j].value) + x[j].error);
    }
    if (codes && (scale < scale_for(least) || scale > scale_for(most))) {
        snprintf(text, bytes, "the scale of D's row %d, block %d is %d, expected %d to %d", row,
                 block, scale, scale_for(least), scale_for(most));
        return false;
    }
    for (int j = 0; j < count; j++) {
        const float value = get(d, (size_t)row * (size_t)d->pitch + (size_t)(first + j));
        if ((double)value >= rounded(d, x[j].value - x[j].error, scale) &&
            (double)value <= rounded(d, x[j].value + x[j].error, scale))
            continue; /* a NaN is in no interval */
        snprintf(text, bytes,
                 "D[%d][%d] of %lld x %lld x %lld is %g, expected %g within %.2g before rounding",
                 row, first + j, (long long)s->call.m, (long long)s->call.n, (long long)s->call.k,
                 ldexp((double)value, scale - NO_SCALE), x[j].value, x[j].error);
        return false;
    }
    return true;
}

/* Checks that nothing was written behind a row of D. */
static bool is_untouched(const region *d, int row, char *text, size_t bytes) {
    for (int j = d->columns; j < d->pitch; j++) {
        const float value = get(d, (size_t)row * (size_t)d->pitch + (size_t)j);
        if (isnan(value)) continue;
        snprintf(text, bytes, "%g was written behind row %d of D", (double)value, row);
        return false;
    }
    return true;
}

/* Rounds to D's type. */
static float rounded_d(const state *s, double x) {
    float value;
    dw__trial_set(&value, s->call.dtype, 0, (float)x);
    return dw__trial_get(&value, s->call.dtype, 0);
}

/* Returns the value of the code of a number with a scale of fp8-block. */
static double block_code(const state *s, double x, float scale) {
    const float number = rounded_d(s, x), quotient = scale == 0.0f ? 0.0f : number / scale;
    return (double)dw__decode_one(
        DW_E4M3, dw__encode_one(DW_E4M3, quotient, DW_OVERFLOW_SATURATE, DW_ROUND_NEAREST, 0));
}

/* Checks the codes and the scale of a block of fp8-block: of a row of D, or of a column in the codes of D transposed. As
 * in block_is_right, all must lie between those of the ends of each element's interval. */
static bool fp8_block_is_right(const state *s, part codes_of, int line, int block, char *text,
                               size_t bytes) {
    enum { LARGEST = 448 };
    const bool turned = codes_of == TURNED_D;
    const region *codes = &s->parts[codes_of];
    const int first = block * FP8_BLOCK, left = codes->columns - first,
              count = left < FP8_BLOCK ? left : FP8_BLOCK;
    const float scale = get(&s->parts[turned ? TURNED_SCALES_D : SCALES_D],
                            (size_t)block * (size_t)codes->rows + (size_t)line);
    expected x[FP8_BLOCK];
    double least = 0.0, most = 0.0;
    for (int j = 0; j < count; j++) {
        x[j] = turned ? expected_at(s, first + j, line) : expected_at(s, line, first + j);
        least = fmax(least, fabs(x[j].value) - x[j].error);
        most = fmax(most, fabs(x[j].value) + x[j].error);
    }
    const float scale_least = rounded_d(s, least) / LARGEST,
                scale_most = rounded_d(s, most) / LARGEST;
    if (!(scale >= scale_least && scale <= scale_most)) {
        snprintf(text, bytes, "the scale of %s %d of D, block %d is %g, expected %g to %g",
                 turned ? "column" : "row", line, block, (double)scale, (double)scale_least,
                 (double)scale_most);
        return false;
    }
    for (int j = 0; j < count; j++) {
        const float value = get(codes, (size_t)line * (size_t)codes->pitch + (size_t)(first + j));
        if ((double)value >= block_code(s, x[j].value - x[j].error, scale) &&
            (double)value <= block_code(s, x[j].value + x[j].error, scale))
            continue;
        snprintf(text, bytes, "the code of %s %d of D, element %d is %g, expected %g / %g",
                 turned ? "column" : "row", line, first + j, (double)value, x[j].value,
                 (double)scale);
        return false;
    }
    return true;
}

/* Checks the codes of one direction: zeros complete each row, and nothing is written behind it or behind the scales. */
static bool blocks_are_right(const state *s, part codes_of, char *text, size_t bytes) {
    const region *codes = &s->parts[codes_of],
                 *scales = &s->parts[codes_of == D ? SCALES_D : TURNED_SCALES_D];
    const unsigned char *all = codes->memory->host;
    const int padded = (int)dw__gemm_code_row(codes->columns);
    for (int line = 0; line < codes->rows; line++) {
        for (int block = 0; block < fp8_blocks(codes->columns); block++)
            if (!fp8_block_is_right(s, codes_of, line, block, text, bytes)) return false;
        for (int j = codes->columns; j < codes->pitch; j++) {
            const int found = all[(size_t)line * (size_t)codes->pitch + (size_t)j];
            if (found == (j < padded ? 0 : 0xff)) continue;
            snprintf(text, bytes, "behind the codes of %s %d of D, at %d, is %d, expected %s",
                     codes_of == D ? "row" : "column", line, j, found,
                     j < padded ? "0" : "nothing written");
            return false;
        }
    }
    return is_untouched(scales, 0, text, bytes);
}

/* Checks D itself, where it is stored beside its codes. */
static bool plain_is_right(const state *s, char *text, size_t bytes) {
    const region *d = &s->parts[PLAIN_D];
    for (int row = 0; row < d->rows; row++) {
        for (int column = 0; column < d->columns; column++) {
            const float value = get(d, (size_t)row * (size_t)d->pitch + (size_t)column);
            const expected x = expected_at(s, row, column);
            if (value >= rounded_d(s, x.value - x.error) &&
                value <= rounded_d(s, x.value + x.error))
                continue;
            snprintf(text, bytes, "D[%d][%d] is %g, expected %g within %.2g before rounding", row,
                     column, (double)value, x.value, x.error);
            return false;
        }
        if (!is_untouched(d, row, text, bytes)) return false;
    }
    return true;
}

/* Checks the scales outside D: zeros in incomplete tiles, and nothing behind the last tile. */
static bool scales_end(const state *s, char *text, size_t bytes) {
    const region *d = &s->parts[D], *p = &s->parts[SCALES_D];
    const unsigned char *scales = p->memory->host;
    const int blocks = (d->columns + BLOCK - 1) / BLOCK,
              wide = DW_SCALE_TILES_WIDE(blocks) * DW_SCALE_TILE_COLUMNS,
              high = DW_SCALE_TILES_HIGH(d->rows) * DW_SCALE_TILE_ROWS;
    for (int row = 0; row < high; row++)
        for (int block = row < d->rows ? blocks : 0; block < wide; block++)
            if (scale_at(s, row, block) != 0) {
                snprintf(text, bytes, "behind D's scales, at row %d, block %d, is %d, expected 0",
                         row, block, scale_at(s, row, block));
                return false;
            }
    for (int i = p->columns; i < p->pitch; i++)
        if (scales[i] != 0xff) {
            snprintf(text, bytes, "%d was written behind D's scales", scales[i]);
            return false;
        }
    return true;
}

/* Checks the sums of the squares of D's rows, each of whose n operations has an error of at most 2^-23 of the sum. */
static bool squares_are_right(const state *s, char *text, size_t bytes) {
    const region *d = &s->parts[D], *squares = &s->parts[ROW_SQUARES];
    for (int row = 0; row < d->rows; row++) {
        const double found = (double)get(squares, (size_t)row);
        double sum = 0.0;
        for (int j = 0; j < d->columns; j++) {
            const double x = (double)get(d, (size_t)row * (size_t)d->pitch + (size_t)j);
            sum += x * x;
        }
        if (fabs(found - sum) <= (d->columns + 2) * 0x1p-23 * sum) continue;
        snprintf(text, bytes, "the sum of the squares of D's row %d is %g, expected %g", row, found,
                 sum);
        return false;
    }
    return is_untouched(squares, 0, text, bytes);
}

static bool agrees(const dw__trial *t, char *text, size_t bytes) {
    const state *s = t->state;
    const region *d = &s->parts[D];
    if (dw__gemm_has_blocks_d(&s->call))
        return blocks_are_right(s, D, text, bytes) &&
               (!s->given.turned_d || blocks_are_right(s, TURNED_D, text, bytes)) &&
               (!s->given.plain_d || plain_is_right(s, text, bytes));
    for (int row = 0; row < d->rows; row++) {
        for (int block = 0; block * BLOCK < d->columns; block++)
            if (!block_is_right(s, row, block, text, bytes)) return false;
        if (!is_untouched(d, row, text, bytes)) return false;
    }
    if (s->given.row_squares && !squares_are_right(s, text, bytes)) return false;
    return d->type != CODES || scales_end(s, text, bytes);
}

const dw__first_use dw__gemm_first_use = {
    .against = "the reference",
    .count = 1,
    .failure_refuses = true,
    .state_bytes = sizeof(state),
    .prepare = prepare,
    .agrees = agrees,
};
