/* Primitives with an index operand, and their transposes. */
#include "kernel/reference/index.h"
#include "kernel/reference/primitives.h"
#include "kernel/reference/scalar.h"
#include <inttypes.h>

/* Returns the integer at `index` of operand `indices`. Fails if it is outside the axis that it selects from. */
static dw_status picked(const dw__call *call, const dw__tensor *indices, const int64_t *index,
                        int64_t bound, int64_t *value) {
    int64_t offset = dw__index_offset(indices->rank, indices->stride, index);
    *value = dw__scalar_load(indices->data, indices->dtype, offset).integer;
    if (*value >= 0 && *value < bound) return DW_OK;
    int64_t position = 0;
    for (int axis = 0; axis < indices->rank; axis++)
        position = position * indices->shape[axis] + index[axis];
    return dw__fail(DW_INDEX,
                    "%s: index %" PRId64 " at position %" PRId64 " is outside [0, %" PRId64
                    "); check the values fed as indices against that size",
                    dw_op_name(call->op), *value, position, bound);
}

/* Splits an index of take's result, [before.., indices.., after..], into the index operand's part and the
 * element of x that take reads and scatter_add adds to. */
static dw_status take_source(const dw__call *call, const dw__tensor *indices, int64_t axis,
                             const int64_t *index, const dw__tensor *x, int64_t *x_offset) {
    int64_t where;
    DW_RETURN_IF_FAILED(picked(call, indices, index + axis, x->shape[axis], &where));
    int64_t offset = where * x->stride[axis];
    for (int64_t i = 0; i < axis; i++) offset += index[i] * x->stride[i];
    for (int64_t i = axis + 1; i < x->rank; i++)
        offset += index[i - 1 + indices->rank] * x->stride[i];
    *x_offset = offset;
    return DW_OK;
}

dw_status dw__reference_take(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *x = &call->inputs[0], *indices = &call->inputs[1], *out = &call->outputs[0];
    int64_t axis = dw__call_int(call, DW_ATTR_KEY_AXIS, 0);
    if (!out->data || dw__tensor_count(out) == 0) return DW_OK;
    int64_t index[DW_MAX_RANK] = {0};
    do {
        int64_t from;
        DW_RETURN_IF_FAILED(take_source(call, indices, axis, index, x, &from));
        dw__scalar_store(out->data, out->dtype, dw__index_offset(out->rank, out->stride, index),
                         dw__scalar_load(x->data, x->dtype, from));
    } while (dw__index_next(out->rank, out->shape, index));
    return DW_OK;
}

/* Element of x for `index` of take_along's result: the coordinate on the axis is replaced. */
static dw_status along_source(const dw__call *call, const dw__tensor *indices, int64_t axis,
                              const int64_t *index, const dw__tensor *x, int64_t *x_offset) {
    int64_t where;
    DW_RETURN_IF_FAILED(picked(call, indices, index, x->shape[axis], &where));
    *x_offset =
        dw__index_offset(x->rank, x->stride, index) + (where - index[axis]) * x->stride[axis];
    return DW_OK;
}

dw_status dw__reference_take_along(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *x = &call->inputs[0], *indices = &call->inputs[1], *out = &call->outputs[0];
    int64_t axis = dw__call_int(call, DW_ATTR_KEY_AXIS, 0);
    if (!out->data || dw__tensor_count(out) == 0) return DW_OK;
    int64_t index[DW_MAX_RANK] = {0};
    do {
        int64_t from;
        DW_RETURN_IF_FAILED(along_source(call, indices, axis, index, x, &from));
        dw__scalar_store(out->data, out->dtype, dw__index_offset(out->rank, out->stride, index),
                         dw__scalar_load(x->data, x->dtype, from));
    } while (dw__index_next(out->rank, out->shape, index));
    return DW_OK;
}

typedef dw_status (*target_rule)(const dw__call *, const dw__tensor *indices, int64_t axis,
                                 const int64_t *index, const dw__tensor *x, int64_t *x_offset);

/* Adds all elements of the updates in row-major order to the elements that `rule` selects. Sums stay in full
 * precision until all are complete. */
static dw_status accumulate(const dw__call *call, target_rule rule) {
    const dw__tensor *indices = &call->inputs[0], *updates = &call->inputs[1];
    const dw__tensor *out = &call->outputs[0];
    int64_t axis = dw__call_int(call, DW_ATTR_KEY_AXIS, 0), count = dw__tensor_count(out);
    bool is_float = dw__dtype_is_float(out->dtype);
    if (!out->data) return DW_OK;
    dw__tensor sum = *out;
    dw__tensor_set_contiguous(&sum);
    dw__scalar *sums = dw__calloc((size_t)count, sizeof *sums); /* all bits zero: 0.0 and 0 */
    if (!sums) return dw__fail_memory("sums of scattered updates", (size_t)count * sizeof *sums);
    dw_status status = DW_OK;
    int64_t index[DW_MAX_RANK] = {0}, at;
    if (dw__tensor_count(updates) > 0) {
        do {
            DW_TRY(rule(call, indices, axis, index, &sum, &at));
            int64_t from = dw__index_offset(updates->rank, updates->stride, index);
            dw__scalar update = dw__scalar_load(updates->data, updates->dtype, from);
            if (is_float)
                sums[at].number += update.number;
            else
                sums[at].integer = (int64_t)((uint64_t)sums[at].integer + (uint64_t)update.integer);
        } while (dw__index_next(updates->rank, updates->shape, index));
    }
    for (int64_t i = 0; i < count; i++) {
        dw__scalar_store(out->data, out->dtype, dw__index_offset(out->rank, out->stride, index),
                         sums[i]);
        dw__index_next(out->rank, out->shape, index);
    }
cleanup:
    dw__free(sums);
    return status;
}

dw_status dw__reference_scatter_add(const dw__call *call, void *scratch) {
    (void)scratch;
    return accumulate(call, take_source);
}

dw_status dw__reference_put_along_add(const dw__call *call, void *scratch) {
    (void)scratch;
    return accumulate(call, along_source);
}
