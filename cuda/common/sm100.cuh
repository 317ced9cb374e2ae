// Blackwell's instructions (sm_100f: sm_100, sm_103), one function each: tensor memory, the MMAs whose accumulators
// lie in it (tcgen05), pairs of thread blocks, arithmetic on pairs. sm90.cuh has barriers, TMA and ordering, which
// are Hopper's.
#ifndef DW_SM100_CUH
#define DW_SM100_CUH

#include "sm90.cuh"

// ---- clusters ---------------------------------------------------------------------------------------------

DEVICE uint32 cluster_rank() {
    uint32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Synchronizes all threads of all blocks of the cluster and orders their writes to shared memory.
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrives at a barrier of any block of the cluster.
DEVICE void barrier_arrive_cluster(uint32 barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Like barrier_expect, at a barrier of any block of the cluster.
DEVICE void barrier_expect_cluster(uint32 barrier, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Like barrier_wait, but also acquires what other blocks wrote before they arrived.
DEVICE void barrier_wait_cluster(uint32 barrier, uint32 parity) {
    uint32 passed;
    do {
        asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(passed)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (!passed);
}

// ---- cluster launch control (PTX ISA, "clusterlaunchcontrol.try_cancel") ------------------------------------ A
// thread block, or a pair, takes over the work of one that has not been launched.

// Requests the cancellation of a launch; called by one thread. The response, 16 bytes, is written to `answer` and
// completes on `barrier`; with GROUP 2 in both blocks, at the same addresses.
template <int GROUP> DEVICE void launch_control_ask(uint32 answer, uint32 barrier) {
    if constexpr (GROUP == 1)
        asm volatile("clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%0], [%1];" ::"r"(
                         answer),
                     "r"(barrier)
                     : "memory");
    else
        asm volatile("clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all."
                     "b128 [%0], [%1];" ::"r"(answer),
                     "r"(barrier)
                     : "memory");
}

// Reads a response: whether a launch was canceled, and the index (x) of its first block.
DEVICE void launch_control_read(uint32 answer, uint32 &canceled, uint32 &block) {
    asm volatile("{\n\t.reg .pred p;\n\t.reg .b128 answer;\n\tld.shared.b128 answer, [%2];\n\tmov.u32 %1, 0;\n\t"
                 "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, answer;\n\tselp.u32 %0, 1, 0, p;\n\t"
                 "@p clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %1, answer;\n\t}"
                 : "=r"(canceled), "=&r"(block)
                 : "r"(answer)
                 : "memory");
}

// ---- TMA (PTX ISA, "cp.async.bulk.tensor") ------------------------------------------------------------------

// Loads a box of a matrix into shared memory. Elements outside of the matrix arrive as zeros and count as bytes. With
// GROUP 2, `barrier` may be that of the other block of the pair.
template <int GROUP> DEVICE void tma_load_matrix(uint32 to, const tensor_map *map, uint32 barrier, int column, int row) {
    if constexpr (GROUP == 1)
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
                     "[%2];" ::"r"(to),
                     "l"((uint64)map), "r"(barrier), "r"(column), "r"(row)
                     : "memory");
    else
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.cta_group::2 [%0], [%1, "
                     "{%3, %4}], [%2];" ::"r"(to),
                     "l"((uint64)map), "r"(barrier), "r"(column), "r"(row)
                     : "memory");
}

// Stores a box of shared memory into a matrix; elements outside of the matrix are skipped.
DEVICE void tma_store_matrix(const tensor_map *map, uint32 from, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"((uint64)map), "r"(from),
                 "r"(column), "r"(row)
                 : "memory");
}

// Like tma_load of sm90.cuh, in the other direction.
DEVICE void tma_store(const tensor_map *map, uint32 from, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"((uint64)map),
                 "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

// ---- tensor memory (PTX ISA, "Tensor Memory") --------------------------------------------------------------- 128
// lanes of 512 columns of 32 bits; an address is lane << 16 | column. GROUP must be the same throughout a kernel.

// Allocates COLUMNS columns, a power of 2 from 32, and writes their address to shared memory at `to`; waits until
// they are free. Called by a whole warp (with GROUP 2, by one warp of each block of the pair). The block cannot
// allocate afterwards.
template <int GROUP, int COLUMNS> DEVICE void tensor_memory_allocate(uint32 to) {
    if constexpr (GROUP == 1) {
        asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(to), "n"(COLUMNS) : "memory");
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
    } else {
        asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(to), "n"(COLUMNS) : "memory");
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;");
    }
}

// Called by the warp that allocated.
template <int GROUP, int COLUMNS> DEVICE void tensor_memory_free(uint32 address) {
    if constexpr (GROUP == 1)
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "n"(COLUMNS));
    else
        asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(address), "n"(COLUMNS));
}

