/* The first-use guard of matrix products: before a kernel's first result is used on a GPU, one of random
 * numbers is compared with sums in double, made by the CPU. These kernels have been run on the emulator alone:
 * what the emulator took for documented and hardware does not, shows here, and nobody trains with it.
 *
 * Everything happens on a stream of its own and in memory of its own, so that it may happen inside of a
 * caller's graph capture. Inputs come from a counter-based generator: no state of the caller is touched.
 */
#include "kernel/cuda/product_guard.h"
#include "number/format.h"
#include "number/half.h"
#include "number/philox.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { PAD = 8, SEED = 2026 };

/* ---- the case --------------------------------------------------------------------------------- */

static size_t width_of(dw__guard_type type) {
    static const size_t widths[] = {2, 2, 4, 1};
    return widths[type];
}
static dw__guard_type type_of(dw_dtype type) {
    return type == DW_F32 ? DW__GUARD_F32 : type == DW_F16 ? DW__GUARD_F16 : DW__GUARD_BF16;
}

/* `units`: of a row, elements, or bytes of codes. */
static void place(dw__product_trial *t, dw__guard_part which, int rows, int columns, int units,
                  dw__guard_type type) {
    const int chunk = (int)(16 / width_of(type));
    const int pitch = (units + PAD + chunk - 1) / chunk * chunk;
    t->parts[which] = (dw__product_part){rows, columns, pitch, type, t->bytes};
    t->bytes += ((size_t)rows * (size_t)pitch * width_of(type) + 255) / 256 * 256;
}

/* Bytes of the scales of `rows` rows of so many elements, 0 where there are none. */
static int scale_bytes(bool quantized, int rows, int columns, int block) {
    return quantized ? (int)dw_scales_swizzled_bytes(rows, (columns + block - 1) / block) : 0;
}

static void place_all(dw__product_trial *t) {
    const dw_product *c = &t->call;
    const dw__guard_type type = type_of(c->dtype), operand = c->quantized ? DW__GUARD_U8 : type,
                         output = c->quantized_d ? DW__GUARD_U8 : type_of(c->output);
    const dw__product_kind kind = dw__product_kind_of(c);
    const int m = (int)c->m, n = (int)c->n, k = (int)c->k, units = (int)dw__product_row_units(c),
              rows_b = (int)dw__product_rows_b(c),
              block = kind ? DW_SCALED_BLOCK(dw__product_scheme(kind)) : 1,
              of_a = scale_bytes(c->quantized, m, k, block),
              of_b = rows_b / n * scale_bytes(c->quantized, n, k, block),
              of_d = scale_bytes(c->quantized_d, m, n, 32);
    place(t, DW__GUARD_A, m, k, units, operand);
    place(t, DW__GUARD_B, t->subject->groups * rows_b, k, units, operand);
    place(t, DW__GUARD_BIAS, 1, rows_b, rows_b, type);
    place(t, DW__GUARD_RESIDUAL, m, n, n, output);
    place(t, DW__GUARD_FACTORS, 1, 2, 2, DW__GUARD_F32);
    place(t, DW__GUARD_SCALES_A, 1, of_a, of_a, DW__GUARD_U8);
    place(t, DW__GUARD_SCALES_B, 1, of_b, of_b, DW__GUARD_U8);
    place(t, DW__GUARD_D, m, n, n, output);
    place(t, DW__GUARD_SCALES_D, 1, of_d, of_d, DW__GUARD_U8);
}

static char *host_of(const dw__product_trial *t, dw__guard_part which) {
    return t->host + t->parts[which].begin;
}

float dw__product_trial_get(const dw__product_trial *t, dw__guard_part which, size_t at) {
    const void *base = host_of(t, which);
    switch (t->parts[which].type) {
    case DW__GUARD_F32: return ((const float *)base)[at];
    case DW__GUARD_F16: return dw__f16_to_f32(((const uint16_t *)base)[at]);
    case DW__GUARD_BF16: return dw__bf16_to_f32(((const uint16_t *)base)[at]);
    default: return dw__decode_one(DW_FORMAT_E4M3, ((const unsigned char *)base)[at]);
    }
}

static void set(dw__product_trial *t, dw__guard_part which, size_t at, float value) {
    void *base = host_of(t, which);
    switch (t->parts[which].type) {
    case DW__GUARD_F32: ((float *)base)[at] = value; break;
    case DW__GUARD_F16: ((uint16_t *)base)[at] = dw__f32_to_f16(value); break;
    default: ((uint16_t *)base)[at] = dw__f32_to_bf16(value);
    }
}

