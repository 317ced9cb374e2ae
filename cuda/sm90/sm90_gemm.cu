// GEMM D = activation(alpha A B^T + bias) + residual, A (m x k) and B (n x k) of BF16 or F16, accumulators in F32, on
// Hopper (sm_90a).
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
// Several products may share a launch (GROUPS, sm90_gemm_params.h): a batch, rows of A in groups with a matrix of B
// each, or groups of the contraction. Offsets of groups are read from device memory, so the host need not know them.
//
// Defines: TILE_M, TILE_N, STAGES, TOGETHER, GROUPS (sm90_gemm_params.h), TURNED_A, TURNED_B, ELEMENT, OUTPUT, ACTIVATION
// (sm100/gemm_params.h), BIAS, RESIDUAL.

#include "epilogue_parts.cuh"
#include "sm100/gemm_params.h"
#include "sm90.cuh"
#include "sm90_gemm_params.h"

#define SWIGLU (ACTIVATION == DW_GEMM_SWIGLU)
#define F32_OUTPUT (OUTPUT == DW_GEMM_OUTPUT_F32)
#define STEP DW_SM90_GEMM_STEP
#define STAGE_BYTES DW_SM90_STAGE_BYTES(TILE_M, TILE_N)
#define A_BYTES (TILE_M * 128)
#define TILE_COLUMNS (SWIGLU ? TILE_N / 2 : TILE_N) // columns of D
#define BAND (TOGETHER ? 12 : 8) // adjacent tiles along m that are processed together, because they share B in the L2 cache
#define READERS (TOGETHER ? DW_SM90_MULTIPLIERS : 1) // warpgroups that multiply a stage
#define PARTS (TILE_M / 64 / READERS)               // products of 64 rows of a warpgroup
#define STRIPS (TILE_COLUMNS / 32)                  // of 32 columns of D

static_assert(TILE_M % (64 * READERS) == 0, "whole products");
static_assert(TILE_COLUMNS % 32 == 0, "whole strips");
// Boxes of a turned operand have 64 columns.
static_assert(!TURNED_B || TILE_COLUMNS % 64 == 0, "whole boxes");
static_assert(GROUPS != DW_SM90_CONTRACTION || (TURNED_A && TURNED_B), "groups are rows of both operands");
static_assert(GROUPS != DW_SM90_ROWS || !TURNED_A, "groups are rows of A");
static_assert(!TOGETHER || (PARTS == 1 && !F32_OUTPUT), "the elements of a tile are kept in registers");
static_assert(DW_SM90_GEMM_SHARED_BYTES(TILE_M, TILE_N, STAGES) <= DW_SM90_MOST_SHARED, "too many stages");

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
            barrier_init(s.empty + 8 * i, 4 * READERS);
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

// In turn: a warpgroup multiplies after the other one has waited for all stages of its tile. A thread may not wait for a phase of a
// barrier while the one before it is incomplete, which the parity would take for complete.
enum { CLEARED = 1, TURN = 3 }; // named barriers of the first warpgroup; the next are the second's
DEVICE void wait_for_turn() { named_sync(TURN + threadIdx.x / 128, 256); }
DEVICE void give_turn() { named_arrive(TURN + 1 - threadIdx.x / 128, 256); }

// ---- products ---------------------------------------------------------------------------------------------

// Descriptor of 16 elements of the contraction of the 64 or more rows of an operand that begin at `address`.
template <bool TURNED> DEVICE uint64 operand(uint32 address, int sixteenth) {
    return tile_descriptor(address + sixteenth * (TURNED ? 2048 : 32), STEP * 128);
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
DEVICE void clear_sums(float (*sums)[TILE_N / 2]) {
#pragma unroll
    for (int i = 0; i < PARTS * TILE_N / 2; i++) sums[0][i] = 0.f;
}

// Starts to multiply the ring's stage, step `step` of a tile.
DEVICE void start_step(const shared_layout &s, const ring &r, const tile &t, int step, int rows, float (*sums)[TILE_N / 2]) {
    uint32 stage = s.stages + r.stage * STAGE_BYTES;
    barrier_wait(s.full + 8 * r.stage, r.phase);
    if constexpr (GROUPS == DW_SM90_CONTRACTION)
        if (t.k - step * STEP < STEP) clear_rows(stage, t.k - step * STEP);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < STEP / 16; i++)
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            wgmma_ss<TILE_N, TURNED_A, TURNED_B>(sums[part], operand<TURNED_A>(stage + (rows + part * 64) * 128, i),
                                                operand<TURNED_B>(stage + A_BYTES, i), step + i > 0);
    wgmma_commit();
}

