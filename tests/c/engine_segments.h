/* A model whose backward has several parts, so that its arena has segments, and a step that takes their memory away. */
#ifndef DW_ENGINE_SEGMENTS_H
#define DW_ENGINE_SEGMENTS_H

#include "engine_problem.h"

enum {
    CHAIN_LAYERS = 4,
    CHAIN_COUNT = (1 << 16) + 37,
    CHAIN_PART = 4 << 16 /* bytes of gradients of a part: one parameter's are enough */
};

/* h = tanh(h) * p, once for each parameter p. */
static inline dw_status model_chain(model *m) {
    model_begin(m);
    dw_dim count = CHAIN_COUNT;
    dw_value h = model_leaf(m, DW_ROLE_INPUT, "x", DW_F32, 1, &count);
    for (int layer = 0; layer < CHAIN_LAYERS; layer++) {
        char name[16];
        snprintf(name, sizeof name, "p.%d", layer);
        dw_value p = model_leaf(m, DW_ROLE_PARAMETER, name, DW_F32, 1, &count);
        h = dw__emit_binary(&m->e, DW_OP_MUL, dw__emit_unary(&m->e, DW_OP_TANH, h), p);
    }
    if (m->e.status == DW_OK) m->e.status = dw_graph_add_output(m->graph, h);
    return m->e.status;
}

static inline dw_engine *make_segmented_engine(const problem *p, const dw_device *device,
                                               int graphs, int segments) {
    dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
    options.recompute = options.fuse = 0; /* the whole chain would be computed again */
    options.device = device;
    options.cuda_graphs = graphs;
    options.arena_segments = segments;
    options.part_bytes = CHAIN_PART;
    return make_engine_with(p, &options);
}

/* Every call's tensors, in the memory of a device. */
typedef struct bound {
    const dw_binding *leaves, *outputs, *output_grads, *grads;
    void *stream;
} bound;

static inline void *new_segment(const dw_device *device, size_t bytes) {
    void *segment = NULL;
    char byte;
    OK(dw_device_allocate(device, bytes, &segment));
    OK(dw_device_fill(device, segment, 0xFF, bytes));  /* NaNs */
    OK(dw_device_copy_out(device, &byte, segment, 1)); /* waits for the fill */
    return segment;
}

/* Forward and backward with memory of its own for each segment, from the first part that uses it to the last. */
static inline void run_in_segments(const dw_device *device, dw_plan *plan, const bound *b) {
    void *segments[DW_MOST_SEGMENTS] = {NULL};
    const uint32_t count = dw_plan_segment_count(plan);
    for (uint32_t s = 0; s < count; s++) {
        const dw_segment segment = dw_plan_segment(plan, s);
        if (segment.first_part == 0) segments[s] = new_segment(device, segment.bytes);
    }
    OK(dw_plan_forward_segments(plan, segments, b->leaves, b->outputs, b->stream));
    for (uint32_t part = 0; part < dw_plan_part_count(plan); part++) {
        for (uint32_t s = 0; s < count; s++) {
            const dw_segment segment = dw_plan_segment(plan, s);
            if (segment.first_part == part && part > 0)
                segments[s] = new_segment(device, segment.bytes);
        }
        OK(dw_plan_backward_part_segments(plan, part, segments, b->leaves, b->outputs,
                                          b->output_grads, b->grads, b->stream));
        OK(dw_plan_synchronize(plan, b->stream));
        for (uint32_t s = 0; s < count; s++) {
            const dw_segment segment = dw_plan_segment(plan, s);
            if (segment.part != part) continue;
            dw_device_release(device, segments[s], segment.bytes);
            segments[s] = NULL;
        }
    }
    for (uint32_t s = 0; s < count; s++) assert_null(segments[s]);
}

#endif
