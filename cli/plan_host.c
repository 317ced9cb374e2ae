/* `deepwell plan` for a machine without GPUs: finds the largest micro-batch that fits into its memory, on Deepwell's
 * engine. */
#include "plan_host.h"
#include "cli.h"
#include "deepwell/deepwell.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double GIB = 1024.0 * 1024.0 * 1024.0, RESERVE = 0.05;

static dw_status make_engine(const dw_graph *graph, const char *precision, dw_engine **engine) {
    const uint32_t loss = 0, leaves = dw_graph_leaf_count(graph);
    dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
    dw_precision_policy *policy;
    uint32_t count = 0;
    dw_value *parameters = calloc(leaves + 1, sizeof *parameters);
    if (!parameters) return DW_OUT_OF_MEMORY;
    dw_status status = dw_precision_policy_load(precision, &policy);
    options.precision = policy;
    for (uint32_t at = 0; at < leaves; at++) {
        dw_value leaf = dw_graph_leaf_at(graph, at);
        if (dw_value_role(graph, leaf) == DW_ROLE_PARAMETER) parameters[count++] = leaf;
    }
    if (status == DW_OK)
        status = dw_engine_create(graph, 1, &loss, count, parameters, &options, engine);
    dw_precision_policy_destroy(policy);
    free(parameters);
    return status;
}

static dw_status fit(const plan_host_request *r, dw_engine *engine, const dw_graph *graph,
                     double capacity, dw_step_fit *found) {
    dw_step_options options = DW_STEP_OPTIONS_DEFAULT;
    const uint32_t symbols = dw_graph_symbol_count(graph);
    uint32_t batch = 0;
    int64_t *sizes = calloc(symbols + 1, sizeof *sizes);
    if (!sizes) return DW_OUT_OF_MEMORY;
    for (uint32_t at = 0; at < symbols; at++) {
        int is_batch = strcmp(dw_graph_symbol_name(graph, at), "B") == 0;
        sizes[at] = is_batch ? r->global_batch : r->seq_len;
        if (is_batch) batch = at;
    }
    dw_status status = dw_engine_fit_step(engine, sizes, batch, 1, &options,
                                          capacity > 0 ? (size_t)capacity : 0, found);
    free(sizes);
    return status;
}

static void write_json(FILE *file, const plan_host_request *r, const dw_step_fit *found,
                       double capacity) {
    fprintf(file,
            "{\"framework\": \"deepwell\", \"hardware\": \"cpu\", \"seq_len\": %lld, "
            "\"global_batch\": %lld, \"micro_batch\": %lld, \"micro_batches\": %lld, "
            "\"precision\": \"%s\", \"peak_bytes\": %zu, \"capacity_bytes\": %.0f, "
            "\"fits\": %s}\n",
            (long long)r->seq_len, (long long)r->global_batch, (long long)found->micro_batch,
            (long long)(r->global_batch / found->micro_batch), r->precision, found->peak.total,
            capacity, found->fits ? "true" : "false");
}

/* Writes the file of the plan. Returns a cli_exit. */
static int save(const plan_host_request *r, const dw_step_fit *found, double capacity) {
    FILE *file = fopen(r->output, "w");
    if (file) write_json(file, r, found, capacity);
    int failed = !file || ferror(file);
    if (file && fclose(file) != 0) failed = 1;
    if (!failed) return CLI_DONE;
    fprintf(stderr, "deepwell: cannot write \"%s\": %s\n", r->output, strerror(errno));
    return CLI_FAILED;
}

static void show(const plan_host_request *r, const dw_step_fit *found, double capacity) {
    const dw_step_moment *peak = &found->peak;
    const struct {
        const char *name;
        size_t bytes;
    } parts[] = {{"parameters", peak->parameters}, {"gradients", peak->gradients},
                 {"optimizer", peak->optimizer},   {"arena", peak->arena},
                 {"inputs", peak->inputs},         {"outputs", peak->outputs},
                 {"library", peak->library}};
    const long long micro_batches = r->global_batch / found->micro_batch;
    if (r->json) {
        write_json(stdout, r, found, capacity);
        return;
    }
    printf("%-12s%s; a step is %lld sequences of %lld tokens\n", "Model", r->model,
           (long long)r->global_batch, (long long)r->seq_len);
    printf("%-12s%s, which has no GPU: planned for Deepwell's engine on the CPU\n", "Hardware",
           r->hardware->name);
    printf("%-12s%lld x %lld sequences, %s, %d threads\n", found->fits ? "Layout" : "Nearest",
           micro_batches, (long long)found->micro_batch, r->precision, dw_get_threads());
    printf("%-12s%.2f of %.2f GiB, peak in %s%s\n", "Memory", (double)peak->total / GIB,
           capacity / GIB, dw_step_phase_name(peak->phase), found->fits ? "" : ": does not fit");
    for (size_t at = 0; at < sizeof parts / sizeof parts[0]; at++)
        if (parts[at].bytes > 0)
            printf("%12s%-12s%8.2f GiB\n", "", parts[at].name, (double)parts[at].bytes / GIB);
    printf("%-12snot predicted on a CPU\n", "Time");
}

int plan_host(const plan_host_request *r) {
    dw_model_graph_options options = DW_MODEL_GRAPH_OPTIONS_DEFAULT;
    dw_model_config *config = NULL;
    dw_graph *graph = NULL;
    dw_engine *engine = NULL;
    dw_step_fit found;
    const double memory = r->hardware->host_memory.value;
    const double capacity = memory - (r->reserve < 0 ? RESERVE * memory : r->reserve);
    options.output = DW_MODEL_LOSS;
    dw_status status = dw_model_config_find(r->model, &config);
    if (status == DW_OK) status = dw_model_graph(config, &options, &graph);
    if (status == DW_OK) status = make_engine(graph, r->precision, &engine);
    if (status == DW_OK) status = fit(r, engine, graph, capacity, &found);
    int result = status == DW_OK ? CLI_DONE : cli_fail();
    if (status == DW_OK) {
        if (r->output) result = save(r, &found, capacity);
        if (result == CLI_DONE) show(r, &found, capacity);
        if (!found.fits) result = CLI_FAILED;
    }
    if (engine) dw_engine_destroy(engine);
    dw_graph_destroy(graph);
    dw_model_config_destroy(config);
    return result;
}
