/* Plans as objects. The search fills them in, and the reader of plan files does. */
#ifndef DW_PLAN_FILE_H
#define DW_PLAN_FILE_H

#include "base/base.h"
#include "deepwell/autoplan.h"

/* The public structure is the first member, so a pointer to it is also a pointer to dw__autoplan. */
typedef struct dw__autoplan {
    dw_autoplan plan;
    dw__arena *arena; /* holds its texts and alternatives */
    dw_hardware *hardware;
} dw__autoplan;

/* Creates an empty plan with a copy of the hardware. Must be freed with dw_autoplan_destroy. */
dw_status dw__autoplan_create(const char *model_name, const dw_model_sizes *model,
                              const dw_hardware *hardware, dw__autoplan **plan);
/* Copies a text into the plan's arena. */
dw_status dw__autoplan_text(dw__autoplan *plan, const char *text, const char **copy);
/* Allocates `count` alternatives, zeroed and with empty texts. */
dw_status dw__autoplan_others(dw__autoplan *plan, size_t count, dw_autoplan_other **others);
/* Allocates `count` kernels, zeroed and with empty texts. */
dw_status dw__autoplan_kernels(dw__autoplan *plan, size_t count, dw_autoplan_kernel **kernels);
/* DW_INVALID_ARGUMENT: a figure of the prediction is not finite. */
dw_status dw__prediction_check(const dw_prediction *prediction);

#endif