// Waits until the step before `step` is multiplied, and gives its stage back.
DEVICE void end_step_before(const shared_layout &s, ring &r, int step, int &before) {
    wgmma_wait<1>();
    if (step > 0) release(s, before);
    before = r.stage;
    advance(r, STAGES);
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

DEVICE long long group_of(const tile &t) { return GROUPS == DW_SM90_ROWS ? 0 : t.group; }

DEVICE chunks chunks_of(const dw_sm90_gemm_params &p, const tile &t, int part, const void *matrix, long long group, long long stride) {
    chunks c;
    int column = t.column + lane_index() % 4 * 8;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = row_of(t, part, half);
        c.first[half] = (uint16 *)matrix + group_of(t) * group + row * stride + column;
        c.count[half] = row < t.end ? p.n - column : 0;
    }
    return c;
}
DEVICE chunks chunks_of_d(const dw_sm90_gemm_params &p, const tile &t, int part) {
    return chunks_of(p, t, part, p.d, p.group_d, p.stride_d);
}
DEVICE chunks chunks_of_residual(const dw_sm90_gemm_params &p, const tile &t, int part) {
    return chunks_of(p, t, part, p.residual, p.group_residual, p.stride_residual);
}

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

// Computes the thread's numbers of a strip, in the order of the accumulators.
DEVICE void finish(const dw_sm90_gemm_params &p, const tile &t, const float *sums, int strip, float *x) {
    const uint16 *bias = (const uint16 *)p.bias;
    if constexpr (BIAS && GROUPS == DW_SM90_ROWS) bias += (uint64)t.group * p.n * (SWIGLU ? 2 : 1);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float b[4] = {0.f, 0.f, 0.f, 0.f}; // of two columns; with SwiGLU also of the other factor
        if constexpr (BIAS)
#pragma unroll
            for (int j = 0; j < (SWIGLU ? 4 : 2); j++) {
                int at = t.column + 32 * strip + 8 * i + 2 * (lane_index() & 3) + j % 2;
                if (at < p.n) b[j] = element_low(bias[(uint64)(j / 2) * p.n + at]);
            }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int from = 16 * strip + 4 * i + j;
            float y = fmaf(p.alpha, sums[from], b[j % 2]);
            if constexpr (SWIGLU) x[4 * i + j] = silu(y) * fmaf(p.alpha, sums[from + TILE_N / 4], b[2 + j % 2]);
            else x[4 * i + j] = activate(y);
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

// Stores a strip of F32, of which four threads have 32 contiguous bytes, after adding the residual.
DEVICE void store_f32_strip(const dw_sm90_gemm_params &p, const tile &t, int part, int strip, float *x) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = row_of(t, part, half);
        float *d = (float *)p.d + group_of(t) * p.group_d + row * p.stride_d;
        const float *residual = (const float *)p.residual + group_of(t) * p.group_residual + row * p.stride_residual;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int column = t.column + 32 * strip + 8 * i + 2 * (lane_index() & 3), count = row < t.end ? p.n - column : 0;
            float2 v = make_float2(x[4 * i + 2 * half], x[4 * i + 2 * half + 1]);
            if constexpr (RESIDUAL) {
                if (count >= 2) {
                    float2 u = *(const float2 *)(residual + column);
                    v.x += u.x, v.y += u.y;
                } else if (count == 1) v.x += residual[column];
            }
            if (count >= 2) *(float2 *)(d + column) = v;
            else if (count == 1) d[column] = v.x;
        }
    }
}

DEVICE void store_tile(const dw_sm90_gemm_params &p, const tile &t, float (*sums)[TILE_N / 2]) {
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        chunks d, residual;
        if constexpr (!F32_OUTPUT) d = chunks_of_d(p, t, part);
        if constexpr (!F32_OUTPUT && RESIDUAL) residual = chunks_of_residual(p, t, part);
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++) {
            float x[16];
            uint32 words[2][4];
            if (t.column + 32 * strip >= p.n) continue;
            if constexpr (!F32_OUTPUT && RESIDUAL) {
                load_strip(residual, strip, words);
                if (p.n % 8 != 0) load_incomplete(residual, strip, words);
            }
            finish(p, t, sums[part], strip, x);
            if constexpr (F32_OUTPUT) {
                store_f32_strip(p, t, part, strip, x);
            } else {
                if constexpr (RESIDUAL) {
                    transpose_quad(words[0]), transpose_quad(words[1]);
                    add_words(words, x);
                }
                pack_words(x, words);
                store_strip(d, strip, words);
            }
        }
    }
}

// ---- tiles in turn ------------------------------------------------------------------------------------------

DEVICE void multiply(const shared_layout &s, ring &r, const tile &t, float (*sums)[TILE_N / 2]) {
    const int steps = steps_of(t);
    int before = 0;
    if (steps == 0) clear_sums(sums);
    wait_for_turn();
    for (int step = 0; step < steps; step++) {
        start_step(s, r, t, step, 0, sums);
        end_step_before(s, r, step, before);
    }
    give_turn();
    wgmma_wait<0>();
#pragma unroll
    for (int part = 0; part < PARTS; part++) keep<TILE_N / 2>(sums[part]);
    if (steps > 0) release(s, before);
}

