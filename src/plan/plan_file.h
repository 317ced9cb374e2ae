/* Plans as objects: what the search fills in and the file is read into. */
#ifndef DW_PLAN_FILE_H
#define DW_PLAN_FILE_H

#include "base/base.h"
#include "deepwell/autoplan.h"

/* The public structure first: a pointer to the one is a pointer to the other. */
typedef struct dw__autoplan {
    dw_autoplan plan;
    dw__arena *arena; /* its texts and its others */
    dw_hardware *hardware;
} dw__autoplan;

/* Empty, with a copy of the hardware; dw_autoplan_destroy. */
dw_status dw__autoplan_create(const char *model_name, const dw_planner_model *model,
                              const dw_hardware *hardware, dw__autoplan **plan);
/* A text of the plan's own. */
dw_status dw__autoplan_text(dw__autoplan *plan, const char *text, const char **copy);
/* Room for `count` others, all zero with empty texts. */
dw_status dw__autoplan_others(dw__autoplan *plan, size_t count, dw_autoplan_other **others);
/* Room for `count` kernels, likewise. */
dw_status dw__autoplan_kernels(dw__autoplan *plan, size_t count, dw_autoplan_kernel **kernels);
/* DW_INVALID_ARGUMENT where a figure of it is not finite. */
dw_status dw__prediction_check(const dw_prediction *prediction);

#endif
