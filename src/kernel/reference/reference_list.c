/* The reference kernels: one for every operation. They support every valid call. */
#include "kernel/reference/primitives.h"

static dw_status supports_always(const dw__kernel *kernel, const void *call,
                                 const dw__gpu_target *gpu) {
    (void)kernel, (void)call, (void)gpu;
    return DW_OK;
}

/* A primitive rounds once, a composite once per primitive of its expansion. */
enum { PRIMITIVE_TOLERANCE = 1, COMPOSITE_TOLERANCE = 8 };

#define PRIMITIVE(id, text, function)                                                              \
    [DW_OP_##id] = {.name = "reference." text,                                                     \
                    .op = DW_OP_##id,                                                              \
                    .source = "ours, portable C",                                                  \
                    .needs = "any tensors",                                                        \
                    .supports = supports_always,                                                   \
                    .run = function,                                                               \
                    .tolerance_factor = PRIMITIVE_TOLERANCE}
#define ELEMENTWISE(id, text) PRIMITIVE(id, text, dw__reference_elementwise)
#define COMPOSITE(id, text)                                                                        \
    [DW_OP_##id] = {.name = "reference." text,                                                     \
                    .op = DW_OP_##id,                                                              \
                    .source = "ours, expansion into primitives",                                   \
                    .needs = "any tensors",                                                        \
                    .supports = supports_always,                                                   \
                    .run = dw__reference_expand,                                                   \
                    .tolerance_factor = COMPOSITE_TOLERANCE}

