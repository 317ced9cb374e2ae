/* The first-use check of block quantization: compares a kernel's results for small matrices byte for byte with those of
 * src/number. The expected value of every byte is known, also of the padding behind rows and tensors, which is 0xFF. */
#include "kernel/cuda/gpu_quantize.h"
#include "kernel/cuda/quantize_numbers.h"
#include "number/philox.h"
#include <stdio.h>
#include <string.h>

/* Two tiles of rows and three of columns, the last of each incomplete and ending within a block. Rows of the source and
 * of codes start at multiples of 16 bytes and have padding. */
enum { ROWS = 161, COLS = 291, PITCH = 304, SEED = 2026 };
static const float given_scale = 0.0123f;

typedef enum part {
    SOURCE,
    CODES, /* by axis: along columns, along rows */
    SCALES = CODES + 2,
    AMAX = SCALES + 2,
    TENSOR_SCALE,
    PARTS
} part;

typedef struct state {
    dw__quantize_shape shape;
    dw_quantize call;
    /* True: ordinary numbers, and the kernel computes the tensor scale. False: numbers of every kind, and the tensor
     * scale is given. */
    bool ordinary;
    dw__trial_part *parts[PARTS]; /* NULL: the variant does not compute this axis */
    dw__trial_part *expected[PARTS];
    float *numbers; /* ROWS x COLS numbers, rounded to the source's type */
} state;

/* Adds memory that is followed by at least one byte of padding. */
static dw_status add(dw__trial *t, part which, size_t bytes) {
    state *s = t->state;
    DW_RETURN_IF_FAILED(dw__trial_add(t, bytes + 1, &s->parts[which]));
    return dw__trial_scratch(t, bytes + 1, &s->expected[which]);
}

/* ---- operands and expected bytes ------------------------------------------------------------------------ */

static uint64_t random_word(int stream, size_t at) {
    const dw__philox_words w = dw__philox(dw__philox_counter(0, stream, at), SEED, 0);
    return w.word[0] | (uint64_t)w.word[1] << 32;
}

/* Writes a number given as the bits of an F32. With `any`, keeps the low bits as they are, whatever number the type
 * makes of them. */
static float set_number(void *source, dw_dtype type, size_t at, uint32_t bits, bool any) {
    if (any && type != DW_F32)
        ((uint16_t *)source)[at] = (uint16_t)bits;
    else
        dw__trial_set(source, type, at, dw__f32_from_bits(bits));
    return dw__trial_get(source, type, at);
}

static void fill_source(state *s) {
    const int stream = s->ordinary ? 2 : 0;
    for (size_t i = 0; i < ROWS; i++)
        for (size_t j = 0; j < COLS; j++) {
            const int kind =
                quantize_kind(random_word(stream + 1, i / 32 * 1000 + j / 32), s->ordinary);
            const uint32_t bits = quantize_number(random_word(stream, i * COLS + j), kind);
            s->numbers[i * COLS + j] = set_number(s->parts[SOURCE]->host, s->shape.dtype,
                                                  i * PITCH + j, bits, kind == QUANTIZE_ANY_BITS);
        }
}

static dw_status add_source(dw__trial *t, state *s) {
    dw__trial_part *numbers;
    DW_RETURN_IF_FAILED(dw__trial_scratch(t, sizeof(float) * ROWS * COLS, &numbers));
    DW_RETURN_IF_FAILED(add(t, SOURCE, (size_t)ROWS * PITCH * dw_dtype_bytes(s->shape.dtype)));
    s->numbers = numbers->host;
    s->call.source = s->parts[SOURCE]->device;
    fill_source(s);
    memcpy(s->expected[SOURCE]->host, s->parts[SOURCE]->host, s->parts[SOURCE]->bytes);
    return DW_OK;
}

/* Only NVFP4 has a tensor scale. */
static dw_status add_tensor_scale(dw__trial *t, state *s, float *tensor_scale) {
    *tensor_scale = given_scale;
    DW_RETURN_IF_FAILED(add(t, AMAX, sizeof(float)));
    DW_RETURN_IF_FAILED(add(t, TENSOR_SCALE, sizeof(float)));
    memcpy(s->parts[TENSOR_SCALE]->host, &given_scale, sizeof given_scale);
    s->call.tensor_scale = s->parts[TENSOR_SCALE]->device;
    s->call.amax = s->ordinary ? s->parts[AMAX]->device : NULL;
    if (s->shape.scheme == DW_SCHEME_NVFP4 && s->ordinary) {
        float amax;
        DW_RETURN_IF_FAILED(dw_amax(ROWS, COLS, s->numbers, COLS, &amax));
        *tensor_scale = dw_nvfp4_tensor_scale(amax);
        memcpy(s->expected[AMAX]->host, &amax, sizeof amax);
    }
    memcpy(s->expected[TENSOR_SCALE]->host, tensor_scale, sizeof *tensor_scale);
    return DW_OK;
}

