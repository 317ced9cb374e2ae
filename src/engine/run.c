/* Runs a plan: checks the caller's buffers and lets the target's executor run a range of instructions. */
#include "engine/executor.h"

/* ---- checks of the caller's buffers ---------------------------------------------------------- */

static dw_status check_arena(const dw_plan *plan, const void *arena) {
    if (plan->arena_bytes == 0) return DW_OK;
    size_t alignment = plan->target.alignment;
    if (!arena || (uintptr_t)arena % alignment != 0) {
        return dw__fail(DW_INVALID_ARGUMENT,
                        "the arena at %p must be %zu bytes, aligned to %zu: allocate what "
                        "dw_plan_arena_bytes returns",
                        arena, plan->arena_bytes, alignment);
    }
    return DW_OK;
}

/* The segments of an arena in one block. */
static void find_segments(const dw_plan *plan, void *arena, void **segments) {
    for (uint32_t s = 0; s < plan->segment_count; s++)
        segments[s] = arena ? (char *)arena + plan->segments[s].offset : NULL;
}

/* In `part` of backward, 0 for forward, segments that only other parts use may be NULL. */
static dw_status check_segments(const dw_plan *plan, void *const *segments, uint32_t part) {
    size_t alignment = plan->target.alignment;
    for (uint32_t s = 0; s < plan->segment_count; s++) {
        const dw_segment *segment = &plan->segments[s];
        if (segment->bytes == 0 || segment->part < part || segment->first_part > part) continue;
        if (segments[s] && (uintptr_t)segments[s] % alignment == 0) continue;
        return dw__fail(
            DW_INVALID_ARGUMENT,
            "segment %u of the arena at %p must be %zu bytes, aligned to %zu, from part "
            "%u to part %u of backward: allocate what dw_plan_segment returns",
            s, segments[s], segment->bytes, alignment, segment->first_part, segment->part);
    }
    return DW_OK;
}

static dw_status check_tensor(const dw_plan *plan, const char *what, const char *name,
                              const dw__tensor *shape, const dw_binding *binding) {
    if (!binding->data && dw__tensor_count(shape) > 0) {
        return dw__fail(DW_INVALID_ARGUMENT, "%s %s is NULL: bind its data", what, name);
    }
    const size_t alignment = plan->target.binding_alignment;
    if ((uintptr_t)binding->data % alignment != 0 && dw__tensor_count(shape) > 1) {
        return dw__fail(
            DW_INVALID_ARGUMENT,
            "%s %s lies at %p; expected a multiple of %zu bytes on this device: copy it "
            "to memory of its own",
            what, name, binding->data, alignment);
    }
    if (!binding->strides) return DW_OK;
    dw__tensor bound = *shape;
    for (int axis = 0; axis < shape->rank; axis++) bound.stride[axis] = binding->strides[axis];
    if (dw__tensor_is_contiguous(&bound)) return DW_OK;
    for (int axis = 0; axis < shape->rank; axis++) {
        if (shape->shape[axis] != 1 && bound.stride[axis] != shape->stride[axis]) {
            return dw__fail(DW_INVALID_ARGUMENT,
                            "%s %s has stride %lld on axis %d where a contiguous tensor has %lld: "
                            "leaves must be contiguous, pass a contiguous copy",
                            what, name, (long long)bound.stride[axis], axis,
                            (long long)shape->stride[axis]);
        }
    }
    return DW_OK;
}

/* In `part` of backward, leaves that only earlier parts read may be NULL. */
static dw_status check_leaves(const dw_plan *plan, const dw_binding *leaves, uint8_t when,
                              uint32_t part) {
    const dw_engine *engine = plan->engine;
    for (uint32_t i = 0; i < engine->leaf_count; i++) {
        if (!(engine->leaf_reads[i] & when) || plan->leaf_last[i] < part) continue;
        const char *name = dw_value_name(engine->graph, dw_graph_leaf_at(engine->graph, i));
        DW_RETURN_IF_FAILED(check_tensor(plan, "leaf", name, &plan->leaves[i], &leaves[i]));
    }
    return DW_OK;
}

/* In `part` of backward, outputs that only earlier parts read may be NULL. */
static dw_status check_outputs(const dw_plan *plan, const dw_binding *outputs, uint8_t when,
                               uint32_t part) {
    const dw_engine *engine = plan->engine;
    for (uint32_t i = 0; i < engine->output_count; i++) {
        if (!(engine->output_reads[i] & when) || plan->output_last[i] < part) continue;
        const char *name = dw_value_name(engine->graph, dw_graph_output(engine->graph, i));
        DW_RETURN_IF_FAILED(check_tensor(plan, "output", name, &plan->outputs[i], &outputs[i]));
    }
    return DW_OK;
}

