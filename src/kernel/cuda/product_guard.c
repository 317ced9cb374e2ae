/* The first-use guard of matrix products: before a kernel's first result is used on a GPU, one of random numbers is
 * compared with sums in double, made by the CPU. These kernels have been run on the emulator alone: what the emulator
 * took for documented and hardware does not, shows here, and nobody trains with it.
 *
 * Everything happens on a stream of its own and in memory of its own, so that it may happen inside of a caller's graph
 * capture. Inputs come from a counter-based generator: no state of the caller is touched.
 */
#include "kernel/cuda/product.h"
#include "number/half.h"
#include "number/philox.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* Three tiles of rows and two of columns, the last of each not full, on two blocks (or pairs): each takes three, so that
 * both accumulators and every stage of the ring come round again. */
enum { EXTRA_ROWS = 45, EXTRA_COLUMNS = 33, K = 165, CLUSTERS = 2, PAD = 8 };
static const float alpha = 0.75f;

typedef enum operand { A, B, BIAS, RESIDUAL, D, OPERANDS } operand;

typedef struct part {
    int rows, columns, pitch; /* pitch: elements from row to row, those behind a row are NaNs */
    dw_dtype type;
    size_t begin; /* bytes, in device memory and in `host` */
} part;

typedef struct guard {
    const dw__context *context;
    dw__product_kernel *kernel;
    dw_product call;
    part parts[OPERANDS];
    size_t bytes;
    char *device, *host;
    double
        *values[OPERANDS]; /* of what is read, row by row, without what lies behind; in one block */
    void *stream;
} guard;

/* ---- the case --------------------------------------------------------------------------------- */

static void place(guard *g, operand which, int rows, int columns, dw_dtype type) {
    const int chunk = (int)(16 / dw_dtype_bytes(type));
    const int pitch = (columns + PAD + chunk - 1) / chunk * chunk;
    g->parts[which] = (part){rows, columns, pitch, type, g->bytes};
    g->bytes += ((size_t)rows * (size_t)pitch * dw_dtype_bytes(type) + 255) / 256 * 256;
}

static void place_all(guard *g) {
    const dw__product_shape *s = &g->kernel->shape;
    const dw_dtype type = s->f16 ? DW_F16 : DW_BF16, output = s->f32_output ? DW_F32 : type;
    const int m = 2 * dw__product_tile_rows(s) + EXTRA_ROWS,
              n = dw__product_tile_columns(s) + EXTRA_COLUMNS,
              rows_b = s->activation == DW_ACTIVATION_SWIGLU ? 2 * n : n;
    g->call = (dw_product){.size = sizeof g->call,
                           .device = g->context->device,
                           .dtype = type,
                           .output = output,
                           .m = m,
                           .n = n,
                           .k = K,
                           .alpha = alpha,
                           .activation = s->activation};
    place(g, A, m, K, type);
    place(g, B, rows_b, K, type);
    place(g, BIAS, 1, rows_b, type);
    place(g, RESIDUAL, m, n, output);
    place(g, D, m, n, output);
}

static float get(const guard *g, operand which, size_t at) {
    const char *base = g->host + g->parts[which].begin;
    if (g->parts[which].type == DW_F32) return ((const float *)(const void *)base)[at];
    uint16_t half = ((const uint16_t *)(const void *)base)[at];
    return g->parts[which].type == DW_F16 ? dw__f16_to_f32(half) : dw__bf16_to_f32(half);
}

static void set(guard *g, operand which, size_t at, float value) {
    char *base = g->host + g->parts[which].begin;
    if (g->parts[which].type == DW_F32)
        ((float *)(void *)base)[at] = value;
    else
        ((uint16_t *)(void *)base)[at] =
            g->parts[which].type == DW_F16 ? dw__f32_to_f16(value) : dw__f32_to_bf16(value);
}

