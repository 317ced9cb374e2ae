/* Kernels, and the registry that lists them.
 *
 * A kernel is one entry, whatever device it runs on and wherever it comes from (Deepwell, oneDNN, CUTLASS, the library
 * behind PyTorch's operators). The entry says which calls the kernel supports and why not others, how long a call
 * takes, how much workspace it needs, how it is prepared and run, and where it has been shown to be right. Lowering,
 * explanations, the support table and the public calls read the same entry.
 *
 * A kernel of an operation of the graph computes one node. It receives concrete tensors (strided views of memory that
 * the caller owns), the node's attributes with numbers in place of dims, and a workspace of the size that it asked for.
 * It holds no state and does not allocate while it runs; if a library behind it allocates, library_bytes says how much.
 *
 * For each operation and device the registry lists the kernels best first. On a CPU the reference (expansion into
 * primitives, evaluated one by one) is last and supports every call.
 */
#ifndef DW_KERNEL_H
#define DW_KERNEL_H

#include "base/base.h"
#include "common/data_error.h"
#include "deepwell/graph.h"
#include "number/dtype_kinds.h"

/* A strided view. Strides in elements; 0 on a broadcast axis. */
typedef struct dw__tensor {
    void *data; /* NULL: operand absent, or (in supports() and workspace_bytes()) not placed yet */
    dw_dtype dtype;
    int rank;
    int64_t shape[DW_MAX_RANK];
    int64_t stride[DW_MAX_RANK];
} dw__tensor;

/* ---- calls --------------------------------------------------------------------------------------- */

/* The tensor that is added to output 0 of a call before it is rounded. Of a kernel: the last of these that it supports,
 * with all before it. */
typedef enum dw__accumulation {
    DW__ADDS_NOTHING,
    DW__ADDS_TO_OUTPUT, /* its contents, in place */
    DW__ADDS_TO_ADDEND  /* a tensor of its type and shape that lies elsewhere */
} dw__accumulation;

/* The operand of a product that a call also sums over the product's inner axis. */
typedef enum dw__operand_sum { DW__SUMS_NOTHING, DW__SUMS_A, DW__SUMS_B } dw__operand_sum;

/* How the results of a call may lie in memory. Of a kernel: the last of these that it writes, with all before it. */
typedef enum dw__result_layout {
    DW__RESULTS_CONTIGUOUS,
    /* The last axis is contiguous and the others have any strides, as in a slice of a larger tensor. */
    DW__RESULTS_IN_ROWS,
    DW__RESULTS_SCATTERED, /* any strides; slower if the last axis is not contiguous */
    DW__RESULTS_STRIDED    /* any strides, about as fast */
} dw__result_layout;

typedef struct dw__call {
    dw_op op;
    uint32_t attr_count;
    const dw_attr *attrs; /* sorted by key; DIMS lists hold numbers */
    uint32_t input_count, output_count;
    dw__tensor inputs[DW_MAX_INPUTS]; /* rank -1: absent */
    dw__tensor
        /* They lie as the kernel's `results` allows. An output that nobody reads has data NULL and need not be
         * computed. */
        outputs[DW_MAX_OUTPUTS];
    const void *prepared; /* the result of parse(), or NULL */

    /* For kernels that do more than the operation. */
    /* NULL, or the elementwise program behind the operation, with its `prepared`: its input `replaced` is the
     * operation's result. The result itself is stored only if outputs[0] has data. */
    const struct dw__call *epilogue;
    int replaced;
    /* The epilogue's input that is the second half of the result's columns, while `replaced` is the first half; below 0:
     * `replaced` is the whole result. */
    int replaced_half;
    /* A linear layer with an epilogue may have another one beside it, of the same x and shape: behind the operation's own
     * inputs there are the other's w and b, behind its output the other's, stored if it has data. The epilogue's input
     * `replaced` is the first one's result, `replaced_half` the other's. */
    bool paired;
    dw__accumulation accumulates;
    dw__tensor addend; /* DW__ADDS_TO_ADDEND only */
    /* Bit i: nothing reads input i, or the memory around its elements, after this call, which may overwrite them. */
    uint64_t disposable;
    /* A matmul without batches may have one more output of rank 1, behind the operation's own. It receives the sums
     * over k of operand a [m,k] or b [k,n], as they are multiplied: m or n elements, summed in F32 and rounded once. */
    dw__operand_sum sums;
    /* Bit o: behind the operation's own outputs, in order of o, there is one more for output o. Each is a vector of F32
     * whose words together say the largest finite magnitude of that output (cuda/common/magnitude.cuh). A call of an
     * operation that quantizes its input may have such a vector for that input, behind the operation's own inputs. */
    uint64_t magnitudes;
    /* An elementwise program behind another operation may have these. Bit o: behind its own outputs, in order of o,
     * there is one more for output o: a vector of its type, the sums over all axes but the last, added in F32 and
     * rounded once. */
    uint64_t summed;
    /* Bit o: output o of an elementwise operation becomes codes of fp8-block, in blocks of 1 x 128: behind the operation's
     * own outputs, in order of o, there are the four results of quantize_tiles for its rows. */
    uint64_t codes;
    /* Products of F32 operands may round these to TF32: 10 bits behind the point, F32's range. */
    bool tf32;
} dw__call;

