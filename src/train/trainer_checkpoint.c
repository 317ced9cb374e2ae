/* Writes and reads the contents of a checkpoint. */
#include "deepwell/safetensors.h"
#include "train/gradient_norm.h"
#include "train/manifest.h"
#include "train/trainer_internal.h"
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Tensors of optimizer.safetensors: for each parameter the average of its gradients, then the average of
 * their squares. */
static const char *const averages[] = {"exp_avg", "exp_avg_sq"};

static const dw__block *average_block(const dw_trainer *t, size_t which) {
    return which == 0 ? &t->exp_avg : &t->exp_avg_sq;
}

/* ---- writing --------------------------------------------------------------------------------- */

static dw_status describe_averages(const dw_trainer *t, dw__arena *memory,
                                   dw_stored_tensor *tensors) {
    for (size_t which = 0; which < DW_COUNT(averages); which++) {
        for (uint32_t i = 0; i < t->count; i++) {
            const dw_model_parameter *p = &t->parameters[i];
            char *name = dw__arena_printf(memory, "%s.%s", averages[which], p->name);
            if (!name) return dw__fail_memory("names of tensors", t->count);
            *tensors++ = (dw_stored_tensor){.name = name,
                                            .dtype = DW_STORED_F32,
                                            .rank = p->rank,
                                            .shape = p->shape,
                                            .count = p->count};
        }
    }
    return DW_OK;
}

static dw_status put_average(const dw_trainer *t, size_t which, dw_safetensors_writer *writer) {
    float *average = NULL;
    DW_RETURN_IF_FAILED(dw__trainer_host_block(t, average_block(t, which), &average));
    dw_status status = DW_OK;
    for (uint32_t i = 0; i < t->count && status == DW_OK; i++)
        status = dw_safetensors_writer_put(writer, average + t->offsets[i],
                                           (size_t)t->parameters[i].count * sizeof(float));
    dw__trainer_release_host(t, average);
    return status;
}

static dw_status write_averages(const dw_trainer *t, const char *path) {
    dw_status status = DW_OK;
    uint32_t count = (uint32_t)DW_COUNT(averages) * t->count;
    dw_safetensors_writer *writer = NULL;
    dw__arena *memory = dw__arena_create();
    dw_stored_tensor *tensors = memory ? dw__arena_alloc(memory, count * sizeof *tensors) : NULL;
    if (!tensors) DW_TRY(dw__fail_memory("a list of tensors", count * sizeof *tensors));
    DW_TRY(describe_averages(t, memory, tensors));
    DW_TRY(dw_safetensors_writer_create(path, count, tensors, 0, NULL, &writer));
    for (size_t which = 0; which < DW_COUNT(averages); which++)
        DW_TRY(put_average(t, which, writer));
    DW_TRY(dw_safetensors_writer_commit(writer));
cleanup:
    dw_safetensors_writer_destroy(writer);
    if (memory) dw__arena_destroy(memory);
    return status;
}

/* Folder from which tokenizer files are copied; NULL for none. */
static const char *source_folder(const dw_trainer *t) {
    struct stat info;
    bool folder = stat(t->options.model, &info) == 0 && S_ISDIR(info.st_mode);
    return folder ? t->options.model : NULL;
}

/* `weights`: the host's list. */
static dw_status write_into(dw_trainer *t, const char *folder, float *const *weights) {
    char path[PATH_MAX];
    dw_model_save_options save = DW_MODEL_SAVE_OPTIONS_DEFAULT;
    save.source = source_folder(t);
    if (snprintf(path, sizeof path, "%s/optimizer.safetensors", folder) >= PATH_MAX)
        return dw__fail(DW_INVALID_ARGUMENT, "the path of folder \"%s\" is too long", folder);
    DW_RETURN_IF_FAILED(
        dw_model_save_into(t->config, folder, &save, (const float *const *)weights));
    DW_RETURN_IF_FAILED(write_averages(t, path));
    DW_RETURN_IF_FAILED(dw__trainer_guard_write(t, folder));
    dw__progress progress = {t->step, t->updates, t->options.schedule_steps, &t->recent,
                             t->guard.watch};
    char *run = NULL;
    DW_RETURN_IF_FAILED(dw__manifest_run(&t->options, t->data, &run));
    dw_status status = dw__manifest_write(folder, run, &progress);
    dw__free(run);
    return status;
}

