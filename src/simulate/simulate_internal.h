/* Declarations shared by the files of the simulation. Calls go one way: report, trace, figures -> simulate ->
 * event_simulation -> pipeline_schedule. */
#ifndef DW_SIMULATE_INTERNAL_H
#define DW_SIMULATE_INTERNAL_H

#include "simulate/pipeline_schedule.h"

/* Communication beside an operation: its seconds, and the exposed part, which delays the operation. */
typedef struct dw__traffic_cost {
    double wire, exposed;
} dw__traffic_cost;

enum { DW__INSIDE = DW_STREAM_EXPERT - DW_STREAM_TENSOR + 1 };

/* Traffic beside an operation. The operation's seconds include all exposed parts. */
typedef struct dw__beside_cost {
    dw__traffic_cost inside[DW__INSIDE]; /* inside its layers: tensor, context, expert */
    dw__traffic_cost gather, reduce;     /* ZeRO-3: before its layers, after them */
    dw__traffic_cost host;               /* activations: to the host in forward, back in backward */
} dw__beside_cost;

/* One micro-batch through one chunk of one rank. The seconds of an operation include everything that delays it. */
typedef struct dw__chunk_cost {
    double forward, input, weight; /* unsplit backward takes input + weight */
    /* unsplit backward has the last two */
    dw__beside_cost beside_forward, beside_input, beside_weight;
    double gather, gather_exposed; /* once a step: parameters before the first forward */
    double reduce, reduce_exposed; /* once a step: gradients after the last backward */
    /* from the start of forward to the end of the weight gradients */
    double kept_bytes;
    double logits_bytes; /* while any operation runs */
    double again_bytes;  /* while backward, or backward of inputs, runs */
    /* ZeRO-3 without a pipeline: the layers whose parameters are gathered and freed one by one, and the elements of
     * one layer. 0 layers: the memory of an operation is constant while it runs. */
    int layers;
    double layer_elements;
} dw__chunk_cost;

typedef struct dw__rank_cost {
    double send; /* seconds to a neighbour */
    double sync; /* part of an operation's seconds that paired sends and receives add */
    double optimizer, fixed;
    dw_stream optimizer_stream; /* the host's stream, copies included, or the compute stream */
    double constant_bytes;
    dw_memory_parts memory; /* of its stage, or of both stages if the rank has two */
    double busy_bytes;      /* while any operation runs: gathered parameters */
} dw__rank_cost;

typedef struct dw__step_costs {
    dw__chunk_cost *chunks; /* [rank * chunks + chunk] */
    dw__rank_cost *ranks;
    /* Part of the activations that backward of inputs frees. Weight gradients free the rest. */
    double input_frees;
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
    dw__event_list events; /* sorted by rank and stream, then by time */
    dw__memory_line *memory;
    dw_simulated_rank *ranks;
    dw_simulation_figures figures;
    /* Kept for reports. */
    dw_model_sizes model;
    dw_layout layout;
    dw_hardware *hardware; /* a copy */
    dw_operation_cost operations[DW_OPERATIONS_MOST];
    int operation_count;
    double seconds_to_simulate;
};

/* Simulates `simulation->schedule` with `simulation->costs`. Sets events, memory, ranks and the figures that follow
 * from them: seconds, bubble, idle, overlap, peaks. DW_INTERNAL: the lists deadlock. */
dw_status dw__simulate_events(dw_simulation *simulation);
/* For schedules with split backward: replaces the handcrafted order with the shortest one found for `costs` within
 * the same memory. */
dw_status dw__schedule_order(dw_simulation *simulation);
/* Writes a JSON string that is safe inside HTML: it contains no "<". */
dw_status dw__simulation_write_string(const char *string, dw__text *out);
dw_status dw__simulation_write_json(const dw_simulation *simulation, dw__text *out);
dw_status dw__simulation_begin(dw_pipeline_schedule schedule, int stages, int chunks,
                               int micro_batches, dw_simulation **simulation);

/* Returns the JSON name of a stream, such as "send_next". */
const char *dw__stream_key(dw_stream stream);

#endif
