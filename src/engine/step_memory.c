/* The memory of a training step: the segments of the plan's arena, and tensors of the caller that come and go by
 * phases. */
#include "deepwell/step_memory.h"
#include "engine/engine_internal.h"
#include <string.h>

static const char *const optimizer_names[DW_STEP_OPTIMIZERS] = {
    [DW_STEP_NO_OPTIMIZER] = "none",
    [DW_STEP_ADAMW] = "adamw_dw",
    [DW_STEP_ADAMW_TORCH] = "adamw",
};

const char *dw_step_optimizer_name(dw_step_optimizer optimizer) {
    return (unsigned)optimizer < DW_STEP_OPTIMIZERS ? optimizer_names[optimizer] : "?";
}

const char *dw_step_phase_name(dw_step_phase phase) {
    static const char *const names[] = {"forward", "backward", "update"};
    return (unsigned)phase < DW_COUNT(names) ? names[phase] : "?";
}

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

static void count_leaves(const dw_plan *plan, dw_step_moment *held) {
    const dw_graph *graph = plan->engine->graph;
    for (uint32_t i = 0; i < plan->engine->leaf_count; i++) {
        size_t bytes = dw__tensor_bytes(&plan->leaves[i]);
        switch (dw_value_role(graph, dw_graph_leaf_at(graph, i))) {
        case DW_ROLE_PARAMETER: held->parameters += bytes; break;
        case DW_ROLE_CONSTANT: held->constants += bytes; break;
        default: held->inputs += bytes;
        }
    }
}

/* Returns the bytes of the outputs that exist in `part`, or in forward if `part` is negative. */
static size_t outputs_alive(const dw_plan *plan, const uint8_t *kept, int64_t part) {
    const dw_engine *engine = plan->engine;
    size_t bytes = 0;
    for (uint32_t i = 0; i < engine->output_count; i++) {
        bool read = (engine->output_reads[i] & DW_READ_BACKWARD) != 0;
        if (part < 0 || (kept && kept[i]) || (read && plan->output_last[i] >= part))
            bytes += dw__tensor_bytes(&plan->outputs[i]);
    }
    return bytes;
}

/* Returns the bytes of the arena's segments that exist in `part` of backward. */
static size_t segments_alive(const dw_plan *plan, uint32_t part) {
    size_t bytes = 0;
    for (uint32_t s = 0; s < plan->segment_count; s++)
        if (plan->segments[s].part >= part && plan->segments[s].first_part <= part)
            bytes += plan->segments[s].bytes;
    return bytes;
}

static size_t output_gradients(const dw_plan *plan) {
    const dw_engine *engine = plan->engine;
    size_t bytes = 0;
    for (uint32_t i = 0; i < engine->grad_output_count; i++)
        bytes += dw__tensor_bytes(&plan->leaves[engine->leaf_count + i]);
    return bytes;
}

static size_t gradient_bytes(const dw_plan *plan, uint32_t wrt) {
    return dw_engine_has_grad(plan->engine, wrt)
               ? dw__tensor_bytes(&plan->leaves[plan->engine->wrt_leaf[wrt]])
               : 0;
}

static size_t gradients_in_all(const dw_plan *plan) {
    size_t bytes = 0;
    for (uint32_t i = 0; i < plan->engine->wrt_count; i++) bytes += gradient_bytes(plan, i);
    return bytes;
}

/* Returns the bytes of the gradients that parts up to `part` have begun. With `added`, without those that the caller
 * has added to others after an earlier part: they were complete, and no later part reads the leaf. */
static size_t gradients_made(const dw_plan *plan, uint32_t part, bool added) {
    size_t bytes = 0;
    for (uint32_t i = 0; i < plan->engine->wrt_count; i++) {
        uint32_t first, last, read = plan->leaf_last[plan->engine->wrt_leaf[i]];
        dw_plan_grad_parts(plan, i, &first, &last);
        bool handed_on = added && (last > read ? last : read) < part;
        if (first <= part && !handed_on) bytes += gradient_bytes(plan, i);
    }
    return bytes;
}

static void count_optimizer(const dw_plan *plan, dw_step_optimizer optimizer, size_t *states,
                            size_t *temporaries) {
    enum { COUNT_BYTES = 4 };
    size_t largest = 0;
    *states = *temporaries = 0;
    if (optimizer == DW_STEP_NO_OPTIMIZER) return;
    for (uint32_t i = 0; i < plan->engine->wrt_count; i++) {
        dw_value leaf = dw_graph_leaf_at(plan->engine->graph, plan->engine->wrt_leaf[i]);
        size_t bytes = gradient_bytes(plan, i);
        if (dw_value_role(plan->engine->graph, leaf) != DW_ROLE_PARAMETER) continue;
        if (!dw_engine_has_grad(plan->engine, i)) continue;
        *states += 2 * bytes + COUNT_BYTES;
        if (bytes > largest) largest = bytes;
    }
    /* Temporary tensors: the square root of the second average, and its quotient by the bias correction. */
    if (optimizer == DW_STEP_ADAMW_TORCH) *temporaries = 2 * largest;
}

