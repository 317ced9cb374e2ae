/* GPU kernels of the graph's operations, what they share, and the kernels of public calls. */
#ifndef DW_GPU_KERNELS_H
#define DW_GPU_KERNELS_H

#include "kernel/gpu_kernel.h"

/* Kernels of the graph's operations. */
extern const dw__kernel dw__softmax;           /* softmax.c */
extern const dw__kernel dw__gpu_norm;          /* gpu_norm.c */
extern const dw__kernel dw__gpu_cross_entropy; /* cross_entropy.c */
extern const dw__kernel dw__sm90_linear_cross_entropy,
    dw__gpu_linear_cross_entropy; /* linear_cross_entropy.c */
extern const dw__kernel dw__graph_attention, dw__graph_attention_backward; /* graph_attention.c */
extern const dw__kernel dw__graph_gemm, dw__graph_gemm_scaled;             /* graph_gemm.c */
extern const dw__kernel dw__graph_gemm_turned, dw__graph_gemm_hopper;      /* graph_gemm.c */
extern const dw__kernel dw__graph_cublaslt, dw__graph_cublaslt_scaled,
    dw__graph_cublaslt_fp8_block;                                        /* graph_cublaslt.c */
extern const dw__kernel dw__gpu_elementwise;                             /* elementwise.c */
extern const dw__kernel dw__gpu_program_codes;                           /* program_codes.c */
extern const dw__kernel dw__gpu_move;                                    /* move.c */
extern const dw__kernel dw__gpu_reduce;                                  /* reduce.c */
extern const dw__kernel dw__gpu_gather;                                  /* gather.c */
extern const dw__kernel dw__gpu_matmul;                                  /* gpu_matmul.c */
extern const dw__kernel dw__gpu_scan;                                    /* scan.c */
extern const dw__kernel dw__gpu_sort;                                    /* sort.c */
extern const dw__kernel dw__graph_quantize, dw__quantization_error;      /* graph_quantize.c */
extern const dw__kernel dw__gpu_scatter;                                 /* scatter.c */
extern const dw__kernel dw__gpu_rope;                                    /* rope.c */
extern const dw__kernel dw__gpu_rotated_attention;                       /* rotated_attention.c */
extern const dw__kernel dw__gpu_quantize_tensor, dw__gpu_multiply_codes; /* tensor_codes.c */
extern const dw__kernel dw__gpu_quantize_tiles;                          /* block_codes.c */
extern const dw__kernel dw__gpu_fp8_block_gemm;                          /* tensor_codes.c */
extern const dw__kernel dw__gpu_fp8_block_codes;                         /* fp8_block_codes.c */
extern const dw__kernel dw__gpu_group_rows;                              /* gpu_group_rows.c */
extern const dw__kernel dw__sm90_segment, dw__sm100_segment;             /* segment_gemm.c */
extern const dw__kernel dw__sm90_codes, dw__sm90_codes_fast;             /* sm90_codes.c */
extern const dw__kernel dw__gpu_segment_linear;                          /* gpu_segment_linear.c */
extern const dw__kernel dw__gpu_spread_rows;                             /* gpu_spread_rows.c */

/* ---- operation.c: what these kernels share ------------------------------------------------------------- */

#define DW__GPU_ARCHITECTURES "sm_90a (H100, H200), sm_100f (B200, B300), sm_120a (RTX 50, RTX PRO)"
/* The architecture to compile for. */
const char *dw__gpu_arch(int capability);
/* DW_TYPE unless the kernel is for `gpu` (NULL: any) of DW__GPU_ARCHITECTURES. */
dw_status dw__gpu_kernel_has(const dw__kernel *kernel, const dw__gpu_target *gpu);
/* The same, and DW_TYPE if an operand or a result holds codes. */
dw_status dw__gpu_kernel_computes(const dw__kernel *kernel, const dw__call *call,
                                  const dw__gpu_target *gpu);
/* The cost model of kernels that memory bounds: the bytes of all tensors at the memory's rate, and a launch. */
void dw__gpu_seconds_of_bytes(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                              dw__kernel_seconds *result);
/* Launches a kernel that loops over its work: `blocks` blocks, or as many as the GPU holds at once; none for 0.
 * `params` is the kernel's only argument. */
dw_status dw__gpu_launch(const dw__operation_call *call, const dw__context *context,
                         const char *name, void *function, int64_t blocks, unsigned threads,
                         void *params);
/* The same for a kernel whose threads each visit elements: DW__GPU_THREADS in a block, `count` in all. */
enum { DW__GPU_THREADS = 256 };
dw_status dw__gpu_launch_each(const dw__operation_call *call, const dw__context *context,
                              const char *name, void *function, int64_t count, void *params);
/* The number of an element type in defines and parameters (cuda/common/element_types.h). */
int dw__gpu_element(dw_dtype dtype);

/* reduce.c: adds `parts` rows of partial sums in F32 in a fixed order, and rounds each once. `function`: the entry
 * point of this code in the caller's variant. `sums`: a contiguous vector of BF16, F16 or F32. */
dw__jit_variant dw__gpu_sum_parts_code(dw_dtype dtype, int capability);
dw_status dw__gpu_sum_parts(const dw__operation_call *call, const dw__context *context,
                            void *function, const float *partials, int64_t parts,
                            const dw__tensor *sums);

/* Lists the kernels that may compute a call on a target: Deepwell's kernel (the first that supports the call, or the
 * first of all), then PyTorch's. */
void dw__gpu_candidates_of(dw__call_kind kind, const void *call, const dw__gpu_target *target,
                           dw__gpu_candidates *candidates);

/* The kernels of the optional library, looked for once. DW_UNSUPPORTED: it is not there, and why. */
dw_status dw__gpu_kernels_provided(const dw__kernel **kernels, size_t *count);
/* Finds the library's kernel that a call names. Fails for an unknown name and lists the known ones: `own` (Deepwell's,
 * up to the first NULL) and the library's, or the reason why there is no library. */
dw_status dw__gpu_kernel_provided(dw__call_kind kind, const char *name,
                                  const dw__kernel *const own[DW__OWN_KERNELS],
                                  const dw__kernel **kernel);

/* Returns where the kernel has been shown to be right; NULL for a library's kernel that does not say. */
const char *dw__gpu_kernel_proof(const dw__kernel *kernel);
/* Proof of kernels whose hardware was never available. */
extern const char dw__gpu_proof_emulator[];

#endif
