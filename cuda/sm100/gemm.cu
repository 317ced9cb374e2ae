// Matrix product D = f(alpha A B^T), A (m x k) and B (n x k) of BF16 or F16, rows contiguous, sums in F32. Proven on
// the emulator, not run on hardware.
//
// A block, or a pair of blocks that share their halves of B (CTAS 2), stays and takes tile after tile of D, 128 rows
// for each block. One thread loads stages of 64 columns of A and B, one multiplies them into tensor memory, four warps
// bring the sums out, 32 rows each. There are two accumulators: while one is brought out the other is filled.
//
// Each of these waits for the others through barriers alone:
//   full, empty         a stage has arrived; its products are done
//   sums, sums_taken    an accumulator is complete; it has been read
//
// Defines: CTAS, TILE_N, STAGES (gemm_tiles.h), ELEMENT, OUTPUT (0: as ELEMENT, 1: F32), ACTIVATION (gemm_params.h),
// BIAS, RESIDUAL (D += R, of D's type, after the activation). SwiGLU: B has the rows of the gate, then those of the
// other factor, and a tile takes half of its columns from each.

#include "gemm_params.h"
#include "sm100.cuh"

#define SWIGLU (ACTIVATION == DW_GEMM_SWIGLU)
#define TILE_M (CTAS * DW_GEMM_ROWS)
#define TILE_COLUMNS (SWIGLU ? TILE_N / 2 : TILE_N) // of D
#define BOX_COLUMNS (OUTPUT == 1 ? 32 : 64)         // of D: 128 bytes
#define STAGE_BYTES DW_GEMM_STAGE_BYTES(CTAS, TILE_N)
#define COLUMNS DW_GEMM_COLUMNS(TILE_N)
#define BAND 8 // tiles one below the other that are worked on together, for what they share of B in the level-2 cache
#define PRODUCT_STEP 16

static_assert(CTAS == 1 || CTAS == 2, "a block or a pair");
static_assert(TILE_N % 64 == 0 && TILE_N <= 256, "what one product takes");
static_assert(TILE_COLUMNS % BOX_COLUMNS == 0, "boxes do not cross tiles");
static_assert(DW_GEMM_SHARED_BYTES(CTAS, TILE_N, STAGES) <= DW_GEMM_MOST_SHARED, "too many stages");

// ---- shared memory ------------------------------------------------------------------------------------------

typedef struct shared_layout {
    uint32 stages, out, bias, full, empty, sums, sums_taken, residual, tensor_memory;
} shared_layout;

DEVICE shared_layout layout_shared(uint32 base) {
    shared_layout s;
    s.stages = base;
    s.out = s.stages + STAGES * STAGE_BYTES;
    s.bias = s.out + DW_GEMM_OUT_BYTES;
    s.full = s.bias + DW_GEMM_BIAS_BYTES;
    s.empty = s.full + 8 * STAGES;
    s.sums = s.empty + 8 * STAGES;
    s.sums_taken = s.sums + 16;
    s.residual = s.sums_taken + 16;
    s.tensor_memory = s.residual + 64;
    return s;
}

// ---- tiles --------------------------------------------------------------------------------------------------

typedef struct tile {
    int row, column; // of D: the block's first row, the tile's first column
} tile;

// The tile of this block's round `round`: false where there are no more.
DEVICE bool next_tile(const dw_gemm_params &p, int round, tile &t) {
    int index = blockIdx.x / CTAS + round * (gridDim.x / CTAS);
    if (index >= p.tiles_m * p.tiles_n) return false;
    int band = index / (BAND * p.tiles_n), within = index % (BAND * p.tiles_n);
    int height = min(BAND, p.tiles_m - band * BAND);
    t.row = (band * BAND + within % height) * TILE_M + (CTAS == 2 ? (int)cluster_rank() * DW_GEMM_ROWS : 0);
    t.column = within / height * TILE_COLUMNS;
    return true;
}

DEVICE int steps_of(const dw_gemm_params &p) { return (p.k + DW_GEMM_STEP - 1) / DW_GEMM_STEP; }

// ---- loads --------------------------------------------------------------------------------------------------

// This block's rows of B: with SwiGLU half of the tile's are the gate's, which the pair's first block holds.
DEVICE void load_b(const dw_gemm_params &p, const tensor_map *map, uint32 to, uint32 full, int k, const tile &t) {
    if constexpr (CTAS == 2) {
        int rank = cluster_rank();
        tma_load_matrix<2>(to, map, full, k, SWIGLU ? rank * p.n + t.column : t.column + rank * (TILE_N / 2));
    } else {
        tma_load_matrix<1>(to, map, full, k, t.column);
        if constexpr (SWIGLU) tma_load_matrix<1>(to + DW_GEMM_B_BYTES(1, TILE_N / 2), map, full, k, p.n + t.column);
    }
}

