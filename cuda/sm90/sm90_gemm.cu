// GEMM D = activation(alpha A B^T + bias) + residual, A (m x k) and B (n x k) of BF16, F16 or codes of FP8, accumulators
// in F32, on Hopper (sm_90a).
//
// A thread block is persistent and computes tile after tile of D. One thread loads stages of 64 elements of the
// contraction by TMA into a ring; two warpgroups multiply them by wgmma from shared memory, each every other tile, so that
// one multiplies while the other stores. They synchronize with the loads only through barriers: full (a stage has arrived)
// and empty (the four warps that multiply it have read it), so that stages of the next tiles are loaded meanwhile.
//
// An operand whose contiguous axis is not the contraction (TURNED_A: A is stored as k x m, TURNED_B: B as k x n) is
// loaded in boxes of 64 of its columns, which wgmma reads as they are.
//
// Several products may share a launch (GROUPS, sm90_gemm_params.h): a batch, rows of A in groups with a matrix of B
// each, or groups of the contraction. Offsets of groups are read from device memory, so the host need not know them.
//
// Codes of FP8 (CODES_A, CODES_B: 1 for E4M3, 2 for E5M2) always lie along the contraction, because wgmma does not
// transpose them. With PROMOTE both warpgroups multiply the same tile and add each stage's sums in F32 (sm90_codes.cuh).
// A stage is as long as the blocks of fp8-block: with BLOCKS its sums are multiplied by the two blocks' scales first.
//
// Defines: TILE_M, TILE_N, STAGES, GROUPS (sm90_gemm_params.h), TURNED_A, TURNED_B, ELEMENT (with codes that of a D in
// 16 bits), OUTPUT, ACTIVATION (sm100/gemm_params.h), BIAS, RESIDUAL; for codes CODES_A, CODES_B, PROMOTE, BLOCKS
// (sm90_gemm_params.h).

#ifndef CODES_A // elements of 16 bits
#define CODES_A 0
#define CODES_B 0
#define PROMOTE 0
#define BLOCKS 0
#endif
#define CODES (CODES_A != 0)
#define SQUARE_A ((BLOCKS & DW_SM90_SQUARE_A) != 0)
#define SQUARE_B ((BLOCKS & DW_SM90_SQUARE_B) != 0)

#include "epilogue_parts.cuh"
#include "sm100/gemm_params.h"
#include "sm90.cuh"
#include "sm90_codes.cuh"
#include "sm90_gemm_params.h"

#define SWIGLU (ACTIVATION == DW_GEMM_SWIGLU)
#define F32_OUTPUT (OUTPUT == DW_GEMM_OUTPUT_F32)
#define STEP (CODES ? DW_SM90_CODES_STEP : DW_SM90_GEMM_STEP)
#define SLICES 4 // products along a stage: 32 bytes of the contraction each
#define STAGE_BYTES DW_SM90_STAGE_BYTES(TILE_M, TILE_N)
#define A_BYTES (TILE_M * 128)
#define TILE_COLUMNS (SWIGLU ? TILE_N / 2 : TILE_N) // columns of D
#define BAND 8 // adjacent tiles along m that are processed together, because they share B in the L2 cache
// A warpgroup's share of a tile: all of it, or with PROMOTE 64 of 128 rows, or half of the columns.
#define PARTS (PROMOTE ? 1 : TILE_M / 64) // products of 64 rows
#define WIDTH (PROMOTE && TILE_M == 64 ? TILE_N / 2 : TILE_N) // columns of a product
#define WIDTH_COLUMNS (SWIGLU ? WIDTH / 2 : WIDTH) // of D
#define CHUNK (F32_OUTPUT ? 32 : 64)              // columns of D that are staged at once: 128 bytes
#define CHUNK_VALUES (CHUNK / 2)                  // of a thread

