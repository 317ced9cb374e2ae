/* Expansions of mixtures of experts: rows sorted by group, and each group's GEMM. */
#include "graph/emit.h"
#include "graph/op_rules.h"

static dw_value take_rows(dw__emitter *e, dw_value x, dw_value index) {
    dw_attr axis = dw_attr_int(DW_ATTR_KEY_AXIS, 0);
    return dw__emit(e, DW_OP_TAKE, 2, (dw_value[]){x, index}, 1, &axis);
}

static dw_value scatter_rows(dw__emitter *e, dw_value index, dw_value x, dw_dim rows) {
    dw_attr attrs[] = {dw_attr_int(DW_ATTR_KEY_AXIS, 0), dw_attr_list(DW_ATTR_KEY_SIZE, 1, &rows)};
    return dw__emit(e, DW_OP_SCATTER_ADD, 2, (dw_value[]){index, x}, DW_COUNT(attrs), attrs);
}

static dw_value running_sum(dw__emitter *e, dw_value x) {
    dw_attr axis = dw_attr_int(DW_ATTR_KEY_AXIS, 0);
    return dw__emit(e, DW_OP_CUMSUM, 1, &x, 1, &axis);
}

/* The inverse of a permutation [R]. */
static dw_value inverse(dw__emitter *e, dw_value permutation) {
    if (e->status != DW_OK) return DW_NONE;
    dw__type type = dw__type_of(e->graph, permutation);
    return scatter_rows(e, permutation, dw__emit_iota(e, DW_I32, 1, type.shape, 0), type.shape[0]);
}

/* A row's group is the number of groups that end at or before it: that of rows behind the last one is E. */
dw_value dw__emit_group_of_rows(dw__emitter *e, dw_value offsets, dw_dim rows) {
    if (e->status != DW_OK) return DW_NONE;
    dw__type type = dw__type_of(e->graph, offsets);
    dw_dim one = 1, groups = dw__emit_dim_sub(e, type.shape[0], one);
    dw_dim places = dw__emit_dim_add(e, rows, one);
    dw_value ends = dw__emit_slice(e, offsets, 0, one, type.shape[0]);
    dw_value ones = dw__emit_constant(e, DW_I32, 1, &groups, 1.0);
    dw_value ended = running_sum(e, scatter_rows(e, ends, ones, places));
    return dw__emit_slice(e, ended, 0, 0, rows);
}

/* ---- sorting --------------------------------------------------------------------------------- */

dw_status dw__expand_group_rows(dw_graph *graph, const dw_graph *source, dw_node node,
                                const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    dw__type type = dw__type_of(graph, inputs[0]);
    dw_dim groups;
    DW_RETURN_IF_FAILED(dw__import_dim(
        graph, source, dw_node_attr(source, node, DW_ATTR_KEY_SIZE)->list[0], &groups));
    dw_attr axis = dw_attr_int(DW_ATTR_KEY_AXIS, 0);
    dw_node sorted = dw__emit_node(&e, DW_OP_SORT, 1, inputs, 1, &axis);
    if (e.status != DW_OK) return e.status;
    outputs[0] = dw__emit_cast(&e, dw_node_output(graph, sorted, 1), DW_I32);
    outputs[1] = inverse(&e, outputs[0]);
    dw_value ones = dw__emit_constant(&e, DW_I32, 1, type.shape, 1.0);
    dw_value ends = running_sum(&e, scatter_rows(&e, inputs[0], ones, groups));
    dw_dim low = 1, high = 0;
    dw_attr pads[] = {dw_attr_list(DW_ATTR_KEY_LOW, 1, &low),
                      dw_attr_list(DW_ATTR_KEY_HIGH, 1, &high)};
    outputs[2] = dw__emit(&e, DW_OP_PAD, 1, &ends, DW_COUNT(pads), pads);
    return e.status;
}

