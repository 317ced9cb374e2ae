/* Passes: what their files share. docs/passes.md says what each one does and may not do.
 *
 * A pass makes a new graph and leaves the old one as it was until the new one has been verified.
 */
#ifndef DW_GRAPH_PASSES_H
#define DW_GRAPH_PASSES_H

#include "graph/emit.h"

typedef dw_status dw__pass_function(dw_graph **graph);
dw__pass_function dw__pass_dead_code, dw__pass_common, dw__pass_fold, dw__pass_recognize,
    dw__pass_expand, dw__pass_fuse;

/* Uses of each value: operands of nodes and outputs of the graph. Release with dw__free. */
dw_status dw__count_uses(const dw_graph *graph, uint32_t **uses);

/* *graph becomes *by, which becomes NULL; the old one is destroyed. */
void dw__replace_graph(dw_graph **graph, dw_graph **by);

/* Local rewriting from operands to results. Every node is copied; then the rule looks at the copy,
 * in the new graph, and at what stands before it there, which is rewritten already. It may append
 * nodes and replace any of the copy's outputs. Whatever nothing needs any more is removed at the
 * end. */
typedef struct dw__rewrite {
    dw_graph *graph; /* the new one */
    /* Uses, in the old graph, of values that a value of the new graph stands for; 1 for values
     * that a rule made in passing. */
    struct {
        uint32_t *items;
        size_t count, capacity;
    } uses;
    void *context; /* the rule's own */
} dw__rewrite;
/* replacements[i]: at first output i of `node`. */
typedef dw_status dw__rewrite_rule(dw__rewrite *rewrite, dw_node node, dw_value *replacements);
dw_status dw__rewrite_each(dw_graph **graph, dw__rewrite_rule *rule, void *context);

/* ---- looking at a graph: for rules ----------------------------------------------------------- */

/* Nodes that a rule looks through on its way to what it is about. A longer chain is no pattern of any model,
 * and so none is too long for the stack, or makes the time of a pass quadratic. */
enum { DW__LOOK_THROUGH = 64 };
/* The node that makes `value` as its output 0 by `op`, else DW_NONE. */
dw_node dw__made_by(const dw_graph *graph, dw_value value, dw_op op);
/* True for a reshape that only puts dims of 1 in front: `broadcast` does that by itself. */
bool dw__prepends_ones(const dw_graph *graph, dw_node reshape);
/* True when every element of `value` is one known number (constants, also broadcast, reshaped or
 * cast between floating-point types): `number` as it is written, not rounded to the value's
 * type. */
bool dw__is_splat(const dw_graph *graph, dw_value value, double *number);
/* `number` as the type holds it. */
double dw__round_to(dw_dtype dtype, double number);

#endif
