/* The attention kernels: the fast ones in every variant that changes their code, and the reference. Backward receives O
 * and LSE of the definition in FP64, so that each kernel is compared separately. */
#include "machine_attention.h"
#include "number/half.h"
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* ---- cases ----------------------------------------------------------------------------------- */

enum { MOST_CASES = 256, MOST_SEQUENCES = 4 };
static attention_case cases[MOST_CASES];
static size_t case_count;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void add(attention_case c, bool backward) {
    dw_attention *call = &c.call;
    call->struct_size = sizeof *call;
    if (call->batch == 0) call->batch = 1;
    if (call->heads_kv == 0) call->heads_kv = 1;
    if (call->heads_q == 0) call->heads_q = call->heads_kv;
    if (call->dtype == 0) call->dtype = DW_BF16;
    /* Powers of two, for cases with exact sums. */
    call->scale = c.data == ATTENTION_ANY ? 1.0f / sqrtf((float)call->head_dim) : 0.125f;
    call->window_left = c.mask == ATTENTION_WINDOW ? 30 : -1;
    call->window_right = c.mask == ATTENTION_WINDOW ? 10 : c.mask == ATTENTION_CAUSAL ? 0 : -1;
    if (call->dropout > 0.0f)
        call->seed = 0x123456789ABC, call->seed_offset = 7,
        call->dropout_stream = ((int64_t)1 << 33) + 5;
    if (c.ends_q) {
        call->total_q = c.ends_q[call->batch], call->total_k = c.ends_k[call->batch];
        for (int b = 0; b < call->batch; b++) {
            const int q = c.ends_q[b + 1] - c.ends_q[b], k = c.ends_k[b + 1] - c.ends_k[b];
            if (q > call->seq_len_q) call->seq_len_q = q;
            if (k > call->seq_len_kv) call->seq_len_kv = k;
        }
    }
    c.backward = backward;
    if (case_count < MOST_CASES) cases[case_count++] = c;
}

static void add_both(attention_case c) { add(c, false), add(c, true); }

