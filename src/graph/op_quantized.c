/* quantized_linear: its matmuls, forward and backward, and how each operand is rounded.
 *
 *              operand, blocks along     bf16     mxfp8          nvfp4
 *     y  = x w^T    x  along K           BF16     E4M3 by 32     E2M1 by 16
 *                   w  along K           BF16     E4M3 by 32     E2M1 by 16 x 16
 *     dx = dy w     dy along N           BF16     E4M3 by 32     E2M1 by 16, rounded stochastically
 *                   w  along N           BF16     E4M3 by 32     E2M1 by 16 x 16: the same numbers as forward's
 *     dw = dy^T x   dy along rows        BF16     E4M3 by 32     E2M1 by 16, rotated, rounded stochastically
 *                   x  along rows        BF16     E4M3 by 32     E2M1 by 16, rotated
 *
  * Blocks follow the axis that the matmul sums over, so a tensor that is read along both axes is quantized
  * twice. A tensor that is read the same way twice (BF16, square blocks, one x of several layers) yields equal
  * nodes, which the pass `common` merges. The bias and its gradient are not rounded.
  */
#include "graph/op_gradient.h"
#include <string.h>

typedef struct recipe {
    const char *format;
    bool tensor_scale; /* matmul results are multiplied by the tensor scales of both operands */
    bool blocks;       /* values are in blocks, so the axis matters */
    bool nvfp4;
} recipe;

static recipe recipe_of(const dw_graph *graph, dw_node node) {
    const char *name = dw_node_attr(graph, node, DW_ATTR_KEY_RECIPE)->string;
    bool nvfp4 = strcmp(name, "nvfp4") == 0;
    return (recipe){name, nvfp4, strcmp(name, "bf16") != 0, nvfp4};
}

typedef enum operand_kind { ACTIVATION = 0, WEIGHT = 1, GRADIENT = 2, ROTATED = 4 } operand_kind;

typedef struct quantized {
    dw_value y, scale;
} quantized;

/* Quantizes the matrix `x` in blocks along `axis`. `kind` has bits of operand_kind. */
static quantized quantize(dw__emitter *e, const recipe *r, dw_value x, int axis, int kind,
                          dw_value seed, int64_t stream) {
    dw_attr attrs[6];
    uint32_t count = 0;
    bool square = r->nvfp4 && (kind & WEIGHT), stochastic = r->nvfp4 && (kind & GRADIENT);
    attrs[count++] = dw_attr_string(DW_ATTR_KEY_FORMAT, r->format);
    attrs[count++] = dw_attr_int(DW_ATTR_KEY_AXIS, r->blocks && !square ? axis : 1);
    if (square) attrs[count++] = dw_attr_int(DW_ATTR_KEY_SQUARE, 1);
    if (r->nvfp4 && (kind & ROTATED)) attrs[count++] = dw_attr_int(DW_ATTR_KEY_HADAMARD, 1);
    if (stochastic) {
        attrs[count++] = dw_attr_int(DW_ATTR_KEY_STOCHASTIC, 1);
        attrs[count++] = dw_attr_int(DW_ATTR_KEY_STREAM, stream);
    }
    dw_value operands[] = {x, stochastic ? seed : DW_NONE};
    dw_node node = dw__emit_node(e, DW_OP_QUANTIZE, 2, operands, count, attrs);
    if (e->status != DW_OK) return (quantized){DW_NONE, DW_NONE};
    return (quantized){dw_node_output(e->graph, node, 0), dw_node_output(e->graph, node, 1)};
}

/* Computes a b in F32 with shape [.., columns of b], applies the tensor scales and casts to `dtype`. */
static dw_value multiply(dw__emitter *e, const recipe *r, quantized a, quantized b,
                         bool transpose_a, bool transpose_b, const dw__type *like) {
    dw_attr attrs[3];
    uint32_t count = 0;
    if (transpose_a) attrs[count++] = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_A, 1);
    if (transpose_b) attrs[count++] = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_B, 1);
    attrs[count++] = (dw_attr){.key = DW_ATTR_KEY_DTYPE, .integer = DW_F32};
    dw_value y = dw__emit(e, DW_OP_MATMUL, 2, (dw_value[]){a.y, b.y}, count, attrs);
    y = dw__emit_reshape(e, y, like->rank, like->shape);
    if (!r->tensor_scale) return y;
    dw_value scale = dw__emit_binary(e, DW_OP_MUL, a.scale, b.scale);
    return dw__emit_binary(e, DW_OP_MUL, y, dw__emit_broadcast_like(e, scale, y));
}

