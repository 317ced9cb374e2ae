/* GEMMs with an epilogue on NVIDIA GPUs: D = f(alpha A B^T + bias) + residual. A and B are BF16 or F16, or codes with
 * block scales (MXFP8, NVFP4, MXFP4) as deepwell/quantize.h makes them. D may be codes with block scales too: MXFP8, or
 * fp8-block on a GPU of compute capability 9.0.
 *
 *     dw_gemm call = {.struct_size = sizeof(call), .dtype = DW_BF16, .output = DW_BF16,
 *                     .m = 4096, .n = 4096, .k = 4096, .alpha = 1,
 *                     .a = {a, 4096}, .b = {b, 4096}, .d = {d, 4096}, .stream = stream};
 *     if (dw_gemm_run(&call) != DW_OK) fprintf(stderr, "%s\n", dw_last_error());
 *
 * Deepwell's own kernels need compute capability 9.0 (H100, H200), 10.0, 10.3 (B200, B300) or 12.0 (RTX 50, RTX PRO
 * Blackwell), or the devices "emulator:sm_90a", "emulator:sm_100a", "emulator:sm_103a" and "emulator:sm_120a". That of
 * 9.0 multiplies no codes; it is measured on an H200 (docs/gemm.md). The others have been tested on the emulator but not on
 * hardware. The first use of each kernel on a GPU compares it with a GEMM accumulated in double (docs/blackwell.md).
 *
 * A call may name a kernel of CUTLASS instead, if `make cutlass` has built them (docs/cutlass.md). Some of these are
 * for compute capability 9.0 (H100, H200). They have the same first-use check. They run on the device "cuda": a GPU, or
 * an emulated one in a program under `deepwell emulate`.
 *
 * Calls are asynchronous on the caller's stream. They run in the calling thread's current context; if there is none, in
 * the first device's primary context. They allocate no device memory, do not synchronise except at a kernel's first
 * use, and may be captured in a CUDA graph.
 */
#ifndef DEEPWELL_GEMM_H
#define DEEPWELL_GEMM_H

#include "deepwell/device.h"
#include "deepwell/graph.h"
#include "deepwell/number.h"
#include "deepwell/status.h"
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- types ---------------------------------------------------------------------------------- */

typedef enum dw_activation {
    DW_ACTIVATION_NONE,
    DW_ACTIVATION_GELU,      /* with erf */
    DW_ACTIVATION_GELU_TANH, /* tanh approximation */
    DW_ACTIVATION_SWIGLU, /* silu(gate) * up. B and the bias hold the gate's n rows first, then up's n rows */
    DW_ACTIVATION_COUNT
} dw_activation;

/* A matrix in device memory with contiguous rows. The address must be a multiple of 16 bytes. A row of E2M1 codes has
 * two codes per byte, the first in the low nibble; a zero nibble follows an odd last code. */
typedef struct dw_matrix {
    void *data;
    /* From one row to the next: elements, for codes bytes. Must be a multiple of 16 bytes. Not read for one row. */
    int64_t stride;
} dw_matrix;

