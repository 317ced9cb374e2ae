/* Sums of rows by sorted indexes: the parameters of the kernels (scatter.cu). Plain C, read by the host and by device
 * code alike. */
#ifndef DW_SCATTER_PARAMS_H
#define DW_SCATTER_PARAMS_H

#include "data_error.h"

#define DW_SCATTER_THREADS 256
#define DW_SCATTER_TILE 32 /* entries that one group of threads adds up */
#define DW_SCATTER_BATCH 4 /* addends that a thread reads before it adds the first */

/* Addends are [outers, count, inners], results [outers, rows, inners], both contiguous.
 *
 * With `along` each element has an index of its own, along one axis: addends and indexes are [.., along_count, along_inners]
 * and results [.., along, along_inners]. All elements are then rows of one element: outers and inners are 1, and `count`
 * and `rows` are of all of them. */
typedef struct dw_scatter_params {
    const void *index; /* `count` contiguous integers */
    const void *x;     /* addends */
    void *result;
    long long count;   /* of indexes, fewer than 2^32 */
    long long rows;    /* indexes are from 0 to rows - 1; fewer than 2^32 - 1 */
    long long padding; /* an index whose addends are left out; -1: none */
    long long along, along_count, along_inners; /* along 0: indexes select rows */
    int accumulates; /* adds to the result's contents, which are zeros otherwise */
    long long outers, inners;
    const void
        *from; /* entries in workspace: scatter_merge, scatter_rows and scatter_finish read them */
    void *to;  /* scatter_tiles and scatter_merge write them */
    long long run; /* scatter_merge: entries of a sorted run */
    void *shares;  /* [tiles, outers, 2, inners], of the type that sums have */
    int lanes;     /* threads side by side, a power of 2 */
    dw_data_error error;
} dw_scatter_params;

#endif
