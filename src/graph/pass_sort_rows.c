/* Lets mixtures of experts compute on rows that are sorted by expert.
 *
 * A grouped_linear becomes group_rows of its index and a segment_linear of sorted rows. Operations that treat each
 * row alike (elementwise ones, slices and reshapes within rows) then read and make sorted rows as well, so that
 * between the first and the last grouped_linear of an index nothing is in the order of the tokens. Rows that repeat
 * each token k times are sorted by spread_rows, and a sum of the k rows of each token, with or without weights, is a
 * combine_rows; other values are sorted, or brought back for readers that need them so, one by one. What nobody reads
 * is dead code.
 *
 * The pass runs before the gradient is taken, so that backward is sorted too. */
#include "graph/passes.h"
#include <string.h>

/* The nodes of one index, all in the new graph but `index`. */
typedef struct grouping {
    dw_value index; /* of the old graph */
    dw_dim groups, rows;
    bool ignores; /* an index may be `groups`, for rows without a group */
    dw_value order, place, offsets;
} grouping;

/* A value of the old graph in sorted rows. */
typedef struct twin {
    uint32_t grouping; /* DW_NONE: there is none */
    dw_value value;    /* of the new graph */
} twin;

typedef struct sorter {
    dw__rewriter rewriter;
    dw__emitter e; /* appends to the new graph */
    struct {
        grouping *items;
        size_t count, capacity;
    } groupings;
    twin *sorted; /* by old value: made in sorted rows */
    twin *copies; /* by old value: sorted for a reader */
} sorter;

static const grouping *grouping_at(const sorter *s, uint32_t g) { return &s->groupings.items[g]; }

static dw__type type_in_copy(sorter *s, dw_value old) {
    return dw__type_of(s->e.graph, s->rewriter.map[old]);
}

static dw_value operand(const sorter *s, dw_node node, uint32_t index) {
    return dw_node_input(s->rewriter.from, node, index);
}

/* True if the leading axis of the value has the rows of the grouping. */
static bool has_rows(sorter *s, uint32_t g, dw_value old) {
    const dw__type type = type_in_copy(s, old);
    return type.rank > 0 && type.shape[0] == grouping_at(s, g)->rows;
}

/* ---- moving rows ----------------------------------------------------------------------------- */

static dw_value take_rows(sorter *s, dw_value x, dw_value index) {
    const dw_attr axis = dw_attr_int(DW_ATTR_KEY_AXIS, 0);
    return dw__emit(&s->e, DW_OP_TAKE, 2, (dw_value[]){x, index}, 1, &axis);
}

/* Moves every row of a value [R, ..] to its sorted place, or back. */
static dw_value move_rows(sorter *s, uint32_t g, dw_value x, bool back) {
    const grouping *own = grouping_at(s, g);
    const dw__type type = dw__type_of(s->e.graph, x);
    if (!dw__dtype_is_float(type.dtype)) return take_rows(s, x, back ? own->place : own->order);
    const dw_dim width = dw__emit_dim_product(&s->e, type.rank - 1, type.shape + 1);
    const dw_value operands[] = {dw__emit_reshape(&s->e, x, 2, (dw_dim[]){own->rows, width}),
                                 dw__emit_unsqueeze_last(&s->e, own->place), DW_NONE};
    const dw_op op = back ? DW_OP_COMBINE_ROWS : DW_OP_SPREAD_ROWS;
    const dw_value y = dw__emit(&s->e, op, 3, operands, 0, NULL);
    return dw__emit_reshape(&s->e, y, type.rank, type.shape);
}

/* The node's operation on other operands. */
static dw_value repeat(sorter *s, dw_node node, uint32_t count, const dw_value *operands) {
    const dw_attr *attrs = NULL;
    if (s->e.status == DW_OK)
        s->e.status = dw__import_attrs(s->e.graph, s->rewriter.from, node, &attrs);
    return dw__emit(&s->e, dw_node_op(s->rewriter.from, node), count, operands,
                    s->rewriter.from->nodes.items[node].attr_count, attrs);
}

