/* Declarations shared by the files of `deepwell train`. */
#ifndef DW_CLI_TRAIN_H
#define DW_CLI_TRAIN_H

#include "deepwell/trainer.h"
#include <jansson.h>
#include <stdio.h>

/* The parsed command line. */
typedef struct train_request {
    dw_trainer_options options;
    const char **data, **validation; /* lists that `options` points to */
    const char *output, *log, *plan;
    int64_t validate_every, save_every, report_every;
    int resume, overwrite, dry_run, json;
} train_request;

void train_print_help(void);
/* Returns CLI_DONE, or CLI_USAGE after printing a message. */
int train_read_arguments(int argc, char **argv, train_request *request);
void train_free_arguments(train_request *request);
/* Sets the options that the plan's file has and the command line does not. Returns a cli_exit, after a message if it is
 * not CLI_DONE. */
int train_apply_plan(int argc, char **argv, train_request *request);

/* ---- log: one JSON object per line, for each step, validation and change of precision ------- */

/* Opens the log of a run that has done `step` steps and drops lines of later steps. Without `resume` the log must be
 * empty. On failure prints a message and returns NULL. */
FILE *train_log_open(const char *path, int64_t step, int resume);
/* Both return 0 after printing a message if the log cannot be written. */
int train_log_write(FILE *log, const char *path, const json_t *line);
int train_log_sync(FILE *log, const char *path);

/* ---- report ---------------------------------------------------------------------------------- */

typedef struct train_reporter {
    const train_request *request;
    dw_trainer_info info;
    int terminal;        /* 1: updates one line in place */
    int line_open;       /* 1: that line has no newline yet */
    double last_drawn;   /* seconds, CLOCK_MONOTONIC */
    double step_seconds; /* smoothed duration of a step */
} train_reporter;

void train_report_begin(train_reporter *reporter, const train_request *request,
                        const dw_trainer_info *info);
/* Prints what the run will do, before anything is allocated. */
void train_report_plan(train_reporter *reporter);
/* `operands`: those of a sampled step (dw_trainer_precision_json), or NULL. */
void train_report_step(train_reporter *reporter, const dw_train_report *step,
                       const json_t *operands);
/* Reports a layer that falls back to BF16, or that the repair begins. Returns 0 after printing a message. */
int train_report_change(train_reporter *reporter, json_t *change);
void train_report_validation(train_reporter *reporter, int64_t step, double loss);
/* Prints a line of text, or with --json {"event": event, "step": step, "path": path}. */
void train_report_event(train_reporter *reporter, const char *event, int64_t step, const char *path,
                        const char *text);
/* Prints where the learning rate's schedule ends, if that is not the run's last step. */
void train_report_schedule(train_reporter *reporter, int64_t step, int64_t schedule_steps);
void train_report_end(train_reporter *reporter);

/* Make the lines of the log (with "event" in front, those of --json). Return NULL if memory is short. */
json_t *train_step_json(const dw_train_report *step, int64_t tokens, const json_t *operands);
json_t *train_change_json(json_t *change);
json_t *train_validation_json(int64_t step, double loss);

#endif
