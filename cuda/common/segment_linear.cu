// Products of rows that are sorted by group, without tensor cores, for operands of any strides and types: each row
// times its group's matrix, and the gradient of the matrices.
//
// They are right for every call, so that a plan never lacks a kernel; where tensor cores apply, other kernels come
// first. The host knows neither where groups begin nor how long they are. segment_linear therefore has a block for
// each tile of all rows: it multiplies the tile by the matrix of each group that has rows in it, and stores the rows
// of that group. The gradient has a block for each tile of each group's matrix.
//
// Defines: TYPE (element_types.h).
//
// FLOPs: 2 rows n k, and as much again for each end of a group within a tile.

#include "group_offsets.cuh"
#include "matmul_tile.cuh"
#include "segment_linear_params.h"

DEVICE long long offset_at(const dw_segment_linear_params &p, long long group) {
    return p.offsets[group * p.offsets_step];
}

// The first group that ends behind the row.
DEVICE long long group_of(const dw_segment_linear_params &p, long long row) {
    long long low = 0, high = p.groups;
    while (low < high) {
        const long long middle = (low + high) / 2;
        if (offset_at(p, middle + 1) > row) high = middle;
        else
            low = middle + 1;
    }
    return low;
}

DEVICE void store(const dw_segment_linear_params &p, long long group, long long row, long long column, value sum) {
    if (p.addend)
        sum += element::load(p.addend, group * p.addend_group + row * p.addend_row + column * p.addend_column);
    element::store(p.y, group * p.y_group + row * p.y_row + column * p.y_column, sum);
}

extern "C" __global__ void __launch_bounds__(DW_MATMUL_THREADS)
    segment_linear(const __grid_constant__ dw_segment_linear_params p) {
    const long long tiles_n = (p.n + TILE - 1) / TILE;
    const long long row = blockIdx.x / tiles_n * TILE, column = blockIdx.x % tiles_n * TILE;
    const long long row_end = min(row + TILE, p.rows);
    check_offsets(p.offsets, p.offsets_step, p.groups, p.rows, p.error);
    for (long long group = group_of(p, row); group < p.groups && offset_at(p, group) < row_end; group++) {
        const long long first = max(offset_at(p, group), row), end = min(offset_at(p, group + 1), row_end);
        if (first >= end) continue;
        value sums[EACH][EACH] = {};
        add_products(sums, {p.a, 0, row, end, p.a_row, p.a_column},
                     {p.b, group * p.b_group, column, p.n, p.b_row, p.b_column}, p.k);
        each_sum(sums, [&](int tile_row, int tile_column, value sum) {
            const long long r = row + tile_row, c = column + tile_column;
            if (r < first || r >= end || c >= p.n) return;
            if (p.bias) sum += element::load(p.bias, group * p.bias_group + c * p.bias_column);
            store(p, 0, r, c, sum);
        });
    }
}

extern "C" __global__ void __launch_bounds__(DW_MATMUL_THREADS)
    segment_linear_backward_weight(const __grid_constant__ dw_segment_linear_params p) {
    const long long tiles_n = (p.n + TILE - 1) / TILE, tiles = (p.m + TILE - 1) / TILE * tiles_n;
    const long long group = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const long long row = tile / tiles_n * TILE, column = tile % tiles_n * TILE;
    check_offsets(p.offsets, p.offsets_step, p.groups, p.rows, p.error);
    const long long first = min(max(offset_at(p, group), 0LL), p.rows), end = min(offset_at(p, group + 1), p.rows);
    value sums[EACH][EACH] = {};
    add_products(sums, {p.a, first * p.a_row, row, p.m, p.a_column, p.a_row},
                 {p.b, first * p.b_row, column, p.n, p.b_row, p.b_column}, end - first);
    each_sum(sums, [&](int tile_row, int tile_column, value sum) {
        const long long r = row + tile_row, c = column + tile_column;
        if (r < p.m && c < p.n) store(p, group, r, c, sum);
    });
}
