/* Lowering: symbolic shapes and attributes at a plan's sizes. */
#include "engine/lowering.h"
#include <string.h>

dw_status dw__lower_type(const dw__lowering *l, dw_value value, dw__tensor *tensor) {
    const dw__value_record *record = value_of(l, value);
    memset(tensor, 0, sizeof *tensor);
    tensor->dtype = record->dtype;
    tensor->rank = record->rank;
    int64_t bytes = (dw_dtype_bits(record->dtype) + 7) / 8; /* of an element, at most */
    for (int axis = 0; axis < record->rank; axis++) {
        dw_status status =
            dw_dim_eval(l->graph, record->shape[axis], l->plan->sizes, &tensor->shape[axis]);
        if (status != DW_OK) {
            return dw__fail_prefix(status, "axis %d of %s", axis, record->name);
        }
        /* A zero dim makes the tensor empty, but the others must still not overflow. */
        int64_t factor = tensor->shape[axis] ? tensor->shape[axis] : 1;
        if (__builtin_mul_overflow(bytes, factor, &bytes) || bytes > INT64_MAX / 4) {
            return dw__fail(DW_SHAPE, "%s has more than 2^61 bytes at these sizes", record->name);
        }
    }
    dw__tensor_set_contiguous(tensor);
    return DW_OK;
}

dw_status dw__lower_attrs(dw__lowering *l, dw_node node, const dw_attr **attrs) {
    const dw__node_record *record = record_of(l, node);
    *attrs = record->attrs;
    bool has_dims = false;
    for (uint32_t i = 0; i < record->attr_count; i++) {
        has_dims |= dw_attr_kind_of(record->attrs[i].key) == DW_ATTR_DIMS;
    }
    if (!has_dims) return DW_OK;
    dw_attr *copy = allocate(l, record->attr_count * sizeof *copy);
    if (!copy) return dw__fail_memory("attributes", record->attr_count * sizeof *copy);
    for (uint32_t i = 0; i < record->attr_count; i++) {
        copy[i] = record->attrs[i];
        if (dw_attr_kind_of(copy[i].key) != DW_ATTR_DIMS) continue;
        int64_t *list = allocate(l, copy[i].count * sizeof *list);
        if (!list) return dw__fail_memory("attributes", copy[i].count * sizeof *list);
        for (uint32_t j = 0; j < copy[i].count; j++) {
            DW_RETURN_IF_FAILED(
                dw_dim_eval(l->graph, record->attrs[i].list[j], l->plan->sizes, &list[j]));
        }
        copy[i].list = list;
    }
    *attrs = copy;
    return DW_OK;
}
