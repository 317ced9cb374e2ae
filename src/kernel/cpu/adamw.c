/* AdamW (Loshchilov and Hutter 2019, algorithm 2) in one pass over memory: four streams in, three out. The
 * elements of all tensors are numbered consecutively and divided into equal tasks, so that the threads share
 * thousands of small tensors as evenly as one large tensor. */
#include "base/pool.h"
#include "deepwell/engine.h"
#include "kernel/cpu/cpu.h"
#include "kernel/cpu/loss.h"
#include "kernel/cpu/rows.h"
#include <inttypes.h>
#include <math.h>

DW_ISA_TABLE(dw__loss_loops)

enum { TASK_ELEMENTS = 16 * 1024 };

static dw__adamw_constants make_constants(const dw_adamw_options *options) {
    double correction1 = 1.0 - pow(options->beta1, (double)options->step);
    double correction2 = 1.0 - pow(options->beta2, (double)options->step);
    double scale = options->maximize ? -options->grad_scale : options->grad_scale;
    return (dw__adamw_constants){
        .grad_scale = (float)scale,
        .decay = (float)(1.0 - options->lr * options->weight_decay),
        .one_minus_beta1 = (float)(1.0 - options->beta1),
        .beta2 = (float)options->beta2,
        .one_minus_beta2 = (float)(1.0 - options->beta2),
        .inverse_sqrt_correction2 = (float)(1.0 / sqrt(correction2)),
        .eps = (float)options->eps,
        .step_size = (float)(options->lr / correction1),
    };
}

/* ---- many tensors ---------------------------------------------------------------------------- */

typedef struct update {
    const dw_adamw_tensor *tensors;
    uint32_t count;
    int64_t *starts; /* first element of each tensor; starts[count] is the total */
    dw__adamw_constants constants;
} update;

/* Returns the last tensor that starts at or before `element`. */
static uint32_t tensor_of(const update *u, int64_t element) {
    uint32_t low = 0, high = u->count - 1;
    while (low < high) {
        uint32_t middle = low + (high - low + 1) / 2;
        if (u->starts[middle] <= element)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

static void update_task(void *context, int64_t task, int worker) {
    (void)worker;
    const update *u = context;
    int64_t at = task * TASK_ELEMENTS, limit = at + TASK_ELEMENTS;
    if (limit > u->starts[u->count]) limit = u->starts[u->count];
    for (uint32_t i = tensor_of(u, at); at < limit; i++) {
        const dw_adamw_tensor *t = &u->tensors[i];
        int64_t first = at - u->starts[i], stop = u->starts[i + 1];
        if (stop > limit) stop = limit;
        float *p = t->param + first, *m = t->exp_avg + first, *v = t->exp_avg_sq + first;
        if (stop > at)
            dw__loss_loops_now()->adamw(stop - at, &u->constants, p, t->grad + first, m, v, p, m,
                                        v);
        at = stop;
    }
}

static dw_status check_options(const dw_adamw_options *o) {
    static const dw__struct known = {"dw_adamw_options", sizeof *o, {0}};
    DW_RETURN_IF_FAILED(dw__struct_read(&known, o, NULL));
    if (o->step < 1)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "dw_adamw_step: step is %" PRId64 "; the first update is step 1", o->step);
    if (!(o->beta1 >= 0.0 && o->beta1 < 1.0 && o->beta2 >= 0.0 && o->beta2 < 1.0))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "dw_adamw_step: betas are %g and %g; each must be in [0, 1)", o->beta1,
                        o->beta2);
    if (!(o->lr >= 0.0 && o->eps >= 0.0 && o->weight_decay >= 0.0))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "dw_adamw_step: lr %g, eps %g and weight_decay %g must not be negative or "
                        "NaN",
                        o->lr, o->eps, o->weight_decay);
    return DW_OK;
}

