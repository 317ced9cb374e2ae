// GEMM and epilogue by their definition, one thread for each element of D, accumulators in F64. It runs if the
// first-use check has found a fast kernel to differ. Any GPU, any number of thread blocks, every field of
// dw_gemm_reference_params. ELEMENT: 0 BF16, 1 F16. OUTPUT: 0 as ELEMENT, 1 F32.
#include "gemm_reference_params.h"
#include "sm100/gemm_params.h"
#include "sm90.cuh" // for its types and conversions; nothing specific to that architecture

static __device__ float element_at(const void *from, long long at) { return element_low(((const uint16 *)from)[at]); }

// Returns alpha A B^T + bias for row `of_b` of B.
static __device__ float scaled_sum(const dw_gemm_reference_params &p, long long row, long long of_b) {
    double sum = 0.0;
    for (long long i = 0; i < p.k; i++)
        sum += (double)element_at(p.a, row * p.stride_a + i) * (double)element_at(p.b, of_b * p.stride_b + i);
    return (float)((double)p.alpha * sum + (p.bias ? (double)element_at(p.bias, of_b) : 0.0));
}

static __device__ float activate(const dw_gemm_reference_params &p, float x, long long row, long long column) {
    switch (p.activation) {
    case DW_GEMM_GELU: return 0.5f * x * (1.f + erff(x * 0.7071067811865476f));
    case DW_GEMM_GELU_TANH: return 0.5f * x * (1.f + tanh_exact(0.7978845608028654f * fmaf(0.044715f * x * x, x, x)));
    case DW_GEMM_SWIGLU: return x / (1.f + exp2f(x * -1.4426950408889634f)) * scaled_sum(p, row, p.n + column);
    default: return x;
    }
}

extern "C" __global__ void reference_gemm(const __grid_constant__ dw_gemm_reference_params p) {
    long long count = p.m * p.n, step = (long long)gridDim.x * blockDim.x;
    for (long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += step) {
        long long row = at / p.n, column = at % p.n, to = row * p.stride_d + column;
        float x = activate(p, scaled_sum(p, row, column), row, column);
        if (p.residual) {
            long long from = row * p.stride_residual + column;
            x += OUTPUT == 1 ? ((const float *)p.residual)[from] : element_at(p.residual, from);
        }
        if (OUTPUT == 1) ((float *)p.d)[to] = x;
        else ((uint16 *)p.d)[to] = (uint16)pack_elements(x, 0.f);
    }
}
