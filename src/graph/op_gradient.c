/* Gradients of elementwise primitives: dx = dy * f'(x) for y = f(x), written in terms of y where that is
 * cheaper.
 *
 * In BF16 and F16 a gradient is rounded where PyTorch's backward rounds it. A rule therefore emits one
 * operation per PyTorch operation. If PyTorch computes the whole gradient in one operation, the rule computes
 * in F32 and rounds at its end. */
#include "graph/op_gradient.h"

/* Operands of a rule with one operand and one result. */
typedef struct unary {
    dw__emitter e;
    dw_value x, y, dy;
} unary;

static unary open_unary(dw_graph *graph, dw_node node, const dw_value *output_grads) {
    return (unary){{graph, DW_OK},
                   dw_node_input(graph, node, 0),
                   dw_node_output(graph, node, 0),
                   output_grads[0]};
}

/* As open_unary, but all values are in the compute dtype of composites. */
static unary open_wide(dw_graph *graph, dw_node node, const dw_value *output_grads) {
    unary u = open_unary(graph, node, output_grads);
    u.x = dw__emit_widen(&u.e, u.x);
    u.y = dw__emit_widen(&u.e, u.y);
    u.dy = dw__emit_widen(&u.e, u.dy);
    return u;
}

/* Rounds dx to the dtype of the node's operand. */
static dw_value round_wide(unary *u, dw_node node, dw_value dx) {
    return dw__emit_cast(&u->e, dx, dw_value_dtype(u->e.graph, dw_node_input(u->e.graph, node, 0)));
}

static dw_value mul(dw__emitter *e, dw_value a, dw_value b) {
    return dw__emit_binary(e, DW_OP_MUL, a, b);
}

static dw_value neg(dw__emitter *e, dw_value x) { return dw__emit_unary(e, DW_OP_NEG, x); }

static dw_value times(dw__emitter *e, dw_value x, double number) {
    return dw__emit_with_number(e, DW_OP_MUL, x, number);
}

/* number - x */
static dw_value number_minus(dw__emitter *e, double number, dw_value x) {
    return dw__emit_binary(e, DW_OP_SUB, dw__emit_like(e, x, number), x);
}

/* ---- one operand ---------------------------------------------------------------------------- */

DW__GRADIENT(dw__gradient_neg) {
    (void)needed;
    unary u = open_unary(graph, node, output_grads);
    input_grads[0] = neg(&u.e, u.dy);
    return u.e.status;
}

DW__GRADIENT(dw__gradient_abs) {
    (void)needed;
    unary u = open_unary(graph, node, output_grads);
    input_grads[0] = mul(&u.e, u.dy, dw__emit_unary(&u.e, DW_OP_SIGN, u.x));
    return u.e.status;
}

DW__GRADIENT(dw__gradient_exp) {
    (void)needed;
    unary u = open_unary(graph, node, output_grads);
    input_grads[0] = mul(&u.e, u.dy, u.y);
    return u.e.status;
}

DW__GRADIENT(dw__gradient_log) {
    (void)needed;
    unary u = open_unary(graph, node, output_grads);
    input_grads[0] = dw__emit_binary(&u.e, DW_OP_DIV, u.dy, u.x);
    return u.e.status;
}

DW__GRADIENT(dw__gradient_log1p) {
    (void)needed;
    unary u = open_unary(graph, node, output_grads);
    input_grads[0] =
        dw__emit_binary(&u.e, DW_OP_DIV, u.dy, dw__emit_with_number(&u.e, DW_OP_ADD, u.x, 1.0));
    return u.e.status;
}

DW__GRADIENT(dw__gradient_sqrt) {
    (void)needed;
    unary u = open_unary(graph, node, output_grads);
    input_grads[0] = dw__emit_binary(&u.e, DW_OP_DIV, u.dy, times(&u.e, u.y, 2.0));
    return u.e.status;
}

DW__GRADIENT(dw__gradient_rsqrt) {
    (void)needed;
    unary u = open_unary(graph, node, output_grads);
    dw_value cube = mul(&u.e, mul(&u.e, u.y, u.y), u.y);
    input_grads[0] = mul(&u.e, times(&u.e, u.dy, -0.5), cube);
    return u.e.status;
}

