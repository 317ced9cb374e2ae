// Probes behaviour of Hopper that documents leave open. Each probe writes words; hopper_h200.txt has those of an H200,
// and the emulator must write the same ones. Times are not probed.
//
//     nvcc -arch=sm_90a -ptx -o hopper.ptx hopper.cu         (hopper.ptx is committed beside this file)
//     ./run_probes hopper.ptx > hopper_h200.txt              (on the GPU)

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) tensor_map {
    unsigned char bytes[128];
};

extern __shared__ __align__(1024) unsigned char dynamic[];

static __device__ u32 shared_address(const void *pointer) { return (u32)__cvta_generic_to_shared(pointer); }
static __device__ u32 rank() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
static __device__ u32 mapped(u32 address, u32 to) {
    u32 r;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(to));
    return r;
}
static __device__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
static __device__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
static __device__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
static __device__ u64 barrier_arrive(u32 barrier) {
    u64 state;
    asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(barrier) : "memory");
    return state;
}
static __device__ u32 barrier_test(u32 barrier, u32 parity) {
    u32 done;
    asm volatile("{ .reg .pred p;\n\tmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done;
}
static __device__ u32 barrier_try(u32 barrier, u32 parity) {
    u32 done;
    asm volatile("{ .reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done;
}

// Shared addresses in a cluster of four: 16 words of each block. The words are the block's own dynamic memory, the same
// address mapped to each block, the difference between the low words of its generic address and another block's, ranks,
// and the effect of a store to a mapped address.
extern "C" __global__ void __cluster_dims__(4, 1, 1) probe_addresses(u32 *out) {
    __shared__ u32 cell[4];
    u32 *to = out + 16 * blockIdx.x, own = shared_address(dynamic);
    cell[0] = cell[1] = cell[2] = cell[3] = 0;
    cluster_sync();
    to[0] = rank();
    to[1] = own >> 24;
    to[2] = own % 1024;
    for (u32 other = 0; other < 4; other++) to[3 + other] = mapped(own, other) >> 24;
    for (u32 other = 0; other < 4; other++) to[7 + other] = (mapped(own, other) ^ own) & 0xFFFFFF;
    u32 cells = shared_address(cell);
    to[11] = cells % 1024 == 0;
    // Masks off the rank of an address, as code for pairs of blocks does to get the address in the first block.
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"((cells & 0xFEFFFFFF) + 4 * (rank() & 1)), "r"(100 + rank()) : "memory");
    cluster_sync();
    to[12] = cell[0], to[13] = cell[1];
    u64 generic = (u64)dynamic;
    to[14] = (u32)(generic & 0xFFFFFFFF) == own;
    to[15] = own >> 24 == rank();
    cluster_sync();
}

// A box of 8 rows of 128 bytes, swizzled, in shared memory 128 * shift bytes after a multiple of 1,024: the destination
// of each 16 bytes. Word 64 * i + k tells which 16 bytes of the box are at place k for the i-th shift.
extern "C" __global__ void probe_swizzle(u32 *out, const __grid_constant__ tensor_map map) {
    __shared__ __align__(8) u64 barrier;
    u32 parity = 0, bar = shared_address(&barrier);
    for (u32 i = threadIdx.x; i < 4096; i += blockDim.x) dynamic[i] = 0xFF;
    if (threadIdx.x == 0) barrier_init(bar, 1);
    asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async;" ::: "memory");
    __syncthreads();
    for (u32 shift = 0; shift < 8; shift++) {
        u32 to = shared_address(dynamic) + 128 * shift;
        if (threadIdx.x == 0) {
            barrier_expect(bar, 1024);
            asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                         "l"(&map), "r"(0), "r"(0), "r"(bar)
                         : "memory");
        }
        while (!barrier_try(bar, parity)) {
        }
        parity ^= 1;
        for (u32 k = threadIdx.x; k < 64; k += blockDim.x) out[64 * shift + k] = *(const u32 *)(dynamic + 128 * shift + 16 * k);
        __syncthreads();
        for (u32 i = threadIdx.x; i < 4096; i += blockDim.x) dynamic[i] = 0xFF;
        asm volatile("fence.proxy.async;" ::: "memory");
        __syncthreads();
    }
}

// Phases of mbarriers: the results of test_wait and try_wait for each parity, before, within and after phases.
extern "C" __global__ void probe_barrier(u32 *out) {
    __shared__ __align__(8) u64 barrier;
    u32 bar = shared_address(&barrier), at = 0;
    if (threadIdx.x != 0) return;
    barrier_init(bar, 2);
    out[at++] = barrier_test(bar, 0), out[at++] = barrier_test(bar, 1);
    barrier_arrive(bar);
    out[at++] = barrier_test(bar, 0), out[at++] = barrier_try(bar, 0), out[at++] = barrier_test(bar, 1);
    barrier_arrive(bar);
    out[at++] = barrier_test(bar, 0), out[at++] = barrier_test(bar, 1), out[at++] = barrier_try(bar, 0);
    // The bytes arrive before they are expected.
    asm volatile("mbarrier.complete_tx.relaxed.cluster.shared::cta.b64 [%0], 64;" ::"r"(bar) : "memory");
    out[at++] = barrier_test(bar, 1);
    barrier_arrive(bar), barrier_arrive(bar);
    out[at++] = barrier_test(bar, 1); // all have arrived, with 64 bytes too many
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], 64;" ::"r"(bar) : "memory");
    out[at++] = barrier_test(bar, 1);
    u64 state = barrier_arrive(bar);
    u32 pending;
    asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(pending) : "l"(state));
    out[at++] = pending;
    u32 dropped;
    asm volatile("{ .reg .b64 s;\n\tmbarrier.arrive_drop.shared::cta.b64 s, [%1];\n\tmbarrier.pending_count.b64 %0, s; }" : "=r"(dropped) : "r"(bar));
    out[at++] = dropped;
    out[at++] = barrier_test(bar, 0);
    barrier_arrive(bar); // one arrival is pending
    out[at++] = barrier_test(bar, 1);
}

