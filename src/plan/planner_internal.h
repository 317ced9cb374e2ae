/* What the files of the predictions share. One direction: predict -> layer_time, planner_memory, pipeline_time ->
 * kernel_time, collective_time -> constants. */
#ifndef DW_PLANNER_INTERNAL_H
#define DW_PLANNER_INTERNAL_H

#include "base/base.h"
#include "deepwell/planner.h"
#include "plan/planner_constants.h"

typedef struct dw__operation_costs {
    dw_operation_cost *items; /* DW_OPERATIONS_MOST */
    int count;
} dw__operation_costs;

/* What every formula needs and no formula changes. */
typedef struct dw__planned {
    const dw__constants *constants;
    const dw_planner_model *model;
    const dw_hardware *hardware;
    const dw_layout *layout;
    double tokens;    /* of a micro-batch on one rank: its sequences, cut by context parallelism */
    int domain;       /* GPUs of the job that NVLink joins */
    double etp;       /* resolved */
    double atp;       /* attention_tp, resolved */
    double attended;  /* part of the tokens that a rank's attention has: atp / tp */
    int shard;        /* resolved */
    double gemm_part; /* of the rates of products */
    double attention_rate,
        attention_part;              /* operations a second, and the part of them that is reached */
    double elementwise;              /* the framework's factor */
    int low;                         /* the recipe quantizes */
    dw_rate rate;                    /* of linear layers */
    int micro_batches;               /* of one rank, a step */
    dw__operation_costs *operations; /* NULL, or where kernels are written down */
    double expert_load;              /* tokens of the heaviest rank of experts, of an even share */
    double
        linear_scale; /* linear layers' work as stated, of what the widths say: blocks of other kinds */
} dw__planned;
void dw__planned_begin(dw__planned *planned, const dw__constants *constants,
                       const dw_planner_model *model, const dw_hardware *hardware,
                       const dw_layout *layout);

/* ---- the model: elements ---- */
double dw__attention_parameters(const dw_planner_model *model);
double dw__dense_mlp_parameters(const dw_planner_model *model);
double dw__expert_parameters(const dw_planner_model *model); /* of one */
double dw__shared_parameters(const dw_planner_model *model);
double dw__router_parameters(const dw_planner_model *model);
double dw__embedding_parameters(const dw_planner_model *model); /* one table */
int dw__moe_layers(const dw_planner_model *model);
double dw__window_layers(const dw_planner_model *model); /* with sliding-window attention */
/* Tokens that one sees in the mean, in layers with the window or without, causal. */
double dw__seen_tokens(const dw_planner_model *model, double span, int windowed);
double dw__counted_active(const dw_planner_model *model); /* of the widths, whatever is stated */
double dw__trained_part(const dw_planner_model *model); /* of the parameters: 1, or the adapters' */

/* The framework's attention is FlashAttention-2. */
int dw__attends_as_ampere(const dw_layout *layout);

/* ---- graphs ---- */
/* A copy in which composites are found again. */
dw_status dw__planner_graph_recognized(const dw_graph *graph, dw_graph **recognized);
/* The parameter that a value is, or a view or a cast of; DW_NONE: it is computed from others. */
dw_value dw__parameter_behind(const dw_graph *graph, dw_value value);

/* What is reached of a figure: a measured one whole, of a peak the part that kernels reach. */
double dw__reached(const dw_figure *figure, double part);

/* ---- kernels: seconds on one GPU ---- */
double dw__gemm_seconds(const dw__planned *planned, double m, double n, double k, double groups,
                        int low);
/* What a product reads and writes at least. */
double dw__gemm_bytes(const dw__planned *planned, double m, double n, double k, double groups,
                      int low);
double dw__attention_forward_seconds(const dw__planned *planned, int windowed);
double dw__traffic_seconds(const dw__planned *planned, double bytes);

/* ---- collectives: seconds ---- */
/* Ranks are numbered with tensor innermost, then context, data, pipeline; experts lie across tensor, context
 * and data. */
int dw__domain_of(const dw_hardware *hardware, int gpus);
/* Ranks `stride` apart; `bytes` is what a rank holds after a gather or before a reduction, in so many messages. */
double dw__gather_seconds(const dw__planned *planned, double bytes, int ranks, int stride,
                          double messages);
double dw__exchange_seconds(const dw__planned *planned, double bytes, int ranks, int stride,
                            double copies);
double dw__send_seconds(const dw__planned *planned, double bytes, int stride);
/* Of the link between GPU and host: the part that a collective of `span` neighbouring ranks takes while it lasts. The
 * adapters of the network, and without NVLink the other GPUs too, are behind that link. */
double dw__host_link_share(const dw__planned *planned, int span);

