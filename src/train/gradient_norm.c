#include "train/gradient_norm.h"
#include "base/pool.h"
#include <math.h>

enum { TASK_ELEMENTS = 64 * 1024, LANES = 8 };

static int64_t task_count(int64_t count) { return (count + TASK_ELEMENTS - 1) / TASK_ELEMENTS; }

size_t dw__norm_scratch(int64_t count) { return (size_t)task_count(count) * sizeof(double); }

typedef struct pass {
    float *to;
    const float *from;
    int64_t count;
    double *sums;
} pass;

static int64_t task_end(const pass *p, int64_t task) {
    int64_t end = (task + 1) * TASK_ELEMENTS;
    return end < p->count ? end : p->count;
}

static void sum_task(void *context, int64_t task, int worker) {
    (void)worker;
    const pass *p = context;
    double lanes[LANES] = {0};
    int64_t i = task * TASK_ELEMENTS, end = task_end(p, task);
    for (; i + LANES <= end; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            double value = p->from[i + lane];
            lanes[lane] += value * value;
        }
    for (; i < end; i++) lanes[0] += (double)p->from[i] * (double)p->from[i];
    double sum = 0.0;
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    p->sums[task] = sum;
}

/* The square of an F32 is at most 2^256 in F64, so no sum of finite elements overflows. */
double dw__square_sum(const float *elements, int64_t count, double *scratch) {
    pass p = {NULL, elements, count, scratch};
    dw__pool_run(task_count(count), sum_task, &p);
    double sum = 0.0;
    for (int64_t i = 0; i < task_count(count); i++) sum += scratch[i];
    return sum;
}

double dw__norm(const float *elements, int64_t count, double *scratch) {
    return sqrt(dw__square_sum(elements, count, scratch));
}

static void add_task(void *context, int64_t task, int worker) {
    (void)worker;
    const pass *p = context;
    for (int64_t i = task * TASK_ELEMENTS, end = task_end(p, task); i < end; i++)
        p->to[i] += p->from[i];
}

void dw__accumulate(float *to, const float *from, int64_t count) {
    pass p = {to, from, count, NULL};
    dw__pool_run(task_count(count), add_task, &p);
}
