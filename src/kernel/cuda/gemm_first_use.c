/* The first-use check of GEMM: compares D of small random operands, with its epilogue, with sums in double that the CPU
 * computes. The tolerance is what rounding explains. These kernels have run on the emulator only, so this check detects
 * where hardware differs from the documentation that the emulator follows. */
#include "kernel/cuda/gpu_gemm.h"
#include "number/format.h"
#include "number/philox.h"
#include <math.h>
#include <stdio.h>

enum { PAD = 8, SEED = 2026, MOST_GROUPS = 4 };
#define CODES DW_BOOL /* codes are bytes; dw_dtype has no name for them yet */

typedef enum part {
    A,
    B,
    BIAS,
    RESIDUAL,
    FACTORS, /* factors of A and of B */
    SCALES_A,
    SCALES_B,
    D,
    SCALES_D,
    PARTS,
    VALUES = SCALES_A /* the parts before it have numbers in `values` */
} part;

typedef struct region {
    int rows, columns;
    /* from row to row, in elements or bytes of codes; the padding of a row is NaNs, bytes of 0xFF */
    int pitch;
    dw_dtype type; /* CODES: bytes; codes of D are E4M3 */
    size_t begin;  /* offset in bytes, in device memory and in `host` */
} region;

typedef struct state {
    dw__gemm_case given;
    dw_gemm call;
    dw_grouped_gemm groups;
    void *group_a[MOST_GROUPS], *group_b[MOST_GROUPS], *group_d[MOST_GROUPS];
    region parts[PARTS];
    /* Operands as numbers, row by row without padding, in one block of memory. */
    double *values[VALUES];
    char *host; /* host memory of the trial */
} state;

/* ---- layout ------------------------------------------------------------------------------------- */

/* `units`: the length of a row in elements or bytes of codes. */
static void place_part(dw__trial *t, part which, int rows, int columns, int units, dw_dtype type) {
    state *s = t->state;
    const int chunk = 16 / (int)dw_dtype_bytes(type);
    const int pitch = (units + PAD + chunk - 1) / chunk * chunk;
    const size_t begin = dw__trial_place(t, (size_t)rows * (size_t)pitch * dw_dtype_bytes(type));
    s->parts[which] = (region){rows, columns, pitch, type, begin};
}

/* Returns the bytes of the scales for `rows` rows of `columns` elements; 0 if the operand has no scales. */
static int scale_bytes(bool quantized, int rows, int columns, int block) {
    return quantized ? (int)dw_scales_swizzled_bytes(rows, (columns + block - 1) / block) : 0;
}

static void place_parts(dw__trial *t) {
    const state *s = t->state;
    const dw_gemm *c = &s->call;
    const dw_dtype type = c->dtype, operand = c->quantized ? CODES : type,
                   output = c->quantized_d ? CODES : c->output;
    const int m = (int)c->m, n = (int)c->n, k = (int)c->k, units = (int)dw__gemm_row_units(c),
              rows_b = (int)dw__gemm_rows_b(c),
              block = c->quantized ? dw_scheme_describe(c->scheme_a)->block : 1,
              of_a = scale_bytes(c->quantized, m, k, block),
              of_b = rows_b / n * scale_bytes(c->quantized, n, k, block),
              of_d = scale_bytes(c->quantized_d, m, n, 32);
    place_part(t, A, m, k, units, operand);
    place_part(t, B, s->given.groups * rows_b, k, units, operand);
    place_part(t, BIAS, 1, rows_b, rows_b, type);
    place_part(t, RESIDUAL, m, n, n, output);
    place_part(t, FACTORS, 1, 2, 2, DW_F32);
    place_part(t, SCALES_A, 1, of_a, of_a, CODES);
    place_part(t, SCALES_B, 1, of_b, of_b, CODES);
    place_part(t, D, m, n, n, output);
    place_part(t, SCALES_D, 1, of_d, of_d, CODES);
}

