/* Expansions of the composites of ops.h into primitives: elementwise ones, softmax, linear,
 * embedding, rotary embedding, dropout, AdamW. An expansion is the definition of its composite: it
 * computes in F32 (F64 for F64) and rounds once at the end. Products of 16-bit operands give F32 without casts of the
 * operands, so that matrix units compute them.
 */
#include "graph/emit.h"
#include "graph/op_rules.h"
#include <math.h>
#include <string.h>

static bool is_tanh(const dw_graph *source, dw_node node) {
    const dw_attr *attr = dw_node_attr(source, node, DW_ATTR_KEY_APPROXIMATE);
    return attr && strcmp(attr->string, "tanh") == 0;
}

/* ---- elementwise --------------------------------------------------------------------------- */

dw_status dw__expand_relu(dw_graph *graph, const dw_graph *source, dw_node node,
                          const dw_value *inputs, dw_value *outputs) {
    (void)source, (void)node;
    dw__emitter e = {graph, DW_OK};
    outputs[0] = dw__emit_with_number(&e, DW_OP_MAX, inputs[0], 0.0);
    return e.status;
}

static dw_value emit_silu(dw__emitter *e, dw_value x) {
    return dw__emit_binary(e, DW_OP_MUL, x, dw__emit_unary(e, DW_OP_SIGMOID, x));
}

dw_status dw__expand_silu(dw_graph *graph, const dw_graph *source, dw_node node,
                          const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    dw_value y = emit_silu(&e, dw__emit_widen(&e, inputs[0]));
    outputs[0] = dw__emit_cast(&e, y, dw__output_dtype(source, node, 0));
    return e.status;
}

dw_status dw__expand_swiglu(dw_graph *graph, const dw_graph *source, dw_node node,
                            const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    dw_value gate = emit_silu(&e, dw__emit_widen(&e, inputs[0]));
    dw_value y = dw__emit_binary(&e, DW_OP_MUL, gate, dw__emit_widen(&e, inputs[1]));
    outputs[0] = dw__emit_cast(&e, y, dw__output_dtype(source, node, 0));
    return e.status;
}

/* d silu / dx = s*(1 + x*(1 - s)) with s = sigmoid(x) */
dw_status dw__expand_silu_backward(dw_graph *graph, const dw_graph *source, dw_node node,
                                   const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    dw_value x = dw__emit_widen(&e, inputs[0]), dy = dw__emit_widen(&e, inputs[1]);
    dw_value s = dw__emit_unary(&e, DW_OP_SIGMOID, x);
    dw_value one = dw__emit_like(&e, x, 1.0);
    dw_value rest = dw__emit_binary(&e, DW_OP_MUL, x, dw__emit_binary(&e, DW_OP_SUB, one, s));
    dw_value slope = dw__emit_binary(&e, DW_OP_MUL, s, dw__emit_binary(&e, DW_OP_ADD, one, rest));
    dw_value dx = dw__emit_binary(&e, DW_OP_MUL, dy, slope);
    outputs[0] = dw__emit_cast(&e, dx, dw__output_dtype(source, node, 0));
    return e.status;
}

/* Hendrycks and Gimpel 2016: gelu(x) = x * Phi(x). The tanh form replaces Phi(x) by (1 + tanh(sqrt(2/pi) * (x
 * + 0.044715 x^3))) / 2. */
#define GELU_CUBIC 0.044715
#define GELU_SCALE 0.79788456080286535588   /* sqrt(2/pi) */
#define SQRT_HALF 0.70710678118654752440    /* 1/sqrt(2) */
#define INV_SQRT_TAU 0.39894228040143267794 /* 1/sqrt(2 pi) */

/* tanh(sqrt(2/pi) * (x + 0.044715 x^3)) */
static dw_value emit_gelu_tanh(dw__emitter *e, dw_value x) {
    dw_value square = dw__emit_binary(e, DW_OP_MUL, x, x);
    dw_value cube = dw__emit_binary(e, DW_OP_MUL, square, x);
    dw_value inner =
        dw__emit_binary(e, DW_OP_ADD, x, dw__emit_with_number(e, DW_OP_MUL, cube, GELU_CUBIC));
    return dw__emit_unary(e, DW_OP_TANH, dw__emit_with_number(e, DW_OP_MUL, inner, GELU_SCALE));
}

static dw_value emit_gelu_erf(dw__emitter *e, dw_value x) {
    return dw__emit_unary(e, DW_OP_ERF, dw__emit_with_number(e, DW_OP_MUL, x, SQRT_HALF));
}

