/* Rows that the grouped GEMM of sm_90a reads or stores by an index (sm90_gather.cuh). Plain C, read by the host and by
 * device code. */
#ifndef DW_SM90_GATHER_PARAMS_H
#define DW_SM90_GATHER_PARAMS_H

/* GATHER: the operand whose rows are read by an index. */
#define DW_SM90_GATHER_NONE 0
#define DW_SM90_GATHER_A 1
#define DW_SM90_GATHER_B 2

typedef struct dw_sm90_gather {
    /* With GATHER: row r of the operand is row in[r] of `rows`, which has `count` rows, `stride` elements apart. Rows are
     * 16-byte aligned and have a multiple of 8 elements. */
    const int *in;
    const void *rows;
    int count, stride;
    /* With SCATTER: row r of D is stored at row out[r]; all of these are below m. */
    const int *out;
    /* With WEIGHTS: an element of the operands' type for each row r, which multiplies it. */
    const void *weights;
} dw_sm90_gather;

#endif
