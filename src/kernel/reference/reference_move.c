/* Primitives that move elements. Each one describes the positions of its elements as a view of its operand or
 * of its result, and copies. */
#include "kernel/reference/index.h"
#include "kernel/reference/primitives.h"
#include "kernel/reference/scalar.h"
#include <string.h>

void dw__tensor_copy(dw__tensor *to, const dw__tensor *from) {
    size_t bytes = dw_dtype_bytes(from->dtype);
    if (dw__tensor_count(from) == 0) return;
    if (dw__dtype_is_code(from->dtype)) { /* contiguous; elements may share a byte */
        memcpy(to->data, from->data, dw__tensor_bytes(from));
        return;
    }
    int64_t to_index[DW_MAX_RANK] = {0}, from_index[DW_MAX_RANK] = {0};
    do {
        memcpy(dw__element(to, dw__index_offset(to->rank, to->stride, to_index)),
               dw__element(from, dw__index_offset(from->rank, from->stride, from_index)), bytes);
        dw__index_next(to->rank, to->shape, to_index);
    } while (dw__index_next(from->rank, from->shape, from_index));
}

dw__tensor dw__tensor_broadcast(const dw__tensor *tensor, int rank, const int64_t *shape) {
    dw__tensor view = *tensor;
    view.rank = rank;
    int added = rank - tensor->rank;
    for (int axis = 0; axis < rank; axis++) {
        view.shape[axis] = shape[axis];
        bool stretched = axis < added || tensor->shape[axis - added] == 1;
        view.stride[axis] = stretched ? 0 : tensor->stride[axis - added];
    }
    return view;
}

dw_status dw__reference_reshape(const dw__call *call, void *scratch) {
    (void)scratch;
    dw__tensor out = call->outputs[0];
    if (out.data) dw__tensor_copy(&out, &call->inputs[0]);
    return DW_OK;
}

dw_status dw__reference_permute(const dw__call *call, void *scratch) {
    (void)scratch;
    dw__tensor out = call->outputs[0], view = call->inputs[0];
    const int64_t *perm = dw__call_attr(call, DW_ATTR_KEY_PERM)->list;
    for (int axis = 0; axis < view.rank; axis++) {
        view.shape[axis] = call->inputs[0].shape[perm[axis]];
        view.stride[axis] = call->inputs[0].stride[perm[axis]];
    }
    if (out.data) dw__tensor_copy(&out, &view);
    return DW_OK;
}

dw_status dw__reference_broadcast(const dw__call *call, void *scratch) {
    (void)scratch;
    dw__tensor out = call->outputs[0];
    dw__tensor view = dw__tensor_broadcast(&call->inputs[0], out.rank, out.shape);
    if (out.data) dw__tensor_copy(&out, &view);
    return DW_OK;
}

dw_status dw__reference_slice(const dw__call *call, void *scratch) {
    (void)scratch;
    dw__tensor out = call->outputs[0], view = call->inputs[0];
    const dw_attr *start = dw__call_attr(call, DW_ATTR_KEY_START);
    const dw_attr *step = dw__call_attr(call, DW_ATTR_KEY_STEP);
    if (!out.data || dw__tensor_count(&out) == 0) return DW_OK;
    int64_t first = dw__index_offset(view.rank, view.stride, start->list);
    view.data = dw__element(&view, first);
    for (int axis = 0; axis < view.rank; axis++) {
        view.shape[axis] = out.shape[axis];
        if (step) view.stride[axis] *= step->list[axis];
    }
    dw__tensor_copy(&out, &view);
    return DW_OK;
}

dw_status dw__reference_pad(const dw__call *call, void *scratch) {
    dw__tensor inside = call->outputs[0];
    if (!inside.data) return DW_OK;
    DW_RETURN_IF_FAILED(dw__reference_constant(call, scratch)); /* the same attribute: value */
    const int64_t *low = dw__call_attr(call, DW_ATTR_KEY_LOW)->list;
    const dw__tensor *in = &call->inputs[0];
    if (dw__tensor_count(in) == 0) return DW_OK;
    inside.data = dw__element(&inside, dw__index_offset(inside.rank, inside.stride, low));
    memcpy(inside.shape, in->shape, sizeof inside.shape);
    dw__tensor_copy(&inside, in);
    return DW_OK;
}

dw_status dw__reference_concat(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *out = &call->outputs[0];
    int64_t axis = dw__call_int(call, DW_ATTR_KEY_AXIS, 0), position = 0;
    if (!out->data) return DW_OK;
    for (uint32_t i = 0; i < call->input_count; i++) {
        const dw__tensor *in = &call->inputs[i];
        dw__tensor part = *out;
        part.shape[axis] = in->shape[axis];
        if (dw__tensor_count(in) > 0) {
            part.data = dw__element(out, position * out->stride[axis]);
            dw__tensor_copy(&part, in);
        }
        position += in->shape[axis];
    }
    return DW_OK;
}
