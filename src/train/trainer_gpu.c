/* Training on a GPU. Parameters, gradients, averages and the arena are the device's memory. Forward, backward and
 * update of a step are recorded as CUDA graphs and replayed. Loss, norm and whether the step was applied are copied out
 * at its end, the only time that the host waits; before that it reads the tokens of the next step. */
#include "engine/executor.h"
#include "train/trainer_internal.h"
#include <math.h>
#include <string.h>

dw_status dw__trainer_find_device(dw_trainer *t) {
    dw_status status = dw_device_find(t->options.device, &t->device);
    if (status == DW_NOT_FOUND) return dw__fail_prefix(DW_INVALID_ARGUMENT, "device");
    DW_RETURN_IF_FAILED(status);
    if (!t->device->launch) return DW_OK;
    t->gpu = dw__arena_alloc(t->memory, sizeof *t->gpu);
    if (!t->gpu) return dw__fail_memory("a trainer's state on a GPU", sizeof *t->gpu);
    *t->gpu = (dw__gpu){.model = DW_F32};
    if (strcmp(t->options.precision, "bf16") != 0) return DW_OK;
    t->gpu->model = DW_BF16;
    return dw_precision_policy_init(t->policy, "fp32");
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Reserves `bytes` of the batch, aligned as tensors on a GPU. */
static size_t reserve(size_t *total, size_t bytes) {
    const size_t at = *total;
    *total += (bytes + DW__GPU_ALIGNMENT - 1) / DW__GPU_ALIGNMENT * DW__GPU_ALIGNMENT;
    return at;
}

static int64_t micro_batches(const dw_trainer *t) {
    return t->options.batch / t->options.micro_batch;
}

static size_t token_bytes(const dw_trainer *t) {
    return (size_t)(t->options.micro_batch * t->options.sequence) * sizeof(int64_t);
}

/* Sets the pointers into the batch, whose size becomes known. */
static void lay_out_batch(dw_trainer *t) {
    dw__gpu *g = t->gpu;
    char *base = g->batch.data;
    size_t total = 0;
    const size_t input = reserve(&total, token_bytes(t));
    const size_t labels = reserve(&total, token_bytes(t));
    const size_t seed = reserve(&total, sizeof t->random_seed);
    g->stage_bytes = total;
    const size_t loss = reserve(&total, sizeof *g->loss), share = reserve(&total, sizeof *g->share);
    g->batch.bytes = total;
    if (!base) return;
    g->input = base + input;
    g->labels = base + labels;
    g->seed = base + seed;
    g->loss = (float *)(base + loss);
    g->share = (float *)(base + share);
}

dw_status dw__trainer_gpu_create(dw_trainer *t) {
    dw__gpu *g = t->gpu;
    const dw_trainer_options *o = &t->options;
    const dw__gpu_update_options update = {
        .device = t->device,
        .decayed = g->decayed,
        .updated = g->updated,
        .elements = t->elements,
        .model = g->model,
        .adds = micro_batches(t) > 1,
        .beta1 = o->beta1,
        .beta2 = o->beta2,
        .eps = o->eps,
        .weight_decay = o->weight_decay,
        .clip = o->clip,
    };
    lay_out_batch(t);
    return dw__gpu_update_create(&update, &g->update);
}

void dw__trainer_gpu_forget(dw_trainer *t) {
    for (int work = 0; work < DW__GPU_WORKS; work++) {
        t->device->graph_destroy(t->gpu->graphs[work]);
        t->gpu->graphs[work] = NULL;
    }
}

void dw__trainer_gpu_destroy(dw_trainer *t) {
    dw__gpu *g = t->gpu;
    if (!g) return;
    dw__trainer_gpu_forget(t);
    if (g->stream) t->device->stream_destroy(g->stream);
    for (size_t i = 0; i < DW_COUNT(g->stages); i++)
        if (g->stages[i].memory) t->device->host_release(g->stages[i].memory);
    if (g->batch.data) dw_device_release(t->device, g->batch.data, g->batch.bytes);
    if (g->rounded.data) dw_device_release(t->device, g->rounded.data, g->rounded.bytes);
    dw__gpu_update_destroy(g->update);
}

static dw_status allocate_stages(dw_trainer *t) {
    dw__gpu *g = t->gpu;
    for (size_t i = 0; i < DW_COUNT(g->stages); i++) {
        void *memory = NULL;
        const size_t bytes = (size_t)micro_batches(t) * g->stage_bytes;
        DW_RETURN_IF_FAILED(t->device->host_allocate(bytes, &memory));
        g->stages[i] = (dw__gpu_stage){memory, -1};
    }
    return DW_OK;
}

dw_status dw__trainer_gpu_begin(dw_trainer *t) {
    dw__gpu *g = t->gpu;
    const float share = (float)(1.0 / (double)micro_batches(t));
    const bool adds = micro_batches(t) > 1;
    const size_t rounded = (size_t)t->elements * dw_dtype_bytes(g->model);
    DW_RETURN_IF_FAILED(t->device->stream_create(&g->stream));
    DW_RETURN_IF_FAILED(allocate_stages(t));
    DW_RETURN_IF_FAILED(dw_device_allocate(t->device, g->batch.bytes, &g->batch.data));
    lay_out_batch(t);
    DW_RETURN_IF_FAILED(dw_device_copy_in(t->device, g->share, &share, sizeof share));
    if (g->model != DW_F32) {
        DW_RETURN_IF_FAILED(dw_device_allocate(t->device, rounded, &g->rounded.data));
        g->rounded.bytes = rounded;
    }
    const dw__gpu_blocks blocks = {
        .weights = t->weights.data,
        .exp_avg = t->exp_avg.data,
        .exp_avg_sq = t->exp_avg_sq.data,
        .rounded = g->rounded.data,
        .gradients = adds ? t->accumulation.data : t->gradients.data,
        .sum = adds ? t->gradients.data : NULL,
    };
    DW_RETURN_IF_FAILED(dw__gpu_update_begin(g->update, &blocks));
    /* The stream does not wait for the default stream, on which blocks were filled. */
    return t->device->stream_synchronize(NULL);
}

dw_status dw__trainer_gpu_restart(dw_trainer *t) {
    return dw__gpu_update_restart(t->gpu->update, t->updates, t->gpu->stream);
}

/* ---- recorded work --------------------------------------------------------------------------- */

static dw_status forward(const dw_trainer *t, const dw__program *p) {
    const dw_binding loss = {t->gpu->loss, NULL};
    return dw_plan_forward(p->plan, t->arena.data, p->leaves, &loss, t->gpu->stream);
}

static dw_status train_micro_batch(const dw_trainer *t, const dw__program *p) {
    const dw__gpu *g = t->gpu;
    const dw_binding loss = {g->loss, NULL}, share = {g->share, NULL};
    DW_RETURN_IF_FAILED(forward(t, p));
    DW_RETURN_IF_FAILED(dw_plan_backward(p->plan, t->arena.data, p->leaves, &loss, &share,
                                         t->gradients_bound, g->stream));
    DW_RETURN_IF_FAILED(dw__gpu_update_add(g->update, g->loss, dw__gpu_data_error(p->plan),
                                           (double)micro_batches(t), g->stream));
    return micro_batches(t) == 1 ? dw__gpu_update_run(g->update, g->stream) : DW_OK;
}

static dw_status enqueue(const dw_trainer *t, dw__gpu_work work) {
    const dw__gpu *g = t->gpu;
    switch (work) {
    case DW__GPU_KEEP:
        return dw_plan_keep(t->train.plan, t->arena.data, t->train.leaves, g->stream);
    case DW__GPU_MICRO_BATCH: return train_micro_batch(t, &t->train);
    case DW__GPU_SAMPLE: return train_micro_batch(t, &t->guard.samples);
    case DW__GPU_UPDATE: return dw__gpu_update_run(g->update, g->stream);
    default: break;
    }
    DW_RETURN_IF_FAILED(forward(t, &t->validate));
    return dw__gpu_update_add_loss(g->update, g->loss, dw__gpu_data_error(t->validate.plan), 1.0,
                                   g->stream);
}

static dw_status record(const dw_trainer *t, dw__gpu_work work) {
    const dw_device *device = t->device;
    void *graph = NULL;
    DW_RETURN_IF_FAILED(device->graph_begin(t->gpu->stream));
    const dw_status status = enqueue(t, work);
    /* A recording is ended in any case. */
    const dw_status ended = device->graph_end(t->gpu->stream, &graph);
    if (status == DW_OK && ended == DW_OK) {
        t->gpu->graphs[work] = graph;
        return DW_OK;
    }
    if (graph) device->graph_destroy(graph);
    return status == DW_OK ? ended : status;
}

static dw_status replay(const dw_trainer *t, dw__gpu_work work) {
    if (!t->gpu->graphs[work]) DW_RETURN_IF_FAILED(record(t, work));
    return t->device->graph_launch(t->gpu->graphs[work], t->gpu->stream);
}

/* ---- batches --------------------------------------------------------------------------------- */

/* The places of a micro-batch in a stage. */
typedef struct staged {
    char *begin;
    int64_t *input, *labels, *seed;
} staged;

static staged place_of(const dw_trainer *t, const dw__gpu_stage *stage, int64_t micro) {
    const dw__gpu *g = t->gpu;
    char *begin = stage->memory + (size_t)micro * g->stage_bytes;
    const char *base = g->batch.data;
    return (staged){begin, (int64_t *)(begin + ((char *)g->input - base)),
                    (int64_t *)(begin + ((char *)g->labels - base)),
                    (int64_t *)(begin + ((char *)g->seed - base))};
}

/* Reads the tokens of the step behind step `step`. */
static dw_status read_step(dw_trainer *t, dw__gpu_stage *stage, int64_t step) {
    stage->step = -1;
    for (int64_t micro = 0; micro < micro_batches(t); micro++) {
        const staged to = place_of(t, stage, micro);
        DW_RETURN_IF_FAILED(
            dw__trainer_read_micro_batch(t, step, micro, to.input, to.labels, to.seed));
    }
    stage->step = step;
    return DW_OK;
}

static dw_status send_batch(const dw_trainer *t, const dw__gpu_stage *stage, int64_t micro) {
    const dw__gpu *g = t->gpu;
    return t->device->copy_in(g->batch.data, place_of(t, stage, micro).begin, g->stage_bytes,
                              g->stream);
}

/* ---- a step ---------------------------------------------------------------------------------- */

/* Enqueues a copy of the statistics of a micro-batch, before the next one overwrites them. */
static dw_status receive_statistics(const dw_trainer *t, int64_t micro) {
    const size_t numbers = (size_t)t->guard.samples.observed * DW__STATISTICS_STRIDE;
    return t->device->copy_out(t->guard.staged + (size_t)micro * numbers, t->guard.statistics,
                               numbers * sizeof(double), t->gpu->stream);
}

dw_status dw__trainer_gpu_step(dw_trainer *t, bool samples, double lr, double limit, double *loss,
                               double *norm, bool *applied) {
    const dw__program *p = samples ? &t->guard.samples : &t->train;
    const size_t statistics = (size_t)p->observed * DW__STATISTICS_STRIDE;
    dw__gpu *g = t->gpu;
    dw__gpu_stage *stage = &g->stages[t->step % 2], *next = &g->stages[(t->step + 1) % 2];
    const dw_train_numbers *numbers = NULL;
    if (stage->step != t->step) DW_RETURN_IF_FAILED(read_step(t, stage, t->step));
    DW_RETURN_IF_FAILED(dw__gpu_update_send(g->update, lr, limit, g->stream));
    if (!samples && dw_plan_kept_bytes(t->train.plan) > 0)
        DW_RETURN_IF_FAILED(replay(t, DW__GPU_KEEP));
    for (int64_t micro = 0; micro < micro_batches(t); micro++) {
        DW_RETURN_IF_FAILED(send_batch(t, stage, micro));
        DW_RETURN_IF_FAILED(replay(t, samples ? DW__GPU_SAMPLE : DW__GPU_MICRO_BATCH));
        if (samples) DW_RETURN_IF_FAILED(receive_statistics(t, micro));
    }
    if (micro_batches(t) > 1) DW_RETURN_IF_FAILED(replay(t, DW__GPU_UPDATE));
    DW_RETURN_IF_FAILED(dw__gpu_update_receive(g->update, g->stream, &numbers));
    /* If this fails, the next step reads again and reports it. */
    if (t->step + 1 < t->options.steps) (void)read_step(t, next, t->step + 1);
    DW_RETURN_IF_FAILED(dw_plan_synchronize(p->plan, g->stream));
    for (int64_t micro = 0; samples && micro < micro_batches(t); micro++)
        dw__trainer_guard_add(t, t->guard.staged + (size_t)micro * statistics, micro == 0);
    *loss = numbers->loss;
    *norm = numbers->told.norm;
    *applied = numbers->told.applied != 0;
    return DW_OK;
}

dw_status dw__trainer_gpu_validate(dw_trainer *t, int64_t batches, double *loss) {
    dw__gpu *g = t->gpu;
    const dw_train_numbers *numbers = NULL;
    DW_RETURN_IF_FAILED(dw__gpu_update_send(g->update, 0.0, INFINITY, g->stream));
    for (int64_t batch = 0; batch < batches; batch++) {
        DW_RETURN_IF_FAILED(dw__trainer_read_validation(t, batch, t->input, t->labels));
        /* Pageable memory of the host is copied before the call returns, so it may be filled again at once. */
        DW_RETURN_IF_FAILED(t->device->copy_in(g->input, t->input, token_bytes(t), g->stream));
        DW_RETURN_IF_FAILED(t->device->copy_in(g->labels, t->labels, token_bytes(t), g->stream));
        DW_RETURN_IF_FAILED(replay(t, DW__GPU_VALIDATION));
    }
    DW_RETURN_IF_FAILED(dw__gpu_update_receive(g->update, g->stream, &numbers));
    DW_RETURN_IF_FAILED(dw_plan_synchronize(t->validate.plan, g->stream));
    *loss = numbers->loss;
    return DW_OK;
}

/* ---- the host's view ------------------------------------------------------------------------- */

dw_status dw__trainer_host_block(const dw_trainer *t, const dw__block *block, float **floats) {
    if (!t->gpu) {
        *floats = block->data;
        return DW_OK;
    }
    float *copy = dw__malloc(block->bytes);
    if (!copy) return dw__fail_memory("a copy of a GPU's tensors", block->bytes);
    dw_status status = dw_device_copy_out(t->device, copy, block->data, block->bytes);
    if (status == DW_OK)
        *floats = copy;
    else
        dw__free(copy);
    return status;
}

dw_status dw__trainer_host_gradients(const dw_trainer *t, float **floats) {
    const dw_dtype type = t->gpu && !t->accumulation.bytes ? t->gpu->model : DW_F32;
    if (type == DW_F32) return dw__trainer_host_block(t, &t->gradients, floats);
    float *copy = dw__malloc((size_t)t->elements * sizeof *copy);
    if (!copy) return dw__fail_memory("a copy of a GPU's gradients", (size_t)t->elements);
    /* Read into the upper half, and widened from the front. */
    uint16_t *halves = (uint16_t *)copy + t->elements;
    dw_status status = dw_device_copy_out(t->device, halves, t->gradients.data, t->gradients.bytes);
    for (int64_t i = 0; i < t->elements && status == DW_OK; i++) {
        const uint32_t bits = (uint32_t)halves[i] << 16;
        memcpy(&copy[i], &bits, sizeof bits);
    }
    if (status == DW_OK)
        *floats = copy;
    else
        dw__free(copy);
    return status;
}

dw_status dw__trainer_put_block(const dw_trainer *t, const dw__block *block, const float *floats) {
    return t->gpu ? dw_device_copy_in(t->device, block->data, floats, block->bytes) : DW_OK;
}

void dw__trainer_release_host(const dw_trainer *t, float *floats) {
    if (t->gpu) dw__free(floats);
}

dw_status dw__trainer_host_list(const dw_trainer *t, float *floats, float ***list) {
    *list = dw__malloc(t->count * sizeof **list);
    if (!*list) return dw__fail_memory("a list of parameters", t->count * sizeof **list);
    for (uint32_t i = 0; i < t->count; i++) (*list)[i] = floats + t->offsets[i];
    return DW_OK;
}
