/* Measures this machine: each GPU alone, then all GPUs together.
 *
 * If a measurement fails, the figure stays as it was and a remark gives the reason; the probe does not fail. Contexts
 * created here live as long as the process, as everywhere in the library. */
#include "hardware/measure.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SERIES = 5, NON_BLOCKING = 1 };

/* ---- one GPU --------------------------------------------------------------------------------- */

dw_status dw__bench_begin(const dw__cuda *cuda, int gpu, dw__bench *bench) {
    void *context = NULL;
    int device = 0;
    *bench = (dw__bench){.cuda = cuda};
    int result = cuda->device_get(&device, gpu);
    if (result == 0) result = cuda->primary_retain(&context, device);
    if (result == 0) result = cuda->context_set_current(context);
    if (result == 0) result = cuda->stream_create(&bench->stream, NON_BLOCKING);
    if (result == 0) result = cuda->event_create(&bench->from, 0);
    if (result == 0) result = cuda->event_create(&bench->to, 0);
    if (result == 0) return DW_OK;
    dw__bench_end(bench);
    return dw__cuda_fail(result, "a context, a stream and events on GPU %d", gpu);
}

void dw__bench_end(dw__bench *bench) {
    if (bench->from) bench->cuda->event_destroy(bench->from);
    if (bench->to) bench->cuda->event_destroy(bench->to);
    if (bench->stream) bench->cuda->stream_destroy(bench->stream);
    bench->stream = bench->from = bench->to = NULL;
}

dw_status dw__bench_allocate(const dw__bench *bench, size_t bytes, const void *block,
                             size_t block_bytes, dw__cu_address *address) {
    const dw__cuda *cuda = bench->cuda;
    *address = 0;
    int result = cuda->memory_allocate(address, bytes);
    if (result != 0) {
        *address = 0;
        return dw__cuda_fail(result, "%zu bytes of GPU memory", bytes);
    }
    for (size_t at = 0; at < bytes && result == 0; at += block_bytes) {
        size_t part = bytes - at < block_bytes ? bytes - at : block_bytes;
        result = cuda->copy_in(*address + at, block, part, bench->stream);
    }
    /* The caller may free the block after this function returns. */
    if (result == 0) result = cuda->stream_synchronize(bench->stream);
    if (result == 0) return DW_OK;
    dw__bench_release(bench, *address);
    *address = 0;
    return dw__cuda_fail(result, "filling %zu bytes of GPU memory", bytes);
}

void dw__bench_release(const dw__bench *bench, dw__cu_address address) {
    if (address) bench->cuda->memory_release(address);
}

static int compare(const void *one, const void *other) {
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

dw_status dw__bench_time(const dw__bench *bench, int calls, dw__bench_run *run, void *context,
                         double *seconds) {
    const dw__cuda *cuda = bench->cuda;
    double times[SERIES];
    for (int series = -1; series < SERIES; series++) {
        float milliseconds = 0;
        int result = cuda->event_record(bench->from, bench->stream);
        for (int i = 0; i < calls && result == 0; i++) DW_RETURN_IF_FAILED(run(bench, context));
        if (result == 0) result = cuda->event_record(bench->to, bench->stream);
        if (result == 0) result = cuda->event_synchronize(bench->to);
        if (result == 0) result = cuda->event_elapsed(&milliseconds, bench->from, bench->to);
        if (result != 0) return dw__cuda_fail(result, "timing");
        if (series >= 0) times[series] = 1e-3 * (double)milliseconds / calls;
    }
    qsort(times, SERIES, sizeof times[0], compare);
    *seconds = times[SERIES / 2];
    if (*seconds > 0) return DW_OK;
    return dw__fail(DW_STATE, "the time of %d calls is %g s; expected more", calls, *seconds);
}

void dw__bench_random(dw_rate type, void *block, size_t bytes) {
    uint64_t random = UINT64_C(0x9E3779B97F4A7C15);
    size_t width = type >= DW_RATE_FP8 ? 1 : type == DW_RATE_BF16 ? 2 : 4;
    for (size_t at = 0; at + width <= bytes; at += width) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        float value = (float)(int32_t)(random >> 32) / 2147483648.0f;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        if (width == 2) bits >>= 16;
        /* E4M3 with an exponent field of at most 6 (bias 7). Any two E2M1 codes are numbers. */
        if (width == 1) bits = (uint32_t)random & (type == DW_RATE_FP4 ? 0xFF : 0xB7);
        memcpy((char *)block + at, &bits, width); /* little endian, like the GPU */
    }
}

/* ---- copies ---------------------------------------------------------------------------------- */

typedef struct copy {
    dw__cu_address to, from;
    void *host;
    size_t bytes;
} copy;

