/* Simulates one training step event by event: what every rank of the pipeline computes, sends, waits for and holds.
 *
 *     dw_simulation *simulation;
 *     dw_simulation_figures figures;
 *     if (dw_simulate(&model, hardware, &layout, &simulation) != DW_OK) return dw_last_error();
 *     dw_simulation_figures_of(simulation, &figures);          // step time, bubble, overlap, MFU, memory
 *     dw_simulation_trace(simulation, "trace.json");           // for chrome://tracing and ui.perfetto.dev
 *     dw_simulation_report(simulation, NULL, "report.html");   // for a browser
 *     dw_simulation_destroy(simulation);
 *
 * Costs come from dw_predict_stage, the order of operations from the schedule. One rank stands for its whole stage: the
 * other ranks of its tensor, context and data parallel groups do the same at the same time. Units: seconds, bytes.
 * docs/dryrun.md has the rules.
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

/* Streams of a rank. Events of one stream run one after another; streams run concurrently. */
typedef enum dw_stream {
    DW_STREAM_COMPUTE,
    DW_STREAM_TENSOR,        /* activations and gradients, within the tensor parallel group */
    DW_STREAM_CONTEXT,       /* keys and values, within the context parallel group */
    DW_STREAM_EXPERT,        /* tokens to their experts and back */
    DW_STREAM_SEND_NEXT,     /* activations or gradients, to the next rank of the pipeline */
    DW_STREAM_SEND_PREVIOUS, /* activations or gradients, to the previous rank */
    DW_STREAM_DATA, /* reduces gradients and gathers parameters, within the data parallel group */
    DW_STREAM_HOST, /* copies to host memory and back */
    DW_STREAMS
} dw_stream;
DW_API const char *dw_stream_name(dw_stream stream); /* "compute" */

typedef enum dw_event_kind {
    DW_EVENT_FORWARD,
    DW_EVENT_BACKWARD,        /* gradients of inputs and weights */
    DW_EVENT_BACKWARD_INPUT,  /* gradients of inputs; the previous stage waits for them */
    DW_EVENT_BACKWARD_WEIGHT, /* gradients of weights; only the optimizer waits for them */
    DW_EVENT_SEND_ACTIVATION,
    DW_EVENT_SEND_GRADIENT,
    DW_EVENT_GATHER, /* parameters */
    DW_EVENT_REDUCE, /* gradients */
    DW_EVENT_TENSOR, /* one event for all layers of an operation, like the next two */
    DW_EVENT_CONTEXT,
    DW_EVENT_EXPERT,
    DW_EVENT_TO_HOST,
    DW_EVENT_FROM_HOST,
    DW_EVENT_OPTIMIZER,
    DW_EVENT_FIXED, /* once per step: norm of the gradients, logging, data */
    DW_EVENT_KINDS
} dw_event_kind;
DW_API const char *dw_event_kind_name(dw_event_kind kind); /* "forward" */

typedef struct dw_event {
    double start, end;
    int32_t micro_batch; /* -1: none */
    int16_t rank;        /* of the pipeline */
    int16_t chunk;       /* of the rank's layers; -1: none */
    uint8_t stream, kind;
} dw_event;

typedef struct dw_memory_point { /* `bytes` are held from `time` to the next point */
    double time, bytes;
} dw_memory_point;

typedef struct dw_simulated_rank {
    double start, end; /* of its first and last event */
    /* Seconds. compute, optimizer, wait and the sum of `exposed` add up to end - start. */
    double compute;   /* forward and backward without exposed communication */
    double optimizer; /* and other work once per step */
    double wait;      /* for other stages */
    double busy[DW_STREAMS];
    double exposed[DW_STREAMS]; /* the part of `busy` that delays the rank */
    double pipeline;            /* from the start of the first operation to the end of the last */
    double occupied; /* the part of `pipeline` spent in operations, with exposed communication */
    /* Fraction of its communication and copies that runs beside computation; 1 if it has none. */
    double overlap;
    double hidden[DW_STREAMS]; /* seconds of each stream that run beside computation */
    double constant_bytes;     /* parameters, gradients, optimizer, overhead */
    double peak_bytes, peak_time;
    int peak_in_flight; /* most chunks of micro-batches whose activations it held at once */
} dw_simulated_rank;

