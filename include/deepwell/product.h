/* Matrix products with an epilogue on Blackwell GPUs: D = f(alpha A B^T + bias) + residual. A and B are BF16 or
 * F16, or codes and block scales (MXFP8, NVFP4, MXFP4) as deepwell/quantize.h makes them; so may D be.
 *
 * Proven on the emulator, not run on hardware: no GPU of this family was at hand. Nothing chooses these kernels
 * by itself; whoever calls them asks for them. The first use of each on a GPU compares it with sums in double
 * (docs/blackwell.md).
 *
 * GPUs of compute capability 10.0 and 10.3 (B200, B300), and the devices "emulator:sm_100a" and
 * "emulator:sm_103a". Calls are asynchronous on the caller's stream, in the calling thread's current context
 * (where there is none: the first device's primary context). They allocate no device memory and synchronise
 * with nothing, but for a kernel's first use, and may be captured in a CUDA graph.
 *
 * Instead of Deepwell's own a call may name a kernel of CUTLASS's, where `make cutlass` has built them
 * (docs/cutlass.md); they are compared at first use in the same way. Of these some are for compute capability 9.0
 * (H100, H200). They run on the device "cuda": a GPU, or an emulated one in a program under `deepwell emulate`.
 */
#ifndef DEEPWELL_PRODUCT_H
#define DEEPWELL_PRODUCT_H

#include "deepwell/device.h"
#include "deepwell/graph.h"
#include "deepwell/number.h"
#include "deepwell/status.h"
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dw_activation {
    DW_ACTIVATION_NONE,
    DW_ACTIVATION_GELU,      /* by the error function */
    DW_ACTIVATION_GELU_TANH, /* its approximation by tanh */
    DW_ACTIVATION_SWIGLU, /* silu(gate) * factor: B, and the bias, have the gate's n rows first, then n of the factor */
    DW_ACTIVATION_COUNT
} dw_activation;

/* Device memory, rows contiguous. The address is a multiple of 16 bytes. Of codes `stride` is in bytes, and a row of
 * E2M1 has two in a byte, the first in the low half; behind an odd last one is a zero. */
typedef struct dw_matrix {
    void *data;
    int64_t
        stride; /* elements from one row to the next: a multiple of 16 bytes; not read where there is one row */
} dw_matrix;

/* One call. Fill it with zeros first: zero means "none" or "off" in every member but those marked. */
typedef struct dw_product {
    uint32_t size;           /* sizeof(dw_product) */
    const dw_device *device; /* NULL: "cuda" */
    dw_dtype dtype;          /* of A, B and the bias: DW_BF16 or DW_F16; quantized: of the bias */
    dw_dtype output;         /* of D and the residual: `dtype`, or DW_F32; quantized_d: not read */
    int64_t m, n, k; /* D is m x n, A is m x k, B is n x k (SwiGLU: 2 n x k); at most 2^30 */
    float alpha;     /* 0 is 0: 1 is for the caller to say */
    dw_activation activation;
    dw_matrix a, b, d;
    const void *bias;   /* n elements (SwiGLU: 2 n), or NULL */
    dw_matrix residual; /* data NULL: none. It may be D itself */
    void *stream;       /* CUstream; NULL is the legacy default stream */

    /* Operands of codes and block scales. `size` may be that of the members above: none of it then. */
    int quantized; /* 1: A and B are codes of the schemes below, with their scales */
    int quantized_d; /* 1: D is codes of E4M3, with scales: MXFP8 as dw_block_quantize makes it of a row by
                      * DW_SCALE_RCEIL. No residual */
    dw_scheme scheme_a, scheme_b; /* MXFP8_E4M3 or MXFP8_E5M2, each; or NVFP4 both; or MXFP4 both */
    /* Device memory, 16-byte aligned, in the order of dw_scales_swizzle: A's of m rows, B's of n rows (SwiGLU: the
     * gate's n, then the other factor's n, each filled up to whole tiles by itself), D's, which are written. */
    const void *scales_a, *scales_b;
    void *scales_d;
    /* quantized: alpha's further factors, in device memory: NVFP4's tensor scales. NULL: 1. */
    const float *factor_a, *factor_b;

    /* Whose kernel: NULL: Deepwell's own; else a name of `deepwell explain kernels`, as "cutlass.sm90.bf16.pingpong".
     * `size` may be that of the members above: Deepwell's own. */
    const char *kernel;
    /* Device memory at a multiple of 256 bytes, of dw_product_workspace() bytes, which is the call's until its work is
     * done. It need not be filled. */
    void *workspace;
    size_t workspace_bytes;
} dw_product;

/* A product without rows or columns does nothing; with k = 0 the sums are 0. DW_INVALID_ARGUMENT, DW_SHAPE,
 * DW_TYPE: the call makes no sense; DW_UNSUPPORTED: it is not served, on this GPU or at all. A kernel that
 * differed from the reference at its first use is not used: the call is then computed by definition, right and
 * slowly; where A, B or D are quantized it is DW_UNSUPPORTED. CUTLASS's kernels make BF16 of BF16, MXFP8 (E4M3) or
 * NVFP4, n a multiple of 8, k of 8 (MXFP8: 16, NVFP4: 32), with a residual and no other epilogue: the rest is
 * DW_UNSUPPORTED. */
DW_API dw_status dw_product_run(const dw_product *call);

/* Whether a kernel would compute it: DW_OK, or what is wrong. Also where the kernel differed from the reference
 * (DW_UNSUPPORTED). Pointers may be NULL, the bias's and the residual's then mean that there are none. Compiles and
 * compares if need be. */
DW_API dw_status dw_product_supported(const dw_product *call);

/* The bytes of workspace that the call needs: none of Deepwell's own kernels. Pointers as above. A function of the
 * sizes, the kernel and the GPU. */
DW_API dw_status dw_product_workspace(const dw_product *call, size_t *bytes);

/* ---- groups ---------------------------------------------------------------------------------------- */

/* Products of groups with rows of their own, as of a mixture of experts: for each group g, D_g (m_g x n) =
 * alpha A_g (m_g x k) B_g^T (B_g: n x k), all of one type. Fill it with zeros first. */
typedef struct dw_grouped_product {
    uint32_t size;           /* sizeof(dw_grouped_product) */
    const dw_device *device; /* NULL: "cuda" */
    dw_dtype dtype;          /* DW_BF16; Deepwell's own: or DW_F16 */
    float alpha;             /* 0 is 0: 1 is for the caller to say */
    int32_t groups;
    int64_t n, k;
    /* The host's, `groups` of each; not read after the call. Matrices lie in device memory as those of a dw_product do;
     * a group without rows has none that are looked at. */
    const int64_t *m;
    void *const *a, *const *b, *const *d;
    int64_t stride_a, stride_b, stride_d; /* elements from one row to the next, in every group */
    void *stream;
    /* NULL: Deepwell's own product, for one group after another, each with a launch of its own: right, and slow where
     * groups are many and small. "cutlass.sm100.grouped.bf16": all of them by one launch, behind a copy of sizes
     * and pointers from the host; not while the stream is captured in a CUDA graph. */
    const char *kernel;
    void *workspace; /* as of dw_product */
    size_t workspace_bytes;
} dw_grouped_product;

/* As of dw_product; groups without rows, or none, do nothing. What makes no sense is found before the first launch. */
DW_API dw_status dw_grouped_product_run(const dw_grouped_product *call);
DW_API dw_status dw_grouped_product_supported(const dw_grouped_product *call);
DW_API dw_status dw_grouped_product_workspace(const dw_grouped_product *call, size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
