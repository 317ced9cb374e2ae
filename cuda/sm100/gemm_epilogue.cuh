// From sums in tensor memory to D: D = activation(alpha sums + bias) + residual, of four warps, 32 rows each, in
// boxes of 128 bytes a row. Shared by the matrix products of sm_100.
//
// Defines: ELEMENT, OUTPUT (0: as ELEMENT, 1: F32), ACTIVATION (gemm_params.h), BIAS, RESIDUAL (D += R, of D's type,
// after the activation). SwiGLU: the first half of a tile's columns is the gate's, the second the other factor's.
#ifndef DW_SM100_GEMM_EPILOGUE_CUH
#define DW_SM100_GEMM_EPILOGUE_CUH

#include "gemm_block.cuh"
#include "gemm_schedule.cuh"

#define BOX_COLUMNS (OUTPUT == 1 ? 32 : 64) // of D: 128 bytes

// Columns that the two accumulators of a tile share.
#ifndef OVERLAP
#define OVERLAP 0
#endif

static_assert(TILE_COLUMNS % BOX_COLUMNS == 0, "boxes do not cross tiles");

DEVICE float silu(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.f + exp2_approx(x * -1.4426950408889634f)));
    return x * r;
}

DEVICE float activate(float x) {
    if constexpr (ACTIVATION == DW_GEMM_GELU) return 0.5f * x * (1.f + erff(x * 0.7071067811865476f));
    if constexpr (ACTIVATION == DW_GEMM_GELU_TANH)
        return 0.5f * x * (1.f + tanh_exact(0.7978845608028654f * fmaf(0.044715f * x * x, x, x)));
    return x;
}

// The warp's bias of the box at `column`, as F32 in shared memory: of the gate, 64 floats, then of the other factor.
DEVICE void load_bias(const dw_gemm_params &p, uint32 to, int column) {
    __syncwarp(); // the box before is done with it
#pragma unroll
    for (int i = lane_index(); i < BOX_COLUMNS * (SWIGLU ? 2 : 1); i += 32) {
        int part = i / BOX_COLUMNS, at = column + i % BOX_COLUMNS;
        uint32 element = at < p.n ? ((const uint16 *)p.bias)[(uint64)part * p.n + at] : 0;
        shared_store_f32(to + 4 * (part * 64 + i % BOX_COLUMNS), element_low(element));
    }
    __syncwarp();
}

// What multiplies the sums.
DEVICE float factor_of(const dw_gemm_params &p) {
    float alpha = p.alpha;
    if (p.factor_a) alpha *= *p.factor_a;
    if (p.factor_b) alpha *= *p.factor_b;
    return alpha;
}

// alpha x + bias of 32 columns; `bias`: the first's.
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

// A chunk of 16 bytes of D, of its `x`, into the box in place of the residual.
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

// 32 sums of the lane's row; `any`: whether anything was summed.
DEVICE void load_sums(float *x, uint32 sums, bool any) {
    if (any) tensor_memory_load(x, sums);
    else {
#pragma unroll
        for (int i = 0; i < 32; i++) x[i] = 0.f;
    }
}

// The accumulator's columns of one box, from `sums` on, to the box at `box`; a lane has a row.
DEVICE void finish_box(float alpha, bool any, uint32 sums, uint32 box, uint32 bias) {
#pragma unroll
    for (int half = 0; half < BOX_COLUMNS / 32; half++) {
        float x[32], factor[32];
        load_sums(x, sums + 32 * half, any);
        if constexpr (SWIGLU) load_sums(factor, sums + TILE_COLUMNS + 32 * half, any);
        tensor_memory_wait_load();
        keep<32>(x);
        scale(alpha, x, bias + 128 * half);
        if constexpr (SWIGLU) {
            keep<32>(factor);
            scale(alpha, factor, bias + 256 + 128 * half);
        }
#pragma unroll
        for (int i = 0; i < 32; i++) x[i] = SWIGLU ? silu(x[i]) * factor[i] : activate(x[i]);
        constexpr int chunk = OUTPUT == 1 ? 4 : 8;
#pragma unroll
        for (int i = 0; i < 32 / chunk; i++)
            store_chunk(tile_chunk(box, 32, lane_index(), half * (32 / chunk) + i), x + chunk * i);
    }
}

// Lets the next product have the accumulator `stage`.
DEVICE void give_sums_back(uint32 taken, int stage) {
    tensor_fence_before();
    __syncwarp();
    if (lane_index() == 0) {
        if constexpr (CTAS == 1) barrier_arrive(taken + 8 * stage);
        else barrier_arrive_cluster(taken + 8 * stage);
    }
}

// Boxes of a tile's 32 rows, in turn from the warp's two places in shared memory. Lane 0 drives the copy engine. Where
// accumulators overlap, the columns that they share come out first, and are given back then.
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
            if (row < p.m && column < p.n) {
                uint32 box = boxes + out.stage * DW_GEMM_BOX_BYTES, arrived = s.residual + warp * 16 + 8 * out.stage;
                if (lane_index() == 0) {
                    bulk_wait_read<1>(); // what was in this box has been read
                    if constexpr (RESIDUAL) {
                        barrier_expect(arrived, DW_GEMM_BOX_BYTES);
                        tma_load_matrix<1>(box, map_r, arrived, column, row);
                    }
                }
                __syncwarp();
                if constexpr (BIAS) load_bias(p, bias, column);
                if constexpr (RESIDUAL) barrier_wait(arrived, out.phase);
                finish_box(alpha, p.k > 0, from + within, box, bias);
                fence_async_shared();
                __syncwarp();
                if (lane_index() == 0) {
                    tma_store_matrix(map_d, box, column, row);
                    bulk_commit();
                }
                advance(out, 2);
            }
            if (i == back_after - 1) give_sums_back(taken, sums.stage);
        }
        advance(sums, 2);
    }
    if (lane_index() == 0) bulk_wait<0>();
    __syncwarp();
}

#endif
