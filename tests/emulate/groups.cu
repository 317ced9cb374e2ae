/* Cooperative groups: tiles of a warp, coalesced lanes, and a grid-wide barrier. */
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cstdio>

namespace cg = cooperative_groups;
enum { THREADS = 96, ROUNDS = 3, SHARED = 60 << 10 };

static __global__ void tiles(const int *in, int *out) {
    const cg::thread_block block = cg::this_thread_block();
    const auto half = cg::tiled_partition<16>(block);
    const auto four = cg::tiled_partition<4>(half);
    const int x = in[threadIdx.x];
    out[threadIdx.x] = cg::reduce(half, x, cg::plus<int>()) + 1000 * four.shfl(x, 2);
    if (threadIdx.x % 3 == 0) {
        const auto some = cg::coalesced_threads();
        out[threadIdx.x] += 1000000 * some.size();
    }
}

/* Each round reads the values that the whole grid wrote in the previous one. */
static __global__ void rounds(int *values, int n) {
    const cg::grid_group grid = cg::this_grid();
    for (int r = 0; r < ROUNDS; r++) {
        for (int i = (int)grid.thread_rank(); i < n; i += (int)grid.size())
            values[(r + 1) * n + i] = values[r * n + (i + 1) % n] + 1;
        grid.sync();
    }
}

static __global__ void much_shared(int *out) {
    extern __shared__ int words[];
    words[threadIdx.x] = (int)threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = words[blockDim.x - 1 - threadIdx.x];
}

int main() {
    int in[THREADS], out[THREADS], *from, *to, *values, each = 0, n = 1000;
    for (int i = 0; i < THREADS; i++) in[i] = i * 7 % 11;
    cudaMalloc(&from, sizeof in);
    cudaMalloc(&to, sizeof out);
    cudaMemcpy(from, in, sizeof in, cudaMemcpyHostToDevice);
    tiles<<<1, THREADS>>>(from, to);
    if (cudaMemcpy(out, to, sizeof out, cudaMemcpyDeviceToHost) != cudaSuccess) return 1;
    for (int i = 0; i < THREADS; i++) {
        int sum = 0, third = 0;
        for (int k = i / 16 * 16; k < i / 16 * 16 + 16; k++) sum += in[k];
        for (int k = i / 32 * 32; k < i / 32 * 32 + 32; k++) third += k % 3 == 0;
        if (out[i] != sum + 1000 * in[i / 4 * 4 + 2] + (i % 3 ? 0 : 1000000 * third)) return 2;
    }

    const size_t bytes = (ROUNDS + 1) * n * sizeof(int);
    static int got[(ROUNDS + 1) * 1000];
    cudaMalloc(&values, bytes);
    cudaMemset(values, 0, bytes);
    void *arguments[] = {&values, &n};
    if (cudaLaunchCooperativeKernel(rounds, 4, THREADS, arguments) != cudaSuccess) return 3;
    cudaMemcpy(got, values, bytes, cudaMemcpyDeviceToHost);
    for (int i = 0; i < n; i++)
        if (got[ROUNDS * n + i] != ROUNDS) return 4;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, rounds, 1024, 0);
    int processors;
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0);
    if (cudaLaunchCooperativeKernel(rounds, each * processors + 1, 1024, arguments) !=
        cudaErrorCooperativeLaunchTooLarge)
        return 5;

    much_shared<<<1, THREADS, SHARED>>>(to); /* cooperative launch was not requested */
    if (cudaGetLastError() != cudaErrorInvalidValue) return 6;
    cudaFuncSetAttribute(much_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    much_shared<<<1, THREADS, SHARED>>>(to);
    if (cudaGetLastError() != cudaSuccess) return 7;
    cudaMemcpy(out, to, sizeof out, cudaMemcpyDeviceToHost);
    for (int i = 0; i < THREADS; i++)
        if (out[i] != THREADS - 1 - i) return 8;

    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = 16;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(16);
    config.blockDim = dim3(THREADS);
    config.attrs = &cluster;
    config.numAttrs = 1;
    if (cudaLaunchKernelEx(&config, much_shared, to) != cudaErrorInvalidClusterSize) return 9;
    cudaFuncSetAttribute(much_shared, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    config.dynamicSmemBytes = THREADS * sizeof(int);
    if (cudaLaunchKernelEx(&config, much_shared, to) != cudaSuccess) return 10;
    printf("right\n");
    return 0;
}
