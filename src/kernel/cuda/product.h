/* The steps from a public call of a matrix product to its launch on a GPU: check, choose, find the kernel, launch. */
#ifndef DW_CUDA_PRODUCT_H
#define DW_CUDA_PRODUCT_H

#include "base/base.h"
#include "deepwell/product.h"
#include "device/device.h"
#include "jit/jit.h"
#include "kernel/library/cutlass.h"
#include "sm100/gemm_scaled_params.h"

/* ---- product_check.c ------------------------------------------------------------------------ */

/* The caller's structure, which may be a shorter one of before, as one of today. */
dw_status dw__product_read(const dw_product *given, dw_product *call);

/* Whether the call's members make sense together, GPU or not. `launching`: pointers are needed, too. */
dw_status dw__product_check(const dw_product *call, bool launching);

static inline bool dw__product_is_empty(const dw_product *call) {
    return call->m == 0 || call->n == 0;
}
/* Rows of B, and numbers in the bias. */
static inline int64_t dw__product_rows_b(const dw_product *call) {
    return call->activation == DW_ACTIVATION_SWIGLU ? 2 * call->n : call->n;
}

/* Of A and B: numbers, or codes of these schemes. */
typedef enum dw__product_kind {
    DW__PRODUCT_DENSE,
    DW__PRODUCT_MXFP8,
    DW__PRODUCT_NVFP4,
    DW__PRODUCT_MXFP4
} dw__product_kind;
dw__product_kind dw__product_kind_of(const dw_product *call); /* of a checked call */
/* SCHEME of gemm_scaled_params.h. */
static inline int dw__product_scheme(dw__product_kind kind) { return (int)kind - 1; }

/* Units of dw_matrix.stride in rows of A and B: elements, or bytes of k codes; and how many a row of k takes. */
int64_t dw__product_row_units(const dw_product *call);

/* "m 300, n 256, k 64, bf16 to f32, bias, gelu, residual": for messages. */
const char *dw__product_describe(const dw_product *call, char *text, size_t bytes);

/* ---- product_setup.c ------------------------------------------------------------------------- */

/* One of cuda/sm100/gemm_tiles.h. */
typedef struct dw__product_tile {
    dw__product_kind kind;
    int ctas, n, stages;
    unsigned shared_bytes; /* dynamic */
} dw__product_tile;
enum { DW__PRODUCT_TILES = 18 };
extern const dw__product_tile dw__product_tiles[DW__PRODUCT_TILES];

/* What a kernel is compiled for. */
typedef struct dw__product_shape {
    int tile; /* of dw__product_tiles, one of `kind` */
    dw__product_kind kind;
    int output; /* OUTPUT of gemm_params.h */
    bool f16, bias, residual;
    bool e5m2_a, e5m2_b; /* MXFP8 */
    dw_activation activation;
} dw__product_shape;
enum { DW__PRODUCT_OUTPUTS = 3 };
enum { DW__PRODUCT_SHAPES = DW__PRODUCT_TILES * DW_ACTIVATION_COUNT * DW__PRODUCT_OUTPUTS << 5 };
/* Below DW__PRODUCT_SHAPES. */
int dw__product_index(const dw__product_shape *shape);

/* Whether there is such a kernel: a tile is for one kind of operands and takes whole boxes of D's columns. */
bool dw__product_exists(const dw__product_shape *shape);
int dw__product_tile_rows(const dw__product_shape *shape);
int dw__product_tile_columns(const dw__product_shape *shape); /* of D */
/* Of the contraction. */
int dw__product_step(dw__product_kind kind);

/* What a tile costs by the static account, none of it measured: clocks = rounds of tiles over all processors, each as
 * many steps as the contraction has, each step the longer of the tensor cores' time and that of reading A and B from
 * shared memory; and the bytes that all tiles load. */
typedef struct dw__product_account {
    double clocks, bytes;
    int64_t tiles, rounds, steps;
    int step_clocks;
} dw__product_account;
dw__product_account dw__product_account_of(const dw_product *call, const dw__product_shape *shape,
                                           int sm_count);

/* The kernel for a checked call: of the tiles the one with the fewest clocks, then with the fewest bytes. */
dw__product_shape dw__product_shape_of(const dw_product *call, int sm_count);

