/* Variants of sm_100's GEMM that the tests run on the emulator. CMake compiles one per row. */
#ifndef DW_EMULATED_GEMM_H
#define DW_EMULATED_GEMM_H

/* X(ctas, tile_n, stages, element, output, activation, bias, residual, schedule): tiles of cuda/sm100/gemm_tiles.h. */
#define EMULATED_GEMM(X)                                                                           \
    X(1, 128, 6, 0, 0, 0, 0, 0, 0)                                                                 \
    X(1, 256, 4, 0, 1, 0, 1, 1, 0)                                                                 \
    X(1, 64, 8, 0, 0, 1, 1, 1, 0)                                                                  \
    X(1, 128, 6, 1, 0, 3, 0, 0, 0)                                                                 \
    X(2, 256, 6, 0, 0, 0, 0, 0, 0)                                                                 \
    X(2, 256, 6, 0, 1, 2, 1, 0, 0)                                                                 \
    X(2, 128, 8, 0, 0, 3, 1, 1, 0)                                                                 \
    X(1, 128, 6, 0, 2, 1, 1, 0, 0)                                                                 \
    X(2, 256, 6, 0, 2, 0, 0, 0, 0)                                                                 \
    X(2, 256, 6, 1, 2, 3, 1, 0, 1)                                                                 \
    X(1, 128, 6, 0, 0, 0, 0, 0, 1)                                                                 \
    X(2, 256, 6, 0, 1, 2, 1, 0, 1)

#endif
