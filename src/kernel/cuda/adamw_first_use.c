/* The first-use check of AdamW: a step of small tensors against the formula in FP64. Variants that give the same bits
 * on every device are compared with the CPU, bit for bit. */
#include "common/adamw_params.h"
#include "kernel/cuda/gpu_adamw.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- the definition ---------------------------------------------------------------------------------- */

void dw__adamw_define(const dw_adamw_gpu_group *group, double step, double scale, double clip,
                      dw__adamw_element *e) {
    const double beta1 = (double)(float)group->beta1, beta2 = (double)(float)group->beta2;
    const double decay = group->lr * group->weight_decay, eps = group->eps;
    e->g /= scale;
    const double x = (group->maximize ? -e->g : e->g) * clip;
    e->m_size = beta1 * fabs(e->m) + (1.0 - beta1) * fabs(x);
    e->m = beta1 * e->m + (1.0 - beta1) * x;
    e->v = beta2 * e->v + (1.0 - beta2) * x * x;
    const double factor =
        group->lr / (1.0 - pow(beta1, step)) / (sqrt(e->v) / sqrt(1.0 - pow(beta2, step)) + eps);
    e->p_size = fabs(e->p) + factor * e->m_size;
    e->p = e->p * (1.0 - decay) - factor * e->m;
}

double dw__adamw_bound(dw_dtype type, double value, double size) {
    const double unit = type == DW_BF16 ? 0x1p-8 : type == DW_F16 ? 0x1p-11 : 0x1p-24;
    const double least = type == DW_F16 ? 0x1p-25 : 0x1p-149; /* half the distance of subnormals */
    return unit * fabs(value) + 16 * 0x1p-24 * size + least;
}

/* ---- the trials -------------------------------------------------------------------------------------- */

/* Vectors and a rest over two chunks, one element, no elements, and a tensor that is not aligned to 16 bytes. */
enum { TENSORS_OF_TRIAL = 4, BLOCKS = 6 };
static const int64_t counts[TENSORS_OF_TRIAL] = {DW_ADAMW_CHUNK + 37, 1, 0, 1023};
static const int offsets[TENSORS_OF_TRIAL] = {0, 0, 0, 1};
static const double max_norm = 3.0;
static const float grad_scale = 64.0f;
enum { P, G, M, V, C, S }; /* C: the copies; S: the scales of blocks */

typedef struct state {
    dw__adamw_shape shape;
    bool clips; /* and unscales and ascends */
    dw_adamw_gpu call;
    dw_adamw_gpu_group group;
    dw_adamw_gpu_tensor tensors[TENSORS_OF_TRIAL];
    dw__trial_part *blocks[BLOCKS][TENSORS_OF_TRIAL], *before[BLOCKS][TENSORS_OF_TRIAL];
    dw__trial_part *steps, *scalars;
} state;

static dw_dtype type_of(const state *s, int block) {
    switch (block) {
    case P: return (dw_dtype)s->shape.param;
    case G: return (dw_dtype)s->shape.grad;
    case C: return (dw_dtype)(s->shape.copy ? s->shape.copy : s->shape.param);
    case S: return DW_F32;
    default: return s->shape.state ? (dw_dtype)s->shape.state : DW_F32;
    }
}

static float number(const dw__trial *t, int block, int tensor, int64_t at) {
    const float x =
        dw__trial_normal(2026, (uint32_t)(block + BLOCKS * (tensor + 8 * t->index)), (size_t)at);
    const state *s = t->state;
    switch (block) {
    case G: return s->clips ? x * grad_scale : x;
    case M: return 0.1f * x;
    case V: return 0.01f * x * x;
    case S: return 0.01f + fabsf(x);
    default: return x;
    }
}

static int64_t count_of(int block, int tensor) {
    return block == S ? DW_ADAMW_SCALES(counts[tensor]) : counts[tensor];
}

/* Any byte below is a code of a finite number. */
static const uint32_t codes = 127;

static void fill(dw__trial *t, int block, int tensor, void *host) {
    const state *s = t->state;
    const dw_dtype type = type_of(s, block);
    for (int64_t i = 0; i < count_of(block, tensor); i++) {
        const float x = number(t, block, tensor, i);
        if (type == DW_E4M3)
            ((uint8_t *)host)[i] = (uint8_t)((uint32_t)(fabsf(x) * 4096.0f) % codes);
        else
            dw__trial_set(host, type, (size_t)i, x);
    }
}

