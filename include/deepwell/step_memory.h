/* Predicts the memory of one training step, to the byte and before anything is allocated.
 *
 *     dw_step_moment moments[16]; // dw_plan_step_moments(plan) of them
 *     uint32_t peak;
 *     if (dw_plan_step_memory(plan, NULL, moments, &peak) == DW_OK) printf("%zu bytes\n", moments[peak].total);
 *
 * A plan (dw_engine_plan) needs a graph and sizes but no tensors. The engine's placement gives the arena, including
 * scratch per thread and packed operands. What oneDNN allocates in addition is known for version 2.6 and later on
 * AVX-512. Everything else belongs to the caller, and shapes and the order of a step give its size:
 *
 *     forward           parameters, constants, optimizer states, inputs, the arena, all outputs
 *     backward, part p  the same, without outputs that are no longer read and segments of the arena that earlier parts
 *                       used last (dw_plan_segment); gradients of outputs; gradients of leaves as parts write them
 *                       (dw_plan_grad_parts)
 *     update            gradients of all leaves; the optimizer's temporaries; the arena's segment 0, kept for the next
 *                       step
 *
 * Bytes are those of the tensors. They exclude the rounding of allocators and the data structures of graphs and plans.
 */
#ifndef DEEPWELL_STEP_MEMORY_H
#define DEEPWELL_STEP_MEMORY_H

#include "deepwell/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dw_step_optimizer {
    DW_STEP_NO_OPTIMIZER,
    DW_STEP_ADAMW,       /* dw_adamw_step: two averages, and a 4-byte count per tensor */
    DW_STEP_ADAMW_TORCH, /* torch.optim.AdamW on a CPU: also two temporaries of the largest size */
    DW_STEP_OPTIMIZERS
} dw_step_optimizer;
DW_API const char *
dw_step_optimizer_name(dw_step_optimizer optimizer); /* "none", "adamw_dw", "adamw" */

typedef enum dw_step_phase { DW_STEP_FORWARD, DW_STEP_BACKWARD, DW_STEP_UPDATE } dw_step_phase;
DW_API const char *dw_step_phase_name(dw_step_phase phase); /* "forward" */

typedef struct dw_step_options {
    size_t struct_size; /* sizeof(dw_step_options) */
    dw_step_optimizer optimizer;
    /* 0: the previous step's gradients are freed before forward. 1: they exist, and backward adds to them part by part:
     * every micro-batch but the first, if a step accumulates gradients. */
    int add_gradients;
    /* One per output of the graph; 1: the caller holds it until the step ends. NULL: none is held. */
    const uint8_t *outputs_kept;
    size_t resident; /* bytes that the caller holds all the time, in addition */
} dw_step_options;
#define DW_STEP_OPTIONS_DEFAULT                                                                    \
    { sizeof(dw_step_options), DW_STEP_ADAMW, 0, NULL, 0 }

/* The peak of one phase: what is held at once. */
typedef struct dw_step_moment {
    dw_step_phase phase;
    uint32_t part;     /* of backward */
    size_t parameters; /* leaves by their role, each counted once */
    size_t constants;
    size_t inputs;    /* and the seed */
    size_t optimizer; /* states */
    size_t arena;     /* its segments that are not released yet */
    size_t outputs, output_gradients;
    size_t gradients; /* of leaves */
    size_t temporaries;
    /* Allocated temporarily by libraries that kernels call, on all threads together. */
    size_t library;
    size_t resident;
    size_t total;
} dw_step_moment;

/* Number of moments: 1 without gradients (inference), else forward, one per part of backward, and update. */
DW_API uint32_t dw_plan_step_moments(const dw_plan *plan);
/* Peak of the memory that libraries allocate while one instruction runs, on all threads together. It is not part of the
 * arena. */
DW_API size_t dw_plan_library_bytes(const dw_plan *plan);
/* `moments`: room for dw_plan_step_moments. *peak: index of the largest. `options` NULL: the defaults.
 * DW_INVALID_ARGUMENT: options of another version, or an unknown optimizer. DW_SHAPE: the sum overflows. */
DW_API dw_status dw_plan_step_memory(const dw_plan *plan, const dw_step_options *options,
                                     dw_step_moment *moments, uint32_t *peak);

/* The largest micro-batch whose step fits. */
typedef struct dw_step_fit {
    /* The largest divisor of the batch that fits; if none does, the smallest tried. */
    int64_t micro_batch;
    int fits;
    /* The peak of a micro-batch whose gradients are added to earlier ones, unless it is the whole batch. */
    dw_step_moment peak;
} dw_step_fit;
/* `sizes`: as for dw_engine_plan, with the whole batch at index `symbol`. Plans the batch's divisors from the largest
 * down to `least`. `capacity`: bytes. `options` NULL: the defaults; add_gradients is ignored. Fails as dw_engine_plan
 * and dw_plan_step_memory do, and with DW_INVALID_ARGUMENT for an unknown symbol or a batch below `least`. */
DW_API dw_status dw_engine_fit_step(dw_engine *engine, const int64_t *sizes, uint32_t symbol,
                                    int64_t least, const dw_step_options *options, size_t capacity,
                                    dw_step_fit *fit);

/* Occupancy of the arena: bytes[i] are live while instruction i runs, for the first `count` instructions of forward and
 * backward on one time line. Returns the number of instructions. `bytes` may be NULL. */
DW_API uint32_t dw_plan_arena_alive(const dw_plan *plan, uint32_t count, size_t *bytes);
/* Index of the first instruction of backward. */
DW_API uint32_t dw_plan_first_backward(const dw_plan *plan);

#ifdef __cplusplus
}
#endif
#endif
