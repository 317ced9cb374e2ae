/* Block quantization, and GEMMs of its results, through the library's calls on emulated GPUs. Codes must equal
 * src/number's bit for bit, and GEMMs are compared with sums in double. */
#ifndef DW_LIBRARY_QUANTIZED_GEMM_H
#define DW_LIBRARY_QUANTIZED_GEMM_H

#include "deepwell/quantize.h"
#include "emulated_call.h"
#include "emulated_gemm_call.h"
#include "kernel/cuda/gpu_gemm.h"
#include "kernel/cuda/gpu_quantize.h"
#include <math.h>

/* ---- quantization ---------------------------------------------------------------------------------- */

static inline int ceil_divide(int a, int b) { return (a + b - 1) / b; }

/* The options of a matrix's quantization. */
typedef struct recipe {
    dw_scheme scheme;
    dw_dtype dtype;
    dw_scale_rule rule;
    bool square, rows_alone;
} recipe;

/* Codes [outer, inner] of a matrix and their scales. The matrix may have several parts, one after the other, each with
 * its own scales. */
typedef struct codes {
    matrix matrix;
    size_t scale_bytes;
    uint8_t *scales;
    void *device_scales;
} codes;

static inline matrix_type source_type(dw_dtype type) {
    return type == DW_F32 ? MATRIX_F32 : type == DW_F16 ? MATRIX_F16 : MATRIX_BF16;
}
static inline matrix_type code_type(dw_scheme scheme) {
    return scheme == DW_SCHEME_MXFP8        ? MATRIX_E4M3
           : scheme == DW_SCHEME_MXFP8_E5M2 ? MATRIX_E5M2
                                            : MATRIX_E2M1;
}
static inline int block_of(dw_scheme scheme) { return scheme == DW_SCHEME_NVFP4 ? 16 : 32; }

static inline void place_codes(codes *c, const dw_device *device, const recipe *how, int outer,
                               int inner, int parts) {
    place(&c->matrix, device, parts * outer, inner, code_type(how->scheme));
    send(&c->matrix, device);
    c->scale_bytes = (size_t)parts * (size_t)dw_scales_swizzled_bytes(
                                         outer, ceil_divide(inner, block_of(how->scheme)));
    c->scales = malloc(c->scale_bytes + 1);
    assert_non_null(c->scales);
    memset(c->scales, 0xFF, c->scale_bytes);
    assert_int_equal(dw_device_allocate(device, c->scale_bytes, &c->device_scales), DW_OK);
    if (c->scale_bytes > 0)
        assert_int_equal(device->copy_in(c->device_scales, c->scales, c->scale_bytes, NULL), DW_OK);
}
static inline void fetch_codes(codes *c, const dw_device *device) {
    fetch(&c->matrix, device);
    if (c->scale_bytes > 0)
        assert_int_equal(device->copy_out(c->scales, c->device_scales, c->scale_bytes, NULL),
                         DW_OK);
}
static inline void remove_codes(codes *c, const dw_device *device) {
    take_away(&c->matrix, device);
    dw_device_release(device, c->device_scales, c->scale_bytes);
    free(c->scales);
}

typedef struct operand {
    recipe how;
    int parts;
    matrix source;
    codes along[2]; /* by axis */
    float *factors; /* on the device: for each part the tensor scale, then its amax */
    float tensor_scale;
    double *values; /* values of the codes along rows, without the tensor scale */
} operand;

