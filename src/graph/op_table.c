/* The operation table: one row for each operation, in the order of DW_OP_MAP, with its meaning in the margin.
 * All code that depends on an operation's properties (building, verifying, gradients, passes, costs) reads
 * its row. deepwell/ops.h gives the full meaning. docs/graph.md says how to add an operation. */
#include "graph/op_rules.h"
#include <string.h>

#define A(key) (UINT64_C(1) << DW_ATTR_KEY_##key)
#define OPERAND(index) (UINT64_C(1) << (index))
#define LAYER_PRECISION                                                                            \
    (A(FORWARD_X) | A(FORWARD_W) | A(DGRAD_DY) | A(DGRAD_W) | A(WGRAD_DY) | A(WGRAD_X))

#define SEGMENT_PRECISION (A(FORWARD_X) | A(FORWARD_W) | A(DGRAD_DY) | A(DGRAD_W))

/* clang-format off */
const dw__op_row dw__op_table[DW_OP_COUNT] = {
    /* ---- elementwise, one operand */
    [DW_OP_NEG] = { /* -x */
        .name = "neg", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .typing = DW__NUMBER_TO_SAME, .elementwise = true,
        .infer = dw__infer_elementwise, .gradient = dw__gradient_neg,
        .cost = dw__cost_elementwise},
    [DW_OP_ABS] = { /* |x| */
        .name = "abs", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .typing = DW__NUMBER_TO_SAME, .elementwise = true,
        .infer = dw__infer_elementwise, .gradient = dw__gradient_abs,
        .cost = dw__cost_elementwise},
    [DW_OP_SIGN] = { /* -1, 0 or 1 */
        .name = "sign", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .typing = DW__NUMBER_TO_SAME, .elementwise = true,
        .stops_gradient = true, .infer = dw__infer_elementwise, .cost = dw__cost_elementwise},
    [DW_OP_EXP] = { /* e^x */
        .name = "exp", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .typing = DW__FLOAT_TO_SAME, .elementwise = true,
        .infer = dw__infer_elementwise, .gradient = dw__gradient_exp,
        .cost = dw__cost_elementwise},
    [DW_OP_LOG] = { /* ln x */
        .name = "log", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .typing = DW__FLOAT_TO_SAME, .elementwise = true,
        .infer = dw__infer_elementwise, .gradient = dw__gradient_log,
        .cost = dw__cost_elementwise},
    [DW_OP_LOG1P] = { /* ln(1 + x) */
        .name = "log1p", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .typing = DW__FLOAT_TO_SAME, .elementwise = true,
        .infer = dw__infer_elementwise, .gradient = dw__gradient_log1p,
        .cost = dw__cost_elementwise},
    [DW_OP_SQRT] = { /* x^(1/2) */
        .name = "sqrt", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .typing = DW__FLOAT_TO_SAME, .elementwise = true,
        .infer = dw__infer_elementwise, .gradient = dw__gradient_sqrt,
        .cost = dw__cost_elementwise},
    [DW_OP_RSQRT] = { /* x^(-1/2) */
        .name = "rsqrt", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .typing = DW__FLOAT_TO_SAME, .elementwise = true,
        .infer = dw__infer_elementwise, .gradient = dw__gradient_rsqrt,
        .cost = dw__cost_elementwise},
    [DW_OP_RECIPROCAL] = { /* 1 / x */
        .name = "reciprocal", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .typing = DW__FLOAT_TO_SAME, .elementwise = true,
        .infer = dw__infer_elementwise, .gradient = dw__gradient_reciprocal,
        .cost = dw__cost_elementwise},
    [DW_OP_SIN] = { /* sin x */
        .name = "sin", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .typing = DW__FLOAT_TO_SAME, .elementwise = true,
        .infer = dw__infer_elementwise, .gradient = dw__gradient_sin,
        .cost = dw__cost_elementwise},
    [DW_OP_COS] = { /* cos x */
        .name = "cos", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .typing = DW__FLOAT_TO_SAME, .elementwise = true,
        .infer = dw__infer_elementwise, .gradient = dw__gradient_cos,
        .cost = dw__cost_elementwise},
    [DW_OP_TANH] = { /* tanh x */
        .name = "tanh", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .typing = DW__FLOAT_TO_SAME, .elementwise = true,
        .infer = dw__infer_elementwise, .gradient = dw__gradient_tanh,
        .cost = dw__cost_elementwise},
    [DW_OP_ERF] = { /* error function */
        .name = "erf", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .typing = DW__FLOAT_TO_SAME, .elementwise = true,
        .infer = dw__infer_elementwise, .gradient = dw__gradient_erf,
        .cost = dw__cost_elementwise},
    [DW_OP_SIGMOID] = { /* 1 / (1 + e^-x) */
        .name = "sigmoid", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .typing = DW__FLOAT_TO_SAME, .elementwise = true,
        .infer = dw__infer_elementwise, .gradient = dw__gradient_sigmoid,
        .cost = dw__cost_elementwise},
    [DW_OP_FLOOR] = { /* largest integer <= x */
        .name = "floor", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .typing = DW__FLOAT_TO_SAME, .elementwise = true,
        .stops_gradient = true, .infer = dw__infer_elementwise, .cost = dw__cost_elementwise},
    [DW_OP_CEIL] = { /* smallest integer >= x */
        .name = "ceil", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .typing = DW__FLOAT_TO_SAME, .elementwise = true,
        .stops_gradient = true, .infer = dw__infer_elementwise, .cost = dw__cost_elementwise},
    [DW_OP_LOGICAL_NOT] = { /* not x */
        .name = "logical_not", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .typing = DW__BOOL_TO_SAME, .elementwise = true,
        .stops_gradient = true, .infer = dw__infer_elementwise, .cost = dw__cost_elementwise},
    [DW_OP_IS_FINITE] = { /* neither infinite nor NaN */
        .name = "is_finite", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .typing = DW__FLOAT_TO_BOOL, .elementwise = true,
        .stops_gradient = true, .infer = dw__infer_elementwise, .cost = dw__cost_elementwise},
    /* ---- elementwise, two operands */
    [DW_OP_ADD] = { /* x + y */
        .name = "add", .stratum = DW__PRIMITIVE, .operands = {"x", "y"},
        .min_inputs = 2, .max_inputs = 2, .typing = DW__NUMBER_TO_SAME, .elementwise = true,
        .commutative = true, .infer = dw__infer_elementwise, .gradient = dw__gradient_add,
        .cost = dw__cost_elementwise},
    [DW_OP_SUB] = { /* x - y */
        .name = "sub", .stratum = DW__PRIMITIVE, .operands = {"x", "y"},
        .min_inputs = 2, .max_inputs = 2, .typing = DW__NUMBER_TO_SAME, .elementwise = true,
        .infer = dw__infer_elementwise, .gradient = dw__gradient_sub,
        .cost = dw__cost_elementwise},
    [DW_OP_MUL] = { /* x * y */
        .name = "mul", .stratum = DW__PRIMITIVE, .operands = {"x", "y"},
        .min_inputs = 2, .max_inputs = 2, .typing = DW__NUMBER_TO_SAME, .elementwise = true,
        .commutative = true, .infer = dw__infer_elementwise, .gradient = dw__gradient_mul,
        .cost = dw__cost_elementwise},
    [DW_OP_DIV] = { /* x / y; of integers, rounded down */
        .name = "div", .stratum = DW__PRIMITIVE, .operands = {"x", "y"},
        .min_inputs = 2, .max_inputs = 2, .typing = DW__NUMBER_TO_SAME, .elementwise = true,
        .infer = dw__infer_elementwise, .gradient = dw__gradient_div,
        .cost = dw__cost_elementwise},
    [DW_OP_POW] = { /* x ^ y */
        .name = "pow", .stratum = DW__PRIMITIVE, .operands = {"x", "y"},
        .min_inputs = 2, .max_inputs = 2, .typing = DW__NUMBER_TO_SAME, .elementwise = true,
        .infer = dw__infer_elementwise, .gradient = dw__gradient_pow,
        .cost = dw__cost_elementwise},
    [DW_OP_MAX] = { /* the larger; NaN if either is */
        .name = "max", .stratum = DW__PRIMITIVE, .operands = {"x", "y"},
        .min_inputs = 2, .max_inputs = 2, .typing = DW__NUMBER_TO_SAME, .elementwise = true,
        .commutative = true, .infer = dw__infer_elementwise, .gradient = dw__gradient_max,
        .cost = dw__cost_elementwise},
    [DW_OP_MIN] = { /* the smaller; NaN if either is */
        .name = "min", .stratum = DW__PRIMITIVE, .operands = {"x", "y"},
        .min_inputs = 2, .max_inputs = 2, .typing = DW__NUMBER_TO_SAME, .elementwise = true,
        .commutative = true, .infer = dw__infer_elementwise, .gradient = dw__gradient_min,
        .cost = dw__cost_elementwise},
    [DW_OP_REM] = { /* x - y * floor(x / y) */
        .name = "rem", .stratum = DW__PRIMITIVE, .operands = {"x", "y"},
        .min_inputs = 2, .max_inputs = 2, .typing = DW__NUMBER_TO_SAME, .elementwise = true,
        .infer = dw__infer_elementwise, .gradient = dw__gradient_rem,
        .cost = dw__cost_elementwise},
    [DW_OP_EQ] = { /* x == y */
        .name = "eq", .stratum = DW__PRIMITIVE, .operands = {"x", "y"},
        .min_inputs = 2, .max_inputs = 2, .typing = DW__ANY_TO_BOOL, .elementwise = true,
        .commutative = true, .stops_gradient = true, .infer = dw__infer_elementwise,
        .cost = dw__cost_elementwise},
    [DW_OP_NE] = { /* x != y */
        .name = "ne", .stratum = DW__PRIMITIVE, .operands = {"x", "y"},
        .min_inputs = 2, .max_inputs = 2, .typing = DW__ANY_TO_BOOL, .elementwise = true,
        .commutative = true, .stops_gradient = true, .infer = dw__infer_elementwise,
        .cost = dw__cost_elementwise},
    [DW_OP_LT] = { /* x < y */
        .name = "lt", .stratum = DW__PRIMITIVE, .operands = {"x", "y"},
        .min_inputs = 2, .max_inputs = 2, .typing = DW__NUMBER_TO_BOOL, .elementwise = true,
        .stops_gradient = true, .infer = dw__infer_elementwise, .cost = dw__cost_elementwise},
    [DW_OP_LE] = { /* x <= y */
        .name = "le", .stratum = DW__PRIMITIVE, .operands = {"x", "y"},
        .min_inputs = 2, .max_inputs = 2, .typing = DW__NUMBER_TO_BOOL, .elementwise = true,
        .stops_gradient = true, .infer = dw__infer_elementwise, .cost = dw__cost_elementwise},
    [DW_OP_GT] = { /* x > y */
        .name = "gt", .stratum = DW__PRIMITIVE, .operands = {"x", "y"},
        .min_inputs = 2, .max_inputs = 2, .typing = DW__NUMBER_TO_BOOL, .elementwise = true,
        .stops_gradient = true, .infer = dw__infer_elementwise, .cost = dw__cost_elementwise},
    [DW_OP_GE] = { /* x >= y */
        .name = "ge", .stratum = DW__PRIMITIVE, .operands = {"x", "y"},
        .min_inputs = 2, .max_inputs = 2, .typing = DW__NUMBER_TO_BOOL, .elementwise = true,
        .stops_gradient = true, .infer = dw__infer_elementwise, .cost = dw__cost_elementwise},
    [DW_OP_AND] = { /* x and y */
        .name = "and", .stratum = DW__PRIMITIVE, .operands = {"x", "y"},
        .min_inputs = 2, .max_inputs = 2, .typing = DW__BOOL_TO_SAME, .elementwise = true,
        .commutative = true, .stops_gradient = true, .infer = dw__infer_elementwise,
        .cost = dw__cost_elementwise},
    [DW_OP_OR] = { /* x or y */
        .name = "or", .stratum = DW__PRIMITIVE, .operands = {"x", "y"},
        .min_inputs = 2, .max_inputs = 2, .typing = DW__BOOL_TO_SAME, .elementwise = true,
        .commutative = true, .stops_gradient = true, .infer = dw__infer_elementwise,
        .cost = dw__cost_elementwise},
    /* ---- elementwise, others */
    [DW_OP_SELECT] = { /* x where c, else y */
        .name = "select", .stratum = DW__PRIMITIVE, .operands = {"c", "x", "y"},
        .min_inputs = 3, .max_inputs = 3, .typing = DW__CHOICE, .elementwise = true,
        .infer = dw__infer_elementwise, .gradient = dw__gradient_select,
        .cost = dw__cost_elementwise},
    [DW_OP_CAST] = { /* x as dtype, nearest even */
        .name = "cast", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .typing = DW__CONVERSION, .elementwise = true,
        .required_attrs = A(DTYPE), .allowed_attrs = A(DTYPE), .infer = dw__infer_elementwise,
        .gradient = dw__gradient_cast, .cost = dw__cost_elementwise},
    [DW_OP_STOP_GRADIENT] = { /* x */
        .name = "stop_gradient", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .view = DW__VIEW_SAME, .typing = DW__ANY_TO_SAME,
        .elementwise = true,
        .stops_gradient = true, .infer = dw__infer_elementwise, .cost = dw__cost_elementwise},
    /* ---- made from nothing */
    [DW_OP_CONSTANT] = { /* value everywhere */
        .name = "constant", .stratum = DW__PRIMITIVE, .min_inputs = 0, .max_inputs = 0,
        .cheap = true,
        .stops_gradient = true, .required_attrs = A(DTYPE) | A(SHAPE) | A(VALUE),
        .allowed_attrs = A(DTYPE) | A(SHAPE) | A(VALUE), .infer = dw__infer_constant,
        .cost = dw__cost_move},
    [DW_OP_SIZE] = { /* the number size[0] */
        .name = "size", .stratum = DW__PRIMITIVE, .min_inputs = 0, .max_inputs = 0, .cheap = true,
        .stops_gradient = true, .required_attrs = A(DTYPE) | A(SIZE),
        .allowed_attrs = A(DTYPE) | A(SIZE), .infer = dw__infer_size, .cost = dw__cost_move},
    [DW_OP_IOTA] = { /* index along axis */
        .name = "iota", .stratum = DW__PRIMITIVE, .min_inputs = 0, .max_inputs = 0, .cheap = true,
        .stops_gradient = true, .required_attrs = A(DTYPE) | A(SHAPE) | A(AXIS),
        .allowed_attrs = A(DTYPE) | A(SHAPE) | A(AXIS), .infer = dw__infer_iota,
        .cost = dw__cost_move},
    [DW_OP_RANDOM_UNIFORM] = { /* Philox4x32-10 in [0, 1) */
        .name = "random_uniform", .stratum = DW__PRIMITIVE, .operands = {"seed"},
        .min_inputs = 1, .max_inputs = 1, .cheap = true, .stops_gradient = true,
        .required_attrs = A(SHAPE) | A(STREAM), .allowed_attrs = A(SHAPE) | A(STREAM),
        .infer = dw__infer_random_uniform, .cost = dw__cost_elementwise},
    /* ---- moving */
    [DW_OP_RESHAPE] = { /* same elements, row-major */
        .name = "reshape", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .view = DW__VIEW_RESHAPE, .required_attrs = A(SHAPE),
        .allowed_attrs = A(SHAPE), .infer = dw__infer_reshape, .gradient = dw__gradient_reshape,
        .cost = dw__cost_move},
    [DW_OP_PERMUTE] = { /* axis i is x's axis perm[i] */
        .name = "permute", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .view = DW__VIEW_PERMUTE, .required_attrs = A(PERM),
        .allowed_attrs = A(PERM), .infer = dw__infer_permute, .gradient = dw__gradient_permute,
        .cost = dw__cost_move},
    [DW_OP_BROADCAST] = { /* dims of 1 repeated, ranks aligned right */
        .name = "broadcast", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .view = DW__VIEW_BROADCAST, .required_attrs = A(SHAPE),
        .allowed_attrs = A(SHAPE), .infer = dw__infer_broadcast,
        .gradient = dw__gradient_broadcast, .cost = dw__cost_move},
    [DW_OP_SLICE] = { /* x[start:limit:step] */
        .name = "slice", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .view = DW__VIEW_SLICE,
        .required_attrs = A(START) | A(LIMIT),
        .allowed_attrs = A(START) | A(LIMIT) | A(STEP), .infer = dw__infer_slice,
        .gradient = dw__gradient_slice, .cost = dw__cost_move},
    [DW_OP_PAD] = { /* value around x */
        .name = "pad", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .cheap = true, .required_attrs = A(LOW) | A(HIGH),
        .allowed_attrs = A(LOW) | A(HIGH) | A(VALUE), .infer = dw__infer_pad,
        .gradient = dw__gradient_pad, .cost = dw__cost_move},
    [DW_OP_CONCAT] = { /* one after another along axis */
        .name = "concat", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = DW_MAX_INPUTS, .concatenates = true, .cheap = true,
        .required_attrs = A(AXIS),
        .allowed_attrs = A(AXIS), .infer = dw__infer_concat, .gradient = dw__gradient_concat,
        .cost = dw__cost_move},
    [DW_OP_TAKE] = { /* x[.., i, ..] at axis */
        .name = "take", .stratum = DW__PRIMITIVE, .operands = {"x", "i"},
        .min_inputs = 2, .max_inputs = 2, .cheap = true, .required_attrs = A(AXIS),
        .allowed_attrs = A(AXIS),
        .infer = dw__infer_take, .gradient = dw__gradient_take, .cost = dw__cost_take},
    [DW_OP_TAKE_ALONG] = { /* y[p] = x[p with i[p] at axis] */
        .name = "take_along", .stratum = DW__PRIMITIVE, .operands = {"x", "i"},
        .min_inputs = 2, .max_inputs = 2, .required_attrs = A(AXIS), .allowed_attrs = A(AXIS),
        .infer = dw__infer_take_along, .gradient = dw__gradient_take_along, .cost = dw__cost_take},
    [DW_OP_SCATTER_ADD] = { /* transpose of take */
        .name = "scatter_add", .stratum = DW__PRIMITIVE, .operands = {"i", "u"},
        .min_inputs = 2, .max_inputs = 2, .required_attrs = A(AXIS) | A(SIZE),
        .allowed_attrs = A(AXIS) | A(SIZE), .infer = dw__infer_scatter_add,
        .gradient = dw__gradient_scatter_add, .cost = dw__cost_scatter},
    [DW_OP_PUT_ALONG_ADD] = { /* transpose of take_along */
        .name = "put_along_add", .stratum = DW__PRIMITIVE, .operands = {"i", "u"},
        .min_inputs = 2, .max_inputs = 2, .required_attrs = A(AXIS) | A(SIZE),
        .allowed_attrs = A(AXIS) | A(SIZE), .infer = dw__infer_put_along_add,
        .gradient = dw__gradient_put_along_add, .cost = dw__cost_scatter},
    /* ---- reducing */
    [DW_OP_REDUCE_SUM] = { /* sum over axes */
        .name = "reduce_sum", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .required_attrs = A(AXES),
        .allowed_attrs = A(AXES) | A(KEEP), .infer = dw__infer_reduce,
        .gradient = dw__gradient_reduce_sum, .cost = dw__cost_reduce},
    [DW_OP_REDUCE_MAX] = { /* largest; any of bools over axes */
        .name = "reduce_max", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .required_attrs = A(AXES),
        .allowed_attrs = A(AXES) | A(KEEP), .infer = dw__infer_reduce,
        .gradient = dw__gradient_reduce_max, .cost = dw__cost_reduce},
    [DW_OP_REDUCE_MIN] = { /* smallest; all of bools over axes */
        .name = "reduce_min", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .required_attrs = A(AXES),
        .allowed_attrs = A(AXES) | A(KEEP), .infer = dw__infer_reduce,
        .gradient = dw__gradient_reduce_min, .cost = dw__cost_reduce},
    [DW_OP_REDUCE_PROD] = { /* product over axes */
        .name = "reduce_prod", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .required_attrs = A(AXES),
        .allowed_attrs = A(AXES) | A(KEEP), .infer = dw__infer_reduce,
        .gradient = dw__gradient_reduce_prod, .cost = dw__cost_reduce},
    [DW_OP_ARG_MAX] = { /* index of the first largest */
        .name = "arg_max", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .stops_gradient = true, .required_attrs = A(AXIS),
        .allowed_attrs = A(AXIS) | A(KEEP), .infer = dw__infer_arg_reduce,
        .cost = dw__cost_reduce},
    [DW_OP_ARG_MIN] = { /* index of the first smallest */
        .name = "arg_min", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .stops_gradient = true, .required_attrs = A(AXIS),
        .allowed_attrs = A(AXIS) | A(KEEP), .infer = dw__infer_arg_reduce,
        .cost = dw__cost_reduce},
    [DW_OP_CUMSUM] = { /* running sum along axis */
        .name = "cumsum", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .required_attrs = A(AXIS),
        .allowed_attrs = A(AXIS) | A(REVERSE), .infer = dw__infer_cumsum,
        .gradient = dw__gradient_cumsum, .cost = dw__cost_reduce},
    [DW_OP_SORT] = { /* sorted values, their indices */
        .name = "sort", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .required_attrs = A(AXIS),
        .allowed_attrs = A(AXIS) | A(DESCENDING), .infer = dw__infer_sort,
        .gradient = dw__gradient_sort, .cost = dw__cost_sort},
    [DW_OP_TOP_K] = { /* size largest values, their indices */
        .name = "top_k", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .required_attrs = A(AXIS) | A(SIZE),
        .allowed_attrs = A(AXIS) | A(SIZE), .infer = dw__infer_top_k,
        .gradient = dw__gradient_top_k, .cost = dw__cost_sort},
    /* ---- matmuls and fused programs */
    [DW_OP_MATMUL] = { /* a b, in batches */
        .name = "matmul", .stratum = DW__PRIMITIVE, .operands = {"a", "b"},
        .min_inputs = 2, .max_inputs = 2,
        .allowed_attrs = A(TRANSPOSE_A) | A(TRANSPOSE_B) | A(DTYPE),
        .infer = dw__infer_matmul, .gradient = dw__gradient_matmul, .cost = dw__cost_matmul},
    [DW_OP_QUANTIZE] = { /* x as a low-precision matmul reads it */
        .name = "quantize", .stratum = DW__PRIMITIVE, .operands = {"x", "seed"},
        .min_inputs = 1, .max_inputs = 2, .cheap = true, .quantizes = true,
        .optional_inputs = OPERAND(1),
        .required_attrs = A(SCHEME) | A(AXIS),
        .allowed_attrs = A(SCHEME) | A(AXIS) | A(SQUARE) | A(HADAMARD) | A(STOCHASTIC) | A(STREAM) |
                         A(SCALE_RULE),
        .infer = dw__infer_quantize, .gradient = dw__gradient_quantize,
        .cost = dw__cost_quantize},
    [DW_OP_QUANTIZE_BLOCKS] = { /* codes and scales, as a matmul of codes reads them */
        .name = "quantize_blocks", .stratum = DW__PRIMITIVE, .operands = {"x", "seed"},
        .min_inputs = 1, .max_inputs = 2, .cheap = true, .quantizes = true,
        .stops_gradient = true,
        .optional_inputs = OPERAND(1), .required_attrs = A(SCHEME) | A(AXIS),
        .allowed_attrs = A(SCHEME) | A(AXIS) | A(SQUARE) | A(HADAMARD) | A(STOCHASTIC) | A(STREAM) |
                         A(SCALE_RULE),
        .infer = dw__infer_quantize_blocks, .cost = dw__cost_quantize},
    [DW_OP_DEQUANTIZE_BLOCKS] = { /* what codes and scales mean */
        .name = "dequantize_blocks", .stratum = DW__PRIMITIVE, .operands = {"codes", "scales"},
        .min_inputs = 2, .max_inputs = 2, .reads_codes = true, .cheap = true,
        .stops_gradient = true, .required_attrs = A(SCHEME) | A(AXIS),
        .allowed_attrs = A(SCHEME) | A(AXIS) | A(SQUARE),
        .infer = dw__infer_dequantize_blocks, .cost = dw__cost_quantize},
    [DW_OP_QUANTIZE_TENSOR] = { /* FP8 codes with one scale, in both orientations */
        .name = "quantize_tensor", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .quantizes = true, .stops_gradient = true, .required_attrs = A(SCHEME),
        .allowed_attrs = A(SCHEME), .infer = dw__infer_quantize_tensor, .cost = dw__cost_quantize},
    [DW_OP_QUANTIZE_TILES] = { /* codes in whole rows, scales in the tiles that tensor cores read */
        .name = "quantize_tiles", .stratum = DW__PRIMITIVE, .operands = {"x", "seed"},
        .min_inputs = 1, .max_inputs = 2, .quantizes = true, .tile_codes = true,
        .stops_gradient = true, .optional_inputs = OPERAND(1), .required_attrs = A(SCHEME),
        .allowed_attrs = A(SCHEME) | A(AXIS) | A(SQUARE) | A(HADAMARD) | A(STOCHASTIC) | A(STREAM) |
                         A(SCALE_RULE),
        .infer = dw__infer_quantize_tiles, .cost = dw__cost_quantize},
    [DW_OP_QUANTIZATION_ERROR] = { /* signal, noise and losses of quantize */
        .name = "quantization_error", .stratum = DW__PRIMITIVE, .operands = {"x", "seed"},
        .min_inputs = 1, .max_inputs = 2, .stops_gradient = true, .optional_inputs = OPERAND(1),
        .required_attrs = A(SCHEME) | A(AXIS),
        .allowed_attrs = A(SCHEME) | A(AXIS) | A(SQUARE) | A(HADAMARD) | A(STOCHASTIC) | A(STREAM) |
                         A(SCALE_RULE),
        .infer = dw__infer_quantization_error, .cost = dw__cost_quantization_error},
    [DW_OP_MULTIPLY_CODES] = { /* a b^T of codes, with their scales */
        .name = "multiply_codes", .stratum = DW__PRIMITIVE,
        .operands = {"a", "b", "scale_a", "scale_b", "tiles_a", "tiles_b", "bias"},
        .min_inputs = 2, .max_inputs = 7,
        .optional_inputs = OPERAND(2) | OPERAND(3) | OPERAND(4) | OPERAND(5) | OPERAND(6),
        .reads_codes = true, .stops_gradient = true,
        .allowed_attrs = A(DTYPE) | A(FAST_ACCUMULATION),
        .infer = dw__infer_multiply_codes, .cost = dw__cost_matmul},
    [DW_OP_SEGMENT_MULTIPLY_CODES] = { /* rows of codes times the codes of their group's matrix */
        .name = "segment_multiply_codes", .stratum = DW__PRIMITIVE,
        .operands = {"a", "b", "offsets", "scale_a", "scale_b"}, .min_inputs = 5, .max_inputs = 5,
        .reads_codes = true, .stops_gradient = true,
        .allowed_attrs = A(DTYPE) | A(FAST_ACCUMULATION),
        .infer = dw__infer_segment_multiply_codes, .cost = dw__cost_matmul},
    [DW_OP_FUSED] = { /* elementwise program (body.h) */
        .name = "fused", .stratum = DW__PRIMITIVE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = DW_MAX_INPUTS, .program = true, .cheap = true,
        .required_attrs = A(BODY),
        .allowed_attrs = A(BODY), .infer = dw__infer_fused, .cost = dw__cost_fused},
    /* ---- composites */
    [DW_OP_MEAN] = { /* mean over axes */
        .name = "mean", .stratum = DW__COMPOSITE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .required_attrs = A(AXES),
        .allowed_attrs = A(AXES) | A(KEEP), .infer = dw__infer_reduce,
        .gradient = dw__gradient_mean, .expand = dw__expand_mean, .cost = dw__cost_reduce},
    [DW_OP_RELU] = { /* max(x, 0) */
        .name = "relu", .stratum = DW__COMPOSITE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .typing = DW__FLOAT_TO_SAME, .elementwise = true,
        .infer = dw__infer_elementwise, .gradient = dw__gradient_relu, .expand = dw__expand_relu,
        .cost = dw__cost_elementwise},
    [DW_OP_SILU] = { /* x * sigmoid(x) */
        .name = "silu", .stratum = DW__COMPOSITE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .typing = DW__FLOAT_TO_SAME, .elementwise = true,
        .infer = dw__infer_elementwise, .gradient = dw__gradient_silu, .expand = dw__expand_silu,
        .cost = dw__cost_elementwise},
    [DW_OP_GELU] = { /* x * normal distribution(x) */
        .name = "gelu", .stratum = DW__COMPOSITE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .typing = DW__FLOAT_TO_SAME, .elementwise = true,
        .required_attrs = A(APPROXIMATE), .allowed_attrs = A(APPROXIMATE),
        .infer = dw__infer_gelu, .gradient = dw__gradient_gelu, .expand = dw__expand_gelu,
        .cost = dw__cost_elementwise},
    [DW_OP_SWIGLU] = { /* silu(gate) * up */
        .name = "swiglu", .stratum = DW__COMPOSITE, .operands = {"gate", "up"},
        .min_inputs = 2, .max_inputs = 2, .typing = DW__FLOAT_TO_SAME, .elementwise = true,
        .infer = dw__infer_elementwise, .gradient = dw__gradient_swiglu,
        .expand = dw__expand_swiglu, .cost = dw__cost_elementwise},
    [DW_OP_GELU_BACKWARD] = { /* dx of gelu */
        .name = "gelu_backward", .stratum = DW__COMPOSITE, .operands = {"x", "dy"},
        .min_inputs = 2, .max_inputs = 2, .typing = DW__FLOAT_TO_SAME, .elementwise = true,
        .required_attrs = A(APPROXIMATE), .allowed_attrs = A(APPROXIMATE),
        .infer = dw__infer_gelu, .expand = dw__expand_gelu_backward, .cost = dw__cost_elementwise},
    [DW_OP_SILU_BACKWARD] = { /* dx of silu */
        .name = "silu_backward", .stratum = DW__COMPOSITE, .operands = {"x", "dy"},
        .min_inputs = 2, .max_inputs = 2, .typing = DW__FLOAT_TO_SAME, .elementwise = true,
        .infer = dw__infer_elementwise, .expand = dw__expand_silu_backward,
        .cost = dw__cost_elementwise},
    [DW_OP_SOFTMAX] = { /* e^x / sum e^x along axis */
        .name = "softmax", .stratum = DW__COMPOSITE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .required_attrs = A(AXIS), .allowed_attrs = A(AXIS),
        .infer = dw__infer_softmax, .gradient = dw__gradient_softmax,
        .expand = dw__expand_softmax, .cost = dw__cost_softmax},
    [DW_OP_LOG_SOFTMAX] = { /* x - ln sum e^x along axis */
        .name = "log_softmax", .stratum = DW__COMPOSITE, .operands = {"x"},
        .min_inputs = 1, .max_inputs = 1, .required_attrs = A(AXIS), .allowed_attrs = A(AXIS),
        .infer = dw__infer_softmax, .gradient = dw__gradient_log_softmax,
        .expand = dw__expand_log_softmax, .cost = dw__cost_softmax},
    [DW_OP_SOFTMAX_BACKWARD] = { /* dx of softmax */
        .name = "softmax_backward", .stratum = DW__COMPOSITE, .operands = {"y", "dy"},
        .min_inputs = 2, .max_inputs = 2, .required_attrs = A(AXIS), .allowed_attrs = A(AXIS),
        .infer = dw__infer_softmax_backward, .expand = dw__expand_softmax_backward,
        .cost = dw__cost_softmax},
    [DW_OP_LOG_SOFTMAX_BACKWARD] = { /* dx of log_softmax */
        .name = "log_softmax_backward", .stratum = DW__COMPOSITE, .operands = {"y", "dy"},
        .min_inputs = 2, .max_inputs = 2, .required_attrs = A(AXIS), .allowed_attrs = A(AXIS),
        .infer = dw__infer_softmax_backward, .expand = dw__expand_log_softmax_backward,
        .cost = dw__cost_softmax},
    [DW_OP_LINEAR] = { /* x w^T + b */
        .name = "linear", .stratum = DW__COMPOSITE, .operands = {"x", "w", "b"},
        .paired = true, .min_inputs = 2, .max_inputs = 3, .optional_inputs = OPERAND(2),
        .allowed_attrs = A(TRANSPOSE_W), .infer = dw__infer_linear,
        .gradient = dw__gradient_linear, .expand = dw__expand_linear, .cost = dw__cost_linear},
    [DW_OP_QUANTIZED_LINEAR] = { /* linear with quantized operands */
        .name = "quantized_linear", .stratum = DW__COMPOSITE, .operands = {"x", "w", "b", "seed", "statistics"},
        .min_inputs = 2, .max_inputs = 5,
        .optional_inputs = OPERAND(2) | OPERAND(3) | OPERAND(4),
        .required_attrs = LAYER_PRECISION,
        .allowed_attrs = LAYER_PRECISION | A(TRANSPOSE_W) | A(STREAM),
        .infer = dw__infer_quantized_linear, .gradient = dw__gradient_quantized_linear,
        .expand = dw__expand_quantized_linear, .cost = dw__cost_linear},
    [DW_OP_GROUPED_LINEAR] = { /* each row times the matrix with its index */
        .name = "grouped_linear", .stratum = DW__COMPOSITE, .operands = {"x", "w", "i", "b"},
        .min_inputs = 3, .max_inputs = 4, .optional_inputs = OPERAND(3),
        .allowed_attrs = A(TRANSPOSE_W) | A(IGNORE_INDEX), .infer = dw__infer_grouped_linear,
        .expand = dw__expand_grouped_linear, .cost = dw__cost_grouped_linear},
    [DW_OP_GROUP_ROWS] = { /* rows sorted by group: order, place, offsets */
        .name = "group_rows", .stratum = DW__COMPOSITE, .operands = {"i"},
        .min_inputs = 1, .max_inputs = 1, .stops_gradient = true,
        .required_attrs = A(SIZE), .allowed_attrs = A(SIZE), .infer = dw__infer_group_rows,
        .expand = dw__expand_group_rows, .cost = dw__cost_move},
    [DW_OP_SEGMENT_LINEAR] = { /* sorted rows times the matrix of their group */
        .name = "segment_linear", .stratum = DW__COMPOSITE,
        .operands = {"x", "w", "offsets", "b", "rows", "places", "weights"},
        .min_inputs = 3, .max_inputs = 7,
        .optional_inputs = OPERAND(3) | OPERAND(4) | OPERAND(5) | OPERAND(6),
        .allowed_attrs = A(TRANSPOSE_W), .infer = dw__infer_segment_linear,
        .gradient = dw__gradient_segment_linear, .expand = dw__expand_segment_linear,
        .cost = dw__cost_grouped_linear},
    [DW_OP_QUANTIZED_SEGMENT_LINEAR] = { /* segment_linear with quantized operands */
        .name = "quantized_segment_linear", .stratum = DW__COMPOSITE, .operands = {"x", "w", "offsets", "b"},
        .min_inputs = 3, .max_inputs = 4, .optional_inputs = OPERAND(3),
        .required_attrs = SEGMENT_PRECISION, .allowed_attrs = SEGMENT_PRECISION | A(TRANSPOSE_W),
        .infer = dw__infer_quantized_segment_linear, .gradient = dw__gradient_quantized_segment_linear,
        .expand = dw__expand_quantized_segment_linear, .cost = dw__cost_grouped_linear},
    [DW_OP_SEGMENT_LINEAR_BACKWARD_WEIGHT] = { /* dw of segment_linear */
        .name = "segment_linear_backward_weight", .stratum = DW__COMPOSITE,
        .operands = {"x", "y", "offsets", "x_rows", "y_rows"}, .min_inputs = 3, .max_inputs = 5,
        .optional_inputs = OPERAND(3) | OPERAND(4),
        .infer = dw__infer_segment_linear_backward_weight,
        .expand = dw__expand_segment_linear_backward_weight,
        .cost = dw__cost_segment_linear_backward_weight},
    [DW_OP_SPREAD_ROWS] = { /* y[place[t,j]] = w[t,j] x[t] */
        .name = "spread_rows", .stratum = DW__COMPOSITE, .operands = {"x", "place", "w"},
        .min_inputs = 2, .max_inputs = 3, .cheap = true, .optional_inputs = OPERAND(2),
        .infer = dw__infer_spread_rows, .gradient = dw__gradient_spread_rows,
        .expand = dw__expand_spread_rows, .cost = dw__cost_rows},
    [DW_OP_COMBINE_ROWS] = { /* y[t] = sum over j of w[t,j] x[place[t,j]] */
        .name = "combine_rows", .stratum = DW__COMPOSITE, .operands = {"x", "place", "w"},
        .min_inputs = 2, .max_inputs = 3, .optional_inputs = OPERAND(2),
        .allowed_attrs = A(DTYPE), .infer = dw__infer_combine_rows,
        .gradient = dw__gradient_combine_rows, .expand = dw__expand_combine_rows,
        .cost = dw__cost_rows},
    [DW_OP_COMBINE_ROWS_BACKWARD] = { /* dx, dw of combine_rows */
        .name = "combine_rows_backward", .stratum = DW__COMPOSITE,
        .operands = {"x", "place", "w", "dy"}, .min_inputs = 4, .max_inputs = 4,
        .infer = dw__infer_combine_rows_backward, .expand = dw__expand_combine_rows_backward,
        .cost = dw__cost_rows},
    [DW_OP_EMBEDDING] = { /* rows i of w */
        .name = "embedding", .stratum = DW__COMPOSITE, .operands = {"w", "i"},
        .min_inputs = 2, .max_inputs = 2, .cheap = true, .allowed_attrs = A(PADDING_INDEX),
        .infer = dw__infer_embedding, .gradient = dw__gradient_embedding,
        .expand = dw__expand_embedding, .cost = dw__cost_embedding},
    [DW_OP_EMBEDDING_BACKWARD] = { /* dw of embedding */
        .name = "embedding_backward", .stratum = DW__COMPOSITE, .operands = {"i", "dy"},
        .min_inputs = 2, .max_inputs = 2, .required_attrs = A(SIZE),
        .allowed_attrs = A(SIZE) | A(PADDING_INDEX), .infer = dw__infer_embedding_backward,
        .expand = dw__expand_embedding_backward, .cost = dw__cost_scatter},
    [DW_OP_LAYER_NORM] = { /* y, mean, rstd */
        .name = "layer_norm", .stratum = DW__COMPOSITE, .operands = {"x", "w", "b"},
        .min_inputs = 1, .max_inputs = 3, .cheap = true, .optional_inputs = OPERAND(1) | OPERAND(2),
        .required_attrs = A(EPS), .allowed_attrs = A(EPS), .infer = dw__infer_layer_norm,
        .gradient = dw__gradient_layer_norm, .expand = dw__expand_layer_norm,
        .cost = dw__cost_norm},
    [DW_OP_LAYER_NORM_BACKWARD] = { /* dx, dw, db */
        .name = "layer_norm_backward", .stratum = DW__COMPOSITE,
        .operands = {"dy", "x", "w", "mean", "rstd"}, .min_inputs = 5, .max_inputs = 5,
        .optional_inputs = OPERAND(2), .infer = dw__infer_layer_norm_backward,
        .expand = dw__expand_layer_norm_backward, .cost = dw__cost_norm_backward},
    [DW_OP_RMS_NORM] = { /* y, rstd */
        .name = "rms_norm", .stratum = DW__COMPOSITE, .operands = {"x", "w"},
        .min_inputs = 1, .max_inputs = 2, .cheap = true, .optional_inputs = OPERAND(1),
        .required_attrs = A(EPS),
        .allowed_attrs = A(EPS), .infer = dw__infer_rms_norm, .gradient = dw__gradient_rms_norm,
        .expand = dw__expand_rms_norm, .cost = dw__cost_norm},
    [DW_OP_RMS_NORM_BACKWARD] = { /* dx, dw */
        .name = "rms_norm_backward", .stratum = DW__COMPOSITE,
        .operands = {"dy", "x", "w", "rstd"}, .min_inputs = 4, .max_inputs = 4,
        .optional_inputs = OPERAND(2), .infer = dw__infer_rms_norm_backward,
        .expand = dw__expand_rms_norm_backward, .cost = dw__cost_norm_backward},
    [DW_OP_ROPE] = { /* x cos + rotate(x) sin */
        .name = "rope", .stratum = DW__COMPOSITE, .operands = {"x", "cos", "sin"},
        .min_inputs = 3, .max_inputs = 3, .cheap = true, .rotates = true,
        .allowed_attrs = A(INTERLEAVED) | A(TRANSPOSED),
        .infer = dw__infer_rope, .gradient = dw__gradient_rope, .expand = dw__expand_rope,
        .cost = dw__cost_rope},
    [DW_OP_DROPOUT] = { /* x / (1 - p) or 0 */
        .name = "dropout", .stratum = DW__COMPOSITE, .operands = {"x", "seed"},
        .min_inputs = 2, .max_inputs = 2, .typing = DW__WITH_SEED, .elementwise = true,
        .required_attrs = A(P) | A(STREAM), .allowed_attrs = A(P) | A(STREAM),
        .infer = dw__infer_dropout, .gradient = dw__gradient_dropout,
        .expand = dw__expand_dropout, .cost = dw__cost_elementwise},
    [DW_OP_ATTENTION] = { /* softmax(scale q k^T + mask) v, lse */
        .name = "attention", .stratum = DW__COMPOSITE,
        .operands = {"q", "k", "v", "mask", "seed"}, .rotated = true, .min_inputs = 3, .max_inputs = 5,
        .optional_inputs = OPERAND(3) | OPERAND(4), .required_attrs = A(SCALE),
        .allowed_attrs = A(SCALE) | A(SOFTCAP) | A(CAUSAL) | A(WINDOW) | A(P) | A(STREAM),
        .infer = dw__infer_attention, .gradient = dw__gradient_attention,
        .expand = dw__expand_attention, .cost = dw__cost_attention},
    [DW_OP_ATTENTION_BACKWARD] = { /* dq, dk, dv, dmask */
        .name = "attention_backward", .stratum = DW__COMPOSITE,
        .operands = {"q", "k", "v", "mask", "seed", "o", "lse", "do"},
        .min_inputs = 8, .max_inputs = 8, .optional_inputs = OPERAND(3) | OPERAND(4),
        .required_attrs = A(SCALE),
        .allowed_attrs = A(SCALE) | A(SOFTCAP) | A(CAUSAL) | A(WINDOW) | A(P) | A(STREAM) |
                         A(MASK_GRADIENT),
        .infer = dw__infer_attention_backward, .expand = dw__expand_attention_backward,
        .cost = dw__cost_attention_backward},
    [DW_OP_CROSS_ENTROPY] = { /* loss, lse */
        .name = "cross_entropy", .stratum = DW__COMPOSITE, .operands = {"x", "target"},
        .min_inputs = 2, .max_inputs = 2, .required_attrs = A(REDUCTION),
        .allowed_attrs = A(REDUCTION) | A(IGNORE_INDEX) | A(LABEL_SMOOTHING),
        .infer = dw__infer_cross_entropy, .gradient = dw__gradient_cross_entropy,
        .expand = dw__expand_cross_entropy, .cost = dw__cost_cross_entropy},
    [DW_OP_CROSS_ENTROPY_BACKWARD] = { /* dx */
        .name = "cross_entropy_backward", .stratum = DW__COMPOSITE,
        .operands = {"x", "target", "lse", "dloss"}, .min_inputs = 4, .max_inputs = 4,
        .required_attrs = A(REDUCTION),
        .allowed_attrs = A(REDUCTION) | A(IGNORE_INDEX) | A(LABEL_SMOOTHING),
        .infer = dw__infer_cross_entropy_backward, .expand = dw__expand_cross_entropy_backward,
        .cost = dw__cost_cross_entropy},
    [DW_OP_LINEAR_CROSS_ENTROPY] = { /* loss, lse, logits */
        .name = "linear_cross_entropy", .stratum = DW__COMPOSITE,
        .operands = {"x", "w", "b", "target"},
        .min_inputs = 4, .max_inputs = 4, .optional_inputs = OPERAND(2),
        .required_attrs = A(REDUCTION),
        .allowed_attrs = A(REDUCTION) | A(IGNORE_INDEX) | A(LABEL_SMOOTHING) | A(TRANSPOSE_W),
        .infer = dw__infer_linear_cross_entropy, .gradient = dw__gradient_linear_cross_entropy,
        .expand = dw__expand_linear_cross_entropy, .cost = dw__cost_linear_cross_entropy},
    [DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD] = { /* dx, dw, db */
        .name = "linear_cross_entropy_backward", .stratum = DW__COMPOSITE,
        .operands = {"x", "w", "b", "logits", "target", "lse", "dloss"},
        .min_inputs = 7, .max_inputs = 7, .optional_inputs = OPERAND(2) | OPERAND(3),
        .required_attrs = A(REDUCTION),
        .allowed_attrs = A(REDUCTION) | A(IGNORE_INDEX) | A(LABEL_SMOOTHING) | A(TRANSPOSE_W),
        .infer = dw__infer_linear_cross_entropy_backward,
        .expand = dw__expand_linear_cross_entropy_backward,
        .cost = dw__cost_linear_cross_entropy_backward},
    [DW_OP_ADAMW] = { /* p, m, v after one step */
        .name = "adamw", .stratum = DW__COMPOSITE, .operands = {"p", "g", "m", "v", "step"},
        .min_inputs = 5, .max_inputs = 5,
        .required_attrs = A(LR) | A(BETA1) | A(BETA2) | A(EPS) | A(WEIGHT_DECAY),
        .allowed_attrs = A(LR) | A(BETA1) | A(BETA2) | A(EPS) | A(WEIGHT_DECAY),
        .infer = dw__infer_adamw, .expand = dw__expand_adamw, .cost = dw__cost_adamw},
};
/* clang-format on */

