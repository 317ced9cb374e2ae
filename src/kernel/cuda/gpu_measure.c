/* Measures how long a call takes on this GPU, with operands of its own. */
#include "kernel/gpu_kernel.h"
#include <stdlib.h>
#include <string.h>

enum { WARMUPS = 3, RUNS = 10, PATTERN_BYTES = 1 << 20 };

static size_t padded(size_t bytes) { return (bytes + 255) / 256 * 256; }

void dw__timing_add(dw__timing *t, void *member, size_t bytes, bool random) {
    t->parts[t->count].member = member;
    t->parts[t->count].bytes = bytes;
    t->parts[t->count++].random = random;
}

static dw_status copy_pattern(const dw__timing *t, const uint16_t *pattern, char *to, size_t bytes,
                              void *stream) {
    for (size_t at = 0; at < bytes; at += PATTERN_BYTES) {
        const size_t left = bytes - at;
        DW_RETURN_IF_FAILED(t->device->copy_in(
            to + at, pattern, left < PATTERN_BYTES ? left : PATTERN_BYTES, stream));
    }
    return DW_OK;
}

/* Gives the parts their addresses. Fills operands with nearly normal numbers: zeros would draw less power and run at
 * another clock. */
static dw_status fill(const dw__timing *t, char *memory, void *stream) {
    uint16_t *pattern = dw__malloc(PATTERN_BYTES);
    dw_status status = DW_OK;
    if (!pattern) return dw__fail_memory("random numbers", PATTERN_BYTES);
    for (size_t i = 0; i < PATTERN_BYTES / 2; i++)
        dw__trial_set(pattern, t->dtype, i, dw__trial_normal(7, 0, i));
    for (size_t i = 0; i < t->count; memory += padded(t->parts[i++].bytes)) {
        memcpy(t->parts[i].member, &memory, sizeof memory);
        if (t->parts[i].random) DW_TRY(copy_pattern(t, pattern, memory, t->parts[i].bytes, stream));
    }
    DW_TRY(t->device->stream_synchronize(stream));

cleanup:
    if (status != DW_OK) (void)t->device->stream_synchronize(stream);
    dw__free(pattern);
    return status;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static dw_status time_runs(const dw__timing *t, void *stream, void *const *events,
                           double *seconds) {
    double times[RUNS];
    for (int i = -WARMUPS; i < RUNS; i++) {
        double now;
        DW_RETURN_IF_FAILED(t->device->event_record(events[0], stream));
        DW_RETURN_IF_FAILED(t->run(t->call));
        DW_RETURN_IF_FAILED(t->device->event_record(events[1], stream));
        DW_RETURN_IF_FAILED(t->device->event_seconds(events[0], events[1], &now));
        if (i >= 0) times[i] = now;
    }
    qsort(times, RUNS, sizeof times[0], by_size);
    *seconds = 0.5 * (times[RUNS / 2 - 1] + times[RUNS / 2]);
    return DW_OK;
}

dw_status dw__gpu_measure(const dw__timing *t, double *seconds) {
    const dw_device *device = t->device;
    dw_status status = DW_OK;
    void *stream = NULL, *events[2] = {NULL, NULL};
    char *memory = NULL;
    size_t bytes = 0;
    DW_TRY(device->stream_create(&stream));
    DW_TRY(device->event_create(&events[0]));
    DW_TRY(device->event_create(&events[1]));
    for (size_t i = 0; i < t->count; i++) bytes += padded(t->parts[i].bytes);
    DW_TRY(device->allocate(bytes, (void **)&memory));
    *t->stream = stream;
    DW_TRY(fill(t, memory, stream));
    if (t->before) DW_TRY(t->before(t->call));
    DW_TRY(time_runs(t, stream, events, seconds));

cleanup:
    if (memory) {
        (void)device->stream_synchronize(stream);
        device->release(memory, bytes);
    }
    device->event_destroy(events[0]);
    device->event_destroy(events[1]);
    device->stream_destroy(stream);
    return status;
}
