/* Rotary embedding as Hugging Face writes it, and what stands around attention: repeated key heads,
 * broadcast masks, causal masks made of positions.
 */
#include "graph/recognize.h"
#include <string.h>

/* ---- rotary embedding ----------------------------------------------------------------------- */

/* value = x[.., start:limit] with everything else whole: x, else DW_NONE */
static dw_value sliced_operand(const dw__matcher *m, dw_value value, dw_dim start, dw_dim limit) {
    const dw_graph *graph = m->e.graph;
    dw_node slice = dw__swallow(m, value, DW_OP_SLICE);
    if (slice == DW_NONE) return DW_NONE;
    const dw_attr *starts = dw_node_attr(graph, slice, DW_ATTR_KEY_START);
    const dw_attr *limits = dw_node_attr(graph, slice, DW_ATTR_KEY_LIMIT);
    const dw_attr *steps = dw_node_attr(graph, slice, DW_ATTR_KEY_STEP);
    dw_value x = dw__operand(m, slice, 0);
    dw__type type = dw__type_of(graph, x);
    for (int i = 0; i < type.rank; i++) {
        bool last = i == type.rank - 1;
        if (starts->list[i] != (last ? start : 0) || (steps && steps->list[i] != 1) ||
            limits->list[i] != (last ? limit : type.shape[i]))
            return DW_NONE;
    }
    return x;
}

/* value = concat(-x[D/2:], x[:D/2]) along the last axis: x */
static dw_value rotated_operand(const dw__matcher *m, dw_value value) {
    const dw_graph *graph = m->e.graph;
    dw_node concat = dw__swallow(m, value, DW_OP_CONCAT);
    dw__type type = dw__type_of(graph, value);
    dw_dim whole = type.rank > 0 ? type.shape[type.rank - 1] : 0;
    if (concat == DW_NONE || dw_node_input_count(graph, concat) != 2 || whole <= 0 || whole % 2 ||
        dw_node_int(graph, concat, DW_ATTR_KEY_AXIS, -1) != type.rank - 1)
        return DW_NONE;
    dw_node neg = dw__swallow(m, dw__operand(m, concat, 0), DW_OP_NEG);
    if (neg == DW_NONE) return DW_NONE;
    dw_value x = sliced_operand(m, dw__operand(m, neg, 0), whole / 2, whole);
    return x == sliced_operand(m, dw__operand(m, concat, 1), 0, whole / 2) ? x : DW_NONE;
}

/* cos or sin as rope takes it: of x's rank, each dim 1 or x's, the last one x's. */
static dw_value rope_table(dw__matcher *m, dw_value value) {
    dw__type whole = dw__type_of(m->e.graph, value);
    dw_value table = dw__unbroadcast(m, value);
    dw__type type = dw__type_of(m->e.graph, table);
    int lead = whole.rank - type.rank;
    if (type.rank == 0 || type.shape[type.rank - 1] != whole.shape[whole.rank - 1]) return value;
    memmove(type.shape + lead, type.shape, (size_t)type.rank * sizeof(dw_dim));
    for (int i = 0; i < lead; i++) type.shape[i] = 1;
    return dw__emit_reshape(&m->e, table, whole.rank, type.shape);
}

/* value = x * t in the order given by `i` */
static bool product_operands(const dw__matcher *m, dw_value value, uint32_t i, dw_value *x,
                             dw_value *t) {
    dw_node mul = dw__swallow(m, value, DW_OP_MUL);
    if (mul == DW_NONE) return false;
    *x = dw__operand(m, mul, i);
    *t = dw__operand(m, mul, 1 - i);
    return true;
}

/* x*cos + rotate(x)*sin, in any order */
dw_value dw__recognize_rope(dw__matcher *m) {
    for (uint32_t order = 0; order < 8; order++) {
        dw_value x, cosine, turned, sine;
        uint32_t straight = order & 1;
        if (!product_operands(m, dw__operand(m, m->root, straight), order >> 1 & 1, &x, &cosine) ||
            !product_operands(m, dw__operand(m, m->root, 1 - straight), order >> 2 & 1, &turned,
                              &sine))
            continue;
        if (rotated_operand(m, turned) != x) continue;
        dw_value operands[] = {x, rope_table(m, cosine), rope_table(m, sine)};
        return dw__emit(&m->e, DW_OP_ROPE, 3, operands, 0, NULL);
    }
    return DW_NONE;
}

