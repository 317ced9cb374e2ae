/* Replaces sums of pads by concatenations.
 *
 * The gradient of a slice is a pad with zeros. A tensor that is cut into slices (a matmul's result into
 * queries, keys and values) therefore gets the sum of as many full-sized pads:
 *
 *     add(add(pad(v), pad(k)), pad(q))    becomes    concat(q, k, v)
 *
 * if the pads lie side by side on one axis and fill it. All pads may have been reshaped alike, as those of slices
 * that take every second element are. The engine runs this before it fuses elementwise nodes, and writes attention's
 * gradients straight into the concatenation.
 */
#include "graph/passes.h"

typedef struct pad_sum {
    dw_graph *graph;
    uint32_t count;
    dw_node pads[DW_MAX_INPUTS];
    int64_t axis;
    bool reshaped; /* the terms are reshapes of the pads */
} pad_sum;

/* Returns the only axis that the node pads, if it pads with zeros; -1 otherwise. */
static int64_t padded_axis(const dw_graph *graph, dw_node node) {
    const dw_attr *low = dw_node_attr(graph, node, DW_ATTR_KEY_LOW);
    const dw_attr *high = dw_node_attr(graph, node, DW_ATTR_KEY_HIGH);
    if (dw_node_float(graph, node, DW_ATTR_KEY_VALUE, 0.0) != 0.0) return -1;
    int64_t found = -1;
    for (uint32_t axis = 0; axis < low->count; axis++) {
        if (low->list[axis] == 0 && high->list[axis] == 0) continue;
        if (found >= 0) return -1;
        found = axis;
    }
    return found;
}

static bool may_be_in_sum(const dw_graph *graph, dw_value value) {
    dw_node node = dw_value_node(graph, value);
    if (node == DW_NONE) return false;
    return dw_node_op(graph, node) == DW_OP_ADD || dw_node_op(graph, node) == DW_OP_PAD ||
           dw_node_op(graph, node) == DW_OP_RESHAPE;
}

/* True if the pad has the shape of the sum's other pads, and is reshaped as they are. */
static bool is_like_others(const pad_sum *sum, dw_node pad, bool reshaped) {
    if (sum->count == 0) return true;
    dw__type type = dw__type_of(sum->graph, dw_node_output(sum->graph, pad, 0));
    dw__type first = dw__type_of(sum->graph, dw_node_output(sum->graph, sum->pads[0], 0));
    return reshaped == sum->reshaped && dw__shape_equal(&type, &first);
}

/* Collects the pads that `value` is the sum of; returns false if the sum has another term. DW_MAX_INPUTS
 * bounds the number of terms, and so the depth. */
static bool collect(pad_sum *sum, dw_value value, int depth) {
    if (depth == DW_MAX_INPUTS || !may_be_in_sum(sum->graph, value)) return false;
    dw_node node = dw_value_node(sum->graph, value);
    if (dw_node_op(sum->graph, node) == DW_OP_ADD) {
        dw_value x = dw_node_input(sum->graph, node, 0), y = dw_node_input(sum->graph, node, 1);
        return may_be_in_sum(sum->graph, x) && may_be_in_sum(sum->graph, y) &&
               collect(sum, x, depth + 1) && collect(sum, y, depth + 1);
    }
    bool reshaped = dw_node_op(sum->graph, node) == DW_OP_RESHAPE;
    if (reshaped) node = dw__made_by(sum->graph, dw_node_input(sum->graph, node, 0), DW_OP_PAD);
    if (node == DW_NONE || sum->count == DW_MAX_INPUTS || !is_like_others(sum, node, reshaped))
        return false;
    sum->reshaped = reshaped;
    int64_t axis = padded_axis(sum->graph, node);
    if (axis < 0 || (sum->count && axis != sum->axis)) return false;
    sum->axis = axis;
    sum->pads[sum->count++] = node;
    return true;
}

/* Sorts the pads so that each begins where the previous one ends; returns false if they do not line up. */
static bool line_up(pad_sum *sum, dw_value *parts) {
    dw_graph *graph = sum->graph;
    dw_dim at = 0;
    for (uint32_t done = 0; done < sum->count; done++) {
        uint32_t next = done;
        while (next < sum->count &&
               dw_node_attr(graph, sum->pads[next], DW_ATTR_KEY_LOW)->list[sum->axis] != at) {
            next++;
        }
        if (next == sum->count) return false;
        dw_node pad = sum->pads[next];
        sum->pads[next] = sum->pads[done];
        sum->pads[done] = pad;
        parts[done] = dw_node_input(graph, pad, 0);
        if (dw_dim_add(graph, at, dw_value_shape(graph, parts[done])[sum->axis], &at) != DW_OK) {
            return false;
        }
    }
    dw_value whole = dw_node_output(graph, sum->pads[0], 0);
    return at == dw_value_shape(graph, whole)[sum->axis];
}

static dw_status join(dw__rewrite *rewrite, dw_node node, dw_value *replacements) {
    if (dw_node_op(rewrite->graph, node) != DW_OP_ADD) return DW_OK;
    pad_sum sum = {.graph = rewrite->graph};
    dw_value parts[DW_MAX_INPUTS];
    if (!collect(&sum, dw_node_output(rewrite->graph, node, 0), 0) || !line_up(&sum, parts)) {
        return DW_OK;
    }
    dw_attr axis = dw_attr_int(DW_ATTR_KEY_AXIS, sum.axis);
    dw__emitter e = {rewrite->graph, DW_OK};
    dw__type type = dw__type_of(rewrite->graph, dw_node_output(rewrite->graph, node, 0));
    dw_value whole = dw__emit(&e, DW_OP_CONCAT, sum.count, parts, 1, &axis);
    replacements[0] = dw__emit_reshape(&e, whole, type.rank, type.shape);
    return e.status;
}

dw_status dw__join_pads(dw_graph **graph) { return dw__rewrite_each(graph, join, NULL); }