/* A call of one of the graph's operations. Kernels of the CPU read its first member alone; a GPU's have their tensors
 * in device memory. */
typedef struct dw__operation_call {
    dw__call call;
    void *stream;
    void *workspace;     /* as much as the entry's workspace_bytes asks for */
    dw_data_error error; /* word NULL: errors that only data can show are not reported */
} dw__operation_call;

/* The type of an entry's call. */
typedef enum dw__call_kind {
    DW__CALL_OPERATION,          /* dw__operation_call: operations of the graph's table */
    DW__CALL_ATTENTION_FORWARD,  /* dw_attention */
    DW__CALL_ATTENTION_BACKWARD, /* dw_attention */
    DW__CALL_GEMM,               /* dw_gemm */
    DW__CALL_GROUPED_GEMM,       /* dw_grouped_gemm */
    DW__CALL_QUANTIZE,           /* dw_quantize */
    DW__CALL_ADAMW               /* dw_adamw_gpu */
} dw__call_kind;

/* ---- entries ------------------------------------------------------------------------------------- */

typedef struct dw__kernel dw__kernel;
typedef struct dw__context dw__context;       /* device/device_table.h */
typedef struct dw__gpu_target dw__gpu_target; /* kernel/cuda/gpu_target.h */
typedef struct dw__variant dw__variant;       /* kernel/gpu_kernel.h, and the next two */
typedef struct dw__entry_point dw__entry_point;
typedef struct dw__first_use dw__first_use;
struct json_t;

/* Where a GPU's kernel has been shown to be right. The tests compare the CPU's with the reference on every machine. */
typedef enum dw__proof {
    DW__PROOF_OF_PROVIDER, /* the library or PyTorch vouches for it */
    DW__MEASURED_ON_HARDWARE,
    DW__RUN_ON_HOPPER, /* has trained whole models there; on other GPUs tested on the emulator */
    DW__PROVEN_ON_EMULATOR /* tested on the emulator; no hardware has run it */
} dw__proof;

/* The cost model's result for a call. */
typedef struct dw__kernel_seconds {
    double seconds; /* 0: not known */
    /* measured on the GPU that `from` names, at the nearest shape; otherwise estimated */
    bool measured;
    char from[192]; /* the origin of the figure, or the reason why there is none */
} dw__kernel_seconds;

struct dw__kernel {
    const char
        *name; /* "cpu.attention.tiled", "sm90_attention_forward"; one device's names are unique */
    dw__call_kind kind;
    /* DW__CALL_OPERATION: the operation, or `computes` for kernels of several. */
    dw_op op;
    bool (*computes)(dw_op op);
    const char *source; /* "ours, portable C", "oneDNN 2.6 sgemm", "cuda/common/softmax.cu" */
    const char *architectures; /* NULL: this machine's CPU */
    const char
        *needs; /* what supports() expects beyond the operation: "F32, rows at one distance" */