// What both blocks of a pair load is counted by the barriers of the first, where the products are issued.
DEVICE void load_stages(const dw_gemm_params &p, const shared_layout &s, const tensor_map *map_a,
                        const tensor_map *map_b) {
    bool first = CTAS == 1 || cluster_rank() == 0;
    uint32 full = CTAS == 1 ? s.full : cluster_address(s.full, 0);
    ring r = {0, 0};
    tile t;
    for (int round = 0; next_tile(p, round, t); round++) {
        for (int step = 0; step < steps_of(p); step++) {
            uint32 a = s.stages + r.stage * STAGE_BYTES;
            barrier_wait(s.empty + 8 * r.stage, r.phase ^ 1);
            if (first) barrier_expect(s.full + 8 * r.stage, CTAS * STAGE_BYTES);
            tma_load_matrix<CTAS>(a, map_a, full + 8 * r.stage, step * DW_GEMM_STEP, t.row);
            load_b(p, map_b, a + DW_GEMM_A_BYTES, full + 8 * r.stage, step * DW_GEMM_STEP, t);
            advance(r, STAGES);
        }
    }
    // The block stays until every product has said that it is done: that would arrive in nobody's memory.
    for (int i = 0; i < STAGES; i++) {
        barrier_wait(s.empty + 8 * r.stage, r.phase ^ 1);
        advance(r, STAGES);
    }
}

// ---- products -----------------------------------------------------------------------------------------------

DEVICE void multiply_stages(const dw_gemm_params &p, const shared_layout &s, uint32 tensor_memory) {
    constexpr uint32 shape = product_descriptor(TILE_M, TILE_N);
    ring r = {0, 0}, sums = {0, 0};
    tile t;
    for (int round = 0; next_tile(p, round, t); round++) {
        if constexpr (CTAS == 1) barrier_wait(s.sums_taken + 8 * sums.stage, sums.phase ^ 1);
        else barrier_wait_cluster(s.sums_taken + 8 * sums.stage, sums.phase ^ 1);
        tensor_fence_after();
        for (int step = 0; step < steps_of(p); step++) {
            uint32 a = s.stages + r.stage * STAGE_BYTES;
            uint64 descriptor_a = operand_descriptor(a), descriptor_b = operand_descriptor(a + DW_GEMM_A_BYTES);
            barrier_wait(s.full + 8 * r.stage, r.phase);
            tensor_fence_after();
#pragma unroll
            for (int i = 0; i < DW_GEMM_STEP / PRODUCT_STEP; i++)
                multiply<CTAS>(tensor_memory + sums.stage * TILE_N, descriptor_a + 2 * i, descriptor_b + 2 * i, shape,
                               step > 0 || i > 0);
            multiply_commit<CTAS>(s.empty + 8 * r.stage);
            advance(r, STAGES);
        }
        multiply_commit<CTAS>(s.sums + 8 * sums.stage);
        advance(sums, 2);
    }
}

// ---- epilogue -----------------------------------------------------------------------------------------------

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

