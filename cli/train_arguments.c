/* The options of `deepwell train`. */
#include "cli.h"
#include "train.h"
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef enum argument_kind {
    FLAG,
    NO_FLAG,
    COUNT,
    SEED,
    NUMBER,
    TEXT,
    LIST,
    BETAS,
    TOKENS
} argument_kind;

typedef struct argument {
    const char *name;
    argument_kind kind;
    size_t offset; /* in train_request */
} argument;

#define OPTION(field) offsetof(train_request, options.field)
#define REQUEST(field) offsetof(train_request, field)

static const argument arguments[] = {
    {"--model", TEXT, OPTION(model)},
    {"--init", FLAG, OPTION(init)},
    {"--data", LIST, REQUEST(data)},
    {"--val", LIST, REQUEST(validation)},
    {"--val-every", COUNT, REQUEST(validate_every)},
    {"--val-batches", COUNT, OPTION(validation_batches)},
    {"--token-type", TOKENS, OPTION(token_type)},
    {"--no-shuffle", NO_FLAG, OPTION(shuffle)},
    {"--sequence", COUNT, OPTION(sequence)},
    {"--batch", COUNT, OPTION(batch)},
    {"--micro-batch", COUNT, OPTION(micro_batch)},
    {"--seed", SEED, OPTION(seed)},
    {"--no-dropout", NO_FLAG, OPTION(dropout)},
    {"--steps", COUNT, OPTION(steps)},
    {"--warmup", COUNT, OPTION(warmup_steps)},
    {"--schedule", TEXT, OPTION(schedule)},
    {"--schedule-steps", COUNT, OPTION(schedule_steps)},
    {"--lr", NUMBER, OPTION(lr)},
    {"--min-lr-ratio", NUMBER, OPTION(min_lr_ratio)},
    {"--betas", BETAS, OPTION(beta1)},
    {"--eps", NUMBER, OPTION(eps)},
    {"--weight-decay", NUMBER, OPTION(weight_decay)},
    {"--decay-all", FLAG, OPTION(decay_all)},
    {"--clip", NUMBER, OPTION(clip)},
    {"--max-bad-steps", COUNT, OPTION(bad_steps)},
    {"--spike-factor", NUMBER, OPTION(spike_factor)},
    {"--spike-window", COUNT, OPTION(spike_window)},
    {"--plan", TEXT, REQUEST(plan)},
    {"--precision", TEXT, OPTION(precision)},
    {"--device", TEXT, OPTION(device)},
    {"--checkpoint", TEXT, OPTION(checkpoint)},
    {"--save-every", COUNT, REQUEST(save_every)},
    {"--keep", COUNT, OPTION(keep)},
    {"--resume", FLAG, REQUEST(resume)},
    {"--output", TEXT, REQUEST(output)},
    {"--overwrite", FLAG, REQUEST(overwrite)},
    {"--log", TEXT, REQUEST(log)},
    {"--report-every", COUNT, REQUEST(report_every)},
    {"--json", FLAG, REQUEST(json)},
    {"--dry-run", FLAG, REQUEST(dry_run)},
};
enum { ARGUMENT_COUNT = sizeof arguments / sizeof arguments[0] };