/* Rows that repeat each of T rows k times, as reshape(broadcast([T,1,H] to [T,k,H])): returns x [T, H], with the places
 * [T, k] in `place`, or DW_NONE. */
static dw_value repeated_tokens(sorter *s, uint32_t g, dw_node reshape, dw_value *place) {
    const dw_graph *from = s->rewriter.from;
    const dw_node broadcast = dw__made_by(from, operand(s, reshape, 0), DW_OP_BROADCAST);
    if (broadcast == DW_NONE) return DW_NONE;
    const dw__type x = type_in_copy(s, operand(s, broadcast, 0)),
                   wide = type_in_copy(s, dw_node_output(from, broadcast, 0)),
                   rows = type_in_copy(s, dw_node_output(from, reshape, 0));
    if (!dw__dtype_is_float(x.dtype) || x.rank != 3 || wide.rank != 3 || rows.rank != 2 ||
        x.shape[1] != 1 || x.shape[0] != wide.shape[0] || x.shape[2] != wide.shape[2] ||
        rows.shape[1] != wide.shape[2])
        return DW_NONE;
    *place = dw__emit_reshape(&s->e, grouping_at(s, g)->place, 2, wide.shape);
    return dw__emit_reshape(&s->e, s->rewriter.map[operand(s, broadcast, 0)], 2,
                            (dw_dim[]){x.shape[0], x.shape[2]});
}

static dw_value sorted_of(sorter *s, uint32_t g, dw_value old);

/* Sorts a value [R, ..] that is not made in sorted rows. */
static dw_value sort_value(sorter *s, uint32_t g, dw_value old) {
    const dw_graph *from = s->rewriter.from;
    const dw_value same = s->rewriter.map[old];
    const dw_node node = dw_value_node(from, old);
    if (node == DW_NONE) return move_rows(s, g, same, false);
    switch (dw_node_op(from, node)) {
    case DW_OP_CONSTANT: return same;
    case DW_OP_BROADCAST: {
        const dw__type x = type_in_copy(s, operand(s, node, 0)), y = type_in_copy(s, old);
        if (x.rank < y.rank || x.shape[0] == 1) return same; /* rows are equal */
        dw_value sorted = sorted_of(s, g, operand(s, node, 0));
        return repeat(s, node, 1, &sorted);
    }
    case DW_OP_RESHAPE: {
        dw_value place, tokens = repeated_tokens(s, g, node, &place);
        if (tokens != DW_NONE)
            return dw__emit(&s->e, DW_OP_SPREAD_ROWS, 3, (dw_value[]){tokens, place, DW_NONE}, 0,
                            NULL);
        if (!has_rows(s, g, operand(s, node, 0))) break;
        dw_value sorted = sorted_of(s, g, operand(s, node, 0));
        return repeat(s, node, 1, &sorted);
    }
    case DW_OP_TAKE: /* such as a bias of each expert */
        if (operand(s, node, 1) != grouping_at(s, g)->index ||
            dw_node_int(from, node, DW_ATTR_KEY_AXIS, 0) != 0)
            break;
        return take_rows(s, s->rewriter.map[operand(s, node, 0)],
                         sorted_of(s, g, operand(s, node, 1)));
    default: break;
    }
    return move_rows(s, g, same, false);
}

/* Returns a value [R, ..] in sorted rows. */
static dw_value sorted_of(sorter *s, uint32_t g, dw_value old) {
    twin *copy = &s->copies[old];
    if (s->sorted[old].grouping == g) return s->sorted[old].value;
    if (copy->grouping != g) *copy = (twin){g, sort_value(s, g, old)};
    return copy->value;
}

/* Says that an old value is made in sorted rows; readers that need another order get it moved back. */
static void define(sorter *s, uint32_t g, dw_value old, dw_value sorted) {
    s->sorted[old] = (twin){g, sorted};
    s->rewriter.map[old] = move_rows(s, g, sorted, true);
}