// alpha x + bias of 32 columns; `bias`: the first's.
DEVICE void scale(const dw_gemm_params &p, float *x, uint32 bias) {
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        float4 b = make_float4(0.f, 0.f, 0.f, 0.f);
        if constexpr (BIAS) b = shared_load_f32x4(bias + 4 * i);
        x[i] = fmaf(p.alpha, x[i], b.x);
        x[i + 1] = fmaf(p.alpha, x[i + 1], b.y);
        x[i + 2] = fmaf(p.alpha, x[i + 2], b.z);
        x[i + 3] = fmaf(p.alpha, x[i + 3], b.w);
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

// The accumulator's columns of one box, from `sums` on, to the box at `box`; a lane has a row.
DEVICE void finish_box(const dw_gemm_params &p, uint32 sums, uint32 box, uint32 bias) {
#pragma unroll
    for (int half = 0; half < BOX_COLUMNS / 32; half++) {
        float x[32], factor[32];
        tensor_memory_load(x, sums + 32 * half);
        if constexpr (SWIGLU) tensor_memory_load(factor, sums + TILE_COLUMNS + 32 * half);
        tensor_memory_wait_load();
        keep<32>(x);
        scale(p, x, bias + 128 * half);
        if constexpr (SWIGLU) {
            keep<32>(factor);
            scale(p, factor, bias + 256 + 128 * half);
        }
#pragma unroll
        for (int i = 0; i < 32; i++) x[i] = SWIGLU ? silu(x[i]) * factor[i] : activate(x[i]);
        constexpr int chunk = OUTPUT == 1 ? 4 : 8;
#pragma unroll
        for (int i = 0; i < 32 / chunk; i++)
            store_chunk(tile_chunk(box, 32, lane_index(), half * (32 / chunk) + i), x + chunk * i);
    }
}

// Boxes of a tile's 32 rows, in turn from the warp's two places in shared memory. Lane 0 drives the copy engine.
DEVICE void bring_out(const dw_gemm_params &p, const shared_layout &s, uint32 tensor_memory, const tensor_map *map_d,
                      const tensor_map *map_r) {
    uint32 warp = threadIdx.x / 32, boxes = s.out + warp * 2 * DW_GEMM_BOX_BYTES, bias = s.bias + warp * 512;
    uint32 taken = CTAS == 1 ? s.sums_taken : cluster_address(s.sums_taken, 0);
    ring sums = {0, 0}, out = {0, 0};
    tile t;
    for (int round = 0; next_tile(p, round, t); round++) {
        int row = t.row + warp * 32;
        barrier_wait(s.sums + 8 * sums.stage, sums.phase);
        tensor_fence_after();
        for (int i = 0; i < TILE_COLUMNS; i += BOX_COLUMNS) {
            int column = t.column + i;
            if (row >= p.m || column >= p.n) break;
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
            finish_box(p, tensor_memory + (warp * 32 << 16) + sums.stage * TILE_N + i, box, bias);
            fence_async_shared();
            __syncwarp();
            if (lane_index() == 0) {
                tma_store_matrix(map_d, box, column, row);
                bulk_commit();
            }
            advance(out, 2);
        }
        tensor_fence_before();
        __syncwarp();
        if (lane_index() == 0) {
            if constexpr (CTAS == 1) barrier_arrive(taken + 8 * sums.stage);
            else barrier_arrive_cluster(taken + 8 * sums.stage);
        }
        advance(sums, 2);
    }
    if (lane_index() == 0) bulk_wait<0>();
    __syncwarp();
}

// ---- kernel -------------------------------------------------------------------------------------------------

DEVICE void sync_blocks() {
    if constexpr (CTAS == 1) __syncthreads();
    else cluster_sync();
}

#if CTAS == 2
#define CLUSTER __cluster_dims__(2, 1, 1)
#else
#define CLUSTER
#endif

extern "C" __global__ void CLUSTER __launch_bounds__(DW_GEMM_THREADS, 1)
    sm100_gemm(const __grid_constant__ tensor_map map_a, const __grid_constant__ tensor_map map_b,
               const __grid_constant__ tensor_map map_d, const __grid_constant__ tensor_map map_r,
               const __grid_constant__ dw_gemm_params p) {
    extern __shared__ uint8 memory[];
    shared_layout s = layout_shared(shared_address(memory));
    int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        prefetch_map(&map_a);
        prefetch_map(&map_b);
        prefetch_map(&map_d);
        if constexpr (RESIDUAL) prefetch_map(&map_r);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(s.full + 8 * i, 1);
            barrier_init(s.empty + 8 * i, 1);
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(s.sums + 8 * i, 1);
            barrier_init(s.sums_taken + 8 * i, 4 * CTAS);
        }
        for (int i = 0; i < 8; i++) barrier_init(s.residual + 8 * i, 1);
        fence_barrier_init();
    }
    __syncwarp();
    if (warp == 0) tensor_memory_allocate<CTAS, COLUMNS>(s.tensor_memory);
    tensor_fence_before();
    sync_blocks();
    tensor_fence_after();
    uint32 tensor_memory = shared_load_u32(s.tensor_memory);

    if (warp < 4) {
        bring_out(p, s, tensor_memory, &map_d, &map_r);
    } else if (warp == 4) {
        if (elect_one()) load_stages(p, s, &map_a, &map_b);
    } else if (CTAS == 1 || cluster_rank() == 0) {
        if (elect_one()) multiply_stages(p, s, tensor_memory);
    }
    __syncwarp();

    tensor_fence_before();
    sync_blocks();
    tensor_fence_after();
    if (warp == 0) tensor_memory_free<CTAS, COLUMNS>(tensor_memory);
}
