/* The state of a trainer. */
#ifndef DW_TRAINER_INTERNAL_H
#define DW_TRAINER_INTERNAL_H

#include "base/json.h"
#include "deepwell/checkpoints.h"
#include "deepwell/device.h"
#include "deepwell/engine.h"
#include "deepwell/model.h"
#include "deepwell/precision_watch.h"
#include "deepwell/trainer.h"
#include "engine/placement.h"
#include "engine/target.h"
#include "train/dataset.h"
#include "train/gpu_update.h"
#include "train/loss_spikes.h"

/* A block of device memory. */
typedef struct dw__block {
    void *data;
    size_t bytes;
} dw__block;

typedef enum dw__program_kind { DW__TRAINS, DW__VALIDATES, DW__SAMPLES } dw__program_kind;

/* An engine with its plan for one micro-batch, and the data of its leaves. One that samples also differentiates by a
 * leaf of statistics for each observed layer; these leaves come last. */
typedef struct dw__program {
    dw_graph *graph;
    dw_engine *engine;
    dw_plan *plan;
    dw_binding *leaves; /* one per leaf of the graph */
    /* On the CPU with several micro-batches: the gradients of all but the first one, each from its first to its last
     * part of backward, and the bytes that they need; else NULL and 0. */
    dw__interval *lives;
    size_t accumulation_bytes;
    uint32_t observed; /* layers whose operands are observed */
    char *layers;      /* JSON of them, or NULL */
} dw__program;

/* Numbers from one layer's statistics to the next, so that each is aligned as a GPU's tensors are. */
enum { DW__STATISTICS_STRIDE = 32 };

/* The state of a guard (trainer_precision.c). */
typedef struct dw__guard {
    dw_precision_watch *watch;  /* NULL: the policy has no guard */
    int64_t phase;              /* dw_precision_watch_phase of the programs' policy */
    dw__program samples;        /* runs a sampled step; its plan is NULL if no layer is observed */
    bool sampled;               /* the newest step was */
    uint32_t most;              /* observed layers of the first policy; later ones observe fewer */
    dw__block memory;           /* on a GPU: a leaf's zeros, then the statistics of a micro-batch */
    double *zeros, *statistics; /* the same, where the program runs */
    double *staged;             /* on a GPU: the statistics of each micro-batch, page-locked */
    double *sums;               /* of the step's micro-batches, [most, DW_LAYER_STATISTICS] */
    json_t *operands,
        *changes; /* arrays: what the newest step found, and which changes it caused */
} dw__guard;

/* Each kind of work is recorded as one CUDA graph. */
typedef enum dw__gpu_work {
    DW__GPU_KEEP,        /* values that the step's micro-batches share (dw_plan_keep) */
    DW__GPU_MICRO_BATCH, /* forward and backward; with one micro-batch the update too */
    DW__GPU_UPDATE,      /* of several micro-batches */
    DW__GPU_SAMPLE,      /* as DW__GPU_MICRO_BATCH, with statistics for a guard */
    DW__GPU_VALIDATION,  /* forward of a micro-batch */
    DW__GPU_WORKS
} dw__gpu_work;

/* Tokens of a step's micro-batches in page-locked memory of the host, from where they are copied while the host reads
 * on: for each micro-batch input, labels and seed, as they lie in the device's batch. */
typedef struct dw__gpu_stage {
    char *memory;
    int64_t step; /* steps done before the step that it holds; -1: none */
} dw__gpu_stage;

/* The state of a trainer on a GPU, where the batch lies in the device's memory, too. A step is one launch of a recorded
 * graph, or one per micro-batch and one for the update; the host waits once, at its end. */
