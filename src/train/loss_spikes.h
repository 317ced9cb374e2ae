/* Loss spikes: a step whose loss is far above those of the steps before it. The rule is that of deepwell.Trainer
 * (docs/trainer.md), so that either resumes the other's runs. */
#ifndef DW_LOSS_SPIKES_H
#define DW_LOSS_SPIKES_H

#include "base/base.h"

/* The losses of the last applied steps, oldest first. There is room for one more than `window`, because a limit leaves
 * out the step just before its own. Zeros: no loss is too large. */
typedef struct dw__recent_losses {
    double factor;
    int64_t window, count;
    int64_t *steps;
    double *losses;
} dw__recent_losses;

/* Takes the arrays from `memory`. `factor` 0: none. */
dw_status dw__recent_losses_create(dw__arena *memory, double factor, int64_t window,
                                   dw__recent_losses *recent);
/* Adds the loss of an applied step, and forgets the oldest if there is no room. */
void dw__recent_losses_add(dw__recent_losses *recent, int64_t step, double loss);
/* Returns the loss above which step `step` is a spike: `factor` times the mean of the last `window` losses before step
 * step - 1. Infinity: fewer than 8 losses (or `window`, if that is less) are known, or their mean is not above 0. */
double dw__recent_losses_limit(const dw__recent_losses *recent, int64_t step);

#endif
