#include "engine/min_cut.h"
#include <string.h>

dw_status dw__cut_open(uint32_t vertex_count, uint32_t source, uint32_t sink, dw__cut *c) {
    size_t bytes = vertex_count * sizeof(uint32_t);
    *c = (dw__cut){.vertex_count = vertex_count, .source = source, .sink = sink};
    c->first = dw__malloc(bytes);
    c->distance = dw__malloc(bytes);
    c->next = dw__malloc(bytes);
    c->queue = dw__malloc(bytes);
    if (!c->first || !c->distance || !c->next || !c->queue)
        return dw__fail_memory("a minimum cut", bytes);
    dw__cut_clear(c);
    return DW_OK;
}

void dw__cut_close(dw__cut *c) {
    dw__free(c->first);
    dw__free(c->distance);
    dw__free(c->next);
    dw__free(c->queue);
    dw__free(c->edges.items);
}

void dw__cut_clear(dw__cut *c) {
    c->edges.count = 0;
    for (uint32_t v = 0; v < c->vertex_count; v++) c->first[v] = DW_NONE;
}

dw_status dw__cut_add_edge(dw__cut *c, uint32_t from, uint32_t to, int64_t capacity) {
    dw__cut_edge forward = {to, c->first[from], capacity}, backward = {from, c->first[to], 0};
    DW_RETURN_IF_FAILED(DW_PUSH(&c->edges, forward));
    c->first[from] = (uint32_t)c->edges.count - 1;
    DW_RETURN_IF_FAILED(DW_PUSH(&c->edges, backward));
    c->first[to] = (uint32_t)c->edges.count - 1;
    return DW_OK;
}

/* Searches breadth-first from the sink against the edges. Returns true if it reaches the source. */
static bool find_distances(dw__cut *c) {
    for (uint32_t v = 0; v < c->vertex_count; v++) c->distance[v] = DW_NONE;
    uint32_t head = 0, tail = 0;
    c->distance[c->sink] = 0;
    c->queue[tail++] = c->sink;
    while (head < tail) {
        uint32_t at = c->queue[head++];
        for (uint32_t e = c->first[at]; e != DW_NONE; e = c->edges.items[e].next) {
            uint32_t from = c->edges.items[e].to; /* edge e ^ 1 leads from that vertex to `at` */
            if (c->distance[from] != DW_NONE || c->edges.items[e ^ 1].room == 0) continue;
            c->distance[from] = c->distance[at] + 1;
            c->queue[tail++] = from;
        }
    }
    return c->distance[c->source] != DW_NONE;
}

/* Returns the next edge of `at` towards the sink. Edges that lead nowhere are skipped for good. */
static uint32_t useful_edge(dw__cut *c, uint32_t at) {
    for (; c->next[at] != DW_NONE; c->next[at] = c->edges.items[c->next[at]].next) {
        const dw__cut_edge *edge = &c->edges.items[c->next[at]];
        if (edge->room > 0 && c->distance[edge->to] != DW_NONE &&
            c->distance[edge->to] + 1 == c->distance[at])
            return c->next[at];
    }
    return DW_NONE;
}

/* Pushes as much flow as the path of `length` edges has room for. Returns how many of its edges lie before the first
 * full one. */
static uint32_t push_path(dw__cut *c, const uint32_t *path, uint32_t length) {
    int64_t flow = DW__CUT_INFINITE;
    uint32_t full = 0;
    for (uint32_t i = 0; i < length; i++)
        if (c->edges.items[path[i]].room < flow) flow = c->edges.items[path[i]].room;
    for (uint32_t i = length; i-- > 0;) {
        c->edges.items[path[i]].room -= flow;
        c->edges.items[path[i] ^ 1].room += flow;
        if (c->edges.items[path[i]].room == 0) full = i;
    }
    return full;
}

/* Pushes a blocking flow along shortest paths until each has a full edge. There are few different path lengths, so
 * there are few rounds. A new search for every path would take time quadratic in the number of layers. */
static void push_flow(dw__cut *c) {
    uint32_t *path = c->queue, length = 0, at = c->source;
    memcpy(c->next, c->first, c->vertex_count * sizeof *c->next);
    for (;;) {
        uint32_t e = at == c->sink ? DW_NONE : useful_edge(c, at);
        if (e != DW_NONE) {
            path[length++] = e;
            at = c->edges.items[e].to;
        } else if (at == c->sink) {
            length = push_path(c, path, length);
            at = c->edges.items[path[length] ^ 1].to;
        } else if (length > 0) { /* nothing leads on from here */
            c->distance[at] = DW_NONE;
            at = c->edges.items[path[--length] ^ 1].to;
        } else {
            return;
        }
    }
}

void dw__cut_solve(dw__cut *c) {
    while (find_distances(c)) push_flow(c);
}

/* The last search did not reach the source. The vertices that it reached are the sink's side. */
bool dw__cut_is_behind(const dw__cut *c, uint32_t vertex) { return c->distance[vertex] != DW_NONE; }
