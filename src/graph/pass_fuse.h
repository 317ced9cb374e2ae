/* What the two files of the pass `fuse` share: the partition of a graph's nodes into units. */
#ifndef DW_GRAPH_PASS_FUSE_H
#define DW_GRAPH_PASS_FUSE_H

#include "graph/passes.h"

/* So that a unit never has more results than a node may have. */
#define DW__FUSE_MAX_MEMBERS DW_MAX_OUTPUTS

/* Each node is in one unit; units of more than one node are elementwise and become one `fused` node
 * each, as do elementwise nodes alone. Members form a list in ascending order. A unit is named by
 * the node that it began with. */
typedef struct dw__units {
    const dw_graph *graph;
    uint32_t *unit_of;     /* by node */
    dw_node *next;         /* by node: next member of its unit, DW_NONE at the end */
    dw_node *first, *last; /* by unit */
    uint32_t *size;        /* by unit: members */
    uint32_t *seen;        /* by unit: stamp of the last search that came by */
    uint32_t stamp;
    uint32_t *stack; /* of units, for searches */
    bool *wanted;    /* by value: a node of another unit or the graph's caller reads it */
} dw__units;

/* True for nodes that `fused` can hold. */
bool dw__fuse_is_elementwise(const dw_graph *graph, dw_node node);
/* In pass_fuse_emit.c: appends the unit as one fused node to rewriter->to, whose operands have been
 * made, and maps its results. */
dw_status dw__fuse_emit(dw__rewriter *rewriter, const dw__units *units, uint32_t unit);

#endif
