#include "graph/internal.h"
#include "kernel/kernel.h"
#include <string.h>

dw_status dw__value_tensor_at(const dw_graph *graph, dw_value value, const int64_t *sizes,
                              dw__tensor *tensor) {
    const dw__value_record *record = &graph->values.items[value];
    memset(tensor, 0, sizeof *tensor);
    tensor->dtype = record->dtype;
    tensor->rank = record->rank;
    int64_t bytes = (dw_dtype_bits(record->dtype) + 7) / 8; /* of an element, at most */
    for (int axis = 0; axis < record->rank; axis++) {
        dw_status status = dw_dim_eval(graph, record->shape[axis], sizes, &tensor->shape[axis]);
        if (status != DW_OK) return dw__fail_prefix(status, "axis %d of %s", axis, record->name);
        /* A zero dim makes the tensor empty, but the others must still not overflow. */
        int64_t factor = tensor->shape[axis] ? tensor->shape[axis] : 1;
        if (__builtin_mul_overflow(bytes, factor, &bytes) || bytes > INT64_MAX / 4)
            return dw__fail(DW_SHAPE, "%s has more than 2^61 bytes at these sizes", record->name);
    }
    dw__tensor_set_contiguous(tensor);
    return DW_OK;
}

dw_status dw__node_attrs_at(dw__arena *arena, const dw_graph *graph, dw_node node,
                            const int64_t *sizes, const dw_attr **attrs) {
    const dw__node_record *record = &graph->nodes.items[node];
    *attrs = record->attrs;
    bool has_dims = false;
    for (uint32_t i = 0; i < record->attr_count; i++)
        has_dims |= dw_attr_kind_of(record->attrs[i].key) == DW_ATTR_DIMS;
    if (!has_dims) return DW_OK;
    dw_attr *copy = dw__arena_alloc(arena, record->attr_count * sizeof *copy);
    if (!copy) return dw__fail_memory("attributes", record->attr_count * sizeof *copy);
    for (uint32_t i = 0; i < record->attr_count; i++) {
        copy[i] = record->attrs[i];
        if (dw_attr_kind_of(copy[i].key) != DW_ATTR_DIMS) continue;
        int64_t *numbers = dw__arena_alloc(arena, copy[i].count * sizeof *numbers);
        if (!numbers) return dw__fail_memory("attributes", copy[i].count * sizeof *numbers);
        for (uint32_t j = 0; j < copy[i].count; j++)
            DW_RETURN_IF_FAILED(dw_dim_eval(graph, copy[i].list[j], sizes, &numbers[j]));
        copy[i].list = numbers;
    }
    *attrs = copy;
    return DW_OK;
}