void train_print_help(void) {
    printf(
        "Usage: deepwell train --model DIR --data PATH --steps N (--output DIR | --checkpoint "
        "DIR)\n"
        "                      [OPTION...]\n"
        "\n"
        "Trains a Hugging Face model (GPT-2, Llama, Qwen3, Mistral) on files of tokens.\n"
        "\n"
        "Model and data:\n"
        "  --model DIR          folder with config.json and safetensors\n"
        "  --init               start from random weights; DIR then needs config.json only, or is\n"
        "                       a name of the catalogue (gpt2, ...)\n"
        "  --data PATH          tokens: .bin (uint16 or uint32, little-endian, with or without\n"
        "                       llm.c's header) or .npy, or a folder of such files. May be\n"
        "                       repeated. 'python -m deepwell.tokenize' makes them from text\n"
        "  --val PATH           the same, for the validation loss\n"
        "  --val-every N        validate every N steps (default: only after the last step)\n"
        "  --val-batches N      micro-batches per validation, 0 for all (default 32)\n"
        "  --token-type TYPE    uint16 or uint32, for .bin files without header (default: by the\n"
        "                       size of the vocabulary)\n"
        "  --no-shuffle         keep sequences in the order of the files\n"
        "\n"
        "Training:\n"
        "  --steps N            optimizer steps of the whole run (default 1000); a resumed run\n"
        "                       may have more\n"
        "  --sequence N         tokens predicted per sequence (default 256)\n"
        "  --batch N            sequences per step (default 8)\n"
        "  --micro-batch N      sequences per forward and backward; gradients are accumulated\n"
        "                       (default: the batch)\n"
        "  --lr X               peak learning rate, at most 1 (default 3e-4)\n"
        "  --warmup N           steps of linear warm-up (default 0)\n"
        "  --schedule NAME      cosine (default), linear, or constant: the rate after warm-up\n"
        "  --min-lr-ratio X     the schedule ends at X times --lr (default 0.1)\n"
        "  --schedule-steps N   step at which the schedule ends; later steps keep that rate\n"
        "                       (default: --steps; a resumed run keeps its own)\n"
        "  --betas X,Y          AdamW's betas (default 0.9,0.95)\n"
        "  --eps X              AdamW's epsilon, at least 1e-20 (default 1e-8)\n"
        "  --weight-decay X     weight decay of matrices, at most 1 / lr (default 0.1)\n"
        "  --decay-all          decay biases and norms too\n"
        "  --clip X             clip the norm of all gradients to X, 0 for no clipping (default "
        "1)\n"
        "  --no-dropout         train without dropout, whatever config.json says\n"
        "  --seed N             seed of data order, dropout and --init (default 0)\n"
        "  --max-bad-steps N    fail after N steps in a row with a loss or gradient that is not\n"
        "                       finite, or a spike (default 5); such a last step fails too\n"
        "  --spike-factor X     do not apply a step whose loss is above X times the mean of the\n"
        "                       last applied steps (default: no limit)\n"
        "  --spike-window N     steps of that mean (default 32)\n"
        "  --plan FILE          sequence, batch, micro-batch, precision and device of a plan for\n"
        "                       one GPU or for this machine's CPU, where no option gives them\n"
        "  --precision NAME     fp32, bf16, fp8, fp8-block, mxfp8, mxfp6, mxfp4 or nvfp4, or the "
        "file of a\n"
        "                       policy (NAME.json; default: bf16 on a GPU, else fp32).\n"
        "                       bf16 on a GPU: activations, gradients and matrix products;\n"
        "                       otherwise a rounding of the operands of linear layers\n"
        "  --device NAME        where to train: cpu (default), cuda, or an emulated GPU such as\n"
        "                       emulator:sm_90a. Measured on an H200; for Blackwell GPUs proven "
        "on\n"
        "                       the emulator alone\n"
        "\n"
        "Results:\n"
        "  --output DIR         folder for the trained model, for transformers\n"
        "  --overwrite          replace the model in --output (a resumed run always does)\n"
        "  --checkpoint DIR     folder for checkpoints\n"
        "  --save-every N       write a checkpoint every N steps (default: only after the last\n"
        "                       step)\n"
        "  --keep N             keep the N newest checkpoints (default 2)\n"
        "  --resume             continue from the newest checkpoint, if there is one\n"
        "  --log FILE           write one JSON object per line and step\n"
        "  --report-every N     steps between lines if output is not a terminal (default 10)\n"
        "  --json               print JSON lines on standard output\n"
        "  --dry-run            print the plan and its memory, and stop\n"
        "\n"
        "On Ctrl-C or SIGTERM the program finishes the step, writes a checkpoint and exits with\n"
        "128 plus the signal's number. A second signal ends it at once.\n");
}

static void *field(train_request *request, const argument *a) {
    return (char *)request + a->offset;
}

static int read_number(const char *text, double *number) {
    char *end = NULL;
    errno = 0;
    *number = strtod(text, &end);
    return end != text && *end == '\0' && !(errno == ERANGE && *number != 0.0 && *number > 1.0);
}

static int read_count(const argument *a, const char *text, int64_t *count) {
    char *end = NULL;
    errno = 0;
    *count = strtoll(text, &end, 10);
    if (end != text && *end == '\0' && !errno && *count >= 0) return CLI_DONE;
    return cli_usage_error("%s needs a whole number of 0 or more, not '%s'", a->name, text);
}

