/* Every constant of the predictions: name; value in use, from `deepwell-lab calibrate` on the published runs; the value
 * that measurements and data sheets say beforehand, to which the fit is held; how far from it the fit may go (standard
 * deviation of the logarithm); where that prior comes from. All are positive and belong to hardware, to kernels or to a
 * framework; none to a source of runs. */
#ifndef DW_PLANNER_CONSTANTS_H
#define DW_PLANNER_CONSTANTS_H

#include "deepwell/planner.h"

#define DW__PLANNER_CONSTANTS(X)                                                                   \
    /* Products: part of the rate that large ones reach. */                                        \
    X(gemm_sm80, 0.803, 0.85, 0.08, "A100: cuBLAS 250 to 280 of 312 TFLOP/s")                      \
    X(gemm_sm90, 0.748, 0.72, 0.08,                                                                \
      "H200: 609 to 792 of 989 TFLOP/s, ours; throttled by power in long runs")                    \
    X(gemm_sm100, 0.618, 0.72, 0.10, "as sm90, for want of a measurement")                         \
    X(gemm_other, 0.765, 0.60, 0.20, "V100, L40S, RTX; AMD")                                       \
    X(gemm_amd, 0.389, 0.42, 0.12,                                                                 \
      "MI300X: hipBLASLt 620 of 1307 TFLOP/s at best, less in sequence")                           \
    X(power_exponent, 0.446, 0.5, 0.3,                                                             \
      "clock under a limit of power: between its root and its cube root")                          \
    X(gemm_fp8, 0.929, 0.90, 0.10, "H200: 1233 to 1400 of 1979 TFLOP/s, beside BF16's part")       \
    X(gemm_fp4, 0.722, 0.70, 0.15, "as FP8, and the scales' traffic")                              \
    X(gemm_grouped, 0.743, 0.80, 0.15,                                                             \
      "H200: grouped products of experts reach 431 to 700 TFLOP/s")                                \
    X(gemm_wave, 0.21, 0.20, 0.40, "part of a wave of tiles lost at the end of a product")         \
    X(gemm_depth, 214, 200.0, 0.40,                                                                \
      "length of the inner dimension at which half of the rate is reached")                        \
    X(gemm_gap, 3.11e-06, 3e-6, 0.40, "seconds between two kernels, with the launch ahead")        \
    X(memory_efficiency, 0.889, 0.85, 0.08,                                                        \
      "copies on A100 and H200 reach 85 to 90% of the rated bandwidth")                            \
    /* Attention. */                                                                               \
    X(attention_sm80, 0.433, 0.55, 0.15,                                                           \
      "FlashAttention-2 on A100, forward and backward together")                                   \
    X(attention_sm90, 0.471, 0.50, 0.15, "cuDNN and FlashAttention-3 on H200: 490 to 680 of 989")  \
    X(attention_own, 1.1, 1.10, 0.05,                                                              \
      "ours beside cuDNN's on H200, 36 shapes alone: 1.03 forward, 1.14 backward "                 \
      "(bench/results/attention-h200-2026-11-22.json)")                                            \
    X(attention_sm100, 0.47, 0.50, 0.15, "cuDNN on B200")                                          \
    X(attention_length, 452, 400.0, 0.40,                                                          \
      "sequence at which a causal kernel reaches half of its rate")                                \
    X(attention_scores, 9.28, 14.0, 0.30,                                                          \
      "bytes for each score in forward where they are written to memory")                          \
    /* Elementwise work: bytes of forward. */                                                      \
    X(elementwise_hidden, 21.6, 24.0, 0.25,                                                        \
      "for each hidden element of a layer: two norms, two residuals")                              \
    X(elementwise_ffn, 4.2, 4.0, 0.25, "for each element of the MLP's inner width")                \
    X(elementwise_eager, 1.43, 1.6, 0.20, "unfused, of that")                                      \
    X(elementwise_compiled, 0.786, 0.8, 0.20, "fused by a compiler, of that")                      \
    X(elementwise_backward, 1.62, 1.6, 0.15, "backward, of forward")                               \
    X(logit_bytes, 21.2, 24.0, 0.30, "for each logit, forward and backward of the loss")           \
    X(quantize_bytes, 5, 5.0, 0.35,                                                                \
      "for each element of an operand of a low-precision product: read, write twice")              \
    X(quantize_blocks, 2.0, 2.0, 0.25,                                                             \
      "of that, with scales of blocks (MX, 128): operands are rounded along either dimension")     \
    X(quantize_rows, 3.0, 3.0, 0.30,                                                               \
      "of that, with scales of rows: their largest first, along either dimension")                 \
    X(quantize_fp4, 2.0, 2.0, 0.30, "of that, NVFP4: along either dimension, and a transform")     \
    X(permute_bytes, 16.2, 16.0, 0.35, "for each element of a token sent to an expert, forward")   \
    /* The host. */                                                                                \
    X(host_fused, 0.000925, 9e-4, 0.40,                                                            \
      "seconds a dense layer, forward and backward, in Transformer Engine")                        \
    X(host_eager, 0.0009, 9e-4, 0.40, "in eager PyTorch: some 90 launches of 10 us")               \
    X(host_compiled, 0.0004, 4e-4, 0.40, "compiled")                                               \
    X(host_experts, 0.00692, 5e-3, 0.50, "more, where the layer is a mixture: some 500 launches")  \
    X(host_own, 0.3, 0.3, 0.40,                                                                    \
      "of eager PyTorch's, in C: a launch by the driver takes 2 to 3 us, of 10")                   \
    X(host_graphs, 0.25, 0.25, 0.40, "part that is left with CUDA graphs")                         \
    X(step_fixed, 0.0165, 0.015, 0.60, "seconds a step: norm of the gradients, logging, data")     \
    X(micro_fixed, 0.000991, 1e-3, 0.60,                                                           \
      "seconds a micro-batch: synchronisation, embeddings, loss")                                  \
    /* Communication. */                                                                           \
    X(link_efficiency, 0.764, 0.75, 0.10, "H200: NCCL reaches 326 to 356 of 450 GB/s")             \
    X(network_efficiency, 0.792, 0.70, 0.20, "of the adapters' rate, rings over all rails")        \
    X(ring_latency, 0.866, 1.0, 0.40, "of a step around a ring, of NCCL's own estimate")           \
    X(network_startup, 4.67e-05, 5e-5, 0.50,                                                       \
      "seconds of a collective between nodes before bandwidth counts")                             \
    X(tensor_exposed, 0.518, 0.45, 0.30,                                                           \
      "with overlap: part of tensor-parallel traffic that is not hidden")                          \
    X(tensor_exposed_plain, 0.924, 1.0, 0.10, "without")                                           \
    X(context_exposed, 0.351, 0.35, 0.40, "of the exchange of keys and values")                    \
    X(expert_exposed, 0.86, 0.85, 0.20, "of the exchange of tokens")                               \
    X(expert_link, 0.478, 0.50, 0.30,                                                              \
      "all-to-all within a domain, of a ring's bandwidth: DeepEP 153 of 450 GB/s")                 \
    X(expert_network, 0.868, 0.85, 0.30, "and between nodes: DeepEP 43 to 58 GB/s through 50")     \
    X(data_exposed, 0.282, 0.25, 0.40,                                                             \
      "of the gradients' reduction, with overlap, beside what does not fit beside backward")       \
    X(shard_exposed, 0.0997, 0.10, 0.40,                                                           \
      "of FSDP's gathers, beside what does not fit beside computation")                            \
    X(shard_contention, 0.149, 0.15, 0.40,                                                         \
      "slowdown of computation by traffic that runs beside it")                                    \
    X(send_part, 0.379, 0.40, 0.40,                                                                \
      "of a collective's bandwidth: one pair of ranks uses few channels")                          \
    X(pipeline_sync, 0.0174, 0.02, 0.50,                                                           \
      "of 1F1B's and GPipe's pipeline: sends and receives are pairs, so that a stage waits for "   \
      "whatever holds its neighbour up")                                                           \
    X(send_startup, 0.000259, 2.5e-4, 0.40,                                                        \
      "seconds of a send and its receive, launched together and waited for: times of four "        \
      "models on A100s (Qi et al. 2024, appendix) less bytes over bandwidth")                      \
    /* The host's memory. */                                                                       \
    X(host_link, 0.8, 0.80, 0.15,                                                                  \
      "copies of locked memory: 50 to 55 of 63 GB/s over PCI Express 5.0, 300 to 400 of 450 over " \
      "NVLink-C2C")                                                                                \
    X(host_adam, 0.45, 0.45, 0.30,                                                                 \
      "of the host memory's bandwidth: CPU-Adam, 1 to 10 billion elements in 0.22 to 2.6 s on a "  \
      "DGX-2 (ZeRO-Offload, Ren et al. 2021, table 4)")                                            \
    /* The rest. */                                                                                \
    X(optimizer_bytes, 35.8, 36.0, 0.20,                                                           \
      "for each element: AdamW reads and writes parameter, gradient, two averages")                \
    X(straggler, 0.00503, 0.006, 0.50, "slowdown for each doubling of the GPUs beyond 8")          \
    X(jitter, 0.0528, 0.04, 0.50, "slowdown of anything, against kernels timed alone")

typedef struct dw__constants {
#define DW__CONSTANT(name, value, prior, spread, origin) double name;
    DW__PLANNER_CONSTANTS(DW__CONSTANT)
#undef DW__CONSTANT
} dw__constants;

enum { DW__CONSTANT_COUNT = sizeof(dw__constants) / sizeof(double) };

extern const dw_planner_constant dw__constant_table[DW__CONSTANT_COUNT];
extern const dw__constants dw__constants_default;

#endif
