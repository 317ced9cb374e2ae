// Few tiles of D, for the GEMM of Hopper (sm90_gemm.cu): a grid has a cluster of CLUSTER blocks for each tile, each of which
// multiplies a part of the contraction. With one block there is nothing to exchange.
//
// A tile's strips of 32 columns are distributed over the blocks. A block stores its sums of the others' strips from
// registers into their shared memory (st.async), where a barrier counts the bytes, and adds those that it gets to its own
// in a fixed order, so that results have the same bits in each run. The room for them is not used otherwise, so a block
// sends as soon as its own products are complete and all blocks of the cluster have begun.
#ifndef DW_SM90_CLUSTER_CUH
#define DW_SM90_CLUSTER_CUH

#define STRIP_HALVES (SWIGLU ? 2 : 1)                 // sets of 16 sums of a strip: with SwiGLU those of both factors
#define SET_BYTES (128 * 16 * 4)                      // of a warpgroup
#define OTHERS (CLUSTER - 1)                          // blocks that send sums
#define STRIP_BYTES (OTHERS * STRIP_HALVES * SET_BYTES) // that a warpgroup gets of a strip
#define MOST_STRIPS ((STRIPS + CLUSTER - 1) / CLUSTER) // of a block

static_assert(READERS * MOST_STRIPS * STRIP_BYTES <= CLUSTER_BYTES, "room for the sums of other blocks");

typedef struct walk {
    int round;
} walk;

DEVICE int block_rank() { return blockIdx.x % CLUSTER; }

// Computes the block's part of its tile; returns false the second time.
DEVICE bool next_tile(const dw_sm90_gemm_params &p, walk &w, tile &t) {
    const int steps = (p.k + STEP - 1) / STEP, rank = block_rank(), first = steps * rank / CLUSTER,
              end = steps * (rank + 1) / CLUSTER;
    if (w.round++ > 0) return false;
    place(blockIdx.x / CLUSTER, p.tiles_m, p.tiles_n, t);
    t.group = 0, t.end = p.m;
    t.first = first * STEP, t.k = min(p.k - t.first, (end - first) * STEP);
    return true;
}

// The block that a strip belongs to, a block's first strip, and the number of its strips.
DEVICE constexpr int owner_of(int strip) { return strip * CLUSTER / STRIPS; }
DEVICE constexpr int first_strip(int rank) { return (rank * STRIPS + CLUSTER - 1) / CLUSTER; }
DEVICE constexpr int own_strips(int rank) { return first_strip(rank + 1) - first_strip(rank); }

#if CLUSTER > 1
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Makes the barriers, one for each warpgroup, that count the bytes of sums. Called by one thread.
DEVICE void expect_sums(uint32 arrived) {
    for (int i = 0; i < READERS; i++) {
        barrier_init(arrived + 8 * i, 1);
        barrier_expect(arrived + 8 * i, (uint32)(own_strips(block_rank()) * STRIP_BYTES));
    }
}

DEVICE void store_in_cluster(uint32 to, const float *x, uint32 barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "r"(__float_as_uint(x[0])), "r"(__float_as_uint(x[1])), "r"(__float_as_uint(x[2])), "r"(__float_as_uint(x[3])),
                 "r"(barrier)
                 : "memory");
}

DEVICE uint32 warpgroup_barrier(const shared_layout &s) { return s.arrived + threadIdx.x / 128 * 8; }

DEVICE void wait_for_sums(const shared_layout &s) {
    uint32 passed;
    do {
        asm volatile("{\n\t.reg .pred p;\n\t"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n\tselp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(passed)
                     : "r"(warpgroup_barrier(s))
                     : "memory");
    } while (!passed);
}

// Where the strip's block gets a thread's sums from the block `other` + 1 behind it.
DEVICE uint32 place_of_sums(const shared_layout &s, int strip, int other, int half) {
    const int at = threadIdx.x / 128 * MOST_STRIPS + strip - first_strip(owner_of(strip));
    return s.exchange + ((at * OTHERS + other) * STRIP_HALVES + half) * SET_BYTES + threadIdx.x % 128 * 16;
}

DEVICE float *sums_of_strip(float *sums, int strip, int half) { return sums + 16 * strip + half * (WIDTH / 4); }

// Sends the sums of the other blocks' strips.
DEVICE void send_sums(const shared_layout &s, int rank, float *sums) {
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) {
        const int owner = owner_of(strip), other = (rank - owner - 1 + CLUSTER) % CLUSTER;
        if (owner == rank) continue;
        const uint32 barrier = cluster_address(warpgroup_barrier(s), owner);
#pragma unroll
        for (int half = 0; half < STRIP_HALVES; half++) {
            const uint32 to = cluster_address(place_of_sums(s, strip, other, half), owner);
#pragma unroll
            for (int i = 0; i < 4; i++) store_in_cluster(to + i * 2048, sums_of_strip(sums, strip, half) + 4 * i, barrier);
        }
    }
}

// Adds the other blocks' sums of one of the block's strips.
DEVICE void receive_sums(const shared_layout &s, int strip, float *sums) {
#pragma unroll
    for (int half = 0; half < STRIP_HALVES; half++)
#pragma unroll
        for (int other = 0; other < OTHERS; other++) {
            const uint32 from = place_of_sums(s, strip, other, half);
            float *to = sums_of_strip(sums, strip, half);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float4 v = shared_load_f32x4(from + i * 2048);
                to[4 * i] += v.x, to[4 * i + 1] += v.y, to[4 * i + 2] += v.z, to[4 * i + 3] += v.w;
            }
        }
}

#else
DEVICE void cluster_arrive() {}
DEVICE void cluster_wait() {}
DEVICE void expect_sums(uint32) {}
DEVICE void wait_for_sums(const shared_layout &) {}
DEVICE void send_sums(const shared_layout &, int, float *) {}
DEVICE void receive_sums(const shared_layout &, int, float *) {}
#endif

#endif
