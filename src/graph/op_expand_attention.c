/* Expansion of attention and its backward: the definition with S x S scores. Tiled kernels must agree with
 * it. In BF16 and F16 the products give F32, and the probabilities and the gradients of the scores are rounded before
 * they are multiplied, as in those kernels.
 *
 * A plain reshape turns q [B, H, Sq, D] into [B, Hk, G*Sq, D] with G = H/Hk query heads per key head. One
 * batched matmul then serves all query heads of a key head, and matmuls that sum over G*Sq also sum the
 * gradients of the group. */
#include "graph/emit.h"
#include "graph/op_rules.h"
#include <math.h>

typedef struct shapes {
    dw_dim full[4];          /* [B, H, Sq, Sk] */
    dw_dim group[4];         /* [B, Hk, G*Sq, .]; the last dim is set at use */
    dw_dim head, value_head; /* D, Dv */
} shapes;

typedef struct operands {
    dw_value q, k, v, mask, seed;
    double scale, softcap, p;
    int64_t causal, window, stream;
} operands;

static shapes read_shapes(dw__emitter *e, const operands *in) {
    shapes s = {{0}, {0}, 0, 0};
    if (e->status != DW_OK) return s;
    dw__type q = dw__type_of(e->graph, in->q), k = dw__type_of(e->graph, in->k);
    dw__type v = dw__type_of(e->graph, in->v);
    s.full[0] = s.group[0] = q.shape[0];
    s.full[1] = q.shape[1];
    s.full[2] = q.shape[2];
    s.full[3] = k.shape[2];
    s.group[1] = k.shape[1];
    s.group[2] = dw__emit_dim_mul(e, dw__emit_dim_div(e, q.shape[1], k.shape[1]), q.shape[2]);
    s.head = q.shape[3];
    s.value_head = v.shape[3];
    return s;
}

static operands read_operands(const dw_graph *source, dw_node node, const dw_value *inputs) {
    return (operands){
        .q = inputs[0],
        .k = inputs[1],
        .v = inputs[2],
        .mask = inputs[3],
        .seed = inputs[4],
        .scale = dw_node_float(source, node, DW_ATTR_KEY_SCALE, 1.0),
        .softcap = dw_node_float(source, node, DW_ATTR_KEY_SOFTCAP, 0.0),
        .p = dw_node_float(source, node, DW_ATTR_KEY_P, 0.0),
        .causal = dw_node_int(source, node, DW_ATTR_KEY_CAUSAL, 0),
        .window = dw_node_int(source, node, DW_ATTR_KEY_WINDOW, -1),
        .stream = dw_node_int(source, node, DW_ATTR_KEY_STREAM, 0),
    };
}

/* Reshapes x [B, H, Sq, last] to [B, Hk, G*Sq, last]. */
static dw_value to_groups(dw__emitter *e, const shapes *s, dw_value x, dw_dim last) {
    return dw__emit_reshape(e, x, 4, (dw_dim[]){s->group[0], s->group[1], s->group[2], last});
}

static dw_value to_heads(dw__emitter *e, const shapes *s, dw_value x, dw_dim last) {
    return dw__emit_reshape(e, x, 4, (dw_dim[]){s->full[0], s->full[1], s->full[2], last});
}

/* x + dim for an i64 x */
static dw_value plus_dim(dw__emitter *e, dw_value x, dw_dim dim) {
    dw_value size = dw__emit_size(e, DW_I64, dim);
    return dw__emit_binary(e, DW_OP_ADD, x, dw__emit_broadcast_like(e, size, x));
}

static dw_value merge_condition(dw__emitter *e, dw_value all, dw_value one) {
    return all == DW_NONE ? one : dw__emit_binary(e, DW_OP_AND, all, one);
}

/* The keys that each query may attend to by causality and window: bool [Sq, Sk], or DW_NONE for all keys.
 * causal = 2 aligns the ends of the sequences: keys are shifted by Sq and queries by Sk, so that no number is
 * negative. */
static dw_value position_mask(dw__emitter *e, const shapes *s, const operands *in) {
    if (in->causal == 0 && in->window < 0) return DW_NONE;
    dw_value query = dw__emit_iota(e, DW_I64, 2, s->full + 2, 0);
    dw_value key = dw__emit_iota(e, DW_I64, 2, s->full + 2, 1);
    if (in->causal == 2) {
        query = plus_dim(e, query, s->full[3]);
        key = plus_dim(e, key, s->full[2]);
    }
    dw_value allowed = DW_NONE;
    if (in->causal != 0) allowed = dw__emit_binary(e, DW_OP_LE, key, query);
    if (in->window >= 0) {
        dw_value reach = plus_dim(e, key, in->window);
        allowed = merge_condition(e, allowed, dw__emit_binary(e, DW_OP_GT, reach, query));
    }
    return allowed;
}