dw_status dw__expand_gelu(dw_graph *graph, const dw_graph *source, dw_node node,
                          const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    dw_value x = dw__emit_widen(&e, inputs[0]);
    dw_value odd = is_tanh(source, node) ? emit_gelu_tanh(&e, x) : emit_gelu_erf(&e, x);
    dw_value half = dw__emit_with_number(&e, DW_OP_MUL, x, 0.5);
    dw_value y =
        dw__emit_binary(&e, DW_OP_MUL, half, dw__emit_with_number(&e, DW_OP_ADD, odd, 1.0));
    outputs[0] = dw__emit_cast(&e, y, dw__output_dtype(source, node, 0));
    return e.status;
}

/* dgelu/dx = (1 + t)/2 + x*t'/2, where t is the odd function (tanh or erf) and t' its derivative. */
dw_status dw__expand_gelu_backward(dw_graph *graph, const dw_graph *source, dw_node node,
                                   const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    dw_value x = dw__emit_widen(&e, inputs[0]), dy = dw__emit_widen(&e, inputs[1]);
    dw_value square = dw__emit_binary(&e, DW_OP_MUL, x, x);
    dw_value odd, half_slope;
    if (is_tanh(source, node)) {
        odd = emit_gelu_tanh(&e, x);
        dw_value sech2 = dw__emit_binary(&e, DW_OP_SUB, dw__emit_like(&e, x, 1.0),
                                         dw__emit_binary(&e, DW_OP_MUL, odd, odd));
        dw_value inner = dw__emit_with_number(
            &e, DW_OP_ADD,
            dw__emit_with_number(&e, DW_OP_MUL, square, 1.5 * GELU_SCALE * GELU_CUBIC),
            0.5 * GELU_SCALE);
        half_slope = dw__emit_binary(&e, DW_OP_MUL, sech2, inner);
    } else {
        odd = emit_gelu_erf(&e, x);
        dw_value density =
            dw__emit_unary(&e, DW_OP_EXP, dw__emit_with_number(&e, DW_OP_MUL, square, -0.5));
        half_slope = dw__emit_with_number(&e, DW_OP_MUL, density, INV_SQRT_TAU);
    }
    dw_value chance =
        dw__emit_with_number(&e, DW_OP_MUL, dw__emit_with_number(&e, DW_OP_ADD, odd, 1.0), 0.5);
    dw_value slope =
        dw__emit_binary(&e, DW_OP_ADD, chance, dw__emit_binary(&e, DW_OP_MUL, x, half_slope));
    dw_value dx = dw__emit_binary(&e, DW_OP_MUL, dy, slope);
    outputs[0] = dw__emit_cast(&e, dx, dw__output_dtype(source, node, 0));
    return e.status;
}

dw_status dw__expand_dropout(dw_graph *graph, const dw_graph *source, dw_node node,
                             const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    double p = dw_node_float(source, node, DW_ATTR_KEY_P, 0.0);
    int64_t stream = dw_node_int(source, node, DW_ATTR_KEY_STREAM, 0);
    dw_value x = dw__emit_widen(&e, inputs[0]);
    if (e.status != DW_OK) return e.status;
    dw__type type = dw__type_of(graph, x);
    dw_attr attrs[] = {dw_attr_list(DW_ATTR_KEY_SHAPE, (uint32_t)type.rank, type.shape),
                       dw_attr_int(DW_ATTR_KEY_STREAM, stream)};
    dw_value random = dw__emit(&e, DW_OP_RANDOM_UNIFORM, 1, &inputs[1], DW_COUNT(attrs), attrs);
    dw_value kept = dw__emit_with_number(&e, DW_OP_GE, random, p);
    dw_value scaled = dw__emit_with_number(&e, DW_OP_DIV, x, 1.0 - p);
    dw_value y = dw__emit_select(&e, kept, scaled, dw__emit_like(&e, x, 0.0));
    outputs[0] = dw__emit_cast(&e, y, dw__output_dtype(source, node, 0));
    return e.status;
}

/* ---- reductions ---------------------------------------------------------------------------- */

dw_status dw__expand_mean(dw_graph *graph, const dw_graph *source, dw_node node,
                          const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    const dw_attr *axes = dw_node_attr(source, node, DW_ATTR_KEY_AXES);
    bool keep = dw_node_int(source, node, DW_ATTR_KEY_KEEP, 0) != 0;
    dw_value x = dw__emit_widen(&e, inputs[0]);
    if (e.status != DW_OK) return e.status;
    dw__type type = dw__type_of(graph, x);
    dw_dim count = 1;
    for (uint32_t i = 0; i < axes->count; i++)
        count = dw__emit_dim_mul(&e, count, type.shape[axes->list[i]]);
    dw_value sum = dw__emit_reduce_axes(&e, DW_OP_REDUCE_SUM, x, axes->count, axes->list, keep);
    dw_value y = dw__emit_divide_by_dim(&e, sum, count);
    outputs[0] = dw__emit_cast(&e, y, dw__output_dtype(source, node, 0));
    return e.status;
}

