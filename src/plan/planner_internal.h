/* Declarations shared by the files of the cost model. Calls go one way: predict -> layer_time, planner_memory,
 * pipeline_time -> kernel_time, collective_time -> constants. */
#ifndef DW_PLANNER_INTERNAL_H
#define DW_PLANNER_INTERNAL_H

#include "base/base.h"
#include "deepwell/planner.h"
#include "model/model_sizes.h"
#include "number/scheme_sets.h"
#include "plan/planner_constants.h"
#include "plan/tile_cost.h"

typedef struct dw__operation_costs {
    dw_operation_cost *items; /* DW_OPERATIONS_MOST */
    int count;
} dw__operation_costs;

/* How the exchange of tokens between experts overlaps computation. */
typedef enum dw__overlap {
    DW__OVERLAP_NONE,
    DW__OVERLAP_MERGED,   /* with the computation of another micro-batch, layer by layer */
    DW__OVERLAP_DUALPIPE, /* by DualPipe's order, which pairs every exchange with computation */
    DW__OVERLAPS
} dw__overlap;
dw__overlap dw__overlap_of(const dw_layout *layout);
/* SMs that the kernels of the exchange take: DeepSeek-V3 technical report, section 3.2.2. */
enum { DW__EXCHANGE_SMS = 20 };

/* Inputs that every formula reads and no formula changes. dw__planned_begin derives them from the arguments. */
typedef struct dw__planned {
    const dw__constants *constants;
    const dw_model_sizes *model;
    const dw_hardware *hardware;
    const dw_layout *layout;
    /* tokens of one micro-batch on one rank: its sequences, divided by context parallelism */
    double tokens;
    int domain;      /* GPUs of the job in one NVLink domain */
    double etp;      /* expert tensor parallelism; a layout's 0 is resolved to its default */
    double atp;      /* attention_tp; a layout's 0 is resolved to tp */
    double attended; /* share of the tokens in the attention of one rank: atp / tp */
    /* ranks that parameters or optimizer states are sharded over; 0 is resolved */
    int shard;
    double gemm_part;  /* part of its GEMM rate that the GPU reaches */
    double power_held; /* part of that which a limit of power leaves; 1: no limit */
    /* attention_rate: FLOP/s before efficiency; attention_part: part of it that kernels reach */
    double attention_rate, attention_part;
    double elementwise;              /* factor of the framework for elementwise traffic */
    int low;                         /* 1: the precision quantizes linear layers */
    dw_rate rate;                    /* of the GEMMs of linear layers */
    int micro_batches;               /* per rank and step */
    dw__operation_costs *operations; /* receives every kernel's cost; NULL: not recorded */
    /* tokens on the busiest expert rank, relative to an even share */
    double expert_load;
    dw__overlap overlap; /* of the expert exchange with computation */
    /* 1: this library's engine on Hopper, which records its steps as CUDA graphs and multiplies experts by its own
     * kernel */
    int own_on_hopper;
    /* Active parameters as stated over those counted from the widths. It differs from 1 for hybrids, whose
     * state-space blocks the widths do not describe. */
    double linear_scale;
} dw__planned;
void dw__planned_begin(dw__planned *planned, const dw__constants *constants,
                       const dw_model_sizes *model, const dw_hardware *hardware,
                       const dw_layout *layout);

/* ---- the model ---- */
/* share of the layers that have attention: below 1 in hybrids */
double dw__attention_part_of_layers(const dw_model_sizes *model);
double dw__window_layers(const dw_model_sizes *model); /* layers with sliding-window attention */
/* Returns how many tokens a token attends to on average under a causal mask, in layers with the window or without. */
double dw__seen_tokens(const dw_model_sizes *model, double span, int windowed);
/* trained share of the parameters: 1, or the adapters' share */
double dw__trained_part(const dw_model_sizes *model);

/* Returns 1 if the framework's attention is FlashAttention-2. */
int dw__attends_as_ampere(const dw_layout *layout);

/* Returns the usable value of a figure: a measured figure as it is, a peak times `part`. */
double dw__reached(const dw_figure *figure, double part);

/* ---- kernels: seconds on one GPU ---- */

/* The part of the peak rate that large GEMMs of the vendor's library reach. Capability 0: AMD. */
double dw__gemm_part(const dw__constants *constants, int capability);
typedef struct dw__gemm_machine {
    int capability;
    double sm_count;
    double rate;      /* FLOP/s of large GEMMs */
    double bandwidth; /* bytes/s of memory, as reached */
    double depth;     /* inner dimension at which a GEMM reaches half of its rate */
} dw__gemm_machine;
/* The model of the library's GEMMs: `groups` of m rows by a k x n matrix, which move `bytes` in all. The planner, and
 * the entry of the library's kernel in the registry, compute with it. */