/* Pointers are set only once memory exists; the size of the workspace does not depend on them. */
static void set_groups(state *s) {
    const dw_gemm *c = &s->call;
    int64_t before = 0;
    s->groups = (dw_grouped_gemm){.alpha = c->alpha,
                                  .groups = s->given.groups,
                                  .n = c->n,
                                  .k = c->k,
                                  .m = s->given.rows,
                                  .stride_a = c->a.stride,
                                  .stride_b = c->b.stride,
                                  .stride_d = c->d.stride,
                                  .workspace = c->workspace,
                                  .workspace_bytes = c->workspace_bytes,
                                  .stream = c->stream};
    if (!c->a.data) return;
    for (int g = 0; g < s->given.groups; before += s->given.rows[g++]) {
        s->group_a[g] = (uint16_t *)c->a.data + before * c->a.stride;
        s->group_b[g] = (uint16_t *)c->b.data + g * c->n * c->b.stride;
        s->group_d[g] = (uint16_t *)c->d.data + before * c->d.stride;
    }
    s->groups.a = s->group_a, s->groups.b = s->group_b, s->groups.d = s->group_d;
}

/* Sets up the call of the kernel under test. */
static const void *call_of(state *s) {
    if (s->given.groups == 1) return &s->call;
    set_groups(s);
    return &s->groups;
}

static dw_status place(dw__trial *t) {
    const dw__kernel *kernel = t->variant->kernel;
    state *s = t->state;
    size_t workspace = 0;
    s->given =
        kernel->provided ? dw__gemm_cutlass_case_of(t->variant) : dw__gemm_case_of(t->variant);
    s->call = s->given.call;
    s->call.struct_size = sizeof s->call;
    s->call.device = t->context.device;
    t->context.sm_count = s->given.sm_count;
    t->consequence = s->given.has_reference ? ", its GEMMs are computed by definition"
                                            : ", its GEMMs are refused";
    place_parts(t);
    t->host_bytes = t->bytes;
    if (kernel->workspace_bytes)
        DW_RETURN_IF_FAILED(kernel->workspace_bytes(kernel, call_of(s), &t->context, &workspace));
    s->call.workspace_bytes = workspace;
    (void)dw__trial_place(t, workspace);
    return DW_OK;
}

/* ---- operands ----------------------------------------------------------------------------------- */

static char *host_of(const state *s, part which) { return s->host + s->parts[which].begin; }

static float get(const state *s, part which, size_t at) {
    const region *p = &s->parts[which];
    const void *base = host_of(s, which);
    return p->type == CODES ? dw__decode_one(DW_E4M3, ((const unsigned char *)base)[at])
                            : dw__trial_get(base, p->type, at);
}

/* Returns a random number from -1 to 1. */
static float random_number(part which, size_t at) {
    return 2.0f * dw__philox_uniform(SEED, which, 0, at) - 1.0f;
}

static void fill_numbers(state *s, part which) {
    const region *p = &s->parts[which];
    for (int i = 0; i < p->rows; i++)
        for (int j = 0; j < p->columns; j++) {
            size_t at = (size_t)i * (size_t)p->pitch + (size_t)j,
                   to = (size_t)i * (size_t)p->columns + (size_t)j;
            const float number = random_number(which, at);
            /* Returns factors for which the activation is not linear. */
            dw__trial_set(host_of(s, which), p->type, at,
                          which == FACTORS ? 1.0f + 0.5f * number : number);
            s->values[which][to] = (double)get(s, which, at);
        }
}

/* Makes codes and scales of numbers from -1 to 1. Each block has its own magnitude, so that a scale at a wrong place
 * changes the result. The rows have `parts` parts, each with whole tiles of scales. */
