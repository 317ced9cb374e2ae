/* Compares predictions with measurements: tables of published runs.
 *
 *     dw_runs *runs;
 *     char *json;
 *     dw_runs_load("runs.csv", &runs);      // one run per row
 *     dw_evaluate(runs, NULL, &json);       // predicts every row; reports errors, choice of layouts, fits or not
 *     dw_text_free(json);
 *     dw_calibrate(runs, NULL, &json);      // fits the constants again; judged by leaving each source out
 *     dw_text_free(json);
 *     dw_runs_destroy(runs);
 *
 * Columns are found by name and may be in any order. docs/planner.md lists the columns and explains how descriptions of
 * layouts are read. Result columns (tokens_per_s_per_gpu, step_time_s, peak_mem_gb, ...) are only compared with; no
 * prediction uses them.
 */
#ifndef LAB_EVALUATE_H
#define LAB_EVALUATE_H

#include "deepwell/planner.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lab_runs lab_runs;

/* DW_IO. DW_PARSE names the line and the mistake: no header, a header without the required columns, a row with more
 * fields than the header, an unterminated quote, a file larger than 256 MiB. A row whose values cannot be understood is
 * not an error; dw_run_at gives the reason why it is not predicted. */
DW_API dw_status dw_runs_load(const char *path, dw_runs **runs);
DW_API dw_status dw_runs_parse(const char *text, size_t bytes, dw_runs **runs);
DW_API void dw_runs_destroy(dw_runs *runs); /* may be NULL */
DW_API size_t dw_runs_count(const dw_runs *runs);

/* What a source means by the memory of a run. */
typedef enum lab_memory_meaning {
    LAB_MEMORY_UNSTATED,
    LAB_MEMORY_ALLOCATED,      /* of the heaviest rank */
    LAB_MEMORY_ALLOCATED_LAST, /* of the last rank */
    LAB_MEMORY_RESERVED,
    LAB_MEMORY_USED /* as nvidia-smi shows it */
} lab_memory_meaning;

/* One run. Its strings belong to the dw_runs. */
typedef struct dw_run {
    const char *id, *group, *gpu, *model_name, *precision;
    /* Why it cannot be predicted; NULL: it can, and the members below are set. */
    const char *reason;
    dw_planner_model model;
    const dw_hardware *hardware;
    dw_layout layout;
    double tokens_per_second; /* per GPU, measured; 0: not stated */
    double memory;            /* bytes, measured; 0: not stated */
    dw_memory_meaning memory_meaning;
    double bubble; /* fraction of the pipeline's time, measured; negative: not stated */
    /* 1: throughput or step time is printed in the source, the layout is known, and the run is neither superseded nor a
     * stand-in for a larger model. */
    int scored;
    int mixture;      /* 1: a mixture of experts */
    int layout_known; /* 1: the source states how the run was sharded */
} dw_run;
DW_API void dw_run_at(const dw_runs *runs, size_t index, dw_run *run);

typedef struct dw_evaluate_options {
    size_t struct_size; /* sizeof(dw_evaluate_options) */
    /* Path of a file with dw_calibrate's constants; NULL: the built-in ones. */
    const char *constants;
    const dw_runs *failures; /* runs that ran out of memory; may be NULL */
} dw_evaluate_options;
#define DW_EVALUATE_OPTIONS_DEFAULT                                                                \
    { sizeof(dw_evaluate_options), NULL, NULL }

/* *json: {"rows": [{"id", "tokens_per_s_per_gpu", "predicted", "error", "parts", ...}], "not_predicted": [{"id",
 * "reason"}], "errors": {"all", "group": {...}, "gpu", "precision", "kind"}, "memory", "bubble", "choice", "fits"}. An
 * error is |predicted / measured - 1| of tokens/s. Free *json with dw_text_free. `options` NULL: the defaults. */
DW_API dw_status dw_evaluate(const dw_runs *runs, const dw_evaluate_options *options, char **json);

typedef struct dw_calibrate_options {
    size_t struct_size;    /* sizeof(dw_calibrate_options) */
    const char *constants; /* path of the file where the search starts; NULL: the built-in ones */
} dw_calibrate_options;

/* Fits the constants by least squares of the logarithm of time. The fit is robust against single rows, holds each
 * constant near its prior, and gives every source the same weight, however many rows it has. *json:
 *     "constants"   {...}: what the option `constants` reads
 *     "left_out"    errors as dw_evaluate gives them; each row is predicted with constants fitted without its source
 *     "fitted"      the same with constants fitted to all rows
 *     "baseline"    the median FLOP/s of the other sources on such a GPU
 * Free *json with dw_text_free. `options` NULL: the defaults. */
DW_API dw_status dw_calibrate(const dw_runs *runs, const dw_calibrate_options *options,
                              char **json);

#ifdef __cplusplus
}
#endif
#endif
