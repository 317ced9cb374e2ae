/* The first-use guard of quantization in blocks: before a kernel's first result is used on a GPU, what it makes
 * of small matrices is compared byte for byte with what src/number makes of them.
 *
 * All of a trial lies in one piece of memory, filled with 0xFF where nothing is: source, codes, scales, the
 * tensor's scale. What that piece is to be afterwards is known of every byte. Everything happens on a stream of
 * its own, so that it may happen inside of a caller's graph capture.
 */
#include "kernel/cuda/guard.h"
#include "kernel/cuda/quantize.h"
#include "kernel/cuda/quantize_numbers.h"
#include "number/philox.h"
#include <stdio.h>
#include <string.h>

/* Two tiles of rows and three of columns, none of the last full; ends of no block. Rows of the source and of
 * codes begin at multiples of 16 bytes, with room behind. */
enum { ROWS = 161, COLS = 291, PITCH = 304, SEED = 2026 };
static const float given_scale = 0.0123f;

typedef struct result {
    dw_block_options options;
    dw_block_layout layout;
    int64_t stride;
    size_t codes, scales, scale_bytes; /* where they begin */
} result;

typedef struct trial {
    const dw__context *context;
    dw__quantize_kernel *kernel;
    dw_quantize call;
    bool
        ordinary; /* numbers, and the tensor's scale is found; else of every kind, and it is given */
    result results[2]; /* by axis */
    size_t amax, tensor_scale, bytes;
    char *device, *host, *expected;
    float *numbers; /* ROWS x COLS, as they are in the source's type */
    dw__guard frame;
} trial;

static bool wants(const trial *t, int axis) {
    return axis ? t->kernel->shape.along_rows : t->kernel->shape.along_cols;
}

static size_t place(trial *t, size_t bytes) {
    const size_t at = t->bytes;
    t->bytes += (bytes + 1 + 255) / 256 * 256; /* a byte behind at least */
    return at;
}

static dw_status place_all(trial *t) {
    const dw__quantize_shape *s = &t->kernel->shape;
    t->call = (dw_quantize){.size = sizeof t->call,
                            .device = t->context->device,
                            .dtype = s->dtype,
                            .scheme = s->scheme,
                            .scale_rule = s->rule,
                            .square = s->square,
                            .rows = ROWS,
                            .cols = COLS,
                            .row_stride = PITCH};
    (void)place(t, (size_t)ROWS * PITCH * dw_dtype_bytes(s->dtype)); /* the source, at 0 */
    for (int axis = 0; axis < 2; axis++) {
        result *r = &t->results[axis];
        if (!wants(t, axis)) continue;
        r->options = dw__quantize_options(&t->call, axis);
        DW_RETURN_IF_FAILED(dw_block_layout_of(&r->options, ROWS, COLS, &r->layout));
        r->stride = (r->layout.row_bytes + 15) / 16 * 16 + 16;
        r->codes = place(t, (size_t)(r->layout.outer * r->stride));
        r->scale_bytes = (size_t)dw_scales_swizzled_bytes(r->layout.outer, r->layout.scale_cols);
        r->scales = place(t, r->scale_bytes);
    }
    t->amax = place(t, sizeof(float));
    t->tensor_scale = place(t, sizeof(float));
    return DW_OK;
}

/* ---- numbers ---------------------------------------------------------------------------------------- */

static uint64_t random_word(int stream, size_t at) {
    const dw__philox_words w = dw__philox(dw__philox_counter(0, stream, at), SEED, 0);
    return w.word[0] | (uint64_t)w.word[1] << 32;
}

/* Of bits of an F32, or, where `any`, of as many of the type's own as it has. */
static float set_number(void *source, dw_dtype type, size_t at, uint32_t bits, bool any) {
    const float value = dw__f32_from_bits(bits);
    uint16_t *half = (uint16_t *)source + at;
    switch (type) {
    case DW_F32: ((float *)source)[at] = value; return value;
    case DW_F16: *half = any ? (uint16_t)bits : dw__f32_to_f16(value); return dw__f16_to_f32(*half);
    default: *half = any ? (uint16_t)bits : dw__f32_to_bf16(value); return dw__bf16_to_f32(*half);
    }
}

static void fill_source(trial *t) {
    const int stream = t->ordinary ? 2 : 0;
    memset(t->host, 0xff, t->bytes);
    for (size_t i = 0; i < ROWS; i++)
        for (size_t j = 0; j < COLS; j++) {
            const int kind =
                quantize_kind(random_word(stream + 1, i / 32 * 1000 + j / 32), t->ordinary);
            const uint32_t bits = quantize_number(random_word(stream, i * COLS + j), kind);
            t->numbers[i * COLS + j] = set_number(t->host, t->kernel->shape.dtype, i * PITCH + j,
                                                  bits, kind == QUANTIZE_ANY_BITS);
        }
    memcpy(t->host + t->tensor_scale, &given_scale, sizeof given_scale);
}

static void set_pointers(trial *t) {
    dw_quantize *c = &t->call;
    dw_quantized_matrix *to[] = {&c->along_cols, &c->along_rows};
    for (int axis = 0; axis < 2; axis++) {
        const result *r = &t->results[axis];
        if (wants(t, axis))
            *to[axis] =
                (dw_quantized_matrix){1, t->device + r->codes, r->stride, t->device + r->scales};
    }
    c->source = t->device;
    c->tensor_scale = (float *)(void *)(t->device + t->tensor_scale);
    c->amax = t->ordinary ? (float *)(void *)(t->device + t->amax) : NULL;
    c->stream = t->frame.stream;
}