/* Numbers from -1 to 1; what is not written stays a NaN. */
static void fill_operands(guard *g) {
    memset(g->host, 0xff, g->bytes);
    for (operand which = A; which < D; which++) {
        const part *p = &g->parts[which];
        for (int i = 0; i < p->rows; i++)
            for (int j = 0; j < p->columns; j++) {
                size_t at = (size_t)i * (size_t)p->pitch + (size_t)j,
                       to = (size_t)i * (size_t)p->columns + (size_t)j;
                set(g, which, at, 2.0f * dw__philox_uniform(2026, which, 0, at) - 1.0f);
                g->values[which][to] = (double)get(g, which, at);
            }
    }
}

static dw_matrix matrix_of(const guard *g, operand which) {
    return (dw_matrix){g->device + g->parts[which].begin, g->parts[which].pitch};
}

static void set_pointers(guard *g) {
    const dw__product_shape *s = &g->kernel->shape;
    dw_product *c = &g->call;
    c->a = matrix_of(g, A);
    c->b = matrix_of(g, B);
    c->d = matrix_of(g, D);
    if (s->bias) c->bias = g->device + g->parts[BIAS].begin;
    if (s->residual) c->residual = matrix_of(g, RESIDUAL);
    c->stream = g->stream;
}

/* ---- what it should be -------------------------------------------------------------------------- */

typedef struct expected {
    double value, error;
} expected;

/* alpha sum + bias. Products of two elements are exact in F32; each of the K additions, and those of alpha and of the
 * bias, errs by at most 2^-23 of the sum of magnitudes, were the sum truncated. */
static expected scaled_sum(const guard *g, int row, int row_b) {
    const double *a = g->values[A] + (size_t)row * K, *b = g->values[B] + (size_t)row_b * K;
    const double bias = g->call.bias ? g->values[BIAS][row_b] : 0.0, scale = (double)alpha;
    double sum = 0.0, magnitude = 0.0;
    for (int i = 0; i < K; i++) {
        double product = a[i] * b[i];
        sum += product;
        magnitude += fabs(product);
    }
    return (expected){scale * sum + bias, (K + 2) * 0x1p-23 * (scale * magnitude + fabs(bias))};
}

/* Slopes are at most 1.13 (GELU, both) and 1.1 (SiLU); erff, the exponential and the reciprocal err by some 2^-21,
 * which the operations around them leave below 2^-19 of |x|. */
static expected activated(const guard *g, int row, int column) {
    expected x = scaled_sum(g, row, column);
    const double slope_error = 1.13 * x.error + 0x1p-19 * fabs(x.value);
    switch (g->call.activation) {
    case DW_ACTIVATION_GELU:
        return (expected){0.5 * x.value * erfc(-x.value * 0.70710678118654752), slope_error};
    case DW_ACTIVATION_GELU_TANH: {
        double inner = 0.79788456080286536 * (x.value + 0.044715 * x.value * x.value * x.value);
        return (expected){0.5 * x.value * (1.0 + tanh(inner)), slope_error};
    }
    case DW_ACTIVATION_SWIGLU: {
        expected y = scaled_sum(g, row, g->parts[D].columns + column);
        double silu = x.value / (1.0 + exp(-x.value));
        return (expected){silu * y.value,
                          slope_error * (fabs(y.value) + y.error) + fabs(silu) * y.error};
    }
    default: return x;
    }
}

/* With the sum with the residual rounded, and D. */
static expected expected_at(const guard *g, int row, int column) {
    const part *d = &g->parts[D];
    const double rounding = d->type == DW_F32 ? 0x1p-24 : d->type == DW_F16 ? 0x1p-11 : 0x1p-8;
    expected x = activated(g, row, column);
    if (g->kernel->shape.residual)
        x.value += g->values[RESIDUAL][(size_t)row * (size_t)d->columns + (size_t)column];
    x.error += (0x1p-23 + rounding) * (fabs(x.value) + x.error);
    if (d->type == DW_F16) x.error += 0x1p-25; /* subnormal */
    return x;
}

/* ---- comparing ------------------------------------------------------------------------------------ */

