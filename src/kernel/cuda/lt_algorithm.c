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
 * A kernel of ours that computes the same is then measured beside the chosen one under load (kernel_loads.h), and both
 * times are kept.
 */
#include "kernel/cuda/lt_algorithm.h"
#include "kernel/cuda/kernel_loads.h"
#include "kernel/tune.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WARMUPS = 1, RUNS = 5, WORDS = 8, DIGITS = 16, TEXT_BYTES = 160 };
static const double least_gain = 0.03;
static const char entry[] = "cublaslt"; /* of the class in the file */

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
    const dw__lt_algorithm *algorithms,
        *beside; /* what is measured: the algorithms, or one beside the other kernel */
    dw__loads loads;
    dw__lt_operands operands;
    void *c;
} bench;

static dw_status open_bench(bench *m, const dw__lt_gemm *g, size_t workspace_bytes) {
    dw__lt_operands *o = &m->operands;
    const dw__load_part parts[] = {
        {&o->a, g->a_bytes, true, g->type_a},
        {&o->b, g->b_bytes, true, g->type_b},
        {&m->c, g->c_bytes, true, g->type_c},
        {&o->d, g->d_bytes, false, g->type_c},
        {&o->bias, g->bias_bytes, true, g->type_bias},
        {&o->workspace, workspace_bytes, false, DW_F32},
    };
    DW_RETURN_IF_FAILED(dw__loads_open(&m->loads, g->context, parts, DW_COUNT(parts)));
    if (!g->bias_bytes) return DW_OK;
    return dw__cublaslt_check(
        g->library->product_set(g->product, DW_LT_BIAS_POINTER, &o->bias, sizeof o->bias),
        "cublasLtMatmulDescSetAttribute");
}

static dw_status multiply(const bench *m, const dw__lt_algorithm *algorithm, void *stream) {
    static const float factors[] = {0.0f, 1.0f};
    const dw__lt_gemm *g = m->gemm;
    const dw__lt_operands *o = &m->operands;
    const bool adds = g->c_bytes > 0;
    return dw__cublaslt_check(g->library->multiply(g->handle, g->product, &factors[1], o->a, g->a,
                                                   o->b, g->b, &factors[adds], adds ? m->c : o->d,
                                                   g->c, o->d, g->d, algorithm->data, o->workspace,
                                                   algorithm->workspace, stream),
                              "cublasLtMatmul");
}

static dw_status run_algorithm(const void *state, int which, void *stream) {
    const bench *m = state;
    return multiply(m, &m->algorithms[which], stream);
}

enum { LIBRARY, OTHER, BOTH };

static dw_status run_beside(const void *state, int which, void *stream) {
    const bench *m = state;
    dw__lt_operands operands = m->operands;
    operands.stream = stream;
    return which == LIBRARY ? multiply(m, m->beside, stream)
                            : m->gemm->other(m->gemm->described, &operands);
}

/* The fastest by the median of its runs. */
static dw_status measure(bench *m, int count, int *best, double *seconds) {
    double times[DW__LT_MOST_ALGORITHMS][RUNS], now;
    for (int run = -WARMUPS; run < RUNS; run++) {
        for (int i = 0; i < count; i++) {
            const dw_status status = dw__loads_time(&m->loads, run_algorithm, m, i, 1, &now);
            if (i > 0 && (status == DW_UNSUPPORTED || status == DW_INTERNAL))
                now = HUGE_VAL; /* the library refuses it */
            else
                DW_RETURN_IF_FAILED(status);
            if (run >= 0) times[i][run] = now;
        }
    }
    const double first = *seconds = dw__loads_median(times[0], RUNS);
    for (int i = *best = 0; i < count; i++) {
        const double of_this = dw__loads_median(times[i], RUNS);
        if (of_this >= first * (1.0 - least_gain) || of_this >= *seconds) continue;
        *best = i;
        *seconds = of_this;
    }
    return DW_OK;
}

/* The other kernel beside the library's algorithm, whose `seconds` are measured anew. `other` receives 0 if the kernel does
 * not compute the GEMM. */
static dw_status measure_other(bench *m, const dw__lt_algorithm *algorithm, double *seconds,
                               double *other) {
    double times[BOTH], now;
    *other = 0.0;
    m->beside = algorithm;
    if (!m->gemm->other || dw__loads_time(&m->loads, run_beside, m, OTHER, 1, &now) != DW_OK)
        return DW_OK;
    DW_RETURN_IF_FAILED(dw__loads_compare(&m->loads, run_beside, m, BOTH, *seconds, times));
    *seconds = times[LIBRARY];
    *other = times[OTHER];
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
    bench m = {.gemm = g, .algorithms = algorithms};
    for (int i = 0; i < count; i++)
        if (algorithms[i].workspace > workspace) workspace = algorithms[i].workspace;
    dw_status status = open_bench(&m, g, workspace);
    if (status == DW_OK) status = measure(&m, count, &best, &time.seconds);
    if (status == DW_OK) status = measure_other(&m, &algorithms[best], &time.seconds, &other);
    dw__loads_close(&m.loads);
    if (status != DW_OK) {
        best = 0;
        other = 0.0;
        time.failure = dw_last_error();
    }
    print(&algorithms[best], other, text);
    (void)dw__tune_write_detail(g->context->name, g->name, with, &time, text);
}

void dw__lt_choose(const dw__lt_gemm *g, const dw__lt_algorithm *algorithms, int count,
                   size_t most_workspace, dw__lt_algorithm *chosen, double *seconds,
                   double *other) {
    char with[64];
    *chosen = algorithms[0];
    *seconds = *other = 0.0;
    if (!dw__loads_are_worth_it(g->flops) || !dw__loads_are_wanted(g->context)) return;
    snprintf(with, sizeof with, "cuBLASLt %zu%s%s", g->library->version(), g->other ? beside : "",
             g->other ? dw_version() : "");
    if (read_choice(g, with, most_workspace, chosen, seconds, other)) return;
    make_choice(g, with, algorithms, count);
    (void)read_choice(g, with, most_workspace, chosen, seconds, other);
}
