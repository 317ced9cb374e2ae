/* What a training step costs, predicted: seconds and bytes of a model, on hardware, in a layout.
 *
 *     dw_planner_model_named, _load    a model of the catalogue, of a config.json
 *     dw_predict         one layout: the step's time and its parts, the memory of the heaviest rank
 *     dw_predict_stage   one stage of the pipeline, for a simulation of the schedule
 *     dw_predict_operations   the kernels of a layer, one by one
 *     dw_layout_check    whether sizes divide, with the reason where they do not
 *
 * Plain structures, no allocation, some microseconds: a search calls it for every layout that it considers.
 * Units: seconds, bytes, operations (a multiplication and an addition are two). docs/planner.md has the model.
 */
#ifndef DEEPWELL_PLANNER_H
#define DEEPWELL_PLANNER_H

#include "deepwell/graph.h"
#include "deepwell/hardware.h"
#include "deepwell/model.h"
#include "deepwell/status.h"
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the model ------------------------------------------------------------------------------------------------- */

typedef struct dw_planner_model {
    int layers, hidden, heads, kv_heads, head_dim;
    int ffn;        /* width of a dense block's MLP */
    int gated;      /* 1: gate, up and down (SwiGLU); 0: up and down */
    int vocabulary; /* rows of the embedding */
    int tied;       /* the head is the embedding */
    int positions;  /* rows of a learned table of positions; 0: none */
    int experts;    /* 0: dense */
    int top_k;
    int expert_ffn;   /* width of one expert */
    int shared_ffn;   /* width of the experts that every token visits, together */
    int dense_layers; /* the first ones, of a mixture */
    int moe_every;    /* of the rest, every n-th layer is a mixture; 1: all of them */
    int q_rank,
        kv_rank; /* of latent attention (MLA); kv_rank 0: ordinary attention. q_rank 0: no query compression */
    int rope_dim;     /* of MLA: shared rotary part of the keys; head_dim is the rest */
    int value_dim;    /* 0: head_dim */
    int window;       /* of sliding-window attention; 0: none */
    int window_every; /* 2: every other layer has the window; 1: all */
    int window_layers; /* layers with the window, where it is no such part of them; 0: by window_every */
    int attention_layers; /* of hybrids, whose other layers have state-space blocks; 0: all */
    int lora_rank;        /* above 0: weights are frozen and adapters of this rank train */
    double parameters;    /* as stated, in all; 0: counted from the widths */
    double active;        /* that one token meets; 0: counted */
} dw_planner_model;

/* DW_INVALID_ARGUMENT: a width is missing or impossible. */
DW_API dw_status dw_planner_model_check(const dw_planner_model *model);
DW_API void dw_planner_model_of(const dw_model_config *config, dw_planner_model *model);

/* The catalogue: "llama3-70b", "deepseek-v3", ... (docs/planner-models.md). Case, separators and the publisher do not
 * matter: "Llama-3-70B", "meta-llama/Meta-Llama-3-70B". DW_NOT_FOUND lists the names nearest to an unknown one. */
DW_API dw_status dw_planner_model_named(const char *name, dw_planner_model *model);
DW_API uint32_t dw_planner_catalogue_count(void);
DW_API const char *dw_planner_catalogue_name(uint32_t index);   /* NULL beyond the last */
DW_API const char *dw_planner_catalogue_source(uint32_t index); /* where its sizes are published */
/* Hugging Face's config.json of any family with the usual fields: a folder with one, or the file. What was taken for
 * granted is a log line of level 2. DW_IO; DW_PARSE: no JSON, or a field is missing or wrong; DW_UNSUPPORTED: layers
 * that are neither attention, MLPs, experts nor Mamba's, or an encoder with a decoder. */
DW_API dw_status dw_planner_model_load(const char *path, dw_planner_model *model);
DW_API dw_status dw_planner_model_parse(const char *json, size_t bytes, dw_planner_model *model);
/* What a user wrote: a path if there is such a file or folder, else a name. */
DW_API dw_status dw_planner_model_find(const char *path_or_name, dw_planner_model *model);
/* From a forward graph, captured or of dw_model_graph: widths from its tables, products and attention, parameters from
 * its leaves. DW_UNSUPPORTED says what was not recognized. */
