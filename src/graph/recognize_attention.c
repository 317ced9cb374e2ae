/* Recognises rotary embedding as Hugging Face writes it, and simplifies the inputs of attention: repeated key
 * heads, broadcast masks, causal masks made of positions. */
#include "graph/recognize.h"
#include <string.h>

/* ---- rotary embedding ----------------------------------------------------------------------- */

/* Matches value = x[.., start:limit] with all other axes whole. Returns x, else DW_NONE. */
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

/* Matches value = concat(-x[D/2:], x[:D/2]) along the last axis. Returns x, else DW_NONE. */
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

/* Converts cos or sin to a table that rope supports: x's rank, each dim 1 or x's, the last dim x's. */
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

/* Matches value = x * t. `i` selects the order of the operands. */
static bool product_operands(const dw__matcher *m, dw_value value, uint32_t i, dw_value *x,
                             dw_value *t) {
    dw_node mul = dw__swallow(m, value, DW_OP_MUL);
    if (mul == DW_NONE) return false;
    *x = dw__operand(m, mul, i);
    *t = dw__operand(m, mul, 1 - i);
    return true;
}

/* Matches x*cos + rotate(x)*sin in any order. */
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

/* Matches concat(rope(x[.., :R]), x[.., R:]): only the first R elements of the last axis are rotated. */
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
    /* other readers of the slice keep it alive */
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

/* Matches value [B, Hk*n, S, D] = x [B, Hk, S, D] reshaped to [B, Hk, 1, S, D], broadcast to n and reshaped.
 * Returns x, else DW_NONE. */
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

/* A position: the index along an axis, plus `offset`. Axes count from the last one, which is 0. */
typedef struct position {
    int axis;
    double offset;
} position;

/* Maps an axis of the reshape's input to the axis of its output. Axes count from the last one, which is 0.
 * Returns -1 if the dims other than 1 differ. */
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

/* True if `value` is a position. Looks through operations that do not change it. */
static bool is_position(const dw__matcher *m, dw_value value, int depth, position *at) {
    const dw_graph *graph = m->e.graph;
    dw_node n = dw_value_node(graph, value);
    double number;
    dw_value x;
    if (n == DW_NONE || depth == DW__LOOK_THROUGH) return false;
    switch (dw_node_op(graph, n)) {
    case DW_OP_IOTA:
        if (!dw__dtype_is_integer(dw_value_dtype(graph, value))) return false;
        *at = (position){
            dw_value_rank(graph, value) - 1 - (int)dw_node_int(graph, n, DW_ATTR_KEY_AXIS, 0), 0.0};
        return true;
    case DW_OP_BROADCAST:
    case DW_OP_STOP_GRADIENT: return is_position(m, dw__operand(m, n, 0), depth + 1, at);
    case DW_OP_CAST:
        return dw_value_dtype(graph, value) == DW_I64 &&
               is_position(m, dw__operand(m, n, 0), depth + 1, at);
    case DW_OP_RESHAPE:
        if (!is_position(m, dw__operand(m, n, 0), depth + 1, at)) return false;
        at->axis = reshaped_axis(graph, n, at->axis);
        return at->axis >= 0;
    case DW_OP_ADD:
    case DW_OP_SUB:
        if (!dw__with_number(m, value, dw_node_op(graph, n), &x, &number) ||
            !is_position(m, x, depth + 1, at))
            return false;
        at->offset += dw_node_op(graph, n) == DW_OP_ADD ? number : -number;
        return true;
    default: return false;
    }
}

typedef enum reach { NO_REACH, CAUSAL, WINDOW } reach;

/* Reads a condition on positions in any spelling: key <= query, or key > query - window. */
static reach position_condition(const dw__matcher *m, dw_value condition, int64_t *window) {
    const dw_graph *graph = m->e.graph;
    dw_node n = dw_value_node(graph, condition);
    if (n == DW_NONE) return NO_REACH;
    dw_op op = dw_node_op(graph, n);
    bool flipped = op == DW_OP_GE || op == DW_OP_GT; /* query >= key */
    position low, high;
    if (op != DW_OP_LE && op != DW_OP_LT && !flipped) return NO_REACH;
    if (!is_position(m, dw__operand(m, n, flipped), 0, &low) ||
        !is_position(m, dw__operand(m, n, !flipped), 0, &high))
        return NO_REACH;
    /* low's index <= high's index + slack; a strict comparison subtracts one */
    double slack = high.offset - low.offset - (op == DW_OP_LT || op == DW_OP_GT);
    if (low.axis == 0 && high.axis == 1) return slack == 0.0 ? CAUSAL : NO_REACH;
    if (low.axis != 1 || high.axis != 0 || slack < -1.0 || slack > 0x1p53) return NO_REACH;
    *window = (int64_t)slack + 1; /* query <= key + slack */
    return WINDOW;
}

