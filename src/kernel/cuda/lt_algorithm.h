/* The algorithm of a GEMM by cuBLASLt: the fastest of the heuristic's, measured once and kept on disk. */
#ifndef DW_LT_ALGORITHM_H
#define DW_LT_ALGORITHM_H

#include "device/cublaslt.h"
#include "kernel/kernel.h"

enum { DW__LT_MOST_ALGORITHMS = 8 };

/* The device memory of a measured GEMM's operands, and the stream that it is enqueued on. */
typedef struct dw__lt_operands {
    void *a, *b, *d, *bias, *workspace;
    void *stream;
} dw__lt_operands;

/* A GEMM as the library has it: D = op(A) op(B) + beta C. */
typedef struct dw__lt_gemm {
    const dw__cublaslt *library;
    const dw__context *context;
    const char *name; /* of the GEMM: equal names have equal algorithms */
    /* F32, F16, BF16; of A and B also E4M3, E5M2. type_bias: of what bias_bytes counts. */
    dw_dtype type_a, type_b, type_c, type_bias;
    double flops;
    void *handle, *product, *a, *b, *c, *d; /* c may be d */
    size_t a_bytes, b_bytes, d_bytes;       /* from the first element to the last */
    size_t c_bytes;                         /* 0: C is D, and beta is 0 */
    size_t
        bias_bytes; /* what the epilogue reads or writes; 0: nothing. Its address is set in `product` */
    /* Enqueues another kernel that computes the same, to be measured beside the library; NULL: there is none. */
    dw_status (*other)(const void *described, const dw__lt_operands *operands);
    const void *described;
    size_t other_workspace; /* bytes that it needs */
} dw__lt_gemm;

/* Chooses among `count` algorithms, of which there is at least one and which all support the GEMM: the one that is kept
 * for this GEMM, GPU model and version of the library; else, for GEMMs worth it on a real GPU, the fastest, which is
 * then kept; else the first. All processes choose the same, and so do later runs, as long as the file is kept. Never
 * fails: without a folder, memory or a time, the first is chosen. Measures on a stream and memory of its own; the
 * thread may allocate (capture_relax). `seconds` receives the time that is kept with the choice, and `other` that of the
 * other kernel; 0: there is none.
 *
 * DEEPWELL_AUTOTUNE=0 or "off": the first. */
void dw__lt_choose(const dw__lt_gemm *gemm, const dw__lt_algorithm *algorithms, int count,
                   size_t most_workspace, dw__lt_algorithm *chosen, double *seconds, double *other);

/* Calls `visit` for each GEMM of a GPU model that this version of Deepwell has measured by both the library and the other
 * kernel, until a call fails: the GEMM's name, and their seconds. */
dw_status dw__lt_each_measured(const char *gpu,
                               dw_status (*visit)(void *state, const char *name, double seconds,
                                                  double other),
                               void *state);

#endif