static void refuse(guard *g, const char *how) {
    dw__text name = {0};
    dw__jit_variant variant = dw__product_variant(&g->kernel->shape);
    (void)dw__jit_variant_name(&variant, &name);
    snprintf(g->kernel->reason, sizeof g->kernel->reason,
             "kernel %.300s %.500s; it is not used in this process, its products are computed by "
             "definition; please report this line",
             name.text ? name.text : "of a product", how);
    dw__text_free(&name);
    g->kernel->disabled = true;
}

static void compare(guard *g) {
    const part *d = &g->parts[D];
    char text[512];
    for (int i = 0; i < d->rows; i++)
        for (int j = 0; j < d->pitch; j++) {
            const size_t at = (size_t)i * (size_t)d->pitch + (size_t)j;
            const double value = (double)get(g, D, at);
            if (j >= d->columns) {
                if (isnan(value)) continue;
                snprintf(text, sizeof text, "wrote %g behind row %d of D on %.60s", value, i,
                         g->context->name);
                refuse(g, text);
                return;
            }
            expected x = expected_at(g, i, j);
            if (fabs(value - x.value) <= x.error) continue; /* a NaN is no less than anything */
            snprintf(text, sizeof text,
                     "disagrees with the reference on %.60s: D[%d][%d] of %lld x %lld x %d is %g, "
                     "expected %g within %.2g",
                     g->context->name, i, j, (long long)g->call.m, (long long)g->call.n, K, value,
                     x.value, x.error);
            refuse(g, text);
            return;
        }
}

/* ---- all of it --------------------------------------------------------------------------------------- */

static dw_status make_host(guard *g) {
    size_t count = 0, given = 0;
    for (operand which = A; which < D; which++)
        count += (size_t)g->parts[which].rows * (size_t)g->parts[which].columns;
    g->host = dw__malloc(g->bytes);
    if (!g->host) return dw__fail_memory("the comparison of a kernel", g->bytes);
    g->values[A] = dw__malloc(count * sizeof(double));
    if (!g->values[A]) return dw__fail_memory("the comparison of a kernel", count * sizeof(double));
    for (operand which = A; which < D; which++) {
        g->values[which] = g->values[A] + given;
        given += (size_t)g->parts[which].rows * (size_t)g->parts[which].columns;
    }
    return DW_OK;
}

/* A kernel that fails is refused as one that differs is: on the emulator so does whatever its checker finds. */
static dw_status run_tested(guard *g) {
    const dw_device *device = g->context->device;
    const int sm_count = CLUSTERS * dw__product_tiles[g->kernel->shape.tile].ctas;
    dw_status status = dw__product_launch(&g->call, g->context, sm_count, g->kernel);
    if (status == DW_OK) status = device->copy_out(g->host, g->device, g->bytes, g->stream);
    if (status == DW_OK) status = device->stream_synchronize(g->stream);
    if (status == DW_OK) compare(g);
    if (status == DW_OK || status == DW_OUT_OF_MEMORY) return status;
    char text[512];
    snprintf(text, sizeof text, "failed on %.60s: %.400s", g->context->name, dw_last_error());
    refuse(g, text);
    return DW_OK;
}

dw_status dw__product_guard(const dw__context *context, dw__product_kernel *kernel) {
    const dw_device *device = context->device;
    guard g = {.context = context, .kernel = kernel};
    int before = 0;
    bool relaxed = false;
    dw_status status = DW_OK;
    place_all(&g);
    DW_TRY(make_host(&g));
    fill_operands(&g);
    DW_TRY(device->capture_relax(&before));
    relaxed = true;
    DW_TRY(device->stream_create(&g.stream));
    DW_TRY(device->allocate(g.bytes, (void **)&g.device));
    set_pointers(&g);
    DW_TRY(device->copy_in(g.device, g.host, g.bytes, g.stream));
    DW_TRY(device->stream_synchronize(g.stream));
    DW_TRY(run_tested(&g));

cleanup:
    if (g.device) device->release(g.device, g.bytes);
    if (g.stream) device->stream_destroy(g.stream);
    if (relaxed) device->capture_restore(before);
    dw__free(g.values[A]);
    dw__free(g.host);
    return status == DW_OK ? DW_OK
                           : dw__fail_prefix(status, "comparing the kernel with the reference");
}
