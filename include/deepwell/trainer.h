/* Trains a language model from a Hugging Face folder and files of tokens.
 *
 *     dw_trainer_options options = DW_TRAINER_OPTIONS_DEFAULT;
 *     options.model = "gpt2", options.data = (const char *[]){"train.bin"}, options.data_count = 1;
 *     dw_trainer *trainer;
 *     dw_train_report report;
 *     dw_trainer_create(&options, &trainer);  // reads configuration and data headers, plans a step; no weights yet
 *     dw_trainer_begin(trainer, 0);           // allocates, checks the data, loads weights or resumes
 *     for (int64_t i = 0; i < options.steps; i++) dw_trainer_step(trainer, &report);
 *     dw_trainer_save(trainer, "trained");    // the model alone, for transformers
 *     dw_trainer_destroy(trainer);
 *
 * Data order, dropout and learning rate of a step depend on the options and the step's number alone. A checkpoint is
 * therefore the weights, AdamW's averages and two counts, and a resumed run has the same bits as an uninterrupted one.
 * Results do not depend on the number of threads. Only one thread may use a trainer at a time. docs/train.md describes
 * files and formulas.
 */
#ifndef DEEPWELL_TRAINER_H
#define DEEPWELL_TRAINER_H

#include "deepwell/status.h"
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dw_trainer dw_trainer;

/* Element type of .bin files without a header. */
typedef enum dw_token_type {
    DW_TOKEN_AUTO, /* uint16 if the vocabulary has at most 65536 entries, else uint32 */
    DW_TOKEN_U16,
    DW_TOKEN_U32
} dw_token_type;

typedef struct dw_trainer_options {
    size_t struct_size; /* sizeof(dw_trainer_options) */

    /* A folder, a config.json, or (with init) a name of the catalogue (model.h). */
    const char *model;
    int init; /* 1: random weights drawn from seed; 0: the folder's weights */

    /* Token files, or folders whose .bin and .npy files are read in the order of their names. */
    const char *const *data;
    uint32_t data_count;
    const char *const *validation; /* likewise; may be empty */
    uint32_t validation_count;
    dw_token_type token_type;
    int shuffle; /* 0: sequences in the order of the files */

    int64_t sequence;    /* tokens predicted per sequence */
    int64_t batch;       /* sequences per step */
    int64_t micro_batch; /* sequences per forward and backward; must divide batch. 0: batch */
    uint64_t seed;       /* of data order, dropout and random weights */
    int dropout;         /* 1: the configuration's dropout; 0: none */

    int64_t steps; /* of the whole run; a resumed run may have more */
    /* Learning rate at step t = 1, 2, ...: lr * t / warmup_steps up to warmup_steps, then
     * lr * (m + (1 - m) * (1 + cos(pi * (t - warmup_steps) / (schedule_steps - warmup_steps))) / 2), m = min_lr_ratio,
     * and lr * m after schedule_steps. `schedule` has other forms. schedule_steps 0: the checkpoint's value when
     * resuming, else `steps`. lr must be at most 1, because a step of AdamW moves a weight by up to about lr. */
    int64_t warmup_steps, schedule_steps;
    double lr, min_lr_ratio;
    /* AdamW (engine.h). weight_decay applies to matrices, with decay_all to all parameters. It must be at most 1 / lr,
     * eps at least 1e-20. */
    double beta1, beta2, eps, weight_decay;
    int decay_all;
    /* Gradients are scaled by min(1, clip / (norm + 1e-6)), with the norm over all of them; 0: no clipping. */
    double clip;

    /* dw_trainer_step fails after this many steps in a row without a finite loss and gradient, or with a loss that is a
     * spike (below); 1 or more. */
    int64_t bad_steps;
    int64_t validation_batches; /* of micro_batch sequences, from the start; 0: all */
    /* A name of dw_layer_precision_named, or the path of a policy's file, which ends in ".json"; NULL: "bf16" on a GPU,
     * else "fp32". On a GPU "bf16" is the type of activations, gradients and matrix products, with parameters and
     * averages in FP32 behind it. The others, and "bf16" on the CPU, round the operands of linear layers (precision.h).
     * The guard of a policy is obeyed. */
    const char *precision;

    const char *checkpoint; /* folder of checkpoints, created if missing; NULL: none */
    int64_t keep;           /* number of newest checkpoints to keep; 1 or more */
    /* Where the model is trained, a name of device.h; NULL: "cpu". On "cuda" the trainer belongs to the GPU of the
     * context that is current in dw_trainer_create. `struct_size` may end before this member: NULL. */
    const char *device;
    /* The learning rate after the warm-up: "cosine", as above; "linear": lr * (1 - (1 - m) * p), with p the cosine's
     * (t - warmup_steps) / (schedule_steps - warmup_steps), and lr * m after schedule_steps; "constant": lr. NULL:
     * "cosine". `struct_size` may end before this member. */
    const char *schedule;
    /* A step is a loss spike, and is not applied, if its loss is above spike_factor times the mean loss of the last
     * spike_window applied steps. The mean leaves out the step just before, and needs 8 losses, or spike_window if that
     * is less. spike_factor must be above 1; 0: no loss is too large. spike_window 0: 32. `struct_size` may end before
     * these members. */
    double spike_factor;
    int64_t spike_window;
} dw_trainer_options;
#define DW_TRAINER_OPTIONS_DEFAULT                                                                 \
    {                                                                                              \
        .struct_size = sizeof(dw_trainer_options), .shuffle = 1, .sequence = 256, .batch = 8,      \
        .dropout = 1, .steps = 1000, .lr = 3e-4, .min_lr_ratio = 0.1, .beta1 = 0.9, .beta2 = 0.95, \
        .eps = 1e-8, .weight_decay = 0.1, .clip = 1.0, .bad_steps = 5, .validation_batches = 32,   \
        .keep = 2, .device = "cpu", .schedule = "cosine"                                           \
    }

