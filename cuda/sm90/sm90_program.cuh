// An elementwise program behind a GEMM of sm_90a: it computes its results from D's rounded elements and from operands that
// lie as D does. Its source is made at run time (src/kernel/cuda/sm90_program.c); it defines PROGRAM, PROGRAM_OPERANDS,
// PROGRAM_VECTORS, PROGRAM_RESULTS, PROGRAM_HALVES, PROGRAM_WHOLE, the type program_element and run_program(), and includes
// sm90_gemm.cu. With PROGRAM_HALVES the program reads the two halves of D's columns, such as gate and up of one matrix, in place of D. With PROGRAM_WHOLE n is a
// multiple of 8.
//
// The program runs for the elements of a tile that the warpgroups hold, between the products of the next tile, in units:
// the 16 bytes that a thread has of one of its two rows in a strip of 32 columns. Operands come to shared memory by TMA, a
// strip at a time, loaded by a warp of their own, so that no warp that multiplies waits for the memory. Vectors have one
// element for each row, which a thread keeps with those of the tile.
#ifndef DW_SM90_PROGRAM_CUH
#define DW_SM90_PROGRAM_CUH

#if PROGRAM

#define PARTS_OF_D (1 + PROGRAM_HALVES)
#define PROGRAM_STRIPS (STRIPS / PARTS_OF_D) // of the program's columns
#define UNITS (2 * PROGRAM_STRIPS)
#define SLOT_BYTES (PROGRAM_OPERANDS * DW_SM90_STRIP_BYTES)

// The elements of the last tile.
typedef struct held {
    int row, column; // of the thread's first unit
    int end;         // of the rows that exist, or HELD_NOTHING: there is no last tile
    uint32 phase;    // of the first slot
    uint16 vectors[2][PROGRAM_VECTORS + 1]; // elements of its rows
    uint32 words[STRIPS][2][4];
} held;

#define HELD_NOTHING -1
DEVICE void hold_nothing(held &h) { h.end = HELD_NOTHING, h.phase = 0; }

// Loads the strips of the operands, tile after tile. The operands that a program does not have are never read.
DEVICE void load_strips(const dw_sm90_gemm_params &p, const shared_layout &s, const tensor_map *map_0,
                        const tensor_map *map_1, const tensor_map *map_2) {
    const tensor_map *const maps[] = {map_0, map_1, map_2};
    ring r = {0, 0};
    walk w = {};
    tile t;
    while (next_tile(p, w, t)) {
        for (int strip = 0; strip < PROGRAM_STRIPS; strip++) {
            const uint32 full = s.strips_full + 8 * r.stage, to = s.strips + r.stage * SLOT_BYTES;
            barrier_wait(s.strips_empty + 8 * r.stage, r.phase ^ 1);
            barrier_expect(full, SLOT_BYTES);
#pragma unroll
            for (int i = 0; i < PROGRAM_OPERANDS; i++)
                tma_load(to + i * DW_SM90_STRIP_BYTES, maps[i], full, t.column + strip * DW_SM90_STRIP_COLUMNS, t.row, 0, 0);
            advance(r, DW_SM90_STRIP_SLOTS);
        }
    }
}

typedef vector<program_element> elements;
static_assert(sizeof(elements) == 16, "a unit");

DEVICE void store_eight(void *matrix, int row, int stride, int column, int count, const uint32 *words) {
    uint16 *line = (uint16 *)matrix + (long long)row * stride + column;
    if constexpr (!PROGRAM_WHOLE) store_row_chunk(line, count, words);
    else if (count > 0) *(uint4 *)line = make_uint4(words[0], words[1], words[2], words[3]);
}

// Stores eight elements of a row of each result, of which `count` exist, and of D or its halves if they are wanted.
DEVICE void store_results(const dw_sm90_gemm_params &p, int row, int column, int count, const elements *in,
                          const elements *out) {
    uint32 words[4];
#pragma unroll
    for (int i = 0; i < PARTS_OF_D; i++) {
        memcpy(words, &in[i], sizeof words);
        if (p.d) store_eight(p.d, row, (int)p.stride_d, i * p.n + column, count, words);
    }
#pragma unroll
    for (int i = 0; i < PROGRAM_RESULTS; i++) {
        memcpy(words, &out[i], sizeof words);
        if (p.results[i]) store_eight(p.results[i], row, (int)p.result_strides[i], column, count, words);
    }
}