    /* Returns DW_OK, or the reason why not: DW_TYPE if the kernel is for other operands or another GPU; DW_UNSUPPORTED
     * and others for this call. Looks at types, shapes, strides and alignment, never at data, which may be NULL. The
     * GPU need not exist; NULL means any. */
    dw_status (*supports)(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu);
    /* The cost model. `result` starts zeroed. NULL: times are not known. */
    void (*seconds)(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                    dw__kernel_seconds *result);
    /* Returns the bytes that a supported call needs beside its tensors. `context` is NULL on a CPU. NULL: none. */
    dw_status (*workspace_bytes)(const dw__kernel *kernel, const void *call,
                                 const dw__context *context, size_t *bytes);
    /* Whether a public call runs without its workspace, or with less, only slower. NULL: no. */
    bool (*workspace_optional)(const void *call);
    /* DW__CALL_OPERATION: the tolerance against the operation's definition in FP64, relative to the largest magnitude
     * of the result, at reduction length n: bound = factor * sqrt(n) * 2^-24 for F32. 0: the kernels behind it have
     * theirs. */
    double tolerance_factor;
    /* The product of a 16-bit `linear` may be rounded before the bias is added, so that a result has two roundings. */
    bool rounds_before_bias;
    /* Kernels that write more than contiguous results let a plan choose where a result lies: in a slice of a
     * concatenation, or, if any strides are as fast, in the order that later operations read. */
    dw__result_layout results;
    bool with_epilogue;           /* for calls with an epilogue only */
    dw__accumulation accumulates; /* the most that it adds to output 0 */
    bool sums_operands;           /* computes calls with `sums`, which accumulate nothing */
    bool reads_magnitudes;        /* computes calls that have the magnitudes of input 0 */
    bool makes_codes;             /* for calls with `codes` only */
    /* Returns the length of the vector of magnitudes for output `o`, or 0: they are not found. `call` has no magnitudes
     * yet. NULL: computes no calls with magnitudes. */
    int64_t (*magnitude_parts)(const dw__call *call, uint32_t o);

    /* ---- of a CPU ---- */
    /* Returns the most bytes that libraries allocate by themselves during the call, on all threads together; may be
     * NULL for none. They are not part of the workspace; predictions of memory use them. */
    size_t (*library_bytes)(const dw__call *call);
    /* Optional: parses the attributes once (a fused body); the result is released with dw__free. It may depend on
     * attributes and element types only, because calls that agree in those share it. */
    dw_status (*parse)(const dw__call *call, void **parsed);
    /* Computes the call on the calling thread and the pool's. NULL: not a kernel of a CPU. */
    dw_status (*run)(const dw__call *call, void *workspace);

    /* ---- of a GPU ---- */
    /* Names the kernel in explanations and measurements: "deepwell", "cutlass", "cudnn". */
    const char *backend;
    const char *label;     /* the backend's name for users: "FlashAttention-2" */
    const char *described; /* the source in explanations: "PyTorch: FlashAttention-2" */
    dw__proof proof;
    /* the backend is measured for calls that it supports; the others are for calls that no fast kernel supports */
    bool competes;
    bool asked_for; /* runs only on request */
    /* More of its row of the support table (`deepwell explain kernels`). `shown` says where the kernel has been shown
     * to be right; NULL: the text for `proof`. */
    const char *operation, *elements, *shown;
    const char *tolerance; /* of results, in words; for docs/cuda.md */
    /* Describes the tile that a supported call gets, for explanations. May be NULL. */
    struct json_t *(*describe_tile)(const dw__kernel *kernel, const void *call,
                                    const dw__gpu_target *gpu);
    /* Finds the variant for a supported call, or compiles, loads and checks it; it may be disabled. NULL: PyTorch runs
     * the kernel. */
    dw_status (*prepare)(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant);
    /* Launches on the call's stream. Allocates nothing and waits for nothing. */
    dw_status (*enqueue)(const void *call, const dw__context *context, const dw__variant *variant);
    /* Sets the entry points of a variant, which start zeroed; the first one names it. There are DW__ENTRY_POINTS. NULL:
     * a library loads its own kernels. */
    dw_status (*entry_points)(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points);
    const dw__first_use *first_use; /* NULL for a reference, which is not checked */
    /* DW__CALL_OPERATION: makes a small call for trial `index` that the variant computes: operation, attributes, types,
     * shapes and strides, without data. */
    void (*example)(uint64_t params, int index, dw__call *call);
    int example_sms; /* the example runs on so many SMs, for persistent blocks of several tiles; 0: all */
    const void *provided; /* the library's own description of its kernel, or NULL */
};

