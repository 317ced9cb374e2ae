/* Minimum cut of a directed graph with capacities (Dinitz 1970).
 *
 * Vertices are numbers below vertex_count. Among equal cuts, finds the one nearest to the sink.
 */
#ifndef DW_MIN_CUT_H
#define DW_MIN_CUT_H

#include "base/base.h"
#include "deepwell/graph.h"

/* Capacity of an edge that is never cut. */
#define DW__CUT_INFINITE ((int64_t)1 << 60)

typedef struct dw__cut_edge {
    uint32_t to, next; /* next: another edge of the same vertex; the reverse edge is index ^ 1 */
    int64_t room;      /* capacity that no flow uses */
} dw__cut_edge;

typedef struct dw__cut {
    uint32_t vertex_count, source, sink;
    uint32_t *first; /* by vertex: its first edge */
    /* Vertices of the running search; or edges of the augmenting path while flow is pushed. */
    uint32_t *queue;
    uint32_t
        *distance;  /* by vertex: edges with room to the sink; DW_NONE: the sink is out of reach */
    uint32_t *next; /* by vertex: the first edge that may still lead to the sink */
    struct {
        dw__cut_edge *items;
        size_t count, capacity;
    } edges;
} dw__cut;

/* Makes a graph without edges. */
dw_status dw__cut_open(uint32_t vertex_count, uint32_t source, uint32_t sink, dw__cut *cut);
/* Safe if open failed or the structure is zeroed. */
void dw__cut_close(dw__cut *cut);
/* Removes all edges. */
void dw__cut_clear(dw__cut *cut);
dw_status dw__cut_add_edge(dw__cut *cut, uint32_t from, uint32_t to, int64_t capacity);
void dw__cut_solve(dw__cut *cut);
/* True if the vertex is on the sink's side of the cut. Call it after dw__cut_solve. */
bool dw__cut_is_behind(const dw__cut *cut, uint32_t vertex);

#endif
