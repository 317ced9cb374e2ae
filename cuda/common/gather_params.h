/* Gathers and scatters along one axis by a tensor of indexes: the parameters of their kernels (gather.cu). Plain C,
 * read by the host and by device code alike. */
#ifndef DW_GATHER_PARAMS_H
#define DW_GATHER_PARAMS_H

#include "data_error.h"

#define DW_GATHER_AXES 8

/* Blocks of gather that an SM holds at once: more would begin when the others end. */
#define DW_GATHER_RESIDENT 5

/* The axes of the result, with each tensor's strides along them, in elements; in a gather, in units of `VECTOR`
 * elements (the indexes' in elements), as are count and x_step. */
typedef struct dw_gather_params {
    const void *x; /* gather: the tensor indexed; scatter: the addends */
    const void *index;
    void *result;
    long long count; /* of results */
    long long shape[DW_GATHER_AXES], x_stride[DW_GATHER_AXES], index_stride[DW_GATHER_AXES],
        result_stride[DW_GATHER_AXES];
    int rank;
    int axis;            /* scatter: the result's axis that the indexes select from */
    long long axis_size; /* indexes are from 0 to axis_size - 1 */
    /* gather: x's stride along the axis; scatter: from one addend to the next */
    long long x_step;
    /* scatter: how many indexes select for one place, and from one to the next */
    long long indexes, index_step;
    /* scatter: results beyond these coordinates have no addend */
    long long index_shape[DW_GATHER_AXES];
    dw_data_error error;
} dw_gather_params;

#endif
