/* Tiles and memory of the attention backward kernels on sm_90a. Plain C, read by the host launcher and by device
 * code.
 */
#ifndef DW_ATTENTION_BACKWARD_LAYOUT_H
#define DW_ATTENTION_BACKWARD_LAYOUT_H

/* X(head_dim, windowed, tile_m, tile_n, stages_q, stages_do, consumers, serial_rows). windowed is 1 if a mask limits
 * the keys that a query sees. A thread block keeps tile_n keys and iterates over the queries tile_m at a time, with
 * stages_q and stages_do of those tiles in flight. Registers bound the tiles: up to head dimension 128 a thread holds
 * head_dim accumulators of dK and dV, tile_m scores and as many of their derivatives (halves of both); above 128 it
 * holds tile_n * head_dim / (64 * consumers) accumulators.
 *
 * For up to serial_rows queries per key-value head, SERIAL was faster on an H200 if there are enough heads. */
#define DW_SM90_BACKWARD_TILES(X)                                                                  \
    X(64, 0, 128, 128, 2, 2, 2, 512)                                                               \
    X(64, 1, 128, 128, 2, 2, 2, 1024)                                                              \
    X(96, 0, 64, 128, 2, 2, 2, 0)                                                                  \
    X(96, 1, 64, 128, 2, 2, 2, 0)                                                                  \
    X(128, 0, 64, 128, 2, 2, 2, 0)                                                                 \
    X(128, 1, 64, 128, 2, 2, 2, 512)                                                               \
    X(192, 0, 64, 96, 2, 2, 3, 0)                                                                  \
    X(192, 1, 64, 96, 2, 2, 3, 0)                                                                  \
    X(256, 0, 64, 80, 2, 1, 2, 0)                                                                  \
    X(256, 1, 64, 80, 2, 1, 2, 0)

/* Columns of a tile in shared memory and in the dQ accumulators. */
#define DW_BACKWARD_COLUMNS(head_dim) (((head_dim) + 63) / 64 * 64)

/* Bytes for buffers of scores: three of dS up to head dimension 128, two of P and dS above. */
#define DW_BACKWARD_SCORES(head_dim, tile_m, tile_n)                                               \
    ((head_dim) <= 128 ? 3 * (tile_m) * (tile_n)*2 : 2 * 2 * (tile_n)*128)

/* F32 numbers that are kept for the queries of a tile: the scaled LSE of each, the delta of each, and a flag for
 * large LSEs (padded to a multiple of 16 bytes). */
#define DW_BACKWARD_STATISTICS(tile_m) (2 * (tile_m) + 4)

/* Dynamic shared memory of the main kernel in bytes: alignment, tiles of K and V, Q, dO, scores, statistics of the
 * queries, barriers. */
#define DW_BACKWARD_SHARED(head_dim, tile_m, tile_n, stages_q, stages_do)                          \
    (1024 +                                                                                        \
     DW_BACKWARD_COLUMNS(head_dim) * 2 * (2 * (tile_n) + ((stages_q) + (stages_do)) * (tile_m)) +  \
     DW_BACKWARD_SCORES(head_dim, tile_m, tile_n) +                                                \
     (stages_q)*DW_BACKWARD_STATISTICS(tile_m) * 4 + 256)

/* The kernel of a bias's gradient: tiles of queries by keys, a ring of stages with 64 columns of both, and barriers. */
#define DW_BACKWARD_BIAS_ROWS 128
#define DW_BACKWARD_BIAS_STAGES 4
#define DW_BACKWARD_BIAS_THREADS (128 * 3)
#define DW_BACKWARD_BIAS_SHARED                                                                    \
    (1024 + DW_BACKWARD_BIAS_STAGES * 2 * DW_BACKWARD_BIAS_ROWS * 128 + 128)

#endif
