/* The engine: plans the kernels and memory of a graph and its gradients, and runs them forward and backward.
 *
 *     dw_engine *engine;
 *     dw_plan *plan;
 *     dw_engine_create(graph, 1, (uint32_t[]){0}, 1, &weight, NULL, &engine); // once per graph and set of gradients
 *     dw_engine_plan(engine, (int64_t[]){batch, seq_len}, &plan);             // milliseconds; cached
 *     void *arena = aligned_alloc(64, dw_plan_arena_bytes(plan));             // owned by the caller
 *     dw_plan_forward(plan, arena, leaves, outputs, NULL);
 *     dw_plan_backward(plan, arena, leaves, outputs, output_grads, grads, NULL); // once: overwrites what forward saved
 *     dw_plan_release(plan);
 *     dw_engine_destroy(engine);
 *
 * The arena must not change between forward and backward. To run backward more than once, copy its saved part (the
 * first dw_plan_saved_bytes) before and restore it. An arena may consist of segments that are released while backward
 * runs (dw_plan_segment). What depends on parameters alone may be computed once for several runs (dw_plan_keep). Several
 * threads may use an engine and its plans at a time, each
 * with its own arena. Outputs and gradients are contiguous memory of the caller, never part of the arena.
 */
#ifndef DEEPWELL_ENGINE_H
#define DEEPWELL_ENGINE_H

#include "deepwell/device.h"
#include "deepwell/precision.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dw_engine dw_engine;
typedef struct dw_plan dw_plan;

typedef struct dw_engine_options {
    size_t struct_size; /* sizeof(dw_engine_options) */
    int recompute;      /* 1: elementwise results and norms are recomputed in backward, not saved */
    int fuse;           /* 1: elementwise chains are fused */
    /* Which linear layers multiply quantized operands; NULL: none. Read by dw_engine_create only. `struct_size` may end
     * before this member, which means NULL. */
    const dw_precision_policy *precision;
    /* Where plans run; NULL: the CPU. On "cuda", the GPU of the context that is current when dw_engine_plan is
     * called. */
    const dw_device *device;
    /* 1: on a GPU, runs are recorded and replayed as CUDA graphs. Graphs for the last few sets of addresses are kept; a
     * run that binds others is recorded again. If the caller's stream records a CUDA graph, the run becomes part of
     * it. */
    int cuda_graphs;
    /* The most segments of a plan's arena that are released, from 1 to 15; other values become the nearest of these. 3
     * and more are for callers that release segments (dw_plan_segment); 2 is as 1, because each release needs two. */
    int arena_segments;
    /* The bytes of gradients, at least, that a part of backward completes (dw_plan_part_count); 0: 8 MiB. Each part is
     * a launch for the host, and its gradients exist together. */
    size_t part_bytes;
    /* 1: quantized values and matrix products that forward and backward compute from leaves of DW_ROLE_PARAMETER alone,
     * such as the codes of weights, are left to dw_plan_keep, which a caller runs once for all runs with the same
     * parameters. It takes memory of its own: the last segment of each plan. `struct_size` may end
     * before this member, which means 0. */
    int keep_values;
} dw_engine_options;
#define DW_ENGINE_OPTIONS_DEFAULT                                                                  \
    { sizeof(dw_engine_options), 1, 1, NULL, NULL, 0, 1, 0, 0 }
enum { DW_MOST_SEGMENTS = 16 }; /* 15 that are released, and one of kept values */

/* `graph` holds the forward pass only and is not changed; the engine keeps a copy. `grad_outputs`: indices of the
 * outputs that receive gradients. `wrt`: leaves whose gradients are wanted. Both may be empty (inference). `options`
 * NULL: the defaults. DW_INVALID_ARGUMENT: an index is out of range, a value of wrt is not a leaf, or an option is not
 * valid. DW_UNSUPPORTED names a node that has no gradient. */