/* From -1 to 1. */
static float random_number(dw__guard_part which, size_t at) {
    return 2.0f * dw__philox_uniform(SEED, which, 0, at) - 1.0f;
}

static void fill_numbers(dw__product_trial *t, dw__guard_part which) {
    const dw__product_part *p = &t->parts[which];
    for (int i = 0; i < p->rows; i++)
        for (int j = 0; j < p->columns; j++) {
            size_t at = (size_t)i * (size_t)p->pitch + (size_t)j,
                   to = (size_t)i * (size_t)p->columns + (size_t)j;
            const float number = random_number(which, at);
            /* Factors of a size at which the activation bends. */
            set(t, which, at, which == DW__GUARD_FACTORS ? 1.0f + 0.5f * number : number);
            t->values[which][to] = (double)dw__product_trial_get(t, which, at);
        }
}

/* Codes and scales of numbers from -1 to 1, each block of a size of its own, or scales in a wrong place would do no
 * harm. `parts`: of the rows, each with whole tiles of scales. */
static dw_status fill_codes(dw__product_trial *t, dw__guard_part which, dw_scheme scheme,
                            dw__guard_part scales_of, int parts) {
    enum { SIZES = 4 };
    const dw__product_part *p = &t->parts[which];
    const int64_t rows = p->rows, columns = p->columns, part_rows = rows / parts;
    const size_t count = (size_t)rows * (size_t)columns;
    dw_block_options options = DW_BLOCK_OPTIONS_DEFAULT;
    dw_block_layout layout = {0};
    dw_status status = DW_OK;
    float *numbers = NULL;
    unsigned char *codes = NULL, *scales = NULL, *ordered = (unsigned char *)host_of(t, scales_of);
    options.scheme = scheme;
    DW_TRY(dw_block_layout_of(&options, rows, columns, &layout));
    numbers = dw__malloc(count * sizeof *numbers);
    codes = dw__malloc(layout.code_bytes);
    scales = dw__malloc(layout.scale_bytes);
    if (!numbers || !codes || !scales)
        DW_TRY(dw__fail_memory("the comparison of a kernel", count * sizeof *numbers));
    for (size_t at = 0; at < count; at++) {
        const size_t block = at / (size_t)columns * (size_t)layout.scale_cols +
                             at % (size_t)columns / (size_t)layout.block;
        const int size = (int)(SIZES * dw__philox_uniform(SEED, which, 1, block));
        numbers[at] = ldexpf(random_number(which, at), -size);
    }
    DW_TRY(dw_block_quantize(&options, rows, columns, numbers, columns, codes, 0, scales));
    DW_TRY(dw_block_dequantize(&options, rows, columns, codes, 0, scales, numbers, columns));
    for (size_t at = 0; at < count; at++) t->values[which][at] = (double)numbers[at];
    for (int64_t i = 0; i < rows; i++)
        memcpy(host_of(t, which) + i * p->pitch, codes + i * layout.row_bytes,
               (size_t)layout.row_bytes);
    const int64_t part_bytes = dw_scales_swizzled_bytes(part_rows, layout.scale_cols);
    for (int part = 0; part < parts; part++)
        DW_TRY(dw_scales_swizzle(part_rows, layout.scale_cols, 1,
                                 scales + part * part_rows * layout.scale_cols,
                                 ordered + part * part_bytes));

cleanup:
    dw__free(numbers);
    dw__free(codes);
    dw__free(scales);
    return status;
}

/* What is not written stays a NaN. */
static dw_status fill_operands(dw__product_trial *t) {
    const dw_product *c = &t->call;
    memset(t->host, 0xff, t->bytes);
    fill_numbers(t, DW__GUARD_BIAS);
    fill_numbers(t, DW__GUARD_FACTORS);
    if (!c->quantized_d) fill_numbers(t, DW__GUARD_RESIDUAL);
    if (c->quantized) {
        DW_RETURN_IF_FAILED(fill_codes(t, DW__GUARD_A, c->scheme_a, DW__GUARD_SCALES_A, 1));
        return fill_codes(t, DW__GUARD_B, c->scheme_b, DW__GUARD_SCALES_B,
                          (int)(dw__product_rows_b(c) / c->n));
    }
    fill_numbers(t, DW__GUARD_A);
    fill_numbers(t, DW__GUARD_B);
    return DW_OK;
}

