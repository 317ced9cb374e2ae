// GEMM D = activation(alpha A B^T + bias) + residual, A (m x k) and B (n x k) of BF16, F16 or codes of FP8, accumulators
// in F32, on Hopper (sm_90a).
//
// A thread block is persistent and computes tile after tile of D. One thread loads stages of 64 elements of the
// contraction by TMA into a ring; two warpgroups multiply them by wgmma from shared memory. They synchronize with the
// loads only through barriers: full (a stage has arrived) and empty (all warps that multiply it have read it), so that
// stages of the next tiles are loaded meanwhile. Storing D is hidden behind products in one of two ways: each warpgroup
// has every other tile, so that one multiplies while the other stores; or both compute a tile TOGETHER, half of its rows
// each, keep its rounded elements, and store them while they multiply the next tile. The latter reads less for larger
// tiles, the former has time for activations.
//
// An operand whose contiguous axis is not the contraction (TURNED_A: A is stored as k x m, TURNED_B: B as k x n) is
// loaded in boxes of 64 of its columns, which wgmma reads as they are.
//
// Several GEMMs may share a launch (GROUPS, gemm_groups.h): a batch, rows of A in groups with a matrix of B each, or
// groups of the contraction.
//
// Codes of FP8 (CODES_A, CODES_B: 1 for E4M3, 2 for E5M2) always lie along the contraction, because wgmma does not
// transpose them. With PROMOTE both warpgroups multiply the same tile and add each stage's sums in F32
// (sm90_two_levels.cuh). A stage is as long as the blocks of fp8-block: with BLOCKS its sums are multiplied by the two
// blocks' scales first. With ROW_SCALES each row of A and of B has a scale, else each tensor.
//
// Rows of groups may be read and stored by an index (GATHER, SCATTER, WEIGHTS: sm90_gather.cuh).
//
// An elementwise program may follow (PROGRAM, sm90_program.cuh), also one that reads the products with two matrices B
// (PAIR, sm90_pair.cuh), or cross-entropy (LOSS, sm90_loss.cuh). Gradients of
// other logits may be made beside (BESIDE, sm90_beside.cuh). Several blocks may share the contraction of a tile (SPLIT,
// sm90_split.cuh). Few tiles may have a block or a cluster of blocks each (CLUSTER, sm90_cluster.cuh). Rows may have
// factors, and sums of squares (ROW_FACTORS, ROW_SQUARES, sm90_rows.cuh). D may become codes of fp8-block, the next GEMM's
// operand (CODED, sm90_block_codes.cuh).
//
// The launch may be dependent: blocks begin when those of the kernel in front end, and wait for its results.
//
// Defines: TILE_M, TILE_N, STAGES, TOGETHER, GROUPS (gemm_groups.h), TURNED_A, TURNED_B, ELEMENT (with codes that of
// a D in 16 bits), OUTPUT, ACTIVATION (sm100/gemm_params.h), BIAS, RESIDUAL; for codes CODES_A, CODES_B, PROMOTE, BLOCKS
// (sm90_gemm_params.h), ROW_SCALES; for rows by an index GATHER, SCATTER, WEIGHTS.

#ifndef CODES_A // elements of 16 bits
#define CODES_A 0
#define CODES_B 0
#define PROMOTE 0
#define BLOCKS 0
#define ROW_SCALES 0
#endif
#define CODES (CODES_A != 0)
#ifndef PROGRAM
#define PROGRAM 0
#define PROGRAM_HALVES 0
#define PROGRAM_SUMS 0
#endif
#ifndef PAIR
#define PAIR 0
#endif
#ifndef LOSS
#define LOSS 0
#endif
#ifndef CODED
#define CODED 0
#endif
#ifndef ROW_FACTORS
#define ROW_FACTORS 0
#endif
#ifndef ROW_SQUARES
#define ROW_SQUARES 0
#endif
#ifndef BESIDE
#define BESIDE 0
#endif
#ifndef SPLIT
#define SPLIT 0
#endif
#ifndef CLUSTER
#define CLUSTER 0
#endif
#ifndef GATHER
#define GATHER 0
#define SCATTER 0
#define WEIGHTS 0
#endif
#define SQUARE_A ((BLOCKS & DW_SM90_SQUARE_A) != 0)
#define SQUARE_B ((BLOCKS & DW_SM90_SQUARE_B) != 0)

#include "epilogue_parts.cuh"
#include "sm100/gemm_params.h"
#include "sm90.cuh"
#include "sm90_codes.cuh"
#include "sm90_gemm_params.h"
#include "tensor_types.cuh" // here, because others include it for some variants alone

#define SWIGLU (ACTIVATION == DW_GEMM_SWIGLU)
#define F32_OUTPUT (OUTPUT == DW_GEMM_OUTPUT_F32)
#define STEP (CODES ? DW_SM90_CODES_STEP : DW_SM90_GEMM_STEP)
#define SLICES 4 // products along a stage: 32 bytes of the contraction each
#define STAGE_BYTES DW_SM90_STAGE_BYTES(TILE_M, TILE_N)
#define A_BYTES (TILE_M * 128)
// A tile has the same columns of both halves of B's rows, or of two matrices B, which meet in the epilogue.
#define HALVES (SWIGLU || PROGRAM_HALVES || PAIR)
#define TILE_COLUMNS (HALVES ? TILE_N / 2 : TILE_N) // columns of D, or of its halves
#define BAND (TOGETHER || PROMOTE ? 12 : 8)
#define READERS ((TOGETHER && TILE_M > 64) || PROMOTE ? DW_SM90_MULTIPLIERS : 1) // warpgroups that multiply a stage
// A warpgroup's share of a tile: all of it, or 64 of 128 rows, or half of the columns.
#define SPLIT_N (PROMOTE && TILE_M == 64)
#define PARTS (SPLIT_N ? 1 : TILE_M / 64 / READERS) // products of 64 rows
#define WIDTH (SPLIT_N ? TILE_N / 2 : TILE_N)       // columns of a product, or of several panels
// Columns of an instruction: with a program's warpgroup there are 128 registers for a thread at the launch, which do not
// hold the accumulators of 256.
#define PRODUCT_WIDTH (PROGRAM && WIDTH == 256 ? 128 : WIDTH)
#define STRIPS ((SWIGLU ? WIDTH / 2 : WIDTH) / 32)  // of 32 columns of D

