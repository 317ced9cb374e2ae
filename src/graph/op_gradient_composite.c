/* Gradients of composites that are faster than the gradients of their expansions: they save less and run as
 * composites themselves. A rule falls back to the expansion in cases that it does not cover (the gradient of
 * a saved statistic, of a float mask, of cos and sin). */
#include "graph/op_gradient.h"

/* Emits a node with the attributes of `like`. */
static dw_node emit_as(dw__emitter *e, dw_op op, uint32_t count, const dw_value *inputs,
                       dw_node like) {
    const dw__node_record *record = &e->graph->nodes.items[like];
    return dw__emit_node(e, op, count, inputs, record->attr_count, record->attrs);
}

/* Outputs 0, 1, .. of `made` become the gradients of operands `first`, first+1, .. that need one. */
static void hand_out(const dw__emitter *e, dw_node made, uint32_t first, uint32_t count,
                     const bool *needed, dw_value *input_grads) {
    if (e->status != DW_OK) return;
    for (uint32_t i = 0; i < count; i++)
        if (needed[first + i]) input_grads[first + i] = dw_node_output(e->graph, made, i);
}

/* ---- elementwise ---------------------------------------------------------------------------- */

DW__GRADIENT(dw__gradient_relu) {
    (void)needed;
    dw__emitter e = {graph, DW_OK};
    dw_value positive = dw__emit_with_number(&e, DW_OP_GT, dw_node_input(graph, node, 0), 0.0);
    dw_value dy = output_grads[0];
    input_grads[0] = dw__emit_select(&e, positive, dy, dw__emit_like(&e, dy, 0.0));
    return e.status;
}

DW__GRADIENT(dw__gradient_silu) {
    (void)needed;
    dw__emitter e = {graph, DW_OK};
    input_grads[0] =
        dw__emit_binary(&e, DW_OP_SILU_BACKWARD, dw_node_input(graph, node, 0), output_grads[0]);
    return e.status;
}

DW__GRADIENT(dw__gradient_gelu) {
    dw__emitter e = {graph, DW_OK};
    dw_value operands[] = {dw_node_input(graph, node, 0), output_grads[0]};
    hand_out(&e, emit_as(&e, DW_OP_GELU_BACKWARD, 2, operands, node), 0, 1, needed, input_grads);
    return e.status;
}

DW__GRADIENT(dw__gradient_swiglu) {
    dw__emitter e = {graph, DW_OK};
    dw_value gate = dw_node_input(graph, node, 0), up = dw_node_input(graph, node, 1);
    dw_value dy = output_grads[0];
    if (needed[0])
        input_grads[0] =
            dw__emit_binary(&e, DW_OP_SILU_BACKWARD, gate, dw__emit_binary(&e, DW_OP_MUL, dy, up));
    if (needed[1])
        input_grads[1] = dw__emit_binary(&e, DW_OP_MUL, dy, dw__emit_unary(&e, DW_OP_SILU, gate));
    return e.status;
}

DW__GRADIENT(dw__gradient_dropout) {
    dw__emitter e = {graph, DW_OK};
    dw_value operands[] = {output_grads[0], dw_node_input(graph, node, 1)};
    hand_out(&e, emit_as(&e, DW_OP_DROPOUT, 2, operands, node), 0, 1, needed, input_grads);
    return e.status;
}

DW__GRADIENT(dw__gradient_rope) {
    if (needed[1] || needed[2])
        return dw__gradient_by_expansion(graph, node, output_grads, needed, input_grads);
    dw__emitter e = {graph, DW_OK};
    dw_value operands[] = {output_grads[0], dw_node_input(graph, node, 1),
                           dw_node_input(graph, node, 2)};
    dw_attr attrs[] = {
        dw_attr_int(DW_ATTR_KEY_INTERLEAVED, dw_node_int(graph, node, DW_ATTR_KEY_INTERLEAVED, 0)),
        dw_attr_int(DW_ATTR_KEY_TRANSPOSED, !dw_node_int(graph, node, DW_ATTR_KEY_TRANSPOSED, 0))};
    input_grads[0] = dw__emit(&e, DW_OP_ROPE, 3, operands, DW_COUNT(attrs), attrs);
    return e.status;
}