static void list_cases(void) {
    static const int32_t ends_q[] = {0, 70, 70, 200}, ends_k[] = {0, 40, 60, 240};
    static const int dims[] = {64, 128, 96, 192, 256};
    for (size_t i = 0; i < DW_COUNT(dims); i++) {
        const int d = dims[i];
        const bool quick = d == 64;
        add_both((attention_case){
            .call = {.head_dim = d, .seq_len_q = 150, .seq_len_kv = 200, .heads_q = 2},
            .quick = quick});
        add_both((attention_case){
            .call = {.head_dim = d, .seq_len_q = 200, .seq_len_kv = 200, .heads_q = 2},
            .mask = ATTENTION_CAUSAL});
        add_both((attention_case){.call = {.head_dim = d,
                                           .seq_len_q = 130,
                                           .seq_len_kv = 190,
                                           .bottom_right = true,
                                           .dtype = DW_F16},
                                  .mask = ATTENTION_CAUSAL});
        for (int data = ATTENTION_UNIFORM; data <= ATTENTION_CHOSEN; data++) {
            attention_case c = {.call = {.head_dim = d, .seq_len_q = 128, .seq_len_kv = 128},
                                .data = (attention_data)data,
                                .quick = quick};
            const bool of_backward = data == ATTENTION_PAIRED_Q || data == ATTENTION_PAIRED_K;
            if (!of_backward) add(c, false);
            add(c, true);
            if (d != 64 && d != 128) continue;
            c.call.dtype = DW_F16, c.quick = false;
            if (!of_backward) add(c, false);
            add(c, true);
        }
    }
    for (int d = 64; d <= 256; d *= 2) {
        const attention_case plain = {.call = {.head_dim = d, .seq_len_q = 150, .seq_len_kv = 170}};
        attention_case c = plain;
        c.mask = ATTENTION_WINDOW, c.call.heads_q = 2;
        add_both(c);
        c = plain, c.mask = ATTENTION_CAUSAL, c.call.softcap = 20.0f;
        add_both(c);
        c = plain, c.mask = ATTENTION_CAUSAL, c.call.dropout = 0.25f;
        add_both(c);
        c = plain, c.ends_q = ends_q, c.ends_k = ends_k, c.call.batch = 3;
        add_both(c);
        c = plain, c.mask = ATTENTION_CAUSAL, c.call.deterministic = true;
        add(c, true);
        c.mask = ATTENTION_ALL, c.call.deterministic = false, c.serial = true, c.call.heads_q = 2;
        add(c, true);
        c = plain, c.ends_q = ends_q, c.ends_k = ends_k, c.call.batch = 3,
        c.mask = ATTENTION_CAUSAL;
        c.call.softcap = 20.0f, c.call.dropout = 0.25f, c.call.deterministic = true;
        add_both(c);
        /* Cases with wide tiles of keys, which kernels use for long sequences. */
        c = plain, c.call.seq_len_q = 64, c.call.seq_len_kv = d == 256 ? 3072 : 1536,
        c.mask = ATTENTION_CAUSAL;
        if (d == 128) c.mask = ATTENTION_ALL;
        c.call.bottom_right = true;
        add(c, false);
    }
    for (int f16 = 0; f16 < 2; f16++) {
        attention_case c = {.call = {.head_dim = 40,
                                     .seq_len_q = 50,
                                     .seq_len_kv = 70,
                                     .heads_q = 2,
                                     .bottom_right = true,
                                     .dtype = f16 ? DW_F16 : DW_BF16},
                            .mask = ATTENTION_CAUSAL,
                            .by_definition = true,
                            .quick = !f16};
        add_both(c);
        c.call.softcap = 20.0f, c.call.dropout = 0.25f, c.quick = false;
        add_both(c);
        attention_case exact = {.call = {.head_dim = 64,
                                         .seq_len_q = 64,
                                         .seq_len_kv = 64,
                                         .dtype = f16 ? DW_F16 : DW_BF16},
                                .by_definition = true,
                                .data = ATTENTION_CHOSEN};
        add_both(exact);
    }
}

static size_t count(void) {
    pthread_once(&once, list_cases);
    return case_count;
}

static void describe(size_t index, char *name, size_t bytes, bool *quick) {
    static const char *const data[] = {"", "-uniform", "-paired-q", "-paired-k", "-chosen"};
    const attention_case *a = &cases[index];
    const dw_attention *c = &a->call;
    size_t length = 0;
#define PART(...) (length += (size_t)snprintf(name + length, bytes - length, __VA_ARGS__))
    PART("attention-%s%s-%s-d%d", a->backward ? "backward" : "forward",
         a->by_definition ? "-by-definition" : "", c->dtype == DW_F16 ? "f16" : "bf16",
         c->head_dim);
    if (c->heads_q > c->heads_kv) PART("-h%d/%d", c->heads_q, c->heads_kv);
    a->ends_q ? PART("-packed") : PART("-s%dx%d", c->seq_len_q, c->seq_len_kv);
    if (a->mask != ATTENTION_ALL) PART(a->mask == ATTENTION_WINDOW ? "-window" : "-causal");
    if (c->bottom_right) PART("-bottom-right");
    if (c->softcap > 0.0f) PART("-softcap%g", (double)c->softcap);
    if (c->dropout > 0.0f) PART("-dropout%g", (double)c->dropout);
    if (c->deterministic) PART("-deterministic");
    if (a->serial) PART("-serial");
    PART("%s", data[a->data]);
#undef PART
    *quick = a->quick;
}

/* ---- inputs ---------------------------------------------------------------------------------- */

typedef struct attention_run {
    attention_case c;
    compare_memory memory;
    compare_random random;
    size_t count_q, count_k, rows; /* elements of q and of k; numbers in lse */
    attention_tensors host;
    attention_results exact;
} attention_run;