double dw__gemm_model(const dw__constants *constants, const dw__gemm_machine *machine, double m,
                      double n, double k, double groups, double bytes);
/* The model at the planned hardware's figures, with the least traffic or with `bytes`. */
double dw__gemm_seconds(const dw__planned *planned, double m, double n, double k, double groups,
                        int low);
double dw__gemm_seconds_of_bytes(const dw__planned *planned, double m, double n, double k,
                                 double groups, int low, double bytes);
/* Seconds of the project's grouped GEMMs on Hopper: the clocks that the kernel's own cost model counts, at the part of
 * the data sheet's rate that the kernel reaches, combined with the traffic. */
double dw__own_grouped_seconds(const dw__planned *planned, const dw__tile_work *work, double bytes);
/* Returns the least traffic of a GEMM: each operand read once, the result written once. */
double dw__gemm_bytes(const dw__planned *planned, double m, double n, double k, double groups,
                      int low);
double dw__attention_forward_seconds(const dw__planned *planned, int windowed);
double dw__traffic_seconds(const dw__planned *planned, double bytes);

/* ---- collectives: seconds ---- */
/* Ranks are numbered with tensor parallelism innermost, then context, data and pipeline. Expert parallelism spans the
 * tensor, context and data ranks. */
int dw__domain_of(const dw_hardware *hardware, int gpus);
/* The ranks are `stride` apart. `bytes` is what a rank holds after a gather or before a reduction; it travels in
 * `messages` messages. */
double dw__gather_seconds(const dw__planned *planned, double bytes, int ranks, int stride,
                          double messages);
double dw__exchange_seconds(const dw__planned *planned, double bytes, int ranks, int stride,
                            double copies);
double dw__send_seconds(const dw__planned *planned, double bytes, int stride);
/* Returns the share of the link between GPU and host that a collective of `span` neighbouring ranks occupies while it
 * runs. Network adapters share that link, and so do the other GPUs where there is no NVLink. */
double dw__host_link_share(const dw__planned *planned, int span);

/* ---- a layer, one micro-batch ---- */
typedef struct dw__layer_time {
    dw_time_parts forward, backward; /* only the parts that occur inside a layer */
    double weight;                   /* seconds of backward spent on weight gradients */
} dw__layer_time;
/* Fractions of the traffic's seconds that computation does not hide. */
typedef struct dw__exposed_parts {
    double tensor, context, expert;
} dw__exposed_parts;
dw__exposed_parts dw__exposed_parts_of(const dw__planned *planned);
typedef enum dw__layer_kind { DW__LAYER_DENSE, DW__LAYER_MOE, DW__LAYER_HEAD } dw__layer_kind;
/* ---- parts of a layer, added to its time ---- */
/* The three GEMMs of a linear layer. Frozen weights (LoRA) need no weight gradient. */
void dw__add_linear(const dw__planned *planned, const char *name, double tokens, double in,
                    double out, int low, dw__layer_time *time);
/* Rounding the operands of `groups` linear layers to the layout's precision. */
void dw__add_quantization(const dw__planned *planned, double tokens, double in, double out,
                          double groups, dw__layer_time *time);
/* Elementwise kernels by the bytes that forward moves unfused: the framework's factor applies. */
void dw__add_elementwise(const dw__planned *planned, const char *name, double bytes,
                         dw__layer_time *time);
void dw__add_dense_mlp(const dw__planned *planned, double width, double tp, dw__layer_time *time);
/* Records single kernels for dw_predict_operations. A search does not record them. */
void dw__note_kernel(const dw__planned *planned, const char *name, const char *pass,
                     double operations, double bytes, double seconds, int low);
/* Tokens on the busiest rank of experts, relative to an even share: as the layout states, else what chance makes of a
 * router that prefers no expert. The rows of a rank are then a sum of independent choices with a mean of n and a
 * variance of n (1 - 1/r), and the largest of r such sums is sqrt(2 ln r) deviations above the mean (the expectation of
 * the largest of r normal numbers, for large r). Padded experts have an even share. */
double dw__expert_load(const dw__planned *planned);
/* Router, order of tokens, experts, shared experts, exchange (mixture_time.c). */
void dw__add_mixture(const dw__planned *planned, dw__layer_time *time);
/* Returns 1 if layers are launched as CUDA graphs: the layout says so, the framework compiles one program for the whole
 * step, or it is this library's engine on Hopper, which records what it runs. Experts may stay outside of the graphs
 * (dw__mixture_host_seconds). */
int dw__runs_as_graphs(const dw__planned *planned);
/* Seconds of the host for the launches of a mixture that no CUDA graph contains, or all of them without graphs. */
double dw__mixture_host_seconds(const dw__planned *planned);

/* Computes attention, norms and residuals, which dense and mixture layers have in common. */
void dw__attention_part(const dw__planned *planned, dw__layer_time *time);
void dw__layer_seconds(const dw__planned *planned, dw__layer_kind kind,
                       const dw__layer_time *attention_part, dw__layer_time *time);
