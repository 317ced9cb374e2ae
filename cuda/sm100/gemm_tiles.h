/* Tiles of the matrix product on sm_100, read by the host, which passes them on as defines, and by the tests. Stages
 * fill the shared memory that is left; two accumulators of 256 columns fill tensor memory. Not measured: no GPU of
 * this family was at hand. */
#ifndef DW_SM100_GEMM_TILES_H
#define DW_SM100_GEMM_TILES_H

/* X(ctas, tile_n, stages) */
#define DW_SM100_GEMM_TILES(X)                                                                     \
    X(1, 64, 8)                                                                                    \
    X(1, 128, 6)                                                                                   \
    X(1, 256, 4)                                                                                   \
    X(2, 128, 8)                                                                                   \
    X(2, 256, 6)

#endif
