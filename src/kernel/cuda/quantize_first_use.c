/* The first-use check of block quantization: compares a kernel's results for small matrices byte for byte with those of
 * src/number. Source, codes, scales and tensor scale lie in one block of memory whose padding is 0xFF, and the expected
 * value of every byte is known. */
#include "kernel/cuda/gpu_quantize.h"
#include "kernel/cuda/quantize_numbers.h"
#include "number/philox.h"
#include <stdio.h>

/* Two tiles of rows and three of columns, the last of each incomplete and ending within a block. Rows of the source and
 * of codes start at multiples of 16 bytes and have padding. */
enum { ROWS = 161, COLS = 291, PITCH = 304, SEED = 2026 };
static const float given_scale = 0.0123f;

typedef struct result {
    dw_block_options options;
    dw_block_layout layout;
    int64_t stride;
    size_t codes, scales, scale_bytes; /* offsets */
} result;

typedef struct state {
    dw__quantize_shape shape;
    dw_quantize call;
    /* True: ordinary numbers, and the kernel computes the tensor scale. False: numbers of every kind, and the tensor
     * scale is given. */
    bool ordinary;
    result results[2]; /* by axis; scale_bytes 0: the variant does not compute this axis */
    size_t amax, tensor_scale;
    char *expected;
    float *numbers; /* ROWS x COLS numbers, rounded to the source's type */
} state;

/* Reserves memory that is followed by at least one byte of padding. */
static size_t reserve(dw__trial *t, size_t bytes) { return dw__trial_place(t, bytes + 1); }

