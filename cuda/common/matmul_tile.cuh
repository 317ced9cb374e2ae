// A tile of a product of matrices, without tensor cores: for operands of any strides and types.
//
// A block computes TILE x TILE results: DEPTH values of k at a time are copied to shared memory, each thread keeps
// EACH x EACH results in registers. Products are summed in order of k, in F32 (F64 for F64).
//
// Defines, before inclusion: TYPE (element_types.h).
#ifndef DW_MATMUL_TILE_CUH
#define DW_MATMUL_TILE_CUH

#include "matmul_params.h"
#include "tensor_types.cuh"

typedef element_of<TYPE> element;
typedef element::value value;

#define TILE DW_MATMUL_TILE
#define DEPTH DW_MATMUL_DEPTH
#define EACH 4 // rows and columns of one thread

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

// A matrix with the tile to multiply: of A its rows from `first`, of B its columns; `end` is where the matrix ends.
struct operand {
    const void *data;
    long long offset, first, end, row_stride, column_stride;
};

// Adds the products of a tile of A and one of B over `depth` columns of A.
DEVICE void add_products(value (&sums)[EACH][EACH], const operand &a, const operand &b, long long depth) {
    __shared__ value a_tile[TILE][DEPTH + 1], b_tile[DEPTH][TILE + 1];
    const int my_row = (int)threadIdx.x / (TILE / EACH), my_column = (int)threadIdx.x % (TILE / EACH);
    for (long long k = 0; k < depth; k += DEPTH) {
        __syncthreads(); // the tiles before have been read
        copy_tile<TILE, DEPTH>(a_tile, a.data, a.offset, a.first, a.end, a.row_stride, k, depth, a.column_stride);
        copy_tile<DEPTH, TILE>(b_tile, b.data, b.offset, k, depth, b.row_stride, b.first, b.end, b.column_stride);
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
}

// Calls visit(row, column, sum) for each of the thread's results, whose places in the tile these are.
template <typename VISIT> DEVICE void each_sum(const value (&sums)[EACH][EACH], VISIT visit) {
    const int my_row = (int)threadIdx.x / (TILE / EACH), my_column = (int)threadIdx.x % (TILE / EACH);
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++)
            visit(my_row + i * (TILE / EACH), my_column + j * (TILE / EACH), sums[i][j]);
}

#endif