void dw__head_seconds(const dw__planned *planned, dw__layer_time *time);
double dw__parts_sum(const dw_time_parts *parts);
/* Times that depend only on the sizes, not on sharding, schedule or recomputation: the expensive part of a
 * prediction. */
typedef struct dw__layer_times {
    dw__layer_time dense, moe, head;
} dw__layer_times;
typedef struct dw__layer_memo { /* initialize with zeros; one for each choice of sizes */
    int known[DW__OVERLAPS];    /* index: dw__overlap */
    dw__layer_times times[DW__OVERLAPS];
} dw__layer_memo;

/* ---- stages ---- */
/* Returns the layers in all chunks of a stage. */
double dw__stage_layers(const dw__planned *planned, int stage);
double dw__stage_parameters(const dw__planned *planned, int stage, double *experts);
/* Attention may use less tensor parallelism than the rest of a layer. Returns the attention elements on a rank under
 * attention_tp, and in `excess` how many more these are than under tp. dw__stage_parameters leaves the excess out,
 * because tp / attention_tp ranks hold the same elements and share them as replicas do. */
double dw__stage_attention(const dw__planned *planned, int stage, double *excess);
/* the last stage; the first one for ZB-V, whose pipeline turns back */
int dw__head_stage(const dw_layout *layout);

/* ---- pipelines ---- */
typedef struct dw__turn { /* seconds of one micro-batch in all chunks of a rank */
    double forward, input, weight;
} dw__turn;
typedef struct dw__pipeline {
    dw_pipeline_schedule schedule;
    int stages, chunks, micro_batches;
    /* middle: the heaviest stage between first and last; mean: the average of those stages */
    dw__turn first, middle, mean, last;
    int heaviest; /* index of the last stage as heavy as `middle` */
    double send;  /* seconds to send activations to the next rank, or gradients back */
    /* fraction of a micro-batch's activations still held after backward of inputs */
    double weight_kept;
} dw__pipeline;
/* Sets `mean`, `middle` and `heaviest` for the stages between the ends. `middle` must hold the second stage's time. */
void dw__pipeline_finish(const dw__planned *planned, dw__pipeline *pipeline);
double dw__pipeline_heaviest(
    const dw__pipeline *pipeline); /* seconds of a micro-batch on the busiest rank */
double dw__pipeline_mean(const dw__pipeline *pipeline); /* average over all ranks */
void dw__pipeline_equal(dw__pipeline *pipeline);        /* sets every stage to the mean */
double dw__weight_kept(const dw__planned *planned, dw_recompute recompute);
/* Returns the longest time of any rank from its first operation to its last. */
double dw__pipeline_seconds(const dw__pipeline *pipeline);

/* ---- the data parallel group: seconds of traffic, of one stage ---- */
typedef struct dw__data_traffic {
    /* 1: `gather` occurs every micro-batch (ZeRO-3 without a pipeline); 0: once a step */
    int each;
    int reduce_each;       /* the same for `again` and `reduce`; also set for ZeRO-2 */
    double gather, reduce; /* gather: parameters; reduce: gradients */
    double again;          /* second gather of the parameters, for backward */
    double across;         /* once a step, between replicas of a sharded group */
} dw__data_traffic;
void dw__data_traffic_of(const dw__planned *planned, int stage, dw__data_traffic *traffic);
/* Returns 1 if a rank keeps only its shard of the gradients between micro-batches. */
int dw__gradients_are_cut(const dw_layout *layout);
/* Returns the seconds of traffic left over when `room` seconds of computation run beside it. */
double dw__data_exposed(const dw__planned *planned, double traffic, double room);

/* ---- the host's memory ---- */
double dw__host_copy_seconds(const dw__planned *planned, double bytes); /* one way */
/* In each micro-batch `bytes` go to the host during the stage's `forward` seconds and come back during its `backward`
 * seconds. Returns in `exposed` what these do not hide in either direction. */
void dw__offload_seconds(const dw__planned *planned, int stage, double bytes, double forward,
                         double backward, double exposed[2]);

/* ---- once a step, and factors on the whole step ---- */
double dw__optimizer_seconds(const dw__planned *planned, int stage);
double dw__optimizer_host_seconds(const dw__planned *planned,
                                  int stage); /* 0: it runs on the GPU */
/* Returns the fraction of its computation that a stage waits for its neighbour, for schedules that pair sends with
 * receives. */
double dw__pipeline_sync(const dw__constants *constants, const dw_layout *layout);
/* factor for stragglers, and for kernels slower than alone */
double dw__slowdown(const dw__planned *planned);
double dw__step_fixed(const dw__planned *planned);        /* seconds for norms, logging, data */
double dw__micro_batch_fixed(const dw__planned *planned); /* seconds of host work */