static_assert(TILE_M % 64 == 0, "whole products");
static_assert(TILE_COLUMNS % CHUNK == 0, "chunks do not cross tiles");
// Boxes of a turned operand have 64 columns.
static_assert(!TURNED_B || TILE_COLUMNS % 64 == 0, "whole boxes");
static_assert(GROUPS != DW_SM90_CONTRACTION || (TURNED_A && TURNED_B), "groups are rows of both operands");
static_assert(GROUPS != DW_SM90_ROWS || !TURNED_A, "groups are rows of A");
static_assert((CODES_A != 0) == (CODES_B != 0) && (!PROMOTE || CODES), "codes are multiplied with codes");
static_assert(!CODES || !(TURNED_A || TURNED_B || SWIGLU), "wgmma reads codes along the contraction");
static_assert(!BLOCKS || (PROMOTE && GROUPS == DW_SM90_BATCH && STEP == DW_SM90_BLOCK), "a stage has one block");
static_assert(!PROMOTE || TILE_M == 64 || TILE_M == 128, "a warpgroup multiplies 64 rows");
static_assert(DW_SM90_GEMM_SHARED_BYTES(TILE_M, TILE_N, STAGES) <= DW_SM90_MOST_SHARED, "too many stages");

typedef struct shared_layout {
    uint32 stages, staging, full, empty;
} shared_layout;

DEVICE shared_layout begin_block(const void *memory) {
    shared_layout s;
    s.stages = shared_address(memory); // swizzled memory must start at multiples of 1024
    s.staging = s.stages + STAGES * STAGE_BYTES;
    s.full = s.staging + DW_SM90_STAGING_BYTES;
    s.empty = s.full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(s.full + 8 * i, 1);
            barrier_init(s.empty + 8 * i, PROMOTE ? 8 : 4);
        }
        fence_barrier_init();
    }
    __syncthreads();
    return s;
}

// ---- tiles ------------------------------------------------------------------------------------------------

typedef struct tile {
    int group, row, column, end; // of D: its first row and column, and the row at which its rows end
    int first, k;                // of the contraction
} tile;

// A thread's position in its block's sequence of tiles; must start zeroed.
typedef struct walk {
    int round, index;
    int group, base; // the group of the last tile, and the index of the group's first one
} walk;

// Sets the place of tile `index` of a matrix of high x wide tiles.
DEVICE void place(int index, int high, int wide, tile &t) {
    int band = index / (BAND * wide), within = index % (BAND * wide), height = min(BAND, high - band * BAND);
    t.row = (band * BAND + within % height) * TILE_M;
    t.column = within / height * TILE_COLUMNS;
}

// Computes the block's next tile; returns false if there is none.
DEVICE bool next_tile(const dw_sm90_gemm_params &p, walk &w, tile &t) {
    if (w.round++ == 0) w.index = blockIdx.x;
    else w.index += gridDim.x;
    t.first = 0, t.k = p.k;
    if constexpr (GROUPS == DW_SM90_ROWS) {
        for (; w.group < p.groups; w.group++) {
            int start = p.offsets[w.group], rows = p.offsets[w.group + 1] - start, high = (rows + TILE_M - 1) / TILE_M;
            if (w.index - w.base < high * p.tiles_n) {
                place(w.index - w.base, high, p.tiles_n, t);
                t.group = w.group, t.row += start, t.end = start + rows;
                return true;
            }
            w.base += high * p.tiles_n;
        }
        return false;
    } else {
        t.group = w.index / (p.tiles_m * p.tiles_n);
        if (t.group >= p.groups) return false;
        place(w.index % (p.tiles_m * p.tiles_n), p.tiles_m, p.tiles_n, t);
        t.end = p.m;
        if constexpr (GROUPS == DW_SM90_CONTRACTION) {
            t.first = p.offsets[t.group];
            t.k = p.offsets[t.group + 1] - t.first;
        }
        return true;
    }
}

DEVICE int steps_of(const tile &t) { return (t.k + STEP - 1) / STEP; }

// ---- loads ------------------------------------------------------------------------------------------------

// Loads ROWS rows of an operand from `row` on, elements `at` to `at` + 63 of the contraction.
template <int ROWS, bool TURNED>
DEVICE void load_operand(uint32 to, const tensor_map *map, uint32 full, int at, int row, int group) {
    if constexpr (TURNED) {
#pragma unroll
        for (int i = 0; i < ROWS; i += 64) tma_load(to + i * 128, map, full, row + i, at, group, 0);
    } else {
        tma_load(to, map, full, at, row, group, 0);
    }
}