/* Reads the configuration and the data's headers and plans one step. Copies the strings and arrays of `options`.
 * DW_INVALID_ARGUMENT names the option. DW_UNSUPPORTED: the device is not here, or has no kernel for a node of the
 * model. */
DW_API dw_status dw_trainer_create(const dw_trainer_options *options, dw_trainer **trainer);
DW_API void dw_trainer_destroy(dw_trainer *trainer); /* may be NULL; writes nothing */

typedef struct dw_trainer_info {
    const char *family;    /* "llama"; belongs to the trainer */
    const char *device;    /* its name; valid until the process ends */
    const char *precision; /* the one in use; belongs to the trainer */
    int64_t parameters;    /* elements */
    int64_t tokens_per_step;
    int64_t data_tokens, data_sequences;
    int64_t validation_tokens, validation_sequences; /* 0 without validation data */
    uint32_t data_files;
    /* Bytes of this trainer's memory. arena: activations and scratch of one forward and backward (and of validation).
     * accumulation: if there is more than one micro-batch, gradients of one part of backward, on a GPU of a
     * micro-batch. parameter: on a GPU in BF16 also the weights in BF16. library: allocated by oneDNN while a GEMM
     * runs. update: scratch of the gradient norm and, on a GPU, of AdamW; the statistics of a guard. With a guard the
     * arena is that of the largest of a step, a sampled step and a step in BF16. */
    size_t parameter_bytes, gradient_bytes, optimizer_bytes, arena_bytes, accumulation_bytes,
        batch_bytes, library_bytes, update_bytes;
    /* On the CPU the predicted largest resident set: the sum of these plus what the process held when the trainer was
     * created. Excludes code loaded by the first step and stacks of threads (some MiB). On a GPU the sum alone: what
     * dw_device_memory will report, without the driver's own memory. */
    size_t predicted_bytes;
} dw_trainer_info;
DW_API void dw_trainer_describe(const dw_trainer *trainer, dw_trainer_info *info);

/* Call once, before the functions below. Reads all data: tokens must be below the vocabulary (DW_INVALID_ARGUMENT names
 * file and position), and their hash goes into checkpoints. resume 1: continues from the newest checkpoint, or starts
 * at step 0 if there is none; the checkpoint must agree with the options (DW_STATE names the difference). resume 0:
 * fails with DW_STATE if the checkpoint folder holds checkpoints. */
DW_API dw_status dw_trainer_begin(dw_trainer *trainer, int resume);
/* Number of steps done: 0, or the checkpoint's. */
DW_API int64_t dw_trainer_steps_done(const dw_trainer *trainer);
/* The schedule_steps in use, which may come from the checkpoint. */
DW_API int64_t dw_trainer_schedule_steps(const dw_trainer *trainer);

typedef struct dw_train_report {
    int64_t step;         /* from 1 */
    double loss;          /* mean over the step's tokens, before the update */
    double gradient_norm; /* before clipping */
    double lr;
    double seconds; /* of this step */
    int applied; /* 0: loss or gradient was not finite, or the loss a spike, and nothing was changed */
    /* If not applied: "the loss", or the name of a parameter whose gradient was not finite; "" for a spike. */
    char culprit[256];
    double spike_limit; /* losses above it are spikes; infinity: none */
} dw_train_report;
/* Runs one step: forward, backward, clipping, AdamW. DW_STATE: all steps are done; or training diverged: bad_steps
 * steps in a row, or the last step of the run, were not finite (*report describes the latest). DW_DEVICE: the GPU
 * failed; the trainer can only be destroyed, and checkpoints stay. A step that fails in another way than divergence
 * leaves report->step 0, and the message names the step. */
DW_API dw_status dw_trainer_step(dw_trainer *trainer, dw_train_report *report);
/* Describes what the guard of the precision policy (docs/precision.md) did in the newest step: {"step": 4, "operands":
 * [...], "changes": [...]}. "operands" is empty if the step was not sampled; precision_watch.h describes the entries.
 * *json is NULL if nothing happened, and always without a guard. Free it with dw_text_free. */
DW_API dw_status dw_trainer_precision_json(const dw_trainer *trainer, char **json);
/* Computes the mean loss on the validation data, without dropout. DW_STATE: there is no validation data. */
DW_API dw_status dw_trainer_validate(dw_trainer *trainer, double *loss);

/* Writes a checkpoint: a temporary folder, synced and renamed. All but the newest `keep` checkpoints are removed, but
 * only after the next applied step (after the last step at once), because only that shows that the new weights give a
 * finite loss. A failure leaves the earlier checkpoints. DW_STATE: there is no checkpoint folder, or a weight is not
 * finite. */
DW_API dw_status dw_trainer_checkpoint(dw_trainer *trainer);
/* Path of the newest checkpoint that this trainer wrote or read; "" if there is none. Belongs to the trainer. */
DW_API const char *dw_trainer_checkpoint_path(const dw_trainer *trainer);
/* Reports what dw_trainer_save would refuse (dw_model_check_save). May be called at any time. `folder` NULL: checks the
 * model's files only. */
DW_API dw_status dw_trainer_check_save(const dw_trainer *trainer, const char *folder);
/* Saves the model (dw_model_save). DW_STATE also if a weight is not finite. */
DW_API dw_status dw_trainer_save(dw_trainer *trainer, const char *folder);

#ifdef __cplusplus
}
#endif
#endif
