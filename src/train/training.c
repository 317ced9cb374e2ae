/* The parts of a training run that programs use without a dw_trainer. */
#include "deepwell/training.h"
#include "train/gradient_norm.h"
#include "train/learning_rate.h"
#include "train/manifest.h"
#include "train/permutation.h"
#include "train/trainer_internal.h"
#include <inttypes.h>
#include <math.h>

/* ---- token files ----------------------------------------------------------------------------- */

struct dw_token_data {
    dw__dataset *files;
    int64_t vocabulary;
    int shuffle;
    uint64_t seed;
};

static dw_status open_files(const dw_trainer_options *o, int64_t vocabulary, dw_token_data *d) {
    const dw__token_store raw = dw__token_store_of(o->token_type, vocabulary);
    *d = (dw_token_data){NULL, vocabulary, o->shuffle, o->seed};
    DW_RETURN_IF_FAILED(dw__dataset_open(o->data_count, o->data, raw, o->sequence, &d->files));
    return dw__dataset_check(d->files, vocabulary);
}

dw_status dw_token_data_open(const dw_trainer_options *options, int64_t vocabulary,
                             dw_token_data **data) {
    dw_trainer_options o;
    DW_RETURN_IF_FAILED(dw__trainer_read_options(options, &o));
    if (o.data_count == 0 || vocabulary < 1)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "%" PRIu32 " paths of token files and a vocabulary of %" PRId64
                        "; give at least one of each",
                        o.data_count, vocabulary);
    dw_token_data *made = dw__calloc(1, sizeof *made);
    if (!made) return dw__fail_memory("token files", sizeof *made);
    dw_status status = open_files(&o, vocabulary, made);
    if (status == DW_OK) {
        *data = made;
    } else {
        dw_token_data_close(made);
    }
    return status;
}

void dw_token_data_close(dw_token_data *data) {
    if (!data) return;
    dw__dataset_close(data->files);
    dw__free(data);
}

int64_t dw_token_data_tokens(const dw_token_data *data) { return dw__dataset_tokens(data->files); }
int64_t dw_token_data_sequences(const dw_token_data *data) {
    return dw__dataset_sequences(data->files);
}

dw_status dw_token_data_sample(dw_token_data *data, int64_t sample, int64_t *tokens) {
    if (sample < 0)
        return dw__fail(DW_INVALID_ARGUMENT, "sample %" PRId64 " of a run; samples count from 0",
                        sample);
    int64_t sequence =
        dw__sample_sequence(sample, dw_token_data_sequences(data), data->shuffle, data->seed);
    return dw__dataset_read(data->files, sequence, data->vocabulary, tokens);
}

/* ---- steps ----------------------------------------------------------------------------------- */

dw_status dw_training_rate(const dw_trainer_options *options, int64_t step, double *lr) {
    dw_trainer_options o;
    DW_RETURN_IF_FAILED(dw__trainer_read_options(options, &o));
    if (step < 1)
        return dw__fail(DW_INVALID_ARGUMENT, "step %" PRId64 "; steps count from 1", step);
    *lr = dw__learning_rate(&o, step);
    return DW_OK;
}

dw_status dw_gradient_norm(uint32_t count, const float *const *gradients, const int64_t *elements,
                           double *norm) {
    int64_t most = 0;
    for (uint32_t i = 0; i < count; i++)
        if (elements[i] > most) most = elements[i];
    const size_t bytes = dw__norm_scratch(most);
    double *scratch = dw__malloc(bytes);
    if (!scratch) return dw__fail_memory("the norm of the gradients", bytes);
    double sum = 0.0;
    for (uint32_t i = 0; i < count; i++) sum += dw__square_sum(gradients[i], elements[i], scratch);
    dw__free(scratch);
    *norm = sqrt(sum);
    return DW_OK;
}

dw_status dw_training_describe(const dw_trainer_options *options, const dw_token_data *data,
                               char **run) {
    dw_trainer_options o;
    DW_RETURN_IF_FAILED(dw__trainer_read_options(options, &o));
    return dw__manifest_run(&o, data ? data->files : NULL, run);
}

/* ---- checkpoints ----------------------------------------------------------------------------- */

dw_status dw_checkpoint_seal(const char *folder, const char *run, int64_t step, int64_t updates,
                             int64_t schedule_steps) {
    const dw__progress progress = {step, updates, schedule_steps, NULL, NULL};
    if (updates < 0 || updates > step || schedule_steps < 0)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "a checkpoint of step %" PRId64 " with %" PRId64
                        " updates and a schedule of %" PRId64
                        " steps; expected no negative number and no more updates than steps",
                        step, updates, schedule_steps);
    return dw__manifest_write(folder, run, &progress);
}

dw_status dw_checkpoint_verify(const char *folder, const char *run, char **manifest) {
    dw__progress progress = {0};
    return dw__manifest_read(folder, run, &progress, manifest);
}