/* Gradients that the caller has left out need no memory. */
static dw_status check_grads(const dw_plan *plan, const dw_binding *grads) {
    const dw_engine *engine = plan->engine;
    for (uint32_t i = 0; i < engine->wrt_count; i++) {
        const uint32_t leaf = engine->wrt_leaf[i];
        const dw_binding grad = {.data = grads[i].data};
        if (!grad.data || !dw_engine_has_grad(engine, i)) continue;
        const char *name = dw_value_name(engine->graph, dw_graph_leaf_at(engine->graph, leaf));
        DW_RETURN_IF_FAILED(
            check_tensor(plan, "the gradient of leaf", name, &plan->leaves[leaf], &grad));
    }
    return DW_OK;
}

/* ---- the calls ------------------------------------------------------------------------------- */

static dw_status execute(dw_plan *plan, const dw__bindings *b, uint32_t from, uint32_t to) {
    const dw__executor *executor = plan->target.executor;
    dw__run run = {.plan = plan, .bindings = b};
    dw_status status = executor->begin(&run);
    if (status == DW_OK) status = executor->run_range(&run, from, to);
    dw_status ended = executor->end(&run);
    return status == DW_OK ? ended : status;
}

/* Copies the addresses of the segments that `part` of backward or a later one uses; forward is before part 0. */
static void bind_segments(const dw_plan *plan, void *const *segments, uint32_t part,
                          dw__bindings *b) {
    for (uint32_t s = 0; s < plan->segment_count; s++)
        if (plan->segments[s].part >= part) b->segments[s] = segments[s];
}

dw_status dw_plan_keep_segments(dw_plan *plan, void *const *segments, const dw_binding *leaves,
                                void *stream) {
    if (plan->kept_end == 0) return DW_OK;
    DW_RETURN_IF_FAILED(check_segments(plan, segments, 0));
    DW_RETURN_IF_FAILED(check_leaves(plan, leaves, DW_READ_KEPT, 0));
    dw__bindings b = {.leaves = leaves, .stream = stream};
    bind_segments(plan, segments, 0, &b);
    return execute(plan, &b, 0, plan->kept_end);
}

dw_status dw_plan_keep(dw_plan *plan, void *arena, const dw_binding *leaves, void *stream) {
    void *segments[DW_MOST_SEGMENTS];
    if (plan->kept_end == 0) return DW_OK;
    DW_RETURN_IF_FAILED(check_arena(plan, arena));
    find_segments(plan, arena, segments);
    return dw_plan_keep_segments(plan, segments, leaves, stream);
}

dw_status dw_plan_forward_segments(dw_plan *plan, void *const *segments, const dw_binding *leaves,
                                   const dw_binding *outputs, void *stream) {
    DW_RETURN_IF_FAILED(check_segments(plan, segments, 0));
    DW_RETURN_IF_FAILED(check_leaves(plan, leaves, DW_READ_FORWARD, 0));
    DW_RETURN_IF_FAILED(check_outputs(plan, outputs, DW_READ_FORWARD, 0));
    dw__bindings b = {.leaves = leaves, .outputs = outputs, .stream = stream};
    bind_segments(plan, segments, 0, &b);
    return execute(plan, &b, plan->kept_end, plan->first_backward);
}

dw_status dw_plan_forward(dw_plan *plan, void *arena, const dw_binding *leaves,
                          const dw_binding *outputs, void *stream) {
    void *segments[DW_MOST_SEGMENTS];
    DW_RETURN_IF_FAILED(check_arena(plan, arena));
    find_segments(plan, arena, segments);
    return dw_plan_forward_segments(plan, segments, leaves, outputs, stream);
}

/* Returns the bytes of the largest output gradient that is NULL. */
static size_t zeros_needed(const dw_plan *plan, const dw_binding *output_grads) {
    const dw_engine *engine = plan->engine;
    size_t bytes = 0;
    for (uint32_t i = 0; i < engine->grad_output_count; i++) {
        const dw__tensor *shape = &plan->leaves[engine->leaf_count + i];
        size_t each = dw__tensor_bytes(shape);
        if (!output_grads[i].data && each > bytes) bytes = each;
    }
    return bytes;
}

