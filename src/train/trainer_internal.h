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
#include "train/gpu_update.h"

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

/* The state of a trainer on a GPU, where the batch lies in the device's memory, too. A step enqueues forward and backward
 * of all micro-batches and the norm, and then waits once, for losses and norm. */
typedef struct dw__gpu {
    dw__gpu_update *update;
    dw__gpu_update_sizes sizes;
    dw__block batch; /* holds what the pointers below point to */
    void *input, *labels, *seed;
    float *loss, *share; /* of a micro-batch; its share of the step's loss */
    float *losses;       /* of a step's micro-batches, or of validation */
    float *losses_read;  /* the host's copy */
    int64_t most_losses;
} dw__gpu;

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
    float **weight_pointers; /* count; the device's addresses */

    /* With several micro-batches, the gradients of all but the first. On the CPU each lives from its first to its last
     * part of backward and is then added to the sum. On a GPU they have the layout of the gradients. */
    dw__block accumulation;
    dw__interval *lives;         /* count, or NULL; on the CPU */
    dw_binding *gradients_bound; /* count entries: of the first micro-batch */
    dw_binding *part_bound;      /* count entries: of the others */

    dw_adamw_tensor *tensors; /* count entries: decayed ones first */
    uint32_t decayed, updated;
    double *norm_scratch;
    size_t norm_bytes;
    size_t library_bytes;
    int64_t *input, *labels, *sequence; /* [micro_batch, S], the same, [S + 1] */
    int64_t random_seed[2];
    dw__gpu *gpu;          /* NULL on the CPU */
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

/* ---- trainer_gpu.c ------------------------------------------------------------------------------- */

/* Finds the device that the options name. */
dw_status dw__trainer_find_device(dw_trainer *t);
/* Plans the update. Needs the plans of forward and backward, and the layout of the parameters. */
dw_status dw__trainer_gpu_create(dw_trainer *t);
void dw__trainer_gpu_destroy(dw_trainer *t);
dw_status dw__trainer_gpu_begin(dw_trainer *t);
/* Enqueue a micro-batch, which the host's buffers hold: forward and backward, or forward of validation. */
dw_status dw__trainer_gpu_train(dw_trainer *t, int64_t micro);
dw_status dw__trainer_gpu_validate(dw_trainer *t, int64_t batch);
/* Wait. The losses are in t->gpu->losses_read then. */
dw_status dw__trainer_gpu_finish_step(dw_trainer *t, int64_t micro_batches, double *norm);
dw_status dw__trainer_gpu_finish_validation(dw_trainer *t, int64_t batches);
dw_status dw__trainer_gpu_update(dw_trainer *t, const dw_adamw_options *adamw);

/* The floats of a block for the host, to be released: on the CPU the block itself, on a GPU a copy. */
dw_status dw__trainer_host_block(const dw_trainer *t, const dw__block *block, float **floats);
/* Writes them to the block; on the CPU they are there already. */
dw_status dw__trainer_put_block(const dw_trainer *t, const dw__block *block, const float *floats);
void dw__trainer_release_host(const dw_trainer *t, float *floats);
/* The address of each parameter in such a block; release the list with dw__free. */
dw_status dw__trainer_host_list(const dw_trainer *t, float *floats, float ***list);

/* ---- others ---------------------------------------------------------------------------------------- */

/* Micro-batches of one validation; 0 without validation data. */
int64_t dw__trainer_validation_batches(const dw_trainer *t);
/* Removes the checkpoints that the newest one replaces, if that is pending. */
dw_status dw__trainer_prune(dw_trainer *t);
/* Reads the weights from a model's folder; NULL: draws them. */
dw_status dw__trainer_load_weights(dw_trainer *t, const char *folder);
/* Restores parameters, averages and counts from the newest checkpoint. */
dw_status dw__trainer_resume(dw_trainer *t);

static inline float *dw__trainer_tensor(const dw__block *block, const dw_trainer *t, uint32_t i) {
    return (float *)block->data + t->offsets[i];
}

#endif
