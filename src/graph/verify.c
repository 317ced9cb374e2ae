/* Verification: checks a graph against every rule, without relying on the checks made when it was built.
 *
 * Inference interns dims, but verification must not change the graph, because other threads may read it. The
 * rules therefore run on a shadow that shares everything except the dims, which it copies. */
#include "graph/internal.h"
#include <string.h>

static dw_status broken_value(const dw_graph *graph, dw_value value, const char *what) {
    const char *name = graph->values.items[value].name;
    return dw__fail(DW_INTERNAL, "value %u (\"%s\"): %s", value, name ? name : "", what);
}

static dw_status blame_node(const dw_graph *graph, dw_node node, dw_status status) {
    const dw__node_record *record = &graph->nodes.items[node];
    const char *output = "";
    if (record->output_count > 0 && record->outputs[0] < graph->values.count)
        output = graph->values.items[record->outputs[0]].name;
    return dw__fail_prefix(status, "node %u (%s \"%s\"%s%s)", node, dw_op_name(record->op), output,
                           record->module && *record->module ? ", module " : "",
                           record->module ? record->module : "");
}

/* ---- values -------------------------------------------------------------------------------- */

static dw_status verify_leaf(const dw_graph *graph, dw_value value) {
    const dw__value_record *record = &graph->values.items[value];
    if (record->role == DW_ROLE_ACTIVATION)
        return broken_value(graph, value, "an activation that no node computes");
    return DW_OK;
}

static dw_status verify_result(const dw_graph *graph, dw_value value) {
    const dw__value_record *record = &graph->values.items[value];
    if (record->role != DW_ROLE_ACTIVATION)
        return broken_value(graph, value, "a node computes it, but its role is that of a leaf");
    if (record->node >= graph->nodes.count)
        return broken_value(graph, value, "its node does not exist");
    const dw__node_record *node = &graph->nodes.items[record->node];
    if (record->index >= node->output_count || node->outputs[record->index] != value)
        return broken_value(graph, value, "its node does not have it as that output");
    return DW_OK;
}

static dw_status verify_type(const dw_graph *graph, dw_value value) {
    const dw__value_record *record = &graph->values.items[value];
    if ((unsigned)record->dtype >= DW_DTYPE_COUNT)
        return broken_value(graph, value, "its element type does not exist");
    if (record->rank < 0 || record->rank > DW_MAX_RANK || !record->shape)
        return broken_value(graph, value, "its rank is not 0 to 8");
    for (int i = 0; i < record->rank; i++)
        if (!dw__dim_exists(graph, record->shape[i]) ||
            dw__dim_is_negative(graph, record->shape[i]))
            return broken_value(graph, value, "a dim is negative or of another graph");
    return DW_OK;
}

static dw_status verify_value(const dw_graph *graph, dw_value value) {
    const dw__value_record *record = &graph->values.items[value];
    if (!record->name || dw_graph_find(graph, record->name) != value)
        return broken_value(graph, value, "it is not found by its name");
    DW_RETURN_IF_FAILED(verify_type(graph, value));
    return record->node == DW_NONE ? verify_leaf(graph, value) : verify_result(graph, value);
}

/* ---- nodes --------------------------------------------------------------------------------- */

/* Static single assignment in topological order: operands are computed before they are used. */
static dw_status verify_order(const dw_graph *graph, dw_node node) {
    const dw__node_record *record = &graph->nodes.items[node];
    for (uint32_t i = 0; i < record->input_count; i++) {
        dw_value input = record->inputs[i];
        if (input == DW_NONE) continue;
        if (input >= graph->values.count)
            return dw__fail(DW_INTERNAL, "operand %u (%s) is value %u, which does not exist", i,
                            dw__operand_name(record->op, i), input);
        const dw__value_record *value = &graph->values.items[input];
        if (value->node != DW_NONE && value->node >= node)
            return dw__fail(DW_INTERNAL,
                            "operand %u (%s), \"%s\", is computed by the later node %u", i,
                            dw__operand_name(record->op, i), value->name, value->node);
    }
    return DW_OK;
}

