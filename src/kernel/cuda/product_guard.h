/* The first-use guard of matrix products: the case that a kernel is tried on (product_guard.c), and whether D
 * is right (product_compare.c). */
#ifndef DW_CUDA_PRODUCT_GUARD_H
#define DW_CUDA_PRODUCT_GUARD_H

#include "kernel/cuda/guard.h"
#include "kernel/cuda/product.h"

typedef enum dw__guard_part {
    DW__GUARD_A,
    DW__GUARD_B,
    DW__GUARD_BIAS,
    DW__GUARD_RESIDUAL,
    DW__GUARD_FACTORS, /* A's, B's */
    DW__GUARD_SCALES_A,
    DW__GUARD_SCALES_B,
    DW__GUARD_D,
    DW__GUARD_SCALES_D,
    DW__GUARD_PARTS,
    DW__GUARD_VALUES = DW__GUARD_SCALES_A /* parts before have numbers of their own in `values` */
} dw__guard_part;

/* Codes are bytes; of D they are E4M3. */
typedef enum dw__guard_type {
    DW__GUARD_BF16,
    DW__GUARD_F16,
    DW__GUARD_F32,
    DW__GUARD_U8
} dw__guard_type;

typedef struct dw__product_part {
    int rows, columns;
    int pitch; /* elements, or bytes of codes, from row to row; those behind a row are NaNs, bytes of 0xFF */
    dw__guard_type type;
    size_t begin; /* bytes, in device memory and in `host` */
} dw__product_part;

typedef struct dw__product_trial {
    const dw__context *context;
    const dw__product_subject *subject;
    dw_product call;
    dw__product_part parts[DW__GUARD_PARTS];
    size_t bytes;
    char *device, *host;
    void *workspace;
    double *values
        [DW__GUARD_VALUES]; /* of what is read, row by row, without what lies behind; in one block */
    dw__guard frame;
} dw__product_trial;

/* The number at `at` of a part as it lies in `host`. */
float dw__product_trial_get(const dw__product_trial *t, dw__guard_part which, size_t at);

/* Whether what is in `host` is D; else `text` says what is not: "D[0][0] of ... is 1, expected 2 within 0.1". */
bool dw__product_trial_is_right(const dw__product_trial *t, char *text, size_t bytes);

#endif
