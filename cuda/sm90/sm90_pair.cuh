// Two products of the same A and the elementwise program that reads both (PAIR), such as gate, up and SwiGLU of an MLP.
// A tile has the same columns of both: the first half of its columns belongs to B, the second to another matrix B at an
// address of its own. A is read once for both.
//
// The source is made at run time (src/kernel/cuda/sm90_pair.c); it defines PAIR, PAIR_RESULTS, the type pair_element
// and run_program(), and includes sm90_gemm.cu. Both products are rounded before the program reads them. They are stored
// if their addresses are not NULL. n is a multiple of 8.
//
// The program needs no warpgroup of its own. A thread that multiplies has the same elements of both products, keeps
// them rounded, and runs the program for eight of them behind every other step of the next tile, as it stores them.
#ifndef DW_SM90_PAIR_CUH
#define DW_SM90_PAIR_CUH

#if PAIR

#define PAIR_STRIPS (STRIPS / 2) // of a product

static_assert(TOGETHER && !RESIDUAL && !SWIGLU && !CODES && !PROGRAM && !SPLIT && GROUPS == DW_GROUPS_BATCH, "what pairs follow");
static_assert(TILE_COLUMNS % 32 == 0, "whole strips of both products");

typedef vector<pair_element> elements;
static_assert(sizeof(elements) == 16, "a chunk");

// The elements of the last tile, and where the thread's first chunk lies; that of its other row lies 8 rows below. A row
// of p.m or more: there is no such tile.
typedef struct held_pair {
    int row, column;
    uint32 words[STRIPS][2][4];
} held_pair;

// `LATER`: nothing reads these elements soon; they leave the L2 cache first, which keeps A and B.
template <bool LATER>
DEVICE void store_chunk(const dw_sm90_gemm_params &p, void *matrix, long long stride, int row, int column, const uint32 *words) {
    uint16 *line = (uint16 *)matrix + row * stride + column;
    const uint4 chunk = make_uint4(words[0], words[1], words[2], words[3]);
    if (matrix && row < p.m && column < p.n) {
        if constexpr (LATER) __stcs((uint4 *)line, chunk);
        else *(uint4 *)line = chunk;
    }
}

// Runs the program for a chunk of one of the two rows, and stores it.
DEVICE void finish_chunk(const dw_sm90_gemm_params &p, held_pair &h, int strip, int half) {
    uint32 *words[2] = {h.words[strip][half], h.words[PAIR_STRIPS + strip][half]}, result[4];
    elements in[2], out[PAIR_RESULTS];
    const int row = h.row + 8 * half, column = h.column + 32 * strip;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        transpose_quad(words[i]);
        memcpy(&in[i], words[i], sizeof in[i]);
    }
    run_program(in, out);
    store_chunk<true>(p, p.d, p.stride_d, row, column, words[0]);
    store_chunk<true>(p, p.second_d, p.stride_second_d, row, column, words[1]);
#pragma unroll
    for (int i = 0; i < PAIR_RESULTS; i++) {
        memcpy(result, &out[i], sizeof result);
        store_chunk<false>(p, p.results[i], p.result_strides[i], row, column, result);
    }
}

DEVICE void finish_all(const dw_sm90_gemm_params &p, held_pair &h) {
#pragma unroll
    for (int i = 0; i < STRIPS; i++) finish_chunk(p, h, i / 2, i % 2);
}

// Finishes the last tile while multiplying tile t, whose elements it keeps.
DEVICE void multiply_pair(const dw_sm90_gemm_params &p, const shared_layout &s, ring &r, const tile &t,
                          float (*sums)[WIDTH / 2], held_pair &h) {
    // The compiler must see that all threads of a warp have the same.
    const int rows = __shfl_sync(0xffffffff, threadIdx.x / 128 * 64, 0), steps = __shfl_sync(0xffffffff, steps_of(t), 0);
    int step = 0;
    if (__shfl_sync(0xffffffff, t.row + rows >= t.end, 0)) { // none of these rows exists
        finish_all(p, h);
        for (; step < steps; step++) pass_stage(s, r);
        h.row = p.m;
        return;
    }
    if (steps == 0) clear_sums(sums);
#pragma unroll
    for (int i = 0; i < STRIPS; i++) { // a chunk behind every other step; one warpgroup's turns are between the other's
        multiply_steps(s, r, t, step, min(2 * i + 1 + rows / 64, steps), rows, sums);
        if (BIAS && i == 0) load_bias(p, s, t);
        finish_chunk(p, h, i / 2, i % 2);
    }
    multiply_steps(s, r, t, step, steps, rows, sums);
    h.row = row_of(t, 0, 0);
    h.column = t.column + lane_index() % 4 * 8;
    if constexpr (BIAS) __syncwarp();
    end_steps(s, r, steps, sums);
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) round_strip(s, p.alpha, sums[0], strip, h.words[strip]);
}

DEVICE void compute_pair(const dw_sm90_gemm_params &p, const shared_layout &s) {
    ring r = {0, 0};
    walk w = {};
    tile t;
    float sums[PARTS][WIDTH / 2];
    held_pair h;
    h.row = p.m, h.column = 0;
    while (next_tile(p, w, t)) multiply_pair(p, s, r, t, sums, h);
    finish_all(p, h);
}

#endif

#endif
