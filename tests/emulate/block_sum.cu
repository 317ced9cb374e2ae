/* Sums the numbers of each block in shared memory. */
#include <cstdio>
#include <cstdlib>

static __global__ void reduce(const unsigned *in, unsigned *out) {
    extern __shared__ unsigned part[];
    const unsigned i = threadIdx.x;
    part[i] = in[blockIdx.x * blockDim.x + i];
    __syncthreads();
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        if (i < half) part[i] += part[i + half];
        __syncthreads();
    }
    if (i == 0) out[blockIdx.x] = part[0];
}

int main() {
    const int blocks = 7, threads = 512;
    unsigned *in, *out, *host, sums[blocks];
    if (cudaMallocHost(&host, blocks * threads * sizeof *host) != cudaSuccess) return 1;
    cudaMalloc(&in, blocks * threads * sizeof *in);
    cudaMalloc(&out, sizeof sums);
    for (int i = 0; i < blocks * threads; i++) host[i] = (unsigned)rand() * 7u;
    cudaMemcpy2D(in, threads * 4, host, threads * 4, threads * 4, blocks, cudaMemcpyHostToDevice);
    cudaFuncSetAttribute(reduce, cudaFuncAttributeMaxDynamicSharedMemorySize, 100000);
    reduce<<<blocks, threads, threads * sizeof(unsigned)>>>(in, out);
    if (cudaDeviceSynchronize() != cudaSuccess) return 2;
    cudaMemcpy(sums, out, sizeof sums, cudaMemcpyDeviceToHost);
    for (int b = 0; b < blocks; b++) {
        unsigned sum = 0;
        for (int i = 0; i < threads; i++) sum += host[b * threads + i];
        if (sum != sums[b]) return 3;
    }
    cudaFreeHost(host);
    printf("right\n");
    return 0;
}
