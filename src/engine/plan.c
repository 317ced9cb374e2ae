/* Plans: lifetimes and placement of what lowering made, queries, a listing. */
#include "base/pool.h"
#include "engine/engine_internal.h"
#include "engine/placement.h"
#include <stdio.h>
#include <string.h>

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

static bool in_arena(const dw__storage *storage) {
    return storage->home == DW_HOME_ARENA && storage->first <= storage->last;
}

static dw_status place_storages(dw_plan *plan) {
    dw_status status = DW_OK;
    uint32_t count = 0;
    dw__interval *items = dw__calloc(plan->storages.count + 1, sizeof *items);
    if (!items) return dw__fail_memory("lifetimes", plan->storages.count * sizeof *items);
    for (size_t s = 0; s < plan->storages.count; s++) {
        dw__storage *storage = &plan->storages.items[s];
        if (!in_arena(storage)) continue;
        storage->saved =
            storage->first < plan->first_backward && storage->last >= plan->first_backward;
        items[count++] = (dw__interval){.bytes = storage->bytes,
                                        .first = storage->first,
                                        .last = storage->last,
                                        .pinned = storage->saved};
    }
    DW_TRY(dw__placement_bound(count, items, &plan->bound_bytes));
    DW_TRY(dw__place(count, items, &plan->saved_bytes, &plan->arena_bytes));
    count = 0;
    for (size_t s = 0; s < plan->storages.count; s++) {
        dw__storage *storage = &plan->storages.items[s];
        if (in_arena(storage)) storage->offset = items[count++].offset;
    }
cleanup:
    dw__free(items);
    return status;
}

/* ---- lifecycle ------------------------------------------------------------------------------- */

dw_status dw__plan_create(dw_engine *engine, const int64_t *sizes, dw_plan **out) {
    dw_status status = DW_OK;
    uint32_t symbols = dw_graph_symbol_count(engine->graph);
    dw_plan *plan = dw__calloc(1, sizeof *plan);
    if (!plan) return dw__fail_memory("a plan", sizeof *plan);
    plan->engine = engine;
    plan->threads = dw__pool_threads();
    int limit = dw__pool_limit(plan->threads); /* every kernel measures its scratch for as many */
    plan->memory = dw__arena_create();
    if (!plan->memory) DW_TRY(dw__fail_memory("a plan's memory", 1));
    plan->sizes = dw__arena_alloc(plan->memory, (symbols + 1) * sizeof *plan->sizes);
    if (!plan->sizes) DW_TRY(dw__fail_memory("a plan's sizes", symbols * sizeof *plan->sizes));
    for (uint32_t i = 0; i < symbols; i++) plan->sizes[i] = sizes[i];
    DW_TRY(dw__graph_check_sizes(engine->graph, plan->sizes));
    if (pthread_mutex_init(&plan->lock, NULL) != 0) {
        DW_TRY(dw__fail(DW_OUT_OF_MEMORY, "no mutex for a plan: the system is out of resources"));
    }
    plan->has_lock = true;
    DW_TRY(dw__lower(plan));
    find_lifetimes(plan);
    DW_TRY(dw__plan_cut_backward(plan));
    DW_TRY(place_storages(plan));
    *out = plan;
    plan = NULL;
cleanup:
    dw__pool_limit(limit);
    dw__plan_destroy(plan);
    return status;
}

void dw__plan_destroy(dw_plan *plan) {
    if (!plan) return;
    while (plan->states) {
        dw__run_state *next = plan->states->next;
        dw__free(plan->states);
        plan->states = next;
    }
    if (plan->has_lock) pthread_mutex_destroy(&plan->lock);
    dw__free(plan->code.items);
    dw__free(plan->storages.items);
    dw__arena_destroy(plan->memory);
    dw__free(plan);
}

/* ---- queries --------------------------------------------------------------------------------- */

size_t dw_plan_arena_bytes(const dw_plan *plan) { return plan->arena_bytes; }
size_t dw_plan_saved_bytes(const dw_plan *plan) { return plan->saved_bytes; }
uint32_t dw_plan_output_count(const dw_plan *plan) { return plan->engine->output_count; }

int dw_plan_output_shape(const dw_plan *plan, uint32_t index, int64_t shape[DW_MAX_RANK]) {
    const dw__tensor *output = &plan->outputs[index];
    for (int axis = 0; axis < output->rank; axis++) shape[axis] = output->shape[axis];
    return output->rank;
}

dw_dtype dw_plan_output_dtype(const dw_plan *plan, uint32_t index) {
    return plan->outputs[index].dtype;
}

/* ---- listing --------------------------------------------------------------------------------- */