DW_API dw_status dw_planner_model_of_graph(const dw_graph *graph, dw_planner_model *model);

/* Elements of all parameters, and of those that one token meets (experts: top_k of them; the embedding's table,
 * where it is not also the head, is looked up and not counted). */
DW_API double dw_planner_parameters(const dw_planner_model *model);
DW_API double dw_planner_active_parameters(const dw_planner_model *model);
/* Forward and backward of one token: 6 * active + 6 * layers * heads * head_dim * seq_len (causal attention counted by
 * half, and where there is a window by what it leaves); adapters: 4 and 4. What MFU is measured by, without
 * recomputation. */
DW_API double dw_planner_token_flops(const dw_planner_model *model, int seq_len);

/* Operations of so many sequences, by what does them. Backward of attention computes the scores again: five products
 * for two. */
typedef struct dw_planner_work {
    double products; /* of activations with weights: two for each element and token */
    double attention;
    double backward_products, backward_attention;
    double
        other; /* norms, activations, rotations, biases: of a graph alone; the planner counts their bytes */
    double bytes; /* of a graph alone: the least that its forward must move */
} dw_planner_work;
DW_API void dw_planner_model_work(const dw_planner_model *model, double sequences, double seq_len,
                                  dw_planner_work *work);
/* The same summed over the nodes of a forward graph, each by its operation's own cost; with `backward` over the nodes
 * of its gradient too. Attention by the pairs that a mask leaves, s (s + 1) / 2, where the planner counts half of the
 * square. `sizes`: of the graph's symbols. */
DW_API dw_status dw_planner_graph_work(const dw_graph *graph, const int64_t *sizes, int backward,
                                       dw_planner_work *work);

/* ---- the layout ------------------------------------------------------------------------------------------------ */

typedef enum dw_pipeline_schedule {
    DW_SCHEDULE_1F1B, /* interleaved where virtual_stages > 1 */
    DW_SCHEDULE_GPIPE,
    DW_SCHEDULE_INTERLEAVED,
    DW_SCHEDULE_ZB_H1,    /* zero bubble, the memory of 1F1B (Qi et al. 2024) */
    DW_SCHEDULE_ZB_H2,    /* zero bubble, twice that memory */
    DW_SCHEDULE_ZB_V,     /* two chunks a stage, V-shaped, the memory of 1F1B */
    DW_SCHEDULE_DUALPIPE, /* from both ends (DeepSeek-V3): two chunks of parameters a rank */
    DW_SCHEDULES
} dw_pipeline_schedule;
DW_API const char *dw_pipeline_schedule_name(dw_pipeline_schedule schedule); /* "1f1b", "zb-h1" */

typedef enum dw_recompute {
    DW_RECOMPUTE_NONE,
    DW_RECOMPUTE_SELECTIVE, /* attention's core, where it is not fused; norms, activations */
    DW_RECOMPUTE_FULL,      /* of recompute_layers in a stage; 0: all of them */
    DW_RECOMPUTE_AUTO,      /* the cheapest that fits: what a recipe's author does */
    DW_RECOMPUTES
} dw_recompute;
DW_API const char *dw_recompute_name(dw_recompute recompute); /* "none" */

typedef enum dw_train_precision {
    DW_TRAIN_BF16, /* and FP16 */
    DW_TRAIN_FP32,
    DW_TRAIN_FP8,       /* one scale for a tensor */
    DW_TRAIN_FP8_ROW,   /* one for each row */
    DW_TRAIN_FP8_BLOCK, /* 128 x 128 and 1 x 128 */
    DW_TRAIN_MXFP8,
    DW_TRAIN_NVFP4,
    DW_TRAIN_PRECISIONS
} dw_train_precision;
DW_API const char *dw_train_precision_name(dw_train_precision precision); /* "bf16" */

