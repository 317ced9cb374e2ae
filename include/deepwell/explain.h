/* Which backends can compute attention or a GEMM on a GPU, which one is chosen, and how long each should take.
 *
 *     char *json;
 *     if (dw_attention_explain(&call, true, "sm_90a", &json) == DW_OK) puts(json);
 *     dw_text_free(json);
 *
 * The candidates for attention are Deepwell's kernels and the operators behind PyTorch's scaled_dot_product_attention,
 * in this order: "deepwell", "cudnn", "flash", "efficient", "math". The default is the first one that supports the
 * call. Once those of the first three that support it have been measured on this GPU for this class of shapes, a later
 * one replaces the default if it is faster by more than 3 % and by more than three standard errors of the difference. A
 * call with gradients is judged by forward and backward together. dw_attention_decide makes this decision, which the
 * Python package follows; dw_attention_explain reports it for any target.
 *
 * Measurements are kept on disk, one file per GPU model (DEEPWELL_CACHE, see deepwell/jit.h). They are made once, so
 * that later runs decide the same. The member `kernel` of a call is ignored here. "cutlass" is a candidate for compute
 * capability 10.0 but never the one that is chosen.
 */
#ifndef DEEPWELL_EXPLAIN_H
#define DEEPWELL_EXPLAIN_H

#include "deepwell/attention.h"
#include "deepwell/gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Explains one call as JSON:
 *   {"operation", "shape", "class", "target", "gpu": name or null, "gpu_error": why there is none,
 *    "chosen": name or null, "because", "flops", "bytes",
 *    "candidates": [{"name", "source", "runs", "reason": why not or null, "tolerance",
 *                    "expected_seconds": number or null, "expected_kind": "measured" (on the GPU that expected_from
 *                    names, at the nearest shape), "estimated" or null, "expected_from",
 *                    "measured_seconds": number or null}]}
 * "cutlass" also has "proof": where its kernel has been shown to be right, or null.
 * `target` NULL: the call's device. "sm_90a", "sm_100a", "sm_103a", "sm_120a": that architecture; it need not be
 * present.
 * Expected times come from an H200. For other architectures they are scaled by the data sheets' rates and "estimated".
 * The call's strides matter, its addresses do not. Reads no tensor and compiles nothing. DW_INVALID_ARGUMENT, DW_SHAPE,
 * DW_TYPE: the call is inconsistent, or the target is unknown (the message lists those known). DW_UNSUPPORTED: there is
 * no GPU, and `target` is NULL. Free *json with dw_text_free. */
DW_API dw_status dw_attention_explain(const dw_attention *call, bool backward, const char *target,
                                      char **json);

/* Explains one GEMM. Its candidates are "deepwell", "cublas" (PyTorch's) and "cutlass" (an optional library,
 * docs/cutlass.md). "deepwell" has two more members: "proof", where it has been shown to be right, and "tile": null, or
 * {"ctas", "tile_m", "tile_n", "stages", "tiles", "rounds", "steps", "step_clocks", "least_seconds"}, which are
 * computed, not measured. "chosen" is PyTorch's GEMM for floating-point operands, and "deepwell" for codes and block
 * scales, since no other candidate supports those. Fails as dw_attention_explain does. Free *json with dw_text_free. */
DW_API dw_status dw_gemm_explain(const dw_gemm *call, const char *target, char **json);

/* Lists Deepwell's GPU kernels as JSON: [{"name", "operation", "source", "architectures", "elements", "needs", "proof",
 * "use"}]. Free *json with dw_text_free. */
DW_API dw_status dw_gpu_kernels(char **json);

/* Lists the products of linear layers that Deepwell's sm90_gemm was measured to compute faster than cuBLASLt on the calling
 * thread's GPU, and therefore computes, as JSON: {"gpu": name or null if there is none, "faster": [{"m", "n", "k", "dtype",
 * "a_across", "b_across": whether an operand's rows run across k, "bias", "cublaslt_seconds", "deepwell_seconds"}]}.
 * Measurements by another version of Deepwell are left out. Free *json with dw_text_free. */
DW_API dw_status dw_gemm_measured(char **json);