static dw_status fill_codes(state *s, part which, dw_scheme scheme, part scales_of, int parts) {
    enum { SIZES = 4 };
    const region *p = &s->parts[which];
    const int64_t rows = p->rows, columns = p->columns, part_rows = rows / parts;
    const size_t count = (size_t)rows * (size_t)columns;
    dw_block_options options = DW_BLOCK_OPTIONS_DEFAULT;
    dw_block_layout layout = {0};
    dw_status status = DW_OK;
    float *numbers = NULL;
    unsigned char *codes = NULL, *scales = NULL, *ordered = (unsigned char *)host_of(s, scales_of);
    options.scheme = scheme;
    DW_TRY(dw_block_layout_of(&options, rows, columns, &layout));
    numbers = dw__malloc(count * sizeof *numbers);
    codes = dw__malloc(layout.code_bytes);
    scales = dw__malloc(layout.scale_bytes);
    if (!numbers || !codes || !scales)
        DW_TRY(dw__fail_memory("the first-use check of a kernel", count * sizeof *numbers));
    for (size_t at = 0; at < count; at++) {
        const size_t block = at / (size_t)columns * (size_t)layout.scale_cols +
                             at % (size_t)columns / (size_t)layout.block;
        const int size = (int)(SIZES * dw__philox_uniform(SEED, which, 1, block));
        numbers[at] = ldexpf(random_number(which, at), -size);
    }
    DW_TRY(dw_block_quantize(&options, rows, columns, numbers, columns, codes, 0, scales));
    DW_TRY(dw_block_dequantize(&options, rows, columns, codes, 0, scales, numbers, columns));
    for (size_t at = 0; at < count; at++) s->values[which][at] = (double)numbers[at];
    for (int64_t i = 0; i < rows; i++)
        memcpy(host_of(s, which) + i * p->pitch, codes + i * layout.row_bytes,
               (size_t)layout.row_bytes);
    const int64_t part_bytes = dw_scales_swizzled_bytes(part_rows, layout.scale_cols);
    for (int i = 0; i < parts; i++)
        DW_TRY(dw_scales_swizzle(part_rows, layout.scale_cols, 1,
                                 scales + i * part_rows * layout.scale_cols,
                                 ordered + i * part_bytes));

cleanup:
    dw__free(numbers);
    dw__free(codes);
    dw__free(scales);
    return status;
}

static dw_status allocate_values(state *s) {
    size_t count = 0, given = 0;
    for (part which = A; which < VALUES; which++)
        count += (size_t)s->parts[which].rows * (size_t)s->parts[which].columns;
    s->values[A] = dw__malloc(count * sizeof(double));
    if (!s->values[A])
        return dw__fail_memory("the first-use check of a kernel", count * sizeof(double));
    for (part which = A; which < VALUES; which++) {
        s->values[which] = s->values[A] + given;
        given += (size_t)s->parts[which].rows * (size_t)s->parts[which].columns;
    }
    return DW_OK;
}

static dw_status fill(dw__trial *t) {
    state *s = t->state;
    const dw_gemm *c = &s->call;
    s->host = t->host;
    DW_RETURN_IF_FAILED(allocate_values(s));
    fill_numbers(s, BIAS);
    fill_numbers(s, FACTORS);
    if (!c->quantized_d) fill_numbers(s, RESIDUAL);
    if (c->quantized) {
        DW_RETURN_IF_FAILED(fill_codes(s, A, c->scheme_a, SCALES_A, 1));
        return fill_codes(s, B, c->scheme_b, SCALES_B, (int)(dw__gemm_rows_b(c) / c->n));
    }
    fill_numbers(s, A);
    fill_numbers(s, B);
    return DW_OK;
}

