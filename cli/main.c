/* The program `deepwell` finds the subcommand and runs it. A new subcommand needs a file with its function, a
 * declaration in cli.h and a row in the table below. */
#include "cli.h"
#include "deepwell/deepwell.h"
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const cli_command commands[] = {
    {"bench", "training steps, GEMMs, attention: Deepwell beside PyTorch", cli_bench},
    {"doctor", "what this machine can do, what is missing, what to do next", cli_doctor},
    {"dryrun", "one step of a plan, simulated: timeline, memory, bubble", cli_dryrun},
    {"emulate", "a CUDA program's kernels on the CPU, and their mistakes", cli_emulate},
    {"explain", "which backend computes an operation on a GPU, and its time", cli_explain},
    {"export", "one file of a model and its tokenizer, for `deepwell run`", cli_export},
    {"graph", "a graph from a file: text, cost, the engine's plan", cli_graph},
    {"parity", "training in FP8, MXFP8 or NVFP4 compared with BF16: curves, verdict", cli_parity},
    {"plan", "the fastest layout of a training run that fits, and why", cli_plan},
    {"probe", "this machine's GPUs, links, CPU and network, as text or as a file", cli_probe},
    {"reshard", "a checkpoint to or from torch.distributed.checkpoint", cli_reshard},
    {"run", "generates text from an exported model, without Python", cli_run},
    {"train", "trains a Hugging Face model on files of tokens, without Python", cli_train},
};
enum { COMMAND_COUNT = sizeof commands / sizeof commands[0] };

void cli_print_bold(const char *text) {
    const char *no_color = getenv("NO_COLOR");
    int plain = (no_color && *no_color) || !isatty(STDOUT_FILENO);
    printf(plain ? "%s" : "\033[1m%s\033[0m", text);
}

int cli_fail(void) {
    fprintf(stderr, "deepwell: %s\n", dw_last_error());
    return CLI_FAILED;
}

int cli_usage_error(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("deepwell: ", stderr);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputs("\nTry 'deepwell --help'.\n", stderr);
    return CLI_USAGE;
}

static void print_help(void) {
    printf("Usage: deepwell COMMAND [OPTION...]\n"
           "       deepwell --help | --version\n"
           "\n"
           "Transformer training made fast.\n"
           "\n"
           "Commands:\n");
    for (int at = 0; at < COMMAND_COUNT; at++) {
        printf("  %-10s %s\n", commands[at].name, commands[at].summary);
    }
    printf("\n"
           "'deepwell COMMAND --help' describes one command.\n"
           "\n"
           "Environment:\n"
           "  DEEPWELL_CACHE    folder of compiled kernels and measurements (default: "
           "~/.cache/deepwell)\n"
           "  DEEPWELL_THREADS  threads of the CPU engine (default: the CPUs that it may use)\n"
           "  NO_COLOR          no colours on a terminal\n"
           "\n"
           "Exit status: 0 done, 1 failed, 2 wrong usage, 3 not supported on this machine.\n");
}

/* Returns `result`, or a failure if output was lost (a full disk, a closed pipe). errno belongs to the last write only;
 * an earlier failed write leaves nothing but stdout's error flag. */
static int flushed(int result) {
    if (fflush(stdout) == 0) {
        if (!ferror(stdout)) return result;
        errno = 0; /* it does not belong to the write that failed */
    }
    fprintf(stderr, "deepwell: cannot write to standard output: %s\n",
            errno
                ? strerror(errno)
                : "a part of it was not written; free space on its disk, or keep its reader open");
    return CLI_FAILED;
}

/* Opens /dev/null on closed standard descriptors. Otherwise the next opened file would get such a descriptor, and
 * messages would be written into it. The wrong direction makes reads and writes fail, as on a closed descriptor. */
static void reserve_standard_streams(void) {
    for (int number = STDIN_FILENO; number <= STDERR_FILENO; number++)
        if (fcntl(number, F_GETFD) < 0 && errno == EBADF)
            (void)open("/dev/null", number == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

int main(int argc, char **argv) {
    reserve_standard_streams();
    if (argc < 2) {
        print_help();
        flushed(CLI_DONE);
        return CLI_USAGE;
    }
    const char *name = argv[1];
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
        print_help();
        return flushed(CLI_DONE);
    }
    if (strcmp(name, "--version") == 0) {
        printf("deepwell %s\n", dw_version());
        return flushed(CLI_DONE);
    }
    for (int at = 0; at < COMMAND_COUNT; at++) {
        if (strcmp(name, commands[at].name) == 0) {
            return flushed(commands[at].run(argc - 1, argv + 1));
        }
    }
    return cli_usage_error("there is no command '%s'", name);
}
