// The epilogue of the GEMMs on sm_100, from accumulators C in tensor memory to D: D = activation(alpha C + bias) +
// residual. Four warps process 32 rows each, in boxes of 128 bytes per row. TMA stores a box and skips what lies outside
// of D. Where a group of rows ends within a box, the warp stores the group's rows itself.
//
// Defines: ELEMENT, OUTPUT (0: as ELEMENT, 1: F32, 2: MXFP8, codes of E4M3 and scales in the layout that the next
// GEMM reads), ACTIVATION (gemm_params.h), BIAS, RESIDUAL (D += R, of D's type, after the activation; not with
// MXFP8). SwiGLU: the first half of a tile's columns is the gate's, the second the other factor's.
#ifndef DW_SM100_GEMM_EPILOGUE_CUH
#define DW_SM100_GEMM_EPILOGUE_CUH

#include "block_scale.cuh"
#include "epilogue_parts.cuh"
#include "gemm_block.cuh"
#include "gemm_schedule.cuh"
#include "scale_layout.h"

#define MXFP8 (OUTPUT == DW_GEMM_OUTPUT_MXFP8)
#define F32_OUTPUT (OUTPUT == DW_GEMM_OUTPUT_F32)
#define BOX_COLUMNS (MXFP8 ? 128 : OUTPUT == DW_GEMM_OUTPUT_F32 ? 32 : 64) // columns of D: 128 bytes
// Columns whose bias is loaded at once.
#define BIAS_COLUMNS (BOX_COLUMNS < 64 ? BOX_COLUMNS : 64)

// Columns that the two accumulators of a tile share.
#ifndef OVERLAP
#define OVERLAP 0
#endif

static_assert(TILE_COLUMNS % BOX_COLUMNS == 0, "boxes do not cross tiles");
static_assert(!(MXFP8 && RESIDUAL), "a residual of codes and scales is not supported");
static_assert(!(MXFP8 && GROUPS != DW_GROUPS_BATCH), "groups with a D of codes and scales are not supported");

// Loads the bias of the tile's group from `column` on, as F32, into the warp's shared memory: 64 floats for the gate,
// then those for the other factor.
DEVICE void load_bias(const dw_gemm_params &p, const tile &t, uint32 to, int column) {
    const uint16 *bias = (const uint16 *)p.bias;
    if constexpr (GROUPS == DW_GROUPS_ROWS) bias += (uint64)t.group * p.n * (SWIGLU ? 2 : 1);
    __syncwarp(); // the previous contents are no longer needed
#pragma unroll
    for (int i = lane_index(); i < BIAS_COLUMNS * (SWIGLU ? 2 : 1); i += 32) {
        int part = i / BIAS_COLUMNS, at = column + i % BIAS_COLUMNS;
        uint32 element = at < p.n ? bias[(uint64)part * p.n + at] : 0;
        shared_store_f32(to + 4 * (part * 64 + i % BIAS_COLUMNS), element_low(element));
    }
    __syncwarp();
}

// Returns the factor of the accumulators.
DEVICE float factor_of(const dw_gemm_params &p) {
    float alpha = p.alpha;
    if (p.factor_a) alpha *= *p.factor_a;
    if (p.factor_b) alpha *= *p.factor_b;
    return alpha;
}

// Computes alpha x + bias for 32 columns; `bias` is the address of the first column's.
DEVICE void scale(float alpha, float *x, uint32 bias) {
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        float4 b = make_float4(0.f, 0.f, 0.f, 0.f);
        if constexpr (BIAS) b = shared_load_f32x4(bias + 4 * i);
        x[i] = fmaf(alpha, x[i], b.x);
        x[i + 1] = fmaf(alpha, x[i + 1], b.y);
        x[i + 2] = fmaf(alpha, x[i + 2], b.z);
        x[i + 3] = fmaf(alpha, x[i + 3], b.w);
    }
}

// Stores a chunk of 16 bytes of D, computed from `x`, into the box in place of the residual.
DEVICE void store_chunk(uint32 to, const float *x) {
    uint4 r = make_uint4(0, 0, 0, 0);
    if constexpr (RESIDUAL) r = shared_load16(to);
    if constexpr (OUTPUT == 1) {
        uint4 d = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
        if constexpr (RESIDUAL)
            d = make_uint4(__float_as_uint(x[0] + __uint_as_float(r.x)), __float_as_uint(x[1] + __uint_as_float(r.y)),
                           __float_as_uint(x[2] + __uint_as_float(r.z)), __float_as_uint(x[3] + __uint_as_float(r.w)));
        shared_store16(to, d);
    } else {
        uint32 residual[4] = {r.x, r.y, r.z, r.w}, d[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float low = x[2 * i], high = x[2 * i + 1];
            if constexpr (RESIDUAL) low += element_low(residual[i]), high += element_high(residual[i]);
            d[i] = pack_elements(low, high);
        }
        shared_store16(to, make_uint4(d[0], d[1], d[2], d[3]));
    }
}

