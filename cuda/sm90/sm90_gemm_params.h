/* The GEMM of sm_90a: launch parameters, and the resources of a variant. Plain C, read by the host and by device code.
 */
#ifndef DW_SM90_GEMM_PARAMS_H
#define DW_SM90_GEMM_PARAMS_H

#include "common/data_error.h"
#include "common/fp8_block_codes_params.h"
#include "common/gemm_groups.h"
#include "sm90_gather_params.h"
#include "sm90_loss_params.h"
#include "sm90_rope_params.h"

/* An elementwise program behind a GEMM (sm90_program.cuh): at most so many operands beside D, vectors with an element for
 * each row, and results. */
#define DW_SM90_MOST_OPERANDS 3
#define DW_SM90_MOST_VECTORS 2
#define DW_SM90_MOST_RESULTS 4

/* Tiles whose contraction several blocks share (sm90_split.cuh). */
typedef struct dw_sm90_split {
    int alone;                 /* the first tiles, with a block each: whole rounds of the grid */
    int blocks;                /* that share the steps of all others, which are at least as many */
    int share, rest;           /* the number of these steps, divided by that of the blocks */
    int order;                 /* of tiles: DW_SM90_BANDS, ... */
    unsigned long long mark;   /* not 0 */
    float *sums;               /* of a tile, for each of the blocks */
    unsigned long long *flags; /* two for each of the blocks */
} dw_sm90_split;
enum { DW_SM90_BANDS, DW_SM90_ALONG_M, DW_SM90_ALONG_N };
#define DW_SM90_SPLIT_SUMS_BYTES(tile_m, tile_n, blocks) ((size_t)(blocks) * (tile_m) * (tile_n)*4)
#define DW_SM90_SPLIT_FLAGS_BYTES(blocks) ((size_t)(blocks)*2 * 8)

typedef struct dw_sm90_gemm_params {
    /* m: rows of D, of all groups together with DW_GROUPS_ROWS; n: columns of D, or of each half of it (PROGRAM_HALVES),
     * with SwiGLU or such halves B has 2 n rows; k: length of the contraction, of all groups together with
     * DW_GROUPS_CONTRACTION. k may be 0: the accumulators are 0. */
    int m, n, k;
    int groups;           /* 1 or more */
    int tiles_m, tiles_n; /* of a matrix of D; tiles_m is not used with DW_GROUPS_ROWS */
    float alpha;          /* factor of the accumulators, applied first */
    const void *bias; /* as many elements as B has rows, for each matrix of B; NULL without BIAS */
    const void *residual;
    void *d;
    long long stride_d, stride_residual; /* elements from row to row */
    long long group_d,
        group_residual;  /* elements from group to group; not used with DW_GROUPS_ROWS */
    const int *offsets;  /* groups + 1 rows, ascending; NULL with DW_GROUPS_BATCH */
    dw_data_error error; /* of offsets that do not ascend from 0 to at most the rows */
    /* Codes alone: the scale of A, and that of matrix g of B at scale_b[g * scale_b_step]. With BLOCKS the scales of
     * blocks: that of row i and block k of the contraction is at k * rows + i, or, of square blocks, at
     * i / 128 * wide + k. With ROW_SCALES that of row i is at i. */
    const float *scale_a, *scale_b;
    int scale_b_step;   /* 0: one scale for all */
    int wide_a, wide_b; /* square blocks alone */
    /* With a program: its results and operands have D's type and its shape, or that of a half of it. D itself is stored
     * if `d` is not NULL. Strides are elements from row to row. */
    void *results[DW_SM90_MOST_RESULTS];
    const void *operands[DW_SM90_MOST_OPERANDS];
    const void *vectors[DW_SM90_MOST_VECTORS];
    long long result_strides[DW_SM90_MOST_RESULTS], operand_strides[DW_SM90_MOST_OPERANDS],
        vector_strides[DW_SM90_MOST_VECTORS];
    /* The key of programs that draw random numbers: seed and offset, so many words apart. */
    const long long *random_key;
    long long random_key_stride;
    dw_sm90_rope rope;     /* with PROGRAM_ROPE */
    dw_sm90_split split;   /* with SPLIT */
    dw_sm90_loss loss;     /* with LOSS; D may be NULL if it is for statistics */
    dw_sm90_gather gather; /* with GATHER, SCATTER or WEIGHTS */
    /* Partial sums of results' columns (PROGRAM_SUMS): n F32 for each tile of rows, or NULL. */
    float *sums[DW_SM90_MOST_RESULTS];
    const float *row_factors; /* m, with ROW_FACTORS */
    float *row_squares;       /* tiles_n times m, with ROW_SQUARES */
    /* With PAIR: the product with the other matrix B, which is not stored if NULL, and its bias. Members of programs are
     * results alone. */
    void *second_d;
    long long stride_second_d;
    const void *second_bias;
    /* With CODED: codes of D and their places; x, strides and numbers of tiles are not used. */
    dw_fp8_block_codes_params codes;
} dw_sm90_gemm_params;

/* sm90_row_squares.cu */
typedef struct dw_sm90_row_squares_params {
    const float *partials;
    float *result;
    int rows, tiles, columns;
    int norm;
    float epsilon;
} dw_sm90_row_squares_params;

