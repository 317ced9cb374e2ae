/* The results of quantize_tiles with scales of fp8-block, for kernels that make them. */
#ifndef DW_FP8_BLOCK_CODES_H
#define DW_FP8_BLOCK_CODES_H

#include "common/fp8_block_codes_params.h"
#include "common/scale_layout.h"
#include "kernel/kernel.h"

enum { DW__FP8_CODES, DW__FP8_SCALES, DW__FP8_TURNED, DW__FP8_TURNED_SCALES };

/* Tiles, as long as a block, that `count` elements of a row or column take. */
static inline int64_t dw__fp8_block_tiles(int64_t count) {
    return (count + DW_FP8_BLOCK_SIDE - 1) / DW_FP8_BLOCK_SIDE;
}

/* Returns the parameters for the four results of a matrix, without those of the matrix itself. */
dw_fp8_block_codes_params dw__fp8_block_results(int64_t rows, int64_t columns,
                                                const dw__tensor *results);

#endif
