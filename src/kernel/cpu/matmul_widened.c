/* GEMM of BF16 operands without AMX: copies both to F32 and multiplies there. The product of two BF16 numbers
 * is exact in F32 except for underflow, so only the sums round. */
#include "base/pool.h"
#include "kernel/cpu/cpu_matmul.h"
#include "number/half.h"

/* An operand's copy: batches one after the other, in the order that the operand has in memory. */
typedef struct widened {
    const dw__matmul *p;
    const uint16_t *from;
    float *to;
    const int64_t *batch_strides;
    int64_t rows, row_stride, count, stride; /* rows of `count` elements */
} widened;

static void widen_row(void *context, int64_t index, int worker) {
    (void)worker;
    const widened *w = context;
    const uint16_t *from = w->from + index % w->rows * w->row_stride +
                           dw__matmul_batch_offset(w->p, w->batch_strides, index / w->rows);
    float *to = w->to + index * w->count;
    if (w->stride == 1)
        for (int64_t i = 0; i < w->count; i++) to[i] = dw__bf16_to_f32(from[i]);
    else
        for (int64_t i = 0; i < w->count; i++) to[i] = dw__bf16_to_f32(from[i * w->stride]);
}

/* `outer`: rows of A or columns of B. */
static widened describe(const dw__matmul *p, const uint16_t *from, const int64_t *batch_strides,
                        int64_t outer, int64_t stride, int64_t k_stride) {
    widened w = {.p = p, .from = from, .batch_strides = batch_strides};
    bool along_k = k_stride == 1 || stride != 1;
    w.rows = along_k ? outer : p->k, w.count = along_k ? p->k : outer;
    w.row_stride = along_k ? stride : k_stride, w.stride = along_k ? k_stride : stride;
    return w;
}

/* Describes the GEMM of the copies, and how each copy is made. */
static dw__matmul widen(const dw__matmul *p, widened *a, widened *b) {
    dw__matmul out = *p;
    *a = describe(p, p->a_bf16, p->a_batch, p->m, p->a_row, p->a_k);
    *b = describe(p, p->b_bf16, p->b_batch, p->n, p->b_column, p->b_k);
    out.bf16 = false;
    bool a_along_k = p->a_k == 1 || p->a_row != 1, b_along_k = p->b_k == 1 || p->b_column != 1;
    out.a_row = a_along_k ? p->k : 1, out.a_k = a_along_k ? 1 : p->m;
    out.b_column = b_along_k ? p->k : 1, out.b_k = b_along_k ? 1 : p->n;
    for (int axis = p->batch_rank - 1; axis >= 0; axis--) {
        bool last = axis == p->batch_rank - 1;
        out.a_batch[axis] = last ? p->m * p->k : out.a_batch[axis + 1] * p->batch_shape[axis + 1];
        out.b_batch[axis] = last ? p->n * p->k : out.b_batch[axis + 1] * p->batch_shape[axis + 1];
    }
    return out;
}

static size_t copy_floats(const dw__matmul *p, int64_t outer) {
    return (size_t)dw__round_up(p->batches * outer * p->k, 16);
}

size_t dw__matmul_widened_scratch(const dw__matmul *p, bool passing) {
    widened a, b;
    dw__matmul copy = widen(p, &a, &b);
    return (copy_floats(p, p->m) + copy_floats(p, p->n)) * sizeof(float) +
           dw__matmul_scratch(&copy, passing);
}

size_t dw__matmul_widened_library(const dw__matmul *p, bool passing) {
    widened a, b;
    dw__matmul copy = widen(p, &a, &b);
    return dw__matmul_library(&copy, passing);
}

dw_status dw__matmul_widened_run(const dw__matmul *p, dw__epilogue *then, void *scratch) {
    widened a, b;
    dw__matmul copy = widen(p, &a, &b);
    a.to = scratch;
    b.to = a.to + copy_floats(p, p->m);
    copy.a = a.to;
    copy.b = b.to;
    dw__pool_run(p->batches * a.rows, widen_row, &a);
    dw__pool_run(p->batches * b.rows, widen_row, &b);
    return dw__matmul_run(&copy, then, b.to + copy_floats(p, p->n));
}