// Must surround a synchronization between threads of which one uses tensor memory after the other.
DEVICE void tensor_fence_before() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
DEVICE void tensor_fence_after() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

// Loads COUNT (16, 32) columns of 32 lanes: lane i of the warp gets columns address .. address + COUNT - 1 of its own
// lane. Warp w of four can read lanes 32 w .. 32 w + 31. The values are valid only after tensor_memory_wait_load and
// keep.
template <int COUNT = 32> DEVICE void tensor_memory_load(float *to, uint32 address) {
    static_assert(COUNT == 16 || COUNT == 32, "no load of so many columns");
    if constexpr (COUNT == 16)
        asm volatile("tcgen05.ld.sync.aligned.32x32b.x16.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
                     "%14, %15}, [%16];"
                     : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3]), "=f"(to[4]), "=f"(to[5]), "=f"(to[6]),
                       "=f"(to[7]), "=f"(to[8]), "=f"(to[9]), "=f"(to[10]), "=f"(to[11]), "=f"(to[12]), "=f"(to[13]),
                       "=f"(to[14]), "=f"(to[15])
                     : "r"(address));
    else
        asm volatile("tcgen05.ld.sync.aligned.32x32b.x32.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
                     "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, [%32];"
                     : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3]), "=f"(to[4]), "=f"(to[5]), "=f"(to[6]),
                       "=f"(to[7]), "=f"(to[8]), "=f"(to[9]), "=f"(to[10]), "=f"(to[11]), "=f"(to[12]), "=f"(to[13]),
                       "=f"(to[14]), "=f"(to[15]), "=f"(to[16]), "=f"(to[17]), "=f"(to[18]), "=f"(to[19]), "=f"(to[20]),
                       "=f"(to[21]), "=f"(to[22]), "=f"(to[23]), "=f"(to[24]), "=f"(to[25]), "=f"(to[26]), "=f"(to[27]),
                       "=f"(to[28]), "=f"(to[29]), "=f"(to[30]), "=f"(to[31])
                     : "r"(address));
}

DEVICE void tensor_memory_wait_load() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }

// Stores 16 columns: column i of the warp's lanes gets word i of each. Complete only after tensor_memory_wait_store.
DEVICE void tensor_memory_store(uint32 address, const uint32 *from) {
    asm volatile("tcgen05.st.sync.aligned.32x32b.x16.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, "
                 "%15, %16};" ::"r"(address),
                 "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]), "r"(from[4]), "r"(from[5]), "r"(from[6]),
                 "r"(from[7]), "r"(from[8]), "r"(from[9]), "r"(from[10]), "r"(from[11]), "r"(from[12]), "r"(from[13]),
                 "r"(from[14]), "r"(from[15])
                 : "memory");
}

DEVICE void tensor_memory_wait_store() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

// ---- pairs of F32 (PTX ISA, "Floating Point Instructions") --------------------------------------------------- One
// instruction operates on two numbers.

DEVICE uint64 pair_of(float low, float high) {
    uint64 pair;
    asm("mov.b64 %0, {%1, %2};" : "=l"(pair) : "f"(low), "f"(high));
    return pair;
}
DEVICE void split_pair(float *low, float *high, uint64 pair) {
    asm("mov.b64 {%0, %1}, %2;" : "=f"(*low), "=f"(*high) : "l"(pair));
}
DEVICE uint64 pair_fma(uint64 a, uint64 b, uint64 c) {
    uint64 d;
    asm("fma.rn.f32x2 %0, %1, %2, %3;" : "=l"(d) : "l"(a), "l"(b), "l"(c));
    return d;
}
DEVICE uint64 pair_add(uint64 a, uint64 b) {
    uint64 d;
    asm("add.rn.f32x2 %0, %1, %2;" : "=l"(d) : "l"(a), "l"(b));
    return d;
}
DEVICE uint64 pair_subtract(uint64 a, uint64 b) {
    uint64 d;
    asm("sub.rn.f32x2 %0, %1, %2;" : "=l"(d) : "l"(a), "l"(b));
    return d;
}
// Rounds down.
DEVICE uint64 pair_add_down(uint64 a, uint64 b) {
    uint64 d;
    asm("add.rm.f32x2 %0, %1, %2;" : "=l"(d) : "l"(a), "l"(b));
    return d;
}