static dw_status make_zeros(dw_plan *plan, size_t bytes, void **zeros) {
    const dw_device *device = plan->target.device;
    if (bytes == 0) return DW_OK;
    if (plan->target.executor->zeros) return plan->target.executor->zeros(plan, bytes, zeros);
    dw_status status = device->allocate(bytes, zeros);
    if (status == DW_OK) status = device->fill(*zeros, 0, bytes);
    return status == DW_OK ? status
                           : dw__fail_prefix(status, "zeros for output gradients that are NULL");
}

/* Runs instructions [from, to) of backward. `part` is the first part that they belong to. */
static dw_status run_backward(dw_plan *plan, uint32_t part, uint32_t from, uint32_t to,
                              void *const *segments, const dw_binding *leaves,
                              const dw_binding *outputs, const dw_binding *output_grads,
                              const dw_binding *grads, void *stream) {
    const dw_engine *engine = plan->engine;
    if (engine->wrt_count == 0) {
        return dw__fail(DW_STATE, "the engine was made without gradients: name the leaves whose "
                                  "gradients are wanted in dw_engine_create");
    }
    DW_RETURN_IF_FAILED(check_segments(plan, segments, part));
    DW_RETURN_IF_FAILED(check_leaves(plan, leaves, DW_READ_BACKWARD, part));
    DW_RETURN_IF_FAILED(check_outputs(plan, outputs, DW_READ_BACKWARD, part));
    for (uint32_t i = 0; i < engine->grad_output_count; i++) {
        if (!output_grads[i].data) continue;
        dw_value leaf = dw_graph_leaf_at(engine->graph, engine->leaf_count + i);
        DW_RETURN_IF_FAILED(check_tensor(plan, "output gradient",
                                         dw_value_name(engine->graph, leaf),
                                         &plan->leaves[engine->leaf_count + i], &output_grads[i]));
    }
    DW_RETURN_IF_FAILED(check_grads(plan, grads));
    dw_status status = DW_OK;
    size_t zeros = zeros_needed(plan, output_grads);
    dw__bindings b = {.leaves = leaves,
                      .output_grads = output_grads,
                      .outputs = outputs,
                      .grads = grads,
                      .stream = stream};
    bind_segments(plan, segments, part, &b);
    DW_TRY(make_zeros(plan, zeros, &b.zeros));
    status = execute(plan, &b, from, to);
cleanup:
    if (b.zeros && !plan->target.executor->zeros) plan->target.device->release(b.zeros, zeros);
    return status;
}

static dw_status check_arena_of_backward(const dw_plan *plan, const void *arena) {
    return plan->engine->wrt_count ? check_arena(plan, arena) : DW_OK;
}

dw_status dw_plan_backward(dw_plan *plan, void *arena, const dw_binding *leaves,
                           const dw_binding *outputs, const dw_binding *output_grads,
                           const dw_binding *grads, void *stream) {
    void *segments[DW_MOST_SEGMENTS];
    DW_RETURN_IF_FAILED(check_arena_of_backward(plan, arena));
    find_segments(plan, arena, segments);
    return run_backward(plan, 0, plan->first_backward, (uint32_t)plan->code.count, segments, leaves,
                        outputs, output_grads, grads, stream);
}

dw_status dw_plan_backward_part_segments(dw_plan *plan, uint32_t part, void *const *segments,
                                         const dw_binding *leaves, const dw_binding *outputs,
                                         const dw_binding *output_grads, const dw_binding *grads,
                                         void *stream) {
    if (part >= plan->part_count) {
        return dw__fail(DW_INVALID_ARGUMENT,
                        "there is no part %u of backward: the plan has %u parts", part,
                        plan->part_count);
    }
    uint32_t from = part == 0 ? plan->first_backward : plan->part_ends[part - 1];
    return run_backward(plan, part, from, plan->part_ends[part], segments, leaves, outputs,
                        output_grads, grads, stream);
}

dw_status dw_plan_backward_part(dw_plan *plan, uint32_t part, void *arena, const dw_binding *leaves,
                                const dw_binding *outputs, const dw_binding *output_grads,
                                const dw_binding *grads, void *stream) {
    void *segments[DW_MOST_SEGMENTS];
    DW_RETURN_IF_FAILED(check_arena_of_backward(plan, arena));
    find_segments(plan, arena, segments);
    return dw_plan_backward_part_segments(plan, part, segments, leaves, outputs, output_grads,
                                          grads, stream);
}

dw_status dw_plan_synchronize(dw_plan *plan, void *stream) {
    const dw__executor *executor = plan->target.executor;
    return executor->synchronize ? executor->synchronize(plan, stream) : DW_OK;
}
