/* Expansions of cross-entropy, forward and backward, into primitives, and of cross-entropy after a linear layer into
 * matrix multiplications and cross-entropy, for which a device may have a kernel. The logits are [T, V]: T targets, V
 * classes. */
#include "graph/emit.h"
#include "graph/op_rules.h"
#include <string.h>

typedef enum reduction { REDUCTION_MEAN, REDUCTION_SUM, REDUCTION_NONE } reduction;

typedef struct options {
    reduction reduction;
    double ignore_index, smoothing;
} options;

static options read_options(const dw_graph *source, dw_node node) {
    options o = {REDUCTION_MEAN, (double)dw_node_int(source, node, DW_ATTR_KEY_IGNORE_INDEX, -100),
                 dw_node_float(source, node, DW_ATTR_KEY_LABEL_SMOOTHING, 0.0)};
    const dw_attr *attr = dw_node_attr(source, node, DW_ATTR_KEY_REDUCTION);
    if (attr && strcmp(attr->string, "sum") == 0) o.reduction = REDUCTION_SUM;
    if (attr && strcmp(attr->string, "none") == 0) o.reduction = REDUCTION_NONE;
    return o;
}

/* Number of valid targets as a scalar of `dtype`. */
static dw_value emit_valid_count(dw__emitter *e, dw_value valid, dw_dtype dtype) {
    return dw__emit_reduce(e, DW_OP_REDUCE_SUM, dw__emit_cast(e, valid, dtype), 0, false);
}

dw_status dw__expand_cross_entropy(dw_graph *graph, const dw_graph *source, dw_node node,
                                   const dw_value *inputs, dw_value *outputs) {
    dw__emitter emitter = {graph, DW_OK}, *e = &emitter;
    const dw_value target = inputs[1];
    options o = read_options(source, node);
    dw_value x = dw__emit_widen(e, inputs[0]), lse = DW_NONE;
    if (e->status != DW_OK) return e->status;
    dw__type type = dw__type_of(e->graph, x);
    dw__emit_softmax(e, x, 1, NULL, &lse);
    dw_value valid = dw__emit_with_number(e, DW_OP_NE, target, o.ignore_index);
    dw_value label = dw__emit_select(e, valid, target, dw__emit_like(e, target, 0.0));
    dw_attr axis = dw_attr_int(DW_ATTR_KEY_AXIS, 1);
    dw_value picked = dw__emit(e, DW_OP_TAKE_ALONG, 2,
                               (dw_value[]){x, dw__emit_unsqueeze_last(e, label)}, 1, &axis);
    picked = dw__emit_reshape(e, picked, 1, type.shape);
    dw_value loss = dw__emit_binary(e, DW_OP_SUB, lse, picked);
    if (o.smoothing != 0.0) { /* (1-s)*(lse - x[target]) + s*(lse - mean(x)) */
        dw_value sum = dw__emit_reduce(e, DW_OP_REDUCE_SUM, x, 1, false);
        dw_value mean = dw__emit_divide_by_dim(e, sum, type.shape[1]);
        dw_value even = dw__emit_binary(e, DW_OP_SUB, lse, mean);
        loss = dw__emit_binary(e, DW_OP_ADD,
                               dw__emit_with_number(e, DW_OP_MUL, loss, 1.0 - o.smoothing),
                               dw__emit_with_number(e, DW_OP_MUL, even, o.smoothing));
    }
    loss = dw__emit_select(e, valid, loss, dw__emit_like(e, loss, 0.0));
    if (o.reduction != REDUCTION_NONE) loss = dw__emit_reduce(e, DW_OP_REDUCE_SUM, loss, 0, false);
    if (o.reduction == REDUCTION_MEAN)
        loss = dw__emit_binary(e, DW_OP_DIV, loss, emit_valid_count(e, valid, type.dtype));
    outputs[0] = dw__emit_cast(e, loss, dw__output_dtype(source, node, 0));
    outputs[1] = dw__emit_cast(e, lse, dw__output_dtype(source, node, 1));
    return e->status;
}

/* (softmax(x) - (1-s)*onehot(target) - s/V) * weight in the compute dtype. The weight is dloss for valid
 * targets and 0 for others; for a mean it is divided by the number of valid targets. */
