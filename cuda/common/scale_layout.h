/* The order in which tensor cores read block scales: tiles of 128 rows x 4 scales, 512 bytes each; the tiles of the
 * same 128 rows are adjacent. A tile has 32 lines of 16 bytes: line r holds the four scales of rows r, r + 32, r + 64
 * and r + 96. Rows and scales that pad a tile are zeros. PTX ISA, "Scale Factor layout"; cuBLAS, "1D Block Scaling
 * Factors Layout". Plain C, read by the host and by device code.
 */
#ifndef DW_SCALE_LAYOUT_H
#define DW_SCALE_LAYOUT_H

#define DW_SCALE_TILE_ROWS 128
#define DW_SCALE_TILE_COLUMNS 4
#define DW_SCALE_TILE_BYTES 512
/* The graph's operations pad rows of codes to a multiple of this number of elements, so that each begins at a multiple
 * of 16 bytes. */
#define DW_CODE_ROW 32

/* F32 scales of fp8-block as cuBLASLt reads them ("128-element 1D and 128x128 2D Block Scaling"). Of blocks of 1 x 128:
 * [blocks along a row of codes][rows of codes]. Of square blocks of 128 x 128: [blocks of rows][blocks along a row], the
 * latter padded with zeros to a multiple of DW_SQUARE_SCALES. */
#define DW_FP8_BLOCK_SIDE 128
#define DW_SQUARE_SCALES 4

/* Tiles along the scales of a row; tiles along the rows. */
#define DW_SCALE_TILES_WIDE(columns) (((columns) + 3) / 4)
#define DW_SCALE_TILES_HIGH(rows) (((rows) + 127) / 128)

/* Offset of scale `column` of `row` within its tile. */
#define DW_SCALE_OFFSET_IN_TILE(row, column) ((row) % 32 * 16 + (row) % 128 / 32 * 4 + (column) % 4)
/* Offset within all tiles; `wide` is DW_SCALE_TILES_WIDE. */
#define DW_SCALE_OFFSET(row, column, wide)                                                         \
    (((row) / 128 * (wide) + (column) / 4) * 512 + DW_SCALE_OFFSET_IN_TILE(row, column))

#endif