/* ---- comparing ---------------------------------------------------------------------------------------- */

/* What is to be in memory afterwards. */
static dw_status make_expected(trial *t) {
    const bool nvfp4 = t->call.scheme == DW_SCHEME_NVFP4;
    float tensor_scale = given_scale;
    memcpy(t->expected, t->host, t->bytes);
    if (nvfp4 && t->ordinary) {
        float amax;
        DW_RETURN_IF_FAILED(dw_amax(ROWS, COLS, t->numbers, COLS, &amax));
        tensor_scale = dw_nvfp4_tensor_scale(amax);
        memcpy(t->expected + t->amax, &amax, sizeof amax);
        memcpy(t->expected + t->tensor_scale, &tensor_scale, sizeof tensor_scale);
    }
    for (int axis = 0; axis < 2; axis++) {
        result *r = &t->results[axis];
        if (!wants(t, axis)) continue;
        unsigned char *scales = dw__malloc(r->layout.scale_bytes);
        if (!scales) return dw__fail_memory("the comparison of a kernel", r->layout.scale_bytes);
        if (nvfp4) r->options.tensor_scale = tensor_scale;
        dw_status status = dw_block_quantize(&r->options, ROWS, COLS, t->numbers, COLS,
                                             t->expected + r->codes, r->stride, scales);
        if (status == DW_OK)
            status = dw_scales_swizzle(r->layout.outer, r->layout.scale_cols,
                                       r->options.square ? r->layout.block : 1, scales,
                                       (unsigned char *)t->expected + r->scales);
        dw__free(scales);
        DW_RETURN_IF_FAILED(status);
    }
    return DW_OK;
}

static void refuse(trial *t, const char *how, const char *what) {
    dw__text name = {0};
    dw__jit_variant variant = dw__quantize_variant(&t->kernel->shape, "quantize_blocks",
                                                   dw__quantize_arch(t->context->capability));
    (void)dw__jit_variant_name(&variant, &name);
    snprintf(t->kernel->reason, sizeof t->kernel->reason,
             "kernel %.300s %s on %.60s: %.400s; it is not used in this process, its calls are "
             "refused; please report this line",
             name.text ? name.text : "of quantization", how, t->context->name, what);
    dw__text_free(&name);
    t->kernel->disabled = true;
}

/* Where byte `at` lies. */
static void describe_byte(const trial *t, size_t at, char *text, size_t bytes) {
    for (int axis = 0; axis < 2; axis++) {
        const result *r = &t->results[axis];
        const char *along = axis ? "rows" : "columns";
        if (!wants(t, axis) || at < r->codes || at > r->scales + r->scale_bytes) continue;
        if (at >= r->scales)
            snprintf(text, bytes, "byte %zu of the scales along %s", at - r->scales, along);
        else
            snprintf(text, bytes, "byte %zu of line %zu of the codes along %s",
                     (at - r->codes) % (size_t)r->stride, (at - r->codes) / (size_t)r->stride,
                     along);
        return;
    }
    snprintf(text, bytes, at < t->amax ? "a byte of the source" : "the tensor's scale");
}

static void compare(trial *t) {
    char where[128], text[256];
    size_t at = 0;
    while (at < t->bytes && t->host[at] == t->expected[at]) at++;
    if (at == t->bytes) return;
    describe_byte(t, at, where, sizeof where);
    snprintf(text, sizeof text, "%s of %d x %d %snumbers is %02x, expected %02x", where, (int)ROWS,
             (int)COLS, t->ordinary ? "ordinary " : "", (unsigned char)t->host[at],
             (unsigned char)t->expected[at]);
    refuse(t, "disagrees with the definition", text);
}

/* ---- all of it ----------------------------------------------------------------------------------------- */

static dw_status run_tested(trial *t) {
    const dw_device *device = t->context->device;
    bool failed;
    fill_source(t);
    set_pointers(t);
    DW_RETURN_IF_FAILED(make_expected(t));
    DW_RETURN_IF_FAILED(device->copy_in(t->device, t->host, t->bytes, t->frame.stream));
    DW_RETURN_IF_FAILED(device->stream_synchronize(t->frame.stream));
    DW_RETURN_IF_FAILED(dw__guard_fetch(&t->frame,
                                        dw__quantize_launch(&t->call, t->context, t->kernel),
                                        t->host, t->device, t->bytes, &failed));
    if (failed)
        refuse(t, "failed", dw_last_error());
    else
        compare(t);
    return DW_OK;
}

dw_status dw__quantize_guard(const dw__context *context, dw__quantize_kernel *kernel) {
    const dw_device *device = context->device;
    trial t = {.context = context, .kernel = kernel};
    dw_status status = DW_OK;
    DW_TRY(place_all(&t));
    t.host = dw__malloc(t.bytes);
    t.expected = dw__malloc(t.bytes);
    t.numbers = dw__malloc(sizeof(float) * ROWS * COLS);
    if (!t.host || !t.expected || !t.numbers)
        DW_TRY(dw__fail_memory("the comparison of a kernel", t.bytes));
    DW_TRY(dw__guard_begin(&t.frame, context));
    DW_TRY(device->allocate(t.bytes, (void **)&t.device));
    for (int ordinary = 1; ordinary >= 0 && !kernel->disabled; ordinary--) {
        t.ordinary = ordinary;
        DW_TRY(run_tested(&t));
    }

cleanup:
    if (t.device) device->release(t.device, t.bytes);
    dw__free(t.host);
    dw__free(t.expected);
    dw__free(t.numbers);
    return dw__guard_end(&t.frame, status, "the definition");
}
