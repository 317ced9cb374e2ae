/* Reductions along axes. Sums and products of floating-point numbers accumulate in double. */
#include "kernel/reference/index.h"
#include "kernel/reference/primitives.h"
#include "kernel/reference/scalar.h"
#include <inttypes.h>
#include <math.h>

static dw__scalar identity(dw_op op, dw_dtype dtype) {
    bool is_float = dw__dtype_is_float(dtype);
    int64_t most = dtype == DW_BOOL ? 1 : dtype == DW_I32 ? INT32_MAX : INT64_MAX;
    int64_t least = dtype == DW_BOOL ? 0 : dtype == DW_I32 ? INT32_MIN : INT64_MIN;
    switch (op) {
    case DW_OP_REDUCE_PROD:
        return is_float ? (dw__scalar){.number = 1.0} : (dw__scalar){.integer = 1};
    case DW_OP_REDUCE_MAX:
        return is_float ? (dw__scalar){.number = -INFINITY} : (dw__scalar){.integer = least};
    case DW_OP_REDUCE_MIN:
        return is_float ? (dw__scalar){.number = INFINITY} : (dw__scalar){.integer = most};
    default: return (dw__scalar){.integer = 0}; /* also the bits of 0.0 */
    }
}

static dw_op combining(dw_op op) {
    switch (op) {
    case DW_OP_REDUCE_PROD: return DW_OP_MUL;
    case DW_OP_REDUCE_MAX: return DW_OP_MAX;
    case DW_OP_REDUCE_MIN: return DW_OP_MIN;
    default: return DW_OP_ADD;
    }
}

/* Strides of a contiguous result along x's axes: 0 on reduced axes. Returns the number of elements of the result. */
static int64_t result_strides(const dw__tensor *x, uint32_t axis_count, const int64_t *axes,
                              int64_t *stride) {
    bool reduced[DW_MAX_RANK] = {false};
    for (uint32_t i = 0; i < axis_count; i++) reduced[axes[i]] = true;
    int64_t count = 1;
    for (int axis = x->rank - 1; axis >= 0; axis--) {
        stride[axis] = reduced[axis] ? 0 : count;
        if (!reduced[axis]) count *= x->shape[axis];
    }
    return count;
}

static void store_all(const dw__tensor *out, const dw__scalar *values, int64_t count) {
    int64_t index[DW_MAX_RANK] = {0};
    for (int64_t i = 0; i < count; i++) {
        dw__scalar_store(out->data, out->dtype, dw__index_offset(out->rank, out->stride, index),
                         values[i]);
        dw__index_next(out->rank, out->shape, index);
    }
}

dw_status dw__reference_reduce(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *x = &call->inputs[0], *out = &call->outputs[0];
    const dw_attr *axes = dw__call_attr(call, DW_ATTR_KEY_AXES);
    if (!out->data) return DW_OK;
    int64_t stride[DW_MAX_RANK];
    int64_t count = result_strides(x, axes->count, axes->list, stride);
    dw__scalar *values = dw__malloc((size_t)count * sizeof *values);
    if (!values) return dw__fail_memory("a reduction", (size_t)count * sizeof *values);
    dw_status status = DW_OK;
    for (int64_t i = 0; i < count; i++) values[i] = identity(call->op, x->dtype);
    int64_t index[DW_MAX_RANK] = {0};
    if (dw__tensor_count(x) > 0) {
        do {
            dw__scalar *value = &values[dw__index_offset(x->rank, stride, index)];
            int64_t from = dw__index_offset(x->rank, x->stride, index);
            dw__scalar operands[2] = {*value, dw__scalar_load(x->data, x->dtype, from)};
            DW_TRY(dw__scalar_apply(combining(call->op), false, x->dtype, operands, value));
        } while (dw__index_next(x->rank, x->shape, index));
    }
    store_all(out, values, count);
cleanup:
    dw__free(values);
    return status;
}

/* Index of the first largest (or smallest) element. A NaN counts as both. */
dw_status dw__reference_arg(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *x = &call->inputs[0], *out = &call->outputs[0];
    int64_t axis = dw__call_int(call, DW_ATTR_KEY_AXIS, 0), length = x->shape[axis];
    bool is_float = dw__dtype_is_float(x->dtype), least = call->op == DW_OP_ARG_MIN;
    if (!out->data || dw__tensor_count(out) == 0) return DW_OK;
    if (length == 0)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "%s: axis %" PRId64 " has no elements to choose from; "
                        "give it at least one",
                        dw_op_name(call->op), axis);
    dw__tensor rows = *x; /* x with the axis shrunk to its first element */
    rows.shape[axis] = 1;
    int64_t index[DW_MAX_RANK] = {0}, out_index[DW_MAX_RANK] = {0};
    do {
        int64_t first = dw__index_offset(x->rank, x->stride, index), best = 0;
        dw__scalar extreme = dw__scalar_load(x->data, x->dtype, first);
        for (int64_t i = 1; i < length; i++) {
            if (is_float && isnan(extreme.number)) break;
            dw__scalar value = dw__scalar_load(x->data, x->dtype, first + i * x->stride[axis]);
            int order = dw__scalar_compare(value, extreme, is_float);
            bool nan = is_float && isnan(value.number);
            if (nan || (least ? order < 0 : order > 0)) {
                extreme = value;
                best = i;
            }
        }
        dw__scalar_store(out->data, out->dtype, dw__index_offset(out->rank, out->stride, out_index),
                         (dw__scalar){.integer = best});
        dw__index_next(out->rank, out->shape, out_index);
    } while (dw__index_next(rows.rank, rows.shape, index));
    return DW_OK;
}

dw_status dw__reference_cumsum(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *x = &call->inputs[0], *out = &call->outputs[0];
    int64_t axis = dw__call_int(call, DW_ATTR_KEY_AXIS, 0), length = x->shape[axis];
    bool reverse = dw__call_int(call, DW_ATTR_KEY_REVERSE, 0) != 0;
    if (!out->data || dw__tensor_count(out) == 0) return DW_OK;
    dw__tensor rows = *x;
    rows.shape[axis] = 1;
    int64_t index[DW_MAX_RANK] = {0};
    do {
        int64_t from = dw__index_offset(x->rank, x->stride, index);
        int64_t to = dw__index_offset(out->rank, out->stride, index);
        dw__scalar sum = identity(DW_OP_REDUCE_SUM, x->dtype);
        for (int64_t i = 0; i < length; i++) {
            int64_t at = reverse ? length - 1 - i : i;
            dw__scalar operands[2] = {
                sum, dw__scalar_load(x->data, x->dtype, from + at * x->stride[axis])};
            DW_RETURN_IF_FAILED(dw__scalar_apply(DW_OP_ADD, false, x->dtype, operands, &sum));
            dw__scalar_store(out->data, out->dtype, to + at * out->stride[axis], sum);
        }
    } while (dw__index_next(rows.rank, rows.shape, index));
    return DW_OK;
}
