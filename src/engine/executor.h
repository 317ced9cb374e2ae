/* Executors: how a target runs the instructions of a plan.
 *
 *     begin       acquires the resources of a run besides the arena
 *     run_range   runs instructions [from, to) in order, or enqueues them; may be called several times
 *     end         releases those resources; on a GPU the work may still be under way
 *
 * An executor may keep memory in the plan from one run to the next (dw_plan.kept, under dw_plan.lock); `forget` frees
 * it with the plan. Runs of one plan may be under way on several threads, each with an arena of its own.
 */
#ifndef DW_EXECUTOR_H
#define DW_EXECUTOR_H

#include "engine/engine_internal.h"
#include <stdatomic.h>

/* The caller's buffers in one run. */
typedef struct dw__bindings {
    void *segments[DW_MOST_SEGMENTS]; /* of the arena; NULL once released */
    const dw_binding *leaves;         /* of the caller's graph */
    const dw_binding *output_grads;   /* NULL in forward */
    const dw_binding *outputs;
    const dw_binding *grads; /* NULL in forward */
    void *zeros;             /* stands for output gradients that are NULL */
    void *stream;            /* of a GPU */
} dw__bindings;

typedef struct dw__run {
    dw_plan *plan;
    const dw__bindings *bindings;
    void *state; /* the executor's own; NULL before begin */
} dw__run;

typedef struct dw__executor {
    const char *name;
    dw_status (*open)(dw_plan *plan); /* once per plan, when it is made; may be NULL */
    /* Zeros of `bytes`, which the plan keeps. NULL: made for each run. */
    dw_status (*zeros)(dw_plan *plan, size_t bytes, void **zeros);
    dw_status (*begin)(dw__run *run);
    /* The message of a failure names the node. Later instructions of the range are not run. */
    dw_status (*run_range)(dw__run *run, uint32_t from, uint32_t to);
    /* Safe if begin failed. Waits for nothing: on a GPU, `synchronize` reports failures of the work. */
    dw_status (*end)(dw__run *run);
    void (*forget)(dw_plan *plan);
    /* Waits for all work on a stream. Returns an error that only data can show (an index outside of its axis) in a run
     * since the last call. NULL: runs wait and return such errors by themselves. */
    dw_status (*synchronize)(dw_plan *plan, void *stream);
} dw__executor;

extern const dw__executor dw__executor_cpu; /* executor_cpu.c */
extern const dw__executor
    dw__executor_stream; /* executor_stream.c: enqueues each instruction on a stream */
extern const dw__executor dw__executor_graph; /* executor_graph.c: replays recorded CUDA graphs */

/* ---- executor_stream.c -------------------------------------------------------------------------- */

/* A plan's state on a GPU: the word of data errors (common/data_error.h) in the host's memory, and calls that no run
 * uses. */
typedef struct dw__gpu_kept {
    _Atomic unsigned *word;
    void *zeros; /* for output gradients that a run leaves out; NULL: no run has */
    size_t zeros_bytes;
    struct dw__gpu_call *idle;
    struct dw__gpu_record *records; /* executor_graph.c */
} dw__gpu_kept;

typedef struct dw__gpu_call {
    struct dw__gpu_call *next;
    dw__operation_call call;
    dw__call epilogue; /* of `call`, if its instruction has one */
} dw__gpu_call;

dw_status dw__gpu_open(dw_plan *plan);
dw_status dw__gpu_zeros(dw_plan *plan, size_t bytes, void **zeros);
dw_status dw__gpu_begin(dw__run *run);
dw_status dw__gpu_end(dw__run *run);
void dw__gpu_forget(dw_plan *plan);
dw_status dw__gpu_synchronize(dw_plan *plan, void *stream);
/* The word of data errors, for kernels that follow a run on its stream: not 0 if the run has found one. */
const unsigned *dw__gpu_data_error(const dw_plan *plan);
/* Enqueues instructions [from, to) on a stream. */
dw_status dw__gpu_enqueue_range(dw__run *run, uint32_t from, uint32_t to, void *stream);
/* The same on the run's stream, which nothing records, with an event between any two instructions. Waits for the work
 * before the range and for the range itself. */
dw_status dw__gpu_time_range(dw__run *run, uint32_t from, uint32_t to);

/* ---- bindings.c ------------------------------------------------------------------------------ */

/* Returns the storage's address in this run; NULL if the caller has not bound it. */
void *dw__storage_address(const dw_plan *plan, const dw__bindings *bindings, uint32_t storage);
/* Makes a call of the step, with all addresses. */
void dw__bind_step(const dw_plan *plan, const dw__bindings *bindings, const dw__step *step,
                   dw__call *call);
/* True if the caller has bound some result of the call. */
bool dw__wants_result(const dw__call *call);

#endif
