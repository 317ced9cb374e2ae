/* Attention forward of sm_100: its tiles, by head dimension, and what one takes of a multiprocessor. Plain C, read by
 * the host, which passes them on as defines, by device code and by tests. */
#ifndef DW_SM100_ATTENTION_FORWARD_TILES_H
#define DW_SM100_ATTENTION_FORWARD_TILES_H

#define DW_SM100_FORWARD_ROWS 128 /* of queries: a consumer's, a lane of tensor memory each */
#define DW_SM100_FORWARD_THREADS                                                                   \
    512 /* two consumers, corrections, and a warpgroup of load and product */
#define DW_SM100_FORWARD_BLOCKS(head_dim)                                                          \
    (((head_dim) + 63) / 64) /* of 64 columns: 128 bytes of a row */
#define DW_SM100_FORWARD_Q_BYTES(head_dim, tile_m)                                                 \
    ((tile_m)*128 * DW_SM100_FORWARD_BLOCKS(head_dim))
#define DW_SM100_FORWARD_KV_BYTES(head_dim, tile_n)                                                \
    ((tile_n)*128 * DW_SM100_FORWARD_BLOCKS(head_dim))
/* O on its way out: two boxes of 32 rows of 128 bytes for each of four warps. */
#define DW_SM100_FORWARD_BOX_ROWS 32
#define DW_SM100_FORWARD_BOX_BYTES (DW_SM100_FORWARD_BOX_ROWS * 128)
#define DW_SM100_FORWARD_OUT_BYTES (4 * 2 * DW_SM100_FORWARD_BOX_BYTES)
/* A factor for each row; barriers (two for each stage, 32 others); where tensor memory is. */
#define DW_SM100_FORWARD_FACTOR_BYTES(tile_m) (4 * (tile_m))
#define DW_SM100_FORWARD_BARRIER_BYTES(stages) (8 * (2 * (stages) + 32 + 1))
#define DW_SM100_FORWARD_SHARED_BYTES(head_dim, tile_m, tile_n, stages)                            \
    (DW_SM100_FORWARD_Q_BYTES(head_dim, tile_m) +                                                  \
     (stages)*DW_SM100_FORWARD_KV_BYTES(head_dim, tile_n) + DW_SM100_FORWARD_OUT_BYTES +           \
     DW_SM100_FORWARD_FACTOR_BYTES(tile_m) + DW_SM100_FORWARD_BARRIER_BYTES(stages))
#define DW_SM100_FORWARD_MOST_SHARED 232448 /* 227 KiB: of a block on sm_100 and sm_103 */
/* Of tensor memory, of 512; an allocation is a power of 2. Scores of two consumers, their outputs. */
#define DW_SM100_FORWARD_COLUMNS_USED(head_dim, tile_n) (2 * (tile_n) + 2 * (head_dim))
#define DW_SM100_FORWARD_COLUMNS 512

/* Of each 16 pairs of exponentials, those that are taken by a polynomial, beside the units of ex2: up to 3,
 * more want registers that are not there. Its results are as good after their rounding; a score that is no
 * number gives an infinity there. What is best depends on speed, which nobody has measured. */
#define DW_SM100_FORWARD_POLYNOMIAL 0

/* X(head_dim, windowed, keys, tile_m, tile_n, stages, consumers), as DW_SM90_FORWARD_TILES has them; a stage is
 * a tile of keys or of values. Not measured: no GPU of this family was at hand. */
#define DW_SM100_FORWARD_TILES(X)                                                                  \
    X(64, 0, 0, 256, 128, 8, 2)                                                                    \
    X(64, 1, 0, 256, 128, 8, 2)                                                                    \
    X(96, 0, 0, 256, 128, 4, 2)                                                                    \
    X(96, 1, 0, 256, 128, 4, 2)                                                                    \
    X(128, 0, 0, 256, 128, 4, 2)                                                                   \
    X(128, 1, 0, 256, 128, 4, 2)

#endif
