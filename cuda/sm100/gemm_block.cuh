// Resources of a thread block of a GEMM on sm_100: shared memory, barriers, tensor memory. Defines: CTAS, STAGES,
// STAGE_BYTES (bytes of a load stage, a multiple of 16), TENSOR_COLUMNS (of tensor memory), SCHEDULE.
#ifndef DW_SM100_GEMM_BLOCK_CUH
#define DW_SM100_GEMM_BLOCK_CUH

#include "gemm_params.h"
#include "sm100.cuh"

#ifndef SCHEDULE
#define SCHEDULE DW_GEMM_STATIC
#endif

static_assert(CTAS == 1 || CTAS == 2, "a block or a pair");

typedef struct shared_layout {
    uint32 out, stages, bias, answers, full, empty, answered, answers_taken, sums, sums_taken, residual, tensor_memory;
} shared_layout;

DEVICE shared_layout layout_shared(uint32 base) {
    shared_layout s;
    s.out = base; // swizzled memory must start at multiples of 1024
    s.stages = s.out + DW_GEMM_OUT_BYTES;
    s.bias = s.stages + STAGES * STAGE_BYTES;
    s.answers = s.bias + DW_GEMM_BIAS_BYTES;
    s.full = s.answers + 16 * DW_GEMM_ANSWERS;
    s.empty = s.full + 8 * STAGES;
    s.answered = s.empty + 8 * STAGES;
    s.answers_taken = s.answered + 8 * DW_GEMM_ANSWERS;
    s.sums = s.answers_taken + 8 * DW_GEMM_ANSWERS;
    s.sums_taken = s.sums + 16;
    s.residual = s.sums_taken + 16;
    s.tensor_memory = s.residual + 64;
    return s;
}

DEVICE void sync_blocks() {
    if constexpr (CTAS == 1) __syncthreads();
    else cluster_sync();
}

#if CTAS == 2
#define CLUSTER __cluster_dims__(2, 1, 1)
#else
#define CLUSTER
#endif

// Initializes barriers and allocates tensor memory, whose address it returns. Called by all threads.
DEVICE uint32 begin_block(const shared_layout &s) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(s.full + 8 * i, 1);
            barrier_init(s.empty + 8 * i, 1);
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(s.sums + 8 * i, 1);
            barrier_init(s.sums_taken + 8 * i, 4 * CTAS);
        }
        if constexpr (SCHEDULE == DW_GEMM_LAUNCH_CONTROL) {
            for (int i = 0; i < DW_GEMM_ANSWERS; i++) {
                barrier_init(s.answered + 8 * i, 1);
                // The epilogue warps, the loader and the multiplier.
                barrier_init(s.answers_taken + 8 * i, 5 * CTAS + 1);
            }
        }
        for (int i = 0; i < 8; i++) barrier_init(s.residual + 8 * i, 1);
        fence_barrier_init();
    }
    __syncwarp();
    if (threadIdx.x / 32 == 0) tensor_memory_allocate<CTAS, TENSOR_COLUMNS>(s.tensor_memory);
    tensor_fence_before();
    sync_blocks();
    tensor_fence_after();
    return shared_load_u32(s.tensor_memory);
}

DEVICE void end_block(uint32 tensor_memory) {
    __syncwarp();
    tensor_fence_before();
    sync_blocks();
    tensor_fence_after();
    if (threadIdx.x / 32 == 0) tensor_memory_free<CTAS, TENSOR_COLUMNS>(tensor_memory);
}

#endif