// Runs the program for a unit of the last tile.
DEVICE void finish_unit(const dw_sm90_gemm_params &p, const shared_layout &s, held &h, int unit) {
    const int strip = unit / 2, half = unit % 2, slot = strip % DW_SM90_STRIP_SLOTS;
    elements in[PARTS_OF_D + PROGRAM_OPERANDS], out[PROGRAM_RESULTS];
    if (h.end == HELD_NOTHING) return;
#pragma unroll
    for (int i = 0; i < PARTS_OF_D; i++) {
        uint32 *const words = h.words[strip + i * PROGRAM_STRIPS][half];
        transpose_quad(words);
        memcpy(&in[i], words, sizeof in[i]);
    }
    if constexpr (PROGRAM_OPERANDS > 0) {
        const int line = threadIdx.x / 32 * 16 + lane_index() / 4 + 8 * half; // of the tile: both warpgroups have 64
        const uint32 from = s.strips + slot * SLOT_BYTES + line * (2 * DW_SM90_STRIP_COLUMNS) + lane_index() % 4 * 16;
        if (half == 0) barrier_wait(s.strips_full + 8 * slot, h.phase ^ (strip / DW_SM90_STRIP_SLOTS & 1));
#pragma unroll
        for (int i = 0; i < PROGRAM_OPERANDS; i++) {
            const uint4 v = shared_load16(from + i * DW_SM90_STRIP_BYTES);
            memcpy(&in[PARTS_OF_D + i], &v, sizeof v);
        }
        __syncwarp();
        if (half == 1 && lane_index() == 0) barrier_arrive(s.strips_empty + 8 * slot);
    }
    run_program(in, h.vectors[half], out);
    const int row = h.row + 8 * half, column = h.column + strip * DW_SM90_STRIP_COLUMNS;
    store_results(p, row, column, row < h.end ? p.n - column : 0, in, out);
}

DEVICE void load_vectors(const dw_sm90_gemm_params &p, long long row, uint16 *to) {
#pragma unroll
    for (int i = 0; i < PROGRAM_VECTORS; i++) to[i] = ((const uint16 *)p.vectors[i])[row * p.vector_strides[i]];
}

// D is 0 in rows behind the last group (group_tiles.cuh), and the program's results follow from that.
DEVICE void finish_rest(const dw_sm90_gemm_params &p, int threads) {
    const long long first = max(p.offsets[p.groups], 0), across = (p.n + 7) / 8, count = (p.m - first) * across;
    for (long long i = (long long)blockIdx.x * threads + threadIdx.x; i < count; i += (long long)gridDim.x * threads) {
        const int row = (int)(first + i / across);
        const int column = (int)(i % across) * 8;
        elements in[PARTS_OF_D + PROGRAM_OPERANDS] = {}, out[PROGRAM_RESULTS];
#pragma unroll
        for (int o = 0; o < PROGRAM_OPERANDS; o++) {
            uint32 words[4];
            load_row_chunk((const uint16 *)p.operands[o] + row * p.operand_strides[o] + column, p.n - column, words);
            memcpy(&in[PARTS_OF_D + o], words, sizeof words);
        }
        uint16 vectors[PROGRAM_VECTORS + 1];
        load_vectors(p, row, vectors);
        run_program(in, vectors, out);
        store_results(p, row, column, p.n - column, in, out);
    }
}

// Tile t takes the place of the last one, whose units are finished. `rows`: whether the warpgroup has rows of it.
DEVICE void hold(const dw_sm90_gemm_params &p, const tile &t, bool rows, held &h) {
    if (h.end != HELD_NOTHING) h.phase ^= PROGRAM_STRIPS / DW_SM90_STRIP_SLOTS & 1;
    h.row = row_of(t, 0, 0);
    h.column = t.column + lane_index() % 4 * 8;
    h.end = rows ? t.end : 0;
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (h.row + 8 * half < h.end) load_vectors(p, h.row + 8 * half, h.vectors[half]);
}

static_assert(PROGRAM_STRIPS % DW_SM90_STRIP_SLOTS == 0 || PROGRAM_OPERANDS == 0, "each tile begins with the first slot");
static_assert(TOGETHER && !RESIDUAL && !SWIGLU && !CODES && GROUPS != DW_GROUPS_CONTRACTION, "what programs follow");

#endif

#endif