/* ---- operations ------------------------------------------------------------------------------ */

/* Returns the grouping of an index into `groups` groups. */
static uint32_t grouping_of(sorter *s, dw_value index, dw_dim groups, bool ignores) {
    for (uint32_t g = 0; g < s->groupings.count; g++) {
        const grouping *own = grouping_at(s, g);
        if (own->index == index && own->groups == groups && own->ignores == ignores) return g;
    }
    const dw__grouped_rows made =
        dw__emit_grouped_rows(&s->e, s->rewriter.map[index], groups, ignores);
    if (s->e.status != DW_OK) return DW_NONE;
    const grouping own = {.index = index,
                          .groups = groups,
                          .rows = type_in_copy(s, index).shape[0],
                          .ignores = ignores,
                          .order = made.order,
                          .place = made.place,
                          .offsets = made.offsets};
    if (DW_PUSH(&s->groupings, own) != DW_OK)
        s->e.status = dw__fail_memory("groups of rows", sizeof own);
    return (uint32_t)s->groupings.count - 1;
}

static dw_status sort_linear(sorter *s, dw_node node) {
    enum { X, W, I, B };
    const dw_value *map = s->rewriter.map;
    const dw_value w = map[operand(s, node, W)], b = operand(s, node, B);
    const uint32_t g =
        grouping_of(s, operand(s, node, I), dw__type_of(s->e.graph, w).shape[0],
                    dw_node_attr(s->rewriter.from, node, DW_ATTR_KEY_IGNORE_INDEX) != NULL);
    if (s->e.status != DW_OK) return s->e.status;
    const dw_value operands[] = {sorted_of(s, g, operand(s, node, X)), w,
                                 grouping_at(s, g)->offsets, b == DW_NONE ? DW_NONE : map[b]};
    const dw_attr attr = dw_attr_int(
        DW_ATTR_KEY_TRANSPOSE_W, dw_node_int(s->rewriter.from, node, DW_ATTR_KEY_TRANSPOSE_W, 1));
    const dw_value y = dw__emit(&s->e, DW_OP_SEGMENT_LINEAR, 4, operands, 1, &attr);
    if (s->e.status == DW_OK) define(s, g, dw_node_output(s->rewriter.from, node, 0), y);
    return s->e.status;
}

/* True if each row of the node's result depends on the same rows of its operands alone, in the same way for each. */
static bool keeps_rows(const dw_graph *from, dw_node node) {
    const dw_op op = dw_node_op(from, node);
    const dw_value x = dw_node_input(from, node, 0);
    if (dw__op_table[op].elementwise) return dw__op_table[op].typing != DW__WITH_SEED;
    const dw_value y = dw_node_output(from, node, 0);
    if (dw_value_rank(from, x) == 0 || dw_value_rank(from, y) == 0 ||
        dw_value_shape(from, x)[0] != dw_value_shape(from, y)[0])
        return false;
    switch (op) {
    case DW_OP_RESHAPE: return true;
    case DW_OP_BROADCAST: return dw_value_rank(from, y) == dw_value_rank(from, x);
    case DW_OP_PERMUTE: return dw_node_attr(from, node, DW_ATTR_KEY_PERM)->list[0] == 0;
    case DW_OP_SLICE: {
        const dw_attr *step = dw_node_attr(from, node, DW_ATTR_KEY_STEP);
        return dw_node_attr(from, node, DW_ATTR_KEY_START)->list[0] == 0 &&
               (!step || step->list[0] == 1);
    }
    default: return false;
    }
}

/* The grouping in whose order some operand is made, or DW_NONE. */
static uint32_t order_of_operands(const sorter *s, dw_node node) {
    for (uint32_t i = 0; i < dw_node_input_count(s->rewriter.from, node); i++) {
        const dw_value x = operand(s, node, i);
        if (x != DW_NONE && s->sorted[x].grouping != DW_NONE) return s->sorted[x].grouping;
    }
    return DW_NONE;
}

