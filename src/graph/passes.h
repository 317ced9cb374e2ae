/* Declarations shared by the passes. docs/passes.md says what each pass does and must not do.
 *
 * A pass makes a new graph and keeps the old one until the new one has been verified. */
#ifndef DW_GRAPH_PASSES_H
#define DW_GRAPH_PASSES_H

#include "graph/emit.h"

typedef dw_status dw__pass_function(dw_graph **graph);
dw__pass_function dw__pass_dead_code, dw__pass_common, dw__pass_fold, dw__pass_recognize,
    dw__pass_expand, dw__pass_fuse;

/* Counts the uses of each value: operands of nodes and outputs of the graph. Free the result with dw__free. */
dw_status dw__count_uses(const dw_graph *graph, uint32_t **uses);

/* Replaces *graph by *by, destroys the old graph and sets *by to NULL. */
void dw__replace_graph(dw_graph **graph, dw_graph **by);

/* Local rewriting from operands to results. Every node is copied; the rule then looks at the copy in the new
 * graph and at the nodes before it there, which are rewritten already. It may append nodes and replace any
 * output of the copy. Dead code is removed at the end. */
typedef struct dw__rewrite {
    dw_graph *graph; /* the new graph */
    /* Number of uses in the old graph of the value that a new value replaces; 1 for values that a rule made. */
    struct {
        uint32_t *items;
        size_t count, capacity;
    } uses;
    void *context; /* passed to the rule */
} dw__rewrite;
/* Sets replacements[i] to the value that replaces output i of `node`. Before the call it is that output. */
typedef dw_status dw__rewrite_rule(dw__rewrite *rewrite, dw_node node, dw_value *replacements);
dw_status dw__rewrite_each(dw_graph **graph, dw__rewrite_rule *rule, void *context);

/* ---- queries for rules ----------------------------------------------------------------------- */

/* Longest chain of nodes that a rule looks through. No model's pattern is longer. The limit bounds the
 * recursion depth and keeps a pass from taking quadratic time. */
enum { DW__LOOK_THROUGH = 64 };
/* Returns the node if operation `op` makes `value` as its output 0, else DW_NONE. */
dw_node dw__made_by(const dw_graph *graph, dw_value value, dw_op op);
/* True for a reshape that only prepends dims of 1, which `broadcast` does by itself. */
bool dw__prepends_ones(const dw_graph *graph, dw_node reshape);
/* True if every element of `value` is one known number: a constant, possibly broadcast, reshaped or cast
 * between floating-point types. `number` is the constant's attribute, not rounded to the value's dtype. */
bool dw__is_splat(const dw_graph *graph, dw_value value, double *number);
/* Rounds `number` to the dtype. */
double dw__round_to(dw_dtype dtype, double number);

#endif