dw_status dw__expand_softmax(dw_graph *graph, const dw_graph *source, dw_node node,
                             const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    int axis = (int)dw_node_int(source, node, DW_ATTR_KEY_AXIS, 0);
    dw_value y = DW_NONE;
    dw__emit_softmax(&e, dw__emit_widen(&e, inputs[0]), axis, &y, NULL);
    outputs[0] = dw__emit_cast(&e, y, dw__output_dtype(source, node, 0));
    return e.status;
}

dw_status dw__expand_log_softmax(dw_graph *graph, const dw_graph *source, dw_node node,
                                 const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    int axis = (int)dw_node_int(source, node, DW_ATTR_KEY_AXIS, 0);
    dw_value x = dw__emit_widen(&e, inputs[0]);
    dw_value top = dw__emit_reduce_spread(&e, DW_OP_REDUCE_MAX, x, axis);
    /* the result does not depend on the shift, so its gradients would cancel */
    dw_value shifted =
        dw__emit_binary(&e, DW_OP_SUB, x, dw__emit_unary(&e, DW_OP_STOP_GRADIENT, top));
    dw_value total =
        dw__emit_reduce(&e, DW_OP_REDUCE_SUM, dw__emit_unary(&e, DW_OP_EXP, shifted), axis, true);
    dw_value log_total = dw__emit_broadcast_like(&e, dw__emit_unary(&e, DW_OP_LOG, total), shifted);
    dw_value y = dw__emit_binary(&e, DW_OP_SUB, shifted, log_total);
    outputs[0] = dw__emit_cast(&e, y, dw__output_dtype(source, node, 0));
    return e.status;
}

dw_status dw__expand_softmax_backward(dw_graph *graph, const dw_graph *source, dw_node node,
                                      const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    int axis = (int)dw_node_int(source, node, DW_ATTR_KEY_AXIS, 0);
    dw_value y = dw__emit_widen(&e, inputs[0]), dy = dw__emit_widen(&e, inputs[1]);
    dw_value dot =
        dw__emit_reduce_spread(&e, DW_OP_REDUCE_SUM, dw__emit_binary(&e, DW_OP_MUL, dy, y), axis);
    dw_value dx = dw__emit_binary(&e, DW_OP_MUL, y, dw__emit_binary(&e, DW_OP_SUB, dy, dot));
    outputs[0] = dw__emit_cast(&e, dx, dw__output_dtype(source, node, 0));
    return e.status;
}

dw_status dw__expand_log_softmax_backward(dw_graph *graph, const dw_graph *source, dw_node node,
                                          const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    int axis = (int)dw_node_int(source, node, DW_ATTR_KEY_AXIS, 0);
    dw_value y = dw__emit_widen(&e, inputs[0]), dy = dw__emit_widen(&e, inputs[1]);
    dw_value total = dw__emit_reduce_spread(&e, DW_OP_REDUCE_SUM, dy, axis);
    dw_value share = dw__emit_binary(&e, DW_OP_MUL, dw__emit_unary(&e, DW_OP_EXP, y), total);
    dw_value dx = dw__emit_binary(&e, DW_OP_SUB, dy, share);
    outputs[0] = dw__emit_cast(&e, dx, dw__output_dtype(source, node, 0));
    return e.status;
}

/* ---- linear and embedding ------------------------------------------------------------------ */