// Loads 32 accumulators of the lane's row; `any`: whether the contraction is longer than 0.
DEVICE void load_sums(float *x, uint32 sums, bool any) {
    if (any) tensor_memory_load(x, sums);
    else {
#pragma unroll
        for (int i = 0; i < 32; i++) x[i] = 0.f;
    }
}

// Computes 32 columns of the lane's row, from `sums` on, without the residual; `bias` is the address of the first
// column's.
DEVICE void finish_sums(float alpha, bool any, uint32 sums, uint32 bias, float *x) {
    float factor[32];
    load_sums(x, sums, any);
    if constexpr (SWIGLU) load_sums(factor, sums + TILE_COLUMNS, any);
    tensor_memory_wait_load();
    keep<32>(x);
    scale(alpha, x, bias);
    if constexpr (SWIGLU) {
        keep<32>(factor);
        scale(alpha, factor, bias + 256);
    }
#pragma unroll
    for (int i = 0; i < 32; i++) x[i] = SWIGLU ? silu(x[i]) * factor[i] : activate(x[i]);
}

// Computes the accumulator's columns of one box, from `sums` on, and stores them to the box at `box`; one row per
// lane.
DEVICE void finish_box(float alpha, bool any, uint32 sums, uint32 box, uint32 bias) {
#pragma unroll
    for (int half = 0; half < BOX_COLUMNS / 32; half++) {
        float x[32];
        finish_sums(alpha, any, sums + 32 * half, bias + 128 * half, x);
        constexpr int chunk = OUTPUT == DW_GEMM_OUTPUT_F32 ? 4 : 8;
#pragma unroll
        for (int i = 0; i < 32 / chunk; i++)
            store_chunk(tile_chunk(box, 32, lane_index(), half * (32 / chunk) + i), x + chunk * i);
    }
}

// Stores the codes of a block of 32 numbers, of which `count` belong to D, to chunks `chunk` and `chunk` + 1 of the box.
// Returns the code of the scale.
DEVICE uint32 store_block(uint32 box, int chunk, float *x, int count) {
    uint32 most = 0, codes[8];
    if (count < 32) {
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (i >= count) x[i] = 0.f; // accumulators of zeros, but NaN if A is infinite
    }
#pragma unroll
    for (int i = 0; i < 32; i++) most = max(most, __float_as_uint(x[i]) & 0x7fffffffu);
    block_scale scale = e8m0_scale<DW_CODES_MXFP8, DW_RULE_RCEIL>(most);
#pragma unroll
    for (int i = 0; i < 32; i++) x[i] *= scale.factor;
#pragma unroll
    for (int i = 0; i < 4; i++) encode_eight<DW_CODES_MXFP8>(x + 8 * i, codes + 2 * i);
    shared_store16(tile_chunk(box, 32, lane_index(), chunk), make_uint4(codes[0], codes[1], codes[2], codes[3]));
    shared_store16(tile_chunk(box, 32, lane_index(), chunk + 1), make_uint4(codes[4], codes[5], codes[6], codes[7]));
    return scale.code;
}

// Like finish_box, for MXFP8; returns the scales of the lane's four blocks.
DEVICE uint32 finish_quantized_box(const dw_gemm_params &p, const tile &t, float alpha, uint32 sums, uint32 box,
                                   uint32 bias, int column) {
    uint32 scales = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float x[32];
        if constexpr (BIAS)
            if (i % 2 == 0) load_bias(p, t, bias, column + 32 * i);
        finish_sums(alpha, t.k > 0, sums + 32 * i, bias + 128 * (i % 2), x);
        scales |= store_block(box, 2 * i, x, p.n - column - 32 * i) << 8 * i;
    }
    return scales;
}

// Stores four scales of the lane's row (`row` is the warp's first), zeros for rows outside of D.
DEVICE void store_scales(const dw_gemm_params &p, int row, int column, uint32 scales) {
    row += lane_index();
    long long wide = DW_SCALE_TILES_WIDE((p.n + 31) / 32);
    *(uint32 *)((uint8 *)p.scales_d + DW_SCALE_OFFSET(row, column / 32, wide)) = row < p.m ? scales : 0;
}

// Releases the accumulator `stage` to the next MMA.
DEVICE void give_sums_back(uint32 taken, int stage) {
    tensor_fence_before();
    __syncwarp();
    if (lane_index() == 0) {
        if constexpr (CTAS == 1) barrier_arrive(taken + 8 * stage);
        else barrier_arrive_cluster(taken + 8 * stage);
    }
}

// Loads a box of the residual into shared memory, or stores one into D; called by one thread.
DEVICE void load_residual(uint32 to, const tensor_map *map, uint32 barrier, const tile &t, int column, int row) {
    barrier_expect(barrier, DW_GEMM_BOX_BYTES);
    if constexpr (GROUPS == DW_GROUPS_CONTRACTION) tma_load(to, map, barrier, column, row, t.group, 0);
    else tma_load_matrix<1>(to, map, barrier, column, row);
}
DEVICE void store_box(const tensor_map *map, uint32 from, const tile &t, int column, int row) {
    if constexpr (GROUPS == DW_GROUPS_CONTRACTION) tma_store(map, from, column, row, t.group, 0);
    else tma_store_matrix(map, from, column, row);
}

