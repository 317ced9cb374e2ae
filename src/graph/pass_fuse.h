/* Declarations shared by the two files of the pass `fuse`: the partition of a graph's nodes into units. */
#ifndef DW_GRAPH_PASS_FUSE_H
#define DW_GRAPH_PASS_FUSE_H

#include "graph/passes.h"

/* This bound keeps the results of a unit within the results that a node may have. */
#define DW__FUSE_MAX_MEMBERS DW_MAX_OUTPUTS

/* Each node is in one unit. A unit of more than one node is elementwise and becomes one `fused` node, and so
 * does a single elementwise node. Members form a list in ascending order. A unit's index is the node that it
 * began with. */
typedef struct dw__units {
    const dw_graph *graph;
    uint32_t *unit_of;     /* indexed by node */
    dw_node *next;         /* indexed by node: next member of its unit, DW_NONE at the end */
    dw_node *first, *last; /* indexed by unit */
    uint32_t *size;        /* indexed by unit: number of members */
    uint32_t *seen;        /* indexed by unit: stamp of the last search that visited it */
    uint32_t stamp;
    uint32_t *stack; /* stack of units for searches */
    bool *wanted;    /* indexed by value: another unit or the caller reads it */
    bool *sums;      /* indexed by node: adds products, see find_sums */
} dw__units;

/* True for nodes that a `fused` node can contain. */
bool dw__fuse_is_elementwise(const dw_graph *graph, dw_node node);
/* In pass_fuse_emit.c: appends the unit as one fused node to rewriter->to and maps its results. The unit's
 * operands must have been made. */
dw_status dw__fuse_emit(dw__rewriter *rewriter, const dw__units *units, uint32_t unit);

#endif
