/* sort and top_k: sorts every row completely. Equal elements are ordered by position (stable). */
#include "kernel/reference/index.h"
#include "kernel/reference/primitives.h"
#include "kernel/reference/scalar.h"
#include <stdlib.h>

typedef struct sort_item {
    dw__scalar value;
    int64_t position;
    bool is_float, descending; /* the same for a whole row; qsort has no context argument */
} sort_item;

static int by_value_then_position(const void *left, const void *right) {
    const sort_item *a = left, *b = right;
    int order = dw__scalar_compare(a->value, b->value, a->is_float);
    if (order != 0) return a->descending ? -order : order;
    return (a->position > b->position) - (a->position < b->position);
}

static void write_row(const dw__tensor *out, const int64_t *index, int64_t axis, int64_t position,
                      dw__scalar value) {
    if (!out->data) return;
    int64_t to = dw__index_offset(out->rank, out->stride, index) + position * out->stride[axis];
    dw__scalar_store(out->data, out->dtype, to, value);
}

dw_status dw__reference_sort(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *x = &call->inputs[0], *values = &call->outputs[0];
    const dw__tensor *positions = &call->outputs[1];
    int64_t axis = dw__call_int(call, DW_ATTR_KEY_AXIS, 0), length = x->shape[axis];
    bool is_top_k = call->op == DW_OP_TOP_K;
    bool descending = is_top_k || dw__call_int(call, DW_ATTR_KEY_DESCENDING, 0) != 0;
    int64_t kept = is_top_k ? dw__call_attr(call, DW_ATTR_KEY_SIZE)->list[0] : length;
    if (dw__tensor_count(x) == 0) return DW_OK;
    sort_item *items = dw__malloc((size_t)length * sizeof *items);
    if (!items) return dw__fail_memory("a row to sort", (size_t)length * sizeof *items);
    dw__tensor rows = *x;
    rows.shape[axis] = 1;
    int64_t index[DW_MAX_RANK] = {0};
    do {
        int64_t from = dw__index_offset(x->rank, x->stride, index);
        for (int64_t i = 0; i < length; i++) {
            items[i] = (sort_item){dw__scalar_load(x->data, x->dtype, from + i * x->stride[axis]),
                                   i, dw__dtype_is_float(x->dtype), descending};
        }
        qsort(items, (size_t)length, sizeof *items, by_value_then_position);
        for (int64_t i = 0; i < kept; i++) {
            write_row(values, index, axis, i, items[i].value);
            write_row(positions, index, axis, i, (dw__scalar){.integer = items[i].position});
        }
    } while (dw__index_next(rows.rank, rows.shape, index));
    dw__free(items);
    return DW_OK;
}
