/* `deepwell emulate` runs a CUDA program's kernels on the CPU and reports their mistakes. */
#include "cli.h"
#include "deepwell/deepwell.h"
#include "deepwell/emulator.h"
#include "emulate_program.h"
#include <assert.h>
#include <errno.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { FOUND = 99 }; /* exit status if the program succeeded but the checker found mistakes */

typedef struct request {
    const char *architecture, *seed, *report, *threads, *multiprocessors, *endless;
    int check;
    char **program; /* with its arguments, ends with NULL */
} request;

static void print_help(void) {
    printf(
        "Usage: deepwell emulate [OPTION...] -- PROGRAM [ARGUMENT...]\n"
        "\n"
        "Runs a CUDA program without a GPU. Its kernels run on the CPU, from the program's PTX.\n"
        "Reports their mistakes: accesses out of bounds, reads of undefined memory, missing\n"
        "synchronisation, deadlocks. Build the program with\n"
        "\n"
        "  nvcc -cudart shared --compress-mode=none -lineinfo \\\n"
        "    -gencode arch=compute_90a,code=compute_90a\n"
        "\n"
        "Options:\n"
        "  --arch ARCH     sm_90a (default), sm_100a, sm_103a or sm_120a\n"
        "  --seed N        seed of the order in which warps and copies run (default: 1)\n"
        "  --no-check      do not look for undefined reads and races\n"
        "  --report FILE   write the findings as JSON\n"
        "  --threads N     most threads of this machine to use (default: all)\n"
        "  --multiprocessors N\n"
        "                  SMs of the GPU (default: as the architecture). With fewer, a program\n"
        "                  that fills the GPU with blocks runs faster\n"
        "  --endless N     stop a kernel as endless after N warp operations without an event,\n"
        "                  such as an arrival or a barrier (default: 134217728, seconds to\n"
        "                  minutes). A warp that executes 8 N operations is always stopped\n"
        "\n"
        "Exit status: the program's. %d if the program ended with 0 but there are findings, or\n"
        "device code that the emulator does not support. 128 plus the signal's number if a\n"
        "signal ended it.\n",
        FOUND);
}

static int check_number(const char *option, const char *text, uint64_t least, uint64_t most) {
    char *end = NULL;
    if (!text) return CLI_DONE;
    errno = 0;
    const uint64_t number = strtoull(text, &end, 10);
    if (*text >= '0' && *text <= '9' && !*end && !errno && number >= least && number <= most)
        return CLI_DONE;
    if (most == UINT64_MAX) return cli_usage_error("%s '%s': must be a whole number", option, text);
    return cli_usage_error("%s '%s': must be a number from %llu to %llu", option, text,
                           (unsigned long long)least, (unsigned long long)most);
}

static int read_request(int argc, char **argv, request *r) {
    int at = 1;
    for (; at < argc && argv[at][0] == '-'; at++) {
        const char **value = NULL;
        if (strcmp(argv[at], "--") == 0) {
            at++;
            break;
        }
        if (strcmp(argv[at], "--no-check") == 0)
            r->check = 0;
        else if (strcmp(argv[at], "--arch") == 0)
            value = &r->architecture;
        else if (strcmp(argv[at], "--seed") == 0)
            value = &r->seed;
        else if (strcmp(argv[at], "--report") == 0)
            value = &r->report;
        else if (strcmp(argv[at], "--threads") == 0)
            value = &r->threads;
        else if (strcmp(argv[at], "--multiprocessors") == 0)
            value = &r->multiprocessors;
        else if (strcmp(argv[at], "--endless") == 0)
            value = &r->endless;
        else
            return cli_usage_error("emulate has no option '%s'", argv[at]);
        if (!value) continue;
        if (at + 1 >= argc) return cli_usage_error("%s needs a value", argv[at]);
        *value = argv[++at];
    }
    r->program = argv + at;
    if (at >= argc) return cli_usage_error("emulate needs a program: deepwell emulate -- PROGRAM");
    int result = check_number("--seed", r->seed, 0, UINT64_MAX);
    if (result == CLI_DONE) result = check_number("--threads", r->threads, 1, DW_MAX_THREADS);
    if (result == CLI_DONE) result = check_number("--multiprocessors", r->multiprocessors, 1, 1024);
    if (result == CLI_DONE) result = check_number("--endless", r->endless, 1, UINT64_MAX);
    return result;
}

/* Asks the emulator which architectures exist. A wheel's program contains libdeepwell, so the emulator's library is not
 * beside it: this call names the one in the package. The emulated program finds its own. */
static int check_architecture(const char *name, const char *libraries) {
    dw_emulator *emulator = NULL;
    char path[4200], *file = NULL;
    snprintf(path, sizeof path, "%s/../libdeepwell_emulator.so", libraries);
    if (!getenv("DEEPWELL_EMULATOR") && (file = realpath(path, NULL)))
        setenv("DEEPWELL_EMULATOR", file, 1);
    const dw_status status = dw_emulator_create(name, NULL, &emulator);
    if (file) unsetenv("DEEPWELL_EMULATOR");
    free(file);
    if (status != DW_OK) return cli_fail(), status == DW_UNSUPPORTED ? CLI_UNSUPPORTED : CLI_FAILED;
    dw_emulator_destroy(emulator);
    return CLI_DONE;
}

/* ---- the program --------------------------------------------------------------------------- */