DEVICE void load_tiles(const dw_sm90_gemm_params &p, const shared_layout &s, const tensor_map *map_a, const tensor_map *map_b) {
    ring r = {0, 0};
    walk w = {0, 0, 0, 0};
    tile t;
    while (next_tile(p, w, t)) {
        int group_a = GROUPS == DW_SM90_BATCH ? t.group : 0, group_b = GROUPS == DW_SM90_CONTRACTION ? 0 : t.group;
        for (int step = 0; step < steps_of(t); step++) {
            uint32 full = s.full + 8 * r.stage, a = s.stages + r.stage * STAGE_BYTES, b = a + A_BYTES;
            int at = t.first + step * STEP;
            barrier_wait(s.empty + 8 * r.stage, r.phase ^ 1);
            barrier_expect(full, STAGE_BYTES);
            load_operand<TILE_M, TURNED_A>(a, map_a, full, at, t.row, group_a);
            if constexpr (SWIGLU) {
                load_operand<TILE_COLUMNS, TURNED_B>(b, map_b, full, at, t.column, group_b);
                load_operand<TILE_COLUMNS, TURNED_B>(b + TILE_COLUMNS * 128, map_b, full, at, p.n + t.column, group_b);
            } else {
                load_operand<TILE_N, TURNED_B>(b, map_b, full, at, t.column, group_b);
            }
            advance(r, STAGES);
        }
    }
}

// Passes the stages of a tile of the other warpgroup.
DEVICE void skip(ring &r, int steps) {
    int stage = r.stage + steps;
    r.phase ^= stage / STAGES & 1;
    r.stage = stage % STAGES;
}

// A warpgroup multiplies after the other one has waited for all stages of its tile. A thread may not wait for a phase of a
// barrier while the one before it is incomplete, which the parity would take for complete.
enum { CLEARED = 1, TURN = 3 }; // named barriers of the first warpgroup; the next are the second's
DEVICE void wait_for_turn() { named_sync(TURN + threadIdx.x / 128, 256); }
DEVICE void give_turn() { named_arrive(TURN + 1 - threadIdx.x / 128, 256); }

// ---- products ---------------------------------------------------------------------------------------------

// Descriptor of 32 bytes of the contraction of the 64 or more rows of an operand that begin at `address`.
template <bool TURNED> DEVICE uint64 operand(uint32 address, int slice) {
    return tile_descriptor(address + slice * (TURNED ? 2048 : 32), STEP * 128);
}

DEVICE void multiply_slice(float *sums, uint64 a, uint64 b) {
    if constexpr (CODES) wgmma_codes<WIDTH>(sums, a, b, 1);
    else wgmma_ss<WIDTH, TURNED_A, TURNED_B>(sums, a, b, 1);
}

// Tells that a warp has read a stage.
DEVICE void release(const shared_layout &s, int stage) {
    if (lane_index() == 0) barrier_arrive(s.empty + 8 * stage);
}

// Overwrites by zeros what a stage has from `count` on along the contraction: rows of the next group.
DEVICE void clear_rows(uint32 stage, int count) {
    int chunks = (STEP - count) * 8, boxes = (TILE_M + TILE_N) / 64;
    for (int i = threadIdx.x % 128; i < chunks * boxes; i += 128)
        shared_store16(stage + i / chunks * STEP * 128 + count * 128 + i % chunks * 16, make_uint4(0, 0, 0, 0));
    fence_async_shared();
    named_sync(CLEARED + threadIdx.x / 128, 128);
}

