/* `deepwell reshard` converts a checkpoint to a folder of torch.distributed.checkpoint, or back. It needs PyTorch, so
 * the command runs the Python module deepwell.reshard_command. */
#include "cli.h"
#include <stdio.h>

static void print_help(void) {
    printf("Usage: deepwell reshard FOLDER -o OUT [OPTION...]\n"
           "\n"
           "Converts a checkpoint of `deepwell train` or deepwell.Trainer, or a Hugging Face "
           "folder, to a\n"
           "folder of torch.distributed.checkpoint, which any number of ranks loads; and such a "
           "folder,\n"
           "of any number of ranks, to a checkpoint. The form of FOLDER says which. Every tensor "
           "keeps\n"
           "its bits. OUT is complete or absent. Runs in Python, with PyTorch.\n"
           "\n"
           "Options:\n"
           "  -o, --output OUT  the folder to write; a checkpoint there is replaced\n"
           "  --tied A=B        A is another name of the tensor B; may be given several times. "
           "Known for\n"
           "                    checkpoints of deepwell.Trainer and for language-model heads\n"
           "  --json            print one JSON object\n"
           "\n"
           "To torch.distributed.checkpoint:\n"
           "  --flat            names of the optimizer's groups as flatten_optimizer_state_dict "
           "has them\n"
           "\n"
           "From torch.distributed.checkpoint of another program:\n"
           "  --like DIR        a Hugging Face folder or a checkpoint with the model's config.json "
           "and\n"
           "                    tokenizer\n"
           "  --step N          steps done (default: the optimizer's count)\n"
           "  --model-key K     first part of the model's names (default: found)\n"
           "  --optimizer-key K first part of the optimizer's names (default: found)\n"
           "\n"
           "Exit status: 0 written, 1 failed, 2 wrong usage, 3 not supported.\n");
}

int cli_reshard(int argc, char **argv) {
    if (!cli_wants_help(argc, argv)) return cli_run_python("deepwell.reshard_command", argc, argv);
    print_help();
    return CLI_DONE;
}
