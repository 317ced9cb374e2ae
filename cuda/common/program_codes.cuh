// An elementwise program whose results become codes of fp8-block in both orientations (fp8_block_codes.cu). A result that
// nothing else reads is never stored. Bytes per element of a result of BF16: 2.06 written, where the program by itself and
// fp8_block_codes take 6.06. Codes and scales are theirs, byte for byte.
//
// A block of threads computes tiles of 128 x 128. Operands are copied to shared memory by cp.async, the next tile's while
// this one's codes are made. Each thread reads what it has copied itself, so no barrier is needed. The first result stays in
// registers and is encoded. Others that become codes wait in the places of the operands, one result over one operand; such
// an operand is loaded when its result has been taken. Operands that don't fit have their last rows loaded directly.
//
// Tiles with an infinity or the like (fp8_block_tile.cuh) compute the program again, so results must not be stored over
// operands.
//
// Included by a source that src/kernel/cuda/program_codes.c makes, behind elementwise.cuh. It defines TYPE, OPERANDS, RESULTS
// and CODED, the number of results that become codes, which are the first ones, and
//
//     run_program(const vector<program_element> *operands, vector<program_element> *results)

#define WHOLE 1
#define SQUARE 0
#include "fp8_block_tile.cuh"
#include "program_codes_params.h"

#define STAGED DW_PROGRAM_CODES_STAGED(OPERANDS)
#define DIRECT (OWN_ROWS - STAGED) // rows of a thread whose operands are not staged
#if CODED - 1 > OPERANDS || OPERANDS > DW_PROGRAM_CODES_MOST_OPERANDS || RESULTS > DW_PROGRAM_CODES_MOST_RESULTS
#error "so many operands and results have no place"
#endif

typedef vector<program_element> program_vector;
static_assert(sizeof(program_vector) == sizeof(elements), "a vector is the words of its elements");
static_assert(sizeof(shared_room) == DW_PROGRAM_CODES_ROOM, "the host counts another room");
static_assert(OWN_ROWS == 8, "the host counts other rows of a thread");

struct shared_memory {
    shared_room room;
    elements staged[OPERANDS][STAGED][THREADS];
};
static_assert(sizeof(shared_memory) == DW_PROGRAM_CODES_SHARED_BYTES(OPERANDS), "the host counts other bytes");

DEVICE program_vector as_vector(const elements &x) {
    program_vector made;
    memcpy(&made, &x, sizeof made);
    return made;
}
DEVICE elements as_elements(const program_vector &x) {
    elements made;
    memcpy(&made, &x, sizeof made);
    return made;
}

// The place of this thread's row i of a tile.
DEVICE tile_place place_of_row(const tile_place &at, int i) {
    return {at.row + own_row() + i * ROW_STEP, at.column + own_column()};
}
DEVICE bool is_in_matrix(const dw_program_codes_params &p, const tile_place &own) {
    return own.row < p.codes[0].rows && own.column < p.codes[0].columns;
}
DEVICE size_t offset_of(const dw_program_matrix &matrix, const tile_place &own) {
    return (size_t)(own.row * matrix.row_stride + own.column) * sizeof(stored);
}

// Begins to copy an operand of a tile. Beyond the edges there are zeros.
DEVICE void stage(const dw_program_codes_params &p, const tile_place &at, int operand, shared_memory &shared) {
    const dw_program_matrix &matrix = p.operands[operand];
    const char *from = (const char *)matrix.data + offset_of(matrix, place_of_row(at, 0));
#pragma unroll 4 // all at once take too many registers
    for (int i = 0; i < STAGED; i++, from += ROW_STEP * matrix.row_stride * sizeof(stored)) {
        const bool inside = is_in_matrix(p, place_of_row(at, i));
        const unsigned to = (unsigned)__cvta_generic_to_shared(&shared.staged[operand][i][threadIdx.x]);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(inside ? from : matrix.data),
                     "r"(inside ? 16 : 0)
                     : "memory");
    }
}

DEVICE elements load_operand(const dw_program_codes_params &p, const tile_place &own, int operand) {
    elements x = {};
    const dw_program_matrix &matrix = p.operands[operand];
    if (is_in_matrix(p, own)) load_words<false>((const char *)matrix.data + offset_of(matrix, own), x.word);
    return x;
}

