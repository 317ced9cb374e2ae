/* One training step: forward and backward of the micro-batches, the gradient norm, AdamW. */
#include "train/gradient_norm.h"
#include "train/learning_rate.h"
#include "train/permutation.h"
#include "train/trainer_internal.h"
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- batches --------------------------------------------------------------------------------- */

/* Reads a row: sequence `index` of `data`, and the same shifted by one token as labels. */
static dw_status read_row(dw_trainer *t, const dw__dataset *data, int64_t index, int64_t *input,
                          int64_t *labels) {
    const size_t bytes = (size_t)t->options.sequence * sizeof(int64_t);
    DW_RETURN_IF_FAILED(dw__dataset_read(data, index, t->model.sizes.vocabulary, t->sequence));
    memcpy(input, t->sequence, bytes);
    memcpy(labels, t->sequence + 1, bytes);
    return DW_OK;
}

dw_status dw__trainer_read_micro_batch(dw_trainer *t, int64_t step, int64_t micro, int64_t *input,
                                       int64_t *labels, int64_t seed[2]) {
    const dw_trainer_options *o = &t->options;
    const int64_t count = dw__dataset_sequences(t->data);
    seed[0] = (int64_t)o->seed;
    seed[1] = step * (o->batch / o->micro_batch) + micro;
    for (int64_t row = 0; row < o->micro_batch; row++) {
        int64_t sample = step * o->batch + micro * o->micro_batch + row;
        int64_t index = dw__sample_sequence(sample, count, o->shuffle, o->seed);
        DW_RETURN_IF_FAILED(
            read_row(t, t->data, index, input + row * o->sequence, labels + row * o->sequence));
    }
    return DW_OK;
}

dw_status dw__trainer_read_validation(dw_trainer *t, int64_t batch, int64_t *input,
                                      int64_t *labels) {
    const int64_t rows = t->options.micro_batch, length = t->options.sequence;
    for (int64_t row = 0; row < rows; row++)
        DW_RETURN_IF_FAILED(read_row(t, t->validation, batch * rows + row, input + row * length,
                                     labels + row * length));
    return DW_OK;
}

/* ---- forward and backward -------------------------------------------------------------------- */

static dw_status backward_first(dw_trainer *t, const dw__program *p, const dw_binding *loss,
                                const dw_binding *grad) {
    return dw_plan_backward(p->plan, t->arena.data, p->leaves, loss, grad, t->gradients_bound,
                            NULL);
}

/* Runs backward part by part. A gradient that a part completes is added to the sum, and its memory is free again. */
static dw_status backward_more(dw_trainer *t, const dw__program *p, const dw_binding *loss,
                               const dw_binding *grad) {
    uint32_t parts = dw_plan_part_count(p->plan);
    for (uint32_t part = 0; part < parts; part++) {
        for (uint32_t i = 0; i < t->count; i++) {
            const dw__interval *life = &p->lives[i];
            bool alive = life->bytes > 0 && life->first <= part && part <= life->last;
            t->part_bound[i].data = alive ? (char *)t->accumulation.data + life->offset : NULL;
        }
        DW_RETURN_IF_FAILED(dw_plan_backward_part(p->plan, part, t->arena.data, p->leaves, loss,
                                                  grad, t->part_bound, NULL));
        for (uint32_t i = 0; i < t->count; i++)
            if (t->part_bound[i].data && p->lives[i].last == part)
                dw__accumulate(t->gradients_bound[i].data, t->part_bound[i].data,
                               t->parameters[i].count);
    }
    return DW_OK;
}

static dw_status run_micro_batch(dw_trainer *t, const dw__program *p, int64_t micro, float share,
                                 float *loss) {
    dw_binding loss_bound = {loss, NULL}, grad_bound = {&share, NULL};
    DW_RETURN_IF_FAILED(dw_plan_forward(p->plan, t->arena.data, p->leaves, &loss_bound, NULL));
    return micro == 0 ? backward_first(t, p, &loss_bound, &grad_bound)
                      : backward_more(t, p, &loss_bound, &grad_bound);
}

/* Loss and gradients of the whole batch: means over its tokens. Every micro-batch has the same number of tokens.
 * Returns the norm of the gradients too. */
