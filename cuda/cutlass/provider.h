/* libdeepwell_cutlass.so: kernels made from CUTLASS's templates, behind plain C. Optional: `make cutlass` builds it,
 * and nothing else of the project needs it. docs/cutlass.md.
 *
 * Rows of matrices must start at multiples of 16 bytes; strides are in elements. All memory is on the GPU unless it
 * is described as the host's. A call returns DW_CUTLASS_OK; otherwise nothing was launched and
 * deepwell_cutlass_error() gives the reason. Launches only order work on `stream`.
 */
#ifndef DW_CUTLASS_PROVIDER_H
#define DW_CUTLASS_PROVIDER_H

#include "deepwell/scheme.h"
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DW_CUTLASS_VERSION 3

typedef enum dw_cutlass_kind {
    DW_CUTLASS_GEMM,      /* dw_cutlass_gemm */
    DW_CUTLASS_GROUPED,   /* dw_cutlass_grouped */
    DW_CUTLASS_ATTENTION, /* dw_cutlass_attention */
} dw_cutlass_kind;

typedef enum dw_cutlass_result {
    DW_CUTLASS_OK,
    DW_CUTLASS_REFUSED, /* the kernel does not support these sizes, strides or pointers */
    DW_CUTLASS_FAILED,  /* the runtime's error */
} dw_cutlass_result;

/* D (m x n) = alpha A (m x k) B^T (B: n x k) + beta C (m x n); C and D BF16, accumulators in F32. */
typedef struct dw_cutlass_gemm {
    size_t size_of;
    int64_t m, n, k;
    const void *a, *b, *c; /* c may be NULL if beta is 0 */
    void *d;
    int64_t a_stride, b_stride, c_stride, d_stride; /* from row to row */
    /* For MXFP8 and NVFP4, in tcgen05's layout: atoms of 128 rows x 4 scales, 512 bytes each, in order along k, then
     * along rows; missing rows and scales are padding. Aligned to 16 bytes. NULL for other types. */
    const void *a_scales, *b_scales;
    float alpha, beta;
    /* For kernels whose clusters are chosen at launch: the preferred blocks along m and n, used where the GPU has
     * room; 0, 0: 4 x 2. The number along m must be even, and there can be at most 16 blocks in total. */
    int32_t cluster[2];
    int32_t processors; /* the most SMs to use, for kernels with persistent blocks; 0: all */
    /* For MXFP8 and NVFP4: further factors of alpha, on the GPU; NULL: 1. NULL for other types. */
    const float *a_factor, *b_factor;
} dw_cutlass_gemm;

/* For every group g, D_g (m_g x n) = alpha A_g (m_g x k) B_g^T (B_g: n x k), as in a mixture of experts; BF16. */
typedef struct dw_cutlass_grouped {
    size_t size_of;
    int32_t groups;
    int64_t n, k;
    const int64_t *m;                /* in host memory: rows of each group, 0 allowed */
    const void *const *a, *const *b; /* arrays of pointers in host memory */
    void *const *d;                  /* in host memory */
    int64_t a_stride, b_stride, d_stride;
    float alpha;
    int32_t processors; /* the most SMs to use; 0: all */
} dw_cutlass_grouped;

/* O = softmax(scale Q K^T) V; BF16, accumulators in F32. The offset of element (batch, position, head, i) of Q and O
 * is batch * batch_stride + position * stride + head * head_dim + i; K and V likewise with their own strides. Head h
 * of Q reads head h / (heads / heads_kv) of K and V. */
typedef struct dw_cutlass_attention {
    size_t size_of;
    int32_t batch, heads, heads_kv, queries, keys, head_dim;
    int32_t causal; /* Query i sees keys 0 .. i; requires queries == keys. */
    const void *q, *k, *v;
    void *o;
    float *lse; /* (batch, heads, queries): natural logarithm of the sum of exp(scale q k) */
    int64_t q_stride, kv_stride, o_stride, q_batch_stride, kv_batch_stride, o_batch_stride;
    float scale;
    int32_t processors; /* the most SMs to use; 0: all */
} dw_cutlass_attention;

typedef struct dw_cutlass_kernel {
    const char *name; /* "cutlass.sm90.bf16.pingpong" */
    dw_cutlass_kind kind;
    dw_scheme scheme;  /* of A and B, or of Q, K and V: BF16, MXFP8 or NVFP4 */
    int capability;    /* 90: compute capability 9.0; 100: 10.0 */
    const char *what;  /* tile, cluster and scheduler as text */
    const char *shown; /* evidence: "proven on the emulator, not run on hardware" */
    /* `call` points to the structure for `kind`. */
    dw_cutlass_result (*workspace_bytes)(const void *call, size_t *bytes);
    dw_cutlass_result (*launch)(const void *call, void *workspace, void *stream);
} dw_cutlass_kernel;

/* Returns the kernels, best first for each kind; NULL if the library has another version. */
const dw_cutlass_kernel *deepwell_cutlass_kernels(int version, size_t *count);
/* Returns the message of this thread's last failure. */
const char *deepwell_cutlass_error(void);
/* Returns CUTLASS's version: "4.2.0". */
const char *deepwell_cutlass_version(void);

#ifdef __cplusplus
}
#endif

#endif
