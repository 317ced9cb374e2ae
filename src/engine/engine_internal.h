/* Types and functions that the engine's files share.
 *
 *     engine.c            creates, destroys and describes engines
 *     engine_graph.c      passes, gradient, fusion
 *     target_composites.c composites that a GPU has no kernel for
 *     training_schedule.c, saved_values.c, repeated_nodes.c, backward_order.c, min_cut.c
 *                         what is saved and what is computed again; the order of backward
 *     kept_values.c       values that depend on parameters alone, and outlive a run
 *     graph_readers.c     readers of each value; values computed in the caller's buffers
 *     plan_cache.c        the plans of an engine
 *     target.c            where a plan runs
 *     lower*.c            nodes at concrete sizes become storages and instructions (lowering.h)
 *     views.c             strided views of a tensor
 *     plan.c              lifetimes of storages; plans are made and destroyed
 *     placement.c         places of intervals, which know nothing of plans
 *     parts.c             backward in parts
 *     segments.c          the arena's segments, and the places of storages in them
 *     plan_listing.c      a plan as text, and its instructions as JSON
 *     plan_times.c        the time of each instruction
 *     single_instruction.c an instruction by itself, on operands of its own
 *     run.c, bindings.c   checks of a run, and the addresses of storages
 *     executor_cpu.c      instructions on the CPU (executor.h)
 *     executor_stream.c   instructions on a stream of a GPU
 *     executor_graph.c    the same, recorded and replayed
 *     step_memory.c       what a training step holds around the arena
 *     step_fit.c          how much of a batch fits
 *
 * A value is a strided view of a storage. A storage is a piece of memory with one home: the arena, its
 * segment of kept values, a leaf, an output or a gradient of the caller. Views have no instruction, and a value that is
 * also an output lives in the caller's buffer, where later instructions read it.
 */
#ifndef DW_ENGINE_INTERNAL_H
#define DW_ENGINE_INTERNAL_H

#include "deepwell/engine.h"
#include "engine/placement.h"
#include "engine/target.h"
#include "graph/internal.h"
#include "kernel/kernel.h"
#include <pthread.h>
#include <stdatomic.h>

enum { DW_PLAN_CACHE = 32 };
enum { DW__MOST_PARTS = 17 }; /* of a plan's backward */

/* DW_READ_KEPT: by the nodes of dw_plan_keep */
enum { DW_READ_FORWARD = 1, DW_READ_BACKWARD = 2, DW_READ_KEPT = 4 };

struct dw_engine {
    dw_graph *graph; /* scheduled: nodes of dw_plan_keep, forward nodes, then backward nodes */
    /* Counts of the caller's graph. The scheduled graph has its leaves, then one per gradient of an
     * output; and its outputs, then the gradients that exist. */
    uint32_t leaf_count, output_count, grad_output_count, wrt_count;
    uint32_t *grad_slot;      /* by wrt: index of its output in the scheduled graph, or DW_NONE */
    uint32_t *wrt_of;         /* by output of the scheduled graph less output_count: its wrt */
    uint32_t *wrt_leaf;       /* by wrt: its position among the leaves */
    uint32_t kept_nodes;      /* the first nodes, which depend on parameters alone */
    uint32_t first_backward;  /* node */
    uint32_t quantized_count; /* linear layers that are quantized */
    dw__code_products products;
    const dw_device *device; /* of its plans; NULL: the CPU */
    bool cuda_graphs;
    uint32_t most_segments; /* of a plan's arena */
    size_t part_bytes;      /* of gradients, at least, that a part of backward completes */

    /* Readers of each value: nodes use_nodes[use_start[v] .. use_start[v + 1]). */
    uint32_t *use_start;
    dw_node *use_nodes;
    uint32_t *output_uses; /* by value: how often it is an output */
    /* By value: the output in whose buffer it may be computed, or DW_NONE. */
    uint32_t *direct;
    uint8_t *leaf_reads;   /* DW_READ_ flags by leaf */
    uint8_t *output_reads; /* DW_READ_BACKWARD where backward may read the caller's buffer */

    /* Results of kernels' parse(), shared by all steps and plans with the same attributes and types. */
    struct {
        void **items;
        size_t count, capacity;
    } prepared;
    dw__map *prepared_index; /* by kernel, attributes and types, as text */

    double (*profile_clock)(void); /* of the environment, for its plans; NULL: none */
    bool has_lock;
    pthread_mutex_t lock; /* of the plans' list and reference counts */
    dw_plan *plans;       /* most recently used first */
    uint32_t plan_count;
};

typedef enum dw__home {
    DW_HOME_ARENA,
    DW_HOME_LEAF,
    DW_HOME_OUTPUT,
    DW_HOME_GRAD,
    DW_HOME_KEPT
} dw__home;

