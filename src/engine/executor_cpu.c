/* The CPU's executor: one instruction after the other on the calling thread, which shares each kernel's tasks with the
 * pool. It never uses more threads than the plan has scratch for, whatever other callers of the pool set meanwhile.
 */
#include "base/pool.h"
#include "engine/executor.h"

/* Working memory of one run. The plan keeps it for the next one. */
typedef struct cpu_state {
    struct cpu_state *next;
    int limit; /* the pool's, from before the run */
    dw__call call, epilogue;
} cpu_state;

static dw_status begin(dw__run *run) {
    dw_plan *plan = run->plan;
    pthread_mutex_lock(&plan->lock);
    cpu_state *state = plan->kept;
    if (state) plan->kept = state->next;
    pthread_mutex_unlock(&plan->lock);
    if (!state) state = dw__calloc(1, sizeof *state);
    if (!state) return dw__fail_memory("the state of a run", sizeof *state);
    state->limit = dw__pool_limit(plan->target.threads);
    run->state = state;
    return DW_OK;
}

static dw_status end(dw__run *run) {
    cpu_state *state = run->state;
    if (!state) return DW_OK;
    dw__pool_limit(state->limit);
    pthread_mutex_lock(&run->plan->lock);
    state->next = run->plan->kept;
    run->plan->kept = state;
    pthread_mutex_unlock(&run->plan->lock);
    run->state = NULL;
    return DW_OK;
}

static void forget(dw_plan *plan) {
    cpu_state *state = plan->kept;
    while (state) {
        cpu_state *next = state->next;
        dw__free(state);
        state = next;
    }
    plan->kept = NULL;
}

/* Sets *ran to false if the caller left out all that the instruction writes. */
static dw_status run_instruction(const dw__run *run, const dw__instruction *instruction,
                                 bool *ran) {
    const dw_plan *plan = run->plan;
    cpu_state *state = run->state;
    void *scratch = NULL;
    if (instruction->scratch != DW_NONE)
        scratch = dw__storage_address(plan, run->bindings, instruction->scratch);
    dw__bind_step(plan, run->bindings, &instruction->step, &state->call);
    bool wanted = !instruction->optional || dw__wants_result(&state->call);
    if (instruction->epilogue) {
        dw__bind_step(plan, run->bindings, instruction->epilogue, &state->epilogue);
        wanted |= dw__wants_result(&state->epilogue);
        dw__step_attach(instruction->epilogue, &state->epilogue, &state->call);
    }
    *ran = wanted;
    return wanted ? instruction->step.kernel->run(&state->call, scratch) : DW_OK;
}

static dw_status run_range(dw__run *run, uint32_t from, uint32_t to) {
    const dw_engine *engine = run->plan->engine;
    const dw__clock clock = atomic_load_explicit(&run->plan->clock, memory_order_relaxed);
    for (uint32_t i = from; i < to; i++) {
        dw__instruction *instruction = &run->plan->code.items[i];
        if (clock) dw__instruction_watched(run->plan, i, 1);
        double start = clock ? clock() : 0.0;
        bool ran;
        dw_status status = run_instruction(run, instruction, &ran);
        const double end = clock ? clock() : 0.0;
        if (clock) dw__instruction_watched(run->plan, i, 0);
        if (status != DW_OK) {
            char label[160];
            dw__node_label(engine->graph, instruction->step.node, label, sizeof label);
            return dw__fail_prefix(status, "%s", label);
        }
        if (clock && ran) dw__instruction_ran(instruction, start, end - start);
    }
    return DW_OK;
}

const dw__executor dw__executor_cpu = {
    .name = "cpu",
    .begin = begin,
    .run_range = run_range,
    .end = end,
    .forget = forget,
};