DEVICE void multiply(const shared_layout &s, ring &r, const tile &t, float (*sums)[WIDTH / 2]) {
    const int steps = steps_of(t);
    int before = 0;
#pragma unroll
    for (int i = 0; i < PARTS * WIDTH / 2; i++) sums[0][i] = 0.f;
    wait_for_turn();
    for (int step = 0; step < steps; step++) {
        uint32 stage = s.stages + r.stage * STAGE_BYTES;
        barrier_wait(s.full + 8 * r.stage, r.phase);
        if constexpr (GROUPS == DW_SM90_CONTRACTION)
            if (t.k - step * STEP < STEP) clear_rows(stage, t.k - step * STEP);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < SLICES; i++)
#pragma unroll
            for (int part = 0; part < PARTS; part++)
                multiply_slice(sums[part], operand<TURNED_A>(stage + part * 64 * 128, i),
                               operand<TURNED_B>(stage + A_BYTES, i));
        wgmma_commit();
        wgmma_wait<1>(); // the products of the step before are done
        if (step > 0) release(s, before);
        before = r.stage;
        advance(r, STAGES);
    }
    give_turn();
    wgmma_wait<0>();
#pragma unroll
    for (int part = 0; part < PARTS; part++) keep<WIDTH / 2>(sums[part]);
    if (steps > 0) release(s, before);
}

// The scales of a block of the contraction for a thread's accumulators: of its two rows of A, and of the square block
// of B. Those of its 32 columns, where blocks of B are not square, would not fit its registers.
typedef struct block_scales {
    float a[2], b;
} block_scales;

// `row` and `column` are the thread's first ones.
DEVICE block_scales load_scales(const dw_sm90_gemm_params &p, int step, int row, int column) {
    block_scales s;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int at = min(row + 8 * i, p.m - 1);
        s.a[i] = SQUARE_A ? p.scale_a[(long long)(at / DW_SM90_BLOCK) * p.wide_a + step]
                          : p.scale_a[(long long)step * p.m + at];
    }
    s.b = SQUARE_B ? p.scale_b[(long long)(min(column, p.n - 1) / DW_SM90_BLOCK) * p.wide_b + step] : 1.f;
    return s;
}

DEVICE void add_scaled(const dw_sm90_gemm_params &p, int step, int column, block_scales s, const float *products,
                       float *sums) {
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) {
        const int at = min(column + i / 4 * 8 + i % 2, p.n - 1);
        const float of_b = SQUARE_B ? s.b : p.scale_b[(long long)step * p.n + at];
        sums[i] += products[i] * (s.a[i / 2 % 2] * of_b);
    }
}

// Multiplies the warpgroup's share of a tile, and makes `t` that share.
DEVICE void multiply_together(const dw_sm90_gemm_params &p, const shared_layout &s, ring &r, tile &t, float *sums) {
    const int steps = steps_of(t), half = threadIdx.x / 128;
    const uint32 a = TILE_M == 128 ? half * 64 * 128 : 0, b = A_BYTES + (TILE_M == 64 ? half * WIDTH * 128 : 0);
    float products[WIDTH / 2];
    if constexpr (TILE_M == 128) t.row += half * 64;
    else t.column += half * WIDTH;
    const int row = t.row + threadIdx.x % 128 / 32 * 16 + lane_index() / 4, column = t.column + 2 * (lane_index() & 3);
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) products[i] = sums[i] = 0.f;
    for (int step = 0; step < steps; step++) {
        uint32 stage = s.stages + r.stage * STAGE_BYTES;
        block_scales scales;
        if constexpr (BLOCKS) scales = load_scales(p, step, row, column); // while the stage arrives
        barrier_wait(s.full + 8 * r.stage, r.phase);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < SLICES; i++)
            wgmma_codes<WIDTH>(products, operand<false>(stage + a, i), operand<false>(stage + b, i), i > 0);
        wgmma_commit();
        wgmma_wait<0>();
        keep<WIDTH / 2>(products);
        release(s, r.stage);
        if constexpr (BLOCKS) {
            add_scaled(p, step, column, scales, products, sums);
        } else {
#pragma unroll
            for (int i = 0; i < WIDTH / 2; i++) sums[i] += products[i];
        }
        advance(r, STAGES);
    }
}

