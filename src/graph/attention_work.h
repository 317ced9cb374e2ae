/* The work of scaled dot-product attention: which pairs of query and key a mask leaves, their FLOPs, and the least
 * traffic. The cost of the graph's operation, the planner and the cost models of GPU kernels use these functions. */
#ifndef DW_GRAPH_ATTENTION_WORK_H
#define DW_GRAPH_ATTENTION_WORK_H

#include <stdbool.h>

/* Returns the visible pairs of one head and one sequence. Query i stands at key i + shift and sees the keys from
 * `left` before to `right` after it; INFINITY is no limit. Causal attention has right = 0, and a window of w keys, the
 * query's own included, has left = w - 1. */
double dw__attention_pairs(double queries, double keys, double shift, double left, double right);
/* Returns how many keys a query sees on average under a causal mask, by the convention of published FLOP counts: half
 * of the sequence, so that a query counts itself by half. A window of `window` keys, itself included, leaves the window
 * minus the triangle at the start, where fewer keys precede; 0: no window. dw__attention_pairs counts the edges whole:
 * (queries + 1) / 2, and with a window half a window more in all. */
double dw__attention_keys_seen(double queries, double window);
/* Returns the FLOPs of the matmuls over `pairs`, which are summed over heads and sequences. Forward has q k^T and p v.
 * Backward recomputes q k^T and computes dq and dk (length head_dim), dp and dv (length value_dim). */
double dw__attention_flops(double pairs, double head_dim, double value_dim, bool backward);
/* Returns the elements that must move, each tensor once: forward reads q, k, v and writes o; backward reads these and
 * do and writes three gradients. Rows are summed over heads and sequences; grouped heads have fewer rows of keys and
 * values. */
double dw__attention_traffic(double query_rows, double key_rows, double head_dim, double value_dim,
                             bool backward);

#endif