// Registers of a thread: 168 for each of three warpgroups at first, which the three share. Loads of scales, and of many
// gathered rows, take more than those of tiles, and gradients beside take most.
#define MANY_LOADS (BLOCKS || GATHER == DW_SM90_GATHER_B)
#define MULTIPLIER_REGISTERS (BESIDE ? 216 : MANY_LOADS ? 224 : 232)
#define LOADER_REGISTERS (BESIDE ? 72 : MANY_LOADS ? 56 : 40)
#if CLUSTER
#define CLUSTER_BYTES DW_SM90_CLUSTER_BYTES(TILE_M, TILE_N, CLUSTER)
#else
#define CLUSTER_BYTES 0
#endif
#define SCALES_BYTES (BLOCKS ? DW_SM90_BLOCK_SCALES_BYTES(TILE_M, TILE_N) : 0) // of a stage
#define ROW_SCALES_BYTES (ROW_SCALES ? DW_SM90_ROW_SCALES_BYTES(TILE_M, TILE_N) : 0)

#include "group_offsets.cuh"
#include "group_tiles.cuh"

static_assert(DW_SM90_MULTIPLIERS * MULTIPLIER_REGISTERS + LOADER_REGISTERS <= 168 * (DW_SM90_MULTIPLIERS + 1),
              "warpgroups would wait for registers that no other gives up");
static_assert(SPLIT_N || TILE_M % (64 * READERS) == 0, "whole products");
static_assert((SWIGLU ? WIDTH / 2 : WIDTH) % 32 == 0, "whole strips");
// Boxes of a turned operand have 64 columns.
static_assert(!TURNED_B || TILE_COLUMNS % 64 == 0, "whole boxes");
static_assert(GROUPS != DW_GROUPS_CONTRACTION || (TURNED_A && TURNED_B), "groups are rows of both operands");
static_assert(GROUPS != DW_GROUPS_ROWS || !TURNED_A, "groups are rows of A");
static_assert(!TOGETHER || (PARTS == 1 && (!F32_OUTPUT || SPLIT || CLUSTER) && !PROMOTE), "the elements of a tile are kept in registers");
static_assert(!(SPLIT || CLUSTER) || (TOGETHER && GROUPS == DW_GROUPS_BATCH && !CODES && !PROGRAM && !LOSS && !BESIDE), "one product");
static_assert((CODES_A != 0) == (CODES_B != 0) && (!PROMOTE || CODES), "codes are multiplied with codes");
static_assert(!CODES || !(TURNED_A || TURNED_B || SWIGLU), "wgmma reads codes along the contraction");
static_assert(!BLOCKS || (PROMOTE && GROUPS == DW_GROUPS_BATCH && STEP == DW_SM90_BLOCK), "a stage has one block");
static_assert(!PROMOTE || (PARTS == 1 && WIDTH % DW_SM90_PANEL_COLUMNS == 0), "a warpgroup multiplies panels of 64 rows");
static_assert(!ROW_SCALES || (CODES && !BLOCKS && GROUPS == DW_GROUPS_BATCH), "rows of codes have scales");
static_assert(DW_SM90_GEMM_SHARED_BYTES(TILE_M, TILE_N, STAGES) + STAGES * SCALES_BYTES + ROW_SCALES_BYTES <= DW_SM90_MOST_SHARED,
              "too many stages");

typedef struct shared_layout {
    uint32 stages, bias, full, empty;
    uint32 lines, handed, taken; // rows of a tile for a program; of strips for D of a loss
    uint32 sums;                 // of a program's results
    uint32 most, factors, special, found, computed; // of columns whose elements become codes
    uint32 scales; // of codes: those of blocks, or of rows
    uint32 beside, beside_full;
    uint32 exchange, arrived; // sums of other blocks of the cluster
} shared_layout;

#if CLUSTER
#include "sm90_cluster.cuh"
#endif

DEVICE shared_layout begin_block(const void *memory) {
    shared_layout s;
    s.stages = shared_address(memory); // swizzled memory must start at multiples of 1024
    s.scales = s.stages + STAGES * STAGE_BYTES;
    s.lines = s.scales + STAGES * SCALES_BYTES + ROW_SCALES_BYTES;
    s.sums = s.lines + (PROGRAM ? 128 * DW_SM90_LINE_BYTES(TILE_N) : LOSS ? DW_SM90_LOSS_SHARED_BYTES : 0);
    s.exchange = s.sums + (PROGRAM_SUMS ? DW_SM90_SUM_BYTES(TILE_COLUMNS) : 0);
    s.most = s.exchange + CLUSTER_BYTES;
    s.factors = s.most + DW_SM90_MULTIPLIERS * 4 * TILE_COLUMNS * 2;
    s.special = s.factors + TILE_COLUMNS * 8;
    s.found = s.special + DW_SM90_MULTIPLIERS * 4 * 4;
    s.computed = s.found + 8;
    s.bias = s.most + (CODED ? DW_SM90_CODED_BYTES(TILE_COLUMNS) : 0);
    s.full = s.bias + (PROGRAM && !BIAS ? 0 : DW_SM90_BIAS_BYTES(TILE_N));
    s.empty = s.full + 8 * STAGES;
    s.handed = s.empty + 8 * STAGES;
    s.taken = s.handed + 8 * DW_SM90_MULTIPLIERS;
    s.arrived = s.handed;
    s.beside_full = s.handed;
    s.beside = (s.beside_full + 8 * DW_SM90_BESIDE_WARPS * DW_SM90_BESIDE_SLOTS + 15) / 16 * 16;
    if (threadIdx.x == 0) {
        for (int i = 0; BESIDE && i < DW_SM90_BESIDE_WARPS * DW_SM90_BESIDE_SLOTS; i++) barrier_init(s.beside_full + 8 * i, 1);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(s.full + 8 * i, GATHER ? 129 : BLOCKS ? 2 : 1);
            barrier_init(s.empty + 8 * i, 4 * READERS);
        }
        for (int i = 0; CODED && i < 2; i++) barrier_init(s.found + 8 * i, 4 * DW_SM90_MULTIPLIERS);
        for (int i = 0; PROGRAM && i < DW_SM90_MULTIPLIERS; i++) {
            barrier_init(s.handed + 8 * i, 4);
            barrier_init(s.taken + 8 * i, 4);
        }
#if CLUSTER
        expect_sums(s.arrived);
#endif
        fence_barrier_init();
    }
    __syncthreads();
    return s;
}

