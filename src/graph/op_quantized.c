/* quantized_linear: its matmuls, forward and backward, and how each operand is rounded.
 *
 *                          reads, blocks along
 *     y  = x w^T           forward_x and forward_w along K
 *     dx = dy w            dgrad_dy and dgrad_w along N
 *     dw = dy^T x          wgrad_dy and wgrad_x along rows
 *
 * Blocks follow the axis that the matmul sums over, so a tensor that is read along both axes is quantized
 * twice. A tensor that is read the same way twice (BF16, square blocks, one x of several layers) yields equal
 * nodes, which the pass `common` merges. The bias and its gradient are not rounded.
 */
#include "graph/layer_precision.h"
#include "graph/op_gradient.h"

static dw_operand_precision precision_of(const dw_graph *graph, dw_node node,
                                         dw_linear_operand operand) {
    dw_operand_precision precision = {0};
    (void)dw__operand_read(dw_node_attr(graph, node, dw__operand_key(operand))->string,
                           &precision); /* inference has read it before */
    return precision;
}

typedef struct quantized {
    dw_value y, scale; /* scale DW_NONE: the scheme has no scale of the tensor */
    dw_value blocks;   /* of fp8-block, whose y are codes: the scales of blocks; else DW_NONE */
} quantized;

/* Appends `op`, quantize or quantization_error, for the matrix `x` with blocks along `axis`. */
static dw_node round_matrix(dw__emitter *e, dw_op op, dw_operand_precision precision, dw_value x,
                            int axis, dw_value seed, int64_t stream) {
    dw_attr attrs[7];
    uint32_t count = 0;
    const dw_scheme_info *scheme = dw_scheme_describe(precision.scheme);
    /* One axis where it makes no difference, so that equal nodes are merged. */
    bool along = scheme->block > 0 && !precision.square;
    attrs[count++] = dw_attr_string(DW_ATTR_KEY_SCHEME, scheme->name);
    attrs[count++] = dw_attr_int(DW_ATTR_KEY_AXIS, along ? axis : 1);
    if (precision.square) attrs[count++] = dw_attr_int(DW_ATTR_KEY_SQUARE, 1);
    if (precision.hadamard) attrs[count++] = dw_attr_int(DW_ATTR_KEY_HADAMARD, 1);
    if (precision.stochastic) {
        attrs[count++] = dw_attr_int(DW_ATTR_KEY_STOCHASTIC, 1);
        attrs[count++] = dw_attr_int(DW_ATTR_KEY_STREAM, stream);
    }
    const char *rule = dw__rule_word(precision.scale_rule);
    if (rule) attrs[count++] = dw_attr_string(DW_ATTR_KEY_SCALE_RULE, rule);
    dw_value operands[] = {x, precision.stochastic ? seed : DW_NONE};
    return dw__emit_node(e, op, 2, operands, count, attrs);
}

/* The values of fp8-block have more bits than BF16, so its products are of codes from the beginning. One node makes the
 * codes of both orientations, of which each product reads the one whose last axis is summed over. */
static quantized quantize_fp8_block(dw__emitter *e, dw_operand_precision precision, dw_value x,
                                    int axis) {
    const dw_attr attrs[] = {
        dw_attr_string(DW_ATTR_KEY_SCHEME, dw_scheme_name(DW_SCHEME_FP8_BLOCK)),
        dw_attr_int(DW_ATTR_KEY_SQUARE, 1)};
    const uint32_t first = axis == 1 ? 0 : 2;
    const dw_node node =
        dw__emit_node(e, DW_OP_QUANTIZE_TILES, 1, &x, precision.square ? 2 : 1, attrs);
    if (e->status != DW_OK) return (quantized){DW_NONE, DW_NONE, DW_NONE};
    return (quantized){dw_node_output(e->graph, node, first), DW_NONE,
                       dw_node_output(e->graph, node, first + 1)};
}