/* One call. Fill it with zeros first: zero means "none" or "off" unless the member's comment says otherwise. */
typedef struct dw_gemm {
    size_t struct_size;      /* sizeof(dw_gemm) */
    const dw_device *device; /* NULL: "cuda" */
    dw_dtype dtype;          /* of A, B and the bias: DW_BF16 or DW_F16; quantized: of the bias */
    dw_dtype output;         /* of D and the residual: `dtype` or DW_F32; quantized_d: not read */
    int64_t m, n, k; /* D is m x n, A is m x k, B is n x k (SwiGLU: 2 n x k); each at most 2^30 */
    float alpha;     /* no default: pass 1 for no scaling */
    dw_activation activation;
    dw_matrix a, b, d;
    const void *bias;   /* n elements (SwiGLU: 2 n), or NULL */
    dw_matrix residual; /* data NULL: none. May be D itself */
    void *stream;       /* CUstream; NULL is the legacy default stream */

    /* Quantized operands. `struct_size` may end before this member; the operands are then not quantized. */
    int quantized; /* 1: A and B are codes of the schemes below, with their scales */
    /* 1: D is E4M3 codes with scales: the MXFP8 that dw_block_quantize gives for each row with DW_SCALE_RCEIL, or the
     * fp8-block of `scheme_d`. The call must have no residual. */
    int quantized_d;
    dw_scheme scheme_a, scheme_b; /* MXFP8 or MXFP8_E5M2, each; or NVFP4 both; or MXFP4 both */
    /* Device memory, 16-byte aligned, in the order of dw_scales_swizzle. A's have m rows, B's n rows (SwiGLU: the
     * gate's n rows, then up's n rows, each padded to whole tiles). D's are written. */
    const void *scales_a, *scales_b;
    void *scales_d;
    /* Quantized: further factors of alpha, in device memory, such as NVFP4's tensor scales. NULL: 1. */
    const float *factor_a, *factor_b;

    /* The kernel: a name from `deepwell explain kernels`, such as "cutlass.sm90.bf16.pingpong". NULL: Deepwell's own.
     * `struct_size` may end before this member, which means NULL. */
    const char *kernel;
    /* dw_gemm_workspace() bytes of device memory, aligned to 256 bytes. The call uses it until its work is done. It
     * needs no initial contents. Deepwell's own kernels also run without it. */
    void *workspace;
    size_t workspace_bytes;

    /* Norms of rows, by sm90_gemm alone: an RMSNorm between two GEMMs without a pass of its own. The first writes the
     * norms' factors of its D's rows, the second, whose A is that D, multiplies its rows by them, and has the norm's
     * weight in its B. The weight is then rounded into B, and the factor is applied to F32 sums instead of A's
     * elements: results differ from those of a norm apart by the rounding of A and B. `struct_size` may end before
     * this member; all are then NULL or 0. */
    const float *row_scale; /* m factors in device memory, of the rows of alpha A B^T; or NULL */
    /* NULL, or m numbers in device memory that receive the sum of the squares of each row of D, as D is rounded,
     * added in F32 in a fixed order. D must have the type of A and B. The call needs a workspace. */
    float *row_squares;
    int row_norm; /* 1: row_squares receives 1 / sqrt(sum / n + row_epsilon) instead */
    float row_epsilon;

    /* Codes of D for the next GEMMs, with quantized_d. DW_SCHEME_FP8_BLOCK, by sm90_gemm alone: D is rounded to `dtype`,
     * and its rows become E4M3 codes with an F32 scale for each block of 128, as dw_block_quantize makes them with
     * DW_SCALE_AMAX. `d` has the codes, each row followed by zeros up to a multiple of 32; its stride is that of bytes.
     * scales_d has [blocks of a row][m] numbers. DW_SCHEME_MXFP8, or 0: the MXFP8 of Blackwell. `struct_size` may end
     * before this member; all are then NULL or 0. */
    dw_scheme scheme_d;
    /* fp8-block: the same of D transposed, for a GEMM whose contraction runs over D's rows: n rows of m codes, which are
     * not those of `d`, because their blocks are others. data NULL: not wanted. */
    dw_matrix turned_d;
    float *turned_scales_d; /* [blocks of m][n] */
    /* fp8-block: receives D itself, m x n elements of `dtype`. data NULL: not stored. */
    dw_matrix plain_d;
} dw_gemm;

/* ---- calls ---------------------------------------------------------------------------------- */

/* Runs the GEMM. With m = 0 or n = 0 it does nothing; with k = 0 the accumulators are 0. DW_INVALID_ARGUMENT, DW_SHAPE,
 * DW_TYPE: the call is inconsistent. DW_UNSUPPORTED: the call is not supported, on this GPU or at all. A kernel that
 * failed its first-use check is not used: a slow reference kernel computes the GEMM instead, or the call returns
 * DW_UNSUPPORTED if A, B or D are quantized. CUTLASS's kernels support BF16 results of BF16, MXFP8 (E4M3) or NVFP4
 * operands, with n a multiple of 8 and k a multiple of 8 (MXFP8: 16, NVFP4: 32), an optional residual and no other
 * epilogue. On compute capability 9.0 the first call of a product of 1 GFLOP and more measures up to three tiles on memory
 * of its own, for some 50 ms beyond what their compilation takes, also while the stream is captured, and keeps their times
 * on disk for all processes (docs/gemm.md). DEEPWELL_AUTOTUNE=0 leaves the choice to the cost model. */
DW_API dw_status dw_gemm_run(const dw_gemm *call);

/* ---- queries -------------------------------------------------------------------------------- */

/* Returns DW_OK if a kernel supports the call, else the reason, also if the kernel failed its first-use check
 * (DW_UNSUPPORTED). Pointers may be NULL; a NULL bias or residual means that there is none. Compiles and checks the
 * kernel if necessary. */
DW_API dw_status dw_gemm_supported(const dw_gemm *call);

/* Bytes of workspace that the call needs. Depends on the sizes, the kernel and the GPU. For Deepwell's own kernels it is 0,
 * but for those of compute capability 9.0 in two cases. With row_squares the call fails without as many bytes. Where several
 * blocks share the contraction of a tile of D, which is faster if D has few tiles, they compute the call without sharing if
 * there is no workspace of as many bytes. Results with and without differ in their last bits, and each has the same bits in
 * every run. Pointers as above. Fails as dw_gemm_supported does. On compute capability 9.0 the tile of a large product is
 * measured first, as at its first run (dw_gemm_run); else nothing is compiled or checked. */
DW_API dw_status dw_gemm_workspace(const dw_gemm *call, size_t *bytes);

/* ---- grouped GEMM ---------------------------------------------------------------------------------------- */

/* GEMMs of groups that differ in their rows, as in a mixture of experts. For each group g: D_g (m_g x n) =
 * alpha A_g (m_g x k) B_g^T, with B_g n x k, all of one dtype. Fill it with zeros first. */