// ---- tiles ------------------------------------------------------------------------------------------------

#if SPLIT
#include "sm90_split.cuh"
#elif !CLUSTER

// A thread's position in its block's sequence of tiles; must start zeroed.
typedef struct walk {
    int round, index;
    group_walk groups;
} walk;

// Computes the block's next tile; returns false if there is none.
DEVICE bool next_tile(const dw_sm90_gemm_params &p, walk &w, tile &t) {
    if (w.round++ == 0) w.index = blockIdx.x;
    else w.index += gridDim.x;
    return find_tile(p, w.index, w.groups, t);
}
#endif

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

// `second`: the map of the other matrix B with PAIR.
DEVICE void load_b(const dw_sm90_gemm_params &p, const tensor_map *map, [[maybe_unused]] const tensor_map *second, uint32 to,
                   uint32 full, int at, const tile &t) {
    const int group = GROUPS == DW_GROUPS_CONTRACTION ? 0 : t.group;
    load_operand<TILE_COLUMNS, TURNED_B>(to, map, full, at, t.column, group);
    if constexpr (PAIR) load_operand<TILE_COLUMNS, TURNED_B>(to + TILE_COLUMNS * 128, second, full, at, t.column, group);
    else if constexpr (HALVES) load_operand<TILE_COLUMNS, TURNED_B>(to + TILE_COLUMNS * 128, map, full, at, p.n + t.column, group);
}

[[maybe_unused]] DEVICE void load_tiles(const dw_sm90_gemm_params &p, const shared_layout &s, const tensor_map *map_a,
                                        const tensor_map *map_b, const tensor_map *second_b) {
    ring r = {0, 0};
    walk w = {};
    tile t;
    while (next_tile(p, w, t)) {
        int group_a = GROUPS == DW_GROUPS_BATCH ? t.group : 0;
        for (int step = 0; step < steps_of(t); step++) {
            uint32 full = s.full + 8 * r.stage, a = s.stages + r.stage * STAGE_BYTES, b = a + A_BYTES;
            int at = t.first + step * STEP;
            barrier_wait(s.empty + 8 * r.stage, r.phase ^ 1);
            barrier_expect(full, STAGE_BYTES);
            load_operand<TILE_M, TURNED_A>(a, map_a, full, at, t.row, group_a);
            load_b(p, map_b, second_b, b, full, at, t);
            advance(r, STAGES);
        }
    }
}

#include "sm90_gather.cuh"

// Passes the stages of a tile of the other warpgroup.
DEVICE void skip(ring &r, int steps) {
    int stage = r.stage + steps;
    r.phase ^= stage / STAGES & 1;
    r.stage = stage % STAGES;
}

// In turn: a warpgroup multiplies after the other one has waited for all stages of its tile. A thread may not wait for a phase of a
// barrier while the one before it is incomplete, which the parity would take for complete.
enum { CLEARED = 1, TURN = 3 }; // named barriers of the first warpgroup; the next are the second's
DEVICE void wait_for_turn() { named_sync(TURN + threadIdx.x / 128, 256); }
DEVICE void give_turn() { named_arrive(TURN + 1 - threadIdx.x / 128, 256); }

// ---- products ---------------------------------------------------------------------------------------------

// Descriptor of the first 32 bytes of the contraction of the 64 or more rows of an operand that begin at `address`.
DEVICE uint64 operand(uint32 address) { return tile_descriptor(address, STEP * 128); }
// The descriptor of what lies `bytes` behind another one's, a multiple of 16.
DEVICE uint64 behind(uint64 descriptor, int bytes) { return descriptor + (bytes >> 4); }
template <bool TURNED> DEVICE int slice_bytes(int slice) { return slice * (TURNED ? 2048 : 32); }

// `b`: the descriptor of B's rows.
DEVICE void multiply_slice(float *sums, uint64 a, uint64 b, int slice, int accumulate) {
#pragma unroll
    for (int at = 0; at < WIDTH; at += PRODUCT_WIDTH) {
        const uint64 rows = behind(b, at * 128 + slice_bytes<TURNED_B>(slice));
        if constexpr (CODES) wgmma_codes<PRODUCT_WIDTH>(sums + at / 2, a, rows, accumulate);
        else wgmma_ss<PRODUCT_WIDTH, TURNED_A, TURNED_B>(sums + at / 2, a, rows, accumulate);
    }
}

// Tells that a warp has read a stage.
DEVICE void release(const shared_layout &s, int stage) {
    if (lane_index() == 0) barrier_arrive(s.empty + 8 * stage);
}

