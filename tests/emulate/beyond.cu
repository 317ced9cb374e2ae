/* A kernel that writes past the end of its output, and one with an assertion that fails. */
#include <cassert>
#include <cstdio>
#include <cstring>

static __global__ void fill(int *out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i <= n)     /* one element too many */
        out[i] = i; // the mistake
}

static __global__ void check(const int *in, int n) {
    const int i = threadIdx.x;
    assert(i < n && in[i] == 0);
}

int main(int argc, char **argv) {
    const int n = 100;
    int *out;
    cudaMalloc(&out, n * sizeof *out);
    cudaMemset(out, 0, n * sizeof *out);
    if (argc > 1 && strcmp(argv[1], "assert") == 0)
        check<<<1, n + 1>>>(out, n);
    else
        fill<<<1, 128>>>(out, n);
    const cudaError_t error = cudaDeviceSynchronize();
    printf("%s\n", cudaGetErrorName(error));
    return argc > 1 && strcmp(argv[1], "quiet") == 0 ? 0 : error != cudaSuccess;
}