static inline dw_quantize call_of(const operand *o, const dw_device *device, int part) {
    const int rows = o->source.rows / o->parts;
    const size_t width = (size_t)bits_of(o->source.type) / 8;
    const bool nvfp4 = o->how.scheme == DW_SCHEME_NVFP4;
    dw_quantize call = {
        .struct_size = sizeof call,
        .device = device,
        .dtype = o->how.dtype,
        .scheme = o->how.scheme,
        .scale_rule = o->how.rule,
        .square = o->how.square,
        .rows = rows,
        .cols = o->source.columns,
        .source = (char *)o->source.device + (size_t)(part * rows) * o->source.pitch,
        .row_stride = (int64_t)(o->source.pitch / width),
        .tensor_scale = nvfp4 ? o->factors : NULL,
        /* All parts share the first one's scale. */
        .amax = nvfp4 && part == 0 ? o->factors + 1 : NULL,
    };
    dw_quantized_matrix *to[] = {&call.along_cols, &call.along_rows};
    for (int axis = 0; axis < 2; axis++) {
        const codes *c = &o->along[axis];
        *to[axis] = (dw_quantized_matrix){
            .wanted = axis == 1 || !o->how.rows_alone,
            .codes =
                (char *)c->matrix.device + (axis ? (size_t)(part * rows) * c->matrix.pitch : 0),
            .stride = (int64_t)c->matrix.pitch,
            .scales = (char *)c->device_scales +
                      (axis ? (size_t)part * c->scale_bytes / (size_t)o->parts : 0)};
    }
    return call;
}

/* Checks that every byte of codes and scales along an axis equals src/number's; along columns only the last part is
 * checked. */
static inline void expect_exact(const operand *o, const codes *c, int axis, const float *numbers) {
    const int parts = axis ? o->parts : 1, rows = o->source.rows / o->parts;
    dw_block_options options = DW_BLOCK_OPTIONS_DEFAULT;
    dw_block_layout layout;
    options.scheme = o->how.scheme;
    options.scale_rule = o->how.rule;
    options.square = o->how.square;
    options.axis = axis;
    options.tensor_scale = o->tensor_scale;
    assert_int_equal(dw_block_layout_of(&options, rows, o->source.columns, &layout), DW_OK);
    uint8_t *expected = malloc(c->matrix.bytes + 1), *scales = malloc(layout.scale_bytes + 1),
            *ordered = malloc(c->scale_bytes + 1);
    assert_true(expected && scales && ordered);
    memset(expected, 0xFF, c->matrix.bytes);
    for (int part = 0; part < parts; part++) {
        const int first = (axis ? part : o->parts - 1) * rows;
        assert_int_equal(dw_block_quantize(&options, rows, o->source.columns,
                                           numbers + first * o->source.columns, o->source.columns,
                                           expected + (axis ? (size_t)first * c->matrix.pitch : 0),
                                           (int64_t)c->matrix.pitch, scales),
                         DW_OK);
        assert_int_equal(dw_scales_swizzle(layout.outer, layout.scale_cols,
                                           o->how.square ? layout.block : 1, scales,
                                           ordered + (size_t)part * c->scale_bytes / (size_t)parts),
                         DW_OK);
    }
    if (memcmp(c->matrix.host, expected, c->matrix.bytes) != 0)
        fail_msg("codes of %s along axis %d differ", dw_scheme_name(o->how.scheme), axis);
    if (memcmp(c->scales, ordered, c->scale_bytes) != 0)
        fail_msg("scales of %s along axis %d differ", dw_scheme_name(o->how.scheme), axis);
    free(expected);
    free(scales);
    free(ordered);
}

/* Computes the values of a part's codes in host memory. */
static inline void find_values(const codes *c, dw_scheme scheme, int parts, double *values) {
    const int rows = c->matrix.rows / parts, k = c->matrix.columns, block = block_of(scheme),
              wide = ceil_divide(k, block);
    const dw_dtype format = scheme == DW_SCHEME_NVFP4 ? DW_UE4M3 : DW_E8M0;
    uint8_t *scales = malloc((size_t)rows * (size_t)wide + 1);
    assert_non_null(scales);
    for (int part = 0; part < parts; part++) {
        assert_int_equal(
            dw_scales_unswizzle(rows, wide, 1,
                                c->scales + (size_t)part * c->scale_bytes / (size_t)parts, scales),
            DW_OK);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < k; j++)
                values[(size_t)(part * rows + i) * (size_t)k + (size_t)j] =
                    (double)get(&c->matrix, part * rows + i, j) *
                    (double)dw__decode_one(format, scales[i * wide + j / block]);
    }
    free(scales);
}

