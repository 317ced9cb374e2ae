/* Quantization in blocks: schemes, options, layouts. */
#include "number/block.h"
#include "number/scheme_sets.h"
#include <fenv.h>
#include <float.h>

float dw_nvfp4_tensor_scale(float amax) {
    if (!(amax > 0.0f) || amax > FLT_MAX) return 1.0f;
    fenv_t before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    volatile float scale = amax; /* keeps the quotient between the two mode changes */
    scale = scale / (448.0f * 6.0f);
    fesetenv(&before);
    return scale > FLT_MIN ? scale : FLT_MIN;
}

/* ---- checking ------------------------------------------------------------------------------ */

static bool supports_rule(dw_scheme scheme, dw_scale_rule rule) {
    bool amax = rule == DW_SCALE_AMAX;
    if (scheme == DW_SCHEME_NVFP4) return amax;
    return !amax || scheme == DW_SCHEME_FP8_BLOCK;
}

static dw_scale_rule rule_of(const dw_block_options *options) {
    if (options->scale_rule != DW_SCALE_DEFAULT) return options->scale_rule;
    bool amax = options->scheme == DW_SCHEME_NVFP4 || options->scheme == DW_SCHEME_FP8_BLOCK;
    return amax ? DW_SCALE_AMAX : DW_SCALE_RCEIL;
}

static dw_status check_options(const char *function, const dw_block_options *options) {
    static const dw__struct known = {"dw_block_options", sizeof *options, {0}};
    const dw_status read = dw__struct_read(&known, options, NULL);
    if (read != DW_OK) return dw__fail_prefix(read, "%s", function);
    DW_RETURN_IF_FAILED(dw__scheme_check(function, options->scheme, dw__block_schemes));
    const char *name = dw_scheme_name(options->scheme);
    if ((unsigned)options->scale_rule > DW_SCALE_AMAX ||
        !supports_rule(options->scheme, rule_of(options)))
        return dw__fail(
            DW_INVALID_ARGUMENT, "%s: scale_rule is %d, which %s does not have: expected %s",
            function, (int)options->scale_rule, name,
            options->scheme == DW_SCHEME_NVFP4       ? "DW_SCALE_DEFAULT or DW_SCALE_AMAX"
            : options->scheme == DW_SCHEME_FP8_BLOCK ? "one of dw_scale_rule"
                                                     : "DW_SCALE_DEFAULT, _RCEIL, _FLOOR or _CEIL");
    if (options->axis != 0 && options->axis != 1)
        return dw__fail(DW_INVALID_ARGUMENT, "%s: axis is %d: expected 0 or 1", function,
                        options->axis);
    if (options->square != 0 && options->square != 1)
        return dw__fail(DW_INVALID_ARGUMENT, "%s: square is %d: expected 0 or 1", function,
                        options->square);
    if ((unsigned)options->rounding > DW_ROUND_STOCHASTIC)
        return dw__fail(DW_INVALID_ARGUMENT, "%s: rounding is %d: expected %d or %d", function,
                        (int)options->rounding, DW_ROUND_NEAREST, DW_ROUND_STOCHASTIC);
    if (options->scheme == DW_SCHEME_NVFP4 &&
        !(options->tensor_scale >= FLT_MIN && options->tensor_scale <= FLT_MAX))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "%s: tensor_scale is %g: expected a normal positive number, as "
                        "dw_nvfp4_tensor_scale gives",
                        function, (double)options->tensor_scale);
    return DW_OK;
}

static int64_t blocks(int64_t count, int64_t size) { return count / size + (count % size != 0); }

