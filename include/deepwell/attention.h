/* Exact attention on GPUs, called with raw device pointers: O = softmax(scale * Q K^T + mask) V and its gradients.
 *
 * Calls are asynchronous on the caller's stream, in the calling thread's current context (where there is none: the
 * first device's primary context). They allocate no device memory, synchronise with nothing and may be captured in
 * a CUDA graph.
 *
 * Every tensor is [batch, heads, rows, head_dim] by strides, so that BSHD and BHSD are both served as they lie: the
 * last axis is contiguous, the other strides and the address are multiples of 16 bytes. The rows of a packed batch
 * (variable length) of all sequences lie behind one another: the stride of the batch is not used.
 */
#ifndef DEEPWELL_ATTENTION_H
#define DEEPWELL_ATTENTION_H

#include "deepwell/graph.h"
#include "deepwell/status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Device memory; strides in elements. */
typedef struct dw_attention_tensor {
    void *data;
    int64_t batch, head, row;
} dw_attention_tensor;

/* One call. Fill it with zeros first: zero means "none" or "off" in every member but those marked. */
typedef struct dw_attention {
    uint32_t size;  /* sizeof(dw_attention); one that ends with `stream` is read, too */
    dw_dtype dtype; /* of q, k, v, o and their gradients: DW_BF16 or DW_F16 */
    int32_t batch, heads_q,
        heads_kv;           /* query head h reads head h / (heads_q / heads_kv): a whole ratio */
    int32_t rows_q, rows_k; /* of a sequence; packed: of the longest one */
    int32_t head_dim;       /* of q, k, v and o: up to 256, a multiple of 8 */

    /* Packed sequences: batch + 1 offsets in device memory each, first 0, ascending. Both or neither. */
    const int32_t *offsets_q, *offsets_k;
    int64_t total_q, total_k; /* rows in all: packed calls only */

    float scale;   /* 0 is a scale of 0: 1 / sqrt(head_dim) is for the caller to say */
    float softcap; /* scores become softcap * tanh(scale * q k / softcap) */

    /* Query row i sees the keys j with  i + d - window_left <= j <= i + d + window_right,  where d is
     * rows_k - rows_q if bottom_right (the last query sees the last key), else 0. Negative: no limit on that side
     * (so that -1, -1 is no mask at all and -1, 0 is causal). A row that sees no key gets O = 0, LSE = -infinity and
     * no gradient. */
    int32_t window_left, window_right;
    bool bottom_right;

    /* Dropout of the probabilities: element (b, h, i, j) of [batch, heads_q, rows_q, rows_k] is kept where the
     * Philox uniform of its row-major index, key `seed`, offset `seed_offset` and stream 0 (deepwell/number.h) is at
     * least `dropout`, and then divided by 1 - dropout. */
    float dropout; /* [0, 1) */
    int64_t seed, seed_offset;
    const int64_t *
        seed_memory; /* instead of the two: {seed, offset} in device memory, for graphs that are replayed */

    dw_attention_tensor q, k, v, o;
    float *
        lse; /* natural logarithm of each row's sum of exponentials: contiguous [batch, heads_q, rows_q], packed
                 * [heads_q, total_q]. Written by forward where it is not NULL, read by backward */

    /* Backward: gradient of the output in, gradients of q, k and v out. */
    dw_attention_tensor d_o, dq, dk, dv;
    bool deterministic; /* the same bits at every run; slower */
    void *workspace;    /* device memory, 16-byte aligned; contents of no matter before and after */
    size_t workspace_bytes;

    void *stream; /* CUstream; NULL is the legacy default stream */

    /* Forward by this kernel, by a name that `deepwell explain kernels` prints, or not at all; NULL: ours, chosen by
     * the GPU. "cutlass.sm100.attention.bf16" is an optional library's (docs/cutlass.md): BF16, head_dim 64 or 128, no
     * mask or a causal one of rows_q == rows_k, nothing packed, no soft cap, no dropout; heads side by side (stride
     * head_dim), the rows and batches of k and v as far apart as each other. */
    const char *kernel;
} dw_attention;

/* DW_UNSUPPORTED where no kernel of this machine takes the call, or not the one that it names, DW_SHAPE, DW_TYPE,
 * DW_INVALID_ARGUMENT (a name that is not known: the error lists those that are): all found before anything is
 * launched. */
DW_API dw_status dw_attention_forward(const dw_attention *call);
/* Bytes of workspace that dw_attention_backward needs for this call. Reads no pointer. */
DW_API dw_status dw_attention_backward_workspace(const dw_attention *call, size_t *bytes);
DW_API dw_status dw_attention_backward(const dw_attention *call);
/* DW_OK if forward (and, if `backward`, backward) would run; otherwise the reason. Reads none of the call's memory, and
 * tensors' addresses may be NULL. The first time for a kind of call it compiles and loads the kernels, seconds, and
 * compares them with attention by definition: one that disagrees on this GPU is not used (DEEPWELL_GUARD=off: not
 * compared). */
DW_API dw_status dw_attention_supported(const dw_attention *call, bool backward);

/* Contiguous BHSD in BF16, in the current context on the calling thread's default stream; 0 or a dw_status.
 * `causal` is bottom-right. */
DW_API int dw_fmha_bf16_forward(void *q, void *k, void *v, void *o, int B, int H, int Q, int K,
                                int D, int causal);

#ifdef __cplusplus
}
#endif
#endif
