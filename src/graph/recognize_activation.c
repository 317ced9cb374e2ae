/* Recognises GELU (both forms), SiLU and SwiGLU written as primitives. */
#include "graph/recognize.h"

#define SQRT_2_OVER_PI 0.79788456080286535588
#define SQRT_HALF 0.70710678118654752440
#define GELU_CUBIC 0.044715

/* A flattened product of scalars: coefficient * factors[0] * factors[1] * ... */
#define MAX_FACTORS 6
typedef struct product {
    double coefficient;
    int count;
    dw_value factors[MAX_FACTORS];
} product;

static bool add_factor(product *p, dw_value factor, int times) {
    for (; times > 0; times--) {
        if (p->count == MAX_FACTORS) return false;
        p->factors[p->count++] = factor;
    }
    return true;
}

/* Adds x^2 or x^3 as two or three factors. */
static bool add_power(const dw__matcher *m, product *p, dw_node pow) {
    double exponent;
    if (!dw__is_splat(m->e.graph, dw__operand(m, pow, 1), &exponent)) return false;
    if (exponent != 2.0 && exponent != 3.0) return false;
    return add_factor(p, dw__operand(m, pow, 0), (int)exponent);
}

/* Looks through a cast from one floating-point type to another. A chain in BF16 or F16 computes with a number that its
 * type cannot represent in F32, between two casts. */
static dw_value uncast(const dw__matcher *m, dw_value value) {
    const dw_node cast = dw__swallow(m, value, DW_OP_CAST);
    if (cast == DW_NONE) return value;
    const dw_value x = dw__operand(m, cast, 0);
    return dw__dtype_is_float(dw_value_dtype(m->e.graph, x)) ? x : value;
}

/* Flattens `value` into `p`. An inner result with other readers becomes a single factor. */
static bool flatten(const dw__matcher *m, dw_value value, int depth, product *p) {
    double number;
    if (depth == DW__LOOK_THROUGH) return false;
    if (dw__is_splat(m->e.graph, value, &number)) {
        p->coefficient *= number;
        return true;
    }
    if (depth > 0 && !dw__single(m, value)) return add_factor(p, value, 1);
    if (uncast(m, value) != value) return flatten(m, uncast(m, value), depth + 1, p);
    dw_node node = dw__made_by(m->e.graph, value, DW_OP_MUL);
    if (node != DW_NONE)
        return flatten(m, dw__operand(m, node, 0), depth + 1, p) &&
               flatten(m, dw__operand(m, node, 1), depth + 1, p);
    node = dw__made_by(m->e.graph, value, DW_OP_DIV);
    if (node != DW_NONE && dw__is_splat(m->e.graph, dw__operand(m, node, 1), &number)) {
        p->coefficient /= number;
        return flatten(m, dw__operand(m, node, 0), depth + 1, p);
    }
    node = dw__made_by(m->e.graph, value, DW_OP_POW);
    if (node != DW_NONE && add_power(m, p, node)) return true;
    return add_factor(p, value, 1);
}

static bool flatten_inner(const dw__matcher *m, dw_value value, product *p) {
    *p = (product){.coefficient = 1.0};
    return flatten(m, value, 1, p);
}

/* value = coefficient * x^power */
static bool is_monomial(const dw__matcher *m, dw_value value, dw_value x, int power,
                        double coefficient) {
    product p;
    if (!flatten_inner(m, value, &p) || p.count != power || !dw__near(p.coefficient, coefficient))
        return false;
    for (int i = 0; i < power; i++)
        if (p.factors[i] != x) return false;
    return true;
}

/* Matches value = a + b in either order, where `b` is GELU_CUBIC * x^power. Returns a. */
static bool split_cubic(const dw__matcher *m, dw_value value, dw_value x, int power, dw_value *a) {
    dw_node add = dw__swallow(m, value, DW_OP_ADD);
    if (add == DW_NONE) return false;
    for (uint32_t i = 0; i < 2; i++) {
        if (!is_monomial(m, dw__operand(m, add, 1 - i), x, power, GELU_CUBIC)) continue;
        *a = dw__operand(m, add, i);
        return true;
    }
    return false;
}

