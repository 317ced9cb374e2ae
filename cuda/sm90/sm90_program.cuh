// An elementwise program behind a GEMM of sm_90a: it computes its results from D's rounded elements and from operands that
// lie as D does. Its source is made at run time (src/kernel/cuda/sm90_program.c); it defines PROGRAM, PROGRAM_OPERANDS,
// PROGRAM_VECTORS, PROGRAM_RESULTS, PROGRAM_HALVES, PROGRAM_WHOLE, PROGRAM_SUMS (sm90_program_sums.cuh), the type
// program_element and run_program(), and includes sm90_gemm.cu. With PROGRAM_HALVES the program reads the two halves
// of D's columns, such as gate and up of one matrix, in place of D. With PROGRAM_WHOLE n is a multiple of 8.
//
// The program has a warpgroup of its own. The two warpgroups that multiply leave their rounded rows of a tile in shared
// memory, and go on with the next tile. A thread of the program's warpgroup takes units of eight elements, PROGRAM_TOGETHER
// at a time: loads of operands for the next units are in flight while it computes, and a warp reads and writes whole
// rows. Vectors have one element for each row.
//
// With PROGRAM_DRAWS the program draws random numbers: run_program() also gets the key and the number of the unit's first
// element in the tensor. With PROGRAM_ROPE, rotary position embedding takes the program's place (sm90_program_rope.cuh).
#ifndef DW_SM90_PROGRAM_CUH
#define DW_SM90_PROGRAM_CUH

#if PROGRAM

#ifndef PROGRAM_DRAWS
#define PROGRAM_DRAWS 0
#endif
#ifndef PROGRAM_ROPE
#define PROGRAM_ROPE 0
#endif
#define PARTS_OF_D (1 + PROGRAM_HALVES)
// Parts of D that a unit reads in shared memory.
#if PROGRAM_ROPE && !ROPE_INTERLEAVED
#define PARTS_READ 2
#else
#define PARTS_READ PARTS_OF_D
#endif
#define LINE_BYTES DW_SM90_LINE_BYTES(TILE_N)
#define ROW_UNITS (TILE_COLUMNS / 8)
#define SHARE_UNITS (64 * ROW_UNITS / 128) // of a thread, in the rows of one warpgroup
// Units that a thread computes together, and turns of them that it loads ahead, as its registers allow.
#define PROGRAM_TOGETHER (PROGRAM_OPERANDS > 1 || SHARE_UNITS % 4 != 0 ? 2 : 4)
#define TURNS_AHEAD (PROGRAM_OPERANDS == 2 && PROGRAM_VECTORS == 0 ? 2 : 1)

static_assert(TOGETHER && !RESIDUAL && !SWIGLU && !CODES && GROUPS != DW_GROUPS_CONTRACTION, "what programs follow");
static_assert(SHARE_UNITS % PROGRAM_TOGETHER == 0 && 2 * SHARE_UNITS % (TURNS_AHEAD * PROGRAM_TOGETHER) == 0, "whole turns");

typedef vector<program_element> elements;
static_assert(sizeof(elements) == 16, "a unit");

// ---- the warpgroups that multiply -----------------------------------------------------------------------------

// Leaves the warpgroup's rounded rows of a tile to the program's, once that has taken those of the tile before.
DEVICE void hand_over(const dw_sm90_gemm_params &p, const shared_layout &s, const tile &t, bool rows, uint32 phase,
                      float (*sums)[WIDTH / 2]) {
    const int half = threadIdx.x / 128;
    const uint32 first = s.lines + (threadIdx.x / 32 * 16 + lane_index() / 4) * LINE_BYTES + lane_index() % 4 * 4;
    const float factor = factor_of(p, t);
    barrier_wait(s.taken + 8 * half, phase ^ 1);
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) {
        uint32 words[2][4];
        if (!rows) break;
        round_strip(s, factor, sums[0], strip, words);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) shared_store_u32(first + j * 8 * LINE_BYTES + strip * 64 + i * 16, words[j][i]);
    }
    __syncwarp();
    if (lane_index() == 0) barrier_arrive(s.handed + 8 * half);
}