/* Who runs the step: how many kernels a layer is, what overlaps, what memory is kept. */
typedef enum dw_framework {
    DW_FRAMEWORK_OWN,
    DW_FRAMEWORK_MEGATRON, /* Megatron-Core with Transformer Engine: NeMo, Megatron-Bridge, MLPerf */
    DW_FRAMEWORK_MEGATRON_LM, /* Megatron-LM before Transformer Engine, Megatron-DeepSpeed: unfused attention */
    DW_FRAMEWORK_TORCHTITAN, /* FSDP2 and torch.compile */
    DW_FRAMEWORK_FSDP,       /* PyTorch's first FSDP, eager: llm-foundry */
    DW_FRAMEWORK_DEEPSPEED,  /* ZeRO of DeepSpeed over a PyTorch model */
    DW_FRAMEWORK_NANOTRON,
    DW_FRAMEWORK_JAX,     /* MaxText, Paxml: XLA */
    DW_FRAMEWORK_PYTORCH, /* other: DDP, ZeRO-1, fused attention */
    DW_FRAMEWORKS
} dw_framework;
DW_API const char *dw_framework_name(dw_framework framework); /* "megatron" */

typedef struct dw_layout {
    int gpus; /* tp * cp * pp * dp */
    int tp, cp, pp, dp;
    int ep;  /* expert parallel, inside of dp * cp * tp / etp; 1: every rank has all experts */
    int etp; /* tensor parallel of the experts; 0: tp where ep is 1, else 1 */
    int attention_tp; /* tensor parallel of attention, a divisor of tp; 0: tp. Its tp / attention_tp groups have
                       * micro-batch's sequences of their own, cut as sequence parallelism cuts them in any case */
    int virtual_stages;    /* chunks of layers a rank; 1 */
    int sequence_parallel; /* norms and residuals are cut by tp as well */
    int zero_stage;        /* 0: replicas; 1 optimizer, 2 gradients, 3 parameters: FSDP */
    int shard;   /* ranks that share one copy under zero_stage; 0: dp * cp. Less: hybrid sharding */
    int reshard; /* of ZeRO-3: parameters are gathered again for backward; 0: kept from forward */
    int micro_batch, global_batch, seq_len; /* sequences, sequences, tokens */
    dw_pipeline_schedule schedule;
    dw_recompute recompute;
    int recompute_layers;
    dw_train_precision precision;
    dw_framework framework;
    int unfused_attention; /* scores are written to memory, as before FlashAttention */
    int overlap_tensor, overlap_data, overlap_expert; /* communication runs beside computation */
    int cuda_graphs;                                  /* no launches by the host */
    int compiled; /* elementwise chains are fused (torch.compile) */
    int dispatch_once; /* a token goes once to each rank that has experts of its (DeepEP, HybridEP), not once to each
                        * expert */
    int fused_loss; /* no copies of the logits in FP32: a loss compiled, fused or in chunks */
    int dropout;    /* masks of dropout behind attention and MLP are kept */
    int expert_load; /* tokens of the heaviest rank of experts, percent of an even share: a capacity factor, or what
                      * routing does; 0: 100 */
    int offload_layers;    /* of a stage: what they keep for backward waits in the host's memory */
    int offload_optimizer; /* states in the host's memory, the step by its processors */
    int parameter_bytes, gradient_bytes,
        optimizer_bytes;                          /* of one element; 0: the framework's habit */
    double last_stage_layers, first_stage_layers; /* 0: layers are dealt evenly */
} dw_layout;

/* All of it 1, 0 or off, precision BF16, framework OWN, sequence parallel, overlap. */
DW_API void dw_layout_default(dw_layout *layout);
/* DW_INVALID_ARGUMENT: a size that is none, or that does not divide what it must; the message names both. */
DW_API dw_status dw_layout_check(const dw_planner_model *model, const dw_hardware *hardware,
                                 const dw_layout *layout);

/* ---- the prediction -------------------------------------------------------------------------------------------- */

typedef struct dw_time_parts { /* seconds of the heaviest rank's step; they add up to its seconds */
    double gemm, attention, elementwise, quantize,
        launch;                                     /* computation; recomputation is in each */
    double tensor, context, expert, data, pipeline; /* communication that nothing hides */
    double
        offload; /* activations on their way to the host's memory and back, as far as nothing hides it */
    double bubble;    /* waiting for other stages */
    double imbalance; /* the heaviest stage's excess over the mean */
    double optimizer,
        other; /* other: stragglers, data loading, what a framework does once a step */
} dw_time_parts;

typedef struct dw_memory_parts { /* bytes of the heaviest rank */
    double parameters, gradients, optimizer, activations;
    double workspace; /* logits, gathered parameters, buffers of collectives */
    double overhead;  /* CUDA context, NCCL, fragmentation: reserved but not allocated */
} dw_memory_parts;

