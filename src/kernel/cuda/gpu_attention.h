/* Attention on a GPU: declarations shared by the family's files and their tests. */
#ifndef DW_GPU_ATTENTION_H
#define DW_GPU_ATTENTION_H

#include "common/attention_params.h"
#include "deepwell/attention.h"
#include "kernel/gpu_kernel.h"
#include "kernel/library/cutlass.h"

typedef enum dw__attention_pass {
    DW__ATTENTION_FORWARD,
    DW__ATTENTION_BACKWARD
} dw__attention_pass;

/* ---- tensors of a call -------------------------------------------------------------------------- */

typedef enum dw__attention_operand {
    DW__ATTENTION_Q,
    DW__ATTENTION_K,
    DW__ATTENTION_V,
    DW__ATTENTION_O,
    DW__ATTENTION_D_O,
    DW__ATTENTION_DQ,
    DW__ATTENTION_DK,
    DW__ATTENTION_DV,
    DW__ATTENTION_OPERANDS
} dw__attention_operand;

typedef struct dw__attention_operand_kind {
    const char *name;
    size_t offset; /* of the member of dw_attention */
    bool of_keys;  /* has heads_kv heads and seq_len_kv rows */
    bool backward; /* only backward uses it */
    bool written;  /* by the first pass that uses it */
} dw__attention_operand_kind;
extern const dw__attention_operand_kind dw__attention_operands[DW__ATTENTION_OPERANDS];

static inline dw_attention_tensor *dw__attention_tensor(const dw_attention *call,
                                                        dw__attention_operand which) {
    return (dw_attention_tensor *)((uintptr_t)call + dw__attention_operands[which].offset);
}

/* The lengths of a tensor's axes besides head_dim; packed sequences are one sequence. */
typedef struct dw__attention_extent {
    int64_t batch, heads, rows;
} dw__attention_extent;
dw__attention_extent dw__attention_extent_of(const dw_attention *call, dw__attention_operand which);
/* Sets the strides of a contiguous tensor, [batch, heads, rows, head_dim], or [batch, rows, heads, head_dim] with
 * `rows_first`. Returns its bytes. */
size_t dw__attention_lay_out(dw_attention *call, dw__attention_operand which, bool rows_first);

/* ---- attention_check.c ---------------------------------------------------------------------- */

/* Reads a call of this version or of an earlier one, whose structure is shorter. Fails for other sizes and for NULL. */
dw_status dw__attention_read(const dw_attention *given, dw_attention *call);

/* Checks whether the call's members are consistent, with or without a GPU. If `launching`, pointers must be set;
 * otherwise NULL passes, and given pointers only have to be aligned. */
dw_status dw__attention_check(const dw_attention *call, dw__attention_pass pass, bool launching);

/* Checks whether GPUs of this compute capability (100 for 10.0) have a kernel for this pass of a checked call.
 * DW_UNSUPPORTED gives the reason. */
dw_status dw__attention_check_kernel(const dw_attention *call, dw__attention_pass pass,
                                     int capability);
/* The same, and whether the call asks for a kernel that has not run on hardware. */
dw_status dw__attention_check_capability(const dw_attention *call, dw__attention_pass pass,
                                         int capability);

/* True if there are no queries or no keys, so that there is nothing to multiply. */
static inline bool dw__attention_has_no_queries(const dw_attention *call) {
    return call->batch == 0 || call->seq_len_q == 0 || (call->offsets_q && call->total_q == 0);
}
static inline bool dw__attention_has_no_keys(const dw_attention *call) {
    return call->batch == 0 || call->seq_len_kv == 0 || (call->offsets_q && call->total_k == 0);
}

/* "batch 2, 16 query heads on 4, seq_len 512 x 512, head_dim 128, bf16, causal": for messages. */
const char *dw__attention_describe(const void *call, char *text, size_t bytes);

/* ---- attention.c: variants --------------------------------------------------------------------- */

/* The compile-time parameters of a variant. */
typedef union dw__attention_shape {
    struct {
        uint64_t head_dim : 16; /* rounded up to a head dimension that has kernels */
        bool f16 : 1, softcap : 1, dropout : 1, packed : 1, window : 1, deterministic : 1;
        /* there are enough keys for the wide tiles, if the head dimension has any */
        bool many_keys : 1;
        bool serial : 1;    /* backward: one thread block processes all keys of a head */
        bool blackwell : 1; /* sm_100f: forward only, without packing, soft cap, dropout or bias */
        bool rtx : 1;       /* sm_120a: backward without packing, soft cap or bias */
        uint64_t bias : 2;  /* a dw_attention_bias_kind */
        bool rotates : 1;   /* forward: a call is a dw__rotated_attention */
        uint64_t unused : 35;
    };
    uint64_t params; /* of dw__variant */
} dw__attention_shape;
_Static_assert(sizeof(dw__attention_shape) == sizeof(uint64_t), "packed, and no bit is padding");

dw__attention_shape dw__attention_shape_of(const dw_attention *call, dw__attention_pass pass,
                                           int sm_count);

