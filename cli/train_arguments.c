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
    {"--schedule-steps", COUNT, OPTION(schedule_steps)},
    {"--lr", NUMBER, OPTION(lr)},
    {"--min-lr-ratio", NUMBER, OPTION(min_lr_ratio)},
    {"--betas", BETAS, OPTION(beta1)},
    {"--eps", NUMBER, OPTION(eps)},
    {"--weight-decay", NUMBER, OPTION(weight_decay)},
    {"--decay-all", FLAG, OPTION(decay_all)},
    {"--clip", NUMBER, OPTION(clip)},
    {"--max-bad-steps", COUNT, OPTION(bad_steps)},
    {"--precision", TEXT, OPTION(precision)},
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
        "  --init               random weights: DIR needs config.json only, or is a name that\n"
        "                       Deepwell knows (gpt2, ...)\n"
        "  --data PATH          tokens: .bin (uint16 or uint32, little-endian; with or without\n"
        "                       llm.c's header) or .npy; or a folder of such files. May be given\n"
        "                       more than once. 'python -m deepwell.tokenize' makes them of text\n"
        "  --val PATH           the same, for the validation loss\n"
        "  --val-every N        every N steps (default: after the last step alone)\n"
        "  --val-batches N      micro-batches of validation, 0 for all (default 32)\n"
        "  --token-type TYPE    uint16 or uint32, of .bin files without header (default: by the\n"
        "                       size of the vocabulary)\n"
        "  --no-shuffle         sequences in the order of the files\n"
        "\n"
        "Training:\n"
        "  --steps N            optimizer steps of the whole run (default 1000); a run may be\n"
        "                       resumed with more\n"
        "  --sequence N         tokens predicted per sequence (default 256)\n"
        "  --batch N            sequences per step (default 8)\n"
        "  --micro-batch N      sequences at a time; gradients are added up (default: the batch)\n"
        "  --lr X               peak learning rate, at most 1 (default 3e-4)\n"
        "  --warmup N           steps of linear warm-up (default 0)\n"
        "  --min-lr-ratio X     the cosine ends at this share of --lr (default 0.1)\n"
        "  --schedule-steps N   the step at which the cosine ends; later steps keep that rate\n"
        "                       (default: --steps; a resumed run keeps its own)\n"
        "  --betas X,Y          of AdamW (default 0.9,0.95)\n"
        "  --eps X              of AdamW, at least 1e-20 (default 1e-8)\n"
        "  --weight-decay X     of matrices; not of biases and norms; at most 1 / lr (default "
        "0.1)\n"
        "  --decay-all          of biases and norms too\n"
        "  --clip X             largest norm of all gradients, 0 for none (default 1)\n"
        "  --no-dropout         whatever config.json says\n"
        "  --seed N             of order, dropout and --init (default 0)\n"
        "  --max-bad-steps N    stop after N steps in a row that are not finite (default 5); a\n"
        "                       run whose last step is not finite fails too\n"
        "  --precision NAME     of linear layers: fp32, bf16, mxfp8 or nvfp4 (default fp32)\n"
        "\n"
        "Results:\n"
        "  --output DIR         the trained model, as transformers reads it\n"
        "  --overwrite          replace the model in --output (a resumed run always does)\n"
        "  --checkpoint DIR     folder of checkpoints\n"
        "  --save-every N       a checkpoint every N steps (default: after the last step alone)\n"
        "  --keep N             newest checkpoints that stay (default 2)\n"
        "  --resume             go on from the newest checkpoint, if there is one\n"
        "  --log FILE           one JSON object per line and step\n"
        "  --report-every N     steps between lines when output is no terminal (default 10)\n"
        "  --json               JSON lines on standard output\n"
        "  --dry-run            say what it would take, and stop\n"
        "\n"
        "Ctrl-C or SIGTERM: the step is finished, a checkpoint written, and the exit status is "
        "128\n"
        "and the signal's number. A second one ends the program at once.\n");
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
    return cli_usage_error("--token-type is auto, uint16 or uint32, not '%s'", text);
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
    case LIST: /* room for every argument was made beforehand */
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
            "train needs --output or --checkpoint: where the trained model goes");
    if (r->resume && !r->options.checkpoint)
        return cli_usage_error("--resume needs --checkpoint: the folder to go on from");
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
        if (!a) return cli_usage_error("train does not know '%s'", argv[at]);
        if (a->kind == FLAG || a->kind == NO_FLAG) {
            *(int *)field(r, a) = a->kind == FLAG;
            continue;
        }
        if (at + 1 == argc) return cli_usage_error("%s needs a value", argv[at]);
        int result = read_value(r, a, argv[++at]);
        if (result != CLI_DONE) return result;
    }
    return check(r);
}

void train_free_arguments(train_request *r) {
    free(r->data);
    free(r->validation);
}