/* Fails with the name of the first parameter that is not finite. */
static dw_status check_finite(const dw_trainer *t, float *const *weights, const char *what) {
    uint32_t i = 0;
    while (i < t->count && isfinite(dw__norm(weights[i], t->parameters[i].count, t->norm_scratch)))
        i++;
    if (i == t->count) return DW_OK;
    return dw__fail(DW_STATE,
                    "training has diverged: after step %" PRId64 " the weights of \"%s\" are not "
                    "finite, so %s is not written; start a new run with an earlier checkpoint as "
                    "the model, a smaller learning rate or a longer warm-up",
                    t->step, t->parameters[i].name, what);
}

dw_status dw__trainer_prune(dw_trainer *t) {
    if (!t->prune) return DW_OK;
    t->prune = false;
    return dw_checkpoints_prune(t->checkpoints, t->options.keep);
}

/* Older checkpoints stay until a step has been applied to the weights of the new one: those weights may be
 * finite and still give a loss that is not finite. After the last step no step follows, so they are removed
 * at once. */
static dw_status publish(dw_trainer *t) {
    DW_RETURN_IF_FAILED(dw_checkpoints_commit(t->checkpoints));
    t->prune = true;
    return t->step == t->options.steps ? dw__trainer_prune(t) : DW_OK;
}

static dw_status write_checkpoint(dw_trainer *t, float *const *weights) {
    DW_RETURN_IF_FAILED(check_finite(t, weights, "a checkpoint"));
    const char *folder = NULL;
    DW_RETURN_IF_FAILED(dw_checkpoints_begin(t->checkpoints, t->step, &folder));
    dw_status status = write_into(t, folder, weights);
    if (status == DW_OK) status = publish(t);
    if (status == DW_OK) return DW_OK;
    /* The cleanup may fail for the same reason. The first message says why. */
    char message[1024];
    snprintf(message, sizeof message, "%s", dw_last_error());
    dw_checkpoints_abort(t->checkpoints);
    return dw__fail(status, "the checkpoint of step %" PRId64 " was not written: %s", t->step,
                    message);
}

static dw_status save_model(dw_trainer *t, const char *folder, float *const *weights) {
    DW_RETURN_IF_FAILED(check_finite(t, weights, "the model"));
    dw_model_save_options save = DW_MODEL_SAVE_OPTIONS_DEFAULT;
    save.source = source_folder(t);
    return dw_model_save(t->config, folder, &save, (const float *const *)weights);
}

/* Writes a checkpoint, or with `folder` the model alone. */
static dw_status write_weights(dw_trainer *t, const char *folder) {
    dw_status status = DW_OK;
    float *weights = NULL, **list = NULL;
    DW_TRY(dw__trainer_host_block(t, &t->weights, &weights));
    DW_TRY(dw__trainer_host_list(t, weights, &list));
    DW_TRY(folder ? save_model(t, folder, list) : write_checkpoint(t, list));
cleanup:
    dw__free(list);
    dw__trainer_release_host(t, weights);
    return status;
}

dw_status dw_trainer_checkpoint(dw_trainer *t) {
    if (!t->begun || !t->checkpoints)
        return dw__fail(DW_STATE, "the trainer has not begun, or has no folder of checkpoints");
    if (dw_checkpoints_newest(t->checkpoints) == t->step) return DW_OK;
    return write_weights(t, NULL);
}

dw_status dw_trainer_check_save(const dw_trainer *t, const char *folder) {
    dw_model_save_options save = DW_MODEL_SAVE_OPTIONS_DEFAULT;
    save.source = source_folder(t);
    return dw_model_check_save(folder, &save);
}

dw_status dw_trainer_save(dw_trainer *t, const char *folder) {
    if (!t->begun) return dw__fail(DW_STATE, "call dw_trainer_begin first; it must succeed");
    return write_weights(t, folder);
}

/* ---- reading --------------------------------------------------------------------------------- */

static dw_status read_average(const dw_trainer *t, const dw_safetensors *file, const char *path,
                              size_t which, uint32_t i, float *average) {
    const dw_model_parameter *p = &t->parameters[i];
    char name[1024];
    uint32_t at = 0;
    snprintf(name, sizeof name, "%s.%s", averages[which], p->name);
    DW_RETURN_IF_FAILED(dw_safetensors_find(file, name, &at));
    const dw_stored_tensor *stored = dw_safetensors_at(file, at);
    bool same = stored->dtype == DW_STORED_F32 && stored->rank == p->rank &&
                memcmp(stored->shape, p->shape, (size_t)p->rank * sizeof *p->shape) == 0;
    if (!same)
        return dw__fail(
            DW_SHAPE,
            "\"%s\": \"%s\" does not have the shape of its parameter, or is not F32; the "
            "checkpoint is not of this model",
            path, name);
    return dw_safetensors_read_bytes(file, at, 0, average + t->offsets[i],
                                     (size_t)p->count * sizeof(float));
}

