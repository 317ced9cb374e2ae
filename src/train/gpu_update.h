/* The optimizer's arithmetic on a GPU, on flat blocks of floats: a sum, the sum of squares, and AdamW. Each is a graph
 * that the engine runs on pieces of the blocks. Learning rate, step and gradient scale are inputs of the graph, so each
 * plan is made once.
 *
 * The functions enqueue their work on the legacy default stream. dw__gpu_gradient_norm waits for it, and dw__gpu_adamw for what
 * was enqueued before it. */
#ifndef DW_GPU_UPDATE_H
#define DW_GPU_UPDATE_H

#include "deepwell/engine.h"
#include <stdbool.h>

typedef struct dw__gpu_update dw__gpu_update;

/* Counts of elements are multiples of 16. */
typedef struct dw__gpu_update_sizes {
    /* Elements [0, decayed) have weight decay, [decayed, updated) have none, and those from `updated` on are not
     * updated. */
    int64_t decayed, updated, elements;
    int64_t piece; /* most elements of one run */
    bool adds;     /* dw__gpu_add will be called */
} dw__gpu_update_sizes;

enum { DW__GPU_PIECE = 1 << 22 }; /* 16 MiB of each block: long enough to fill any GPU */

/* Makes the plans, and allocates none of the device's memory but what plans keep. Reads beta1, beta2 and eps of
 * `adamw`. */
dw_status dw__gpu_update_create(const dw_device *device, const dw__gpu_update_sizes *sizes,
                                const dw_adamw_options *adamw, dw__gpu_update **update);
void dw__gpu_update_destroy(dw__gpu_update *update); /* may be NULL */
/* Bytes of the arena that the functions below need, and of the memory that dw__gpu_update_begin allocates. */
size_t dw__gpu_update_arena_bytes(const dw__gpu_update *update);
size_t dw__gpu_update_bytes(const dw__gpu_update *update);
dw_status dw__gpu_update_begin(dw__gpu_update *update);

/* to += from */
dw_status dw__gpu_add(dw__gpu_update *update, void *arena, float *to, const float *from);
/* Enqueues the sums of squares of the block's pieces, in F64 and in an order that the sizes determine. */
dw_status dw__gpu_square(dw__gpu_update *update, void *arena, const float *block);
/* Waits, and returns the root of the sum of what dw__gpu_square computed last. */
dw_status dw__gpu_gradient_norm(dw__gpu_update *update, double *norm);

typedef struct dw__gpu_blocks {
    float *weights, *gradients, *exp_avg, *exp_avg_sq;
} dw__gpu_blocks;
/* One step of AdamW by the formula of dw_adamw_step. */
dw_status dw__gpu_adamw(dw__gpu_update *update, void *arena, const dw__gpu_blocks *blocks,
                        const dw_adamw_options *options);

#endif