/* Computes scale * q k^T with soft cap and all masks, [B, H, Sq, Sk]. If `slope` is not NULL, it receives the
 * derivative of the soft cap, or DW_NONE if there is no soft cap. */
static dw_value emit_scores(dw__emitter *e, const shapes *s, const operands *in, dw_value *slope) {
    dw_value q = to_groups(e, s, in->q, s->head);
    dw_value scores = to_heads(e, s, dw__emit_wide_matmul(e, q, in->k, false, true), s->full[3]);
    scores = dw__emit_with_number(e, DW_OP_MUL, scores, in->scale);
    if (in->softcap > 0.0) {
        scores = dw__emit_with_number(e, DW_OP_DIV, scores, in->softcap);
        scores = dw__emit_unary(e, DW_OP_TANH, scores);
        if (slope) {
            dw_value square = dw__emit_binary(e, DW_OP_MUL, scores, scores);
            *slope = dw__emit_binary(e, DW_OP_SUB, dw__emit_like(e, square, 1.0), square);
        }
        scores = dw__emit_with_number(e, DW_OP_MUL, scores, in->softcap);
    }
    dw_value allowed = position_mask(e, s, in);
    if (e->status != DW_OK) return DW_NONE;
    if (allowed != DW_NONE) allowed = dw__emit_broadcast(e, allowed, 4, s->full);
    if (in->mask != DW_NONE && dw_value_dtype(e->graph, in->mask) == DW_BOOL) {
        allowed = merge_condition(e, allowed, dw__emit_broadcast(e, in->mask, 4, s->full));
    } else if (in->mask != DW_NONE) {
        dw_value bias = dw__emit_cast(e, in->mask, dw_value_dtype(e->graph, scores));
        scores = dw__emit_binary(e, DW_OP_ADD, scores, dw__emit_broadcast(e, bias, 4, s->full));
    }
    if (allowed == DW_NONE) return scores;
    return dw__emit_select(e, allowed, scores, dw__emit_like(e, scores, -INFINITY));
}

/* Dropout: x/(1-p) for the elements that are kept, else 0. `kept` (bool) is computed on first use. */
static dw_value emit_dropped(dw__emitter *e, const shapes *s, const operands *in, dw_value x,
                             dw_value *kept) {
    if (in->p == 0.0) return x;
    if (*kept == DW_NONE) {
        dw_attr attrs[] = {dw_attr_list(DW_ATTR_KEY_SHAPE, 4, s->full),
                           dw_attr_int(DW_ATTR_KEY_STREAM, in->stream)};
        dw_value random = dw__emit(e, DW_OP_RANDOM_UNIFORM, 1, &in->seed, DW_COUNT(attrs), attrs);
        *kept = dw__emit_with_number(e, DW_OP_GE, random, in->p);
    }
    dw_value scaled = dw__emit_with_number(e, DW_OP_DIV, x, 1.0 - in->p);
    return dw__emit_select(e, *kept, scaled, dw__emit_like(e, x, 0.0));
}

/* Rounds to the dtype of the operands and reshapes to groups. */
static dw_value round_groups(dw__emitter *e, const shapes *s, const operands *in, dw_value x) {
    if (e->status != DW_OK) return DW_NONE;
    return to_groups(e, s, dw__emit_cast(e, x, dw_value_dtype(e->graph, in->q)), s->full[3]);
}

dw_status dw__expand_attention(dw_graph *graph, const dw_graph *source, dw_node node,
                               const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    operands in = read_operands(source, node, inputs);
    shapes s = read_shapes(&e, &in);
    dw_value scores = emit_scores(&e, &s, &in, NULL);
    dw_value probabilities = DW_NONE, lse = DW_NONE, kept = DW_NONE;
    dw__emit_softmax(&e, scores, 3, &probabilities, &lse);
    dw_value weights = emit_dropped(&e, &s, &in, probabilities, &kept);
    dw_value o = dw__emit_wide_matmul(&e, round_groups(&e, &s, &in, weights), in.v, false, false);
    o = to_heads(&e, &s, o, s.value_head);
    outputs[0] = dw__emit_cast(&e, o, dw__output_dtype(source, node, 0));
    outputs[1] = lse; /* not rounded */
    return e.status;
}

/* exp(scores - lse). A query that may attend to no key has lse = -inf and zero probabilities. If the mask
 * absorbed every score of a row, lse equals the largest score and has lost the logarithm of their number;
 * such a row is divided by its sum. */