/* DW_UNSUPPORTED: the kernel's name and needs. For supports(), where one sentence is reason enough. */
dw_status dw__kernel_refuse(const dw__kernel *kernel);

/* ---- the registry (registry.c) ------------------------------------------------------------------- */

/* Every GPU kernel. Deepwell's come first. */
extern const dw__kernel *const dw__gpu_kernels[];
extern const unsigned dw__gpu_kernel_count;

/* Returns the kernels of an operation of the graph on a CPU or a GPU, best first, NULL-terminated. On a CPU the
 * reference is last. */
const dw__kernel *const *dw__kernel_candidates(dw_op op, bool on_gpu);
/* Returns the first kernel that supports the call on `gpu`, or on this CPU if `gpu` is NULL. `after`: NULL, or a kernel
 * that it has returned for this call, to get the next one. NULL: there is none; a CPU has one for every call without an
 * epilogue. */
const dw__kernel *dw__kernel_for(const dw__operation_call *call, const dw__gpu_target *gpu,
                                 const dw__kernel *after);
/* DW_UNSUPPORTED with the reason of each kernel of the call's operation. */
dw_status dw__kernel_fail_none(const dw__operation_call *call, const dw__gpu_target *gpu);
bool dw__kernel_is_reference(const dw__kernel *kernel);
/* Returns the most that a kernel of `op` can do about the layout of its results. */
dw__result_layout dw__kernel_results(dw_op op, bool on_gpu);
/* Returns whether some kernel of `op` is for calls with an epilogue, accumulates, or sums operands. */
bool dw__kernel_has_epilogues(dw_op op, bool on_gpu);
bool dw__kernel_accumulates(dw_op op, bool on_gpu);
/* The user's bound on the bytes of logits that are in a GPU's memory at a time (DEEPWELL_LOGITS_BYTES). False: there is
 * none. */
bool dw__logits_bound(size_t *bytes);
/* Whether forward keeps the logits of linear_cross_entropy for backward (DEEPWELL_LOGITS): "kept", "blocks" (computed again
 * in blocks), or as the memory decides. */
typedef enum dw__logits { DW__LOGITS_BY_MEMORY, DW__LOGITS_KEPT, DW__LOGITS_IN_BLOCKS } dw__logits;
dw__logits dw__logits_wanted(void);
/* The products that a GPU computes together with the program behind them (DEEPWELL_EPILOGUES): none, those that are
 * faster so, or all that our kernels can. With none, programs make no codes either. */
typedef enum dw__epilogues {
    DW__EPILOGUES_OFF,
    DW__EPILOGUES_WORTH_IT,
    DW__EPILOGUES_ALL
} dw__epilogues;
dw__epilogues dw__epilogues_wanted(void);
/* Returns whether a kernel of the GPU may rotate such queries, [batch, heads, seq_len, head_dim], in their attention. */
bool dw__may_rotate_queries(const dw__tensor *q, const dw__gpu_target *gpu);
/* DW_INVALID_ARGUMENT: one of these two variables has another value. The functions above take it for the default. */
dw_status dw__check_choices(void); /* choices.c */
bool dw__kernel_sums_operands(dw_op op, bool on_gpu);
bool dw__kernel_reads_magnitudes(dw_op op, bool on_gpu);
bool dw__kernel_makes_codes(dw_op op, bool on_gpu);
/* Outputs that a call has for each bit of `codes`. */
enum { DW__CODE_OUTPUTS = 4 };
/* The outputs that are the operation's own. */
uint32_t dw__call_own_outputs(const dw__call *call);
/* Returns the operation that copies a tensor of `rank` axes between any two layouts, and its attribute. */
dw_op dw__kernel_copy_op(int rank, dw_attr *attr);

/* ---- helpers for kernels ----------------------------------------------------------------------- */

const dw_attr *dw__call_attr(const dw__call *call, dw_attr_key key);
int64_t dw__call_int(const dw__call *call, dw_attr_key key, int64_t absent);
double dw__call_float(const dw__call *call, dw_attr_key key, double absent);
/* Returns an optional operand that may be absent, or NULL. */
const dw__tensor *dw__call_optional(const dw__call *call, uint32_t input);
/* Returns whether a call of segment_linear, or of the gradient of its matrices, reads rows by an index, or stores them by
 * one or with weights. */
