// Quantizes a matrix of BF16, F16 or F32 to codes and block scales, along its rows, along its columns, or along both
// in one pass. The result is bit-identical to dw_block_quantize and dw_scales_swizzle.
//
// A thread block processes a tile of 128 x 128, a warp 32 x 64 of it, a lane 8 rows of 8 columns. Magnitudes are
// compared within the lane, then with adjacent lanes (along rows) or with lanes below (along columns). Codes and
// scales are gathered in shared memory, so that whole cache lines are stored. The scales of a tile are whole scale
// tiles of 128 x 4.
//
// Defines: INPUT, SCHEME, RULE (quantize_params.h; unused with NVFP4), ROWS, COLUMNS (the directions), SQUARE (a
// scale covers as many rows as columns).
//
// Traffic per element for both directions of MXFP8 from BF16: 2 bytes read, 2 + 2/32 written.

#define ELEMENT (INPUT == DW_QUANTIZE_F16)
#include "block_scale.cuh"
#include "quantize_params.h"
#include "scale_layout.h"
#include "sm90.cuh"

#define TILE DW_QUANTIZE_TILE
#define PIECE 8                                 // rows and columns of a lane
#define WORDS (INPUT == DW_QUANTIZE_F32 ? 8 : 4) // words of eight elements
#define BLOCK (block_of(SCHEME))
#define NEIGHBOURS (BLOCK / PIECE) // lanes that share a block
#define SHARE (PIECE / NEIGHBOURS) // lines, of a lane's eight, whose scales the lane computes
#define LINE (is_fp4(SCHEME) ? TILE / 2 : TILE) // bytes of a tile's row of codes
#define SCALE_BYTES (TILE * TILE / BLOCK)

typedef struct piece {
    uint32 words[PIECE][WORDS]; // one row each
} piece;

// ---- loads --------------------------------------------------------------------------------------------------

// Loads eight elements of a row, 16-byte aligned.
DEVICE void load_eight(const uint8 *from, uint32 *words) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
        uint4 v = __ldg((const uint4 *)from + i / 4);
        words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
    }
}

// Loads `count` elements and fills up with zeros.
DEVICE void load_some(const uint8 *from, int count, uint32 *words) {
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
        if (INPUT == DW_QUANTIZE_F32) words[i] = i < count ? __ldg((const uint32 *)from + i) : 0;
        else
            words[i] = (2 * i < count ? __ldg((const uint16 *)from + 2 * i) : 0) |
                       (2 * i + 1 < count ? (uint32)__ldg((const uint16 *)from + 2 * i + 1) << 16 : 0);
    }
}

// Loads a piece, with zeros beyond the end of the matrix.
DEVICE void load_piece(const dw_quantize_params &p, int row, int column, piece &x) {
    const int bytes = INPUT == DW_QUANTIZE_F32 ? 4 : 2;
    const long long pitch = p.row_stride * bytes;
    const uint8 *from = (const uint8 *)p.source + row * pitch + (long long)column * bytes;
    if ((((uint64)p.source | (uint64)pitch) & 15) == 0 && row + PIECE <= p.rows && column + PIECE <= p.columns) {
#pragma unroll
        for (int i = 0; i < PIECE; i++) load_eight(from + i * pitch, x.words[i]);
    } else {
#pragma unroll
        for (int i = 0; i < PIECE; i++)
            load_some(from + i * pitch, row + i < p.rows ? p.columns - column : 0, x.words[i]);
    }
}

// AGAIN uses other instructions. Without them the compiler keeps the unpacked numbers of the first direction for the
// second and runs out of registers.
template <bool AGAIN> DEVICE float element(const piece &x, int row, int column) {
    if constexpr (INPUT == DW_QUANTIZE_F32) return __uint_as_float(x.words[row][column]);
    uint32 pair = x.words[row][column / 2];
    if constexpr (AGAIN && INPUT == DW_QUANTIZE_BF16)
        return __uint_as_float(__byte_perm(pair, 0, column & 1 ? 0x3244 : 0x1044));
    return column & 1 ? element_high(pair) : element_low(pair);
}

// ---- magnitudes ---------------------------------------------------------------------------------------------
// Magnitudes as bits, which have the order of the magnitudes, NaN above infinity; halves in pairs. Eight of them take
// WORDS words.

DEVICE uint32 magnitudes(uint32 word) { return word & (INPUT == DW_QUANTIZE_F32 ? 0x7fffffffu : 0x7fff7fffu); }

