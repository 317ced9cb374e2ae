/* Tiles of the GEMMs on sm_100, read by the host, which passes them as defines, and by the tests. The stages fill the
 * remaining shared memory. Two accumulators of 256 columns fill tensor memory, so they overlap if there are scale
 * factors. Not measured: no GPU of this family was available.
 */
#ifndef DW_SM100_GEMM_TILES_H
#define DW_SM100_GEMM_TILES_H

/* X(ctas, tile_n, stages) */
#define DW_SM100_GEMM_TILES(X)                                                                     \
    X(1, 64, 8)                                                                                    \
    X(1, 128, 6)                                                                                   \
    X(1, 256, 4)                                                                                   \
    X(2, 128, 8)                                                                                   \
    X(2, 256, 6)

/* Block-scaled: X(scheme, ctas, tile_n, stages), schemes of common/scheme_params.h; for both kinds of MXFP8. SwiGLU
 * uses tiles of 256. */
#define DW_SM100_SCALED_TILES(X)                                                                   \
    X(DW_CODES_MXFP8, 1, 128, 5)                                                                   \
    X(DW_CODES_MXFP8, 1, 192, 4)                                                                   \
    X(DW_CODES_MXFP8, 1, 256, 3)                                                                   \
    X(DW_CODES_MXFP8, 2, 128, 7)                                                                   \
    X(DW_CODES_MXFP8, 2, 192, 6)                                                                   \
    X(DW_CODES_MXFP8, 2, 256, 5)                                                                   \
    X(DW_CODES_NVFP4, 1, 128, 5)                                                                   \
    X(DW_CODES_NVFP4, 1, 192, 4)                                                                   \
    X(DW_CODES_NVFP4, 1, 256, 3)                                                                   \
    X(DW_CODES_NVFP4, 2, 192, 5)                                                                   \
    X(DW_CODES_NVFP4, 2, 256, 5)                                                                   \
    X(DW_CODES_MXFP4, 1, 256, 3)                                                                   \
    X(DW_CODES_MXFP4, 2, 256, 5)

#endif
