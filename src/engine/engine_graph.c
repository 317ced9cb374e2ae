/* From the caller's graph to the scheduled graph of an engine: passes, gradient, precision, fusion, schedule. */
#include "engine/engine_internal.h"
#include <stdio.h>

static dw_status run_passes(dw_graph **graph, size_t count, const dw_pass *passes) {
    for (size_t i = 0; i < count; i++) {
        dw_status status = dw_graph_run_pass(graph, passes[i]);
        if (status != DW_OK) return dw__fail_prefix(status, "pass %s", dw_pass_name(passes[i]));
    }
    return DW_OK;
}

/* Adds a leaf of the output's type under an unused name. */
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

/* Appends backward. The gradients that exist become outputs. */
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

/* Leaves mostly come in the graph's order, so each search begins where the previous one ended. */
static dw_status leaf_positions(const dw_graph *graph, uint32_t count, const dw_value *leaves,
                                uint32_t *positions) {
    const uint32_t leaf_count = dw_graph_leaf_count(graph);
    uint32_t at = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t tried = 0;
        for (; tried < leaf_count && dw_graph_leaf_at(graph, at) != leaves[i]; tried++)
            at = at + 1 < leaf_count ? at + 1 : 0;
        if (tried == leaf_count) {
            return dw__fail(DW_INTERNAL, "value %u has no node and is not a leaf", leaves[i]);
        }
        positions[i] = at;
    }
    return DW_OK;
}

dw_status dw__engine_build_graph(dw_engine *engine, const dw_graph *graph,
                                 const uint32_t *grad_outputs, const dw_value *wrt,
                                 const dw_engine_options *options) {
    static const dw_pass shared[] = {DW_PASS_FOLD, DW_PASS_COMMON, DW_PASS_DEAD_CODE};
    static const dw_pass fuse[] = {DW_PASS_FUSE, DW_PASS_DEAD_CODE};
    dw_status status = DW_OK;
    dw__target target;
    bool expanded = false;
    DW_TRY(dw__target_of(options->device, false, &target));
    DW_TRY(leaf_positions(graph, engine->wrt_count, wrt, engine->wrt_leaf));
    DW_TRY(dw_graph_clone(graph, &engine->graph));
    DW_TRY(dw__simplify_graph(&engine->graph));
    if (options->precision) {
        DW_TRY(
            dw_graph_apply_precision(&engine->graph, options->precision, &engine->quantized_count));
    }
    DW_TRY(dw__sort_rows(&engine->graph));
    if (engine->wrt_count) DW_TRY(dw__weigh_rows_early(&engine->graph));
    if (target.context) DW_TRY(dw__recognize_head(&engine->graph));
    if (engine->wrt_count) {
        DW_TRY(differentiate(engine, grad_outputs));
        DW_TRY(dw__simplify_graph(&engine->graph)); /* backward has patterns of its own */
        if (target.context) DW_TRY(dw__recognize_loss(&engine->graph, true));
    }
    DW_TRY(dw__join_pads(&engine->graph));
    /* Tensors that several layers, or forward and backward, quantize alike are then quantized once. */
    DW_TRY(dw__expand_quantized(&engine->graph, &expanded));
    if (expanded) DW_TRY(run_passes(&engine->graph, DW_COUNT(shared), shared));
    if (expanded) {
        const bool fast = options->precision && options->precision->fast_accumulation;
        DW_TRY(dw__multiply_codes_for_target(&engine->graph, &target, fast, &engine->products,
                                             &expanded));
        if (expanded) DW_TRY(run_passes(&engine->graph, DW_COUNT(shared), shared));
    }
    DW_TRY(dw__expand_for_target(&engine->graph, &target, &expanded));
    if (expanded) DW_TRY(run_passes(&engine->graph, DW_COUNT(shared), shared));
    if (options->fuse) DW_TRY(run_passes(&engine->graph, DW_COUNT(fuse), fuse));
    if (options->fuse && engine->wrt_count) DW_TRY(dw__inline_programs(&engine->graph));
    DW_TRY(dw__schedule(&engine->graph, engine->output_count, options->recompute != 0,
                        options->keep_values != 0, &engine->kept_nodes));
cleanup:
    return status;
}
