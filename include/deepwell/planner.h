/* Predicts the cost of a training step: seconds and bytes of a model, on hardware, in a layout.
 *
 *     dw_model_sizes model;
 *     dw_layout layout;
 *     dw_prediction prediction;
 *     dw_model_sizes_named("llama3-70b", &model);
 *     dw_layout_default(&layout);
 *     layout.gpus = 64, layout.tp = 8, layout.dp = 8, layout.seq_len = 8192, layout.global_batch = 128;
 *     if (dw_predict(&model, hardware, &layout, &prediction) == DW_OK) printf("%g s\n", prediction.seconds);
 *
 * All types are plain structures. A prediction allocates nothing and takes some microseconds, so that a search can
 * predict every layout that it considers. Units: seconds, bytes, operations (a multiply-add is two). docs/planner.md
 * describes the cost model.
 */
#ifndef DEEPWELL_PLANNER_H
#define DEEPWELL_PLANNER_H

#include "deepwell/graph.h"
#include "deepwell/hardware.h"
#include "deepwell/model.h"
#include "deepwell/scheme.h"
#include "deepwell/status.h"
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- work ------------------------------------------------------------------------------------------------------- */

/* FLOPs of forward and backward per token, without recomputation; MFU is defined by them. 6 * active + 6 * layers *
 * heads * head_dim * seq_len, with causal attention counted as half and a window by the pairs that it leaves. With
 * adapters (lora_rank) the first term is 4 * active. */
DW_API double dw_planner_token_flops(const dw_model_sizes *model, int seq_len);

/* Operations of forward and backward. Backward of attention recomputes the scores: five matmuls for forward's two. */
typedef struct dw_planner_work {
    double gemm; /* GEMMs of activations with weights: two operations per weight and token */
    double attention;
    double backward_gemm, backward_attention;
    /* Norms, activations, rotations, biases; graphs only: the planner counts their bytes. */
    double other;
    double bytes; /* least bytes that forward must move; graphs only */
} dw_planner_work;
DW_API void dw_planner_model_work(const dw_model_sizes *model, double sequences, double seq_len,
                                  dw_planner_work *work);
/* Sums the operations over the nodes of a forward graph, each by its own cost; with `backward` also over the nodes of
 * its gradient. Counts attention by the pairs that a mask leaves, s (s + 1) / 2, where the planner counts half of the
 * square. `sizes`: one per symbol of the graph. */
DW_API dw_status dw_planner_graph_work(const dw_graph *graph, const int64_t *sizes, int backward,
                                       dw_planner_work *work);

/* ---- the layout ------------------------------------------------------------------------------------------------ */

typedef enum dw_pipeline_schedule {
    DW_SCHEDULE_1F1B, /* interleaved if virtual_stages > 1 */
    DW_SCHEDULE_GPIPE,
    DW_SCHEDULE_INTERLEAVED,
    DW_SCHEDULE_ZB_H1,    /* zero bubble, the memory of 1F1B (Qi et al. 2024) */
    DW_SCHEDULE_ZB_H2,    /* zero bubble, twice that memory */
    DW_SCHEDULE_ZB_V,     /* two chunks per stage, V-shaped, the memory of 1F1B */
    DW_SCHEDULE_DUALPIPE, /* from both ends (DeepSeek-V3): two chunks of parameters per rank */
    DW_SCHEDULES
} dw_pipeline_schedule;
DW_API const char *dw_pipeline_schedule_name(dw_pipeline_schedule schedule); /* "1f1b", "zb-h1" */

typedef enum dw_recompute {
    DW_RECOMPUTE_NONE,
    DW_RECOMPUTE_SELECTIVE, /* attention's core if it is not fused, norms, activation functions */
    DW_RECOMPUTE_FULL,      /* recompute_layers layers of each stage; 0: all */
    DW_RECOMPUTE_AUTO,      /* the cheapest that fits */
    DW_RECOMPUTES
} dw_recompute;
DW_API const char *dw_recompute_name(dw_recompute recompute); /* "none" */

