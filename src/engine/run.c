/* Running a plan: its instructions in order, with pointers put in from the caller's bindings. */
#include "base/pool.h"
#include "engine/engine_internal.h"
#include <stdio.h>
#include <string.h>

/* What the storages' homes are in one run. */
typedef struct bindings {
    char *arena;
    const dw_binding *leaves;       /* of the caller's graph */
    const dw_binding *output_grads; /* NULL in forward */
    const dw_binding *outputs;
    const dw_binding *grads; /* NULL in forward */
    void *zeros;             /* stands for output gradients that are NULL */
} bindings;

void dw__node_label(const dw_graph *graph, dw_node node, char *buffer, size_t bytes) {
    if (node == DW_NONE) {
        snprintf(buffer, bytes, "copy of a leaf");
        return;
    }
    const dw__node_record *record = &graph->nodes.items[node];
    const char *module = record->module ? record->module : "";
    snprintf(buffer, bytes, "%s %s%s%s%s", dw_op_name(record->op),
             dw_value_name(graph, record->outputs[0]), *module ? " (" : "", module,
             *module ? ")" : "");
}

/* ---- pointers -------------------------------------------------------------------------------- */

static char *home_address(const dw_plan *plan, const bindings *b, const dw__storage *storage) {
    switch (storage->home) {
    case DW_HOME_ARENA: return b->arena + storage->offset;
    case DW_HOME_OUTPUT: return b->outputs[storage->index].data;
    case DW_HOME_GRAD: return b->grads[storage->index].data;
    case DW_HOME_LEAF: break;
    }
    uint32_t given = plan->engine->leaf_count;
    if (storage->index < given) return b->leaves[storage->index].data;
    void *grad = b->output_grads[storage->index - given].data;
    return grad ? grad : b->zeros;
}

static void *address(const dw_plan *plan, const bindings *b, const dw__operand *operand) {
    if (operand->storage == DW_NONE) return NULL;
    char *base = home_address(plan, b, &plan->storages.items[operand->storage]);
    if (!base) return NULL;
    return base + operand->offset * (int64_t)dw_dtype_bytes(operand->view.dtype);
}

static void bind_step(const dw_plan *plan, const bindings *b, const dw__step *step,
                      dw__call *call) {
    dw__step_shape(step, call);
    for (uint32_t i = 0; i < step->input_count; i++) {
        call->inputs[i].data = address(plan, b, &step->inputs[i]);
    }
    for (uint32_t o = 0; o < step->output_count; o++) {
        call->outputs[o].data = address(plan, b, &step->outputs[o]);
    }
}

/* ---- the loop -------------------------------------------------------------------------------- */

static bool wants_result(const dw__call *call) {
    for (uint32_t o = 0; o < call->output_count; o++) {
        if (call->outputs[o].data) return true;
    }
    return false;
}

static dw_status run_instruction(const dw_plan *plan, const bindings *b,
                                 const dw__instruction *instruction, dw__run_state *state) {
    void *scratch = NULL;
    if (instruction->scratch != DW_NONE) {
        scratch = home_address(plan, b, &plan->storages.items[instruction->scratch]);
    }
    bind_step(plan, b, &instruction->step, &state->call);
    if (!instruction->epilogue) {
        if (instruction->optional && !wants_result(&state->call)) return DW_OK;
        return instruction->step.kernel->run(&state->call, scratch);
    }
    bind_step(plan, b, instruction->epilogue, &state->epilogue);
    if (instruction->optional && !wants_result(&state->call) && !wants_result(&state->epilogue)) {
        return DW_OK;
    }
    return instruction->with_epilogue->run(&state->call, &state->epilogue, instruction->replaced,
                                           scratch);
}

static dw_status run_instructions(dw_plan *plan, const bindings *b, uint32_t from, uint32_t to,
                                  dw__run_state *state) {
    double (*clock)(void) = plan->engine->profile_clock;
    for (uint32_t i = from; i < to; i++) {
        dw__instruction *instruction = &plan->code.items[i];
        double begin = clock ? clock() : 0.0;
        dw_status status = run_instruction(plan, b, instruction, state);
        if (status != DW_OK) {
            char label[160];
            dw__node_label(plan->engine->graph, instruction->step.node, label, sizeof label);
            return dw__fail_prefix(status, "%s", label);
        }
        if (clock) {
            double spent = clock() - begin;
            atomic_fetch_add(&instruction->nanoseconds, (uint64_t)(1e9 * spent));
        }
    }
    return DW_OK;
}