static dw_status verify_outputs(const dw_graph *graph, dw_node node, const dw__inferred *types) {
    const dw__node_record *record = &graph->nodes.items[node];
    if (record->output_count != types->count)
        return dw__fail(DW_INTERNAL, "it has %u outputs; the rule of the table gives %u",
                        record->output_count, types->count);
    for (uint32_t i = 0; i < types->count; i++) {
        dw_value value = record->outputs[i];
        if (value >= graph->values.count || graph->values.items[value].node != node ||
            graph->values.items[value].index != i)
            return dw__fail(DW_INTERNAL, "its output %u is value %u, which is not its own", i,
                            value);
        const dw__value_record *output = &graph->values.items[value];
        bool same =
            output->dtype == types->outputs[i].dtype && output->rank == types->outputs[i].rank;
        for (int k = 0; same && k < output->rank; k++)
            same = output->shape[k] == types->outputs[i].shape[k];
        if (!same)
            return dw__fail(
                DW_SHAPE, "its output %u is %s%s; the rule of the table gives %s%s", i,
                dw_dtype_name(output->dtype),
                dw__shape_words(graph, output->rank, output->shape).text,
                dw_dtype_name(types->outputs[i].dtype),
                dw__shape_words(graph, types->outputs[i].rank, types->outputs[i].shape).text);
    }
    return DW_OK;
}

static dw_status verify_record(const dw_graph *graph, dw_node node) {
    const dw__node_record *record = &graph->nodes.items[node];
    if ((unsigned)record->op >= DW_OP_COUNT)
        return dw__fail(DW_INTERNAL, "its operation %d does not exist", (int)record->op);
    if ((unsigned)record->region >= DW_REGION_COUNT || record->layer < -1 || !record->module)
        return dw__fail(DW_INTERNAL, "its region %d, layer %d or module does not exist",
                        (int)record->region, record->layer);
    if (record->input_count > DW_MAX_INPUTS || record->attr_count > DW_ATTR_KEY_COUNT)
        return dw__fail(DW_INTERNAL, "it has %u operands and %u attributes", record->input_count,
                        record->attr_count);
    for (uint32_t i = 1; i < record->attr_count; i++)
        if (record->attrs[i - 1].key >= record->attrs[i].key)
            return dw__fail(DW_INTERNAL, "its attributes are not sorted by key");
    return verify_order(graph, node);
}

static dw_status verify_node(const dw_graph *graph, dw_graph *shadow, dw_node node) {
    const dw__node_record *record = &graph->nodes.items[node];
    dw_attr sorted[DW_ATTR_KEY_COUNT];
    dw__inferred types;
    DW_RETURN_IF_FAILED(verify_record(graph, node));
    DW_RETURN_IF_FAILED(
        dw__sort_attrs(shadow, record->op, record->attr_count, record->attrs, sorted));
    dw__draft draft = {shadow,         record->op,         record->input_count,
                       record->inputs, record->attr_count, sorted};
    DW_RETURN_IF_FAILED(dw__draft_infer(&draft, &types));
    return verify_outputs(shadow, node, &types);
}

/* ---- the whole ----------------------------------------------------------------------------- */

/* Leaves are listed in the order in which they were made, which is the order of their indices. */
static dw_status verify_lists(const dw_graph *graph) {
    size_t leaves = 0;
    for (size_t i = 0; i < graph->leaves.count; i++) {
        dw_value leaf = graph->leaves.items[i];
        bool ascending = i == 0 || graph->leaves.items[i - 1] < leaf;
        if (leaf >= graph->values.count || graph->values.items[leaf].node != DW_NONE || !ascending)
            return dw__fail(DW_INTERNAL, "leaf %zu is value %u, which is no leaf or out of order",
                            i, leaf);
    }
    for (size_t i = 0; i < graph->values.count; i++)
        leaves += graph->values.items[i].node == DW_NONE;
    if (leaves != graph->leaves.count)
        return dw__fail(DW_INTERNAL, "%zu leaves are listed, but the graph has %zu",
                        graph->leaves.count, leaves);
    for (size_t i = 0; i < graph->outputs.count; i++)
        if (graph->outputs.items[i] >= graph->values.count)
            return dw__fail(DW_INTERNAL, "output %zu is value %u, which does not exist", i,
                            graph->outputs.items[i]);
    return DW_OK;
}

dw_status dw_graph_verify(const dw_graph *graph) {
    dw_status status = DW_OK;
    dw_graph shadow = *graph;
    shadow.dims = NULL;
    DW_TRY(dw__dims_clone(graph->dims, &shadow.dims));
    DW_TRY(verify_lists(graph));
    for (dw_value value = 0; value < graph->values.count; value++)
        DW_TRY(verify_value(graph, value));
    for (dw_node node = 0; node < graph->nodes.count; node++) {
        status = verify_node(graph, &shadow, node);
        if (status != DW_OK) {
            blame_node(graph, node, status);
            goto cleanup;
        }
    }
cleanup:
    dw__dims_destroy(shadow.dims);
    return status;
}
