/* One training step, played event by event: what every rank of the pipeline computes, sends, waits for and
 * holds.
 *
 *     dw_simulate               a model, on hardware, in a layout: costs of dw_predict_stage, order of the schedule
 *     dw_simulation_figures_of  step time, bubble, overlap, MFU, memory, beside dw_predict's closed forms
 *     dw_simulation_events      what ran when;   dw_simulation_memory: bytes held over time
 *     dw_simulation_trace       for chrome://tracing and ui.perfetto.dev;   dw_simulation_report: a page for a browser
 *
 * One rank stands for all of its stage: the others of its tensor, context and data parallel groups do the same
 * at the same time. Units: seconds, bytes. docs/dryrun.md has the rules.
 */
#ifndef DEEPWELL_SIMULATE_H
#define DEEPWELL_SIMULATE_H

#include "deepwell/planner.h"
#include "deepwell/status.h"
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What runs one after the other on a rank. Streams run side by side. */
typedef enum dw_stream {
    DW_STREAM_COMPUTE,
    DW_STREAM_TENSOR,        /* activations and gradients among the tensor parallel group */
    DW_STREAM_CONTEXT,       /* keys and values, among the context parallel one */
    DW_STREAM_EXPERT,        /* tokens to their experts and back */
    DW_STREAM_SEND_NEXT,     /* activations or gradients, to the next rank of the pipeline */
    DW_STREAM_SEND_PREVIOUS, /* to the one before */
    DW_STREAM_DATA, /* gradients' reduction, parameters' gathering: the data parallel group */
    DW_STREAM_HOST, /* copies to the host's memory and back */
    DW_STREAMS
} dw_stream;
DW_API const char *dw_stream_name(dw_stream stream); /* "compute" */

typedef enum dw_event_kind {
    DW_EVENT_FORWARD,
    DW_EVENT_BACKWARD,        /* of inputs and weights */
    DW_EVENT_BACKWARD_INPUT,  /* of inputs: what the stage before waits for */
    DW_EVENT_BACKWARD_WEIGHT, /* of weights: what nobody waits for until the optimizer */
    DW_EVENT_SEND_ACTIVATION,
    DW_EVENT_SEND_GRADIENT,
    DW_EVENT_GATHER, /* parameters */
    DW_EVENT_REDUCE, /* gradients */
    DW_EVENT_TENSOR, /* all of an operation's layers in one event; likewise the next two */
    DW_EVENT_CONTEXT,
    DW_EVENT_EXPERT,
    DW_EVENT_TO_HOST,
    DW_EVENT_FROM_HOST,
    DW_EVENT_OPTIMIZER,
    DW_EVENT_FIXED, /* once a step: norm of the gradients, logging, data */
    DW_EVENT_KINDS
} dw_event_kind;
DW_API const char *dw_event_kind_name(dw_event_kind kind); /* "forward" */

typedef struct dw_event {
    double start, end;
    int32_t micro_batch; /* -1: of no one */
    int16_t rank;        /* of the pipeline */
    int16_t chunk;       /* of the rank's layers; -1: of none */
    uint8_t stream, kind;
} dw_event;

typedef struct dw_memory_point { /* from `time` to the next point */
    double time, bytes;
} dw_memory_point;

typedef struct dw_simulated_rank {
    double start, end; /* of its first and last event */
    /* Seconds from start to end: compute, optimizer, wait and exposed of all streams add up to them. */
    double compute;   /* forward and backward themselves */
    double optimizer; /* and what is done once a step */
    double wait;      /* for other stages */
    double busy[DW_STREAMS];
    double exposed[DW_STREAMS]; /* what of it holds the rank up */
    double pipeline; /* from the beginning of the first operation to the end of the last */
    double occupied; /* of it, by operations: compute, and what holds them up */
    double
        overlap; /* of its communication and copies: the part while it computes; 1 where it has none */
    double hidden[DW_STREAMS]; /* seconds of each stream that lie beside computation */
    double constant_bytes;     /* parameters, gradients, optimizer; overhead */
    double peak_bytes, peak_time;
    int peak_in_flight; /* chunks of micro-batches whose activations it held at most at once */
} dw_simulated_rank;

typedef struct dw_simulation_figures {
    int ranks, chunks, micro_batches;
    size_t events;
    double seconds;         /* of a step, start to start: the longest that one rank is at it */
    double bubble_fraction; /* of the pipeline's time, the busiest stage's waiting */
    double idle_fraction;   /* mean over ranks of the part of the step without computation */
    double overlap;         /* as of ranks, over all of them */
    double mfu, tokens_per_second; /* of one GPU; MFU of the BF16 rate */
    dw_rate peak_rate;             /* at which the precision's products run */
    double peak_utilization;       /* model's operations over that rate */
    double peak_bytes, peak_time;
    int peak_rank;
    double capacity;
    int fits;
    dw_prediction prediction; /* dw_predict's, for the same layout */
    double
        closed_bubble; /* dw_pipeline_bubble: stages alike, backward twice as long as forward, no communication */
    /* Speed beside other layouts on the same hardware, each predicted by dw_predict: their seconds for this
     * batch over those of this layout. 0: not to be had, and the reason in words. */
    double speedup_bf16; /* this layout in BF16 */
    const char *speedup_bf16_reason;
    /* The baseline: the fastest that fits of the usual layouts, in the same framework and precision: FSDP (ZeRO-3) over
     * all GPUs with or without tensor parallelism within a node, and ZeRO-1 with tensor parallelism within a node and a
     * pipeline, 1F1B or interleaved; sizes are powers of 2, experts lie over any of them, micro-batches are 1 to 8,
     * recomputation is as it takes to fit; context parallelism where nothing fits without. */
    double speedup;
    dw_layout baseline_layout; /* where speedup is not 0 */
    char baseline[192];        /* it in words */
    const char *speedup_reason;
} dw_simulation_figures;

typedef struct dw_simulation dw_simulation;

/* DW_INVALID_ARGUMENT as dw_predict, and where the schedule's own rule has no such case (DualPipe: pairs of
 * stages); DW_UNSUPPORTED: more than DW_SIMULATE_MOST_EVENTS. */
#define DW_SIMULATE_MOST_EVENTS 20000000
DW_API dw_status dw_simulate(const dw_planner_model *model, const dw_hardware *hardware,
                             const dw_layout *layout, dw_simulation **simulation);
DW_API void dw_simulation_destroy(dw_simulation *simulation); /* NULL allowed */

DW_API void dw_simulation_figures_of(const dw_simulation *simulation,
                                     dw_simulation_figures *figures);
/* rank below figures.ranks. What is returned belongs to the simulation. */
DW_API const dw_simulated_rank *dw_simulation_rank(const dw_simulation *simulation, int rank);
DW_API const dw_event *dw_simulation_events(const dw_simulation *simulation, size_t *count);
/* By time; the first point is at 0. */
DW_API const dw_memory_point *dw_simulation_memory(const dw_simulation *simulation, int rank,
                                                   size_t *count);

/* Figures and ranks as JSON; with dw_text_free. */
DW_API dw_status dw_simulation_json(const dw_simulation *simulation, char **text);
/* Trace events (the JSON array format of Chromium's tracing): a process for each rank, a thread for each
 * stream, a counter for memory. */
DW_API dw_status dw_simulation_trace(const dw_simulation *simulation, const char *path);
/* One HTML file that needs no other and no network. `title` names the model; it may be NULL. */
DW_API dw_status dw_simulation_report(const dw_simulation *simulation, const char *title,
                                      const char *path);

#ifdef __cplusplus
}
#endif
#endif
