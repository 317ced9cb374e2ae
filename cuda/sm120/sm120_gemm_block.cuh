// The common part of the GEMMs of sm_120: the tile schedule, the ring of stages, and the epilogue
// D = activation(alpha C + bias) + residual from accumulators in registers.
//
// A thread block is persistent and processes tile after tile of D. One thread of the last warp loads stages of 128 bytes
// of each row of A and B by TMA; the other warps multiply. They synchronize only through barriers: full (a stage has
// arrived) and empty (every warp has read it). While the warps store a tile, the next tile's stages are loaded.
//
// A warp computes 32 columns of D, so that four lanes hold all of a block of D that shares a scale. With SwiGLU it also
// computes the other factor of the same columns, which has its own accumulators.
//
// Defines: TILE_M, TILE_N, WARPS, STAGES (sm120_gemm_params.h), STEP: elements of a row in a stage, STAGE_BYTES,
// ELEMENT, OUTPUT, ACTIVATION (sm100/gemm_params.h), BIAS, RESIDUAL. SwiGLU: half of a tile's rows of B are the gate's,
// the others those of the other factor.
#ifndef DW_SM120_GEMM_BLOCK_CUH
#define DW_SM120_GEMM_BLOCK_CUH

#include "block_scale.cuh"
#include "epilogue_parts.cuh"
#include "scale_layout.h"
#include "sm100/gemm_params.h"
#include "sm120.cuh"
#include "sm120_gemm_params.h"

#define SWIGLU (ACTIVATION == DW_GEMM_SWIGLU)
#define MXFP8 (OUTPUT == DW_GEMM_OUTPUT_MXFP8)
#define TILE_COLUMNS (SWIGLU ? TILE_N / 2 : TILE_N) // columns of D
#define WARP_COLUMNS 32                             // of D
#define WARPS_N (TILE_COLUMNS / WARP_COLUMNS)
#define WARP_ROWS (TILE_M / (WARPS / WARPS_N))
#define PARTS_M (WARP_ROWS / 16)                     // fragments of A
#define PARTS_N (SWIGLU ? 8 : 4)                     // fragments of B: the gate's four first
#define MMAS 4                                       // steps of 32 bytes in a stage
#define BAND 8 // adjacent tiles along m that are processed together, because they share B in the level-2 cache

static_assert(WARPS % WARPS_N == 0 && WARP_ROWS % 16 == 0, "warps share out a tile");
static_assert(!(MXFP8 && RESIDUAL), "a residual of codes and scales is not supported");
static_assert(!MXFP8 || TILE_M == DW_SCALE_TILE_ROWS, "a tile completes its tiles of scales");

typedef struct tile {
    int row, column; // of D
} tile;

typedef struct shared_layout {
    uint32 stages, full, empty;
} shared_layout;

DEVICE shared_layout begin_block(const void *memory) {
    shared_layout s;
    s.stages = shared_address(memory); // swizzled memory must start at multiples of 1024
    s.full = s.stages + STAGES * STAGE_BYTES;
    s.empty = s.full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(s.full + 8 * i, 1);
            barrier_init(s.empty + 8 * i, WARPS);
        }
        fence_barrier_init();
    }
    __syncthreads();
    return s;
}

DEVICE int steps_of(const dw_sm120_gemm_params &p) { return (p.k + STEP - 1) / STEP; }

// Computes the tile of a round; returns false if there is none.
DEVICE bool tile_of(const dw_sm120_gemm_params &p, int round, tile &t) {
    int index = round * (int)gridDim.x + (int)blockIdx.x;
    if (index >= p.tiles_m * p.tiles_n) return false;
    int band = index / (BAND * p.tiles_n), within = index % (BAND * p.tiles_n);
    int height = min(BAND, p.tiles_m - band * BAND);
    t.row = (band * BAND + within % height) * TILE_M;
    t.column = within / height * TILE_COLUMNS;
    return true;
}

