// Hopper's instructions (sm_90a), one function each: barriers in shared memory, TMA, warpgroup matrix multiplication
// (wgmma), register reallocation.
//
// No toolkit header is included, because run-time compilation has none. ELEMENT is the type of tiles: 0 BF16, 1 F16.
#ifndef DW_SM90_CUH
#define DW_SM90_CUH

#ifndef ELEMENT
#define ELEMENT 0
#endif

typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef unsigned long long uint64;

#define DEVICE static __device__ __forceinline__
#define INFINITY_F __int_as_float(0x7f800000)

// A CUtensorMap, opaque. Must be a __grid_constant__ parameter, because TMA reads it from parameter memory.
struct __align__(64) tensor_map {
    uint64 opaque[16];
};

DEVICE uint32 shared_address(const void *pointer) { return (uint32)__cvta_generic_to_shared(pointer); }

// Returns the address in the cluster's block `rank` that corresponds to `address` in this block.
DEVICE uint32 cluster_address(uint32 address, uint32 rank) {
    uint32 mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

DEVICE uint32 lane_index() { return threadIdx.x & 31; }

// Returns true in one lane of a converged warp.
DEVICE bool elect_one() {
    uint32 elected;
    asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(elected));
    return elected != 0;
}

// ---- mbarrier (PTX ISA, "mbarrier") --------------------------------------------------------------------------

DEVICE void barrier_init(uint32 barrier, uint32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Required after barrier_init and before asynchronous use of the barriers (then __syncthreads).
DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void barrier_arrive(uint32 barrier) {
    asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared::cta.b64 state, [%0];\n\t}" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for `bytes` of TMA.
DEVICE void barrier_expect(uint32 barrier, uint32 bytes) {
    asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n\t}" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}

DEVICE bool barrier_passed(uint32 barrier, uint32 parity) {
    uint32 passed;
    asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(passed)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return passed != 0;
}

// Waits until the phase of this parity is complete; parities are 0, 1, 0, ...
DEVICE void barrier_wait(uint32 barrier, uint32 parity) {
    while (!barrier_passed(barrier, parity)) {
    }
}

// A ring of stages: the current stage and the parity of its phase.
typedef struct ring {
    int stage;
    uint32 phase;
} ring;

DEVICE void advance(ring &r, int stages) {
    if (++r.stage == stages) {
        r.stage = 0;
        r.phase ^= 1;
    }
}

// ---- named barriers (PTX ISA, "bar"): 0 is __syncthreads; `threads` counts those that sync and those that arrive
// ----

DEVICE void named_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

DEVICE void named_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- ordering ---------------------------------------------------------------------------------------------

// Orders this thread's ordinary accesses to shared memory before those of the tensor cores and TMA.
DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same for all memory: required before a bulk reduction reads shared memory or writes global memory.
DEVICE void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// ---- TMA (PTX ISA, "cp.async.bulk.tensor") ------------------------------------------------------------------

DEVICE void prefetch_map(const tensor_map *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"((uint64)map) : "memory");
}

// Where loads write. On sm_120a, ptxas 13.0 makes a function call of loads to .shared::cluster, beside which it ignores
// setmaxnreg.
#if __CUDA_ARCH__ >= 1200
#define DW_TMA_TO "shared::cta"
#else
#define DW_TMA_TO "shared::cluster"
#endif

// Loads a box of the tensor into shared memory. Elements outside of the tensor arrive as zeros and count as bytes.
DEVICE void tma_load(uint32 to, const tensor_map *map, uint32 barrier, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d." DW_TMA_TO ".global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
                 "l"((uint64)map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

// Loads contiguous global memory into shared memory (16-byte aligned, `bytes` a multiple of 16).
DEVICE void bulk_load(uint32 to, const void *from, uint32 bytes, uint32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"((uint64)__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Adds F32 numbers in shared memory to consecutive F32 numbers in global memory.
DEVICE void bulk_add_f32(void *to, uint32 from, uint32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"((uint64)__cvta_generic_to_global(to)),
                 "r"(from), "r"(bytes)
                 : "memory");
}

DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most PENDING of this thread's groups have not read their shared memory yet.
template <int PENDING> DEVICE void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// Waits until at most PENDING of this thread's groups are incomplete; the writes of complete ones are visible to the
// thread.
template <int PENDING> DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory"); }

// ---- kernels in front and behind (PTX ISA, "griddepcontrol") --------------------------------------------------

// Lets blocks of the next kernel in the stream begin where they fit beside this one's, if it was launched for that.
DEVICE void begin_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Waits for the end of the kernels in front in the stream. Required before global memory is accessed.
DEVICE void wait_for_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- registers ----------------------------------------------------------------------------------------------

template <int COUNT> DEVICE void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// ---- numbers ------------------------------------------------------------------------------------------------

// 2^x with a relative error of 2^-22; 2^-infinity is 0.
DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// tanh by way of 2^x, with an absolute error of about 2^-22. tanh.approx has a relative error of 2^-11, which a soft
// cap of 50 would turn into an error of 0.02 in the exponent.
DEVICE float tanh_exact(float x) {
    float e = exp2_approx(x * 2.885390081777927f), r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(e + 1.f));
    return fmaf(-2.f, r, 1.f);
}

// Packs two numbers as elements, `low` in the lower half.
DEVICE uint32 pack_elements(float low, float high) {
    uint32 packed;
#if ELEMENT == 0
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
    return packed;
}

DEVICE float element_low(uint32 packed) {
#if ELEMENT == 0
    return __uint_as_float(packed << 16);
#else
    float value;
    asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %1;\n\tcvt.f32.f16 %0, low;\n\t}" : "=f"(value) : "r"(packed));
    return value;
#endif
}

DEVICE float element_high(uint32 packed) {
#if ELEMENT == 0
    return __uint_as_float(packed & 0xffff0000u);
#else
    return element_low(packed >> 16);
#endif
}

// Transposes four words of each thread of a quad: thread i's word j becomes thread j's word i.
DEVICE void transpose_quad(uint32 *words) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        bool upper = lane_index() & bit;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & bit) continue;
            uint32 received = __shfl_xor_sync(0xffffffff, upper ? words[i] : words[i | bit], bit);
            if (upper) words[i] = received;
            else words[i | bit] = received;
        }
    }
}