DEVICE uint32 greater(uint32 a, uint32 b) {
    if (INPUT == DW_QUANTIZE_F32) return max(a, b);
    uint32 r;
    asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// Computes the largest magnitude of each row: rows 2 i and 2 i + 1 in word i.
DEVICE void most_of_rows(const piece &x, uint32 *most) {
    uint32 own[PIECE];
#pragma unroll
    for (int i = 0; i < PIECE; i++) {
        own[i] = magnitudes(x.words[i][0]);
#pragma unroll
        for (int j = 1; j < WORDS; j++) own[i] = greater(own[i], magnitudes(x.words[i][j]));
    }
#pragma unroll
    for (int i = 0; i < WORDS; i++)
        most[i] = INPUT == DW_QUANTIZE_F32 ? own[i]
                                           : greater(__byte_perm(own[2 * i % PIECE], own[(2 * i + 1) % PIECE], 0x5410),
                                                     __byte_perm(own[2 * i % PIECE], own[(2 * i + 1) % PIECE], 0x7632));
}

DEVICE void most_of_columns(const piece &x, uint32 *most) {
#pragma unroll
    for (int j = 0; j < WORDS; j++) {
        most[j] = magnitudes(x.words[0][j]);
#pragma unroll
        for (int i = 1; i < PIECE; i++) most[j] = greater(most[j], magnitudes(x.words[i][j]));
    }
}

// Computes the maxima of blocks that several lanes share. These lanes are `distance` apart: 1 for adjacent lanes, 8
// for lanes below. This lane, number `turn` of them, receives the maxima of its share of the eight lines in the first
// words.
DEVICE void share_most(uint32 *most, int turn, int distance) {
    int count = WORDS;
#pragma unroll
    for (int step = NEIGHBOURS / 2; step > 0; step /= 2) {
        bool upper = turn & step;
        count /= 2;
#pragma unroll
        for (int i = 0; i < count; i++) {
            uint32 own = upper ? most[i + count] : most[i], other = upper ? most[i] : most[i + count];
            most[i] = greater(own, __shfl_xor_sync(0xffffffff, other, step * distance));
        }
    }
}

// SQUARE: computes the maximum of the whole block, in all words.
DEVICE void most_of_square(uint32 *most) {
#pragma unroll
    for (int i = 1; i < WORDS; i++) most[0] = greater(most[0], most[i]);
    if (INPUT != DW_QUANTIZE_F32) most[0] = greater(most[0], __byte_perm(most[0], 0, 0x1032));
#pragma unroll
    for (int step = 1; step < NEIGHBOURS; step *= 2) {
        most[0] = greater(most[0], __shfl_xor_sync(0xffffffff, most[0], step));
        most[0] = greater(most[0], __shfl_xor_sync(0xffffffff, most[0], 8 * step));
    }
#pragma unroll
    for (int i = 1; i < WORDS; i++) most[i] = most[0];
}

// Returns element `index` as the bits of an F32.
DEVICE uint32 magnitude(const uint32 *most, int index) {
    if (INPUT == DW_QUANTIZE_F32) return most[index % WORDS];
    return __float_as_uint(index & 1 ? element_high(most[index / 2]) : element_low(most[index / 2]));
}

// ---- scales -------------------------------------------------------------------------------------------------

// Computes the scales of the lane's share and stores their codes in shared memory. `outer`, `inner`: position of the
// piece in the tile; `outers`: lines of the matrix from there on.
DEVICE void find_scales(const uint32 *most, uint8 *codes, int outer, int inner, int outers, int turn,
                        float tensor_scale, float *factors) {
    float inverse = 1.f / tensor_scale;
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        block_scale scale;
        if constexpr (is_nvfp4(SCHEME)) scale = nvfp4_scale(magnitude(most, i), tensor_scale, inverse);
        else scale = e8m0_scale<SCHEME, RULE>(magnitude(most, i));
        int own = turn * SHARE + i;
        // The factor is also computed for lines beyond the end.
        if (SQUARE && own >= outers) scale.code = 0;
        codes[DW_SCALE_OFFSET(outer + own, inner / BLOCK, 2)] = (uint8)scale.code;
        factors[i] = scale.factor;
    }
}

// Distributes all eight factors among the lanes that share blocks. Factors of E8M0 are BF16 numbers.
DEVICE void share_factors(const float *own, int turn, int distance, float *factors) {
    int first = lane_index() - turn * distance;
    if constexpr (is_nvfp4(SCHEME)) {
#pragma unroll
        for (int i = 0; i < PIECE; i++)
            factors[i] = __shfl_sync(0xffffffff, own[i % SHARE], first + i / SHARE * distance);
    } else {
        uint32 pair = __byte_perm(__float_as_uint(own[0]), __float_as_uint(own[SHARE - 1]), 0x7632);
#pragma unroll
        for (int i = 0; i < PIECE; i += 2) {
            uint32 given = __shfl_sync(0xffffffff, pair, first + i / 2 * distance);
            factors[i] = __uint_as_float(given << 16);
            factors[i + 1] = __uint_as_float(given & 0xffff0000u);
        }
    }
}