/* ---- memory ---- */
void dw__memory(const dw__planned *planned, dw_recompute recompute, int recompute_layers, int stage,
                dw_memory_parts *memory);
/* Bytes of one micro-batch in all layers of a stage. */
typedef struct dw__activation_bytes {
    double kept;   /* from forward to backward, on the GPU */
    double moved;  /* from forward to backward, in the host's memory */
    double staged; /* on the GPU for the copies to and from the host, beside `kept` */
    double again;  /* needed while backward recomputes a layer */
    double logits; /* logits and loss, on the stage with the head */
} dw__activation_bytes;
void dw__activation_bytes_of(const dw__planned *planned, dw_recompute recompute,
                             int recompute_layers, int stage, dw__activation_bytes *bytes);
int dw__is_deepspeed(const dw_layout *layout);
double dw__fragments(const dw__planned *planned, const dw_memory_parts *memory);
/* Returns the part of dw__fragments that the allocator frees before it fails. */
double dw__given_back(const dw__planned *planned, const dw_memory_parts *memory);
/* Returns the host memory in bytes that one rank of the stage needs for optimizer states and activations. */
void dw__host_memory(const dw__planned *planned, dw_recompute recompute, int recompute_layers,
                     int stage, double *optimizer, double *activations);
/* Bytes per element: as the layout states, else the framework's default. */
typedef struct dw__element_bytes {
    double parameter, gradient, optimizer;
} dw__element_bytes;
dw__element_bytes dw__element_bytes_of(const dw_layout *layout);
/* Returns the elements whose optimizer states one rank of the stage holds. */
double dw__optimizer_elements(const dw__planned *planned, int stage);
double dw__layer_activation_bytes(const dw__planned *planned, dw_recompute recompute, int moe);

void dw__predict(const dw__constants *constants, const dw_model_sizes *model,
                 const dw_hardware *hardware, const dw_layout *layout, dw_prediction *prediction);
/* The same, reusing `memo`, which must belong to the layout's sizes. */
void dw__predict_again(const dw__constants *constants, const dw_model_sizes *model,
                       const dw_hardware *hardware, const dw_layout *layout, dw__layer_memo *memo,
                       dw_prediction *prediction);
/* ---- lower bounds for all layouts of given sizes ---- */
/* Returns the seconds of one micro-batch in all layers and the head: a bound for any stages, replicas, sharding,
 * schedule and recomputation. The expert exchange is overlapped as by `overlap`, whatever the layout's schedule. */
double dw__least_layers(const dw__constants *constants, const dw_model_sizes *model,
                        const dw_hardware *hardware, const dw_layout *layout, dw__overlap overlap);
/* A factor, seconds per step and seconds per micro-batch. They turn the seconds of computation and traffic into a
 * step. */
typedef struct dw__step_rest {
    double slow, step, micro_batch;
} dw__step_rest;
dw__step_rest dw__step_rest_of(const dw__constants *constants, const dw_model_sizes *model,
                               const dw_hardware *hardware, const dw_layout *layout);
double dw__step_least(const dw__step_rest *rest, double micro_batches, double seconds);
/* Stage times of one choice of sizes with one recomputation and nothing offloaded. */
typedef struct dw__stage_memo { /* initialize with zeros */
    dw__layer_memo *layers;
    /* First index: dw__overlap. Second index: 1 if the head is on the first stage. */
    int known[DW__OVERLAPS][2];
    struct dw__stage_sums {
        dw__pipeline pipeline;    /* its schedule and chunks are not set */
        double total;             /* all micro-batches without a pipeline */
        double forward, backward; /* of the heaviest stage */
    } sums[DW__OVERLAPS][2];
} dw__stage_memo;
/* Returns the seconds of a step under the layout's schedule, without sharding. */
double dw__turns_seconds(const dw__constants *constants, const dw_model_sizes *model,
                         const dw_hardware *hardware, const dw_layout *layout,
                         dw__stage_memo *memo);
/* Returns the number of layers that take as long as the head. Call dw__turns_seconds for this layout first. */
double dw__head_layers(const dw_model_sizes *model, const dw_layout *layout, dw__stage_memo *memo);
/* Returns the seconds of a step that the layout's sharding adds: exposed traffic and the optimizer. `computing`
 * receives the mean stage's computation, with the expert exchange overlapped as by `overlap`. */
double dw__sharding_seconds(const dw__constants *constants, const dw_model_sizes *model,
                            const dw_hardware *hardware, const dw_layout *layout,
                            dw__overlap overlap, dw__stage_memo *memo, double *computing);
/* Returns the rate that bounds the GEMMs of a precision. */
dw_rate dw__rate_of(dw_scheme precision);
/* The precisions whose cost the planner can predict. */
extern const dw__scheme_set dw__planned_schemes;

#endif
