/* Who can compute attention on a GPU, who is taken, and how long it should take.
 *
 * Candidates are ours and the operators behind PyTorch's scaled_dot_product_attention: "deepwell", "cudnn", "flash",
 * "efficient", "math". Of those that can run the call the first in that order is taken, unless the first three, as far
 * as they can run it, have been measured on this GPU for this class of shapes, and another is faster than the first by
 * more than 3 % and more than three standard errors of the difference. A call with gradients is judged by forward and
 * backward together. Measurements are kept on disk, one file per GPU model (DEEPWELL_CACHE, see deepwell/jit.h), so
 * that they are made once and a later run decides the same. Which kernel a call names is of no matter here; CUTLASS's
 * is a candidate for compute capability 10.0, "cutlass", and never taken.
 */
#ifndef DEEPWELL_EXPLAIN_H
#define DEEPWELL_EXPLAIN_H

#include "deepwell/attention.h"
#include "deepwell/product.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What is written down for a call, no matter which addresses, as JSON:
 *   {"operation", "shape", "class", "target", "gpu": name or null, "gpu_error": why there is none,
 *    "chosen": name or null, "because", "flops", "bytes",
 *    "candidates": [{"name", "source", "runs", "reason": why not or null, "tolerance",
 *                    "expected_seconds": number or null, "expected_kind": "measured" (on the GPU that expected_from
 *                    names, at the nearest shape), "estimated" or null, "expected_from",
 *                    "measured_seconds": number or null}]}
 * "cutlass" has "proof" besides: where its kernel has been shown to be right, or null.
 * `target` NULL: the calling thread's GPU. "sm_90a", "sm_100a", "sm_103a": that architecture, whether there is one or
 * not; expected times are an H200's, for other architectures scaled by the data sheets' rates, and then "estimated".
 * Strides count, addresses do not; no memory is read and nothing is compiled. `json` is released with dw_text_free. */
DW_API dw_status dw_attention_explain(const dw_attention *call, bool backward, const char *target,
                                      char **json);

/* The same for a matrix product, whose candidates are "deepwell", "cublas" (PyTorch's) and "cutlass" (an optional
 * library, docs/cutlass.md). The first has members besides:
 * "proof", where it has been shown to be right, and "tile": null, or {"ctas", "tile_n", "stages", "tiles", "rounds",
 * "steps", "step_clocks", "least_seconds"}, counted and not measured. "chosen" is PyTorch's for numbers, and "deepwell"
 * for codes and block scales, which nobody else here is brought. */
DW_API dw_status dw_product_explain(const dw_product *call, const char *target, char **json);

/* Our GPU kernels, as JSON: [{"name", "operation", "source", "architectures", "elements", "needs", "proof", "use"}].
 * `json` is released with dw_text_free. */
DW_API dw_status dw_gpu_kernels(char **json);

/* The class of shapes that share a measurement: type, head dimension, ratio of heads, kind of mask, features, and
 * lengths and the number of heads in all rounded to powers of 2. Cut off at `bytes`. */
DW_API dw_status dw_attention_class(const dw_attention *call, bool backward, char *text,
                                    size_t bytes);
/* The same as a number: equal for calls of one class alone. 0: a call that has none. */
DW_API uint64_t dw_attention_class_number(const dw_attention *call, bool backward);

/* Who is to run a call on the calling thread's GPU, and why, as measurements have it that were made with `with` (NULL:
 * with anything). `gradients`: backward will follow. `name` lives as long as the library; `because` is cut off at
 * `bytes`. DW_NOT_FOUND: one that counts has not been measured so; DW_UNSUPPORTED: nobody takes the call, or there is
 * no GPU. */
DW_API dw_status dw_attention_choose(const dw_attention *call, bool gradients, const char *with,
                                     const char **name, char *because, size_t bytes);

/* Times that candidates took for a class on the calling thread's GPU model. */
typedef struct dw_tune_time {
    const char *name;    /* of the candidate */
    double seconds;      /* the median of several runs */
    double error;        /* its standard error in seconds; 0: not known */
    const char *failure; /* not NULL: why there is no time: it failed */
} dw_tune_time;
/* Writes down what was measured together. `with` says what these times hang on beside the GPU: versions. What another
 * process has written for the class with the same meanwhile stays, so that all who look it up behind this decide
 * alike. */
DW_API dw_status dw_tune_publish(const char *shape_class, const char *with,
                                 const dw_tune_time *times, size_t count);
/* One time; it replaces what was there, and is safe between processes. Looking up: DW_NOT_FOUND. */
DW_API dw_status dw_tune_record(const char *shape_class, const char *name, double seconds);
DW_API dw_status dw_tune_lookup(const char *shape_class, const char *name, double *seconds);

/* Times our kernels on the calling thread's GPU, with random tensors of the call's shape and layout [batch, heads,
 * rows, head_dim] in memory and on a stream of its own, and records it. Median of at least 10 runs. */
DW_API dw_status dw_attention_measure(const dw_attention *call, bool backward, double *seconds);

#ifdef __cplusplus
}
#endif
#endif