static dw_status find_layout(const char *function, const dw_block_options *options, int64_t rows,
                             int64_t cols, dw_block_layout *layout) {
    DW_RETURN_IF_FAILED(check_options(function, options));
    int64_t bytes;
    if (rows < 0 || cols < 0 || __builtin_mul_overflow(rows, cols, &bytes) ||
        bytes > INT64_MAX / (int64_t)sizeof(float))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "%s: the matrix is [%lld, %lld]: expected sizes of 0 or more whose F32 "
                        "elements fit into memory",
                        function, (long long)rows, (long long)cols);
    const dw_scheme_info *scheme = dw_scheme_describe(options->scheme);
    /* fp8-block has F32 scales by AMAX, and powers of two by the other rules. */
    dw_dtype scale =
        scheme->scale == DW_F32 && rule_of(options) != DW_SCALE_AMAX ? DW_E8M0 : scheme->scale;
    int64_t outer = options->axis ? rows : cols, inner = options->axis ? cols : rows;
    *layout = (dw_block_layout){
        .outer = outer,
        .inner = inner,
        .block = scheme->block,
        .row_bytes = dw_tensor_bytes(scheme->element, 1, &inner),
        .scale_rows = options->square ? blocks(outer, scheme->block) : outer,
        .scale_cols = blocks(inner, scheme->block),
        .element = scheme->element,
        .scale = scale,
    };
    layout->code_bytes = (size_t)(outer * layout->row_bytes);
    layout->scale_bytes = (size_t)(layout->scale_rows * layout->scale_cols) * dw_dtype_bytes(scale);
    return DW_OK;
}

dw_status dw_block_layout_of(const dw_block_options *options, int64_t rows, int64_t cols,
                             dw_block_layout *layout) {
    return find_layout("dw_block_layout_of", options, rows, cols, layout);
}

/* ---- tasks --------------------------------------------------------------------------------- */

static dw__mx_rule find_mx_rule(dw_scale_rule rule, dw_dtype element) {
    enum { FRACTION = 0x7FFFFF };
    uint32_t largest = dw__f32_bits(dw_dtype_max(element));
    int exponent = (int)(largest >> 23) - 127;
    switch (rule) {
    case DW_SCALE_FLOOR: return (dw__mx_rule){0, exponent, (uint32_t)(255 - exponent)};
    case DW_SCALE_CEIL: return (dw__mx_rule){FRACTION, exponent, (uint32_t)(255 - exponent)};
    default: return (dw__mx_rule){FRACTION - (largest & FRACTION), exponent, 254};
    }
}

static int64_t round_up(int64_t count, int64_t size) { return blocks(count, size) * size; }

dw_status dw__block_prepare(const char *function, const dw_block_options *options, int64_t rows,
                            int64_t cols, int64_t row_stride, int64_t code_stride,
                            dw__block_call *call) {
    dw_block_layout layout;
    DW_RETURN_IF_FAILED(find_layout(function, options, rows, cols, &layout));
    if (row_stride < cols)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "%s: row_stride is %lld for %lld columns: expected "
                        "at least as many",
                        function, (long long)row_stride, (long long)cols);
    if (code_stride != 0 && code_stride < layout.row_bytes)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "%s: code_stride is %lld for rows of %lld bytes: expected at least as "
                        "many, or 0 for rows without gaps",
                        function, (long long)code_stride, (long long)layout.row_bytes);
    dw_scale_rule rule = rule_of(options);
    *call = (dw__block_call){
        .loops = NULL,
        .options = *options,
        .rule = rule,
        .mx = find_mx_rule(rule, layout.element),
        .layout = layout,
        .row_stride = row_stride,
        .code_stride = code_stride ? code_stride : layout.row_bytes,
    };
    if (options->axis == 1) {
        enum { WHOLE = 128 }; /* a multiple of every block size */
        int64_t inner = round_up(layout.inner > 0 ? layout.inner : 1, WHOLE);
        int64_t least = options->square ? layout.block : 1;
        int64_t widest = DW_BLOCK_TASK / least;
        call->inner_step = inner < widest ? inner : widest;
        call->outer_step = DW_BLOCK_TASK / call->inner_step / least * least;
    } else {
        enum { COLUMNS = 64 }; /* columns of the source that are read together: whole cache lines */
        call->outer_step = options->square && layout.block > COLUMNS ? layout.block : COLUMNS;
        call->inner_step = DW_BLOCK_TURNED / call->outer_step;
    }
    call->outer_tasks = blocks(layout.outer, call->outer_step);
    call->inner_tasks = blocks(layout.inner, call->inner_step);
    return DW_OK;
}

dw__block_region dw__block_region_at(const dw__block_call *call, int64_t index) {
    int64_t outer = index / call->inner_tasks * call->outer_step;
    int64_t inner = index % call->inner_tasks * call->inner_step;
    int64_t outers = call->layout.outer - outer, inners = call->layout.inner - inner;
    return (dw__block_region){
        .outer = outer,
        .outers = outers < call->outer_step ? outers : call->outer_step,
        .inner = inner,
        .inners = inners < call->inner_step ? inners : call->inner_step,
    };
}