static dw_status add_tensor(dw__trial *t, state *s, int tensor) {
    void *device[BLOCKS];
    for (int b = 0; b < BLOCKS; b++) {
        const dw_dtype type = type_of(s, b);
        const size_t width = dw_dtype_bytes(type), shift = (size_t)offsets[tensor] * width,
                     bytes = (size_t)(count_of(b, tensor) + offsets[tensor]) * width + 16;
        DW_RETURN_IF_FAILED(dw__trial_add(t, bytes, &s->blocks[b][tensor]));
        DW_RETURN_IF_FAILED(dw__trial_scratch(t, bytes, &s->before[b][tensor]));
        fill(t, b, tensor, (char *)s->blocks[b][tensor]->host + shift);
        memcpy(s->before[b][tensor]->host, s->blocks[b][tensor]->host, bytes);
        device[b] = (char *)s->blocks[b][tensor]->device + shift;
    }
    ((float *)s->steps->host)[tensor] = (float)(tensor * tensor);
    s->tensors[tensor] = (dw_adamw_gpu_tensor){device[P],
                                               device[G],
                                               device[M],
                                               device[V],
                                               (float *)s->steps->device + tensor,
                                               counts[tensor],
                                               s->shape.copy ? device[C] : NULL,
                                               device[S],
                                               (uint32_t)tensor};
    return DW_OK;
}

static dw_status prepare(dw__trial *t) {
    state *s = t->state;
    dw__trial_part *workspace;
    s->shape.params = t->variant->params;
    s->clips =
        t->index == 1 && !dw__adamw_exact(s->shape); /* the norm is added up in another order */
    t->consequence = ", its calls are refused";
    s->group = (dw_adamw_gpu_group){.param_dtype = (dw_dtype)s->shape.param,
                                    .state_dtype = (dw_dtype)s->shape.state,
                                    .grad_dtype = (dw_dtype)s->shape.grad,
                                    .copy_dtype = (dw_dtype)s->shape.copy,
                                    .tensors = s->tensors,
                                    .count = TENSORS_OF_TRIAL,
                                    .lr = 0.01,
                                    .beta1 = s->shape.state ? 0.9 : 0.0,
                                    .beta2 = s->shape.state ? 0.95 : 0.0,
                                    .eps = 1e-6,
                                    .weight_decay = 0.1,
                                    .maximize = s->clips,
                                    .stochastic = s->shape.stochastic,
                                    .seed = 2026};
    s->call = (dw_adamw_gpu){.struct_size = sizeof s->call,
                             .device = t->context.device,
                             .groups = &s->group,
                             .group_count = 1,
                             .max_norm = s->clips ? max_norm : 0.0,
                             .stream = t->stream};
    DW_RETURN_IF_FAILED(dw__trial_add(t, TENSORS_OF_TRIAL * sizeof(float), &s->steps));
    DW_RETURN_IF_FAILED(dw__trial_add(t, 2 * sizeof(float), &s->scalars));
    for (int i = 0; i < TENSORS_OF_TRIAL; i++) DW_RETURN_IF_FAILED(add_tensor(t, s, i));
    *(float *)s->scalars->host = grad_scale;
    if (s->clips) s->call.grad_scale = s->scalars->device;
    if (s->clips) s->call.norm = (float *)s->scalars->device + 1;
    DW_RETURN_IF_FAILED(dw_adamw_gpu_workspace(&s->call, &s->call.workspace_bytes));
    DW_RETURN_IF_FAILED(dw__trial_add(t, s->call.workspace_bytes, &workspace));
    s->call.workspace = workspace->device;
    t->call = &s->call;
    return DW_OK;
}

/* ---- comparison -------------------------------------------------------------------------------------- */

static float get(const state *s, dw__trial_part *const parts[BLOCKS][TENSORS_OF_TRIAL], int block,
                 int tensor, int64_t at) {
    return dw__trial_get(parts[block][tensor]->host, type_of(s, block),
                         (size_t)(at + offsets[tensor]));
}

static double norm_of(const state *s) {
    double sum = 0.0;
    for (int i = 0; i < TENSORS_OF_TRIAL; i++)
        for (int64_t at = 0; at < counts[i]; at++) {
            const double x = (double)get(s, s->before, G, i, at);
            sum += x * x;
        }
    return sqrt(sum);
}

static bool near(double got, double right, double bound) { return fabs(got - right) <= bound; }

