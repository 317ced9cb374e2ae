/* Types and functions that training_schedule.c, saved_values.c and backward_order.c share. */
#ifndef DW_TRAINING_SCHEDULE_H
#define DW_TRAINING_SCHEDULE_H

#include "engine/engine_internal.h"

typedef struct dw__scheduling {
    const dw_graph *graph;
    uint32_t node_count, value_count, forward_outputs;
    int64_t *sizes;   /* nominal, by symbol */
    int64_t *bytes;   /* nominal, by value */
    dw_value *root;   /* by value: what it is a view of; itself if it is no view */
    bool *in_forward; /* by node */
    bool *free_root;  /* by value: it lies in the caller's memory (a leaf or an output) */
    bool *recomputed; /* by value: backward computes it again */
    /* Order of backward. */
    dw_node *order; /* nodes of the given graph, in backward's order */
    size_t order_count;
    bool *emitted;        /* by node: it is in the order */
    bool *real;           /* by node: placed by its growth, not emitted on demand */
    uint32_t *reads;      /* by root: reads by real nodes that are not in the order yet */
    bool *live;           /* by root: in memory now */
    bool *ready;          /* by node on demand: all of its operands can be had; stays true */
    uint32_t *first_view; /* by node: the first output of backward that is a view of its result */
    uint32_t *next_view;  /* by output: the next output that is a view of the same node's result */
    dw_node *stack;       /* a path of nodes, each an operand of the one before */
    dw__rewriter rewriter;
} dw__scheduling;

static inline const dw__node_record *record_of(const dw__scheduling *s, dw_node node) {
    return &s->graph->nodes.items[node];
}
static inline dw_node producer(const dw__scheduling *s, dw_value value) {
    return s->graph->values.items[value].node;
}

/* Fills s->recomputed. */
dw_status dw__choose_recomputed(dw__scheduling *s);
/* Fills s->order. */
dw_status dw__order_backward(dw__scheduling *s);

#endif
