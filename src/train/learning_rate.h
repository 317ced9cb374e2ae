/* The learning rate of a step: linear warm-up, then a cosine down to a fraction of the peak (Loshchilov and
 * Hutter 2017, without restarts). */
#ifndef DW_SCHEDULE_H
#define DW_SCHEDULE_H

#include "deepwell/trainer.h"

/* `step` is 1 or more, and options->schedule_steps is not 0. trainer.h has the formula. */
double dw__learning_rate(const dw_trainer_options *options, int64_t step);

#endif