const char *dw_op_name(dw_op op) {
    return (unsigned)op < DW_OP_COUNT ? dw__op_table[op].name : "?";
}

int dw_op_is_composite(dw_op op) {
    return (unsigned)op < DW_OP_COUNT && dw__op_table[op].stratum == DW__COMPOSITE;
}

int dw_op_is_elementwise(dw_op op) {
    return (unsigned)op < DW_OP_COUNT && dw__op_table[op].elementwise;
}

bool dw__op_is_view(dw_op op) { return dw__op_table[op].view != DW__NO_VIEW; }

bool dw__op_keeps_order(dw_op op) {
    return dw__op_table[op].view == DW__VIEW_SAME || dw__op_table[op].view == DW__VIEW_RESHAPE;
}

bool dw__op_is_pointwise(dw_op op) {
    return dw__op_table[op].elementwise || dw__op_table[op].program;
}

bool dw__op_is_product(dw_op op) { return op == DW_OP_MATMUL || op == DW_OP_LINEAR; }

bool dw__op_is_matmul(dw_op op) { return op == DW_OP_MATMUL; }

bool dw__op_is_sum(dw_op op) { return op == DW_OP_REDUCE_SUM; }

uint32_t dw__op_dispensable_result(dw_op op) {
    enum { LOGITS = 2 };
    return op == DW_OP_LINEAR_CROSS_ENTROPY ? LOGITS : DW_NONE;
}

