// Batched matrix multiplication without tensor cores, for operands of any strides and types, F32 and F64 included.
//
// It is right for every call, so that a plan never lacks a kernel; where tensor cores apply, other kernels come first. A
// block computes a tile of 64 x 64: 16 values of k at a time are copied to shared memory, each thread keeps 4 x 4 results
// in registers. Products are summed in order of k, in F32 (F64 for F64), and rounded once, after the
// addend, if there is one, has been added.
//
// Defines: TYPE, RESULT (element_types.h).
//
// FLOPs: 2 m n k; bytes from L2: (m n k / 64) times the element's two sizes.

#include "matmul_tile.cuh"

typedef element_of<RESULT> result_element;

DEVICE long long batch_offset(const dw_matmul_params &p, const long long *stride, long long batch) {
    long long offset = 0;
    for (int axis = p.rank - 1; axis > 0; axis--) {
        offset += batch % p.shape[axis] * stride[axis];
        batch /= p.shape[axis];
    }
    return offset + batch * stride[0];
}

extern "C" __global__ void __launch_bounds__(DW_MATMUL_THREADS) matmul(const __grid_constant__ dw_matmul_params p) {
    const long long tiles_n = (p.n + TILE - 1) / TILE, tiles = (p.m + TILE - 1) / TILE * tiles_n;
    const long long batch = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const long long row = tile / tiles_n * TILE, column = tile % tiles_n * TILE;
    const long long a = batch_offset(p, p.a_stride, batch), b = batch_offset(p, p.b_stride, batch),
                    y = batch_offset(p, p.y_stride, batch), addend = batch_offset(p, p.addend_stride, batch);
    value sums[EACH][EACH] = {};
    add_products(sums, {p.a, a, row, p.m, p.a_row, p.a_column}, {p.b, b, column, p.n, p.b_row, p.b_column}, p.k);
    each_sum(sums, [&](int tile_row, int tile_column, value sum) {
        const long long r = row + tile_row, c = column + tile_column;
        if (r >= p.m || c >= p.n) return;
        if (p.addend) sum += (value)result_element::load(p.addend, addend + r * p.addend_row + c * p.addend_column);
        result_element::store(p.y, y + r * p.y_row + c * p.y_column, (result_element::value)sum);
    });
}
