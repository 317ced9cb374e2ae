/* A texture, which the emulator does not support. The program does not check for errors. */
#include <cuda_runtime.h>

static __global__ void fetch(cudaTextureObject_t texture, float *out) {
    out[threadIdx.x] = tex1Dfetch<float>(texture, (int)threadIdx.x);
}

int main() {
    float *out;
    cudaMalloc(&out, 128);
    fetch<<<1, 32>>>(0, out);
    return 0;
}
