/* The options of a trainer: copied, so that the caller may free its strings, and checked. */
#include "graph/layer_precision.h"
#include "train/learning_rate.h"
#include "train/trainer_internal.h"
#include <float.h>
#include <inttypes.h>
#include <stddef.h>
#include <string.h>

static dw_status copy_string(dw_trainer *t, const char **text) {
    if (!*text) return DW_OK;
    *text = dw__arena_strdup(t->memory, *text);
    return *text ? DW_OK : dw__fail_memory("an option", 1);
}

static dw_status copy_list(dw_trainer *t, uint32_t count, const char *const **list) {
    const char **copy = dw__arena_alloc(t->memory, count * sizeof *copy);
    if (!copy) return dw__fail_memory("an option", count * sizeof *copy);
    for (uint32_t i = 0; i < count; i++) {
        copy[i] = (*list)[i];
        DW_RETURN_IF_FAILED(copy_string(t, &copy[i]));
    }
    *list = copy;
    return DW_OK;
}

static dw_status check_count(const char *name, int64_t value, int64_t least, int64_t most) {
    if (value >= least && value <= most) return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT,
                    "%s is %" PRId64 "; use a number from %" PRId64 " to %" PRId64, name, value,
                    least, most);
}

/* Fails for NaN too. */
static dw_status check_number(const char *name, double value, double least, double most) {
    if (value >= least && value <= most) return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT, "%s is %g; use a number from %g to %g", name, value, least,
                    most);
}

static dw_status check_beta(const char *name, double value) {
    if (value >= 0.0 && value < 1.0) return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT, "%s is %g; use a number of at least 0 and less than 1",
                    name, value);
}

/* A step multiplies weights by 1 - lr * weight_decay. */
static dw_status check_weight_decay(const dw_trainer_options *o) {
    DW_RETURN_IF_FAILED(check_number("weight_decay", o->weight_decay, 0.0, FLT_MAX));
    if (o->lr * o->weight_decay <= 1.0) return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT,
                    "weight_decay is %g and lr %g: a step would multiply weights by 1 - lr * "
                    "weight_decay = %g; use a weight_decay of at most %g",
                    o->weight_decay, o->lr, 1.0 - o->lr * o->weight_decay, 1.0 / o->lr);
}

static dw_status check_counts(dw_trainer_options *o) {
    const int64_t most = INT64_C(1) << 31;
    DW_RETURN_IF_FAILED(check_count("sequence", o->sequence, 1, most));
    DW_RETURN_IF_FAILED(check_count("batch", o->batch, 1, most));
    if (o->micro_batch == 0) o->micro_batch = o->batch;
    DW_RETURN_IF_FAILED(check_count("micro_batch", o->micro_batch, 1, o->batch));
    if (o->batch % o->micro_batch != 0)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "batch is %" PRId64 " and micro_batch %" PRId64
                        ", which does not divide it",
                        o->batch, o->micro_batch);
    DW_RETURN_IF_FAILED(check_count("steps", o->steps, 1, INT64_C(1) << 40));
    DW_RETURN_IF_FAILED(check_count("schedule_steps", o->schedule_steps, 0, INT64_C(1) << 40));
    if (o->schedule_steps == 0) o->schedule_steps = o->steps;
    DW_RETURN_IF_FAILED(check_count("bad_steps", o->bad_steps, 1, INT64_MAX));
    DW_RETURN_IF_FAILED(check_count("validation_batches", o->validation_batches, 0, INT64_MAX));
    if (o->spike_window == 0) o->spike_window = 32;
    DW_RETURN_IF_FAILED(check_count("spike_window", o->spike_window, 1, 1 << 20));
    DW_RETURN_IF_FAILED(check_count("keep", o->keep, 1, INT64_C(1) << 30));
    if (o->seed > INT64_MAX)
        return dw__fail(DW_INVALID_ARGUMENT, "seed is %" PRIu64 "; use a number below 2^63",
                        o->seed);
    return DW_OK;
}

static dw_status check_numbers(const dw_trainer_options *o) {
    /* AdamW moves each weight by up to about lr in a step. It divides by the root of an average of squares
     * plus eps. In FP32 the square of a gradient below 1e-20 is 0, and then only eps keeps the quotient
     * finite. */
    const double most_lr = 1.0, least_eps = 1e-20;
    DW_RETURN_IF_FAILED(check_number("lr", o->lr, 0.0, most_lr));
    DW_RETURN_IF_FAILED(check_number("min_lr_ratio", o->min_lr_ratio, 0.0, 1.0));
    DW_RETURN_IF_FAILED(check_beta("beta1", o->beta1));
    DW_RETURN_IF_FAILED(check_beta("beta2", o->beta2));
    DW_RETURN_IF_FAILED(check_number("eps", o->eps, least_eps, FLT_MAX));
    DW_RETURN_IF_FAILED(check_weight_decay(o));
    if (o->spike_factor != 0.0 && !(o->spike_factor > 1.0 && o->spike_factor <= DBL_MAX))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "spike_factor is %g; use a number above 1, such as 1.5, or 0 for no limit",
                        o->spike_factor);
    return check_number("clip", o->clip, 0.0, DBL_MAX);
}

