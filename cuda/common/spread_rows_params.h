/* Rows copied to places and back: the parameters of their kernels (spread_rows.cu). Plain C, read by the host and by
 * device code alike. */
#ifndef DW_SPREAD_ROWS_PARAMS_H
#define DW_SPREAD_ROWS_PARAMS_H

#include "data_error.h"

/* Row t of `tokens` has the places place[t, j] for j below `each`, and a weight for each of them. Strides in elements;
 * results are contiguous. */
typedef struct dw_spread_rows_params {
    const void *x;      /* spread: [tokens, width]; else [tokens * each, width] */
    const void *dy;     /* backward: [tokens, width] */
    const void *weight; /* NULL: none */
    const int *place;
    void *y;       /* the result; backward: dx, NULL if nobody reads it */
    void *dweight; /* backward: [tokens, each], or NULL */
    long long tokens, each;
    long long width; /* in units of VECTOR elements */
    long long x_row, x_column, dy_row, dy_column, place_row, place_column, weight_row, weight_column;
    dw_data_error error; /* DW_DATA_INDEX: a place outside of [0, tokens * each) */
} dw_spread_rows_params;

#endif
