/* Launch parameters of the reference GEMM (gemm_reference.cu). Plain C, read by the host and by device code. */
#ifndef DW_GEMM_PARAMS_H
#define DW_GEMM_PARAMS_H

typedef struct dw_gemm_reference_params {
    long long m, n, k; /* n: columns of D; with SwiGLU, B has 2 n rows */
    long long stride_a, stride_b, stride_d, stride_residual; /* in elements, from row to row */
    const void *a, *b, *bias, *residual;                     /* bias and residual may be NULL */
    void *d;
    float alpha;
    int activation; /* as in sm100/gemm_params.h */
} dw_gemm_reference_params;

#endif