// The factor of a tile's sums. Codes have the scales of their tensors, or of the group's matrix of B.
DEVICE float factor_of(const dw_sm90_gemm_params &p, const tile &t) {
    if constexpr (CODES && !BLOCKS) return p.alpha * (p.scale_a[0] * p.scale_b[t.group * p.scale_b_step]);
    else return p.alpha;
}

// ---- epilogue ---------------------------------------------------------------------------------------------
// A warp has 16 rows of a part. Chunks of 64 columns (32 of F32) go through its own staging memory, so that it loads
// the residual and stores D in whole rows of 128 bytes.

// Computes the thread's numbers of chunk `chunk`, in the order of the accumulators. `column` is the chunk's first.
DEVICE void finish(const dw_sm90_gemm_params &p, const tile &t, float factor, const float *sums, int chunk, int column,
                   float *x) {
    const uint16 *bias = (const uint16 *)p.bias;
    if constexpr (BIAS && GROUPS == DW_SM90_ROWS) bias += (uint64)t.group * p.n * (SWIGLU ? 2 : 1);
#pragma unroll
    for (int i = 0; i < CHUNK / 8; i++) {
        float b[4] = {0.f, 0.f, 0.f, 0.f}; // of two columns; with SwiGLU also of the other factor
        if constexpr (BIAS)
#pragma unroll
            for (int j = 0; j < (SWIGLU ? 4 : 2); j++) {
                int at = column + 8 * i + 2 * (lane_index() & 3) + j % 2;
                if (at < p.n) b[j] = element_low(bias[(uint64)(j / 2) * p.n + at]);
            }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int from = chunk * CHUNK_VALUES + 4 * i + j;
            float y = fmaf(factor, sums[from], b[j % 2]);
            if constexpr (SWIGLU) x[4 * i + j] = silu(y) * fmaf(factor, sums[from + TILE_N / 4], b[2 + j % 2]);
            else x[4 * i + j] = activate(y);
        }
    }
}

// The address of two 8 x 8 matrices' rows side by side, columns 16 pair to 16 pair + 15, for (ld|st)matrix.
DEVICE uint32 matrix_row(uint32 staging, int pair) {
    return tile_chunk(staging, 16, lane_index() % 16, 2 * pair + lane_index() / 16);
}

// The address of a thread's two F32 numbers: columns 8 i + 2 (lane % 4), row lane / 4 + 8 half.
DEVICE uint32 f32_pair(uint32 staging, int i, int half) {
    return tile_chunk(staging, 16, lane_index() / 4 + 8 * half, 2 * i + (lane_index() & 3) / 2) + (lane_index() & 1) * 8;
}

DEVICE void add_staged(uint32 staging, float *x) {
    if constexpr (F32_OUTPUT) {
#pragma unroll
        for (int i = 0; i < CHUNK / 8; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float2 v = shared_load_f32_pair(f32_pair(staging, i, half));
                x[4 * i + 2 * half] += v.x, x[4 * i + 2 * half + 1] += v.y;
            }
    } else {
#pragma unroll
        for (int pair = 0; pair < CHUNK / 16; pair++) {
            uint32 m[4];
            load_matrices(m, matrix_row(staging, pair));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                x[8 * pair + 2 * i] += element_low(m[i]);
                x[8 * pair + 2 * i + 1] += element_high(m[i]);
            }
        }
    }
}