typedef struct dw__gpu {
    void *stream;
    void *graphs[DW__GPU_WORKS]; /* NULL: not recorded yet */
    dw__gpu_update *update;
    int64_t decayed, updated; /* ends of the groups of parameters, in elements */
    dw_dtype model;           /* of the model's parameters, activations and gradients */
    dw__block rounded;        /* the weights in that type, if it is not F32 */
    dw__block batch;          /* holds what the pointers below point to */
    void *input, *labels, *seed;
    float *loss, *share; /* of a micro-batch; its share of the step's loss */
    size_t stage_bytes;  /* of a micro-batch: the first bytes of the batch */
    dw__gpu_stage stages[2];
} dw__gpu;

struct dw_trainer {
    dw_trainer_options options;  /* strings in `memory`; schedule_steps is the schedule in use */
    bool schedule_is_given;      /* the caller gave it, so a checkpoint does not replace it */
    dw_precision_policy *policy; /* of the linear layers of the programs */
    const char *precision;       /* its name or file; options.precision has the text of a file */
    dw__arena *memory;
    dw_model_config *config;
    dw_model_info model;
    dw__dataset *data, *validation; /* validation is NULL if there is none */
    const dw_device *device;
    dw__program train, validate; /* validate.plan is NULL if there is none */
    dw__guard guard;

    /* All parameters in one block, each 64-byte aligned (on a GPU 256), with zeros in the gaps. The gradients and
     * AdamW's averages have the same layout. */
    uint32_t count;
    dw_model_parameter *parameters; /* count */
    int64_t *offsets;               /* count, in elements */
    int64_t elements;               /* including the gaps */
    dw__block weights, gradients, exp_avg, exp_avg_sq, arena;
    void **weight_pointers; /* count; the addresses that the model reads */

    /* With several micro-batches, gradients that are added to `gradients`. On the CPU those of all but the first
     * micro-batch (dw__program.lives). On a GPU those of each micro-batch, in the layout of the gradients and in the
     * model's type. */
    dw__block accumulation;
    /* count entries, and guard.most for statistics: */
    dw_binding *gradients_bound; /* of the first micro-batch; on a GPU of each */
    dw_binding *part_bound;      /* of the others; on the CPU */

    dw_adamw_tensor *tensors; /* count entries: decayed ones first */
    uint32_t decayed, updated;
    double *norm_scratch;
    size_t norm_bytes;
    size_t library_bytes;
    int64_t *input, *labels, *sequence; /* [micro_batch, S], the same, [S + 1] */
    int64_t random_seed[2];
    dw__gpu *gpu;          /* NULL on the CPU */
    size_t baseline_bytes; /* resident when the trainer was made, before it has tensors */

    dw_checkpoints *checkpoints; /* NULL if there are none */
    bool begun;
    bool prune; /* a checkpoint was written since the last dw_checkpoints_prune */
    int64_t step, updates, bad_in_a_row;
    dw__recent_losses recent;
};

/* Copies `options`, sets defaults and checks the options of a step, but not the model, the data and the folders. */
dw_status dw__trainer_read_options(const dw_trainer_options *options, dw_trainer_options *copy);
/* Copies `options` to t->options and checks them. */
dw_status dw__trainer_take_options(dw_trainer *t, const dw_trainer_options *options);
/* Checks warmup_steps, min_lr_ratio and steps against schedule_steps. */
dw_status dw__trainer_check_schedule(const dw_trainer_options *options);

/* ---- trainer_gpu.c ------------------------------------------------------------------------------- */

/* Finds the device that the options name. */
dw_status dw__trainer_find_device(dw_trainer *t);
/* Plans the step. Needs the plans of forward and backward, and the layout of the parameters. */
dw_status dw__trainer_gpu_create(dw_trainer *t);
void dw__trainer_gpu_destroy(dw_trainer *t);
dw_status dw__trainer_gpu_begin(dw_trainer *t);
/* Call it when the weights were written. */
dw_status dw__trainer_gpu_restart(dw_trainer *t);
/* Runs the step behind `t->step`, waits, and says whether it was applied, which it is not with a loss above `limit`.
 * Meanwhile reads the next step's tokens. `samples`: with the statistics of the guard, in guard.staged. */