/* ---- a layer, one micro-batch ---- */
typedef struct dw__layer_time {
    dw_time_parts forward, backward; /* only the parts that a layer has */
    double weight;                   /* seconds of backward that are of weights alone */
} dw__layer_time;
/* Of the seconds on the wire, what computation does not hide. */
typedef struct dw__exposed_parts {
    double tensor, context, expert;
} dw__exposed_parts;
dw__exposed_parts dw__exposed_parts_of(const dw__planned *planned);
typedef enum dw__layer_kind { DW__LAYER_DENSE, DW__LAYER_MOE, DW__LAYER_HEAD } dw__layer_kind;
/* Attention, norms and residuals, of which layers of either kind have the same. */
void dw__attention_part(const dw__planned *planned, dw__layer_time *time);
void dw__layer_seconds(const dw__planned *planned, dw__layer_kind kind,
                       const dw__layer_time *attention_part, dw__layer_time *time);
void dw__head_seconds(const dw__planned *planned, dw__layer_time *time);
double dw__parts_sum(const dw_time_parts *parts);
/* Of a choice of sizes, whatever its sharding, schedule and recomputation: all that takes long to compute. */
typedef struct dw__layer_times {
    dw__layer_time dense, moe, head;
} dw__layer_times;
typedef struct dw__layer_memo { /* begin with zeros; one for each choice of sizes */
    int known[2];               /* with tokens' exchange overlapped, and without */
    dw__layer_times times[2];
} dw__layer_memo;

/* ---- stages ---- */
/* Layers of all chunks of a stage; with a chunk >= 0 of that chunk alone. */
double dw__stage_layers(const dw__planned *planned, int stage);
double dw__stage_parameters(const dw__planned *planned, int stage, double *experts);
/* Of attention, where its tensor parallelism is less than the rest's: elements that `attention_tp` leaves on a
 * rank, and what these are more than with tp. dw__stage_parameters is without the excess, which tp /
 * attention_tp ranks share like replicas. */
double dw__stage_attention(const dw__planned *planned, int stage, double *excess);
int dw__head_stage(
    const dw_layout *layout); /* the last; where the pipeline turns round, the first */

/* ---- pipelines ---- */
typedef struct dw__turn { /* seconds of one micro-batch in all chunks of a rank */
    double forward, input, weight;
} dw__turn;
typedef struct dw__pipeline {
    dw_pipeline_schedule schedule;
    int stages, chunks, micro_batches;
    dw__turn first, middle, mean,
        last;           /* middle: the heaviest between first and last; mean: of those between */
    int heaviest;       /* the last one of the heaviest between */
    double send;        /* of activations to the next rank, of gradients back */
    double weight_kept; /* of a micro-batch's activations, what is left after backward of inputs */
} dw__pipeline;
/* Its mean and its heaviest stage between the ends, from the one after the first. */
void dw__pipeline_finish(const dw__planned *planned, dw__pipeline *pipeline);
double dw__pipeline_heaviest(
    const dw__pipeline *pipeline); /* seconds of a micro-batch on the busiest rank */
double dw__pipeline_mean(const dw__pipeline *pipeline); /* on all of them, in the mean */
void dw__pipeline_equal(dw__pipeline *pipeline);        /* every stage as the mean one */
double dw__weight_kept(const dw__planned *planned, dw_recompute recompute);
/* The longest that one rank is at its work, from its first operation to its last. */
double dw__pipeline_seconds(const dw__pipeline *pipeline);

/* ---- the data parallel group: seconds on the wire, of one stage ---- */
typedef struct dw__data_traffic {
    int each;              /* 1: of every micro-batch (ZeRO-3 without a pipeline); 0: of a step */
    int reduce_each;       /* the same of `again` and `reduce`: ZeRO-2 as well */
    double gather, reduce; /* of parameters, of gradients */
    double again;          /* gathered once more, for backward */
    double across;         /* of a step: between replicas of what is sharded */
} dw__data_traffic;
void dw__data_traffic_of(const dw__planned *planned, int stage, dw__data_traffic *traffic);
/* Each rank keeps its part of the gradients while micro-batches add to it. */
int dw__gradients_are_cut(const dw_layout *layout);
/* What `room` seconds of computation beside it do not hide. */
double dw__data_exposed(const dw__planned *planned, double traffic, double room);

/* ---- the host's memory ---- */
double dw__host_copy_seconds(const dw__planned *planned, double bytes); /* one way */
/* `bytes` of one micro-batch leave during `forward` seconds of a stage and are back in `backward` seconds of it: what
 * these do not hide of either way. */
void dw__offload_seconds(const dw__planned *planned, int stage, double bytes, double forward,
                         double backward, double exposed[2]);

/* ---- once a step, and for all that is done in it ---- */
double dw__optimizer_seconds(const dw__planned *planned, int stage);
double dw__optimizer_host_seconds(const dw__planned *planned,
                                  int stage); /* 0: it runs on the GPU */