/* concat(rope(x[.., :R]), x[.., R:]): only the first R of the last axis turn */
dw_value dw__recognize_partial_rope(dw__matcher *m) {
    const dw_graph *graph = m->e.graph;
    dw__type whole = dw__type_of(graph, dw_node_output(graph, m->root, 0));
    int last = whole.rank - 1;
    if (dw_node_input_count(graph, m->root) != 2 ||
        dw_node_int(graph, m->root, DW_ATTR_KEY_AXIS, -1) != last)
        return DW_NONE;
    dw_node rope = dw__swallow(m, dw__operand(m, m->root, 0), DW_OP_ROPE);
    if (rope == DW_NONE) return DW_NONE;
    dw_value part = dw__operand(m, rope, 0);
    dw_dim turned = dw_value_shape(graph, part)[last];
    dw_value x = sliced_operand(m, dw__operand(m, m->root, 1), turned, whole.shape[last]);
    if (x == DW_NONE || dw__made_by(graph, part, DW_OP_SLICE) == DW_NONE) return DW_NONE;
    dw_node slice = dw__made_by(graph, part, DW_OP_SLICE);
    /* the slice's other readers, if any, keep it */
    if (dw__operand(m, slice, 0) != x || !dw__single(m, dw__operand(m, m->root, 0))) return DW_NONE;
    const dw_attr *starts = dw_node_attr(graph, slice, DW_ATTR_KEY_START);
    const dw_attr *steps = dw_node_attr(graph, slice, DW_ATTR_KEY_STEP);
    dw__type sliced = dw__type_of(graph, part);
    for (int i = 0; i < whole.rank; i++)
        if (starts->list[i] != 0 || (steps && steps->list[i] != 1) ||
            (i != last && sliced.shape[i] != whole.shape[i]))
            return DW_NONE;
    const dw__node_record *record = &graph->nodes.items[rope];
    dw_value operands[] = {x, record->inputs[1], record->inputs[2]};
    return dw__emit(&m->e, DW_OP_ROPE, 3, operands, record->attr_count, record->attrs);
}

/* ---- repeated key heads --------------------------------------------------------------------- */

/* value [B, Hk*n, S, D] = x [B, Hk, S, D] reshaped to [B, Hk, 1, S, D], broadcast to n, and
 * reshaped: x, else DW_NONE */
static dw_value repeated_operand(const dw__matcher *m, dw_value value) {
    const dw_graph *graph = m->e.graph;
    dw_node merge = dw__made_by(graph, value, DW_OP_RESHAPE);
    if (merge == DW_NONE) return DW_NONE;
    dw_node spread = dw__made_by(graph, dw__operand(m, merge, 0), DW_OP_BROADCAST);
    if (spread == DW_NONE) return DW_NONE;
    dw_node split = dw__made_by(graph, dw__operand(m, spread, 0), DW_OP_RESHAPE);
    if (split == DW_NONE) return DW_NONE;
    dw_value x = dw__operand(m, split, 0);
    dw__type whole = dw__type_of(graph, value), five = dw__type_of(graph, dw__operand(m, merge, 0));
    dw__type one = dw__type_of(graph, dw__operand(m, spread, 0)), have = dw__type_of(graph, x);
    if (whole.rank != 4 || five.rank != 5 || one.rank != 5 || have.rank != 4 || one.shape[2] != 1)
        return DW_NONE;
    for (int i = 0; i < 4; i++) {
        int at = i < 2 ? i : i + 1;
        bool kept = i == 1 || whole.shape[i] == have.shape[i];
        if (have.shape[i] != one.shape[at] || have.shape[i] != five.shape[at] || !kept)
            return DW_NONE;
    }
    return x;
}

/* ---- masks ---------------------------------------------------------------------------------- */

#define MAX_CONDITIONS 8

/* A position: the index along an axis (counted from the last one, 0), plus `offset`. */
typedef struct position {
    int axis;
    double offset;
} position;