/* ---- reductions ----------------------------------------------------------------------------- */

DW__GRADIENT(dw__gradient_mean) {
    (void)needed;
    dw__emitter e = {graph, DW_OK};
    dw__type x = dw__type_of(graph, dw_node_input(graph, node, 0)), kept = x;
    const dw_attr *axes = dw_node_attr(graph, node, DW_ATTR_KEY_AXES);
    dw_dim count = 1;
    for (uint32_t i = 0; i < axes->count; i++) {
        count = dw__emit_dim_mul(&e, count, x.shape[axes->list[i]]);
        kept.shape[axes->list[i]] = 1;
    }
    dw_value share = dw__emit_divide_by_dim(&e, output_grads[0], count);
    share = dw__emit_reshape(&e, share, kept.rank, kept.shape);
    input_grads[0] = dw__emit_broadcast(&e, share, x.rank, x.shape);
    return e.status;
}

static dw_status gradient_of_softmax(dw_graph *graph, dw_node node, dw_op backward,
                                     const dw_value *output_grads, const bool *needed,
                                     dw_value *input_grads) {
    dw__emitter e = {graph, DW_OK};
    dw_value operands[] = {dw_node_output(graph, node, 0), output_grads[0]};
    hand_out(&e, emit_as(&e, backward, 2, operands, node), 0, 1, needed, input_grads);
    return e.status;
}

DW__GRADIENT(dw__gradient_softmax) {
    return gradient_of_softmax(graph, node, DW_OP_SOFTMAX_BACKWARD, output_grads, needed,
                               input_grads);
}

DW__GRADIENT(dw__gradient_log_softmax) {
    return gradient_of_softmax(graph, node, DW_OP_LOG_SOFTMAX_BACKWARD, output_grads, needed,
                               input_grads);
}

DW__GRADIENT(dw__gradient_layer_norm) {
    if (output_grads[0] == DW_NONE || output_grads[1] != DW_NONE || output_grads[2] != DW_NONE)
        return dw__gradient_by_expansion(graph, node, output_grads, needed, input_grads);
    dw__emitter e = {graph, DW_OK};
    dw_value operands[] = {output_grads[0], dw_node_input(graph, node, 0),
                           dw_node_input(graph, node, 1), dw_node_output(graph, node, 1),
                           dw_node_output(graph, node, 2)};
    dw_node made = dw__emit_node(&e, DW_OP_LAYER_NORM_BACKWARD, 5, operands, 0, NULL);
    hand_out(&e, made, 0, 3, needed, input_grads);
    return e.status;
}

DW__GRADIENT(dw__gradient_rms_norm) {
    if (output_grads[0] == DW_NONE || output_grads[1] != DW_NONE)
        return dw__gradient_by_expansion(graph, node, output_grads, needed, input_grads);
    dw__emitter e = {graph, DW_OK};
    dw_value operands[] = {output_grads[0], dw_node_input(graph, node, 0),
                           dw_node_input(graph, node, 1), dw_node_output(graph, node, 1)};
    dw_node made = dw__emit_node(&e, DW_OP_RMS_NORM_BACKWARD, 4, operands, 0, NULL);
    hand_out(&e, made, 0, 2, needed, input_grads);
    return e.status;
}

/* ---- matmuls -------------------------------------------------------------------------------- */

/* Backward reads the logits if forward keeps them, which is decided when sizes are known (engine/lower_logits.c); else
 * it computes them again. */