// Overwrites by zeros what a stage has from `count` on along the contraction: rows of the next group.
DEVICE void clear_rows(uint32 stage, int count) {
    int chunks = (STEP - count) * 8, boxes = (TILE_M + TILE_N) / 64;
    for (int i = threadIdx.x % (128 * READERS); i < chunks * boxes; i += 128 * READERS)
        shared_store16(stage + i / chunks * STEP * 128 + count * 128 + i % chunks * 16, make_uint4(0, 0, 0, 0));
    fence_async_shared();
    named_sync(TOGETHER ? CLEARED : CLEARED + threadIdx.x / 128, 128 * READERS);
}

// The sums of a tile without steps; the first products of others set theirs.
DEVICE void clear_sums(float (*sums)[WIDTH / 2]) {
#pragma unroll
    for (int i = 0; i < PARTS * WIDTH / 2; i++) sums[0][i] = 0.f;
}

// Starts to multiply the ring's stage, step `step` of a tile.
DEVICE void start_step(const shared_layout &s, const ring &r, const tile &t, int step, int rows, float (*sums)[WIDTH / 2]) {
    // The compiler must see that all threads of a warp have the same, or it moves each half of each descriptor from ordinary
    // registers to those that wgmma reads.
    const uint32 stage = s.stages + __shfl_sync(0xffffffff, r.stage, 0) * STAGE_BYTES;
    barrier_wait(s.full + 8 * r.stage, r.phase);
    if constexpr (GROUPS == DW_GROUPS_CONTRACTION)
        if (t.k - step * STEP < STEP) clear_rows(stage, t.k - step * STEP);
    if constexpr (GATHER) fence_async_shared(); // cp.async wrote
    const uint64 a = operand(stage + rows * 128), b = operand(stage + A_BYTES);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < SLICES; i++)
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            multiply_slice(sums[part], behind(a, part * 64 * 128 + slice_bytes<TURNED_A>(i)), b, i, step + i > 0);
    wgmma_commit();
}

// The ring's stage that was `back` before this one.
DEVICE int stage_before(const ring &r, int back) { return r.stage < back ? r.stage + STAGES - back : r.stage - back; }

// Multiplies steps of a tile from `step` to `end`, of which the last two are then in flight. All others are given back.
DEVICE void multiply_steps(const shared_layout &s, ring &r, const tile &t, int &step, int end, int rows,
                           float (*sums)[WIDTH / 2]) {
#pragma unroll 1
    for (; step < end; step++) {
        if (step > 1) {
            wgmma_wait<1>();
            release(s, stage_before(r, 2));
        }
        start_step(s, r, t, step, rows, sums);
        advance(r, STAGES);
    }
}

// Waits for a tile's last steps.
DEVICE void end_steps(const shared_layout &s, const ring &r, int steps, float (*sums)[WIDTH / 2]) {
    wgmma_wait<0>();
#pragma unroll
    for (int part = 0; part < PARTS; part++) keep<WIDTH / 2>(sums[part]);
    for (int back = min(steps, 2); back > 0; back--) release(s, stage_before(r, back));
}

// ---- epilogue ---------------------------------------------------------------------------------------------
// A warp has 16 rows of a part, and its columns in strips of 32. A thread computes elements of two rows and has, after
// a transposition within four threads, 16 contiguous bytes of a strip of each, so that it needs no shared memory.

// A thread's chunks of eight elements in the first strip of two rows of D or of the residual, and how many elements of
// these rows exist from there on.
typedef struct chunks {
    uint16 *first[2];
    int count[2];
} chunks;

// The row of D of a thread's element `half` of a part.
DEVICE int row_of(const tile &t, int part, int half) {
    return t.row + ((TOGETHER ? (int)threadIdx.x / 128 : part) * 64) + threadIdx.x % 128 / 32 * 16 + lane_index() / 4 + 8 * half;
}

// The weights of a thread's rows of a part.
[[maybe_unused]] DEVICE void weights_of(const dw_sm90_gemm_params &p, const tile &t, int part, float *weights) {
#pragma unroll
    for (int half = 0; half < 2; half++) weights[half] = weight_of(p, row_of(t, part, half), t.end);
}

DEVICE long long group_of(const tile &t) { return GROUPS == DW_GROUPS_ROWS ? 0 : t.group; }

DEVICE chunks chunks_of(const dw_sm90_gemm_params &p, const tile &t, int part, const void *matrix, long long group, long long stride) {
    chunks c;
    int column = t.column + lane_index() % 4 * 8;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = row_of(t, part, half), stored = stored_row(p, row, t.end);
        c.first[half] = (uint16 *)matrix + group_of(t) * group + stored * stride + column;
        c.count[half] = row < t.end && (!SCATTER || stored >= 0) ? p.n - column : 0;
    }
    return c;
}
DEVICE chunks chunks_of_d(const dw_sm90_gemm_params &p, const tile &t, int part) {
    return chunks_of(p, t, part, p.d, p.group_d, p.stride_d);
}
DEVICE chunks chunks_of_residual(const dw_sm90_gemm_params &p, const tile &t, int part) {
    return chunks_of(p, t, part, p.residual, p.group_residual, p.stride_residual);
}

#include "sm90_rows.cuh"

// Words of a strip: word i of a half is the two adjacent elements of this row that the thread has of the strip's columns
// 8 i to 8 i + 7.
// Loads of strips are in flight together if those of incomplete chunks, which are loops, come after all others.
DEVICE void load_strip(const chunks &c, int strip, uint32 (*words)[4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (c.count[half] - 32 * strip >= 8) v = *(const uint4 *)(c.first[half] + 32 * strip);
        words[half][0] = v.x, words[half][1] = v.y, words[half][2] = v.z, words[half][3] = v.w;
    }
}
DEVICE void load_incomplete(const chunks &c, int strip, uint32 (*words)[4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int count = c.count[half] - 32 * strip;
        if (count > 0 && count < 8) load_row_chunk(c.first[half] + 32 * strip, count, words[half]);
    }
}
DEVICE void store_strip(const chunks &c, int strip, uint32 (*words)[4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        transpose_quad(words[half]);
        store_row_chunk(c.first[half] + 32 * strip, c.count[half] - 32 * strip, words[half]);
    }
}

