/* Measures how long a call takes on this GPU, with operands of its own. */
#include "kernel/gpu_kernel.h"
#include <stdlib.h>

enum { WARMUPS = 3, RUNS = 10, PATTERN_BYTES = 1 << 20 };

/* Fills memory with nearly normal numbers. Zeros would draw less power and run at another clock. */
static dw_status fill(const dw__timing *t, char *memory, void *stream) {
    uint16_t *pattern = dw__malloc(PATTERN_BYTES);
    dw_status status = DW_OK;
    if (!pattern) return dw__fail_memory("random numbers", PATTERN_BYTES);
    for (size_t i = 0; i < PATTERN_BYTES / 2; i++)
        dw__trial_set(pattern, t->dtype, i, dw__trial_normal(7, 0, i));
    for (size_t at = 0; at < t->input_bytes && status == DW_OK; at += PATTERN_BYTES) {
        const size_t left = t->input_bytes - at;
        status = t->device->copy_in(memory + at, pattern,
                                    left < PATTERN_BYTES ? left : PATTERN_BYTES, stream);
    }
    if (status == DW_OK) status = t->device->stream_synchronize(stream);
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
        DW_RETURN_IF_FAILED(t->run(t->state));
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
    DW_TRY(device->stream_create(&stream));
    DW_TRY(device->event_create(&events[0]));
    DW_TRY(device->event_create(&events[1]));
    DW_TRY(device->allocate(t->bytes, (void **)&memory));
    t->bind(t->state, memory, stream);
    DW_TRY(fill(t, memory, stream));
    if (t->before) DW_TRY(t->before(t->state));
    DW_TRY(time_runs(t, stream, events, seconds));

cleanup:
    if (memory) {
        (void)device->stream_synchronize(stream);
        device->release(memory, t->bytes);
    }
    device->event_destroy(events[0]);
    device->event_destroy(events[1]);
    device->stream_destroy(stream);
    return status;
}