// The results of a vector; beyond the edges zeros, whatever the program makes of zeros.
DEVICE void compute(const dw_program_codes_params &p, const tile_place &own, const program_vector (&operands)[OPERANDS],
                    program_vector (&results)[RESULTS]) {
    run_program(operands, results);
    if (is_in_matrix(p, own)) return;
#pragma unroll
    for (int r = 0; r < RESULTS; r++) results[r] = as_vector(elements{});
}

// Computes result r of row i from memory.
DEVICE elements compute_again(const dw_program_codes_params &p, const tile_place &at, int i, int r) {
    program_vector operands[OPERANDS], results[RESULTS];
    const tile_place own = place_of_row(at, i);
#pragma unroll
    for (int o = 0; o < OPERANDS; o++) operands[o] = as_vector(load_operand(p, own, o));
    compute(p, own, operands, results);
    return as_elements(results[r]);
}

DEVICE void store_results(const dw_program_codes_params &p, const tile_place &own,
                          const program_vector (&results)[RESULTS]) {
    if (!is_in_matrix(p, own)) return;
#pragma unroll
    for (int r = 0; r < RESULTS; r++) {
        const dw_program_matrix &matrix = p.results[r];
        if (matrix.data) *(access<16> *)((char *)matrix.data + offset_of(matrix, own)) = *(const access<16> *)&results[r];
    }
}

// Computes the tile: the first result into `x`, others that become codes into the places of operands, or into `direct`.
DEVICE void compute_tile(const dw_program_codes_params &p, const tile_place &at, elements (&x)[OWN_ROWS],
                         elements (&direct)[CODED][DIRECT + 1], shared_memory &shared) {
    elements loaded[DIRECT + 1][OPERANDS];
#pragma unroll
    for (int i = 0; i < DIRECT; i++)
#pragma unroll
        for (int o = 0; o < OPERANDS; o++) loaded[i][o] = load_operand(p, place_of_row(at, STAGED + i), o);
    asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++) {
        program_vector operands[OPERANDS], results[RESULTS];
        const tile_place own = place_of_row(at, i);
#pragma unroll
        for (int o = 0; o < OPERANDS; o++)
            operands[o] = as_vector(i < STAGED ? shared.staged[o][i][threadIdx.x] : loaded[i - STAGED][o]);
        compute(p, own, operands, results);
        store_results(p, own, results);
        x[i] = as_elements(results[0]);
#pragma unroll
        for (int r = 1; r < CODED; r++) {
            if (i < STAGED) shared.staged[r - 1][i][threadIdx.x] = as_elements(results[r]);
            else direct[r][i - STAGED] = as_elements(results[r]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, DW_FP8_BLOCK_RESIDENT)
    program_codes(const __grid_constant__ dw_program_codes_params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    shared_memory &shared = *(shared_memory *)memory;
    elements x[OWN_ROWS], direct[CODED][DIRECT + 1];
    tile_walk walk = tile_walk::of(p.codes[0].tiles_across);
    if ((int)blockIdx.x < p.codes[0].tiles)
#pragma unroll
        for (int o = 0; o < OPERANDS; o++) stage(p, walk.place(), o, shared);
    for (int t = (int)blockIdx.x; t < p.codes[0].tiles; t += (int)gridDim.x) {
        const tile_place at = walk.place();
        const bool has_next = t + (int)gridDim.x < p.codes[0].tiles;
        walk.advance(p.codes[0].tiles_across);
        compute_tile(p, at, x, direct, shared);
#pragma unroll
        for (int o = CODED - 1; o < OPERANDS; o++)
            if (has_next) stage(p, walk.place(), o, shared);
#pragma unroll
        for (int r = 0; r < CODED; r++) {
            if (r > 0) {
#pragma unroll
                for (int i = 0; i < OWN_ROWS; i++)
                    x[i] = i < STAGED ? shared.staged[r - 1][i][threadIdx.x] : direct[r][i - STAGED];
                if (has_next) stage(p, walk.place(), r - 1, shared);
            }
            store_tile(p.codes[r], at, x, shared.room, [&](int i) { return compute_again(p, at, i, r); });
            __syncthreads();
            // Nothing reads here what the next result or tile writes into shared memory before its first barrier.
            if (p.codes[r].turned) store_turned(p.codes[r], is_inside(p.codes[r], at), shared.room.tile, at);
        }
    }
}