typedef struct dw_prediction {
    double seconds;           /* of an optimizer step */
    double tokens_per_second; /* of one GPU */
    double model_flops;       /* of one GPU, each second, without recomputation */
    double mfu;               /* of the rate of the BF16 product */
    double bubble_fraction;   /* of the pipeline's time, as schedules' papers count it */
    double overhead_fraction; /* operations done again by recomputation, of the model's */
    dw_time_parts time;
    dw_memory_parts memory;
    double allocated; /* bytes: all of memory but overhead */
    double reserved;  /* allocated, and what the allocator holds and cannot use */
    double used;      /* reserved, and context and NCCL: what nvidia-smi shows */
    double capacity;  /* of the GPU */
    double host_optimizer,
        host_activations;   /* bytes of the host's memory, of the rank that needs most */
    double host_capacity;   /* each GPU's share of it; 0: not known, and taken for enough */
    int fits;               /* in both */
    dw_recompute recompute; /* what DW_RECOMPUTE_AUTO became */
    int recompute_layers;
    int heaviest_stage; /* in memory */
} dw_prediction;

/* DW_INVALID_ARGUMENT as dw_layout_check and dw_planner_model_check say. */
DW_API dw_status dw_predict(const dw_planner_model *model, const dw_hardware *hardware,
                            const dw_layout *layout, dw_prediction *prediction);
/* Without the checks, for a search whose layouts are right by construction. */
DW_API void dw_predict_unchecked(const dw_planner_model *model, const dw_hardware *hardware,
                                 const dw_layout *layout, dw_prediction *prediction);

/* Communication inside of a stage's forward or backward: seconds on the wire, and what of them holds computation up. */
typedef struct dw_stage_traffic {
    double tensor, context, expert;
    double host; /* activations to the host's memory, in backward from there */
    double tensor_exposed, context_exposed, expert_exposed, host_exposed;
} dw_stage_traffic;

/* One chunk of layers on one rank of the pipeline, and one micro-batch through it. Recomputation is resolved
 * beforehand: layout->recompute is not AUTO. */
typedef struct dw_stage_cost {
    int layers;
    double forward;  /* seconds, with the communication inside of it that nothing hides */
    double backward; /* of inputs, with recomputation */
    double
        backward_weight; /* of weights: zero-bubble schedules do it later; others do both at once */
    dw_stage_traffic forward_traffic, backward_traffic; /* backward: of inputs */
    double send, send_bytes;                            /* to the next stage */
    double parameters;                                  /* elements on this rank */
    double activation_bytes;                            /* kept from forward to backward */
    double transient_bytes; /* while it runs: logits, recomputed layers */
} dw_stage_cost;
/* stage from 0 to pp - 1, chunk from 0 to virtual_stages - 1. */
DW_API void dw_predict_stage(const dw_planner_model *model, const dw_hardware *hardware,
                             const dw_layout *layout, int stage, int chunk, dw_stage_cost *cost);

/* One kernel of a layer, for one micro-batch on one GPU: a point below the roofline. */
typedef struct dw_operation_cost {
    const char *name;  /* "attention output" */
    const char *pass;  /* "forward", "backward", "of inputs", "of weights" (gradients), "both" */
    const char *layer; /* "layer", "mixture", "head" */
    int low;           /* a product in the recipe's format; others are in BF16 */
    double operations; /* without matrix product: one for each number of two bytes that is moved */
    double bytes;      /* that memory moves at least */
    double seconds;    /* predicted, the kernel alone */
    /* In a step of one GPU, the mean of all stages (the head: of its own); recomputation is not counted. */
    double times;
} dw_operation_cost;
#define DW_OPERATIONS_MOST 64
/* Writes at most DW_OPERATIONS_MOST and returns how many. The layout is right (dw_layout_check). */
DW_API int dw_predict_operations(const dw_planner_model *model, const dw_hardware *hardware,
                                 const dw_layout *layout, dw_operation_cost *operations);

/* The closed form: idle part of the pipeline's time with `micro_batches`, stages that are alike, backward twice as
 * long as forward and no communication. */
DW_API double dw_pipeline_bubble(dw_pipeline_schedule schedule, int stages, int virtual_stages,
                                 int micro_batches);

#ifdef __cplusplus
}
#endif
#endif
