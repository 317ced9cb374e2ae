/* `deepwell bench` times Deepwell beside PyTorch. PyTorch's models need Python, so that the benchmarks are the Python
 * module deepwell.bench, which this command runs. */
#include "cli.h"
#include <stdio.h>

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
           "  --precision P     auto, fp32, fp16, bf16, fp8, fp8-block, mxfp8, mxfp6, mxfp4\n"
           "                    or nvfp4\n"
           "  --batch-size N    sequences\n"
           "  --seq-len N       tokens of each\n"
           "  --num-experts N   moe: experts; gemm: groups\n"
           "  --size M,N,K      gemm\n"
           "  --heads N  --head-dim N    attention\n"
           "  --hidden N  --width N      moe: width of tokens, and of an expert\n"
           "  --top-k N         moe: experts of a token\n"
           "  --tokens N        moe: in place of --batch-size and --seq-len\n"
           "  --load L          moe: random, even or skewed over the experts\n"
           "  --capacity-factor F        moe: drop choices beyond it\n"
           "  --iterations N    measured calls of each\n"
           "  --device D        auto, cpu or cuda\n"
           "  --json            print one JSON object\n"
           "\n"
           "Exit status: 0 done, 1 failed, 2 wrong usage, 3 not supported on this machine.\n");
}

int cli_bench(int argc, char **argv) {
    if (!cli_wants_help(argc, argv)) return cli_run_python("deepwell.bench", argc, argv);
    print_help();
    return CLI_DONE;
}