DW_API dw_status dw_engine_create(const dw_graph *graph, uint32_t grad_output_count,
                                  const uint32_t *grad_outputs, uint32_t wrt_count,
                                  const dw_value *wrt, const dw_engine_options *options,
                                  dw_engine **engine);
DW_API void dw_engine_destroy(dw_engine *engine); /* and its plans */
/* Returns 1 if the gradient of wrt[index] exists, 0 if no output with a gradient depends on it. */
DW_API int dw_engine_has_grad(const dw_engine *engine, uint32_t index);
/* Returns 1 if dw_plan_backward reads leaf or output `index` of the given graph. It must then be unchanged since
 * forward. If 0, the binding's data may be NULL at backward. */
DW_API int dw_engine_backward_reads_leaf(const dw_engine *engine, uint32_t index);
DW_API int dw_engine_backward_reads_output(const dw_engine *engine, uint32_t index);
/* Returns 1 if kept values (dw_plan_keep) depend on leaf `index` of the given graph. */
DW_API int dw_engine_kept_values_read_leaf(const dw_engine *engine, uint32_t index);
/* Number of linear layers that multiply quantized operands, by the options' policy. */
DW_API uint32_t dw_engine_quantized_count(const dw_engine *engine);
/* Counts the products, forward and backward, of operands with scales of blocks: those that the device multiplies as
 * codes on tensor cores, and those that it simulates, which multiply the same values in BF16. On a CPU both are 0.
 * Returns why the first of these is simulated; "" if there is none, or the device has no tensor cores for it. The
 * engine owns the text. */
DW_API const char *dw_engine_code_products(const dw_engine *engine, uint32_t *multiplied,
                                           uint32_t *simulated);
/* The whole graph after passes, forward and backward. It belongs to the engine. */
DW_API const dw_graph *dw_engine_graph(const dw_engine *engine);

/* `sizes`: one per symbol of the graph. The plan has scratch for dw_get_threads() threads; running it with more fails
 * with DW_STATE, so do not raise their number between forward and backward. The plan belongs to the engine, which
 * caches 32 plans and evicts the least recently used. A plan in use is not evicted; dw_plan_release ends its use.
 * DW_INVALID_ARGUMENT: a size is negative. DW_SHAPE: a dim is negative or too large at these sizes. */
DW_API dw_status dw_engine_plan(dw_engine *engine, const int64_t *sizes, dw_plan **plan);
DW_API void dw_plan_release(dw_plan *plan);

typedef struct dw_plan_options {
    size_t struct_size; /* sizeof(dw_plan_options) */
    /* 1: on a GPU, products of F32 operands round these to TF32 (10 bits behind the point, F32's range; sums in F32),
     * which tensor cores multiply many times faster than FMA units multiply F32. Other targets ignore it. */
    int tf32;
} dw_plan_options;
#define DW_PLAN_OPTIONS_DEFAULT                                                                    \
    { sizeof(dw_plan_options), 0 }
/* dw_engine_plan with options; NULL: the defaults. Plans with other options are other plans. */
DW_API dw_status dw_engine_plan_with(dw_engine *engine, const int64_t *sizes,
                                     const dw_plan_options *options, dw_plan **plan);

DW_API size_t dw_plan_arena_bytes(const dw_plan *plan);
DW_API size_t dw_plan_saved_bytes(const dw_plan *plan);

/* The bytes of the values that dw_plan_keep computes, which lie in the last segment; 0: nothing is kept. */
DW_API size_t dw_plan_kept_bytes(const dw_plan *plan);
/* A number for which values are kept and where they lie in their segment. Plans of one engine with the same number may
 * use one segment of kept values, whichever of them has computed it. */
DW_API uint64_t dw_plan_kept_layout(const dw_plan *plan);