// Threads that have exited do not count; a barrier on which no thread remains to arrive.
extern "C" __global__ void probe_exit(u32 *out) {
    __shared__ u32 sum;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    if (threadIdx.x / 32 == 1) return;
    atomicAdd(&sum, 1);
    __syncthreads();
    if (threadIdx.x == 0) out[0] = sum;
    u32 votes = __syncthreads_count(threadIdx.x % 3 == 0);
    if (threadIdx.x == 0) out[1] = votes;
}

// Approximate functions, conversions and minima of awkward numbers. Exact functions must agree to the bit.
extern "C" __global__ void probe_numbers(u32 *out, const u32 *in, u32 count) {
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
        const float x = __uint_as_float(in[2 * i]), y = __uint_as_float(in[2 * i + 1]);
        u32 *to = out + 24 * i;
        float r;
        u32 b;
        unsigned short h;
        int s;
        asm("add.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y)); to[0] = __float_as_uint(r);
        asm("add.rz.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y)); to[1] = __float_as_uint(r);
        asm("mul.rp.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y)); to[2] = __float_as_uint(r);
        asm("fma.rm.f32 %0, %1, %2, %1;" : "=f"(r) : "f"(x), "f"(y)); to[3] = __float_as_uint(r);
        asm("mul.ftz.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y)); to[4] = __float_as_uint(r);
        asm("div.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y)); to[5] = __float_as_uint(r);
        asm("sqrt.rn.f32 %0, %1;" : "=f"(r) : "f"(x)); to[6] = __float_as_uint(r);
        asm("min.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y)); to[7] = __float_as_uint(r);
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y)); to[8] = __float_as_uint(r);
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(b) : "f"(x), "f"(y)); to[9] = b;
        asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(b) : "f"(x), "f"(y)); to[10] = b;
        asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(b) : "f"(x), "f"(y)); to[11] = b;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(h) : "f"(x), "f"(y)); to[12] = h;
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(h) : "f"(x), "f"(y)); to[13] = h;
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(b) : "f"(x)); to[14] = b;
        asm("cvt.rni.s32.f32 %0, %1;" : "=r"(s) : "f"(x)); to[15] = s;
        asm("cvt.rzi.u32.f32 %0, %1;" : "=r"(b) : "f"(x)); to[16] = b;
        asm("cvt.rmi.f32.f32 %0, %1;" : "=f"(r) : "f"(x)); to[17] = __float_as_uint(r);
        asm("cvt.rn.f32.s32 %0, %1;" : "=f"(r) : "r"(in[2 * i])); to[18] = __float_as_uint(r);
        asm("{ .reg .b32 t; cvt.rn.f16x2.e4m3x2 t, %1; mov.b32 %0, t; }" : "=r"(b) : "h"((unsigned short)in[2 * i])); to[19] = b;
        asm("{ .reg .b32 t; cvt.rn.f16x2.e5m2x2 t, %1; mov.b32 %0, t; }" : "=r"(b) : "h"((unsigned short)in[2 * i])); to[20] = b;
        asm("fma.rn.bf16x2 %0, %1, %2, %1;" : "=r"(b) : "r"(in[2 * i]), "r"(in[2 * i + 1])); to[21] = b;
        asm("fma.rn.f16x2 %0, %1, %2, %1;" : "=r"(b) : "r"(in[2 * i]), "r"(in[2 * i + 1])); to[22] = b;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x)); to[23] = h;
    }
}

