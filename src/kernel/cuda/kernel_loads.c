/* Kernels that compute the same, measured in turns; see kernel_loads.h. */
#include "kernel/cuda/kernel_loads.h"
#include "deepwell/number.h"
#include "jit/jit_internal.h"
#include "kernel/gpu_kernel.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { WARMUPS = 1, LOADS = 3, LEAST_RUNS = 3, PATTERN_BYTES = 1 << 18 };
static const double load_seconds = 4e-3;

/* ---- whether to measure --------------------------------------------------------------------------------------- */

static bool is_on(void) {
    const char *value = getenv("DEEPWELL_AUTOTUNE");
    return !value || (strcmp(value, "0") != 0 && strcmp(value, "off") != 0);
}

static bool can_be_kept(void) {
    dw__private folder;
    const dw_status status = dw__cache_open("tune", true, &folder);
    dw__private_close(&folder);
    return status == DW_OK;
}

bool dw__loads_are_worth_it(double flops) {
    const double least = 1e9;
    return flops >= least;
}

bool dw__loads_are_wanted(const dw__context *context) {
    return context->device == &dw__device_cuda && is_on() && can_be_kept();
}

/* ---- memory --------------------------------------------------------------------------------------------------- */

static size_t padded(size_t bytes) { return (bytes + 255) / 256 * 256; }

static dw_status fill(const dw__loads *l, const void *pattern, char *to, size_t bytes) {
    for (size_t at = 0; at < bytes; at += PATTERN_BYTES) {
        const size_t left = bytes - at;
        DW_RETURN_IF_FAILED(l->device->copy_in(
            to + at, pattern, left < PATTERN_BYTES ? left : PATTERN_BYTES, l->stream));
    }
    return DW_OK;
}

/* Writes nearly normal numbers, or their codes. */
static dw_status make_pattern(dw_dtype type, void *pattern) {
    enum { CHUNK = 256 };
    const dw_encode_options options = DW_ENCODE_OPTIONS_DEFAULT;
    float numbers[CHUNK];
    if (!dw__dtype_is_code(type)) {
        for (size_t i = 0; i < PATTERN_BYTES / dw_dtype_bytes(type); i++)
            dw__trial_set(pattern, type, i, dw__trial_normal(7, 0, i));
        return DW_OK;
    }
    for (size_t at = 0; at < PATTERN_BYTES; at += CHUNK) {
        for (size_t i = 0; i < CHUNK; i++) numbers[i] = 16.0f * dw__trial_normal(7, 0, at + i);
        DW_RETURN_IF_FAILED(dw_encode(type, CHUNK, numbers, &options, (uint8_t *)pattern + at));
    }
    return DW_OK;
}

static dw_status fill_parts(const dw__loads *l, const dw__load_part *parts, int count) {
    const dw__load_part *before = NULL; /* the part that the pattern was made for */
    dw_status status = DW_OK;
    void *pattern = NULL;
    DW_RETURN_IF_FAILED(l->device->host_allocate(PATTERN_BYTES, &pattern));
    for (int i = 0; i < count; i++) {
        if (!parts[i].read || parts[i].bytes == 0) continue;
        if (!before || before->type != parts[i].type) {
            DW_TRY(l->device->stream_synchronize(l->stream)); /* it may still be copied */
            DW_TRY(make_pattern(parts[i].type, pattern));
            before = &parts[i];
        }
        DW_TRY(fill(l, pattern, *parts[i].place, parts[i].bytes));
    }

cleanup:
    if (l->device->stream_synchronize(l->stream) != DW_OK && status == DW_OK) status = DW_DEVICE;
    l->device->host_release(pattern);
    return status;
}

dw_status dw__loads_open(dw__loads *l, const dw__context *context, const dw__load_part *parts,
                         int count) {
    *l = (dw__loads){.device = context->device, .flush_bytes = 2 * (size_t)context->l2_bytes};
    l->bytes = padded(l->flush_bytes);
    for (int i = 0; i < count; i++) l->bytes += padded(parts[i].bytes);
    DW_RETURN_IF_FAILED(l->device->allocate(l->bytes, (void **)&l->memory));
    char *at = l->memory;
    l->flush = at;
    at += padded(l->flush_bytes);
    for (int i = 0; i < count; at += padded(parts[i++].bytes))
        if (parts[i].bytes > 0) *parts[i].place = at;
    DW_RETURN_IF_FAILED(l->device->stream_create(&l->stream));
    for (size_t i = 0; i < DW_COUNT(l->events); i++)
        for (size_t j = 0; j < DW_COUNT(l->events[i]); j++)
            DW_RETURN_IF_FAILED(l->device->event_create(&l->events[i][j]));
    return fill_parts(l, parts, count);
}

void dw__loads_close(dw__loads *l) {
    if (l->stream) (void)l->device->stream_synchronize(l->stream);
    if (l->memory) l->device->release(l->memory, l->bytes);
    for (size_t i = 0; i < DW_COUNT(l->events); i++)
        for (size_t j = 0; j < DW_COUNT(l->events[i]); j++)
            if (l->events[i][j]) l->device->event_destroy(l->events[i][j]);
    if (l->stream) l->device->stream_destroy(l->stream);
}

/* ---- times ---------------------------------------------------------------------------------------------------- */

dw_status dw__loads_time(const dw__loads *l, dw__load_run run, const void *state, int which,
                         int runs, double *seconds) {
    double sum = 0.0, now;
    for (int i = 0; i < runs; i++) {
        if (l->flush_bytes)
            DW_RETURN_IF_FAILED(l->device->fill_on(l->flush, 0, l->flush_bytes, l->stream));
        DW_RETURN_IF_FAILED(l->device->event_record(l->events[i][0], l->stream));
        DW_RETURN_IF_FAILED(run(state, which, l->stream));
        DW_RETURN_IF_FAILED(l->device->event_record(l->events[i][1], l->stream));
    }
    for (int i = 0; i < runs; i++) {
        DW_RETURN_IF_FAILED(l->device->event_seconds(l->events[i][0], l->events[i][1], &now));
        sum += now;
    }
    *seconds = sum / runs;
    return DW_OK;
}

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double dw__loads_median(double *times, int count) {
    qsort(times, (size_t)count, sizeof times[0], by_size);
    return times[count / 2];
}

dw_status dw__loads_compare(const dw__loads *l, dw__load_run run, const void *state, int count,
                            double about, double *seconds) {
    double times[DW__LOAD_MOST_KERNELS][LOADS], now;
    const int runs = (int)fmin(fmax(load_seconds / about, LEAST_RUNS), DW__LOAD_MOST_RUNS);
    for (int load = -WARMUPS; load < LOADS; load++) {
        for (int i = 0; i < count; i++) {
            DW_RETURN_IF_FAILED(dw__loads_time(l, run, state, i, runs, &now));
            if (load >= 0) times[i][load] = now;
        }
    }
    for (int i = 0; i < count; i++) seconds[i] = dw__loads_median(times[i], LOADS);
    return DW_OK;
}
