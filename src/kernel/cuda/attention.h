/* The steps from a public call of attention to launches on a GPU: check, set up, find the kernels, launch. */
#ifndef DW_CUDA_ATTENTION_H
#define DW_CUDA_ATTENTION_H

#include "common/attention_params.h"
#include "deepwell/attention.h"
#include "device/device.h"
#include "jit/jit.h"
#include "kernel/gpu_kernel.h"
#include "kernel/library/cutlass.h"

typedef enum dw__attention_pass {
    DW__ATTENTION_FORWARD,
    DW__ATTENTION_BACKWARD
} dw__attention_pass;

/* ---- attention_check.c ---------------------------------------------------------------------- */

/* A call of this or of the first, shorter structure; one of another size, or NULL, is refused. */
dw_status dw__attention_read(const dw_attention *given, dw_attention *call);

/* Whether the call's members make sense together, GPU or not. `launching`: pointers are needed, too; otherwise NULL
 * passes and what is given must only be aligned. */
dw_status dw__attention_check(const dw_attention *call, dw__attention_pass pass, bool launching);

/* Whether a checked call's pass has a kernel for GPUs of that compute capability (100 for 10.0): DW_UNSUPPORTED
 * says why not. */
dw_status dw__attention_check_capability(const dw_attention *call, dw__attention_pass pass,
                                         int capability);

/* No query at all, or no key at all: nothing to multiply. */
static inline bool dw__attention_has_no_queries(const dw_attention *call) {
    return call->batch == 0 || call->rows_q == 0 || (call->offsets_q && call->total_q == 0);
}
static inline bool dw__attention_has_no_keys(const dw_attention *call) {
    return call->batch == 0 || call->rows_k == 0 || (call->offsets_q && call->total_k == 0);
}

/* "batch 2, 16 query heads on 4, rows 512 x 512, head_dim 128, bf16, causal": for messages. */
const char *dw__attention_describe(const dw_attention *call, char *text, size_t bytes);

/* ---- attention_setup.c ---------------------------------------------------------------------- */

/* What a kernel is compiled for. */
typedef struct dw__attention_shape {
    int head_dim; /* rounded up to one of those that there are kernels for */
    bool f16, softcap, dropout, packed, window, deterministic;
    bool many_keys; /* enough for the wide tiles, where there are such */
    bool serial;    /* backward: one block of threads for all keys of a head */
    bool blackwell; /* sm_100f: forward alone, nothing packed, no soft cap, no dropout */
    /* Instead of ours, forward: of the members above only head_dim counts, and window, which is causal. Else NULL. */
    const dw_cutlass_kernel *cutlass;
} dw__attention_shape;
dw__attention_shape dw__attention_shape_of(const dw_attention *call, dw__attention_pass pass,
                                           int sm_count);

/* With the architecture of the context's GPU. */
dw__attention_shape dw__attention_shape_on(const dw_attention *call, dw__attention_pass pass,
                                           const dw__context *context);
const char *dw__attention_forward_entry(const dw__attention_shape *shape);
const char *dw__attention_arch(bool blackwell);

/* Tiles of one kernel, from cuda/; `stages` of K and V forward, of Q backward. */
typedef struct dw__attention_tile {
    int head_dim;
    bool window;
    int keys; /* rows_k from which on */
    int m, n, stages, stages_do, consumers;
    int serial_rows;       /* backward: serial up to so many queries for each head of keys */
    unsigned shared_bytes; /* dynamic */
} dw__attention_tile;
/* NULL: there is no kernel for the shape. */
const dw__attention_tile *dw__attention_tile_of(const dw__attention_shape *shape,
                                                dw__attention_pass pass);

/* What `shape` is compiled as, with entry point `entry`. */
dw__jit_variant dw__attention_variant(const dw__attention_shape *shape, dw__attention_pass pass,
                                      const char *entry, const char *arch);
dw__jit_variant dw__attention_reference_variant(bool f16, dw__attention_pass pass,
                                                const char *arch);

/* The kernels' parameters but those of the workspace, and `tiles`. */
void dw__attention_set_params(const dw_attention *call, dw_attention_params *params);

/* Tensor map of `tensor` in boxes of 64 columns and `box_rows` rows; `name` for messages. */
dw_status dw__attention_map(const dw__context *context, const dw_attention *call,
                            const dw_attention_tensor *tensor, const char *name, bool of_keys,
                            int box_rows, dw__tensor_map *map);

/* Places in the workspace of backward, in bytes from its begin; cuda/common/attention_backward_layout.h. */
typedef struct dw__attention_workspace {
    size_t dq_sum, delta, turn, bytes;
    int blocks; /* of threads, serial: each has sums of dQ of its own; 0: one set for all */
} dw__attention_workspace;
dw_status dw__attention_workspace_of(const dw_attention *call, const dw__attention_shape *shape,
                                     int sm_count, dw__attention_workspace *workspace);

extern const dw__gpu_kernel dw__cutlass_attention;

/* ---- attention_cutlass.c --------------------------------------------------------------------- */

/* Whether CUTLASS's kernel takes a checked call, on whatever GPU; DW_UNSUPPORTED says why not. Looks at no address.
 * `workspace_bytes`: what its launch needs. */
dw_status dw__attention_cutlass_check(const dw_attention *call, const dw_cutlass_kernel *kernel,
                                      size_t *workspace_bytes);
/* Of a call that it takes. */
dw__attention_shape dw__attention_cutlass_shape(const dw_attention *call,
                                                const dw_cutlass_kernel *kernel);
/* On at most so many processors. */
dw_status dw__attention_cutlass_launch(const dw_attention *call, int processors,
                                       const dw_cutlass_kernel *kernel);

/* ---- attention_launch.c ---------------------------------------------------------------------- */

/* Kernels of one shape, pass and context. */
typedef struct dw__attention_kernels {
    dw__attention_shape shape;
    const dw__attention_tile *tile; /* NULL: the reference, any shape in one function; CUTLASS's */
    void *main, *prepare, *finish;  /* the last two: backward */
    bool disabled;                  /* disagreed with the reference on this GPU */
    char reason[1024];              /* why it was */
} dw__attention_kernels;

/* `call` has been checked. */
dw_status dw__attention_launch_forward(const dw_attention *call, const dw__context *context,
                                       const dw__attention_kernels *kernels);
dw_status dw__attention_launch_backward(const dw_attention *call, const dw__context *context,
                                        const dw__attention_kernels *kernels);
dw_status dw__attention_launch_reference(const dw_attention *call, const dw__context *context,
                                         dw__attention_pass pass,
                                         const dw__attention_kernels *kernels);

/* ---- attention_kernels.c ---------------------------------------------------------------------- */

/* Loaded, and compared with the reference, by the first call that needs them; then found without a lock. */
dw_status dw__attention_kernels_of(const dw__context *context, const dw__attention_shape *shape,
                                   dw__attention_pass pass, const dw__attention_kernels **kernels);
dw_status dw__attention_reference_of(const dw__context *context, bool f16, dw__attention_pass pass,
                                     const dw__attention_kernels **kernels);

/* ---- attention_guard.c ------------------------------------------------------------------------- */

/* Runs `kernels` and the reference on small random tensors, on a stream of its own, and sets `disabled` and `reason`
 * where they differ by more than rounding explains. Failing means that nothing was learnt. */
dw_status dw__attention_guard(const dw__context *context, const dw__attention_shape *shape,
                              dw__attention_pass pass, dw__attention_kernels *kernels);

#endif