static bool element_agrees(const state *s, int tensor, int64_t at, double clip, char *text,
                           size_t bytes) {
    static const char *const names[] = {"parameter", "gradient", "exp_avg", "exp_avg_sq", "copy"};
    dw__adamw_element e = {.p = (double)get(s, s->before, P, tensor, at),
                           .g = (double)get(s, s->before, G, tensor, at),
                           .m = (double)get(s, s->before, M, tensor, at),
                           .v = (double)get(s, s->before, V, tensor, at)};
    dw__adamw_define(&s->group, 1.0 + tensor * tensor, s->clips ? (double)grad_scale : 1.0, clip,
                     &e);
    const double right[] = {e.p, e.g, e.m, e.v, e.p},
                 size[] = {e.p_size, fabs(e.g), e.m_size, fabs(e.v), e.p_size};
    for (int b = 0; b < (s->shape.copy ? S : C); b++) {
        const double got = (double)get(s, s->blocks, b, tensor, at);
        if (near(got, right[b], dw__adamw_bound(type_of(s, b), right[b], size[b]))) continue;
        snprintf(text, bytes, "%s %lld of a tensor of %lld is %.9g, expected %.9g", names[b],
                 (long long)at, (long long)counts[tensor], got, right[b]);
        return false;
    }
    return true;
}

/* Runs the step on the CPU, in the memory of the operands before it. */
static bool agrees_with_cpu(const state *s, char *text, size_t bytes) {
    static const char *const names[BLOCKS] = {"parameter",  "gradient", "exp_avg",
                                              "exp_avg_sq", "copy",     "scale"};
    dw_adamw_gpu_tensor tensors[TENSORS_OF_TRIAL];
    float steps[TENSORS_OF_TRIAL];
    dw_adamw_gpu_group group = s->group;
    dw_adamw_gpu call = {.struct_size = sizeof call, .groups = &group, .group_count = 1};
    group.tensors = tensors;
    for (int i = 0; i < TENSORS_OF_TRIAL; i++) {
        void *at[BLOCKS];
        for (int b = 0; b < BLOCKS; b++)
            at[b] =
                (char *)s->before[b][i]->host + (size_t)offsets[i] * dw_dtype_bytes(type_of(s, b));
        steps[i] = (float)(i * i);
        tensors[i] = s->tensors[i];
        tensors[i].param = at[P], tensors[i].grad = at[G], tensors[i].copy = at[C];
        tensors[i].exp_avg = at[M], tensors[i].exp_avg_sq = at[V], tensors[i].scales = at[S];
        tensors[i].step = &steps[i];
    }
    if (dw__adamw_cpu_run(&call) != DW_OK) {
        snprintf(text, bytes, "%s", dw_last_error());
        return false;
    }
    for (int i = 0; i < TENSORS_OF_TRIAL; i++)
        for (int b = 0; b < BLOCKS; b++) {
            const size_t width = dw_dtype_bytes(type_of(s, b)), shift = (size_t)offsets[i] * width;
            const char *got = (const char *)s->blocks[b][i]->host + shift;
            const char *right = (const char *)s->before[b][i]->host + shift;
            for (int64_t at = 0; at < count_of(b, i); at++) {
                if (memcmp(got + (size_t)at * width, right + (size_t)at * width, width) == 0)
                    continue;
                snprintf(text, bytes, "%s %lld of a tensor of %lld has other bits than on the CPU",
                         names[b], (long long)at, (long long)counts[i]);
                return false;
            }
        }
    return true;
}

static bool agrees(const dw__trial *t, char *text, size_t bytes) {
    const state *s = t->state;
    if (dw__adamw_exact(s->shape)) return agrees_with_cpu(s, text, bytes);
    const double norm = norm_of(s) / (double)grad_scale;
    const double clip = s->clips ? fmin(1.0, max_norm / (norm + 1e-6)) : 1.0;
    const double got = s->clips ? (double)((const float *)s->scalars->host)[1] : norm;
    if (!near(got, norm, 16 * 0x1p-24 * norm)) {
        snprintf(text, bytes, "the norm is %.9g, expected %.9g", got, norm);
        return false;
    }
    for (int i = 0; i < TENSORS_OF_TRIAL; i++) {
        const float step = ((const float *)s->steps->host)[i];
        if (step != 1.0f + (float)(i * i)) {
            snprintf(text, bytes, "step is %g, expected %d", (double)step, 1 + i * i);
            return false;
        }
        for (int64_t at = 0; at < counts[i]; at++)
            if (!element_agrees(s, i, at, clip, text, bytes)) return false;
    }
    return true;
}

const dw__first_use dw__adamw_first_use = {
    .against = "the formula in FP64",
    .count = 2,
    .failure_refuses = true,
    .state_bytes = sizeof(state),
    .prepare = prepare,
    .agrees = agrees,
};