dw_status dw__trainer_check_schedule(const dw_trainer_options *o) {
    DW_RETURN_IF_FAILED(check_count("warmup_steps", o->warmup_steps, 0, o->schedule_steps));
    const bool falls = strcmp(o->schedule, "constant") != 0;
    if (!falls || o->steps <= o->schedule_steps || o->lr == 0.0 || o->min_lr_ratio > 0.0)
        return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT,
                    "the learning rate of steps %" PRId64 " to %" PRId64
                    " would be 0: min_lr_ratio is 0 and the schedule ends at step %" PRId64
                    "; give more schedule_steps, up to steps",
                    o->schedule_steps + 1, o->steps, o->schedule_steps);
}

/* A checkpoint keeps the text of a policy's file, so that a run does not resume with another one. */
static dw_status take_precision(dw_trainer *t) {
    const char **option = &t->options.precision;
    char *text;
    t->precision = *option;
    DW_RETURN_IF_FAILED(copy_string(t, &t->precision));
    DW_RETURN_IF_FAILED(dw_precision_policy_load(*option, &t->policy));
    if (t->policy->guard.every || t->policy->guard.repair > 0.0)
        DW_RETURN_IF_FAILED(dw_precision_watch_create(t->policy, &t->guard.watch));
    if (!dw__policy_is_file(*option)) return copy_string(t, option);
    DW_RETURN_IF_FAILED(dw_precision_policy_json(t->policy, &text));
    *option = text;
    dw_status status = copy_string(t, option);
    dw_text_free(text);
    return status;
}

static dw_status check_schedule_name(const dw_trainer_options *o) {
    if (dw__schedule_is_known(o->schedule)) return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT,
                    "schedule is \"%s\"; use \"cosine\", \"linear\" or \"constant\"", o->schedule);
}

dw_status dw__trainer_read_options(const dw_trainer_options *options, dw_trainer_options *o) {
    static const dw__struct known = {"dw_trainer_options",
                                     sizeof *options,
                                     {offsetof(dw_trainer_options, device),
                                      offsetof(dw_trainer_options, schedule),
                                      offsetof(dw_trainer_options, spike_factor)}};
    DW_RETURN_IF_FAILED(dw__struct_read(&known, options, o));
    o->init = o->init != 0;
    o->shuffle = o->shuffle != 0;
    if (!o->device) o->device = "cpu";
    if (!o->schedule) o->schedule = "cosine";
    if (!o->precision) o->precision = strcmp(o->device, "cpu") == 0 ? "fp32" : "bf16";
    DW_RETURN_IF_FAILED(check_counts(o));
    DW_RETURN_IF_FAILED(check_numbers(o));
    DW_RETURN_IF_FAILED(check_schedule_name(o));
    return dw__trainer_check_schedule(o);
}

dw_status dw__trainer_take_options(dw_trainer *t, const dw_trainer_options *options) {
    dw_trainer_options *o = &t->options;
    DW_RETURN_IF_FAILED(dw__trainer_read_options(options, o));
    if (!o->model) return dw__fail(DW_INVALID_ARGUMENT, "no model is named; give its folder");
    if (o->data_count == 0)
        return dw__fail(DW_INVALID_ARGUMENT, "no data are named; give files of tokens or a folder");
    if (o->checkpoint && !*o->checkpoint)
        return dw__fail(DW_INVALID_ARGUMENT, "the checkpoint folder's name is empty");
    t->schedule_is_given = options->schedule_steps != 0;
    DW_RETURN_IF_FAILED(copy_string(t, &o->model));
    DW_RETURN_IF_FAILED(take_precision(t));
    DW_RETURN_IF_FAILED(copy_string(t, &o->schedule));
    DW_RETURN_IF_FAILED(copy_string(t, &o->checkpoint));
    DW_RETURN_IF_FAILED(copy_string(t, &o->device));
    DW_RETURN_IF_FAILED(copy_list(t, o->data_count, &o->data));
    return copy_list(t, o->validation_count, &o->validation);
}
