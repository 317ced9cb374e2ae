/* Batched matmul. Both operands are unpacked to double, so that the loops run over plain rows and the sums
 * are not rounded to the result's dtype. */
#include "kernel/reference/index.h"
#include "kernel/reference/primitives.h"
#include "kernel/reference/scalar.h"
#include <string.h>

typedef struct matmul_room {
    double *a;   /* [M, K] */
    double *b;   /* [K, N] */
    double *row; /* [N] */
} matmul_room;

/* Unpacks the matrix of `tensor` that begins at `offset`, optionally transposed, as [rows, columns]. */
static void unpack(const dw__tensor *tensor, int64_t offset, bool transposed, int64_t rows,
                   int64_t columns, double *out) {
    int64_t row_stride = tensor->stride[tensor->rank - (transposed ? 1 : 2)];
    int64_t column_stride = tensor->stride[tensor->rank - (transposed ? 2 : 1)];
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++)
            out[i * columns + j] = dw__scalar_load(tensor->data, tensor->dtype,
                                                   offset + i * row_stride + j * column_stride)
                                       .number;
}

static void multiply(const matmul_room *room, int64_t rows, int64_t columns, int64_t length,
                     const dw__tensor *out, int64_t offset) {
    for (int64_t i = 0; i < rows; i++) {
        memset(room->row, 0, (size_t)columns * sizeof *room->row);
        for (int64_t k = 0; k < length; k++)
            for (int64_t j = 0; j < columns; j++)
                room->row[j] += room->a[i * length + k] * room->b[k * columns + j];
        for (int64_t j = 0; j < columns; j++)
            dw__scalar_store(out->data, out->dtype,
                             offset + i * out->stride[out->rank - 2] +
                                 j * out->stride[out->rank - 1],
                             (dw__scalar){.number = room->row[j]});
    }
}

dw_status dw__reference_matmul(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *a = &call->inputs[0], *b = &call->inputs[1], *out = &call->outputs[0];
    bool transpose_a = dw__call_int(call, DW_ATTR_KEY_TRANSPOSE_A, 0) != 0;
    bool transpose_b = dw__call_int(call, DW_ATTR_KEY_TRANSPOSE_B, 0) != 0;
    int batch_rank = out->rank - 2;
    int64_t rows = out->shape[batch_rank], columns = out->shape[batch_rank + 1];
    int64_t length = a->shape[a->rank - (transpose_a ? 2 : 1)];
    if (!out->data || dw__tensor_count(out) == 0) return DW_OK;

    size_t numbers = (size_t)(rows * length + length * columns + columns);
    matmul_room room;
    room.a = dw__malloc(numbers * sizeof *room.a);
    if (!room.a) return dw__fail_memory("unpacked matrices", numbers * sizeof *room.a);
    room.b = room.a + rows * length;
    room.row = room.b + length * columns;
    int64_t index[DW_MAX_RANK] = {0};
    do {
        unpack(a, dw__index_offset(batch_rank, a->stride, index), transpose_a, rows, length,
               room.a);
        unpack(b, dw__index_offset(batch_rank, b->stride, index), transpose_b, length, columns,
               room.b);
        multiply(&room, rows, columns, length, out,
                 dw__index_offset(batch_rank, out->stride, index));
    } while (dw__index_next(batch_rank, out->shape, index));
    dw__free(room.a);
    return DW_OK;
}
