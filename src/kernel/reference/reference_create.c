/* Primitives that create a tensor from attributes only. */
#include "kernel/reference/index.h"
#include "kernel/reference/primitives.h"
#include "kernel/reference/scalar.h"
#include "number/philox.h"

static void fill(const dw__tensor *out, dw__scalar value) {
    if (dw__tensor_count(out) == 0) return;
    int64_t index[DW_MAX_RANK] = {0};
    do {
        dw__scalar_store(out->data, out->dtype, dw__index_offset(out->rank, out->stride, index),
                         value);
    } while (dw__index_next(out->rank, out->shape, index));
}

dw_status dw__reference_constant(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *out = &call->outputs[0];
    if (!out->data) return DW_OK;
    fill(out, dw__scalar_of(dw__call_float(call, DW_ATTR_KEY_VALUE, 0.0), out->dtype));
    return DW_OK;
}

dw_status dw__reference_size(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *out = &call->outputs[0];
    if (!out->data) return DW_OK;
    dw__scalar size = {.integer = dw__call_attr(call, DW_ATTR_KEY_SIZE)->list[0]};
    dw__scalar_store(out->data, out->dtype, 0, dw__scalar_cast(size, DW_I64, out->dtype));
    return DW_OK;
}

dw_status dw__reference_iota(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *out = &call->outputs[0];
    int64_t axis = dw__call_int(call, DW_ATTR_KEY_AXIS, 0);
    if (!out->data || dw__tensor_count(out) == 0) return DW_OK;
    int64_t index[DW_MAX_RANK] = {0};
    do {
        dw__scalar position = {.integer = index[axis]};
        dw__scalar_store(out->data, out->dtype, dw__index_offset(out->rank, out->stride, index),
                         dw__scalar_cast(position, DW_I64, out->dtype));
    } while (dw__index_next(out->rank, out->shape, index));
    return DW_OK;
}

dw_status dw__reference_random_uniform(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *seed = &call->inputs[0], *out = &call->outputs[0];
    if (!out->data || dw__tensor_count(out) == 0) return DW_OK;
    int64_t seed0 = ((const int64_t *)seed->data)[0];
    int64_t seed1 = ((const int64_t *)seed->data)[seed->stride[0]];
    int64_t stream = dw__call_int(call, DW_ATTR_KEY_STREAM, 0);
    int64_t index[DW_MAX_RANK] = {0};
    uint64_t element = 0;
    do {
        dw__scalar uniform = {.number = dw__philox_uniform(seed0, seed1, stream, element++)};
        dw__scalar_store(out->data, out->dtype, dw__index_offset(out->rank, out->stride, index),
                         uniform);
    } while (dw__index_next(out->rank, out->shape, index));
    return DW_OK;
}