typedef struct dw__storage {
    dw__home home;
    uint32_t index; /* of the leaf, the output, or the wrt */
    size_t bytes;
    size_t offset;        /* in the arena, whose segments lie one after another */
    uint32_t segment;     /* of the arena */
    uint32_t first, last; /* instructions; first > last: never used */
    bool saved;           /* written by forward, read by backward */
    bool fixed;           /* filled by nodes of dw_plan_keep: no other node may write it */
    /* For lowering: */
    uint32_t reads_left; /* reads by nodes that are not lowered yet, and uses as an output */
    uint32_t reads;      /* all reads and uses */
    dw_node deferred;    /* the node that will fill it and has no instruction yet, or DW_NONE */
} dw__storage;

/* A view of a storage. */
typedef struct dw__operand {
    uint32_t storage; /* DW_NONE: absent, or a result that nothing reads */
    int64_t offset;   /* of the first element, in elements */
    dw__tensor view;  /* rank -1: absent; data unused */
} dw__operand;

/* A kernel's call without pointers. */
typedef struct dw__step {
    const dw__kernel *kernel;
    const dw__variant *variant; /* of the kernel, on a GPU */
    dw_node node;               /* for messages */
    dw_op op;
    uint32_t attr_count, input_count, output_count;
    const dw_attr *attrs;
    dw__operand *inputs, *outputs;
    dw__accumulation accumulates; /* what is added to output 0 */
    dw__operand addend;           /* DW__ADDS_TO_ADDEND only */
    uint64_t disposable;          /* as in dw__call */
    dw__operand_sum sums; /* the operand whose sums are the last output, which is not the node's */
    uint64_t magnitudes;  /* as in dw__call; their vectors follow the node's own outputs */
    uint64_t summed;      /* the same */
    uint64_t codes;       /* as in dw__call */
    bool tf32;            /* as in dw__call */
    int replaced, replaced_half; /* of an epilogue, as in dw__call */
    bool paired;                 /* as in dw__call */
    const void *prepared;        /* parsed attributes, owned by the engine */
} dw__step;

typedef struct dw__instruction {
    dw__step step;
    dw__step *epilogue; /* computed by the step's kernel; NULL: none */
    uint32_t scratch;   /* storage, or DW_NONE */
    size_t library;     /* bytes that libraries allocate by themselves while it runs */
    bool optional;      /* writes only gradients: skipped if the caller left all of them out */
    /* While dw_plan.clock is set: number of runs, their nanoseconds, and the clock when the last of them began. */
    _Atomic uint64_t runs, nanoseconds, began;
} dw__instruction;

typedef double (*dw__clock)(void); /* seconds */

struct dw_plan {
    dw_engine *engine;
    dw_plan *newer, *older; /* in the engine's list */
    uint32_t references;
    int64_t *sizes;
    dw__target target;

    dw__arena *memory; /* operands and attributes */
    struct {
        dw__storage *items;
        size_t count, capacity;
    } storages;
    struct {
        dw__instruction *items;
        size_t count, capacity;
    } code;
    uint32_t kept_end;       /* instructions before it are those of dw_plan_keep */
    uint32_t first_backward; /* instruction */
    dw__tensor *leaves;      /* shapes, with contiguous strides */
    dw__tensor *outputs;     /* of the caller's graph */
    size_t arena_bytes, saved_bytes;
    dw_segment segments[DW_MOST_SEGMENTS]; /* one, or as many as are worth it */
    uint32_t segment_count;                /* with the one of kept values */
    size_t kept_bytes;
    uint64_t kept_layout;
    size_t bound_bytes;               /* no placement needs fewer bytes (rounded up) */
    uint32_t part_count;              /* of backward */
    uint32_t *part_ends;              /* instructions; the last is the end of the code */
    uint32_t *grad_first, *grad_last; /* parts, for each wrt; first UINT32_MAX: never written */
    uint32_t *output_last; /* for each output: the last part that reads it, 0 if none does */
    uint32_t *leaf_last;   /* the same for each leaf of the caller's graph */

    pthread_mutex_t lock; /* of `kept` */
    bool has_lock;
    void *kept;                              /* by the executor, from one run to the next */
    _Atomic(dw__clock) clock;                /* NULL: instructions are not timed */
    _Atomic(dw_instruction_watcher) watcher; /* of timed runs; NULL: none */
    _Atomic(void *) watcher_context;         /* written before `watcher` */
};

/* ---- engine_graph.c -------------------------------------------------------------------------- */

/* Fills engine->graph. The engine has its counts and room for wrt_leaf, wrt_of and grad_slot. */
dw_status dw__engine_build_graph(dw_engine *engine, const dw_graph *graph,
                                 const uint32_t *grad_outputs, const dw_value *wrt,
                                 const dw_engine_options *options);

/* ---- target_composites.c --------------------------------------------------------------------- */