/* Tiles: X(tile_m, tile_n, stages, together, cluster). Two warpgroups compute a tile together, or each every other tile.
 * 64 x 256 is for groups of few rows, of which tiles of 128 would be half empty. Those with a cluster are for one GEMM with
 * few tiles: so many blocks compute a tile, each a part of the contraction (sm90_cluster.cuh). */
#define DW_SM90_GEMM_TILES(X)                                                                      \
    X(128, 128, 7, 0, 0)                                                                           \
    X(64, 256, 5, 0, 0)                                                                            \
    X(128, 256, 4, 1, 0)                                                                           \
    X(128, 192, 5, 1, 0)                                                                           \
    X(128, 96, 8, 1, 1)                                                                            \
    X(128, 128, 7, 1, 1)                                                                           \
    X(64, 128, 9, 1, 1)                                                                            \
    X(64, 64, 12, 1, 2)                                                                            \
    X(64, 128, 8, 1, 2)                                                                            \
    X(128, 128, 6, 1, 2)                                                                           \
    X(128, 128, 5, 1, 3)

#define DW_SM90_GEMM_STEP 64 /* elements of the contraction in a stage: 128 bytes, a swizzled row */
#define DW_SM90_MULTIPLIERS 2                                  /* warpgroups that multiply */
#define DW_SM90_GEMM_THREADS (128 * (DW_SM90_MULTIPLIERS + 1)) /* one warpgroup loads */
#define DW_SM90_STAGE_BYTES(tile_m, tile_n) (((tile_m) + (tile_n)) * 128)
/* Each warp that multiplies has the bias of its tile. */
#define DW_SM90_BIAS_BYTES(tile_n) (DW_SM90_MULTIPLIERS * 4 * (tile_n)*2)
#define DW_SM90_GEMM_SHARED_BYTES(tile_m, tile_n, stages)                                          \
    ((stages)*DW_SM90_STAGE_BYTES(tile_m, tile_n) + DW_SM90_BIAS_BYTES(tile_n) + 2 * 8 * (stages))
/* Sums that a block of a cluster gets from the others: those of as many strips of 32 columns as a block has at most. */
#define DW_SM90_CLUSTER_BYTES(tile_m, tile_n, cluster)                                             \
    (((cluster)-1) * (((tile_n) / 32 + (cluster)-1) / (cluster)) * (tile_m)*32 * 4)
#define DW_SM90_MOST_SHARED 232448 /* 227 KiB: the limit of a block */

/* A program behind a GEMM has a warpgroup of its own, to which the others leave D's rows in shared memory. Rows are 16
 * bytes apart from each other, so that the accumulators of a warp lie in different banks. */
#define DW_SM90_PROGRAM_THREADS (DW_SM90_GEMM_THREADS + 128)
#define DW_SM90_LINE_BYTES(tile_n) ((tile_n)*2 + 16)
#define DW_SM90_PROGRAM_SHARED_BYTES(tile_m, tile_n, stages, bias)                                 \
    ((stages)*DW_SM90_STAGE_BYTES(tile_m, tile_n) + (tile_m)*DW_SM90_LINE_BYTES(tile_n) +          \
     ((bias) ? DW_SM90_BIAS_BYTES(tile_n) : 0) + 2 * 8 * (stages) + 2 * 8 * DW_SM90_MULTIPLIERS)

/* Sums of the results' columns (sm90_program_sums.cuh): a thread's units have the columns of so many, and all threads
 * leave theirs in shared memory. */
#define DW_SM90_SUM_PHASES(columns) ((columns) % 3 == 0 ? 3 : 1)
#define DW_SM90_SUM_BYTES(columns) (DW_SM90_SUM_PHASES(columns) * 128 * 8 * 4)

/* CODED, which codes of fp8-block D becomes: 0 for none, or a sum. Codes along rows always are made. */
#define DW_SM90_CODED 1
#define DW_SM90_CODED_TURNED 2 /* those along columns, too */
#define DW_SM90_CODED_D 4      /* D itself, too */
/* For the columns of a tile: maxima of each warp, factors, and what each warp says about its columns; two barriers. */
#define DW_SM90_CODED_BYTES(columns)                                                               \
    (DW_SM90_MULTIPLIERS * 4 * ((columns)*2 + 4) + (columns)*8 + 2 * 8)

/* Codes with two levels of sums: a warpgroup multiplies panels of so many columns. */
#define DW_SM90_PANEL_COLUMNS 128
/* F32 scales of the blocks of a stage's rows of A and of B. */
#define DW_SM90_BLOCK_SCALES_BYTES(tile_m, tile_n) (((tile_m) + (tile_n)) * 4)
/* F32 scales of a tile's columns, then of 64 or 128 rows, for each warp. */
#define DW_SM90_ROW_SCALES_BYTES(tile_m, tile_n)                                                   \
    (DW_SM90_MULTIPLIERS * 4 * ((tile_n) + (tile_m)) * 4)

/* Elements of the contraction in a stage of codes of FP8, 128 bytes, too, and of a block of fp8-block. */
#define DW_SM90_CODES_STEP 128
#define DW_SM90_BLOCK 128

/* BLOCKS, whether codes have scales of blocks: 0 if not, or a sum. Blocks that are not square are 1 x 128. */
#define DW_SM90_BLOCKS 1
#define DW_SM90_SQUARE_A 2
#define DW_SM90_SQUARE_B 4

#endif
