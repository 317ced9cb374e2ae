/* Rows sorted by group: the parameters of its kernels (group_rows.cu). Plain C, read by the host and by device code
 * alike. */
#ifndef DW_GROUP_ROWS_PARAMS_H
#define DW_GROUP_ROWS_PARAMS_H

#include "data_error.h"

#define DW_GROUP_ROWS_THREADS 256
#define DW_GROUP_ROWS_MOST 1024 /* groups, whose counts a block keeps in shared memory */
#define DW_GROUP_ROWS_TILES 256 /* at most, and rows of a tile at least: */
#define DW_GROUP_ROWS_TILE 1024

typedef struct dw_group_rows_params {
    const void *index;
    long long index_step;
    int *order, *place, *offsets; /* NULL: not read by anyone */
    int *counts;                  /* [tiles, groups]: the rows of each group in each tile */
    int rows, groups, tiles;
    int tile; /* rows of a tile, a multiple of the block's threads */
    dw_data_error error;
} dw_group_rows_params;

#endif