dw_status dw__expand_linear(dw_graph *graph, const dw_graph *source, dw_node node,
                            const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    bool transpose_w = dw_node_int(source, node, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0;
    dw_value x = inputs[0], w = inputs[1];
    dw__type type = dw__type_of(graph, x), weight = dw__type_of(graph, w);
    dw_value y = dw__emit_wide_matmul(&e, dw__emit_flatten_rows(&e, x), w, false, transpose_w);
    type.shape[type.rank - 1] = weight.shape[transpose_w ? 0 : 1];
    y = dw__emit_reshape(&e, y, type.rank, type.shape);
    if (inputs[2] != DW_NONE) {
        dw_value bias = dw__emit_widen(&e, inputs[2]);
        y = dw__emit_binary(&e, DW_OP_ADD, y, dw__emit_broadcast_like(&e, bias, y));
    }
    outputs[0] = dw__emit_cast(&e, y, dw__output_dtype(source, node, 0));
    return e.status;
}

/* Rows with index padding_index get no gradient. */
dw_status dw__expand_embedding(dw_graph *graph, const dw_graph *source, dw_node node,
                               const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    int64_t padding = dw_node_int(source, node, DW_ATTR_KEY_PADDING_INDEX, -1);
    dw_attr axis = dw_attr_int(DW_ATTR_KEY_AXIS, 0);
    dw_value y = dw__emit(&e, DW_OP_TAKE, 2, inputs, 1, &axis);
    if (padding >= 0) {
        dw_value hit = dw__emit_with_number(&e, DW_OP_EQ, inputs[1], (double)padding);
        dw_value still = dw__emit_unary(&e, DW_OP_STOP_GRADIENT, y);
        y = dw__emit_select(&e, dw__emit_spread_last(&e, hit, y), still, y);
    }
    outputs[0] = y;
    return e.status;
}

dw_status dw__expand_embedding_backward(dw_graph *graph, const dw_graph *source, dw_node node,
                                        const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    int64_t padding = dw_node_int(source, node, DW_ATTR_KEY_PADDING_INDEX, -1);
    const dw_attr *size = dw_node_attr(source, node, DW_ATTR_KEY_SIZE);
    dw_dim rows;
    DW_RETURN_IF_FAILED(dw__import_dim(graph, source, size->list[0], &rows));
    dw_value dy = dw__emit_widen(&e, inputs[1]);
    if (padding >= 0) {
        dw_value hit = dw__emit_with_number(&e, DW_OP_EQ, inputs[0], (double)padding);
        dy = dw__emit_select(&e, dw__emit_spread_last(&e, hit, dy), dw__emit_like(&e, dy, 0.0), dy);
    }
    dw_attr attrs[] = {dw_attr_int(DW_ATTR_KEY_AXIS, 0), dw_attr_list(DW_ATTR_KEY_SIZE, 1, &rows)};
    dw_value dw =
        dw__emit(&e, DW_OP_SCATTER_ADD, 2, (dw_value[]){inputs[0], dy}, DW_COUNT(attrs), attrs);
    outputs[0] = dw__emit_cast(&e, dw, dw__output_dtype(source, node, 0));
    return e.status;
}

/* ---- rotary embedding ---------------------------------------------------------------------- */

/* Computes (-x2, x1), or (x2, -x1) if `transposed`. x1 and x2 are the halves [start, start+half) of the axis. */
static dw_value emit_swap(dw__emitter *e, dw_value x, int axis, dw_dim half, dw_dim whole,
                          bool transposed) {
    dw_value first = dw__emit_slice(e, x, axis, 0, half);
    dw_value second = dw__emit_slice(e, x, axis, half, whole);
    if (transposed) return dw__emit_concat(e, second, dw__emit_unary(e, DW_OP_NEG, first), axis);
    return dw__emit_concat(e, dw__emit_unary(e, DW_OP_NEG, second), first, axis);
}

static dw_value emit_rotate(dw__emitter *e, dw_value x, bool interleaved, bool transposed) {
    if (e->status != DW_OK) return DW_NONE;
    dw__type type = dw__type_of(e->graph, x);
    int last = type.rank - 1;
    dw_dim whole = type.shape[last], half = dw__emit_dim_div(e, whole, 2);
    if (!interleaved) return emit_swap(e, x, last, half, whole, transposed);
    if (type.rank == DW_MAX_RANK) {
        e->status = dw__fail(DW_UNSUPPORTED,
                             "interleaved rope of value %s with rank %d; at most %d is supported",
                             dw_value_name(e->graph, x), type.rank, DW_MAX_RANK - 1);
        return DW_NONE;
    }
    dw__type pairs = type;
    pairs.shape[last] = half;
    pairs.shape[last + 1] = 2;
    pairs.rank++;
    dw_value swapped =
        emit_swap(e, dw__emit_reshape(e, x, pairs.rank, pairs.shape), last + 1, 1, 2, transposed);
    return dw__emit_reshape(e, swapped, type.rank, type.shape);
}

dw_status dw__expand_rope(dw_graph *graph, const dw_graph *source, dw_node node,
                          const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    bool interleaved = dw_node_int(source, node, DW_ATTR_KEY_INTERLEAVED, 0) != 0;
    bool transposed = dw_node_int(source, node, DW_ATTR_KEY_TRANSPOSED, 0) != 0;
    dw_value x = dw__emit_widen(&e, inputs[0]), cosine = dw__emit_widen(&e, inputs[1]),
             sine = dw__emit_widen(&e, inputs[2]);
    if (e.status != DW_OK) return e.status;
    dw__type type = dw__type_of(graph, x), table = dw__type_of(graph, cosine);
    int last = type.rank - 1;
    dw_dim whole = type.shape[last], turned = table.shape[last];
    dw_value part = dw__emit_slice(&e, x, last, 0, turned);
    cosine = dw__emit_broadcast_like(&e, cosine, part);
    sine = dw__emit_broadcast_like(&e, sine, part);
    dw_value across;
    if (transposed)
        across = emit_rotate(&e, dw__emit_binary(&e, DW_OP_MUL, part, sine), interleaved, true);
    else
        across = dw__emit_binary(&e, DW_OP_MUL, emit_rotate(&e, part, interleaved, false), sine);
    dw_value y =
        dw__emit_binary(&e, DW_OP_ADD, dw__emit_binary(&e, DW_OP_MUL, part, cosine), across);
    if (turned != whole)
        y = dw__emit_concat(&e, y, dw__emit_slice(&e, x, last, turned, whole), last);
    outputs[0] = dw__emit_cast(&e, y, dw__output_dtype(source, node, 0));
    return e.status;
}

/* ---- optimizer ----------------------------------------------------------------------------- */

/* 1 - beta^step as a scalar of `dtype`. It is computed in F64, because F32 would lose the difference from 1. */
static dw_value emit_bias_correction(dw__emitter *e, dw_value step, double beta, dw_dtype dtype) {
    dw_value base = dw__emit_constant(e, DW_F64, 0, NULL, beta);
    dw_value power = dw__emit_binary(e, DW_OP_POW, base, dw__emit_cast(e, step, DW_F64));
    dw_value one = dw__emit_constant(e, DW_F64, 0, NULL, 1.0);
    return dw__emit_cast(e, dw__emit_binary(e, DW_OP_SUB, one, power), dtype);
}

/* decay*old + (1 - decay)*new */
static dw_value emit_moving_average(dw__emitter *e, dw_value old, dw_value new, double decay) {
    return dw__emit_binary(e, DW_OP_ADD, dw__emit_with_number(e, DW_OP_MUL, old, decay),
                           dw__emit_with_number(e, DW_OP_MUL, new, 1.0 - decay));
}

dw_status dw__expand_adamw(dw_graph *graph, const dw_graph *source, dw_node node,
                           const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    double lr = dw_node_float(source, node, DW_ATTR_KEY_LR, 0.0);
    double beta1 = dw_node_float(source, node, DW_ATTR_KEY_BETA1, 0.0);
    double beta2 = dw_node_float(source, node, DW_ATTR_KEY_BETA2, 0.0);
    double eps = dw_node_float(source, node, DW_ATTR_KEY_EPS, 0.0);
    double decay = dw_node_float(source, node, DW_ATTR_KEY_WEIGHT_DECAY, 0.0);
    dw_value p = dw__emit_widen(&e, inputs[0]), g = dw__emit_widen(&e, inputs[1]);
    dw_value m = dw__emit_widen(&e, inputs[2]), v = dw__emit_widen(&e, inputs[3]), step = inputs[4];
    if (e.status != DW_OK) return e.status;
    dw_dtype dtype = dw_value_dtype(graph, p);
    m = emit_moving_average(&e, m, g, beta1);
    v = emit_moving_average(&e, v, dw__emit_binary(&e, DW_OP_MUL, g, g), beta2);
    dw_value correction1 = emit_bias_correction(&e, step, beta1, dtype);
    dw_value correction2 = emit_bias_correction(&e, step, beta2, dtype);
    dw_value mean = dw__emit_binary(&e, DW_OP_DIV, m, dw__emit_broadcast_like(&e, correction1, p));
    dw_value square =
        dw__emit_binary(&e, DW_OP_DIV, v, dw__emit_broadcast_like(&e, correction2, p));
    dw_value divisor =
        dw__emit_with_number(&e, DW_OP_ADD, dw__emit_unary(&e, DW_OP_SQRT, square), eps);
    dw_value update =
        dw__emit_with_number(&e, DW_OP_MUL, dw__emit_binary(&e, DW_OP_DIV, mean, divisor), lr);
    p = dw__emit_with_number(&e, DW_OP_MUL, p, 1.0 - lr * decay);
    p = dw__emit_binary(&e, DW_OP_SUB, p, update);
    outputs[0] = dw__emit_cast(&e, p, dw__output_dtype(source, node, 0));
    outputs[1] = dw__emit_cast(&e, m, dw__output_dtype(source, node, 1));
    outputs[2] = dw__emit_cast(&e, v, dw__output_dtype(source, node, 2));
    return e.status;
}
