/* `deepwell export` makes an artifact of a model's folder or of a training run's checkpoints. */
#include "cli.h"
#include "deepwell/deepwell.h"
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct request {
    const char *checkpoint, *output;
    int json;
    dw_artifact_options options;
} request;

static void print_help(void) {
    printf(
        "Usage: deepwell export --checkpoint DIR -o FILE [OPTION...]\n"
        "\n"
        "Makes one file of a model, with its tokenizer, for 'deepwell run'.\n"
        "\n"
        "  --checkpoint DIR   a Hugging Face folder (GPT-2, Llama, Qwen3, Mistral), or a folder "
        "of\n"
        "                     checkpoints of 'deepwell train', of which the newest is taken\n"
        "  -o, --output FILE  the file to write\n"
        "  --dtype TYPE       of the weights in the file: f32, bf16 or f16 (default: as in DIR)\n"
        "  --precision NAME   how operands of linear layers are rounded when the model runs: fp32\n"
        "                     (not at all, the default), bf16, mxfp8 or nvfp4\n"
        "  --no-tokenizer     leave the tokenizer out; the model then reads and writes token ids\n"
        "  --json             print the result as one JSON object\n");
}

static int read_arguments(int argc, char **argv, request *r) {
    for (int at = 1; at < argc; at++) {
        const char *argument = argv[at], **value = NULL;
        if (strcmp(argument, "--checkpoint") == 0)
            value = &r->checkpoint;
        else if (strcmp(argument, "-o") == 0 || strcmp(argument, "--output") == 0)
            value = &r->output;
        else if (strcmp(argument, "--dtype") == 0)
            value = &r->options.dtype;
        else if (strcmp(argument, "--precision") == 0)
            value = &r->options.precision;
        else if (strcmp(argument, "--no-tokenizer") == 0)
            r->options.tokenizer = "";
        else if (strcmp(argument, "--json") == 0)
            r->json = 1;
        else
            return cli_usage_error("export: unknown argument '%s'", argument);
        if (!value) continue;
        if (at + 1 == argc) return cli_usage_error("%s needs a value", argument);
        *value = argv[++at];
    }
    dw_precision_policy policy;
    if (r->options.precision && dw_precision_policy_init(&policy, r->options.precision) != DW_OK)
        return cli_usage_error("%s", dw_last_error());
    if (!r->checkpoint) return cli_usage_error("export needs --checkpoint: the model's folder");
    if (!r->output) return cli_usage_error("export needs -o: the file to write");
    const char *dtype = r->options.dtype;
    if (dtype && strcmp(dtype, "f32") != 0 && strcmp(dtype, "bf16") != 0 &&
        strcmp(dtype, "f16") != 0)
        return cli_usage_error("--dtype must be f32, bf16 or f16, not '%s'", dtype);
    return CLI_DONE;
}

static int report(const request *r, const dw_artifact *artifact) {
    dw_artifact_info info;
    struct stat file;
    dw_artifact_describe(artifact, &info);
    double parameters = dw_model_sizes_parameters(&info.model.sizes);
    int has_tokenizer = dw_artifact_tokenizer(artifact) != NULL;
    double bytes = stat(r->output, &file) == 0 ? (double)file.st_size : 0.0;
    if (!r->json) {
        printf("%s: %s, %.0f parameters in %s, %.1f MB, %s tokenizer\n", r->output,
               info.model.family, parameters, info.dtype, bytes / 1e6,
               has_tokenizer ? "with its" : "without a");
        return CLI_DONE;
    }
    json_t *json =
        json_pack("{s:s, s:s, s:s, s:I, s:I, s:b}", "path", r->output, "model", info.model.family,
                  "dtype", info.dtype, "parameters", (json_int_t)parameters, "bytes",
                  (json_int_t)bytes, "tokenizer", has_tokenizer);
    char *text = json ? json_dumps(json, 0) : NULL;
    json_decref(json);
    if (!text) {
        fprintf(stderr, "deepwell: the path is not UTF-8, or memory is exhausted\n");
        return CLI_FAILED;
    }
    puts(text);
    free(text);
    return CLI_DONE;
}

int cli_export(int argc, char **argv) {
    if (argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        print_help();
        return CLI_DONE;
    }
    request r = {.options = DW_ARTIFACT_OPTIONS_DEFAULT};
    dw_artifact *artifact = NULL;
    int result = read_arguments(argc, argv, &r);
    if (result != CLI_DONE) return result;
    dw_status status = dw_artifact_export(r.checkpoint, r.output, &r.options);
    if (status == DW_OK) status = dw_artifact_open(r.output, &artifact);
    if (status != DW_OK) {
        cli_fail();
        if (status == DW_UNSUPPORTED && strstr(dw_last_error(), "tokenizer.json"))
            fprintf(stderr, "deepwell: --no-tokenizer exports the model without its tokenizer\n");
        return status == DW_UNSUPPORTED ? CLI_UNSUPPORTED : CLI_FAILED;
    }
    result = report(&r, artifact);
    dw_artifact_close(artifact);
    return result;
}
