/* Recognising composites: what the recognisers share.
 *
 * A recogniser looks at the node just copied (its root) and at what stands before it, and where
 * the whole is a composite it makes that node and returns its result. Matching is structural:
 * operations, operands, axes and constants must be those of the definition, and what the
 * composite swallows must have no other reader (else it would be computed twice). When in doubt
 * it doesn't match.
 */
#ifndef DW_GRAPH_RECOGNIZE_H
#define DW_GRAPH_RECOGNIZE_H

#include "graph/passes.h"

typedef struct dw__matcher {
    dw__emitter e; /* into rewrite->graph */
    const dw__rewrite *rewrite;
    dw_node root;
} dw__matcher;

/* The replacement of the root's output 0, or DW_NONE. `dw__recognize_attention` replaces all. */
typedef dw_value dw__recognizer(dw__matcher *m);
dw__recognizer dw__recognize_gelu, dw__recognize_silu, dw__recognize_swiglu;
dw__recognizer dw__recognize_layer_norm, dw__recognize_rms_norm, dw__recognize_norm_weight,
    dw__recognize_norm_bias, dw__recognize_softmax;
dw__recognizer dw__recognize_rope, dw__recognize_partial_rope;
dw__recognizer dw__recognize_product, dw__recognize_bias, dw__recognize_flat_linear;
dw__recognizer dw__recognize_written_attention;
dw__recognizer dw__recognize_grouped_product, dw__recognize_grouped_bias;
dw__recognizer dw__recognize_concat;
/* True when it made a node that replaces the root, `replacement`. */
bool dw__recognize_attention(dw__matcher *m, dw_node *replacement);
/* Not local: works on the whole graph, after the others. */
dw_status dw__recognize_loss(dw_graph **graph);

/* ---- attention ------------------------------------------------------------------------------ */

/* An attention node's operands and attributes, while they are put together. */
typedef struct dw__attention_parts {
    dw_value operands[5]; /* q, k, v, mask, seed */
    double scale, softcap, p;
    int64_t causal, window, stream;
} dw__attention_parts;

/* Repeated heads, broadcast masks and masks that positions say; false when there is nothing of it. */
bool dw__simplify_attention(dw__matcher *m, dw__attention_parts *parts);
/* A float mask that is very low where a position is out of reach becomes causal and window of `parts`
 * and what else it adds (DW_NONE: nothing). For a mask that is added alone, or to learned biases. */
bool dw__simplify_bias(dw__matcher *m, dw__attention_parts *parts, dw_value *bias);
/* A table of parameters read by index, however moved: its elements are ordinary numbers. */
bool dw__is_learned(const dw__matcher *m, dw_value value);
dw_node dw__emit_attention(dw__matcher *m, const dw__attention_parts *parts);
/* A mask [..] as rank 4 with ones in front. */
dw_value dw__to_rank_4(dw__matcher *m, dw_value mask);

/* ---- looking -------------------------------------------------------------------------------- */

/* Operand `index` of the node. */
dw_value dw__operand(const dw__matcher *m, dw_node node, uint32_t index);
/* Nothing but one reader needs it. */
bool dw__single(const dw__matcher *m, dw_value value);
/* Made by `op` as its output 0, and with one reader; else DW_NONE. */
dw_node dw__swallow(const dw__matcher *m, dw_value value, dw_op op);
/* Equal within the rounding of F32, so that constants may have been written in any precision. */
bool dw__near(double number, double want);
/* value = op(x, number), or for a commutative op(number, x). */
bool dw__with_number(const dw__matcher *m, dw_value value, dw_op op, dw_value *x, double *number);
/* What was broadcast, to value's rank by dims of 1 in front or at the back: the operand of a
 * broadcast (and of a reshape that only puts ones in front of it), else the value itself. */
dw_value dw__unbroadcast(const dw__matcher *m, dw_value value);
/* `value` is a row [N] spread over [.., N]: the row, else DW_NONE. */
dw_value dw__spread_row(const dw__matcher *m, dw_value value);
/* `value` [.., N] is `inner` [.., 1] spread along the last axis; DW_NONE if not. One reader. */
dw_value dw__spread_column(const dw__matcher *m, dw_value value);

#endif
