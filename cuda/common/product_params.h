/* The matrix product by definition (product_reference.cu): what it is launched with. Plain C, read by the host and by
 * device code alike. */
#ifndef DW_PRODUCT_PARAMS_H
#define DW_PRODUCT_PARAMS_H

typedef struct dw_product_params {
    long long m, n, k; /* of D: n; with SwiGLU B has 2 n rows */
    long long stride_a, stride_b, stride_d, stride_residual; /* elements from row to row */
    const void *a, *b, *bias, *residual;                     /* the last two may be NULL */
    void *d;
    float alpha;
    int activation; /* as in sm100/gemm_params.h */
} dw_product_params;

#endif
