/* oneDNN, where the build found it: single-threaded F32 matrix products, called from inside the
 * tasks of our own pool. */
#ifndef DW_ONEDNN_H
#define DW_ONEDNN_H

#include "base/base.h"

/* "2.6.3", or NULL when built without. */
const char *dw__onednn_version(void);
/* C[m,n] = A * B + beta * C, row-major, leading dimensions in elements; A is stored [m,k] or, when
 * transposed, [k,m]; B [k,n] or [n,k]. Runs on the calling thread alone. DW_UNSUPPORTED without
 * oneDNN. */
dw_status dw__onednn_sgemm(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k,
                           const float *a, int64_t lda, const float *b, int64_t ldb, float beta,
                           float *c, int64_t ldc);
/* What dw__onednn_sgemm allocates while it runs (C has `ldc`): packed blocks of its operands, or the workspace of
 * loops that do not pack. As oneDNN 2.6.3 does on AVX-512, by its sources (cpu/x64/gemm, its choice between the two
 * included) and as counted; other versions and instruction sets may take more or less. 0 without oneDNN. */
size_t dw__onednn_sgemm_bytes(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k,
                              int64_t lda, int64_t ldb, int64_t ldc);

#endif
