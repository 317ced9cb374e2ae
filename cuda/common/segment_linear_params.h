/* Products of rows that are sorted by group: the parameters of their kernels (segment_linear.cu). Plain C, read by the
 * host and by device code alike. */
#ifndef DW_SEGMENT_LINEAR_PARAMS_H
#define DW_SEGMENT_LINEAR_PARAMS_H

#include "data_error.h"

/* Group e has the rows offsets[e] to offsets[e+1] of `rows`. Strides in elements; those of a group lead from one
 * group's matrix to the next. Of segment_linear A is x [rows, k], B the matrices [k, n], and the result Y [rows, n];
 * of segment_linear_backward_weight A is x [rows, m], whose rows are multiplied with those of B, y [rows, n], and Y
 * the matrices [m, n]. */
typedef struct dw_segment_linear_params {
    const void *a, *b;
    const void *bias;   /* segment_linear; NULL: none */
    const void *addend; /* added to Y, and may be Y; NULL: none */
    const int *offsets; /* groups + 1 */
    void *y;
    long long rows, m, n, k;
    long long groups;
    long long offsets_step;
    long long a_row, a_column, b_group, b_row, b_column, bias_group, bias_column;
    long long y_group, y_row, y_column, addend_group, addend_row, addend_column;
    dw_data_error error; /* DW_DATA_INDEX: offsets that do not ascend from 0 to `rows` */
} dw_segment_linear_params;

#endif
