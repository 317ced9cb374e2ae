/* Declarations shared by the files of gradient rules. */
#ifndef DW_GRAPH_OP_GRADIENT_H
#define DW_GRAPH_OP_GRADIENT_H

#include "graph/emit.h"
#include "graph/op_rules.h"

/* Head of a gradient rule; dw__gradient_rule has the contract. A rule is called only if some output has a
 * gradient and some operand needs one. */
#define DW__GRADIENT(name)                                                                         \
    dw_status name(dw_graph *graph, dw_node node, const dw_value *output_grads,                    \
                   const bool *needed, dw_value *input_grads)

/* In op_gradient_composite.c: the gradients of the matrices and biases of segment_linear, from unrounded operands. */
void dw__emit_segment_gradients(dw__emitter *e, dw_node node, dw_value dy, const bool *needed,
                                dw_value *input_grads);

#endif