bool dw__call_gathers(const dw__call *call);
/* Returns the tensor that is added to output 0, which may be output 0 itself, or NULL. */
const dw__tensor *dw__call_addend(const dw__call *call);
/* Returns whether a call of multiply_codes has scales of blocks. */
bool dw__call_has_tiles(const dw__call *call);
/* Returns whether these are F32, those of fp8-block. */
bool dw__call_has_f32_scales(const dw__call *call);
/* Returns whether a call of multiply_codes has a scale for each row of a and of b. */
bool dw__call_has_row_scales(const dw__call *call);
/* True of products of codes for which a GPU may have no kernel: those with scales of blocks, and those of experts. */
bool dw__call_has_few_kernels(const dw__call *call);
/* Whether a product with scales of blocks is simulated if this call of its operations has no kernel. A product with its
 * bias, or in another type than F32, is then computed in two steps. */
bool dw__call_decides_product(const dw__call *call);
/* The kernels that multiply codes with F32 scales of blocks on FP8 tensor cores, in order of preference, up to NULL.
 * Others compute such calls without. */
const dw__kernel *const *dw__kernels_of_fp8_blocks(void);
/* Returns the bias of a call of linear or multiply_codes, or NULL. */
const dw__tensor *dw__call_bias(const dw__call *call);
int64_t dw__tensor_count(const dw__tensor *tensor);
/* Bytes of a contiguous tensor of this type and shape, which lowering has found to have fewer than 2^61. */
size_t dw__tensor_bytes(const dw__tensor *tensor);
bool dw__tensor_is_contiguous(const dw__tensor *tensor);
/* Returns the elements of the longest contiguous run that ends with the innermost axis. */
int64_t dw__tensor_run(const dw__tensor *tensor);
/* Sets the strides of a contiguous row-major tensor. */
void dw__tensor_set_contiguous(dw__tensor *tensor);
/* Returns whether the last axis is contiguous and one stride leads from each row to the next. The rank is at least
 * 1. */
bool dw__tensor_row_stride(const dw__tensor *tensor, int64_t *stride);

/* ---- shapes and attributes of a graph with numbers in place of dims (sized_graph.c) ------------- */

/* `sizes` has one entry per symbol of the graph, in both functions. */

/* Returns a contiguous tensor with a value's type and its shape at `sizes`, without data. DW_SHAPE: it has
 * too many bytes. */
dw_status dw__value_tensor_at(const dw_graph *graph, dw_value value, const int64_t *sizes,
                              dw__tensor *tensor);
/* Returns a node's attributes with dims as numbers, in the form of dw__call: a copy in `arena`, or the graph's
 * own attributes if none of them has dims. */
dw_status dw__node_attrs_at(dw__arena *arena, const dw_graph *graph, dw_node node,
                            const int64_t *sizes, const dw_attr **attrs);

/* ---- groups of the CPU's kernels, each listed in the registry ------------------------------------ */
/* Each file under kernel/ exports one NULL-terminated list, in order of preference. */
extern const dw__kernel
    *const dw__kernels_cpu_matmul[]; /* matmul, linear, linear_cross_entropy and its backward */
extern const dw__kernel *const
    dw__kernels_cpu_groups[]; /* group_rows, segment_linear, segment_linear_backward_weight */
extern const dw__kernel *const dw__kernels_cpu_attention[];   /* attention, attention_backward */
extern const dw__kernel *const dw__kernels_cpu_elementwise[]; /* fused and every elementwise op */
extern const dw__kernel
    *const dw__kernels_cpu_norm[]; /* layer_norm, rms_norm and their backwards, softmax family */
extern const dw__kernel *const dw__kernels_cpu_data
    []; /* permute, slice, concat, pad, take, scatter_add, embedding, rope, reduce_*, spread_rows, combine_rows */
extern const dw__kernel *const dw__kernels_cpu_loss[];     /* cross_entropy and backward, adamw */
extern const dw__kernel *const dw__kernels_cpu_quantize[]; /* quantize */
extern const dw__kernel
    *const dw__kernels_cpu_fp8_block[]; /* quantize_tiles and multiply_codes of fp8-block */
extern const dw__kernel *const dw__kernels_reference[]; /* one for every operation */

#endif
