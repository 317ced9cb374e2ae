/* The memory of one training step, to the byte and before anything is allocated: the engine's placement for its
 * arena, shapes for what the caller holds.
 *
 * A plan (dw_engine_plan) needs a graph and sizes, no tensors; what it says of its arena is what a run takes,
 * with all that kernels ask for (scratch for each thread, packed operands). What oneDNN allocates beside it, in
 * passing, is known from its version 2.6 on AVX-512. What lies outside of the arena is the caller's, and the
 * order in which a step makes and drops it is known:
 *
 *     forward           parameters, constants, optimizer states, inputs, the arena, all outputs
 *     backward, part p  the same, less outputs that nobody reads any more; gradients of outputs, and of leaves as
 *                       parts make them (dw_plan_grad_parts)
 *     update            gradients of all leaves; the optimizer's temporaries; the arena, kept for the next step
 *
 * Bytes are those of the tensors, without the rounding of allocators and the bookkeeping of graphs and plans.
 */
#ifndef DEEPWELL_STEP_MEMORY_H
#define DEEPWELL_STEP_MEMORY_H

#include "deepwell/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dw_step_optimizer {
    DW_STEP_NO_OPTIMIZER,
    DW_STEP_ADAMW,       /* dw_adamw_step: two averages and a count of 4 bytes for each tensor */
    DW_STEP_ADAMW_TORCH, /* torch.optim.AdamW on a CPU: and two temporaries as large as the largest */
    DW_STEP_OPTIMIZERS
} dw_step_optimizer;
DW_API const char *
dw_step_optimizer_name(dw_step_optimizer optimizer); /* "none", "adamw_dw", "adamw" */

typedef enum dw_step_phase { DW_STEP_FORWARD, DW_STEP_BACKWARD, DW_STEP_UPDATE } dw_step_phase;
DW_API const char *dw_step_phase_name(dw_step_phase phase); /* "forward" */

typedef struct dw_step_options {
    size_t struct_size; /* sizeof(dw_step_options) */
    dw_step_optimizer optimizer;
    /* 0: gradients of the step before are gone when forward begins. 1: they are there, and backward's are added to
     * them part by part: every micro-batch but the first of a step that accumulates. */
    int add_gradients;
    /* One for each output of the graph: 1 where the caller holds it until the step ends. NULL: none. */
    const uint8_t *outputs_kept;
    size_t resident; /* bytes that the caller holds besides, all the time */
} dw_step_options;
#define DW_STEP_OPTIONS_DEFAULT                                                                    \
    { sizeof(dw_step_options), DW_STEP_ADAMW, 0, NULL, 0 }

/* What is held at once, at the most, in one phase. */
typedef struct dw_step_moment {
    dw_step_phase phase;
    uint32_t part;     /* of backward */
    size_t parameters; /* leaves, by their role; each once, however often it is used */
    size_t constants;
    size_t inputs;    /* and the seed */
    size_t optimizer; /* states */
    size_t arena;
    size_t outputs, output_gradients;
    size_t gradients; /* of leaves */
    size_t temporaries;
    size_t
        library; /* allocated by libraries that kernels call, in passing, on all threads at once */
    size_t resident;
    size_t total;
} dw_step_moment;

/* 1 without gradients (inference), else forward, one for each part of backward, update. */
DW_API uint32_t dw_plan_step_moments(const dw_plan *plan);
/* The most that libraries allocate by themselves while one instruction runs, on all threads together. It is not part of
 * the arena. */
DW_API size_t dw_plan_library_bytes(const dw_plan *plan);
/* `moments`: room for dw_plan_step_moments; *peak: which of them holds most. DW_INVALID_ARGUMENT: options of another
 * version, an optimizer that is none. DW_SHAPE: more bytes than a number holds. */
DW_API dw_status dw_plan_step_memory(const dw_plan *plan, const dw_step_options *options,
                                     dw_step_moment *moments, uint32_t *peak);

/* How much of a batch a step takes at once, so that it fits. */
typedef struct dw_step_fit {
    int64_t micro_batch; /* of the batch's divisors the largest that fits, or the smallest tried */
    int fits;
    dw_step_moment
        peak; /* of a micro-batch whose gradients are added to those before, unless it is the whole batch */
} dw_step_fit;
/* `sizes`: as dw_engine_plan takes them, with the whole batch at `symbol`; divisors from it down to `least` are
 * placed one after the other. `capacity`: bytes. options NULL: defaults; add_gradients is set here. Statuses as
 * dw_engine_plan and dw_plan_step_memory; DW_INVALID_ARGUMENT: a symbol that is none, a batch below `least`. */
DW_API dw_status dw_engine_fit_step(dw_engine *engine, const int64_t *sizes, uint32_t symbol,
                                    int64_t least, const dw_step_options *options, size_t capacity,
                                    dw_step_fit *fit);

/* The arena from inside: bytes[i] are alive while instruction i runs, for the first `count` instructions, forward and
 * backward on one line. Returns their number; bytes NULL: that alone. */
DW_API uint32_t dw_plan_arena_alive(const dw_plan *plan, uint32_t count, size_t *bytes);
/* The instruction that backward begins with. */
DW_API uint32_t dw_plan_first_backward(const dw_plan *plan);

#ifdef __cplusplus
}
#endif
#endif
