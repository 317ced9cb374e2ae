/* deepwell-ops: one program that tests the correctness, gradient, speed and support of every operation. */
#include "ops_driver.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "usage: deepwell-ops MODE [options]\n"
    "modes:\n"
    "  test     every kernel against the FP64 interpretation of its operation\n"
    "  grad     gradients against finite differences in FP64, and against those of expansions\n"
    "  perf     time, GFLOP/s and GB/s of every kernel\n"
    "  support  which kernel takes which operation and element type\n"
    "options:\n"
    "  -o OP         only this operation\n"
    "  -b BACKEND    only kernels whose name contains this (cpu, reference, ...)\n"
    "  -p REGEX      only cases whose printed name matches (POSIX extended)\n"
    "  --case TEXT   this case instead of the table, e.g. \"matmul f32[3,5] f32[5,7]\"\n"
    "  --seed N      of the random data (default 1)\n"
    "  --quick       test: other layouts and data for f32 alone; grad: one seed\n"
    "  --list        print the names of the cases and run nothing\n";

bool ops_wants_op(const ops_options *options, const ops_case *c) {
    return !options->op || strcmp(options->op, dw_op_name(c->op)) == 0;
}

bool ops_wants_name(const ops_options *options, const char *name) {
    return !options->has_pattern || regexec(&options->pattern, name, 0, NULL, 0) == 0;
}

bool ops_wants_kernel(const ops_options *options, const dw__kernel *kernel) {
    return !options->backend || strstr(kernel->name, options->backend) != NULL;
}

void ops_report_failure(const ops_options *options, const char *mode, const char *name,
                        const char *kernel, const char *reason) {
    printf("FAILED %s%s%s\n    %s\n    again: deepwell-ops %s --seed %llu", kernel ? kernel : "",
           kernel ? ": " : "", name, reason, mode, (unsigned long long)options->seed);
    if (kernel) printf(" -b %s", kernel);
    printf(" -p '^");
    for (; *name; name++) printf(strchr("[]|.^$*+?(){}\\", *name) ? "\\%c" : "%c", *name);
    printf("$'\n");
}

static const struct {
    const char *name;
    dw_status (*run)(const ops_options *options, ops_tally *tally);
} modes[] = {
    {"test", ops_mode_test},
    {"grad", ops_mode_grad},
    {"perf", ops_mode_perf},
    {"support", ops_mode_support},
};

static bool read_pattern(ops_options *options, const char *text) {
    char message[128];
    int code = regcomp(&options->pattern, text, REG_EXTENDED | REG_NOSUB);
    options->has_pattern = code == 0;
    if (code == 0) return true;
    regerror(code, &options->pattern, message, sizeof message);
    fprintf(stderr, "deepwell-ops: -p %s: %s\n", text, message);
    return false;
}

static bool read_options(int count, char **arguments, ops_options *options) {
    for (int i = 2; i < count; i++) {
        const char *name = arguments[i], *value = i + 1 < count ? arguments[i + 1] : NULL;
        if (strcmp(name, "--quick") == 0)
            options->quick = true;
        else if (strcmp(name, "--list") == 0)
            options->list = true;
        else if (!value)
            return false;
        else {
            i++;
            if (strcmp(name, "-o") == 0)
                options->op = value;
            else if (strcmp(name, "-b") == 0)
                options->backend = value;
            else if (strcmp(name, "--case") == 0)
                options->text = value;
            else if (strcmp(name, "--seed") == 0)
                options->seed = strtoull(value, NULL, 10);
            else if (strcmp(name, "-p") != 0 || !read_pattern(options, value))
                return false;
        }
    }
    return true;
}

/* An unknown operation is an error; otherwise the program would run nothing and pass. */
static bool operation_exists(const ops_options *options) {
    dw_op op;
    if (!options->op || dw_op_find(options->op, &op) == DW_OK) return true;
    fprintf(stderr, "deepwell-ops: -o: %s\n", dw_last_error());
    return false;
}

int main(int count, char **arguments) {
    ops_options options = {.seed = 1};
    ops_tally tally = {0};
    size_t mode = 0;
    while (count > 1 && mode < DW_COUNT(modes) && strcmp(arguments[1], modes[mode].name) != 0)
        mode++;
    if (count < 2 || mode == DW_COUNT(modes) || !read_options(count, arguments, &options)) {
        fputs(usage, stderr);
        return 2;
    }
    dw_status status =
        operation_exists(&options) ? modes[mode].run(&options, &tally) : DW_NOT_FOUND;
    if (options.has_pattern) regfree(&options.pattern);
    if (status != DW_OK) {
        fprintf(stderr, "deepwell-ops: %s: %s\n", dw_status_name(status), dw_last_error());
        return 2;
    }
    if (!options.list)
        printf("deepwell-ops: %lld passed, %lld failed, %lld skipped\n", (long long)tally.passed,
               (long long)tally.failed, (long long)tally.skipped);
    return tally.failed ? 1 : 0;
}
