/* One matrix product, whatever operation asks for it: described by pointers and strides, cut into
 * tasks for the pool. Three ways compute it: AMX (product_amx.c) where the CPU has it and the product
 * is large enough, oneDNN (product_onednn.c) where the build has it and the operands suit it, and our
 * packed loops (product_packed.c), which take every stride and come before oneDNN for large products with
 * AVX2. Operands in BF16 go to AMX as they are, else through copies in F32 (product_widened.c), where products
 * of two of them are exact. */
#ifndef DW_PRODUCT_H
#define DW_PRODUCT_H

#include "kernel/cpu/cpu.h"
#include <stdatomic.h>

/* C[batch][m,n] = A[batch][m,k] * B[batch][k,n] + bias[n], or C += A * B. C is contiguous. */
typedef struct dw__product {
    int64_t m, n, k, batches;
    bool bf16; /* operands are a_bf16, b_bf16 instead of a, b */
    const float *a, *b;
    const uint16_t *a_bf16, *b_bf16;
    const float *bias;                 /* [n] or NULL */
    float *c;                          /* NULL with an epilogue: the product itself is not kept */
    bool accumulate;                   /* C += A * B; then neither bias nor epilogue */
    int64_t a_row, a_k, b_k, b_column; /* strides in elements */
    int batch_rank;
    int64_t batch_shape[DW_MAX_RANK], a_batch[DW_MAX_RANK], b_batch[DW_MAX_RANK];
} dw__product;

/* What follows on each tile while it is in cache; call NULL: nothing. Collects the first failure of
 * the tasks, whose message belongs to another thread. */
typedef struct dw__epilogue {
    const dw__call *call;
    int replaced;
    _Atomic int failed;
    dw_status status;
    char message[512];
} dw__epilogue;

/* Elements from the operand's start to batch number `batch`. */
int64_t dw__product_batch_offset(const dw__product *p, const int64_t *strides, int64_t batch);
/* Rows [row, row+rows) of all batches' C seen as one matrix. A failure is recorded. */
void dw__epilogue_run(dw__epilogue *then, int64_t row, int64_t rows, int64_t column,
                      int64_t columns, const float *tile, int64_t tile_stride);
void dw__epilogue_fail(dw__epilogue *then, dw_status status);
/* DW_OK, or the recorded failure as this thread's. */
dw_status dw__epilogue_status(const dw__epilogue *then);

/* `passing`: C is not kept, so tiles live in scratch. Depends on the shape, never on data. */
size_t dw__product_packed_scratch(const dw__product *p, bool passing);
void dw__product_packed_run(const dw__product *p, dw__epilogue *then, void *scratch);

/* Whether the packed loops are quicker than oneDNN's: by shape and instruction set. */
bool dw__product_packed_preferred(const dw__product *p);

bool dw__product_onednn_fits(const dw__product *p);
size_t dw__product_onednn_scratch(const dw__product *p, bool passing);
size_t dw__product_onednn_library(const dw__product *p, bool passing);
void dw__product_onednn_run(const dw__product *p, dw__epilogue *then, void *scratch);

/* Of operands in BF16, by the best of the ways above for F32. */
size_t dw__product_widened_scratch(const dw__product *p, bool passing);
size_t dw__product_widened_library(const dw__product *p, bool passing);
dw_status dw__product_widened_run(const dw__product *p, dw__epilogue *then, void *scratch);

/* The only one of the three that takes operands in BF16. */
bool dw__product_amx_fits(const dw__product *p, bool passing);
size_t dw__product_amx_scratch(const dw__product *p, bool passing);
void dw__product_amx_run(const dw__product *p, dw__epilogue *then, void *scratch);

/* The best of them. `then` may be NULL. */
size_t dw__product_scratch(const dw__product *p, bool passing);
/* The most that a library allocates by itself meanwhile (kernel.h). */
size_t dw__product_library(const dw__product *p, bool passing);
dw_status dw__product_run(const dw__product *p, dw__epilogue *then, void *scratch);

static inline int64_t dw__min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t dw__divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t dw__round_up(int64_t a, int64_t b) { return dw__divide_up(a, b) * b; }

#endif
