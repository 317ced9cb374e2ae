/* Elementwise programs on a GPU: CUDA source made at run time from a body (graph/body.h). */
#ifndef DW_ELEMENTWISE_H
#define DW_ELEMENTWISE_H

#include "kernel/cuda/iteration.h"
#include "kernel/elementwise_body.h"

/* How the source finds the elements of one tensor. */
typedef struct dw__elementwise_place {
    bool is_read;  /* element by element; always true for an output */
    bool is_seed;  /* read as a whole; never both (graph/body.c) */
    bool is_whole; /* an element's offset is its index in the iteration */
    bool
        is_vector; /* stride 1 along the last axis; else one element is read for the whole vector */
    uint8_t strides; /* a bit for each axis whose stride is a parameter */
} dw__elementwise_place;

/* The form of a program: with the body it determines the source. Everything here is a property of types, shapes,
 * strides and alignment. */
typedef struct dw__elementwise_form {
    uint32_t input_count, output_count;
    dw_dtype inputs[DW_MAX_INPUTS], outputs[DW_MAX_OUTPUTS];
    dw__elementwise_place in[DW_MAX_INPUTS], out[DW_MAX_OUTPUTS];
    int rank;   /* of the merged iteration */
    int vector; /* neighbouring elements of a thread: 1, 2, 4, 8 or 16, a divisor of the last axis */
    int turns;  /* vectors of a thread */
    uint64_t magnitudes; /* as in dw__call */
    bool is_wide;        /* offsets need 64 bits */
    bool divides;        /* a tensor needs the element's coordinates */
} dw__elementwise_form;

/* Threads of a block. A block computes `turns` times as many vectors, and the grid covers all of them. */
enum { DW__ELEMENTWISE_THREADS = 256 };

/* Fills the form of a call and its merged iteration, whose tensors are the inputs that are read and the outputs. Data
 * of the call's tensors matters by its alignment alone. */
void dw__elementwise_form_of(const dw__call *call, const dw__body *body, dw__elementwise_form *form,
                             dw__iteration *it);

/* The iteration alone, for a call whose form is known. */
void dw__elementwise_iterate(const dw__call *call, const dw__elementwise_form *form,
                             dw__iteration *it);

/* Appends the source of a kernel `elementwise`. Its parameter is an array of 64-bit words:
 *
 *     the number of vectors, the word for data errors and its mark,
 *     if the form divides, for each axis but the first: size (of the last axis: in vectors), the inverse of the size,
 *     for each input that is read and each output: address, the strides that the form marks,
 *     for each seed: address, stride
 *     for each vector of magnitudes: address
 *
 * Inputs are in order, then outputs, then magnitudes. */
dw_status dw__elementwise_source(const dw__body *body, const dw__elementwise_form *form,
                                 dw__text *source);
/* Appends the steps of a body for a group of lanes, from variables i0, i1, ... of its inputs to vectors out0, out1, ...
 * of the types `outputs`. */
dw_status dw__elementwise_print_steps(const dw__body *body, const dw_dtype *outputs,
                                      dw__text *source);
/* The type of cuda/common/element_types.h for an element. */
const char *dw__elementwise_element(dw_dtype dtype);
/* True of a body that may have data errors: it divides integers, or raises them to powers. */
bool dw__elementwise_may_fail(const dw__body *body);
/* DW_UNSUPPORTED if the program's body may have data errors; `what` says why, such as "divides integers". */
dw_status dw__elementwise_check(const dw__kernel *kernel, const dw__call *program,
                                const char *what);
/* True if the body reads input `i` as the key of random numbers and not otherwise. */
bool dw__elementwise_is_random_key(const dw__body *body, uint32_t i);
/* The inverse that quotient() of cuda/common/elementwise.cuh multiplies by; the size is below 2^31. */
int64_t dw__elementwise_inverse(int64_t size);
/* Number of words of that array. */
size_t dw__elementwise_words(const dw__elementwise_form *form);
/* Writes the array. `it`: the iteration of a call that has this form. */
void dw__elementwise_fill(const dw__elementwise_form *form, const dw__iteration *it,
                          const dw__operation_call *call, int64_t *words);

#endif