/* Splits a bool mask that is a conjunction into its conditions. Returns false if there are more than
 * MAX_CONDITIONS, which also bounds the recursion depth. */
static bool split_conditions(const dw__matcher *m, dw_value mask, int depth, dw_value *conditions,
                             uint32_t *count) {
    dw_value bare = dw__unbroadcast(m, mask);
    dw_node both = dw__made_by(m->e.graph, bare, DW_OP_AND);
    uint32_t before = *count;
    if (both != DW_NONE && depth < MAX_CONDITIONS) {
        if (split_conditions(m, dw__operand(m, both, 0), depth + 1, conditions, count) &&
            split_conditions(m, dw__operand(m, both, 1), depth + 1, conditions, count))
            return true;
        *count = before; /* too many: keep the conjunction as one condition */
    }
    if (*count == MAX_CONDITIONS) return false;
    conditions[(*count)++] = bare;
    return true;
}

dw_value dw__to_rank_4(dw__matcher *m, dw_value mask) {
    if (m->e.status != DW_OK) return DW_NONE;
    dw__type type = dw__type_of(m->e.graph, mask);
    dw_dim shape[4] = {1, 1, 1, 1};
    if (type.rank > 4) return mask;
    memcpy(shape + 4 - type.rank, type.shape, (size_t)type.rank * sizeof(dw_dim));
    return dw__emit_reshape(&m->e, mask, 4, shape);
}

/* Combines both conditions (rank 4) on the smallest shape that holds both. */
static dw_value both_conditions(dw__matcher *m, dw_value a, dw_value b) {
    if (m->e.status != DW_OK) return DW_NONE;
    dw__type x = dw__type_of(m->e.graph, a), y = dw__type_of(m->e.graph, b);
    for (int i = 0; i < 4; i++)
        if (x.shape[i] == 1) x.shape[i] = y.shape[i];
    return dw__emit_binary(&m->e, DW_OP_AND, dw__emit_broadcast(&m->e, a, 4, x.shape),
                           dw__emit_broadcast(&m->e, b, 4, x.shape));
}

/* Removes the conditions on positions from a bool mask and stores them in `parts`. `rest` is the remaining
 * mask, DW_NONE if nothing is left. Returns false if the mask has no condition on positions. */
static bool remove_positions(dw__matcher *m, dw_value mask, dw__attention_parts *parts,
                             dw_value *rest) {
    dw_value conditions[MAX_CONDITIONS];
    dw__attention_parts found = *parts;
    uint32_t count = 0, kept = 0;
    if (parts->causal == 2 || !split_conditions(m, mask, 0, conditions, &count)) return false;
    for (uint32_t i = 0; i < count; i++) {
        int64_t window = 0;
        reach says = position_condition(m, conditions[i], &window);
        if (says == CAUSAL) found.causal = 1;
        if (says == WINDOW && (found.window < 0 || window < found.window)) found.window = window;
        if (says == NO_REACH) conditions[kept++] = conditions[i];
    }
    if (kept == count) return false;
    *rest = kept > 0 ? dw__to_rank_4(m, conditions[0]) : DW_NONE;
    for (uint32_t i = 1; i < kept; i++)
        *rest = both_conditions(m, *rest, dw__to_rank_4(m, conditions[i]));
    *parts = found;
    return true;
}

bool dw__is_learned(const dw__matcher *m, dw_value value) {
    const dw_graph *graph = m->e.graph;
    for (;;) {
        dw_node n = dw_value_node(graph, value);
        if (n == DW_NONE) return dw_value_role(graph, value) == DW_ROLE_PARAMETER;
        switch (dw_node_op(graph, n)) {
        case DW_OP_EMBEDDING:
        case DW_OP_TAKE:
        case DW_OP_RESHAPE:
        case DW_OP_PERMUTE:
        case DW_OP_BROADCAST:
        case DW_OP_SLICE: value = dw__operand(m, n, 0); break;
        default: return false;
        }
    }
}

/* True if every query sees a key: the first one, or under a window its own. */
static bool sees_a_key(const dw__matcher *m, const dw__attention_parts *parts) {
    dw__type q = dw__type_of(m->e.graph, parts->operands[0]);
    dw__type k = dw__type_of(m->e.graph, parts->operands[1]);
    return parts->window < 0 || (parts->window > 0 && q.shape[2] == k.shape[2]);
}

