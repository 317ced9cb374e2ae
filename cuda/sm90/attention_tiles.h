/* Tiles of the attention kernels on sm_90a, by head dimension: read by the host launcher, which passes them on as
 * defines, and by the tests. Registers bound them: per thread and consumer warpgroup the forward holds
 * tile_n / 2 scores, tile_n / 4 packed probabilities and head_dim / 2 sums of the output, in 240 registers
 * (two consumers) or 160 (three); shared memory holds Q and `stages` tiles each of K and V. */
#ifndef DW_SM90_ATTENTION_TILES_H
#define DW_SM90_ATTENTION_TILES_H

/* X(head_dim, windowed, tile_m, tile_n, stages, consumers): windowed 1 where a mask limits what rows see: smaller
 * tiles of keys waste less on the diagonal. tile_m = 64 * consumers. */
#define DW_SM90_FORWARD_TILES(X)                                                                   \
    X(64, 0, 192, 128, 2, 3)                                                                       \
    X(64, 1, 192, 128, 2, 3)                                                                       \
    X(96, 0, 128, 160, 2, 2)                                                                       \
    X(96, 1, 128, 128, 2, 2)                                                                       \
    X(128, 0, 128, 176, 2, 2)                                                                      \
    X(128, 1, 128, 128, 2, 2)                                                                      \
    X(192, 0, 128, 112, 2, 2)                                                                      \
    X(192, 1, 128, 96, 2, 2)                                                                       \
    X(256, 0, 128, 80, 2, 2)                                                                       \
    X(256, 1, 128, 80, 2, 2)

#endif
