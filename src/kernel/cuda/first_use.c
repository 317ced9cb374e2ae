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

size_t dw__trial_place(dw__trial *t, size_t bytes) {
    const size_t begin = t->bytes;
    t->bytes += (bytes + 255) / 256 * 256;
    return begin;
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

/* Runs the kernel and copies its results to the host. On the emulator, any finding of the checker is a failure here. */
static dw_status run_kernel(dw__trial *t) {
    const dw_device *device = t->context.device;
    DW_RETURN_IF_FAILED(t->variant->kernel->enqueue(t->call, &t->context, t->variant));
    DW_RETURN_IF_FAILED(device->copy_out(t->host, t->device, t->host_bytes, t->stream));
    return device->stream_synchronize(t->stream);
}

static dw_status run_trial(dw__trial *t, dw__variant *variant) {
    const dw__first_use *check = variant->kernel->first_use;
    const dw_device *device = t->context.device;
    dw_status status = DW_OK;
    DW_TRY(check->place(t));
    t->host = dw__malloc(t->host_bytes);
    if (!t->host) DW_TRY(dw__fail_memory("the first-use check of a kernel", t->host_bytes));
    memset(t->host, 0xff, t->host_bytes);
    DW_TRY(check->fill(t));
    DW_TRY(device->allocate(t->bytes, (void **)&t->device));
    check->bind(t);
    if (t->bytes > t->host_bytes)
        DW_TRY(
            device->fill_on(t->device + t->host_bytes, 0xff, t->bytes - t->host_bytes, t->stream));
    DW_TRY(device->copy_in(t->device, t->host, t->host_bytes, t->stream));
    DW_TRY(device->stream_synchronize(t->stream));
    if (check->reference) DW_TRY(check->reference(t));
    DW_TRY(judge(t, run_kernel(t), variant));

cleanup:
    if (t->device) {
        if (status != DW_OK) (void)device->stream_synchronize(t->stream);
        device->release(t->device, t->bytes);
    }
    if (check->release) check->release(t);
    dw__free(t->host);
    return status;
}

dw_status dw__first_use_check(const dw__context *context, dw__variant *variant) {
    const dw__first_use *check = variant->kernel->first_use;
    const dw_device *device = context->device;
    void *stream = NULL, *state = NULL;
    int before = 0;
    bool relaxed = false;
    dw_status status = DW_OK;
    DW_TRY(device->capture_relax(&before));
    relaxed = true;
    DW_TRY(device->stream_create(&stream));
    state = dw__malloc(check->state_bytes);
    if (!state) DW_TRY(dw__fail_memory("the first-use check of a kernel", check->state_bytes));
    for (int i = 0; i < check->count && !variant->disabled; i++) {
        dw__trial t = {
            .context = *context, .variant = variant, .index = i, .stream = stream, .state = state};
        memset(state, 0, check->state_bytes);
        DW_TRY(run_trial(&t, variant));
    }

cleanup:
    dw__free(state);
    if (stream) device->stream_destroy(stream);
    if (relaxed) device->capture_restore(before);
    return status == DW_OK
               ? DW_OK
               : dw__fail_prefix(status, "comparing the kernel with %s", check->against);
}
