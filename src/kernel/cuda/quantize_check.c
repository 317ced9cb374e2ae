/* Whether a call of quantization in blocks makes sense: every member, before anything is launched. */
#include "common/quantize_params.h"
#include "kernel/cuda/quantize.h"
#include <stdio.h>

static const int64_t most_size = (int64_t)1 << 30, most_stride_bytes = (int64_t)1 << 40;

const char *dw__quantize_describe(const dw_quantize *c, char *text, size_t bytes) {
    snprintf(text, bytes, "%lld x %lld, %s to %s%s along %s%s%s", (long long)c->rows,
             (long long)c->cols, dw_dtype_name(c->dtype), dw_scheme_name(c->scheme),
             c->square ? " in squares" : "", c->along_rows.wanted ? "rows" : "",
             c->along_rows.wanted && c->along_cols.wanted ? " and " : "",
             c->along_cols.wanted ? "columns" : "");
    return text;
}

dw_block_options dw__quantize_options(const dw_quantize *c, int axis) {
    dw_block_options options = DW_BLOCK_OPTIONS_DEFAULT;
    options.scheme = c->scheme;
    options.scale_rule = c->scale_rule;
    options.square = c->square;
    options.axis = axis;
    return options;
}

static dw_status check_types(const dw_quantize *c) {
    const bool nvfp4 = c->scheme == DW_SCHEME_NVFP4;
    if (c->dtype != DW_BF16 && c->dtype != DW_F16 && c->dtype != DW_F32)
        return dw__fail(DW_TYPE, "quantize: the element type is %s; expected bf16, f16 or f32",
                        dw_dtype_name(c->dtype));
    if (c->scheme != DW_SCHEME_MXFP8_E4M3 && c->scheme != DW_SCHEME_MXFP8_E5M2 &&
        c->scheme != DW_SCHEME_MXFP4 && !nvfp4)
        return dw__fail(DW_UNSUPPORTED,
                        "quantize: the scheme is %s; expected mxfp8_e4m3, mxfp8_e5m2, mxfp4 or "
                        "nvfp4 (others on a CPU: dw_block_quantize)",
                        dw_scheme_name(c->scheme));
    if (c->scale_rule != DW_SCALE_DEFAULT &&
        (nvfp4 ? c->scale_rule != DW_SCALE_AMAX
               : c->scale_rule != DW_SCALE_RCEIL && c->scale_rule != DW_SCALE_FLOOR &&
                     c->scale_rule != DW_SCALE_CEIL))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "quantize: the scale rule is %d; %s takes DW_SCALE_DEFAULT, %s",
                        (int)c->scale_rule, dw_scheme_name(c->scheme),
                        nvfp4 ? "_AMAX" : "_RCEIL, _FLOOR, _CEIL");
    if (!c->along_rows.wanted && !c->along_cols.wanted)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "quantize: neither along_rows nor along_cols is wanted; set `wanted` of "
                        "one or both");
    return DW_OK;
}

static dw_status check_sizes(const dw_quantize *c) {
    const struct {
        const char *name;
        int64_t value;
    } sizes[] = {{"rows", c->rows}, {"cols", c->cols}};
    for (size_t i = 0; i < DW_COUNT(sizes); i++)
        if (sizes[i].value < 0 || sizes[i].value > most_size)
            return dw__fail(DW_SHAPE, "quantize: %s is %lld; expected 0 to %lld", sizes[i].name,
                            (long long)sizes[i].value, (long long)most_size);
    const int64_t tiles = DW_QUANTIZE_TILES(c->rows) * DW_QUANTIZE_TILES(c->cols);
    if (tiles > most_size)
        return dw__fail(DW_UNSUPPORTED,
                        "quantize: %lld x %lld are %lld tiles of 128 x 128, more than %lld; split "
                        "the rows",
                        (long long)c->rows, (long long)c->cols, (long long)tiles,
                        (long long)most_size);
    return DW_OK;
}

/* `what` in device memory, at a multiple of `alignment` bytes. */
static dw_status check_pointer(const void *at, const char *of, const char *what, size_t alignment,
                               bool needed) {
    if (needed && !at)
        return dw__fail(DW_INVALID_ARGUMENT, "quantize: %s%s is NULL; expected device memory", of,
                        what);
    if ((uintptr_t)at % alignment == 0) return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT, "quantize: %s%s is %p; expected a multiple of %zu bytes",
                    of, what, at, alignment);
}

static dw_status check_source(const dw_quantize *c, bool launching) {
    const size_t width = dw_dtype_bytes(c->dtype);
    const int64_t most = most_stride_bytes / (int64_t)width;
    DW_RETURN_IF_FAILED(check_pointer(c->source, "", "source", width, launching));
    if (c->rows == 1 || (c->row_stride >= c->cols && c->row_stride <= most)) return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT,
                    "quantize: the rows of the source are %lld elements apart and %lld long; "
                    "expected contiguous rows that do not overlap, at most %lld apart",
                    (long long)c->row_stride, (long long)c->cols, (long long)most);
}

static dw_status check_result(const dw_quantize *c, int axis, bool launching) {
    const char *name = axis ? "along_rows." : "along_cols.";
    const dw_quantized_matrix *to = axis ? &c->along_rows : &c->along_cols;
    const dw_block_options options = dw__quantize_options(c, axis);
    dw_block_layout layout;
    if (!to->wanted) return DW_OK;
    DW_RETURN_IF_FAILED(dw_block_layout_of(&options, c->rows, c->cols, &layout));
    DW_RETURN_IF_FAILED(check_pointer(to->codes, name, "codes", 16, launching));
    DW_RETURN_IF_FAILED(check_pointer(to->scales, name, "scales", 16, launching));
    if (to->stride >= layout.row_bytes && to->stride % 16 == 0 && to->stride <= most_stride_bytes)
        return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT,
                    "quantize: %sstride is %lld; expected a multiple of 16 bytes from %lld to %lld",
                    name, (long long)to->stride, (long long)(layout.row_bytes + 15) / 16 * 16,
                    (long long)most_stride_bytes);
}

dw_status dw__quantize_check(const dw_quantize *c, bool launching) {
    if (!c) return dw__fail(DW_INVALID_ARGUMENT, "quantize: the call is NULL");
    if (c->size != sizeof *c)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "quantize: size is %u; expected %zu: set it to sizeof(dw_quantize), and "
                        "build against the header of this version",
                        (unsigned)c->size, sizeof *c);
    DW_RETURN_IF_FAILED(check_types(c));
    DW_RETURN_IF_FAILED(check_sizes(c));
    if (dw__quantize_is_empty(c)) return DW_OK;
    DW_RETURN_IF_FAILED(check_source(c, launching));
    for (int axis = 0; axis < 2; axis++) DW_RETURN_IF_FAILED(check_result(c, axis, launching));
    if (c->scheme != DW_SCHEME_NVFP4) return DW_OK;
    DW_RETURN_IF_FAILED(check_pointer(c->tensor_scale, "", "tensor_scale", 4, launching));
    return check_pointer(c->amax, "", "amax", 4, false);
}
