/* Plans: lifetimes of the storages that lowering made; queries. */
#include "base/pool.h"
#include "engine/executor.h"

/* ---- lifetimes ------------------------------------------------------------------------------- */

static void touch(dw_plan *plan, uint32_t storage, uint32_t instruction) {
    if (storage == DW_NONE) return;
    dw__storage *used = &plan->storages.items[storage];
    if (instruction < used->first) used->first = instruction;
    if (instruction > used->last) used->last = instruction;
}

static void touch_step(dw_plan *plan, const dw__step *step, uint32_t instruction) {
    for (uint32_t i = 0; i < step->input_count; i++) {
        touch(plan, step->inputs[i].storage, instruction);
    }
    for (uint32_t o = 0; o < step->output_count; o++) {
        touch(plan, step->outputs[o].storage, instruction);
    }
    if (step->accumulates == DW__ADDS_TO_ADDEND) touch(plan, step->addend.storage, instruction);
}

static bool writes_gradients_only(const dw_plan *plan, const dw__step *step) {
    for (uint32_t o = 0; o < step->output_count; o++) {
        uint32_t storage = step->outputs[o].storage;
        if (storage != DW_NONE && plan->storages.items[storage].home != DW_HOME_GRAD) return false;
    }
    return true;
}

static void find_lifetimes(dw_plan *plan) {
    for (size_t s = 0; s < plan->storages.count; s++) {
        plan->storages.items[s].first = UINT32_MAX;
        plan->storages.items[s].last = 0;
    }
    for (uint32_t i = 0; i < plan->code.count; i++) {
        dw__instruction *instruction = &plan->code.items[i];
        touch_step(plan, &instruction->step, i);
        instruction->optional = writes_gradients_only(plan, &instruction->step);
        if (instruction->epilogue) {
            touch_step(plan, instruction->epilogue, i);
            instruction->optional &= writes_gradients_only(plan, instruction->epilogue);
        }
        touch(plan, instruction->scratch, i);
    }
}

/* ---- lifecycle ------------------------------------------------------------------------------- */

dw_status dw__plan_create(dw_engine *engine, const dw__target *target, const int64_t *sizes,
                          dw_plan **out) {
    dw_status status = DW_OK;
    uint32_t symbols = dw_graph_symbol_count(engine->graph);
    dw_plan *plan = dw__calloc(1, sizeof *plan);
    if (!plan) return dw__fail_memory("a plan", sizeof *plan);
    plan->engine = engine;
    atomic_init(&plan->clock, engine->profile_clock);
    dw__target_copy(&plan->target, target);
    int limit = dw__pool_limit(target->threads); /* kernels measure their scratch for as many */
    plan->memory = dw__arena_create();
    if (!plan->memory) DW_TRY(dw__fail_memory("a plan's memory", 1));
    plan->sizes = dw__arena_alloc(plan->memory, (symbols + 1) * sizeof *plan->sizes);
    if (!plan->sizes) DW_TRY(dw__fail_memory("a plan's sizes", symbols * sizeof *plan->sizes));
    for (uint32_t i = 0; i < symbols; i++) plan->sizes[i] = sizes[i];
    DW_TRY(dw__graph_check_sizes(engine->graph, plan->sizes));
    if (pthread_mutex_init(&plan->lock, NULL) != 0) {
        DW_TRY(dw__fail(DW_OUT_OF_MEMORY,
                        "cannot create a mutex for a plan: the system is out of resources"));
    }
    plan->has_lock = true;
    DW_TRY(dw__lower(plan));
    find_lifetimes(plan);
    DW_TRY(dw__plan_find_kept(plan));
    DW_TRY(dw__plan_cut_backward(plan));
    DW_TRY(dw__plan_place(plan));
    DW_TRY(dw__plan_place_kept(plan));
    if (target->executor->open) DW_TRY(target->executor->open(plan));
    *out = plan;
    plan = NULL;
cleanup:
    dw__pool_limit(limit);
    dw__plan_destroy(plan);
    return status;
}

void dw__plan_destroy(dw_plan *plan) {
    if (!plan) return;
    plan->target.executor->forget(plan);
    if (plan->has_lock) pthread_mutex_destroy(&plan->lock);
    dw__free(plan->code.items);
    dw__free(plan->storages.items);
    dw__arena_destroy(plan->memory);
    dw__free(plan);
}

/* ---- queries --------------------------------------------------------------------------------- */

size_t dw_plan_arena_bytes(const dw_plan *plan) { return plan->arena_bytes; }
size_t dw_plan_saved_bytes(const dw_plan *plan) { return plan->saved_bytes; }
size_t dw_plan_kept_bytes(const dw_plan *plan) { return plan->kept_bytes; }
uint64_t dw_plan_kept_layout(const dw_plan *plan) { return plan->kept_layout; }
uint32_t dw_plan_segment_count(const dw_plan *plan) { return plan->segment_count; }

dw_segment dw_plan_segment(const dw_plan *plan, uint32_t index) {
    return index < plan->segment_count ? plan->segments[index] : (dw_segment){0};
}

uint32_t dw_plan_output_count(const dw_plan *plan) { return plan->engine->output_count; }

int dw_plan_output_shape(const dw_plan *plan, uint32_t index, int64_t shape[DW_MAX_RANK]) {
    const dw__tensor *output = &plan->outputs[index];
    for (int axis = 0; axis < output->rank; axis++) shape[axis] = output->shape[axis];
    return output->rank;
}

dw_dtype dw_plan_output_dtype(const dw_plan *plan, uint32_t index) {
    return plan->outputs[index].dtype;
}