// ---- codes --------------------------------------------------------------------------------------------------

// Returns the position in shared memory of a tile's code, in groups of eight lines of LINE bytes. Chunks of 16 bytes
// are permuted so that lanes that store together have no bank conflicts.
DEVICE int code_place(int group, int line, int byte) {
    const int lines = 128 / LINE; // lines among which chunks are permuted
    int turned = (group & 1) << 2 | (group & 2) | (group >> 2 & 1);
    return group * 8 * LINE + line / lines * 128 + ((line % lines * LINE + byte) ^ turned << 4);
}

// Stores the codes of the piece along one direction into the tile.
template <bool TRANSPOSED>
DEVICE void encode_piece(const piece &x, const float *factors, uint8 *codes, int outer, int inner) {
#pragma unroll
    for (int i = 0; i < PIECE; i++) {
        float values[PIECE];
        uint32 words[2];
#pragma unroll
        for (int j = 0; j < PIECE; j++)
            values[j] = (TRANSPOSED ? element<ROWS>(x, j, i) : element<false>(x, i, j)) * factors[i];
        encode_eight<SCHEME>(values, words);
        uint8 *to = codes + code_place(outer / PIECE, i, inner * LINE / TILE);
        if constexpr (is_fp4(SCHEME)) *(uint32 *)to = words[0];
        else *(uint2 *)to = make_uint2(words[0], words[1]);
    }
}