// Each warp has the bias of its tile's columns in shared memory, those of both halves side by side.
DEVICE uint32 warp_bias(const shared_layout &s) { return s.bias + threadIdx.x / 32 * TILE_N * 2; }

DEVICE void load_bias(const dw_sm90_gemm_params &p, const shared_layout &s, const tile &t) {
    const int lane = lane_index(), half = HALVES ? lane / (TILE_N / 16) : 0, at = t.column + lane % (TILE_COLUMNS / 8) * 8;
    const long long group = GROUPS == DW_GROUPS_ROWS ? (long long)t.group * p.n * (HALVES ? 2 : 1) : 0;
    const uint16 *bias = PAIR && half ? (const uint16 *)p.second_bias + at
                                      : (const uint16 *)p.bias + group + (long long)half * p.n + at;
    uint32 words[4];
    int count = p.n - at;
    __syncwarp(); // all lanes have read those of the last tile
    if (lane >= TILE_N / 8) return;
    const bool is_aligned = (uint64)bias % 16 == 0; // a group's n elements may be any number of bytes
    load_row_chunk(bias, is_aligned ? count : min(count, 4), words);
    if (!is_aligned && count > 4) {
        uint32 more[4];
        load_row_chunk(bias + 4, min(count - 4, 4), more);
        words[2] = more[0], words[3] = more[1];
    }
    shared_store16(warp_bias(s) + lane * 16, make_uint4(words[0], words[1], words[2], words[3]));
}

// The factor of a tile's sums. Codes have the scales of their tensors, or of the group's matrix of B.
DEVICE float factor_of(const dw_sm90_gemm_params &p, const tile &t) {
    if constexpr (CODES && !BLOCKS && !ROW_SCALES) return p.alpha * (p.scale_a[0] * p.scale_b[t.group * p.scale_b_step]);
    else return p.alpha;
}

// Each warp has the scales of its tile's columns, then of its rows, in shared memory.
DEVICE uint32 warp_scales(const shared_layout &s) { return s.scales + threadIdx.x / 32 * (TILE_M + TILE_N) * 4; }

// Starts to load element `at` of `count` into shared memory, or 0 if there is none.
DEVICE void copy_f32(uint32 to, const float *from, int at, int count) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to),
                 "l"((uint64)__cvta_generic_to_global(from + min(at, count - 1))), "r"(at < count ? 4 : 0)
                 : "memory");
}

// Starts to load them: 0 for rows that do not exist.
DEVICE void load_row_scales(const dw_sm90_gemm_params &p, const shared_layout &s, const tile &t) {
    const int lane = lane_index();
    const uint32 to = warp_scales(s) + lane * 4;
    __syncwarp(); // all lanes have read those of the last tile
#pragma unroll
    for (int i = 0; i < TILE_N; i += 32) copy_f32(to + i * 4, p.scale_b, t.column + i + lane, p.n);
#pragma unroll
    for (int i = 0; i < TILE_M; i += 32) copy_f32(to + (TILE_N + i) * 4, p.scale_a, t.row + i + lane, p.m);
}

// Waits for what the warp's lanes have started to load.
DEVICE void wait_for_row_scales() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
}

// Computes the thread's numbers of a strip, in the order of the accumulators. `first`: the product's first row in the
// tile, for scales of rows; `of_rows`: the factors of the thread's two rows; `weights`: those of the results.
DEVICE void finish(const shared_layout &s, float factor, const float *sums, int strip, float *x, int first = 0,
                   [[maybe_unused]] const float *of_rows = nullptr, [[maybe_unused]] const float *weights = nullptr) {
    float of_a[2];
    if constexpr (ROW_FACTORS)
#pragma unroll
        for (int half = 0; half < 2; half++) of_a[half] = factor * of_rows[half];
    if constexpr (ROW_SCALES)
#pragma unroll
        for (int half = 0; half < 2; half++)
            of_a[half] = factor * shared_load_f32(warp_scales(s) + (TILE_N + first + threadIdx.x % 128 / 32 * 16 +
                                                                    lane_index() / 4 + 8 * half) * 4);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int column = 32 * strip + 8 * i + 2 * (lane_index() & 3);
        uint32 b[2] = {0, 0}; // of two columns; with SwiGLU also of the other factor
        float2 of_b;
        if constexpr (BIAS)
#pragma unroll
            for (int j = 0; j < (SWIGLU ? 2 : 1); j++) b[j] = shared_load_u32(warp_bias(s) + (j * TILE_COLUMNS + column) * 2);
        if constexpr (ROW_SCALES) of_b = shared_load_f32_pair(warp_scales(s) + column * 4);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int from = 16 * strip + 4 * i + j;
            if constexpr (ROW_SCALES) factor = of_a[j / 2] * (j % 2 ? of_b.y : of_b.x);
            if constexpr (ROW_FACTORS) factor = of_a[j / 2];
            float y = fmaf(factor, sums[from], j % 2 ? element_high(b[0]) : element_low(b[0]));
            if constexpr (SWIGLU)
                x[4 * i + j] = silu(y) * fmaf(factor, sums[from + WIDTH / 4], j % 2 ? element_high(b[1]) : element_low(b[1]));
            else x[4 * i + j] = activate(y);
            if constexpr (WEIGHTS) x[4 * i + j] *= weights[j / 2];
        }
    }
}

DEVICE void add_words(uint32 (*words)[4], float *x) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            x[4 * i + 2 * half] += element_low(words[half][i]);
            x[4 * i + 2 * half + 1] += element_high(words[half][i]);
        }
}
DEVICE void pack_words(const float *x, uint32 (*words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) words[half][i] = pack_elements(x[4 * i + 2 * half], x[4 * i + 2 * half + 1]);
}