/* Makes a random matrix, each 32 x 32 block with its own magnitude, and its codes from the library's call. */
static inline void open_operand(operand *o, const dw_device *device, const recipe *how, int rows,
                                int columns, int parts, uint64_t *state) {
    const size_t count = (size_t)(parts * rows) * (size_t)columns;
    *o = (operand){.how = *how, .parts = parts, .tensor_scale = 1};
    place(&o->source, device, parts * rows, columns, source_type(how->dtype));
    float *numbers = malloc(count * sizeof *numbers + 1);
    o->values = malloc(count * sizeof *o->values + 1);
    assert_true(numbers && o->values);
    for (int i = 0; i < parts * rows; i++)
        for (int j = 0; j < columns; j++) {
            const int size = (i / 32 * 5 + j / 32 * 3) % 7;
            set(&o->source, i, j, ldexpf(random_value(state, false), -size));
            numbers[(size_t)i * (size_t)columns + (size_t)j] = get(&o->source, i, j);
        }
    send(&o->source, device);
    place_codes(&o->along[0], device, how, columns, rows, 1);
    place_codes(&o->along[1], device, how, rows, columns, parts);
    assert_int_equal(dw_device_allocate(device, 2 * sizeof(float), (void **)&o->factors), DW_OK);
    const float nothing[2] = {1, NAN};
    assert_int_equal(device->copy_in(o->factors, nothing, sizeof nothing, NULL), DW_OK);
    for (int part = 0; part < parts; part++) {
        const dw_quantize call = call_of(o, device, part);
        if (dw_quantize_run(&call) != DW_OK) fail_msg("%s", dw_last_error());
    }
    for (int axis = 0; axis < 2; axis++) fetch_codes(&o->along[axis], device);
    if (how->scheme == DW_SCHEME_NVFP4 && count > 0) {
        float found[2], amax;
        assert_int_equal(device->copy_out(found, o->factors, sizeof found, NULL), DW_OK);
        assert_int_equal(dw_amax(rows, columns, numbers, columns, &amax), DW_OK);
        assert_true(found[1] == amax && found[0] == dw_nvfp4_tensor_scale(amax));
        o->tensor_scale = found[0];
    }
    if (count > 0)
        for (int axis = how->rows_alone; axis < 2; axis++)
            expect_exact(o, &o->along[axis], axis, numbers);
    find_values(&o->along[1], how->scheme, parts, o->values);
    free(numbers);
}
static inline void close_operand(operand *o, const dw_device *device) {
    take_away(&o->source, device);
    for (int axis = 0; axis < 2; axis++) remove_codes(&o->along[axis], device);
    dw_device_release(device, o->factors, 2 * sizeof(float));
    free(o->values);
}

/* ---- GEMMs ----------------------------------------------------------------------------------------- */

typedef struct problem {
    recipe a, b;
    int m, n, k;
    dw_activation activation;
    bool bias, residual, quantized_d;
} problem;

typedef struct run {
    const dw_device *device;
    const problem *problem;
    operand a, b;
    matrix bias, residual;
    codes d;
    dw_gemm call;
} run;

static const recipe to_mxfp8 = {.scheme = DW_SCHEME_MXFP8};

