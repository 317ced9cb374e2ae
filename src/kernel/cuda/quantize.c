/* Block quantization on a GPU: the public calls, the variants and their launch. A call does only arithmetic before its
 * launch: it allocates nothing, takes no lock and does not synchronize. */
#include "common/quantize_params.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/gpu_quantize.h"
#include "number/scheme_sets.h"
#include <stdio.h>

/* ---- checks of a call ------------------------------------------------------------------------------ */

static const int64_t most_size = (int64_t)1 << 30, most_stride_bytes = (int64_t)1 << 40;

/* "8192 x 4096, bf16 to mxfp8 along rows and columns" */
static const char *describe(const void *call, char *text, size_t bytes) {
    const dw_quantize *c = call;
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

static bool is_empty(const dw_quantize *c) { return c->rows == 0 || c->cols == 0; }

static dw_status check_types(const dw_quantize *c) {
    const bool nvfp4 = c->scheme == DW_SCHEME_NVFP4;
    if (c->dtype != DW_BF16 && c->dtype != DW_F16 && c->dtype != DW_F32)
        return dw__fail(DW_TYPE, "quantize: the element type is %s; expected bf16, f16 or f32",
                        dw_dtype_name(c->dtype));
    /* dw_block_quantize has more, on a CPU. */
    DW_RETURN_IF_FAILED(dw__scheme_check("quantize on a GPU", c->scheme, dw__tile_schemes));
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
    const dw__size_range sizes[] = {{"rows", c->rows, 0, most_size},
                                    {"cols", c->cols, 0, most_size}};
    DW_RETURN_IF_FAILED(dw__check_sizes("quantize", sizes, DW_COUNT(sizes)));
    const int64_t tiles = DW_QUANTIZE_TILES(c->rows) * DW_QUANTIZE_TILES(c->cols);
    if (tiles > most_size)
        return dw__fail(DW_UNSUPPORTED,
                        "quantize: %lld x %lld are %lld tiles of 128 x 128, more than %lld; split "
                        "the rows",
                        (long long)c->rows, (long long)c->cols, (long long)tiles,
                        (long long)most_size);
    return DW_OK;
}

static dw_status check_source(const dw_quantize *c, bool launching) {
    const size_t width = dw_dtype_bytes(c->dtype);
    const int64_t most = most_stride_bytes / (int64_t)width;
    const dw__address source = {"source", c->source, width, launching};
    DW_RETURN_IF_FAILED(dw__check_addresses("quantize", &source, 1));
    if (c->rows == 1 || (c->row_stride >= c->cols && c->row_stride <= most)) return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT,
                    "quantize: the rows of the source are %lld elements apart and %lld long; "
                    "expected contiguous rows that do not overlap, at most %lld apart",
                    (long long)c->row_stride, (long long)c->cols, (long long)most);
}

static dw_status check_result(const dw_quantize *c, int axis, bool launching) {
    const dw_quantized_matrix *to = axis ? &c->along_rows : &c->along_cols;
    const dw_block_options options = dw__quantize_options(c, axis);
    dw_block_layout layout;
    if (!to->wanted) return DW_OK;
    DW_RETURN_IF_FAILED(dw_block_layout_of(&options, c->rows, c->cols, &layout));
    const dw__address addresses[] = {
        {axis ? "along_rows.codes" : "along_cols.codes", to->codes, 16, launching},
        {axis ? "along_rows.scales" : "along_cols.scales", to->scales, 16, launching}};
    DW_RETURN_IF_FAILED(dw__check_addresses("quantize", addresses, DW_COUNT(addresses)));
    if (to->stride >= layout.row_bytes && to->stride % 16 == 0 && to->stride <= most_stride_bytes)
        return DW_OK;
    return dw__fail(
        DW_INVALID_ARGUMENT,
        "quantize: along_%s.stride is %lld; expected a multiple of 16 bytes from %lld to "
        "%lld",
        axis ? "rows" : "cols", (long long)to->stride, (long long)(layout.row_bytes + 15) / 16 * 16,
        (long long)most_stride_bytes);
}

