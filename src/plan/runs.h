/* Rows of a table of runs, understood as models, hardware and layouts. */
#ifndef DW_RUNS_H
#define DW_RUNS_H

#include "deepwell/evaluate.h"
#include "plan/csv.h"
#include "plan/planner_internal.h"

typedef struct dw__machine {
    dw_hardware *hardware;
} dw__machine;

struct dw_runs {
    dw__csv table;
    dw__arena *arena;
    dw_run *rows;
    struct {
        dw__machine *items; /* one for each GPU and network that the rows name */
        size_t count, capacity;
    } machines;
};

/* In run_texts.c: what the free texts of a row say. */
bool dw__says(const char *text, const char *word);                        /* whatever the case */
bool dw__number_after(const char *text, const char *word, double *value); /* "gbs=12": 12 */
bool dw__number_before(const char *text, const char *word, double *value);
double dw__network_rate(const char *text,
                        int gpus_per_node); /* bytes a second for each GPU; 0: not said */
dw_framework dw__framework_of(const char *source, const char *notes, const char *sharding, int year,
                              int tp, int pp);
dw_train_precision dw__precision_of(const char *text);
void dw__recompute_of(const char *text, double layers, dw_layout *layout);
void dw__sharding_of(const char *text, int gpus_per_node, dw_layout *layout);
dw_pipeline_schedule dw__schedule_of(const char *text, int virtual_stages);

/* In run_hardware.c. *reason: why there is no such machine; *found is owned by `runs`. */
dw_status dw__run_machine(dw_runs *runs, size_t row, const char **reason,
                          const dw_hardware **found);

/* In run_model.c. NULL, or why the row names no model. */
const char *dw__run_model(const dw__csv *table, size_t row, dw_planner_model *model);

#endif
