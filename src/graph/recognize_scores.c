/* Recognises attention written as primitives: softmax(q k^T, scaled, soft-capped, masked) times the values.
 *
 * Weights that other nodes read (a model that returns them) must exist, so such attention is left as it is. */
#include "graph/recognize.h"
#include <math.h>

#define MAX_BIASES 4

typedef struct scores {
    dw_node product; /* q k^T */
    double scale, softcap;
    dw_value biases[MAX_BIASES];
    uint32_t bias_count;
    dw_value condition; /* bool; the score is -inf where it is false; DW_NONE for none */
} scores;

/* Matches value = factor * (matmul of queries and transposed keys). */
static bool read_product(const dw__matcher *m, dw_value value, scores *s) {
    double number;
    for (;;) {
        dw_value x;
        if (!dw__single(m, value)) return false;
        s->product = dw__made_by(m->e.graph, value, DW_OP_MATMUL);
        if (s->product != DW_NONE) break;
        if (dw__with_number(m, value, DW_OP_MUL, &x, &number)) {
            s->scale *= number;
        } else if (dw__with_number(m, value, DW_OP_DIV, &x, &number) && number != 0.0) {
            s->scale /= number;
        } else {
            return false;
        }
        value = x;
    }
    return dw_value_rank(m->e.graph, value) == 4 &&
           dw_node_int(m->e.graph, s->product, DW_ATTR_KEY_TRANSPOSE_A, 0) == 0 &&
           dw_node_int(m->e.graph, s->product, DW_ATTR_KEY_TRANSPOSE_B, 0) != 0;
}

/* Matches value = cap * tanh(product / cap). */
static bool read_capped(const dw__matcher *m, dw_value value, scores *s) {
    dw_value inner;
    double cap;
    if (!dw__with_number(m, value, DW_OP_MUL, &inner, &cap) || !(cap > 0.0)) return false;
    dw_node bent = dw__swallow(m, inner, DW_OP_TANH);
    if (bent == DW_NONE || !read_product(m, dw__operand(m, bent, 0), s)) return false;
    s->scale *= cap;
    s->softcap = cap;
    return true;
}

static bool read_scores(const dw__matcher *m, dw_value value, scores *s);

static bool read_sum(const dw__matcher *m, dw_node add, scores *s) {
    for (uint32_t i = 0; i < 2; i++) {
        scores with = *s;
        if (with.bias_count == MAX_BIASES) return false;
        with.biases[with.bias_count++] = dw__operand(m, add, 1 - i);
        if (!read_scores(m, dw__operand(m, add, i), &with)) continue;
        *s = with;
        return true;
    }
    return false;
}

/* Matches the argument of the softmax, from the outermost operation to the innermost. */
static bool read_scores(const dw__matcher *m, dw_value value, scores *s) {
    double number;
    if (!dw__single(m, value)) return false;
    dw_node node = dw__made_by(m->e.graph, value, DW_OP_ADD);
    if (node != DW_NONE) return read_sum(m, node, s);
    node = dw__made_by(m->e.graph, value, DW_OP_SELECT);
    if (node != DW_NONE) {
        if (s->condition != DW_NONE ||
            !dw__is_splat(m->e.graph, dw__operand(m, node, 2), &number) || number != -INFINITY)
            return false;
        s->condition = dw__operand(m, node, 0);
        return read_scores(m, dw__operand(m, node, 1), s);
    }
    scores capped = *s;
    if (read_capped(m, value, &capped)) {
        *s = capped;
        return true;
    }
    return read_product(m, value, s);
}

/* Broadcasts both (rank 4) to the smallest shape that holds both. */
static void widen_together(dw__matcher *m, dw_value *a, dw_value *b) {
    if (m->e.status != DW_OK) return;
    dw__type x = dw__type_of(m->e.graph, *a), y = dw__type_of(m->e.graph, *b);
    for (int i = 0; i < 4; i++)
        if (x.shape[i] == 1) x.shape[i] = y.shape[i];
    *a = dw__emit_broadcast(&m->e, *a, 4, x.shape);
    *b = dw__emit_broadcast(&m->e, *b, 4, x.shape);
}