// Stores a lane's 16 bytes of a row of D, of which `count` elements exist.
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

DEVICE uint4 load_line(const void *line, int count) {
    uint32 words[4] = {0, 0, 0, 0};
    if constexpr (F32_OUTPUT) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (i < count) words[i] = ((const uint32 *)line)[i];
    } else {
        load_row_chunk((const uint16 *)line, count, words);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Loads the residual's rows of a box up to the end of the group's rows, and zeros for those behind it: they are another
// block's, which may store D in their place meanwhile.
DEVICE void load_rows(const dw_gemm_params &p, uint32 box, const tile &t, int column, int row) {
    constexpr int size = F32_OUTPUT ? 4 : 2;
    const int first = lane_index() / 8, chunk = lane_index() % 8, mine = column + chunk * (16 / size);
    for (int i = first; i < 32; i += 4) {
        const int count = row + i >= 0 && row + i < t.end ? p.n - mine : 0;
        shared_store16(tile_chunk(box, 32, i, chunk),
                       load_line((const uint8 *)p.residual + ((row + i) * p.stride_residual + mine) * size, count));
    }
    __syncwarp();
}

// Stores the rows of a box up to the end of the group's rows, 16 bytes from each lane.
DEVICE void store_rows(const dw_gemm_params &p, uint32 box, const tile &t, int column, int row) {
    constexpr int size = F32_OUTPUT ? 4 : 2;
    const int first = lane_index() / 8, chunk = lane_index() % 8, mine = column + chunk * (16 / size);
    for (int i = first; i < min(32, t.end - row); i += 4)
        if (row + i >= 0)
            store_line((uint8 *)p.d + ((row + i) * p.stride_d + mine) * size, p.n - mine,
                       shared_load16(tile_chunk(box, 32, i, chunk)));
    fence_async_shared(); // before TMA loads the next residual into the box
    __syncwarp();
}

// Stores boxes of a tile's 32 rows, alternating between the warp's two places in shared memory. Lane 0 issues TMA. If
// accumulators overlap, their shared columns are stored first and released immediately.
DEVICE void bring_out(const dw_gemm_params &p, const shared_layout &s, uint32 tensor_memory, const tensor_map *map_d,
                      const tensor_map *map_r) {
    constexpr int box_count = TILE_COLUMNS / BOX_COLUMNS;
    constexpr int back_after = OVERLAP ? (OVERLAP + BOX_COLUMNS - 1) / BOX_COLUMNS : box_count;
    uint32 warp = threadIdx.x / 32, boxes = s.out + warp * 2 * DW_GEMM_BOX_BYTES, bias = s.bias + warp * 512;
    uint32 taken = CTAS == 1 ? s.sums_taken : cluster_address(s.sums_taken, 0);
    float alpha = factor_of(p);
    ring sums = {0, 0}, out = {0, 0};
    walk w = {};
    tile t;
    while (next_tile<true>(p, s, w, t)) {
        int row = t.row + warp * 32;
        uint32 from = tensor_memory + (warp * 32 << 16) + sums.stage * (TILE_N - OVERLAP);
        barrier_wait(s.sums + 8 * sums.stage, sums.phase);
        tensor_fence_after();
        for (int i = 0; i < box_count; i++) {
            int within = (OVERLAP && sums.stage == 0 ? box_count - 1 - i : i) * BOX_COLUMNS, column = t.column + within;
            if (row < t.end && column < p.n) {
                uint32 box = boxes + out.stage * DW_GEMM_BOX_BYTES, arrived = s.residual + warp * 16 + 8 * out.stage;
                const bool ends = GROUPS == DW_GROUPS_ROWS && row + 32 > t.end;
                if (lane_index() == 0) {
                    bulk_wait_read<1>(); // the previous contents of this box have been read
                    if (RESIDUAL && !ends) load_residual(box, map_r, arrived, t, column, row);
                    if (RESIDUAL && ends) barrier_arrive(arrived);
                }
                __syncwarp();
                if (RESIDUAL && ends) load_rows(p, box, t, column, row);
                if constexpr (MXFP8) {
                    store_scales(p, row, column, finish_quantized_box(p, t, alpha, from + within, box, bias, column));
                } else {
                    if constexpr (BIAS) load_bias(p, t, bias, column);
                    if constexpr (RESIDUAL) barrier_wait(arrived, out.phase);
                    finish_box(alpha, t.k > 0, from + within, box, bias);
                }
                fence_async_shared();
                __syncwarp();
                if (ends) store_rows(p, box, t, column, row);
                if (lane_index() == 0) {
                    if (!ends) store_box(map_d, box, t, column, row);
                    bulk_commit(); // also an empty group, because bulk_wait_read counts them
                }
                advance(out, 2);
            } else if (MXFP8 && t.row < p.m && column < p.n) {
                store_scales(p, row, column, 0); // zeros that complete a tile of scales
            }
            if (i == back_after - 1) give_sums_back(taken, sums.stage);
        }
        advance(sums, 2);
    }
    if (lane_index() == 0) bulk_wait<0>();
    __syncwarp();
}

#endif
