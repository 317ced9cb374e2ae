/* Elementwise programs on a GPU: CUDA source made at run time from a body (graph/body.h). */
#ifndef DW_ELEMENTWISE_H
#define DW_ELEMENTWISE_H

#include "kernel/elementwise_body.h"

/* The types of the operands, and the rank of the merged iteration: with the body, they determine the source. */
typedef struct dw__elementwise_types {
    int rank;
    uint32_t input_count, output_count;
    dw_dtype inputs[DW_MAX_INPUTS], outputs[DW_MAX_OUTPUTS];
    bool is_read[DW_MAX_INPUTS]; /* element by element */
    bool is_seed[DW_MAX_INPUTS]; /* read as a whole; never both (graph/body.c) */
} dw__elementwise_types;

/* Sets is_read and is_seed. */
void dw__elementwise_mark(const dw__body *body, dw__elementwise_types *types);

/* Appends the source of a kernel `elementwise`. Its parameter is an array of 64-bit words:
 *
 *     count, the word for data errors and its mark, shape[rank],
 *     then for each input that is read, each seed and each output: address, stride[rank]
 *     (a seed: stride[0] alone counts)
 */
dw_status dw__elementwise_source(const dw__body *body, const dw__elementwise_types *types,
                                 dw__text *source);
/* Words of that array. */
size_t dw__elementwise_words(const dw__elementwise_types *types);

#endif