/* The framework that runs the step. It decides the number of kernels per layer, what overlaps, and what is kept. */
typedef enum dw_framework {
    DW_FRAMEWORK_OWN,
    DW_FRAMEWORK_MEGATRON, /* Megatron-Core with Transformer Engine: NeMo, Megatron-Bridge, MLPerf */
    DW_FRAMEWORK_MEGATRON_LM, /* Megatron-LM before Transformer Engine, Megatron-DeepSpeed: unfused attention */
    DW_FRAMEWORK_TORCHTITAN, /* FSDP2 and torch.compile */
    DW_FRAMEWORK_FSDP,       /* PyTorch's first FSDP, eager: llm-foundry */
    DW_FRAMEWORK_DEEPSPEED,  /* ZeRO of DeepSpeed over a PyTorch model */
    DW_FRAMEWORK_NANOTRON,
    DW_FRAMEWORK_JAX,     /* MaxText, Paxml: XLA */
    DW_FRAMEWORK_PYTORCH, /* any other: DDP, ZeRO-1, fused attention */
    DW_FRAMEWORKS
} dw_framework;
DW_API const char *dw_framework_name(dw_framework framework); /* "megatron" */

typedef struct dw_layout {
    int gpus; /* tp * cp * pp * dp */
    int tp, cp, pp, dp;
    int ep;  /* expert parallel, a part of dp * cp * tp / etp; 1: every rank has all experts */
    int etp; /* tensor parallel of the experts; 0: tp if ep is 1, else 1 */
    /* Tensor parallel of attention, a divisor of tp; 0: tp. Each of the tp / attention_tp groups processes its own
     * sequences of the micro-batch, which sequence parallelism has already divided among them. */
    int attention_tp;
    int virtual_stages;    /* chunks of layers per rank; 1: not interleaved */
    int sequence_parallel; /* 1: norms and residuals are sharded by tp as well */
    int zero_stage; /* what is sharded: 0 nothing, 1 optimizer, 2 + gradients, 3 + parameters (FSDP) */
    int shard;   /* ranks that share one copy with zero_stage; 0: dp * cp. Fewer: hybrid sharding */
    int reshard; /* ZeRO-3. 1: parameters are gathered again for backward; 0: kept from forward */
    int micro_batch, global_batch, seq_len; /* sequences, sequences, tokens */
    dw_pipeline_schedule schedule;
    dw_recompute recompute;
    int recompute_layers;
    /* The scheme of linear layers' GEMMs; other GEMMs run in BF16. Predictions support BF16 (FP16 runs as fast), FP32,
     * FP8_TENSOR, FP8_ROW, FP8_BLOCK, MXFP8 and NVFP4; dw_layout_check returns DW_UNSUPPORTED for other schemes. */
    dw_scheme precision;
    dw_framework framework;
    int unfused_attention; /* 1: scores are written to memory, as before FlashAttention */
    int overlap_tensor, overlap_data, overlap_expert; /* 1: communication overlaps computation */
    int cuda_graphs;                                  /* 1: kernels are launched as CUDA graphs */
    int compiled; /* 1: elementwise chains are fused (torch.compile) */
    /* 1: a token is sent once to each rank that holds experts for it (DeepEP, HybridEP); 0: once to each expert. */
    int dispatch_once;
    int fused_loss; /* 1: no FP32 copies of the logits: the loss is compiled, fused or computed in chunks */
    int dropout; /* 1: dropout after attention and MLP, whose masks are kept */
    /* Tokens on the most loaded expert rank, percent of an even share: a capacity factor, or the effect of routing; 0:
     * what chance makes of a router that prefers no expert (docs/planner.md). */
    int expert_load;
    /* 1: each expert has a fixed number of rows, padded to a capacity, so that CUDA graphs contain the experts too. */
    int padded_experts;
    int offload_layers;    /* layers per stage whose saved activations wait in host memory */
    int offload_optimizer; /* 1: states are in host memory, and the CPU runs the optimizer */
    /* Bytes per element; 0: what the framework usually has. */
    int parameter_bytes, gradient_bytes, optimizer_bytes;
    double last_stage_layers, first_stage_layers; /* 0: layers are divided evenly */
} dw_layout;