static uint16_t bits_of(const attention_run *r, double x) {
    return r->c.call.dtype == DW_F16 ? dw__f32_to_f16((float)x) : dw__f32_to_bf16((float)x);
}

static void fill_any(attention_run *r, uint16_t *to, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] = bits_of(r, compare_bell(&r->random));
}
static void fill_integers(attention_run *r, uint16_t *to, size_t n, int most) {
    for (size_t i = 0; i < n; i++)
        to[i] = bits_of(r, (int)(compare_bits(&r->random) % (unsigned)(2 * most + 1)) - most);
}

/* The cases with exact sums have one head, whose rows are contiguous. */
static void fill_exact(attention_run *r) {
    const attention_case *c = &r->c;
    const size_t d = (size_t)c->call.head_dim;
    const bool paired = c->data == ATTENTION_PAIRED_Q || c->data == ATTENTION_PAIRED_K;
    fill_integers(r, r->host.q, r->count_q, 3);
    fill_integers(r, r->host.k, r->count_k, 3);
    fill_integers(r, r->host.v, r->count_k, paired ? 1 : 4);
    fill_integers(r, r->host.d_o, r->count_q, paired ? 1 : 4);
    if (c->data == ATTENTION_PAIRED_K)
        memset(r->host.k, 0, 2 * r->count_k);
    else if (c->data != ATTENTION_CHOSEN)
        memset(r->host.q, 0, 2 * r->count_q);
    for (size_t i = 0; paired && i < r->count_k; i++)
        if (i / d % 2 == 1)
            r->host.v[i] = r->host.v[i - d] & 0x7FFF ? r->host.v[i - d] ^ 0x8000 : 0;
    if (c->data != ATTENTION_CHOSEN) return;
    /* Query i is equal to key 5 i + 3: their product is far larger than any other. */
    for (size_t i = 0; i < r->count_k; i++)
        r->host.k[i] = bits_of(r, compare_bits(&r->random) >> 31 ? 8 : -8);
    for (size_t i = 0; i < r->count_q; i++)
        r->host.q[i] = r->host.k[(5 * (i / d) + 3) % (size_t)c->call.seq_len_kv * d + i % d];
}

static dw_attention_tensor laid_out(const attention_run *r, int64_t heads, int64_t rows) {
    const int64_t d = r->c.call.head_dim;
    if (r->c.ends_q) return (dw_attention_tensor){.head = d, .row = heads * d};
    return (dw_attention_tensor){.batch = heads * rows * d, .head = rows * d, .row = d};
}

static dw_status prepare(attention_run *r) {
    dw_attention *c = &r->c.call;
    compare_memory *m = &r->memory;
    attention_results *e = &r->exact;
    r->rows =
        (size_t)c->heads_q * (size_t)(r->c.ends_q ? c->total_q : (int64_t)c->batch * c->seq_len_q);
    r->count_q = r->rows * (size_t)c->head_dim;
    r->count_k = (size_t)c->head_dim * (size_t)c->heads_kv *
                 (size_t)(r->c.ends_q ? c->total_k : (int64_t)c->batch * c->seq_len_kv);
    c->q = c->o = c->d_o = c->dq = laid_out(r, c->heads_q, c->seq_len_q);
    c->k = c->v = c->dk = c->dv = laid_out(r, c->heads_kv, c->seq_len_kv);
    uint16_t **const halves[] = {&r->host.q, &r->host.o, &r->host.d_o, &r->host.k, &r->host.v};
    for (size_t i = 0; i < DW_COUNT(halves); i++)
        DW_RETURN_IF_FAILED(
            compare_host(m, 2 * (i < 3 ? r->count_q : r->count_k), (void **)halves[i]));
    DW_RETURN_IF_FAILED(compare_host(m, 4 * r->rows, (void **)&r->host.lse));
    double **const doubles[] = {&e->o,  &e->o_bound,  &e->dq,  &e->dq_bound, &e->dk, &e->dk_bound,
                                &e->dv, &e->dv_bound, &e->lse, &e->lse_bound};
    for (size_t i = 0; i < DW_COUNT(doubles); i++)
        DW_RETURN_IF_FAILED(compare_host(m,
                                         8 * (i < 4   ? r->count_q
                                              : i < 8 ? r->count_k
                                                      : r->rows),
                                         (void **)doubles[i]));
    if (r->c.data != ATTENTION_ANY) {
        fill_exact(r);
        return DW_OK;
    }
    fill_any(r, r->host.q, r->count_q), fill_any(r, r->host.k, r->count_k);
    fill_any(r, r->host.v, r->count_k), fill_any(r, r->host.d_o, r->count_q);
    return DW_OK;
}