DW__GRADIENT(dw__gradient_linear_cross_entropy) {
    if (output_grads[0] == DW_NONE || output_grads[1] != DW_NONE || output_grads[2] != DW_NONE)
        return dw__gradient_by_expansion(graph, node, output_grads, needed, input_grads);
    dw__emitter e = {graph, DW_OK};
    enum { X, W, B, TARGET };
    dw_value operands[] = {dw_node_input(graph, node, X),
                           dw_node_input(graph, node, W),
                           dw_node_input(graph, node, B),
                           dw_node_output(graph, node, 2),
                           dw_node_input(graph, node, TARGET),
                           dw_node_output(graph, node, 1),
                           output_grads[0]};
    hand_out(&e, emit_as(&e, DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD, 7, operands, node), 0, 3, needed,
             input_grads);
    return e.status;
}

/* dx = dy w with w transposed; dw = dy^T x, or x^T dy for w [K,N]; db = sum of the rows of dy. */
DW__GRADIENT(dw__gradient_linear) {
    dw__emitter e = {graph, DW_OK};
    dw_value x = dw_node_input(graph, node, 0), w = dw_node_input(graph, node, 1);
    dw_value dy = output_grads[0];
    bool transpose_w = dw_node_int(graph, node, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0;
    if (needed[0]) {
        dw_attr attr = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W, !transpose_w);
        input_grads[0] = dw__emit(&e, DW_OP_LINEAR, 2, (dw_value[]){dy, w}, 1, &attr);
    }
    if (needed[1]) {
        dw_value rows = dw__emit_flatten_rows(&e, x), dy_rows = dw__emit_flatten_rows(&e, dy);
        input_grads[1] = transpose_w ? dw__emit_matmul(&e, dy_rows, rows, true, false)
                                     : dw__emit_matmul(&e, rows, dy_rows, true, false);
    }
    if (needed[2]) input_grads[2] = dw__emit_sum_leading(&e, dy, 1);
    return e.status;
}

/* The index of the rows that a segment_linear reads, or DW_NONE. */
static dw_value rows_of_segments(const dw_graph *graph, dw_node node) {
    enum { ROWS = 4 };
    return dw_node_op(graph, node) == DW_OP_SEGMENT_LINEAR &&
                   dw_node_input_count(graph, node) > ROWS
               ? dw_node_input(graph, node, ROWS)
               : DW_NONE;
}

/* As for linear, group by group; db sums the rows of dy by group. */
void dw__emit_segment_gradients(dw__emitter *e, dw_node node, dw_value dy, const bool *needed,
                                dw_value *input_grads) {
    enum { X, W, OFFSETS, B };
    dw_graph *graph = e->graph;
    dw_value x = dw_node_input(graph, node, X), w = dw_node_input(graph, node, W);
    dw_value offsets = dw_node_input(graph, node, OFFSETS);
    bool transpose_w = dw_node_int(graph, node, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0;
    if (needed[W]) {
        const dw_value rows = rows_of_segments(graph, node);
        input_grads[W] =
            dw__emit(e, DW_OP_SEGMENT_LINEAR_BACKWARD_WEIGHT, rows == DW_NONE ? 3 : 5,
                     (dw_value[]){transpose_w ? dy : x, transpose_w ? x : dy, offsets,
                                  transpose_w ? DW_NONE : rows, transpose_w ? rows : DW_NONE},
                     0, NULL);
    }
    if (needed[B]) {
        dw__type type = dw__type_of(graph, dy);
        /* The last sum is that of rows without a group. */
        dw_dim groups = dw__type_of(graph, w).shape[0], sums = dw__emit_dim_add(e, groups, 1);
        dw_attr size = dw_attr_list(DW_ATTR_KEY_SIZE, 1, &sums);
        dw_value index = dw__emit_group_of_rows(e, offsets, type.shape[0]);
        dw_value db = dw__emit(e, DW_OP_EMBEDDING_BACKWARD, 2, (dw_value[]){index, dy}, 1, &size);
        input_grads[B] = dw__emit_slice(e, db, 0, 0, groups);
    }
}

/* The gradient of the rows that a segment_linear has made, before it weighed and placed them, and that of the weights. */
static dw_value weighed_gradient(dw__emitter *e, dw_node node, dw_value dy, dw_value *dweights) {
    enum { MOST = 7, PLACES = 5, WEIGHTS };
    const dw_graph *graph = e->graph;
    dw_value in[MOST] = {DW_NONE, DW_NONE, DW_NONE, DW_NONE, DW_NONE, DW_NONE, DW_NONE};
    for (uint32_t i = 0; i < dw_node_input_count(graph, node); i++)
        in[i] = dw_node_input(graph, node, i);
    if (in[PLACES] != DW_NONE) {
        const dw_attr axis = dw_attr_int(DW_ATTR_KEY_AXIS, 0);
        dy = dw__emit(e, DW_OP_TAKE, 2, (dw_value[]){dy, in[PLACES]}, 1, &axis);
    }
    if (in[WEIGHTS] == DW_NONE) return dy;
    const dw_attr side =
        dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W, dw_node_int(graph, node, DW_ATTR_KEY_TRANSPOSE_W, 1));
    if (dweights) {
        const dw_value y = dw__emit(e, DW_OP_SEGMENT_LINEAR, PLACES, in, 1, &side);
        *dweights =
            dw__emit_reduce(e, DW_OP_REDUCE_SUM, dw__emit_binary(e, DW_OP_MUL, dy, y), 1, false);
    }
    return dw__emit_binary(e, DW_OP_MUL, dy, dw__emit_spread_last(e, in[WEIGHTS], dy));
}