static dw_status add_result(dw__trial *t, state *s, int axis, float tensor_scale) {
    dw_block_options options = dw__quantize_options(&s->call, axis);
    dw_block_layout layout;
    dw__trial_part *scales;
    DW_RETURN_IF_FAILED(dw_block_layout_of(&options, ROWS, COLS, &layout));
    const int64_t stride = (layout.row_bytes + 15) / 16 * 16 + 16;
    DW_RETURN_IF_FAILED(add(t, CODES + axis, (size_t)(layout.outer * stride)));
    DW_RETURN_IF_FAILED(
        add(t, SCALES + axis, (size_t)dw_scales_swizzled_bytes(layout.outer, layout.scale_cols)));
    *(axis ? &s->call.along_rows : &s->call.along_cols) = (dw_quantized_matrix){
        1, s->parts[CODES + axis]->device, stride, s->parts[SCALES + axis]->device};
    if (s->shape.scheme == DW_SCHEME_NVFP4) options.tensor_scale = tensor_scale;
    DW_RETURN_IF_FAILED(dw__trial_scratch(t, layout.scale_bytes, &scales));
    DW_RETURN_IF_FAILED(dw_block_quantize(&options, ROWS, COLS, s->numbers, COLS,
                                          s->expected[CODES + axis]->host, stride, scales->host));
    return dw_scales_swizzle(layout.outer, layout.scale_cols, options.square ? layout.block : 1,
                             scales->host, s->expected[SCALES + axis]->host);
}

static dw_status prepare(dw__trial *t) {
    state *s = t->state;
    float tensor_scale;
    s->shape.params = t->variant->params;
    s->ordinary = t->index == 0;
    s->call = (dw_quantize){.struct_size = sizeof s->call,
                            .device = t->context.device,
                            .dtype = s->shape.dtype,
                            .scheme = s->shape.scheme,
                            .scale_rule = s->shape.rule,
                            .square = s->shape.square,
                            .rows = ROWS,
                            .cols = COLS,
                            .row_stride = PITCH,
                            .stream = t->stream};
    t->consequence = ", its calls are refused";
    t->call = &s->call;
    DW_RETURN_IF_FAILED(add_source(t, s));
    DW_RETURN_IF_FAILED(add_tensor_scale(t, s, &tensor_scale));
    if (s->shape.along_cols) DW_RETURN_IF_FAILED(add_result(t, s, 0, tensor_scale));
    return s->shape.along_rows ? add_result(t, s, 1, tensor_scale) : DW_OK;
}

/* ---- comparison ------------------------------------------------------------------------------------------ */

static bool agrees(const dw__trial *t, char *text, size_t bytes) {
    static const char *const names[] = {[SOURCE] = "source",
                                        [CODES] = "codes along columns",
                                        [CODES + 1] = "codes along rows",
                                        [SCALES] = "scales along columns",
                                        [SCALES + 1] = "scales along rows",
                                        [AMAX] = "largest magnitude",
                                        [TENSOR_SCALE] = "tensor's scale"};
    const state *s = t->state;
    for (int which = 0; which < PARTS; which++) {
        if (!s->parts[which]) continue;
        const unsigned char *made = s->parts[which]->host, *right = s->expected[which]->host;
        for (size_t at = 0; at < s->parts[which]->padded; at++) {
            if (made[at] == right[at]) continue;
            snprintf(text, bytes, "byte %zu of the %s of %d x %d %snumbers is %02x, expected %02x",
                     at, names[which], (int)ROWS, (int)COLS, s->ordinary ? "ordinary " : "",
                     made[at], right[at]);
            return false;
        }
    }
    return true;
}

const dw__first_use dw__quantize_first_use = {
    .against = "the definition",
    .count = 2,
    .failure_refuses = true,
    .state_bytes = sizeof(state),
    .prepare = prepare,
    .agrees = agrees,
};