static void *address_of(const dw__product_trial *t, dw__guard_part which) {
    return t->device + t->parts[which].begin;
}
static dw_matrix matrix_of(const dw__product_trial *t, dw__guard_part which) {
    return (dw_matrix){address_of(t, which), t->parts[which].pitch};
}

static void set_pointers(dw__product_trial *t) {
    dw_product *c = &t->call;
    c->a = matrix_of(t, DW__GUARD_A);
    c->b = matrix_of(t, DW__GUARD_B);
    c->d = matrix_of(t, DW__GUARD_D);
    if (t->subject->bias) c->bias = address_of(t, DW__GUARD_BIAS);
    if (t->subject->residual) c->residual = matrix_of(t, DW__GUARD_RESIDUAL);
    c->scales_a = address_of(t, DW__GUARD_SCALES_A);
    c->scales_b = address_of(t, DW__GUARD_SCALES_B);
    c->scales_d = address_of(t, DW__GUARD_SCALES_D);
    c->factor_a = address_of(t, DW__GUARD_FACTORS);
    c->factor_b = c->factor_a + 1;
    c->workspace = t->workspace;
    c->workspace_bytes = t->subject->workspace_bytes;
    c->stream = t->frame.stream;
}

/* ---- all of it --------------------------------------------------------------------------------------- */

static void refuse(const dw__product_trial *t, const char *how, const char *what, char *reason) {
    const dw__product_subject *s = t->subject;
    snprintf(reason, DW__PRODUCT_REASON,
             "kernel %.300s %s on %.60s: %.400s; it is not used in this process, its products are "
             "%s; please report this line",
             s->name, how, t->context->name, what,
             s->has_reference ? "computed by definition" : "refused");
}

static dw_status make_host(dw__product_trial *t) {
    size_t count = 0, given = 0;
    for (dw__guard_part which = DW__GUARD_A; which < DW__GUARD_VALUES; which++)
        count += (size_t)t->parts[which].rows * (size_t)t->parts[which].columns;
    t->host = dw__malloc(t->bytes);
    if (!t->host) return dw__fail_memory("the comparison of a kernel", t->bytes);
    t->values[DW__GUARD_A] = dw__malloc(count * sizeof(double));
    if (!t->values[DW__GUARD_A])
        return dw__fail_memory("the comparison of a kernel", count * sizeof(double));
    for (dw__guard_part which = DW__GUARD_A; which < DW__GUARD_VALUES; which++) {
        t->values[which] = t->values[DW__GUARD_A] + given;
        given += (size_t)t->parts[which].rows * (size_t)t->parts[which].columns;
    }
    return DW_OK;
}

static dw_status run_tested(dw__product_trial *t, char *reason) {
    char text[512];
    bool failed;
    DW_RETURN_IF_FAILED(dw__guard_fetch(&t->frame,
                                        t->subject->launch(t->subject, &t->call, t->context),
                                        t->host, t->device, t->bytes, &failed));
    if (failed)
        refuse(t, "failed", dw_last_error(), reason);
    else if (!dw__product_trial_is_right(t, text, sizeof text))
        refuse(t, "disagrees with the reference", text, reason);
    return DW_OK;
}

dw_status dw__product_guard(const dw__context *context, const dw__product_subject *subject,
                            char *reason) {
    const dw_device *device = context->device;
    dw__product_trial t = {.context = context, .subject = subject, .call = subject->call};
    dw_status status = DW_OK;
    reason[0] = 0;
    t.call.size = sizeof t.call;
    t.call.device = device;
    place_all(&t);
    DW_TRY(make_host(&t));
    DW_TRY(fill_operands(&t));
    DW_TRY(dw__guard_begin(&t.frame, context));
    DW_TRY(device->allocate(t.bytes, (void **)&t.device));
    if (subject->workspace_bytes) DW_TRY(device->allocate(subject->workspace_bytes, &t.workspace));
    set_pointers(&t);
    if (t.workspace)
        DW_TRY(device->fill_on(t.workspace, 0xff, subject->workspace_bytes, t.frame.stream));
    DW_TRY(device->copy_in(t.device, t.host, t.bytes, t.frame.stream));
    DW_TRY(device->stream_synchronize(t.frame.stream));
    DW_TRY(run_tested(&t, reason));

cleanup:
    if (t.workspace) device->release(t.workspace, subject->workspace_bytes);
    if (t.device) device->release(t.device, t.bytes);
    dw__free(t.values[DW__GUARD_A]);
    dw__free(t.host);
    return dw__guard_end(&t.frame, status, "the reference");
}
