/* Training on a GPU. Parameters, gradients, averages and the arena are the device's memory. The batch is copied in for
 * each micro-batch; losses and the gradient norm are copied out once per step. The update begins when the host has seen
 * that they are finite and that the data gave no error. */
#include "train/trainer_internal.h"

dw_status dw__trainer_find_device(dw_trainer *t) {
    dw_status status = dw_device_find(t->options.device, &t->device);
    if (status == DW_NOT_FOUND) return dw__fail_prefix(DW_INVALID_ARGUMENT, "device");
    DW_RETURN_IF_FAILED(status);
    if (!t->device->launch) return DW_OK;
    t->gpu = dw__arena_alloc(t->memory, sizeof *t->gpu);
    if (!t->gpu) return dw__fail_memory("a trainer's state on a GPU", sizeof *t->gpu);
    *t->gpu = (dw__gpu){0};
    return DW_OK;
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Reserves `bytes` of the batch, aligned as tensors on a GPU. */
static size_t reserve(size_t *total, size_t bytes) {
    const size_t at = *total;
    *total += (bytes + DW__GPU_ALIGNMENT - 1) / DW__GPU_ALIGNMENT * DW__GPU_ALIGNMENT;
    return at;
}

/* Sets the pointers into the batch, whose size becomes known. */
static void lay_out_batch(dw_trainer *t) {
    dw__gpu *g = t->gpu;
    const size_t tokens = (size_t)(t->options.micro_batch * t->options.sequence);
    char *base = g->batch.data;
    size_t total = 0;
    const size_t input = reserve(&total, tokens * sizeof(int64_t));
    const size_t labels = reserve(&total, tokens * sizeof(int64_t));
    const size_t seed = reserve(&total, sizeof t->random_seed);
    const size_t loss = reserve(&total, sizeof *g->loss), share = reserve(&total, sizeof *g->share);
    const size_t losses = reserve(&total, (size_t)g->most_losses * sizeof *g->losses);
    g->batch.bytes = total;
    if (!base) return;
    g->input = base + input;
    g->labels = base + labels;
    g->seed = base + seed;
    g->loss = (float *)(base + loss);
    g->share = (float *)(base + share);
    g->losses = (float *)(base + losses);
}

dw_status dw__trainer_gpu_create(dw_trainer *t) {
    dw__gpu *g = t->gpu;
    const dw_trainer_options *o = &t->options;
    const dw_adamw_options adamw = {
        .struct_size = sizeof adamw, .beta1 = o->beta1, .beta2 = o->beta2, .eps = o->eps};
    DW_RETURN_IF_FAILED(dw__gpu_update_create(t->device, &g->sizes, &adamw, &g->update));
    const size_t arena_bytes = dw__gpu_update_arena_bytes(g->update);
    if (arena_bytes > t->arena.bytes) t->arena.bytes = arena_bytes;
    g->most_losses = o->batch / o->micro_batch;
    const int64_t batches = dw__trainer_validation_batches(t);
    if (batches > g->most_losses) g->most_losses = batches;
    lay_out_batch(t);
    return DW_OK;
}

void dw__trainer_gpu_destroy(dw_trainer *t) {
    if (!t->gpu) return;
    /* Releasing the device's memory waits for the last update, which uses plans and other memory. */
    if (t->gpu->batch.data) dw_device_release(t->device, t->gpu->batch.data, t->gpu->batch.bytes);
    dw__gpu_update_destroy(t->gpu->update);
    dw__free(t->gpu->losses_read);
}

dw_status dw__trainer_gpu_begin(dw_trainer *t) {
    dw__gpu *g = t->gpu;
    const float share = (float)((double)t->options.micro_batch / (double)t->options.batch);
    const size_t bytes = (size_t)g->most_losses * sizeof *g->losses_read;
    g->losses_read = dw__malloc(bytes);
    if (!g->losses_read) return dw__fail_memory("a step's losses", bytes);
    DW_RETURN_IF_FAILED(dw_device_allocate(t->device, g->batch.bytes, &g->batch.data));
    lay_out_batch(t);
    DW_RETURN_IF_FAILED(dw__gpu_update_begin(g->update));
    if (t->accumulation.data)
        DW_RETURN_IF_FAILED(
            dw_device_fill(t->device, t->accumulation.data, 0, t->accumulation.bytes));
    return dw_device_copy_in(t->device, g->share, &share, sizeof share);
}

/* ---- a step ---------------------------------------------------------------------------------- */

/* Pageable memory of the host is copied before the call returns, so the host may fill its buffers again at once. */
static dw_status send_batch(const dw_trainer *t) {
    const dw__gpu *g = t->gpu;
    const size_t bytes = (size_t)(t->options.micro_batch * t->options.sequence) * sizeof(int64_t);
    DW_RETURN_IF_FAILED(t->device->copy_in(g->input, t->input, bytes, NULL));
    DW_RETURN_IF_FAILED(t->device->copy_in(g->labels, t->labels, bytes, NULL));
    return t->device->copy_in(g->seed, t->random_seed, sizeof t->random_seed, NULL);
}

/* Runs forward of the batch that the host's buffers hold, and keeps its loss as number `at`. */
static dw_status forward(const dw_trainer *t, const dw__program *p, int64_t at) {
    const dw__gpu *g = t->gpu;
    const dw_binding loss = {g->loss, NULL};
    DW_RETURN_IF_FAILED(send_batch(t));
    DW_RETURN_IF_FAILED(dw_plan_forward(p->plan, t->arena.data, p->leaves, &loss, NULL));
    return dw_device_copy(t->device, g->losses + at, g->loss, sizeof *g->loss);
}

dw_status dw__trainer_gpu_train(dw_trainer *t, int64_t micro) {
    const dw__gpu *g = t->gpu;
    const dw_binding loss = {g->loss, NULL}, share = {g->share, NULL};
    DW_RETURN_IF_FAILED(forward(t, &t->train, micro));
    DW_RETURN_IF_FAILED(dw_plan_backward(t->train.plan, t->arena.data, t->train.leaves, &loss,
                                         &share, micro == 0 ? t->gradients_bound : t->part_bound,
                                         NULL));
    if (micro == 0) return DW_OK;
    return dw__gpu_add(g->update, t->arena.data, t->gradients.data, t->accumulation.data);
}

dw_status dw__trainer_gpu_validate(dw_trainer *t, int64_t batch) {
    return forward(t, &t->validate, batch);
}

/* Waits for runs of the program, whose data may have been wrong, and reads their losses. */
static dw_status finish(const dw_trainer *t, const dw__program *p, int64_t losses) {
    DW_RETURN_IF_FAILED(dw_plan_synchronize(p->plan, NULL));
    return dw_device_copy_out(t->device, t->gpu->losses_read, t->gpu->losses,
                              (size_t)losses * sizeof(float));
}

dw_status dw__trainer_gpu_finish_step(dw_trainer *t, int64_t micro_batches, double *norm) {
    DW_RETURN_IF_FAILED(dw__gpu_square(t->gpu->update, t->arena.data, t->gradients.data));
    DW_RETURN_IF_FAILED(finish(t, &t->train, micro_batches));
    return dw__gpu_gradient_norm(t->gpu->update, norm);
}

dw_status dw__trainer_gpu_finish_validation(dw_trainer *t, int64_t batches) {
    return finish(t, &t->validate, batches);
}

dw_status dw__trainer_gpu_update(dw_trainer *t, const dw_adamw_options *adamw) {
    const dw__gpu_blocks blocks = {t->weights.data, t->gradients.data, t->exp_avg.data,
                                   t->exp_avg_sq.data};
    return dw__gpu_adamw(t->gpu->update, t->arena.data, &blocks, adamw);
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