/* Sizes 1, other members 0 or off; precision BF16, framework OWN, sequence parallel and overlap on. */
DW_API void dw_layout_default(dw_layout *layout);
/* DW_INVALID_ARGUMENT: a size is out of range or does not divide what it must. The message names both. DW_UNSUPPORTED:
 * the hardware has no rate for the precision. */
DW_API dw_status dw_layout_check(const dw_model_sizes *model, const dw_hardware *hardware,
                                 const dw_layout *layout);

/* ---- the prediction -------------------------------------------------------------------------------------------- */

/* Seconds of a step, which add up to dw_prediction.seconds. In a pipeline, computation and communication are those of
 * the mean rank; `imbalance` and `bubble` are the rest. */
typedef struct dw_time_parts {
    double gemm, attention, elementwise, quantize,
        launch;                                     /* computation, including recomputation */
    double tensor, context, expert, data, pipeline; /* exposed communication */
    double offload;   /* exposed copies of activations to and from host memory */
    double bubble;    /* waiting for other stages */
    double imbalance; /* excess of the heaviest stage over the mean */
    /* other: stragglers, data loading, what a framework does once per step. */
    double optimizer, other;
} dw_time_parts;

typedef struct dw_memory_parts { /* bytes of the heaviest rank */
    double parameters, gradients, optimizer, activations;
    double workspace; /* logits, gathered parameters, buffers of collectives */
    double overhead;  /* CUDA context, NCCL, fragmentation: reserved but not allocated */
} dw_memory_parts;

typedef struct dw_prediction {
    double seconds;           /* per optimizer step */
    double tokens_per_second; /* per GPU */
    double model_flops;       /* FLOP/s per GPU, without recomputation */
    double mfu;               /* model_flops over the GPU's BF16 rate */
    double bubble_fraction;   /* of the pipeline's time, as defined in the schedules' papers */
    /* With full recomputation, forward's share of the first stage's time; else 0. */
    double overhead_fraction;
    dw_time_parts time;
    dw_memory_parts memory;
    double allocated; /* bytes: all of `memory` except overhead */
    double reserved;  /* allocated, plus what the allocator holds and cannot use */
    double used;      /* reserved, plus CUDA context and NCCL: what nvidia-smi shows */
    double capacity;  /* bytes of the GPU */
    double host_optimizer, host_activations; /* bytes of host memory, of the rank that needs most */
    double host_capacity;   /* host memory per GPU; 0: not known, taken as sufficient */
    int fits;               /* 1: in GPU memory and host memory */
    dw_recompute recompute; /* resolved: never DW_RECOMPUTE_AUTO */
    int recompute_layers;
    int heaviest_stage; /* by memory */
} dw_prediction;

/* Fails as dw_layout_check and dw_model_sizes_check do. */
DW_API dw_status dw_predict(const dw_model_sizes *model, const dw_hardware *hardware,
                            const dw_layout *layout, dw_prediction *prediction);
/* The same without checks, for a search whose layouts are valid by construction. */
DW_API void dw_predict_unchecked(const dw_model_sizes *model, const dw_hardware *hardware,
                                 const dw_layout *layout, dw_prediction *prediction);

/* ---- the constants ---------------------------------------------------------------------------------------------- */

/* A property of hardware, kernels or frameworks that cannot be computed. docs/planner.md gives the sources of the
 * values. */