DEVICE void compute_for_program(const dw_sm90_gemm_params &p, const shared_layout &s) {
    ring r = {0, 0};
    walk w = {};
    tile t;
    float sums[PARTS][WIDTH / 2];
    uint32 phase = 0;
    while (next_tile(p, w, t)) {
        // The compiler must see that all threads of a warp have the same.
        const int rows = __shfl_sync(0xffffffff, threadIdx.x / 128 * 64, 0), steps = __shfl_sync(0xffffffff, steps_of(t), 0);
        const bool exist = __shfl_sync(0xffffffff, t.row + rows < t.end, 0);
        int step = 0;
        if (exist) {
            if (steps == 0) clear_sums(sums);
            if constexpr (BIAS) load_bias(p, s, t);
            multiply_steps(s, r, t, step, steps, rows, sums);
            if constexpr (BIAS) __syncwarp();
            end_steps(s, r, steps, sums);
        }
        for (; step < steps; step++) pass_stage(s, r);
        hand_over(p, s, t, exist, phase, sums);
        phase ^= 1;
    }
}

// ---- the program's warpgroup ------------------------------------------------------------------------------------

// Eight elements of a row: their line in the tile, their first row and column of D, and how many of them exist.
typedef struct unit {
    int line, at, row, column, count;
} unit;

DEVICE unit unit_of(const dw_sm90_gemm_params &p, const tile &t, int index) {
    unit u;
    u.line = index / ROW_UNITS;
    u.at = index % ROW_UNITS * 8;
    u.row = t.row + u.line;
    u.column = t.column + u.at;
    u.count = u.row < t.end ? p.n - u.column : 0;
    return u;
}

// The elements that a unit reads from memory.
typedef struct loaded {
    elements operands[PROGRAM_OPERANDS + 1];
    uint16 vectors[PROGRAM_VECTORS + 1];
} loaded;

DEVICE void store_eight(void *matrix, int row, int stride, int column, int count, const uint32 *words) {
    uint16 *line = (uint16 *)matrix + (long long)row * stride + column;
    if constexpr (!PROGRAM_WHOLE) store_row_chunk(line, count, words);
    else store16_if(count > 0, line, words);
}

#if PROGRAM_ROPE
#include "sm90_program_rope.cuh"
#else

// The tile's column of the elements of part `part` that a unit at column `at` computes from.
DEVICE int column_of_part(int at, int part) { return part * TILE_COLUMNS + at; }

DEVICE void load_unit(const dw_sm90_gemm_params &p, const unit &u, loaded &to) {
    if (!PROGRAM_WHOLE && u.count <= 0) return;
#pragma unroll
    for (int i = 0; i < PROGRAM_OPERANDS; i++) {
        const uint16 *line = (const uint16 *)p.operands[i] + (long long)u.row * (int)p.operand_strides[i] + u.column;
        uint32 words[4];
        if constexpr (PROGRAM_WHOLE) load16_if(u.count > 0, line, words);
        else load_row_chunk(line, u.count, words);
        memcpy(&to.operands[i], words, sizeof words);
    }
#pragma unroll
    for (int i = 0; i < PROGRAM_VECTORS; i++)
        to.vectors[i] = ((const uint16 *)p.vectors[i])[(u.count > 0 ? u.row : 0) * p.vector_strides[i]];
}

// Runs the program for a unit whose elements of D, or of its halves, are `in`.
DEVICE void compute_unit(const dw_sm90_gemm_params &p, const unit &u, elements *in, const loaded &from, elements *out) {
#pragma unroll
    for (int i = 0; i < PROGRAM_OPERANDS; i++) in[PARTS_OF_D + i] = from.operands[i];
#if PROGRAM_DRAWS
    const random_key key = load_key((long long)p.random_key, p.random_key_stride);
    run_program(in, from.vectors, out, key, (unsigned long long)u.row * p.n + u.column);
#else
    run_program(in, from.vectors, out);
#endif
}

DEVICE void store_unit(const dw_sm90_gemm_params &p, const unit &u, const elements *in, const elements *out) {
    uint32 words[4];
#pragma unroll
    for (int i = 0; i < PARTS_OF_D; i++) {
        memcpy(words, &in[i], sizeof words);
        store_eight(p.d, u.row, (int)p.stride_d, i * p.n + u.column, p.d ? u.count : 0, words);
    }
#pragma unroll
    for (int i = 0; i < PROGRAM_RESULTS; i++) {
        memcpy(words, &out[i], sizeof words);
        store_eight(p.results[i], u.row, (int)p.result_strides[i], u.column, p.results[i] ? u.count : 0, words);
    }
}

#endif

#include "sm90_program_sums.cuh"

