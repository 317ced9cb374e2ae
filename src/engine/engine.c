/* Engines: a graph made ready once, and the cache of its plans. */
#include "base/pool.h"
#include "engine/engine_internal.h"
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- passes and gradient --------------------------------------------------------------------- */

static dw_status run_passes(dw_graph **graph, size_t count, const dw_pass *passes) {
    for (size_t i = 0; i < count; i++) {
        dw_status status = dw_graph_run_pass(graph, passes[i]);
        if (status != DW_OK) return dw__fail_prefix(status, "pass %s", dw_pass_name(passes[i]));
    }
    return DW_OK;
}

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
                            "wrt[%u] is value %u, which is no leaf: gradients are taken with "
                            "respect to leaves",
                            i, wrt[i]);
        }
    }
    return DW_OK;
}

/* A leaf of the output's type, under a name that is free. */
static dw_status add_gradient_leaf(dw_graph *graph, uint32_t output, dw_value *leaf) {
    char name[64];
    snprintf(name, sizeof name, "gradient.%u", output);
    for (uint32_t attempt = 2; dw_graph_find(graph, name) != DW_NONE; attempt++) {
        snprintf(name, sizeof name, "gradient.%u.%u", output, attempt);
    }
    dw_value value = dw_graph_output(graph, output);
    dw_dim shape[DW_MAX_RANK];
    int rank = dw_value_rank(graph, value);
    for (int axis = 0; axis < rank; axis++) shape[axis] = dw_value_shape(graph, value)[axis];
    return dw_graph_leaf(graph, DW_ROLE_GRADIENT, name, dw_value_dtype(graph, value), rank, shape,
                         leaf);
}

/* Appends backward; the gradients that exist become outputs. */
static dw_status differentiate(dw_engine *engine, const uint32_t *grad_outputs) {
    dw_status status = DW_OK;
    dw_graph *graph = engine->graph;
    uint32_t outputs_count = engine->grad_output_count, wrt_count = engine->wrt_count;
    size_t bytes = (2 * (size_t)outputs_count + 2 * (size_t)wrt_count) * sizeof(dw_value);
    dw_value *outputs = dw__malloc(bytes);
    if (!outputs) return dw__fail_memory("the request for gradients", bytes);
    dw_value *output_grads = outputs + outputs_count, *wrt = output_grads + outputs_count;
    dw_value *grads = wrt + wrt_count;
    for (uint32_t i = 0; i < outputs_count; i++) {
        outputs[i] = dw_graph_output(graph, grad_outputs[i]);
        DW_TRY(add_gradient_leaf(graph, grad_outputs[i], &output_grads[i]));
    }
    for (uint32_t j = 0; j < wrt_count; j++) {
        wrt[j] = dw_graph_leaf_at(graph, engine->wrt_leaf[j]);
        grads[j] = DW_NONE;
    }
    DW_TRY(dw_graph_gradient(graph, outputs_count, outputs, output_grads, wrt_count, wrt, grads));
    uint32_t slot = engine->output_count;
    for (uint32_t j = 0; j < wrt_count; j++) {
        engine->grad_slot[j] = DW_NONE;
        if (grads[j] == DW_NONE) continue;
        DW_TRY(dw_graph_add_output(graph, grads[j]));
        engine->wrt_of[slot - engine->output_count] = j;
        engine->grad_slot[j] = slot++;
    }
cleanup:
    dw__free(outputs);
    return status;
}

/* Each search begins where the one before ended, for the leaves mostly come in the graph's order. */
static dw_status leaf_positions(const dw_graph *graph, uint32_t count, const dw_value *leaves,
                                uint32_t *positions) {
    const uint32_t leaf_count = dw_graph_leaf_count(graph);
    uint32_t at = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t tried = 0;
        for (; tried < leaf_count && dw_graph_leaf_at(graph, at) != leaves[i]; tried++)
            at = at + 1 < leaf_count ? at + 1 : 0;
        if (tried == leaf_count) {
            return dw__fail(DW_INTERNAL, "value %u has no node and is no leaf", leaves[i]);
        }
        positions[i] = at;
    }
    return DW_OK;
}

