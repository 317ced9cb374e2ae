/* Recognises concatenation written as padding each piece with zeros and adding the results. The gradients of
 * slices that cut up one value (queries, keys and values of one matmul) have this form. The replacement by
 * concat is exact up to the sign of zeros: 0 + -0 is 0. */
#include "graph/recognize.h"

#define MAX_PIECES 16

typedef struct pieces {
    int axis, count;
    dw_value x[MAX_PIECES];
    dw_dim low[MAX_PIECES];
} pieces;

/* Returns the single axis that a pad with zeros pads, or -1. */
static int padded_axis(const dw_graph *graph, dw_node pad) {
    const dw_attr *low = dw_node_attr(graph, pad, DW_ATTR_KEY_LOW);
    const dw_attr *high = dw_node_attr(graph, pad, DW_ATTR_KEY_HIGH);
    int axis = -1;
    if (dw_node_float(graph, pad, DW_ATTR_KEY_VALUE, 0.0) != 0.0) return -1;
    for (int i = 0; i < (int)low->count; i++) {
        if (low->list[i] == 0 && high->list[i] == 0) continue;
        if (axis >= 0) return -1;
        axis = i;
    }
    return axis;
}

/* Collects the pads whose sum is `value`. Returns false if it is not such a sum. MAX_PIECES also bounds the
 * recursion depth. */
static bool collect(const dw__matcher *m, dw_value value, int depth, pieces *p) {
    const dw_graph *graph = m->e.graph;
    if (depth == MAX_PIECES || (depth > 0 && !dw__single(m, value))) return false;
    dw_node node = dw__made_by(graph, value, DW_OP_ADD);
    if (node != DW_NONE)
        return collect(m, dw__operand(m, node, 0), depth + 1, p) &&
               collect(m, dw__operand(m, node, 1), depth + 1, p);
    node = dw__made_by(graph, value, DW_OP_PAD);
    if (node == DW_NONE || p->count == MAX_PIECES) return false;
    int axis = padded_axis(graph, node);
    if (axis < 0 || (p->count > 0 && axis != p->axis)) return false;
    p->axis = axis;
    p->low[p->count] = dw_node_attr(graph, node, DW_ATTR_KEY_LOW)->list[axis];
    p->x[p->count++] = dw__operand(m, node, 0);
    return true;
}

/* Returns the nonempty piece that begins at `start`, or -1. */
static int piece_at(const dw_graph *graph, const pieces *p, dw_dim start) {
    for (int i = 0; i < p->count; i++)
        if (p->low[i] == start && dw_value_shape(graph, p->x[i])[p->axis] != 0) return i;
    return -1;
}

/* Matches pads that follow each other without gap or overlap from 0 to the end. */
dw_value dw__recognize_concat(dw__matcher *m) {
    const dw_graph *graph = m->e.graph;
    dw_value ordered[MAX_PIECES], whole = dw_node_output(graph, m->root, 0);
    pieces p = {0};
    dw_dim at = 0;
    if (!collect(m, whole, 0, &p)) return DW_NONE;
    for (int i = 0; i < p.count; i++) {
        int piece = piece_at(graph, &p, at);
        if (piece < 0) return DW_NONE;
        ordered[i] = p.x[piece];
        at = dw__emit_dim_add(&m->e, at, dw_value_shape(graph, ordered[i])[p.axis]);
    }
    if (at != dw_value_shape(graph, whole)[p.axis]) return DW_NONE;
    dw_attr axis = dw_attr_int(DW_ATTR_KEY_AXIS, p.axis);
    return dw__emit(&m->e, DW_OP_CONCAT, (uint32_t)p.count, ordered, 1, &axis);
}
