/* Whether a call of a matrix product makes sense: every member, before anything is launched. */
#include "kernel/cuda/product.h"
#include <math.h>
#include <stdio.h>

/* The copy engine counts rows and columns in 31 bits, and tiles end beyond the last. */
static const int64_t most_size = (int64_t)1 << 30;
static const int64_t most_stride_bytes = ((int64_t)1 << 40) - 16;

const char *dw__product_describe(const dw_product *c, char *text, size_t bytes) {
    static const char *const activations[] = {"", ", gelu", ", gelu by tanh", ", swiglu"};
    snprintf(text, bytes, "m %lld, n %lld, k %lld, %s%s%s%s%s", (long long)c->m, (long long)c->n,
             (long long)c->k, dw_dtype_name(c->dtype), c->output == DW_F32 ? " to f32" : "",
             c->bias ? ", bias" : "", activations[c->activation],
             c->residual.data ? ", residual" : "");
    return text;
}

static dw_status check_sizes(const dw_product *c) {
    const bool swiglu = c->activation == DW_ACTIVATION_SWIGLU;
    const struct {
        const char *name;
        int64_t value, most;
    } sizes[] = {{"m", c->m, most_size},
                 {"n", c->n, swiglu ? most_size / 2 : most_size},
                 {"k", c->k, most_size}};
    for (size_t i = 0; i < DW_COUNT(sizes); i++)
        if (sizes[i].value < 0 || sizes[i].value > sizes[i].most)
            return dw__fail(DW_SHAPE, "product: %s is %lld; expected 0 to %lld", sizes[i].name,
                            (long long)sizes[i].value, (long long)sizes[i].most);
    int64_t tiles = ((c->m + 127) / 128) * ((dw__product_rows_b(c) + 63) / 64);
    if (tiles > most_size)
        return dw__fail(DW_UNSUPPORTED,
                        "product: m is %lld and n is %lld: %lld tiles of 128 x 64, more than %lld; "
                        "split the rows of A",
                        (long long)c->m, (long long)c->n, (long long)tiles, (long long)most_size);
    return DW_OK;
}

static dw_status check_types(const dw_product *c) {
    if (c->dtype != DW_BF16 && c->dtype != DW_F16)
        return dw__fail(DW_TYPE, "product: the element type is %s; expected bf16 or f16",
                        dw_dtype_name(c->dtype));
    if (c->output != c->dtype && c->output != DW_F32)
        return dw__fail(DW_TYPE, "product: D's element type is %s; expected %s or f32",
                        dw_dtype_name(c->output), dw_dtype_name(c->dtype));
    if ((int)c->activation < 0 || c->activation >= DW_ACTIVATION_COUNT)
        return dw__fail(DW_INVALID_ARGUMENT, "product: the activation is %d; expected 0 to %d",
                        (int)c->activation, DW_ACTIVATION_COUNT - 1);
    if (!isfinite(c->alpha))
        return dw__fail(DW_INVALID_ARGUMENT, "product: alpha is %g; expected a finite number",
                        (double)c->alpha);
    return DW_OK;
}

static dw_status check_matrix(const dw_matrix *x, const char *name, int64_t rows, int64_t columns,
                              dw_dtype type, bool launching) {
    const int64_t width = (int64_t)dw_dtype_bytes(type), most = most_stride_bytes / width;
    if (rows == 0 || columns == 0) return DW_OK; /* no elements, no address */
    if (launching && !x->data)
        return dw__fail(DW_INVALID_ARGUMENT, "product: %s is NULL; expected device memory", name);
    if ((uintptr_t)x->data % 16 != 0)
        return dw__fail(DW_UNSUPPORTED,
                        "product: %s lies at %p; expected a multiple of 16 bytes; copy it to "
                        "memory of its own",
                        name, x->data);
    if (rows == 1) return DW_OK;
    if (x->stride < columns)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "product: the rows of %s are %lld elements apart and %lld long; expected "
                        "contiguous rows that do not overlap (make %s contiguous)",
                        name, (long long)x->stride, (long long)columns, name);
    if (x->stride * width % 16 != 0 || x->stride > most)
        return dw__fail(DW_UNSUPPORTED,
                        "product: the rows of %s are %lld elements apart; expected a multiple of "
                        "%lld (16 bytes) up to %lld; pad its rows",
                        name, (long long)x->stride, (long long)(16 / width), (long long)most);
    return DW_OK;
}

dw_status dw__product_check(const dw_product *c, bool launching) {
    if (!c) return dw__fail(DW_INVALID_ARGUMENT, "product: the call is NULL");
    if (c->size != sizeof *c)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "product: size is %u; expected %zu: set it to sizeof(dw_product), and "
                        "build against the header of this version",
                        (unsigned)c->size, sizeof *c);
    DW_RETURN_IF_FAILED(check_types(c));
    DW_RETURN_IF_FAILED(check_sizes(c));
    if (dw__product_is_empty(c)) return DW_OK;
    DW_RETURN_IF_FAILED(check_matrix(&c->a, "A", c->m, c->k, c->dtype, launching));
    DW_RETURN_IF_FAILED(check_matrix(&c->b, "B", dw__product_rows_b(c), c->k, c->dtype, launching));
    DW_RETURN_IF_FAILED(check_matrix(&c->d, "D", c->m, c->n, c->output, launching));
    if (c->residual.data)
        DW_RETURN_IF_FAILED(
            check_matrix(&c->residual, "the residual", c->m, c->n, c->output, launching));
    if ((uintptr_t)c->bias % dw_dtype_bytes(c->dtype) != 0)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "product: the bias lies at %p; expected a multiple of %zu bytes", c->bias,
                        dw_dtype_bytes(c->dtype));
    return DW_OK;
}