static dw_status build_graph(dw_engine *engine, const dw_graph *graph, const uint32_t *grad_outputs,
                             const dw_value *wrt, const dw_engine_options *options) {
    static const dw_pass before[] = {DW_PASS_FOLD, DW_PASS_RECOGNIZE, DW_PASS_FOLD, DW_PASS_COMMON,
                                     DW_PASS_DEAD_CODE};
    /* Patterns of backward are recognised after the gradient. */
    static const dw_pass after[] = {DW_PASS_FOLD, DW_PASS_RECOGNIZE, DW_PASS_FOLD, DW_PASS_COMMON,
                                    DW_PASS_DEAD_CODE};
    static const dw_pass shared[] = {DW_PASS_FOLD, DW_PASS_COMMON, DW_PASS_DEAD_CODE};
    static const dw_pass fuse[] = {DW_PASS_FUSE, DW_PASS_DEAD_CODE};
    dw_status status = DW_OK;
    bool expanded = false;
    DW_TRY(leaf_positions(graph, engine->wrt_count, wrt, engine->wrt_leaf));
    DW_TRY(dw_graph_clone(graph, &engine->graph));
    DW_TRY(run_passes(&engine->graph, DW_COUNT(before), before));
    if (options->precision) {
        DW_TRY(
            dw_graph_apply_precision(&engine->graph, options->precision, &engine->quantized_count));
    }
    if (engine->wrt_count) {
        DW_TRY(differentiate(engine, grad_outputs));
        DW_TRY(run_passes(&engine->graph, DW_COUNT(after), after));
    }
    DW_TRY(dw__join_pads(&engine->graph));
    /* Tensors that several layers, or forward and backward, quantize alike are then quantized once. */
    DW_TRY(dw__expand_quantized(&engine->graph, &expanded));
    if (expanded) DW_TRY(run_passes(&engine->graph, DW_COUNT(shared), shared));
    if (options->fuse) DW_TRY(run_passes(&engine->graph, DW_COUNT(fuse), fuse));
    DW_TRY(dw__schedule(&engine->graph, engine->output_count, options->recompute != 0));
cleanup:
    return status;
}

/* ---- what plans look up ---------------------------------------------------------------------- */

static dw_status index_uses(dw_engine *engine) {
    const dw_graph *graph = engine->graph;
    size_t values = graph->values.count, reads = 0;
    for (size_t n = 0; n < graph->nodes.count; n++) reads += graph->nodes.items[n].input_count;
    engine->use_start = dw__calloc(values + 2, sizeof *engine->use_start);
    engine->use_nodes = dw__calloc(reads + 1, sizeof *engine->use_nodes);
    engine->output_uses = dw__calloc(values + 1, sizeof *engine->output_uses);
    if (!engine->use_start || !engine->use_nodes || !engine->output_uses) {
        return dw__fail_memory("the readers of values", (values + reads) * sizeof(uint32_t));
    }
    /* Counting sort: use_start[v + 2] counts, then use_start[v + 1] runs through v's readers. */
    uint32_t *start = engine->use_start;
    for (size_t n = 0; n < graph->nodes.count; n++) {
        const dw__node_record *node = &graph->nodes.items[n];
        for (uint32_t i = 0; i < node->input_count; i++) {
            if (node->inputs[i] != DW_NONE) start[node->inputs[i] + 2]++;
        }
    }
    for (size_t v = 2; v < values + 2; v++) start[v] += start[v - 1];
    for (size_t n = 0; n < graph->nodes.count; n++) {
        const dw__node_record *node = &graph->nodes.items[n];
        for (uint32_t i = 0; i < node->input_count; i++) {
            if (node->inputs[i] != DW_NONE) {
                engine->use_nodes[start[node->inputs[i] + 1]++] = (dw_node)n;
            }
        }
    }
    for (size_t i = 0; i < graph->outputs.count; i++) {
        engine->output_uses[graph->outputs.items[i]]++;
    }
    return DW_OK;
}

/* The value that a chain of reshapes above `value` begins with, within one region; DW_NONE if a
 * leaf, or a value of the other region, or one that has a buffer already. */
