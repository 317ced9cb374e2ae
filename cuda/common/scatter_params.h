/* Sums of rows by sorted indexes: the parameters of the kernels (scatter.cu). Plain C, read by the host and by device
 * code alike. */
#ifndef DW_SCATTER_PARAMS_H
#define DW_SCATTER_PARAMS_H

#include "data_error.h"

#define DW_SCATTER_THREADS 256

/* Addends are [outers, count, inners], results [outers, rows, inners], both contiguous. */
typedef struct dw_scatter_params {
    const void *index; /* `count` contiguous integers */
    const void *x;     /* addends */
    void *result;
    long long count;   /* of indexes, fewer than 2^32 */
    long long rows;    /* indexes are from 0 to rows - 1; fewer than 2^32 - 1 */
    long long padding; /* an index whose addends are left out; -1: none */
    int accumulates;   /* adds to the result's contents, which are zeros otherwise */
    long long outers, inners;
    const void *from; /* entries in workspace: scatter_merge and scatter_rows read them */
    void *to;         /* scatter_tiles and scatter_merge write them */
    long long run;    /* scatter_merge: entries of a sorted run */
    int lanes; /* scatter_rows: threads side by side, a power of 2; the others divide the addends */
    dw_data_error error;
} dw_scatter_params;

#endif