DW__GRADIENT(dw__gradient_segment_linear) {
    enum { X, W, OFFSETS, WEIGHTS = 6 };
    dw__emitter e = {graph, DW_OK};
    dw_value w = dw_node_input(graph, node, W), offsets = dw_node_input(graph, node, OFFSETS);
    const bool weighted = dw_node_input_count(graph, node) > WEIGHTS &&
                          dw_node_input(graph, node, WEIGHTS) != DW_NONE;
    dw_value dy = weighed_gradient(&e, node, output_grads[0],
                                   weighted && needed[WEIGHTS] ? &input_grads[WEIGHTS] : NULL);
    if (e.status != DW_OK) return e.status;
    bool transpose_w = dw_node_int(graph, node, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0;
    if (needed[X]) {
        dw_attr attr = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W, !transpose_w);
        input_grads[X] =
            dw__emit(&e, DW_OP_SEGMENT_LINEAR, 3, (dw_value[]){dy, w, offsets}, 1, &attr);
        const dw_value rows = rows_of_segments(graph, node);
        if (rows != DW_NONE) { /* each row of x gets the sum for the places that it stands at */
            const dw_dim tokens = dw__type_of(graph, dw_node_input(graph, node, X)).shape[0];
            const dw_attr size = dw_attr_list(DW_ATTR_KEY_SIZE, 1, &tokens);
            input_grads[X] = dw__emit(&e, DW_OP_EMBEDDING_BACKWARD, 2,
                                      (dw_value[]){rows, input_grads[X]}, 1, &size);
        }
    }
    dw__emit_segment_gradients(&e, node, dy, needed, input_grads);
    return e.status;
}

/* dx sums the k rows of dy that came from each row; dw are dot products. */
DW__GRADIENT(dw__gradient_spread_rows) {
    enum { X, PLACE, WEIGHT };
    dw__emitter e = {graph, DW_OK};
    dw_value x = dw_node_input(graph, node, X), place = dw_node_input(graph, node, PLACE);
    dw_value weight = dw_node_input(graph, node, WEIGHT), dy = output_grads[0];
    if (needed[X])
        input_grads[X] =
            dw__emit(&e, DW_OP_COMBINE_ROWS, 3, (dw_value[]){dy, place, weight}, 0, NULL);
    if (needed[WEIGHT]) {
        dw_node made = dw__emit_node(&e, DW_OP_COMBINE_ROWS_BACKWARD, 4,
                                     (dw_value[]){dy, place, weight, x}, 0, NULL);
        if (e.status == DW_OK) input_grads[WEIGHT] = dw_node_output(graph, made, 1);
    }
    return e.status;
}

