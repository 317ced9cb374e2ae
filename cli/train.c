/* `deepwell train`: the loop around a trainer, and its handling of interruptions. */
#include "train.h"
#include "cli.h"
#include "deepwell/deepwell.h"
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- signals --------------------------------------------------------------------------------- */

static const int stopping[] = {SIGINT, SIGTERM, SIGHUP};
static volatile sig_atomic_t stop_signal; /* the first one received; checked between steps */

/* Installs a handler. A signal that the caller ignores (nohup) stays ignored. */
static void handle_signals(void (*handler)(int)) {
    for (size_t i = 0; i < sizeof stopping / sizeof *stopping; i++) {
        struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART}, before;
        sigemptyset(&action.sa_mask);
        if (sigaction(stopping[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN)
            sigaction(stopping[i], &action, NULL);
    }
}

/* Lets the current step finish. A second signal ends the program at once. */
static void note_signal(int number) {
    const int error = errno;
    stop_signal = number;
    handle_signals(SIG_DFL);
    errno = error;
}

/* ---- the run --------------------------------------------------------------------------------- */

typedef struct run {
    const train_request *request;
    dw_trainer *trainer;
    train_reporter reporter;
    FILE *log;
} run;

static int exit_of(dw_status status) {
    return status == DW_UNSUPPORTED ? CLI_UNSUPPORTED : CLI_FAILED;
}

static int fail(run *r, dw_status status) {
    if (r) train_report_end(&r->reporter);
    fflush(stdout);
    fprintf(stderr, "deepwell: %s\n", dw_last_error());
    return exit_of(status);
}

static int log_line(run *r, json_t *line) {
    int fine = !r->log || train_log_write(r->log, r->request->log, line);
    json_decref(line);
    return fine ? CLI_DONE : CLI_FAILED;
}

static int validate(run *r, int64_t step) {
    double loss = 0.0;
    dw_status status = dw_trainer_validate(r->trainer, &loss);
    if (status != DW_OK) return fail(r, status);
    train_report_validation(&r->reporter, step, loss);
    return log_line(r, train_validation_json(step, loss));
}

static int checkpoint(run *r, int64_t step) {
    if (r->log && !train_log_sync(r->log, r->request->log)) return CLI_FAILED;
    dw_status status = dw_trainer_checkpoint(r->trainer);
    if (status != DW_OK) return fail(r, status);
    train_report_event(&r->reporter, "checkpoint", step, dw_trainer_checkpoint_path(r->trainer),
                       "checkpoint");
    return CLI_DONE;
}

static int due(int64_t step, int64_t every, int64_t last) {
    return step == last || (every > 0 && step % every == 0);
}

/* Returns what the guard of the precision found in the newest step; NULL: nothing, or *result says that this failed. */
static json_t *read_precision(run *r, int *result) {
    char *text = NULL;
    dw_status status = dw_trainer_precision_json(r->trainer, &text);
    if (status != DW_OK) {
        *result = fail(r, status);
        return NULL;
    }
    json_t *found = text ? json_loads(text, 0, NULL) : NULL;
    if (text && !found) {
        fprintf(stderr, "deepwell: memory is exhausted\n");
        *result = CLI_FAILED;
    }
    dw_text_free(text);
    return found;
}

/* Reports and logs the repair that begins with a step, or the layers that fall back after it. */
static int report_changes(run *r, const json_t *found, int repair) {
    size_t i;
    json_t *change;
    int result = CLI_DONE;
    json_array_foreach(json_object_get(found, "changes"), i, change) {
        if ((json_object_get(change, "repair") != NULL) != repair) continue;
        if (!train_report_change(&r->reporter, change)) return CLI_FAILED;
        if ((result = log_line(r, train_change_json(change))) != CLI_DONE) return result;
    }
    return result;
}

/* Reports and logs a step, and what the guard of the precision did in it. */
static int report_step(run *r, const dw_train_report *report) {
    int result = CLI_DONE;
    json_t *found = read_precision(r, &result);
    const json_t *operands = json_object_get(found, "operands");
    if (result == CLI_DONE) result = report_changes(r, found, 1);
    if (result == CLI_DONE) {
        train_report_step(&r->reporter, report, operands);
        result = log_line(r, train_step_json(report, r->reporter.info.tokens_per_step, operands));
    }
    if (result == CLI_DONE) result = report_changes(r, found, 0);
    json_decref(found);
    return result;
}

/* Runs one step, then the validation and the checkpoint that are due. */
static int advance(run *r) {
    const train_request *q = r->request;
    int64_t last = q->options.steps;
    dw_train_report report = {0};
    dw_status status = dw_trainer_step(r->trainer, &report);
    if (report.step == 0 || (status != DW_OK && report.applied)) return fail(r, status);
    int result = report_step(r, &report);
    if (status != DW_OK) return fail(r, status);
    if (result == CLI_DONE && q->options.validation_count > 0 &&
        due(report.step, q->validate_every, last))
        result = validate(r, report.step);
    /* A step that was not applied changes nothing, so there is nothing new to save. */
    if (result == CLI_DONE && q->options.checkpoint && report.applied &&
        due(report.step, q->save_every, last))
        result = checkpoint(r, report.step);
    return result;
}

/* A closed standard output stops the run as a signal does: with a checkpoint. */
static int interrupted(void) { return stop_signal || ferror(stdout); }

static int stop_early(run *r) {
    int64_t step = dw_trainer_steps_done(r->trainer);
    const char *kept = r->request->options.checkpoint;
    int result = kept ? checkpoint(r, step) : CLI_DONE;
    train_report_end(&r->reporter);
    if (result != CLI_DONE) return result;
    fprintf(stderr, "deepwell: stopped after step %lld of %lld; %s\n", (long long)step,
            (long long)r->request->options.steps,
            kept ? "continue with --resume" : "nothing was saved without --checkpoint");
    return stop_signal ? 128 + stop_signal : CLI_FAILED;
}

static int save(run *r) {
    const char *output = r->request->output;
    if (!output) return CLI_DONE;
    dw_status status = dw_trainer_save(r->trainer, output);
    if (status != DW_OK) return fail(r, status);
    train_report_event(&r->reporter, "model", dw_trainer_steps_done(r->trainer), output,
                       "model in");
    return CLI_DONE;
}

static int loop(run *r) {
    int64_t last = r->request->options.steps;
    /* Before the first step there is nothing to save, and a signal should end the program at once. */
    handle_signals(note_signal);
    while (dw_trainer_steps_done(r->trainer) < last) {
        int result = advance(r);
        if (result != CLI_DONE) return result;
        if (interrupted() && dw_trainer_steps_done(r->trainer) < last) return stop_early(r);
    }
    return save(r);
}

/* Checks before training that the output folder can be written. */
static int check_output(const char *output) {
    char parent[PATH_MAX];
    struct stat info;
    size_t length = strlen(output);
    while (length > 1 && output[length - 1] == '/') length--;
    if (length + 2 > sizeof parent) {
        fprintf(stderr, "deepwell: the path of --output is too long\n");
        return CLI_FAILED;
    }
    memcpy(parent, output, length);
    parent[length] = '\0';
    int exists = stat(parent, &info) == 0;
    if (exists && !S_ISDIR(info.st_mode)) {
        fprintf(stderr, "deepwell: --output \"%s\" is a file; name a folder\n", output);
        return CLI_FAILED;
    }
    char *slash = strrchr(parent, '/');
    if (!slash)
        strcpy(parent, ".");
    else
        slash[slash == parent] = '\0';
    if (access(parent, W_OK | X_OK) == 0) return CLI_DONE;
    fprintf(stderr, "deepwell: --output \"%s\" cannot be created: \"%s\": %s\n", output, parent,
            strerror(errno));
    return CLI_FAILED;
}

static int has_files(const char *folder) {
    DIR *entries = opendir(folder);
    int found = 0;
    for (struct dirent *entry; entries && !found && (entry = readdir(entries));)
        found = strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
    if (entries) closedir(entries);
    return found;
}

/* A resumed run may replace the model that it wrote before. Any other run needs --overwrite. */
static int check_overwrite(const run *r, int resumed) {
    const train_request *q = r->request;
    if (!q->output || q->overwrite || resumed || !has_files(q->output)) return CLI_DONE;
    fprintf(stderr,
            "deepwell: --output \"%s\" holds a model; name another folder, or pass --overwrite to "
            "replace it\n",
            q->output);
    return CLI_FAILED;
}

static int prepare_output(run *r) {
    const train_request *q = r->request;
    if (!q->output) return CLI_DONE;
    if (check_output(q->output) != CLI_DONE) return CLI_FAILED;
    dw_status status = dw_trainer_check_save(r->trainer, q->output);
    if (status != DW_OK) return fail(r, status);
    return check_overwrite(r, q->resume);
}

static int begin(run *r) {
    const train_request *q = r->request;
    if (prepare_output(r) != CLI_DONE) return CLI_FAILED;
    dw_status status = dw_trainer_begin(r->trainer, q->resume);
    if (status != DW_OK) return fail(r, status);
    int64_t step = dw_trainer_steps_done(r->trainer);
    if (check_overwrite(r, step > 0) != CLI_DONE) return CLI_FAILED;
    if (step > 0)
        train_report_event(&r->reporter, "resume", step, dw_trainer_checkpoint_path(r->trainer),
                           "resumed from");
    else if (q->resume)
        train_report_event(&r->reporter, "start", 0, q->options.checkpoint,
                           "there is no checkpoint yet in");
    train_report_schedule(&r->reporter, step, dw_trainer_schedule_steps(r->trainer));
    if (!q->log) return CLI_DONE;
    r->log = train_log_open(q->log, step, q->resume);
    return r->log ? CLI_DONE : CLI_FAILED;
}

static int train(const train_request *request) {
    run r = {.request = request};
    dw_trainer_info info;
    dw_status status = dw_trainer_create(&request->options, &r.trainer);
    if (status != DW_OK) {
        int result = fail(NULL, status);
        /* DW_INVALID_ARGUMENT means here that an option's value is invalid. */
        return status == DW_INVALID_ARGUMENT ? CLI_USAGE : result;
    }
    dw_trainer_describe(r.trainer, &info);
    train_report_begin(&r.reporter, request, &info);
    train_report_plan(&r.reporter);
    int result = CLI_DONE;
    if (!request->dry_run) {
        result = begin(&r);
        if (result == CLI_DONE) result = loop(&r);
    }
    train_report_end(&r.reporter);
    if (r.log && fclose(r.log) != 0 && result == CLI_DONE) {
        fprintf(stderr, "deepwell: cannot write the log \"%s\"\n", request->log);
        result = CLI_FAILED;
    }
    dw_trainer_destroy(r.trainer);
    return result;
}

int cli_train(int argc, char **argv) {
    if (argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        train_print_help();
        return CLI_DONE;
    }
    /* A file at its size limit and a closed pipe then make writes fail, which is reported with a message. */
    signal(SIGXFSZ, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    train_request request;
    int result = train_read_arguments(argc, argv, &request);
    if (result == CLI_DONE) result = train(&request);
    train_free_arguments(&request);
    return result;
}
