/* These functions are the part of a training step on a GPU that is neither forward nor backward: they compute the
 * step's loss, add the gradients of micro-batches, and run AdamW with clipping. They enqueue kernels alone, so that a
 * CUDA graph can record them; a step whose loss or gradients are not finite, or whose loss is too large, is left out on
 * the GPU. Numbers that change from step to step lie in the GPU's memory (dw_train_numbers), and so do the counts of
 * updates. */
#ifndef DW_GPU_UPDATE_H
#define DW_GPU_UPDATE_H

#include "common/train_step_params.h"
#include "deepwell/adamw.h"
#include "deepwell/engine.h"
#include <stdbool.h>

typedef struct dw__gpu_update dw__gpu_update;

/* Elements [0, decayed) have weight decay, [decayed, updated) have none, and those from `updated` on are not updated.
 * Counts are multiples of 16. */
typedef struct dw__gpu_update_options {
    const dw_device *device;
    int64_t decayed, updated, elements;
    dw_dtype model; /* of the model's parameters and gradients: DW_F32 or DW_BF16 */
    bool adds;      /* gradients are summed over micro-batches, in F32 */
    double beta1, beta2, eps, weight_decay;
    double clip; /* 0: no clipping */
} dw__gpu_update_options;

/* Memory of the device, each block of `elements` elements. */
typedef struct dw__gpu_blocks {
    float *weights, *exp_avg, *exp_avg_sq;
    void *rounded;   /* the weights in the model's type; NULL if that is F32 */
    void *gradients; /* of a micro-batch, in the model's type */
    float *sum;      /* of the gradients of micro-batches; NULL unless `adds` */
} dw__gpu_blocks;

/* Loads the kernels, and allocates nothing that stays but memory of the host. */
dw_status dw__gpu_update_create(const dw__gpu_update_options *options, dw__gpu_update **update);
void dw__gpu_update_destroy(dw__gpu_update *update); /* may be NULL */
/* Bytes of the memory that dw__gpu_update_begin allocates. */
size_t dw__gpu_update_bytes(const dw__gpu_update *update);
dw_status dw__gpu_update_begin(dw__gpu_update *update, const dw__gpu_blocks *blocks);
/* Call it when weights were written: rounds them, and sets the count of updates. Waits. */
dw_status dw__gpu_update_restart(dw__gpu_update *update, int64_t updates, void *stream);

/* Enqueues the copy of the step's numbers to the device; each step begins with it. A step with a loss above `limit` is
 * left out. Not to be recorded. */
dw_status dw__gpu_update_send(dw__gpu_update *update, double lr, double limit, void *stream);
/* Enqueues what follows backward of a micro-batch, whose loss lies at `loss`: its gradients and its loss, divided by
 * `batches`, are added to the step's. `data_error` as dw__gpu_data_error returns it. */
dw_status dw__gpu_update_add(dw__gpu_update *update, const float *loss, const unsigned *data_error,
                             double batches, void *stream);
/* The same for a loss without gradients. */
dw_status dw__gpu_update_add_loss(dw__gpu_update *update, const float *loss,
                                  const unsigned *data_error, double batches, void *stream);
/* Enqueues the norm of the gradients and AdamW, by the formula of dw_adamw_step. */
dw_status dw__gpu_update_run(dw__gpu_update *update, void *stream);
/* Enqueues the copy of the step's numbers to the host. They are there when the stream has been waited for. */
dw_status dw__gpu_update_receive(dw__gpu_update *update, void *stream,
                                 const dw_train_numbers **numbers);

#endif