// Computes 2^x of both numbers, x up to 126, without ex2's units: the relative error is 2^-18, powers of 2 are exact,
// and the result is 0 from -127 down. With x = n + f, n is added to the exponent of a polynomial of degree 4 in f,
// which has the least error in [0, 1] with value 1 at 0.
DEVICE uint64 pair_exp2(uint64 x) {
    const uint64 magic = pair_of(0x1.8p23f, 0x1.8p23f);
    float low, high, low_n, high_n;
    split_pair(&low, &high, x);
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(low) : "f"(low), "f"(-127.f));
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(high) : "f"(high), "f"(-127.f));
    x = pair_of(low, high);
    uint64 n = pair_add_down(x, magic); // n lies in the lower bits of each number
    uint64 f = pair_subtract(x, pair_subtract(n, magic));
    uint64 p = pair_fma(f, pair_of(0x1.b7f734p-7f, 0x1.b7f734p-7f), pair_of(0x1.abf868p-5f, 0x1.abf868p-5f));
    p = pair_fma(f, p, pair_of(0x1.ee2452p-3f, 0x1.ee2452p-3f));
    p = pair_fma(f, p, pair_of(0x1.62d6c6p-1f, 0x1.62d6c6p-1f));
    p = pair_fma(f, p, pair_of(1.f, 1.f));
    split_pair(&low, &high, p);
    split_pair(&low_n, &high_n, n);
    return pair_of(__uint_as_float(__float_as_uint(low) + (__float_as_uint(low_n) << 23)),
                   __uint_as_float(__float_as_uint(high) + (__float_as_uint(high_n) << 23)));
}

// ---- MMA (PTX ISA, "tcgen05.mma") ---------------------------------------------------------------------------

// Shared-memory descriptor (PTX ISA, "Shared memory descriptor") of a tile in TMA's 128-byte swizzle: rows of 128
// bytes, contraction along the rows, groups of 8 rows 1024 bytes apart. `+ 2` advances 32 bytes along the rows.
DEVICE uint64 operand_descriptor(uint32 address) {
    return (uint64)((address & 0x3ffff) >> 4) | (uint64)1 << 16 | (uint64)(1024 >> 4) << 32 | (uint64)1 << 46 | (uint64)2 << 61;
}

// The same for a tile whose contraction goes across such rows (tile_chunk of sm90.cuh): `+ 128` advances 16 rows,
// `block_bytes` leads to the next 64 elements of a row.
DEVICE uint64 operand_descriptor_transposed(uint32 address, uint32 block_bytes) {
    return (uint64)((address & 0x3ffff) >> 4) | (uint64)(block_bytes >> 4) << 16 | (uint64)(1024 >> 4) << 32 |
           (uint64)1 << 46 | (uint64)2 << 61;
}

// Instruction descriptor (PTX ISA, "Instruction descriptor"): F32 accumulators, neither operand transposed. Add
// TRANSPOSED_A or TRANSPOSED_B for operands that are (operand_descriptor_transposed).
#define TRANSPOSED_A (1u << 15)
#define TRANSPOSED_B (1u << 16)
DEVICE constexpr uint32 mma_descriptor(int m, int n) {
    return 1u << 4 | (ELEMENT == 0 ? 1u << 7 | 1u << 10 : 0u) | (uint32)(n >> 3) << 17 | (uint32)(m >> 4) << 24;
}

// D = or += A (M x 16) B^T (N x 16), with `shape` from mma_descriptor. Called by one thread; with GROUP 2, by one
// of the pair's first block. With GROUP 2, each block holds M/2 rows of A and of D and N/2 rows of B, all at the same
// addresses.
template <int GROUP> DEVICE void multiply(uint32 d, uint64 a, uint64 b, uint32 shape, bool accumulate) {
    if constexpr (GROUP == 1)
        asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %4, 0;\n\t"
                     "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n\t}" ::"r"(d),
                     "l"(a), "l"(b), "r"(shape), "r"((uint32)accumulate)
                     : "memory");
    else
        asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %4, 0;\n\t"
                     "tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, p;\n\t}" ::"r"(d),
                     "l"(a), "l"(b), "r"(shape), "r"((uint32)accumulate)
                     : "memory");
}

