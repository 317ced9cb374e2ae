/* One GEMM for any operation, described by pointers and strides and divided into tasks for the pool. Three
 * implementations exist: AMX (matmul_amx.c) if the CPU has it and the GEMM is large enough; oneDNN
 * (matmul_onednn.c) if the build has it and it supports the operands; and our packed loops
 * (matmul_packed.c), which support every stride and, with AVX2, come before oneDNN for large GEMMs. AMX
 * reads BF16 operands directly. Otherwise they are copied to F32 (matmul_widened.c), where the product of
 * two BF16 numbers is exact. */
#ifndef DW_GEMM_H
#define DW_GEMM_H

#include "kernel/cpu/cpu.h"
#include <stdatomic.h>

/* C[batch][m,n] = A[batch][m,k] * B[batch][k,n] + bias[n], or C += A * B. C is contiguous. */
typedef struct dw__matmul {
    int64_t m, n, k, batches;
    bool bf16; /* operands are a_bf16 and b_bf16 instead of a and b */
    const float *a, *b;
    const uint16_t *a_bf16, *b_bf16;
    const float *bias;                 /* [n] or NULL */
    float *c;                          /* NULL with an epilogue: the result is not stored */
    bool accumulate;                   /* C += A * B; then neither bias nor epilogue */
    int64_t a_row, a_k, b_k, b_column; /* strides in elements */
    int batch_rank;
    int64_t batch_shape[DW_MAX_RANK], a_batch[DW_MAX_RANK], b_batch[DW_MAX_RANK];
} dw__matmul;

/* The epilogue that runs on each tile while it is in cache; call NULL: none. Records the first failure of the
 * tasks, because their messages belong to other threads. */
typedef struct dw__epilogue {
    const dw__call *call;
    int replaced;
    _Atomic int failed;
    dw_status status;
    char message[512];
} dw__epilogue;

/* Elements from the operand's start to batch number `batch`. */
int64_t dw__matmul_batch_offset(const dw__matmul *p, const int64_t *strides, int64_t batch);
/* Runs the epilogue on rows [row, row+rows) of all batches' C as one matrix. Records a failure. */
void dw__epilogue_run(dw__epilogue *then, int64_t row, int64_t rows, int64_t column,
                      int64_t columns, const float *tile, int64_t tile_stride);
void dw__epilogue_fail(dw__epilogue *then, dw_status status);
/* Returns DW_OK, or the recorded failure with its message on this thread. */
dw_status dw__epilogue_status(const dw__epilogue *then);

/* `passing`: C is not stored, so tiles stay in scratch. The size depends on the shape, never on data. */
size_t dw__matmul_packed_scratch(const dw__matmul *p, bool passing);
void dw__matmul_packed_run(const dw__matmul *p, dw__epilogue *then, void *scratch);

/* True if the packed loops are faster than oneDNN for this shape and instruction set. */
bool dw__matmul_packed_preferred(const dw__matmul *p);

bool dw__matmul_onednn_supports(const dw__matmul *p);
size_t dw__matmul_onednn_scratch(const dw__matmul *p, bool passing);
size_t dw__matmul_onednn_library(const dw__matmul *p, bool passing);
void dw__matmul_onednn_run(const dw__matmul *p, dw__epilogue *then, void *scratch);

/* For BF16 operands, with the best F32 implementation above. */
size_t dw__matmul_widened_scratch(const dw__matmul *p, bool passing);
size_t dw__matmul_widened_library(const dw__matmul *p, bool passing);
dw_status dw__matmul_widened_run(const dw__matmul *p, dw__epilogue *then, void *scratch);

/* The only implementation that reads BF16 operands directly. */
bool dw__matmul_amx_supports(const dw__matmul *p, bool passing);
size_t dw__matmul_amx_scratch(const dw__matmul *p, bool passing);
void dw__matmul_amx_run(const dw__matmul *p, dw__epilogue *then, void *scratch);

/* Selects the best implementation. `then` may be NULL. */
size_t dw__matmul_scratch(const dw__matmul *p, bool passing);
/* The most that a library allocates during the call (kernel.h). */
size_t dw__matmul_library(const dw__matmul *p, bool passing);
dw_status dw__matmul_run(const dw__matmul *p, dw__epilogue *then, void *scratch);

static inline int64_t dw__min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t dw__divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t dw__round_up(int64_t a, int64_t b) { return dw__divide_up(a, b) * b; }

#endif
