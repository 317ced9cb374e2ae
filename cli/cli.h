/* Declarations shared by the program's files. The program uses Deepwell's public headers only. */
#ifndef DW_CLI_H
#define DW_CLI_H

enum cli_exit { CLI_DONE = 0, CLI_FAILED = 1, CLI_USAGE = 2, CLI_UNSUPPORTED = 3 };

typedef struct cli_command {
    const char *name;
    const char *summary; /* one line, for `deepwell --help` */
    /* argv[0] is the subcommand's name. Returns a cli_exit. */
    int (*run)(int argc, char **argv);
} cli_command;

int cli_bench(int argc, char **argv);
int cli_doctor(int argc, char **argv);
int cli_dryrun(int argc, char **argv);
int cli_emulate(int argc, char **argv);
int cli_explain(int argc, char **argv);
int cli_export(int argc, char **argv);
int cli_graph(int argc, char **argv);
int cli_parity(int argc, char **argv);
int cli_plan(int argc, char **argv);
int cli_probe(int argc, char **argv);
int cli_reshard(int argc, char **argv);
int cli_run(int argc, char **argv);
int cli_train(int argc, char **argv);

/* Prints `text`, in bold if stdout is a terminal and NO_COLOR is not set. */
void cli_print_bold(const char *text);
/* Prints "deepwell: " and the library's last message on stderr. Returns CLI_FAILED. */
int cli_fail(void);
/* Runs a module of the Python package with the arguments after argv[0], in place of this process. Returns only if that
 * fails, after a message on stderr: CLI_UNSUPPORTED if there is no Python with PyTorch, else CLI_FAILED. */
int cli_run_python(const char *module, int argc, char **argv);
/* Returns 1 if --help or -h is among the arguments. */
int cli_wants_help(int argc, char **argv);
/* Prints "deepwell: ..." and a pointer to --help on stderr. Returns CLI_USAGE. */
int cli_usage_error(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