/* Schedules whose sends and receives are pairs: what a stage waits for its neighbour, of what it computes. */
double dw__pipeline_sync(const dw__constants *constants, const dw_layout *layout);
double dw__slowdown(const dw__planned *planned);   /* factor: kernels not alone, stragglers */
double dw__step_fixed(const dw__planned *planned); /* seconds: norms, logging, data */
double dw__micro_batch_fixed(const dw__planned *planned); /* seconds of the host */

/* ---- memory ---- */
void dw__memory(const dw__planned *planned, dw_recompute recompute, int recompute_layers, int stage,
                dw_memory_parts *memory);
/* One micro-batch in all of a stage's layers. */
typedef struct dw__activation_bytes {
    double kept;   /* from forward to backward, on the GPU */
    double moved;  /* the same in the host's memory */
    double staged; /* on the GPU of what is moved, beside `kept` */
    double again;  /* while backward computes a layer again */
    double logits; /* and loss; of the stage that has the head */
} dw__activation_bytes;
void dw__activation_bytes_of(const dw__planned *planned, dw_recompute recompute,
                             int recompute_layers, int stage, dw__activation_bytes *bytes);
int dw__is_deepspeed(const dw_layout *layout);
double dw__fragments(const dw__planned *planned, const dw_memory_parts *memory);
/* Of these, what the allocator returns before it fails. */
double dw__given_back(const dw__planned *planned, const dw_memory_parts *memory);
/* Bytes of the host's memory that a rank of the stage needs: optimizer, activations. */
void dw__host_memory(const dw__planned *planned, dw_recompute recompute, int recompute_layers,
                     int stage, double *optimizer, double *activations);
/* Of one element, as the layout or the framework has it. */
typedef struct dw__element_bytes {
    double parameter, gradient, optimizer;
} dw__element_bytes;
dw__element_bytes dw__element_bytes_of(const dw_layout *layout);
/* Elements that a rank of the stage holds the optimizer's states of. */
double dw__optimizer_elements(const dw__planned *planned, int stage);
double dw__layer_activation_bytes(const dw__planned *planned, dw_recompute recompute, int moe);

void dw__predict(const dw__constants *constants, const dw_planner_model *model,
                 const dw_hardware *hardware, const dw_layout *layout, dw_prediction *prediction);
/* The same; `memo` is of the layout's sizes. */
void dw__predict_again(const dw__constants *constants, const dw_planner_model *model,
                       const dw_hardware *hardware, const dw_layout *layout, dw__layer_memo *memo,
                       dw_prediction *prediction);
/* ---- what no layout of some sizes is below ---- */
/* One micro-batch in all layers and the head, whatever the stages, replicas, sharding, schedule and recomputation. */
double dw__least_layers(const dw__constants *constants, const dw_planner_model *model,
                        const dw_hardware *hardware, const dw_layout *layout);
/* A step of which so many seconds are known: times slow, and fixed besides. */
typedef struct dw__step_rest {
    double slow, step, micro_batch;
} dw__step_rest;
dw__step_rest dw__step_rest_of(const dw__constants *constants, const dw_planner_model *model,
                               const dw_hardware *hardware, const dw_layout *layout);
double dw__step_least(const dw__step_rest *rest, double micro_batches, double seconds);
/* The stages' times of a choice of sizes with one recomputation and nothing offloaded. */
typedef struct dw__stage_memo { /* begin with zeros */
    dw__layer_memo *layers;
    /* Tokens' exchange in the open, and overlapped; the head on the last stage, and on the first. */
    int known[2][2];
    struct dw__stage_sums {
        dw__pipeline pipeline;    /* but for its schedule and chunks */
        double total;             /* without a pipeline, of all micro-batches */
        double forward, backward; /* of the heaviest */
    } sums[2][2];
} dw__stage_memo;
/* Of a step what the layout's schedule takes, whatever the sharding. */
double dw__turns_seconds(const dw__constants *constants, const dw_planner_model *model,
                         const dw_hardware *hardware, const dw_layout *layout,
                         dw__stage_memo *memo);
/* So many layers take as long as the head does; after dw__turns_seconds of this layout. */
double dw__head_layers(const dw_planner_model *model, const dw_layout *layout,
                       dw__stage_memo *memo);
/* Of a step what the layout's sharding takes: traffic that nothing hides, and the optimizer. `computing`: the mean
 * stage's computation. */
double dw__sharding_seconds(const dw__constants *constants, const dw_planner_model *model,
                            const dw_hardware *hardware, const dw_layout *layout,
                            dw__stage_memo *memo, double *computing);
/* The GPU's rate that a recipe's products run at. */
dw_rate dw__rate_of(dw_train_precision precision);

#endif