/* Tiles of one kernel, from cuda/. `stages` counts stages of K and V in forward, and of Q in backward. */
typedef struct dw__attention_tile {
    int head_dim;
    bool window;
    int keys; /* least seq_len_kv */
    int m, n, stages, stages_do, consumers;
    int serial_rows;       /* backward: serial for at most this many queries per key-value head */
    unsigned shared_bytes; /* dynamic shared memory */
} dw__attention_tile;
/* Returns NULL if there is no kernel for the shape. */
const dw__attention_tile *dw__attention_tile_of(const dw__attention_shape *shape,
                                                dw__attention_pass pass);

/* The variant that compiles `shape`, with entry point `entry`. */
dw__jit_variant dw__attention_variant(const dw__attention_shape *shape, dw__attention_pass pass,
                                      const char *entry, const char *arch);
dw__jit_variant dw__attention_reference_variant(bool f16, dw__attention_pass pass,
                                                const char *arch);

/* Forward whose queries are rotated as they are loaded (rotated_attention.c). */
typedef struct dw__rotated_attention {
    dw_attention call;
    dw_attention_rotation rotation;
    dw_attention_tensor cosines, sines; /* `head` is not read */
} dw__rotated_attention;

/* The dynamic shared memory of a forward variant. */
unsigned dw__attention_forward_bytes(const dw__attention_shape *shape);

/* ---- attention.c: launch ----------------------------------------------------------------------- */

/* Sets the kernels' parameters, except for those of the workspace and `tiles`. */
void dw__attention_set_params(const dw_attention *call, dw_attention_params *params);

/* Makes the map of a tensor, with boxes of 64 columns and `box_rows` rows. */
dw_status dw__attention_map(const dw__context *context, const dw_attention *call,
                            dw__attention_operand which, int box_rows, dw__tensor_map *map);

/* Offsets in the workspace of backward, in bytes; see cuda/common/attention_backward_layout.h. */
typedef struct dw__attention_workspace {
    size_t dq_sum, delta, turn, bytes;
    int blocks; /* serial: thread blocks, each with its own dQ accumulators; 0: all share one set */
} dw__attention_workspace;
dw_status dw__attention_workspace_of(const dw_attention *call, const dw__attention_shape *shape,
                                     int sm_count, dw__attention_workspace *workspace);

/* ---- kernels ----------------------------------------------------------------------------------- */

extern const dw__kernel dw__sm90_attention_forward, dw__sm90_attention_backward,
    dw__sm100_attention_forward, dw__sm120_attention_forward, dw__sm120_attention_backward;
/* The kernel of a pass on GPUs of a compute capability that has one. */
const dw__kernel *dw__attention_kernel_on(dw__attention_pass pass, int capability);
/* Entry points of backward's variants. */
enum { DW__ATTENTION_MAIN, DW__ATTENTION_PREPARE, DW__ATTENTION_FINISH, DW__ATTENTION_BIAS };
/* The references: attention by its definition, on any GPU. They are not in the registry. */
extern const dw__kernel dw__reference_attention[2];

/* Tolerance of fused kernels. */
#define DW__ATTENTION_TOLERANCE                                                                    \
    "twice the error of rounding P, dS and results to the type, against FP64"

/* gpu_cutlass.c: each of CUTLASS's kernels has an entry like this one, with its own name and description. */
extern const dw__kernel dw__cutlass_attention;
/* attention_cost.c: the operators behind PyTorch's scaled_dot_product_attention. There are DW__TORCH_ATTENTION for each
 * pass. */
enum { DW__TORCH_ATTENTION = 4 };
extern const dw__kernel dw__torch_attention[2][DW__TORCH_ATTENTION];

extern const dw__first_use dw__attention_first_use; /* attention_first_use.c */

/* graph_attention.c: the kernels' call of an operation's. `*used`: bytes of the workspace in front of the kernel's own. */
dw_attention dw__graph_attention_call(const dw__operation_call *given, size_t *used);

/* ---- attention_cost.c --------------------------------------------------------------------------- */

/* Work of a call. In forward, each pair of a query and a visible key counts 4 * head_dim operations. */
typedef struct dw__attention_work {
    double flops, bytes;
    double score_bytes; /* of the matrix of scores, for kernels that store it */
} dw__attention_work;
dw__attention_work dw__attention_work_of(const dw_attention *call, bool backward);
/* Why no alternative to our kernels is measured for a call; NULL: some are. */
const char *dw__attention_why_unmeasured(const dw_attention *call);
/* The cost model of our kernels. */
void dw__attention_seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                           dw__kernel_seconds *result);

/* One row of measurements: TFLOP/s of deepwell, cudnn and flash; index 0 is forward, 1 is backward. */
enum { DW__RATE_DEEPWELL, DW__RATE_CUDNN, DW__RATE_FLASH, DW__RATES };
typedef struct dw__attention_rate {
    int head_dim, rows;
    bool causal;
    double tflops[DW__RATES][2];
} dw__attention_rate;
extern const dw__attention_rate dw__attention_rates[];
extern const size_t dw__attention_rate_count;
extern const char dw__attention_rates_source[];

#endif
