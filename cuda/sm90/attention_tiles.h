/* Tiles of attention forward on sm_90a, by head dimension: read by the host launcher, which passes them as defines,
 * and by the tests. Registers bound them: a thread of each consumer warpgroup holds tile_n / 2 scores, tile_n / 4
 * packed probabilities and head_dim / 2 output accumulators in 240 registers (two consumers) or 160 (three). Shared
 * memory holds Q and `stages` tiles each of K and V.
 */
#ifndef DW_SM90_ATTENTION_TILES_H
#define DW_SM90_ATTENTION_TILES_H

/* X(head_dim, windowed, keys, tile_m, tile_n, stages, consumers): for rows_k >= keys; the first row that fits is
 * used. windowed is 1 if a mask limits the keys that a query sees. tile_m = 64 * consumers. Measured on an H200 (176
 * keys: on an H100) over sequences of 512 to 16384: wide tiles of keys are faster for many keys, and slower for few,
 * because of the unused part of the last tile; under a causal mask, wide tiles of queries waste work on the diagonal.
 */
#define DW_SM90_FORWARD_TILES(X)                                                                   \
    X(64, 0, 0, 192, 128, 2, 3)                                                                    \
    X(64, 1, 1536, 192, 128, 2, 3)                                                                 \
    X(64, 1, 0, 128, 128, 2, 2)                                                                    \
    X(96, 0, 0, 128, 160, 2, 2)                                                                    \
    X(96, 1, 0, 128, 128, 2, 2)                                                                    \
    X(128, 0, 1536, 128, 176, 2, 2)                                                                \
    X(128, 0, 0, 128, 128, 2, 2)                                                                   \
    X(128, 1, 0, 128, 128, 2, 2)                                                                   \
    X(192, 0, 0, 128, 112, 2, 2)                                                                   \
    X(192, 1, 0, 128, 96, 2, 2)                                                                    \
    X(256, 0, 0, 128, 80, 2, 2)                                                                    \
    X(256, 1, 6144, 128, 80, 2, 2)                                                                 \
    X(256, 1, 0, 128, 64, 2, 2)

#endif