static dw_status list_operand(const dw_plan *plan, const dw__operand *operand, dw__text *out) {
    static const char *const home_names[] = {"arena", "leaf", "output", "grad"};
    DW_RETURN_IF_FAILED(dw__text_printf(out, " %s[", dw_dtype_name(operand->view.dtype)));
    for (int axis = 0; axis < operand->view.rank; axis++) {
        DW_RETURN_IF_FAILED(
            dw__text_printf(out, axis ? ",%lld" : "%lld", (long long)operand->view.shape[axis]));
    }
    if (operand->storage == DW_NONE) return dw__text_printf(out, "]@none");
    const dw__storage *storage = &plan->storages.items[operand->storage];
    size_t where = storage->home == DW_HOME_ARENA ? storage->offset : storage->index;
    DW_RETURN_IF_FAILED(
        dw__text_printf(out, "]@%s:%zu%s", home_names[storage->home], where,
                        storage->home == DW_HOME_ARENA && storage->saved ? "s" : ""));
    if (operand->offset) {
        DW_RETURN_IF_FAILED(dw__text_printf(out, "+%lld", (long long)operand->offset));
    }
    if (dw__tensor_is_contiguous(&operand->view)) return DW_OK;
    return dw__text_printf(out, "~"); /* strided */
}

static dw_status list_step(const dw_plan *plan, const dw__step *step, const char *kernel,
                           dw__text *out) {
    DW_RETURN_IF_FAILED(dw__text_printf(out, " %s", kernel));
    for (uint32_t i = 0; i < step->input_count; i++) {
        if (step->inputs[i].view.rank < 0) continue;
        DW_RETURN_IF_FAILED(list_operand(plan, &step->inputs[i], out));
    }
    DW_RETURN_IF_FAILED(dw__text_printf(out, " ->"));
    for (uint32_t o = 0; o < step->output_count; o++) {
        DW_RETURN_IF_FAILED(list_operand(plan, &step->outputs[o], out));
    }
    return DW_OK;
}

static dw_status list_instruction(const dw_plan *plan, uint32_t index, uint64_t runs,
                                  dw__text *out) {
    const dw__instruction *instruction = &plan->code.items[index];
    char label[160];
    dw__node_label(plan->engine->graph, instruction->step.node, label, sizeof label);
    DW_RETURN_IF_FAILED(
        dw__text_printf(out, "%4u %c", index, index < plan->first_backward ? 'F' : 'B'));
    if (plan->engine->profile_clock && runs) {
        double seconds = 1e-9 * (double)atomic_load(&instruction->nanoseconds);
        DW_RETURN_IF_FAILED(dw__text_printf(out, " %9.3f ms", 1e3 * seconds / (double)runs));
    }
    DW_RETURN_IF_FAILED(dw__text_printf(out, " %s:", label));
    const dw__step *step = &instruction->step, *epilogue = instruction->epilogue;
    const char *kernel = epilogue ? instruction->with_epilogue->name : step->kernel->name;
    DW_RETURN_IF_FAILED(list_step(plan, step, kernel, out));
    if (epilogue) {
        DW_RETURN_IF_FAILED(dw__text_printf(out, " | epilogue"));
        DW_RETURN_IF_FAILED(list_step(plan, epilogue, epilogue->kernel->name, out));
    }
    if (instruction->scratch != DW_NONE) {
        const dw__storage *scratch = &plan->storages.items[instruction->scratch];
        DW_RETURN_IF_FAILED(
            dw__text_printf(out, " scratch %zu@%zu", scratch->bytes, scratch->offset));
    }
    return dw__text_printf(out, "\n");
}

dw_status dw_plan_describe(const dw_plan *plan, char **text) {
    dw_status status = DW_OK;
    dw__text out = {0};
    const dw_graph *graph = plan->engine->graph;
    DW_TRY(dw__text_printf(&out, "plan"));
    for (uint32_t i = 0; i < dw_graph_symbol_count(graph); i++) {
        DW_TRY(dw__text_printf(&out, " %s=%lld", dw_graph_symbol_name(graph, i),
                               (long long)plan->sizes[i]));
    }
    DW_TRY(dw__text_printf(&out,
                           ": %zu instructions, %u of them forward; arena %zu bytes, "
                           "of which saved %zu; lower bound %zu\n",
                           plan->code.count, plan->first_backward, plan->arena_bytes,
                           plan->saved_bytes, plan->bound_bytes));
    uint64_t runs = atomic_load(&plan->runs);
    for (uint32_t i = 0; i < plan->code.count; i++) DW_TRY(list_instruction(plan, i, runs, &out));
    *text = out.text;
    out.text = NULL;
cleanup:
    dw__text_free(&out);
    return status;
}
