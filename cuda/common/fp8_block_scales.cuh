// The F32 scales of fp8-block (scale_layout.h), as products of codes read them.
#ifndef DW_FP8_BLOCK_SCALES_CUH
#define DW_FP8_BLOCK_SCALES_CUH

#include "scale_layout.h"
#include "tensor_types.cuh"

// The scale of a block of K of a row of codes; 0 behind the last row. wide: scales of a row of square blocks, or 0 for
// blocks of 1 x 128.
DEVICE float scale_at(const float *scales, long long wide, long long rows, long long row, long long block) {
    if (row >= rows) return 0.f;
    return wide ? scales[row / DW_FP8_BLOCK_SIDE * wide + block] : scales[block * rows + row];
}

#endif