dw_status dw__expand_quantized_linear(dw_graph *graph, const dw_graph *source, dw_node node,
                                      const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    recipe r = recipe_of(source, node);
    bool transpose_w = dw_node_int(source, node, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0;
    dw__type type = dw__type_of(graph, inputs[0]), weight = dw__type_of(graph, inputs[1]);
    type.shape[type.rank - 1] = weight.shape[transpose_w ? 0 : 1];
    quantized x = quantize(&e, &r, dw__emit_flatten_rows(&e, inputs[0]), 1, ACTIVATION, DW_NONE, 0);
    quantized w = quantize(&e, &r, inputs[1], transpose_w ? 1 : 0, WEIGHT, DW_NONE, 0);
    dw_value y = multiply(&e, &r, x, w, false, transpose_w, &type);
    if (inputs[2] != DW_NONE) {
        dw_value bias = dw__emit_widen(&e, inputs[2]);
        y = dw__emit_binary(&e, DW_OP_ADD, y, dw__emit_broadcast_like(&e, bias, y));
    }
    outputs[0] = dw__emit_cast(&e, y, dw__output_dtype(source, node, 0));
    return e.status;
}

DW__GRADIENT(dw__gradient_quantized_linear) {
    dw__emitter e = {graph, DW_OK};
    recipe r = recipe_of(graph, node);
    bool transpose_w = dw_node_int(graph, node, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0;
    int64_t stream = dw_node_int(graph, node, DW_ATTR_KEY_STREAM, 0);
    dw_value x = dw_node_input(graph, node, 0), w = dw_node_input(graph, node, 1);
    dw_value seed = dw_node_input(graph, node, 3), dy = dw__emit_flatten_rows(&e, output_grads[0]);
    dw__type x_type = dw__type_of(graph, x), w_type = dw__type_of(graph, w);
    if (needed[0]) {
        quantized dy_rows = quantize(&e, &r, dy, 1, GRADIENT, seed, stream);
        quantized weight = quantize(&e, &r, w, transpose_w ? 0 : 1, WEIGHT, DW_NONE, 0);
        dw_value dx = multiply(&e, &r, dy_rows, weight, false, !transpose_w, &x_type);
        input_grads[0] = dw__emit_cast(&e, dx, x_type.dtype);
    }
    if (needed[1]) {
        quantized columns =
            quantize(&e, &r, dw__emit_flatten_rows(&e, x), 0, ACTIVATION | ROTATED, DW_NONE, 0);
        quantized dy_columns = quantize(&e, &r, dy, 0, GRADIENT | ROTATED, seed, stream + 1);
        dw_value dw = transpose_w ? multiply(&e, &r, dy_columns, columns, true, false, &w_type)
                                  : multiply(&e, &r, columns, dy_columns, true, false, &w_type);
        input_grads[1] = dw__emit_cast(&e, dw, w_type.dtype);
    }
    if (needed[2]) input_grads[2] = dw__emit_sum_leading(&e, output_grads[0], 1);
    return e.status;
}

/* Straight-through estimator: the gradient treats y as x / scale. */
DW__GRADIENT(dw__gradient_quantize) {
    (void)needed;
    dw__emitter e = {graph, DW_OK};
    dw__type x = dw__type_of(graph, dw_node_input(graph, node, 0));
    if (output_grads[0] == DW_NONE) return DW_OK; /* only the scale has a gradient */
    if (dw_node_int(graph, node, DW_ATTR_KEY_HADAMARD, 0))
        return dw__fail(DW_UNSUPPORTED,
                        "node %u (quantize) with hadamard=1 has no gradient: differentiate "
                        "quantized_linear, which has its own",
                        node);
    dw_value dx = dw__emit_cast(&e, output_grads[0], DW_F32);
    dw_value scale = dw_node_output(graph, node, 1);
    dx = dw__emit_binary(&e, DW_OP_DIV, dx, dw__emit_broadcast_like(&e, scale, dx));
    input_grads[0] = dw__emit_cast(&e, dx, x.dtype);
    return e.status;
}