// Rounds a strip: its words are D's elements. With RESIDUAL they are the residual's before.
DEVICE void round_strip(const shared_layout &s, float factor, const float *sums, int strip, uint32 (*words)[4], int first = 0,
                        [[maybe_unused]] const float *of_rows = nullptr, [[maybe_unused]] const float *weights = nullptr) {
    float x[16];
    finish(s, factor, sums, strip, x, first, of_rows, weights);
    if constexpr (RESIDUAL) add_words(words, x);
    pack_words(x, words);
}

// A thread's pairs of a strip of F32, of which four threads have 32 contiguous bytes: those of two rows.
typedef float2 f32_strip[2][4];

DEVICE int f32_column(const tile &t, int strip, int i) { return t.column + 32 * strip + 8 * i + 2 * (lane_index() & 3); }

// Loads the residual's: zeros where it has no elements.
[[maybe_unused]] DEVICE void load_f32_strip(const dw_sm90_gemm_params &p, const tile &t, int part, int strip, f32_strip &x) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = row_of(t, part, half), stored = stored_row(p, row, t.end);
        const float *residual = (const float *)p.residual + group_of(t) * p.group_residual + stored * p.stride_residual;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = f32_column(t, strip, i), count = row < t.end && (!SCATTER || stored >= 0) ? p.n - column : 0;
            x[half][i] = make_float2(0.f, 0.f);
            if (count >= 2) x[half][i] = *(const float2 *)(residual + column);
            else if (count == 1) x[half][i].x = residual[column];
        }
    }
}

DEVICE void store_f32_strip(const dw_sm90_gemm_params &p, const tile &t, int part, int strip, const float *x,
                            [[maybe_unused]] const f32_strip &residual) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = row_of(t, part, half), stored = stored_row(p, row, t.end);
        float *d = (float *)p.d + group_of(t) * p.group_d + stored * p.stride_d;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = f32_column(t, strip, i), count = row < t.end && (!SCATTER || stored >= 0) ? p.n - column : 0;
            float2 v = make_float2(x[4 * i + 2 * half], x[4 * i + 2 * half + 1]);
            if constexpr (RESIDUAL) v.x += residual[half][i].x, v.y += residual[half][i].y;
            if (count >= 2) *(float2 *)(d + column) = v;
            else if (count == 1) d[column] = v.x;
        }
    }
}

DEVICE void store_tile(const dw_sm90_gemm_params &p, const shared_layout &s, const tile &t, float factor,
                       float (*sums)[WIDTH / 2]) {
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        chunks d, residual;
        row_sums squares = begin_row_sums(t, part);
        float of_rows[2];
        load_row_factors(p, t, part, of_rows);
        if constexpr (!F32_OUTPUT) d = chunks_of_d(p, t, part);
        if constexpr (!F32_OUTPUT && RESIDUAL) residual = chunks_of_residual(p, t, part);
        float weights[2];
        if constexpr (WEIGHTS) weights_of(p, t, part, weights);
        f32_strip next, now; // of the residual: loads of a strip are in flight before the strip in front of it is stored
        if constexpr (F32_OUTPUT && RESIDUAL) load_f32_strip(p, t, part, 0, next);
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++) {
            if (t.column + 32 * strip >= p.n) continue;
            if constexpr (F32_OUTPUT) {
                float x[16];
                if constexpr (RESIDUAL) {
                    memcpy(now, next, sizeof now);
                    if (strip + 1 < STRIPS) load_f32_strip(p, t, part, strip + 1, next);
                }
                finish(s, factor, sums[part], strip, x, part * 64, of_rows, weights);
                store_f32_strip(p, t, part, strip, x, now);
            } else {
                uint32 words[2][4];
                if constexpr (RESIDUAL) {
                    load_strip(residual, strip, words);
                    if (p.n % 8 != 0) load_incomplete(residual, strip, words);
                    transpose_quad(words[0]), transpose_quad(words[1]);
                }
                round_strip(s, factor, sums[part], strip, words, part * 64, of_rows, weights);
                add_squares(p, t, strip, words, squares);
                store_strip(d, strip, words);
            }
        }
        store_row_sums(p, squares);
    }
}

// ---- tiles in turn ------------------------------------------------------------------------------------------

DEVICE void multiply(const dw_sm90_gemm_params &p, const shared_layout &s, ring &r, const tile &t, float (*sums)[WIDTH / 2]) {
    const int steps = steps_of(t);
    int step = 0;
    if (steps == 0) clear_sums(sums);
    if constexpr (BIAS) load_bias(p, s, t);
    if constexpr (ROW_SCALES) load_row_scales(p, s, t);
    wait_for_turn();
    multiply_steps(s, r, t, step, steps, 0, sums);
    give_turn();
    if constexpr (BIAS) __syncwarp();
    if constexpr (ROW_SCALES) wait_for_row_scales();
    end_steps(s, r, steps, sums);
}

[[maybe_unused]] DEVICE void compute_in_turn(const dw_sm90_gemm_params &p, const shared_layout &s) {
    ring r = {0, 0};
    walk w = {};
    tile t;
    if (threadIdx.x / 128 == 1) give_turn();
    while (next_tile(p, w, t)) {
        if ((w.round - 1) % 2 != threadIdx.x / 128) { // the other warpgroup's
            skip(r, steps_of(t));
            continue;
        }
        float sums[PARTS][WIDTH / 2];
        const float factor = factor_of(p, t);
        multiply(p, s, r, t, sums);
        store_tile(p, s, t, factor, sums);
    }
}

// ---- tiles together -----------------------------------------------------------------------------------------