/* With the threads that the plan has scratch for, whatever another caller of the pool sets meanwhile. */
static dw_status run_range(dw_plan *plan, const bindings *b, uint32_t from, uint32_t to,
                           dw__run_state *state) {
    int limit = dw__pool_limit(plan->threads);
    dw_status status = run_instructions(plan, b, from, to, state);
    dw__pool_limit(limit);
    return status;
}

/* ---- states, kept between runs --------------------------------------------------------------- */

static dw_status take_state(dw_plan *plan, dw__run_state **state) {
    pthread_mutex_lock(&plan->lock);
    *state = plan->states;
    if (*state) plan->states = (*state)->next;
    pthread_mutex_unlock(&plan->lock);
    if (*state) return DW_OK;
    *state = dw__calloc(1, sizeof **state);
    return *state ? DW_OK : dw__fail_memory("the state of a run", sizeof **state);
}

static void give_state(dw_plan *plan, dw__run_state *state) {
    pthread_mutex_lock(&plan->lock);
    state->next = plan->states;
    plan->states = state;
    pthread_mutex_unlock(&plan->lock);
}

/* ---- checks of what the caller bound --------------------------------------------------------- */

static dw_status check_arena(const dw_plan *plan, const void *arena) {
    if (plan->arena_bytes == 0) return DW_OK;
    if (!arena || (uintptr_t)arena % 64 != 0) {
        return dw__fail(DW_INVALID_ARGUMENT,
                        "the arena at %p must be %zu bytes, aligned to 64: allocate what "
                        "dw_plan_arena_bytes says",
                        arena, plan->arena_bytes);
    }
    return DW_OK;
}

static dw_status check_tensor(const char *what, const char *name, const dw__tensor *shape,
                              const dw_binding *binding) {
    if (!binding->data && dw__tensor_count(shape) > 0) {
        return dw__fail(DW_INVALID_ARGUMENT, "%s %s is NULL: bind its data", what, name);
    }
    if (!binding->strides) return DW_OK;
    dw__tensor bound = *shape;
    for (int axis = 0; axis < shape->rank; axis++) bound.stride[axis] = binding->strides[axis];
    if (dw__tensor_is_contiguous(&bound)) return DW_OK;
    for (int axis = 0; axis < shape->rank; axis++) {
        if (shape->shape[axis] != 1 && bound.stride[axis] != shape->stride[axis]) {
            return dw__fail(DW_INVALID_ARGUMENT,
                            "%s %s has stride %lld on axis %d where a contiguous tensor has %lld: "
                            "plans take contiguous leaves, pass a contiguous copy",
                            what, name, (long long)bound.stride[axis], axis,
                            (long long)shape->stride[axis]);
        }
    }
    return DW_OK;
}

static dw_status check_leaves(const dw_plan *plan, const dw_binding *leaves, uint8_t when) {
    const dw_engine *engine = plan->engine;
    for (uint32_t i = 0; i < engine->leaf_count; i++) {
        if (!(engine->leaf_reads[i] & when)) continue;
        const char *name = dw_value_name(engine->graph, dw_graph_leaf_at(engine->graph, i));
        DW_RETURN_IF_FAILED(check_tensor("leaf", name, &plan->leaves[i], &leaves[i]));
    }
    return DW_OK;
}

/* `part`: of backward; outputs that only earlier ones read may be NULL. */
static dw_status check_outputs(const dw_plan *plan, const dw_binding *outputs, uint8_t when,
                               uint32_t part) {
    const dw_engine *engine = plan->engine;
    for (uint32_t i = 0; i < engine->output_count; i++) {
        if (!(engine->output_reads[i] & when) || plan->output_last[i] < part) continue;
        const char *name = dw_value_name(engine->graph, dw_graph_output(engine->graph, i));
        DW_RETURN_IF_FAILED(check_tensor("output", name, &plan->outputs[i], &outputs[i]));
    }
    return DW_OK;
}

/* ---- the calls ------------------------------------------------------------------------------- */

