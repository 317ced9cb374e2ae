/* The call of deepwell/adamw.h on the CPU. The blocks of all tensors are numbered consecutively and divided into equal
 * tasks. The formula is that of cuda/common/adamw.cu, operation by operation. */
#include "base/isa.h"
#include "base/pool.h"
#include "kernel/cpu/adamw_block.h"
#include "kernel/cpu/rows.h"
#include "kernel/cuda/gpu_adamw.h"
#include <math.h>

DW_ISA_TABLE(dw__adamw_loops)

enum { TASK_BLOCKS = 128 };

typedef struct job {
    const dw_adamw_gpu_group *group;
    const dw_adamw_gpu_tensor *tensor;
    dw__adamw_factors factors;
    int64_t first; /* the tensor's first block, counted over all jobs */
} job;

typedef struct step {
    job *jobs; /* of tensors that have elements; one more has the total in `first` */
    int64_t count;
    double *partials; /* of each task */
} step;

static int64_t blocks_of(int64_t count) { return (count + DW_ADAMW_BLOCK - 1) / DW_ADAMW_BLOCK; }

static const job *job_of(const step *s, int64_t block) {
    int64_t low = 0, high = s->count - 1;
    while (low < high) {
        const int64_t middle = low + (high - low + 1) / 2;
        if (s->jobs[middle].first <= block)
            low = middle;
        else
            high = middle - 1;
    }
    return &s->jobs[low];
}

/* Returns the end of the task's blocks. */
static int64_t task_limit(const step *s, int64_t task) {
    const int64_t limit = (task + 1) * TASK_BLOCKS, all = s->jobs[s->count].first;
    return limit < all ? limit : all;
}

static void update_task(void *context, int64_t task, int worker) {
    (void)worker;
    const step *s = context;
    const dw__adamw_loops *loops = dw__adamw_loops_now();
    int64_t block = task * TASK_BLOCKS;
    const int64_t limit = task_limit(s, task);
    for (const job *j = job_of(s, block); block < limit; block++) {
        if (block == j[1].first) j++;
        loops->update(j->group, j->tensor, &j->factors, block - j->first);
    }
}

static void norm_task(void *context, int64_t task, int worker) {
    (void)worker;
    const step *s = context;
    int64_t block = task * TASK_BLOCKS;
    const int64_t limit = task_limit(s, task);
    double sum = 0.0;
    for (const job *j = job_of(s, block); block < limit; j++) {
        const int64_t stop = j[1].first < limit ? j[1].first : limit;
        const int64_t first = (block - j->first) * DW_ADAMW_BLOCK;
        int64_t count = (stop - block) * DW_ADAMW_BLOCK;
        if (count > j->tensor->count - first) count = j->tensor->count - first;
        const dw_dtype grad = j->group->grad_dtype ? j->group->grad_dtype : j->group->param_dtype;
        sum += dw__adamw_loops_now()->squares(grad, j->tensor->grad, first, count);
        block = stop;
    }
    s->partials[task] = sum;
}

static double norm_of(const step *s, double scale) {
    const int64_t tasks = dw__ceil_div(s->jobs[s->count].first, TASK_BLOCKS);
    double sum = 0.0;
    dw__pool_run(tasks, norm_task, (void *)s);
    for (int64_t i = 0; i < tasks; i++) sum += s->partials[i];
    return sqrt(sum) / fabs(scale);
}

/* x^n, multiplied in the order of the GPU's kernel. */
static double power(double x, uint32_t n) {
    double result = 1.0;
    for (; n; n /= 2, x *= x)
        if (n % 2) result *= x;
    return result;
}

static dw__adamw_factors factors_of(const dw_adamw_gpu *c, const dw_adamw_gpu_group *g, float count,
                                    double scale, float clip) {
    const float beta1 = (float)g->beta1, beta2 = (float)g->beta2;
    const double lr = g->lr_at ? (double)*g->lr_at : g->lr;
    return (dw__adamw_factors){
        .unscale = (float)(1.0 / scale),
        .clip = g->maximize ? -clip : clip,
        .decay = (float)lr * (float)g->weight_decay,
        .beta1 = beta1,
        .beta2 = beta2,
        .one_minus_beta1 = 1.0f - beta1,
        .one_minus_beta2 = 1.0f - beta2,
        .step_size = (float)(lr / (1.0 - power((double)beta1, (uint32_t)count))),
        .inverse_root = (float)(1.0 / sqrt(1.0 - power((double)beta2, (uint32_t)count))),
        .eps = (float)g->eps,
        .step = (uint32_t)count,
        .store_gradients = c->grad_scale != NULL,
    };
}

static void run_step(const dw_adamw_gpu *c, step *s) {
    const bool clips = c->max_norm > 0.0;
    const double scale = c->grad_scale ? (double)*c->grad_scale : 1.0;
    const double norm = clips ? norm_of(s, scale) : 0.0;
    const double factor = clips ? c->max_norm / (norm + 1e-6) : 1.0;
    const bool skip =
        (c->found_inf && *c->found_inf == 1.0f) || (clips && c->finite_only && !isfinite(norm));
    if (c->norm) *c->norm = (float)norm;
    if (c->outcome) *c->outcome = (dw_adamw_gpu_outcome){norm, !skip};
    if (skip) return;
    int64_t at = 0;
    for (uint32_t i = 0; i < c->group_count; i++)
        for (uint32_t k = 0; k < c->groups[i].count; k++) {
            const dw_adamw_gpu_tensor *t = &c->groups[i].tensors[k];
            const float count = *t->step += 1.0f;
            if (t->count == 0) continue;
            s->jobs[at++].factors =
                factors_of(c, &c->groups[i], count, scale, (float)(factor > 1.0 ? 1.0 : factor));
        }
    dw__pool_run(dw__ceil_div(s->jobs[s->count].first, TASK_BLOCKS), update_task, s);
}

dw_status dw__adamw_cpu_run(const dw_adamw_gpu *c) {
    step s = {0};
    int64_t tensors = 0, blocks = 0;
    for (uint32_t i = 0; i < c->group_count; i++) tensors += c->groups[i].count;
    const size_t bytes = (size_t)(tensors + 1) * sizeof *s.jobs;
    s.jobs = dw__malloc(bytes);
    if (!s.jobs) return dw__fail_memory("the list of an AdamW step's tensors", bytes);
    for (uint32_t i = 0; i < c->group_count; i++)
        for (uint32_t k = 0; k < c->groups[i].count; k++) {
            const dw_adamw_gpu_tensor *t = &c->groups[i].tensors[k];
            if (t->count == 0) continue;
            s.jobs[s.count++] = (job){.group = &c->groups[i], .tensor = t, .first = blocks};
            blocks += blocks_of(t->count);
        }
    s.jobs[s.count] = (job){.first = blocks};
    const size_t partials = (size_t)(dw__ceil_div(blocks, TASK_BLOCKS) + 1) * sizeof(double);
    s.partials = dw__malloc(partials);
    if (s.partials) run_step(c, &s);
    const dw_status status =
        s.partials ? DW_OK : dw__fail_memory("the norm of an AdamW step", partials);
    dw__free(s.partials);
    dw__free(s.jobs);
    return status;
}
