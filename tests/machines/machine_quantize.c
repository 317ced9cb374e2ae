/* Block quantization: every machine must give the codes and scales of src/number's codecs, bit for bit. */
#include "common/quantize_params.h"
#include "compare.h"
#include "deepwell/number.h"
#include "kernel/cuda/quantize_numbers.h"
#include <stdio.h>
#include <string.h>

/* ---- cases ----------------------------------------------------------------------------------- */

typedef struct quantize_case {
    int input, scheme, rule;
    bool square, ordinary;
} quantize_case;

enum { ROWS = 201, COLUMNS = 333 }; /* one past a scale's block, and not a multiple of a block */
static const int schemes[] = {DW_CODES_MXFP8, DW_CODES_MXFP8_E5M2, DW_CODES_MXFP4, DW_CODES_NVFP4};

/* Types of input, schemes, squares or not, kinds of numbers. The rules of MX take turns. */
static quantize_case case_at(size_t index) {
    quantize_case c = {.ordinary = index % 2, .square = index / 2 % 2};
    c.scheme = schemes[index / 4 % 4];
    c.input = (int)(index / 16);
    c.rule = c.scheme == DW_CODES_NVFP4 ? DW_RULE_RCEIL
                                        : DW_RULE_RCEIL + (int)(index / 2 + index / 16) % 3;
    return c;
}
static size_t count(void) { return 3 * 4 * 2 * 2; }

static const char *rule_name(const quantize_case *c) {
    static const char *const names[] = {"", "-rceil", "-floor", "-ceil"};
    return c->scheme == DW_CODES_NVFP4 ? "" : names[c->rule];
}
static void describe(size_t index, char *name, size_t bytes, bool *quick) {
    static const char *const inputs[] = {"bf16", "f16", "f32"};
    const quantize_case c = case_at(index);
    snprintf(name, bytes, "quantize-%s-%s%s-%dx%d%s%s", inputs[c.input],
             dw_scheme_name((dw_scheme)c.scheme), rule_name(&c), ROWS, COLUMNS,
             c.square ? "-square" : "", c.ordinary ? "" : "-awkward");
    *quick = false; /* the library does not carry these kernels */
}

static dw__jit_variant variant_of(size_t index, const char *entry) {
    const quantize_case c = case_at(index);
    dw__jit_variant v = {.source = "common/quantize.cu", .entry = entry, .arch = "sm_90a"};
    dw__jit_add_define(&v, "INPUT", c.input);
    dw__jit_add_define(&v, "SCHEME", c.scheme);
    dw__jit_add_define(&v, "RULE", c.rule);
    dw__jit_add_define(&v, "ROWS", 1);
    dw__jit_add_define(&v, "COLUMNS", 1);
    dw__jit_add_define(&v, "SQUARE", c.square);
    return v;
}
static dw__jit_variant variant(size_t index) { return variant_of(index, "quantize_blocks"); }

/* ---- running --------------------------------------------------------------------------------- */

/* One direction on the device, and its expected result. */
typedef struct direction {
    dw_block_options options;
    dw_block_layout layout;
    size_t code_bytes, scale_bytes;
    int64_t stride;
    void *codes, *scales;
} direction;

typedef struct quantize_run {
    quantize_case c;
    int64_t pitch; /* row stride in elements; ordinary numbers get rows for 16-byte loads */
    compare_memory memory;
    float *numbers; /* rounded to the input's type */
    void *source;
    dw_quantize_params params;
    direction directions[2]; /* by axis */
} quantize_run;

static dw_status prepare(quantize_run *r, const char *name) {
    const size_t elements = (size_t)ROWS * COLUMNS, pitch = (size_t)r->pitch,
                 width = r->c.input == DW_QUANTIZE_F32 ? 4 : 2;
    compare_random random = compare_seed(name);
    uint32_t kinds[ROWS / 32 + 1][COLUMNS / 32 + 1];
    unsigned char *input;
    DW_RETURN_IF_FAILED(compare_host(&r->memory, elements * sizeof(float), (void **)&r->numbers));
    DW_RETURN_IF_FAILED(compare_host(&r->memory, ROWS * pitch * width, (void **)&input));
    memset(input, 0xFF, ROWS * pitch * width); /* NaNs after the rows */
    for (int i = 0; i <= ROWS / 32; i++)
        for (int j = 0; j <= COLUMNS / 32; j++) kinds[i][j] = compare_bits(&random);
    for (size_t i = 0; i < elements; i++) {
        const int kind = quantize_kind(kinds[i / COLUMNS / 32][i % COLUMNS / 32], r->c.ordinary);
        const uint64_t word = (uint64_t)compare_bits(&random) << 32 | compare_bits(&random);
        const uint32_t bits = quantize_number(word, kind);
        unsigned char *place = input + (i / COLUMNS * pitch + i % COLUMNS) * width;
        if (r->c.input == DW_QUANTIZE_F32) {
            memcpy(place, &bits, 4);
            r->numbers[i] = dw__f32_from_bits(bits);
            continue;
        }
        const bool f16 = r->c.input == DW_QUANTIZE_F16;
        const float x = dw__f32_from_bits(bits);
        const uint16_t half = kind == QUANTIZE_ANY_BITS ? (uint16_t)bits
                              : f16                     ? dw__f32_to_f16(x)
                                                        : dw__f32_to_bf16(x);
        memcpy(place, &half, 2);
        r->numbers[i] = f16 ? dw__f16_to_f32(half) : dw__bf16_to_f32(half);
    }
    return compare_place(&r->memory, input, ROWS * pitch * width, &r->source);
}