// Called by one thread. load(stage's memory, its full barrier, step, tile) issues the loads of STAGE_BYTES.
template <class LOAD> DEVICE void load_stages(const dw_sm120_gemm_params &p, const shared_layout &s, LOAD load) {
    ring r = {0, 0};
    tile t;
    for (int round = 0; tile_of(p, round, t); round++)
        for (int step = 0; step < steps_of(p); step++) {
            barrier_wait(s.empty + 8 * r.stage, r.phase ^ 1);
            barrier_expect(s.full + 8 * r.stage, STAGE_BYTES);
            load(s.stages + r.stage * STAGE_BYTES, s.full + 8 * r.stage, step, t);
            advance(r, STAGES);
        }
}

// ---- a warp's place in the tile ---------------------------------------------------------------------------

DEVICE int warp_row() { return (int)threadIdx.x / 32 / WARPS_N * WARP_ROWS; }
DEVICE int warp_column() { return (int)threadIdx.x / 32 % WARPS_N * WARP_COLUMNS; }
// The first row of B in the tile of two fragments, `pair` and the next.
DEVICE int row_of_b(int pair) {
    return warp_column() + (SWIGLU && pair >= 2 ? TILE_COLUMNS + 16 * (pair - 2) : 16 * pair);
}

// ---- epilogue ---------------------------------------------------------------------------------------------

// Returns the factor of the accumulators.
DEVICE float factor_of(const dw_sm120_gemm_params &p) {
    float alpha = p.alpha;
    if (p.factor_a) alpha *= *p.factor_a;
    if (p.factor_b) alpha *= *p.factor_b;
    return alpha;
}

// Loads the bias of a lane's columns, from `column` on, for each fragment of B.
DEVICE void load_bias(const dw_sm120_gemm_params &p, int column, float *bias) {
#pragma unroll
    for (int i = 0; i < 2 * PARTS_N; i++) {
        int at = column + i / 2 % 4 * 8 + 2 * (lane_index() & 3) + i % 2;
        bias[i] = 0.f;
        if constexpr (BIAS)
            if (at < p.n) bias[i] = element_low(((const uint16 *)p.bias)[(SWIGLU && i >= 8 ? (uint64)p.n : 0) + at]);
    }
}

// Computes the lane's eight numbers of one row of D, columns 8 i + 2 (lane % 4) and the next for i from 0 to 3, without
// the residual. `half`: 1 for the row 8 below.
DEVICE void finish_row(float (*sums)[4], int half, float alpha, const float *bias, float *x) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float y = fmaf(alpha, sums[i / 2][2 * half + i % 2], bias[i]);
        if constexpr (SWIGLU) x[i] = silu(y) * fmaf(alpha, sums[4 + i / 2][2 * half + i % 2], bias[8 + i]);
        else x[i] = activate(y);
    }
}