/* The axis, from the last one, that a reshape gives to the input's: the dims that aren't 1 keep
 * their order. -1 when the dims are not the same. */
static int reshaped_axis(const dw_graph *graph, dw_node reshape, int axis) {
    dw__type in = dw__type_of(graph, dw_node_input(graph, reshape, 0));
    dw__type out = dw__type_of(graph, dw_node_output(graph, reshape, 0));
    int i = in.rank - 1, o = out.rank - 1, found = -1;
    for (;;) {
        while (i >= 0 && in.shape[i] == 1) i--;
        while (o >= 0 && out.shape[o] == 1) o--;
        if (i < 0 || o < 0) break;
        if (in.shape[i] != out.shape[o]) return -1;
        if (in.rank - 1 - i == axis) found = out.rank - 1 - o;
        i--;
        o--;
    }
    return i < 0 && o < 0 ? found : -1;
}

/* True when `value` is a position, looked at through what doesn't change it. */
static bool is_position(const dw__matcher *m, dw_value value, position *at) {
    const dw_graph *graph = m->e.graph;
    dw_node n = dw_value_node(graph, value);
    double number;
    dw_value x;
    if (n == DW_NONE) return false;
    switch (dw_node_op(graph, n)) {
    case DW_OP_IOTA:
        if (!dw__is_integer(dw_value_dtype(graph, value))) return false;
        *at = (position){
            dw_value_rank(graph, value) - 1 - (int)dw_node_int(graph, n, DW_ATTR_KEY_AXIS, 0), 0.0};
        return true;
    case DW_OP_BROADCAST:
    case DW_OP_STOP_GRADIENT: return is_position(m, dw__operand(m, n, 0), at);
    case DW_OP_CAST:
        return dw_value_dtype(graph, value) == DW_I64 && is_position(m, dw__operand(m, n, 0), at);
    case DW_OP_RESHAPE:
        if (!is_position(m, dw__operand(m, n, 0), at)) return false;
        at->axis = reshaped_axis(graph, n, at->axis);
        return at->axis >= 0;
    case DW_OP_ADD:
    case DW_OP_SUB:
        if (!dw__with_number(m, value, dw_node_op(graph, n), &x, &number) || !is_position(m, x, at))
            return false;
        at->offset += dw_node_op(graph, n) == DW_OP_ADD ? number : -number;
        return true;
    default: return false;
    }
}

/* True for a condition that says key <= query, in any spelling. */
static bool is_causal(const dw__matcher *m, dw_value condition) {
    const dw_graph *graph = m->e.graph;
    dw_node n = dw_value_node(graph, condition);
    if (n == DW_NONE) return false;
    dw_op op = dw_node_op(graph, n);
    bool flipped = op == DW_OP_GE || op == DW_OP_GT; /* query >= key */
    position low, high;
    if (op != DW_OP_LE && op != DW_OP_LT && !flipped) return false;
    if (!is_position(m, dw__operand(m, n, flipped), &low) ||
        !is_position(m, dw__operand(m, n, !flipped), &high))
        return false;
    /* key + low.offset <= query + high.offset; a strict comparison takes one more */
    double slack = high.offset - low.offset - (op == DW_OP_LT || op == DW_OP_GT);
    return low.axis == 0 && high.axis == 1 && slack == 0.0;
}

/* The conditions that a bool mask is the conjunction of; false when there are too many. */
static bool split_conditions(const dw__matcher *m, dw_value mask, dw_value *conditions,
                             uint32_t *count) {
    dw_value bare = dw__unbroadcast(m, mask);
    dw_node both = dw__made_by(m->e.graph, bare, DW_OP_AND);
    uint32_t before = *count;
    if (both != DW_NONE) {
        if (split_conditions(m, dw__operand(m, both, 0), conditions, count) &&
            split_conditions(m, dw__operand(m, both, 1), conditions, count))
            return true;
        *count = before; /* the conjunction as one condition, then */
    }
    if (*count == MAX_CONDITIONS) return false;
    conditions[(*count)++] = bare;
    return true;
}