/* Rows without a group have one of their own while they are sorted, the last. */
dw__grouped_rows dw__emit_grouped_rows(dw__emitter *e, dw_value index, dw_dim groups,
                                       bool ignores) {
    const dw_dim sorted = ignores ? dw__emit_dim_add(e, groups, 1) : groups;
    const dw_attr size = dw_attr_list(DW_ATTR_KEY_SIZE, 1, &sorted);
    const dw_node made = dw__emit_node(e, DW_OP_GROUP_ROWS, 1, &index, 1, &size);
    if (e->status != DW_OK) return (dw__grouped_rows){DW_NONE, DW_NONE, DW_NONE};
    dw_value offsets = dw_node_output(e->graph, made, 2);
    if (ignores) offsets = dw__emit_slice(e, offsets, 0, 0, sorted);
    return (dw__grouped_rows){dw_node_output(e->graph, made, 0), dw_node_output(e->graph, made, 1),
                              offsets};
}

/* ---- GEMMs ----------------------------------------------------------------------------------- */

/* Each row is sorted to its group, multiplied there, and taken back. */
dw_status dw__expand_grouped_linear(dw_graph *graph, const dw_graph *source, dw_node node,
                                    const dw_value *inputs, dw_value *outputs) {
    enum { X, W, I, B };
    dw__emitter e = {graph, DW_OK};
    dw_attr attr =
        dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W, dw_node_int(source, node, DW_ATTR_KEY_TRANSPOSE_W, 1));
    const dw__grouped_rows grouped =
        dw__emit_grouped_rows(&e, inputs[I], dw__type_of(graph, inputs[W]).shape[0],
                              dw_node_attr(source, node, DW_ATTR_KEY_IGNORE_INDEX) != NULL);
    if (e.status != DW_OK) return e.status;
    dw_value place = dw__emit_unsqueeze_last(&e, grouped.place);
    dw_value x =
        dw__emit(&e, DW_OP_SPREAD_ROWS, 3, (dw_value[]){inputs[X], place, DW_NONE}, 0, NULL);
    dw_value operands[] = {x, inputs[W], grouped.offsets, inputs[B]};
    dw_value y = dw__emit(&e, DW_OP_SEGMENT_LINEAR, 4, operands, 1, &attr);
    outputs[0] = dw__emit(&e, DW_OP_COMBINE_ROWS, 3, (dw_value[]){y, place, DW_NONE}, 0, NULL);
    return e.status;
}

/* Appends zeros for rows without a group, whose index is E. */
static dw_value with_zeros_for_no_group(dw__emitter *e, dw_value x) {
    enum { MOST = 3 };
    if (e->status != DW_OK) return DW_NONE;
    const int rank = dw__type_of(e->graph, x).rank;
    const dw_dim low[MOST] = {0}, high[MOST] = {1};
    const dw_attr pads[] = {dw_attr_list(DW_ATTR_KEY_LOW, (uint32_t)rank, low),
                            dw_attr_list(DW_ATTR_KEY_HIGH, (uint32_t)rank, high)};
    return dw__emit(e, DW_OP_PAD, 1, &x, DW_COUNT(pads), pads);
}

static dw_value optional(const dw_graph *source, dw_node node, const dw_value *inputs, uint32_t i) {
    return dw_node_input_count(source, node) > i ? inputs[i] : DW_NONE;
}

/* Returns rows of x by an index, or x if there is none. */
static dw_value gathered(dw__emitter *e, dw_value x, dw_value rows) {
    return rows == DW_NONE ? x : take_rows(e, x, rows);
}

/* segment_linear without rows by an index, and with rows that are weighed and placed afterwards, in F32 for half types,
 * so that they are rounded once. */
