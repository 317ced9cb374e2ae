// A product of codes of fp8-block on tensor cores for 16 bits: for GPUs whose cuBLASLt does not multiply such codes.
//
// E4M3 codes become F16, exactly, and are multiplied by mma.sync with sums in F32, which keep all bits that tensor cores for
// FP8 drop on Hopper. The sum of each 128 products is multiplied by the two scales of its blocks and added in F32.
//
// A block of 16 warps computes a tile of 128 x 128, each warp 32 x 32. Of both operands it has two parts of 64 codes of K in
// shared memory: one is multiplied while the next one is being loaded into registers. A lane reads 16 codes of a row at
// once; those of four steps of mma.sync. Which of a step's 16 products are which does not matter, as long as the lanes of
// both operands agree, so that codes need no permutation. Neither access to shared memory has bank conflicts: 8 lanes
// read 128 bytes in a row.
//
// Bytes from L2: m n k / 64 for codes. Defines: RESULT (element_types.h).

#include "fp8_block_scales.cuh"
#include "tensor_codes_params.h"

typedef unsigned short uint16;
typedef element_of<RESULT> result_element;

#define SIDE DW_FP8_BLOCK_GEMM_TILE
#define DEPTH DW_FP8_BLOCK_GEMM_DEPTH
#define THREADS DW_FP8_BLOCK_GEMM_THREADS
#define VECTOR 16                                  // codes of a lane at a time
#define ACROSS (DEPTH / VECTOR)                    // vectors of a row of a part
#define EACH (SIDE * ACROSS / THREADS)             // of them for each thread
#define TILES_A 2                                  // of 16 rows, for each warp
#define TILES_B 4                                  // of 8 rows of B, for each warp
#define WARPS_ACROSS (SIDE / (8 * TILES_B))
#if WARPS_ACROSS * (SIDE / (16 * TILES_A)) * 32 != THREADS || DW_FP8_BLOCK_SIDE % DEPTH
#error "the warps do not cover the tile, or parts the blocks"
#endif

struct alignas(16) codes16 {
    unsigned word[4];
};

struct part {
    codes16 a[SIDE * ACROSS], b[SIDE * ACROSS];
};

// Zeros beyond the matrix [rows, depth].
DEVICE void load_codes(const unsigned char *codes, int row, int rows, int k, int depth, codes16 (&to)[EACH]) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int at = (int)threadIdx.x + i * THREADS;
        const int r = row + at / ACROSS, column = k + at % ACROSS * VECTOR;
        to[i] = r < rows && column < depth ? *(const codes16 *)(codes + ((long long)r * depth + column)) : codes16{};
    }
}

DEVICE void store_codes(codes16 *part, const codes16 (&from)[EACH]) {
#pragma unroll
    for (int i = 0; i < EACH; i++) part[threadIdx.x + i * THREADS] = from[i];
}

// Four codes as two pairs of F16.
struct halves {
    unsigned low, high;
};
DEVICE halves widened(unsigned codes) {
    halves x;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(x.low) : "h"((uint16)codes));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(x.high) : "h"((uint16)(codes >> 16)));
    return x;
}

// d (16 x 8) += A B^T: `top` and `bottom` are of rows g and g + 8 of A in lanes 4 g + t.
DEVICE void multiply_add(float (&d)[4], const halves &top, const halves &bottom, const halves &b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(top.low), "r"(bottom.low), "r"(top.high), "r"(bottom.high), "r"(b.low), "r"(b.high));
}

struct lane_place {
    int row, column, group, lane; // first row and column of the warp; lane / 4, lane % 4
};

DEVICE void multiply_part(const part &codes, const lane_place &at, float (&sums)[TILES_A][TILES_B][4]) {
    codes16 a[TILES_A][2], b[TILES_B];
#pragma unroll
    for (int i = 0; i < 2 * TILES_A; i++) a[i / 2][i % 2] = codes.a[(at.row + 8 * i + at.group) * ACROSS + at.lane];
#pragma unroll
    for (int j = 0; j < TILES_B; j++) b[j] = codes.b[(at.column + 8 * j + at.group) * ACROSS + at.lane];
#pragma unroll
    for (int step = 0; step < 4; step++) {
        halves of_b[TILES_B];
#pragma unroll
        for (int j = 0; j < TILES_B; j++) of_b[j] = widened(b[j].word[step]);
#pragma unroll
        for (int i = 0; i < TILES_A; i++) {
            const halves top = widened(a[i][0].word[step]), bottom = widened(a[i][1].word[step]);
#pragma unroll
            for (int j = 0; j < TILES_B; j++) multiply_add(sums[i][j], top, bottom, of_b[j]);
        }
    }
}

