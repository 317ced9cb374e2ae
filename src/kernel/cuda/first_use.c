/* The first-use check: before a kernel's first result is used on a GPU, the kernel runs on small random operands and
 * its results are compared with a reference. This detects compilers, drivers and GPUs that break a kernel before anyone
 * trains with it.
 *
 * Each family defines its trials (dw__first_use), and this file runs them. Operands come from a counter-based
 * generator, so that no state of the caller changes.
 */
#include "kernel/gpu_kernel.h"
#include "number/half.h"
#include "number/philox.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool dw__first_use_is_on(void) {
    const char *setting = getenv("DEEPWELL_FIRST_USE_CHECK");
    return !setting || strcmp(setting, "off") != 0;
}

static dw_status add(dw__trial *t, size_t bytes, bool on_device, dw__trial_part **part) {
    const size_t header = (sizeof(dw__trial_part) + 15) / 16 * 16,
                 padded = (bytes + 255) / 256 * 256;
    dw__trial_part *made = dw__malloc(header + padded);
    if (!made) return dw__fail_memory("the first-use check of a kernel", header + padded);
    *made = (dw__trial_part){
        .next = t->parts, .bytes = bytes, .padded = padded, .host = (char *)made + header};
    memset(made->host, 0xff, padded);
    *part = t->parts = made;
    return on_device && padded > 0 ? t->context.device->allocate(padded, &made->device) : DW_OK;
}

dw_status dw__trial_add(dw__trial *t, size_t bytes, dw__trial_part **part) {
    return add(t, bytes, true, part);
}

dw_status dw__trial_scratch(dw__trial *t, size_t bytes, dw__trial_part **part) {
    return add(t, bytes, false, part);
}

float dw__trial_get(const void *numbers, dw_dtype type, size_t at) {
    if (type == DW_F32) return ((const float *)numbers)[at];
    const uint16_t half = ((const uint16_t *)numbers)[at];
    return type == DW_F16 ? dw__f16_to_f32(half) : dw__bf16_to_f32(half);
}

void dw__trial_set(void *numbers, dw_dtype type, size_t at, float value) {
    if (type == DW_F32)
        ((float *)numbers)[at] = value;
    else
        ((uint16_t *)numbers)[at] = type == DW_F16 ? dw__f32_to_f16(value) : dw__f32_to_bf16(value);
}

float dw__trial_normal(uint64_t seed, uint32_t stream, size_t at) {
    float u[4];
    dw__philox_uniform4(seed, stream, 0, at, u);
    return (u[0] + u[1] + u[2] + u[3] - 2.0f) * 1.7320508f;
}

/* The name of the compiled variant, or of the entry if a library compiles the kernel. */
static dw_status name_variant(const dw__trial *t, dw__text *name) {
    const dw__kernel *kernel = t->variant->kernel;
    dw__entry_point points[DW__ENTRY_POINTS] = {0};
    if (kernel->entry_points)
        DW_RETURN_IF_FAILED(
            kernel->entry_points(kernel, t->context.capability, t->variant->params, points));
    if (!points[0].code.entry)
        DW_RETURN_IF_FAILED(dw__text_printf(name, "%s", kernel->name));
    else
        DW_RETURN_IF_FAILED(dw__jit_variant_name(&points[0].code, name));
    return dw__text_printf(name, "%s", t->detail);
}

static dw_status refuse(const dw__trial *t, const char *how, const char *what,
                        dw__variant *variant) {
    dw__text name = {0};
    dw_status status = name_variant(t, &name);
    if (status == DW_OK) {
        snprintf(
            variant->reason, sizeof variant->reason,
            "kernel %.300s %s on %.60s: %.400s; it is not used in this process%s; please report "
            "this line",
            name.text, how, t->context.name, what, t->consequence ? t->consequence : "");
        variant->disabled = true;
    }
    dw__text_free(&name);
    return status;
}

static dw_status judge(dw__trial *t, dw_status ran, dw__variant *variant) {
    const dw__first_use *check = variant->kernel->first_use;
    char how[64], text[512];
    if (ran != DW_OK) {
        if (ran == DW_OUT_OF_MEMORY || !check->failure_refuses) return ran;
        snprintf(text, sizeof text, "%s", dw_last_error());
        return refuse(t, "failed", text, variant);
    }
    if (check->agrees(t, text, sizeof text)) return DW_OK;
    snprintf(how, sizeof how, "disagrees with %s", check->against);
    return refuse(t, how, text, variant);
}

/* Copies all parts to the device, or back, and waits. */
static dw_status copy_parts(dw__trial *t, bool in) {
    const dw_device *device = t->context.device;
    for (dw__trial_part *p = t->parts; p; p = p->next)
        if (p->device)
            DW_RETURN_IF_FAILED(in ? device->copy_in(p->device, p->host, p->padded, t->stream)
                                   : device->copy_out(p->host, p->device, p->padded, t->stream));
    return device->stream_synchronize(t->stream);
}

/* On the emulator, any finding of the checker is a failure here. */
static dw_status run_kernel(dw__trial *t) {
    DW_RETURN_IF_FAILED(t->variant->kernel->enqueue(t->call, &t->context, t->variant));
    return copy_parts(t, false);
}

static void free_parts(dw__trial *t) {
    dw__trial_part *next;
    for (dw__trial_part *p = t->parts; p; p = next) {
        next = p->next;
        if (p->device) t->context.device->release(p->device, p->padded);
        dw__free(p);
    }
}

static dw_status run_trial(dw__trial *t, dw__variant *variant) {
    const dw__first_use *check = variant->kernel->first_use;
    dw__trial_part *state;
    dw_status status = DW_OK;
    DW_TRY(dw__trial_scratch(t, check->state_bytes, &state));
    t->state = memset(state->host, 0, state->bytes);
    DW_TRY(check->prepare(t));
    DW_TRY(copy_parts(t, true));
    if (check->reference) DW_TRY(check->reference(t));
    DW_TRY(judge(t, run_kernel(t), variant));

cleanup:
    if (status != DW_OK) (void)t->context.device->stream_synchronize(t->stream);
    free_parts(t);
    return status;
}

dw_status dw__first_use_check(const dw__context *context, dw__variant *variant) {
    const dw__first_use *check = variant->kernel->first_use;
    const dw_device *device = context->device;
    void *stream = NULL;
    int before = 0;
    bool relaxed = false;
    dw_status status = DW_OK;
    DW_TRY(device->capture_relax(&before));
    relaxed = true;
    DW_TRY(device->stream_create(&stream));
    for (int i = 0; i < check->count && !variant->disabled; i++) {
        dw__trial t = {.context = *context, .variant = variant, .index = i, .stream = stream};
        DW_TRY(run_trial(&t, variant));
    }

cleanup:
    if (stream) device->stream_destroy(stream);
    if (relaxed) device->capture_restore(before);
    return status == DW_OK
               ? DW_OK
               : dw__fail_prefix(status, "comparing the kernel with %s", check->against);
}