static dw_value emit_segments(dw__emitter *e, const dw_value *inputs, dw_value rows,
                              dw_value places, dw_value weights, bool transpose_w) {
    enum { X, W, OFFSETS, B };
    const dw_attr attr = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W, transpose_w);
    const dw_value x = gathered(e, inputs[X], rows);
    if (weights == DW_NONE && places == DW_NONE)
        return dw__emit(e, DW_OP_SEGMENT_LINEAR, 4,
                        (dw_value[]){x, inputs[W], inputs[OFFSETS], inputs[B]}, 1, &attr);
    const dw_dtype dtype = dw_value_dtype(e->graph, inputs[W]);
    const bool wide = weights != DW_NONE;
    const dw_value in[] = {
        wide ? dw__emit_widen(e, x) : x, wide ? dw__emit_widen(e, inputs[W]) : inputs[W],
        inputs[OFFSETS], inputs[B] == DW_NONE || !wide ? inputs[B] : dw__emit_widen(e, inputs[B])};
    dw_value y = dw__emit(e, DW_OP_SEGMENT_LINEAR, 4, in, 1, &attr);
    if (e->status == DW_OK && weights != DW_NONE)
        y = dw__emit_binary(e, DW_OP_MUL, y,
                            dw__emit_spread_last(e, dw__emit_widen(e, weights), y));
    if (places != DW_NONE) y = take_rows(e, y, inverse(e, places));
    return dw__emit_cast(e, y, dtype);
}

/* Rows by an index are taken first. Half types become F32, for which a CPU has a kernel. Otherwise takes the matrix of each row and multiplies it
 * by the row as a column. */
dw_status dw__expand_segment_linear(dw_graph *graph, const dw_graph *source, dw_node node,
                                    const dw_value *inputs, dw_value *outputs) {
    enum { X, W, OFFSETS, B, ROWS, PLACES, WEIGHTS };
    dw__emitter e = {graph, DW_OK};
    bool transpose_w = dw_node_int(source, node, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0;
    dw_dtype dtype = dw__output_dtype(source, node, 0);
    const dw_value taken = optional(source, node, inputs, ROWS),
                   places = optional(source, node, inputs, PLACES),
                   weights = optional(source, node, inputs, WEIGHTS);
    if (taken != DW_NONE || places != DW_NONE || weights != DW_NONE) {
        outputs[0] = emit_segments(&e, inputs, taken, places, weights, transpose_w);
        return e.status;
    }
    if (dtype != dw__compute_dtype(dtype)) {
        dw_attr attr = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W, transpose_w);
        dw_value wide[] = {dw__emit_widen(&e, inputs[X]), dw__emit_widen(&e, inputs[W]),
                           inputs[OFFSETS],
                           inputs[B] == DW_NONE ? DW_NONE : dw__emit_widen(&e, inputs[B])};
        dw_value y = dw__emit(&e, DW_OP_SEGMENT_LINEAR, 4, wide, 1, &attr);
        outputs[0] = dw__emit_cast(&e, y, dtype);
        return e.status;
    }
    dw__type type = dw__type_of(graph, inputs[X]), weight = dw__type_of(graph, inputs[W]);
    dw_dim rows = type.shape[0], one = 1;
    dw_dim results = weight.shape[transpose_w ? 1 : 2];
    dw_value index = dw__emit_group_of_rows(&e, inputs[OFFSETS], rows);
    dw_value row = dw__emit_reshape(&e, inputs[X], 3, (dw_dim[]){rows, one, type.shape[1]});
    dw_value matrices = take_rows(&e, with_zeros_for_no_group(&e, inputs[W]), index);
    dw_value y = dw__emit_matmul(&e, row, matrices, false, transpose_w);
    y = dw__emit_reshape(&e, y, 2, (dw_dim[]){rows, results});
    if (inputs[B] != DW_NONE)
        y = dw__emit_binary(&e, DW_OP_ADD, y,
                            take_rows(&e, with_zeros_for_no_group(&e, inputs[B]), index));
    /* A zero times infinity is no zero. */
    dw_value last =
        dw__emit_broadcast_like(&e,
                                dw__emit_slice(&e, inputs[OFFSETS], 0, weight.shape[0],
                                               dw__emit_dim_add(&e, weight.shape[0], one)),
                                index);
    dw_value place = dw__emit_iota(&e, DW_I32, 1, &rows, 0);
    dw_value has_group = dw__emit_unsqueeze_last(&e, dw__emit_binary(&e, DW_OP_LT, place, last));
    outputs[0] = dw__emit_select(&e, dw__emit_broadcast_like(&e, has_group, y), y,
                                 dw__emit_like(&e, y, 0.0));
    return e.status;
}