DEVICE void stage_chunk(uint32 staging, const float *x) {
    if constexpr (F32_OUTPUT) {
#pragma unroll
        for (int i = 0; i < CHUNK / 8; i++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                shared_store_f32_pair(f32_pair(staging, i, half), x[4 * i + 2 * half], x[4 * i + 2 * half + 1]);
    } else {
#pragma unroll
        for (int pair = 0; pair < CHUNK / 16; pair++) {
            const float *v = x + 8 * pair;
            store_matrices(matrix_row(staging, pair), pack_elements(v[0], v[1]), pack_elements(v[2], v[3]),
                           pack_elements(v[4], v[5]), pack_elements(v[6], v[7]));
        }
    }
}

// Loads or stores a lane's 16 bytes of a row of D or the residual; `count` elements of them exist.
DEVICE uint4 load_line(const void *line, int count) {
    uint32 words[4];
    if constexpr (F32_OUTPUT) {
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = i < count ? ((const uint32 *)line)[i] : 0;
    } else {
        load_row_chunk((const uint16 *)line, count, words);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}
DEVICE void store_line(void *line, int count, uint4 v) {
    uint32 words[4] = {v.x, v.y, v.z, v.w};
    if constexpr (F32_OUTPUT) {
        if (count >= 4) *(uint4 *)line = v;
        else
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (i < count) ((uint32 *)line)[i] = words[i];
    } else {
        if (count > 0) store_row_chunk((uint16 *)line, count, words);
    }
}

// The passes of a chunk's 16 rows: in each, eight lanes have one row.
#define LINES 4
#define LANE_ELEMENTS (F32_OUTPUT ? 4 : 8)

DEVICE void store_tile(const dw_sm90_gemm_params &p, const shared_layout &s, const tile &t, float (*sums)[WIDTH / 2]) {
    const int warp = threadIdx.x / 32, lane = lane_index(), size = F32_OUTPUT ? 4 : 2;
    const uint32 staging = s.staging + warp * 16 * 128;
    const long long group = GROUPS == DW_SM90_ROWS ? 0 : t.group;
    const float factor = factor_of(p, t);
    const int first_row = t.row + warp % 4 * 16 + lane / 8;
    uint8 *d = (uint8 *)p.d + (group * p.group_d) * size;
    const uint8 *residual = (const uint8 *)p.residual + (group * p.group_residual) * size;
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int chunk = 0; chunk < WIDTH_COLUMNS / CHUNK; chunk++) {
            float x[CHUNK_VALUES];
            int column = t.column + chunk * CHUNK, mine = column + lane % 8 * LANE_ELEMENTS;
            if (column >= p.n) continue;
            if constexpr (RESIDUAL) {
#pragma unroll
                for (int i = 0; i < LINES; i++) {
                    int row = first_row + part * 64 + 4 * i, count = row < t.end ? p.n - mine : 0;
                    uint4 v = load_line(residual + (row * p.stride_residual + mine) * size, count);
                    shared_store16(tile_chunk(staging, 16, 4 * i + lane / 8, lane % 8), v);
                }
                __syncwarp();
            }
            finish(p, t, factor, sums[part], chunk, column, x);
            if constexpr (RESIDUAL) {
                add_staged(staging, x);
                __syncwarp();
            }
            stage_chunk(staging, x);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < LINES; i++) {
                int row = first_row + part * 64 + 4 * i, count = row < t.end ? p.n - mine : 0;
                store_line(d + (row * p.stride_d + mine) * size, count,
                           shared_load16(tile_chunk(staging, 16, 4 * i + lane / 8, lane % 8)));
            }
            __syncwarp();
        }
}

extern "C" __global__ void __launch_bounds__(DW_SM90_GEMM_THREADS, 1)
    sm90_gemm(const __grid_constant__ tensor_map map_a, const __grid_constant__ tensor_map map_b,
              const __grid_constant__ dw_sm90_gemm_params p) {
    extern __shared__ __align__(1024) uint8 memory[];
    shared_layout s = begin_block(memory);
    if (threadIdx.x / 128 == DW_SM90_MULTIPLIERS) {
        registers_down<40>();
        if (threadIdx.x / 32 == 4 * DW_SM90_MULTIPLIERS && elect_one()) load_tiles(p, s, &map_a, &map_b);
    } else {
        registers_up<232>();
        if (!PROMOTE && threadIdx.x / 128 == 1) give_turn();
        ring r = {0, 0};
        walk w = {0, 0, 0, 0};
        tile t;
        while (next_tile(p, w, t)) {
            float sums[PARTS][WIDTH / 2];
            if constexpr (PROMOTE) {
                multiply_together(p, s, r, t, sums[0]);
            } else {
                if ((w.round - 1) % 2 != threadIdx.x / 128) { // the other warpgroup's
                    skip(r, steps_of(t));
                    continue;
                }
                multiply(s, r, t, sums);
            }
            store_tile(p, s, t, sums);
        }
    }
}
