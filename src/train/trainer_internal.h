/* The state of a trainer. */
#ifndef DW_TRAINER_INTERNAL_H
#define DW_TRAINER_INTERNAL_H

#include "deepwell/device.h"
#include "deepwell/engine.h"
#include "deepwell/model.h"
#include "deepwell/precision.h"
#include "deepwell/trainer.h"
#include "engine/placement.h"
#include "engine/target.h"
#include "train/checkpoints.h"
#include "train/dataset.h"

/* A block of device memory. */
typedef struct dw__block {
    void *data;
    size_t bytes;
} dw__block;

/* An engine with its plan for one micro-batch, and the data of its leaves. */
typedef struct dw__program {
    dw_graph *graph;
    dw_engine *engine;
    dw_plan *plan;
    dw_binding *leaves; /* one per leaf of the graph */
} dw__program;

struct dw_trainer {
    dw_trainer_options options; /* strings in `memory`; schedule_steps is the schedule in use */
    bool schedule_is_given;     /* the caller gave it, so a checkpoint does not replace it */
    dw_precision_policy policy; /* of linear layers */
    dw__arena *memory;
    dw_model_config *config;
    dw_model_info model;
    dw__dataset *data, *validation; /* validation is NULL if there is none */
    const dw_device *device;
    dw__program train, validate; /* validate.plan is NULL if there is none */

    /* All parameters in one block, each 64-byte aligned, with zeros in the gaps. The gradients and AdamW's
     * averages have the same layout. */
    uint32_t count;
    dw_model_parameter *parameters; /* count */
    int64_t *offsets;               /* count, in elements */
    int64_t elements;               /* including the gaps */
    dw__block weights, gradients, exp_avg, exp_avg_sq, arena;
    float **weight_pointers; /* count */

    /* With several micro-batches, the gradients of all but the first. Each lives from its first to its last
     * part of backward and is then added to the sum. */
    dw__block accumulation;
    dw__interval *lives;         /* count, or NULL */
    dw_binding *gradients_bound; /* count entries: of the first micro-batch */
    dw_binding *part_bound;      /* count entries: of the others */

    dw_adamw_tensor *tensors; /* count entries: decayed ones first */
    uint32_t decayed, updated;
    double *norm_scratch;
    size_t norm_bytes;
    size_t library_bytes;
    int64_t *input, *labels, *sequence; /* [micro_batch, S], the same, [S + 1] */
    int64_t random_seed[2];
    size_t baseline_bytes; /* resident when the trainer was made, before it has tensors */

    dw__checkpoints *checkpoints; /* NULL if there are none */
    bool begun;
    bool prune; /* a checkpoint was written since the last dw__checkpoints_prune */
    int64_t step, updates, bad_in_a_row;
};

/* Copies `options` to t->options and checks them. */
dw_status dw__trainer_take_options(dw_trainer *t, const dw_trainer_options *options);
/* Checks warmup_steps, min_lr_ratio and steps against schedule_steps. */
dw_status dw__trainer_check_schedule(const dw_trainer_options *options);

/* Removes the checkpoints that the newest one replaces, if that is pending. */
dw_status dw__trainer_prune(dw_trainer *t);
/* Restores parameters, averages and counts from the newest checkpoint. */
dw_status dw__trainer_resume(dw_trainer *t);

static inline float *dw__trainer_tensor(const dw__block *block, const dw_trainer *t, uint32_t i) {
    return (float *)block->data + t->offsets[i];
}

#endif
