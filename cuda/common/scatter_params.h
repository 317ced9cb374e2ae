/* Sums of rows by sorted indexes: the parameters of the kernels (scatter.cu). Plain C, read by the host and by device
 * code alike. */
#ifndef DW_SCATTER_PARAMS_H
#define DW_SCATTER_PARAMS_H

#include "data_error.h"

#define DW_SCATTER_THREADS 256
/* Entries that a block sorts: one of each of its threads. */
#define DW_SCATTER_RUN 512
#define DW_SCATTER_TILE 32    /* entries that one group of threads adds up */
#define DW_SCATTER_BATCH 4    /* addends that a thread reads before it adds the first */
#define DW_SCATTER_RESIDENT 2 /* blocks of scatter_rows that an SM holds at once */

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
    int ways;      /* scatter_merge: runs that become one, at most 32 */
    /* scatter_tiles and scatter_merge: pieces of the result, from the first to the one before the last, that are filled
     * with zeros */
    long long zeros_from, zeros_to;
    /* A bit for each row, set if it has addends: scatter_tiles clears all, the last scatter_merge sets them. scatter_rows
     * fills the other rows, from zero_row on, a multiple of 32. NULL: all zeros have been written. */
    unsigned *selected;
    int is_last_merge;
    long long zero_row;
    void *shares; /* [tiles, outers, 2, inners], of the type that sums have */
    int lanes;    /* threads side by side, a power of 2 */
    dw_data_error error;
} dw_scatter_params;

#endif