bool dw__op_reads_spaced_rows(dw_op op) {
    return op == DW_OP_FUSED || op == DW_OP_CAST || dw__op_is_product(op) ||
           op == DW_OP_SEGMENT_LINEAR || op == DW_OP_SEGMENT_LINEAR_BACKWARD_WEIGHT ||
           op == DW_OP_CROSS_ENTROPY || op == DW_OP_CROSS_ENTROPY_BACKWARD ||
           op == DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD;
}

bool dw__op_is_cheap(dw_op op) {
    return dw__op_table[op].cheap || dw__op_table[op].elementwise || dw__op_is_view(op);
}

bool dw__op_is_worth_keeping(dw_op op) {
    return dw__op_table[op].quantizes || dw__op_is_product(op);
}

const char *dw__operand_name(dw_op op, uint32_t index) {
    const dw__op_row *row = &dw__op_table[op];
    uint32_t last = 0;
    while (last + 1 < DW__NAMED_OPERANDS && row->operands[last + 1]) last++;
    return row->operands[index < last ? index : last];
}

/* ---- finding by name ----------------------------------------------------------------------- */

enum { LONGEST_NAME = 32, NEAR_NAMES = 3, NEAR_DISTANCE = 3 };

/* Levenshtein distance (1966): insertions, deletions and replacements that turn one word into the other. */
static size_t edit_distance(const char *a, const char *b) {
    size_t row[LONGEST_NAME + 1], length = strlen(b);
    if (strlen(a) > LONGEST_NAME || length > LONGEST_NAME) return SIZE_MAX;
    for (size_t k = 0; k <= length; k++) row[k] = k;
    for (size_t i = 0; a[i]; i++) {
        size_t diagonal = row[0];
        row[0] = i + 1;
        for (size_t k = 0; k < length; k++) {
            size_t replaced = diagonal + (a[i] != b[k]);
            size_t shorter = row[k] < row[k + 1] ? row[k] : row[k + 1];
            diagonal = row[k + 1];
            row[k + 1] = replaced < shorter + 1 ? replaced : shorter + 1;
        }
    }
    return row[length];
}

