#include "kernel/elementwise_body.h"
#include <string.h>

dw_dtype dw__body_operand_dtype(const dw__body_code *code, int i) {
    if (code->op == DW_OP_SELECT) return i == 0 ? DW_BOOL : code->dtype;
    return code->operand_dtype;
}

void dw__broadcast_strides(const dw__tensor *in, const dw__tensor *shape, int64_t *stride) {
    for (int axis = 0; axis < shape->rank; axis++) {
        int own = axis - (shape->rank - in->rank);
        bool repeats = own < 0 || (in->shape[own] == 1 && shape->shape[axis] != 1);
        stride[axis] = repeats ? 0 : in->stride[own];
    }
}

/* Makes a body with one instruction, the call's own operation. */
static void body_of_operation(const dw__call *call, dw__body *body) {
    dw__body_code *code = &body->code[0];
    body->input_count = (uint16_t)call->input_count;
    body->code_count = body->output_count = 1;
    code->op = call->op;
    code->dtype = call->outputs[0].dtype;
    code->operand_dtype = call->inputs[0].dtype;
    code->operand_count = (uint8_t)call->input_count;
    const dw_attr *approximate = dw__call_attr(call, DW_ATTR_KEY_APPROXIMATE);
    code->tanh_approximation = approximate && strcmp(approximate->string, "tanh") == 0;
    for (uint32_t i = 0; i < call->input_count; i++)
        code->operands[i] = (dw__body_operand){DW_BODY_INPUT, (uint16_t)i, 0.0};
    if (call->op == DW_OP_DROPOUT) {
        double p = dw__call_float(call, DW_ATTR_KEY_P, 0.0);
        double stream = (double)dw__call_int(call, DW_ATTR_KEY_STREAM, 0);
        code->operand_count = 4;
        code->operands[2] = (dw__body_operand){DW_BODY_CONSTANT, 0, p};
        code->operands[3] = (dw__body_operand){DW_BODY_CONSTANT, 0, stream};
    }
    body->outputs[0] = (dw__body_operand){DW_BODY_RESULT, 0, 0.0};
}

dw_status dw__elementwise_body(const dw__call *call, dw__body *body) {
    if (call->op != DW_OP_FUSED) {
        body_of_operation(call, body);
        return DW_OK;
    }
    const dw_attr *text = dw__call_attr(call, DW_ATTR_KEY_BODY);
    if (!text)
        return dw__fail(DW_INVALID_ARGUMENT, "fused: the node has no attribute `body`; give its "
                                             "program, for example \"t0=exp(i0);out(t0)\"");
    dw_dtype dtypes[DW_MAX_INPUTS];
    for (uint32_t i = 0; i < call->input_count; i++) dtypes[i] = call->inputs[i].dtype;
    return dw__body_parse(text->string, call->input_count, dtypes, body);
}