// The four lanes of a quad hold the columns of each fragment; transposed, a lane holds 8 adjacent columns, 16 bytes, and
// the quad stores 64 bytes of a row. `column` is the warp's first. All lanes of the warp must call this.
DEVICE void store_elements(const dw_sm120_gemm_params &p, int row, int column, float *x) {
    uint32 words[4];
    int mine = column + 8 * (lane_index() & 3), count = row < p.m ? p.n - mine : 0;
    if constexpr (RESIDUAL) {
        load_row_chunk((const uint16 *)p.residual + row * p.stride_residual + mine, count, words);
        transpose_quad(words);
#pragma unroll
        for (int i = 0; i < 4; i++) x[2 * i] += element_low(words[i]), x[2 * i + 1] += element_high(words[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = pack_elements(x[2 * i], x[2 * i + 1]);
    transpose_quad(words);
    if (count > 0) store_row_chunk((uint16 *)p.d + row * p.stride_d + mine, count, words);
}

// A quad stores the 32 bytes of a fragment's row.
DEVICE void store_f32(const dw_sm120_gemm_params &p, int row, int column, float *x) {
    if (row >= p.m) return;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int at = column + 8 * i + 2 * (lane_index() & 3);
        float *d = (float *)p.d + row * p.stride_d + at;
        const float *residual = (const float *)p.residual + row * p.stride_residual + at;
        if (at + 1 < p.n) {
            float2 v = make_float2(x[2 * i], x[2 * i + 1]);
            if constexpr (RESIDUAL) {
                float2 r = *(const float2 *)residual;
                v.x += r.x, v.y += r.y;
            }
            *(float2 *)d = v;
        } else if (at < p.n) {
            *d = RESIDUAL ? x[2 * i] + *residual : x[2 * i];
        }
    }
}

// Stores the scale of a row's block of 32 columns.
DEVICE void store_scale(const dw_sm120_gemm_params &p, int row, int block, uint32 code) {
    long long wide = DW_SCALE_TILES_WIDE((p.n + 31) / 32);
    if (block < 4 * wide) ((uint8 *)p.scales_d)[DW_SCALE_OFFSET(row, block, wide)] = (uint8)code;
}

// Quantizes the row's block of 32 columns, which a quad holds, and stores its codes and scale; outside of D zeros
// complete the tiles of scales.
DEVICE void store_quantized(const dw_sm120_gemm_params &p, int row, int column, float *x) {
    int mine = column + 8 * (lane_index() & 3), count = row < p.m ? p.n - mine : 0;
    uint32 most = 0, words[4];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (column + i / 2 * 8 + 2 * (lane_index() & 3) + i % 2 >= p.n) x[i] = 0.f;
        most = max(most, __float_as_uint(x[i]) & 0x7fffffffu);
    }
    most = max(most, __shfl_xor_sync(0xffffffff, most, 1));
    most = max(most, __shfl_xor_sync(0xffffffff, most, 2));
    block_scale scale = e8m0_scale<DW_CODES_MXFP8, DW_RULE_RCEIL>(most);
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = e4m3_pair(x[2 * i] * scale.factor, x[2 * i + 1] * scale.factor);
    transpose_quad(words);
    uint8 *d = (uint8 *)p.d + row * p.stride_d + mine;
    if (count >= 8) *(uint2 *)d = make_uint2(words[0] | words[1] << 16, words[2] | words[3] << 16);
    else
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i < count) d[i] = (uint8)(words[i / 2] >> 8 * (i % 2));
    if ((lane_index() & 3) == 0) store_scale(p, row, column / 32, row < p.m && column < p.n ? scale.code : 0);
    // Tiles of D that are half as wide as a tile of scales: the last one completes it.
    if (column + WARP_COLUMNS == column - warp_column() + TILE_COLUMNS && column + WARP_COLUMNS >= p.n)
        store_scale(p, row, column / 32 + 1 + (lane_index() & 3), 0);
}

DEVICE void store_tile(const dw_sm120_gemm_params &p, const tile &t, float alpha, float (*sums)[PARTS_N][4]) {
    float bias[2 * PARTS_N], x[8];
    int column = t.column + warp_column();
    load_bias(p, column, bias);
#pragma unroll
    for (int i = 0; i < 2 * PARTS_M; i++) {
        int row = t.row + warp_row() + 8 * i + (int)lane_index() / 4;
        finish_row(sums[i / 2], i % 2, alpha, bias, x);
        if constexpr (MXFP8) store_quantized(p, row, column, x);
        else if constexpr (OUTPUT == DW_GEMM_OUTPUT_F32) store_f32(p, row, column, x);
        else store_elements(p, row, column, x);
    }
}

// Called by the warps that multiply. multiply(stage's memory, tile, accumulators) adds one stage.
template <class MULTIPLY>
DEVICE void compute_tiles(const dw_sm120_gemm_params &p, const shared_layout &s, MULTIPLY multiply) {
    float alpha = factor_of(p);
    ring r = {0, 0};
    tile t;
    for (int round = 0; tile_of(p, round, t); round++) {
        float sums[PARTS_M][PARTS_N][4];
#pragma unroll
        for (int i = 0; i < PARTS_M * PARTS_N * 4; i++) (&sums[0][0][0])[i] = 0.f;
        for (int step = 0; step < steps_of(p); step++) {
            barrier_wait(s.full + 8 * r.stage, r.phase);
            multiply(s.stages + r.stage * STAGE_BYTES, t, sums);
            __syncwarp();
            if (lane_index() == 0) barrier_arrive(s.empty + 8 * r.stage);
            advance(r, STAGES);
        }
        store_tile(p, t, alpha, sums);
    }
}

#endif
