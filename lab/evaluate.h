/* Compares the planner's predictions with tables of published runs.
 *
 *     lab_runs_load     reads a CSV file with one run per row
 *     lab_evaluate      predicts every row and computes the errors
 *     lab_calibrate     fits the constants of the predictions, with cross-validation by source
 *
 * Columns are found by name, in any order; docs/planner.md lists the columns that are read and the rules for texts of
 * layouts. Predictions never use the columns of results (tokens_per_s_per_gpu, step_time_s, peak_mem_gb, ...).
 */
#ifndef LAB_EVALUATE_H
#define LAB_EVALUATE_H

#include "deepwell/planner.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lab_runs lab_runs;

/* DW_IO: the file cannot be read. DW_PARSE names the line and the mistake: no header, a header without the columns that
 * every run needs, a row with more fields than the header, an unterminated quote, or a file beyond 256 MiB. A row with
 * values that cannot be understood does not fail the call; lab_run_at says why it has no prediction. */
dw_status lab_runs_load(const char *path, lab_runs **runs);
dw_status lab_runs_parse(const char *text, size_t bytes, lab_runs **runs);
void lab_runs_destroy(lab_runs *runs); /* NULL allowed */
size_t lab_runs_count(const lab_runs *runs);

/* The kinds of memory that sources state for a run. */
typedef enum lab_memory_meaning {
    LAB_MEMORY_UNSTATED,
    LAB_MEMORY_ALLOCATED,      /* on the heaviest rank */
    LAB_MEMORY_ALLOCATED_LAST, /* on the last rank */
    LAB_MEMORY_RESERVED,
    LAB_MEMORY_USED /* as nvidia-smi reports it */
} lab_memory_meaning;

/* The runs own the texts. */
typedef struct lab_run {
    const char *id, *group, *gpu, *model_name, *precision;
    const char *reason; /* why there is no prediction; if NULL, the members below are set */
    dw_model_sizes model;
    const dw_hardware *hardware;
    dw_layout layout;
    double tokens_per_second; /* measured, of one GPU; 0: not stated */
    double memory;            /* measured, in bytes; 0: not stated */
    lab_memory_meaning memory_meaning;
    double bubble; /* measured idle share of the pipeline's time; negative: not stated */
    /* The row states throughput or step time and the layout, is not superseded, and does not stand in for a larger
     * model. */
    int scored;
    int mixture;
    int layout_known; /* the source states how the model was sharded */
} lab_run;
void lab_run_at(const lab_runs *runs, size_t index, lab_run *run);

typedef struct lab_evaluate_options {
    size_t struct_size;       /* sizeof(lab_evaluate_options) */
    const char *constants;    /* a file that lab_calibrate wrote; NULL: the built-in constants */
    const lab_runs *failures; /* runs that ran out of memory; NULL: none */
} lab_evaluate_options;
#define LAB_EVALUATE_OPTIONS_DEFAULT                                                               \
    { sizeof(lab_evaluate_options), NULL, NULL }

/* *json: {"rows": [{"id", "tokens_per_s_per_gpu", "predicted", "error", "parts", ...}], "not_predicted": [{"id",
 * "reason"}], "errors": {"all", "group": {...}, "gpu", "precision", "kind"}, "memory", "bubble", "choice", "fits"}. An
 * error is |predicted / measured - 1| of tokens/s. Released with lab_free. options NULL: defaults. */
dw_status lab_evaluate(const lab_runs *runs, const lab_evaluate_options *options, char **json);

typedef struct lab_calibrate_options {
    size_t struct_size;
    const char *constants; /* starting point of the fit; NULL: the built-in constants */
} lab_calibrate_options;

/* Fits the constants by least squares of the logarithm of time, robust against single rows, with each constant held
 * near its prior. The weight of a source is the square root of its number of rows. *json: {"constants": {...},
 * "left_out": errors as from lab_evaluate, with each row predicted by constants that were fitted without its source,
 * "fitted": errors with constants fitted to all rows, "baseline": errors of predicting the median FLOP/s of the other
 * sources on the same GPU}. The option `constants` accepts this JSON. */
dw_status lab_calibrate(const lab_runs *runs, const lab_calibrate_options *options, char **json);

#ifdef __cplusplus
}
#endif
#endif