dw_status dw__expand_segment_linear_backward_weight(dw_graph *graph, const dw_graph *source,
                                                    dw_node node, const dw_value *inputs,
                                                    dw_value *outputs) {
    enum { X, Y, OFFSETS, X_ROWS, Y_ROWS };
    dw__emitter e = {graph, DW_OK};
    dw_dtype dtype = dw__output_dtype(source, node, 0);
    const dw_value taken[] = {gathered(&e, inputs[X], optional(source, node, inputs, X_ROWS)),
                              gathered(&e, inputs[Y], optional(source, node, inputs, Y_ROWS)),
                              inputs[OFFSETS]};
    if (taken[X] != inputs[X] || taken[Y] != inputs[Y]) {
        outputs[0] = dw__emit(&e, DW_OP_SEGMENT_LINEAR_BACKWARD_WEIGHT, 3, taken, 0, NULL);
        return e.status;
    }
    if (dtype != dw__compute_dtype(dtype)) {
        dw_value wide[] = {dw__emit_widen(&e, inputs[X]), dw__emit_widen(&e, inputs[Y]),
                           inputs[OFFSETS]};
        dw_value sums = dw__emit(&e, DW_OP_SEGMENT_LINEAR_BACKWARD_WEIGHT, 3, wide, 0, NULL);
        outputs[0] = dw__emit_cast(&e, sums, dtype);
        return e.status;
    }
    dw__type left = dw__type_of(graph, inputs[X]), right = dw__type_of(graph, inputs[Y]);
    dw_dim one = 1, rows = left.shape[0];
    dw_dim groups = dw__emit_dim_sub(&e, dw__type_of(graph, inputs[OFFSETS]).shape[0], one);
    dw_value x = dw__emit_reshape(&e, inputs[X], 3, (dw_dim[]){rows, left.shape[1], one});
    dw_value y = dw__emit_reshape(&e, inputs[Y], 3, (dw_dim[]){rows, one, right.shape[1]});
    dw_value outer = dw__emit_matmul(&e, x, y, false, false);
    /* The last sum is that of rows without a group. */
    dw_value sums = scatter_rows(&e, dw__emit_group_of_rows(&e, inputs[OFFSETS], rows), outer,
                                 dw__emit_dim_add(&e, groups, one));
    outputs[0] = dw__emit_slice(&e, sums, 0, 0, groups);
    return e.status;
}

/* ---- rows ------------------------------------------------------------------------------------ */

static bool is_half(const dw_graph *graph, dw_value x) {
    return x != DW_NONE && dw__dtype_is_half(dw_value_dtype(graph, x));
}

/* The operation on operands in F32, for which a CPU has a kernel. */
static dw_node emit_widened(dw__emitter *e, dw_op op, uint32_t count, const dw_value *inputs) {
    enum { PLACE = 1 };
    dw_value wide[4];
    for (uint32_t i = 0; i < count; i++)
        wide[i] = i == PLACE || inputs[i] == DW_NONE ? inputs[i] : dw__emit_widen(e, inputs[i]);
    return dw__emit_node(e, op, count, wide, 0, NULL);
}