DEVICE void compute_in_turn(const dw_sm90_gemm_params &p, const shared_layout &s) {
    ring r = {0, 0};
    walk w = {0, 0, 0, 0};
    tile t;
    if (threadIdx.x / 128 == 1) give_turn();
    while (next_tile(p, w, t)) {
        if ((w.round - 1) % 2 != threadIdx.x / 128) { // the other warpgroup's
            skip(r, steps_of(t));
            continue;
        }
        float sums[PARTS][TILE_N / 2];
        multiply(s, r, t, sums);
        store_tile(p, t, sums);
    }
}

// ---- tiles together -----------------------------------------------------------------------------------------

// The elements of the last tile; counts of 0: there is none.
typedef struct held {
    chunks d;
    uint32 words[STRIPS][2][4];
} held;

DEVICE void store_held(held &h) {
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) store_strip(h.d, strip, h.words[strip]);
    h.d.count[0] = h.d.count[1] = 0;
}

// Gives the stages of a tile back unread, so that the tensor cores are the other warpgroup's.
DEVICE void pass_stages(const shared_layout &s, ring &r, int steps) {
    for (int step = 0; step < steps; step++) {
        barrier_wait(s.full + 8 * r.stage, r.phase);
        release(s, r.stage);
        advance(r, STAGES);
    }
}

// Stores the last tile while multiplying tile t, whose elements it keeps.
DEVICE void multiply_and_store(const dw_sm90_gemm_params &p, const shared_layout &s, ring &r, const tile &t,
                               float (*sums)[TILE_N / 2], held &h) {
    // The compiler must see that all threads of a warp have the same.
    const int rows = __shfl_sync(0xffffffff, threadIdx.x / 128 * 64, 0), steps = __shfl_sync(0xffffffff, steps_of(t), 0);
    if (GROUPS != DW_SM90_CONTRACTION && __shfl_sync(0xffffffff, t.row + rows >= t.end, 0)) { // none of these rows exists
        store_held(h);
        pass_stages(s, r, steps);
        return;
    }
    chunks residual;
    int before = 0;
    if constexpr (RESIDUAL) residual = chunks_of_residual(p, t, 0);
    if (steps == 0) clear_sums(sums);
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) {
        if (strip < steps) start_step(s, r, t, strip, rows, sums);
        store_strip(h.d, strip, h.words[strip]);
        if constexpr (RESIDUAL) load_strip(residual, strip, h.words[strip]);
        if (strip < steps) end_step_before(s, r, strip, before);
    }
    if (RESIDUAL && p.n % 8 != 0)
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++) load_incomplete(residual, strip, h.words[strip]);
    for (int step = STRIPS; step < steps; step++) {
        start_step(s, r, t, step, rows, sums);
        end_step_before(s, r, step, before);
    }
    if constexpr (RESIDUAL)
#pragma unroll
        for (int i = 0; i < 2 * STRIPS; i++) transpose_quad(h.words[i / 2][i % 2]);
    h.d = chunks_of_d(p, t, 0);
    wgmma_wait<0>();
    keep<TILE_N / 2>(sums[0]);
    if (steps > 0) release(s, before);
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) {
        float x[16];
        finish(p, t, sums[0], strip, x);
        if constexpr (RESIDUAL) add_words(h.words[strip], x);
        pack_words(x, h.words[strip]);
    }
}

DEVICE void compute_together(const dw_sm90_gemm_params &p, const shared_layout &s) {
    ring r = {0, 0};
    walk w = {0, 0, 0, 0};
    tile t;
    float sums[PARTS][TILE_N / 2];
    held h;
    h.d.count[0] = h.d.count[1] = 0;
    while (next_tile(p, w, t)) multiply_and_store(p, s, r, t, sums, h);
    store_held(h);
}

// ---- rows without a group -------------------------------------------------------------------------------------

// D is 0 in rows behind the last group, or the residual. All blocks share these rows.
DEVICE void store_rest(const dw_sm90_gemm_params &p) {
#if F32_OUTPUT
    typedef float stored;
#else
    typedef uint16 stored;
#endif
    const int width = p.n % (16 / sizeof(stored)) == 0 ? 16 / sizeof(stored) : 1; // elements of an access
    const long long first = p.offsets[p.groups], across = p.n / width, count = (p.m - first) * across,
                    step = (long long)gridDim.x * 128 * DW_SM90_MULTIPLIERS;
    for (long long i = blockIdx.x * 128LL * DW_SM90_MULTIPLIERS + threadIdx.x; i < count; i += step) {
        const long long row = first + i / across, column = i % across * width;
        stored *d = (stored *)p.d + row * p.stride_d + column;
        const stored *residual = (const stored *)p.residual + row * p.stride_residual + column;
        if (width > 1) *(uint4 *)d = RESIDUAL ? *(const uint4 *)residual : make_uint4(0, 0, 0, 0);
        else *d = RESIDUAL ? *residual : (stored)0;
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
        if constexpr (TOGETHER) compute_together(p, s);
        else compute_in_turn(p, s);
        if constexpr (GROUPS == DW_SM90_ROWS) store_rest(p);
    }
}