// ---- shared memory in 16-byte chunks ----------------------------------------------------------------------

// Stores four 8x8 matrices of elements in wgmma's register layout to rows of 16 bytes: lane 8 i + r provides the
// address of row r of matrix i.
DEVICE void store_matrices(uint32 address, uint32 m0, uint32 m1, uint32 m2, uint32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0), "r"(m1), "r"(m2),
                 "r"(m3)
                 : "memory");
}

// The same with each matrix transposed.
DEVICE void store_matrices_transposed(uint32 address, uint32 m0, uint32 m1, uint32 m2, uint32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0), "r"(m1),
                 "r"(m2), "r"(m3)
                 : "memory");
}

// Loads four 8 x 8 matrices of 16-bit elements; lane 8 i + r provides the address of row r of matrix i.
DEVICE void load_matrices(uint32 *m, uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

// Stores two matrices; lanes 0 to 15 provide the addresses.
DEVICE void store_two_matrices_transposed(uint32 address, uint32 m0, uint32 m1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(m0), "r"(m1)
                 : "memory");
}

DEVICE uint4 shared_load16(uint32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}

DEVICE void shared_store16(uint32 address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

DEVICE float shared_load_f32(uint32 address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}

DEVICE float4 shared_load_f32x4(uint32 address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
    return v;
}

DEVICE void shared_store_f32(uint32 address, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}

DEVICE void shared_store_f32_pair(uint32 address, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

DEVICE void shared_store_u32(uint32 address, uint32 v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

DEVICE uint32 shared_load_u32(uint32 address) {
    uint32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

DEVICE float2 shared_load_f32_pair(uint32 address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}

// ---- global memory ----------------------------------------------------------------------------------------

// Adds to four F32 numbers, 16-byte aligned, without waiting for the result.
DEVICE void global_add_f32x4(float *to, const float *values) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"((uint64)__cvta_generic_to_global(to)),
                 "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
                 : "memory");
}

// Loads from the level-2 cache.
DEVICE float4 global_load_f32x4(const float *from) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"((uint64)__cvta_generic_to_global(from))
                 : "memory");
    return v;
}

DEVICE int global_load_acquire(const int *from) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"((uint64)__cvta_generic_to_global(from)) : "memory");
    return value;
}

