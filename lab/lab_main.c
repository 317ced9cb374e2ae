/* `deepwell-lab evaluate` compares the planner's predictions with published runs. `deepwell-lab calibrate` fits its
 * constants. */
#include "evaluate.h"
#include "lab_base.h"
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DONE = 0, FAILED = 1, USAGE = 2 };

static void print_bold(const char *text) {
    const char *no_color = getenv("NO_COLOR");
    const int plain = (no_color && *no_color) || !isatty(STDOUT_FILENO);
    printf(plain ? "%s" : "\033[1m%s\033[0m", text);
}

static int fail(void) {
    fprintf(stderr, "deepwell-lab: %s\n", lab_error());
    return FAILED;
}

static int usage_error(const char *format, ...) LAB_PRINTF(1, 2);
static int usage_error(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("deepwell-lab: ", stderr);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputs("\nTry 'deepwell-lab --help'.\n", stderr);
    return USAGE;
}

static void print_evaluate_help(void) {
    printf("Usage: deepwell-lab evaluate FILE.csv [OPTION...]\n"
           "\n"
           "Predicts every row of a table of training runs and compares with what was measured.\n"
           "docs/planner.md lists the columns.\n"
           "\n"
           "  --json             print everything as JSON, row by row\n"
           "  --failures FILE    a table of runs that ran out of memory\n"
           "  --constants FILE   use constants of 'deepwell-lab calibrate', not the built-in ones\n"
           "\n"
           "Exit status: 1 if no row can be predicted.\n");
}

static void print_calibrate_help(void) {
    printf("Usage: deepwell-lab calibrate FILE.csv [OPTION...]\n"
           "\n"
           "Fits the constants of the predictions to a table of runs, and reports how well each\n"
           "source is predicted by constants that were fitted without it.\n"
           "\n"
           "  --write FILE       write the fitted constants, for --constants\n"
           "  --constants FILE   start the fit from these constants\n"
           "  --json             print everything as JSON\n");
}

static void print_split(const char *title, const json_t *rows) {
    const char *name;
    json_t *row;
    json_object_foreach((json_t *)rows, name, row) {
        printf("  %-10s %-22s %5d rows  median %6.2f%%  p90 %6.2f%%  bias %+6.1f%%\n", title, name,
               (int)json_integer_value(json_object_get(row, "rows")),
               100 * json_number_value(json_object_get(row, "median")),
               100 * json_number_value(json_object_get(row, "p90")),
               100 * json_number_value(json_object_get(row, "bias")));
    }
}

static void print_errors(const char *title, const json_t *errors) {
    const json_t *all = json_object_get(errors, "all");
    char line[200];
    snprintf(line, sizeof line, "%s: %d rows, median %.2f%%, 90th percentile %.2f%%", title,
             (int)json_integer_value(json_object_get(all, "rows")),
             100 * json_number_value(json_object_get(all, "median")),
             100 * json_number_value(json_object_get(all, "p90")));
    print_bold(line);
    printf("\n");
    static const char *const splits[] = {"group", "gpu", "precision", "kind"};
    for (int at = 0; at < 4; at++) print_split(splits[at], json_object_get(errors, splits[at]));
}

static void print_evaluation(const json_t *root) {
    const json_t *missing = json_object_get(root, "not_predicted"),
                 *fits = json_object_get(root, "fits");
    size_t index;
    json_t *row;
    printf("%zu rows predicted, %zu not%s\n", json_array_size(json_object_get(root, "rows")),
           json_array_size(missing), json_array_size(missing) ? ":" : "");
    json_array_foreach((json_t *)missing, index, row) {
        printf("  %-24s %s\n", json_string_value(json_object_get(row, "id")),
               json_string_value(json_object_get(row, "reason")));
    }
    if (!json_array_size(json_object_get(root, "rows"))) return; /* there are no errors to show */
    print_errors("Time, tokens/s", json_object_get(root, "errors"));
    print_bold("Memory");
    printf("\n");
    print_split("group", json_object_get(root, "memory"));
    const json_t *bubble = json_object_get(root, "bubble");
    if (json_integer_value(json_object_get(bubble, "rows")) > 0) {
        print_bold("Pipeline bubble");
        printf("\n  %d of %d rows within 2 points, median %.1f, p90 %.1f points\n",
               (int)json_integer_value(json_object_get(bubble, "within_2_points")),
               (int)json_integer_value(json_object_get(bubble, "rows")),
               100 * json_number_value(json_object_get(bubble, "median")),
               100 * json_number_value(json_object_get(bubble, "p90")));
    }
    print_bold("Choice among measured layouts: regret");
    printf("\n");
    const char *name;
    json_object_foreach(json_object_get(root, "choice"), name, row) {
        printf("  %-12s %4d tasks  median %6.2f%%  p90 %6.2f%%\n", name,
               (int)json_integer_value(json_object_get(row, "tasks")),
               100 * json_number_value(json_object_get(row, "median")),
               100 * json_number_value(json_object_get(row, "p90")));
    }
    print_bold("Fits or not");
    printf("\n");
    double ran = json_number_value(json_object_get(fits, "ran"));
    double refused = json_number_value(json_object_get(fits, "ran_rejected"));
    printf("  %.0f of %.0f runs that succeeded are predicted not to fit (%.2f%%)\n", refused, ran,
           ran > 0 ? 100 * refused / ran : 0);
    double failed = json_number_value(json_object_get(fits, "failed"));
    refused = json_number_value(json_object_get(fits, "failed_rejected"));
    if (failed > 0)
        printf("  %.0f of %.0f runs that failed are predicted not to fit (%.1f%%)\n", refused,
               failed, 100 * refused / failed);
}

