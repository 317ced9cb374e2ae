/* What the simulation's files share. One direction: report, trace, figures -> simulate -> event_simulation ->
 * pipeline_schedule. */
#ifndef DW_SIMULATE_INTERNAL_H
#define DW_SIMULATE_INTERNAL_H

#include "simulate/pipeline_schedule.h"

/* Communication beside an operation: seconds on the wire, and the part that holds the operation up. */
typedef struct dw__traffic_cost {
    double wire, exposed;
} dw__traffic_cost;

enum { DW__INSIDE = DW_STREAM_EXPERT - DW_STREAM_TENSOR + 1 };

/* What runs beside an operation, whose seconds have all that is exposed in them. */
typedef struct dw__beside_cost {
    dw__traffic_cost inside[DW__INSIDE]; /* among its layers: tensor, context, expert */
    dw__traffic_cost gather, reduce;     /* ZeRO-3: ahead of its layers, behind them */
    dw__traffic_cost host;               /* activations: away in forward, back in backward */
} dw__beside_cost;

/* One micro-batch through one chunk of one rank. Seconds are of the operation with everything that holds it up. */
typedef struct dw__chunk_cost {
    double forward, input, weight; /* backward in one piece takes input + weight */
    dw__beside_cost beside_forward, beside_input, beside_weight; /* of one piece: the latter two */
    double gather, gather_exposed; /* of a step: parameters before the first forward */
    double reduce, reduce_exposed; /* and gradients after the last backward */
    double kept_bytes;             /* from the start of forward to the end of backward of weights */
    double logits_bytes;           /* while anything runs */
    double again_bytes;            /* while backward (of inputs) runs */
    /* ZeRO-3 without a pipeline: layers whose parameters are gathered and freed one by one, and a layer's elements; 0
     * layers: what an operation holds does not change while it runs. */
    int layers;
    double layer_elements;
} dw__chunk_cost;

typedef struct dw__rank_cost {
    double send; /* to a neighbour */
    double sync; /* of an operation's seconds: paired sends and receives */
    double optimizer, fixed;
    dw_stream optimizer_stream; /* the host's, copies included, or of computation */
    double constant_bytes;
    dw_memory_parts memory; /* of its stage; of both, where a rank has two */
    double busy_bytes;      /* while anything runs: gathered parameters */
} dw__rank_cost;

typedef struct dw__step_costs {
    dw__chunk_cost *chunks; /* [rank * chunks + chunk] */
    dw__rank_cost *ranks;
    double
        input_frees; /* part of the activations that backward of inputs lets go; weights' lets go the rest */
} dw__step_costs;

typedef struct dw__event_list {
    dw_event *items;
    size_t count, capacity;
} dw__event_list;
typedef struct dw__memory_line {
    dw_memory_point *items;
    size_t count, capacity;
} dw__memory_line;

struct dw_simulation {
    dw__schedule schedule;
    dw__step_costs costs;
    dw__event_list events; /* by rank and stream, each in the order of time */
    dw__memory_line *memory;
    dw_simulated_rank *ranks;
    dw_simulation_figures figures;
    /* For reports. */
    dw_planner_model model;
    dw_layout layout;
    dw_hardware *hardware; /* a copy */
    dw_operation_cost operations[DW_OPERATIONS_MOST];
    int operation_count;
    double seconds_to_simulate;
};

/* Plays `simulation->schedule` with `simulation->costs`; sets events, memory, ranks and the figures that follow
 * from them: seconds, bubble, idle, overlap, peaks. DW_INTERNAL: the lists wait for each other. */
dw_status dw__simulate_events(dw_simulation *simulation);
/* Where backward comes in two: the shortest order that is found for `costs`, in place of the rule's, within the
 * same memory. */
dw_status dw__schedule_order(dw_simulation *simulation);
/* As JSON has it, and as HTML may: no "<". */
dw_status dw__simulation_write_string(const char *string, dw__text *out);
dw_status dw__simulation_write_json(const dw_simulation *simulation, dw__text *out);
dw_status dw__simulation_begin(dw_pipeline_schedule schedule, int stages, int chunks,
                               int micro_batches, dw_simulation **simulation);

/* "send_next": of streams in JSON. */
const char *dw__stream_key(dw_stream stream);

#endif