DEVICE uint64 global_load_acquire(const uint64 *from) {
    uint64 value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"((uint64)__cvta_generic_to_global(from)) : "memory");
    return value;
}

DEVICE void global_store_release(uint64 *to, uint64 value) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"((uint64)__cvta_generic_to_global(to)), "l"(value) : "memory");
}

DEVICE void global_store_release(int *to, int value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"((uint64)__cvta_generic_to_global(to)), "r"(value) : "memory");
}

// Tiles are stored in TMA's 128-byte swizzle: blocks of 64 columns, in which each row has 128 bytes, 8 chunks of 16;
// chunk c of row r is at position c ^ (r % 8). A block of ROWS rows takes ROWS * 128 bytes and starts at a multiple
// of 1024. Returns the address of chunk `chunk` (8 elements) of `row` in a tile of `rows` rows.
DEVICE uint32 tile_chunk(uint32 tile, int rows, int row, int chunk) {
    return tile + (chunk >> 3) * rows * 128 + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
}

// ---- wgmma (PTX ISA, "wgmma.mma_async") -----------------------------------------------------------------------

// Matrix descriptors (PTX ISA, "Matrix Descriptor Format") of such tiles. Groups of 8 rows are 1024 bytes apart.
//
// Contraction along the columns ("K-major", transposition 0): 16 columns are 32 bytes within a block, and the next
// block of 64 columns starts rows * 128 bytes later. Contraction along the rows ("MN-major", transposition 1): 16
// rows are 2048 bytes, and `block_bytes` (rows * 128) leads to the next 64 columns. A tile of 64 columns has one
// block, so block_bytes does not matter.
DEVICE uint64 tile_descriptor(uint32 address, uint32 block_bytes) {
    return (uint64)((address & 0x3ffff) >> 4) | (uint64)(block_bytes >> 4) << 16 | (uint64)(1024 >> 4) << 32 | (uint64)1 << 62;
}

// The lower half of a tile's descriptor, and the descriptor of an address `bytes` further: one addition each. The base
// is hidden from the compiler, which would compute all descriptors before the loop and spill them. In a cluster the
// address has the block's rank in its upper bits, which must be cut off first.
DEVICE uint32 descriptor_base(uint32 address, uint32 block_bytes) {
    uint32 base = address >> 4 | block_bytes >> 4 << 16;
    asm volatile("" : "+r"(base));
    return base;
}

DEVICE uint64 descriptor(uint32 base, uint32 bytes) {
    const uint32 upper = (uint32)(tile_descriptor(0, 0) >> 32);
    return (uint64)upper << 32 | (base + (bytes >> 4));
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving reads of accumulators above the wait that makes them valid.
template <int COUNT> DEVICE void keep(float *values) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(values[i])::"memory");
}

#if ELEMENT == 0
#define DW_ELEMENT_TYPE "bf16"
#else
#define DW_ELEMENT_TYPE "f16"
#endif

// Operands %0, %1, ... of an accumulator of 64 x N: N / 2 registers of each thread. In thread t of the warpgroup, d[4
// i] and d[4 i + 1] are columns 8 i + 2 (t % 4) and the next one of row 16 (t / 32) + (t % 32) / 4; d[4 i + 2] and
// d[4 i + 3] are the same columns of the row 8 below.
#define DW_ACCS_8(d, b)                                                                                                \
    "+f"((d)[b]), "+f"((d)[b + 1]), "+f"((d)[b + 2]), "+f"((d)[b + 3]), "+f"((d)[b + 4]), "+f"((d)[b + 5]),              \
        "+f"((d)[b + 6]), "+f"((d)[b + 7])