/* Runs the program in this process, the child. Never returns. */
static void execute_program(const request *r, const char *libraries, const char *report) {
    const char *others = getenv("LD_LIBRARY_PATH");
    char *path = NULL;
    setenv("DEEPWELL_EMULATE_ARCH", r->architecture, 1);
    setenv("DEEPWELL_EMULATE_SEED", r->seed ? r->seed : "1", 1);
    setenv("DEEPWELL_EMULATE_CHECK", r->check ? "1" : "0", 1);
    setenv("DEEPWELL_EMULATE_REPORT", report, 1);
    if (r->threads) setenv("DEEPWELL_EMULATE_THREADS", r->threads, 1);
    if (r->multiprocessors) setenv("DEEPWELL_EMULATE_MULTIPROCESSORS", r->multiprocessors, 1);
    if (r->endless) setenv("DEEPWELL_EMULATE_ENDLESS", r->endless, 1);
    if (asprintf(&path, "%s%s%s", libraries, others && *others ? ":" : "", others ? others : "") >=
        0)
        setenv("LD_LIBRARY_PATH", path, 1);
    execvp(r->program[0], r->program);
    fprintf(stderr, "deepwell: cannot run '%s': %s\n", r->program[0], strerror(errno));
    _exit(errno == ENOENT ? 127 : 126);
}

static int run(const request *r, const char *libraries, const char *report, int *ended) {
    int status;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) execute_program(r, libraries, report);
    if (child < 0) {
        perror("deepwell: cannot start the program");
        return CLI_FAILED;
    }
    /* The terminal sends its signals to both processes. The program handles them; this one survives to summarize. */
    void (*interrupt)(int) = signal(SIGINT, SIG_IGN);
    void (*quit)(int) = signal(SIGQUIT, SIG_IGN);
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    signal(SIGINT, interrupt);
    signal(SIGQUIT, quit);
    *ended = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    if (WIFSIGNALED(status))
        fprintf(stderr, "deepwell emulate: the program was ended by signal %d (%s)\n",
                WTERMSIG(status), strsignal(WTERMSIG(status)));
    return CLI_DONE;
}

/* ---- findings ------------------------------------------------------------------------------ */

/* Prints "3 findings: 2 out of bounds, 1 race; device code that was not run: 1". Returns the sum of both numbers, -1 if
 * the emulator was not used. */
static int summarize(const char *report) {
    json_t *root = json_load_file(report, 0, NULL), *findings = json_object_get(root, "findings"),
           *kinds = json_object(), *finding, *count;
    const char *kind;
    size_t index;
    if (!root || !kinds) {
        json_decref(root);
        json_decref(kinds);
        return -1;
    }
    const int total = (int)json_array_size(findings),
              refused = (int)json_array_size(json_object_get(root, "unsupported"));
    json_array_foreach(findings, index, finding) {
        const char *of = json_string_value(json_object_get(finding, "kind"));
        if (of)
            json_object_set_new(kinds, of,
                                json_integer(json_integer_value(json_object_get(kinds, of)) + 1));
    }
    const long long launches = json_integer_value(json_object_get(root, "launches"));
    fprintf(stderr, "deepwell emulate: %s, %lld launch%s: ",
            json_string_value(json_object_get(root, "architecture")), launches,
            launches == 1 ? "" : "es");
    if (total == 0)
        fprintf(stderr, "no findings");
    else
        fprintf(stderr, "%d finding%s: ", total, total == 1 ? "" : "s");
    index = 0;
    json_object_foreach(kinds, kind, count) {
        fprintf(stderr, "%s%lld %s", index++ ? ", " : "", (long long)json_integer_value(count),
                kind);
    }
    if (refused > 0) fprintf(stderr, "; device code that was not run: %d (see above)", refused);
    fprintf(stderr, "\n");
    json_decref(root);
    json_decref(kinds);
    return total + refused;
}

static int run_and_report(const request *r, const char *libraries, const char *report) {
    int ended = 0, result = run(r, libraries, report, &ended);
    if (result != CLI_DONE) return result;
    const int found = summarize(report);
    if (found < 0) fprintf(stderr, "deepwell emulate: the program has not used the GPU\n");
    return ended == 0 && found > 0 ? FOUND : ended;
}

int cli_emulate(int argc, char **argv) {
    if (argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        print_help();
        return CLI_DONE;
    }
    request r = {.architecture = "sm_90a", .check = 1, .program = argv};
    char libraries[4096], folder[4096];
    int result = read_request(argc, argv, &r);
    assert(result != CLI_DONE || r.program);
    if (result == CLI_DONE) result = program_find_libraries(libraries, sizeof libraries);
    if (result == CLI_DONE) result = check_architecture(r.architecture, libraries);
    if (result == CLI_DONE) result = program_check(r.program[0], r.architecture);
    if (result != CLI_DONE) return result;
    if (r.report) {
        /* An absolute path, since the program may change its working folder. */
        char *here = realpath(".", NULL), *path = NULL;
        const int made = r.report[0] == '/' || !here ? asprintf(&path, "%s", r.report)
                                                     : asprintf(&path, "%s/%s", here, r.report);
        if (made >= 0) {
            unlink(path);
            result = run_and_report(&r, libraries, path);
            free(path);
        } else {
            perror("deepwell");
            result = CLI_FAILED;
        }
        free(here);
        return result;
    }
    const char *temporary = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%.4000s/deepwell-emulate-XXXXXX",
             temporary && *temporary ? temporary : "/tmp");
    if (!mkdtemp(folder)) {
        fprintf(stderr, "deepwell: cannot make a folder like '%s': %s\n", folder, strerror(errno));
        return CLI_FAILED;
    }
    char file[4300];
    snprintf(file, sizeof file, "%s/report.json", folder);
    result = run_and_report(&r, libraries, file);
    unlink(file);
    rmdir(folder);
    return result;
}