// Gives a stage back unread, so that the tensor cores are the other warpgroup's.
[[maybe_unused]] DEVICE void pass_stage(const shared_layout &s, ring &r) {
    barrier_wait(s.full + 8 * r.stage, r.phase);
    release(s, r.stage);
    advance(r, STAGES);
}

#include "sm90_loss.cuh"
#include "sm90_beside.cuh"
#include "sm90_two_levels.cuh"

#if PROGRAM
#include "sm90_program.cuh"
#elif PAIR
#include "sm90_pair.cuh"
#elif CODED
#include "sm90_block_codes.cuh"
#elif !LOSS

// The elements of the last tile; counts of 0: there is none.
typedef struct held {
    chunks d;
    uint32 words[STRIPS][2][4];
} held;

#if SPLIT
DEVICE void load_residual(const chunks &residual, int n, uint32 (*words)[2][4]) {
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) load_strip(residual, strip, words[strip]);
    if (n % 8 != 0)
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++) load_incomplete(residual, strip, words[strip]);
#pragma unroll
    for (int i = 0; i < 2 * STRIPS; i++) transpose_quad(words[i / 2][i % 2]);
}

// D in F32: each tile is stored before the next one is multiplied.
[[maybe_unused]] DEVICE void compute_and_store(const dw_sm90_gemm_params &p, const shared_layout &s) {
    ring r = {0, 0};
    walk w = {};
    tile t;
    float sums[PARTS][WIDTH / 2];
    while (next_tile(p, w, t)) {
        const int rows = __shfl_sync(0xffffffff, threadIdx.x / 128 * 64, 0), steps = __shfl_sync(0xffffffff, steps_of(t), 0);
        int step = 0;
        if (__shfl_sync(0xffffffff, t.row + rows >= t.end, 0)) { // none of these rows exists
            for (; step < steps; step++) pass_stage(s, r);
            continue;
        }
        if constexpr (BIAS) load_bias(p, s, t);
        multiply_steps(s, r, t, step, steps, rows, sums);
        if constexpr (BIAS) __syncwarp();
        meeting others = begin_meeting(p, w);
        end_steps(s, r, steps, sums);
        if (add_parts(p, t, others, sums[0])) store_tile(p, s, t, factor_of(p, t), sums);
    }
}
#endif

#if CLUSTER
// Computes the block's part of a tile: sends the sums of other blocks' strips to them, and stores its own. It is less code
// than compute_together, and code is loaded into the instruction cache in each launch.
DEVICE void compute_in_cluster(const dw_sm90_gemm_params &p, const shared_layout &s) {
    ring r = {0, 0};
    walk w = {};
    tile t;
    float sums[PARTS][WIDTH / 2];
    (void)next_tile(p, w, t);
    // The compiler must see that all threads of a warp have the same.
    const int rows = __shfl_sync(0xffffffff, threadIdx.x / 128 * 64, 0), steps = __shfl_sync(0xffffffff, steps_of(t), 0),
              rank = __shfl_sync(0xffffffff, block_rank(), 0);
    int step = 0;
    if (rows >= TILE_M || __shfl_sync(0xffffffff, t.row + rows >= t.end, 0)) { // none of these rows exists
        cluster_wait();
        for (; READERS > 1 && step < steps; step++) pass_stage(s, r);
        return;
    }
    if (steps == 0) clear_sums(sums);
    if constexpr (BIAS) load_bias(p, s, t);
    multiply_steps(s, r, t, step, steps, rows, sums);
    if constexpr (BIAS) __syncwarp();
    cluster_wait(); // sums may not be stored in a block that has not begun
    end_steps(s, r, steps, sums);
    send_sums(s, rank, sums[0]);
    if (own_strips(rank) == 0) return;
    const float factor = factor_of(p, t);
    chunks d, residual;
    if constexpr (!F32_OUTPUT) d = chunks_of_d(p, t, 0);
    if constexpr (!F32_OUTPUT && RESIDUAL) residual = chunks_of_residual(p, t, 0);
    wait_for_sums(s);
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) {
        if (owner_of(strip) != rank || t.column + 32 * strip >= p.n) continue;
        receive_sums(s, strip, sums[0]);
        if constexpr (F32_OUTPUT) {
            float x[16];
            f32_strip added;
            if constexpr (RESIDUAL) load_f32_strip(p, t, 0, strip, added);
            finish(s, factor, sums[0], strip, x);
            store_f32_strip(p, t, 0, strip, x, added);
        } else {
            uint32 words[2][4];
            if constexpr (RESIDUAL) {
                load_strip(residual, strip, words);
                if (p.n % 8 != 0) load_incomplete(residual, strip, words);
                transpose_quad(words[0]), transpose_quad(words[1]);
            }
            round_strip(s, factor, sums[0], strip, words);
            store_strip(d, strip, words);
        }
    }
}
#endif

// Stores the last tile while multiplying tile t, whose elements it keeps.
DEVICE void multiply_and_store(const dw_sm90_gemm_params &p, const shared_layout &s, ring &r, const walk &w, const tile &t,
                               float (*sums)[WIDTH / 2], held &h) {
    (void)w;
    // The compiler must see that all threads of a warp have the same.
    const int rows = __shfl_sync(0xffffffff, threadIdx.x / 128 * 64, 0), steps = __shfl_sync(0xffffffff, steps_of(t), 0);
    int step = 0;
    if (GROUPS != DW_GROUPS_CONTRACTION && __shfl_sync(0xffffffff, t.row + rows >= t.end, 0)) { // none of these rows exists
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++) store_strip(h.d, strip, h.words[strip]);
        for (; step < steps; step++) pass_stage(s, r);
        h.d.count[0] = h.d.count[1] = 0;
        return;
    }
    constexpr bool EARLY = RESIDUAL && !SPLIT; // a part that does not store D has no residual
    const float factor = factor_of(p, t);
    chunks residual;
    float of_rows[2];
    load_row_factors(p, t, 0, of_rows);
    if constexpr (RESIDUAL) residual = chunks_of_residual(p, t, 0);
    if (steps == 0) clear_sums(sums);
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) { // a strip behind each step
        multiply_steps(s, r, t, step, min(strip + 1, steps), rows, sums);
        if (BIAS && strip == 0) load_bias(p, s, t);
        if (ROW_SCALES && strip == 0) load_row_scales(p, s, t);
        store_strip(h.d, strip, h.words[strip]);
        if constexpr (EARLY) load_strip(residual, strip, h.words[strip]);
    }
    if (EARLY && p.n % 8 != 0)
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++) load_incomplete(residual, strip, h.words[strip]);
    multiply_steps(s, r, t, step, steps, rows, sums);
    if constexpr (EARLY)
