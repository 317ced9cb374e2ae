/* How long our kernels take for a call's shape, with tensors of our own. */
#include "deepwell/explain.h"
#include "kernel/cuda/attention.h"
#include "kernel/tune.h"
#include "number/half.h"
#include "number/philox.h"
#include <stdlib.h>
#include <string.h>

enum { WARMUPS = 3, RUNS = 10, PATTERN_BYTES = 1 << 20 };

/* Device memory for everything that a call needs, in one block. */
typedef struct plan {
    dw_attention call;
    size_t bytes, inputs; /* inputs: the leading part, to be filled with random numbers */
    char *memory;
    void *stream, *events[2];
} plan;

static size_t take(plan *p, size_t bytes) {
    size_t begin = p->bytes;
    p->bytes += (bytes + 255) / 256 * 256;
    return begin;
}

/* The tensor's place, as an offset until there is memory. */
static void lay_out(plan *p, dw_attention_tensor *t, bool of_keys) {
    int64_t heads = of_keys ? p->call.heads_kv : p->call.heads_q,
            rows = of_keys ? p->call.rows_k : p->call.rows_q;
    t->row = p->call.head_dim;
    t->head = rows * t->row;
    t->batch = heads * t->head;
    t->data = (void *)take(p, 2 * (size_t)(p->call.batch * t->batch));
}

static dw_status make_plan(const dw_attention *call, bool backward, plan *p) {
    dw_attention *c = &p->call;
    *c = *call;
    if (c->offsets_q)
        return dw__fail(DW_UNSUPPORTED,
                        "packed sequences are not measured: their lengths decide; measure one of a "
                        "typical length");
    if (dw__attention_has_no_queries(c) || dw__attention_has_no_keys(c))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "there is nothing to measure: the call has no elements");
    c->seed_memory = NULL;
    lay_out(p, &c->q, false);
    lay_out(p, &c->k, true);
    lay_out(p, &c->v, true);
    if (backward) lay_out(p, &c->d_o, false);
    p->inputs = p->bytes;
    lay_out(p, &c->o, false);
    c->lse =
        (float *)take(p, sizeof(float) * (size_t)c->batch * (size_t)c->heads_q * (size_t)c->rows_q);
    if (!backward) return DW_OK;
    lay_out(p, &c->dq, false);
    lay_out(p, &c->dk, true);
    lay_out(p, &c->dv, true);
    DW_RETURN_IF_FAILED(dw_attention_backward_workspace(c, &c->workspace_bytes));
    c->workspace = (void *)take(p, c->workspace_bytes);
    return DW_OK;
}

static void *moved(const plan *p, void *offset) { return p->memory + (uintptr_t)offset; }

/* From offsets to addresses. */
static void place(plan *p, bool backward) {
    dw_attention *c = &p->call;
    dw_attention_tensor *tensors[] = {&c->q, &c->k, &c->v, &c->o, &c->d_o, &c->dq, &c->dk, &c->dv};
    for (size_t i = 0; i < (backward ? 8 : 4); i++) tensors[i]->data = moved(p, tensors[i]->data);
    c->lse = moved(p, c->lse);
    if (backward) c->workspace = moved(p, c->workspace);
    c->stream = p->stream;
}

/* Nearly normal numbers: zeros would draw less power and run at another clock. */
static dw_status fill(plan *p) {
    uint16_t *pattern = dw__malloc(PATTERN_BYTES);
    dw_status status = DW_OK;
    if (!pattern) return dw__fail_memory("random numbers", PATTERN_BYTES);
    for (size_t i = 0; i < PATTERN_BYTES / 2; i++) {
        float u[4];
        dw__philox_uniform4(7, 0, 0, i, u);
        float x = (u[0] + u[1] + u[2] + u[3] - 2.0f) * 1.7320508f;
        pattern[i] = p->call.dtype == DW_F16 ? dw__f32_to_f16(x) : dw__f32_to_bf16(x);
    }
    for (size_t at = 0; at < p->inputs && status == DW_OK; at += PATTERN_BYTES) {
        size_t bytes = p->inputs - at < PATTERN_BYTES ? p->inputs - at : PATTERN_BYTES;
        status = dw__device_cuda.copy_in(p->memory + at, pattern, bytes, p->stream);
    }
    if (status == DW_OK) status = dw__device_cuda.stream_synchronize(p->stream);
    dw__free(pattern);
    return status;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static dw_status time_runs(plan *p, bool backward, double *seconds) {
    double times[RUNS];
    for (int i = -WARMUPS; i < RUNS; i++) {
        DW_RETURN_IF_FAILED(dw__device_cuda.event_record(p->events[0], p->stream));
        DW_RETURN_IF_FAILED(backward ? dw_attention_backward(&p->call)
                                     : dw_attention_forward(&p->call));
        DW_RETURN_IF_FAILED(dw__device_cuda.event_record(p->events[1], p->stream));
        double now;
        DW_RETURN_IF_FAILED(dw__device_cuda.event_seconds(p->events[0], p->events[1], &now));
        if (i >= 0) times[i] = now;
    }
    qsort(times, RUNS, sizeof times[0], by_size);
    *seconds = 0.5 * (times[RUNS / 2 - 1] + times[RUNS / 2]);
    return DW_OK;
}

dw_status dw_attention_measure(const dw_attention *call, bool backward, double *seconds) {
    const dw_device *cuda = &dw__device_cuda;
    dw_status status = DW_OK;
    plan p = {0};
    char shape_class[256];
    dw_attention bare;
    DW_RETURN_IF_FAILED(dw__attention_read(call, &bare));
    dw_attention_tensor none = {0}; /* only the shape counts */
    bare.kernel = NULL;
    bare.q = bare.k = bare.v = bare.o = bare.d_o = bare.dq = bare.dk = bare.dv = none;
    DW_TRY(make_plan(&bare, backward, &p));
    DW_TRY(dw_attention_class(&p.call, backward, shape_class, sizeof shape_class));
    DW_TRY(cuda->stream_create(&p.stream));
    DW_TRY(cuda->event_create(&p.events[0]));
    DW_TRY(cuda->event_create(&p.events[1]));
    DW_TRY(cuda->allocate(p.bytes, (void **)&p.memory));
    place(&p, backward);
    DW_TRY(fill(&p));
    if (backward) DW_TRY(dw_attention_forward(&p.call));
    DW_TRY(time_runs(&p, backward, seconds));
    DW_TRY(dw_tune_record(shape_class, "deepwell", *seconds));

cleanup:
    if (p.memory) {
        (void)cuda->stream_synchronize(p.stream);
        cuda->release(p.memory, p.bytes);
    }
    cuda->event_destroy(p.events[0]);
    cuda->event_destroy(p.events[1]);
    cuda->stream_destroy(p.stream);
    return status;
}
