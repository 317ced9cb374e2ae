/* Elementwise primitives and the loop over elements. */
#include "kernel/reference/index.h"
#include "kernel/reference/primitives.h"
#include "kernel/reference/scalar.h"
#include <string.h>

enum { MAX_OPERANDS = 3 };

dw_status dw__reference_elementwise(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *out = &call->outputs[0];
    if (!out->data || dw__tensor_count(out) == 0) return DW_OK;
    /* The first operand of select is its condition, so the dtype comes from the second. */
    dw_dtype dtype = call->inputs[call->op == DW_OP_SELECT ? 1 : 0].dtype;
    int64_t index[DW_MAX_RANK] = {0};
    do {
        dw__scalar operands[MAX_OPERANDS] = {{.integer = 0}}, result;
        for (uint32_t i = 0; i < call->input_count && i < MAX_OPERANDS; i++) {
            const dw__tensor *in = &call->inputs[i];
            operands[i] =
                dw__scalar_load(in->data, in->dtype, dw__index_offset(in->rank, in->stride, index));
        }
        DW_RETURN_IF_FAILED(dw__scalar_apply(call->op, false, dtype, operands, &result));
        dw__scalar_store(out->data, out->dtype, dw__index_offset(out->rank, out->stride, index),
                         result);
    } while (dw__index_next(out->rank, out->shape, index));
    return DW_OK;
}

dw_status dw__reference_cast(const dw__call *call, void *scratch) {
    (void)scratch;
    const dw__tensor *in = &call->inputs[0], *out = &call->outputs[0];
    if (!out->data || dw__tensor_count(out) == 0) return DW_OK;
    int64_t index[DW_MAX_RANK] = {0};
    do {
        dw__scalar value =
            dw__scalar_load(in->data, in->dtype, dw__index_offset(in->rank, in->stride, index));
        dw__scalar_store(out->data, out->dtype, dw__index_offset(out->rank, out->stride, index),
                         dw__scalar_cast(value, in->dtype, out->dtype));
    } while (dw__index_next(out->rank, out->shape, index));
    return DW_OK;
}