static dw_status run_batch(dw_trainer *t, bool samples, double *loss, double *norm) {
    const dw__program *p = samples ? &t->guard.samples : &t->train;
    int64_t micro_batches = t->options.batch / t->options.micro_batch;
    *loss = 0.0;
    DW_RETURN_IF_FAILED(dw_plan_keep(p->plan, t->arena.data, p->leaves, NULL));
    for (int64_t micro = 0; micro < micro_batches; micro++) {
        float micro_loss = 0.0f;
        DW_RETURN_IF_FAILED(
            dw__trainer_read_micro_batch(t, t->step, micro, t->input, t->labels, t->random_seed));
        DW_RETURN_IF_FAILED(
            run_micro_batch(t, p, micro, (float)(1.0 / (double)micro_batches), &micro_loss));
        if (samples) dw__trainer_guard_add(t, t->guard.statistics, micro == 0);
        *loss += (double)micro_loss / (double)micro_batches;
    }
    *norm = dw__norm(t->gradients.data, t->elements, t->norm_scratch);
    return DW_OK;
}

/* ---- update ---------------------------------------------------------------------------------- */

static dw_status update(dw_trainer *t, double norm, double lr) {
    const dw_trainer_options *o = &t->options;
    /* The formula of torch.nn.utils.clip_grad_norm_. */
    double scale = o->clip > 0.0 ? o->clip / (norm + 1e-6) : 1.0;
    dw_adamw_options adamw = {.struct_size = sizeof adamw,
                              .lr = lr,
                              .beta1 = o->beta1,
                              .beta2 = o->beta2,
                              .eps = o->eps,
                              .weight_decay = o->weight_decay,
                              .grad_scale = scale < 1.0 ? scale : 1.0,
                              .step = t->updates + 1};
    DW_RETURN_IF_FAILED(dw_adamw_step(t->tensors, t->decayed, &adamw));
    adamw.weight_decay = 0.0;
    return dw_adamw_step(t->tensors + t->decayed, t->updated - t->decayed, &adamw);
}

static const char *name_culprit(const dw_trainer *t, const float *gradients) {
    for (uint32_t i = 0; i < t->count; i++) {
        if (!t->gradients_bound[i].data) continue;
        if (!isfinite(dw__norm(gradients + t->offsets[i], t->parameters[i].count, t->norm_scratch)))
            return t->parameters[i].name;
    }
    return "a gradient";
}

/* Stores the name of the first value that is not finite. */
static dw_status find_culprit(const dw_trainer *t, dw_train_report *report) {
    const char *name = "the loss";
    float *gradients = NULL;
    if (isfinite(report->loss) && isfinite(report->gradient_norm)) {
        name = ""; /* a spike */
    } else if (isfinite(report->loss)) {
        DW_RETURN_IF_FAILED(dw__trainer_host_gradients(t, &gradients));
        name = name_culprit(t, gradients);
        dw__trainer_release_host(t, gradients);
    }
    snprintf(report->culprit, sizeof report->culprit, "%s", name);
    return DW_OK;
}

/* A bad last step is a failure too: with its weights the loss or a gradient is not finite. */
static dw_status judge_bad_step(dw_trainer *t, const dw_train_report *report) {
    t->bad_in_a_row++;
    if (t->bad_in_a_row < t->options.bad_steps && t->step < t->options.steps) return DW_OK;
    bool loss = !isfinite(report->loss);
    if (!*report->culprit)
        return dw__fail(
            DW_STATE,
            "training has diverged: %" PRId64 " step%s in a row up to step %" PRId64
            " %s bad and not applied, the last one for a loss of %g, a spike above %g (gradient "
            "norm %g); start a new run with an earlier checkpoint as the model, a smaller learning "
            "rate or a longer warm-up",
            t->bad_in_a_row, t->bad_in_a_row == 1 ? "" : "s", report->step,
            t->bad_in_a_row == 1 ? "was" : "were", report->loss, report->spike_limit,
            report->gradient_norm);
    return dw__fail(
        DW_STATE,
        "training has diverged: %" PRId64 " step%s in a row up to step %" PRId64
        " %s not finite (%s%s%s; loss %g, gradient norm %g) and not applied; start a new run with "
        "an earlier checkpoint as the model, a smaller learning rate or a longer warm-up",
        t->bad_in_a_row, t->bad_in_a_row == 1 ? "" : "s", report->step,
        t->bad_in_a_row == 1 ? "was" : "were", loss ? "" : "the gradient of \"", report->culprit,
        loss ? "" : "\"", report->loss, report->gradient_norm);
}

