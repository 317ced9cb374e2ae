/* The engine: a graph, its gradients and kernels bound, buffers placed; run forward and backward.
 *
 *     dw_engine_create   passes, gradient, fusion: once per graph and set of wanted gradients
 *     dw_engine_plan     shapes, views, kernels, placement at given symbol sizes: milliseconds, cached
 *     dw_plan_forward    runs in an arena of dw_plan_arena_bytes, which the caller owns
 *     dw_plan_backward   on the same arena, once (it overwrites what forward saved as it goes)
 *
 * Between forward and backward the arena must not be touched. Its saved part (the first
 * dw_plan_saved_bytes) may be copied to run backward more than once. An engine and its plans may be
 * used by several threads at a time, each with its own arena. Outputs and gradients are the caller's
 * memory, contiguous, never part of the arena.
 */
#ifndef DEEPWELL_ENGINE_H
#define DEEPWELL_ENGINE_H

#include "deepwell/precision.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dw_engine dw_engine;
typedef struct dw_plan dw_plan;

typedef struct dw_engine_options {
    size_t struct_size; /* sizeof(dw_engine_options) */
    int recompute;      /* 1: elementwise results and norms are recomputed in backward, not saved */
    int fuse;           /* 1 */
    /* Which linear layers multiply quantized operands; NULL: none. Read while the engine is made. */
    const dw_precision_policy *precision;
} dw_engine_options;
#define DW_ENGINE_OPTIONS_DEFAULT                                                                  \
    { sizeof(dw_engine_options), 1, 1, NULL }

/* `graph` holds the forward pass only and is not changed. `grad_outputs`: indices of the outputs that
 * will receive gradients; `wrt`: leaves whose gradients are wanted (both may be empty: inference).
 * options NULL: defaults. */
DW_API dw_status dw_engine_create(const dw_graph *graph, uint32_t grad_output_count,
                                  const uint32_t *grad_outputs, uint32_t wrt_count,
                                  const dw_value *wrt, const dw_engine_options *options,
                                  dw_engine **engine);
DW_API void dw_engine_destroy(dw_engine *engine); /* and its plans */
/* 1 when the gradient of wrt[index] exists, 0 when no wanted output depends on it. */
DW_API int dw_engine_has_grad(const dw_engine *engine, uint32_t index);
/* 1 when dw_plan_backward reads leaf or output `index` of the given graph: it must then be unchanged since
 * forward. Where it is 0 the binding's data may be NULL at backward. */
DW_API int dw_engine_backward_reads_leaf(const dw_engine *engine, uint32_t index);
DW_API int dw_engine_backward_reads_output(const dw_engine *engine, uint32_t index);
/* Linear layers that multiply quantized operands, by the options' policy. */
DW_API uint32_t dw_engine_quantized_count(const dw_engine *engine);
/* The whole graph after passes, forward and backward. */
DW_API const dw_graph *dw_engine_graph(const dw_engine *engine);

/* `sizes`: one per symbol of the graph. The plan has room for as many threads as dw_get_threads says
 * now: run with more, it fails with DW_STATE (do not change their number between forward and
 * backward). The plan belongs to the engine (an LRU of 32; a plan in use is not evicted:
 * dw_plan_release gives it back). */
DW_API dw_status dw_engine_plan(dw_engine *engine, const int64_t *sizes, dw_plan **plan);
DW_API void dw_plan_release(dw_plan *plan);

DW_API size_t dw_plan_arena_bytes(const dw_plan *plan);
DW_API size_t dw_plan_saved_bytes(const dw_plan *plan);
DW_API uint32_t dw_plan_output_count(const dw_plan *plan);
/* Concrete shape of output `index`; returns the rank. */
DW_API int dw_plan_output_shape(const dw_plan *plan, uint32_t index, int64_t shape[DW_MAX_RANK]);
DW_API dw_dtype dw_plan_output_dtype(const dw_plan *plan, uint32_t index);
/* One line per instruction: kernel, shapes, bytes, offset. Released with dw_text_free. */
DW_API dw_status dw_plan_describe(const dw_plan *plan, char **text);

/* A caller's tensor bound to a leaf or an output. */
typedef struct dw_binding {
    void *data;
    /* NULL: contiguous. Else one stride per axis in elements (leaves only). */
    const int64_t *strides;
} dw_binding;

/* leaves: one per leaf of the graph given to dw_engine_create, in its order. outputs: one per output of
 * that graph (two outputs that are one value still get two buffers). `arena` is 64-byte aligned. */
DW_API dw_status dw_plan_forward(dw_plan *plan, void *arena, const dw_binding *leaves,
                                 const dw_binding *outputs);
/* output_grads: one per grad_outputs entry; data NULL means zero. outputs: what forward wrote, unchanged
 * (backward may read them). grads: one per wrt; data NULL where not wanted or dw_engine_has_grad is 0. */
DW_API dw_status dw_plan_backward(dw_plan *plan, void *arena, const dw_binding *leaves,
                                  const dw_binding *outputs, const dw_binding *output_grads,
                                  const dw_binding *grads);

/* Backward in parts, to be run in order from part 0: each completes some of the gradients, which the caller
 * may then hand on. dw_plan_backward is all parts at once. */
DW_API uint32_t dw_plan_part_count(const dw_plan *plan);
/* The gradient of wrt[index] is written from part *first on and complete after part *last: its binding must
 * be the same in all of these, and may be NULL in all others. */
DW_API void dw_plan_grad_parts(const dw_plan *plan, uint32_t index, uint32_t *first,
                               uint32_t *last);
/* The last part that reads output `index`: in later ones its binding may be NULL. */
DW_API uint32_t dw_plan_output_part(const dw_plan *plan, uint32_t index);
/* The last part that reads leaf `index`: once it has run, the leaf may be changed (updated, say). */
DW_API uint32_t dw_plan_leaf_part(const dw_plan *plan, uint32_t index);
/* The other arguments as for dw_plan_backward, the same for every part of one backward. */
DW_API dw_status dw_plan_backward_part(dw_plan *plan, uint32_t part, void *arena,
                                       const dw_binding *leaves, const dw_binding *outputs,
                                       const dw_binding *output_grads, const dw_binding *grads);

/* One AdamW update (Loshchilov and Hutter 2019) of many F32 tensors at once, in place. */
typedef struct dw_adamw_tensor {
    float *param;
    const float *grad;
    float *exp_avg;
    float *exp_avg_sq;
    int64_t count;
} dw_adamw_tensor;
typedef struct dw_adamw_options {
    size_t struct_size;
    double lr, beta1, beta2, eps, weight_decay;
    double grad_scale; /* gradients are multiplied by this first; 1 for none */
    int64_t step;      /* from 1 */
    int maximize;
} dw_adamw_options;
DW_API dw_status dw_adamw_step(const dw_adamw_tensor *tensors, uint32_t count,
                               const dw_adamw_options *options);

/* Describes what runs here as a JSON object: isa, amx, threads, onednn (its version, or null), onednn_isa (the
 * instruction set that oneDNN takes, or null), onednn_memory_known (whether predictions of memory count its buffers),
 * kernels. Release it with dw_text_free. */
DW_API dw_status dw_machine_describe(char **json);

#ifdef __cplusplus
}
#endif
#endif
