#include "train/learning_rate.h"
#include <math.h>

double dw__learning_rate(const dw_trainer_options *options, int64_t step) {
    const double pi = 3.14159265358979323846;
    int64_t warmup = options->warmup_steps;
    if (step <= warmup) return options->lr * (double)step / (double)warmup;
    if (step >= options->schedule_steps) return options->lr * options->min_lr_ratio;
    double progress = (double)(step - warmup) / (double)(options->schedule_steps - warmup);
    double share =
        options->min_lr_ratio + (1.0 - options->min_lr_ratio) * 0.5 * (1.0 + cos(pi * progress));
    return options->lr * share;
}