DW__GRADIENT(dw__gradient_reciprocal) {
    (void)needed;
    unary u = open_unary(graph, node, output_grads);
    input_grads[0] = mul(&u.e, neg(&u.e, u.dy), mul(&u.e, u.y, u.y));
    return u.e.status;
}

DW__GRADIENT(dw__gradient_sin) {
    (void)needed;
    unary u = open_unary(graph, node, output_grads);
    input_grads[0] = mul(&u.e, u.dy, dw__emit_unary(&u.e, DW_OP_COS, u.x));
    return u.e.status;
}

DW__GRADIENT(dw__gradient_cos) {
    (void)needed;
    unary u = open_unary(graph, node, output_grads);
    input_grads[0] = mul(&u.e, neg(&u.e, u.dy), dw__emit_unary(&u.e, DW_OP_SIN, u.x));
    return u.e.status;
}

DW__GRADIENT(dw__gradient_tanh) {
    (void)needed;
    unary u = open_wide(graph, node, output_grads);
    dw_value dx = mul(&u.e, u.dy, number_minus(&u.e, 1.0, mul(&u.e, u.y, u.y)));
    input_grads[0] = round_wide(&u, node, dx);
    return u.e.status;
}

/* d erf(x)/dx = 2/sqrt(pi) * exp(-x^2) */
DW__GRADIENT(dw__gradient_erf) {
    (void)needed;
    unary u = open_unary(graph, node, output_grads);
    dw_value density = dw__emit_unary(&u.e, DW_OP_EXP, neg(&u.e, mul(&u.e, u.x, u.x)));
    /* BF16 and F16 cannot represent this number. */
    dw_value slope = times(&u.e, dw__emit_widen(&u.e, density), 1.12837916709551257390);
    input_grads[0] = mul(&u.e, u.dy, round_wide(&u, node, slope));
    return u.e.status;
}

DW__GRADIENT(dw__gradient_sigmoid) {
    (void)needed;
    unary u = open_wide(graph, node, output_grads);
    dw_value slope = mul(&u.e, u.y, number_minus(&u.e, 1.0, u.y));
    input_grads[0] = round_wide(&u, node, mul(&u.e, u.dy, slope));
    return u.e.status;
}

DW__GRADIENT(dw__gradient_cast) {
    (void)needed;
    unary u = open_unary(graph, node, output_grads);
    input_grads[0] = dw__emit_cast(&u.e, u.dy, dw_value_dtype(graph, u.x));
    return u.e.status;
}

/* ---- two operands --------------------------------------------------------------------------- */

DW__GRADIENT(dw__gradient_add) {
    (void)graph, (void)node;
    for (int i = 0; i < 2; i++)
        if (needed[i]) input_grads[i] = output_grads[0];
    return DW_OK;
}

DW__GRADIENT(dw__gradient_sub) {
    (void)node;
    dw__emitter e = {graph, DW_OK};
    if (needed[0]) input_grads[0] = output_grads[0];
    if (needed[1]) input_grads[1] = neg(&e, output_grads[0]);
    return e.status;
}

DW__GRADIENT(dw__gradient_mul) {
    dw__emitter e = {graph, DW_OK};
    dw_value a = dw_node_input(graph, node, 0), b = dw_node_input(graph, node, 1);
    if (needed[0]) input_grads[0] = mul(&e, output_grads[0], b);
    if (needed[1]) input_grads[1] = mul(&e, output_grads[0], a);
    return e.status;
}

DW__GRADIENT(dw__gradient_div) {
    dw__emitter e = {graph, DW_OK};
    dw_value b = dw_node_input(graph, node, 1), y = dw_node_output(graph, node, 0);
    dw_value dy = output_grads[0], da = dw__emit_binary(&e, DW_OP_DIV, dy, b);
    dw_dtype dtype = dw_value_dtype(graph, b);
    bool half = dtype == DW_BF16 || dtype == DW_F16; /* PyTorch computes (y / b) * dy */
    if (needed[0]) input_grads[0] = da;
    if (needed[1])
        input_grads[1] = half ? mul(&e, neg(&e, dy), dw__emit_binary(&e, DW_OP_DIV, y, b))
                              : neg(&e, mul(&e, da, y));
    return e.status;
}