static dw_status check_begun(const dw_trainer *t) {
    if (t->begun) return DW_OK;
    return dw__fail(DW_STATE, "call dw_trainer_begin first; it must succeed");
}

/* The numbers of a step, and its update if they are finite and the loss is no spike. */
static dw_status run_step(dw_trainer *t, bool samples, dw_train_report *report, bool *applied) {
    if (t->gpu)
        return dw__trainer_gpu_step(t, samples, report->lr, report->spike_limit, &report->loss,
                                    &report->gradient_norm, applied);
    DW_RETURN_IF_FAILED(run_batch(t, samples, &report->loss, &report->gradient_norm));
    *applied = isfinite(report->loss) && isfinite(report->gradient_norm) &&
               report->loss <= report->spike_limit;
    return *applied ? update(t, report->gradient_norm, report->lr) : DW_OK;
}

static dw_status compute(dw_trainer *t, dw_train_report *report) {
    bool applied = false;
    DW_RETURN_IF_FAILED(dw__trainer_guard_prepare(t));
    t->guard.sampled = dw__trainer_guard_samples(t);
    DW_RETURN_IF_FAILED(run_step(t, t->guard.sampled, report, &applied));
    if (!applied) return find_culprit(t, report);
    t->updates++;
    dw__recent_losses_add(&t->recent, report->step, report->loss);
    report->applied = 1;
    return DW_OK;
}

dw_status dw_trainer_step(dw_trainer *t, dw_train_report *report) {
    DW_RETURN_IF_FAILED(check_begun(t));
    if (t->step >= t->options.steps)
        return dw__fail(DW_STATE, "all %" PRId64 " steps are done", t->options.steps);
    double start = dw__seconds();
    *report = (dw_train_report){.step = t->step + 1,
                                .lr = dw__learning_rate(&t->options, t->step + 1),
                                .spike_limit = dw__recent_losses_limit(&t->recent, t->step + 1)};
    dw_status status = compute(t, report);
    if (status != DW_OK) {
        *report = (dw_train_report){0};
        return dw__fail_prefix(status, "step %" PRId64, t->step + 1);
    }
    t->step++;
    report->seconds = dw__seconds() - start;
    /* The step counts if this fails, because its update has been made. */
    if (t->guard.sampled)
        DW_RETURN_IF_FAILED(dw__trainer_guard_judge(t, report->step, report->applied));
    if (!report->applied) return judge_bad_step(t, report);
    t->bad_in_a_row = 0;
    return dw__trainer_prune(t);
}

int64_t dw__trainer_validation_batches(const dw_trainer *t) {
    if (!t->validation) return 0;
    int64_t batches = dw__dataset_sequences(t->validation) / t->options.micro_batch;
    int64_t most = t->options.validation_batches;
    return most > 0 && batches > most ? most : batches;
}

dw_status dw_trainer_validate(dw_trainer *t, double *loss) {
    DW_RETURN_IF_FAILED(check_begun(t));
    if (!t->validation) return dw__fail(DW_STATE, "the trainer was made without validation data");
    const int64_t batches = dw__trainer_validation_batches(t);
    float batch_loss = 0.0f;
    dw_binding bound = {&batch_loss, NULL};
    double sum = 0.0;
    if (t->gpu) DW_RETURN_IF_FAILED(dw__trainer_gpu_validate(t, batches, &sum));
    for (int64_t i = 0; i < batches && !t->gpu; i++) {
        DW_RETURN_IF_FAILED(dw__trainer_read_validation(t, i, t->input, t->labels));
        DW_RETURN_IF_FAILED(
            dw_plan_forward(t->validate.plan, t->arena.data, t->validate.leaves, &bound, NULL));
        sum += batch_loss;
    }
    *loss = sum / (double)batches;
    return DW_OK;
}