static dw_value find_direct_root(const dw_engine *engine, dw_value value, bool backward) {
    const dw_graph *graph = engine->graph;
    for (bool first = true;; first = false) {
        dw_node node = graph->values.items[value].node;
        if (node == DW_NONE || engine->direct[value] != DW_NONE) return DW_NONE;
        const dw__node_record *record = &graph->nodes.items[node];
        if (record->backward != backward) return DW_NONE;
        if (backward) {
            /* The caller may leave a gradient out, so that nothing else may read it. */
            uint32_t uses = engine->use_start[value + 1] - engine->use_start[value];
            if (uses + engine->output_uses[value] != 1 || (first && uses)) return DW_NONE;
        }
        if (!dw__op_keeps_order(record->op)) return value;
        value = record->inputs[0];
    }
}

static dw_status choose_direct(dw_engine *engine) {
    const dw_graph *graph = engine->graph;
    engine->direct = dw__malloc((graph->values.count + 1) * sizeof *engine->direct);
    if (!engine->direct) return dw__fail_memory("the places of outputs", graph->values.count);
    for (size_t v = 0; v < graph->values.count; v++) engine->direct[v] = DW_NONE;
    for (uint32_t slot = 0; slot < graph->outputs.count; slot++) {
        dw_value value = graph->outputs.items[slot];
        dw_value root = find_direct_root(engine, value, slot >= engine->output_count);
        if (root == DW_NONE) continue;
        for (;;) {
            engine->direct[value] = slot;
            if (value == root) break;
            value = graph->nodes.items[graph->values.items[value].node].inputs[0];
        }
    }
    return DW_OK;
}

/* When each value's memory is read: views pass on what their readers do. */
static dw_status find_reads(dw_engine *engine) {
    const dw_graph *graph = engine->graph;
    dw_status status = DW_OK;
    uint8_t *reads = dw__calloc(graph->values.count + 1, 1);
    engine->leaf_reads = dw__calloc(graph->leaves.count + 1, 1);
    engine->output_reads = dw__calloc(engine->output_count + 1, 1);
    if (!reads || !engine->leaf_reads || !engine->output_reads) {
        DW_TRY(dw__fail_memory("the readers of leaves", graph->values.count));
    }
    for (uint32_t slot = 0; slot < graph->outputs.count; slot++) {
        reads[graph->outputs.items[slot]] |=
            slot < engine->output_count ? DW_READ_FORWARD : DW_READ_BACKWARD;
    }
    for (size_t n = graph->nodes.count; n-- > 0;) {
        const dw__node_record *node = &graph->nodes.items[n];
        bool view = dw__op_is_view(node->op);
        uint8_t here = node->backward ? DW_READ_BACKWARD : DW_READ_FORWARD;
        uint8_t flags = view ? reads[node->outputs[0]] : here;
        if (dw__op_table[node->op].view == DW__VIEW_RESHAPE) flags |= here; /* it may be a copy */
        for (uint32_t i = 0; i < node->input_count; i++) {
            if (node->inputs[i] != DW_NONE) reads[node->inputs[i]] |= flags;
        }
    }
    for (size_t i = 0; i < graph->leaves.count; i++) {
        engine->leaf_reads[i] = reads[graph->leaves.items[i]];
    }
    for (uint32_t slot = 0; slot < engine->output_count; slot++) {
        engine->output_reads[slot] = DW_READ_FORWARD;
    }
    for (dw_value value = 0; value < graph->values.count; value++) {
        uint32_t slot = engine->direct[value];
        if (slot < engine->output_count) {
            engine->output_reads[slot] |= reads[value] & DW_READ_BACKWARD;
        }
    }
cleanup:
    dw__free(reads);
    return status;
}

static dw_status index_graph(dw_engine *engine) {
    const dw_graph *graph = engine->graph;
    engine->first_backward = (uint32_t)graph->nodes.count;
    while (engine->first_backward && graph->nodes.items[engine->first_backward - 1].backward) {
        engine->first_backward--;
    }
    DW_RETURN_IF_FAILED(index_uses(engine));
    DW_RETURN_IF_FAILED(choose_direct(engine));
    return find_reads(engine);
}

/* ---- lifecycle ------------------------------------------------------------------------------- */

static dw_status read_options(const dw_engine_options *given, dw_engine_options *options) {
    if (!given) return DW_OK;
    /* Programs built before the last members were added give fewer. */
    size_t first_version = offsetof(dw_engine_options, precision);
    if (given->struct_size != sizeof *options && given->struct_size != first_version) {
        return dw__fail(DW_INVALID_ARGUMENT,
                        "dw_engine_options.struct_size is %zu, this library knows %zu: begin with "
                        "DW_ENGINE_OPTIONS_DEFAULT and rebuild",
                        given->struct_size, sizeof *options);
    }
    memcpy(options, given, given->struct_size);
    return DW_OK;
}

