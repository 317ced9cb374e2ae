/* Counts the operations of a captured model by summing over its nodes. Tests compare the planner's formulas with
 * it. */
#include "plan/planner_internal.h"
#include <stdio.h>

typedef struct sums {
    double gemm, attention, other;
} sums;

/* Counts the elements of the first result, to which a bias is added. */
static dw_status results_of(const dw_graph *graph, dw_node node, const int64_t *sizes,
                            double *results) {
    dw_value value = dw_node_output(graph, node, 0);
    *results = 1;
    for (int axis = 0; axis < dw_value_rank(graph, value); axis++) {
        int64_t size;
        DW_RETURN_IF_FAILED(dw_dim_eval(graph, dw_value_shape(graph, value)[axis], sizes, &size));
        *results *= (double)size;
    }
    return DW_OK;
}

/* Returns whether a node is q k^T or p v of attention written as GEMMs: four axes and no parameter. */
static bool is_of_pairs(const dw_graph *graph, dw_node node) {
    return dw_node_op(graph, node) == DW_OP_MATMUL &&
           dw_value_rank(graph, dw_node_output(graph, node, 0)) == 4 &&
           dw_node_layer(graph, node) >= 0 &&
           dw__parameter_behind(graph, dw_node_input(graph, node, 1)) == DW_NONE;
}

/* Every backward GEMM multiplies a gradient with a weight or an activation. A forward GEMM without a parameter
 * computes the angles of rotary embeddings. */
static bool is_weight_gemm(const dw_graph *graph, dw_node node) {
    switch (dw_node_op(graph, node)) {
    case DW_OP_LINEAR:
    case DW_OP_QUANTIZED_LINEAR:
    case DW_OP_GROUPED_LINEAR:
    case DW_OP_SEGMENT_LINEAR:
    case DW_OP_QUANTIZED_SEGMENT_LINEAR:
    case DW_OP_SEGMENT_LINEAR_BACKWARD_WEIGHT: return true;
    case DW_OP_MATMUL:
        return dw_node_is_backward(graph, node) ||
               dw__parameter_behind(graph, dw_node_input(graph, node, 1)) != DW_NONE;
    default: return false;
    }
}

static dw_status add_node(const dw_graph *graph, dw_node node, const int64_t *sizes, sums *to) {
    dw_cost cost;
    dw_op op = dw_node_op(graph, node);
    DW_RETURN_IF_FAILED(dw_node_cost(graph, node, sizes, &cost));
    if (op == DW_OP_ATTENTION || op == DW_OP_ATTENTION_BACKWARD || is_of_pairs(graph, node)) {
        to->attention += cost.flops;
        return DW_OK;
    }
    if (!is_weight_gemm(graph, node)) {
        to->other += cost.flops;
        return DW_OK;
    }
    const bool experts = op == DW_OP_GROUPED_LINEAR || op == DW_OP_SEGMENT_LINEAR ||
                         op == DW_OP_QUANTIZED_SEGMENT_LINEAR;
    int bias = op == DW_OP_LINEAR ? 2 : experts ? 3 : -1;
    double added = 0;
    if (bias >= 0 && (uint32_t)bias < dw_node_input_count(graph, node) &&
        dw_node_input(graph, node, (uint32_t)bias) != DW_NONE)
        DW_RETURN_IF_FAILED(results_of(graph, node, sizes, &added));
    to->gemm += cost.flops - added;
    to->other += added;
    return DW_OK;
}

static dw_status add_all(const dw_graph *graph, const int64_t *sizes, sums *to) {
    *to = (sums){0};
    for (dw_node node = 0; node < dw_graph_node_count(graph); node++)
        DW_RETURN_IF_FAILED(add_node(graph, node, sizes, to));
    return DW_OK;
}

/* Appends the gradients of all parameters, given the gradient of every floating-point output. */
static dw_status differentiate(dw_graph *graph) {
    dw_status status = DW_OK;
    uint32_t outputs = dw_graph_output_count(graph), leaves = dw_graph_leaf_count(graph);
    uint32_t given = 0, wanted = 0;
    dw_value *values = dw__malloc(((size_t)outputs * 2 + (size_t)leaves * 2 + 1) * sizeof *values);
    if (!values)
        return dw__fail_memory("values",
                               ((size_t)outputs * 2 + (size_t)leaves * 2 + 1) * sizeof *values);
    dw_value *gradients = values + outputs, *parameters = gradients + outputs,
             *results = parameters + leaves;
    for (uint32_t at = 0; at < outputs; at++) {
        dw_value output = dw_graph_output(graph, at);
        dw_dtype dtype = dw_value_dtype(graph, output);
        if (dtype < DW_BF16) continue; /* integers have no gradient */
        char name[48];
        snprintf(name, sizeof name, "gradient of output %u", at);
        DW_TRY(dw_graph_leaf(graph, DW_ROLE_GRADIENT, name, dtype, dw_value_rank(graph, output),
                             dw_value_shape(graph, output), &gradients[given]));
        values[given++] = output;
    }
    for (uint32_t at = 0; at < leaves; at++)
        if (dw_value_role(graph, dw_graph_leaf_at(graph, at)) == DW_ROLE_PARAMETER)
            parameters[wanted++] = dw_graph_leaf_at(graph, at);
    DW_TRY(dw_graph_gradient(graph, given, values, gradients, wanted, parameters, results));
    for (uint32_t at = 0; at < wanted; at++)
        if (results[at] != DW_NONE) DW_TRY(dw_graph_add_output(graph, results[at]));
cleanup:
    dw__free(values);
    return status;
}

dw_status dw_planner_graph_work(const dw_graph *graph, const int64_t *sizes, int backward,
                                dw_planner_work *work) {
    dw_status status = DW_OK;
    dw_graph *copy = NULL;
    sums forward, both;
    dw_cost cost;
    if (!graph || !work) return dw__fail(DW_INVALID_ARGUMENT, "the graph or the result is NULL");
    DW_TRY(dw__graph_recognized(graph, &copy));
    DW_TRY(dw_graph_cost(copy, sizes, &cost));
    DW_TRY(add_all(copy, sizes, &forward));
    both = forward;
    if (backward) {
        DW_TRY(differentiate(copy));
        /* merges duplicate transposes and casts */
        DW_TRY(dw_graph_run_pass(&copy, DW_PASS_COMMON));
        DW_TRY(dw_graph_run_pass(&copy, DW_PASS_DEAD_CODE));
        DW_TRY(add_all(copy, sizes, &both));
    }
    *work = (dw_planner_work){.gemm = forward.gemm,
                              .attention = forward.attention,
                              .backward_gemm = both.gemm - forward.gemm,
                              .backward_attention = both.attention - forward.attention,
                              .other = both.other,
                              .bytes = cost.bytes};
cleanup:
    dw_graph_destroy(copy);
    return status;
}
