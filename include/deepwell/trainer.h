/* Training of a language model from a Hugging Face folder and files of tokens.
 *
 *     dw_trainer_create     reads the configuration and the data's headers, plans one step: no weights yet
 *     dw_trainer_begin      allocates, checks the data, loads or draws weights, or goes on from a checkpoint
 *     dw_trainer_step       one optimizer step: forward, backward, clipping, AdamW
 *     dw_trainer_validate   mean loss on other data
 *     dw_trainer_checkpoint a folder from which begin goes on bit for bit
 *     dw_trainer_save       the model alone, as transformers reads it
 *
 * What a step sees is a function of the options and of its number: data order, dropout and learning rate
 * need no state, so a checkpoint is weights, AdamW's averages and two counts. Results do not depend on the
 * number of threads. One trainer is used by one thread at a time. docs/train.md describes files and formulas.
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
    DW_TOKEN_AUTO, /* uint16 where the vocabulary has at most 65536 entries, else uint32 */
    DW_TOKEN_U16,
    DW_TOKEN_U32
} dw_token_type;

typedef struct dw_trainer_options {
    size_t struct_size; /* sizeof(dw_trainer_options) */

    /* A folder, a config.json, or (with init) a name of the catalogue (model.h). */
    const char *model;
    int init; /* 1: random weights drawn from seed; 0: the folder's */

    /* Token files, or folders whose .bin and .npy files are taken in order of their names. */
    const char *const *data;
    uint32_t data_count;
    const char *const *validation; /* may be empty */
    uint32_t validation_count;
    dw_token_type token_type;
    int shuffle; /* 0: sequences in the order of the files */

    int64_t sequence;    /* tokens predicted per sequence */
    int64_t batch;       /* sequences per step */
    int64_t micro_batch; /* sequences per forward and backward; divides batch. 0: batch */
    uint64_t seed;       /* of the order, of dropout and of random weights */
    int dropout;         /* 1: as the configuration says; 0: none */

    int64_t steps; /* of the whole run; a run may be resumed with more */
    /* Learning rate at step t = 1, 2, ...: lr * t / warmup_steps up to warmup_steps, then
     * lr * (m + (1 - m) * (1 + cos(pi * (t - warmup_steps) / (schedule_steps - warmup_steps))) / 2), m = min_lr_ratio,
     * and lr * m after schedule_steps. schedule_steps 0: the checkpoint's when resuming, else `steps`. lr is at most
     * 1: a step of AdamW moves a weight by up to about lr. */
    int64_t warmup_steps, schedule_steps;
    double lr, min_lr_ratio;
    /* AdamW (engine.h). weight_decay is for matrices alone unless decay_all, and at most 1 / lr; eps is at least
     * 1e-20. */
    double beta1, beta2, eps, weight_decay;
    int decay_all;
    /* Gradients are scaled by min(1, clip / (norm + 1e-6)), norm over all of them; 0: not clipped. */
    double clip;

    /* Steps in a row whose loss or gradient is not finite, at which dw_trainer_step fails; 1 or more. */
    int64_t bad_steps;
    int64_t validation_batches; /* of micro_batch sequences, from the start; 0: all */
    const char *precision; /* of linear layers: "fp32", "bf16", "mxfp8", "nvfp4" (precision.h) */

    const char *checkpoint; /* folder of checkpoints, made when missing; NULL: none */
    int64_t keep;           /* newest checkpoints that are kept; 1 or more */
} dw_trainer_options;
#define DW_TRAINER_OPTIONS_DEFAULT                                                                 \
    {                                                                                              \
        .struct_size = sizeof(dw_trainer_options), .shuffle = 1, .sequence = 256, .batch = 8,      \
        .dropout = 1, .steps = 1000, .lr = 3e-4, .min_lr_ratio = 0.1, .beta1 = 0.9, .beta2 = 0.95, \
        .eps = 1e-8, .weight_decay = 0.1, .clip = 1.0, .bad_steps = 5, .validation_batches = 32,   \
        .precision = "fp32", .keep = 2                                                             \
    }