/* DEEPWELL_PROFILE=cpu counts the process's CPU time, which other programs on the machine do not change. */
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
    engine->grad_slot = dw__calloc((size_t)wrt_count + 1, sizeof *engine->grad_slot);
    engine->wrt_of = dw__calloc((size_t)wrt_count + 1, sizeof *engine->wrt_of);
    engine->wrt_leaf = dw__calloc((size_t)wrt_count + 1, sizeof *engine->wrt_leaf);
    engine->prepared_index = dw__map_create();
    if (!engine->grad_slot || !engine->wrt_of || !engine->wrt_leaf || !engine->prepared_index)
        DW_TRY(dw__fail_memory("an engine", wrt_count));
    if (pthread_mutex_init(&engine->lock, NULL) != 0) {
        DW_TRY(dw__fail(DW_OUT_OF_MEMORY, "no mutex for an engine: the system is out of them"));
    }
    engine->has_lock = true;
    DW_TRY(build_graph(engine, graph, grad_outputs, wrt, &options));
    DW_TRY(index_graph(engine));
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

uint32_t dw_engine_quantized_count(const dw_engine *engine) { return engine->quantized_count; }

const dw_graph *dw_engine_graph(const dw_engine *engine) { return engine->graph; }

/* ---- the cache of plans ---------------------------------------------------------------------- */

static void unlink_plan(dw_engine *engine, dw_plan *plan) {
    if (plan->newer) plan->newer->older = plan->older;
    if (plan->older) plan->older->newer = plan->newer;
    if (engine->plans == plan) engine->plans = plan->older;
    plan->newer = plan->older = NULL;
}

static void link_newest(dw_engine *engine, dw_plan *plan) {
    plan->older = engine->plans;
    if (plan->older) plan->older->newer = plan;
    engine->plans = plan;
}

static dw_plan *find_plan(const dw_engine *engine, const dw__target *target, const int64_t *sizes) {
    size_t bytes = dw_graph_symbol_count(engine->graph) * sizeof *sizes;
    for (dw_plan *plan = engine->plans; plan; plan = plan->older) {
        if (!dw__target_serves(&plan->target, target)) continue;
        if (bytes == 0 || memcmp(plan->sizes, sizes, bytes) == 0) return plan;
    }
    return NULL;
}

/* Least recently used first, never one in use. */
static void evict(dw_engine *engine) {
    dw_plan *oldest = engine->plans;
    while (oldest && oldest->older) oldest = oldest->older;
    while (oldest && engine->plan_count > DW_PLAN_CACHE) {
        dw_plan *newer = oldest->newer;
        if (oldest->references == 0) {
            unlink_plan(engine, oldest);
            dw__plan_destroy(oldest);
            engine->plan_count--;
        }
        oldest = newer;
    }
}

dw_status dw_engine_plan(dw_engine *engine, const int64_t *sizes, dw_plan **out) {
    for (uint32_t i = 0; i < dw_graph_symbol_count(engine->graph); i++) {
        if (sizes[i] < 0) {
            return dw__fail(DW_INVALID_ARGUMENT, "size %s is %lld: sizes are not negative",
                            dw_graph_symbol_name(engine->graph, i), (long long)sizes[i]);
        }
    }
    dw_status status = DW_OK;
    pthread_mutex_lock(&engine->lock);
    dw__target target = dw__target_cpu();
    dw_plan *plan = find_plan(engine, &target, sizes);
    if (plan) {
        unlink_plan(engine, plan);
    } else {
        DW_TRY(dw__plan_create(engine, &target, sizes, &plan));
        engine->plan_count++;
    }
    link_newest(engine, plan);
    plan->references++;
    evict(engine);
    *out = plan;
cleanup:
    pthread_mutex_unlock(&engine->lock);
    return status;
}

void dw_plan_release(dw_plan *plan) {
    if (!plan) return;
    dw_engine *engine = plan->engine;
    pthread_mutex_lock(&engine->lock);
    plan->references--;
    evict(engine);
    pthread_mutex_unlock(&engine->lock);
}
