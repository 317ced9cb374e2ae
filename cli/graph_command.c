/* `deepwell graph` prints a graph from a file, its cost and the engine's plan for it. */
#include "cli.h"
#include "deepwell/deepwell.h"
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct request {
    const char *file;
    const char *sizes; /* "B=8,S=256", or NULL */
    int passes, plan, json;
    long grad_output; /* -1: inference */
    dw_precision_policy *policy;
} request;

static void print_help(void) {
    printf("Usage: deepwell graph FILE [OPTION...]\n"
           "\n"
           "Prints a graph from a JSON or text file that Deepwell wrote.\n"
           "\n"
           "  --passes        print it after the engine's passes and scheduling\n"
           "  --sizes SIZES   add operations and bytes at these symbol values (B=8,S=256)\n"
           "  --plan SIZES    also print the engine's plan: kernels, buffers, arena\n"
           "  --grad OUTPUT   add the gradients of output number OUTPUT (from 0) with respect\n"
           "                  to all parameters\n"
           "  --precision P   precision of linear layers: fp32, bf16, fp8, fp8-block, mxfp8,\n"
           "                  mxfp6, mxfp4, nvfp4, or the file of a policy (NAME.json)\n"
           "  --json          print one JSON object: graph, and with the options above cost and\n"
           "                  operations\n");
}

static int fail(const char *what) {
    fprintf(stderr, "deepwell: %s: %s\n", what, dw_last_error());
    return CLI_FAILED;
}

/* Returns the file's text, to be released with free. If it cannot be read, prints a message and returns NULL. */
static char *read_file(const char *path, size_t *bytes) {
    enum { BLOCK = 1 << 16, MOST = 1 << 30 }; /* a device such as /dev/zero never ends */
    const char *reason = NULL;
    char *text = NULL;
    size_t used = 0, capacity = 0;
    FILE *file = fopen(path, "rb");
    if (!file) {
        fprintf(stderr, "deepwell: cannot open %s: %s\n", path, strerror(errno));
        return NULL;
    }
    for (;;) {
        if (capacity - used <= BLOCK) {
            size_t wanted = 2 * capacity + 2 * (size_t)BLOCK;
            char *larger = used > MOST ? NULL : realloc(text, wanted);
            if (!larger) {
                reason =
                    used > MOST ? "it is larger than 1 GiB, the limit for graphs" : "out of memory";
                break;
            }
            text = larger;
            capacity = wanted;
        }
        size_t got = fread(text + used, 1, BLOCK, file);
        used += got;
        if (got > 0) continue;
        if (ferror(file)) reason = strerror(errno);
        break;
    }
    fclose(file);
    if (!reason && memchr(text, '\0', used)) reason = "it contains a NUL byte; expected text";
    if (reason) {
        fprintf(stderr, "deepwell: cannot read %s: %s\n", path, reason);
        free(text);
        return NULL;
    }
    text[used] = '\0';
    *bytes = used;
    return text;
}

static dw_status load(const char *text, size_t bytes, dw_graph **graph) {
    size_t first = strspn(text, " \t\r\n");
    return text[first] == '{' ? dw_graph_from_json(text, bytes, graph)
                              : dw_graph_from_text(text, graph);
}

/* Reads "B=8,S=256" into one size per symbol. If a symbol is missing or unknown, prints a message and returns 0. */
static int read_sizes(const dw_graph *graph, const char *text, int64_t *sizes) {
    uint32_t count = dw_graph_symbol_count(graph);
    for (uint32_t i = 0; i < count; i++) sizes[i] = -1;
    while (*text) {
        size_t name = strcspn(text, "=");
        uint32_t at = 0;
        while (at < count && (strlen(dw_graph_symbol_name(graph, at)) != name ||
                              strncmp(dw_graph_symbol_name(graph, at), text, name) != 0)) {
            at++;
        }
        char *end = NULL;
        errno = 0;
        int64_t value = text[name] ? strtoll(text + name + 1, &end, 10) : -1;
        if (at == count || value < 0 || errno || !end || end == text + name + 1 ||
            (*end && *end != ',')) {
            cli_usage_error("'%s' must begin with SYMBOL=SIZE, with a symbol of the graph", text);
            return 0;
        }
        sizes[at] = value;
        text = *end ? end + 1 : end;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (sizes[i] >= 0) continue;
        cli_usage_error("the size of %s is missing", dw_graph_symbol_name(graph, i));
        return 0;
    }
    return 1;
}

static dw_status make_engine(const dw_graph *graph, const request *r, dw_engine **engine) {
    long grad_output = r->grad_output;
    dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
    options.precision = r->policy;
    if (grad_output < 0) return dw_engine_create(graph, 0, NULL, 0, NULL, &options, engine);
    uint32_t leaf_count = dw_graph_leaf_count(graph), wrt_count = 0;
    uint32_t output = (uint32_t)grad_output;
    dw_value *wrt = malloc((leaf_count + 1) * sizeof *wrt);
    if (!wrt) return DW_OUT_OF_MEMORY;
    for (uint32_t i = 0; i < leaf_count; i++) {
        dw_value leaf = dw_graph_leaf_at(graph, i);
        if (dw_value_role(graph, leaf) == DW_ROLE_PARAMETER) wrt[wrt_count++] = leaf;
    }
    dw_status status = dw_engine_create(graph, 1, &output, wrt_count, wrt, &options, engine);
    free(wrt);
    return status;
}

static int print_graph(const dw_graph *graph) {
    char *text = NULL;
    if (dw_graph_to_text(graph, &text) != DW_OK) return fail("the graph as text");
    fputs(text, stdout);
    dw_text_free(text);
    return CLI_DONE;
}

