/* Variants of sm_100's block-scaled GEMMs that the tests run on the emulator. CMake compiles one per row. */
#ifndef DW_EMULATED_GEMM_SCALED_H
#define DW_EMULATED_GEMM_SCALED_H

/* X(scheme_a, scheme_b, ctas, tile_n, stages, element, output, activation, bias, residual, schedule): tiles of
 * cuda/sm100/gemm_tiles.h. */
#define EMULATED_GEMM_SCALED(X)                                                                    \
    X(6, 6, 1, 128, 5, 0, 0, 0, 0, 0, 0)                                                           \
    X(7, 6, 1, 192, 4, 0, 1, 0, 1, 1, 0)                                                           \
    X(6, 6, 1, 256, 3, 0, 0, 3, 1, 0, 0)                                                           \
    X(6, 7, 2, 192, 6, 1, 0, 1, 0, 1, 1)                                                           \
    X(6, 6, 2, 256, 5, 0, 1, 0, 0, 0, 0)                                                           \
    X(11, 11, 1, 128, 5, 0, 0, 2, 1, 0, 1)                                                         \
    X(11, 11, 1, 256, 3, 0, 1, 0, 0, 1, 0)                                                         \
    X(11, 11, 2, 192, 5, 1, 0, 0, 1, 0, 0)                                                         \
    X(11, 11, 2, 256, 5, 0, 0, 3, 0, 1, 0)                                                         \
    X(6, 6, 1, 256, 3, 0, 2, 0, 0, 0, 0)                                                           \
    X(11, 11, 2, 256, 5, 0, 2, 3, 0, 0, 0)                                                         \
    X(10, 10, 1, 256, 3, 0, 0, 1, 0, 0, 0)                                                         \
    X(10, 10, 2, 256, 5, 0, 1, 0, 0, 0, 1)

#endif
