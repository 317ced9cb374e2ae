/* Variants of sm_100's block-scaled GEMMs that the library selects for small calls, in addition to those of
 * emulated_gemm_scaled.h. CMake compiles one per row. */
#ifndef DW_EMULATED_QUANTIZED_GEMM_H
#define DW_EMULATED_QUANTIZED_GEMM_H

/* X(scheme_a, scheme_b, ctas, tile_n, stages, element, output, activation, bias, residual, schedule) */
#define EMULATED_QUANTIZED_GEMM(X)                                                                 \
    X(6, 6, 2, 128, 7, 0, 0, 0, 0, 0, 0)                                                           \
    X(6, 7, 2, 128, 7, 0, 0, 0, 0, 0, 0)                                                           \
    X(6, 6, 2, 128, 7, 0, 2, 1, 1, 0, 0)                                                           \
    X(11, 11, 1, 128, 5, 0, 0, 0, 0, 0, 0)

#endif