static const dw__kernel kernels[DW_OP_COUNT] = {
    ELEMENTWISE(NEG, "neg"),
    ELEMENTWISE(ABS, "abs"),
    ELEMENTWISE(SIGN, "sign"),
    ELEMENTWISE(EXP, "exp"),
    ELEMENTWISE(LOG, "log"),
    ELEMENTWISE(LOG1P, "log1p"),
    ELEMENTWISE(SQRT, "sqrt"),
    ELEMENTWISE(RSQRT, "rsqrt"),
    ELEMENTWISE(RECIPROCAL, "reciprocal"),
    ELEMENTWISE(SIN, "sin"),
    ELEMENTWISE(COS, "cos"),
    ELEMENTWISE(TANH, "tanh"),
    ELEMENTWISE(ERF, "erf"),
    ELEMENTWISE(SIGMOID, "sigmoid"),
    ELEMENTWISE(FLOOR, "floor"),
    ELEMENTWISE(CEIL, "ceil"),
    ELEMENTWISE(LOGICAL_NOT, "logical_not"),
    ELEMENTWISE(IS_FINITE, "is_finite"),
    ELEMENTWISE(ADD, "add"),
    ELEMENTWISE(SUB, "sub"),
    ELEMENTWISE(MUL, "mul"),
    ELEMENTWISE(DIV, "div"),
    ELEMENTWISE(POW, "pow"),
    ELEMENTWISE(MAX, "max"),
    ELEMENTWISE(MIN, "min"),
    ELEMENTWISE(REM, "rem"),
    ELEMENTWISE(EQ, "eq"),
    ELEMENTWISE(NE, "ne"),
    ELEMENTWISE(LT, "lt"),
    ELEMENTWISE(LE, "le"),
    ELEMENTWISE(GT, "gt"),
    ELEMENTWISE(GE, "ge"),
    ELEMENTWISE(AND, "and"),
    ELEMENTWISE(OR, "or"),
    ELEMENTWISE(SELECT, "select"),
    PRIMITIVE(CAST, "cast", dw__reference_cast),
    ELEMENTWISE(STOP_GRADIENT, "stop_gradient"),
    PRIMITIVE(CONSTANT, "constant", dw__reference_constant),
    PRIMITIVE(SIZE, "size", dw__reference_size),
    PRIMITIVE(IOTA, "iota", dw__reference_iota),
    PRIMITIVE(RANDOM_UNIFORM, "random_uniform", dw__reference_random_uniform),
    PRIMITIVE(RESHAPE, "reshape", dw__reference_reshape),
    PRIMITIVE(PERMUTE, "permute", dw__reference_permute),
    PRIMITIVE(BROADCAST, "broadcast", dw__reference_broadcast),
    PRIMITIVE(SLICE, "slice", dw__reference_slice),
    PRIMITIVE(PAD, "pad", dw__reference_pad),
    PRIMITIVE(CONCAT, "concat", dw__reference_concat),
    PRIMITIVE(TAKE, "take", dw__reference_take),
    PRIMITIVE(TAKE_ALONG, "take_along", dw__reference_take_along),
    PRIMITIVE(SCATTER_ADD, "scatter_add", dw__reference_scatter_add),
    PRIMITIVE(PUT_ALONG_ADD, "put_along_add", dw__reference_put_along_add),
    PRIMITIVE(REDUCE_SUM, "reduce_sum", dw__reference_reduce),
    PRIMITIVE(REDUCE_MAX, "reduce_max", dw__reference_reduce),
    PRIMITIVE(REDUCE_MIN, "reduce_min", dw__reference_reduce),
    PRIMITIVE(REDUCE_PROD, "reduce_prod", dw__reference_reduce),
    PRIMITIVE(ARG_MAX, "arg_max", dw__reference_arg),
    PRIMITIVE(ARG_MIN, "arg_min", dw__reference_arg),
    PRIMITIVE(CUMSUM, "cumsum", dw__reference_cumsum),
    PRIMITIVE(SORT, "sort", dw__reference_sort),
    PRIMITIVE(TOP_K, "top_k", dw__reference_sort),
    PRIMITIVE(MATMUL, "matmul", dw__reference_matmul),
    PRIMITIVE(QUANTIZE, "quantize", dw__reference_quantize),
    PRIMITIVE(QUANTIZE_BLOCKS, "quantize_blocks", dw__reference_quantize_blocks),
    PRIMITIVE(DEQUANTIZE_BLOCKS, "dequantize_blocks", dw__reference_dequantize_blocks),
    PRIMITIVE(QUANTIZATION_ERROR, "quantization_error", dw__reference_quantization_error),
    PRIMITIVE(QUANTIZE_TENSOR, "quantize_tensor", dw__reference_quantize_tensor),
    PRIMITIVE(QUANTIZE_TILES, "quantize_tiles", dw__reference_quantize_tiles),
    PRIMITIVE(MULTIPLY_CODES, "multiply_codes", dw__reference_multiply_codes),
    PRIMITIVE(SEGMENT_MULTIPLY_CODES, "segment_multiply_codes",
              dw__reference_segment_multiply_codes),
    [DW_OP_FUSED] = {.name = "reference.fused",
                     .op = DW_OP_FUSED,
                     .source = "ours, element by element",
                     .needs = "any tensors",
                     .supports = supports_always,
                     .parse = dw__reference_fused_parse,
                     .run = dw__reference_fused,
                     .tolerance_factor = COMPOSITE_TOLERANCE},
    COMPOSITE(MEAN, "mean"),
    COMPOSITE(RELU, "relu"),
    COMPOSITE(SILU, "silu"),
    COMPOSITE(GELU, "gelu"),
    COMPOSITE(SWIGLU, "swiglu"),
    COMPOSITE(GELU_BACKWARD, "gelu_backward"),
    COMPOSITE(SILU_BACKWARD, "silu_backward"),
    COMPOSITE(SOFTMAX, "softmax"),
    COMPOSITE(LOG_SOFTMAX, "log_softmax"),
    COMPOSITE(SOFTMAX_BACKWARD, "softmax_backward"),
    COMPOSITE(LOG_SOFTMAX_BACKWARD, "log_softmax_backward"),
    COMPOSITE(LINEAR, "linear"),
    COMPOSITE(QUANTIZED_LINEAR, "quantized_linear"),
    COMPOSITE(GROUPED_LINEAR, "grouped_linear"),
    COMPOSITE(GROUP_ROWS, "group_rows"),
    COMPOSITE(SEGMENT_LINEAR, "segment_linear"),
    COMPOSITE(QUANTIZED_SEGMENT_LINEAR, "quantized_segment_linear"),
    COMPOSITE(SEGMENT_LINEAR_BACKWARD_WEIGHT, "segment_linear_backward_weight"),
    COMPOSITE(SPREAD_ROWS, "spread_rows"),
    COMPOSITE(COMBINE_ROWS, "combine_rows"),
    COMPOSITE(COMBINE_ROWS_BACKWARD, "combine_rows_backward"),
    COMPOSITE(EMBEDDING, "embedding"),
    COMPOSITE(EMBEDDING_BACKWARD, "embedding_backward"),
    COMPOSITE(LAYER_NORM, "layer_norm"),
    COMPOSITE(LAYER_NORM_BACKWARD, "layer_norm_backward"),
    COMPOSITE(RMS_NORM, "rms_norm"),
    COMPOSITE(RMS_NORM_BACKWARD, "rms_norm_backward"),
    COMPOSITE(ROPE, "rope"),
    COMPOSITE(DROPOUT, "dropout"),
    COMPOSITE(ATTENTION, "attention"),
    COMPOSITE(ATTENTION_BACKWARD, "attention_backward"),
    COMPOSITE(CROSS_ENTROPY, "cross_entropy"),
    COMPOSITE(CROSS_ENTROPY_BACKWARD, "cross_entropy_backward"),
    COMPOSITE(LINEAR_CROSS_ENTROPY, "linear_cross_entropy"),
    COMPOSITE(LINEAR_CROSS_ENTROPY_BACKWARD, "linear_cross_entropy_backward"),
    COMPOSITE(ADAMW, "adamw"),
};

const dw__kernel *const dw__kernels_reference[] = {
#define LISTED(id, text) &kernels[DW_OP_##id],
    DW_OP_MAP(LISTED)
#undef LISTED
        NULL,
};