/* A segment of the arena: memory that may be released before backward has ended, so that gradients can take its place.
 * Segment 0 lasts until the last part of backward; later segments are released earlier. Behind these there may be
 * segments that begin late, with a part of backward for which others have been released, and are released after that
 * part or a later one. A plan has as many, up to dw_engine_options.arena_segments, as lower the peak of segments and gradients by
 * a sixteenth of the arena or more; most plans have one. Calls that take an arena use one block in which the segments
 * lie one after another. */
typedef struct dw_segment {
    size_t offset;       /* in one block; a multiple of the arena's alignment */
    size_t bytes;        /* 0: its memory may be NULL */
    size_t saved_bytes;  /* its first bytes, which hold all that backward reads from forward */
    uint32_t part;       /* the last part of backward that uses it */
    uint32_t first_part; /* the first part that uses it; 0: forward needs it */
    int kept; /* 1: holds the values of dw_plan_keep, which runs read and do not change; the last segment */
} dw_segment;
DW_API uint32_t dw_plan_segment_count(const dw_plan *plan); /* at least 1 */
/* Zeros if there is no segment `index`. */
DW_API dw_segment dw_plan_segment(const dw_plan *plan, uint32_t index);
DW_API uint32_t dw_plan_output_count(const dw_plan *plan);
/* Writes the shape of output `index` at these sizes and returns its rank. */
DW_API int dw_plan_output_shape(const dw_plan *plan, uint32_t index, int64_t shape[DW_MAX_RANK]);
DW_API dw_dtype dw_plan_output_dtype(const dw_plan *plan, uint32_t index);
/* One line per instruction: kernel, shapes, bytes, offset. Free *text with dw_text_free. */
DW_API dw_status dw_plan_describe(const dw_plan *plan, char **text);
/* The plan's instructions as a JSON array of objects, in the order in which they run:
 *     phase ("forward" or "backward"), part (of backward; 0 in forward), op, name (of its first result), kernel,
 *     source, module, layer, region         where the graph has them, otherwise null
 *     scheme                        how the operands of a matmul are quantized ("mxfp8"), otherwise null
 *     inputs, outputs               lists of {"dtype", "shape"}; results that nothing stores are left out
 *     epilogue                      {"op", "kernel"} of the elementwise program in the same instruction, or null
 *     flops, bytes                  of the operation; of the operands that the instruction reads and writes
 *     seconds, seconds_from         the cost model's time and its origin, null where the kernel has no cost model
 * Free *json with dw_text_free. */
DW_API dw_status dw_plan_operations(const dw_plan *plan, char **json);

/* Times each instruction of the plan's runs from now on and forgets earlier times (`on` 1), or no longer (0; the times
 * stay), unless the environment has DEEPWELL_PROFILE. On a CPU by the clock around each instruction. On a GPU by events
 * between instructions: such a run replays no recorded graph, and waits before its first instruction and after its
 * last. A kernel that is shorter than its launch takes the host then counts as long as the launch. Runs that the
 * caller's stream records are not timed. */
DW_API void dw_plan_profile(dw_plan *plan, int on);
/* Calls `watcher` in front of each instruction of a timed run (`begins` 1) and behind it (0), in the thread that runs
 * the plan. On a GPU, the kernels have then been enqueued, not run. A profiler that records ranges can so assign
 * kernels to instructions. `watcher` NULL: stops the calls. While a run of the plan is in progress, the calls may be
 * stopped, and started again with the context that they have had; one that has begun may still return after that. */
typedef void (*dw_instruction_watcher)(void *context, uint32_t instruction, int begins);
DW_API void dw_plan_watch(dw_plan *plan, dw_instruction_watcher watcher, void *context);
typedef struct dw_instruction_time {
    uint64_t runs;  /* 0: not timed, or the caller left out all that the instruction writes */
    double seconds; /* of all runs together */
    double start;   /* of the last run: seconds of the monotonic clock */
} dw_instruction_time;
/* Writes the times of the first `capacity` instructions and returns the number of all. */
DW_API uint32_t dw_plan_times(const dw_plan *plan, uint32_t capacity, dw_instruction_time *times);

