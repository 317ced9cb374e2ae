/* Predictions beside what was measured: tables of published runs.
 *
 *     lab_runs_load     a CSV file of runs, one a row
 *     lab_evaluate      predicts every row; errors by source, GPU, precision; choice among layouts; fits or not
 *     lab_calibrate     fits the constants of the predictions again, judged by leaving each source out
 *
 * Columns are found by name, in any order; docs/planner.md lists those that are read, and how texts of layouts are
 * understood. Results (tokens_per_s_per_gpu, step_time_s, peak_mem_gb, ...) are compared with and never predicted from.
 */
#ifndef LAB_EVALUATE_H
#define LAB_EVALUATE_H

#include "deepwell/planner.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lab_runs lab_runs;

/* DW_IO; DW_PARSE names the line and what is wrong with it: no header, one
 * without the columns that every run needs, a row that has more fields than the header, quotes that do not end, a file
 * beyond 256 MiB. A row whose values cannot be understood is no error: lab_run_at says
 * why it is not predicted. */
dw_status lab_runs_load(const char *path, lab_runs **runs);
dw_status lab_runs_parse(const char *text, size_t bytes, lab_runs **runs);
void lab_runs_destroy(lab_runs *runs); /* NULL allowed */
size_t lab_runs_count(const lab_runs *runs);

/* What a source means by the memory of a run. */
typedef enum lab_memory_meaning {
    LAB_MEMORY_UNSTATED,
    LAB_MEMORY_ALLOCATED,      /* of the heaviest rank */
    LAB_MEMORY_ALLOCATED_LAST, /* of the last rank */
    LAB_MEMORY_RESERVED,
    LAB_MEMORY_USED /* as nvidia-smi shows it */
} lab_memory_meaning;

/* Texts belong to the runs. */
typedef struct lab_run {
    const char *id, *group, *gpu, *model_name, *precision;
    const char *reason; /* why it cannot be predicted; NULL: it can, and the rest is set */
    dw_model_sizes model;
    const dw_hardware *hardware;
    dw_layout layout;
    double tokens_per_second; /* of one GPU, measured; 0: not said */
    double memory;            /* bytes, measured; 0: not said */
    lab_memory_meaning memory_meaning;
    double bubble; /* part of the pipeline's time, measured; below 0: not said */
    int scored; /* throughput or step time printed, not superseded, no stand-in for a larger model, layout known */
    int mixture;
    int layout_known; /* the source says how it was sharded */
} lab_run;
void lab_run_at(const lab_runs *runs, size_t index, lab_run *run);

typedef struct lab_evaluate_options {
    size_t struct_size;       /* sizeof(lab_evaluate_options) */
    const char *constants;    /* a file that lab_calibrate wrote; NULL: those that are built in */
    const lab_runs *failures; /* runs that failed for want of memory; NULL: none */
} lab_evaluate_options;
#define LAB_EVALUATE_OPTIONS_DEFAULT                                                               \
    { sizeof(lab_evaluate_options), NULL, NULL }

/* *json: {"rows": [{"id", "tokens_per_s_per_gpu", "predicted", "error", "parts", ...}], "not_predicted": [{"id",
 * "reason"}], "errors": {"all", "group": {...}, "gpu", "precision", "kind"}, "memory", "bubble", "choice", "fits"}. An
 * error is |predicted / measured - 1| of tokens/s. Released with lab_free. options NULL: defaults. */
dw_status lab_evaluate(const lab_runs *runs, const lab_evaluate_options *options, char **json);

typedef struct lab_calibrate_options {
    size_t struct_size;
    const char *constants; /* where the search begins; NULL: those that are built in */
} lab_calibrate_options;

/* Least squares of the logarithm of time, robust against single rows, each constant held near its prior; every source
 * weighs alike however many rows it has. *json: {"constants": {...}, "left_out": errors as lab_evaluate gives them,
 * each row predicted with constants that were fitted without its source, "fitted": the same with all rows, "baseline":
 * the median FLOP/s of the other sources on such a GPU}. Its "constants" is what `constants` takes. */
dw_status lab_calibrate(const lab_runs *runs, const lab_calibrate_options *options, char **json);

#ifdef __cplusplus
}
#endif
#endif