/* Computes the definition's results; backward uses the results of its forward, rounded. */
static dw_status define(attention_run *r) {
    attention_case forward = r->c;
    forward.backward = false;
    DW_RETURN_IF_FAILED(attention_define(&forward, &r->host, &r->exact));
    if (!r->c.backward) return DW_OK;
    for (size_t i = 0; i < r->count_q; i++) r->host.o[i] = bits_of(r, r->exact.o[i]);
    for (size_t i = 0; i < r->rows; i++) r->host.lse[i] = (float)r->exact.lse[i];
    return attention_define(&r->c, &r->host, &r->exact);
}

/* ---- running --------------------------------------------------------------------------------- */

static dw_status place_inputs(attention_run *r) {
    dw_attention *c = &r->c.call;
    compare_memory *m = &r->memory;
    DW_RETURN_IF_FAILED(compare_place(m, r->host.q, 2 * r->count_q, &c->q.data));
    DW_RETURN_IF_FAILED(compare_place(m, r->host.k, 2 * r->count_k, &c->k.data));
    DW_RETURN_IF_FAILED(compare_place(m, r->host.v, 2 * r->count_k, &c->v.data));
    if (r->c.ends_q) {
        const size_t bytes = sizeof(int32_t) * ((size_t)c->batch + 1);
        DW_RETURN_IF_FAILED(compare_place(m, r->c.ends_q, bytes, (void **)&c->offsets_q));
        DW_RETURN_IF_FAILED(compare_place(m, r->c.ends_k, bytes, (void **)&c->offsets_k));
    }
    if (!r->c.backward) {
        DW_RETURN_IF_FAILED(compare_empty(m, 2 * r->count_q, &c->o.data));
        return compare_empty(m, 4 * r->rows, (void **)&c->lse);
    }
    DW_RETURN_IF_FAILED(compare_place(m, r->host.o, 2 * r->count_q, &c->o.data));
    DW_RETURN_IF_FAILED(compare_place(m, r->host.lse, 4 * r->rows, (void **)&c->lse));
    DW_RETURN_IF_FAILED(compare_place(m, r->host.d_o, 2 * r->count_q, &c->d_o.data));
    DW_RETURN_IF_FAILED(compare_empty(m, 2 * r->count_q, &c->dq.data));
    DW_RETURN_IF_FAILED(compare_empty(m, 2 * r->count_k, &c->dk.data));
    return compare_empty(m, 2 * r->count_k, &c->dv.data);
}

static dw__attention_shape shape_of(const attention_case *c, dw__attention_pass pass) {
    const int sm_count =
        132; /* SM count of an H200: it decides on `serial` in cases that do not set it */
    dw__attention_shape shape = dw__attention_shape_of(&c->call, pass, sm_count);
    if (c->serial) shape.serial = true;
    return shape;
}

static dw__jit_variant variant(size_t index) {
    const attention_case *c = &cases[index];
    const dw__attention_pass pass = c->backward ? DW__ATTENTION_BACKWARD : DW__ATTENTION_FORWARD;
    if (c->by_definition)
        return dw__attention_reference_variant(c->call.dtype == DW_F16, pass, "sm_90a");
    dw_attention call = c->call;
    call.offsets_q = c->ends_q, call.offsets_k = c->ends_k; /* true if it is packed */
    const dw__attention_shape shape =
        shape_of(&(attention_case){.call = call, .serial = c->serial}, pass);
    return dw__attention_variant(&shape, pass, "", "sm_90a");
}