static int read_betas(train_request *request, const char *text) {
    char first[64];
    const char *comma = strchr(text, ',');
    size_t length = comma ? (size_t)(comma - text) : 0;
    if (comma && length < sizeof first) {
        memcpy(first, text, length);
        first[length] = '\0';
        if (read_number(first, &request->options.beta1) &&
            read_number(comma + 1, &request->options.beta2))
            return CLI_DONE;
    }
    return cli_usage_error("--betas needs two numbers (0.9,0.95), not '%s'", text);
}

static int read_token_type(train_request *request, const char *text) {
    static const char *const names[] = {"auto", "uint16", "uint32"};
    for (int i = 0; i < 3; i++) {
        if (strcmp(text, names[i]) != 0) continue;
        request->options.token_type = (dw_token_type)i;
        return CLI_DONE;
    }
    return cli_usage_error("--token-type must be auto, uint16 or uint32, not '%s'", text);
}

static int read_value(train_request *request, const argument *a, const char *text) {
    int64_t seed = 0;
    int result = CLI_DONE;
    switch (a->kind) {
    case COUNT: return read_count(a, text, field(request, a));
    case SEED:
        result = read_count(a, text, &seed);
        request->options.seed = (uint64_t)seed;
        return result;
    case NUMBER:
        if (read_number(text, field(request, a))) return CLI_DONE;
        return cli_usage_error("%s needs a number, not '%s'", a->name, text);
    case TEXT:
        if (!*text) return cli_usage_error("%s needs a value that is not empty", a->name);
        *(const char **)field(request, a) = text;
        return CLI_DONE;
    case LIST: /* the lists have room for every argument */
        if (a->offset == REQUEST(data))
            request->data[request->options.data_count++] = text;
        else
            request->validation[request->options.validation_count++] = text;
        return CLI_DONE;
    case BETAS: return read_betas(request, text);
    case TOKENS: return read_token_type(request, text);
    default: return CLI_DONE;
    }
}

static const argument *find_argument(const char *name) {
    for (int i = 0; i < ARGUMENT_COUNT; i++)
        if (strcmp(arguments[i].name, name) == 0) return &arguments[i];
    return NULL;
}

static int check(const train_request *r) {
    if (!r->options.model) return cli_usage_error("train needs --model");
    if (r->options.data_count == 0) return cli_usage_error("train needs --data");
    if (!r->output && !r->options.checkpoint && !r->dry_run)
        return cli_usage_error(
            "train needs --output or --checkpoint: a folder for the trained model");
    if (r->resume && !r->options.checkpoint)
        return cli_usage_error("--resume needs --checkpoint: the folder to continue from");
    if (r->save_every > 0 && !r->options.checkpoint)
        return cli_usage_error("--save-every needs --checkpoint");
    if (r->validate_every > 0 && r->options.validation_count == 0)
        return cli_usage_error("--val-every needs --val");
    return CLI_DONE;
}

int train_read_arguments(int argc, char **argv, train_request *r) {
    *r = (train_request){.options = DW_TRAINER_OPTIONS_DEFAULT, .report_every = 10};
    r->data = calloc((size_t)argc, sizeof *r->data);
    r->validation = calloc((size_t)argc, sizeof *r->validation);
    if (!r->data || !r->validation) {
        fprintf(stderr, "deepwell: out of memory\n");
        return CLI_FAILED;
    }
    r->options.data = r->data;
    r->options.validation = r->validation;
    for (int at = 1; at < argc; at++) {
        const argument *a = find_argument(argv[at]);
        if (!a) return cli_usage_error("train: unknown argument '%s'", argv[at]);
        if (a->kind == FLAG || a->kind == NO_FLAG) {
            *(int *)field(r, a) = a->kind == FLAG;
            continue;
        }
        if (at + 1 == argc) return cli_usage_error("%s needs a value", argv[at]);
        int result = read_value(r, a, argv[++at]);
        if (result != CLI_DONE) return result;
    }
    int result = check(r);
    return result == CLI_DONE && r->plan ? train_apply_plan(argc, argv, r) : result;
}

void train_free_arguments(train_request *r) {
    free(r->data);
    free(r->validation);
}