dw__jit_variant dw__product_variant(const dw__product_shape *shape);
/* By definition: operands and D as they are, not quantized. */
dw__jit_variant dw__product_reference_variant(int capability, bool f16, bool f32_output);
static inline bool dw__product_has_reference(const dw__product_shape *shape) {
    return shape->kind == DW__PRODUCT_DENSE && shape->output != DW_GEMM_OUTPUT_MXFP8;
}

/* ---- product_launch.c -------------------------------------------------------------------------- */

/* A kernel of one shape and context. */
enum { DW__PRODUCT_REASON = 1024 };
typedef struct dw__product_kernel {
    dw__product_shape shape;
    void *function;
    bool disabled;                   /* disagreed with the reference on this GPU */
    char reason[DW__PRODUCT_REASON]; /* why it was */
} dw__product_kernel;

/* `call` has been checked and is not empty. On at most `sm_count` processors. */
dw_status dw__product_launch(const dw_product *call, const dw__context *context, int sm_count,
                             const dw__product_kernel *kernel);
/* By definition. */
dw_status dw__product_launch_reference(const dw_product *call, const dw__context *context,
                                       void *function);

/* ---- product_kernels.c -------------------------------------------------------------------------- */

/* Whether a GPU of this compute capability (100 for 10.0) has these kernels. */
bool dw__product_runs_on(int capability);

/* Loaded, and compared with the reference, by the first call that needs it; then found without a lock. */
dw_status dw__product_kernel_of(const dw__context *context, const dw__product_shape *shape,
                                const dw__product_kernel **kernel);
dw_status dw__product_reference_of(const dw__context *context, bool f16, bool f32_output,
                                   void **function);

/* ---- product.c -------------------------------------------------------------------------------------- */

/* The device's context (NULL: "cuda"), in which CUTLASS's kernel runs, or for NULL Deepwell's own. */
dw_status dw__product_context(const dw_device *device, const dw_cutlass_kernel *kernel,
                              const dw__context **context);
/* By definition. */
dw_status dw__product_run_reference(const dw_product *call, const dw__context *context);

/* ---- product_cutlass.c -------------------------------------------------------------------------- */

/* Whether one of CUTLASS's kernels computes such a call, anywhere; m, n and k are not 0. */
dw_status dw__product_cutlass_takes(const dw_product *call, const dw_cutlass_kernel *kernel);
dw_status dw__product_cutlass_bytes(const dw_product *call, const dw__cutlass *library,
                                    const dw_cutlass_kernel *kernel, size_t *bytes);
/* With a workspace that is large enough. */
dw_status dw__product_cutlass_launch(const dw_product *call, const dw__cutlass *library,
                                     const dw_cutlass_kernel *kernel);

/* What was found at a kernel's first use, of calls with this epilogue: compared by the first call that needs it, then
 * found without a lock. NULL: it is right; else why it is not used. */
dw_status dw__product_cutlass_first_use(const dw__context *context, const dw__cutlass *library,
                                        const dw_cutlass_kernel *kernel, bool residual,
                                        const char **reason);

/* Groups likewise. */
dw_status dw__grouped_cutlass_takes(const dw_grouped_product *call,
                                    const dw_cutlass_kernel *kernel);
dw_status dw__grouped_cutlass_bytes(const dw_grouped_product *call, const dw__cutlass *library,
                                    const dw_cutlass_kernel *kernel, size_t *bytes);
dw_status dw__grouped_cutlass_launch(const dw_grouped_product *call, const dw__cutlass *library,
                                     const dw_cutlass_kernel *kernel);

/* ---- product_guard.c ----------------------------------------------------------------------------- */

/* What is compared with the reference at its first use. */
typedef struct dw__product_subject dw__product_subject;
struct dw__product_subject {
    const char *name;
    bool has_reference; /* what it computed is then computed by definition */
    dw_product call;    /* sizes, types, alpha, activation, schemes */
    bool bias, residual;
    /* 1 and no rows: a product. Else so many of A's rows, m together, have a B of their own, one behind the other. */
    int groups;
    int64_t rows[4];
    size_t workspace_bytes;
    const void *kernel;
    dw_status (*launch)(const dw__product_subject *subject, const dw_product *call,
                        const dw__context *context);
};

/* Runs the kernel on small random matrices, on a stream of its own, and says into `reason`, of
 * DW__PRODUCT_REASON bytes, where it fails or where D differs from sums in double by more than rounding
 * explains; "" where it is right. Failing means that nothing was learnt. */
dw_status dw__product_guard(const dw__context *context, const dw__product_subject *subject,
                            char *reason);

#endif