dw_status dw_plan_forward(dw_plan *plan, void *arena, const dw_binding *leaves,
                          const dw_binding *outputs) {
    DW_RETURN_IF_FAILED(check_arena(plan, arena));
    DW_RETURN_IF_FAILED(check_leaves(plan, leaves, DW_READ_FORWARD));
    DW_RETURN_IF_FAILED(check_outputs(plan, outputs, DW_READ_FORWARD, 0));
    bindings b = {.arena = arena, .leaves = leaves, .outputs = outputs};
    dw__run_state *state = NULL;
    DW_RETURN_IF_FAILED(take_state(plan, &state));
    dw_status status = run_range(plan, &b, 0, plan->first_backward, state);
    give_state(plan, state);
    if (status == DW_OK) atomic_fetch_add(&plan->runs, 1);
    return status;
}

/* Zeros for the output gradients that are NULL, as large as the largest of them. */
static dw_status make_zeros(const dw_plan *plan, const dw_binding *output_grads, void **zeros) {
    const dw_engine *engine = plan->engine;
    size_t bytes = 0;
    for (uint32_t i = 0; i < engine->grad_output_count; i++) {
        const dw__tensor *shape = &plan->leaves[engine->leaf_count + i];
        size_t each = (size_t)dw__tensor_count(shape) * dw_dtype_bytes(shape->dtype);
        if (!output_grads[i].data && each > bytes) bytes = each;
    }
    if (bytes == 0) return DW_OK;
    *zeros = dw__malloc_aligned(bytes);
    if (!*zeros) return dw__fail_memory("zeros for an output gradient that is NULL", bytes);
    memset(*zeros, 0, bytes);
    return DW_OK;
}

/* Instructions [from, to) of backward; `part` is the first of its parts that they belong to. */
static dw_status run_backward(dw_plan *plan, uint32_t part, uint32_t from, uint32_t to, void *arena,
                              const dw_binding *leaves, const dw_binding *outputs,
                              const dw_binding *output_grads, const dw_binding *grads) {
    const dw_engine *engine = plan->engine;
    if (engine->wrt_count == 0) {
        return dw__fail(DW_STATE, "the engine was made without gradients: name the leaves whose "
                                  "gradients are wanted in dw_engine_create");
    }
    DW_RETURN_IF_FAILED(check_arena(plan, arena));
    DW_RETURN_IF_FAILED(check_leaves(plan, leaves, DW_READ_BACKWARD));
    DW_RETURN_IF_FAILED(check_outputs(plan, outputs, DW_READ_BACKWARD, part));
    for (uint32_t i = 0; i < engine->grad_output_count; i++) {
        if (!output_grads[i].data) continue;
        dw_value leaf = dw_graph_leaf_at(engine->graph, engine->leaf_count + i);
        DW_RETURN_IF_FAILED(check_tensor("output gradient", dw_value_name(engine->graph, leaf),
                                         &plan->leaves[engine->leaf_count + i], &output_grads[i]));
    }
    dw_status status = DW_OK;
    dw__run_state *state = NULL;
    bindings b = {.arena = arena,
                  .leaves = leaves,
                  .output_grads = output_grads,
                  .outputs = outputs,
                  .grads = grads};
    DW_TRY(make_zeros(plan, output_grads, &b.zeros));
    DW_TRY(take_state(plan, &state));
    status = run_range(plan, &b, from, to, state);
    give_state(plan, state);
cleanup:
    dw__free_aligned(b.zeros);
    return status;
}

dw_status dw_plan_backward(dw_plan *plan, void *arena, const dw_binding *leaves,
                           const dw_binding *outputs, const dw_binding *output_grads,
                           const dw_binding *grads) {
    return run_backward(plan, 0, plan->first_backward, (uint32_t)plan->code.count, arena, leaves,
                        outputs, output_grads, grads);
}

dw_status dw_plan_backward_part(dw_plan *plan, uint32_t part, void *arena, const dw_binding *leaves,
                                const dw_binding *outputs, const dw_binding *output_grads,
                                const dw_binding *grads) {
    if (part >= plan->part_count) {
        return dw__fail(DW_INVALID_ARGUMENT, "part %u of backward was asked for, and there are %u",
                        part, plan->part_count);
    }
    uint32_t from = part == 0 ? plan->first_backward : plan->part_ends[part - 1];
    return run_backward(plan, part, from, plan->part_ends[part], arena, leaves, outputs,
                        output_grads, grads);
}
