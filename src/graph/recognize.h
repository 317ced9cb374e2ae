/* Declarations shared by the recognisers of composites.
 *
 * A recogniser looks at the node just copied (its root) and at the nodes before it. If they form a composite,
 * it emits the composite and returns its result. Matching is structural: operations, operands, axes and
 * constants must be those of the definition. Nodes that the composite absorbs must have no other reader, or
 * they would be computed twice. In doubt a recogniser does not match. */
#ifndef DW_GRAPH_RECOGNIZE_H
#define DW_GRAPH_RECOGNIZE_H

#include "graph/passes.h"

typedef struct dw__matcher {
    dw__emitter e; /* appends to rewrite->graph */
    const dw__rewrite *rewrite;
    dw_node root;
} dw__matcher;

/* Returns the replacement of the root's output 0, or DW_NONE. `dw__recognize_attention` replaces all outputs. */
typedef dw_value dw__recognizer(dw__matcher *m);
dw__recognizer dw__recognize_gelu, dw__recognize_silu, dw__recognize_swiglu;
dw__recognizer dw__recognize_layer_norm, dw__recognize_rms_norm, dw__recognize_norm_weight,
    dw__recognize_norm_bias, dw__recognize_wide_norm, dw__recognize_softmax;
dw__recognizer dw__recognize_rope, dw__recognize_partial_rope;
dw__recognizer dw__recognize_matmul, dw__recognize_bias, dw__recognize_flat_linear;
dw__recognizer dw__recognize_written_attention;
dw__recognizer dw__recognize_grouped_matmul, dw__recognize_grouped_bias;
dw__recognizer dw__recognize_concat;
/* Returns true if it emitted the node `replacement`, which replaces the root. */
bool dw__recognize_attention(dw__matcher *m, dw_node *replacement);

/* ---- attention ------------------------------------------------------------------------------ */

/* Operands and attributes of an attention node under construction. */
typedef struct dw__attention_parts {
    dw_value operands[5]; /* q, k, v, mask, seed */
    double scale, softcap, p;
    int64_t causal, window, stream;
} dw__attention_parts;

/* Absorbs repeated heads, broadcast masks and masks made of positions. Returns false if it found none. */
bool dw__simplify_attention(dw__matcher *m, dw__attention_parts *parts);
/* Absorbs a float mask that is very low where a key is out of reach: the positions become causal and window
 * of `parts`, and `bias` is the rest of the mask (DW_NONE: nothing). For a mask that is added alone or to
 * learned biases. */
bool dw__simplify_bias(dw__matcher *m, dw__attention_parts *parts, dw_value *bias);
/* True for values read by index from a table of parameters, possibly moved. Their elements are ordinary numbers. */
bool dw__is_learned(const dw__matcher *m, dw_value value);
dw_node dw__emit_attention(dw__matcher *m, const dw__attention_parts *parts);
/* Reshapes a mask [..] to rank 4 with ones in front. */
dw_value dw__to_rank_4(dw__matcher *m, dw_value mask);

/* ---- queries for recognisers ---------------------------------------------------------------- */

/* Returns operand `index` of the node. */
dw_value dw__operand(const dw__matcher *m, dw_node node, uint32_t index);
/* True if the value has exactly one reader. */
bool dw__single(const dw__matcher *m, dw_value value);
/* Returns the node if `op` makes `value` as its output 0 and the value has one reader, else DW_NONE. */
dw_node dw__swallow(const dw__matcher *m, dw_value value, dw_op op);
/* True if both are equal within F32 rounding. Constants may then be written in any precision. */
bool dw__near(double number, double want);
/* Matches value = op(x, number), and op(number, x) for a commutative operation. */
bool dw__with_number(const dw__matcher *m, dw_value value, dw_op op, dw_value *x, double *number);
/* The value before its broadcast, in value's rank: the operand of a broadcast (and of a reshape that only
 * prepends ones), padded with dims of 1 in front or at the back. Returns the value itself if it is not
 * broadcast. */
dw_value dw__unbroadcast(const dw__matcher *m, dw_value value);
/* If `value` is a row [N] broadcast to [.., N], returns the row, else DW_NONE. */
dw_value dw__spread_row(const dw__matcher *m, dw_value value);
/* If `value` [.., N] is an `inner` [.., 1] broadcast along the last axis, returns `inner`, else DW_NONE.
 * Requires a single reader. */
dw_value dw__spread_column(const dw__matcher *m, dw_value value);

#endif