// The same for one block, with A in tensor memory: lane i holds its row i, two elements per column, from column `a`
// on.
DEVICE void multiply_tensor(uint32 d, uint32 a, uint64 b, uint32 shape, bool accumulate) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %4, 0;\n\t"
                 "tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, p;\n\t}" ::"r"(d),
                 "r"(a), "l"(b), "r"(shape), "r"((uint32)accumulate)
                 : "memory");
}

// ---- MMA of block-scaled operands (PTX ISA, "Block scaling for tcgen05.mma") -------------------------------------

// Descriptor of a tile of scales (scale_layout.h) in shared memory: 32 lines of 16 bytes.
DEVICE uint64 scales_descriptor(uint32 address) {
    return (uint64)((address & 0x3ffff) >> 4) | (uint64)1 << 16 | (uint64)(128 >> 4) << 32 | (uint64)1 << 46;
}

// Copies a tile of scales from shared memory to 4 columns of tensor memory, the same into each range of 32 lanes.
// Called by one thread; with GROUP 2 it copies in both blocks. The copy is ordered with this thread's MMAs.
template <int GROUP> DEVICE void tensor_memory_copy_scales(uint32 to, uint64 from) {
    if constexpr (GROUP == 1)
        asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(to), "l"(from) : "memory");
    else
        asm volatile("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;" ::"r"(to), "l"(from) : "memory");
}

// The elements, the number of them that share a scale, and the scale's type.
#define DW_SCALED_F8_E8M0_32 0
#define DW_SCALED_F4_E4M3_16 1
#define DW_SCALED_F4_E8M0_32 2

// Instruction descriptor (PTX ISA, "Instruction descriptor") without the selection among a column's four scales.
// Types of 8-bit elements: 0 E4M3, 1 E5M2; of 4-bit elements: 1.
template <int KIND> DEVICE constexpr uint32 scaled_mma_descriptor(int m, int n, int type_a, int type_b) {
    return (uint32)type_a << 7 | (uint32)type_b << 10 | (uint32)(n >> 3) << 17 |
           (KIND == DW_SCALED_F4_E4M3_16 ? 0u : 1u << 23) | (uint32)(m >> 4) << 24;
}
// Selects the first scale to use.
DEVICE constexpr uint32 scaled_mma_scale(uint32 scale) { return scale << 4 | scale << 29; }

#define DW_MULTIPLY_SCALED(GROUP, KIND)                                                                                \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %6, 0;\n\t"                                                      \
                 "tcgen05.mma.cta_group::" GROUP ".kind::" KIND " [%0], %1, %2, %3, [%4], [%5], p;\n\t}" ::"r"(d),       \
                 "l"(a), "l"(b), "r"(shape), "r"(scales_a), "r"(scales_b), "r"((uint32)accumulate)                      \
                 : "memory")

// Like multiply, for 32 bytes of each row, with `shape` from scaled_mma_descriptor and scaled_mma_scale. The scales
// are in tensor memory; with GROUP 2, each block holds those of its rows of A and of all rows of B.
template <int GROUP, int KIND>
DEVICE void multiply_scaled(uint32 d, uint64 a, uint64 b, uint32 shape, uint32 scales_a, uint32 scales_b, bool accumulate) {
    if constexpr (GROUP == 1) {
        if constexpr (KIND == DW_SCALED_F8_E8M0_32) DW_MULTIPLY_SCALED("1", "mxf8f6f4.block_scale.block32");
        else if constexpr (KIND == DW_SCALED_F4_E4M3_16) DW_MULTIPLY_SCALED("1", "mxf4nvf4.block_scale.block16");
        else DW_MULTIPLY_SCALED("1", "mxf4nvf4.block_scale.block32");
    } else {
        if constexpr (KIND == DW_SCALED_F8_E8M0_32) DW_MULTIPLY_SCALED("2", "mxf8f6f4.block_scale.block32");
        else if constexpr (KIND == DW_SCALED_F4_E4M3_16) DW_MULTIPLY_SCALED("2", "mxf4nvf4.block_scale.block16");
        else DW_MULTIPLY_SCALED("2", "mxf4nvf4.block_scale.block32");
    }
}

// Arrives at `barrier` when all MMAs that this thread has issued are complete; with GROUP 2, at the barriers of both
// blocks.
template <int GROUP> DEVICE void multiply_commit(uint32 barrier) {
    if constexpr (GROUP == 1)
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier) : "memory");
    else
        asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(
                         barrier),
                     "h"((uint16)3)
                     : "memory");
}

#endif