/* Writes the class of shapes that share a measurement: dtype, head dimension, ratio of heads, kind of mask, features,
 * and the lengths and the total number of heads rounded to powers of 2. The text is truncated to `bytes`.
 * DW_INVALID_ARGUMENT, DW_SHAPE, DW_TYPE: the call is inconsistent. */
DW_API dw_status dw_attention_class(const dw_attention *call, bool backward, char *text,
                                    size_t bytes);
/* Returns the class as a number that is unique to it. 0: the call has no class. */
DW_API uint64_t dw_attention_class_number(const dw_attention *call, bool backward);

/* Returns whether a call may be run by another candidate that stores no scores. Such calls are measured. Deepwell
 * runs the others wherever its kernels support them: scaled_dot_product_attention has no packed sequences, no soft
 * cap, no window and no causal mask aligned at the end; times with dropout are not measured; and `deterministic`
 * asks for the same bits in every run. Takes nanoseconds and reads no pointer. */
DW_API bool dw_attention_has_alternative(const dw_attention *call);

/* The implementation that runs a call. */
typedef enum dw_attention_verdict {
    DW_ATTENTION_OURS, /* Deepwell's kernels */
    DW_ATTENTION_OTHERS, /* another candidate: Deepwell's kernels do not support the call, or it was measured faster */
    /* Deepwell's kernels, until all candidates that could be faster have been measured (dw_tune_publish). */
    DW_ATTENTION_UNMEASURED
} dw_attention_verdict;

typedef struct dw_attention_decision {
    size_t struct_size; /* sizeof(dw_attention_decision) */
    dw_attention_verdict verdict;
    /* The candidate that runs the call. Valid as long as the library is loaded. NULL: none supports it, or there is no
     * GPU. */
    const char *name;
    char because[512];  /* why this candidate */
    char refusal[1024]; /* why Deepwell's kernels cannot run the call; "": they can */
} dw_attention_decision;

/* Chooses the candidate that runs a call on its device. `gradients`: backward follows. The caller sets
 * decision->struct_size. If there is no alternative (dw_attention_has_alternative), Deepwell runs the calls that its
 * kernels support. Otherwise the decision uses the measurements that were published with the same `with` (see
 * dw_tune_publish); NULL: all of them. `prepare`: also compiles, loads and checks Deepwell's kernels, as
 * dw_attention_supported does; a failure there is a refusal. Without `prepare` nothing is compiled.
 * DW_INVALID_ARGUMENT, DW_SHAPE, DW_TYPE: the call is inconsistent. */
DW_API dw_status dw_attention_decide(const dw_attention *call, bool gradients, const char *with,
                                     bool prepare, dw_attention_decision *decision);

/* The time of one candidate for a class, on the calling thread's GPU model. */
typedef struct dw_tune_time {
    const char *name;    /* of the candidate */
    double seconds;      /* median of several runs */
    double error;        /* standard error in seconds; 0: not known */
    const char *failure; /* why the candidate failed and has no time; NULL: it ran */
} dw_tune_time;
/* Stores times that were measured together, for the calling thread's GPU. DW_UNSUPPORTED: there is none.
 * DW_INVALID_ARGUMENT: a time is not positive and has no failure, or an error is negative. DW_IO, DW_NOT_FOUND: the
 * folder cannot be written, or there is none. `with` names the software versions on which they depend. If another
 * process has stored times for the same class and `with` in the meantime, those are kept, so that all later lookups
 * return the same. */
DW_API dw_status dw_tune_publish(const char *shape_class, const char *with,
                                 const dw_tune_time *times, size_t count);
/* Stores one time and replaces an earlier one. Safe between processes. Fails as dw_tune_publish does. */
DW_API dw_status dw_tune_record(const char *shape_class, const char *name, double seconds);

/* Times Deepwell's kernels on the calling thread's GPU and stores the time: median of at least 10 runs. Uses its own
 * stream and its own random tensors of the call's shape, contiguous as [batch, heads, seq_len, head_dim].
 * DW_UNSUPPORTED: the call's device is not "cuda", or the kernels do not support the call. */
DW_API dw_status dw_attention_measure(const dw_attention *call, bool backward, double *seconds);

#ifdef __cplusplus
}
#endif
#endif
