/* The time of each instruction of a plan.
 *
 * Executors look at the plan's clock once for each range of instructions, so that a plan whose times nobody wants pays
 * for one load. A CPU's executor reads the clock around each instruction; a GPU's records events between them. */
#include "engine/engine_internal.h"

void dw__instruction_ran(dw__instruction *instruction, double start, double seconds) {
    atomic_fetch_add(&instruction->runs, 1);
    atomic_fetch_add(&instruction->nanoseconds, (uint64_t)(1e9 * (seconds > 0.0 ? seconds : 0.0)));
    atomic_store(&instruction->began, (uint64_t)(1e9 * start));
}

void dw_plan_profile(dw_plan *plan, int on) {
    const dw__clock of_environment = plan->engine->profile_clock;
    if (!on) {
        atomic_store(&plan->clock, of_environment);
        return;
    }
    for (uint32_t i = 0; i < plan->code.count; i++) {
        dw__instruction *instruction = &plan->code.items[i];
        atomic_store(&instruction->runs, 0);
        atomic_store(&instruction->nanoseconds, 0);
        atomic_store(&instruction->began, 0);
    }
    atomic_store(&plan->clock, of_environment ? of_environment : dw__seconds);
}

void dw_plan_watch(dw_plan *plan, dw_instruction_watcher watcher, void *context) {
    if (watcher) atomic_store(&plan->watcher_context, context);
    atomic_store(&plan->watcher, watcher);
}

uint32_t dw_plan_times(const dw_plan *plan, uint32_t capacity, dw_instruction_time *times) {
    const uint32_t count = (uint32_t)plan->code.count;
    for (uint32_t i = 0; i < count && i < capacity; i++) {
        const dw__instruction *instruction = &plan->code.items[i];
        times[i] =
            (dw_instruction_time){.runs = atomic_load(&instruction->runs),
                                  .seconds = 1e-9 * (double)atomic_load(&instruction->nanoseconds),
                                  .start = 1e-9 * (double)atomic_load(&instruction->began)};
    }
    return count;
}