static dw_status check_tensors(const dw_adamw_tensor *tensors, uint32_t count) {
    if (!tensors && count > 0)
        return dw__fail(DW_INVALID_ARGUMENT, "dw_adamw_step: tensors is NULL but count is %" PRIu32,
                        count);
    for (uint32_t i = 0; i < count; i++) {
        const dw_adamw_tensor *t = &tensors[i];
        if (t->count < 0)
            return dw__fail(DW_INVALID_ARGUMENT,
                            "dw_adamw_step: tensor %" PRIu32 " has %" PRId64 " elements", i,
                            t->count);
        if (t->count > 0 && (!t->param || !t->grad || !t->exp_avg || !t->exp_avg_sq))
            return dw__fail(DW_INVALID_ARGUMENT,
                            "dw_adamw_step: tensor %" PRIu32 " lacks its param, grad, exp_avg or "
                            "exp_avg_sq; leave out tensors that have no gradient",
                            i);
    }
    return DW_OK;
}

dw_status dw_adamw_step(const dw_adamw_tensor *tensors, uint32_t count,
                        const dw_adamw_options *options) {
    DW_RETURN_IF_FAILED(check_options(options));
    DW_RETURN_IF_FAILED(check_tensors(tensors, count));
    size_t bytes = ((size_t)count + 1) * sizeof(int64_t);
    update u = {.tensors = tensors, .count = count, .constants = make_constants(options)};
    u.starts = dw__malloc(bytes);
    if (!u.starts) return dw__fail_memory("the offsets of an AdamW step's tensors", bytes);
    u.starts[0] = 0;
    for (uint32_t i = 0; i < count; i++) u.starts[i + 1] = u.starts[i] + tensors[i].count;
    dw__pool_run(dw__ceil_div(u.starts[count], TASK_ELEMENTS), update_task, &u);
    dw__free(u.starts);
    return DW_OK;
}

/* ---- the operation --------------------------------------------------------------------------- */

typedef struct node_run {
    const dw__call *call;
    dw__adamw_constants constants;
    int64_t count;
} node_run;

static void node_task(void *context, int64_t task, int worker) {
    (void)worker;
    const node_run *run = context;
    int64_t first = task * TASK_ELEMENTS, count = run->count - first;
    if (count > TASK_ELEMENTS) count = TASK_ELEMENTS;
    const float *in[4];
    float *out[3];
    for (int i = 0; i < 4; i++) in[i] = (const float *)run->call->inputs[i].data + first;
    for (int i = 0; i < 3; i++) {
        float *start = run->call->outputs[i].data;
        out[i] = start ? start + first : NULL;
    }
    dw__loss_loops_now()->adamw(count, &run->constants, in[0], in[1], in[2], in[3], out[0], out[1],
                                out[2]);
}

static dw_status supports(const dw__kernel *kernel, const void *given, const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    for (int i = 0; i < 4; i++)
        if (call->inputs[i].dtype != DW_F32 || !dw__tensor_is_contiguous(&call->inputs[i]))
            return dw__kernel_refuse(kernel);
    for (int i = 0; i < 3; i++)
        if (!dw__tensor_is_contiguous(&call->outputs[i])) return dw__kernel_refuse(kernel);
    return call->inputs[4].dtype == DW_I64 ? DW_OK : dw__kernel_refuse(kernel);
}

static dw_status run(const dw__call *call, void *scratch) {
    (void)scratch;
    dw_adamw_options options = {.struct_size = sizeof options,
                                .lr = dw__call_float(call, DW_ATTR_KEY_LR, 0.0),
                                .beta1 = dw__call_float(call, DW_ATTR_KEY_BETA1, 0.0),
                                .beta2 = dw__call_float(call, DW_ATTR_KEY_BETA2, 0.0),
                                .eps = dw__call_float(call, DW_ATTR_KEY_EPS, 0.0),
                                .weight_decay = dw__call_float(call, DW_ATTR_KEY_WEIGHT_DECAY, 0.0),
                                .grad_scale = 1.0,
                                .step = *(const int64_t *)call->inputs[4].data};
    DW_RETURN_IF_FAILED(check_options(&options));
    node_run node = {call, make_constants(&options), dw__tensor_count(&call->inputs[0])};
    dw__pool_run(dw__ceil_div(node.count, TASK_ELEMENTS), node_task, &node);
    return DW_OK;
}

const dw__kernel dw__cpu_adamw = {.name = "cpu.adamw.stream",
                                  .op = DW_OP_ADAMW,
                                  .source = "ours, one pass",
                                  .needs = "contiguous F32, and an I64 step",
                                  .supports = supports,
                                  .run = run,
                                  .tolerance_factor = 8.0};
