/* oneDNN, if the build found it: single-threaded F32 GEMMs, called from the tasks of our own pool. */
#ifndef DW_ONEDNN_H
#define DW_ONEDNN_H

#include "base/base.h"

/* Returns "2.6.3", or NULL if Deepwell was built without oneDNN. */
const char *dw__onednn_version(void);
/* Returns the instruction set of oneDNN's GEMMs: "avx512", "avx2", "avx", "sse41", or "portable" on machines other than
 * x86-64; NULL without oneDNN. oneDNN chooses it, and ONEDNN_MAX_CPU_ISA lowers it. */
const char *dw__onednn_isa(void);
/* Generates the code (some MiB) that the first GEMM would generate. DW_OUT_OF_MEMORY: it cannot be mapped. */
dw_status dw__onednn_prepare(void);
/* C[m,n] = A * B + beta * C, row-major, leading dimensions in elements. A is stored as [m,k], or as [k,m] if
 * transposed; B as [k,n] or [n,k]. Runs on the calling thread alone. DW_UNSUPPORTED without oneDNN. */
dw_status dw__onednn_sgemm(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k,
                           const float *a, int64_t lda, const float *b, int64_t ldb, float beta,
                           float *c, int64_t ldc);
/* Bytes that dw__onednn_sgemm allocates while it runs (C has the leading dimension `ldc`): packed blocks of its
 * operands, or the workspace of loops that do not pack. The rules are those of oneDNN's sources (cpu/x64/gemm,
 * 2.6.3) for its SSE4.1, AVX, AVX2 and AVX-512 code, checked against what 2.6.3 allocates; later versions up to 3
 * differ by less than 1 KB. Returns 0 without oneDNN, and where dw__onednn_memory_known() is false. */
size_t dw__onednn_sgemm_bytes(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k,
                              int64_t lda, int64_t ldb, int64_t ldc);
/* Returns false on machines other than x86-64 and for other versions. Predictions of memory then lack oneDNN's share
 * and say so. */
bool dw__onednn_memory_known(void);

#endif