#define DW_REGS_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define DW_REGS_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define DW_REGS_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define DW_REGS_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define DW_REGS_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define DW_REGS_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define DW_REGS_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define DW_REGS_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define DW_REGS_8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define DW_REGS_9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define DW_REGS_10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define DW_REGS_11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define DW_REGS_12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define DW_REGS_13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define DW_REGS_14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define DW_REGS_15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define DW_REGS_N32 DW_REGS_0 ", " DW_REGS_1
#define DW_REGS_N40 DW_REGS_0 ", " DW_REGS_1 ", %16, %17, %18, %19"
#define DW_REGS_N64 DW_REGS_0 ", " DW_REGS_1 ", " DW_REGS_2 ", " DW_REGS_3
#define DW_REGS_N80 DW_REGS_0 ", " DW_REGS_1 ", " DW_REGS_2 ", " DW_REGS_3 ", " DW_REGS_4
#define DW_REGS_N96 DW_REGS_0 ", " DW_REGS_1 ", " DW_REGS_2 ", " DW_REGS_3 ", " DW_REGS_4 ", " DW_REGS_5
#define DW_REGS_N112 \
    DW_REGS_0 ", " DW_REGS_1 ", " DW_REGS_2 ", " DW_REGS_3 ", " DW_REGS_4 ", " DW_REGS_5 ", " DW_REGS_6
#define DW_REGS_N128 \
    DW_REGS_0 ", " DW_REGS_1 ", " DW_REGS_2 ", " DW_REGS_3 ", " DW_REGS_4 ", " DW_REGS_5 ", " DW_REGS_6 ", " \
    DW_REGS_7
#define DW_REGS_N160 \
    DW_REGS_0 ", " DW_REGS_1 ", " DW_REGS_2 ", " DW_REGS_3 ", " DW_REGS_4 ", " DW_REGS_5 ", " DW_REGS_6 ", " \
    DW_REGS_7 ", " DW_REGS_8 ", " DW_REGS_9
#define DW_REGS_N176 \
    DW_REGS_0 ", " DW_REGS_1 ", " DW_REGS_2 ", " DW_REGS_3 ", " DW_REGS_4 ", " DW_REGS_5 ", " DW_REGS_6 ", " \
    DW_REGS_7 ", " DW_REGS_8 ", " DW_REGS_9 ", " DW_REGS_10
#define DW_REGS_N192 \
    DW_REGS_0 ", " DW_REGS_1 ", " DW_REGS_2 ", " DW_REGS_3 ", " DW_REGS_4 ", " DW_REGS_5 ", " DW_REGS_6 ", " \
    DW_REGS_7 ", " DW_REGS_8 ", " DW_REGS_9 ", " DW_REGS_10 ", " DW_REGS_11
#define DW_REGS_N256 \
    DW_REGS_0 ", " DW_REGS_1 ", " DW_REGS_2 ", " DW_REGS_3 ", " DW_REGS_4 ", " DW_REGS_5 ", " DW_REGS_6 ", " \
    DW_REGS_7 ", " DW_REGS_8 ", " DW_REGS_9 ", " DW_REGS_10 ", " DW_REGS_11 ", " DW_REGS_12 ", " \
    DW_REGS_13 ", " DW_REGS_14 ", " DW_REGS_15
#define DW_ACCS_N32(d) DW_ACCS_8(d, 0), DW_ACCS_8(d, 8)
#define DW_ACCS_N40(d) DW_ACCS_N32(d), "+f"((d)[16]), "+f"((d)[17]), "+f"((d)[18]), "+f"((d)[19])
#define DW_ACCS_N64(d) DW_ACCS_8(d, 0), DW_ACCS_8(d, 8), DW_ACCS_8(d, 16), DW_ACCS_8(d, 24)
#define DW_ACCS_N80(d) DW_ACCS_8(d, 0), DW_ACCS_8(d, 8), DW_ACCS_8(d, 16), DW_ACCS_8(d, 24), DW_ACCS_8(d, 32)
#define DW_ACCS_N96(d) \
    DW_ACCS_8(d, 0), DW_ACCS_8(d, 8), DW_ACCS_8(d, 16), DW_ACCS_8(d, 24), DW_ACCS_8(d, 32), DW_ACCS_8(d, 40)
#define DW_ACCS_N112(d) \
    DW_ACCS_8(d, 0), DW_ACCS_8(d, 8), DW_ACCS_8(d, 16), DW_ACCS_8(d, 24), DW_ACCS_8(d, 32), DW_ACCS_8(d, 40), \
    DW_ACCS_8(d, 48)
#define DW_ACCS_N128(d) \
    DW_ACCS_8(d, 0), DW_ACCS_8(d, 8), DW_ACCS_8(d, 16), DW_ACCS_8(d, 24), DW_ACCS_8(d, 32), DW_ACCS_8(d, 40), \
    DW_ACCS_8(d, 48), DW_ACCS_8(d, 56)
