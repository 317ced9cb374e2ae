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

#include "matmul_params.h"
#include "tensor_types.cuh"

typedef element_of<TYPE> element;
typedef element_of<RESULT> result_element;
typedef element::value value;

#define TILE DW_MATMUL_TILE
#define DEPTH DW_MATMUL_DEPTH
#define EACH 4 // rows and columns of one thread

DEVICE long long batch_offset(const dw_matmul_params &p, const long long *stride, long long batch) {
    long long offset = 0;
    for (int axis = p.rank - 1; axis > 0; axis--) {
        offset += batch % p.shape[axis] * stride[axis];
        batch /= p.shape[axis];
    }
    return offset + batch * stride[0];
}

// Copies the part of a matrix [rows, columns] that begins at (row, column) to shared memory, zeros outside of it.
// Neighbouring threads take neighbouring columns if these are contiguous, else neighbouring rows.
template <int height, int width>
DEVICE void copy_tile(value (*to)[width + 1], const void *data, long long offset, long long row, long long rows,
                      long long row_stride, long long column, long long columns, long long column_stride) {
    for (int i = (int)threadIdx.x; i < height * width; i += DW_MATMUL_THREADS) {
        const int r = column_stride == 1 ? i / width : i % height, c = column_stride == 1 ? i % width : i / height;
        const bool inside = row + r < rows && column + c < columns;
        to[r][c] = inside ? element::load(data, offset + (row + r) * row_stride + (column + c) * column_stride)
                          : (value)0;
    }
}

extern "C" __global__ void __launch_bounds__(DW_MATMUL_THREADS) matmul(const __grid_constant__ dw_matmul_params p) {
    __shared__ value a_tile[TILE][DEPTH + 1], b_tile[DEPTH][TILE + 1];
    const long long tiles_n = (p.n + TILE - 1) / TILE, tiles = (p.m + TILE - 1) / TILE * tiles_n;
    const long long batch = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const long long row = tile / tiles_n * TILE, column = tile % tiles_n * TILE;
    const long long a = batch_offset(p, p.a_stride, batch), b = batch_offset(p, p.b_stride, batch),
                    y = batch_offset(p, p.y_stride, batch), addend = batch_offset(p, p.addend_stride, batch);
    const int my_row = (int)threadIdx.x / (TILE / EACH), my_column = (int)threadIdx.x % (TILE / EACH);
    value sums[EACH][EACH] = {};
    for (long long k = 0; k < p.k; k += DEPTH) {
        __syncthreads(); // the tiles before have been read
        copy_tile<TILE, DEPTH>(a_tile, p.a, a, row, p.m, p.a_row, k, p.k, p.a_column);
        copy_tile<DEPTH, TILE>(b_tile, p.b, b, k, p.k, p.b_row, column, p.n, p.b_column);
        __syncthreads();
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
#pragma unroll
            for (int i = 0; i < EACH; i++)
#pragma unroll
                for (int j = 0; j < EACH; j++)
                    sums[i][j] += a_tile[my_row + i * (TILE / EACH)][d] * b_tile[d][my_column + j * (TILE / EACH)];
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const long long r = row + my_row + i * (TILE / EACH), c = column + my_column + j * (TILE / EACH);
            const long long at = y + r * p.y_row + c * p.y_column;
            if (r >= p.m || c >= p.n) continue;
            if (p.addend)
                sums[i][j] += (value)result_element::load(p.addend, addend + r * p.addend_row + c * p.addend_column);
            result_element::store(p.y, at, (result_element::value)sums[i][j]);
        }
    }
}