/* value = sqrt(2/pi) * (x + 0.044715 x^3), or sqrt(2/pi) * x * (1 + 0.044715 x^2) */
static bool is_tanh_argument(const dw__matcher *m, dw_value value, dw_value x) {
    product p;
    dw_value a;
    double one;
    if (!flatten_inner(m, value, &p) || !dw__near(p.coefficient, SQRT_2_OVER_PI)) return false;
    if (p.count == 1) return split_cubic(m, p.factors[0], x, 3, &a) && a == x;
    if (p.count != 2) return false;
    int other = p.factors[0] == x ? 1 : 0;
    return p.factors[1 - other] == x && split_cubic(m, p.factors[other], x, 2, &a) &&
           dw__is_splat(m->e.graph, a, &one) && one == 1.0;
}

/* Matches value = 1 + f(u). Returns the form of GELU of `x`, or NULL. */
static const char *gelu_form(const dw__matcher *m, dw_value value, dw_value x) {
    dw_value inner;
    double one;
    if (!dw__single(m, value) || !dw__with_number(m, value, DW_OP_ADD, &inner, &one) || one != 1.0)
        return NULL;
    dw_node node = dw__swallow(m, inner, DW_OP_TANH);
    if (node != DW_NONE) return is_tanh_argument(m, dw__operand(m, node, 0), x) ? "tanh" : NULL;
    node = dw__swallow(m, inner, DW_OP_ERF);
    if (node == DW_NONE) return NULL;
    return is_monomial(m, dw__operand(m, node, 0), x, 1, SQRT_HALF) ? "none" : NULL;
}

/* 0.5 * x * (1 + tanh(..)) or 0.5 * x * (1 + erf(x / sqrt 2)), multiplied in any order */
dw_value dw__recognize_gelu(dw__matcher *m) {
    product p = {.coefficient = 1.0};
    dw_value root = dw_node_output(m->e.graph, m->root, 0);
    if (!flatten(m, root, 0, &p) || p.count != 2 || !dw__near(p.coefficient, 0.5)) return DW_NONE;
    for (int i = 0; i < 2; i++) {
        const char *form = gelu_form(m, p.factors[1 - i], p.factors[i]);
        if (!form || dw_value_dtype(m->e.graph, p.factors[i]) != dw_value_dtype(m->e.graph, root))
            continue;
        dw_attr attr = dw_attr_string(DW_ATTR_KEY_APPROXIMATE, form);
        return dw__emit(&m->e, DW_OP_GELU, 1, &p.factors[i], 1, &attr);
    }
    return DW_NONE;
}

dw_value dw__recognize_silu(dw__matcher *m) {
    for (uint32_t i = 0; i < 2; i++) {
        dw_value x = dw__operand(m, m->root, i);
        dw_node sigmoid = dw__swallow(m, dw__operand(m, m->root, 1 - i), DW_OP_SIGMOID);
        if (sigmoid != DW_NONE && dw__operand(m, sigmoid, 0) == x)
            return dw__emit_unary(&m->e, DW_OP_SILU, x);
    }
    return DW_NONE;
}

dw_value dw__recognize_swiglu(dw__matcher *m) {
    for (uint32_t i = 0; i < 2; i++) {
        dw_node silu = dw__swallow(m, dw__operand(m, m->root, i), DW_OP_SILU);
        dw_value up = dw__operand(m, m->root, 1 - i);
        double number;
        if (silu != DW_NONE && !dw__is_splat(m->e.graph, up, &number))
            return dw__emit_binary(&m->e, DW_OP_SWIGLU, dw__operand(m, silu, 0), up);
    }
    return DW_NONE;
}