// Keeps the first `bits` of a chunk and zeros the rest.
DEVICE uint4 cut_chunk(uint4 chunk, int bits) {
    uint32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int left = bits - 32 * i;
        words[i] &= left <= 0 ? 0 : left >= 32 ? 0xffffffffu : (1u << left) - 1;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Copies the tile from shared memory to its lines from `first` on, elements from `start` on, of `outer` lines of
// `inner`.
DEVICE void store_tile(const dw_quantized &to, const uint8 *codes, const uint8 *scales, int first, int start, int outer,
                       int inner) {
    const int chunks = LINE / 16, step = DW_QUANTIZE_THREADS / chunks, bits = is_fp4(SCHEME) ? 4 : 8;
    int blocks = (inner + BLOCK - 1) / BLOCK, line = threadIdx.x / chunks, byte = threadIdx.x % chunks * 16;
    long long at = (long long)start * bits / 8 + byte;
    int room = (int)min(min((long long)blocks * BLOCK * bits / 8, to.stride) - at, 16ll); // 16, 8, or less than 1
    int used = (int)min((long long)inner * bits - at * 8, 128ll);
    uint8 *place = (uint8 *)to.codes + (first + line) * to.stride + at;
#pragma unroll
    for (int i = 0; i < TILE; i += step) {
        if (first + line + i >= outer || room <= 0) break;
        uint4 chunk = *(const uint4 *)(codes + code_place((line + i) / PIECE, line % PIECE, byte));
        if (used < 128) chunk = cut_chunk(chunk, used);
        if (room == 16) *(uint4 *)(place + i * to.stride) = chunk;
        else *(uint2 *)(place + i * to.stride) = make_uint2(chunk.x, chunk.y); // the last block of NVFP4
    }
    if (threadIdx.x < SCALE_BYTES / 16) {
        int wide = DW_SCALE_TILES_WIDE(blocks), tile = start / BLOCK / 4 + threadIdx.x / 32;
        if (tile < wide)
            ((uint4 *)((uint8 *)to.scales + ((long long)(first / TILE) * wide + tile) * 512))[threadIdx.x % 32] =
                ((const uint4 *)scales)[threadIdx.x];
    }
}

// ---- kernels ------------------------------------------------------------------------------------------------

typedef struct place {
    int row, column;         // of the tile
    int own_row, own_column; // of the lane's piece in the tile
} place;

DEVICE place find_place(const dw_quantize_params &p) {
    int across = DW_QUANTIZE_TILES(p.columns), warp = threadIdx.x / 32, lane = lane_index();
    return {(int)(blockIdx.x / across) * TILE, (int)(blockIdx.x % across) * TILE, warp / 2 * 32 + lane / 8 * PIECE,
            warp % 2 * 64 + lane % 8 * PIECE};
}

// Returns the tensor scale, which is the same in all thread blocks; the first one stores it for the GEMM.
DEVICE float find_tensor_scale(const dw_quantize_params &p) {
    if constexpr (!is_nvfp4(SCHEME)) return 1.f;
    if (!p.amax) return *p.tensor_scale;
    float scale = nvfp4_tensor_scale(*p.amax);
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.tensor_scale = scale;
    return scale;
}

// Thread blocks for which an SM's registers suffice; each has 32 KiB or more of loads in flight.
#define RESIDENT                                                                                                       \
    (INPUT == DW_QUANTIZE_BF16 && !is_nvfp4(SCHEME) ? 3 : INPUT == DW_QUANTIZE_F32 && is_nvfp4(SCHEME) ? 1 : 2)

extern "C" __global__ void __launch_bounds__(DW_QUANTIZE_THREADS, RESIDENT)
    quantize_blocks(const __grid_constant__ dw_quantize_params p) {
    __shared__ __align__(128) uint8 codes[ROWS + COLUMNS][TILE * LINE], scales[ROWS + COLUMNS][SCALE_BYTES];
    place at = find_place(p);
    int row = at.row + at.own_row, column = at.column + at.own_column;
    piece x;
    load_piece(p, row, column, x);
    float tensor_scale = find_tensor_scale(p), own[SHARE], factors[PIECE];
    uint32 most[WORDS];
    if constexpr (ROWS) {
        int turn = lane_index() % NEIGHBOURS;
        if constexpr (SQUARE) {
            most_of_columns(x, most);
            most_of_square(most);
        } else {
            most_of_rows(x, most);
            share_most(most, turn, 1);
        }
        find_scales(most, scales[0], at.own_row, at.own_column, p.rows - row, turn, tensor_scale, own);
        share_factors(own, turn, 1, factors);
        encode_piece<false>(x, factors, codes[0], at.own_row, at.own_column);
    }
    if constexpr (COLUMNS) {
        int turn = lane_index() / 8 % NEIGHBOURS;
        most_of_columns(x, most);
        if constexpr (SQUARE) most_of_square(most);
        else share_most(most, turn, 8);
        find_scales(most, scales[ROWS], at.own_column, at.own_row, p.columns - column, turn, tensor_scale, own);
        share_factors(own, turn, 8, factors);
        encode_piece<true>(x, factors, codes[ROWS], at.own_column, at.own_row);
    }
    __syncthreads();
    if constexpr (ROWS) store_tile(p.along_rows, codes[0], scales[0], at.row, at.column, p.rows, p.columns);
    if constexpr (COLUMNS) store_tile(p.along_columns, codes[ROWS], scales[ROWS], at.column, at.row, p.columns, p.rows);
}

// Computes the largest finite magnitude (dw_amax) into *amax of the parameters, an F32 that must be 0 before. The
// addition makes infinity and NaN negative, so they never win.
extern "C" __global__ void __launch_bounds__(DW_QUANTIZE_THREADS)
    quantize_amax(const __grid_constant__ dw_quantize_params p) {
    __shared__ uint32 of_warps[DW_QUANTIZE_THREADS / 32];
    constexpr uint32 infinite = INPUT == DW_QUANTIZE_F32   ? 0x00800000u
                                : INPUT == DW_QUANTIZE_F16 ? 0x04000400u
                                                           : 0x00800080u;
    place at = find_place(p);
    piece x;
    load_piece(p, at.row + at.own_row, at.column + at.own_column, x);
    uint32 most = infinite;
#pragma unroll
    for (int i = 0; i < PIECE; i++)
#pragma unroll
        for (int j = 0; j < WORDS; j++) {
            uint32 raised = magnitudes(x.words[i][j]) + infinite;
            if (INPUT == DW_QUANTIZE_F32) most = (uint32)max((int)most, (int)raised);
            else asm("max.s16x2 %0, %0, %1;" : "+r"(most) : "r"(raised));
        }
    most -= infinite;
    if (INPUT != DW_QUANTIZE_F32) most = greater(most, __byte_perm(most, 0, 0x1032));
    most = INPUT == DW_QUANTIZE_F32 ? most : __float_as_uint(element_low(most));
    most = __reduce_max_sync(0xffffffff, most);
    if (lane_index() == 0) of_warps[threadIdx.x / 32] = most;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    most = __reduce_max_sync(0xffffffff, lane_index() < DW_QUANTIZE_THREADS / 32 ? of_warps[lane_index()] : 0);
    if (lane_index() == 0 && most != 0) atomicMax((uint32 *)p.amax, most);
}