static void bind(dw__trial *t) {
    state *s = t->state;
    dw_gemm *c = &s->call;
    void *at[PARTS];
    for (part which = A; which < PARTS; which++) at[which] = t->device + s->parts[which].begin;
    c->a = (dw_matrix){at[A], s->parts[A].pitch};
    c->b = (dw_matrix){at[B], s->parts[B].pitch};
    c->d = (dw_matrix){at[D], s->parts[D].pitch};
    if (s->given.bias) c->bias = at[BIAS];
    if (s->given.residual) c->residual = (dw_matrix){at[RESIDUAL], s->parts[RESIDUAL].pitch};
    c->scales_a = at[SCALES_A];
    c->scales_b = at[SCALES_B];
    c->scales_d = at[SCALES_D];
    c->factor_a = at[FACTORS];
    c->factor_b = c->factor_a + 1;
    c->workspace = c->workspace_bytes > 0 ? t->device + t->host_bytes : NULL;
    c->stream = t->stream;
    t->call = call_of(s);
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
    const double *a = s->values[A] + (size_t)row * (size_t)k,
                 *b = s->values[B] + (size_t)row_b * (size_t)k, *factors = s->values[FACTORS];
    const double bias = s->call.bias ? s->values[BIAS][row_b] : 0.0,
                 scale =
                     (double)s->call.alpha * (s->call.quantized ? factors[0] * factors[1] : 1.0);
    double sum = 0.0, magnitude = 0.0;
    for (int i = 0; i < k; i++) {
        double product = a[i] * b[i];
        sum += product;
        magnitude += fabs(product);
    }
    const int operations = k + (s->call.quantized ? 4 : 2);
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
 * the reciprocal have errors of about 2^-21, which the surrounding operations keep below 2^-19 of |x|. */
static expected activated(const state *s, int row, int column) {
    const int row_b = first_row_b(s, row) + column;
    expected x = scaled_sum(s, row, row_b);
    const double slope_error = 1.13 * x.error + 0x1p-19 * fabs(x.value);
    switch (s->call.activation) {
    case DW_ACTIVATION_GELU:
        return (expected){0.5 * x.value * erfc(-x.value * 0.70710678118654752), slope_error};
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

/* Adds the roundings of the sum with the residual, and of D. */
static expected expected_at(const state *s, int row, int column) {
    const region *d = &s->parts[D];
    const double rounding = d->type == DW_F32 ? 0x1p-24 : d->type == DW_F16 ? 0x1p-11 : 0x1p-8;
    expected x = activated(s, row, column);
    if (s->given.residual)
        x.value += s->values[RESIDUAL][(size_t)row * (size_t)d->columns + (size_t)column];
    x.error += (0x1p-23 + rounding) * (fabs(x.value) + x.error);
    if (d->type == DW_F16) x.error += 0x1p-25; /* subnormal */
    return x;
}

/* ---- numbers ---------------------------------------------------------------------------------------- */

static bool is_untouched(const state *s, int row, char *text, size_t bytes) {
    const region *d = &s->parts[D];
    for (int j = d->columns; j < d->pitch; j++) {
        float value = get(s, D, (size_t)row * (size_t)d->pitch + (size_t)j);
        if (isnan(value)) continue;
        snprintf(text, bytes, "%g was written behind row %d of D", (double)value, row);
        return false;
    }
    return true;
}

static bool row_is_right(const state *s, int row, char *text, size_t bytes) {
    const region *d = &s->parts[D];
    for (int j = 0; j < d->columns; j++) {
        const size_t at = (size_t)row * (size_t)d->pitch + (size_t)j;
        const double value = (double)get(s, D, at);
        const expected x = expected_at(s, row, j);
        if (fabs(value - x.value) <= x.error) continue; /* a NaN is not smaller than any bound */
        snprintf(text, bytes, "D[%d][%d] of %lld x %lld x %lld is %g, expected %g within %.2g", row,
                 j, (long long)s->call.m, (long long)s->call.n, (long long)s->call.k, value,
                 x.value, x.error);
        return false;
    }
    return true;
}

/* ---- codes and scales ------------------------------------------------------------------------------- */

enum { BLOCK = 32 };

/* Returns the code of the scale by the rule RCEIL for a block whose largest magnitude is `most`. */
static int scale_for(double most) {
    const dw_block_options options = DW_BLOCK_OPTIONS_DEFAULT;
    const float value = (float)most;
    unsigned char code, scale = 0;
    (void)dw_block_quantize(&options, 1, 1, &value, 1, &code, 0, &scale); /* does not allocate */
    return scale;
}

static float number_for(double x, int scale) {
    return dw__decode_one(DW_E4M3, dw__encode_one(DW_E4M3, (float)ldexp(x, 127 - scale),
                                                  DW_OVERFLOW_SATURATE, DW_ROUND_NEAREST, 0));
}

/* Checks D's codes. The kernel quantizes numbers that lie within `error` of the exact values. Scales and codes grow
 * with the numbers, so they must lie between those of the two ends of each interval. An element is compared with the
 * scale that the kernel stored. */
static bool block_is_right(const state *s, int row, int block, int scale, char *text,
                           size_t bytes) {
    const region *d = &s->parts[D];
    const int first = block * BLOCK,
              count = d->columns - first < BLOCK ? d->columns - first : BLOCK;
    expected x[BLOCK];
    double least = 0.0, most = 0.0;
    for (int j = 0; j < count; j++) {
        x[j] = activated(s, row, first + j);
        /* the ends are rounded to F32, too */
        x[j].error += 0x1p-22 * (fabs(x[j].value) + x[j].error);
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
        const float value = get(s, D, (size_t)row * (size_t)d->pitch + (size_t)(first + j));
        if (value >= number_for(x[j].value - x[j].error, scale) &&
            value <= number_for(x[j].value + x[j].error, scale))
            continue;
        snprintf(text, bytes,
                 "D[%d][%d] of %lld x %lld x %lld is %g by a scale of %d, not the code of %g "
                 "within %.2g",
                 row, first + j, (long long)s->call.m, (long long)s->call.n, (long long)s->call.k,
                 (double)value, scale, x[j].value, x[j].error);
        return false;
    }
    return true;
}

static bool quantized_is_right(const state *s, char *text, size_t bytes) {
    const region *d = &s->parts[D];
    const unsigned char *scales = (const unsigned char *)s->host + s->parts[SCALES_D].begin;
    const int blocks = (d->columns + BLOCK - 1) / BLOCK, wide = DW_SCALE_TILES_WIDE(blocks),
              high = DW_SCALE_TILES_HIGH(d->rows);
    for (int row = 0; row < high * DW_SCALE_TILE_ROWS; row++)
        for (int block = 0; block < wide * DW_SCALE_TILE_COLUMNS; block++) {
            const int scale = scales[DW_SCALE_OFFSET(row, block, wide)];
            if (row < d->rows && block < blocks) {
                if (!block_is_right(s, row, block, scale, text, bytes)) return false;
            } else if (scale != 0) {
                snprintf(text, bytes, "behind D's scales, at row %d, block %d, is %d, expected 0",
                         row, block, scale);
                return false;
            }
        }
    const region *p = &s->parts[SCALES_D];
    for (int i = p->columns; i < p->pitch; i++)
        if (scales[i] != 0xff) {
            snprintf(text, bytes, "%d was written behind D's scales", scales[i]);
            return false;
        }
    return true;
}

static bool agrees(const dw__trial *t, char *text, size_t bytes) {
    const state *s = t->state;
    if (s->call.quantized_d && !quantized_is_right(s, text, bytes)) return false;
    for (int i = 0; i < s->parts[D].rows; i++) {
        if (!s->call.quantized_d && !row_is_right(s, i, text, bytes)) return false;
        if (!is_untouched(s, i, text, bytes)) return false;
    }
    return true;
}

static void release(dw__trial *t) { dw__free(((state *)t->state)->values[A]); }

const dw__first_use dw__gemm_first_use = {
    .against = "the reference",
    .count = 1,
    .failure_refuses = true,
    .state_bytes = sizeof(state),
    .place = place,
    .fill = fill,
    .bind = bind,
    .agrees = agrees,
    .release = release,
};
