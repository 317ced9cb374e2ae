/* The rows of a table of runs, converted to models, hardware and layouts. */
#ifndef LAB_RUNS_H
#define LAB_RUNS_H

#include "csv.h"
#include "evaluate.h"
#include "lab_base.h"

typedef struct lab_machine {
    dw_hardware *hardware;
} lab_machine;

struct lab_runs {
    lab_csv table;
    lab_arena *arena;
    lab_run *rows;
    struct {
        lab_machine *items; /* one for each pair of GPU and network in the rows */
        size_t count, capacity;
    } machines;
};

/* In run_texts.c: interprets a row's free texts. */
bool lab_says(const char *text, const char *word);                        /* ignores case */
bool lab_number_after(const char *text, const char *word, double *value); /* "gbs=12": 12 */
bool lab_number_before(const char *text, const char *word, double *value);
double lab_network_rate(const char *text,
                        int gpus_per_node); /* bytes per second and GPU; 0: not stated */
dw_framework lab_framework_of(const char *source, const char *notes, const char *sharding, int year,
                              int tp, int pp);
dw_scheme lab_precision_of(const char *text);
void lab_recompute_of(const char *text, double layers, dw_layout *layout);
void lab_sharding_of(const char *text, int gpus_per_node, dw_layout *layout);
/* Fills in what Megatron-Bridge's recipes of mixtures do and the row does not state: the dispatcher, its overlap, and
 * CUDA graphs. The release is in the notes ("NeMo container 25.11"). */
void lab_bridge_mixture(const char *notes, const char *model, const char *gpu, dw_layout *layout);
dw_pipeline_schedule lab_schedule_of(const char *text, int virtual_stages);

/* In run_hardware.c. *reason says why there is no such machine; `runs` owns *found. */
dw_status lab_run_machine(lab_runs *runs, size_t row, const char **reason,
                          const dw_hardware **found);

/* In run_model.c. Returns NULL, or why the row describes no model. */
const char *lab_run_model(const lab_csv *table, size_t row, dw_model_sizes *model);

#endif
