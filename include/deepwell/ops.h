/* The operations of the graph: names, operands, attributes, meaning.
 *
 *     dw_attr axis = dw_attr_int(DW_ATTR_KEY_AXIS, 1);
 *     dw_graph_apply(graph, DW_OP_SOFTMAX, 1, &x, 1, &axis, &y); // y = softmax(x; axis=1)
 *
 * Notation: x, y are tensors; [..] are shapes; "?" marks an operand that may be absent (DW_NONE). Attributes follow
 * ";"; one without a default is required. Unless stated otherwise, all operands of a node have one dtype, and its
 * outputs have it too. Nothing broadcasts implicitly: `broadcast` is a node. Negative axes are not accepted.
 * Floating-point reductions and matmuls of BF16 and F16 accumulate in F32 and round once.
 *
 * PRIMITIVES
 *  elementwise; the output has the operands' shape:
 *   neg abs sign exp log log1p sqrt rsqrt reciprocal sin cos tanh erf sigmoid floor ceil   (float; neg
 *     abs sign also integer)         logical_not (bool)         is_finite (float -> bool)
 *   add sub mul div pow max min rem   (float or integer; integer div and rem round towards minus
 *     infinity as Python does; max and min propagate NaN)
 *   eq ne lt le gt ge (-> bool; bool operands allowed for eq and ne)     and or (bool)
 *   select(c bool, x, y): x where c, else y
 *   cast(x; dtype): round to nearest even; float to integer truncates; to bool: x != 0
 *   stop_gradient(x): x, with no gradient
 *  without tensor operands:
 *   constant(; dtype, shape, value)       every element is value
 *   size(; dtype, size)                   scalar (rank 0) holding the dim size[0]
 *   iota(; dtype, shape, axis)            element = its index along axis
 *   random_uniform(seed; shape, stream)   F32 in [0,1): Philox4x32-10, see number/philox.h
 *  data movement:
 *   reshape(x; shape)                     same number of elements, row-major order
 *   permute(x; perm)                      y.shape[i] = x.shape[perm[i]]
 *   broadcast(x; shape)                   ranks aligned right, x dims are 1 or equal
 *   slice(x; start, limit, step=1..)      per axis, 0 <= start <= limit <= dim, step >= 1
 *   pad(x; low, high, value=0)            per axis, low and high >= 0
 *   concat(x...; axis)
 *   take(x, i; axis)                      y[.., idx.., ..] = x[.., i[idx..], ..]: i integer, any rank, its
 *                                         dims replace x's axis. An index out of range is an error at run time.
 *   take_along(x, i; axis)                torch.gather: ranks equal, i dims <= x dims but on axis
 *   scatter_add(i, u; axis, size)         transpose of take: zeros with size[0] on axis (u's dims for i
 *                                         replaced by it), u added at i, in index order
 *   put_along_add(i, u; axis, size)       transpose of take_along: size = the whole result shape
 *  reductions (axes sorted; keep=0, 1 keeps a reduced axis with size 1):
 *   reduce_sum reduce_max reduce_min reduce_prod (x; axes, keep)     bool: max is any, min is all
 *   arg_max arg_min (x; axis, keep)       i64, the first one
 *   cumsum(x; axis, reverse=0)
 *   sort(x; axis, descending=0) -> values, indices i64      stable
 *   top_k(x; axis, size) -> values, indices i64             largest first; equal ones by index
 *  matrix multiplication:
 *   matmul(a, b; transpose_a=0, transpose_b=0, dtype)   a [batch.., M, K] (or [batch.., K, M]), b [batch.., K, N]
 *                                         (or [batch.., N, K]): equal batch dims; y [batch.., M, N]. dtype, of the
 *                                         result: the operands' (if absent), or f32 for bf16 and f16
 *   quantize(x [M,N], seed?; scheme, axis, square=0, hadamard=0, stochastic=0, stream, scale_rule)
 *      -> y bf16 [M,N], scale f32 []      rounds x for a matmul that reduces over axis: x is about y * scale, and y
 *                                         holds the exact values of codes and block scales (deepwell/number.h). scheme
 *                                         (deepwell/scheme.h): bf16, mxfp8, mxfp8-e5m2, mxfp6, mxfp6-e2m3, mxfp4 or
 *                                         nvfp4. scale_rule, for MX: "rceil" (if absent), "floor" or "ceil". square:
 *                                         one scale for 32 x 32 (nvfp4: 16 x 16). The last block may be shorter. scale:
 *                                         nvfp4's tensor scale, else 1. hadamard: whole runs of 16 along axis are
 *                                         rotated first, by dw_hadamard with random signs of seed 0, offset 0, stream
 *                                         0. stochastic: rounding by seed and stream. bf16 has none of these three.
 *                                         Gradient: straight through
 *   quantize_blocks(x [M,N], seed?; as quantize, without bf16) -> codes [M,N], or [N,M] with axis=0,
 *      scales, scale f32 []               the codes and block scales whose values are quantize's y: codes of the
 *                                         scheme's element, scales [rows of codes, blocks of a row]; square: [blocks,
 *                                         blocks]. The reduction axis is last. No gradient
 *   dequantize_blocks(codes, scales; scheme, axis, square=0) -> bf16 [M,N]     quantize's y from codes and scales
 *   quantize_tensor(x [M,N]; scheme) -> codes [M,N], turned [N,M], scale f32 []
 *                                         the codes of quantize with scheme fp8-tensor or fp8-tensor-e5m2, and the same
 *                                         codes transposed: x is about codes * scale. No gradient
 *   quantize_tiles(x [M,N], seed?; as quantize_blocks, of mxfp8, mxfp8-e5m2, mxfp4 or nvfp4; axis)
 *      -> codes, tiles; scale f32 []      the codes and scales of quantize_blocks as tensor cores read them. codes
 *                                         [outer, 32 ceil(inner/32)]: zeros follow a row. tiles [ceil(outer/128), wide,
 *                                         512]: the scales as dw_scales_swizzle arranges them, a row's for each row of
 *                                         a square block. scale: nvfp4's tensor scale; absent for MX. Without axis:
 *                                         codes and tiles for axis 1, then those for axis 0, with one scale; neither
 *                                         hadamard nor stochastic then. Also fp8-block, without hadamard, stochastic
 *                                         and scale: its tiles are f32 [ceil(inner/128), outer], or, of square blocks,
 *                                         [ceil(outer/128), ceil(inner/512), 4] with zeros behind a row's. No gradient
 *   quantization_error(x [M,N], seed?; as quantize, without bf16) -> f64 [5]
 *                                         what rounding as quantize does costs, over the elements of x, after the
 *                                         rotation if there is one: sum of x^2; sum of (x - y * scale)^2; number of
 *                                         x that are not 0; of those, numbers whose y is 0; numbers that rounding alone
 *                                         would take beyond the largest of their block. Elements count where x and
 *                                         y are finite. No gradient
 *   multiply_codes(a [M,K], b [N,K], scale_a f32 [] or [M]?, scale_b f32 [] or [N]?, tiles_a?, tiles_b?,
 *      bias [N]?; dtype=f32, fast_accumulation=0) -> [M,N]
 *                                         a b^T scale_a scale_b of e4m3 or e5m2 codes, summed in F32; dtype: f32, bf16
 *                                         or f16. Both scales are those of tensors, or both of rows. With tiles, codes and tiles are quantize_tiles', each code is
 *                                         multiplied by its block's scale, and scale_a and scale_b are there for nvfp4
 *                                         alone. With those of fp8-block, the sum of a block of K is multiplied by the
 *                                         two scales and added in F32. bias, of y's type, is added before the one rounding.
 *                                         fast_accumulation=1: a kernel may sum in fewer bits, if it is faster.
 *                                         No gradient
 *   segment_multiply_codes(a [R,K], b [E*N,K] or [N,E*K], offsets i32 [E+1], scale_a f32 [], scale_b f32 [] or [E];
 *      dtype=f32, fast_accumulation=0) -> [R,N]
 *                                         the rows of a of each group (segment_linear) times the codes of the group's
 *                                         matrix, as multiply_codes without tiles. The matrices [N,K] of b lie one
 *                                         below the other or side by side. scale_b: of all of b, or of each matrix.
 *                                         No gradient
 *  fused(x...; body) -> y...              an elementwise chain in one pass (graph/body.h). Every input
 *                                         broadcasts to the one iteration shape as `broadcast` would
 *
 * COMPOSITES
 *  mean(x; axes, keep=0)
 *  relu(x)   silu(x) = x*sigmoid(x)   gelu(x; approximate="none"|"tanh")   swiglu(gate, up) = silu(gate)*up
 *  gelu_backward(x, dy; approximate)   silu_backward(x, dy)
 *  softmax(x; axis)   log_softmax(x; axis)   softmax_backward(y, dy; axis)   log_softmax_backward(y, dy; axis)
 *                                         softmax of a row of only -inf is zeros
 *  linear(x [..,K], w, b? [N]; transpose_w=1) -> [..,N]     w is [N,K] (torch.nn.Linear), or [K,N] with
 *                                         transpose_w=0
 *  quantized_linear(x [..,K], w, b? [N], seed?, statistics? f64 [30]; forward_x, forward_w, dgrad_dy, dgrad_w,
 *      wgrad_dy, wgrad_x, transpose_w=1, stream) -> [..,N]
 *                                         a linear whose three matmuls, forward and gradient, have quantized operands
 *                                         and F32 results. The attributes say how each operand is rounded, as text of
 *                                         dw_operand_precision (deepwell/precision.h): "nvfp4+square". Stochastic
 *                                         rounding needs seed and stream. statistics is not read; its gradient is
 *                                         quantization_error of each operand in turn, zeros where an operand is not
 *                                         quantized in blocks or as FP8, or its matmul is not needed
 *  grouped_linear(x [T,K], w [E,N,K], i [T], b? [E,N]; transpose_w=1, ignore_index) -> [T,N]     multiplies row t by
 *                                         matrix i[t]: y[t] = w[i[t]] x[t] + b[i[t]]; w is [E,K,N] with
 *                                         transpose_w=0. ignore_index, which must be E, is the index of rows without a
 *                                         matrix: they are not multiplied, and y[t] is 0. Any other index out of range
 *                                         is an error at run time
 *  group_rows(i [R]; size) -> order i32 [R], place i32 [R], offsets i32 [E+1]     size = [E]; sorts the rows
 *                                         0 to R-1 by their group i[r], stably: order[s] is the row at sorted
 *                                         place s, place is its inverse, and group e has the places offsets[e]
 *                                         to offsets[e+1]. R is below 2^31. A group outside [0,E) is an error
 *                                         at run time. No gradient
 *  segment_linear(x [R,K], w [E,N,K], offsets i32 [E+1], b? [E,N], rows? i32 [R], places? i32 [R],
 *      weights? [R]; transpose_w=1) -> [R,N]
 *                                         multiplies the rows of group e by matrix e: y[r] = w[e] x[r] + b[e] for
 *                                         offsets[e] <= r < offsets[e+1]; w is [E,K,N] with transpose_w=0. Offsets
 *                                         begin with 0, and none is below the one before. The last may be less than
 *                                         R: rows behind it are not multiplied, and y[r] is 0. Its dx is a
 *                                         segment_linear of dy with the other transpose_w. With rows, x is [T,K],
 *                                         and its row rows[r] stands for x[r]; one outside of x is an error at run
 *                                         time. With weights, y[r] is multiplied by weights[r] before it is rounded.
 *                                         With places, row r is stored as y[places[r]]; they are 0 to R-1, each once
 *  quantized_segment_linear(x [R,K], w [E,N,K], offsets i32 [E+1], b? [E,N]; forward_x, forward_w, dgrad_dy, dgrad_w,
 *      transpose_w=1) -> [R,N]            a segment_linear whose matmuls, forward and for dx, have quantized operands
 *                                         and F32 results, as quantized_linear. The schemes are those of FP8 with one
 *                                         scale for a tensor, of w for all its matrices. dw is segment_linear's
 *  segment_linear_backward_weight(x [R,M], y [R,N], offsets i32 [E+1], x_rows? i32 [R], y_rows? i32 [R])
 *      -> [E,M,N]                         for each e the sum of the outer products x[r] y[r]^T over the rows of group e; zeros for a group
 *                                         without rows. dw of segment_linear has x = dy and y = x, or with
 *                                         transpose_w=0 x = x and y = dy. A kernel for GPUs of both operations
 *                                         gets offsets in device memory alone: the host knows R and E. x_rows and
 *                                         y_rows are as rows of segment_linear
 *  spread_rows(x [T,H], place i32 [T,k], w? [T,k]) -> [T*k,H]     copies row t to k places, times its weights:
 *                                         y[place[t,j]] = w[t,j] x[t]. place has each of 0 to T*k-1 once
 *                                         (group_rows', reshaped); one outside is an error at run time. w has x's
 *                                         dtype, or f32 for bf16 and f16
 *  combine_rows(x [T*k,H], place i32 [T,k], w? [T,k]; dtype) -> [T,H]     the transpose of spread_rows:
 *                                         y[t] = the sum over j of w[t,j] x[place[t,j]], in order of j. dtype, of the
 *                                         result: x's (if absent), or f32 for bf16 and f16
 *  combine_rows_backward(x [T*k,H], place, w [T,k], dy [T,H]) -> dx [T*k,H], dw [T,k]     dx is
 *                                         spread_rows(dy, place, w); dw[t,j] is the dot product of dy[t] and
 *                                         x[place[t,j]]. dx has x's dtype, dw w's; dy has x's, or f32
 *  embedding(w [V,E], i [..]; padding_index=-1) -> [..,E]   padding_index: that row receives no gradient
 *  embedding_backward(i, dy; size, padding_index=-1) -> [V,E]     size = [V]
 *  layer_norm(x [..,N], w? [N], b? [N]; eps) -> y, mean [..], rstd [..]     biased variance; statistics of BF16 and
 *                                         F16 are F32, also those of rms_norm
 *  layer_norm_backward(dy, x, w?, mean, rstd) -> dx, dw [N], db [N]
 *  rms_norm(x [..,N], w? [N]; eps) -> y, rstd [..]
 *  rms_norm_backward(dy, x, w?, rstd) -> dx, dw [N]
 *  rope(x [..,S,D], cos, sin; interleaved=0, transposed=0)  cos and sin have x's rank, each dim 1 or x's, and
 *                                         last dim R <= D, even; the first R of D rotate:
 *                                         y = x*cos + rotate(x)*sin, rotate(x) = (-x2, x1) on halves (or, with
 *                                         interleaved, on even and odd elements). transposed: the adjoint
 *  dropout(x, seed; p, stream)            x/(1-p) where random_uniform(seed; x.shape, stream) >= p, else 0
 *  attention(q [B,H,Sq,D], k [B,Hk,Sk,D], v [B,Hk,Sk,Dv], mask?, seed?; scale, softcap=0, causal=0, window=-1,
 *      p=0, stream) -> o [B,H,Sq,Dv], lse [B,H,Sq]     H a multiple of Hk (query head h reads key head h/(H/Hk)).
 *                                         softcap C > 0: scaled scores x become C*tanh(x/C).
 *                                         mask rank 4, each dim 1 or that of [B,H,Sq,Sk]: bool (true = may
 *                                         attend) or float (added to the scores). causal 1: key <= query;
 *                                         2: key <= query + Sk - Sq. window W >= 0: key > query - W (shifted
 *                                         likewise). A query that may attend to nothing gets o = 0,
 *                                         lse = -inf. p, stream: dropout of the probabilities,
 *                                         random_uniform's element index over [B,H,Sq,Sk]. lse is F32 (F64 for
 *                                         F64): rounded to 16 bits it would change weights by up to a percent
 *  attention_backward(q, k, v, mask?, seed?, o, lse, do; as attention, and mask_gradient=0) -> dq, dk, dv, dmask
 *                                         o and lse: of attention. Probabilities are exp(score - lse). Their rows sum
 *                                         to 1 also if lse < DW_LOW_SCORE, which is too large to hold a digit of a
 *                                         score. dmask exists with mask_gradient=1, which needs a float mask; it has
 *                                         its shape
 *  cross_entropy(x [T,V], target [T] i64; reduction="mean"|"sum"|"none", ignore_index=-100, label_smoothing=0)
 *      -> loss (scalar, or [T]), lse [T]  as torch.nn.functional.cross_entropy; mean over targets that are
 *                                         not ignored. A target outside [0,V) is an error at run time
 *  cross_entropy_backward(x, target, lse, dloss; as cross_entropy) -> dx
 *  linear_cross_entropy(x [T,K], w, b?, target [T] i64; as cross_entropy, and transpose_w=1)
 *      -> loss, lse [T], logits [T,V]     cross_entropy(linear(x, w, b)). If nothing reads the logits, only one
 *                                         block of them is in memory at a time; for a backward alone, an engine
 *                                         keeps them or leaves them out (docs/cuda.md). loss and lse are F32 for
 *                                         BF16 and F16. A GPU rounds the logits to x's type, as `linear` does;
 *                                         the arithmetic behind is F32
 *  linear_cross_entropy_backward(x [T,K], w, b?, logits [T,V]?, target, lse, dloss; as linear_cross_entropy)
 *      -> dx [T,K], dw, db [V]            the gradients of cross_entropy(linear(x, w, b)); only one block of dlogits
 *                                         is in memory at a time; absent logits are recomputed. lse and dloss
 *                                         have the forward's type. A GPU rounds dlogits to x's type
 *  adamw(p, g, m, v, step; lr, beta1, beta2, eps, weight_decay) -> p, m, v     step: i64 scalar, from 1
 *                                         (Loshchilov and Hutter 2019, algorithm 2, as torch.optim.AdamW)
 */