dw_status dw__expand_cross_entropy_backward(dw_graph *graph, const dw_graph *source, dw_node node,
                                            const dw_value *inputs, dw_value *outputs) {
    dw__emitter emitter = {graph, DW_OK}, *e = &emitter;
    const options o = read_options(source, node);
    const dw_value target = inputs[1];
    dw_value x = dw__emit_widen(e, inputs[0]), lse = dw__emit_widen(e, inputs[2]),
             dloss = dw__emit_widen(e, inputs[3]);
    if (e->status != DW_OK) return e->status;
    dw__type type = dw__type_of(e->graph, x);
    dw_value valid = dw__emit_with_number(e, DW_OP_NE, target, o.ignore_index);
    if (o.reduction == REDUCTION_MEAN)
        dloss = dw__emit_binary(e, DW_OP_DIV, dloss, emit_valid_count(e, valid, type.dtype));
    dw_value weight = dw__emit_broadcast_like(e, dloss, lse);
    weight = dw__emit_select(e, valid, weight, dw__emit_like(e, weight, 0.0));
    dw_value g = dw__emit_unary(e, DW_OP_EXP,
                                dw__emit_binary(e, DW_OP_SUB, x, dw__emit_spread_last(e, lse, x)));
    if (o.smoothing != 0.0) {
        dw_value even = dw__emit_constant(e, type.dtype, 0, NULL, o.smoothing);
        even = dw__emit_divide_by_dim(e, even, type.shape[1]);
        g = dw__emit_binary(e, DW_OP_SUB, g, dw__emit_broadcast_like(e, even, g));
    }
    dw_value class = dw__emit_cast(e, dw__emit_iota(e, DW_I64, 2, type.shape, 1),
                                   e->status == DW_OK ? dw_value_dtype(e->graph, target) : DW_I64);
    dw_value hit = dw__emit_binary(e, DW_OP_EQ, class, dw__emit_spread_last(e, target, class));
    dw_value less = dw__emit_with_number(e, DW_OP_SUB, g, 1.0 - o.smoothing);
    g = dw__emit_select(e, hit, less, g);
    dw_value dx = dw__emit_binary(e, DW_OP_MUL, g, dw__emit_spread_last(e, weight, g));
    outputs[0] = dw__emit_cast(e, dx, dw__output_dtype(source, node, 0));
    return e->status;
}

/* Emits cross_entropy or its gradient with the attributes of `node`. */
static dw_node emit_loss(dw__emitter *e, dw_op op, uint32_t count, const dw_value *inputs,
                         const dw_graph *source, dw_node node) {
    static const dw_attr_key keys[] = {DW_ATTR_KEY_REDUCTION, DW_ATTR_KEY_IGNORE_INDEX,
                                       DW_ATTR_KEY_LABEL_SMOOTHING};
    dw_attr attrs[DW_COUNT(keys)];
    uint32_t attr_count = 0;
    for (size_t i = 0; i < DW_COUNT(keys); i++) {
        const dw_attr *attr = dw_node_attr(source, node, keys[i]);
        if (attr) attrs[attr_count++] = *attr;
    }
    return dw__emit_node(e, op, count, inputs, attr_count, attrs);
}

/* Computes the logits in the compute dtype. */
static dw_value emit_logits(dw__emitter *e, dw_value x, dw_value w, dw_value b, bool transpose_w) {
    dw_value logits = dw__emit_matmul(e, x, w, false, transpose_w);
    if (b == DW_NONE) return logits;
    return dw__emit_binary(e, DW_OP_ADD, logits,
                           dw__emit_broadcast_like(e, dw__emit_widen(e, b), logits));
}

/* Operands: x, w, b?, target. The loss is that of logits in the compute dtype. */
dw_status dw__expand_linear_cross_entropy(dw_graph *graph, const dw_graph *source, dw_node node,
                                          const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    bool transpose_w = dw_node_int(source, node, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0;
    dw_value logits = emit_logits(&e, dw__emit_widen(&e, inputs[0]), dw__emit_widen(&e, inputs[1]),
                                  inputs[2], transpose_w);
    const dw_node loss =
        emit_loss(&e, DW_OP_CROSS_ENTROPY, 2, (dw_value[]){logits, inputs[3]}, source, node);
    if (e.status != DW_OK) return e.status;
    for (uint32_t i = 0; i < 2; i++)
        outputs[i] =
            dw__emit_cast(&e, dw_node_output(graph, loss, i), dw__output_dtype(source, node, i));
    outputs[2] = dw__emit_cast(&e, logits, dw__output_dtype(source, node, 2));
    return e.status;
}

/* Operands: x, w, b?, logits?, target, lse, dloss. dlogits stays in the compute dtype. */
dw_status dw__expand_linear_cross_entropy_backward(dw_graph *graph, const dw_graph *source,
                                                   dw_node node, const dw_value *inputs,
                                                   dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    bool transpose_w = dw_node_int(source, node, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0;
    dw_value x = dw__emit_widen(&e, inputs[0]), w = dw__emit_widen(&e, inputs[1]);
    dw_value logits =
        inputs[3] != DW_NONE ? inputs[3] : emit_logits(&e, x, w, inputs[2], transpose_w);
    dw_value operands[] = {dw__emit_widen(&e, logits), inputs[4], dw__emit_widen(&e, inputs[5]),
                           dw__emit_widen(&e, inputs[6])};
    const dw_node loss = emit_loss(&e, DW_OP_CROSS_ENTROPY_BACKWARD, 4, operands, source, node);
    if (e.status != DW_OK) return e.status;
    const dw_value dlogits = dw_node_output(graph, loss, 0);
    dw_value dx = dw__emit_matmul(&e, dlogits, w, false, !transpose_w);
    dw_value dw = transpose_w ? dw__emit_matmul(&e, dlogits, x, true, false)
                              : dw__emit_matmul(&e, x, dlogits, true, false);
    dw_value db = dw__emit_reduce(&e, DW_OP_REDUCE_SUM, dlogits, 0, false);
    outputs[0] = dw__emit_cast(&e, dx, dw__output_dtype(source, node, 0));
    outputs[1] = dw__emit_cast(&e, dw, dw__output_dtype(source, node, 1));
    outputs[2] = dw__emit_cast(&e, db, dw__output_dtype(source, node, 2));
    return e.status;
}