static dw_status launch(attention_run *r, const dw__context *context) {
    dw_attention *c = &r->c.call;
    const dw__attention_pass pass = r->c.backward ? DW__ATTENTION_BACKWARD : DW__ATTENTION_FORWARD;
    const dw__kernel *kernel =
        r->c.backward ? &dw__sm90_attention_backward : &dw__sm90_attention_forward;
    const dw__variant *loaded;
    const dw__attention_shape shape = shape_of(&r->c, pass);
    dw__attention_workspace workspace;
    DW_RETURN_IF_FAILED(dw__attention_check(c, pass, false));
    if (r->c.by_definition) return dw__gpu_run(&dw__reference_attention[pass], NULL, c, context);
    DW_RETURN_IF_FAILED(dw__variant_of(context, kernel, shape.params, &loaded));
    if (!r->c.backward) return kernel->enqueue(c, context, loaded);
    DW_RETURN_IF_FAILED(dw__attention_workspace_of(c, &shape, context->sm_count, &workspace));
    c->workspace_bytes = workspace.bytes;
    DW_RETURN_IF_FAILED(compare_empty(&r->memory, workspace.bytes, &c->workspace));
    return kernel->enqueue(c, context, loaded);
}

/* Returns which outputs are exact in any order of sums; machines must agree on them. */
static bool is_exact(const attention_case *c, const char *name) {
    if (c->data == ATTENTION_ANY) return false;
    if (strcmp(name, "lse") == 0) return false;
    if (strcmp(name, "dq") == 0)
        return c->data == ATTENTION_PAIRED_Q || c->data == ATTENTION_CHOSEN;
    if (strcmp(name, "dk") == 0)
        return c->data == ATTENTION_PAIRED_K || c->data == ATTENTION_CHOSEN;
    return true;
}

static dw_status give(attention_run *r, compare_sink *sink, const char *name, const void *device,
                      size_t words, const double *exact, const double *bound) {
    const bool lse = strcmp(name, "lse") == 0, known = is_exact(&r->c, name);
    compare_output output = {.name = name,
                             .type = lse                         ? COMPARE_F32
                                     : r->c.call.dtype == DW_F16 ? COMPARE_F16
                                                                 : COMPARE_BF16,
                             .count = words,
                             .exact = exact,
                             .bound = known ? NULL : bound};
    DW_RETURN_IF_FAILED(compare_fetch(&r->memory, device, words * compare_width(output.type),
                                      (void **)&output.words));
    return compare_emit(sink, &output);
}

static dw_status run(size_t index, const dw__context *context, compare_sink *sink) {
    dw_status status = DW_OK;
    attention_run r = {.c = cases[index]};
    const dw_attention *c = &r.c.call;
    const attention_results *e = &r.exact;
    char name[160];
    bool quick;
    describe(index, name, sizeof name, &quick);
    r.random = compare_seed(name);
    DW_TRY(prepare(&r));
    DW_TRY(define(&r));
    DW_TRY(place_inputs(&r));
    DW_TRY(launch(&r, context));
    if (!r.c.backward) {
        DW_TRY(give(&r, sink, "o", c->o.data, r.count_q, e->o, e->o_bound));
        DW_TRY(give(&r, sink, "lse", c->lse, r.rows, e->lse, e->lse_bound));
    } else {
        DW_TRY(give(&r, sink, "dq", c->dq.data, r.count_q, e->dq, e->dq_bound));
        DW_TRY(give(&r, sink, "dk", c->dk.data, r.count_k, e->dk, e->dk_bound));
        DW_TRY(give(&r, sink, "dv", c->dv.data, r.count_k, e->dv, e->dv_bound));
    }

cleanup:
    compare_release(&r.memory);
    return status;
}

const compare_family compare_attention = {
    .count = count, .describe = describe, .variant = variant, .run = run};