static int print_cost(const dw_graph *graph, const int64_t *sizes) {
    dw_cost cost;
    if (dw_graph_cost(graph, sizes, &cost) != DW_OK) return fail("the graph's cost");
    printf("cost: %.6g floating-point operations, %.6g bytes moved at least\n", cost.flops,
           cost.bytes);
    return CLI_DONE;
}

static int print_plan(dw_engine *engine, const int64_t *sizes) {
    dw_plan *plan = NULL;
    char *text = NULL;
    if (dw_engine_plan(engine, sizes, &plan) != DW_OK) return fail("the plan");
    int result = CLI_DONE;
    if (dw_plan_describe(plan, &text) == DW_OK)
        fputs(text, stdout);
    else
        result = fail("the plan's description");
    dw_text_free(text);
    dw_plan_release(plan);
    return result;
}

static dw_status operations_json(dw_engine *engine, const int64_t *sizes, char **text) {
    dw_plan *plan = NULL;
    dw_status status = dw_engine_plan(engine, sizes, &plan);
    if (status == DW_OK) status = dw_plan_operations(plan, text);
    if (plan) dw_plan_release(plan);
    return status;
}

/* Prints {"graph": ..., "cost": ..., "operations": ...}; the last two if sizes and --plan are given. */
static int print_json(const request *r, const dw_graph *graph, dw_engine *engine,
                      const int64_t *sizes) {
    char *text = NULL, *operations = NULL;
    dw_cost cost = {0};
    dw_status status = dw_graph_to_json(graph, &text);
    if (status == DW_OK && r->sizes) status = dw_graph_cost(graph, sizes, &cost);
    if (status == DW_OK && r->plan) status = operations_json(engine, sizes, &operations);
    if (status == DW_OK) {
        printf("{\"graph\": %s", text);
        if (r->sizes)
            printf(", \"cost\": {\"flops\": %.17g, \"bytes\": %.17g}", cost.flops, cost.bytes);
        if (r->plan) printf(", \"operations\": %s", operations);
        puts("}");
    }
    dw_text_free(text);
    dw_text_free(operations);
    return status == DW_OK ? CLI_DONE : fail(r->file);
}

static int show(const request *r, const dw_graph *graph) {
    int64_t *sizes = calloc(dw_graph_symbol_count(graph) + 1u, sizeof *sizes);
    if (!sizes) {
        fprintf(stderr, "deepwell: out of memory\n");
        return CLI_FAILED;
    }
    dw_engine *engine = NULL;
    int result = CLI_DONE;
    if (r->sizes && !read_sizes(graph, r->sizes, sizes)) result = CLI_USAGE;
    int wants_engine = r->passes || r->plan || r->grad_output >= 0 || r->policy;
    if (result == CLI_DONE && wants_engine && make_engine(graph, r, &engine) != DW_OK) {
        result = fail(r->file);
    }
    const dw_graph *shown = engine ? dw_engine_graph(engine) : graph;
    if (result == CLI_DONE && r->json) {
        result = print_json(r, shown, engine, sizes);
    } else if (result == CLI_DONE) {
        result = print_graph(shown);
        if (result == CLI_DONE && r->sizes) result = print_cost(shown, sizes);
        if (result == CLI_DONE && r->plan) result = print_plan(engine, sizes);
    }
    dw_engine_destroy(engine);
    free(sizes);
    return result;
}

static bool takes_value(const char *option) {
    return strcmp(option, "--sizes") == 0 || strcmp(option, "--plan") == 0 ||
           strcmp(option, "--grad") == 0 || strcmp(option, "--precision") == 0;
}

static int read_value(const char *option, const char *value, request *r) {
    if (strcmp(option, "--grad") == 0) {
        char *end = NULL;
        r->grad_output = strtol(value, &end, 10);
        if (*end || end == value || r->grad_output < 0 || r->grad_output > INT32_MAX)
            return cli_usage_error("--grad needs the number of an output, not '%s'", value);
    } else if (strcmp(option, "--precision") == 0) {
        dw_precision_policy_destroy(r->policy);
        if (dw_precision_policy_load(value, &r->policy) != DW_OK)
            return cli_usage_error("%s", dw_last_error());
    } else {
        r->sizes = value;
        r->plan |= strcmp(option, "--plan") == 0;
    }
    return CLI_DONE;
}

/* Returns CLI_DONE if `r` is complete. */
static int read_arguments(int argc, char **argv, request *r) {
    for (int at = 1; at < argc; at++) {
        const char *argument = argv[at];
        if (takes_value(argument)) {
            if (at + 1 == argc) return cli_usage_error("%s needs a value", argument);
            int result = read_value(argument, argv[++at], r);
            if (result != CLI_DONE) return result;
        } else if (strcmp(argument, "--passes") == 0) {
            r->passes = 1;
        } else if (strcmp(argument, "--json") == 0) {
            r->json = 1;
        } else if (argument[0] == '-' || r->file) {
            return cli_usage_error("graph: unknown argument '%s'", argument);
        } else {
            r->file = argument;
        }
    }
    return r->file ? CLI_DONE : cli_usage_error("graph needs a file");
}

int cli_graph(int argc, char **argv) {
    if (argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        print_help();
        return CLI_DONE;
    }
    request r = {.grad_output = -1};
    int result = read_arguments(argc, argv, &r);
    size_t bytes = 0;
    char *text = result == CLI_DONE ? read_file(r.file, &bytes) : NULL;
    if (text) {
        dw_graph *graph = NULL;
        result = load(text, bytes, &graph) == DW_OK ? show(&r, graph) : fail(r.file);
        dw_graph_destroy(graph);
        free(text);
    } else if (result == CLI_DONE) {
        result = CLI_FAILED;
    }
    dw_precision_policy_destroy(r.policy);
    return result;
}
