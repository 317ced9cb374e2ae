/* The fastest algorithm of a GEMM by cuBLASLt; see lt_algorithm.h.
 *
 * Algorithms of one GEMM may add its products in different orders, so that results differ in their last bits. Therefore
 * a choice is made once for each GPU model and version of the library: the first process that has measured keeps its
 * choice in the file of measurements (kernel/tune.h), and reads back what is kept there, as all others do. If memory is
 * short, the heuristic's first is kept.
 *
 * Runs of all algorithms take turns. Before each run the L2 cache is overwritten. The first algorithm is kept unless
 * another is faster by 3 %.
 *
 * A kernel of ours that computes the same is then measured beside the chosen one, and both times are kept. A GPU that
 * multiplies for some milliseconds is slowed by its power limit, as it is in a training step, and one kernel more than the
 * other; so each runs for some milliseconds without a pause, in turns.
 */
#include "kernel/cuda/lt_algorithm.h"
#include "deepwell/number.h"
#include "jit/jit_internal.h"
#include "kernel/gpu_kernel.h"
#include "kernel/tune.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WARMUPS = 1, RUNS = 5, PATTERN_BYTES = 1 << 18, WORDS = 8, DIGITS = 16, TEXT_BYTES = 160 };
enum { LOADS = 3, LEAST_LOAD_RUNS = 3, MOST_LOAD_RUNS = 32 };
static const double least_flops = 1e9, least_gain = 0.03, load_seconds = 4e-3;
static const char entry[] = "cublaslt"; /* of the class in the file */

static bool is_on(void) {
    const char *value = getenv("DEEPWELL_AUTOTUNE");
    return !value || (strcmp(value, "0") != 0 && strcmp(value, "off") != 0);
}

/* ---- what is kept ------------------------------------------------------------------------------------------- */

/* The algorithm, and behind it the nanoseconds of the other kernel, if that has been measured. */
static void print(const dw__lt_algorithm *algorithm, double other, char text[TEXT_BYTES]) {
    for (int i = 0; i < WORDS; i++)
        snprintf(text + DIGITS * i, DIGITS + 1, "%016llx", (unsigned long long)algorithm->data[i]);
    if (other > 0.0)
        snprintf(text + WORDS * DIGITS, TEXT_BYTES - WORDS * DIGITS, " %.0f", other * 1e9);
}

static bool parse(const char *text, dw__lt_algorithm *algorithm, double *other) {
    const char *end = text + WORDS * DIGITS;
    if (strspn(text, "0123456789abcdef") != WORDS * DIGITS || (*end != '\0' && *end != ' '))
        return false;
    *other = *end == ' ' ? strtod(end, NULL) * 1e-9 : 0.0;
    for (int i = 0; i < WORDS; i++) {
        char word[DIGITS + 1] = "";
        memcpy(word, text + DIGITS * i, DIGITS);
        algorithm->data[i] = strtoull(word, NULL, 16);
    }
    return true;
}

/* Returns whether a choice is kept. It is `chosen`, or the heuristic's first if the library no longer takes it. */
static bool read_choice(const dw__lt_gemm *g, const char *with, size_t most_workspace,
                        dw__lt_algorithm *chosen, double *seconds, double *other) {
    dw__lt_algorithm kept = {.state = 0}, result = {.state = 0};
    dw__tuned found;
    if (dw__tune_read(g->context->name, g->name, entry, &found) != DW_OK ||
        strcmp(found.with, with) != 0 || !parse(found.detail, &kept, other))
        return false;
    if (g->library->check(g->handle, g->product, g->a, g->b, g->c, g->d, kept.data, &result) != 0 ||
        result.state != 0 || result.workspace > most_workspace)
        return true;
    kept.workspace = result.workspace;
    *chosen = kept;
    *seconds = found.seconds;
    return true;
}

typedef struct visitor {
    dw_status (*visit)(void *state, const char *name, double seconds, double other);
    void *state;
} visitor;

static const char beside[] = ", Deepwell "; /* in `with`, in front of the version */

static dw_status visit_measured(void *state, const char *name, const dw__tuned *found) {
    const visitor *v = state;
    const char *of = strstr(found->with, beside);
    dw__lt_algorithm algorithm;
    double other = 0.0;
    if (!of || strcmp(of + strlen(beside), dw_version()) != 0 ||
        !parse(found->detail, &algorithm, &other) || other <= 0.0 || found->seconds <= 0.0)
        return DW_OK;
    return v->visit(v->state, name, found->seconds, other);
}

dw_status dw__lt_each_measured(const char *gpu,
                               dw_status (*visit)(void *state, const char *name, double seconds,
                                                  double other),
                               void *state) {
    visitor v = {visit, state};
    return dw__tune_each(gpu, entry, visit_measured, &v);
}

/* ---- measurement ---------------------------------------------------------------------------------------------- */

typedef struct bench {
    const dw__lt_gemm *gemm;
    const dw_device *device;
    void *stream, *events[MOST_LOAD_RUNS][2]; /* around each run of a load */
    char *memory;
    size_t bytes, workspace_bytes, flush_bytes;
    void *a, *b, *c, *d, *bias, *workspace, *flush;
} bench;