static dw_status copy_within(const dw__bench *bench, void *context) {
    const copy *c = context;
    int result = bench->cuda->copy(c->to, c->from, c->bytes, bench->stream);
    return result == 0 ? DW_OK : dw__cuda_fail(result, "a copy within the GPU's memory");
}

static dw_status copy_in(const dw__bench *bench, void *context) {
    const copy *c = context;
    int result = bench->cuda->copy_in(c->to, c->host, c->bytes, bench->stream);
    return result == 0 ? DW_OK : dw__cuda_fail(result, "a copy to the GPU");
}

static dw_status copy_out(const dw__bench *bench, void *context) {
    const copy *c = context;
    int result = bench->cuda->copy_out(c->host, c->from, c->bytes, bench->stream);
    return result == 0 ? DW_OK : dw__cuda_fail(result, "a copy from the GPU");
}

static dw_figure measured(double value, const char *source) {
    return (dw_figure){value, DW_FIGURE_MEASURED, source};
}

dw_status dw__measure_copies(const dw__bench *bench, const dw__machine_options *options,
                             dw_machine_gpu *gpu) {
    enum { CALLS = 8, HOST_CALLS = 2 };
    const dw__cuda *cuda = bench->cuda;
    copy c = {.bytes = options->copy_bytes};
    double within, in, out;
    dw_status status = DW_OK;
    size_t host_bytes = options->copy_bytes / 4;
    int result =
        cuda->host_allocate(&c.host, host_bytes); /* pinned: pageable memory copies slowly */
    if (result != 0) {
        c.host = NULL;
        DW_TRY(dw__cuda_fail(result, "%zu bytes of pinned host memory", host_bytes));
    }
    dw__bench_random(DW_RATE_FP32, c.host, host_bytes);
    DW_TRY(dw__bench_allocate(bench, c.bytes, c.host, host_bytes, &c.from));
    DW_TRY(dw__bench_allocate(bench, c.bytes, c.host, host_bytes, &c.to));
    DW_TRY(dw__bench_time(bench, CALLS, copy_within, &c, &within));
    gpu->copy_bandwidth =
        measured(2.0 * (double)c.bytes / within, "a copy: bytes read and written");
    c.bytes = host_bytes;
    DW_TRY(dw__bench_time(bench, HOST_CALLS, copy_in, &c, &in));
    DW_TRY(dw__bench_time(bench, HOST_CALLS, copy_out, &c, &out));
    gpu->host_bandwidth = measured((double)host_bytes / (in > out ? in : out),
                                   "copies from and to pinned memory, the slower direction");
cleanup:
    dw__bench_release(bench, c.from);
    dw__bench_release(bench, c.to);
    if (c.host) cuda->host_release(c.host);
    return status;
}

/* ---- all measurements ------------------------------------------------------------------------ */

/* Turns a failed measurement into a remark with its message, which begins with `what`. */
static dw_status unless_done(dw__machine *m, dw_status status, const char *what) {
    return status == DW_OK ? DW_OK
                           : dw__machine_remark(m, "not measured: %s: %s", what, dw_last_error());
}

static dw_status measure_gpu(dw__machine *m, const dw__cuda *cuda, int index) {
    dw_machine_gpu *gpu = &m->gpus.items[index];
    char what[64];
    dw__bench bench;
    snprintf(what, sizeof what, "GPU %d", index);
    dw_status status = dw__bench_begin(cuda, index, &bench);
    if (status != DW_OK) return unless_done(m, status, what);
    snprintf(what, sizeof what, "copies of GPU %d", index);
    status = unless_done(m, dw__measure_copies(&bench, m->options, gpu), what);
    snprintf(what, sizeof what, "GEMMs of GPU %d", index);
    if (status == DW_OK) status = unless_done(m, dw__measure_gemms(&bench, m->options, gpu), what);
    dw__bench_end(&bench);
    return status;
}

dw_status dw__machine_measure(dw__machine *m) {
    const dw__cuda *cuda = NULL;
    void *before = NULL;
    int gpus = (int)m->gpus.count;
    if (gpus == 0) return dw__machine_remark(m, "nothing was measured: there is no GPU");
    DW_RETURN_IF_FAILED(dw__cuda_driver(&cuda));
    bool had_context = cuda->context_current(&before) == 0;
    dw_status status = DW_OK;
    for (int i = 0; i < gpus && status == DW_OK; i++) status = measure_gpu(m, cuda, i);
    if (status == DW_OK && gpus > 1) {
        dw_status reduced =
            dw__measure_all_reduce(cuda, m->options, gpus, &m->public.bus_bandwidth);
        status = unless_done(m, reduced, "the all-reduce");
    }
    if (had_context) cuda->context_set_current(before);
    return status;
}
