/* Checks the members of a GEMM call before anything is launched. */
#include "kernel/cuda/gpu_gemm.h"
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* TMA counts rows and columns in 31 bits, and tiles may extend beyond the last row. */
static const int64_t most_size = (int64_t)1 << 30;
static const int64_t most_stride_bytes = ((int64_t)1 << 40) - 16;

const char *dw__gemm_describe(const void *call, char *text, size_t bytes) {
    const dw_gemm *c = call;
    static const char *const activations[] = {"", ", gelu", ", gelu by tanh", ", swiglu"};
    const char *to = c->quantized_d ? dw_scheme_name(DW_SCHEME_MXFP8) : dw_dtype_name(c->output);
    char operands[96];
    if (c->quantized)
        snprintf(operands, sizeof operands, "%s x %s to %s", dw_scheme_name(c->scheme_a),
                 dw_scheme_name(c->scheme_b), to);
    else if (c->quantized_d || c->output == DW_F32)
        snprintf(operands, sizeof operands, "%s to %s", dw_dtype_name(c->dtype), to);
    else
        snprintf(operands, sizeof operands, "%s", dw_dtype_name(c->dtype));
    snprintf(text, bytes, "m %lld, n %lld, k %lld, %s%s%s%s", (long long)c->m, (long long)c->n,
             (long long)c->k, operands, c->bias ? ", bias" : "", activations[c->activation],
             c->residual.data ? ", residual" : "");
    return text;
}

int64_t dw__gemm_row_units(const dw_gemm *c) {
    return c->quantized ? dw_tensor_bytes(dw_scheme_describe(c->scheme_a)->element, 1, &c->k)
                        : c->k;
}

dw_status dw__gemm_read(const dw_gemm *given, dw_gemm *call) {
    static const dw__struct known = {
        "dw_gemm", sizeof *call, {offsetof(dw_gemm, quantized), offsetof(dw_gemm, kernel)}};
    return dw__struct_read(&known, given, call);
}

/* ---- checks ---------------------------------------------------------------------------------------- */

static dw_status check_sizes(const dw_gemm *c) {
    const bool swiglu = c->activation == DW_ACTIVATION_SWIGLU;
    const struct {
        const char *name;
        int64_t value, most;
    } sizes[] = {{"m", c->m, most_size},
                 {"n", c->n, swiglu ? most_size / 2 : most_size},
                 {"k", c->k, most_size}};
    for (size_t i = 0; i < DW_COUNT(sizes); i++)
        if (sizes[i].value < 0 || sizes[i].value > sizes[i].most)
            return dw__fail(DW_SHAPE, "GEMM: %s is %lld; expected 0 to %lld", sizes[i].name,
                            (long long)sizes[i].value, (long long)sizes[i].most);
    int64_t tiles = ((c->m + 127) / 128) * ((dw__gemm_rows_b(c) + 63) / 64);
    if (tiles > most_size)
        return dw__fail(DW_UNSUPPORTED,
                        "GEMM: m is %lld and n is %lld: %lld tiles of 128 x 64, more than %lld; "
                        "split the rows of A",
                        (long long)c->m, (long long)c->n, (long long)tiles, (long long)most_size);
    return DW_OK;
}

static dw_status check_types(const dw_gemm *c) {
    if (c->dtype != DW_BF16 && c->dtype != DW_F16)
        return dw__fail(DW_TYPE, "GEMM: the element type is %s; expected bf16 or f16",
                        dw_dtype_name(c->dtype));
    if (!c->quantized_d && c->output != c->dtype && c->output != DW_F32)
        return dw__fail(DW_TYPE, "GEMM: D's element type is %s; expected %s or f32",
                        dw_dtype_name(c->output), dw_dtype_name(c->dtype));
    if ((int)c->activation < 0 || c->activation >= DW_ACTIVATION_COUNT)
        return dw__fail(DW_INVALID_ARGUMENT, "GEMM: the activation is %d; expected 0 to %d",
                        (int)c->activation, DW_ACTIVATION_COUNT - 1);
    if (!isfinite(c->alpha))
        return dw__fail(DW_INVALID_ARGUMENT, "GEMM: alpha is %g; expected a finite number",
                        (double)c->alpha);
    return DW_OK;
}

static bool is_mxfp8(dw_scheme scheme) {
    return scheme == DW_SCHEME_MXFP8 || scheme == DW_SCHEME_MXFP8_E5M2;
}

