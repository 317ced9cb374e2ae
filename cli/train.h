/* What the files of `deepwell train` share. */
#ifndef DW_CLI_TRAIN_H
#define DW_CLI_TRAIN_H

#include "deepwell/trainer.h"
#include <jansson.h>
#include <stdio.h>

/* What the command line says. */
typedef struct train_request {
    dw_trainer_options options;
    const char **data, **validation; /* lists that options point to */
    const char *output, *log;
    int64_t validate_every, save_every, report_every;
    int resume, overwrite, dry_run, json;
} train_request;

void train_print_help(void);
/* CLI_DONE, or CLI_USAGE with a message. */
int train_read_arguments(int argc, char **argv, train_request *request);
void train_free_arguments(train_request *request);

/* ---- log: one JSON object a line, one line for each step and each validation ------------------ */

/* For a run that has done `step` steps: a run from step 0 must not find lines of another one (unless it
 * resumes); lines of later steps are dropped. NULL with a message on stderr. */
FILE *train_log_open(const char *path, int64_t step, int resume);
/* 0 with a message on stderr when it cannot be written. */
int train_log_write(FILE *log, const char *path, const json_t *line);
int train_log_sync(FILE *log, const char *path);

/* ---- report ---------------------------------------------------------------------------------- */

typedef struct train_reporter {
    const train_request *request;
    dw_trainer_info info;
    int terminal;        /* one updating line */
    int line_open;       /* it stands without a newline */
    double last_drawn;   /* seconds */
    double step_seconds; /* smoothed */
} train_reporter;

void train_report_begin(train_reporter *reporter, const train_request *request,
                        const dw_trainer_info *info);
/* What is going to be done, before anything is allocated. */
void train_report_plan(train_reporter *reporter);
void train_report_step(train_reporter *reporter, const dw_train_report *step);
void train_report_validation(train_reporter *reporter, int64_t step, double loss);
/* A line of text for people, an event for --json: {"event": event, "step": step, "path": path}. */
void train_report_event(train_reporter *reporter, const char *event, int64_t step, const char *path,
                        const char *text);
/* Where the learning rate's cosine ends, when that is not the run's last step. */
void train_report_schedule(train_reporter *reporter, int64_t step, int64_t schedule_steps);
void train_report_end(train_reporter *reporter);

/* The lines of the log (and, with "event" in front, of --json). NULL: no memory. */
json_t *train_step_json(const dw_train_report *step, int64_t tokens);
json_t *train_validation_json(int64_t step, double loss);

#endif