/* Quantizes the matrix `x` in blocks along `axis` as `operand` of the layer is quantized. */
static quantized quantize(dw__emitter *e, dw_operand_precision precision, dw_value x, int axis,
                          dw_value seed, int64_t stream) {
    if (precision.scheme == DW_SCHEME_FP8_BLOCK) return quantize_fp8_block(e, precision, x, axis);
    const dw_scheme_info *scheme = dw_scheme_describe(precision.scheme);
    dw_node node = round_matrix(e, DW_OP_QUANTIZE, precision, x, axis, seed, stream);
    if (e->status != DW_OK) return (quantized){DW_NONE, DW_NONE, DW_NONE};
    const bool scaled = scheme->tensor_scale || scheme->block == DW_BLOCK_TENSOR;
    return (quantized){dw_node_output(e->graph, node, 0),
                       scaled ? dw_node_output(e->graph, node, 1) : DW_NONE, DW_NONE};
}

static dw_value multiply_codes(dw__emitter *e, quantized a, quantized b) {
    const dw_attr dtype = {.key = DW_ATTR_KEY_DTYPE, .integer = DW_F32};
    const dw_value inputs[] = {a.y, b.y, DW_NONE, DW_NONE, a.blocks, b.blocks};
    return dw__emit(e, DW_OP_MULTIPLY_CODES, DW_COUNT(inputs), inputs, 1, &dtype);
}

/* Computes a b in F32 with shape [.., columns of b], applies the tensor scales and casts to `dtype`. */
static dw_value multiply(dw__emitter *e, quantized a, quantized b, bool transpose_a,
                         bool transpose_b, const dw__type *like) {
    dw_attr attrs[3];
    uint32_t count = 0;
    if (transpose_a) attrs[count++] = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_A, 1);
    if (transpose_b) attrs[count++] = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_B, 1);
    attrs[count++] = (dw_attr){.key = DW_ATTR_KEY_DTYPE, .integer = DW_F32};
    dw_value y = a.blocks != DW_NONE
                     ? multiply_codes(e, a, b)
                     : dw__emit(e, DW_OP_MATMUL, 2, (dw_value[]){a.y, b.y}, count, attrs);
    y = dw__emit_reshape(e, y, like->rank, like->shape);
    if (a.scale == DW_NONE && b.scale == DW_NONE) return y;
    dw_value scale = a.scale == DW_NONE   ? b.scale
                     : b.scale == DW_NONE ? a.scale
                                          : dw__emit_binary(e, DW_OP_MUL, a.scale, b.scale);
    return dw__emit_binary(e, DW_OP_MUL, y, dw__emit_broadcast_like(e, scale, y));
}

