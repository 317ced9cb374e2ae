/* Parts of a training run, for programs that compute the steps themselves: token files in the order of a run, the
 * learning rate, and the norm of the gradients. deepwell.Trainer of Python is made of them. Such a run and one of
 * dw_trainer with the same options resume each other's checkpoints (checkpoints.h).
 *
 *     dw_trainer_options options = DW_TRAINER_OPTIONS_DEFAULT;
 *     dw_token_data *data;
 *     double lr;
 *     options.data = (const char *[]){"train.bin"}, options.data_count = 1;
 *     dw_token_data_open(&options, 50257, &data);
 *     for (int64_t step = 1; step <= options.steps; step++) {
 *         for (int64_t row = 0; row < options.batch; row++)
 *             dw_token_data_sample(data, (step - 1) * options.batch + row, tokens);
 *         dw_training_rate(&options, step, &lr);
 *         ...
 *     }
 *     dw_token_data_close(data);
 */
#ifndef DEEPWELL_TRAINING_H
#define DEEPWELL_TRAINING_H

#include "deepwell/trainer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dw_token_data dw_token_data;

/* Opens options->data (data_count, token_type, sequence, shuffle and seed are read too), reads all of them once and
 * computes their hashes. DW_INVALID_ARGUMENT: a token is not in [0, vocabulary), there is no whole sequence, or an
 * option is not valid. DW_UNSUPPORTED: text. DW_IO, DW_PARSE, DW_NOT_FOUND. */
DW_API dw_status dw_token_data_open(const dw_trainer_options *options, int64_t vocabulary,
                                    dw_token_data **data);
DW_API void dw_token_data_close(dw_token_data *data); /* may be NULL */
DW_API int64_t dw_token_data_tokens(const dw_token_data *data);
DW_API int64_t dw_token_data_sequences(const dw_token_data *data);
/* Reads the `sequence` + 1 tokens of a sample of the run, counted from 0: of the sequence that the order of its epoch
 * has there (docs/train.md). One thread at a time may call it. DW_IO; DW_INVALID_ARGUMENT: the sample is negative, or
 * the file has changed. */
DW_API dw_status dw_token_data_sample(dw_token_data *data, int64_t sample, int64_t *tokens);

/* Computes the learning rate of a step, from 1. DW_INVALID_ARGUMENT: the step, or an option of the schedule. */
DW_API dw_status dw_training_rate(const dw_trainer_options *options, int64_t step, double *lr);
/* Computes the Euclidean norm of `count` F32 tensors, summed in F64: the same bits on any number of threads. It is NaN
 * or infinite exactly if an element is. */
DW_API dw_status dw_gradient_norm(uint32_t count, const float *const *gradients,
                                  const int64_t *elements, double *norm);
/* Returns the JSON text of what identifies a run for its checkpoints: the options that change a step, and the data
 * (NULL: none). Release it with dw_text_free. DW_INVALID_ARGUMENT names an option that is not valid. */
DW_API dw_status dw_training_describe(const dw_trainer_options *options, const dw_token_data *data,
                                      char **run);

#ifdef __cplusplus
}
#endif
#endif