/* da = dy * b * a^(b-1), or 0 if b is 0. db = dy * y * log(a), or 0 if y is 0. The zeros are the limits; 0 *
 * inf would be NaN. */
DW__GRADIENT(dw__gradient_pow) {
    dw__emitter e = {graph, DW_OK};
    dw_value a = dw_node_input(graph, node, 0), b = dw_node_input(graph, node, 1);
    dw_value y = dw_node_output(graph, node, 0), zero = dw__emit_like(&e, y, 0.0);
    if (needed[0]) {
        dw_value less = dw__emit_with_number(&e, DW_OP_SUB, b, 1.0);
        dw_value slope = mul(&e, b, dw__emit_binary(&e, DW_OP_POW, a, less));
        dw_value flat = dw__emit_binary(&e, DW_OP_EQ, b, zero);
        input_grads[0] = dw__emit_select(&e, flat, zero, mul(&e, output_grads[0], slope));
    }
    if (needed[1]) {
        dw_value slope = mul(&e, y, dw__emit_unary(&e, DW_OP_LOG, a));
        dw_value flat = dw__emit_binary(&e, DW_OP_EQ, y, zero);
        input_grads[1] = dw__emit_select(&e, flat, zero, mul(&e, output_grads[0], slope));
    }
    return e.status;
}

/* The chosen operand receives dy; equal operands receive half each. `wins` compares an operand with the other one. */
static dw_status gradient_of_choice(dw_graph *graph, dw_node node, dw_op wins, dw_value dy,
                                    const bool *needed, dw_value *input_grads) {
    dw__emitter e = {graph, DW_OK};
    dw_value half = times(&e, dy, 0.5), zero = dw__emit_like(&e, dy, 0.0);
    for (uint32_t i = 0; i < 2; i++) {
        if (!needed[i]) continue;
        dw_value x = dw_node_input(graph, node, i), other = dw_node_input(graph, node, 1 - i);
        dw_value tie = dw__emit_binary(&e, DW_OP_EQ, x, other);
        dw_value lost = dw__emit_select(&e, tie, half, zero);
        dw_value won = dw__emit_binary(&e, wins, x, other);
        input_grads[i] = dw__emit_select(&e, won, dy, lost);
    }
    return e.status;
}

DW__GRADIENT(dw__gradient_max) {
    return gradient_of_choice(graph, node, DW_OP_GT, output_grads[0], needed, input_grads);
}

DW__GRADIENT(dw__gradient_min) {
    return gradient_of_choice(graph, node, DW_OP_LT, output_grads[0], needed, input_grads);
}

/* rem(a, b) = a - b*floor(a/b); the derivative of floor is 0. */
DW__GRADIENT(dw__gradient_rem) {
    dw__emitter e = {graph, DW_OK};
    dw_value a = dw_node_input(graph, node, 0), b = dw_node_input(graph, node, 1);
    if (needed[0]) input_grads[0] = output_grads[0];
    if (needed[1]) {
        dw_value times_b = dw__emit_unary(&e, DW_OP_FLOOR, dw__emit_binary(&e, DW_OP_DIV, a, b));
        input_grads[1] = neg(&e, mul(&e, output_grads[0], times_b));
    }
    return e.status;
}

DW__GRADIENT(dw__gradient_select) {
    dw__emitter e = {graph, DW_OK};
    dw_value condition = dw_node_input(graph, node, 0), dy = output_grads[0];
    dw_value zero = dw__emit_like(&e, dy, 0.0);
    if (needed[1]) input_grads[1] = dw__emit_select(&e, condition, dy, zero);
    if (needed[2]) input_grads[2] = dw__emit_select(&e, condition, zero, dy);
    return e.status;
}