static dw_status read_block(const dw_trainer *t, const dw_safetensors *file, const char *path,
                            size_t which) {
    dw_status status = DW_OK;
    float *average = NULL;
    DW_TRY(dw__trainer_host_block(t, average_block(t, which), &average));
    for (uint32_t i = 0; i < t->count; i++) DW_TRY(read_average(t, file, path, which, i, average));
    DW_TRY(dw__trainer_put_block(t, average_block(t, which), average));
cleanup:
    dw__trainer_release_host(t, average);
    return status;
}

static dw_status read_averages(const dw_trainer *t, const char *path) {
    dw_status status = DW_OK;
    dw_safetensors *file = NULL;
    DW_TRY(dw_safetensors_open(path, &file));
    for (size_t which = 0; which < DW_COUNT(averages); which++)
        DW_TRY(read_block(t, file, path, which));
cleanup:
    dw_safetensors_close(file);
    return status;
}

/* Text of the training graph of `config`, which excludes the weights. Release it with dw_text_free. */
static dw_status graph_text(const dw_trainer *t, const dw_model_config *config, char **text) {
    dw_graph *graph = NULL;
    dw_model_graph_options options = DW_MODEL_GRAPH_OPTIONS_DEFAULT;
    options.output = DW_MODEL_LOSS;
    options.dropout = t->options.dropout;
    options.labels_moved = 1;
    dw_status status = dw_model_graph(config, &options, &graph);
    if (status == DW_OK) status = dw_graph_to_text(graph, text);
    dw_graph_destroy(graph);
    return status;
}

static dw_status check_model(const dw_trainer *t, const char *folder) {
    dw_status status = DW_OK;
    dw_model_config *there = NULL;
    char *mine = NULL, *its = NULL;
    DW_TRY(dw_model_config_load(folder, &there));
    DW_TRY(graph_text(t, t->config, &mine));
    DW_TRY(graph_text(t, there, &its));
    if (strcmp(mine, its) != 0)
        DW_TRY(dw__fail(DW_STATE,
                        "the model \"%s\" differs from the model of the checkpoint \"%s\": their "
                        "config.json build "
                        "different graphs; resume with the model that the run began with",
                        t->options.model, folder));
cleanup:
    dw_text_free(mine);
    dw_text_free(its);
    dw_model_config_destroy(there);
    return status;
}

static dw_status read_manifest(const dw_trainer *t, const char *folder, dw__progress *progress) {
    char *run = NULL;
    DW_RETURN_IF_FAILED(dw__manifest_run(&t->options, t->data, &run));
    dw_status status = dw__manifest_read(folder, run, progress, NULL);
    dw__free(run);
    if (status != DW_OK || progress->step <= t->options.steps) return status;
    return dw__fail(DW_STATE,
                    "the checkpoint \"%s\" is of step %" PRId64 ", but steps is %" PRId64
                    "; give at least the checkpoint's",
                    folder, progress->step, t->options.steps);
}

/* True if the folder has its tensors in the files of torch.distributed.checkpoint. */
static bool is_distributed(const char *folder) {
    char path[PATH_MAX];
    struct stat found;
    return snprintf(path, sizeof path, "%s/.metadata", folder) < PATH_MAX &&
           stat(path, &found) == 0;
}

dw_status dw__trainer_resume(dw_trainer *t) {
    const char *folder = dw_checkpoints_newest_path(t->checkpoints);
    char path[PATH_MAX];
    dw__progress progress = {.losses = &t->recent, .watch = t->guard.watch};
    if (snprintf(path, sizeof path, "%s/optimizer.safetensors", folder) >= PATH_MAX)
        return dw__fail(DW_INVALID_ARGUMENT, "the path of folder \"%s\" is too long", folder);
    DW_RETURN_IF_FAILED(read_manifest(t, folder, &progress));
    if (is_distributed(folder))
        return dw__fail(DW_UNSUPPORTED,
                        "the checkpoint \"%s\" has the files of torch.distributed.checkpoint, from "
                        "which deepwell train does not resume; resume with deepwell.Trainer in "
                        "Python, or convert the checkpoint: deepwell reshard \"%s\" -o FOLDER",
                        folder, folder);
    if (!t->schedule_is_given && progress.schedule_steps > 0)
        t->options.schedule_steps = progress.schedule_steps;
    DW_RETURN_IF_FAILED(dw__trainer_check_schedule(&t->options));
    DW_RETURN_IF_FAILED(check_model(t, folder));
    DW_RETURN_IF_FAILED(dw__trainer_load_weights(t, folder));
    DW_RETURN_IF_FAILED(read_averages(t, path));
    t->step = progress.step;
    t->updates = progress.updates;
    return DW_OK;
}