/* One instruction of a plan by itself, on operands of its own: floating-point numbers between -1 and 1 (magnitudes from
 * 0 on), indices that lie in every axis, true. For measurements of a kernel; a result may overwrite an operand, as in
 * the plan. dw_instruction_create allocates the operands on the plan's device. The plan must outlive the instruction.
 * DW_NOT_FOUND: there is no such instruction. DW_UNSUPPORTED: the plan is for a device that is not here. */
typedef struct dw_instruction dw_instruction;
DW_API dw_status dw_instruction_create(dw_plan *plan, uint32_t index, dw_instruction **instruction);
/* On a GPU the kernel is enqueued on `stream` (NULL: the legacy default stream). Elsewhere the call returns when it is
 * done. Fails as dw_plan_forward does. One thread at a time. */
DW_API dw_status dw_instruction_run(dw_instruction *instruction, void *stream);
/* The instruction may be NULL. On a GPU its work must be done. */
DW_API void dw_instruction_destroy(dw_instruction *instruction);

/* A caller's tensor bound to a leaf or an output. */
typedef struct dw_binding {
    void *data;
    /* One stride per axis, in elements (leaves only). NULL: contiguous. */
    const int64_t *strides;
} dw_binding;

/* leaves: one per leaf of the graph given to dw_engine_create, in its order. outputs: one per output of that graph; two
 * outputs with the same value still have two buffers. `arena`: dw_plan_arena_bytes, 64-byte aligned.
 *
 * On a GPU all memory is the device's: the arena aligned to 256 bytes, tensors of more than one element to 16. The work
 * is enqueued on `stream` (CUstream; NULL: the legacy default stream), and the call returns before it is done.
 * Elsewhere `stream` is not read. If the caller captures these calls in a CUDA graph, the graph holds addresses of the
 * plan, so the plan must be released after the graph.
 *
 * DW_INVALID_ARGUMENT: a binding that is needed is NULL or has strides that its kernels do not support; the arena is
 * NULL or misaligned; or, on a GPU, a tensor is misaligned. DW_INDEX: an index in a tensor is out of range; the message
 * names it (for a GPU, dw_plan_synchronize reports this). DW_STATE: there are more threads than the plan has scratch
 * for. DW_DEVICE: a GPU failed. */
DW_API dw_status dw_plan_forward(dw_plan *plan, void *arena, const dw_binding *leaves,
                                 const dw_binding *outputs, void *stream);
/* Computes the values that depend on parameters alone (dw_engine_options.keep_values) into the last segment. Call it
 * before the first forward, and before any forward whose parameters have changed since, by whatever means: forward and
 * backward read what they find there. A backward reads the values of its forward, so they must not be computed again
 * between the two. It may use the other segments, as forward does. If nothing is kept it returns DW_OK at once. Fails as
 * dw_plan_forward does. */
DW_API dw_status dw_plan_keep(dw_plan *plan, void *arena, const dw_binding *leaves, void *stream);
/* output_grads: one per grad_outputs entry; data NULL means zero. outputs: as forward wrote them, unchanged, because
 * backward may read them. grads: one per wrt; data is NULL if not wanted or if dw_engine_has_grad is 0. Fails as
 * dw_plan_forward does, and with DW_STATE if the engine was created without gradients. */
DW_API dw_status dw_plan_backward(dw_plan *plan, void *arena, const dw_binding *leaves,
                                  const dw_binding *outputs, const dw_binding *output_grads,
                                  const dw_binding *grads, void *stream);

/* Backward in parts, to be run in order from part 0. Each part completes some gradients, which the caller may use at
 * once (for example, reduce over GPUs). dw_plan_backward runs all parts. */