static bool is_near(const char *given, const char *name) {
    return edit_distance(given, name) <= NEAR_DISTANCE ||
           (strlen(given) >= 3 && strstr(name, given) != NULL);
}

static dw_status fail_with_near_names(const char *name) {
    const char *near[NEAR_NAMES] = {"", "", ""};
    int count = 0;
    for (size_t distance = 0; distance <= NEAR_DISTANCE + 1; distance++)
        for (int op = 0; op < DW_OP_COUNT && count < NEAR_NAMES; op++) {
            const char *known = dw__op_table[op].name;
            size_t edits = edit_distance(name, known);
            bool now = edits == distance || (distance > NEAR_DISTANCE && edits > NEAR_DISTANCE);
            if (now && is_near(name, known)) near[count++] = known;
        }
    if (count == 0)
        return dw__fail(DW_NOT_FOUND,
                        "there is no operation \"%.64s\"; deepwell/ops.h lists all operations",
                        name);
    return dw__fail(DW_NOT_FOUND, "there is no operation \"%.64s\"; similar names: %s%s%s%s%s",
                    name, near[0], count > 1 ? ", " : "", near[1], count > 2 ? ", " : "", near[2]);
}

dw_status dw_op_find(const char *name, dw_op *op) {
    if (!name) return dw__fail(DW_INVALID_ARGUMENT, "the name of an operation is NULL");
    for (int i = 0; i < DW_OP_COUNT; i++) {
        if (strcmp(name, dw__op_table[i].name) != 0) continue;
        *op = (dw_op)i;
        return DW_OK;
    }
    return fail_with_near_names(name);
}