#define DW_ACCS_N160(d) \
    DW_ACCS_8(d, 0), DW_ACCS_8(d, 8), DW_ACCS_8(d, 16), DW_ACCS_8(d, 24), DW_ACCS_8(d, 32), DW_ACCS_8(d, 40), \
    DW_ACCS_8(d, 48), DW_ACCS_8(d, 56), DW_ACCS_8(d, 64), DW_ACCS_8(d, 72)
#define DW_ACCS_N176(d) \
    DW_ACCS_8(d, 0), DW_ACCS_8(d, 8), DW_ACCS_8(d, 16), DW_ACCS_8(d, 24), DW_ACCS_8(d, 32), DW_ACCS_8(d, 40), \
    DW_ACCS_8(d, 48), DW_ACCS_8(d, 56), DW_ACCS_8(d, 64), DW_ACCS_8(d, 72), DW_ACCS_8(d, 80)
#define DW_ACCS_N192(d) \
    DW_ACCS_8(d, 0), DW_ACCS_8(d, 8), DW_ACCS_8(d, 16), DW_ACCS_8(d, 24), DW_ACCS_8(d, 32), DW_ACCS_8(d, 40), \
    DW_ACCS_8(d, 48), DW_ACCS_8(d, 56), DW_ACCS_8(d, 64), DW_ACCS_8(d, 72), DW_ACCS_8(d, 80), DW_ACCS_8(d, 88)
#define DW_ACCS_N256(d) \
    DW_ACCS_8(d, 0), DW_ACCS_8(d, 8), DW_ACCS_8(d, 16), DW_ACCS_8(d, 24), DW_ACCS_8(d, 32), DW_ACCS_8(d, 40), \
    DW_ACCS_8(d, 48), DW_ACCS_8(d, 56), DW_ACCS_8(d, 64), DW_ACCS_8(d, 72), DW_ACCS_8(d, 80), DW_ACCS_8(d, 88), \
    DW_ACCS_8(d, 96), DW_ACCS_8(d, 104), DW_ACCS_8(d, 112), DW_ACCS_8(d, 120)

// wgmma_ss_N<transpose A, transpose B>(d, a, b, accumulate): d (64 x N) = or += A (64 x 16) B (16 x N), both in
// shared memory. wgmma_rs_N<transpose B>(d, a, b, accumulate): A in registers, as elements packed from an
// accumulator's d[8 s .. 8 s + 7] in order for the columns 16 s .. 16 s + 15.
#define DW_DEFINE_WGMMA(N, P0, P1, P2, P3, P4, P5, P6, P7)                                                              \
    template <int TRANSPOSE_A, int TRANSPOSE_B>                                                                        \
    DEVICE void wgmma_ss_##N(float *d, uint64 a, uint64 b, int accumulate) {                                           \
        asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " P2 ", 0;\n\t"                                            \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." DW_ELEMENT_TYPE "." DW_ELEMENT_TYPE " {"        \
                     DW_REGS_N##N "}, " P0 ", " P1 ", p, 1, 1, " P3 ", " P4 ";\n\t}"                                   \
                     : DW_ACCS_N##N(d)                                                                                 \
                     : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B));                           \
    }                                                                                                                  \
    template <int TRANSPOSE_B>                                                                                         \
    DEVICE void wgmma_rs_##N(float *d, const uint32 *a, uint64 b, int accumulate) {                                    \
        asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " P5 ", 0;\n\t"                                            \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." DW_ELEMENT_TYPE "." DW_ELEMENT_TYPE " {"        \
                     DW_REGS_N##N "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4 ", p, 1, 1, " P6 ";\n\t}"                  \
                     : DW_ACCS_N##N(d)                                                                                 \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TRANSPOSE_B));          \
    }