DW_API uint32_t dw_plan_part_count(const dw_plan *plan);
/* The gradient of wrt[index] is written from part *first on and complete after part *last. Its binding must be the same
 * in these parts and may be NULL in the others. */
DW_API void dw_plan_grad_parts(const dw_plan *plan, uint32_t index, uint32_t *first,
                               uint32_t *last);
/* The last part that reads output `index`. Its binding may be NULL in later parts. */
DW_API uint32_t dw_plan_output_part(const dw_plan *plan, uint32_t index);
/* The last part that reads leaf `index`. After it the leaf may be changed (for example, updated), and its binding may
 * be NULL. */
DW_API uint32_t dw_plan_leaf_part(const dw_plan *plan, uint32_t index);
/* The other arguments are those of dw_plan_backward, the same for every part of one backward. Fails as
 * dw_plan_backward does, and with DW_INVALID_ARGUMENT if there is no such part. */
DW_API dw_status dw_plan_backward_part(dw_plan *plan, uint32_t part, void *arena,
                                       const dw_binding *leaves, const dw_binding *outputs,
                                       const dw_binding *output_grads, const dw_binding *grads,
                                       void *stream);

/* Forward, a part of backward, and dw_plan_keep, with memory for each segment of the arena: dw_plan_segment_count
 * pointers, aligned as an arena is. Those of dw_segment.first_part 0 are needed in forward, the others may be NULL before
 * that part. After the part dw_segment.part a segment's memory may be released or used
 * otherwise (on a GPU by later work of the stream), and its pointer may be NULL. Fail as the calls with an arena do. */
DW_API dw_status dw_plan_forward_segments(dw_plan *plan, void *const *segments,
                                          const dw_binding *leaves, const dw_binding *outputs,
                                          void *stream);
DW_API dw_status dw_plan_backward_part_segments(dw_plan *plan, uint32_t part, void *const *segments,
                                                const dw_binding *leaves, const dw_binding *outputs,
                                                const dw_binding *output_grads,
                                                const dw_binding *grads, void *stream);
DW_API dw_status dw_plan_keep_segments(dw_plan *plan, void *const *segments,
                                       const dw_binding *leaves, void *stream);
/* Waits for all work on the stream of a GPU. Reports errors that depend on data, from all runs of the plan since the
 * last call: DW_INDEX if an index lay outside of its axis, DW_INVALID_ARGUMENT for integers divided by zero. DW_DEVICE:
 * a kernel failed. On the CPU each run reports such errors itself, and this call returns DW_OK at once. */
DW_API dw_status dw_plan_synchronize(dw_plan *plan, void *stream);

/* One AdamW update (Loshchilov and Hutter 2019) of many F32 tensors at once, in place. */
typedef struct dw_adamw_tensor {
    float *param; /* updated in place, like the two averages */
    const float *grad;
    float *exp_avg;
    float *exp_avg_sq;
    int64_t count; /* elements */
} dw_adamw_tensor;
typedef struct dw_adamw_options {
    size_t struct_size; /* sizeof(dw_adamw_options) */
    double lr, beta1, beta2, eps, weight_decay;
    /* Gradients are multiplied by this first; no default: pass 1 for no scaling. */
    double grad_scale;
    int64_t step; /* from 1 */
    int maximize; /* 1: ascends the gradient */
} dw_adamw_options;
/* DW_INVALID_ARGUMENT: an option is out of range, or a tensor has a NULL pointer or a negative count. */
DW_API dw_status dw_adamw_step(const dw_adamw_tensor *tensors, uint32_t count,
                               const dw_adamw_options *options);

/* Describes the CPU engine of this process as a JSON object: isa, amx, threads, onednn (its version, or null),
 * onednn_isa (the instruction set that oneDNN uses, or null), onednn_memory_known (whether predictions of memory count
 * its buffers), kernels. Free *json with dw_text_free. */
DW_API dw_status dw_machine_describe(char **json);

#ifdef __cplusplus
}
#endif
#endif
