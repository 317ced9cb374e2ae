/* Tiles of attention forward on sm_100, by head dimension, and the resources of a tile. Plain C, read by the host,
 * which passes them as defines, by device code and by tests.
 */
#ifndef DW_SM100_ATTENTION_FORWARD_TILES_H
#define DW_SM100_ATTENTION_FORWARD_TILES_H

#define DW_SM100_FORWARD_ROWS 128 /* queries of a consumer, one per lane of tensor memory */
#define DW_SM100_FORWARD_THREADS                                                                   \
    512 /* two consumers, corrections, and a warpgroup for load and multiply */
#define DW_SM100_FORWARD_BLOCKS(head_dim)                                                          \
    (((head_dim) + 63) / 64) /* blocks of 64 columns: 128 bytes of a row */
#define DW_SM100_FORWARD_Q_BYTES(head_dim, tile_m)                                                 \
    ((tile_m)*128 * DW_SM100_FORWARD_BLOCKS(head_dim))
#define DW_SM100_FORWARD_KV_BYTES(head_dim, tile_n)                                                \
    ((tile_n)*128 * DW_SM100_FORWARD_BLOCKS(head_dim))
/* Staging of O: two boxes of 32 rows of 128 bytes for each of four warps. */
#define DW_SM100_FORWARD_BOX_ROWS 32
#define DW_SM100_FORWARD_BOX_BYTES (DW_SM100_FORWARD_BOX_ROWS * 128)
#define DW_SM100_FORWARD_OUT_BYTES (4 * 2 * DW_SM100_FORWARD_BOX_BYTES)
/* A factor for each row; barriers (two for each stage, 32 others); the address of tensor memory. */
#define DW_SM100_FORWARD_FACTOR_BYTES(tile_m) (4 * (tile_m))
#define DW_SM100_FORWARD_BARRIER_BYTES(stages) (8 * (2 * (stages) + 32 + 1))
#define DW_SM100_FORWARD_SHARED_BYTES(head_dim, tile_m, tile_n, stages)                            \
    (DW_SM100_FORWARD_Q_BYTES(head_dim, tile_m) +                                                  \
     (stages)*DW_SM100_FORWARD_KV_BYTES(head_dim, tile_n) + DW_SM100_FORWARD_OUT_BYTES +           \
     DW_SM100_FORWARD_FACTOR_BYTES(tile_m) + DW_SM100_FORWARD_BARRIER_BYTES(stages))
/* 227 KiB: the limit of a block on sm_100 and sm_103. */
#define DW_SM100_FORWARD_MOST_SHARED 232448
/* Columns of tensor memory, of 512 (an allocation is a power of 2): scores of two consumers and their outputs. */
#define DW_SM100_FORWARD_COLUMNS_USED(head_dim, tile_n) (2 * (tile_n) + 2 * (head_dim))
#define DW_SM100_FORWARD_COLUMNS 512

/* The number of exponentials, out of 16 pairs, that a polynomial computes instead of the units of ex2. At most 3: more
 * need registers that are not available. Results are as accurate after rounding; a NaN score gives an infinity in the
 * polynomial. The best value depends on speed, which has not been measured. */
#define DW_SM100_FORWARD_POLYNOMIAL 0

/* X(head_dim, windowed, keys, tile_m, tile_n, stages, consumers) as in DW_SM90_FORWARD_TILES; a stage is a tile of
 * keys or of values. Not measured: no GPU of this family was available. */
#define DW_SM100_FORWARD_TILES(X)                                                                  \
    X(64, 0, 0, 256, 128, 8, 2)                                                                    \
    X(64, 1, 0, 256, 128, 8, 2)                                                                    \
    X(96, 0, 0, 256, 128, 4, 2)                                                                    \
    X(96, 1, 0, 256, 128, 4, 2)                                                                    \
    X(128, 0, 0, 256, 128, 4, 2)                                                                   \
    X(128, 1, 0, 256, 128, 4, 2)

#endif