static dw_status place_direction(quantize_run *r, int axis, float tensor_scale) {
    direction *d = &r->directions[axis];
    d->options = (dw_block_options)DW_BLOCK_OPTIONS_DEFAULT;
    d->options.scheme = (dw_scheme)r->c.scheme;
    d->options.scale_rule =
        r->c.scheme == DW_CODES_NVFP4 ? DW_SCALE_AMAX : (dw_scale_rule)r->c.rule;
    d->options.square = r->c.square;
    d->options.axis = axis;
    d->options.tensor_scale = tensor_scale;
    DW_RETURN_IF_FAILED(dw_block_layout_of(&d->options, ROWS, COLUMNS, &d->layout));
    d->stride = (d->layout.row_bytes + 15) / 16 * 16 + 16;
    d->code_bytes = (size_t)(d->layout.outer * d->stride);
    d->scale_bytes = (size_t)dw_scales_swizzled_bytes(d->layout.outer, d->layout.scale_cols);
    DW_RETURN_IF_FAILED(compare_empty(&r->memory, d->code_bytes, &d->codes));
    DW_RETURN_IF_FAILED(compare_empty(&r->memory, d->scale_bytes, &d->scales));
    *(axis ? &r->params.along_rows : &r->params.along_columns) =
        (dw_quantized){d->codes, d->stride, d->scales};
    return DW_OK;
}

static dw_status launch(size_t index, const char *entry, const dw__context *context,
                        dw_quantize_params *params) {
    const dw__jit_variant v = variant_of(index, entry);
    void *function, *arguments[] = {params};
    DW_RETURN_IF_FAILED(dw__jit_load(context, &v, 0, &function));
    return dw__device_cuda.launch(&(dw__launch){
        .name = entry,
        .function = function,
        .grid = {DW_QUANTIZE_TILES(ROWS) * DW_QUANTIZE_TILES(COLUMNS), 1, 1},
        .block = {DW_QUANTIZE_THREADS, 1, 1},
        .arguments = arguments,
    });
}

static dw_status give_bytes(quantize_run *r, compare_sink *sink, const char *name,
                            const void *device, const uint8_t *should, size_t bytes) {
    double *exact;
    compare_output output = {.name = name, .type = COMPARE_BYTES, .count = bytes};
    DW_RETURN_IF_FAILED(compare_host(&r->memory, bytes * sizeof *exact, (void **)&exact));
    for (size_t i = 0; i < bytes; i++) exact[i] = should[i];
    output.exact = exact;
    DW_RETURN_IF_FAILED(compare_fetch(&r->memory, device, bytes, (void **)&output.words));
    return compare_emit(sink, &output);
}

static dw_status give_direction(quantize_run *r, compare_sink *sink, int axis) {
    direction *d = &r->directions[axis];
    uint8_t *codes, *scales, *ordered;
    DW_RETURN_IF_FAILED(compare_host(&r->memory, d->code_bytes, (void **)&codes));
    DW_RETURN_IF_FAILED(compare_host(&r->memory, d->layout.scale_bytes, (void **)&scales));
    DW_RETURN_IF_FAILED(compare_host(&r->memory, d->scale_bytes, (void **)&ordered));
    memset(codes, 0xFF, d->code_bytes); /* the bytes that memory held before */
    DW_RETURN_IF_FAILED(dw_block_quantize(&d->options, ROWS, COLUMNS, r->numbers, COLUMNS, codes,
                                          d->stride, scales));
    DW_RETURN_IF_FAILED(dw_scales_swizzle(d->layout.outer, d->layout.scale_cols,
                                          r->c.square ? d->layout.block : 1, scales, ordered));
    DW_RETURN_IF_FAILED(
        give_bytes(r, sink, axis ? "codes" : "codes-of-columns", d->codes, codes, d->code_bytes));
    return give_bytes(r, sink, axis ? "scales" : "scales-of-columns", d->scales, ordered,
                      d->scale_bytes);
}

static dw_status run(size_t index, const dw__context *context, compare_sink *sink) {
    dw_status status = DW_OK;
    quantize_run r = {.c = case_at(index)};
    r.pitch = r.c.ordinary ? (COLUMNS + 15) / 8 * 8 : COLUMNS;
    char name[160];
    bool quick;
    const float zero = 0;
    float amax, tensor_scale;
    describe(index, name, sizeof name, &quick);
    DW_TRY(prepare(&r, name));
    DW_TRY(dw_amax(ROWS, COLUMNS, r.numbers, COLUMNS, &amax));
    tensor_scale = dw_nvfp4_tensor_scale(amax);
    r.params = (dw_quantize_params){
        .source = r.source, .row_stride = r.pitch, .rows = ROWS, .columns = COLUMNS};
    for (int axis = 0; axis < 2; axis++) DW_TRY(place_direction(&r, axis, tensor_scale));
    DW_TRY(compare_place(&r.memory, &zero, 4, (void **)&r.params.amax));
    DW_TRY(compare_empty(&r.memory, 4, (void **)&r.params.tensor_scale));
    if (r.c.scheme == DW_CODES_NVFP4) DW_TRY(launch(index, "quantize_amax", context, &r.params));
    DW_TRY(launch(index, "quantize_blocks", context, &r.params));
    for (int axis = 1; axis >= 0; axis--) DW_TRY(give_direction(&r, sink, axis));
    if (r.c.scheme == DW_CODES_NVFP4)
        DW_TRY(give_bytes(&r, sink, "tensor-scale", r.params.tensor_scale,
                          (const uint8_t *)&tensor_scale, 4));

cleanup:
    compare_release(&r.memory);
    return status;
}

const compare_family compare_quantize = {
    .count = count, .describe = describe, .variant = variant, .run = run};