DW_DEFINE_WGMMA(32, "%16", "%17", "%18", "%19", "%20", "%21", "%22", "%23")
DW_DEFINE_WGMMA(40, "%20", "%21", "%22", "%23", "%24", "%25", "%26", "%27")
DW_DEFINE_WGMMA(64, "%32", "%33", "%34", "%35", "%36", "%37", "%38", "%39")
DW_DEFINE_WGMMA(80, "%40", "%41", "%42", "%43", "%44", "%45", "%46", "%47")
DW_DEFINE_WGMMA(96, "%48", "%49", "%50", "%51", "%52", "%53", "%54", "%55")
DW_DEFINE_WGMMA(112, "%56", "%57", "%58", "%59", "%60", "%61", "%62", "%63")
DW_DEFINE_WGMMA(128, "%64", "%65", "%66", "%67", "%68", "%69", "%70", "%71")
DW_DEFINE_WGMMA(160, "%80", "%81", "%82", "%83", "%84", "%85", "%86", "%87")
DW_DEFINE_WGMMA(176, "%88", "%89", "%90", "%91", "%92", "%93", "%94", "%95")
DW_DEFINE_WGMMA(192, "%96", "%97", "%98", "%99", "%100", "%101", "%102", "%103")
DW_DEFINE_WGMMA(256, "%128", "%129", "%130", "%131", "%132", "%133", "%134", "%135")

// Dispatches on N.
template <int N, int TRANSPOSE_A, int TRANSPOSE_B> DEVICE void wgmma_ss(float *d, uint64 a, uint64 b, int accumulate) {
    if constexpr (N == 32) wgmma_ss_32<TRANSPOSE_A, TRANSPOSE_B>(d, a, b, accumulate);
    else if constexpr (N == 40) wgmma_ss_40<TRANSPOSE_A, TRANSPOSE_B>(d, a, b, accumulate);
    else if constexpr (N == 64) wgmma_ss_64<TRANSPOSE_A, TRANSPOSE_B>(d, a, b, accumulate);
    else if constexpr (N == 80) wgmma_ss_80<TRANSPOSE_A, TRANSPOSE_B>(d, a, b, accumulate);
    else if constexpr (N == 96) wgmma_ss_96<TRANSPOSE_A, TRANSPOSE_B>(d, a, b, accumulate);
    else if constexpr (N == 112) wgmma_ss_112<TRANSPOSE_A, TRANSPOSE_B>(d, a, b, accumulate);
    else if constexpr (N == 128) wgmma_ss_128<TRANSPOSE_A, TRANSPOSE_B>(d, a, b, accumulate);
    else if constexpr (N == 160) wgmma_ss_160<TRANSPOSE_A, TRANSPOSE_B>(d, a, b, accumulate);
    else if constexpr (N == 176) wgmma_ss_176<TRANSPOSE_A, TRANSPOSE_B>(d, a, b, accumulate);
    else if constexpr (N == 192) wgmma_ss_192<TRANSPOSE_A, TRANSPOSE_B>(d, a, b, accumulate);
    else if constexpr (N == 256) wgmma_ss_256<TRANSPOSE_A, TRANSPOSE_B>(d, a, b, accumulate);
    else static_assert(N < 0, "no wgmma of this width");
}

template <int N, int TRANSPOSE_B> DEVICE void wgmma_rs(float *d, const uint32 *a, uint64 b, int accumulate) {
    if constexpr (N == 32) wgmma_rs_32<TRANSPOSE_B>(d, a, b, accumulate);
    else if constexpr (N == 40) wgmma_rs_40<TRANSPOSE_B>(d, a, b, accumulate);
    else if constexpr (N == 64) wgmma_rs_64<TRANSPOSE_B>(d, a, b, accumulate);
    else if constexpr (N == 80) wgmma_rs_80<TRANSPOSE_B>(d, a, b, accumulate);
    else if constexpr (N == 96) wgmma_rs_96<TRANSPOSE_B>(d, a, b, accumulate);
    else if constexpr (N == 112) wgmma_rs_112<TRANSPOSE_B>(d, a, b, accumulate);
    else if constexpr (N == 128) wgmma_rs_128<TRANSPOSE_B>(d, a, b, accumulate);
    else if constexpr (N == 160) wgmma_rs_160<TRANSPOSE_B>(d, a, b, accumulate);
    else if constexpr (N == 176) wgmma_rs_176<TRANSPOSE_B>(d, a, b, accumulate);
    else if constexpr (N == 192) wgmma_rs_192<TRANSPOSE_B>(d, a, b, accumulate);
    else if constexpr (N == 256) wgmma_rs_256<TRANSPOSE_B>(d, a, b, accumulate);
    else static_assert(N < 0, "no wgmma of this width");
}

#endif