bool dw__simplify_bias(dw__matcher *m, dw__attention_parts *parts, dw_value *bias) {
    const dw_graph *graph = m->e.graph;
    dw_value bare = dw__unbroadcast(m, *bias), rest;
    dw_node choice = dw__made_by(graph, bare, DW_OP_SELECT);
    double low, zero = 1.0;
    if (choice == DW_NONE || !dw__is_splat(graph, dw__operand(m, choice, 2), &low)) return false;
    dw_value chosen = dw__unbroadcast(m, dw__operand(m, choice, 1));
    bool is_zero = dw__is_splat(graph, chosen, &zero) && zero == 0.0;
    if (low > DW_LOW_SCORE || !(is_zero || dw__is_learned(m, chosen))) return false;
    dw__attention_parts found = *parts;
    if (!remove_positions(m, dw__operand(m, choice, 0), &found, &rest)) return false;
    /* A query that sees no key has uniform weights under a finite bias, however low, but zeros under causal
     * and window. */
    if (rest != DW_NONE || !sees_a_key(m, &found)) return false;
    *parts = found;
    *bias = is_zero ? DW_NONE : dw__to_rank_4(m, chosen);
    return true;
}

/* ---- attention ------------------------------------------------------------------------------ */

/* Returns whether the mask adds zeros, or hides nothing. */
static bool is_void(const dw__matcher *m, dw_value mask) {
    double number;
    const bool is_condition = dw_value_dtype(m->e.graph, mask) == DW_BOOL;
    return dw__is_splat(m->e.graph, mask, &number) && number == (is_condition ? 1.0 : 0.0);
}

/* Moves the conditions that attributes can express from the mask to the attributes, and removes its
 * broadcast. Returns true if anything changed. */
static bool simplify_mask(dw__matcher *m, dw__attention_parts *parts) {
    dw_value *mask = &parts->operands[3];
    if (*mask == DW_NONE) return false;
    if (is_void(m, *mask)) {
        *mask = DW_NONE;
        return true;
    }
    dw_value bare = dw__unbroadcast(m, *mask), rest;
    if (dw_value_dtype(m->e.graph, bare) == DW_BOOL) {
        if (remove_positions(m, bare, parts, &rest)) {
            *mask = rest;
            return true;
        }
    } else if (dw__simplify_bias(m, parts, mask)) {
        return true;
    }
    bare = dw__to_rank_4(m, bare);
    if (bare == *mask) return false;
    dw__type before = dw__type_of(m->e.graph, *mask), after = dw__type_of(m->e.graph, bare);
    if (dw__shape_equal(&before, &after)) return false;
    *mask = bare;
    return true;
}

/* Replaces repeated key and value heads by the heads before the repetition. */
static bool share_heads(dw__matcher *m, dw__attention_parts *parts) {
    const dw_graph *graph = m->e.graph;
    dw_value k = repeated_operand(m, parts->operands[1]),
             v = repeated_operand(m, parts->operands[2]);
    if (k == DW_NONE || v == DW_NONE || dw_value_shape(graph, k)[1] != dw_value_shape(graph, v)[1])
        return false;
    parts->operands[1] = k;
    parts->operands[2] = v;
    return true;
}

bool dw__simplify_attention(dw__matcher *m, dw__attention_parts *parts) {
    bool shared = share_heads(m, parts);
    return simplify_mask(m, parts) || shared;
}

dw_node dw__emit_attention(dw__matcher *m, const dw__attention_parts *parts) {
    dw_attr attrs[6];
    uint32_t count = 0;
    attrs[count++] = dw_attr_float(DW_ATTR_KEY_SCALE, parts->scale);
    if (parts->softcap > 0.0) attrs[count++] = dw_attr_float(DW_ATTR_KEY_SOFTCAP, parts->softcap);
    if (parts->window >= 0) attrs[count++] = dw_attr_int(DW_ATTR_KEY_WINDOW, parts->window);
    if (parts->operands[4] != DW_NONE) {
        attrs[count++] = dw_attr_float(DW_ATTR_KEY_P, parts->p);
        attrs[count++] = dw_attr_int(DW_ATTR_KEY_STREAM, parts->stream);
    }
    attrs[count++] = dw_attr_int(DW_ATTR_KEY_CAUSAL, parts->causal);
    return dw__emit_node(&m->e, DW_OP_ATTENTION, 5, parts->operands, count, attrs);
}

bool dw__recognize_attention(dw__matcher *m, dw_node *replacement) {
    const dw_graph *graph = m->e.graph;
    dw__attention_parts parts = {
        .scale = dw_node_float(graph, m->root, DW_ATTR_KEY_SCALE, 1.0),
        .softcap = dw_node_float(graph, m->root, DW_ATTR_KEY_SOFTCAP, 0.0),
        .p = dw_node_float(graph, m->root, DW_ATTR_KEY_P, 0.0),
        .causal = dw_node_int(graph, m->root, DW_ATTR_KEY_CAUSAL, 0),
        .window = dw_node_int(graph, m->root, DW_ATTR_KEY_WINDOW, -1),
        .stream = dw_node_int(graph, m->root, DW_ATTR_KEY_STREAM, 0),
    };
    for (uint32_t i = 0; i < 5; i++) parts.operands[i] = dw__operand(m, m->root, i);
    if (!dw__simplify_attention(m, &parts)) return false;
    *replacement = dw__emit_attention(m, &parts);
    return m->e.status == DW_OK;
}
