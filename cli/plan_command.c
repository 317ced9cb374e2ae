/* `deepwell plan` finds the layout of a training run, what it costs, and what alternatives would cost. */
#include "cli.h"
#include "deepwell/deepwell.h"
#include "plan_host.h"
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { CONSTRAINTS_MOST = 64 };

typedef struct request {
    const char *model, *hardware, *seq_len, *global_batch, *precision, *reserve, *output;
    const char *constraints[CONSTRAINTS_MOST];
    size_t constraint_count;
    int explain, json, bold;
} request;

static void print_help(void) {
    printf(
        "Usage: deepwell plan --model M --hardware H --seq-len N --global-batch N [OPTION...]\n"
        "\n"
        "Finds the layout of a training run: the fastest that fits, of all layouts whose sizes\n"
        "divide evenly. docs/autoplan.md lists what is considered.\n"
        "\n"
        "  --model M            a name (llama3-70b), a Hugging Face folder, or its config.json\n"
        "  --hardware H         NAME:COUNT (h100:64), a file of 'deepwell probe', or auto for\n"
        "                       this machine. Without GPUs the plan is for Deepwell's engine on\n"
        "                       the CPU: the largest micro-batch that fits\n"
        "  --seq-len N          tokens per sequence\n"
        "  --global-batch N     sequences per optimizer step\n"
        "\n"
        "Options:\n"
        "  --precision P        bf16 (the default), fp8-tensor, fp8-row, fp8-block, mxfp8,\n"
        "                       nvfp4, or auto for the fastest that the GPUs have; without GPUs a\n"
        "                       policy's name or file (docs/precision.md)\n"
        "  --set CONSTRAINT...  constrain any field of a layout: tp=8, 'pp<=4', recompute=full,\n"
        "                       schedule=1f1b, framework=megatron\n"
        "  --reserve GIB        memory to leave free on each GPU (default: 5 %%, for errors of\n"
        "                       the prediction)\n"
        "  --bold               allow layouts with unmeasured parts (docs/autoplan.md); by\n"
        "                       default they are only listed\n"
        "  --explain            also print runners-up, their additional time, and what-ifs\n"
        "  --json               print the plan as JSON\n"
        "  -o, --output FILE    write the plan's JSON to a file\n"
        "\n"
        "Exit status: 1 if nothing fits. The output then names the part of the memory that is\n"
        "short and the number of GPUs that would be enough.\n");
}

/* ---- arguments ------------------------------------------------------------------------------- */

static int is_file(const char *path) {
    struct stat what;
    return stat(path, &what) == 0;
}

/* Writes the model's name for the plan: of a path, the folder's name. */
static void name_of(const char *text, char *name, size_t room) {
    size_t end = strlen(text);
    if (is_file(text) && end > 12 && strcmp(text + end - 12, "/config.json") == 0) end -= 12;
    while (end > 1 && text[end - 1] == '/') end--;
    size_t begin = end;
    while (begin > 0 && text[begin - 1] != '/') begin--;
    snprintf(name, room, "%.*s", (int)(end - begin), text + begin);
}

static int read_count(const char *name, const char *text, int64_t *value) {
    char *end;
    if (!text) return cli_usage_error("plan needs %s", name);
    errno = 0;
    *value = strtoll(text, &end, 10);
    if (end == text || *end || errno)
        return cli_usage_error("%s is '%s'; expected a number", name, text);
    return CLI_DONE;
}

static int read_precision(const char *text, dw_scheme *precision) {
    *precision = DW_SCHEME_COUNT;
    if (strcmp(text, "auto") == 0 || dw_scheme_find(text, precision) == DW_OK) return CLI_DONE;
    return cli_usage_error("--precision is '%s'; expected bf16, fp32, fp8-tensor, fp8-row, "
                           "fp8-block, mxfp8, nvfp4 or auto",
                           text);
}

static int read_reserve(const char *text, double *bytes) {
    char *end;
    double gib = strtod(text, &end);
    if (end == text || *end || !(gib >= 0))
        return cli_usage_error("--reserve is '%s'; expected GiB", text);
    *bytes = gib * 1024 * 1024 * 1024;
    return CLI_DONE;
}

/* Reads the values of --set: all words up to the next option. */
static int read_constraints(int argc, char **argv, int *at, request *r) {
    int before = (int)r->constraint_count;
    while (*at + 1 < argc && argv[*at + 1][0] != '-') {
        if (r->constraint_count == CONSTRAINTS_MOST)
            return cli_usage_error("--set accepts at most %d constraints", CONSTRAINTS_MOST);
        r->constraints[r->constraint_count++] = argv[++*at];
    }
    return (int)r->constraint_count > before
               ? CLI_DONE
               : cli_usage_error("--set needs a constraint, as in tp=8");
}