static dw_status check_schemes(const dw_gemm *c) {
    if (c->quantized_d && c->residual.data)
        return dw__fail(DW_UNSUPPORTED,
                        "GEMM: D is quantized, and there is a residual, which no kernel adds "
                        "then; expected none");
    if (!c->quantized) return DW_OK;
    if (is_mxfp8(c->scheme_a) && is_mxfp8(c->scheme_b)) return DW_OK;
    if (c->scheme_a == c->scheme_b &&
        (c->scheme_a == DW_SCHEME_NVFP4 || c->scheme_a == DW_SCHEME_MXFP4))
        return DW_OK;
    return dw__fail(DW_UNSUPPORTED,
                    "GEMM: A is %s and B is %s; expected mxfp8 or mxfp8-e5m2 for each, or "
                    "nvfp4 or mxfp4 for both",
                    dw_scheme_name(c->scheme_a), dw_scheme_name(c->scheme_b));
}

/* Checks that `what` is in device memory at a multiple of `alignment` bytes. */
static dw_status check_pointer(const void *at, const char *what, size_t alignment, bool needed) {
    if (needed && !at)
        return dw__fail(DW_INVALID_ARGUMENT, "GEMM: %s NULL; expected device memory", what);
    if ((uintptr_t)at % alignment == 0) return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT, "GEMM: %s at %p; expected a multiple of %zu bytes", what,
                    at, alignment);
}

/* Checks the operands and the result of a call that multiplies. */
static dw_status check_scales(const dw_gemm *c, bool launching) {
    const bool read = launching && c->k > 0;
    if (c->quantized_d)
        DW_RETURN_IF_FAILED(check_pointer(c->scales_d, "D's scales are", 16, launching));
    if (!c->quantized) return DW_OK;
    DW_RETURN_IF_FAILED(check_pointer(c->scales_a, "A's scales are", 16, read));
    DW_RETURN_IF_FAILED(check_pointer(c->scales_b, "B's scales are", 16, read));
    DW_RETURN_IF_FAILED(check_pointer(c->factor_a, "A's factor is", sizeof(float), false));
    return check_pointer(c->factor_b, "B's factor is", sizeof(float), false);
}

/* `width`: bytes of the unit of the stride; a row has `columns` of these units. */
static dw_status check_matrix(const dw_matrix *x, const char *name, int64_t rows, int64_t columns,
                              size_t element, bool launching) {
    const int64_t width = (int64_t)element, most = most_stride_bytes / width;
    const char *unit = width == 1 ? "bytes" : "elements";
    if (rows == 0 || columns == 0) return DW_OK; /* a matrix without elements needs no address */
    if (launching && !x->data)
        return dw__fail(DW_INVALID_ARGUMENT, "GEMM: %s is NULL; expected device memory", name);
    if ((uintptr_t)x->data % 16 != 0)
        return dw__fail(DW_UNSUPPORTED,
                        "GEMM: %s lies at %p; expected a multiple of 16 bytes; copy it to "
                        "memory of its own",
                        name, x->data);
    if (rows == 1) return DW_OK;
    if (x->stride < columns)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "GEMM: the rows of %s are %lld %s apart and %lld long; expected "
                        "contiguous rows that do not overlap (make %s contiguous)",
                        name, (long long)x->stride, unit, (long long)columns, name);
    if (x->stride * width % 16 != 0 || x->stride > most)
        return dw__fail(DW_UNSUPPORTED,
                        "GEMM: the rows of %s are %lld %s apart; expected a multiple of "
                        "%lld (16 bytes) up to %lld; pad its rows",
                        name, (long long)x->stride, unit, (long long)(16 / width), (long long)most);
    return DW_OK;
}

dw_status dw__gemm_check(const dw_gemm *c, bool launching) {
    DW_RETURN_IF_FAILED(check_types(c));
    DW_RETURN_IF_FAILED(check_schemes(c));
    DW_RETURN_IF_FAILED(check_sizes(c));
    if (dw__gemm_is_empty(c)) return DW_OK;
    const int64_t units = dw__gemm_row_units(c);
    const size_t width = c->quantized ? 1 : dw_dtype_bytes(c->dtype),
                 width_d = c->quantized_d ? 1 : dw_dtype_bytes(c->output);
    DW_RETURN_IF_FAILED(check_matrix(&c->a, "A", c->m, units, width, launching));
    DW_RETURN_IF_FAILED(check_matrix(&c->b, "B", dw__gemm_rows_b(c), units, width, launching));
    DW_RETURN_IF_FAILED(check_matrix(&c->d, "D", c->m, c->n, width_d, launching));
    if (c->residual.data)
        DW_RETURN_IF_FAILED(
            check_matrix(&c->residual, "the residual", c->m, c->n, width_d, launching));
    DW_RETURN_IF_FAILED(check_pointer(c->bias, "the bias lies", dw_dtype_bytes(c->dtype), false));
    return check_scales(c, launching);
}
