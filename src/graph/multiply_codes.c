/* Rewrites products of FP8 values as products of their codes, for targets that multiply codes.
 *
 *     a, s = quantize(x) {fp8-tensor}     b, t = quantize(w) {fp8-tensor}
 *     y = matmul(a, b) * (s * t)
 *
 * becomes quantize_tensor of x and of w, and multiply_codes of the orientations in which the axis that is summed over is
 * the last one. A cast of y becomes the product's own rounding. */
#include "graph/passes.h"
#include "number/scheme_sets.h"
#include <string.h>

/* An operand of a product: the node that quantizes it. */
static dw_node quantized_by(const dw_graph *graph, dw_value value) {
    const dw_node node = dw__made_by(graph, value, DW_OP_QUANTIZE);
    dw_scheme scheme;
    if (node == DW_NONE ||
        dw_scheme_find(dw_node_attr(graph, node, DW_ATTR_KEY_SCHEME)->string, &scheme) != DW_OK ||
        !dw__scheme_in(scheme, dw__fp8_tensor_schemes))
        return DW_NONE;
    return node;
}

static dw_value look_through(const dw_graph *graph, dw_value value, dw_op op) {
    const dw_node node = dw__made_by(graph, value, op);
    return node == DW_NONE ? value : dw_node_input(graph, node, 0);
}

/* Returns whether `scale` is the product of the scales of two quantize nodes, in either order. */
static bool is_scale_of(const dw_graph *graph, dw_value scale, dw_node a, dw_node b) {
    scale = look_through(graph, scale, DW_OP_BROADCAST);
    scale = look_through(graph, scale, DW_OP_RESHAPE);
    const dw_node product = dw__made_by(graph, scale, DW_OP_MUL);
    if (product == DW_NONE) return false;
    const dw_value s = dw_node_output(graph, a, 1), t = dw_node_output(graph, b, 1),
                   first = dw_node_input(graph, product, 0),
                   second = dw_node_input(graph, product, 1);
    return (first == s && second == t) || (first == t && second == s);
}

typedef struct factor {
    dw_value codes, scale; /* the axis that is summed over is the last one of the codes */
} factor;

static factor codes_of(dw__emitter *e, dw_node quantize, bool turned) {
    const dw_attr scheme = dw_attr_string(
        DW_ATTR_KEY_SCHEME, dw_node_attr(e->graph, quantize, DW_ATTR_KEY_SCHEME)->string);
    const dw_value x = dw_node_input(e->graph, quantize, 0);
    const dw_node node = dw__emit_node(e, DW_OP_QUANTIZE_TENSOR, 1, &x, 1, &scheme);
    if (e->status != DW_OK) return (factor){DW_NONE, DW_NONE};
    return (factor){dw_node_output(e->graph, node, turned), dw_node_output(e->graph, node, 2)};
}

static dw_value multiply(dw__emitter *e, factor a, factor b, dw_dtype dtype) {
    const dw_attr type = {.key = DW_ATTR_KEY_DTYPE, .integer = dtype};
    return dw__emit(e, DW_OP_MULTIPLY_CODES, 4, (dw_value[]){a.codes, b.codes, a.scale, b.scale}, 1,
                    &type);
}

/* y = reshape(matmul) * scale */
static dw_status rewrite_product(dw_graph *graph, dw_node node, dw_value *replacement) {
    for (int side = 0; side < 2; side++) {
        const dw_value scaled = dw_node_input(graph, node, side);
        const dw_node matmul =
            dw__made_by(graph, look_through(graph, scaled, DW_OP_RESHAPE), DW_OP_MATMUL);
        if (matmul == DW_NONE) continue;
        const dw_node a = quantized_by(graph, dw_node_input(graph, matmul, 0)),
                      b = quantized_by(graph, dw_node_input(graph, matmul, 1));
        if (a == DW_NONE || b == DW_NONE ||
            !is_scale_of(graph, dw_node_input(graph, node, 1 - side), a, b))
            continue;
        dw__emitter e = {graph, DW_OK};
        const dw__type like = dw__type_of(graph, scaled);
        const dw_value y = multiply(
            &e, codes_of(&e, a, dw_node_int(graph, matmul, DW_ATTR_KEY_TRANSPOSE_A, 0)),
            codes_of(&e, b, !dw_node_int(graph, matmul, DW_ATTR_KEY_TRANSPOSE_B, 0)), DW_F32);
        *replacement = dw__emit_reshape(&e, y, like.rank, like.shape);
        return e.status;
    }
    return DW_OK;
}

/* The product is made again in the cast's type; if something else reads the one in F32, both stay. */
static dw_status rewrite_cast(dw_graph *graph, dw_node node, dw_value *replacement) {
    const dw_dtype dtype = dw_value_dtype(graph, dw_node_output(graph, node, 0));
    const dw_value x = dw_node_input(graph, node, 0);
    const dw_node product =
        dw__made_by(graph, look_through(graph, x, DW_OP_RESHAPE), DW_OP_MULTIPLY_CODES);
    if (product == DW_NONE || (dtype != DW_BF16 && dtype != DW_F16)) return DW_OK;
    dw__emitter e = {graph, DW_OK};
    const dw__type like = dw__type_of(graph, x);
    const factor a = {dw_node_input(graph, product, 0), dw_node_input(graph, product, 2)},
                 b = {dw_node_input(graph, product, 1), dw_node_input(graph, product, 3)};
    *replacement = dw__emit_reshape(&e, multiply(&e, a, b, dtype), like.rank, like.shape);
    return e.status;
}

static dw_status rule(dw__rewrite *rewrite, dw_node node, dw_value *replacements) {
    bool *changed = rewrite->context;
    const dw_value before = replacements[0];
    dw_status status = DW_OK;
    if (dw_node_op(rewrite->graph, node) == DW_OP_MUL)
        status = rewrite_product(rewrite->graph, node, &replacements[0]);
    else if (dw_node_op(rewrite->graph, node) == DW_OP_CAST)
        status = rewrite_cast(rewrite->graph, node, &replacements[0]);
    *changed |= replacements[0] != before;
    return status;
}

dw_status dw__multiply_codes(dw_graph **graph, bool *changed) {
    *changed = false;
    return dw__rewrite_each(graph, rule, changed);
}
