/* Launch parameters of the kernels of a training step (train_step.cu). Plain C, read by the host and by device code. */
#ifndef DW_TRAIN_STEP_PARAMS_H
#define DW_TRAIN_STEP_PARAMS_H

#include "adamw_params.h"

#define DW_TRAIN_THREADS 256
#define DW_TRAIN_VECTOR 8 /* elements of a thread */

/* A step's numbers in the GPU's memory. The host writes them before the step, with zeros for what the step computes. */
typedef struct dw_train_numbers {
    double loss;  /* the sum over micro-batches of their losses, each divided by their number */
    double limit; /* the step is not applied if the loss is above it */
    dw_adamw_told told; /* by the update */
    float found_inf;    /* 1: a loss was not finite or too large, or the data had an error */
    float lr;
    int micro; /* micro-batches so far */
} dw_train_numbers;

typedef struct dw_train_loss_params {
    dw_train_numbers *numbers;
    const float *loss;                   /* of the micro-batch */
    const volatile unsigned *data_error; /* not 0: an error (data_error.h) */
    double batches;                      /* losses are divided by it */
} dw_train_loss_params;

/* Counts of elements are multiples of DW_TRAIN_VECTOR, and blocks begin at multiples of 16 bytes. */
typedef struct dw_train_add_params {
    const dw_train_numbers *numbers;
    const void *part; /* gradients of the micro-batch, of the type ELEMENT */
    float *sum; /* gradients of those so far; the first micro-batch's replaces what it holds */
    long long count;
} dw_train_add_params;

typedef struct dw_train_round_params {
    const float *from;
    void *to; /* of the type ELEMENT */
    long long count;
} dw_train_round_params;

#endif
