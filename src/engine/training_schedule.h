/* Types and functions that training_schedule.c, saved_values.c, repeated_nodes.c, backward_order.c and
 * kept_values.c share. */
#ifndef DW_TRAINING_SCHEDULE_H
#define DW_TRAINING_SCHEDULE_H

#include "engine/engine_internal.h"

typedef struct dw__scheduling {
    const dw_graph *graph;
    uint32_t node_count, value_count, forward_outputs;
    int64_t *sizes;   /* nominal, by symbol */
    int64_t *bytes;   /* nominal, by value */
    dw_value *root;   /* by value: what it is a view of; itself if it is no view */
    bool *kept;       /* by node: runs in dw_plan_keep, and is in_forward too */
    bool *in_forward; /* by node */
    bool
        *free_root; /* by value: it lies in the caller's memory (a leaf or an output), or is kept */
    bool *recomputed; /* by value: backward computes it again */
    /* The readers of a value are readers[reader_start[value] .. reader_start[value + 1]). */
    uint32_t *reader_start;
    dw_node *readers;
    dw_node *runs_in; /* by node of forward: the program of backward that repeats it, or DW_NONE */
    dw_node *repeats; /* by node of backward: the node of forward that it repeats, or DW_NONE */
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

/* True if backward runs the value's node itself. */
static inline bool dw__computed_in_backward(const dw__scheduling *s, dw_value value) {
    const dw_node node = producer(s, value);
    if (node == DW_NONE) return false;
    return s->in_forward[node] ? s->recomputed[value] : true;
}
/* The node of which backward's order has a repeated node as a part, or the node itself. */
static inline dw_node dw__runs_in(const dw__scheduling *s, dw_node node) {
    return s->runs_in[node] == DW_NONE ? node : s->runs_in[node];
}
/* Operands of a node of backward, those of the node that it repeats included. */
static inline uint32_t dw__operand_count(const dw__scheduling *s, dw_node node) {
    const dw_node repeated = s->repeats[node];
    return record_of(s, node)->input_count +
           (repeated == DW_NONE ? 0 : record_of(s, repeated)->input_count);
}
static inline dw_value dw__operand_at(const dw__scheduling *s, dw_node node, uint32_t index) {
    const dw__node_record *record = record_of(s, node);
    return index < record->input_count
               ? record->inputs[index]
               : record_of(s, s->repeats[node])->inputs[index - record->input_count];
}
/* The node's results, then that of the node that it repeats. */
static inline uint32_t dw__result_count(const dw__scheduling *s, dw_node node) {
    return record_of(s, node)->output_count + (s->repeats[node] != DW_NONE);
}
static inline dw_value dw__result_at(const dw__scheduling *s, dw_node node, uint32_t index) {
    const dw__node_record *record = record_of(s, node);
    return index < record->output_count ? record->outputs[index]
                                        : record_of(s, s->repeats[node])->outputs[0];
}

/* Fills s->kept. Call it when roots are known. */
void dw__choose_kept(dw__scheduling *s);
/* Fills s->recomputed. */
dw_status dw__choose_recomputed(dw__scheduling *s);
/* Fills s->runs_in and s->repeats. */
void dw__join_repeated(dw__scheduling *s);
/* Fills s->order. */
dw_status dw__order_backward(dw__scheduling *s);

#endif