dw_status dw__trainer_gpu_step(dw_trainer *t, bool samples, double lr, double limit, double *loss,
                               double *norm, bool *applied);
/* Forgets the recorded work, because the programs or their memory are others. */
void dw__trainer_gpu_forget(dw_trainer *t);
/* Returns the sum of the losses of the first `batches` micro-batches of the validation data. */
dw_status dw__trainer_gpu_validate(dw_trainer *t, int64_t batches, double *loss);

/* The gradients in F32 for the host; release them with dw__trainer_release_host. */
dw_status dw__trainer_host_gradients(const dw_trainer *t, float **floats);
/* The floats of a block for the host, to be released: on the CPU the block itself, on a GPU a copy. */
dw_status dw__trainer_host_block(const dw_trainer *t, const dw__block *block, float **floats);
/* Writes them to the block; on the CPU they are there already. */
dw_status dw__trainer_put_block(const dw_trainer *t, const dw__block *block, const float *floats);
void dw__trainer_release_host(const dw_trainer *t, float *floats);
/* The address of each parameter in such a block; release the list with dw__free. */
dw_status dw__trainer_host_list(const dw_trainer *t, float *floats, float ***list);

/* ---- trainer_step.c ------------------------------------------------------------------------------ */

/* Reads micro-batch `micro` of the step behind step `step`, and the seed of its dropout; or one of validation. */
dw_status dw__trainer_read_micro_batch(dw_trainer *t, int64_t step, int64_t micro, int64_t *input,
                                       int64_t *labels, int64_t seed[2]);
dw_status dw__trainer_read_validation(dw_trainer *t, int64_t batch, int64_t *input,
                                      int64_t *labels);

/* ---- trainer.c ------------------------------------------------------------------------------------- */

/* Plans a program of t->policy. Release it with dw__trainer_release_program. */
dw_status dw__trainer_make_program(dw_trainer *t, dw__program_kind kind, dw__program *program);
void dw__trainer_release_program(dw__program *program);
/* Binds the leaves of a program. */
dw_status dw__trainer_bind_leaves(dw_trainer *t, dw__program *program);
dw_status dw__trainer_allocate(const dw_trainer *t, size_t bytes, dw__block *block);
void dw__trainer_release(const dw_trainer *t, dw__block *block);
/* Computes the memory that a program needs, and raises *needs to it. */
typedef struct dw__needs {
    size_t arena, accumulation, library;
} dw__needs;
void dw__trainer_raise(const dw__program *program, dw__needs *needs);

/* ---- trainer_precision.c ------------------------------------------------------------------------------ */

/* Plans sampled steps and raises *needs to those of all policies that are known now. Needs the other programs. */
dw_status dw__trainer_guard_create(dw_trainer *t, dw__needs *needs);
/* Allocates the memory of statistics. */
dw_status dw__trainer_guard_begin(dw_trainer *t);
void dw__trainer_guard_destroy(dw_trainer *t);
/* The device's memory of statistics. */
size_t dw__trainer_guard_bytes(const dw_trainer *t);
/* Gives the programs the policy of the next step, plans again if that is another one, and forgets what the step before
 * found. */
dw_status dw__trainer_guard_prepare(dw_trainer *t);
/* Returns whether the next step is sampled and a layer is observed. */
bool dw__trainer_guard_samples(const dw_trainer *t);
/* Adds the statistics of a micro-batch to those of the step; `first`: they are the first ones. */
void dw__trainer_guard_add(dw_trainer *t, const double *statistics, bool first);
/* Describes the step's sample and, if it was applied, judges it. */
dw_status dw__trainer_guard_judge(dw_trainer *t, int64_t step, bool applied);
/* Writes precision.json into a checkpoint's folder: the policy of the next step without the repair. */
dw_status dw__trainer_guard_write(const dw_trainer *t, const char *folder);

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