/* Returns the most bytes that libraries allocate by themselves during one instruction of [from, to). */
static size_t library_bytes(const dw_plan *plan, uint32_t from, uint32_t to) {
    size_t most = 0;
    for (uint32_t i = from; i < to; i++)
        if (plan->code.items[i].library > most) most = plan->code.items[i].library;
    return most;
}

size_t dw_plan_library_bytes(const dw_plan *plan) {
    return library_bytes(plan, 0, (uint32_t)plan->code.count);
}

/* ---- the step ---------------------------------------------------------------------------------------------------- */

uint32_t dw_plan_step_moments(const dw_plan *plan) {
    return plan->engine->wrt_count == 0 ? 1 : plan->part_count + 2;
}

static dw_status check_options(const dw_step_options *options) {
    static const dw__struct known = {"dw_step_options", sizeof *options, {0}};
    DW_RETURN_IF_FAILED(dw__struct_read(&known, options, NULL));
    if ((unsigned)options->optimizer >= DW_STEP_OPTIMIZERS)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "the optimizer is number %d; expected one of dw_step_optimizer",
                        (int)options->optimizer);
    return DW_OK;
}

static dw_status add_up(dw_step_moment *moment) {
    const size_t parts[] = {moment->parameters,       moment->constants, moment->inputs,
                            moment->optimizer,        moment->arena,     moment->outputs,
                            moment->output_gradients, moment->gradients, moment->temporaries,
                            moment->library,          moment->resident};
    moment->total = 0;
    for (size_t i = 0; i < DW_COUNT(parts); i++) {
        if (__builtin_add_overflow(moment->total, parts[i], &moment->total))
            return dw__fail(DW_SHAPE,
                            "a step of this size needs more than 2^64 bytes: use a smaller one");
    }
    return DW_OK;
}

dw_status dw_plan_step_memory(const dw_plan *plan, const dw_step_options *given,
                              dw_step_moment *moments, uint32_t *peak) {
    dw_step_options options = DW_STEP_OPTIONS_DEFAULT;
    if (given) {
        DW_RETURN_IF_FAILED(check_options(given));
        options = *given;
    }
    uint32_t count = dw_plan_step_moments(plan);
    size_t temporaries, all_gradients = gradients_in_all(plan);
    dw_step_moment held = {.arena = segments_alive(plan, 0), .resident = options.resident};
    count_leaves(plan, &held);
    count_optimizer(plan, options.optimizer, &held.optimizer, &temporaries);
    *peak = 0;
    for (uint32_t i = 0; i < count; i++) {
        dw_step_moment *moment = &moments[i];
        *moment = held;
        if (i == 0) {
            moment->phase = DW_STEP_FORWARD;
            moment->outputs = outputs_alive(plan, options.outputs_kept, -1);
            moment->library = library_bytes(plan, 0, plan->first_backward);
        } else if (i <= plan->part_count) {
            moment->phase = DW_STEP_BACKWARD;
            moment->part = i - 1;
            moment->arena = segments_alive(plan, i - 1);
            uint32_t from = i == 1 ? plan->first_backward : plan->part_ends[i - 2];
            moment->library = library_bytes(plan, from, plan->part_ends[i - 1]);
            moment->outputs = outputs_alive(plan, options.outputs_kept, i - 1);
            moment->output_gradients = output_gradients(plan);
            moment->gradients = gradients_made(plan, i - 1, options.add_gradients != 0);
        } else {
            moment->phase = DW_STEP_UPDATE;
            moment->arena = plan->segments[0].bytes + plan->kept_bytes;
            moment->outputs = outputs_alive(plan, options.outputs_kept, plan->part_count);
            moment->gradients = all_gradients;
            moment->temporaries = temporaries;
        }
        if (options.add_gradients && moment->phase != DW_STEP_UPDATE)
            moment->gradients += all_gradients;
        DW_RETURN_IF_FAILED(add_up(moment));
        if (moment->total > moments[*peak].total) *peak = i;
    }
    return DW_OK;
}

/* ---- inside the arena ------------------------------------------------------------------------------------------- */

uint32_t dw_plan_first_backward(const dw_plan *plan) { return plan->first_backward; }

uint32_t dw_plan_arena_alive(const dw_plan *plan, uint32_t count, size_t *bytes) {
    uint32_t all = (uint32_t)plan->code.count;
    size_t alignment = plan->target.alignment;
    if (!bytes) return all;
    if (count > all) count = all;
    if (count) memset(bytes, 0, count * sizeof *bytes);
    for (size_t s = 0; s < plan->storages.count; s++) {
        const dw__storage *storage = &plan->storages.items[s];
        if (storage->home != DW_HOME_ARENA || storage->first > storage->last) continue;
        size_t rounded = (storage->bytes + alignment - 1) / alignment * alignment;
        for (uint32_t i = storage->first; i <= storage->last && i < count; i++) bytes[i] += rounded;
    }
    for (uint32_t i = 0; i < count; i++) bytes[i] += plan->kept_bytes;
    return all;
}
