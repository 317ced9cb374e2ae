#include "train/learning_rate.h"
#include <math.h>
#include <string.h>

/* Each is a function of the share of the steps between warm-up and end that are done, from 1 at 0 to 0 at 1. */
static double cosine(double progress) {
    const double pi = 3.14159265358979323846;
    return 0.5 * (1.0 + cos(pi * progress));
}
static double linear(double progress) { return 1.0 - progress; }

static const struct schedule {
    const char *name;
    double (*falls)(double progress); /* NULL: the rate stays */
} schedules[] = {{"cosine", cosine}, {"linear", linear}, {"constant", NULL}};

static const struct schedule *find(const char *name) {
    for (size_t i = 0; i < sizeof schedules / sizeof schedules[0]; i++)
        if (strcmp(schedules[i].name, name) == 0) return &schedules[i];
    return NULL;
}

bool dw__schedule_is_known(const char *name) { return find(name) != NULL; }

double dw__learning_rate(const dw_trainer_options *options, int64_t step) {
    const struct schedule *schedule = find(options->schedule);
    int64_t warmup = options->warmup_steps;
    if (step <= warmup) return options->lr * (double)step / (double)warmup;
    if (!schedule->falls) return options->lr;
    if (step >= options->schedule_steps) return options->lr * options->min_lr_ratio;
    double progress = (double)(step - warmup) / (double)(options->schedule_steps - warmup);
    double share =
        options->min_lr_ratio + (1.0 - options->min_lr_ratio) * schedule->falls(progress);
    return options->lr * share;
}