/* Returns the value of the option at argv[*at], or NULL after printing a message. */
static const char *value_of(int argc, char **argv, int *at) {
    if (*at + 1 < argc) return argv[++*at];
    usage_error("%s needs a value", argv[*at]);
    return NULL;
}

typedef struct request {
    const char *file, *failures, *constants, *write;
    int json;
} request;

static int read_request(int argc, char **argv, int calibrate, request *r) {
    for (int at = 1; at < argc; at++) {
        const char **value = NULL;
        if (strcmp(argv[at], "--json") == 0)
            r->json = 1;
        else if (strcmp(argv[at], "--constants") == 0)
            value = &r->constants;
        else if (!calibrate && strcmp(argv[at], "--failures") == 0)
            value = &r->failures;
        else if (calibrate && strcmp(argv[at], "--write") == 0)
            value = &r->write;
        else if (argv[at][0] == '-')
            return usage_error("%s has no option '%s'", argv[0], argv[at]);
        else if (r->file)
            return usage_error("%s needs exactly one file; '%s' is another", argv[0], argv[at]);
        else
            r->file = argv[at];
        if (value && !(*value = value_of(argc, argv, &at))) return USAGE;
    }
    if (!r->file) return usage_error("%s needs a table of runs", argv[0]);
    return DONE;
}

static int asks_help(int argc, char **argv) {
    return argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0);
}

static int print_json_or(const request *r, const char *json, void (*print)(const json_t *)) {
    if (r->json) {
        fputs(json, stdout);
        return DONE;
    }
    json_t *root = json_loads(json, 0, NULL);
    if (!root) {
        fprintf(stderr, "deepwell-lab: out of memory\n");
        return FAILED;
    }
    print(root);
    json_decref(root);
    return DONE;
}

static int any_predicted(const lab_runs *runs) {
    for (size_t at = 0; at < lab_runs_count(runs); at++) {
        lab_run run;
        lab_run_at(runs, at, &run);
        if (!run.reason) return 1;
    }
    return 0;
}

static int evaluate(int argc, char **argv) {
    if (asks_help(argc, argv)) {
        print_evaluate_help();
        return DONE;
    }
    request r = {0};
    int result = read_request(argc, argv, 0, &r);
    if (result != DONE) return result;
    lab_runs *runs = NULL, *failures = NULL;
    char *json = NULL;
    lab_evaluate_options options = LAB_EVALUATE_OPTIONS_DEFAULT;
    options.constants = r.constants;
    if (lab_runs_load(r.file, &runs) != DW_OK ||
        (r.failures && lab_runs_load(r.failures, &failures) != DW_OK)) {
        result = fail();
    } else {
        options.failures = failures;
        result = lab_evaluate(runs, &options, &json) == DW_OK
                     ? print_json_or(&r, json, print_evaluation)
                     : fail();
        if (result == DONE && !any_predicted(runs)) result = FAILED;
    }
    lab_free(json);
    lab_runs_destroy(failures);
    lab_runs_destroy(runs);
    return result;
}

static void print_calibration(const json_t *root) {
    print_errors("Each source left out", json_object_get(root, "left_out"));
    print_errors("Fitted to all rows", json_object_get(root, "fitted"));
    print_errors("Baseline: median FLOP/s of the other sources", json_object_get(root, "baseline"));
}

static int write_constants(const char *path, const char *json) {
    json_t *root = json_loads(json, 0, NULL);
    json_t *kept =
        root ? json_pack("{s:O}", "constants", json_object_get(root, "constants")) : NULL;
    int failed = !kept || json_dump_file(kept, path, JSON_INDENT(2) | JSON_REAL_PRECISION(6)) != 0;
    json_decref(kept);
    json_decref(root);
    if (failed) fprintf(stderr, "deepwell-lab: cannot write \"%s\"\n", path);
    return failed ? FAILED : DONE;
}

static int calibrate(int argc, char **argv) {
    if (asks_help(argc, argv)) {
        print_calibrate_help();
        return DONE;
    }
    request r = {0};
    int result = read_request(argc, argv, 1, &r);
    if (result != DONE) return result;
    lab_runs *runs = NULL;
    char *json = NULL;
    lab_calibrate_options options = {sizeof options, r.constants};
    if (lab_runs_load(r.file, &runs) != DW_OK || lab_calibrate(runs, &options, &json) != DW_OK) {
        result = fail();
    } else {
        result = print_json_or(&r, json, print_calibration);
        if (r.write && result == DONE) result = write_constants(r.write, json);
    }
    lab_free(json);
    lab_runs_destroy(runs);
    return result;
}

int main(int argc, char **argv) {
    int result;
    if (argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        printf("Usage: deepwell-lab evaluate|calibrate FILE.csv [OPTION...]\n"
               "\n"
               "  evaluate   predictions beside a table of measured runs\n"
               "  calibrate  fits the planner's constants to a table of runs\n"
               "\n"
               "Each has --help. Exit status: 0 done, 1 failed, 2 wrong usage.\n");
        result = DONE;
    } else if (argc > 1 && strcmp(argv[1], "evaluate") == 0)
        result = evaluate(argc - 1, argv + 1);
    else if (argc > 1 && strcmp(argv[1], "calibrate") == 0)
        result = calibrate(argc - 1, argv + 1);
    else
        return usage_error("expected 'evaluate' or 'calibrate'");
    if (fflush(stdout) == 0 && !ferror(stdout)) return result;
    fprintf(stderr, "deepwell-lab: cannot write to standard output\n");
    return FAILED;
}