static int read_arguments(int argc, char **argv, request *r) {
    const struct {
        const char *name;
        const char **value;
    } options[] = {{"--model", &r->model},         {"--hardware", &r->hardware},
                   {"--seq-len", &r->seq_len},     {"--global-batch", &r->global_batch},
                   {"--precision", &r->precision}, {"--reserve", &r->reserve},
                   {"--output", &r->output},       {"-o", &r->output}};
    const size_t option_count = sizeof options / sizeof options[0];
    for (int at = 1; at < argc; at++) {
        const char *word = argv[at];
        size_t option = 0;
        while (option < option_count && strcmp(options[option].name, word) != 0) option++;
        if (option < option_count) {
            if (at + 1 == argc) return cli_usage_error("%s needs a value", word);
            *options[option].value = argv[++at];
        } else if (strcmp(word, "--set") == 0) {
            int result = read_constraints(argc, argv, &at, r);
            if (result != CLI_DONE) return result;
        } else if (strcmp(word, "--explain") == 0) {
            r->explain = 1;
        } else if (strcmp(word, "--bold") == 0) {
            r->bold = 1;
        } else if (strcmp(word, "--json") == 0) {
            r->json = 1;
        } else {
            return cli_usage_error("plan: unknown argument '%s'", word);
        }
    }
    if (!r->model) return cli_usage_error("plan needs --model");
    if (!r->hardware) return cli_usage_error("plan needs --hardware");
    return CLI_DONE;
}

/* ---- the command ----------------------------------------------------------------------------- */

static int show(const request *r, const dw_autoplan *plan) {
    char *text = NULL;
    int fits = plan->prediction.fits;
    if (r->output && dw_autoplan_save(plan, r->output) != DW_OK) return cli_fail();
    dw_status status =
        r->json ? dw_autoplan_json(plan, &text) : dw_autoplan_text(plan, r->explain, &text);
    if (status != DW_OK) return cli_fail();
    fputs(text, stdout);
    dw_text_free(text);
    return fits ? CLI_DONE : CLI_FAILED;
}

static int plan_on_host(const request *r, const dw_autoplan_request *asked,
                        const dw_hardware *hardware) {
    if (r->constraint_count > 0 || r->bold)
        return cli_usage_error(
            "--set and --bold need GPUs, and %s has none; pass a --hardware with "
            "GPUs, such as h100:8",
            hardware->name);
    const plan_host_request host = {
        .model = r->model,
        .hardware = hardware,
        .seq_len = asked->seq_len,
        .global_batch = asked->global_batch,
        .precision = r->precision && strcmp(r->precision, "auto") != 0 ? r->precision : "fp32",
        .reserve = asked->reserve,
        .json = r->json,
        .output = r->output};
    if (host.seq_len < 1 || host.global_batch < 1)
        return cli_usage_error("--seq-len and --global-batch must be 1 or more");
    return plan_host(&host);
}

int cli_plan(int argc, char **argv) {
    request r = {0};
    dw_autoplan_request asked;
    dw_model_sizes model;
    dw_hardware *hardware = NULL;
    dw_autoplan *plan = NULL;
    char name[256];
    if (argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        print_help();
        return CLI_DONE;
    }
    int result = read_arguments(argc, argv, &r);
    dw_autoplan_request_default(&asked);
    asked.what_ifs = r.explain;
    asked.bold = r.bold;
    if (result == CLI_DONE) result = read_count("--seq-len", r.seq_len, &asked.seq_len);
    if (result == CLI_DONE)
        result = read_count("--global-batch", r.global_batch, &asked.global_batch);
    if (result == CLI_DONE && r.reserve) result = read_reserve(r.reserve, &asked.reserve);
    if (result != CLI_DONE) return result;
    assert(r.model);
    if (dw_hardware_open(r.hardware, &hardware) != DW_OK) return cli_fail();
    if (hardware->gpus == 0) {
        result = plan_on_host(&r, &asked, hardware);
        dw_hardware_destroy(hardware);
        return result;
    }
    if (r.precision) result = read_precision(r.precision, &asked.precision);
    if (result == CLI_DONE && dw_model_sizes_find(r.model, &model) != DW_OK) result = cli_fail();
    if (result != CLI_DONE) {
        dw_hardware_destroy(hardware);
        return result;
    }
    name_of(r.model, name, sizeof name);
    asked.model_name = name;
    asked.model = &model;
    asked.hardware = hardware;
    asked.constraints = r.constraints;
    asked.constraint_count = r.constraint_count;
    result = dw_autoplan_search(&asked, &plan) == DW_OK && dw_autoplan_bind(plan) == DW_OK
                 ? show(&r, plan)
                 : cli_fail();
    dw_autoplan_destroy(plan);
    dw_hardware_destroy(hardware);
    return result;
}
