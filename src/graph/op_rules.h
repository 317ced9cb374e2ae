/* The rule functions that the operation table names (op_table.c), by column of the table.
 *
 * dw__infer_* live in op_infer.c, dw__cost_* in op_cost.c, dw__gradient_* in op_gradient*.c and
 * dw__expand_* in op_expand*.c. Their contracts stand beside the table's columns in internal.h.
 */
#ifndef DW_GRAPH_OP_RULES_H
#define DW_GRAPH_OP_RULES_H

#include "graph/internal.h"

/* clang-format off */

typedef dw_status dw__infer_function(const dw__draft *draft, dw__inferred *out);
dw__infer_function dw__infer_elementwise, dw__infer_dropout, dw__infer_constant, dw__infer_size,
    dw__infer_iota, dw__infer_random_uniform, dw__infer_reshape, dw__infer_permute,
    dw__infer_broadcast, dw__infer_slice, dw__infer_pad, dw__infer_concat, dw__infer_take,
    dw__infer_take_along, dw__infer_scatter_add, dw__infer_put_along_add, dw__infer_reduce,
    dw__infer_arg_reduce, dw__infer_cumsum, dw__infer_sort, dw__infer_top_k, dw__infer_matmul,
    dw__infer_fused, dw__infer_gelu, dw__infer_softmax, dw__infer_softmax_backward,
    dw__infer_linear, dw__infer_quantize, dw__infer_quantize_blocks,
    dw__infer_dequantize_blocks, dw__infer_quantize_tensor, dw__infer_quantize_tiles,
    dw__infer_quantization_error,
    dw__infer_multiply_codes, dw__infer_segment_multiply_codes,
    dw__infer_quantized_linear,
    dw__infer_grouped_linear, dw__infer_group_rows, dw__infer_segment_linear,
    dw__infer_quantized_segment_linear,
    dw__infer_segment_linear_backward_weight, dw__infer_spread_rows, dw__infer_combine_rows,
    dw__infer_combine_rows_backward,
    dw__infer_embedding, dw__infer_embedding_backward, dw__infer_layer_norm,
    dw__infer_layer_norm_backward, dw__infer_rms_norm, dw__infer_rms_norm_backward,
    dw__infer_rope, dw__infer_attention, dw__infer_attention_backward, dw__infer_cross_entropy,
    dw__infer_cross_entropy_backward, dw__infer_linear_cross_entropy,
    dw__infer_linear_cross_entropy_backward, dw__infer_adamw;

typedef dw_status dw__gradient_function(dw_graph *graph, dw_node node, const dw_value *output_grads,
                                        const bool *needed, dw_value *input_grads);
/* Primitives. */
dw__gradient_function dw__gradient_neg, dw__gradient_abs, dw__gradient_exp, dw__gradient_log,
    dw__gradient_log1p, dw__gradient_sqrt, dw__gradient_rsqrt, dw__gradient_reciprocal,
    dw__gradient_sin, dw__gradient_cos, dw__gradient_tanh, dw__gradient_erf,
    dw__gradient_sigmoid, dw__gradient_add, dw__gradient_sub, dw__gradient_mul, dw__gradient_div,
    dw__gradient_pow, dw__gradient_max, dw__gradient_min, dw__gradient_rem, dw__gradient_select,
    dw__gradient_cast,
    dw__gradient_reshape, dw__gradient_permute, dw__gradient_broadcast, dw__gradient_slice,
    dw__gradient_pad, dw__gradient_concat, dw__gradient_take, dw__gradient_take_along,
    dw__gradient_scatter_add, dw__gradient_put_along_add, dw__gradient_reduce_sum,
    dw__gradient_reduce_max, dw__gradient_reduce_min, dw__gradient_reduce_prod,
    dw__gradient_cumsum, dw__gradient_sort, dw__gradient_top_k, dw__gradient_matmul,
    dw__gradient_quantize;
/* Composites whose own gradient is faster than the gradient of their expansion. */
dw__gradient_function dw__gradient_relu, dw__gradient_silu, dw__gradient_gelu,
    dw__gradient_swiglu, dw__gradient_softmax, dw__gradient_log_softmax, dw__gradient_linear,
    dw__gradient_quantized_linear, dw__gradient_quantized_segment_linear,
    dw__gradient_embedding, dw__gradient_layer_norm, dw__gradient_rms_norm, dw__gradient_rope,
    dw__gradient_dropout, dw__gradient_attention, dw__gradient_cross_entropy,
    dw__gradient_linear_cross_entropy, dw__gradient_mean, dw__gradient_segment_linear,
    dw__gradient_spread_rows, dw__gradient_combine_rows;

/* All composites. */
typedef dw_status dw__expansion_function(dw_graph *graph, const dw_graph *source, dw_node node,
                                         const dw_value *inputs, dw_value *outputs);
dw__expansion_function dw__expand_mean, dw__expand_relu, dw__expand_silu, dw__expand_gelu,
    dw__expand_swiglu, dw__expand_gelu_backward, dw__expand_silu_backward, dw__expand_softmax,
    dw__expand_log_softmax, dw__expand_softmax_backward, dw__expand_log_softmax_backward,
    dw__expand_linear, dw__expand_quantized_linear, dw__expand_quantized_segment_linear,
    dw__expand_grouped_linear, dw__expand_group_rows, dw__expand_segment_linear,
    dw__expand_segment_linear_backward_weight, dw__expand_spread_rows, dw__expand_combine_rows,
    dw__expand_combine_rows_backward,
    dw__expand_embedding, dw__expand_embedding_backward,
    dw__expand_layer_norm, dw__expand_layer_norm_backward, dw__expand_rms_norm,
    dw__expand_rms_norm_backward, dw__expand_rope, dw__expand_dropout, dw__expand_attention,
    dw__expand_attention_backward, dw__expand_cross_entropy, dw__expand_cross_entropy_backward,
    dw__expand_linear_cross_entropy, dw__expand_linear_cross_entropy_backward, dw__expand_adamw;

typedef dw_status dw__cost_function(const dw_graph *graph, dw_node node, const int64_t *sizes,
                                    dw_cost *cost);
dw__cost_function dw__cost_elementwise, dw__cost_move, dw__cost_take, dw__cost_scatter,
    dw__cost_reduce, dw__cost_sort, dw__cost_matmul, dw__cost_quantize, dw__cost_quantization_error,
    dw__cost_fused, dw__cost_norm,
    dw__cost_norm_backward, dw__cost_softmax, dw__cost_linear, dw__cost_grouped_linear,
    dw__cost_segment_linear_backward_weight, dw__cost_rows, dw__cost_embedding, dw__cost_rope,
    dw__cost_attention, dw__cost_attention_backward, dw__cost_cross_entropy,
    dw__cost_linear_cross_entropy, dw__cost_linear_cross_entropy_backward, dw__cost_adamw;

/* clang-format on */

#endif
