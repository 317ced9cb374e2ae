/* Executors: how a target runs the instructions of a plan.
 *
 *     begin       takes what a run needs besides the arena
 *     run_range   runs instructions [from, to) in order; may be called several times
 *     end         waits for the work and gives back what begin took
 *
 * An executor may keep memory in the plan from one run to the next (dw_plan.kept, under dw_plan.lock); `forget` frees
 * it with the plan. Runs of one plan may be under way on several threads, each with an arena of its own.
 */
#ifndef DW_EXECUTOR_H
#define DW_EXECUTOR_H

#include "engine/engine_internal.h"

/* The caller's buffers in one run. */
typedef struct dw__bindings {
    char *arena;
    const dw_binding *leaves;       /* of the caller's graph */
    const dw_binding *output_grads; /* NULL in forward */
    const dw_binding *outputs;
    const dw_binding *grads; /* NULL in forward */
    void *zeros;             /* stands for output gradients that are NULL */
} dw__bindings;

typedef struct dw__run {
    dw_plan *plan;
    const dw__bindings *bindings;
    void *state; /* the executor's own; NULL before begin */
} dw__run;

typedef struct dw__executor {
    const char *name;
    dw_status (*begin)(dw__run *run);
    /* The message of a failure names the node. Later instructions of the range are not run. */
    dw_status (*run_range)(dw__run *run, uint32_t from, uint32_t to);
    /* Safe if begin failed. Returns the failure of work that run_range did not wait for. */
    dw_status (*end)(dw__run *run);
    void (*forget)(dw_plan *plan);
} dw__executor;

extern const dw__executor dw__executor_cpu;

/* ---- bindings.c ------------------------------------------------------------------------------ */

/* Returns the storage's address in this run; NULL if the caller has not bound it. */
void *dw__storage_address(const dw_plan *plan, const dw__bindings *bindings, uint32_t storage);
/* Makes a call of the step, with all addresses. */
void dw__bind_step(const dw_plan *plan, const dw__bindings *bindings, const dw__step *step,
                   dw__call *call);

#endif