dw_status dw__quantize_check(const dw_quantize *c, bool launching) {
    static const dw__struct known = {"dw_quantize", sizeof *c, {0}};
    DW_RETURN_IF_FAILED(dw__struct_read(&known, c, NULL));
    DW_RETURN_IF_FAILED(check_types(c));
    DW_RETURN_IF_FAILED(check_sizes(c));
    if (is_empty(c)) return DW_OK;
    DW_RETURN_IF_FAILED(check_source(c, launching));
    for (int axis = 0; axis < 2; axis++) DW_RETURN_IF_FAILED(check_result(c, axis, launching));
    if (c->scheme != DW_SCHEME_NVFP4) return DW_OK;
    const dw__address addresses[] = {{"tensor_scale", c->tensor_scale, sizeof(float), launching},
                                     {"amax", c->amax, sizeof(float), false}};
    return dw__check_addresses("quantize", addresses, DW_COUNT(addresses));
}

/* ---- variants -------------------------------------------------------------------------------------- */

_Static_assert(DW_CODES_MXFP8 == (int)DW_SCHEME_MXFP8 &&
                   DW_CODES_MXFP8_E5M2 == (int)DW_SCHEME_MXFP8_E5M2 &&
                   DW_CODES_MXFP4 == (int)DW_SCHEME_MXFP4 &&
                   DW_CODES_NVFP4 == (int)DW_SCHEME_NVFP4 && DW_RULE_RCEIL == (int)DW_SCALE_RCEIL &&
                   DW_RULE_FLOOR == (int)DW_SCALE_FLOOR && DW_RULE_CEIL == (int)DW_SCALE_CEIL,
               "the device's numbers are the header's");

static dw__quantize_shape shape_of(const dw_quantize *c) {
    const bool nvfp4 = c->scheme == DW_SCHEME_NVFP4;
    return (dw__quantize_shape){
        .dtype = c->dtype,
        .scheme = c->scheme,
        .rule = nvfp4                               ? DW_SCALE_AMAX
                : c->scale_rule == DW_SCALE_DEFAULT ? DW_SCALE_RCEIL
                                                    : c->scale_rule,
        .along_rows = c->along_rows.wanted != 0,
        .along_cols = c->along_cols.wanted != 0,
        .square = c->square != 0,
    };
}

dw__jit_variant dw__quantize_variant(const dw__quantize_shape *s, const char *entry,
                                     const char *arch) {
    const int input = s->dtype == DW_F32   ? DW_QUANTIZE_F32
                      : s->dtype == DW_F16 ? DW_QUANTIZE_F16
                                           : DW_QUANTIZE_BF16;
    dw__jit_variant v = {.source = "common/quantize.cu", .entry = entry, .arch = arch};
    dw__jit_add_define(&v, "INPUT", input);
    dw__jit_add_define(&v, "SCHEME", s->scheme);
    /* NVFP4 has only one rule, so the kernel does not read it. */
    dw__jit_add_define(&v, "RULE", s->rule == DW_SCALE_AMAX ? DW_RULE_RCEIL : (int)s->rule);
    dw__jit_add_define(&v, "ROWS", s->along_rows);
    dw__jit_add_define(&v, "COLUMNS", s->along_cols);
    dw__jit_add_define(&v, "SQUARE", s->square);
    return v;
}

enum { BLOCKS, AMAX }; /* entry points; only NVFP4 has the second */

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point points[DW__ENTRY_POINTS]) {
    const dw__quantize_shape shape = {.params = params};
    const char *arch = dw__gpu_arch(capability);
    points[BLOCKS].code = dw__quantize_variant(&shape, kernel->name, arch);
    if (shape.scheme == DW_SCHEME_NVFP4)
        points[AMAX].code = dw__quantize_variant(&shape, "quantize_amax", arch);
    return DW_OK;
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    return dw__variant_of(context, kernel, shape_of(call).params, variant);
}

/* ---- launch ---------------------------------------------------------------------------------------- */

