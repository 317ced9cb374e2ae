/* Sorting of rows: the parameters of the kernels (sort.cu). Plain C, read by the host and by device code alike. */
#ifndef DW_SORT_PARAMS_H
#define DW_SORT_PARAMS_H

#define DW_SORT_AXES 8

/* Entries of a tile and threads of a block. Longer rows are sorted in tiles, then merged. */
#define DW_SORT_TILE 2048
#define DW_SORT_THREADS 256

/* top_k_rows, which has a warp for each row: entries of a row at most, and results. */
#define DW_TOP_K_LENGTH 512
#define DW_TOP_K_KEPT 32

typedef struct dw_sort_params {
    const void *x;
    void *values, *places; /* NULL: not wanted */
    long long count;       /* of rows */
    long long length;      /* entries of a row, fewer than 2^32 */
    long long kept;        /* of a row: the first ones are results */
    /* The axes of rows, with each tensor's strides in elements; the rank is at least 1. */
    long long shape[DW_SORT_AXES], x_stride[DW_SORT_AXES], values_stride[DW_SORT_AXES],
        places_stride[DW_SORT_AXES];
    long long x_step, values_step, places_step; /* from one element of a row to the next */
    int rank;
    int descending;
    /* Entries of all rows, in workspace: sort_tiles writes `to`; sort_merge reads `from` and writes `to`. `to` NULL:
     * the kernel is the last and writes the results. */
    const void *from;
    void *to;
    long long run; /* sort_merge: entries of a sorted run */
} dw_sort_params;

#endif
