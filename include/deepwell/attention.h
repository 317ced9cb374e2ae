/* Exact attention on GPUs over raw device pointers: O = softmax(scale * Q K^T + mask) V, and its gradients.
 *
 *     dw_attention call = {.struct_size = sizeof(call), .dtype = DW_BF16, .batch = 2, .heads_q = 16, .heads_kv = 16,
 *                          .seq_len_q = 1024, .seq_len_kv = 1024, .head_dim = 64, .scale = 0.125f,
 *                          .window_left = -1, .window_right = 0, .stream = stream}; // causal
 *     call.q = (dw_attention_tensor){q, 16 * 1024 * 64, 1024 * 64, 64}; // BHSD; likewise k, v and o
 *     if (dw_attention_forward(&call) != DW_OK) fprintf(stderr, "%s\n", dw_last_error());
 *
 * Forward needs compute capability 9.0 (H100, H200), 10.0, 10.3 (B200, B300) or 12.0 (RTX 50, RTX PRO Blackwell);
 * backward needs 9.0 or 12.0. The emulated GPUs "emulator:sm_90a", "emulator:sm_100a", "emulator:sm_103a" and
 * "emulator:sm_120a" have the same kernels. Those for Blackwell have been tested on the emulator but not on hardware.
 * They run only if a call names the forward kernel, or with DEEPWELL_BLACKWELL=try in the environment.
 *
 * Calls are asynchronous on the caller's stream. On the device "cuda" they run in the calling thread's current context;
 * if there is none, in the first GPU's primary context. They allocate no device memory, do not synchronise, and may be
 * captured in a CUDA graph. The exception is the first call of a kind, which compiles and checks its kernels
 * (dw_attention_supported does this beforehand).
 *
 * Tensors have the shape [batch, heads, seq_len, head_dim] and any strides, so BSHD and BHSD layouts both work without
 * a copy. The last axis must be contiguous. The other strides and the address must be multiples of 16 bytes.
 * In a packed batch (variable length) the rows of all sequences follow one another, and the batch stride is not used.
 */
#ifndef DEEPWELL_ATTENTION_H
#define DEEPWELL_ATTENTION_H

#include "deepwell/device.h"
#include "deepwell/graph.h"
#include "deepwell/status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- types ---------------------------------------------------------------------------------- */

/* A tensor in device memory, owned by the caller. Strides are in elements. */
typedef struct dw_attention_tensor {
    void *data;
    int64_t batch, head, row; /* strides of the first three axes */
} dw_attention_tensor;

/* A mask of all pairs of a query and a key, [batch, heads_q, seq_len_q, seq_len_kv]. A stride of 0 repeats it along
 * that axis: a padding mask repeats along heads and queries, ALiBi along the batch. Elements may have any strides and
 * addresses; reading is fastest if keys are adjacent, rows are multiples of 16 bytes apart and seq_len_kv is a multiple
 * of 8. */
typedef struct dw_attention_bias {
    void *data;
    int64_t batch, head, row, key; /* strides in elements */
} dw_attention_bias;

typedef enum dw_attention_bias_kind {
    DW_ATTENTION_NO_BIAS,
    /* Numbers of the call's dtype are added to the scaled scores. -infinity hides a pair. */
    DW_ATTENTION_ADDED,
    /* Bytes: 0 hides a pair, 1 does not. */
    DW_ATTENTION_VISIBLE
} dw_attention_bias_kind;