typedef struct dw_grouped_gemm {
    size_t struct_size;      /* sizeof(dw_grouped_gemm) */
    const dw_device *device; /* NULL: "cuda" */
    dw_dtype dtype;          /* DW_BF16; Deepwell's own kernels also DW_F16 */
    float alpha;             /* no default: pass 1 for no scaling */
    int32_t groups;
    int64_t n, k;
    /* Host arrays of `groups` entries, not read after the call. The matrices are in device memory, as in dw_gemm.
     * The matrices of a group without rows are not read. */
    const int64_t *m;
    void *const *a, *const *b, *const *d;
    int64_t stride_a, stride_b, stride_d; /* elements from one row to the next, in every group */
    void *stream;
    /* NULL: Deepwell's own GEMM, launched once per group, which is slow for many small groups.
     * "cutlass.sm100.grouped.bf16": one launch for all groups, after a copy of sizes and pointers from the host; it
     * cannot be captured in a CUDA graph. */
    const char *kernel;
    void *workspace; /* as in dw_gemm */
    size_t workspace_bytes;
} dw_grouped_gemm;

/* These functions work and fail like those of dw_gemm; the message names the group. Groups without rows are skipped.
 * Mistakes are found before the first launch. */
DW_API dw_status dw_grouped_gemm_run(const dw_grouped_gemm *call);
DW_API dw_status dw_grouped_gemm_supported(const dw_grouped_gemm *call);
DW_API dw_status dw_grouped_gemm_workspace(const dw_grouped_gemm *call, size_t *bytes);

/* ---- groups whose bounds stay on the GPU ------------------------------------------------------------------- */

/* GEMMs of the rows of groups, where the host knows how many rows there are in all and need not know how many each group
 * has: group g has the rows offsets[g] to offsets[g + 1]. With B_g of a layer's weights the three GEMMs of a mixture of
 * experts are
 *
 *     forward              D_g (rows x n) = A_g (rows x k) B_g^T      plain_b 0, B_g n x k
 *     gradient of A        D_g (rows x n) = A_g (rows x k) B_g        plain_b 1, B_g k x n: A is the gradient of D
 *     gradient of B        D_g (k x n)    = A_g^T B_g                 contraction 1, A rows x k, B rows x n
 *
 * All matrices are contiguous, those of the groups one after the other. Fill it with zeros first.
 *
 * On an H100 or H200 rows may be read and stored by an index, so that tokens need not be copied to the experts that they
 * chose, which saves the memory of the copies (docs/gemm.md says what it costs). */
typedef struct dw_segment_gemm {
    size_t struct_size;      /* sizeof(dw_segment_gemm) */
    const dw_device *device; /* NULL: "cuda" */
    dw_dtype dtype;          /* of A and B: DW_BF16, DW_F16, DW_F32 or DW_F64 */
    dw_dtype output; /* of D: `dtype`, or DW_F32, which only a kernel for tensor cores writes */
    int contraction, plain_b;
    int64_t rows, groups, n, k; /* each at most 2^30 */
    /* groups + 1 integers in device memory, which must begin with 0, ascend, and be at most `rows`; they are not checked.
     * Rows behind the last one are not multiplied: D is 0 there. */
    const int32_t *offsets;
    const void *a, *b; /* device memory; multiples of 16 bytes, and n and k too, for tensor cores */
    void *d;
    void *stream;
    /* "sm90_segment" or "sm100_segment" (BF16 and F16 on the tensor cores of an H100 or H200, of a B200 or B300) or
     * "segment_linear" (any type, without tensor cores, on each GPU with Deepwell's kernels). NULL: the first of these
     * that supports the call. */
    const char *kernel;

    /* Rows by an index, for "sm90_segment" alone. `struct_size` may end before this member; there is then no index. Each
     * array is in device memory, or NULL, and has `rows` elements. Of a wrong index, A's or B's row counts as zeros, and
     * D's row is not stored. */
    /* Row r of the groups is row rows_in[r] of A, or with rows_in_of_b of B. */
    const int32_t *rows_in;
    int64_t rows_in_count; /* rows of that matrix, 1 to 2^30; n and k must be multiples of 8 */
    int rows_in_of_b;      /* with `contraction` alone */
    /* Without `contraction`: row r of the groups is stored as row rows_out[r] of D. All are below `rows`; rows of D that
     * none names are not written. */
    const int32_t *rows_out;
    /* Without `contraction`: row r of D is multiplied by weights[r], of `dtype`, before it is rounded. */
    const void *weights;
} dw_segment_gemm;

/* Runs the GEMMs. The call is asynchronous, as dw_gemm_run, and needs no workspace. DW_INVALID_ARGUMENT, DW_SHAPE,
 * DW_TYPE: the call is inconsistent. DW_UNSUPPORTED: no kernel supports it on this GPU. */
DW_API dw_status dw_segment_gemm_run(const dw_segment_gemm *call);
/* Returns the name of the kernel that runs the call, which lives as long as the library; fails as dw_segment_gemm_run.
 * Pointers may be NULL. Compiles and checks the kernel if necessary. */
DW_API dw_status dw_segment_gemm_kernel(const dw_segment_gemm *call, const char **name);

#ifdef __cplusplus
}
#endif
#endif