/* Where the weights need a gradient, one node reads dy for both. */
DW__GRADIENT(dw__gradient_combine_rows) {
    enum { X, PLACE, WEIGHT };
    dw__emitter e = {graph, DW_OK};
    dw_value x = dw_node_input(graph, node, X), place = dw_node_input(graph, node, PLACE);
    dw_value weight = dw_node_input(graph, node, WEIGHT), dy = output_grads[0];
    if (needed[WEIGHT]) {
        dw_node made = dw__emit_node(&e, DW_OP_COMBINE_ROWS_BACKWARD, 4,
                                     (dw_value[]){x, place, weight, dy}, 0, NULL);
        if (e.status != DW_OK) return e.status;
        if (needed[X]) input_grads[X] = dw_node_output(graph, made, 0);
        input_grads[WEIGHT] = dw_node_output(graph, made, 1);
    } else if (needed[X]) {
        dw_dtype dtype = dw_value_dtype(graph, x);
        if (weight == DW_NONE || dw_value_dtype(graph, weight) == dtype)
            dy = dw__emit_cast(&e, dy, dtype);
        dw_value dx = dw__emit(&e, DW_OP_SPREAD_ROWS, 3, (dw_value[]){dy, place, weight}, 0, NULL);
        input_grads[X] = dw__emit_cast(&e, dx, dtype);
    }
    return e.status;
}

DW__GRADIENT(dw__gradient_embedding) {
    (void)needed;
    dw__emitter e = {graph, DW_OK};
    dw__type w = dw__type_of(graph, dw_node_input(graph, node, 0));
    dw_attr attrs[] = {dw_attr_list(DW_ATTR_KEY_SIZE, 1, w.shape),
                       dw_attr_int(DW_ATTR_KEY_PADDING_INDEX,
                                   dw_node_int(graph, node, DW_ATTR_KEY_PADDING_INDEX, -1))};
    input_grads[0] = dw__emit(&e, DW_OP_EMBEDDING_BACKWARD, 2,
                              (dw_value[]){dw_node_input(graph, node, 1), output_grads[0]},
                              DW_COUNT(attrs), attrs);
    return e.status;
}

DW__GRADIENT(dw__gradient_attention) {
    if (output_grads[0] == DW_NONE || output_grads[1] != DW_NONE)
        return dw__gradient_by_expansion(graph, node, output_grads, needed, input_grads);
    dw__emitter e = {graph, DW_OK};
    dw_value operands[8];
    for (uint32_t i = 0; i < 5; i++) operands[i] = dw_node_input(graph, node, i);
    operands[5] = dw_node_output(graph, node, 0);
    operands[6] = dw_node_output(graph, node, 1);
    operands[7] = output_grads[0];
    const dw__node_record *record = &graph->nodes.items[node];
    dw_attr attrs[DW_ATTR_KEY_COUNT];
    uint32_t count = 0;
    for (; count < record->attr_count; count++) attrs[count] = record->attrs[count];
    if (needed[3]) attrs[count++] = dw_attr_int(DW_ATTR_KEY_MASK_GRADIENT, 1);
    hand_out(&e, dw__emit_node(&e, DW_OP_ATTENTION_BACKWARD, 8, operands, count, attrs), 0,
             needed[3] ? 4 : 3, needed, input_grads);
    return e.status;
}

DW__GRADIENT(dw__gradient_cross_entropy) {
    if (output_grads[0] == DW_NONE || output_grads[1] != DW_NONE)
        return dw__gradient_by_expansion(graph, node, output_grads, needed, input_grads);
    dw__emitter e = {graph, DW_OK};
    dw_value operands[] = {dw_node_input(graph, node, 0), dw_node_input(graph, node, 1),
                           dw_node_output(graph, node, 1), output_grads[0]};
    hand_out(&e, emit_as(&e, DW_OP_CROSS_ENTROPY_BACKWARD, 4, operands, node), 0, 1, needed,
             input_grads);
    return e.status;
}
