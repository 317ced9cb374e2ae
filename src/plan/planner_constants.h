/* Every constant of the predictions: name; value in use, which `deepwell-lab calibrate` fits to the published runs; its
 * prior, from measurements and data sheets; how far from the prior the fit may go (standard deviation of the
 * logarithm); the source of the prior. All are positive. Each describes hardware, kernels or a framework; none
 * describes a source of runs. */
#ifndef DW_PLANNER_CONSTANTS_H
#define DW_PLANNER_CONSTANTS_H

#include "deepwell/planner.h"

#define DW__PLANNER_CONSTANTS(X)                                                                   \
    /* GEMMs: part of the peak rate that large ones reach. */                                      \
    X(gemm_sm80, 0.804, 0.85, 0.08, "A100: cuBLAS 250 to 280 of 312 TFLOP/s")                      \
    X(gemm_sm90, 0.753, 0.72, 0.08,                                                                \
      "H200: our kernels reach 609 to 792 of 989 TFLOP/s; power limits long runs")                 \
    X(gemm_sm100, 0.616, 0.72, 0.10, "as sm90; not measured")                                      \
    X(gemm_other, 0.768, 0.60, 0.20, "V100, L40S, RTX; AMD")                                       \
    X(gemm_amd, 0.39, 0.42, 0.12,                                                                  \
      "MI300X: hipBLASLt reaches at best 620 of 1307 TFLOP/s, less in long runs")                  \
    X(power_exponent, 0.456, 0.5, 0.3,                                                             \
      "clock under a power limit: between its square root and its cube root")                      \
    X(gemm_fp8, 0.942, 0.90, 0.10,                                                                 \
      "H200: 1233 to 1400 of 1979 TFLOP/s, relative to the BF16 part")                             \
    X(gemm_fp4, 0.722, 0.70, 0.15, "as FP8, less for the scales' traffic")                         \
    X(gemm_grouped, 0.735, 0.80, 0.15, "H200: grouped GEMMs of experts reach 431 to 700 TFLOP/s")  \
    X(gemm_own, 0.712, 0.712, 0.05,                                                                \
      "our kernel on H200: 676 of 989 TFLOP/s at 8192^3, of which tiles leave 949 "                \
      "(bench/results/gemm-h200-2026-11-27.json)")                                                 \
    X(gemm_wave, 0.209, 0.20, 0.40, "part of a wave of tiles lost at the end of a GEMM")           \
    X(gemm_depth, 211, 200.0, 0.40, "inner dimension at which a GEMM reaches half of its rate")    \
    X(gemm_gap, 3.12e-06, 3e-6, 0.40, "seconds between two kernels whose launches are queued")     \
    X(memory_efficiency, 0.877, 0.85, 0.08,                                                        \
      "copies on A100 and H200 reach 85 to 90% of the rated bandwidth")                            \
    /* Attention. */                                                                               \
    X(attention_sm80, 0.437, 0.55, 0.15,                                                           \
      "FlashAttention-2 on A100, forward and backward together")                                   \
    X(attention_sm90, 0.472, 0.50, 0.15, "cuDNN and FlashAttention-3 on H200: 490 to 680 of 989")  \
    X(attention_own, 1.1, 1.10, 0.05,                                                              \
      "our kernels against cuDNN's on H200, 36 shapes: 1.03 forward, 1.14 backward "               \
      "(bench/results/attention-h200-2026-11-22.json)")                                            \
    X(attention_sm100, 0.475, 0.50, 0.15, "cuDNN on B200")                                         \
    X(attention_length, 453, 400.0, 0.40,                                                          \
      "sequence length at which a causal kernel reaches half of its rate")                         \
    X(attention_scores, 9.41, 14.0, 0.30,                                                          \
      "bytes per score in forward, if scores are written to memory")                               \
    /* Elementwise kernels: bytes of traffic in forward. */                                        \
    X(elementwise_hidden, 21.6, 24.0, 0.25,                                                        \
      "bytes per hidden element of a layer: two norms, two residuals")                             \
    X(elementwise_ffn, 4.17, 4.0, 0.25, "bytes per element of the MLP's inner width")              \
    X(elementwise_eager, 1.43, 1.6, 0.20, "factor on both, unfused")                               \
    X(elementwise_compiled, 0.782, 0.8, 0.20, "factor on both, fused by a compiler")               \
    X(elementwise_backward, 1.63, 1.6, 0.15, "backward relative to forward")                       \
    X(logit_bytes, 21.1, 24.0, 0.30, "bytes per logit, forward and backward of the loss")          \
    X(quantize_bytes, 5.53, 5.0, 0.35,                                                             \
      "bytes per element of an operand of a low-precision GEMM: read, write twice")                \
    X(quantize_blocks, 2.05, 2.0, 0.25,                                                            \
      "factor for block scales (MX, 128): operands are rounded along both dimensions")             \
    X(quantize_rows, 3.3, 3.0, 0.30,                                                               \
      "factor for row scales: a pass for each row's maximum, along both dimensions")               \
    X(quantize_fp4, 1.93, 2.0, 0.30, "factor for NVFP4: along both dimensions, and a transform")   \
    X(permute_bytes, 17.8, 16.0, 0.35, "bytes per element of a token sent to an expert, forward")  \
    /* The host. */                                                                                \
    X(host_fused, 0.000908, 9e-4, 0.40,                                                            \
      "seconds per dense layer, forward and backward, in Transformer Engine")                      \
    X(host_eager, 0.0009, 9e-4, 0.40, "the same in eager PyTorch: about 90 launches of 10 us")     \
    X(host_compiled, 0.0004, 4e-4, 0.40, "the same, compiled")                                     \
    X(host_experts, 0.00101, 1e-3, 0.50,                                                           \
      "added by a mixture layer: 100 launches of 10 us beside those of single experts "            \
      "(Megatron-Bridge's profile of Qwen3-30B: 151 kernels a layer and micro-batch, 8 experts)")  \
    X(host_expert, 0.000141, 1.4e-4, 0.50,                                                         \
      "for each expert of a rank, 14 calls of 10 us: Transformer Engine launches six GEMMs by "    \
      "themselves, each after a query of cuBLASLt's heuristics, and two gradients have hooks")     \
    X(host_expert_low, 0.000449, 3.6e-4, 0.50,                                                     \
      "the same in low precision, 36 calls: also four tensors made and rounded by three launches " \
      "each, and six accesses to rounded weights")                                                 \
    X(host_own, 0.3, 0.3, 0.40,                                                                    \
      "the engine in C, relative to eager PyTorch: a driver launch takes 2 to 3 of 10 us")         \
    X(host_graphs, 0.259, 0.25, 0.40, "part of the host's time left with CUDA graphs")             \
    X(step_fixed, 0.0161, 0.015, 0.60, "seconds per step: norm of the gradients, logging, data")   \
    X(micro_fixed, 0.000954, 1e-3, 0.60,                                                           \
      "seconds per micro-batch: synchronisation, embeddings, loss")                                \
    /* Communication. */                                                                           \
    X(link_efficiency, 0.752, 0.75, 0.10, "H200: NCCL reaches 326 to 356 of 450 GB/s")             \
    X(network_efficiency, 0.801, 0.70, 0.20, "part of the adapters' rate, rings over all rails")   \
    X(ring_latency, 0.87, 1.0, 0.40, "latency of a ring's step, relative to NCCL's own estimate")  \
    X(network_startup, 4.68e-05, 5e-5, 0.50,                                                       \
      "seconds before a collective between nodes is limited by bandwidth")                         \
    X(tensor_exposed, 0.523, 0.45, 0.30, "exposed part of tensor-parallel traffic, with overlap")  \
    X(tensor_exposed_plain, 0.922, 1.0, 0.10, "the same, without overlap")                         \
    X(context_exposed, 0.349, 0.35, 0.40, "exposed part of the exchange of keys and values")       \
    X(expert_overlapped, 0.616, 0.635, 0.30,                                                       \
      "part of the exchange of tokens that overlap leaves exposed: 36.55% hidden, Qwen3-30B on "   \
      "16 H100 (Megatron-Bridge, July 2026)")                                                      \
    X(expert_link, 0.665, 0.8, 0.30,                                                               \
      "all-to-all of NCCL within a domain, part of a ring's bandwidth")                            \
    X(expert_network, 0.893, 0.85, 0.30, "the same between nodes")                                 \
    X(dispatch_link, 0.742, 0.75, 0.20,                                                            \
      "DeepEP and HybridEP within a domain: 420 to 570 of 675 GB/s on B200 and GB200, 8 to 36 "    \
      "ranks (hybrid-ep's README)")                                                                \
    X(dispatch_network, 1.1, 1.05, 0.20,                                                           \
      "the same between nodes: 41 to 57 GB/s over 50 GB/s, 32 and 64 H100 and H800")               \
    X(data_exposed, 0.287, 0.25, 0.40,                                                             \
      "exposed part of the gradients' reduction that would fit beside backward")                   \
    X(shard_exposed, 0.101, 0.10, 0.40,                                                            \
      "exposed part of FSDP's gathers that would fit beside computation")                          \
    X(shard_contention, 0.151, 0.15, 0.40,                                                         \
      "slowdown of computation by traffic that runs beside it")                                    \
    X(send_part, 0.385, 0.40, 0.40,                                                                \
      "part of a collective's bandwidth: a pair of ranks uses few channels")                       \
    X(pipeline_sync, 0.0171, 0.02, 0.50,                                                           \
      "part of 1F1B's and GPipe's time: paired sends and receives pass a stage's delays to its "   \
      "neighbour")                                                                                 \
    X(send_startup, 0.000257, 2.5e-4, 0.40,                                                        \
      "seconds of a paired send and receive: times of four models on A100s (Qi et al. 2024, "      \
      "appendix) minus bytes over bandwidth")                                                      \
    /* The host's memory. */                                                                       \
    X(host_link, 0.8, 0.80, 0.15,                                                                  \
      "copies of pinned memory: 50 to 55 of 63 GB/s over PCI Express 5.0, 300 to 400 of 450 over " \
      "NVLink-C2C")                                                                                \
    X(host_adam, 0.45, 0.45, 0.30,                                                                 \
      "part of the host memory's bandwidth: CPU-Adam, 1 to 10 billion elements in 0.22 to 2.6 s "  \
      "on a "                                                                                      \
      "DGX-2 (ZeRO-Offload, Ren et al. 2021, table 4)")                                            \
    /* The rest. */                                                                                \
    X(optimizer_bytes, 35.7, 36.0, 0.20,                                                           \
      "bytes per element: AdamW reads and writes parameter, gradient, two averages")               \
    X(straggler, 0.00504, 0.006, 0.50, "slowdown per doubling of the GPUs beyond 8")               \
    X(jitter, 0.0535, 0.04, 0.50, "slowdown of all kernels, compared with kernels timed alone")

typedef struct dw__constants {
#define DW__CONSTANT(name, value, prior, spread, origin) double name;
    DW__PLANNER_CONSTANTS(DW__CONSTANT)
#undef DW__CONSTANT
} dw__constants;

enum { DW__CONSTANT_COUNT = sizeof(dw__constants) / sizeof(double) };

extern const dw_planner_constant dw__constant_table[DW__CONSTANT_COUNT];
extern const dw__constants dw__constants_default;

#endif