static bool is_zero(const dw__matcher *m, dw_value value) {
    double number;
    return dw__is_splat(m->e.graph, value, &number) && number == 0.0;
}

/* Sums the biases that are not positions. Returns DW_NONE if there are none. */
static dw_value sum_biases(dw__matcher *m, const scores *s, dw__attention_parts *parts) {
    dw_value sum = DW_NONE;
    for (uint32_t i = 0; i < s->bias_count; i++) {
        dw_value bias = s->biases[i];
        if (is_zero(m, bias)) continue;
        bool others_are_ordinary = true;
        for (uint32_t k = 0; k < s->bias_count; k++)
            others_are_ordinary &=
                k == i || is_zero(m, s->biases[k]) || dw__is_learned(m, s->biases[k]);
        if (others_are_ordinary) dw__simplify_bias(m, parts, &bias);
        if (bias == DW_NONE) continue;
        bias = dw__to_rank_4(m, dw__unbroadcast(m, bias));
        if (sum != DW_NONE) {
            widen_together(m, &sum, &bias);
            bias = dw__emit_binary(&m->e, DW_OP_ADD, sum, bias);
        }
        sum = bias;
    }
    return sum;
}

static dw_value emit_mask(dw__matcher *m, const scores *s, dw__attention_parts *parts) {
    dw_value bias = sum_biases(m, s, parts);
    if (s->condition == DW_NONE) return bias;
    dw_value condition = dw__to_rank_4(m, dw__unbroadcast(m, s->condition));
    if (bias == DW_NONE) return condition;
    widen_together(m, &condition, &bias);
    return dw__emit_select(&m->e, condition, bias, dw__emit_like(&m->e, bias, -INFINITY));
}

/* Matches weights [B, H, Sq, Sk] times v [B, H, Sk, Dv]. */
dw_value dw__recognize_written_attention(dw__matcher *m) {
    const dw_graph *graph = m->e.graph;
    dw_value weights = dw__operand(m, m->root, 0);
    if (dw_value_rank(graph, weights) != 4 ||
        dw_node_int(graph, m->root, DW_ATTR_KEY_TRANSPOSE_A, 0) != 0 ||
        dw_node_int(graph, m->root, DW_ATTR_KEY_TRANSPOSE_B, 0) != 0)
        return DW_NONE;
    dw__attention_parts parts = {.window = -1, .operands = {[3] = DW_NONE, [4] = DW_NONE}};
    dw_node dropout = dw__swallow(m, weights, DW_OP_DROPOUT);
    if (dropout != DW_NONE) {
        parts.p = dw_node_float(graph, dropout, DW_ATTR_KEY_P, 0.0);
        parts.stream = dw_node_int(graph, dropout, DW_ATTR_KEY_STREAM, 0);
        parts.operands[4] = dw__operand(m, dropout, 1);
        weights = dw__operand(m, dropout, 0);
    }
    dw_node softmax = dw__swallow(m, weights, DW_OP_SOFTMAX);
    scores s = {.scale = 1.0, .condition = DW_NONE};
    if (softmax == DW_NONE || dw_node_int(graph, softmax, DW_ATTR_KEY_AXIS, -1) != 3 ||
        !read_scores(m, dw__operand(m, softmax, 0), &s) || !isfinite(s.scale))
        return DW_NONE;
    parts.operands[0] = dw__operand(m, s.product, 0);
    parts.operands[1] = dw__operand(m, s.product, 1);
    parts.operands[2] = dw__operand(m, m->root, 1);
    parts.scale = s.scale;
    parts.softcap = s.softcap;
    parts.operands[3] = emit_mask(m, &s, &parts);
    if (m->e.status != DW_OK) return DW_NONE;
    dw__simplify_attention(m, &parts);
    dw_node made = dw__emit_attention(m, &parts);
    return m->e.status == DW_OK ? dw_node_output(graph, made, 0) : DW_NONE;
}
