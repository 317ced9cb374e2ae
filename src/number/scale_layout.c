/* Scales in tiles of 128 x 4, in the order that tensor cores read (deepwell/number.h). */
#include "common/scale_layout.h"
#include "base/base.h"
#include "deepwell/number.h"
#include <string.h>

static int64_t tiles(int64_t count, int64_t size) { return count / size + (count % size != 0); }

int64_t dw_scales_swizzled_bytes(int64_t rows, int64_t cols) {
    if (rows < 0 || cols < 0) return -1;
    int64_t high = tiles(rows, DW_SCALE_TILE_ROWS), wide = tiles(cols, DW_SCALE_TILE_COLUMNS),
            bytes;
    if (__builtin_mul_overflow(high, wide, &bytes) ||
        __builtin_mul_overflow(bytes, (int64_t)DW_SCALE_TILE_BYTES, &bytes))
        return -1;
    return bytes;
}

static dw_status check(const char *function, int64_t rows, int64_t cols, int64_t repeat) {
    if (dw_scales_swizzled_bytes(rows, cols) < 0)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "%s: the scales are [%lld, %lld]: expected sizes of "
                        "0 or more whose product fits into an int64",
                        function, (long long)rows, (long long)cols);
    if (repeat < 1)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "%s: repeat is %lld: expected 1, or the number of rows of a "
                        "square block",
                        function, (long long)repeat);
    return DW_OK;
}

static int64_t swizzled_index(int64_t row, int64_t col, int64_t cols) {
    return DW_SCALE_OFFSET(row, col, tiles(cols, DW_SCALE_TILE_COLUMNS));
}

dw_status dw_scales_swizzle(int64_t rows, int64_t cols, int64_t repeat, const uint8_t *scales,
                            uint8_t *swizzled) {
    DW_RETURN_IF_FAILED(check("dw_scales_swizzle", rows, cols, repeat));
    int64_t bytes = dw_scales_swizzled_bytes(rows, cols);
    if (bytes > 0) memset(swizzled, 0, (size_t)bytes);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t col = 0; col < cols; col++)
            swizzled[swizzled_index(row, col, cols)] = scales[row / repeat * cols + col];
    return DW_OK;
}

dw_status dw_scales_unswizzle(int64_t rows, int64_t cols, int64_t repeat, const uint8_t *swizzled,
                              uint8_t *scales) {
    DW_RETURN_IF_FAILED(check("dw_scales_unswizzle", rows, cols, repeat));
    for (int64_t row = 0; row < rows; row += repeat) {
        for (int64_t col = 0; col < cols; col++)
            scales[row / repeat * cols + col] = swizzled[swizzled_index(row, col, cols)];
        if (repeat > rows - row) break; /* row + repeat may not fit */
    }
    return DW_OK;
}