/* [..] as rank 4 with ones in front */
static dw_value to_rank_4(dw__matcher *m, dw_value mask) {
    if (m->e.status != DW_OK) return DW_NONE;
    dw__type type = dw__type_of(m->e.graph, mask);
    dw_dim shape[4] = {1, 1, 1, 1};
    if (type.rank > 4) return mask;
    memcpy(shape + 4 - type.rank, type.shape, (size_t)type.rank * sizeof(dw_dim));
    return dw__emit_reshape(&m->e, mask, 4, shape);
}

/* Both conditions (rank 4) as one, on the least shape that holds both. */
static dw_value both_conditions(dw__matcher *m, dw_value a, dw_value b) {
    if (m->e.status != DW_OK) return DW_NONE;
    dw__type x = dw__type_of(m->e.graph, a), y = dw__type_of(m->e.graph, b);
    for (int i = 0; i < 4; i++)
        if (x.shape[i] == 1) x.shape[i] = y.shape[i];
    return dw__emit_binary(&m->e, DW_OP_AND, dw__emit_broadcast(&m->e, a, 4, x.shape),
                           dw__emit_broadcast(&m->e, b, 4, x.shape));
}

/* A bool mask without its causal part: DW_NONE when nothing is left. False: no causal part. */
static bool remove_causal(dw__matcher *m, dw_value mask, dw_value *rest) {
    dw_value conditions[MAX_CONDITIONS];
    uint32_t count = 0, kept = 0;
    if (!split_conditions(m, mask, conditions, &count)) return false;
    for (uint32_t i = 0; i < count; i++)
        if (!is_causal(m, conditions[i])) conditions[kept++] = conditions[i];
    if (kept == count) return false;
    *rest = kept > 0 ? to_rank_4(m, conditions[0]) : DW_NONE;
    for (uint32_t i = 1; i < kept; i++)
        *rest = both_conditions(m, *rest, to_rank_4(m, conditions[i]));
    return true;
}

/* ---- attention ------------------------------------------------------------------------------ */

/* The mask un-broadcast, and `causal` found in it. True when anything changed. */
static bool simplify_mask(dw__matcher *m, dw_value *mask, int64_t *causal) {
    if (*mask == DW_NONE) return false;
    dw_value bare = dw__unbroadcast(m, *mask), rest;
    if (dw_value_dtype(m->e.graph, bare) == DW_BOOL && *causal != 2 &&
        remove_causal(m, bare, &rest)) {
        *mask = rest;
        *causal = 1;
        return true;
    }
    bare = to_rank_4(m, bare);
    if (bare == *mask) return false;
    dw__type before = dw__type_of(m->e.graph, *mask), after = dw__type_of(m->e.graph, bare);
    if (dw__shape_equal(&before, &after)) return false;
    *mask = bare;
    return true;
}

bool dw__recognize_attention(dw__matcher *m, dw_node *replacement) {
    const dw_graph *graph = m->e.graph;
    dw_value operands[5];
    dw_attr attrs[DW_ATTR_KEY_COUNT];
    uint32_t count = graph->nodes.items[m->root].attr_count, kept = 0;
    for (uint32_t i = 0; i < 5; i++) operands[i] = dw__operand(m, m->root, i);
    int64_t causal = dw_node_int(graph, m->root, DW_ATTR_KEY_CAUSAL, 0);
    for (uint32_t i = 0; i < count; i++)
        if (graph->nodes.items[m->root].attrs[i].key != DW_ATTR_KEY_CAUSAL)
            attrs[kept++] = graph->nodes.items[m->root].attrs[i];
    dw_value k = repeated_operand(m, operands[1]), v = repeated_operand(m, operands[2]);
    bool shared =
        k != DW_NONE && v != DW_NONE && dw_value_shape(graph, k)[1] == dw_value_shape(graph, v)[1];
    if (shared) {
        operands[1] = k;
        operands[2] = v;
    }
    if (!simplify_mask(m, &operands[3], &causal) && !shared) return false;
    attrs[kept++] = dw_attr_int(DW_ATTR_KEY_CAUSAL, causal);
    *replacement = dw__emit_node(&m->e, DW_OP_ATTENTION, 5, operands, kept, attrs);
    return m->e.status == DW_OK;
}