static dw_status place(dw__trial *t) {
    state *s = t->state;
    s->shape = dw__quantize_unpack(t->variant->params);
    s->ordinary = t->index == 0;
    s->call = (dw_quantize){.struct_size = sizeof s->call,
                            .device = t->context.device,
                            .dtype = s->shape.dtype,
                            .scheme = s->shape.scheme,
                            .scale_rule = s->shape.rule,
                            .square = s->shape.square,
                            .rows = ROWS,
                            .cols = COLS,
                            .row_stride = PITCH};
    t->consequence = ", its calls are refused";
    /* the source, at offset 0 */
    (void)reserve(t, (size_t)ROWS * PITCH * dw_dtype_bytes(s->shape.dtype));
    for (int axis = 0; axis < 2; axis++) {
        result *r = &s->results[axis];
        if (!(axis ? s->shape.along_rows : s->shape.along_cols)) continue;
        r->options = dw__quantize_options(&s->call, axis);
        DW_RETURN_IF_FAILED(dw_block_layout_of(&r->options, ROWS, COLS, &r->layout));
        r->stride = (r->layout.row_bytes + 15) / 16 * 16 + 16;
        r->codes = reserve(t, (size_t)(r->layout.outer * r->stride));
        r->scale_bytes = (size_t)dw_scales_swizzled_bytes(r->layout.outer, r->layout.scale_cols);
        r->scales = reserve(t, r->scale_bytes);
    }
    s->amax = reserve(t, sizeof(float));
    s->tensor_scale = reserve(t, sizeof(float));
    t->host_bytes = t->bytes;
    return DW_OK;
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

static void fill_source(dw__trial *t, state *s) {
    const int stream = s->ordinary ? 2 : 0;
    for (size_t i = 0; i < ROWS; i++)
        for (size_t j = 0; j < COLS; j++) {
            const int kind =
                quantize_kind(random_word(stream + 1, i / 32 * 1000 + j / 32), s->ordinary);
            const uint32_t bits = quantize_number(random_word(stream, i * COLS + j), kind);
            s->numbers[i * COLS + j] =
                set_number(t->host, s->shape.dtype, i * PITCH + j, bits, kind == QUANTIZE_ANY_BITS);
        }
    memcpy(t->host + s->tensor_scale, &given_scale, sizeof given_scale);
}

static dw_status expect_result(state *s, result *r, float tensor_scale) {
    unsigned char *scales = dw__malloc(r->layout.scale_bytes);
    if (!scales) return dw__fail_memory("the first-use check of a kernel", r->layout.scale_bytes);
    if (s->shape.scheme == DW_SCHEME_NVFP4) r->options.tensor_scale = tensor_scale;
    dw_status status = dw_block_quantize(&r->options, ROWS, COLS, s->numbers, COLS,
                                         s->expected + r->codes, r->stride, scales);
    if (status == DW_OK)
        status = dw_scales_swizzle(r->layout.outer, r->layout.scale_cols,
                                   r->options.square ? r->layout.block : 1, scales,
                                   (unsigned char *)s->expected + r->scales);
    dw__free(scales);
    return status;
}

/* Computes every byte of memory as it must be after the kernel. */
static dw_status make_expected(const dw__trial *t, state *s) {
    float tensor_scale = given_scale;
    memcpy(s->expected, t->host, t->bytes);
    if (s->shape.scheme == DW_SCHEME_NVFP4 && s->ordinary) {
        float amax;
        DW_RETURN_IF_FAILED(dw_amax(ROWS, COLS, s->numbers, COLS, &amax));
        tensor_scale = dw_nvfp4_tensor_scale(amax);
        memcpy(s->expected + s->amax, &amax, sizeof amax);
        memcpy(s->expected + s->tensor_scale, &tensor_scale, sizeof tensor_scale);
    }
    for (int axis = 0; axis < 2; axis++)
        if (s->results[axis].scale_bytes > 0)
            DW_RETURN_IF_FAILED(expect_result(s, &s->results[axis], tensor_scale));
    return DW_OK;
}

static dw_status fill(dw__trial *t) {
    state *s = t->state;
    s->expected = dw__malloc(t->bytes);
    s->numbers = dw__malloc(sizeof(float) * ROWS * COLS);
    if (!s->expected || !s->numbers)
        return dw__fail_memory("the first-use check of a kernel", t->bytes);
    fill_source(t, s);
    return make_expected(t, s);
}

static void bind(dw__trial *t) {
    state *s = t->state;
    dw_quantize *c = &s->call;
    dw_quantized_matrix *to[] = {&c->along_cols, &c->along_rows};
    for (int axis = 0; axis < 2; axis++) {
        const result *r = &s->results[axis];
        if (r->scale_bytes > 0)
            *to[axis] =
                (dw_quantized_matrix){1, t->device + r->codes, r->stride, t->device + r->scales};
    }
    c->source = t->device;
    c->tensor_scale = (float *)(void *)(t->device + s->tensor_scale);
    c->amax = s->ordinary ? (float *)(void *)(t->device + s->amax) : NULL;
    c->stream = t->stream;
    t->call = c;
}

/* ---- comparison ------------------------------------------------------------------------------------------ */

/* Describes the byte at offset `at`. */
static void describe_byte(const state *s, size_t at, char *text, size_t bytes) {
    for (int axis = 0; axis < 2; axis++) {
        const result *r = &s->results[axis];
        const char *along = axis ? "rows" : "columns";
        if (r->scale_bytes == 0 || at < r->codes || at > r->scales + r->scale_bytes) continue;
        if (at >= r->scales)
            snprintf(text, bytes, "byte %zu of the scales along %s", at - r->scales, along);
        else
            snprintf(text, bytes, "byte %zu of line %zu of the codes along %s",
                     (at - r->codes) % (size_t)r->stride, (at - r->codes) / (size_t)r->stride,
                     along);
        return;
    }
    snprintf(text, bytes, at < s->amax ? "a byte of the source" : "the tensor's scale");
}

static bool agrees(const dw__trial *t, char *text, size_t bytes) {
    const state *s = t->state;
    char where[128];
    size_t at = 0;
    while (at < t->bytes && t->host[at] == s->expected[at]) at++;
    if (at == t->bytes) return true;
    describe_byte(s, at, where, sizeof where);
    snprintf(text, bytes, "%s of %d x %d %snumbers is %02x, expected %02x", where, (int)ROWS,
             (int)COLS, s->ordinary ? "ordinary " : "", (unsigned char)t->host[at],
             (unsigned char)s->expected[at]);
    return false;
}

static void release(dw__trial *t) {
    state *s = t->state;
    dw__free(s->expected);
    dw__free(s->numbers);
}

const dw__first_use dw__quantize_first_use = {
    .against = "the definition",
    .count = 2,
    .failure_refuses = true,
    .state_bytes = sizeof(state),
    .place = place,
    .fill = fill,
    .bind = bind,
    .agrees = agrees,
    .release = release,
};