#ifndef DEEPWELL_OPS_H
#define DEEPWELL_OPS_H

#include "deepwell/status.h"

/* An attention score below this comes from a mask, because models mask with the least number of a dtype. */
#define DW_LOW_SCORE (-1e30)

#ifdef __cplusplus
extern "C" {
#endif

/* clang-format off */
/* enumerator, name in text and JSON */
#define DW_OP_MAP(X)                                                                               \
    X(NEG, "neg") X(ABS, "abs") X(SIGN, "sign") X(EXP, "exp") X(LOG, "log") X(LOG1P, "log1p")      \
    X(SQRT, "sqrt") X(RSQRT, "rsqrt") X(RECIPROCAL, "reciprocal") X(SIN, "sin") X(COS, "cos")      \
    X(TANH, "tanh") X(ERF, "erf") X(SIGMOID, "sigmoid") X(FLOOR, "floor") X(CEIL, "ceil")          \
    X(LOGICAL_NOT, "logical_not") X(IS_FINITE, "is_finite")                                        \
    X(ADD, "add") X(SUB, "sub") X(MUL, "mul") X(DIV, "div") X(POW, "pow") X(MAX, "max")            \
    X(MIN, "min") X(REM, "rem")                                                                    \
    X(EQ, "eq") X(NE, "ne") X(LT, "lt") X(LE, "le") X(GT, "gt") X(GE, "ge") X(AND, "and")          \
    X(OR, "or")                                                                                    \
    X(SELECT, "select") X(CAST, "cast") X(STOP_GRADIENT, "stop_gradient")                          \
    X(CONSTANT, "constant") X(SIZE, "size") X(IOTA, "iota")                                        \
    X(RANDOM_UNIFORM, "random_uniform")                                                            \
    X(RESHAPE, "reshape") X(PERMUTE, "permute") X(BROADCAST, "broadcast") X(SLICE, "slice")        \
    X(PAD, "pad") X(CONCAT, "concat") X(TAKE, "take") X(TAKE_ALONG, "take_along")                  \
    X(SCATTER_ADD, "scatter_add") X(PUT_ALONG_ADD, "put_along_add")                                \
    X(REDUCE_SUM, "reduce_sum") X(REDUCE_MAX, "reduce_max") X(REDUCE_MIN, "reduce_min")            \
    X(REDUCE_PROD, "reduce_prod") X(ARG_MAX, "arg_max") X(ARG_MIN, "arg_min")                      \
    X(CUMSUM, "cumsum") X(SORT, "sort") X(TOP_K, "top_k")                                          \
    X(MATMUL, "matmul") X(QUANTIZE, "quantize") X(QUANTIZE_BLOCKS, "quantize_blocks")               \
    X(DEQUANTIZE_BLOCKS, "dequantize_blocks") X(QUANTIZE_TENSOR, "quantize_tensor")                \
    X(QUANTIZE_TILES, "quantize_tiles") X(QUANTIZATION_ERROR, "quantization_error")                \
    X(MULTIPLY_CODES, "multiply_codes") X(SEGMENT_MULTIPLY_CODES, "segment_multiply_codes")        \
    X(FUSED, "fused")                                                                              \
    X(MEAN, "mean") X(RELU, "relu") X(SILU, "silu") X(GELU, "gelu") X(SWIGLU, "swiglu")            \
    X(GELU_BACKWARD, "gelu_backward") X(SILU_BACKWARD, "silu_backward")                            \
    X(SOFTMAX, "softmax") X(LOG_SOFTMAX, "log_softmax") X(SOFTMAX_BACKWARD, "softmax_backward")    \
    X(LOG_SOFTMAX_BACKWARD, "log_softmax_backward")                                                \
    X(LINEAR, "linear") X(QUANTIZED_LINEAR, "quantized_linear")                                    \
    X(GROUPED_LINEAR, "grouped_linear")                                                            \
    X(GROUP_ROWS, "group_rows") X(SEGMENT_LINEAR, "segment_linear")                                \
    X(QUANTIZED_SEGMENT_LINEAR, "quantized_segment_linear")                                        \
    X(SEGMENT_LINEAR_BACKWARD_WEIGHT, "segment_linear_backward_weight")                            \
    X(SPREAD_ROWS, "spread_rows") X(COMBINE_ROWS, "combine_rows")                                  \
    X(COMBINE_ROWS_BACKWARD, "combine_rows_backward")                                              \
    X(EMBEDDING, "embedding") X(EMBEDDING_BACKWARD, "embedding_backward")                          \
    X(LAYER_NORM, "layer_norm") X(LAYER_NORM_BACKWARD, "layer_norm_backward")                      \
    X(RMS_NORM, "rms_norm") X(RMS_NORM_BACKWARD, "rms_norm_backward")                              \
    X(ROPE, "rope") X(DROPOUT, "dropout")                                                          \
    X(ATTENTION, "attention") X(ATTENTION_BACKWARD, "attention_backward")                          \
    X(CROSS_ENTROPY, "cross_entropy") X(CROSS_ENTROPY_BACKWARD, "cross_entropy_backward")          \
    X(LINEAR_CROSS_ENTROPY, "linear_cross_entropy")                                                \
    X(LINEAR_CROSS_ENTROPY_BACKWARD, "linear_cross_entropy_backward")                              \
    X(ADAMW, "adamw")

typedef enum dw_op {
#define DW_OP_ENUM(op, name) DW_OP_##op,
    DW_OP_MAP(DW_OP_ENUM)
#undef DW_OP_ENUM
        DW_OP_COUNT
} dw_op;
/* clang-format on */

/* "add"; "?" for an unknown operation. */
DW_API const char *dw_op_name(dw_op op);
/* DW_NOT_FOUND: the name is unknown; the message lists similar names. */
DW_API dw_status dw_op_find(const char *name, dw_op *op);
/* Returns 1 if the operation is defined by an expansion into primitives. */
DW_API int dw_op_is_composite(dw_op op);
/* Returns 1 if the operation works element by element on one shape. */
DW_API int dw_op_is_elementwise(dw_op op);

#ifdef __cplusplus
}
#endif
#endif