static size_t padded(size_t bytes) { return (bytes + 255) / 256 * 256; }

/* Operands are nearly normal numbers, because zeros would draw less power and run at another clock. */
static dw_status fill(const bench *m, const void *pattern, char *to, size_t bytes) {
    for (size_t at = 0; at < bytes; at += PATTERN_BYTES) {
        const size_t left = bytes - at;
        DW_RETURN_IF_FAILED(m->device->copy_in(
            to + at, pattern, left < PATTERN_BYTES ? left : PATTERN_BYTES, m->stream));
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

static dw_status fill_operands(const bench *m) {
    const dw__lt_gemm *g = m->gemm;
    const struct {
        void *to;
        size_t bytes;
        dw_dtype type;
    } operands[] = {{m->a, g->a_bytes, g->type_a},
                    {m->b, g->b_bytes, g->type_b},
                    {m->c, g->c_bytes, g->type_c}};
    dw_status status = DW_OK;
    void *pattern = NULL;
    DW_RETURN_IF_FAILED(m->device->host_allocate(PATTERN_BYTES, &pattern));
    for (size_t i = 0; i < DW_COUNT(operands); i++) {
        DW_TRY(make_pattern(operands[i].type, pattern));
        DW_TRY(fill(m, pattern, operands[i].to, operands[i].bytes));
        DW_TRY(m->device->stream_synchronize(m->stream)); /* the pattern is made anew */
    }
    if (g->bias_bytes) DW_TRY(m->device->fill_on(m->bias, 0, g->bias_bytes, m->stream));

cleanup:
    if (m->device->stream_synchronize(m->stream) != DW_OK && status == DW_OK) status = DW_DEVICE;
    m->device->host_release(pattern);
    return status;
}

static dw_status open_bench(bench *m, const dw__lt_gemm *g, size_t workspace_bytes) {
    const size_t sizes[] = {g->a_bytes,
                            g->b_bytes,
                            g->c_bytes,
                            g->d_bytes,
                            g->bias_bytes,
                            workspace_bytes,
                            2 * (size_t)g->context->l2_bytes};
    void **const places[] = {&m->a, &m->b, &m->c, &m->d, &m->bias, &m->workspace, &m->flush};
    *m = (bench){.gemm = g,
                 .device = g->context->device,
                 .workspace_bytes = workspace_bytes,
                 .flush_bytes = 2 * (size_t)g->context->l2_bytes};
    for (size_t i = 0; i < DW_COUNT(sizes); i++) m->bytes += padded(sizes[i]);
    DW_RETURN_IF_FAILED(m->device->allocate(m->bytes, (void **)&m->memory));
    char *at = m->memory;
    for (size_t i = 0; i < DW_COUNT(sizes); at += padded(sizes[i++])) *places[i] = at;
    DW_RETURN_IF_FAILED(m->device->stream_create(&m->stream));
    for (size_t i = 0; i < DW_COUNT(m->events); i++)
        for (size_t j = 0; j < DW_COUNT(m->events[i]); j++)
            DW_RETURN_IF_FAILED(m->device->event_create(&m->events[i][j]));
    if (g->bias_bytes)
        DW_RETURN_IF_FAILED(dw__cublaslt_check(
            g->library->product_set(g->product, DW_LT_BIAS_POINTER, &m->bias, sizeof m->bias),
            "cublasLtMatmulDescSetAttribute"));
    return fill_operands(m);
}

static void close_bench(bench *m) {
    if (m->stream) (void)m->device->stream_synchronize(m->stream);
    if (m->memory) m->device->release(m->memory, m->bytes);
    for (size_t i = 0; i < DW_COUNT(m->events); i++)
        for (size_t j = 0; j < DW_COUNT(m->events[i]); j++)
            if (m->events[i][j]) m->device->event_destroy(m->events[i][j]);
    if (m->stream) m->device->stream_destroy(m->stream);
}

/* `algorithm`: NULL for the other kernel. */
static dw_status multiply(const bench *m, const dw__lt_algorithm *algorithm) {
    static const float factors[] = {0.0f, 1.0f};
    const dw__lt_gemm *g = m->gemm;
    const bool adds = g->c_bytes > 0;
    const dw__lt_operands operands = {m->a, m->b, m->d, m->bias, m->workspace, m->stream};
    if (!algorithm) return g->other(g->described, &operands);
    return dw__cublaslt_check(g->library->multiply(g->handle, g->product, &factors[1], m->a, g->a,
                                                   m->b, g->b, &factors[adds], adds ? m->c : m->d,
                                                   g->c, m->d, g->d, algorithm->data, m->workspace,
                                                   algorithm->workspace, m->stream),
                              "cublasLtMatmul");
}

/* The mean of `runs` runs that follow one another. */
static dw_status time_load(const bench *m, const dw__lt_algorithm *algorithm, int runs,
                           double *seconds) {
    double sum = 0.0, now;
    for (int i = 0; i < runs; i++) {
        if (m->flush_bytes)
            DW_RETURN_IF_FAILED(m->device->fill_on(m->flush, 0, m->flush_bytes, m->stream));
        DW_RETURN_IF_FAILED(m->device->event_record(m->events[i][0], m->stream));
        DW_RETURN_IF_FAILED(multiply(m, algorithm));
        DW_RETURN_IF_FAILED(m->device->event_record(m->events[i][1], m->stream));
    }
    for (int i = 0; i < runs; i++) {
        DW_RETURN_IF_FAILED(m->device->event_seconds(m->events[i][0], m->events[i][1], &now));
        sum += now;
    }
    *seconds = sum / runs;
    return DW_OK;
}

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *times, int count) {
    qsort(times, (size_t)count, sizeof times[0], by_size);
    return times[count / 2];
}

/* The fastest by the median of its runs. */
static dw_status measure(const bench *m, const dw__lt_algorithm *algorithms, int count, int *best,
                         double *seconds) {
    double times[DW__LT_MOST_ALGORITHMS][RUNS], now;
    for (int run = -WARMUPS; run < RUNS; run++) {
        for (int i = 0; i < count; i++) {
            const dw_status status = time_load(m, &algorithms[i], 1, &now);
            if (i > 0 && (status == DW_UNSUPPORTED || status == DW_INTERNAL))
                now = HUGE_VAL; /* the library refuses it */
            else
                DW_RETURN_IF_FAILED(status);
            if (run >= 0) times[i][run] = now;
        }
    }
    const double first = *seconds = median(times[0], RUNS);
    for (int i = *best = 0; i < count; i++) {
        const double of_this = median(times[i], RUNS);
        if (of_this >= first * (1.0 - least_gain) || of_this >= *seconds) continue;
        *best = i;
        *seconds = of_this;
    }
    return DW_OK;
}

/* The other kernel beside the library's algorithm, whose `seconds` are measured anew. `other` receives 0 if the kernel does
 * not compute the GEMM. */
static dw_status measure_other(const bench *m, const dw__lt_algorithm *algorithm, double *seconds,
                               double *other) {
    double times[2][LOADS], now;
    const double wanted = load_seconds / *seconds;
    const int runs = (int)fmin(fmax(wanted, LEAST_LOAD_RUNS), MOST_LOAD_RUNS);
    *other = 0.0;
    if (!m->gemm->other || time_load(m, NULL, 1, &now) != DW_OK) return DW_OK;
    for (int load = -WARMUPS; load < LOADS; load++) {
        for (int i = 0; i < 2; i++) {
            DW_RETURN_IF_FAILED(time_load(m, i ? NULL : algorithm, runs, &now));
            if (load >= 0) times[i][load] = now;
        }
    }
    *seconds = median(times[0], LOADS);
    *other = median(times[1], LOADS);
    return DW_OK;
}

/* ---- choice ----------------------------------------------------------------------------------------------------- */

/* Measures, and keeps the choice unless another process has kept one. */
static void make_choice(const dw__lt_gemm *g, const char *with, const dw__lt_algorithm *algorithms,
                        int count) {
    dw_tune_time time = {.name = entry};
    char text[TEXT_BYTES];
    size_t workspace = g->other_workspace > 0 ? g->other_workspace : 1;
    double other = 0.0;
    int best = 0;
    bench m;
    for (int i = 0; i < count; i++)
        if (algorithms[i].workspace > workspace) workspace = algorithms[i].workspace;
    dw_status status = open_bench(&m, g, workspace);
    if (status == DW_OK) status = measure(&m, algorithms, count, &best, &time.seconds);
    if (status == DW_OK) status = measure_other(&m, &algorithms[best], &time.seconds, &other);
    close_bench(&m);
    if (status != DW_OK) {
        best = 0;
        other = 0.0;
        time.failure = dw_last_error();
    }
    print(&algorithms[best], other, text);
    (void)dw__tune_write_detail(g->context->name, g->name, with, &time, text);
}

/* A choice that cannot be kept would differ from run to run. */
static bool can_be_kept(void) {
    dw__private folder;
    const dw_status status = dw__cache_open("tune", true, &folder);
    dw__private_close(&folder);
    return status == DW_OK;
}

void dw__lt_choose(const dw__lt_gemm *g, const dw__lt_algorithm *algorithms, int count,
                   size_t most_workspace, dw__lt_algorithm *chosen, double *seconds,
                   double *other) {
    char with[64];
    *chosen = algorithms[0];
    *seconds = *other = 0.0;
    if (g->flops < least_flops || g->context->device != &dw__device_cuda || !is_on()) return;
    snprintf(with, sizeof with, "cuBLASLt %zu%s%s", g->library->version(), g->other ? beside : "",
             g->other ? dw_version() : "");
    if (read_choice(g, with, most_workspace, chosen, seconds, other) || !can_be_kept()) return;
    make_choice(g, with, algorithms, count);
    (void)read_choice(g, with, most_workspace, chosen, seconds, other);
}
