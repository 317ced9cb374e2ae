/* Variants of softmax that the tests run on an emulated Hopper GPU. CMake compiles one per row. */
#ifndef DW_EMULATED_SOFTMAX_H
#define DW_EMULATED_SOFTMAX_H

/* X(type, logarithm, lanes, vectors, aligned): the defines of cuda/common/softmax.cu. */
#define EMULATED_SOFTMAX(X)                                                                        \
    X(0, 0, 32, 1, 0)                                                                              \
    X(0, 0, 32, 1, 1)                                                                              \
    X(0, 0, 32, 4, 1)                                                                              \
    X(0, 1, 32, 1, 0)                                                                              \
    X(1, 0, 256, 1, 1)                                                                             \
    X(1, 1, 32, 4, 0)                                                                              \
    X(2, 0, 256, 2, 0)                                                                             \
    X(2, 1, 256, 1, 1)                                                                             \
    X(2, 1, 1024, 2, 1)                                                                            \
    X(2, 0, 1024, 0, 0)

#endif
