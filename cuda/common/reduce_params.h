/* Reductions over axes of a strided tensor: the parameters of their kernels (reduce.cu). Plain C, read by the host and
 * by device code alike. */
#ifndef DW_REDUCE_PARAMS_H
#define DW_REDUCE_PARAMS_H

#define DW_REDUCE_AXES 8

/* REDUCTION */
#define DW_REDUCE_SUM 0
#define DW_REDUCE_MAX 1
#define DW_REDUCE_MIN 2
#define DW_REDUCE_PROD 3
#define DW_REDUCE_ARG_MAX 4 /* the index along the reduced axis, as I64 */
#define DW_REDUCE_ARG_MIN 5

/* Threads of a block. */
#define DW_REDUCE_THREADS 256

/* Results and threads of a block that combines the parts. */
#define DW_REDUCE_PARTS_RESULTS 32
#define DW_REDUCE_PARTS_THREADS 512

/* Elements of a vector: as many as 16 bytes hold, at most 8. */
#define DW_REDUCE_VECTOR(bytes) ((bytes) == 1 ? 8 : 16 / (bytes))

/* Loads of a thread in flight, each of a unit. */
#define DW_REDUCE_BATCH(columns, vector) ((vector) && !(columns) ? 4 : 8)

/* Blocks that an SM holds at once where a thread keeps 4 bytes for each result; fewer where it keeps more. */
#define DW_REDUCE_RESIDENT 4

/* Axes that stay and axes that are reduced, with the operand's strides in elements; each rank is at least 1.
 *
 * A unit is what one load reads: an element, or a vector of them. With COLUMNS, the elements of a vector belong to
 * neighbouring results; otherwise to one result, and then the last reduced axis is given in vectors. */
typedef struct dw_reduce_params {
    const void *x;
    void *result;
    void *partials;    /* SPLIT: [parts][count] of what a thread keeps */
    long long count;   /* of results */
    long long reduced; /* units that make one result; may be 0 */
    long long tail;    /* elements behind the last unit; 0 with COLUMNS or SPREAD */
    long long parts;   /* one block combines one part of the units: the next part_units */
    long long part_units;
    long long shape[DW_REDUCE_AXES], x_stride[DW_REDUCE_AXES], result_stride[DW_REDUCE_AXES];
    long long reduced_shape[DW_REDUCE_AXES], reduced_stride[DW_REDUCE_AXES];
    int rank, reduced_rank;
} dw_reduce_params;

#endif