/* Operands of dense and quantized GEMMs: the sums use `values` of both. */
static inline void open_run_on(const char *name, const problem *p, run *r, uint64_t seed) {
    uint64_t state = seed;
    const dw_device *device = device_named(name);
    const int parts = p->activation == DW_ACTIVATION_SWIGLU ? 2 : 1;
    *r = (run){.device = device, .problem = p};
    open_operand(&r->a, device, &p->a, p->m, p->k, 1, &state);
    open_operand(&r->b, device, &p->b, p->n, p->k, parts, &state);
    place_random(&r->bias, device, 1, parts * p->n, MATRIX_BF16, &state, false);
    place_random(&r->residual, device, p->m, p->n, MATRIX_BF16, &state, false);
    place_codes(&r->d, device, &to_mxfp8, p->m, p->n, 1);
    if (!p->quantized_d) {
        take_away(&r->d.matrix, device);
        place(&r->d.matrix, device, p->m, p->n, MATRIX_BF16);
        send(&r->d.matrix, device);
    }
    const bool nvfp4 = p->a.scheme == DW_SCHEME_NVFP4;
    r->call = (dw_gemm){
        .struct_size = sizeof r->call,
        .device = device,
        .dtype = DW_BF16,
        .output = DW_BF16,
        .m = p->m,
        .n = p->n,
        .k = p->k,
        .alpha = 0.37f,
        .activation = p->activation,
        .a = matrix_of(&r->a.along[1].matrix),
        .b = matrix_of(&r->b.along[1].matrix),
        .d = matrix_of(&r->d.matrix),
        .quantized = 1,
        .quantized_d = p->quantized_d,
        .scheme_a = p->a.scheme,
        .scheme_b = p->b.scheme,
        .scales_a = r->a.along[1].device_scales,
        .scales_b = r->b.along[1].device_scales,
        .scales_d = p->quantized_d ? r->d.device_scales : NULL,
        .factor_a = nvfp4 ? r->a.factors : NULL,
        .factor_b = nvfp4 ? r->b.factors : NULL,
    };
    if (p->bias) r->call.bias = r->bias.device;
    if (p->residual) r->call.residual = matrix_of(&r->residual);
}
static inline void close_run(run *r) {
    close_operand(&r->a, r->device);
    close_operand(&r->b, r->device);
    take_away(&r->bias, r->device);
    take_away(&r->residual, r->device);
    remove_codes(&r->d, r->device);
}

/* Products of two elements and their scales are exact in F32. Each of the k additions, and those of alpha,
 * its factors and the bias, has an error of at most 2^-23 of the sum of magnitudes, even if the accumulator is
 * truncated. */
static inline expected sum_of(const void *context, int row, int column) {
    const run *r = context;
    const int k = r->problem->k;
    const double *a = r->a.values + (size_t)row * (size_t)k,
                 *b = r->b.values + (size_t)column * (size_t)k;
    const double alpha =
        (double)r->call.alpha * (double)r->a.tensor_scale * (double)r->b.tensor_scale;
    double sum = 0, magnitude = 0;
    for (int i = 0; i < k; i++) sum += a[i] * b[i], magnitude += fabs(a[i] * b[i]);
    return (expected){alpha * sum, (k + 4) * 0x1p-23 * alpha * magnitude};
}

static inline void check(run *r) {
    const problem *p = r->problem;
    const expected_gemm gemm = {.m = p->m,
                                .n = p->n,
                                .activation = (int)p->activation,
                                .bias = p->bias ? &r->bias : NULL,
                                .residual = p->residual ? &r->residual : NULL,
                                .sum = sum_of,
                                .context = r,
                                .name = dw_scheme_name(p->a.scheme)};
    fetch_codes(&r->d, r->device);
    if (!p->quantized_d)
        check_gemm(&gemm, &r->d.matrix);
    else
        check_quantized(&gemm, &r->d.matrix,
                        &(scales_of_d){r->d.scale_bytes, r->d.scales, r->d.device_scales});
}

static inline void expect_right_on(const char *name, const problem *p, uint64_t seed) {
    run r;
    open_run_on(name, p, &r, seed);
    if (dw_gemm_supported(&r.call) != DW_OK) fail_msg("%s", dw_last_error());
    if (dw_gemm_run(&r.call) != DW_OK) fail_msg("%s", dw_last_error());
    check(&r);
    close_run(&r);
}

#define MXFP8                                                                                      \
    { DW_SCHEME_MXFP8, DW_BF16, DW_SCALE_RCEIL, false, false }
#define MXFP8_E5M2                                                                                 \
    { DW_SCHEME_MXFP8_E5M2, DW_F16, DW_SCALE_FLOOR, false, false }
#define NVFP4                                                                                      \
    { DW_SCHEME_NVFP4, DW_BF16, DW_SCALE_AMAX, false, false }
#define NVFP4_SQUARES                                                                              \
    { DW_SCHEME_NVFP4, DW_F32, DW_SCALE_DEFAULT, true, false }
#define NVFP4_ROWS                                                                                 \
    { DW_SCHEME_NVFP4, DW_F16, DW_SCALE_DEFAULT, false, true }
#define MXFP4                                                                                      \
    { DW_SCHEME_MXFP4, DW_BF16, DW_SCALE_DEFAULT, false, false }

#endif