// Adds the scaled sums of a block of K, and clears them.
DEVICE void add_block(const dw_multiply_codes_params &p, int row, int column, int block, const lane_place &at,
                      float (&sums)[TILES_A][TILES_B][4], float (&totals)[TILES_A][TILES_B][4]) {
    float of_b[TILES_B][2];
#pragma unroll
    for (int j = 0; j < TILES_B; j++)
#pragma unroll
        for (int c = 0; c < 2; c++)
            of_b[j][c] = scale_at(p.blocks_b, p.wide_b, p.n, column + at.column + 8 * j + 2 * at.lane + c, block);
#pragma unroll
    for (int i = 0; i < TILES_A; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float of_a =
                scale_at(p.blocks_a, p.wide_a, p.m, row + at.row + 16 * i + 8 * half + at.group, block);
#pragma unroll
            for (int j = 0; j < TILES_B; j++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    totals[i][j][2 * half + c] += sums[i][j][2 * half + c] * (of_a * of_b[j][c]);
                    sums[i][j][2 * half + c] = 0.f;
                }
        }
}

DEVICE void store_result(const dw_multiply_codes_params &p, int row, int column, const lane_place &at,
                         const float (&totals)[TILES_A][TILES_B][4]) {
#pragma unroll
    for (int j = 0; j < TILES_B; j++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int y_column = column + at.column + 8 * j + 2 * at.lane + c;
            if (y_column >= p.n) continue;
            const float bias = p.bias ? (float)result_element::load(p.bias, y_column) : 0.f;
#pragma unroll
            for (int i = 0; i < 2 * TILES_A; i++) {
                const int y_row = row + at.row + 8 * i + at.group;
                if (y_row < p.m)
                    result_element::store(p.y, (long long)y_row * p.n + y_column,
                                          (result_element::value)(totals[i / 2][j][i % 2 * 2 + c] + bias));
            }
        }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    fp8_block_gemm(const __grid_constant__ dw_multiply_codes_params p) {
    __shared__ part parts[2];
    const int warp = (int)threadIdx.x / 32;
    const lane_place at = {warp / WARPS_ACROSS * 16 * TILES_A, warp % WARPS_ACROSS * 8 * TILES_B,
                           (int)threadIdx.x % 32 / 4, (int)threadIdx.x % 4};
    const int m = (int)p.m, n = (int)p.n, depth = (int)p.k, across = (n + SIDE - 1) / SIDE;
    const int row = (int)blockIdx.x / across * SIDE, column = (int)blockIdx.x % across * SIDE;
    float sums[TILES_A][TILES_B][4] = {}, totals[TILES_A][TILES_B][4] = {};
    codes16 a[EACH], b[EACH];
    load_codes(p.a, row, m, 0, depth, a);
    load_codes(p.b, column, n, 0, depth, b);
    store_codes(parts[0].a, a);
    store_codes(parts[0].b, b);
    __syncthreads();
    for (int k = 0, turn = 0; k < depth; k += DEPTH, turn ^= 1) {
        const bool last = k + DEPTH >= depth;
        if (!last) {
            load_codes(p.a, row, m, k + DEPTH, depth, a);
            load_codes(p.b, column, n, k + DEPTH, depth, b);
        }
        multiply_part(parts[turn], at, sums);
        if (last || (k + DEPTH) % DW_FP8_BLOCK_SIDE == 0)
            add_block(p, row, column, k / DW_FP8_BLOCK_SIDE, at, sums, totals);
        if (!last) {
            // Nothing has read the other part since the barrier before.
            store_codes(parts[turn ^ 1].a, a);
            store_codes(parts[turn ^ 1].b, b);
        }
        __syncthreads();
    }
    store_result(p, row, column, at, totals);
}