static dw_value emit_probabilities(dw__emitter *e, dw_value scores, dw_value lse) {
    dw_value empty = dw__emit_with_number(e, DW_OP_EQ, lse, -INFINITY);
    dw_value shift = dw__emit_select(e, empty, dw__emit_like(e, lse, 0.0), lse);
    dw_value p = dw__emit_unary(
        e, DW_OP_EXP,
        dw__emit_binary(e, DW_OP_SUB, scores, dw__emit_spread_last(e, shift, scores)));
    dw_value low = dw__emit_with_number(e, DW_OP_LT, shift, DW_LOW_SCORE);
    dw_value sum = dw__emit_reduce(e, DW_OP_REDUCE_SUM, p, 3, false);
    sum = dw__emit_select(e, low, sum, dw__emit_like(e, sum, 1.0));
    return dw__emit_binary(e, DW_OP_DIV, p, dw__emit_spread_last(e, sum, p));
}

/* Sums the gradient of the masked scores over the axes along which the mask is repeated. */
static dw_value emit_mask_gradient(dw__emitter *e, const operands *in, dw_value ds) {
    if (e->status != DW_OK) return DW_NONE;
    const dw__type mask = dw__type_of(e->graph, in->mask), scores = dw__type_of(e->graph, ds);
    int64_t axes[4];
    uint32_t count = 0;
    for (int i = 0; i < 4; i++)
        if (mask.shape[i] != scores.shape[i]) axes[count++] = i;
    const dw_value sum = dw__emit_reduce_axes(e, DW_OP_REDUCE_SUM, ds, count, axes, true);
    return dw__emit_cast(e, sum, mask.dtype);
}

/* P are the probabilities, Z the probabilities after dropout: dv = Z^T do; dP = dropout(do v^T); dS = P * (dP
 * - rowsum(do * o)), which is the gradient of the mask, times the slope of the soft cap; dq = scale dS k; dk = scale
 * dS^T q (Dao 2023, section 2.3). */
dw_status dw__expand_attention_backward(dw_graph *graph, const dw_graph *source, dw_node node,
                                        const dw_value *inputs, dw_value *gradients) {
    dw__emitter e = {graph, DW_OK};
    operands in = read_operands(source, node, inputs);
    dw_value o = dw__emit_widen(&e, inputs[5]), lse = inputs[6];
    dw_value d_o = dw__emit_widen(&e, inputs[7]), kept = DW_NONE;
    shapes s = read_shapes(&e, &in);
    dw_value slope = DW_NONE, scores = emit_scores(&e, &s, &in, &slope);
    dw_value p = emit_probabilities(&e, scores, lse);
    dw_value z = round_groups(&e, &s, &in, emit_dropped(&e, &s, &in, p, &kept));
    dw_value d_o_groups = to_groups(&e, &s, inputs[7], s.value_head);
    dw_value dv = dw__emit_wide_matmul(&e, z, d_o_groups, true, false);
    dw_value dz =
        to_heads(&e, &s, dw__emit_wide_matmul(&e, d_o_groups, in.v, false, true), s.full[3]);
    dw_value dp = emit_dropped(&e, &s, &in, dz, &kept);
    dw_value dot =
        dw__emit_reduce(&e, DW_OP_REDUCE_SUM, dw__emit_binary(&e, DW_OP_MUL, d_o, o), 3, false);
    dw_value inner = dw__emit_binary(&e, DW_OP_SUB, dp, dw__emit_spread_last(&e, dot, dp));
    dw_value ds = dw__emit_binary(&e, DW_OP_MUL, p, inner);
    if (dw_node_int(source, node, DW_ATTR_KEY_MASK_GRADIENT, 0))
        gradients[3] = emit_mask_gradient(&e, &in, ds);
    if (slope != DW_NONE) ds = dw__emit_binary(&e, DW_OP_MUL, ds, slope);
    ds = dw__emit_with_number(&e, DW_OP_MUL, ds, in.scale);
    ds = round_groups(&e, &s, &in, ds);
    dw_value dq = to_heads(&e, &s, dw__emit_wide_matmul(&e, ds, in.k, false, false), s.head);
    dw_value dk = dw__emit_wide_matmul(&e, ds, to_groups(&e, &s, in.q, s.head), true, false);
    const dw_dtype dtype = dw_value_dtype(graph, in.q);
    gradients[0] = dw__emit_cast(&e, dq, dtype);
    gradients[1] = dw__emit_cast(&e, dk, dtype);
    gradients[2] = dw__emit_cast(&e, dv, dtype);
    return e.status;
}