#pragma unroll
        for (int i = 0; i < 2 * STRIPS; i++) transpose_quad(h.words[i / 2][i % 2]);
    h.d = chunks_of_d(p, t, 0);
    row_sums squares = begin_row_sums(t, 0);
    float weights[2];
    if constexpr (WEIGHTS) weights_of(p, t, 0, weights);
    if constexpr (BIAS) __syncwarp();
    if constexpr (ROW_SCALES) wait_for_row_scales();
#if SPLIT
    meeting others = begin_meeting(p, w);
#endif
    end_steps(s, r, steps, sums);
#if SPLIT
    if (!add_parts(p, t, others, sums[0])) {
        // A 0 that the compiler does not know: it would repeat all code for a tile behind which nothing is stored.
        asm volatile("mov.u32 %0, 0;" : "=r"(h.d.count[0]));
        h.d.count[1] = h.d.count[0];
        return;
    }
    if constexpr (RESIDUAL) load_residual(residual, p.n, h.words);
#endif
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) {
        round_strip(s, factor, sums[0], strip, h.words[strip], rows, of_rows, weights);
        add_squares(p, t, strip, h.words[strip], squares);
    }
    store_row_sums(p, squares);
}

[[maybe_unused]] DEVICE void compute_together(const dw_sm90_gemm_params &p, const shared_layout &s) {
    ring r = {0, 0};
    walk w = {};
    tile t;
    float sums[PARTS][WIDTH / 2];
    held h;
    h.d.count[0] = h.d.count[1] = 0;
    while (next_tile(p, w, t)) multiply_and_store(p, s, r, w, t, sums, h);
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) store_strip(h.d, strip, h.words[strip]);
}

#endif

#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTERS
#endif

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(PROGRAM ? DW_SM90_PROGRAM_THREADS : DW_SM90_GEMM_THREADS, 1)
    sm90_gemm(const __grid_constant__ tensor_map map_a, const __grid_constant__ tensor_map map_b,
              const __grid_constant__ dw_sm90_gemm_params p
#if LOSS
              , const __grid_constant__ tensor_map map_d
#elif PAIR
              , const __grid_constant__ tensor_map second_b
#endif
    ) {
    extern __shared__ __align__(1024) uint8 memory[];
    begin_next_kernel();
    if (CLUSTER && threadIdx.x == 128 * DW_SM90_MULTIPLIERS) prefetch_map(&map_a), prefetch_map(&map_b);
    shared_layout s = begin_block(memory);
#if CLUSTER
    cluster_arrive();
#endif
    wait_for_kernels();
    if constexpr (GROUPS != DW_GROUPS_BATCH)
        check_offsets(p.offsets, 1, p.groups, GROUPS == DW_GROUPS_ROWS ? p.m : p.k, p.error);
    const int role = __shfl_sync(0xffffffff, threadIdx.x / 128, 0); // the compiler must see that a warp has one role
    if (role == DW_SM90_MULTIPLIERS) {
        registers_down<LOADER_REGISTERS>();
#if GATHER
        load_gathered(p, s, &map_a, &map_b);
#else
        const tensor_map *second = nullptr;
#if PAIR
        second = &second_b;
#endif
        if (threadIdx.x / 32 == 4 * DW_SM90_MULTIPLIERS && elect_one()) load_tiles(p, s, &map_a, &map_b, second);
#if CLUSTER
        __syncwarp();
        cluster_wait();
#endif
#endif
#if BLOCKS
        if (threadIdx.x / 32 == 4 * DW_SM90_MULTIPLIERS + 1) load_scales(p, s);
#endif
#if BESIDE
        if (threadIdx.x / 32 > 4 * DW_SM90_MULTIPLIERS && p.loss.count > 0) make_gradients(p.loss, s);
#endif
#if PROGRAM
    } else if (role > DW_SM90_MULTIPLIERS) {
        registers_up<136>();
        run_programs(p, s);
    } else {
        registers_up<168>();
        compute_for_program(p, s);
    }
#elif LOSS
    } else {
        registers_up<232>();
        compute_for_loss(p, s, &map_d);
    }
#elif CODED
    } else {
        registers_up<MULTIPLIER_REGISTERS>();
        compute_and_encode(p, s);
    }
#else
    } else {
        registers_up<MULTIPLIER_REGISTERS>();
#if PROMOTE
        compute_in_two_levels(p, s);
#elif PAIR
        compute_pair(p, s);
#else
#if CLUSTER
        compute_in_cluster(p, s);
#elif SPLIT && OUTPUT == DW_GEMM_OUTPUT_F32
        compute_and_store(p, s);
#else
        if constexpr (TOGETHER) compute_together(p, s);
        else compute_in_turn(p, s);
#endif
#endif
        if constexpr (SCATTER) scatter_rest(p, 128 * DW_SM90_MULTIPLIERS);
        else if constexpr (GROUPS == DW_GROUPS_ROWS) store_rest<F32_OUTPUT, RESIDUAL>(p, 128 * DW_SM90_MULTIPLIERS);
    }
#endif
}