static dw_status sort_operation(sorter *s, uint32_t g, dw_node node) {
    dw_value operands[DW_MAX_INPUTS];
    const uint32_t count = dw_node_input_count(s->rewriter.from, node);
    for (uint32_t i = 0; i < count; i++) operands[i] = sorted_of(s, g, operand(s, node, i));
    const dw_value y = repeat(s, node, count, operands);
    if (s->e.status == DW_OK) define(s, g, dw_node_output(s->rewriter.from, node, 0), y);
    return s->e.status;
}

/* ---- weighted sums --------------------------------------------------------------------------- */

/* If `value` [.., N] is a [.., 1] that is broadcast along its last axis, returns the latter, else DW_NONE. */
static dw_value column_behind(sorter *s, dw_value value) {
    const dw_node node = dw__made_by(s->rewriter.from, value, DW_OP_BROADCAST);
    if (node == DW_NONE) return DW_NONE;
    const dw__type x = type_in_copy(s, operand(s, node, 0));
    dw__type y = type_in_copy(s, value);
    y.shape[y.rank - 1] = 1;
    return y.rank > 1 && dw__shape_equal(&x, &y) ? operand(s, node, 0) : DW_NONE;
}

/* If `*value` is a product with a column, replaces it by the other factor and returns the column. */
static dw_value divide_by_column(sorter *s, dw_value *value) {
    const dw_node node = dw__made_by(s->rewriter.from, *value, DW_OP_MUL);
    for (uint32_t i = 0; node != DW_NONE && i < 2; i++) {
        const dw_value column = column_behind(s, operand(s, node, i));
        if (column == DW_NONE) continue;
        *value = operand(s, node, 1 - i);
        return column;
    }
    return DW_NONE;
}

static bool is_sorted(const sorter *s, dw_value old) { return s->sorted[old].grouping != DW_NONE; }

/* Emits combine_rows for a sum over the k rows of each token, reduce_sum of [T, k, H] over axis 1, if its terms,
 * perhaps times a weight for each row, are made in sorted rows. Returns false if it is another sum. */
static bool combine_terms(sorter *s, dw_node node) {
    const dw_graph *from = s->rewriter.from;
    const dw_attr *axes = dw_node_attr(from, node, DW_ATTR_KEY_AXES);
    const dw__type terms = type_in_copy(s, operand(s, node, 0)),
                   sums = type_in_copy(s, dw_node_output(from, node, 0));
    if (terms.rank != 3 || axes->count != 1 || axes->list[0] != 1) return false;
    dw_value x = operand(s, node, 0), weight = divide_by_column(s, &x);
    const dw_node reshape = dw__made_by(from, x, DW_OP_RESHAPE);
    if (reshape == DW_NONE) return false;
    x = operand(s, reshape, 0);
    dw__type rows = type_in_copy(s, x);
    if (rows.rank != 2 || rows.shape[1] != terms.shape[2] || !is_sorted(s, x)) return false;
    if (weight == DW_NONE) {
        dw_value other = x, column = divide_by_column(s, &other);
        if (column != DW_NONE && is_sorted(s, other)) {
            x = other;
            weight = column;
        }
    }
    /* Sums are computed in F32, so that rows in 16 bits need no cast. */
    const dw_node cast = dw__made_by(from, x, DW_OP_CAST);
    if (cast != DW_NONE && is_sorted(s, operand(s, cast, 0)) &&
        dw__compute_dtype(type_in_copy(s, operand(s, cast, 0)).dtype) == sums.dtype)
        x = operand(s, cast, 0);
    rows = type_in_copy(s, x);
    if (!dw__dtype_is_float(rows.dtype)) return false;
    if (sums.dtype != rows.dtype && sums.dtype != dw__compute_dtype(rows.dtype)) return false;

    const uint32_t g = s->sorted[x].grouping;
    const dw_value operands[] = {
        s->sorted[x].value, dw__emit_reshape(&s->e, grouping_at(s, g)->place, 2, terms.shape),
        weight == DW_NONE ? DW_NONE
                          : dw__emit_reshape(&s->e, s->rewriter.map[weight], 2, terms.shape)};
    const dw_attr dtype = dw_attr_int(DW_ATTR_KEY_DTYPE, sums.dtype);
    const dw_value y =
        dw__emit(&s->e, DW_OP_COMBINE_ROWS, 3, operands, sums.dtype != rows.dtype, &dtype);
    s->rewriter.map[dw_node_output(from, node, 0)] =
        dw__emit_reshape(&s->e, y, sums.rank, sums.shape);
    return true;
}