static dw_quantized result_of(const dw_quantized_matrix *to) {
    return (dw_quantized){to->codes, to->stride, to->scales};
}

dw_status dw__quantize_enqueue(const dw_quantize *c, const dw__context *context,
                               const dw__variant *variant, bool amax_is_0) {
    const bool find_amax = variant->functions[AMAX] && c->amax;
    dw_quantize_params params = {
        .source = c->source,
        .row_stride = c->row_stride,
        .rows = (int)c->rows,
        .columns = (int)c->cols,
        .along_rows = result_of(&c->along_rows),
        .along_columns = result_of(&c->along_cols),
        .amax = find_amax ? c->amax : NULL,
        .tensor_scale = c->tensor_scale,
    };
    void *arguments[] = {&params};
    dw__launch launch = {
        .name = "quantize_amax",
        .function = variant->functions[AMAX],
        .grid = {(unsigned)(DW_QUANTIZE_TILES(c->rows) * DW_QUANTIZE_TILES(c->cols)), 1, 1},
        .block = {DW_QUANTIZE_THREADS, 1, 1},
        .stream = c->stream,
        .arguments = arguments,
    };
    if (find_amax && !amax_is_0)
        DW_RETURN_IF_FAILED(context->device->fill_on(c->amax, 0, sizeof *c->amax, c->stream));
    if (find_amax) DW_RETURN_IF_FAILED(context->device->launch(&launch));
    launch.name = variant->kernel->name;
    launch.function = variant->functions[BLOCKS];
    return context->device->launch(&launch);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    return dw__quantize_enqueue(call, context, variant, false);
}

/* ---- the kernel ------------------------------------------------------------------------------------ */

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    DW_RETURN_IF_FAILED(dw__quantize_check(call, false));
    return dw__gpu_kernel_has(kernel, gpu);
}

const dw__kernel dw__quantize_blocks = {
    .name = "quantize_blocks",
    .backend = "deepwell",
    .kind = DW__CALL_QUANTIZE,
    .proof = DW__MEASURED_ON_HARDWARE,
    .asked_for = true,
    .operation = "quantization to MXFP8, MXFP4, NVFP4",
    .source = "cuda/common/quantize.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "BF16, F16, F32",
    .needs = "any size; rows of codes from multiples of 16 bytes",
    .shown = "on sm_90a tested, every byte the definition's, and measured on an H200; on sm_100f "
             "and sm_120a proven on the emulator, not run on hardware",
    .supports = supports,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    .first_use = &dw__quantize_first_use,
    .tolerance = "every byte is the definition's",
};

/* ---- the public calls ------------------------------------------------------------------------------ */

static dw_status choose(const void *call, int capability, const dw__kernel **kernel) {
    (void)call;
    *kernel = &dw__quantize_blocks;
    if (dw__gpu_has_kernels(capability)) return DW_OK;
    return dw__fail(
        DW_UNSUPPORTED,
        "these kernels are for 9.0, 10.0, 10.3 and 12.0 (H100, H200, B200, B300, RTX 50, "
        "RTX PRO)");
}

static const dw__gpu_family family = {
    .title = "quantize",
    .kind = DW__CALL_QUANTIZE,
    .own = {&dw__quantize_blocks},
    .choose = choose,
    .describe = describe,
};

static dw_status make_job(const dw_quantize *call, bool launching, dw__gpu_job *j) {
    DW_RETURN_IF_FAILED(dw__quantize_check(call, launching));
    *j = (dw__gpu_job){.call = call, .device = call->device, .empty = is_empty(call)};
    return j->empty ? DW_OK : dw__job_find(&family, j);
}

dw_status dw_quantize_run(const dw_quantize *call) {
    dw__gpu_job j;
    DW_RETURN_IF_FAILED(make_job(call, true, &j));
    return j.empty ? DW_OK : dw__job_run(&family, &j);
}

dw_status dw_quantize_supported(const dw_quantize *call) {
    dw__gpu_job j;
    DW_RETURN_IF_FAILED(make_job(call, false, &j));
    return dw__job_would_run(&family, &j);
}
