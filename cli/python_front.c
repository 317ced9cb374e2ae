/* Subcommands that need PyTorch are modules of the Python package, which run in the Python that `deepwell doctor`
 * finds. */
#include "cli.h"
#include "doctor.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Returns the Python to run (the caller frees it), or prints what is missing and returns NULL. */
static char *find_python(const char *command) {
    json_t *advice = json_array();
    json_t *python = doctor_probe_python(advice);
    const char *path = json_string_value(json_object_get(python, "executable"));
    char *found = path && json_array_size(advice) == 0 ? strdup(path) : NULL;
    size_t at;
    json_t *entry;
    json_array_foreach(advice, at, entry) {
        fprintf(stderr, "deepwell: %s needs Python with PyTorch. %s: %s\n", command,
                json_string_value(json_object_get(entry, "what")),
                json_string_value(json_object_get(entry, "next")));
    }
    json_decref(python);
    json_decref(advice);
    return found;
}

int cli_run_python(const char *module, int argc, char **argv) {
    char *python = find_python(argv[0]);
    if (!python) return CLI_UNSUPPORTED;
    char **arguments = calloc((size_t)argc + 3, sizeof *arguments);
    if (!arguments) {
        free(python);
        fprintf(stderr, "deepwell: out of memory\n");
        return CLI_FAILED;
    }
    arguments[0] = python;
    arguments[1] = "-m";
    arguments[2] = (char *)module;
    for (int at = 1; at < argc; at++) arguments[at + 2] = argv[at];
    fflush(stdout);
    execv(python, arguments);
    fprintf(stderr, "deepwell: cannot run %s: %s\n", python, strerror(errno));
    free(arguments);
    free(python);
    return CLI_FAILED;
}

int cli_wants_help(int argc, char **argv) {
    for (int at = 1; at < argc; at++)
        if (strcmp(argv[at], "--help") == 0 || strcmp(argv[at], "-h") == 0) return 1;
    return 0;
}
