/* The learning rate of a step: linear warm-up, then a cosine down to a share of the peak (Loshchilov and
 * Hutter 2017, without restarts). */
#ifndef DW_SCHEDULE_H
#define DW_SCHEDULE_H

#include "deepwell/trainer.h"

/* `step` of 1 or more, options->schedule_steps not 0; formula in trainer.h. */
double dw__learning_rate(const dw_trainer_options *options, int64_t step);

#endif
