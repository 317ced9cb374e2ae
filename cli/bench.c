/* `deepwell bench` times Deepwell beside PyTorch. PyTorch's models need Python, so that the benchmarks are the Python
 * module deepwell.bench, which this command runs in the Python that `deepwell doctor` finds. */
#include "cli.h"
#include "doctor.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void print_help(void) {
    printf("Usage: deepwell bench [step|attention|gemm|moe|memory] [OPTION...]\n"
           "\n"
           "Times Deepwell beside PyTorch on this machine: time, tokens/s, peak memory, share of\n"
           "the GPU's peak, difference of the results. Runs in Python, with PyTorch.\n"
           "\n"
           "  step       training steps of a model (the default)\n"
           "  attention  causal attention, forward and backward\n"
           "  gemm       a GEMM, or with --num-experts a grouped GEMM\n"
           "  moe        a mixture-of-experts layer\n"
           "  memory     as step\n"
           "\n"
           "Options:\n"
           "  --model M         step, memory: tiny, mini, small, a published model (gpt2,\n"
           "                    llama3-8b, ...) or a Hugging Face folder\n"
           "  --precision P     auto, fp32, fp16, bf16, fp8, mxfp8, mxfp6, mxfp4 or nvfp4\n"
           "  --batch-size N    sequences\n"
           "  --seq-len N       tokens of each\n"
           "  --num-experts N   moe: experts; gemm: groups\n"
           "  --size M,N,K      gemm\n"
           "  --heads N  --head-dim N    attention\n"
           "  --hidden N        moe: width\n"
           "  --iterations N    measured calls of each\n"
           "  --device D        auto, cpu or cuda\n"
           "  --json            print one JSON object\n"
           "\n"
           "Exit status: 0 done, 1 failed, 2 wrong usage, 3 not supported on this machine.\n");
}

/* Returns the Python to run (the caller frees it), or prints what is missing and returns NULL. */
static char *find_python(void) {
    json_t *advice = json_array();
    json_t *python = doctor_probe_python(advice);
    const char *path = json_string_value(json_object_get(python, "executable"));
    char *found = path && json_array_size(advice) == 0 ? strdup(path) : NULL;
    size_t at;
    json_t *entry;
    json_array_foreach(advice, at, entry) {
        fprintf(stderr, "deepwell: bench needs Python with PyTorch. %s: %s\n",
                json_string_value(json_object_get(entry, "what")),
                json_string_value(json_object_get(entry, "next")));
    }
    json_decref(python);
    json_decref(advice);
    return found;
}

int cli_bench(int argc, char **argv) {
    for (int at = 1; at < argc; at++) {
        if (strcmp(argv[at], "--help") == 0 || strcmp(argv[at], "-h") == 0) {
            print_help();
            return CLI_DONE;
        }
    }
    char *python = find_python();
    if (!python) return CLI_UNSUPPORTED;
    char **arguments = calloc((size_t)argc + 3, sizeof *arguments);
    if (!arguments) {
        free(python);
        fprintf(stderr, "deepwell: out of memory\n");
        return CLI_FAILED;
    }
    arguments[0] = python;
    arguments[1] = "-m";
    arguments[2] = "deepwell.bench";
    for (int at = 1; at < argc; at++) arguments[at + 2] = argv[at];
    fflush(stdout);
    execv(python, arguments);
    fprintf(stderr, "deepwell: cannot run %s: %s\n", python, strerror(errno));
    free(arguments);
    free(python);
    return CLI_FAILED;
}
