/* CPU kernels, and the registry that lists them.
 *
 * A kernel computes one node. It receives concrete tensors (strided views of memory that the caller owns), the node's
 * attributes with numbers in place of dims, and scratch memory of the size that it asked for. It holds no state and
 * does not allocate while it runs; if a library behind it allocates, library_bytes says how much.
 *
 * For each operation the registry lists implementations best first; the reference (expansion into primitives, evaluated
 * one by one) is last and supports every call. The first kernel that supports the call is selected. supports() looks at
 * dtypes, shapes and strides, never at data.
 */
#ifndef DW_KERNEL_H
#define DW_KERNEL_H

#include "base/base.h"
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

typedef struct dw__call {
    dw_op op;
    uint32_t attr_count;
    const dw_attr *attrs; /* sorted by key; DIMS lists hold numbers */
    uint32_t input_count, output_count;
    dw__tensor inputs[DW_MAX_INPUTS]; /* rank -1: absent */
    dw__tensor
        /* Contiguous, unless the kernel has strided_results. An output that nobody reads has data NULL and need not be
         * computed. */
        outputs[DW_MAX_OUTPUTS];
    const void *prepared; /* the result of prepare(), or NULL */
} dw__call;

typedef struct dw__kernel {
    const char *name; /* "cpu.attention.tiled" */
    dw_op op;
    const char *source; /* "ours, portable C", "oneDNN 2.6 sgemm", ... */
    bool (*supports)(const dw__call *call);
    /* Returns the scratch that the call needs, by the arithmetic that run() uses; may be NULL for none. */
    size_t (*workspace_bytes)(const dw__call *call);
    /* Returns the most bytes that libraries allocate by themselves during the call, on all threads together; may be
     * NULL for none. They are not part of the scratch; predictions of memory use them. */
    size_t (*library_bytes)(const dw__call *call);
    /* Optional: parses the attributes once (a fused body); the result is released with dw__free. It may depend on
     * attributes and element types only, because calls that agree in those share it. */
    dw_status (*prepare)(const dw__call *call, void **prepared);
    dw_status (*run)(const dw__call *call, void *scratch);
    /* Tolerance against the reference in FP64, relative to the largest magnitude of the result, at
     * reduction length n: bound = factor * sqrt(n) * 2^-24 for F32. */
    double tolerance_factor;
    /* Results may have any strides, so that a plan can choose the layout that later operations read. Kernels without
     * this flag write contiguous results. */
    bool strided_results;
} dw__kernel;

/* Computes a call and the elementwise program that reads its result in one pass: `program` is a
 * prepared call whose input `replaced` is that result. The result itself is stored only if
 * call->outputs[0] has data. Members as in dw__kernel. */
typedef struct dw__epilogue_kernel {
    const char *name;
    dw_op op; /* of the call */
    bool (*supports)(const dw__call *call, const dw__call *program, int replaced);
    size_t (*workspace_bytes)(const dw__call *call, const dw__call *program, int replaced);
    size_t (*library_bytes)(const dw__call *call);
    dw_status (*run)(const dw__call *call, const dw__call *program, int replaced, void *scratch);
} dw__epilogue_kernel;

/* Returns the candidates for `op` on the CPU, best first, reference last, NULL-terminated. */
const dw__kernel *const *dw__kernel_candidates(dw_op op);
/* Returns the first candidate that supports the call. Never NULL for a valid call. */
const dw__kernel *dw__kernel_select(const dw__call *call);
bool dw__kernel_is_reference(const dw__kernel *kernel);
/* Returns whether some candidate for `op` has strided_results. */
bool dw__kernel_lays_out_results(dw_op op);
/* Returns the kernel that computes `op` and a program behind it, or NULL. */
const dw__epilogue_kernel *dw__kernel_with_epilogue(dw_op op);
/* Returns the kernel that adds the result of `op` to the contents of its output, or NULL. It is not a candidate,
 * because only a plan knows that the output has contents. */
const dw__kernel *dw__kernel_accumulating(dw_op op);
/* Returns the operation that copies a tensor of `rank` axes between any two layouts, and its attribute. */
dw_op dw__kernel_copy_op(int rank, dw_attr *attr);

/* ---- helpers for kernels ----------------------------------------------------------------------- */

const dw_attr *dw__call_attr(const dw__call *call, dw_attr_key key);
int64_t dw__call_int(const dw__call *call, dw_attr_key key, int64_t absent);
double dw__call_float(const dw__call *call, dw_attr_key key, double absent);
int64_t dw__tensor_count(const dw__tensor *tensor);
/* Bytes of a contiguous tensor of this type and shape, which lowering has found to have fewer than 2^61. */
size_t dw__tensor_bytes(const dw__tensor *tensor);
bool dw__tensor_is_contiguous(const dw__tensor *tensor);
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

/* ---- groups of kernels, each listed in the registry -------------------------------------------- */
/* Each file under kernel/ exports one NULL-terminated list, in order of preference. */
extern const dw__kernel
    *const dw__kernels_cpu_matmul[]; /* matmul, linear, linear_cross_entropy and its backward */
extern const dw__kernel
    *const dw__kernels_cpu_grouped[]; /* grouped_linear, grouped_linear_backward_weight */
extern const dw__kernel *const dw__kernels_cpu_attention[];   /* attention, attention_backward */
extern const dw__kernel *const dw__kernels_cpu_elementwise[]; /* fused and every elementwise op */
extern const dw__kernel
    *const dw__kernels_cpu_norm[]; /* layer_norm, rms_norm and their backwards, softmax family */
extern const dw__kernel *const dw__kernels_cpu_data
    []; /* permute, slice, concat, pad, take, scatter_add, embedding, rope, reduce_* */
extern const dw__kernel *const dw__kernels_cpu_loss[];     /* cross_entropy and backward, adamw */
extern const dw__kernel *const dw__kernels_cpu_quantize[]; /* quantize */
extern const dw__kernel *const dw__kernels_reference[];    /* one for every operation */
/* These are looked up by operation, not selected. */
extern const dw__epilogue_kernel *const dw__kernels_cpu_epilogue[]; /* matmul, linear */
extern const dw__kernel *const dw__kernels_cpu_accumulating[];      /* embedding_backward */

#endif
