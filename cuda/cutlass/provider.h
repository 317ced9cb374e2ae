/* libdeepwell_cutlass.so: kernels that CUTLASS's templates make, behind plain C. Optional: `make cutlass` builds it,
 * nothing else of the project needs it. docs/cutlass.md.
 *
 * Rows of matrices begin at multiples of 16 bytes; strides are in elements. All memory but what is called the host's
 * lies on the GPU. A call returns DW_CUTLASS_OK, or deepwell_cutlass_error() says why not; nothing was launched then.
 * Launches only order work on `stream`.
 */
#ifndef DW_CUTLASS_PROVIDER_H
#define DW_CUTLASS_PROVIDER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DW_CUTLASS_VERSION 2

typedef enum dw_cutlass_kind {
    DW_CUTLASS_PRODUCT,   /* dw_cutlass_product */
    DW_CUTLASS_GROUPED,   /* dw_cutlass_grouped */
    DW_CUTLASS_ATTENTION, /* dw_cutlass_attention */
} dw_cutlass_kind;

typedef enum dw_cutlass_type {
    DW_CUTLASS_BF16,
    DW_CUTLASS_MXFP8, /* E4M3; an E8M0 scale for 32 elements along k */
    DW_CUTLASS_NVFP4, /* E2M1, two in a byte, the first in the lower half; an E4M3 scale for 16 elements along k */
} dw_cutlass_type;

typedef enum dw_cutlass_result {
    DW_CUTLASS_OK,
    DW_CUTLASS_REFUSED, /* the kernel does not take these sizes, strides or pointers */
    DW_CUTLASS_FAILED,  /* the runtime's error */
} dw_cutlass_result;

/* D (m x n) = alpha A (m x k) B^T (B: n x k) + beta C (m x n); C and D BF16, sums in F32. */
typedef struct dw_cutlass_product {
    size_t size_of;
    int64_t m, n, k;
    const void *a, *b, *c; /* c may be NULL where beta is 0 */
    void *d;
    int64_t a_stride, b_stride, c_stride, d_stride; /* from row to row */
    /* Of MXFP8 and NVFP4, as tcgen05 reads them: atoms of 128 rows x 4 scales, 512 bytes each, that follow one another
     * along k, then along rows; rows and scales that do not exist are padding. Multiples of 16 bytes. Else NULL. */
    const void *a_scales, *b_scales;
    float alpha, beta;
    /* Of kernels whose clusters are chosen at launch: blocks along m and n that are preferred, where the GPU has
     * room for them; 0, 0: 4 x 2. An even number along m, at most 16 blocks together. */
    int32_t cluster[2];
    int32_t
        processors; /* that are used at most, by kernels whose blocks stay for tile after tile; 0: all */
    /* Of MXFP8 and NVFP4: alpha's further factors, on the GPU; NULL: 1. Else NULL. */
    const float *a_factor, *b_factor;
} dw_cutlass_product;

/* For every group g, D_g (m_g x n) = alpha A_g (m_g x k) B_g^T (B_g: n x k), as of a mixture of experts; BF16. */
typedef struct dw_cutlass_grouped {
    size_t size_of;
    int32_t groups;
    int64_t n, k;
    const int64_t *m;                /* the host's: rows of each group, 0 allowed */
    const void *const *a, *const *b; /* the host's, of pointers */
    void *const *d;                  /* the host's */
    int64_t a_stride, b_stride, d_stride;
    float alpha;
    int32_t processors; /* that are used at most; 0: all */
} dw_cutlass_grouped;

/* O = softmax(scale Q K^T) V; BF16, sums in F32. Element (batch, position, head, i) of Q and O lies at
 * batch * batch_stride + position * stride + head * head_dim + i, of K and V likewise with their own. head h of Q reads
 * head h / (heads / heads_kv) of K and V. */
typedef struct dw_cutlass_attention {
    size_t size_of;
    int32_t batch, heads, heads_kv, queries, keys, head_dim;
    int32_t causal; /* query i sees keys 0 .. i; needs queries == keys */
    const void *q, *k, *v;
    void *o;
    float *lse; /* (batch, heads, queries): natural logarithm of the sum of exp(scale q k) */
    int64_t q_stride, kv_stride, o_stride, q_batch_stride, kv_batch_stride, o_batch_stride;
    float scale;
    int32_t processors; /* that are used at most; 0: all */
} dw_cutlass_attention;

typedef struct dw_cutlass_kernel {
    const char *name; /* "cutlass.sm90.bf16.pingpong" */
    dw_cutlass_kind kind;
    dw_cutlass_type type;
    int capability;    /* 90: compute capability 9.0; 100: 10.0 */
    const char *what;  /* tile, cluster, scheduler, in words */
    const char *shown; /* where it ran: "proven on the emulator, not run on hardware" */
    /* `call` is the structure that `kind` names. */
    dw_cutlass_result (*workspace_bytes)(const void *call, size_t *bytes);
    dw_cutlass_result (*launch)(const void *call, void *workspace, void *stream);
} dw_cutlass_kernel;

/* The kernels, best first for each kind; NULL where the library is of another version. */
const dw_cutlass_kernel *deepwell_cutlass_kernels(int version, size_t *count);
/* Why this thread's last call did not succeed. */
const char *deepwell_cutlass_error(void);
/* CUTLASS's version: "4.2.0". */
const char *deepwell_cutlass_version(void);

#ifdef __cplusplus
}
#endif

#endif