typedef struct dw_simulation_figures {
    int ranks, chunks, micro_batches;
    size_t events;
    double seconds;                /* of a step: the longest time from start to end of one rank */
    double bubble_fraction;        /* idle fraction of the pipeline's time on the busiest rank */
    double idle_fraction;          /* fraction of the step without computation, mean over ranks */
    double overlap;                /* as for one rank, over all of them */
    double mfu, tokens_per_second; /* per GPU; MFU uses the BF16 rate */
    dw_rate peak_rate;             /* the rate of the precision's GEMMs */
    double peak_utilization;       /* the model's FLOP/s over that rate */
    double peak_bytes, peak_time;
    int peak_rank;
    double capacity;
    int fits;
    dw_prediction prediction; /* dw_predict's, for the same layout */
    /* dw_pipeline_bubble: equal stages, backward twice as long as forward, no communication. */
    double closed_bubble;
    /* Speed relative to other layouts on the same hardware: their predicted seconds for this batch divided by this
     * layout's. 0: not available, and the reason says why. */
    double speedup_bf16; /* this layout in BF16 */
    const char *speedup_bf16_reason;
    /* Relative to the baseline: the fastest usual layout that fits, in the same framework and precision. The usual
     * layouts are FSDP (ZeRO-3) over all GPUs, with or without tensor parallelism within a node, and ZeRO-1 with tensor
     * parallelism within a node and a 1F1B or interleaved pipeline. Sizes are powers of 2, experts may use any of them,
     * micro-batches are 1 to 8, recomputation is the least that fits. A twentieth of the memory is left free, as by
     * plans, unless nothing fits so. Context parallelism is used only if nothing fits without it. */
    double speedup;
    dw_layout baseline_layout; /* set if speedup is not 0 */
    char baseline[192];        /* the baseline in words */
    const char *speedup_reason;
} dw_simulation_figures;

typedef struct dw_simulation dw_simulation;

/* Fails with DW_INVALID_ARGUMENT as dw_predict does, or if the schedule does not support the layout (DualPipe needs
 * pairs of stages). DW_UNSUPPORTED: more than DW_SIMULATE_MOST_EVENTS events. */
#define DW_SIMULATE_MOST_EVENTS 20000000
DW_API dw_status dw_simulate(const dw_model_sizes *model, const dw_hardware *hardware,
                             const dw_layout *layout, dw_simulation **simulation);
DW_API void dw_simulation_destroy(dw_simulation *simulation); /* may be NULL */

DW_API void dw_simulation_figures_of(const dw_simulation *simulation,
                                     dw_simulation_figures *figures);
/* `rank` must be below figures.ranks. The returned arrays belong to the simulation. */
DW_API const dw_simulated_rank *dw_simulation_rank(const dw_simulation *simulation, int rank);
DW_API const dw_event *dw_simulation_events(const dw_simulation *simulation, size_t *count);
/* Points are sorted by time; the first one is at 0. */
DW_API const dw_memory_point *dw_simulation_memory(const dw_simulation *simulation, int rank,
                                                   size_t *count);

/* Figures and ranks as JSON. Free *text with dw_text_free. */
DW_API dw_status dw_simulation_json(const dw_simulation *simulation, char **text);
/* Writes trace events (the JSON array format of Chromium's tracing): one process per rank, one thread per stream, one
 * counter for memory. */
DW_API dw_status dw_simulation_trace(const dw_simulation *simulation, const char *path);
/* Writes one self-contained HTML file. `title` names the model and may be NULL. */
DW_API dw_status dw_simulation_report(const dw_simulation *simulation, const char *title,
                                      const char *path);

#ifdef __cplusplus
}
#endif
#endif