typedef struct dw_planner_constant {
    const char *name;
    double value;  /* in use */
    double prior;  /* by a measurement or a data sheet */
    double spread; /* standard deviation of its logarithm: how far a fit may go from the prior */
    const char *origin;
} dw_planner_constant;
/* Returns how many there are; *table lists them. */
DW_API int dw_planner_constants(const dw_planner_constant **table);
/* Predictions with other values of the constants, in the order of the table; NULL: the values in use. Model and layout
 * must pass dw_model_sizes_check and dw_layout_check. dw_predict_with computes what dw_predict does.
 * dw_predict_memory_with gives the memory of one stage, from 0 to pp - 1. dw_predict_bubble_with returns the idle
 * fraction of the pipeline's time if all stages cost the same. */
DW_API void dw_predict_with(const double *constants, const dw_model_sizes *model,
                            const dw_hardware *hardware, const dw_layout *layout,
                            dw_prediction *prediction);
DW_API void dw_predict_memory_with(const double *constants, const dw_model_sizes *model,
                                   const dw_hardware *hardware, const dw_layout *layout, int stage,
                                   dw_memory_parts *memory);
DW_API double dw_predict_bubble_with(const double *constants, const dw_model_sizes *model,
                                     const dw_hardware *hardware, const dw_layout *layout);

/* ---- stages and kernels ------------------------------------------------------------------------------------------ */

/* Communication within a stage's forward or backward. Total seconds on the wire, and the exposed seconds among them
 * that delay computation. */
typedef struct dw_stage_traffic {
    double tensor, context, expert;
    double host; /* activations: to host memory in forward, back in backward */
    double tensor_exposed, context_exposed, expert_exposed, host_exposed;
} dw_stage_traffic;

/* One micro-batch through one chunk of layers on one rank of the pipeline. layout->recompute must be resolved: not
 * DW_RECOMPUTE_AUTO. */
typedef struct dw_stage_cost {
    int layers;
    double forward;  /* seconds, including exposed communication */
    double backward; /* seconds for the gradient of inputs, including recomputation */
    /* Seconds for the gradient of weights. Zero-bubble schedules run it later, others together with `backward`. */
    double backward_weight;
    dw_stage_traffic forward_traffic, backward_traffic; /* backward: of the gradient of inputs */
    double send, send_bytes;                            /* to the next stage: seconds, bytes */
    double parameters;                                  /* elements on this rank */
    double activation_bytes;                            /* kept from forward to backward */
    double transient_bytes; /* only while it runs: logits, recomputed layers */
} dw_stage_cost;
/* stage from 0 to pp - 1, chunk from 0 to virtual_stages - 1. */
DW_API void dw_predict_stage(const dw_model_sizes *model, const dw_hardware *hardware,
                             const dw_layout *layout, int stage, int chunk, dw_stage_cost *cost);

/* One kernel of a layer, for one micro-batch on one GPU: a point below the roofline. */
typedef struct dw_operation_cost {
    const char *name;  /* "attention output" */
    const char *pass;  /* "forward", "backward", "of inputs", "of weights" (gradients), "both" */
    const char *layer; /* "layer", "mixture", "head" */
    int low;           /* 1: a GEMM in the layout's precision; 0: BF16 */
    double operations; /* without a GEMM: one per two-byte element moved */
    double bytes;      /* least bytes that memory moves */
    double seconds;    /* predicted, for the kernel alone */
    /* Runs per step on one GPU, averaged over all stages (the head: over its own). Excludes recomputation. */
    double times;
} dw_operation_cost;
#define DW_OPERATIONS_MOST 64
/* Writes at most DW_OPERATIONS_MOST entries and returns their number. The layout must pass dw_layout_check. */
DW_API int dw_predict_operations(const dw_model_sizes *model, const dw_hardware *hardware,
                                 const dw_layout *layout, dw_operation_cost *operations);

/* Closed form of the bubble: idle fraction of the pipeline's time with `micro_batches`, for equal stages, backward
 * twice as long as forward, and no communication. */
DW_API double dw_pipeline_bubble(dw_pipeline_schedule schedule, int stages, int virtual_stages,
                                 int micro_batches);

#ifdef __cplusplus
}
#endif
#endif