dw_status dw__expand_quantized_linear(dw_graph *graph, const dw_graph *source, dw_node node,
                                      const dw_value *inputs, dw_value *outputs) {
    dw__emitter e = {graph, DW_OK};
    bool transpose_w = dw_node_int(source, node, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0;
    dw__type type = dw__type_of(graph, inputs[0]), weight = dw__type_of(graph, inputs[1]);
    type.shape[type.rank - 1] = weight.shape[transpose_w ? 0 : 1];
    quantized x = quantize(&e, precision_of(source, node, DW_FORWARD_X),
                           dw__emit_flatten_rows(&e, inputs[0]), 1, DW_NONE, 0);
    quantized w = quantize(&e, precision_of(source, node, DW_FORWARD_W), inputs[1],
                           transpose_w ? 1 : 0, DW_NONE, 0);
    dw_value y = multiply(&e, x, w, false, transpose_w, &type);
    if (inputs[2] != DW_NONE) {
        dw_value bias = dw__emit_widen(&e, inputs[2]);
        y = dw__emit_binary(&e, DW_OP_ADD, y, dw__emit_broadcast_like(&e, bias, y));
    }
    outputs[0] = dw__emit_cast(&e, y, dw__output_dtype(source, node, 0));
    return e.status;
}

/* The statistics of the operands whose matmuls are needed. `dy`: the gradient of y, as rows. */
static dw_value statistics_of(dw__emitter *e, dw_node node, dw_value dy, bool dgrad, bool wgrad) {
    dw_graph *graph = e->graph;
    const bool transpose_w = dw_node_int(graph, node, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0;
    const int64_t stream = dw_node_int(graph, node, DW_ATTR_KEY_STREAM, 0);
    const dw_value w = dw_node_input(graph, node, 1), seed = dw_node_input(graph, node, 3);
    dw_layer_precision layer;
    for (int i = 0; i < DW_LINEAR_OPERANDS; i++)
        layer.operand[i] = precision_of(graph, node, (dw_linear_operand)i);
    const dw_value x = dw__emit_flatten_rows(e, dw_node_input(graph, node, 0));
    const struct {
        dw_value matrix;
        int axis;
        bool needed;
        int64_t stream;
    } operands[DW_LINEAR_OPERANDS] = {
        [DW_FORWARD_X] = {x, 1, true, 0},           [DW_FORWARD_W] = {w, transpose_w, true, 0},
        [DW_DGRAD_DY] = {dy, 1, dgrad, stream},     [DW_DGRAD_W] = {w, !transpose_w, dgrad, 0},
        [DW_WGRAD_DY] = {dy, 0, wgrad, stream + 1}, [DW_WGRAD_X] = {x, 0, wgrad, 0}};
    dw_value parts[DW_LINEAR_OPERANDS];
    const dw_dim numbers = DW_OPERAND_STATISTICS;
    for (int i = 0; i < DW_LINEAR_OPERANDS; i++) {
        if (!operands[i].needed || !dw__operand_is_observed(&layer.operand[i])) {
            parts[i] = dw__emit_constant(e, DW_F64, 1, &numbers, 0.0);
            continue;
        }
        const dw_node made =
            round_matrix(e, DW_OP_QUANTIZATION_ERROR, layer.operand[i], operands[i].matrix,
                         operands[i].axis, seed, operands[i].stream);
        parts[i] = e->status == DW_OK ? dw_node_output(graph, made, 0) : DW_NONE;
    }
    const dw_attr axis = dw_attr_int(DW_ATTR_KEY_AXIS, 0);
    return dw__emit(e, DW_OP_CONCAT, DW_LINEAR_OPERANDS, parts, 1, &axis);
}

DW__GRADIENT(dw__gradient_quantized_linear) {
    dw__emitter e = {graph, DW_OK};
    bool transpose_w = dw_node_int(graph, node, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0;
    int64_t stream = dw_node_int(graph, node, DW_ATTR_KEY_STREAM, 0);
    dw_value x = dw_node_input(graph, node, 0), w = dw_node_input(graph, node, 1);
    dw_value seed = dw_node_input(graph, node, 3), dy = dw__emit_flatten_rows(&e, output_grads[0]);
    dw__type x_type = dw__type_of(graph, x), w_type = dw__type_of(graph, w);
    if (needed[0]) {
        quantized dy_rows =
            quantize(&e, precision_of(graph, node, DW_DGRAD_DY), dy, 1, seed, stream);
        quantized weight =
            quantize(&e, precision_of(graph, node, DW_DGRAD_W), w, transpose_w ? 0 : 1, DW_NONE, 0);
        dw_value dx = multiply(&e, dy_rows, weight, false, !transpose_w, &x_type);
        input_grads[0] = dw__emit_cast(&e, dx, x_type.dtype);
    }
    if (needed[1]) {
        quantized columns = quantize(&e, precision_of(graph, node, DW_WGRAD_X),
                                     dw__emit_flatten_rows(&e, x), 0, DW_NONE, 0);
        quantized dy_columns =
            quantize(&e, precision_of(graph, node, DW_WGRAD_DY), dy, 0, seed, stream + 1);
        dw_value dw = transpose_w ? multiply(&e, dy_columns, columns, true, false, &w_type)
                                  : multiply(&e, columns, dy_columns, true, false, &w_type);
        input_grads[1] = dw__emit_cast(&e, dw, w_type.dtype);
    }
    if (needed[2]) input_grads[2] = dw__emit_sum_leading(&e, output_grads[0], 1);
    if (needed[4]) input_grads[4] = statistics_of(&e, node, dy, needed[0], needed[1]);
    return e.status;
}

/* ---- rows in groups ---------------------------------------------------------------------------------- */

/* Multiplies rows by the matrix of their group in F32, and applies the scales. One scale serves all matrices, which are
 * quantized as one matrix of their rows: dw__multiply_codes takes the codes of both orientations from one node. */
static dw_value multiply_segments(dw__emitter *e, dw_operand_precision of_x, dw_value x,
                                  dw_operand_precision of_w, dw_value w, dw_value offsets,
                                  bool transpose_w) {
    dw__type type = dw__type_of(e->graph, w);
    const dw_dim rows = dw__emit_dim_product(e, 2, type.shape);
    const quantized left = quantize(e, of_x, x, 1, DW_NONE, 0),
                    right = quantize(e, of_w,
                                     dw__emit_reshape(e, w, 2, (dw_dim[]){rows, type.shape[2]}), 1,
                                     DW_NONE, 0);
    const dw_attr attr = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W, transpose_w);
    const dw_value operands[] = {
        dw__emit_cast(e, left.y, DW_F32),
        dw__emit_reshape(e, dw__emit_cast(e, right.y, DW_F32), 3, type.shape), offsets};
    const dw_value y = dw__emit(e, DW_OP_SEGMENT_LINEAR, 3, operands, 1, &attr),
                   scale = dw__emit_binary(e, DW_OP_MUL, left.scale, right.scale);
    return dw__emit_binary(e, DW_OP_MUL, y, dw__emit_broadcast_like(e, scale, y));
}

dw_status dw__expand_quantized_segment_linear(dw_graph *graph, const dw_graph *source, dw_node node,
                                              const dw_value *inputs, dw_value *outputs) {
    enum { X, W, OFFSETS, B };
    dw__emitter e = {graph, DW_OK};
    const bool transpose_w = dw_node_int(source, node, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0;
    dw_value y = multiply_segments(&e, precision_of(source, node, DW_FORWARD_X), inputs[X],
                                   precision_of(source, node, DW_FORWARD_W), inputs[W],
                                   inputs[OFFSETS], transpose_w);
    if (inputs[B] != DW_NONE) {
        const dw_attr axis = dw_attr_int(DW_ATTR_KEY_AXIS, 0);
        const dw_value index = dw__emit_group_of_rows(&e, inputs[OFFSETS],
                                                      dw__type_of(graph, inputs[X]).shape[0]),
                       bias =
                           dw__emit(&e, DW_OP_TAKE, 2,
                                    (dw_value[]){dw__emit_widen(&e, inputs[B]), index}, 1, &axis);
        y = dw__emit_binary(&e, DW_OP_ADD, y, bias);
    }
    outputs[0] = dw__emit_cast(&e, y, dw__output_dtype(source, node, 0));
    return e.status;
}

/* The matmul for the matrices would need both operands' codes across the rows, with each group padded to whole pieces of
 * 16 codes. Its operands are not rounded. */
DW__GRADIENT(dw__gradient_quantized_segment_linear) {
    enum { X, W, OFFSETS };
    dw__emitter e = {graph, DW_OK};
    const dw_value dy = output_grads[0], w = dw_node_input(graph, node, W),
                   offsets = dw_node_input(graph, node, OFFSETS);
    const bool transpose_w = dw_node_int(graph, node, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0;
    if (needed[X]) {
        const dw_value dx =
            multiply_segments(&e, precision_of(graph, node, DW_DGRAD_DY), dy,
                              precision_of(graph, node, DW_DGRAD_W), w, offsets, !transpose_w);
        input_grads[X] =
            dw__emit_cast(&e, dx, dw_value_dtype(graph, dw_node_input(graph, node, X)));
    }
    dw__emit_segment_gradients(&e, node, dy, needed, input_grads);
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
