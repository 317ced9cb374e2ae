/* `deepwell parity` trains a model in BF16 and in lower precisions and compares the losses. It needs PyTorch, so that
 * it is the Python module deepwell.parity_command, which this command runs. */
#include "cli.h"
#include <stdio.h>

static void print_help(void) {
    printf("Usage: deepwell parity --model DIR|NAME --data PATH... --precision P,... --steps N\n"
           "                       [OPTION...]\n"
           "\n"
           "Trains the same model on the same data in BF16 and in each of the precisions, and\n"
           "compares the losses: curves, perplexity, gap, noise over seeds, verdict. Runs in\n"
           "Python, with PyTorch.\n"
           "\n"
           "  --model M         a Hugging Face folder, or the name of a published model (random\n"
           "                    weights)\n"
           "  --init            random weights for a folder's model\n"
           "  --data PATH...    token files, as for `deepwell train`\n"
           "  --precision P,... fp8, fp8-block, mxfp8, mxfp6, mxfp4, nvfp4, or the file of\n"
           "                    a policy (.json)\n"
           "  --steps N         of each run\n"
           "\n"
           "Options:\n"
           "  --seeds K         runs in BF16, whose losses give the noise (default: 1)\n"
           "  --held-out PATH...  token files for the held-out loss (default: the last 5%% of the\n"
           "                    data)\n"
           "  --token-type T    of .bin files: uint16 or uint32\n"
           "  --batch N         sequences of a step (default: 8)\n"
           "  --micro-batch N   sequences that go through the model together (default: all)\n"
           "  --sequence N      tokens of a sequence (default: 256)\n"
           "  --lr X  --warmup N  --schedule cosine|linear|constant\n"
           "                    the learning rate (default: 3e-4, 1/20 of the steps, cosine)\n"
           "  --no-dropout      sets the model's dropout to 0\n"
           "  --bar PERCENT     largest accepted gap (default: 0.25, with 4-bit formats 1.5)\n"
           "  --device D        auto, cpu or cuda\n"
           "  --output DIR      runs, report, page and picture (default: parity); runs that are\n"
           "                    there are not made again\n"
           "  --fresh           makes the runs of DIR again\n"
           "  --json            print one JSON object\n"
           "\n"
           "Exit status: 0 within the bars, 1 apart or failed, 2 wrong usage, 3 not supported on\n"
           "this machine.\n");
}

int cli_parity(int argc, char **argv) {
    if (!cli_wants_help(argc, argv)) return cli_run_python("deepwell.parity_command", argc, argv);
    print_help();
    return CLI_DONE;
}