// D is 0 in rows behind the last group (group_tiles.cuh), and the program's results follow from that.
DEVICE void finish_rest(const dw_sm90_gemm_params &p) {
    const long long first = max(p.offsets[p.groups], 0), across = (p.n + 7) / 8, count = (p.m - first) * across;
    for (long long i = (long long)blockIdx.x * 128 + threadIdx.x % 128; i < count; i += (long long)gridDim.x * 128) {
        const int column = (int)(i % across) * 8;
        const unit u = {0, 0, (int)(first + i / across), column, p.n - column};
        elements in[PARTS_OF_D + PROGRAM_OPERANDS] = {}, out[PROGRAM_RESULTS];
        loaded from = {};
        load_unit(p, u, from);
        compute_unit(p, u, in, from, out);
        store_unit(p, u, in, out);
    }
}

// Units that a thread loads next.
typedef struct turn {
    unit units[PROGRAM_TOGETHER];
    loaded from[PROGRAM_TOGETHER];
} turn;

// Loads the thread's units from `first` on, if the tile has them.
DEVICE void load_turn(const dw_sm90_gemm_params &p, const tile &t, int first, turn &to) {
    if (first >= 2 * SHARE_UNITS) return;
#pragma unroll
    for (int j = 0; j < PROGRAM_TOGETHER; j++) {
        to.units[j] = unit_of(p, t, threadIdx.x % 128 + 128 * (first + j));
        load_unit(p, to.units[j], to.from[j]);
    }
}

// Finishes a turn, the thread's units from `first` on, and loads the one that takes its place.
DEVICE void finish_turn(const dw_sm90_gemm_params &p, const shared_layout &s, const tile &t, int first, uint32 phase,
                        turn &next, column_sums &sums) {
    const int half = first / SHARE_UNITS;
    elements in[PROGRAM_TOGETHER][PARTS_READ + PROGRAM_OPERANDS], out[PROGRAM_TOGETHER][PROGRAM_RESULTS];
    const turn now = next;
    if (first % SHARE_UNITS == 0) barrier_wait(s.handed + 8 * half, phase);
#pragma unroll
    for (int j = 0; j < PROGRAM_TOGETHER; j++)
#pragma unroll
        for (int part = 0; part < PARTS_READ; part++) {
            uint4 v = make_uint4(0, 0, 0, 0); // a warpgroup without rows of the tile has written nothing
            const unit &u = now.units[j];
            const uint32 at = s.lines + u.line * LINE_BYTES + column_of_part(u.at, part) * 2;
            if (u.count > 0) v = shared_load16(at);
            memcpy(&in[j][part], &v, sizeof v);
        }
    load_turn(p, t, first + TURNS_AHEAD * PROGRAM_TOGETHER, next);
    if (first % SHARE_UNITS == SHARE_UNITS - PROGRAM_TOGETHER) {
        __syncwarp();
        if (lane_index() == 0) barrier_arrive(s.taken + 8 * half);
    }
    // All units before the first store: instructions of one unit wait for each other, and a warp has its scheduler alone.
#pragma unroll
    for (int j = 0; j < PROGRAM_TOGETHER; j++) compute_unit(p, now.units[j], in[j], now.from[j], out[j]);
#pragma unroll
    for (int j = 0; j < PROGRAM_TOGETHER; j++) {
        store_unit(p, now.units[j], in[j], out[j]);
        add_unit(sums, j, now.units[j], out[j]);
    }
    pass_units(sums, PROGRAM_TOGETHER);
}

DEVICE void run_programs(const dw_sm90_gemm_params &p, const shared_layout &s) {
    walk w = {};
    tile t;
    uint32 phase = 0;
    while (next_tile(p, w, t)) {
        turn next[TURNS_AHEAD] = {};
        column_sums sums = {};
#pragma unroll
        for (int i = 0; i < TURNS_AHEAD; i++) load_turn(p, t, i * PROGRAM_TOGETHER, next[i]);
#pragma unroll 1
        for (int first = 0; first < 2 * SHARE_UNITS; first += TURNS_AHEAD * PROGRAM_TOGETHER)
#pragma unroll
            for (int i = 0; i < TURNS_AHEAD; i++) finish_turn(p, s, t, first + i * PROGRAM_TOGETHER, phase, next[i], sums);
        if constexpr (PROGRAM_SUMS != 0) store_sums(p, s, t, sums);
        phase ^= 1;
    }
    if constexpr (GROUPS == DW_GROUPS_ROWS) finish_rest(p);
}

#endif

#endif