// Approximate functions are compared with a bound.
extern "C" __global__ void probe_functions(u32 *out, const u32 *in, u32 count) {
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
        const float x = __uint_as_float(in[2 * i]);
        u32 *to = out + 8 * i;
        float r;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); to[0] = __float_as_uint(r);
        asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); to[1] = __float_as_uint(r);
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); to[2] = __float_as_uint(r);
        asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); to[3] = __float_as_uint(r);
        asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(x)); to[4] = __float_as_uint(r);
        asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); to[5] = __float_as_uint(r);
        asm("sin.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); to[6] = __float_as_uint(r);
        asm("div.full.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(3.0f)); to[7] = __float_as_uint(r);
    }
}

// One wgmma of 64 x 8 and 32 bytes of K, both operands from plain shared memory (no swizzle), K-major. `in`: 64 rows of A, 8 of B, 32 bytes
// each, then D as each thread holds it. Sums of small integers are exact; other sums show how terms are aligned and
// truncated.
template <class Multiply> static __device__ void product(u32 *out, const u32 *in, Multiply multiply) {
    const u32 t = threadIdx.x;
    // Core matrices of 8 rows of 16 bytes, one after another: along K, then along M.
    for (u32 i = t; i < 72 * 8; i += 128) {
        u32 row = i / 8, word = i % 8;
        ((u32 *)dynamic)[(row / 8 * 2 + word / 4) * 32 + row % 8 * 4 + word % 4] = in[i];
    }
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    u64 a = (u64)(shared_address(dynamic) >> 4) | (u64)(128 >> 4) << 16 | (u64)(256 >> 4) << 32;
    u64 b = (u64)((shared_address(dynamic) + 2048) >> 4) | (u64)(128 >> 4) << 16 | (u64)(256 >> 4) << 32;
    float d[4];
    for (int i = 0; i < 4; i++) d[i] = __uint_as_float(in[576 + 4 * t + i]);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    multiply(d, a, b);
    asm volatile("wgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 4; i++) out[4 * t + i] = __float_as_uint(d[i]);
}
#define PRODUCT(name, instruction, flags)                                                                              \
    extern "C" __global__ void probe_##name(u32 *out, const u32 *in) {                                                 \
        product(out, in, [](float *d, u64 a, u64 b) {                                                                  \
            asm volatile("{ .reg .pred p;\n\tsetp.eq.u32 p, 0, 0;\n\twgmma.mma_async.sync.aligned." instruction         \
                         " {%0, %1, %2, %3}, %4, %5, p, 1, 1" flags "; }"                                              \
                         : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                              \
                         : "l"(a), "l"(b));                                                                            \
        });                                                                                                            \
    }
PRODUCT(bf16, "m64n8k16.f32.bf16.bf16", ", 0, 0")
PRODUCT(f16, "m64n8k16.f32.f16.f16", ", 0, 0")
PRODUCT(tf32, "m64n8k8.f32.tf32.tf32", "")
PRODUCT(e4m3, "m64n8k32.f32.e4m3.e4m3", "")
PRODUCT(e5m2, "m64n8k32.f32.e5m2.e5m2", "")
