/* Adds two vectors; one thread prints. Uses a device function, a constant and a device variable. */
#include <cstdio>
#include <cstdlib>

__constant__ float scale[2];
__device__ int finished;

static __device__ __noinline__ float sum(float x, float y, const float *by) {
    if (y < 0) return x - by[1] * y;
    return x + by[0] * y;
}

static __global__ void add(const float *x, const float *y, float *z, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) z[i] = sum(x[i], y[i], scale);
    if (i == 3)
        printf("[%s] thread %3d of %u: %+.2f %lld %c %x %5.1f%%\n", "add", i, blockDim.x, z[i],
               -1234567890123LL, 'q', 48879, 99.5);
    if (threadIdx.x == 0) atomicAdd(&finished, 1);
}

#define CHECK(call)                                                                                \
    do {                                                                                           \
        cudaError_t error_ = (call);                                                               \
        if (error_ != cudaSuccess) {                                                               \
            fprintf(stderr, "%s: %s: %s\n", #call, cudaGetErrorName(error_),                       \
                    cudaGetErrorString(error_));                                                   \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

int main() {
    const int n = 1000;
    const float factors[2] = {3, 5};
    float *x, *y, *z, host[3][n], milliseconds = -1;
    int blocks = 0, per_multiprocessor = 0;
    cudaStream_t stream;
    cudaEvent_t begin, end;
    cudaDeviceProp properties;
    cudaFuncAttributes attributes;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    if (properties.warpSize != 32 || properties.major < 9 || properties.clusterLaunch != 1 ||
        properties.sharedMemPerBlockOptin < 90000 || properties.multiProcessorCount < 100)
        return 2;
    CHECK(cudaFuncGetAttributes(&attributes, add));
    if (attributes.maxThreadsPerBlock != 1024) return 3;
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, add, 256, 0));
    if (per_multiprocessor < 1) return 4;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaMalloc(&x, sizeof host[0]));
    CHECK(cudaMallocManaged(&y, sizeof host[0]));
    CHECK(cudaMallocAsync(&z, sizeof host[0], stream));
    for (int i = 0; i < n; i++) host[0][i] = rand() % 1000, y[i] = host[1][i] = rand() % 200 - 100;
    CHECK(cudaMemcpyToSymbol(scale, factors, sizeof factors));
    CHECK(cudaMemcpyAsync(x, host[0], sizeof host[0], cudaMemcpyHostToDevice, stream));
    CHECK(cudaEventRecord(begin, stream));
    add<<<4, 256, 0, stream>>>(x, y, z, n);
    CHECK(cudaGetLastError());
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaMemcpyAsync(host[2], z, sizeof host[2], cudaMemcpyDefault, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
    CHECK(cudaMemcpyFromSymbol(&blocks, finished, sizeof blocks));
    for (int i = 0; i < n; i++) {
        const float a = host[0][i], b = host[1][i];
        if (host[2][i] != (b < 0 ? a - 5 * b : a + 3 * b)) return 5;
    }
    if (blocks != 4 || milliseconds < 0) return 6;
    add<<<1, 2048>>>(x, y, z, n); /* more threads than a block can have */
    if (cudaGetLastError() != cudaErrorInvalidConfiguration) return 7;
    CHECK(cudaGetLastError());
    CHECK(cudaFreeAsync(z, stream));
    CHECK(cudaFree(x));
    CHECK(cudaFree(y));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaDeviceSynchronize());
    printf("right\n");
    return 0;
}
