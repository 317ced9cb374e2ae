/* The learning rate of a step: linear warm-up, then a cosine (Loshchilov and Hutter 2017, without restarts) or a line
 * down to a fraction of the peak, or the peak itself. */
#ifndef DW_SCHEDULE_H
#define DW_SCHEDULE_H

#include "deepwell/trainer.h"
#include <stdbool.h>

bool dw__schedule_is_known(const char *name);
/* `step` is 1 or more, options->schedule_steps is not 0 and options->schedule is a known name. trainer.h has the
 * formulas. */
double dw__learning_rate(const dw_trainer_options *options, int64_t step);

#endif
