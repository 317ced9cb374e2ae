/* Variants of block quantization on Hopper and Blackwell that the tests run on the emulator. CMake compiles
 * one per row. */
#ifndef DW_EMULATED_QUANTIZE_H
#define DW_EMULATED_QUANTIZE_H

/* X(input, scheme, rule, rows, columns, square): cuda/common/quantize_params.h, cuda/common/scheme_params.h. */
#define EMULATED_QUANTIZE(X)                                                                       \
    X(0, 6, 1, 1, 1, 0)                                                                            \
    X(1, 7, 2, 1, 1, 0)                                                                            \
    X(2, 6, 3, 1, 1, 1)                                                                            \
    X(2, 7, 1, 0, 1, 0)                                                                            \
    X(0, 10, 1, 1, 1, 0)                                                                           \
    X(0, 11, 1, 1, 1, 0)                                                                           \
    X(2, 11, 1, 1, 1, 1)                                                                           \
    X(1, 11, 1, 1, 0, 0)

#endif
