/* Engines: made once from a graph; queries that need no sizes. */
#include "engine/engine_internal.h"
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static dw_status check_request(const dw_graph *graph, uint32_t grad_output_count,
                               const uint32_t *grad_outputs, uint32_t wrt_count,
                               const dw_value *wrt) {
    uint32_t output_count = dw_graph_output_count(graph);
    for (uint32_t i = 0; i < grad_output_count; i++) {
        if (grad_outputs[i] >= output_count) {
            return dw__fail(DW_INVALID_ARGUMENT,
                            "grad_outputs[%u] is %u, but the graph has %u outputs", i,
                            grad_outputs[i], output_count);
        }
    }
    for (uint32_t i = 0; i < wrt_count; i++) {
        if (wrt[i] >= dw_graph_value_count(graph) || dw_value_node(graph, wrt[i]) != DW_NONE) {
            return dw__fail(DW_INVALID_ARGUMENT,
                            "wrt[%u] is value %u, which is not a leaf: gradients are taken with "
                            "respect to leaves",
                            i, wrt[i]);
        }
    }
    return DW_OK;
}

static dw_status read_options(const dw_engine_options *given, dw_engine_options *options) {
    static const dw__struct known = {"dw_engine_options",
                                     sizeof *options,
                                     {offsetof(dw_engine_options, precision),
                                      offsetof(dw_engine_options, device),
                                      offsetof(dw_engine_options, keep_values)}};
    return given ? dw__struct_read(&known, given, options) : DW_OK;
}

static const size_t PART_BYTES = (size_t)8 << 20; /* dw_engine_options.part_bytes by default */

/* DEEPWELL_PROFILE=cpu counts the CPU time of the process, which other programs on the machine do not change. */
static double (*profile_clock(void))(void) {
    const char *value = getenv("DEEPWELL_PROFILE");
    if (!value || !*value || strcmp(value, "0") == 0) return NULL;
    return strcmp(value, "cpu") == 0 ? dw__cpu_seconds : dw__seconds;
}

dw_status dw_engine_create(const dw_graph *graph, uint32_t grad_output_count,
                           const uint32_t *grad_outputs, uint32_t wrt_count, const dw_value *wrt,
                           const dw_engine_options *given, dw_engine **out) {
    dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
    DW_RETURN_IF_FAILED(read_options(given, &options));
    DW_RETURN_IF_FAILED(check_request(graph, grad_output_count, grad_outputs, wrt_count, wrt));
    dw_status status = DW_OK;
    dw_engine *engine = dw__calloc(1, sizeof *engine);
    if (!engine) return dw__fail_memory("an engine", sizeof *engine);
    engine->leaf_count = dw_graph_leaf_count(graph);
    engine->output_count = dw_graph_output_count(graph);
    engine->grad_output_count = grad_output_count;
    engine->wrt_count = wrt_count;
    engine->profile_clock = profile_clock();
    engine->device = options.device;
    engine->cuda_graphs = options.cuda_graphs != 0;
    engine->most_segments = options.arena_segments < 1 ? 1 : (uint32_t)options.arena_segments;
    if (engine->most_segments > DW_PLACEMENT_SEGMENTS)
        engine->most_segments = DW_PLACEMENT_SEGMENTS;
    engine->part_bytes = options.part_bytes ? options.part_bytes : PART_BYTES;
    engine->grad_slot = dw__calloc((size_t)wrt_count + 1, sizeof *engine->grad_slot);
    engine->wrt_of = dw__calloc((size_t)wrt_count + 1, sizeof *engine->wrt_of);
    engine->wrt_leaf = dw__calloc((size_t)wrt_count + 1, sizeof *engine->wrt_leaf);
    engine->prepared_index = dw__map_create();
    if (!engine->grad_slot || !engine->wrt_of || !engine->wrt_leaf || !engine->prepared_index)
        DW_TRY(dw__fail_memory("an engine", wrt_count));
    if (pthread_mutex_init(&engine->lock, NULL) != 0) {
        DW_TRY(dw__fail(DW_OUT_OF_MEMORY,
                        "cannot create a mutex for an engine: the system is out of resources"));
    }
    engine->has_lock = true;
    DW_TRY(dw__engine_build_graph(engine, graph, grad_outputs, wrt, &options));
    DW_TRY(dw__engine_index_graph(engine));
    *out = engine;
    engine = NULL;
cleanup:
    dw_engine_destroy(engine);
    return status;
}

void dw_engine_destroy(dw_engine *engine) {
    if (!engine) return;
    while (engine->plans) {
        dw_plan *older = engine->plans->older;
        dw__plan_destroy(engine->plans);
        engine->plans = older;
    }
    if (engine->has_lock) pthread_mutex_destroy(&engine->lock);
    dw_graph_destroy(engine->graph);
    for (size_t i = 0; i < engine->prepared.count; i++) dw__free(engine->prepared.items[i]);
    dw__free(engine->prepared.items);
    dw__map_destroy(engine->prepared_index);
    dw__free(engine->grad_slot);
    dw__free(engine->wrt_of);
    dw__free(engine->wrt_leaf);
    dw__free(engine->use_start);
    dw__free(engine->use_nodes);
    dw__free(engine->output_uses);
    dw__free(engine->direct);
    dw__free(engine->leaf_reads);
    dw__free(engine->output_reads);
    dw__free(engine);
}

int dw_engine_has_grad(const dw_engine *engine, uint32_t index) {
    return index < engine->wrt_count && engine->grad_slot[index] != DW_NONE;
}

int dw_engine_backward_reads_leaf(const dw_engine *engine, uint32_t index) {
    return index < engine->leaf_count && (engine->leaf_reads[index] & DW_READ_BACKWARD) != 0;
}

int dw_engine_backward_reads_output(const dw_engine *engine, uint32_t index) {
    return index < engine->output_count && (engine->output_reads[index] & DW_READ_BACKWARD) != 0;
}

int dw_engine_kept_values_read_leaf(const dw_engine *engine, uint32_t index) {
    return index < engine->leaf_count && (engine->leaf_reads[index] & DW_READ_KEPT) != 0;
}

uint32_t dw_engine_quantized_count(const dw_engine *engine) { return engine->quantized_count; }
const char *dw_engine_code_products(const dw_engine *engine, uint32_t *multiplied,
                                    uint32_t *simulated) {
    *multiplied = engine->products.multiplied;
    *simulated = engine->products.simulated;
    return engine->products.simulated ? engine->products.reason : "";
}

const dw_graph *dw_engine_graph(const dw_engine *engine) { return engine->graph; }