/* Emits combine_rows with a rounded result for a cast of its F32 result to the rows' type. */
static bool round_sums(sorter *s, dw_node node) {
    dw_graph *to = s->e.graph;
    const dw_value cast = dw_node_output(s->rewriter.from, node, 0);
    const dw_node combine =
        dw__made_by(to, s->rewriter.map[operand(s, node, 0)], DW_OP_COMBINE_ROWS);
    const dw_dtype dtype = dw_value_dtype(s->rewriter.from, cast);
    if (combine == DW_NONE || dw_value_dtype(to, dw_node_input(to, combine, 0)) != dtype)
        return false;
    const dw_value operands[] = {dw_node_input(to, combine, 0), dw_node_input(to, combine, 1),
                                 dw_node_input(to, combine, 2)};
    s->rewriter.map[cast] = dw__emit(&s->e, DW_OP_COMBINE_ROWS, 3, operands, 0, NULL);
    return true;
}

/* ---- the pass -------------------------------------------------------------------------------- */

static dw_status sort_node(sorter *s, dw_node node) {
    const dw_graph *from = s->rewriter.from;
    const dw_op op = dw_node_op(from, node);
    const uint32_t g = order_of_operands(s, node);
    DW_RETURN_IF_FAILED(dw__copy_origin(s->e.graph, from, node));
    if (op == DW_OP_GROUPED_LINEAR) return sort_linear(s, node);
    if (g != DW_NONE && keeps_rows(from, node)) return sort_operation(s, g, node);
    DW_RETURN_IF_FAILED(dw__rewriter_copy(&s->rewriter, node));
    if (op == DW_OP_REDUCE_SUM) (void)combine_terms(s, node);
    if (op == DW_OP_CAST) (void)round_sums(s, node);
    return s->e.status;
}

static bool has_grouped(const dw_graph *graph) {
    for (size_t n = 0; n < graph->nodes.count; n++)
        if (graph->nodes.items[n].op == DW_OP_GROUPED_LINEAR) return true;
    return false;
}

dw_status dw__sort_rows(dw_graph **graph) {
    dw_status status = DW_OK;
    const dw_graph *from = *graph;
    dw_graph *made = NULL;
    sorter s = {.e = {NULL, DW_OK}};
    const size_t count = from->values.count;
    if (!has_grouped(from)) return DW_OK;
    DW_RETURN_IF_FAILED(dw__rewriter_begin(&s.rewriter, from));
    s.e.graph = s.rewriter.to;
    s.sorted = dw__malloc(2 * count * sizeof *s.sorted);
    if (!s.sorted) DW_TRY(dw__fail_memory("sorted rows", 2 * count * sizeof *s.sorted));
    s.copies = s.sorted + count;
    for (size_t i = 0; i < 2 * count; i++) s.sorted[i] = (twin){DW_NONE, DW_NONE};
    for (dw_node n = 0; n < dw_graph_node_count(from); n++) DW_TRY(sort_node(&s, n));
    DW_TRY(dw__rewriter_end(&s.rewriter, &made));
    DW_TRY(dw__pass_dead_code(&made));
    dw__replace_graph(graph, &made);
cleanup:
    dw__rewriter_abort(&s.rewriter);
    dw__free(s.sorted);
    dw__free(s.groupings.items);
    dw_graph_destroy(made);
    return status;
}