/* Row s of the result is row order[s] / k of x, where order is the inverse of place. */
dw_status dw__expand_spread_rows(dw_graph *graph, const dw_graph *source, dw_node node,
                                 const dw_value *inputs, dw_value *outputs) {
    enum { X, PLACE, WEIGHT };
    dw__emitter e = {graph, DW_OK};
    dw_dtype dtype = dw__output_dtype(source, node, 0);
    if (dw__dtype_is_half(dtype)) {
        dw_node made = emit_widened(&e, DW_OP_SPREAD_ROWS, 3, inputs);
        if (e.status == DW_OK)
            outputs[0] = dw__emit_cast(&e, dw_node_output(graph, made, 0), dtype);
        return e.status;
    }
    dw__type place = dw__type_of(graph, inputs[PLACE]);
    dw_dim rows = dw__emit_dim_product(&e, 2, place.shape);
    dw_value order = inverse(&e, dw__emit_reshape(&e, inputs[PLACE], 1, &rows));
    dw_value each = dw__emit_broadcast(&e, dw__emit_size(&e, DW_I32, place.shape[1]), 1, &rows);
    dw_value y = take_rows(&e, inputs[X], dw__emit_binary(&e, DW_OP_DIV, order, each));
    if (inputs[WEIGHT] != DW_NONE) {
        dw_value weight = take_rows(&e, dw__emit_reshape(&e, inputs[WEIGHT], 1, &rows), order);
        y = dw__emit_binary(&e, DW_OP_MUL, y, dw__emit_spread_last(&e, weight, y));
    }
    outputs[0] = y;
    return e.status;
}

dw_status dw__expand_combine_rows(dw_graph *graph, const dw_graph *source, dw_node node,
                                  const dw_value *inputs, dw_value *outputs) {
    enum { X, PLACE, WEIGHT };
    dw__emitter e = {graph, DW_OK};
    if (is_half(graph, inputs[X])) {
        dw_node made = emit_widened(&e, DW_OP_COMBINE_ROWS, 3, inputs);
        if (e.status == DW_OK)
            outputs[0] = dw__emit_cast(&e, dw_node_output(graph, made, 0),
                                       dw__output_dtype(source, node, 0));
        return e.status;
    }
    dw_value rows = take_rows(&e, inputs[X], inputs[PLACE]);
    if (inputs[WEIGHT] != DW_NONE)
        rows = dw__emit_binary(&e, DW_OP_MUL, rows, dw__emit_spread_last(&e, inputs[WEIGHT], rows));
    outputs[0] = dw__emit_reduce(&e, DW_OP_REDUCE_SUM, rows, 1, false);
    return e.status;
}

dw_status dw__expand_combine_rows_backward(dw_graph *graph, const dw_graph *source, dw_node node,
                                           const dw_value *inputs, dw_value *outputs) {
    enum { X, PLACE, WEIGHT, DY };
    dw__emitter e = {graph, DW_OK};
    if (is_half(graph, inputs[X])) {
        dw_node made = emit_widened(&e, DW_OP_COMBINE_ROWS_BACKWARD, 4, inputs);
        for (uint32_t i = 0; i < 2 && e.status == DW_OK; i++)
            outputs[i] = dw__emit_cast(&e, dw_node_output(graph, made, i),
                                       dw__output_dtype(source, node, i));
        return e.status;
    }
    dw__type place = dw__type_of(graph, inputs[PLACE]), x = dw__type_of(graph, inputs[X]);
    dw_dim one = 1;
    outputs[0] = dw__emit(&e, DW_OP_SPREAD_ROWS, 3,
                          (dw_value[]){inputs[DY], inputs[PLACE], inputs[WEIGHT]}, 0, NULL);
    dw_value rows = take_rows(&e, inputs[X], inputs[PLACE]);
    dw_value dy = dw__emit_reshape(&e, inputs[DY], 3, (dw_dim[]){place.shape[0], one, x.shape[1]});
    dw_value products = dw__emit_binary(&e, DW_OP_MUL, rows, dw__emit_broadcast_like(&e, dy, rows));
    outputs[1] = dw__emit_reduce(&e, DW_OP_REDUCE_SUM, products, 2, false);
    return e.status;
}