/* One call. Fill it with zeros first: zero means "none" or "off" unless the member's comment says otherwise. */
typedef struct dw_attention {
    size_t struct_size;      /* sizeof(dw_attention) */
    const dw_device *device; /* NULL: "cuda" */
    dw_dtype dtype;          /* of q, k, v, o and their gradients: DW_BF16 or DW_F16 */
    /* Query head h reads key head h / (heads_q / heads_kv). heads_q must be a multiple of heads_kv. */
    int32_t batch, heads_q, heads_kv;
    int32_t seq_len_q, seq_len_kv; /* packed: those of the longest sequences */
    int32_t head_dim;              /* of q, k, v and o: a multiple of 8, at most 256 */

    /* Packed sequences: batch + 1 ascending row offsets in device memory, starting at 0. Set both or neither. */
    const int32_t *offsets_q, *offsets_k;
    int64_t total_q, total_k; /* total rows of a packed batch; not read otherwise */

    float scale;   /* no default: usually 1 / sqrt(head_dim); 0 multiplies the scores by 0 */
    float softcap; /* above 0: scores become softcap * tanh(scale * q k / softcap) */

    /* Query row i sees key j if  i + d - window_left <= j <= i + d + window_right.  d is seq_len_kv - seq_len_q with
     * bottom_right (the last query sees the last key), else 0. A negative window has no limit on its side: -1, -1 is
     * no mask and -1, 0 is causal. A row that sees no key gets O = 0, LSE = -infinity and no gradient. */
    int32_t window_left, window_right;
    bool bottom_right;

    /* Dropout of the probabilities. Element (b, h, i, j) of [batch, heads_q, seq_len_q, seq_len_kv] is kept and divided
     * by 1 - dropout if its uniform random number is at least `dropout`. The number is Philox of the element's
     * row-major index, with key `seed`, offset `seed_offset` and stream `dropout_stream` (deepwell/number.h). */
    float dropout; /* in [0, 1) */
    int64_t seed, seed_offset;
    /* Device memory {seed, offset}, read in place of the two members above; for replayed CUDA graphs. May be NULL. */
    const int64_t *seed_memory;

    dw_attention_tensor q, k, v, o;
    /* Natural logarithm of each row's sum of exponentials, contiguous: [batch, heads_q, seq_len_q], packed
     * [heads_q, total_q]. Forward writes it unless it is NULL; backward reads it. */
    float *lse;

    /* Backward reads the gradient of the output and writes the gradients of q, k and v. */
    dw_attention_tensor d_o, dq, dk, dv;
    bool deterministic; /* backward gives the same bits in every run; slower */
    void *workspace;    /* device memory, 16-byte aligned; needs no initial contents */
    size_t workspace_bytes;

    void *stream; /* CUstream; NULL is the legacy default stream */

    /* The kernel that must compute forward, by a name from `deepwell explain kernels`; the call fails if it cannot.
     * NULL: Deepwell chooses its own kernel for the GPU. "cutlass.sm100.attention.bf16" belongs to an optional library
     * (docs/cutlass.md). It supports BF16, head_dim 64 or 128, no mask or a causal mask with seq_len_q equal to
     * seq_len_kv; no packed sequences, soft cap or dropout. Its heads must be adjacent (head stride = head_dim), and k
     * and v must have the same row and batch strides. `struct_size` may end before this member, which means NULL. */
    const char *kernel;

    /* Calls with different streams below 2^20 draw independent masks from one seed: one stream for each layer of a
     * model. The low 32 bits count. `struct_size` may end before this member, which means 0. */
    int64_t dropout_stream;

    /* A mask besides the window. Not with a soft cap, packed sequences or a kernel's name; on Hopper only. A row that
     * sees no key gets O = 0, LSE = -infinity and no gradient; one whose keys all have the least number of the type has
     * equal probabilities. `struct_size` may end before these members, which means none. */
    dw_attention_bias_kind bias_kind;
    dw_attention_bias bias;
    /* Backward writes the gradient of a DW_ATTENTION_ADDED bias here unless `data` is NULL, summed over the axes along
     * which the bias repeats (always in the same order); the bias must have queries and keys of its own. Keys are
     * adjacent: `key` is not read. */
    dw_attention_bias d_bias;
} dw_attention;

/* ---- calls ---------------------------------------------------------------------------------- */

/* All errors are found before anything is launched. DW_INVALID_ARGUMENT: a pointer is missing or misaligned, a number
 * is out of range, or the kernel's name is unknown (the message lists the known ones). DW_SHAPE: sizes are out of range
 * or disagree. DW_TYPE: the dtype is neither BF16 nor F16. DW_UNSUPPORTED: the device runs no kernels, no kernel there
 * supports the call, the named one does not, or the kernel failed its first-use check. */
DW_API dw_status dw_attention_forward(const dw_attention *call);
/* Computes dq, dk and dv; needs `workspace`. Fails as dw_attention_forward does, with one exception: if the kernel
 * failed its first-use check, a slow reference kernel computes the gradients, because the forward pass has run by
 * then. */
DW_API dw_status dw_attention_backward(const dw_attention *call);

/* Contiguous BHSD tensors in BF16: q and o [B,H,Q,D], k and v [B,H,K,D]. Runs in the current context on the calling
 * thread's default stream. `causal` aligns the last query with the last key. Returns a dw_status. */
DW_API int dw_fmha_bf16_forward(void *q, void *k, void *v, void *o, int B, int H, int Q, int K,
                                int D, int causal);

/* ---- queries -------------------------------------------------------------------------------- */

/* Bytes of workspace that dw_attention_backward needs for this call. Reads no pointer. Without a GPU it returns a size
 * that suffices on every GPU. Fails as dw_attention_backward does for sizes, types and strides. */
DW_API dw_status dw_attention_backward_workspace(const dw_attention *call, size_t *bytes);
/* Returns DW_OK if forward (and, with `backward`, backward) would run, else the reason. It reads none of the call's
 * memory, and tensors' addresses may be NULL. The first query for a kind of call compiles and loads the kernels, which
 * takes seconds, and compares their results with a reference kernel's. A kernel that disagrees on this GPU is not used.
 * DEEPWELL_FIRST_USE_CHECK=off skips the comparison. */
DW_API dw_status dw_attention_supported(const dw_attention *call, bool backward);

#ifdef __cplusplus
}
#endif
#endif