/* Strings and arrays of `options` are copied. DW_INVALID_ARGUMENT names the option. */
DW_API dw_status dw_trainer_create(const dw_trainer_options *options, dw_trainer **trainer);
DW_API void dw_trainer_destroy(dw_trainer *trainer); /* NULL allowed; writes nothing */

typedef struct dw_trainer_info {
    const char *family; /* "llama" */
    int64_t parameters; /* elements */
    int64_t tokens_per_step;
    int64_t data_tokens, data_sequences;
    int64_t validation_tokens, validation_sequences; /* 0 without validation data */
    uint32_t data_files;
    /* Bytes of this trainer's memory. arena: activations and scratch of one forward and backward (and of
     * validation). accumulation: gradients of one part of backward, with more than one micro-batch. library: what
     * oneDNN allocates by itself while a GEMM runs. */
    size_t parameter_bytes, gradient_bytes, optimizer_bytes, arena_bytes, accumulation_bytes,
        batch_bytes, library_bytes;
    /* Their sum and what the process held once the trainer was made: its largest resident set, but for code that the
     * first step loads and stacks of threads (some MiB). */
    size_t predicted_bytes;
} dw_trainer_info;
DW_API void dw_trainer_describe(const dw_trainer *trainer, dw_trainer_info *info);

/* Once, before the others below. resume 1: from the newest checkpoint, from step 0 when there is none; what
 * the checkpoint was made with must be what the options say (DW_STATE names the difference). resume 0: a
 * checkpoint folder that holds checkpoints is refused. All data are read once: identifiers must be below
 * the vocabulary (DW_INVALID_ARGUMENT with file and position), and their hash goes into checkpoints. */
DW_API dw_status dw_trainer_begin(dw_trainer *trainer, int resume);
/* Steps done: 0, or what the checkpoint had. */
DW_API int64_t dw_trainer_steps_done(const dw_trainer *trainer);
/* The schedule_steps in use, which may come from the checkpoint. */
DW_API int64_t dw_trainer_schedule_steps(const dw_trainer *trainer);

typedef struct dw_train_report {
    int64_t step;         /* from 1 */
    double loss;          /* mean over the step's tokens, before the update */
    double gradient_norm; /* before clipping */
    double lr;
    double seconds; /* of this step */
    int applied;    /* 0: loss or gradient was not finite, nothing was changed */
    /* Then: what was not finite: "the loss", or the name of a parameter whose gradient is not. */
    char culprit[256];
} dw_train_report;
/* DW_STATE after the last step; and when the last step, or bad_steps steps in a row, were not finite (the report of
 * the last of them is filled then). */
DW_API dw_status dw_trainer_step(dw_trainer *trainer, dw_train_report *report);
/* Without dropout. DW_STATE without validation data. */
DW_API dw_status dw_trainer_validate(dw_trainer *trainer, double *loss);

/* Written beside its place, synced, renamed; all but the newest `keep` are removed once the next step was applied
 * (after the last step at once), since only that shows that the new one's weights give a finite loss. After a
 * failure the checkpoints that were there are still there. DW_STATE without a checkpoint folder, or when a weight is
 * not finite. */
DW_API dw_status dw_trainer_checkpoint(dw_trainer *trainer);
/* Of the newest checkpoint that this trainer wrote or read: its path ("" when none). */
DW_API const char *dw_trainer_checkpoint_path(const dw_trainer *trainer);
/* dw_model_check_save: what dw_trainer_save would refuse, at any time before. folder NULL: only of the model's
 * files. */
DW_API dw_status dw_trainer_check_save(const dw_trainer *trainer, const char *folder);
/* dw_model_save. DW_STATE also when a weight is not finite. */
DW_API dw_status dw_trainer_save(dw_trainer *trainer, const char *folder);

#ifdef __cplusplus
}
#endif
#endif
