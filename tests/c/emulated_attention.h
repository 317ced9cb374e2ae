/* Variants of sm_100's attention that the tests run on the emulator. CMake compiles one per row. */
#ifndef DW_EMULATED_ATTENTION_H
#define DW_EMULATED_ATTENTION_H

/* X(head_dim, window, tile_m, tile_n, stages, consumers, element, polynomial): tiles of
 * cuda/sm100/attention_forward_tiles.h. */
#define EMULATED_ATTENTION_FORWARD(X)                                                              \
    X(128, 0, 256, 128, 4, 2, 0, 0)                                                                \
    X(128, 1, 256, 128, 4, 2, 0, 0)                                                                \
    X(64, 0, 256, 128, 8, 2, 1, 0)                                                                 \
    X(64, 1, 256, 128, 8, 2, 0, 0)                                                                 \
    X(128, 1, 256, 128, 4, 2, 1, 0)                                                                \
    X(96, 1, 256, 128, 4, 2, 0, 0)                                                                 \
    X(128, 1, 256, 128, 4, 2, 0, 3)                                                                \
    X(64, 0, 256, 128, 8, 2, 1, 3)

#endif