/* Expands the composites that no kernel of the target computes, and what a CPU computes in BF16 or F16 by the reference
 * alone. `tried` is false if the graph has nothing to look at: on a CPU, no value in BF16 or F16. */
dw_status dw__expand_for_target(dw_graph **graph, const dw__target *target, bool *tried);
/* Replaces products of quantized values by products of codes where the target has kernels for these, and counts. With
 * `fast_accumulation` GEMMs of FP8 in forward may sum in fewer bits. */
dw_status dw__multiply_codes_for_target(dw_graph **graph, const dw__target *target,
                                        bool fast_accumulation, dw__code_products *products,
                                        bool *changed);

/* ---- graph_readers.c ------------------------------------------------------------------------- */

/* Lists the readers of each value, once for each operand, in order: (*readers)[(*starts)[value] .. (*starts)[value +
 * 1]). The caller releases both lists, also after an error. */
dw_status dw__index_readers(const dw_graph *graph, uint32_t **starts, dw_node **readers);
/* Fills first_backward, the readers of values, `direct` and the reads of leaves and outputs. */
dw_status dw__engine_index_graph(dw_engine *engine);

/* ---- parts.c --------------------------------------------------------------------------------- */

/* Cuts backward into parts. Call it when lifetimes are known. */
dw_status dw__plan_cut_backward(dw_plan *plan);
/* Returns the part of an instruction of backward, and 0 for one of forward. */
uint32_t dw__plan_part_of(const dw_plan *plan, uint32_t instruction);

/* ---- segments.c ------------------------------------------------------------------------------ */

/* Chooses the arena's segments and places all storages in them. Call it when backward is cut. */
dw_status dw__plan_place(dw_plan *plan);

/* ---- kept_values.c --------------------------------------------------------------------------- */

/* Gives the storages that instructions of dw_plan_keep fill for later ones their home. Call it when lifetimes are
 * known. */
dw_status dw__plan_find_kept(dw_plan *plan);
/* Appends the segment of these storages. Call it when the arena is placed. */
dw_status dw__plan_place_kept(dw_plan *plan);

/* ---- training_schedule.c --------------------------------------------------------------------- */

/* Replaces *graph by one with the forward nodes first and the backward nodes behind them, in an order
 * that keeps few bytes alive; each node's `backward` says where it runs. Nodes that none of the first
 * `forward_outputs` outputs needs run in backward. With `recompute`, cheap forward nodes are repeated
 * in backward if that saves memory. With `keep`, nodes that depend on parameters alone and are worth keeping come
 * first, with the nodes that they need; *kept_nodes is their number. */
dw_status dw__schedule(dw_graph **graph, uint32_t forward_outputs, bool recompute, bool keep,
                       uint32_t *kept_nodes);

/* ---- lower.c --------------------------------------------------------------------------------- */

/* Fills plan->storages, code, leaves and outputs. */
dw_status dw__lower(dw_plan *plan);

/* ---- plan.c ---------------------------------------------------------------------------------- */

dw_status dw__plan_create(dw_engine *engine, const dw__target *target, const int64_t *sizes,
                          dw_plan **plan);
void dw__plan_destroy(dw_plan *plan);

/* ---- lower_steps.c --------------------------------------------------------------------------- */

/* The step as a call without an epilogue, with every data NULL. */
void dw__step_shape(const dw__step *step, dw__call *call);

/* Makes the epilogue's call `made` that of `call`. */
void dw__step_attach(const dw__step *epilogue, const dw__call *made, dw__call *call);
/* True if input `i` of the epilogue is the product, a half of it or the paired one, which its kernel does not read from memory. */
static inline bool dw__step_replaces(const dw__step *epilogue, uint32_t i) {
    return (int)i == epilogue->replaced || (int)i == epilogue->replaced_half;
}

/* ---- single_instruction.c -------------------------------------------------------------------- */

/* The call of an instruction by itself, with its operands. */
const dw__call *dw__instruction_call(const dw_instruction *instruction);

/* ---- plan_times.c ---------------------------------------------------------------------------- */

static inline bool dw__plan_is_timed(const dw_plan *plan) {
    return atomic_load_explicit(&plan->clock, memory_order_relaxed) != NULL;
}
/* Calls the watcher of a timed run, if there is one. */
static inline void dw__instruction_watched(const dw_plan *plan, uint32_t index, int begins) {
    const dw_instruction_watcher watcher = atomic_load(&plan->watcher);
    if (watcher) watcher(atomic_load(&plan->watcher_context), index, begins);
}
/* Counts a run of the instruction that began at `start` and took `seconds`. */
void dw__instruction_ran(dw__instruction *instruction, double start, double seconds);

/* ---- plan_listing.c -------------------------------------------------------------------------- */

/* "linear %12 (h.0.mlp)" */
void dw__node_label(const dw_graph *graph, dw_node node, char *buffer, size_t bytes);

#endif
