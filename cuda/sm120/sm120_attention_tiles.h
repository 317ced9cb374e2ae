/* Tiles of attention on sm_120, read by the host, which passes them as defines, and by the tests. Not measured: no GPU
 * of this family was available.
 */
#ifndef DW_SM120_ATTENTION_TILES_H
#define DW_SM120_ATTENTION_TILES_H

/* Forward: X(head_dim, window, keys, tile_m, tile_n, stages, consumers), as for sm_90: a consumer is a group of four
 * warps, 16 query rows each. */
#define DW_SM120_FORWARD_TILES(X)                                                                  \
    X(64, 0, 0, 128, 64, 4, 2)                                                                     \
    X(64, 1, 0, 128, 64, 4, 2)                                                                     \
    X(96, 0, 0, 128, 64, 2, 2)                                                                     \
    X(96, 1, 0, 128, 64, 2, 2)                                                                     \
    X(128, 0, 0, 128, 64, 2, 2)                                                                    \
    X(128, 1, 0, 128, 64, 2, 2)
/* Threads: two groups of four warps that compute, and one of which a thread loads. All start with 168 registers, which
 * they share out differently. */
#define DW_SM120_ATTENTION_THREADS(consumers) (128 * (consumers) + 128)
#define DW_SM120_CONSUMER_REGISTERS 240
#define DW_SM120_LOADER_REGISTERS 24
#define DW_SM120_WIDE(head_dim) (((head_dim) + 63) / 64 * 64)
#define DW_SM120_FORWARD_SHARED_BYTES(head_dim, tile_m, tile_n, stages)                            \
    (2 * DW_SM120_WIDE(head_dim) * ((tile_m) + 2 * (stages) * (tile_n)) + 8 * (2 + 4 * (stages)))

/* Backward: X(head_dim, window, keys, tile_m, tile_n, stages, consumers): tile_m rows stay in a block (queries for dQ;
 * keys for dK and dV), 16 for each warp, and tile_n rows are a stage of those that it goes through. */
#define DW_SM120_BACKWARD_TILES(X)                                                                 \
    X(64, 0, 0, 128, 32, 4, 2)                                                                     \
    X(64, 1, 0, 128, 32, 4, 2)                                                                     \
    X(96, 0, 0, 128, 32, 2, 2)                                                                     \
    X(96, 1, 0, 128, 32, 2, 2)                                                                     \
    X(128, 0, 0, 128, 32, 2, 2)                                                                    \
    X(128, 1, 0, 128, 32, 2, 2)
/* Two tiles that stay, two in each stage, and barriers. */
#define DW_SM120_BACKWARD_SHARED_BYTES(head_dim, tile_m, tile_n, stages)                           \
    (4 * DW_SM120_WIDE(head_dim) * ((tile_m) + (stages) * (tile_n)) + 8 * (1 + 2 * (stages)))

#endif
